"""`fullshard compare`: should this script run on fullshard? Both engines in turn, then numbers and a verdict."""

import contextlib
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console
from rich.table import Table

from fullshard.json_files import json_text
from fullshard.tools.doctor.findings import counted, sized, timed
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Ending, Place, launch
from fullshard.tools.progress import as_it_is
from fullshard.tools.verify import engines
from fullshard.tools.verify.comparing import Comparison, compare
from fullshard.tools.verify.rank import run_rank
from fullshard.tools.verify.record import Failure, merged, read_run
from fullshard.tools.verify.running import records_folder
from fullshard.tools.verify.watching import Watch
from fullshard.versions import installed

_BUSY = 0.25  # of the machine, before a run of ours begins
_LOOK_S = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """Losses and gradients of the steps that both engines took, step by step.

    same_losses, same_gradients: in every bit. first: what differs first, and where; empty if nothing does.
    loss, gradient: the largest difference, as a part of the loss, and of a gradient's largest value.
    is_rounding: whether losses, and the first step's gradients, differ by no more than sums in another order do.
    uncompared: gradients that only one engine has, or in another shape. losses: of rank 0, by engine.
    """

    steps: int
    num_gradients: int
    same_losses: bool = True
    same_gradients: bool = True
    first: str = ""
    loss: float = 0.0
    gradient: float = 0.0
    is_rounding: bool = True
    uncompared: Sequence[str] = ()
    losses: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What a step takes on each engine. seconds: of each round, of its slowest rank. nbytes: of each rank, at the peak."""

    seconds: Mapping[str, Sequence[float]]
    nbytes: Mapping[str, Sequence[int]]

    @property
    def ratios(self) -> list[float]:
        """fullshard's time over PyTorch's, of each round."""
        torch, ours = (self.seconds[engine] for engine in engines.ENGINES)
        return [one / other for one, other in zip(ours, torch, strict=True)]

    @property
    def spread(self) -> str:
        """The least and the most of several ratios, in brackets."""
        ratios = self.ratios
        return f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""

    @property
    def memory(self) -> float | None:
        """fullshard's memory over PyTorch's, of the rank that holds most; None where nothing says it."""
        if not all(self.nbytes[engine] for engine in engines.ENGINES):
            return None
        torch, ours = (max(self.nbytes[engine]) for engine in engines.ENGINES)
        return ours / torch


@dataclasses.dataclass(frozen=True)
class Switch:
    """All that is known at the end. failed: what ended a run, in one sentence; then there may be nothing else.

    costs: None also for a script of too few steps to be timed.
    """

    options: engines.CompareOptions
    values: Values | None = None
    costs: Costs | None = None
    failed: str = ""
    notes: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def code(self) -> Exit:
        if self.values is None or self.failed:
            return Exit.FAILED
        return Exit.OK if self.values.is_rounding else Exit.DIFFERENT

    @property
    def verdict(self) -> str:
        """Say the result in one sentence."""
        values, costs = self.values, self.costs
        if values is None:
            return self.failed
        said = [_same(values)]
        if costs is not None:
            is_noise = len(costs.ratios) > 1 and min(costs.ratios) <= 1 <= max(costs.ratios)
            noise = ": too noisy to say which is faster" if is_noise else ""
            said.append(
                f"{statistics.median(costs.ratios):.2f} of the step time{costs.spread}{noise}"
            )
            if costs.memory is not None:
                said.append(f"{costs.memory:.2f} of the memory")
        return "; ".join([said[0], ", ".join(said[1:])] if said[1:] else said)


def _same(values: Values) -> str:
    over = f"over {counted(values.steps, 'step')}"
    if values.same_losses and not values.num_gradients:  # of an optimizer with copies of parameters
        return f"same losses in every bit {over}, and no gradients seen at the optimizer's steps"
    if values.same_losses and values.same_gradients:
        return f"same losses and gradients in every bit {over}"
    if values.same_losses:
        return f"same losses in every bit {over}, gradients differ {_amount(values.gradient)}"
    how = "as rounding does" if values.is_rounding else "more than rounding explains"
    return f"losses differ by up to {values.loss:.1e} {over}, {how}"


def rank_of(
    options: engines.CompareOptions, place: Place, records: Path, label: str, threads: int
) -> NoReturn:
    """Be one rank of the run of a label."""
    engine, _, number = label.partition("-")
    run = engines.Run(engine, int(number or 0))
    side = engines.OnEngine(options, place.rank, records, run)
    run_rank(side, place, threads=threads, watch=engines.StepClock if run.round else Watch)


def compare_engines(
    options: engines.CompareOptions, words: Sequence[str], *, threads: int
) -> Switch:
    """Run the script on both engines, recorded and then timed. words: what was typed, for the ranks. Raises OptionError."""
    began = time.monotonic()
    with records_folder(None) as records:

        def start(run: engines.Run) -> Ending:
            if run.round:
                name = "PyTorch" if run.engine == "torch" else run.engine
                print(f"round {run.round} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            typed = ["compare", "--run", run.label, "--records", str(records), *words]
            # What the script prints is shown of the first run on each engine.
            with _output_into(records / "printed") if run.round else contextlib.nullcontext():
                ending = launch(typed, ranks=options.ranks, threads=threads)
            if ending.code is Exit.STOPPED:
                raise KeyboardInterrupt
            return ending

        found = _compared(options, records, start)
    return dataclasses.replace(found, seconds=time.monotonic() - began)


def _compared(
    options: engines.CompareOptions, records: Path, start: Callable[[engines.Run], Ending]
) -> Switch:
    """Compare values of the recorded runs, then time each engine in turn. start: runs the script."""
    endings = {engine: start(engines.Run(engine)) for engine in engines.ENGINES}
    exact = dataclasses.replace(options, rtol=0.0, atol=0.0)
    ours, theirs = endings["fullshard"], endings["torch"]
    comparison = compare(exact, records, ending=ours, ending_of_whole=theirs)
    if failed := _failed(comparison):
        return Switch(options, failed=failed)
    values, busy = _values(options, comparison), []
    seconds: dict[str, list[float]] = {engine: [] for engine in engines.ENGINES}
    nbytes: dict[str, list[int]] = {}
    for number in range(1, options.rounds + 1):
        for engine in engines.ENGINES[:: 1 if number % 2 else -1]:
            busy.append(psutil.cpu_percent(_LOOK_S) / 100)
            run = engines.Run(engine, number)
            ending = start(run)
            ranks = [read_run(run.folder(records, rank)) for rank in range(options.ranks)]
            there = [each for each in ranks if each is not None]
            failure = merged(there).failure
            if failure is not None and failure.is_nothing:
                note = f"values are compared, times are not: {failure.text}"
                return Switch(options, values, notes=[note])
            if failure is not None or len(there) < options.ranks:
                print((records / "printed").read_text(errors="replace"), end="", file=sys.stderr)
                why = _said(failure) if failure else ending.message
                note = f"it failed when {engine} was timed, so nothing is said of time and memory: {why}"
                return Switch(options, values, failed=why, notes=[note])
            seconds[engine].append(max(statistics.median(each.seconds) for each in there))
            nbytes[engine] = [each.peak_nbytes for each in there if each.peak_nbytes]
    costs = Costs(seconds, nbytes)
    return Switch(options, values, costs, notes=[*_notes(options, values, costs, busy)])


@contextlib.contextmanager
def _output_into(file: Path) -> Iterator[None]:
    """Have what processes print that are started within the body go to a file, and not to the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        with file.open("wb") as opened:
            for number in kept:
                os.dup2(opened.fileno(), number)
        yield
    finally:
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


