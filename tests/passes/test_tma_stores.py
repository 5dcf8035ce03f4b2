"""Which stores TMA makes, in which pieces, and that the programs then still mean the same."""

import numpy as np
import pytest

import minitriton.language as tl
from minitriton.ir.builder import i32_attr
from minitriton.ir.layouts import (
    adjacent_rows,
    bank_conflicts,
    default_blocked,
    mma_accumulator,
    shared_access_plan,
)
from minitriton.ir.mlir import ir
from minitriton.ir.register_maps import narrowed
from minitriton.ir.target import Target
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.passes import tma_stores
from minitriton.passes.pipeline import run_pipeline, tile_pipeline
from minitriton.passes.remarks import remarks_of
from minitriton.passes.tensor_maps import NotAffine
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.tma_stores import pieces_of
from minitriton.passes.traversal import int_attribute, integer_constant, kernel_of, walk
from tests.passes import store_kernels

RNG = np.random.default_rng(12)
HALVES = {"a": "*fp16", "b": "*fp16", "c": "*fp16"}
PLAIN = {**HALVES, "M": "i32", "N": "i32:16", "sc": "i32:16", "BM": 64, "BN": 64}


def named(text):
    """A constexpr string: plain ones are types here."""
    return tl.constexpr(text)


def halves(*shape):
    return (RNG.standard_normal(shape) / 4).astype(np.float16)


def ops_named(module, name):
    return [op for op in walk(kernel_of(module)) if op.name == name]


def reasons(module):
    mark = "store not by TMA: "
    return [text.split(mark)[1] for text in remarks_of(module) if mark in text]


def is_copied(module):
    """Whether all stores became TMA's; none may be half done."""
    copied, left = (len(ops_named(module, f"mt.{name}")) for name in ("tma_store", "store"))
    assert not (copied and left)
    assert bool(copied) != bool(reasons(module))
    return bool(copied)


def check_plain(kernel, kind, m=80, n=48, **changed):
    if kind == "columns first":
        changed = {"M": "i32:16", **changed}
    kern = kernel(
        store_kernels.plain, **{**PLAIN, "KIND": named(kind), "target": "sm_90a", **changed}
    )  # fmt: skip
    rows, columns = -(-m // 64) * 64, -(-n // 64) * 64
    c = halves(rows + 32, 2 * columns)
    scalars = [m, n, rows + 32 if kind == "columns first" else 2 * columns]
    grid = (rows // 64, columns // 64, 1)
    return kern.check([halves(m, 64), halves(64, n), c], scalars, grid)


@pytest.mark.parametrize("kind", ["box", "rows", "columns first", "wrapped", "shifted"])
def test_boxes(kernel, kind):
    module = check_plain(kernel, kind, n=64 if kind == "rows" else 48)
    assert is_copied(module)
    (spec,) = read_specs(module.operation)
    assert spec["base"] == 2 and spec["box"] == [64, 64] and spec["swizzle"] == 128
    assert spec["strides"] == [[[1, [5]]]]
    rows, columns = [[1, [3]]], [[1, [4]]]
    sizes = {"rows": [None, rows], "columns first": [rows, columns],
             "shifted": [columns, [[-16, []], [1, [3]]]]}  # fmt: skip
    assert spec["sizes"] == sizes.get(kind, [columns, rows])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("wrapped, seen", "elements that `%` or `where` moves along dimension 0 are stored"),
        ("triangle", "its mask is not a box of coordinates"),
        ("gathered", "its addresses are not an argument plus an affine function"),
        ("strided", "elements along dimension 1 are not known to be adjacent"),
    ],
)
def test_what_no_tensor_map_describes(kernel, kind, reason):
    module = check_plain(kernel, kind, m=64, n=64)
    assert not is_copied(module) and reasons(module) == [reason]


@pytest.mark.parametrize(
    ("changed", "copied"),
    [
        ({}, True),
        ({"target": "sm_120a"}, True),
        ({"target": "sm_80"}, False),
        ({"N": "i32"}, False),  # TMA writes whole 16 bytes
        ({"sc": "i32"}, False),
        ({"c": "*bf16"}, True),
        ({"c": "*fp32"}, False),  # suits memory as it is
        ({"BM": 16, "BN": 64}, False),  # too little
        ({"BM": 64, "BN": 16, "num_warps": 1}, False),
    ],
    ids=str,
)
def test_what_else_decides(kernel, changed, copied):
    arguments = {**PLAIN, "KIND": named("box"), "target": "sm_90a", **changed}
    module = kernel(store_kernels.plain, **arguments).compile()
    assert bool(ops_named(module, "mt.tma_store")) == copied
    assert len(ops_named(module, "mt.store")) == (not copied)


