"""What a caller may pass to a kernel, seen without caring which library made it.

Torch tensors, NumPy arrays, `__cuda_array_interface__`, DLPack and plain numbers all become an
`Argument`; everything that would go wrong later is refused here, by the argument's name. Torch is
looked up only if the caller has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from minitriton.ir.diagnostics import MiniTritonError

HOST = -1  # `device` of memory that the CPU owns
DTYPES = {
    "bool": "int1", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5",
}  # fmt: skip
ITEM_BYTES = {
    "int1": 1,
    "int8": 1,
    "uint8": 1,
    "fp8e4nv": 1,
    "fp8e5": 1,
    "int16": 2,
    "uint16": 2,
    "fp16": 2,
    "bf16": 2,
    "int32": 4,
    "uint32": 4,
    "fp32": 4,
}  # fmt: skip  (others: 8)
_DTYPE_HELP = {
    "complex64": "pass torch.view_as_real(x) or x.view(np.float32)",
    "complex128": "pass torch.view_as_real(x) or x.view(np.float64)",
    "object": "convert it to a numeric dtype",
    "float8_e4m3fnuz": "only float8_e4m3fn and float8_e5m2 exist on NVIDIA GPUs",
    "float8_e5m2fnuz": "only float8_e4m3fn and float8_e5m2 exist on NVIDIA GPUs",
}


class ArgumentError(MiniTritonError, TypeError):
    """An argument cannot be passed to a kernel; the message names it and says what to do."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The whole host allocation that an array lives in."""

    address: int
    nbytes: int
    writable: bool


@dataclass(frozen=True, slots=True)
class Argument:
    """One value at a launch. `value` is an address for arrays, else the number itself."""

    kind: Literal["array", "int", "float", "bool", "none"]
    value: Any
    dtype: str = ""  # of an array's elements
    device: int = HOST
    pinned: bool = False  # host memory that GPUs can reach
    memory: Memory | None = None  # None for CUDA memory and empty arrays
    owner: Any = None  # keeps temporary views alive


class TensorWrapper:
    """A tensor seen as another dtype of the same width, as `triton.reinterpret` makes it."""

    def __init__(self, base: Any, dtype: Any) -> None:
        self.base, self.dtype = base, dtype

    def data_ptr(self) -> int:
        """Address of the first element."""
        return int(self.base.data_ptr())


def reinterpret(tensor: Any, dtype: Any) -> TensorWrapper:
    """`tensor` to be passed as another dtype (ours or torch's) of the same width."""
    base = tensor.base if isinstance(tensor, TensorWrapper) else tensor
    return TensorWrapper(base, dtype)


