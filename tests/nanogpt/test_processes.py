"""Two processes with DistributedDataParallel over gloo train like one."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from examples.nanogpt.__main__ import main

OPTIONS = [
    "--config", "tiny", "--steps", "2", "--batch", "4", "--context", "8", "--eval-every", "2",
    "--eval-batches", "1", "--sample", "0", "--dropout", "0", "--tier", "fp32",
]  # fmt: skip


def start(options, folder, rank, port):
    """A process as torchrun starts it."""
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, "-m", "examples.nanogpt", *options, "--out", str(folder)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def record(folder):
    return json.loads((folder / "minitriton" / "record.json").read_text())


def test_two_processes_train_like_one(tmp_path, text, monkeypatch):
    """Also where each takes its share of a batch in two parts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "text.txt").write_text(text)
    options = [*OPTIONS, "--data", str(tmp_path / "text.txt")]
    assert main([*options, "--out", str(tmp_path / "alone")]) == 0
    one = record(tmp_path / "alone")
    for parts in (1, 2):
        both, port = tmp_path / str(parts), free_port()
        arguments = [*options, "--accumulate", str(parts)]
        processes = [start(arguments, both, rank, port) for rank in range(2)]
        said = [p.communicate(timeout=240)[1] for p in processes]
        assert [p.returncode for p in processes] == [0, 0], said
        two = record(both)
        assert len(one["losses"]) == 2 and two["losses"] == pytest.approx(one["losses"], abs=1e-5)
        for mine, other in zip(two["evaluations"], one["evaluations"], strict=True):
            assert mine == pytest.approx(other, abs=1e-5)
