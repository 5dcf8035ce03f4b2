"""The library's matrix product on warpgroups: every tile that `gemm_plan` may choose, with every
epilogue, against fp64; and which it chooses."""

import functools

import pytest
import torch

from minitriton import execute
from minitriton.kernels import gemm as gemms
from minitriton.kernels import gemm_operands, gemm_plan
from minitriton.kernels.gemm import gemm
from minitriton.kernels.gemm_plan import TILES, Plan, Tile, plan
from tests.kernels.test_library_linear import relative
from tests.kernels.test_warp_split import once

pytestmark = pytest.mark.usefixtures("hopper")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = {BF16: 5e-3, FP16: 1e-3, FP32: 1e-3}
FORMS = {"b along k": (False, True), "b along n": (False, False), "a along m": (True, False)}
KINDS = {"none": (BF16, FP32), "gelu": (BF16,), "gelu fp32": (FP32,), "reads": (BF16,),
         "exact": (FP16, FP32)}  # fmt: skip
TILED = [
    pytest.param(kind, dtype, tile, id=f"{kind}-{tile.rows}x{tile.columns}-{str(dtype)[6:]}")
    for kind, dtypes in KINDS.items() for tile in TILES[kind] for dtype in dtypes
    if dtype != FP32 or tile.columns != 192
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """The kernels of products that a test launches."""
    made, kernel = [], gemms._gemm_kernel

    class Recorder:
        def __getitem__(self, grid):
            def launch(*args, **options):
                made.append(kernel[grid](*args, **options))

            return launch

    monkeypatch.setattr(gemms, "_gemm_kernel", Recorder())
    return made


@pytest.fixture
def force(monkeypatch):
    """Sets the tile and the slices of K of all products."""

    def set_plan(tile, dtype, k, slices=1):
        chosen = gemm_plan._cut(k, tile.config(dtype.itemsize), slices)
        monkeypatch.setattr(gemms, "plan", lambda *_: chosen)

    return set_plan


def operands(device, m, n, k, dtype, form):
    a, b = (torch.randn(s, device=device).to(dtype) for s in ((m, k), (k, n)))
    across = [x.T.contiguous().T for x in (a, b)]
    return tuple(
        turned if turn else x for x, turned, turn in zip((a, b), across, FORMS[form], strict=True)
    )


def gelu_slope(x):
    x = x.double().requires_grad_()
    return torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)[0]


def by_producer(launched):
    return [c for c in launched if "producer_warps" in c.metadata]


@once
@pytest.mark.parametrize(("kind", "dtype", "tile"), TILED)
def test_tiles(device, kind, dtype, tile, force, launched, monkeypatch):
    """With four programs in two CTAs, the last ones partly outside, and 2.5 steps of K."""
    monkeypatch.setattr(execute, "EMULATED_CTAS", 2)
    depth = tile.depth // dtype.itemsize
    m, n, k = tile.rows + 16, tile.columns + 16, 2 * depth + 16
    force(tile, dtype, k)
    bias, pre, extra = (torch.randn(s, device=device).to(dtype) for s in ((n,), (m, n), (m, n)))
    saved = torch.empty(m, n, device=device, dtype=dtype)
    gelu = torch.nn.functional.gelu
    for form in ("b along k", "b along n"):
        a, b = operands(device, m, n, k, dtype, form)
        exact = a.double() @ b.double() + bias.double()

        def error(expected, a=a, b=b, bias=bias, **options):
            out = torch.full((m, n), float("nan"), device=device, dtype=dtype)
            found = gemm(a, b, out, bias=bias, precision="tf32", **options)
            return relative(found, expected) / BOUNDS[dtype]

        if kind == "none":
            assert error(exact) < 1
        elif kind != "reads" and form == "b along k":  # as in the forward pass
            assert error(gelu(exact), epilogue="gelu") < 2
            assert error(gelu(exact), epilogue="gelu", pre=saved) < 2
            assert relative(saved, exact) < BOUNDS[dtype]
        elif "gelu" not in kind and form == "b along n":  # as in the backward pass
            plain = exact - bias.double()
            slope = gelu_slope(pre)
            assert error(plain * slope, epilogue="gelu_backward", pre=pre, bias=None) < 2
            assert error(plain + extra.double(), extra=extra, bias=None) < 1
    alone = tile.rows * tile.columns > 64 * 64  # on an SM, with a producer warp
    assert launched and all("wgmma" in c.ptx for c in launched)
    assert by_producer(launched) == [c for c in launched if alone]
    turns = 2 if alone and tile.warps == 4 else None
    assert all(c.metadata.get("consumer_groups") == turns for c in launched)


