"""`@jit`: a Python function becomes a `Kernel`, and `kernel[grid](*args)` runs it.

CUDA arrays run on their GPU, CPU arrays in the emulator. Each kind of call (see `specialize`) is
compiled once, kept in memory and on disk, and found again by the generated dispatcher.
"""

from __future__ import annotations

import functools
import inspect
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from minitriton import binding, dynamo, execute, options
from minitriton.compiled import CompiledKernel
from minitriton.compiler import Stages, compile_kernel
from minitriton.frontend.signature import Specialization
from minitriton.ir.diagnostics import MiniTritonError
from minitriton.ir.target import Target
from minitriton.kernel_interface import KernelInterface
from minitriton.runtime import driver
from minitriton.runtime.arguments import HOST, ArgumentError
from minitriton.runtime.launch import normalize_grid
from minitriton.specialize import Call, Parameter, check_options, places, specialize
from minitriton.tools.tensor_descriptor import TensorDescriptor, quick


class KernelCallError(MiniTritonError, RuntimeError):
    """A kernel was called from Python as if it were a function."""


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """What a launch hook gets to see."""

    kernel: Kernel
    compiled: CompiledKernel
    grid: tuple[int, int, int]
    arguments: Mapping[str, Any]


# Called before each launch; what they return, if anything, is called after it. With a hook set,
# launches take the slow path.
launch_hooks: list[Callable[[LaunchInfo], Callable[[], None] | None]] = []
# Called with each CompiledKernel that is made or read from the cache.
compile_hooks: list[Callable[[CompiledKernel], None]] = []

dynamo.keep_out()

_kernels: weakref.WeakSet[Kernel] = weakref.WeakSet()


def reload_switches() -> None:
    """Have the next launch of each kernel look at the MINITRITON_* variables again.

    Launches on a GPU of a kind already seen do not: reading variables takes as long as a launch.
    What was compiled under other switches stays in memory, so that going back costs nothing.
    """
    for kernel in list(_kernels):
        kernel._seen.clear()


class _NoTensor:
    """Stands for torch.Tensor while torch is not imported."""


