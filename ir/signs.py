"""Which scalar integers of tile IR are known not to be negative; arithmetic is taken as exact."""

from __future__ import annotations

from minitriton.ir.mlir import ir

DEEPEST = 12  # operations that a proof looks through
# Operations that are not negative where so many of their first operands are not.
_OPERANDS = {
    "mt.program_id": 0, "mt.num_programs": 0, "mt.cta_id": 0, "mt.cta_count": 0, "mt.hint": 1,
    "mt.group_id": 0, "mt.group_count": 0,
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
    op = value.owner.operation
    if op.name == "arith.constant":
        return bool(ir.IntegerAttr(op.attributes["value"]).value >= 0)
    if op.name == "arith.maxsi":
        return any(holds(operand, None) for operand in op.operands)
    count = _OPERANDS.get(op.name)
    if op.name == "arith.divsi" and positive_divisors:
        count = 1
    return count is not None and all(holds(v, arguments) for v in list(op.operands)[:count])
