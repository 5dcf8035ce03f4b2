"""Text from a trained model: one token at a time, by Gumbel noise from a seed."""

from __future__ import annotations

import torch

import minitriton as triton
import minitriton.language as tl
from examples.nanogpt.data import DataError, Tokeniser
from examples.nanogpt.model import LanguageModel


@triton.jit
def _choose_kernel(
    logits_ptr, out_ptr, stride, classes, temperature, seed, step, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    best, choice = -float("inf"), 0
    for first in range(0, classes, BLOCK):
        at = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * stride + at, mask=at < classes, other=-float("inf"))
        noise = tl.rand(seed, (step * tl.num_programs(0) + row) * classes + at)
        score = logits.to(tl.float32) / temperature - tl.log(-tl.log(tl.maximum(noise, 1e-20)))
        top = tl.max(score, 0)
        place = first + tl.argmax(score, 0)
        choice = tl.where(top > best, place, choice)
        best = tl.maximum(best, top)
    tl.store(out_ptr + row, choice)


def choose(
    logits: torch.Tensor, classes: int, temperature: float, seed: int, step: int
) -> torch.Tensor:
    """A class for each row of logits [rows, V], from softmax(logits[:, :classes] / temperature)."""
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _choose_kernel[(logits.shape[0],)](
        logits, out, logits.stride(0), classes, temperature, seed, step, BLOCK=1024
    )
    return out


def encode_start(tokeniser: Tokeniser, start: str, context: int) -> list[int]:
    """The tokens of a text (or token 0) that a model of this context can continue."""
    numbers = tokeniser.encode(start) or [0]
    if len(numbers) > context:
        raise DataError(
            f"a text of {len(numbers)} tokens to continue; the model's context is {context}: "
            "shorten it"
        )
    return numbers


@torch.no_grad()
def generate(
    model: LanguageModel, tokeniser: Tokeniser, start: str, length: int, *,
    temperature: float = 0.8, seed: int = 0,
) -> str:  # fmt: skip
    """`start` (or token 0) and `length` more tokens, each from the last `context` before it.

    DataError if `start` is longer than the model's context, or has unknown characters.
    """
    context = model.config.context
    numbers = encode_start(tokeniser, start, context)
    model.eval()
    for step in range(length):
        ids = torch.tensor([numbers[-context:]], dtype=torch.int32, device=model.device)
        last = model.logits(ids)[:, -1]
        numbers.append(int(choose(last, model.tokens, temperature, seed, step)))
    model.train()
    return tokeniser.decode(numbers)
