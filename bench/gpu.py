"""Training on one GPU: step time, host time and peak memory of all implementations.

    python -m bench.gpu                          every setting, results under bench/results/
    python -m bench.gpu --settings small         some of them
    python -m bench.gpu --device cpu --tiny      the same code on the CPU in seconds, to try it out

Each implementation of a setting is a process of its own. In each round every one in turn trains a
few steps while the others wait, and gives its cached memory back. Results are written after each
setting, so that a run that is cut short leaves what it has. Exits with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.models.sizes import SIZES, LlamaConfig

from .gpu_training import IMPLEMENTATIONS, DeviceType, Setting, Turn, build_training
from .ranks import RankError, RankGroup
from .tables import Progress, Spread, Table, machine, ratio_spread, spread

NO_GPU = 2
RESULTS = Path(__file__).parent / "results"
_EVERYBODY = tuple(IMPLEMENTATIONS)
_TIMEOUT_S = 240.0

SETTINGS = (
    Setting(
        "1b",
        dataclasses.replace(SIZES["1b"], vocab_size=32768),
        sequences=2,
        tokens=2048,
        implementations=_EVERYBODY,
    ),
    Setting(
        "350m-mixed",
        dataclasses.replace(SIZES["350m"], vocab_size=32768),
        sequences=4,
        tokens=1024,
        implementations=("fsdp2", "fsdp1", "fullshard", "fullshard-fsdp1"),
        dtype=torch.float32,
        compute_dtype=torch.bfloat16,
    ),
    Setting(
        "small",
        LlamaConfig(hidden_size=128, intermediate_size=256, num_layers=48, num_heads=4),
        sequences=1,
        tokens=64,
        implementations=_EVERYBODY,
        num_rounds=7,
        num_steps=10,
    ),
    Setting(
        "offload",
        dataclasses.replace(SIZES["350m"], vocab_size=32768),
        sequences=4,
        tokens=1024,
        implementations=("fsdp2", "fullshard"),
        dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        offload=True,
        num_steps=3,
    ),
)
_TRACED = {"1b": "fullshard", "offload": "fullshard"}


@dataclasses.dataclass
class Measured:
    """What one implementation did, a value a round."""

    step_ms: list[float] = dataclasses.field(default_factory=list)
    host_ms: list[float] = dataclasses.field(default_factory=list)
    peak_mb: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    def add(self, turn: Turn) -> None:
        self.step_ms.append(turn.step_ms)
        self.host_ms.append(turn.host_ms)
        self.peak_mb.append(turn.peak_mb)
        self.losses += turn.losses


@dataclasses.dataclass
class Outcome:
    """A setting's measurements, what failed, and what a trace showed."""

    measured: dict[str, Measured]
    failed: dict[str, str]
    overlap: str = ""


def measure(setting: Setting, device_type: DeviceType, folder: Path) -> Outcome:
    """Let every implementation train in turn. One that fails is left out."""
    names = setting.implementations
    progress = Progress(setting.name, num_stages=len(names) * (setting.num_rounds + 1))
    outcome = Outcome({}, {})
    with ExitStack() as stack:
        groups = {}
        for name in names:
            build = partial(
                build_training, implementation=name, setting=setting, device_type=device_type
            )
            groups[name] = stack.enter_context(RankGroup(name, build, num_ranks=1))
        for name in names:
            progress.advance(f"{name} warms up")
            try:
                groups[name].wait_imported()
                groups[name].call("build", timeout_seconds=_TIMEOUT_S)
                groups[name].call("run", 3, timeout_seconds=_TIMEOUT_S)
                outcome.measured[name] = Measured()
            except RankError as error:
                outcome.failed[name] = str(error)
        for index in range(setting.num_rounds):
            for name in _rotated(list(outcome.measured), index):
                progress.advance(f"{name} round {index + 1} of {setting.num_rounds}")
                try:
                    answer = groups[name].call("run", setting.num_steps, timeout_seconds=_TIMEOUT_S)
                    outcome.measured[name].add(answer.values[0])
                except RankError as error:
                    outcome.failed[name] = str(error)
                    del outcome.measured[name]
        traced = _TRACED.get(setting.name)
        if traced in outcome.measured:
            path = folder / f"trace-{setting.name}-{traced}.json.gz"
            try:
                answer = groups[traced].call("trace", path, timeout_seconds=_TIMEOUT_S)
                outcome.overlap = f"{traced}: {answer.values[0]}"
            except RankError as error:
                outcome.failed[f"{traced} (trace)"] = str(error)
    progress.finish()
    return outcome


