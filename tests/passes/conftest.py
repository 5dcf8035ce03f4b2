"""Kernels of these tests as modules, and an oracle: the module's meaning on numpy."""

from __future__ import annotations

import numpy as np
import pytest

from minitriton.frontend.build import build_module
from minitriton.frontend.signature import ParamSpec, Specialization
from minitriton.frontend.source import SourceFunction, source_of
from minitriton.ir.context import use
from minitriton.ir.interpret import interpret
from minitriton.ir.target import Target
from minitriton.passes.pipeline import run_pipeline, tile_pipeline
from minitriton.passes.tile_pass import PassOptions
from minitriton.passes.traversal import kernel_of, walk

BASE = 1 << 16
_alive = []  # modules of the running test: ops that a walk gives do not keep theirs


class Memory:
    """Arrays laid out one after the other; accesses outside fail."""

    def __init__(self, arrays):
        self.addresses, parts, end = [], [], 0
        for array in arrays:
            self.addresses.append(BASE + end)
            raw = array.reshape(-1).view(np.uint8)
            parts += [raw, np.zeros(-len(raw) % 64 + 64, np.uint8)]
            end += len(raw) + len(parts[-1])
        self.bytes = np.concatenate(parts)

    def _index(self, addresses, itemsize):
        index = (np.asarray(addresses) - BASE)[..., None] + np.arange(itemsize)
        assert index.min(initial=0) >= 0 and index.max(initial=0) < len(self.bytes)
        return index

    def end(self, address):
        return BASE + len(self.bytes)

    def read(self, addresses, itemsize):
        found = self.bytes[self._index(addresses, itemsize)]
        return np.ascontiguousarray(found).view(f"u{itemsize}")[..., 0]

    def write(self, addresses, values):
        raw = np.ascontiguousarray(values)[..., None].view(np.uint8)
        self.bytes[self._index(addresses, values.dtype.itemsize)] = raw

    def array(self, which, like):
        start = self.addresses[which] - BASE
        return self.bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape)


class Kernel:
    """A Triton function under one signature, built anew for every use."""

    def __init__(self, fn, num_warps=4, num_stages=3, target="sm_80", maxnreg=None, num_ctas=1,
                 **arguments):  # fmt: skip
        self.source = source_of(fn) or SourceFunction(fn)
        self.target = Target.parse(target)
        params = tuple(self._param(p, arguments[p.name]) for p in self.source.parameters)
        self.spec = Specialization(params, num_warps, num_stages, num_ctas, maxnreg=maxnreg)

    @staticmethod
    def _param(parameter, value):
        """'*fp16' pointer, 'i32' or 'i32:16' (divisible by 16) scalar, else a constexpr."""
        name = parameter.name
        if parameter.constexpr or not isinstance(value, str):
            return ParamSpec(name, "constexpr", value=value)
        if value.startswith("*"):
            return ParamSpec(name, "pointer", value[1:], None, True)
        dtype, _, divisible = value.partition(":")
        return ParamSpec(name, "scalar", dtype, None, bool(divisible))

    def build(self):
        _alive.append(build_module(self.source, self.spec, self.target))
        return _alive[-1]

    def compile(self, upto=None, **options):
        """The module after the pipeline (or its passes up to and including `upto`)."""
        module = self.build()
        passes = tile_pipeline(self.target, PassOptions(check=True, **options))
        names = [p.name for p in passes]
        run_pipeline(module, passes[: names.index(upto) + 1] if upto else passes)
        return module

    def run(self, module, arrays, scalars, grid=(1, 1, 1)):
        """Copies of `arrays` after running `module`; arrays are the first arguments."""
        memory = Memory(arrays)
        interpret(module, memory, [*memory.addresses, *scalars], grid)
        return [memory.array(i, a).copy() for i, a in enumerate(arrays)]

    def check(self, arrays, scalars=(), grid=(1, 1, 1), **options):
        """The whole pipeline keeps the meaning on these inputs; returns the compiled module."""
        compiled = self.compile(**options)
        before = self.run(self.build(), arrays, scalars, grid)
        after = self.run(compiled, arrays, scalars, grid)
        for x, y in zip(before, after, strict=True):
            np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
        return compiled


@pytest.fixture(autouse=True)
def _context():
    with use():
        yield
        _alive.clear()


@pytest.fixture
def names():
    """names(module): the ops of the kernel in order."""
    return lambda module: [op.name for op in walk(kernel_of(module))]


@pytest.fixture
def kernel():
    return Kernel
