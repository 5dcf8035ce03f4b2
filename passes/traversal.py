"""Walking tile IR: the kernel of a module, its ops in order, attributes as plain Python values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from minitriton.ir.diagnostics import InternalError
from minitriton.ir.mlir import ir

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


def is_zero(value: ir.Value) -> bool:
    """Whether a value is a constant 0 or +0.0, all over a tile."""
    constant = splat_constant(defining_op(value))
    if constant is None:
        return False
    if isinstance(constant, ir.IntegerAttr):
        return ir.IntegerAttr(constant).value == 0
    number = ir.FloatAttr(constant).value
    return number == 0 and str(number)[0] != "-"
