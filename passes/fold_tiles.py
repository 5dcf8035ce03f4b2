"""Local rewrites of tile ops, one forward walk: splats and broadcasts move towards the end.

Arithmetic on splats becomes scalar arithmetic, arithmetic on broadcasts of one shape is done before
broadcasting; shape ops on splats and transposes of transposes vanish; constant pointer offsets add
up; products that are added to a running sum begin with it.
"""

from __future__ import annotations

from collections.abc import Callable

from minitriton.ir.builder import Builder, scalar_attribute
from minitriton.ir.dialect import element_of, shape_of
from minitriton.ir.mlir import ir
from minitriton.passes.op_classes import MAY_WRITE, is_elementwise, is_tile, tile_operands
from minitriton.passes.traversal import (
    Value,
    attributes_of,
    blocks_of,
    defining_op,
    int_array,
    int_attribute,
    integer_constant,
    ops_of,
    splat_constant,
)


def fold_block(block: ir.Block) -> None:
    """Rewrites all ops of `block` and of the regions in it."""
    for op in ops_of(block):
        for inner in blocks_of(op) if op.name.startswith("scf.") else ():
            fold_block(inner)
        if len(op.results) != 1 or not is_tile(op.results[0]):
            continue
        for rule in _rules(op.name):
            replacement = rule(op)
            if replacement is not None:
                op.results[0].replace_all_uses_with(replacement)
                op.erase()
                break


def _rules(name: str) -> tuple[Callable[[ir.Operation], Value | None], ...]:
    if name in SHAPE_RULES:
        return SHAPE_RULES[name]
    if name == "mt.hint" or not is_elementwise(name):
        return ()
    return ELEMENTWISE_RULES.get(name, ()) + (_scalar_form, _before_broadcast)


def _builder(op: ir.Operation) -> Builder:
    return Builder(ir.InsertionPoint(op), op.location)


def _splat_source(value: Value) -> Value | ir.Attribute | None:
    """The scalar (or scalar attribute) that fills a tile."""
    op = defining_op(value)
    if op is None:
        return None
    return op.operands[0] if op.name == "mt.splat" else splat_constant(op)


def _splat_like(value: Value, type_: ir.Type, builder: Builder) -> Value | None:
    """A tile of `type_` filled like the splat or constant `value`."""
    source = _splat_source(value)
    if source is None:
        return None
    if isinstance(source, ir.Attribute):
        return builder.op(
            "arith.constant", type_, (), {"value": ir.DenseElementsAttr.get_splat(type_, source)}
        )
    return builder.op("mt.splat", type_, [source])


def _shape_of_splat(op: ir.Operation) -> Value | None:
    return _splat_like(op.operands[0], op.results[0].type, _builder(op))


def _broadcast_twice(op: ir.Operation) -> Value | None:
    source = op.operands[0]
    if source.type == op.results[0].type:
        return source
    inner = defining_op(source)
    if inner is None or inner.name != "mt.broadcast":
        return None
    return _builder(op).op("mt.broadcast", op.results[0].type, [inner.operands[0]])


def _trans_twice(op: ir.Operation) -> Value | None:
    """trans(trans(x)) = x, or one trans where the orders do not cancel out."""
    inner = defining_op(op.operands[0])
    if inner is None or inner.name != "mt.trans":
        return None
    first, source = int_array(inner, "order"), inner.operands[0]
    order = [first[dim] for dim in int_array(op, "order")]
    if order == list(range(len(order))):
        return source
    attributes = {"order": ir.DenseI32ArrayAttr.get(order)}
    return _builder(op).op("mt.trans", op.results[0].type, [source], attributes)


def _scalar_form(op: ir.Operation) -> Value | None:
    """op(splat a, splat b) = splat(op(a, b))."""
    sources = [_splat_source(v) if is_tile(v) else v for v in op.operands]
    if any(s is None for s in sources) or all(isinstance(s, ir.Attribute) for s in sources):
        return None
    builder = _builder(op)
    operands = [
        builder.op("arith.constant", element_of(value.type), (), {"value": source})
        if isinstance(source, ir.Attribute)
        else source
        for value, source in zip(op.operands, sources, strict=True)
    ]
    result = op.results[0].type
    scalar = builder.op(op.name, element_of(result), operands, attributes_of(op))
    return builder.op("mt.splat", result, [scalar])


