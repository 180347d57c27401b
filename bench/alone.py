"""What one rank costs over the unwrapped model, to a percent.

    python -m bench.alone --rounds 40
    python -m bench.alone --compile --rounds 3    what `torch.compile` of its blocks takes

At world size 1 nothing has to move, so wrapping should cost nothing. One percent is less than what
a busy machine adds to any single step; what finds it all the same:

- Every implementation has a process of its own, all bound to the same core; only one works at a
  time.
- A turn is one step, so the turns of a round are seconds apart, and their ratio is taken within
  the round. The order of turns is reversed in every second round.
- Beside wall time stands the CPU time of the process (user and system, all its threads), which
  does not run while somebody else has the core.
- The median of the ratios comes with its 95 % interval, by order statistics.

Compiling is measured in the same way, but in a new process and with an empty cache of Inductor's each
time: the first steps of a Llama whose layers are compiled, until nothing is compiled any more. What
the C++ compiler takes, most of it, is the same for everybody; so the process's own CPU time
(Dynamo, AOTAutograd, Inductor) stands beside the time with the compiler's. On a busy machine both vary
by a third; the number of Python's function calls, counted in one more process each, does not.
"""

import argparse
import cProfile
import os
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fullshard.models.llama import Llama, init_weights
from fullshard.models.sizes import LlamaConfig

from . import gpu_training
from .gpu_settings import Entry, Setting
from .implementations import IMPLEMENTATIONS, Training, Work, why_not
from .ranks import Rank, RankGroup
from .step import rotated
from .tables import (
    Interval,
    Progress,
    Table,
    add_output_options,
    emit,
    median_interval,
    positive,
    ratio_spread,
    spread,
)

WORK = Work(mesh_shape=(1,))
BASE = "local"
MEASURED = ("local", "ddp", "fsdp1", "fsdp2", "deepspeed", "fullshard", "fullshard-fsdp1")
_NUM_WARM_UP_STEPS = 5


class Turn(NamedTuple):
    """Seconds of one step."""

    wall: float
    cpu: float


class TimedTraining(Training):
    """The only rank of an implementation, on the core that all of them share."""

    def __init__(self, rank: Rank, implementation: str) -> None:
        # Before any thread starts: threads inherit it.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        super().__init__(rank, implementation, WORK)

    def turn(self) -> Turn:
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        return Turn(time.perf_counter() - wall, time.process_time() - cpu)


def build_timed(rank: Rank, *, implementation: str) -> TimedTraining:
    return TimedTraining(rank, implementation)


@dataclass
class Measured:
    """One entry per round."""

    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


Results = dict[str, Measured]


