"""Three warpgroups and a producer in PTX and SASS: registers, barriers, widths of products."""

import re

import pytest
import torch

import minitriton as triton
from minitriton.compiled import CompiledKernel
from minitriton.ir.diagnostics import SharedMemoryExceeded
from minitriton.passes import warp_split
from minitriton.runtime.assembler import assemble, disassemble
from tests.codegen.split_kernels import attention_kernel, matmul_kernel
from tests.codegen.test_warp_split import lines_of, places, serialised


def matmul(blocks=(192, 128, 64), b_t=False, dtype=torch.float16, result=None, stages=3):
    a, b = (torch.zeros(512, 512, dtype=dtype) for _ in "ab")
    c = torch.zeros(512, 512, dtype=result or dtype)
    b = b.T if b_t else b
    strides = (*a.stride(), *b.stride(), *c.stride())
    return triton.jit(matmul_kernel.fn).warmup(
        a, b, c, 512, 512, 512, *strides, *blocks, 8, num_warps=12, num_stages=stages, grid=(8,),
        target="sm_90a",
    )  # fmt: skip


def attention(d, columns, causal=False):
    q, k, v, out = (torch.zeros(512, d, dtype=torch.bfloat16) for _ in "qkvo")
    return attention_kernel.warmup(
        q, k, v, out, 0.1, 512, d, 192, columns, causal, num_warps=12, num_stages=2, grid=(3, 1),
        target="sm_90a",
    )  # fmt: skip


KERNELS = {
    "matmul": matmul,
    "matmul, [N, K]": lambda: matmul(b_t=True),
    "matmul, 192 x 256": lambda: matmul((192, 256, 64)),
    "matmul, 192 x 256, [N, K]": lambda: matmul((192, 256, 64), True),
    "matmul, 192 x 160": lambda: matmul((192, 160, 64)),
    "matmul, 384 x 128": lambda: matmul((384, 128, 64)),
    "tf32": lambda: matmul((192, 128, 32), True, torch.float32),
    "bytes": lambda: matmul((192, 128, 128), True, torch.int8, torch.int32),
    "attention": lambda: attention(64, 128),
    "attention, causal": lambda: attention(64, 128, True),
    "attention, 128": lambda: attention(128, 80),
    "attention, 128, causal": lambda: attention(128, 80, True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_registers_move_from_the_producers_to_the_others(name):
    """All that an SM has, 65536, at the launch and after it."""
    lines = lines_of(KERNELS[name]().ptx)
    (takes,), (gives,) = places(lines, r"setmaxnreg\.inc"), places(lines, r"setmaxnreg\.dec")
    assert "inc.sync.aligned.u32 160" in lines[takes] and "dec.sync.aligned.u32 24;" in lines[gives]
    assert 128 * 24 + 384 * 160 <= 512 * 128 == 65536
    header = lines[: places(lines, r"^\{")[0]]
    assert ".reqntid 512, 1, 1" in header and ".maxnreg 128" in header


@pytest.mark.parametrize("name", KERNELS)
def test_groups_meet_by_themselves(name):
    """128 threads at a barrier of the group, or two groups at one of three for turns."""
    lines = lines_of(KERNELS[name]().ptx)
    split = min(places(lines, "setmaxnreg"))
    meets = [i for i in places(lines, r"\bbar(rier)?\.(cta\.)?(sync|arrive|red)") if i > split]
    texts = [re.sub(r"\s+", " ", lines[i]) for i in meets]
    own, turns = r"bar\.sync %r\d+, 128;", r"bar\.(sync|arrive) %r\d+, 256;"
    assert all(re.fullmatch(f"{own}|{turns}", text) for text in texts)
    assert any(re.fullmatch(turns, text) for text in texts) == name.startswith("attention")


@pytest.mark.parametrize("name", ["matmul", "attention"])
def test_counts_of_the_barriers(name):
    lines = lines_of(KERNELS[name]().ptx)
    inits = [lines[i] for i in places(lines, r"mbarrier\.init")]
    assert {re.search(r", (\d+);", line)[1] for line in inits} == {"1", "12"}
    copies = places(lines, r"cp\.async\.bulk\.tensor\S*\.shared::cluster\.global")
    (gives,), (takes,) = places(lines, r"setmaxnreg\.dec"), places(lines, r"setmaxnreg\.inc")
    assert copies and all(gives < i < takes for i in copies)
    assert re.match(r"setp\.ne\.\w+\s+%p\d+, %r\d+, 384;", lines[gives + 1])


@pytest.mark.parametrize(
    ("columns", "parts"),
    [(128, [128]), (192, [192]), (208, [128, 80]), (224, [128, 96]), (256, [128, 128])],
)
@pytest.mark.parametrize("b_t", [False, True])
def test_wide_products_are_made_in_parts(columns, parts, b_t):
    """ptxas takes no instruction with more registers than a thread has at the launch."""
    ptx = matmul((192, columns, 32), b_t).ptx
    found = [int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx)]
    assert found == parts * 2
    assert assemble(ptx, "sm_90a", "matmul_kernel").spill_stores == 0


def test_two_warpgroups_make_them_whole():
    a = torch.zeros(512, 512, dtype=torch.float16)
    compiled = matmul_kernel.warmup(
        a, a, a, 512, 512, 512, *a.stride() * 3, 128, 256, 64, 8, num_warps=8, num_stages=3,
        grid=(8,), target="sm_90a",
    )  # fmt: skip
    assert set(re.findall(r"\.m64n(\d+)k16", compiled.ptx)) == {"256"}


@pytest.mark.parametrize("name", KERNELS)
def test_ptxas_keeps_products_in_flight(name):
    compiled = KERNELS[name]()
    done = assemble(compiled.ptx, "sm_90a", compiled.name)
    assert (done.spill_stores, done.spill_loads, done.registers) == (0, 0, 128)
    assert not done.warnings
    sass = disassemble(done.cubin)
    assert sass.count("GMMA") and not serialised(sass, compiled.ptx)
    assert re.search(r"USETMAXREG\.DEALLOC\S* 0x18", sass)
    assert re.search(r"USETMAXREG\.TRY_ALLOC\S* UP\d, 0xa0", sass)


def test_too_much_memory_is_an_error(monkeypatch):
    """There is no form without a producer that could take its place."""
    monkeypatch.setenv("MINITRITON_CACHE", "0")
    monkeypatch.setattr(warp_split.WarpSplit, "_room", lambda self, staged: 1 << 30)
    with pytest.raises(SharedMemoryExceeded):
        matmul(stages=8)


def test_serialised_products_stay(monkeypatch):
    """Right, if slow."""
    monkeypatch.setenv("MINITRITON_CACHE", "0")
    monkeypatch.setattr(CompiledKernel, "serialized", property(lambda k: True))
    compiled = matmul()
    compiled.assemble()
    assert "setmaxnreg" in compiled.ptx and compiled.num_warps == 16
