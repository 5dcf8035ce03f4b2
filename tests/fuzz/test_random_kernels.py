"""A slice of the random programs, the same ones every time; `harness.py` runs thousands."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import harness
from generator import Program, generate

SEEDS = 150
GROUP = 10


@pytest.mark.parametrize("group", range(SEEDS // GROUP))
def test_interpreter_and_emulator_agree(group: int, tmp_path: Path) -> None:
    for seed in range(group * GROUP, (group + 1) * GROUP):
        warps, landing = harness.WARPS[seed % 3], harness.LANDINGS[seed // 3 % 2]
        program = generate(seed)
        try:
            harness.check(program, seed, tmp_path, (warps,), (landing,))
        except Exception as error:
            pytest.fail(f"seed {seed}, {warps} warps, {landing}: {error}\n{program.source}")


def test_a_seed_always_makes_the_same_program() -> None:
    assert generate(3) == generate(3)
    assert generate(3).source != generate(4).source


WRONG = """\
import minitriton as triton
import minitriton.language as tl

@triton.jit
def kernel(int8_ptr, int16_ptr, int32_ptr, int64_ptr, uint8_ptr, uint16_ptr, float16_ptr,
           float32_ptr, out_int8_ptr, out_int16_ptr, out_int32_ptr, out_int64_ptr, atomic_ptr, n):
    pid = tl.program_id(0)
    unused = tl.load(int8_ptr)
    x = tl.load(int32_ptr + tl.arange(0, 32))
    tl.store(out_int32_ptr + tl.arange(0, 32), x)
"""


def test_a_difference_is_found_and_the_program_made_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = harness.expected

    def wrong(compiled: object, arrays: list[np.ndarray], n: int) -> list[np.ndarray]:
        found = right(compiled, arrays, n)
        found[10][5] ^= 1
        return found

    program = Program(WRONG, {"int8": 1, "int16": 1, "int32": 32, "int64": 1}, 1)
    harness.check(program, 0, tmp_path)
    monkeypatch.setattr(harness, "expected", wrong)
    with pytest.raises(harness.Mismatch, match=r"out_int32\[5\].*1 wrong"):
        harness.check(program, 0, tmp_path)
    assert "unused" not in harness.shrink(program, 0, tmp_path).source
