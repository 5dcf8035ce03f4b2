"""Grids, and the bytes that reach the driver: checked with a stand-in for cuda.bindings."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from minitriton.runtime import driver, launch
from minitriton.runtime.launch import LaunchError, LaunchShape, normalize_grid
from minitriton.runtime.module import Function

HANDLE = 0xABCD
FUNCTION = Function("k", 0, HANDLE, "module", 32, 0, 0, 1024)


class FakeCuda:
    """Reads parameters as the driver would: through the array of addresses."""

    def __init__(self, sizes: list[int], code: int = 0) -> None:
        self.sizes, self.code, self.calls = sizes, code, []
        self.inside = threading.Barrier(1)

    def __call__(self, config, function, parameters, extra):
        """cuLaunchKernelEx."""
        assert (function.value, extra) == (HANDLE, None)
        raw = ctypes.string_at(config.value, 56)
        gx, gy, gz, bx, by, bz, shared, stream, place, count = struct.unpack("<7I4xQQI4x", raw)
        addresses = (ctypes.c_void_p * max(len(self.sizes), 1)).from_address(parameters.value)
        self.inside.wait()  # other threads may pack their own values now
        values = [ctypes.string_at(a, n) for a, n in zip(addresses, self.sizes, strict=False)]
        self.calls.append(((gx, gy, gz), (bx, by, bz), shared, stream, values))
        self.attributes = [
            struct.unpack("<I4x3I52x", ctypes.string_at(place + 72 * i, 72)) for i in range(count)
        ]
        return self.code


def test_packing_of_every_type() -> None:
    cases = [
        ("*", 2**63 + 5, "<Q"), ("int1", True, "<?"), ("int8", -3, "<b"), ("uint8", 250, "<B"),
        ("int16", -300, "<h"), ("uint16", 65000, "<H"), ("int32", -(2**31), "<i"),
        ("uint32", 2**32 - 1, "<I"), ("int64", -(2**63), "<q"), ("uint64", 2**64 - 1, "<Q"),
        ("fp16", 0.5, "<e"), ("fp32", 0.1, "<f"), ("fp64", 0.1, "<d"),
    ]  # fmt: skip
    cuda = FakeCuda([struct.calcsize(code) for _, _, code in cases])
    run = launch.make_launcher(
        FUNCTION, LaunchShape(128, 64), [c[0] for c in cases], [(i,) for i in range(len(cases))],
        len(cases), launch_ex=cuda, multiple=False,
    )  # fmt: skip
    for _ in range(2):  # the second time the block is reused
        run(7, 2, 3, 99, *(value for _, value, _ in cases))
    expected = [struct.pack(code, value) for _, value, code in cases]
    assert cuda.calls == [((7, 2, 3), (128, 1, 1), 64, 99, expected)] * 2
    for dtype, value, code in cases:
        assert launch.to_bytes(dtype, value) == struct.pack(code, value)


def test_constexprs_and_dropped_values_are_skipped() -> None:
    cuda = FakeCuda([4, 8])
    run = launch.make_launcher(
        FUNCTION, LaunchShape(32, 0), ["int32", "*"], [(2,), (0,)], 3,
        launch_ex=cuda, multiple=False,
    )  # fmt: skip
    run(1, 1, 1, 0, 0x1000, None, 5)
    assert cuda.calls[0][-1] == [struct.pack("<i", 5), struct.pack("<Q", 0x1000)]


def test_values_inside_tuples() -> None:
    cuda = FakeCuda([2, 8, 4])
    run = launch.make_launcher(
        FUNCTION, LaunchShape(32, 0), ["bf16", "*", "int32"], [(0, 1, 0), (0, 2), (1,)], 2,
        launch_ex=cuda, multiple=False,
    )  # fmt: skip
    run(1, 1, 1, 0, (None, (1.0,), 0x1000), 7)
    expected = [struct.pack("<H", 0x3F80), struct.pack("<Q", 0x1000), struct.pack("<i", 7)]
    assert cuda.calls[0][-1] == expected


def test_attributes_of_clusters_and_cooperation() -> None:
    cuda = FakeCuda([4])
    shape = LaunchShape(256, 0, clusters=2, cooperative=True, programmatic=True)
    run = launch.make_launcher(
        FUNCTION, shape, ["int32"], [(0,)], 1, launch_ex=cuda, multiple=False
    )
    run(4, 1, 1, 0, 9)
    assert cuda.attributes == [(4, 2, 1, 1), (2, 1, 0, 0), (6, 1, 0, 0)]
    assert cuda.calls[0][-1] == [struct.pack("<i", 9)]


def test_bfloat16_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng()
    values = [*rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30, 200), 0.0, -0.0, math.inf]
    for value in values:
        value = float(np.float32(value))
        expected = int(np.float32(value).astype(ml_dtypes.bfloat16).view(np.uint16))
        assert launch.bfloat16_bits(value) == expected, value
    assert launch.bfloat16_bits(math.nan) & 0x7FFF > 0x7F80


def test_threads_do_not_share_a_block() -> None:
    cuda = FakeCuda([8])
    cuda.inside = threading.Barrier(8)
    run = launch.make_launcher(
        FUNCTION, LaunchShape(32, 0), ["int64"], [(0,)], 1, launch_ex=cuda, multiple=False
    )
    threads = [threading.Thread(target=run, args=(1, 1, 1, i, i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(call[3] for call in cuda.calls) == list(range(8))
    assert all(call[-1] == [struct.pack("<q", call[3])] for call in cuda.calls)


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> driver._State:
    state = driver._State()
    monkeypatch.setattr(driver, "STATE", state)
    monkeypatch.setattr(driver, "_describe", lambda code: (f"CUDA_ERROR_{code}", "it failed"))
    return state


def test_a_sticky_error_is_raised_again(fresh_state: driver._State) -> None:
    run = launch.make_launcher(
        FUNCTION, LaunchShape(32, 0), [], [], 0, launch_ex=FakeCuda([], 700), multiple=False
    )
    with pytest.raises(driver.DeviceLostError, match="(?s)CUDA_ERROR_700.*out of bounds"):
        run(1, 1, 1, 0)
    with pytest.raises(driver.DeviceLostError, match=r"(?s)lost by an earlier error.*launches.*k"):
        driver.check_alive()


def test_other_errors_are_not_sticky(fresh_state: driver._State) -> None:
    run = launch.make_launcher(
        FUNCTION, LaunchShape(32, 0), [], [], 0, launch_ex=FakeCuda([], 701), multiple=False
    )
    with pytest.raises(driver.CudaError, match=r"launching 'k' with grid \(4, 1, 1\)") as caught:
        run(4, 1, 1, 0)
    assert not isinstance(caught.value, driver.DeviceLostError)
    driver.check_alive()


def test_no_driver_is_said_clearly() -> None:
    if driver.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(driver.CudaError, match="no usable CUDA driver"):
        driver.device_count()


def test_grids() -> None:
    assert normalize_grid(5, "k") == (5, 1, 1)
    assert normalize_grid((5,), "k") == (5, 1, 1)
    assert normalize_grid([1, 2, np.int64(3)], "k") == (1, 2, 3)
    assert normalize_grid((0, 4), "k") == (0, 4, 1)
    assert normalize_grid((2**31 - 1, 65535, 65535), "k") == (2**31 - 1, 65535, 65535)


@pytest.mark.parametrize(
    ("grid", "match"),
    [
        (None, "tuple of 1 to 3 ints.*NoneType"),
        ("abc", r"grid\[0\].*str"),
        ((), "1 to 3 sizes"),
        ((1, 2, 3, 4), "1 to 3 sizes"),
        ((1.5,), r"grid\[0\].*float 1.5; use // or"),
        ((True,), r"grid\[0\].*bool"),
        ((-1,), r"grid\[0\].*-1"),
        ((2**31,), r"grid\[0\].*2147483648.*2147483647"),
        ((1, 65536), r"grid\[1\].*65535"),
        ((1, 1, 65536), r"grid\[2\].*65535"),
        (7.0, "tuple of 1 to 3 ints.*float"),
    ],
)
def test_bad_grids(grid: Any, match: str) -> None:
    with pytest.raises(LaunchError, match=match):
        normalize_grid(grid, "k")
