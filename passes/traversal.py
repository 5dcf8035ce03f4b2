"""Walking tile IR: the kernel of a module, its ops in order, attributes as plain Python values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from minitriton.ir.diagnostics import InternalError
from minitriton.ir.dialect import element_of
from minitriton.ir.mlir import ir
from minitriton.passes.op_classes import MOVES

Value: TypeAlias = ir.Value


def kernel_of(module: ir.Module) -> ir.Operation:
    """The one func.func of a tile module; InternalError where there is none."""
    for view in module.body.operations:
        if view.operation.name == "func.func":
            return view.operation
    raise InternalError("passes", "the module has no function")


def ops_of(block: ir.Block) -> list[ir.Operation]:
    """The ops of a block, safe against erasing and inserting while iterating."""
    return [view.operation for view in block.operations]


def blocks_of(op: ir.Operation) -> list[ir.Block]:
    """The blocks of all regions of `op`, in order."""
    return [block for region in op.regions for block in region.blocks]


def walk(op: ir.Operation) -> Iterator[ir.Operation]:
    """All ops inside `op`, each before the ones it contains, in program order."""
    for block in blocks_of(op):
        for inner in ops_of(block):
            yield inner
            if len(inner.regions):
                yield from walk(inner)


def terminator_of(block: ir.Block) -> ir.Operation:
    """The last op of a block."""
    operations = block.operations
    return operations[len(operations) - 1].operation


def attributes_of(op: ir.Operation) -> dict[str, ir.Attribute]:
    """The attributes of `op` by name."""
    attributes = op.attributes
    return {name: attributes[name] for name in attributes}


def int_attribute(op: ir.Operation, name: str, default: int = 0) -> int:
    """An integer attribute's value, `default` where it is absent."""
    attributes = op.attributes
    return ir.IntegerAttr(attributes[name]).value if name in attributes else default


def int_array(op: ir.Operation, name: str) -> list[int]:
    """An array<i32> attribute's values."""
    return list(ir.DenseI32ArrayAttr(op.attributes[name]))


def defining_op(value: Value) -> ir.Operation | None:
    """The op that makes `value`, None for a block argument."""
    if isinstance(value, ir.BlockArgument):
        return None
    return value.owner.operation


def block_of(value: Value) -> ir.Block:
    """The block that defines `value`."""
    if isinstance(value, ir.BlockArgument):
        return value.owner
    return value.owner.operation.block


def around_in(block: ir.Block, op: ir.Operation) -> ir.Operation:
    """The op of `block` that `op`, which is somewhere below `block`, is or is inside."""
    while op.block != block:
        op = op.parent.operation
    return op


def made_by(value: Value) -> list[ir.Operation]:
    """The op that makes `value`, and after it the changes of layout and order that follow; only
    these where the tile is a block argument."""
    found: list[ir.Operation] = []
    op = defining_op(value)
    while op is not None:
        found.insert(0, op)
        op = defining_op(op.operands[0]) if op.name in MOVES else None
    return found


def origin(value: Value) -> ir.Operation | None:
    """What makes `value`, before changes of its layout and order; None for a block argument."""
    first = next(iter(made_by(value)), None)
    return None if first is None or first.name in MOVES else first


def is_used(op: ir.Operation) -> bool:
    """Whether any result of `op` has a use."""
    return any(True for result in op.results for _ in result.uses)


def splat_constant(op: ir.Operation | None) -> ir.Attribute | None:
    """The scalar attribute of an arith.constant (of all elements of a splat); else None."""
    if op is None or op.name != "arith.constant":
        return None
    value = op.attributes["value"]
    if isinstance(op.results[0].type, ir.RankedTensorType):
        dense = ir.DenseElementsAttr(value)
        return dense.get_splat_value() if dense.is_splat else None
    return value


def integer_constant(value: Value) -> int | None:
    """The number that an arith.constant of integers (or a splat of one) holds; else None."""
    attribute = splat_constant(defining_op(value))
    if attribute is not None and isinstance(attribute, ir.IntegerAttr):
        return ir.IntegerAttr(attribute).value
    return None


def fills_with_zero(load: ir.Operation) -> bool:
    """Whether an mt.load, where its mask is false, gives +0 as an asynchronous copy does."""
    if len(load.operands) < 3:
        return True
    constant = _other(load)
    if constant is None:
        return False
    if isinstance(constant, ir.IntegerAttr):
        return bool(ir.IntegerAttr(constant).value == 0)
    number = ir.FloatAttr(constant).value
    return bool(number == 0 and str(number)[0] != "-")


def fills_with_nan(load: ir.Operation) -> bool:
    """Whether an mt.load, where its mask is false, gives NaN, and not a certain one of them."""
    constant = _other(load) if len(load.operands) > 2 else None
    if constant is None or isinstance(constant, ir.IntegerAttr):
        return False
    return bool(constant == ir.FloatAttr.get(element_of(load.results[0].type), float("nan")))


def _other(load: ir.Operation) -> ir.Attribute | None:
    """The constant that all masked elements of an mt.load get; None if it is none."""
    maker = defining_op(load.operands[2])
    if maker is not None and maker.name == "mt.splat":
        maker = defining_op(maker.operands[0])
    return splat_constant(maker)
