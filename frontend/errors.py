"""What a kernel's author can get wrong: one class per mistake, its text as class-level templates.

Code that finds a mistake raises it with its facts; the nearest enclosing expression or statement
adds the place (`Frame.located`) and turns it into a `CompileError`. The mistakes of the language's
functions are in `errors_semantic.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, ClassVar, Self, dataclass_transform

from minitriton.frontend.values import Compound
from minitriton.ir.diagnostics import Diagnostic, Note, Span


class _Fields:
    """Lets templates name fields and properties alike."""

    def __init__(self, mistake: Mistake) -> None:
        self._mistake = mistake

    def __getitem__(self, name: str) -> Any:
        return getattr(self._mistake, name)


@dataclass_transform(eq_default=False)
class Mistake(Exception):
    """Base of all: `title`, `label` (beside the carets) and `help` are `str.format` templates.

    The annotated names of a subclass are its fields, as in a dataclass; the constructor is shared,
    because generating sixty of them would cost every user program 25 ms at import.
    """

    title: ClassVar[str] = ""
    label: ClassVar[str] = ""
    help: ClassVar[str] = ""
    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(inspect.get_annotations(cls))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args)
        self.argument: str | None = None  # parameter of the called function that is to blame
        self.span: Span | None = None  # a better place than the expression being evaluated
        self.__dict__.update(zip(self._fields, args, strict=False), **kwargs)
        missing = [f for f in self._fields if f not in self.__dict__ and not hasattr(type(self), f)]
        if missing or len(args) > len(self._fields):
            raise TypeError(f"{type(self).__name__}: missing {missing}, got {args}")

    def about(self, argument: str) -> Self:
        """The same, blamed on the value passed for parameter `argument`."""
        self.argument = argument
        return self

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
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else ""


def kind_of(value: Any) -> str:
    """How a value is called in messages: its tile type, or its Python type and value."""
    if hasattr(value, "handle"):
        type_ = value.type
        return f"tile {type_}" if type_.is_block() else f"scalar {type_}"
    if value is None or isinstance(value, bool | int | float | str):
        return f"constexpr {value!r}"
    if isinstance(value, tuple):
        return f"tuple of {len(value)}"
    if isinstance(value, Compound):
        return str(value)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{type(value).__name__} {name}" if name else type(value).__name__


# Syntax that kernels do not have.


class UnsupportedSyntax(Mistake):
    what: str
    remedy: str = ""
    title = "{what} is not supported in a kernel"
    help = "{remedy}"


class ItemAssignment(Mistake):
    target: str
    title = "cannot assign to {target}: tiles are values, not memory"
    help = "use tl.where(index == i, value, tile), or tl.store through a pointer"


class StarTarget(Mistake):
    title = "starred assignment is not supported"
    help = "unpack into a fixed number of names"


class ReturnInLoop(Mistake):
    title = "'return' inside a loop is not supported"
    help = "set a flag and 'break', then return after the loop"


class ReturnsDiffer(Mistake):
    first: str
    second: str
    title = "the paths of this function return different types: {first} and {second}"
    help = "return values of one type on every path (cast with .to(...))"


class KernelReturns(Mistake):
    value: str
    title = "a kernel cannot return a value (here {value})"
    label = "kernels write results with tl.store"
    help = "store the value through a pointer argument"


class NoSource(Mistake):
    name: str
    reason: str
    title = "no source text for function '{name}': {reason}"
    help = "define the kernel in a file, a notebook cell, or exec text registered in linecache"


class BadParameters(Mistake):
    what: str
    title = "{what} in the signature of a kernel is not supported"
    help = "list the parameters one by one"


# Names.


class UndefinedName(Mistake):
    name: str
    known: tuple[str, ...] = ()
    title = "name '{name}' is not defined"
    label = "not found in this kernel, its module, or its closure"
    help = "{guess}"

    @property
    def guess(self) -> str:
        return did_you_mean(self.name, self.known)


class ReadBeforeAssignment(Mistake):
    name: str
    title = "name '{name}' is read before it is assigned"
    label = "assigned only further down, or in code that was not compiled"
    help = "assign '{name}' first"


class UnsupportedBuiltin(Mistake):
    name: str
    title = "Python's '{name}' cannot be used in a kernel"
    help = "available: {available}"
    available: str = ""


class MaybeUndefined(Mistake):
    name: str
    where: str
    defined: Span | None
    title = "name '{name}' may be undefined here: it is only assigned {where}"
    help = "assign '{name}' before, so that it has a value on every path"

    def notes(self) -> tuple[Note, ...]:
        return (Note(f"'{self.name}' is assigned here", self.defined),) if self.defined else ()


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


class TernaryTypes(Mistake):
    first: str
    second: str
    title = "the sides of this conditional expression differ in type: {first} and {second}"
    help = "cast them to one type with .to(...), or select elementwise with tl.where"


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


class NonConstexprGlobal(Mistake):
    name: str
    value: str
    title = "global '{name}' is a plain Python value ({value}), which a kernel cannot capture"
    label = "its value may change between launches"
    help = "write {name} = tl.constexpr(...) at module level, or pass it as a parameter"


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


class NotDeviceFunction(Mistake):
    name: str
    title = "'{name}' is a plain Python function, which cannot run on the device"
    help = (
        "decorate it with @minitriton.jit, or with @minitriton.constexpr_function if all its "
        "arguments are known at compile time"
    )


class NotCallable(Mistake):
    value: str
    title = "cannot call {value}"


class WrongArguments(Mistake):
    name: str
    reason: str
    signature: str
    title = "wrong arguments for '{name}': {reason}"
    help = "its signature is {name}{signature}"


class TooDeep(Mistake):
    name: str
    depth: int
    title = "'{name}' is inlined {depth} levels deep: the recursion does not end at compile time"
    help = "end it with an 'if' on a constexpr parameter"


class ConstexprFailed(Mistake):
    what: str
    reason: str
    title = "{what} failed at compile time: {reason}"


class RuntimeArgument(Mistake):
    name: str
    value: str
    title = "'{name}' runs at compile time, but was given a run-time value ({value})"
    help = "pass constexpr values only"


class NotConstexpr(Mistake):
    what: str
    value: str
    expected: str = "a compile-time constant"
    title = "{what} must be {expected}, not {value}"
    label = "known only at run time or of the wrong kind"
    help = "use a literal, or a parameter annotated with tl.constexpr"


class StaticAssertFailed(Mistake):
    message: str
    title = "static assertion failed{message}"


# Control flow.


class BlockCondition(Mistake):
    where: str
    type: str
    title = "the condition of {where} must be a scalar, not a tile {type}"
    help = "reduce it first (tl.max, tl.sum), or select elementwise with tl.where"


class BadCondition(Mistake):
    where: str
    value: str
    title = "{value} cannot be the condition of {where}"


class NotIterable(Mistake):
    value: str
    title = "cannot loop over {value}"
    help = "loop over range(...), tl.range(...), tl.static_range(...) or a tuple"


class RangeBounds(Mistake):
    what: str
    value: str
    title = "{what} of a range must be an integer scalar, not {value}"


class ZeroStep(Mistake):
    title = "a range needs a step other than zero"


class EndlessLoop(Mistake):
    title = "this loop never ends: its condition is always true"
    help = "let the condition depend on a value that changes in the loop, or use 'break'"


class Unpacking(Mistake):
    expected: int
    value: str
    title = "cannot unpack {value} into {expected} names"


class StaticJump(Mistake):
    word: str
    title = "'{word}' in a loop that is unrolled at compile time needs a compile-time condition"
    help = "use range(...) instead of tl.static_range(...), or mask the work"
