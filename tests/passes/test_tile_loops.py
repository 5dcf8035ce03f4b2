"""Loops over tiles in the source: which are dealt to two groups of warps, and how they go on."""

import numpy as np
import pytest

from minitriton.ir import interpret
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.ir.warp_roles import ENDS, GROUPS, producer_of
from minitriton.passes.op_classes import MEMORY_ACCESS
from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of
from tests.passes import tile_loop_kernels
from tests.passes.test_ping_pong import as_group, assert_dealt
from tests.passes.test_producer_slice import copies
from tests.passes.test_warp_split import HOPPER, MATRICES, SPLIT, halves, loops_of, named

DEALT = "2 warpgroups take the tiles of its loop in turns"
BY_TMA = {"c": "*fp16", "N": "i32:16"}  # stores
MARKS = ("specialised", "persistent", "in turns")


def products(kernel, kind="", fn=tile_loop_kernels.products, flatten=True, **changed):
    arguments = {**MATRICES, "d": "*i32", "BM": 128, "BN": 128, "BK": 64, "KIND": kind, **HOPPER}
    return kernel(fn, **{**arguments, "FLATTEN": flatten, "num_warps": 4, **changed})


def data(m, n, k, *numbers):
    beside = np.array([*numbers, *[0] * 40][:40], np.int32)
    arrays = [halves(m, k), halves(k, n), np.zeros((m, n), np.float32), beside]
    return arrays, [m, n, k, k, n]


def remarks(module):
    texts = [text.partition(": ")[2] for text in remarks_of(module)]
    return [text for text in texts if any(mark in text for mark in MARKS)]


@pytest.mark.parametrize("programs", [1, 2, 5, 9])
@pytest.mark.parametrize(
    "kind", ["", "a counter", "a wide variable", "a read of another array before"]
)
def test_tiles_are_dealt(kernel, kind, programs):
    """6 of them, also where a program has an odd number, or none."""
    arrays, scalars = data(300, 208, 80, 200)
    module = products(kernel, kind).check(arrays, scalars, (programs, 1, 1))
    assert remarks(module) == [SPLIT, DEALT]
    assert int_attribute(module.operation, GROUPS) == 2
    assert "mt.persistent" not in module.operation.attributes  # the grid stays


@pytest.mark.parametrize("m", [0, 128])
def test_no_tiles_and_no_iterations(kernel, m):
    arrays, _ = data(128, 32, 64)
    arrays[2][:] = 7
    kern = products(kernel)
    result = kern.run(kern.compile(), arrays, [m, 32, 0, 64, 32])[2]
    assert (result == (7 if m == 0 else 0)).all()


