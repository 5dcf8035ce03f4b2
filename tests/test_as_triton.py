"""`minitriton.as_triton`: packages that import triton get MiniTriton. Each test has a process."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"  # saves seconds, and has to work
INSTALL = "from minitriton import as_triton; as_triton.install()"

# A package as there are many: it knows Triton only.
KERNELS = """
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda.libdevice import rsqrt
from triton.language.math import exp2
from thirdparty.tuning import tuned


@triton.jit
def columns(n):
    return tl.cdiv(n, triton.cdiv(32, 16))


@tuned(configs=[triton.Config({"BLOCK": 64}, num_warps=2)], key=["n"])
@triton.heuristics({"HALF": lambda args: triton.cdiv(args["n"], 2)})
@triton.jit
def kernel(x_ptr, y_ptr, n, HALF: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, triton.next_power_of_2(BLOCK - 1))
    x = tl.load(x_ptr + i, mask=i < n, other=1.0)
    y = exp2(x) + libdevice.pow(rsqrt(x), 2.0) + triton.language.exp(x) * (columns(n) == HALF)
    tl.store(y_ptr + i, y.to(triton.language.float32), mask=i < n)
"""
TUNING = """
import triton
import triton.runtime.driver as driver
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner, OutOfResources
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import JITFunction, KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

assert tuple(map(int, triton.__version__.split("."))) >= (3, 5, 1)
TARGET = triton.runtime.driver.active.get_current_target()
assert isinstance(TARGET, GPUTarget)
PROCESSORS = driver.active.utils.get_device_properties(0)["multiprocessor_count"]


class Manager(FileCacheManager):
    pass


class Tuned(Autotuner):
    runs = 0

    def run(self, *args, **kwargs):
        self.runs += 1
        return super().run(*args, **kwargs)


def tuned(configs, key):
    return lambda fn: Tuned(fn, fn.arg_names, configs, key, None, None)
"""
OPTIONAL = """
from importlib.util import find_spec

try:
    from triton.experimental import gluon
except ImportError:
    gluon = None
HAS_GLUON = find_spec("triton.experimental") is not None or gluon is not None
HAS_LANGUAGE = find_spec("triton.language.core") is not None
"""
PROGRAM = """
import numpy as np
import triton
from thirdparty import kernels, optional, tuning

