"""The command line: `python -m minitriton compile | doctor | cache | run-as-triton | bench`.

compile FILE:KERNEL shows or writes a kernel's PTX, cubin, SASS or tile IR for any target, without a
GPU. Heavy modules are imported by the command that needs them, so `--help` is quick.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minitriton.compiled import CompiledKernel
    from minitriton.frontend.signature import ParamSpec
    from minitriton.jit import Kernel

FORMS = ("tile", "ptx", "cubin", "sass")


class UsageError(Exception):
    """The command line makes no sense; the message says what would."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minitriton",
        description="Compile Triton kernels in pure Python; look after the cache.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("compile", help="compile one kernel and show or write its forms")
    make.add_argument(
        "kernel", metavar="FILE:KERNEL", help="a Python file and a jit function in it"
    )
    make.add_argument("--target", default="", help="architecture such as sm_90a")
    make.add_argument(
        "--signature",
        default="",
        metavar="TYPES",
        help="one per parameter: '*fp32' (':16' if aligned), 'i32', a value for constexprs",
    )
    make.add_argument(
        "--constexpr",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="values of constexpr parameters; may be repeated",
    )
    make.add_argument("--num-warps", type=int, default=4)
    make.add_argument("--num-stages", type=int, default=3)
    make.add_argument("--emit", choices=[*FORMS, "all"], default="ptx")
    make.add_argument("-o", "--output", metavar="DIR", help="write files instead of printing")
    commands.add_parser("doctor", help="versions and paths of every native piece, GPUs, cache")
    cache = commands.add_parser("cache", help="the cache of compiled kernels on disk")
    cache.add_argument("action", choices=["info", "clear", "verify"])
    run = commands.add_parser(
        "run-as-triton", help="run a Python program whose `import triton` means MiniTriton"
    )
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module's name")
    run.add_argument("program", metavar="PROGRAM", help="a Python file")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    _add_bench(commands)
    return parser


