"""Operators: the short way and the dispatcher's way give the same, and the right one is taken."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minitriton.kernels import situ_glu
from minitriton.kernels.operator import operator


def make(name):
    """An operator in plain torch that counts its calls: x w, and a result without a gradient."""
    calls = []

    def product(
        x: torch.Tensor, w: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(torch.is_grad_enabled())
        return x * w * scale, x.sum().reshape(1)

    op = operator(f"test_{name}")(product)

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]
        ctx.mark_non_differentiable(output[1])

    def backward(ctx, grad, _):
        x, w = ctx.saved_tensors
        needs = ctx.needs_input_grad
        return (grad * w * ctx.scale if needs[0] else None), grad * x * ctx.scale, None

    op.register_fake(lambda x, w, scale: (torch.empty_like(x), x.new_empty(1)))
    op.register_autograd(backward, setup_context=save)
    return op, calls


@pytest.fixture
def tensors():
    return torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)


def test_eager_call_and_gradients(tensors):
    op, calls = make("eager")
    out, total = op(*tensors, scale=2.0)
    assert not total.requires_grad and out.grad_fn.name() == "DifferentiableBackward"
    ours = torch.autograd.grad(out.sum(), tensors)
    theirs = torch.autograd.grad(torch.ops.minitriton.test_eager(*tensors, 2.0)[0].sum(), tensors)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert calls == [False, False]  # inside, nothing is recorded
    with torch.no_grad():
        assert not op(*tensors, 2.0)[0].requires_grad
    frozen = tensors[0].detach()
    (dw,) = torch.autograd.grad(op(frozen, tensors[1], 2.0)[0].sum(), tensors[1])
    assert torch.equal(dw, frozen * 2)


def test_compiled_fake_and_meta_calls_go_through_the_dispatcher(tensors):
    op, calls = make("dispatched")
    compiled = torch.compile(lambda x, w: op(x, w, scale=3.0)[0] + 1, fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    torch.testing.assert_close(compiled(*tensors), tensors[0] * tensors[1] * 3 + 1)
    assert len(calls) == 1
    with FakeTensorMode():
        assert op(torch.empty(3), torch.empty(3), 1.0)[0].shape == (3,)
    assert op(torch.empty(3, device="meta"), torch.empty(3, device="meta"), 1.0)[0].is_meta
    assert len(calls) == 1


def test_tensors_that_escaped_a_transform(tensors):
    """functorch left a wrapper around them, which has no memory of its own."""
    op, _ = make("escaped")
    escaped, x = [], torch.randn(3)
    torch.func.grad(lambda y: escaped.append(y) or y.sum())(x)
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            out = op(escaped[0], tensors[1], 2.0)[0]
        assert torch.equal(out, x * tensors[1] * 2) and out.requires_grad is recorded
    (dw,) = torch.autograd.grad(op(escaped[0], tensors[1], 2.0)[0].sum(), tensors[1])
    assert torch.equal(dw, x * 2)


def test_tensors_in_lists(tensors):
    """They are looked at, and their gradients are the dispatcher's matter."""

    def total(xs: list[torch.Tensor], scale: float) -> torch.Tensor:
        return torch.stack(xs).sum(0) * scale

    op = operator("test_total")(total)
    op.register_fake(lambda xs, scale: torch.empty_like(xs[0]))
    op.register_autograd(
        lambda ctx, grad: ([grad * 2.0] * 2, None), setup_context=lambda ctx, inputs, output: None
    )
    gradients = torch.autograd.grad(op(list(tensors), 2.0).sum(), tensors)
    assert all(torch.equal(g, torch.full((3,), 2.0)) for g in gradients)
    with torch.no_grad():
        assert torch.equal(op(list(tensors), 2.0), (tensors[0] + tensors[1]) * 2)
        assert op([torch.empty(3, device="meta")] * 2, 1.0).is_meta


def test_mutation_is_seen_by_autograd():
    def fill(x: torch.Tensor, value: float) -> None:
        x.fill_(value)

    op = operator("test_fill", mutates_args=("x",))(fill)
    leaf = torch.ones(2, requires_grad=True)
    buffer = torch.zeros(2)
    out = leaf * buffer
    assert op(buffer, 2.0) is None and buffer.eq(2).all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_formula_is_an_error_and_no_wrong_gradient(tensors):
    def negate(x: torch.Tensor) -> torch.Tensor:
        return -x

    op = operator("test_negate")(negate)
    with pytest.raises(RuntimeError, match="no autograd formula|Trying to backward"):
        op(tensors[0]).sum().backward()
    x = torch.randn(4, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(situ_glu(x, x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):  # second derivatives have no kernels
        torch.autograd.grad(dx.sum(), x)
