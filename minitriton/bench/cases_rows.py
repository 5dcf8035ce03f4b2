"""Cases that memory bounds: elementwise functions, rows, norms, the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import minitriton
from minitriton.bench import cases
from minitriton.bench.cases import (
    Case,
    LeftOut,
    Setting,
    Trial,
    backward,
    leaves,
    normal,
    one,
    same_source,
)
from minitriton.bench.roofline import Work

BF16, EPS = torch.bfloat16, 1e-5
BLOCKS = ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (1024, 8))  # elements a program, warps
WARPS = (8, 4, 16)


def _tensors(setting: Setting, *shape: int, count: int = 1, dtype: Any = BF16) -> Any:
    made = [torch.empty(*shape, device=setting.device, dtype=dtype) for _ in range(count)]
    return made[0] if count == 1 else made


def _elementwise(
    setting: Setting, kernel: str, inputs: list[torch.Tensor], count: int
) -> dict[str, Callable[[], list[Trial]]]:
    """Same-source contenders of a kernel (inputs..., outputs..., n, BLOCK)."""
    outs = [torch.empty_like(inputs[0]) for _ in range(count)]
    n = inputs[0].numel()

    def make(module: Any) -> list[Trial]:
        launch = getattr(module, kernel)

        def trial(block: int, warps: int) -> Trial:
            grid = (minitriton.cdiv(n, block),)

            def call() -> Any:
                launch[grid](*inputs, *outs, n, BLOCK=block, num_warps=warps)
                return outs

            return Trial(f"BLOCK={block} warps={warps}", call, outs)

        return [trial(*option) for option in setting.few(BLOCKS, 3)]

    return same_source("rows", make)


def add(setting: Setting, n: int) -> Case:
    x, y = _tensors(setting, n, count=2, dtype=torch.float32)
    out = torch.empty_like(x)
    contenders = _elementwise(setting, "add_kernel", [x, y], 1)
    contenders["torch"] = one(lambda: torch.add(x, y, out=out), outputs=[out])
    contenders["torch.compile"] = cases.compiled(torch.add, x, y)
    return Case(Work(12 * n, n), normal(x, y), lambda: [x + y], contenders, bound=1e-6)


def gelu(setting: Setting, rows: int, columns: int) -> Case:
    x = _tensors(setting, rows, columns)
    contenders = _elementwise(setting, "gelu_kernel", [x], 1)
    contenders["torch"] = one(lambda: F.gelu(x))
    contenders["torch.compile"] = cases.compiled(F.gelu, x)
    work = Work(4 * x.numel(), 20 * x.numel())
    return Case(work, normal(x), lambda: [F.gelu(x.float())], contenders)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def swiglu(setting: Setting, rows: int, columns: int) -> Case:
    gate, up = _tensors(setting, rows, columns, count=2)
    contenders = _elementwise(setting, "swiglu_kernel", [gate, up], 1)
    contenders["torch"] = one(lambda: _swiglu(gate, up))
    contenders["torch.compile"] = cases.compiled(_swiglu, gate, up)
    contenders["liger"] = lambda: one(functools.partial(cases.liger("liger_swiglu"), gate, up))()
    work = Work(6 * gate.numel(), 8 * gate.numel())
    reference = lambda: [_swiglu(gate.float(), up.float())]  # noqa: E731
    return Case(work, normal(gate, up), reference, contenders)


def swiglu_backward(setting: Setting, rows: int, columns: int) -> Case:
    grad, gate, up = _tensors(setting, rows, columns, count=3)
    contenders = _elementwise(setting, "swiglu_backward_kernel", [grad, gate, up], 2)
    contenders |= _by_autograd(_swiglu, [gate, up], grad)

    def liger() -> list[Trial]:
        function = cases.liger("liger_swiglu")  # it writes the gradients over the inputs
        on_copies = lambda *inputs: function(*(x.clone() for x in inputs))  # noqa: E731
        return [backward("", on_copies, leaves(gate, up), grad, once=True)]

    contenders["liger"] = liger
    work = Work(10 * gate.numel(), 14 * gate.numel())
    reference = _reference_gradients(_swiglu, [gate, up], grad)
    return Case(work, normal(grad, gate, up), reference, contenders)


def _by_autograd(
    function: Any, inputs: list[torch.Tensor], grad: torch.Tensor, library: Any = None
) -> dict[str, Any]:
    """torch, torch.compile and, if given, the library's function, differentiated."""
    own = leaves(*inputs)
    made: dict[str, Any] = {}
    if library is not None:
        made["minitriton library"] = lambda: [backward("", library, own, grad)]
    made["torch"] = lambda: [backward("", function, own, grad)]
    made["torch.compile"] = cases.compiled_backward(function, own, grad)
    return made