@once
@pytest.mark.parametrize(("m", "n", "rows", "columns"), [(128, 272, 128, 64), (304, 128, 64, 128)])
def test_few_rows_or_columns_in_clusters(device, m, n, rows, columns, force, launched, monkeypatch):
    """Programs side by side share the copies of the short operand."""
    monkeypatch.setattr(execute, "EMULATED_CTAS", 4)
    force(Tile(rows, columns, 256, 4, 4, 2), BF16, 400)
    a, b = operands(device, m, n, 400, BF16, "b along k")
    out = gemm(a, b, torch.empty(m, n, device=device))
    assert relative(out, a.double() @ b.double()) < 1e-5
    assert launched[0].metadata["num_ctas"] == 2 and "multicast" in launched[0].ptx


@once
@pytest.mark.parametrize("form", ["b along n", "b along k"])
def test_tf32_in_tiles_of_192(device, form, force, launched):
    """Which no plan has yet: with B along N the transpose of C has 192 rows."""
    force(Tile(64, 192, 128, 4, 4), FP32, 208)
    a, b = operands(device, 144, 208, 208, FP32, form)
    out = gemm(a, b, torch.empty(144, 208, device=device), precision="tf32")
    assert relative(out, a.double() @ b.double()) < 1e-3
    assert "wgmma" in launched[0].ptx


@pytest.mark.parametrize("slices", [2, 3])
@pytest.mark.parametrize("tile", [TILES["none"][0], TILES["none"][2], TILES["none"][3]], ids=str)
def test_slices_of_depth(device, tile, slices, force, launched):
    """The last slice is shorter; equal bits again and again."""
    m, n, k = tile.rows + 16, 16, 5 * tile.depth // 2 - 16
    force(tile, BF16, k, slices)
    a, b = operands(device, m, n, k, BF16, "b along n")
    bias = torch.randn(n, device=device)
    outs = [gemm(a, b, torch.empty(m, n, device=device), bias=bias) for _ in range(2)]
    assert relative(outs[0], a.double() @ b.double() + bias.double()) < 1e-5
    assert torch.equal(*outs)
    assert by_producer(launched) == launched
    assert "launch_dependents" not in launched[0].ptx  # a sum too early crowds idle SMs


@pytest.fixture
def eager(monkeypatch):
    """Operands of fp32 are copied for products of any size."""
    monkeypatch.setattr(gemm_operands, "MANY_PRODUCTS", 1)
    monkeypatch.setattr(gemm_operands, "PER_ELEMENT", 0)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_weights_in_fp32(device, form, force):
    force(TILES["none"][0], BF16, 96)
    a, b = operands(device, 144, 272, 96, BF16, form)
    out = gemm(a, b, torch.empty(144, 272, device=device))
    assert relative(out, a.double() @ b.double()) < 1e-5


