"""Loops, branches, early returns, tuples, helpers and compile-time evaluation."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def loop_kernel(x_ptr, out_ptr, n, steps, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        acc += tl.load(x_ptr + start + cols, mask=start + cols < n, other=0.0)
    for i in tl.static_range(3):
        acc = acc * (i + 1)
    for _ in range(steps - 1, -1, -1):
        acc = acc + 1
    tl.store(out_ptr + cols, acc)


@pytest.mark.parametrize("n", [0, 1, 64, 1000])
def test_loops(device, n):
    x = torch.randn(max(n, 1), device=device)
    out = torch.empty(64, device=device)
    loop_kernel[(1,)](x, out, n, 4, BLOCK=64)
    padded = torch.zeros(triton.cdiv(max(n, 1), 64) * 64, device=device)
    padded[:n] = x[:n]
    torch.testing.assert_close(out, padded.view(-1, 64).sum(0) * 6 + 4, rtol=1e-5, atol=1e-4)


@triton.jit
def while_kernel(out_ptr, start):
    pid = tl.program_id(0)
    x = start + pid
    steps = 0
    while x != 1:
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
        steps += 1
    tl.store(out_ptr + pid, steps)


def test_while_with_data_dependent_trip_count(device):
    out = torch.zeros(20, dtype=torch.int32, device=device)
    while_kernel[(20,)](out, 5)

    def collatz(x):
        steps = 0
        while x != 1:
            x = x // 2 if x % 2 == 0 else 3 * x + 1
            steps += 1
        return steps

    assert out.tolist() == [collatz(5 + i) for i in range(20)]


@triton.jit
def branch_kernel(x_ptr, out_ptr, n, threshold, MODE: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid * BLOCK >= n:
        return
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    if MODE == "scaled":
        scale = 2.0
    else:
        scale = 1.0
    if pid < threshold and pid != 1:
        y = x * scale
    elif pid == threshold or pid == 1:
        y = x + 100.0
    else:
        y = -x
    z = y if pid > 0 else y + 0.5
    tl.store(out_ptr + offsets, z, mask=offsets < n)


@pytest.mark.parametrize("mode", ["scaled", "plain"])
def test_branches_and_early_return(device, mode):
    n, block = 600, 64
    x = torch.randn(n, device=device)
    out = torch.zeros(n, device=device)
    branch_kernel[(12,)](x, out, n, 4, MODE=mode, BLOCK=block)
    expected = x.clone()
    for pid in range(10):
        part = x[pid * block : (pid + 1) * block]
        scale = 2.0 if mode == "scaled" else 1.0
        if pid < 4 and pid != 1:
            y = part * scale
        elif pid in (4, 1):
            y = part + 100.0
        else:
            y = -part
        expected[pid * block : (pid + 1) * block] = y if pid > 0 else y + 0.5
    torch.testing.assert_close(out, expected)


@triton.jit
def divide(x, y):
    if y == 0:
        return x
    return x / y


@triton.jit
def swap_scale(pair, factor: tl.constexpr = 2):
    a, b = pair
    return b * factor, a


@triton.jit
def helper_kernel(out_ptr, x, y):
    pair = swap_scale((x, y))
    pair = swap_scale(pair, factor=3)
    tl.store(out_ptr, pair[0])
    tl.store(out_ptr + 1, pair[1])
    tl.store(out_ptr + 2, divide(x, y))
    tl.store(out_ptr + 3, divide(x, y * 0))


def test_helpers_with_tuples_defaults_and_returns(device):
    out = torch.zeros(4, device=device)
    helper_kernel[(1,)](out, 3.5, 2.0)
    torch.testing.assert_close(out.cpu(), torch.tensor([3.5 * 3, 2.0 * 2, 1.75, 3.5]))


@triton.jit
def power(x, N: tl.constexpr):
    if N == 0:
        return x * 0 + 1
    else:
        return x * power(x, N - 1)


@triton.jit
def recursion_kernel(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, power(tl.load(x_ptr + offsets), N))


def test_recursion_on_constexpr(device):
    x = torch.rand(64, device=device)
    out = torch.empty_like(x)
    recursion_kernel[(1,)](x, out, N=5, BLOCK=64)
    torch.testing.assert_close(out, x**5)


SCALE = tl.constexpr(3)


@triton.jit
def closure_kernel(out_ptr, FLAGS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), SCALE, tl.int32)
    if FLAGS[0]:
        value += FLAGS[1]
    tl.static_assert(BLOCK % 16 == 0, "block must be a multiple of 16")
    tl.store(out_ptr + offsets, value * offsets)


@pytest.mark.parametrize("flag", [False, True])
def test_constexpr_globals_and_tuples(device, flag):
    out = torch.empty(32, dtype=torch.int32, device=device)
    closure_kernel[(1,)](out, FLAGS=(flag, 4), BLOCK=32)
    assert torch.equal(out.cpu(), torch.arange(32).int() * (7 if flag else 3))


@triton.jit
def stride_becomes_runtime_kernel(a_ptr, out_ptr, a0, b0, n):
    stride = a0
    acc = 0.0
    for i in range(n):
        acc += tl.load(a_ptr + i * stride)
        stride = b0
    tl.store(out_ptr, acc)


def test_stride_specialised_to_one_in_a_loop(device):
    x = torch.arange(20, device=device).float()
    out = torch.zeros(1, device=device)
    stride_becomes_runtime_kernel[(1,)](x, out, 1, 1, 6)
    assert out.item() == 15
    stride_becomes_runtime_kernel[(1,)](x, out, 1, 2, 6)
    assert out.item() == 0 + 2 + 4 + 6 + 8 + 10


@triton.jit
def loop_carried_pair_kernel(out_ptr, n):
    a = 0
    b = 1
    for _ in range(n):
        a, b = b, a + b
    tl.store(out_ptr, a)


def test_swapped_loop_carried_values(device):
    out = torch.zeros(1, dtype=torch.int32, device=device)
    loop_carried_pair_kernel[(1,)](out, 20)
    assert out.item() == 6765


@triton.jit
def nested_kernel(x_ptr, out_ptr, rows, cols, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for r in range(rows):
        row_sum = tl.zeros((BLOCK,), tl.float32)
        for c in range(0, cols, BLOCK):
            mask = c + offs < cols
            row_sum += tl.load(x_ptr + r * cols + c + offs, mask=mask, other=0.0)
        if r % 2 == 0:
            best = tl.maximum(best, row_sum)
    tl.store(out_ptr + offs, best)


def test_nested_loops_with_a_branch(device):
    x = torch.randn(5, 200, device=device)
    out = torch.empty(64, device=device)
    nested_kernel[(1,)](x, out, 5, 200, BLOCK=64)
    padded = torch.zeros(5, 256, device=device)
    padded[:, :200] = x
    torch.testing.assert_close(out, padded.view(5, 4, 64).sum(1)[::2].amax(0), rtol=1e-5, atol=1e-5)


@triton.jit
def grid_kernel(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
    tl.store(out_ptr + index, x * 10000 + y * 100 + z)


def test_three_dimensional_grid(device):
    out = torch.zeros(3 * 4 * 5, dtype=torch.int32, device=device)
    grid_kernel[(3, 4, 5)](out)
    expected = [x * 10000 + y * 100 + z for z in range(5) for y in range(4) for x in range(3)]
    assert out.tolist() == expected


@triton.jit
def nested_exits_kernel(codes_ptr, out_ptr, MODE: tl.constexpr):
    """Exits under run-time conditions inside branches that are chosen while compiling."""
    pid = tl.program_id(0)
    if MODE == "none":
        pid += 0
    elif tl.load(codes_ptr + pid) < 0:
        return
    total = 0
    for i in range(4):
        if MODE == "loop":
            skipped = tl.load(codes_ptr + pid)
            if i == skipped:
                continue
        total += 1 << i
    tl.store(out_ptr + pid, total)


@pytest.mark.parametrize("mode", ["none", "return", "loop"])
def test_run_time_exits_inside_compile_time_branches(device, mode):
    codes = torch.tensor([2, -1, 7, 0], dtype=torch.int32, device=device)
    out = torch.full((4,), -5, dtype=torch.int32, device=device)
    nested_exits_kernel[(4,)](codes, out, MODE=mode)
    expected = {"none": [15] * 4, "return": [15, -5, 15, 15], "loop": [11, -5, 15, 14]}
    assert out.tolist() == expected[mode]
