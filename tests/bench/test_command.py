"""The command: what it refuses, a dry run of everything, and the files that a run leaves."""

import html.parser
import json
import os
import re
import subprocess
import sys
import time

import pytest
import torch

from minitriton.__main__ import main
from minitriton.bench import catalog, command, page, picture, report
from minitriton.bench.cases import OURS
from minitriton.bench.supervisor import Results, WorkerFailed

RATES = {"fp32": 5e13, "bf16": 8e14}
CEILINGS = {"copy": 4e12, "read": 4e12, "cached": 8e12, "rates": RATES}


def mode(seconds):
    return {"median": seconds, "q20": seconds, "q80": seconds, "rounds": 30}


@pytest.fixture
def found():
    """Results of a run with a memory-bound case, a compute-bound one and a failure."""
    results = Results(
        "quick",
        {
            "command": "python -m minitriton bench <1>",
            "started": "2026-11-30T00:00:00+00:00",
            "seconds": 9.0,
            "machine": {},
        },
    )
    machine = {"name": "H200", "torch": "2"}
    results.take({"event": "ceilings", "ceilings": CEILINGS, "machine": machine})

    def case(title, flop, rate, times):
        facts = {"family": "f", "arguments": {"n": 1}, "bytes": 4e9, "flop": flop, "rate": rate}
        results.take({"event": "case", "case": title, "contenders": list(times), **facts})
        entry = {"tried": 2, "configuration": "BLOCK=<64>", "error": 1e-3}
        for name, seconds in times.items():
            entry |= {"contender": name, "host": 1e-5, "cold": mode(seconds), "warm": mode(seconds)}
            results.take({"event": "result", "case": title, **entry})

    times = {"minitriton": 1.1e-3, "triton": 2e-3, "torch": 4e-3, "copy": 1e-3}
    case("softmax & co", 5e9, "fp32", times)
    case("matmul", 8e12, "bf16", {"minitriton": 1.25e-2, "torch": 1e-2})
    results.take({"event": "left_out", "case": "matmul", "contender": "triton",
                  "reason": "OutOfResources: <shared>", "failed": True})  # fmt: skip
    results.take({"event": "skipped", "case": "gelu", "reason": "no time left"})
    return json.loads(json.dumps(results.as_json()))


SCHEMA = {"schema": int, "size": str, "runs": list, "cases": list, "skipped": dict}
RUN = {
    "command": str, "started": str, "seconds": float, "machine": dict,
    "ceilings": {"copy": float, "read": float, "cached": float, "rates": dict},
}  # fmt: skip
CASE = {
    "run": int, "title": str, "family": str, "arguments": dict, "bytes": float, "flop": float,
    "rate": str, "intensity": float, "bound": str, "clock_mhz": list, "contenders": dict,
    "left_out": dict,
}  # fmt: skip
MODE = {"median": float, "q20": float, "q80": float, "rounds": int, "fraction": float}
CONTENDER = {"configuration": str, "tried": int, "error": float,
             "host": float, "cold": MODE, "warm": MODE}  # fmt: skip
LEFT_OUT = {"reason": str, "failed": bool, "above_roof": bool}


def conforms(value, schema):
    if isinstance(schema, dict):
        assert set(value) == set(schema)
        for key, inner in schema.items():
            conforms(value[key], inner)
    else:
        assert isinstance(value, schema), (value, schema)


def test_json_schema(found):
    conforms(found, SCHEMA)
    for run in found["runs"]:
        conforms(run, RUN)
    for case in found["cases"]:
        conforms(case, CASE)
        for entry in case["contenders"].values():
            conforms(entry, CONTENDER)
        for entry in case["left_out"].values():
            conforms(entry, LEFT_OUT)


def test_tables(found):
    cold, warm = report.tables(found)
    assert cold.columns == ("minitriton", "triton", "torch", "copy")
    softmax, matmul = cold.rows
    assert softmax.heads == ("softmax & co", "TB/s") and softmax.cells == (
        "3.636 (91%)",
        "2.000 (50%)",
        "1.000 (25%)",
        "4.000 (100%)",
    )
    assert matmul.heads == ("matmul", "TFLOP/s") and matmul.cells == (
        "640 (80%)",
        "failed",
        "800 (100%)",
        "",
    )
    assert (softmax.best, matmul.best) == (0, 2)
    assert warm.rows[0].cells[0] == "3.636 (45%)"
    text = report.markdown(found)
    assert "| softmax & co | TB/s | **3.636 (91%)** | 2.000 (50%) |" in text
    assert "triton in matmul: OutOfResources" in text and "gelu: not measured" in text