@pytest.mark.parametrize(("m", "n", "k"), [(144, 272, 208), (304, 80, 203)])
def test_tf32_across_the_depth_is_copied(device, m, n, k, launched, eager):
    """The gradient of a weight, dy^T x: no operand lies along K, and wgmma needs one to."""
    a, b = operands(device, m, n, k, FP32, "a along m")
    found, left, right, *low = gemm_operands.for_wgmma(a, b, "tf32")
    assert found and torch.equal(left, a) and torch.equal(right, b) and low == [None, None]
    assert (left is a, right is b) == (m > n, m < n)
    assert (right.stride(0), left.stride(1)) == ((1, a.stride(1)) if m > n else (b.stride(0), 1))
    out = gemm(a, b, torch.empty(m, n, device=device), precision="tf32")
    assert relative(out, a.double() @ b.double()) < 1e-3
    if k % 16 == 0:
        assert ["wgmma" in c.ptx for c in launched] == [True]


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee"])
def test_few_products_of_fp32_are_not_worth_a_copy(device, precision):
    a, b = operands(device, 600, 512, 208, FP32, "a along m")
    assert gemm_operands.for_wgmma(a, b, precision) == (False, a, b, None, None)
    a, b = torch.empty(64, 1 << 13), torch.empty(1 << 13, 1 << 13)  # little but memory traffic
    assert gemm_operands.for_wgmma(a, b, precision)[0] == (precision == "tf32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(144, 272, 208), (130, 33, 77)], ids=str)
def test_three_products_of_tf32(device, form, shape, launched, eager, monkeypatch):
    """Of all strides; wgmma multiplies copies, with fp32's error."""
    monkeypatch.setattr(execute, "EMULATED_CTAS", 2)
    a, b = operands(device, *shape, FP32, form)
    bias = torch.randn(shape[1], device=device)
    out = gemm(a, b, torch.full(shape[:2], float("nan"), device=device), bias=bias)
    assert relative(out, a.double() @ b.double() + bias.double()) < 5e-7
    assert by_producer(launched) == launched and "wgmma" in launched[0].ptx


@once
@pytest.mark.parametrize("slices", [1, 3])
def test_epilogues_of_three_products(device, slices, force, eager):
    m, n, k = 144, 80, 240
    force(TILES["thrice"][0], FP32, k, slices)
    a, b = operands(device, m, n, k, FP32, "b along n")
    pre, saved = torch.randn(m, n, device=device), torch.empty(m, n, device=device)
    plain, gelu = a.double() @ b.double(), torch.nn.functional.gelu
    call = functools.partial(gemm, a, b, torch.empty(m, n, device=device))
    assert relative(call(epilogue="gelu", pre=saved), gelu(plain)) < 1e-6
    assert relative(saved, plain) < 5e-7
    assert relative(call(epilogue="gelu_backward", pre=pre), plain * gelu_slope(pre)) < 1e-6


def test_parts_of_fp32(device, eager):
    """Their sum is exact; infinities, NaN and numbers that only fp32 has go through products."""
    scale = torch.exp2(torch.randint(-100, 100, (40, 37), device=device))
    x = torch.randn(40, 37, device=device) * scale
    x[0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), 1e-42])
    high, low = gemm_operands.in_parts(x)
    assert high.shape == low.shape == (40, 48) and not high[:, 37:].any() and not low[:, 37:].any()
    high, low = high[:, :37], low[:, :37]
    assert not (high.view(torch.int32) & 0x1FFF)[1:].any()
    assert torch.equal((high + low)[1:], x[1:]) and high[0, 2].isnan()
    assert (low.abs() <= high.abs() * 2**-11)[1:].all()
    a, b = torch.randn(128, 64, device=device), torch.randn(64, 128, device=device)
    a[3, 5], a[4, 6], b[:, 7] = float("inf"), float("nan"), 0.0
    out = gemm(a, b, torch.empty(128, 128, device=device))
    torch.testing.assert_close(out, a @ b, equal_nan=True, rtol=1e-5, atol=1e-5)


