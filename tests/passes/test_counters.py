"""Counters of loops over tiles: which become functions of the loop's variable."""

import numpy as np
import pytest

import minitriton.language as tl
from minitriton.passes.traversal import kernel_of, ops_of, walk


def counts(out, n, by, KIND: tl.constexpr):
    """Stores a number that each iteration of a loop with another one inside adds to."""
    first, each = tl.program_id(0), tl.num_programs(0)
    step, start, more = each, first - each, each
    if KIND == "constant steps":
        step, start, more = 3, 5, 3
    elif KIND == "a multiple":
        step, start, more = 2, by, 6
    elif KIND == "by an argument":
        step, start, more = 2, 0, by * 2
    elif KIND == "part of a step":
        step, start, more = 4, 0, 2
    elif KIND == "by another argument":
        step, start, more = each, 0, by
    mine = start
    for i in tl.range(first, n, step):
        if KIND == "by a varying number":
            mine += i
        before = mine
        mine += more
        total = 0
        if KIND != "no loop inside":
            for j in range(0, by):
                total += j * before
        tl.store(out + i, mine + total * 100)
    if KIND == "used afterwards":
        tl.store(out + n + first, mine)


CASES = [
    ("", True), ("constant steps", True), ("a multiple", True), ("by an argument", True),
    ("part of a step", False), ("by another argument", False), ("by a varying number", False),
    ("no loop inside", False), ("used afterwards", False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "gone"), CASES)
def test_counters(kernel, kind, gone):
    kern = kernel(counts, out="*i32", n="i32", by="i32", KIND=kind)
    module = kern.compile(upto="simplify")
    out, scalars, grid = [np.zeros(32, np.int32)], [14, 3], (2, 1, 1)
    expected = kern.run(kern.build(), out, scalars, grid)
    for found in (module, kern.compile()):
        np.testing.assert_array_equal(kern.run(found, out, scalars, grid), expected)
    loop = next(op for op in walk(kernel_of(module)) if op.name == "scf.for")
    assert (len(loop.results) == 0) == gone


def test_a_counter_of_the_tiles_themselves(kernel):
    """One that is at the tile itself becomes the variable, so that what both give is computed
    once."""
    module = kernel(counts, out="*i32", n="i32", by="i32", KIND="").compile(upto="simplify")
    loop = next(op for op in walk(kernel_of(module)) if op.name == "scf.for")
    body = loop.regions[0].blocks[0]
    (store,) = [op for op in ops_of(body) if op.name == "mt.store"]
    stored = store.operands[1].owner
    assert stored.name == "arith.addi" and body.arguments[0] in list(stored.operands)
