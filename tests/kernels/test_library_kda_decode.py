"""Recurrent KDA against fp64: states in place and returned, as operators, and refused arguments."""

import pytest
import torch

from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.kda_decode import recurrent_kda, recurrent_kda_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {FP32: 1e-5, BF16: 5e-3, FP16: 1e-3}  # relative rms of results and states
K3 = {"gate": "sigmoid", "qk_l2norm": True, "beta_sigmoid": True}
CASES = {  # (B, T, H, K, V), dtype, dtype of the state, options
    "k3": ((2, 1, 2, 128, 128), BF16, FP32, K3),
    "k3, vk": ((1, 2, 2, 128, 128), BF16, FP32, {**K3, "state_layout": "vk"}),
    "bf16 state": ((1, 5, 1, 128, 128), BF16, BF16, K3),
    "bf16 state, vk": ((1, 8, 1, 128, 128), BF16, BF16, {**K3, "state_layout": "vk"}),
    "output norm": ((1, 3, 2, 128, 128), BF16, FP32, {**K3, "norm": True}),
    "output norm, vk": ((2, 2, 3, 48, 33), FP32, FP32, {"norm": True, "state_layout": "vk"}),
    "odd sizes, softplus": ((2, 7, 3, 20, 37), FP32, FP32, {"gate": "softplus", "scale": 0.3}),
    "decays, no initial state": ((1, 19, 2, 100, 5), FP16, None, {"qk_l2norm": True}),
    "packed": ((1, 13, 2, 32, 40), FP32, FP32, {**K3, "cu": [0, 1, 1, 6, 13]}),
    "packed, no initial state": ((1, 6, 2, 32, 40), FP32, None, {**K3, "cu": [0, 2, 6]}),
}


def relative(out, expected):
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, dtype, device, gate=None, qk_l2norm=False, beta_sigmoid=False, norm=False):
    """Tensor arguments by name; log decays of about -0.7 where there is no gate."""
    batch, tokens, heads, keys, values = shape

    def normal(*size):
        return torch.randn(size, device=device)

    unit = 1.0 if qk_l2norm else keys**-0.5
    beta = normal(batch, tokens, heads)
    made = {
        "q": normal(batch, tokens, heads, keys).to(dtype),
        "k": (normal(batch, tokens, heads, keys) * unit).to(dtype),
        "v": normal(batch, tokens, heads, values).to(dtype),
        "g": normal(batch, tokens, heads, keys).to(dtype),
        "beta": (beta if beta_sigmoid else torch.sigmoid(beta)).to(dtype),
    }
    if gate is None:
        made["g"] = -torch.nn.functional.softplus(made["g"])
    else:
        made["A_log"], made["dt_bias"] = 0.3 * normal(heads), normal(heads, keys)
    if norm:
        made["out_gate"] = normal(batch, tokens, heads, values).to(dtype)
        made["norm_weight"] = 1 + 0.2 * normal(values)
    return made


def exact(tensors):
    return {name: x.double() for name, x in tensors.items()}


def states(count, shape, layout, dtype, device):
    sizes = shape[3:] if layout == "kv" else shape[:2:-1]
    return torch.randn(count, shape[2], *sizes, device=device).to(dtype)


@pytest.mark.parametrize("name", CASES)
def test_against_fp64(device, name):
    shape, dtype, state_dtype, options = CASES[name]
    options = {"state_layout": "kv", **options}
    cu = options.pop("cu", None)
    made = {key: options[key] for key in K3 if key in options}
    tensors = inputs(shape, dtype, device, norm=options.pop("norm", False), **made)
    options |= {"cu_seqlens": None if cu is None else torch.tensor(cu), "output_final_state": True}
    expected, goal = tensors, None
    state = None
    if state_dtype is not None:
        count = shape[0] if cu is None else len(cu) - 1
        state = states(count, shape, options["state_layout"], state_dtype, device)
    untouched = None if state is None else state.clone()
    o, final = recurrent_kda(**tensors, initial_state=state, **options)
    expected, goal = recurrent_kda_reference(
        **exact(tensors), initial_state=None if state is None else state.double(), **options
    )
    assert o.dtype == dtype and o.is_contiguous() and final.dtype == (state_dtype or FP32)
    assert relative(o, expected) < BOUNDS[dtype]
    assert relative(final, goal) < BOUNDS[state_dtype or FP32]
    assert state is None or torch.equal(state, untouched)


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_slots_of_a_cache(device, layout):
    """A layer of a cache whose slots lie apart; one sequence is skipped."""
    shape = (3, 2, 2, 128, 128)
    tensors = inputs(shape, BF16, device, **K3)
    cache = states(5 * 2, shape, layout, FP32, device).unflatten(0, (5, 2))
    before, goal = cache.clone(), cache[:, 1].double()
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    options = {**K3, "state_layout": layout, "state_indices": slots}
    o, none = recurrent_kda(**tensors, state=cache[:, 1], **options)
    expected, _ = recurrent_kda_reference(**exact(tensors), state=goal, **options)
    live = [0, 2]
    assert none is None and not o[1].any()
    assert relative(o[live], expected[live]) < BOUNDS[BF16]
    assert relative(cache[:, 1], goal) < BOUNDS[FP32]
    assert torch.equal(cache[1:4], before[1:4]) and torch.equal(cache[:, 0], before[:, 0])
    assert not torch.equal(cache[4, 1], before[4, 1])


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_token_by_token_equals_one_call(device, layout):
    shape = (1, 5, 2, 32, 40)
    tensors = inputs(shape, FP32, device, **K3)
    options = {**K3, "state_layout": layout}
    shared = {name: tensors.pop(name) for name in ("A_log", "dt_bias")}
    o, final = recurrent_kda(**tensors, **shared, output_final_state=True, **options)
    cache = torch.zeros_like(final)
    for t in range(5):
        token = {name: x[:, t : t + 1] for name, x in tensors.items()}  # views, read in place
        step, _ = recurrent_kda(**token, **shared, state=cache, **options)
        assert torch.equal(step, o[:, t : t + 1])
    assert torch.equal(cache, final)


