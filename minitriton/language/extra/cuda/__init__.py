"""`tl.extra.cuda`: the name under which Triton kernels import libdevice."""

from __future__ import annotations

from minitriton.language.extra.cuda import libdevice

__all__ = ["libdevice"]
