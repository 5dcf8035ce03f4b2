"""Which loops a producer warp copies for, why others not, and that the programs mean the same."""

import re

import numpy as np
import pytest

from minitriton.passes.remarks import remarks_of
from minitriton.passes.traversal import int_attribute, kernel_of, ops_of, walk
from tests.passes import ring_kernels

RNG = np.random.default_rng(21)
HOPPER = {"num_warps": 8, "target": "sm_90a"}
MATRICES = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "M": "i32", "N": "i32", "K": "i32",
            "sa": "i32:16", "sb": "i32:16"}  # fmt: skip
BLOCKS = {"BM": 128, "BN": 128, "BK": 64}
HEADS = {"q": "*fp16", "k": "*fp16", "v": "*fp16", "o": "*fp32", "T": "i32"}
SPLIT = "warp specialised: a producer warp copies 3 stages by TMA"
PERSISTENT = "persistent: each CTA runs several programs"


def halves(*shape):
    return (RNG.standard_normal(shape) / 4).astype(np.float16)


def ends(*numbers):
    return np.array([*numbers, 0, 0, 0, 0][:4], np.int32)


def product(kernel, kind="", **changed):
    arguments = {**MATRICES, "ends": "*i32", **BLOCKS, "KIND": kind, **HOPPER, **changed}
    return kernel(ring_kernels.product, **arguments)


def data(m, n, k, *numbers):
    """The arrays of a product and its scalars."""
    arrays = [halves(m, k), halves(k, n), np.zeros((m, n), np.float32), ends(*numbers)]
    return arrays, [m, n, k, k, n]


def remarks(module):
    """Without source lines, and without what the loop then gets."""
    texts = [text.partition(": ")[2] for text in remarks_of(module)]
    return [text for text in texts if "specialised" in text or "persistent" in text]


def loops_of(module):
    return [op for op in walk(kernel_of(module)) if op.name == "scf.for"]


def named(op, name):
    return [inner for inner in walk(op) if inner.name == name]