def test_packed_cache(device):
    """Sequences of a batch in one row, one of them empty: its state stays as it is."""
    shape, cu = (1, 6, 2, 32, 40), torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    tensors = inputs(shape, FP32, device, **K3)
    cache = states(3, shape, "kv", FP32, device)
    before, goal = cache.clone(), cache.double()
    slots = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    o, _ = recurrent_kda(**tensors, state=cache, state_indices=slots, cu_seqlens=cu, **K3)
    expected, _ = recurrent_kda_reference(
        **exact(tensors), state=goal, state_indices=slots, cu_seqlens=cu, **K3
    )
    assert relative(o, expected) < 1e-5 and relative(cache, goal) < 1e-5
    assert torch.equal(cache[0], before[0])


def test_strided_inputs(device):
    """Views of one projection, and inputs whose channels lie apart."""
    shape = (2, 3, 2, 32, 32)
    tensors = inputs(shape, FP32, device, **K3)
    qkv = torch.randn(3, 2, 3 * 64, device=device).transpose(0, 1).unflatten(2, (3, 2, 32))
    tensors |= dict(zip("qkv", qkv.unbind(2), strict=True))
    tensors["g"] = tensors["g"].permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    tensors["beta"] = torch.randn(2, 2, 3, device=device).transpose(1, 2)
    o, _ = recurrent_kda(**tensors, **K3)
    assert relative(o, recurrent_kda_reference(**exact(tensors), **K3)[0]) < 1e-5


def test_strong_decays_stay_finite(device):
    shape = (1, 4, 1, 32, 40)
    tensors = inputs(shape, FP32, device, gate="softplus")
    tensors["g"] = tensors["g"] * 1000
    state = states(1, shape, "kv", FP32, device)
    options = {"gate": "softplus", "output_final_state": True}
    o, final = recurrent_kda(**tensors, initial_state=state, **options)
    expected, goal = recurrent_kda_reference(
        **exact(tensors), initial_state=state.double(), **options
    )
    assert relative(o, expected) < 1e-5 and relative(final, goal) < 1e-5


def test_offsets_beyond_32_bits(device):
    base = torch.empty(2**31 + 2**14, device=device)
    cache = base.as_strided((2, 2, 32, 40), (2**31, 2048, 40, 1))
    with torch.no_grad():
        cache.normal_()
    twin, tensors = cache.clone(), inputs((2, 1, 2, 32, 40), FP32, device, **K3)
    o, _ = recurrent_kda(**tensors, state=cache, **K3)
    expected, _ = recurrent_kda(**tensors, state=twin, **K3)
    assert torch.equal(o, expected) and torch.equal(cache, twin)


@pytest.mark.parametrize("shape", [(0, 2, 2, 32, 40), (2, 0, 2, 32, 40), (2, 2, 0, 32, 40)])
def test_no_tokens(device, shape):
    state = states(shape[0], shape, "kv", FP32, device)
    tensors = inputs(shape, FP32, device, **K3)
    o, final = recurrent_kda(**tensors, initial_state=state, output_final_state=True, **K3)
    assert o.shape == (*shape[:3], 40) and torch.equal(final, state)


def test_operators_are_sound(device):
    tensors = inputs((2, 2, 2, 32, 40), FP32, device, **K3)
    state = states(2, (2, 2, 2, 32, 40), "kv", FP32, device)
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    rest = (*tensors.values(), None, None, None, 0.2, 1, -5.0, True, True, False, 1e-5)
    torch.library.opcheck(torch.ops.minitriton.recurrent_kda, (state, True, *rest))
    torch.library.opcheck(torch.ops.minitriton.recurrent_kda, (None, False, *rest))
    torch.library.opcheck(torch.ops.minitriton.recurrent_kda_step, (state.clone(), slots, *rest))


