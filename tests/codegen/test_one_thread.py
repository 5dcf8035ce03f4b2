"""What one thread does for all: behind branches, and never twice in what the assembler makes."""

import re

import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton.kernels.mla_absorb import _value_kernel
from minitriton.runtime.assembler import find_tool
from tests.codegen.split_kernels import attention_kernel, matmul_kernel
from tests.sass import issued_apart

BF16 = torch.bfloat16
LOAD = r"cp\.async\.bulk\.tensor\S*\.shared::cluster\.global"


@triton.jit
def _steps_kernel(x_ptr, y_ptr, out_ptr, B: tl.constexpr, STEPS: tl.constexpr):
    """x y^T of [B, STEPS B] matrices."""
    rows, columns = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    acc = tl.zeros((B, B), tl.float32)
    for step in range(STEPS):
        at = rows * (STEPS * B) + step * B + columns
        acc = tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at).trans(), acc)
    tl.store(out_ptr + rows * B + columns, acc)


def values(by_channel=True, tokens=128, heads=2, channels=128):
    x = torch.zeros(tokens, heads, 512, dtype=BF16)
    weight = torch.zeros(heads, 128, 512, dtype=BF16)
    gate = torch.zeros(tokens, heads, channels, dtype=BF16)
    return _value_kernel.warmup(
        x, weight, gate, gate, *x.stride()[:2], weight.stride(0), 512 if by_channel else 128,
        *gate.stride()[:2], tokens, heads, channels, LATENT=512, BY_CHANNEL=by_channel, GATE=True,
        ROWS=64, COLUMNS=64, DEPTH=64, num_warps=4, grid=(heads, 2, 2), target="sm_90a",
    )  # fmt: skip


def matmul(b_t=False, blocks=(64, 64, 64), warps=4, stages=3):
    a, b, c = (torch.zeros(512, 512, dtype=BF16) for _ in "abc")
    b = b.T if b_t else b
    strides = (*a.stride(), *b.stride(), *c.stride())
    return matmul_kernel.warmup(
        a, b, c, 512, 512, 512, *strides, *blocks, 8, num_warps=warps, num_stages=stages, grid=(8,),
        target="sm_90a",
    )  # fmt: skip


def attention(d=64, causal=False):
    q, k, v, out = (torch.zeros(512, d, dtype=BF16) for _ in "qkvo")
    return attention_kernel.warmup(
        q, k, v, out, 0.1, 512, d, 64, 64, causal, num_warps=4, num_stages=2, grid=(8, 1),
        target="sm_90a",
    )  # fmt: skip


def steps():
    x, y, out = (torch.zeros(64, 256, dtype=BF16) for _ in "xyo")
    return _steps_kernel.warmup(x, y, out, 64, 4, num_warps=4, num_stages=2, grid=(1,),
                                target="sm_90a")  # fmt: skip


KERNELS = {
    "steps": steps,
    "values": values,
    "values, [L, D]": lambda: values(False),
    "matmul": matmul,
    "matmul, [N, K]": lambda: matmul(True),
    "matmul, 2 stages": lambda: matmul(stages=2),
    "matmul, 4 stages": lambda: matmul(True, (128, 64, 64), stages=4),
    "matmul, 8 warps": lambda: matmul(blocks=(128, 128, 64), warps=8),
    "attention": attention,
    "attention, causal": lambda: attention(128, True),
}


@pytest.fixture(autouse=True)
def no_producer(monkeypatch):
    """Copies by a thread of the warps that hold tiles."""
    monkeypatch.setenv("MINITRITON_SPECIALIZE", "0")


def blocks_of(ptx):
    """The instructions of each basic block, without their guards, and the branch ahead of it."""
    blocks, ahead = [], ""
    block = []
    for line in (line.strip() for line in ptx.splitlines()):
        if re.match(r"\$L__BB\w+:$|(@!?%p\d+ )?bra", line):
            blocks.append((ahead, block))
            block, ahead = [], line
        elif line.endswith(";"):
            block.append(line)
    return [*blocks, (ahead, block)]


@pytest.mark.parametrize(("name", "ahead"), [("values", 4), ("values, [L, D]", 4), ("steps", 2)])
def test_copies_ahead_of_a_loop_share_a_branch(name, ahead):
    """Where the loop runs in any case; those of the loop are predicated."""
    found = []
    for branch, block in blocks_of(KERNELS[name]().ptx):
        guards = {line.split()[0] for line in block if re.search(LOAD, line)}
        if guards:
            counted = sum("expect_tx" in line for line in block)
            found.append((re.match(r"@!?%p\d+ bra", branch) is not None, counted, guards))
    (in_branch, counted, first), (_, once, last) = found
    assert in_branch and counted == ahead // 2 and once == 1
    assert len(first) == len(last) == 1 and first != last


@pytest.mark.parametrize("name", KERNELS)
def test_none_is_issued_twice(name):
    if find_tool("nvdisasm") is None:
        pytest.skip("nvdisasm is not installed")
    sass = KERNELS[name]().asm["sass"]
    assert "UTMALDG" in sass and issued_apart(sass) == []


# what ptxas 13.5.37 made of `values` with predicated copies, shortened
BRANCHES = """
        /*03b0*/                   BSSY B0, `(.L_x_4) ;
        /*03c0*/               @P2 BRA `(.L_x_5) ;
        /*03e0*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR24+0xc008], R2 ;
        /*03f0*/               @P2 BRA `(.L_x_6) ;
        /*0450*/                   UTMALDG.3D [UR16], [UR6] ;
.L_x_5:
        /*0470*/              @!UP0 UIADD3 UR6, UP1, UR22, 0xf0, URZ ;
        /*04d0*/              @!UP0 UTMALDG.3D [UR8], [UR6] ;
.L_x_6:
        /*04f0*/                   BSYNC B0 ;
.L_x_4:
        /*0500*/                   MOV R2, RZ ;
        /*0510*/                   EXIT ;
"""


def test_a_vote_where_lanes_come_apart_is_found():
    assert issued_apart(BRANCHES) == ["@!UP0 UTMALDG.3D [UR8], [UR6]"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("@!UP0 UTMALDG", "UTMALDG"), ("@P2 BRA `(.L_x_5)", "@P2 BRA `(.L_x_6)"),
     (".L_x_5:\n", "        /*0460*/                   BSYNC B0 ;\n.L_x_5:\n")],
)  # fmt: skip
def test_what_lanes_do_together_is_not(old, new):
    changed = BRANCHES.replace(old, new)
    assert changed != BRANCHES and issued_apart(changed) == []
