"""Autotuning with a stand-in benchmark, heuristics, and the host-side testing tools."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import minitriton as triton
import minitriton.language as tl
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
NAMES = ["x", "y", "a", "n", "BLOCK"]


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
    tuned = Timed(kernel, NAMES, CONFIGS, ["n"], do_bench=bench_for([3.0, -1, 1.0, 2.0]))
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, 32)
    assert tuned.best_config is CONFIGS[2]
    assert tuned.timings[CONFIGS[1]] == [math.inf]
    assert "shared memory" in tuned.failures[CONFIGS[1]]
    tuned[(1,)](x, y, 1.0, 32)  # remembered: the benchmark has no more answers


def test_arrays_are_restored_and_reset(kernel: Kernel) -> None:
    x, y = np.ones((2, 32), np.float32)
    restored = Timed(
        kernel, NAMES, CONFIGS[:2], [], restore_value=["y"], do_bench=bench_for([1.0, 2.0])
    )
    restored[(1,)](x, y, 1.0, 32)
    assert (y == 2).all()
    reset = Timed(
        kernel, NAMES, CONFIGS[:2], [], reset_to_zero=["y"], do_bench=bench_for([1.0, 2.0])
    )
    reset[(1,)](x, y, 1.0, 32)
    assert (y == 1).all()


def test_nothing_works(kernel: Kernel) -> None:
    tuned = Timed(kernel, NAMES, CONFIGS[:2], [], do_bench=bench_for([-1, -1]))
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
    tuned = Timed(
        kernel, NAMES, CONFIGS, [], prune_configs_by=prune, do_bench=bench_for([2.0, 1.0])
    )
    tuned.pre_hook = lambda args, **_: seen.append(args["BLOCK"])
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


def test_hooks_come_before_every_timed_run_and_once_after_tuning(kernel: Kernel) -> None:
    seen: list[bool] = []

    def hook(arguments: dict[str, Any], reset_only: bool = False) -> None:
        seen.append(reset_only)
        arguments["y"][...] = 5

    tuned = Timed(kernel, NAMES, CONFIGS[:2], [], pre_hook=hook, do_bench=bench_for([1.0, 2.0]))
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, 32)
    assert seen == [False] * 4 + [True]
    assert (y == 6).all()
    tuned[(1,)](x, y, 1.0, 32)
    assert len(seen) == 5 and (y == 7).all()


def test_post_hooks_come_after_every_timed_run(kernel: Kernel) -> None:
    seen: list[Any] = []
    tuned = Timed(
        kernel, NAMES, CONFIGS[:2], [], post_hook=lambda arguments, exception: seen.append(
            (arguments["BLOCK"], exception)
        ), do_bench=bench_for([1.0, 2.0]),
    )  # fmt: skip
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, 32)
    assert seen == [(64, None)] * 2 + [(128, None)] * 2


class Restoring(Timed):
    """As libraries subclass Triton's Autotuner: hooks that take copies, and choices put in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert not self.user_defined_pre_hook and not self.user_defined_post_hook
        assert self.early_config_prune is None
        self.pre_hook, self.post_hook = self.keep, self.put_back

    def keep(self, arguments: dict[str, Any], reset_only: bool = False) -> None:
        if not reset_only:
            self.copies = {name: arguments[name].copy() for name in self.restore_value}

    def put_back(self, arguments: dict[str, Any], exception: Exception | None) -> None:
        for name, copy in self.copies.items():
            arguments[name][...] = copy


def test_hooks_of_a_subclass_may_restore_arrays(kernel: Kernel) -> None:
    tuned = Restoring(kernel, NAMES, CONFIGS[:2], [], None, ["y"], do_bench=bench_for([1.0, 2.0]))
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, 32)
    assert (y == 2).all()


def test_choices_are_remembered_under_tritons_keys(kernel: Kernel) -> None:
    """The values of the keys that are given, then the dtypes: so libraries can put choices in."""
    tuned = Timed(kernel, NAMES, CONFIGS, ["n", "m", "BLOCK"], do_bench=bench_for([]))
    tuned.cache[(32, "float32", "float32")] = CONFIGS[3]
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, n=32)
    assert tuned.best_config is CONFIGS[3]
    emulated = Autotuner(kernel, NAMES, CONFIGS, ["n"])
    emulated[(1,)](x, y, 1.0, 32)
    assert list(emulated.cache) == [(32, "float32", "float32", "cpu")]


def test_in_the_emulator_arrays_are_reset_once_too(kernel: Kernel) -> None:
    tuned = triton.autotune(CONFIGS, key=["n"], reset_to_zero=["y"])(kernel)
    x, y = np.ones((2, 32), np.float32)
    tuned[(1,)](x, y, 1.0, 32)
    assert (y == 1).all()


def test_what_tritons_decorator_takes(kernel: Kernel) -> None:
    """Keys that are no parameters, options among the constants, arrays that are None."""
    configs = [
        triton.Config(
            {"BLOCK": 64, "waves_per_eu": 2, "enable_fp_fusion": False}, ir_override=None
        ),
        triton.Config({"BLOCK": 128}),
    ]
    tuned = triton.autotune(
        configs, key=["n", "m"], use_cuda_graph=True, cache_results=True,
        prune_configs_by={"early_config_prune": lambda found, named, **_: [wider(found[0])]},
    )(kernel)  # fmt: skip

    def wider(config: triton.Config) -> triton.Config:
        config.num_warps = 8
        return config

    x, y = np.ones((2, 32), np.float32)
    compiled = tuned[(1,)](x, y, 1.0, 32)
    assert compiled.num_warps == 8 and not compiled.spec.option("enable_fp_fusion", True)


@triton.jit
def optional_kernel(x_ptr, sum_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    if sum_ptr is not None:
        tl.atomic_add(sum_ptr, tl.sum(x))


def test_arrays_to_reset_may_be_none() -> None:
    names = ["x_ptr", "sum_ptr", "BLOCK"]
    tuned = Timed(
        optional_kernel, names, [triton.Config({"BLOCK": b}) for b in (16, 32)], [],
        ["sum_ptr"], ["sum_ptr"], do_bench=bench_for([2.0, 1.0] * 2),
    )  # fmt: skip
    x, total = np.ones(32, np.float32), np.zeros(1, np.float32)
    tuned[(1,)](x, total)
    tuned[(1,)](x, None)
    assert total[0] == 32


def test_misuse(kernel: Kernel) -> None:
    x = np.ones(32, np.float32)
    with pytest.raises(ValueError, match="no parameter 'm'"):
        triton.autotune(CONFIGS, key=[], reset_to_zero=["m"])(kernel)
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