class Kernel(KernelInterface[Any]):
    """A jit function. `kernel[grid](*args, **options)` launches; see `jit` for the parameters."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        do_not_specialize: Sequence[str | int] = (),
        do_not_specialize_on_alignment: Sequence[str | int] = (),
        debug: bool | None = None,
        noinline: bool = False,
        launch_metadata: Callable[..., Any] | None = None,
        repr: Callable[..., str] | None = None,
        stages: Stages | None = None,
        source: Any = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.debug, self.noinline = fn, debug, noinline
        self.launch_metadata, self.name_of = launch_metadata, repr
        self._stages, self._source = stages, source
        self._skip = (tuple(do_not_specialize), tuple(do_not_specialize_on_alignment))
        self._lock = threading.RLock()
        self._compiled: dict[tuple[str, ...], CompiledKernel] = {}
        self._seen: dict[Any, tuple[Any, CompiledKernel, Any, Any]] = {}
        self._knows_torch = False
        self._unchanged: Callable[[], bool] | None = None
        self._text: tuple[str, Callable[[], bool] | None] = "", None  # cache_text, while it holds
        self.pre_run_hooks: list[Callable[..., None]] = []
        _kernels.add(self)

    @property
    def name(self) -> str:
        """The function's name, which is also the compiled kernel's."""
        return self.fn.__name__

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        """The function's own signature."""
        return inspect.signature(self.fn)

    @functools.cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters with their annotations understood."""
        return binding.parameters_of(self.fn, self.signature, *self._skip)

    @property
    def arg_names(self) -> list[str]:
        """Parameter names in order."""
        return [parameter.name for parameter in self.parameters]

    @property
    def source(self) -> Any:
        """The frontend's SourceFunction, read when first needed."""
        with self._lock:
            if self._source is None:
                from minitriton.frontend.source import SourceFunction

                self._source = SourceFunction(self.fn)
            return self._source

    @property
    def __minitriton_source__(self) -> Any:
        """How the frontend recognises a function that it can inline."""
        return self.source

    def cache_text(self) -> str:
        """What stands for this kernel where it is a constexpr argument of another."""
        text, unchanged = self._text
        if not text or (unchanged is not None and not unchanged()):
            unchanged = self._watch()
            text = f"{self.fn.__module__}.{self.fn.__qualname__} {self.source.dependency_key()}"
            self._text = text, unchanged
        return text

    def __repr__(self) -> str:
        return f"<Kernel {self.fn.__module__}.{self.fn.__qualname__}{self.signature}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise KernelCallError(
            f"kernel '{self.name}' was called without a grid\n"
            f"help: launch it with {self.name}[grid](...); inside another kernel call it plainly"
        )

    def __getitem__(self, grid: Any) -> Callable[..., CompiledKernel]:
        """A function that launches over `grid`: 1 to 3 ints, or a function of the arguments."""
        return self._for(grid)

    def run(
        self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any
    ) -> CompiledKernel | None:
        """`kernel[grid](...)` as one call; with `warmup` it only compiles."""
        if warmup:
            return self.warmup(*args, grid=grid, **kwargs)
        return self[grid](*args, **kwargs)

    @dynamo.outside
    def warmup(
        self, *args: Any, grid: Any = None, target: str | Target = "", **kwargs: Any
    ) -> CompiledKernel:
        """Compile without launching. Dtypes may stand for (aligned) arrays of that dtype.

        Compiles for the arrays' GPU, or for `target`; without either for the first GPU, or for
        what MINITRITON_TARGET says. For arrays of the emulator the binary is made when asked for.
        """
        values, launch_options = self._bind(args, kwargs)
        settings = options.read()
        call = self._specialize(values, launch_options, settings)
        emulated = False  # such launches run PTX
        if isinstance(target, str):
            device = call.device
            if device is None or device == HOST:
                symbolic = not any(a.kind == "array" and a.memory for _, a in call.leaves)
                device = 0 if symbolic and not target and driver.is_available() else HOST
                emulated = not symbolic and not target
            target = Target.parse(target) if target else execute.target_for(device, settings)
        return self._compile(call.spec, target, settings, cubin=not emulated)

    def add_pre_run_hook(self, hook: Callable[..., None]) -> None:
        """Have `hook(**arguments)` called before each launch of this kernel."""
        self.pre_run_hooks.append(hook)

    @functools.cached_property
    def _for(self) -> Callable[[Any], Callable[..., CompiledKernel]]:
        """Makes the function that launches over a grid."""
        torch = sys.modules.get("torch")
        self._knows_torch = hasattr(torch, "Tensor")
        text = binding.dispatcher_source(self.name, self.parameters, self.signature)
        scope: dict[str, Any] = {
            "_mt_Tensor": torch.Tensor if self._knows_torch and torch else _NoTensor,
            "_mt_Parameter": torch.nn.Parameter if self._knows_torch and torch else _NoTensor,
            "_mt_type": type, "_mt_int": int, "_mt_float": float, "_mt_bool": bool,
            "_mt_str": str, "_mt_tuple": tuple, "_mt_len": len, "_mt_dict": dict,
            "_mt_callable": callable, "_mt_isinstance": isinstance,
            "_mt_constant_key": binding.constant_key,
            "_mt_KeyError": KeyError, "_mt_TypeError": TypeError, "_mt_struct_error": struct.error,
            "_mt_RuntimeError": RuntimeError, "_mt_partial": functools.partial,
            "_mt_TensorDescriptor": TensorDescriptor, "_mt_quick": quick,
            "_mt_OverflowError": OverflowError, "_mt_again": self._again,
            "_mt_general": self._general, "_mt_first": self._first,
            "_mt_constexpr_key": binding.constexpr_key, "_mt_freeze": binding.freeze,
            "_mt_normalize": normalize_grid, "_mt_stream": execute.stream_getter(),
            "_mt_seen": self._seen, "_mt_hooks": launch_hooks, "_mt_own_hooks": self.pre_run_hooks,
        }  # fmt: skip
        for index, parameter in enumerate(self.signature.parameters.values()):
            scope[f"_mt_default{index}"] = parameter.default
        exec(compile(text, f"<dispatcher of {self.name}>", "exec"), scope)
        found: Callable[[Any], Callable[..., CompiledKernel]] = scope["_mt_for"]
        binding.name_inner_function(found, self.name)
        return found

    def _again(
        self,
        error: Exception,
        grid: Any,
        values: Sequence[Any],
        launch_options: Mapping[str, Any],
        further: Mapping[str, Any],
    ) -> CompiledKernel:
        """After a failed fast path: the thorough way explains what is wrong with the call."""
        if isinstance(error, MiniTritonError):
            raise error
        trace = error.__traceback__
        if isinstance(error, TypeError) and trace is not None and trace.tb_next is not None:
            raise error  # from a grid function or a hook
        return self._general(grid, values, launch_options, further)

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(values in parameter order, launch options); ArgumentError that shows the signature."""
        names = self.arg_names
        own = {name: value for name, value in kwargs.items() if name in names}
        launch_options = {name: value for name, value in kwargs.items() if name not in names}
        check_options(self.name, launch_options)
        try:
            bound = self.signature.bind(*args, **own)
        except TypeError as error:
            raise ArgumentError(
                f"{error}\nhelp: the kernel is {self.name}{self.signature}"
            ) from None
        bound.apply_defaults()
        for name in binding.OPTIONS:  # a parameter called num_warps sets the option, too
            if name in names:
                launch_options[name] = bound.arguments[name]
        return tuple(bound.arguments[name] for name in names), launch_options

    def _specialize(
        self, values: Sequence[Any], launch_options: Mapping[str, Any], settings: options.Options
    ) -> Call:
        given = dict(launch_options)
        if self.debug or settings.debug:
            given.setdefault("debug", True)
        return specialize(self.name, self.parameters, values, given)

    def _compile(
        self, spec: Specialization, target: Target, settings: options.Options, *, cubin: bool
    ) -> CompiledKernel:
        """The compiled form, from memory, from disk or made now; one thread at a time."""
        key = (spec.key_text(), target.arch, settings.code_key(), settings.ptxas)
        with self._lock:
            if self._unchanged is not None and not self._unchanged():
                self._compiled.clear()
                self._seen.clear()
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = compile_kernel(
                    self.source, spec, target, cubin=cubin, stages=self._stages, settings=settings
                )
                self._compiled[key] = compiled
                self._unchanged = self._watch()
                for hook in compile_hooks:
                    hook(compiled)
        return compiled

    @dynamo.outside
    def _first(
        self,
        key: Any,
        device: int,
        values: Sequence[Any],
        launch_options: Mapping[str, Any],
        further: Mapping[str, Any],
    ) -> tuple[Any, CompiledKernel, Any, Any]:
        """The first launch of a kind on a GPU: compile, load, and remember under `key`."""
        settings = options.read()
        call = self._specialize(values, {**launch_options, **further}, settings)
        target = execute.target_for(device, settings)
        compiled = self._compile(call.spec, target, settings, cubin=True)
        pairs = zip(call.spec.params, self.parameters, strict=True)
        passed = [spec for spec, parameter in pairs if not parameter.is_constexpr]
        found_at = [(i, *place) for i, spec in enumerate(passed) for place in places(spec)]
        launch = execute.launcher(compiled, device, found_at, len(passed), sync=settings.sync)
        memory = execute.memory_getter(compiled, found_at)
        self._seen[key] = found = (launch, compiled, self._unchanged, memory)
        return found

    def _watch(self) -> Callable[[], bool] | None:
        """The check that values captured by the code are still the same, if it captures any."""
        from minitriton.frontend.source import SourceFunction

        if not isinstance(self.source, SourceFunction):
            return None
        from minitriton.captures import watch

        return watch(self.source)

    @dynamo.outside
    def _general(
        self,
        grid: Any,
        values: Sequence[Any],
        launch_options: Mapping[str, Any],
        further: Mapping[str, Any],
    ) -> CompiledKernel:
        """Any launch, with every check: CPU arrays, hooks, arrays of other libraries."""
        if not self._knows_torch and "torch" in sys.modules:
            self.__dict__.pop("_for", None)
        settings = options.read()
        call = self._specialize(values, {**launch_options, **further}, settings)
        target = execute.target_for(call.device, settings)
        on_gpu = call.device is not None and call.device != HOST
        compiled = self._compile(call.spec, target, settings, cubin=on_gpu)
        arguments = dict(zip(self.arg_names, values, strict=True))
        if callable(grid):
            chosen = {name: getattr(call.spec, name) for name in binding.OPTIONS}
            grid = grid({**chosen, **arguments})
        sizes = normalize_grid(grid, self.name)
        for hook in self.pre_run_hooks:
            hook(**arguments)
        info = LaunchInfo(self, compiled, sizes, arguments)
        after = [hook(info) for hook in launch_hooks]
        execute.run(compiled, call.device, sizes, call.leaves, settings)
        for finish in after:
            if finish is not None:
                finish()
        return compiled


JITFunction = Kernel  # its name in Triton


@overload
def jit(fn: Callable[..., Any], /) -> Kernel: ...
@overload
def jit(fn: None = None, /, **kwargs: Any) -> Callable[[Callable[..., Any]], Kernel]: ...
def jit(
    fn: Callable[..., Any] | None = None, /, **kwargs: Any
) -> Kernel | Callable[[Callable[..., Any]], Kernel]:
    """Make a kernel of a function; bare or with options.

    `do_not_specialize`, `do_not_specialize_on_alignment`: parameters (names or numbers) whose value
    must not change the code. `debug`: device asserts on. `noinline`, `launch_metadata` and `repr`
    are as in Triton. `stages` puts other compiler stages in place of the standard ones.
    """

    def decorate(function: Callable[..., Any]) -> Kernel:
        if not inspect.isfunction(function):
            raise TypeError(f"jit takes a Python function, not {type(function).__name__}")
        kwargs.pop("version", None)
        return Kernel(function, **kwargs)

    return decorate if fn is None else decorate(fn)
