"""Whether a program writes to parameters while the model runs, and what follows.

Two fast ways assume that nobody writes to a parameter between a model's first use of an iteration
and its last: reading peers' shards in place, and gathering a unit before its forward begins. A
program need not keep to that: a momentum encoder is updated inside forward, weights are clamped
before they are used, an embedding renormalises itself. So the first pass of each kind (training or
evaluation, with or without gradients) is *watched*, and some later ones, ever fewer:

    watched pass   every gather is ordered with all ranks' writes, goes to private memory and is
                   never early; contents are compared from use to use
    after it       units that nobody wrote to are read in place and gathered early again; the
                   others stay ordered for good

A watched pass is right whatever the program does. Contents are compared, since most ways to write
leave no trace: ``p.data.mul_()`` and ``torch._foreach_mul_`` advance no version counter of a
DTensor.

Writes that begin later are noticed by version counters, where they advance, and by samples of
contents (all of small shards, one word in `_STRIDE` of large ones). What was gathered early is then
gathered again; where peers have read in place, it is too late, and the forward raises StateError.
Contents may change on one rank alone, which then is the only one to gather again: the others raise
DivergenceError, unless the version counters told all of them.

A module's write to its own unsharded weights is lost when these are freed. In a watched pass any
such write is noticed; in others, those that advance a version counter (`write_counts`).

[Note: Ordered gathers] All ranks meet, copy, and meet again: what a rank wrote before it came to
the unit is seen by all, what it writes after by nobody, as if there were a collective. All ranks
have to agree which units are ordered, so what each has seen is combined between two passes.
"""

import collections
from collections.abc import Iterable, Sequence

import torch

from fullshard.engine.restoring import naming_lack
from fullshard.engine.runtime import no_grad, outside_transforms
from fullshard.engine.unit import Unit
from fullshard.errors import StateError

# Passes of a kind that are watched, from 0: the first ones, and again ever more rarely.
_WATCHED = frozenset({0, 1, 32, 1024, 32768})
_ALL = 4096  # words of a shard of which all are sampled
_STRIDE = 1024  # words of which one is sampled, in large shards
_FEW = 1024  # words that are sampled at least
_BLOCK = 1024  # words of which a fingerprint keeps one sum
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_Fingerprints = list[torch.Tensor]


class _Watched:
    """What is known of one unit in a watched pass."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.is_written = False
        self._shards = _fingerprints(unit.params.shard_memory)
        self._unsharded: _Fingerprints | None = None  # while it is in use
        self._versions: list[int] = []

    def open(self) -> None:
        """The unit's parameters are about to be used."""
        self.compare_shards()
        if self._unsharded is None:
            self._unsharded = _fingerprints(self.unit.params.unsharded_locals)
            self._versions = [tensor._version for tensor in self.unit.params.unsharded_locals]

    def close(self) -> None:
        """They were used, or their backward was passed over."""
        self.compare_shards()
        before, self._unsharded = self._unsharded, None
        if before is None or not self.unit.is_unsharded:
            return
        tensors = self.unit.params.unsharded_locals
        written = [
            param.name
            for param, old, new, version, tensor in zip(
                self.unit.params.plain,
                before,
                _fingerprints(tensors),
                self._versions,
                tensors,
                strict=True,
            )
            if tensor._version != version or not torch.equal(old, new)
        ]
        if written:
            self.is_written = True
            self.unit.writes.warn_of_lost(self.unit.label, written)

    def compare_shards(self) -> bool:
        """Return whether the shards are others than when they were last compared."""
        before, self._shards = self._shards, _fingerprints(self.unit.params.shard_memory)
        has_changed = not all(map(torch.equal, before, self._shards))
        self.is_written |= has_changed
        return has_changed


class _Sample:
    """Some elements of a unit's shards, as they were at some moment."""

    def __init__(self, unit: Unit) -> None:
        self.buffers = unit.params.buffers
        with torch.inference_mode(False):  # written to in passes of every kind
            words = [_words(tensor) for tensor in unit.params.shard_memory if tensor.numel()]
            self.views = [_sampled(each) for each in words]
            self.before = [torch.empty_like(view) for view in self.views]

    @property
    def has_changed(self) -> bool:
        """Whether they are others now."""
        return not all(map(torch.equal, self.before, self.views))


def refuse_write(unit: Unit) -> None:
    """Raise StateError: somebody wrote to what ranks have been reading in place."""
    raise StateError(
        f"{unit.label}: its parameters were written to while the model ran, between the begin "
        "of forward and the end of backward. The first passes did not do that, so the ranks of "
        "this host read each other's parameters in place, and some may have read what was half "
        "written. Write between steps, or from the first step on, or call "
        "set_default_comm('process_group') before sharding."
    )


def _may_be_ordered(unit: Unit) -> bool:
    """Whether all ranks gather the unit alike, and it is at rest."""
    runs_everywhere = not unit.config.reduce_scatter_unused_params
    shards = unit.params.shard_memory
    is_real = all(type(tensor) is torch.Tensor for tensor in shards)  # has contents
    return runs_everywhere and is_real and unit.is_sharded and bool(unit.params.plain)


def _set_ordered(unit: Unit, *, ordered: bool) -> None:
    """Order gathers with all ranks' writes, or read in place and gather early again."""
    if unit.comm.reads_in_place and unit.may_be_in_place:
        if ordered and unit.is_in_place:
            with naming_lack(f"{unit.path}: private memory", "Values are as they were."):
                unit.params.read_privately()
        elif not ordered and unit.is_sharded:
            unit.params.read_in_place()
            unit.writes.begin()
    unit.is_ordered = ordered


