"""tl.dot in every dtype and layout it takes, and matmul kernels around it."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def dot_kernel(
    a_ptr, b_ptr, c_ptr, stride_am, stride_ak, stride_bk, stride_bn,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak)
    b = tl.load(b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn)
    c_ptrs = c_ptr + m[:, None] * N + n[None, :]
    if ACC:
        c = tl.dot(a, b, tl.load(c_ptrs), input_precision=PRECISION)
    else:
        c = tl.dot(a, b, input_precision=PRECISION)
    tl.store(c_ptrs, c)


def operands(shape, dtype, device, a_transposed, b_transposed):
    m, n, k = shape
    if dtype == torch.int8:
        a = torch.randint(-128, 127, (m, k), dtype=dtype, device=device)
        b = torch.randint(-128, 127, (k, n), dtype=dtype, device=device)
    else:
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(k, n, device=device).to(dtype)
    if a_transposed:
        a = a.T.contiguous().T
    if b_transposed:
        b = b.T.contiguous().T
    return a, b


def run_dot(shape, dtype, device, a_t=False, b_t=False, precision=None, acc=False, num_warps=4):
    a, b = operands(shape, dtype, device, a_t, b_t)
    out_dtype = (
        torch.int32
        if dtype == torch.int8
        else torch.float64
        if dtype == torch.float64
        else torch.float32
    )
    c = (torch.randn(shape[0], shape[1], device=device) * 10).to(out_dtype)
    expected = a.double() @ b.double() + (c.double() if acc else 0)
    dot_kernel[(1,)](
        a, b, c, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        *shape, PRECISION=precision, ACC=acc, num_warps=num_warps,
    )  # fmt: skip
    scale = (a.double().abs() @ b.double().abs()).clamp(min=1e-6)
    return ((c.double() - expected).abs() / scale).max().item()


SHAPES = [(16, 16, 16), (64, 64, 32), (128, 64, 64), (32, 128, 16), (64, 16, 128)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_warps", [1, 4, 8])
def test_half(device, shape, dtype, num_warps):
    assert run_dot(shape, dtype, device, num_warps=num_warps) < 1e-6


@pytest.mark.parametrize("a_t", [False, True])
@pytest.mark.parametrize("b_t", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
def test_operand_orders(device, dtype, a_t, b_t):
    assert run_dot((64, 32, 64), dtype, device, a_t, b_t, acc=True) < 2e-3


def test_fp32_precisions(device):
    tf32 = run_dot((64, 64, 64), torch.float32, device, precision="tf32")
    tf32x3 = run_dot((64, 64, 64), torch.float32, device, precision="tf32x3")
    ieee = run_dot((64, 64, 64), torch.float32, device, precision="ieee")
    bf16x3 = run_dot((64, 64, 64), torch.float32, device, precision="bf16x3")
    bf16x6 = run_dot((64, 64, 64), torch.float32, device, precision="bf16x6")
    assert 1e-7 < bf16x3 < 3e-5
    assert bf16x6 < 3e-6
    assert 1e-6 < tf32 < 1e-3
    assert tf32x3 < 3e-6
    assert ieee < 2e-7


@pytest.mark.parametrize("shape", [(32, 32, 32), (64, 16, 64)], ids=str)
def test_int8(device, shape):
    assert run_dot(shape, torch.int8, device, acc=True) == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8(device, dtype):
    assert run_dot((64, 32, 64), dtype, device) < 1e-3


def test_fp64(device):
    assert run_dot((16, 32, 16), torch.float64, device, precision="ieee") < 1e-15


@triton.jit
def fp16_accumulator_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    c = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets), out_dtype=tl.float16)
    tl.store(c_ptr + offsets, c)


def test_fp16_accumulator(device):
    a, b = (torch.randn(32, 32, device=device).half() for _ in range(2))
    c = torch.empty_like(a)
    fp16_accumulator_kernel[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c.float(), a.float() @ b.float(), rtol=2e-2, atol=5e-2)


@triton.jit
def batched_kernel(
    a_ptr, b_ptr, c_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    g, m, n, k = tl.arange(0, B), tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + g[:, None, None] * (M * K) + m[None, :, None] * K + k[None, None, :])
    b = tl.load(b_ptr + g[:, None, None] * (K * N) + k[None, :, None] * N + n[None, None, :])
    c = tl.dot(a, b)
    tl.store(c_ptr + g[:, None, None] * (M * N) + m[None, :, None] * N + n[None, None, :], c)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_batched(device, batch):
    a = torch.randn(batch, 32, 16, device=device).half()
    b = torch.randn(batch, 16, 32, device=device).half()
    c = torch.empty(batch, 32, 32, device=device)
    batched_kernel[(1,)](a, b, c, batch, 32, 32, 16)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-4)


@triton.jit
def chained_kernel(a_ptr, b_ptr, c_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    first = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets))
    second = tl.dot(first.to(tl.float16), tl.load(c_ptr + offsets))
    tl.store(out_ptr + offsets, second)


@pytest.mark.parametrize("n", [16, 32, 64])
def test_chained_dots(device, n):
    a, b, c = (torch.randn(n, n, device=device).half() for _ in range(3))
    out = torch.empty(n, n, device=device)
    chained_kernel[(1,)](a, b, c, out, N=n)
    expected = (a.float() @ b.float()).half().float() @ c.float()
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=5e-2)


@triton.jit
def transposed_operand_kernel(a_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    a = tl.load(a_ptr + offsets)
    tl.store(out_ptr + offsets, tl.dot(a, tl.trans(a)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_times_its_transpose(device, dtype):
    a = torch.randn(64, 64, device=device).to(dtype)
    out = torch.empty(64, 64, device=device)
    transposed_operand_kernel[(1,)](a, out, N=64)
    expected = a.double() @ a.double().T
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=5e-2)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP_M * num_n)
    first_m = group * GROUP_M
    size_m = min(num_m - first_m, GROUP_M)
    pid_m = first_m + (pid % (GROUP_M * num_n)) % size_m
    pid_n = (pid % (GROUP_M * num_n)) // size_m
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc += tl.dot(a, b)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    c_ptrs = c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn
    tl.store(
        c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=(offs_m[:, None] < M) & (offs_n[None, :] < N)
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "shape", [(128, 128, 128), (100, 72, 40), (33, 65, 129), (64, 64, 16)], ids=str
)
@pytest.mark.parametrize("b_t", [False, True])
def test_matmul_pipelined(device, shape, num_stages, b_t):
    m, n, k = shape
    a, b = operands(shape, torch.float16, device, False, b_t)
    c = torch.full((m, n), float("nan"), device=device, dtype=torch.float16)
    grid = (triton.cdiv(m, 64) * triton.cdiv(n, 32),)
    matmul_kernel[grid](
        a, b, c, m, n, k,
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, GROUP_M=8, num_stages=num_stages,
    )  # fmt: skip
    expected = a.double() @ b.double()
    assert (c.double() - expected).norm() / expected.norm() < 5e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_matmul_dtypes(device, dtype):
    m, n, k = 96, 80, 112
    a, b = operands((m, n, k), dtype, device, False, False)
    c = torch.empty((m, n), device=device, dtype=torch.float32)
    matmul_kernel[(triton.cdiv(m, 64) * triton.cdiv(n, 64),)](
        a, b, c, m, n, k,
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=4, num_warps=8,
    )  # fmt: skip
    expected = a.double() @ b.double()
    assert (c.double() - expected).norm() / expected.norm() < 1e-3


def test_matmul_with_an_empty_k_loop(device):
    a = torch.zeros((64, 0), device=device, dtype=torch.float16)
    c = torch.full((64, 32), 7.0, device=device, dtype=torch.float16)
    dummy = torch.zeros(64 * 64, device=device, dtype=torch.float16)
    matmul_kernel[(1,)](
        dummy, dummy, c, 64, 32, 0, 1, 1, 32, 1, 32, 1,
        BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, GROUP_M=8, num_stages=3,
    )  # fmt: skip
    assert a.shape[1] == 0
    assert (c == 0).all()


@triton.jit
def persistent_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr
):
    num_n = tl.cdiv(N, BLOCK)
    tiles = tl.cdiv(M, BLOCK) * num_n
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, PROGRAMS):
        offs_m = (tile // num_n) * BLOCK + tl.arange(0, BLOCK)
        offs_n = (tile % num_n) * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros((BLOCK, BLOCK), tl.float32)
        for k in range(0, K, BLOCK_K):
            inside = (k + offs_k) < K
            a = tl.load(
                a_ptr + offs_m[:, None] * K + (k + offs_k)[None, :],
                mask=(offs_m[:, None] < M) & inside[None, :],
                other=0.0,
            )
            b = tl.load(
                b_ptr + (k + offs_k)[:, None] * N + offs_n[None, :],
                mask=inside[:, None] & (offs_n[None, :] < N),
                other=0.0,
            )
            acc = tl.dot(a, b, acc)
        tl.store(
            c_ptr + offs_m[:, None] * N + offs_n[None, :],
            acc,
            mask=(offs_m[:, None] < M) & (offs_n[None, :] < N),
        )


def test_persistent_matmul(device):
    m, n, k = 100, 150, 72
    a, b = operands((m, n, k), torch.float16, device, False, False)
    c = torch.empty((m, n), device=device)
    persistent_kernel[(3,)](a, b, c, m, n, k, BLOCK=32, BLOCK_K=32, PROGRAMS=3)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-3)


@triton.jit
def unsigned_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    tl.store(c_ptr + offsets, tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)))


def test_uint8_operands_are_unsigned(device):
    a, b = (torch.randint(0, 256, (32, 32), dtype=torch.uint8, device=device) for _ in range(2))
    c = torch.empty(32, 32, dtype=torch.int32, device=device)
    unsigned_kernel[(1,)](a, b, c, N=32)
    assert torch.equal(c.double(), a.double() @ b.double())


@pytest.mark.parametrize("shape", [(1, 64, 32), (4, 4, 64), (8, 16, 128), (64, 1, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8], ids=str)
def test_rows_or_columns_below_the_instruction(device, shape, dtype):
    assert run_dot(shape, dtype, device, acc=True) < 2e-3


@triton.jit
def mixed_fp8_kernel(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    offsets = i[:, None] * N + i[None, :]
    tl.store(c_ptr + offsets, tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)))


def test_two_kinds_of_fp8(device):
    a = torch.randn(32, 32, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(32, 32, device=device).to(torch.float8_e5m2)
    c = torch.empty(32, 32, device=device)
    mixed_fp8_kernel[(1,)](a, b, c, N=32)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)


@triton.jit
def loop_stages_kernel(a_ptr, b_ptr, c_ptr, K, N: tl.constexpr, STAGES: tl.constexpr):
    i = tl.arange(0, N)
    acc = tl.zeros((N, N), tl.float32)
    for k in tl.range(0, K, N, num_stages=STAGES):
        a = tl.load(a_ptr + i[:, None] * K + (k + i)[None, :])
        b = tl.load(b_ptr + (k + i)[:, None] * N + i[None, :])
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + i[:, None] * N + i[None, :], acc)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_loop_says_its_own_number_of_stages(device, stages):
    a, b = (torch.randn(shape, device=device).half() for shape in ((32, 160), (160, 32)))
    c = torch.empty(32, 32, device=device)
    compiled = loop_stages_kernel[(1,)](a, b, c, 160, N=32, STAGES=stages, num_stages=1)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-3)
    assert ("cp.async" in compiled.asm["ptx"]) == (stages > 1)
