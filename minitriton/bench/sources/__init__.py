"""The kernels which the suite compares, one text for every compiler.

The files are plain MiniTriton modules. `load` gives the same text compiled by another package that
offers Triton's language: only its two import lines name that package.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

OURS = "minitriton"


def load(name: str, package: str = OURS) -> ModuleType:
    """The kernels of sources/<name>.py, compiled by `package`; ImportError if it is not there."""
    if package == OURS:
        return importlib.import_module(f"{__name__}.{name}")
    key = f"{__name__}.{name}_{package}"
    if key not in sys.modules:
        importlib.import_module(package)
        path = Path(__file__).parent / f"{name}.py"
        text = path.read_text().replace(f"import {OURS}", f"import {package}")
        module = ModuleType(key)
        module.__file__ = str(path)
        # line numbers are those of the file, where a compiler looks for a kernel's source
        exec(compile(text, str(path), "exec"), module.__dict__)
        sys.modules[key] = module
    return sys.modules[key]
