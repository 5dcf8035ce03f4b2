"""Tile IR with layouts -> a `gpu.module` with one `llvm.func`, by emission.

`lower_to_gpu` walks the kernel once. Each op has a rule in a family's `RULES` table; a rule reads
its operands with `Lowering.value/tile/registers`, emits scalar operations through the `Emitter`
methods that `Lowering` inherits, and records the result with `Lowering.set`.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from minitriton.codegen import one_thread
from minitriton.codegen.emit import Emitter, attribute, type_named
from minitriton.codegen.tile import LazyRegisters, Tile, carried
from minitriton.ir.axis_analysis import AxisFacts, analyse
from minitriton.ir.builder import Builder, i32_attr
from minitriton.ir.diagnostics import InternalError
from minitriton.ir.encoding import layout_of
from minitriton.ir.linear_layout import LinearLayout
from minitriton.ir.mlir import ir
from minitriton.ir.target import Target
from minitriton.ir.tensor_map_specs import read_specs
from minitriton.ir.warp_roles import GROUP_BYTES, GROUPS, PRODUCER, producer_of

SHARED_SYMBOL = "smem"
SHARED_ALIGNMENT = 16
REGISTERS = 1 << 16  # of an SM
CONSUMER_BARRIER = 1  # its number; 0 is that of all warps
FAMILIES = (
    "elementwise", "math", "casts", "memory", "atomics", "program", "debug", "control_flow",
    "shape", "shared", "convert", "reduce", "scan", "indexed", "dot", "async_copy", "warpgroup",
    "tma", "warp_split", "cluster", "per_element", "fp4_upcast",
)  # fmt: skip
Rule = Callable[["Lowering", ir.Operation], None]
Lowered: TypeAlias = Tile | ir.Value


@dataclass(frozen=True)
class CodegenOptions:
    """Choices that change the generated code."""

    enable_fp_fusion: bool = True  # a * b + c may become one fma


@functools.cache
def rules() -> dict[str, Rule]:
    """All families' tables in one: op name -> rule."""
    merged: dict[str, Rule] = {}
    for family in FAMILIES:
        merged.update(importlib.import_module(f"minitriton.codegen.{family}").RULES)
    return merged


class Role(enum.Enum):
    """For whom code is being emitted."""

    ALL = "all warps"
    PRODUCER = "one thread of the producer warps"
    CONSUMERS = "the warps that hold tiles"


