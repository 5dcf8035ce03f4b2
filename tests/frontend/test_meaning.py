"""Control flow computes what Python computes: the same function run by both, on random inputs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import minitriton
import minitriton.language as tl


@minitriton.jit
def first_above(values, n, limit):
    found = -1
    total = 0
    for i in range(n):
        x = tl.load(values + i)
        if x < 0:
            continue
        if x > limit:
            found = i
            break
        total += x
    return found * 1000 + total


@minitriton.jit
def countdown(values, n, limit):
    total = 0
    for i in range(n - 1, -1, -2):
        total = total * 3 + tl.load(values + i)
    for i in range(limit, n, 3):
        if i > 5:
            total -= i
        elif i > 2:
            total += 2 * i
        else:
            total ^= i
    return total


@minitriton.jit
def collatz(values, n, limit):
    x = n + 1
    steps = 0
    while True:
        if x == 1:
            break
        steps += 1
        if steps > limit:
            break
        if x % 2 == 0:
            x = x // 2
            continue
        x = 3 * x + 1
    return steps * 100 + x


@minitriton.jit
def classify(x, limit):
    if x < 0:
        if x < -limit:
            return -2
        if x == -1:
            return 7
    elif x > limit:
        return 2
    x = x * 2
    if x == 0:
        return 0
    return x


@minitriton.jit
def nested_returns(values, n, limit):
    a, b = 0, 1
    for i in range(n):
        for j in range(i):
            if j == limit:
                break
            a, b = b, a + classify(tl.load(values + j), limit)
        b = -b if b > 100 else b
    return a * 31 + b


@minitriton.jit
def truths(values, n, limit):
    count = 0
    for i in range(n):
        x = tl.load(values + i)
        count += 1 if -2 < x <= limit and not (x == 0 or x == 3) else 0
        count = min(count, 40) if i % 2 == 0 else max(count, 2)
    return count


@minitriton.jit
def run(FUNCTION: tl.constexpr, out, values, n, limit):
    tl.store(out, FUNCTION(values, n, limit))


class _Host:
    """`tl` for the Python run: pointers are (array, offset)."""

    @staticmethod
    def load(pointer: Any) -> int:
        return int(pointer.array[pointer.offset])


class _Pointer:
    def __init__(self, array: Any, offset: int = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, step: int) -> _Pointer:
        return _Pointer(self.array, self.offset + step)


def on_the_host(fn: Callable[..., int]) -> Callable[..., int]:
    """The undecorated function, with `tl.load` reading an array."""
    import types

    scope = {**fn.__globals__, "tl": _Host, "classify": None}
    scope["classify"] = types.FunctionType(classify.fn.__code__, scope)
    return types.FunctionType(fn.__code__, scope)


@pytest.mark.parametrize(
    "kernel", [first_above, countdown, collatz, nested_returns, truths], ids=lambda k: k.name
)
def test_same_as_python(kernel: Any) -> None:
    for trial in range(12):
        n, limit = random.randrange(0, 12), random.randrange(0, 9)
        if trial == 0:  # both are constants, and so is all that the loops carry at first
            n = limit = 1
        values = np.array([random.randrange(-6, 10) for _ in range(16)], np.int32)
        out = np.zeros(1, np.int32)
        run[(1,)](kernel, out, values, n, limit)
        expected = on_the_host(kernel.fn)(_Pointer(values), n, limit)
        assert int(out[0]) == expected, (values.tolist(), n, limit)
