"""The producer's function: only what copies need, and the same copies as the kernel has."""

import numpy as np
import pytest

from minitriton.ir import interpret
from minitriton.ir.mlir import ir
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.ir.warp_roles import PRODUCER, producer_of
from minitriton.passes.producer_slice import Slice
from minitriton.passes.traversal import kernel_of, walk
from tests.passes import ring_kernels
from tests.passes.conftest import Memory
from tests.passes.test_warp_split import (
    attention,
    attention_data,
    data,
    halves,
    named,
    pages,
    product,
)


def copies(function, specs, arrays, scalars, grid, monkeypatch):
    """What all copies of a function's programs are, in order: map, coordinates, slot."""
    found = []

    def record(program, op, operands):
        slot, _, wanted, *coordinates = operands
        root = slot.base if slot.base is not None else slot
        offset = slot.ctypes.data - root.ctypes.data
        number = ir.IntegerAttr(op.attributes["map"]).value
        if wanted:
            found.append((tuple(program.ids), number, tuple(map(int, coordinates)), offset))
        return interpret.RULES["kept"](program, op, operands)

    monkeypatch.setitem(interpret.RULES, "kept", interpret.RULES["mt.tma_copy"])
    monkeypatch.setitem(interpret.RULES, "mt.tma_copy", record)
    memory = Memory(arrays)
    block = function.regions[0].blocks[0]
    values = [
        interpret._argument(a, interpret.meaning.numpy_type(formal.type))
        for a, formal in zip([*memory.addresses, *scalars], block.arguments, strict=True)
    ]
    for ids in np.ndindex(*reversed(grid)):
        program = interpret.Program(ids[::-1], grid, memory, values, specs)
        program.run_block(block, values)
    monkeypatch.undo()
    return found


def both(module, arrays, scalars, grid, monkeypatch):
    specs = read_specs(module.operation)
    return [
        copies(f, specs, arrays, scalars, grid, monkeypatch)
        for f in (kernel_of(module), producer_of(module))
    ]


