"""Measures cases in a process of its own: python -m minitriton.bench.worker FD < job

The job is JSON: size of the run, titles of the cases, contenders to leave out by title. Events go
to the file descriptor FD, one JSON object a line; whatever else is printed stays out of the way.
Exit status 3 asks to be started again: a kernel has broken the CUDA context.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from minitriton.bench import catalog, measure
from minitriton.bench.cases import Case, LeftOut, Setting, Trial, build
from minitriton.bench.supervisor import START_AGAIN

Emit = Callable[..., None]


class BrokenContext(Exception):
    """Nothing on this GPU works any more in this process."""


class WrongResult(Exception):
    """A contender's result differs from the reference."""


@dataclass
class Ready:
    """A contender that takes part: its best configuration."""

    trial: Trial
    tried: int
    error: float
    shapes: list[tuple[Any, Any, Any]]


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 100
    seconds: float = 2.0  # a mode of a case
    tuning_seconds: float = 0.2
    sustained: bool = True


EFFORT = {
    catalog.FULL: Effort(), catalog.QUICK: Effort(rounds=30, seconds=0.6, tuning_seconds=0.1),
}  # fmt: skip


def run_case(
    case: Case, clock: measure.Clock | None, effort: Effort, emit: Emit,
    skip: Collection[str] = (),
) -> None:  # fmt: skip
    """Measure all contenders of a case; without a clock they are only checked."""
    work = case.work
    emit(
        "case", case=case.title, family=case.family, arguments=case.arguments, bytes=work.bytes,
        flop=work.flop, rate=work.rate, contenders=[n for n in case.contenders if n not in skip],
    )  # fmt: skip
    ready: dict[str, Ready] = {}
    expected = case.reference()
    for name, make in case.contenders.items():
        if name not in skip:
            emit("contender", case=case.title, contender=name)
            prepare = functools.partial(_prepare, case, make, expected, clock, effort)
            found = _attempt(case, name, clock, emit, prepare)
            if found is not None:
                ready[name] = found
    del expected
    emit("contender", case=case.title, contender=None)
    clocks = [measure.sm_clock()] if clock is not None else []
    times = _times(case, ready, clock, effort) if clock is not None and ready else {}
    clocks += [measure.sm_clock()] if clock is not None else []
    host = dict(clock.host) if clock is not None else {}
    case.refill()
    expected = case.reference()
    for name, entry in ready.items():
        emit("contender", case=case.title, contender=name)
        check = functools.partial(_check, case, entry, expected)
        done = _attempt(case, name, clock, emit, check)
        if done is not None:
            emit("result", case=case.title, contender=name, configuration=entry.trial.label,
                 tried=entry.tried, error=max(done, entry.error),
                 host=host.get(name), **times.get(name, {}))  # fmt: skip
    emit("done", case=case.title, clock_mhz=clocks)


def _attempt(
    case: Case, name: str, clock: measure.Clock | None, emit: Emit, action: Callable[[], Any]
) -> Any:
    """The action's result, or None after telling why this contender is left out."""
    try:
        return action()
    except Exception as error:  # whatever a peer or a kernel raises must not end the run
        absent = isinstance(error, LeftOut | ImportError)
        text = str(error) if absent else f"{type(error).__name__}: {error}"
        emit("left_out", case=case.title, contender=name, reason=text[:500], failed=not absent)
        _look_for_damage(clock)
        return None


def _look_for_damage(clock: measure.Clock | None) -> None:
    try:
        if clock is not None:
            clock.synchronize()
    except Exception as error:
        raise BrokenContext(str(error)) from error


def _prepare(
    case: Case,
    make: Callable[[], list[Trial]],
    expected: Any,
    clock: measure.Clock | None,
    effort: Effort,
) -> Ready:
    """The fastest configuration that runs and is right; the reason of the last one if none is."""
    trials = make()
    working: dict[str, tuple[Trial, list[torch.Tensor]]] = {}
    failure = None
    for trial in trials:
        try:
            trial.refresh()
            results = measure.called(trial)
            if clock is not None:
                clock.synchronize()
            working[trial.label] = trial, results
        except Exception as error:  # too many resources, say: another configuration may fit
            failure = error
            _look_for_damage(clock)
    if not working:
        raise failure or LeftOut("no configuration")
    best = next(iter(working))
    if clock is not None and len(working) > 1:
        calls = {label: trial.call for label, (trial, _) in working.items()}
        restore = _restoring({label: trial for label, (trial, _) in working.items()})
        times = clock.rounds(
            calls, cold=True, most=8, seconds=effort.tuning_seconds, restore=restore
        )
        best = min(times, key=lambda label: statistics.median(times[label]))
    trial, results = working[best]
    shapes = [(tuple(r.shape), r.dtype, r.device) for r in results]
    del working, results
    ready = Ready(trial, len(trials), 0.0, shapes)
    ready.error = _compare(case, ready, expected)
    return ready


