"""The loss curve of a run as a picture."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # before pyplot: there may be no display

import matplotlib.pyplot as plt


def plot_loss(
    path: Path,
    steps: Sequence[int],
    losses: Sequence[float],
    *,
    held_out: Mapping[int, float],
    unigram_entropy: float,
    title: str,
    unit: str,
) -> None:
    """Draw each step's loss, a running mean, that of text held out, and the entropy that only context beats."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="#9ecae1", linewidth=0.8, label="each step")
    axes.plot(steps, running_mean(losses), color="#08519c", linewidth=2, label="running mean")
    if held_out:
        axes.plot([*held_out], [*held_out.values()], "o-", color="#238b45", label="held out", ms=4)
    axes.axhline(unigram_entropy, color="#d94801", linestyle="--", linewidth=1.2)
    axes.annotate(
        f"unigram entropy {unigram_entropy:.2f}",
        xy=(1, unigram_entropy),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        color="#d94801",
    )
    axes.set(xlabel="step", ylabel=f"loss (nats per {unit})", title=title)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def running_mean(values: Sequence[float], *, weight: float = 0.95) -> list[float]:
    """Average exponentially, without the pull towards zero at the start.

    With weight 0.5, (4, 2) gives 4 and (0.5 * 4 + 2) / (0.5 + 1) = 2.67. What is not finite stays so, and
    counts in no other mean.
    """
    total = count = 0.0
    means = []
    for value in values:
        if not math.isfinite(value):
            means.append(value)
            continue
        total = weight * total + value
        count = weight * count + 1
        means.append(total / count)
    return means
