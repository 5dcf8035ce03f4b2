"""`python -m minitriton bench`: what is asked for, a run, and what it leaves in the folder.

Exit status: 0; 1 if a contender of ours failed or a point lies above the roof; 2 for a command
line that makes no sense, a folder that cannot be written, or no NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minitriton.bench import ahead, catalog, runs
from minitriton.bench.supervisor import Results, Supervisor, WorkerFailed

QUICK_SECONDS = 285.0  # leaves some of five minutes for the case that is running then

INTERRUPTED = "interrupted: the results are those of the cases before"


class BenchUsage(Exception):
    """The run cannot begin; the message says what to change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="the most telling cases, in 5 minutes")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help="only these families, or cases by their titles: " + ", ".join(catalog.families()),
    )  # fmt: skip
    parser.add_argument(
        "--out", default="bench-results", metavar="DIR",
        help="where results go (bench-results); a run with --only adds to those of before",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true",
        help="leave out the cases that --out has results of, and add to those",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help="begin no case after so many seconds"
    )
    parser.add_argument(
        "--dry-run", action="store_true",
        help="no GPU: every kernel of ours at a tiny size in the emulator, checked and not timed",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    size = _size(options)
    try:
        specs = catalog.select(size, options.only)
    except catalog.UnknownFamily as error:
        raise BenchUsage(str(error)) from error
    if options.limit is not None and not options.limit > 0:
        raise BenchUsage(f"--limit {options.limit}: it must be a positive number of seconds")
    _check_machine(size)
    folder = writable(Path(options.out))
    earlier = _earlier(folder, size, options)
    if options.resume:
        specs = [spec for spec in specs if spec.title not in runs.measured(earlier)]
        if not specs:
            raise BenchUsage(f"--resume: {folder} has results of all these cases")
    limit = options.limit or (QUICK_SECONDS if size == catalog.QUICK else None)
    results = Results(size, {
        "command": " ".join(["python -m minitriton", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": None, "machine": {},
    })  # fmt: skip
    titles = [spec.title for spec in specs]
    log = folder / "worker.log"
    if earlier is None:
        log.unlink(missing_ok=True)
    output = Output(folder, results, earlier)
    started = time.time()
    deadline = started + limit if limit else None
    supervisor = Supervisor(size, titles, results, log, deadline=deadline)
    begun = time.monotonic()
    trouble = ""
    try:
        if size != catalog.DRY:
            # at most half of the time: what is left is compiled where it is measured
            _compile(size, titles, log, started + limit / 2 if limit else None)
        with _progress(supervisor, output):
            supervisor.run()
    except WorkerFailed as error:
        if not results.cases:
            raise BenchUsage(str(error)) from error
        trouble = str(error)
    except KeyboardInterrupt:
        trouble = INTERRUPTED
    for title in titles:
        if title not in results.cases:
            results.skipped.setdefault(title, "the run ended before it")
    results.header["seconds"] = round(time.monotonic() - begun, 1)
    return _finish(output, trouble)


def _earlier(folder: Path, size: str, options: argparse.Namespace) -> runs.Found | None:
    """What this run adds to: a run of all cases begins anew."""
    if not (options.only or options.resume):
        return None
    try:
        return runs.load(folder, size)
    except runs.OtherResults as error:
        raise BenchUsage(f"--out {folder}: {error}: choose another folder") from error


@dataclass
class Output:
    """A folder and what goes there: results of this run, and those which the folder had."""

    folder: Path
    results: Results
    earlier: runs.Found | None

    def found(self) -> runs.Found:
        order = [spec.title for spec in catalog.select(self.results.size)]
        return runs.merged(self.earlier, self.results.as_json(), order)

    def save(self) -> None:
        """bench.json, replaced at once."""
        text = json.dumps(self.found(), indent=1) + "\n"
        temporary = self.folder / "bench.json.new"
        temporary.write_text(text)
        os.replace(temporary, self.folder / "bench.json")


def _size(options: argparse.Namespace) -> str:
    if options.dry_run and options.quick:
        raise BenchUsage("--dry-run is as small as it gets: leave out --quick")
    return catalog.DRY if options.dry_run else catalog.QUICK if options.quick else catalog.FULL


def writable(folder: Path) -> Path:
    """The folder, made if need be; BenchUsage if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BenchUsage(
            f"--out {folder}: cannot write there: {error.strerror or error}"
        ) from error
    return folder


def _check_machine(size: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise BenchUsage("the suite needs torch: pip install torch")
    if size == catalog.DRY:
        return
    import torch

    if not torch.cuda.is_available():
        raise BenchUsage(
            "the suite needs an NVIDIA GPU and a CUDA build of torch, and there is none here. "
            "--dry-run runs and checks its kernels in the emulator"
        )


def _compile(size: str, titles: list[str], log: Path, deadline: float | None) -> None:
    """What the run will try, on all cores: a bar on a terminal, else a line at the end."""
    begun = time.monotonic()
    if sys.stderr.isatty():
        with _bar() as bar:
            task = bar.add_task("compiling", total=len(titles))
            ahead.compile_ahead(size, titles, log, deadline, lambda: bar.advance(task))
    else:
        ahead.compile_ahead(size, titles, log, deadline, lambda: None)
        print(f"compiled in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeElapsedColumn(), console=Console(stderr=True),
    )  # fmt: skip


def _progress(supervisor: Supervisor, output: Output) -> Any:
    """Tells how far the run is: a bar on a terminal, else a line a case. Results so far are saved
    after each case, so a run that is cut short leaves what it has."""

    def save(event: dict[str, Any]) -> bool:
        over = event["event"] in ("done", "skipped")
        if over:
            output.save()
        return over

    total = len(supervisor.titles)
    if not sys.stderr.isatty():
        begun = time.monotonic()

        def tell(event: dict[str, Any]) -> None:
            if save(event):
                done = len(supervisor.results.skipped) + sum(
                    1 for case in supervisor.results.cases.values() if case["contenders"]
                )
                at = f"{time.monotonic() - begun:.0f} s"
                print(f"[{done}/{total}] {at}  {event['case']}", file=sys.stderr, flush=True)

        supervisor.watch = tell
        return nullcontext()
    bar = _bar()
    first = "the first kernels" if supervisor.size == catalog.DRY else "ceilings"
    task = bar.add_task(first, total=total)

    def show(event: dict[str, Any]) -> None:
        if save(event):
            bar.advance(task)
        elif "case" in event:
            who = event.get("contender") if event["event"] == "contender" else ""
            bar.update(task, description=f"{event['case']}  {who or ''}")

    supervisor.watch = show
    return bar


def _finish(output: Output, trouble: str) -> int:
    from minitriton.bench import page, picture, report

    output.save()
    found, folder = output.found(), output.folder
    drawing = picture.draw(found, folder)
    (folder / "table.md").write_text(report.markdown(found))
    (folder / "index.html").write_text(page.render(found, drawing.svg))
    report.show(found)
    if drawing.missing:
        print(f"no picture: {drawing.missing}")
    written = ["bench.json", "table.md", "index.html", *drawing.files]
    print(f"written to {folder}: {', '.join(written)}")
    failures = output.results.failures()
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    if trouble:
        print(trouble, file=sys.stderr)
    return 130 if trouble == INTERRUPTED else 1 if failures or trouble else 0
