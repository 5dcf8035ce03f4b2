"""What a kernel's author can get wrong: one dataclass per mistake, its text as class-level templates.

Code that finds a mistake raises it with its facts; the nearest enclosing expression or statement
adds the place (`Frame.located`) and turns it into a `CompileError`. The mistakes of the language's
functions are in `errors_semantic.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from minitriton.ir.diagnostics import Diagnostic, Note, Span


class _Fields:
    """Lets templates name fields and properties alike."""

    def __init__(self, mistake: Mistake) -> None:
        self._mistake = mistake

    def __getitem__(self, name: str) -> Any:
        return getattr(self._mistake, name)


class Mistake(Exception):
    """Base of all: `title`, `label` (beside the carets) and `help` are `str.format` templates."""

    title: ClassVar[str] = ""
    label: ClassVar[str] = ""
    help: ClassVar[str] = ""
    argument: str | None = None  # parameter of the called function that is to blame
    span: Span | None = None  # a better place than the expression being evaluated

    def text(self, template: str) -> str:
        """`template` with this mistake's facts."""
        return template.format_map(_Fields(self))

    def notes(self) -> tuple[Note, ...]:
        """Other places that belong to it."""
        return ()

    def diagnostic(self, span: Span | None, calls: tuple[tuple[str, Span], ...]) -> Diagnostic:
        """The diagnostic at `span` inside the inlined `calls`."""
        return Diagnostic(
            self.text(self.title),
            self.span or span,
            self.text(self.label),
            self.text(self.help),
            self.notes(),
            calls,
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` did you mean 'x'?` for the nearest known name, else the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else ""


def kind_of(value: Any) -> str:
    """How a value is called in messages: its tile type, or its Python type and value."""
    type_ = getattr(value, "type", None)
    if hasattr(value, "handle"):
        return f"tile {type_}" if type_.is_block() else f"scalar {type_}"
    if value is None or isinstance(value, bool | int | float | str):
        return f"constexpr {value!r}"
    if isinstance(value, tuple):
        return f"tuple of {len(value)}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{type(value).__name__} {name}" if name else type(value).__name__


# Syntax that kernels do not have.


@dataclass(eq=False)
class UnsupportedSyntax(Mistake):
    what: str
    remedy: str = ""
    title = "{what} is not supported in a kernel"
    help = "{remedy}"


@dataclass(eq=False)
class ItemAssignment(Mistake):
    target: str
    title = "cannot assign to {target}: tiles are values, not memory"
    help = "use tl.where(index == i, value, tile), or tl.store through a pointer"


@dataclass(eq=False)
class StarTarget(Mistake):
    title = "starred assignment is not supported"
    help = "unpack into a fixed number of names"


@dataclass(eq=False)
class ReturnInLoop(Mistake):
    title = "'return' inside a loop is not supported"
    help = "set a flag and 'break', then return after the loop"


@dataclass(eq=False)
class ReturnsDiffer(Mistake):
    first: str
    second: str
    title = "the paths of this function return different types: {first} and {second}"
    help = "return values of one type on every path (cast with .to(...))"


@dataclass(eq=False)
class KernelReturns(Mistake):
    value: str
    title = "a kernel cannot return a value (here {value})"
    label = "kernels write results with tl.store"
    help = "store the value through a pointer argument"


@dataclass(eq=False)
class NoSource(Mistake):
    name: str
    reason: str
    title = "no source text for function '{name}': {reason}"
    help = "define the kernel in a file, a notebook cell, or exec text registered in linecache"


@dataclass(eq=False)
class BadParameters(Mistake):
    what: str
    title = "{what} in the signature of a kernel is not supported"
    help = "list the parameters one by one"


# Names.


@dataclass(eq=False)
class UndefinedName(Mistake):
    name: str
    known: tuple[str, ...] = ()
    title = "name '{name}' is not defined"
    label = "not found in this kernel, its module, or its closure"
    help = "{guess}"

    @property
    def guess(self) -> str:
        return did_you_mean(self.name, self.known)


@dataclass(eq=False)
class UnsupportedBuiltin(Mistake):
    name: str
    title = "Python's '{name}' cannot be used in a kernel"
    help = "available: {available}"
    available: str = ""


@dataclass(eq=False)
class MaybeUndefined(Mistake):
    name: str
    where: str
    defined: Span | None
    title = "name '{name}' may be undefined here: it is only assigned {where}"
    help = "assign '{name}' before, so that it has a value on every path"

    def notes(self) -> tuple[Note, ...]:
        return (Note(f"'{self.name}' is assigned here", self.defined),) if self.defined else ()


@dataclass(eq=False)
class BranchTypes(Mistake):
    name: str
    first: str
    second: str
    first_span: Span | None
    second_span: Span | None
    title = "'{name}' has different types after this 'if': {first} and {second}"
    help = "make both assignments of one type, e.g. with .to(...), tl.full or tl.zeros"

    def notes(self) -> tuple[Note, ...]:
        return tuple(
            Note(f"{kind} assigned here", span)
            for kind, span in ((self.first, self.first_span), (self.second, self.second_span))
            if span is not None
        )


@dataclass(eq=False)
class LoopTypeChange(Mistake):
    name: str
    before: str
    after: str
    before_span: Span | None
    title = "'{name}' changes its type in the loop: {before} before it, {after} after one iteration"
    label = "this makes it {after}"
    help = "initialise '{name}' with the type it has in the loop, or cast it back with .to()"

    def notes(self) -> tuple[Note, ...]:
        text = f"'{self.name}' is {self.before} from here"
        return (Note(text, self.before_span),) if self.before_span else ()


@dataclass(eq=False)
class NonConstexprGlobal(Mistake):
    name: str
    value: str
    title = "global '{name}' is a plain Python value ({value}), which a kernel cannot capture"
    label = "its value may change between launches"
    help = "write {name} = tl.constexpr(...) at module level, or pass it as a parameter"


@dataclass(eq=False)
class UnknownAttribute(Mistake):
    owner: str
    name: str
    known: tuple[str, ...] = ()
    title = "{owner} has no attribute '{name}'"
    help = "{guess}"

    @property
    def guess(self) -> str:
        return did_you_mean(self.name, self.known)


# Calls.


@dataclass(eq=False)
class NotDeviceFunction(Mistake):
    name: str
    title = "'{name}' is a plain Python function, which cannot run on the device"
    help = "decorate it with @minitriton.jit, or with @minitriton.constexpr_function if all its " \
        "arguments are known at compile time"


@dataclass(eq=False)
class NotCallable(Mistake):
    value: str
    title = "cannot call {value}"


@dataclass(eq=False)
class WrongArguments(Mistake):
    name: str
    reason: str
    signature: str
    title = "wrong arguments for '{name}': {reason}"
    help = "its signature is {name}{signature}"


@dataclass(eq=False)
class TooDeep(Mistake):
    name: str
    depth: int
    title = "'{name}' is inlined {depth} levels deep: the recursion does not end at compile time"
    help = "end it with an 'if' on a constexpr parameter"


@dataclass(eq=False)
class ConstexprFailed(Mistake):
    what: str
    reason: str
    title = "{what} failed at compile time: {reason}"


@dataclass(eq=False)
class RuntimeArgument(Mistake):
    name: str
    value: str
    title = "'{name}' runs at compile time, but was given a run-time value ({value})"
    help = "pass constexpr values only"


@dataclass(eq=False)
class NotConstexpr(Mistake):
    what: str
    value: str
    expected: str = "a compile-time constant"
    title = "{what} must be {expected}, not {value}"
    label = "known only at run time or of the wrong kind"
    help = "use a literal, or a parameter annotated with tl.constexpr"


@dataclass(eq=False)
class StaticAssertFailed(Mistake):
    message: str
    title = "static assertion failed{message}"


# Control flow.


@dataclass(eq=False)
class BlockCondition(Mistake):
    where: str
    type: str
    title = "the condition of {where} must be a scalar, not a tile {type}"
    help = "reduce it first (tl.max, tl.sum), or select elementwise with tl.where"


@dataclass(eq=False)
class BadCondition(Mistake):
    where: str
    value: str
    title = "{value} cannot be the condition of {where}"


@dataclass(eq=False)
class NotIterable(Mistake):
    value: str
    title = "cannot loop over {value}"
    help = "loop over range(...), tl.range(...), tl.static_range(...) or a tuple"


@dataclass(eq=False)
class RangeBounds(Mistake):
    what: str
    value: str
    title = "{what} of a range must be an integer scalar, not {value}"


@dataclass(eq=False)
class ZeroStep(Mistake):
    title = "a range needs a step other than zero"


@dataclass(eq=False)
class EndlessLoop(Mistake):
    title = "this loop never ends: its condition is always true"
    help = "let the condition depend on a value that changes in the loop, or use 'break'"


@dataclass(eq=False)
class Unpacking(Mistake):
    expected: int
    value: str
    title = "cannot unpack {value} into {expected} names"


@dataclass(eq=False)
class StaticJump(Mistake):
    word: str
    title = "'{word}' in a loop that is unrolled at compile time needs a compile-time condition"
    help = "use range(...) instead of tl.static_range(...), or mask the work"
