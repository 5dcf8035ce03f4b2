"""Tensor maps from a launch's arguments, and launchers that pass them."""

import ctypes
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from minitriton.ir.terms import evaluate
from minitriton.runtime import launch, tensor_maps
from minitriton.runtime.launch import LaunchShape, Maps
from minitriton.runtime.tensor_map import MAP_BYTES, TensorMap
from tests.runtime.test_launch import FUNCTION, FakeCuda

SPEC = {  # argument 0: base; 1: rows; 2: columns; 3: stride; the map begins two rows in
    "base": 0, "offset": [[2, [3]]], "strides": [[[1, [3]]]], "sizes": [[[1, [2]]], None],
    "box": [64, 32], "swizzle": 128, "element_bytes": 2, "element": "bf16", "non_negative": [1],
    "spans": False, "signed": False, "fill": "zero",
}  # fmt: skip


def test_maps_follow_the_arguments() -> None:
    found = tensor_maps.tensor_map(SPEC, [4096, 7, 100, 104])
    assert found == TensorMap(
        address=4096 + 2 * 104 * 2, element_bytes=2, dims=(100, tensor_maps.ENDLESS),
        strides=(208,), box=(64, 32), swizzle=128,
    )  # fmt: skip
    assert tensor_maps.needed([SPEC]) == [0, 1, 2, 3]
    assert tensor_maps.packed([SPEC], [4096, 7, 100, 104]) == [found.pack()]
    assert tensor_maps.packed([], [1, 2]) == []


@pytest.mark.parametrize(
    "values",
    [
        [4096, -1, 100, 104],  # an argument that must not be negative
        [4096, 7, 0, 104],  # no columns
        [4096, 7, 100, -104],  # rows that run backwards
        [4096, 7, 100, 1 << 40],
        [4104, 7, 100, 104],  # a base off its mark
        [4096, 7, 100, 102],  # a stride off its mark
    ],
)
def test_arguments_that_no_map_describes(values: list[int]) -> None:
    assert tensor_maps.tensor_map(SPEC, values) is None
    assert tensor_maps.packed([SPEC], values) is None


ROWS = SPEC | {"offset": [], "sizes": [[[1, [2]]], None], "non_negative": []}


@pytest.mark.parametrize(
    ("spans", "signed", "memory", "rows"),
    [
        (True, True, (4096, 7 * 208), 7),
        (True, False, (4000, 96 + 7 * 208 - 8), 7),  # the last row ends with its last column
        (True, False, (4096, 7 * 208 - 10), None),  # a part of a row, which might be read
        (True, False, (4096, 7 * 208 + 2), None),
        (True, False, (4100, 7 * 208), None),  # it begins after the address
        (True, False, (4096, 199), None),
        (False, True, (4096, 1 << 40), tensor_maps.ENDLESS),
        (False, True, (4088, 100), tensor_maps.ENDLESS),  # row -1 ends before
        (False, True, (4086, 100), None),  # it does not
        (False, True, None, None),  # no tensor
        (True, False, (4096, 208 << 31), tensor_maps.ENDLESS),
        (True, False, (4096, (208 << 31) + 208), None),
    ],
)
def test_maps_that_depend_on_memory(spans: bool, signed: bool, memory: Any, rows: int) -> None:
    """100 columns of 2 bytes, rows 208 bytes apart."""
    spec = ROWS | {"spans": spans, "signed": signed}
    found = tensor_maps.tensor_map(spec, [4096, 0, 100, 104], {0: memory})
    assert (found and found.dims) == (rows and (100, rows))
    assert tensor_maps.bounded([SPEC, spec]) == [0] and not tensor_maps.bounded([SPEC])


def test_launchers_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "_encode", lambda found, element: found.pack())
    monkeypatch.setattr(tensor_maps, "_with_address", readdress)
    cuda, plain = FakeCuda([8, 4, 4, 4, MAP_BYTES]), []
    spec = ROWS | {"spans": True, "signed": True}
    maps = Maps([spec], lambda: lambda *arguments: plain.append(arguments))
    run = launch.make_launcher(
        FUNCTION, LaunchShape(128, 0), ["*", "int32", "int32", "int32"], [(0,), (1,), (2,), (3,)],
        4, launch_ex=cuda, multiple=False, maps=maps,
    )  # fmt: skip
    calls = [(4096, (4096, 624)), (8192, (8192, 624)), (4096, (4096, 832)), (4096, (4096, 624))]
    for base, memory in calls:
        run(3, 1, 1, 0, base, 7, 100, 104, memory=(memory,))
    for memory in (None, (4096, 626), (3888, 832)):
        run(3, 1, 1, 0, 4096, 7, 100, 104, memory=(memory,))
    expected = [tensor_maps.packed([spec], [base, 7, 100, 104], {0: m})[0] for base, m in calls]
    assert [call[-1][-1] for call in cuda.calls] == expected
    assert [TensorMap.unpack(image).dims[1] for image in expected] == [3, 3, 4, 3]
    assert plain == [(3, 1, 1, 0, 4096, 7, 100, 104)] * 3
    run = launch.make_launcher(
        FUNCTION, LaunchShape(128, 0, clusters=2, resident=4), ["*"] + ["int32"] * 3,
        [(0,), (1,), (2,), (3,)], 4, launch_ex=cuda, multiple=False, maps=maps,
        alone=lambda: lambda *arguments: plain.append(arguments),
    )  # fmt: skip
    run(3, 1, 1, 0, 4096, 7, 100, 104, memory=((4096, 832),))  # its form without clusters has maps
    assert plain[3:] == [(3, 1, 1, 0, 4096, 7, 100, 104, ((4096, 832),))]


