"""What a program can ask of the GPU and of its own launch."""

from __future__ import annotations

from minitriton.frontend.active import builtin, emitter
from minitriton.frontend.lang_asm import inline_asm_elementwise
from minitriton.frontend.values import Tensor
from minitriton.ir import dtypes

WARP = 32


@builtin
def globaltimer() -> Tensor:
    """Nanoseconds of the GPU's clock, int64: now, each time it is called."""
    return inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", (), dtypes.int64, is_pure=False, pack=1
    )


@builtin
def smid() -> Tensor:
    """Number of the SM that runs the program, int32."""
    return inline_asm_elementwise(
        "mov.u32 $0, %smid;", "=r", (), dtypes.int32, is_pure=True, pack=1
    )


@builtin
def num_warps() -> int:
    """The launch option."""
    return emitter().num_warps


@builtin
def num_threads() -> int:
    """32 for each of `num_warps`."""
    return WARP * emitter().num_warps