def test_library_table(found):
    """Of the last run; ours from plain source is no competitor, nor is the copy."""
    own, other = ({"cold": mode(t) | {"fraction": f}} for t, f in ((2e-4, 0.5), (3e-4, None)))
    softmax = {**found["cases"][0], "contenders": {"minitriton": own, report.LIBRARY: other}}
    alone = {"runs": [{"started": "1999"}], "cases": [softmax]}
    assert "| softmax & co | 0.300 |  |  |  |" in report.library_markdown([alone])
    contenders = {report.LIBRARY: own, "triton": other, "minitriton": own, "copy": own}
    softmax = {**softmax, "contenders": contenders}
    latest = {"runs": [{"started": "2100"}], "cases": [softmax]}
    text = report.library_markdown([latest, found, alone])
    assert text.splitlines()[2:] == ["| softmax & co | 0.200 | 50% | triton 0.300 | 1.50 |"]


def test_terminal(found, capsys):
    report.show(found)
    shown = capsys.readouterr().out
    assert "softmax & co" in shown and "copy 4.00" in shown and "left out: triton" in shown


class Links(html.parser.HTMLParser):
    """Collects what a page would load, and checks that elements are closed."""

    def __init__(self):
        super().__init__()
        self.links, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href")]


def test_page_and_picture(found, tmp_path):
    pytest.importorskip("matplotlib")
    drawing = picture.draw(found, tmp_path)
    assert drawing.files == picture.FILES
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    text = page.render(found, drawing.svg)
    links = Links()
    links.feed(text)
    assert not links.open and "<svg" in text
    assert all(link.startswith("#") for link in links.links)
    assert not re.search(r"@import|<script|<link|<metadata", text)
    assert all(place.startswith("#") for place in re.findall(r"url\((.*?)\)", text))
    assert "BLOCK=&lt;64&gt;" in text and "OutOfResources: &lt;shared&gt;" in text


def test_without_matplotlib_the_picture_is_left_out(found, tmp_path, monkeypatch):
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    drawing = picture.draw(found, tmp_path)
    assert not drawing.files and "minitriton[examples]" in drawing.missing
    assert not list(tmp_path.iterdir()) and "<svg" not in page.render(found, drawing.svg)


def refused(capsys, *arguments):
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


def test_unknown_names_are_refused(capsys, tmp_path):
    shown = refused(capsys, "--dry-run", "--only", "atention", "--out", str(tmp_path / "x"))
    assert "did you mean attention?" in shown and "swiglu_backward" in shown
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written_is_refused_first(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Supervisor", None)  # nothing may run
    (tmp_path / "file").touch()
    shown = refused(capsys, "--dry-run", "--out", str(tmp_path / "file"))
    assert "cannot write there" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys, tmp_path):
    shown = refused(capsys, "--out", str(tmp_path / "x"))
    assert "needs an NVIDIA GPU" in shown and "--dry-run" in shown
    assert not (tmp_path / "x").exists()


class DyingSupervisor:
    """Measures one case, then its worker dies or the user has seen enough."""

    death: BaseException

    def __init__(self, size, titles, results, log, deadline):
        self.size, self.titles, self.results, self.watch = size, titles, results, None

    def run(self):
        facts = {"family": "f", "arguments": {}, "bytes": 1.0, "flop": 1.0, "rate": "fp32"}
        for event in (
            {"event": "case", "case": self.titles[0], "contenders": [], **facts},
            {"event": "done", "case": self.titles[0], "clock_mhz": []},
        ):
            self.results.take(event)
            self.watch(event)
        raise self.death


