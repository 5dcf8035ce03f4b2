"""What the environment asks for: the only reader of MINITRITON_* variables.

`read()` looks at the environment anew; compiling, the emulator and the CLI call it once per piece
of work, and nothing on the launch path of a GPU does (`jit.reload_switches`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

_FALSE = frozenset({"", "0", "false", "off", "no"})


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one process; each field says which variable sets it."""

    dump: str = ""  # DUMP: folder that gets one file per compilation stage
    cache_dir: str = ""  # CACHE_DIR: where compiled kernels are kept
    cache: bool = True  # CACHE=0: compile every kernel anew, keep nothing
    cache_shared: bool = False  # CACHE_SHARED=1: accept a cache folder that others may write to
    cache_limit_mb: int = 1024  # CACHE_LIMIT_MB: size at which old entries are dropped
    debug: bool = False  # DEBUG=1: device asserts on, arguments checked through the driver
    check: str = ""  # CHECK: emulator checks, "all", "none" or names separated by commas
    landing: str = ""  # LANDING: when emulated async copies land: early, late, random
    schedule: str = ""  # SCHEDULE: order in which emulated warps run
    seed: int = 0  # SEED: of the emulator's random policies
    target: str = "sm_80"  # TARGET: what CPU arrays are compiled for
    ptxas: str = ""  # PTXAS: path of an assembler to use instead of the bundled one
    mlir: str = ""  # MLIR: another provider of MLIR's bindings (read by ir.mlir at import)
    sync: bool = False  # SYNC=1: wait after each launch, so that an error names its kernel
    wgmma: bool = True  # WGMMA=0: dots of sm_90a on mma.sync only, to compare the two
    tma: bool = True  # TMA=0: copies of sm_90a by cp.async only, to compare the two
    pdl: bool = True  # PDL=0: no kernel starts before the one ahead has ended, to compare
    specialize: bool = True  # SPECIALIZE=0: no producer warps on sm_90a, to compare the two
    check_passes: bool = False  # CHECK_PASSES=1: run the program after every pass and compare

    def code_key(self) -> str:
        """The switches that decide what PTX a specialisation becomes, as text."""
        return f"wgmma {self.wgmma}\ntma {self.tma}\nspecialize {self.specialize}\npdl {self.pdl}"


class OptionError(ValueError):
    """An environment variable has a value that makes no sense."""


def read(environ: Mapping[str, str] | None = None) -> Options:
    """The settings in `environ` (default: the process's); OptionError for a malformed value."""
    env = os.environ if environ is None else environ
    values: dict[str, object] = {}
    for field in fields(Options):
        variable = "MINITRITON_" + field.name.upper()
        text = env.get(variable)
        if text is not None:
            values[field.name] = _convert(variable, text, field.default)
    return Options(**values)  # type: ignore[arg-type]  # _convert keeps each default's type


def _convert(variable: str, text: str, default: object) -> object:
    text = text.strip()
    if isinstance(default, bool):
        return text.lower() not in _FALSE
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            raise OptionError(f"{variable} must be an integer, not {text!r}") from None
    return text or default
