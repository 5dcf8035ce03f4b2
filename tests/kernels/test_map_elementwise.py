"""tl.map_elementwise: branches and loops for single elements, several results, pack."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def selu_scalar(x, alpha):
    if x > 0:
        return x
    else:
        return alpha * (tl.exp(x) - 1)


@triton.jit
def gcd_scalar(a, b):
    """The greatest common divisor and how many steps it took."""
    steps = 0
    while b != 0:
        rest = a % b
        a = b
        b = rest
        steps += 1
    return a, steps


@triton.jit
def power_scalar(x, n):
    result = x * 0 + 1.0
    for i in range(n):
        if i % 2 == 0:
            result *= x
        else:
            result = result * x + 0.0
    return result


@triton.jit
def map_kernel(x_ptr, a_ptr, b_ptr, selu_ptr, gcd_ptr, steps_ptr, power_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, a, b = tl.load(x_ptr + i), tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(selu_ptr + i, tl.map_elementwise(selu_scalar, x, 1.5))
    divisor, steps = tl.map_elementwise(gcd_scalar, a, b)
    tl.store(gcd_ptr + i, divisor)
    tl.store(steps_ptr + i, steps)
    tl.store(power_ptr + i, tl.map_elementwise(power_scalar, x, a % 5))


def steps_of(a, b):
    count = 0
    while b:
        a, b, count = b, a % b, count + 1
    return count


@pytest.mark.parametrize("n", [16, 192, 512])
def test_control_flow_per_element(n, device):
    x = torch.randn(n, device=device)
    a, b = (torch.randint(0, 500, (n,), dtype=torch.int32, device=device) for _ in range(2))
    selu, power = torch.empty_like(x), torch.empty_like(x)
    gcd, steps = torch.empty_like(a), torch.empty_like(a)
    map_kernel[(1,)](x, a, b, selu, gcd, steps, power, BLOCK=n)
    torch.testing.assert_close(selu, torch.where(x > 0, x, 1.5 * (x.exp() - 1)))
    assert torch.equal(gcd, torch.gcd(a, b))
    expected = [steps_of(*pair) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    assert steps.tolist() == expected
    torch.testing.assert_close(power, x ** (a % 5))


@triton.jit
def pair_scalar(a0, a1, b0, b1):
    """Elementwise, two at a time: maxima, then sums."""
    if a0 > b0:
        first = a0
    else:
        first = b0
    return first, tl.maximum(a1, b1), a0 + b0, a1 + b1


@triton.jit
def pack_kernel(a_ptr, b_ptr, max_ptr, sum_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    places = row * COLUMNS + column
    a, b = tl.load(a_ptr + places), tl.load(b_ptr + column)
    largest, total = tl.map_elementwise(pair_scalar, a, b, pack=2)
    tl.store(max_ptr + places, largest)
    tl.store(sum_ptr + places, total)


@pytest.mark.parametrize("shape", [(1, 16), (8, 64), (32, 48)])
def test_pack_and_broadcast(shape, device):
    a = torch.randn(shape, device=device)
    b = torch.randn(shape[1], device=device)
    largest, total = torch.empty_like(a), torch.empty_like(a)
    pack_kernel[(1,)](a, b, largest, total, *shape)
    assert torch.equal(largest, torch.maximum(a, b)) and torch.equal(total, a + b)


@triton.jit
def scalar_kernel(out_ptr, a, b):
    divisor, steps = tl.map_elementwise(gcd_scalar, a, b)
    first, second = tl.map_elementwise(pair_scalar, a, b, pack=2)
    tl.store(out_ptr, divisor)
    tl.store(out_ptr + 1, steps)
    tl.store(out_ptr + 2, first)
    tl.store(out_ptr + 3, second)


def test_scalars(device):
    out = torch.zeros(4, dtype=torch.int32, device=device)
    scalar_kernel[(1,)](out, 84, 36)
    assert out.tolist() == [12, steps_of(84, 36), 84, 120]


@triton.jit
def dequantise_scalar(code, scale):
    if code == 0:
        return tl.to_tensor(0.0)
    return code.to(tl.float32) * scale


@triton.jit
def product_kernel(a_ptr, codes_ptr, scale_ptr, out_ptr, K, BLOCK: tl.constexpr):
    """Weights through a function of scalars in the loop of a product."""
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + i[:, None] * K + (k + i)[None, :])
        codes = tl.load(codes_ptr + (k + i)[:, None] * BLOCK + i[None, :])
        scale = tl.load(scale_ptr + k + i)[:, None]
        b = tl.map_elementwise(dequantise_scalar, codes, scale)
        total = tl.dot(a, b.to(tl.float16), total)
    tl.store(out_ptr + i[:, None] * BLOCK + i[None, :], total)


def test_in_the_loop_of_a_product(device):
    a = torch.randn(64, 192, device=device).half()
    codes = torch.randint(-8, 8, (192, 64), dtype=torch.int8, device=device)
    scale = torch.rand(192, device=device)
    out = torch.empty(64, 64, device=device)
    product_kernel[(1,)](a, codes, scale, out, 192, 64)
    b = (codes.float() * scale[:, None]).half()
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-3, atol=1e-2)
