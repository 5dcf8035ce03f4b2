"""Source text as the compiler sees it: positions, outer names, and the key of a kernel's code."""

from __future__ import annotations

import itertools
import linecache
import types
from typing import Any

import pytest

import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction, SourceFunction
from minitriton.ir.diagnostics import CompileError
from tests.frontend.support import build

_numbers = itertools.count()
TEXT = """
import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit
import math
SCALE = tl.constexpr(2)
FLAG: tl.constexpr = 3

@jit
def helper(x):
    return x * SCALE

@jit
def kernel(p, n, B: tl.constexpr = 4):
    # a comment
    tl.store(p, helper(n) + math.pi + FLAG)
"""


def load(text: str, name: str = "") -> types.SimpleNamespace:
    """Names of a module with this source."""
    name = name or f"<source {next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(text, name, "exec"), scope)
    return types.SimpleNamespace(**scope)


def key(text: str) -> str:
    return load(text, "<key>").kernel.__minitriton_source__.dependency_key()


@pytest.mark.parametrize(
    "old,new,same",
    [
        ("# a comment", "# another comment", True),
        ("\n@jit\ndef kernel", "\n\n\n@jit\ndef kernel", False),  # lines are in the code
        ("helper(n) +", "helper( n )  +", False),  # and columns
        ("return x * SCALE", "return x + SCALE", False),
        ("constexpr(2)", "constexpr(2.0)", False),
        ("FLAG: tl.constexpr = 3", "FLAG: tl.constexpr = 4", False),
        ("helper(n) +", "helper(n) -", False),
    ],
)
def test_dependency_key(old: str, new: str, same: bool) -> None:
    assert old in TEXT
    assert (key(TEXT) == key(TEXT.replace(old, new))) is same


def test_captured_values_follow_the_module() -> None:
    module = load(TEXT)
    source = module.kernel.__minitriton_source__
    before = source.captured(), source.dependency_key()
    module.kernel.__mt_fn__.__globals__["SCALE"] = tl.constexpr(5)
    assert source.captured() != before[0] and source.dependency_key() != before[1]
    assert "5 : i32" in build(module.kernel, p="*fp32", n="i32")


def test_recursive_functions_have_a_key() -> None:
    text = TEXT.replace("x * SCALE", "helper(x - 1) if x else SCALE")
    assert key(text) != key(TEXT)


def test_positions_of_indented_functions() -> None:
    module = load(
        "import minitriton.language as tl\n"
        "def make():\n"
        "    @staticmethod\n"
        "    def kernel(p):\n"
        "        tl.store(p,\n"
        "                 wrong)\n"
        "    return kernel.__func__\n"
        "kernel = make()\n"
    )
    with pytest.raises(CompileError) as caught:
        build(module.kernel, p="*fp32")
    span = caught.value.diagnostic.span
    assert span is not None
    assert (span.line, span.column, span.end_line, span.end_column) == (6, 17, 6, 22)


def test_closures_are_captured() -> None:
    def make(width: Any, combine: Any) -> Any:
        def kernel(p):  # type: ignore[no-untyped-def]
            tl.store(p + tl.arange(0, width), combine(1.0))

        return kernel

    @DeviceFunction
    def double(x):  # type: ignore[no-untyped-def]
        return x * 2

    first, second = (SourceFunction(make(tl.constexpr(w), double)) for w in (8, 16))
    assert "tensor<16x" in build(second.fn, p="*fp32")
    assert first.dependency_key() != second.dependency_key()
    with pytest.raises(CompileError, match="plain Python value"):
        build(make(8, double), p="*fp32")


def test_functions_without_source_are_refused() -> None:
    scope: dict[str, Any] = {}
    exec("def kernel(p):\n    return", scope)
    with pytest.raises(CompileError, match="no source text"):
        build(scope["kernel"], p="*fp32")


def test_calling_the_language_outside_a_kernel() -> None:
    with pytest.raises(RuntimeError, match="inside a kernel"):
        tl.program_id(0)


def test_import_is_light() -> None:
    import subprocess
    import sys

    code = (
        "import sys, minitriton.language\n"
        "bad = [m for m in sys.modules if m == 'numpy' or 'mlir' in m or m == 'torch']\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_philox_matches_its_definition() -> None:
    """The stream of Philox-4x32-10, run on the emulator against Python integers."""
    np = pytest.importorskip("numpy")
    import minitriton

    seed, offset, count = 0x1234567_89ABCDEF, int(np.random.default_rng().integers(1 << 30)), 64
    out = np.zeros((count, 4), np.uint32)
    minitriton.jit(philox_kernel)[(1,)](out, seed, offset, B=count)
    for i in range(count):
        words = philox((offset + i, 0, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
        assert out[i].tolist() == words
    assert philox((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def philox_kernel(out, seed, offset, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, B)
    a, b, c, d = tl.randint4x(seed, i + offset)
    for j, word in enumerate((a, b, c, d)):
        tl.store(out + i * 4 + j, word)


def philox(counter: tuple[int, ...], keys: tuple[int, int]) -> list[int]:
    """Reference in Python integers."""
    c, (k0, k1), mask = list(counter), keys, 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & mask, (a >> 32) ^ c[3] ^ k1, a & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c
