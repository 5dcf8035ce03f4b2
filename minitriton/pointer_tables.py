"""Arrays that hold addresses: what they point to, for kernels that run in the emulator.

A GPU lets a kernel follow any address; the emulator only lets it touch memory of its arguments, and
of live torch tensors whose addresses stand in them.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from minitriton.runtime.arguments import Argument, Memory

_LEAST = 1 << 16  # no array lies below


def pointed_to(leaves: Sequence[tuple[str, Argument]]) -> list[tuple[Memory, str]]:
    """Storages of torch tensors that 64-bit integers among the arguments lie in, with a name."""
    tables = [(name, _addresses(argument)) for name, argument in leaves]
    if not any(addresses for _, addresses in tables):
        return []
    found = []
    for memory in set(_storages()):
        for name, addresses in tables:
            first = bisect.bisect_left(addresses, memory.address)
            if first < len(addresses) and addresses[first] < memory.address + memory.nbytes:
                found.append((memory, f"what {name} points to"))
                break
    return found


def _addresses(argument: Argument) -> list[int]:
    """What may be addresses among an integer or an array of them, sorted."""
    if argument.kind == "int":
        return [argument.value] if argument.value >= _LEAST else []
    if argument.memory is None or argument.dtype not in ("int64", "uint64"):
        return []
    import numpy as np

    skip = -argument.memory.address % 8
    count = (argument.memory.nbytes - skip) // 8
    items = (ctypes.c_uint64 * count).from_address(argument.memory.address + skip)
    values = np.unique(np.frombuffer(items, np.uint64))
    return [int(value) for value in values[values >= _LEAST]]


def _storages() -> Iterator[Memory]:
    """Memory of all live torch tensors on the CPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    for thing in gc.get_objects():
        if type(thing) not in (torch.Tensor, torch.nn.Parameter):
            continue
        if thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes():
                yield Memory(storage.data_ptr(), storage.nbytes(), True)
