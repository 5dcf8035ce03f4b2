"""Autotuning with a stand-in benchmark, heuristics, and the host-side testing tools."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import minitriton as triton
from minitriton import options, testing
from minitriton.autotune import Autotuner, TuningError
from minitriton.jit import Kernel
from minitriton.runtime.driver import OutOfResources


def axpy(x, y, a, n, BLOCK: "tl.constexpr"):
    pass


@pytest.fixture
def kernel(pipeline: Any, fake_source: Any) -> Kernel:
    return Kernel(axpy, stages=pipeline.stages(), source=fake_source("axpy"))


CONFIGS = [triton.Config({"BLOCK": 64 * 2**i}, num_warps=4) for i in range(4)]


class Timed(Autotuner):
    """Times even what runs in the emulator."""

    def _on_cpu(self, named: Any) -> bool:
        return False


def bench_for(costs: list[float]) -> Any:
    remaining = iter(costs)

    def bench(call: Any, quantiles: Any) -> list[float]:
        call()
        call()
        cost = next(remaining)
        if cost < 0:
            raise OutOfResources(2, 1, "shared memory")
        return [cost] * 3

    return bench


def test_the_fastest_wins_and_failures_lose(kernel: Kernel) -> None:
    tuned = Timed(kernel, CONFIGS, ["n"], do_bench=bench_for([3.0, -1, 1.0, 2.0]))
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, 32)
    assert tuned.best_config is CONFIGS[2]
    assert tuned.timings[CONFIGS[1]] == [math.inf]
    assert "shared memory" in tuned.failures[CONFIGS[1]]
    tuned[(1,)](x, y, 1.0, 32)  # remembered: the benchmark has no more answers


def test_arrays_are_restored_and_reset(kernel: Kernel) -> None:
    x, y = np.ones((2, 32), np.float32)
    restored = Timed(kernel, CONFIGS[:2], [], restore_value=["y"], do_bench=bench_for([1.0, 2.0]))
    restored[(1,)](x, y, 1.0, 32)
    assert (y == 2).all()
    reset = Timed(kernel, CONFIGS[:2], [], reset_to_zero=["y"], do_bench=bench_for([1.0, 2.0]))
    reset[(1,)](x, y, 1.0, 32)
    assert (y == 1).all()


def test_nothing_works(kernel: Kernel) -> None:
    tuned = Timed(kernel, CONFIGS[:2], [], do_bench=bench_for([-1, -1]))
    x, y = np.ones((2, 32), np.float32)
    with pytest.raises(TuningError, match=r"(?s)'axpy' works.*BLOCK: 64.*BLOCK: 128"):
        tuned[(1,)](x, y, 1.0, 32)


def test_pruning(kernel: Kernel) -> None:
    seen = []
    prune = {
        "early_config_prune": lambda configs, named, **kw: configs[1:],
        "perf_model": lambda **args: -args["BLOCK"],
        "top_k": 2,
    }
    tuned = Timed(kernel, CONFIGS, [], prune_configs_by=prune, do_bench=bench_for([2.0, 1.0]))
    tuned.pre_hook = lambda args: seen.append(args["BLOCK"])
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, 32)
    assert sorted(set(seen)) == [256, 512]
    assert tuned.best_config is CONFIGS[2]


def test_in_the_emulator_the_first_valid_one_is_taken(kernel: Kernel) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is timed in the emulator")

    tuned = triton.autotune(CONFIGS, key=["n"], do_bench=never)(kernel)
    x, y = np.ones((2, 32), np.float32)
    tuned[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, y, 1.0, 32)
    assert tuned.best_config is CONFIGS[0]
    assert (y == 2).all()


def test_misuse(kernel: Kernel) -> None:
    x = np.ones(32, np.float32)
    with pytest.raises(ValueError, match="no parameter 'm'"):
        triton.autotune(CONFIGS, key=["m"])(kernel)
    with pytest.raises(ValueError, match="no parameter 'B' to configure"):
        triton.autotune([triton.Config({"B": 1})], key=[])(kernel)
    with pytest.raises(ValueError, match=r"knows nothing of \['top'\]"):
        triton.autotune(CONFIGS, key=[], prune_configs_by={"top": 1})(kernel)
    with pytest.raises(ValueError, match="'BLOCK' is set by autotune"):
        triton.autotune(CONFIGS, key=[])(kernel)[(1,)](x, x, 1.0, 32, BLOCK=3)


def test_heuristics(kernel: Kernel) -> None:
    decorated = triton.heuristics({"BLOCK": lambda args: triton.next_power_of_2(args["n"])})(kernel)
    x, y = np.ones((2, 40), np.float32)
    compiled = decorated[lambda meta: (1,)](x, y, 1.0, 40)
    assert compiled.spec.param("BLOCK").value == 64
    both = triton.autotune([triton.Config({}, num_warps=2)], key=["n"])(decorated)
    assert both[(1,)](x, y, 1.0, 40).num_warps == 2


def test_do_bench_by_wall_clock() -> None:
    calls: list[int] = []
    times = testing.do_bench(lambda: calls.append(1), warmup=1, rep=1, return_mode="all")
    assert len(calls) > len(times) >= 1
    low, high = testing.do_bench(lambda: None, warmup=0, rep=1, quantiles=[0.2, 0.8])
    assert 0 <= low <= high
    with pytest.raises(ValueError, match="return_mode"):
        testing.do_bench(lambda: None, return_mode="fastest")  # type: ignore[arg-type]


def test_assert_close() -> None:
    testing.assert_close(np.ones(3), np.ones(3) + 1e-3)
    with pytest.raises(AssertionError):
        testing.assert_close(np.ones(3), np.ones(3) + 0.1)
    testing.assert_close(math.nan, math.nan)


def test_sizes() -> None:
    for x in range(-20, 40):
        for y in range(1, 9):
            assert triton.cdiv(x, y) == math.ceil(x / y)
    for n in range(2, 300):
        power = triton.next_power_of_2(n)
        assert power // 2 < n <= power
        assert power & (power - 1) == 0
    assert triton.next_power_of_2(0) == triton.next_power_of_2(1) == 1


def test_options() -> None:
    assert options.read({}) == options.Options()
    got = options.read({"MINITRITON_CACHE": "off", "MINITRITON_SYNC": "1", "MINITRITON_SEED": "7"})
    assert (got.cache, got.sync, got.seed) == (False, True, 7)
    assert options.read({"MINITRITON_TARGET": ""}).target == "sm_80"
    with pytest.raises(options.OptionError, match="MINITRITON_SEED must be an integer"):
        options.read({"MINITRITON_SEED": "x"})
