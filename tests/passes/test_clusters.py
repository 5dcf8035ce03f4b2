"""Which copies two programs side by side share, who waits for whom, and why others stay alone."""

import re
from collections import defaultdict

import numpy as np
import pytest

from minitriton.ir import interpret
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.passes import clusters
from minitriton.passes.remarks import remarks_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of, walk
from tests.passes import ring_kernels
from tests.passes.test_warp_split import (
    attention,
    attention_data,
    data,
    halves,
    named,
    product,
)

PAIR = {"num_ctas": 2}
SHARED = "clusters of 2: programs side by side share this copy where its coordinates agree"


def remarks(module):
    """What is said of clusters, without source lines."""
    texts = [re.sub(r"^line \d+: ", "", text) for text in remarks_of(module)]
    return [text for text in texts if "cluster" in text or "num_ctas" in text]


@pytest.fixture
def copies(monkeypatch):
    """{(program, map): [(whether it is shared, coordinates), ...]} of what is interpreted."""
    found = defaultdict(list)

    def multicast(program, op, operands):
        x, y, z = program.ids
        number = x + program.grid[0] * (y + program.grid[1] * z)
        place = number, int_attribute(op, "map"), str(op.location)
        found[place].append((bool(operands[3]), tuple(int(v) for v in operands[4:])))
        return program_rule(program, op, operands)

    program_rule = interpret.RULES["mt.tma_multicast"]
    monkeypatch.setitem(interpret.RULES, "mt.tma_multicast", multicast)
    return found