def measure(implementations: Sequence[str] = MEASURED, *, num_rounds: int = 40) -> Results:
    names = [name for name in implementations if why_not(name, WORK) is None]
    results = {name: Measured() for name in names}
    with Progress("one rank", num_stages=num_rounds + 1) as progress, ExitStack() as stack:
        progress.advance("warms up")
        groups = {}
        for name in names:
            build = partial(build_timed, implementation=name)
            groups[name] = stack.enter_context(RankGroup(name, build, num_ranks=1))
        for group in groups.values():
            group.wait_imported()
            group.call("build")
            group.call("run", _NUM_WARM_UP_STEPS)
        for index in range(num_rounds):
            progress.advance(f"round {index + 1} of {num_rounds}")
            order = rotated(names, index // 2)
            for name in reversed(order) if index % 2 else order:
                turn: Turn = groups[name].call("turn").values[0]
                results[name].wall_seconds.append(turn.wall)
                results[name].cpu_seconds.append(turn.cpu)
    return results


def wall_ratio(results: Results, name: str) -> Interval:
    return _ratio(results[name].wall_seconds, results[BASE].wall_seconds)


def cpu_ratio(results: Results, name: str) -> Interval:
    return _ratio(results[name].cpu_seconds, results[BASE].cpu_seconds)


def _ratio(values: Sequence[float], base: Sequence[float]) -> Interval:
    return median_interval([value / other for value, other in zip(values, base, strict=True)])


def build_table(results: Results) -> Table:
    headings = ["", "step ms", "wall over unwrapped", "CPU time over unwrapped"]
    table = Table("one rank against the unwrapped model", headings)
    for name, measured in results.items():
        milliseconds = 1e3 * median_interval(measured.wall_seconds).median
        ratios = (wall_ratio(results, name), cpu_ratio(results, name))
        table.rows.append([name, f"{milliseconds:.0f}", *map(str, ratios)])
    num_rounds = len(results[BASE].wall_seconds)
    table.notes = [
        f"median of {num_rounds} rounds of one step, and where the true median lies with 95 %"
    ]
    return table


def results_json(results: Results) -> dict[str, Any]:
    return {"alone": {name: asdict(measured) for name, measured in results.items()}}


# Compiling

_COMPILED = Setting(
    "compile",
    LlamaConfig(hidden_size=128, intermediate_size=256, num_layers=4, num_heads=4),
    sequences=2,
    tokens=64,
    entries=tuple(map(Entry, ("unwrapped", "fsdp2", "fullshard", "fsdp1", "fullshard-fsdp1"))),
    step_s=0.0,
)
_NUM_COMPILING_STEPS = 3
_COMPILE_TIMEOUT_S = 900.0


class Compiling(NamedTuple):
    """Seconds until nothing is compiled any more: on the clock, of all CPU time, of the process's own."""

    wall: float
    cpu: float
    own_cpu: float


class CompiledTraining:
    """The only rank of an implementation, in a process that has compiled nothing yet."""

    def __init__(self, rank: Rank, implementation: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        os.environ |= {
            "TORCHINDUCTOR_CACHE_DIR": self._folder.name,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in this process, so that its children are all
        }
        if implementation != "unwrapped":
            rank.init_gloo()
        model = Llama(_COMPILED.config)
        init_weights(model, seed=0)
        for layer in model.model.layers:
            layer.compile()
        wrap = gpu_training.IMPLEMENTATIONS[implementation]
        self._model = wrap(model, _COMPILED, Entry(implementation), torch.device("cpu"))

    def first_steps(self) -> Compiling:
        import torch._inductor.compile_fx  # noqa: PLC0415  (takes seconds for everybody)

        tokens = torch.randint(_COMPILED.config.vocab_size, (2, _COMPILED.tokens + 1))
        wall, before = time.perf_counter(), _cpu_seconds()
        for _ in range(_NUM_COMPILING_STEPS):
            logits = self._model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            self._model.zero_grad()
        own, children = (now - then for now, then in zip(_cpu_seconds(), before, strict=True))
        return Compiling(time.perf_counter() - wall, own + children, own)

    def count_calls(self) -> int:
        """Return how many functions are called until nothing is compiled any more."""
        profile = cProfile.Profile()
        profile.runcall(self.first_steps)
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def _cpu_seconds() -> tuple[float, float]:
    """Return the CPU time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, children = (each.ru_utime + each.ru_stime for each in used)
    return own, children


def build_compiled(rank: Rank, *, implementation: str) -> CompiledTraining:
    return CompiledTraining(rank, implementation)


@dataclass
class Compiled:
    """One entry per round, and the calls of one more."""

    turns: list[Compiling] = field(default_factory=list)
    num_calls: int = 0


def measure_compiling(implementations: Sequence[str], *, num_rounds: int) -> dict[str, Compiled]:
    wanted = {"unwrapped", "fsdp2", *implementations}  # what the others are compared with
    names = [entry.name for entry in _COMPILED.entries if entry.name in wanted]
    results = {name: Compiled() for name in names}
    with Progress("compiling", num_stages=(num_rounds + 1) * len(names)) as progress:
        for index in range(num_rounds + 1):
            counts = index == num_rounds
            for name in rotated(names, index):
                progress.advance(f"{name}, round {index + 1} of {num_rounds + 1}")
                build = partial(build_compiled, implementation=name)
                with RankGroup(name, build, num_ranks=1) as group:
                    group.wait_imported()
                    group.call("build")
                    method = "count_calls" if counts else "first_steps"
                    (value,) = group.call(method, timeout_seconds=_COMPILE_TIMEOUT_S).values
                if counts:
                    results[name].num_calls = value
                else:
                    results[name].turns.append(value)
    return results


def build_compiling_table(results: dict[str, Compiled]) -> Table:
    headings = ["", "CPU s", "over unwrapped", "over FSDP2", "its own CPU s", "over FSDP2"]
    headings += ["calls", "over FSDP2"]
    table = Table("compiling the layers of a Llama, one rank", headings)
    cpu = {name: [turn.cpu for turn in each.turns] for name, each in results.items()}
    own = {name: [turn.own_cpu for turn in each.turns] for name, each in results.items()}
    for name, each in results.items():
        cells = [f"{spread(cpu[name]).median:.1f}", ratio_spread(cpu[name], cpu["unwrapped"])]
        cells += [ratio_spread(cpu[name], cpu["fsdp2"]), f"{spread(own[name]).median:.1f}"]
        cells += [ratio_spread(own[name], own["fsdp2"]), f"{each.num_calls:,}"]
        table.rows.append(
            [name, *map(str, cells), f"{each.num_calls / results['fsdp2'].num_calls:.3f}"]
        )
    num_rounds = len(results["fsdp2"].turns)
    table.notes = [f"{num_rounds} rounds, each in a new process with an empty cache"]
    return table


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.alone", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=positive, default=40)
    parser.add_argument("--compile", action="store_true", help="measure compiling instead")
    others = [name for name in IMPLEMENTATIONS if name != BASE]
    parser.add_argument("--impl", nargs="+", choices=others, default=list(MEASURED[1:]))
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    if options.compile:
        compiling = measure_compiling(options.impl, num_rounds=options.rounds)
        found = {name: asdict(each) for name, each in compiling.items()}
        emit(options, [build_compiling_table(compiling)], {"compiling": found})
        return 0
    results = measure([BASE, *options.impl], num_rounds=options.rounds)
    emit(options, [build_table(results)], results_json(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
