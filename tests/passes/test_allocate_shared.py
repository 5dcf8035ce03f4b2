"""Shared-memory areas that live at the same time never overlap; the limit is an error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitriton.ir.builder import i32_attr
from minitriton.ir.context import use
from minitriton.ir.diagnostics import CompileError
from minitriton.ir.dialect import MAX_VALUES
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import allocate_shared
from minitriton.passes.allocate_shared import BUFFER_ALIGNMENT, Area, bytes_with, place
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import int_attribute, kernel_of, walk
from tests.passes import tile_kernels

areas = st.builds(
    lambda size, first, length: Area(size, first, first + length),
    st.integers(1, 5000), st.integers(0, 30), st.integers(0, 12),
)  # fmt: skip


@given(st.lists(areas, max_size=25))
def test_no_two_live_areas_overlap(found):
    offsets = place(found)
    for i, (a, x) in enumerate(zip(found, offsets, strict=True)):
        assert x % BUFFER_ALIGNMENT == 0
        for b, y in list(zip(found, offsets, strict=True))[:i]:
            alive_together = a.first <= b.last and b.first <= a.last
            assert not (alive_together and x < y + b.bytes and y < x + a.bytes)


def test_areas_that_follow_each_other_share_memory():
    assert place([Area(1024, 0, 3), Area(512, 4, 5), Area(512, 5, 9)]) == [0, 0, 512]


M64 = "!mt.mem<tensor<64xf32, {offset = array<i32: 1, 2, 4, 8, 16, 32>}>>"
T64 = "tensor<64xf32, {register=array<i32>, lane=array<i32: 1, 2, 4, 8, 16>, warp=array<i32: 32>}>"


def parsed(body):
    return ir.Module.parse(
        "module attributes {mt.num_warps = 2 : i32} { func.func @k(%n: i32, %v: "
        + T64 + ") {\n %c0 = arith.constant 0 : i32\n %c1 = arith.constant 1 : i32\n"
        + body.replace("M64", M64).replace("T64", T64) + "\nreturn } }"
    )  # fmt: skip


def allocated(body, target="sm_80"):
    """mt.offset of every local_alloc in order, and the total."""
    with use():
        module = parsed(body)
        allocate_shared.run(module, Target.parse(target), PassOptions())
        offsets = [
            int_attribute(op, "mt.offset")
            for op in walk(kernel_of(module))
            if op.name == "mt.local_alloc"
        ]
        return offsets, int_attribute(module.operation, "mt.shared_bytes")


BARRIER = '"mt.barrier"() : () -> ()'
ALLOC = '%{0} = "mt.local_alloc"(%v) : (T64) -> M64\n'
LOAD = '"mt.local_load"(%{0}) : (M64) -> T64\n'


def test_what_one_more_buffer_would_take():
    """While one of two buffers is alive, while both are, and after them."""
    body = ALLOC.format(0) + ALLOC.format(1) + LOAD.format(1) + LOAD.format(0) + BARRIER
    with use():
        module = parsed(body)
        first, second, _, last, barrier = [
            op for op in walk(kernel_of(module)) if op.name.startswith("mt.")
        ]
        needed = [
            bytes_with(kernel_of(module), [(op, op, 1000)] * times, 1024)
            for op, times in ((first, 0), (first, 1), (second, 1), (last, 1), (barrier, 2))
        ]
    assert needed == [512, 1280, 1536, 1280, 2032]


def test_buffers_used_one_after_the_other_share_memory():
    body = ALLOC.format("a") + LOAD.format("a") + ALLOC.format("b") + LOAD.format("b")
    assert allocated(body) == ([0, 0], 256)


def test_a_use_inside_a_loop_keeps_the_buffer_alive_to_its_end():
    loop = "scf.for %i = %c0 to %n step %c1 : i32 {\n"
    body = ALLOC.format("a") + loop + LOAD.format("a") + ALLOC.format("b") + LOAD.format("b") + "}"
    (a, b), _ = allocated(body)
    assert abs(a - b) >= 256


def test_dealloc_extends_the_life():
    body = ALLOC.format("a") + ALLOC.format("b") + LOAD.format("b")
    body += '"mt.local_dealloc"(%a) : (M64) -> ()\n'
    (a, b), total = allocated(body)
    assert a != b and total == 512


SPLIT = '"mt.split_warps"() : () -> ()\n'


@pytest.mark.parametrize("after", [1, 3])
def test_each_group_of_warps_has_what_is_allocated_after_they_part(after):
    """Two shared buffers of 256 bytes; of the groups' own, one after the other, each takes one."""
    used = "".join(ALLOC.format(f"own{i}") + LOAD.format(f"own{i}") for i in range(after))
    body = ALLOC.format("a") + ALLOC.format("b") + SPLIT + used
    body += "".join(f'"mt.local_dealloc"(%{name}) : (M64) -> ()\n' for name in "ab")
    with use():
        module = parsed(body)
        top = module.operation
        top.attributes["mt.consumer_groups"] = i32_attr(2)
        needed = bytes_with(kernel_of(module), [], 16)
        allocate_shared.run(module, Target.parse("sm_90a"), PassOptions())
        offsets = [
            int_attribute(op, "mt.offset")
            for op in walk(kernel_of(module))
            if op.name == "mt.local_alloc"
        ]
        each, total = (int_attribute(top, f"mt.{name}_bytes") for name in ("group", "shared"))
    assert sorted(offsets[:2]) == [0, 256] and offsets[2:] == [512] * after
    assert each == 256 and total == needed == 512 + 2 * 256


