"""Operands of inline PTX: constraint strings, registers of packed elements, names in the text."""

import pytest

from minitriton.ir.asm_operands import (
    Constraints,
    elements_per_register,
    fits,
    parse_constraints,
    registers_of,
    unknown_operand,
)


@pytest.mark.parametrize(
    ("text", "results", "operands"),
    [
        ("=r,r", "r", "r"),
        ("=&f, =d , h,l,b", "fd", "hlb"),
        ("=r,=f,1,0,r", "rf", "frr"),
        ("=l,~{memory},~{cc}", "l", ""),
    ],
)
def test_constraints(text, results, operands):
    assert parse_constraints(text) == Constraints(tuple(results), tuple(operands))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("r,=r", "before"),
        ("=x,r", "'=x'"),
        ("=r,3", "no result 3"),
        ("=r,,r", "''"),
        ("+r", "'\\+r'"),
    ],
)
def test_wrong_constraints(text, problem):
    with pytest.raises(ValueError, match=problem):
        parse_constraints(text)


@pytest.mark.parametrize(
    ("bits", "pack", "each"),
    [(8, 1, 1), (8, 2, 2), (8, 4, 4), (8, 8, 4), (16, 4, 2), (32, 4, 1), (64, 2, 1), (1, 4, 1)],
)
def test_elements_of_a_register(bits, pack, each):
    assert elements_per_register(bits, pack) == each


def test_registers():
    assert registers_of([8, 32, 16], 4) == [32, 32, 32, 32, 32, 32, 32]
    assert registers_of([8, 64], 2) == [16, 64, 64]
    with pytest.raises(ValueError, match="pack=6"):
        registers_of([8], 6)


@pytest.mark.parametrize(
    ("letter", "bits", "right"),
    [("r", 32, True), ("r", 8, True), ("h", 32, False), ("f", 32, True), ("f", 16, False),
     ("l", 64, True), ("b", 1, True), ("b", 8, False), ("d", 32, False)],
)  # fmt: skip
def test_what_fits(letter, bits, right):
    assert fits(letter, bits) is right


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("add.s32 $0, $1, ${1};", None),
        ("$$L: bra $$L; // ${:uid} ${0:x}", None),
        ("mov.b32 $0, $2;", "$2"),
        ("mov.b32 $0, ${12};", "${12}"),
        ("$L: ret;", "$L"),
        ("mov.b32 $0, $", "$"),
    ],
)
def test_names_in_the_text(text, unknown):
    assert unknown_operand(text, 2) == unknown
