"""The mix over depth against fp64, as a torch operator, and refused arguments."""

import pytest
import torch

from minitriton.kernels import attn_res
from minitriton.kernels.attn_res import attn_res_mix, attn_res_mix_reference
from minitriton.kernels.attn_res_phases import (
    attn_res_merge,
    attn_res_phase1,
    attn_res_phase1_reference,
)
from minitriton.kernels.attn_res_schedule import BlockAttnRes
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.scalar_residual import scalar_residual, scalar_residual_reference

# relative rms: outputs, gradients of the sources, gradients of query and weights
BOUNDS = {
    torch.float32: (5e-6, 1e-5, 1e-5),
    torch.bfloat16: (5e-3, 8e-3, 2e-2),
    torch.float16: (1e-3, 2e-3, 4e-3),
}
FP32, BF16, FP16 = BOUNDS
STACKED = [
    (1, 3, 96, FP32), (5, 3, 130, BF16), (9, 17, 8, FP16), (3, 2, 1, FP32), (40, 2, 33, FP32),
]  # fmt: skip
LISTED = [  # number of sources, leading dimensions, d, dtype, delta, norm, mix returned
    (1, (3,), 96, BF16, True, True, True),
    (2, (2, 2), 130, FP32, False, True, False),
    (5, (1,), 1000, BF16, True, False, False),
    (9, (2, 1, 3), 96, BF16, True, True, True),
    (17, (4,), 33, FP32, True, True, False),
    (6, (), 64, FP32, False, False, True),
]


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def source(shape, dtype, device):
    scale = 0.3 + 3 * torch.rand((*shape[:-1], 1), device=device)
    return (torch.randn(shape, device=device) * scale).to(dtype).requires_grad_()


def weights(shape, dtype, device):
    return (1 + 0.2 * torch.randn(shape, device=device)).to(dtype).requires_grad_()


def inputs(shape, dtype, device, query_scale=None, parameters=None):
    """Stacked sources, query, norm weight; by default logits have a standard deviation of 1.5."""
    query_scale = 1.5 / shape[-1] ** 0.5 if query_scale is None else query_scale
    query = (torch.randn(shape[-1], device=device) * query_scale).to(parameters or dtype)
    norm_weight = weights(shape[-1], parameters or dtype, device)
    return [source(shape, dtype, device), query.requires_grad_(), norm_weight]


def doubled(value):
    if isinstance(value, list):
        return [doubled(x) for x in value]
    return value.detach().double().requires_grad_() if isinstance(value, torch.Tensor) else value


def tuple_of(value):
    return value if isinstance(value, tuple) else (value,)


