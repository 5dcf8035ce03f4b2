"""Sums of fp16 on tensor cores: two to a register, which nothing takes apart within a loop."""

import re

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.runtime.assembler import assemble, disassemble


@triton.jit
def product_kernel(
    a_ptr, b_ptr, c_ptr, K, stride_bk, stride_bn, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    rm, rn, rk = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float16)
    for k in range(0, K, BK):
        a = tl.load(a_ptr + rm[:, None] * K + (k + rk)[None, :])
        b = tl.load(b_ptr + (k + rk)[:, None] * stride_bk + rn[None, :] * stride_bn)
        total = tl.dot(a, b, total, out_dtype=tl.float16)
    tl.store(c_ptr + rm[:, None] * BN + rn[None, :], total)


def compiled(dtype, blocks, warps, target):
    m, n, k = blocks
    a, b = torch.zeros(2 * m, 256).to(dtype), torch.zeros(n, 256).to(dtype).T
    c = torch.zeros(2 * m, n, dtype=torch.float16)
    return product_kernel.warmup(
        a, b, c, 256, *b.stride(), m, n, k, num_warps=warps, num_stages=3, grid=(2,), target=target
    )


def between(sass, name):
    """The instructions from the first `name` of the loop to its last one."""
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(\w+)", sass)
    places = [place for place, found in enumerate(code) if found == name]
    return code[places[0] : places[-1] + 1]


CASES = [  # type, blocks, warps, instruction, how many
    (torch.float16, (128, 256, 64), 8, "m64n256k16.f16.f16.f16", 4),
    (torch.float16, (128, 128, 64), 4, "m64n128k16.f16.f16.f16", 8),
    (torch.float16, (256, 256, 64), 8, "m64n256k16.f16.f16.f16", 8),
    (torch.float8_e4m3fn, (128, 128, 128), 8, "m64n128k32.f16.e4m3.e4m3", 4),
    (torch.float8_e5m2, (128, 128, 128), 4, "m64n128k32.f16.e5m2.e5m2", 8),
]


@pytest.mark.parametrize(("dtype", "blocks", "warps", "name", "count"), CASES, ids=str)
def test_warpgroups(dtype, blocks, warps, name, count):
    ptx = compiled(dtype, blocks, warps, "sm_90a").ptx
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+) \{([^}]*)\}([^;]*);", ptx)
    assert [instruction for instruction, _, _ in found] == [name] * count
    assert all(len(sums.split(",")) == blocks[1] // 4 for _, sums, _ in found)
    orders = 2 if dtype == torch.float16 else 0  # of A and B in memory
    for number, (_, _, rest) in enumerate(found):
        scale, *constants = [part.strip() for part in rest.split(",")][3:]
        assert constants == ["1", "1", *["0"] * orders]
        # sums are undefined before the first iteration, whose first products do not add to them
        assert (scale != "p") == (number < blocks[0] // (16 * warps))
    done = assemble(ptx, "sm_90a", "product_kernel")
    assert not done.spill_stores and not done.warnings
    code = between(disassemble(done.cubin), "HGMMA" if dtype == torch.float16 else "QGMMA")
    assert not {"MOV", "PRMT", "HADD2", "HFMA2", "WARPGROUP"} & set(code)


@pytest.mark.parametrize("blocks", [(128, 128, 32), (64, 48, 32)], ids=str)
def test_single_warps(blocks):
    ptx = compiled(torch.float16, blocks, 4, "sm_80").ptx
    assert "row.col.f16.f16.f16.f16" in ptx
    done = assemble(ptx, "sm_80", "product_kernel")
    assert not done.spill_stores
    assert "PRMT" not in between(disassemble(done.cubin), "HMMA")
