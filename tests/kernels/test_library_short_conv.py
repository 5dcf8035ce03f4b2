"""The short convolution and its decode step against fp64, as operators, and refused arguments."""

import importlib
from itertools import pairwise

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.short_conv import short_conv, short_conv_reference
from minitriton.kernels.short_conv_step import short_conv_step, short_conv_step_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# relative rms: result, gradients of activations (x, state), gradients of weight and bias
BOUNDS = {FP32: (5e-6, 1e-5, 1e-5), BF16: (5e-3, 8e-3, 2e-2), FP16: (1e-3, 2e-3, 4e-3)}
RAGGED = [0, 1, 1, 3, 10, 10, 13, 40, 41]  # bounds: lengths from 0 to 27
CASES = {  # shape, width, dtype, options
    "k3 q and k": ((2, 37, 256), 4, BF16, {"norm_heads": 128}),
    "k3 v": ((1, 21, 384), 4, BF16, {}),
    "odd sizes": ((3, 19, 23), 4, FP32, {"bias": True}),
    "half": ((2, 9, 130), 2, FP16, {"bias": True}),
    "one token": ((3, 1, 48), 4, FP32, {"state": True, "final": True}),
    "two tokens": ((2, 2, 48), 4, FP32, {"state": True, "final": True}),
    "wide head": ((1, 5, 600), 3, FP32, {"norm_heads": 300, "bias": True, "activation": None}),
    "packed": ((1, 41, 48), 3, FP32, {"cu": RAGGED, "final": True}),
    "packed, long segments": ((1, 41, 48), 3, FP32, {"cu": RAGGED, "final": True, "enough": 1}),
    "packed, state, norm": (
        (1, 41, 64), 4, BF16, {"cu": RAGGED, "state": True, "final": True, "norm_heads": 32},
    ),
}  # fmt: skip


def relative(out, expected):
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, width, dtype, device, bias=False, state=False, cu=None, parameters=FP32):
    """(x, weight, bias or None, state or None), the parameters fp32 as in K3."""
    sequences = shape[0] if cu is None else len(cu) - 1
    made = (
        torch.randn(shape, device=device).to(dtype),
        (torch.randn(shape[-1], width, device=device) / width**0.5).to(parameters),
        torch.randn(shape[-1], device=device).to(parameters) if bias else None,
        torch.randn(sequences, width - 1, shape[-1], device=device).to(dtype) if state else None,
    )
    return [None if t is None else t.requires_grad_() for t in made]


def check(tensors, bounds, activation="silu", final=False, cu=None, norm_heads=None):
    """Results, states and all gradients within bounds of fp64."""
    x, weight, bias, state = tensors
    exact = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    cu = None if cu is None else torch.tensor(cu, device=x.device)
    rest = (final, cu, norm_heads)
    y, last = short_conv(x, weight, bias, activation, state, *rest)
    expected, expected_last = short_conv_reference(*exact[:3], activation, exact[3], *rest)
    assert y.dtype == x.dtype and y.is_contiguous() and (last is not None) == final
    assert relative(y, expected) < bounds[0]
    outs, goals = [y], [expected]
    if final:
        assert torch.equal(last, expected_last.to(last.dtype))
        outs, goals = [y, last], [expected, expected_last]
    grads = [torch.randn_like(t) for t in outs]
    present = [t for t in tensors if t is not None]
    ours = torch.autograd.grad(outs, present, grads)
    theirs = torch.autograd.grad(
        goals, [t for t in exact if t is not None], [g.double() for g in grads]
    )
    for t, got, goal in zip(present, ours, theirs, strict=True):
        assert got.dtype == t.dtype
        assert relative(got, goal) < bounds[1 if t is x or t is state else 2]


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(device, name, monkeypatch):
    shape, width, dtype, options = CASES[name]
    options = dict(options)
    module = importlib.import_module("minitriton.kernels.short_conv")
    monkeypatch.setattr(module, "ENOUGH", options.pop("enough", module.ENOUGH))
    made = {key: options.pop(key, False) for key in ("bias", "state")}
    tensors = inputs(shape, width, dtype, device, cu=options.get("cu"), **made)
    check(tensors, BOUNDS[dtype], **options)


def test_parameters_in_the_dtype_of_x(device):
    check(inputs((2, 9, 130), 4, BF16, device, bias=True, parameters=BF16), BOUNDS[BF16])


