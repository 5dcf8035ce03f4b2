"""Clusters of two in PTX and SASS: who copies what to whom, and where the CTAs meet."""

import re

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.runtime.assembler import assemble, disassemble
from tests.codegen.split_kernels import attention_kernel, matmul_kernel
from tests.codegen.test_warp_split import lines_of, places, serialised


def matmul(b_t=False, blocks=(128, 256, 64), num_warps=8, num_ctas=2, target="sm_90a"):
    a, b, c = (torch.zeros(512, 512, dtype=torch.float16) for _ in "abc")
    b = b.T if b_t else b
    strides = (*a.stride(), *b.stride(), *c.stride())
    return matmul_kernel.warmup(
        a, b, c, 512, 512, 512, *strides, *blocks, 8, num_warps=num_warps, num_stages=4,
        num_ctas=num_ctas, grid=(8,), target=target,
    )  # fmt: skip


def attention(d=128):
    q, k, v, out = (torch.zeros(512, d, dtype=torch.bfloat16) for _ in "qkvo")
    return attention_kernel.warmup(
        q, k, v, out, 0.1, 512, d, 128, 128, False, num_warps=8, num_stages=2, num_ctas=2,
        grid=(4, 1), target="sm_90a",
    )  # fmt: skip


#: By name the kernel, and of each copy that may be shared how many boxes both make, and one alone.
KERNELS = {
    "matmul": (matmul, [(1, 2), (2, 4)]),
    "matmul, [N, K]": (lambda: matmul(True), [(1, 2), (1, 2)]),
    "matmul, 128 x 192": (lambda: matmul(blocks=(128, 192, 64)), [(1, 2), (3, 6)]),
    "ping-pong": (lambda: matmul(False, (128, 128, 64), 4), [(1, 2), (1, 2)]),
    "ping-pong, 128 x 192, [N, K]": (lambda: matmul(True, (128, 192, 64), 4), [(1, 2), (1, 2)]),
    "attention": (attention, [(1, 2), (1, 2)]),
    "attention, 64": (lambda: attention(64), [(1, 2), (1, 2)]),
}
LOAD = r"cp\.async\.bulk\.tensor\S*\.shared::cluster\.global"


@pytest.mark.parametrize("name", KERNELS)
def test_halves_for_both_and_all_for_one(name):
    """Half the boxes go to both, with the mask 3, under a condition; all under its opposite."""
    make, expected = KERNELS[name]
    compiled = make()
    assert compiled.shape.clusters == 2
    lines = lines_of(compiled.ptx)
    loads = [lines[i] for i in places(lines, LOAD)]
    assert all(line.startswith("@%p") for line in loads if "multicast" in line)
    found = {}
    for line in loads:
        guard, map_ = line.split()[0], re.search(r"\[(%rd\d+),", line)[1]
        found.setdefault(map_, {}).setdefault("multicast" in line, []).append(guard)
    if name.startswith("attention"):  # queries are never shared
        found = {map_: kinds for map_, kinds in found.items() if True in kinds}
    counts = [(len(kinds[True]), len(kinds[False])) for kinds in found.values()]
    assert sorted(counts) == sorted(expected)
    for kinds in found.values():
        assert len({*kinds[True]}) == len({*kinds[False]}) == 1 and kinds[True] != kinds[False]
    masks = {re.search(r", (%rs\d+);", line)[1] for line in loads if "multicast" in line}
    (mask,) = masks
    assert [line for line in lines if re.match(rf"mov\.b16\s+{mask}, 3;", line)]


@pytest.mark.parametrize("name", KERNELS)
def test_where_the_ctas_meet(name):
    """Once after the mbarriers are made and before the warps part, once as the last thing."""
    lines = lines_of(KERNELS[name][0]().ptx)
    arrive, wait = places(lines, r"barrier\.cluster\.arrive"), places(lines, r"barrier\.cluster\.w")
    assert [lines[i] for i in arrive] == [
        "barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.arrive.release.aligned;",
    ]  # fmt: skip
    assert all(lines[i] == "barrier.cluster.wait.acquire.aligned;" for i in wait)
    assert max(places(lines, r"fence\.mbarrier_init")) < arrive[0] < wait[0]
    assert wait[0] < min(places(lines, "setmaxnreg")) and arrive[1] < wait[1]
    assert not places(lines[arrive[1] + 1 :], "bulk|mbarrier|st\\.|bar\\.sync")
    assert "ret;" in lines[wait[1] :]


@pytest.mark.parametrize(("name", "warps"), [("matmul", 8), ("ping-pong", 4), ("attention", 8)])
def test_arrivals_at_both(name, warps):
    """Lanes 0 and 1 of each warp; what is copied once for a loop counts its own CTA's warps.
    Attention reads values until the next iteration, which gives their slot back, or the loop ends.
    """
    lines = lines_of(KERNELS[name][0]().ptx)
    counts = [int(re.search(r", (\d+);", lines[i])[1]) for i in places(lines, r"mbarrier\.init")]
    assert {*counts} == {1, 2 * warps} | ({warps} if name == "attention" else set())
    assert len(places(lines, r"mapa\.shared::cluster\.u32")) == 1
    both = places(lines, r"@%p\d+ mbarrier\.arrive\.shared::cluster\.b64")
    own = places(lines, r"mbarrier\.arrive\.shared::cta\.b64")
    assert len(both) == 2 + (name == "attention")
    assert len(own) == (name == "attention")


@pytest.mark.parametrize("name", KERNELS)
def test_ptxas(name):
    compiled = KERNELS[name][0]()
    done = assemble(compiled.ptx, "sm_90a", compiled.name)
    assert (done.spill_stores, done.spill_loads, done.registers) == (0, 0, 168)
    assert not done.warnings
    sass = disassemble(done.cubin)
    assert not serialised(sass, compiled.ptx)
    assert sass.count("UTMALDG.2D.MULTICAST") + sass.count("UTMALDG.3D.MULTICAST") >= 2
    loop = sass[sass.index("GMMA") : sass.rindex("GMMA")]
    assert "MEMBAR" not in loop, "what a warp has only read needs no fence"


@triton.jit
def sum_kernel(x_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + tl.program_id(0) * N + i), 0))


def code(compiled):
    return [line for line in lines_of(compiled.ptx) if not line.startswith("matmul")]


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_that_cannot_are_as_without(target):
    x, out = torch.zeros(8, 256), torch.zeros(8)
    pair, single = (
        sum_kernel.warmup(x, out, 256, num_ctas=n, grid=(8,), target=target) for n in (2, 1)
    )
    assert code(pair) == code(single) and pair.shape == single.shape
    assert "num_ctas 2 reduced to 1" in pair.metadata["remarks"]
    if target != "sm_90a":
        pair, single = (matmul(num_ctas=n, target=target) for n in (2, 1))
        assert code(pair) == code(single) and pair.shape.clusters == 1
