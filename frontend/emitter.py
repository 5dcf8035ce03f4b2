"""Writes the tile IR of one kernel: language values in, `mt`, `arith` and `scf` operations out.

The only file of the frontend (with `build`) that touches MLIR, so that the language imports
without it. Operations are built generically: one call, about a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from minitriton.frontend.values import Tensor
from minitriton.ir import dtypes
from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.context import first_effect
from minitriton.ir.mlir import ir
from minitriton.ir.signs import is_non_negative
from minitriton.ir.target import Target
from minitriton.ir.types import to_mlir


class Emitter:
    """Insertion point, type cache and target of the kernel being built."""

    def __init__(
        self, builder: Builder, target: Target, options: Mapping[str, Any], num_warps: int
    ) -> None:
        self.builder = builder
        self.target = target
        self.options = options
        self.num_warps = num_warps
        self.call: Callable[..., Any] = _no_call  # inlines a device function: (fn, args) -> value
        self.place: Callable[[], tuple[str, int, str]] = lambda: ("", 0, "")  # file, line, function
        self.printed: set[tuple[Any, str]] = set()  # what static_print said already
        self.makes_pointers = False  # of integers
        self._types: dict[dtypes.AnyType, ir.Type] = {}
        self._holders: list[ir.Operation] = []  # of blocks that were filled detached

    def type(self, type_: dtypes.AnyType) -> ir.Type:
        """The MLIR type, cached."""
        found = self._types.get(type_)
        if found is None:
            found = self._types[type_] = to_mlir(type_)
        return found

    def op(
        self,
        name: str,
        type_: dtypes.AnyType,
        operands: Sequence[Tensor] = (),
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> Tensor:
        """A new operation with one result of `type_`."""
        handles = [operand.handle for operand in operands]
        return Tensor(self.builder.op(name, self.type(type_), handles, attributes), type_)

    def effect(
        self,
        name: str,
        operands: Sequence[Tensor] = (),
        attributes: Mapping[str, ir.Attribute] | None = None,
    ) -> None:
        """A new operation without results."""
        self.builder.create(name, [], [operand.handle for operand in operands], attributes)

    def multi(
        self,
        name: str,
        types: Sequence[dtypes.AnyType],
        operands: Sequence[Tensor],
        attributes: Mapping[str, ir.Attribute] | None = None,
        regions: int = 0,
    ) -> tuple[ir.Operation, list[Tensor]]:
        """A new operation with any number of results and (empty) regions."""
        handles = [operand.handle for operand in operands]
        op = self.builder.create(name, [self.type(t) for t in types], handles, attributes, regions)
        return op, [Tensor(r, t) for r, t in zip(op.results, types, strict=True)]

    def constant(self, type_: dtypes.AnyType, value: int | float | bool) -> Tensor:
        """A constant scalar, or a tile with every element equal."""
        return Tensor(self.builder.constant(self.type(type_), value), type_)

    def block(self, region: ir.Region, types: Sequence[dtypes.AnyType]) -> tuple[Any, list[Tensor]]:
        """Appends a block to `region`; returns it and its arguments."""
        block = region.blocks.append(
            *[self.type(t) for t in types], arg_locs=[self.builder.loc] * len(types)
        )
        return block, [Tensor(a, t) for a, t in zip(block.arguments, types, strict=True)]

    @contextmanager
    def detached(self, types: Sequence[dtypes.AnyType]) -> Iterator[tuple[Any, list[Tensor]]]:
        """A block to fill before the operation that it will be moved to, and its arguments."""
        holder = ir.Operation.create("scf.execute_region", [], [], None, None, 1, self.builder.loc)
        self._holders.append(holder)
        block, arguments = self.block(holder.regions[0], types)
        with self.inside(block):
            yield block, arguments

    @staticmethod
    def effect_in(operation: ir.Operation) -> str | None:
        """Name of an op inside `operation` that has effects, without "mt."; None if none has."""
        return first_effect(operation)

    def is_non_negative(self, value: Tensor) -> bool:
        """Whether a scalar integer is known not to be below zero; arithmetic is taken as exact."""
        return is_non_negative(value.handle)

    @contextmanager
    def inside(self, block: ir.Block) -> Iterator[None]:
        """Appends to `block` for a `with` block; the location stays the current one."""
        with self.builder.at(ir.InsertionPoint(block)):
            yield

    @staticmethod
    def i32(value: int) -> ir.Attribute:
        """i32 attribute."""
        return i32_attr(value)

    @staticmethod
    def i64(value: int) -> ir.Attribute:
        """i64 attribute (comparison predicates are of this type)."""
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)

    @staticmethod
    def string(value: str) -> ir.Attribute:
        """String attribute."""
        return ir.StringAttr.get(value)

    @staticmethod
    def boolean(value: bool) -> ir.Attribute:
        """Boolean attribute."""
        return ir.BoolAttr.get(value)

    @staticmethod
    def unit() -> ir.Attribute:
        """Unit attribute."""
        return ir.UnitAttr.get()

    @staticmethod
    def array32(values: Sequence[int]) -> ir.Attribute:
        """array<i32> attribute."""
        return ir.DenseI32ArrayAttr.get(list(values))

    @staticmethod
    def array64(values: Sequence[int]) -> ir.Attribute:
        """array<i64> attribute."""
        return ir.DenseI64ArrayAttr.get(list(values))


def _no_call(*_: Any) -> Any:
    raise AssertionError("the emitter was not bound to a compilation")
