"""Mistakes in the use of the language's operators and functions: types, shapes, options."""

from __future__ import annotations

from minitriton.frontend.errors import Mistake, did_you_mean
from minitriton.ir.linear_layout import hull


class OutsideKernel(Mistake):
    title = "functions of minitriton.language only work inside a kernel"
    help = "call them from a function decorated with @minitriton.jit"


class OperandTypes(Mistake):
    operator: str
    left: str
    right: str
    remedy: str = ""
    title = "operator '{operator}' does not take {left} and {right}"
    help = "{remedy}"


class UnaryType(Mistake):
    operator: str
    value: str
    remedy: str = ""
    title = "operator '{operator}' does not take {value}"
    help = "{remedy}"


class MixedSigns(Mistake):
    operator: str
    left: str
    right: str
    title = "operator '{operator}' on {left} and {right}: the signs differ"
    help = "cast one side with .to(...) so that both are signed or both unsigned"


class LiteralRange(Mistake):
    value: object
    type: str
    title = "{value} does not fit into {type}"
    help = "cast the other operand to a wider type first"


class NegativeUnsigned(Mistake):
    value: object
    type: str
    title = "negative literal {value} against unsigned {type}"
    help = "cast one of them explicitly"


class ShapeMismatch(Mistake):
    left: str
    right: str
    dim: int
    title = "shapes {left} and {right} do not broadcast: they differ in dimension {dim}"
    help = "dimensions must be equal or 1; add one with x[:, None] or x[None, :]"


class CannotBroadcast(Mistake):
    source: str
    target: str
    title = "cannot broadcast shape {source} to {target}"


class TileSize(Mistake):
    what: str
    value: int
    step: int
    title = "{what} must be a power of two or a multiple of {step}, not {value}"
    help = "use {next} and a mask for the rest (minitriton.next_power_of_2 finds powers of two)"

    @property
    def next(self) -> int:
        return max(min(hull(self.value), -(-self.value // self.step) * self.step), 1)


class RaggedReshape(Mistake):
    source: str
    target: str
    title = "cannot reshape {source} to {target}: elements would move between threads"
    help = (
        "left of a dimension that is no power of two, the number of elements must stay; "
        "use powers of two, and a mask"
    )


class TooManyElements(Mistake):
    shape: str
    count: int
    limit: int
    title = "a tile of shape {shape} has {count} elements; the limit is {limit}"
    help = "use a smaller block and a loop or a larger grid"


class EmptyRange(Mistake):
    start: int
    end: int
    title = "tl.arange({start}, {end}) is empty"
    help = "the end must be greater than the start"


class RankMismatch(Mistake):
    what: str
    expected: str
    value: str
    title = "{what} needs {expected}, not {value}"


class ElementCount(Mistake):
    source: str
    target: str
    title = "cannot reshape {source} to {target}: the numbers of elements differ"


class AxisRange(Mistake):
    axis: object
    rank: int
    title = "axis {axis} is out of range for a tile of rank {rank}"
    help = "axes are {low} to {high}"

    @property
    def low(self) -> int:
        return -self.rank

    @property
    def high(self) -> int:
        return self.rank - 1


class BadPermutation(Mistake):
    dims: str
    rank: int
    title = "{dims} is not a permutation of the {rank} dimensions"


class TileIndex(Mistake):
    what: str
    title = "a tile cannot be indexed with {what}"
    label = "only ':' and None are possible"
    help = "select elements with tl.where and a reduction, or compute the pointers you need"


class ScalarIndex(Mistake):
    value: str
    title = "{value} cannot be indexed"
    help = "load an element with tl.load(pointer + offset)"


class TooManyIndices(Mistake):
    count: int
    rank: int
    title = "{count} indices for a tile of rank {rank}"


class NotSorted(Mistake):
    function: str
    what: str
    expected: str
    value: object
    title = "{function}: {what} must be {expected}, not {value}"


class IndexShape(Mistake):
    index: str
    source: str
    dim: int
    axis: int
    title = "tl.gather along axis {axis}: {index} and {source} differ in dimension {dim}"
    help = "only dimension {axis} of the indices may have another size"


class WrongDtype(Mistake):
    function: str
    dtype: str
    allowed: str
    remedy: str = ""
    title = "{function} takes {allowed}, not {dtype}"
    help = "{remedy}"


class BadOption(Mistake):
    option: str
    value: object
    allowed: tuple[str, ...]
    title = "{option} cannot be {value!r}"
    help = "{guess}use one of {choices}"

    @property
    def guess(self) -> str:
        found = did_you_mean(str(self.value), self.allowed)
        return f"{found} " if found else ""

    @property
    def choices(self) -> str:
        return ", ".join(repr(a) for a in self.allowed)


class NotPointer(Mistake):
    function: str
    value: str
    title = "{function} needs a pointer or a tile of pointers, not {value}"


class OtherWithoutMask(Mistake):
    title = "'other' without 'mask' has no meaning"
    help = "pass mask=..., or drop other"


class MaskType(Mistake):
    value: str
    title = "a mask must be boolean (int1), not {value}"
    help = "write a comparison, e.g. mask=offsets < n"


class ScalarPointerBlock(Mistake):
    what: str
    value: str
    title = "the pointer is a scalar, but {what} is {value}"
    help = "make a tile of pointers, e.g. pointer + tl.arange(0, BLOCK)"


class ConstPointer(Mistake):
    function: str
    type: str
    title = "{function} through {type}: the argument was declared const"


class CastRefused(Mistake):
    source: str
    target: str
    reason: str
    title = "cannot cast {source} to {target}: {reason}"


class DotShapes(Mistake):
    a: str
    b: str
    reason: str
    title = "tl.dot of {a} and {b}: {reason}"


class DotTypes(Mistake):
    a: str
    b: str
    reason: str
    remedy: str = "cast one of them with .to(...)"
    title = "tl.dot of {a} and {b}: {reason}"
    help = "{remedy}"


class DotMinimumK(Mistake):
    k: int
    minimum: int
    dtype: str
    title = "tl.dot of {dtype} needs an inner dimension K of at least {minimum}, not {k}"
    help = "use a larger BLOCK_K; pad with masked loads (other=0) if the data is smaller"


class DotStepK(Mistake):
    k: int
    step: int
    dtype: str
    title = "tl.dot of {dtype} needs an inner dimension K in steps of {step}, not {k}"
    help = "use {next}; pad with masked loads (other=0) if the data is smaller"

    @property
    def next(self) -> int:
        return -(-self.k // self.step) * self.step


class DotAccumulator(Mistake):
    acc: str
    expected: str
    title = "the accumulator of tl.dot is {acc}, but the product is {expected}"
    help = "create it with tl.zeros(shape, dtype) or pass out_dtype"


class CombineResult(Mistake):
    function: str
    expected: str
    got: str
    title = "the combine function of {function} must return {expected}, not {got}"
    help = "cast the result to the type of the arguments"


class GridAxis(Mistake):
    axis: int
    title = "a grid has no axis {axis}"
    help = "axes are 0, 1 and 2"


class HintLength(Mistake):
    function: str
    count: int
    rank: int
    title = "{function} got {count} values for {rank} dimension(s)"
    help = "give one value for each dimension"


class TypesDiffer(Mistake):
    function: str
    left: str
    right: str
    title = "{function} needs two tiles of one type, not {left} and {right}"
