"""Operands that a loop's dots hold all the time: brought into it for want of registers."""

import numpy as np
import pytest

from minitriton.passes import held_operands
from minitriton.passes.traversal import kernel_of, walk
from tests.passes import ring_kernels
from tests.passes.test_warp_split import HOPPER, halves, named, remarks

NONE_LEFT, MANY = 0, 1 << 20  # registers that the dots of a loop may take


@pytest.fixture
def registers(monkeypatch):
    return lambda count: monkeypatch.setattr(held_operands, "OTHER_REGISTERS", 240 - count)


def product(kernel, kind="", **changed):
    arguments = {"q": "*fp16", "k": "*fp16", "out": "*fp32", "T": "i32:16", "BM": 128, "BN": 128,
                 "D": 64, "KIND": kind, **HOPPER, **changed}  # fmt: skip
    return kernel(ring_kernels.held_operand, **arguments)


def data(tokens):
    return [halves(tokens, 64), halves(128, 64), np.zeros((128, 64), np.float32)]


@pytest.mark.parametrize("kind", ["", "masked", "nested", "two loops"])
@pytest.mark.parametrize("specialize", [True, False])
def test_they_come_into_the_loop(kernel, registers, kind, specialize):
    """There the tile is copied to shared memory, where wgmma reads it."""
    registers(NONE_LEFT)
    kern, arrays = product(kernel, kind), data(512)
    expected = kern.run(kern.build(), arrays, [512])[2]
    module = kern.compile(specialize=specialize)
    np.testing.assert_allclose(kern.run(module, arrays, [512])[2], expected, rtol=1e-5, atol=1e-5)
    dots = named(kernel_of(module), "mt.warpgroup_dot")
    loops = 2 if kind == "two loops" else 1
    assert len(dots) == 2 * loops
    assert sum(str(dot.operands[0].type).startswith("!mt.mem") for dot in dots) == loops
    assert not [op for op in walk(kernel_of(module)) if op.name == "mt.load"]
    assert any(text.startswith("warp specialised") for text in remarks(module)) == specialize


@pytest.mark.parametrize("kind", ["", "nested"])
def test_with_enough_registers_they_stay(kernel, registers, kind):
    registers(MANY)
    module = product(kernel, kind).check(data(512), [512])
    dots = named(kernel_of(module), "mt.warpgroup_dot")
    assert not any(str(dot.operands[0].type).startswith("!mt.mem") for dot in dots)


@pytest.mark.parametrize(
    "kind",
    ["masked with ones", "volatile", "a write between", "a write inside", "used elsewhere"],
)
def test_what_stays_where_it_was(kernel, registers, kind):
    texts = []
    for count in (NONE_LEFT, MANY):
        registers(count)
        texts.append(str(product(kernel, kind).check(data(256), [256])))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("changed", [{"num_stages": 1}, {"target": "sm_80"}])
def test_loops_without_copies_by_tma_stay(kernel, registers, changed):
    texts = []
    for count in (NONE_LEFT, MANY):
        registers(count)
        texts.append(str(product(kernel, **changed).compile()))
    assert texts[0] == texts[1]
