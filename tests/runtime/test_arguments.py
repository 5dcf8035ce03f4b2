"""What may be passed to a kernel, and the message for everything that may not."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from minitriton.runtime import dlpack
from minitriton.runtime.arguments import HOST, ArgumentError, classify, reinterpret


@pytest.mark.parametrize("name", ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16",
                                  "float16", "float32", "float64"])  # fmt: skip
def test_numpy_and_torch_agree(name: str) -> None:
    ours = {"bool": "int1", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    array = np.zeros(5, name)
    from_numpy, from_torch = classify("x", array), classify("x", torch.from_numpy(array))
    assert from_numpy.dtype == from_torch.dtype == ours.get(name, name)
    assert from_numpy.value == from_torch.value == array.ctypes.data
    assert from_numpy.memory.nbytes == from_torch.memory.nbytes == array.nbytes


def test_narrow_floats() -> None:
    assert classify("x", torch.zeros(3, dtype=torch.bfloat16)).dtype == "bf16"
    assert classify("x", torch.zeros(3, dtype=torch.float8_e4m3fn)).dtype == "fp8e4nv"
    assert classify("x", np.zeros(3, ml_dtypes.bfloat16)).dtype == "bf16"
    assert classify("x", np.zeros(3, ml_dtypes.float8_e5m2)).dtype == "fp8e5"


def test_views_know_their_whole_allocation() -> None:
    base = np.zeros((10, 7), np.float32)
    for view in (base[3:5, ::2], base[::-1], base.T[2:]):
        found = classify("x", view)
        assert found.value == view.__array_interface__["data"][0]
        assert (found.memory.address, found.memory.nbytes) == (base.ctypes.data, base.nbytes)
    tensor = torch.zeros(100)
    found = classify("x", tensor[10:20])
    assert (found.value - found.memory.address, found.memory.nbytes) == (40, 400)


def test_read_only_arrays() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert not classify("x", array).memory.writable
    assert classify("x", np.zeros(3)).memory.writable


def test_numbers() -> None:
    assert classify("n", 5).kind == "int"
    assert classify("n", np.int64(5)).value == 5
    assert type(classify("n", np.float32(0.5)).value) is float
    assert classify("n", True).kind == classify("n", np.bool_(True)).kind == "bool"
    assert classify("n", None).kind == "none"
    assert classify("n", ml_dtypes.bfloat16(1.5)).value == 1.5


def test_empty_and_zero_dimensional() -> None:
    assert classify("x", torch.empty(0)).memory is None
    assert classify("x", np.empty((0, 4))).memory is None
    assert classify("x", torch.tensor(3.0)).memory.nbytes == 4
    assert classify("x", torch.zeros(3, requires_grad=True)).kind == "array"


class Exporter:
    """Only DLPack, as another library would offer it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)


class OldExporter(Exporter):
    def __dlpack__(self) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


@pytest.mark.parametrize("make", [Exporter, OldExporter])
def test_dlpack(make: type[Exporter]) -> None:
    array = np.arange(24, dtype=np.int16).reshape(4, 6)[1:, ::2]
    found = classify("x", make(array))
    assert (found.dtype, found.device, found.value) == ("int16", HOST, array.ctypes.data)
    assert found.memory.nbytes == 2 * (2 * 6 + 2 * 2 + 1)
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    assert classify("x", make(tensor)).dtype == "bf16"


def test_dlpack_on_a_gpu_is_read_without_torch() -> None:
    """A hand-made capsule that says CUDA device 3."""
    tensor = dlpack._Tensor(0x1000, 2, 3, 1, 2, 32, 1, (ctypes.c_int64 * 1)(8), None, 16)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )

    class OnGPU:
        def __dlpack__(self) -> Any:
            return new(ctypes.addressof(tensor), b"dltensor", None)

    found = classify("x", OnGPU())
    assert (found.device, found.value, found.dtype) == (3, 0x1010, "fp32")


def test_cuda_array_interface_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    from minitriton.runtime import driver

    monkeypatch.setattr(driver, "device_of", lambda address: 2)

    class CuPyLike:
        __cuda_array_interface__ = {"shape": (4,), "typestr": "<f2", "data": (4096, False)}

    found = classify("x", CuPyLike())
    assert (found.device, found.value, found.dtype) == (2, 4096, "fp16")


def shrunk() -> torch.Tensor:
    tensor = torch.zeros(10)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(3)


class Masked:
    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (64, False), "mask": 1}


class Foreign:
    __cuda_array_interface__ = {"shape": (4,), "typestr": ">f4", "data": (64, False)}


MISUSE = {
    "meta": (lambda: torch.zeros(3, device="meta"), "meta tensor", "GPU or the CPU"),
    "fake": (fake, "FakeTensor|meta", "GPU or the CPU"),
    "freed": (shrunk, "freed", "owns its data"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse", "to_dense"),
    "conjugate": (lambda: torch.zeros(3, dtype=torch.cfloat).conj(), "conjugated", "resolve_conj"),
    "negative": (lambda: torch._neg_view(torch.ones(3)), "negated", "resolve_neg"),
    "complex tensor": (lambda: torch.zeros(3, dtype=torch.cfloat), "complex64", "view_as_real"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8), "qint8", ""),
    "byte order": (lambda: np.zeros(3, ">f4"), "byte order", "newbyteorder"),
    "complex array": (lambda: np.zeros(3, complex), "complex128", "view"),
    "objects": (lambda: np.array([None, "a"]), "object", "numeric"),
    "strings": (lambda: np.array(["ab"]), "str", "convert"),
    "dates": (lambda: np.zeros(3, "M8[s]"), "datetime64", "convert"),
    "records": (lambda: np.zeros(3, "i4,f4"), "void", "convert"),
    "long double": (lambda: np.zeros(3, np.longdouble), "float128|longdouble", "convert"),
    "masked": (lambda: np.ma.zeros(3), "masked", "mask"),
    "fnuz": (lambda: torch.zeros(2, dtype=torch.float8_e4m3fnuz), "fnuz", "float8_e4m3fn"),
    "string": (lambda: "relu", "str 'relu'", "tl.constexpr"),
    "list": (lambda: [1, 2], "list", "NumPy array"),
    "dict": (lambda: {}, "dict", "tl.constexpr"),
    "type": (lambda: int, "type", "tl.constexpr"),
    "complex": (lambda: 1j, "complex", "two floats"),
    "object": (object, "object", "torch tensor"),
    "function": (lambda: shrunk, "function", "torch tensor"),
    "too large": (lambda: 2**64, "64 bits", "two parts"),
    "too small": (lambda: -(2**63) - 1, "64 bits", "two parts"),
    "numpy date": (lambda: np.datetime64(0, "s"), "datetime64", "int"),
    "masked cuda": (Masked, "masked", "mask"),
    "foreign cuda": (Foreign, "byte order", ""),
    "widths": (lambda: reinterpret(torch.zeros(3), torch.int8), "same width|as int8", "width"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_names_argument_got_and_fix(case: str) -> None:
    make, got, fix = MISUSE[case]
    with pytest.raises(ArgumentError, match=got) as caught:
        classify("weights", make())
    message = str(caught.value)
    assert "argument 'weights'" in message
    assert "help: " in message
    assert fix in message


def test_reinterpret() -> None:
    found = classify("x", reinterpret(torch.zeros(3, dtype=torch.int8), torch.float8_e5m2))
    assert found.dtype == "fp8e5"