def _failed(comparison: Comparison) -> str:
    """Say which run failed, and whether the other did too; empty if none has."""
    torch = comparison.alone.failure
    ours = merged(list(comparison.ranks.values())).failure
    if ours is None and comparison.died:
        text = comparison.ending.message or "it ended by itself, without an exception"
        ours = Failure("the script", None, "a rank died", text)
    if ours is None:
        ran = "failed on PyTorch's engine, and ran on fullshard"
        return f"{ran}: {_said(torch)}" if torch else ""
    if torch is None:
        return f"failed on fullshard, and ran on PyTorch's engine: {_said(ours)}"
    if (torch.kind, torch.text) == (ours.kind, ours.text):
        if torch.is_nothing:
            return f"nothing to compare: {torch.text}"
        return f"the script itself fails, on both engines alike: {_said(torch)}"
    return f"failed on both engines: on PyTorch's: {_said(torch)}; on fullshard: {_said(ours)}"


def _said(failure: Failure) -> str:
    line = f" ({failure.line})" if failure.line else ""
    first, *_ = failure.text.strip().splitlines() or ["without a message"]
    return f"{failure.kind}: {first}{line}"


def _values(options: engines.CompareOptions, comparison: Comparison) -> Values:
    """Compare losses and gradients of the steps that both have taken."""
    torch, ours = comparison.alone, merged(list(comparison.ranks.values()))
    steps = min(len(torch.bits), len(ours.bits))
    losses = [loss for loss in comparison.losses if loss.step <= steps]
    gradients = [each for each in comparison.differing if each.kind == "final-gradient"]
    uncompared = {each.name for each in gradients if each.worst == math.inf}
    differing = [(loss.step, loss.rank, "") for loss in losses if loss.differs]
    for step, (theirs, its) in enumerate(zip(torch.bits, ours.bits, strict=False), start=1):
        uncompared |= theirs.keys() ^ its.keys()
        for label in (each for each in theirs if each not in uncompared):
            if theirs[label] != its[label]:
                of_rank, _, name = label.partition("/")
                differing.append((step, int(of_rank), name))
    amounts = dict.fromkeys(range(1, steps + 1), 0.0)  # of each step's gradients
    for each in gradients:
        if each.name not in uncompared:
            relative = math.inf if math.isnan(each.worst) else each.relative
            amounts[each.step] = max(amounts.get(each.step, 0.0), relative)
    apart = {(loss.step, loss.rank): _relative(loss.alone, loss.sharded) for loss in losses}
    loss = max(apart.values(), default=0.0)
    rtol = options.tolerance({o.dtype for part in torch.parts for o in part.outputs}).rtol
    first = ""
    if differing:  # in a step losses come before gradients, which are in the order of parameters
        step, rank, name = min(differing, key=lambda each: (each[0], bool(each[2])))
        amount = _amount(amounts[step] if name else apart[step, rank])
        first = f"{f'gradient of {name}' if name else 'loss'}: step {step}, rank {rank}, {amount}"
    return Values(
        steps,
        num_gradients=len({label.partition("/")[2] for step in torch.bits for label in step}),
        same_losses=not any(loss.differs for loss in losses),
        same_gradients=not uncompared and not any(name for _, _, name in differing),
        first=first,
        loss=loss,
        gradient=max(amounts.values(), default=0.0),
        is_rounding=loss <= rtol and amounts.get(1, 0.0) <= rtol,
        uncompared=sorted(uncompared),
        losses={
            "torch": [loss.alone for loss in losses if not loss.rank],
            "fullshard": [loss.sharded for loss in losses if not loss.rank],
        },
    )


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / abs(one) if one else math.inf