def _restoring(trials: dict[str, Trial]) -> measure.Calls:
    return {name: t.restore for name, t in trials.items() if t.restore is not None}


def _compare(case: Case, entry: Ready, expected: Any) -> float:
    if not entry.trial.checked:
        return 0.0
    results = case.view(measure.poisoned(entry.trial, entry.shapes))
    error = measure.worst_error(results, expected)
    if not error <= case.bound:
        raise WrongResult(f"relative error {error:.1e}, allowed is {case.bound:.1e}")
    return error


def _check(case: Case, entry: Ready, expected: Any) -> float:
    """The same once more after timing, on inputs that are new."""
    entry.trial.refresh()
    return _compare(case, entry, expected)


def _times(
    case: Case, ready: dict[str, Ready], clock: measure.Clock, effort: Effort
) -> dict[str, dict[str, dict[str, float]]]:
    calls = {name: entry.trial.call for name, entry in ready.items()}
    restore = _restoring({name: entry.trial for name, entry in ready.items()})
    modes = {
        mode: clock.rounds(
            calls, cold=mode == "cold", most=effort.rounds, seconds=effort.seconds, restore=restore
        )
        for mode in ("cold", "warm")
    }
    if case.sustained and effort.sustained:
        once = {name: statistics.median(times) for name, times in modes["warm"].items()}
        modes["sustained"] = clock.sustained(calls, once)
    return {
        name: {mode: measure.summary(times[name]) for mode, times in modes.items()}
        for name in calls
    }


def setting_of(size: str) -> Setting:
    """Where and how thoroughly a run of this size measures."""
    if size == catalog.DRY:
        return Setting(device="cpu", dry=True, processors=2)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return Setting(quick=size == catalog.QUICK, processors=processors)


def run_job(job: dict[str, Any], emit: Emit) -> None:
    """All cases of a job, in order; those after its deadline are skipped."""
    size, clock = job["size"], None
    setting = setting_of(size)
    if size != catalog.DRY:
        clock = measure.Clock()
        if job["ceilings"]:
            ceilings = measure.find_ceilings(clock).as_json()
            emit("ceilings", ceilings=ceilings, machine=measure.machine())
    specs = {spec.title: spec for spec in catalog.select(size)}
    for title in job["titles"]:
        if job["deadline"] is not None and time.time() > job["deadline"]:
            emit("skipped", case=title, reason="no time left (--limit)")
            continue
        torch.manual_seed(len(title))
        emit("building", case=title)
        try:
            case = build(specs[title], setting)
            run_case(case, clock, EFFORT.get(size, Effort()), emit, job["skip"].get(title, ()))
        except (torch.OutOfMemoryError, LeftOut) as error:
            emit("skipped", case=title, reason=f"{type(error).__name__}: {error}"[:300])
        case = None  # type: ignore[assignment]  # frees the tensors of this case before the next
        tidy(size)


def tidy(size: str) -> None:
    """Frees memory, and what torch.compile knows: it gives up after a few shapes of a function."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if size != catalog.DRY:
        torch.cuda.empty_cache()


def main() -> int:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # compile processes of torch would keep the pipe open
    job = json.load(sys.stdin)
    with os.fdopen(descriptor, "w") as pipe:

        def emit(event: str, **facts: Any) -> None:
            pipe.write(json.dumps({"event": event, **facts}) + "\n")
            pipe.flush()

        try:
            run_job(job, emit)
        except BrokenContext:
            pipe.flush()
            os._exit(START_AGAIN)  # destructors would only fail on the broken context
    return 0


if __name__ == "__main__":
    sys.exit(main())
