"""Kernels with tensor maps for the emulator's tests, and a numpy model of what TMA moves."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from minitriton.runtime import assembler
from minitriton.runtime.emulator import Allocation, Emulator, Report, TensorMap, parameter
from tests.emulator.ptx_harness import HEADER, REGISTERS

#: %r1 = tid, %r3 = CTA, %r4 = threads, %r9 = n, %r10 = tile, %r11 = bars; maps at %d20 and %d21.
PROLOGUE = """
    .shared .align 1024 .b8 tile[32768];
    .shared .align 8 .b8 bars[128];
    ld.param.u64 %d10, [out];
    ld.param.u64 %d11, [inp];
    ld.param.u32 %r9, [n];
    mov.b64 %d20, m0;
    cvta.param.u64 %d20, %d20;
    mov.b64 %d21, m1;
    cvta.param.u64 %d21, %d21;
    mov.u32 %r1, %tid.x;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r10, tile;
    mov.u32 %r11, bars;
    setp.ne.u32 %p1, %r1, 0;
"""
#: Thread 0 initialises one mbarrier for one arrival.
INIT = """
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [bars], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""
_RNG = np.random.default_rng(3)
ANY_MAP = TensorMap(4096, 4, (4,), (), (4,))
#: Up to the operands: [destination], [map, {coordinates}], [mbarrier].
LOAD_2D = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


def kernel(body: str) -> str:
    """PTX of entry k(map m0, map m1, out, inp, n); %p1 is false in thread 0 alone."""
    return f"""{HEADER}
.visible .entry k(.param .align 64 .b8 m0[128], .param .align 64 .b8 m1[128],
                  .param .u64 out, .param .u64 inp, .param .u32 n)
{{{REGISTERS}{PROLOGUE}{body}
    ret;
}}
"""


@functools.cache
def assembles(body: str) -> str:
    """The kernel around ``body``, which ptxas has accepted for sm_90a."""
    ptx = kernel(body)
    assembler.assemble(ptx, "sm_90a", "k")
    return ptx


def init_barriers(*counts: int) -> str:
    """mbarriers at bars, bars+8, ... for so many arrivals each."""
    return "\n    ".join(
        f"mbarrier.init.shared::cta.b64 [bars+{8 * n}], {count};" for n, count in enumerate(counts)
    )


def wait(address: str, parity: str, form: str = "try_wait") -> str:
    """A loop until the phase of ``parity`` of an mbarrier is complete."""
    return f"""{{
    .reg .pred done;
LAB_WAIT:
    mbarrier.{form}.parity.shared::cta.b64 done, [{address}], {parity};
    @done bra DONE;
    bra LAB_WAIT;
DONE:
    }}"""


def launch(
    ptx: str | Emulator,
    out: np.ndarray,
    inp: np.ndarray,
    maps: tuple[TensorMap | bytes, ...] = (),
    extra: tuple[np.ndarray, ...] = (),
    n: int = 0,
    grid: int = 1,
    block: int = 128,
    **options: Any,
) -> Report:
    """Launch entry k; ``extra`` are arrays that only the maps name."""
    program = Emulator(ptx) if isinstance(ptx, str) else ptx
    images = [m if isinstance(m, bytes) else m.pack() for m in (*maps, ANY_MAP, ANY_MAP)[:2]]
    arrays = {"out": out, "inp": inp} | {f"extra{i}": a for i, a in enumerate(extra)}
    return program.launch(
        "k",
        grid=(grid, 1, 1),
        block=(block, 1, 1),
        params=[*images, parameter(out.ctypes.data), parameter(inp.ctypes.data),
                parameter(n, "u32")],
        allocations=[Allocation(a.ctypes.data, a.nbytes, name) for name, a in arrays.items()],
        **options,
    )  # fmt: skip


def aligned(nbytes: int, align: int = 16) -> np.ndarray:
    """A new uint8 array whose address is a multiple of ``align``."""
    raw = np.zeros(nbytes + align, np.uint8)
    skip = -raw.ctypes.data % align
    return raw[skip : skip + nbytes]


def tensor_of(
    dims: tuple[int, ...], size: int, padding: tuple[int, ...], box: tuple[int, ...],
    swizzle: int, fill: str = "zero",
) -> tuple[np.ndarray, TensorMap]:  # fmt: skip
    """A tensor of random bytes with ``padding`` x 16 bytes after each row, plane, ..."""
    strides, extent = [], dims[0] * size
    for d in range(1, len(dims)):
        extent = -(-extent // 16) * 16 + 16 * padding[d - 1]
        strides.append(extent)
        extent *= dims[d]
    extent = -(-extent // 16) * 16
    data = aligned(extent)
    data[:] = _RNG.integers(0, 256, extent)
    return data, TensorMap(data.ctypes.data, size, dims, tuple(strides), box, swizzle, fill)


# -- the model
def _window(
    tensor: np.ndarray, box: TensorMap, corner: tuple[int, ...], dims: tuple[int, ...]
) -> tuple[Any, Any, Any]:
    """The tensor as an array of elements, and the slices of it and of a box that overlap."""
    steps = (box.element_bytes, *box.strides)
    shape, strides = dims[::-1], steps[::-1]
    items = tensor.view(f"V{box.element_bytes}")
    view = np.lib.stride_tricks.as_strided(items, shape, strides)
    low = [max(0, at) for at in corner]
    high = [min(d, at + b) for d, at, b in zip(dims, corner, box.box, strict=True)]
    there = tuple(slice(lo, max(lo, hi)) for lo, hi in zip(low, high, strict=True))[::-1]
    here = tuple(
        slice(lo - at, max(lo, hi) - at) for lo, hi, at in zip(low, high, corner, strict=True)
    )[::-1]
    return view, there, here


def _places(box: TensorMap, start: int) -> np.ndarray:
    """Where each 16-byte chunk of the box lies after ``start``, in chunks.

    Atoms of 8 rows of 128 bytes: chunk c of row r lies at c ^ (r mod span chunks).
    """
    chunk = np.arange(box.box_bytes // 16) + start // 16
    rows, columns = chunk // 8, chunk % 8
    key = {0: 0 * rows, 32: rows // 1 % 2, 64: rows % 4, 128: rows % 8}[box.swizzle]
    return rows * 8 + (columns ^ key) - start // 16


def model_load(
    tensor: np.ndarray, box: TensorMap, corner: tuple[int, ...], start: int = 0
) -> np.ndarray:
    """The bytes of a box in shared memory at offset ``start`` after it has been loaded."""
    view, there, here = _window(tensor, box, corner, box.dims)
    fill = 0 if box.fill == "zero" else int("7FF7" * (box.element_bytes // 2), 16)
    dense = np.full(box.box[::-1], fill, f"u{box.element_bytes}")
    dense[here] = view[there].view(dense.dtype)
    chunks = dense.reshape(-1).view(np.uint8).reshape(-1, 16)
    result = np.empty_like(chunks)
    result[_places(box, start)] = chunks
    return result.reshape(-1)


def model_store(
    tensor: np.ndarray, box: TensorMap, corner: tuple[int, ...], source: np.ndarray, start: int = 0
) -> None:
    """Change ``tensor`` as storing a box from ``source``, shared memory at ``start``, does.

    Rows end with whole 16 bytes.
    """
    row = -(-box.dims[0] * box.element_bytes // 16) * 16 // box.element_bytes
    view, there, here = _window(tensor, box, corner, (row, *box.dims[1:]))
    chunks = source.reshape(-1, 16)[_places(box, start)]
    dense = chunks.reshape(-1).view(view.dtype).reshape(box.box[::-1])
    view[there] = dense[here]
