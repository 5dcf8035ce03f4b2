"""Two processes with DistributedDataParallel over gloo train like one."""

import json
import multiprocessing
import os
import socket
import sys

import pytest
import torch

from examples.nanogpt.__main__ import main

OPTIONS = [
    "--config", "tiny", "--steps", "2", "--batch", "4", "--context", "8", "--eval-every", "2",
    "--eval-batches", "1", "--sample", "0", "--dropout", "0", "--tier", "fp32",
]  # fmt: skip


def start(arguments, rank, port):
    """What a process that torchrun starts does; the exit status is that of the program."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    sys.exit(main(arguments))


@pytest.fixture
def server():
    """Processes that begin with everything imported and nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def record(folder):
    return json.loads((folder / "minitriton" / "record.json").read_text())


def test_two_processes_train_like_one(tmp_path, text, monkeypatch, unchecked, server):
    """Also where each takes its share of a batch in two parts."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "text.txt").write_text(text)
    options = [*OPTIONS, "--data", str(tmp_path / "text.txt")]
    assert main([*options, "--out", str(tmp_path / "alone")]) == 0
    one = record(tmp_path / "alone")
    for parts in (1, 2):
        both, port = tmp_path / str(parts), free_port()
        arguments = [*options, "--accumulate", str(parts), "--out", str(both)]
        processes = [server.Process(target=start, args=(arguments, r, port)) for r in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(240)
        assert [process.exitcode for process in processes] == [0, 0]
        two = record(both)
        assert len(one["losses"]) == 2 and two["losses"] == pytest.approx(one["losses"], abs=1e-5)
        for mine, other in zip(two["evaluations"], one["evaluations"], strict=True):
            assert mine == pytest.approx(other, abs=1e-5)
