"""ARCHITECTURE.md follows one kernel through the compiler: its blocks are made here.

After a change of the compiler run `pytest tests/test_architecture.py --bless` and read the diff.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minitriton.compiler import stage_texts, standard_stages
from minitriton.frontend.signature import ParamSpec, Specialization
from minitriton.ir.target import Target
from tests.generated_blocks import check_blocks, fenced

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "architecture_kernel.py"
BLOCK, WARPS = 256, 2


@pytest.fixture(scope="module")
def kernel() -> Any:
    spec = importlib.util.spec_from_file_location("architecture_kernel", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scaled_softmax


def texts_of(kernel: Any) -> dict[str, str]:
    """The text after each stage, for aligned rows of fp32."""
    spec = Specialization(
        (
            ParamSpec("x_ptr", "pointer", "fp32", None, True),
            ParamSpec("out_ptr", "pointer", "fp32", None, True),
            ParamSpec("n", "scalar", "i32", None, True),
            ParamSpec("scale", "scalar", "fp32"),
            ParamSpec("BLOCK", "constexpr", value=BLOCK),
        ),
        num_warps=WARPS,
    )
    return stage_texts(kernel.source, spec, Target.parse("sm_80"), standard_stages(check=True))


# Making dumps readable


def readable(text: str) -> str:
    """Tile IR with named layouts, and without the attributes that count values per group."""
    text = re.sub(r"(operand|result)SegmentSizes = array<i32: [\d, ]*>(, )?", "", text)
    text = re.sub(r", \}", "}", text).replace(" {}", "")
    layouts: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        return layouts.setdefault(match[0], f"#layout{len(layouts)}")

    text = re.sub(r"\{lane = array[^{}]*\}", name, text)
    definitions = [f"{alias} = {layout_line(layout)}" for layout, alias in layouts.items()]
    return "\n".join([*definitions, text])


def layout_line(attribute: str) -> str:
    """A layout attribute on one line: the flat basis of each bit, register bits first."""
    found = dict(re.findall(r"(\w+) = array<i32(?:: ([\d, ]*))?>", attribute))
    return ", ".join(f"{key} [{found[key]}]" for key in ("register", "lane", "warp"))


def changed_lines(before: str, after: str) -> str:
    """What a pass did: lines removed and added; a line with other value numbers is the same."""
    sides = [text.splitlines() for text in (before, after)]
    masked = [[re.sub(r"%\d+", "%", line) for line in side] for side in sides]
    matcher = difflib.SequenceMatcher(None, *masked, autojunk=False)
    changes = []
    for tag, i0, i1, j0, j1 in matcher.get_opcodes():
        if tag != "equal":
            changes += ["-" + line for line in sides[0][i0:i1]]
            changes += ["+" + line for line in sides[1][j0:j1]]
    return "\n".join(changes)


def without_places(ptx: str) -> str:
    """PTX without the line table and comments."""
    ptx = ptx.split("\t.file")[0].split("\t.section")[0]
    kept = [
        line.expandtabs(4).rstrip()
        for line in ptx.splitlines()
        if line.strip() and not re.match(r"\s*(\.loc|//|\$L__(tmp|func))", line)
    ]
    return "\n".join(kept)


def excerpt(lowered: str) -> str:
    """The module's head and the maximum over a row: from the load to the exchange of warps."""
    lines = [re.sub(r"^  ", "", line) for line in lowered.splitlines()]
    first = next(i for i, line in enumerate(lines) if "ld.global" in line)
    last = next(i for i, line in enumerate(lines) if "nvvm.barrier" in line and i > first)
    head = [line for line in lines[:8] if "gpu.module" in line or "llvm.func" in line]
    return "\n".join([*head, "      ...", *lines[first : last + 1], "      ..."])


def test_blocks(kernel: Any, bless: bool) -> None:
    texts = texts_of(kernel)
    names = list(texts)
    rows = []
    for index, name in enumerate(names):
        same = index and texts[name] == texts[names[index - 1]]
        rows.append(
            f"{name:<18}{'unchanged' if same else f'{len(texts[name].splitlines())} lines'}"
        )
    check_blocks(
        ROOT / "ARCHITECTURE.md",
        {
            "stage source": fenced("python", FILE.read_text().split("@triton.jit\n")[1]),
            "stages": fenced("text", "\n".join(rows)),
            "stage build": fenced("mlir", readable(texts["build"])),
            "stage simplify": fenced(
                "diff", changed_lines(readable(texts["build"]), readable(texts["simplify"]))
            ),
            "stage assign_layouts": fenced("mlir", readable(texts["assign_layouts"])),
            "stage insert_barriers": fenced(
                "diff",
                changed_lines(
                    readable(texts["assign_layouts"]), readable(texts["insert_barriers"])
                ),
            ),
            "stage lower": fenced("mlir", excerpt(texts["lower"])),
            "stage ptx": fenced("asm", without_places(texts["ptx"])),
        },
        bless,
    )


def test_prose_is_short() -> None:
    document = (ROOT / "ARCHITECTURE.md").read_text()
    text = re.sub(r"<!-- begin: .*?<!-- end -->", "", document, flags=re.DOTALL)
    assert len(text.splitlines()) <= 300


def test_named_files_exist() -> None:
    """Every path in backticks that looks like one of ours is there."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = "frontend|ir|passes|codegen|runtime|minitriton|tests|docs|examples|benchmarks"
    for path in re.findall(rf"`((?:{rooms})/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path


def test_kernel_is_right(kernel: Any) -> None:
    n = 208  # a multiple of 16, as in the dumps
    x = np.random.default_rng(0).standard_normal((3, n), np.float32)
    out = np.empty_like(x)
    kernel[(3,)](x, out, n, 0.5, BLOCK=BLOCK, num_warps=WARPS)
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(out, 0.5 * e / e.sum(1, keepdims=True), rtol=1e-5)
