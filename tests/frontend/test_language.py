"""Functions of the language: the operations and types they build."""

from __future__ import annotations

import pytest

import minitriton.language as tl
from minitriton.frontend.source import DeviceFunction as jit
from minitriton.ir.diagnostics import CompileError
from minitriton.language.extra.cuda import libdevice
from tests.frontend.support import build


@jit
def shapes(p):
    x = tl.arange(0, 16)
    y = x.reshape(4, 4)
    z = tl.reshape(y, (2, 2, 4))
    tl.static_assert(z.shape == (2, 2, 4))
    tl.static_assert(z.T.shape == (2, 4, 2))
    tl.static_assert(tl.permute(z, (2, 0, 1)).shape == (4, 2, 2))
    tl.static_assert(tl.trans(z, 1, 0, 2).shape == (2, 2, 4))
    tl.static_assert(x[:, None].shape == (16, 1))
    tl.static_assert(x[None, :, None].shape == (1, 16, 1))
    tl.static_assert(y[..., None].shape == (4, 4, 1))
    tl.static_assert(y.expand_dims((0, 3)).shape == (1, 4, 4, 1))
    tl.static_assert(tl.join(x, x + 1).shape == (16, 2))
    a, b = tl.split(tl.join(x, x + 1))
    tl.static_assert(a.shape == (16,))
    tl.static_assert(tl.interleave(a, b).shape == (32,))
    tl.static_assert(tl.cat(a, b).shape == (32,))
    tl.static_assert(tl.ravel(z).shape == (16,) and z.ravel(can_reorder=True).shape == (16,))
    tl.static_assert(x.sort(descending=True).type == x.type)
    tl.static_assert(tl.add(x, 1, sanitize_overflow=False).type == x.type)
    tl.static_assert(tl.flip(y, 0).shape == (4, 4))
    tl.static_assert(y.reshape(2, -1).shape == (2, 8))
    tl.static_assert(tl.broadcast_to(x[:, None], 16, 8).shape == (16, 8))
    tl.static_assert(tl.broadcast_to(3, (4,)).shape == (4,))
    tl.static_assert(tl.full((4, 2), 1.5, tl.bfloat16).dtype == tl.bfloat16)
    tl.static_assert(tl.zeros_like(y).type == y.type)
    tl.static_assert(tl.sum(x, 0).reshape(1).item().shape == ())
    tl.store(p + x, tl.flip(x))


def test_shapes() -> None:
    text = build(shapes, p="*i32")
    assert "mt.trans" in text and "mt.split" in text and "mt.cat" in text


@jit
def memory(p, q, flags, i):
    x = tl.arange(0, 8)
    m = x < i
    a = tl.load(p + x, m, cache_modifier=".cg", eviction_policy="evict_last", volatile=True)
    b = tl.load(flags + x, mask=m, other=0)
    tl.static_assert(b.dtype == tl.int1)
    tl.store(flags + x, b, m, cache_modifier=".wt")
    tl.store(q, tl.load(q) + 1)
    tl.store(p + x, 0, mask=True)
    tl.store(p - i + x, a)
    tl.store(p.to(tl.pointer_type(tl.int32, 1)) + i.to(tl.uint32), 1)


def test_memory() -> None:
    text = build(memory, p="*fp16", q="*fp32", flags="*i1", i="i32")
    for wanted in ('cache = "cg"', 'evict = "evict_last"', "volatile", 'cache = "wt"',
                   "mt.ptr_cast", "!mt.ptr<i8>", "arith.extui"):  # fmt: skip
        assert wanted in text, wanted


@jit
def mathematics(p, x, i, u):
    a = tl.exp(x) + tl.exp2(x) + tl.log(x) + tl.log2(x) + tl.sin(x) + tl.cos(x) + tl.sqrt(x)
    a += tl.sqrt_rn(x) + tl.rsqrt(x) + tl.abs(x) + tl.floor(x) + tl.ceil(x) + tl.erf(x)
    a += tl.sigmoid(x) + tl.math.tanh(x) + tl.div_rn(x, 3.0) + tl.fdiv(x, 2.0) + tl.fma(x, x, 1.0)
    a += tl.clamp(x, 0.0, 1.0) + tl.minimum(x, 1.0, propagate_nan=tl.PropagateNan.ALL)
    a += libdevice.pow(x, 2.0) + libdevice.log1p(x) + libdevice.tanh(x) + tl.extra.libdevice.rint(x)
    b = tl.abs(i) + tl.umulhi(i, 3) + tl.cdiv(i, 4) + tl.maximum(i, 2) + max(i, 1)
    c = tl.maximum(u, u) & ~u | (u ^ 3)
    tl.store(p, a + b + c)


