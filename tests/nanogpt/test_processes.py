"""Two processes with DistributedDataParallel over gloo train like one."""

import json
import os
import socket
import subprocess
import sys

import pytest

OPTIONS = [
    "--config", "tiny", "--steps", "3", "--batch", "4", "--context", "8", "--eval-every", "3",
    "--eval-batches", "1", "--sample", "0", "--dropout", "0", "--tier", "fp32",
]  # fmt: skip


def start(options, folder, rank=0, ranks=1, port=0):
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    if ranks > 1:  # what torchrun sets
        environment |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    command = [sys.executable, "-m", "examples.nanogpt", *options, "--out", str(folder)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(*processes):
    said = [p.communicate(timeout=240)[1] for p in processes]
    return [p.returncode for p in processes], said


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_train_like_one(tmp_path, text, accumulate):
    (tmp_path / "text.txt").write_text(text)
    options = [*OPTIONS, "--data", str(tmp_path / "text.txt"), "--accumulate", str(accumulate)]
    port = free_port()
    alone = start(options, tmp_path / "alone")
    assert finish(alone)[0] == [0]
    status, said = finish(
        *(start(options, tmp_path / "both", rank, 2, port) for rank in range(2))
    )
    assert status == [0, 0], said
    one, two = (
        json.loads((tmp_path / name / "minitriton" / "record.json").read_text())
        for name in ("alone", "both")
    )
    assert len(one["losses"]) == 3 and two["losses"] == pytest.approx(one["losses"], abs=1e-5)
    for mine, other in zip(two["evaluations"], one["evaluations"], strict=True):
        assert mine == pytest.approx(other, abs=1e-5)
