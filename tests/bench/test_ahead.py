"""Compiling ahead: what is tried ends up in the cache, and nothing is launched."""

import os
import subprocess
import sys
import time

import pytest
import torch

from minitriton.bench import ahead, catalog

ONLY_COMPILE = """
import torch
from minitriton.bench import ahead, cases_rows, sources
from minitriton.bench.cases import Setting

ahead.only_compile()
case = cases_rows.softmax(Setting(device="cpu", dry=True), rows=3, columns=200)
(trial,) = case.contenders["minitriton"]()
trial.outputs[0].fill_(7)
trial.call()
assert bool((trial.outputs[0] == 7).all()), "it was launched"
print(ahead._compile(case.contenders, float("inf")), ahead._compile(case.contenders, 0.0))
"""


def python(text, **environment):
    """What a program prints, in a process of its own: compiling only is for good."""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def entries(folder):
    """Files of a cache, without what a process leaves for itself."""
    return {path.relative_to(folder) for path in folder.rglob("*") if path.suffix != ".lock"}


def test_nothing_is_launched(tmp_path):
    cache = tmp_path / "cache"
    assert python(ONLY_COMPILE, MINITRITON_CACHE_DIR=str(cache)).split() == ["2", "0"]
    found = entries(cache)
    assert found
    python(ONLY_COMPILE, MINITRITON_CACHE_DIR=str(cache))
    assert entries(cache) == found


def test_on_several_processes(tmp_path, monkeypatch):
    """Each case is told of; one that cannot be built, or ends its process, stops nothing."""
    monkeypatch.setenv("MINITRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    titles = [spec.title for spec in catalog.select(catalog.DRY, ["add", "softmax"])]
    told = []
    log = tmp_path / "log"
    ahead.compile_ahead(catalog.DRY, [*titles, "no such case"], log, None, lambda: told.append(1))
    assert len(told) == 3 and entries(tmp_path / "cache")


def test_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setenv("MINITRITON_CACHE_DIR", str(tmp_path / "cache"))
    titles = [spec.title for spec in catalog.select(catalog.DRY, ["add", "softmax"])]
    ahead.compile_ahead(catalog.DRY, titles, tmp_path / "log", time.time() - 1, lambda: None)
    assert not (tmp_path / "cache").exists() or not entries(tmp_path / "cache")


TUNED = """
import sys
import torch
import triton
import triton.language as tl
from minitriton.bench import ahead


@triton.heuristics({"TWICE": lambda operands: 2})
@triton.autotune([triton.Config({"BLOCK": n}) for n in (32, 64, 128, 256, 512)], key=[])
@triton.jit
def fill_kernel(x, TWICE: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), TWICE)


ahead.only_compile()
ahead.compile_all(slice(int(sys.argv[1]), None, 2))
x = torch.full([512], 7.0, device="cuda")
fill_kernel[(1,)](x)
assert bool((x == 7).all()), "it was launched"
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_that_tune_themselves(tmp_path):
    """Two processes share the five configurations."""
    pytest.importorskip("triton")
    file = tmp_path / "tuned.py"
    file.write_text(TUNED)
    found = []
    for part in ("0", "1"):
        environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, str(file), part], capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr
        found.append(len(list((tmp_path / "cache").rglob("*.cubin"))))
    assert found == [3, 5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_worker_compiles_no_more(tmp_path):
    """Of both compilers: what a run launches has the key of what was compiled before."""
    caches = {name: tmp_path / name for name in ("MINITRITON_CACHE_DIR", "TRITON_CACHE_DIR")}
    environment = {name: str(folder) for name, folder in caches.items()}
    title = "matmul_skinny 16x8192x8192 B[N,K]"
    text = "from minitriton.bench import ahead; ahead.only_compile(); print(ahead.compile_case"
    count = int(python(f"{text}('quick', {title!r}, float('inf')))", **environment))
    found = {name: entries(folder) for name, folder in caches.items() if folder.exists()}
    assert count >= 5 and found
    done = subprocess.run(
        [sys.executable, "-m", "minitriton", "bench", "--only", title, "--quick", "--out",
         str(tmp_path / "out")],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name, before in found.items():
        after = entries(caches[name])
        if name == "TRITON_CACHE_DIR":  # which gets launchers, too
            before, after = (
                {p for p in files if p.suffix == ".cubin"} for files in (before, after)
            )
        assert after == before
