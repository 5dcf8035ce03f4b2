"""Calling kernels: binding, compile-once, launching on CPU arrays, and every clear refusal."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import minitriton as triton
from minitriton import execute
from minitriton import jit as jit_decorator
from minitriton.jit import Kernel, KernelCallError, launch_hooks
from minitriton.runtime import assembler
from minitriton.runtime.arguments import ArgumentError
from minitriton.runtime.launch import LaunchError


def axpy(x, y, a, n, BLOCK: "tl.constexpr" = 128):
    """y += a * x."""


@pytest.fixture
def kernel(pipeline: Any, fake_source: Any) -> Kernel:
    return Kernel(axpy, stages=pipeline.stages(), source=fake_source("axpy"))


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_runs_in_the_emulator(kernel: Kernel, library: str) -> None:
    rng = np.random.default_rng()
    for n in (2, 127, 128, 1000):
        x, y = rng.standard_normal((2, n)).astype(np.float32)
        expected = np.float32(0.5) * x + y
        if library == "torch":
            kernel[grid](torch.from_numpy(x), torch.from_numpy(y), 0.5, n)
        else:
            kernel[grid](x, y, a=0.5, n=n)
        np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_views_and_overlapping_arguments(kernel: Kernel) -> None:
    base = np.arange(300, dtype=np.float32)
    expected = base.copy()
    expected[150:250] += 2 * base[50:150]
    kernel[(1,)](base[50:150], base[150:250], 2.0, 100)
    np.testing.assert_array_equal(base, expected)


def test_out_of_bounds_is_found(kernel: Kernel) -> None:
    from minitriton.runtime.emulator import EmulatorError

    with pytest.raises(EmulatorError):
        kernel[(1,)](np.zeros(100, np.float32), np.zeros(128, np.float32), 1.0, 128)


def test_each_kind_of_call_compiles_once(kernel: Kernel, pipeline: Any) -> None:
    x, y = np.zeros((2, 64), np.float32)
    first = kernel[(1,)](x, y, 1.0, 50)
    assert kernel[(1,)](x, y, 3.0, 51) is first
    assert pipeline.builds == 1
    assert kernel[(1,)](x, y, 1.0, 48) is not first
    assert kernel[(1,)](x, y, 1.0, 50, num_warps=8, num_stages=1) is not first
    assert pipeline.builds == 3


@pytest.mark.parametrize("name", ["WGMMA", "TMA", "SPECIALIZE"])
def test_a_switch_thrown_between_launches_is_noticed(
    kernel: Kernel, pipeline: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = np.zeros((2, 64), np.float32)
    first = kernel[(1,)](x, y, 1.0, 50)
    monkeypatch.setenv(f"MINITRITON_{name}", "0")
    assert kernel[(1,)](x, y, 1.0, 50) is not first
    assert pipeline.builds == 2
    monkeypatch.delenv(f"MINITRITON_{name}")
    assert kernel[(1,)](x, y, 1.0, 50) is first
    assert pipeline.builds == 2


def test_threads_compile_once(kernel: Kernel, pipeline: Any) -> None:
    x, y = np.zeros((2, 64), np.float32)
    threads = [
        threading.Thread(target=kernel[(1,)], args=(x.copy(), y.copy(), 1.0, 50)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pipeline.builds == 1


def test_a_grid_of_zero_compiles_and_does_nothing(kernel: Kernel) -> None:
    y = np.ones(4, np.float32)
    assert kernel[(0,)](y, y, 1.0, 4).ptx
    assert kernel[lambda meta: (4, 0)](y, y, 1.0, 4).ptx
    assert (y == 1).all()


def test_a_grid_function_sees_arguments_and_options(kernel: Kernel) -> None:
    seen = {}

    def choose(meta: dict[str, Any]) -> tuple[int]:
        seen.update(meta)
        return (1,)

    x = np.zeros(4, np.float32)
    kernel[choose](x, x, 1.0, 4, num_warps=8)
    assert (seen["n"], seen["BLOCK"], seen["num_warps"]) == (4, 128, 8)

    def broken(meta: dict[str, Any]) -> tuple[int]:
        raise TypeError("my own mistake")

    with pytest.raises(TypeError, match="my own mistake"):
        kernel[broken](x, x, 1.0, 4)


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((1, 2, 3, 4), {"BLOKC": 3}, "no parameter 'BLOKC'"),
        ((1, 2, 3, 4), {"num_warp": 3}, "did you mean 'num_warps'"),
        ((1, 2, 3, 4), {"num_warps": 5}, "power of two"),
        (("a", 2, 3, 4), {}, "argument 'x'.*str"),
        ((torch.zeros(2, device="meta"), 2, 3, 4), {}, "argument 'x'.*meta"),
        ((1, 2, 3, 4), {"BLOCK": object()}, "argument 'BLOCK'.*constexpr"),
        ((1, 2, 3, 2**70), {}, "argument 'n'.*64 bits"),
    ],
)
def test_values_that_do_not_fit(kernel: Kernel, args: Any, kwargs: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match="(?s)" + match):
        kernel[(1,)](*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "match"),
    [
        ((1,), {}, r"axpy\(\) missing 3 required positional arguments: 'y', 'a', and 'n'"),
        ((1, 2, 3, 4, 5, 6), {}, r"axpy\(\) takes from 4 to 5 positional arguments but 6 were"),
        ((1, 2, 3), {"x": 1, "n": 2}, "multiple values for argument 'x'"),
    ],
)
def test_calls_that_do_not_bind(kernel: Kernel, args: Any, kwargs: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        kernel[(1,)](*args, **kwargs)


def test_bad_grid_and_no_grid(kernel: Kernel) -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(LaunchError, match=r"grid\[0\] of 'axpy'"):
        kernel[(2.5,)](x, x, 1.0, 4)
    with pytest.raises(KernelCallError, match=r"axpy\[grid\]"):
        kernel(x, x, 1.0, 4)


def test_awkward_parameter_names(pipeline: Any, fake_source: Any) -> None:
    def axpy(type, len, int, grid, num_warps: "tl.constexpr", tuple=None):
        pass

    kernel = Kernel(axpy, stages=pipeline.stages(), source=fake_source("axpy"))
    x = np.ones(4, np.float32)
    y = np.ones(4, np.float32)
    compiled = kernel[(1,)](x, y, 2.5, grid=4, num_warps=8)
    assert compiled.num_warps == 8
    assert (y == 3.5).all()


def test_keyword_only_parameters(pipeline: Any, fake_source: Any) -> None:
    def axpy(x, y, *, a=2.0, n):
        pass

    kernel = Kernel(axpy, stages=pipeline.stages(), source=fake_source("axpy"))
    y = np.ones(3, np.float32)
    kernel[(1,)](y, y, n=3)
    assert (y == 3).all()
    with pytest.raises(TypeError, match=r"^axpy\(\) missing 1 required keyword-only argument: 'n'"):
        kernel[(1,)](y, y)


def test_what_jit_takes() -> None:
    assert isinstance(jit_decorator(axpy), Kernel)
    assert isinstance(jit_decorator(do_not_specialize=["n"], debug=True)(axpy), Kernel)
    assert jit_decorator(axpy).__doc__ == "y += a * x."
    assert jit_decorator(axpy).arg_names == ["x", "y", "a", "n", "BLOCK"]
    with pytest.raises(TypeError, match="Python function"):
        jit_decorator(3)
    with pytest.raises(TypeError, match=r"\*rest"):
        jit_decorator(lambda *rest: None).parameters


def test_hooks(kernel: Kernel) -> None:
    log = []

    def hook(info: Any) -> Any:
        log.append(("before", info.kernel.name, info.grid))
        return lambda: log.append("after")

    kernel.add_pre_run_hook(lambda **arguments: log.append(arguments["n"]))
    launch_hooks.append(hook)
    try:
        x = np.zeros(4, np.float32)
        kernel[(1,)](x, x, 1.0, 4)
    finally:
        launch_hooks.remove(hook)
    assert log == [4, ("before", "axpy", (1, 1, 1)), "after"]


def test_warmup_for_the_emulator_assembles_when_asked(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    assemble = assembler.assemble

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(args[1])
        return assemble(*args, **kwargs)

    monkeypatch.setattr(assembler, "assemble", noted)
    x, y = np.ones((2, 64), np.float32)
    compiled = kernel.warmup(x, y, 1.0, 64, BLOCK=64, grid=(1,))
    assert not made
    assert compiled.n_regs > 0 and made == ["sm_80"]


def test_warmup_with_dtypes(kernel: Kernel) -> None:
    from minitriton.ir import dtypes

    compiled = kernel.warmup(torch.float32, dtypes.float32, 1.0, 64, grid=(1,), target="sm_90a")
    assert compiled.target.arch == "sm_90a"
    assert compiled.spec.param("x").key_text() == "x:*fp32:16"
    assert compiled.n_regs > 0
    with pytest.raises(triton.CompileError, match="unknown target"):
        kernel.warmup(torch.float32, torch.float32, 1.0, 64, target="sm_1")


def test_launching_a_compiled_kernel(kernel: Kernel) -> None:
    x, y = np.ones((2, 64), np.float32)
    compiled = kernel[(1,)](x, y, 1.0, 50)
    compiled[(1,)](x, y, 2.0, 60, 128)
    assert (y[:50] == 4).all()
    assert (y[50:60] == 3).all()
    with pytest.raises(ArgumentError, match=r"takes 5 arguments \(x, y, a, n, BLOCK\); got 2"):
        compiled[(1,)](x, y)
    with pytest.raises(ArgumentError, match=r"'x': compiled for x:\*fp32.*fp64"):
        compiled[(1,)](x.astype(np.float64), y, 2.0, 60, 128)


def test_a_stale_divisibility_is_not_reused(kernel: Kernel) -> None:
    x = np.ones(64, np.float32)
    compiled = kernel[(1,)](x, x, 1.0, 48)
    with pytest.raises(ArgumentError, match="compiled for n:int32:16, got n:int32"):
        compiled[(1,)](x, x, 1.0, 50, 128)


def test_joined_allocations() -> None:
    from minitriton.runtime.arguments import classify

    base = np.zeros(100, np.uint8)
    other = np.zeros(10, np.uint8)
    leaves = [(n, classify(n, a)) for n, a in (("a", base[10:]), ("b", other), ("c", base[:20]))]
    found = sorted(execute.host_allocations(leaves), key=lambda a: -a.nbytes)
    assert [(a.nbytes, a.name) for a in found] == [(100, "a, c"), (10, "b")]


CONSTANT = 3.0


def test_a_changed_global_is_noticed() -> None:
    import minitriton.language as tl

    namespace = globals()
    namespace["tl"] = tl
    namespace["CONSTANT"] = tl.constexpr(3.0)

    @triton.jit
    def fill(x, BLOCK: tl.constexpr):
        tl.store(x + tl.arange(0, BLOCK), tl.full((BLOCK,), CONSTANT, tl.float32))

    x = np.zeros(32, np.float32)
    fill[(1,)](x, BLOCK=32)
    assert (x == 3).all()
    before = fill.cache_text()
    assert fill.cache_text() is before  # made once: it is part of a launch's key
    namespace["CONSTANT"] = tl.constexpr(5.0)
    fill[(1,)](x, BLOCK=32)
    assert (x == 5).all()
    assert fill.cache_text() != before
