"""What random programs are made of: values in scope, shapes, casts, offsets, masks, loads."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24}  # whole numbers up to here
INPUTS = (*INTS[:6], "float16", "float32")
SIZE = 8192  # elements of every input
OUTPUTS = ("int8", "int16", "int32", "int64")
SLOTS = 64  # words that the atomics of one statement share
MAX_TILE = 2048
PROGRAMS = 2


@dataclass(frozen=True)
class Value:
    """A variable in scope; `bound` limits the magnitude of floats. Shape () is a scalar."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bound: int = 0

    @property
    def is_float(self) -> bool:
        return self.dtype in EXACT

    @property
    def bits(self) -> int:
        return int(self.dtype.lstrip(string.ascii_lowercase) or 1)


class Pieces:
    """The lines of one program so far, and what its next statement may use."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.lines: list[str] = []
        self.depth, self.count, self.loops = 1, 0, 0
        self.scope: list[Value] = []
        self.stored = dict.fromkeys(OUTPUTS, 0)
        self.atomics = 0
        self.induction: list[str] = []

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def let(self, text: str, dtype: str, shape: tuple[int, ...], bound: int = 0) -> Value:
        """A new variable that holds an expression."""
        self.count += 1
        value = Value(f"v{self.count}", dtype, shape, bound)
        self.emit(f"{value.name} = {text}")
        self.scope.append(value)
        return value

    def shape(self, rank: int = 0) -> tuple[int, ...]:
        rank = rank or self.rng.choice((1, 1, 2, 2, 2, 2, 3))
        while True:
            shape = tuple(2 ** self.rng.randint(0, 8) for _ in range(rank))
            if math.prod(shape) <= MAX_TILE // self.rng.choice((1, 2, 4)):
                return shape

    def pick(self, *, shape: tuple[int, ...] | None = None, floats: bool = True) -> Value:
        """A value in scope, recent ones rather; loaded if none has that shape."""
        fits = [
            v for v in self.scope
            if (shape is None or v.shape == shape) and (floats or not v.is_float)
        ]  # fmt: skip
        if not fits or self.rng.random() < 0.05:
            return self.load(self.shape() if shape is None else shape, floats=floats)
        return fits[-1 - min(int(self.rng.expovariate(0.3)), len(fits) - 1)]

    def pick_tile(self, rank: int = 0, floats: bool = True) -> Value:
        for _ in range(20):
            value = self.pick(floats=floats)
            if value.shape and rank in (0, len(value.shape)):
                return value
        return self.load(self.shape(rank), floats=floats)

    def cast(self, value: Value, dtype: str) -> Value:
        """`value` as another type; into floats only small whole numbers go."""
        if value.dtype == dtype:
            return value
        if dtype not in EXACT:
            text = f"{value.name} != 0" if dtype == "int1" else f"{value.name}.to(tl.{dtype})"
            if value.is_float and dtype != "int1":  # an exact integer first: no overflow
                text = f"{value.name}.to(tl.int32).to(tl.{dtype})"
            return self.let(text, dtype, value.shape)
        if value.is_float:
            if value.bound <= EXACT[dtype]:
                text = f"{value.name}.to(tl.{dtype})"
                return self.let(text, dtype, value.shape, value.bound)
            value = self.let(f"{value.name}.to(tl.int32)", "int32", value.shape)
        small = value.name if value.dtype == "int1" else f"({value.name} & 7)"
        return self.let(f"{small}.to(tl.{dtype})", dtype, value.shape, 7)

    def index(self, shape: tuple[int, ...], *, dense: bool) -> tuple[str, int]:
        """Offsets of a tile's elements and the largest of them; `dense` ones are distinct."""
        order = list(range(len(shape)))
        if self.rng.random() < 0.4:
            self.rng.shuffle(order)
        terms, step, last = [], 1, 0
        for dim in reversed(order):
            factor = 1
            if not dense:
                factor = self.rng.choice((1,) * 8 + (2, 3, 0))
            stride = step * factor
            place = ", ".join(":" if d == dim else "None" for d in range(len(shape)))
            subscript = "" if len(shape) == 1 else f"[{place}]"
            terms.append(f"tl.arange(0, {shape[dim]}){subscript} * {stride}")
            last += (shape[dim] - 1) * stride
            step *= shape[dim] * max(factor, 1)
        if last >= SIZE // 2:
            return self.index(shape, dense=True)
        return " + ".join(terms), last

    def condition(self, shape: tuple[int, ...]) -> Value:
        """A boolean of that shape."""
        a = self.pick(shape=shape)
        if a.dtype == "int1":
            return a
        limit = self.rng.choice(("n", "pid", "3", "0")) if a.bits > 8 else "3"
        limit = f"{limit}.to(tl.{a.dtype})" if limit in ("n", "pid") else limit
        sign = self.rng.choice(("<", "<=", ">", ">=", "==", "!="))
        return self.let(f"{a.name} {sign} {limit}", "int1", shape)

    def load(self, shape: tuple[int, ...], floats: bool = True) -> Value:
        dtype = self.rng.choice(INPUTS if floats else INPUTS[:6])
        if not shape:
            text = f"tl.load({dtype}_ptr + pid)"
            return self.let(text, dtype, shape, 7 if dtype in EXACT else 0)
        offsets, _ = self.index(shape, dense=self.rng.random() < 0.6)
        shift = self.rng.choice(("pid * 64", "pid * 7", "16", "1", "n"))
        if self.induction and self.rng.random() < 0.8:
            shift += f" + {self.induction[-1]} * {self.rng.choice((1, 16, 32))}"
        self.count += 1
        place = f"p{self.count}"
        self.emit(f"{place} = {offsets} + {shift}")
        kind = self.rng.choice(("none", "none", "linear", "random"))
        mask = ""
        if kind == "linear":
            bound = self.rng.choice((1, 8, 40))
            mask = f", mask={place} < n * {bound}, other={self.rng.randint(0, 7)}"
        elif kind == "random" and any(v.shape == shape for v in self.scope):
            mask = f", mask={self.condition(shape).name}, other={self.rng.randint(0, 7)}"
        text = f"tl.load({dtype}_ptr + {place}{mask})"
        return self.let(text, dtype, shape, 7 if dtype in EXACT else 0)