def _reference_gradients(function: Any, inputs: list[torch.Tensor], grad: torch.Tensor) -> Any:
    def reference() -> list[torch.Tensor]:
        wide = [x.detach().float().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = function(*wide)
        return list(torch.autograd.grad(out, wide, grad.float()))

    return reference


def softmax(setting: Setting, rows: int, columns: int) -> Case:
    x = _tensors(setting, rows, columns)
    out, block = torch.empty_like(x), minitriton.next_power_of_2(columns)

    def make(module: Any) -> list[Trial]:
        def trial(warps: int) -> Trial:
            def call() -> Any:
                module.softmax_kernel[(rows,)](
                    out, x, x.stride(0), out.stride(0), columns, BLOCK=block, num_warps=warps
                )
                return [out]

            return Trial(f"warps={warps}", call, [out])

        return [trial(warps) for warps in setting.few(WARPS, 3)]

    contenders = same_source("rows", make)
    contenders["minitriton library"] = one(functools.partial(_library_softmax, x))
    contenders["torch"] = one(lambda: torch.softmax(x, -1))
    contenders["liger"] = lambda: one(functools.partial(cases.liger("liger_softmax"), x))()
    contenders["torch.compile"] = cases.compiled(lambda t: torch.softmax(t, -1), x)
    work = Work(4 * x.numel(), 5 * x.numel())
    return Case(work, normal(x), lambda: [torch.softmax(x.float(), -1)], contenders)


def softmax_backward(setting: Setting, rows: int, columns: int) -> Case:
    grad, x = _tensors(setting, rows, columns, count=2)
    function = functools.partial(torch.softmax, dim=-1)
    contenders = _by_autograd(function, [x], grad, _library_softmax)

    def liger() -> list[Trial]:
        return [backward("", cases.liger("liger_softmax"), leaves(x), grad)]

    contenders["liger"] = liger
    work = Work(6 * x.numel(), 4 * x.numel())
    reference = _reference_gradients(function, [x], grad)
    return Case(work, normal(grad, x), reference, contenders)


def _library_softmax(x: torch.Tensor) -> torch.Tensor:
    from minitriton import kernels

    return kernels.softmax(x)


class Norm:
    """Layer norm or RMS norm: operands and launches that forward and backward cases share."""

    def __init__(self, setting: Setting, rows: int, columns: int, *, centred: bool) -> None:
        self.setting, self.rows, self.columns, self.centred = setting, rows, columns, centred
        self.name = "layer_norm" if centred else "rms_norm"
        self.x, self.y, self.grad, self.dx = _tensors(setting, rows, columns, count=4)
        count = 2 if centred else 1
        self.parameters = [_tensors(setting, columns) for _ in range(count)]
        self.stats = [_tensors(setting, rows, dtype=torch.float32) for _ in range(count)]
        self.block = minitriton.next_power_of_2(columns)

    def refill(self) -> None:
        normal(self.x, self.grad, *self.parameters)()

    def function(self, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        """In plain torch."""
        if self.centred:
            return F.layer_norm(x, (self.columns,), *parameters, EPS)
        return F.rms_norm(x, (self.columns,), *parameters, EPS)

    def library(self, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        from minitriton import kernels

        return getattr(kernels, self.name)(x, *parameters, eps=EPS)

    def liger(self) -> Any:
        if self.centred:
            function = cases.liger("liger_layer_norm")
            return lambda x, w, b: function(x, w, b, EPS)
        function = cases.liger(
            "liger_rms_norm"
        )  # in place it would overwrite the incoming gradient
        return lambda x, w: function(x, w, EPS, in_place=False)

    def forward(self, module: Any, warps: int) -> list[torch.Tensor]:
        getattr(module, f"{self.name}_kernel")[(self.rows,)](
            self.x, self.y, *self.parameters, *self.stats, self.columns, self.columns, EPS,
            BLOCK=self.block, num_warps=warps,
        )  # fmt: skip
        return [self.y]

    def forwards(self, module: Any) -> list[Trial]:
        def trial(warps: int) -> Trial:
            outputs = [self.y, *self.stats]
            return Trial(f"warps={warps}", lambda: self.forward(module, warps), outputs)

        return [trial(warps) for warps in self.setting.few(WARPS, 3)]

    def backwards(self, module: Any) -> list[Trial]:
        def trial(warps: int, per_processor: int, stages: int) -> Trial:
            programs = min(self.rows, per_processor * self.setting.processors)
            count = len(self.parameters)
            parts = self.x.new_empty(count, programs, self.columns, dtype=torch.float32)
            sums = self.x.new_empty(count, self.columns)

            def call() -> Any:
                getattr(module, f"{self.name}_backward_kernel")[(programs,)](
                    self.grad, self.x, self.parameters[0], *self.stats, self.dx, *parts,
                    self.columns, self.rows, self.columns, STAGES=stages, BLOCK=self.block,
                    num_warps=warps,
                )  # fmt: skip
                module.column_sum_kernel[(minitriton.cdiv(self.columns, 16), count)](
                    parts, sums, programs, self.columns, BLOCK_R=128, BLOCK_C=16
                )
                return [self.dx, *sums]

            outputs = [self.dx, sums, parts]
            refresh = lambda: self.forward(module, warps)  # noqa: E731
            label = f"warps={warps} programs={programs} stages={stages}"
            return Trial(label, call, outputs, refresh)

        options = [
            (8, 2, 3),
            (8, 2, 2),
            (8, 2, 4),
            (8, 2, 1),
            (16, 1, 3),
            (16, 2, 2),
            (8, 4, 1),
            (4, 4, 1),
            (16, 1, 1),
            (16, 2, 1),
        ]
        return [trial(*option) for option in self.setting.few(options, 2)]

    def case(self) -> Case:
        inputs = [self.x, *self.parameters]
        contenders = same_source("rows", self.forwards)
        contenders["minitriton library"] = one(lambda: self.library(*inputs))
        contenders["torch"] = one(lambda: self.function(*inputs))
        contenders["torch.compile"] = cases.compiled(self.function, *inputs)
        contenders["liger"] = lambda: one(functools.partial(self.liger(), *inputs))()
        n = self.x.numel()
        reference = lambda: [self.function(*(t.float() for t in inputs))]  # noqa: E731
        return Case(Work(4 * n, (8 if self.centred else 5) * n), self.refill, reference, contenders)

    def backward_case(self) -> Case:
        inputs = [self.x, *self.parameters]
        contenders = same_source("rows", self.backwards)
        contenders |= _by_autograd(self.function, inputs, self.grad, self.library)
        contenders["liger"] = lambda: [backward("", self.liger(), leaves(*inputs), self.grad)]
        n = self.x.numel()
        reference = _reference_gradients(self.function, inputs, self.grad)
        work = Work(6 * n, (15 if self.centred else 11) * n)
        return Case(work, self.refill, reference, contenders, bound=1e-2)


def layer_norm(setting: Setting, rows: int, columns: int) -> Case:
    return Norm(setting, rows, columns, centred=True).case()


def layer_norm_backward(setting: Setting, rows: int, columns: int) -> Case:
    return Norm(setting, rows, columns, centred=True).backward_case()


def rms_norm(setting: Setting, rows: int, columns: int) -> Case:
    return Norm(setting, rows, columns, centred=False).case()


def rms_norm_backward(setting: Setting, rows: int, columns: int) -> Case:
    return Norm(setting, rows, columns, centred=False).backward_case()


class Loss:
    """Cross-entropy, mean over the rows."""

    def __init__(self, setting: Setting, rows: int, columns: int) -> None:
        self.setting, self.rows, self.columns = setting, rows, columns
        self.logits = _tensors(setting, rows, columns)
        self.dlogits = torch.empty_like(self.logits)
        self.targets = torch.zeros(rows, device=setting.device, dtype=torch.int64)
        self.losses, self.lse = _tensors(setting, rows, count=2, dtype=torch.float32)
        self.mean = _tensors(setting, 1, dtype=torch.float32)
        self.grad = torch.ones((), device=setting.device)

    def refill(self) -> None:
        normal(self.logits, scale=2.0)()
        self.targets.random_(self.columns)

    def function(self, logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, self.targets)

    def library(self, logits: torch.Tensor) -> torch.Tensor:
        from minitriton import kernels

        return kernels.cross_entropy(logits, self.targets)

    def forward(self, module: Any, block: int, warps: int) -> list[torch.Tensor]:
        module.cross_entropy_kernel[(self.rows,)](
            self.logits, self.targets, self.losses, self.lse, self.columns, self.columns,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
        module.mean_kernel[(1,)](self.losses, self.mean, self.rows, BLOCK=4096, num_warps=8)
        return [self.mean]

    def case(self) -> Case:
        def make(module: Any) -> list[Trial]:
            outputs = [self.losses, self.lse, self.mean]
            options = ((4096, 4), (2048, 4), (4096, 8), (8192, 8))
            return [
                Trial(f"BLOCK={block} warps={warps}",
                      functools.partial(self.forward, module, block, warps), outputs)
                for block, warps in self.setting.few(options, 2)
            ]  # fmt: skip

        contenders = same_source("rows", make)
        contenders["minitriton library"] = one(lambda: self.library(self.logits))
        contenders["torch"] = one(lambda: self.function(self.logits))
        contenders["torch.compile"] = cases.compiled(self.function, self.logits)
        contenders["liger"] = lambda: one(
            functools.partial(cases.liger("liger_cross_entropy"), self.logits, self.targets)
        )()
        n = self.logits.numel()
        reference = lambda: [self.function(self.logits.float())]  # noqa: E731
        return Case(Work(2 * n, 4 * n), self.refill, reference, contenders)

    def backward_case(self) -> Case:
        def make(module: Any) -> list[Trial]:
            def trial(block: int, warps: int) -> Trial:
                grid = (self.rows, minitriton.cdiv(self.columns, block))

                def call() -> Any:
                    module.cross_entropy_backward_kernel[grid](
                        self.grad, self.logits, self.targets, self.lse, self.dlogits,
                        self.columns, self.rows, self.columns, BLOCK=block, num_warps=warps,
                    )  # fmt: skip
                    return [self.dlogits]

                refresh = lambda: self.forward(module, 4096, 8)  # noqa: E731
                return Trial(f"BLOCK={block} warps={warps}", call, [self.dlogits], refresh)

            return [trial(*option) for option in self.setting.few(((2048, 4), (4096, 8)), 2)]

        contenders = same_source("rows", make)
        contenders |= _by_autograd(self.function, [self.logits], self.grad, self.library)

        def liger() -> list[Trial]:
            cases.liger("liger_cross_entropy")
            raise LeftOut("its forward pass makes the gradient: see cross_entropy_step")

        contenders["liger"] = liger
        n = self.logits.numel()
        reference = _reference_gradients(self.function, [self.logits], self.grad)
        return Case(Work(4 * n, 4 * n), self.refill, reference, contenders)


def cross_entropy(setting: Setting, rows: int, columns: int) -> Case:
    return Loss(setting, rows, columns).case()


def cross_entropy_backward(setting: Setting, rows: int, columns: int) -> Case:
    return Loss(setting, rows, columns).backward_case()
