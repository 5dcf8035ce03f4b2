"""`@autotune` times configurations on the GPU and keeps the best per key; `@heuristics` computes
constexprs from the other arguments. Both wrap a Kernel and are launched like one.

In the emulator nothing is timed (its speed says nothing of a GPU's): the first configuration that
compiles is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minitriton import dynamo, testing
from minitriton.ir.diagnostics import CompileError, MiniTritonError
from minitriton.kernel_interface import KernelInterface
from minitriton.runtime.arguments import HOST, classify
from minitriton.runtime.assembler import AssemblerError
from minitriton.runtime.driver import OutOfResources
from minitriton.specialize import LAUNCH_OPTIONS
from minitriton.tools.tensor_descriptor import TensorDescriptor


class TuningError(MiniTritonError):
    """No configuration of a kernel works; the message has each one's reason."""


@dataclass
class Config:
    """One candidate: values of constexpr parameters, and launch options.

    Pruning functions may change it; `ir_override` is accepted without effect.
    """

    kwargs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    pre_hook: Callable[[dict[str, Any]], None] | None = None
    ir_override: str | None = None

    def all_kwargs(self) -> dict[str, Any]:
        """Everything to pass to the kernel by keyword."""
        options = {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "num_ctas": self.num_ctas,
            "maxnreg": self.maxnreg,
        }
        return {**self.kwargs, **{n: v for n, v in options.items() if v is not None}}

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        return ", ".join(f"{name}: {value}" for name, value in self.all_kwargs().items())


class _Wrapper(KernelInterface[Any]):
    """What autotuned kernels and kernels with heuristics share with a Kernel."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.arg_names: list[str] = fn.arg_names
        self.__name__ = fn.__name__
        self.__doc__ = fn.__doc__

    @property
    def kernel(self) -> Any:
        """The Kernel under all wrappers."""
        return self.fn.kernel if isinstance(self.fn, _Wrapper) else self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)  # raises: kernels need a grid

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, defaults included."""
        defaults = {
            p.name: p.default
            for p in self.kernel.signature.parameters.values()
            if p.default is not p.empty
        }
        return {**defaults, **dict(zip(self.arg_names, args, strict=False)), **kwargs}


