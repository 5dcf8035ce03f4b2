"""Kernels with a producer warp, many of them persistent: products and attention of odd sizes."""

import pytest
import torch

import minitriton as triton
from minitriton import execute
from minitriton.jit import compile_hooks
from minitriton.kernels.attention import attention, attention_reference
from minitriton.tools.tensor_descriptor import TensorDescriptor
from tests.codegen.split_kernels import attention_kernel, matmul_kernel
from tests.kernels.test_tma import BF16, batch_kernel, descriptor_kernel, error_of

BLOCKS = (128, 128, 64)
NAN = float("nan")

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
once = pytest.mark.parametrize("device", ["cpu-late", ON_GPU], indirect=True)  # landing at random
only_gpu = pytest.mark.parametrize("device", [ON_GPU], indirect=True)

pytestmark = pytest.mark.usefixtures("hopper")


def is_split(compiled, persistent=True):
    return compiled.metadata.get("producer_warps") == 4 and compiled.persistent == persistent


def operands(device, m, n, k, b_t):
    """Rows are longer than they look, so that they begin at multiples of 16 bytes."""
    wide_k, wide_n = -(-k // 16) * 16, -(-n // 16) * 16
    a = torch.randn(m, wide_k, device=device).half()[:, :k]
    b = torch.randn(n, wide_k, device=device).half()[:, :k].T
    if not b_t:
        b = torch.randn(k, wide_n, device=device).half()[:, :n]
    return a, b, torch.full((m, n), NAN, device=device, dtype=torch.float16)


def product(a, b, c, blocks=BLOCKS, k=None, num_warps=8, num_stages=3):
    (m, depth), n = a.shape, b.shape[1]
    tiles = triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1])
    return matmul_kernel[(tiles,)](
        a, b, c, m, n, depth if k is None else k, *a.stride(), *b.stride(), *c.stride(), *blocks, 2,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "b_t"),
    [
        ((128, 128, 64), False),
        ((31, 77, 131), True),
        ((128, 200, 335), True),
        ((259, 131, 77), False),
        ((131, 513, 64), True),
    ],
    ids=str,
)
def test_products(device, shape, b_t):
    """Of 1, 1, 2 (as many as the emulator has CTAs), 6 and 10 programs."""
    a, b, c = operands(device, *shape, b_t)
    assert is_split(product(a, b, c)) and error_of(a, b, c) < 1e-3


@once
def test_products_that_land_at_random(device, at_random):
    a, b, c = operands(device, 259, 131, 203, False)
    assert is_split(product(a, b, c)) and error_of(a, b, c) < 1e-3


def test_the_tile_of_the_benchmarks(device):
    a, b, c = operands(device, 131, 275, 203, True)
    assert is_split(product(a, b, c, (128, 256, 64))) and error_of(a, b, c) < 1e-3


def test_no_depth(device):
    """No tensor map describes it, so it goes to the form without any; the next one does not."""
    a, b, c = operands(device, 259, 131, 64, False)
    product(a, b, c, k=0)
    assert not c.any()
    assert is_split(product(a, b, c)) and error_of(a, b, c) < 1e-3


def test_more_programs_than_a_persistent_kernel_counts(device, monkeypatch):
    """They go to the form without TMA: here with a limit that is soon reached."""
    if device == "cuda":
        pytest.skip("launchers of the GPU are made once")
    monkeypatch.setattr(execute, "MAX_PROGRAMS", 2)
    a, b, c = operands(device, 259, 100, 70, False)
    compiled = product(a, b, c)
    assert error_of(a, b, c) < 1e-3 and compiled.report is compiled.without_tma().report
    a, b, c = operands(device, 200, 100, 70, False)
    compiled = product(a, b, c)
    assert error_of(a, b, c) < 1e-3 and compiled.report is not compiled.without_tma().report


def product_of_descriptors(device, shape, num_warps):
    """The kernel, for a grid of two dimensions, and the error of its result."""
    m, n, k = shape
    a = torch.randn(m, 208, device=device).to(BF16)[:, :k]
    b = torch.randn(k, 160, device=device).to(BF16)[:, :n]
    c = torch.full((m, 160), NAN, device=device)
    compiled = descriptor_kernel[(triton.cdiv(m, 128), triton.cdiv(n, 128))](
        TensorDescriptor.from_tensor(a, [128, 64]), TensorDescriptor.from_tensor(b, [64, 128]), c,
        m, 160, k, *BLOCKS, num_warps=num_warps,
    )  # fmt: skip
    return compiled, error_of(a, b, c[:, :n])


