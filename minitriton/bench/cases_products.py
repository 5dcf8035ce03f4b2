"""Matrix products: plain, skinny, batched, grouped; bf16, fp16, tf32 and fp8."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

import minitriton
from minitriton.bench import cases, sources
from minitriton.bench.cases import (
    DTYPES,
    Case,
    LeftOut,
    Setting,
    Trial,
    exact_fp32,
    normal,
    one,
    same_source,
)
from minitriton.bench.roofline import Work

BF16 = torch.bfloat16
# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages; the first are those that win most often.
# Tiles of 4 warps are those of which MiniTriton runs two in turns in a CTA (ping-pong).
DEEP = (
    (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (128, 128, 64, 4, 6), (128, 128, 64, 4, 3),
    (128, 128, 64, 4, 5), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3),
    (256, 128, 64, 8, 4), (128, 256, 32, 8, 4), (64, 256, 64, 4, 4), (64, 128, 64, 4, 4),
    (128, 128, 32, 4, 4), (256, 128, 32, 8, 4),
)  # fmt: skip
SHALLOW = (DEEP[2], DEEP[1], DEEP[4], DEEP[0], DEEP[3], *DEEP[5:])  # for K of at most 2048
ODD = ((128, 192, 64, 4, 5), (256, 192, 64, 8, 3), (128, 192, 64, 4, 4))  # no powers of two
SKINNY = (
    (16, 64, 128, 4, 4), (16, 64, 256, 4, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (16, 32, 256, 4, 3), (16, 128, 128, 4, 4),
    (32, 64, 128, 4, 4), (64, 64, 128, 4, 4), (128, 64, 128, 4, 4), (64, 128, 128, 4, 4),
)  # fmt: skip
DESCRIPTOR = (  # the last number: whether the result is stored in halves
    (128, 256, 64, 8, 3, 1), (128, 256, 64, 8, 4, 1), (128, 256, 64, 8, 3, 0),
    (128, 128, 64, 4, 4, 0), (128, 128, 64, 4, 6, 0), (128, 128, 64, 4, 5, 0),
    (128, 128, 64, 8, 4, 0), (256, 128, 64, 8, 3, 1), (128, 128, 128, 8, 3, 0),
)  # fmt: skip
NARROW = (128, 128, 64, 8, 4)  # for fp8, where rows of 128 may need too many registers
NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
TINY, TINY_ODD = (32, 32, 32, 4, 2), (32, 48, 32, 4, 2)


def _configs(setting: Setting, m: int, n: int, k: int, itemsize: int) -> list[dict[str, int]]:
    """What a same-source contender tries. Rows of BLOCK_K take so many bytes as in bf16."""
    if setting.dry:
        return _named([TINY])
    table = SKINNY if min(m, n) <= 128 else SHALLOW if k <= 2048 else DEEP
    options = setting.few(table, 4)
    options = [(bm, bn, max(bk * 2 // itemsize, 16), w, s) for bm, bn, bk, w, s in options]
    return _named(options + ([NARROW] if itemsize == 1 else []))


def _odd(setting: Setting) -> list[dict[str, int]]:
    """Tiles which only MiniTriton compiles: Triton wants powers of two."""
    return _named([TINY_ODD] if setting.dry else setting.few(ODD, 2))


def _named(options: list[tuple[int, ...]]) -> list[dict[str, int]]:
    return [dict(zip(NAMES, option, strict=True)) for option in options]


def _label(config: dict[str, int]) -> str:
    block = "x".join(str(config[name]) for name in NAMES[:3])
    return f"{block} warps={config['num_warps']} stages={config['num_stages']}"


def _grid(m: int, n: int, config: dict[str, int]) -> int:
    return minitriton.cdiv(m, config["BLOCK_M"]) * minitriton.cdiv(n, config["BLOCK_N"])


class Product:
    """One product a @ b and its contenders."""

    def __init__(self, setting: Setting, m: int, n: int, k: int, b_nk: bool, dtype: str) -> None:
        self.setting, self.shape, self.b_nk, self.dtype = setting, (m, n, k), b_nk, dtype
        kind, device = DTYPES[dtype], setting.device
        self.a = torch.empty(m, k, device=device, dtype=kind)
        self.b = torch.empty(k, n, device=device, dtype=kind)
        if b_nk:
            self.b = torch.empty(n, k, device=device, dtype=kind).T
        self.out = torch.empty(m, n, device=device, dtype=BF16 if dtype == "fp8" else kind)

    def reference(self) -> list[torch.Tensor]:
        with exact_fp32():
            return [self.a.float() @ self.b.float()]

    def plain(self, module: Any, configs: list[dict[str, int]] | None = None) -> list[Trial]:
        """The pointer kernel with these configurations, or with those of its shape and type."""

        def trial(config: dict[str, int]) -> Trial:
            m, n, _ = self.shape
            grid = (_grid(m, n, config),)
            strides = (*self.a.stride(), *self.b.stride(), *self.out.stride())

            def call() -> Any:
                module.matmul_kernel[grid](
                    self.a, self.b, self.out, *self.shape, *strides, GROUP_M=8, **config
                )
                return [self.out]

            return Trial(_label(config), call, [self.out])

        if configs is None:
            configs = _configs(self.setting, *self.shape, self.a.element_size())
        return [trial(config) for config in configs]

    def described(self, package: str) -> list[Trial]:
        """The persistent kernel over tensor descriptors made on the host."""
        try:
            tools = importlib.import_module(f"{package}.tools.tensor_descriptor")
        except ImportError as error:
            raise LeftOut(f"{package} has no tensor descriptors here: {error}") from error
        if self.a.element_size() == 4:
            raise LeftOut("tf32 operands are not described")
        module = sources.load("products", package)
        itemsize, n_major = self.a.element_size(), self.b.T if self.b_nk else self.b

        def trial(option: tuple[int, ...]) -> Trial:
            config, halves = dict(zip(NAMES, option, strict=False)), bool(option[-1])
            config["BLOCK_K"] = config["BLOCK_K"] * 2 // itemsize
            bm, bn, bk = (config[name] for name in NAMES[:3])
            describe = tools.TensorDescriptor.from_tensor
            a, b = (
                describe(self.a, [bm, bk]),
                describe(n_major, [bn, bk] if self.b_nk else [bk, bn]),
            )
            c = describe(self.out, [bm, bn // 2 if halves else bn])
            programs = self.setting.processors
            grid = (min(programs, _grid(*self.shape[:2], config)),)

            def call() -> Any:
                module.descriptor_matmul_kernel[grid](
                    a,
                    b,
                    c,
                    *self.shape,
                    GROUP_M=8,
                    B_NK=self.b_nk,
                    HALVES=halves,
                    PROGRAMS=grid[0],
                    **config,
                )
                return [self.out]

            return Trial(_label(config) + " in halves" * halves, call, [self.out])

        return [trial(option) for option in self.setting.few(DESCRIPTOR, 3)]

    def library(self) -> list[Trial]:
        """The library's linear layer: fp32 is told to be tf32, as everywhere here."""
        if not self.b_nk or self.dtype == "fp8":
            raise LeftOut(
                "the library's linear layer takes weights as [N, K] in bf16, fp16 or fp32"
            )
        from minitriton.kernels import linear

        weight = self.b.T
        return [Trial("", lambda: linear(self.a, weight, precision="tf32"))]

    def cublas(self) -> list[Trial]:
        if self.dtype != "fp8":
            torch.backends.cuda.matmul.allow_tf32 = self.dtype == "tf32"
            return [Trial("", lambda: torch.matmul(self.a, self.b, out=self.out), [self.out])]
        if self.setting.device == "cpu":
            raise LeftOut("torch has no fp8 product on the CPU of this machine")
        one_ = torch.ones((), device=self.setting.device)

        def call(fast: bool) -> Any:
            return torch._scaled_mm(
                self.a, self.b, one_, one_, out_dtype=BF16, use_fast_accum=fast
            )  # fmt: skip

        return [Trial(f"fast accumulation={fast}", functools.partial(call, fast))
                for fast in (True, False)]  # fmt: skip


