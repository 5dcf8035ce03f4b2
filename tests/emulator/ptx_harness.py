"""Small PTX kernels for the emulator's tests: text around a body, and launching on arrays."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from minitriton.runtime.emulator import Allocation, Emulator, Report, parameter

HEADER = ".version 8.3\n.target sm_90a\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p<20>;
    .reg .b16 %h<20>;
    .reg .b32 %r<60>;
    .reg .f32 %f<20>;
    .reg .b64 %d<40>;
    .reg .f64 %g<10>;
"""
#: %d1 = &out[global thread], %d2 = &in[global thread] (4-byte items); %r1 = tid, %r2 = thread.
PROLOGUE = """
    ld.param.u64 %d10, [out];
    ld.param.u64 %d11, [inp];
    mov.u32 %r1, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mad.lo.s32 %r2, %r3, %r4, %r1;
    mul.wide.u32 %d3, %r2, 4;
    add.s64 %d1, %d10, %d3;
    add.s64 %d2, %d11, %d3;
"""


def kernel(body: str, declarations: str = "", extra: str = "") -> str:
    """PTX of entry k(out, inp, n) with the prologue's registers set."""
    return f"""{HEADER}{extra}
.visible .entry k(.param .u64 out, .param .u64 inp, .param .u32 n)
{{{REGISTERS}{declarations}{PROLOGUE}{body}
    ret;
}}
"""


def run(
    ptx: str | Emulator,
    out: np.ndarray,
    inp: np.ndarray,
    n: int = 0,
    grid: int = 1,
    block: int = 32,
    **options: Any,
) -> Report:
    """Launch entry k on two arrays; ``options`` go to `Emulator.launch`."""
    program = Emulator(ptx) if isinstance(ptx, str) else ptx
    options.setdefault("stdout", io.StringIO())
    return program.launch(
        "k",
        grid=(grid, 1, 1),
        block=(block, 1, 1),
        params=[parameter(out.ctypes.data), parameter(inp.ctypes.data), parameter(n, "u32")],
        allocations=[
            Allocation(out.ctypes.data, out.nbytes, "out"),
            Allocation(inp.ctypes.data, inp.nbytes, "inp", writable=False),
        ],
        **options,
    )


def evaluate(body: str, inp: np.ndarray, block: int = 32, grid: int = 1, **options: Any) -> Any:
    """Run a body that stores one 32-bit result per thread; returns it as uint32."""
    declarations = options.pop("declarations", "")
    out = np.zeros(block * grid, np.uint32)
    run(kernel(body, declarations), out, inp, len(inp), grid, block, **options)
    return out
