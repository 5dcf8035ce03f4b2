"""What `library_speed.py` times: contenders, bytes and operations of each case.

Sizes are K3's (technical report, table 1, and config.json). Bytes and operations are those of the
formulas, not of an implementation: each input read once, each result written once.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from minitriton.kernels import (
    attention,
    attn_res_mix,
    attn_res_mix_reference,
    chunk_kda,
    chunk_kda_reference,
    expert_tile_rows,
    gated_rms_norm,
    gated_rms_norm_reference,
    linear,
    mla_attention,
    mla_attention_reference,
    mla_decode,
    moe_experts,
    moe_experts_mxfp4,
    moe_route,
    mxfp4_quantize,
    newton_schulz,
    newton_schulz_reference,
    recurrent_kda,
    short_conv,
    short_conv_reference,
    situ_glu,
    situ_glu_linear,
    situ_glu_linear_reference,
    situ_glu_reference,
)

BF16 = torch.bfloat16
ALL_PEERS = "--peers" in sys.argv  # fla-core in every case, not only at K3's own sizes


@dataclass
class Case:
    """One row of the table."""

    title: str
    calls: dict[str, Callable]  # contender -> call; "minitriton" is ours
    bytes: float  # that must move
    flop: float = 0.0  # that tensor cores must do
    error: Callable | None = None  # relative rms error of a call's result
    bound: float = 8e-3
    rounds: int = 1000


def random(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def against(expected: torch.Tensor) -> Callable:
    """Error of a result, or of the first of several, whose first rows are known."""
    return lambda out: relative(
        _first(out).reshape(-1, *expected.shape[1:])[: len(expected)], expected
    )


def _first(out: object) -> torch.Tensor:
    return out[0] if isinstance(out, tuple | list) else out


def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def pair(
    title: str, functions: dict[str, Callable], leaves: list[torch.Tensor],
    moved: tuple[float, float], flop: tuple[float, float] = (0.0, 0.0),
    expected: torch.Tensor | None = None, bound: float = 8e-3,
) -> Iterator[Case]:  # fmt: skip
    """The forward case of functions of `leaves`, and the backward case through autograd, in which
    fla-core takes part only with --peers: it tunes itself for minutes."""
    error = None if expected is None else against(expected)
    with torch.no_grad():
        calls = {n: (lambda f=f: f(*leaves)) for n, f in functions.items()}
        yield Case(f"{title} forward", calls, moved[0], flop[0], error, bound)
    leaves = [x.detach().requires_grad_() for x in leaves]
    graphs, grads = {}, {}

    def call(name: str, function: Callable) -> object:
        if name not in graphs:
            graphs[name] = _first(function(*leaves))
            grads[name] = torch.randn_like(graphs[name])
        return torch.autograd.grad(graphs[name], leaves, grads[name], retain_graph=True)

    taking_part = [n for n in functions if n != "fla-core" or ALL_PEERS]
    backward = {n: partial(call, n, functions[n]) for n in taking_part}
    yield Case(f"{title} backward", backward, moved[1], flop[1])


def situ() -> Iterator[Case]:
    for rows, columns in ((131072, 3072), (8192, 6144), (8192, 33792)):
        gate, up = random(rows, 2 * columns).chunk(2, dim=-1)
        functions = {
            "minitriton": situ_glu, "torch": situ_glu_reference,
            "torch.compile": _compiled(situ_glu_reference),
        }  # fmt: skip
        n = rows * columns
        expected = situ_glu_reference(gate[:512].double(), up[:512].double())
        yield from pair(
            f"SiTU-GLU {rows}x{columns}", functions, [gate, up], (6 * n, 10 * n), expected=expected
        )


def norms() -> Iterator[Case]:
    x, gate = random(8192, 96, 128), random(8192, 96, 128)
    weight = 1 + random(128, scale=0.1)
    functions = {
        "minitriton": gated_rms_norm, "torch": gated_rms_norm_reference,
        "torch.compile": _compiled(gated_rms_norm_reference),
    }  # fmt: skip
    n = x.numel()
    expected = gated_rms_norm_reference(x[:64].double(), gate[:64].double(), weight.double())
    yield from pair(
        "gated RMS norm 8192x96x128", functions, [x, gate, weight], (6 * n, 10 * n),
        expected=expected,
    )  # fmt: skip


def attn_res() -> Iterator[Case]:
    for sources, tokens in ((9, 8192), (5, 8192), (9, 1024)):
        d = 7168
        values = [random(tokens, d) for _ in range(sources)]
        query, weight = random(d, scale=d**-0.5), 1 + random(d, scale=0.1)

        def fused(*leaves: torch.Tensor) -> torch.Tensor:
            return attn_res_mix(list(leaves[:-2]), *leaves[-2:])

        def plain(*leaves: torch.Tensor) -> torch.Tensor:
            return attn_res_mix_reference(torch.stack(leaves[:-2]), *leaves[-2:])

        functions = {"minitriton": fused, "torch": plain, "torch.compile": _compiled(plain)}
        try:
            from fla.ops.attnres import fused_attnres

            if tokens * sources == 9 * 8192 or ALL_PEERS:
                functions["fla-core"] = lambda *x: fused_attnres(
                    x[-2], list(x[:-2]), x[-1], rms_eps=1e-5
                )
        except ImportError:
            pass
        exact = [v[:64].double() for v in values]
        expected = attn_res_mix_reference(torch.stack(exact), query.double(), weight.double())
        n = 2 * tokens * d
        yield from pair(
            f"AttnRes L={sources} N={tokens} d={d}", functions, [*values, query, weight],
            ((sources + 1) * n, (2 * sources + 1) * n), expected=expected,
        )  # fmt: skip


def kda() -> Iterator[Case]:
    for batch, tokens, heads in ((1, 8192, 96), (1, 8192, 32), (2, 16384, 16), (1, 8192, 12)):
        shape = (batch, tokens, heads, 128)
        q, k, v, z = (random(*shape) for _ in range(4))
        beta = random(batch, tokens, heads)
        A_log, bias = torch.zeros(heads, device="cuda"), random(heads, 128, dtype=torch.float32)

        def ours(*x: torch.Tensor, a: torch.Tensor = A_log, b: torch.Tensor = bias) -> object:
            return chunk_kda(
                *x, gate="sigmoid", A_log=a, dt_bias=b, qk_l2norm=True, beta_sigmoid=True
            )[0]

        functions: dict[str, Callable] = {"minitriton": ours}
        try:
            from fla.ops.kda import chunk_kda as peer
        except ImportError:
            pass
        else:
            if heads == 96 or ALL_PEERS:
                functions["fla-core"] = lambda *x, a=A_log, b=bias: peer(
                    *x, A_log=a, dt_bias=b.flatten(), use_qk_l2norm_in_kernel=True,
                    use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
                    lower_bound=-5.0,
                )[0]  # fmt: skip
        n = batch * tokens * heads
        with torch.no_grad():
            expected = _kda_first_rows(q, k, v, z, beta, A_log, bias, 256)
        yield from pair(
            f"KDA B={batch} T={tokens} H={heads} d=128", functions, [q, k, v, z, beta],
            (1282 * n, 2310 * n), (188e3 * n, 524e3 * n), expected=expected,
        )  # fmt: skip


def _kda_first_rows(q, k, v, z, beta, A_log, bias, rows: int) -> torch.Tensor:
    """The first rows of the first sequence in fp64, token by token."""
    first = [x[:1, :rows].double() for x in (q, k, v, z, beta)]
    return chunk_kda_reference(
        *first, gate="sigmoid", A_log=A_log.double(), dt_bias=bias.double(), qk_l2norm=True,
        beta_sigmoid=True,
    )[0][0]  # fmt: skip


def kda_decode() -> Iterator[Case]:
    for batch in (1, 32, 64, 128):
        heads = 96
        q, k, v, z = (random(batch, 1, heads, 128) for _ in range(4))
        beta = random(batch, 1, heads)
        state = random(batch, heads, 128, 128, dtype=torch.float32)
        A_log, bias = torch.zeros(heads, device="cuda"), random(heads, 128, dtype=torch.float32)
        options = {"A_log": A_log, "dt_bias": bias}
        calls: dict[str, Callable] = {
            "minitriton": lambda q=q, k=k, v=v, z=z, b=beta, s=state, o=options: recurrent_kda(
                q, k, v, z, b, gate="sigmoid", qk_l2norm=True, beta_sigmoid=True, state=s, **o
            )[0]
        }
        try:
            from fla.ops.kda import fused_recurrent_kda as peer
        except ImportError:
            pass
        else:
            calls["fla-core"] = lambda q=q, k=k, v=v, z=z, b=beta, s=state, a=A_log, c=bias: peer(
                q, k, v, z, b, A_log=a, dt_bias=c.flatten(), initial_state=s,
                output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            )[0]  # fmt: skip
        yield Case(f"KDA decode B={batch} H=96 fp32 state", calls, 2 * state.numel() * 4)


def conv() -> Iterator[Case]:
    x, weight = random(1, 8192, 36864), random(36864, 4, scale=0.5)

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x.transpose(1, 2), (3, 0))
        return F.silu(F.conv1d(padded, w[:, None], groups=w.shape[0])).transpose(1, 2)

    functions: dict[str, Callable] = {
        "minitriton": lambda x, w: short_conv(x, w)[0], "torch": plain,
        "torch.compile": _compiled(plain),
    }  # fmt: skip
    try:
        from fla.modules.convolution import causal_conv1d

        functions["fla-core"] = lambda x, w: causal_conv1d(x, w, activation="silu")[0]
    except ImportError:
        pass
    n = x.numel()
    expected = short_conv_reference(x[:, :128].double(), weight.double())[0][0]
    yield from pair(
        "short conv T=8192 D=36864", functions, [x, weight], (4 * n, 6 * n), expected=expected
    )


def mla() -> Iterator[Case]:
    for tokens, heads in ((8192, 96), (8192, 16)):
        q, k, v = (random(1, tokens, heads, w) for w in (192, 128, 128))
        shared, gate = random(1, tokens, 64), random(1, tokens, heads, 128)

        def plain(q, k, shared, v, gate) -> torch.Tensor:
            key = torch.cat([k, shared[:, :, None].expand(-1, -1, k.shape[2], -1)], -1)
            q, key, value = (x.transpose(1, 2) for x in (q, key, v))
            out = F.scaled_dot_product_attention(q, key, value, is_causal=True).transpose(1, 2)
            return out * torch.sigmoid(gate)

        functions = {"minitriton": mla_attention, "torch SDPA": plain}
        if heads <= 16:  # the scores of more heads do not fit
            functions["torch"] = lambda *x: mla_attention_reference(*x)[0]
        work = 320.0 * heads * tokens**2
        row = 2 * heads * (192 + 3 * 128) + 2 * 64
        yield from pair(
            f"MLA prefill T={tokens} H={heads}", functions, [q, k, shared, v, gate],
            (tokens * (row + 256 * heads), 2.0 * tokens * row),
            (work, 2.6 * work), expected=plain(q, k, shared, v, gate)[0].float(),
        )  # fmt: skip


def mla_paged() -> Iterator[Case]:
    for batch, length, heads in ((128, 4096, 96), (128, 4096, 16), (32, 8192, 96), (1, 32768, 96)):
        pages = length // 64
        cache = random(batch * pages, 64, 576)
        table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
        lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
        q = random(batch, 1, heads, 576)

        def plain(q=q, cache=cache, table=table, batch=batch) -> torch.Tensor:
            rows = cache[table.long()].view(batch, 1, -1, 576)
            p = torch.softmax(q.transpose(1, 2) @ rows.mT * 192**-0.5, -1)
            return (p @ rows[..., :512]).transpose(1, 2)

        ours = partial(mla_decode, q, cache, table, lengths, scale=192**-0.5)
        yield Case(
            f"MLA decode B={batch} s={length} H={heads}", {"minitriton": ours, "torch": plain},
            1152.0 * batch * length, 2176.0 * heads * batch * length,
            against(plain()[:2].float()), bound=1e-2,
        )  # fmt: skip


def attend() -> Iterator[Case]:
    for tokens, heads, d in ((4096, 16, 128), (16384, 16, 128), (4096, 16, 64)):
        q, k, v = (random(1, tokens, heads, d) for _ in range(3))

        def plain(q, k, v) -> torch.Tensor:
            out = F.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
            )
            return out.transpose(1, 2)

        work = 2.0 * heads * tokens**2 * d
        yield from pair(
            f"attention causal T={tokens} H={heads} d={d}",
            {"minitriton": attention, "torch SDPA": plain}, [q, k, v],
            (8.0 * q.numel(), 16.0 * q.numel()), (work, 2.5 * work),
            expected=plain(q, k, v)[0].float(),
        )  # fmt: skip


def attend_grouped() -> Iterator[Case]:
    q = random(1, 8192, 64, 128)
    k, v = (random(1, 8192, 8, 128) for _ in range(2))

    def plain(q, k, v) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    work = 2.0 * 64 * 8192**2 * 128
    yield from pair(
        "attention causal T=8192 H=64 d=128, 8 heads of k and v",
        {"minitriton": attention, "torch SDPA": plain}, [q, k, v],
        (4.5 * q.numel(), 9.0 * q.numel()), (work, 2.5 * work),
        expected=plain(q, k, v)[0].float(),
    )  # fmt: skip


def router() -> Iterator[Case]:
    for tokens in (8192, 64):
        logits, bias = random(tokens, 896, dtype=torch.float32), random(896, dtype=torch.float32)

        def plain(x=logits, b=bias) -> torch.Tensor:
            scores = torch.sigmoid(x)
            chosen = (scores + b).topk(17, -1).indices[:, :16]
            weights = scores.gather(-1, chosen)
            flat = chosen.flatten()
            torch.bincount(flat, minlength=896)
            torch.sort(flat, stable=True)
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return weights.sort(-1).values  # neighbours that rounding swaps are no error

        ours = partial(moe_route, logits, bias, 16, tile_rows=64)
        calls = {"minitriton": ours, "torch": plain}
        yield Case(
            f"router T={tokens} E=896 k=16 with sorting", calls, 4.0 * logits.numel(), 0.0,
            partial(_weights_error, plain()), 1e-5,
        )  # fmt: skip


def _weights_error(wanted: torch.Tensor, out: object) -> float:
    found = out if isinstance(out, torch.Tensor) else out.weights
    return relative(found.sort(-1).values, wanted)


def experts() -> Iterator[Case]:
    count, latent, ff, k = 112, 3584, 3072, 16
    for tokens in (1024, 64):  # an eighth of the experts: every token's slots all lie here
        z = random(tokens, latent)
        w13 = random(count, 2 * ff, latent, scale=latent**-0.5)
        w2 = random(count, latent, ff, scale=ff**-0.5)
        logits = random(tokens, count, dtype=torch.float32)
        rows = expert_tile_rows(tokens, k, count)
        routing = moe_route(logits, None, k, tile_rows=rows)

        def ours(z, w13, w2, routing=routing) -> torch.Tensor:
            return moe_experts(z, w13, w2, routing)

        def plain(z, w13, w2, routing=routing) -> torch.Tensor:
            """Sorted rows through torch's grouped product."""
            order = routing.experts.flatten().sort(stable=True).indices
            ends = routing.counts.cumsum(0, dtype=torch.int32)
            x = torch._grouped_mm(z[order // k], w13.mT, offs=ends)
            y = torch._grouped_mm(situ_glu_reference(*x.chunk(2, -1)), w2.mT, offs=ends)
            weighted = y * routing.weights.flatten()[order, None].to(y.dtype)
            return torch.zeros_like(z).index_add_(0, order // k, weighted)

        work = 6.0 * tokens * k * latent * ff
        weights = 2.0 * (w13.numel() + w2.numel())
        yield from pair(
            f"experts T={tokens} k=16 E={count}", {"minitriton": ours, "torch grouped": plain},
            [z, w13, w2], (weights, 2 * weights), (work, 2 * work),
            expected=plain(z, w13, w2).float(), bound=2e-2,
        )  # fmt: skip


def situ_gemm() -> Iterator[Case]:
    x, w13 = random(8192, 7168), random(2 * 6144, 7168, scale=7168**-0.5)
    functions = {
        "minitriton": situ_glu_linear, "torch": situ_glu_linear_reference,
        "torch.compile": _compiled(situ_glu_linear_reference),
    }  # fmt: skip
    work = 2.0 * x.shape[0] * w13.numel()
    moved = 2.0 * (x.numel() + w13.numel() + 8192 * 6144)
    yield from pair(
        "SiTU-GLU linear 8192x7168 to 6144", functions, [x, w13], (moved, 2 * moved),
        (work, 2 * work), expected=situ_glu_linear_reference(x[:64].float(), w13.float()),
    )  # fmt: skip


def experts_mxfp4() -> Iterator[Case]:
    count, latent, ff, k = 112, 3584, 3072, 16
    w13 = random(count, 2 * ff, latent, scale=latent**-0.5)
    w2 = random(count, latent, ff, scale=ff**-0.5)
    packed = (*mxfp4_quantize(w13), *mxfp4_quantize(w2))
    for tokens in (1, 64, 1024):
        z, logits = random(tokens, latent), random(tokens, count, dtype=torch.float32)
        rows = expert_tile_rows(tokens, k, count, mxfp4=True)
        routing = moe_route(logits, None, k, tile_rows=rows)
        calls = {
            "minitriton": partial(moe_experts_mxfp4, z, *packed, routing),
            "minitriton W4A8": partial(moe_experts_mxfp4, z, *packed, routing, activations="fp8"),
            "minitriton bf16": partial(moe_experts, z, w13, w2, routing),
        }
        used = min(count, tokens * k)
        yield Case(
            f"experts MXFP4 T={tokens} k=16 E={count}", calls,
            used * 3.0 * latent * ff * 4.25 / 8, 6.0 * tokens * k * latent * ff,
        )  # fmt: skip


def muon() -> Iterator[Case]:
    x = random(96, 128, 7168)
    calls = {
        "minitriton": lambda: newton_schulz(x), "torch": lambda: newton_schulz_reference(x),
        "torch.compile": _compiled(lambda: newton_schulz_reference(x)),
    }  # fmt: skip
    expected = newton_schulz_reference(x[:2].double())
    yield Case(
        "Newton-Schulz [96, 128, 7168]", calls, 4.0 * x.numel(), 4.0 * 96 * 128 * 128 * 7168,
        against(expected), bound=2e-2,
    )  # fmt: skip


def gemm() -> Iterator[Case]:
    for m, n, k in ((16384, 1152, 384), (16384, 1536, 384), (8192, 12288, 7168)):
        x, w = random(m, k), random(n, k, scale=k**-0.5)
        work = 2.0 * m * n * k
        moved = 2.0 * (m * k + n * k + m * n)
        yield from pair(
            f"linear {m}x{k} to {n}", {"minitriton": linear, "torch": F.linear}, [x, w],
            (moved, 2 * moved), (work, 2 * work), expected=F.linear(x, w)[:64].float(),
        )  # fmt: skip


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    f.__name__: f
    for f in (
        situ, norms, attn_res, kda, kda_decode, conv, mla, mla_paged, attend, attend_grouped,
        router, experts, experts_mxfp4, situ_gemm, muon, gemm,
    )
}  # fmt: skip
