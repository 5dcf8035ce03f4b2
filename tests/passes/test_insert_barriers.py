"""Barriers: after the pass no execution of a random program has two racing accesses."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from minitriton.ir.context import use
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.passes import insert_barriers
from minitriton.passes.insert_barriers import effects_of
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import kernel_of, ops_of, walk

M = "!mt.mem<tensor<64xf32, {offset = array<i32: 1, 2, 4, 8, 16, 32>}>>"
T = "tensor<64xf32, {register=array<i32>, lane=array<i32: 1, 2, 4, 8, 16>, warp=array<i32: 32>}>"
U = "tensor<64xf32, {register=array<i32>, lane=array<i32: 2, 4, 8, 16, 32>, warp=array<i32: 1>}>"
OFFSETS = (0, 128, 256, 512)  # buffers of 256 bytes: some overlap

leaves = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 3)),
    st.tuples(st.just("load"), st.integers(0, 3)),
    st.tuples(st.just("convert"), st.sampled_from(OFFSETS)),
    st.tuples(st.just("barrier"), st.just(0)),
)
kinds = st.sampled_from(["for", "if", "else"])
bodies = st.lists(leaves, min_size=1, max_size=4)
nested = st.lists(st.one_of(leaves, st.tuples(kinds, bodies)), min_size=1, max_size=4)
programs = st.lists(
    st.one_of(leaves, st.tuples(kinds, bodies), st.tuples(kinds, nested)), min_size=1, max_size=5
)


def text_of(program, depth=0):
    out = []
    for kind, what in program:
        match kind:
            case "store":
                out.append(f'"mt.local_store"(%v, %b{what}) : ({T}, {M}) -> ()')
            case "load":
                out.append(f'"mt.local_load"(%b{what}) : ({M}) -> {T}')
            case "convert":
                out.append(f'"mt.convert_layout"(%v) {{mt.offset = {what} : i32}} : ({T}) -> {U}')
            case "barrier":
                out.append('"mt.barrier"() : () -> ()')
            case "for":
                out.append(f"scf.for %i{depth} = %c0 to %n step %c1 : i32 {{")
                out += [text_of(what, depth + 1), "}"]
            case "if":
                out += ["scf.if %p {", text_of(what, depth + 1), "}"]
            case "else":
                out += ["scf.if %p {", text_of(what[::2], depth + 1), "} else {"]
                out += [text_of(what[1::2], depth + 1), "}"]
    return "\n".join(out)


def parse(program):
    allocs = "\n".join(
        f'%b{i} = "mt.local_alloc"() {{mt.offset = {o} : i32}} : () -> {M}'
        for i, o in enumerate(OFFSETS)
    )
    return ir.Module.parse(
        "module attributes {mt.num_warps = 2 : i32} {"
        f"func.func @k(%n: i32, %p: i1, %v: {T}) {{\n{allocs}\n"
        "%c0 = arith.constant 0 : i32\n%c1 = arith.constant 1 : i32\n"
        f"{text_of(program)}\nreturn }} }}"
    )


def execute(block, choices, trace):
    """Appends the leaf ops in one execution order; `choices` decides branches and trip counts."""
    for op in ops_of(block):
        if op.name == "scf.for":
            for _ in range(next(choices)):
                execute(op.regions[0].blocks[0], choices, trace)
        elif op.name == "scf.if":
            taken = next(choices) % 2
            if len(op.regions[taken].blocks):
                execute(op.regions[taken].blocks[0], choices, trace)
        else:
            trace.append(op)


def races(trace):
    """Pairs of accesses by different ops with no barrier between them."""
    pending = []
    found = []
    for op in trace:
        effects = effects_of(op)
        found += [(a, b) for a in pending for b in effects.before if a.conflicts(b)]
        pending = list(effects.after) if effects.meets else pending + list(effects.before)
    return found


@settings(max_examples=150, deadline=None)
@given(programs, st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_no_execution_races(program, choices):
    with use():
        module = parse(program)
        insert_barriers.run(module, Target.parse("sm_80"), PassOptions())
        assert module.operation.verify()
        # a random execution, and two in which every loop repeats (and takes each branch)
        for decisions in (choices, [2], [3], [2, 3], [3, 3, 2]):
            trace = []
            execute(kernel_of(module).regions[0].blocks[0], itertools.cycle(decisions), trace)
            assert not races(trace)


def barriers(program):
    with use():
        module = parse(program)
        insert_barriers.run(module, Target.parse("sm_80"), PassOptions())
        return sum(op.name == "mt.barrier" for op in walk(kernel_of(module)))


def test_only_where_needed():
    assert barriers([("store", 0), ("load", 0)]) == 1
    assert barriers([("store", 0), ("store", 3), ("load", 0), ("load", 3)]) == 1
    assert barriers([("load", 0), ("load", 0)]) == 0
    assert barriers([("store", 0), ("barrier", 0), ("load", 0)]) == 1
    assert barriers([("store", 0), ("load", 3)]) == 0
    assert barriers([("store", 0), ("load", 1)]) == 1  # the two overlap
    # a scratch op meets a barrier inside: what came before needs no other one after it
    assert barriers([("load", 3), ("convert", 0), ("store", 3)]) == 0
    assert barriers([("for", [("store", 0), ("load", 0)])]) == 2


def test_asynchronous_writes_are_pending_until_waited_for():
    copy = (
        f'%q = "mt.local_alloc"() {{mt.offset = 1024 : i32, mt.pipelined}} : () -> {M}\n'
        f'"mt.async_copy"(%ptr, %q) {{operandSegmentSizes = array<i32: 1, 1, 0, 0>}} : '
        f"({T.replace('f32', '!mt.ptr<f32>')}, {M}) -> ()\n"
        '"mt.async_commit"() : () -> ()\n"mt.barrier"() : () -> ()\n'
        '"mt.async_wait"() {pending = 0 : i32} : () -> ()\n'
        f'%b = "mt.local_alloc"(%v) {{mt.offset = 1024 : i32}} : ({T}) -> {M}\n'
    )
    with use():
        module = ir.Module.parse(
            f"func.func @k(%v: {T}, %ptr: {T.replace('f32', '!mt.ptr<f32>')}) {{\n{copy} return }}"
        )
        insert_barriers.run(module, Target.parse("sm_80"), PassOptions())
        names = [op.name for op in walk(kernel_of(module))]
    assert names.count("mt.barrier") == 2
    assert names.index("mt.async_wait") == len(names) - 4


def test_two_multi_buffers_at_one_offset_do_not_order_each_other():
    pointers = T.replace("f32", "!mt.ptr<f32>")

    def copy_and_load(name: str) -> str:
        return (
            f'%{name} = "mt.local_alloc"() {{mt.offset = 0 : i32, mt.pipelined}} : () -> {M}\n'
            f'"mt.async_copy"(%ptr, %{name}) {{operandSegmentSizes = array<i32: 1, 1, 0, 0>}} : '
            f"({pointers}, {M}) -> ()\n"
            '"mt.async_commit"() : () -> ()\n"mt.async_wait"() {pending = 0 : i32} : () -> ()\n'
            f'"mt.barrier"() : () -> ()\n%{name}v = "mt.local_load"(%{name}) : ({M}) -> {T}\n'
        )

    text = copy_and_load("a") + copy_and_load("b")
    with use():
        module = ir.Module.parse(f"func.func @k(%ptr: {pointers}) {{\n{text} return }}")
        insert_barriers.run(module, Target.parse("sm_80"), PassOptions())
        names = [op.name for op in walk(kernel_of(module))]
    second = len(names) - 1 - names[::-1].index("mt.async_copy")
    assert "mt.barrier" in names[names.index("mt.local_load") : second]


def test_two_multi_buffers_in_the_same_memory_are_ordered():
    """Each orders its own accesses only; the second one's copies must not overtake the reads."""
    pointers = T.replace("f32", "!mt.ptr<f32>")

    def use_buffer(name):
        return (
            f'%{name} = "mt.local_alloc"() {{mt.offset = 0 : i32, mt.pipelined}} : () -> {M}\n'
            f'"mt.async_copy"(%ptr, %{name}) {{operandSegmentSizes = array<i32: 1, 1, 0, 0>}} : '
            f'({pointers}, {M}) -> ()\n"mt.async_wait"() {{pending = 0 : i32}} : () -> ()\n'
            f'"mt.barrier"() : () -> ()\n"mt.local_load"(%{name}) : ({M}) -> {T}\n'
        )

    with use():
        module = ir.Module.parse(
            f"func.func @k(%ptr: {pointers}) {{\n{use_buffer('a')}{use_buffer('b')} return }}"
        )
        insert_barriers.run(module, Target.parse("sm_80"), PassOptions())
        names = [op.name for op in walk(kernel_of(module))]
    second_copy = len(names) - names[::-1].index("mt.async_copy") - 1
    assert names[second_copy - 1] == "mt.barrier" and names.count("mt.barrier") == 3


