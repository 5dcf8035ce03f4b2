"""wgmma in the emulator: right results, and every fence, wait and barrier around it is needed.

The PTX is the compiler's own for a pipelined matmul; each case takes one instruction out of it.
"""

import functools
import re

import numpy as np
import pytest

from minitriton.compiler import compile_kernel
from minitriton.frontend.signature import ParamSpec, Specialization
from minitriton.frontend.source import SourceFunction
from minitriton.ir.context import use
from minitriton.ir.target import Target
from minitriton.options import Options
from minitriton.runtime.emulator import Allocation, Emulator, parameter
from minitriton.runtime.emulator.checks import EmulatorError, UnsupportedPTX
from tests.passes import tile_kernels

M, N, K = 128, 64, 224
BLOCK_M, BLOCK_N, BLOCK_K = 128, 32, 32


@functools.cache
def compiled(warps: int = 8, stages: int = 3):
    pointers = [ParamSpec(name, "pointer", "fp16" if name != "c" else "fp32", None, True)
                for name in "abc"]  # fmt: skip
    scalars = [ParamSpec(n, "scalar", "i32", None, True) for n in ("M", "N", "K", "sa", "sb", "sc")]
    blocks = {"BM": BLOCK_M, "BN": BLOCK_N, "BK": BLOCK_K}
    constants = [ParamSpec(name, "constexpr", value=value) for name, value in blocks.items()]
    spec = Specialization((*pointers, *scalars, *constants), num_warps=warps, num_stages=stages)
    source = SourceFunction(tile_kernels.matmul)
    settings = Options(cache=False, tma=False)  # copies by cp.async
    with use():
        return compile_kernel(source, spec, Target.parse("sm_90a"), settings=settings)


def run(ptx: str, **options) -> float:
    """Largest error of the product, relative to the sum of magnitudes; NaN for a hole."""
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((M, K), (K, N)))
    c = np.full((M, N), np.nan, np.float32)
    kernel = compiled()
    Emulator(ptx).launch(
        kernel.name,
        grid=(M // BLOCK_M, N // BLOCK_N, 1),
        block=(256, 1, 1),
        params=[parameter(x.ctypes.data) for x in (a, b, c)]
        + [parameter(v, "u32") for v in (M, N, K, K, N, N)],
        allocations=[Allocation(x.ctypes.data, x.nbytes, "x") for x in (a, b, c)],
        shared_bytes=kernel.metadata["shared_bytes"],
        **options,
    )
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(np.max(np.abs(c - x @ y) / (np.abs(x) @ np.abs(y))))


POLICIES = [("late", "round_robin"), ("early", "reverse"), ("random", "random")]


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_the_product_is_right_and_clean(landing, schedule):
    assert run(compiled().ptx, landing=landing, schedule=schedule) < 1e-6


def without(pattern: str, which: int) -> str:
    """The PTX of the matmul without the which-th line that matches."""
    ptx = compiled().ptx
    found = list(re.finditer(rf"^\s*{pattern}\s*;$", ptx, re.MULTILINE))
    match = found[which]
    return ptx[: match.start()] + ptx[match.end() :]


DEFECTS = {
    "fence.proxy.async": (r"fence\.proxy\.async\.shared::cta", 0),
    "copies not awaited": (r"cp\.async\.wait_group\s+1", 0),
    "barrier before the products": (r"bar\.sync\s+0", 0),
    "barrier before the next copies": (r"bar\.sync\s+0", 1),
    "wait in the loop": (r"wgmma\.wait_group\.sync\.aligned\s+1", 0),
    "wait after the loop": (r"wgmma\.wait_group\.sync\.aligned\s+0", 0),
    "commit": (r"wgmma\.commit_group\.sync\.aligned", 0),
    "commit of the copies": (r"cp\.async\.commit_group", -1),
    "fence of the registers": (r"wgmma\.fence\.sync\.aligned", 0),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_missing_instruction_is_found(defect):
    ptx = without(*DEFECTS[defect])
    try:
        error = run(ptx, landing="late")
    except EmulatorError as problem:
        assert problem.rule in ("shared-race", "uninitialised-read", "register-race")
    else:
        assert not error < 1e-3


def test_messages_say_what_to_do():
    with pytest.raises(EmulatorError, match=r"no fence.proxy.async followed[\s\S]*help: fence"):
        run(without(*DEFECTS["fence.proxy.async"]))
    with pytest.raises(EmulatorError, match=r"after the wgmma in flight[\s\S]*wgmma.wait_group"):
        run(without(*DEFECTS["wait in the loop"]))


@pytest.mark.parametrize(
    ("text", "replacement"),
    [("m64n32k16.f32.f16.f16", "m64n32k16.f32.e4m3.e4m3"), (", p, 1, 1,", ", p, -1, 1,")],
)
def test_other_forms_are_refused(text, replacement):
    ptx = compiled().ptx
    assert text in ptx
    with pytest.raises(UnsupportedPTX):
        run(ptx.replace(text, replacement))
