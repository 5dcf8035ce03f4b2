"""Triton's specialisation rules and launch options; the canonical text of what came out."""

from __future__ import annotations

import inspect
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from minitriton import binding
from minitriton.frontend.signature import ParamSpec, Specialization, value_text
from minitriton.ir import dtypes
from minitriton.runtime.arguments import HOST, ArgumentError
from minitriton.specialize import Call, check_options, specialize


def aligned(offset: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """An array whose address is `offset` elements past a multiple of 16 bytes."""
    raw = np.zeros(256, np.uint8)
    start = -raw.ctypes.data % 16 + offset * np.dtype(dtype).itemsize
    return raw[start : start + 64].view(dtype)


def understand(fn: Any, *values: Any, options: dict[str, Any] | None = None, **skip: Any) -> Call:
    parameters = binding.parameters_of(fn, inspect.signature(fn), **skip)
    return specialize(fn.__name__, parameters, values, options or {})


def texts(fn: Any, *values: Any, **skip: Any) -> list[str]:
    return [p.key_text() for p in understand(fn, *values, **skip).spec.params]


def one(x):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2, "x:int32"),
        (1, "x=int 1"),
        (16, "x:int32:16"),
        (0, "x:int32:16"),
        (-32, "x:int32:16"),
        (2**31 - 1, "x:int32"),
        (2**31, "x:int64:16"),
        (-(2**31) - 1, "x:int64"),
        (2**63, "x:uint64:16"),
        (2**64 - 1, "x:uint64"),
        (np.int64(3), "x:int32"),
        (1.0, "x:fp32"),
        (True, "x:int1"),
        (False, "x:int1"),
        (None, "x=None"),
        ((), "x:()"),
        ((1, 2.0, (None, 48)), "x:(x.0=int 1, x.1:fp32, x.2:(x.2.0=None, x.2.1:int32:16))"),
    ],
)
def test_numbers(value: Any, text: str) -> None:
    assert texts(one, value) == [text]


def test_pointers() -> None:
    assert texts(one, aligned()) == ["x:*fp32:16"]
    assert texts(one, aligned(1)) == ["x:*fp32"]
    assert texts(one, aligned(2, np.float64)) == ["x:*fp64:16"]
    assert texts(one, torch.zeros(4, dtype=torch.bool)) == ["x:*int1:16"]


def test_do_not_specialize() -> None:
    assert texts(one, 1, skip=["x"]) == ["x:int32"]
    assert texts(one, 16, skip=[0]) == ["x:int32"]
    assert texts(one, aligned(), skip=["x"]) == ["x:*fp32"]
    assert texts(one, 16, skip_alignment=["x"]) == ["x:int32"]
    assert texts(one, 1, skip_alignment=["x"]) == ["x=int 1"]
    with pytest.raises(ValueError, match="no parameter 'y'"):
        texts(one, 1, skip=["y"])


def test_annotations() -> None:
    def typed(a: "i64", b: dtypes.float64, c: "tl.constexpr", d: "*fp32", e: "tl.bfloat16"):
        pass

    got = texts(typed, 16, 3, 1, aligned(), 2)
    assert got == ["a:int64:16", "b:fp64", "c=int 1", "d:*fp32:16", "e:bf16"]
    for values, match in [
        ((0.5, 0, 0, aligned(), 0), "'a'.*float 0.5.*int64"),
        ((0, 0, 0, 3, 0), "'d'.*int 3.*pointer"),
        ((0, 0, 0, aligned(0, np.float64), 0), "'d'.*fp64.*fp32"),
        ((aligned(), 0, 0, aligned(), 0), "'a'.*array of fp32.*int64"),
    ]:
        with pytest.raises(ArgumentError, match="(?s)" + match):
            texts(typed, *values)


def test_annotated_ranges() -> None:
    def typed(a: "i8", b: "u16"):
        pass

    assert texts(typed, -128, 65535) == ["a:int8:16", "b:uint16"]
    for values in [(128, 0), (-129, 0), (0, -1), (0, 65536)]:
        with pytest.raises(ArgumentError, match="which holds"):
            texts(typed, *values)


