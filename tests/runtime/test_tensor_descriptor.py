"""Host tensor descriptors: their checks, what they specialise, and the launch path they take."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minitriton as triton
import minitriton.language as tl
from minitriton import binding
from minitriton.runtime.arguments import ArgumentError
from minitriton.specialize import Call, places, specialize
from minitriton.tools.tensor_descriptor import TensorDescriptor

HALVES = torch.zeros(64, 48, dtype=torch.float16)
NUMBERS = torch.zeros(64, 48, dtype=torch.int32)


def one(x):
    pass


def understand(value: Any) -> Call:
    return specialize("one", binding.parameters_of(one, inspect.signature(one)), [value], {})


def test_what_is_specialised() -> None:
    call = understand(TensorDescriptor.from_tensor(HALVES, [16, 32]))
    (spec,) = call.spec.params
    assert spec.key_text() == "x:descriptor(fp16[16, 32]:16, zero)"
    assert [p.key_text() for p in call.spec.runtime_params()] == [
        "x.base:*fp16:16", "x.shape.0:int32", "x.shape.1:int32", "x.strides.0:int64",
    ]  # fmt: skip
    assert [name for name, _ in call.leaves] == ["x.base", "x.shape.0", "x.shape.1", "x.strides.0"]
    assert [a.value for _, a in call.leaves] == [HALVES.data_ptr(), 64, 48, 48]
    assert list(places(spec)) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (TensorDescriptor(HALVES, [64, 47], [48, 1], [16, 32]), "fp16[16, 32], zero"),
        (TensorDescriptor(HALVES, [64, 40], [48, 1], [16, 32]), "fp16[16, 32]:16, zero"),
        (TensorDescriptor(HALVES, [1, 8], [8, 1], (16, 32), "nan"), "fp16[16, 32]:16, nan"),
        (TensorDescriptor(NUMBERS, [64 * 48], [1], [4]), "int32[4]:16, zero"),
        (TensorDescriptor(np.zeros(0, np.float64), [0], [1], [2]), "fp64[2]:16, zero"),
        (
            TensorDescriptor(triton.reinterpret(HALVES, tl.bfloat16), [2, 48], [96, 1], [1, 8]),
            "bf16[1, 8]:16, zero",
        ),
    ],
)
def test_keys(value: TensorDescriptor, text: str) -> None:
    """Neither sizes nor strides count, only whether rows are whole."""
    assert understand(value).spec.params[0].key_text() == f"x:descriptor({text})"


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "rank 0": (dict(shape=[], strides=[], block_shape=[]), "shape", "0 dimensions"),
    "rank 6": (dict(shape=[1] * 6, strides=[8] * 5 + [1], block_shape=[1] * 6), "shape", "1 to 5"),
    "strides": (dict(strides=[1]), "strides", "1 numbers"),
    "blocks": (dict(block_shape=[8]), "block_shape", "1 numbers"),
    "float": (dict(shape=[64, 48.0]), "shape", "48.0"),
    "negative": (dict(shape=[-1, 48]), "shape", "[-1, 48]"),
    "too large": (dict(shape=[2**31, 48]), "shape", "2^31 - 1"),
    "power": (dict(block_shape=[16, 24]), "block_shape", "powers of two"),
    "zero block": (dict(block_shape=[0, 16]), "block_shape", "powers of two"),
    "large block": (dict(block_shape=[2048, 1024]), "block_shape", "at most 1048576"),
    "last stride": (dict(strides=[48, 2]), "strides", "the last must be 1"),
    "other stride": (dict(strides=[47, 1]), "strides", "multiples of 16 bytes"),
    "padding": (dict(padding="one"), "padding", "'zero' or 'nan'"),
    "nan": (dict(base=NUMBERS, padding="nan"), "padding", "NaN is for floats"),
    "no array": (dict(base=5), "base", "int 5"),
    "address": (dict(base=HALVES.flatten()[4:]), "base", "aligned to 16 bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_checks_when_made_and_at_launch(case: str) -> None:
    changes, field, reason = BAD[case]
    good: dict[str, Any] = dict(base=HALVES, shape=[64, 48], strides=[48, 1], block_shape=[16, 16])
    with pytest.raises(ArgumentError) as made:
        TensorDescriptor(**{**good, **changes})
    changed = TensorDescriptor(**good)
    for name, value in changes.items():
        setattr(changed, name, value)
    with pytest.raises(ArgumentError) as launched:
        understand(changed)
    assert str(made.value).startswith(f"argument '{field}': ") and reason in str(made.value)
    assert str(launched.value).startswith(f"argument 'x.{field}': ")
    assert reason in str(launched.value)


def test_short_rows_are_found_at_launch() -> None:
    """Programs make a descriptor first and choose its blocks later."""
    value = TensorDescriptor.from_tensor(HALVES, [1, 1])
    with pytest.raises(ArgumentError, match="'x.block_shape'.*2 bytes"):
        understand(value)
    value.block_shape = [1, 8]
    understand(value)


@triton.jit
def rows_kernel(source, target, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    target.store([first, 0], source.load([first, 0]) + 1)


def test_one_kernel_for_all_shapes() -> None:
    rows_kernel._compiled.clear()
    for rows in (1, 5, 32):
        x = torch.randn(rows, 40).half()
        y = torch.zeros_like(x)
        pair = [TensorDescriptor.from_tensor(t, [8, 64]) for t in (x, y)]
        rows_kernel[(triton.cdiv(rows, 8),)](*pair, BLOCK=8)
        assert torch.equal(y, x + 1)
    assert len(rows_kernel._compiled) == 1


def _blocks(named: dict[str, Any]) -> None:
    for name in ("source", "target"):
        named[name].block_shape = [named["BLOCK"], 64]


tuned_kernel = triton.autotune(
    [triton.Config({"BLOCK": size}, pre_hook=_blocks) for size in (4, 16)], key=[]
)(rows_kernel)


def test_blocks_chosen_by_a_hook() -> None:
    x = torch.randn(20, 40).half()
    y = torch.zeros_like(x)
    pair = [TensorDescriptor.from_tensor(t, [1, 1]) for t in (x, y)]
    tuned_kernel[lambda named: (triton.cdiv(20, named["BLOCK"]),)](*pair)
    assert torch.equal(y, x + 1)
    assert pair[0].block_shape == [4, 64]


def test_in_a_tuple() -> None:
    @triton.jit
    def kernel(pair, n):
        pair[1].store([n], pair[0].load([0]))

    x, y = torch.arange(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    kernel[(1,)](tuple(TensorDescriptor.from_tensor(t, [8]) for t in (x, y)), 3)
    assert torch.equal(y[3:11], x[:8]) and not y[:3].any() and not y[11:].any()


def test_a_compiled_kernel_takes_descriptors_again() -> None:
    x = torch.randn(12, 40).half()
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    source, *targets = (TensorDescriptor.from_tensor(t, [8, 64]) for t in (x, y, z))
    compiled = rows_kernel[(2,)](source, targets[0], BLOCK=8)
    compiled[(2,)](source, targets[1], 8)
    assert torch.equal(z, y)
    targets[1].block_shape = [4, 64]
    with pytest.raises(ArgumentError, match=r"'target': compiled for .*\[8, 64\]"):
        compiled[(2,)](source, targets[1], 8)


def test_the_example_of_the_documents(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "descriptors.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "descriptors_example.py"
    file.write_text(code)
    names = runpy.run_path(str(file))
    x, y = names["x"].double(), names["y"].double()
    torch.testing.assert_close(names["out"].double(), x @ y, rtol=2e-3, atol=2e-2)


def test_set_allocator() -> None:
    triton.set_allocator(lambda size, alignment, stream: None)
    with pytest.raises(TypeError, match="takes a function, not int"):
        triton.set_allocator(3)
    assert triton.tools.tensor_descriptor.TensorDescriptor is TensorDescriptor