def matmul(setting: Setting, m: int, n: int, k: int, b_nk: bool, dtype: str) -> Case:
    product = Product(setting, m, n, k, b_nk, dtype)
    contenders = same_source("products", product.plain)
    if dtype in ("bf16", "fp16") and (min(m, n) > 128 or setting.dry):
        contenders["minitriton 192"] = lambda: product.plain(
            sources.load("products"), _odd(setting)
        )
    if b_nk and dtype != "fp8":
        contenders["minitriton library"] = product.library
    if dtype != "tf32":
        contenders["minitriton tma"] = functools.partial(product.described, "minitriton")
        contenders["triton tma"] = functools.partial(product.described, "triton")
    contenders["torch"] = product.cublas
    if dtype != "fp8" and not setting.quick:  # otherwise it would call cuBLAS, as torch does
        contenders["torch.compile"] = cases.compiled(
            torch.matmul, product.a, product.b, mode="max-autotune-no-cudagraphs"
        )
    size, out_size = product.a.element_size(), product.out.element_size()
    work = Work(size * (m * k + k * n) + out_size * m * n, 2.0 * m * n * k, dtype)
    # tensor cores keep some 14 bits of a sum of fp8 products
    bound = {"tf32": 2e-3, "fp8": 3e-2}.get(dtype, 1e-2)
    return Case(
        work, normal(product.a, product.b), product.reference, contenders, bound,
        sustained=min(m, n, k) >= 1024,
    )  # fmt: skip


