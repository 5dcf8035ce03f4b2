"""PTX made by nvcc (data/features.ptx) and by MLIR's NVPTX backend, against numpy."""

from __future__ import annotations

import io
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minitriton.runtime.emulator import (
    Allocation,
    Emulator,
    EmulatorError,
    SharedRace,
    UninitialisedRead,
    parameter,
)

RNG = np.random.default_rng(2)
TEXT = (Path(__file__).parent / "data" / "features.ptx").read_text()
N = 1000


@pytest.fixture(scope="module")
def program() -> Emulator:
    return Emulator(TEXT)


def launch(
    program: Emulator,
    entry: str,
    arrays: list[Any],
    rest: list[bytes],
    grid: int,
    block: int,
    landing: str = "late",
) -> str:
    """Run under every schedule and with all checks; returns what the kernel printed."""
    text = io.StringIO()
    for schedule in ("round_robin", "reverse", "random"):
        text.seek(0)
        text.truncate()
        program.launch(
            entry,
            grid=(grid, 1, 1),
            block=(block, 1, 1),
            params=[parameter(a.ctypes.data) for a in arrays] + rest,
            allocations=[
                Allocation(a.ctypes.data, a.nbytes, f"array {i}") for i, a in enumerate(arrays)
            ],
            schedule=schedule,
            landing=landing,
            stdout=text,
        )
    return text.getvalue()


COUNT = [parameter(N, "u32")]


