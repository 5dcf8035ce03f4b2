"""Which argument a pointer is an offset from, and which accesses may come after a store."""

import pytest

from minitriton.ir.mlir import ir
from minitriton.passes.global_order import GlobalOrder, bases_of, outermost_loop
from minitriton.passes.traversal import kernel_of, walk

HEAD = """module attributes {mt.num_warps = 1 : i32} {
  func.func @k(%p: !mt.ptr<f32>, %q: !mt.ptr<f32>, %t: !mt.ptr<!mt.ptr<f32>>, %n: i32, %x: f32,
               %c: i1) {
    %zero = arith.constant 0 : i32
    %one = arith.constant 1 : i32
"""
STORE = '"mt.store"(%{0}, %x) {{mark = "{1}"}} : (!mt.ptr<f32>, f32) -> ()\n'
LOAD = (
    '%{1} = "mt.load"(%{0}) {{operandSegmentSizes = array<i32: 1, 0, 0>}} : (!mt.ptr<f32>) -> f32\n'
)
MARKED = STORE.format("p", "this")


def parsed(body):
    return ir.Module.parse(HEAD + body + "\nreturn } }")


@pytest.mark.parametrize(
    ("body", "bases"),
    [
        ('"mt.addptr"(%q, %n) : (!mt.ptr<f32>, i32) -> !mt.ptr<f32>', {1}),
        ("arith.select %c, %p, %q : !mt.ptr<f32>", {0, 1}),
        ("arith.select %c, %p, %p : !mt.ptr<f32>", {0}),
        ('"mt.load"(%t) {operandSegmentSizes = array<i32: 1, 0, 0>} : '
         "(!mt.ptr<!mt.ptr<f32>>) -> !mt.ptr<f32>", set()),
        ('"mt.splat"(%p) : (!mt.ptr<f32>) -> tensor<4x!mt.ptr<f32>>\n'
         '%b = "mt.splat"(%q) : (!mt.ptr<f32>) -> tensor<4x!mt.ptr<f32>>\n'
         '%d = "mt.join"(%a, %b) : (tensor<4x!mt.ptr<f32>>, tensor<4x!mt.ptr<f32>>) -> '
         "tensor<4x2x!mt.ptr<f32>>", {0, 1}),
        ("scf.for %i = %zero to %n step %one iter_args(%b = %p) -> (!mt.ptr<f32>) : i32 {\n"
         "scf.yield %q : !mt.ptr<f32>\n}", set()),
        ("scf.if %c -> (!mt.ptr<f32>) {\nscf.yield %p : !mt.ptr<f32>\n} else {\n"
         "scf.yield %q : !mt.ptr<f32>\n}", set()),
    ],
)  # fmt: skip
def test_bases(body, bases):
    module = parsed("%a = " + body)
    block = kernel_of(module).regions[0].blocks[0]
    op = block.operations[len(block.operations) - 2].operation
    assert bases_of(op.results[0], block) == bases


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        (LOAD.format("p", "a") + MARKED, None),
        (MARKED + LOAD.format("p", "a"), "later load"),
        (MARKED + LOAD.format("q", "a"), "later load"),
        ("scf.for %i = %zero to %n step %one : i32 {\n" + LOAD.format("q", "a") + MARKED + "}",
         "later load"),
        ("scf.for %i = %zero to %n step %one : i32 {\n" + LOAD.format("q", "a") + MARKED
         + "} {mt.num_stages = 2 : i32}", None),
        ("scf.for %i = %zero to %n step %one : i32 {\n" + LOAD.format("p", "a") + MARKED
         + "} {mt.num_stages = 2 : i32}", "later load"),
        ("scf.for %i = %zero to %n step %one : i32 {\n" + LOAD.format("p", "a") + MARKED
         + "} {mt.programs}", None),
        ("scf.if %c {\n" + MARKED + "} else {\n" + LOAD.format("p", "a") + "}", None),
        ("scf.if %c {\n" + MARKED + "}\n" + LOAD.format("p", "a"), "later load"),
        (MARKED + STORE.format("q", "other"), None),
        (STORE.format("p", "other") + MARKED, "another store"),
        (MARKED + STORE.format("p", "copied"), None),
    ],
)  # fmt: skip
def test_obstacles(body, obstacle):
    module = parsed(body)
    stores = [op for op in walk(kernel_of(module)) if op.name == "mt.store"]
    marks = [ir.StringAttr(op.attributes["mark"]).value for op in stores]
    copied = [op for op, mark in zip(stores, marks, strict=True) if mark != "other"]
    found = GlobalOrder(module).obstacle(stores[marks.index("this")], copied)
    assert found is None if obstacle is None else obstacle in found


@pytest.mark.parametrize(
    ("body", "repeated"),
    [
        (MARKED, False),
        (STORE.format("p", "other") + MARKED, True),
        (STORE.format("q", "other") + MARKED, False),
        (MARKED + STORE.format("p", "other"), False),
        ("scf.for %i = %zero to %n step %one : i32 {\n" + MARKED + "}", True),
        ("scf.for %i = %zero to %n step %one : i32 {\n" + MARKED + "} {mt.programs}", False),
    ],
)
def test_repeated(body, repeated):
    module = parsed(body)
    stores = [op for op in walk(kernel_of(module)) if op.name == "mt.store"]
    (this,) = [op for op in stores if ir.StringAttr(op.attributes["mark"]).value == "this"]
    assert GlobalOrder(module).is_repeated(this, stores) == repeated


def test_the_outermost_loop():
    inner = "scf.for %j = %zero to %n step %one : i32 {\n" + MARKED + "}"
    body = "scf.for %i = %zero to %n step %one : i32 {\nscf.if %c {\n" + inner + "}\n}\n"
    module = parsed(body + STORE.format("p", "other"))
    first, second = [op for op in walk(kernel_of(module)) if op.name == "mt.store"]
    loop = next(op for op in walk(kernel_of(module)) if op.name == "scf.for")
    assert outermost_loop(first) == loop and outermost_loop(second) is None
