"""What a pass is, and the settings that passes read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from minitriton.ir.mlir import ir
from minitriton.ir.target import Target


@dataclass(frozen=True)
class PassOptions:
    """check: verify the IR and the layout laws after every pass. pipeline_loads: multi-buffer
    loads of loops through cp.async where the target has it. wgmma: dots of such loads by whole
    warpgroups where the target has that. tma: copies for those by TMA where a tensor map can be.
    specialize: those by a warp of their own, in kernels that run program after program;
    force_specialize: also where it is not expected to pay.
    share_registers: the assembler lets such warps give registers to the others.
    overlap: the kernel may start before the one ahead in the stream has ended; None: where nothing
    in it says when."""

    check: bool = False
    pipeline_loads: bool = True
    wgmma: bool = True
    tma: bool = True
    specialize: bool = True
    force_specialize: bool = False
    share_registers: bool = True
    overlap: bool | None = None


@dataclass(frozen=True)
class Pass:
    """One step of the tile pipeline; `run(module, target, options)` changes the module in place."""

    name: str
    run: Callable[[ir.Module, Target, PassOptions], None]
