"""Launches of persistent kernels: as many CTAs as there is room for, and the grid's sizes."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from minitriton import execute
from minitriton.runtime import driver, launch, module, tensor_maps
from minitriton.runtime.launch import LaunchShape, Maps
from minitriton.runtime.tensor_map import MAP_BYTES
from tests.runtime.test_launch import FUNCTION, FakeCuda

#: A vector of `n` elements of an array.
SPEC = {"base": 0, "offset": [], "strides": [], "sizes": [[[1, [1]]]], "box": [64], "swizzle": 0,
        "element_bytes": 2, "element": "f16", "non_negative": [],
        "spans": False, "signed": False, "fill": "zero"}  # fmt: skip


def make(
    resident: int, monkeypatch: pytest.MonkeyPatch, clusters: int = 1
) -> tuple[Any, FakeCuda, list[Any]]:
    """A launcher of a kernel with an array, a number and a tensor map; what reached the driver, and
    the launches that went to another form: of one without clusters "alone" is the first."""
    monkeypatch.setattr(tensor_maps, "_encode", lambda found, element: found.pack())
    monkeypatch.setattr(tensor_maps, "_with_address", lambda image, address: image)
    sizes = [4, 4, 4] if resident else []
    cuda, plain = FakeCuda([8, 4, *sizes, MAP_BYTES]), []
    maps = Maps([SPEC], lambda: lambda *arguments: plain.append(arguments))
    shape = LaunchShape(384, 4096, clusters=clusters, resident=resident)
    run = launch.make_launcher(
        FUNCTION, shape, ["*", "int32"], [(0,), (1,)], 2, launch_ex=cuda, multiple=False, maps=maps,
        alone=lambda: lambda *arguments: plain.append(("alone", *arguments)),
    )  # fmt: skip
    return run, cuda, plain


@pytest.mark.parametrize(
    ("grid", "ctas"),
    [
        ((1, 1, 1), 1),
        ((7, 3, 2), 42),
        ((132, 1, 1), 132),
        ((133, 1, 1), 132),
        ((2, 1, 500), 132),
        ((2**20, 2**10, 1), 132),
    ],
)
def test_ctas_and_sizes(
    grid: tuple[int, int, int], ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cuda, plain = make(132, monkeypatch)
    for _ in range(2):  # the second time the block is reused
        run(*grid, 9, 4096, 100)
    (map_,) = [tensor_maps.packed([SPEC], [4096, 100])[0]]
    values = [struct.pack("<Q", 4096), *(struct.pack("<i", size) for size in (100, *grid)), map_]
    assert cuda.calls == [((ctas, 1, 1), (384, 1, 1), 4096, 9, values)] * 2 and not plain


def test_other_kernels_get_their_grid_and_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    run, cuda, _ = make(0, monkeypatch)
    run(700, 3, 2, 0, 4096, 100)
    (call,) = cuda.calls
    assert call[0] == (700, 3, 2) and len(call[-1]) == 3


def test_more_programs_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They, and one more step past the last, must not wrap round."""
    run, cuda, plain = make(132, monkeypatch)
    assert 2**30 < launch.MAX_PROGRAMS <= 2**31 - 1 - 2**15
    run(launch.MAX_PROGRAMS, 1, 1, 0, 4096, 100)
    assert len(cuda.calls) == 1 and not plain
    for grid in ((launch.MAX_PROGRAMS + 1, 1, 1), (65535, 65535, 1), (2**31 - 1, 1, 1)):
        run(*grid, 0, 4096, 100)
        assert plain[-1] == (*grid, 0, 4096, 100)
    assert len(cuda.calls) == 1 and len(plain) == 3


def test_maps_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    run, cuda, plain = make(132, monkeypatch)
    run(5, 1, 1, 0, 4096, 0)
    assert plain == [(5, 1, 1, 0, 4096, 0)] and not cuda.calls


@pytest.mark.parametrize(("each", "expected"), [(1, 132), (2, 264), (0, 132)])
def test_how_many_ctas_a_gpu_holds(
    each: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def occupancy(*arguments: Any) -> int:
        asked.append(arguments)
        return each

    cuda = SimpleNamespace(cuOccupancyMaxActiveBlocksPerMultiprocessor=occupancy)
    monkeypatch.setattr(driver, "bindings", lambda: cuda)
    monkeypatch.setattr(driver, "check", lambda result, *_: result)
    monkeypatch.setattr(driver, "properties", lambda _: SimpleNamespace(multiprocessors=132))
    assert module.resident_ctas(FUNCTION, 384, 180_000) == expected
    assert asked == [(FUNCTION.handle, 384, 180_000)]


@pytest.mark.parametrize(
    ("grid", "ctas"),
    [((2, 1, 1), 2), ((3, 2, 1), 6), ((1, 4, 1), 4), ((131, 2, 1), 130), ((500, 1, 1), 130)],
)
def test_clusters_of_an_even_number_of_programs(
    grid: tuple[int, int, int], ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cuda, plain = make(130, monkeypatch, clusters=2)
    run(*grid, 9, 4096, 100)
    (call,) = cuda.calls
    assert call[0] == (ctas, 1, 1) and not plain
    assert call[-1][2:5] == [struct.pack("<i", size) for size in grid]


@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 1, 1), (131, 3, 1), (5, 7, 9)])
def test_programs_that_come_in_no_pairs(
    grid: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, cuda, plain = make(130, monkeypatch, clusters=2)
    run(*grid, 9, 4096, 100)
    assert plain == [("alone", *grid, 9, 4096, 100)] and not cuda.calls
    run(*grid, 9, 4096, 0)  # no tensor map fits: without TMA there are no clusters, either
    assert plain[1:] == [(*grid, 9, 4096, 0)] and not cuda.calls


@pytest.mark.parametrize("found", [66, 0])
def test_how_many_clusters_a_gpu_holds(found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    asked = []

    def occupancy(handle: Any, config: Any) -> int:
        (attribute,) = config.attrs
        size = attribute.value.clusterDim
        asked.append((config.gridDimX, config.blockDimX, config.sharedMemBytes, config.numAttrs))
        asked.append((attribute.id, size.x, size.y, size.z))
        return found

    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
    known = {name: getattr(cuda, name) for name in names}
    fake = SimpleNamespace(cuOccupancyMaxActiveClusters=occupancy, **known)
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(driver, "check", lambda result, *_: result)
    assert module.resident_ctas(FUNCTION, 384, 180_000, 2) == 2 * found
    id_ = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    assert asked == [(2, 384, 180_000, 1), (id_, 2, 1, 1)]


def test_a_gpu_without_room_for_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the form without them."""

    def kernel(clusters: int, **further: Any) -> Any:
        return SimpleNamespace(
            check_resources=lambda: None, shape=LaunchShape(384, 4096, clusters=clusters),
            functions={0: FUNCTION}, persistent=True, tensor_maps=[],
            parameter_dtypes=lambda: ["*"], **further,
        )  # fmt: skip

    cuda = FakeCuda([8, 4, 4, 4])
    single = kernel(1)
    monkeypatch.setattr(driver, "launch_function", lambda: cuda)
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(module, "resident_ctas", lambda f, t, s, clusters: 132 * (2 - clusters))
    pair = kernel(2, without_clusters=lambda: single)
    execute.launcher(pair, 0, [(0,)], 1, sync=False)(200, 1, 1, 0, 4096)
    assert [call[0] for call in cuda.calls] == [(132, 1, 1)]