def check(sources, query, weight, bounds, eps=1e-5, **options):
    """Results and gradients within bounds of fp64; one source: no slope of softmax."""
    exact, wanted = doubled([sources, query, weight]), {k: doubled(v) for k, v in options.items()}
    outs = tuple_of(attn_res_mix(sources, query, weight, eps, **options))
    expected = tuple_of(attn_res_mix_reference(*exact, eps, **wanted))
    last = sources[-1]
    grads = [torch.randn(out.shape, device=out.device).to(out.dtype) for out in outs]
    torch.autograd.backward(outs, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    for out, true in zip(outs, expected, strict=True):
        assert out.dtype == last.dtype and out.is_contiguous() and out.shape == last.shape
        assert relative(out, true) < bounds[0]
    pairs = [(sources, exact[0])]
    if isinstance(sources, list):
        pairs = list(zip(sources, exact[0], strict=True))
    pairs.append((options.get("delta"), wanted.get("delta")))
    slopes = [(query, exact[1]), (weight, exact[2])]
    norm = (options.get("out_weight"), wanted.get("out_weight"))
    for part, bound in ((pairs, bounds[1]), ([*slopes, norm], bounds[2])):
        for mine, true in part:
            if mine is None:
                continue
            assert mine.grad.dtype == mine.dtype and mine.grad.shape == mine.shape
            if len(sources) == 1 and (mine is query or mine is weight):
                assert mine.grad.abs().max() < 1e-5
            else:
                assert relative(mine.grad, true.grad) < bound


@pytest.mark.parametrize(("count", "tokens", "d", "dtype"), STACKED, ids=str)
def test_stacked(device, count, tokens, d, dtype):
    check(*inputs((count, tokens, d), dtype, device), BOUNDS[dtype])


@pytest.mark.parametrize(("count", "lead", "d", "dtype", "add", "norm", "mixed"), LISTED, ids=str)
def test_listed(device, count, lead, d, dtype, add, norm, mixed):
    _, query, weight = inputs((1, d), dtype, device)
    sources = [source((*lead, d), dtype, device) for _ in range(count)]
    options = {"return_mixed": mixed}
    if add:
        options["delta"] = source((*lead, d), dtype, device)
    if norm:
        options |= {"out_weight": weights(d, dtype, device), "out_eps": 1e-3}
    check(sources, query, weight, BOUNDS[dtype], **options)


def test_stacked_with_delta_and_leading_dimensions(device):
    values, query, weight = inputs((4, 2, 3, 50), FP32, device)
    delta = source((2, 3, 50), FP32, device)
    check(values, query, weight, BOUNDS[FP32], delta=delta)
    check(*inputs((3, 2, 2, 50), FP32, device), BOUNDS[FP32])


def test_some_results_without_gradients(device):
    """Only the sum, or only the mix before the norm, is used further on."""
    _, query, weight = inputs((1, 40), FP32, device)
    sources = [source((3, 40), FP32, device) for _ in range(3)]
    options = {"delta": source((3, 40), FP32, device), "out_weight": weights(40, FP32, device)}
    given = [*sources, query, weight, *options.values()]
    for used in (1, 2):
        out = attn_res_mix(sources, query, weight, **options, return_mixed=True)[used]
        expected = attn_res_mix_reference(sources, query, weight, **options, return_mixed=True)
        ours = torch.autograd.grad(out.sum(), given)
        theirs = torch.autograd.grad(
            expected[used].sum(), given, allow_unused=True, materialize_grads=True
        )
        torch.testing.assert_close(ours, theirs)


def test_fp32_parameters_of_bf16_values(device):
    check(*inputs((4, 5, 96), BF16, device, parameters=FP32), (5e-3, 8e-3, 1e-5))


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_widest_rows(device, dtype):
    _, query, weight = inputs((1, 8192), dtype, device)
    sources = [source((2, 8192), dtype, device) for _ in range(2)]
    check(sources, query, weight, BOUNDS[dtype])
    rest = {"delta": source((2, 8192), dtype, device), "out_weight": weights(8192, dtype, device)}
    given = [x.detach().requires_grad_() for x in (*sources, query, weight)]
    check(given[:2], *given[2:], BOUNDS[dtype], **rest)


@pytest.mark.parametrize("d", [768, 1536, 2048, 3584, 1000])
@pytest.mark.parametrize("whole", [False, True])
def test_programs_for_hopper(device, hopper, d, whole):
    """More elements a thread, rows that end with their tile, sources copied ahead."""
    sources = [source((2, d), BF16, device) for _ in range(6)]
    _, query, weight = inputs((1, d), BF16, device)
    options = {"return_mixed": True} if whole else {}
    if whole:
        options |= {"delta": source((2, d), BF16, device), "out_weight": weights(d, BF16, device)}
    check(sources, query, weight, BOUNDS[BF16], **options)


@pytest.mark.parametrize("sign", [1, -1])
def test_large_logits_keep_their_precision(device, sign):
    values, query, weight = inputs((5, 17, 96), FP32, device, query_scale=sign * 10.0)
    assert attn_res_mix(values, query, weight).isfinite().all()
    check(values, query, weight, (1e-5, 1e-4, 1e-3))
    ordered = torch.arange(1.0, 6.0, device=device).view(5, 1, 1) * torch.ones(5, 2, 96).to(device)
    ones = torch.ones(96, device=device)
    for direction in (1, -1):  # the peak at the last and at the first source
        values = ordered if direction == 1 else ordered.flip(0)
        for size in (1e4, 1.0):  # far beyond what is rescaled for, and at its edge
            out = attn_res_mix(values, size * ones, ones, 30.0)
            expected = attn_res_mix_reference(values.double(), size * ones.double(), ones, 30.0)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_zero_query_is_the_mean(device):
    values, _, weight = inputs((7, 3, 40), FP32, device)
    out = attn_res_mix(values, torch.zeros(40, device=device), weight)
    torch.testing.assert_close(out, values.mean(0))


def test_zero_values_and_eps(device):
    values, query, weight = inputs((4, 3, 64), FP32, device)
    with torch.no_grad():
        values[1] = 0
        values[2] *= 1e-3
    check(values, query, weight, BOUNDS[FP32], eps=0.5)


def test_programs_that_own_several_tokens(device, monkeypatch):
    monkeypatch.setattr(attn_res, "PARTIALS", 2 * 1024)
    values, query, weight = inputs((3, 7, 1000), FP32, device)  # several warps
    check(values, query, weight, BOUNDS[FP32], out_weight=weights(1000, FP32, device))


def test_gradients_do_not_vary(device):
    _, query, weight = inputs((1, 100), BF16, device)
    sources = [source((11, 100), BF16, device) for _ in range(3)]
    norm = weights(100, BF16, device)
    given = [*sources, query, weight, norm]
    runs = [
        torch.autograd.grad(
            attn_res_mix(sources, query, weight, out_weight=norm).square().sum(), given
        )
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_strided_values(device):
    weight, query = 1 + 0.1 * torch.randn(48, device=device), torch.randn(48, device=device)
    base = torch.randn(5, 4, 2 * 48, device=device)
    thin = torch.randn(48, 4, 2, device=device).permute(1, 2, 0)
    for values in (
        base.transpose(0, 1)[:, :, :48],
        base[:, :1, 48:].expand(5, 4, 48),
        thin,
        [base[0, :, :48], base[1, :, 48:], base[2, :, :48]],  # one distance of rows
        [base[0, :, :48], thin[:, 0], torch.randn(4, 48, device=device)],  # three
    ):
        given = (
            [x.detach().requires_grad_() for x in values] if isinstance(values, list) else values
        )
        parameters = query.clone().requires_grad_(), weight.clone().requires_grad_()
        check(given if given is not values else values.requires_grad_(), *parameters, BOUNDS[FP32])
    tensors = inputs((2, 3, 33), FP32, device)
    exact = doubled(tensors)
    attn_res_mix(*tensors).sum().backward()  # the incoming gradient is one number seen everywhere
    attn_res_mix_reference(*exact).sum().backward()
    assert relative(tensors[0].grad, exact[0].grad) < 1e-5


def test_no_tokens(device):
    values, query, weight = inputs((2, 0, 24), FP32, device)
    norm = weights(24, FP32, device)
    out, total = attn_res_mix([values[0], values[1]], query, weight, delta=values[0],
                              out_weight=norm)  # fmt: skip
    out.sum().backward()
    assert out.shape == total.shape == (0, 24) and values.grad.shape == (2, 0, 24)
    assert not any(x.grad.any() for x in (query, weight, norm))
    m, total, acc = attn_res_phase1(
        [values.detach()[0]], query.detach()[None], weight.detach()[None]
    )
    assert m.shape == total.shape == (1, 0) and acc.shape == (1, 0, 24)


def test_operators_are_sound(device):
    values, query, weight = inputs((3, 4, 20), FP32, device)
    operator, norm = torch.ops.minitriton.attn_res, weights(20, FP32, device)
    torch.library.opcheck(operator, ([values], query, weight, None, None, 1e-5, 1e-5, True, False))
    listed = [torch.randn(20, 4, device=device).T.requires_grad_() for _ in range(2)]
    torch.library.opcheck(
        operator, (listed, query, weight, listed[0], norm, 1e-5, 1e-5, False, True)
    )


def test_torch_compile_without_graph_breaks(device):
    values, query, weight = inputs((3, 4, 50), FP32, device)
    norm = weights(50, FP32, device)

    def step(v, q, n, w):
        h, prefix = attn_res_mix([v[0] * 2, v[1]], q, n, delta=v[2], out_weight=w)
        return attn_res_mix(v, q, n) + h + prefix

    given = (values, query, weight, norm)
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
    expected = step(*given)
    torch.testing.assert_close(out, expected)
    ours = torch.autograd.grad(out.square().sum(), given)
    theirs = torch.autograd.grad(expected.square().sum(), given)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("count", "lead", "d", "queries", "dtype"),
    [(3, (2, 3), 33, 7, BF16), (5, (66,), 64, 23, BF16), (16, (3,), 64, 5, FP32)],
    ids=str,
)  # fmt: skip
def test_two_phases(device, count, lead, d, queries, dtype):
    bank = [source((*lead, d), dtype, device).detach() for _ in range(count)]
    asked = (torch.randn(queries, d, device=device) * 1.5 / d**0.5).to(dtype)
    norms = weights((queries, d), dtype, device).detach()
    parts = attn_res_phase1(bank, asked, norms)
    exact = attn_res_phase1_reference(*map(doubled, (bank, asked, norms)))
    for mine, true, bound in zip(parts, exact, (5e-6, 5e-6, BOUNDS[dtype][0]), strict=True):
        assert mine.shape == true.shape and relative(mine, true) < bound
    prefix, delta = (source((*lead, d), dtype, device).detach() for _ in range(2))
    options = {"delta": delta, "out_weight": norms[0], "return_mixed": True}
    for q in {0, queries - 1}:
        share, one = [part[q] for part in parts], (asked[q], norms[q])
        for more in ({}, options):
            ours = attn_res_merge(*share, prefix, *one, **more)
            wanted = attn_res_mix_reference(
                doubled([*bank, prefix]), *map(doubled, one),
                **{name: doubled(value) for name, value in more.items()},
            )  # fmt: skip
            for mine, true in zip(tuple_of(ours), tuple_of(wanted), strict=True):
                assert mine.dtype == dtype and relative(mine, true) < BOUNDS[dtype][0]


def stack_of(sub_layers, embedding, queries, norms, per_block, read):
    """Block AttnRes straight from eq. 10: block sums, each sub-layer's output kept."""
    outs, blocks = [], [embedding]
    for i, sub_layer in enumerate(sub_layers):
        start = i - i % per_block
        if i and i == start:
            blocks.append(sum(outs[i - per_block : i]))
        partial = [] if i == start else [sum(outs[start:i])]
        outs.append(sub_layer(read([*blocks, *partial], queries[i], norms[i])))
    tail = len(outs) % per_block or per_block
    return read([*blocks, sum(outs[-tail:])], queries[-1], norms[-1])


@pytest.mark.parametrize("count", [7, 8])
def test_block_schedule(device, count):
    """Streaming, in two phases, and the definition; with gradients; the full form for one block."""
    d, per_block = 40, 4
    embedding = torch.randn(2, 3, d, device=device, requires_grad=True)
    queries = (torch.randn(count + 1, d, device=device) / d**0.5).requires_grad_()
    norms = weights((count + 1, d), FP32, device)
    matrices = [torch.randn(d, d, device=device) / d**0.5 for _ in range(count)]
    sub_layers = [lambda h, w=w: torch.tanh(h @ w) for w in matrices]
    given = (embedding, queries, norms)

    def streamed(embedding, queries, norms, **options):
        reads = BlockAttnRes(embedding, queries, norms, sub_layers_per_block=per_block, **options)
        y = None
        for sub_layer in sub_layers:
            y = sub_layer(reads.next(y))
        return reads.next(y)

    exact = [x.detach().double().requires_grad_() for x in given]
    wide = [lambda h, w=w: torch.tanh(h @ w.double()) for w in matrices]
    expected = stack_of(wide, *exact, per_block, attn_res_mix_reference)
    out = streamed(*given)
    assert relative(out, expected) < 1e-5
    ours = torch.autograd.grad(out.sum(), given)
    theirs = torch.autograd.grad(expected.sum(), exact)
    for mine, true in zip(ours, theirs, strict=True):
        assert relative(mine, true) < 1e-4
    with torch.no_grad():
        assert relative(streamed(*given, two_phase=True), expected) < 1e-5
    sources = [embedding]  # full AttnRes: every output is a source of its own
    for i, sub_layer in enumerate(sub_layers):
        sources.append(sub_layer(attn_res_mix(sources, queries[i], norms[i])))
    full = attn_res_mix(sources, queries[-1], norms[-1])
    assert relative(full, stack_of(wide, *exact, 1, attn_res_mix_reference)) < 1e-5


def test_schedule_refuses_reads_out_of_order(device):
    x, vectors = torch.randn(2, 8, device=device), torch.randn(2, 8, device=device)
    with pytest.raises(KernelArgumentError, match="argument 'norm_weights': 1 vectors for 2"):
        BlockAttnRes(x, vectors, vectors[:1])
    with pytest.raises(KernelArgumentError, match="'sub_layers_per_block': must be at least 1"):
        BlockAttnRes(x, vectors, vectors, sub_layers_per_block=0)
    reads = BlockAttnRes(x, vectors, vectors)
    with pytest.raises(KernelArgumentError, match="argument 'y': read 0 of 2; None in front"):
        reads.next(x)
    reads.next()
    reads.next(x)
    with pytest.raises(KernelArgumentError, match="argument 'y': read 2 of 2; no read is left"):
        reads.next(x)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_scalar_residual(device, dtype):
    x, skip = (source((3, 2, 1030), dtype, device) for _ in range(2))
    alpha = torch.tensor(0.7, device=device, requires_grad=True)
    exact = doubled([x, skip, alpha])
    out, expected = scalar_residual(x, skip, alpha), scalar_residual_reference(*exact)
    grad = torch.randn(x.shape, device=device).to(dtype)
    ours = torch.autograd.grad(out, (x, skip, alpha), grad)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    assert out.dtype == dtype and relative(out, expected) < BOUNDS[dtype][0]
    for mine, true in zip(ours, theirs, strict=True):
        assert mine.shape == true.shape and relative(mine, true) < BOUNDS[dtype][1]


def test_scalar_residual_as_an_operator(device):
    x, skip = (torch.randn(20, 3, device=device).T.requires_grad_() for _ in range(2))
    alpha = torch.tensor([0.5], device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.minitriton.scalar_residual, (x, skip, alpha))
    empty = torch.zeros(0, 5, device=device, requires_grad=True)
    scalar_residual(empty, empty, alpha).sum().backward()
    assert alpha.grad.shape == (1,) and not alpha.grad.any()
    for wrong, match in (
        ((x, skip[:2], alpha), r"argument 'skip': shape \(2, 20\) differs"),
        ((x, skip, 0.5), "argument 'alpha': must be a tensor of one element, got float"),
        ((x, skip, skip[0]), r"argument 'alpha': .*one element, got \(20,\)"),
        ((x, skip, alpha.long()), "argument 'alpha': dtype torch.int64"),
        ((x, skip, alpha.to("meta")), "argument 'alpha': device meta differs"),
    ):
        with pytest.raises(KernelArgumentError, match=match):
            scalar_residual(*wrong)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda v, q, n: (v.double(), q, n), "argument 'sources': dtype torch.float64"),
        (lambda v, q, n: (v[0, 0], q, n), r"argument 'sources': shape \(8,\); it must be \["),
        (lambda v, q, n: (v[:0], q, n), r"argument 'sources': shape \(0, 4, 8\); it must be"),
        (lambda v, q, n: (v[..., :0], q, n), r"argument 'sources': shape \(3, 4, 0\)"),
        (lambda v, q, n: (v.repeat(1, 1, 1025), q, n), "with L >= 1 and 1 <= d <= 8192"),
        (lambda v, q, n: ([], q, n), "argument 'sources': expected 1 to 17 tensors.*got 0"),
        (lambda v, q, n: ([v[0]] * 18, q, n), "argument 'sources': expected 1 to 17.*got 18"),
        (lambda v, q, n: (7, q, n), "argument 'sources': expected 1 to 17 tensors.*got int"),
        (lambda v, q, n: ([v[0], 1], q, n), r"argument 'sources\[1\]': expected a tensor, got int"),
        (lambda v, q, n: ([v[0], v[0, :2]], q, n), r"'sources\[1\]': shape \(2, 8\) differs"),
        (lambda v, q, n: ([v[0], v[1].half()], q, n), r"'sources\[1\]': dtype torch.float16"),
        (lambda v, q, n: ([v[0, :, :0]], q, n), r"'sources\[0\]': shape \(4, 0\); it must be"),
        (lambda v, q, n: (v, q[:3], n), r"argument 'query': shape \(3,\); .*needs \(8,\)"),
        (lambda v, q, n: (v, q, n[None]), r"argument 'norm_weight': shape \(1, 8\)"),
        (lambda v, q, n: (v, q.long(), n), "argument 'query': dtype torch.int64"),
        (lambda v, q, n: (v, q, n.to("meta")), "argument 'norm_weight': device meta differs"),
        (lambda v, q, n: (v, q, None), "argument 'norm_weight': expected a tensor, got NoneType"),
        (lambda v, q, n: (v, q, n, 0.0), "argument 'eps': must be a positive number, got 0.0"),
        (lambda v, q, n: (v, q, n, 1e-5, v), r"argument 'delta': shape .*sources\[-1"),
        (lambda v, q, n: (v, q, n, 1e-5, None, q[1:]), r"argument 'out_weight': shape \(7,\)"),
        (lambda v, q, n: (v, q, n, 1e-5, None, q, -1), "argument 'out_eps': must be a positive"),
    ],
)  # fmt: skip
def test_refused_before_launch(device, change, match):
    tensors = [x.detach() for x in inputs((3, 4, 8), FP32, device)]
    arguments = change(*tensors)
    names = ("delta", "out_weight", "out_eps")
    with pytest.raises(KernelArgumentError, match=match):
        attn_res_mix(*arguments[:4], **dict(zip(names, arguments[4:], strict=False)))


