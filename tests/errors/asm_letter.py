"""A result of 32 bits in a register of 16."""

# ruff: noqa
import minitriton.language as tl


def kernel(p, q):
    x = tl.load(p + tl.arange(0, 32))
    tl.store(
        p + tl.arange(0, 32),
        tl.inline_asm_elementwise("mov.b32 $0, $1;", "=h,f", [x], tl.float32, is_pure=True, pack=1),
    )


ARGUMENTS = dict(p="*fp32", q="*u8")