@pytest.mark.parametrize("programs", [1, 2, 5, 9])
def test_groups_share_the_tiles(kernel, programs, monkeypatch):
    arrays, scalars = data(300, 208, 80)
    kern, grid = products(kernel), (programs, 1, 1)
    module = kern.compile()
    expected = kern.run(kern.build(), arrays, scalars, grid)[2]
    parts = []
    for group in range(2):
        as_group(group, monkeypatch)
        parts.append(kern.run(module, arrays, scalars, grid)[2])
    np.testing.assert_array_equal(parts[0] + parts[1], expected)
    assert not (parts[0] * parts[1]).any()
    assert parts[1].any() == (programs < 6)  # else a program has one tile at most


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("k", [64, 128, 336, 640])
def test_groups_find_what_the_producer_copied(kernel, k, stages, monkeypatch):
    """In the slot where it is, with any remainder of iterations and slots; 5 tiles in a program."""
    arrays, scalars = data(600, 128, k)
    module = products(kernel, num_stages=stages).compile()
    specs = read_specs(module.operation)

    def made(function):
        found = copies(function, specs, arrays, scalars, (1, 1, 1), monkeypatch)
        return [copy[1:] for copy in found]

    expected, groups = made(producer_of(module)), []
    for group in range(2):
        with monkeypatch.context() as patch:
            as_group(group, patch)
            groups.append(made(kernel_of(module)))
    assert_dealt(expected, groups, 5, 2 * -(-k // 64))


def turns_of(ops):
    return [
        (op.name[8:], ENDS in op.attributes, "mt.group" in op.attributes)
        for op in ops if op.name.startswith("mt.turn_")
    ]  # fmt: skip


def test_turns(kernel):
    """A tile's products are made in turn, and so is all that touches memory after them; what has
    been stored by TMA is there before the other group goes on."""
    module = products(kernel, **BY_TMA).compile()
    entry = kernel_of(module).regions[0].blocks[0]
    assert sorted(turns_of(ops_of(entry))) == [("pass", False, True), ("pass", True, True)]
    tiles, _ = loops_of(module)
    inside = ops_of(tiles.regions[0].blocks[0])
    kinds = [("wait", False), ("pass", False), ("wait", True), ("pass", True)]
    assert turns_of(inside) == [(*kind, False) for kind in kinds]
    *_, waits, passes = (n for n, op in enumerate(inside) if op.name.startswith("mt.turn_"))
    stores = [n for n, op in enumerate(inside) if op.name in ("mt.tma_store", "mt.store")]
    assert stores and all(waits < n < passes for n in stores)
    last = inside[passes - 1]
    assert last.name == "mt.tma_store_wait" and "read" not in last.attributes
    (branch,) = [op for op in ops_of(entry) if op.name == "scf.if"]
    assert turns_of(ops_of(branch.regions[0].blocks[0])) == [
        ("wait", False, False), ("wait", True, False),
    ]  # fmt: skip


def test_ends_that_depend_on_each_other(kernel):
    arrays, scalars = data(300, 208, 80)
    module = products(kernel, "a read of what came before").check(arrays, scalars)
    assert remarks(module) == [SPLIT, DEALT]
    inside = ops_of(loops_of(module)[0].regions[0].blocks[0])
    first = next(n for n, op in enumerate(inside) if op.name in MEMORY_ACCESS)
    assert any(ENDS in op.attributes for op in inside[:first])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("a carried sum", "a tile needs what the one before it left"),
        ("an end by tile", "how often it runs is not known before the first tile"),
        ("a lock", "a loop around it may write what it reads"),
        ("a sum in memory", "a loop around it may write what it reads"),
        ("a write before", "it has mt.store elsewhere than after the products of a tile"),
        ("a write outside", "the kernel writes memory before it"),
        ("a read before", "a tile may read what one before it writes"),
        ("a read outside", "a tile may read what one before it writes"),
    ],
)
def test_refusals(kernel, kind, reason):
    arrays, scalars = data(300, 208, 200)
    module = products(kernel, kind).check(arrays, scalars, (3, 1, 1))
    assert remarks(module) == [f"not warp specialised: {reason}"]
    assert GROUPS not in module.operation.attributes and producer_of(module) is None


def test_a_number_of_tiles_from_memory(kernel):
    arrays, scalars = data(300, 208, 80, 5)
    module = products(kernel, "an end from memory").check(arrays, scalars, (2, 1, 1))
    assert remarks(module) == [SPLIT, DEALT]


def test_loops_in_loops_stay(kernel):
    arrays, scalars = data(300, 208, 80)
    kern = products(kernel, fn=tile_loop_kernels.nested)
    module = kern.check(arrays, scalars, (2, 1, 1))
    assert remarks(module) == ["not warp specialised: it is inside another loop or a branch"]


def test_without_a_promise(kernel):
    """C might be A, so the producer must not run ahead of the stores."""
    arrays, scalars = data(300, 208, 80)
    module = products(kernel, flatten=False).check(arrays, scalars, (2, 1, 1))
    assert remarks(module) == ["not warp specialised: a loop around it may write what it reads"]


@pytest.mark.parametrize("programs", [1, 4, 7])
def test_two_groups_with_one_tile(kernel, programs):
    """Of 8 warps: the producer goes on with the next tile, in the ring where the last one ended."""
    arrays, scalars = data(300, 208, 80)
    arrays[2] = arrays[2].astype(np.float16)
    kern = products(kernel, "a counter", num_warps=8, **BY_TMA)
    module = kern.check(arrays, scalars, (programs, 1, 1))
    assert SPLIT in remarks(module) and GROUPS not in module.operation.attributes
    tiles, loop = loops_of(module)
    assert len(tiles.results) == 2  # slot and parity, nothing else
    body = tiles.regions[0].blocks[0]
    assert list(loop.operands)[-2:] == list(body.arguments)[-2:]
    assert list(ops_of(body)[-1].operands) == list(loop.results)[-2:]
    assert named(kernel_of(module), "mt.tma_store")


def test_the_grid_of_the_interpreter_is_that_of_the_source(kernel, monkeypatch):
    """A program of a later number runs its own tiles only."""
    arrays, scalars = data(600, 128, 80)
    kern = products(kernel)
    module, ran = kern.compile(), []
    rule = interpret.RULES["mt.program_id"]
    monkeypatch.setitem(
        interpret.RULES, "mt.program_id", lambda p, op, v: ran.append(p.ids) or rule(p, op, v)
    )
    kern.run(module, arrays, scalars, (3, 1, 1))
    assert {ids[0] for ids in ran} == {0, 1, 2}
