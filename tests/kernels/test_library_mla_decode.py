"""Decoding with latent attention against fp64: pages, splits, the cache, absorbed products."""

import importlib

import pytest
import torch

from minitriton.jit import compile_hooks
from minitriton.kernels.checks import KernelArgumentError
from minitriton.kernels.mla_absorb import (
    mla_absorb_query,
    mla_absorb_query_reference,
    mla_value_up,
    mla_value_up_reference,
)
from minitriton.kernels.mla_cache import (
    mla_cache_dequantise,
    mla_cache_write,
    mla_cache_write_reference,
)
from minitriton.kernels.mla_decode import choose_splits, mla_decode, mla_decode_reference

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
BF16 = torch.bfloat16


def relative(out, expected):
    return ((out.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def problem(device, lens, heads, new=1, dtype=BF16, widths=(64, 16), pages=None):
    """Query, cache with shuffled pages, table and lengths; whatever no length reaches is NaN."""
    pages = pages or max(1, *(-(-n // 64) for n in lens))
    q = torch.randn(len(lens), new, heads, sum(widths), device=device).to(dtype)
    blocks = len(lens) * pages + 2
    cache = torch.full((blocks, 64, sum(widths)), float("nan"), device=device, dtype=dtype)
    table = torch.randperm(blocks, device=device)[: len(lens) * pages].view(-1, pages).int()
    for row, length in zip(table, lens, strict=True):
        for page, block in enumerate(row.tolist()):
            used = min(64, length - 64 * page)
            if used > 0:
                cache[block, :used] = torch.randn(used, sum(widths), device=device).to(dtype)
    return q, cache, table, torch.tensor(lens, dtype=torch.int32, device=device)


def check(tensors, latent=64, bound=None, wide=None, **options):
    """mla_decode within bounds of fp64; returns what it gave."""
    q, cache, *lists = tensors
    scale = 1.5 * q.shape[3] ** -0.5
    out, lse = mla_decode(
        q, cache, *lists, scale=scale, latent=latent, return_lse=True, **options
    )  # fmt: skip
    options.pop("num_splits", None)
    expected, expected_lse = mla_decode_reference(
        q.double(), (cache if wide is None else wide).double(), *lists, scale=scale, latent=latent,
        **options,
    )  # fmt: skip
    assert out.dtype == q.dtype and out.is_contiguous() and lse.dtype == torch.float32
    assert relative(out, expected) < (bound or BOUNDS[q.dtype])
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-2 if bound else 2e-3, rtol=1e-3)
    assert torch.equal(out == 0, (expected == 0).to(out.device)) or out.isfinite().all()
    return out, lse


@pytest.mark.parametrize(
    ("heads", "new", "dtype", "lens", "splits"),
    [
        (1, 1, BF16, (65, 1, 0, 64), None),
        (3, 8, torch.float32, (130, 5, 192), 3),
        (16, 1, torch.float16, (63, 200), 2),
        (24, 2, BF16, (1, 129), 3),
        (96, 1, BF16, (100,), None),
        (5, 4, BF16, (0, 300), 5),
        (2, 7, torch.float16, (2, 64), None),
    ],
)
def test_ragged_lengths(device, heads, new, dtype, lens, splits):
    out, lse = check(problem(device, lens, heads, new, dtype), num_splits=splits)
    for b, length in enumerate(lens):
        blind = max(0, new - length)  # queries before which there is no token
        assert not out[b, :blind].any() and (lse[b, :blind] == -float("inf")).all()


def test_not_causal(device):
    check(problem(device, (70, 3), 3, new=3), causal=False)


@pytest.mark.parametrize(("dtype", "heads"), [(BF16, 12), (torch.float32, 2)], ids=str)
def test_full_width(device, dtype, heads):
    check(
        problem(device, (70, 33), heads, 2, dtype, widths=(512, 64)), latent=512, num_splits=2
    )  # fmt: skip


def test_large_scores_keep_their_precision(device):
    q, cache, *lists = problem(device, (150,), 3, dtype=torch.float32)
    check((q * 40, cache, *lists), num_splits=2)
    check((q, cache * 1e-3, *lists), num_splits=2)


def test_splits_agree_and_do_not_vary(device):
    q, cache, table, lens = problem(device, (300, 64, 17, 0), 3, new=2)
    runs = {n: check((q, cache, table, lens), num_splits=n) for n in (1, 2, 3, 5, 64)}
    for n, (out, lse) in runs.items():
        assert relative(out, runs[1][0].double()) < 4e-3
        again = mla_decode(
            q, cache, table, lens, scale=1.5 * 80**-0.5, latent=64, num_splits=n, return_lse=True
        )
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.parametrize("splits", [1, 2])
def test_unused_memory_has_no_influence(device, splits):
    q, cache, table, lens = problem(device, (70, 5), 3, pages=4)
    first = check((q, cache, table, lens), num_splits=splits)
    table = torch.where(torch.arange(4, device=device) * 64 < lens[:, None], table, 10**9)
    second = check((q, cache.nan_to_num(7.0), table.int(), lens), num_splits=splits)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_sequences_that_share_pages(device):
    q, cache, table, lens = problem(device, (128, 128, 192), 3)
    table[1, :2] = table[2, :2]
    table[0, 1] = table[0, 0]
    check((q, cache, table, lens))


def test_strided_arguments_are_read_in_place(device):
    q, cache, table, lens = problem(device, (100, 40), 4, new=2)
    spread = torch.full((cache.shape[0], 2, 64, 96), float("nan"), device=device, dtype=BF16)
    spread[:, 1, :, :80] = cache
    across = q.transpose(1, 2).contiguous().transpose(1, 2)
    table, lens = table.T.contiguous().T, torch.stack([lens, lens], 1)[:, 0]
    check((across, spread[:, 1, :, :80], table, lens), num_splits=2)


def test_unchecked_lists_cannot_reach_outside(device):
    q, cache, table, lens = problem(device, (64, 64, 64), 2, pages=2)
    cache = cache.nan_to_num(0.5)
    table[0], table[1] = -5, 2**31 - 1
    lens = torch.tensor([64, 10**9, -3], dtype=torch.int32, device=device)
    out = mla_decode(q, cache, table, lens, scale=0.1, latent=64, check=False)
    assert out.isfinite().all() and not out[2].any()


def rope_for(shape, channels, device):
    angles = 3 * torch.randn(*shape, channels // 2, device=device)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_cache_write(device, dtype, norm):
    rows = torch.randn(7, 80, device=device).to(dtype)
    latent, shared = rows.split([64, 16], 1)  # parts of one projection
    slots = torch.tensor([5, 191, -1, 64, 0, 192, -(2**40)], device=device)
    options = {}
    if norm:
        weight = 1 + 0.2 * torch.randn(64, device=device)
        options = {"norm_weight": weight, "eps": 1e-5, "rope": rope_for((7,), 16, device)}
    else:
        slots = slots.clamp(min=-1).int()
    cache = torch.full((3, 2, 64, 80), 9.0, device=device, dtype=dtype)[:, 1]
    expected = cache.double()
    mla_cache_write(cache, latent, shared, slots, **options)
    mla_cache_write_reference(expected, latent.double(), shared.double(), slots, **options)
    assert relative(cache, expected) < BOUNDS[dtype]
    assert torch.equal(cache == 9.0, expected == 9.0)
    assert norm or torch.equal(cache.double(), expected)


def fp8_problem(device, lens, heads, new=1):
    q, wide, table, lens = problem(device, lens, heads, new, widths=(512, 64))
    cache = torch.full((*wide.shape[:2], 656), 255, dtype=torch.uint8, device=device)  # NaN
    rows = wide.flatten(0, 1)
    slots = torch.where(rows.isnan().any(1), -1, torch.arange(len(rows), device=device))
    mla_cache_write(cache, rows[:, :512], rows[:, 512:], slots)
    return q, wide, cache, table, lens


def test_fp8_rows(device):
    latent = torch.randn(3, 512, device=device) * torch.tensor([[1e-3], [1.0], [300.0]]).to(device)
    latent[1, 128:256] = 0
    latent, shared = latent.bfloat16(), torch.randn(3, 64, device=device).bfloat16()
    slots = torch.tensor([3, 0, 64], device=device)
    weight = 1 + 0.2 * torch.randn(512, device=device)
    for options in ({}, {"norm_weight": weight}):
        cache, expected = (torch.zeros(2, 64, 656, dtype=torch.uint8, device=device) for _ in "ab")
        mla_cache_write(cache, latent, shared, slots, **options)
        mla_cache_write_reference(expected, latent, shared, slots, **options)
        ours, theirs = mla_cache_dequantise(cache), mla_cache_dequantise(expected)
        assert relative(ours, theirs.double()) < 3e-3  # a few numbers rounded the other way
        assert (cache != expected).float().mean() < 1e-3
    mla_cache_write(cache, latent, shared, slots)
    written = mla_cache_dequantise(cache).flatten(0, 1)[slots]
    assert relative(written[:, :512], latent.double()) < 0.04
    assert torch.equal(written[:, 512:], shared.float())


@pytest.mark.parametrize(("heads", "new", "splits"), [(5, 1, 2), (12, 2, None)])
def test_decode_from_fp8_rows(device, heads, new, splits):
    q, _, cache, *lists = fp8_problem(device, (70, 9), heads, new)
    wide = mla_cache_dequantise(cache)
    check((q, cache, *lists), latent=512, wide=wide, bound=5e-3, num_splits=splits)


def weights_of(heads, channels, latent, dtype, device):
    """Key and value halves of one weight [heads, 2 channels, latent]."""
    both = torch.randn(heads, 2 * channels, latent, device=device) / channels**0.5
    return both.to(dtype).split(channels, 1)


@pytest.mark.parametrize(
    ("dtype", "shape", "widths"),
    [(BF16, (2, 3, 3), (128, 512, 64)), (BF16, (130, 1, 2), (128, 512, 64)),
     (torch.float32, (70, 1, 2), (24, 64, 16)),
     (torch.float16, (1, 8, 1), (40, 128, 32))],
)  # fmt: skip
def test_absorbed_products(device, dtype, shape, widths):
    channels, latent, shared = widths
    q = torch.randn(*shape, channels + shared, device=device).to(dtype)
    nope, rest = q.split([channels, shared], 3)
    keys, values = weights_of(shape[2], channels, latent, dtype, device)
    rope = rope_for(shape[:2], shared, device)
    for given in (None, rope):
        out = mla_absorb_query(nope, keys, rest, rope=given)
        wide = (nope.double(), keys.double(), rest.double())
        assert relative(out, mla_absorb_query_reference(*wide, rope=given)) < BOUNDS[dtype]
        assert out.is_contiguous() and out.dtype == dtype
    assert torch.equal(mla_absorb_query(nope, keys, rest)[..., latent:], rest)
    gate = torch.randn(*shape[:2], shape[2] * channels, device=device).to(dtype)
    o = out[..., :latent]
    turned = values.transpose(1, 2).contiguous()
    for weight, logits in ((values, gate), (turned, gate.view(*shape, -1)), (turned, None)):
        up = mla_value_up(o, weight, logits)
        expected = mla_value_up_reference(
            o.double(), weight.double(), None if logits is None else logits.double()
        )
        assert up.shape == (*shape, channels) and relative(up, expected) < BOUNDS[dtype]


def test_a_decoding_step_is_attention_over_expanded_keys(device):
    heads, channels, latent, shared = 3, 32, 64, 16
    q = torch.randn(2, 2, heads, channels + shared, device=device)
    keys, values = weights_of(heads, channels, latent, torch.float32, device)
    _, cache, table, lens = problem(device, (70, 30), heads, dtype=torch.float32)
    rows = torch.randn(4, 80, device=device)
    where = torch.stack([lens - 2, lens - 1], 1)
    slots = (table.gather(1, (where // 64).long()) * 64 + where % 64).flatten()
    mla_cache_write(cache, rows[:, :64], rows[:, 64:], slots)
    query = mla_absorb_query(q[..., :channels], keys, q[..., channels:])
    scale = (channels + shared) ** -0.5
    out = mla_value_up(mla_decode(query, cache, table, lens, scale=scale, latent=64), values)
    for b in range(2):
        kept = cache[table[b].long()].flatten(0, 1)[: lens[b]].double()
        k = torch.einsum("tl,hdl->htd", kept[:, :64], keys.double())
        k = torch.cat([k, kept[:, 64:].expand(heads, -1, -1)], -1)
        v = torch.einsum("tl,hdl->htd", kept[:, :64], values.double())
        scores = torch.einsum("nhd,htd->hnt", q[b].double(), k) * scale
        scores[:, 0, -1] = -float("inf")
        expected = torch.einsum("hnt,htd->nhd", scores.softmax(-1), v)
        assert relative(out[b], expected) < 1e-4


def test_nothing_to_do(device):
    q, cache, table, lens = problem(device, (3,), 2)
    none = (q[:0], cache, table[:0], lens[:0])
    assert mla_decode(*none, scale=1.0, latent=64).shape == (0, 1, 2, 64)
    out, lse = mla_decode(
        q, cache[:0], table[:, :0], lens * 0, scale=1.0, latent=64, return_lse=True
    )
    assert not out.any() and (lse == -float("inf")).all()
    before = cache.clone()
    mla_cache_write(cache, q[:0, 0, 0, :64], q[:0, 0, 0, 64:], lens[:0])
    assert torch.equal(cache.view(torch.int16), before.view(torch.int16))
    keys, values = weights_of(2, 32, 64, BF16, device)
    assert mla_absorb_query(q[:0, ..., :32], keys, q[:0, ..., 64:]).shape == (0, 1, 2, 80)
    assert mla_value_up(q[:0, ..., :64], values).shape == (0, 1, 2, 32)


def test_operators_are_sound(device):
    q, cache, table, lens = problem(device, (40, 3), 2)
    ops = torch.ops.minitriton
    arguments = (q, cache.nan_to_num(), table, lens, 0.1, True, 2, 64, None)
    torch.library.opcheck(ops.mla_decode, arguments)
    keys, values = weights_of(2, 32, 64, BF16, device)
    torch.library.opcheck(ops.mla_absorb_query, (q[..., :32], keys, q[..., 64:], None, None))
    torch.library.opcheck(ops.mla_value_up, (q[..., :64], values, q[..., :32]))
    rows = q[:, 0, 0]
    arguments = (cache.nan_to_num(), rows[:, :64], rows[:, 64:], lens, None, 1e-6, None, None)
    torch.library.opcheck(ops.mla_cache_write, arguments)


def test_torch_compile_without_graph_breaks(device):
    q, cache, table, lens = problem(device, (40, 3), 2)
    cache = cache.nan_to_num()
    keys, values = weights_of(2, 32, 64, BF16, device)

    def step(q, cache, rows):
        mla_cache_write(cache, rows[:, :64], rows[:, 64:], lens)
        query = mla_absorb_query(q[..., :32], keys, q[..., 64:])
        out, lse = mla_decode(query, cache, table, lens, scale=0.1, latent=64, return_lse=True)
        return mla_value_up(out, values, q[..., :32]), lse

    rows = torch.randn(2, 80, device=device).bfloat16()
    with torch.no_grad():
        expected = step(q, cache.clone(), rows)
        ours = torch.compile(step, fullgraph=True, backend="aot_eager")(q, cache.clone(), rows)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize(("arch", "memory"), [("sm_80", 166_912), ("sm_90a", 232_448)])
@pytest.mark.parametrize(("heads", "new"), [(16, 1), (32, 1), (96, 1), (96, 2)])
def test_tiles_of_large_gpus(device, monkeypatch, arch, memory, heads, new):
    """What CPU tensors never choose assembles, fits and keeps its registers."""
    if device != "cpu":
        pytest.skip("assembled without a GPU")
    calls = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: calls.append((args, options))

    decoding = importlib.import_module("minitriton.kernels.mla_decode")
    real = decoding.decode_kernel
    monkeypatch.setattr(decoding, "decode_kernel", Recorder())
    monkeypatch.setattr(decoding, "_device", lambda index: (132, memory))
    tensors = problem(device, (300, 3), heads, new, widths=(512, 64))
    mla_decode(*tensors, scale=0.1, num_splits=1)
    ((args, options),) = calls
    hooks = compile_hooks[:]
    compile_hooks.clear()  # other targets have tiles of their own
    compiled = real.warmup(*args, grid=(1,), target=arch, **options)
    compile_hooks.extend(hooks)
    assert compiled.n_spills == 0
    assert compiled.shared <= memory


def test_splits_fill_the_gpu():
    assert choose_splits(264, 64, 132) == 1
    assert choose_splits(2, 2, 132) == 1
    assert 32 <= choose_splits(2, 64, 132) <= 64
    assert choose_splits(64, 64, 132) in (2, 4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q, c, t, n: (q.double(), c, t, n), "argument 'q': dtype torch.float64"),
        (lambda q, c, t, n: (q[0], c, t, n), r"argument 'q': shape .* must be \[B, n, H, W\]"),
        (lambda q, c, t, n: (q.repeat(1, 9, 1, 1), c, t, n), "with 1 <= n <= 8"),
        (lambda q, c, t, n: (q[..., :72], c, t, n), "argument 'q': 72 channels; after the 64"),
        (lambda q, c, t, n: (q, c.half(), t, n), "argument 'cache': dtype torch.float16"),
        (lambda q, c, t, n: (q, c.byte(), t, n), "argument 'cache': uint8 .* 512 [+] 64 channels"),
        (lambda q, c, t, n: (q, c[:, :32], t, n), r"argument 'cache': shape .*\[blocks, 64, 80\]"),
        (lambda q, c, t, n: (q, c.mT.contiguous().mT, t, n), "argument 'cache': strides"),
        (lambda q, c, t, n: (q, None, t, n), "argument 'cache': expected a tensor, got NoneType"),
        (lambda q, c, t, n: (q, c, t.long(), n), "argument 'block_table': must be an int32"),
        (lambda q, c, t, n: (q, c, t[0], n), r"argument 'block_table': shape .*\[2, pages\]"),
        (lambda q, c, t, n: (q, c, t, n[:1]), r"argument 'cache_lens': shape \(1,\)"),
        (lambda q, c, t, n: (q, c, t, [1, 2]), "argument 'cache_lens': must be .* got list"),
        (lambda q, c, t, n: (q, c, t, n + 500), "values from 503 to 540; a table of 1 pages"),
        (lambda q, c, t, n: (q, c, t, n - 9), "argument 'cache_lens': values from -6 to 31"),
        (lambda q, c, t, n: (q, c, t + 99, n), r"argument 'block_table': block .* at \[0, 0\]"),
        (lambda q, c, t, n: (q.requires_grad_(), c, t, n), "'q': requires a gradient.*mla_attent"),
    ],
)
def test_refused_before_launch(device, change, match):
    with pytest.raises(KernelArgumentError, match=match):
        mla_decode(*change(*problem(device, (40, 3), 2)), scale=0.1, latent=64, check=True)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scale": 0.0}, "argument 'scale': must be a positive number"),
        ({"num_splits": 0}, "argument 'num_splits': must be a positive integer or None, got 0"),
        ({"latent": 48}, "argument 'latent': must be a power of two"),
    ],
)
def test_refused_options(device, options, match):
    with pytest.raises(KernelArgumentError, match=match):
        mla_decode(*problem(device, (40, 3), 2), **{"scale": 0.1, "latent": 64, **options})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda r, c, s: mla_cache_write(c, r[:, :64], r[:, 64:], s.float()), "argument 'slots'"),
        (lambda r, c, s: mla_cache_write(c, r[:, :64], r[:, 64:], s[:1]), "'slots': shape"),
        (lambda r, c, s: mla_cache_write(c, r[:, :48], r[:, 64:], s), "argument 'latent': shape"),
        (lambda r, c, s: mla_cache_write(c, r[:, :64], r[:1, 64:], s), "argument 'shared': 1 rows"),
        (lambda r, c, s: mla_cache_write(c[..., :64], r[:, :64], r[:, 64:], s), "argument 'cache'"),
        (lambda r, c, s: mla_cache_write(c, r[:, :64], r[:, 64:], s, rope=(r, r)), "'rope': must"),
        (lambda r, c, s: mla_cache_write(c, r[:, :64], r[:, 64:], s, eps=-1), "argument 'eps'"),
        (lambda r, c, s: mla_cache_write(c, r[:, :64], r[:, 64:], s, norm_weight=r[0]),
         r"'norm_weight': shape \(80,\)"),
        (lambda r, c, s: mla_absorb_query(r[None, None], r[:, :32, None], r[None, None]),
         "argument 'w_uk': shape"),
        (lambda r, c, s: mla_absorb_query(r, r, r), "argument 'q_nope': shape"),
        (lambda r, c, s: mla_value_up(r[None, None, :, :64], r[:, :, None]), "argument 'w_uv'"),
        (lambda r, c, s: mla_value_up(r[None, None], r), "'o_latent': 80 channels"),
        (lambda r, c, s: mla_value_up(r[None, None, :, :64], c[:2, :, :64], r), "'gate': shape"),
    ],
)  # fmt: skip
def test_refused_by_the_others(device, call, match):
    _, cache, _, lens = problem(device, (40, 3), 2)
    rows = torch.randn(2, 80, device=device).bfloat16()
    with pytest.raises(KernelArgumentError, match=match):
        call(rows, cache, lens)
