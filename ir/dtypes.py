"""Element types of the language, without MLIR: they are imported by every user program.

A `dtype` is a scalar element type, `pointer_type` points to one, `block_type` is a tile of either.
Signedness lives here only; MLIR integers are signless and ops carry the sign in their name.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING


class _Named:
    """Questions about a type's name, which Triton's types answer whether scalars or not."""

    if TYPE_CHECKING:

        @property
        def name(self) -> str: ...

    def is_fp16(self) -> bool:
        return self.name == "fp16"

    def is_bf16(self) -> bool:
        return self.name == "bf16"

    def is_fp32(self) -> bool:
        return self.name == "fp32"

    def is_fp64(self) -> bool:
        return self.name == "fp64"

    def is_fp8e5(self) -> bool:
        return self.name == "fp8e5"

    def is_fp8e4nv(self) -> bool:
        return self.name == "fp8e4nv"

    def is_int8(self) -> bool:
        return self.name == "int8"

    def is_int16(self) -> bool:
        return self.name == "int16"

    def is_int32(self) -> bool:
        return self.name == "int32"

    def is_int64(self) -> bool:
        return self.name == "int64"

    def is_uint8(self) -> bool:
        return self.name == "uint8"

    def is_uint16(self) -> bool:
        return self.name == "uint16"

    def is_uint32(self) -> bool:
        return self.name == "uint32"

    def is_uint64(self) -> bool:
        return self.name == "uint64"


@dataclass(frozen=True)
class dtype(_Named):  # the language's own name for it
    """Scalar element type: `kind` is one of 'bool', 'int', 'uint', 'float', 'void'."""

    name: str
    kind: str
    bits: int
    mantissa: int = 0  # explicit mantissa bits of a float

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"tl.{self.name}"

    @property
    def primitive_bitwidth(self) -> int:
        return self.bits

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory (int1 takes a whole byte)."""
        return max(self.bits // 8, 1)

    @property
    def scalar(self) -> dtype:
        return self

    @property
    def fp_mantissa_width(self) -> int:
        return self.mantissa

    def is_floating(self) -> bool:
        return self.kind == "float"

    def is_int(self) -> bool:
        return self.kind in ("bool", "int", "uint")

    def is_int_signed(self) -> bool:
        return self.kind == "int"

    def is_int_unsigned(self) -> bool:
        return self.kind in ("bool", "uint")

    def is_bool(self) -> bool:
        return self.kind == "bool"

    def is_int1(self) -> bool:
        return self.kind == "bool"

    def is_fp8(self) -> bool:
        return self.kind == "float" and self.bits == 8

    def is_standard_floating(self) -> bool:
        return self.kind == "float" and self.bits >= 16

    def is_ptr(self) -> bool:
        return False

    def is_block(self) -> bool:
        return False

    def is_void(self) -> bool:
        return self.kind == "void"


@dataclass(frozen=True)
class pointer_type(_Named):
    """Pointer to a scalar element in global memory; `const` forbids stores through it."""

    element_ty: dtype
    address_space: int = 1
    const: bool = False

    def __str__(self) -> str:
        return f"pointer<{'const ' if self.const else ''}{self.element_ty}>"

    __repr__ = __str__

    @property
    def name(self) -> str:
        return str(self)

    @property
    def bits(self) -> int:
        return 64

    primitive_bitwidth = bits

    @property
    def itemsize(self) -> int:
        return 8

    @property
    def scalar(self) -> pointer_type:
        return self

    def is_ptr(self) -> bool:
        return True

    def is_const(self) -> bool:
        return self.const

    def is_block(self) -> bool:
        return False

    def is_floating(self) -> bool:
        return False

    def is_int(self) -> bool:
        return False

    def is_fp8(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return False

    def is_int1(self) -> bool:
        return False

    def is_void(self) -> bool:
        return False


Scalar = dtype | pointer_type


@dataclass(frozen=True)
class block_type(_Named):
    """A tile: `shape` (rank >= 1) of scalar elements."""

    element_ty: Scalar
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"<{list(self.shape)}, {self.element_ty}>"

    __repr__ = __str__

    @property
    def name(self) -> str:
        return str(self)

    @property
    def scalar(self) -> Scalar:
        return self.element_ty

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def get_block_shapes(self) -> tuple[int, ...]:
        return self.shape

    def is_block(self) -> bool:
        return True

    def is_ptr(self) -> bool:
        return False

    def is_floating(self) -> bool:
        return False

    def is_int(self) -> bool:
        return False


AnyType = dtype | pointer_type | block_type

void = dtype("void", "void", 0)
int1 = dtype("int1", "bool", 1)
int8, int16, int32, int64 = (dtype(f"int{n}", "int", n) for n in (8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (dtype(f"uint{n}", "uint", n) for n in (8, 16, 32, 64))
float8e5 = dtype("fp8e5", "float", 8, 2)
float8e4nv = dtype("fp8e4nv", "float", 8, 3)
float16 = dtype("fp16", "float", 16, 10)
bfloat16 = dtype("bf16", "float", 16, 7)
float32 = dtype("fp32", "float", 32, 23)
float64 = dtype("fp64", "float", 64, 52)
pi32_t = pointer_type(int32)

ALL = (
    int1, int8, int16, int32, int64, uint8, uint16, uint32, uint64,
    float8e5, float8e4nv, float16, bfloat16, float32, float64,
)  # fmt: skip
_SHORT = {"i1": int1, "i8": int8, "i16": int16, "i32": int32, "i64": int64, "u1": int1,
          "u8": uint8, "u16": uint16, "u32": uint32, "u64": uint64, "B": int1}  # fmt: skip
BY_NAME: dict[str, dtype] = {t.name: t for t in ALL} | _SHORT | {
    "float16": float16, "bfloat16": bfloat16, "float32": float32, "float64": float64,
    "float8_e5m2": float8e5, "float8_e4m3fn": float8e4nv, "fp8e4m3": float8e4nv, "bool": int1,
}  # fmt: skip


def parse(text: str) -> Scalar:
    """`'fp32'`, `'i32'`, `'*bf16'` (pointer), `'*kfp32'` (const pointer); ValueError if unknown."""
    if text.startswith("*k") and text[2:] in BY_NAME:
        return pointer_type(BY_NAME[text[2:]], const=True)
    if text.startswith("*") and text[1:] in BY_NAME:
        return pointer_type(BY_NAME[text[1:]])
    if text in BY_NAME:
        return BY_NAME[text]
    raise ValueError(f"unknown type {text!r}; known: {', '.join(sorted(BY_NAME))}, or *T, *kT")
