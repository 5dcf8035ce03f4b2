"""Defects seeded into generated kernels: the emulator finds every one, and right kernels are clean.

A mutant that is no defect, because the kernel is as right without the instruction on a GPU too, is
listed in `EQUIVALENT` with the reason; such a mutant must be clean. A change of code generation may
renumber instructions: the failure shows what is around them, and the list is to be reasoned anew.
"""

from __future__ import annotations

import functools
import gc
import re
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
_OTHER_FENCE = (
    "a later fence is for all mbarriers so far, and those after the last full ones only threads use"
)
_ONE_THREAD = "one thread of the producer warps is left there: the guard is always true"
_TWICE = "the wait beside it is for the same group"
_FREE_BARRIER = "all that meet there move to a barrier that nothing else uses"
_LAST_TURN = "the CTA ends with a turn that nobody takes"
_NO_GROUPS = (
    "the other threads have issued no bulk stores: their groups are empty, their waits short"
)
_EXCHANGED = (
    "two threads of a warpgroup or warp release a stage, one for each CTA: they change places"
)
_REGISTERS = "consumers keep the registers of the launch: a matter of speed, or of not assembling"

#: Kinds of instructions that clusters change.
_OF_CLUSTERS = ("cluster", "mapa", "mbarrier", "bulk load", "fence.mbarrier_init")

