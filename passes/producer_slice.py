"""What a producer warp runs: the copies of a kernel, and the scalars and control flow they need.

`Slice` finds those ops by walking back from the copies. `add_producer`, the last of the tile
passes, writes them down as a second function of the module, `<kernel>_producer`.

    before: func @k { for { tma_copy {mt.producer}; warpgroup_dot } }
    after:  the same, and func @k_producer { for { tma_copy } }
"""

from __future__ import annotations

from minitriton.ir.builder import Builder
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.warp_roles import PRODUCER, PRODUCER_SUFFIX, ROW_GROUPS
from minitriton.passes.global_order import promised_apart
from minitriton.passes.op_classes import (
    MEMORY_ACCESS,
    is_pure,
    is_tile,
    names_special_register,
)
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    kernel_of,
    ops_of,
    terminator_of,
    walk,
)

_LOOPS_AND_BRANCHES = frozenset(("scf.for", "scf.if"))
_SLOTS = frozenset(("mt.local_alloc", "mt.mem_index"))


class Slice:
    """The ops that given ones need, with the loops and branches around them; `carried`: which iter
    args of those loops, `results`: which results of those branches."""

    def __init__(self) -> None:
        self.ops: set[ir.Operation] = set()
        self.carried: dict[ir.Operation, set[int]] = {}
        self.results: dict[ir.Operation, set[int]] = {}

    def add(self, op: ir.Operation) -> None:
        """`op`, its operands and what is around it."""
        if op in self.ops or op.name == "func.func":
            return
        self.ops.add(op)
        needed = list(op.operands)
        if op.name == "scf.for":
            self.carried[op] = set()
            needed = needed[:3]
        elif op.name == "scf.if":
            self.results[op] = set()
        for value in needed:
            self.add_value(value)
        self.add(op.parent.operation)

    def add_value(self, value: Value) -> None:
        """What makes `value`."""
        if isinstance(value, ir.BlockArgument):
            around = value.owner.owner.operation
            if around.name == "func.func":
                return
            self.add(around)
            if around.name == "scf.for" and value.arg_number:
                self._add_carried(around, value.arg_number - 1)
            return
        op = value.owner.operation
        self.add(op)
        number = ir.OpResult(value).result_number
        if op.name == "scf.for":
            self._add_carried(op, number)
        elif op.name == "scf.if" and number not in self.results[op]:
            self.results[op].add(number)
            for region in op.regions:
                for block in region.blocks:
                    self.add_value(terminator_of(block).operands[number])

    def _add_carried(self, loop: ir.Operation, index: int) -> None:
        if index not in self.carried[loop]:
            self.carried[loop].add(index)
            self.add_value(loop.operands[3 + index])
            self.add_value(terminator_of(loop.regions[0].blocks[0]).operands[index])

    def refusal(self, function: ir.Operation) -> str | None:
        """Why one warp cannot run this beside the others; None if it can."""
        order = {op: number for number, op in enumerate(walk(function))}
        writes = [op for op in order if op.name in MEMORY_ACCESS and op.name != "mt.load"]
        for op in reversed(order):  # the last one is what it depends on first
            if op not in self.ops or op.name in _LOOPS_AND_BRANCHES or op.name in _SLOTS:
                continue
            if any(map(is_tile, (*op.operands, *op.results))):
                return f"what it copies, or how often, depends on a tile ({op.name})"
            if op.name == "mt.load":
                if "volatile" in op.attributes or _may_follow(op, writes, order):
                    return "what it copies depends on a scalar that the kernel may write"
            elif not is_pure(op.name) or names_special_register(op):
                return f"what it copies, or how often, depends on {op.name}"
        return None


def _may_follow(
    op: ir.Operation, writes: list[ir.Operation], order: dict[ir.Operation, int]
) -> bool:
    """Whether a write of the same memory may come before `op`: earlier in the program, or in a loop
    around both, unless that promises that they are apart."""
    last, around = order[op], op.parent.operation
    while around.name != "func.func":
        if around.name != "scf.if":
            last = max(last, *(order[inner] for inner in walk(around)))
        around = around.parent.operation
    before, entry = (w for w in writes if order[w] < last), around.regions[0].blocks[0]
    return any(w.name != "mt.store" or not promised_apart(op, w, entry) for w in before)


