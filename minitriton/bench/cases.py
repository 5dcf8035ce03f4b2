"""What a case is, and the pieces that its builders share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from minitriton.bench import sources
from minitriton.bench.catalog import COPY, Spec
from minitriton.bench.roofline import Work

OURS = ("minitriton", "minitriton 192", "minitriton library", "minitriton tma")
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip

Tensors = Sequence[torch.Tensor]


class LeftOut(Exception):
    """A contender cannot take part in this case; the message says why."""


@dataclass(frozen=True)
class Setting:
    """Where and how thoroughly a run measures."""

    device: str = "cuda"
    dry: bool = False  # in the emulator, one configuration each, nothing timed
    quick: bool = False
    processors: int = 132

    def few(self, options: Iterable[Any], quick: int) -> list[Any]:
        """The configurations to try, best known first: all, the first `quick`, or one."""
        found = list(options)
        return found[:1] if self.dry else found[:quick] if self.quick else found


@dataclass
class Trial:
    """One configuration of a contender."""

    label: str
    call: Callable[[], Any]  # returns the results, in the order of the case's reference
    outputs: Tensors = ()  # what `call` writes; poisoned before each check
    refresh: Callable[[], Any] = lambda: None  # after new inputs, outside the timed part
    restore: Callable[[], Any] | None = None  # before each call of one that overwrites its inputs
    checked: bool = True  # False: a yardstick, whose results are not those of the case


@dataclass
class Case:
    """One line of the table. Contenders are built lazily: what is missing fails alone."""

    work: Work
    refill: Callable[[], None]  # new random inputs, in place
    reference: Callable[[], Tensors]  # expected results for the present inputs, in fp32
    contenders: dict[str, Callable[[], list[Trial]]]
    bound: float = 8e-3  # relative rms error
    sustained: bool = False  # worth a look at what heat and power leave of the rate
    view: Callable[[list[torch.Tensor]], Tensors] = list  # what of the results is compared
    title: str = ""
    family: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


def build(spec: Spec, setting: Setting) -> Case:
    """The case of a line of the catalog, with its inputs filled."""
    module = importlib.import_module(f"minitriton.bench.cases_{spec.file}")
    case: Case = getattr(module, spec.function)(setting, **spec.arguments)
    case.title, case.family, case.arguments = spec.title, spec.family, dict(spec.arguments)
    if spec.file == "rows":
        case.contenders[COPY] = copying(case.work, setting)
    if setting.dry:
        allowed = (*OURS, "torch")
        case.contenders = {n: make for n, make in case.contenders.items() if n in allowed}
    case.refill()
    return case


def same_source(
    name: str, make: Callable[[ModuleType], list[Trial]]
) -> dict[str, Callable[[], list[Trial]]]:
    """The kernels of sources/<name>.py under each compiler."""
    return {
        package: functools.partial(lambda p: make(sources.load(name, p)), package)
        for package in ("minitriton", "triton")
    }


def peer(module: str, name: str) -> Any:
    """A function of another library; ImportError if it is not installed."""
    return getattr(importlib.import_module(module), name)


def liger(name: str) -> Any:
    """A function of liger-kernel."""
    return peer("liger_kernel.transformers.functional", name)


def copying(work: Work, setting: Setting) -> Callable[[], list[Trial]]:
    """What a copy that moves as many bytes as the case, half of them reads, takes in torch."""

    def make() -> list[Trial]:
        source = torch.zeros(int(work.bytes) // 2, dtype=torch.uint8, device=setting.device)
        target = torch.empty_like(source)
        return [Trial("", lambda: target.copy_(source), checked=False)]

    return make


def one(call: Callable[[], Any], label: str = "", **more: Any) -> Callable[[], list[Trial]]:
    """A contender with a single configuration."""
    return lambda: [Trial(label, call, **more)]


def compiled(function: Callable[..., Any], *arguments: Any, mode: str | None = None) -> Any:
    """The contender of torch.compile: `function` of the arguments."""

    def make() -> list[Trial]:
        fast = torch.compile(function, dynamic=False, mode=mode)
        return [Trial(mode or "default mode", lambda: fast(*arguments))]

    return make


def backward(
    label: str, function: Callable[..., Any], leaves: Tensors, grad: torch.Tensor | Tensors,
    *, once: bool = False,
) -> Trial:  # fmt: skip
    """The backward pass of a function through autograd; its forward pass is not timed. once: it
    overwrites what the forward pass saved, which therefore runs again before each call."""
    state: dict[str, Any] = {}

    def refresh() -> None:
        with torch.enable_grad():
            state["out"] = function(*leaves)

    def call() -> Any:
        return torch.autograd.grad(state["out"], list(leaves), grad, retain_graph=True)

    return Trial(label, call, refresh=refresh, restore=refresh if once else None)


def compiled_backward(
    function: Callable[..., Any], leaves: Tensors, grad: torch.Tensor | Tensors
) -> Callable[[], list[Trial]]:
    def make() -> list[Trial]:
        import torch._functorch.config as settings

        settings.donated_buffer = False  # the graph is walked more than once
        fast = torch.compile(function, dynamic=False)
        return [backward("default mode", fast, leaves, grad)]

    return make


class exact_fp32:
    """While it lasts, torch multiplies fp32 without tf32."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def normal(*tensors: torch.Tensor, scale: float = 1.0) -> Callable[[], None]:
    """A refill with normally distributed numbers, which leaves autograd unaware."""

    def refill() -> None:
        for tensor in tensors:
            shape = tuple(tensor.shape)
            drawn = torch.randn(shape, device=tensor.device, dtype=torch.float32) * scale
            tensor.data.copy_(drawn)

    return refill


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Aliases of the tensors which require gradients: they share memory, so refills reach them."""
    return [tensor.detach().requires_grad_() for tensor in tensors]
