"""Products, attention and a persistent matmul written with descriptors and block pointers."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.tools.tensor_descriptor import TensorDescriptor

ORDERS = ["nn", "nt", "tn", "tt"]


def operands(order, m, n, k, device, dtype=torch.float16):
    """a (m, k) and b (k, n); "t" is one whose first dimension is contiguous."""
    unit = 8
    made = []
    for letter, (rows, cols) in zip(order, ((m, k), (k, n)), strict=True):
        if letter == "t":
            rows, cols = cols, rows
        width = (cols + unit - 1) // unit * unit
        x = torch.randn(rows, width, device=device).to(dtype)[:, :cols]
        made.append(x.T if letter == "t" else x)
    return made


def close(c, a, b):
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=2e-3, atol=2e-2)


def pipelined(compiled):
    """Whether all loads that feed dots are copied ahead."""
    remarks = str(compiled.metadata["remarks"])
    return "pipelined in 3 stages" in remarks and "not pipelined" not in remarks


@triton.jit
def descriptor_matmul_kernel(
    a, b, c, K, A_T: tl.constexpr, B_T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = a.load([k, m]).T if A_T else a.load([m, k])
        y = b.load([n, k]).T if B_T else b.load([k, n])
        total = tl.dot(x, y, total)
    c.store([m, n], total)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape, warps", [((104, 72, 88), 4), ((128, 136, 40), 8)], ids=str)
def test_matmul_with_host_descriptors(device, order, shape, warps):
    m, n, k = shape
    a, b = operands(order, m, n, k, device)
    c = torch.zeros(m, n, device=device, dtype=torch.float16)
    flipped = [letter == "t" for letter in order]
    blocks = [(64, 32), (32, 64)]
    descriptors = [
        TensorDescriptor.from_tensor(x.T if flip else x, block[::-1] if flip else block)
        for x, flip, block in zip((a, b), flipped, blocks, strict=True)
    ]
    compiled = descriptor_matmul_kernel[(triton.cdiv(m, 64), triton.cdiv(n, 64))](
        *descriptors, TensorDescriptor.from_tensor(c, [64, 64]), k, *flipped,
        BM=64, BN=64, BK=32, num_warps=warps,
    )  # fmt: skip
    close(c, a, b)
    assert pipelined(compiled)


@triton.jit
def block_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, a_strides, b_strides, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    a = tl.make_block_ptr(a_ptr, (M, K), a_strides, (m, 0), (BM, BK), (1, 0))
    b = tl.make_block_ptr(b_ptr, (K, N), b_strides, (0, n), (BK, BN), (1, 0))
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        x = tl.load(a, boundary_check=(0, 1), padding_option="zero")
        y = tl.load(b, boundary_check=(1, 0))
        total = tl.dot(x, y, total)
        a = tl.advance(a, (0, BK))
        b = tl.advance(b, (BK, 0))
    c = tl.make_block_ptr(c_ptr, (M, N), (c_stride, 1), (m, n), (BM, BN), (1, 0))
    tl.store(c, total.to(c.dtype.element_ty), boundary_check=(0, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(112, 80, 80), (99, 67, 51)], ids=str)
def test_matmul_with_block_pointers(device, order, shape):
    m, n, k = shape
    a, b = operands(order, m, n, k, device)
    c = torch.zeros(m, n, device=device, dtype=torch.float16)
    compiled = block_matmul_kernel[(2, 2)](
        a, b, c, m, n, k, a.stride(), b.stride(), c.stride(0), BM=64, BN=64, BK=32
    )
    close(c, a, b)
    if m % 16 == 0:  # else no row is known to be aligned
        assert pipelined(compiled)


@triton.jit
def as_descriptor(pointer, shape, strides, block_shape: tl.constexpr):
    """What a caller passes as a descriptor stays one; of a pointer one is made."""
    if isinstance(pointer, tl.tensor_descriptor):
        return pointer
    return tl.make_tensor_descriptor(pointer, shape, strides, block_shape)


@triton.jit
def attention_kernel(
    q, k, v, o, length, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):
    q = as_descriptor(q, [length, D], [D, 1], [BM, D])
    k = as_descriptor(k, [length, D], [D, 1], [BN, D])
    v = as_descriptor(v, [D, length], [length, 1], [D, BN])  # transposed, as fp8 wants it
    o = as_descriptor(o, [length, D], [D, 1], [BM, D])
    first = tl.program_id(0) * BM
    query = q.load([first, 0])
    top = tl.full((BM,), float("-inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for start in tl.range(0, length, BN):
        score = tl.dot(query, k.load([start, 0]).T) * scale
        score = tl.where(start + tl.arange(0, BN)[None, :] < length, score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - peak[:, None])
        rescale = tl.exp2(top - peak)
        weight = weight * rescale + tl.sum(p, 1)
        total = total * rescale[:, None]
        total = tl.dot(p.to(q.dtype), v.load([0, start]).T, total)
        top = peak
    o.store([first, 0], total / weight[:, None])


@pytest.mark.parametrize("on_host", [True, False])
def test_attention(device, on_host):
    length, d = 72, 32
    q, k, v = (torch.randn(length, d, device=device).half() for _ in range(3))
    across = v.T.contiguous()
    o = torch.zeros_like(q)
    arrays, blocks = (q, k, across, o), ([64, d], [32, d], [d, 32], [64, d])
    if on_host:
        arrays = [TensorDescriptor.from_tensor(x, b) for x, b in zip(arrays, blocks, strict=True)]
    scale = d**-0.5 / 0.6931471805599453
    attention_kernel[(2,)](*arrays, length, scale, BM=64, BN=32, D=d)
    expected = torch.softmax(q.double() @ k.double().T * d**-0.5, 1) @ v.double()
    torch.testing.assert_close(o.double(), expected, rtol=2e-3, atol=2e-3)


@triton.jit
def tile_of(tile_id, per_group, tiles_m, GROUP: tl.constexpr):
    """Row and column of a tile; rows are taken in groups, for the L2 cache."""
    first = tile_id // per_group * GROUP
    height = min(tiles_m - first, GROUP)
    return first + tile_id % per_group % height, tile_id % per_group // height


@triton.jit(launch_metadata=lambda grid, kernel, args: {})
def persistent_matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr, BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr, EPILOGUE_SUBTILE: tl.constexpr, NUM_SMS: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """C = A @ B.T; each program takes every NUM_SMS-th tile, all memory by descriptors."""
    dtype: tl.constexpr = c_ptr.dtype.element_ty
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
    a_desc = tl.make_tensor_descriptor(
        a_ptr, shape=[M, K], strides=[K, 1], block_shape=[BLOCK_SIZE_M, BLOCK_SIZE_K]
    )
    b_desc = tl.make_tensor_descriptor(
        b_ptr, shape=[N, K], strides=[K, 1], block_shape=[BLOCK_SIZE_N, BLOCK_SIZE_K]
    )
    c_desc = tl.make_tensor_descriptor(
        c_ptr,
        shape=[M, N],
        strides=[N, 1],
        block_shape=[
            BLOCK_SIZE_M,
            BLOCK_SIZE_N if not EPILOGUE_SUBTILE else BLOCK_SIZE_N // 2,
        ],
    )
    per_group = GROUP_SIZE_M * tiles_n
    for tile_id in tl.range(
        tl.program_id(0), tiles_m * tiles_n, NUM_SMS,
        flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE,
    ):  # fmt: skip
        row, column = tile_of(tile_id, per_group, tiles_m, GROUP_SIZE_M)
        m, n = row * BLOCK_SIZE_M, column * BLOCK_SIZE_N
        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
        for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
            k = step * BLOCK_SIZE_K
            a = a_desc.load([m, k])
            b = b_desc.load([n, k])
            total = tl.dot(a, b.T, total)
        if EPILOGUE_SUBTILE:
            halves = tl.reshape(total, (BLOCK_SIZE_M, 2, BLOCK_SIZE_N // 2))
            left, right = tl.split(tl.permute(halves, (0, 2, 1)))
            c_desc.store([m, n], left.to(dtype))
            c_desc.store([m, n + BLOCK_SIZE_N // 2], right.to(dtype))
        else:
            c_desc.store([m, n], total.to(dtype))


def persistent_matmul(a, b, subtile):
    """The host side as in Triton's tutorials, with an allocator for descriptors."""
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    sms = 3

    def alloc_fn(size: int, alignment: int, stream: int | None):
        return torch.empty(size, device=a.device, dtype=torch.int8)

    triton.set_allocator(alloc_fn)
    grid = lambda META: (
        min(sms, triton.cdiv(m, META["BLOCK_SIZE_M"]) * triton.cdiv(n, META["BLOCK_SIZE_N"])),
    )
    compiled = persistent_matmul_kernel[grid](
        a, b, c, m, n, k, BLOCK_SIZE_M=64, BLOCK_SIZE_N=64, BLOCK_SIZE_K=32, GROUP_SIZE_M=2,
        EPILOGUE_SUBTILE=subtile, NUM_SMS=sms, WARP_SPECIALIZE=False, FLATTEN=True,
        num_stages=3, num_warps=4,
    )  # fmt: skip
    return c, compiled


