"""Roles of warps in PTX and SASS: who has which registers and barriers, and that ptxas keeps it."""

import re
from itertools import pairwise

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.compiled import CompiledKernel
from minitriton.passes import warp_split
from minitriton.runtime.assembler import assemble, disassemble
from tests.codegen.split_kernels import attention_kernel, matmul_kernel


@triton.jit
def two_products_kernel(a_ptr, b_ptr, c_ptr, n, BM: tl.constexpr, BN: tl.constexpr):
    """More results than a thread has registers for."""
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, 64)
    left, right = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    for k in range(0, n, 64):
        a = tl.load(a_ptr + rm[:, None] * n + (k + rk)[None, :])
        b_ptrs = b_ptr + (k + rk)[:, None] * 2 * BN + rn[None, :]
        left = tl.dot(a, tl.load(b_ptrs), left)
        right = tl.dot(a, tl.load(b_ptrs + BN), right)
    c_ptrs = c_ptr + rm[:, None] * 2 * BN + rn[None, :]
    tl.store(c_ptrs, left)
    tl.store(c_ptrs + BN, right)


def matmul(b_t=False, blocks=(128, 256, 64), dtype=torch.float16, result=torch.float16):
    a, b = (torch.zeros(512, 512, dtype=dtype) for _ in "ab")
    c = torch.zeros(512, 512, dtype=result)
    b = b.T if b_t else b
    strides = (*a.stride(), *b.stride(), *c.stride())
    return matmul_kernel.warmup(
        a, b, c, 512, 512, 512, *strides, *blocks, 8, num_warps=8, num_stages=3, grid=(8,),
        target="sm_90a",
    )  # fmt: skip


def attention(d=128, causal=False):
    q, k, v, out = (torch.zeros(512, d, dtype=torch.bfloat16) for _ in "qkvo")
    return attention_kernel.warmup(
        q, k, v, out, 0.1, 512, d, 128, 128, causal, num_warps=8, num_stages=2, grid=(4, 1),
        target="sm_90a",
    )  # fmt: skip


KERNELS = {
    "matmul": matmul,
    "matmul, [N, K]": lambda: matmul(True),
    "matmul, 128 x 128": lambda: matmul(blocks=(128, 128, 64)),
    "tf32": lambda: matmul(False, (128, 256, 32), torch.float32, torch.float32),
    "tf32, 256 x 128": lambda: matmul(False, (256, 128, 32), torch.float32, torch.float32),
    "tf32, [N, K]": lambda: matmul(True, (128, 256, 32), torch.float32, torch.float32),
    "bytes": lambda: matmul(False, (128, 256, 128), torch.int8, torch.int32),
    "bytes, [N, K]": lambda: matmul(True, (128, 256, 128), torch.int8, torch.int32),
    "attention": attention,
    "attention, 64, causal": lambda: attention(64, True),
}


def lines_of(ptx):
    return [line.strip() for line in ptx.splitlines() if line.strip()[:2] not in ("", "//", ".l")]


def places(lines, pattern):
    return [i for i, line in enumerate(lines) if re.search(pattern, line)]


@pytest.mark.parametrize("name", KERNELS)
def test_registers_move_from_the_producers_to_the_others(name):
    lines = lines_of(KERNELS[name]().ptx)
    (takes,), (gives,) = places(lines, r"setmaxnreg\.inc"), places(lines, r"setmaxnreg\.dec")
    assert "inc.sync.aligned.u32 240" in lines[takes] and "dec.sync.aligned.u32 24;" in lines[gives]
    assert 128 * 24 + 256 * 240 <= 384 * 168  # what the CTA starts with
    header = lines[: places(lines, r"^\{")[0]]
    assert ".reqntid 384, 1, 1" in header and ".maxnreg 168" in header  # ptxas wants to know


@pytest.mark.parametrize("name", KERNELS)
def test_nobody_waits_for_all_warps_after_the_split(name):
    """The producer has left the others, whose barrier counts them alone; turns have two more."""
    lines = lines_of(KERNELS[name]().ptx)
    split = min(places(lines, "setmaxnreg"))
    meets = places(lines, r"\b(bar|barrier)\.(cta\.)?(sync|arrive|red)")
    assert [i for i in meets if i < split and "bar.sync" in lines[i]]
    later = [re.sub(r"\s+", " ", lines[i]) for i in meets if i > split]
    named = r"bar\.sync 1, 256;|bar\.(sync|arrive) %r\d+, 256;"
    straight = name in ("tf32, [N, K]", "bytes, [N, K]")  # threads store their sums
    assert bool(later) != straight and all(re.fullmatch(named, line) for line in later)
    assert any("%r" in line for line in later) == name.startswith("attention")


@pytest.mark.parametrize(("name", "rings"), [("matmul", [3]), ("attention", [1, 2, 2])])
def test_counts_of_the_barriers(name, rings):
    """`full` counts the thread that expects, `empty` one thread of each of eight warps."""
    lines = lines_of(KERNELS[name]().ptx)
    inits = [lines[i] for i in places(lines, r"mbarrier\.init")]
    counts = [int(re.search(r", (\d+);", line)[1]) for line in inits]
    assert sorted(counts) == [1] * sum(rings) + [8] * sum(rings)
    guards = {line.split()[0] for line in inits}
    assert len(guards) == 1 and guards.pop().startswith("@%p")
    assert max(places(lines, r"fence\.mbarrier_init")) > max(places(lines, r"mbarrier\.init"))