def test_the_option_turns_it_off(kernel):
    module = kernel(store_kernels.plain, **PLAIN, KIND=named("box"), target="sm_90a").compile(
        tma=False
    )
    assert ops_named(module, "mt.store") and not ops_named(module, "mt.tma_store")


def test_a_cache_modifier_stays(kernel):
    module = kernel(store_kernels.cached, **HALVES, N="i32", target="sm_90a").compile()
    assert reasons(module) == ["it says how to cache what it stores"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nothing", None),
        ("read before", None),
        ("other stored", None),
        ("other stored after", None),
        ("branches", None),
        ("twice", None),
        ("read after", "a later load may read what it stores"),
        ("argument read after", "a later load may read what it stores"),
        ("stored before", "another store may write the same memory"),
        ("atomic before", "an atomic operation orders it"),
        ("atomic after", "an atomic operation orders it"),
    ],
)
def test_what_others_do_to_memory(kernel, kind, reason):
    arguments = {**HALVES, "d": "*i32", "n": "i32", "KIND": named(kind), "target": "sm_90a"}
    arrays = [halves(64, 64), halves(64, 64), halves(128, 64), np.zeros(64, np.int32)]
    module = kernel(store_kernels.others, **arguments).check(arrays, [1])
    assert reasons(module) == ([] if reason is None else [reason])
    assert bool(ops_named(module, "mt.tma_store")) == (reason is None)
    whole = [op for op in ops_named(module, "mt.tma_store_wait") if "read" not in op.attributes]
    assert len(whole) == (kind == "twice")  # the later store wins


@pytest.mark.parametrize(("promised", "two"), [(True, False), (True, True), (False, False)])
def test_in_loops(kernel, promised, two):
    arguments = {
        **HALVES,
        "n": "i32",
        "PROMISED": promised,
        "BM": 128,
        "BN": 128,
        "TWO": two,
        "LAST": False,
    }
    arrays = [halves(384, 64), halves(64, 128), halves(2 * 384, 128)]
    kern = kernel(store_kernels.looped, **arguments, target="sm_90a", num_warps=8)
    module = kern.check(arrays, [3])
    assert is_copied(module) == promised
    if not promised:
        return
    loop = ops_named(module, "scf.for")[0]
    inside = [op.name for op in walk(loop)]
    assert "mt.local_alloc" not in inside and "mt.local_dealloc" not in inside
    first = inside.index("mt.local_store")
    assert "mt.barrier" in inside[inside.index("mt.tma_store_wait") : first]
    assert inside.count("mt.tma_store") == (2 if two else 1)  # a CTA alone on its SM has the memory
    buffers = [op for op in ops_named(module, "mt.local_alloc") if "mt.alignment" in op.attributes]
    ends = {op.operands[0] for op in ops_named(module, "mt.local_dealloc")}
    assert all(op.results[0] in ends for op in buffers)


@pytest.mark.parametrize(
    ("bn", "over", "masked", "pieces"),
    [(128, 0, True, 1), (256, 0, True, 2), (256, 64, True, 2), (256, 0, False, 2)],
)
def test_halves_of_a_tile_in_a_loop(kernel, bn, over, masked, pieces):
    """They go through the same two slots, one after the other; only the first waits until what
    was stored before is there, unless they may overlap."""
    kern = kernel(
        store_kernels.in_halves, **HALVES, n="i32", N="i32:16", first="i32:16", BM=128, BN=bn,
        OVER=over, MASKED=masked, target="sm_90a", num_warps=8,
    )  # fmt: skip
    module = kern.check([halves(384, 64), halves(64, bn), halves(384, bn + 16)], [3, bn + 16, 16])
    assert is_copied(module)
    (buffer,) = [
        op for op in ops_named(module, "mt.local_alloc") if "mt.alignment" in op.attributes
    ]
    slots = [op.operands[1].owner for op in ops_named(module, "mt.local_store")]
    assert all(slot.operands[0] == buffer.results[0] for slot in slots)
    numbers = [integer_constant(slot.operands[1]) for slot in slots]
    assert numbers == [0, 1] * pieces
    (loop,) = ops_named(module, "scf.for")
    waits = [
        ("read" in op.attributes, int_attribute(op, "pending"))
        for op in walk(loop) if op.name == "mt.tma_store_wait"
    ]  # fmt: skip
    apart = masked and not over
    second = [(True, 1)] * (pieces > 1) if apart else [(False, 0)]
    assert waits == [(False, 0), *second, *[(True, 1)] * (pieces - 1)]


