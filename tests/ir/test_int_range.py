"""Ranges of integers: what an expression gives for any inputs lies in the range found for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minitriton.ir.builder import Builder
from minitriton.ir.context import use
from minitriton.ir.int_range import range_of, unsigned
from minitriton.ir.mlir import ir

BITS = 32
CONSTANT_RIGHT = ("shli", "shrsi", "shrui", "remsi", "remui", "divsi", "divui")
ANY = ("addi", "subi", "muli", "andi", "ori", "xori", "minsi", "maxsi", *CONSTANT_RIGHT)


def signed(number, bits=BITS):
    number &= 2**bits - 1
    return number - 2**bits if number >> (bits - 1) else number


def toward_zero(a, b):
    return abs(a) // b * (-1 if a < 0 else 1)


MEANING = {
    "addi": lambda a, b: a + b, "subi": lambda a, b: a - b, "muli": lambda a, b: a * b,
    "andi": lambda a, b: a & b, "ori": lambda a, b: a | b, "xori": lambda a, b: a ^ b,
    "minsi": min, "maxsi": max, "shli": lambda a, b: a << b, "shrsi": lambda a, b: a >> b,
    "shrui": lambda a, b: a % 2**BITS >> b, "divsi": toward_zero,
    "divui": lambda a, b: a % 2**BITS // b, "remui": lambda a, b: a % 2**BITS % b,
    "remsi": lambda a, b: a - toward_zero(a, b) * b,
}  # fmt: skip

leaves = st.one_of(
    st.tuples(st.just("byte"), st.booleans(), st.integers(0, 1)),
    st.tuples(st.just("word"), st.integers(0, 1)),
    st.tuples(st.just("number"), st.integers(-300, 300)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(ANY), inner, inner, st.integers(1, 31)),
        st.tuples(st.just("trunci"), inner),
        st.tuples(st.just("select"), inner, inner, inner),
    ),
    max_leaves=8,
)


def build(builder, arguments, tree):
    i32, i8 = (ir.IntegerType.get_signless(bits) for bits in (32, 8))
    kind, *parts = tree
    if kind == "number":
        return builder.constant(i32, parts[0])
    if kind == "word":
        return arguments[parts[0]]
    if kind == "byte":
        extend = "arith.extsi" if parts[0] else "arith.extui"
        return builder.op(extend, i32, (arguments[2 + parts[1]],))
    if kind == "trunci":
        byte = builder.op("arith.trunci", i8, (build(builder, arguments, parts[0]),))
        return builder.op("arith.extsi", i32, (byte,))
    if kind == "select":
        a, b, c = (build(builder, arguments, part) for part in parts)
        i1 = builder.op("arith.trunci", ir.IntegerType.get_signless(1), (a,))
        return builder.op("arith.select", i32, (i1, b, c))
    a, b = build(builder, arguments, parts[0]), build(builder, arguments, parts[1])
    if kind in CONSTANT_RIGHT:
        b = builder.constant(i32, parts[2])
    return builder.op(f"arith.{kind}", i32, (a, b))


def value(tree, inputs):
    kind, *parts = tree
    if kind == "number":
        return parts[0]
    if kind == "word":
        return inputs[parts[0]]
    if kind == "byte":
        return inputs[2 + parts[1]] if parts[0] else inputs[2 + parts[1]] % 256
    if kind == "trunci":
        return signed(value(parts[0], inputs), 8)
    if kind == "select":
        return value(parts[1 if value(parts[0], inputs) & 1 else 2], inputs)
    right = parts[2] if kind in CONSTANT_RIGHT else value(parts[1], inputs)
    return signed(MEANING[kind](value(parts[0], inputs), right))


words, bytes_ = st.integers(-(2**31), 2**31 - 1), st.integers(-128, 127)


@given(trees, st.lists(st.tuples(words, words, bytes_, bytes_), min_size=4, max_size=12))
def test_values_lie_in_the_range(tree, rows):
    with use():
        module = ir.Module.parse("func.func @f(%a: i32, %b: i32, %c: i8, %d: i8) { return }")
        block = module.body.operations[0].operation.regions[0].blocks[0]
        builder = Builder(ir.InsertionPoint.at_block_begin(block), ir.Location.unknown())
        found = range_of(build(builder, list(block.arguments), tree))
    for row in rows:
        number = value(tree, row)
        assert found[0] <= number <= found[1]
        low, high = unsigned(found, BITS)
        assert low <= number % 2**BITS <= high


def test_four_bits_less_eight():
    with use():
        module = ir.Module.parse("""
            func.func @f(%a: tensor<4xi32>) {
              %m = arith.constant dense<15> : tensor<4xi32>
              %n = arith.andi %a, %m : tensor<4xi32>
              %e = arith.constant dense<8> : tensor<4xi32>
              %s = arith.subi %n, %e : tensor<4xi32>
              return
            }""")
        block = module.body.operations[0].operation.regions[0].blocks[0]
        assert range_of(block.operations[3].operation.results[0]) == (-8, 7)
        assert range_of(block.arguments[0]) == (-(2**31), 2**31 - 1)
