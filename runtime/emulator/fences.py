"""Fences: which writes of a thread other units may see. Only the race check needs to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minitriton.runtime.emulator.module import Ins
from minitriton.runtime.emulator.operands import lanes_of

Step = Callable[[Any, Any], None]


def fence(ins: Ins) -> Step:
    """fence.proxy.async makes a thread's writes visible to wgmma and bulk copies,
    fence.mbarrier_init the mbarriers it initialised; fences that release to the cluster do so for
    relaxed arrivals at its barrier; other fences change nothing here.
    """
    proxy = "proxy" in ins.mods and any(m.split("::")[0] == "async" for m in ins.mods)
    if proxy and "global" not in ins.mods:
        name = "proxy_fence"
    elif "mbarrier_init" in ins.mods:
        name = "init_fence"
    elif {"cluster", "gpu", "sys"} & set(ins.mods) and {"acq_rel", "sc", "release"} & set(ins.mods):
        name = "release_fence"
    else:
        return lambda c, ix: None

    def run(c: Any, ix: Any) -> None:
        if c.race is not None:
            getattr(c.race, name)(lanes_of(c, ix))

    return run


RULES: dict[str, Callable[[Ins], Step]] = {"fence": fence}