def _notes(
    options: engines.CompareOptions, values: Values, costs: Costs, busy: Sequence[float]
) -> Iterator[str]:
    """Say what weakens the result."""
    if values.steps < options.steps:
        yield f"the script ended after {counted(values.steps, 'step')}, and --steps {options.steps} were asked for"
    if not values.losses["torch"]:
        yield "no loss was seen: the script calls no loss.backward() or torch.autograd.backward()"
    if values.uncompared:
        names = ", ".join(dict.fromkeys(name.partition("/")[2] for name in values.uncompared[:3]))
        yield f"gradients that only one engine has, or in another shape, are not compared: {names}"
    if costs.memory is None:
        yield "memory is not known: the script ended before it was looked at, or this system does not tell"
    if (share := statistics.median(busy)) > _BUSY:
        yield f"other programs took {share:.0%} of this machine's processors: times are theirs as well"


def show(switch: Switch, *, layout: str) -> None:
    """Print the result. layout: "table", "json" or "md"."""
    if layout == "json":
        print(json_text(as_dict(switch)), flush=True)
        return
    rows = list(_rows(switch))
    if layout == "md":
        head = ("", "PyTorch's FSDP", "fullshard", "")
        lines = [head, ("---", "--:", "--:", "---"), *rows]
        text = [f"| {' | '.join(line)} |" for line in lines] if rows else []
        print("\n".join([*text, "", f"**{switch.verdict}**", *(f"- {n}" for n in switch.notes)]))
        return
    console = Console(highlight=False, emoji=False)
    table = Table("", "PyTorch", "fullshard", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*map(as_it_is, row))
    if rows:
        console.print(table)
        console.print()
    colour = {Exit.OK: "green", Exit.DIFFERENT: "yellow"}.get(switch.code, "red")
    console.print(f"[{colour}]{as_it_is(switch.verdict)}[/{colour}]")
    for note in switch.notes:
        console.print(f"note: {as_it_is(note)}")
    options = switch.options
    ran = f"{counted(options.ranks, 'rank')} ({options.device}), {counted(options.rounds, 'round')}"
    console.print(as_it_is(f"{options.words}: {ran}, {switch.seconds:.0f} s"), style="dim")


def _rows(switch: Switch) -> Iterator[tuple[str, ...]]:
    values, costs = switch.values, switch.costs
    if costs is not None:
        seconds = (timed(statistics.median(costs.seconds[engine])) for engine in engines.ENGINES)
        yield ("time of a step", *seconds, f"{statistics.median(costs.ratios):.2f}{costs.spread}")
        if costs.memory is not None:
            held = (sized(max(costs.nbytes[engine])) for engine in engines.ENGINES)
            yield ("peak memory, one rank", *held, f"{costs.memory:.2f}")
    if values is not None:
        if all(values.losses.values()):
            last = (f"{values.losses[engine][-1]:.7g}" for engine in engines.ENGINES)
            how = "same in every bit" if values.same_losses else _amount(values.loss)
            yield (f"loss of step {values.steps}, rank 0", *last, how)
        how = "same in every bit" if values.same_gradients else _amount(values.gradient)
        yield ("gradients", *[str(values.num_gradients)] * 2, how)
        if values.first:
            yield ("first difference", "", "", values.first)


def _amount(relative: float) -> str:
    return f"by up to {relative:.1e}" if relative else "in bits alone"


def as_dict(switch: Switch) -> dict[str, Any]:
    """Return the result as what JSON can hold."""
    facts = {name: value for name, value in dataclasses.asdict(switch).items() if name != "options"}
    if (costs := switch.costs) is not None:
        facts["costs"] |= {
            "ratios": costs.ratios,
            "ratio": statistics.median(costs.ratios),
            "memory_ratio": costs.memory,
        }
    options = switch.options
    return {
        "verdict": switch.verdict,
        "code": switch.code,
        "rows": list(_rows(switch)),
        "program": options.words,
        "ranks": options.ranks,
        "steps": options.steps,
        "device": options.device,
        "versions": installed(),
        **facts,
    }
