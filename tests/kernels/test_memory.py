"""Loads, stores, atomics, hints and random numbers."""

import numpy as np
import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.runtime.emulator.checks import OutOfBounds


@triton.jit
def masked_copy_kernel(x_ptr, out_ptr, n, other, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=(offsets < n) & (offsets % 3 != 1), other=other)
    tl.store(out_ptr + offsets, x, mask=offsets < n)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int8, torch.int64, torch.uint8], ids=str
)
@pytest.mark.parametrize("n", [1, 15, 1000])
def test_masked_load_other(device, dtype, n):
    x = torch.randint(0, 100, (n,), device=device).to(dtype)
    out = torch.zeros_like(x)
    masked_copy_kernel[(triton.cdiv(n, 256),)](x, out, n, 7, BLOCK=256)
    index = torch.arange(n, device=device)
    assert torch.equal(
        out, torch.where(index % 3 != 1, x, torch.tensor(7, dtype=dtype, device=device))
    )


@triton.jit
def hints_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offsets = tl.max_contiguous(tl.multiple_of(offsets, BLOCK), BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, cache_modifier=".cg", eviction_policy="evict_first")
    y = tl.load(x_ptr + offsets, mask=mask, eviction_policy="evict_last")
    z = tl.load(x_ptr + offsets, mask=mask, cache_modifier=".ca", volatile=True)
    tl.store(out_ptr + offsets, x + y + z, mask=mask, cache_modifier=".cs")


def test_cache_and_eviction_hints(device):
    x = torch.randn(1000, device=device)
    out = torch.empty_like(x)
    hints_kernel[(2,)](x, out, 1000, BLOCK=512)
    torch.testing.assert_close(out, x * 3)


@triton.jit
def gather_kernel(x_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    index = tl.load(index_ptr + offsets, mask=mask, other=0)
    tl.store(out_ptr + offsets, tl.load(x_ptr + index, mask=mask), mask=mask)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64, torch.int16], ids=str)
def test_indirect_load(device, index_dtype):
    x = torch.randn(200, device=device)
    index = torch.randint(0, 200, (555,), device=device).to(index_dtype)
    out = torch.empty(555, device=device)
    gather_kernel[(3,)](x, index, out, 555, BLOCK=256)
    assert torch.equal(out, x[index.long()])


@triton.jit
def pointer_table_kernel(table_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    x_ptr = tl.load(table_ptr + pid).to(tl.pointer_type(tl.float32))
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + offsets, tl.load(x_ptr + offsets))


def test_pointers_loaded_from_memory(device):
    parts = [torch.randn(64, device=device) for _ in range(3)]
    table = torch.tensor([p.data_ptr() for p in parts], dtype=torch.int64, device=device)
    out = torch.empty(3 * 64, device=device)
    pointer_table_kernel[(3,)](table, out, BLOCK=64)
    assert torch.equal(out, torch.cat(parts))


def test_pointers_into_one_storage(device):
    whole = torch.randn(256, device=device)
    table = torch.tensor([whole[i:].data_ptr() for i in (0, 100, 192)], device=device)
    out = torch.empty(3 * 64, device=device)
    pointer_table_kernel[(3,)](table, out, BLOCK=64)
    assert torch.equal(out, torch.cat([whole[:64], whole[100:164], whole[192:]]))


def test_loaded_pointers_stay_inside_what_they_point_to():
    """The emulator knows where the tensor ends, and no tensors but those that addresses name."""
    part, other = torch.randn(40), torch.randn(64)
    out = torch.empty(64)
    with pytest.raises(OutOfBounds, match="what table_ptr points to"):
        pointer_table_kernel[(1,)](torch.tensor([part.data_ptr()]), out, BLOCK=64)
    with pytest.raises(OutOfBounds):
        pointer_table_kernel[(1,)](torch.tensor([other.data_ptr() - 4096]), out, BLOCK=64)


@triton.jit
def address_kernel(address, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(address.to(tl.pointer_type(tl.float32)) + offsets) + 1)


def test_address_as_an_integer(device):
    x, out = torch.randn(64, device=device), torch.empty(64, device=device)
    address_kernel[(1,)](x.data_ptr(), out, BLOCK=64)
    assert torch.equal(out, x + 1)


@triton.jit
def atomic_kernel(x_ptr, out_ptr, old_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0)
    targets = out_ptr + offsets % 7
    if OP == "add":
        old = tl.atomic_add(targets, x, mask=mask)
    elif OP == "max":
        old = tl.atomic_max(targets, x, mask=mask)
    elif OP == "min":
        old = tl.atomic_min(targets, x, mask=mask)
    elif OP == "and":
        old = tl.atomic_and(targets, x, mask=mask)
    elif OP == "or":
        old = tl.atomic_or(targets, x, mask=mask)
    else:
        old = tl.atomic_xor(targets, x, mask=mask, sem="relaxed", scope="gpu")
    tl.store(old_ptr + offsets, old, mask=mask)


