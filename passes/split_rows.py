"""Kernels of 12 warps become programs of four that three groups run, each with a third of the rows.

    before: mt.num_warps = 12; %m = make_range [192]; %c = dot %a, %b : 192x256
    after:  mt.num_warps = 4, mt.row_groups = 3; %m = make_range [64] + 64 * group_id;
            %c = dot %a, %b : 64x256

The rows are those of all products; whatever tile has that dimension is cut, and each group makes
the others by itself. So the groups meet nowhere but at the slots that a producer warp fills for all
(`rings`), which `warp_split` has to bring about: no other kernel runs in this form.
Requires: no layouts. Ensures: the groups together have the program's effects; CompileError where
rows depend on each other, or an effect would happen three times.
"""

from __future__ import annotations

from math import gcd

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.mlir import ir
from minitriton.ir.target import ROW_SPLIT_WARPS, Target
from minitriton.ir.warp_roles import GROUPS, ROW_GROUPS
from minitriton.passes.op_classes import MEMORY_ACCESS, is_tile
from minitriton.passes.row_groups import NUM_GROUPS, refused
from minitriton.passes.tile_dims import Dim, TileDims
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    blocks_of,
    int_attribute,
    kernel_of,
    splat_constant,
    walk,
)

GROUP_ROWS = 64  # of one wgmma
_LEAVES = frozenset(("mt.make_range", "mt.splat", "arith.constant"))
_OF_THE_PROGRAM = frozenset(("mt.barrier", "mt.print", "mt.assert", "mt.effectful_asm"))


