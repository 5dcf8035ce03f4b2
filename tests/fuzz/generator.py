"""Random tile kernels as Python source, the same for the same seed.

Integers come first, and must come out exactly; floats hold whole numbers whose bound is tracked, so
that every sum of theirs is exact in any order. Shifts, divisors and addresses are kept in range,
masked loads name their `other`: nothing that a program does is undefined.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pieces import EXACT, INPUTS, INTS, MAX_TILE, OUTPUTS, PROGRAMS, SIZE, SLOTS, Pieces, Value

HEADER = """\
import minitriton as triton
import minitriton.language as tl

@triton.jit
def affine(a, b, c, d):
    return a * c, b * c + d

@triton.jit
def pair(a, b, c, d):
    return a + c, b ^ d

@triton.jit
def later(a, b):
    return b

@triton.jit
def mix(a, b):
    return (a ^ b) + (a & b) * 2

"""


@dataclass(frozen=True)
class Program:
    """Kernel source, and how many elements each output array and the atomics need."""

    source: str
    stored: dict[str, int]
    atomics: int


class Generator(Pieces):
    """Makes one program; every statement adds lines and perhaps values in scope."""

    def program(self) -> Program:
        """A whole kernel."""
        self.emit("pid = tl.program_id(0)")
        self.scope += [Value("pid", "int32", ()), Value("n", "int32", ())]
        for _ in range(self.rng.randint(2, 3)):
            self.load(self.shape())
        for _ in range(self.rng.randint(4, 14)):
            self.statement()
        text = "\n".join(self.lines)
        unused = [v for v in self.scope if len(re.findall(rf"\b{v.name}\b", text)) == 1]
        for value in unused:
            self.store(value)
        names = [f"{t}_ptr" for t in INPUTS] + [f"out_{t}_ptr" for t in OUTPUTS]
        head = f"@triton.jit\ndef kernel({', '.join(names)}, atomic_ptr, n):\n"
        source = HEADER + head + "\n".join(self.lines) + "\n"
        return Program(source, dict(self.stored), self.atomics)

    def statement(self) -> None:
        """One random statement, nested ones included."""
        simple = (
            (self.binary, 8), (self.unary, 3), (self.convert, 3), (self.where, 3), (self.view, 5),
            (self.widen, 3), (self.reduce, 5), (self.scan, 2), (self.dot, 2), (self.compare, 2),
            (self.atomic, 1), (self.gather, 1), (self.join, 1), (self.store_now, 1),
            (lambda: self.load(self.shape()), 1),
        )  # fmt: skip
        nested = ((self.loop, 3), (self.branch, 2)) if self.depth < 3 else ()
        kinds, weights = zip(*simple, *nested, strict=True)
        self.rng.choices(kinds, weights)[0]()

    def gather(self) -> None:
        index = self.pick_tile(floats=False)
        dtype = self.rng.choice(INPUTS)
        text = f"tl.load({dtype}_ptr + ({index.name}.to(tl.int32) & {SIZE - 1}))"
        self.let(text, dtype, index.shape, 7 if dtype in EXACT else 0)

    def binary(self) -> None:
        a = self.pick()
        same = self.pick(shape=a.shape) if self.rng.random() < 0.8 else self.pick(shape=())
        if a.dtype == "int1" or same.dtype == "int1":
            a, b = self.cast(a, "int1"), self.cast(same, "int1")
            self.let(f"{a.name} {self.rng.choice('&|^')} {b.name}", "int1", a.shape)
            return
        b = self.cast(same, a.dtype)
        if a.is_float:
            self.float_binary(a, b)
            return
        x, y, low = a.name, b.name, a.bits - 1
        text = self.rng.choice((
            f"{x} + {y}", f"{x} - {y}", f"{x} * {y}", f"{x} & {y}", f"{x} | {y}", f"{x} ^ {y}",
            f"{x} << ({y} & {low})", f"{x} >> ({y} & {low})", f"{x} // (({y} & 15) + 1)",
            f"{x} % (({y} & 31) + 1)", f"tl.minimum({x}, {y})", f"tl.maximum({x}, {y})",
            f"{x} + {self.rng.randint(0, 99)}", f"{x} * {self.rng.randint(1, 9)}",
            f"{x} // {self.rng.choice((1, 2, 3, 7, 8, 64))}",
            f"{x} % {self.rng.choice((2, 5, 16))}",
        ))  # fmt: skip
        self.let(text, a.dtype, a.shape)

    def float_binary(self, a: Value, b: Value) -> None:
        sign, bound = self.rng.choice((
            ("+", a.bound + b.bound), ("-", a.bound + b.bound), ("*", a.bound * b.bound),
            ("max", max(a.bound, b.bound)), ("min", max(a.bound, b.bound)),
        ))  # fmt: skip
        if bound > EXACT[a.dtype]:
            sign, bound = "max", max(a.bound, b.bound)
        text = f"{a.name} {sign} {b.name}"
        if sign in ("max", "min"):
            text = f"tl.{sign}imum({a.name}, {b.name}).to(tl.{a.dtype})"  # bf16 becomes fp32
        self.let(text, a.dtype, a.shape, bound)

    def unary(self) -> None:
        a = self.pick()
        if a.dtype == "int1":
            self.let(f"~{a.name}", "int1", a.shape)
        elif a.is_float:
            text = self.rng.choice((f"-{a.name}", f"tl.abs({a.name})"))
            self.let(text, a.dtype, a.shape, a.bound)
        else:
            forms = [f"~{a.name}"] + [f"-{a.name}", f"tl.abs({a.name})"] * (a.dtype[0] == "i")
            self.let(self.rng.choice(forms), a.dtype, a.shape)

    def convert(self) -> None:
        a = self.pick()
        self.cast(a, self.rng.choice((*INTS, *EXACT)))

    def compare(self) -> None:
        a = self.pick()
        if a.dtype == "int1":
            return
        b = self.cast(self.pick(shape=a.shape), a.dtype)
        sign = self.rng.choice(("<", "<=", ">", ">=", "==", "!="))
        self.let(f"{a.name} {sign} {b.name}", "int1", a.shape)

    def where(self) -> None:
        a = self.pick()
        b = self.cast(self.pick(shape=a.shape), a.dtype)
        condition = self.condition(a.shape)
        text = f"tl.where({condition.name}, {a.name}, {b.name})"
        self.let(text, a.dtype, a.shape, max(a.bound, b.bound))

    def view(self) -> None:
        """A change of shape that keeps the elements."""
        a = self.pick_tile()
        count, x = math.prod(a.shape), a.name
        kind = self.rng.choice(("reshape", "trans", "split", "ravel", "expand"))
        if kind == "trans" and len(a.shape) > 1:
            order = list(range(len(a.shape)))
            self.rng.shuffle(order)
            shape = tuple(a.shape[i] for i in order)
            self.let(f"tl.permute({x}, {tuple(order)})", a.dtype, shape, a.bound)
        elif kind == "split" and count > 2:
            shape = (count // 2,) if self.rng.random() < 0.5 or count < 8 else (count // 8, 4)
            pair = self.let(f"tl.reshape({x}, {(*shape, 2)})", a.dtype, (*shape, 2), a.bound)
            one, two = f"s{self.count}a", f"s{self.count}b"
            self.emit(f"{one}, {two} = tl.split({pair.name})")
            self.scope += [replace(pair, name=name, shape=shape) for name in (one, two)]
        elif kind == "expand" and len(a.shape) < 3:
            axis = self.rng.randint(0, len(a.shape))
            shape = (*a.shape[:axis], 1, *a.shape[axis:])
            self.let(f"tl.expand_dims({x}, {axis})", a.dtype, shape, a.bound)
        elif kind == "ravel":
            self.let(f"tl.ravel({x})", a.dtype, (count,), a.bound)
        else:
            first = 2 ** self.rng.randint(0, int(math.log2(count)))
            shape = (first, count // first)
            self.let(f"tl.reshape({x}, {shape})", a.dtype, shape, a.bound)

    def join(self) -> None:
        a = self.pick_tile()
        if 2 * math.prod(a.shape) > MAX_TILE or len(a.shape) > 2:
            return
        b = self.cast(self.pick(shape=a.shape), a.dtype)
        bound = max(a.bound, b.bound)
        if self.rng.random() < 0.5:
            self.let(f"tl.join({a.name}, {b.name})", a.dtype, (*a.shape, 2), bound)
        else:
            shape = (*a.shape[:-1], 2 * a.shape[-1])
            self.let(f"tl.interleave({a.name}, {b.name})", a.dtype, shape, bound)

    def widen(self) -> None:
        """Broadcasting: of two vectors against each other, of a scalar, or of a dim of size 1."""
        a = self.pick()
        if len(a.shape) == 1 and a.dtype != "int1" and not a.is_float:
            b = self.cast(self.pick_tile(1, floats=False), a.dtype)
            if len(b.shape) == 1 and a.shape[0] * b.shape[0] <= MAX_TILE:
                sign = self.rng.choice(("+", "*", "^", "-"))
                shape = (a.shape[0], b.shape[0])
                self.let(f"{a.name}[:, None] {sign} {b.name}[None, :]", a.dtype, shape)
            return
        room = MAX_TILE // max(math.prod(a.shape), 1)
        sizes = [s if s > 1 else min(2 ** self.rng.randint(0, 5), room) for s in a.shape]
        shape = tuple(sizes) if a.shape else self.shape()
        if math.prod(shape) <= MAX_TILE:
            self.let(f"tl.broadcast_to({a.name}, {shape})", a.dtype, shape, a.bound)

    def reduce(self) -> None:
        a = self.pick_tile()
        axis = self.rng.randrange(len(a.shape))
        shape = (*a.shape[:axis], *a.shape[axis + 1 :])
        bound = a.bound
        names = ["max", "min", "argmax", "argmin"]
        if a.is_float:
            names += ["sum"] if a.bound * a.shape[axis] <= EXACT[a.dtype] else []
        elif a.dtype == "int1":
            a = self.cast(a, "int32")
            names = ["sum", "xor_sum"]
        else:
            names += ["sum", "sum", "xor_sum", "mix", "pair"]
        name = self.rng.choice(names)
        if name == "sum" and a.is_float:
            bound *= a.shape[axis]
        dtype = "int32" if name in ("argmax", "argmin") else a.dtype
        match name:
            case "mix":
                text = f"tl.reduce({a.name}, {axis}, mix)"
            case "pair":
                pair = f"({a.name}, {a.name})"
                self.emit(f"a{self.count}, b{self.count} = tl.reduce({pair}, {axis}, pair)")
                text = f"a{self.count} ^ b{self.count}"
            case _:
                text = f"tl.{name}({a.name}, axis={axis})"
        if name not in ("argmax", "argmin"):  # small integers and bf16 get wider
            text = f"({text}).to(tl.{dtype})"
        self.let(text, dtype, shape, bound)

    def scan(self) -> None:
        a = self.pick_tile()
        axis, back = self.rng.randrange(len(a.shape)), self.rng.random() < 0.4
        options = f"axis={axis}, reverse={back}"
        if a.is_float:
            bound = a.bound * a.shape[axis]
            if bound <= EXACT[a.dtype]:
                self.let(f"tl.cumsum({a.name}, {options})", a.dtype, a.shape, bound)
            return
        if a.dtype == "int1":
            a = self.cast(a, "int32")
        if self.rng.random() < 0.3:
            one, two = f"a{self.count}", f"b{self.count}"
            other = self.cast(self.pick(shape=a.shape, floats=False), a.dtype)
            pair = f"({a.name}, {other.name})"
            scan = f"tl.associative_scan({pair}, {axis}, affine, reverse={back})"
            self.emit(f"{one}, {two} = {scan}")
            text = f"{one} - {two}"
        else:
            text = self.rng.choice((
                f"tl.cumsum({a.name}, {options}).to(tl.{a.dtype})",
                f"tl.cumprod({a.name}, {options}).to(tl.{a.dtype})",
                f"tl.associative_scan({a.name}, {axis}, later, reverse={back})",
            ))  # fmt: skip
        self.let(text, a.dtype, a.shape)

    def dot(self) -> None:
        m, n, k = (self.rng.choice((16, 16, 32, 64)) for _ in range(3))
        if self.rng.random() < 0.5:
            a = self.pick_tile(2)
            m, k = a.shape
        if m < 16 or k < 32 or m * k > MAX_TILE or n * k > MAX_TILE or m * n > MAX_TILE:
            m, n, k = 16, 32, 32
        dtype = self.rng.choice(("int8", "float16", "bfloat16", "float32"))
        a = self.cast(self.pick(shape=(m, k)), dtype)
        if self.rng.random() < 0.3:
            b = self.cast(self.pick(shape=(n, k)), dtype)
            b = self.let(f"tl.trans({b.name})", dtype, (k, n), b.bound)
        else:
            b = self.cast(self.pick(shape=(k, n)), dtype)
        bound = a.bound * b.bound * k
        if bound > EXACT["float32"] or max(a.bound, b.bound) > 2**10:
            return
        result = "int32" if dtype == "int8" else "float32"
        acc = ""
        if self.rng.random() < 0.5:
            c = self.cast(self.pick(shape=(m, n)), result)
            if bound + c.bound <= EXACT["float32"]:
                acc, bound = f", {c.name}", bound + c.bound
        self.let(f"tl.dot({a.name}, {b.name}{acc})", result, (m, n), bound)

    def store_now(self) -> None:
        if not self.induction:  # one place each: programs of a loop would overwrite
            self.store(self.pick_tile())

    def store(self, value: Value) -> None:
        dtype = value.dtype.replace("uint", "int")
        dtype = {"int1": "int8"}.get(dtype, "int32" if value.is_float else dtype)
        text = value.name if value.dtype == dtype else f"{value.name}.to(tl.{dtype})"
        offsets = self.index(value.shape, dense=True)[0] if value.shape else "0"
        count = math.prod(value.shape)
        mask = f", mask={self.condition(value.shape).name}" if self.rng.random() < 0.2 else ""
        place = f"{self.stored[dtype]} + pid * {count}"
        self.emit(f"tl.store(out_{dtype}_ptr + {place} + {offsets}, {text}{mask})")
        self.stored[dtype] += PROGRAMS * count

    def atomic(self) -> None:
        value = self.cast(self.pick_tile(), "int32")
        name = self.rng.choice(("add", "max", "min", "and", "or", "xor"))
        offsets, _ = self.index(value.shape, dense=True)
        mask = f", mask={self.condition(value.shape).name}" if self.rng.random() < 0.5 else ""
        place = f"atomic_ptr + {self.atomics} + ({offsets}) % {self.rng.choice((1, 5, SLOTS))}"
        self.emit(f"tl.atomic_{name}({place}, {value.name}{mask})")
        self.atomics += SLOTS

    def carried(self) -> list[Value]:
        """Some variables that a nested block will assign to."""
        named = [v for v in self.scope if v.name[0] in "vs" and v.dtype in INTS]
        return self.rng.sample(named, min(len(named), self.rng.randint(1, 3)))

    def body(self, targets: list[Value], statements: int) -> None:
        """A block that ends by assigning to `targets`; what it defines ends with it."""
        outside, self.depth = list(self.scope), self.depth + 1
        for _ in range(statements):
            self.statement()
        for target in targets:
            new = self.cast(self.pick(shape=target.shape, floats=False), target.dtype)
            sign = self.rng.choice(("+", "^", "*", "-"))
            text = new.name if self.rng.random() < 0.4 else f"{target.name} {sign} {new.name}"
            self.emit(f"{target.name} = {text}")
        if not targets:
            self.emit("pass")
        self.depth -= 1
        self.scope = outside

    def loop(self) -> None:
        self.loops += 1
        i = f"i{self.loops}"
        stop = self.rng.choice(("2", "3", "4", "n & 3", "pid", "0", "5", "n % 7"))
        step = self.rng.choice(("", "", f", {self.rng.randint(1, 3)}"))
        start = "0, " if step else self.rng.choice(("", "1, "))
        stages = self.rng.choice(("", ", num_stages=1", ", num_stages=2", ", num_stages=4"))
        targets = self.carried()
        self.emit(f"for {i} in tl.range({start}{stop}{step}{stages}):")
        self.induction.append(i)
        self.scope.append(Value(i, "int32", ()))
        self.body(targets, self.rng.randint(1, 5))
        self.induction.pop()
        self.scope = [v for v in self.scope if v.name != i]

    def branch(self) -> None:
        scalar = self.condition(()).name
        if self.rng.random() < 0.5:
            scalar = f"pid {self.rng.choice(('==', '<'))} {self.rng.choice(('0', '1', 'n'))}"
        targets = self.carried()
        self.emit(f"if {scalar}:")
        self.body(targets, self.rng.randint(0, 3))
        if self.rng.random() < 0.7:
            self.emit("else:")
            self.body(targets, self.rng.randint(0, 3))


def generate(seed: int) -> Program:
    """The program of a seed."""
    return Generator(seed).program()
