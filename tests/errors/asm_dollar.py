"""A label written with one dollar sign."""

# ruff: noqa
import minitriton.language as tl


def kernel(p, q):
    x = tl.load(p + tl.arange(0, 32))
    tl.store(
        p + tl.arange(0, 32),
        tl.inline_asm_elementwise(
            "$L: mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
        ),
    )


ARGUMENTS = dict(p="*fp32", q="*u8")