def test_a_multi_buffer_that_an_outer_loop_fills_anew_is_ordered():
    """Its own waits and barriers order what lies before mt.local_dealloc, no more."""
    pointers = T.replace("f32", "!mt.ptr<f32>")
    text = (
        "%0 = arith.constant 0 : i32\n%1 = arith.constant 1 : i32\n"
        "scf.for %i = %0 to %n step %1 : i32 {\n"
        '%a = "mt.local_alloc"() {mt.offset = 0 : i32, mt.pipelined} : () -> ' + f"{M}\n"
        '"mt.async_copy"(%ptr, %a) {operandSegmentSizes = array<i32: 1, 1, 0, 0>} : '
        f'({pointers}, {M}) -> ()\n"mt.async_wait"() {{pending = 0 : i32}} : () -> ()\n'
        f'"mt.barrier"() : () -> ()\n%v = "mt.local_load"(%a) : ({M}) -> {T}\n'
        f'"mt.local_dealloc"(%a) : ({M}) -> ()\n}}\n'
    )
    with use():
        module = ir.Module.parse(f"func.func @k(%ptr: {pointers}, %n: i32) {{\n{text} return }}")
        insert_barriers.run(module, Target.parse("sm_80"), PassOptions())
        names = [op.name for op in walk(kernel_of(module))]
    assert names[names.index("mt.async_copy") - 1] == "mt.barrier"
    assert names.count("mt.barrier") == 2


