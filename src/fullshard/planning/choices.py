"""What a search chooses from: meshes, units, resharding, checkpointing and micro-batches.

`SearchSpace.choices` lists them in an order that is the same every time. `group_units` makes the workload of larger
units from that of single layers, so a model is traced once for all of them.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fullshard.errors import FullshardError
from fullshard.json_files import LARGEST
from fullshard.plan.workload import Enter, Event, Leave, Run, Workload, WorkloadUnit
from fullshard.planning.setup import CHECKPOINTING, OFFLOADS, TrainingSetup

WHOLE = 0  # layers in a unit: the model is one unit
_MOST_SEQUENCES = 16  # of a micro-batch


class SearchError(FullshardError, ValueError):
    """A search in a space that is empty, or in which nothing fits (`NothingFitsError`)."""


class NothingFitsError(SearchError):
    """No way to train fits into memory."""


class Choice(NamedTuple):
    """One way to train.

    shard_size, replicate_size: ranks on each axis of the mesh. layers_per_unit: 0 makes the whole model one unit.
    reshard_after_forward: of all units but the root, which stays whole until backward.
    fills: units stay unsharded after forward instead, as many as there is memory for.
    checkpointing, offload: as in `TrainingSetup`. sequences: of a micro-batch.
    num_microbatches: in a step. reduces_each: each of them reduces gradients, not the last one alone.
    """

    shard_size: int
    replicate_size: int
    layers_per_unit: int
    reshard_after_forward: bool | int
    fills: bool
    checkpointing: str
    offload: str
    sequences: int
    num_microbatches: int
    reduces_each: bool

    def __str__(self) -> str:
        mesh = f"{self.replicate_size} x {self.shard_size}" if self.replicate_size > 1 else ""
        units = {WHOLE: "one unit", 1: "units of 1 layer"}
        said = [
            f"mesh {mesh or self.shard_size}",
            units.get(self.layers_per_unit, f"units of {self.layers_per_unit} layers"),
            f"reshard {self.reshard_after_forward}{', kept as memory allows' if self.fills else ''}",
            f"checkpointing {self.checkpointing}",
            *([f"{self.offload} on the host"] if self.offload != "none" else []),
            f"micro-batch {self.sequences}",
        ]
        if self.num_microbatches > 1:
            said[-1] += f" x {self.num_microbatches}"
            said.append("each reduces" if self.reduces_each else "the last reduces")
        return ", ".join(said)


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """What is searched: every combination that is possible. Raises SearchError for one that is empty.

    shard_sizes: that divide the ranks; what is left over are replicas. layers_per_unit: 0 makes the model one unit.
    reshard_after_forward: True, False, sizes of smaller groups. fills: also units that stay unsharded as far as
    memory goes. checkpointing, offload: as in `TrainingSetup`.
    sequences: of micro-batches; those that divide a rank's part of the batch.
    """

    shard_sizes: tuple[int, ...]
    sequences: tuple[int, ...]
    layers_per_unit: tuple[int, ...] = (1, 2, 4)
    reshard_after_forward: tuple[bool | int, ...] = (True, False)
    fills: bool = True
    checkpointing: tuple[str, ...] = CHECKPOINTING
    offload: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        sizes, from_zero = range(1, LARGEST), range(LARGEST)
        for name, known in (
            *(("shard_sizes", sizes), ("sequences", sizes)),
            *(("layers_per_unit", from_zero), ("reshard_after_forward", from_zero)),
            *(("checkpointing", CHECKPOINTING), ("offload", OFFLOADS)),
        ):
            values: Any = getattr(self, name)
            is_several, kind = isinstance(values, tuple | list) and values, type(known[0])
            if not is_several or not all(isinstance(n, kind) and n in known for n in values):
                some = f"numbers from {known[0]}" if isinstance(known, range) else ", ".join(known)
                raise SearchError(f"SearchSpace({name}={values!r}): expected a tuple of {some}.")

    def choices(self, ranks: int, per_rank: int) -> Iterator[Choice]:
        """Yield all that is possible, in order. per_rank: sequences that a rank has in a step."""
        for shards in self.shard_sizes:
            if ranks % shards:
                raise SearchError(f"A mesh with {shards} shards: they do not divide {ranks} ranks.")
        sequences = [each for each in self.sequences if per_rank % each == 0]
        if not sequences:
            raise SearchError(
                f"Micro-batches of {self.sequences} sequences: none of them divides the {per_rank} that a rank has in a "
                "step."
            )
        if not any(
            [*self._resharding(n, k)] for n in self.shard_sizes for k in self.layers_per_unit
        ):
            raise SearchError(
                f"reshard_after_forward of {self.reshard_after_forward}: none is True, False, or a size of groups that "
                f"divides one of {self.shard_sizes} shards."
            )
        for shards, layers, checkpointing, offload, each in itertools.product(
            *(self.shard_sizes, self.layers_per_unit, self.checkpointing, self.offload, sequences)
        ):
            num = per_rank // each
            for reshard, fills in self._resharding(shards, layers):
                for reduces_each in (False, True) if num > 1 else (False,):
                    yield Choice(
                        *(shards, ranks // shards, layers, reshard, fills),
                        *(checkpointing, offload, each, num, reduces_each),
                    )

    def _resharding(self, shards: int, layers: int) -> Iterator[tuple[bool | int, bool]]:
        if shards == 1 or layers == WHOLE:  # nothing is gathered, or all of it by the root
            yield False, False
            return
        for reshard in self.reshard_after_forward:
            is_group = not isinstance(reshard, bool)
            if is_group and not (1 < reshard < shards and shards % reshard == 0):
                continue
            yield reshard, False
            if self.fills and reshard is not False:
                yield reshard, True


def default_space(setup: TrainingSetup, workload: Workload, *, takes_batch: bool) -> SearchSpace:
    """Return the space that is worth a search: hosts and multiples of them, parts of a host, small powers of two.

    workload: with units of one layer. takes_batch: whether the micro-batch can be chosen.
    """
    ranks, per_host, num_layers = setup.ranks, setup.machine.per_host, len(layers_of(workload))
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    shards = [n for n in divisors if n % per_host == 0 or per_host % n == 0]
    in_all = setup.batch * setup.accumulation
    sequences = [n for n in range(1, _MOST_SEQUENCES + 1) if in_all % n == 0]
    has_units = len(workload.units) > 1
    groups = [n for n in (2, 4, 8) if 2 * n <= num_layers]
    return SearchSpace(
        shard_sizes=tuple(shards),
        sequences=tuple(sequences) if takes_batch else (setup.batch,),
        layers_per_unit=(1, *groups, WHOLE) if has_units else (WHOLE,),
        reshard_after_forward=(True, False, *((per_host,) if per_host > 1 else ())),
        checkpointing=CHECKPOINTING if has_units else ("none",),
        offload=("none", "optimizer"),
    )


# Units of several layers


def layers_of(workload: Workload) -> list[int]:
    """Return the units that may be joined: those that run once, directly in the root, one after another.

    Empty if any unit does not.
    """
    entered, depth = [], 0
    for event in workload.events:
        if isinstance(event, Enter):
            if depth == 1:
                entered.append(event.unit)
            elif depth > 1:
                return []
            depth += 1
        elif isinstance(event, Leave):
            depth -= 1
    is_each_once = sorted(entered) == [*range(1, len(workload.units))]
    return entered if is_each_once else []


def group_units(workload: Workload, layers_per_unit: int) -> Workload:
    """Return the same pass with units of several layers, as ``fully_shard([layer, layer])`` makes them.

    Such a unit is named by all of its layers, as in `fullshard.describe`. Its parameters are gathered before the first
    of them and freed after the last one. Raises SearchError where units run more than once or within each other.
    """
    if layers_per_unit == 1 or len(workload.units) == 1:
        return workload
    layers = layers_of(workload)
    if layers_per_unit != WHOLE and not layers:
        raise SearchError(
            f"Units of {layers_per_unit} layers: units of this model run more than once or within each other. "
            "Search with layers_per_unit=(1,)."
        )
    groups = [[*range(len(workload.units))]]
    if layers_per_unit != WHOLE:
        starts = range(0, len(layers), layers_per_unit)
        groups = [[0], *(layers[start : start + layers_per_unit] for start in starts)]
    units = tuple(
        WorkloadUnit(
            ", ".join(workload.units[unit].name for unit in group) if group[0] else "",
            tuple(param for unit in group for param in workload.units[unit].params),
        )
        for group in groups
    )
    return dataclasses.replace(workload, units=units, events=tuple(_joined(workload, groups)))


def _joined(workload: Workload, groups: Sequence[Sequence[int]]) -> Iterator[Event]:
    """Yield events of larger units: they begin with their first layer and end with their last."""
    number_of = {unit: number for number, group in enumerate(groups) for unit in group}
    first = {group[0] for group in groups}
    last = {group[-1] if group[0] else 0 for group in groups}  # the root ends after all in it
    for event in workload.events:
        if isinstance(event, Run):
            yield event._replace(unit=number_of.get(event.unit, event.unit))
        elif event.unit in (first if isinstance(event, Enter) else last):
            yield event._replace(unit=number_of[event.unit])
