"""`TensorDescriptor`: an array and the blocks it is read in, as one argument of a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minitriton.frontend.signature import Blocks, ParamSpec
from minitriton.ir.linear_layout import SIZE_STEP, is_tile_size
from minitriton.runtime.arguments import ITEM_BYTES, Argument, classify, refuse

ALIGNMENT = 16  # bytes: of the base, of all strides but the last, and of a block's rows at least
MAX_RANK, MAX_ELEMENTS, MAX_SIZE = 5, 1 << 20, 2**31 - 1
_WITHOUT_DATA = ("FakeTensor", "FunctionalTensor")


@dataclass
class TensorDescriptor:
    """An array of 1 to 5 dimensions, and the shape of the blocks in which a kernel accesses it.

    base: a tensor or array, aligned to 16 bytes; shape: sizes below 2^31; strides: in elements,
    multiples of 16 bytes but for the last, which is 1; block_shape: of a tile; padding: what
    lies outside the array reads as, "zero" or "nan". The fields may be changed between launches
    (a `pre_hook` of `autotune` sets `block_shape`, for one); each launch checks them again.
    ArgumentError names the field, or the kernel's parameter. A kernel is compiled anew for another
    element type, `block_shape` or `padding`, not for another shape.
    """

    base: Any
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    padding: str = "zero"

    def __post_init__(self) -> None:
        _check_fields("", self)
        if type(self.base).__name__ not in _WITHOUT_DATA:
            base = classify("base", self.base)
            _check_array("", self, base)

    @staticmethod
    def from_tensor(
        tensor: Any, block_shape: Sequence[int], padding: str = "zero"
    ) -> TensorDescriptor:
        """The descriptor of a whole torch tensor."""
        return TensorDescriptor(tensor, tensor.shape, tensor.stride(), block_shape, padding)


def understand(name: str, value: TensorDescriptor) -> tuple[ParamSpec, list[tuple[str, Argument]]]:
    """What a launch makes of a descriptor passed for `name`: its ParamSpec and runtime parts."""
    _check_fields(name, value)
    base = classify(f"{name}.base", value.base)
    _check_array(name, value, base)
    item = ITEM_BYTES.get(base.dtype, 8)
    if value.block_shape[-1] * item < ALIGNMENT:
        count = value.block_shape[-1] * item
        what = f"blocks whose last dimension has {count} bytes"
        refuse(f"{name}.block_shape", what, f"at least {ALIGNMENT} are needed")
    rank, unit = len(value.shape), max(1, ALIGNMENT // item)
    aligned = value.shape[-1] * item % ALIGNMENT == 0
    parts, arguments = [ParamSpec(f"{name}.base", "pointer", base.dtype, divisible=True)], [base]
    for label, numbers, dtype in (
        ("shape", value.shape, "int32"),
        ("strides", value.strides[:-1], "int64"),
    ):
        for index, number in enumerate(numbers):
            known = unit if label == "strides" or (aligned and index == rank - 1) else 1
            parts.append(ParamSpec(f"{name}.{label}.{index}", "scalar", dtype, multiple=known))
            arguments.append(Argument("int", int(number)))
    blocks = Blocks(tuple(map(int, value.block_shape)), value.padding, tuple(parts), aligned)
    leaves = [(part.name, argument) for part, argument in zip(parts, arguments, strict=True)]
    return ParamSpec(name, "descriptor", base.dtype, blocks), leaves


def quick(
    value: TensorDescriptor, device: int | None, tensor_types: tuple[type, ...]
) -> tuple[Any, list[int], int] | None:
    """(key, values, device) of a descriptor of a torch tensor on `device`, or on any if it is None.

    None where the thorough way, `understand`, must look. The values are those of its parts.
    """
    base, shape, strides, block_shape = value.base, value.shape, value.strides, value.block_shape
    if type(base) not in tensor_types:
        return None
    where = base.get_device()
    address = base.data_ptr()
    item = base.element_size()
    good = (
        (where == device or device is None)
        and address
        and not address % ALIGNMENT
        and strides[-1] == 1
    )
    if not good or not len(shape) == len(strides) == len(block_shape):
        return None
    for size in shape:
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            return None
    outer = strides[:-1]
    for stride in outer:
        if type(stride) is not int or stride * item % ALIGNMENT:
            return None
    aligned = shape[-1] * item % ALIGNMENT == 0
    key = (TensorDescriptor, base.dtype, tuple(block_shape), value.padding, aligned)
    return key, [address, *shape, *outer], where


def _check_fields(name: str, value: TensorDescriptor) -> None:
    """ArgumentError for what can be seen without the array; `name` is the kernel's parameter."""
    prefix = f"{name}." if name else ""
    rank = len(value.shape)
    if not 1 <= rank <= MAX_RANK:
        refuse(f"{prefix}shape", f"{rank} dimensions", f"a descriptor has 1 to {MAX_RANK}")
    for label in ("strides", "block_shape"):
        count = len(getattr(value, label))
        if count != rank:
            refuse(f"{prefix}{label}", f"{count} numbers", f"the shape has {rank}")
    for label in ("shape", "strides", "block_shape"):
        for number in getattr(value, label):
            if isinstance(number, bool) or not hasattr(number, "__index__"):
                refuse(f"{prefix}{label}", repr(number), "pass ints")
    if any(not 0 <= size <= MAX_SIZE for size in value.shape):
        refuse(f"{prefix}shape", f"{list(value.shape)}", "sizes must be within 0 and 2^31 - 1")
    blocks = list(value.block_shape)
    if not all(map(is_tile_size, blocks)):
        fix = f"its numbers must be powers of two or multiples of {SIZE_STEP}"
        refuse(f"{prefix}block_shape", f"{blocks}", fix)
    if math.prod(blocks) > MAX_ELEMENTS:
        refuse(f"{prefix}block_shape", f"{blocks}", f"a block has at most {MAX_ELEMENTS} elements")
    if value.strides[-1] != 1:
        fix = "the last must be 1: pass a contiguous tensor, or permute the dimensions"
        refuse(f"{prefix}strides", f"{list(value.strides)}", fix)
    if value.padding not in ("zero", "nan"):
        refuse(f"{prefix}padding", f"{value.padding!r}", "it must be 'zero' or 'nan'")


def _check_array(name: str, value: TensorDescriptor, base: Argument) -> None:
    """ArgumentError for an array that does not fit the other fields."""
    prefix = f"{name}." if name else ""
    if base.kind != "array":
        refuse(f"{prefix}base", f"{base.kind} {base.value!r}", "pass a tensor or an array")
    if base.value % ALIGNMENT:
        fix = f"it must be aligned to {ALIGNMENT} bytes: clone the view"
        refuse(f"{prefix}base", f"an array at address {base.value:#x}", fix)
    item = ITEM_BYTES.get(base.dtype, 8)
    for stride in value.strides[:-1]:
        if stride * item % ALIGNMENT:
            got = f"{list(value.strides)} of {base.dtype}, {item} bytes each"
            fix = f"all but the last must be multiples of {ALIGNMENT} bytes: pad the rows"
            refuse(f"{prefix}strides", got, fix)
    if value.padding == "nan" and not base.dtype.startswith(("fp", "bf")):
        refuse(f"{prefix}padding", f"'nan' for {base.dtype}", "NaN is for floats")
