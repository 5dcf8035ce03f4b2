"""KDA forward against the fp64 recurrence: shapes, gates, states, packed sequences, causality."""

from itertools import accumulate

import pytest
import torch

from minitriton.kernels import kda_forward
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.kda import chunk_kda, chunk_kda_reference
from minitriton.kernels.kda_chunks import chunks_of
from tests.kernels.test_warp_split import once

# these kernels take long in the emulator: once, with copies that land at random
pytestmark = [once, pytest.mark.usefixtures("at_random")]

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-3, torch.float16: 5e-3}
K3 = {"gate": "sigmoid", "qk_l2norm": True, "beta_sigmoid": True}


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def inputs(shape, dtype, device, gate="sigmoid", strength=2.0):
    """q, k, v, g, beta and the gate's parameters for (B, T, H, K, V); beta as logits."""
    b, t, h, keys, values = shape
    q, k, g = (torch.randn(b, t, h, keys, device=device) for _ in range(3))
    g = g * strength if gate else -torch.nn.functional.softplus(g * strength)
    v, beta = torch.randn(b, t, h, values, device=device), torch.randn(b, t, h, device=device)
    parameters = {}
    if gate:
        parameters = {
            "A_log": torch.randn(h, device=device) * 0.3,
            "dt_bias": torch.randn(h, keys, device=device) * 0.5,
        }
    return [x.to(dtype) for x in (q, k, v, g, beta)], parameters


def states(count, h, keys, values, device):
    return torch.randn(count, h, keys, values, device=device) * 0.3


def check(tensors, options, bound=None):
    """Output and state of one call within a bound of fp64; gives both."""
    options = {**options, "output_final_state": True}
    out, final = chunk_kda(*tensors, **options)
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }
    expected, last = chunk_kda_reference(*(x.double() for x in tensors), **exact)
    bound = BOUNDS[out.dtype] if bound is None else bound
    assert out.dtype == tensors[2].dtype and out.is_contiguous() and out.shape == tensors[2].shape
    assert final.dtype == torch.float32 and final.is_contiguous() and final.shape == last.shape
    assert relative(out, expected) < bound
    assert relative(final, last) < bound
    return out, final


def test_lengths(device):
    for tokens in (1, 130):
        heads = 2 if tokens > 1 else 40  # one product q . k may nearly vanish
        tensors, parameters = inputs((1, tokens, heads, 64, 64), torch.bfloat16, device)
        check(tensors, {**K3, **parameters})


def test_batch_of_fp16(device):
    tensors, parameters = inputs((2, 66, 3, 64, 64), torch.float16, device)
    check(tensors, {**K3, **parameters})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_many_chunks_and_heads(device, dtype):
    if device == "cpu":
        pytest.skip("too much for the emulator")
    tensors, parameters = inputs((2, 1000, 48, 128, 128), dtype, device)
    check(tensors, {**K3, **parameters})


@pytest.mark.parametrize(
    ("keys", "values", "dtype"),
    [
        (128, 64, torch.float32),
        (60, 100, torch.bfloat16),
        (1, 3, torch.bfloat16),
    ],
    ids=str,
)
def test_widths(device, keys, values, dtype):
    tensors, parameters = inputs((1, 70, 1, keys, values), dtype, device)
    initial = states(1, 1, keys, values, device)
    check(tensors, {**K3, **parameters, "initial_state": initial})


@pytest.mark.parametrize("columns", [64, 32])
def test_wide_programs_of_the_scan(device, columns, monkeypatch):
    monkeypatch.setattr(kda_forward, "PROGRAMS", 0)
    monkeypatch.setattr(kda_forward, "WIDEST", columns)
    tensors, parameters = inputs((1, 80, 1, 128, 2 * columns), torch.bfloat16, device)
    check(tensors, {**K3, **parameters})


