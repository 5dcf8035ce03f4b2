"""Checkpoints that survive a kill at any moment and are read only if whole and of the same run."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from examples.nanogpt.files import replace_file

FORMAT = "minitriton-nanogpt-1"


class CheckpointError(RuntimeError):
    """A file that is no checkpoint of this program, or not of this run."""


def save(path: Path, content: dict[str, Any]) -> None:
    """Replaces `path` as a whole; the old file stays until the new one is on the disk."""
    replace_file(path, lambda file: torch.save({"format": FORMAT, **content}, file))


def load(path: Path, device: str) -> dict[str, Any]:
    """The content of a checkpoint; CheckpointError for a file that is missing, cut or foreign."""
    if not path.exists():
        raise CheckpointError(f"no checkpoint {path}: train without --resume first")
    try:
        with zipfile.ZipFile(path) as parts:  # torch itself does not look at the checksums
            damaged = parts.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: the checksum of {damaged} is wrong")
        content = torch.load(path, map_location=device, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # readers raise whatever they meet in a damaged file
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} is not a checkpoint of this program: {found!r}")
    return content


def expect_same(path: Path, content: dict[str, Any], wanted: dict[str, Any]) -> None:
    """CheckpointError naming the first thing in which a checkpoint is of another run."""
    for name, value in wanted.items():
        if content.get(name) != value:
            raise CheckpointError(
                f"{path} is of another run: {name} is {content.get(name)!r} there and {value!r} "
                "here; resume with the options of that run, or choose another --out"
            )
