"""Defects seeded into generated kernels: the emulator finds every one, and right kernels are clean.

A mutant that is no defect, because the kernel is as right without the instruction on a GPU too, is
listed in `EQUIVALENT` with the reason; such a mutant must be clean. A change of code generation may
renumber instructions: the failure shows what is around them, and the list is to be reasoned anew.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch

from tests.emulator.defects import POLICIES, Subject, describe, mutants, verdict
from tests.emulator.seeded_kernels import SUBJECTS

_INIT = "the fence.proxy.async after it shows the new mbarriers to the async proxy as well"
_NO_WRITES = (
    "no thread writes the stages itself, so the async proxy has nothing else to see; the mbarriers "
    "have their own fence"
)
_ALL_WAIT = (
    "every thread waits for the mbarrier itself, and the barrier that ends the iteration keeps "
    "anyone from getting a phase ahead"
)
_ONE_GROUP = (
    "the CTA is one warpgroup: its products are over for all of its warps when one of them has "
    "waited, and none is behind the wait for an earlier stage by then"
)
_SAME_THREAD = (
    "thread 0 invalidates and initialises the mbarriers, all are past their last wait for the old "
    "ones, and nothing else of the last tile is in shared memory"
)
_NOTHING_LEFT = "the wait for group 0 above has ended all products, so there is none to wait for"
_LAST_USE = "the CTA ends without using the bytes of its mbarriers for anything else"
_REGISTERS = "consumers keep the registers of the launch: a matter of speed, or of not assembling"

#: By kernel and mutant, why it is no defect.
EQUIVALENT: dict[str, dict[str, str]] = {
    "matmul, TMA": {
        "bar.sync 1/4: removed": _SAME_THREAD,
        "fence.mbarrier_init 1/1: removed": _INIT,
        "fence.proxy.async 1/1: removed": _NO_WRITES,
        "fence.proxy.async 1/1: of global memory only": _NO_WRITES,
        "fence.proxy.async 1/1: after the next bar.sync": _NO_WRITES,
        "bar.sync 3/4: removed": _ALL_WAIT,
        "wgmma.wait_group 2/2: after the next bar.sync": _ONE_GROUP,
        "bar.sync 4/4: removed": _ONE_GROUP,
    },
    "matmul, TMA, two warpgroups": {
        "fence.mbarrier_init 1/1: removed": _INIT,
        "bar.sync 4/5: removed": _ALL_WAIT,
    },
    "attention, sm_90a": {
        "fence.mbarrier_init 1/1: removed": _INIT,
        "bar.sync 3/6: removed": _ALL_WAIT,
        "wgmma.wait_group 1/3: after the next bar.sync": _ONE_GROUP,
        "bar.sync 4/6: removed": _ONE_GROUP,
        "wgmma.wait_group 2/3: removed": _NOTHING_LEFT,
        "wgmma.wait_group 2/3: one group less": _NOTHING_LEFT,
        "mbarrier.inval 1/3: removed": _LAST_USE,
        "mbarrier.inval 2/3: removed": _LAST_USE,
        "mbarrier.inval 3/3: removed": _LAST_USE,
        "bar.sync 5/6: removed": _ONE_GROUP,
    },
    "attention, cp.async": {
        "wgmma.wait_group 1/3: after the next bar.sync": _ONE_GROUP,
        "bar.sync 4/6: removed": _ONE_GROUP,
        "wgmma.wait_group 2/3: removed": _NOTHING_LEFT,
        "wgmma.wait_group 2/3: one group less": _NOTHING_LEFT,
    },
    "warp-specialised": {"setmaxnreg 2/2: removed": _REGISTERS},
}
#: Real defects that must at least be seeded into each kernel.
LEAST = {
    "matmul, TMA": 70,
    "matmul, TMA, two warpgroups": 70,
    "matmul, cp.async, two warpgroups": 45,
    "matmul, sm_80": 25,
    "attention, sm_90a": 70,
    "attention, cp.async": 35,
    "attention, sm_80": 25,
    "warp-specialised": 55,
    "rows": 8,
    "turns": 5,
}


@pytest.fixture(autouse=True, scope="module")
def short_runs() -> Iterator[None]:
    """Much of a run on so little data would be torch's threads, and collection of old objects."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


subject = functools.cache(lambda name: SUBJECTS[name]())


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_right_kernel_raises_no_alarm(name: str) -> None:
    kernel: Subject = subject(name)
    trial = kernel.load(kernel.ptx)
    for seed in (1000, 1001):
        assert verdict(trial, seed) == ""


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_defect_is_found(name: str) -> None:
    kernel, harmless = subject(name), EQUIVALENT.get(name, {})
    made = mutants(kernel.ptx)
    assert len({mutant.name for mutant in made}) == len(made) >= LEAST[name] + len(harmless)
    missed, wrong = [], sorted(harmless.keys() - {mutant.name for mutant in made})
    for seed, mutant in enumerate(made):
        policies = POLICIES[:3] if mutant.name in harmless else POLICIES
        found = verdict(kernel.load(mutant.ptx), seed, policies)
        if mutant.name in harmless and found:
            wrong.append(f"{mutant.name}: {found}")
        elif mutant.name not in harmless and not found:
            missed.append(describe(mutant))
    assert not missed, "not found, and not listed as equivalent:\n" + "\n".join(missed)
    assert not wrong, "listed as equivalent, but found or not there: " + "; ".join(wrong)


def test_there_are_enough_defects() -> None:
    assert LEAST.keys() == SUBJECTS.keys() and sum(LEAST.values()) >= 400
