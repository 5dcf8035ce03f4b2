"""PTX to cubin through ptxas, or nvJitLink in this process; cubin to SASS through nvdisasm.

Nothing depends on a toolkit on PATH: ptxas comes with the wheel nvidia-cuda-nvcc. nvJitLink carries
the same assembler, but it compiles for linking: kernels take up to half as many registers again,
and setmaxnreg has no effect. So it only stands in where there is no ptxas, or where that spills to
make room for another CTA.
Versions before 13.3 are refused: they miscompile register-operand wgmma and other Hopper code.
A ptxas named by the user (MINITRITON_PTXAS) takes their place, at the user's own risk.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from dataclasses import dataclass

from minitriton.ir.diagnostics import MiniTritonError

MINIMUM = (13, 3)
# (first bad, first good, what goes wrong): shown by `doctor`
KNOWN_BAD = (
    ((12, 8), (13, 1), "wrong results in some sm_90a kernels (delta-rule backward)"),
    ((12, 0), (13, 3), "register-operand wgmma reads registers that were reused too early"),
)
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ERROR = re.compile(r"line (\d+);\s*(?:error|fatal)\s*:\s*(.*)")
# C75xx: what the assembler does to wgmma and setmaxnreg, in lines that it calls info
_NOTABLE = re.compile(r"warning|Potential Performance Loss|\(C75\d\d\)")
_RELEASE = re.compile(r"release [\d.]+, V([\d.]+)")


class AssemblerError(MiniTritonError):
    """The assembler is missing or too old, or refused the PTX (then `line` counts from 1)."""

    def __init__(self, message: str, line: int | None = None, log: str = "") -> None:
        self.line, self.log = line, log
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A cubin, and what the assembler said about its entry function (sizes in bytes)."""

    cubin: bytes
    registers: int  # per thread
    spill_stores: int
    spill_loads: int
    stack: int
    static_shared: int
    warnings: tuple[str, ...]


def version(ptxas: str = "") -> str:
    """Name and version of the assembler in use, for cache keys; loads no library if it can."""
    if ptxas:
        return "ptxas " + _ptxas_version(ptxas)
    from importlib import metadata  # takes 20 ms to import

    try:
        found = "nvjitlink " + metadata.version("nvidia-nvjitlink")
        return found + (" and ptxas" if bundled_ptxas() else "")
    except metadata.PackageNotFoundError:
        return "nvjitlink " + ".".join(map(str, loaded_version()))


@functools.cache
def bundled_ptxas() -> str:
    """Path of the ptxas that the wheel nvidia-cuda-nvcc installed; "" without one (new enough)."""
    import importlib.util
    from importlib import metadata

    try:
        release = metadata.version("nvidia-cuda-nvcc").split(".")
        spec = importlib.util.find_spec("nvidia")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    if spec is None or tuple(map(int, release[:2])) < MINIMUM:
        return ""
    for folder in spec.submodule_search_locations or ():
        path = os.path.join(folder, f"cu{release[0]}", "bin", "ptxas")
        if os.path.isfile(path):
            return path
    return ""


def shares_registers(ptxas: str = "") -> bool:
    """Whether setmaxnreg has an effect in what `assemble` makes."""
    return bool(ptxas or bundled_ptxas())


def loaded_version() -> tuple[int, int]:
    """(major, minor) of the nvJitLink library that really gets loaded."""
    try:
        from cuda.bindings import nvjitlink

        major, minor = nvjitlink.version()
    except Exception as error:  # the loader raises several unrelated types
        raise AssemblerError(
            f"nvJitLink could not be loaded ({error}); install it with: "
            "pip install 'nvidia-nvjitlink>=13.3' cuda-bindings"
        ) from error
    return int(major), int(minor)


def known_problem(release: tuple[int, int]) -> str:
    """What is wrong with this assembler release, or ""."""
    for first, fixed, problem in KNOWN_BAD:
        if first <= release < fixed:
            return f"{problem}; fixed in {fixed[0]}.{fixed[1]}"
    return ""


def assemble(
    ptx: str, arch: str, entry: str, *, ptxas: str = "", line_info: bool = True
) -> Assembled:
    """Assemble `ptx` for `arch` (such as "sm_90a") and report on the function `entry`.

    Raises AssemblerError naming the PTX line if it is refused. Same input, same bytes.
    """
    flags = [f"-arch={arch}", "-O3"] + (["-lineinfo"] if line_info else [])
    linking = [*flags, "-Xptxas=-v", "-Xptxas=-warn-spills"]
    used = ptxas or bundled_ptxas()
    if not used:
        return _report(*_run_nvjitlink(ptx, linking), entry)
    done = _report(*_run_ptxas(used, ptx, [*flags, "-v", "-warn-spills"]), entry)
    if done.spill_stores and not ptxas and "setmaxnreg" not in ptx:
        other = _report(*_run_nvjitlink(ptx, linking), entry)
        return done if other.spill_stores else other
    return done