class Lowering(Emitter):
    """The state of one kernel's lowering; see the module's docstring for how rules use it."""

    def __init__(
        self,
        function: ir.Operation,
        kernel: ir.Operation,
        target: Target,
        options: CodegenOptions,
        num_warps: int,
        axis: AxisFacts,
    ) -> None:
        block = kernel.regions[0].blocks[0]
        builder = Builder(ir.InsertionPoint(block), function.location)
        # everything shared by the kernel goes before this op, which is removed at the end
        self._markers = [builder.create("llvm.mlir.poison", [ir.IntegerType.get_signless(1)])]
        super().__init__(builder, ir.InsertionPoint(self._markers[0]))
        self.function = function
        self.kernel = kernel
        self.target = target
        self.options = options
        self.num_warps = num_warps  # that hold tiles
        self.groups = 1  # of so many warps each, with programs of their own
        self.group_bytes = 0  # of shared memory that each has for itself
        self.group_id = self.int32(0)  # where there are several: of this thread's
        self.producer_warps = 0  # beside them
        self.producer: ir.Operation | None = None  # function of their own
        self.role = Role.ALL
        self.alone = False  # behind a branch that only the first thread takes
        self.grid_sizes: list[ir.Value] = []  # parameters of a persistent kernel
        self.axis = axis
        self.tensor_maps: list[dict[str, Any]] = []  # as the launcher makes them (ir)
        self.map_pointers: list[ir.Value] = []  # the parameters that hold them
        self.symbols: dict[str, str] = {}  # strings and declarations beside the kernel
        # sums that a warpgroup_dot adds to where the i1 is true; elsewhere they are zero
        self.counted_sums: dict[ir.Value, ir.Value] = {}
        self._values: dict[ir.Value, Lowered] = {}
        self._at_entry: dict[Any, ir.Value | None] = {}
        self._marker: ir.InsertionPoint | None = None
        self._lazy_only = False
        self._just_met = False  # the last op that emitted anything was a barrier
        self._rules = rules()

    # Values

    def value(self, value: ir.Value) -> Lowered:
        """What the tile-IR value became: a Tile, or one SSA value for a scalar."""
        return self._values[value]

    def tile(self, value: ir.Value) -> Tile:
        """`value` where it must be a tile."""
        found = self._values[value]
        assert isinstance(found, Tile), f"{value} is a scalar"
        return found

    def scalar(self, value: ir.Value) -> ir.Value:
        """`value` where it must be a scalar."""
        found = self._values[value]
        assert not isinstance(found, Tile), f"{value} is a tile"
        return found

    def registers(self, value: ir.Value) -> Sequence[ir.Value]:
        """Its registers; a scalar has one."""
        found = self._values[value]
        return found.registers if isinstance(found, Tile) else (found,)

    def held(self, value: ir.Value) -> list[ir.Value]:
        """Its registers that hold elements: all, unless a tile's size is no power of two."""
        found = self._values[value]
        if not isinstance(found, Tile):
            return [found]
        return [found.registers[register] for register in found.layout.registers]

    def words(self, value: ir.Value) -> list[ir.Value]:
        """The registers of a tile of f16 that hold elements, two to an i32."""
        if words := self.tile(value).words:
            return list(words)
        halves = self.held(value)
        return [self.join_bits(halves[i : i + 2], self.i32) for i in range(0, len(halves), 2)]

    def set(self, result: ir.Value, lowered: Lowered) -> None:
        """Records what an op's result (or a block argument) became."""
        self._values[result] = lowered

    def set_registers(self, result: ir.Value, registers: Sequence[ir.Value]) -> None:
        """Records registers in the layout of the result's type: all, or those that hold elements;
        one value for a scalar."""
        type_ = result.type
        if isinstance(type_, ir.RankedTensorType):
            layout = layout_of(type_)
            if len(registers) == len(layout.registers) < layout.num_registers:
                whole = [self.zero(carried(type_.element_type))] * layout.num_registers
                for register, value in zip(layout.registers, registers, strict=True):
                    whole[register] = value
                registers = whole
            assert len(registers) == layout.num_registers, (
                f"{len(registers)} registers for {layout}"
            )
            self._values[result] = Tile(layout, carried(type_.element_type), registers)
        else:
            (self._values[result],) = registers

    def set_words(self, result: ir.Value, words: Sequence[ir.Value]) -> None:
        """Records a tile of f16 by what `words` gave."""
        halves = [half for word in words for half in self.split_bits(word, self.f16, 2)]
        self.set_registers(result, halves)
        self.tile(result).words = words

    def lazy(self, count: int, make: Callable[[int], ir.Value]) -> LazyRegisters:
        """Registers that `make` emits at this place when they are first read.

        For pure operations whose operands are available here. A rule that calls this must not
        emit anything else at the insertion point (constants are fine).
        """
        if self._marker is None:
            op = self.builder.create("llvm.mlir.poison", [self.i1])
            self._markers.append(op)
            self._marker = ir.InsertionPoint(op)
        self._lazy_only = True
        place, loc, builder = self._marker, self.builder.loc, self.builder

        def emit(index: int) -> ir.Value:
            saved = builder.ip, builder.loc
            builder.ip, builder.loc = place, loc
            try:
                return make(index)
            finally:
                builder.ip, builder.loc = saved

        return LazyRegisters(count, emit)

    def keep_lazy(self) -> None:
        """Said by a rule that emitted nothing here: lazy registers may go on using one place."""
        self._lazy_only = True

    # Values of the thread, made at the kernel's entry

    def once(self, key: Any, make: Callable[[], ir.Value | None]) -> ir.Value | None:
        """`make()` emitted at the kernel's entry on first use, then shared under `key`."""
        if key not in self._at_entry:
            with self.builder.at(self.entry):
                self._at_entry[key] = make()
        return self._at_entry[key]

    @property
    def consumer_warps(self) -> int:
        """Those of all groups that hold tiles."""
        return self.num_warps * self.groups

    @property
    def thread_id(self) -> ir.Value:
        """i32, in the CTA; those of producer warps come last."""
        threads = 32 * (self.consumer_warps + self.producer_warps)
        return self.once(
            "thread",
            lambda: self.op(
                "nvvm.read.ptx.sreg.tid.x",
                self.i32,
                (),
                {"range": attribute(f"#llvm.constant_range<i32, 0, {threads}>")},
            ),
        )

    @property
    def lane_id(self) -> ir.Value:
        """i32, 0 .. 31."""
        return self.once("lane", lambda: self.and_(self.thread_id, 31))

    @property
    def warp_id(self) -> ir.Value:
        """i32, 0 .. num_warps - 1 in each group."""
        if self.num_warps + self.producer_warps == 1:
            return self.int32(0)

        def make() -> ir.Value:
            warp = self.shr(self.thread_id, 5)
            return self.and_(warp, self.num_warps - 1) if self.groups > 1 else warp

        return self.once("warp", make)

    @property
    def is_first_thread(self) -> ir.Value:
        """i1: this is thread 0 of the CTA, or of its group, which does what must happen once."""
        if self.role is Role.PRODUCER or self.alone:
            return self.constant(self.i1, 1)
        if self.groups > 1 and self.role is Role.CONSUMERS:
            own = self.and_(self.thread_id, 32 * self.num_warps - 1)
            return self.compare("eq", own, 0)
        return self.once("first", lambda: self.compare("eq", self.thread_id, 0))

    def owns_elements(self, layout: LinearLayout) -> ir.Value | None:
        """i1: no other thread with smaller lane and warp holds the same elements; None if all do.

        Registers that repeat an element are not covered: skip r with r & free_bits("register").
        """
        lanes, warps = layout.free_bits("lane"), layout.free_bits("warp")

        def make() -> ir.Value | None:
            checks = []
            for mask, index in ((lanes, self.lane_id), (warps, self.warp_id)):
                if mask:
                    checks.append(self.compare("eq", self.and_(index, mask), 0))
            if not checks:
                return None
            return checks[0] if len(checks) == 1 else self.and_(*checks)

        return self.once(("owner", lanes, warps), make)

    def thread_coordinate(self, layout: LinearLayout, dim: int) -> ir.Value:
        """i32 coordinate along `dim` of this thread's register 0."""
        lane = layout.coordinate_bases("lane", dim)
        warp = layout.coordinate_bases("warp", dim)
        return self.once(
            ("coordinate", lane, warp),
            lambda: self.linear(((self.lane_id, lane), (self.warp_id, warp))),
        )

    def coordinate(self, layout: LinearLayout, dim: int, register: int) -> ir.Value:
        """i32 coordinate along `dim` of one register; emitted here."""
        base = self.thread_coordinate(layout, dim)
        offset = layout.apply(register=register)[dim]
        if offset == 0:
            return base
        touched = 0
        for name in ("lane", "warp"):
            for basis in layout.coordinate_bases(name, dim):
                touched |= basis
        if touched & offset:
            return self.xor(base, offset)
        flags = {"overflowFlags": attribute("#arith.overflow<nsw, nuw>")}
        return self.op("arith.addi", self.i32, (base, self.int32(offset)), flags)

    # Shared memory

    @property
    def shared_base(self) -> ir.Value:
        """`!llvm.ptr<3>` to the start of the CTA's dynamic shared memory."""
        name = {"global_name": ir.FlatSymbolRefAttr.get(SHARED_SYMBOL)}
        return self.once(
            "shared", lambda: self.op("llvm.mlir.addressof", self.shared_pointer, (), name)
        )

    def shared_at(self, offset: int | ir.Value) -> ir.Value:
        """Pointer `offset` bytes into shared memory."""
        return self.offset_pointer(self.shared_base, offset)

    def scratch(self, op: ir.Operation) -> ir.Value:
        """Pointer to the shared memory that allocation gave to `op` (its `mt.offset`)."""
        if "mt.offset" not in op.attributes:
            raise InternalError("codegen", f"{op.name} has no mt.offset at {op.location}")
        offset = ir.IntegerAttr(op.attributes["mt.offset"]).value
        if self.groups == 1 or self.role is not Role.CONSUMERS:
            return self.shared_at(offset)
        own = self.once(
            "shared of group", lambda: self.shared_at(self.mul(self.group_id, self.group_bytes))
        )
        return self.offset_pointer(own, offset)

    def barrier(self) -> None:
        """All threads of the role meet; memory written before is visible after."""
        operands = []
        if self.role is Role.CONSUMERS:  # a barrier of their own: the producer has left them
            number = self.int32(CONSUMER_BARRIER)
            if self.groups > 1:
                number = self.add(self.group_id, CONSUMER_BARRIER)
            operands = [number, self.int32(32 * self.num_warps)]
        groups = [1, 1, 0] if operands else [0, 0, 0]
        self.create(
            "nvvm.barrier", (), operands,
            {"operandSegmentSizes": ir.DenseI32ArrayAttr.get(groups)},
        )  # fmt: skip

    def meet(self) -> None:
        """A barrier before anything that the current rule does; none if one came just before."""
        if not self._just_met:
            self.barrier()

    # Walking

    def lower(self, op: ir.Operation) -> None:
        """Runs the rule of one op."""
        rule = self._rules.get(op.name)
        if rule is None:
            raise InternalError("codegen", f"no lowering for {op.name} at {op.location}")
        self.builder.loc = op.location
        self._lazy_only = False
        rule(self, op)
        if not self._lazy_only:
            self._marker = None
            self._just_met = op.name == "mt.barrier"

    def lower_block(self, block: ir.Block) -> ir.Operation:
        """Lowers all ops but the terminator, which is returned."""
        ops = [op.operation for op in block.operations]
        self.lower_ops(ops[:-1])
        self.builder.loc = ops[-1].location
        return ops[-1]

    def lower_ops(self, ops: Sequence[ir.Operation]) -> None:
        """Lowers ops of one block, in order; where warps part, each kind its own."""
        self._marker, self._just_met = None, False
        if self.role is Role.CONSUMERS:
            ops = [op for op in ops if PRODUCER not in op.attributes]
        for part in one_thread.parts(ops):
            if self.role is not Role.PRODUCER and one_thread.acts(part[0]):
                self._lower_alone(part)
                continue
            for op in part:
                self.lower(op)
            if part[-1].name == "mt.split_warps":  # its rule lowers what follows
                break
        self._marker, self._just_met = None, False

    def _lower_alone(self, ops: Sequence[ir.Operation]) -> None:
        """Lowers ops that only the first thread executes, behind one branch."""
        acting = []
        for op in ops:
            if one_thread.acts(op):
                acting.append(op)
            else:  # where things are, which all threads may know
                self.lower(op)

        def act() -> list[ir.Value]:
            self.alone = True
            for op in acting:
                self.lower(op)
            self.alone = False
            return []

        self.builder.loc = acting[0].location
        self.branch(self.is_first_thread, (), act)

    def inline(self, block: ir.Block, arguments: Sequence[Lowered]) -> list[Lowered]:
        """Emits a copy of `block` here with its arguments bound; what its terminator yields."""
        for parameter, argument in zip(block.arguments, arguments, strict=True):
            self._values[parameter] = argument
        loc = self.builder.loc
        terminator = self.lower_block(block)
        self.builder.loc = loc
        return [self._values[v] for v in terminator.operands]

    def finish(self) -> None:
        """Ends the kernel and removes the place holders."""
        self.create("llvm.return", ())
        for op in self._markers:
            op.erase()