def test_in_a_loop_and_after_it(kernel):
    arguments = {
        **HALVES,
        "n": "i32",
        "PROMISED": True,
        "BM": 64,
        "BN": 64,
        "TWO": False,
        "LAST": False,
    }
    kern = kernel(store_kernels.looped, **{**arguments, "LAST": True}, target="sm_90a")
    arrays = [halves(128, 64), halves(64, 64), halves(192, 64)]
    module = kern.check(arrays, [2])
    assert is_copied(module) and len(ops_named(module, "mt.tma_store")) == 2
    whole = [op for op in ops_named(module, "mt.tma_store_wait") if "read" not in op.attributes]
    assert len(whole) == 2  # each comes after others to the same argument


def test_in_a_loop_over_programs(kernel):
    """Its iterations are as independent as programs are: no promise, no wait for what is stored."""
    arguments = {
        **HALVES,
        "n": "i32",
        "PROMISED": False,
        "BM": 64,
        "BN": 64,
        "TWO": False,
        "LAST": False,
    }
    kern = kernel(store_kernels.looped, **arguments, target="sm_90a")
    module = kern.build()
    (loop,) = ops_named(module, "scf.for")
    loop.attributes["mt.programs"] = ir.UnitAttr.get()
    run_pipeline(module, tile_pipeline(kern.target, PassOptions(check=True)))
    assert is_copied(module)
    waits = ops_named(module, "mt.tma_store_wait")
    assert len(waits) == 2 and all("read" in op.attributes for op in waits)
    arrays = [halves(192, 64), halves(64, 64), halves(2 * 192, 64)]
    after, before = (kern.run(m, arrays, [3]) for m in (module, kern.build()))
    np.testing.assert_array_equal(after[2], before[2])


def test_a_budget_of_the_module(kernel):
    """In a loop, where no memory is free."""
    arguments = {
        **HALVES,
        "n": "i32",
        "PROMISED": True,
        "BM": 64,
        "BN": 128,
        "TWO": False,
        "LAST": False,
    }
    kern = kernel(store_kernels.looped, **arguments, target="sm_90a")
    for room, count in ((16384, 1), (16383, 4), (8191, 4), (4096, 4), (4095, 0)):
        module = kern.build()
        module.operation.attributes["mt.epilogue_bytes"] = i32_attr(room)
        run_pipeline(module, tile_pipeline(kern.target, PassOptions(check=True)))
        assert len(ops_named(module, "mt.tma_store")) == count
        assert count or reasons(module) == ["its pieces do not fit 4095 bytes of shared memory"]


def test_memory_that_a_loop_has_done_with(kernel):
    """The tile goes whole where that takes no more memory than the loop did, or than loops that
    go on with the next program leave."""
    arguments = {**HALVES, "K": "i32:16", "BM": 128, "BN": 256, "num_warps": 8}
    arrays = [halves(128, 48), halves(48, 256), halves(128, 256)]
    for block, stages, specialize, pieces, size in (
        (64, 3, False, 1, 65536),
        (16, 3, False, 4, 32768),
        (64, 3, True, 1, 65536),
        (64, 4, True, 4, 32768),
    ):
        kern = kernel(
            store_kernels.pipelined, **arguments, BK=block, target="sm_90a", num_stages=stages
        )
        module = kern.compile(specialize=specialize)
        assert len(ops_named(module, "mt.tma_store")) == pieces
        assert f": {size} bytes" in remarks_of(module)[-1]
        assert ("mt.persistent" in module.operation.attributes) == specialize
        waits = ops_named(module, "mt.tma_store_wait")
        assert all("read" in op.attributes for op in waits)
    kernel(store_kernels.pipelined, **arguments, BK=16, target="sm_90a").check(arrays, [48])


def test_stores_of_one_block_are_awaited_together(kernel):
    arguments = {**HALVES, "d": "*i32", "n": "i32", "KIND": named("twice"), "target": "sm_90a"}
    module = kernel(store_kernels.others, **arguments).compile()
    names = [op.name for op in walk(kernel_of(module))]
    last = len(names) - names[::-1].index("mt.tma_store")
    wait = last + names[last:].index("mt.tma_store_wait")
    assert names[wait + 1 : wait + 3] == ["mt.local_dealloc"] * 2
    offsets = [int_attribute(op, "mt.offset") for op in ops_named(module, "mt.local_alloc")]
    assert len(set(offsets)) == 2