def batched(setting: Setting, batch: int, m: int, n: int, k: int) -> Case:
    a = torch.empty(batch, m, k, device=setting.device, dtype=BF16)
    b = torch.empty(batch, k, n, device=setting.device, dtype=BF16)
    out = torch.empty(batch, m, n, device=setting.device, dtype=BF16)

    def make(module: Any) -> list[Trial]:
        def trial(config: dict[str, int]) -> Trial:
            grid = (_grid(m, n, config), batch)
            strides = (a.stride(0), b.stride(0), out.stride(0),
                       *a.stride()[1:], *b.stride()[1:], *out.stride()[1:])  # fmt: skip

            def call() -> Any:
                module.batched_matmul_kernel[grid](
                    a, b, out, m, n, k, *strides, GROUP_M=8, **config
                )
                return [out]

            return Trial(_label(config), call, [out])

        return [trial(config) for config in _configs(setting, m, n, k, 2)]

    contenders = same_source("products", make)
    contenders["torch"] = one(lambda: torch.bmm(a, b, out=out), outputs=[out])
    if not setting.quick:
        contenders["torch.compile"] = cases.compiled(
            torch.bmm, a, b, mode="max-autotune-no-cudagraphs"
        )

    def reference() -> list[torch.Tensor]:
        with exact_fp32():
            return [a.float() @ b.float()]

    work = Work(2 * batch * (m * k + k * n + m * n), 2.0 * batch * m * n * k, "bf16")
    return Case(work, normal(a, b), reference, contenders, bound=1e-2)


def group_ends(groups: int, rows: int) -> list[int]:
    """Ends of uneven groups that hold all rows: group i has about i + 1 shares, in steps of 8."""
    shares = groups * (groups + 1) // 2
    ends = [rows * (i + 1) * (i + 2) // 2 // shares // 8 * 8 for i in range(groups)]
    return [*ends[:-1], rows]


def tile_tables(ends: list[int], block: int) -> tuple[list[int], list[int], list[int]]:
    """(group, first row, number of rows) of each tile of at most `block` rows."""
    groups, firsts, counts = [], [], []
    start = 0
    for group, end in enumerate(ends):
        for first in range(start, end, block):
            groups.append(group)
            firsts.append(first)
            counts.append(min(block, end - first))
        start = end
    return groups, firsts, counts


def grouped(setting: Setting, groups: int, rows: int, n: int, k: int) -> Case:
    a = torch.empty(rows, k, device=setting.device, dtype=BF16)
    b = torch.empty(groups, n, k, device=setting.device, dtype=BF16).transpose(1, 2)
    out = torch.empty(rows, n, device=setting.device, dtype=BF16)
    ends = group_ends(groups, rows)
    bounds = list(zip([0, *ends], ends, strict=False))

    def make(module: Any) -> list[Trial]:
        def trial(config: dict[str, int]) -> Trial:
            tables = [torch.tensor(t, device=setting.device, dtype=torch.int32)
                      for t in tile_tables(ends, config["BLOCK_M"])]  # fmt: skip
            tiles = tables[0].numel()
            grid = (tiles * minitriton.cdiv(n, config["BLOCK_N"]),)

            def call() -> Any:
                module.grouped_matmul_kernel[grid](
                    a, b, out, *tables, tiles, n, k, b.stride(0), *a.stride(), *b.stride()[1:],
                    *out.stride(), GROUP_M=8, **config,
                )  # fmt: skip
                return [out]

            return Trial(_label(config), call, [out])

        return [trial(config) for config in _configs(setting, rows, n, k, 2)]

    offsets = torch.tensor(ends, device=setting.device, dtype=torch.int32)

    def each() -> torch.Tensor:
        for group, (start, end) in enumerate(bounds):
            torch.matmul(a[start:end], b[group], out=out[start:end])
        return out

    contenders: dict[str, Callable[[], list[Trial]]] = same_source("products", make)

    def with_torch() -> list[Trial]:
        loop = Trial("one call a group", each, [out])
        if setting.device == "cpu":
            return [loop]
        return [Trial("_grouped_mm", lambda: torch._grouped_mm(a, b, offs=offsets)), loop]

    contenders["torch"] = with_torch

    def reference() -> list[torch.Tensor]:
        with exact_fp32():
            parts = [a[s:e].float() @ b[g].float() for g, (s, e) in enumerate(bounds)]
        return [torch.cat(parts)]

    work = Work(2 * (rows * k + groups * n * k + rows * n), 2.0 * rows * n * k, "bf16")
    return Case(work, normal(a, b), reference, contenders, bound=1e-2)
