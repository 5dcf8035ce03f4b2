"""Runs a random program in the tile interpreter and in the emulator, and compares every byte.

python tests/fuzz/harness.py 0 1000     # seeds; prints what fails, made smaller
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from generator import Program, generate
from pieces import INPUTS, OUTPUTS, PROGRAMS, SIZE

from minitriton.compiler import standard_stages
from minitriton.ir.context import use
from minitriton.ir.interpret import interpret
from minitriton.pass_check import HostCopy

WARPS = (1, 4, 8)
LANDINGS = ("late", "early")


class Mismatch(AssertionError):
    """The emulator wrote something else than the interpreter."""


def arrays_for(program: Program, seed: int) -> tuple[list[np.ndarray], int]:
    """Arguments of a program's kernel: inputs, outputs, atomics; and its number `n`."""
    rng = np.random.default_rng(seed)
    arrays = []
    for name in INPUTS:
        if name.startswith("float"):
            arrays.append(rng.integers(-7, 8, SIZE).astype(name))
        else:
            info = np.iinfo(name)
            data = rng.integers(info.min, info.max, SIZE, dtype=name, endpoint=True)
            small = rng.integers(0, 100, SIZE).astype(name)
            arrays.append(np.where(rng.random(SIZE) < 0.5, data, small).astype(name))
    arrays += [np.full(max(program.stored[t], 1), 99, t) for t in OUTPUTS]
    arrays.append(rng.integers(-1000, 1000, max(program.atomics, 1), dtype=np.int32))
    return arrays, int(rng.integers(1, 120))


def kernel_of(program: Program, folder: Path) -> Any:
    """The kernel, from a module file as any other."""
    path = folder / f"program_{abs(hash(program.source))}.py"
    path.write_text(program.source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


@contextmanager
def settings(**values: str) -> Iterator[None]:
    """MINITRITON_* variables for a while."""
    names = {"MINITRITON_" + name.upper(): value for name, value in values.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def expected(compiled: Any, arrays: list[np.ndarray], n: int) -> list[np.ndarray]:
    """What the frontend's module writes, by the tile interpreter."""
    pieces = [SimpleNamespace(address=a.ctypes.data, nbytes=a.nbytes) for a in arrays]
    order = np.argsort([p.address for p in pieces])
    memory = HostCopy([pieces[i] for i in order])
    values = [a.ctypes.data for a in arrays]
    values += [] if n == 1 else [n]  # 1 is specialised away
    with use():
        module = standard_stages().build(compiled.source, compiled.spec, compiled.target)
        interpret(module, memory, values, (PROGRAMS, 1, 1))
    found: list[Any] = [None] * len(arrays)
    for place, i in enumerate(order):
        found[i] = memory.data[place].view(arrays[i].dtype)
    return found


def check(
    program: Program,
    seed: int,
    folder: Path,
    warps: tuple[int, ...] = WARPS,
    landings: tuple[str, ...] = LANDINGS,
) -> None:
    """Mismatch, or whatever error the compiler or the emulator raises."""
    arrays, n = arrays_for(program, seed)
    kernel, wanted = kernel_of(program, folder), None
    for num_warps in warps:
        for landing in landings:
            copies = [a.copy() for a in arrays]
            with settings(landing=landing, check="all", cache="0"):
                compiled = kernel[(PROGRAMS,)](*copies, n, num_warps=num_warps)
            if wanted is None:
                wanted = expected(compiled, arrays, n)
            names = [*INPUTS, *(f"out_{t}" for t in OUTPUTS), "atomics"]
            for name, got, right in zip(names, copies, wanted, strict=True):
                wrong = np.nonzero(got != right)[0]
                if len(wrong):
                    first = wrong[0]
                    raise Mismatch(
                        f"{name}[{first}] is {got[first]}, not {right[first]} ({len(wrong)} wrong; "
                        f"{num_warps=}, {landing=}, {n=})"
                    )
            if "async" not in compiled.ptx:
                break  # nothing lands


def failure(run: Callable[[], None]) -> str:
    """What kind of failure a run ends in, "" if it is right."""
    try:
        run()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return type(error).__name__ + ("" if isinstance(error, Mismatch) else ": " + lines[0][:60])
    return ""


def shrink(program: Program, seed: int, folder: Path) -> Program:
    """The program without the lines that its failure does not need."""
    kind = failure(lambda: check(program, seed, folder))
    lines = program.source.splitlines()
    size = len(lines) // 2
    while size:
        start = len(lines) - size
        while start >= 0:
            shorter = [*lines[:start], *lines[start + size :]]
            candidate = Program("\n".join(shorter) + "\n", program.stored, program.atomics)
            if failure(lambda: check(candidate, seed, folder)) == kind:  # noqa: B023
                lines = shorter
            start -= size
        size //= 2
    return Program("\n".join(lines) + "\n", program.stored, program.atomics)


def main(first: int, last: int) -> None:
    """Tries a range of seeds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(first, last):
            try:
                check(generate(seed), seed, folder)
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                print(f"=== seed {seed}: {message[:1500]}", flush=True)
                print(shrink(generate(seed), seed, folder).source[len("import") :], flush=True)
        print(f"=== done {first} to {last}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