def test_halves(program: Emulator) -> None:
    a = RNG.standard_normal(N).astype(np.float16)
    out, brain = np.zeros(N, np.float16), np.zeros(N, ml_dtypes.bfloat16)
    launch(program, "halves", [out, a, brain], COUNT, 8, 128)
    wide = a.astype(np.float64)
    once = (wide * wide + wide).astype(np.float16)
    np.testing.assert_array_equal(out, once + once[::-1])
    expected = (out.astype(np.float32) * np.float32(1.5)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(brain, expected)


def integer_model(x: int) -> int:
    """The kernel `integers` in unbounded integers."""
    mask, signed = 2**32 - 1, x - (x >> 31 << 32)
    counts = bin(x).count("1") + (32 - x.bit_length()) * 100 + (x & -x).bit_length() * 7
    reverse = int(f"{x:032b}"[::-1], 2)
    scaled = (x * 2654435761 & 2**64 - 1) % 1000003
    funnel = (((x + 1) & mask) << 5 | x >> 27) & mask
    pool = [*x.to_bytes(4, "little"), *(~x & mask).to_bytes(4, "little")]
    permuted = sum(pool[0x3614 >> 4 * k & 7] << 8 * k for k in range(4))
    high = x * ((x + 3) & mask) >> 32
    quotient = -(abs(signed) // 7) if signed >= 0 else abs(signed) // 7
    left, right = (v.to_bytes(4, "little") for v in (x, (x + 5) & mask))
    dot = sum(((p ^ 128) - 128) * ((q ^ 128) - 128)
              for p, q in zip(left, right, strict=True)) + 3  # fmt: skip
    total = counts + reverse + scaled + x // 7 + x % 13 + funnel + permuted + high
    return (total + quotient + dot) & mask


def test_integers(program: Emulator) -> None:
    x = RNG.integers(0, 2**32, N, dtype=np.uint32)
    out = np.zeros(N, np.uint32)
    launch(program, "integers", [out, x], COUNT, 8, 128)
    assert out.tolist() == [integer_model(int(v)) for v in x]


def test_floats_and_doubles(program: Emulator) -> None:
    x = (RNG.random(N) * 3 + 0.01).astype(np.float32)
    out = np.zeros(N, np.float32)
    launch(program, "floats", [out, x], COUNT, 8, 128)
    d = x.astype(np.float64)
    basic = np.sqrt(d) + 1 / d + np.exp(-d) + np.log(d) + np.floor(d)
    more = np.fmod(x, np.float32(0.3)) + np.tanh(d) + np.sin(d) + np.rint(x * 3) + d.astype(int)
    more = more + 1 / np.sqrt(d) + np.array([math.erf(v) for v in d])
    np.testing.assert_allclose(out, basic + more, rtol=2e-6)
    wide = np.zeros(N)
    launch(program, "doubles", [wide, d], COUNT, 8, 128)
    np.testing.assert_allclose(wide, basic, rtol=1e-14)


def test_last_block_sums(program: Emulator) -> None:
    x = RNG.random(5000).astype(np.float32)
    out, part, count = np.zeros(1, np.float32), np.zeros(9, np.float32), np.zeros(1, np.uint32)
    rest = [parameter(5000, "u32")]
    launch(program, "last_block", [out, x, part, count], rest, 9, 128)
    np.testing.assert_allclose(out[0], x.astype(np.float64).sum(), rtol=1e-5)
    assert count[0] == 0


@pytest.mark.parametrize("landing", ["late", "early", "random"])
def test_pipeline(program: Emulator, landing: str) -> None:
    x = RNG.random(512 * 9).astype(np.float32)
    out = np.zeros(128, np.float32)
    launch(program, "pipeline", [out, x], [parameter(512 * 9, "u32")], 1, 128, landing)
    np.testing.assert_allclose(out, x.reshape(-1, 4, 128).sum((0, 1)), rtol=1e-5)


def test_fp8(program: Emulator) -> None:
    x = (RNG.standard_normal(N) * 50).astype(np.float32)
    out = np.zeros(2 * N, np.uint8)
    launch(program, "fp8", [out, x], COUNT, 8, 128)
    e4m3 = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(out[::2], e4m3)
    np.testing.assert_array_equal(out[1::2], x.astype(ml_dtypes.float8_e5m2).view(np.uint8))


def test_structure_parameter(program: Emulator) -> None:
    out, i = np.zeros(64, np.float32), np.arange(64)
    values = struct.pack("<20if", *range(20), 2.5)
    launch(program, "structure", [out], [values, parameter(3, "u32")], 1, 64)
    np.testing.assert_array_equal(out, (i % 20) * 2.5 + (3 + i) % 20)


def test_control_flow_and_printf(program: Emulator) -> None:
    n, out = 5, np.zeros(96, np.int32)
    printed = launch(program, "control", [out], [parameter(n, "u32")], 1, 96)

    def model(t: int) -> int:
        cases = {0: 1, 1: t, 2: 3 * t, 3: t // 3, 4: sum(i ^ n for i in range(t)), 5: -t}
        return cases.get((t + n) % 7, t if t > 40 else 2 * t)

    local = [max(i for i in range(16) if (i * n + t) & 15 == n & 15) for t in range(96)]
    assert out.tolist() == [model(t) + local[t] for t in range(96)]
    assert printed == f"t={model(5)} text {0.5 * model(5):.1f}\n"


MLIR = """module attributes {gpu.container_module} {
  gpu.module @m [#nvvm.target<chip = "sm_90a", O = 3>] {
    llvm.func @k(%out: !llvm.ptr<1>, %in: !llvm.ptr<1>, %n: i32)
        attributes {nvvm.kernel, nvvm.reqntid = array<i32: 64, 1, 1>} {
      %t = nvvm.read.ptx.sreg.tid.x : i32
      %c4 = arith.constant 4 : i32
      %zero = arith.constant 0 : i32
      %one = arith.constant 1 : i32
      %i = arith.muli %t, %c4 : i32
      %p = llvm.getelementptr inbounds %in[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, f32
      %v = llvm.load %p {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
      %r = scf.for %j = %zero to %n step %one iter_args(%acc = %v) -> (vector<4xf32>) : i32 {
        %m = math.fma %acc, %v, %v : vector<4xf32>
        %c = arith.cmpf olt, %m, %v : vector<4xf32>
        %s = arith.select %c, %m, %v : vector<4xi1>, vector<4xf32>
        %h = arith.truncf %s : vector<4xf32> to vector<4xf16>
        %w = arith.extf %h : vector<4xf16> to vector<4xf32>
        scf.yield %w : vector<4xf32>
      }
      %q = llvm.getelementptr inbounds %out[%i] : (!llvm.ptr<1>, i32) -> !llvm.ptr<1>, f32
      llvm.store %r, %q {alignment = 16 : i64} : vector<4xf32>, !llvm.ptr<1>
      llvm.return
    }
  }
}"""


def test_mlir_made_kernel() -> None:
    ir = pytest.importorskip("numba_cuda_mlir._mlir.ir")
    from numba_cuda_mlir._mlir import passmanager

    passes = "convert-scf-to-cf,gpu.module(convert-to-llvm),reconcile-unrealized-casts"
    with ir.Context():
        module = ir.Module.parse(MLIR)
        for text in (passes, "gpu-module-to-binary{format=isa}"):
            passmanager.PassManager.parse(f"builtin.module({text})").run(module.operation)
        binary = next(o for o in module.body.operations if o.operation.name == "gpu.binary")
        objects = str(binary.operation.attributes["objects"])
    raw = objects[objects.index('assembly = "') + 12 : objects.rindex('"')]
    ptx = raw.replace("\\0A", "\n").replace("\\09", "\t").replace("\\22", '"').replace("\\00", "")
    x = RNG.standard_normal(256).astype(np.float32)
    out = np.zeros(256, np.float32)
    launch(Emulator(ptx), "k", [out, x], [parameter(7, "u32")], 1, 64)
    acc = x
    for _ in range(7):
        m = (acc.astype(np.float64) * x + x).astype(np.float32)
        acc = np.where(m < x, m, x).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(out, acc)


def seeded_defects() -> list[tuple[str, int, str]]:
    """(entry, position in the text, removed line) of every barrier and copy wait.

    Barriers 2 to 7 of last_block separate steps of a tree inside one warp; a warp is one agent of
    the race check, so they are left out.
    """
    found = []
    for entry in ("pipeline", "last_block"):
        start = TEXT.index(f".entry {entry}(")
        end = TEXT.index("\n}", start)
        for what in ("bar.sync", "cp.async.wait_group"):
            at, count = TEXT.find(what, start, end), 0
            while at >= 0:
                line = TEXT[at : TEXT.index(";", at) + 1]
                if entry == "pipeline" or not 2 <= count <= 7:
                    found.append((entry, at, line))
                count += 1
                at = TEXT.find(what, at + 1, end)
    return found


@pytest.mark.parametrize("defect", seeded_defects(), ids=lambda d: f"{d[0]}-{d[1]}")
def test_every_seeded_defect_is_reported(defect: tuple[str, int, str]) -> None:
    entry, at, line = defect
    broken = Emulator(TEXT[:at] + TEXT[at + len(line) :])
    x = RNG.random(512 * 11).astype(np.float32)
    out, part, count = np.zeros(128, np.float32), np.zeros(9, np.float32), np.zeros(1, np.uint32)
    rest = [parameter(len(x), "u32")]
    arrays, grid = ([out, x], 1) if entry == "pipeline" else ([out, x, part, count], 9)
    with pytest.raises(EmulatorError) as caught:
        launch(broken, entry, arrays, rest, grid, 128)
    assert isinstance(caught.value, SharedRace | UninitialisedRead)