def integer_attribute(op: ir.Operation, name: str, default: int | None = None) -> int:
    """Value of an integer attribute; `default` where it is missing and a default is given."""
    if default is not None and name not in op.attributes:
        return default
    return ir.IntegerAttr(op.attributes[name]).value


def lower_to_gpu(
    module: ir.Module, target: Target, options: CodegenOptions | None = None
) -> ir.Module:
    """A new module with the kernel as `llvm.func` in a `gpu.module`; `module` stays as it is.

    Needs an entered context. InternalError where the IR has no lowering.
    """
    options = options or CodegenOptions()
    function = _kernel_of(module)
    top = module.operation
    num_warps = integer_attribute(top, "mt.num_warps", 4)
    producers = integer_attribute(top, "mt.producer_warps", 0)
    groups = integer_attribute(top, GROUPS, 1)
    result, kernel = _skeleton(function, top, target, num_warps * groups, producers)
    lowering = Lowering(function, kernel, target, options, num_warps, analyse(function))
    lowering.groups, lowering.group_bytes = groups, integer_attribute(top, GROUP_BYTES, 0)
    lowering.producer_warps, lowering.producer = producers, producer_of(module)
    parameters = list(kernel.regions[0].blocks[0].arguments)
    body = function.regions[0].blocks[0]
    own = len(body.arguments)
    if "mt.persistent" in top.attributes:
        lowering.grid_sizes, own = parameters[own : own + 3], own + 3
    lowering.tensor_maps = read_specs(top)
    lowering.map_pointers = parameters[own:]
    for parameter, argument in zip(body.arguments, parameters, strict=False):
        lowering.set(parameter, argument)
    lowering.lower_block(body)
    lowering.finish()
    return result


