"""Kernel tests run where `device` says: in the emulator under both landings, and on a GPU.

The same tests serve as the GPU suite: `pytest -m gpu tests/kernels`. Without a GPU every kernel
that a test compiles is also compiled and assembled, once per session: for sm_80 and sm_90a, and
for one of the other four targets, which a hash of the kernel and its specialisation picks.
"""

import hashlib
import os

import pytest
import torch

from minitriton.compiler import compile_kernel
from minitriton.ir.diagnostics import MiniTritonError
from minitriton.ir.target import Target
from minitriton.jit import compile_hooks
from minitriton.runtime.assembler import find_tool
from minitriton.runtime.driver import OutOfResources
from tests.sass import issued_apart

ALWAYS, ROTATED = ("sm_80", "sm_90a"), ("sm_86", "sm_89", "sm_100a", "sm_120a")
MAY_SPILL = {  # test: why its kernels cannot do with 255 registers
    "test_half": "one warp holds a 128x64 accumulator: 256 registers per thread",
    "test_fp32_precisions": "a 64x64x64 product without tensor cores keeps whole rows in registers",
    "test_fp32": "tf32x3 products of 64x64 tiles keep both halves of their operands in registers",
    "test_forms_of_the_loop[cpu-late-also precise]": "see above",
    "test_forms_of_the_loop[cpu-early-also precise]": "see above",
    # KDA's fp32 preparation spills up to 36 bytes before sm_90, for the same reason
    "test_widths": "see above",
    "test_gates_without_a_bound": "see above",
    "test_keys_that_resemble_each_other": "see above",
    "test_three_products_per_product": "Muon's second product: 16 bytes on sm_120a, likewise",
    "test_broadcast_then_reduce": "four warps hold a 128x128 tile: 128 registers, twice",
}

TILES_FOR = {  # targets of tests that ask for their tiles
    "test_warpgroup_tiles": ("sm_90a",),
    "test_unmasked_loop": ("sm_90a",),
    "test_tiles_that_take_all_memory": ("sm_90a",),
    "test_matmul_by_warpgroups": ("sm_90a",),
    "test_attention_by_warpgroups": ("sm_90a",),
    "test_wide_attention_by_warpgroups": ("sm_90a",),
    "test_a_large_tile": ("sm_90a",),
    "test_tiles_of_half_sums": ("sm_90a",),
    "test_epilogues_again_and_again": ("sm_90a",),
    "test_programs_for_hopper": ("sm_90a",),
}
HOPPER_FILES = {
    "test_warp_split",
    "test_rings",
    "test_ping_pong",
    "test_tile_loops",
    "test_clusters",
    "test_row_groups",
    "test_library_gemm",
    "test_library_kda_warpgroups",
}  # and of files that do


@pytest.fixture(
    params=["cpu-late", "cpu-early", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True
)
def device(request, monkeypatch):
    """Device of the tensors; async copies land late or early in the emulator, all checks on."""
    torch.manual_seed(1234)
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        return "cuda"
    monkeypatch.setenv("MINITRITON_LANDING", request.param.removeprefix("cpu-"))
    monkeypatch.setenv("MINITRITON_CHECK", "all")
    return "cpu"


@pytest.fixture
def hopper(device, monkeypatch):
    """CPU tensors run what a Hopper GPU would; other GPUs skip the test."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    monkeypatch.setenv("MINITRITON_TARGET", "sm_90a")


@pytest.fixture
def at_random(device, monkeypatch):
    """In the emulator copies land at random, and warps run in any order."""
    for name in ("LANDING", "SCHEDULE"):
        monkeypatch.setenv(f"MINITRITON_{name}", "random")


@pytest.fixture(scope="session")
def claims(tmp_path_factory):
    """A folder that all workers of this session share: who makes a subfolder does that work."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "assembled"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def assembled(device, claims, request):
    """After the test: each kernel that it compiled assembles for three targets, without spills."""
    made = []
    compile_hooks.append(made.append)
    yield
    compile_hooks.remove(made.append)
    names = {request.node.originalname, request.node.name}
    problems, may_spill = [], not names.isdisjoint(MAY_SPILL)
    for compiled in made if device == "cpu" else ():
        key = compiled.source.dependency_key() + compiled.spec.key_text()
        digest = hashlib.sha256(key.encode()).hexdigest()
        try:
            (claims / digest).mkdir()
        except FileExistsError:
            continue
        every = (*ALWAYS, ROTATED[int(digest, 16) % len(ROTATED)])
        if request.node.path.stem in HOPPER_FILES:
            every = ("sm_90a",)
        for arch in TILES_FOR.get(request.node.originalname, every):
            problems += assemble(compiled, Target.parse(arch), may_spill)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def assemble(compiled, target, may_spill):
    """What is wrong with a kernel on a target, as a list of sentences; too big for it is fine."""
    try:
        done = compile_kernel(compiled.source, compiled.spec, target, cubin=True)
    except OutOfResources:
        return []
    except MiniTritonError as error:
        return [f"{compiled.name} for {target.arch}: {error}"]
    if done.n_spills and not may_spill:
        return [f"{compiled.name} for {target.arch} spills {done.n_spills} bytes per thread"]
    found = [text for text in done.metadata["warnings"] if "wgmma" in text]  # serialised, or worse
    if ".shared::cluster.global" in done.ptx and find_tool("nvdisasm"):
        found += [f"by lanes apart: {text}" for text in issued_apart(done.asm["sass"])]
    return [f"{compiled.name} for {target.arch}: {text}" for text in found]
