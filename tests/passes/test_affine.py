"""Affine forms against what the program computes, and the arithmetic of polynomials."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minitriton.ir.context import use
from minitriton.passes.affine import AffineAnalysis, Polynomial
from minitriton.passes.traversal import defining_op, integer_constant, kernel_of, walk
from tests.passes import tma_kernels

TERMS = st.dictionaries(
    st.lists(st.integers(0, 3), max_size=3).map(lambda m: tuple(sorted(m))),
    st.integers(-9, 9).filter(bool), max_size=4,
).map(Polynomial)  # fmt: skip
VALUES = st.lists(st.integers(-5, 5), min_size=4, max_size=4)


def value_of(polynomial, values):
    return sum(
        c * int(np.prod([values[a] for a in m], initial=1)) for m, c in polynomial.terms.items()
    )


@given(TERMS, TERMS, VALUES)
def test_polynomials_are_a_ring(p, q, values):
    a, b = value_of(p, values), value_of(q, values)
    assert value_of(p + q, values) == a + b
    assert value_of(p - q, values) == a - b
    assert value_of(p * q, values) == a * b
    assert (p - q == Polynomial()) == (p == q)


@pytest.mark.parametrize("form", range(5))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(i=st.integers(-20, 20), j=st.integers(-20, 20), n=st.integers(0, 9))
def test_forms_say_what_is_stored(kernel, form, i, j, n):
    with use():
        kern = kernel(tma_kernels.offsets, out="*i64", i="i32", j="i32", n="i32", FORM=form)
        module = kern.build()
        entry = kernel_of(module).regions[0].blocks[0]
        analysis = AffineAnalysis(entry)
        store = [op for op in walk(kernel_of(module)) if op.name == "mt.store"][-1]
        stored = analysis.of(store.operands[1])
        assert stored is not None and stored.base is None
        arguments = {1: i, 2: j, 3: n}
        values = []
        for number, atom in enumerate(analysis.atoms):
            argument = analysis.argument(number)
            values.append(arguments[argument] if argument is not None else 0)  # program_id(0)
            assert argument is not None or defining_op(atom).name == "mt.program_id"
        rows, columns = np.ogrid[:8, :16]
        steps = [value_of(c, values) for c in stored.dims]
        expected = value_of(stored.scalar, values) + steps[0] * rows + steps[1] * columns
        (out,) = kern.run(module, [np.zeros((8, 16), np.int64)], [i, j, n])
        np.testing.assert_array_equal(out, expected)


def test_carried_tiles_follow_the_induction_variable(kernel):
    """Inside the loop too: value = columns + (step - 2) / 3 * 6 i."""
    kern = kernel(tma_kernels.offsets, out="*i64", i="i32", j="i32", n="i32", FORM=3)
    module = kern.build()
    analysis = AffineAnalysis(kernel_of(module).regions[0].blocks[0])
    (loop,) = [op for op in walk(kernel_of(module)) if op.name == "scf.for"]
    carried = analysis.of(loop.regions[0].blocks[0].arguments[1])
    assert carried is not None and integer_constant(loop.operands[2]) == 3
    shown = {
        tuple(analysis.argument(a) or "induction" for a in m): c
        for m, c in carried.scalar.terms.items()
    }
    assert shown == {(1, "induction"): 2, (1,): -4} or shown == {("induction", 1): 2, (1,): -4}


def test_a_choice_by_a_bound_is_its_first_value_up_to_there(kernel):
    """where(x < m, x, 5): x, if the index is below the bound along x's dimension."""
    kern = kernel(tma_kernels.offsets, out="*i64", i="i32", j="i32", n="i32", FORM=5)
    module = kern.build()
    analysis = AffineAnalysis(kernel_of(module).regions[0].blocks[0])
    (choice,) = [op for op in walk(kernel_of(module)) if op.name == "arith.select"]
    form = analysis.of(choice.results[0])
    assert form is not None and [d.value for d in form.dims] == [0, 1]
    (wrap,) = form.wraps
    shown = {tuple(map(analysis.argument, m)): c for m, c in wrap.bound.terms.items()}
    assert wrap.dim == 1 and shown == {(3,): 1}


def test_grids_are_larger_than_ids(kernel):
    """num_programs - 1 - program_id is not negative, whatever the launch."""
    kern = kernel(tma_kernels.last_first, out="*i32", n="i32")
    module = kern.build()
    analysis = AffineAnalysis(kernel_of(module).regions[0].blocks[0])
    stores = [op for op in walk(kernel_of(module)) if op.name == "mt.store"]
    signs = []
    for store in stores:
        address = analysis.of(store.operands[0])
        assert address is not None and address.base == 0
        signs.append(analysis.non_negative(address.scalar))
    assert signs == [True, False, False]


def test_loops_end_before_their_upper_bound(kernel):
    """n - 1 - i is not negative in a loop of i below n."""
    kern = kernel(tma_kernels.descending, out="*i32", n="i32", m="i32")
    module = kern.build()
    analysis = AffineAnalysis(kernel_of(module).regions[0].blocks[0])
    signs, given = [], set()
    for store in (op for op in walk(kernel_of(module)) if op.name == "mt.store"):
        address = analysis.of(store.operands[0])
        assert address is not None and address.base == 0
        signs.append((analysis.non_negative(address.scalar),
                      analysis.non_negative(address.scalar, given)))  # fmt: skip
    yes, no, given_m = (True, True), (False, False), (False, True)
    assert signs == [yes, no, given_m, yes, no] and given == {2}
