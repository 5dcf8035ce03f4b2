"""Mistakes in what runs element by element: inline PTX and scalar functions."""

from __future__ import annotations

from minitriton.frontend.errors import Mistake


class AsmConstraints(Mistake):
    constraints: str
    problem: str
    wanted: str
    title = "constraints {constraints!r} do not fit: {problem}"
    help = 'dtype and args take registers like "{wanted}"'


class AsmOperand(Mistake):
    name: str
    known: str
    title = "the text has {name!r}, but the constraints make registers {known}"
    help = "write $$ for a dollar sign"


class AsmPack(Mistake):
    problem: str
    title = "{problem}"
    help = "pack a multiple of as many elements as 32 bits hold, or 1"


class PackSize(Mistake):
    what: str
    value: int
    title = "{what} must be at least 1, not {value}"


class NoResults(Mistake):
    function: str
    title = "{function} must return something"
    help = "return a value that is not used, such as 0"


class TooManyValues(Mistake):
    function: str
    limit: int
    title = "{function} takes and returns at most {limit} values"


class MapResults(Mistake):
    types: str
    pack: int
    title = "the function of tl.map_elementwise returns {types}: not {pack} scalars of each type"
    help = "return scalars, {pack} of a type in a row for each result"


class EffectsInMap(Mistake):
    op: str
    title = "the function of tl.map_elementwise must not use {what}"
    help = "load before and store after it: it computes values only"

    @property
    def what(self) -> str:
        return "tl." + _USUAL_NAMES.get(self.op, self.op)


_USUAL_NAMES = {  # of ops that are called otherwise in the language
    "print": "device_print",
    "assert": "device_assert",
    "barrier": "debug_barrier",
    "atomic_rmw": "atomic_*",
    "effectful_asm": "inline_asm_elementwise with is_pure=False",
}
