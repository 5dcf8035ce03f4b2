"""gdc_wait and gdc_launch_dependents: kernels that may start before the one ahead has ended."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.compiler import compile_kernel
from minitriton.ir.target import Target
from minitriton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def produce_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    for _ in range(20):
        x = tl.sqrt_rn(x * x) + 1
    tl.store(y_ptr + at, x, mask=at < n)


@triton.jit
def consume_kernel(y_ptr, z_ptr, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    before = tl.load(y_ptr)  # may see the old value
    tl.extra.cuda.gdc_wait()
    after = tl.load(y_ptr)
    for first in tl.range(0, n, BLOCK, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(y_ptr + at, mask=at < n, other=0.0)
    tl.store(z_ptr, tl.sum(total, 0))
    tl.store(z_ptr + 1, after)
    tl.store(z_ptr + 2, before)


@pytest.mark.parametrize("stages", [1, 3])
def test_what_the_kernel_before_wrote_is_there_after_the_wait(device, stages):
    n = 1 << 12 if device == "cpu" else 1 << 22
    x, y = torch.rand(n, device=device), torch.empty(n, device=device)
    z = torch.zeros(3, device=device)
    for turn in range(2 if device == "cpu" else 20):
        x += turn
        y.fill_(-1)
        produce_kernel[(triton.cdiv(n, 1024),)](x, y, n, BLOCK=1024, launch_pdl=True)
        compiled = consume_kernel[(1,)](y, z, n, BLOCK=1024, STAGES=stages, launch_pdl=True)
        assert torch.allclose(z[0], (x.double() + 20).sum().float(), rtol=1e-3)
        assert z[1] == y[0] and z[2] in (-1, y[0])
    for arch in ("sm_80", "sm_90a"):
        ptx = compile_kernel(compiled.source, compiled.spec, Target.parse(arch)).asm["ptx"]
        front, _, rest = ptx.partition("griddepcontrol.wait;")
        assert bool(rest) == (arch == "sm_90a")
        if rest:  # one load before the wait, and no copy of the loop's
            assert front.count("ld.global") == 1 and "cp.async" not in front
            assert "ld.global" in rest or "cp.async" in rest


@triton.jit
def shifted_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y[i] = x[i + 1] + 1, around: every program reads what another one wrote before."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + (at + 1) % n, mask=at < n) + 1, mask=at < n)


@pytest.mark.parametrize("overlap", [None, True, False])
def test_a_kernel_without_a_wait_sees_all_that_came_before(device, overlap):
    """Kernels of torch come between; the last programs of a launch do not end together."""
    n, turns = (1000, 3) if device == "cpu" else (1 << 20, 200)
    x = torch.randint(0, 1000, (n,), device=device)
    y, expected = torch.empty_like(x), x.clone()
    for turn in range(turns):
        shifted_kernel[(triton.cdiv(n, 256),)](x, y, n, BLOCK=256, launch_pdl=overlap)
        compiled = shifted_kernel[(triton.cdiv(n, 1024),)](y, x, n, BLOCK=1024, launch_pdl=overlap)
        if turn % 3 == 0:
            x += 1
        expected = expected.roll(-2) + (3 if turn % 3 == 0 else 2)
    assert torch.equal(x, expected)
    again = compile_kernel(compiled.source, compiled.spec, Target.parse("sm_90a"))
    assert again.shape.programmatic == (overlap is not False)
    assert ("griddepcontrol.wait" in again.asm["ptx"]) == again.shape.programmatic


def test_kernels_that_wait_start_early_only_if_the_launch_says_so(device):
    z = torch.zeros(3, device=device)
    for asked in (None, False, True):
        compiled = consume_kernel[(1,)](z, z, 0, BLOCK=64, STAGES=1, launch_pdl=asked)
        again = compile_kernel(compiled.source, compiled.spec, Target.parse("sm_90a"))
        assert again.shape.programmatic == (asked is True)


def test_only_gpus_that_can_start_a_kernel_early(device):
    x = torch.ones(64, device=device)
    compiled = produce_kernel[(1,)](x, torch.empty_like(x), 64, BLOCK=64, launch_pdl=True)
    again = {
        arch: compile_kernel(compiled.source, compiled.spec, Target.parse(arch))
        for arch in ("sm_80", "sm_90a")
    }
    assert not again["sm_80"].shape.programmatic and again["sm_90a"].shape.programmatic
    assert "griddepcontrol.launch_dependents" in again["sm_90a"].asm["ptx"]
    assert "griddepcontrol" not in again["sm_80"].asm["ptx"]