def shared_pairs(copies):
    """By map, the pairs of programs that share: exactly those with equal coordinates."""
    pairs = defaultdict(set)
    for (program, map_, location), made in list(copies.items()):
        flags = {flag for flag, _ in made}
        other = copies[program ^ 1, map_, location]
        assert flags == {[c for _, c in made] == [c for _, c in other]}
        if flags == {True}:
            pairs[map_].add(program // 2)
    return pairs


@pytest.mark.parametrize("warps", [8, 4])
@pytest.mark.parametrize(
    ("grid", "rows", "columns"), [((2, 3, 1), set(), {0, 1, 2}), ((3, 2, 1), set(), {0, 2}),
                                  ((1, 4, 1), {0, 1}, set())],
)  # fmt: skip
def test_a_product(kernel, copies, warps, grid, rows, columns):
    """Programs lie along x first, where their rows differ; those at the end of a line of odd length
    have neighbours in the next one."""
    arrays, scalars = data(grid[0] * 128 - 7, grid[1] * 128 - 48, 208)
    module = product(kernel, num_warps=warps, **PAIR).check(arrays, scalars, grid)
    assert remarks(module) == [SHARED, SHARED]
    assert int_attribute(module.operation, "mt.num_ctas") == 2
    pairs = shared_pairs(copies)
    assert (pairs[0], pairs[1]) == (rows, columns)


@pytest.mark.parametrize("warps", [8, 4])
def test_who_waits_for_whom(kernel, warps):
    """All warps of both CTAs arrive at `empty`; everyone meets before the warps part, where they
    met before, and at the end."""
    module = product(kernel, num_warps=warps, **PAIR).compile()
    function = kernel_of(module)
    inits = named(function, "mt.mbarrier_init")
    assert [int_attribute(op, "count") for op in inits] == [1, 2 * warps]
    arrivals = named(function, "mt.mbarrier_arrive")
    assert len(arrivals) == 2 and all("cluster" in op.attributes for op in arrivals)
    body = [op.name for op in ops_of(function.regions[0].blocks[0])]
    start, split = body.index("mt.cluster_barrier"), body.index("mt.split_warps")
    assert body[start : split + 1] == ["mt.cluster_barrier", "mt.split_warps"] or warps == 4
    assert start < split and body.count("mt.cluster_barrier") == 2
    assert body[-2:] == ["mt.cluster_barrier", "func.return"]
    first, last = named(function, "mt.cluster_barrier")
    assert "relaxed" in first.attributes and "relaxed" not in last.attributes
    assert not [op for op in named(function, "mt.barrier") if "mt.all_warps" in op.attributes]
    expected = named(function, "mt.mbarrier_expect")
    assert [int_attribute(op, "bytes") for op in expected] == [2 * 128 * 64 * 2]


def test_what_is_compared_is_computed_once_by_the_producer(kernel):
    """In front of the loop over K, and not by the others."""
    module = product(kernel, **PAIR).compile()
    for copy in named(kernel_of(module), "mt.tma_multicast"):
        same = copy.operands[3].owner.operation
        assert "mt.producer" in same.attributes and same.name == "arith.cmpi"
        assert same.block == copy.parent.operation.block
    (producer,) = [v.operation for v in module.body.operations][1:]
    assert len(named(producer, "mt.tma_multicast")) == 2


def test_halves(kernel):
    """A tile of several boxes falls into halves between them; one of a single box gets two."""
    module = product(kernel, **PAIR).compile()
    first, second = named(kernel_of(module), "mt.tma_multicast")
    specs = read_specs(module.operation)
    assert (int_attribute(first, "halved"), int_attribute(second, "halved")) == (0, 1)
    assert [specs[int_attribute(op, "map")]["box"] for op in (first, second)] == [[64, 64]] * 2
    alone = read_specs(product(kernel).compile().operation)
    assert [spec["box"] for spec in alone[:2]] == [[64, 128], [64, 64]]


@pytest.mark.parametrize("grid", [(2, 2, 1), (3, 2, 1)])
def test_attention(kernel, copies, grid):
    """Two loops that share rings; the queries, copied once for a loop, are each program's own."""
    arrays, scalars = attention_data(grid[0] * 128 - 20, 64, grid[1])
    kern = attention(kernel, bn=128, d=64, causal=False, **PAIR)
    module = kern.check(arrays, scalars, grid)
    assert remarks(module) == [SHARED] * 4
    assert len(named(kernel_of(module), "mt.tma_copy")) == 2
    inits = [int_attribute(op, "count") for op in named(kernel_of(module), "mt.mbarrier_init")]
    assert sorted(inits) == [1, 1, 1, 8, 16, 16]
    arrivals = named(kernel_of(module), "mt.mbarrier_arrive")
    assert len([op for op in arrivals if "cluster" not in op.attributes]) == 2  # of the queries
    (pairs,) = {frozenset(found) for found in shared_pairs(copies).values()}
    assert pairs == ({0, 1} if grid[0] == 2 else {0, 2})


@pytest.mark.parametrize(
    ("kind", "first", "pairs"),
    [("", 2, set()), ("", 1, {0, 1}), ("a branch", 2, {0, 1}), ("a branch", 3, {0}),
     ("a table", 2, {1}), ("a table in the loop", 2, set())],
)  # fmt: skip
def test_coordinates_that_are_carried(kernel, copies, kind, first, pairs):
    """What each begins with decides. A's tiles are the same for all programs."""
    table = np.array([3, 0, 2, 2, 1, 4, 0, 0], np.int32)
    arrays = [halves(3 * 128, 128), halves(5 * 128, 128), np.zeros((4 * 128, 128), np.float32)]
    kern = kernel(
        ring_kernels.carried, a="*fp16", b="*fp16", c="*fp32", table="*i32", n="i32", M="i32",
        FIRST=first, B=128, KIND=kind, num_warps=8, target="sm_90a", **PAIR,
    )  # fmt: skip
    module = kern.check([*arrays, table], [3, 5], (4, 1, 1))
    assert remarks(module) == [SHARED, SHARED]
    found = shared_pairs(copies)
    assert found.pop(0) == {0, 1} and found.pop(1, set()) == pairs


BARRIER = "!mt.mem<tensor<1xi64, {offset = array<i32>}>>"
TYPES = {
    "BARRIERS": BARRIER.replace("<1x", "<2x1x"),
    "BARRIER": BARRIER,
    "SLOTS": "!mt.mem<tensor<2xROWSx64xf16, LAYOUT>>",
    "SLOT": "!mt.mem<tensor<ROWSx64xf16, LAYOUT>>",
}
TEXT = """module attributes {mt.num_ctas = 2 : i32, mt.num_warps = 8 : i32, mt.persistent = 1 : i32,
    mt.producer_warps = 4 : i32, mt.tensor_maps = "[{\\22box\\22: [64, ROWS]}]"} {
  func.func @k(%total: i32) {
    %zero = arith.constant 0 : i32
    %always = arith.constant true
    %tiles = "mt.local_alloc"() {mt.pipelined} : () -> SLOTS
    %full = "mt.local_alloc"() {mt.pipelined} : () -> BARRIERS
    "mt.mbarrier_init"(%full) {count = 1 : i32} : (BARRIERS) -> ()
    %empty = "mt.local_alloc"() {mt.pipelined} : () -> BARRIERS
    "mt.mbarrier_init"(%empty) {count = 8 : i32} : (BARRIERS) -> ()
    "mt.barrier"() {mt.all_warps} : () -> ()
    "mt.split_warps"() : () -> ()
    %own = "mt.cta_id"() : () -> i32
    %count = "mt.cta_count"() : () -> i32
    scf.for %p = %own to %total step %count : i32 {
      scf.for %k = %zero to %total step %count : i32 {
        %slot = "mt.mem_index"(%tiles, %zero) : (SLOTS, i32) -> SLOT
        %e = "mt.mem_index"(%empty, %zero) : (BARRIERS, i32) -> BARRIER
        %f = "mt.mem_index"(%full, %zero) : (BARRIERS, i32) -> BARRIER
        "mt.mbarrier_wait"(%e, %zero) {mt.producer} : (BARRIER, i32) -> ()
        "mt.tma_copy"(%slot, %f, %always, %zero, WHERE)
          {dims = array<i32: 1, 0>, map = 0 : i32, mt.producer}
          : (SLOT, BARRIER, i1, i32, i32) -> ()
        "mt.mbarrier_arrive"(%e, %always) : (BARRIER, i1) -> ()
      }
    } {mt.programs}
    return
  }
}"""


@pytest.mark.parametrize(
    ("rows", "where", "reason"),
    [(16, "%k", None), (16, "%p", None), (8, "%k", "its tile has no halves"),
     (16, "%own", "where it is depends on mt.cta_id")],
)  # fmt: skip
def test_copies_that_stay_alone(rows, where, reason):
    """Without halves, and where the place depends on more than the program."""
    bits = (64 * rows).bit_length() - 1
    layout = f"{{offset = array<i32: {', '.join(str(1 << bit) for bit in range(bits))}>}}"
    text = TEXT.replace("WHERE", where)
    for name, type_ in TYPES.items():
        text = text.replace(name, type_)
    module = ir.Module.parse(text.replace("ROWS", str(rows)).replace("LAYOUT", layout))
    clusters.run(module, Target.parse("sm_90a"), PassOptions())
    (copy,) = [op for op in walk(kernel_of(module)) if op.name.startswith("mt.tma_")]
    inits = [int_attribute(op, "count") for op in named(kernel_of(module), "mt.mbarrier_init")]
    if reason is None:
        assert remarks(module) == [SHARED] and copy.name == "mt.tma_multicast" and inits == [1, 16]
        same = copy.operands[3].owner.operation
        assert same.name == ("arith.constant" if where == "%k" else "arith.cmpi")
        return
    alone = "num_ctas 2 reduced to 1: neighbouring programs share no copies"
    assert remarks(module) == [f"not shared in a cluster: {reason}", alone]
    assert copy.name == "mt.tma_copy" and inits == [1, 8]


ALONE = [
    ({"num_stages": 1}, {}, "no loop has a producer warp"),
    ({}, {"specialize": False}, "no loop has a producer warp"),
    ({"target": "sm_80"}, {}, "sm_80 has no clusters"),
    ({"kind": "an end by program"}, {}, "programs may differ in length, or wait for each other"),
    ({"kind": "an end from memory"}, {}, "programs may differ in length, or wait for each other"),
    ({"kind": "a lock"}, {}, "programs may differ in length, or wait for each other"),
]


@pytest.mark.parametrize(("changed", "options", "reason"), ALONE, ids=str)
def test_kernels_that_cannot(kernel, changed, options, reason):
    """They are as without."""
    changed = dict(changed)
    kind = changed.pop("kind", "")
    arrays, scalars = data(144, 80, 160, 1, 2, 1, 0)
    module = product(kernel, kind, **changed, **PAIR).check(arrays, scalars, (2, 1, 1), **options)
    assert remarks(module) == [f"num_ctas 2 reduced to 1: {reason}"]
    assert int_attribute(module.operation, "mt.num_ctas") == 1
    same = product(kernel, kind, **changed).compile(**options)
    assert str(kernel_of(module)) == str(kernel_of(same))


def test_kernels_that_do_not_ask(kernel):
    module = product(kernel).compile()
    assert not remarks(module)
    assert str(kernel_of(module)) == str(kernel_of(product(kernel).compile(upto="legality")))
    assert not named(kernel_of(module), "mt.cluster_barrier")
