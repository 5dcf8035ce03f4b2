"""Kernel time of MiniTriton, Triton, torch and torch.compile on the same inputs, in one process.

    python benchmarks/kernel_speed.py --out benchmarks/results/kernel_speed.json

MiniTriton and Triton compile the same source (kernels.py) and each takes its best configuration
of the same small set. Needs a GPU.
"""

import argparse
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import kernels
import timing

import minitriton

WARPS = (4, 8, 16)


def backends() -> dict[str, object]:
    """Kernel modules by compiler name."""
    import minitriton.language as mtl

    found = {"minitriton": kernels.load("kernels_minitriton", minitriton, mtl)}
    try:
        import triton
        import triton.language as tl

        found["triton"] = kernels.load("kernels_triton", triton, tl)
    except ImportError:
        pass
    return found


def best_of(contenders: dict[str, object], rounds: int) -> dict[str, dict]:
    """For names 'backend|configuration': the fastest configuration of each backend."""
    times = timing.compare(contenders, rounds)
    best: dict[str, dict] = {}
    for name, seconds in times.items():
        backend, _, configuration = name.partition("|")
        if backend not in best or seconds < best[backend]["seconds"]:
            best[backend] = {"seconds": seconds, "configuration": configuration}
    return best


def checked(name: str, call, out: torch.Tensor, expected: torch.Tensor, tolerance: float):
    """`call`, once it was seen to produce `expected` in a poisoned `out`."""
    out.fill_(float("nan"))
    call()
    torch.cuda.synchronize()
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    if not error < tolerance:
        raise SystemExit(f"{name}: wrong result, relative error {error:.3e}")
    return call


def vector_add(rounds: int) -> dict:
    n = 1 << 28
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    expected = x + y
    calls = {}
    for backend, module in backends().items():
        for block in (1024, 4096):
            for warps in (4, 8):
                out = torch.empty_like(x)
                grid = (minitriton.cdiv(n, block),)

                def call(k=module.add_kernel, out=out, grid=grid, block=block, warps=warps):
                    k[grid](x, y, out, n, BLOCK=block, num_warps=warps)

                name = f"{backend}|BLOCK={block} warps={warps}"
                calls[name] = checked(name, call, out, expected, 1e-7)
                del out
    out = torch.empty_like(x)
    calls["torch|"] = lambda: torch.add(x, y, out=out)
    return {"bytes": 12 * n, "results": best_of(calls, rounds)}


def rows(kind: str, n_rows: int, n_cols: int, rounds: int) -> dict:
    x = torch.randn(n_rows, n_cols, device="cuda", dtype=torch.bfloat16)
    w, b = (torch.randn(n_cols, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if kind == "softmax":
        reference = lambda: torch.softmax(x, dim=-1)  # noqa: E731
    else:
        reference = lambda: torch.nn.functional.layer_norm(x, (n_cols,), w, b)  # noqa: E731
    expected = reference()
    compiled = torch.compile(reference, dynamic=False)
    calls = {"torch|": reference, "torch.compile|": compiled}
    block = minitriton.next_power_of_2(n_cols)
    for backend, module in backends().items():
        for warps in WARPS:
            out = torch.empty_like(x)
            if kind == "softmax":

                def call(k=module.softmax_kernel, out=out, warps=warps):
                    k[(n_rows,)](out, x, n_cols, n_cols, n_cols, BLOCK=block, num_warps=warps)
            else:

                def call(k=module.layer_norm_kernel, out=out, warps=warps):
                    k[(n_rows,)](x, out, w, b, n_cols, n_cols, 1e-5, BLOCK=block, num_warps=warps)

            name = f"{backend}|warps={warps}"
            calls[name] = checked(name, call, out, expected, 8e-3)
    return {"bytes": 4 * n_rows * n_cols, "results": best_of(calls, rounds)}


MATMUL_CONFIGS = (
    # BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages
    (128, 128, 32, 4, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4),
    (128, 256, 32, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 32, 8, 4),
    (256, 128, 32, 8, 3), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (64, 128, 64, 4, 4),
    (64, 256, 64, 4, 4), (64, 256, 32, 4, 4),
)  # fmt: skip


def matmul(m: int, n: int, k: int, b_nk: bool, rounds: int) -> dict:
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T if b_nk else torch.randn(
        k, n, device="cuda", dtype=torch.bfloat16)  # fmt: skip
    expected = a @ b
    calls = {"torch|": lambda: a @ b}
    for backend, module in backends().items():
        for bm, bn, bk, warps, stages in MATMUL_CONFIGS:
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            grid = (minitriton.cdiv(m, bm) * minitriton.cdiv(n, bn),)

            def call(
                kernel=module.matmul_kernel, out=out, grid=grid, cfg=(bm, bn, bk, warps, stages)
            ):
                kernel[grid](
                    a, b, out, m, n, k, *a.stride(), *b.stride(), *out.stride(),
                    BLOCK_M=cfg[0], BLOCK_N=cfg[1], BLOCK_K=cfg[2], GROUP_M=8,
                    num_warps=cfg[3], num_stages=cfg[4],
                )  # fmt: skip

            name = f"{backend}|{bm}x{bn}x{bk} warps={warps} stages={stages}"
            try:
                calls[name] = checked(name, call, out, expected, 1e-2)
            except SystemExit:
                raise
            except Exception as error:  # out of resources: this configuration is not a contender
                print(f"  {name}: {type(error).__name__}: {str(error)[:80]}", flush=True)
    return {"flops": 2 * m * n * k, "results": best_of(calls, rounds)}


def show(title: str, entry: dict) -> None:
    """One line a contender, speed and ratio to Triton."""
    base = entry["results"].get("triton", {}).get("seconds")
    for backend, result in sorted(entry["results"].items()):
        seconds = result["seconds"]
        speed = (
            f"{entry['bytes'] / seconds / 1e12:7.3f} TB/s"
            if "bytes" in entry
            else f"{entry['flops'] / seconds / 1e12:7.1f} TFLOP/s"
        )
        ratio = f"{base / seconds:5.2f}x Triton" if base else ""
        print(
            f"{title:32s} {backend:14s} {speed} {ratio:14s} {result['configuration']}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", default="", help="run the entries whose name contains this")
    arguments = parser.parse_args()
    r = arguments.rounds
    entries = {"vector add fp32 2^28": lambda: vector_add(r)}
    for kind in ("softmax", "layer norm"):
        for n_rows, n_cols in ((16384, 1024), (16384, 4096), (8192, 8192), (4096, 16384)):
            entries[f"{kind} bf16 {n_rows}x{n_cols}"] = lambda kind=kind, a=n_rows, b=n_cols: rows(
                kind, a, b, r
            )
    for m, n, k in ((4096, 4096, 4096), (8192, 8192, 8192)):
        for b_nk in (False, True):
            order = "[N,K]" if b_nk else "[K,N]"
            entries[f"matmul bf16 {m}x{n}x{k} B{order}"] = lambda m=m, n=n, k=k, b_nk=b_nk: matmul(
                m, n, k, b_nk, max(r // 3, 5)
            )
    results = {"machine": timing.machine(), "command": " ".join(sys.argv), "entries": {}}
    for title, run in entries.items():
        if arguments.only in title:
            results["entries"][title] = run()
            show(title, results["entries"][title])
            torch.cuda.empty_cache()
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
