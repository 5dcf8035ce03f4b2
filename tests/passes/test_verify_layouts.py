"""verify_layouts: compiled kernels obey the laws, and a value in any other layout is found."""

import pytest

from minitriton.ir.diagnostics import InternalError
from minitriton.ir.encoding import layout_of, with_layout
from minitriton.ir.layouts import default_blocked
from minitriton.ir.linear_layout import LinearLayout
from minitriton.passes.op_classes import is_tile
from minitriton.passes.traversal import kernel_of, walk
from minitriton.passes.verify_layouts import verify_layouts
from tests.passes import tile_kernels

KERNELS = {
    "add": dict(x="*fp16", y="*fp32", z="*fp32", n="i32", BLOCK=512),
    "softmax": dict(x="*fp32", y="*fp32", n="i32", BLOCK=512),
    "transpose": dict(x="*fp16", y="*fp16", N=64),
    "branches": dict(x="*fp32", y="*fp32", n="i32", N=16),
    "reversed_rows": dict(x="*fp32", y="*fp32", z="*fp32", M=48, N=48),
    "picked_rows": dict(x="*fp16", index="*i32", y="*fp16", M=64, N=32),
    "counted": dict(x="*i16", y="*i32", n="i32", N=256, BINS=32),
    "attention": dict(q="*fp16", k="*fp16", v="*fp16", o="*fp32", n="i32", BM=64, BN=32, D=32),
}


def other_layout(layout):
    """Another layout of the same tile on as many warps."""
    for vec in (1, 2, 4, 8):
        candidate = default_blocked(layout.shape, layout.num_warps, vec=vec)
        if candidate != layout:
            return candidate
    flat = layout.to_flat()
    flat["lane"] = flat["lane"][1:] + flat["lane"][:1]
    return LinearLayout.from_flat(layout.shape, flat)


def is_free(op):
    """Made in any layout and used by conversions only: nothing to violate."""
    made = op.name in ("mt.make_range", "mt.splat", "arith.constant", "mt.convert_layout")
    users = {use.owner.operation.name for result in op.results for use in result.uses}
    return made and users <= {"mt.convert_layout"}


@pytest.mark.parametrize("name", KERNELS)
def test_a_result_in_another_layout_is_found(kernel, name):
    module = kernel(getattr(tile_kernels, name), **KERNELS[name]).compile("assign_layouts")
    verify_layouts(module)
    changed = 0
    for op in walk(kernel_of(module)):
        for result in op.results:
            if not is_tile(result) or is_free(op):
                continue
            right = result.type
            result.set_type(with_layout(right, other_layout(layout_of(right))))
            with pytest.raises(InternalError, match="verify_layouts"):
                verify_layouts(module)
            result.set_type(right)
            changed += 1
    verify_layouts(module)
    assert changed > 5


def test_a_tile_without_layout_or_for_other_warps_is_found(kernel):
    module = kernel(tile_kernels.add, **KERNELS["add"]).compile("assign_layouts")
    (add,) = (op for op in walk(kernel_of(module)) if op.name == "arith.addf")
    right = add.results[0].type
    add.results[0].set_type(with_layout(right, default_blocked((512,), 2)))
    with pytest.raises(InternalError, match="not for 4 warps"):
        verify_layouts(module)
    add.results[0].set_type(type(right).get(right.shape, right.element_type))
    with pytest.raises(InternalError, match="has no layout"):
        verify_layouts(module)
