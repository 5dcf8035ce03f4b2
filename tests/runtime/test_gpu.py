"""On a GPU: launches, streams, graphs, several arrays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.runtime import driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


def tensors(n: int) -> Any:
    return [torch.randn(n, device="cuda") for _ in range(3)]


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@pytest.mark.parametrize("n", [1, 2, 1000, 4096, 1_000_003])
def test_add(n: int) -> None:
    x, y, out = tensors(n)
    compiled = add[grid](x, y, out, n, BLOCK=256)
    torch.testing.assert_close(out, x + y)
    function = compiled.functions[0]
    assert (function.registers, compiled.n_spills) == (compiled.n_regs, 0)
    capability = torch.cuda.get_device_capability()
    assert compiled.target.capability <= capability[0] * 10 + capability[1]


def test_streams_and_graphs() -> None:
    x, y, out = tensors(1 << 16)
    add[grid](x, y, out, x.numel(), BLOCK=256)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        out.zero_()
        add[grid](x, y, out, x.numel(), BLOCK=256)
    stream.synchronize()
    torch.testing.assert_close(out, x + y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add[grid](x, y, out, x.numel(), BLOCK=256)
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, x + y)


def test_mixed_devices_are_refused_and_the_gpu_survives() -> None:
    x, y, out = tensors(64)
    with pytest.raises(TypeError, match="'y' is on the CPU, but 'x' is on cuda:0"):
        add[grid](x, y.cpu(), out, 64, BLOCK=64)
    add[grid](x, y, out, 64, BLOCK=64)
    torch.testing.assert_close(out, x + y)


def test_a_new_thread_has_no_context_yet() -> None:
    import threading

    x, y, out = tensors(64)
    add[(1,)](x, y, out, 64, BLOCK=64)
    thread = threading.Thread(target=lambda: add[(1,)](x, y, out, 64, BLOCK=64))
    thread.start()
    thread.join()
    driver.synchronize(0)
