"""The `mt` dialect's types and the base every op family builds on.

Values are builtin tensors whose encoding is a layout (see `encoding.py`), scalars, pointers
`!mt.ptr<T>`, tensors of pointers, and `!mt.mem<tensor<...>>`: a buffer in shared memory.
"""

from collections.abc import Callable
from typing import Any

from minitriton.ir.mlir import ext, ir


class MT(ext.Dialect, name="mt"):
    """The tile dialect."""


class PtrType(MT.Type, name="ptr"):
    """Pointer to an element in global memory; fp8 and pointee signs are kept by the frontend."""

    element: Any

    @property
    def pointee(self) -> ir.Type:
        return ir.TypeAttr(self.element).value


class MemType(MT.Type, name="mem"):
    """A shared-memory buffer; shape, element type and shared layout are the tensor type's."""

    tensor: Any

    @property
    def tensor_type(self) -> ir.RankedTensorType:
        return ir.RankedTensorType(ir.TypeAttr(self.tensor).value)


class NoEffects(ir.MemoryEffectsOpInterface):
    """Attached to pure ops, so that upstream CSE merges and canonicalize erases them."""

    @staticmethod
    def get_effects(op: Any, effects: Any) -> None:
        """No effects to report."""


# IRDL demands one type of all members of a variadic group; so values whose types may differ get a
# group each, and `ir.builder.Builder.create` adds the segment sizes.
MAX_VALUES = 16


def separate(prefix: str, specifier: Any) -> dict[str, Any]:
    """Annotations of an op with up to MAX_VALUES operands or results of unrelated types."""
    return {f"{prefix}{index}": specifier for index in range(MAX_VALUES)}


def shape_of(type_: ir.Type) -> tuple[int, ...] | None:
    """Shape of a tensor type, None for a scalar or a pointer."""
    return tuple(type_.shape) if isinstance(type_, ir.RankedTensorType) else None


def element_of(type_: ir.Type) -> ir.Type:
    """Element type of a tensor type; the type itself for a scalar or a pointer."""
    return type_.element_type if isinstance(type_, ir.RankedTensorType) else type_


def encoding_of(type_: ir.Type) -> ir.Attribute | None:
    """Layout attribute of a tensor type, None before layouts are assigned."""
    return type_.encoding if isinstance(type_, ir.RankedTensorType) else None


def with_element(type_: ir.Type, element: ir.Type) -> ir.Type:
    """`type_` with another element type, same shape and layout."""
    if isinstance(type_, ir.RankedTensorType):
        return ir.RankedTensorType.get(list(type_.shape), element, encoding=type_.encoding)
    return element


def with_encoding(type_: ir.Type, encoding: ir.Attribute | None) -> ir.Type:
    """`type_` with another layout."""
    return ir.RankedTensorType.get(list(type_.shape), type_.element_type, encoding=encoding)


def check(op: Any, *conditions: tuple[bool, str]) -> bool:
    """Verifier body: reports the first condition that does not hold at the op's location."""
    for holds, message in conditions:
        if not holds:
            op.operation.location.emit_error(f"{op.operation.name}: {message}")
            return False
    return True


def verifier(fn: Callable[[Any], bool]) -> "staticmethod[[Any], bool]":  # no generic at run time
    """Wraps a verifier so that it always sees the generic operation."""

    def verify(op: Any) -> bool:
        return fn(op if isinstance(op, ir.Operation) else op.operation)

    return staticmethod(verify)