def _rotated(names: Sequence[str], index: int) -> list[str]:
    start = index % max(len(names), 1)
    return [*names[start:], *names[:start]]


def table_of(setting: Setting, outcome: Outcome) -> Table:
    """Compare the implementations of a setting, round by round."""
    size = setting.config
    title = (
        f"{setting.name}: {size.num_layers} layers of width {size.hidden_size}, batch "
        f"{setting.sequences}x{setting.tokens}, {setting.dtype}"
        + (f" computing in {setting.compute_dtype}" if setting.compute_dtype else "")
        + (", offloaded" if setting.offload else "")
    ).replace("torch.", "")
    table = Table(
        title,
        ["", "step ms", "host ms", "over unwrapped", "over fsdp2", "peak MB", "over fsdp2"],
    )
    measured = outcome.measured
    for name, found in measured.items():
        steps, peak = spread(found.step_ms), spread(found.peak_mb).median
        base = measured.get("fsdp2")
        base_peak = spread(base.peak_mb).median if base else 0.0
        table.rows.append(
            [
                name,
                _ms(steps),
                _ms(spread(found.host_ms)),
                *(_over(found, measured.get(other)) for other in ("unwrapped", "fsdp2")),
                f"{peak:,.0f}",
                f"{peak / base_peak:.2f}" if base_peak else "-",
            ]
        )
    difference = largest_loss_difference(measured)
    table.notes.append(f"Losses of the first {_NUM_COMPARED} steps differ by {difference:.1e}.")
    table.notes += [f"Overlap: {outcome.overlap}."] if outcome.overlap else []
    table.notes += [
        f"{name} failed: {text.strip().splitlines()[-1]}" for name, text in outcome.failed.items()
    ]
    return table


_NUM_COMPARED = 3


def largest_loss_difference(measured: dict[str, Measured]) -> float:
    """Return by how much the first losses of the implementations differ."""
    columns = zip(*(found.losses[:_NUM_COMPARED] for found in measured.values()), strict=False)
    return max((max(column) - min(column) for column in columns), default=0.0)


def _over(found: Measured, base: Measured | None) -> str:
    return str(ratio_spread(found.step_ms, base.step_ms)) if base else "-"


def _ms(times: Spread) -> str:
    return f"{times.median:.1f}"


def device_facts(device_type: DeviceType) -> dict[str, Any]:
    """Say on what this was measured."""
    facts: dict[str, Any] = {**machine(), "device": "CPU"}
    if device_type == "cuda":
        driver = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "device_memory_gb": round(properties.total_memory / 1e9, 1),
            "driver": driver.stdout.strip(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return facts


def as_markdown(facts: dict[str, Any], tables: Sequence[Table]) -> str:
    """Write the tables as a page."""
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    lines = ["# Training on one GPU", "", f"Measured on: {about}.", "", _HOW, ""]
    for table in tables:
        lines += [f"## {table.title}", "", _row(table.columns), _row(["---"] * len(table.columns))]
        lines += [_row(row) for row in table.rows]
        lines += ["", *table.notes, ""]
    return "\n".join(lines)


_HOW = (
    "Medians over rounds in which the implementations took turns; ratios are medians of the ratios "
    "within a round (lowest to highest). Host ms is when the host was free again. `python -m "
    "bench.gpu` repeats it."
)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def tiny(setting: Setting) -> Setting:
    """Shrink a setting so that it runs in a second."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
    )
    return dataclasses.replace(
        setting, config=config, sequences=1, tokens=8, num_rounds=2, num_steps=2
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shrink everything, to try it out")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--implementations", nargs="+", choices=_EVERYBODY, default=_EVERYBODY)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; see --device cpu", file=sys.stderr)
        return NO_GPU
    facts = device_facts(options.device)
    tables, results = [], {}
    name = f"gpu-{facts['device'].replace(' ', '-').lower()}-{time.strftime('%Y-%m-%d')}"
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for setting in (each for each in SETTINGS if each.name in options.settings):
        chosen = tiny(setting) if options.tiny else setting
        wanted = tuple(n for n in chosen.implementations if n in options.implementations)
        chosen = dataclasses.replace(chosen, implementations=wanted)
        outcome = measure(chosen, options.device, options.out)
        failed |= bool(outcome.failed)
        tables.append(table_of(chosen, outcome))
        tables[-1].print()
        results[chosen.name] = dataclasses.asdict(outcome)
        text = json.dumps({"machine": facts, "settings": results}, indent=2)
        (options.out / f"{name}.json").write_text(text + "\n")
        (options.out / f"{name}.md").write_text(as_markdown(facts, tables))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
