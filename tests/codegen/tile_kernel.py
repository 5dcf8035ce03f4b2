"""Builds layouted tile IR op by op, compiles it and runs the PTX in the emulator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod

import numpy as np

from minitriton.codegen.lower import lower_to_gpu
from minitriton.codegen.ptx import emit_ptx
from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.context import use
from minitriton.ir.dialect import MemType, PtrType
from minitriton.ir.encoding import encode, layout_of, tile_type, with_layout
from minitriton.ir.layouts import blocked
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.runtime.assembler import assemble
from minitriton.runtime.emulator.counters import Report
from minitriton.runtime.emulator.device import Emulator
from minitriton.runtime.emulator.memory import Allocation

ALL_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


class TileKernel:
    """A kernel of pointer arguments `elements` (MLIR type texts), to be filled by the methods."""

    def __init__(self, elements: Sequence[str], num_warps: int, target: str = "sm_80") -> None:
        self.num_warps, self.target = num_warps, Target.parse(target)
        self.module = ir.Module.parse(
            f"module attributes {{mt.num_warps = {num_warps} : i32}} {{}}"
        )
        pointers = [PtrType.get(ir.TypeAttr.get(ir.Type.parse(e))) for e in elements]
        with ir.InsertionPoint(self.module.body), ir.Location.unknown():
            function = ir.Operation.create(
                "func.func",
                attributes={
                    "sym_name": ir.StringAttr.get("kernel"),
                    "function_type": ir.TypeAttr.get(ir.FunctionType.get(pointers, [])),
                    "arg_attrs": ir.ArrayAttr.get(
                        [ir.DictAttr.parse("{mt.divisibility = 16 : i64}")] * len(pointers)
                    ),
                },
                regions=1,
            )
            self.block = function.regions[0].blocks.append(
                *pointers, arg_locs=[ir.Location.unknown()] * len(pointers)
            )
        self.builder = Builder(ir.InsertionPoint(self.block))

    def index(self, layout: LinearLayout) -> ir.Value:
        """i32 tile of C-order linear indices."""
        i32, size = ir.IntegerType.get_signless(32), prod(layout.shape)
        flat = tile_type(i32, layout.reshape((size,)))
        attributes = {"start": i32_attr(0), "end": i32_attr(size)}
        line = self.builder.op("mt.make_range", flat, (), attributes)
        return self.builder.op("mt.reshape", tile_type(i32, layout), (line,))

    def pointers(self, argument: int, layout: LinearLayout) -> ir.Value:
        """Tile of pointers to the argument's elements in C order."""
        pointer = self.block.arguments[argument]
        type_ = tile_type(pointer.type, layout)
        splat = self.builder.op("mt.splat", type_, (pointer,))
        return self.builder.op("mt.addptr", type_, (splat, self.index(layout)))

    def load(self, argument: int, layout: LinearLayout) -> ir.Value:
        pointers = self.pointers(argument, layout)
        element = pointers.type.element_type.pointee
        return self.builder.op("mt.load", tile_type(element, layout), (pointers,))

    def store(self, argument: int, value: ir.Value) -> None:
        """The whole tile, or a scalar into element 0."""
        if isinstance(value.type, ir.RankedTensorType):
            pointers = self.pointers(argument, layout_of(value.type))
        else:
            pointers = self.block.arguments[argument]
        self.builder.create("mt.store", [], [pointers, value])

    def convert(self, value: ir.Value, layout: LinearLayout, offset: int = 0) -> ir.Value:
        attributes = {"mt.offset": i32_attr(offset)}
        return self.builder.op(
            "mt.convert_layout", with_layout(value.type, layout), (value,), attributes
        )

    def barrier(self) -> None:
        self.builder.create("mt.barrier", [])

    def ptx(self) -> str:
        self.builder.create("func.return", [])
        assert self.module.operation.verify()
        return emit_ptx(lower_to_gpu(self.module, self.target))


def mem_type(element: ir.Type, layout: LinearLayout, slots: int | None = None) -> ir.Type:
    """`!mt.mem` of a buffer, or of `slots` of them."""
    shape = ([] if slots is None else [slots]) + list(layout.shape)
    tensor = ir.RankedTensorType.get(shape, element, encoding=encode(layout))
    return MemType.get(ir.TypeAttr.get(tensor))


def run(
    ptx: str,
    arrays: Sequence[np.ndarray],
    num_warps: int,
    shared_bytes: int = 0,
    landing: str = "late",
) -> Report:
    """Executes one CTA on `arrays` in place, with all checks; the emulator's counters."""
    allocations = [Allocation(a.ctypes.data, a.nbytes, f"arg{i}") for i, a in enumerate(arrays)]
    params = [a.ctypes.data.to_bytes(8, "little") for a in arrays]
    emulator = Emulator(ptx)
    return emulator.launch(
        "kernel",
        grid=(1, 1, 1),
        block=(32 * num_warps, 1, 1),
        params=params,
        allocations=allocations,
        shared_bytes=shared_bytes,
        landing=landing,
    )


def check_assembles(ptx: str, arch: str) -> None:
    """The assembler takes it and spills nothing."""
    assembled = assemble(ptx, arch, "kernel")
    assert assembled.spill_stores == 0 and assembled.spill_loads == 0
    assert not [w for w in assembled.warnings if "serialized" in w]


def random_blocked(rng: np.random.Generator, shape: Sequence[int], num_warps: int) -> LinearLayout:
    """A blocked layout with the factors of registers, lanes and warps dealt out at random."""
    rank = len(shape)
    parts = [[1] * rank for _ in range(3)]
    for part, size in zip(parts, (rng.choice([1, 2, 4]), 32, num_warps), strict=True):
        while size > 1:
            part[rng.integers(rank)] *= 2
            size //= 2
    parts[0] = [min(a, b) for a, b in zip(parts[0], shape, strict=True)]
    return blocked(shape, *parts, tuple(int(d) for d in rng.permutation(rank)))


def with_context(test):
    """Runs a test inside the MLIR context."""

    @functools.wraps(test)
    def inside(*args, **kwargs):
        with use():
            return test(*args, **kwargs)

    return inside