def classify(name: str, value: Any) -> Argument:
    """What `value`, passed for parameter `name`, is; ArgumentError if a kernel cannot take it."""
    if value is None:
        return Argument("none", None)
    if isinstance(value, bool):
        return Argument("bool", value)
    if isinstance(value, int):
        return Argument("int", _in_range(name, value))
    if isinstance(value, float):
        return Argument("float", float(value))
    if isinstance(value, TensorWrapper):
        return _reinterpreted(name, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return _torch_tensor(name, value, torch)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _numpy_array(name, value, numpy)
    if numpy is not None and isinstance(value, numpy.generic):
        return _numpy_scalar(name, value, numpy)
    if hasattr(type(value), "__cuda_array_interface__"):
        return _cuda_array(name, value)
    if hasattr(type(value), "__dlpack__"):
        return _dlpack(name, value)
    _refuse_other(name, value)


def refuse(name: str, got: str, fix: str) -> NoReturn:
    """Raise ArgumentError for parameter `name`."""
    raise ArgumentError(f"argument '{name}': got {got}\nhelp: {fix}")


def _refuse_other(name: str, value: Any) -> NoReturn:
    kind = type(value).__name__
    if isinstance(value, list):
        refuse(name, f"{kind} {value!r:.60}", "pass a torch tensor or a NumPy array of it")
    if isinstance(value, str | bytes | dict | set | type):
        refuse(name, f"{kind} {value!r:.60}", f"annotate the parameter: `{name}: tl.constexpr`")
    if isinstance(value, complex):
        refuse(name, f"complex {value!r}", "pass the real and the imaginary part as two floats")
    if hasattr(value, "__array_interface__") or hasattr(value, "__array__"):
        refuse(name, kind, "convert it with numpy.asarray first")
    refuse(name, kind, "pass a torch tensor, a NumPy array, an int, float, bool or None")


def _in_range(name: str, value: int) -> int:
    if not -(2**63) <= value < 2**64:
        raise ArgumentError(
            f"argument '{name}': {value} does not fit 64 bits\nhelp: pass it in two parts"
        )
    return int(value)


def dtype_name(name: str, library_name: str) -> str:
    """Our name of a torch or NumPy dtype such as "torch.float32"; ArgumentError if unsupported."""
    short = library_name.removeprefix("torch.")
    ours = DTYPES.get(short)
    if ours is None:
        fix = _DTYPE_HELP.get(short, f"convert it to one of: {', '.join(DTYPES)}")
        refuse(name, f"an array of dtype {short}", fix)
    return ours


def memory_of(value: Any) -> tuple[int, int] | None:
    """(address, bytes) of the storage that a torch tensor lies in; None for anything else."""
    if isinstance(value, TensorWrapper):
        value = value.base
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _reinterpreted(name: str, value: TensorWrapper) -> Argument:
    base = classify(name, value.base)
    dtype = str(getattr(value.dtype, "name", ""))
    if dtype not in DTYPES.values():
        dtype = dtype_name(name, str(value.dtype))
    if ITEM_BYTES.get(dtype, 8) != ITEM_BYTES.get(base.dtype, 8):
        refuse(name, f"{base.dtype} reinterpreted as {dtype}", "both must have the same width")
    return Argument("array", base.value, dtype, base.device, base.pinned, base.memory, base.owner)


def _torch_tensor(name: str, tensor: Any, torch: Any) -> Argument:
    kind = tensor.device.type
    if kind == "meta" or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        what = "a meta tensor" if kind == "meta" else f"a {type(tensor).__name__}"
        refuse(name, f"{what}, which has no data", "pass a tensor on a GPU or the CPU")
    if tensor.layout is not torch.strided:
        refuse(name, f"a {tensor.layout} tensor", "pass x.to_dense(), or its values and indices")
    if tensor.is_conj() or tensor.is_neg():
        fix = "pass x.resolve_conj().resolve_neg()"
        refuse(name, "a lazily conjugated or negated tensor", fix)
    dtype = dtype_name(name, str(tensor.dtype))
    if kind not in ("cuda", "cpu"):
        refuse(name, f"a tensor on {tensor.device}", "pass a tensor on a CUDA GPU or the CPU")
    try:
        address = int(tensor.data_ptr())
        storage = tensor.untyped_storage()
        base, nbytes = int(storage.data_ptr()), int(storage.nbytes())
    except RuntimeError as error:
        refuse(name, f"a {type(tensor).__name__} without storage ({error})", "pass a plain tensor")
    item = tensor.element_size()
    end = address + _extent(tensor.shape, [s * item for s in tensor.stride()], item)[1]
    if tensor.numel() and (address == 0 or end > base + nbytes):
        refuse(
            name, "a tensor whose storage was freed or shrunk", "pass a tensor that owns its data"
        )
    if kind == "cuda":
        return Argument("array", address, dtype, tensor.device.index, owner=tensor)
    pinned = bool(torch.cuda.is_available() and tensor.is_pinned())
    memory = Memory(base, nbytes, True) if nbytes else None
    return Argument("array", address, dtype, HOST, pinned, memory, tensor)


def _numpy_array(name: str, array: Any, numpy: Any) -> Argument:
    if isinstance(array, numpy.ma.MaskedArray):
        refuse(name, "a masked array", "pass its .data and its .mask")
    if not array.dtype.isnative:
        fix = f"pass {name}.astype({name}.dtype.newbyteorder('='))"
        refuse(name, f"an array of foreign byte order ({array.dtype.str})", fix)
    dtype = dtype_name(name, array.dtype.name)
    address = int(array.__array_interface__["data"][0])
    root = array
    while isinstance(root.base, numpy.ndarray):
        root = root.base
    start = int(root.__array_interface__["data"][0])
    low, high = _extent(root.shape, root.strides, root.itemsize)
    writable = bool(array.flags.writeable)
    memory = Memory(start + low, high - low, writable) if array.size else None
    return Argument("array", address, dtype, HOST, False, memory, array)


def _numpy_scalar(name: str, value: Any, numpy: Any) -> Argument:
    if isinstance(value, numpy.bool_):
        return Argument("bool", bool(value))
    if isinstance(value, numpy.integer):
        return Argument("int", int(value))
    if isinstance(value, numpy.floating) or value.dtype.name in DTYPES:
        return Argument("float", float(value))
    refuse(name, f"a NumPy {type(value).__name__}", "pass an int, a float or a bool")


def _extent(shape: Sequence[int], strides: Sequence[int], item: int) -> tuple[int, int]:
    """Byte offsets (lowest, past the highest) from the first element; strides are in bytes."""
    if 0 in shape:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + item


_TYPESTR = {
    "b": {1: "bool"}, "i": {n: f"int{8 * n}" for n in (1, 2, 4, 8)},
    "u": {n: f"uint{8 * n}" for n in (1, 2, 4, 8)}, "f": {2: "float16", 4: "float32", 8: "float64"},
    "c": {8: "complex64", 16: "complex128"},
}  # fmt: skip


def _cuda_array(name: str, value: Any) -> Argument:
    from minitriton.runtime import driver

    interface = value.__cuda_array_interface__
    order, code, size = interface["typestr"][0], interface["typestr"][1], interface["typestr"][2:]
    if order == (">" if sys.byteorder == "little" else "<"):
        refuse(name, f"an array of foreign byte order ({interface['typestr']})", "convert it first")
    dtype = dtype_name(name, _TYPESTR.get(code, {}).get(int(size), interface["typestr"]))
    address = int(interface["data"][0] or 0)
    if interface.get("mask") is not None:
        refuse(name, "a masked array", "pass the data and the mask as two arrays")
    if 0 not in interface["shape"] and address == 0:
        refuse(name, "an array without memory", "pass an array that owns its data")
    return Argument("array", address, dtype, driver.device_of(address), owner=value)


def _dlpack(name: str, value: Any) -> Argument:
    from minitriton.runtime import dlpack

    view = dlpack.view(value)
    if view.lanes != 1:
        refuse(name, f"an array of {view.lanes}-lane vectors", "view it as an array of scalars")
    dtype = dtype_name(name, view.dtype)
    empty = 0 in view.shape
    if not empty and view.address == 0:
        refuse(name, "an array without memory", "pass an array that owns its data")
    if view.device_type in dlpack.CUDA:
        return Argument("array", view.address, dtype, view.device, owner=view.capsule)
    if view.device_type not in dlpack.CPU:
        got = f"an array on DLPack device type {view.device_type}"
        refuse(name, got, "pass an array on a CUDA GPU or the CPU")
    item = ITEM_BYTES.get(dtype, 8)
    low, high = _extent(view.shape, [s * item for s in view.strides], item)
    memory = None if empty else Memory(view.address + low, high - low, view.writable)
    return Argument("array", view.address, dtype, HOST, False, memory, view.capsule)
