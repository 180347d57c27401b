"""From two sides' records to what differs, and where first; nothing is judged here.

A tensor differs if its largest difference is above rtol times its own largest value plus atol times the
largest value of its kind in that step: a gradient that is zero but for rounding is no difference.
"""

import dataclasses
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from fullshard.tools.exits import Exit
from fullshard.tools.launch import Ending
from fullshard.tools.verify import record
from fullshard.tools.verify.options import Tolerance, VerifyOptions

WELL = Ending(Exit.OK)
RANK_DIED = "RankDied"  # instead of an exception's class
_UNSTEADY = 0.01  # a gradient that differs by more than this part of itself is rounding
KINDS = ("output", "gradient", "final-gradient", "parameter", "buffer")


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """How one tensor of a step differs from that of the one process.

    rank: whose it is; None for what all ranks have together.
    worst: largest difference of two elements; scale: largest value of the one process.
    limit: what the tolerance allows.
    ratio: the factor that makes the one process's tensor most like it; residual: what then remains, as a
        part of it. Both None where that makes no sense.
    """

    kind: str
    step: int
    rank: int | None
    name: str
    worst: float
    scale: float
    limit: float
    ratio: float | None = None
    residual: float | None = None

    @property
    def label(self) -> str:
        """The name as people read it: of an output, the module, and which of its calls if not the first."""
        path, mark, call = self.name.rpartition("#")
        if self.kind != "output" or not mark:
            return self.name
        return (path or "(the model)") + (f" (call {call})" if call != "0" else "")

    @property
    def exceeds(self) -> bool:
        """Whether it is more than the tolerance allows; so is what is not a number on one side alone."""
        return not self.worst <= self.limit

    @property
    def relative(self) -> float:
        return self.worst / self.scale if self.scale else math.inf if self.worst else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class FirstModule:
    """The first module, in the order in which modules end, whose output differs.

    missing: the side that did not run it, "sharded" or "alone"; empty if both did.
    """

    step: int
    rank: int
    output: record.Output
    relative: float = 0.0
    missing: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a rank's part, in the one process and on the rank. backward: which of the step's."""

    step: int
    rank: int
    alone: float
    sharded: float
    differs: bool
    backward: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that is known when the report is written.

    alone, ranks: what each process recorded; a rank that is not there has died. Of a script, alone is what
        its ranks recorded together where nothing is sharded.
    worst: the largest difference of each kind in each step, whether it is allowed or not.
    differing: every difference that is not allowed.
    ending: how the ranks ended, as the launcher says.
    """

    options: VerifyOptions
    tolerance: Tolerance
    alone: record.Run
    ranks: Mapping[int, record.Run] = dataclasses.field(default_factory=dict)
    losses: Sequence[Loss] = ()
    worst: Sequence[Difference] = ()
    differing: Sequence[Difference] = ()
    first: FirstModule | None = None
    ending: Ending = WELL
    seconds: float = 0.0

    @property
    def reference(self) -> str:
        return "whole model" if self.options.script else "one process"

    @property
    def begun(self) -> record.Run | None:
        """The run of the rank that has the sharded model's first values; None if it did not get that far."""
        return next((run for run in self.ranks.values() if run.initial), None)

    @property
    def died(self) -> list[int]:
        """The ranks that ended without a record by themselves: the first, where others were ended with it."""
        if self.alone.failure is not None and not self.options.script:
            return []
        missing = [rank for rank in range(self.options.ranks) if rank not in self.ranks]
        return [rank for rank in missing if rank == self.ending.rank] or missing


def compare(
    options: VerifyOptions, folder: Path, *, ending: Ending = WELL, ending_of_whole: Ending = WELL
) -> Comparison:
    """Read what both sides have written, and compare it step by step."""
    names = [record.rank_folder(folder, rank) for rank in range(options.ranks)]
    ranks = {
        rank: run for rank, name in enumerate(names) if (run := record.read_run(name)) is not None
    }
    folders = [record.alone_folder(folder)]
    if options.script:
        folders = [record.whole_folder(folder, rank) for rank in range(options.ranks)]
    wholes = [record.read_run(each) for each in folders]
    alone = record.merged([run for run in wholes if run is not None])
    if options.script:
        if None in wholes and any(wholes) and alone.failure is None:
            text = ending_of_whole.message or "a rank ended by itself, without an exception"
            alone.failure = record.Failure("the script", None, RANK_DIED, text)
        for rank, run in ranks.items():
            whole = wholes[rank]
            run.own = {} if whole is None else whole.own
    outputs = [o for run in (alone, *ranks.values()) for part in run.parts for o in part.outputs]
    tolerance = options.tolerance({output.dtype for output in outputs})
    worst: list[Difference] = []
    differing: list[Difference] = []
    unsteady: dict[str, torch.Tensor] = {}
    for step in range(1, options.steps + 1):
        expected, given = (
            {
                key: tensor
                for each in side
                for key, tensor in record.read_tensors(each, f"step-{step}").items()
            }
            for side in (folders, [names[rank] for rank in ranks])
        )
        if options.script:
            note_unsteady(unsteady, expected, given)
        differences = list(differences_of(step, expected, given, tolerance, unsteady))
        differing += [each for each in differences if each.exceeds]
        by_kind = [[each for each in differences if each.kind == kind] for kind in KINDS]
        worst += [max(each, key=_excess) for each in by_kind if each]
    return Comparison(
        options=options,
        tolerance=tolerance,
        alone=alone,
        ranks=ranks,
        losses=_losses(alone, ranks, tolerance),
        worst=worst,
        differing=differing,
        first=first_module(alone, ranks, differing),
        ending=ending,
    )