def add_producer(module: ir.Module, target: Target, options: PassOptions) -> None:
    """Adds the producer's function where warps part."""
    function = kernel_of(module)
    roots = [op for op in walk(function) if PRODUCER in op.attributes]
    if not roots:
        return
    found = Slice()
    for op in roots:
        found.add(op)
    shared = ROW_GROUPS in module.operation.attributes
    if shared and any(op.name == "mt.group_id" for op in found.ops):
        raise InternalError("producer_slice", "what it copies for a group is not known to be that")
    name = ir.StringAttr(function.attributes["sym_name"]).value + PRODUCER_SUFFIX
    attributes = {
        "sym_name": ir.StringAttr.get(name),
        "function_type": function.attributes["function_type"],
    }
    builder = Builder(ir.InsertionPoint(module.body), function.location)
    made = builder.create("func.func", [], [], attributes, 1)
    arguments = list(function.regions[0].blocks[0].arguments)
    block = made.regions[0].blocks.append(
        *(a.type for a in arguments), arg_locs=[function.location] * len(arguments)
    )
    known = dict(zip(arguments, block.arguments, strict=True))
    _copy(function.regions[0].blocks[0], block, found, known)
    Builder(ir.InsertionPoint(block), function.location).create("func.return", [])


def _copy(source: ir.Block, target: ir.Block, found: Slice, known: dict[Value, Value]) -> None:
    """The ops of `source` that the slice has, at the end of `target`."""
    for op in ops_of(source):
        if op not in found.ops:
            continue
        builder = Builder(ir.InsertionPoint(target), op.location)
        match op.name:
            case "scf.for":
                _copy_loop(op, builder, found, known)
            case "scf.if":
                _copy_branch(op, builder, found, known)
            case _:
                attributes = attributes_of(op)
                attributes.pop("operandSegmentSizes", None)
                made = builder.create(
                    op.name, [r.type for r in op.results], [known[v] for v in op.operands],
                    attributes,
                )  # fmt: skip
                known |= dict(zip(op.results, made.results, strict=True))


def _copy_loop(op: ir.Operation, builder: Builder, found: Slice, known: dict[Value, Value]) -> None:
    kept = sorted(found.carried[op])
    operands = [known[op.operands[index]] for index in (0, 1, 2, *(3 + i for i in kept))]
    types = [op.results[index].type for index in kept]
    made = builder.create("scf.for", types, operands, attributes_of(op), 1)
    body = op.regions[0].blocks[0]
    arguments = [body.arguments[0], *(body.arguments[1 + index] for index in kept)]
    block = made.regions[0].blocks.append(
        *(a.type for a in arguments), arg_locs=[op.location] * len(arguments)
    )
    known |= dict(zip(arguments, block.arguments, strict=True))
    _copy(body, block, found, known)
    _yield(block, [terminator_of(body).operands[index] for index in kept], op, known)
    known |= {op.results[i]: result for i, result in zip(kept, made.results, strict=True)}


def _copy_branch(
    op: ir.Operation, builder: Builder, found: Slice, known: dict[Value, Value]
) -> None:
    kept = sorted(found.results[op])
    types = [op.results[index].type for index in kept]
    made = builder.create("scf.if", types, [known[op.operands[0]]], attributes_of(op), 2)
    for region, copy in zip(op.regions, made.regions, strict=True):
        for block in region.blocks:
            side = copy.blocks.append()
            _copy(block, side, found, known)
            _yield(side, [terminator_of(block).operands[index] for index in kept], op, known)
    known |= {op.results[i]: result for i, result in zip(kept, made.results, strict=True)}


def _yield(
    block: ir.Block, values: list[Value], op: ir.Operation, known: dict[Value, Value]
) -> None:
    end = Builder(ir.InsertionPoint(block), op.location)
    end.create("scf.yield", [], [known[value] for value in values])
