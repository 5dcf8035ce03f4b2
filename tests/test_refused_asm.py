"""Inline PTX that nobody can run: what its author is told."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.ir.diagnostics import CompileError
from minitriton.jit import compile_hooks
from minitriton.refused_asm import explained
from minitriton.runtime.assembler import AssemblerError
from minitriton.runtime.emulator import UnsupportedPTX


@triton.jit
def text_kernel(x_ptr, TEXT: tl.constexpr):
    i = tl.arange(0, 32)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, tl.inline_asm_elementwise(TEXT, "=r,r", [x], tl.int32, True, 1))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("frobnicate.b32 $0, $1;", "'frobnicate.b32' is not supported"),
        ("add.s32 $0, $1, nothing;", "unknown symbol 'nothing'"),
        ("add.s32 $0, $1, $1", "cannot parse operand"),
        ("add.s32 $0, $1, $1, $1;", "add.s32"),
        ("mov.b32 $0, %nowhere;", "nowhere"),
    ],
)
def test_refused_text_shows_the_kernels_line(text, said):
    """The emulator names the instruction, the assembler's error comes with the call."""
    x = torch.zeros(32, dtype=torch.int32)
    made: list = []
    compile_hooks.append(made.append)
    try:
        with pytest.raises(UnsupportedPTX, match=said):
            text_kernel[(1,)](x, text)
    finally:
        compile_hooks.remove(made.append)
    with pytest.raises(CompileError) as caught:
        made.pop().assemble()
    message = str(caught.value)
    assert "assembler refuses this inline PTX" in message
    assert "tl.inline_asm_elementwise(TEXT" in message and "^^^" in message


def test_errors_of_the_compilers_own_ptx_stay():
    """Those are bugs of ours, wherever inline PTX stands around them."""
    ptx = "/* tl.inline_asm_elementwise */ add;\n// end inline asm\nsub;\nmul;"
    assert explained(AssemblerError("refused", 4), ptx) is None
    assert explained(AssemblerError("missing"), ptx) is None
    assert explained(AssemblerError("refused", 1), ptx) is not None