@pytest.mark.parametrize(
    ("gate", "dtype"), [(None, torch.float32), ("softplus", torch.bfloat16)], ids=str
)
def test_gates_without_a_bound(device, gate, dtype):
    """From nearly no decay to e^-40 per token, several of them in one tile of 16."""
    tensors, parameters = inputs((1, 70, 2, 64, 64), dtype, device, gate, strength=8.0)
    options = {**K3, **parameters, "gate": gate}
    if gate is None:
        tensors[4], options["beta_sigmoid"] = torch.sigmoid(tensors[4]), False
        tensors[3][:, 20:23, 1] = -float("inf")  # everything is forgotten
    out, _ = check(tensors, options)
    assert out.isfinite().all()


def test_gates_at_their_ends(device):
    """All of the floor and nothing at all; a floor beyond -5 takes the general form."""
    for floor in (-5.0, -12.0):
        tensors, parameters = inputs((1, 70, 2, 64, 64), torch.bfloat16, device)
        tensors[3][:, :, 0], tensors[3][:, :, 1] = 50.0, -50.0
        check(tensors, {**K3, **parameters, "gate_floor": floor})


def test_keys_that_resemble_each_other(device):
    """Cosine 0.5 keeps most digits, 0.9 stays finite; hardly any decay, beta near 1."""
    for cosine, bound in ((0.5, 1e-2), (0.9, 0.5)):
        tensors, parameters = inputs((1, 70, 2, 64, 64), torch.float32, device)
        common = torch.randn(1, 1, 1, 64, device=device)
        tensors[1] = cosine**0.5 * common + (1 - cosine) ** 0.5 * tensors[1]
        tensors[3] = tensors[3] - 9.0
        tensors[4] = tensors[4] + 3.0
        out, final = check([x.bfloat16() for x in tensors], {**K3, **parameters}, bound)
        assert out.isfinite().all() and final.isfinite().all()
        if cosine == 0.5:
            initial = states(1, 2, 64, 64, device)
            check(tensors, {**K3, **parameters, "initial_state": initial})


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_states_in_and_out(device, layout):
    tensors, parameters = inputs((2, 70, 2, 64, 64), torch.bfloat16, device)
    initial = states(2, 2, 64, 64, device)
    initial = initial.mT if layout == "vk" else initial
    options = {**K3, **parameters, "initial_state": initial, "state_layout": layout}
    out, _ = check(tensors, options)
    alone, nothing = chunk_kda(*tensors, **options)
    assert nothing is None and torch.equal(alone, out)


def test_segments_compose(device):
    """Two calls, the second from the state of the first: bit for bit if cut between chunks."""
    tensors, parameters = inputs((1, 150, 2, 64, 64), torch.bfloat16, device)
    options = {**K3, **parameters, "output_final_state": True}
    whole, last = chunk_kda(*tensors, **options)
    for cut in (128, 77):
        head, state = chunk_kda(*(x[:, :cut] for x in tensors), **options)
        tail, final = chunk_kda(*(x[:, cut:] for x in tensors), **options, initial_state=state)
        out = torch.cat((head, tail), 1)
        if cut == 128:
            assert torch.equal(out, whole) and torch.equal(final, last)
        assert relative(out, whole.double()) < 6e-3 and relative(final, last.double()) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_sequences(device, dtype):
    lengths = [0, 1, 15, 16, 17, 0, 0, 63, 64, 65, 0]
    bounds = [0, *accumulate(lengths)]
    where = {"dtype": torch.int32, "device": device}  # on either side
    ends = torch.tensor(bounds, **where if dtype == torch.bfloat16 else {})
    tensors, parameters = inputs((1, sum(lengths), 2, 64, 64), dtype, device)
    initial = states(len(lengths), 2, 64, 64, device)
    options = {**K3, **parameters, "initial_state": initial}
    out, final = check(tensors, {**options, "cu_seqlens": ends})
    assert torch.equal(final[0], initial[0]) and torch.equal(final[10], initial[10])
    if dtype == torch.float32:
        return
    begin, end = bounds[9], bounds[10]
    options = {**K3, **parameters, "initial_state": initial[9:10], "output_final_state": True}
    alone, state = chunk_kda(*(x[:, begin:end] for x in tensors), **options)
    assert torch.equal(alone, out[:, begin:end]) and torch.equal(state[0], final[9])


