"""Runs inline PTX of a kernel on numpy arrays, in the emulator: its meaning for the interpreter."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from minitriton.ir.asm_operands import elements_per_register, parse_constraints

WARP = 32
_SLOT = 8  # bytes for a register in memory
_BITS = {"h": 16, "r": 32, "f": 32, "l": 64, "d": 64}
_DOLLAR = re.compile(r"\$(?:(\$)|(\d+)|\{(\d+)(?::\w)?\}|\{:uid\})")


def run_asm(
    text: str,
    constraints: str,
    pack: int,
    operands: Sequence[np.ndarray],
    operand_bits: Sequence[int],
    result_bits: Sequence[int],
) -> list[np.ndarray]:
    """The results' elements, one array each, for groups of `pack` elements (unsigned integers that
    hold their bits) of the operands; one thread runs one group."""
    from minitriton.runtime.emulator.device import Emulator
    from minitriton.runtime.emulator.memory import Allocation

    groups = len(operands[0]) // pack if operands else 1
    threads = -(-groups // WARP) * WARP
    letters = parse_constraints(constraints)
    taken = [
        register
        for values, bits in zip(operands, operand_bits, strict=True)
        for register in _joined(values, bits, pack)
    ]
    memory = np.zeros((len(letters.results) + len(taken), threads), np.uint64)
    for row, register in zip(memory[len(letters.results) :], taken, strict=True):
        row[:groups], row[groups:] = register, register[-1]
    Emulator(_kernel(text, constraints)).launch(
        "asm", grid=(threads // WARP, 1, 1), block=(WARP, 1, 1),
        params=[memory.ctypes.data.to_bytes(8, "little"), threads.to_bytes(4, "little")],
        allocations=[Allocation(memory.ctypes.data, memory.nbytes, "registers")],
    )  # fmt: skip
    results, first = [], 0
    for bits in result_bits:
        count = pack // elements_per_register(bits, pack)
        results.append(_split(memory[first : first + count, :groups], bits, pack))
        first += count
    return results


def _joined(values: np.ndarray, bits: int, pack: int) -> list[np.ndarray]:
    """Per register of a group its bits in all groups."""
    each = elements_per_register(bits, pack)
    wide = values.astype(np.uint64).reshape(-1, pack // each, each)
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(bits)
    return list(np.bitwise_or.reduce(wide << shifts, axis=2).T)


def _split(registers: np.ndarray, bits: int, pack: int) -> np.ndarray:
    """The elements in some registers of all groups: the inverse of `_joined`."""
    each = elements_per_register(bits, pack)
    shifts = np.arange(each, dtype=np.uint64) * np.uint64(bits)
    fields = registers.T[:, :, None] >> shifts
    if bits < 64:
        fields &= np.uint64((1 << bits) - 1)
    return fields.reshape(-1).astype(f"u{max(bits // 8, 1)}")


def _kernel(text: str, constraints: str) -> str:
    """PTX of a kernel that runs the text on registers [number][thread] in memory."""
    parts = [c.strip() for c in constraints.split(",") if not c.strip().startswith("~")]
    letters = parse_constraints(constraints)
    count = len(letters.results)
    names, before, after = [f"%o{i}" for i in range(count)], [], []
    declared = list(zip(names, letters.results, strict=True))
    for number, letter in enumerate(letters.operands):
        tied = parts[count + number].isdigit()
        name = names[int(parts[count + number])] if tied else f"%i{number}"
        declared += [] if tied else [(name, letter)]
        names.append(name)
        before += ["add.u64 %at, %at, %row;", *_load(name, letter)]
    for name, letter in zip(names[:count], letters.results, strict=True):
        after += [*_store(name, letter), "add.u64 %to, %to, %row;"]
    body = _DOLLAR.sub(lambda m: "$" if m[1] else names[int(m[2] or m[3])] if m[2] or m[3] else "0",
                       text)  # fmt: skip
    registers = [
        f".reg {'.pred' if letter == 'b' else f'.b{_BITS[letter]}'} {name};"
        for name, letter in declared
    ]
    return "\n".join(
        [
            ".version 8.0", ".target sm_90a", ".address_size 64",
            ".visible .entry asm(.param .u64 base, .param .u32 threads) {",
            ".reg .b64 %at, %to, %row, %own; .reg .b32 %t, %c; .reg .b16 %byte;",
            *registers,
            "ld.param.u64 %at, [base]; ld.param.u32 %t, [threads]; mul.wide.u32 %row, %t, 8;",
            f"mov.u32 %t, %ctaid.x; mov.u32 %c, %tid.x; mad.lo.u32 %t, %t, {WARP}, %c;",
            f"mul.wide.u32 %own, %t, {_SLOT}; add.u64 %at, %at, %own; mov.u64 %to, %at;",
            f"mad.lo.u64 %at, %row, {count - 1}, %at;",
            *before, body, *after, "ret;", "}",
        ]
    )  # fmt: skip


def _load(name: str, letter: str) -> list[str]:
    if letter == "b":
        return ["ld.global.u8 %byte, [%at];", f"setp.ne.u16 {name}, %byte, 0;"]
    return [f"ld.global.b{_BITS[letter]} {name}, [%at];"]


def _store(name: str, letter: str) -> list[str]:
    if letter == "b":
        return [f"selp.u16 %byte, 1, 0, {name};", "st.global.u8 [%to], %byte;"]
    return [f"st.global.b{_BITS[letter]} [%to], {name};"]
