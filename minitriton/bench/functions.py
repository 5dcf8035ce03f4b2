"""Cases of differentiable functions: the forward and the backward pass of one set of contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from minitriton.bench import cases
from minitriton.bench.cases import Case, LeftOut, Setting, Trial, backward, exact_fp32, leaves
from minitriton.bench.measure import as_list
from minitriton.bench.roofline import Work

BF16 = torch.bfloat16
Tensors = list[torch.Tensor]
Body = Callable[..., Any]  # of tensors: one, or a tuple of several of one shape
Maker = Callable[[], Body]  # imports what it needs, so that what is missing fails alone


@dataclass
class Function:
    """One function of `inputs`, which `refill` fills, with `results` tensors of the shape `out`.

    exact: the function in plain torch, called with copies of the inputs in `wide`. makers: by
    contender. plain: what torch runs and torch.compile compiles; None if that makes no sense.
    """

    inputs: Tensors
    refill: Callable[[], None]
    out: tuple[int, ...]
    exact: Body
    makers: dict[str, Maker]
    plain: Body | None = None
    wide: torch.dtype = torch.float32
    results: int = 1
    forward_only: dict[str, str] = field(default_factory=dict)  # contender, reason
    once: tuple[str, ...] = ()  # contenders whose backward pass overwrites what it reads

    def forward(self, work: Work, bound: float = 8e-3) -> Case:
        """The case of the forward pass."""
        contenders: dict[str, Callable[[], list[Trial]]] = {
            name: _forward(maker, self.inputs) for name, maker in self.makers.items()
        }
        if self.plain is not None:
            plain = self.plain
            contenders["torch"] = _forward(lambda: plain, self.inputs)
            contenders["torch.compile"] = cases.compiled(plain, *self.inputs)

        def reference() -> Tensors:
            with exact_fp32(), torch.no_grad():
                found = as_list(self.exact(*(x.to(self.wide) for x in self.inputs)))
            return [x.float() for x in found]

        return Case(work, self.refill, reference, contenders, bound)

    def backward(self, work: Work, bound: float = 2e-2) -> Case:
        """The case of the backward pass: gradients of all inputs."""
        grads = [self.inputs[0].new_empty(self.out) for _ in range(self.results)]
        own = leaves(*self.inputs)
        contenders: dict[str, Callable[[], list[Trial]]] = {
            name: self._backward(name, maker, own, grads) for name, maker in self.makers.items()
        }
        if self.plain is not None:
            plain = self.plain
            contenders["torch"] = lambda: [backward("", plain, own, grads)]
            contenders["torch.compile"] = cases.compiled_backward(plain, own, grads)

        def reference() -> Tensors:
            wide = [x.detach().to(self.wide).requires_grad_() for x in self.inputs]
            with exact_fp32():
                with torch.enable_grad():
                    out = as_list(self.exact(*wide))
                found = torch.autograd.grad(out, wide, [g.to(self.wide) for g in grads])
            return [g.float() for g in found]

        def refill() -> None:
            self.refill()
            cases.normal(*grads)()

        return Case(work, refill, reference, contenders, bound)

    def case(self, moved: tuple[float, float], flop: tuple[float, float], rate: str = "fp32", *,
             backward: bool, bounds: tuple[float, float] = (8e-3, 2e-2)) -> Case:  # fmt: skip
        """The one or the other, of pairs (forward, backward)."""
        make = self.backward if backward else self.forward
        return make(Work(moved[backward], flop[backward], rate), bounds[backward])

    def _backward(
        self, name: str, maker: Maker, own: Tensors, grads: Tensors
    ) -> Callable[[], list[Trial]]:
        def make() -> list[Trial]:
            if name in self.forward_only:
                raise LeftOut(self.forward_only[name])
            return [backward("", maker(), own, grads, once=name in self.once)]

        return make


def _forward(maker: Maker, inputs: Tensors) -> Callable[[], list[Trial]]:
    def make() -> list[Trial]:
        function = maker()
        return [Trial("", lambda: function(*inputs))]

    return make


def empty(setting: Setting, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor for a refill to fill."""
    return torch.empty(*shape, device=setting.device, dtype=dtype)


def slow_to_tune(setting: Setting, maker: Maker) -> Maker:
    """A contender which tunes itself for up to minutes and therefore sits out quick runs."""

    def make() -> Body:
        if setting.quick:
            raise LeftOut("it tunes itself for long: full runs only")
        return maker()

    return make