@pytest.mark.parametrize("gate", ["sigmoid", "softplus"])
def test_later_tokens_change_no_bit(device, gate):
    tensors, parameters = inputs((1, 128, 2, 64, 64), torch.bfloat16, device, gate, 4.0)
    options = {**K3, **parameters, "gate": gate}
    before, _ = chunk_kda(*tensors, **options)
    for token in (1, 7, 16, 40, 63, 64, 100) if gate == "sigmoid" else (7, 40, 64):
        others = [x.clone() for x in tensors]
        for x in others:
            x[:, token:] = 10 * torch.randn_like(x[:, token:])
        after, _ = chunk_kda(*others, **options)
        assert torch.equal(before[:, :token], after[:, :token])
        assert not torch.equal(before[:, token], after[:, token])


def test_views_are_read_in_place(device, monkeypatch):
    b, t, h, d = 2, 40, 2, 64
    (q, k, v, g, beta), parameters = inputs((b, t, h, d, d), torch.bfloat16, device)
    options = {**K3, **parameters}
    fused = torch.cat([x.flatten(2) for x in (q, k, v, g)], 2)
    views = [x.unflatten(2, (h, d)) for x in fused.split(h * d, 2)]
    views.append(beta.transpose(1, 2).contiguous().transpose(1, 2))
    expected, _ = chunk_kda(q, k, v, g, beta, **options)
    assert torch.equal(chunk_kda(*views, **options)[0], expected)
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, g)]
    assert torch.equal(chunk_kda(*head_first, beta, **options)[0], expected)
    last = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v, g)]
    assert torch.equal(chunk_kda(*last, beta, **options)[0], expected)
    monkeypatch.setattr(kda_forward, "FARTHEST", 0)  # as if tokens lay too far apart
    assert torch.equal(chunk_kda(*views, **options)[0], expected)


def test_scale_and_mixed_dtypes(device):
    """An own scale; g and beta in fp32 beside bf16, no dt_bias; decays of a raw g."""
    (q, k, v, g, beta), parameters = inputs((1, 65, 2, 64, 64), torch.bfloat16, device)
    del parameters["dt_bias"]
    options = {**K3, **parameters, "scale": 0.7}
    check((q, k, v, g.float(), beta.float()), options)


def test_nothing_to_do(device):
    for shape in ((1, 0, 2, 64, 64), (0, 5, 2, 64, 64), (2, 5, 0, 64, 64)):
        tensors, parameters = inputs(shape, torch.bfloat16, device)
        initial = states(shape[0], shape[2], 64, 64, device)
        options = {**K3, **parameters, "output_final_state": True, "initial_state": initial}
        out, final = chunk_kda(*tensors, **options)
        assert out.shape == tensors[2].shape
        assert torch.equal(final, initial) or shape[1] > 0


def test_chunk_tables():
    chunk, sequence = chunks_of(1, 195, torch.tensor([0, 65, 65, 195]), torch.device("cpu"))
    assert chunk.tolist() == [[0, 0, 64], [0, 64, 1], [2, 65, 64], [2, 129, 64], [2, 193, 2]]
    assert sequence.tolist() == [[0, 2], [2, 0], [2, 3]]
    chunk, sequence = chunks_of(2, 70, None, torch.device("cpu"))
    assert chunk.tolist() == [[0, 0, 64], [0, 64, 6], [1, 70, 64], [1, 134, 6]]
    assert sequence.tolist() == [[0, 2], [2, 2]]


