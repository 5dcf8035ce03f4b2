"""Bulk copies: every swizzle, rank and edge of tensors, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitriton.runtime.emulator import (
    BadTensorMap,
    Emulator,
    EmulatorError,
    Misaligned,
    OutOfBounds,
    TensorMap,
    UnsupportedPTX,
)
from tests.emulator.tma_harness import (
    INIT,
    LOAD_2D,
    aligned,
    assembles,
    kernel,
    launch,
    model_load,
    model_store,
    tensor_of,
    wait,
)

RNG = np.random.default_rng(3)
LANDINGS = ("late", "early", "random")
#: Each CTA has its own five coordinates in inp: to %r40 .. %r44.
COORDINATES = "mad.wide.u32 %d5, %r3, 20, %d11;" + "".join(
    f"ld.global.u32 %r{40 + d}, [%d5+{4 * d}];" for d in range(5)
)
#: The n bytes of the tile to out, a piece per CTA.
DUMP = """
    mul.lo.u32 %r5, %r3, %r9;
    cvt.u64.u32 %d6, %r5;
    add.s64 %d6, %d6, %d10;
    shl.b32 %r6, %r1, 2;
DUMP:
    setp.ge.u32 %p4, %r6, %r9;
    @%p4 bra DUMPED;
    add.u32 %r7, %r10, %r6;
    ld.shared.u32 %r8, [%r7];
    cvt.u64.u32 %d7, %r6;
    add.s64 %d7, %d6, %d7;
    st.global.u32 [%d7], %r8;
    mad.lo.u32 %r6, %r4, 4, %r6;
    bra DUMP;
DUMPED:
"""
FILL = DUMP.replace("ld.shared.u32 %r8, [%r7];", "").replace("DUMP", "FILL").replace(
    "st.global.u32 [%d7], %r8;", "ld.global.u32 %r8, [%d7]; st.shared.u32 [%r7], %r8;"
)  # fmt: skip


def corner(rank: int) -> str:
    return "{" + ", ".join(f"%r{40 + d}" for d in range(rank)) + "}"


#: Thread 0 loads the box at its CTA's coordinates; all threads copy the tile to out.
LOADER = f"""{INIT}
    @%p1 bra LOADED;
    {COORDINATES}
    mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [bars], %r9;
    cp.async.bulk.tensor.{{rank}}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [tile], [%d20, {{corner}}], [bars];
LOADED:
    {wait("%r11", "0").replace("{", "{{").replace("}", "}}")}
    {DUMP}
"""
#: All threads fill the tile from out; thread 0 stores the box at its CTA's coordinates.
STORER = f"""{FILL}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra STORED;
    {COORDINATES}
    cp.async.bulk.tensor.{{rank}}d.global.shared::cta.bulk_group [%d20, {{corner}}], [tile];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    cp.async.bulk.wait_group 0;
