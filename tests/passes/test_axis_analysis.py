"""Claims of the axis analysis hold for the values of random integer programs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minitriton.ir import axis_info
from minitriton.ir.axis_analysis import analyse
from minitriton.ir.axis_info import AxisInfo
from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.context import use
from minitriton.ir.dialect import PtrType
from minitriton.ir.interpret import Program
from minitriton.ir.mlir import ir

LIMIT = 1 << 28  # larger results are not fed into further arithmetic: no overflow by assumption


class RandomProgram:
    """Builds ops on a pool of values and runs each at once on numpy."""

    def __init__(self, draw):
        self.draw = draw
        self.i32 = ir.IntegerType.get_signless(32)
        pointer = PtrType.get(ir.TypeAttr.get(ir.F16Type.get()))
        self.module = ir.Module.create()
        divisibility = ir.DictAttr.get(
            {"mt.divisibility": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 16)}
        )
        types = [self.i32, self.i32, pointer]
        self.function = ir.Operation.create(
            "func.func", [], [],
            {
                "sym_name": ir.StringAttr.get("k"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(types, [])),
                "arg_attrs": ir.ArrayAttr.get([divisibility, ir.DictAttr.get({}), divisibility]),
            },
            None, 1, None, ir.InsertionPoint(self.module.body),
        )  # fmt: skip
        block = ir.Block.create_at_start(
            self.function.regions[0], types, [ir.Location.unknown()] * 3
        )
        self.builder = Builder(ir.InsertionPoint(block))
        self.program = Program((draw(st.integers(0, 9)), 0, 0), (10, 1, 1), None)
        arguments = [16 * draw(st.integers(0, 20)), draw(st.integers(1, 300)), 1 << 20]
        self.values = self.program.values
        for formal, actual in zip(block.arguments, arguments, strict=True):
            self.values[formal] = np.asarray(actual, np.int64 if actual == 1 << 20 else np.int32)
        self.numbers = list(block.arguments)[:2]
        self.pointers = [block.arguments[2]]
        self.flags = []

    def emit(self, name, result, operands=(), **attributes):
        value = self.builder.op(name, result, operands, attributes)
        op = value.owner.operation
        (self.values[value],) = self.program.evaluate(op, [self.values[v] for v in operands])
        return value

    def constant(self, like, number):
        value = self.builder.constant(like, number)
        op = value.owner.operation
        (self.values[value],) = self.program.evaluate(op, [])
        return value

    def tile(self, shape, element=None):
        return ir.RankedTensorType.get(list(shape), element or self.i32)

    def step(self):
        kind = self.draw(st.sampled_from(sorted(STEPS)))
        made = STEPS[kind](self)
        if made is not None and np.abs(self.values[made].astype(np.int64)).max() < LIMIT:
            self.numbers.append(made)

    def pick(self, shape=None, minimum=None):
        found = [
            v
            for v in self.numbers
            if (shape is None or shape_of(v) == shape)
            and (minimum is None or self.values[v].min() >= minimum)
        ]
        return self.draw(st.sampled_from(found)) if found else None


def shape_of(value):
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


def make_range(p):
    size, start = 1 << p.draw(st.integers(0, 5)), p.draw(st.sampled_from([0, 0, 8, 3]))
    return p.emit(
        "mt.make_range", p.tile([size]), (), start=i32_attr(start), end=i32_attr(start + size)
    )


def splat(p):
    shape = [1 << p.draw(st.integers(0, 3)) for _ in range(p.draw(st.integers(1, 2)))]
    return p.emit("mt.splat", p.tile(shape), [p.pick(())])


def constant(p):
    like = p.pick()
    return p.constant(like.type, p.draw(st.sampled_from([0, 1, 2, 3, 8, 12, 16, 64])))


def expand(p):
    value = p.pick()
    shape = shape_of(value)
    if len(shape) != 1:
        return None
    axis = p.draw(st.integers(0, 1))
    result = p.tile((*shape[:axis], 1, *shape[axis:]))
    return p.emit("mt.expand_dims", result, [value], axis=i32_attr(axis))


def broadcast(p):
    value = p.pick()
    shape = shape_of(value)
    if not shape:
        return None
    wide = [n if n > 1 else 1 << p.draw(st.integers(0, 4)) for n in shape]
    return p.emit("mt.broadcast", p.tile(wide), [value])


def trans(p):
    value = p.pick()
    shape = shape_of(value)
    if len(shape) != 2:
        return None
    order = ir.DenseI32ArrayAttr.get([1, 0])
    return p.emit("mt.trans", p.tile(shape[::-1]), [value], order=order)


def reshape(p):
    value = p.pick()
    shape = shape_of(value)
    if not shape:
        return None
    total = int(np.prod(shape)).bit_length() - 1
    split = p.draw(st.integers(0, total))
    result = p.draw(st.sampled_from([(1 << total,), (1 << split, 1 << (total - split))]))
    return p.emit("mt.reshape", p.tile(result), [value])


def binary(name):
    def make(p):
        lhs = p.pick()
        rhs = p.pick(shape_of(lhs))
        return p.emit(f"arith.{name}", lhs.type, [lhs, rhs])

    return make


def division(name):
    def make(p):
        lhs = p.pick(minimum=0)
        rhs = p.pick(shape_of(lhs), minimum=1) if lhs is not None else None
        return p.emit(f"arith.{name}", lhs.type, [lhs, rhs]) if rhs is not None else None

    return make


def shift(name):
    def make(p):
        lhs = p.pick(minimum=0)
        if lhs is None:
            return None
        return p.emit(
            f"arith.{name}", lhs.type, [lhs, p.constant(lhs.type, p.draw(st.integers(0, 4)))]
        )

    return make


def flag(p):
    lhs = p.pick()
    rhs = p.pick(shape_of(lhs))
    i1 = ir.IntegerType.get_signless(1)
    result = p.tile(shape_of(lhs), i1) if shape_of(lhs) else i1
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), p.draw(st.integers(0, 9)))
    p.flags.append(p.emit("arith.cmpi", result, [lhs, rhs], predicate=number))


def select(p):
    if not p.flags:
        return None
    flag = p.draw(st.sampled_from(p.flags))
    lhs, rhs = p.pick(shape_of(flag)), p.pick(shape_of(flag))
    return p.emit("arith.select", lhs.type, [flag, lhs, rhs]) if lhs is not None else None


def narrow(p):
    value = p.pick()
    i8 = ir.IntegerType.get_signless(8)
    small = p.emit("arith.trunci", p.tile(shape_of(value), i8) if shape_of(value) else i8, [value])
    return p.emit(p.draw(st.sampled_from(["arith.extsi", "arith.extui"])), value.type, [small])


def address(p):
    base = p.draw(st.sampled_from(p.pointers))
    offset = p.pick(shape_of(base)) if shape_of(base) else p.pick()
    if offset is None:
        return
    if shape_of(offset) and not shape_of(base):
        base = p.emit("mt.splat", p.tile(shape_of(offset), base.type), [base])
    p.pointers.append(p.emit("mt.addptr", base.type, [base, offset]))


STEPS = {
    "range": make_range, "range2": make_range, "splat": splat, "constant": constant,
    "expand": expand, "broadcast": broadcast, "trans": trans, "reshape": reshape,
    "compare": flag, "select": select, "address": address, "address2": address,
    "narrow": narrow,
    **{n: binary(n) for n in ("addi", "subi", "muli", "andi", "ori", "xori", "minsi", "maxsi")},
    "addi2": binary("addi"), "muli2": binary("muli"),
    **{n: division(n) for n in ("divsi", "remsi", "divui", "remui")},
    **{n: shift(n) for n in ("shli", "shrsi", "shrui")},
}  # fmt: skip


def check_claims(info, values, unit):
    shape = values.shape or (1,)
    values = values.reshape(shape).astype(np.int64)
    if info.constant is not None:
        assert (values == info.constant).all()
    for dim, size in enumerate(shape):
        lines = np.moveaxis(values, dim, -1).reshape(-1, size)
        run = min(info.contiguity[dim], size)
        groups = lines.reshape(-1, size // run, run)
        assert (groups - groups[..., :1] == unit * np.arange(run)).all(), "contiguity"
        assert (groups[..., 0] % info.divisibility[dim] == 0).all(), "divisibility"
        same = min(info.constancy[dim], size)
        groups = lines.reshape(-1, size // same, same)
        assert (groups == groups[..., :1]).all(), "constancy"


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_claims_hold(data):
    with use():
        p = RandomProgram(data.draw)
        for _ in range(data.draw(st.integers(5, 25))):
            p.step()
        facts = analyse(p.function)
        for value, actual in p.values.items():
            unit = 2 if value in p.pointers else 1
            check_claims(facts.of(value), np.asarray(actual), unit)


TILE_OF_ROWS = """
func.func @k(%p: !mt.ptr<f16> {mt.divisibility = 16 : i64},
             %s: i32 {mt.divisibility = 16 : i64}, %n: i32 {mt.divisibility = 16 : i64}) {
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %r = "mt.make_range"() {start = 0 : i32, end = 64 : i32} : () -> tensor<64xi32>
  %row = "mt.expand_dims"(%r) {axis = 1 : i32} : (tensor<64xi32>) -> tensor<64x1xi32>
  %col = "mt.expand_dims"(%r) {axis = 0 : i32} : (tensor<64xi32>) -> tensor<1x64xi32>
  %ss = "mt.splat"(%s) : (i32) -> tensor<64x1xi32>
  %m = arith.muli %row, %ss : tensor<64x1xi32>
  %mb = "mt.broadcast"(%m) : (tensor<64x1xi32>) -> tensor<64x64xi32>
  %cb = "mt.broadcast"(%col) : (tensor<1x64xi32>) -> tensor<64x64xi32>
  %o = arith.addi %mb, %cb : tensor<64x64xi32>
  %ps = "mt.splat"(%p) : (!mt.ptr<f16>) -> tensor<64x64x!mt.ptr<f16>>
  %q = "mt.addptr"(%ps, %o) : (tensor<64x64x!mt.ptr<f16>>, tensor<64x64xi32>) -> tensor<64x64x!mt.ptr<f16>>
  %ns = "mt.splat"(%n) : (i32) -> tensor<1x64xi32>
  %k = arith.cmpi slt, %col, %ns : tensor<1x64xi32>
  %kb = "mt.broadcast"(%k) : (tensor<1x64xi1>) -> tensor<64x64xi1>
  %step = arith.constant dense<STEP> : tensor<64x64xi32>
  %end = scf.for %i = %c0 to %n step %c64 iter_args(%at = %q) -> (tensor<64x64x!mt.ptr<f16>>) : i32 {
    %v = "mt.load"(%at, %kb) {operandSegmentSizes = array<i32: 1, 1, 0>} : (tensor<64x64x!mt.ptr<f16>>, tensor<64x64xi1>) -> tensor<64x64xf16>
    "mt.store"(%at, %v) : (tensor<64x64x!mt.ptr<f16>>, tensor<64x64xf16>) -> ()
    %next = "mt.addptr"(%at, %step) : (tensor<64x64x!mt.ptr<f16>>, tensor<64x64xi32>) -> tensor<64x64x!mt.ptr<f16>>
    scf.yield %next : tensor<64x64x!mt.ptr<f16>>
  }
  return
}"""  # noqa: E501


def limits_in_loop(step):
    with use():
        module = ir.Module.parse(TILE_OF_ROWS.replace("STEP", str(step)))
        function = module.body.operations[0].operation
        facts = analyse(function)
        loop = next(
            v.operation
            for v in function.regions[0].blocks[0].operations
            if v.operation.name == "scf.for"
        )
        return [
            facts.access_limits(v.operation)
            for v in loop.regions[0].blocks[0].operations
            if v.operation.name in ("mt.load", "mt.store")
        ]


def test_loop_carried_pointers_keep_what_every_step_keeps():
    load, store = limits_in_loop(64)
    assert load == (1, 8)  # 16 bytes of f16; the mask is constant over 16 columns
    assert store == (1, 8)
    assert limits_in_loop(4)[0] == (1, 4)
    assert limits_in_loop(1)[0] == (1, 1)


def test_compare_is_constant_over_the_claimed_groups():
    tests = [
        np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
        np.less, np.less_equal, np.greater, np.greater_equal,
    ]  # fmt: skip
    for start in (0, 8, 12, 16):
        run = np.arange(start, start + 16)
        left = AxisInfo((16,), ((start & -start) or 64,), (1,))
        for bound in range(0, 40, 2):
            right = AxisInfo((1,), ((bound & -bound) or 64,), (16,))
            for predicate, test in enumerate(tests):
                for flipped in (False, True):
                    a, b = (bound, run) if flipped else (run, bound)
                    info = (
                        axis_info.compare(right, left, predicate)
                        if flipped
                        else axis_info.compare(left, right, predicate)
                    )
                    groups = test(a, b).reshape(-1, info.constancy[0])
                    assert (groups == groups[:, :1]).all(), (start, bound, predicate, flipped)
