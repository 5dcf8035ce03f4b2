"""The whole pipeline on kernels of 12 warps: what groups and the producer do for each other."""

import numpy as np
import pytest

from minitriton.ir import interpret
from minitriton.ir.diagnostics import CompileError, InternalError
from minitriton.ir.dialect import MemType
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.ir.warp_roles import GROUPS, producer_of
from minitriton.passes.producer_slice import add_producer
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of, walk
from tests.passes import ring_kernels
from tests.passes.test_producer_slice import copies
from tests.passes.test_split_rows import SPLIT, data, product
from tests.passes.test_warp_split import (
    HEADS,
    MATRICES,
    PERSISTENT,
    attention_data,
    halves,
    loops_of,
    named,
    remarks,
)
from tests.passes.test_warp_split import SPLIT as SPECIALISED


def attention(kernel, bn=64, d=64, inside=True, causal=True):
    return kernel(
        ring_kernels.attention, **HEADS, BM=192, BN=bn, D=d, INSIDE=inside, CAUSAL=causal, **SPLIT
    )


def slots(module):
    """(number, shape) of the tiles of all rings."""
    found = []
    for op in named(kernel_of(module), "mt.local_alloc"):
        if "mt.alignment" in op.attributes:
            count, *shape = MemType(op.results[0].type).tensor_type.shape
            found.append((count, tuple(shape)))
    return found


