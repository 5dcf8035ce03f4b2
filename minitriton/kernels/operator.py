"""Operators of the library: torch custom operators with a short way in for eager calls.

A `torch.library` custom operator costs 100 us or more of Python per call, many times what launching
its kernel costs. `Operator` registers one, for torch.compile, fake tensors, functorch and whatever
else looks at the dispatcher; plain eager calls go straight to the function, through a
`torch.autograd.Function` where a gradient may be wanted. Both ways run the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Operator:
    """`minitriton::name`; made by the decorator `operator`."""

    def __init__(
        self, name: str, function: Callable[..., Any], mutates_args: Sequence[str]
    ) -> None:
        self._op = torch.library.custom_op(
            f"minitriton::{name}", function, mutates_args=mutates_args
        )
        self._function, self._signature = function, inspect.signature(function)
        names = list(self._signature.parameters)
        self._mutated = tuple(names.index(arg) for arg in mutates_args)
        self._differentiable: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable[..., Any]) -> None:
        """What the results look like, as for torch.library.custom_op."""
        self._op.register_fake(fake)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., None]
    ) -> None:
        """The formula of the gradient, as for torch.library.custom_op."""
        self._op.register_autograd(backward, setup_context=setup_context)
        function = self._function

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                result = function(*args)
                setup_context(ctx=ctx, inputs=args, output=result)
                return result

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                return backward(ctx, *grads)

        self._differentiable = Differentiable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results; which way the call takes changes nothing about them."""
        if kwargs:
            bound = self._signature.bind(*args, **kwargs)
            args = bound.args
        if torch.compiler.is_compiling() or not _undisturbed():
            return self._op(*args)
        wants_grad, plain = _survey(args)
        if not plain:
            return self._op(*args)
        if not (wants_grad and torch.is_grad_enabled()):
            result = self._function(*args)
            for index in self._mutated:
                if args[index] is not None:
                    torch.autograd.graph.increment_version(args[index])
            return result
        if self._differentiable is None or any(isinstance(x, list) for x in args):
            return self._op(*args)
        return self._differentiable.apply(*args)


def _undisturbed() -> bool:
    """Whether nobody intercepts operators: no modes, no functorch transforms."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _survey(args: Sequence[Any]) -> tuple[bool, bool]:
    """(whether a tensor requires a gradient, whether all tensors are ordinary ones with data)."""
    wants_grad = False
    for x in args:
        if isinstance(x, torch.Tensor):
            if type(x) not in _PLAIN or x.is_meta:
                return wants_grad, False
            wants_grad |= x.requires_grad
        elif isinstance(x, list) and x and isinstance(x[0], torch.Tensor):
            grad, plain = _survey(x)
            if not plain:
                return wants_grad, False
            wants_grad |= grad
    return wants_grad, True


def operator(
    name: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function of tensors and plain values the operator `minitriton::name`.

    Its annotations are the schema, as for torch.library.custom_op; mutates_args: the arguments that
    it writes to.
    """
    return lambda function: Operator(name, function, mutates_args)
