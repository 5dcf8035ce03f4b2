"""Compiles what a run will try, on many cores, before anything is measured.

Both compilers keep what they make on disk, where the worker finds it. Contenders that tune
themselves, and those of torch.compile, compile in the worker.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from minitriton.bench import catalog

MOST_PROCESSES = 16  # each has a context on the GPU and the inputs of a case
LONGEST_SECONDS = 420.0  # all of it; the worker compiles what is missing then


def compile_ahead(
    size: str, titles: list[str], log: Path, deadline: float | None, watch: Callable[[], None]
) -> None:
    """Compile for these cases until the deadline (time.time()); `watch` is called after each.

    What does not compile is left to the worker, which tells why. Output goes to the end of `log`.
    """
    jobs = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(titles))
    if jobs < 2:
        return
    end = min(deadline or float("inf"), time.time() + LONGEST_SECONDS)
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(str(log),)
    )
    try:
        work = [pool.submit(compile_case, size, title, end) for title in titles]
        for done in as_completed(work, timeout=max(1.0, end + 60 - time.time())):
            done.exception()  # of a process that ended, say
            watch()
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()


def _begin(log: str) -> None:
    """In each process: output into the log, and no kernel is launched from now on."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    only_compile()


def only_compile() -> None:
    """Makes launches compile instead, in this process, under both compilers."""
    from minitriton.jit import Kernel

    def compiling(kernel: Any, grid: Any) -> Any:
        return functools.partial(kernel.run, grid=grid, warmup=True)

    setattr(Kernel, "__getitem__", compiling)  # noqa: B010  # a method, for mypy
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return
    JITFunction.__getitem__ = compiling


def compile_case(size: str, title: str, end: float) -> int:
    """Compile the configurations of one case in a process that only compiles; how many did."""
    from minitriton.bench.cases import build
    from minitriton.bench.worker import setting_of, tidy

    (spec,) = catalog.select(size, [title])
    try:
        return _compile(build(spec, setting_of(size)).contenders, end)
    finally:
        tidy(size)


def _compile(contenders: dict[str, Callable[[], list[Any]]], end: float) -> int:
    from minitriton.bench.cases import OURS

    count = 0
    for name in (*OURS, "triton", "triton tma"):
        try:
            trials = contenders[name]() if name in contenders else []
        except Exception:  # left out: the worker says why, as for all below
            continue
        for trial in trials:
            if time.time() > end:
                return count
            try:
                trial.refresh()
                trial.call()
                count += 1
            except Exception:
                continue
    return count
