"""The runtime's errors where Triton has them."""

from __future__ import annotations

from minitriton.runtime.assembler import AssemblerError as PTXASError
from minitriton.runtime.driver import OutOfResources

__all__ = ["OutOfResources", "PTXASError"]