def test_each_group_of_warps_has_scratch_of_its_own():
    """Of two reductions, the one after the warps part is done by both groups at their own pace."""
    sizes = "array<i32: 1" + ", 0" * (MAX_VALUES - 1) + ">"
    reduce = f""""mt.reduce"(%v) ({{
      ^bb0(%x: f32, %y: f32):
        %z = arith.addf %x, %y : f32
        "mt.yield"(%z) {{operandSegmentSizes = {sizes}}} : (f32) -> ()
    }}) {{axis = 0 : i32, operandSegmentSizes = {sizes}, resultSegmentSizes = {sizes}}}
      : (T64) -> f32
    """
    with use():
        module = parsed(reduce + SPLIT + reduce)
        top = module.operation
        top.attributes["mt.consumer_groups"] = i32_attr(2)
        allocate_shared.run(module, Target.parse("sm_90a"), PassOptions())
        before, after = (
            int_attribute(op, "mt.offset")
            for op in walk(kernel_of(module))
            if op.name == "mt.reduce"
        )
        each, total = (int_attribute(top, f"mt.{name}_bytes") for name in ("group", "shared"))
    assert 8 <= each <= after and before + 8 <= after and total == after + 2 * each


def test_too_much_is_a_table_of_users():
    big = "!mt.mem<tensor<3x32768xf16, {offset = array<i32: 1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192,16384>}>>"  # noqa: E501
    body = f'%a = "mt.local_alloc"() : () -> {big}\n"mt.local_dealloc"(%a) : ({big}) -> ()\n'
    with pytest.raises(CompileError) as raised:
        allocated(body)
    text = str(raised.value)
    assert "196608 bytes" in text and "mt.local_alloc" in text and "num_stages" in text
    allocated(body, "sm_90a")


def test_reductions_in_a_loop_take_no_barriers_beside_their_own(kernel, names):
    """Each has scratch of its own, and the barrier inside of one frees that of the other."""
    kern = kernel(tile_kernels.log_sum_exp, x="*fp32", y="*fp32", n="i32", STAGES=None, BLOCK=256)
    x = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    module = kern.check([x, np.zeros(1, np.float32)], [1000])
    assert names(module).count("mt.reduce") == 2 and "mt.barrier" not in names(module)
