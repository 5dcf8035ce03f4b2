"""Operators of the library: torch custom operators with a short way in for eager calls.

A `torch.library` custom operator costs 100 us or more of Python per call, many times what launching
its kernel costs. `Operator` registers one, for torch.compile, fake tensors, functorch and whatever
else looks at the dispatcher; plain eager calls go straight to the function, through a
`torch.autograd.Function` where a gradient may be wanted. Both ways run the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.compiler import is_compiling

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
        types = [str(argument.type) for argument in self._op._opoverload._schema.arguments]
        self._is_tensor = ["Tensor" in type_ for type_ in types]
        self._has_lists = any("List[Tensor]" in type_ for type_ in types)
        self._apply: Callable[..., Any] | None = None

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

        Differentiable.backward = staticmethod(backward)
        if not self._has_lists:  # tensors in lists would be none to it
            # what torch.autograd.Function.apply comes to without functorch's transforms
            base = torch.autograd.Function
            self._apply = super(base, Differentiable).apply  # type: ignore[misc]  # a class is fine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results; which way the call takes changes nothing about them."""
        if kwargs:
            args = self._signature.bind(*args, **kwargs).args
        # modes and functorch's transforms intercept operators
        if (
            is_compiling()
            or _len_torch_dispatch_stack()
            or _len_torch_function_stack()
            or peek_interpreter_stack() is not None
        ):
            return self._op(*args)
        wants_grad = False
        found = compress(args, self._is_tensor)
        for x in _flat(found) if self._has_lists else found:
            if x is None:
                continue
            if type(x) not in _PLAIN or x.is_meta or is_functorch_wrapped_tensor(x):
                return self._op(*args)
            if x.requires_grad:
                wants_grad = True
        if wants_grad and torch.is_grad_enabled():
            return (self._apply or self._op)(*args)
        result = self._function(*args)
        for index in self._mutated:
            if args[index] is not None:
                torch.autograd.graph.increment_version(args[index])
        return result


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and the items of lists in their place."""
    return chain.from_iterable(x if isinstance(x, list | tuple) else (x,) for x in values)


def operator(
    name: str, mutates_args: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Makes a function of tensors and plain values the operator `minitriton::name`.

    Its annotations are the schema, as for torch.library.custom_op; mutates_args: the arguments that
    it writes to.
    """
    return lambda function: Operator(name, function, mutates_args)