def test_mathematics() -> None:
    text = build(mathematics, p="*fp32", x="fp32", i="i32", u="u32")
    for wanted in ("math.exp ", "math.erf", "math.fma", 'function = "sqrt"', 'function = "div"',
                   "arith.minimumf", "arith.maxnumf", "arith.maxsi", "arith.maxui", "mt.mulhi",
                   "math.absi", "math.tanh"):  # fmt: skip
        assert wanted in text, wanted


@jit
def first(a, b):
    return a


@jit
def welford(m1, n1, m2, n2):
    n = n1 + n2
    return m1 + (m2 - m1) * n2 / n, n


@jit
def reductions(p, h):
    x = tl.load(h + tl.arange(0, 64)).reshape(8, 8)
    tl.static_assert(tl.sum(x, 0).dtype == tl.float16)
    tl.static_assert(tl.max(x, 1).dtype == tl.float32)
    tl.static_assert(tl.max(x, 1).shape == (8,))
    tl.static_assert(tl.sum(x).shape == ())
    tl.static_assert(tl.sum(x, keep_dims=True).shape == (1, 1))
    tl.static_assert(tl.sum(x, 1, keep_dims=True).shape == (8, 1))
    tl.static_assert(tl.sum(x.to(tl.int8), 1).dtype == tl.int32)
    tl.static_assert(tl.sum(x.to(tl.uint8), 1).dtype == tl.uint32)
    tl.static_assert(tl.sum(x, 1, dtype=tl.float64).dtype == tl.float64)
    tl.static_assert(tl.argmax(x, 1).dtype == tl.int32)
    tl.static_assert(tl.argmin(x, 1, tie_break_left=False, keep_dims=True).shape == (8, 1))
    v, i = tl.max(x, 0, return_indices=True)
    tl.static_assert(v.dtype == tl.float16 and i.dtype == tl.int32)
    tl.static_assert(tl.argmax(x).shape == ())
    f = x.to(tl.float32)
    mean, _ = tl.reduce((f, f), 1, welford)
    tl.static_assert(mean.shape == (8,))
    tl.static_assert(tl.reduce(f, None, first).shape == ())
    s = tl.cumsum(f, 1, reverse=True) + tl.cumprod(f, 0) + tl.associative_scan(f, 1, first)
    tl.static_assert(tl.cumsum(f.to(tl.bfloat16)).dtype == tl.float32)
    tl.static_assert(tl.xor_sum(x.to(tl.int32), 0).shape == (8,))
    tl.static_assert(f.softmax(1).shape == (8, 8))
    tl.store(p, tl.sum(s + v[None, :] + mean[:, None] + i))


def test_reductions() -> None:
    text = build(reductions, p="*fp32", h="*fp16")
    assert "reverse = true" in text and text.count("mt.scan") == 4
    assert "^bb0(%arg2: f32, %arg3: f32, %arg4: f32, %arg5: f32)" in text


@jit
def atomics(p, f, h, i, m):
    x = tl.arange(0, 4)
    tl.atomic_add(p + x, 1, mask=x < i, sem="relaxed", scope="cta")
    tl.atomic_max(p, i)
    tl.atomic_max(f + x, 1.5)
    tl.atomic_min(f, 2.0, sem="release")
    tl.atomic_add(h, 1.0)
    tl.atomic_xchg(p, 3)
    old = tl.atomic_cas(p, 0, 1, scope="sys")
    tl.atomic_or(p, old)


def test_atomics() -> None:
    text = build(atomics, p="*i32", f="*fp32", h="*bf16", i="i32", m="i1")
    for wanted in (
        'kind = "add"',
        'kind = "fadd"',
        'kind = "umin"',
        'kind = "umax"',
        'scope = "cta"',
        'sem = "release"',
        'scope = "sys"',
        'kind = "xchg"',
    ):
        assert wanted in text, wanted


@jit
def products(p, a, b, A: tl.constexpr, B: tl.constexpr, WANTED: tl.constexpr, TF32):
    x = tl.zeros(A, a.dtype.element_ty)
    y = tl.zeros(B, b.dtype.element_ty)
    z = tl.dot(x, y, allow_tf32=TF32)
    tl.static_assert(z.dtype == WANTED)
    z = tl.dot(x, y, z)
    tl.store(p, tl.sum(z))


