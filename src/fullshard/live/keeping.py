"""`keep_unsharded` lets units stay unsharded from forward to backward, as many as a budget of bytes holds."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.module_state import ModuleState, state_of
from fullshard.errors import ShardingError, StateError
from fullshard.plan.keeping import (
    BackwardGathers,
    Keepable,
    backward_gathers,
    choose_units,
    exposed_of_all,
)
from fullshard.plan.trace import TraceError, read_trace
from fullshard.watch.describe import DescribedUnit, format_nbytes, units_of


@dataclasses.dataclass(frozen=True, slots=True)
class KeptUnit:
    """A unit that stays. nbytes: of its whole parameters on each rank. saved_s: by that, in a step; None if unknown."""

    name: str
    nbytes: int
    saved_s: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class KeptUnits:
    """What `keep_unsharded` has chosen.

    units: in the model's order. budget_nbytes: what was given.
    saved_s: exposed seconds of a step that are gone; None without a trace. Where processors are busy, waits for them
        come to light instead, which those for bytes have hidden.
    exposed_s: those of all gathers in backward before; None without a trace.
    """

    units: tuple[KeptUnit, ...]
    budget_nbytes: int
    saved_s: float | None
    exposed_s: float | None

    @property
    def nbytes(self) -> int:
        """The bytes of the budget that the units take."""
        return sum(unit.nbytes for unit in self.units)

    def __str__(self) -> str:
        many = "" if len(self.units) == 1 else "s"
        head = (
            f"{len(self.units)} unit{many} unsharded from forward to backward, "
            f"{format_nbytes(self.nbytes)} of {format_nbytes(self.budget_nbytes)}"
        )
        if self.saved_s is not None and self.exposed_s is not None:
            head += f"; {self.saved_s * 1e3:.1f} of {self.exposed_s * 1e3:.1f} ms of exposed all-gathers a step"
        lines = [
            f"    {unit.name or '(root)'}  {format_nbytes(unit.nbytes)}"
            + ("" if unit.saved_s is None else f"  {unit.saved_s * 1e3:.1f} ms")
            for unit in self.units
        ]
        return "\n".join([head, *lines])


def keep_unsharded(
    model: nn.Module, nbytes: int, *, trace: str | os.PathLike[str] | None = None
) -> KeptUnits:
    """Let units stay unsharded from forward to backward, those that save the most within a budget of bytes.

        print(fullshard.keep_unsharded(model, 256 << 20))                  # by sizes and order
        print(fullshard.keep_unsharded(model, 256 << 20, trace="runs/a"))  # by what a step was seen to wait for

    Call it alike on all ranks, between steps. The next call replaces the choice, and 0 bytes undo it. Units stay as
    with ``reshard_after_forward=False``, so gradients are the same in every bit; after an evaluation they are freed.
    A later `set_reshard_after_forward` has the last word on its units.

    model: the outermost sharded module, of either API. nbytes: of whole parameters, in the dtypes that are computed
        with, that each rank may hold from forward to backward, beside those that stay in any case (the root's, say).
    trace: the folder that `fullshard.trace` has written with this model, while no unit was kept. With it the call is
        collective. Without it, gathers count as exposed by their sizes and order: see `plan.keeping.weigh_by_bytes`.

    Not chosen are units that are read in place, which need no gather, and those that ranks may skip.

    Raises ShardingError for a budget that holds no unit, with what it takes, for a model that is not sharded or is a
    part of one, and for a trace of another model; StateError for one in which units stayed; MisuseError
    within a forward or a backward.
    """
    root = _root_of(model)
    if type(nbytes) is not int:
        raise ShardingError(f"keep_unsharded(nbytes={nbytes!r}): expected a number of bytes.")
    units = units_of(model, root)
    keepable = [_keepable(shown) for shown in units]
    saved_ns = None if trace is None or nbytes == 0 else _observed(units, keepable, Path(trace))
    chosen = choose_units(keepable, nbytes, saved_ns)
    for shown, stays in zip(units, chosen, strict=True):
        shown.unit.configure(is_kept=stays)
    if (iteration := root.known_iteration) is not None:
        paths = [shown.unit.path for shown, stays in zip(units, chosen, strict=True) if stays]
        iteration.agree_on(f"keep_unsharded, which keeps {', '.join(paths) or 'no unit'}")
    seconds = [None if saved_ns is None else ns / 1e9 for ns in saved_ns or [0] * len(units)]
    kept = tuple(
        KeptUnit(unit.name, unit.nbytes, saved_s)
        for unit, stays, saved_s in zip(keepable, chosen, seconds, strict=True)
        if stays
    )
    if saved_ns is None:
        return KeptUnits(kept, nbytes, None, None)
    return KeptUnits(kept, nbytes, sum(u.saved_s or 0.0 for u in kept), sum(saved_ns) / 1e9)


def _root_of(model: nn.Module) -> ModuleState:
    state = state_of(model)
    if state is None or (state.known_iteration is not None and not state.is_root):
        raise ShardingError(
            f"keep_unsharded: {type(model).__name__} is {'not sharded' if state is None else 'a part of a model'}. A "
            "budget is a model's: pass the module given to fully_shard last, or the outermost wrapper."
        )
    state.check_idle("keep_unsharded")
    return state


def _keepable(shown: DescribedUnit) -> Keepable:
    unit, config = shown.unit, shown.unit.config
    option = config.reshard_after_forward
    stays_anyway = shown.is_root if option is None else option is False
    hides = unit.comm.overlaps and config.backward_prefetch is not None
    nbytes = unit.private_nbytes(shown.params)
    # Of units that ranks may skip, a rank that has would hold none, and others would not gather.
    is_fixed = stays_anyway or config.may_be_skipped or not config.unshard_in_backward
    return Keepable(
        shown.name,
        nbytes,
        shown.unit.plan_layout(shown.params).unsharded_nbytes if hides else 0,
        may_stay=nbytes > 0 and not is_fixed,
    )


# What was observed


class _Seen(NamedTuple):
    """What one rank has recorded, or why it has nothing to tell."""

    recording: str
    names: tuple[str, ...]
    gathers: BackwardGathers | None
    trouble: str = ""


def _observed(
    units: Sequence[DescribedUnit], keepable: Sequence[Keepable], folder: Path
) -> list[int]:
    """Return the exposed nanoseconds of each unit's gathers in backward, the same on all ranks. Collective."""
    if not units:
        return []
    seen = [_read(folder)]
    # That of the ranks which see different data, of the unit with the most of them.
    widest = max(units, key=lambda shown: shown.unit.mesh.plan.data_parallel_size).unit.mesh
    for group in widest.groups:
        found: list[list[_Seen]] = gather_objects(seen, group, "comparing traces of gathers")
        seen = [each for rank in found for each in rank]
    names = tuple(shown.name for shown in units)
    for each in seen:
        if trouble := each.trouble or _why_another(each, seen[0], names):
            raise ShardingError(
                f"keep_unsharded(trace={os.fspath(folder)!r}): {trouble}. Record some steps of this model with "
                "fullshard.trace after keep_unsharded(model, 0), and pass its folder."
            )
    gathers = [each.gathers for each in seen if each.gathers is not None]
    for number, unit in enumerate(keepable):
        is_seen = any(each.are_gathered[number] for each in gathers)
        if not is_seen and gathers[0].are_used[number] and unit.may_stay:
            raise StateError(
                f"keep_unsharded(trace={os.fspath(folder)!r}): {unit.name or 'root'} was not gathered in backward "
                "there, so nobody knows what it would cost. Record some steps after keep_unsharded(model, 0)."
            )
    return [*exposed_of_all(gathers)]


def _read(folder: Path) -> _Seen:
    path = folder / f"rank{dist.get_rank():05d}.json"
    try:
        found = read_trace(path)
    except TraceError as error:
        return _Seen("", (), None, error.trouble)
    if not found.steps:
        return _Seen("", (), None, f"{path} has no steps")
    return _Seen(found.recording, tuple(unit.name for unit in found.units), backward_gathers(found))


def _why_another(seen: _Seen, first: _Seen, names: tuple[str, ...]) -> str:
    """Return why a recording is of no use; "" if it is of use."""
    if seen.names != names:
        unlike = next((a or b for a, b in zip(seen.names, names, strict=False) if a != b), "")
        return (
            f"it has {len(seen.names)} units and the model {len(names)}"
            if len(seen.names) != len(names)
            else f"its units have other names, such as {unlike!r}"
        )
    return "" if seen.recording == first.recording else "ranks have files of several recordings"