def test_torch_compile_without_graph_breaks(device):
    shape = (2, 2, 2, 32, 40)
    tensors = inputs(shape, FP32, device, **K3)
    cache = states(2, shape, "kv", FP32, device)
    twin = cache.clone()

    def call(q, cache):
        named = {**tensors, "q": q * 2}
        o, _ = recurrent_kda(**named, state=cache, **K3)
        again, final = recurrent_kda(**named, initial_state=cache, output_final_state=True, **K3)
        return o + again, final

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tensors["q"], cache), call(tensors["q"], twin))
    assert torch.equal(cache, twin)


def test_gradients_are_refused_and_no_grad_is_not(device):
    tensors = inputs((1, 1, 2, 32, 40), FP32, device, **K3)
    tensors["v"].requires_grad_()
    with pytest.raises(KernelArgumentError, match=r"argument 'v': requires a gradient.*chunk_kda"):
        recurrent_kda(**tensors, **K3)
    with torch.no_grad():
        o, _ = recurrent_kda(**tensors, **K3)
    assert not o.requires_grad


CACHE = torch.zeros(2, 2, 8, 4)
BAD = [
    ({"q": None}, "argument 'q': expected a tensor, got NoneType"),
    ({"q": torch.ones(2, 3, 2, 129)}, "argument 'q': .* with 1 <= K <= 128"),
    ({"k": torch.ones(2, 3, 2, 7)}, "argument 'k': shape"),
    ({"v": torch.ones(2, 3, 2, 4, dtype=FP16)}, "argument 'v': torch.float16"),
    ({"g": torch.ones(2, 3, 2, 4)}, "argument 'g': shape"),
    ({"beta": torch.ones(2, 3)}, "argument 'beta': shape"),
    ({"gate": "tanh"}, "argument 'gate': must be None, 'sigmoid' or 'softplus', got 'tanh'"),
    ({"gate": "sigmoid"}, "argument 'A_log': expected a tensor, got NoneType"),
    ({"scale": 0.0}, "argument 'scale': must be a positive number"),
    ({"state_layout": "vv"}, "argument 'state_layout': must be 'kv' or 'vk', got 'vv'"),
    ({"initial_state": torch.zeros(2, 2, 4, 8)}, r"'initial_state': shape .* be \(2, 2, 8, 4\)"),
    ({"initial_state": CACHE.to(FP16)}, "argument 'initial_state': torch.float16 on cpu; it must"),
    ({"initial_state": CACHE.to("meta")}, "argument 'initial_state': torch.float32 on meta"),
    ({"state": CACHE, "initial_state": CACHE}, "argument 'state': a cache .* give it alone"),
    ({"state": CACHE, "output_final_state": True}, "argument 'state': a cache .* give it alone"),
    ({"state": CACHE[:1]}, r"argument 'state': shape \(1, 2, 8, 4\); it must be \(2, 2, 8, 4\)"),
    ({"state": CACHE[..., :1].expand(2, 2, 8, 4)}, "argument 'state': stride 0 between the eleme"),
    ({"state_indices": torch.zeros(2, dtype=torch.int32)}, "'state_indices': slots need a cache"),
    ({"state": CACHE, "state_indices": torch.zeros(2)}, "'state_indices': it must be an int32 te"),
    ({"state": CACHE, "state_indices": [0, 1]}, "'state_indices': it must be an int32 tensor"),
    ({"cu_seqlens": torch.tensor([0, 3])}, "argument 'cu_seqlens': packed sequences need"),
    ({"out_gate": torch.ones(2, 3, 2, 8)}, "argument 'out_gate': shape"),
    ({"norm_weight": torch.ones(4)}, "'norm_weight': there is no norm without a gate"),
    ({"out_gate": torch.ones(2, 3, 2, 4), "norm_weight": torch.ones(3)}, "'norm_weight': shape"),
    ({"norm_eps": -1.0}, "argument 'norm_eps': must be a positive number"),
]


@pytest.mark.parametrize(("change", "match"), BAD)
def test_refused_before_launch(device, change, match):
    arguments = {"q": torch.ones(2, 3, 2, 8), "k": torch.ones(2, 3, 2, 8),
                 "v": torch.ones(2, 3, 2, 4), "g": torch.ones(2, 3, 2, 8),
                 "beta": torch.ones(2, 3, 2)}  # fmt: skip
    with pytest.raises(KernelArgumentError, match=match):
        recurrent_kda(**{**arguments, **change})


def test_wrong_bounds_of_packed_sequences(device):
    tensors = inputs((1, 6, 2, 32, 40), FP32, device, **K3)
    for bounds in ([0, 5], [1, 6], [0, 4, 3, 6]):
        with pytest.raises(KernelArgumentError, match="'cu_seqlens': (runs|falls) from"):
            recurrent_kda(**tensors, cu_seqlens=torch.tensor(bounds), **K3)