def _run_nvjitlink(ptx: str, flags: list[str]) -> tuple[bytes, str]:
    release = loaded_version()
    if release < MINIMUM:
        raise AssemblerError(
            f"nvJitLink {release[0]}.{release[1]} is too old: {known_problem(release)}. Install "
            "'nvidia-nvjitlink>=13.3', or name a newer ptxas with MINITRITON_PTXAS=/path/to/ptxas"
        )
    from cuda.bindings import nvjitlink

    handle = None
    try:
        handle = nvjitlink.create(len(flags), flags)
        data = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), "kernel.ptx")
        nvjitlink.complete(handle)
        size = nvjitlink.get_linked_cubin_size(handle)
        cubin = bytearray(size)
        nvjitlink.get_linked_cubin(handle, cubin)
        return bytes(cubin), _log(nvjitlink, handle, "info")
    except nvjitlink.nvJitLinkError as error:
        log = _log(nvjitlink, handle, "error") if handle is not None else ""
        raise _refused(ptx, log or str(error), flags) from error
    finally:
        if handle is not None:
            nvjitlink.destroy(handle)


def _log(nvjitlink: object, handle: int, which: str) -> str:
    size = getattr(nvjitlink, f"get_{which}_log_size")(handle)
    if not size:
        return ""
    buffer = bytearray(size)
    getattr(nvjitlink, f"get_{which}_log")(handle, buffer)
    return buffer.rstrip(b"\0").decode(errors="replace")


def _run_ptxas(path: str, ptx: str, flags: list[str]) -> tuple[bytes, str]:
    import subprocess

    with tempfile.TemporaryDirectory(prefix="minitriton-") as folder:
        source, target = os.path.join(folder, "kernel.ptx"), os.path.join(folder, "kernel.cubin")
        with open(source, "w", encoding="utf-8") as file:
            file.write(ptx)
        try:
            done = subprocess.run(
                [path, *flags, source, "-o", target], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise AssemblerError(f"the assembler {path} cannot be run: {error}") from error
        log = (done.stdout + done.stderr).replace(source, "kernel.ptx")
        if done.returncode != 0:
            raise _refused(ptx, log, flags)
        with open(target, "rb") as file:
            return file.read(), log


def _refused(ptx: str, log: str, flags: list[str]) -> AssemblerError:
    """The error for a refused program, with the PTX line that the log names."""
    found = _ERROR.search(log)
    if found is None:
        detail = log.strip() or "no reason given"
        return AssemblerError(f"the assembler failed ({' '.join(flags)}): {detail}", None, log)
    number, reason = int(found[1]), found[2].strip()
    lines = ptx.splitlines()
    text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    message = f"the assembler refused line {number} of the PTX: {reason}\n  {number} | {text}"
    return AssemblerError(message, number, log)


def _report(cubin: bytes, log: str, entry: str) -> Assembled:
    registers = shared = 0
    frame = (0, 0, 0)
    current = ""
    for line in log.splitlines():
        if (
            named := re.search(r"(?:entry function|properties for) '?([\w$.]+)'?", line)
        ) is not None:
            current = named[1]
        elif current == entry:
            if found := _FRAME.search(line):
                frame = (int(found[1]), int(found[2]), int(found[3]))
            if found := _USED.search(line):
                registers = int(found[1])
                size = _SHARED.search(line)
                shared = int(size[1]) if size else 0
    warnings = tuple(text.strip() for text in log.splitlines() if _NOTABLE.search(text))
    return Assembled(cubin, registers, frame[1], frame[2], frame[0], shared, warnings)


@functools.lru_cache(maxsize=8)
def _ptxas_version(path: str) -> str:
    import subprocess

    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise AssemblerError(f"MINITRITON_PTXAS={path} cannot be run: {error}") from error
    found = _RELEASE.search(done.stdout)
    if found is None:
        raise AssemblerError(f"MINITRITON_PTXAS={path} is not a ptxas: {done.stdout[:200]!r}")
    return found[1]


def find_tool(name: str) -> str | None:
    """Path of an NVIDIA command such as nvdisasm: from its wheel, a toolkit, or PATH."""
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_binary_utility(name)
    except Exception:  # older pathfinders lack the function or do not know the tool
        found = None
    return found or shutil.which(name)


def disassemble(cubin: bytes) -> str:
    """SASS with source lines; AssemblerError if nvdisasm is not installed."""
    import subprocess

    tool = find_tool("nvdisasm")
    if tool is None:
        raise AssemblerError(
            "SASS needs nvdisasm, which is not installed: pip install 'minitriton[sass]'"
        )
    with tempfile.TemporaryDirectory(prefix="minitriton-") as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        done = subprocess.run([tool, "-c", "-g", path], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssemblerError(f"nvdisasm failed: {done.stderr.strip()}", log=done.stderr)
    return done.stdout
