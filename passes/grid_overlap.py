"""Lets a kernel start before the one ahead of it in the stream has ended, where it then waits.

With programmatic dependent launch (since sm_90) the GPU starts the next kernel as the last program
of the one ahead ends, which hides what a launch costs. All that a kernel does before its
`mt.grid_wait` must bear that; with the wait as its first op there is nothing, in any kernel.
"""

from __future__ import annotations

from minitriton.ir.builder import Builder
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import kernel_of, walk

ATTRIBUTE = "mt.programmatic"


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Marks the module as one to launch so; a wait goes first unless the kernel has its own.

    Where `options.overlap` is None, kernels that wait for others or tell others to start are left
    alone: their authors expect an early start only where the launch asks for it.
    """
    if not target.has("pdl") or options.overlap is False:
        return
    names = {op.name for op in walk(module.operation)}
    if options.overlap is None and names & {"mt.grid_wait", "mt.grid_launch"}:
        return
    module.operation.attributes[ATTRIBUTE] = ir.BoolAttr.get(True)
    if "mt.grid_wait" not in names:
        function = kernel_of(module)
        start = ir.InsertionPoint.at_block_begin(function.regions[0].blocks[0])
        Builder(start, function.location).create("mt.grid_wait", ())
