"""Ops of the program model: which instance runs, promises to the compiler, debugging."""

from collections.abc import Sequence
from typing import Any

from minitriton.ir.dialect import MT, separate
from minitriton.ir.mlir import ext, ir

Operand, Result, Region = ext.Operand, ext.Result, ext.Region


class ProgramIdOp(MT.Operation, name="program_id"):
    """Index of this program along grid `axis` (0..2): i32."""

    axis: ir.IntegerAttr
    result: Result[Any]


class NumProgramsOp(MT.Operation, name="num_programs"):
    """Extent of the grid along `axis` (0..2): i32."""

    axis: ir.IntegerAttr
    result: Result[Any]


class CtaIdOp(MT.Operation, name="cta_id"):
    """Index of this CTA among those launched: i32. Persistent kernels run several programs each."""

    result: Result[Any]


class CtaCountOp(MT.Operation, name="cta_count"):
    """How many CTAs of a persistent kernel were launched: i32."""

    result: Result[Any]


class GroupIdOp(MT.Operation, name="group_id"):
    """Which of the module's mt.consumer_groups these warps are; 0 in the producer: i32."""

    result: Result[Any]


class GroupCountOp(MT.Operation, name="group_count"):
    """To how many groups the programs of a CTA are dealt, mt.consumer_groups; 1 in the producer,
    which copies for all: i32."""

    result: Result[Any]


class SplitWarpsOp(MT.Operation, name="split_warps"):
    """From here on the module's mt.producer_warps, further ones, run the ops marked mt.producer and
    what those need; the others run the rest. A barrier after it is one of the others alone."""


class TurnWaitOp(MT.Operation, name="turn_wait"):
    """Waits until another warpgroup has passed the turn to multiply, with `mt.of_ends` the one to
    store. With `mt.group`, a number, only that warpgroup does."""


class TurnPassOp(MT.Operation, name="turn_pass"):
    """Passes the turn (see mt.turn_wait) to the next warpgroup, the last one to the first. With
    `mt.group` only that one does."""


class HintOp(MT.Operation, name="hint"):
    """Its operand, with promises for axis analysis in `divisibility`, `contiguity`, `constancy`.

    Each promise is an optional array<i64>, one number per dimension (one for a scalar).
    """

    value: Operand[Any]
    result: Result[Any]


class AssumeOp(MT.Operation, name="assume"):
    """Promise that an i1 scalar is true."""

    condition: Operand[Any]


class BarrierOp(MT.Operation, name="barrier"):
    """All threads of the CTA meet; shared and global writes before it are visible after it."""


class ClusterBarrierOp(MT.Operation, name="cluster_barrier"):
    """All threads of all CTAs of the cluster meet, producer warps included, and see what each wrote
    to shared memory before; with the unit attribute `relaxed` only the mbarriers that it made.
    After split_warps it is the last op."""


class GridWaitOp(MT.Operation, name="grid_wait"):
    """Waits until the kernel before this one in the stream has ended and its writes are visible.
    Nothing that reads or writes global memory moves across."""


class GridLaunchOp(MT.Operation, name="grid_launch"):
    """This program no longer minds if the next kernel in the stream starts."""


class AssertOp(MT.Operation, name="assert"):
    """Stops the program with `message` where an i1 (scalar or tile) is false and the mask true.

    `extras` is [mask] or empty; `message`, `file`, `line`, `function` are string/int attributes.
    """

    condition: Operand[Any]
    extras: Sequence[Operand[Any]]
    message: ir.StringAttr = ext.attribute(kw_only=True)


class PrintOp(MT.Operation, name="print"):
    """Prints `prefix` and each operand's elements; `signs` array<i32> (1 = signed), `hex` bool."""

    __annotations__ = separate("value", Sequence[Operand[Any]]) | {"prefix": ir.StringAttr}


PURE = (ProgramIdOp, NumProgramsOp, CtaIdOp, CtaCountOp, GroupIdOp, GroupCountOp, HintOp)
OPS = (
    *PURE, SplitWarpsOp, TurnWaitOp, TurnPassOp, AssumeOp, BarrierOp, ClusterBarrierOp, GridWaitOp,
    GridLaunchOp, AssertOp, PrintOp,
)  # fmt: skip
