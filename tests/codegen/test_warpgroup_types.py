"""Products of tf32 and of bytes in PTX and SASS: instructions, registers, how A gets into them."""

import itertools
import re

import pytest
import torch

from minitriton.runtime.assembler import assemble, disassemble
from tests.codegen.split_kernels import matmul_kernel


def matmul(dtype, b_t, blocks, warps=8):
    a, b = (torch.zeros(512, 512, dtype=dtype) for _ in "ab")
    c = torch.zeros(512, 512, dtype=torch.float32 if dtype.is_floating_point else torch.int32)
    b = b.T if b_t else b
    strides = (*a.stride(), *b.stride(), *c.stride())
    return matmul_kernel.warmup(
        a, b, c, 512, 512, 512, *strides, *blocks, 8, num_warps=warps, num_stages=3, grid=(8,),
        target="sm_90a",
    )  # fmt: skip


def products(ptx):
    """(name, registers of sums, of A, further operands) of all wgmma.mma_async."""
    found = []
    for text in re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+ [^;]*);", ptx):
        name, rest = text.split(" ", 1)
        lists = re.findall(r"\{([^}]*)\}", rest)
        counts = [len(names.split(",")) for names in lists] + [0] * (2 - len(lists))
        plain = [part.strip() for part in re.sub(r"\{[^}]*\}", "", rest).split(",") if part.strip()]
        found.append((name, *counts, plain))
    return found


CASES = {  # type, B stored along K, blocks: instruction, how many, its constants
    "tf32": (torch.float32, False, (128, 256, 32), "m64n128k8.f32.tf32.tf32", 8, ["1", "1"]),
    "tf32, [N, K]": (torch.float32, True, (128, 256, 32), "m64n256k8.f32.tf32.tf32", 4,
                     ["1", "1"]),
    "int8": (torch.int8, False, (256, 128, 128), "m64n256k32.s32.s8.s8", 4, []),
    "int8, [N, K]": (torch.int8, True, (128, 256, 128), "m64n256k32.s32.s8.s8", 4, []),
    "uint8": (torch.uint8, False, (128, 128, 64), "m64n128k32.s32.u8.u8", 2, []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_instructions(case):
    dtype, b_t, blocks, name, count, constants = CASES[case]
    ptx = matmul(dtype, b_t, blocks).ptx
    found = products(ptx)
    assert [instruction for instruction, *_ in found] == [name] * count
    columns = int(re.search(r"n(\d+)k", name)[1])
    for number, (_, sums, left, operands) in enumerate(found):
        assert (sums, left) == (columns // 2, 0 if b_t else 4)
        scale, *rest = operands[-len(constants) - 1 :]
        assert rest == constants
        # at depth 0 the sums, left undefined, do not count in the first iteration
        assert scale == "p" if number >= 2 else scale != "p" or number == 1
        assert len(operands) == len(constants) + (3 if b_t else 2)
    assert "cvt.rna.tf32" not in ptx  # TMA has rounded


def test_words_of_a_come_where_the_instructions_want_them():
    """A pair of rows in 8 bytes, and no move between the loads and the products of either half."""
    compiled = matmul(torch.float32, False, (128, 256, 32))
    assert len(re.findall(r"ld\.shared\.v2", compiled.ptx)) == 16
    sass = disassemble(assemble(compiled.ptx, "sm_90a", compiled.name).cubin)
    code = [
        name for name in re.findall(r"\*/\s+(?:@!?U?P\d+ )?(\w+)[.\w]* ", sass) if name != "NOP"
    ]
    first = code.index("LDS")
    last = max(i for i, name in enumerate(code) if name == "HGMMA")
    loop = code[first:last]
    assert loop.count("LDS") == 16 and not {"MOV", "PRMT", "SHFL"} & set(loop)
    runs = [name for name, _ in itertools.groupby(n for n in loop if n in ("LDS", "HGMMA"))]
    assert runs == ["LDS", "HGMMA", "LDS", "HGMMA"]


def test_bytes_of_a_are_transposed_by_matrix_loads():
    compiled = matmul(torch.int8, False, (128, 128, 64))
    assert len(re.findall(r"ldmatrix\S*\.x4\.trans", compiled.ptx)) == 2
    assert compiled.ptx.count("prmt.b32") == 8
    done = assemble(compiled.ptx, "sm_90a", compiled.name)
    assert not done.spill_stores and not done.warnings
    sass = disassemble(done.cubin)
    assert sass.count("LDSM.16.MT88.4") == 2 and sass.count("IGMMA") == 2


def test_a_copy_of_many_boxes_keeps_one_coordinate():
    """Eight panels of 32 columns: their coordinates would take a producer's registers."""
    ptx = matmul(torch.float32, False, (128, 256, 32)).ptx
    steps = re.findall(r"add\.s32 c(\d), %r\d+, (\d+);", ptx)
    assert sorted((int(dim), int(step)) for dim, step in steps) == [
        (0, 32 * panel) for panel in range(1, 8)
    ]
    few = matmul(torch.float32, False, (256, 128, 32)).ptx
    assert not re.search(r"add\.s32 c\d", few)


def test_only_whole_operands_have_descriptors_outside_of_the_products():
    """Those of sub-tiles would be held through loops that do not change an operand."""
    ptx = matmul(torch.bfloat16, False, (256, 128, 64)).ptx
    names = [name for _, _, _, operands in products(ptx) for name in operands[:2]]
    outside = {name for name in names if name.startswith("%")}
    inside = set(names) - outside
    assert len(outside) == 2 and len(inside) == 2 * 4 - 1 + 3  # two tiles of A, four steps
    assert all(re.search(rf"add\.s64 {name}, %rd\d+, \d+;", ptx) for name in inside)
