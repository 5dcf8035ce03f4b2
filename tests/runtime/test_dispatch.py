"""The generated dispatcher on tensors that claim to be on a GPU: what it launches without
`Kernel._general`, and that it agrees with `specialize` about every value.

Oracle: the thorough way's specialisation and values of the same call.
"""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import execute, options
from minitriton.ir.target import Target
from minitriton.jit import Kernel
from minitriton.runtime import launch
from minitriton.runtime.arguments import ArgumentError
from minitriton.runtime.module import Function
from minitriton.tools.tensor_descriptor import TensorDescriptor


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on GPU `where`; -1: on the CPU, as it is."""

    where = 0

    def get_device(self) -> int:
        return self.where

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.where) if self.where >= 0 else torch.device("cpu")


def on_gpu(where: int = 0, dtype: torch.dtype = torch.float32, skip: int = 0) -> OnGpu:
    """64 elements, `skip` elements past a multiple of 16 bytes."""
    raw = torch.zeros(1024, dtype=torch.uint8)
    start = -raw.data_ptr() % 16 + skip * dtype.itemsize
    found = raw[start : start + 64 * dtype.itemsize].view(dtype).as_subclass(OnGpu)
    found.where = where
    return found


def freed() -> OnGpu:
    """A tensor without the memory that its shape needs."""
    found = torch.zeros(4)
    found.untyped_storage().resize_(0)
    return found.as_subclass(OnGpu)


class Gpu:
    """Stands for the driver: keeps what was launched, and how often the thorough way was taken."""

    def __init__(self) -> None:
        self.packed: list[bytes] = []
        self.general = self.launchers = 0

    def launcher(self, compiled: Any, device: int, places: Any, count: int, *, sync: bool) -> Any:
        self.launchers += 1
        dtypes = compiled.parameter_dtypes()
        widths = [len(launch.to_bytes(dtype, 0)) for dtype in dtypes]

        def launch_ex(config: Any, function: Any, parameters: Any, extra: Any) -> int:
            addresses = (ctypes.c_void_p * max(len(widths), 1)).from_address(parameters.value)
            pairs = zip(addresses, widths, strict=False)
            self.packed = [ctypes.string_at(address, width) for address, width in pairs]
            return 0

        function = Function("k", device, 1, "module", 32, 0, 0, 1024)
        shape = launch.LaunchShape(32, 0)
        return launch.make_launcher(
            function, shape, dtypes, places, count, launch_ex=launch_ex, multiple=False
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    thorough, compile_ = Kernel._general, Kernel._compile

    def general(*args: Any) -> Any:
        made.general += 1
        return thorough(*args)

    def without_assembling(self: Kernel, *args: Any, cubin: bool) -> Any:
        return compile_(self, *args, cubin=False)

    monkeypatch.setattr(Kernel, "_general", general)
    monkeypatch.setattr(Kernel, "_compile", without_assembling)
    monkeypatch.setattr(execute, "launcher", made.launcher)
    monkeypatch.setattr(execute, "target_for", lambda device, settings: Target.parse("sm_90a"))
    return made


@pytest.fixture
def make(gpu: Gpu, pipeline: Any, fake_source: Any) -> Any:
    """A Kernel of a function, whose dispatcher takes OnGpu for torch.Tensor."""

    def kernel(function: Any, **settings: Any) -> Kernel:
        source = fake_source(function.__name__)
        made = Kernel(function, stages=pipeline.stages(), source=source, **settings)
        made._for.__globals__["_mt_Tensor"] = OnGpu
        return made

    return kernel


def packed_of(kernel: Kernel, *values: Any) -> tuple[str, list[bytes]]:
    """What a launch should be compiled for, and the bytes of its parameters."""
    call = kernel._specialize(values, {}, options.read())
    pairs = zip(call.spec.runtime_params(), call.leaves, strict=True)
    return call.spec.key_text(), [
        launch.to_bytes("*" if spec.kind == "pointer" else spec.dtype, leaf.value)
        for spec, (_, leaf) in pairs
    ]


class Pair(NamedTuple):
    left: Any
    right: Any


class Other(NamedTuple):
    left: Any
    right: Any


def plain(x, y, n):
    """Runtime parameters only."""


@triton.jit
def helper(x):
    return x + 1


X, Y = on_gpu(), on_gpu()
EMPTY = torch.zeros(0).as_subclass(OnGpu)
ITEMS: list[Any] = [
    5, 1, 48, 2**40, 2**40 + 1, 2**63, -3, 0.5, float("nan"), True, False, None, X,
    on_gpu(dtype=torch.bfloat16), on_gpu(skip=1), on_gpu(dtype=torch.int64),
    (), (X,), (X, Y), (X, Y, X), (X, on_gpu(skip=1)), (X, on_gpu(dtype=torch.float16)), (1,), (2,),
    (16,), (2**40,), (1.0,), (True,), (None,), (X, None), (None, X), (1, 2, 3), (16, 2, 1),
    ((X, Y),), ((X,), Y), (X, (Y,)), ((), X), (X, ()), Pair(X, 3), Pair(X, 1), Other(X, 3),
    Pair((X, 3), Other(None, 0.25)), torch.Size([3, 16, 1]),
    tl.constexpr(5), tl.constexpr(True), tl.constexpr(1), (tl.constexpr(5), X),
    (tl.constexpr(6), X), (tl.constexpr("a"), 7), (tl.float32, X), helper, (helper, X),
    EMPTY, (EMPTY,), (X, EMPTY, 3),
    TensorDescriptor(X, [4, 16], [16, 1], [2, 8]), TensorDescriptor(Y, [3, 12], [16, 1], [2, 8]),
    TensorDescriptor(X, [4, 14], [16, 1], [2, 8]), TensorDescriptor(X, [64], [1], [8]),
    TensorDescriptor(X, [4, 16], [16, 1], (2, 8), "nan"), TensorDescriptor(X, [64], [1], [16]),
    TensorDescriptor(on_gpu(dtype=torch.bfloat16), [64], [1], [16]),
    (TensorDescriptor(X, [2, 2, 16], [32, 16, 1], [1, 1, 4]), 5, X),
]  # fmt: skip


@pytest.mark.parametrize(
    "skipped", [{}, {"do_not_specialize": ["y"]}, {"do_not_specialize_on_alignment": ["y"]}]
)
def test_all_values_are_seen_as_specialize_sees_them(gpu: Gpu, make: Any, skipped: Any) -> None:
    """In any order, with each kind of value seen before or not: no stale code, no wrong bytes."""
    kernel = make(plain, **skipped)
    compiled: dict[str, Any] = {}
    calls = [*ITEMS, *ITEMS, *ITEMS]
    random.Random(7).shuffle(calls)
    symbols = 0
    for item in calls:
        key, packed = packed_of(kernel, X, item, 9)
        before = gpu.general
        found = kernel[(1,)](X, item, 9)
        assert found.spec.key_text() == key
        assert gpu.packed == packed, item
        assert compiled.setdefault(key, found) is found
        symbols += gpu.general - before
    assert symbols == 3  # (tl.float32, X): a dtype stands for an array


def test_constexprs_that_are_equal_are_told_apart(gpu: Gpu, make: Any) -> None:
    def chosen(x, C: "tl.constexpr"):
        pass

    kernel = make(chosen)
    values = [1, True, 1.0, "1", "True", 0, False, None, "None", "", (1,), (True,), tl.float32]
    compiled: dict[str, Any] = {}
    for value in [*values, *reversed(values)]:
        found = kernel[(1,)](X, value)
        assert compiled.setdefault(repr(value), found) is found
        seen = found.spec.param("C").value
        assert (type(seen), seen) == (type(value), value)
    assert len({id(found) for found in compiled.values()}) == len(values)
    assert gpu.general == 0


def test_a_kind_of_tuple_is_understood_once(gpu: Gpu, make: Any, monkeypatch: Any) -> None:
    kernel = make(plain)
    first = kernel[(1,)]((X, 5, Pair(Y, None)), Y, 3)
    assert gpu.launchers == 1
    monkeypatch.setattr(kernel, "_specialize", None)
    z = on_gpu()
    assert kernel[(2,)]((z, 7, Pair(X, None)), z, 4) is first
    pointers = [launch.to_bytes("*", t.data_ptr()) for t in (z, X, z)]
    numbers = [launch.to_bytes("int32", n) for n in (7, 4)]
    assert gpu.packed == [pointers[0], numbers[0], *pointers[1:], numbers[1]]
    assert (gpu.launchers, gpu.general) == (1, 0)


def test_memory_of_tensors_reaches_the_launcher(
    gpu: Gpu, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where maps want to know it: of plain tensors, in tuples and descriptors, on both ways."""
    seen: list[Any] = []
    monkeypatch.setattr(
        execute, "launcher", lambda *_, **__: lambda *args, memory=None: seen.append(memory)
    )
    monkeypatch.setattr(execute, "bounded", lambda maps: [0, 2, 4])
    kernel = make(plain)
    part = on_gpu()[16:]
    described = TensorDescriptor(Y, [64], [1], [16])
    calls = [(X, (3, part), (described, Y)), (part, (3, X), (described, Y))]
    for call in [*calls, calls[0]]:
        kernel[(1,)](*call)
    storage = [(t.untyped_storage().data_ptr(), 1024) for t in (X, part, Y)]
    expected = [tuple(storage), (storage[1], storage[0], storage[2])]
    assert seen == [*expected, expected[0]] and gpu.general == 0


