"""tl.inline_asm_elementwise: packed and wide registers, several results, effects, errors."""

import pytest
import torch

import minitriton as triton
import minitriton.language as tl


@triton.jit
def convert_kernel(a_ptr, b_ptr, c_ptr, d_ptr, BLOCK: tl.constexpr):
    """The example of Triton's documentation: bytes to integers, and their maximum with floats."""
    i = tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i)
    b = tl.load(b_ptr + i)
    (c, d) = tl.inline_asm_elementwise(
        asm="""
        {
            // Unpack `a` into `ai`.
            .reg .b8 tmp<4>;
            mov.b32 {tmp0, tmp1, tmp2, tmp3}, $8;
            cvt.u32.u8 $0, tmp0;
            cvt.u32.u8 $1, tmp1;
            cvt.u32.u8 $2, tmp2;
            cvt.u32.u8 $3, tmp3;
        }
        cvt.rn.f32.s32 $4, $0;
        cvt.rn.f32.s32 $5, $1;
        cvt.rn.f32.s32 $6, $2;
        cvt.rn.f32.s32 $7, $3;
        max.f32 $4, $4, $9;
        max.f32 $5, $5, $10;
        max.f32 $6, $6, $11;
        max.f32 $7, $7, $12;
        """,
        constraints=("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r"),
        args=[a, b],
        dtype=(tl.int32, tl.float32),
        is_pure=True,
        pack=4,
    )
    tl.store(c_ptr + i, c)
    tl.store(d_ptr + i, d)


@pytest.mark.parametrize("n", [16, 128, 192, 1024])
def test_example_of_the_documentation(n, device):
    a = torch.randint(0, 256, (n,), dtype=torch.uint8, device=device)
    b = torch.rand(n, device=device) * 256
    c, d = torch.empty(n, dtype=torch.int32, device=device), torch.empty(n, device=device)
    convert_kernel[(1,)](a, b, c, d, BLOCK=n)
    assert torch.equal(c, a.to(torch.int32))
    assert torch.equal(d, torch.maximum(a.to(torch.float32), b))


@triton.jit
def shift_kernel(x_ptr, y_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A column and a row, broadcast."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row)[:, None]
    y = tl.load(y_ptr + column)[None, :]
    z = tl.inline_asm_elementwise(
        "shf.l.wrap.b32 $0, $1, $2, 5;", "=r,r, r", [x, y], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out_ptr + row[:, None] * COLUMNS + column[None, :], z)


@pytest.mark.parametrize("shape", [(4, 8), (32, 64), (16, 48)])
def test_broadcast(shape, device):
    x, y = (torch.randint(-(1 << 31), (1 << 31) - 1, (n,), dtype=torch.int32) for n in shape)
    x, y = x.to(device), y.to(device)
    out = torch.empty(shape, dtype=torch.int32, device=device)
    shift_kernel[(1,)](x, y, out, *shape)
    low = x.to(torch.int64)[:, None] & 0xFFFFFFFF
    expected = (y.to(torch.int64)[None, :] << 5) | (low >> 27)
    assert torch.equal(out.to(torch.int64) & 0xFFFFFFFF, expected & 0xFFFFFFFF)


@triton.jit
def halves_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr, PACK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if PACK == 2:
        z = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $2;", "=r,r,r", [x, y], tl.float16, is_pure=True, pack=2
        )
    else:
        z = tl.inline_asm_elementwise(
            "fma.rn.f16 $0, $1, $2, $2;", "=h,h,h", [x, y], tl.float16, is_pure=True, pack=1
        )
    tl.store(out_ptr + i, z)


@pytest.mark.parametrize("pack", [1, 2])
@pytest.mark.parametrize("n", [32, 512])
def test_halves(n, pack, device):
    x, y = (torch.randn(n, device=device).half() for _ in range(2))
    out = torch.empty_like(x)
    halves_kernel[(1,)](x, y, out, n, pack)
    expected = (x.double() * y.double() + y.double()).half()
    assert torch.equal(out, expected)