STORED:
"""


@functools.cache
def program(text: str, rank: int) -> Emulator:
    return Emulator(assembles(text.format(rank=rank, corner=corner(rank))))


def run_boxes(
    body: str, data: np.ndarray, box: TensorMap, corners: list[tuple[int, ...]],
    tiles: np.ndarray, **options,
) -> None:  # fmt: skip
    """One CTA per corner moves its box of `data` from or to its row of `tiles`."""
    places = np.zeros((len(corners), 5), np.int32)
    places[:, : box.rank] = corners
    launch(
        program(body, box.rank), tiles, places, (box,), (data,), box.box_bytes, len(corners), 64,
        **options,
    )  # fmt: skip


def check_load(data: np.ndarray, box: TensorMap, corners: list[tuple[int, ...]], **options) -> None:
    out = np.full((len(corners), box.box_bytes), 0xAA, np.uint8)
    run_boxes(LOADER, data, box, corners, out, **options)
    for got, at in zip(out, corners, strict=True):
        np.testing.assert_array_equal(got, model_load(data, box, at))


def check_store(
    data: np.ndarray, box: TensorMap, corners: list[tuple[int, ...]], **options
) -> None:
    tiles = RNG.integers(0, 256, (len(corners), box.box_bytes), dtype=np.uint8)
    expected = data.copy()
    for source, at in zip(tiles, corners, strict=True):
        model_store(expected, box, at, source)
    run_boxes(STORER, data, box, corners, tiles, **options)
    np.testing.assert_array_equal(data, expected)


def edges(box: TensorMap) -> list[tuple[int, ...]]:
    """Corners inside, over each edge of each dimension, and wholly outside."""
    inside = tuple((d - b) // 2 for d, b in zip(box.dims, box.box, strict=True))
    result = [inside]
    for d in range(box.rank):
        for at in (-1, -box.box[d], -box.box[d] - 3, box.dims[d] - 1, box.dims[d], 1 << 20):
            result.append((*inside[:d], at, *inside[d + 1 :]))
    return result


SHAPES = [
    ((40,), 4, (), (16,)),
    ((24, 20), 2, (1,), (16, 8)),
    ((64, 9, 5), 1, (0, 2), (32, 4, 3)),
    ((12, 5, 4, 3), 8, (1, 0, 1), (4, 2, 3, 2)),
    ((16, 3, 4, 3, 5), 2, (0, 1, 0, 0), (8, 2, 2, 3, 2)),
]


@pytest.mark.parametrize(("dims", "size", "padding", "box"), SHAPES)
@pytest.mark.parametrize("fill", ["zero", "nan"])
def test_boxes_of_every_rank_over_every_edge(dims, size, padding, box, fill) -> None:
    fill = fill if size > 1 else "zero"
    data, described = tensor_of(dims, size, padding, box, 0, fill)
    check_load(data, described, edges(described))
    for at in edges(described):
        check_store(data, described, [at])


@pytest.mark.parametrize("swizzle", [32, 64, 128])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_swizzles(swizzle: int, size: int) -> None:
    columns = swizzle // size
    data, box = tensor_of((3 * columns, 70), size, (1,), (columns, 37), swizzle)
    corners = [(0, 0), (columns, 33), (2 * columns, 40), (16 // size, 5), (-8, -9), (-1, 60)]
    check_load(data, box, corners)
    data, box = tensor_of((3 * columns, 70), size, (1,), (columns, 16), swizzle)
    check_store(data, box, [(0, 0), (columns, 33), (2 * columns + 3, 60), (-5, 40)])


@pytest.mark.parametrize("landing", LANDINGS)
def test_landing_policies_agree(landing: str) -> None:
    data, box = tensor_of((64, 30), 2, (0,), (64, 8), 128)
    check_load(data, box, [(0, 8 * i) for i in range(4)], landing=landing)
    check_store(data, box, [(0, 8 * i) for i in range(4)], landing=landing)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_box_of_any_tensor(data: st.DataObject) -> None:
    draw = data.draw
    rank = draw(st.integers(1, 3))
    size = draw(st.sampled_from([1, 2, 4, 8]))
    swizzle = draw(st.sampled_from([0, 32, 64, 128])) if rank > 1 else 0
    row = swizzle or 16 * draw(st.integers(1, 6))
    box = (row // size, *(draw(st.integers(1, 6)) for _ in range(rank - 1)))
    dims = tuple(draw(st.integers(1, 2 * b + 3)) for b in box)
    padding = tuple(draw(st.integers(0, 2)) for _ in range(rank - 1))
    fill = draw(st.sampled_from(["zero", "nan"])) if size > 1 else "zero"
    tensor, described = tensor_of(dims, size, padding, box, swizzle, fill)
    at = tuple(draw(st.integers(-b - 1, d + 1)) for b, d in zip(box, dims, strict=True))
    check_load(tensor, described, [at])
    check_store(tensor, described, [at])


def test_the_swizzle_goes_by_address() -> None:
    # A box that does not start at a multiple of 1024 bytes is permuted as if it were cut out.
    text = LOADER.format(rank=2, corner=corner(2))
    for start in (128, 384, 1152):
        data, box = tensor_of((64, 16), 2, (0,), (64, 16), 128)
        body = text.replace("[tile], [", f"[tile+{start}], [").replace("[%r7]", f"[%r7+{start}]")
        out = np.zeros(box.box_bytes, np.uint8)
        launch(kernel(body), out, np.zeros(5, np.int32), (box,), (data,), box.box_bytes)
        np.testing.assert_array_equal(out, model_load(data, box, (0, 0), start))


# -- straight copies
STRAIGHT = f"""{INIT}
    @%p1 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bars], 512;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%d11], %r9, [bars];
    sub.u32 %r5, 512, %r9;
    cvt.u64.u32 %d5, %r9;
    add.s64 %d5, %d5, %d11;
    add.u32 %r6, %r10, %r9;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%d5], %r5, [bars];
    {wait("%r11", "0", "test_wait")}
    cp.async.bulk.global.shared::cta.bulk_group [%d10], [tile], 512;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
