"""Functions beyond the core: `tl.extra.libdevice`, also as `tl.extra.cuda.libdevice`."""

from __future__ import annotations

from minitriton.language.extra import cuda, libdevice

__all__ = ["cuda", "libdevice"]
