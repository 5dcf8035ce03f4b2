"""Lanes meet again at a join that LLVM has placed before the paths that lead to it."""

import numpy as np

from minitriton.runtime.emulator import Allocation, Emulator

HEAD = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out) .reqntid 64 {
  .reg .b32 %r<20>; .reg .b64 %rd<8>; .reg .pred %p<8>; .shared .align 4 .b8 s[512];
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  mov.u64 %rd4, s;
  add.s64 %rd5, %rd4, %rd2;
  mov.u32 %r9, 0;
"""
TAIL = "}\n"

JOIN_FIRST = """
  st.shared.u32 [%rd5], %r1;
  and.b32 %r2, %r1, 31;
  setp.eq.u32 %p1, %r2, 5;
  bra.uni $start;
$join:
  bar.sync 0;
  ld.shared.u32 %r3, [s+20];
  st.global.u32 [%rd3], %r3;
  ret;
$start:
  @!%p1 bra $join;
  mov.u32 %r4, 77;
  st.shared.u32 [%rd5], %r4;
  bra.uni $join;
"""

EXIT_BEFORE_BODY = """
  and.b32 %r2, %r1, 7;
  bra.uni $loop;
$exit:
  bar.sync 0;
  vote.sync.ballot.b32 %r6, -1, -1;
  st.global.u32 [%rd3], %r9;
  ret;
$loop:
  setp.ge.u32 %p1, %r9, %r2;
  @%p1 bra $exit;
  add.u32 %r9, %r9, 1;
  bra.uni $loop;
"""


def run(body: str) -> np.ndarray:
    out = np.zeros(64, np.uint32)
    Emulator(HEAD + body + TAIL).launch(
        "k", grid=(1, 1, 1), block=(64, 1, 1),
        params=[int(out.ctypes.data).to_bytes(8, "little")],
        allocations=[Allocation(out.ctypes.data, out.nbytes, "out")],
        shared_bytes=0, checks="all",
    )  # fmt: skip
    return out


def test_join_placed_before_a_divergent_path():
    assert (run(JOIN_FIRST) == 77).all()


def test_loop_exit_placed_before_the_body():
    assert np.array_equal(run(EXIT_BEFORE_BODY), np.arange(64) % 8)