LOADED:
"""


@pytest.mark.parametrize("landing", LANDINGS)
def test_straight_copies(landing: str) -> None:
    source, target = aligned(512), aligned(512)
    source[:] = RNG.integers(0, 256, 512)
    launch(assembles(STRAIGHT), target, source, n=176, block=64, landing=landing)
    np.testing.assert_array_equal(target, source)


# -- refusals
LOAD_ONE = f"""{INIT}
    @%p1 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [bars], 1024;
    {LOAD_2D} [tile], [%d20, {{0, 0}}], [bars];
LOADED:
    {wait("%r11", "0")}
"""


def load_one(ptx: str, box: TensorMap | bytes, *arrays: np.ndarray, **options) -> None:
    out = np.zeros(16, np.uint32)
    launch(ptx, out, out, (box,), arrays, block=64, **options)


BAD_COPIES = {
    "box not at 128": ("[tile], [", "[tile+64], [", Misaligned, "multiple of 128"),
    "past shared memory": ("[tile], [", "[tile+32640], [", OutOfBounds, "shared access"),
    "rank": ("2d.shared", "3d.shared", BadTensorMap, "rank 2"),
    "over an mbarrier": ("[bars]", "[tile+1016]", EmulatorError, "plain memory"),
}


@pytest.mark.parametrize("case", BAD_COPIES)
def test_bad_copies_are_refused(case: str) -> None:
    old, new, kind, message = BAD_COPIES[case]
    body = LOAD_ONE.replace(old, new)
    if case == "rank":
        body = body.replace("{0, 0}", "{0, 0, 0}")
    if case == "over an mbarrier":
        body = body.replace("%r11", "%r12").replace("READY:", "READY: add.u32 %r12, %r10, 1016;")
    data, box = tensor_of((32, 8), 4, (0,), (32, 8), 128)
    with pytest.raises(kind, match=message) as caught:
        load_one(kernel(body), box, data)
    assert "cp.async.bulk.tensor" in caught.value.details["ptx"]


@pytest.mark.parametrize("landing", LANDINGS)
def test_floats_are_rounded_to_tf32(landing: str) -> None:
    """To nearest, of two to the one with an even last bit; past the largest to infinity."""
    data, box = tensor_of((32, 8), 4, (0,), (32, 8), 128)
    bits = data.view(np.uint32)
    special = {  # bits: rounded
        0x3F800FFF: 0x3F800000, 0x3F801000: 0x3F800000, 0x3F801001: 0x3F802000,
        0x3F803000: 0x3F804000, 0xBF803000: 0xBF804000, 0x7F7FFFFF: 0x7F800000,
        0x7F800000: 0x7F800000, 0xFF800000: 0xFF800000, 0x7FC00001: 0x7FC00001,
        0x00000FFF: 0x00000000, 0x00001800: 0x00002000, 0x80000001: 0x80000000,
    }  # fmt: skip
    bits[: len(special)] = list(special)
    bits[len(special) :] &= 0xBFFFFFFF  # finite
    exact = dataclasses.replace(box, swizzle=0)
    out = np.zeros(1024, np.uint8)
    for rounding in (False, True):
        made = dataclasses.replace(exact, tf32=rounding)
        launch(kernel(LOAD_ONE + DUMP), out, out, (made,), (data,), n=1024, landing=landing)
        found = out.view(np.uint32)
        if not rounding:
            assert (found == bits).all()
            continue
        assert found[: len(special)].tolist() == list(special.values())
        kept = found[len(special) :].view(np.float32).astype(np.float64)
        given = bits[len(special) :].view(np.float32).astype(np.float64)
        assert (np.abs(kept - given) <= np.maximum(np.abs(given) * 2.0**-11, 2.0**-137)).all()
        assert not (found[len(special) :] & 0x1FFF).any()


def test_memory_that_is_not_there() -> None:
    data, box = tensor_of((32, 8), 4, (0,), (32, 8), 128)
    load_one(kernel(LOAD_ONE), box, data)
    with pytest.raises(OutOfBounds, match="extra0") as caught:
        load_one(kernel(LOAD_ONE), box, data[: 7 * 128 + 112])
    assert "cp.async.bulk.tensor" in caught.value.details["ptx"]
    # The same bytes are nobody's concern where the map says that the tensor ends before them.
    short = TensorMap(box.address, 4, (32, 7), (128,), (32, 8), 128)
    load_one(kernel(LOAD_ONE), short, data[: 7 * 128])


def test_maps_that_begin_before_the_tensor() -> None:
    """All is well while boxes lie inside; for others a GPU may look at the base."""
    rows = aligned(4096)
    rows[:] = RNG.integers(0, 256, 4096)
    data, tiles = rows[1024:], np.zeros((1, 1024), np.uint8)
    box = TensorMap(rows.ctypes.data, 4, (32, 32), (128,), (32, 8), 0)
    run_boxes(LOADER, data, box, [(0, 24)], tiles)
    assert (tiles[0] == rows[24 * 128 :]).all()
    with pytest.raises(OutOfBounds, match="base address .* starts 1024 bytes before"):
        run_boxes(LOADER, data, box, [(0, 28)], tiles)
    run_boxes(LOADER, rows, box, [(0, 28)], tiles)


def test_maps_that_are_none() -> None:
    data, box = tensor_of((32, 8), 4, (0,), (32, 8), 128)
    with pytest.raises(BadTensorMap, match="all zero"):
        load_one(kernel(LOAD_ONE), bytes(128), data)
    with pytest.raises(BadTensorMap, match="not made by"):
        load_one(kernel(LOAD_ONE), bytes(range(128)), data)
    with pytest.raises(BadTensorMap, match="multiple of 64"):
        load_one(kernel("add.s64 %d20, %d20, 8;" + LOAD_ONE), box, data)
    with pytest.raises(BadTensorMap, match="fill the swizzle span"):
        load_one(kernel(LOAD_ONE), TensorMap(box.address, 4, (32, 8), (128,), (16, 8), 128), data)


def test_other_ways_to_name_a_map() -> None:
    data, box = tensor_of((32, 8), 4, (0,), (32, 8), 128)
    load_one(kernel(LOAD_ONE).replace("cvta.param.u64 %d20, %d20;", ""), box, data)
    prefetches = """
    prefetch.tensormap [%d20];
    cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d20, {0, 0}];