@pytest.mark.parametrize("kind", ["", "promises", "rows of sums"])
@pytest.mark.parametrize(("m", "n", "k"), [(192, 128, 64), (250, 80, 208), (16, 16, 80)])
def test_a_product(kernel, kind, m, n, k):
    arrays, scalars = data(m, n, k)
    module = product(kernel, kind).check(arrays, scalars, (-(-m // 192), -(-n // 128), 1))
    assert remarks(module) == [SPECIALISED, PERSISTENT]
    assert int_attribute(module.operation, "mt.num_warps") == 4
    assert int_attribute(module.operation, GROUPS) == 3


def test_no_iterations(kernel):
    arrays, _ = data(32, 32, 64)
    arrays[2][:] = 7
    kern = product(kernel)
    assert not kern.run(kern.compile(), arrays, [32, 32, 0, 64, 32])[2].any()


def test_slots_of_a_product(kernel):
    """A stage has three tiles of A, which groups read one each, and one of B, which all read; it is
    empty when all 12 warps have read it."""
    module = product(kernel).compile()
    assert sorted(slots(module)) == [(3, (64, 128)), (9, (64, 64))]
    inits = named(kernel_of(module), "mt.mbarrier_init")
    assert [int_attribute(op, "count") for op in inits] == [1, 12]
    program, loop = loops_of(module)
    order = [op.name[3:] for op in ops_of(loop.regions[0].blocks[0]) if op.name.startswith("mt.")]
    assert order.count("tma_copy") == 4 and order.count("warpgroup_dot") == 1
    (expect,) = named(loop, "mt.mbarrier_expect")
    assert int_attribute(expect, "bytes") == (192 + 128) * 64 * 2
    assert not named(program, "mt.turn_wait")


def test_a_group_reads_its_tile(kernel):
    module = product(kernel).compile()
    (dot,) = named(kernel_of(module), "mt.warpgroup_dot")
    number = dot.operands[0].owner.operation.operands[1].owner.operation
    assert number.name == "arith.addi"
    assert number.operands[1].owner.operation.name == "mt.group_id"
    loop = loops_of(module)[1]
    slot = dot.operands[1].owner.operation.operands[1]
    assert slot in list(loop.regions[0].blocks[0].arguments)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("k", [64, 336])
def test_copies_for_all_groups(kernel, stages, k, monkeypatch):
    """The producer makes those that the kernel has, of all rows, each tile in its own place."""
    arrays, scalars = data(400, 80, k)
    module = product(kernel, num_stages=stages).compile()
    specs, grid = read_specs(module.operation), (3, 1, 1)
    made, expected = (
        copies(f, specs, arrays, scalars, grid, monkeypatch)
        for f in (kernel_of(module), producer_of(module))
    )
    assert made == expected and len(made) == 3 * 4 * -(-k // 64)
    first = [copy for copy in made if copy[0][0] == 1]
    rows = {(number, at[1]) for _, number, at, _ in first if at[0] == 0}
    assert {row for _, row in rows} >= {192, 256, 320}
    by_map = {}
    for _, number, _, offset in made:
        by_map.setdefault(number, set()).add(offset)
    used = min(stages, -(-k // 64))
    assert sorted(map(len, by_map.values())) == [used, 3 * used]


def test_the_producer_belongs_to_no_group(kernel):
    module = product(kernel).compile()
    names = {op.name for op in walk(producer_of(module))}
    assert names and names.isdisjoint({"mt.group_id", "mt.group_count"})


def test_copies_that_the_producer_cannot_make(kernel):
    """A copy for one group alone would be an error of the compiler."""
    module = product(kernel).compile(upto="insert_barriers")
    (dot,) = named(kernel_of(module), "mt.warpgroup_dot")
    own = dot.operands[0].owner.operation.operands[1]
    copy = named(kernel_of(module), "mt.tma_copy")[0]
    group = own.owner.operation.operands[1].owner.operation
    group.move_before(ops_of(copy.block)[0])
    copy.operands[3] = group.results[0]
    with pytest.raises(InternalError, match="for a group"):
        add_producer(module, None, PassOptions())


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("tokens", "bn", "d"), [(16, 96, 64), (400, 64, 64), (400, 64, 128)])
def test_attention(kernel, inside, causal, tokens, bn, d):
    arrays, scalars = attention_data(tokens, d)
    kern = attention(kernel, bn, d, inside, causal)
    module = kern.check(arrays, scalars, (-(-tokens // 192), 1, 1))
    assert remarks(module)[:2] == [SPECIALISED] * 2


def test_slots_of_attention(kernel):
    """Keys and values are for all, a tile of queries, copied once, for each group; loops share."""
    module = attention(kernel).compile()
    # which of keys and queries is which shape is told by the number: one stage or three
    assert sorted(slots(module)) == [(3, (64, 64))] * 3
    inits = [int_attribute(op, "count") for op in named(kernel_of(module), "mt.mbarrier_init")]
    assert inits == [1, 12] * 3
    body = kernel_of(module).regions[0].blocks[0]
    outside = [op.name for op in ops_of(body)]
    assert outside.count("mt.tma_copy") == 2 * 3 and outside.count("mt.mbarrier_expect") == 2
    for loop in loops_of(module):
        assert len(named(loop, "mt.tma_copy")) == 2


def test_turns_go_round(kernel):
    """The last group gives the first one its first turn; per loop as many waits as passes."""
    module = attention(kernel).compile()
    waits, passes = (named(kernel_of(module), f"mt.turn_{name}") for name in ("wait", "pass"))
    alone = [[op for op in ops if "mt.group" in op.attributes] for ops in (waits, passes)]
    assert [[int_attribute(op, "mt.group") for op in ops] for ops in alone] == [[0], [2]]
    for loop in loops_of(module):
        inside = [op.name for op in ops_of(loop.regions[0].blocks[0])]
        assert inside.count("mt.turn_wait") == inside.count("mt.turn_pass") > 0


def test_queries_in_registers_or_slots(kernel):
    """Beside fewer registers than two warpgroups have, a tile is more often held in memory."""
    few, many = (attention(kernel, bn, 64, inside=False).compile() for bn in (64, 96))
    assert len(named(kernel_of(few), "mt.tma_copy")) == 4
    assert len(named(kernel_of(many), "mt.tma_copy")) == 4 + 2 * 3


def test_groups_share_persistent_programs(kernel, monkeypatch):
    """Each group runs all programs of a CTA: together they write every row once."""
    arrays, scalars = data(450, 208, 80)
    kern = product(kernel)
    module = kern.compile()
    expected = kern.run(kern.build(), arrays, scalars, (3, 2, 1))[2]
    number = lambda p, op, v: [np.int32((3, 2, 1)[int_attribute(op, "axis")])]
    monkeypatch.setitem(interpret.RULES, "mt.num_programs", number)
    made = kern.run(module, arrays, scalars, (1, 1, 1))[2]  # the grid is that of CTAs here
    np.testing.assert_array_equal(made, expected)


def test_loops_in_loops(kernel):
    """What is amiss with the inner one, which has the product."""
    kern = kernel(ring_kernels.tile_after_tile, **MATRICES, BM=192, BN=128, BK=64, **SPLIT)
    with pytest.raises(CompileError, match="copies for this: a loop around it may write"):
        kern.compile()


def test_it_need_not_pay(kernel):
    """Small products, which two warpgroups would multiply without a producer."""
    arrays, scalars = data(192, 16, 64)
    module = product(kernel, BN=16, BK=16).check(arrays, scalars)
    assert remarks(module) == [SPECIALISED, PERSISTENT]


def test_two_blocks_of_columns(kernel):
    """Both products of a loop read the group's tile of A."""
    kern = kernel(ring_kernels.two_products, a="*fp16", b="*fp16", c="*fp32", n="i32:16", BM=192,
                  BN=128, WIDE=96, BK=64, TWICE=False, **SPLIT)  # fmt: skip
    arrays = [halves(192, 128), halves(128, 224), np.zeros((192, 224), np.float32)]
    module = kern.check(arrays, [128])
    assert remarks(module) == [SPECIALISED, PERSISTENT]
