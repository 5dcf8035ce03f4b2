"""A short run on a GPU: times, ceilings and every kind of contender."""

import json
import subprocess
import sys

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_short_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "minitriton", "bench", "--only", "add", "gelu", "matmul_skinny",
         "--quick", "--out", str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    log = tmp_path / "worker.log"
    assert done.returncode == 0, done.stderr + log.read_text()
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["runs"][0]["ceilings"]["copy"] > 1e11
    assert len(found["cases"]) == 3
    for case in found["cases"]:
        assert {"minitriton", "torch"} <= set(case["contenders"]), case["left_out"]
        for entry in case["contenders"].values():
            assert 0 < entry["cold"]["fraction"] < 1.1 and entry["warm"]["rounds"] >= 5
