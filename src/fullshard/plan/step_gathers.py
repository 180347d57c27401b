"""The gathers and reshards of a planned step, and the unsharded memory that they pass on to each other."""

import collections
from typing import NamedTuple

from fullshard.plan.actions import Action, ActionKind, Change, Holding, Lane
from fullshard.plan.ledger import RegionLedger
from fullshard.plan.step_state import ActionLog, UnitState
from fullshard.plan.unit_plan import Sharding, kept_nbytes, smaller_gather
from fullshard.plan.ways import NUM_TURNS


class _Turn(NamedTuple):
    """Unsharded memory of a unit that was resharded, and the action after its last reader."""

    sizes: list[int]
    read: int


class Gathers:
    """Gathers and reshards units, as `engine.unit`, `params.buffers` and `runtime.Rotation` do.

    begun: the last action on COMPUTE before the pass. is_left_alone: nobody writes to shards in the pass. Where no other rank
    reads them, the engine does not look.
    """

    def __init__(self, log: ActionLog, regions: RegionLedger, sharding: Sharding) -> None:
        self._log, self._regions, self._sharding = log, regions, sharding
        self._way = sharding.shard_way
        self._turns: collections.deque[_Turn] = collections.deque()  # oldest first
        self._num_lent = 0
        self.begun = -1
        self.is_left_alone = True

    def begin_step(self) -> None:
        """Forget actions of the step before."""
        self._turns = collections.deque(turn._replace(read=-1) for turn in self._turns)

    def gains_from_prefetch(self, unit: UnitState) -> bool:
        """Return whether gathering a unit early helps: bytes move, and they do so without the host."""
        moves = unit.plan.gathered_nbytes or unit.kept_nbytes
        return self._way.overlaps or (self._log.has_streams and bool(moves))

    def is_whole(self, unit: UnitState) -> bool:
        """Return whether this rank has a unit's whole parameters, in memory that no peer writes to."""
        is_apart = unit.is_unsharded and not unit.plan.is_in_place
        return is_apart or self._sharding.shard_size == 1 or not unit.plan.gathers

    def waits_for_compute(self, unit: UnitState) -> bool:
        """Return whether a gather waits, with streams, for all that COMPUTE was given before it."""
        is_left_alone = self.is_left_alone and self._sharding.shard_size > 1
        return not is_left_alone or unit.reshards is False or bool(unit.kept_nbytes)

    def unshard(self, unit: UnitState) -> None:
        """Start gathering a unit, unless it is there or on its way."""
        if unit.is_unsharded or unit.is_gathering or not unit.plan.gathers:
            return
        # From shards over a smaller group, if it has any.
        kept, num_ranks, gathers = unit.kept_nbytes, self._sharding.shard_size, unit.plan.gathers
        if kept:
            num_ranks, gathers = unit.group_size, smaller_gather(unit.plan, unit.group_size)
        after, changes = self._allocate(unit)
        if kept:  # the gather holds them now
            changes.insert(0, unit.change(Holding.UNSHARDED, -kept))
        unit.sent_nbytes = kept + sum(gather.cast_nbytes for gather in gathers)
        unit.regions = [gather.region for gather in gathers]
        taken = sum(self._regions.take("gather", region) for region in unit.regions)
        changes.append(unit.change(Holding.COMMUNICATION, unit.sent_nbytes + taken))
        if self._log.has_streams:  # the lane finishes it at once
            changes.append(self._arrive(unit))
        if self._sharding.offloads:
            after = (self._copy_in(unit, after, changes),)
            changes = []
        runs_beside = self._log.has_streams or self._way.overlaps
        unit.gather = self._log.issue(
            Action(
                ActionKind.ALL_GATHER,
                Lane.ALL_GATHER if runs_beside else Lane.COMPUTE,
                unit.number,
                nbytes=sum(each.buffer_nbytes for each in gathers),
                num_ranks=num_ranks,
                after=after,
            ),
            changes,
        )
        unit.is_gathering, unit.kept_nbytes = True, 0

    def _copy_in(self, unit: UnitState, after: tuple[int, ...], changes: list[Change]) -> int:
        """Copy a unit's shards from host memory, on the lane of its gather; return the action."""
        nbytes = unit.plan.shard_nbytes
        copy = Action(ActionKind.COPY, Lane.ALL_GATHER, unit.number, nbytes=nbytes, after=after)
        return self._log.issue(copy, changes)

    def wait(self, unit: UnitState) -> None:
        """Make a unit usable that is being gathered."""
        if not unit.is_gathering:
            return
        unit.is_gathering, unit.is_unsharded = False, True
        wait = Action(ActionKind.WAIT, Lane.COMPUTE, unit.number, after=(unit.gather,))
        self._log.issue(wait, [] if self._log.has_streams else [self._arrive(unit)])

    def _arrive(self, unit: UnitState) -> Change:
        """Free what a gather has sent, and the regions from which its parameters were copied."""
        given = sum(self._regions.give("gather", region) for region in unit.regions)
        return unit.change(Holding.COMMUNICATION, given - unit.sent_nbytes)

    def reshard(self, unit: UnitState, *, after_forward: bool = False) -> None:
        """Free a unit's unsharded memory; after forward, its shards over a smaller group may stay."""
        if not unit.is_unsharded:
            if unit.kept_nbytes and not after_forward:  # no backward came
                dropped = unit.change(Holding.UNSHARDED, -unit.kept_nbytes)
                unit.kept_nbytes = 0
                self._log.issue(Action(ActionKind.RESHARD, Lane.COMPUTE, unit.number), [dropped])
            return
        unit.is_unsharded = False
        changes, freed = [], sum(unit.freed)
        if after_forward and unit.group_size and not self._way.reads_in_place:
            unit.kept_nbytes = kept_nbytes(unit.plan, unit.group_size)
            changes.append(unit.change(Holding.UNSHARDED, unit.kept_nbytes))
        changes.append(unit.change(Holding.UNSHARDED, -freed))
        if unit.is_lent:
            self._turns.append(_Turn(list(unit.freed), self._log.last))
            unit.is_lent = False
            self._num_lent -= 1
            changes.append(Change(Holding.UNSHARDED, freed))
        self._log.issue(Action(ActionKind.RESHARD, Lane.COMPUTE, unit.number), changes)

    def end_rotation(self) -> None:
        """Give memory that gathers have used in turn back."""
        for turn in self._turns:
            self._log.carry(Change(Holding.UNSHARDED, -size) for size in turn.sizes)
        self._turns.clear()

    def _allocate(self, unit: UnitState) -> tuple[tuple[int, ...], list[Change]]:
        """Return the actions for which a gather waits, and the memory that it gets."""
        new = [unit.change(Holding.UNSHARDED, sum(unit.freed))]
        if not self._log.has_streams:
            return (), new
        if self.waits_for_compute(unit):
            return (self._log.last,), new
        after, wanted, changes = [self.begun], list(unit.freed), []
        while len(self._turns) > max(0, NUM_TURNS - 1 - self._num_lent):
            turn = self._turns.popleft()
            after.append(turn.read)
            for size in turn.sizes:
                changes.append(Change(Holding.UNSHARDED, -size))
                if size in wanted:  # the same memory: it goes to the unit
                    wanted.remove(size)
                    changes.append(unit.change(Holding.UNSHARDED, size))
        unit.is_lent = True
        self._num_lent += 1
        return tuple(after), [
            *changes,
            *(unit.change(Holding.UNSHARDED, size) for size in wanted),
        ]
