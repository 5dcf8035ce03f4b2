"""Attention forward and backward: causal or not, head dims 64 to 256, grouped queries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from minitriton.bench import sources
from minitriton.bench.cases import (
    Case,
    LeftOut,
    Setting,
    Trial,
    backward,
    exact_fp32,
    leaves,
    normal,
    same_source,
)
from minitriton.bench.roofline import Work

BF16 = torch.bfloat16
# BLOCK_M, BLOCK_N, warps, stages by head_dim; the best known first
FORWARD = {
    64: ((64, 128, 4, 2), (64, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3)),
    128: ((128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)),
    256: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)),
}
# The same for tiles of which Triton has none: three warpgroups share 192 rows; 176 keys.
ODD_FORWARD = {
    64: ((192, 128, 12, 3), (192, 128, 12, 2)),
    128: ((128, 176, 8, 2), (192, 80, 12, 2)),
}
# rows and columns of the kernel for keys, of that for queries, warps, stages
BACKWARD = {
    64: ((64, 64, 64, 64, 4, 3), (64, 128, 128, 64, 8, 2), (32, 128, 128, 32, 4, 3)),
    128: ((64, 64, 64, 64, 4, 2), (64, 128, 128, 64, 8, 2), (32, 128, 128, 32, 8, 3)),
    256: (
        (32, 32, 128, 32, 8, 2),
        (32, 64, 128, 32, 8, 2),
        (32, 64, 64, 32, 8, 2),
        (64, 64, 64, 64, 8, 1),
    ),
}
TINY_FORWARD, TINY_BACKWARD = ((32, 32, 4, 2),), ((32, 32, 32, 32, 4, 2),)
TINY_ODD = ((32, 48, 4, 2),)


class Attention:
    """Operands [batch, tokens, heads, head_dim] and the contenders of both passes."""

    def __init__(
        self, setting: Setting, batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int,
        causal: bool,
    ) -> None:  # fmt: skip
        self.setting, self.causal = setting, causal
        self.batch, self.tokens, self.heads, self.kv_heads = batch, tokens, heads, kv_heads
        self.group, self.head_dim, self.scale = heads // kv_heads, head_dim, head_dim**-0.5
        empty = functools.partial(torch.empty, device=setting.device, dtype=BF16)
        self.q, self.out, self.grad = (empty(batch, tokens, heads, head_dim) for _ in range(3))
        self.k, self.v = (empty(batch, tokens, kv_heads, head_dim) for _ in range(2))
        self.inputs = [self.q, self.k, self.v]
        self.lse, self.delta = (
            torch.empty(batch, heads, tokens, device=setting.device) for _ in range(2)
        )

    def refill(self) -> None:
        normal(*self.inputs, self.grad)()

    def work(self, *, backward: bool) -> Work:
        """4 S^2 d operations a head forward, half of it if causal; 2.5 times as many backward."""
        pairs = self.tokens**2 / (2 if self.causal else 1)
        flop = 4.0 * self.batch * self.heads * pairs * self.head_dim
        moved = 2 * (2 * self.q.numel() + 2 * self.k.numel())  # q, k, v and o
        # the gradient of o besides, and those of q, k and v
        return Work(2 * moved, 2.5 * flop, "bf16") if backward else Work(moved, flop, "bf16")

    # --- references in fp32, head by head: scores of 16k tokens take a gigabyte

    def _heads(self) -> list[tuple[int, int, int]]:
        return [(b, h, h // self.group) for b in range(self.batch) for h in range(self.heads)]

    def _weights(self, b: int, h: int, kv: int) -> torch.Tensor:
        scores = self.q[b, :, h].float() @ self.k[b, :, kv].float().T * self.scale
        if self.causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu_(1)
            scores.masked_fill_(hidden, -torch.inf)
        return torch.softmax(scores, -1)

    def reference(self) -> list[torch.Tensor]:
        out = torch.empty_like(self.q, dtype=torch.float32)
        with exact_fp32():
            for b, h, kv in self._heads():
                out[b, :, h] = self._weights(b, h, kv) @ self.v[b, :, kv].float()
        return [out]

    def reference_gradients(self) -> list[torch.Tensor]:
        dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in self.inputs)
        with exact_fp32():
            for b, h, kv in self._heads():
                p, grad = self._weights(b, h, kv), self.grad[b, :, h].float()
                q, k, v = (
                    self.q[b, :, h].float(),
                    self.k[b, :, kv].float(),
                    self.v[b, :, kv].float(),
                )
                dp = grad @ v.T
                slope = p * (dp - (p * dp).sum(-1, keepdim=True)) * self.scale
                dq[b, :, h] = slope @ k
                dk[b, :, kv] += slope.T @ q
                dv[b, :, kv] += p.T @ grad
        return [dq, dk, dv]

    # --- the tutorial's kernels

    def _strides(self) -> tuple[int, ...]:
        return (*self.q.stride()[:3], *self.k.stride()[:3])

    def launch_forward(
        self, module: Any, config: tuple[int, ...], ragged: bool = False
    ) -> list[torch.Tensor]:
        block_m, block_n, warps, stages = config
        module.attention_kernel[(-(-self.tokens // block_m), self.batch * self.heads)](
            self.q, self.k, self.v, self.out, self.lse, self.scale, self.heads, self.tokens,
            *self._strides(), HEAD_DIM=self.head_dim, BLOCK_M=block_m, BLOCK_N=block_n,
            GROUP=self.group, CAUSAL=self.causal, RAGGED=ragged, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
        return [self.out]

    def _options(self, table: dict[int, Any], tiny: Any) -> list[tuple[int, ...]]:
        return list(tiny) if self.setting.dry else self.setting.few(table[self.head_dim], 2)

    def plain(self, module: Any) -> list[Trial]:
        return self._trials(module, self._options(FORWARD, TINY_FORWARD), ragged=False)

    def odd(self) -> list[Trial]:
        """The same source in tiles that do not divide the number of tokens."""
        options = self._options(ODD_FORWARD, TINY_ODD)
        return self._trials(sources.load("attentions", "minitriton"), options, ragged=True)

    def _trials(self, module: Any, options: list[tuple[int, ...]], *, ragged: bool) -> list[Trial]:
        return [
            Trial("{}x{} warps={} stages={}".format(*config),
                  functools.partial(self.launch_forward, module, config, ragged),
                  [self.out, self.lse])
            for config in options
        ]  # fmt: skip

    def plain_backward(self, module: Any) -> list[Trial]:
        forward = self._options(FORWARD, TINY_FORWARD)[-1]
        grads = [torch.empty_like(t) for t in self.inputs]

        def trial(config: tuple[int, ...]) -> Trial:
            label = "keys {}x{} queries {}x{} warps={} stages={}".format(*config)
            call = functools.partial(self.launch_backward, module, config, grads)
            refresh = lambda: self.launch_forward(module, forward)  # noqa: E731
            return Trial(label, call, [*grads, self.delta], refresh)

        return [trial(config) for config in self._options(BACKWARD, TINY_BACKWARD)]

    def launch_backward(
        self, module: Any, config: tuple[int, ...], grads: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        key_m, key_n, query_m, query_n, warps, stages = config
        dq, dk, dv = grads
        shared = (self.scale, self.heads, self.tokens, *self._strides())
        options = {"HEAD_DIM": self.head_dim, "GROUP": self.group, "CAUSAL": self.causal,
                   "num_warps": warps, "num_stages": stages}  # fmt: skip
        operands = (self.q, self.k, self.v, self.grad, self.lse, self.delta)
        rows = min(128, self.tokens)
        module.delta_kernel[(self.tokens // rows, self.batch * self.heads)](
            self.out, self.grad, self.delta, self.heads, self.tokens, *self.q.stride()[:3],
            HEAD_DIM=self.head_dim, BLOCK_M=rows,
        )  # fmt: skip
        module.attention_keys_kernel[(self.tokens // key_n, self.batch * self.kv_heads)](
            *operands, dk, dv, *shared, BLOCK_M=key_m, BLOCK_N=key_n, **options
        )
        module.attention_queries_kernel[(self.tokens // query_m, self.batch * self.heads)](
            *operands, dq, *shared, BLOCK_M=query_m, BLOCK_N=query_n, **options
        )
        return grads

    # --- the library, torch, torch.compile

    def library(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        from minitriton.kernels import attention as attend

        out = attend(q, k, v, causal=self.causal)
        assert isinstance(out, torch.Tensor)
        return out

    def torch_functions(self) -> list[tuple[str, Callable[..., torch.Tensor]]]:
        """scaled_dot_product_attention by each fused backend that takes part."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call(backend: Any, *operands: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in operands)
            with sdpa_kernel([backend]):
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=self.causal, enable_gqa=self.group > 1
                )
            return out.transpose(1, 2)

        if self.setting.device == "cpu":
            return [("math", functools.partial(call, SDPBackend.MATH))]
        return [
            ("cuDNN", functools.partial(call, SDPBackend.CUDNN_ATTENTION)),
            ("FlashAttention 2", functools.partial(call, SDPBackend.FLASH_ATTENTION)),
        ]

    def flex(self) -> Callable[..., torch.Tensor]:
        """FlexAttention, which torch.compile turns into a Triton kernel."""
        try:
            from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        except ImportError as error:
            raise LeftOut(f"this torch has no FlexAttention: {error}") from error
        mask, size = None, self.tokens
        if self.causal:
            seen = lambda b, h, i, j: i >= j  # noqa: E731
            mask = create_block_mask(seen, None, None, size, size, device=self.setting.device)

        def call(*operands: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.transpose(1, 2) for t in operands)
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=self.group > 1)
            assert isinstance(out, torch.Tensor)
            return out.transpose(1, 2)

        return call

    def compiled(self) -> Callable[..., torch.Tensor]:
        import torch._functorch.config as settings

        settings.donated_buffer = False  # backward passes are repeated
        fast: Callable[..., torch.Tensor] = torch.compile(self.flex(), dynamic=False)
        return fast

    def case(self) -> Case:
        contenders = same_source("attentions", self.plain)
        if self.setting.dry or (self.head_dim in ODD_FORWARD and not self.setting.quick):
            contenders["minitriton 192"] = self.odd
        inputs = self.inputs
        contenders["minitriton library"] = lambda: [Trial("", lambda: self.library(*inputs))]
        contenders["torch"] = lambda: [
            Trial(name, functools.partial(function, *inputs))
            for name, function in self.torch_functions()
        ]

        def with_compile() -> list[Trial]:
            function = self.compiled()
            return [Trial("FlexAttention", lambda: function(*inputs))]

        contenders["torch.compile"] = with_compile
        return Case(
            self.work(backward=False), self.refill, self.reference, contenders, bound=1e-2,
            sustained=self.tokens >= 8192,
        )  # fmt: skip

    def backward_case(self) -> Case:
        own, grad = leaves(*self.inputs), self.grad
        contenders = same_source("attentions", self.plain_backward)
        contenders["minitriton library"] = lambda: [backward("", self.library, own, grad)]
        contenders["torch"] = lambda: [
            backward(name, function, own, grad) for name, function in self.torch_functions()
        ]
        contenders["torch.compile"] = lambda: [
            backward("FlexAttention", self.compiled(), own, grad)
        ]
        work = self.work(backward=True)
        return Case(work, self.refill, self.reference_gradients, contenders, bound=1.5e-2)


def attention(setting: Setting, **arguments: Any) -> Case:
    return Attention(setting, **arguments).case()


def attention_backward(setting: Setting, **arguments: Any) -> Case:
    return Attention(setting, **arguments).backward_case()
