"""Constraints for one operand, where there are two."""

# ruff: noqa
import minitriton.language as tl


def kernel(p, q):
    x = tl.load(p + tl.arange(0, 32))
    tl.store(
        p + tl.arange(0, 32),
        tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [x, x], tl.float32, True, 1),
    )


ARGUMENTS = dict(p="*fp32", q="*u8")
