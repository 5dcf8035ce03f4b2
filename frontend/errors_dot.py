"""Mistakes in products of scaled operands."""

from __future__ import annotations

from minitriton.frontend.errors import Mistake


class ScaledFormat(Mistake):
    value: str
    format: str
    allowed: str
    title = "{value} does not hold numbers of format {format!r}"
    help = "pass a tile of {allowed}"


class ScaledPacking(Mistake):
    side: str
    format: str
    title = "{side}_k_pack=False is for format 'e2m1', not {format!r}"


class ScaledDepth(Mistake):
    left: int
    right: int
    title = "lhs has {left} numbers along K, rhs has {right}"
    help = "a byte of format 'e2m1' counts for two, along the dimension that is packed"


class ScaledResult(Mistake):
    wanted: str
    title = "tl.dot_scaled gives fp32, not {wanted}"
    help = "cast the result with .to(...)"


class ScaleType(Mistake):
    value: str
    title = "{value} is no tile of scales"
    help = "pass uint8 (e8m0) for blocks of 32, fp8e4nv for blocks of 16, or None"


class ScaleShape(Mistake):
    name: str
    shape: str
    wanted: str
    title = "{name} has shape {shape}, not {wanted}"
    help = "one scale for each block along K, which comes last for both operands"
