"""Shapes, launches and loops at the edges: one element, one warp of 32, no trips, no programs."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def families_kernel(
    x_ptr, y_ptr, sum_ptr, scan_ptr, arg_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr
):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + m * N + n)
    y = tl.load(y_ptr + n * M + m)
    total = tl.sum(x * 2 - y, axis=0)
    tl.store(sum_ptr + tl.arange(0, N), total)
    tl.store(arg_ptr + tl.arange(0, M), tl.argmax(x, axis=1))
    tl.store(scan_ptr + m * N + n, tl.cumsum(x, axis=1) + tl.cumsum(y, axis=0, reverse=True))
    flat = tl.reshape(tl.trans(x), (M * N,))
    tl.store(out_ptr + tl.arange(0, M * N), tl.where(flat > 0, flat, -flat * 3))


SHAPES = [(1, 1), (1, 2), (2, 1), (4, 4), (1, 8192), (4096, 1), (16, 128), (512, 4)]


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_warps(device, shape, num_warps):
    if shape[0] * shape[1] > 1024 * num_warps:
        pytest.skip("too many registers per thread")
    x = torch.randint(-100, 100, shape, dtype=torch.int32, device=device)
    y = torch.randint(-100, 100, shape, dtype=torch.int32, device=device)
    total, arg = (torch.empty(s, dtype=torch.int32, device=device) for s in (shape[1], shape[0]))
    scan, out = torch.empty_like(x), torch.empty(x.numel(), dtype=torch.int32, device=device)
    families_kernel[(1,)](x, y.T.contiguous(), total, scan, arg, out, *shape, num_warps=num_warps)
    assert torch.equal(total, (x * 2 - y).sum(0).int())
    assert torch.equal(scan, (x.cumsum(1) + y.flip(0).cumsum(0).flip(0)).int())
    assert torch.equal(arg.long(), (x == x.amax(1, keepdim=True)).int().argmax(1))
    flat = x.T.reshape(-1)
    assert torch.equal(out, torch.where(flat > 0, flat, -flat * 3))


@triton.jit
def bool_kernel(x_ptr, y_ptr, out_ptr, any_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=False)
    y = tl.load(y_ptr + offsets, mask=offsets < n, other=True)
    both = (x & ~y) | (x ^ y)
    tl.store(out_ptr + offsets, both, mask=offsets < n)
    tl.store(any_ptr, tl.max((both & (offsets < n)).to(tl.int32), axis=0) != 0)
    tl.store(any_ptr + 1, tl.sum(x.to(tl.int32), axis=0) == n)


@pytest.mark.parametrize("n", [1, 33, 1000])
def test_bool_tensors(device, n):
    x, y = (torch.rand(n, device=device) < 0.5 for _ in range(2))
    out, some = torch.empty_like(x), torch.zeros(2, dtype=torch.bool, device=device)
    bool_kernel[(1,)](x, y, out, some, n, BLOCK=1024)
    assert torch.equal(out, (x & ~y) | (x ^ y))
    assert some.tolist() == [bool(out.any()), bool(x.all())]


@triton.jit
def far_kernel(x_ptr, out_ptr, far, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    there = x_ptr + far + i.to(tl.int64) * stride
    back = there - far
    tl.store(out_ptr + i, tl.load(back - i.to(tl.int64) * (stride - 1)))


@pytest.mark.parametrize("far", [2**31 + 5, -(2**33), 2**40 + 16])
@pytest.mark.parametrize("stride", [2**32 + 1, -(2**31) * 3, 1])
def test_offsets_beyond_32_bits(device, far, stride):
    x = torch.randn(64, device=device)
    out = torch.empty_like(x)
    far_kernel[(1,)](x, out, far, stride, BLOCK=64)
    assert torch.equal(out, x)


@triton.jit
def reversed_kernel(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(
        out_ptr + i, tl.load(x_ptr + (n - 1) * (0 - stride) + i * stride, mask=i < n), mask=i < n
    )


@pytest.mark.parametrize("stride", [-1, -2, -16])
def test_negative_strides(device, stride):
    n = 100
    x = torch.randn(n * 16, device=device)
    out = torch.empty(n, device=device)
    reversed_kernel[(2,)](x, out, n, stride, BLOCK=64)
    assert torch.equal(out, x[: (n - 1) * -stride + 1 : -stride].flip(0))


@pytest.mark.parametrize("grid", [(0,), (3, 0), (1, 1, 0)], ids=str)
def test_empty_grid(device, grid):
    x = torch.full((64,), 5.0, device=device)
    reversed_kernel[grid](x, x, 64, 1, BLOCK=64)
    assert (x == 5).all()


@triton.jit
def accumulate_kernel(a_ptr, b_ptr, out_ptr, trips, N: tl.constexpr, STAGES: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    acc = tl.full((N, N), 1.0, tl.float32)
    for k in tl.range(0, trips, num_stages=STAGES):
        a = tl.load(a_ptr + k * N * N + tile)
        b = tl.load(b_ptr + k * N * N + tile)
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + tile, acc)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("trips", [-3, 0, 1, 2, 3, 7])
def test_few_trips_and_any_number_of_stages(device, trips, stages):
    n = 16
    a, b = (torch.randn(max(trips, 1), n, n, device=device).half() for _ in range(2))
    out = torch.empty(n, n, device=device)
    accumulate_kernel[(1,)](a, b, out, trips, N=n, STAGES=stages)
    expected = torch.ones(n, n, device=device)
    for k in range(trips):
        expected += a[k].float() @ b[k].float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


@triton.jit
def conditional_load_kernel(x_ptr, skip_ptr, out_ptr, trips, N: tl.constexpr):
    i = tl.arange(0, N)
    acc = tl.zeros((N,), tl.float32)
    for k in range(trips):
        if tl.load(skip_ptr + k) == 0:
            acc += tl.load(x_ptr + k * N + i)
        else:
            acc = acc * 0.5
    tl.store(out_ptr + i, acc)


def test_loop_whose_loads_are_under_a_branch(device):
    x = torch.randn(9, 128, device=device)
    skip = (torch.rand(9, device=device) < 0.5).int()
    out = torch.empty(128, device=device)
    conditional_load_kernel[(1,)](x, skip, out, 9, N=128, num_stages=3)
    expected = torch.zeros(128, device=device)
    for k in range(9):
        expected = expected * 0.5 if skip[k] else expected + x[k]
    torch.testing.assert_close(out, expected)


@triton.jit
def two_loops_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, trips, inner, N: tl.constexpr, NESTED: tl.constexpr
):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    acc = tl.zeros((N, N), tl.float32)
    if NESTED:
        for k in range(trips):
            part = tl.zeros((N, N), tl.float32)
            for j in range(inner):
                part += tl.dot(tl.load(a_ptr + j * N * N + tile), tl.load(b_ptr + k * N * N + tile))
            acc += tl.dot(part.to(tl.float16), tl.load(c_ptr + k * N * N + tile))
    else:
        for k in range(trips):
            acc += tl.dot(tl.load(a_ptr + k * N * N + tile), tl.load(b_ptr + k * N * N + tile))
        for k in range(inner):
            acc = tl.dot(acc.to(tl.float16), tl.load(c_ptr + k * N * N + tile)) * 0.25
    tl.store(out_ptr + tile, acc)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("trips", [(0, 2), (3, 0), (4, 3), (5, 5)], ids=str)
@pytest.mark.parametrize("num_stages", [1, 3, 4])
def test_loops_after_and_inside_loops(device, trips, nested, num_stages):
    n = 32
    a, b, c = ((torch.randn(5, n, n, device=device) / 4).half() for _ in range(3))
    out = torch.empty(n, n, device=device)
    two_loops_kernel[(1,)](a, b, c, out, *trips, N=n, NESTED=nested, num_stages=num_stages)
    a, b, c = a.double(), b.double(), c.double()
    acc = torch.zeros(n, n, dtype=torch.float64, device=device)
    for k in range(trips[0]):
        if nested:
            part = sum((a[j] @ b[k] for j in range(trips[1])), torch.zeros_like(acc))
            acc += part.half().double() @ c[k]
        else:
            acc += a[k] @ b[k]
    for k in range(0 if nested else trips[1]):
        acc = acc.half().double() @ c[k] * 0.25
    torch.testing.assert_close(out.double(), acc, rtol=2e-3, atol=2e-3)


@triton.jit
def in_place_kernel(x_ptr, w_ptr, trips, N: tl.constexpr, DOT: tl.constexpr):
    i = tl.arange(0, N)
    tile = i[:, None] * N + i[None, :]
    for k in tl.range(0, trips, num_stages=3):
        x = tl.load(x_ptr + k * N * N + tile)
        if DOT:
            w = tl.load(w_ptr + tile)
            y = tl.dot(x, w).to(tl.float16)
        else:
            y = x * 0.5 + 1.0
        tl.store(x_ptr + (k + 1) * N * N + tile, y.to(tl.float16))


@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize("num_warps", [1, 4])
def test_loop_reads_what_it_wrote_one_iteration_before(device, dot, num_warps):
    n, trips = 32, 6
    x = torch.randn(trips + 1, n, n, device=device).half()
    w = (torch.randn(n, n, device=device) / 6).half()
    expected = x.clone()
    for k in range(trips):
        y = expected[k].double() @ w.double() if dot else expected[k].double() * 0.5 + 1
        expected[k + 1] = y.half()
    in_place_kernel[(1,)](x, w, trips, N=n, DOT=dot, num_warps=num_warps)
    torch.testing.assert_close(x, expected, rtol=1e-2, atol=1e-2)


@triton.jit
def derived_operands_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    trace_ptr,
    trips,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for step in range(trips):
        if KIND == "trans":
            a = tl.trans(tl.load(a_ptr + k[:, None] * M + m[None, :]))
            b = tl.trans(tl.load(b_ptr + n[:, None] * K + k[None, :]))
        else:
            a = tl.load(a_ptr + k[None, :] * M + m[:, None])
            b = tl.load(b_ptr + n[None, :] * K + k[:, None])
        if KIND == "where":
            a = tl.where(k[None, :] <= m[:, None] + step, a, 0.0)
        elif KIND == "cast":
            a = a.to(tl.int8).to(tl.float32).to(tl.float16)
            b = (b.to(tl.float32) * 2.0).to(tl.float16)
        acc += tl.dot(a.to(tl.float16), b.to(tl.float16))
        tl.store(trace_ptr + step, tl.sum(tl.sum(acc, 1), 0))
    tl.store(out_ptr + m[:, None] * N + n[None, :], acc * 2 + 1)


@pytest.mark.parametrize("kind", ["plain", "trans", "where", "cast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(64, 32, 32), (16, 8, 16), (4, 64, 32)], ids=str)
def test_operands_made_in_the_loop_and_accumulator_used_in_it(device, shape, dtype, kind):
    (m, n, k), trips = shape, 3
    a = torch.randint(-4, 5, (m, k), device=device).to(dtype)
    b = torch.randint(-4, 5, (k, n), device=device).to(dtype)
    out, trace = torch.empty(m, n, device=device), torch.empty(trips, device=device)
    derived_operands_kernel[(1,)](
        a.T.contiguous(), b.T.contiguous(), out, trace, trips, *shape, KIND=kind, num_stages=3
    )
    acc = torch.zeros(m, n, device=device)
    rows, cols = torch.arange(m, device=device)[:, None], torch.arange(k, device=device)[None, :]
    for step in range(trips):
        left = torch.where(cols <= rows + step, a, 0) if kind == "where" else a
        acc += left.float() @ b.float() * (2 if kind == "cast" else 1)
        assert trace[step] == acc.sum()
    assert torch.equal(out, acc * 2 + 1)


def test_llvm_looks_for_no_pairs(monkeypatch):
    """Its SLP vectoriser is off, as the search takes long: here it would make add.f32x2."""
    monkeypatch.setenv("MINITRITON_CACHE", "0")
    types = [torch.float32] * 4
    compiled = derived_operands_kernel.warmup(
        *types, 3, 64, 32, 32, KIND="cast", num_stages=3, target="sm_120a"
    )
    assert "add.f32" in compiled.ptx and "f32x2" not in compiled.ptx


@triton.jit
def order_kernel(
    a_ptr, b_ptr, c_ptr, K, sam, sak, sbk, sbn, M: tl.constexpr, N: tl.constexpr, BK: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((M, N), c_ptr.dtype.element_ty)
    for start in range(0, K, BK):
        rest = start + k
        a = tl.load(a_ptr + m[:, None] * sam + rest[None, :] * sak, mask=rest[None, :] < K, other=0)
        b = tl.load(b_ptr + rest[:, None] * sbk + n[None, :] * sbn, mask=rest[:, None] < K, other=0)
        acc += tl.dot(a, b)
    tl.store(c_ptr + m[:, None] * N + n[None, :], acc)


@pytest.mark.parametrize("a_t", [False, True])
@pytest.mark.parametrize("b_t", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_pipelined_operand_orders(device, dtype, a_t, b_t):
    m, n, k = 32, 64, 80
    a, b = (torch.randint(-3, 4, s, device=device) for s in ((m, k), (k, n)))
    expected = a.double() @ b.double()
    a, b = a.float().to(dtype), b.float().to(dtype)
    a, b = a.T.contiguous().T if a_t else a, b.T.contiguous().T if b_t else b
    c = torch.empty(
        m, n, device=device, dtype=torch.int32 if dtype == torch.int8 else torch.float32
    )
    order_kernel[(1,)](a, b, c, k, *a.stride(), *b.stride(), m, n, 32, num_stages=3)
    assert torch.equal(c.double(), expected)


@pytest.mark.parametrize(
    "shape", [(1, 1, 16), (2, 16, 32), (8, 8, 16), (16, 4, 64), (1, 128, 16)], ids=str
)
@pytest.mark.parametrize("num_warps", [1, 4, 16])
def test_small_dots(device, shape, num_warps):
    m, n, k = shape
    a, b = (torch.randint(-3, 4, s, device=device).half() for s in ((m, k), (k, n)))
    c = torch.empty(m, n, device=device)
    order_kernel[(1,)](a, b, c, k, *a.stride(), *b.stride(), m, n, k, num_warps=num_warps)
    assert torch.equal(c, a.float() @ b.float())


@triton.jit
def assumed_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.assume(n > 0)
    start = tl.multiple_of(tl.program_id(0) * BLOCK, BLOCK)
    offsets = start + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) * 2, mask=offsets < n)


@pytest.mark.parametrize("shift", [0, 1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8, torch.int64], ids=str)
def test_assume_and_misaligned_pointers(device, shift, dtype):
    n = 300
    x = torch.randint(-50, 50, (n + 8,), device=device).to(dtype)
    out = torch.zeros_like(x)
    assumed_kernel[(2,)](x[shift:], out[shift + 1 :], n, BLOCK=256)
    assert torch.equal(out[shift + 1 : shift + 1 + n], x[shift : shift + n] * 2)
    assert (out[: shift + 1] == 0).all() and (out[shift + 1 + n :] == 0).all()


@triton.jit
def persistent_flat_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    num_n = tl.cdiv(N, BN)
    offs_k = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * num_n, PROGRAMS, flatten=True):
        m = (tile // num_n) * BM + tl.arange(0, BM)
        n = (tile % num_n) * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for ki in range(tl.cdiv(K, BK)):
            k = ki * BK + offs_k
            a = tl.load(
                a_ptr + m[:, None] * K + k[None, :],
                mask=(m[:, None] < M) & (k[None, :] < K),
                other=0.0,
            )
            b = tl.load(
                b_ptr + k[:, None] * N + n[None, :],
                mask=(k[:, None] < K) & (n[None, :] < N),
                other=0.0,
            )
            acc = tl.dot(a, b, acc)
        mask = (m[:, None] < M) & (n[None, :] < N)
        tl.store(c_ptr + m[:, None] * N + n[None, :], acc.to(tl.float16), mask=mask)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("shape", [(100, 72, 48), (64, 64, 0), (33, 130, 16)], ids=str)
def test_persistent_matmul_flattened(device, shape, num_stages):
    m, n, k = shape
    a, b = (
        torch.randn(m, max(k, 1), device=device).half(),
        torch.randn(max(k, 1), n, device=device).half(),
    )
    c = torch.full((m, n), 9.0, device=device).half()
    persistent_flat_kernel[(3,)](a, b, c, m, n, k, 32, 64, 16, PROGRAMS=3, num_stages=num_stages)
    torch.testing.assert_close(c.float(), a[:, :k].float() @ b[:k].float(), rtol=2e-3, atol=1e-2)
