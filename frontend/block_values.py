"""Tensor descriptors and block pointers: an array in memory, and the blocks it is cut into.

Both are names for a base pointer, a shape and strides; there is nothing of them in the tile IR.
MLIR-free: user programs import this through the language.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minitriton.frontend.values import Compound, Tensor
from minitriton.ir import dtypes

Number = int | Tensor  # known while compiling, or a scalar


@dataclass(frozen=True, slots=True, eq=False)
class Window(Compound):
    """What descriptors and block pointers share: the array, and the shape of a block of it."""

    base: Tensor
    shape: tuple[Number, ...]
    strides: tuple[Number, ...]
    block_shape: tuple[int, ...]

    steady = 3

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.block_shape)

    @property
    def element(self) -> dtypes.dtype:
        """Type of the array's elements."""
        found: dtypes.dtype = self.base.dtype.element_ty
        return found

    @property
    def block_type(self) -> dtypes.block_type:
        """Type of a block."""
        return dtypes.block_type(self.element, self.block_shape)


@dataclass(frozen=True, slots=True, eq=False)
class TensorDescriptor(Window):
    """An array whose blocks are loaded and stored by the indices of their first element."""

    padding: str = "zero"

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.base, self.shape, self.strides

    @property
    def fixed(self) -> Any:
        return self.block_shape, self.padding

    def with_parts(self, parts: Sequence[Any]) -> TensorDescriptor:
        base, shape, strides = parts
        return TensorDescriptor(base, shape, strides, self.block_shape, self.padding)

    def __str__(self) -> str:
        padding = "" if self.padding == "zero" else f", padding {self.padding}"
        return f"tensor descriptor {self.block_type}{padding}"


@dataclass(frozen=True, slots=True, eq=False)
class BlockPointer(Window):
    """One block of an array: `offsets` are the indices of its first element."""

    offsets: tuple[Number, ...]
    order: tuple[int, ...]

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.base, self.shape, self.strides, self.offsets

    @property
    def fixed(self) -> Any:
        return self.block_shape, self.order

    def with_parts(self, parts: Sequence[Any]) -> BlockPointer:
        base, shape, strides, offsets = parts
        return BlockPointer(base, shape, strides, self.block_shape, offsets, self.order)

    def __str__(self) -> str:
        return f"block pointer {self.block_type}"
