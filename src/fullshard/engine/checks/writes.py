"""Notice writes to parameters, while the model runs and between its passes, and stay right in spite of them.

What the fast ways of gathering assume, and what breaks it: docs/design.md, "Writes while the model runs".
The first two passes of each kind (training or evaluation, with or without gradients) are *watched*, and some
later ones, ever fewer:

    watched pass   every gather is ordered with all ranks' writes, goes to private memory and is
                   never early; contents are compared from use to use: right whatever the program does
    after it       units that nobody wrote to are read in place and gathered early again; the
                   others stay ordered as long as the model lives

On devices with streams the host waits once for what a watched pass has compared, when the next pass begins;
later writes are noticed by version counters alone, as the host would have to wait for contents.

What stays unsharded from one pass to the next is in memory of this rank alone, so a forward need
not gather it, unless somebody has written to its shards since: see `StayedUnits`.

[Note: Ordered gathers] All ranks meet, copy, and meet again: every rank gets what each wrote before
it came to the unit, and nothing of what it writes later, as with a collective. All ranks have to
agree which units are ordered, so what each has seen is combined between two passes.
"""

import collections
import itertools
import operator
from collections.abc import Container, Iterable, Sequence

import torch

from fullshard.engine.guard.param_watch import fingerprints, words_of
from fullshard.engine.restoring import naming_lack
from fullshard.engine.runtime import no_grad, outside_transforms
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.plan.ways import COPIED_WORDS
from fullshard.torch_private import are_transforms_active

# Passes of a kind that are watched, counted from 0: the first two, and more and more rarely later.
_WATCHED = frozenset({0, 1, 32, 1024, 32768})


