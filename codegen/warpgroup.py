"""wgmma: dots of whole warpgroups on operands in shared memory, and the waits and fences around.

All instructions of a dot are one piece of inline PTX whose outputs are tied to its accumulator
inputs. So nothing can come between two products that are in flight, least of all a copy of an
accumulator register, for which ptxas would wait after every instruction. Where threads load A they
are two such pieces: one half is loaded while the tensor cores are at the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from minitriton.codegen.byte_transpose import load_bytes
from minitriton.codegen.dot import fp8_name
from minitriton.codegen.dot_parts import to_tf32
from minitriton.codegen.emit import width_of
from minitriton.codegen.lower import Lowering, integer_attribute
from minitriton.codegen.shared_address import load_plan, shared_word
from minitriton.codegen.tile import carried
from minitriton.codegen.warp_ops import shuffle_word
from minitriton.ir.byte_transpose import byte_transpose_plan
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.dialect import MemType
from minitriton.ir.encoding import mem_layout
from minitriton.ir.layouts import adjacent_rows, mma_operand, mma_tiles, shared_access_plan
from minitriton.ir.matrix_descriptor import STEP_BYTES, MatrixDescriptor, matrix_descriptor
from minitriton.ir.mlir import ir

ROWS = 64  # of one instruction; it has all columns of the tile, 256 at most
MOST_OF_THREE = 96  # registers of one instruction's sums where three warpgroups hold tiles
PART = 128  # columns of the first where there are more: whole panels of B
GROUP_SHIFT = 7  # a warpgroup has 128 threads
ADDRESS_MASK = 0x3FFF0  # of shared memory, in whole 16 bytes


class _Asm:
    """The text, operands and constraints of the instructions of one dot."""

    def __init__(self, sums: _Sums, *, fresh: bool) -> None:
        self.count = len(sums.values)
        self.operands = [] if fresh else list(sums.values)
        self.constraints = [f"={sums.letter}"] * self.count
        self.constraints += [str(index) for index in range(len(self.operands))]
        self.lines = [".reg .pred p, q;", "setp.eq.u32 p, 0, 0;", "setp.ne.u32 q, 0, 0;"]
        self.lines.append("wgmma.fence.sync.aligned;")
        self._numbers: dict[ir.Value, int] = {}
        self._descriptors: dict[tuple[str, int], str] = {}

    def operand(self, value: ir.Value, letter: str) -> str:
        """How the text refers to an input."""
        if value not in self._numbers:
            self._numbers[value] = self.count + len(self.operands)
            self.operands.append(value)
            self.constraints.append(letter)
        return f"${self._numbers[value]}"

    def descriptor(self, base: ir.Value, offset: int) -> str:
        """base + offset, added up here: out of loops that do not change it, LLVM would move each
        such sum, and hold it in two registers."""
        name = self.operand(base, "l")
        if not offset:
            return name
        if (name, offset) not in self._descriptors:
            made = self._descriptors[name, offset] = f"d{len(self._descriptors)}"
            self.lines += [f".reg .b64 {made};", f"add.s64 {made}, {name}, {offset};"]
        return self._descriptors[name, offset]

    def accumulators(self, first: int, count: int) -> str:
        return "{" + ", ".join(f"${index}" for index in range(first, first + count)) + "}"


def lower_warpgroup_dot(lowering: Lowering, op: ir.Operation) -> None:
    _, b, c = op.operands
    sums, fresh = _Sums(lowering, c), _is_zero(lowering, c)
    right = _Operand(lowering, b, 1)
    left = _left_of(lowering, op, right.depth)
    step = STEP_BYTES // right.size
    steps = list(range(0, right.depth, step))
    parts = [steps]
    if isinstance(left, _Rows):
        parts = [part for part in (steps[: len(steps) // 2], steps[len(steps) // 2 :]) if part]
    for number, part in enumerate(parts):
        if isinstance(left, _Rows):  # into registers that products of this part may still read
            _wait(lowering, len(parts) - 1)
            left.load([k // step for k in part])
        asm = _Asm(sums, fresh=fresh and number == 0)
        for k in part:
            scale = "q" if fresh and k == 0 else "p"
            if k == 0 and c in lowering.counted_sums:
                scale = asm.operand(lowering.counted_sums[c], "b")
            _add_step(lowering, op, asm, (left, right), k, scale)
        asm.lines.append("wgmma.commit_group.sync.aligned;")
        if "mt.in_flight" not in op.attributes and number == len(parts) - 1:
            asm.lines.append("wgmma.wait_group.sync.aligned 0;")
        sums.values = lowering.asm(
            "{\n" + "\n".join(asm.lines) + "\n}",
            ",".join([*asm.constraints, "~{memory}"]),
            sums.types,
            asm.operands,
        )
    sums.become(op.results[0])


class _Sums:
    """The accumulator registers of a tile as instructions have them: those of f16 in pairs."""

    def __init__(self, lowering: Lowering, value: ir.Value) -> None:
        self._lowering = lowering
        element = _element_of(value)
        self._paired = element == lowering.f16
        self.values = lowering.words(value) if self._paired else lowering.held(value)
        self.types = [lowering.i32 if self._paired else element] * len(self.values)
        self.letter = "f" if element == lowering.f32 else "r"  # their constraint

    def become(self, result: ir.Value) -> None:
        """Records them as the value of `result`."""
        if self._paired:
            self._lowering.set_words(result, self.values)
        else:
            self._lowering.set_registers(result, self.values)


def _is_zero(lowering: Lowering, sums: ir.Value) -> bool:
    zero = lowering.zero(_element_of(sums))
    return all(value == zero for value in lowering.held(sums))


def _add_step(
    lowering: Lowering, op: ir.Operation, asm: _Asm, operands: tuple[_Left, _Operand], k: int,
    scale: str,
) -> None:  # fmt: skip
    """The instructions at depth `k`; scale: whether they add to what is in the registers."""
    (left, right), (rows, columns) = operands, op.results[0].type.shape
    step = STEP_BYTES // right.size
    kind = f"k{step}.{_kind(lowering, op)}"
    sum_type = op.results[0].type.element_type
    signs = "" if sum_type == lowering.i32 else ", 1, 1"
    (warps, _) = ir.DenseI32ArrayAttr(op.attributes["mt.warps"])
    step_rows = 16 * warps  # the warpgroups lie along M, then the tile repeats
    registers = columns * width_of(sum_type) // 64
    place = asm.descriptor
    if sum_type == lowering.f16 and not isinstance(left, _Operand):
        # ptxas takes such a product for one without registers to wait in if it adds here
        place = lambda base, offset: asm.operand(lowering.add(base, offset), "l")  # noqa: E731
    parts = [
        (start * registers // columns, count, place(*right.at(start, k)))
        for start, count in _column_parts(lowering, columns, registers)
    ]
    for m in range(rows // step_rows):
        if isinstance(left, _Operand):
            first = asm.descriptor(*left.at(m * step_rows, k))
            orders = f", {left.transposed}, {right.transposed}"
        else:
            fragment = [asm.operand(word, "r") for word in left.words[m, k // step]]
            first, orders = "{" + ", ".join(fragment) + "}", f", {right.transposed}"
        orders = orders if right.size == 2 else ""  # others have only one
        for start, count, second in parts:
            sums = asm.accumulators(m * registers + start, count * registers // columns)
            name = f"wgmma.mma_async.sync.aligned.m64n{count}{kind}"
            asm.lines.append(f"{name} {sums}, {first}, {second}, {scale}{signs}{orders};")


def _column_parts(lowering: Lowering, columns: int, registers: int) -> list[tuple[int, int]]:
    """(first, number) of the columns of each instruction: ptxas wants its `registers` to be fewer
    than a thread has at the launch, which three warpgroups and a producer have 128 of."""
    if registers <= MOST_OF_THREE or lowering.consumer_warps < 12:
        return [(0, columns)]
    return [(0, PART), (PART, columns - PART)]


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

    def at(self, free: int, depth: int) -> tuple[ir.Value, int]:
        """The descriptor of the sub-tile at (free, depth): an i64 and what to add to it."""
        return self._base, self._descriptor.offset(free, depth) // 16


def _kind(lowering: Lowering, op: ir.Operation) -> str:
    """The types of an instruction: of sums, A and B."""
    names = []
    for value, side in zip(op.operands, "ab", strict=False):
        element = _element_of(value)
        if element == lowering.i8:
            names.append("u8" if f"mt.unsigned_{side}" in op.attributes else "s8")
        elif element == lowering.f32:
            names.append("tf32")
        else:
            names.append(fp8_name(element) if element.width == 8 else str(element))
    sums = op.results[0].type.element_type
    return ".".join(["s32" if sums == lowering.i32 else str(sums), *names])


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def warpgroup(lowering: Lowering) -> ir.Value:
    """i32 number of this thread's warpgroup, in a form that ptxas knows to be uniform."""
    return lowering.once(
        "warpgroup",
        lambda: shuffle_word(lowering, "idx", lowering.shr(lowering.thread_id, GROUP_SHIFT), 0),
    )


