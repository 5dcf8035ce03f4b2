"""Six bytes do not fill registers."""

# ruff: noqa
import minitriton.language as tl


def kernel(p, q):
    x = tl.load(q + tl.arange(0, 32))
    tl.inline_asm_elementwise("", "=r,=r,r,r", [x], tl.uint8, is_pure=True, pack=6)


ARGUMENTS = dict(p="*fp32", q="*u8")
