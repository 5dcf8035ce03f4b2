"""Runs a tile-IR module on numpy, one program after another, before or after any pass.

The oracle between passes: a pass that changes meaning shows as a different result. Layouts are
ignored, async copies land at once, barriers do nothing, so races are for the PTX emulator to find.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from minitriton.ir import interpret_elementwise
from minitriton.ir import interpret_ops as meaning
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.dialect import PtrType
from minitriton.ir.linear_layout import granule
from minitriton.ir.mlir import ir
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.ir.terms import evaluate
from minitriton.ir.warp_roles import ROW_GROUPS


class Memory(Protocol):
    """Global memory by address."""

    def read(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        """Unsigned integers of `itemsize` bytes at flat addresses."""

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Stores unsigned integers at flat addresses, in order."""

    def end(self, address: int) -> int:
        """Where the memory of the argument with this address ends."""


def interpret(
    module: ir.Module, memory: Memory, arguments: Sequence[Any], grid: tuple[int, int, int],
    assembly: interpret_elementwise.Assembly | None = None,
) -> None:  # fmt: skip
    """Runs every program of the module's kernel; `arguments` are addresses and numbers.
    assembly: how to run inline PTX."""
    function = next(
        op for op in module.body.operations if op.operation.name == "func.func"
    ).operation
    block = function.regions[0].blocks[0]
    values = [
        _argument(a, meaning.numpy_type(formal.type))
        for a, formal in zip(arguments, block.arguments, strict=True)
    ]
    specs = read_specs(module.operation)
    attributes = module.operation.attributes
    groups = ir.IntegerAttr(attributes[ROW_GROUPS]).value if ROW_GROUPS in attributes else 1
    for z, y, x in itertools.product(*(range(n) for n in reversed(grid))):
        for group in range(groups):
            program = Program((x, y, z), grid, memory, values, specs, group, assembly)
            program.run_block(block, values)


def _argument(value: Any, dtype: type) -> np.ndarray:
    if isinstance(value, int):  # unsigned ones are held in the signed type of their width
        return np.array(value & (1 << 64) - 1, np.uint64).astype(dtype)
    return np.asarray(value, dtype)