def _kernel_of(module: ir.Module) -> ir.Operation:
    for op in module.body.operations:
        if op.operation.name == "func.func":
            return op.operation
    raise InternalError("codegen", "the module has no func.func")


def _skeleton(
    function: ir.Operation, top: ir.Operation, target: Target, consumers: int, producers: int
) -> tuple[ir.Module, ir.Operation]:
    """Module, gpu.module, shared-memory symbol and the empty kernel."""
    warps = consumers + producers
    alignment = integer_attribute(top, "mt.shared_alignment", SHARED_ALIGNMENT)
    module = ir.Module.parse(
        f"""module attributes {{gpu.container_module}} {{
          gpu.module @kernels [#nvvm.target<chip = "{target.arch}", O = 3,
            features = "+ptx{target.ptx_version}">]
            attributes {{llvm.data_layout = "e-i64:64-i128:128-v16:16-v32:32-n16:32:64"}} {{
            llvm.mlir.global external @{SHARED_SYMBOL}() {{addr_space = 3 : i32,
              alignment = {alignment} : i64}} : !llvm.array<0 x i8>
          }}
        }}"""
    )
    gpu_module = module.body.operations[0].operation
    body = function.regions[0].blocks[0]
    arguments = [carried(argument.type) for argument in body.arguments]
    maps = len(read_specs(top))
    own = len(arguments)
    if "mt.persistent" in top.attributes:
        arguments += [ir.IntegerType.get_signless(32)] * 3
        own += 3
    arguments += [type_named("!llvm.ptr")] * maps
    signature = f"!llvm.func<void ({', '.join(_in_signature(t) for t in arguments)})>"
    attributes = {
        "sym_name": ir.StringAttr(function.attributes["sym_name"]),
        "function_type": ir.TypeAttr.get(type_named(signature)),
        "linkage": attribute("#llvm.linkage<external>"),
        "CConv": attribute("#llvm.cconv<ccc>"),
        "visibility_": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0),
        "unnamed_addr": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0),
        "gpu.kernel": ir.UnitAttr.get(),
        "nvvm.kernel": ir.UnitAttr.get(),
        "nvvm.reqntid": ir.DenseI32ArrayAttr.get([32 * warps, 1, 1]),
    }
    if maps:  # parameters of 128 bytes that the kernel reads where they are
        by_value = attribute(
            "{llvm.byval = !llvm.array<128 x i8>, llvm.align = 64 : i64, nvvm.grid_constant}"
        )
        attributes["arg_attrs"] = ir.ArrayAttr.get([attribute("{}")] * own + [by_value] * maps)
    if "mt.maxnreg" in top.attributes:
        attributes["nvvm.maxnreg"] = i32_attr(integer_attribute(top, "mt.maxnreg"))
    elif producers:  # ptxas must know from what setmaxnreg starts
        attributes["nvvm.maxnreg"] = i32_attr(REGISTERS // (32 * warps) // 8 * 8)
    kernel = ir.Operation.create(
        "llvm.func",
        [],
        [],
        attributes,
        None,
        1,
        function.location,
        ir.InsertionPoint(gpu_module.regions[0].blocks[0]),
    )
    kernel.regions[0].blocks.append(*arguments, arg_locs=[function.location] * len(arguments))
    return module, kernel


def _in_signature(type_: ir.Type) -> str:
    """A type inside `!llvm.func<...>`, where LLVM's own types go without their prefix."""
    return str(type_).removeprefix("!llvm.")
