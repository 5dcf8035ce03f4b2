"""How a case is measured: poisoned outputs, fresh inputs, contenders that fail, one at a time."""

import math

import pytest
import torch

from minitriton.bench import measure, worker
from minitriton.bench.cases import OURS, Case, LeftOut, Setting, Trial, backward, build, normal
from minitriton.bench.catalog import Spec, select
from minitriton.bench.roofline import Work


class FakeClock:
    """Calls everything and says that each contender takes as long as its name is long."""

    def __init__(self):
        self.host, self.broken, self.modes = {}, False, []

    def synchronize(self):
        if self.broken:
            raise RuntimeError("illegal address")

    def rounds(self, calls, *, cold, most, seconds, restore):
        self.modes.append(cold)
        for name, call in calls.items():
            restore.get(name, lambda: None)()
            call()
            self.host[name] = 1e-6
        return {name: [float(len(name))] * 5 for name in calls}

    def sustained(self, calls, once):
        return {name: [once[name] * 2] for name in calls}


def doubling(contenders, **more):
    """A case of y = 2 x; contenders are functions (x, out) -> results, or lists of them."""
    x, out = torch.empty(64), torch.empty(64)

    def maker(functions):
        functions = functions if isinstance(functions, list) else [functions]
        return lambda: [
            Trial("c" * (i + 1), lambda f=f: f(x, out), [out]) for i, f in enumerate(functions)
        ]

    made = {name: maker(f) for name, f in contenders.items()}
    case = Case(Work(512, 64), normal(x), lambda: [2 * x], made, title="double", **more)
    case.refill()
    return case


def run(case, clock=None, skip=()):
    events = []
    emit = lambda event, **facts: events.append({"event": event, **facts})
    worker.run_case(case, clock, worker.Effort(rounds=5), emit, skip)
    results = {e["contender"]: e for e in events if e["event"] == "result"}
    left_out = {e["contender"]: e for e in events if e["event"] == "left_out"}
    assert events[-1]["event"] == "done"
    return results, left_out


def right(x, out):
    return [out.copy_(x).mul_(2)]


def test_a_right_contender_is_timed():
    results, left_out = run(doubling({"torch": right}, sustained=True), FakeClock())
    assert not left_out
    assert results["torch"]["cold"] == {"median": 5.0, "q20": 5.0, "q80": 5.0, "rounds": 5}
    assert results["torch"]["sustained"]["median"] == 10.0
    assert results["torch"]["error"] == 0.0 and results["torch"]["host"] == 1e-6


def test_without_a_clock_nothing_is_timed():
    results, _ = run(doubling({"torch": right}))
    assert "cold" not in results["torch"]


def writes_nothing(x, out):
    return [out]


def writes_a_part(x, out):
    out[:63] = 2 * x[:63]
    return [out]


def writes_once():
    """Right at first, then it leaves what is there."""
    state = iter(range(100))

    def call(x, out):
        return right(x, out) if next(state) < 2 else [out]

    return call


def remembers():
    """Computes with the inputs of its first call for ever."""
    kept = []

    def call(x, out):
        kept.append(x.clone())
        return [out.copy_(kept[0]).mul_(2)]

    return call


@pytest.mark.parametrize(
    "wrong",
    [writes_nothing, writes_a_part, writes_once(), remembers(),
     lambda x, out: [out.copy_(x)], lambda x, out: [], lambda x, out: [2 * x[:3]]],
    ids=["nothing", "part", "once", "stale", "values", "none", "shape"],
)  # fmt: skip
def test_wrong_results_are_caught(wrong):
    """Whether outputs stay poisoned, only look right, or were right for other inputs."""
    case = doubling({"minitriton": wrong, "torch": right})
    case.reference()
    results, left_out = run(case)
    assert list(results) == ["torch"]
    assert "WrongResult" in left_out["minitriton"]["reason"] and left_out["minitriton"]["failed"]


def fails(x, out):
    raise RuntimeError("out of resources")


def absent():
    raise LeftOut("not for this shape")


def test_a_yardstick_is_timed_and_not_compared():
    case = doubling({"torch": right})
    case.contenders["copy"] = lambda: [Trial("", lambda: torch.ones(3), checked=False)]
    results, left_out = run(case, FakeClock())
    assert not left_out and results["copy"]["error"] == 0 and results["copy"]["cold"]


def test_failing_contenders_are_named_and_left_out():
    case = doubling({"triton": fails, "torch": right})
    case.contenders["minitriton library"] = absent
    case.contenders["triton tma"] = lambda: __import__("no_such_package")
    results, left_out = run(case, FakeClock())
    assert list(results) == ["torch"]
    assert left_out["triton"]["reason"] == "RuntimeError: out of resources"
    assert {name: e["failed"] for name, e in left_out.items()} == {
        "triton": True, "minitriton library": False, "triton tma": False,
    }  # fmt: skip


def test_contenders_to_skip_are_not_touched():
    results, left_out = run(doubling({"triton": fails, "torch": right}), skip=["triton"])
    assert list(results) == ["torch"] and not left_out


def test_the_fastest_configuration_that_works_is_taken():
    results, _ = run(doubling({"torch": [fails, right, right]}), FakeClock())
    assert results["torch"]["configuration"] == "cc" and results["torch"]["tried"] == 3


def test_a_broken_context_ends_the_process():
    clock = FakeClock()

    def breaks(x, out):
        clock.broken = True
        raise RuntimeError("illegal address")

    with pytest.raises(worker.BrokenContext):
        run(doubling({"triton": breaks, "torch": right}), clock)