class _Words:
    """A in registers: for each (repetition along M, K step) the four words, those of mma.sync."""

    def __init__(self, lowering: Lowering, op: ir.Operation, depth: int) -> None:
        a, (rows, columns) = op.operands[0], op.results[0].type.shape
        self._lowering = lowering
        self.bits = _element_of(a).width
        (warps, _) = ir.DenseI32ArrayAttr(op.attributes["mt.warps"])
        self._tiles = {
            (tile.m, tile.k): tile.a
            for tile in mma_tiles((rows, columns, depth), (warps, 1), self.bits)
        }
        self.words: dict[tuple[int, int], list[ir.Value]] = {}

    def take(self, registers: Mapping[int, ir.Value]) -> None:
        """The words whose elements are in `registers`, by number."""
        each = 32 // self.bits
        for place, numbers in self._tiles.items():
            if numbers[0] in registers:
                values = [registers[number] for number in numbers]
                self.words[place] = [
                    self._lowering.join_bits(values[i : i + each], self._lowering.i32)
                    for i in range(0, 4 * each, each)
                ]


class _Rows(_Words):
    """A in shared memory along M, of which threads load neighbouring rows (`adjacent_rows`)."""

    def __init__(self, lowering: Lowering, op: ir.Operation, depth: int) -> None:
        super().__init__(lowering, op, depth)
        self._slot = op.operands[0]
        rows = op.results[0].type.shape[0]
        warps = tuple(ir.DenseI32ArrayAttr(op.attributes["mt.warps"]))
        order = adjacent_rows(rows, self.bits)
        self._layout = mma_operand((rows, depth), 0, warps, self.bits, order)

    def load(self, steps: Sequence[int]) -> None:
        """The words of some K steps."""
        wanted = {n for (_, k), numbers in self._tiles.items() if k in steps for n in numbers}
        pointer, shared = self._lowering.scalar(self._slot), mem_layout(self._slot.type)
        turned = byte_transpose_plan(shared, self._layout) if self.bits == 8 else None
        if turned is not None:
            blocks = tuple(found for found in turned.instructions if found.first in wanted)
            part = replace(turned, instructions=blocks)
            values = load_bytes(self._lowering, part, pointer, len(wanted))
        else:
            plan = shared_access_plan(shared, self._layout, self.bits)
            groups = tuple(group for group in plan.groups if group.registers[0] in wanted)
            part_plan = replace(plan, groups=groups)
            element, count = carried(_element_of(self._slot)), self._layout.num_registers
            values = load_plan(self._lowering, part_plan, pointer, element, count)
        self.take(dict(zip(sorted(wanted), values, strict=True)))


