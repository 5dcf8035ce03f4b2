"""The copies of a pipelined loop that TMA makes: one thread asks, an mbarrier per slot counts.

    before the loop: mbarrier_init; barrier; expect and tma_copy of the first stages-1 iterations
    in it:           mbarrier_wait slot; barrier; expect and tma_copy for iteration i+stages-1
    after it:        mbarrier_inval

A slot's barrier completes one phase each time that the slot is filled, so the parity to wait for
changes whenever the slot numbers start again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.mlir import ir
from minitriton.ir.tensor_map_specs import add_spec
from minitriton.passes.affine import AffineAnalysis
from minitriton.passes.map_terms import Rebuild, describe, evaluate
from minitriton.passes.slots import allocate_barriers, barrier_at
from minitriton.passes.tensor_maps import MapPlan
from minitriton.passes.traversal import Value


class Mapped(Protocol):
    """A load whose tile a tensor map describes."""

    @property
    def load(self) -> ir.Operation: ...

    @property
    def map(self) -> MapPlan | None: ...

    @property
    def order(self) -> tuple[int, ...]: ...


class Filled(Mapped, Protocol):
    """A multi-buffer that TMA fills."""

    @property
    def bytes(self) -> int: ...

    @property
    def fixed(self) -> bool: ...

    def at(self, index: Value, builder: Builder) -> Value:
        """The slot with this number."""


class TmaCopies:
    """The barriers of one loop, and what fills its buffers."""

    def __init__(
        self, module: ir.Module, buffers: Sequence[Filled], analysis: AffineAnalysis, stages: int,
        builder: Builder,
    ) -> None:  # fmt: skip
        self._analysis = analysis
        self._filled = [
            (buffer, add_spec(module.operation, described(buffer, analysis)))
            for buffer in buffers
            if buffer.map is not None
        ]
        self._moving = any(not buffer.fixed for buffer, _ in self._filled)
        if not self._moving:  # one barrier, which completes once
            stages = 1
        self._barriers = allocate_barriers(stages, 1, builder)
        builder.create("mt.proxy_fence", [])  # the buffers may have been something else's memory
        builder.create("mt.barrier", [])

    def issue(
        self, slot: Value, runs: Value, rebuild: Rebuild, builder: Builder, *, first: bool
    ) -> None:
        """The copies of one iteration into slot number `slot`, if it `runs`; `first`: those of
        tiles that never change come along. `rebuild` gives atoms as they are in that iteration."""
        chosen = [filled for filled in self._filled if first or not filled[0].fixed]
        if not chosen:
            return
        barrier = barrier_at(self._barriers, slot, builder)
        total = sum(buffer.bytes for buffer, _ in chosen)
        builder.create("mt.mbarrier_expect", [], [barrier, runs], {"bytes": i32_attr(total)})
        for buffer, number in chosen:
            to = buffer.at(slot, builder)
            copy_boxes(buffer, to, barrier, runs, number, self._analysis, rebuild, builder)

    def wait(self, slot: Value, parity: Value, builder: Builder) -> None:
        """Until the copies into slot number `slot` are there."""
        if not self._moving:
            slot = parity = builder.constant(slot.type, 0)
        builder.create("mt.mbarrier_wait", [], [barrier_at(self._barriers, slot, builder), parity])

    def end(self, builder: Builder) -> None:
        """After the loop: the memory of the barriers may serve others."""
        builder.create("mt.mbarrier_inval", [], [self._barriers])
        builder.create("mt.local_dealloc", [], [self._barriers])


def atoms_of(plan: MapPlan, analysis: AffineAnalysis) -> list[Value]:
    """The scalars that a plan's coordinates are made of."""
    numbers = {atom for dim in plan.dims for atom in dim.coordinate.atoms()}
    return [analysis.atoms[number] for number in sorted(numbers)]


def copy_boxes(
    buffer: Mapped, to: Value, barrier: Value, runs: Value, number: int,
    analysis: AffineAnalysis, rebuild: Rebuild, builder: Builder,
) -> ir.Operation:  # fmt: skip
    """The copy of a buffer's tile into slot `to`; `rebuild` gives atoms as they are there."""
    plan = buffer.map
    assert plan is not None, "only what a tensor map describes is copied"
    with builder.at(builder.ip, buffer.load.location):
        coordinates = [evaluate(dim.coordinate, analysis, rebuild, builder) for dim in plan.dims]
        return builder.create(
            "mt.tma_copy", [], [to, barrier, runs, *coordinates],
            {"map": i32_attr(number), "dims": ir.DenseI32ArrayAttr.get(plan.places)},
        )  # fmt: skip


def described(buffer: Mapped, analysis: AffineAnalysis) -> dict[str, Any]:
    """The tensor map of a buffer's tile as data (ir/tensor_map_specs.py). What wgmma reads of fp32
    is rounded to tf32 on the way."""
    plan = buffer.map
    assert plan is not None, "only what a tensor map describes is copied"
    type_ = buffer.load.results[0].type
    spec = describe(plan, tuple(type_.shape), buffer.order, type_.element_type, analysis)
    return spec | {"element": "tf32"} if spec["element"] == "f32" else spec
