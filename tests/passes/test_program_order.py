"""Programs of different lengths: the longest come first, where that is known."""

import pytest

from minitriton.ir.mlir import ir
from minitriton.passes.program_order import heaviest_first
from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import int_attribute, kernel_of, walk
from tests.passes.test_warp_split import attention, attention_data, data, product


def order_of(*lines, loops=(("zero", "u"),)):
    """The axes that are turned round, for loops between the named values, and the kernel."""
    body = [
        '%zero = arith.constant 0 : i32', '%one = arith.constant 1 : i32',
        '%x = "mt.program_id"() {axis = 0 : i32} : () -> i32',
        '%y = "mt.program_id"() {axis = 1 : i32} : () -> i32',
        *lines,
    ]  # fmt: skip
    body += [f"scf.for %i{a}{b} = %{a} to %{b} step %one : i32 {{ }}" for a, b in loops]
    text = "module { func.func @k(%n: i32) {\n" + "\n".join(body) + "\nreturn } }"
    module = ir.Module.parse(text)
    function = kernel_of(module)
    found = [op for op in walk(function) if op.name == "scf.for"]
    return heaviest_first(function, found), module


@pytest.mark.parametrize(
    ("lines", "axes"),
    [
        (["%u = arith.addi %n, %zero : i32"], []),
        (["%u = arith.addi %x, %one : i32"], [0]),
        (["%u = arith.addi %x, %y : i32"], [0, 1]),
        (["%u = arith.subi %n, %x : i32"], []),  # the first are the longest already
        (["%v = arith.subi %n, %x : i32", "%u = arith.addi %v, %y : i32"], [1]),
        (["%u = arith.muli %x, %y : i32"], []),
        (["%v = arith.muli %x, %y : i32", "%u = arith.addi %v, %x : i32"], []),
        (["%u = arith.muli %x, %x : i32"], []),
        (["%u = arith.muli %x, %n : i32"], []),
    ],
)
def test_axes(lines, axes):
    assert order_of(*lines)[0] == axes


def test_the_sum_of_all_loops_counts():
    lines = ["%u = arith.addi %x, %one : i32", "%v = arith.subi %n, %x : i32"]
    assert order_of(*lines, loops=[("zero", "u")])[0] == [0]
    assert order_of(*lines, loops=[("zero", "u"), ("zero", "v")])[0] == []
    assert order_of(*lines, loops=[("u", "n")])[0] == []  # from there to the end
    assert order_of(*lines, loops=[("v", "n")])[0] == [0]


def test_the_number_is_counted_from_the_last():
    axes, module = order_of("%u = arith.addi %x, %one : i32")
    assert axes == [0] and module.operation.verify()
    ops = list(walk(kernel_of(module)))
    first = next(op for op in ops if op.name == "scf.for").operands[1].owner.operation
    number = first.operands[0].owner.operation
    assert number.name == "arith.subi"
    last, old = (value.owner.operation for value in number.operands)
    assert old.name == "mt.program_id" and int_attribute(old, "axis") == 0
    assert last.operands[0].owner.operation.name == "mt.num_programs"


def longest_first(module):
    return any("the longest programs come first" in text for text in remarks_of(module))


@pytest.mark.parametrize("kind", ["an end that falls", "an end from memory"])
def test_kernels_whose_order_stays(kernel, kind):
    arrays, scalars = data(300, 80, 200, 1, 2)
    assert not longest_first(product(kernel, kind).check(arrays, scalars, (3, 1, 1)))


def test_causal_attention(kernel):
    arrays, scalars = attention_data(144, 128)
    module = attention(kernel).check(arrays, scalars, (2, 1, 1))
    assert longest_first(module)
    assert not longest_first(attention(kernel, causal=False).compile())