_Left: TypeAlias = "_Operand | _Words"


def _left_of(lowering: Lowering, op: ir.Operation, depth: int) -> _Left:
    a = op.operands[0]
    if "mt.adjacent_rows" in op.attributes and isinstance(a.type, MemType):
        return _Rows(lowering, op, depth)
    if isinstance(a.type, MemType):
        return _Operand(lowering, a, 0)
    registers = lowering.registers(a)
    if _element_of(a) == lowering.f32:
        registers = [lowering.bitcast(to_tf32(lowering, v), lowering.f32) for v in registers]
    words = _Words(lowering, op, depth)
    words.take(dict(enumerate(registers)))
    return words


def _element_of(value: ir.Value) -> ir.Type:
    """Of a tile or a buffer."""
    is_buffer = isinstance(value.type, MemType)
    return (MemType(value.type).tensor_type if is_buffer else value.type).element_type


def lower_warpgroup_result(lowering: Lowering, op: ir.Operation) -> None:
    """The accumulators go through the wait, so that no use of theirs can come before it."""
    sums = _Sums(lowering, op.operands[0])
    count = len(sums.values)
    constraints = (
        [f"={sums.letter}"] * count + [str(index) for index in range(count)] + ["~{memory}"]
    )
    sums.values = lowering.asm(
        f"wgmma.wait_group.sync.aligned {integer_attribute(op, 'pending')};",
        ",".join(constraints),
        sums.types,
        sums.values,
    )
    sums.become(op.results[0])


def lower_warpgroup_wait(lowering: Lowering, op: ir.Operation) -> None:
    _wait(lowering, integer_attribute(op, "pending"))


def _wait(lowering: Lowering, pending: int) -> None:
    lowering.asm(f"wgmma.wait_group.sync.aligned {pending};", "~{memory}", [])


def lower_proxy_fence(lowering: Lowering, op: ir.Operation) -> None:
    lowering.asm("fence.proxy.async.shared::cta;", "~{memory}", [])


RULES = {
    "mt.warpgroup_dot": lower_warpgroup_dot,
    "mt.warpgroup_result": lower_warpgroup_result,
    "mt.warpgroup_wait": lower_warpgroup_wait,
    "mt.proxy_fence": lower_proxy_fence,
}