@pytest.mark.parametrize(
    ("death", "status"), [(WorkerFailed("no device"), 1), (KeyboardInterrupt(), 130)]
)
def test_a_run_that_ends_early_keeps_what_it_has(death, status, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(DyingSupervisor, "death", death, raising=False)
    monkeypatch.setattr(command, "Supervisor", DyingSupervisor)
    arguments = ["bench", "--dry-run", "--only", "add", "gelu", "--out", str(tmp_path)]
    assert main(arguments) == status
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [case["title"] for case in found["cases"]] == ["add tiny"]
    assert found["skipped"] == {"gelu tiny": "the run ended before it"}
    assert (str(death) or "interrupted") in capsys.readouterr().err


class PatientSupervisor(DyingSupervisor):
    """Measures all its cases, in no time."""

    def run(self):
        for title in self.titles:
            facts = {"family": "f", "arguments": {}, "bytes": 1.0, "flop": 1.0, "rate": "fp32"}
            entry = {"contender": "minitriton", "configuration": "", "tried": 1, "error": 0.0,
                     "host": None}  # fmt: skip
            for event in (
                {"event": "case", "case": title, "contenders": ["minitriton"], **facts},
                {"event": "result", "case": title, **entry},
                {"event": "done", "case": title, "clock_mhz": []},
            ):
                self.results.take(event)
                self.watch(event)


@pytest.mark.parametrize("limit", [100.0, None])
def test_compiling_leaves_half_of_the_time(limit, tmp_path, monkeypatch):
    ends = []
    monkeypatch.setattr(command, "Supervisor", PatientSupervisor)
    monkeypatch.setattr(command, "_check_machine", lambda size: None)
    monkeypatch.setattr(
        command.ahead, "compile_ahead", lambda size, titles, log, end, tell: ends.append(end)
    )
    begun = time.time()
    options = ["--limit", str(limit)] if limit else []
    main(["bench", "--only", "add", "--out", str(tmp_path), *options])
    assert ends == [None] if limit is None else 50 <= ends[0] - begun < 60


def bench(*arguments):
    """Exit status of a dry run, and what it left."""
    status = main(["bench", "--dry-run", *map(str, arguments)])
    folder = arguments[list(arguments).index("--out") + 1]
    found = json.loads((folder / "bench.json").read_text())
    return status, found, [case["title"] for case in found["cases"]]


def test_runs_with_only_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Supervisor", PatientSupervisor)
    bench("--only", "gelu", "--out", tmp_path)
    status, found, titles = bench("--only", "add", "softmax", "--out", tmp_path)
    assert status == 0 and titles == ["add tiny", "softmax tiny", "gelu tiny"]
    assert [case["run"] for case in found["cases"]] == [1, 1, 0] and len(found["runs"]) == 2
    text = (tmp_path / "table.md").read_text()
    assert "| case | unit | run | minitriton |" in text and "| gelu tiny | error | 1 |" in text
    assert "run 1: " in text and "run 2: " in text
    assert "Run 2: " in (tmp_path / "index.html").read_text()
    _, found, titles = bench("--only", "gelu", "--out", tmp_path)
    assert titles == ["add tiny", "softmax tiny", "gelu tiny"] and len(found["runs"]) == 2
    assert [case["run"] for case in found["cases"]] == [0, 0, 1]


def test_a_run_of_all_cases_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "Supervisor", PatientSupervisor)
    bench("--only", "gelu", "--out", tmp_path)
    _, found, titles = bench("--out", tmp_path)
    assert len(found["runs"]) == 1 and len(titles) == len(catalog.select("dry"))


def test_a_run_can_be_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "Supervisor", PatientSupervisor)
    bench("--only", "gelu", "add", "--out", tmp_path)
    _, found, titles = bench("--resume", "--out", tmp_path)
    assert titles == [spec.title for spec in catalog.select("dry")]
    assert sum(case["run"] == 0 for case in found["cases"]) == 2
    shown = refused(capsys, "--dry-run", "--resume", "--out", str(tmp_path))
    assert "has results of all these cases" in shown


def test_results_of_another_size_are_left_alone(tmp_path, monkeypatch, capsys, found):
    monkeypatch.setattr(command, "Supervisor", PatientSupervisor)
    (tmp_path / "bench.json").write_text(json.dumps(found))
    shown = refused(capsys, "--dry-run", "--only", "gelu", "--out", str(tmp_path))
    assert "quick run" in shown and "another folder" in shown
    assert json.loads((tmp_path / "bench.json").read_text()) == found


@pytest.mark.parametrize("limit", ["0", "-3", "nan"])
def test_limits_that_make_no_sense(limit, capsys, tmp_path):
    assert "positive" in refused(capsys, "--dry-run", "--limit", limit, "--out", str(tmp_path))


def test_quick_dry_run_is_refused(capsys):
    assert "leave out --quick" in refused(capsys, "--dry-run", "--quick")


def test_a_dry_run_checks_every_kernel(tmp_path):
    """The whole path, as a user starts it: worker, emulator, checks, files."""
    done = subprocess.run(
        [sys.executable, "-m", "minitriton", "bench", "--dry-run", "--out", str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    log = tmp_path / "worker.log"
    assert done.returncode == 0, done.stderr + log.read_text()
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [case["family"] for case in found["cases"]] == catalog.families()
    for case in found["cases"]:
        assert set(OURS) & set(case["contenders"]), case["title"]
        assert not any(why["failed"] for why in case["left_out"].values()), case["left_out"]
    assert found["runs"][0]["ceilings"] is None and not found["skipped"]
    assert "relative error" in (tmp_path / "index.html").read_text()
    assert "| attention tiny | error |" in (tmp_path / "table.md").read_text()
    assert "no picture: nothing was timed" in done.stdout