class _Watched:
    """One unit's contents when they were last compared, and whether somebody wrote to them."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.is_written = False
        # On devices with streams: vectors that say which contents have changed, and whose these were.
        self.unread: list[tuple[torch.Tensor, list[str]]] = []
        self._shards = fingerprints(unit.params.shard_memory)
        self._num_writes = self._count_writes()
        self._unsharded: list[torch.Tensor] | None = None  # from `open` to `close`
        self._versions: list[int] = []  # of the unsharded parameters, at `open`

    def open(self) -> None:
        """Compare shards and take note of the unsharded parameters, which are about to be used."""
        self.note_shards()
        # A unit may be sharded in its own backward (`set_unshard_in_backward(False)`).
        if self._unsharded is None and self.unit.is_unsharded:
            self._unsharded, self._versions = self.unit.watch.whole_contents()

    def close(self) -> None:
        """Compare shards and unsharded parameters, at the end of a forward or backward.

        Warns of writes to unsharded parameters, which are lost. On devices with streams, of those that
        advance no version counter, `conclude` warns.
        """
        self.note_shards()
        before, self._unsharded = self._unsharded, None
        if before is None or not self.unit.is_unsharded:
            return  # it had no backward of its own, or is freed already
        after, versions = self.unit.watch.whole_contents()
        names = [param.name for param in self.unit.params.plain]
        are_written = map(operator.ne, versions, self._versions)
        self._warn_of(list(itertools.compress(names, are_written)))
        self._compare(before, after, names)

    def compare_shards(self) -> bool:
        """Note whether the shards were written to since the last call, and return it.

        On devices with streams the host waits for the answer.
        """
        self._read()
        was_written, self.is_written = self.is_written, False
        self.note_shards()
        self._read()
        has_changed = self.is_written
        self.is_written |= was_written
        return has_changed

    def _read(self) -> None:
        self.conclude([flag for flags, _ in self.unread for flag in flags.tolist()])

    def note_shards(self) -> None:
        """Note whether the shards were written to since the last call.

        Version counters are compared as well: later passes go by them, and so refuse a write that
        changes no value.
        """
        before, self._shards = self._shards, fingerprints(self.unit.params.shard_memory)
        num_before, self._num_writes = self._num_writes, self._count_writes()
        self.is_written |= num_before != self._num_writes
        self._compare(before, self._shards, [])

    def _compare(
        self, before: list[torch.Tensor], after: list[torch.Tensor], names: list[str]
    ) -> None:
        """Compare contents, now or on the device. names: of the unsharded parameters that they are of."""
        if not self.unit.runtime.has_streams:
            self._note([not torch.equal(*pair) for pair in zip(before, after, strict=True)], names)
        elif before:
            flags = [(old != new).any() for old, new in zip(before, after, strict=True)]
            self.unread.append((torch.stack(flags), names))

    def _note(self, have_changed: Sequence[bool], names: Sequence[str]) -> None:
        self.is_written |= any(have_changed)
        self._warn_of(list(itertools.compress(names, have_changed)))

    def _warn_of(self, names: Sequence[str]) -> None:
        if names:
            self.is_written = True
            self.unit.watch.warn_of_lost(self.unit.label, names)

    def conclude(self, have_changed: Sequence[bool]) -> None:
        """Take note of what the device has found: the elements of ``unread``, one after the other."""
        flags = iter(have_changed)
        for vector, names in self.unread:
            self._note(list(itertools.islice(flags, len(vector))), names)
        self.unread.clear()

    def _count_writes(self) -> int:
        """Sum the version counters that `ParamWatch.changed_since_begin` compares in place."""
        watch = self.unit.watch
        return watch.num_writes() + watch.num_unsharded_writes()


class _Sample:
    """The contents of a unit's shards when `WriteWatch` last took them.

    views: the small shards, as 1-D integers. before: copies of them. large: the others. sums: of those.
    """

    def __init__(self, unit: Unit) -> None:
        self.buffers = unit.params.buffers  # other buffers need another sample
        # Not inference tensors, even if made in an inference pass: training passes write to them.
        with torch.inference_mode(False):
            words = [words_of(tensor) for tensor in unit.params.shard_memory if tensor.numel()]
            self.views = [each for each in words if each.numel() <= COPIED_WORDS]
            self.before = [torch.empty_like(view) for view in self.views]
            self.large = [each for each in words if each.numel() > COPIED_WORDS]
            self.sums: list[torch.Tensor] = []

    def take(self) -> None:
        """Take note of all shards."""
        if self.large:
            self.sums = fingerprints(self.large)
        if self.views:
            torch._foreach_copy_(self.before, self.views)

    @property
    def has_changed(self) -> bool:
        """True if any of the shards has other contents now."""
        if not all(map(torch.equal, self.before, self.views)):
            return True
        return bool(self.large) and not all(map(torch.equal, self.sums, fingerprints(self.large)))


def _may_be_ordered(unit: Unit) -> bool:
    """Return whether the unit is at rest, has contents to compare, and runs on all ranks."""
    # An ordered gather has all ranks meet, and one that skips the unit would not come.
    runs_everywhere = not unit.config.reduces_unused
    shards = unit.params.shard_memory
    # Fake tensors have no contents to compare.
    is_real = all(type(tensor) is torch.Tensor for tensor in shards)
    return runs_everywhere and is_real and unit.is_sharded and bool(unit.params.plain)


def _set_ordered(unit: Unit, *, ordered: bool) -> None:
    """Order gathers with all ranks' writes, or read in place and gather early again.

    Raises AllocationError if there is no private memory to gather into.
    """
    if unit.comm.reads_in_place and unit.may_be_in_place:
        if ordered and unit.is_in_place:
            with naming_lack(f"{unit.path}: private memory", "Values are as they were."):
                unit.params.bind(in_place=False)
        elif not ordered and unit.is_sharded:
            unit.params.bind(in_place=True)
            if unit.params.is_in_place:
                unit.watch.begin()  # nothing was noted while the unit was private
    unit.is_ordered = ordered


def _has_readers(unit: Unit) -> bool:
    """Return whether peers have a part of it. Who has all of it reads nothing of others, nor gathers early."""
    return unit.mesh.plan.shard_size > 1


class WriteWatch:
    """Watches some passes of one model, and takes samples in the others.

    units: all of the model's, in an order that is the same on every rank.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = [unit for unit in units if _has_readers(unit)]
        # How many passes there were, by kind: (is training, with gradients).
        self._passes: collections.Counter[tuple[bool, bool]] = collections.Counter()
        self._watched: dict[Unit, _Watched] = {}  # also after the pass, until all agree
        self._samples: dict[Unit, _Sample] = {}
        self._is_due = False  # the next pass is watched, whatever its number
        self.is_watching = False

    @outside_transforms
    def begin_pass(self, *, is_training: bool) -> None:
        """Decide whether to watch the pass that begins. Every rank has to call it.

        Raises AllocationError if a watched pass lacks private memory.
        """
        self.conclude()  # first, so that this pass may watch the same units anew
        kind = is_training, torch.is_grad_enabled()
        number = self._passes[kind]
        self._passes[kind] += 1
        if number not in _WATCHED and not self._is_due:
            self.take_samples()
            return
        self.is_watching, self._is_due = True, False
        for unit in self._units:
            if unit.is_written or not (unit in self._watched or _may_be_ordered(unit)):
                continue
            _set_ordered(unit, ordered=True)  # first, since it may raise
            with no_grad():
                self._watched[unit] = _Watched(unit)

    @property
    def has_unread(self) -> bool:
        """True if the host has yet to ask what a watched pass has compared."""
        return bool(self._watched)

    def watch_next(self) -> None:
        """Watch the next pass, too."""
        self._is_due = True

    @outside_transforms
    def conclude(self) -> None:
        """End watching. Ask what the device has compared, and agree. Every rank has to call it."""
        self.is_watching = False
        if self._watched:
            self._conclude()

    def check_unwritten(self, unit: Unit) -> None:
        """Raise StateError if somebody wrote to a unit that peers read in place."""
        if unit.watch.changed_since_begin and _has_readers(unit):
            self._refuse(unit)

    def refuse_writes(self, units: Iterable[Unit]) -> None:
        """Raise StateError if somebody wrote, since forward began, to shards that peers read.

        In a watched pass nobody reads them: a write is noted.
        """
        for unit in units:
            if (
                unit.params.is_in_place
                and _has_readers(unit)
                and (unit.watch.reached_peers or self.has_changed(unit))
            ):
                self._refuse(unit)
            elif self.is_watching and unit in self._watched:
                self.note_shards(unit)  # an error here in a later pass

    @outside_transforms
    def open(self, units: Iterable[Unit]) -> None:
        """Compare units whose parameters are about to be used, in forward or backward."""
        with no_grad():
            for unit in units:
                if (watched := self._watched.get(unit)) is not None:
                    watched.open()

    @outside_transforms
    def close(self, units: Iterable[Unit]) -> None:
        """Compare units that were used. Call it before their parameters are freed."""
        with no_grad():
            for unit in units:
                if (watched := self._watched.get(unit)) is not None:
                    watched.close()

    @outside_transforms
    def take_samples(self) -> None:
        """Sample the shards that peers read in place, which nobody may write to from now on."""
        views: list[torch.Tensor] = []
        before: list[torch.Tensor] = []
        for unit in self._units:
            sample = self._sample_of(unit) if unit.params.is_in_place else None
            if sample is not None:
                sample.sums = fingerprints(sample.large)
                views += sample.views
                before += sample.before
        if views:  # all of them at once, which costs the host least
            torch._foreach_copy_(before, views)

    def note_shards(self, unit: Unit, *, is_outside: bool = False) -> None:
        """Take note of shards that are gathered before their module is called, or at the end of a pass.

        is_outside: transforms are switched off.
        """
        # Seldom, so no decorator, which is a function in between. They count as active while switched off.
        if are_transforms_active() and not is_outside:
            outside_transforms(self.note_shards)(unit, is_outside=True)
            return
        watched = self._watched.get(unit) if self._watched else None
        if watched is not None:
            with no_grad():
                watched.note_shards()
        elif (sample := self._sample_of(unit)) is not None:
            sample.take()

    def has_changed(self, unit: Unit, *, is_outside: bool = False) -> bool:
        """Return whether shards were written to since the last sample, as far as contents tell.

        Such a write may show on one rank alone, where version counters advance on all. is_outside: as
        in `note_shards`.
        """
        if are_transforms_active() and not is_outside:
            return outside_transforms(self.has_changed)(unit, is_outside=True)
        if self._watched and (watched := self._watched.get(unit)) is not None:
            with no_grad():
                return watched.compare_shards()
        # A watched pass takes no samples in place; those that there are may be of an older pass.
        is_old = self.is_watching and unit.params.is_in_place
        sample = None if is_old else self._samples.get(unit)
        return sample is not None and sample.has_changed

    def _sample_of(self, unit: Unit) -> _Sample | None:
        """Return the memory of a unit's last sample. None on devices with streams.

        There, comparing contents would let the host wait for the device.
        """
        if unit.runtime.has_streams:
            return None
        sample = self._samples.get(unit)
        if sample is None or sample.buffers is not unit.params.buffers:
            sample = self._samples[unit] = _Sample(unit)
        return sample

    def _refuse(self, unit: Unit) -> None:
        """Raise StateError for a write, and watch the next pass of every kind, as others had not seen it."""
        self._passes.clear()
        raise StateError(
            f"{unit.label}: its parameters were written to while the model ran, between the beginning "
            "of forward and the end of backward. The first passes did not do that, so the ranks of "
            "this host read each other's parameters in place, and some may have read half-written "
            "values. Write between steps, or from the first step on, or call "
            "set_default_comm('process_group') before sharding."
        )

    def _conclude(self) -> None:
        """Agree on which units were written to, and let the others be read in place again.

        Every rank has to call it. A unit whose private memory is still in use, by a graph say,
        keeps it, and is asked about again before the next pass.
        """
        if unread := [flags for each in self._watched.values() for flags, _ in each.unread]:
            found = iter(torch.cat(unread).tolist())  # the host waits, once
            for watched in self._watched.values():
                num_flags = sum(len(flags) for flags, _ in watched.unread)
                watched.conclude(list(itertools.islice(found, num_flags)))
        written = {unit for unit, watched in self._watched.items() if watched.is_written}
        in_use = {
            unit
            for unit in self._watched
            if unit.comm.reads_in_place
            and (buffers := unit.params.buffers) is not None
            and (not unit.is_sharded or buffers.is_in_use)
        }
        # Of all units, watched or not, so that each has its place on all ranks.
        written = _chosen_by_any(written, self._units)
        in_use = _chosen_by_any(in_use, [u for u in self._units if u.comm.reads_in_place])
        for unit in [*self._watched]:
            if unit in written:
                unit.is_written = True
            elif unit in in_use:
                continue
            else:
                _set_ordered(unit, ordered=False)
                unit.is_unwritten = True
            del self._watched[unit]