def _before_broadcast(op: ir.Operation) -> Value | None:
    """op(broadcast a, broadcast b) = broadcast(op(a, b)) where a and b have one shape."""
    shape = None
    for value in tile_operands(op):
        maker = defining_op(value)
        if maker is not None and maker.name == "mt.broadcast":
            source = shape_of(maker.operands[0].type)
            if shape not in (None, source):
                return None
            shape = source
        elif _splat_source(value) is None:
            return None
    if shape is None:
        return None
    builder = _builder(op)

    def narrow(value: Value) -> Value:
        maker = defining_op(value) if is_tile(value) else None
        if maker is None:
            return value
        if maker.name == "mt.broadcast":
            return maker.operands[0]
        filled = _splat_like(
            value, ir.RankedTensorType.get(list(shape), value.type.element_type), builder
        )
        assert filled is not None
        return filled

    result = op.results[0].type
    small = ir.RankedTensorType.get(list(shape), result.element_type)
    inner = builder.op(op.name, small, [narrow(v) for v in op.operands], attributes_of(op))
    return builder.op("mt.broadcast", result, [inner])


def _add_offsets(op: ir.Operation) -> Value | None:
    """addptr(addptr(p, c), d) = addptr(p, c + d) for constants c and d."""
    pointer, offset = op.operands
    inner = defining_op(pointer)
    if inner is None or inner.name != "mt.addptr" or inner.operands[1].type != offset.type:
        return None
    first, second = integer_constant(inner.operands[1]), integer_constant(offset)
    if first is None or second is None:
        return None
    element = element_of(offset.type)
    if not -(1 << (element.width - 1)) <= first + second < 1 << (element.width - 1):
        return None
    total = ir.DenseElementsAttr.get_splat(offset.type, scalar_attribute(element, first + second))
    builder = _builder(op)
    constant = builder.op("arith.constant", offset.type, (), {"value": total})
    return builder.op("mt.addptr", op.results[0].type, [inner.operands[0], constant])


def _select_of_load(op: ir.Operation) -> Value | None:
    """select(m, load(p, m), other) = load(p, m, other): the load has no other use."""
    mask, loaded, other = op.operands
    load = defining_op(loaded)
    if load is None or load.name != "mt.load" or len(load.operands) != 2:
        return None
    if load.operands[1] != mask or load.block != op.block or "volatile" in load.attributes:
        return None
    if len(list(loaded.uses)) != 1 or _writes_between(load, op):
        return None
    attributes = attributes_of(load)
    pointer = load.operands[0]
    builder = Builder(ir.InsertionPoint(op), load.location)
    return builder.op("mt.load", loaded.type, [pointer, mask, other], attributes)


def _writes_between(first: ir.Operation, last: ir.Operation) -> bool:
    ops = ops_of(first.block)
    between = ops[ops.index(first) + 1 : ops.index(last)]
    return any(op.name in MAY_WRITE for op in between)


def _add_to_dot(op: ir.Operation) -> Value | None:
    """dot(a, b, 0) + sum = dot(a, b, sum) for running sums; bits change as the order of adding.

    fp16 stays, which would be rounded more often; so do products that may be imprecise, which the
    addition keeps short. So does what is loaded: the product need not wait for it.
    """
    for index, value in enumerate(op.operands):
        dot, total = defining_op(value), op.operands[1 - index]
        if (
            dot is not None
            and dot.name == "mt.dot"
            and dot.block == op.block
            and len(list(value.uses)) == 1
            and element_of(value.type).width >= 32
            and int_attribute(dot, "max_imprecise", 0) == 0
            and _is_zero(dot.operands[2])
            and _is_running(total)
        ):
            builder = Builder(ir.InsertionPoint(op), dot.location)
            operands = [*list(dot.operands)[:2], total]
            return builder.op("mt.dot", value.type, operands, attributes_of(dot))
    return None


def _is_zero(value: Value) -> bool:
    splat = splat_constant(defining_op(value))
    return splat is not None and splat.value == 0


def _is_running(value: Value) -> bool:
    """Whether a tile is carried by a loop, perhaps scaled or added to since."""
    seen, pending = {value}, [value]
    while pending:
        maker = defining_op(pending.pop())
        if maker is None or maker.name.startswith("scf."):
            return True
        if is_elementwise(maker.name) or maker.name == "mt.dot":
            found = [v for v in maker.operands if v.type == value.type and v not in seen]
            seen.update(found)
            pending += found
    return False


SHAPE_RULES = {
    "mt.broadcast": (_shape_of_splat, _broadcast_twice),
    "mt.expand_dims": (_shape_of_splat,),
    "mt.reshape": (_shape_of_splat,),
    "mt.trans": (_shape_of_splat, _trans_twice),
}
ELEMENTWISE_RULES = {
    "arith.addf": (_add_to_dot,),
    "arith.addi": (_add_to_dot,),
    "arith.select": (_select_of_load,),
    "mt.addptr": (_add_offsets,),
}
