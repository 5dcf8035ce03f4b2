"""`tl.extra.cuda.libdevice` as a module of its own, for imports by its full path."""

from __future__ import annotations

from minitriton.language.extra.libdevice import *  # noqa: F403
