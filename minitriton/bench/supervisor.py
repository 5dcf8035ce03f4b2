"""Runs the worker, watches it, and starts it again without whoever brought it down."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minitriton.bench import catalog
from minitriton.bench.report import MODES
from minitriton.bench.roofline import AboveRoof, Ceilings, Work, fraction
from minitriton.bench.runs import SCHEMA

WORKER = (sys.executable, "-m", "minitriton.bench.worker")
SILENCE_SECONDS = 420.0  # of a worker, after which its contender counts as hanging
START_AGAIN = 3  # exit status of a worker whose CUDA context is broken


class WorkerFailed(Exception):
    """The worker ended before it measured anything; the message has the end of its log."""


@dataclass
class Results:
    """What is known so far of one run; `as_json` is the format of bench.json.

    header: the command, when it was started, the seconds it took.
    """

    size: str = catalog.FULL
    header: dict[str, Any] = field(default_factory=dict)
    ceilings: Ceilings | None = None
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def failures(self) -> list[str]:
        """Contenders of ours that failed, and points above the roof, of whomever."""
        found = []
        for title, case in self.cases.items():
            for name, why in case["left_out"].items():
                if why["failed"] and (name.startswith("minitriton") or why.get("above_roof")):
                    found.append(f"{title}: {name}: {why['reason']}")
        return found

    def as_json(self) -> dict[str, Any]:
        ceilings = self.ceilings.as_json() if self.ceilings else None
        return {
            "schema": SCHEMA, "size": self.size, "runs": [{**self.header, "ceilings": ceilings}],
            "cases": list(self.cases.values()), "skipped": self.skipped,
        }  # fmt: skip

    # --- events of the worker

    def take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ceilings":
                self.ceilings = Ceilings(**event["ceilings"])
                self.header["machine"] = event["machine"]
            case "case":
                self._open(event)
            case "result":
                self._enter(event)
            case "left_out":
                self.leave_out(
                    event["case"], event["contender"], event["reason"], failed=event["failed"]
                )
            case "skipped":
                self.skipped[event["case"]] = event["reason"]
            case "done":
                self.cases[event["case"]]["clock_mhz"] = event["clock_mhz"]

    def _open(self, event: dict[str, Any]) -> None:
        work = Work(event["bytes"], event["flop"], event["rate"])
        known = self.ceilings is not None and work.rate in self.ceilings.rates
        before = self.cases.get(event["case"], {"left_out": {}})
        self.cases[event["case"]] = {
            "run": 0, "title": event["case"], "family": event["family"],
            "arguments": event["arguments"], "bytes": work.bytes, "flop": work.flop,
            "rate": work.rate, "intensity": work.intensity,
            "bound": self.ceilings.bound(work) if self.ceilings and known else None,
            "clock_mhz": [], "contenders": {}, "left_out": before["left_out"],
        }  # fmt: skip

    def _enter(self, event: dict[str, Any]) -> None:
        case = self.cases[event["case"]]
        work = Work(case["bytes"], case["flop"], case["rate"])
        name = event["contender"]
        entry = {k: event[k] for k in ("configuration", "tried", "error", "host")}
        try:
            for mode in MODES:
                if mode in event:
                    entry[mode] = {**event[mode], "fraction": self._share(work, event[mode], mode)}
        except AboveRoof as error:
            self.leave_out(case["title"], name, str(error), failed=True, above_roof=True)
            return
        case["contenders"][name] = entry

    def _share(self, work: Work, times: dict[str, float], mode: str) -> float | None:
        if self.ceilings is None or work.rate not in self.ceilings.rates:
            return None
        return fraction(work, times["median"], self.ceilings, warm=mode != "cold")

    def leave_out(self, title: str, contender: str, reason: str, *, failed: bool,
                  above_roof: bool = False) -> None:  # fmt: skip
        case = self.cases[title]
        case["contenders"].pop(contender, None)
        case["left_out"][contender] = {"reason": reason, "failed": failed, "above_roof": above_roof}


class Silent(Exception):
    """No event for too long."""


class Worker:
    """One process of the worker."""

    def __init__(self, command: Sequence[str], job: dict[str, Any], log: Path) -> None:
        self.reading, writing = os.pipe()
        root = str(Path(__file__).parent.parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, str(writing)], stdin=subprocess.PIPE, stdout=out, stderr=out,
                pass_fds=(writing,), env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )  # fmt: skip
        os.close(writing)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job).encode())
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it ended at once; its exit status says so

    def events(self, silence: float) -> Iterator[dict[str, Any]]:
        """Events until the worker ends; Silent if none comes for so many seconds."""
        rest = b""
        while True:
            if not select.select([self.reading], [], [], silence)[0]:
                raise Silent
            data = os.read(self.reading, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (json.loads(line) for line in lines)

    def end(self) -> int:
        """Its exit status, after killing it and what it started if it still runs."""
        os.close(self.reading)
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()


@dataclass
class Supervisor:
    """Measures `titles`, in order, whatever the contenders do to the worker."""

    size: str
    titles: list[str]
    results: Results
    log: Path
    command: Sequence[str] = WORKER
    deadline: float | None = None
    silence: float = SILENCE_SECONDS
    watch: Callable[[dict[str, Any]], None] = lambda _: None
    current: tuple[str | None, str | None] = (None, None)  # case and contender in work

    def run(self) -> None:
        remaining = list(self.titles)
        while remaining:
            begun = time.monotonic()
            self.current = None, None
            worker = Worker(self.command, self._job(remaining), self.log)
            trouble = ""
            try:
                for event in worker.events(self.silence):
                    self._follow(event, remaining)
                    self.results.take(event)
                    self.watch(event)
            except Silent:
                trouble = f"no answer for {self.silence:.0f} s"
                os.killpg(worker.process.pid, signal.SIGKILL)
            except BaseException:
                os.killpg(worker.process.pid, signal.SIGKILL)
                raise
            finally:
                status = worker.end()
            if not remaining or status == START_AGAIN:
                continue  # how it ends after its work is done does not matter
            if status or trouble:
                self._blame(trouble or _ended(status), remaining, begun)
            else:
                raise WorkerFailed(f"the worker left out {', '.join(remaining)}")

    def _job(self, remaining: list[str]) -> dict[str, Any]:
        cases = self.results.cases
        skip = {title: list(cases[title]["left_out"]) for title in remaining if title in cases}
        return {"size": self.size, "titles": remaining, "skip": skip, "deadline": self.deadline,
                "ceilings": self.results.ceilings is None}  # fmt: skip

    def _follow(self, event: dict[str, Any], remaining: list[str]) -> None:
        match event["event"]:
            case "building" | "case":
                self.current = event["case"], None
            case "contender":
                self.current = event["case"], event["contender"]
            case "done" | "skipped":
                remaining.remove(event["case"])
                self.current = None, None

    def _blame(self, reason: str, remaining: list[str], begun: float) -> None:
        """Leave out the contender that was in work, else the case."""
        title, contender = self.current
        if title is None:
            raise WorkerFailed(
                f"the worker ended ({reason}, after {time.monotonic() - begun:.0f} s) between two "
                f"cases. The end of its log, {self.log}:\n{_tail(self.log)}"
            )
        known = self.results.cases.get(title)
        if contender is None or known is None:
            self.results.skipped[title] = reason
            self.results.cases.pop(title, None)
            remaining.remove(title)
        elif contender not in known["left_out"]:
            self.results.leave_out(title, contender, reason, failed=True)


def _ended(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with status {status}"


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
