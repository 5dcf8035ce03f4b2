"""MiniTriton under Triton's name, for packages that say `import triton` and are left as they are.

    from minitriton import as_triton

    as_triton.install()  # before anything imports triton
    import liger_kernel.transformers  # its kernels are MiniTriton's

The modules are our own (`triton.language` is `minitriton.language`), or, where Triton has names in
another place, objects that find them there. Triton's compiler stages, Gluon and `triton._C` are
not among them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import pkgutil
import sys
import types
from collections.abc import Sequence
from typing import Any

import minitriton
from minitriton.ir.diagnostics import MiniTritonError

VERSION = "3.6.0"  # of the Triton whose names and signatures we follow

# modules that are ours, with all that is in them
_SHARED = ("errors", "knobs", "language", "testing", "tools", "runtime.errors")
_TUNING = {
    "Autotuner": "minitriton.autotune:Autotuner",
    "Config": "minitriton.autotune:Config",
    "Heuristics": "minitriton.autotune:Heuristics",
    "OutOfResources": "minitriton.runtime.errors:OutOfResources",
    "autotune": "minitriton.autotune:autotune",
    "heuristics": "minitriton.autotune:heuristics",
}
_KERNELS = {
    "JITFunction": "minitriton.jit:JITFunction",
    "KernelInterface": "minitriton.kernel_interface:KernelInterface",
    "TensorWrapper": "minitriton.runtime.arguments:TensorWrapper",
    "reinterpret": "minitriton.runtime.arguments:reinterpret",
}
# modules of Triton's that we have otherwise: name -> where the object is, as "module:attribute"
_NAMES: dict[str, dict[str, str]] = {
    "triton": {name: f"minitriton:{name}" for name in minitriton.__all__},
    "triton.backends": {"backends": "minitriton.as_triton:BACKENDS"},
    "triton.backends.compiler": {"GPUTarget": "minitriton.runtime.active:GPUTarget"},
    "triton.compiler": {
        "CompilationError": "minitriton.errors:CompilationError",
        "CompiledKernel": "minitriton.compiled:CompiledKernel",
    },
    "triton.compiler.compiler": {
        "CompiledKernel": "minitriton.compiled:CompiledKernel",
        "triton_key": "minitriton.fingerprint:build_id",  # where torch looks, too
    },
    "triton.compiler.errors": {"CompilationError": "minitriton.errors:CompilationError"},
    "triton.runtime": {**_TUNING, **_KERNELS},
    "triton.runtime.autotuner": {
        **_TUNING,
        "AutotunerError": "minitriton.autotune:TuningError",
        "PTXASError": "minitriton.runtime.errors:PTXASError",
    },
    "triton.runtime.cache": {
        "FileCacheManager": "minitriton.as_triton:FileCacheManager",
        "triton_key": "minitriton.fingerprint:build_id",
    },
    "triton.runtime.driver": {
        "active": "minitriton.runtime.driver:active",
        "driver": "minitriton.runtime.driver",
    },
    "triton.runtime.jit": {
        **_KERNELS,
        "T": "minitriton.kernel_interface:T",
        "constexpr_function": "minitriton:constexpr_function",
        "jit": "minitriton:jit",
    },
}

# Of Triton's compilers, by the names that torch looks for before it generates code for one: none.
BACKENDS: dict[str, Any] = {}


class AliasError(MiniTritonError):
    """Triton's name is taken, or something of Triton's was asked for that has no equivalent."""


class FileCacheManager:
    """Only a base for other packages' managers of Triton's cache; MiniTriton calls none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AliasError(
            "MiniTriton's cache takes no managers\nhelp: MINITRITON_CACHE_DIR says where it is"
        )