def test_phases_refused_before_launch(device):
    bank, queries = [torch.randn(4, 8, device=device)], torch.randn(2, 8, device=device)
    trained = queries.clone().requires_grad_()
    for arguments, match in (
        ((bank * 17, queries, queries), "argument 'bank': expected 1 to 16 tensors.*got 17"),
        ((bank, queries[0], queries), r"argument 'queries': shape \(8,\); it must be \[Q, d\]"),
        ((bank, queries, queries[:1]), r"argument 'norm_weights': shape \(1, 8\) differs"),
        ((bank, queries[:, :7], queries), r"argument 'queries\[0\]': shape \(7,\)"),
        ((bank, queries.repeat(17, 1), queries), "with 1 <= Q <= 32"),
        ((bank, trained, queries), "argument 'queries': requires a gradient.*attn_res_mix"),
    ):
        with pytest.raises(KernelArgumentError, match=match):
            attn_res_phase1(*arguments)
    m, total, acc = (part[0] for part in attn_res_phase1(bank, queries, queries))
    good = [m, total, acc, bank[0], queries[0], queries[1]]
    for place, wrong, match in (
        (0, m[:2], r"argument 'm': \(2,\), torch.float32.*needs \(4,\), torch.float32"),
        (1, total.half(), r"argument 'l': \(4,\), torch.float16"),
        (0, None, "argument 'm': expected a tensor, got NoneType"),
        (2, acc[:, :3], r"argument 'acc': shape \(4, 3\) differs from that of 'prefix'"),
        (4, trained[0], "argument 'query': requires a gradient.*no backward pass"),
    ):
        arguments = [*good[:place], wrong, *good[place + 1 :]]
        with pytest.raises(KernelArgumentError, match=match):
            attn_res_merge(*arguments)