x = np.random.default_rng().uniform(0.5, 2, 50).astype(np.float32)
y = np.empty_like(x)
compiled = kernels.kernel[(1,)](x, y, x.size)
np.testing.assert_allclose(y, np.exp2(x) + 1 / x + np.exp(x), rtol=1e-5)
assert isinstance(compiled, tuning.CompiledKernel) and compiled.num_warps == 2
assert kernels.kernel.runs == 1 and isinstance(kernels.columns, tuning.JITFunction)
assert isinstance(kernels.kernel, triton.KernelInterface) and tuning.PROCESSORS >= 1
assert optional.HAS_LANGUAGE and not optional.HAS_GLUON
print("ran", *sys.argv[1:])
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package, a program for it, and another that stands for Triton's."""
    texts = {
        "thirdparty/__init__.py": "",
        "thirdparty/kernels.py": KERNELS,
        "thirdparty/tuning.py": TUNING,
        "thirdparty/optional.py": OPTIONAL,
        "program.py": "import sys\n" + PROGRAM,
        "other/triton/__init__.py": "__version__ = '9.9.9'\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("MINITRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def run(*lines: str) -> str:
    """The output of a program of these pieces; its errors are this test's."""
    program = "\n".join(textwrap.dedent(line) for line in lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m minitriton run-as-triton`, which finds torch where there is one."""
    line = [sys.executable, "-m", "minitriton", "run-as-triton", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True)


def test_a_package_runs_as_it_is(package: Path) -> None:
    assert run(WITHOUT_TORCH, INSTALL, PROGRAM) == "ran\n"


def test_every_name_is_there(package: Path) -> None:
    run(
        WITHOUT_TORCH,
        INSTALL,
        """
        import importlib, inspect, minitriton, triton
        for name, names in as_triton._NAMES.items():
            module = importlib.import_module(name)
            assert module.__all__ == sorted(names) and module.__name__ == name
            for item in names:
                getattr(module, item)
                assert item in dir(module)
        assert set(triton.__all__) == set(minitriton.__all__) and inspect.ismodule(triton)
        from triton import *
        assert jit is minitriton.jit and autotune is minitriton.autotune
        """,
    )


def test_modules_of_ours_are_the_same_ones(package: Path) -> None:
    run(
        WITHOUT_TORCH,
        INSTALL,
        """
        import minitriton, triton
        as_triton.install()
        # as attributes, without an import of their own
        assert triton.runtime.driver.active is minitriton.runtime.driver.active
        assert triton.compiler.compiler.CompiledKernel is minitriton.CompiledKernel
        assert triton.language.extra.cuda.libdevice.pow is minitriton.language.extra.libdevice.pow
        assert triton.knobs is minitriton.knobs and triton.testing is minitriton.testing
        import triton.language as tl, triton.language.core as core
        from triton.runtime.errors import OutOfResources
        assert tl is minitriton.language and core is tl.core
        assert OutOfResources is minitriton.OutOfResources
        assert tl.__spec__.name == tl.__name__ == "minitriton.language"
        # versions, and what packages put into the module
        assert triton.__version__ == as_triton.VERSION == "3.6.0" != minitriton.__version__
        triton.autotune = None
        assert minitriton.autotune is not None
        """,
    )


def test_what_is_missing_says_so(package: Path) -> None:
    run(
        WITHOUT_TORCH,
        INSTALL,
        """
        import importlib
        from importlib.util import find_spec
        for name in ("triton._C", "triton.experimental.gluon", "triton.language.extra.cann",
                     "triton.kernels", "triton.compiler.code_generator", "triton.languages"):
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                assert name.startswith(error.name) and error.name != "triton"
                assert repr(error.name) in str(error) and "is MiniTriton here" in str(error)
            else:
                raise AssertionError(name)
        assert find_spec("triton.experimental") is None and find_spec("triton.jit") is None
        import triton
        from triton.runtime import cache
        try:
            triton.compile
        except AttributeError as error:
            assert "module 'triton', which is MiniTriton's, has no 'compile'" in str(error)
        else:
            raise AssertionError
        try:
            from triton.runtime.jit import MockTensor
        except ImportError as error:
            assert "minitriton" in str(error)
        else:
            raise AssertionError
        try:
            cache.FileCacheManager("key")
        except as_triton.AliasError as error:
            assert "MINITRITON_CACHE_DIR" in str(error)
        else:
            raise AssertionError
        """,
    )


def test_triton_must_not_be_imported_yet(package: Path) -> None:
    text = run(
        WITHOUT_TORCH,
        f"sys.path.insert(0, {str(package / 'other')!r})",
        """
        import triton
        from minitriton import as_triton, MiniTritonError
        try:
            as_triton.install()
        except MiniTritonError as error:
            print(type(error).__name__, error)
        assert triton.__version__ == "9.9.9" and sys.modules["triton"] is triton
        """,
    )
    assert text.startswith("AliasError Triton has already been imported, from ")
    assert str(package / "other") in text and "help: call minitriton.as_triton.install()" in text


def test_torch_is_told_that_there_is_none(package: Path) -> None:
    """It would generate code for it; but what it imports from it unasked has to be there."""
    run(
        f"import sys; sys.path.insert(0, {str(package / 'other')!r})",
        "from torch.utils._triton import has_triton, has_triton_package",
        INSTALL,
        """
        import torch, triton
        from torch._inductor.runtime import triton_compat
        from torch.utils.flop_counter import FlopCounterMode
        assert not has_triton_package() and not has_triton()
        assert triton_compat.CompiledKernel is triton.compiler.CompiledKernel
        assert triton_compat.triton_key() == triton_compat.triton_key()
        as_triton.uninstall()
        as_triton.uninstall()
        import triton as real
        assert real.__version__ == "9.9.9" and has_triton_package()
        assert not any(name.startswith("triton.") for name in sys.modules)
        """,
    )


def test_on_the_command_line(package: Path) -> None:
    done = command(package / "program.py", "-m", "--help")
    assert (done.returncode, done.stdout) == (0, "ran -m --help\n"), done.stderr
    (package / "thirdparty" / "__main__.py").write_text(
        "import sys, triton\nsys.exit(f'{triton.__version__} {sys.argv[1:]} {__name__}')\n"
    )
    done = command("-m", "thirdparty", "x")
    assert (done.returncode, done.stderr) == (1, "3.6.0 ['x'] __main__\n")


def test_errors_on_the_command_line(package: Path) -> None:
    done = command("nowhere.py")
    assert done.returncode == 2 and "there is no file 'nowhere.py'" in done.stderr
    wrong = "import thirdparty.kernels as k\nk.columns[(1,)](undefined=3)\n"
    (package / "wrong.py").write_text(wrong)
    done = command(package / "wrong.py")
    assert done.returncode == 1 and f'File "{package / "wrong.py"}", line 2' in done.stderr


def test_the_documentations_examples(package: Path) -> None:
    text = (ROOT / "docs" / "as_triton.md").read_text()
    program, call = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (package / "documented.py").write_text(program)
    done = command(package / "documented.py")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.removeprefix("max error")) == 0.0
    run(WITHOUT_TORCH, call)
