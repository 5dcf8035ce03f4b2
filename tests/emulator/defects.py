"""Defects seeded into PTX text: each mutant differs from a right kernel in one instruction.

The rules know synchronisation and asynchronous copies of sm_80 to sm_90a, and nothing of the
kernel: any PTX with one instruction a line gets its mutants. A mutant is found if the emulator,
under one of the policies, stops with a diagnosis or leaves a wrong result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minitriton.runtime.emulator import EmulatorError, LaunchError, UnsupportedPTX


@dataclass(frozen=True, slots=True)
class Policy:
    """How the emulator lands copies and orders warps, and the seed of what is random in that."""

    landing: str
    schedule: str
    seed: int = 0


POLICIES = (
    Policy("late", "round_robin"),
    Policy("early", "reverse"),
    Policy("random", "random"),
    Policy("late", "reverse"),
    *(Policy("random", "random", seed) for seed in (1, 2)),
)
#: Runs a loaded kernel on the random data of a seed; whether the result is right.
Trial = Callable[[int, Policy], bool]


@dataclass(frozen=True, slots=True)
class Subject:
    """A right kernel, and what loads PTX of its interface."""

    ptx: str
    load: Callable[[str], Trial]


_STATEMENT = re.compile(r"^\s*(?:@(?P<guard>!?[%\w]+)\s+)?(?P<op>[a-z][\w.:]*)\s*(?P<args>.*?);")
_BLOCK_ENDS = re.compile(r"^\s*(?:[$\w]+:|(?:@!?[%\w]+\s+)?(?:bra|ret|exit|brx)\b)")
#: What the rules edit, by the name that mutants carry; the first pattern that fits an opcode wins.
_KINDS = {
    "bar.sync": r"(bar|barrier\.cta|barrier)\.sync",
    "bar.arrive": r"(bar|barrier\.cta|barrier)\.arrive",
    "bar.red": r"(bar|barrier\.cta|barrier)\.red",
    "cluster arrive": r"barrier\.cluster\.arrive",
    "cluster wait": r"barrier\.cluster\.wait",
    "mapa": r"mapa",
    "fence.proxy.async": r"fence\.proxy\.async",
    "fence.mbarrier_init": r"fence\.mbarrier_init",
    "wgmma.fence": r"wgmma\.fence",
    "wgmma.commit_group": r"wgmma\.commit_group",
    "wgmma.wait_group": r"wgmma\.wait_group",
    "bulk.commit_group": r"cp\.async\.bulk\.commit_group",
    "bulk.wait_group": r"cp\.async\.bulk\.wait_group",
    "bulk load": r"cp\.async\.bulk\..*mbarrier::complete_tx",
    "bulk store": r"cp\.async\.bulk\..*bulk_group",
    "cp.async.commit_group": r"cp\.async\.commit_group",
    "cp.async.wait_group": r"cp\.async\.wait_(group|all)",
    "cp.async": r"cp\.async\.c[ag]\b",
    "mbarrier.init": r"mbarrier\.init",
    "mbarrier.inval": r"mbarrier\.inval",
    "mbarrier.expect_tx": r"mbarrier\.(arrive\.)?expect_tx",
    "mbarrier.arrive": r"mbarrier\.arrive",
    "mbarrier wait": r"mbarrier\.(try|test)_wait",
    "setmaxnreg": r"setmaxnreg",
    "store": r"st\.shared|stmatrix",
    "load": r"ld\.shared|ldmatrix",
}
#: (first, second) that follow each other: the first is moved past the second,
_POSTPONED = {
    ("cp.async", "cp.async.commit_group"),
    ("cp.async.wait_group", "bar.sync"),
    ("bulk store", "bulk.commit_group"),
    ("bulk.wait_group", "bar.sync"),
    ("fence.proxy.async", "bar.sync"),
    ("mbarrier.init", "bar.sync"),
    ("wgmma.commit_group", "wgmma.wait_group"),
    ("wgmma.wait_group", "bar.sync"),
    ("wgmma.wait_group", "mbarrier.arrive"),
    ("store", "bar.sync"),
    ("store", "fence.proxy.async"),
    ("bar.sync", "store"),
    ("bar.sync", "load"),
}
#: or the second before the first, whose result may be used between them.
_HASTENED = {("load", "bar.sync"), ("load", "mbarrier.arrive")}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of PTX that a rule may edit; ``place`` is its index among the lines."""

    place: int
    kind: str
    guard: str
    op: str
    args: str

    def text(self, args: str | None = None, guard: str | None = None) -> str:
        """The line with other operands or another guard ("" for none)."""
        guard = self.guard if guard is None else guard
        return f"{f'@{guard} ' if guard else ''}{self.op} {self.args if args is None else args};"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel with one defect; its name is the rule and the instruction, counted by kind."""

    rule: str
    name: str
    line: int
    ptx: str


def instructions(lines: list[str]) -> list[Instruction]:
    """The instructions that rules edit, in order."""
    found = []
    for place, line in enumerate(lines):
        match = _STATEMENT.match(line)
        if match is None:
            continue
        kind = next((name for name, p in _KINDS.items() if re.match(p, match["op"])), None)
        if kind is not None:
            found.append(Instruction(place, kind, match["guard"] or "", match["op"], match["args"]))
    return found


def mutants(ptx: str) -> list[Mutant]:
    """All mutants of a kernel."""
    lines, made = ptx.splitlines(), []
    every = instructions(lines)
    counts, seen = Counter(i.kind for i in every), Counter[str]()
    for number, ins in enumerate(every):
        seen[ins.kind] += 1
        which = f"{ins.kind} {seen[ins.kind]}/{counts[ins.kind]}"
        for rule, replacement in _edits(ins, every[:number]):
            text = lines[: ins.place] + replacement + lines[ins.place + 1 :]
            made.append(Mutant(rule, f"{which}: {rule}", ins.place + 1, "\n".join(text) + "\n"))
        for rule, replacement in _exchanges(lines, ins, every[number + 1 : number + 2]):
            after = ins.place + len(replacement)
            text = lines[: ins.place] + replacement + lines[after:]
            made.append(Mutant(rule, f"{which}: {rule}", ins.place + 1, "\n".join(text) + "\n"))
    return made


def _exchanges(
    lines: list[str], first: Instruction, follower: list[Instruction]
) -> Iterator[tuple[str, list[str]]]:
    """An instruction and the next one in another order: the rule, and the lines of both."""
    for second in follower:
        between = lines[first.place + 1 : second.place]
        if any(map(_BLOCK_ENDS.match, between)):
            continue
        pair = (first.kind, second.kind)
        if pair in _POSTPONED:
            yield f"after the next {second.kind}", [*between, second.text(), first.text()]
        if pair in _HASTENED:
            yield f"after the next {second.kind}", [second.text(), first.text(), *between]


# -- the rules: (what is wrong, the lines that replace the instruction)
Edit = tuple[str, list[str]]


def _edits(ins: Instruction, before: list[Instruction]) -> Iterator[Edit]:
    if ins.kind not in ("store", "load"):
        yield "removed", _removed(ins)
    if ins.guard and ins.kind.startswith(("mbarrier", "bulk")):
        yield "by every thread", [ins.text(guard="")]
    yield from _RULES.get(ins.kind, lambda _: iter(()))(ins)
    if ins.kind == "bulk load":
        yield from _other_slot(ins, before)


def _removed(ins: Instruction) -> list[str]:
    """Nothing; a wait loop ends at once."""
    if ins.kind == "mbarrier wait":
        return [f"setp.eq.u32 {_operands(ins.args)[0]}, 0, 0;"]
    return [""]


def _operands(args: str) -> list[str]:
    """Operands split at the commas outside brackets."""
    parts, depth = [""], 0
    for char in args:
        depth += (char in "[{") - (char in "]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _places(operands: list[str]) -> list[int]:
    """Which operands are addresses."""
    return [i for i, operand in enumerate(operands) if operand.startswith("[")]


def _with(ins: Instruction, operands: list[str], position: int, new: str) -> str:
    return ins.text(", ".join([*operands[:position], new, *operands[position + 1 :]]))


def _plus(
    ins: Instruction, operands: list[str], position: int, amount: int, op: str = "add.u32"
) -> list[str]:
    """The instruction with a register or literal replaced by itself plus ``amount``."""
    old = operands[position]
    if re.fullmatch(r"-?\d+", old):
        number = int(old) ^ amount if op.startswith("xor") else int(old) + amount
        return [_with(ins, operands, position, str(number))]
    return [
        "{",
        ".reg .b32 changed;",
        f"{op} changed, {old}, {amount};",
        _with(ins, operands, position, "changed"),
        "}",
    ]


def _further(ins: Instruction, operands: list[str], position: int, amount: int) -> list[str]:
    """The instruction with another offset in an address."""
    match = re.fullmatch(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]", operands[position])
    assert match, operands[position]
    return [_with(ins, operands, position, f"[{match[1]}+{int(match[2] or 0) + amount}]")]


def _beside(ins: Instruction) -> Iterator[Edit]:
    operands = _operands(ins.args)
    yield "at the mbarrier beside", _further(ins, operands, _places(operands)[0], 8)


def _wait(ins: Instruction) -> Iterator[Edit]:
    yield from _beside(ins)
    yield "parity flipped", _plus(ins, _operands(ins.args), 2, 1, "xor.b32")


def _bytes(ins: Instruction) -> Iterator[Edit]:
    yield from _beside(ins)
    operands = _operands(ins.args)
    last = len(operands) - 1
    yield "16 more bytes", _plus(ins, operands, last, 16)
    yield "16 fewer bytes", _plus(ins, operands, last, -16)
    if operands[last].isdigit():
        yield "half the bytes", [_with(ins, operands, last, str(int(operands[last]) // 2))]
        yield "twice the bytes", [_with(ins, operands, last, str(int(operands[last]) * 2))]


def _arrivals(ins: Instruction) -> Iterator[Edit]:
    operands = _operands(ins.args)
    yield "count +1", _plus(ins, operands, 1, 1)
    if operands[1] != "1":
        yield "count -1", _plus(ins, operands, 1, -1)


def _barrier(ins: Instruction) -> Iterator[Edit]:
    operands = _operands(ins.args)
    if len(operands) > 1:
        yield "another barrier", _plus(ins, operands, 0, 1)
        yield "+32 threads", _plus(ins, operands, 1, 32)
        if operands[1] != "32":
            yield "-32 threads", _plus(ins, operands, 1, -32)


def _cluster_arrival(ins: Instruction) -> Iterator[Edit]:
    if "relaxed" not in ins.op:
        yield "relaxed", [ins.text().replace(".release", "").replace("arrive", "arrive.relaxed")]


def _mapping(ins: Instruction) -> Iterator[Edit]:
    yield "to the other CTA", _plus(ins, _operands(ins.args), 2, 1, "xor.b32")
    yield "to the first CTA", [_with(ins, _operands(ins.args), 2, "0")]


def _groups(ins: Instruction) -> Iterator[Edit]:
    if ins.args:  # not wait_all
        yield "one group less", _plus(ins, [ins.args.strip()], 0, 1)


def _proxy_fence(ins: Instruction) -> Iterator[Edit]:
    yield "of global memory only", [f"{ins.op.split('::')[0].removesuffix('.shared')}.global;"]


def _copy(ins: Instruction) -> Iterator[Edit]:
    operands = _operands(ins.args)
    yield "16 bytes further", _further(ins, operands, 0, 16)
    yield "from 16 bytes further", _further(ins, operands, 1, 16)


def _coordinates(ins: Instruction) -> Iterator[Edit]:
    match = re.search(r"\{([^}]*)\}", ins.args)
    names = [name.strip() for name in match[1].split(",")] if match else []
    for axis, old in enumerate(names):
        others = ", ".join([*names[:axis], "changed", *names[axis + 1 :]])
        args = re.sub(r"\{[^}]*\}", "{" + others + "}", ins.args)
        shift = ["{", ".reg .b32 changed;", f"add.u32 changed, {old}, 8;"]
        yield f"coordinate {axis} off by 8", [*shift, ins.text(args), "}"]
    if "multicast" in ins.op:
        operands = _operands(ins.args)
        alone = _with(ins, operands, len(operands) - 1, "changed")
        yield (
            "to the first CTA alone",
            ["{", ".reg .b16 changed;", "mov.b16 changed, 1;", alone, "}"],
        )


def _other_slot(ins: Instruction, before: list[Instruction]) -> Iterator[Edit]:
    """Into the place of the last copy from the same array, or counted by its mbarrier."""
    operands = _operands(ins.args)
    target, source, barrier = _places(operands)
    base = operands[source].split(",")[0]
    for other in reversed(before):
        its = _operands(other.args)
        if other.op == ins.op and its[source].split(",")[0] == base:
            yield "into another slot", [_with(ins, operands, target, its[target])]
            if its[barrier] != operands[barrier]:
                text = _with(ins, operands, barrier, its[barrier])
                yield "counted by another mbarrier", [text]
            return


_RULES: dict[str, Callable[[Instruction], Iterator[Edit]]] = {
    "bar.sync": _barrier,
    "bar.arrive": _barrier,
    "cluster arrive": _cluster_arrival,
    "mapa": _mapping,
    "bulk load": _coordinates,
    "bulk store": _coordinates,
    "bulk.wait_group": _groups,
    "cp.async": _copy,
    "cp.async.wait_group": _groups,
    "fence.proxy.async": _proxy_fence,
    "mbarrier.arrive": _beside,
    "mbarrier.expect_tx": _bytes,
    "mbarrier.init": _arrivals,
    "mbarrier wait": _wait,
    "wgmma.wait_group": _groups,
}


# -- the verdict
def verdict(trial: Trial, seed: int, policies: Sequence[Policy] = POLICIES) -> str:
    """What finds a defect ("shared-race, late" or the like); empty if nothing does."""
    for number, policy in enumerate(policies):
        try:
            right = trial(seed + number, policy)
        except (UnsupportedPTX, LaunchError):  # a mutant must be a kernel
            raise
        except EmulatorError as problem:
            return f"{problem.rule}, {policy.landing}"
        if not right:
            return f"wrong result, {policy.landing}"
    return ""


def describe(mutant: Mutant, context: int = 4) -> str:
    """The name of a mutant and the instructions around its defect."""
    lines = mutant.ptx.splitlines()
    skipped = re.compile(r"\s*($|//|\.loc)")
    near = [
        f"    {i + 1}: {line.strip()[:100]}"
        for i, line in enumerate(lines)
        if i + 1 == mutant.line or not skipped.match(line)
    ]
    middle = next(k for k, text in enumerate(near) if text.startswith(f"    {mutant.line}:"))
    shown = near[max(0, middle - context) : middle + context + 1]
    return "\n".join([f"{mutant.name} (line {mutant.line})", *shown])
