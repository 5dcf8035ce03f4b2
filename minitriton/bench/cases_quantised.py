"""Products of bf16 rows and weights in 8 and 4 bits, beside those of the same weights in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import minitriton
from minitriton.bench import cases
from minitriton.bench.cases import Case, Setting, Trial, exact_fp32, normal, one, same_source
from minitriton.bench.roofline import Work

BF16 = torch.bfloat16
GROUP = 128  # of the depth, which shares a scale
NAMES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
WIDE = (
    (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
)  # fmt: skip
FEW = ((64, 64, 128, 4, 4), (64, 128, 128, 4, 3), (64, 128, 128, 8, 3), (64, 64, 64, 4, 5))
TINY = (16, 32, 32, 4, 2)


def _trials(
    setting: Setting, m: int, n: int, launch: Callable[..., Any], out: torch.Tensor
) -> list[Trial]:
    """launch(grid, **config) for each configuration that suits so many rows."""
    table = WIDE if m > 64 else [(min(m, 64), *option[1:]) for option in FEW]

    def trial(option: tuple[int, ...]) -> Trial:
        config = dict(zip(NAMES, option, strict=True))
        grid = (n // config["BLOCK_N"], minitriton.cdiv(m, config["BLOCK_M"]))

        def call() -> list[torch.Tensor]:
            launch(grid, **config)
            return [out]

        block = "x".join(map(str, option[:3]))
        return Trial(f"{block} warps={option[3]} stages={option[4]}", call, [out])

    return [trial(option) for option in ([TINY] if setting.dry else setting.few(table, 2))]


def _case(
    setting: Setting, x: torch.Tensor, weight_bytes: int, n: int, refill: Callable[[], None],
    make: Callable[[Any], list[Trial]], weights: Callable[[], torch.Tensor],
) -> Case:  # fmt: skip
    """weights(): [K, N] in bf16, made anew from the stored ones."""
    m, k = x.shape
    contenders = same_source("quantised", make)
    contenders["torch"] = one(lambda: [x @ weights()], "makes bf16 weights, then cuBLAS")
    if not setting.quick:
        contenders["torch.compile"] = cases.compiled(lambda: [x @ weights()])

    def reference() -> list[torch.Tensor]:
        with exact_fp32():
            return [x.float() @ weights().float()]

    work = Work(weight_bytes + 2 * m * (k + n), 2.0 * m * n * k, "bf16")
    return Case(work, refill, reference, contenders, bound=1e-2)


def w8a16(setting: Setting, m: int, n: int, k: int) -> Case:
    """Weights stored along the depth, [N, K]."""
    x, out = (torch.empty(m, size, device=setting.device, dtype=BF16) for size in (k, n))
    w = torch.empty(n, k, device=setting.device, dtype=torch.int8)
    scale = torch.empty(n, device=setting.device)

    def refill() -> None:
        normal(x)()
        w.random_(-127, 128)
        scale.uniform_(0.5, 1.0)

    def make(module: Any) -> list[Trial]:
        def launch(grid: tuple[int, ...], **config: int) -> None:
            module.w8a16_kernel[grid](x, w, scale, out, m, n, k, 1, k, **config)

        return _trials(setting, m, n, launch, out)

    moved = n * k + 4 * n
    return _case(setting, x, moved, n, refill, make, lambda: (w * scale[:, None]).to(BF16).T)


def w4a16(setting: Setting, m: int, n: int, k: int) -> Case:
    """Eight weights in a word, as GPTQ stores them; a bf16 scale for each 128 of the depth."""
    x, out = (torch.empty(m, size, device=setting.device, dtype=BF16) for size in (k, n))
    words = torch.empty(k // 8, n, device=setting.device, dtype=torch.int32)
    scale = torch.empty(k // GROUP, n, device=setting.device, dtype=BF16)
    places = torch.arange(0, 32, 4, device=setting.device, dtype=torch.int32)[None, :, None]

    def refill() -> None:
        normal(x)()
        words.random_(-(2**31), 2**31)
        scale.uniform_(0.5, 1.0)

    def make(module: Any) -> list[Trial]:
        def launch(grid: tuple[int, ...], **config: int) -> None:
            module.w4a16_kernel[grid](x, words, scale, out, m, n, k, GROUP=GROUP, **config)

        return _trials(setting, m, n, launch, out)

    def weights() -> torch.Tensor:
        numbers = ((words[:, None, :] >> places) & 15) - 8
        grouped = numbers.view(k // GROUP, GROUP, n).to(BF16) * scale[:, None, :]
        return grouped.view(k, n)

    moved = n * k // 2 + 2 * scale.numel()
    return _case(setting, x, moved, n, refill, make, weights)
