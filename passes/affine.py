"""Integer and pointer tiles as affine functions of the element's coordinates.

    value[i, j, ...] = scalar + dims[0] * i + dims[1] * j + ...

The coefficients are polynomials in the kernel's scalars: arguments, program ids, induction
variables and whatever else has no simpler form. A value that a loop adds the same amount to in
every iteration is a function of the induction variable. Index arithmetic is taken as exact: what
wraps round 32 bits addresses nothing sensible in the original program either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from minitriton.ir.dialect import PtrType, shape_of
from minitriton.ir.mlir import ir
from minitriton.ir.signs import is_non_negative
from minitriton.passes.traversal import (
    Value,
    block_of,
    defining_op,
    int_array,
    int_attribute,
    integer_constant,
    terminator_of,
)

Monomial = tuple[int, ...]  # numbers of atoms, sorted; () is the constant


@dataclass(frozen=True)
class Polynomial:
    """Integer coefficients by monomial; none of them zero."""

    terms: Mapping[Monomial, int] = field(default_factory=dict)

    @staticmethod
    def constant(value: int) -> Polynomial:
        return Polynomial({(): value} if value else {})

    def __add__(self, other: Polynomial) -> Polynomial:
        return _collect([*self.terms.items(), *other.terms.items()])

    def __sub__(self, other: Polynomial) -> Polynomial:
        return self + other * Polynomial.constant(-1)

    def __mul__(self, other: Polynomial) -> Polynomial:
        products = [
            (tuple(sorted(a + b)), x * y)
            for a, x in self.terms.items()
            for b, y in other.terms.items()
        ]
        return _collect(products)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Polynomial) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(frozenset(self.terms.items()))

    def __bool__(self) -> bool:
        return bool(self.terms)

    @property
    def value(self) -> int | None:
        """The number that this is; None where it depends on atoms."""
        return self.terms.get((), 0) if all(not m for m in self.terms) else None

    def atoms(self) -> set[int]:
        return {atom for monomial in self.terms for atom in monomial}

    def divided(self, divisor: int) -> Polynomial | None:
        """This over a constant; None where a coefficient leaves a remainder."""
        if any(c % divisor for c in self.terms.values()):
            return None
        return Polynomial({m: c // divisor for m, c in self.terms.items()})


def _collect(terms: Iterable[tuple[Monomial, int]]) -> Polynomial:
    found: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        found[monomial] = found.get(monomial, 0) + coefficient
    return Polynomial({m: c for m, c in found.items() if c})


ZERO, ONE = Polynomial(), Polynomial.constant(1)


@dataclass(frozen=True)
class Wrap:
    """A remainder that was taken as its dividend (or a choice as its first value): right where
    index < bound along dim, if the arguments in `non_negative` are not negative."""

    dim: int
    bound: Polynomial
    non_negative: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Affine:
    """A tile (or scalar, without dims) of integers, or of offsets in elements from argument
    `base`."""

    scalar: Polynomial
    dims: tuple[Polynomial, ...] = ()
    base: int | None = None
    wraps: tuple[Wrap, ...] = ()

    def plus(self, other: Affine, sign: int = 1) -> Affine | None:
        """The sum or difference; None where both are pointers."""
        if self.base is not None and other.base is not None:
            return None
        factor = Polynomial.constant(sign)
        left, right = _same_rank(self, other)
        dims = tuple(a + b * factor for a, b in zip(left.dims, right.dims, strict=True))
        base = left.base if right.base is None else right.base
        scalar = left.scalar + right.scalar * factor
        return Affine(scalar, dims, base, left.wraps + right.wraps)

    def times(self, factor: Polynomial) -> Affine:
        return Affine(
            self.scalar * factor, tuple(d * factor for d in self.dims), self.base, self.wraps
        )

    def single(self) -> int | None:
        """The one dimension that this counts along, one by one; None if it is not like that."""
        nonzero = [dim for dim, c in enumerate(self.dims) if c]
        return nonzero[0] if len(nonzero) == 1 and self.dims[nonzero[0]] == ONE else None


def _same_rank(a: Affine, b: Affine) -> tuple[Affine, Affine]:
    rank = max(len(a.dims), len(b.dims))
    return _padded(a, rank), _padded(b, rank)


def _padded(a: Affine, rank: int) -> Affine:
    return a if len(a.dims) == rank else Affine(a.scalar, (ZERO,) * rank, a.base, a.wraps)


class AffineAnalysis:
    """Affine forms of the values of one kernel, made on demand."""

    def __init__(self, entry: ir.Block) -> None:
        self._entry = entry
        self._numbers: dict[Value, int] = {}
        self.atoms: list[Value] = []
        self.names: list[list[Value]] = []  # per atom, values that are equal to it
        self._found: dict[Value, Affine | None] = {}

    def of(self, value: Value) -> Affine | None:
        """The form of `value`; None where it has none. A scalar integer always has one."""
        if value not in self._found:
            self._found[value] = None  # ends recursion through loops
            self._found[value] = self._analyse(value)
        return self._found[value]

    def argument(self, atom: int) -> int | None:
        """Which argument of the kernel an atom is; None if it is something else."""
        value = self.atoms[atom]
        if isinstance(value, ir.BlockArgument) and value.owner == self._entry:
            return ir.BlockArgument(value).arg_number
        return None

    def entry_argument(self, number: int) -> Value:
        """The argument of the kernel with this number."""
        return self._entry.arguments[number]

    def _atom(self, value: Value) -> Affine:
        if value not in self._numbers:
            self._numbers[value] = len(self.atoms)
            self.atoms.append(value)
            self.names.append([value])
        return Affine(Polynomial({(self._numbers[value],): 1}))

    def _analyse(self, value: Value) -> Affine | None:
        found = self._argument(value) if isinstance(value, ir.BlockArgument) else self._op(value)
        is_scalar = shape_of(value.type) is None and isinstance(value.type, ir.IntegerType)
        return self._atom(value) if found is None and is_scalar else found

    def _argument(self, value: Value) -> Affine | None:
        argument = ir.BlockArgument(value)
        if argument.owner == self._entry:
            if isinstance(value.type, PtrType):
                return Affine(ZERO, (), argument.arg_number)
            return None
        loop = argument.owner.owner.operation
        if loop.name != "scf.for" or argument.arg_number == 0:
            return None
        return self._recurrence(loop, argument)

    def _recurrence(self, loop: ir.Operation, argument: ir.BlockArgument) -> Affine | None:
        """initial + (induction - lower) / step * increment."""
        body = loop.regions[0].blocks[0]
        update = defining_op(terminator_of(body).operands[argument.arg_number - 1])
        if update is None or update.name not in ("arith.addi", "mt.addptr"):
            return None
        operands = list(update.operands)
        if argument not in operands:
            return None
        increment = self.of(operands[1 - operands.index(argument)])
        initial = self.of(loop.operands[2 + argument.arg_number])
        if increment is None or initial is None or any(increment.dims) or increment.wraps:
            return None
        each = self._for_each_step(increment.scalar, loop.operands[2])
        if each is None or self._varies(each, body):
            return None
        induction, lower = self.of(body.arguments[0]), self.of(loop.operands[0])
        assert induction is not None and lower is not None, "scalars always have a form"
        return initial.plus(Affine((induction.scalar - lower.scalar) * each))

    def _for_each_step(self, increment: Polynomial, step: Value) -> Polynomial | None:
        """increment / step, where that is whole."""
        form, number = self.of(step), integer_constant(step)
        if form is not None and form.scalar == increment and number != 0:
            return ONE
        return increment.divided(number) if number is not None and number > 0 else None

    def _varies(self, value: Polynomial, body: ir.Block) -> bool:
        """Whether an atom of `value` is made inside the loop."""
        for atom in value.atoms():
            block: ir.Block | None = block_of(self.atoms[atom])
            while block is not None:
                if block == body:
                    return True
                owner = block.owner.operation
                block = None if owner.name == "func.func" else owner.block
        return False

    def _op(self, value: Value) -> Affine | None:
        op = value.owner.operation
        number = integer_constant(value)
        if number is not None:
            shape = shape_of(value.type) or ()
            return Affine(Polynomial.constant(number), (ZERO,) * len(shape))
        rule = _RULES.get(op.name)
        return rule(self, op) if rule else None

    # one rule per op

    def sum(self, op: ir.Operation) -> Affine | None:
        a, b = (self.of(v) for v in op.operands)
        return None if a is None or b is None else a.plus(b)

    def difference(self, op: ir.Operation) -> Affine | None:
        a, b = (self.of(v) for v in op.operands)
        return None if a is None or b is None else a.plus(b, -1)

    def product(self, op: ir.Operation) -> Affine | None:
        a, b = (self.of(v) for v in op.operands)
        if a is None or b is None:
            return None
        a, b = _same_rank(a, b)
        if any(a.dims):
            a, b = b, a
        return None if any(a.dims) or a.wraps else b.times(a.scalar)

    def remainder(self, op: ir.Operation) -> Affine | None:
        """x % m as x, which is right where 0 <= x < m: whoever uses this must show it."""
        x, m = (self.of(v) for v in op.operands)
        if x is None or m is None or any(m.dims) or m.wraps or x.wraps:
            return None
        dim, arguments = x.single(), set[int]()
        if dim is None or not self.non_negative(x.scalar, arguments):
            return None
        wrap = Wrap(dim, m.scalar - x.scalar, frozenset(arguments))
        return Affine(x.scalar, x.dims, None, (wrap,))

    def choice(self, op: ir.Operation) -> Affine | None:
        """x where index < bound, else something, as x: whoever uses this must show the bound."""
        bounds, x = bounds_of(op.operands[0], self), self.of(op.operands[1])
        if x is None or x.wraps or not any(x.dims) or bounds is None or len(bounds) != 1:
            return None
        dim, limit, is_upper = bounds[0]
        return replace(x, wraps=(Wrap(dim, limit),)) if is_upper else None

    def hint(self, op: ir.Operation) -> Affine | None:
        """A value with a promise about it."""
        inner = self.of(op.operands[0])
        if inner is not None and not inner.dims and len(inner.scalar.terms) == 1:
            ((monomial, coefficient),) = inner.scalar.terms.items()
            if coefficient == 1 and len(monomial) == 1:
                self.names[monomial[0]].append(op.results[0])
        return inner

    def same(self, op: ir.Operation) -> Affine | None:
        return self.of(op.operands[0])

    def splat(self, op: ir.Operation) -> Affine | None:
        inner = self.of(op.operands[0])
        return None if inner is None else _padded(inner, len(op.results[0].type.shape))

    def range(self, op: ir.Operation) -> Affine | None:
        start, end = int_attribute(op, "start"), int_attribute(op, "end")
        return Affine(Polynomial.constant(start), (ONE if end - start > 1 else ZERO,))

    def expand_dims(self, op: ir.Operation) -> Affine | None:
        inner, axis = self.of(op.operands[0]), int_attribute(op, "axis")
        return (
            None
            if inner is None
            else _moved(inner, lambda dims: [*dims[:axis], None, *dims[axis:]])
        )

    def trans(self, op: ir.Operation) -> Affine | None:
        inner, order = self.of(op.operands[0]), int_array(op, "order")
        return None if inner is None else _moved(inner, lambda dims: [dims[d] for d in order])

    # signs

    def non_negative(self, value: Polynomial, arguments: set[int] | None = None) -> bool:
        """Whether `value` is never negative, if the arguments of the kernel that are collected in
        `arguments` are not. Divisors are taken as positive."""
        lowest = self._at_last_steps(self._without_grid(value), arguments)
        return all(c > 0 for c in lowest.terms.values()) and all(
            is_non_negative(self.atoms[atom], arguments, positive_divisors=True)
            for atom in lowest.atoms()
        )

    def _at_last_steps(self, value: Polynomial, arguments: set[int] | None) -> Polynomial:
        """A lower bound of `value` without the induction variables that are subtracted: each is at
        most one less than the end of its loop. Inner ones go first, as that may have outer ones."""
        subtracted = {
            monomial: atom
            for monomial, c in value.terms.items()
            for atom in monomial
            if c < 0
            and self._depth(atom)
            and self.non_negative(Polynomial({_without(monomial, atom): 1}), arguments)
        }
        if not subtracted:
            return value
        inner = max(subtracted.values(), key=self._depth)
        end = self.of(_loop_of(self.atoms[inner]).operands[1])
        assert end is not None, "scalars always have a form"
        lowest = Polynomial()
        for monomial, c in value.terms.items():
            term = Polynomial({monomial: c})
            if subtracted.get(monomial) == inner:
                term = (end.scalar - ONE) * Polynomial({_without(monomial, inner): c})
            lowest = lowest + term
        return self._at_last_steps(lowest, arguments)

    def _depth(self, atom: int) -> int:
        """How many ops are around the body of the loop whose induction variable an atom is; 0 if it
        is none."""
        value = self.atoms[atom]
        if not isinstance(value, ir.BlockArgument) or value.owner == self._entry:
            return 0
        op, depth = _loop_of(value), 0
        if op.name != "scf.for" or ir.BlockArgument(value).arg_number:
            return 0
        while op.name != "func.func":
            op, depth = op.parent.operation, depth + 1
        return depth

    def _without_grid(self, value: Polynomial) -> Polynomial:
        """A lower bound of `value` without the sizes of the grid: each is at least id + 1."""
        ids = {}
        for number, atom in enumerate(self.atoms):
            op = defining_op(atom)
            if op is not None and op.name == "mt.program_id":
                ids[int_attribute(op, "axis")] = number
        terms: list[tuple[Monomial, int]] = []
        for monomial, c in value.terms.items():
            op = defining_op(self.atoms[monomial[0]]) if len(monomial) == 1 else None
            if op is not None and op.name == "mt.num_programs" and c > 0:
                own = ids.get(int_attribute(op, "axis"))
                terms += [((), c)] + ([((own,), c)] if own is not None else [])
            else:
                terms.append((monomial, c))
        return _collect(terms)


def _loop_of(value: Value) -> ir.Operation:
    """The op whose region has the block argument `value`."""
    return ir.BlockArgument(value).owner.owner.operation


def _without(monomial: Monomial, atom: int) -> Monomial:
    """`monomial` over one of its atoms."""
    left = list(monomial)
    left.remove(atom)
    return tuple(left)


def _moved(a: Affine, move: Callable[[list[int | None]], list[int | None]]) -> Affine:
    """`a` with its dimensions rearranged; None in the new list stands for a new one."""
    order = move(list(range(len(a.dims))))
    place = {old: new for new, old in enumerate(order) if old is not None}
    dims = tuple(ZERO if old is None else a.dims[old] for old in order)
    return Affine(a.scalar, dims, a.base, tuple(replace(w, dim=place[w.dim]) for w in a.wraps))


_RULES: dict[str, Callable[[AffineAnalysis, ir.Operation], Affine | None]] = {
    "arith.addi": AffineAnalysis.sum,
    "mt.addptr": AffineAnalysis.sum,
    "arith.subi": AffineAnalysis.difference,
    "arith.muli": AffineAnalysis.product,
    "arith.remsi": AffineAnalysis.remainder,
    "arith.select": AffineAnalysis.choice,
    "arith.extsi": AffineAnalysis.same,
    "mt.hint": AffineAnalysis.hint,
    "mt.convert_layout": AffineAnalysis.same,
    "mt.broadcast": AffineAnalysis.same,
    "mt.splat": AffineAnalysis.splat,
    "mt.make_range": AffineAnalysis.range,
    "mt.expand_dims": AffineAnalysis.expand_dims,
    "mt.trans": AffineAnalysis.trans,
}


def bounds_of(mask: Value, analysis: AffineAnalysis) -> list[tuple[int, Polynomial, bool]] | None:
    """A mask as bounds on coordinates: (dim, limit, upper) says index < limit along dim, or, not
    upper, index >= limit. None where the mask says anything else."""
    op = defining_op(mask)
    if op is None:
        return None
    if integer_constant(mask):
        return []
    if op.name == "arith.andi":
        parts = [bounds_of(operand, analysis) for operand in op.operands]
        return None if None in parts else [bound for part in parts for bound in part or []]
    if op.name in ("mt.broadcast", "mt.convert_layout"):
        return bounds_of(op.operands[0], analysis)
    if op.name == "mt.expand_dims":
        axis = int_attribute(op, "axis")
        inner = bounds_of(op.operands[0], analysis)
        return inner and [(dim + (dim >= axis), limit, upper) for dim, limit, upper in inner]
    if op.name != "arith.cmpi":
        return None
    return _comparison(op, analysis)


# arith.cmpi predicates as (left minus right compared with zero): strict?, left is the smaller?
_PREDICATES = {2: (True, True), 3: (False, True), 4: (True, False), 5: (False, False)}


def _comparison(
    op: ir.Operation, analysis: AffineAnalysis
) -> list[tuple[int, Polynomial, bool]] | None:
    predicate = _PREDICATES.get(int_attribute(op, "predicate"))
    left, right = (analysis.of(v) for v in op.operands)
    if predicate is None or left is None or right is None or left.wraps or right.wraps:
        return None
    strict, smaller_left = predicate
    low, high = (left, right) if smaller_left else (right, left)
    difference = high.plus(low, -1)  # > 0 where strict, else >= 0
    if difference is None or difference.base is not None:
        return None
    nonzero = [dim for dim, c in enumerate(difference.dims) if c]
    if len(nonzero) != 1:
        return None
    dim, coefficient = nonzero[0], difference.dims[nonzero[0]].value
    if coefficient == -1:  # limit - index > 0
        return [(dim, difference.scalar + (ZERO if strict else ONE), True)]
    if coefficient == 1:  # index - limit >= 0
        return [(dim, (ONE if strict else ZERO) - difference.scalar, False)]
    return None