@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 64), (144, 80, 448), (16, 16, 80)])
def test_a_product(kernel, m, n, k):
    arrays, scalars = data(m, n, k)
    grid = (-(-m // 128), -(-n // 128), 1)
    module = product(kernel).check(arrays, scalars, grid)
    assert remarks(module) == [SPLIT, PERSISTENT]
    assert int_attribute(module.operation, "mt.producer_warps") == 4
    assert int_attribute(module.operation, "mt.persistent") == 1


def test_no_iterations(kernel):
    """The last slot is given back only if there was an iteration."""
    arrays, _ = data(32, 32, 64)
    arrays[2][:] = 7
    kern = product(kernel)
    module = kern.compile()
    (result,) = kern.run(module, arrays, [32, 32, 0, 64, 32])[2:3]
    assert not result.any()
    program, loop = loops_of(module)
    (after,) = [
        op for op in ops_of(program.regions[0].blocks[0]) if op.name == "mt.mbarrier_arrive"
    ]
    runs = after.operands[1].owner.operation
    assert runs.name == "arith.cmpi"
    assert {*runs.operands} == {*list(loop.operands)[:2]}


def test_what_waits_for_what(kernel):
    """Per iteration: the producer waits for its slot and expects its bytes; the others wait for
    both tiles at once, and give back the slot of the iteration before."""
    module = product(kernel).compile()  # keeps its ops alive
    loop = loops_of(module)[1]
    order = [op for op in ops_of(loop.regions[0].blocks[0]) if op.name.startswith("mt.")]
    order = [(op.name[3:], "mt.producer" in op.attributes) for op in order]
    assert [name for name in order if name[0] != "mem_index"] == [
        ("mbarrier_wait", True), ("mbarrier_expect", True), ("tma_copy", True), ("tma_copy", True),
        ("mbarrier_wait", False), ("warpgroup_dot", False), ("warpgroup_wait", False),
        ("mbarrier_arrive", False),
    ]  # fmt: skip
    assert int_attribute(named(loop, "mt.mbarrier_expect")[0], "bytes") == 2 * 128 * 64 * 2
    assert int_attribute(named(loop, "mt.warpgroup_wait")[0], "pending") == 1


def test_who_arrives_at_the_barriers(kernel):
    """`full` counts the thread that expects, `empty` each warp that multiplies."""
    module = product(kernel).compile()
    inits = named(kernel_of(module), "mt.mbarrier_init")
    assert [int_attribute(op, "count") for op in inits] == [1, 8]


REFUSED = [
    ("a write before", {}, "the kernel writes memory before it"),
    ("an end from a while", {}, "the kernel writes memory before it"),
    ("a wait before", {}, "the kernel waits for the one before it"),
    ("an end from a tile", {},
     "what it copies, or how often, depends on a tile (mt.reduce)"),
    ("a mask of no box", {"K": "i32:16"}, "threads make some of its copies"),
    ("an operand used twice", {}, "what it loads is also used as it comes"),
    ("", {"maxnreg": 168}, "the kernel sets maxnreg"),
    ("", {"BN": 256, "BK": 256}, "its slots do not fit beside the kernel's other shared memory"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changed", "reason"), REFUSED, ids=str)
def test_refusals(kernel, kind, changed, reason):
    arrays, scalars = data(144, 80, 160, 1, 2, 1, 0)
    module = product(kernel, kind, **changed).check(arrays, scalars, (2, 1, 1))
    assert remarks(module) == [f"not warp specialised: {reason}"]
    assert not named(kernel_of(module), "mt.split_warps")
    assert "mt.producer_warps" not in module.operation.attributes


def test_stores_where_slots_were(kernel):
    """Slots that leave the store no memory of its own; all warps are done with them before."""
    arrays, scalars = data(144, 80, 320)
    arrays[2] = arrays[2].astype(np.float16)
    module = product(kernel, BN=256, BK=144, c="*fp16", N="i32:16").check(
        arrays, scalars, (2, 1, 1)
    )
    assert remarks(module) == [
        "warp specialised: a producer warp copies 2 stages by TMA",
        "not persistent: what it stores takes the memory of its slots",
    ]
    (loop,) = loops_of(module)
    following = [op.name for op in ops_of(loop.block)][ops_of(loop.block).index(loop) :]
    before = following[: following.index("mt.local_store")]
    assert before.count("mt.local_dealloc") == 2  # of A and B
    assert before.index("mt.local_dealloc") < before.index("mt.barrier")
    assert int_attribute(module.operation, "mt.shared_bytes") > 2 * (128 + 256) * 144 * 2


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({"num_warps": 4, "BN": 64}, {}),
        ({"num_warps": 16, "BM": 256}, {}),
        ({"BK": 32}, {}),  # too few products
        ({"target": "sm_80"}, {}),
        ({"num_stages": 1}, {}),
        ({}, {"specialize": False}),
        ({}, {"tma": False}),
        ({}, {"wgmma": False}),
        ({}, {"pipeline_loads": False}),
    ],
    ids=str,
)
def test_kernels_that_are_not_asked(kernel, changed, options):
    arrays, scalars = data(144, 80, 160)
    module = product(kernel, **changed).check(arrays, scalars, (2, 1, 1), **options)
    assert not remarks(module) and not named(kernel_of(module), "mt.split_warps")


def test_inside_another_loop(kernel):
    kern = kernel(ring_kernels.tile_after_tile, **MATRICES, **BLOCKS, **HOPPER)
    arrays, scalars = data(400, 80, 160)
    module = kern.check(arrays[:3], scalars, (2, 1, 1))
    assert remarks(module) == ["not warp specialised: a loop around it may write what it reads"]


@pytest.mark.parametrize(("bn", "fits"), [(128, True), (256, False)])
def test_results_of_several_dots(kernel, bn, fits):
    kern = kernel(
        ring_kernels.two_products, a="*fp16", b="*fp16", c="*fp32", n="i32:16", BM=128, BN=bn,
        WIDE=bn, BK=64, TWICE=False, **HOPPER,
    )  # fmt: skip
    n, width = 192, 2 * bn
    module = kern.check([halves(128, n), halves(n, width), np.zeros((128, width), np.float32)], [n])
    reason = "its products have too many results: ptxas would wait for each wgmma"
    assert remarks(module) == ([SPLIT, PERSISTENT] if fits else [f"not warp specialised: {reason}"])


def test_results_of_dots_that_add_to_one_sum(kernel):
    """They have the same registers: 64 and 128 in all, as many as may be."""
    kern = kernel(
        ring_kernels.two_products, a="*fp16", b="*fp16", c="*fp32", n="i32:16", BM=128, BN=128,
        WIDE=256, BK=64, TWICE=True, **HOPPER,
    )  # fmt: skip
    module = kern.check(
        [halves(128, 192), halves(192, 384), np.zeros((128, 384), np.float32)], [192]
    )
    assert remarks(module) == [SPLIT, PERSISTENT]


def attention(kernel, bn=64, d=128, inside=True, causal=True, **changed):
    return kernel(
        ring_kernels.attention, **HEADS, BM=128, BN=bn, D=d, INSIDE=inside, CAUSAL=causal,
        **{**HOPPER, **changed},
    )  # fmt: skip


def attention_data(tokens, d, heads=1):
    arrays = [halves(heads, tokens, d) for _ in "qkv"]
    return [*arrays, np.zeros((heads, tokens, d), np.float32)], [tokens]


@pytest.mark.parametrize("tokens", [16, 272])
def test_loops_that_share_rings(kernel, tokens):
    """Keys and values have a ring each, q one of its own with one slot; the second loop goes on in
    all three."""
    arrays, scalars = attention_data(tokens, 128)
    module = attention(kernel).check(arrays, scalars, (-(-tokens // 128), 1, 1))
    assert remarks(module)[:2] == [SPLIT, SPLIT]
    slots = [
        op.results[0].type for op in named(kernel_of(module), "mt.local_alloc")
        if "mt.alignment" in op.attributes
    ]  # fmt: skip
    assert len(slots) == 3
    inits = [int_attribute(op, "count") for op in named(kernel_of(module), "mt.mbarrier_init")]
    assert inits == [1, 8] * 3
    first, second = loops_of(module)
    carried = list(second.operands)[-2:]
    assert carried == list(first.results)[-2:]


def test_one_slot_for_what_is_done_with(kernel):
    """Scores are waited for in their iteration: keys have to do with one slot, before values."""
    arrays, scalars = attention_data(272, 256)
    module = attention(kernel, bn=96, d=256).check(arrays, scalars, (3, 1, 1))
    text = "warp specialised: a producer warp copies 2 and 1 stages by TMA"
    assert remarks(module)[:2] == [text] * 2
    sizes = [
        op.results[0].type for op in named(kernel_of(module), "mt.local_alloc")
        if "mt.alignment" in op.attributes
    ]  # fmt: skip
    assert ["x".join(re.findall(r"(\d+)x", str(t))[:3]) for t in sizes] == [
        "1x128x256", "2x96x256", "1x96x256",
    ]  # fmt: skip
    first, second = loops_of(module)
    assert list(second.operands)[-4:] == list(first.results)[-4:]


def test_a_tile_that_stays_the_same_is_copied_once_per_loop(kernel):
    module = attention(kernel).compile()
    body = kernel_of(module).regions[0].blocks[0]
    for loop in loops_of(module):
        assert len(named(loop, "mt.tma_copy")) == 2  # keys and values
    outside = [op.name for op in ops_of(body)]
    assert outside.count("mt.tma_copy") == 2 and outside.count("mt.mbarrier_expect") == 2


def test_q_in_registers(kernel):
    arrays, scalars = attention_data(200, 128)
    module = attention(kernel, inside=False).check(arrays, scalars, (2, 1, 1))
    assert remarks(module)[:2] == [SPLIT, SPLIT]
    assert len(named(kernel_of(module), "mt.tma_copy")) == 4


def test_rings_are_shared_within_a_persistent_program(kernel):
    module = attention(kernel, bn=128, d=64, causal=False).compile()
    assert remarks(module) == [SPLIT, SPLIT, PERSISTENT]
    first, second = loops_of(module)[1:]
    assert list(second.operands)[-2:] == list(first.results)[-2:]


def test_two_dots_need_registers_from_the_producer(kernel):
    arrays, scalars = attention_data(144, 128)
    module = attention(kernel).check(arrays, scalars, (2, 1, 1), share_registers=False)
    reason = "nvJitLink ignores setmaxnreg: install nvidia-cuda-nvcc"
    assert remarks(module) == [f"not warp specialised: {reason}"] * 2
    arrays, scalars = data(144, 80, 160)
    module = product(kernel).check(arrays, scalars, (2, 1, 1), share_registers=False)
    assert remarks(module) == [SPLIT, PERSISTENT]  # one dot manages without


def test_turns(kernel):
    """Each loop begins and ends with the first warpgroup's turn, and so does the kernel."""
    module = attention(kernel).compile()
    function = kernel_of(module)
    for loop in loops_of(module):
        inside = [op.name for op in ops_of(loop.regions[0].blocks[0])]
        assert inside.count("mt.turn_wait") == inside.count("mt.turn_pass")
    waits, passes = named(function, "mt.turn_wait"), named(function, "mt.turn_pass")
    assert waits, "softmax lies between the products"
    alone = [[op for op in ops if "mt.group" in op.attributes] for ops in (waits, passes)]
    assert [[int_attribute(op, "mt.group") for op in ops] for ops in alone] == [[0], [1]]
    assert len(waits) == len(passes)


def test_no_turns_without_arithmetic_between_products(kernel):
    module = product(kernel).compile()
    assert not named(kernel_of(module), "mt.turn_wait")
    assert not named(kernel_of(module), "mt.turn_pass")


def pages(kernel, kind):
    return kernel(
        ring_kernels.pages, a="*fp16", b="*fp16", c="*fp32", table="*i32", n="i32", B=128, N=128,
        KIND=kind, **HOPPER,
    )  # fmt: skip


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_table_of_pages_steers_the_copies(kernel, steps):
    table = np.array([3, 0, 4, 4, 1], np.int32)
    arrays = [halves(5, 128, 128), halves(5, 128, 128), np.zeros((129, 128), np.float32), table]
    module = pages(kernel, "").check(arrays, [steps])
    assert remarks(module) == [SPLIT, PERSISTENT]


def test_a_loop_may_write_other_arrays_than_the_table(kernel):
    """Its options promise that they are others."""
    table = np.array([3, 0, 4, 4, 1], np.int32)
    arrays = [halves(5, 128, 128), halves(5, 128, 128), np.zeros((129, 128), np.float32), table]
    module = pages(kernel, "another array").check(arrays, [5])
    assert remarks(module)[0] == SPLIT


def test_a_table_that_the_loop_writes(kernel):
    table = np.array([3, 0, 0, 0, 0, 0], np.int32)
    arrays = [halves(5, 128, 128), halves(5, 128, 128), np.zeros((129, 128), np.float32), table]
    module = pages(kernel, "the table").check(arrays, [5])
    assert remarks(module) == ["not warp specialised: threads make some of its copies"]


def test_a_loop_in_a_branch(kernel):
    kern = kernel(ring_kernels.early_return, **MATRICES, **BLOCKS, **HOPPER)
    arrays, scalars = data(144, 80, 160)
    module = kern.check(arrays[:3], scalars, (4, 1, 1))
    assert remarks(module) == [SPLIT, "not persistent: some programs may skip its loops"]