def test_operator_is_sound(device):
    tensors, parameters = inputs((1, 20, 2, 64, 64), torch.bfloat16, device)
    initial, ends = states(2, 2, 64, 64, device), torch.tensor([0, 7, 20])
    rest = (0.2, 1, -5.0, True, True, False)
    torch.library.opcheck(
        torch.ops.minitriton.chunk_kda,
        (*tensors, *parameters.values(), initial, ends, *rest),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_torch_compile_without_graph_breaks(device):
    tensors, parameters = inputs((1, 70, 2, 64, 64), torch.bfloat16, device)
    options = {**K3, **parameters, "output_final_state": True}

    def layer(*x):
        out, final = chunk_kda(*x, **options)
        return out * 2, final

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(compiled(*tensors), layer(*tensors), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"q": lambda x: x[0]}, r"'q': shape \(8, 2, 16\); it must be \[B, T, H, K\]"),
        ({"q": lambda x: x.repeat(1, 1, 1, 9)}, "'q': shape .* with 1 <= K <= 128"),
        ({"q": lambda x: x.double()}, "'q': dtype torch.float64 is not supported"),
        ({"k": lambda x: x[..., :8]}, r"'k': shape \(1, 8, 2, 8\) differs from that of 'q'"),
        ({"k": lambda x: x.float()}, "'k': dtype torch.float32 differs"),
        ({"v": lambda x: x[:, :4]}, r"'v': shape \(1, 4, 2, 16\); it must be \[1, 8, 2, V\]"),
        ({"v": lambda x: x.float()}, "'v': torch.float32 on cpu.*'q' needs torch.bfloat16"),
        ({"g": lambda x: x[..., :3]}, r"'g': shape \(1, 8, 2, 3\); it must be \(1, 8, 2, 16\)"),
        ({"g": lambda x: None}, "'g': expected a tensor, got NoneType"),
        ({"beta": lambda x: x[..., None]}, r"'beta': shape \(1, 8, 2, 1\); it must be \(1, 8, 2\)"),
        ({"beta": lambda x: x.to("meta")}, "'beta': device meta differs"),
        ({"scale": 0.0}, "'scale': must be a positive number, got 0.0"),
        ({"gate": "tanh"}, "'gate': must be None, 'sigmoid' or 'softplus', got 'tanh'"),
        ({"gate": None}, "'A_log': without a gate there is no use for it"),
        ({"A_log": None}, "'A_log': expected a tensor, got NoneType"),
        ({"A_log": lambda x: x.bfloat16()}, "'A_log': dtype torch.bfloat16; it must be"),
        ({"dt_bias": lambda x: x[0]}, r"'dt_bias': shape \(16,\); it must be \(2, 16\)"),
        ({"gate_floor": 5.0}, "'gate_floor': must be a negative number, got 5.0"),
        ({"state_layout": "kk"}, "'state_layout': must be 'kv' or 'vk', got 'kk'"),
        ({"initial_state": torch.zeros(2, 2, 16, 16)}, r"'initial_state': shape .* \(1, 2, 16, 16"),
        ({"initial_state": torch.zeros(1, 2, 16, 16).half()}, "'initial_state': dtype"),
        ({"cu_seqlens": [0, 8]}, "'cu_seqlens': must be a tensor of int64 or int32, got list"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, "'cu_seqlens': must be a tensor of int64"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"'cu_seqlens': shape \(0,\)"),
        ({"cu_seqlens": torch.tensor([0, 7])}, "'cu_seqlens': runs from 0 to 7; .*the 8 tokens"),
        ({"cu_seqlens": torch.tensor([1, 8])}, "'cu_seqlens': runs from 1 to 8"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, "falls from 5 to 3 at index 2"),
    ],
)  # fmt: skip
def test_refused_before_launch(change, match):
    tensors, parameters = inputs((1, 8, 2, 16, 16), torch.bfloat16, "cpu")
    names = ("q", "k", "v", "g", "beta")
    given = {**dict(zip(names, tensors, strict=True)), **K3, **parameters}
    for name, new in change.items():
        given[name] = new(given[name]) if callable(new) else new
    with pytest.raises(KernelArgumentError, match=match):
        chunk_kda(**given)


def test_packed_sequences_need_one_row():
    tensors, parameters = inputs((2, 8, 2, 16, 16), torch.bfloat16, "cpu")
    with pytest.raises(KernelArgumentError, match="packed sequences need a batch of 1; 'q' has 2"):
        chunk_kda(*tensors, **K3, **parameters, cu_seqlens=torch.tensor([0, 8]))
