"""Ops on global memory, on shared-memory buffers, and asynchronous copies between them."""

from collections.abc import Sequence
from typing import Any

from minitriton.ir.dialect import MT, PtrType, check, element_of, shape_of, verifier
from minitriton.ir.mlir import ext, ir

Operand, Result = ext.Operand, ext.Result


class LoadOp(MT.Operation, name="load"):
    """Loads a scalar or a tile; `mask` and `other` are absent or one value each.

    Lanes whose mask is false hold `other`, undefined values without it. Optional attributes:
    `cache` ("ca", "cg", "cs", "cv"), `evict` ("evict_first", "evict_last"), `volatile` (unit).
    """

    pointer: Operand[Any]
    mask: Sequence[Operand[Any]]
    other: Sequence[Operand[Any]]
    result: Result[Any]

    @verifier
    def verify_invariants(op: Any) -> bool:
        pointer, result = op.operands[0].type, op.results[0].type
        return check(
            op,
            (element_of(result) == PtrType(element_of(pointer)).pointee, "not the pointee type"),
            (all(shape_of(v.type) == shape_of(result) for v in op.operands), "shapes differ"),
            (len(op.operands) <= 3, "at most pointer, mask and other"),
        )


class StoreOp(MT.Operation, name="store"):
    """Stores a scalar (by one thread) or a tile; `extras` is [] or [mask].

    Optional attributes: `cache` ("wb", "cg", "cs", "wt"), `evict`.
    """

    pointer: Operand[Any]
    value: Operand[Any]
    extras: Sequence[Operand[Any]]

    @verifier
    def verify_invariants(op: Any) -> bool:
        pointer, value = op.operands[0].type, op.operands[1].type
        return check(
            op,
            (element_of(value) == PtrType(element_of(pointer)).pointee, "not the pointee type"),
            (all(shape_of(v.type) == shape_of(value) for v in op.operands), "shapes differ"),
        )


class AtomicRmwOp(MT.Operation, name="atomic_rmw"):
    """Read-modify-write; the result is the old value. `extras` is [] or [mask].

    `kind`: add fadd max min umax umin and or xor xchg (fmax/fmin are made of integer ones by the
    frontend); `sem`: relaxed acquire release acq_rel; `scope`: cta gpu sys.
    """

    pointer: Operand[Any]
    value: Operand[Any]
    extras: Sequence[Operand[Any]]
    kind: ir.StringAttr = ext.attribute(kw_only=True)
    sem: ir.StringAttr = ext.attribute(kw_only=True)
    scope: ir.StringAttr = ext.attribute(kw_only=True)
    result: Result[Any] = ext.result(kw_only=True)


class AtomicCasOp(MT.Operation, name="atomic_cas"):
    """Compare and swap of 16, 32 or 64 bits; the result is the old value."""

    pointer: Operand[Any]
    compare: Operand[Any]
    value: Operand[Any]
    sem: ir.StringAttr
    scope: ir.StringAttr
    result: Result[Any]


class LocalAllocOp(MT.Operation, name="local_alloc"):
    """A shared-memory buffer, filled with the tile operand if there is one.

    `offset` (i32, bytes) is added by the allocation pass.
    """

    extras: Sequence[Operand[Any]]
    result: Result[Any]


class LocalDeallocOp(MT.Operation, name="local_dealloc"):
    """Ends the life of a buffer explicitly (else it ends with its last use)."""

    buffer: Operand[Any]


class LocalStoreOp(MT.Operation, name="local_store"):
    """Writes a tile into a buffer of its shape."""

    value: Operand[Any]
    buffer: Operand[Any]


class LocalLoadOp(MT.Operation, name="local_load"):
    """Reads a buffer into registers in the layout of the result."""

    buffer: Operand[Any]
    result: Result[Any]


class MemIndexOp(MT.Operation, name="mem_index"):
    """Slot `index` (i32) of a multi-buffer: [n, ...] -> [...]. No data moves."""

    buffer: Operand[Any]
    index: Operand[Any]
    result: Result[Any]


class MemTransOp(MT.Operation, name="mem_trans"):
    """A buffer seen with permuted dimensions (`order` as in trans). No data moves."""

    buffer: Operand[Any]
    order: Any = ext.attribute()
    result: Result[Any] = ext.result()


class AsyncCopyOp(MT.Operation, name="async_copy"):
    """cp.async: a tile of pointers into a buffer; `mask`, `other` as in load, which is stored
    where the mask does not hold: zeros without it."""

    pointer: Operand[Any]
    buffer: Operand[Any]
    mask: Sequence[Operand[Any]]
    other: Sequence[Operand[Any]]


class AsyncCommitOp(MT.Operation, name="async_commit"):
    """Closes the group of async copies issued since the last commit."""