def test_allocated_results_are_poisoned_too():
    expected = [torch.ones(4)]
    assert measure.worst_error([torch.full((4,), math.nan)], expected) == math.inf
    assert measure.worst_error([torch.tensor([1, 1, 1, math.inf])], expected) == math.inf


def test_backward_follows_new_inputs():
    x, grad = torch.empty(8), torch.empty(8)
    leaf = x.detach().requires_grad_()
    refill = normal(x, grad)
    trial = backward("", lambda t: t * t, [leaf], grad)
    for _ in range(2):
        refill()
        trial.refresh()
        for _ in range(2):
            (found,) = trial.call()
            assert torch.equal(found, 2 * x * grad)


def test_inputs_that_a_call_overwrites_are_restored():
    def overwrites(x, out):
        return [x.mul_(2)]

    x = torch.empty(64)

    def make():
        return [Trial("", lambda: overwrites(x, None), restore=lambda: x.copy_(source))]

    source = torch.empty(64)
    case = Case(Work(512, 64), normal(source), lambda: [2 * source], {"liger": make}, title="t")
    case.refill()
    results, left_out = run(case, FakeClock())
    assert not left_out and results["liger"]["error"] == 0.0


def test_a_backward_pass_that_can_run_once():
    """Its function overwrites what it saved, as some of liger's do."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.detach().clone()
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return ctx.kept.mul_(2 * grad)

    x, grad = torch.rand(8), torch.ones(8)
    for once, right in ((True, True), (False, False)):
        trial = backward("", Once.apply, [x.detach().requires_grad_()], grad, once=once)
        trial.refresh()
        measure.called(trial)
        (found,) = measure.called(trial)
        assert torch.equal(found, 2 * x) == right


def test_results_in_part_and_of_integers():
    """What `view` leaves out is not compared; integers cannot hold NaN."""
    case = doubling({"torch": lambda x, out: [*right(x, out), torch.arange(3)]})
    case.view = lambda results: results[:1]
    results, left_out = run(case, FakeClock())
    assert not left_out and "torch" in results


def test_a_refill_leaves_the_graph_alone():
    x = torch.ones(4)
    leaf = x.detach().requires_grad_()
    out = leaf * leaf
    normal(x)()
    out.backward(torch.ones(4))  # torch would refuse, had it seen the change
    assert torch.equal(leaf.grad, 2 * x)


@pytest.mark.parametrize("spec", select("dry"), ids=lambda spec: spec.family)
def test_every_case_has_a_contender_of_ours(spec):
    case = build(spec, Setting(device="cpu", dry=True))
    assert set(case.contenders) & set(OURS)
    assert set(case.contenders) <= {*OURS, "torch"}


def test_the_gpu_run_has_every_kind_of_contender():
    arguments = {"rows": 4, "columns": 64}
    case = build(Spec("softmax", "t", "rows", "softmax", arguments), Setting(device="cpu"))
    peers = {"triton", "torch", "torch.compile", "liger"}
    assert set(case.contenders) == {"minitriton", "minitriton library", *peers, "copy"}
    (copy,) = case.contenders["copy"]()
    assert copy.call().numel() == case.work.bytes // 2


class Event:
    """Stands in for torch.cuda.Event: time is the number of calls so far."""

    now, waits = 0.0, 0

    def __init__(self, enable_timing=False):
        self.timing = enable_timing

    def record(self):
        self.at, self.before = Event.now, Event.waits

    def query(self):
        return Event.waits > self.before

    def elapsed_time(self, end):
        assert self.timing and end.timing
        return (end.at - self.at) * 1e3


def test_the_gpu_spins_anew_after_a_call_that_waits_for_it(monkeypatch):
    spins = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = measure.Clock.__new__(measure.Clock)
    clock.flush, clock.host = torch.ones(4), {}

    def wait():
        Event.waits += 1  # all that was queued has ended

    calls = {"plain": lambda: None, "another": lambda: None}
    clock.rounds(calls, cold=True, most=5, seconds=100)
    assert len(spins) == 6
    seen = []
    calls = {name: lambda: seen.append(len(spins)) for name in ("plain", "another")}
    clock.rounds({**calls, "waits": wait}, cold=True, most=20, seconds=100)
    assert 6 + 21 < len(spins) < 6 + 2 * 21 + 1  # but not where it was the last of a round
    assert len(set(seen)) > 21


def test_the_clock_times_only_the_call(monkeypatch):
    """Flushes and warming calls lie outside of the events; each contender once a round."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = measure.Clock.__new__(measure.Clock)
    clock.flush, clock.host = torch.ones(4), {}
    seen = {"a": 0, "b": 0}

    def take(name, seconds):
        seen[name] += 1
        Event.now += seconds

    calls = {"a": lambda: take("a", 1.0), "b": lambda: take("b", 2.0)}
    cold = clock.rounds(calls, cold=True, most=7, seconds=100)
    assert {n: set(t) for n, t in cold.items()} == {"a": {1.0}, "b": {2.0}}
    assert len(cold["a"]) == 7 and seen == {"a": 8, "b": 8} and not clock.flush.any()
    warm = clock.rounds(calls, cold=False, most=50, seconds=0)
    assert len(warm["b"]) == 5 and seen == {"a": 20, "b": 20}
    restored = {"a": lambda: take("b", 4.0)}
    for cold in (True, False):
        timed = clock.rounds(calls, cold=cold, most=5, seconds=100, restore=restored)
        assert {n: set(t) for n, t in timed.items()} == {"a": {1.0}, "b": {2.0}}
    seen["a"], seen["b"] = 0, 0
    assert set(clock.sustained(calls, {"a": 0.06, "b": 9.0})["b"]) == {2.0}
    assert set(clock.host) == {"a", "b"}