class Program:
    """One program instance: its values by SSA name, its place in the grid; group: of those that
    share its rows."""

    def __init__(
        self, ids: Sequence[int], grid: Sequence[int], memory: Memory,
        arguments: Sequence[Any] = (), tensor_maps: Sequence[dict[str, Any]] = (), group: int = 0,
        assembly: interpret_elementwise.Assembly | None = None,
    ) -> None:  # fmt: skip
        self.ids, self.grid, self.memory, self.group = ids, grid, memory, group
        self.arguments, self.tensor_maps = arguments, tensor_maps
        self.assembly = assembly
        self.values: dict[ir.Value, Any] = {}

    def run_block(self, block: ir.Block, arguments: Sequence[Any]) -> list[Any]:
        """Runs a block; the operands of its terminator come back."""
        for formal, actual in zip(block.arguments, arguments, strict=True):
            self.values[formal] = actual
        for wrapped in block.operations:
            op = wrapped.operation
            operands = [self.values[v] for v in op.operands]
            if op.name in TERMINATORS:
                return operands
            results = self.evaluate(op, operands)
            for result, value in zip(op.results, results, strict=True):
                self.values[result] = value
        return []

    def evaluate(self, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
        """Results of one op."""
        name = op.name
        with np.errstate(all="ignore"):
            if name in RULES:
                return RULES[name](self, op, operands)
            element = meaning.scalar_type(op.results[0].type) if len(op.results) else None
            if name in meaning.BINARY:
                return [meaning.round_to(meaning.BINARY[name](*operands), element)]
            if name in meaning.UNARY:
                return [meaning.round_to(meaning.UNARY[name](*operands), element)]
            if name in meaning.CASTS:
                source = meaning.scalar_type(op.operands[0].type)
                return [meaning.cast(name, operands[0], source, element)]
        raise InternalError("interpret", f"no meaning for {name} at {op.location}")


def _constant(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    attribute, type_ = op.attributes["value"], op.results[0].type
    if isinstance(type_, ir.RankedTensorType):
        attribute = ir.DenseElementsAttr(attribute).get_splat_value()
    value = np.asarray(attribute.value, meaning.numpy_type(meaning.scalar_type(type_)))
    return [np.broadcast_to(value, meaning.result_shape(type_))]


def _load(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    element = meaning.scalar_type(op.results[0].type)
    addresses = np.asarray(operands[0])
    mask = np.asarray(operands[1] if len(operands) > 1 else np.ones(addresses.shape, bool))
    # lanes masked off without `other` are undefined: a conspicuous pattern shows their use
    filler = operands[2] if len(operands) > 2 else np.full(addresses.shape, 77)
    out = np.array(meaning.round_to(np.broadcast_to(filler, addresses.shape), element))
    if mask.any():
        raw = program.memory.read(addresses[mask], meaning.item_bytes(element))
        out[mask] = meaning.from_bits(raw, element)
    return [out]


def _store(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    element = meaning.scalar_type(op.operands[1].type)
    addresses, value = np.asarray(operands[0]), np.asarray(operands[1])
    mask = np.asarray(operands[2] if len(operands) > 2 else np.ones(addresses.shape, bool))
    program.memory.write(addresses[mask], meaning.to_bits(value[mask], element))
    return []


_ATOMIC = {"add": np.add, "fadd": np.add, "max": np.maximum, "min": np.minimum,
           "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
           "xchg": lambda a, b: b}  # fmt: skip


def _atomic(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    element = meaning.scalar_type(op.results[0].type)
    cas = op.name == "mt.atomic_cas"
    addresses = np.asarray(operands[0])
    mask = np.ones(addresses.shape, bool) if cas or len(operands) < 3 else np.asarray(operands[2])
    old = np.zeros(addresses.shape, meaning.numpy_type(element))
    kind = "cas" if cas else ir.StringAttr(op.attributes["kind"]).value
    for index in zip(*np.nonzero(np.atleast_1d(mask)), strict=True):
        place = index if addresses.ndim else ()
        address = addresses[place].reshape(1)
        now = meaning.from_bits(program.memory.read(address, meaning.item_bytes(element)), element)
        old[place] = now[0]
        operand = np.asarray(operands[1])[place].reshape(1)
        if cas:
            new = np.asarray(operands[2])[place].reshape(1) if now == operand else now
        elif kind in ("umax", "umin"):
            unsigned = getattr(np, f"uint{8 * now.itemsize}")
            function = np.maximum if kind == "umax" else np.minimum
            new = function(now.view(unsigned), operand.view(unsigned)).view(now.dtype)
        else:
            new = _ATOMIC[kind](now, operand)
        program.memory.write(address, meaning.to_bits(meaning.round_to(new, element), element))
    return [old]


def _addptr(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    pointee = PtrType(meaning.scalar_type(op.operands[0].type)).pointee
    return [operands[0] + operands[1].astype(np.int64) * meaning.item_bytes(pointee)]


def _dot(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    element = meaning.scalar_type(op.results[0].type)
    wide = np.int64 if isinstance(element, ir.IntegerType) else np.float64
    a, b = (
        v.view(np.uint8) if f"mt.unsigned_{side}" in op.attributes else v
        for v, side in zip(operands, "ab", strict=False)
    )
    product = np.matmul(a.astype(wide), b.astype(wide))
    return [meaning.round_to(product + operands[2].astype(wide), element)]


def _fold(program: Program, op: ir.Operation, a: list[Any], b: list[Any]) -> list[Any]:
    return program.run_block(op.regions[0].blocks[0], [*a, *b])


def _reduce(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    axis = ir.IntegerAttr(op.attributes["axis"]).value
    parts = [[np.take(v, i, axis) for v in operands] for i in range(operands[0].shape[axis])]
    while len(parts) > 1:  # pairwise, in order: close to what the hardware's tree does
        folded = [_fold(program, op, a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = folded + parts[len(parts) // 2 * 2 :]
    return parts[0]


def _scan(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    axis = ir.IntegerAttr(op.attributes["axis"]).value
    reverse = bool(ir.BoolAttr(op.attributes["reverse"]).value)
    order = range(operands[0].shape[axis])
    parts: list[list[Any]] = []
    for i in reversed(order) if reverse else order:
        item = [np.take(v, i, axis) for v in operands]
        parts.append(_fold(program, op, parts[-1], item) if parts else item)
    if reverse:
        parts.reverse()
    return [np.stack([p[i] for p in parts], axis) for i in range(len(operands))]


def _for(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    lower, upper, step, *carried = operands
    block = op.regions[0].blocks[0]
    dtype = np.asarray(lower).dtype
    for i in range(int(lower), int(upper), int(step)):
        carried = program.run_block(block, [np.asarray(i, dtype), *carried])
    return carried


def _if(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    region = op.regions[0 if bool(operands[0]) else 1]
    return program.run_block(region.blocks[0], []) if len(region.blocks) else []


def _while(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    carried = operands
    while True:
        condition, *carried = program.run_block(op.regions[0].blocks[0], carried)
        if not bool(condition):
            return carried
        carried = program.run_block(op.regions[1].blocks[0], carried)


def _async_copy(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    pointer, buffer, *extras = operands
    element = meaning.scalar_type(op.operands[1].type)
    mask = np.asarray(extras[0] if extras else np.ones(pointer.shape, bool))
    tile = np.zeros(pointer.shape, meaning.numpy_type(element))
    if len(extras) > 1:
        tile[...] = extras[1]
    if mask.any():
        raw = program.memory.read(pointer[mask], meaning.item_bytes(element))
        tile[mask] = meaning.from_bits(raw, element)
    buffer[...] = tile
    return []


def _tma_copy(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    buffer, _, runs, *coordinates = operands
    if not bool(runs):
        return []
    addresses, inside, size = _box(program, op, buffer.shape, coordinates)
    element = meaning.scalar_type(op.operands[0].type)
    fills_with_nan = program.tensor_maps[_integer(op, "map")]["fill"] == "nan"
    tile = np.full(buffer.shape, np.nan if fills_with_nan else 0, meaning.numpy_type(element))
    if inside.any():
        tile[inside] = meaning.from_bits(program.memory.read(addresses[inside], size), element)
    buffer[...] = tile
    return []


def _tma_multicast(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    """Programs run one by one: the whole tile, whoever copies it."""
    return _tma_copy(program, op, operands[:3] + operands[4:])


def _tma_store(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    buffer, *coordinates = operands
    addresses, inside, _ = _box(program, op, buffer.shape, coordinates)
    element = meaning.scalar_type(op.operands[0].type)
    program.memory.write(addresses[inside], meaning.to_bits(buffer[inside], element))
    return []


def _box(
    program: Program, op: ir.Operation, tile: tuple[int, ...], coordinates: Sequence[Any]
) -> tuple[np.ndarray, np.ndarray, int]:
    """Addresses of the elements of a TMA op's tile, which are inside the tensor, bytes of one."""
    spec = program.tensor_maps[_integer(op, "map")]
    integers = (np.asarray(v) for v in program.arguments)
    arguments = [int(v) if v.dtype.kind in "iu" else 0 for v in integers]
    strides = [1, *(evaluate(terms, arguments) for terms in spec["strides"])]
    places = list(ir.DenseI32ArrayAttr(op.attributes["dims"]))
    offset = np.full(tile, evaluate(spec["offset"], arguments), np.int64)
    inside = np.ones(tile, bool)
    for place, (start, stride, size) in enumerate(
        zip(coordinates, strides, spec["sizes"], strict=True)
    ):
        index = np.asarray(int(start), np.int64)
        if place in places:
            dim = places.index(place)
            shape = [-1 if d == dim else 1 for d in range(len(tile))]
            index = index + np.arange(tile[dim]).reshape(shape)
        offset = offset + index * stride
        inside &= index >= 0
        if size is not None:
            inside &= index < evaluate(size, arguments)
    size, base = spec["element_bytes"], arguments[spec["base"]]
    if spec["spans"]:
        inside &= base + (offset + 1) * size <= program.memory.end(base)
    return base + offset * size, inside, size


def _flip_blocks(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    axis, shape = _integer(op, "axis"), operands[0].shape
    block = granule(shape[axis])
    cut = (*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])
    return [np.flip(operands[0].reshape(cut), axis).reshape(shape)]


def _narrow(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    axis, start = _integer(op, "axis"), _integer(op, "start")
    size = meaning.result_shape(op.results[0].type)[axis]
    return [np.take(operands[0], np.arange(start, start + size), axis)]


def _local_alloc(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    type_ = op.results[0].type
    dtype = meaning.numpy_type(meaning.scalar_type(type_))
    buffer = np.full(meaning.result_shape(type_), 77).astype(dtype)
    if operands:
        buffer[...] = operands[0]
    return [buffer]


def _local_store(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    operands[1][...] = operands[0]
    return []


def _order(op: ir.Operation) -> list[int]:
    return list(ir.DenseI32ArrayAttr(op.attributes["order"]))


def _integer(op: ir.Operation, name: str) -> int:
    return ir.IntegerAttr(op.attributes[name]).value


def _precise(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    division = ir.StringAttr(op.attributes["function"]).value == "div"
    return [np.divide(*operands) if division else np.sqrt(operands[0])]


def _fp_cast(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    element = meaning.scalar_type(op.results[0].type)
    rounded = meaning.round_to(operands[0], element)
    if ir.StringAttr(op.attributes["rounding"]).value == "rtz":
        exact = operands[0].astype(np.float64)
        too_far = np.abs(rounded.astype(np.float64)) > np.abs(exact)
        step = np.abs(rounded.astype(np.float64)) * 2.0**-7
        lower = meaning.round_to(exact - np.copysign(step / 2, exact), element)
        rounded = np.where(too_far, lower, rounded).astype(rounded.dtype)
    return [rounded]


def _broadcast(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    return [np.broadcast_to(operands[0], meaning.result_shape(op.results[0].type))]


def _nothing(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    return []


def _same(program: Program, op: ir.Operation, operands: list[Any]) -> Sequence[Any]:
    return [operands[0]]


def _predicate(op: ir.Operation) -> int:
    return _integer(op, "predicate")


Rule = Callable[[Program, ir.Operation, list[Any]], Sequence[Any]]
RULES: dict[str, Rule] = {
    "arith.constant": _constant, "mt.load": _load, "mt.store": _store, "mt.atomic_rmw": _atomic,
    "mt.atomic_cas": _atomic, "mt.addptr": _addptr, "mt.dot": _dot, "mt.reduce": _reduce,
    "mt.scan": _scan, "scf.for": _for, "scf.if": _if, "scf.while": _while,
    "mt.async_copy": _async_copy, "mt.local_alloc": _local_alloc, "mt.local_store": _local_store,
    "mt.precise": _precise, "mt.fp_cast": _fp_cast, "mt.splat": _broadcast,
    "mt.unsplat": lambda p, op, v: [v[0].flat[0]],
    "mt.broadcast": _broadcast, "mt.hint": _same, "mt.convert_layout": _same,
    "mt.local_load": lambda p, op, v: [np.array(v[0])],
    "mt.mem_index": lambda p, op, v: [v[0][int(v[1])]],
    "mt.mem_trans": lambda p, op, v: [v[0].transpose(_order(op))],
    "mt.program_id": lambda p, op, v: [np.int32(p.ids[_integer(op, "axis")])],
    "mt.num_programs": lambda p, op, v: [np.int32(p.grid[_integer(op, "axis")])],
    "mt.cta_id": lambda p, op, v: [
        np.int32(p.ids[0] + p.grid[0] * (p.ids[1] + p.grid[1] * p.ids[2]))],
    "mt.cta_count": lambda p, op, v: [np.int32(np.prod(p.grid))],
    "mt.group_id": lambda p, op, v: [np.int32(p.group)],
    "mt.group_count": lambda p, op, v: [np.int32(1)],
    "mt.make_range": lambda p, op, v: [
        np.arange(_integer(op, "start"), _integer(op, "end"), dtype=np.int32)],
    "mt.expand_dims": lambda p, op, v: [np.expand_dims(v[0], _integer(op, "axis"))],
    "mt.reshape": lambda p, op, v: [v[0].reshape(meaning.result_shape(op.results[0].type))],
    "mt.trans": lambda p, op, v: [v[0].transpose(_order(op))],
    "mt.join": lambda p, op, v: [np.stack(v, -1)],
    "mt.split": lambda p, op, v: [v[0][..., 0], v[0][..., 1]],
    "mt.warpgroup_dot": _dot, "mt.warpgroup_result": _same,
    "mt.narrow": _narrow,
    "mt.flip_blocks": _flip_blocks,
    "mt.histogram": lambda p, op, v: [
        np.bincount(v[0][v[1]], minlength=op.results[0].type.shape[0]).astype(np.int32)],
    "mt.gather": lambda p, op, v: [np.take_along_axis(v[0], v[1], _integer(op, "axis"))],
    "mt.cat": lambda p, op, v: [np.concatenate(v, _integer(op, "axis"))],
    "arith.cmpi": lambda p, op, v: [meaning.compare_int(_predicate(op), *v)],
    "arith.cmpf": lambda p, op, v: [meaning.compare_float(_predicate(op), *v)],
    "arith.select": lambda p, op, v: [np.where(*v).astype(np.asarray(v[1]).dtype)],
    "math.fma": lambda p, op, v: [meaning.round_to(
        v[0].astype(np.float64) * v[1] + v[2], meaning.scalar_type(op.results[0].type))],
    "mt.assume": _nothing, "mt.barrier": _nothing, "mt.grid_wait": _nothing,
    "mt.grid_launch": _nothing, "mt.print": _nothing, "mt.assert": _nothing,
    "mt.async_commit": _nothing, "mt.async_wait": _nothing, "mt.local_dealloc": _nothing,
    "mt.tma_store": _tma_store, "mt.tma_store_wait": _nothing,
    "mt.tma_copy": _tma_copy, "mt.tma_multicast": _tma_multicast,
    "mt.mbarrier_init": _nothing, "mt.mbarrier_inval": _nothing, "mt.cluster_barrier": _nothing,
    "mt.mbarrier_expect": _nothing, "mt.mbarrier_wait": _nothing,
    "mt.mbarrier_arrive": _nothing, "mt.split_warps": _nothing,
    "mt.turn_wait": _nothing, "mt.turn_pass": _nothing,
    "mt.proxy_fence": _nothing, "mt.warpgroup_wait": _nothing,
    **interpret_elementwise.RULES,
}  # fmt: skip
TERMINATORS = frozenset({"scf.yield", "scf.condition", "mt.yield", "func.return"})
