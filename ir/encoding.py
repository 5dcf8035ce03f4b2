"""Layouts as attributes of tensor types, and back.

A distributed layout is `{register = array<i32>, lane = ..., warp = ...}`, a shared-memory layout
`{offset = array<i32>}`: the flattened bases of `LinearLayout`. Decoding is cached per type.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from minitriton.ir.dialect import MemType
from minitriton.ir.linear_layout import LinearLayout, hull
from minitriton.ir.mlir import ir

_decoded: dict[ir.Type, LinearLayout] = {}


def encode(layout: LinearLayout) -> ir.DictAttr:
    """The attribute that stores `layout` (needs an entered context)."""
    return ir.DictAttr.get(
        {name: ir.DenseI32ArrayAttr.get(flat) for name, flat in layout.to_flat().items()}
    )


def layout_of(type_: ir.Type) -> LinearLayout:
    """The layout of a tensor type that carries one."""
    found = _decoded.get(type_)
    if found is None:
        attributes = ir.DictAttr(type_.encoding)
        flat = {
            named.name: list(ir.DenseI32ArrayAttr(named.attr))
            for named in (attributes[i] for i in range(len(attributes)))
        }
        found = _decoded[type_] = LinearLayout.from_flat(tuple(type_.shape), flat)
    return found


def with_layout(type_: ir.Type, layout: LinearLayout) -> ir.RankedTensorType:
    """Tensor type with the shape and element of `type_`, in `layout`."""
    return ir.RankedTensorType.get(list(type_.shape), type_.element_type, encoding=encode(layout))


def tile_type(element: ir.Type, layout: LinearLayout) -> ir.RankedTensorType:
    """Tensor type of `layout`'s shape."""
    return ir.RankedTensorType.get(list(layout.shape), element, encoding=encode(layout))


def mem_type(shape: Sequence[int], element: ir.Type, slot: LinearLayout) -> ir.Type:
    """`!mt.mem` of a buffer, or of a multi-buffer [n, ...] whose slots have the layout `slot`."""
    tensor = ir.RankedTensorType.get(list(shape), element, encoding=encode(slot))
    return MemType.get(ir.TypeAttr.get(tensor))


def mem_layout(type_: ir.Type) -> LinearLayout:
    """Shared layout of a `!mt.mem` type: of the buffer, or of one slot of a multi-buffer.

    A multi-buffer [n, ...] carries the layout of its slots; n need not be a power of two.
    """
    tensor = type_.tensor_type
    attribute = ir.DictAttr(tensor.encoding)
    found = _decoded.get(tensor)
    if found is None:
        flat = {"offset": list(ir.DenseI32ArrayAttr(attribute["offset"]))}
        shape, elements = tuple(tensor.shape), 1 << len(flat["offset"])
        while len(shape) > 1 and prod(map(hull, shape)) > elements:
            shape = shape[1:]
        found = _decoded[tensor] = LinearLayout.from_flat(shape, flat)
    return found
