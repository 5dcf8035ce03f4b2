"""A short run on a GPU: times, ceilings and every kind of contender."""

import json
import subprocess
import sys

import pytest
import torch

from minitriton.bench.roofline import Ceilings, Work, fraction


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
    ceilings = Ceilings(**found["runs"][0]["ceilings"])
    assert ceilings.copy > 1e11
    assert len(found["cases"]) == 3
    for case in found["cases"]:
        assert {"minitriton", "torch"} <= set(case["contenders"]), case["left_out"]
        work = Work(case["bytes"], case["flop"], case["rate"])
        for entry in case["contenders"].values():
            # no bound of its own: what else runs on the card slows the copy that is the ceiling
            assert entry["cold"]["fraction"] == fraction(work, entry["cold"]["median"], ceilings)
            assert entry["warm"]["rounds"] >= 5
