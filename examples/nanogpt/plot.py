"""Loss curves of several runs in one picture."""

from __future__ import annotations

from pathlib import Path

from examples.nanogpt.train import Record


def plot(records: dict[str, Record], to: Path) -> None:
    """Training loss (every step) and validation loss of each run, and their difference from the
    first run's; a PNG. Needs matplotlib (the extra `examples`)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, differences) = pyplot.subplots(2, 1, figsize=(8, 8), sharex=True)
    first = next(iter(records.values()))
    for name, record in records.items():
        (line,) = curves.plot(record.losses, linewidth=0.5, alpha=0.5)
        steps = [e[0] for e in record.evaluations]
        values = [e[2] for e in record.evaluations]
        curves.plot(steps, values, color=line.get_color(), marker=".", label=f"{name}, validation")
        if record is not first:
            gap = [a - b for a, b in zip(record.losses, first.losses, strict=False)]
            differences.plot(gap, linewidth=0.5, color=line.get_color(), label=name)
    curves.set_ylabel("loss")
    curves.legend()
    differences.set_ylabel(f"training loss less that of {next(iter(records))}")
    differences.set_xlabel("step")
    if len(records) > 1:
        differences.legend()
    figure.tight_layout()
    figure.savefig(to, dpi=120)
    pyplot.close(figure)