def test_floats_become_what_they_fit() -> None:
    def narrow(x: "fp16", y: "fp32"):
        pass

    leaves = dict(understand(narrow, 1e6, 0.1).leaves)
    assert leaves["x"].value == float("inf")
    assert leaves["y"].value == float(np.float32(0.1))
    assert dict(understand(one, -1e300).leaves)["x"].value == -float("inf")


def test_named_tuples_keep_their_names() -> None:
    Pair = namedtuple("Pair", "first second")
    call = understand(one, Pair(aligned(), 7))
    assert texts(one, Pair(aligned(), 7)) == ["x:Pair(x.first:*fp32:16, x.second:int32)"]
    assert [name for name, _ in call.leaves] == ["x.first", "x.second"]
    assert [p.name for p in call.spec.runtime_params()] == ["x.first", "x.second"]


def test_devices() -> None:
    def two(x, y):
        pass

    assert understand(two, aligned(), 3).device == HOST
    assert understand(two, 2, 3).device is None
    gpu = type(
        "G", (), {"__cuda_array_interface__": {"shape": (4,), "typestr": "<f4", "data": (64, 0)}}
    )
    from minitriton.runtime import driver

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "device_of", lambda address: 1)
        assert understand(two, gpu(), gpu()).device == 1
        with pytest.raises(ArgumentError, match="'y' is on the CPU, but 'x' is on cuda:1"):
            understand(two, gpu(), aligned())


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("num_warps", 3, "power of two"),
        ("num_warps", 24, "power of two from 1 to 32, or 12"),
        ("num_warps", 64, "power of two"),
        ("num_warps", 0, "power of two"),
        ("num_warps", 4.0, "an int"),
        ("num_warps", True, "an int"),
        ("num_stages", -1, "from 0"),
        ("num_ctas", 3, r"1 or 2 \(CTAs of a cluster"),
        ("num_ctas", 0, "1 or 2"),
        ("num_ctas", 2.0, "an int"),
        ("maxnreg", 1000, "from 16 to 255"),
        ("num_warp", 4, "did you mean 'num_warps'"),
        ("BLOCK", 4, "no parameter 'BLOCK'"),
    ],
)
def test_bad_options(name: str, value: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        check_options("k", {name: value})


@pytest.mark.parametrize("value", [1, 8, 12, 32])
def test_numbers_of_warps(value: int) -> None:
    assert check_options("k", {"num_warps": value})["num_warps"] == value


def test_options_with_default_values_do_not_change_the_key() -> None:
    plain = understand(one, 2)
    same = understand(one, 2, options={"num_warps": 4, "debug": False, "maxnreg": None})
    other = understand(one, 2, options={"debug": True})
    assert plain.spec.key_text() == same.spec.key_text() != other.spec.key_text()


def test_every_field_changes_the_key() -> None:
    base = Specialization((ParamSpec("x", "pointer", "fp32"), ParamSpec("B", "constexpr", value=1)))

    def with_x(**changes: Any) -> Specialization:
        fields = {"name": "x", "kind": "pointer", "dtype": "fp32"} | changes
        return Specialization((ParamSpec(**fields), base.params[1]))

    def with_b(value: Any) -> Specialization:
        return Specialization((base.params[0], ParamSpec("B", "constexpr", value=value)))

    variants = [
        base,
        with_x(name="z"),
        with_x(kind="scalar"),
        with_x(dtype="fp64"),
        with_x(divisible=True),
        with_x(const=True),
        *map(with_b, (True, 1.0, "1", None, (1,), dtypes.int32, dtypes.float32, -0.0, 0.0)),
        Specialization(base.params, num_warps=8),
        Specialization(base.params, num_stages=2),
        Specialization(base.params, num_ctas=2),
        Specialization(base.params, maxnreg=64),
        Specialization(base.params, options=(("debug", True),)),
        Specialization(base.params[::-1]),
    ]
    assert len({v.key_text() for v in variants}) == len(variants)


def test_values_without_a_text_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be a constexpr"):
        value_text(object())

    def fixed(x: "tl.constexpr"):
        pass

    with pytest.raises(ArgumentError, match="argument 'x'.*constexpr"):
        texts(fixed, aligned())