@pytest.mark.parametrize("name", ["matmul", "attention"])
def test_one_thread_copies(name):
    """All copies lie between the two setmaxnreg, behind a branch that only thread 256 takes."""
    lines = lines_of(KERNELS[name]().ptx)
    gives, takes = places(lines, r"setmaxnreg\.dec")[0], places(lines, r"setmaxnreg\.inc")[0]
    copies = places(lines, r"cp\.async\.bulk\.tensor\S*\.shared::cluster\.global|expect_tx")
    assert copies and all(gives < i < takes for i in copies)
    test, jump = lines[gives + 1 : gives + 3]
    assert re.match(r"setp\.ne\.\w+\s+%p\d+, %r\d+, 256;", test) and re.match(r"@%p\d+ bra", jump)
    others = places(lines, r"mbarrier\.arrive\.shared")
    assert others and all(i > takes for i in others)


def serialised(sass, ptx):
    """Whether the assembler waits for products one by one, which it does not always say: more waits
    than the program has, or one between any two instructions of a group."""
    code = re.findall(r"GMMA|WARPGROUP\.DEPBAR", sass)
    alone = sum(pair == ("GMMA", "WARPGROUP.DEPBAR") for pair in pairwise(code))
    waits = len(re.findall(r"wgmma\.wait_group", ptx))
    return code.count("WARPGROUP.DEPBAR") > waits or alone == code.count("GMMA")


@pytest.mark.parametrize("name", KERNELS)
def test_ptxas_keeps_products_in_flight(name):
    compiled = KERNELS[name]()
    done = assemble(compiled.ptx, "sm_90a", compiled.name)
    assert (done.spill_stores, done.spill_loads, done.registers) == (0, 0, 168)
    assert not done.warnings
    sass = disassemble(done.cubin)
    assert sass.count("GMMA") and not serialised(sass, compiled.ptx)
    assert re.search(r"USETMAXREG\.DEALLOC\S* 0x18", sass)
    assert re.search(r"USETMAXREG\.TRY_ALLOC\S* UP\d, 0xf0", sass)


def two_products(n):
    a, b, c = (torch.zeros(n, dtype=torch.float16) for n in (128 * n, n * 512, 128 * 512))
    fresh = triton.jit(two_products_kernel.fn)  # which has compiled nothing yet
    return fresh.warmup(
        a, b, c.float(), n, 128, 256, num_warps=8, num_stages=2, grid=(1,), target="sm_90a"
    )


def test_serialised_products_are_compiled_without_a_producer(monkeypatch):
    """Where ptxas says so; the kernel that takes its place is also found in the cache."""
    monkeypatch.setattr(warp_split, "MAX_RESULTS", 1000)
    monkeypatch.setattr(CompiledKernel, "serialized", property(lambda k: "setmaxnreg" in k.ptx))
    first, second = two_products(480), two_products(480)
    for compiled in (first, second):
        assert "setmaxnreg" not in compiled.ptx and compiled.num_warps == 8


def test_products_that_wait_for_calls_are_compiled_without_wgmma(monkeypatch):
    monkeypatch.setattr(
        CompiledKernel, "waits_for_calls", property(lambda k: "wgmma.mma_async" in k.ptx)
    )
    for compiled in (two_products(448), two_products(448)):
        assert "mma.sync" in compiled.ptx and "wgmma" not in compiled.ptx


def test_slots_that_do_not_fit_after_all(monkeypatch):
    """Where allocation finds too little memory the kernel is compiled without a producer."""
    monkeypatch.setenv("MINITRITON_CACHE", "0")
    monkeypatch.setattr(warp_split.WarpSplit, "_room", lambda self, staged: 1 << 30)
    a, b, c = (torch.zeros(1024, 1024, dtype=torch.bfloat16) for _ in range(3))
    compiled = triton.jit(matmul_kernel.fn).warmup(
        a, b, c, 1024, 1024, 1024, 1024, 1, 1024, 1, 1024, 1, 128, 256, 64, 8, num_warps=8,
        num_stages=6, grid=(32,), target="sm_90a",
    )  # fmt: skip
    assert "setmaxnreg" not in compiled.ptx and compiled.shared <= 232448


def test_what_serialised_products_look_like(monkeypatch):
    """With more results than the limit allows: why it is there, and that `serialised` sees it."""
    monkeypatch.setattr(warp_split, "MAX_RESULTS", 1000)
    monkeypatch.setenv("MINITRITON_CACHE", "0")
    with monkeypatch.context() as kept:
        kept.setattr(CompiledKernel, "serialized", False)
        compiled = two_products(512)
    assert "setmaxnreg" in compiled.ptx
    done = assemble(compiled.ptx, "sm_90a", compiled.name)
    assert serialised(disassemble(done.cubin), compiled.ptx)


def test_messages_about_products_are_warnings():
    """ptxas calls them info: C7517 where it adds a wait that the program lacks."""
    ptx = re.sub(r"wgmma\.wait_group\S* 0;", "", matmul().ptx)
    assert any("C7517" in text for text in assemble(ptx, "sm_90a", "matmul_kernel").warnings)
    ptx = re.sub(r"\.maxnreg 168", "", matmul().ptx).replace(".reqntid 384, 1, 1", "")
    assert any("C7508" in text for text in assemble(ptx, "sm_90a", "matmul_kernel").warnings)
