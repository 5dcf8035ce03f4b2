"""Importing MiniTriton brings in none of the heavy libraries, and every public name is there."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "torch", "cuda", "mlir", "numba_cuda_mlir", "lark", "rich", "ml_dtypes")


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout


def test_import_brings_in_nothing_heavy() -> None:
    modules = run("import sys, minitriton; minitriton.jit; print(*sys.modules)").split()
    assert not {name.split(".")[0] for name in modules} & set(HEAVY)


def test_language_needs_no_mlir() -> None:
    modules = run("import sys, minitriton.language; print(*sys.modules)").split()
    assert not {name.split(".")[0] for name in modules} & {"torch", "mlir", "numba_cuda_mlir"}


def test_decorators_keep_their_names_whatever_is_imported_first() -> None:
    for first in ("minitriton.jit", "minitriton.autotune", "minitriton.compiler"):
        text = run(
            f"import {first}; import minitriton as t; print(callable(t.jit), callable(t.autotune))"
        )
        assert text.split() == ["True", "True"]


def test_all_public_names_exist() -> None:
    run("import minitriton\nfor name in minitriton.__all__: getattr(minitriton, name)")
    assert "no attribute 'jitt'" in run(
        "import minitriton\ntry: minitriton.jitt\nexcept AttributeError as error: print(error)"
    )
