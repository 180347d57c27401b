"""Planned beside measured, on one GPU: peak bytes of tensors, and seconds of a step.

    python -m bench.gpu_planned                    12 settings, within six minutes
    python -m bench.gpu_planned --plan-only        the plans alone, which need no GPU (with --gpu NAME)
    python -m bench.gpu_planned --device cpu --tiny   the same code on the CPU, to try it out: its times mean nothing

Plans are cold: of the GPU's preset, with nothing measured on it, and none of these settings is one that constants were
fitted to. Each line is printed, and the results written, as soon as it is known. Exits with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fullshard
from fullshard.models.llama import Llama
from fullshard.planning.machines import GPUS
from fullshard.planning.training import TrainingPlan

from .gpu_settings import _1B, _3B, _350M, NUM_WARM_UP_STEPS, Entry, Setting, tiny
from .gpu_training import DeviceType, build_training
from .ranks import RankError, RankGroup
from .tables import Table, machine

NO_GPU = 2
_ENTRY = Entry("fullshard")
_FP32, _BF16 = torch.float32, torch.bfloat16
_TIMEOUT_S = 120.0
OUT = Path(__file__).parent / "results" / "card"


def _setting(name: str, config: Any, sequences: int, tokens: int, **options: Any) -> Setting:
    return Setting(name, config, sequences, tokens, (_ENTRY,), 1.0, **options)


_MIXED: dict[str, Any] = {"dtype": _FP32, "compute_dtype": _BF16}
SETTINGS = (
    _setting("350m 8x1024", _350M, 8, 1024),
    _setting("350m 16x2048 recomputed", _350M, 16, 2048, recompute=True),
    _setting("350m 8x2048 mixed", _350M, 8, 2048, **_MIXED),
    _setting("350m 2x8192", _350M, 2, 8192),
    _setting("1b 4x1024", _1B, 4, 1024),
    _setting("1b 4x4096", _1B, 4, 4096),
    _setting("1b 8x4096 recomputed", _1B, 8, 4096, recompute=True),
    _setting("1b 4x2048 mixed", _1B, 4, 2048, **_MIXED),
    _setting("1b 8x2048 mixed recomputed", _1B, 8, 2048, recompute=True, **_MIXED),
    _setting("3b 1x4096", _3B, 1, 4096),
    _setting("3b 2x8192 recomputed", _3B, 2, 8192, recompute=True),
    _setting("3b 2x4096 mixed recomputed", _3B, 2, 4096, recompute=True, **_MIXED),
)


@dataclass(frozen=True)
class Outcome:
    """A setting, planned and measured; nan where it was not measured, and why."""

    name: str
    planned_mb: float
    planned_ms: float
    measured_mb: float = float("nan")
    measured_ms: float = float("nan")
    error: str = ""

    @property
    def line(self) -> list[str]:
        memory, step = self.planned_mb / self.measured_mb, self.planned_ms / self.measured_ms
        return [
            self.name,
            *(f"{self.planned_mb:,.0f}", f"{self.measured_mb:,.0f}", f"{memory:.4f}"),
            *(f"{self.planned_ms:.1f}", f"{self.measured_ms:.1f}", f"{step:.3f}"),
            self.error,
        ]


def _model(setting: Setting) -> torch.nn.Module:
    model = Llama(setting.config).to(setting.dtype)
    model.recompute_layers(setting.recompute)
    return model


def plan_of(setting: Setting, gpu: str) -> TrainingPlan:
    """Plan a setting for one GPU of a preset."""
    setup = fullshard.TrainingSetup(
        fullshard.machine_named(gpu),
        ranks=1,
        batch=setting.sequences,
        seq=setting.tokens,
        precision=fullshard.MixedPrecisionPolicy(
            setting.compute_dtype, torch.float32 if setting.compute_dtype is not None else None
        ),
        is_fused=True,
    )
    return fullshard.plan_training(partial(_model, setting), setup)


def measure(
    setting: Setting, device: DeviceType, *, num_rounds: int = 3, num_steps: int = 3
) -> Any:
    """Return the peak in MB, and the median time of a step in ms."""
    build = partial(build_training, entry=_ENTRY, setting=setting, device_type=device)
    with RankGroup(setting.name, build, num_ranks=1) as group:
        group.wait_imported()
        group.call("build", timeout_seconds=_TIMEOUT_S)
        group.call("run", NUM_WARM_UP_STEPS, timeout_seconds=_TIMEOUT_S)
        turns = [
            group.call("run", num_steps, timeout_seconds=_TIMEOUT_S).values[0]
            for _ in range(num_rounds)
        ]
    return max(turn.peak_mb for turn in turns), statistics.median(turn.step_ms for turn in turns)


def preset_of_this_gpu() -> str:
    """Return the preset whose model is in the device's name."""
    name = torch.cuda.get_device_name()
    for preset in GPUS:
        if preset.partition("-")[0] in name:
            return preset
    raise SystemExit(f"{name} has no preset: give --gpu, one of {', '.join(GPUS)}")


def _run(options: argparse.Namespace, gpu: str) -> list[Outcome]:
    began, outcomes = time.monotonic(), []
    for setting in SETTINGS:
        chosen = tiny(setting) if options.tiny else setting
        plan = plan_of(chosen, gpu)
        outcome = Outcome(setting.name, plan.memory.tensors_nbytes / 1e6, 1e3 * plan.time.step_s)
        if not options.plan_only:
            if time.monotonic() - began > options.budget_s:
                outcome = dataclasses.replace(outcome, error="no time left")
            else:
                try:
                    peak_mb, step_ms = measure(chosen, options.device)
                    outcome = dataclasses.replace(
                        outcome,
                        measured_mb=peak_mb or float("nan"),  # the CPU counts none
                        measured_ms=step_ms,
                    )
                except RankError as error:
                    outcome = dataclasses.replace(outcome, error=str(error).splitlines()[-1])
        outcomes.append(outcome)
        print("  ".join(outcome.line), flush=True)
        values = {"machine": machine(), "gpu": gpu, "planned": [asdict(each) for each in outcomes]}
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu-planned.json").write_text(json.dumps(values, indent=2) + "\n")
    return outcomes


def table_of(outcomes: Sequence[Outcome], gpu: str) -> Table:
    headings = ["", "MB planned", "measured", "ratio", "ms planned", "measured", "ratio", ""]
    table = Table(f"planned beside measured: {gpu}", headings)
    table.rows = [outcome.line for outcome in outcomes]
    measured = [each for each in outcomes if each.measured_ms == each.measured_ms]
    if measured:
        memory = statistics.median(abs(e.planned_mb / e.measured_mb - 1) for e in measured)
        step = statistics.median(abs(e.planned_ms / e.measured_ms - 1) for e in measured)
        table.notes = [f"medians: memory off by {memory:.2%}, time by {step:.1%}"]
    return table


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_planned", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--gpu", choices=list(GPUS), help="preset; default: that of this GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--budget-s", type=float, default=330.0, help="begin nothing after it")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    needs_gpu = options.device == "cuda" and not options.plan_only
    if needs_gpu and not torch.cuda.is_available():
        print("bench.gpu_planned: there is no GPU (--plan-only plans without)", file=sys.stderr)
        return NO_GPU
    gpu = options.gpu or (preset_of_this_gpu() if torch.cuda.is_available() else "H200-141GB-SXM")
    outcomes = _run(options, gpu)
    table_of(outcomes, gpu).print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
