"""wgmma: dots of whole warpgroups on operands in shared memory, and the waits and fences around.

All instructions of a dot are one piece of inline PTX whose outputs are tied to its accumulator
inputs. So nothing can come between two products that are in flight, least of all a copy of an
accumulator register, for which ptxas would wait after every instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from minitriton.codegen.dot import fp8_name
from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.shared_address import shared_word
from minitriton.codegen.warp_ops import shuffle_word
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.dialect import MemType
from minitriton.ir.encoding import mem_layout
from minitriton.ir.layouts import mma_tiles
from minitriton.ir.matrix_descriptor import STEP_BYTES, MatrixDescriptor, matrix_descriptor
from minitriton.ir.mlir import ir

ROWS = 64  # of one instruction; it has all columns of the tile, 256 at most
GROUP_SHIFT = 7  # a warpgroup has 128 threads
ADDRESS_MASK = 0x3FFF0  # of shared memory, in whole 16 bytes


class _Asm:
    """The text, operands and constraints of the instructions of one dot."""

    def __init__(self, accumulators: Sequence[ir.Value], *, fresh: bool) -> None:
        self.count = len(accumulators)
        self.operands = [] if fresh else list(accumulators)
        self.constraints = ["=f"] * self.count
        self.constraints += [str(index) for index in range(len(self.operands))]
        self.lines = [".reg .pred p, q;", "setp.eq.u32 p, 0, 0;", "setp.ne.u32 q, 0, 0;"]
        self.lines.append("wgmma.fence.sync.aligned;")
        self._numbers: dict[ir.Value, int] = {}

    def operand(self, value: ir.Value, letter: str) -> str:
        """How the text refers to an input."""
        if value not in self._numbers:
            self._numbers[value] = self.count + len(self.operands)
            self.operands.append(value)
            self.constraints.append(letter)
        return f"${self._numbers[value]}"

    def accumulators(self, first: int, count: int) -> str:
        return "{" + ", ".join(f"${index}" for index in range(first, first + count)) + "}"


def lower_warpgroup_dot(lowering: Lowering, op: ir.Operation) -> None:
    a, b, c = op.operands
    rows, columns = op.results[0].type.shape
    (warps, _) = ir.DenseI32ArrayAttr(op.attributes["mt.warps"])
    kind = [_element_name(value.type) for value in (a, b)]
    right = _Operand(lowering, b, 1)
    left = _Operand(lowering, a, 0) if isinstance(a.type, MemType) else None
    words = {} if left else _register_words(lowering, a, (rows, columns, right.depth), warps)
    fresh = all(value == lowering.zero(lowering.f32) for value in lowering.registers(c))
    asm = _Asm(lowering.registers(c), fresh=fresh)
    first_scale = "q" if fresh else "p"  # of the instructions with k = 0
    if c in lowering.counted_sums:
        first_scale = asm.operand(lowering.counted_sums[c], "b")
    step = STEP_BYTES // right.size
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k{step}.f32.{kind[0]}.{kind[1]}"
    step_rows = 16 * warps  # the warpgroups lie along M, then the tile repeats
    registers = columns // 2
    for k in range(0, right.depth, step):
        second = asm.operand(right.at(0, k), "l")
        scale = first_scale if k == 0 else "p"
        for m in range(rows // step_rows):
            if left is not None:
                first = asm.operand(left.at(m * step_rows, k), "l")
                orders = f", {left.transposed}, {right.transposed}"
            else:
                fragment = [asm.operand(word, "r") for word in words[m, k // step]]
                first, orders = "{" + ", ".join(fragment) + "}", f", {right.transposed}"
            orders = orders if right.size == 2 else ""  # fp8 has only one
            sums = asm.accumulators(m * registers, registers)
            asm.lines.append(f"{name} {sums}, {first}, {second}, {scale}, 1, 1{orders};")
    asm.lines.append("wgmma.commit_group.sync.aligned;")
    if "mt.in_flight" not in op.attributes:
        asm.lines.append("wgmma.wait_group.sync.aligned 0;")
    results = lowering.asm(
        "{\n" + "\n".join(asm.lines) + "\n}",
        ",".join([*asm.constraints, "~{memory}"]),
        [lowering.f32] * asm.count,
        asm.operands,
    )
    lowering.set_registers(op.results[0], results)


class _Operand:
    """Descriptors of the sub-tiles of an operand in shared memory."""

    def __init__(self, lowering: Lowering, buffer: ir.Value, op_index: int) -> None:
        self.size = MemType(buffer.type).tensor_type.element_type.width // 8
        found = matrix_descriptor(mem_layout(buffer.type), op_index, self.size)
        if found is None:
            raise InternalError("codegen", f"wgmma cannot read {buffer.type}")
        self._lowering = lowering
        self._descriptor: MatrixDescriptor = found
        self.depth = found.depth
        self.transposed = int(not found.k_major)
        address = shared_word(lowering, lowering.scalar(buffer))
        if op_index == 0 and lowering.num_warps > 4:
            offset = lowering.mul(warpgroup(lowering), found.offset(ROWS, 0))
            address = lowering.add(address, offset)
        unit = lowering.shr(lowering.and_(address, ADDRESS_MASK), 4)
        wide = lowering.op("arith.extui", lowering.i64, (unit,))
        self._base = lowering.or_(wide, _signed(found.constant))
        self._made: dict[int, ir.Value] = {}

    def at(self, free: int, depth: int) -> ir.Value:
        """i64 descriptor of the sub-tile at (free, depth)."""
        offset = self._descriptor.offset(free, depth) // 16
        if offset not in self._made:
            base = self._base
            self._made[offset] = self._lowering.add(base, offset) if offset else base
        return self._made[offset]


def _element_name(type_: ir.Type) -> str:
    tensor = MemType(type_).tensor_type if isinstance(type_, MemType) else type_
    element = tensor.element_type
    return fp8_name(element) if element.width == 8 else str(element)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def warpgroup(lowering: Lowering) -> ir.Value:
    """i32 number of this thread's warpgroup, in a form that ptxas knows to be uniform."""
    return lowering.once(
        "warpgroup",
        lambda: shuffle_word(lowering, "idx", lowering.shr(lowering.thread_id, GROUP_SHIFT), 0),
    )


