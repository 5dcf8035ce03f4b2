"""mt.print through vprintf and mt.assert through __assertfail, the driver's device functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minitriton.codegen.elementwise import is_float
from minitriton.codegen.emit import attribute, type_named, width_of
from minitriton.codegen.fp8_upcast import fp8_to_f16
from minitriton.codegen.tile import Tile
from minitriton.ir.builder import Builder
from minitriton.ir.dialect import element_of
from minitriton.ir.mlir import ir

if TYPE_CHECKING:
    from minitriton.codegen.lower import Lowering

GENERIC = "!llvm.ptr"
SLOT_BYTES = 8
MAX_SLOTS = 16  # of a print's argument buffer: 3 for the program, the rank, 1 for the value


def _print(lowering: Lowering, op: ir.Operation) -> None:
    """One line per element and operand, from the thread that owns it (a scalar: thread 0)."""
    prefix = ir.StringAttr(op.attributes["prefix"]).value
    signs = list(ir.DenseI32ArrayAttr(op.attributes["signs"]))
    as_hex = ir.BoolAttr(op.attributes["hex"]).value
    operands = list(op.operands)
    if not operands:
        text = f"pid (%u, %u, %u) idx () {_escaped(prefix)}\n"
        _print_line(lowering, text, [], lowering.is_first_thread)
    for number, (operand, signed) in enumerate(zip(operands, signs, strict=True)):
        label = f" (operand {number})" if len(operands) > 1 else ""
        value = lowering.value(operand)
        rank = len(value.layout.shape) if isinstance(value, Tile) else 0
        element = element_of(operand.type)
        registers = list(lowering.registers(operand))
        if is_float(element) and element.width == 8:
            registers = fp8_to_f16(lowering, registers, element)
        conversion = _conversion(registers[0].type, bool(signed), as_hex)
        place = ", ".join(["%u"] * rank)
        text = f"pid (%u, %u, %u) idx ({place}) {_escaped(prefix)}{label}: {conversion}\n"
        if not isinstance(value, Tile):
            shown = _promoted(lowering, registers[0], bool(signed))
            _print_line(lowering, text, [shown], lowering.is_first_thread)
            continue
        owner = lowering.owns_elements(value.layout)
        for register in value.layout.registers:
            if register & value.layout.free_bits("register"):
                continue
            scalar = registers[register]
            index = [lowering.coordinate(value.layout, d, register) for d in range(rank)]
            shown = _promoted(lowering, scalar, bool(signed))
            _print_line(lowering, text, [*index, shown], owner)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _conversion(type_: ir.Type, signed: bool, as_hex: bool) -> str:
    """The printf conversion of a carried type after `_promoted`."""
    if is_float(type_):
        return "%f"
    if not isinstance(type_, ir.IntegerType):
        return "%p"
    length = "ll" if type_.width == 64 else ""
    if as_hex:
        return f"0x%0{max(type_.width // 4, 1)}{length}x"
    return f"%{length}{'d' if signed else 'u'}"


def _promoted(lowering: Lowering, value: ir.Value, signed: bool) -> ir.Value:
    """C's default argument promotion: floats to f64, narrow integers to i32."""
    type_ = value.type
    if is_float(type_):
        if width_of(type_) == 64:
            return value
        return lowering.op("arith.extf", lowering.f64, (value,))
    if isinstance(type_, ir.IntegerType) and type_.width < 32:
        extend = "arith.extsi" if signed and type_.width > 1 else "arith.extui"
        return lowering.op(extend, lowering.i32, (value,))
    return value


