"""The gradients of a planned step: kept, reduced, and given to shards, in the order of `gradients.queue`."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from fullshard.plan.actions import Action, ActionKind, Change, Holding, Lane
from fullshard.plan.ledger import RegionLedger, RingLedger, ScratchLedger
from fullshard.plan.step_state import ActionLog, UnitState
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import (
    KEPT_NBYTES,
    MAX_REPLICATED,
    PEER_MEMORY,
    ReduceMemory,
    Region,
    ring_nbytes,
)


@dataclasses.dataclass
class _Flight:
    """A reduction from its start to its release.

    was_summed: of sums of several backwards. is_put_off: replicas sum it in a later backward.
    start, end: the actions that start it, and after which it may be released.
    copied_nbytes, regions: what travels beside full gradients, until its reduce-scatter is over.
    held_nbytes: of full gradients that are read until then, or with streams until its release.
    blocks: scratch blocks that were taken. totals: those with sums, by bucket.
    staged: the numbers of reductions in a ring whose sums are not formed yet, by bucket.
    """

    unit: UnitState
    was_summed: bool
    is_put_off: bool
    start: int = -1
    end: int = -1
    copied_nbytes: int = 0
    regions: list[Region] = dataclasses.field(default_factory=list)
    held_nbytes: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    totals: dict[int, int] = dataclasses.field(default_factory=dict)
    staged: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def buckets(self) -> range:
        """The numbers of its buckets."""
        return range(len(self.unit.plan.buckets))


class Reductions:
    """Reduces gradients of units.

    max_under_way: how many reductions may hold memory, as long as the oldest of them is finished.
    puts_off: sums are not summed over replicas in the backward that runs.
    """

    def __init__(
        self,
        log: ActionLog,
        regions: RegionLedger,
        sharding: Sharding,
        units: Iterable[UnitState],
        *,
        max_under_way: int,
    ) -> None:
        self._log, self._regions, self._sharding = log, regions, sharding
        self._way, self._has_streams = sharding.shard_way, log.has_streams
        self._max_under_way = max_under_way
        self.puts_off = False
        self._has_replicas = sharding.replicate_size > 1
        self._runs_beside = log.has_streams or self._way.overlaps
        self._scratch = ScratchLedger(keeps=not log.has_streams)
        staged = [nbytes for unit in units for nbytes in unit.plan.staged]
        self.ring = RingLedger(ring_nbytes(staged) if self._way is PEER_MEMORY else 0)
        self._started: collections.deque[_Flight] = collections.deque()
        self._finished: collections.deque[_Flight] = collections.deque()
        self._replicated: list[_Flight] = []  # summed over replicas, on a lane of their own
        self._wait_for: list[int] = []  # what the next reduce-scatter waits for

    # What a pass does with gradients

    def free_unused(self, unit: UnitState) -> None:
        """Free large gradient memory that nobody uses, since activations need the room. Pinned memory stays."""
        if self._sharding.offloads:
            return
        for number in [*unit.pooled]:
            nbytes = unit.plan.buckets[number].shard_nbytes
            if nbytes > KEPT_NBYTES:
                unit.pooled.remove(number)
                self._log.carry([unit.change(Holding.GRADIENT_SHARDS, -nbytes)])

    def accumulate(self, unit: UnitState) -> None:
        """Keep full gradients, added up, for a later reduction."""
        full, unit.full_nbytes = unit.full_nbytes, 0
        if not full:
            return
        sums = 0 if unit.sums_nbytes else unit.plan.sums_nbytes
        gone = unit.change(Holding.FULL_GRADIENTS, -full)
        come = unit.change(Holding.FULL_GRADIENTS, sums)
        # Often the sum is the gradient itself.
        is_itself = sums == full and not self._sharding.is_flat
        self._log.carry([gone, come] if is_itself else [come, gone])
        unit.sums_nbytes, unit.is_holding = unit.plan.sums_nbytes, True

    def reduce(self, unit: UnitState) -> None:
        """Start reducing full gradients, with what was accumulated, and finish older reductions."""
        if self._way.overlaps or any(each.unit is unit for each in self._started):
            self.finish()  # its memory serves this one
        self._wait_for += [each.end for each in self._replicated if each.unit is unit]
        is_owed = unit.waiting and not self.puts_off  # sums that replicas have yet to sum
        if not (unit.is_holding or unit.full_nbytes or is_owed):
            return
        is_put_off = self._has_replicas and self.puts_off
        flight = _Flight(unit, was_summed=unit.is_holding, is_put_off=is_put_off)
        nbytes = self._take_sums(unit) if unit.is_holding else unit.full_nbytes
        unit.full_nbytes = 0
        if unit.plan.is_handed_over:
            self._hand_over(unit, nbytes)
            return
        self._start(flight, nbytes)
        self._started.append(flight)
        self.finish(keep=0 if self._has_streams else 1)

    def zero(self, unit: UnitState) -> list[Change]:
        """Drop the gradients of shards; return what that changes."""
        handed, unit.handed_nbytes = unit.handed_nbytes or 0, None
        unit.pooled |= unit.with_gradient
        unit.with_gradient = set()
        return [unit.change(Holding.GRADIENT_SHARDS, -handed)]

    def _take_sums(self, unit: UnitState) -> int:
        """Return the bytes of sums that are freed once they were read."""
        self.accumulate(unit)
        unit.is_holding = False
        if not self._runs_beside:
            return 0  # where nothing else comes and goes that is as large, their pages stay
        nbytes, unit.sums_nbytes = unit.sums_nbytes, 0
        return nbytes

    def _hand_over(self, unit: UnitState, nbytes: int) -> None:
        """Let full gradients be those of the shards, or add them to these."""
        self._log.carry([unit.change(Holding.FULL_GRADIENTS, -nbytes)])
        if unit.handed_nbytes is None:
            # Sums may be in memory that stays theirs.
            is_new = nbytes or not unit.plan.hands_sums
            unit.handed_nbytes = unit.plan.handed_nbytes if is_new else 0
            self._log.carry([unit.change(Holding.GRADIENT_SHARDS, unit.handed_nbytes)])

    # Starting

    def _start(self, flight: _Flight, full_nbytes: int) -> None:
        """Start reduce-scatters. full_nbytes: of full gradients, which are freed when they were read."""
        unit, changes, held = flight.unit, [], 0
        memories = [each.summed if flight.was_summed else each.first for each in unit.plan.buckets]
        for number, memory in enumerate(memories):
            if self._way is PEER_MEMORY:
                changes += self._stage(flight, number)
            else:
                changes += self._take_total(flight, number)
            zeros = 0 if full_nbytes else memory.held_nbytes  # travel in place of gradients
            changes += self._take_staging(flight, memory, memory.copied_nbytes + zeros)
            held += memory.held_nbytes
        if (
            self._has_streams
        ):  # the lane finishes it at once, but compute may not free what it reads
            changes.append(self._give_staging(flight))
            held = full_nbytes
            if not self._has_replicas:
                changes += [c for n in flight.buckets for c in self._deposit(flight, n)]
        flight.held_nbytes = min(held, full_nbytes)
        changes.append(unit.change(Holding.FULL_GRADIENTS, flight.held_nbytes - full_nbytes))
        after, self._wait_for = (self._log.last, *self._wait_for), []
        flight.start = flight.end = self._log.issue(
            Action(
                ActionKind.REDUCE_SCATTER,
                Lane.REDUCE_SCATTER if self._runs_beside else Lane.COMPUTE,
                unit.number,
                nbytes=sum(memory.sent_nbytes for memory in memories),
                num_ranks=self._sharding.shard_size,
                after=after if self._has_streams else (),
            ),
            changes,
        )
        if self._sharding.offloads and not self._has_replicas:
            flight.end = self._copy_out(unit, flight.start, Lane.REDUCE_SCATTER)

    def _copy_out(self, unit: UnitState, after: int, lane: Lane) -> int:
        """Copy sums to gradients in host memory; return the action."""
        nbytes = sum(bucket.shard_nbytes for bucket in unit.plan.buckets)
        copy = Action(ActionKind.COPY, lane, unit.number, nbytes=nbytes, after=(after,))
        return self._log.issue(copy)

    def _stage(self, flight: _Flight, number: int) -> list[Change]:
        """Stage a bucket in the ring, for which earlier sums may have to be formed."""
        plan = flight.unit.plan
        claim = self.ring.claim((plan.staged_sums if flight.was_summed else plan.staged)[number])
        changes = []
        for each in (*self._started, flight):
            staged = [n for n, sequence in each.staged.items() if sequence <= claim.first]
            changes += [change for n in staged for change in self._form_sum(each, n)]
        flight.staged[number] = claim.sequence
        return [*changes, Change(Holding.COMMUNICATION, claim.grown)]

    def _form_sum(self, flight: _Flight, number: int) -> list[Change]:
        """Form a bucket's sum of what is staged in the ring, if it is not formed."""
        is_staged = flight.staged.pop(number, None) is not None
        return self._take_total(flight, number) if is_staged else []

    def _take_total(self, flight: _Flight, number: int) -> list[Change]:
        """Take memory for a bucket's sum over the shard axis."""
        unit, bucket = flight.unit, flight.unit.plan.buckets[number]
        if bucket.is_final and not flight.is_put_off and number not in unit.with_gradient:
            return self._take_shards(unit, number)
        flight.totals[number], grown = self._scratch.take(bucket.total_nbytes)
        return [self._scratch_change(unit, grown)]

    def _scratch_change(self, unit: UnitState, nbytes: int) -> Change:
        """Return a change of scratch memory, which belongs to no unit where it is kept for all."""
        return Change(Holding.COMMUNICATION, nbytes, unit.number if self._has_streams else -1)

    def _take_shards(self, unit: UnitState, number: int) -> list[Change]:
        """Take memory for a bucket's gradients: what was kept, or new."""
        if number in unit.pooled or self._sharding.offloads:  # not on the device
            unit.pooled.discard(number)
            return []
        return [unit.change(Holding.GRADIENT_SHARDS, unit.plan.buckets[number].shard_nbytes)]

    def _take_staging(
        self, flight: _Flight, memory: ReduceMemory, copied_nbytes: int
    ) -> list[Change]:
        """Take what a reduce-scatter needs until it is over."""
        grown = copied_nbytes + self._regions.take("reduce", memory.region)
        changes = [flight.unit.change(Holding.COMMUNICATION, grown)]
        for nbytes in memory.scratch_nbytes:
            block, grown = self._scratch.take(nbytes)
            flight.blocks.append(block)
            changes.append(self._scratch_change(flight.unit, grown))
        flight.copied_nbytes += copied_nbytes
        flight.regions.append(memory.region)
        return changes

    def _give_staging(self, flight: _Flight) -> Change:
        """Give back what a reduce-scatter that is over has sent."""
        given = sum(self._regions.give("reduce", region) for region in flight.regions)
        return flight.unit.change(Holding.COMMUNICATION, given - flight.copied_nbytes)

    def _deposit(self, flight: _Flight, number: int) -> list[Change]:
        """Give a bucket's sum to the sharded parameters."""
        unit, changes = flight.unit, []
        is_taken = unit.plan.buckets[number].is_taken
        if number in flight.totals and not (is_taken and number in unit.with_gradient):
            changes += self._take_shards(unit, number)
        if number in flight.totals and not self._has_streams:
            self._scratch.give(flight.totals.pop(number))  # where it stays
        (unit.with_gradient if is_taken else unit.pooled).add(number)
        return changes

    # Finishing and releasing

    def finish(self, *, keep: int = 0) -> None:
        """Finish all reductions but the last ones."""
        while len(self._started) > keep:
            flight = self._started.popleft()
            if self._has_streams:
                self._finish_on_lanes(flight)
            else:
                self._finish_on_host(flight)
        while self._finished and len(self._finished) + len(self._started) > self._max_under_way:
            self._wait(self._finished.popleft())
        scratch = [each for each in self._replicated if each.totals or each.is_put_off]
        for oldest in scratch[:-MAX_REPLICATED]:
            self._wait_for.append(oldest.end)
            self._log.carry(self._drop_totals(oldest))
            self._replicated.remove(oldest)

    def release(self) -> None:
        """Let COMPUTE wait for all reductions, which are finished."""
        for flight in (*self._finished, *self._replicated):
            self._wait(flight, host_waits=self._sharding.offloads)
        self._finished.clear()
        self._replicated.clear()
        self._wait_for.clear()  # what COMPUTE has waited for is over

    def _finish_on_host(self, flight: _Flight) -> None:
        unit, changes, summed = flight.unit, [self._give_staging(flight)], []
        changes.append(unit.change(Holding.FULL_GRADIENTS, -flight.held_nbytes))
        for block in flight.blocks:
            self._scratch.give(block)
        for number in flight.buckets:  # one after the other, by whose scratch the next is served
            changes += self._form_sum(flight, number)
            if self._has_replicas:
                changes += self._put_off(flight, number)
            if not flight.is_put_off:
                summed += self._sum_replicas(flight, number)
        is_all_reduced = self._has_replicas and not flight.is_put_off
        wait = Action(ActionKind.WAIT, Lane.COMPUTE, unit.number, after=(flight.start,))
        self._log.issue(wait, changes if is_all_reduced else [*changes, *summed])
        if is_all_reduced:
            self._all_reduce(flight, summed)

    def _finish_on_lanes(self, flight: _Flight) -> None:
        if self._has_replicas:  # from here on two: what was read, and what is summed over replicas
            self._log.carry(c for n in flight.buckets for c in self._put_off(flight, n))
            if not flight.is_put_off:
                summed = [c for n in flight.buckets for c in self._sum_replicas(flight, n)]
                flight.end = self._all_reduce(flight, summed)
                if self._sharding.offloads:
                    flight.end = self._copy_out(flight.unit, flight.end, Lane.ALL_REDUCE)
            self._replicated.append(dataclasses.replace(flight, held_nbytes=0))
            flight = dataclasses.replace(flight, end=flight.start, totals={})
        self._finished.append(flight)

    def _put_off(self, flight: _Flight, number: int) -> list[Change]:
        """Add a sum that waits for the replicas' to a newer one, which may wait in its place; return what that changes."""
        unit, changes = flight.unit, []
        if block := unit.waiting.pop(number, 0):
            changes.append(unit.change(Holding.FULL_GRADIENTS, -block))
            changes.append(self._scratch_change(unit, block + self._scratch.give(block)))
        if flight.is_put_off:
            block = unit.waiting[number] = flight.totals.pop(number)
            changes.append(self._scratch_change(unit, -block))
            changes.append(unit.change(Holding.FULL_GRADIENTS, block))
        return changes

    def _sum_replicas(self, flight: _Flight, number: int) -> list[Change]:
        """Sum a bucket over replicas, if there are any, and give the sum to parameters; return what that changes."""
        cast = flight.unit.plan.buckets[number].cast_nbytes
        casts = [flight.unit.change(Holding.COMMUNICATION, n) for n in (cast, -cast)]
        return [*casts, *self._deposit(flight, number)]

    def _all_reduce(self, flight: _Flight, changes: Sequence[Change]) -> int:
        """Sum over replicas; return the action."""
        unit, buckets = flight.unit, flight.unit.plan.buckets
        runs_beside = self._has_streams or self._sharding.all_reduce_way.overlaps
        return self._log.issue(
            Action(
                ActionKind.ALL_REDUCE,
                Lane.ALL_REDUCE if runs_beside else Lane.COMPUTE,
                unit.number,
                nbytes=sum(bucket.all_reduced_nbytes for bucket in buckets),
                num_ranks=self._sharding.replicate_size,
                after=(flight.start,),
                host_waits=not self._has_streams,
            ),
            changes,
        )

    def _wait(self, flight: _Flight, *, host_waits: bool = False) -> None:
        """Let COMPUTE wait for a reduction, and free what it has read. host_waits: the host, too."""
        held = flight.unit.change(Holding.FULL_GRADIENTS, -flight.held_nbytes)
        wait = Action(
            ActionKind.WAIT,
            Lane.COMPUTE,
            flight.unit.number,
            after=(flight.end,),
            host_waits=host_waits,
        )
        self._log.issue(wait, [held, *self._drop_totals(flight)])

    def _drop_totals(self, flight: _Flight) -> list[Change]:
        nbytes = sum(self._scratch.give(block) for block in flight.totals.values())
        return [flight.unit.change(Holding.COMMUNICATION, nbytes)]
