"""Training on one GPU: step time, host time, MFU, launches and peak memory of all implementations.

    python -m bench.gpu                          every setting, results under bench/results/
    python -m bench.gpu --settings compute       a part of them, or some by name
    python -m bench.gpu --budget-s 330           start nothing that would take longer than this
    python -m bench.gpu --resume FILE.json       go on from there, with what is missing
    python -m bench.gpu --device cpu --tiny      the same code on the CPU, to try it out

Each entry of a setting is a process of its own. In each round every one in turn trains a few steps
while the others wait, and gives its cached memory back; where the device does not hold all of them,
fewer are alive at a time. Results are written after each round, so that a run that is cut short
leaves what it has. Exits with 1 if an entry failed, with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.tools.run_facts import peak_flops

from .gpu_page import Measured, Outcome, as_markdown, as_values, goals_table, table_of
from .gpu_settings import (
    NUM_WARM_UP_STEPS,
    PARTS,
    SETTINGS,
    Entry,
    Setting,
    estimate_seconds,
    take_turns,
    tiny,
)
from .gpu_training import IMPLEMENTATIONS, DeviceType, build_training
from .ranks import RankError, RankGroup
from .step import rotated
from .tables import machine

NO_GPU = 2
RESULTS = Path(__file__).parent / "results"
_TIMEOUT_S = 240.0
_USABLE = 0.92  # of the device's memory: caches and fragments take some


@dataclass(frozen=True)
class Clock:
    """How long this run has taken, and how long it may take."""

    start: float
    budget_s: float

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        return self.budget_s - self.elapsed

    def say(self, text: str) -> None:
        print(f"[{self.elapsed:5.0f} s] {text}", flush=True)


def measure(
    setting: Setting,
    outcome: Outcome,
    batches: Sequence[Sequence[Entry]],
    *,
    device_type: DeviceType,
    clock: Clock,
    folder: Path,
    save: Callable[[], None],
) -> None:
    """Let every entry train in turn, batch by batch, and save after each round. One that fails is left out."""
    start = clock.elapsed
    outcome.date = time.strftime("%Y-%m-%d")
    if setting.captured and device_type == "cpu":
        outcome.notes.append("Nothing is captured on the CPU: steps run as usual.")
    if setting.compute_dtype is not None and Entry("unwrapped") in setting.entries:
        outcome.notes.append("The unwrapped model computes under autocast.")
    num_rounds = []
    for batch in batches:
        num_rounds.append(
            _measure_batch(
                setting,
                outcome,
                batch,
                device_type=device_type,
                clock=clock,
                folder=folder,
                save=save,
            )
        )
        outcome.seconds = clock.elapsed - start
    outcome.is_complete = all(each == setting.num_rounds for each in num_rounds)
    if not outcome.is_complete:
        outcome.notes.append(
            f"Cut: {' and '.join(map(str, num_rounds))} of {setting.num_rounds} rounds."
        )
    save()


def _measure_batch(
    setting: Setting,
    outcome: Outcome,
    batch: Sequence[Entry],
    *,
    device_type: DeviceType,
    clock: Clock,
    folder: Path,
    save: Callable[[], None],
) -> int:
    """Measure who is alive at the same time, and return the number of rounds."""
    measured: dict[str, Measured] = {}
    with ExitStack() as stack:
        groups = {}
        for entry in batch:
            build = partial(build_training, entry=entry, setting=setting, device_type=device_type)
            groups[entry.name] = stack.enter_context(RankGroup(entry.name, build, num_ranks=1))

        def call(name: str, method: str, *arguments: object) -> Any:
            """Return None if it failed; then the entry is gone."""
            try:
                if method == "build":
                    groups[name].wait_imported()
                limit = min(_TIMEOUT_S, max(clock.left, 30.0))
                return groups[name].call(method, *arguments, timeout_seconds=limit).values[0]
            except RankError as error:
                outcome.failed[name] = str(error)
                measured.pop(name, None)
                groups.pop(name).close()  # its memory is the others'
                clock.say(f"{setting.name}: {name} failed: {str(error).strip().splitlines()[-1]}")
                return None

        for name in list(groups):
            measured[name] = Measured()
            call(name, "build")
            if name in measured and setting.captured:
                losses = call(name, "capture", NUM_WARM_UP_STEPS)
            elif name in measured:
                turn = call(name, "run", NUM_WARM_UP_STEPS)
                losses = turn and turn.losses
            if name in measured:
                measured[name].losses += losses
                clock.say(f"{setting.name}: {name} is warm, loss {losses[-1]:.4f}")
        outcome.batches.append(measured)
        num_rounds, longest = 0, 0.0
        while measured and num_rounds < setting.num_rounds:
            if num_rounds and clock.left < longest:
                break
            began = clock.elapsed
            for name in rotated(list(measured), num_rounds):
                turn = call(name, "run", setting.num_steps)
                if turn is not None:
                    found = measured[name]
                    found.step_ms.append(turn.step_ms)
                    found.host_ms.append(turn.host_ms)
                    found.peak_mb.append(turn.peak_mb)
                    found.losses += turn.losses
            num_rounds += 1
            longest = max(longest, clock.elapsed - began)
            steps = ", ".join(f"{name} {each.step_ms[-1]:.1f}" for name, each in measured.items())
            clock.say(f"{setting.name}: round {num_rounds} of {setting.num_rounds}, ms: {steps}")
            save()
        for name in list(measured):
            if clock.left < 0:
                break
            path = None
            if name == setting.traced:
                path = folder / f"trace-{setting.name}-{_as_file_name(name)}.json.gz"
            # What cannot be traced stays measured.
            kept = measured[name]
            traced = call(name, "trace", path)
            measured[name] = kept
            if traced is not None:
                kept.counts, kept.overlap = traced
    if not measured:
        outcome.batches.remove(measured)
    return num_rounds


def _as_file_name(name: str) -> str:
    return name.replace(" ", "-").replace("=", "-")


def why_not(setting: Setting) -> str | None:
    """Say what a setting needs and is not installed."""
    if setting.fp8 and importlib.util.find_spec("torchao") is None:
        return "torchao is not installed (pip install torchao)"
    return None


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


def resumed(paths: Sequence[Path], facts: dict[str, Any]) -> dict[str, Outcome]:
    """Read the outcomes of earlier runs; of a setting that is in several, the last one that is complete.

    Raises ValueError for a file of another device or version of torch, or not written by this program.
    """
    outcomes: dict[str, Outcome] = {}
    for path in paths:
        found = json.loads(path.read_text())
        try:
            other = found["machine"]
            settings = {name: Outcome.parse(each) for name, each in found["settings"].items()}
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: not what this version of bench.gpu writes ({error}); measure anew, without --resume"
            ) from None
        for fact in ("device", "torch"):
            if other.get(fact) != facts[fact]:
                raise ValueError(
                    f"{path}: measured with {fact} {other.get(fact)}, and this is {facts[fact]}; rows of one "
                    "page are of one device: measure anew, without --resume"
                )
        for name, outcome in settings.items():
            if outcome.is_complete or name not in outcomes:
                outcomes[name] = outcome
    return outcomes


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shrink everything, to try it out")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=[*PARTS, *names], default=list(PARTS))
    parser.add_argument(
        "--implementations", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS)
    )
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), metavar="S",
        help="start no setting that is estimated to end later than this, and end after the round that does",
    )  # fmt: skip
    parser.add_argument(
        "--resume", nargs="+", type=Path, default=[], metavar="FILE",
        help="results (JSON) of earlier runs: keep their rows, and measure what is not complete there",
    )  # fmt: skip
    parser.add_argument(
        "--compiler", default="inductor", help="torch.compile's backend, where layers are compiled"
    )
    parser.add_argument(
        "--peak-tflops", type=float, metavar="T", help="dense bfloat16, of a device not known here"
    )
    parser.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="of the device, to plan with; as it says if not given",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    return parser.parse_args(arguments)


def _chosen(options: argparse.Namespace) -> list[Setting]:
    """Return the settings in the order in which they are measured, as the options change them."""
    names = [name for each in options.settings for name in PARTS.get(each, (each,))]
    by_name = {setting.name: setting for setting in SETTINGS}
    chosen = []
    for setting in (by_name[name] for name in dict.fromkeys(names)):
        wanted = tuple(e for e in setting.entries if e.implementation in options.implementations)
        compiler = options.compiler if setting.compiler else None
        changed = dataclasses.replace(setting, entries=wanted, compiler=compiler)
        chosen.append(tiny(changed) if options.tiny else changed)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; see --device cpu", file=sys.stderr)
        return NO_GPU
    clock = Clock(time.perf_counter(), options.budget_s)
    facts = device_facts(options.device)
    try:
        outcomes = resumed(options.resume, facts)
    except (OSError, ValueError) as error:
        print(f"bench.gpu: {error}", file=sys.stderr)
        return 1
    peak = (
        1e12 * options.peak_tflops if options.peak_tflops else peak_flops(facts["device"], "bf16")
    )
    gigabytes = options.memory_gb or facts.get("device_memory_gb")
    usable = None if gigabytes is None else round(_USABLE * 1e9 * gigabytes)
    chosen = _chosen(options)
    every = [tiny(each) if options.tiny else each for each in SETTINGS]
    shown = [*chosen, *(each for each in every if each.name not in {c.name for c in chosen})]
    stem = f"gpu-{facts['device'].replace(' ', '-').lower()}-{time.strftime('%Y-%m-%d')}"
    options.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        text = json.dumps(as_values(facts, outcomes), indent=2)
        (options.out / f"{stem}.json").write_text(text + "\n")
        (options.out / f"{stem}.md").write_text(as_markdown(facts, shown, outcomes, peak))

    not_started = []
    for setting in chosen:
        if setting.name in outcomes and outcomes[setting.name].is_complete:
            clock.say(f"{setting.name}: complete in what is resumed")
            continue
        reason = why_not(setting)
        turns = take_turns(setting, usable)
        needed = estimate_seconds(setting, turns.batches)
        if reason is None and needed > clock.left:
            not_started.append(setting.name)
            clock.say(
                f"{setting.name}: not started, takes about {needed:.0f} s and {clock.left:.0f} are left"
            )
            continue
        outcome = outcomes[setting.name] = Outcome(left_out=dict(turns.left_out))
        if reason is not None:
            outcome.left_out |= {entry.name: reason for entry in setting.entries}
        else:
            names = " | ".join(", ".join(e.name for e in batch) for batch in turns.batches)
            clock.say(f"{setting.name}: about {needed:.0f} s; in turn: {names}")
            measure(
                setting,
                outcome,
                turns.batches,
                device_type=options.device,
                clock=clock,
                folder=options.out,
                save=save,
            )
        table_of(setting, outcome, peak).print()
    save()
    goals_table(shown, outcomes, peak).print()
    if not_started:
        again = f"--resume {options.out / stem}.json"
        clock.say(f"not started: {', '.join(not_started)}; {again} goes on with them")
    failed = any(outcomes[each.name].failed for each in chosen if each.name in outcomes)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
