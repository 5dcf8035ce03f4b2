"""Loops, branches and exits: which structure is built and which values it carries."""

from __future__ import annotations

import collections

import pytest

import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit
from minitriton.ir.diagnostics import CompileError
from tests.frontend.support import build

Pair = collections.namedtuple("Pair", "first second")
WIDTH = tl.constexpr(8)


@jit
def counted(p, n):
    total = 0.0
    for i in range(n):
        total += tl.load(p + i)
    tl.store(p, total)


def test_constant_becomes_carried() -> None:
    text = build(counted, p="*fp32", n="i32")
    assert "iter_args(%arg3 = %" in text and "-> (f32)" in text
    assert text.count("scf.for") == 1


@jit
def strides_of_one(a, b, n, a0, b0):
    for i in range(n):
        tl.store(a + i * a0, 1.0)
        a = b
        a0 = b0


def test_specialised_strides_do_not_break_loops() -> None:
    assert "scf.for" in build(strides_of_one, a="*fp32", b="*fp32", n="i32", a0=1, b0=1)
    assert "-> (!mt.ptr<f32>, i32)" in build(
        strides_of_one, a="*fp32", b="*fp32", n="i32", a0=1, b0="i32"
    )
    assert "i64)" in build(strides_of_one, a="*fp32", b="*fp32", n="i32", a0=1, b0="i64")


@jit
def temporaries(p, n):
    x = tl.load(p)
    for i in range(n):
        x = tl.arange(0, 4) + i
        tl.store(p + x, 0.0)


def test_only_live_names_are_carried() -> None:
    assert "iter_args" not in build(temporaries, p="*fp32", n="i32")


@jit
def countdown(p, n):
    for i in range(n, 0, -2):
        tl.store(p + i, i)


def test_negative_step_mirrors_the_index() -> None:
    text = build(countdown, p="*i32", n="i32")
    assert "arith.constant 2 : i32" in text and "arith.subi" in text


@jit
def options(p, n, STAGES: tl.constexpr):
    for i in tl.range(
        0,
        n,
        1,
        num_stages=STAGES,
        loop_unroll_factor=2,
        flatten=True,
        warp_specialize=True,
        disallow_acc_multi_buffer=True,
        disable_licm=True,
    ):
        tl.store(p + i, i)  # fmt: skip


def test_loop_options() -> None:
    text = build(options, p="*i32", n="i64", STAGES=4)
    for wanted in ("mt.num_stages = 4", "mt.unroll = 2", "mt.flatten", "mt.warp_specialize",
                   "mt.disallow_acc_multi_buffer", "mt.disable_licm", ": i64 {"):  # fmt: skip
        assert wanted in text


@jit
def unrolled(p):
    for i in tl.static_range(3):
        for j in (1, 2):
            tl.store(p + i, j)


def test_static_loops_unroll() -> None:
    assert build(unrolled, p="*i32").count("mt.store") == 6


@jit
def early_return(p, n):
    if tl.program_id(0) >= n:
        return
    tl.store(p, 1.0)
    if n == 7:
        if n == 8:
            return
        tl.store(p, 2.0)
    tl.store(p, 3.0)


def test_early_return_nests_the_rest() -> None:
    text = build(early_return, p="*fp32", n="i32")
    assert text.count("scf.if") == 3
    assert text.count("mt.store") == 4  # the last store follows both `if`s


@jit
def sign(x):
    if x > 0:
        return 1
    elif x < 0:
        return -1
    return 0


@jit
def calls_sign(p, n):
    tl.store(p, sign(n))


def test_return_values_are_joined() -> None:
    text = build(calls_sign, p="*i32", n="i32")
    assert text.count("-> (i32)") == 2


@jit
def merged(p, n):
    x = 1.0
    if n > 3:
        x = tl.load(p)
        unused = tl.arange(0, 4)
    else:
        unused = 3.0  # noqa: F841
    tl.store(p, x)


def test_dead_names_may_differ() -> None:
    assert "-> (f32)" in build(merged, p="*fp32", n="i32")


