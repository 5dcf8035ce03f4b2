"""Classes of ops that passes treat alike."""

from __future__ import annotations

from minitriton.ir.dialect import element_of, shape_of
from minitriton.ir.mlir import ir

_ELEMENTWISE_MT = frozenset(
    f"mt.{name}"
    for name in ("addptr", "ptr_to_int", "int_to_ptr", "ptr_cast", "fp_cast", "mulhi",
                 "tanh_approx", "precise", "hint")
)  # fmt: skip
SHAPE_OPS = frozenset(
    f"mt.{name}"
    for name in ("expand_dims", "broadcast", "reshape", "trans", "join", "split", "cat")
)
# Each of several results is made element by element (ir/ops_elementwise.py).
SEVERAL_RESULTS = frozenset(
    ("mt.elementwise_asm", "mt.effectful_asm", "mt.map_elementwise", "mt.unpack_e2m1")
)
# Ops that hand a tile on to what reads it, in another layout or order.
MOVES = frozenset(("mt.convert_layout", "mt.trans"))
MEMORY_ACCESS = frozenset(("mt.load", "mt.store", "mt.atomic_rmw", "mt.atomic_cas"))
# Ops after which values read from global memory before may be stale.
MAY_WRITE = frozenset(
    ("mt.store", "mt.atomic_rmw", "mt.atomic_cas", "mt.barrier", "mt.grid_wait", "scf.while",
     "scf.for", "scf.if", "mt.effectful_asm")
)  # fmt: skip
# Ops through which a loop may overwrite what its loads read.
WRITES_IN_LOOP = frozenset(
    (
        "mt.store",
        "mt.atomic_rmw",
        "mt.atomic_cas",
        "mt.barrier",
        "mt.grid_wait",
        "scf.while",
        "mt.effectful_asm",
    )
)
LOOPS = frozenset(("scf.for", "scf.while"))
DIVISIONS = frozenset(f"arith.{name}" for name in ("divsi", "divui", "remsi", "remui"))
_PURE_MT = frozenset(
    f"mt.{name}"
    for name in ("program_id", "num_programs", "cta_id", "cta_count", "group_id", "group_count",
                 "make_range", "splat", "dot", "reduce", "scan", "gather", "histogram",
                 "convert_layout", "elementwise_asm", "map_elementwise", "unpack_e2m1")
) | _ELEMENTWISE_MT | SHAPE_OPS  # fmt: skip


def is_elementwise(name: str) -> bool:
    """Result element i is a function of element i of each tile operand (scalars aside)."""
    if name.startswith(("arith.", "math.")):
        return name != "arith.constant"
    return name in _ELEMENTWISE_MT


def keeps_elements(name: str) -> bool:
    """`is_elementwise`, or the same for each of several results."""
    return is_elementwise(name) or name in SEVERAL_RESULTS


def names_special_register(op: ir.Operation) -> bool:
    """Whether an op is inline PTX that may depend on where it runs: %ctaid, %tid, %smid, ..."""
    return "asm" in op.attributes and "%" in ir.StringAttr(op.attributes["asm"]).value


def is_pure(name: str) -> bool:
    """No effect, and the same result for the same operands wherever it runs."""
    return name in _PURE_MT or name.startswith(("arith.", "math."))


def may_trap(op: ir.Operation) -> bool:
    """Division by a value that is not a known nonzero constant, or a function of scalars that has
    one or may not end: it must not be speculated."""
    from minitriton.passes.traversal import integer_constant, walk

    if op.name == "mt.map_elementwise":
        return any(inner.name == "scf.while" or may_trap(inner) for inner in walk(op))
    if op.name not in DIVISIONS:
        return False

    return integer_constant(op.operands[1]) in (None, 0, -1)


def is_tile(value: ir.Value) -> bool:
    """Whether a value is a tensor."""
    return isinstance(value.type, ir.RankedTensorType)


def tile_operands(op: ir.Operation) -> list[ir.Value]:
    """The operands that are tensors."""
    return [v for v in op.operands if isinstance(v.type, ir.RankedTensorType)]


def widens(op: ir.Operation) -> bool:
    """A cast of one tile to wider elements."""
    from minitriton.ir.types import bit_width

    if op.name not in ("arith.extf", "arith.extsi", "arith.extui", "arith.sitofp", "arith.uitofp",
                       "mt.fp_cast"):  # fmt: skip
        return False
    source, result = op.operands[0].type, op.results[0].type
    if shape_of(source) is None:
        return False
    return bit_width(element_of(source)) < bit_width(element_of(result))
