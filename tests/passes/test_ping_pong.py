"""Two groups of warps share a CTA's programs: who runs which, where in the ring, in whose turn."""

import numpy as np
import pytest

from minitriton.ir import interpret
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.ir.warp_roles import GROUPS, producer_of
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of
from tests.passes import ring_kernels
from tests.passes.test_persist import run_ctas
from tests.passes.test_producer_slice import copies
from tests.passes.test_warp_split import HOPPER, MATRICES, SPLIT, data, loops_of, named, remarks

PING_PONG = "persistent: 2 warpgroups run programs of their own, in turns"
REFUSED = "not warp specialised: "


def product(kernel, kind="", fn=ring_kernels.product, **changed):
    arguments = {**MATRICES, "BM": 128, "BN": 128, "BK": 64, **HOPPER, "num_warps": 4, **changed}
    if fn is ring_kernels.product:
        arguments |= {"ends": "*i32", "KIND": kind}
    return kernel(fn, **arguments)


def as_group(group, monkeypatch):
    """The interpreter runs the programs of one of two groups."""
    monkeypatch.setitem(interpret.RULES, "mt.group_id", lambda *_: [np.int32(group)])
    monkeypatch.setitem(interpret.RULES, "mt.group_count", lambda *_: [np.int32(2)])


def assert_dealt(expected, groups, count, each):
    """Of `count` programs, or tiles, with `each` copies, every other one is a group's, in order."""
    assert len(expected) == count * each
    for number in range(count):
        begin = number // 2 * each
        part = expected[number * each : (number + 1) * each]
        assert groups[number % 2][begin : begin + each] == part


@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 64), (144, 80, 448), (16, 16, 80)])
def test_a_product(kernel, m, n, k):
    arrays, scalars = data(m, n, k)
    grid = (-(-m // 128), -(-n // 128), 1)
    module = product(kernel).check(arrays, scalars, grid)
    assert remarks(module) == [SPLIT, PING_PONG]
    assert int_attribute(module.operation, GROUPS) == 2
    assert [int_attribute(op, "count") for op in named(kernel_of(module), "mt.mbarrier_init")] == [
        1, 4,
    ]  # fmt: skip


@pytest.mark.parametrize("ctas", [1, 2, 5, 7])
def test_groups_share_the_programs(kernel, ctas, monkeypatch):
    """Each of 6 programs runs in one group, also where a CTA has an odd number of them, or none."""
    arrays, scalars = data(300, 208, 80)
    kern = product(kernel)
    module = kern.compile()
    expected = kern.run(kern.build(), arrays, scalars, (3, 2, 1))[2]
    parts = []
    for group in range(2):
        as_group(group, monkeypatch)
        parts.append(run_ctas(module, arrays, scalars, (3, 2, 1), ctas, monkeypatch)[2])
    np.testing.assert_array_equal(parts[0] + parts[1], expected)
    assert not (parts[0] * parts[1]).any()


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("k", [64, 128, 336, 640])
def test_groups_find_what_the_producer_copied(kernel, k, stages, monkeypatch):
    """In the slot where it is, with any remainder of iterations and slots."""
    arrays, scalars = data(300, 208, k)
    module = product(kernel, num_stages=stages).compile()
    specs, grid = read_specs(module.operation), (3, 2, 1)

    def made(function):
        found = copies(function, specs, arrays, scalars, (1, 1, 1), monkeypatch)
        return [copy[1:] for copy in found]

    # one CTA runs them all: the interpreter's grid is that of CTAs here
    number = lambda p, op, v: [np.int32(grid[int_attribute(op, "axis")])]
    with monkeypatch.context() as patch:
        patch.setitem(interpret.RULES, "mt.num_programs", number)
        expected = made(producer_of(module))
    groups = []
    for group in range(2):
        with monkeypatch.context() as patch:
            patch.setitem(interpret.RULES, "mt.num_programs", number)
            as_group(group, patch)
            groups.append(made(kernel_of(module)))
    assert_dealt(expected, groups, 6, 2 * -(-k // 64))


def test_no_iterations(kernel):
    arrays, _ = data(32, 32, 64)
    arrays[2][:] = 7
    kern = product(kernel)
    assert not kern.run(kern.compile(), arrays, [32, 32, 0, 64, 32])[2].any()


def test_turns(kernel):
    """A group waits before its first product and passes the turn on after it has asked for the
    last; the first turn is given once per CTA, the last one taken by whoever would have it."""
    module = product(kernel).compile()
    function = kernel_of(module)
    entry = function.regions[0].blocks[0]
    outside = [op.name for op in ops_of(entry)]
    program, loop = loops_of(module)
    inside = [op.name for op in ops_of(program.regions[0].blocks[0])]
    assert inside.index("mt.turn_wait") < inside.index("scf.for") < inside.index("mt.turn_pass")
    assert inside[inside.index("scf.for") + 1] == "mt.turn_pass"
    assert not [op for op in ops_of(loop.regions[0].blocks[0]) if "turn" in op.name]
    assert outside.index("mt.turn_pass") < outside.index("scf.for") < outside.index("scf.if")
    (first,) = [op for op in ops_of(entry) if op.name == "mt.turn_pass"]
    assert int_attribute(first, "mt.group") == 1
    (branch,) = [op for op in ops_of(entry) if op.name == "scf.if"]
    assert [op.name for op in ops_of(branch.regions[0].blocks[0])] == ["mt.turn_wait", "scf.yield"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("an end by program", "not persistent: its programs may differ in length"),
        ("an end from memory", "not persistent: its programs may differ in length"),
        ("a lock", "not persistent: it has scf.while"),
        ("a write before", "the kernel writes memory before it"),
        ("an operand used twice", "what it loads is also used as it comes"),
        ("a scaled operand", "threads calculate an operand, which would not overlap with products"),
    ],
)
def test_refusals(kernel, kind, reason):
    arrays, scalars = data(300, 80, 200, 1, 2)
    module = product(kernel, kind).check(arrays, scalars, (3, 1, 1))
    assert remarks(module) == [REFUSED + reason]
    assert GROUPS not in module.operation.attributes and producer_of(module) is None


def test_loops_inside_others_stay(kernel):
    arrays, scalars = data(144, 80, 160)
    kern = product(kernel, fn=ring_kernels.early_return)
    module = kern.check(arrays[:3], scalars, (2, 1, 1))
    assert remarks(module) == [REFUSED + "it is inside another loop or a branch"]


def test_small_tiles_stay(kernel):
    module = product(kernel, BN=64).compile()
    assert remarks(module) == []