def _print_line(
    lowering: Lowering, text: str, values: Sequence[ir.Value], predicate: ir.Value | None
) -> None:
    program = [_program_id(lowering, axis) for axis in "xyz"]
    buffer = _argument_buffer(lowering)

    def call() -> tuple[()]:
        at = 0
        for value in (*program, *values):
            size = max(width_of(value.type) // 8, 1)
            at = (at + size - 1) // size * size
            lowering.store(value, lowering.offset_pointer(buffer, at), size)
            at += size
        arguments = [_string(lowering, text), buffer]
        _call(lowering, "vprintf", [lowering.i32], arguments)
        return ()

    lowering.branch(
        predicate if predicate is not None else lowering.constant(lowering.i1, True),
        [], call, lambda: (),
    )  # fmt: skip


def _program_id(lowering: Lowering, axis: str) -> ir.Value:
    name = f"nvvm.read.ptx.sreg.ctaid.{axis}"
    return lowering.once(name, lambda: lowering.op(name, lowering.i32))


def _argument_buffer(lowering: Lowering) -> ir.Value:
    """Local memory for vprintf's arguments, one for the whole kernel."""
    attributes = {
        "elem_type": ir.TypeAttr.get(type_named(f"!llvm.array<{MAX_SLOTS * SLOT_BYTES} x i8>")),
        "alignment": ir.IntegerAttr.get(lowering.i64, SLOT_BYTES),
    }
    return lowering.once(
        "printf buffer",
        lambda: lowering.op("llvm.alloca", type_named(GENERIC), (lowering.int32(1),), attributes),
    )


def _assert(lowering: Lowering, op: ir.Operation) -> None:
    """One call per thread that holds a failing element."""
    conditions = lowering.held(op.operands[0])
    masks = lowering.held(op.operands[1]) if len(op.operands) > 1 else None
    failed: ir.Value | None = None
    for number, condition in enumerate(conditions):
        wrong = lowering.xor(condition, True)
        if masks is not None:
            wrong = lowering.and_(wrong, masks[number])
        failed = wrong if failed is None else lowering.or_(failed, wrong)
    assert failed is not None
    texts = [ir.StringAttr(op.attributes[name]).value for name in ("message", "file", "function")]
    line = lowering.int32(ir.IntegerAttr(op.attributes["line"]).value)

    def call() -> tuple[()]:
        message, file, function = (_string(lowering, text) for text in texts)
        char_size = lowering.constant(lowering.i64, 1)
        _call(lowering, "__assertfail", [], [message, file, line, function, char_size])
        return ()

    lowering.branch(failed, [], call, lambda: ())


# Symbols next to the kernel


def _module_builder(lowering: Lowering) -> Builder:
    return Builder(ir.InsertionPoint(lowering.kernel), lowering.kernel.location)


def _string(lowering: Lowering, text: str) -> ir.Value:
    """Generic pointer to a zero-terminated constant."""
    symbols = lowering.symbols
    name = symbols.get(text)
    data = text.encode() + b"\0"
    array = type_named(f"!llvm.array<{len(data)} x i8>")
    if name is None:
        name = symbols[text] = f"string_{len(symbols)}"
        zero = ir.IntegerAttr.get(lowering.i64, 0)
        attributes = {
            "sym_name": ir.StringAttr.get(name),
            "global_type": ir.TypeAttr.get(array),
            "linkage": attribute("#llvm.linkage<internal>"),
            "constant": ir.UnitAttr.get(),
            "value": ir.StringAttr.get(data),
            "addr_space": ir.IntegerAttr.get(lowering.i32, 1),
            "unnamed_addr": zero,
            "visibility_": zero,
        }
        _module_builder(lowering).create("llvm.mlir.global", [], [], attributes, regions=1)
    target = {"global_name": ir.FlatSymbolRefAttr.get(name)}

    def address() -> ir.Value:
        pointer = lowering.op("llvm.mlir.addressof", lowering.pointer, (), target)
        return lowering.op("llvm.addrspacecast", type_named(GENERIC), (pointer,))

    return lowering.once(("string", text), address)


def _call(
    lowering: Lowering, name: str, results: Sequence[ir.Type], arguments: Sequence[ir.Value]
) -> None:
    """Calls an external function, declared on first use."""
    key = f"declaration of {name}"
    if key not in lowering.symbols:
        lowering.symbols[key] = name
        returned = str(results[0]) if results else "void"
        listed = ", ".join(str(a.type).removeprefix("!llvm.") for a in arguments)
        zero = ir.IntegerAttr.get(lowering.i64, 0)
        attributes = {
            "sym_name": ir.StringAttr.get(name),
            "function_type": ir.TypeAttr.get(type_named(f"!llvm.func<{returned} ({listed})>")),
            "linkage": attribute("#llvm.linkage<external>"),
            "CConv": attribute("#llvm.cconv<ccc>"),
            "visibility_": zero,
            "unnamed_addr": zero,
        }
        _module_builder(lowering).create("llvm.func", [], [], attributes, regions=1)
    lowering.create(
        "llvm.call",
        results,
        arguments,
        {
            "callee": ir.FlatSymbolRefAttr.get(name),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([len(arguments), 0]),
            "op_bundle_sizes": ir.DenseI32ArrayAttr.get([]),
        },
    )


RULES = {"mt.print": _print, "mt.assert": _assert}
