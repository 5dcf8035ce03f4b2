"""What a launch did: dynamic instructions, bytes by space, and FLOPs by kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from minitriton.runtime.emulator.blocks import Blocks
from minitriton.runtime.emulator.checks import Location

#: Floating-point operations per lane of scalar instructions (an fma counts two).
_FLOPS = {"add": 1, "sub": 1, "mul": 1, "div": 1, "fma": 2, "mad": 2, "sqrt": 1, "rsqrt": 1,
          "rcp": 1, "ex2": 1, "lg2": 1, "sin": 1, "cos": 1, "tanh": 1, "min": 1,
          "max": 1}  # fmt: skip
_PER_TYPE = {"f16": 1, "bf16": 1, "f32": 1, "f64": 1, "f16x2": 2, "bf16x2": 2}


@dataclass(slots=True)
class Report:
    """Totals of one launch. Predicated-off lanes count as issued.

    ``instructions`` are per warp, ``lane_instructions`` per lane; ``mix`` counts
    lane-instructions by opcode, ``bytes`` by access and space (``load_global``), ``flops`` by
    type (``f32``, ``mma_f16``); ``lines`` counts lane-instructions by source position.
    """

    instructions: int = 0
    lane_instructions: int = 0
    mix: Counter[str] = field(default_factory=Counter)
    bytes: dict[str, int] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    lines: Counter[Location] = field(default_factory=Counter)
    steps: int = 0
    chunks: int = 0


def collect(blocks: Blocks, bytes_moved: dict[str, int], tensor_flops: dict[str, int]) -> Report:
    """Sum the execution counts of all runs and reset them."""
    report = Report(bytes=dict(bytes_moved))
    report.flops.update(tensor_flops)
    code = blocks.program.code
    per_pc: Counter[int] = Counter()
    for run in blocks.runs.values():
        if not run.lanes:
            continue
        last = run.end + (1 if run.control is not None else 0)
        for pc in range(run.start, min(last, len(code))):
            per_pc[pc] += run.lanes
        report.instructions += run.warps * (last - run.start)
        run.lanes = run.warps = 0
    for pc, lanes in per_pc.items():
        ins = code[pc]
        report.lane_instructions += lanes
        report.mix[ins.op] += lanes
        if ins.loc is not None:
            report.lines[ins.loc] += lanes
        each = _FLOPS.get(ins.op, 0) * _PER_TYPE.get(ins.type, 0)
        if each:
            report.flops[ins.type] += each * lanes
    return report