def test_tensors_in_tuples_only(gpu: Gpu, make: Any) -> None:
    kernel = make(plain)
    kernel[(1,)]((1, (on_gpu(1),)), 2, 3)
    assert gpu.general == 0
    kernel[(1,)]((EMPTY,), EMPTY, 3)
    assert gpu.general == 0
    kernel[(0,)]((1, 2), 2, 3)  # no tensor says where: the emulator
    assert gpu.general == 1


def test_grid_functions_get_the_tuple(gpu: Gpu, make: Any) -> None:
    given = (X, Y)
    seen = []
    make(plain)[lambda meta: (len(seen) or seen.append(meta["x"]) or 1,)](given, Y, 3)
    assert seen[0] is given


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ((X, on_gpu(-1)), "'y.1' is on the CPU, but 'x' is on cuda:0"),
        ((X, torch.zeros(4)), "'y.1' is on the CPU, but 'x' is on cuda:0"),
        ((on_gpu(1), 3), "'y.0' is on cuda:1, but 'x' is on cuda:0"),
        (Pair(X, (on_gpu(1),)), "'y.right.0' is on cuda:1, but 'x' is on cuda:0"),
        ((X, "text"), "'y.1'.*str.*constexpr"),
        ((X, [1, 2]), "'y.1'.*list"),
        ((X, (2**70,)), "'y.1.0'.*64 bits"),
        ((tl.constexpr(object()), X), "'y.0'.*constexpr"),
        ([X], "'y'.*list"),
        (freed(), "'y'.*storage was freed"),
        ((X, freed()), "'y.1'.*storage was freed"),
    ],
)
def test_refusals_are_those_of_the_thorough_way(
    gpu: Gpu, make: Any, value: Any, match: str
) -> None:
    kernel = make(plain)
    kernel[(1,)](X, (X, 3), 9)
    with pytest.raises(ArgumentError, match="(?s)" + match):
        kernel[(1,)](X, value, 9)
    kernel[(1,)](X, (X, 4), 9)
    assert (gpu.general, gpu.launchers) == (1, 1)


