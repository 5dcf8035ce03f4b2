"""Speed of the kernel library beside plain torch and torch.compile, at K3's sizes.

    python benchmarks/library_speed.py --out benchmarks/results/library_speed.json

Needs a GPU. "floor" is the time that the bytes which must move take at the copy bandwidth measured
in the same run; the first call of each function is timed with an empty cache.
"""

import argparse
import json
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import timing

from minitriton import kernels


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a device-to-device copy."""
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return 8 * x.numel() / timing.compare({"copy": lambda: y.copy_(x)}, 10)["copy"]


def situ_glu(rows: int, columns: int):
    """(contenders, bytes moved) of the forward and the backward pass."""
    both = torch.randn(rows, 2 * columns, device="cuda", dtype=torch.bfloat16)
    gate, up = both.chunk(2, dim=-1)
    grad = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(kernels.situ_glu_reference, dynamic=False)
    functions = {
        "minitriton": kernels.situ_glu, "torch": kernels.situ_glu_reference,
        "torch.compile": compiled,
    }  # fmt: skip
    expected = kernels.situ_glu_reference(gate[:512].double(), up[:512].double())
    for name, function in functions.items():
        error = (function(gate, up)[:512].double() - expected).norm() / expected.norm()
        assert error < 8e-3, (name, error)
    forward = {n: (lambda f=f: f(gate, up)) for n, f in functions.items()}
    backward = {}
    leaves = [t.detach().requires_grad_() for t in (gate, up)]
    for name, function in functions.items():
        out = function(*leaves)
        backward[name] = lambda out=out: torch.autograd.grad(out, leaves, grad, retain_graph=True)
    return {"forward": (forward, 6 * rows * columns), "backward": (backward, 10 * rows * columns)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    x = torch.randn(64, 3072, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()  # CUDA itself has started before the clock does
    start = time.perf_counter()
    kernels.situ_glu(x, x)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    bandwidth = copy_bandwidth()
    results: dict = {
        "machine": timing.machine(), "command": " ".join(sys.argv),
        "copy bandwidth": bandwidth, "first call of situ_glu, seconds": first, "entries": {},
    }  # fmt: skip
    print(f"copy {bandwidth / 1e12:.2f} TB/s, first call of situ_glu {first:.2f} s")
    for rows, columns in ((131072, 3072), (8192, 6144), (8192, 33792)):
        for direction, (calls, moved) in situ_glu(rows, columns).items():
            times = timing.compare(calls, arguments.rounds)
            title = f"SiTU-GLU {direction} bf16 {rows}x{columns}"
            results["entries"][title] = {"floor": moved / bandwidth, "seconds": times}
            shown = ", ".join(f"{n} {t * 1e3:.3f} ms" for n, t in times.items())
            print(f"{title:44s} floor {moved / bandwidth * 1e3:.3f} ms: {shown}", flush=True)
        torch.cuda.empty_cache()
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
