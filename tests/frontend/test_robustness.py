"""Whatever a user writes compiles or raises CompileError: sampled wrong programs."""

from __future__ import annotations

import linecache
import random
import warnings
from typing import Any

import minitriton.language as tl
from minitriton.ir.diagnostics import CompileError
from tests.frontend.support import build

PROGRAMS = 1200
VALUES = [
    "p", "n", "x", "3", "-2.5", "None", "'s'", "(1, 2)", "tl.arange(0, 8)", "p + tl.arange(0, 8)",
    "tl.zeros((4, 4), tl.float16)", "tl.float32", "tl", "True", "tl.arange(0, 8) < n", "(n, x)",
    "0", "float('nan')", "(p, None)", "tl.full((2, 2, 2), 1, tl.int8)",
]  # fmt: skip
BUILTINS = "int float bool len min max abs sum zip enumerate tuple isinstance getattr type str"
FUNCTIONS = [
    f"tl.{name}"
    for name in tl.__all__
    if getattr(getattr(tl, name), "__mt_builtin__", False)
    or hasattr(getattr(tl, name), "__minitriton_source__")
] + BUILTINS.split()
OPERATORS = [
    "+",
    "-",
    "*",
    "/",
    "//",
    "%",
    "**",
    "<<",
    ">>",
    "&",
    "|",
    "^",
    "@",
    "<",
    "==",
    "!=",
    "in",
    "and",
    "or",
]
STATEMENTS = [
    "for i in {a}:\n    tl.store(p, i)",
    "while {a}:\n    n += 1",
    "if {a}:\n    n = n + 1\ntl.store(p, n)",
    "y = {a}\nfor i in range(n):\n    y = y + {b}\ntl.store(p, y)",
    "y = {a}\nfor i in range(n):\n    y = {b}\ntl.store(p, y)",
    "y, z = {a}",
    "tl.static_assert({a})",
    "return {a}",
    "for i in range({a}, {b}):\n    pass",
    "y = {a}\nif n > 2:\n    y = {b}\ntl.store(p, y)",
    "y = {a}\nwhile n > 2:\n    n -= 1\n    if n == 3:\n        y = {b}\n        break",
    "y = ({a}).T",
    "y = ({a})[{b}]",
    "y = ({a})[None, :]",
    "y = -({a})",
    "y = not ({a})",
    "y = ({a}).to({b})",
    "y = ({a}) if n > 0 else ({b})",
    "y = [i for i in ({a})]",
]


def program(choose: random.Random) -> str:
    """Body of a random kernel."""
    a, b = choose.choice(VALUES), choose.choice(VALUES)
    match choose.randrange(4):
        case 0:
            return choose.choice(STATEMENTS).format(a=a, b=b)
        case 1:
            return f"y = ({a}) {choose.choice(OPERATORS)} ({b})"
    count = choose.randrange(4)
    arguments = ", ".join([a, b, *choose.choices(VALUES, k=2)][:count])
    return f"y = {choose.choice(FUNCTIONS)}({arguments})"


def outcome(body: str, number: int) -> str:
    """What building the kernel raised, apart from CompileError."""
    name = f"<robustness {number}>"
    text = "def kernel(p, n, x):\n    " + body.replace("\n", "\n    ") + "\n"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope: dict[str, Any] = {"tl": tl}
    exec(compile(text, name, "exec"), scope)
    try:
        build(scope["kernel"], p="*fp32", n="i32", x="fp32")
    except CompileError as error:
        assert error.diagnostic.span is not None, body
        str(error)
    except Exception as error:
        return f"{body}\n  {type(error).__name__}: {error}"
    return ""


def test_random_programs_never_fail_internally(capsys: Any) -> None:
    seed = random.randrange(1 << 32)
    choose = random.Random(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        found = [outcome(program(choose), i) for i in range(PROGRAMS)]
    failures = [f for f in found if f]
    capsys.readouterr()
    assert not failures, f"seed {seed}\n" + "\n".join(failures[:10])
