"""KDA's gradients against fp64 autograd of the recurrence, and the operator's other promises."""

import pytest
import torch

from minitriton.kernels.kda import chunk_kda, chunk_kda_reference
from tests.kernels.test_warp_split import once

# these kernels take long in the emulator: once, with copies that land at random
pytestmark = [once, pytest.mark.usefixtures("at_random")]

# relative rms: q, k, v and the initial state; gate, beta and the gate's parameters
BOUNDS = {
    torch.float32: (1e-4, 1e-4),
    torch.bfloat16: (8e-3, 2e-2),
    torch.float16: (8e-3, 2e-2),
}
K3 = {"gate": "sigmoid", "qk_l2norm": True, "beta_sigmoid": True}
PACKED = [0, 0, 1, 18, 82, 147, 277, 277]  # lengths 0, 1, 17, 64, 65, 130, 0
LOOSE = ("g", "beta", "A_log", "dt_bias")


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, dtype, device, options, states=None):
    """Tensors of a call by name, leaves that require gradients; states: of how many sequences."""
    b, t, h, keys, values = shape
    q, k, g = (torch.randn(b, t, h, keys, device=device) for _ in range(3))
    if not options.get("qk_l2norm"):
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    made = {"q": q, "k": k, "v": torch.randn(b, t, h, values, device=device), "g": g}
    made["beta"] = torch.randn(b, t, h, device=device)
    if not options.get("beta_sigmoid"):
        made["beta"] = torch.sigmoid(made["beta"])
    if not options.get("gate"):
        made["g"] = -5 * torch.rand(b, t, h, keys, device=device) ** 3
    made = {name: x.to(dtype) for name, x in made.items()}
    if options.get("gate"):
        made["A_log"] = torch.randn(h, device=device) * 0.3
        made["dt_bias"] = torch.randn(h, keys, device=device) * 0.5
    if states is not None:
        wide = (values, keys) if options.get("state_layout") == "vk" else (keys, values)
        made["initial_state"] = torch.randn(states, h, *wide, device=device)
    return {name: x.requires_grad_() for name, x in made.items()}


def gradients(function, tensors, options, grads, final=True):
    """Gradients by name, given those of the output and the final state, or None for one of them."""
    results = function(**tensors, **options, output_final_state=final)
    used = [(x, y) for x, y in zip(results, grads, strict=True) if y is not None]
    ends, given = zip(*used, strict=True)
    found = torch.autograd.grad(ends, list(tensors.values()), given, allow_unused=True)
    pairs = zip(tensors.items(), found, strict=True)
    return {name: torch.zeros_like(x) if y is None else y for (name, x), y in pairs}


def check(tensors, options, bounds=None, grads=("out", "final")):
    """All gradients of one call within bounds of fp64."""
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    results = chunk_kda_reference(**exact, **options, output_final_state=True)
    dtypes = (tensors["v"].dtype, torch.float32)
    given = [
        torch.randn_like(x).to(dtype) if name in grads else None
        for name, x, dtype in zip(("out", "final"), results, dtypes, strict=True)
    ]
    doubles = [None if x is None else x.double() for x in given]
    expected = gradients(chunk_kda_reference, exact, options, doubles)
    found = gradients(chunk_kda, tensors, options, given)
    bounds = bounds or BOUNDS[tensors["q"].dtype]
    for name, x in found.items():
        assert x.dtype == tensors[name].dtype and x.shape == tensors[name].shape
        assert x.isfinite().all(), name
        if name == "A_log":  # a sum over all tokens and channels, which may cancel
            terms = expected["g"] * (exact["g"] + exact["dt_bias"])
            assert (x - expected[name]).norm() < bounds[1] * terms.norm()
        else:
            assert relative(x, expected[name]) < bounds[name in LOOSE], name


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_lengths_in_one_row(device, layout):
    options = {**K3, "cu_seqlens": torch.tensor(PACKED), "state_layout": layout}
    tensors = inputs((1, 277, 1, 60, 100), torch.bfloat16, device, options, states=7)
    check(tensors, options)


def test_heads_and_batches(device):
    for shape, scale in (((2, 65, 3, 24, 40), None), ((1, 1, 3, 24, 40), 0.7)):
        options = {"scale": scale}
        check(inputs(shape, torch.bfloat16, device, options, states=shape[0]), options)


def test_full_width(device):
    check(inputs((1, 130, 1, 128, 128), torch.bfloat16, device, K3), K3)


def test_fp32(device):
    """K3's form; then keys of cosine 0.5 and hardly any decay: the inverse matters."""
    check(inputs((1, 70, 1, 40, 24), torch.float32, device, K3, states=1), K3)
    check(similar_keys(torch.float32, device), {})


def test_gate_at_its_bound(device):
    """Every token decays by e^-5 or not at all; q, k and z differ in their strides."""
    options = {"gate": "sigmoid", "scale": 0.5}
    tensors = inputs((2, 70, 2, 40, 24), torch.float16, device, options)
    with torch.no_grad():
        tensors["g"].copy_(torch.where(tensors["g"] > 0.5, 20.0, -20.0))
        tensors["g"][:, 30:50] = 20.0
        tensors["g"][:, ::7, :, ::5] = 0.5  # a gradient of z lives here
    tensors["q"] = torch.cat([tensors["q"], tensors["k"]], -1)[..., :40]
    check(tensors, options)


