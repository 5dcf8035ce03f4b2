"""`triton.runtime.driver.active`: what host code asks Triton about the GPU that it runs on.

Without a GPU these are the facts of the emulator, as a machine of its own kind ("cpu").
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from typing import Any

from minitriton.ir.target import Target
from minitriton.runtime import driver

_WARP = 32
_EMULATED = "sm_80"  # whose limits the emulator states


@dataclass(frozen=True, slots=True)
class GPUTarget:
    """What kernels run on: `backend` "cuda" and `arch` 90, say, or "cpu" and the processor's."""

    backend: str
    arch: int | str
    warp_size: int


class ActiveDriver:
    """The driver of this process; GPUs are counted as torch does."""

    @property
    def utils(self) -> ActiveDriver:
        """Where `get_device_properties` is looked for."""
        return self

    def get_current_target(self) -> GPUTarget:
        """The current GPU's architecture."""
        if not driver.is_available():
            return GPUTarget("cpu", platform.machine(), _WARP)
        major, minor = driver.properties(self.get_current_device()).capability
        return GPUTarget("cuda", 10 * major + minor, _WARP)

    def get_active_torch_device(self) -> Any:
        """The torch.device for tensors of kernels."""
        import torch

        if not driver.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.get_current_device())

    def get_device_interface(self) -> Any:
        """torch.cuda, or torch.cpu without a GPU."""
        import torch

        return torch.cuda if driver.is_available() else torch.cpu

    def get_current_device(self) -> int:
        """Index of torch's current GPU; 0 where torch has none."""
        torch = sys.modules.get("torch")
        if torch is None or not driver.is_available():
            return 0
        return int(torch.cuda.current_device())

    def get_current_stream(self, device: int | None = None) -> int:
        """Raw handle of torch's current stream on a GPU; 0 without one."""
        torch = sys.modules.get("torch")
        if torch is None or not driver.is_available():
            return 0
        return int(torch.cuda.current_stream(device).cuda_stream)

    def get_device_properties(self, index: int | None = None) -> dict[str, int]:
        """Sizes of GPU `index` under Triton's names; bytes and registers are those of one CTA."""
        if driver.is_available():
            found = driver.properties(self.get_current_device() if index is None else index)
            shared, multiprocessors = found.max_shared, found.multiprocessors
        else:
            shared, multiprocessors = Target.parse(_EMULATED).max_shared_bytes, 1
        return {
            "max_shared_mem": shared,
            "max_num_regs": Target.parse(_EMULATED).registers_per_sm,
            "multiprocessor_count": multiprocessors,
            "warpSize": _WARP,
        }
