"""The matmul for clusters of two CTAs: right and clean, and its defects are found."""

from __future__ import annotations

import re
from typing import Any

import pytest

from minitriton.runtime import assembler
from minitriton.runtime.emulator import (
    Deadlock,
    Emulator,
    MbarrierMisuse,
    OutOfBounds,
    SharedRace,
    UninitialisedRead,
)
from tests.emulator.cluster_gemm import PTX, STAGE, multiply
from tests.emulator.defects import Policy

POLICIES = [("late", "round_robin"), ("early", "reverse"), ("random", "random")]


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
def test_matmul(landing: str, schedule: str) -> None:
    assembler.assemble(PTX, "sm_90a", "k")
    program = Emulator(PTX)
    for clusters in (1, 8):  # 8: two chunks
        right, report = multiply(program, clusters, clusters, Policy(landing, schedule))
        assert right
        assert report.bytes["load_bulk"] == 2 * clusters * 2 * 5 * STAGE
        assert report.chunks == (1 if clusters == 1 else 2)


def _edit(old: str, new: str) -> str:
    changed, count = re.subn(old, new, PTX, flags=re.S)
    assert count
    return changed


DEFECTS: dict[str, tuple[str, Any, str | None]] = {
    "CTA barrier at the start": (
        _edit(r"barrier.cluster.arrive\S+ // begin\s+barrier.cluster.wait\S+ // begun",
              "bar.sync 0;"),
        (SharedRace, MbarrierMisuse), "mbarrier"),
    "no barrier at the end": (
        _edit(r"barrier.cluster.(arrive|wait)\S+ // end(ed)?", ""),
        (SharedRace, OutOfBounds), "may end|has ended"),
    "no init fence": (_edit(r"fence.mbarrier_init.release.cluster;", ""), SharedRace, None),
    "own bytes only": (
        _edit(rf"{STAGE}; // expect", f"{STAGE - 1024}; // expect"),
        (MbarrierMisuse, SharedRace, UninitialisedRead), None),
    "too many bytes": (
        _edit(rf"{STAGE}; // expect", f"{STAGE + 1024}; // expect"),
        Deadlock, "1024 bytes outstanding"),
    "multicast to one": (_edit("3; // mask", "1; // mask"), Deadlock, "bytes outstanding"),
    "multicast to three": (_edit("3; // mask", "7; // mask"), OutOfBounds, "cluster of 2"),
    "releases own stages only": (
        _edit("%r12; // whose", "%r40; // whose"), SharedRace, "copy of shared memory"),
    "half the arrivals": (
        _edit(r"(\[bars\+(16|24)\]), 4;", r"\1, 2;"), (MbarrierMisuse, SharedRace), None),
    "parity of empty": (_edit("xor.b32 %r29, %r21, 1;", "mov.b32 %r29, %r21;"), Deadlock,
                        "parity 0"),
    "no wait for empty": (
        _edit("// <empty>.*?// </empty>", ""), (SharedRace, MbarrierMisuse), None),
    "no wait for full": (
        _edit("// <full>.*?// </full>", ""), (SharedRace, UninitialisedRead), None),
    "release before the products": (
        _edit("aligned 0; // products", "aligned 1;"), SharedRace, "wgmma in flight"),
}  # fmt: skip


@pytest.mark.parametrize(("landing", "schedule"), POLICIES)
@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(name: str, landing: str, schedule: str) -> None:
    ptx, error, message = DEFECTS[name]
    with pytest.raises(error, match=message):
        multiply(ptx, 2, 0, Policy(landing, schedule), max_steps=100_000)