def _register_words(
    lowering: Lowering, a: ir.Value, shape: tuple[int, int, int], warps: int
) -> dict[tuple[int, int], list[ir.Value]]:
    """For each (repetition along M, K step) the four words of A: those of mma.sync."""
    source, bits = lowering.registers(a), a.type.element_type.width
    words: dict[tuple[int, int], list[ir.Value]] = {}
    for tile in mma_tiles(shape, (warps, 1), bits):
        if (tile.m, tile.k) not in words:
            values, each = [source[register] for register in tile.a], 32 // bits
            words[tile.m, tile.k] = [
                lowering.join_bits(values[i : i + each], lowering.i32)
                for i in range(0, 4 * each, each)
            ]
    return words


def lower_warpgroup_result(lowering: Lowering, op: ir.Operation) -> None:
    """The accumulators go through the wait, so that no use of theirs can come before it."""
    registers = lowering.registers(op.operands[0])
    count = len(registers)
    constraints = ["=f"] * count + [str(index) for index in range(count)] + ["~{memory}"]
    results = lowering.asm(
        f"wgmma.wait_group.sync.aligned {integer_attribute(op, 'pending')};",
        ",".join(constraints),
        [lowering.f32] * count,
        registers,
    )
    lowering.set_registers(op.results[0], results)


def lower_warpgroup_wait(lowering: Lowering, op: ir.Operation) -> None:
    pending = integer_attribute(op, "pending")
    lowering.asm(f"wgmma.wait_group.sync.aligned {pending};", "~{memory}", [])


def lower_proxy_fence(lowering: Lowering, op: ir.Operation) -> None:
    lowering.asm("fence.proxy.async.shared::cta;", "~{memory}", [])


RULES = {
    "mt.warpgroup_dot": lower_warpgroup_dot,
    "mt.warpgroup_result": lower_warpgroup_result,
    "mt.warpgroup_wait": lower_warpgroup_wait,
    "mt.proxy_fence": lower_proxy_fence,
}