WIDE = mma_accumulator((128, 256), (8, 1))


@pytest.mark.parametrize(
    ("layout", "order", "bits", "room", "expected"),
    [
        (WIDE, (1, 0), 16, 1 << 16, (1, 256, 1, 1, 1 << 16)),
        (WIDE, (1, 0), 16, 1 << 15, (1, 64, 4, 2, 1 << 15)),
        (WIDE, (1, 0), 16, 1 << 14, (1, 32, 8, 2, 1 << 14)),
        (WIDE, (1, 0), 16, 12 << 10, (1, 32, 8, 1, 1 << 13)),  # one slot
        (WIDE, (0, 1), 16, 1 << 15, (1, 64, 4, 2, 1 << 15)),  # rows are warps' own
        (WIDE, (1, 0), 8, 1 << 15, (1, 256, 1, 1, 1 << 15)),
        (mma_accumulator((256, 128), (4, 2)), (1, 0), 16, 1 << 15, (1, 32, 4, 2, 1 << 15)),
        (mma_accumulator((1, 64, 64), (1, 4, 1)), (2, 1, 0), 16, 1 << 15, (2, 64, 1, 1, 8192)),
        (mma_accumulator((128, 192), (8, 1)), (1, 0), 16, 1 << 16, (1, 192, 1, 1, 48 << 10)),
        (mma_accumulator((128, 192), (8, 1)), (1, 0), 16, 1 << 15, (1, 64, 3, 2, 1 << 15)),
        (mma_accumulator((192, 64), (4, 1)), (1, 0), 16, 1 << 14, (0, 64, 3, 2, 1 << 14)),
    ],
    ids=str,
)
def test_pieces(layout, order, bits, room, expected):
    found = pieces_of(layout, order, bits, room, stmatrix=True)
    assert (found.axis, found.size, found.count, found.slots, found.bytes) == expected


@pytest.mark.parametrize(
    ("bits", "room", "reason"),
    [(16, 4096, "do not fit 4096 bytes"), (32, 1 << 20, "without bank conflicts")],
)
def test_no_pieces(bits, room, reason):
    with pytest.raises(NotAffine, match=reason):
        pieces_of(WIDE, (1, 0), bits, room, stmatrix=True)


def test_smaller_pieces_where_memory_is_short(kernel):
    """The loop's buffers leave less than the budget."""
    arguments = {
        **HALVES,
        "n": "i32",
        "PROMISED": True,
        "BM": 128,
        "BN": 128,
        "TWO": False,
        "LAST": False,
    }
    kern = kernel(store_kernels.looped, **arguments, target="sm_90a", num_warps=8)
    sizes = []
    for spare in (0, 1 << 14):
        target = kern.target
        module = kern.build()
        passes = tile_pipeline(target, PassOptions(check=True))
        names = [p.name for p in passes]
        run_pipeline(module, passes[: names.index("tma_stores")])
        exchanges = [op.operands[1].owner.operation for op in ops_named(module, "mt.store")]
        used = tma_stores.bytes_with(kernel_of(module), [], 1024, exchanges)
        small = Target("sm_90a", 90, 84, used + (1 << 15) - spare, target.features)
        tma_stores.run(module, small, PassOptions(check=True))
        (remark,) = [text for text in remarks_of(module) if "store by TMA" in text]
        sizes.append(remark.split(": ")[2])
    assert sizes == ["32768 bytes", "16384 bytes"]


def test_fragments_of_a_transpose():
    """Neighbouring lanes have different rows, and threads many: TMA stores them all the same."""
    order = adjacent_rows(256, 32)
    fragments = mma_accumulator((256, 128), (8, 1), row_order=order)
    turned = fragments.transpose((1, 0))
    assert tma_stores._is_scattered(turned, 1)
    assert not tma_stores._is_scattered(fragments, 1)
    assert not tma_stores._is_scattered(default_blocked((128, 256), 8, vec=4), 1)
    assert not tma_stores._is_scattered(mma_accumulator((64, 16), (4, 1)).transpose((1, 0)), 1)
    found = pieces_of(turned, (1, 0), 32, 32768, stmatrix=True)
    assert (found.count, found.slots, found.bytes) == (8, 2, 32768)
    part = narrowed(turned, found.axis, found.size)
    assert shared_access_plan(found.slot, part, 32).vec == 2
    assert bank_conflicts(found.slot, part, 2, 32) == 2