class Autotuner(_Wrapper):
    """An autotuned kernel. `best_config` and `timings` tell what the last tuning found."""

    def __init__(
        self,
        fn: Any,
        arg_names: Sequence[str],
        configs: Sequence[Config],
        key: Sequence[str],
        reset_to_zero: Sequence[str] | None = None,
        restore_value: Sequence[str] | None = None,
        pre_hook: Callable[..., None] | None = None,
        post_hook: Callable[..., None] | None = None,
        prune_configs_by: Mapping[str, Any] | None = None,
        warmup: float | None = None,
        rep: float | None = None,
        use_cuda_graph: bool = False,
        do_bench: Callable[..., Any] | None = None,
        cache_results: bool = False,
    ) -> None:
        super().__init__(fn)
        self.arg_names = list(arg_names)
        self.configs = tuple(configs) or (Config(),)
        self.keys = tuple(key)
        self.reset_to_zero, self.restore_value = (
            tuple(reset_to_zero or ()),
            tuple(restore_value or ()),
        )
        self.pre_hook, self.post_hook = pre_hook, post_hook
        # subclasses of libraries ask for these and for the names of pruning
        self.user_defined_pre_hook = pre_hook is not None
        self.user_defined_post_hook = post_hook is not None
        pruning = dict(prune_configs_by or {})
        self.early_config_prune = pruning.pop("early_config_prune", None)
        self.perf_model = pruning.pop("perf_model", None)
        self.configs_top_k = pruning.pop("top_k", 1.0)
        self._budget: dict[str, Any] = {
            "warmup": 25 if warmup is None else warmup,
            "rep": 100 if rep is None else rep,
        }
        self._bench = do_bench
        self.cache: dict[Any, Config] = {}
        self.best_config: Config | None = None
        self.timings: dict[Config, list[float]] = {}
        self.failures: dict[Config, str] = {}
        for name in (*self.reset_to_zero, *self.restore_value):
            if name not in self.arg_names:
                raise ValueError(f"kernel '{self.__name__}' has no parameter {name!r}")
        for name in {name for config in self.configs for name in config.kwargs}:
            if name not in self.arg_names and name not in LAUNCH_OPTIONS:
                raise ValueError(f"kernel '{self.__name__}' has no parameter {name!r} to configure")
        if pruning:
            raise ValueError(f"prune_configs_by knows nothing of {sorted(pruning)}")

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch with the best configuration for these arguments, tuning first if need be."""
        named = self.named(args, kwargs)
        for name in kwargs:
            if any(name in config.kwargs for config in self.configs):
                raise ValueError(f"argument '{name}' is set by autotune and cannot be passed")
        key = self._key(args, kwargs, named)
        if warmup:
            config = self.cache.get(key, self.configs[0])
            if config.pre_hook is not None:
                config.pre_hook({**named, **config.all_kwargs()})
            return self.fn.run(*args, grid=grid, warmup=True, **{**kwargs, **config.all_kwargs()})
        if key not in self.cache:
            candidates = self._pruned(named, kwargs)
            self.cache[key] = best = self._tune(candidates, args, kwargs, grid, named)
            if len(self.configs) > 1:
                self._reset({**named, **best.all_kwargs()}, reset_only=True)
        config = self.cache[key]
        self.best_config = config
        if config.pre_hook is not None:
            config.pre_hook({**named, **config.all_kwargs()})
        return self.fn.run(*args, grid=grid, **{**kwargs, **config.all_kwargs()})

    def _reset(self, arguments: dict[str, Any], **how: bool) -> None:
        """What must come before each run that is timed, and before the first one that counts."""
        if self.pre_hook is not None:
            self.pre_hook(arguments, **how)
        for name in self.reset_to_zero:
            if arguments[name] is not None:
                _fill(arguments[name], 0)

    def _key(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], named: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """As in Triton, so that what libraries put into `cache` is found; "cpu" in the emulator."""
        all_given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        given = {name: value for name, value in all_given.items() if name in self.arg_names}
        arrays = (_array(value) for value in given.values())
        return (
            *(given[name] for name in self.keys if name in given),
            *(str(array.dtype) for array in arrays if hasattr(array, "dtype")),
            *(("cpu",) if self._on_cpu(named) else ()),
        )

    def _on_cpu(self, named: Mapping[str, Any]) -> bool:
        """Whether this launch runs in the emulator."""
        every = ((n, _array(v)) for n, v in named.items())
        arrays = [(n, a) for n, a in every if hasattr(a, "dtype") and hasattr(a, "shape")]
        return all(classify(name, value).device == HOST for name, value in arrays)

    def _pruned(self, named: dict[str, Any], kwargs: Mapping[str, Any]) -> list[Config]:
        configs = list(self.configs)
        model, top = self.perf_model, self.configs_top_k
        if self.early_config_prune is not None:
            configs = list(self.early_config_prune(configs, named, **kwargs))
            if not configs:
                raise TuningError(f"early_config_prune of '{self.__name__}' left no configuration")
        if model is not None:
            count = max(1, math.ceil(len(configs) * top)) if isinstance(top, float) else int(top)
            if len(configs) > count:
                costs = {config: model(**{**named, **config.all_kwargs()}) for config in configs}
                configs = sorted(configs, key=lambda config: costs[config])[:count]
        return configs

    @dynamo.outside
    def _tune(
        self,
        candidates: Sequence[Config],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grid: Any,
        named: dict[str, Any],
    ) -> Config:
        if len(candidates) == 1:
            return candidates[0]
        timings: dict[Config, list[float]] = {}
        failures: dict[Config, str] = {}
        on_cpu = self._on_cpu(named)
        for config in candidates:
            try:
                given = {**kwargs, **config.all_kwargs()}
                if config.pre_hook is not None:  # it may set the blocks of descriptors
                    config.pre_hook({**named, **config.all_kwargs()})
                compiled = self.fn.run(*args, grid=grid, warmup=True, **given)
                if on_cpu:
                    compiled.check_resources()
                    return config
                timings[config] = self._time(config, args, given, grid, named)
            except (OutOfResources, CompileError, AssemblerError) as error:
                failures[config], timings[config] = str(error), [math.inf]
        self.timings, self.failures = timings, failures
        if len(failures) == len(candidates):
            reasons = "\n".join(f"  {config}: {text}" for config, text in failures.items())
            raise TuningError(f"no configuration of '{self.__name__}' works:\n{reasons}")
        return min(timings, key=lambda config: timings[config][0])

    def _time(
        self,
        config: Config,
        args: tuple[Any, ...],
        given: dict[str, Any],
        grid: Any,
        named: dict[str, Any],
    ) -> list[float]:
        """Median, 20 % and 80 % quantile in milliseconds."""
        present = [name for name in self.restore_value if named[name] is not None]
        saved = {name: _copy(named[name]) for name in present}
        full = {**named, **given}

        def call() -> None:
            if config.pre_hook is not None:
                config.pre_hook({**named, **config.all_kwargs()})
            self._reset(full)
            error: Exception | None = None
            try:
                self.fn.run(*args, grid=grid, **given)
            except Exception as failure:
                error = failure
                raise
            finally:
                if self.post_hook is not None:
                    self.post_hook(full, exception=error)

        quantiles = (0.5, 0.2, 0.8)
        try:
            if self._bench is not None:
                measured = self._bench(call, quantiles=quantiles)
            else:
                measured = testing.do_bench(call, quantiles=quantiles, **self._budget)
        finally:
            for name, copy in saved.items():
                _fill(named[name], copy)
        return list(measured) if isinstance(measured, Sequence) else [float(measured)]


def _array(value: Any) -> Any:
    """The array of a tensor descriptor, anything else as it is."""
    return value.base if isinstance(value, TensorDescriptor) else value


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _fill(array: Any, value: Any) -> None:
    """Overwrite an array's content in place."""
    if hasattr(array, "copy_") and hasattr(value, "shape"):
        array.copy_(value)
    elif hasattr(array, "zero_"):
        array.zero_()
    else:
        array[...] = value


