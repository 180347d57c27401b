"""Draw docs/images/step-times.png from the recorded results of `make bench`.

    .venv/bin/python scripts/draw_step_times.py

Every setting of the step benchmark in the file is a group of bars; none is left out. A bar is the
median over the rounds of a step's time over FSDP2's in the same round, the thin line on it reaches
from the lowest round to the highest.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib import rcParams
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "2026-11-22-amd-epyc.json"
PICTURE = ROOT / "docs" / "images" / "step-times.png"

# By their names in the file: what the legend says, and a colour that prints in grey as well.
IMPLEMENTATIONS = {
    "deepspeed": ("DeepSpeed ZeRO-3", "#e3e6ea"),
    "fsdp2": ("PyTorch FSDP2", "#c3c9d0"),
    "fsdp1": ("PyTorch FSDP1", "#a1a9b3"),
    "ddp": ("DDP, nothing sharded", "#7c8692"),
    "fullshard": ("fullshard: fully_shard", "#0072b2"),
    "fullshard-fsdp1": ("fullshard: FullyShardedDataParallel", "#56b4e9"),
}
WIDTH = 0.82 / len(IMPLEMENTATIONS)  # of the distance between two groups


class Ratio(NamedTuple):
    """A step's time over FSDP2's: the median of the rounds, and their range."""

    median: float
    lowest: float
    highest: float


def ratios_by_setting(results: dict[str, Any]) -> dict[str, dict[str, Ratio]]:
    """Return the ratios of each implementation by setting: "2 ranks, batch 2x128, fp32"."""
    found = {}
    for title, section in results.items():
        if title.startswith("step: ranks "):
            ranks, _, rest = title.removeprefix("step: ranks ").partition(", ")
            found[f"{ranks} ranks, {rest}"] = {
                name: Ratio(median(rounds), min(rounds), max(rounds))
                for name, values in section["comparison"].items()
                if name in IMPLEMENTATIONS and (rounds := values["over_fsdp2"])
            }
    return found


def draw(measured: dict[str, dict[str, Ratio]], note: str, path: Path) -> None:
    """Write the picture as PNG, with a note on where this was measured."""
    rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(10, 3.7), layout="constrained")
    axes = figure.subplots()
    for i, (name, (label, colour)) in enumerate(IMPLEMENTATIONS.items()):
        there = [(g, bars[name]) for g, bars in enumerate(measured.values()) if name in bars]
        places = [g + (i - (len(IMPLEMENTATIONS) - 1) / 2) * WIDTH for g, _ in there]
        heights = [ratio.median for _, ratio in there]
        spread = [
            [ratio.median - ratio.lowest for _, ratio in there],
            [ratio.highest - ratio.median for _, ratio in there],
        ]
        axes.bar(places, heights, WIDTH * 0.9, color=colour, label=label)
        axes.errorbar(places, heights, spread, fmt="none", ecolor="#444", elinewidth=1)
    axes.axhline(1, color="#555", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(measured)), [_in_lines(setting) for setting in measured])
    axes.set_ylabel("step time over FSDP2's (less is better)")
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.01)
    axes.set_title(note, loc="right", fontsize=8, color="#555")
    figure.legend(loc="outside upper center", ncols=6, frameon=False, handlelength=1, fontsize=8.5)
    described = {"Software": None, "Description": json.dumps(measured)}  # so that a test can tell
    figure.savefig(path, dpi=150, metadata=described)


def _in_lines(setting: str) -> str:
    """ "2 ranks, batch 2x128, fp32" in as many lines as it has parts."""
    return setting.replace(", ", "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    recorded = json.loads(RESULTS.read_text())
    machine = "CPU ranks of one host: {cores}-core {cpu}, torch {torch}, {date}"
    draw(ratios_by_setting(recorded), machine.format(**recorded["machine"]), target)
    print(target)
