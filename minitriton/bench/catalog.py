"""The list of cases: families by name, their shapes in full, quick and dry runs. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FULL, QUICK, DRY = "full", "quick", "dry"
COPY = "copy"  # the yardstick beside the contenders of rows: never the best


class UnknownFamily(Exception):
    """A name that selects nothing; the message lists those that do."""


@dataclass(frozen=True)
class Spec:
    """One case to build: a function of `cases_<file>` and its keyword arguments."""

    family: str
    title: str
    file: str
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


ROWS = ((16384, 1024), (16384, 4096), (8192, 8192), (4096, 16384))
NARROW = ROWS[:3]  # the library's norms are for rows of at most 8192
LONG = ((65536, 4096), (32768, 8192))  # four times as many bytes: less of the time is start and end
VOCABULARIES = ((8192, 50304), (4096, 128256))
PRODUCTS = ((8192, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 1024))
K3_EXPERTS = {"experts": 112, "latent": 3584, "width": 3072}  # an eighth of them
SKINNY = ((16, 8192, 8192), (128, 8192, 8192), (8192, 128, 8192))
QUANTISED = ((16, 8192, 8192), (64, 8192, 8192), (4096, 8192, 8192))


def _sizes(
    family: str, function: str, shapes: Iterable[tuple[int, int]], **more: Any
) -> list[Spec]:
    return [
        Spec(family, f"{family} {rows}x{columns}", "rows", function,
             {"rows": rows, "columns": columns, **more})
        for rows, columns in shapes
    ]  # fmt: skip


def _products(family: str, shapes: Iterable[tuple[int, int, int]], orders: str = "kn nk",
              **more: Any) -> list[Spec]:  # fmt: skip
    return [
        Spec(family, f"{family} {m}x{n}x{k} B[{','.join(order.upper())}]", "products", "matmul",
             {"m": m, "n": n, "k": k, "b_nk": order == "nk", **more})
        for m, n, k in shapes for order in orders.split()
    ]  # fmt: skip


def _quantised(bits: int) -> list[Spec]:
    family, function = f"matmul_w{bits}a16", f"w{bits}a16"
    return [
        Spec(family, f"{family} {m}x{n}x{k}", "quantised", function, {"m": m, "n": n, "k": k})
        for m, n, k in QUANTISED
    ]  # fmt: skip


def _attention(shapes: Iterable[tuple[int, int, int, int, int, bool]], function: str) -> list[Spec]:
    """Of (batch, tokens, heads, heads of k and v, head_dim, causal)."""
    family = function
    specs = []
    for batch, tokens, heads, kv_heads, head_dim, causal in shapes:
        grouped = f"/{kv_heads}" if kv_heads != heads else ""
        title = (
            f"{family} hd{head_dim} {'causal' if causal else 'full'} B={batch} S={tokens} H={heads}"
        )
        arguments = {"batch": batch, "tokens": tokens, "heads": heads, "kv_heads": kv_heads,
                     "head_dim": head_dim, "causal": causal}  # fmt: skip
        specs.append(Spec(family, title + grouped, "attention", function, arguments))
    return specs


def _both(family: str, file: str, shapes: Iterable[tuple[str, dict[str, int]]]) -> list[Spec]:
    """Forward and backward cases of a function of the library, of (part of the title, sizes)."""
    return [
        Spec(family + ending, f"{family}{ending} {title}", file, family,
             {**sizes, "backward": bool(ending)})
        for ending in ("", "_backward") for title, sizes in shapes
    ]  # fmt: skip


def _forward(family: str, file: str, shapes: Iterable[tuple[str, dict[str, Any]]]) -> list[Spec]:
    return [Spec(family, f"{family} {title}", file, family, sizes) for title, sizes in shapes]


def _named(names: str, *shapes: tuple[int, ...]) -> list[tuple[str, dict[str, int]]]:
    """Titles such as "tokens=8192 heads=96", and sizes by those names."""
    return [
        (" ".join(f"{name}={size}" for name, size in zip(names.split(), shape, strict=True)),
         dict(zip(names.split(), shape, strict=True)))
        for shape in shapes
    ]  # fmt: skip


def _table(*shapes: tuple[int, int]) -> list[tuple[str, dict[str, int]]]:
    return [(f"{rows}x{columns}", {"rows": rows, "columns": columns}) for rows, columns in shapes]


def _library() -> list[Spec]:
    """Functions of the library at Kimi K3's sizes (technical report, table 1, and config.json), and
    at those of a small GPT."""
    products = [
        (f"{m}x{k} to {n}", {"rows": m, "columns": n, "depth": k})
        for m, n, k in ((8192, 12288, 7168), (16384, 1152, 384), (16384, 1536, 384))
    ]
    experts = [(f"tokens={count}", {**K3_EXPERTS, "tokens": count}) for count in (1024, 64, 1)]
    return [
        *_forward("kda_decode", "recurrent", _named(
            "batch heads width", *((batch, 96, 128) for batch in (128, 64, 32, 1)))),
        *_both("short_conv", "library", _named("tokens channels", (8192, 36864))),
        *_both("gated_rms_norm", "library", _named("tokens heads width", (8192, 96, 128))),
        *_both("attn_res", "library", _named(
            "sources tokens width", (9, 8192, 7168), (5, 8192, 7168), (9, 1024, 7168))),
        *_both("mla", "latent", _named("tokens heads", (8192, 96), (8192, 16))),
        *_forward("mla_decode", "latent", _named(
            "batch length heads", (128, 4096, 96), (128, 4096, 16), (32, 8192, 96),
            (1, 32768, 96))),
        *_both("situ_glu", "library", _table((131072, 3072), (8192, 33792), (8192, 6144))),
        *_both("situ_linear", "library", [
            ("8192x7168 to 6144", {"rows": 8192, "columns": 6144, "depth": 7168})]),
        *_forward("router", "mixture", _named("tokens experts", (8192, 896), (64, 896))),
        *_forward("moe", "mixture", experts[2:]),
        *_both("moe", "mixture", experts[:2]),
        *_forward("moe_mxfp4", "mixture", experts),
        *_forward("moe_w4a8", "mixture", experts),
        *_forward("muon", "library", _named("matrices rows columns", (96, 128, 7168))),
        *_both("linear", "library", products),
        *_both("gelu_mlp", "library", _named("rows width", (16384, 384), (8192, 4096))),
        *_both("add_layer_norm", "library", _table((16384, 384), (16384, 4096))),
        *_both("embedding", "library", _named("tokens rows width", (16384, 50304, 768))),
        *_forward("cross_entropy_step", "library", _table(*VOCABULARIES)),
        *_both("packed_attention", "training", _named(
            "batch tokens heads width", (64, 256, 6, 64), (16, 1024, 12, 64))),
        *_both("scalar_residual", "training", _table((8192, 7168))),
        *_forward("muon_step", "training", _named("heads rows columns", (96, 128, 7168))),
        *_forward("quantile_bias", "training", _named("tokens experts", (65536, 896))),
        *_forward("short_conv_step", "serving", _named("batch channels", (128, 36864))),
        *_forward("mla_absorb", "serving", _named("batch heads", (128, 96))),
        *_forward("mla_value_up", "serving", _named("batch heads", (128, 96))),
        *_forward("mxfp4_quantize", "serving", _table((12288, 7168))),
        # last, as fla-core tunes itself for minutes here: a run out of time leaves these out
        *_both("kda", "recurrent", _named(
            "batch tokens heads width",
            (1, 8192, 96, 128), (1, 8192, 32, 128), (2, 16384, 16, 128), (1, 8192, 12, 128))),
    ]  # fmt: skip


def _heads(batch: int, tokens: int, head_dims: Iterable[int]) -> list[tuple[int, ...]]:
    return [
        (batch, tokens, 2048 // width, 2048 // width, width, causal)
        for width in head_dims for causal in (True, False)
    ]  # fmt: skip


def _full() -> list[Spec]:
    long = [*_heads(4, 4096, (64, 128, 256)), *_heads(1, 16384, (128,))]
    alone = [(1, 4096, 16, 16, width, True) for width in (128, 64)]
    shapes = [*long, *alone, (4, 4096, 32, 8, 128, True), (1, 8192, 64, 8, 128, True)]
    return [
        Spec("add", "add fp32 2^28", "rows", "add", {"n": 1 << 28}),
        *_sizes("softmax", "softmax", (*ROWS, *LONG)),
        *_sizes("softmax_backward", "softmax_backward", (*NARROW, *LONG)),
        *_sizes("layer_norm", "layer_norm", (*NARROW, *LONG)),
        *_sizes("layer_norm_backward", "layer_norm_backward", (*NARROW, *LONG)),
        *_sizes("rms_norm", "rms_norm", (*NARROW, *LONG)),
        *_sizes("rms_norm_backward", "rms_norm_backward", (*NARROW, *LONG)),
        *_sizes("gelu", "gelu", [(16384, 8192), (65536, 8192)]),
        *_sizes("swiglu", "swiglu", [(16384, 8192)]),
        *_sizes("swiglu_backward", "swiglu_backward", [(16384, 8192)]),
        *_sizes("cross_entropy", "cross_entropy", VOCABULARIES),
        *_sizes("cross_entropy_backward", "cross_entropy_backward", VOCABULARIES),
        *_products("matmul", (*PRODUCTS, (2048, 2048, 2048)), dtype="bf16"),
        *_products("matmul_skinny", SKINNY, "nk", dtype="bf16"),
        *_products("matmul_fp16", PRODUCTS[:2], dtype="fp16"),
        *_products("matmul_tf32", PRODUCTS[:2], dtype="tf32"),
        *_products("matmul_fp8", PRODUCTS, "nk", dtype="fp8"),
        *_quantised(8),
        *_quantised(4),
        Spec("matmul_batched", "matmul_batched 64x1024x1024x1024", "products", "batched",
             {"batch": 64, "m": 1024, "n": 1024, "k": 1024}),
        Spec("matmul_batched", "matmul_batched 256x512x512x64", "products", "batched",
             {"batch": 256, "m": 512, "n": 512, "k": 64}),
        Spec("matmul_grouped", "matmul_grouped 16 groups, 16384x4096x4096", "products", "grouped",
             {"groups": 16, "rows": 16384, "n": 4096, "k": 4096}),
        Spec("matmul_grouped", "matmul_grouped 128 groups, 8192x2048x4096", "products", "grouped",
             {"groups": 128, "rows": 8192, "n": 2048, "k": 4096}),
        *_attention(shapes, "attention"),  # type: ignore[arg-type]  # tuples of mixed int
        *_attention(shapes, "attention_backward"),  # type: ignore[arg-type]  # the same
        *_library(),
    ]  # fmt: skip


# Most telling first: a run that is out of time leaves out the rest.
QUICK_TITLES = (
    "add fp32 2^28", "matmul 8192x8192x8192 B[K,N]", "matmul 8192x8192x8192 B[N,K]",
    "attention hd128 causal B=1 S=16384 H=16", "softmax 8192x8192", "softmax 32768x8192",
    "layer_norm 16384x4096",
    "matmul_fp8 8192x8192x8192 B[N,K]", "matmul 8192x8192x1024 B[K,N]",
    "attention_backward hd128 causal B=4 S=4096 H=16", "attention hd128 full B=4 S=4096 H=16",
    "rms_norm 16384x4096", "cross_entropy 8192x50304", "swiglu 16384x8192",
    "layer_norm_backward 16384x4096", "rms_norm_backward 16384x4096",
    "cross_entropy_backward 8192x50304", "matmul_skinny 16x8192x8192 B[N,K]", "gelu 16384x8192",
    "attention hd64 causal B=4 S=4096 H=32",
    "attention hd256 causal B=4 S=4096 H=8", "attention hd128 causal B=4 S=4096 H=32/8",
    "matmul_batched 64x1024x1024x1024", "matmul_grouped 16 groups, 16384x4096x4096",
    "matmul_tf32 4096x4096x4096 B[K,N]", "matmul_fp16 4096x4096x4096 B[K,N]",
    "matmul 4096x4096x4096 B[K,N]",
    "kda batch=1 tokens=8192 heads=96 width=128", "mla tokens=8192 heads=16",
    "attn_res sources=9 tokens=8192 width=7168", "short_conv tokens=8192 channels=36864",
    "situ_glu 131072x3072", "moe tokens=64", "mla_decode batch=128 length=4096 heads=16",
    "kda_decode batch=64 heads=96 width=128",
)  # fmt: skip


def _dry() -> list[Spec]:
    """Each family and contender of the full run once, as small as its code allows."""
    row, product = {"rows": 3, "columns": 200}, {"m": 40, "n": 48, "k": 64, "b_nk": True}
    small = {"batch": 1, "tokens": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "causal": True}
    experts = {"tokens": 10, "experts": 4, "latent": 64, "width": 32, "chosen": 2}
    own: dict[str, dict[str, Any]] = {
        "add": {"n": 1000}, "matmul_batched": {"batch": 2, "m": 40, "n": 48, "k": 32},
        "matmul_grouped": {"groups": 2, "rows": 40, "n": 32, "k": 32}, "attention": small,
        "matmul_w8a16": {"m": 20, "n": 32, "k": 128}, "matmul_w4a16": {"m": 20, "n": 32, "k": 128},
        "kda": {"batch": 1, "tokens": 40, "heads": 2, "width": 32},
        "kda_decode": {"batch": 2, "heads": 2, "width": 32},
        "short_conv": {"tokens": 20, "channels": 48},
        "gated_rms_norm": {"tokens": 3, "heads": 2, "width": 48},
        "attn_res": {"sources": 3, "tokens": 4, "width": 100},
        "mla": {"tokens": 40, "heads": 2}, "mla_decode": {"batch": 2, "length": 64, "heads": 2},
        "situ_glu": row, "situ_linear": {"rows": 20, "columns": 32, "depth": 32},
        "router": {"tokens": 5, "experts": 24, "chosen": 4}, "moe": experts,
        "moe_mxfp4": experts, "moe_w4a8": {**experts, "latent": 128, "width": 128},
        "muon": {"matrices": 2, "rows": 16, "columns": 40},
        "linear": {"rows": 20, "columns": 24, "depth": 32}, "gelu_mlp": {"rows": 20, "width": 16},
        "add_layer_norm": row, "embedding": {"tokens": 12, "rows": 200, "width": 16},
        "cross_entropy_step": row, "scalar_residual": row,
        "packed_attention": {"batch": 2, "tokens": 40, "heads": 2, "width": 16},
        "muon_step": {"heads": 2, "rows": 16, "columns": 40},
        "quantile_bias": {"tokens": 20, "experts": 24, "chosen": 4},
        "short_conv_step": {"batch": 3, "channels": 48}, "mla_absorb": {"batch": 3, "heads": 2},
        "mla_value_up": {"batch": 3, "heads": 2},
        "mxfp4_quantize": {"rows": 3, "columns": 64},
    }  # fmt: skip
    kept = ("dtype", "backward")
    specs = []
    for first in {spec.family: spec for spec in reversed(_full())}.values():
        standard = row if first.file == "rows" else product
        arguments = own.get(first.family.removesuffix("_backward"), standard)
        given = {name: first.arguments[name] for name in kept if name in first.arguments}
        title = f"{first.family} tiny"
        specs.append(Spec(first.family, title, first.file, first.function, {**arguments, **given}))
    return specs[::-1]


def families() -> list[str]:
    """Names that --only takes."""
    return list(dict.fromkeys(spec.family for spec in _full()))


def select(size: str, only: Iterable[str] = ()) -> list[Spec]:
    """The cases of a run in their order. `only`: families, several with commas between them, or
    titles; UnknownFamily for a name that is neither."""
    specs = _dry() if size == DRY else _full()
    if size == QUICK:
        by_title = {spec.title: spec for spec in specs}
        specs = [by_title[title] for title in QUICK_TITLES]
    titles = {spec.title for spec in specs}
    names: list[str] = []
    for part in only:  # titles may have commas
        names += [part] if part in titles else filter(None, part.split(","))
    for name in names:
        if name not in (*families(), *titles):
            near = difflib.get_close_matches(name, families(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UnknownFamily(f"--only {name}: {hint}the names are {', '.join(families())}")
    return [s for s in specs if not names or s.family in names or s.title in names]
