"""KDA's scan in the form that it takes where products run on warpgroups (wgmma, sm_90a)."""

import pytest
import torch

from minitriton.jit import compile_hooks
from minitriton.kernels import kda_forward
from minitriton.kernels.kda import chunk_kda
from tests.kernels import test_library_kda_backward as backward
from tests.kernels.test_library_kda_forward import K3, check, inputs, states

pytestmark = pytest.mark.usefixtures("hopper")
ENDS = torch.tensor([0, 70, 75, 75, 150])


@pytest.fixture
def scans():
    """The scans that the test compiles."""
    made = []
    compile_hooks.append(made.append)
    yield lambda: [kernel for kernel in made if kernel.name == "_scan_kernel"]
    compile_hooks.remove(made.append)


@pytest.fixture(params=[64, 128])
def wide(request, monkeypatch):
    """Columns of V of a program, where there are more than 64."""
    monkeypatch.setattr(kda_forward, "PROGRAMS", 0 if request.param == 128 else 1000)
    return request.param


@pytest.mark.parametrize("device", ["cpu-late"], indirect=True)
def test_a_producer_warp_copies_all_tiles(device, monkeypatch, scans):
    monkeypatch.setattr(kda_forward, "PROGRAMS", 0)
    tensors, parameters = inputs((1, 130, 1, 128, 128), torch.bfloat16, device)
    check(tensors, {**K3, **parameters})
    (scan,) = scans()
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


@pytest.mark.parametrize("shape", [(1, 130, 1, 128, 128), (2, 70, 1, 64, 100)], ids=str)
def test_gradients(device, wide, shape):
    """Of what the scan stores for them."""
    tensors = backward.inputs(shape, torch.bfloat16, device, K3, shape[0])
    backward.check(tensors, K3)


def test_tiles():
    """Narrow programs where there are few; what warpgroups cannot multiply stays as it was."""
    device = torch.device("cpu")
    tiles = [kda_forward.scan_tile(n, 128, 128, torch.bfloat16, device) for n in (66, 67, 96)]
    assert [(t.columns, t.warps) for t in tiles] == [(64, 4), (128, 8), (128, 8)]
    assert all(t.turned for t in tiles)
    assert not kda_forward.scan_tile(96, 128, 32, torch.bfloat16, device).turned
    assert not kda_forward.scan_tile(96, 128, 128, torch.float32, device).turned