class AsyncWaitOp(MT.Operation, name="async_wait"):
    """Waits until at most `pending` groups of this thread are in flight (no CTA barrier)."""

    pending: ir.IntegerAttr


class TmaCopyOp(MT.Operation, name="tma_copy"):
    """TMA: boxes of tensor map number `map` that make up the buffer's tile, by one thread.

    `coordinates` (i32, the map's inner dimension first) are those of the tile's first element;
    `dims` names the map's dimension of each of the tile's. Elements outside the tensor are zero.
    The bytes are counted by `barrier`. Nothing happens where `runs` (i1) is false.
    """

    buffer: Operand[Any]
    barrier: Operand[Any]
    runs: Operand[Any]
    coordinates: Sequence[Operand[Any]]
    map: ir.IntegerAttr = ext.attribute(kw_only=True)
    dims: Any = ext.attribute(kw_only=True)


class TmaMulticastOp(MT.Operation, name="tma_multicast"):
    """A tma_copy of which, where `shared` (i1) is true, both CTAs of a cluster make one half each.

    Then the CTA copies the half of its own rank, along the tile's dimension `halved`, to the same
    place in both; the bytes are counted by the barriers that stand where `barrier` does.
    """

    buffer: Operand[Any]
    barrier: Operand[Any]
    runs: Operand[Any]
    shared: Operand[Any]
    coordinates: Sequence[Operand[Any]]
    map: ir.IntegerAttr = ext.attribute(kw_only=True)
    dims: Any = ext.attribute(kw_only=True)
    halved: ir.IntegerAttr = ext.attribute(kw_only=True)


class TmaStoreOp(MT.Operation, name="tma_store"):
    """TMA: the buffer's tile to boxes of tensor map number `map`, by thread 0, as one group.

    `coordinates` and `dims` as in tma_copy. Elements outside the tensor are not stored. Threads'
    writes to the buffer need a proxy_fence and a barrier before; the copy runs on until a
    tma_store_wait.
    """

    buffer: Operand[Any]
    coordinates: Sequence[Operand[Any]]
    map: ir.IntegerAttr = ext.attribute(kw_only=True)
    dims: Any = ext.attribute(kw_only=True)


class TmaStoreWaitOp(MT.Operation, name="tma_store_wait"):
    """Thread 0 waits until at most `pending` of its tma_stores are unfinished (no CTA barrier);
    with the unit attribute `read` until no more than that still read their buffers."""

    pending: ir.IntegerAttr


class MbarrierInitOp(MT.Operation, name="mbarrier_init"):
    """Makes the slots of an i64 buffer barriers of `count` arrivals (thread 0; no CTA barrier)."""

    barriers: Operand[Any]
    count: ir.IntegerAttr


class MbarrierInvalOp(MT.Operation, name="mbarrier_inval"):
    """Ends the life of all barriers of a buffer (thread 0; no CTA barrier)."""

    barriers: Operand[Any]


class MbarrierExpectOp(MT.Operation, name="mbarrier_expect"):
    """Thread 0 arrives and adds `bytes` to what the phase waits for; not where `runs` is false."""

    barrier: Operand[Any]
    runs: Operand[Any]
    bytes: ir.IntegerAttr


class MbarrierWaitOp(MT.Operation, name="mbarrier_wait"):
    """Waits until the phase of parity `parity` (i32) of a barrier is complete."""

    barrier: Operand[Any]
    parity: Operand[Any]


class MbarrierArriveOp(MT.Operation, name="mbarrier_arrive"):
    """Each warp arrives once, after all its lanes came here; not where `runs` (i1) is false. With
    the unit attribute `cluster` it arrives at the barriers there of both CTAs of its cluster."""

    barrier: Operand[Any]
    runs: Operand[Any]


class ProxyFenceOp(MT.Operation, name="proxy_fence"):
    """What this thread wrote to shared memory is visible to wgmma after the next barrier."""


class WarpgroupWaitOp(MT.Operation, name="warpgroup_wait"):
    """Waits until at most `pending` warpgroup_dots of this warp are in flight (no CTA barrier)."""

    pending: ir.IntegerAttr


PURE = (MemIndexOp, MemTransOp)
OPS = (
    LoadOp, StoreOp, AtomicRmwOp, AtomicCasOp, LocalAllocOp, LocalDeallocOp, LocalStoreOp,
    LocalLoadOp, *PURE, AsyncCopyOp, AsyncCommitOp, AsyncWaitOp,
    TmaCopyOp, TmaMulticastOp, TmaStoreOp, TmaStoreWaitOp, MbarrierInitOp, MbarrierInvalOp,
    MbarrierExpectOp, MbarrierWaitOp, MbarrierArriveOp, ProxyFenceOp, WarpgroupWaitOp,
)  # fmt: skip
