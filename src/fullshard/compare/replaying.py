"""`fullshard.replay` runs a recorded step again, by the same ranks or by one process, and compares bit for bit.

Forwards are called with what they were called with, after their surroundings are put back; backwards begin
with the gradients that reached the outputs. So the loss is not needed, nor data or optimizer.
"""

import collections
import dataclasses
import math
import os
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.load import load_checkpoint
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.values import random_states, set_random_states
from fullshard.compare.record import ReplayFacts, ReplayRecord
from fullshard.compare.surroundings import autocast_as, device_of, restore, settings_as
from fullshard.compare.tape import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    INPUT,
    OUTPUT,
    REDUCED,
    Event,
    Seen,
    Tape,
)
from fullshard.compare.values import path_of
from fullshard.errors import CheckpointError, MisuseError, StateError
from fullshard.peers.groups import place_in_job
from fullshard.state.structure import units_of


@dataclasses.dataclass(frozen=True)
class ReplayDifference:
    """A value that a replay computed otherwise.

    rank: whose part of the step it is. event: "forward 0", "backward 0". what: "output", "gradient" (of this
    rank alone, whole) or "reduced gradient" (this rank's part). path: of the module or parameter. call: its
    number among those of that path in the event. kind: the module's class. unit: the path of its unit. problem: how it
    differs. order: sorts differences as they came about.
    """

    rank: int
    event: str
    what: str
    path: str
    call: int
    kind: str
    unit: str
    problem: str
    order: tuple[int, int, int]

    def __str__(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        call = f", call {self.call}" if self.call else ""
        unit = self.unit or "the root"
        place = f"{self.path or 'the model'}{kind}{call}, in unit {unit}"
        return f"{self.event}, rank {self.rank}: the {self.what} of {place} {self.problem}"


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a replay found. ``print`` it.

    folder: of the record. ranks: whose parts of the step were replayed. num_ranks: that were recorded.
    counts: how many values were compared, by what they are: "output", "gradient", "reduced gradient".
    num_different: how many of them differ. first: the first of these in the order of execution; of several
    ranks that differ at the same place, the lowest; None if all are equal in every bit. notes: what
    was not compared, and why.
    """

    folder: str
    ranks: tuple[int, ...]
    num_ranks: int
    counts: dict[str, int]
    num_different: int
    first: ReplayDifference | None
    notes: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """True if everything that was compared is equal in every bit."""
        return self.first is None

    def as_dict(self) -> dict[str, Any]:
        """Return it as what JSON can say, with ``is_equal``."""
        return dataclasses.asdict(self) | {"is_equal": self.is_equal}

    def __str__(self) -> str:
        whose = f"all {self.num_ranks} ranks" if len(self.ranks) > 1 else f"rank {self.ranks[0]}"
        values = ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in self.counts.items())
        lines = [f"Replayed the step of {whose} in {self.folder}: {values or 'nothing compared'}."]
        if self.first is None:
            lines.append("Equal in every bit.")
        else:
            lines += [f"{self.num_different} differ. The first: {self.first}."]
        return "\n".join([*lines, *self.notes])


def replay(folder: str | os.PathLike[str], model: nn.Module, *, rank: int | None = None) -> Replay:
    """Run a step that ``fullshard.debug(replay=folder)`` has recorded again, and compare every bit.

        print(fullshard.replay("replays/step-812", model))

    model: built and sharded as in the recorded run. On as many ranks as were recorded, each replays its own
        part; on one process (a process group of one rank, or a model that is not sharded and no process group)
        the parts of all ranks follow each other. It is left with the parameters from before the step, the
        buffers that its forwards leave, and no gradients.
    rank: on one process, the rank whose part is replayed; None for all.

    What is compared is what modules return, each rank's own gradients, and on the same ranks the reduced ones.
    The step's inputs are unpickled: replay only what you have recorded, or trust. An exception of the model's
    passes, so a step that failed fails again. Random generators are afterwards as they were before.

    Raises CheckpointError if there is no such record, or it is of another model; StateError for
    another number of ranks; MisuseError for a ``rank`` that there was not.
    """
    record = ReplayRecord(folder)
    facts = record.facts()
    parts = _ranks_to_replay(facts, rank)
    is_alone = facts.ranks > 1 and place_in_job().size == 1
    if facts.precision and not units_of(model):
        raise StateError(
            f"The step was computed in {', '.join(facts.precision)} by its mixed precision, which a model that is "
            "not sharded has not. Shard it as it was, in a process group of one rank."
        )
    try:
        load_checkpoint(record.model, model, rng=False)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\nA replay takes the model as it was: build it as it was when the step was recorded."
        ) from None
    before = random_states()
    try:
        replayed = [_RankReplay(record, model, each, is_alone=is_alone).run() for each in parts]
    finally:
        set_random_states(before)
        model.zero_grad(set_to_none=True)
    if place_in_job().size > 1:
        replayed = Peers("replays").gathered(replayed[0])
    differences = [each for one in replayed for each in one.differences]
    return Replay(
        folder=str(record.folder),
        ranks=tuple(one.rank for one in replayed),
        num_ranks=facts.ranks,
        counts=dict(sum((one.counts for one in replayed), collections.Counter())),
        num_different=len(differences),
        first=min(differences, key=lambda each: each.order, default=None),
        notes=tuple(note for one in replayed for note in one.notes),
    )


def _ranks_to_replay(facts: ReplayFacts, rank: int | None) -> list[int]:
    size = place_in_job().size
    if size == 1:
        if rank is not None and not 0 <= rank < facts.ranks:
            raise MisuseError(f"rank={rank}: {facts.ranks} ranks were recorded. Give one of these.")
        return [*range(facts.ranks)] if rank is None else [rank]
    if size != facts.ranks:
        raise StateError(
            f"The step was recorded on {facts.ranks} ranks, and these are {size}. Replay it on {facts.ranks}, or on "
            "one process."
        )
    if rank is not None:
        raise MisuseError(f"rank={rank} is for one process. Here every rank replays its own part.")
    return [dist.get_rank()]


@dataclasses.dataclass
class _RankResult:
    """What came of one rank's part. counts: of values that were compared, by what they are."""

    rank: int
    num_passes: int = 0
    differences: list[ReplayDifference] = dataclasses.field(default_factory=list)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    notes: list[str] = dataclasses.field(default_factory=list)


class _RankReplay:
    """One rank's part of a step, run again."""

    def __init__(
        self, record: ReplayRecord, model: nn.Module, rank: int, *, is_alone: bool
    ) -> None:
        self._record, self._model, self._rank = record, model, rank
        self._is_alone = is_alone
        self._device = device_of(model)
        self._units = units_of(model)
        self._result = _RankResult(rank)
        # Of outputs, in the backward that runs.
        self._grads: dict[tuple[int, int], torch.Tensor] = {}

    def run(self) -> _RankResult:
        events = self._record.events(self._rank)
        self._model.zero_grad(set_to_none=True)
        settings = [unit.config for unit in self._units]
        tape = Tape(self._model)
        tape.begin()
        try:
            self._run(tape, events)
        except Exception as error:
            if sys.version_info >= (3, 11):
                found = self._result.differences
                error.add_note(
                    f"In the replay of rank {self._rank}'s part, after {self._result.num_passes} passes: "
                    + (f"the first that differed is {found[0]}" if found else "all equal.")
                )
            raise
        finally:
            tape.end()
            for unit, config in zip(self._units, settings, strict=True):
                unit.set_config(config)
        return self._result

    def _run(self, tape: Tape, events: Sequence[Event]) -> None:
        kinds: collections.Counter[str] = collections.Counter()
        first = self._record.inputs(self._rank, 0, self._device)
        if first is None:
            raise StateError(f"{self._record.folder}: has nothing of rank {self._rank}.")
        leaves_out: set[str] = set() if self._units and not self._is_alone else {REDUCED}
        for number, event in enumerate(events):
            name = f"{event.kind} {kinds[event.kind]}"
            kinds[event.kind] += 1
            leaves_out |= self._not_compared(event) - leaves_out
            for unit, path in tape.units.items():
                if (sync := event.sync.get(path)) is not None:
                    unit.configure(reduce_grads=sync[0], all_reduce_grads=sync[1])
            done = len(tape.events)
            if event.kind == FORWARD:
                self._forward(tape)
            elif event.error or any(seen.what == GRADIENT for seen in event.seen):
                self._backward(tape, event, later=events[number + 1 :])
            else:
                self._note(
                    f"{name} left no gradients of parameters (torch.autograd.grad), and is not replayed."
                )
                continue
            now = tape.events[done] if done < len(tape.events) else Event(event.kind)
            self._compare(event, now, number, name, leaves_out)
            if event.error:
                self._note(
                    f"{name} ended with {event.error} when it was recorded, and came to its end now."
                )
        if self._record.inputs(self._rank, len(tape.outputs), self._device) is not None:
            self._forward(tape)  # the process ended in this one

    def _not_compared(self, event: Event) -> set[str]:
        """Say what is not compared from an event on, and note why."""
        if event.has_sums:
            self._note_left_out("gradients of earlier backwards wait to be reduced", "gradients")
            return {GRADIENT, REDUCED}
        if event.is_differentiated:
            self._note_left_out("a backward is differentiated again", "gradients from there on")
            return {GRADIENT, REDUCED}
        if event.has_others and not self._is_alone:
            why = "gradients came from elsewhere, or were changed"
            self._note_left_out(why, "reduced gradients")
            return {REDUCED}
        return set()

    def _note_left_out(self, why: str, what: str) -> None:
        self._note(f"{why}, so {what} are not compared.")

    def _note(self, text: str) -> None:
        note = f"Rank {self._rank}: {text}"
        if note not in self._result.notes:
            self._result.notes.append(note)

    def _compare(
        self, recorded: Event, now: Event, number: int, name: str, leaves_out: Collection[str]
    ) -> None:
        """Compare an event. number, name: of it. leaves_out: what is not compared, such as "reduced gradient"."""
        wanted = [seen for seen in recorded.seen if seen.what not in leaves_out]
        found = {seen.key: seen for seen in now.seen if seen.what not in leaves_out}
        places = {seen.key: place for place, seen in enumerate(wanted)}
        problems = [
            (seen, problem) for seen in wanted if (problem := _problem(seen, found.get(seen.key)))
        ]
        if not (problems or recorded.error):  # else what ran until then is all that there is
            problems = _in_order(wanted, list(found.values()))
        self._result.num_passes += 1
        self._result.counts.update(seen.what for seen in wanted)
        self._result.differences += [
            ReplayDifference(
                rank=self._rank,
                event=name,
                what=seen.what,
                path=seen.path,
                call=seen.call,
                kind=seen.kind,
                unit=seen.unit,
                problem=problem,
                order=(number, places.get(seen.key, len(places)), self._rank),
            )
            for seen, problem in problems
        ]

    def _forward(self, tape: Tape) -> None:
        number = len(tape.outputs)
        inputs = self._record.inputs(self._rank, number, self._device)
        assert inputs is not None
        restore(self._model, inputs.surroundings)
        named = self._model.named_modules()
        module = next((m for name, m in named if path_of(name) == inputs.module), None)
        if module is None:
            raise StateError(
                f"The model has no module {inputs.module}. Build it as it was recorded."
            )
        call = module if inputs.method == "forward" else getattr(module, inputs.method)
        kept = inputs.surroundings
        with torch.enable_grad(), settings_as(kept), autocast_as(kept):
            if self._units:
                call(*inputs.args, **inputs.kwargs)  # the engine tells the tape
            else:
                tape.open_event(FORWARD, inputs.module)
                tape.end_forward(call(*inputs.args, **inputs.kwargs))
        # An output may be made of another one, as a loss is of logits. What was recorded of the latter is all
        # of its gradient, so it takes the place of what comes through the loss, and is not added to it.
        if len(tape.outputs) != number + 1:
            raise StateError(
                f"{inputs.module or 'the model'} ran as a unit of its own when it was recorded, and does not now. "
                "Shard the model as it was."
            )
        for place, tensor in enumerate(tape.outputs[number]):
            key = (number, place)
            tensor.register_hook(lambda _, key=key: self._grads.get(key))

    def _backward(self, tape: Tape, event: Event, later: Sequence[Event]) -> None:
        """Run a backward from the gradients of outputs. later: the events after it."""
        if not event.grads:
            self._note_left_out("no gradient reached an output in a backward", "its gradients")
            return
        forwards = {forward for forward, _ in event.grads}
        again = {forward for each in later for forward, _ in each.grads}
        outputs = [tape.outputs[forward][place] for forward, place in event.grads]
        if event.begins_anew:
            self._model.zero_grad(set_to_none=True)
        self._grads = {key: grad.to(self._device) for key, grad in event.grads.items()}
        if not self._units:
            tape.open_event(BACKWARD)
        torch.autograd.backward(
            outputs, [*self._grads.values()], retain_graph=bool(forwards & again)
        )
        if not self._units:
            self._see_gradients(tape, event)
            tape.close_event()

    def _see_gradients(self, tape: Tape, event: Event) -> None:
        """Take down the gradients of a model that is not sharded, and drop those that were reduced then."""
        units = {seen.path: seen.unit for seen in event.seen if seen.what == GRADIENT}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            path = path_of(name)
            if parameter.grad is not None and path in units:
                tape.see(GRADIENT, path, [parameter.grad], unit=units[path])
        for name, parameter in self._model.named_parameters():
            if event.sync.get(units.get(path_of(name), ""), (True,))[0]:
                parameter.grad = None


def _problem(recorded: Seen, now: Seen | None) -> str:
    """Say how a value differs; "" if it does not."""
    if now is None:
        return "was recorded, and is not computed now"
    if recorded.digest == now.digest and recorded.dtype == now.dtype:
        return ""
    if (recorded.shape, recorded.dtype) != (now.shape, now.dtype):
        return (
            f"is {now.shape} of {now.dtype.removeprefix('torch.')} now, and was {recorded.shape} of "
            f"{recorded.dtype.removeprefix('torch.')}"
        )
    if recorded.sample.shape != now.sample.shape:
        return "differs"
    gap = (recorded.sample - now.sample).abs()
    largest = recorded.sample.abs().max().item() if gap.numel() else 0.0
    worst = gap.max().item() if gap.numel() else 0.0
    if not worst:
        return "differs in elements that are not among those sampled, or in the sign of zeros"
    if math.isnan(worst) or math.isinf(largest):
        return "differs: there are values that are not finite"
    if not largest:
        return f"was 0, and differs by {worst:.1e}"
    return f"differs by {worst / largest:.1e} of its largest value"


def _in_order(recorded: Sequence[Seen], now: Sequence[Seen]) -> list[tuple[Seen, str]]:
    """Return what ran beside what was recorded, or in another place among the outputs. At most one."""
    known = {seen.key for seen in recorded}
    before, after = ([s for s in each if s.what in (INPUT, OUTPUT)] for each in (recorded, now))
    for extra in after:
        if extra.key not in known:
            return [(extra, "is computed now, and was not recorded")]
    for old, new in zip(before, after, strict=True):
        if old.key != new.key:
            came = f"comes where that of {old.path or 'the model'} came when it was recorded"
            return [(new, came)]
    return []
