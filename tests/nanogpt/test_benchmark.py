"""The benchmark script on torch's engine alone: what it writes, and that it stops in time."""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import nanogpt_runs
import nanogpt_speed


def test_results_are_written(tmp_path, text, monkeypatch, unchecked):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "text.txt").write_text(text)
    out = tmp_path / "out" / "nanogpt"
    common = ["nanogpt_speed.py", "--config", "tiny", "--data", str(tmp_path / "text.txt")]
    common += ["--engines", "torch", "--out", str(out), "--full-steps", "2", "--timed", "3"]
    common += ["--warm", "1", "--speed-tiers", "fp32"]
    for limit in ("60", "0"):
        arguments = [*common, "--parts", "speed,full", "--limit", limit]
        monkeypatch.setattr(sys, "argv", arguments)
        nanogpt_speed.main()
        found = json.loads(out.with_suffix(".json").read_text())
        entry = found["speed"]["tiny, fp32, torch"]  # without time, the old one stays
        assert entry["steps"] == 3 and entry["tokens per second"] > 0
    assert found["best validation loss"]["torch, fp32"]["runs"] == 1
    curves = json.loads(out.with_suffix(".curves.json").read_text())
    assert len(curves["full"]["torch, fp32, seed 0"]["losses"]) == 2
    assert out.with_suffix(".png").exists()


def test_differences_of_curves():
    gap = nanogpt_runs.difference([1.0] * 100, [1.0] * 9 + [1.5] + [1.0] * 99)
    assert gap["steps"] == 100 and gap["max of first 10"] == gap["max of first 100"] == 0.5
    assert gap["mean"] == pytest.approx(-0.005) and "max of first 1000" not in gap