def run(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Splits the rows of a kernel of 12 warps; leaves others alone."""
    attributes = module.operation.attributes
    if int_attribute(module.operation, "mt.num_warps") != ROW_SPLIT_WARPS:
        return
    function = kernel_of(module)
    reason = _unavailable(target, options)
    if reason is not None:
        raise refused(function, reason)
    for op in walk(function):
        if op.name in _OF_THE_PROGRAM:
            raise refused(op, f"{op.name.removeprefix('mt.')} is for the program as a whole")
    _repeat_leaves(function)
    dims = TileDims(function)
    chosen = _rows_of_products(function, dims)
    for op in walk(function):
        stores = op.name in MEMORY_ACCESS and op.name != "mt.load"
        if stores and not _rows_in(op.operands[0], dims, chosen):
            raise refused(op, "what is stored here has not the rows of the products")
    _Splitter(function, dims, chosen).split()
    attributes["mt.num_warps"] = i32_attr(ROW_SPLIT_WARPS // NUM_GROUPS)
    attributes[GROUPS] = attributes[ROW_GROUPS] = i32_attr(NUM_GROUPS)


def _unavailable(target: Target, options: PassOptions) -> str | None:
    """Why no kernel gets a producer warp."""
    if not (target.has("wgmma") and target.has("tma") and target.has("setmaxnreg")):
        return f"{target.arch} has no producer warps"
    if not options.share_registers:
        return "nvJitLink ignores setmaxnreg: install nvidia-cuda-nvcc"
    if not options.tma:
        return "TMA is switched off, or cannot describe a tensor of this launch"
    if not (options.pipeline_loads and options.wgmma and options.specialize):
        return "warp specialisation, or what it needs, is switched off"
    return None


def _repeat_leaves(function: ir.Operation) -> None:
    """An op of its own for each use of a range, splat or constant: one may be of rows, another of
    columns of the same number."""
    for op in list(walk(function)):
        if op.name in _LEAVES and is_tile(op.results[0]):
            users = [(use.owner.operation, use.operand_number) for use in op.results[0].uses]
            for user, number in users[1:]:
                copy = op.clone(ir.InsertionPoint.after(op))
                user.operands[number] = copy.results[0]


def _rows_of_products(function: ir.Operation, dims: TileDims) -> set[Dim]:
    """The dimensions to be split."""
    chosen = set()
    for op in walk(function):
        if op.name != "mt.dot":
            continue
        shape = list(op.results[0].type.shape)
        rows = len(shape) - 2
        if shape[rows] % (NUM_GROUPS * GROUP_ROWS):
            multiple = NUM_GROUPS * GROUP_ROWS
            raise refused(op, f"this product has {shape[rows]} rows, no multiple of {multiple}")
        obstacle = dims.obstacle((op.results[0], rows))
        if obstacle is not None:
            raise refused(obstacle[0], f"the rows of a product are not apart: {obstacle[1]}")
        chosen.add(dims.of((op.results[0], rows)))
    if not chosen:
        raise refused(function, "the kernel has no matrix product")
    return chosen


def _rows_in(value: Value, dims: TileDims, chosen: set[Dim]) -> list[int]:
    """The dimensions of a value that are split."""
    if not is_tile(value):
        return []
    return [dim for dim in range(len(value.type.shape)) if dims.of((value, dim)) in chosen]


class _Splitter:
    """Cuts the chosen dimensions of all tiles, each in its place."""

    def __init__(self, function: ir.Operation, dims: TileDims, chosen: set[Dim]) -> None:
        self._function = function
        entry = function.regions[0].blocks[0]
        self._entry = Builder(ir.InsertionPoint.at_block_begin(entry), function.location)
        self._group = self._entry.op("mt.group_id", ir.IntegerType.get_signless(32))
        self._starts: dict[int, Value] = {}
        values = [v for block in blocks_of(function) for v in block.arguments]
        for op in walk(function):
            values += op.results
            values += [v for block in blocks_of(op) for v in block.arguments]
        self._cut = {v: rows for v in values if (rows := _rows_in(v, dims, chosen))}

    def split(self) -> None:
        for value, rows in self._cut.items():
            shape = list(value.type.shape)
            for dim in rows:
                shape[dim] //= NUM_GROUPS
            value.set_type(ir.RankedTensorType.get(shape, value.type.element_type))
        for value in self._cut:
            if isinstance(value, ir.BlockArgument):
                continue
            match (op := value.owner.operation).name:
                case "arith.constant":
                    scalar = splat_constant(op)
                    op.attributes["value"] = ir.DenseElementsAttr.get_splat(value.type, scalar)
                case "mt.make_range":
                    self._own_part(op)
                case "mt.hint":
                    _weaken(op, self._cut[value])

    def _own_part(self, op: ir.Operation) -> None:
        """A range of the group's rows."""
        result = op.results[0]
        (size,) = result.type.shape
        op.attributes["end"] = i32_attr(int_attribute(op, "start") + size)
        builder = Builder(ir.InsertionPoint.after(op), op.location)
        start = builder.op("mt.splat", result.type, [self._start(size)])
        moved = builder.op("arith.addi", result.type, [result, start])
        result.replace_all_uses_except(moved, [moved.owner.operation])

    def _start(self, size: int) -> Value:
        """i32 number of the group's first row, of `size`."""
        if size not in self._starts:
            each = self._entry.constant(self._group.type, size)
            self._starts[size] = self._entry.op("arith.muli", each.type, [self._group, each])
        return self._starts[size]


def _weaken(hint: ir.Operation, rows: list[int]) -> None:
    """Promises about all rows, as they hold for each third."""
    shape = list(hint.results[0].type.shape)
    promised = {
        name: list(ir.DenseI64ArrayAttr(hint.attributes[name]))
        for name in ("contiguity", "divisibility", "constancy")
        if name in hint.attributes
    }
    for dim in rows:
        for name in ("contiguity", "constancy"):
            if name in promised:
                before = promised[name][dim]
                promised[name][dim] = gcd(before, shape[dim])
        if "divisibility" in promised:  # of the first of each run, which may begin elsewhere now
            promised["divisibility"][dim] = gcd(promised["divisibility"][dim], shape[dim])
    for name, numbers in promised.items():
        hint.attributes[name] = ir.DenseI64ArrayAttr.get(numbers)
