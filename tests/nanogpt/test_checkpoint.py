"""Checkpoints: whole or not at all, of this run or refused; a run that diverges harms none."""

import os
import signal
import subprocess
import sys
import zipfile

import pytest
import torch

from examples.nanogpt import checkpoint
from examples.nanogpt.checkpoint import CheckpointError
from examples.nanogpt.train import Run, TrainingError

KILLED_WHILE_SAVING = """
import os, signal, sys
from pathlib import Path
import torch
from examples.nanogpt import checkpoint, files
where, path = sys.argv[1], Path(sys.argv[2])
kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if where == "writing":
    def write(content, file):
        file.write(b"half of it")
        file.flush()
        kill()
    torch.save = write
else:
    setattr(os, where, kill)
checkpoint.save(path, {"step": 2})
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run" / "checkpoint.pt"
    checkpoint.save(path, {"step": 1, "weights": torch.arange(1000.0), "seed": 0})
    return path


@pytest.mark.parametrize("where", ["writing", "replace"])
def test_killed_while_saving(path, where):
    command = [sys.executable, "-c", KILLED_WHILE_SAVING, where, str(path)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert checkpoint.load(path, "cpu")["step"] == 1
    checkpoint.save(path, {"step": 3})
    assert checkpoint.load(path, "cpu")["step"] == 3
    assert os.listdir(path.parent) == ["checkpoint.pt"]


def test_an_error_while_saving_leaves_the_old_file(path):
    with pytest.raises(AttributeError):
        checkpoint.save(path, {"step": lambda: 0})
    assert checkpoint.load(path, "cpu")["step"] == 1


def test_damaged_files_are_refused(path):
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as parts:
        weights = max(parts.infolist(), key=lambda i: i.file_size)
    inside = weights.header_offset + 400
    flipped = whole[:inside] + bytes([whole[inside] ^ 1]) + whole[inside + 1 :]
    for content in (b"", whole[: len(whole) // 2], whole[:-30], b"PK" * 500, flipped):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"checkpoint\.pt is damaged"):
            checkpoint.load(path, "cpu")
    with pytest.raises(CheckpointError, match="no checkpoint .*: train without --resume"):
        checkpoint.load(path.with_name("none.pt"), "cpu")


class Foreign:
    """Something that only code of its own could read."""


def test_foreign_files_are_refused(path):
    for content in ({"weights": torch.ones(3)}, [1, 2], torch.ones(2), {"format": "other-2"}):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match="is not a checkpoint of this program"):
            checkpoint.load(path, "cpu")
    torch.save(Foreign(), path)  # a pickle that would run code when loaded
    with pytest.raises(CheckpointError, match="damaged or no checkpoint"):
        checkpoint.load(path, "cpu")


def test_a_checkpoint_of_another_run_is_refused(path):
    content = checkpoint.load(path, "cpu")
    checkpoint.expect_same(path, content, {"seed": 0})
    with pytest.raises(CheckpointError, match="seed is 0 there and 1 here; resume with the option"):
        checkpoint.expect_same(path, content, {"step": 1, "seed": 1})


class Diverges:
    """An engine whose loss is not finite from some step on."""

    def __init__(self, model, step):
        self.model, self.left = model, step

    def step(self, tokens, first, learning_rate):
        self.left -= 1
        return torch.tensor([float("nan") if self.left < 0 else 2.0])

    def state_dict(self):
        return {"left": self.left}


@pytest.mark.parametrize(("fails_at", "kept"), [(7, 6), (2, None)])
def test_a_loss_that_is_not_finite_stops_the_run(
    config, corpus, tmp_path, fails_at, kept, monkeypatch
):
    monkeypatch.setattr("examples.nanogpt.train.evaluate", lambda *_: 2.0)
    model = torch.nn.Module()
    model.register_buffer("seeds", torch.zeros(config.sites, 2, dtype=torch.int64))
    run = Run(Diverges(model, fails_at), corpus, config, seed=0, folder=tmp_path, save_every=3)
    words = "no checkpoint was written" if kept is None else "last good checkpoint is .*at step 6"
    with pytest.raises(TrainingError, match=f"the loss at step {fails_at} is nan; .*{words}"):
        run.train()
    if kept is None:
        assert not run.path.exists()
    else:
        assert checkpoint.load(run.path, "cpu")["step"] == kept
