"""KDA's scans in the form that they take where products run on warpgroups (wgmma, sm_90a)."""

import pytest
import torch

from minitriton.jit import compile_hooks
from minitriton.kernels import kda_backward_scan, kda_forward
from minitriton.kernels.kda import chunk_kda
from tests.kernels import test_library_kda_backward as backward
from tests.kernels.test_library_kda_forward import K3, check, inputs, states
from tests.kernels.test_warp_split import once

pytestmark = [once, pytest.mark.usefixtures("hopper", "at_random")]
ENDS = torch.tensor([0, 70, 75, 75, 150])


@pytest.fixture
def scans():
    """The scans of a name that the test compiles."""
    made = []
    compile_hooks.append(made.append)
    yield lambda name: [kernel for kernel in made if kernel.name == name]
    compile_hooks.remove(made.append)


@pytest.fixture(params=[64, 128])
def wide(request, monkeypatch):
    """Columns of V of a program, where there are more than 64."""
    monkeypatch.setattr(kda_forward, "PROGRAMS", 0 if request.param == 128 else 1000)
    return request.param


def test_a_producer_warp_copies_all_tiles(device, monkeypatch, scans):
    monkeypatch.setattr(kda_forward, "PROGRAMS", 0)
    tensors, parameters = inputs((1, 130, 1, 128, 128), torch.bfloat16, device)
    check(tensors, {**K3, **parameters})
    (scan,) = scans("_scan_kernel")
    assert scan.metadata["producer_warps"] == 4
    assert "a producer warp copies 2 stages by TMA" in scan.metadata["remarks"]
    copies = [spec for spec in scan.tensor_maps if spec["element"] == "bf16"]
    assert len(copies) == 6  # k_in, q_in, k_out, the inverse, the scores and v


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batches_and_states(device, wide, layout, dtype):
    tensors, parameters = inputs((2, 130, 2, 128, 128), dtype, device)
    initial = states(2, 2, 128, 128, device)
    initial = initial.mT if layout == "vk" else initial
    check(tensors, {**K3, **parameters, "initial_state": initial, "state_layout": layout})


@pytest.mark.parametrize(("keys", "values"), [(128, 80), (60, 100), (64, 64), (128, 34), (16, 128)])
def test_widths(device, wide, keys, values):
    tensors, parameters = inputs((1, 70, 2, keys, values), torch.bfloat16, device)
    check(tensors, {**K3, **parameters, "initial_state": states(1, 2, keys, values, device)})


def test_packed_sequences(device, wide):
    """Chunks of fewer rows, none at all, and a neighbour that is infinite."""
    tensors, parameters = inputs((1, 150, 1, 128, 128), torch.bfloat16, device)
    initial = states(4, 1, 128, 128, device)
    options = {**K3, **parameters, "initial_state": initial, "cu_seqlens": ENDS}
    out, final = check(tensors, options)
    tensors[2][:, 70:75] = float("inf")
    others, last = chunk_kda(*tensors, **options, output_final_state=True)
    kept = [*range(70), *range(75, 150)]
    assert torch.equal(others[:, kept], out[:, kept])
    assert torch.equal(last[[0, 2, 3]], final[[0, 2, 3]])
    assert not others[:, 70:75].isfinite().any()


def test_views_are_read_in_place(device, wide):
    tensors, parameters = inputs((2, 70, 2, 64, 128), torch.bfloat16, device)
    options = {**K3, **parameters}
    expected, _ = chunk_kda(*tensors, **options)
    tensors[2] = tensors[2].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(chunk_kda(*tensors, **options)[0], expected)


def test_a_producer_warp_copies_all_tiles_of_the_reverse_scan(device, monkeypatch, scans):
    monkeypatch.setattr(kda_forward, "PROGRAMS", 0)
    backward.check(backward.inputs((1, 130, 1, 128, 128), torch.bfloat16, device, K3), K3)
    (scan,) = scans("_reverse_scan_kernel")
    assert scan.metadata["producer_warps"] == 4
    assert "a producer warp copies 2 stages by TMA" in scan.metadata["remarks"]
    maps = [spec for spec in scan.tensor_maps if spec["element"] == "bf16"]
    assert len(maps) == 7  # k_out, the scores, dO, the inverse, q_in and k_in; the gradients stored
    assert all(spec["offset"] == [] for spec in maps)  # none begins before its tensor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 130, 1, 128, 128), (2, 70, 1, 64, 100)], ids=str)
def test_gradients(device, wide, shape, dtype):
    tensors = backward.inputs(shape, dtype, device, K3, shape[0])
    backward.check(tensors, K3)


@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize(("keys", "values"), [(128, 80), (60, 104), (16, 34)])
def test_gradients_of_packed_sequences(device, wide, layout, keys, values):
    """Chunks of fewer rows, none at all, states at both ends."""
    options = {**K3, "cu_seqlens": ENDS, "state_layout": layout}
    tensors = backward.inputs((1, 150, 1, keys, values), torch.bfloat16, device, options, 4)
    backward.check(tensors, options)


@pytest.mark.parametrize("grads", [("final",), ("out",)])
def test_gradients_of_one_result(device, wide, grads):
    tensors = backward.inputs((1, 70, 2, 64, 128), torch.bfloat16, device, {}, 1)
    with torch.no_grad():
        tensors["g"].mul_(0.02)  # the first state still counts in the last
    backward.check(tensors, {}, grads=grads)


def test_gradients_beside_an_infinite_one(device, wide):
    """Sequences see no gradients of their neighbours."""
    options = {**K3, "cu_seqlens": ENDS}
    tensors = backward.inputs((1, 150, 1, 128, 128), torch.bfloat16, device, options, 4)
    grad = torch.randn(1, 150, 1, 128, device=device).bfloat16()
    alone = backward.gradients(chunk_kda, tensors, options, [grad, None])
    grad[:, 70:75] = float("inf")
    beside = backward.gradients(chunk_kda, tensors, options, [grad, None])
    kept = [*range(70), *range(75, 150)]
    for name in ("q", "k", "v", "g"):
        assert torch.equal(beside[name][:, kept], alone[name][:, kept]), name
    assert not beside["v"][:, 70:75].isfinite().any()
    assert torch.equal(beside["initial_state"][[0, 2, 3]], alone["initial_state"][[0, 2, 3]])


def test_tiles():
    """Narrow programs where there are few; what warpgroups cannot multiply stays as it was."""
    device = torch.device("cpu")
    tiles = [kda_forward.scan_tile(n, 128, 128, torch.bfloat16, device) for n in (66, 67, 96)]
    assert [(t.columns, t.warps) for t in tiles] == [(64, 4), (128, 8), (128, 8)]
    assert all(t.turned for t in tiles)
    assert not kda_forward.scan_tile(96, 128, 32, torch.bfloat16, device).turned
    assert not kda_forward.scan_tile(96, 128, 128, torch.float32, device).turned
    reverse = kda_backward_scan.reverse_tile
    assert reverse(96, 128, 128, torch.bfloat16, device) == tiles[2]
    narrow = (
        reverse(96, 128, 32, torch.bfloat16, device),
        reverse(9, 128, 64, torch.float32, device),
    )
    assert [(t.columns, t.turned) for t in narrow] == [(32, False), (16, False)]
