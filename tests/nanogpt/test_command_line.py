"""`python -m examples.nanogpt` from end to end, and what it says when it cannot go on."""

import json

import pytest
import torch

from examples.nanogpt.__main__ import main
from examples.nanogpt.train import Run

# eight characters, one window a step: a second each in the emulator
QUICK = [
    "--config", "tiny", "--steps", "2", "--batch", "1", "--context", "8", "--eval-every", "2",
    "--eval-batches", "1", "--sample", "1",
]  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def train(tmp_path, text, on_cpu, unchecked, capsys):
    """Runs the command line; (exit status, stdout, stderr)."""
    (tmp_path / "text.txt").write_text(text)

    def run(*arguments, quick=QUICK):
        given = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
        status = main([*quick, *given, *map(str, arguments)])
        return status, *capsys.readouterr()

    return run


def test_compare_then_resume(train, tmp_path):
    status, said, _ = train("--compare", "torch", "--same-masks", "--tier", "fp32")
    assert status == 0
    assert "minitriton: 2 steps" in said and "torch: 2 steps" in said
    gap = float(said.split("largest difference of a step's loss: ")[1].split(",")[0])
    assert gap < 1e-5
    out = tmp_path / "out"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((out / "minitriton" / "record.json").read_text())
    assert len(record["losses"]) == 2 and [e[0] for e in record["evaluations"]] == [0, 2]

    status, _, said = train("--tier", "fp32")
    assert status == 2 and "--resume continues that run, --overwrite begins anew" in said
    status, said, _ = train("--tier", "fp32", "--resume", "--prompt", "one ")
    assert status == 0 and "minitriton: 2 steps" in said and "\none " in said
    status, _, said = train("--tier", "fp32", "--resume", "--seed", 1)
    assert status == 2 and "checkpoint.pt is of another run: seed is 0 there and 1 here" in said
    status, _, said = train("--tier", "fp32", "--resume", "--context", 4)
    assert status == 2 and "context is 8 there and 4 here" in said


def test_without_a_gpu_the_tiny_one_is_named(train):
    for config in ("shakespeare", "124m-shape", "k3"):
        status, _, said = train(quick=["--config", config])
        assert status == 2
        assert said == (
            f"error: no GPU: '{config}' would take days in the emulator; use --config tiny\n"
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "none.txt"], "no file none.txt: give a text with --data PATH"),
        (["--context", "5000"], "tokens is too short: a tenth of it"),
        (["--context", "0"], "--context must be positive, got 0"),
        (["--dropout", "1"], "--dropout must be at least 0 and below 1"),
        (["--accumulate", "2"], "a batch of 1 does not divide among 1 processes that take it in 2"),
        (["--resume"], "no checkpoint "),
        (["--compare", "torch", "--engine", "torch"], "--compare torch is the engine itself"),
        (["--config", "k3-tiny", "--tier", "bf16"], "the K3 model is trained in fp32 only"),
        (["--config", "k3-tiny", "--dropout", "0.1"], "K3 has no dropout"),
        (["--prompt", "Q"], "characters that the corpus does not have: ['Q']"),
        (["--prompt", "one one one"], "a text of 11 tokens to continue; the model's context is 8"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_cannot_be_done_is_said(train, arguments, words):
    status, _, said = train(*arguments)
    assert status == 2 and said.startswith("error: ") and words in said and "Traceback" not in said


def test_a_plot_needs_matplotlib_before_anything_is_trained(train, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, said = train("--compare", "torch")
    assert status == 2 and "pip install minitriton[examples]" in said


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(train, tmp_path, monkeypatch):
    def record(folder):
        found = json.loads((tmp_path / folder / "minitriton" / "record.json").read_text())
        return found["losses"], found["evaluations"]

    def step(run):
        if run.done == 1:
            raise KeyboardInterrupt
        return right(run)

    assert train("--out", tmp_path / "whole")[0] == 0
    right = Run.step
    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", step)
        status, _, said = train("--save-every", "1")
    assert status == 130 and "interrupted; --resume continues from a checkpoint" in said
    assert len(record("out")[0]) == 1
    assert train("--resume")[0] == 0 and record("out") == record("whole")
