"""Names and remedies for the Python syntax that kernels do not have."""

from __future__ import annotations

import ast

from minitriton.frontend.errors import UnsupportedSyntax

_LOOPS = "use 'for' over range(...), tl.range(...), tl.static_range(...), or 'while'"
REFUSED: dict[type, tuple[str, str]] = {
    ast.Lambda: ("a lambda", "write a function decorated with @minitriton.jit at module level"),
    ast.FunctionDef: ("a nested function", "move it to module level and decorate it with @jit"),
    ast.AsyncFunctionDef: ("an async function", ""),
    ast.ClassDef: ("a class definition", "define classes outside the kernel"),
    ast.Import: ("'import'", "import at module level"),
    ast.ImportFrom: ("'import'", "import at module level"),
    ast.Try: ("'try'", "device code raises no exceptions; use tl.device_assert to check"),
    ast.Raise: ("'raise'", "use tl.static_assert or tl.device_assert"),
    ast.With: ("'with'", ""),
    ast.Global: ("'global'", "pass values as parameters and return results"),
    ast.Nonlocal: ("'nonlocal'", "pass values as parameters and return results"),
    ast.Delete: ("'del'", ""),
    ast.Match: ("'match'", "use if/elif/else"),
    ast.AsyncFor: ("'async for'", _LOOPS),
    ast.AsyncWith: ("'async with'", ""),
    ast.Await: ("'await'", ""),
    ast.Yield: ("'yield'", "return a tuple"),
    ast.YieldFrom: ("'yield'", "return a tuple"),
    ast.NamedExpr: ("':='", "assign in a statement of its own"),
    ast.Dict: ("a dictionary", "use a tuple or a namedtuple"),
    ast.Set: ("a set", "use a tuple"),
    ast.DictComp: ("a dictionary comprehension", "use a list comprehension over a tuple"),
    ast.SetComp: ("a set comprehension", "use a list comprehension over a tuple"),
    ast.GeneratorExp: ("a generator", "use a list comprehension"),
    ast.Starred: ("'*' here", "write the elements one by one"),
}


def refuse(node: ast.AST) -> UnsupportedSyntax:
    """The mistake of using `node` in a kernel."""
    what, remedy = REFUSED.get(type(node), (f"{type(node).__name__} syntax", ""))
    return UnsupportedSyntax(what, remedy)
