"""Kernels that read and write memory through tensor descriptors and block pointers."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minitriton as triton
import minitriton.language as tl
from minitriton.tools.tensor_descriptor import TensorDescriptor


def padded(shape, device, dtype=torch.float32):
    """A random array with rows of a multiple of 16 bytes, longer than its last dimension."""
    unit = 16 // dtype.itemsize
    width = (shape[-1] + unit) // unit * unit
    numbers = torch.randint(-99, 99, (*shape[:-1], width), device=device)
    return numbers.to(dtype)[..., : shape[-1]]


def block_of(array, offsets, block, fill=0):
    """What loading a block of `array` at `offsets` should give."""
    out = torch.full(block, fill, dtype=array.dtype)
    array = array.cpu()
    for index in np.ndindex(*block):
        at = tuple(o + i for o, i in zip(offsets, index, strict=True))
        if all(0 <= a < size for a, size in zip(at, array.shape, strict=True)):
            out[index] = array[at]
    return out


def stored(array, offsets, tile):
    """`array` after storing `tile` at `offsets`."""
    out = array.cpu().clone()
    for index in np.ndindex(*tile.shape):
        at = tuple(o + i for o, i in zip(offsets, index, strict=True))
        if all(0 <= a < size for a, size in zip(at, out.shape, strict=True)):
            out[at] = tile[index]
    return out


@triton.jit
def load_kernel(x, y, shape, strides, offsets, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, shape, strides, BLOCK).load(offsets)
    tl.store(y + tl.arange(0, SIZE), tile.reshape(SIZE))


@triton.jit
def store_kernel(x, y, shape, strides, offsets, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    tile = tl.load(y + tl.arange(0, SIZE)).reshape(BLOCK)
    tl.make_tensor_descriptor(x, shape, strides, BLOCK).store(offsets, tile)


def check_block(x, block, offsets):
    """Loads and stores one block of `x`, and compares everything with the definition."""
    size = int(np.prod(block))
    shape, strides = tuple(x.shape), tuple(x.stride())
    y = torch.zeros(size, dtype=x.dtype, device=x.device)
    load_kernel[(1,)](x, y, shape, strides, offsets, BLOCK=block, SIZE=size)
    assert torch.equal(y.cpu().reshape(block), block_of(x, offsets, block))
    y = torch.arange(size, device=x.device).to(x.dtype)
    whole = x._base if x._base is not None else x
    expected = stored(x, offsets, y.cpu().reshape(block))
    untouched = whole[..., x.shape[-1] :].clone()
    store_kernel[(1,)](x, y, shape, strides, offsets, BLOCK=block, SIZE=size)
    assert torch.equal(x.cpu(), expected)
    assert torch.equal(whole[..., x.shape[-1] :], untouched)


@pytest.mark.parametrize(
    "shape, block, dtype",
    [
        ((37,), (32,), torch.float16),
        ((9, 21), (4, 16), torch.float32),
        ((3, 5, 11), (2, 4, 16), torch.uint8),
        ((2, 3, 3, 9), (1, 2, 4, 8), torch.bfloat16),
        ((2, 2, 3, 2, 5), (2, 1, 2, 2, 4), torch.int32),
    ],
    ids=str,
)
def test_blocks_of_every_rank(device, shape, block, dtype):
    """Inside, across each edge, and outside altogether."""
    ends = [(-1, max(size - b // 2, 1)) for size, b in zip(shape, block, strict=True)]
    corners = [(0,) * len(shape), *itertools.islice(itertools.product(*ends), 0, 32, 5)]
    for offsets in [*corners, tuple(-b for b in block), shape]:
        check_block(padded(shape, device, dtype), block, offsets)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_block(device, data):
    block = data.draw(st.sampled_from([(1, 8), (8, 4), (4, 16)]))
    shape = tuple(data.draw(st.integers(1, 30)) for _ in block)
    far = st.integers(-(2**31), 2**31 - 1)
    offsets = tuple(
        data.draw(st.integers(-b - 1, s + 1) | far) for b, s in zip(block, shape, strict=True)
    )
    check_block(padded(shape, device), block, offsets)


@triton.jit
def nan_kernel(desc, x, y, rows, cols, stride, i, j):
    made = tl.make_tensor_descriptor(x, [rows, cols], [stride, 1], [4, 16], padding_option="nan")
    block = tl.make_block_ptr(x, (rows, cols), (stride, 1), (i, j), (4, 16), (1, 0))
    at = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(y + at, desc.load([i, j]))
    tl.store(y + 64 + at, made.load([i, j]))
    tl.store(y + 128 + at, tl.load(block, boundary_check=(0, 1), padding_option="nan"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_padding_with_nan(device, dtype):
    x = padded((6, 20), device, dtype)
    y = torch.zeros(3, 4, 16, dtype=dtype, device=device)
    desc = TensorDescriptor.from_tensor(x, [4, 16], padding="nan")
    for i, j in [(0, 0), (4, 10), (-2, 0), (6, 3)]:
        nan_kernel[(1,)](desc, x, y, *x.shape, x.stride(0), i, j)
        expected = block_of(x, (i, j), (4, 16), float("nan"))
        for tile in y.cpu():
            torch.testing.assert_close(tile, expected, rtol=0, atol=0, equal_nan=True)


@triton.jit
def rows_kernel(source, target, rows_ptr, column, COUNT: tl.constexpr):
    rows = tl.load(rows_ptr + tl.arange(0, COUNT))
    tile = source.gather(rows, column)
    target.scatter(tile + 1, rows, column)


@pytest.mark.parametrize("index", [torch.int32, torch.int16], ids=str)
def test_gather_and_scatter(device, index):
    x = padded((20, 30), device)
    y = padded((20, 30), device)
    rows = torch.tensor([3, 0, 19, 7, -1, 20, 12, 100], dtype=index, device=device)
    for column in (0, 20, -5):
        before = y.cpu().clone()
        source, target = (TensorDescriptor.from_tensor(t, [1, 16]) for t in (x, y))
        rows_kernel[(1,)](source, target, rows, column, COUNT=8)
        for row in rows.tolist():
            if 0 <= row < 20:
                tile = block_of(x, (row, column), (1, 16)) + 1
                before = stored(before, (row, column), tile)
        assert torch.equal(y.cpu(), before)


@triton.jit
def atomics_kernel(sums, low, high, some, every, odd, n):
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    value = at * 37 % 101 + tl.program_id(0)
    sums.atomic_add([n, n], value.to(tl.float32))
    low.atomic_min([n, n], value)
    high.atomic_max([n, n], value)
    some.atomic_or([n, n], value)
    every.atomic_and([n, n], value)
    odd.atomic_xor([n, n], value)


def test_atomics(device):
    x = padded((10, 20), device, torch.int32)
    arrays = [x.float(), *(x.clone() for _ in range(5))]
    expected = [a.cpu().clone() for a in arrays]
    descriptors = [TensorDescriptor.from_tensor(a, [8, 16]) for a in arrays]
    atomics_kernel[(2,)](*descriptors, 5)
    window = (slice(5, 10), slice(5, 20))
    for program in range(2):
        values = (torch.arange(128, dtype=torch.int32) * 37 % 101 + program).reshape(8, 16)
        values = values[:5, :15]
        expected[0][window] += values
        for place, fn in enumerate((torch.minimum, torch.maximum), 1):
            expected[place][window] = fn(expected[place][window], values)
        expected[3][window] |= values
        expected[4][window] &= values
        expected[5][window] ^= values
    for array, wanted in zip(arrays, expected, strict=True):
        assert torch.equal(array.cpu(), wanted)
