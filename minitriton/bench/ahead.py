"""Compiles what a run will try, on many cores, before anything is measured.

Both compilers keep what they make on disk, where the worker finds it. Of kernels that tune
themselves under Triton, as those of fla-core, all that they would try is compiled; which is best,
they measure in the worker. There the contenders of torch.compile compile, too.
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
CONTENDERS = ("triton", "triton tma", "fla", "liger")  # beside ours


def compile_ahead(
    size: str, titles: list[str], log: Path, deadline: float | None, watch: Callable[[], None]
) -> None:
    """Compile for these cases until the deadline (time.time()); `watch` is called after each. Where
    there are more processors than cases, several processes share what one has to try.

    What does not compile is left to the worker, which tells why. Output goes to the end of `log`.
    """
    processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    if processes < 2 or not titles:
        return
    parts = max(1, processes // len(titles))
    jobs = min(processes, parts * len(titles))
    end = min(deadline or float("inf"), time.time() + LONGEST_SECONDS)
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(str(log),)
    )
    try:
        left = dict.fromkeys(titles, parts)
        work = {
            pool.submit(compile_case, size, title, end, part, parts): title
            for title in titles for part in range(parts)
        }  # fmt: skip
        for done in as_completed(work, timeout=max(1.0, end + 60 - time.time())):
            done.exception()  # of a process that ended, say
            left[work[done]] -= 1
            if not left[work[done]]:
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
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **options: run(self, *args, **options | {"warmup": True})
    compile_all(slice(None))


def compile_all(share: slice) -> None:
    """From now on this share of the configurations of a kernel that tunes itself under Triton is
    compiled, instead of the best one of them being run. Requires: only_compile()."""
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return

    def run_all(tuned: Any, *args: Any, **options: Any) -> None:
        tuned.nargs = dict(zip(tuned.arg_names, args, strict=False))
        for config in tuned.prune_configs(options)[share]:
            try:
                tuned.fn.run(*args, **options, **config.all_kwargs())
            except Exception:  # as its tuner does
                continue

    Autotuner.run = run_all


def compile_case(size: str, title: str, end: float, part: int = 0, parts: int = 1) -> int:
    """Compile every parts-th configuration of one case, from the part-th on, in a process that only
    compiles; how many did."""
    from minitriton.bench.cases import build
    from minitriton.bench.worker import setting_of, tidy

    share = slice(part, None, parts)
    compile_all(share)
    (spec,) = catalog.select(size, [title])
    try:
        return _compile(build(spec, setting_of(size)).contenders, end, share)
    finally:
        tidy(size)


def _compile(
    contenders: dict[str, Callable[[], list[Any]]], end: float, share: slice = slice(None)
) -> int:
    from minitriton.bench.cases import OURS

    count = 0
    for name in (*OURS, *CONTENDERS):
        try:
            trials = contenders[name]() if name in contenders else []
        except Exception:  # left out: the worker says why, as for all below
            continue
        for trial in trials if len(trials) == 1 else trials[share]:
            if time.time() > end:
                return count
            try:
                trial.refresh()
                trial.call()
                count += 1
            except Exception:
                continue
    return count