@jit
def while_true(p, n):
    i = 0
    while i < n:
        x = tl.load(p + i)
        if x == 0:
            break
        if x < 0:
            i += 2
            continue
        tl.store(p + i, -x)
        i += 1
    tl.store(p, i)


def test_break_and_continue_in_while() -> None:
    text = build(while_true, p="*i32", n="i32")
    assert text.count("scf.while") == 1 and text.count("mt.store") == 2


@jit
def find(p, n):
    found = -1
    for i in range(0, n):
        if tl.load(p + i) == 7:
            found = i
            break
    tl.store(p, found)


def test_break_in_for() -> None:
    text = build(find, p="*i32", n="i32")
    assert "scf.while" in text and "scf.for" not in text


@jit
def skipping(p, n):
    total = 0
    for i in range(n):
        if i == 3:
            continue
        total += i
    tl.store(p, total)


def test_continue_keeps_scf_for() -> None:
    text = build(skipping, p="*i32", n="i32")
    assert "scf.for" in text and "scf.if" in text


@jit
def nested(p, n):
    total = 0
    steps = 0
    for i in range(n):
        for j in range(i):
            total += j
        steps += 1
    tl.store(p, total + steps)


def test_nested_loops() -> None:
    assert build(nested, p="*i32", n="i32").count("scf.for") == 2


@jit
def tuples(p, pair, n):
    state = Pair(pair.first, (0, pair.second))
    for i in range(n):
        state = Pair(state.first + 1, (i, state.second[1]))
    a, (b, c) = state
    tl.store(p, a + b + c)


def test_tuples_are_carried() -> None:
    text = build(tuples, p="*i32", pair=Pair("i32", "i32"), n="i32")
    assert "-> (i32, i32, i32)" in text


@jit
def static(p, MODE: tl.constexpr, BIAS, n):
    if MODE == "a" and BIAS is None:
        x = [i * 2 for i in (1, 2, 3) if i > 1]
        tl.static_assert(len(x) == WIDTH // 4)
        tl.store(p, x[-1] if n > 2 else x[0])
    else:
        undefined_function()


def test_static_branches_fold() -> None:
    text = build(static, p="*i32", MODE="=a", BIAS=None, n="i32")
    assert text.count("scf.if") == 1
    with pytest.raises(CompileError, match="undefined_function"):
        build(static, p="*i32", MODE="=b", BIAS=None, n="i32")


@jit
def factorial(n: tl.constexpr):
    if n <= 1:
        return 1
    return n * factorial(n - 1)


@jit
def recursive(p):
    tl.store(p, factorial(5))


def test_recursion_on_constexpr() -> None:
    assert "120 : i32" in build(recursive, p="*i32")


@jit
def apply(fn: tl.constexpr, *values):
    return fn(*values)


@tl.constexpr_function
def doubled(n):
    return n * 2


@jit
def higher_order(p, n, FN: tl.constexpr):
    tl.static_print(f"{WIDTH:>4} {doubled(WIDTH)}")
    x = apply(FN, n, doubled(3))
    y: tl.constexpr = doubled(4)
    tl.store(p, x + y)


@jit
def plus(a, b=1):
    return a + b


def test_functions_as_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    text = build(higher_order, p="*i32", n="i32", FN=plus)
    assert "6 : i32" in text and "8 : i32" in text
    assert capsys.readouterr().out == "   8 16\n"


def test_inlined_calls_have_call_sites() -> None:
    from minitriton.frontend.build import build_module
    from minitriton.frontend.signature import ParamSpec, Specialization
    from minitriton.ir.context import use
    from minitriton.ir.target import Target

    params = (ParamSpec("p", "pointer", "int32"), ParamSpec("n", "scalar", "int32"))
    with use():
        module = build_module(
            calls_sign.__minitriton_source__, Specialization(params), Target.parse("sm_80")
        )
        text = module.operation.get_asm(enable_debug_info=True)
    assert "callsite(" in text and "test_control_flow.py" in text