@once
def test_long_sums_of_three_products_have_no_bias(device, eager):
    """Tensor cores truncate: sums of positive products must not come out too small."""
    a, b = torch.rand(64, 1000, device=device), torch.rand(1000, 64, device=device)
    error = gemm(a, b, torch.empty(64, 64, device=device)).double() / (a.double() @ b.double()) - 1
    assert error.mean().abs() < 3e-7 and error.norm() / 64 < 4e-7  # 1e-7 by the mean of mma.sync


def chosen(m, n, k, *, dtype=BF16, out=None, epilogue="none", strides=None):
    strides = strides or (k, 1, 1, k)
    found = plan(m, n, k, strides, dtype, out or dtype, 132, epilogue, True)
    config = found.config
    tile = (config["BLOCK_M"], config["BLOCK_N"], config["num_warps"], config["num_stages"])
    return tile, found.slices


@pytest.mark.parametrize(
    ("shape", "dtype", "tile"),
    [
        ((8192, 8192, 8192), BF16, (128, 192, 4, 5)),
        ((8192, 8192, 1024), FP16, (128, 192, 4, 5)),
        ((4096, 4096, 4096), BF16, (128, 256, 8, 4)),
        ((2048, 2048, 2048), BF16, (128, 128, 4, 6)),
        ((128, 8192, 8192), BF16, (128, 64, 4, 4)),
        ((8192, 128, 8192), BF16, (64, 128, 4, 4)),
        ((8192, 8192, 8192), FP32, (128, 256, 8, 4)),
        ((4096, 4096, 4096), FP32, (128, 256, 8, 4)),
    ],
    ids=str,
)
def test_what_the_suite_measured_best(shape, dtype, tile):
    assert chosen(*shape, dtype=dtype) == (tile, 1)


def test_long_depth_is_cut():
    """The gradient of a small weight over many rows: a slice for almost every SM."""
    (rows, columns, *_), slices = chosen(384, 1152, 16384)
    assert 100 <= -(-384 // rows) * -(-1152 // columns) * slices <= 132
    assert chosen(16, 64, 112) == ((16, 32, 4, 4), 1)


@pytest.mark.parametrize("kind", ["gelu", "reads"])
@pytest.mark.parametrize(("dtype", "out"), [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, FP32)])
def test_epilogues_get_tiles_for_them(kind, dtype, out):
    for shape in ((8192, 16384, 4096), (16384, 1536, 384), (100, 1000, 1024), (512, 64, 9216)):
        (rows, columns, warps, stages), slices = chosen(*shape, dtype=dtype, out=out, epilogue=kind)
        exact = "gelu fp32" if (kind, dtype) == ("gelu", FP32) else "exact"
        tiles = TILES[kind if (dtype, out) == (BF16, BF16) else exact]
        assert (rows, columns, warps, stages) in [
            (t.rows, t.columns, t.warps, t.stages) for t in tiles
        ]
        assert slices == 1 or shape[0] * shape[1] < 132 * 128 * 128


def test_plans_are_the_same_object_every_time():
    assert plan(512, 512, 512, (512, 1, 1, 512), BF16, BF16, 132, "none", True) is plan(
        512, 512, 512, (512, 1, 1, 512), BF16, BF16, 132, "none", True
    )


def test_slices_cover_the_depth():
    for k in (0, 1, 63, 64, 65, 5000):
        for slices in (1, 2, 5):
            found = gemm_plan._cut(k, Tile(128, 128, 128, 4, 6).config(2), slices)
            assert isinstance(found, Plan) and found.depth % 64 == 0
            assert (found.slices - 1) * found.depth < max(k, 1) <= found.slices * found.depth


def test_strides_that_tma_cannot_copy(device):
    """Operands that go element by element take small tiles of mma.sync."""
    (rows, columns, *_), _ = chosen(512, 512, 1001)
    assert rows * columns <= 128 * 128
    a, b = operands(device, 70, 130, 77, BF16, "b along k")
    out = gemm(a, b, torch.empty(70, 130, device=device))
    assert relative(out, a.double() @ b.double()) < 1e-5
