"""No result at all."""

# ruff: noqa
import minitriton.language as tl


def kernel(p, q):
    x = tl.load(p + tl.arange(0, 32))
    tl.store(
        p + tl.arange(0, 32), tl.inline_asm_elementwise("", "r", [x], (), is_pure=True, pack=1)
    )


ARGUMENTS = dict(p="*fp32", q="*u8")
