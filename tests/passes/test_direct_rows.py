"""Rows of numbers that the warps load for themselves."""

import numpy as np
import pytest

from minitriton.ir.conversion import WarpShuffle, plan_conversion
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir
from minitriton.passes.traversal import defining_op, kernel_of, ops_of, walk
from tests.passes import ring_kernels
from tests.passes.test_warp_split import HOPPER, PERSISTENT, SPLIT, halves, loops_of, remarks

RNG = np.random.default_rng(23)


def gradient(kernel, kind, **changed):
    arguments = {"q": "*fp16", "k": "*fp16", "do": "*fp16", "row": "*fp32", "other": "*i32",
                 "out": "*fp32", "n": "i32:16", "BM": 128, "BN": 128, "D": 64}  # fmt: skip
    return kernel(ring_kernels.gradient, KIND=kind, **{**arguments, **HOPPER, **changed})


def inputs(n):
    row = RNG.standard_normal(2 * n).astype(np.float32)
    table = RNG.permutation(n).astype(np.int32)
    return [
        halves(n, 64),
        halves(128, 64),
        halves(n, 64),
        row,
        table,
        np.zeros((128, 64), np.float32),
    ]


def row_loads(module):
    loop = loops_of(module)[-1]
    return [
        op for op in ops_of(loop.regions[0].blocks[0])
        if op.name == "mt.load" and isinstance(op.results[0].type, ir.RankedTensorType)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [16, 128, 304])
@pytest.mark.parametrize(("kind", "count"), [("", 1), ("two rows", 2)])
def test_every_warp_loads_a_row_and_lanes_exchange_it(kernel, names, kind, count, n):
    module = gradient(kernel, kind).check(inputs(n), [n])
    assert remarks(module) == [SPLIT, PERSISTENT]
    loads = row_loads(module)
    assert len(loads) == count and "mt.async_copy" not in names(module)
    for load in loads:
        layout = layout_of(load.results[0].type)
        assert layout == layout_of(load.operands[0].type)
        assert not any(layout.flat("warp")) and layout.num_registers == 4  # of 128 numbers
        for use in load.results[0].uses:
            wanted = layout_of(use.owner.operation.results[0].type)
            assert isinstance(plan_conversion(layout, wanted, 32), WarpShuffle)
    loop = loops_of(module)[-1]
    assert not [op for op in walk(loop) if op.name == "mt.barrier"]


def test_addresses_are_made_in_the_same_layout(kernel):
    """Of ranges and scalars, again for each row: nothing changes layout on the way."""
    module = gradient(kernel, "").compile()
    (load,) = row_loads(module)
    seen, pending = set(), [*load.operands]
    while pending:
        op = defining_op(pending.pop())
        if op is None or op in seen or op.name.startswith("scf"):
            continue
        seen.add(op)
        assert op.name != "mt.convert_layout"
        pending += [v for v in op.operands if isinstance(v.type, ir.RankedTensorType)]
    assert {"mt.make_range", "mt.splat"} <= {op.name for op in seen}


def test_a_row_behind_a_table_stays_as_it_is(kernel):
    n = 304
    module = gradient(kernel, "through a table").check(inputs(n), [n])
    assert remarks(module) == [SPLIT, PERSISTENT]
    table, row = row_loads(module)
    assert table.results[0].type.element_type == ir.IntegerType.get_signless(32)
    changed = {use.owner.operation.name for use in row.results[0].uses}
    assert changed == {"mt.convert_layout"}


def test_without_a_producer_rows_are_copied(kernel, names):
    n = 304
    module = gradient(kernel, "").check(inputs(n), [n], specialize=False)
    assert not row_loads(module) and "mt.async_copy" in names(module)
    assert kernel_of(module) is not None


def test_rows_alone_get_no_producer(kernel, names):
    """Threads load what is multiplied, as it is aligned to 2 bytes only."""
    n = 304
    arrays = inputs(n)
    arrays[0], arrays[2] = halves(n, 65), halves(n, 65)
    module = gradient(kernel, "odd widths").check(arrays, [n])
    assert remarks(module) == ["not warp specialised: nothing that it multiplies is copied"]
    assert "mt.async_copy" in names(module)