def note_unsteady(
    unsteady: dict[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
) -> None:
    """Note elements whose gradient is rounding: an adaptive optimizer moves them in full, in any direction.

    Such are those of a bias before a softmax, whose gradient is zero but for rounding. From then on, the
    parameter's other elements are compared.
    """
    for key, theirs in expected.items():
        kind, _, name = key.partition("/")
        ours = given.get(key)
        if kind == "gradient" and ours is not None and ours.shape == theirs.shape:
            is_rounding = (ours - theirs).abs() > _UNSTEADY * theirs.abs()
            unsteady[name] = is_rounding | unsteady.get(name, is_rounding)


def differences_of(
    step: int,
    expected: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    tolerance: Tolerance,
    unsteady: Mapping[str, torch.Tensor] = types.MappingProxyType({}),
) -> Iterator[Difference]:
    """Compare tensors that have one key on both sides.

    unsteady: by name, which elements of a parameter are left out, if its gradients are equal.
    """
    unequal = set()
    scales = {key: _largest(expected[key]) for key in given if key in expected}
    largest = dict.fromkeys(KINDS, 0.0)
    for key, scale in scales.items():
        kind = key.partition("/")[0]
        largest[kind] = max(largest[kind], scale)
    for key, scale in scales.items():
        kind, _, name = key.partition("/")
        rank: int | None = None
        if kind in ("output", "buffer"):
            number, _, name = name.partition("/")
            rank = int(number)
        limit = tolerance.rtol * scale + tolerance.atol * largest[kind]
        ours, theirs = given[key], expected[key]
        if ours.shape != theirs.shape:
            yield Difference(kind, step, rank, name, math.inf, scale, limit)
            continue
        ours, theirs = ours.double(), theirs.double()
        ratio, residual = _scaling(ours, theirs) if kind == "gradient" else (None, None)
        if kind == "parameter" and name in unsteady and name not in unequal:
            theirs = torch.where(unsteady[name], ours, theirs)
        found = Difference(
            kind, step, rank, name, _largest_difference(ours, theirs), scale, limit, ratio, residual
        )
        if kind == "gradient" and found.exceeds:
            unequal.add(name)
        yield found


def paired(
    alone: record.Run, ranks: Mapping[int, record.Run]
) -> list[tuple[record.Part, record.Part]]:
    """Return the parts that both sides have computed, by step, rank and backward: as the one process did, and the rank."""
    expected = {part.place: part for part in alone.parts}
    parts = sorted((p for run in ranks.values() for p in run.parts), key=lambda p: p.place)
    return [(expected[part.place], part) for part in parts if part.place in expected]


def first_module(
    alone: record.Run, ranks: Mapping[int, record.Run], differing: Sequence[Difference]
) -> FirstModule | None:
    """Return the first module that differs: of the first step, and of the first rank that has one."""
    outside = {(d.step, d.rank, d.name): d for d in differing if d.kind == "output"}
    found = (_first_in(*parts, outside) for parts in paired(alone, ranks))
    return next((each for each in found if each is not None), None)


def _first_in(
    alone: record.Part,
    sharded: record.Part,
    outside: Mapping[tuple[int, int | None, str], Difference],
) -> FirstModule | None:
    there = {output.name for output in sharded.outputs}
    known = {output.name for output in alone.outputs}
    for output in alone.outputs:
        if output.name not in there:
            return FirstModule(alone.step, alone.rank, output, missing="sharded")
        if (difference := outside.get((alone.step, alone.rank, output.name))) is not None:
            return FirstModule(alone.step, alone.rank, output, difference.relative)
    for output in sharded.outputs:
        if output.name not in known:
            return FirstModule(alone.step, alone.rank, output, missing="alone")
    return None


def _losses(alone: record.Run, ranks: Mapping[int, record.Run], tolerance: Tolerance) -> list[Loss]:
    found = []
    for part, sharded in paired(alone, ranks):
        one, other = part.loss, sharded.loss
        both_nan = math.isnan(one) and math.isnan(other)
        is_close = abs(other - one) <= tolerance.rtol * abs(one) + tolerance.atol
        differs = not (is_close or both_nan or one == other)
        found.append(Loss(part.step, part.rank, one, other, differs, part.backward))
    return found


def _excess(difference: Difference) -> float:
    """Say how much it is above its limit."""
    if math.isnan(difference.worst):
        return math.inf
    return difference.worst / difference.limit if difference.limit else difference.worst


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest value that is finite; 0 if there is none."""
    finite = tensor[tensor.isfinite()]
    return finite.double().abs().max().item() if finite.numel() else 0.0


def _largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference of two elements; what is NaN or infinite on both sides is equal."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, 0.0, (ours - theirs).abs())
    return difference.max().item() if difference.numel() else 0.0


def _scaling(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float | None, float | None]:
    """Return k that makes k * theirs most like ours, and what remains, over ours."""
    square = theirs.square().sum().item()
    size = ours.norm().item()
    if not (0 < square < math.inf and 0 < size < math.inf):
        return None, None
    ratio = (ours * theirs).sum().item() / square
    return ratio, (ours - ratio * theirs).norm().item() / size
