"""The driver: linear maps, coordinates, lazy registers, constants; printing and assertions."""

from itertools import product

import numpy as np
import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.codegen.lower import lower_to_gpu
from minitriton.ir.linear_layout import LinearLayout
from minitriton.runtime.emulator.checks import AssertFailed
from tests.codegen.tile_kernel import TileKernel, random_blocked, run, with_context


@pytest.mark.parametrize("seed", range(8))
@with_context
def test_coordinates_of_scrambled_layouts(seed):
    """Each element stores its own index: any wrong XOR term shows."""
    rng = np.random.default_rng(seed)
    bits = 9
    while True:  # an invertible 9x9 matrix over F2
        columns = [int(c) for c in rng.integers(1, 1 << bits, bits)]
        span = {0}
        for column in columns:
            span |= {s ^ column for s in span}
        if len(span) == 1 << bits:
            break
    layout = LinearLayout.from_flat(
        (16, 32), {"register": columns[:3], "lane": columns[3:8], "warp": columns[8:]}
    )
    kernel = TileKernel(["i32"], 2)
    kernel.store(0, kernel.index(layout))
    out = np.zeros(512, np.int32)
    run(kernel.ptx(), [out], 2)
    np.testing.assert_array_equal(out, np.arange(512))


@pytest.mark.parametrize("seed", range(4))
@with_context
def test_coordinates_of_blocked_layouts(seed):
    rng = np.random.default_rng(seed)
    layout = random_blocked(rng, (8, 8, 16), 4)
    kernel = TileKernel(["i32"], 4)
    kernel.store(0, kernel.index(layout))
    out = np.zeros(1024, np.int32)
    run(kernel.ptx(), [out], 4)
    np.testing.assert_array_equal(out, np.arange(1024))


@with_context
def test_unused_addresses_are_never_emitted():
    layout = LinearLayout.from_flat(
        (4096,),
        {"register": [1, 2, 4, 8], "lane": [16, 32, 64, 128, 256], "warp": [512, 1024, 2048]},
    )
    kernel = TileKernel(["i8", "i8"], 8)
    kernel.store(1, kernel.load(0, layout))
    kernel.builder.create("func.return", [])
    text = str(lower_to_gpu(kernel.module, kernel.target))
    assert text.count("getelementptr") == 2  # of 16 registers, one address for each argument


@triton.jit
def print_kernel(x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.device_print("at 100%", x)
    tl.device_print("scalar", tl.program_id(0))


def test_print_writes_each_element_once(capfd):
    print_kernel[(2,)](torch.tensor([0.5, 1.5, 2.5, 3.5]), BLOCK=4)
    lines = sorted(capfd.readouterr().out.splitlines())
    expected = [
        f"pid ({p}, 0, 0) idx ({i}) at 100%: {i + 0.5:f}" for p, i in product(range(2), range(4))
    ]
    expected += [f"pid ({p}, 0, 0) idx () scalar: {p}" for p in range(2)]
    assert lines == sorted(expected)


@triton.jit
def assert_kernel(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.device_assert(x < 3, "too big", mask=offsets < n)


def test_assert_names_message_and_line():
    x = torch.arange(8, dtype=torch.float32)
    assert_kernel[(1,)](x, 3, BLOCK=8, debug=True)
    assert_kernel[(1,)](x, 8, BLOCK=8)
    with pytest.raises(AssertFailed, match="too big"):
        assert_kernel[(1,)](x, 4, BLOCK=8, debug=True)
