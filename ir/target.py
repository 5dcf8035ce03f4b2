"""The GPUs we compile for, one row each: limits and the instructions that rules may ask for."""

from __future__ import annotations

from dataclasses import dataclass

from minitriton.ir.diagnostics import CompileError, Diagnostic

ROW_SPLIT_WARPS = 12  # of kernels whose rows three warpgroups share: passes/split_rows.py
_AMPERE = frozenset({"mma_sync", "ldmatrix", "cp_async", "bf16", "tf32", "redux"})
_ADA = _AMPERE | {"fp8_cvt", "fp8_mma"}
_HOPPER = _ADA | {"wgmma", "tma", "mbarrier", "cluster", "setmaxnreg", "stmatrix", "atom_bf16",
                  "bf16_add", "pdl"}  # fmt: skip
_BLACKWELL = _ADA | {"tma", "mbarrier", "cluster", "stmatrix", "atom_bf16", "bf16_add", "pdl",
                     "f32x2"}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One GPU architecture. Rules ask `target.has(...)`, never compare architecture numbers."""

    arch: str  # as ptxas spells it, e.g. "sm_90a"
    capability: int  # 90 for sm_90a
    ptx_version: int  # lowest PTX ISA that has all we emit for it; 80 means 8.0
    max_shared_bytes: int  # dynamic shared memory one CTA may have (opt-in limit)
    features: frozenset[str]
    max_registers: int = 255  # per thread
    registers_per_sm: int = 65536

    def has(self, feature: str) -> bool:
        """Whether the architecture has a named instruction family."""
        return feature in self.features

    @staticmethod
    def parse(arch: str) -> Target:
        """The row named `arch`; CompileError that lists the known ones otherwise."""
        if arch in TARGETS:
            return TARGETS[arch]
        raise CompileError(
            Diagnostic(f"unknown target {arch!r}", help=f"known targets: {', '.join(TARGETS)}")
        )

    @staticmethod
    def for_capability(major: int, minor: int) -> Target:
        """The row for a GPU's compute capability; CompileError if there is none."""
        wanted = major * 10 + minor
        for target in TARGETS.values():
            if target.capability == wanted:
                return target
        same_family = [t for t in TARGETS.values() if t.capability // 10 == major < 9]
        below = [t for t in same_family if t.capability <= wanted]
        if below:
            return max(below, key=lambda t: t.capability)
        raise CompileError(
            Diagnostic(
                f"no target for a GPU of compute capability {major}.{minor}",
                help=f"supported: {', '.join(TARGETS)}; without a GPU use CPU tensors",
            )
        )


TARGETS = {
    t.arch: t
    for t in (
        Target("sm_80", 80, 74, 166_912, _AMPERE),
        Target("sm_86", 86, 74, 101_376, _AMPERE),
        Target("sm_89", 89, 84, 101_376, _ADA),
        Target("sm_90a", 90, 84, 232_448, _HOPPER),
        Target("sm_100a", 100, 86, 232_448, _BLACKWELL),
        Target("sm_120a", 120, 87, 101_376, _BLACKWELL),
    )
}
