"""Before a group's turn to multiply only what the products need is computed."""

import pytest

from minitriton.ir.warp_roles import PRODUCER
from minitriton.passes import warp_split
from minitriton.passes.traversal import kernel_of, ops_of, walk
from tests.passes.test_ping_pong import product
from tests.passes.test_warp_split import data, loops_of
from tests.passes.test_warp_split import product as product_of_two


def before_the_turn(module):
    """Names of what the warps with tiles compute between two programs' products."""
    program, _ = loops_of(module)
    ops = ops_of(program.regions[0].blocks[0])
    end = [op.name for op in ops].index("mt.turn_wait")
    return [op.name for op in ops[:end] if PRODUCER not in op.attributes]


def test_coordinates_of_stores_come_after(kernel):
    module = product(kernel).compile()
    assert not [name for name in before_the_turn(module) if name.startswith("arith.")]
    program, loop = loops_of(module)
    ops = ops_of(program.regions[0].blocks[0])
    after = [op.name for op in ops[ops.index(loop) :]]
    assert "arith.divui" in after[after.index("mt.turn_pass") :]


def test_copies_keep_their_coordinates(kernel):
    """What the producer needs stays where it was, for it alone."""
    module = product(kernel).compile()
    program, loop = loops_of(module)
    copies = [op for op in walk(loop) if op.name == "mt.tma_copy"]
    assert copies
    ops = ops_of(program.regions[0].blocks[0])
    kept = [op for op in ops[: ops.index(loop)] if PRODUCER in op.attributes]
    assert {"arith.divui", "arith.muli"} <= {op.name for op in kept}


@pytest.mark.parametrize("k", [64, 200])
def test_the_meaning_stays(kernel, k):
    arrays, scalars = data(300, 208, k)
    product(kernel).check(arrays, scalars, (3, 2, 1))


def test_other_kernels_are_left_alone(kernel):
    """One program for all warps: nobody else multiplies meanwhile."""
    assert warp_split.CONSUMER_WARPS == 8
    kern = product_of_two(kernel)
    upto = [str(kern.compile(upto=name)) for name in ("producer_slice", "sink_past_products")]
    assert upto[0] == upto[1]
    marked = [op for op in walk(kernel_of(kern.compile())) if PRODUCER in op.attributes]
    assert all(op.name.startswith("mt.") for op in marked)