def test_what_tma_still_stores_is_pending_until_waited_for():
    """A barrier before thread 0 has waited does not free the buffer, one after that does."""

    def module_of(wait_first):
        store = (
            f'"mt.tma_store"(%a, %c) {{map = 0 : i32, dims = array<i32: 0>}} : ({M}, i32) -> ()\n'
        )
        wait = '"mt.tma_store_wait"() {pending = 0 : i32, read} : () -> ()\n'
        barrier = '"mt.barrier"() : () -> ()\n'
        return ir.Module.parse(
            f"func.func @k(%v: {T}, %c: i32) {{\n"
            f'%a = "mt.local_alloc"() {{mt.offset = 0 : i32, mt.pipelined}} : () -> {M}\n'
            + store + (wait + barrier if wait_first else barrier + wait)
            + f'"mt.local_dealloc"(%a) : ({M}) -> ()\n'
            + f'%b = "mt.local_alloc"(%v) {{mt.offset = 0 : i32}} : ({T}) -> {M}\nreturn }}'
        )  # fmt: skip

    with use():
        for wait_first, count in ((True, 1), (False, 2)):
            module = module_of(wait_first)
            insert_barriers.run(module, Target.parse("sm_90a"), PassOptions())
            names = [op.name for op in walk(kernel_of(module))]
            assert names.count("mt.barrier") == count
            assert "mt.barrier" in names[names.index("mt.tma_store_wait") :]
