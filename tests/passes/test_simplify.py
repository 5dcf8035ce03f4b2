"""simplify: what is left afterwards, and that results stay."""

import pytest

from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import simplify
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import int_array, kernel_of, ops_of, walk

V = "tensor<8xi32>"
P = "tensor<8x!mt.ptr<i32>>"
ARGS = f"%p: {P}, %m: tensor<8xi1>, %a: i32, %b: i32, %n: i32, %v: {V}"


def simplified(body, args=ARGS):
    """The module `func @k(args) { body }` after the pass."""
    module = ir.Module.parse(f"func.func @k({args}) {{\n{body}\nreturn }}")
    simplify.run(module, Target.parse("sm_80"), PassOptions(check=True))
    assert module.operation.verify()
    return module


def ops(module):
    return [op.name for op in walk(kernel_of(module))]


def store(value, pointer="%p"):
    return f'"mt.store"({pointer}, {value}) : ({P}, {V}) -> ()\n'


def load(name, extras="", segments="1, 0, 0", attributes=""):
    types = {"1, 0, 0": "", "1, 1, 0": ", tensor<8xi1>"}[segments]
    return (
        f'%{name} = "mt.load"(%p{extras}) {{operandSegmentSizes = array<i32: {segments}>'
        f"{attributes}}} : ({P}{types}) -> {V}\n"
    )


def test_arithmetic_on_splats_is_scalar():
    body = f"""
      %c = arith.constant dense<3> : {V}
      %x = "mt.splat"(%a) : (i32) -> {V}
      %y = "mt.splat"(%b) : (i32) -> {V}
      %s = arith.addi %x, %y : {V}
      %t = arith.muli %s, %c : {V}
    """ + store("%t")
    module = simplified(body)
    assert ops(module).count("mt.splat") == 1
    scalar = [op for op in walk(kernel_of(module)) if op.name.startswith("arith.")]
    assert all(not isinstance(op.results[0].type, ir.RankedTensorType) for op in scalar)


def test_arithmetic_moves_before_broadcasts_of_one_shape():
    body = """
      %c = arith.constant dense<2> : tensor<8x4xi32>
      %r = "mt.expand_dims"(%v) {axis = 1 : i32} : (tensor<8xi32>) -> tensor<8x1xi32>
      %w = "mt.broadcast"(%r) : (tensor<8x1xi32>) -> tensor<8x4xi32>
      %s = arith.muli %w, %c : tensor<8x4xi32>
      %t = arith.addi %s, %w : tensor<8x4xi32>
      "mt.print"(%t) {prefix = "", operandSegmentSizes = array<i32: SEGMENTS>} : (tensor<8x4xi32>) -> ()
    """.replace("SEGMENTS", ", ".join(["1"] + ["0"] * 15))  # noqa: E501
    module = simplified(body)
    shapes = [
        list(op.results[0].type.shape)
        for op in walk(kernel_of(module))
        if op.name in ("arith.muli", "arith.addi")
    ]
    assert shapes == [[8, 1], [8, 1]] and ops(module)[-3] == "mt.broadcast"


def test_transposes_of_transposes_are_one_or_none():
    def left(*orders):
        body, name, sizes = "", "%t", [2, 4, 8]
        for number, order in enumerate(orders):
            before, sizes = "x".join(map(str, sizes)), [sizes[dim] for dim in order]
            after = "x".join(map(str, sizes))
            body += f"""
              %t{number} = "mt.trans"({name}) {{order = array<i32: {", ".join(map(str, order))}>}} :
                (tensor<{before}xi32>) -> tensor<{after}xi32>
            """
            name = f"%t{number}"
        segments = ", ".join(["1"] + ["0"] * 15)
        body += f"""
          "mt.print"({name}) {{prefix = "", operandSegmentSizes = array<i32: {segments}>}} :
            (tensor<{after}xi32>) -> ()
        """
        module = simplified(body, "%t: tensor<2x4x8xi32>")
        return [int_array(op, "order") for op in walk(kernel_of(module)) if op.name == "mt.trans"]

    assert left((1, 2, 0), (2, 0, 1)) == []
    assert left((1, 2, 0), (1, 0, 2)) == [[2, 1, 0]]
    assert left((1, 2, 0), (1, 2, 0), (1, 2, 0)) == []