def test_views_are_read_in_place(device):
    wide = torch.randn(5, 2, 3 * 48, device=device)
    weight = torch.randn(48, 4, device=device, requires_grad=True)
    views = [wide.transpose(0, 1)[:, :, 48:96], wide[:, :1, :48].expand(5, 3, 48)]
    views.append(torch.randn(48, 3, 2, device=device).permute(1, 2, 0))  # copied: channels apart
    for x in views:
        state = torch.randn(len(x), 48, 3, device=device).transpose(1, 2).requires_grad_()
        check([x.requires_grad_(), weight, None, state], BOUNDS[FP32], final=True)
    x = torch.randn(2, 5, 48, device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    short_conv(x, weight)[0].sum().backward()  # the incoming gradient is one number everywhere
    short_conv_reference(*exact)[0].sum().backward()
    assert relative(x.grad, exact[0].grad) < 1e-5


def test_pieces_make_the_whole(device):
    x, weight, *_ = inputs((2, 30, 256), 4, BF16, device)
    whole, last = short_conv(x, weight, norm_heads=128, output_final_state=True)
    state, parts = None, []
    for piece in x.detach().split([1, 2, 7, 20], 1):
        y, state = short_conv(
            piece, weight, initial_state=state, output_final_state=True, norm_heads=128
        )
        parts.append(y)
    assert torch.equal(torch.cat(parts, 1), whole) and torch.equal(state, last)


def test_packed_equals_one_by_one(device):
    x, weight, *_ = inputs((1, 41, 48), 3, FP32, device)
    packed, _ = short_conv(x, weight, cu_seqlens=torch.tensor(RAGGED, dtype=torch.int32))
    for start, end in pairwise(RAGGED):
        assert torch.equal(packed[:, start:end], short_conv(x[:, start:end], weight)[0])


def test_only_the_final_state_has_a_gradient(device):
    tensors = inputs((2, 5, 48), 4, FP32, device, state=True)
    _, last = short_conv(tensors[0], tensors[1], initial_state=tensors[3], output_final_state=True)
    last.sum().backward()
    expected = torch.zeros(2, 5, 48, device=device)
    expected[:, 2:] = 1
    assert torch.equal(tensors[0].grad, expected) and not tensors[3].grad.any()
    assert not tensors[1].grad.any()


def test_gradients_do_not_vary(device):
    tensors = inputs((2, 70, 384), 4, BF16, device)[:2]
    runs = [torch.autograd.grad(short_conv(*tensors)[0].square().sum(), tensors) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_offsets_beyond_32_bits(device):
    base = torch.empty(2**31 + 2**16, dtype=BF16, device=device)
    x = base.as_strided((2, 5, 32), (2**31 + 512, 64, 1))
    weight = torch.randn(32, 4, device=device, requires_grad=True)
    state = base.as_strided((2, 3, 32), (2**31 + 2048, 32, 1), 32)
    with torch.no_grad():
        x.normal_()
        state.normal_()
    assert torch.equal(
        short_conv(x, weight, initial_state=state)[0],
        short_conv(x.clone(), weight, initial_state=state.clone())[0],
    )
    expected = state.clone()
    with torch.no_grad():
        y = short_conv_step(x, weight, expected)
        assert torch.equal(short_conv_step(x, weight, state), y)
    assert torch.equal(state, expected)


@pytest.mark.parametrize(
    ("shape", "cu"), [((0, 4, 8), None), ((2, 0, 8), None), ((1, 0, 8), [0, 0, 0])]
)
def test_no_tokens(device, shape, cu):
    x, weight, bias, state = inputs(shape, 4, FP32, device, bias=True, state=True, cu=cu)
    cu = None if cu is None else torch.tensor(cu)
    y, last = short_conv(x, weight, bias, "silu", state, True, cu)
    (y.sum() + last.sum()).backward()
    assert y.shape == shape and torch.equal(last, state)
    assert x.grad.shape == shape and not weight.grad.any() and not bias.grad.any()
    assert torch.equal(state.grad, torch.ones_like(state))


def test_operator_is_sound(device):
    x, weight, _, state = inputs((1, 6, 64), 4, BF16, device, state=True, cu=[0, 2, 6])
    cu = torch.tensor([0, 2, 6])
    op = torch.ops.minitriton.short_conv
    torch.library.opcheck(op, (x, weight, None, state, cu, True, 32, True))
    apart = torch.randn(64, 3, 2, device=device).permute(1, 2, 0).requires_grad_()
    torch.library.opcheck(op, (apart, weight, None, None, None, True, 0, False))


def test_torch_compile_without_graph_breaks(device):
    x, weight, _, state = inputs((2, 7, 48), 4, FP32, device, state=True)

    def call(x, weight, state):
        y, last = short_conv(x * 2, weight, None, "silu", state, True)
        return y.square().sum() + last.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    tensors = (x, weight, state)
    torch.testing.assert_close(compiled(*tensors), call(*tensors))
    ours = torch.autograd.grad(compiled(*tensors), tensors)
    torch.testing.assert_close(ours, torch.autograd.grad(call(*tensors), tensors))


@pytest.mark.parametrize(("tokens", "dtype"), [(0, BF16), (1, BF16), (2, FP32), (5, BF16)])
def test_step(device, tokens, dtype):
    """0: [B, D]. The state lies as [slots, D, W - 1]; one sequence is skipped."""
    x, weight, bias, _ = inputs((4, tokens or 1, 40), 4, dtype, device, bias=True)
    cache = torch.randn(7, 40, 3, device=device).to(dtype)
    exact = cache.double().transpose(1, 2)
    slots = torch.tensor([6, -1, 0, 2], dtype=torch.int32, device=device)
    x = x[:, 0] if tokens == 0 else x
    with torch.no_grad():
        y = short_conv_step(x, weight, cache.transpose(1, 2), bias, "silu", slots, 20)
        expected = short_conv_step_reference(
            x.double(), weight.double(), exact, bias.double(), "silu", slots, 20
        )
    assert y.shape == x.shape and y.dtype == dtype and not y[1].any()
    assert relative(y, expected) < BOUNDS[dtype][0]
    assert torch.equal(cache.transpose(1, 2), exact.to(dtype))


STEPS = {  # batch, tokens, channels, width, options
    "one sequence": (1, 1, 256, 4, {"norm_heads": 64}),
    "one wide head": (1, 2, 384, 4, {"norm_heads": 384}),
    "two blocks of tokens": (3, 8, 96, 4, {"bias": True}),
    "a part of the second": (2, 6, 144, 3, {"activation": None}),
    "odd channels": (5, 3, 23, 2, {"bias": True}),
    "rows beyond the batch": (6, 1, 128, 4, {"norm_heads": 128}),
}


@pytest.mark.parametrize("state_dtype", [BF16, FP32])
@pytest.mark.parametrize("name", STEPS)
def test_tiles_of_steps(device, name, state_dtype):
    """Tokens that lie apart, a state of rows of channels."""
    batch, tokens, channels, width, options = STEPS[name]
    options = dict(options)
    x, weight, bias, _ = (
        None if t is None else t.detach()
        for t in inputs((batch, tokens, channels), width, BF16, device, options.pop("bias", False))
    )
    x = x.transpose(0, 1).contiguous().transpose(0, 1)
    state = torch.randn(batch, width - 1, channels, device=device).to(state_dtype)
    exact = [None if t is None else t.double() for t in (x, weight, state, bias)]
    y = short_conv_step(x, weight, state, bias, **options)
    expected = short_conv_step_reference(*exact, **options)
    assert relative(y, expected) < BOUNDS[BF16][0]
    assert torch.equal(state, exact[2].to(state_dtype))


def test_steps_continue_a_sequence(device):
    x, weight = (t.detach() for t in inputs((2, 12, 256), 4, BF16, device)[:2])
    whole, last = short_conv(x, weight, output_final_state=True, norm_heads=128)
    _, state = short_conv(x[:, :7], weight, output_final_state=True)
    parts = [short_conv_step(x[:, t], weight, state, norm_heads=128) for t in range(7, 10)]
    parts += short_conv_step(x[:, 10:], weight, state, norm_heads=128).unbind(1)
    assert torch.equal(torch.stack(parts, 1), whole[:, 7:]) and torch.equal(state, last)


def test_step_as_an_operator(device):
    x, weight, _, state = [
        None if t is None else t.detach() for t in inputs((2, 1, 24), 4, FP32, device, state=True)
    ]
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    op = torch.ops.minitriton.short_conv_step
    torch.library.opcheck(op, (x, weight, state.clone(), None, slots, True, 8))
    twin = state.clone()
    compiled = torch.compile(
        lambda x, state: short_conv_step(x + 1, weight, state) * 2, fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    torch.testing.assert_close(
        compiled(x[:, 0], state), short_conv_step(x[:, 0] + 1, weight, twin) * 2
    )
    assert torch.equal(state, twin)
    assert short_conv_step(x[:0, 0], weight, state[:0]).shape == (0, 24)


BAD = [
    ({"x": lambda x: x.double()}, "argument 'x': dtype torch.float64"),
    ({"x": lambda x: x[0]}, r"argument 'x': shape \(6, 8\); it must be \[B, T, D\]"),
    ({"x": lambda x: None}, "argument 'x': expected a tensor, got NoneType"),
    ({"weight": lambda w: w[:5]}, r"argument 'weight': shape \(5, 4\); it must be \(8, W\)"),
    ({"weight": lambda w: w.repeat(1, 2)}, r"argument 'weight': .* width W of 2, 3 or 4"),
    ({"weight": lambda w: w.to(FP16)}, "argument 'weight': dtype torch.float16; it must be"),
    ({"weight": lambda w: w.to("meta")}, "argument 'weight': device meta differs"),
    ({"bias": lambda b: torch.ones(3)}, r"argument 'bias': shape \(3,\); it must be \(8,\)"),
    ({"activation": lambda a: "gelu"}, "argument 'activation': must be 'silu' or None, got 'gelu'"),
    ({"initial_state": lambda s: torch.ones(2, 8, 3)}, r"'initial_state': .* must be \(1, 3, 8\)"),
    ({"initial_state": lambda s: torch.ones(1, 3, 8, dtype=FP16)}, "'initial_state': dtype"),
    ({"norm_heads": lambda n: 3}, "argument 'norm_heads': .* divides the 8 of 'x', got 3"),
    ({"norm_heads": lambda n: 2048}, "argument 'norm_heads': must be .* from 1 to 1024"),
    ({"cu_seqlens": lambda c: [0, 6]}, "argument 'cu_seqlens': must be a tensor of int64"),
    ({"cu_seqlens": lambda c: torch.tensor([0])}, r"'cu_seqlens': shape \(1,\); it must be"),
    ({"cu_seqlens": lambda c: torch.tensor([0, 5])}, "'cu_seqlens': runs from 0 to 5; it must run"),
    ({"cu_seqlens": lambda c: torch.tensor([0, 4, 2, 6])}, "falls from 4 to 2 at index 2"),
    (
        {"x": lambda x: x.repeat(2, 1, 1), "cu_seqlens": lambda c: torch.tensor([0, 6])},
        "argument 'cu_seqlens': packed sequences need a batch of 1; 'x' has 2",
    ),
]


@pytest.mark.parametrize(("change", "match"), BAD)
def test_refused_before_launch(device, change, match):
    arguments = {
        "x": torch.randn(1, 6, 8, device=device), "weight": torch.randn(8, 4, device=device),
        "bias": None, "activation": "silu", "initial_state": None, "norm_heads": None,
        "cu_seqlens": None,
    }  # fmt: skip
    for name, edit in change.items():
        value = edit(arguments[name])
        on_device = isinstance(value, torch.Tensor) and name in ("bias", "initial_state")
        arguments[name] = value.to(device) if on_device else value
    with pytest.raises(KernelArgumentError, match=match):
        short_conv(**arguments)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": torch.ones(8)}, r"argument 'x': shape \(8,\); it must be \[B, T, D\]|\[B, D\]"),
        ({"state": torch.ones(3, 3, 8)}, r"argument 'state': shape \(3, 3, 8\); it must be \(2, 3"),
        ({"state": None}, "argument 'state': expected a tensor, got NoneType"),
        ({"state_indices": torch.zeros(2)}, "argument 'state_indices': it must be an int32 tensor"),
        ({"state_indices": torch.zeros(3, dtype=torch.int32)}, r"of shape \(2,\)"),
        (
            {"x": torch.ones(2, 8, requires_grad=True)},
            "argument 'x': requires a gradient.*short_con",
        ),
    ],
)
def test_step_refused_before_launch(device, change, match):
    arguments = {"x": torch.ones(2, 8), "weight": torch.ones(8, 4), "state": torch.ones(2, 3, 8)}
    with pytest.raises(KernelArgumentError, match=match):
        short_conv_step(**{**arguments, **change})