def test_gate_without_a_bound(device):
    options = {"gate": "softplus", "qk_l2norm": True}
    for strength in (1.0, 8.0):  # down to e^-40 per token
        tensors = inputs((1, 100, 1, 24, 40), torch.float16, device, options)
        tensors["g"] = (tensors["g"].detach() * strength).requires_grad_()
        check(tensors, options)


def similar_keys(dtype, device):
    """Inputs whose keys have a mutual cosine of 0.5, with strong writes and hardly any decay."""
    tensors = inputs((1, 130, 3, 24, 40), torch.float32, device, {})
    with torch.no_grad():
        common = torch.nn.functional.normalize(torch.randn(1, 1, 3, 24, device=device), dim=-1)
        tensors["k"].copy_(torch.nn.functional.normalize(common + tensors["k"], dim=-1))
        tensors["g"].mul_(0.01)
        tensors["beta"].mul_(0.1).add_(0.9)
    return {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items()}


def test_keys_that_resemble_each_other(device):
    check(similar_keys(torch.bfloat16, device), {}, bounds=(2e-2, 5e-2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_thousand_tokens(device, dtype):
    """The gradient of the gate must not lose digits with the context's length."""
    if device == "cpu":
        pytest.skip("too much for the emulator")
    for options in (K3, {"gate": "softplus", "qk_l2norm": True}):
        check(inputs((1, 1000, 3, 128, 128), dtype, device, options, states=1), options)
    options = {**K3, "cu_seqlens": torch.tensor([0, 300, 300, 1000])}
    check(inputs((1, 1000, 96, 128, 128), dtype, device, options, states=3), options)


@pytest.mark.parametrize("grads", [("final",), ("out",)])
def test_one_result_alone(device, grads):
    tensors = inputs((2, 65, 3, 24, 40), torch.bfloat16, device, {}, states=2)
    with torch.no_grad():
        tensors["g"].mul_(0.02)  # the first state still counts in the last
    check(tensors, {}, grads=grads)


def test_tokens_that_are_not_written(device):
    """beta = 0 has a gradient."""
    tensors = inputs((2, 65, 3, 24, 40), torch.bfloat16, device, {})
    with torch.no_grad():
        tensors["beta"][:, ::3] = 0
    check(tensors, {})


def test_strided_inputs_and_gradients(device):
    tensors = inputs((2, 65, 3, 24, 40), torch.bfloat16, device, {})
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    moved = dict(tensors)
    moved["q"] = torch.cat([tensors["q"], tensors["k"]], -1)[..., :24]
    moved["v"] = tensors["v"].transpose(1, 2).contiguous().transpose(1, 2)
    moved["g"] = tensors["g"].mT.contiguous().mT
    moved["beta"] = tensors["beta"].transpose(1, 2).contiguous().transpose(1, 2)
    chunk_kda(**moved)[0].sum().backward()  # one number seen everywhere
    chunk_kda_reference(**exact)[0].sum().backward()
    for name, x in tensors.items():
        assert relative(x.grad, exact[name].grad) < BOUNDS[torch.bfloat16][name in LOOSE], name
    tensors = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    grad = torch.randn(2, 65, 40, 3, device=device).bfloat16().mT
    found = gradients(chunk_kda, tensors, {}, [grad, None], False)
    expected = gradients(chunk_kda_reference, exact, {}, [grad.double(), None], False)
    for name, x in found.items():
        assert relative(x, expected[name]) < BOUNDS[torch.bfloat16][name in LOOSE], name


def test_gradients_do_not_vary(device):
    tensors = inputs((2, 65, 3, 24, 40), torch.bfloat16, device, {}, states=2)
    runs = [
        torch.autograd.grad(chunk_kda(**tensors)[0].float().square().sum(), tensors.values())
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_no_tokens(device):
    tensors = inputs((2, 0, 3, 24, 40), torch.bfloat16, device, {}, states=2)
    out, final = chunk_kda(**tensors, output_final_state=True)
    grad = torch.randn_like(final)
    torch.autograd.backward([out, final], [torch.zeros_like(out), grad])
    assert torch.equal(tensors["initial_state"].grad, grad)
    assert all(x.grad.shape == x.shape for x in tensors.values())


def test_operator_is_sound(device):
    tensors = inputs((2, 65, 3, 24, 40), torch.bfloat16, device, {}, states=2)
    q, k, v, g, beta, initial = tensors.values()
    arguments = (q, k, v, g, beta, None, None, initial, None, 0.2, 0, -5.0, False, False, False)
    torch.library.opcheck(torch.ops.minitriton.chunk_kda, arguments)


def test_torch_compile_without_graph_breaks(device):
    tensors = inputs((2, 65, 3, 24, 40), torch.bfloat16, device, {}, states=2)

    def loss(**tensors):
        out, final = chunk_kda(**tensors, output_final_state=True)
        return out.float().square().sum() + final.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(**tensors), tensors.values())
    theirs = torch.autograd.grad(loss(**tensors), tensors.values())
    torch.testing.assert_close(ours, theirs)