def test_select_with_the_mask_becomes_the_loads_other():
    select = "%s = arith.select %m, %l, %v : tensor<8xi1>, tensor<8xi32>\n"
    module = simplified(load("l", ", %m", "1, 1, 0") + select + store("%s"))
    (found,) = [op for op in walk(kernel_of(module)) if op.name == "mt.load"]
    assert len(found.operands) == 3 and "arith.select" not in ops(module)
    kept = simplified(load("l", ", %m", "1, 1, 0") + store("%v") + select + store("%s"))
    assert "arith.select" in ops(kept)  # the store may change what is loaded
    other = select.replace("%m", "%other")
    args = ARGS + ", %other: tensor<8xi1>"
    assert "arith.select" in ops(
        simplified(load("l", ", %m", "1, 1, 0") + other + store("%s"), args)
    )


def test_repeated_loads_are_shared_up_to_a_write():
    twice = load("x") + load("y") + "%s = arith.addi %x, %y : tensor<8xi32>\n" + store("%s")
    assert ops(simplified(twice)).count("mt.load") == 1
    written = load("x") + store("%v") + load("y")
    written += "%s = arith.addi %x, %y : tensor<8xi32>\n" + store("%s")
    assert ops(simplified(written)).count("mt.load") == 2
    waited = load("x") + '"mt.grid_wait"() : () -> ()\n' + load("y")
    waited += "%s = arith.addi %x, %y : tensor<8xi32>\n" + store("%s")
    assert ops(simplified(waited)).count("mt.load") == 2
    volatile = twice.replace("1, 0, 0>}", "1, 0, 0>, volatile}")
    assert ops(simplified(volatile)).count("mt.load") == 2
    assert ops(simplified(load("x"))).count("mt.load") == 0
    assert ops(simplified(load("x", attributes=", volatile"))).count("mt.load") == 1


def test_constant_offsets_add_up_unless_they_overflow():
    def chain(first, second):
        module = simplified(f"""
          %c = arith.constant dense<{first}> : {V}
          %d = arith.constant dense<{second}> : {V}
          %q = "mt.addptr"(%p, %c) : ({P}, {V}) -> {P}
          %r = "mt.addptr"(%q, %d) : ({P}, {V}) -> {P}
        """ + store("%v", "%r"))  # fmt: skip
        return ops(module).count("mt.addptr")

    assert chain(3, 4) == 1
    assert chain(2**31 - 1, 1) == 2


LOOP = """
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %r = scf.for %i = %c0 to %n step %c1 iter_args(%s = %v) -> (tensor<8xi32>) : i32 {
    %k = "mt.splat"(%a) : (i32) -> tensor<8xi32>
    %q = arith.divsi %a, %b : i32
    %w = "mt.splat"(%q) : (i32) -> tensor<8xi32>
    %x = arith.xori %v, %k : tensor<8xi32>
    %y = arith.addi %s, %x : tensor<8xi32>
    %z = arith.addi %y, %w : tensor<8xi32>
    scf.yield %z : tensor<8xi32>
  } ATTRIBUTES
"""


def body_ops(module):
    loop = next(op for op in walk(kernel_of(module)) if op.name == "scf.for")
    return [op.name for op in ops_of(loop.regions[0].blocks[0])]


def test_invariants_leave_the_loop_but_divisions_are_not_speculated():
    inside = body_ops(simplified(LOOP.replace("ATTRIBUTES", "") + store("%r")))
    assert "arith.xori" not in inside and "arith.divsi" in inside
    kept = body_ops(simplified(LOOP.replace("ATTRIBUTES", "{mt.disable_licm}") + store("%r")))
    assert "arith.xori" in kept