@pytest.mark.parametrize(
    "t,wanted,k",
    [("fp16", tl.float32, 16), ("bf16", tl.float32, 16), ("fp32", tl.float32, 8),
     ("int8", tl.int32, 32), ("fp8e5", tl.float32, 32), ("fp64", tl.float64, 4)],
)  # fmt: skip
def test_dot(t: str, wanted: object, k: int) -> None:
    common = {"p": "*fp32", "a": f"*{t}", "b": f"*{t}", "WANTED": wanted}
    text = build(products, A=(16, k), B=(k, 8), TF32=None, **common)
    assert 'input_precision = "tf32"' in text
    assert '"ieee"' in build(products, A=(2, 1, k), B=(2, k, 4), TF32=False, **common)
    with pytest.raises(CompileError, match="inner dimension K"):
        build(products, A=(16, k // 2), B=(k // 2, 16), TF32=None, **common)


@jit
def random(p, seed, big):
    x = tl.arange(0, 8)
    a = tl.rand(seed, x) + tl.randn(seed, x) + tl.rand(seed, x + big)
    b, _, _, _ = tl.randint4x(seed, x)
    tl.static_assert(b.dtype == tl.uint32)
    u, _, _, _ = tl.rand4x(7, x)
    i, _ = tl.swizzle2d(tl.program_id(0), 1, 8, 8, 4)
    tl.store(p + x, a + tl.randint(seed, x).to(tl.float32) + u + i)


def test_random() -> None:
    text = build(random, p="*fp32", seed="i32", big="i64")
    assert text.count("mt.mulhi") == 20 * 6


@jit
def debugging(p, i):
    tl.device_assert(i > 0, "positive")
    assert i > 1, "more"
    assert True
    tl.device_print("i", i, tl.arange(0, 4), hex=True)
    print("value", i)
    tl.debug_barrier()
    tl.assume(i > 0)
    x = tl.multiple_of(tl.max_contiguous(i + tl.arange(0, 8), 8), 8)
    tl.store(p + tl.max_constancy(x, [4]), x)


def test_debugging() -> None:
    text = build(debugging, p="*i32", i="i32", debug=True)
    assert text.count("mt.assert") == 2 and text.count("mt.print") == 2
    assert "mt.barrier" in text and "mt.assume" in text and "contiguity = array<i64: 8>" in text
    assert "mt.assert" not in build(debugging, p="*i32", i="i32")


@jit
def python(p, n, x):
    a = int(3.7) + len((1, 2)) + min(4, 2) + abs(-3) + sum([1, 2])
    tl.static_assert(a == 3 + 2 + 2 + 3 + 3)
    tl.static_assert(isinstance(n, tl.tensor) and isinstance(a, tl.constexpr))
    b = float(n) + (n if n > 0 else 1)
    c = (1 < n < 5 and n != 3) or not x
    tl.static_assert(c.dtype == tl.int1)
    a.to(tl.int64)
    for i, (j, k) in enumerate(zip((1, 2), (3, 4))):  # noqa: B905
        b += i * j * k
    tl.store(p, b if c else 0.0)


def test_python_subset() -> None:
    assert build(python, p="*fp32", n="i32", x="i1").count("scf.if") == 2


@jit
def casts(p, f, i, pointer):
    h = f.to(tl.float16)
    tl.static_assert(h.to(tl.bfloat16).dtype == tl.bfloat16)
    a = f.to(tl.float8e4nv).to(tl.float32) + f.to(tl.bfloat16, fp_downcast_rounding="rtz")
    b = f.to(tl.int32, bitcast=True) + f.to(tl.int1) + i.to(tl.int64) + pointer.to(tl.int64)
    c = tl.cast(i, tl.float8e5).to(tl.float16) + (3).to(tl.float32)
    tl.static_assert(f.to(tl.float32, fp_downcast_rounding="rtne").dtype == tl.float32)
    tl.store(p, a + b + c + f.to(tl.uint8))


def test_casts() -> None:
    text = build(casts, p="*fp32", f="fp32", i="i32", pointer="*i8")
    for wanted in (
        'rounding = "rtz"',
        "arith.bitcast",
        "mt.ptr_to_int",
        "arith.fptoui",
        "cmpf une",
    ):
        assert wanted in text, wanted
