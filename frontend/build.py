"""From a kernel's source and a specialisation to tile IR: `build_module`."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator
from typing import Any

from minitriton.frontend import active, calls, expressions, statements
from minitriton.frontend.block_values import Number, TensorDescriptor
from minitriton.frontend.emitter import Emitter
from minitriton.frontend.errors import KernelReturns, Mistake, kind_of
from minitriton.frontend.frame import Frame, Returned, Session
from minitriton.frontend.names import resolve
from minitriton.frontend.signature import Blocks, ParamSpec, Specialization
from minitriton.frontend.source import SourceFunction
from minitriton.frontend.values import Tensor, unwrap
from minitriton.ir import dtypes
from minitriton.ir.builder import Builder
from minitriton.ir.diagnostics import InternalError, MiniTritonError
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.types import to_mlir

DIVISIBILITY = 16  # what a specialised argument is known to be a multiple of


def build_module(source: SourceFunction, spec: Specialization, target: Target) -> ir.Module:
    """The tile IR of a kernel; needs an entered context. A user's mistake raises CompileError.

    The module holds one `func.func` named like the kernel, device functions inlined, constexpr
    parameters folded, and the launch options as `mt.*` attributes.
    """
    module = ir.Module.create(loc=ir.Location.unknown())
    _describe(module, source, spec, target)
    leaves = spec.runtime_params()
    types_ = [_type_of(leaf) for leaf in leaves]
    builder = Builder(ir.InsertionPoint(module.body))
    emitter = Emitter(builder, target, dict(spec.options), spec.num_warps)
    session = Session(
        emitter,
        {**expressions.RULES, **calls.RULES},
        statements.RULES,
        statements.execute,
        resolve,
    )
    frame = Frame(session, source)
    session.frames.append(frame)
    emitter.call = functools.partial(_call, session)
    emitter.place = functools.partial(_place, session)
    builder.loc = frame.location(source.node)
    function = _function(emitter, source.name, leaves, types_)
    block = function.regions[0].blocks.append(
        *[to_mlir(t) for t in types_], arg_locs=[builder.loc] * len(types_)
    )
    arguments = iter(Tensor(a, t) for a, t in zip(block.arguments, types_, strict=True))
    with active.activate(emitter), builder.at(ir.InsertionPoint(block)):
        for parameter in spec.params:
            frame.bind(
                parameter.name, _value_of(parameter, arguments), _parameter_node(source, parameter)
            )
        _body(frame)
        frame.mark(source.node)
        emitter.effect("func.return")
    if emitter.makes_pointers:
        module.operation.attributes["mt.makes_pointers"] = emitter.unit()
    return module


def _body(frame: Frame) -> None:
    source = frame.source
    try:
        flow = frame.execute(source.node.body)
    except MiniTritonError:
        raise
    except Mistake as mistake:
        raise frame.located(mistake, frame.node) from None
    except RecursionError:
        raise InternalError("frontend", f"'{source.name}' nests too deeply") from None
    except Exception as error:
        span = frame.session.frames[-1].span(frame.session.frames[-1].node)
        reason = f"{type(error).__name__}: {error} (at {span.file}:{span.line})"
        raise InternalError("frontend", reason) from error
    if isinstance(flow, Returned) and flow.value is not None:
        raise frame.located(KernelReturns(kind_of(flow.value)), frame.node)


def _describe(
    module: ir.Module, source: SourceFunction, spec: Specialization, target: Target
) -> None:
    i32 = ir.IntegerType.get_signless(32)
    attributes = module.operation.attributes
    numbers = {
        "mt.num_warps": spec.num_warps,
        "mt.num_stages": spec.num_stages,
        "mt.num_ctas": spec.num_ctas,
        "mt.maxnreg": spec.maxnreg,
    }
    for name, value in numbers.items():
        if value is not None:
            attributes[name] = ir.IntegerAttr.get(i32, value)
    attributes["mt.target"] = ir.StringAttr.get(target.arch)
    attributes["mt.kernel"] = ir.StringAttr.get(source.name)


def _function(
    emitter: Emitter, name: str, leaves: tuple[ParamSpec, ...], types_: list[dtypes.AnyType]
) -> ir.Operation:
    descriptions = []
    for leaf in leaves:
        described: dict[str, ir.Attribute] = {"mt.name": emitter.string(leaf.name)}
        known = DIVISIBILITY if leaf.divisible else leaf.multiple
        if known > 1:
            described["mt.divisibility"] = emitter.i64(known)
        descriptions.append(ir.DictAttr.get(described))
    signature = ir.FunctionType.get([to_mlir(t) for t in types_], [])
    attributes = {
        "sym_name": emitter.string(name),
        "function_type": ir.TypeAttr.get(signature),
        "arg_attrs": ir.ArrayAttr.get(descriptions),
        "mt.kernel": emitter.unit(),
    }
    return emitter.builder.create("func.func", [], [], attributes, 1)


def _type_of(leaf: ParamSpec) -> dtypes.AnyType:
    element = dtypes.BY_NAME[leaf.dtype]
    return dtypes.pointer_type(element, const=leaf.const) if leaf.kind == "pointer" else element


def _value_of(parameter: ParamSpec, arguments: Iterator[Tensor]) -> Any:
    match parameter.kind:
        case "constexpr":
            return unwrap(parameter.value)
        case "tuple":
            items = [_value_of(part, arguments) for part in parameter.value]
            if not parameter.dtype:
                return tuple(items)
            fields = [part.name.rsplit(".", 1)[-1] for part in parameter.value]
            return collections.namedtuple(parameter.dtype.rsplit(".", 1)[-1], fields)(*items)
        case "descriptor":
            return _descriptor(parameter.value, arguments)
    return next(arguments)


def _descriptor(blocks: Blocks, arguments: Iterator[Tensor]) -> TensorDescriptor:
    base, *rest = (next(arguments) for _ in blocks.parts)
    numbers: list[Number] = [*rest, 1]
    rank = len(blocks.block_shape)
    shape, strides = tuple(numbers[:rank]), tuple(numbers[rank:])
    return TensorDescriptor(base, shape, strides, blocks.block_shape, blocks.padding)


def _parameter_node(source: SourceFunction, parameter: ParamSpec) -> Any:
    arguments = source.node.args
    found = [
        a
        for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if a.arg == parameter.name
    ]
    return found[0] if found else source.node


def _call(session: Session, fn: Any, args: tuple[Any, ...]) -> Any:
    frame = session.frames[-1]
    return calls.apply(frame, fn, list(args), {}, frame.node)


def _place(session: Session) -> tuple[str, int, str]:
    frame = session.frames[-1]
    span = frame.span(frame.node)
    return span.file, span.line, frame.source.name
