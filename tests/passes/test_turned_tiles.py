"""Tiles that a loop loads for their transposes, and what it stores, beside products in flight."""

import numpy as np
import pytest

from minitriton.passes.remarks import remarks_of
from tests.passes import ring_kernels
from tests.passes.test_warp_split import HOPPER, halves, loops_of, named

T, K, V = 64, 64, 128
SPLIT = "warp specialised: a producer warp copies 2 stages by TMA"


def recurrence(kernel, kind="", v="*fp16"):
    return kernel(
        ring_kernels.recurrence, b="*fp16", v=v, out="*fp16", last="*fp32", table="*i32", n="i32",
        T=T, K=K, V=V, KIND=kind, **HOPPER,
    )  # fmt: skip


def inputs(steps, v=np.float16):
    table = np.array([T * (steps - 1 - i) for i in range(steps)] + [0] * (steps + 1), np.int32)
    made = halves(steps * T + 1, K), halves(steps * T + 1, V).astype(v)
    return [*made, halves(steps * T + 1, V), np.zeros((V, K), np.float32), table]


def texts(module):
    return [text.partition(": ")[2] for text in remarks_of(module)]


def loaded_tiles(module):
    loop = loops_of(module)[-1]
    return [op for op in named(loop, "mt.load") if "tensor" in str(op.results[0].type)]


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["", "stored"])
def test_the_producer_copies_what_is_turned(kernel, steps, kind):
    module = recurrence(kernel, kind).check(inputs(steps), [steps])
    assert SPLIT in texts(module) and not loaded_tiles(module)
    loop = loops_of(module)[-1]
    (read,) = named(loop, "mt.local_load")
    assert read.operands[0].owner.name == "mt.mem_trans"


def test_what_is_turned_and_masked_is_masked_in_registers(kernel):
    """The selection takes a dot's operand as ldmatrix gives it, and no other change of layout."""
    module = recurrence(kernel, "masked").check(inputs(3), [3])
    assert SPLIT in texts(module) and not loaded_tiles(module)
    loop = loops_of(module)[-1]
    (select,) = [op for op in named(loop, "arith.select") if "tensor" in str(op.results[0].type)]
    assert select.operands[1].owner.name == "mt.local_load"
    (use,) = select.results[0].uses
    assert use.owner.name == "mt.warpgroup_dot" and use.operand_number == 0


def test_without_a_producer(kernel):
    module = recurrence(kernel).check(inputs(3), [3], specialize=False)
    assert not loaded_tiles(module)
    assert "loads pipelined in 2 stages: 2 with TMA" in texts(module)


def test_numbers_of_32_bits_and_other_uses_stay_with_threads(kernel):
    module = recurrence(kernel, v="*fp32").check(inputs(3, np.float32), [3])
    assert len(loaded_tiles(module)) == 1 and SPLIT in texts(module)
    module = recurrence(kernel, "used as it comes").check(inputs(3), [3])
    assert len(loaded_tiles(module)) == 1 and SPLIT in texts(module)


def test_a_table_that_the_loop_writes(kernel):
    """Then nobody copies ahead of it."""
    module = recurrence(kernel, "the table").check(inputs(3), [3])
    assert len(loaded_tiles(module)) == 1


def test_no_turns_where_all_warps_meet(kernel):
    """The warpgroups would wait for each other: for a turn, and for a store's change of layout."""
    for kind, turns in (("", 1), ("stored", 0)):
        loop = loops_of(recurrence(kernel, kind).compile())[-1]
        assert len(named(loop, "mt.turn_pass")) == turns


def test_stores_beside_products_in_flight_stay_with_threads(kernel):
    module = recurrence(kernel, "stored").compile()
    assert "store not by TMA: products are in flight beside it" in texts(module)
    loop = loops_of(module)[-1]
    assert not named(loop, "mt.tma_store") and len(named(loop, "mt.store")) == 1
