"""The tensor maps that a kernel's TMA copies need: plain data on the module, kept as JSON.

Each is a dict that `runtime/tensor_maps.py` turns into a map at launch:
base (number of the kernel's argument), offset, strides (of dimensions 1 and up), sizes (None: no
end is known), all in elements; box (elements), swizzle and element_bytes (bytes), element (type;
"tf32" is f32 that copies round to that); dimensions inner first; non_negative (arguments that must
not be negative); fill ("zero" or "nan": what loads give outside the sizes); spans (whether the last
dimension ends where the argument's memory does), signed (whether its coordinate may be negative, so
that no memory may be there). Offset, strides and sizes are sums of products (ir/terms.py).
"""

from __future__ import annotations

import json
from typing import Any

from minitriton.ir.mlir import ir

ATTRIBUTE = "mt.tensor_maps"


def read_specs(module: ir.Operation) -> list[dict[str, Any]]:
    """Those of a module, in the order of their numbers."""
    attributes = module.attributes
    if ATTRIBUTE not in attributes:
        return []
    return list(json.loads(ir.StringAttr(attributes[ATTRIBUTE]).value))


def add_spec(module: ir.Operation, spec: dict[str, Any]) -> int:
    """The number of a map on the module; equal ones are one."""
    specs = read_specs(module)
    if spec not in specs:
        specs.append(spec)
        module.attributes[ATTRIBUTE] = ir.StringAttr.get(json.dumps(specs))
    return specs.index(spec)
