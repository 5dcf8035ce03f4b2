"""The tile pipeline as data, and the one loop that runs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import (
    allocate_shared,
    assign_layouts,
    clusters,
    copy_ahead,
    fuse_reductions,
    grid_overlap,
    insert_barriers,
    legality,
    load_once,
    orient_dots,
    pipeline_loads,
    producer_slice,
    simplify,
    sink_past_products,
    split_rows,
    tma_stores,
    verify_layouts,
)
from minitriton.passes.tile_pass import Pass, PassOptions

OnStage = Callable[[int, str, ir.Module, float], None]


@dataclass(frozen=True)
class BoundPass:
    """A pass with the target and options it will run with."""

    step: Pass
    target: Target
    options: PassOptions

    @property
    def name(self) -> str:
        return self.step.name

    def run(self, module: ir.Module) -> None:
        self.step.run(module, self.target, self.options)


def tile_pipeline(target: Target, options: PassOptions | None = None) -> list[BoundPass]:
    """The passes from the frontend's module to what code generation takes, in order."""
    settings = options or PassOptions()
    check = [Pass("verify_layouts", verify_layouts.run)] if settings.check else []
    steps = [
        Pass("split_rows", split_rows.run),
        Pass("simplify", simplify.run),
        Pass("fuse_reductions", fuse_reductions.run),
        Pass("load_once", load_once.run),
        Pass("orient_dots", orient_dots.run),
        Pass("assign_layouts", assign_layouts.run),
        *check,
        Pass("pipeline_loads", pipeline_loads.run),
        *check,
        Pass("copy_ahead", copy_ahead.run),
        *check,
        Pass("tma_stores", tma_stores.run),
        *check,
        Pass("allocate_shared", allocate_shared.run),
        Pass("insert_barriers", insert_barriers.run),
        Pass("clusters", clusters.run),
        Pass("producer_slice", producer_slice.add_producer),
        Pass("sink_past_products", sink_past_products.run),
        Pass("grid_overlap", grid_overlap.run),
        Pass("legality", legality.run),
    ]
    return [BoundPass(step, target, settings) for step in steps]


def run_pipeline(
    module: ir.Module, passes: Sequence[BoundPass], on_stage: OnStage | None = None
) -> None:
    """Runs `passes` on `module` in place; on_stage(index, name, module, seconds) after each.

    With PassOptions.check the module is verified after every pass (MLIRError where it is broken).
    """
    for index, step in enumerate(passes):
        start = time.perf_counter()
        step.run(module)
        seconds = time.perf_counter() - start
        if step.options.check:
            module.operation.verify()
        if on_stage is not None:
            on_stage(index, step.name, module, seconds)