def product_of_batches(device, num_warps):
    """The kernel, for a grid of three dimensions, and the error of its result."""
    a = torch.randn(3, 144, 208, device=device).to(BF16)
    b = torch.randn(3, 208, 112, device=device).to(BF16)
    c = torch.full((3, 144, 112), NAN, device=device)
    compiled = batch_kernel[(2, 1, 3)](
        a, b, c, 144, 112, 208, a.stride(0), b.stride(0), 208, 112, *BLOCKS, num_warps=num_warps
    )
    return compiled, error_of(a, b, c)


@pytest.mark.parametrize("shape", [(100, 100, 128), (300, 150, 200)], ids=str)
def test_grids_of_two_dimensions(device, shape):
    compiled, error = product_of_descriptors(device, shape, 8)
    assert is_split(compiled) and error < 1e-6


@once
def test_batches_along_the_third_axis(device, at_random):
    compiled, error = product_of_batches(device, 8)
    assert is_split(compiled) and error < 1e-6


def heads(device, tokens, d, count=2):
    q, k, v = (torch.randn(count, tokens, d, device=device).to(BF16) for _ in "qkv")
    return q, k, v, torch.full_like(q, NAN)


def attend(q, k, v, out, causal):
    count, tokens, d = q.shape
    return attention_kernel[(triton.cdiv(tokens, 128), count)](
        q, k, v, out, d**-0.5, tokens, d, 128, 128, causal, num_warps=8, num_stages=2
    )


def attention_error(q, k, v, out, causal):
    scores = q.double() @ k.double().transpose(1, 2) * q.shape[2] ** -0.5 * 0.6931471805599453
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -float("inf"))
    return (out.double() - torch.softmax(scores, 2) @ v.double()).abs().max().item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("tokens", "d"), [(48, 64), (333, 64), (270, 128)])
def test_attention(device, tokens, d, causal):
    tensors = heads(device, tokens, d)
    compiled = attend(*tensors, causal)
    assert is_split(compiled, not causal) and attention_error(*tensors, causal) < 1e-2


@once
@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_lands_at_random(device, at_random, causal):
    tensors = heads(device, 270, 64)
    compiled = attend(*tensors, causal)
    assert is_split(compiled, not causal) and attention_error(*tensors, causal) < 1e-2


SPLIT = {  # of the library's attention, by width of the heads
    128: {"_forward_kernel", "_dq_kernel"},
    256: {"_forward_kernel", "_dkdv_kernel", "_dq_kernel"},
}


def gradients(inputs, grad, causal):
    """The library's attention of leaves, and its gradients."""
    out = attention(*inputs, causal=causal)
    return (out, *torch.autograd.grad(out, inputs, grad))


@once
@pytest.mark.parametrize(("d", "causal"), [(128, True), (256, False)])
def test_library_attention(device, at_random, d, causal):
    made = []
    compile_hooks.append(made.append)
    inputs = [torch.randn(1, 190, 1, d, device=device).to(BF16).requires_grad_() for _ in "qkv"]
    grad = torch.randn_like(inputs[0])
    ours = gradients(inputs, grad, causal)
    compile_hooks.remove(made.append)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected, _ = attention_reference(*wide, causal=causal)
    theirs = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for mine, right in zip(ours, theirs, strict=True):
        assert ((mine.double() - right).norm() / right.norm()).item() < 5e-3
    split = {kernel.name for kernel in made if kernel.metadata.get("producer_warps")}
    assert split == SPLIT[d] & {kernel.name for kernel in made}  # those not compiled before


REPEATED = ["product", "product, [N, K]", "attention", "causal attention", "library"]


@only_gpu
@pytest.mark.parametrize("case", REPEATED)
def test_runs_are_bitwise_equal(device, case):
    """A race would show as a run that differs."""
    size, repeats = 1024, 600
    match case:
        case "product" | "product, [N, K]":
            a, b, c = operands(device, size, size, size, case != "product")
            run = lambda: (product(a, b, c.fill_(NAN), (128, 256, 64)), c)[1:]
        case "library":
            inputs = [
                torch.randn(1, size, 2, 64, device=device).to(BF16).requires_grad_() for _ in "qkv"
            ]
            grad = torch.randn_like(inputs[0])
            run = lambda: gradients(inputs, grad, True)
        case _:
            tensors, causal = heads(device, size, 128), case != "attention"
            run = lambda: (attend(*tensors, causal), tensors[3])[1:]
    first = [x.clone() for x in run()]
    for _ in range(repeats):
        assert all(map(torch.equal, run(), first))