@pytest.mark.parametrize("subtile", [True, False])
def test_persistent_matmul(device, subtile):
    a = torch.randn(200, 80, device=device).half()
    b = torch.randn(136, 80, device=device).half()
    c, compiled = persistent_matmul(a, b, subtile)
    close(c, a, b.T)
    assert pipelined(compiled)


@triton.jit
def forward(block, steps):
    for _ in range(steps):
        block = tl.advance(block, (4, 0))
    return block


@triton.jit
def walk_kernel(x, out, rows, stride, skip):
    """The rows of `x` in blocks of 4: all blocks at first, then every other one, last ones back."""
    block = tl.make_block_ptr(x, (rows, 16), (stride, 1), (0, 0), (4, 16), (1, 0))
    total = tl.zeros((4, 16), tl.float32)
    at = 0
    while at < rows:
        total = total * 2 + tl.load(block, boundary_check=(0,))
        if at < skip:
            block, at = tl.advance(block, (4, 0)), at + 4
        else:
            block = forward(block, 2)
            at += 8
    for outer in range(2):
        for _ in tl.range(0, 2):
            block = tl.advance(block, (-4, 0))
            total += tl.load(block, boundary_check=(0, 1)) * (outer + 1)
    end = block if skip > 0 else forward(block, 1)
    tl.store(end, total, boundary_check=(0,))
    desc = tl.make_tensor_descriptor(out, [4, 16], [16, 1], [4, 16])
    desc.store([0, 0], total)


@pytest.mark.parametrize("rows, skip", [(30, 9), (16, 0), (5, 100)])
def test_block_pointers_through_control_flow(device, rows, skip):
    x = torch.randint(-9, 9, (rows, 24), device=device).float()[:, :16]
    out = torch.zeros(4, 16, device=device)
    kept = x.cpu().clone()
    rounded = torch.cat([torch.zeros(64, 16), kept, torch.zeros(64, 16)])
    total, at = torch.zeros(4, 16), 0
    while at < rows:
        total = total * 2 + rounded[64 + at : 68 + at]
        at += 4 if at < skip else 8
    for outer in range(2):
        for _ in range(2):
            at -= 4
            total += rounded[64 + at : 68 + at] * (outer + 1)
    end = at if skip > 0 else at + 4
    for row in range(4):
        if 0 <= end + row < rows:
            kept[end + row] = total[row]
    walk_kernel[(1,)](x, out, rows, x.stride(0), skip)
    assert torch.equal(out.cpu(), total)
    assert torch.equal(x.cpu(), kept)