def _is_in_use(unit: Unit) -> bool:
    """Whether graphs, or somebody, refer to unsharded parameters in private memory."""
    buffers = unit.params.buffers
    if buffers is None or not unit.comm.reads_in_place:
        return False
    return not unit.is_sharded or buffers.is_in_use


class WriteWatch:
    """Watches some passes of one model. ``units``: all of it, the same on every rank."""

    def __init__(self, units: Sequence[Unit]) -> None:
        # Where one rank has all of a parameter nothing is read of others, or gathered early.
        self._units = [unit for unit in units if unit.mesh.plan.shard_size > 1]
        self._passes: collections.Counter[tuple[bool, bool]] = collections.Counter()
        self._watched: dict[Unit, _Watched] = {}  # also after the pass, until all agree
        self._samples: dict[Unit, _Sample] = {}
        self.is_watching = False

    @outside_transforms
    def begin_pass(self, *, is_training: bool) -> None:
        """Before a forward of the whole model; every rank has to call it."""
        self.is_watching = False
        if self._watched:
            self._conclude()
        kind = is_training, torch.is_grad_enabled()
        number = self._passes[kind]
        self._passes[kind] += 1
        if number not in _WATCHED:
            self.take_samples()
            return
        self.is_watching = True
        for unit in self._units:
            if unit.is_written or unit in self._watched or not _may_be_ordered(unit):
                continue
            _set_ordered(unit, ordered=True)
            with no_grad():
                self._watched[unit] = _Watched(unit)

    @outside_transforms
    def open(self, units: Iterable[Unit]) -> None:
        """Units are about to be used."""
        with no_grad():
            for unit in units:
                if (watched := self._watched.get(unit)) is not None:
                    watched.open()

    @outside_transforms
    def close(self, units: Iterable[Unit]) -> None:
        """Units were used, and those that were are still unsharded."""
        with no_grad():
            for unit in units:
                if (watched := self._watched.get(unit)) is not None:
                    watched.close()

    @outside_transforms
    def end_pass(self) -> None:
        """A forward without backward is over."""
        with no_grad():
            for watched in self._watched.values():
                watched.compare_shards()

    @outside_transforms
    def take_samples(self) -> None:
        """Look at shards that peers read in place, which nobody is to write to from now on."""
        self._sample([unit for unit in self._units if unit.is_in_place])

    @outside_transforms
    def note_gathered(self, unit: Unit) -> None:
        """Look at shards that are being gathered before their module is called."""
        if (watched := self._watched.get(unit)) is not None:
            with no_grad():
                watched.compare_shards()
        else:
            self._sample([unit])

    @outside_transforms
    def has_changed(self, unit: Unit) -> bool:
        """Whether shards were written to since they were last looked at, as far as samples tell.

        Such a write may show on one rank alone, where version counters advance on all.
        """
        if (watched := self._watched.get(unit)) is not None:
            with no_grad():
                return watched.compare_shards()
        sample = None if self.is_watching and unit.is_in_place else self._samples.get(unit)
        return sample is not None and sample.has_changed

    def _sample(self, units: Sequence[Unit]) -> None:
        views: list[torch.Tensor] = []
        before: list[torch.Tensor] = []
        for unit in units:
            if unit.runtime.has_streams:
                continue  # comparing contents would wait for the device
            sample = self._samples.get(unit)
            if sample is None or sample.buffers is not unit.params.buffers:
                sample = self._samples[unit] = _Sample(unit)
            views += sample.views
            before += sample.before
        if views:  # all of them at once, which costs the host least
            with no_grad():
                torch._foreach_copy_(before, views)

    def start_again(self) -> None:
        """Watch the next pass of every kind: something was written where nothing had been."""
        self._passes.clear()

    def _conclude(self) -> None:
        """Agree on which units were written to, and let the others be read in place again."""
        by_comm = collections.defaultdict[object, list[Unit]](list)
        for unit in self._units:
            by_comm[unit.comm].append(unit)
        for units in by_comm.values():
            # Two bits a unit. One whose memory autograd still refers to keeps it for now.
            bits = 0
            for number, unit in enumerate(units):
                if (watched := self._watched.get(unit)) is not None:
                    bits |= (watched.is_written << 2 * number) | (
                        _is_in_use(unit) << 2 * number + 1
                    )
            bits = units[0].comm.agree(bits, 2 * len(units))
            for number, unit in enumerate(units):
                if unit not in self._watched:
                    continue
                if bits >> 2 * number & 1:
                    unit.is_written = True
                    del self._watched[unit]
                elif not bits >> 2 * number + 1 & 1:
                    _set_ordered(unit, ordered=False)
                    del self._watched[unit]


def _sampled(words: torch.Tensor) -> torch.Tensor:
    """View some elements of a 1-D tensor, or all."""
    if words.numel() <= _ALL:
        return words
    return words[:: min(_STRIDE, words.numel() // _FEW)]


def _fingerprints(tensors: Sequence[torch.Tensor]) -> _Fingerprints:
    """Return, for each tensor, the sums of its blocks as integers: 1-D, int64."""
    return [_fingerprint(tensor) for tensor in tensors]


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    words = _words(tensor)
    num_blocks, rest = divmod(words.numel(), _BLOCK)
    blocks, tail = words.split([words.numel() - rest, rest])
    sums = blocks.view(num_blocks, _BLOCK).sum(1, dtype=torch.int64)
    return torch.cat([sums, tail.sum(dtype=torch.int64).view(1)])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor's bytes as integers, which equal themselves, as NaN does not: 1-D."""
    flat = tensor.detach().view(-1)
    # Long ones, where they fit: fewer to compare, and sums of them need no cast, which would take
    # twice the memory.
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(_INTEGERS.get(flat.itemsize, torch.int64))
