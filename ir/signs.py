"""Which integers of tile IR are known not to be negative; arithmetic is taken as exact."""

from __future__ import annotations

from minitriton.ir.mlir import ir

DEEPEST = 12  # operations that a proof looks through
# Operations that are not negative where so many of their first operands are not.
_OPERANDS = {
    "mt.program_id": 0, "mt.num_programs": 0, "mt.cta_id": 0, "mt.cta_count": 0, "mt.hint": 1,
    "mt.group_id": 0, "mt.group_count": 0, "mt.splat": 1, "mt.expand_dims": 1, "mt.broadcast": 1,
    "arith.extui": 0, "arith.extsi": 1,
    "arith.addi": 2, "arith.muli": 2, "arith.minsi": 2, "arith.divui": 0, "arith.divsi": 2,
    "arith.remsi": 1, "arith.remui": 1,
}  # fmt: skip


def is_non_negative(
    value: ir.Value,
    arguments: set[int] | None = None,
    *,
    positive_divisors: bool = False,
    depth: int = DEEPEST,
) -> bool:
    """Whether a proof of at most `depth` steps shows that `value` is not below zero.

    With `arguments` the kernel's own arguments are taken not to be, and the numbers of those that
    the proof needs are added. positive_divisors: so are divisors.
    """

    def holds(operand: ir.Value, needed: set[int] | None) -> bool:
        return depth > 0 and is_non_negative(
            operand, needed, positive_divisors=positive_divisors, depth=depth - 1
        )

    if isinstance(value, ir.BlockArgument):
        number, owner = value.arg_number, value.owner.owner.operation
        if owner.name == "func.func" and arguments is not None:
            arguments.add(number)
            return True
        if owner.name != "scf.for" or number:
            return False
        lower, _, step = list(owner.operands)[:3]
        return holds(lower, arguments) and holds(step, arguments)
    if _is_promised(value):
        return True
    op = value.owner.operation
    if op.name == "arith.constant":
        return _is_at_least(value, 0)
    if op.name == "mt.make_range":
        return bool(ir.IntegerAttr(op.attributes["start"]).value >= 0)
    if op.name == "arith.maxsi":
        return any(holds(operand, None) for operand in op.operands)
    count = _OPERANDS.get(op.name)
    if op.name == "arith.divsi" and positive_divisors:
        count = 1
    return count is not None and all(holds(v, arguments) for v in list(op.operands)[:count])


# arith.cmpi predicates with which "value, constant" says that the value is not negative, and from
# which constant on
_LEAST = {4: -1, 5: 0}  # sgt, sge
_MIRRORED = {2: 4, 3: 5}  # slt, sle: "constant, value"


def _is_promised(value: ir.Value) -> bool:
    """Whether a tl.assume, which every run of `value` reaches, says that it is not negative."""
    for use in value.uses:
        compare = use.owner.operation
        if compare.name != "arith.cmpi":
            continue
        predicate = ir.IntegerAttr(compare.attributes["predicate"]).value
        if use.operand_number:
            predicate = _MIRRORED.get(predicate, -1)
        bound = compare.operands[1 - use.operand_number]
        if predicate not in _LEAST or not _is_at_least(bound, _LEAST[predicate]):
            continue
        for user in compare.results[0].uses:
            promise = user.owner.operation
            if promise.name == "mt.assume" and promise.block == value.owner.operation.block:
                return True
    return False


def _is_at_least(value: ir.Value, least: int) -> bool:
    if isinstance(value, ir.BlockArgument):
        return False
    op = value.owner.operation
    if op.name != "arith.constant":
        return False
    attribute = op.attributes["value"]
    if isinstance(value.type, ir.RankedTensorType):
        dense = ir.DenseElementsAttr(attribute)
        if not dense.is_splat:
            return False
        attribute = dense.get_splat_value()
    return bool(ir.IntegerAttr(attribute).value >= least)