def _add_bench(commands: Any) -> None:
    from minitriton.bench import command

    help_text = "kernels beside Triton and torch against the roofline of this machine"
    command.add_arguments(commands.add_parser("bench", help=help_text, description=help_text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for a failure, 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    from minitriton.ir.diagnostics import MiniTritonError

    try:
        actions = {
            "compile": _compile,
            "doctor": _doctor,
            "cache": _cache,
            "run-as-triton": _run_as_triton,
            "bench": _bench,
        }
        return actions[options.command](options)
    except UsageError as error:
        print(f"minitriton: {error}", file=sys.stderr)
        return 2
    except MiniTritonError as error:
        print(error, file=sys.stderr)
        return 1


def _compile(options: argparse.Namespace) -> int:
    from minitriton import options as settings
    from minitriton.compiler import compile_kernel
    from minitriton.frontend.signature import Specialization
    from minitriton.ir.target import Target
    from minitriton.specialize import check_options

    kernel = _load(options.kernel)
    params = _signature(kernel, options.signature, options.constexpr)
    given = {"num_warps": options.num_warps, "num_stages": options.num_stages}
    checked = check_options(kernel.name, given)
    spec = Specialization(tuple(params), checked["num_warps"], checked["num_stages"])
    target = Target.parse(options.target or settings.read().target)
    compiled = compile_kernel(kernel.source, spec, target)
    forms = FORMS if options.emit == "all" else (options.emit,)
    if options.output:
        _write(compiled, forms, Path(options.output))
        return 0
    if "cubin" in forms and options.emit == "cubin":
        raise UsageError("a cubin is binary: name a folder with -o DIR")
    for form in forms:
        if form != "cubin":
            _show(form, compiled.asm[form], titled=len(forms) > 1)
    return 0


def _show(form: str, text: str, *, titled: bool) -> None:
    if titled:
        print(f"// ---- {form} ----")
    print(text.rstrip())


def _write(compiled: CompiledKernel, forms: Sequence[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for form in forms:
        path = folder / f"{compiled.name}.{'mlir' if form == 'tile' else form}"
        made = compiled.asm[form]
        path.write_bytes(made.encode() if isinstance(made, str) else made)
        print(path)


def _load(place: str) -> Kernel:
    """The Kernel that FILE:KERNEL names."""
    import importlib.util

    from minitriton.jit import Kernel

    file, colon, name = place.rpartition(":")
    if not colon or not Path(file).is_file():
        raise UsageError(f"expected FILE:KERNEL with an existing file, got {place!r}")
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    found = getattr(found, "kernel", found)  # under autotune or heuristics
    if not isinstance(found, Kernel):
        known = [n for n, v in vars(module).items() if isinstance(getattr(v, "kernel", v), Kernel)]
        raise UsageError(f"{file} has no kernel {name!r}; it has: {', '.join(known) or 'none'}")
    return found


def _signature(kernel: Kernel, types: str, constexprs: Sequence[str]) -> list[ParamSpec]:
    """ParamSpecs from the command line, in the kernel's order."""
    import inspect

    from minitriton.frontend.signature import ParamSpec

    fixed: dict[str, Any] = {}
    for text in constexprs:
        name, equals, value = text.partition("=")
        if not equals or name not in kernel.arg_names:
            known = ", ".join(kernel.arg_names)
            raise UsageError(f"--constexpr takes NAME=VALUE with NAME of: {known}; got {text!r}")
        fixed[name] = _value(value)
    parts = [part.strip() for part in types.split(",")] if types.strip() else []
    defaults = {p.name: p.default for p in kernel.signature.parameters.values()}
    for parameter in kernel.parameters:
        default = defaults[parameter.name]
        missing = len(parts) + len(fixed) < len(kernel.arg_names)
        has_default = default is not inspect.Parameter.empty
        if parameter.is_constexpr and has_default and missing:
            fixed.setdefault(parameter.name, default)
    names = [name for name in kernel.arg_names if name not in fixed]
    if len(parts) != len(names):
        raise UsageError(
            f"--signature needs {len(names)} types, for {', '.join(names)}; got {len(parts)}. "
            f"The kernel is {kernel.name}{kernel.signature}"
        )
    typed = dict(zip(names, parts, strict=True))
    return [
        ParamSpec(name, "constexpr", value=fixed[name])
        if name in fixed
        else _param(name, typed[name], next(p for p in kernel.parameters if p.name == name))
        for name in kernel.arg_names
    ]


def _param(name: str, text: str, parameter: Any) -> ParamSpec:
    from minitriton.frontend.signature import ParamSpec
    from minitriton.ir import dtypes

    type_name, _, hint = text.partition(":")
    try:
        parsed = None if parameter.is_constexpr else dtypes.parse(type_name)
    except ValueError:
        parsed = None
    if parsed is None:
        return ParamSpec(name, "constexpr", value=_value(text))
    divisible = hint == "16"
    if hint not in ("", "16", "1"):
        raise UsageError(f"parameter '{name}': only ':16' may follow a type, got {text!r}")
    if isinstance(parsed, dtypes.pointer_type):
        return ParamSpec(name, "pointer", parsed.element_ty.name, None, divisible, parsed.const)
    return ParamSpec(name, "scalar", parsed.name, None, divisible)


def _value(text: str) -> Any:
    """A constexpr's value: a Python literal, a type's name, or else the text itself."""
    from minitriton.ir import dtypes

    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return dtypes.BY_NAME.get(text.removeprefix("tl."), text)


def _doctor(_: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from minitriton.doctor import examine

    found = examine()
    table = Table("", "piece", "found", show_edge=False, box=None)
    table.columns[2].overflow = "fold"
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]BAD[/]"}
    for finding in found:
        table.add_row(marks[finding.state], escape(finding.topic), escape(finding.text))
    Console().print(table)
    return 1 if any(finding.state == "bad" for finding in found) else 0


def _cache(options: argparse.Namespace) -> int:
    from minitriton.compiler import disk_cache

    store = disk_cache()
    if store.root is None:
        print("the cache keeps nothing on disk")
        return 0
    match options.action:
        case "info":
            sizes = [path.stat().st_size for path in store.entries()]
            limit = store.limit_bytes / 1e6
            print(f"{store.root}: {len(sizes)} entries, {sum(sizes) / 1e6:.1f} of {limit:.0f} MB")
        case "clear":
            print(f"removed {store.clear()} entries from {store.root}")
        case "verify":
            good, bad = store.verify()
            for path in bad:
                print(f"broken: {path}")
            print(f"{good} good, {len(bad)} broken")
            return 1 if bad else 0
    return 0


def _run_as_triton(options: argparse.Namespace) -> int:
    """As `python PROGRAM ...` would, which also means that its errors keep their tracebacks."""
    import runpy
    import traceback

    from minitriton import as_triton
    from minitriton.ir.diagnostics import MiniTritonError

    if not options.module and not Path(options.program).is_file():
        raise UsageError(f"there is no file {options.program!r}")
    as_triton.install()
    sys.argv = [options.program, *options.arguments]
    try:
        if options.module:
            runpy.run_module(options.program, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.program).resolve().parent)
            runpy.run_path(options.program, run_name="__main__")
    except MiniTritonError:
        traceback.print_exc()
        return 1
    return 0


def _bench(options: argparse.Namespace) -> int:
    from minitriton.bench import command

    try:
        return command.run(options)
    except command.BenchUsage as error:
        raise UsageError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
