"""Reading a DLPack capsule without the library that made it (C structs of DLPack 1.x and 0.x)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

CPU = frozenset({1, 3})  # kDLCPU, kDLCUDAHost
CUDA = frozenset({2, 13})  # kDLCUDA, kDLCUDAManaged
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_NAMED = {6: "bool", 10: "float8_e4m3fn", 12: "float8_e5m2"}
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True, slots=True)
class View:
    """What a capsule says. Strides count elements; `capsule` owns the memory."""

    address: int
    device_type: int
    device: int
    dtype: str
    lanes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    writable: bool
    capsule: Any


def view(value: Any) -> View:
    """The memory behind an object that has `__dlpack__`; no copy is made."""
    try:
        capsule = value.__dlpack__(max_version=(1, 0), copy=False)
    except TypeError:  # an exporter older than DLPack 1.0 knows no keywords
        capsule = value.__dlpack__()
    versioned = _is_valid(capsule, b"dltensor_versioned")
    address = _pointer(capsule, b"dltensor_versioned" if versioned else b"dltensor")
    if versioned:
        head = _Versioned.from_address(address)
        tensor, writable = head.tensor, not head.flags & _READ_ONLY
    else:
        tensor, writable = _Tensor.from_address(address), True
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] for i in range(tensor.ndim))
    else:
        strides = _compact(shape)
    dtype = _NAMED.get(tensor.code) or f"{_CODES.get(tensor.code, 'code')}{tensor.bits}"
    return View(
        address=(tensor.data or 0) + tensor.byte_offset,
        device_type=tensor.device_type,
        device=tensor.device_id,
        dtype=dtype,
        lanes=tensor.lanes,
        shape=shape,
        strides=strides,
        writable=writable,
        capsule=capsule,
    )


def _compact(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _is_valid(capsule: Any, name: bytes) -> bool:
    function = ctypes.pythonapi.PyCapsule_IsValid
    function.restype, function.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    return bool(function(capsule, name))


def _pointer(capsule: Any, name: bytes) -> int:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.restype, function.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(function(capsule, name))
