"""Text as tokens: where it comes from, tokenisers, and batches that a step number determines."""

from __future__ import annotations

import hashlib
import http.client
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import minitriton as triton
import minitriton.language as tl
from examples.nanogpt.files import replace_file

SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


class DataError(RuntimeError):
    """A corpus that is not there, or not what it should be."""


@dataclass(frozen=True)
class Tokeniser:
    """Characters (or bytes) to numbers and back."""

    alphabet: str  # the characters in order of their numbers; empty: bytes

    @property
    def tokens(self) -> int:
        return len(self.alphabet) or 256

    def encode(self, text: str) -> list[int]:
        """Numbers of a text; DataError for a character that the corpus does not have."""
        if not self.alphabet:
            return list(text.encode())
        numbers = {c: i for i, c in enumerate(self.alphabet)}
        unknown = sorted(set(text) - set(numbers))
        if unknown:
            raise DataError(f"characters that the corpus does not have: {unknown}")
        return [numbers[c] for c in text]

    def decode(self, numbers: list[int]) -> str:
        """The text of some numbers; bytes that are no UTF-8 become replacement characters."""
        if not self.alphabet:
            return bytes(n % 256 for n in numbers).decode(errors="replace")
        return "".join(self.alphabet[n] for n in numbers)


@dataclass(frozen=True)
class Corpus:
    """A text split into 90 % for training and 10 % for validation, as tokens on the device."""

    tokeniser: Tokeniser
    train: torch.Tensor  # int32 [n]
    validation: torch.Tensor
    digest: str  # sha256 of the text


def load_text(path: Path | None, say: Callable[[str], None] = print) -> str:
    """The text of `path`, or tiny Shakespeare, downloaded once into the user's cache and checked.

    DataError if it is missing, empty, no UTF-8, or if the download is not what it should be.
    """
    if path is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise DataError(f"no file {path}: give a text with --data PATH") from error
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {path} as UTF-8 text: {error}") from error
        if not text:
            raise DataError(f"{path} is empty")
        return text
    kept = _cache_folder() / "tinyshakespeare.txt"
    if not kept.exists() or _digest(kept.read_bytes()) != SHAKESPEARE_SHA256:
        say(f"downloading tiny Shakespeare to {kept}")
        _download(kept)
    return kept.read_text(encoding="utf-8")


def _cache_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("minitriton")) / "nanogpt"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _download(to: Path) -> None:
    try:
        with urllib.request.urlopen(SHAKESPEARE, timeout=30) as answer:
            content = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"cannot download {SHAKESPEARE}: {error}; give a text with --data PATH"
        ) from error
    if _digest(content) != SHAKESPEARE_SHA256:
        raise DataError(
            f"{SHAKESPEARE} gave {len(content)} bytes with sha256 {_digest(content)}, not "
            f"{SHAKESPEARE_SHA256}; give a text with --data PATH"
        )
    replace_file(to, lambda file: file.write(content))


def make_corpus(text: str, context: int, by_byte: bool, device: str) -> Corpus:
    """Tokens of a text by character (or byte); DataError if a part is too short for one window."""
    tokeniser = Tokeniser("" if by_byte else "".join(sorted(set(text))))
    numbers = torch.tensor(tokeniser.encode(text), dtype=torch.int32)
    cut = len(numbers) * 9 // 10
    if len(numbers) - cut < context + 2:
        raise DataError(
            f"a text of {len(numbers)} tokens is too short: a tenth of it is for validation and "
            f"must be longer than the context, {context}, by two"
        )
    return Corpus(
        tokeniser, numbers[:cut].to(device), numbers[cut:].to(device), _digest(text.encode())
    )


def offsets(length: int, context: int, batch: int, seed: int, step: int) -> torch.Tensor:
    """First tokens of the windows of a batch, int64 [batch] on the CPU: a function of the numbers
    given, whatever was drawn before, so that a resumed run sees what an uninterrupted one sees."""
    mixed = int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "little")
    generator = torch.Generator().manual_seed(mixed)
    return torch.randint(length - context, (batch,), generator=generator)


@triton.jit
def _window_kernel(tokens_ptr, first_ptr, ids_ptr, targets_ptr, context, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tokens_ptr + tl.load(first_ptr + row) + at
    mask = at < context
    tl.store(ids_ptr + row * context + at, tl.load(source, mask=mask), mask=mask)
    tl.store(targets_ptr + row * context + at, tl.load(source + 1, mask=mask), mask=mask)


def windows(
    tokens: torch.Tensor, first: torch.Tensor, ids: torch.Tensor, targets: torch.Tensor
) -> None:
    """Fills ids and targets, int32 [batch, context], with the windows of `tokens` that begin at
    `first`, int64 [batch] on the same device; targets are one token later."""
    batch, context = ids.shape
    _window_kernel[(batch, triton.cdiv(context, 256))](
        tokens, first, ids, targets, context, BLOCK=256
    )