def test_an_item_without_an_address(make: Any) -> None:
    kernel = make(plain)
    kernel._for.__globals__["_mt_Tensor"] = torch.Tensor
    with pytest.raises(ArgumentError, match="(?s)'y.0'.*to_dense"):
        kernel[(1,)](torch.zeros(4), (torch.zeros(4).to_sparse(),), 9)


def test_what_only_the_thorough_way_takes(gpu: Gpu, make: Any) -> None:
    kernel = make(plain)
    for item in ((np.int64(3), X), (X, triton.reinterpret(Y, tl.int32)), (X, 1e300)):
        key, packed = packed_of(kernel, X, item, 9)
        for _ in range(2):
            assert kernel[(1,)](X, item, 9).spec.key_text() == key
            assert gpu.packed == packed
    assert gpu.general == 6
    assert gpu.launchers == 4  # the thorough way keeps its launchers; (X, 1e300) was tried first


def test_annotations_hold_for_the_items(gpu: Gpu, make: Any) -> None:
    def narrow(x, y: "tl.int8"):
        pass

    kernel = make(narrow)
    kernel[(1,)](X, (3, 16))
    assert gpu.packed[1:] == [b"\3", b"\20"]
    with pytest.raises(ArgumentError, match="(?s)'y.1'.*208.*-128 to 127"):
        kernel[(1,)](X, (3, 208))


def test_a_changed_class_of_tuple_compiles_anew(gpu: Gpu, make: Any) -> None:
    """Same name and length, other fields: the fields' names are what the kernel sees."""
    kernel = make(plain)
    first = kernel[(1,)](X, Pair(X, 3), 9)
    renamed = namedtuple("Pair", ["head", "tail"])
    second = kernel[(1,)](X, renamed(X, 3), 9)
    assert first is not second
    assert [p.name for p in second.spec.param("y").value] == ["y.head", "y.tail"]
    assert gpu.general == 0


def test_changed_switches_are_read_again_on_request(
    gpu: Gpu, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, other = make(plain), make(plain)
    first, theirs = kernel[(1,)](X, Y, 3), other[(1,)](X, Y, 3)
    monkeypatch.setenv("MINITRITON_TMA", "0")
    assert kernel[(1,)](X, Y, 3) is first
    triton.reload_switches()
    second = kernel[(1,)](X, Y, 3)
    assert second is not first and other[(1,)](X, Y, 3) is not theirs
    assert kernel[(1,)](X, Y, 3) is second and gpu.launchers == 4
    monkeypatch.delenv("MINITRITON_TMA")
    triton.reload_switches()
    assert kernel[(1,)](X, Y, 3) is first  # kept
    assert gpu.general == 0


def test_reloading_keeps_no_kernel_alive(make: Any) -> None:
    kernel = weakref.ref(make(plain))
    gc.collect()
    triton.reload_switches()
    assert kernel() is None
