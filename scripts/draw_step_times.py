"""Draw docs/images/step-times.png from the recorded results of `make bench`.

    .venv/bin/python scripts/draw_step_times.py

Two settings, a small batch and a large one: of each the time of a step and the memory, over FSDP2's. A bar of
time is the median over the rounds, each taken over FSDP2's in the same round; the thin line reaches from the
lowest round to the highest. docs/results.md has all settings.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from matplotlib import rcParams
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "step-times.png"

# By the titles of their tables: what stands below the bars.
SETTINGS = {
    "step: ranks 2, batch 2x128, fp32": "small batch\n2 x 128 tokens a rank",
    "step: ranks 2, batch 8x256, fp32": "large batch\n8 x 256 tokens a rank",
}
# By their names in the tables: what the legend says, and a colour that prints in grey as well.
IMPLEMENTATIONS = {
    "fsdp2": ("PyTorch's FSDP2", "#a1a9b3"),
    "fullshard-unmodified": ("fullshard, script unmodified", "#56b4e9"),
    "fullshard": ("fullshard, with step_on_shards", "#0072b2"),
}
WIDTH = 0.82 / len(IMPLEMENTATIONS)  # of the distance between two groups


class Measured(NamedTuple):
    """What one program took over FSDP2: of a step's time the median of the rounds and their range; of memory the peak."""

    time: float
    lowest: float
    highest: float
    memory: float


def newest() -> Path:
    """Return the newest file of results that has both settings, and in them, if any file does, every program."""
    found = [
        (len(programs), path.name, path)
        for path in (ROOT / "bench" / "results").glob("20*.json")
        if (sections := json.loads(path.read_text())).keys() >= SETTINGS.keys()
        and (programs := IMPLEMENTATIONS.keys() & sections[min(SETTINGS)]["comparison"].keys())
    ]
    return max(found)[-1]


def measured(results: dict[str, Any]) -> dict[str, dict[str, Measured]]:
    """Return what the picture shows: {"step: ranks 2, batch 2x128, fp32": {"fullshard": ...}}."""
    return {
        setting: {
            name: Measured(
                *(round(pick(rows[name]["over_fsdp2"]), 3) for pick in (median, min, max)),
                memory=round(rows[name]["pss_mb"] / rows["fsdp2"]["pss_mb"], 3),
            )
            for name in IMPLEMENTATIONS
            if name in rows
        }
        for setting in SETTINGS
        for rows in [results[setting]["comparison"]]
    }


def draw(bars: dict[str, dict[str, Measured]], path: Path) -> None:
    """Write the picture as PNG; a test reads from it what it shows."""
    rcParams.update({"font.size": 12, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(7.6, 4), layout="constrained")
    times, memories = figure.subplots(ncols=2, sharey=True)
    for i, (name, (label, colour)) in enumerate(IMPLEMENTATIONS.items()):
        there = [(g, row[name]) for g, row in enumerate(bars.values()) if name in row]
        places = [g + (i - (len(IMPLEMENTATIONS) - 1) / 2) * WIDTH for g, _ in there]
        for axes, heights in (
            (times, [bar.time for _, bar in there]),
            (memories, [bar.memory for _, bar in there]),
        ):
            drawn = axes.bar(places, heights, WIDTH * 0.9, color=colour)
            axes.bar_label(
                drawn, [f"{height:.2f}" for height in heights], label_type="center", fontsize=10,
                color="white" if name == "fullshard" else "black",
            )  # fmt: skip
        spread = [
            [bar.time - bar.lowest for _, bar in there],
            [bar.highest - bar.time for _, bar in there],
        ]
        times.errorbar(places, [bar.time for _, bar in there], spread, fmt="none", ecolor="#444")
        times.plot([], color=colour, linewidth=8, label=label)
    for axes, title in ((times, "time of a step"), (memories, "host memory")):
        axes.axhline(1, color="#555", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xticks(range(len(bars)), [SETTINGS[setting] for setting in bars], fontsize=10)
        axes.tick_params(axis="x", length=0)
        axes.set_title(title, fontsize=12)
    times.set_ylabel("over FSDP2's (less is better)")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, handlelength=1, fontsize=11)
    described = {"Software": None, "Description": json.dumps(bars)}
    figure.savefig(path, dpi=150, metadata=described)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    draw(measured(json.loads(newest().read_text())), target)
    print(target)
