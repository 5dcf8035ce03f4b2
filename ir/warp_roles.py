"""How a kernel says what its producer warps do beside those that hold tiles."""

from __future__ import annotations

from minitriton.ir.mlir import ir

PRODUCER = "mt.producer"  # marks ops that only the producer runs
ALL_WARPS = "mt.all_warps"  # marks barriers of all warps, producers included
PRODUCER_SUFFIX = "_producer"  # of the function with all that it runs
# Module attributes: how many groups of mt.num_warps warps hold tiles, each with programs of its own
# (1 if missing), and how many bytes of shared memory each has for itself.
GROUPS = "mt.consumer_groups"
GROUP_BYTES = "mt.group_bytes"
# Module attribute: so many groups share the programs, each has a part of their rows.
ROW_GROUPS = "mt.row_groups"
ENDS = "mt.of_ends"  # marks turns at the ends of programs, apart from those at products
# Registers of a thread that holds tiles, by how many warpgroups do; PRODUCER_REGISTERS of another.
# In all no more than at the launch.
CONSUMER_REGISTERS = {2: 240, 3: 160}
PRODUCER_REGISTERS = 24


def producer_of(module: ir.Module) -> ir.Operation | None:
    """The producer's function; None where the kernel has no such warps."""
    for view in module.body.operations:
        op = view.operation
        if op.name == "func.func":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            if name.endswith(PRODUCER_SUFFIX) and op != module.body.operations[0].operation:
                return op
    return None
