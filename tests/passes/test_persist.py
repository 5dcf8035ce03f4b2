"""Persistent kernels: which are, and that CTAs with several programs do what one each would do."""

import numpy as np
import pytest

from minitriton.ir import interpret
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.passes.traversal import kernel_of, ops_of
from tests.passes.conftest import Memory
from tests.passes.test_warp_split import (
    PERSISTENT,
    attention,
    attention_data,
    data,
    loops_of,
    named,
    product,
    remarks,
)


def run_ctas(module, arrays, scalars, grid, ctas, monkeypatch):
    """Copies of `arrays` after `ctas` CTAs have run the programs of a persistent kernel."""
    monkeypatch.setitem(interpret.RULES, "mt.cta_count", lambda *_: [np.int32(ctas)])
    memory = Memory(arrays)
    block = kernel_of(module).regions[0].blocks[0]
    values = [
        interpret._argument(a, interpret.meaning.numpy_type(formal.type))
        for a, formal in zip([*memory.addresses, *scalars], block.arguments, strict=True)
    ]
    for cta in range(ctas):
        ids, specs = (cta, 0, 0), read_specs(module.operation)
        interpret.Program(ids, grid, memory, values, specs).run_block(block, values)
    return [memory.array(i, a).copy() for i, a in enumerate(arrays)]


@pytest.mark.parametrize("ctas", [1, 4, 9])
def test_programs_dealt_to_ctas(kernel, ctas, monkeypatch):
    """Programs of 3 x 2, more CTAs than programs included."""
    arrays, scalars = data(300, 208, 80)
    kern = product(kernel)
    expected = kern.run(kern.build(), arrays, scalars, (3, 2, 1))
    result = run_ctas(kern.compile(), arrays, scalars, (3, 2, 1), ctas, monkeypatch)
    np.testing.assert_array_equal(result[2], expected[2])


def test_three_axes(kernel, monkeypatch):
    """Attention over heads, with rings that two loops of each program go through."""
    arrays, scalars = attention_data(144, 64, 3)
    kern = attention(kernel, bn=128, d=64, causal=False)
    expected = kern.run(kern.build(), arrays, scalars, (2, 3, 1))
    result = run_ctas(kern.compile(), arrays, scalars, (2, 3, 1), 2, monkeypatch)
    np.testing.assert_array_equal(result[3], expected[3])


def test_rings_go_on_from_program_to_program(kernel):
    module = product(kernel).compile()
    program, loop = loops_of(module)
    body = program.regions[0].blocks[0]
    assert list(loop.operands)[-2:] == list(body.arguments)[-2:]
    assert list(ops_of(body)[-1].operands) == list(loop.results)[-2:]
    lower, upper, step = list(program.operands)[:3]
    assert (lower.owner.operation.name, step.owner.operation.name) == ("mt.cta_id", "mt.cta_count")
    assert upper.owner.operation.name == "arith.muli"
    assert not named(kernel_of(module), "mt.program_id")


def test_turns_are_outside(kernel):
    """The first turn is given once per CTA, not once per program."""
    module = attention(kernel, bn=128, d=64, causal=False).compile()
    assert PERSISTENT in remarks(module)
    function = kernel_of(module)
    entry = function.regions[0].blocks[0]
    alone = [op for op in ops_of(entry) if op.name in ("mt.turn_pass", "mt.turn_wait")]
    assert [op.name for op in alone] == ["mt.turn_pass", "mt.turn_wait"]
    assert all("mt.group" in op.attributes for op in alone)
    ops = ops_of(entry)
    assert ops.index(alone[0]) < ops.index(loops_of(module)[0]) < ops.index(alone[1])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("an end by program", "its programs may differ in length"),
        ("an end that falls", "its programs may differ in length"),
        ("an end from memory", "its programs may differ in length"),
        ("a lock", "it has scf.while"),
    ],
)
def test_refusals(kernel, kind, reason):
    arrays, scalars = data(300, 80, 200, 1, 2)
    module = product(kernel, kind).check(arrays, scalars, (3, 1, 1))
    assert remarks(module)[1:] == [f"not persistent: {reason}"]
    assert "mt.persistent" not in module.operation.attributes
    assert not named(kernel_of(module), "mt.cta_id")
