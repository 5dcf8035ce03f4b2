"""What the kernel is compiled for, known while compiling: `tl.target_info`."""

from __future__ import annotations

from minitriton.frontend import constants
from minitriton.frontend.active import builtin, emitter

__all__ = ["cuda_capability_geq", "is_cuda", "is_hip", "is_hip_cdna3", "is_hip_cdna4"]


@builtin
def is_cuda() -> bool:
    """Whether it is for an NVIDIA GPU: always."""
    return True


@builtin
def cuda_capability_geq(major, minor=0):
    """Whether the compute capability is at least major.minor."""
    wanted = 10 * constants.integer(major, "major") + constants.integer(minor, "minor")
    return emitter().target.capability >= wanted


@builtin
def is_hip() -> bool:
    """Whether it is for an AMD GPU: never."""
    return False


@builtin
def is_hip_cdna3() -> bool:
    """As `is_hip`."""
    return False


@builtin
def is_hip_cdna4() -> bool:
    """As `is_hip`."""
    return False
