"""What host programs use beside kernels: `minitriton.tools.tensor_descriptor`."""

from __future__ import annotations

from minitriton.tools import tensor_descriptor as tensor_descriptor
