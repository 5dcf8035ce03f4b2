"""`tl.extra.cuda`: libdevice under the name that Triton kernels import, and dependent launch."""

from __future__ import annotations

from minitriton.frontend.lang_program import gdc_launch_dependents, gdc_wait
from minitriton.language.extra.cuda import libdevice
from minitriton.language.extra.cuda.utils import globaltimer, num_threads, num_warps, smid

__all__ = [
    "gdc_launch_dependents",
    "gdc_wait",
    "globaltimer",
    "libdevice",
    "num_threads",
    "num_warps",
    "smid",
]