class Heuristics(_Wrapper):
    """A kernel some of whose constexprs are computed from the other arguments."""

    def __init__(self, fn: Any, values: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
        super().__init__(fn)
        self.values = dict(values)
        for name in self.values:
            if name not in self.arg_names:
                raise ValueError(f"kernel '{self.__name__}' has no parameter {name!r} to compute")

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Launch with the computed values; one that the caller passes wins."""
        named = self.named(args, kwargs)
        computed = dict(kwargs)
        given = {*kwargs, *self.arg_names[: len(args)]}
        for name, compute in self.values.items():
            if name not in given:
                named[name] = computed[name] = compute(named)
        return self.fn.run(*args, grid=grid, warmup=warmup, **computed)


def autotune(
    configs: Sequence[Config],
    key: Sequence[str],
    prune_configs_by: Mapping[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., None] | None = None,
    post_hook: Callable[..., None] | None = None,
    warmup: float | None = None,
    rep: float | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
) -> Callable[[Any], Autotuner]:
    """Decorator: time `configs` whenever an argument named in `key` (or a dtype) changes.

    Names in `key` that are no parameters count for nothing, as in Triton. `reset_to_zero` and
    `restore_value` name arrays (or None) that the kernel writes and that must be the same before
    every run. `pre_hook(arguments)` comes before each run that is timed, and once, with
    `reset_only=True`, after tuning; `post_hook(arguments, exception)` after each run that is timed.
    `prune_configs_by` may hold `early_config_prune(configs,
    named_args)`, `perf_model(**args)` and `top_k` (a count, or a fraction as float). Budgets are
    milliseconds. `use_cuda_graph` and `cache_results` are accepted without effect.
    """

    def decorate(fn: Any) -> Autotuner:
        return Autotuner(
            fn, fn.arg_names, configs, key, reset_to_zero, restore_value, pre_hook, post_hook,
            prune_configs_by, warmup, rep, use_cuda_graph, do_bench, cache_results,
        )  # fmt: skip

    return decorate


def heuristics(
    values: Mapping[str, Callable[[dict[str, Any]], Any]],
) -> Callable[[Any], Heuristics]:
    """Decorator: compute parameters from the dict of the other arguments at each launch."""
    return lambda fn: Heuristics(fn, values)
