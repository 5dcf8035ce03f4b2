"""Scratch that is taken for longer saves barriers, and two conversions may share one."""

from minitriton.ir.context import use
from minitriton.ir.conversion import MEETS_LATER
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import allocate_shared, insert_barriers
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import int_attribute, kernel_of, walk

THREADS = ("1, 2, 4, 8, 16", "32"), ("2, 4, 8, 16, 32", "1")  # lane and warp bases


def tile(size, lane, warp):
    registers = ", ".join(str(1 << bit) for bit in range(6, size.bit_length() - 1))
    bases = {"register": registers, "lane": lane, "warp": warp}
    layout = ", ".join(f"{name}=array<i32: {found}>" for name, found in bases.items())
    return f"tensor<{size}xf32, {{{layout}}}>"


def converted(values, size=1024):
    """(marked, offset) of conversions of the `values` named, the results named a, b, ...; how many
    barriers come between them; all bytes."""
    t, u = (tile(size, *threads) for threads in THREADS)
    sides = {"v": (t, u), "a": (u, t)}
    ops = "\n".join(
        f'%{name} = "mt.convert_layout"(%{value}) : ({sides[value][0]}) -> {sides[value][1]}'
        for name, value in zip("abcd", values, strict=False)
    )
    text = f"func.func @k(%v: {t}) {{\n{ops}\nreturn }}"
    with use():
        module = ir.Module.parse(f"module attributes {{mt.num_warps = 2 : i32}} {{ {text} }}")
        for step in (allocate_shared, insert_barriers):
            step.run(module, Target.parse("sm_80"), PassOptions())
        ops = list(walk(kernel_of(module)))
        found = [
            (MEETS_LATER in op.attributes, int_attribute(op, "mt.offset"))
            for op in ops
            if op.name == "mt.convert_layout"
        ]
        barriers = sum(op.name == "mt.barrier" for op in ops)
        return found, barriers, int_attribute(module.operation, "mt.shared_bytes")


def test_conversions_in_a_row_meet_once():
    found, barriers, total = converted("vv")
    assert [later for later, _ in found] == [True, False]
    assert len({offset for _, offset in found}) == 2
    assert barriers == 0 and total == 2 * 4096


def test_a_conversion_of_what_the_last_one_makes_meets_for_itself():
    found, barriers, total = converted("va")
    assert [later for later, _ in found] == [False, False]
    assert barriers == 0 and total == 2 * 4096


def test_three_in_a_row_meet_once():
    """What the first one makes is loaded before; its scratch waits for their barrier."""
    found, barriers, total = converted("vaaa", size=2048)
    assert [later for later, _ in found] == [False, True, True, False]
    assert len({offset for _, offset in found}) == 4 and barriers == 0
    assert total == 4 * 8192


def test_much_scratch_is_shared():
    found, barriers, total = converted("vv", size=8192)
    assert found == [(False, 0), (False, 0)]
    assert barriers == 1 and total == 32768
