"""What passes may do with inline PTX, with and without effects, and with functions of scalars."""

import numpy as np
import pytest

from minitriton.ir.diagnostics import CompileError
from minitriton.ir.encoding import layout_of
from minitriton.ir.mlir import ir
from minitriton.passes.global_order import GlobalOrder
from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import kernel_of, ops_of, walk
from tests.passes import several_kernels
from tests.passes.test_global_order import LOAD, MARKED, parsed
from tests.passes.test_warp_split import BLOCKS, HOPPER, MATRICES, data, named

GROUPS = ", ".join(["1", *["0"] * 15])
SEGMENTS = f"operandSegmentSizes = array<i32: {GROUPS}>, resultSegmentSizes = array<i32: {GROUPS}>"
ASM = (
    '%y = "mt.{}"(%p) {{asm = "", constraints = "=r,l", pack = 1 : i32, '
    + SEGMENTS
    + "}} : (!mt.ptr<f32>) -> i32\n"
)


def counts(module, name):
    """How many ops of that name are in loops, and how many outside."""
    function = kernel_of(module)
    inside = [op for loop in named(function, "scf.for") for op in named(loop, name)]
    return len(inside), len(named(function, name)) - len(inside)


def test_pure_text_is_merged_hoisted_and_dropped(kernel):
    module = kernel(several_kernels.repeated, x="*i32", out="*i32", n="i32", PURE=True).compile()
    assert counts(module, "mt.elementwise_asm") == (0, 1)


def test_effects_stay_where_they_are(kernel):
    module = kernel(several_kernels.repeated, x="*i32", out="*i32", n="i32", PURE=False).compile()
    assert counts(module, "mt.effectful_asm") == (3, 0)
    texts = [
        ir.StringAttr(op.attributes["asm"]).value[:3]
        for op in walk(kernel_of(module))
        if op.name == "mt.effectful_asm"
    ]
    assert texts == ["neg", "neg", "not"]


@pytest.mark.parametrize(("kind", "places"), [("compares", (0, 1)), ("divides", (1, 0))])
def test_functions_of_scalars(kernel, kind, places):
    """One leaves the loop, unless its divisor may be zero and the loop may not run."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(1, 99, 512).astype(np.int32) for _ in range(2)]
    arrays.append(np.zeros(2 * 512, np.int32))
    given = {"x": "*i32", "y": "*i32", "out": "*i32", "n": "i32", "KIND": kind}
    module = kernel(several_kernels.mapped, **given).check(arrays, [2])
    assert counts(module, "mt.map_elementwise") == places
    (op,) = named(kernel_of(module), "mt.map_elementwise")
    tiles = [*op.operands, *op.results]
    assert len({layout_of(value.type) for value in tiles}) == 1


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [("", True), ("map", True), ("effects", False), ("program by PTX", False)],
)
def test_what_keeps_a_kernel_from_being_persistent(kernel, kind, persistent):
    arguments = {**MATRICES, **BLOCKS, **HOPPER, "KIND": kind}
    module = kernel(several_kernels.product, **arguments).compile()
    text = " ".join(remarks_of(module))
    assert ("persistent: each CTA" in text) == persistent, text
    if kind == "effects":
        assert "not persistent: it has mt.effectful_asm" in text


def test_results_of_functions_of_scalars_in_a_product(kernel):
    arrays, scalars = data(144, 80, 128)
    arguments = {**MATRICES, **BLOCKS, **HOPPER, "KIND": "map"}
    kernel(several_kernels.product, **arguments).check(arrays[:3], scalars, (2, 1, 1))


@pytest.mark.parametrize(
    ("body", "obstacle"),
    [
        (MARKED + ASM.format("effectful_asm"), "inline assembly"),
        (ASM.format("effectful_asm") + MARKED, "inline assembly"),
        (MARKED + ASM.format("elementwise_asm"), None),
    ],
)
def test_order_in_global_memory(body, obstacle):
    module = parsed(body)
    (store,) = [op for op in walk(kernel_of(module)) if op.name == "mt.store"]
    found = GlobalOrder(module).obstacle(store, [store])
    assert found is None if obstacle is None else obstacle in found


@pytest.mark.parametrize(("name", "kept"), [("elementwise_asm", 1), ("effectful_asm", 2)])
def test_loads_around_a_text(name, kept):
    """The second load may be the first one unless something was written between."""
    from minitriton.passes.simplify import share_loads

    uses = '"mt.store"(%q, %{0}) : (!mt.ptr<f32>, f32) -> ()\n'
    body = LOAD.format("p", "a") + ASM.format(name) + LOAD.format("p", "b")
    module = parsed(body + uses.format("a") + uses.format("b"))
    share_loads(kernel_of(module).regions[0].blocks[0])
    assert [op.name for op in ops_of(kernel_of(module).regions[0].blocks[0])].count(
        "mt.load"
    ) == kept


def test_three_groups_have_no_effects(kernel):
    arguments = {**MATRICES, "BM": 192, "BN": 128, "BK": 64, "num_warps": 12, "target": "sm_90a"}
    kernel(several_kernels.product, KIND="map", **arguments).compile()
    with pytest.raises(CompileError, match="effectful_asm is for the program as a whole"):
        kernel(several_kernels.product, KIND="effects", **arguments).compile()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('"mt.elementwise_asm"(%x) {asm = "", constraints = "=r", pack = 1 : i32, SEGMENTS} '
         ": (i32) -> i32", "do not fit"),
        ('"mt.elementwise_asm"(%x) {asm = "", constraints = "=z,r", pack = 1 : i32, SEGMENTS} '
         ": (i32) -> i32", "=z"),
        ('"mt.elementwise_asm"(%x) {asm = "", constraints = "=r,r", pack = 1 : i32, SEGMENTS} '
         ": (i32) -> tensor<2xi32>", "differ in shape"),
        ('"mt.unpack_e2m1"(%x) : (i32) -> (f16, f16)', "not of bytes"),
        ('"mt.unpack_e2m1"(%b) : (i8) -> (f16, bf16)', "differ in type"),
    ],
)  # fmt: skip
def test_verifiers(text, problem):
    names = "%r:2" if "unpack" in text else "%r"
    body = f"{names} = {text.replace('SEGMENTS', SEGMENTS)}"
    with pytest.raises(ir.MLIRError, match=problem):
        ir.Module.parse(f"func.func @k(%x: i32, %b: i8) {{ {body}\nreturn }}")