@pytest.mark.parametrize("k", [0, 64, 336])
def test_copies_of_a_product(kernel, k, monkeypatch):
    arrays, scalars = data(144, 80, max(k, 16))
    module = product(kernel).compile()
    scalars[2] = k
    made, expected = both(module, arrays, scalars, (2, 1, 1), monkeypatch)
    assert made == expected and len(made) == 2 * 2 * -(-k // 64)
    assert len({offset for *_, offset in made}) == min(3, -(-k // 64))


@pytest.mark.parametrize("inside", [True, False])
def test_copies_of_attention(kernel, inside, monkeypatch):
    arrays, scalars = attention_data(200, 128, 2)
    module = attention(kernel, inside=inside).compile()
    made, expected = both(module, arrays, scalars, (2, 2, 1), monkeypatch)
    assert made == expected
    per_head = 2 * (2 + 4) + (2 * 2 if inside else 0)  # of both programs: keys and values, q
    assert len(made) == 2 * per_head


def test_copies_that_a_table_steers(kernel, monkeypatch):
    table = np.array([3, 0, 4, 4, 1], np.int32)
    arrays = [halves(5, 128, 128), halves(5, 128, 128), np.zeros((129, 128), np.float32), table]
    module = pages(kernel, "").compile()
    made, expected = both(module, arrays, [5], (1, 1, 1), monkeypatch)
    assert made == expected and len(made) == 10
    loads = [op for op in walk(producer_of(module)) if op.name == "mt.load"]
    assert len(loads) == 1 and not isinstance(loads[0].results[0].type, ir.RankedTensorType)


def test_copies_in_a_branch(kernel, monkeypatch):
    kern = kernel(
        ring_kernels.early_return, a="*fp16", b="*fp16", c="*fp32", M="i32", N="i32", K="i32",
        sa="i32:16", sb="i32:16", BM=128, BN=128, BK=64, num_warps=8, target="sm_90a",
    )  # fmt: skip
    arrays, scalars = data(144, 80, 160)
    module = kern.compile()
    made, expected = both(module, arrays[:3], scalars, (4, 1, 1), monkeypatch)
    assert made == expected and {ids[0] for ids, *_ in made} == {0, 1}
    assert [op.name for op in walk(producer_of(module))].count("scf.if") == 1


def test_nothing_of_a_tile_is_left(kernel):
    module = attention(kernel).compile()
    function = producer_of(module)
    for op in walk(function):
        for value in (*op.operands, *op.results):
            assert not isinstance(value.type, ir.RankedTensorType), op
        assert op.name not in ("mt.warpgroup_dot", "mt.mbarrier_arrive", "mt.store", "mt.turn_wait")
    every = [op for op in walk(function) if op.name in ("mt.mbarrier_wait", "mt.tma_copy")]
    assert all(PRODUCER in op.attributes for op in every)
    assert len(every) == len(
        [op for op in walk(kernel_of(module)) if PRODUCER in op.attributes]
    ) - (len(named(kernel_of(module), "mt.mbarrier_expect")))


def test_a_kernel_without_rings_has_no_producer(kernel):
    assert producer_of(product(kernel, num_warps=4, BN=64).compile()) is None


TEXT = """
module {
  func.func @k(%p: !mt.ptr<i32>, %n: i32) {
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
    %first = "mt.load"(%p) {operandSegmentSizes = array<i32: 1, 0, 0>} : (!mt.ptr<i32>) -> i32
    %sums:2 = scf.for %i = %zero to %n step %one iter_args(%x = %zero, %y = %first)
        -> (i32, i32) : i32 {
      %address = "mt.addptr"(%p, %i) : (!mt.ptr<i32>, i32) -> !mt.ptr<i32>
      %v = "mt.load"(%address) {operandSegmentSizes = array<i32: 1, 0, 0>} : (!mt.ptr<i32>) -> i32
      %x2 = arith.addi %x, %one : i32
      %y2 = arith.addi %y, %v : i32
      BODY
      scf.yield %x2, %y2 : i32, i32
    }
    %c = arith.cmpi slt, %sums#0, %n : i32
    %r:2 = scf.if %c -> (i32, i32) {
      scf.yield %sums#0, %zero : i32, i32
    } else {
      scf.yield %one, %sums#1 : i32, i32
    }
    AFTER
    "mt.assume"(%c) : (i1) -> ()
    return
  }
}
"""
STORE = (
    '"mt.store"(%p, %one) {operandSegmentSizes = array<i32: 1, 1, 0>} : (!mt.ptr<i32>, i32) -> ()'
)


def slice_of(which, body="", after=""):
    """The slice of result `which` of the scf.if, and the function."""
    module = ir.Module.parse(TEXT.replace("BODY", body).replace("AFTER", after))
    function = kernel_of(module)
    (branch,) = named(function, "scf.if")
    found = Slice()
    found.add_value(branch.results[which])
    return found, function, module


def test_only_the_carried_values_that_matter():
    found, function, _ = slice_of(0)
    (loop,) = named(function, "scf.for")
    assert found.carried[loop] == {0} and found.refusal(function) is None
    assert not any(op.name == "mt.load" for op in found.ops)
    found, function, _ = slice_of(1)
    (loop,) = named(function, "scf.for")
    assert found.carried[loop] == {0, 1}  # the condition needs the other one
    assert len([op for op in found.ops if op.name == "mt.load"]) == 2


@pytest.mark.parametrize(
    ("body", "after", "which", "refused"),
    [
        ("", STORE, 1, False),  # written when all has been read
        (STORE, "", 1, True),
        (STORE, "", 0, False),  # nothing is read
    ],
)
def test_scalars_that_the_kernel_may_write(body, after, which, refused):
    found, function, _ = slice_of(which, body, after)
    reason = "what it copies depends on a scalar that the kernel may write"
    assert found.refusal(function) == (reason if refused else None)


def test_a_volatile_scalar(monkeypatch):
    changed = TEXT.replace("(%address) {", "(%address) {volatile, ")
    monkeypatch.setitem(globals(), "TEXT", changed)
    found, function, _ = slice_of(1)
    assert "scalar that the kernel may write" in found.refusal(function)