@triton.jit
def kinds_kernel(x_ptr, d_ptr, wide_ptr, flag_ptr, BLOCK: tl.constexpr):
    """64-bit letters, predicates, a byte alone in a register, and a tied operand."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    d = tl.load(d_ptr + i)
    double, wide, odd = tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.u32.u64 t, $4; and.b32 t, t, 1; setp.ne.u32 $2, t, 0; }"
        " add.f64 $0, $3, $3; mul.lo.s64 $1, $4, 3;",
        "=d,=l,=b,d,l",
        [d, x],
        dtype=[tl.float64, tl.int64, tl.int1],
        is_pure=True,
        pack=1,
    )
    low = tl.inline_asm_elementwise(
        "xor.b32 $0, $0, $2;", "=r,0,r", [x.to(tl.int8), 5], dtype=tl.int8, is_pure=True, pack=1
    )
    tl.store(d_ptr + i, double)
    tl.store(wide_ptr + i, wide + low)
    tl.store(flag_ptr + i, odd)


def test_kinds_of_registers(device):
    x = torch.randint(0, 1 << 40, (64,), device=device)
    d = torch.randn(64, dtype=torch.float64, device=device)
    expected = 2 * d
    wide, flag = torch.empty_like(x), torch.empty(64, dtype=torch.bool, device=device)
    kinds_kernel[(1,)](x, d, wide, flag, 64)
    low = (x & 0xFF) ^ 5
    assert torch.equal(wide, 3 * x + low - 256 * (low >> 7))
    assert torch.equal(d, expected) and torch.equal(flag, x % 2 == 1)


@triton.jit
def store_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Stores by inline PTX, whose result nobody reads, in a loop."""
    i = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        x = tl.load(x_ptr + start + i)
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [out_ptr + start + i, x + 1],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def test_effects_stay(device):
    x = torch.randint(0, 1000, (256,), dtype=torch.int32, device=device)
    out = torch.zeros_like(x)
    store_kernel[(1,)](x, out, 256, 64)
    assert torch.equal(out, x + 1)


@triton.jit
def count_kernel(counter_ptr, out_ptr, n):
    """Each call counts, although all are the same and their operands never change."""
    first = 0
    for _ in range(n):
        first = tl.inline_asm_elementwise(
            "atom.global.add.u32 $0, [$1], 1;", "=r,l", [counter_ptr], tl.int32, False, 1
        )
    again = tl.inline_asm_elementwise(
        "atom.global.add.u32 $0, [$1], 1;", "=r,l", [counter_ptr], tl.int32, False, 1
    )
    tl.store(out_ptr, again - first)


def test_effects_happen_each_time(device):
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    count_kernel[(1,)](counter, out, 5, num_warps=1)
    assert counter.item() == 6 * 32 and out.item() > 0


@triton.jit
def reads_after_kernel(x_ptr, out_ptr):
    """A load after an effect is not the one before it."""
    before = tl.load(x_ptr)
    tl.inline_asm_elementwise(
        "st.global.b32 [$1], 7; mov.b32 $0, 0;", "=r,l", [x_ptr], tl.int32, False, 1
    )
    tl.debug_barrier()
    tl.store(out_ptr, before)
    tl.store(out_ptr + 1, tl.load(x_ptr))


def test_loads_are_not_moved_across(device):
    x = torch.full((1,), 3, dtype=torch.int32, device=device)
    out = torch.zeros(2, dtype=torch.int32, device=device)
    reads_after_kernel[(1,)](x, out, num_warps=1)
    assert out.tolist() == [3, 7]


@triton.jit
def special_kernel(out_ptr):
    program = tl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], tl.int32, True, 1)
    start = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    end = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], tl.int64, False, 1)
    tl.store(out_ptr + 2 * tl.program_id(0), program.to(tl.int64))
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, end - start)


def test_without_operands(device):
    out = torch.full((6,), -1, dtype=torch.int64, device=device)
    special_kernel[(3,)](out)
    assert out[::2].tolist() == [0, 1, 2] and (out[1::2] >= 0).all()


@triton.jit
def clock_kernel(out_ptr):
    start = tl.extra.cuda.globaltimer()
    tl.store(out_ptr, tl.extra.cuda.num_warps())
    tl.store(out_ptr + 1, tl.extra.cuda.num_threads())
    tl.store(out_ptr + 2, tl.extra.cuda.smid().to(tl.int64))
    tl.debug_barrier()
    tl.store(out_ptr + 3, tl.extra.cuda.globaltimer() - start)


def test_clock_and_place(device):
    out = torch.full((4,), -1, dtype=torch.int64, device=device)
    clock_kernel[(1,)](out, num_warps=2)
    assert out[:2].tolist() == [2, 64] and 0 <= out[2] < 1000 and out[3] >= 0


@triton.jit
def branch_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    """Labels and registers of their own, in several copies of the text."""
    i = tl.arange(0, BLOCK)
    y = tl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .u32 t;
             mov.u32 t, 0;
           $$AGAIN:
             add.u32 t, t, 3;
             setp.lt.u32 p, t, $1;
             @p bra $$AGAIN;
             mov.u32 $0, t; }""",
        "=r,r", [tl.load(x_ptr + i)], tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    tl.store(out_ptr + i, y)


def test_labels(device):
    x = torch.randint(0, 40, (256,), dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    branch_kernel[(1,)](x, out, 256)
    assert torch.equal(out, torch.clamp((x + 2) // 3 * 3, min=3))
