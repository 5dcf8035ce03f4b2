"""Which dimensions of tiles are the same, op by op, and which must stay whole."""

import pytest

from minitriton.ir.mlir import ir
from minitriton.passes.tile_dims import TileDims
from minitriton.passes.traversal import kernel_of, walk

KEEPS = "module { func.func @k(%flag: i1, %bound: i32) { TEXT return } }"
TILE = "tensor<192x64xf32>"


def parsed(text):
    """The kernel, and its ops with results, by the number of each."""
    module = ir.Module.parse(KEEPS.replace("TEXT", text))
    function = kernel_of(module)
    return module, TileDims(function), [op for op in walk(function) if len(op.results)]


def same(dims, a, b):
    return dims.of(a) == dims.of(b)


def zeros(type_=TILE, name="x"):
    return f'%{name} = "arith.constant"() {{value = dense<0.0> : {type_}}} : () -> {type_}\n'


def ties(dims, source, result):
    """(dimension of the source, of the result) of all pairs that are the same."""
    sizes = [value.type.shape for value in (source, result)]
    return [
        (a, b)
        for a in range(len(sizes[0]))
        for b in range(len(sizes[1]))
        if same(dims, (source, a), (result, b))
    ]


@pytest.mark.parametrize(
    ("op", "result", "expected"),
    [
        ('"math.exp"(%x)', TILE, [(0, 0), (1, 1)]),
        ('"mt.expand_dims"(%x) {axis = 1 : i32}', "tensor<192x1x64xf32>", [(0, 0), (1, 2)]),
        ('"mt.trans"(%x) {order = array<i32: 1, 0>}', "tensor<64x192xf32>", [(0, 1), (1, 0)]),
        ('"mt.reshape"(%x)', "tensor<192x8x8xf32>", [(0, 0)]),
        ('"mt.reshape"(%x)', "tensor<3x64x64xf32>", [(1, 2)]),
        ('"mt.reshape"(%x)', "tensor<12288xf32>", []),
        ('"mt.join"(%x, %x)', "tensor<192x64x2xf32>", [(0, 0), (1, 1)]),
        ('"mt.flip_blocks"(%x) {axis = 0 : i32}', TILE, [(0, 0), (1, 1)]),
        ('"mt.cat"(%x, %x) {axis = 1 : i32}', "tensor<192x128xf32>", [(0, 0), (1, 1)]),
    ],
)
def test_one_op(_context, op, result, expected):
    operands = ", ".join([TILE] * op.count("%"))
    _module, dims, ops = parsed(zeros() + f"%y = {op} : ({operands}) -> {result}")
    assert ties(dims, ops[0].results[0], ops[1].results[0]) == expected


def test_broadcasts_tie_what_they_do_not_repeat(_context):
    _module, dims, ops = parsed(
        zeros("tensor<192x1xf32>") + f'%y = "mt.broadcast"(%x) : (tensor<192x1xf32>) -> {TILE}'
    )
    assert ties(dims, ops[0].results[0], ops[1].results[0]) == [(0, 0)]


def test_reductions_and_scans(_context):
    """All but the axis goes on, and that must stay whole."""
    combine = '^bb0(%p: f32, %q: f32): %s = arith.addf %p, %q : f32 "mt.yield"(%s) {operandSegmentSizes = SIZES} : (f32) -> ()'  # noqa: E501
    sizes = "array<i32: 1" + ", 0" * 15 + ">"
    segments = f"operandSegmentSizes = {sizes}, resultSegmentSizes = {sizes}"
    region = "({ " + combine.replace("SIZES", sizes) + " })"
    _module, dims, ops = parsed(
        zeros()
        + f'%y = "mt.reduce"(%x) {region} {{axis = 1 : i32, {segments}}} : ({TILE}) -> '
        + "tensor<192xf32>"
    )
    x, y = ops[0].results[0], ops[1].results[0]
    assert ties(dims, x, y) == [(0, 0)]
    assert dims.obstacle((x, 0)) is None
    assert dims.obstacle((x, 1))[1] == "a reduction along them"


def test_blocks_change_places_along_the_axis_only(_context):
    _module, dims, ops = parsed(
        zeros() + f'%y = "mt.flip_blocks"(%x) {{axis = 0 : i32}} : ({TILE}) -> {TILE}'
    )
    x = ops[0].results[0]
    assert dims.obstacle((x, 1)) is None
    assert dims.obstacle((x, 0))[1] == "flip_blocks along them"


def test_products(_context):
    """Rows of A and of the sums are the same, and free; the rest is not."""
    _module, dims, ops = parsed(
        zeros("tensor<192x32xf16>", "a")
        + zeros("tensor<32x64xf16>", "b")
        + zeros(TILE, "c")
        + '%d = "mt.dot"(%a, %b, %c) {input_precision = "ieee", max_imprecise = 0 : i32} : '
        + f"(tensor<192x32xf16>, tensor<32x64xf16>, {TILE}) -> {TILE}"
    )
    a, b, c, d = (op.results[0] for op in ops)
    assert ties(dims, a, d) == [(0, 0)] and ties(dims, b, d) == [(1, 1)]
    assert ties(dims, c, d) == [(0, 0), (1, 1)]
    assert dims.obstacle((c, 0)) is None
    assert dims.obstacle((c, 1))[1] == "they are also the columns of a product"
    assert dims.obstacle((a, 1))[1] == dims.obstacle((b, 0))[1] == "a product sums along them"


def test_loops_and_branches_hand_tiles_on(_context):
    _module, dims, ops = parsed(
        zeros()
        + f"""
        %c0 = arith.constant 0 : i32
        %y = scf.for %i = %c0 to %bound step %bound iter_args(%t = %x) -> ({TILE}) : i32 {{
          %z = scf.if %flag -> ({TILE}) {{
            %e = math.exp %t : {TILE}
            scf.yield %e : {TILE}
          }} else {{
            scf.yield %t : {TILE}
          }}
          scf.yield %z : {TILE}
        }}
        %w = scf.while (%v = %y) : ({TILE}) -> {TILE} {{
          scf.condition(%flag) %v : {TILE}
        }} do {{
        ^bb0(%u: {TILE}):
          scf.yield %u : {TILE}
        }}
        """
    )
    tiles = [op.results[0] for op in ops if op.name != "arith.constant" or "tensor" in str(op)]
    assert len(tiles) == 5
    for tile in tiles[1:]:
        assert ties(dims, tiles[0], tile) == [(0, 0), (1, 1)]


def test_what_is_not_known_takes_tiles_whole(_context):
    _module, dims, ops = parsed(
        zeros()
        + '"mt.print"(%x) {prefix = "x", operandSegmentSizes = array<i32: 1'
        + ", 0" * 15
        + f">}} : ({TILE}) -> ()"
    )
    for dim in range(2):
        _op, reason = dims.obstacle((ops[0].results[0], dim))
        assert reason == "mt.print takes all elements together"
