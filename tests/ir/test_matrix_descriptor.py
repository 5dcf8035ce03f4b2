"""Matrix descriptors of wgmma against the address formula of the PTX ISA, element by element."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitriton.ir.layouts import shared_for_mma_operand, shared_tma
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.matrix_descriptor import matrix_descriptor, operand_span


def hardware_address(descriptor: int, free: int, k: int, *, k_major: bool, size: int) -> int:
    """Byte address that wgmma reads for element (free, k) of an instruction, from the 64 bits."""
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    span = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
    if k_major:
        address = start + free // 8 * stride + free % 8 * span + size * k
    else:
        per_line = span // 2
        address = start + free // per_line * leading + k // 8 * stride + k % 8 * span
        address += 2 * (free % per_line)
    return address ^ (address >> 7 & span // 16 - 1) << 4


def stored_address(slot: LinearLayout, free: int, k: int, op_index: int, size: int) -> int:
    """Where the layout says that element is."""
    where = (free, k) if op_index == 0 else (k, free)
    vectors = dict(slot.bases)["offset"]
    shifts = LinearLayout(slot.shape, ()).dim_shifts
    wanted = sum(c << s for c, s in zip(where, shifts, strict=True))
    columns = [sum(c << s for c, s in zip(v, shifts, strict=True)) for v in vectors]
    return size * inverse(tuple(columns))[wanted]


_INVERSES: dict[tuple[int, ...], list[int]] = {}


def inverse(columns: tuple[int, ...]) -> list[int]:
    if columns not in _INVERSES:
        table = [0]
        for column in columns:
            table += [value ^ column for value in table]
        offsets = [0] * len(table)
        for offset, element in enumerate(table):
            offsets[element] = offset
        _INVERSES[columns] = offsets
    return _INVERSES[columns]


@given(
    free=st.sampled_from([8, 16, 32, 64, 128, 256]),
    depth=st.sampled_from([8, 16, 32, 64, 128]),
    op_index=st.sampled_from([0, 1]),
    form=st.sampled_from([(2, True), (2, False), (1, True), (4, True)]),
    data=st.data(),
)
def test_the_hardware_reads_what_the_layout_stores(free, depth, op_index, form, data):
    size, k_major = form
    deep = 32 // size  # of one instruction
    depth = max(depth, deep)
    shape = (free, depth) if op_index == 0 else (depth, free)
    k = 1 - op_index
    order = (k, 1 - k) if k_major else (1 - k, k)
    span = operand_span(shape, order, size)
    if not span:
        assert shape[order[0]] < deep
        return
    slot = shared_tma(shape, order, 8 * size, span)
    found = matrix_descriptor(slot, op_index, size)
    assert found is not None and (found.k_major, found.span) == (k_major, span)
    rows = min(free, 64 if op_index == 0 else 256)
    base = 1024 * data.draw(st.integers(0, 100))
    for step in range(0, depth, deep):
        first = data.draw(st.integers(0, free // rows - 1)) * rows
        descriptor = (base + found.offset(first, step)) >> 4 | found.constant
        for _ in range(16):
            row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, deep - 1))
            read = hardware_address(descriptor, row, column, k_major=k_major, size=size)
            stored = stored_address(slot, first + row, step + column, op_index, size)
            assert read == base + stored


def test_layouts_that_wgmma_cannot_read():
    plain = shared_tma((64, 64), (1, 0), 16, 16)
    narrow = shared_tma((64, 64), (1, 0), 16, 64)
    two_panels = shared_for_mma_operand((64, 128), (1, 0), 16)
    assert matrix_descriptor(plain, 0) is None  # no swizzle
    assert matrix_descriptor(narrow, 0) is None  # not the widest swizzle
    assert matrix_descriptor(two_panels, 0) is None  # rows of 256 bytes in one piece
    assert matrix_descriptor(shared_tma((64, 8), (0, 1), 16), 0) is None  # too shallow
    assert matrix_descriptor(shared_tma((2, 64, 64), (2, 1, 0), 16), 0) is None
    assert matrix_descriptor(shared_tma((64, 128), (0, 1), 8, 64), 0, 1) is None  # fp8 along M
    assert matrix_descriptor(shared_tma((64, 32), (0, 1), 32), 0, 4) is None  # tf32 along M


@pytest.mark.parametrize(
    ("shape", "order", "op_index", "expected"),
    [  # as notes on measured kernels have them: 128-byte swizzle, stride 1024
        ((128, 64), (1, 0), 0, 0x4000004000010000),
        ((64, 256), (0, 1), 1, 0x4000004000010000),
        ((64, 256), (1, 0), 1, 0x4000004002000000),
    ],
)
def test_known_descriptors(shape, order, op_index, expected):
    found = matrix_descriptor(shared_tma(shape, order, 16), op_index)
    assert found is not None and found.constant == expected