#: Of products with a producer warp.
_SPLIT_PRODUCT = {
    "fence.mbarrier_init 1/2: removed": _OTHER_FENCE,
    "fence.mbarrier_init 2/2: removed": _OTHER_FENCE,
    "mbarrier.expect_tx 1/1: by every thread": _ONE_THREAD,
    "bulk load 1/2: by every thread": _ONE_THREAD,
    "bulk load 2/2: by every thread": _ONE_THREAD,
    "setmaxnreg 2/2: removed": _REGISTERS,
    "wgmma.wait_group 1/3: removed": _TWICE,
    "wgmma.wait_group 1/3: one group less": _TWICE,
    "wgmma.wait_group 2/3: removed": _TWICE,
    "wgmma.wait_group 2/3: one group less": _TWICE,
    "wgmma.wait_group 2/3: after the next mbarrier.arrive": _TWICE,
    "bulk.wait_group 1/2: by every thread": _NO_GROUPS,
    "bulk.wait_group 2/2: by every thread": _NO_GROUPS,
    "bulk.commit_group 1/1: by every thread": _NO_GROUPS,
}
#: Of both that run in clusters: a copy is for both CTAs or for one, which not every thread knows.
_PAIRS = {
    "mapa 1/1: to the other CTA": _EXCHANGED,
    **{
        name: reason
        for name, reason in _SPLIT_PRODUCT.items()
        if not name.startswith(("bulk load", "fence.mbarrier_init 2"))
    },
}
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
        "mbarrier.inval 1/2: removed": _LAST_USE,
        "mbarrier.inval 2/2: removed": _LAST_USE,
        "bar.sync 5/6: removed": _ONE_GROUP,
        "bar.sync 5/6: after the next store": _ONE_GROUP,
        "bulk.commit_group 1/1: by every thread": _NO_GROUPS,
        "bulk.wait_group 1/1: by every thread": _NO_GROUPS,
    },
    "attention, cp.async": {
        "wgmma.wait_group 1/3: after the next bar.sync": _ONE_GROUP,
        "bar.sync 4/6: removed": _ONE_GROUP,
        "wgmma.wait_group 2/3: removed": _NOTHING_LEFT,
        "wgmma.wait_group 2/3: one group less": _NOTHING_LEFT,
    },
    "matmul, specialised": {
        **_SPLIT_PRODUCT,
        "bar.sync 2/3: another barrier": _FREE_BARRIER,
        "bar.sync 3/3: another barrier": _FREE_BARRIER,
    },
    "matmul, ping-pong": {
        **_SPLIT_PRODUCT,
        "bar.sync 5/5: removed": _LAST_TURN,
    },
    "matmul, tiles in turns": {
        **{name: why for name, why in _SPLIT_PRODUCT.items() if "bulk.wait" not in name},
        "bulk.wait_group 1/1: by every thread": _NO_GROUPS,
        "bar.sync 4/5: removed": _LAST_TURN,
        "bar.sync 5/5: removed": _LAST_TURN,
    },
    "matmul, pairs": {
        **_PAIRS,
        "bar.sync 1/2: another barrier": _FREE_BARRIER,
        "bar.sync 2/2: another barrier": _FREE_BARRIER,
    },
    "matmul, ping-pong, pairs": {
        name: reason for name, reason in _PAIRS.items() if name.startswith(_OF_CLUSTERS)
    },
    "matmul of bytes": {
        "bar.sync 1/4: removed": _SAME_THREAD,
        "bar.sync 3/4: removed": _ALL_WAIT,
        "bar.sync 4/4: removed": _ONE_GROUP,
        "fence.mbarrier_init 1/1: removed": _INIT,
        "fence.proxy.async 1/1: removed": _NO_WRITES,
        "fence.proxy.async 1/1: of global memory only": _NO_WRITES,
        "fence.proxy.async 1/1: after the next bar.sync": _NO_WRITES,
    },
    "matmul in tf32, specialised": {
        "fence.mbarrier_init 1/2: removed": _OTHER_FENCE,
        "fence.mbarrier_init 2/2: removed": _OTHER_FENCE,
        "mbarrier.expect_tx 1/1: by every thread": _ONE_THREAD,
        **{f"bulk load {n}/5: by every thread": _ONE_THREAD for n in range(1, 6)},
        "wgmma.wait_group 1/4: removed": _TWICE,
        "wgmma.wait_group 1/4: one group less": _TWICE,
        "wgmma.wait_group 2/4: removed": _TWICE,
        "wgmma.wait_group 2/4: one group less": _TWICE,
        "wgmma.wait_group 2/4: after the next mbarrier.arrive": _TWICE,
        "setmaxnreg 2/2: removed": _REGISTERS,
    },
    "attention, specialised": {
        "setmaxnreg 2/2: removed": _REGISTERS,
        "wgmma.wait_group 1/4: removed": _TWICE,
        "wgmma.wait_group 1/4: one group less": _TWICE,
        "wgmma.wait_group 2/4: removed": _TWICE,
        "wgmma.wait_group 2/4: one group less": _TWICE,
        "wgmma.wait_group 2/4: after the next mbarrier.arrive": _TWICE,
        "wgmma.wait_group 4/4: removed": _NOTHING_LEFT,
        "wgmma.wait_group 4/4: one group less": _NOTHING_LEFT,
        "bar.sync 6/6: removed": _LAST_TURN,
    },
    "matmul, three groups": {
        **{name: why for name, why in _SPLIT_PRODUCT.items() if "bulk load" not in name},
        **{f"bulk load {n}/4: by every thread": _ONE_THREAD for n in range(1, 5)},
    },
    "attention, three groups": {"bar.sync 6/6: removed": _LAST_TURN},
    "warp-specialised": {"setmaxnreg 2/2: removed": _REGISTERS},
    "matmul, cluster": {"mapa 1/1: to the other CTA": _EXCHANGED},
}
#: Kinds of instructions to which a kernel's mutants are kept, for time: the rest is as elsewhere.
ONLY = {
    "attention, specialised": ("bar.", "wgmma.", "mbarrier.arrive", "mbarrier wait", "setmax"),
    "matmul, ping-pong, pairs": _OF_CLUSTERS,
    "attention, three groups": ("bar.", "mbarrier.arrive", "mbarrier.init"),
}
#: Defects that are at least seeded into each kernel, equivalent mutants not counted.
LEAST = {
    "matmul, TMA": 50,
    "matmul, TMA, two warpgroups": 85,
    "matmul, cp.async, two warpgroups": 50,
    "matmul, sm_80": 35,
    "attention, sm_90a": 60,
    "attention, cp.async": 40,
    "attention, sm_80": 40,
    "matmul, specialised": 45,
    "matmul, ping-pong": 45,
    "matmul, tiles in turns": 45,
    "matmul, pairs": 90,
    "matmul, ping-pong, pairs": 70,
    "matmul of bytes": 50,
    "matmul in tf32, specialised": 50,
    "attention, specialised": 60,
    "matmul, three groups": 75,
    "attention, three groups": 75,
    "warp-specialised": 60,
    "matmul, cluster": 40,
    "rows": 10,
    "turns": 10,
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
    made = [mutant for mutant in mutants(kernel.ptx) if mutant.name.startswith(ONLY.get(name, ""))]
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


#: Of what is equivalent one by one: the kernel, the lines to leave out, whether that is found.
TOGETHER = [
    ("matmul, specialised", r"fence\.mbarrier_init", True),
    ("matmul, specialised", r"wgmma\.wait_group\.sync\.aligned 0", True),
    ("matmul, pairs", r"fence\.mbarrier_init", True),
    ("matmul, ping-pong", r"bar\.(sync|arrive)\s+%r\d+, 256", True),  # turns keep phases apart
    ("attention, specialised", r"bar\.(sync|arrive) %r\d+, 256", False),  # turns are for speed
    ("attention, three groups", r"bar\.(sync|arrive) %r\d+, 256", False),
]


@pytest.mark.parametrize(("name", "pattern", "wrong"), TOGETHER)
def test_instructions_that_stand_for_each_other(name: str, pattern: str, wrong: bool) -> None:
    kernel: Subject = subject(name)
    lines = kernel.ptx.splitlines()
    kept = [line for line in lines if not re.match(rf"\s*{pattern}", line)]
    assert len(kept) <= len(lines) - 2
    assert bool(verdict(kernel.load("\n".join(kept)), 7)) == wrong


def test_there_are_enough_defects() -> None:
    assert LEAST.keys() == SUBJECTS.keys() and sum(LEAST.values()) >= 745


RULES = """
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 2;
    bar.sync 0;
    @%p2 bra NEXT;
    bar.arrive %r2, 64;
NEXT:
    st.shared.b32 [%r3], %r4;
    fence.proxy.async.shared::cta;
    cp.async.ca.shared.global [%r5+8], [%rd1], 4;
    cp.async.wait_group 1;
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], %r6;
    bar.red.popc.u32 %r7, 0, %p3;
"""


def test_rules() -> None:
    """By name, the lines that a rule adds; a branch and a label end what may change places."""
    lines = RULES.splitlines()
    added = {}
    for mutant in mutants(RULES):
        new = [line for line in mutant.ptx.splitlines() if line.strip() and line not in lines]
        assert mutant.ptx != RULES
        added[mutant.name] = " ".join(new)
    init, wait = "mbarrier.init.shared::cta.b64 [%r1],", "mbarrier.try_wait.parity.shared::cta.b64"
    inner = "{ .reg .b32 changed;"
    assert added == {
        "mbarrier.init 1/1: removed": "",
        "mbarrier.init 1/1: by every thread": f"{init} 2;",
        "mbarrier.init 1/1: count +1": f"@%p1 {init} 3;",
        "mbarrier.init 1/1: count -1": f"@%p1 {init} 1;",
        "mbarrier.init 1/1: after the next bar.sync": f"bar.sync 0; @%p1 {init} 2;",
        "bar.sync 1/1: removed": "",
        "bar.arrive 1/1: removed": "",
        "bar.arrive 1/1: another barrier": (
            f"{inner} add.u32 changed, %r2, 1; bar.arrive changed, 64; }}"
        ),
        "bar.arrive 1/1: +32 threads": "bar.arrive %r2, 96;",
        "bar.arrive 1/1: -32 threads": "bar.arrive %r2, 32;",
        "store 1/1: after the next fence.proxy.async": (
            "fence.proxy.async.shared::cta ; st.shared.b32 [%r3], %r4;"
        ),
        "fence.proxy.async 1/1: removed": "",
        "fence.proxy.async 1/1: of global memory only": "fence.proxy.async.global;",
        "cp.async 1/1: removed": "",
        "cp.async 1/1: 16 bytes further": "cp.async.ca.shared.global [%r5+24], [%rd1], 4;",
        "cp.async 1/1: from 16 bytes further": "cp.async.ca.shared.global [%r5+8], [%rd1+16], 4;",
        "cp.async.wait_group 1/1: removed": "",
        "cp.async.wait_group 1/1: one group less": "cp.async.wait_group 2;",
        "mbarrier wait 1/1: removed": "setp.eq.u32 %p3, 0, 0;",
        "mbarrier wait 1/1: at the mbarrier beside": f"{wait} %p3, [%r1+8], %r6;",
        "mbarrier wait 1/1: parity flipped": (
            f"{inner} xor.b32 changed, %r6, 1; {wait} %p3, [%r1], changed; }}"
        ),
        "bar.red 1/1: removed": "",
    }