def test_what_is_outside_goes_into_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = tensor_maps.tensor_map({**SPEC, "fill": "nan"}, [4096, 7, 100, 104])
    zeros = tensor_maps.tensor_map(SPEC, [4096, 7, 100, 104])
    assert filled is not None and zeros is not None
    assert (filled.fill, zeros.fill) == ("nan", "zero")
    given = []

    class Names:
        """Enumerations whose members are their names, and a driver that keeps what it is given."""

        def __getattr__(self, name: str) -> Any:
            return name if name.startswith("CU_") or name[0].islower() else self

        def cuuint64_t(self, number: int) -> int:
            return number

        cuuint32_t = cuuint64_t

        def cuTensorMapEncodeTiled(self, *values: Any) -> Any:
            given.append(values)
            image = ctypes.create_string_buffer(MAP_BYTES)
            return SimpleNamespace(getPtr=lambda: ctypes.addressof(image), image=image)

    monkeypatch.setattr(tensor_maps.driver, "bindings", Names)
    monkeypatch.setattr(tensor_maps.driver, "check", lambda made, what: made)
    for found in (filled, zeros):
        assert len(tensor_maps._encode(found, "bf16")) == MAP_BYTES
    assert [values[0] for values in given] == ["CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"] * 2
    prefix = "CU_TENSOR_MAP_FLOAT_OOB_FILL_"
    assert [values[-1] for values in given] == [prefix + "NAN_REQUEST_ZERO_FMA", prefix + "NONE"]


def test_polynomials() -> None:
    assert evaluate([[3, []], [2, [0, 1]], [-1, [1, 1]]], [5, 7]) == 3 + 70 - 49
    assert evaluate([], [5]) == 0


def readdress(image: bytes, address: int) -> bytes:
    return dataclasses.replace(TensorMap.unpack(image), address=address).pack()


def test_maps_are_kept_and_get_new_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TensorMap] = []

    def encode(found: TensorMap, element: str) -> bytes:
        made.append(found)
        return found.pack()

    monkeypatch.setattr(tensor_maps, "_encode", encode)
    monkeypatch.setattr(tensor_maps, "_with_address", readdress)
    monkeypatch.setattr(tensor_maps, "CACHED", 2)
    maps = tensor_maps.encoder([SPEC], 4)
    first = maps(4096, 7, 100, 104)
    assert maps(4096, 7, 100, 104) is first and len(made) == 1
    assert maps(4096, 7, 0, 104) is None and maps(4104, 7, 100, 104) is None and len(made) == 1
    assert maps(0, 7, 100, 104) is None  # of an empty tensor
    other = maps(8192, 7, 100, 104)  # of the same shape
    assert [other] == tensor_maps.packed([SPEC], [8192, 7, 100, 104]) and len(made) == 1
    assert maps(8192, 7, 120, 104) != other and len(made) == 2
    assert maps(8192, 7, 100, 104) == other and len(made) == 2  # kept, as used last
    maps(8192, 7, 140, 104)  # others are dropped
    assert maps(4096, 7, 100, 104) == first and len(made) == 4


def test_launchers_pass_maps_after_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "_encode", lambda found, element: found.pack())
    monkeypatch.setattr(tensor_maps, "_with_address", readdress)
    cuda, plain = FakeCuda([8, 4, 4, 4, MAP_BYTES]), []
    maps = Maps([SPEC], lambda: lambda *arguments: plain.append(arguments))
    run = launch.make_launcher(
        FUNCTION, LaunchShape(128, 0), ["*", "int32", "int32", "int32"], [(0,), (1,), (3,), (2,)],
        4, launch_ex=cuda, multiple=False, maps=maps,
    )  # fmt: skip
    for base in (4096, 8192, 4096):
        run(3, 1, 1, 0, base, 7, 104, 100)
    expected = [tensor_maps.packed([SPEC], [base, 7, 100, 104])[0] for base in (4096, 8192, 4096)]
    assert [call[-1][-1] for call in cuda.calls] == expected
    run(3, 1, 1, 9, 4096, 7, -104, 100)
    run(3, 1, 1, 9, 4096, 7, -104, 100)
    assert plain == [(3, 1, 1, 9, 4096, 7, -104, 100)] * 2 and len(cuda.calls) == 3


def test_elements_have_types_of_the_driver():
    known = pytest.importorskip("cuda.bindings.driver").CUtensorMapDataType
    for element in ("f8E4M3FN", "f8E5M2", "f16", "bf16", "f32", "i8", "i16", "i32"):
        assert hasattr(known, f"CU_TENSOR_MAP_DATA_TYPE_{tensor_maps._TYPES[element]}")
