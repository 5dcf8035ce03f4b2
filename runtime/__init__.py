"""The runtime; `triton.runtime.driver.active` is where host code of Triton kernels looks for it."""

from __future__ import annotations

from minitriton.runtime import driver
from minitriton.runtime.active import ActiveDriver

driver.active = ActiveDriver()

__all__ = ["driver"]