class _Alias(types.ModuleType):
    """A module with Triton's name; what is in it is found when first asked for."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        home = _NAMES[module].get(name)
        if home is not None:
            value = pkgutil.resolve_name(home)
        elif not name.startswith("__") and _home(f"{module}.{name}"):
            value = importlib.import_module(f"{module}.{name}")
        else:
            raise AttributeError(f"module '{module}', which is MiniTriton's, has no {name!r}")
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *_NAMES[self.__name__]})


class _Loader(importlib.abc.Loader):
    """Makes an `_Alias`, or puts our module of another name in its place."""

    def __init__(self, home: str) -> None:
        self.home = home

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return _Alias(spec.name) if self.home == spec.name else None

    def exec_module(self, module: types.ModuleType) -> None:
        if not isinstance(module, _Alias):
            sys.modules[module.__name__] = importlib.import_module(self.home)
            return
        module.__all__ = sorted(_NAMES[module.__name__])  # type: ignore[attr-defined]  # new
        if module.__name__ == "triton":
            module.__version__ = VERSION  # type: ignore[attr-defined]  # a module may have it


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `triton` and everything below it, so that no other finder is asked."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "triton":
            return None
        home = _home(fullname)
        if home is None:
            if _is_import():
                raise ModuleNotFoundError(
                    f"no module {fullname!r}: 'triton' is MiniTriton here "
                    "(minitriton.as_triton), which has none of this name",
                    name=fullname,
                )
            return None  # to importlib.util.find_spec, which asks whether there is one
        spec = importlib.machinery.ModuleSpec(
            fullname, _Loader(home), origin=minitriton.__file__, is_package=True
        )
        spec.has_location = True  # messages about missing names then say whose module it is
        return spec


_FINDER = _Finder()


def _home(name: str) -> str | None:
    """Of a module's name in Triton: itself if an `_Alias` serves it, ours, or None."""
    if name in _NAMES:
        return name
    inner = name.removeprefix("triton.")
    if not any(inner == shared or inner.startswith(shared + ".") for shared in _SHARED):
        return None
    try:
        found = importlib.util.find_spec(f"minitriton.{inner}") is not None
    except ModuleNotFoundError:  # of the module above it
        found = False
    return f"minitriton.{inner}" if found else None


def _is_import() -> bool:
    """Whether the finder is asked by an import statement."""
    caller = sys._getframe(3) if hasattr(sys, "_getframe") else None
    return caller is not None and caller.f_code.co_name == "_find_and_load_unlocked"


def install() -> None:
    """Have `import triton` mean MiniTriton in this process; a second call changes nothing.

    Imports torch if there is one, and has it believe that there is no Triton: it would compile
    generated code with it. AliasError if Triton has already been imported.
    """
    if _FINDER in sys.meta_path:
        return
    taken = [name for name in sys.modules if name == "triton" or name.startswith("triton.")]
    if any(sys.modules[name] is not None for name in taken):
        place = getattr(sys.modules.get("triton"), "__file__", None) or "an unknown place"
        raise AliasError(
            f"Triton has already been imported, from {place}\n"
            "help: call minitriton.as_triton.install() before anything that imports triton, or run "
            "the program with 'python -m minitriton run-as-triton'"
        )
    try:
        _hide_from_torch()
    finally:
        _forget_modules()
    sys.meta_path.insert(0, _FINDER)


def uninstall() -> None:
    """Have `import triton` mean Triton again. Modules imported meanwhile keep what they have."""
    if _FINDER not in sys.meta_path:
        return
    sys.meta_path.remove(_FINDER)
    _forget_modules()
    _forget_answers()


def _forget_modules() -> None:
    for name in [n for n in sys.modules if n == "triton" or n.startswith("triton.")]:
        del sys.modules[name]


def _hide_from_torch() -> None:
    """Ask torch whether there is Triton while there is none: it remembers the answer."""
    if importlib.util.find_spec("torch") is None:
        return
    sys.modules["triton"] = None  # type: ignore[assignment]  # Python's way to forbid an import
    importlib.import_module("torch.utils._triton")
    _forget_answers()
    for question in _questions():
        question()


def _forget_answers() -> None:
    for question in _questions():
        question.cache_clear()


def _questions() -> list[Any]:
    """torch's functions that say what of Triton there is, as far as torch has been imported."""
    module = sys.modules.get("torch.utils._triton")
    names = vars(module) if module is not None else {}
    return [
        value
        for name, value in names.items()
        if name.startswith("has_") and hasattr(value, "cache_clear")
    ]
