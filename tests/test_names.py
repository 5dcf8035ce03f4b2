"""Names that kernels and libraries import from Triton: they work as they do there."""

import os
from typing import Any

import numpy as np
import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import knobs, options
from minitriton.language import core
from minitriton.runtime.errors import OutOfResources, PTXASError


@triton.jit
def names_kernel(x_ptr: tl.const, out_ptr, n):
    items = (1, 2, tl.load(x_ptr), 4)
    a, b = items[tl.slice(1, 3)]
    first = items[slice(0, 2)]
    i = 0
    while tl.condition(i < n, disable_licm=True):
        i += a
    pair = tl.tuple([a, b])
    if isinstance(pair, tl.tuple):
        b += pair[1]
    if tl.target_info.is_cuda() and not tl.target_info.is_hip():
        b += 100
    if tl.target_info.cuda_capability_geq(9):
        b += 1000
    if tl.target_info.cuda_capability_geq(8, 9):
        b += 10000
    zeros = tl.core.zeros([16], core.get_int_dtype(32, signed=True))
    tl.store(out_ptr + tl.arange(0, 16), zeros + i + b + first[0])


@pytest.mark.parametrize(("target", "more"), [("sm_80", 0), ("sm_89", 10000), ("sm_90a", 11000)])
def test_names_of_the_language(target, more, monkeypatch):
    monkeypatch.setenv("MINITRITON_TARGET", target)
    x, out = np.array([5], np.int32), np.zeros(16, np.int32)
    names_kernel[(1,)](x, out, 7)
    assert (out == 8 + 2 * 5 + 100 + 1 + more).all()


@triton.jit
def inner_names_kernel(x_ptr, out_ptr, STEP: tl.constexpr = tl.core.CONSTEXPR_0):
    x = tl.load(x_ptr + tl.arange(0, 32))
    bits: tl.constexpr = tl.standard._log2(x.shape[0])
    tl.static_assert(tl.standard._is_power_of_two(x.numel) and bits == 5)
    tl.static_assert(x.dtype.is_fp8e5() and not x.dtype.is_fp8e4nv())
    tl.static_assert(not x_ptr.dtype.is_fp8() and not x.type.is_fp8e5() and not x.type.is_int32())
    tl.store(out_ptr, tl.standard.sum(x.to(tl.float32)) + bits + STEP)


def test_names_of_the_language_inside():
    out = torch.zeros(1)
    inner_names_kernel[(1,)](torch.ones(32).to(torch.float8_e5m2), out)
    assert out[0] == 37


@triton.jit
def while_kernel(x_ptr, n):
    while tl.condition(tl.load(x_ptr) < n):
        tl.store(x_ptr, tl.load(x_ptr) + 3)


def test_condition_at_run_time():
    x = np.array([1], np.int32)
    while_kernel[(1,)](x, 9, num_warps=1)
    assert x[0] == 10


@triton.jit
def const_kernel(x_ptr: tl.const):
    tl.store(x_ptr, 1)


def test_const_pointers_are_not_stored_through():
    with pytest.raises(triton.CompilationError, match="const"):
        const_kernel[(1,)](np.zeros(1, np.int32))


@pytest.mark.parametrize(
    ("bits", "signed", "expected"),
    [(8, False, tl.uint8), (32, True, tl.int32), (64, False, tl.uint64), (1, True, tl.int1)],
)
def test_integer_types(bits, signed, expected):
    assert core.get_int_dtype(bits, signed) == expected


def test_core_has_the_language():
    assert core.load is tl.load and core.constexpr is tl.constexpr
    assert not hasattr(core, "no_such_name")


def test_classes_for_isinstance():
    tuned = triton.autotune([triton.Config({})], key=[])(names_kernel)
    guessed = triton.heuristics({})(names_kernel)
    assert isinstance(names_kernel, triton.JITFunction)
    assert not isinstance(tuned, triton.JITFunction)
    for kernel in (names_kernel, tuned, guessed):
        assert isinstance(kernel, triton.KernelInterface)


def test_wrappers_of_ones_own():
    """A library's class around a kernel gets launches from the base."""

    class Doubled(triton.KernelInterface[Any]):
        def run(self, *args, grid, warmup=False, **kwargs):
            x, out, n = args
            return names_kernel.run(x, out, 2 * n, grid=grid, warmup=warmup, **kwargs)

    plain, doubled = np.zeros(16, np.int32), np.zeros(16, np.int32)
    names_kernel[(1,)](np.array([5], np.int32), plain, 14)
    Doubled()[(1,)](np.array([5], np.int32), doubled, 7)
    np.testing.assert_array_equal(doubled, plain)
    with pytest.raises(TypeError, match="how to run"):
        triton.KernelInterface()[(1,)]()


def test_errors():
    assert issubclass(triton.CompilationError, triton.TritonError)
    assert triton.errors.TritonError is triton.TritonError
    assert triton.OutOfResources is triton.errors.OutOfResources is OutOfResources
    assert issubclass(PTXASError, triton.TritonError)


def test_knobs(monkeypatch, tmp_path):
    monkeypatch.setenv("MINITRITON_CACHE_DIR", str(tmp_path))
    assert knobs.cache.dir == str(tmp_path)
    with knobs.cache.scope(), knobs.compilation.scope(), knobs.runtime.scope():
        knobs.cache.dir = "/elsewhere"
        knobs.compilation.always_compile = True
        knobs.runtime.override_arch = "sm_90a"
        knobs.runtime.debug = True
        found = options.read()
        assert found.cache_dir == "/elsewhere" and not found.cache
        assert found.target == "sm_90a" and found.debug
        assert knobs.compilation.always_compile is True
    assert os.environ["MINITRITON_CACHE_DIR"] == str(tmp_path)
    with knobs.cache.scope():
        knobs.cache.reset()
        assert "MINITRITON_CACHE_DIR" not in os.environ
    with pytest.raises(AttributeError, match="no knob 'colour', only dir"):
        _ = knobs.cache.colour
    with pytest.raises(AttributeError, match="no knob"):
        knobs.cache.colour = 1


def test_a_knob_acts_on_the_next_launch():
    x, out = np.array([5], np.int32), np.zeros(16, np.int32)
    results = []
    with knobs.runtime.scope():
        for target in ("sm_80", "sm_90a", "sm_80"):
            knobs.runtime.override_arch = target
            names_kernel[(1,)](x, out, 7)
            results.append(int(out[0]))
    assert results[1] == results[0] + 11000 and results[2] == results[0]