"""
    load_one(assembles(prefetches + LOAD_ONE), box, data)
    with pytest.raises(BadTensorMap):
        load_one(kernel(prefetches + LOAD_ONE), bytes(128), data)
    # A map that lies in global memory.
    image = aligned(128, 64)
    image[:] = np.frombuffer(box.pack(), np.uint8)
    out = np.zeros(16, np.uint32)
    launch(kernel("mov.u64 %d20, %d11;" + LOAD_ONE), out, image, (), (data,), block=64)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.multicast::cluster"
        " [%d20, {0, 0}], [tile], %h1;",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [tile], [%d20, {0, 0, 0}], [bars], {%h1};",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%d20, {0, 0}], [tile];",
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [tile], [%d20, {0}], [bars];",
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedPTX):
        Emulator(kernel(text))


GOOD_MAP = {"address": 4096, "element_bytes": 2, "dims": (64, 8), "strides": (128,),
            "box": (64, 8)}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", 4104), ("element_bytes", 3), ("dims", ()), ("dims", (64, 0)),
        ("dims", (64, 2**32 + 1)), ("dims", (64,) * 6), ("strides", ()), ("strides", (136,)),
        ("strides", (1 << 40,)), ("box", (64,)), ("box", (64, 257)), ("box", (64, 0)),
        ("box", (4, 8)), ("swizzle", 16), ("swizzle", 64), ("fill", "one"),
        ("tf32", True),
    ],
)  # fmt: skip
def test_maps_are_validated(field: str, value: object) -> None:
    name = "box" if (field, value) == ("swizzle", 64) else field
    with pytest.raises(ValueError, match=rf"tensor map: {name}"):
        TensorMap(**GOOD_MAP | {field: value})


def test_maps_survive_packing() -> None:
    for box in (
        TensorMap(**GOOD_MAP),
        TensorMap(
            16,
            4,
            (2**32, 1, 2, 3, 2**32),
            (16, 0, (1 << 40) - 16, 32),
            (4, 256, 1, 2, 3),
            0,
            "nan",
            tf32=True,
        ),
    ):
        assert TensorMap.unpack(box.pack()) == box and len(box.pack()) == 128