class StayedUnits:
    """The units of one model that stayed unsharded after its last pass.

    All ranks have to agree which of them to gather anew, or one would wait for the others in vain.
    """

    def __init__(self) -> None:
        self._stayed: list[Unit] = []

    def note(self, unsharded: Iterable[Unit]) -> None:
        """Note which of these are unsharded in private memory, at the end of a pass of all ranks."""
        self._stayed = [unit for unit in unsharded if not unit.params.is_in_place]

    def drop_outdated(self, unsharded: Iterable[Unit], *, is_for_all: bool) -> None:
        """Reshard units, of these, whose shards were written to since they were gathered.

        A rank notices writes to its own rows, and may have no rows of a unit. So ranks agree if all
        run this forward (``is_for_all``). Otherwise, where this rank may evaluate alone, one
        outdated unit stands for all, so that ranks are likely to do the same.
        """
        outdated = {unit for unit in unsharded if unit.is_outdated}
        if is_for_all and self._stayed:
            # Resharded on this rank alone: by a load, say, or an exception in its own evaluation.
            gone = {unit for unit in self._stayed if not unit.is_unsharded}
            outdated |= _chosen_by_any(outdated | gone, self._stayed)
            # Cleared here only: the others have to hear of it in the next forward of all.
            self._stayed = []
        elif outdated:
            outdated |= {unit for unit in self._stayed if not unit.is_held}
        for unit in outdated:
            unit.reshard()

    def forget(self) -> None:
        """Forget what stayed, as nothing does where a pass is captured."""
        self._stayed = []


def is_whole(unit: Unit) -> bool:
    """Return whether this rank has the unit's whole parameters, and memory that no peer writes to."""
    if unit.is_unsharded and not unit.is_in_place:
        return True
    return unit.mesh.plan.shard_size == 1 or not unit.params


def _chosen_by_any(chosen: Container[Unit], among: Sequence[Unit]) -> set[Unit]:
    """Return those of the units that any rank has chosen.

    Every rank has to call it, with the same units in ``among``, in the same order.
    """
    by_group = collections.defaultdict[object, list[Unit]](list)
    for unit in among:
        by_group[unit.mesh.shard_group].append(unit)
    found: set[Unit] = set()
    for units in by_group.values():
        bits = sum((unit in chosen) << number for number, unit in enumerate(units))
        bits = units[0].comm.agree(bits, len(units))
        found.update(unit for number, unit in enumerate(units) if bits >> number & 1)
    return found