def test_carried_values_that_feed_only_themselves_go():
    body = f"""
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %r:2 = scf.for %i = %c0 to %n step %c1 iter_args(%s = %v, %q = %p) -> ({V}, {P}) : i32 {{
        %t = arith.addi %s, %s : {V}
        %o = "mt.addptr"(%q, %v) : ({P}, {V}) -> {P}
        scf.yield %t, %o : {V}, {P}
      }}
    """ + store("%r#0")
    module = simplified(body)
    loop = next(op for op in walk(kernel_of(module)) if op.name == "scf.for")
    assert len(loop.results) == 1


ADDED = """
  %zero = arith.constant dense<ZERO> : RESULT
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %r = scf.for %i = %c0 to %n step %c1 iter_args(%s = %start) -> (RESULT) : i32 {
    %x = "mt.load"(%p) {operandSegmentSizes = array<i32: 1, 0, 0>} : (POINTERS) -> RESULT
    %t = ADD %s, %s : RESULT
    %d = "mt.dot"(%a, %b, DOT_SUM) {input_precision = "tf32", max_imprecise = LIMIT : i32} : (LEFT, LEFT, RESULT) -> RESULT
    %e = "mt.dot"(%b, %a, %zero) {input_precision = "tf32", max_imprecise = LIMIT : i32} : (LEFT, LEFT, RESULT) -> RESULT
    %y = ADD OPERANDS : RESULT
    %z = ADD %y, %x : RESULT
    scf.yield %z : RESULT
  }
  "mt.store"(%p, %r) : (POINTERS, RESULT) -> ()
"""  # noqa: E501


def added(operands, left="f16", result="f32", limit=0, dot_sum="%zero"):
    """The sum that the dot begins with, by name, and how many additions remain, after simplify."""
    names = {
        "RESULT": f"tensor<16x16x{result}>", "LEFT": f"tensor<16x16x{left}>", "LIMIT": str(limit),
        "POINTERS": f"tensor<16x16x!mt.ptr<{result}>>", "OPERANDS": operands, "DOT_SUM": dot_sum,
        "ADD": "arith.addi" if result[0] == "i" else "arith.addf",
        "ZERO": "0" if result[0] == "i" else "0.0",
    }  # fmt: skip
    body = ADDED
    args = "%p: POINTERS, %a: LEFT, %b: LEFT, %start: RESULT, %n: i32"
    for name, text in names.items():
        body, args = body.replace(name, text), args.replace(name, text)
    module = simplified(body, args)
    dot, *_ = (op for op in walk(kernel_of(module)) if op.name == "mt.dot")
    total = dot.operands[2]
    made_by = "argument" if isinstance(total, ir.BlockArgument) else total.owner.operation.name
    return made_by, sum(name.startswith("arith.add") for name in ops(module))


@pytest.mark.parametrize("operands", ["%s, %d", "%d, %s"])
def test_products_are_added_to_a_running_sum_by_the_dot(operands):
    assert added(operands) == ("argument", 1)
    assert added(operands, "i8", "i32") == ("argument", 1)


def test_and_to_one_that_is_scaled_first():
    assert added("%t, %d") == ("arith.addf", 2)


@pytest.mark.parametrize(
    "case",
    [
        {"operands": "%x, %d"},  # what is loaded need not be there for the product
        {"operands": "%s, %d", "result": "f16"},  # rounded more often
        {"operands": "%s, %d", "left": "f8E4M3FN", "limit": 1 << 30},  # as imprecise as allowed
        {"operands": "%d, %d"},  # used twice
        {"operands": "%d, %e"},  # no loop carries either
    ],
    ids=str,
)
def test_other_products_are_not(case):
    assert added(**case) == ("arith.constant", 2)


def test_nor_one_that_has_its_sum():
    assert added("%s, %d", dot_sum="%start") == ("argument", 2)
