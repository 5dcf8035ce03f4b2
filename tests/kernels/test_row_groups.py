"""Kernels of 12 warps: three groups with a third of each program's rows, and one producer warp."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import execute
from minitriton.ir.diagnostics import CompileError
from minitriton.tools.tensor_descriptor import TensorDescriptor
from tests.codegen.split_kernels import attention_kernel
from tests.kernels.test_rings import gradients_of_attention
from tests.kernels.test_tma import BF16, descriptor_kernel, error_of
from tests.kernels.test_warp_split import (
    NAN,
    attention_error,
    heads,
    is_split,
    once,
    only_gpu,
    operands,
    product,
)

pytestmark = pytest.mark.usefixtures("hopper")


def is_shared(compiled, persistent=True):
    """Whether three groups share the programs."""
    shared = compiled.metadata.get("row_groups") == 3 and compiled.num_warps == 16
    return shared and is_split(compiled, persistent)


@pytest.fixture(params=[1, 2])
def ctas(request, monkeypatch):
    """So many CTAs for all programs, in the emulator."""
    monkeypatch.setattr(execute, "EMULATED_CTAS", request.param)


@pytest.mark.parametrize(
    ("shape", "blocks", "b_t"),
    [
        ((192, 128, 64), (192, 128, 64), False),
        ((31, 77, 131), (192, 128, 64), True),
        ((450, 300, 335), (192, 128, 64), False),
        ((259, 131, 77), (192, 128, 64), True),
        ((200, 270, 203), (192, 256, 64), False),
        ((450, 256, 192), (192, 256, 64), True),
        ((391, 330, 140), (192, 160, 64), False),
        ((391, 230, 140), (192, 224, 32), True),
        ((391, 230, 140), (384, 128, 64), False),
    ],
    ids=str,
)
def test_products(device, ctas, shape, blocks, b_t):
    """Of one program and several, of one iteration and several, all edges inside of tiles."""
    a, b, c = operands(device, *shape, b_t)
    compiled = product(a, b, c, blocks, num_warps=12)
    assert is_shared(compiled) and error_of(a, b, c) < 1e-3


@pytest.mark.parametrize("b_t", [False, True])
def test_products_of_bf16(device, b_t):
    a, b, c = (x.to(BF16) for x in operands(device, 400, 208, 160, b_t))
    b = b.T.contiguous().T if b_t else b
    assert is_shared(product(a, b, c, (192, 128, 64), num_warps=12)) and error_of(a, b, c) < 1e-2


@pytest.mark.parametrize(
    ("dtype", "result", "depth"), [(torch.int8, torch.int32, 128), (torch.float32,) * 2 + (32,)]
)
def test_other_types(device, dtype, result, depth):
    """Bytes, whose B threads turn over first, and tf32."""
    m, n, k = 400, 208, 160
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if dtype == torch.int8:
        a, b = ((x * 40).to(dtype) for x in (a, b))
    c = torch.full((m, n), 7, device=device, dtype=result)
    compiled = product(a, b.T, c, (192, 128, depth), num_warps=12)
    expected = a.double() @ b.T.double()
    scale = a.double().abs() @ b.T.double().abs()
    assert is_shared(compiled)
    assert ((c.double() - expected).abs() / scale).max() < (1e-3 if depth == 32 else 1e-12)


@once
@pytest.mark.parametrize("stages", [2, 4])
def test_products_that_land_at_random(device, at_random, ctas, stages):
    a, b, c = operands(device, 390, 300, 203, False)
    compiled = product(a, b, c, (192, 128, 64), num_warps=12, num_stages=stages)
    assert is_shared(compiled) and error_of(a, b, c) < 1e-3


def test_grids_of_two_dimensions(device):
    """By descriptors."""
    m, n, k = 300, 150, 200
    a = torch.randn(m, 208, device=device).to(BF16)[:, :k]
    b = torch.randn(k, 160, device=device).to(BF16)[:, :n]
    c = torch.full((m, 160), NAN, device=device)
    compiled = descriptor_kernel[(2, 2)](
        TensorDescriptor.from_tensor(a, [192, 64]), TensorDescriptor.from_tensor(b, [64, 128]), c,
        m, 160, k, 192, 128, 64, num_warps=12,
    )  # fmt: skip
    assert is_shared(compiled) and error_of(a, b, c[:, :n]) < 1e-6


@triton.jit
def tile_product(
    a_ptr, b_ptr, M, N, K, rm, rn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Rows rm of A times columns rn of B, both dense."""
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        a = tl.load(
            a_ptr + rm[:, None] * K + (k + rk)[None, :],
            mask=(rm < M)[:, None] & (k + rk < K)[None, :], other=0.0,
        )  # fmt: skip
        b = tl.load(
            b_ptr + (k + rk)[:, None] * N + rn[None, :],
            mask=(k + rk < K)[:, None] & (rn < N)[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def busy_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, peak_ptr, sum_ptr, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """relu(A @ B + bias) + residual, the largest of each row, and sums by atomics."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rm = tl.max_contiguous(tl.multiple_of(rm, BM), BM)
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    acc = tile_product(a_ptr, b_ptr, M, N, K, rm, rn, BM, BN, BK)
    acc += tl.load(bias_ptr + rn, mask=rn < N, other=0.0)[None, :]
    at = rm[:, None] * N + rn[None, :]
    acc = tl.maximum(acc, 0.0)
    acc += tl.load(residual_ptr + at, mask=inside, other=0.0)
    tl.store(peak_ptr + rm * tl.num_programs(1) + tl.program_id(1),
             tl.max(tl.where(inside, acc, float("-inf")), 1), mask=rm < M)  # fmt: skip
    tl.atomic_add(sum_ptr + rm, tl.sum(tl.where(inside, acc, 0.0), 1), mask=rm < M)
    tl.store(c_ptr + at, acc, mask=inside)


@once
@pytest.mark.parametrize("n", [96, 208])
def test_an_end_of_many_steps(device, at_random, ctas, n):
    """Rows, a residual, reductions of rows: each group has its own, and the scratch for it."""
    m, k = 500, 144
    a, b = (torch.randn(shape, device=device).to(BF16) / 4 for shape in ((m, k), (k, n)))
    bias, residual = torch.randn(n, device=device), torch.randn(m, n, device=device)
    columns = triton.cdiv(n, 96)
    c, peak = (torch.full((m, width), NAN, device=device) for width in (n, columns))
    total = torch.zeros(m, device=device)
    compiled = busy_kernel[(3, columns)](
        a, b, bias, residual, c, peak, total, m, n, k, 192, 96, 64, num_warps=12, num_stages=2
    )
    expected = (a.double() @ b.double() + bias).clamp(min=0) + residual
    assert is_shared(compiled)
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.double(), expected.sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(peak.amax(1), c.amax(1), rtol=0, atol=0)


def attend(q, k, v, out, causal, columns):
    count, tokens, d = q.shape
    return attention_kernel[(triton.cdiv(tokens, 192), count)](
        q, k, v, out, d**-0.5, tokens, d, 192, columns, causal, num_warps=12, num_stages=2
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("tokens", "d", "columns"), [(48, 64, 128), (500, 64, 128), (333, 64, 96), (430, 128, 80)]
)
def test_attention(device, tokens, d, columns, causal):
    tensors = heads(device, tokens, d)
    compiled = attend(*tensors, causal, columns)
    assert is_shared(compiled, not causal) and attention_error(*tensors, causal) < 1e-2


@once
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "columns"), [(64, 128), (128, 64)])
def test_attention_that_lands_at_random(device, at_random, d, columns, causal):
    """Three groups take turns, in any order of warps."""
    tensors = heads(device, 450, d)
    compiled = attend(*tensors, causal, columns)
    assert is_shared(compiled, not causal) and attention_error(*tensors, causal) < 1e-2


@once
@pytest.mark.parametrize(("group", "causal"), [(1, False), (2, True)])
def test_gradients_of_attention_from_plain_source(device, at_random, group, causal):
    """Four and three products in a loop; loops in a loop."""
    keys, queries = (48, 192, 12, 2), (192, 64, 12, 2)
    made = gradients_of_attention(device, 384, 64, group, causal, keys, queries)
    assert all(is_shared(kernel, kernel.persistent) for kernel in made)


@triton.jit
def held_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, T, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Causal attention in two loops: without a mask, and at the diagonal; q is loaded once."""
    first, base = tl.program_id(0) * BM, tl.program_id(1) * T * D
    rows, dims = first + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + base + rows[:, None] * D + dims[None, :], mask=rows[:, None] < T, other=0.0)
    peak = tl.full([BM], -float("inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for part in tl.static_range(2):
        for start in range(0 if part == 0 else first, first if part == 0 else first + BM, BN):
            keys = start + tl.arange(0, BN)
            k = tl.load(
                k_ptr + base + keys[None, :] * D + dims[:, None], mask=keys[None, :] < T, other=0.0
            )
            scores = tl.dot(q, k)
            if part == 1:
                scores = tl.where(rows[:, None] >= keys[None, :], scores, -float("inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            p = tl.math.exp2(scores - higher[:, None])
            alpha = tl.math.exp2(peak - higher)
            weight = weight * alpha + tl.sum(p, 1)
            v = tl.load(
                v_ptr + base + keys[:, None] * D + dims[None, :], mask=keys[:, None] < T, other=0.0
            )
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
            peak = higher
    out = (acc / weight[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + base + rows[:, None] * D + dims[None, :], out, mask=rows[:, None] < T)


@once
@pytest.mark.parametrize(("d", "columns"), [(64, 64), (64, 96), (128, 64)])
def test_loops_that_share_their_rings(device, at_random, ctas, d, columns):
    """Two loops go on in the rings and with the turns where the last one stopped; q is in registers
    or in shared memory, a tile for each group."""
    q, k, v, out = heads(device, 410, d)
    compiled = held_kernel[(3, 2)](
        q / d**0.5, k, v, out, 410, d, 192, columns, num_warps=12, num_stages=2
    )
    assert is_shared(compiled, False)
    assert attention_error(q, k, v, out, True) < 1e-2


def test_what_cannot_be_split_is_refused(device, monkeypatch):
    """The message has the line, what is amiss there and what to do."""
    a, b, c = operands(device, 200, 100, 128, False)
    with pytest.raises(CompileError, match=r"128 rows, no multiple of 192(.|\n)*use 4 or 8"):
        product(a, b, c, (128, 128, 64), num_warps=12)
    with pytest.raises(CompileError, match=r"load not by TMA: the address(.|\n)*use 4 or 8"):
        product(a, b[:, 1:], c[:, 1:], (192, 128, 64), num_warps=12)
    monkeypatch.setenv("MINITRITON_SPECIALIZE", "0")
    with pytest.raises(CompileError, match="switched off"):
        product(a, b, c, (192, 128, 64), num_warps=12)
    if device == "cpu":
        monkeypatch.setenv("MINITRITON_TARGET", "sm_80")
        with pytest.raises(CompileError, match="sm_80 has no producer warps"):
            product(a, b, c, (192, 128, 64), num_warps=12)


def test_no_other_form_takes_its_place(device):
    """A launch that no tensor map describes, or too much shared memory: errors, too."""
    a, b, c = operands(device, 200, 100, 128, False)
    with pytest.raises(CompileError, match="cannot describe a tensor of this launch"):
        product(a, b, c, (192, 128, 64), k=0, num_warps=12)
    assert is_shared(product(a, b, c, (192, 128, 64), num_warps=12)) and error_of(a, b, c) < 1e-3


@only_gpu
@pytest.mark.parametrize("case", ["product", "product, [N, K]", "attention", "causal attention"])
def test_runs_are_bitwise_equal(device, case):
    """A race would show as a run that differs."""
    size = 1152
    if "product" in case:
        a, b, c = operands(device, size, size, size, case != "product")
        run = lambda: (product(a, b, c.fill_(NAN), (192, 192, 64), num_warps=12), c)[1]
    else:
        tensors, causal = heads(device, size, 64), case != "attention"
        run = lambda: (attend(*tensors, causal, 128), tensors[3])[1]
    first = run().clone()
    for _ in range(600):
        assert torch.equal(run(), first)


@triton.jit
def end_kernel(
    a_ptr, b_ptr, c_ptr, other_ptr, x_ptr, where_ptr, M, N, K, steps,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A @ B, one block of columns wide, and then something else."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    acc = tile_product(a_ptr, b_ptr, M, N, K, rm, rn, BM, BN, BK)
    if KIND == "softmax":
        acc = tl.exp(acc - tl.max(acc, 1, keep_dims=True))
        acc = tl.where(inside, acc, 0.0)
        acc = acc / tl.sum(acc, 1, keep_dims=True)
        tl.store(where_ptr + rm, tl.argmax(acc, 1), mask=rm < M)
    elif KIND == "transpose":
        tl.store(other_ptr + rn[:, None] * M + rm[None, :], tl.trans(acc), mask=tl.trans(inside))
    elif KIND == "loop of rows":
        for step in tl.range(0, steps, num_stages=3):
            at = step * M * N + rm[:, None] * N + rn[None, :]
            acc = acc * 0.5 + tl.load(x_ptr + at, mask=inside, other=0.0)
    elif KIND == "loop of a row":
        for step in tl.range(0, steps, num_stages=3):
            acc = acc * 0.5 + tl.load(x_ptr + step * N + rn, mask=rn < N, other=0.0)[None, :]
    elif KIND == "scatter":
        rows = tl.load(where_ptr + rm, mask=rm < M, other=0)
        tl.store(other_ptr + rows[:, None] * N + rn[None, :], acc, mask=inside)
    elif KIND == "pairs":
        left, right = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
        half = tl.arange(0, BN // 2)
        at = other_ptr + rm[:, None] * (N // 2) + half[None, :]
        tl.store(at, left * right, mask=(rm < M)[:, None] & (half < N // 2)[None, :])
    elif KIND == "branch":
        if steps > 2:
            acc += tl.sum(acc, 1)[:, None]
        else:
            acc -= 1
    elif KIND == "while":
        while steps > 0:
            acc = acc * 0.5 + 1
            steps -= 1
    elif KIND == "running sum":
        acc = tl.cumsum(acc, 1)
    elif KIND == "second product":
        w = tl.load(x_ptr + rn[:, None] * BN + rn[None, :])
        acc = tl.dot(acc.to(tl.float16), w.to(tl.float16))
    tl.store(c_ptr + rm[:, None] * N + rn[None, :], acc, mask=inside)


def end_of(kind, product_, x, where, steps):
    """(C, what else is stored or None) in fp64."""
    m, n = product_.shape
    result, other = product_, None
    if kind == "softmax":
        result = torch.softmax(product_, 1)
    elif kind == "transpose":
        other = product_.T
    elif kind in ("loop of rows", "loop of a row"):
        parts = x[: steps * m * n].view(steps, m, n)
        parts = x[: steps * n].view(steps, 1, n) if kind == "loop of a row" else parts
        for part in parts:
            result = result * 0.5 + part
    elif kind == "scatter":
        other = torch.empty_like(product_)
        other[where.long()] = product_
    elif kind == "pairs":
        other = product_[:, ::2] * product_[:, 1::2]
    elif kind == "branch":
        result = product_ + product_.sum(1, keepdim=True)
    elif kind == "while":
        for _ in range(steps):
            result = result * 0.5 + 1
    elif kind == "running sum":
        result = product_.cumsum(1)
    elif kind == "second product":
        result = product_.half().double() @ x[: n * n].view(n, n).half().double()
    return result, other


@once
@pytest.mark.parametrize(
    "kind",
    ["softmax", "transpose", "loop of rows", "loop of a row", "scatter", "pairs", "branch",
     "while", "running sum", "second product"],
)  # fmt: skip
def test_ends_of_all_kinds(device, at_random, kind):
    """Loops, branches, reductions and changes of layout after the products: by each group."""
    m, n, k, steps = 400, 64, 160, 4
    a, b = ((torch.randn(shape, device=device) / 4).half() for shape in ((m, k), (k, n)))
    c, other = torch.full((m, n), NAN, device=device), torch.full((m * n,), NAN, device=device)
    x = torch.randn(steps * m * n, device=device)
    where = torch.randperm(m, device=device).int()
    args = (a, b, c, other, x, where.clone(), m, n, k, steps, 192, 64, 64, kind)
    compiled = end_kernel[(3,)](*args, num_warps=12, num_stages=2)
    assert is_shared(compiled, compiled.persistent)
    expected, more = end_of(kind, a.double() @ b.double(), x.double(), where, steps)
    bound = 5e-2 if kind == "second product" else 1e-4
    torch.testing.assert_close(c.double(), expected, rtol=bound, atol=bound)
    if more is not None:
        made = other[: more.numel()].view(more.shape).double()
        torch.testing.assert_close(made, more, rtol=1e-4, atol=1e-4)
    if kind == "softmax":
        assert torch.equal(args[5].long(), expected.argmax(1))