@pytest.mark.parametrize("op", ["add", "max", "min", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integer_atomics(device, op, dtype):
    n = 300
    x = torch.randint(-(2**30), 2**30, (n,), device=device).to(dtype)
    start = torch.randint(-(2**30), 2**30, (7,), device=device).to(dtype)
    out, old = start.clone(), torch.zeros(n, dtype=dtype, device=device)
    atomic_kernel[(3,)](x, out, old, n, OP=op, BLOCK=128)
    function = {
        "add": np.add, "max": np.maximum, "min": np.minimum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[op]  # fmt: skip
    expected = start.cpu().numpy().copy()
    function.at(expected, np.arange(n) % 7, x.cpu().numpy())
    assert np.array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_float_atomic_add(device, dtype):
    x = torch.randint(0, 4, (300,), device=device).to(dtype)
    out = torch.zeros(7, dtype=dtype, device=device)
    atomic_kernel[(3,)](x, out, torch.empty_like(x), 300, OP="add", BLOCK=128)
    expected = torch.zeros(7, dtype=torch.float64, device=device)
    expected.index_add_(0, torch.arange(300, device=device) % 7, x.double())
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize("op", ["max", "min"])
def test_float_atomic_max_min(device, op):
    x = torch.randn(300, device=device)
    out = torch.zeros(7, device=device)
    atomic_kernel[(3,)](x, out, torch.empty_like(x), 300, OP=op, BLOCK=128)
    padded = torch.full((301,), 0.0, device=device)
    padded[:300] = x
    columns = padded.view(43, 7)
    reduced = columns.amax(0) if op == "max" else columns.amin(0)
    expected = (
        torch.maximum(reduced, torch.zeros(7, device=device))
        if op == "max"
        else torch.minimum(reduced, torch.zeros(7, device=device))
    )
    assert torch.equal(out, expected)


@triton.jit
def lock_kernel(lock_ptr, count_ptr, data_ptr, out_ptr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    count = tl.load(count_ptr)
    x = tl.load(data_ptr + pid * BLOCK + offsets)
    if count == 0:
        total = x
    else:
        total = x + tl.load(out_ptr + offsets)
    tl.store(out_ptr + offsets, total)
    tl.store(count_ptr, count + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


def test_spin_lock_across_programs(device):
    data = torch.randint(0, 9, (6, 64), device=device).float()
    lock, count = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    out = torch.full((64,), -1.0, device=device)
    lock_kernel[(6,)](lock, count, data, out, BLOCK=64)
    assert torch.equal(out, data.sum(0)) and count.item() == 6 and lock.item() == 0


@triton.jit
def counter_kernel(counter_ptr, out_ptr):
    ticket = tl.atomic_add(counter_ptr, 1)
    tl.store(out_ptr + ticket, tl.program_id(0))


def test_scalar_atomic_gives_each_program_its_ticket(device):
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.full((20,), -1, dtype=torch.int32, device=device)
    counter_kernel[(20,)](counter, out)
    assert sorted(out.tolist()) == list(range(20))


def philox(seed: int, offset: np.ndarray) -> np.ndarray:
    """First output word of Philox-4x32-10 with counter (offset, 0, 0, 0) and 64-bit key."""
    c = [
        offset.astype(np.uint64) & 0xFFFFFFFF,
        *(np.zeros(len(offset), np.uint64) for _ in range(3)),
    ]
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ k0, b & np.uint64(0xFFFFFFFF),
            (a >> np.uint64(32)) ^ c[3] ^ k1, a & np.uint64(0xFFFFFFFF),
        ]  # fmt: skip
        k0 = (k0 + np.uint64(0x9E3779B9)) & np.uint64(0xFFFFFFFF)
        k1 = (k1 + np.uint64(0xBB67AE85)) & np.uint64(0xFFFFFFFF)
    return c[0].astype(np.uint32)


@triton.jit
def random_kernel(ints_ptr, uniform_ptr, normal_ptr, n, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(ints_ptr + offsets, tl.randint(seed, offsets).to(tl.int32, bitcast=True), mask=mask)
    tl.store(uniform_ptr + offsets, tl.rand(seed, offsets), mask=mask)
    tl.store(normal_ptr + offsets, tl.randn(seed, offsets), mask=mask)


@pytest.mark.parametrize("seed", [0, 42, 2**40 + 5])
def test_philox_streams(device, seed):
    n = 4000
    ints = torch.empty(n, dtype=torch.int32, device=device)
    uniform, normal = torch.empty(n, device=device), torch.empty(n, device=device)
    random_kernel[(triton.cdiv(n, 1024),)](ints, uniform, normal, n, seed, BLOCK=1024)
    words = philox(seed, np.arange(n))
    assert np.array_equal(ints.cpu().numpy().view(np.uint32), words)
    signed = words.view(np.int32).astype(np.int64)
    folded = np.where(signed < 0, -signed - 1, signed)
    expected = (folded * np.float64(4.6566127342e-10)).astype(np.float32)
    np.testing.assert_allclose(uniform.cpu().numpy(), expected, rtol=1e-6, atol=1e-7)
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(normal.mean().item()) < 0.06 and abs(normal.std().item() - 1) < 0.05


@triton.jit
def view_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


@pytest.mark.parametrize("shift", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("n", [64, 1024, 999])
def test_misaligned_views(device, shift, n):
    x = torch.randn(n + 8, device=device).half()[shift : shift + n]
    out = torch.zeros(n + 8, device=device, dtype=torch.float16)[shift : shift + n]
    view_kernel[(triton.cdiv(n, 512),)](x, out, n, BLOCK=512)
    assert torch.equal(out, x + 1)
