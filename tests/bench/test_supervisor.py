"""Isolation: whatever a contender does to its process, the others are measured."""

import sys
from pathlib import Path

import pytest

from minitriton.bench.supervisor import Results, Supervisor, WorkerFailed

FAKE = (sys.executable, str(Path(__file__).parent / "fake_worker.py"))


def supervise(titles, tmp_path, **more):
    results = Results()
    Supervisor("full", titles, results, tmp_path / "log", command=FAKE, **more).run()
    return results


def test_all_is_well(tmp_path):
    events = []
    results = supervise(["one/torch:fine/triton:slow", "two/torch:fine"], tmp_path,
                        watch=lambda event: events.append(event["event"]))  # fmt: skip
    one = results.cases["one/torch:fine/triton:slow"]
    assert one["contenders"]["torch"]["cold"]["fraction"] == pytest.approx(1 / 1.1)
    assert one["contenders"]["triton"]["cold"]["fraction"] == pytest.approx(0.5)
    assert one["bound"] == "memory" and one["clock_mhz"] == [1980, 1755]
    assert not results.failures() and not results.skipped
    assert events.count("done") == 2 and events.count("ceilings") == 1


@pytest.mark.parametrize(
    ("fate", "reason"), [("crash", "SIGSEGV"), ("broken", "bad address"), ("hang", "no answer")]
)
def test_who_brings_the_process_down_is_left_out(fate, reason, tmp_path):
    title = f"one/torch:fine/triton:{fate}/minitriton:fine"
    results = supervise(["zero/torch:fine", title, "two/triton:fine"], tmp_path, silence=1.5)
    case = results.cases[title]
    assert set(case["contenders"]) == {"torch", "minitriton"}
    assert reason in case["left_out"]["triton"]["reason"] and case["left_out"]["triton"]["failed"]
    assert set(results.cases["two/triton:fine"]["contenders"]) == {"triton"}
    assert not results.failures()  # a peer's failure is told, ours fail the run


def test_every_contender_may_crash(tmp_path):
    title = "one/torch:crash/minitriton:crash"
    results = supervise([title], tmp_path)
    assert set(results.cases[title]["left_out"]) == {"torch", "minitriton"}
    assert len(results.failures()) == 1 and "minitriton" in results.failures()[0]


def test_above_the_roof_is_an_error_of_the_run(tmp_path):
    title = "one/torch:impossible/triton:fine"
    results = supervise([title], tmp_path)
    assert set(results.cases[title]["contenders"]) == {"triton"}
    (failure,) = results.failures()
    assert "above the roof" in failure


def test_a_case_that_cannot_be_built_is_skipped(tmp_path):
    results = supervise(["die building", "two/torch:fine"], tmp_path)
    assert "status 9" in results.skipped["die building"]
    assert "torch" in results.cases["two/torch:fine"]["contenders"]


def test_a_worker_that_never_starts_tells_why(tmp_path):
    with pytest.raises(WorkerFailed, match="no such device"):
        supervise(["die first"], tmp_path)
