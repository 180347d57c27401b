"""What a program has written to, moved or replaced of one unit's parameters since a moment.

what a program does              noticed by                      when                    cost
``p.data = ...``, ``to_empty``,  identity of what is registered  a pass begins           a few list comparisons
``load_state_dict(assign=True)`` and of its memory, in flat      (`have_moved`)
                                 units its address
``p.data = ...`` in a flat unit  addresses                       a module's forward      one list comparison
                                                                 (`has_new_pieces`)
a write to a shard               version counters, in sum        since the gather, since one sum each
                                                                 the pass began
a write to a whole parameter     version counters, in sum        at its reshard          one sum
a write to a shard while the     contents of this rank's part;   a pass begins           one comparison for each
unit stays unsharded             with streams only if an         (`is_gathered_outdated`) parameter
                                 optimizer has stepped

Version counters miss writes through ``p.data`` and ``torch._foreach_*`` on DTensors: `checks.writes`
compares contents in some passes, and samples of them in the others.
"""

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from fullshard.plan.ways import SUMMED_WORDS
from fullshard.torch_private import WithoutFunctions, WithoutSubclasses

_num_steps = 0  # of all optimizers of the process


def note_step() -> None:
    """Take note that an optimizer has stepped."""
    global _num_steps  # noqa: PLW0603
    _num_steps += 1


_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
_local: Callable[[nn.Parameter], torch.Tensor] = operator.attrgetter("_local_tensor")
_shape: Callable[[torch.Tensor], torch.Size] = operator.attrgetter("shape")
_look: Callable[[torch.Tensor], tuple[Any, ...]] = operator.attrgetter("shape", "dtype", "device")
_address = torch.Tensor.data_ptr


class Memory(Protocol):
    """The memory of a unit: `params.buffers.UnitBuffers`."""

    shards: list[torch.Tensor]
    readable: list[torch.Tensor]
    addresses: dict[torch.Tensor, int]
    stalls: bool

    def holds_shards(self) -> bool: ...


class Watched(Protocol):
    """The parameters of a unit: `params.unit_params.UnitParams`. For what is not said here, see there."""

    plain: Any
    flat_layout: Any

    @property
    def homes(self) -> Any: ...
    @property
    def buffers(self) -> Any: ...
    @property
    def holders(self) -> Any: ...
    def find_moved(self) -> bool: ...


class Places(NamedTuple):
    """Where parameters were registered, and the unit's memory that they are over.

    registries, names, registered: one per slot. held, addresses: one per parameter that an optimizer updates, and one
        per whole parameter that is read where the shards of all ranks are.
    sharded, local, shapes: one per DTensor. pieces, looks: one per such parameter of a flat unit.
    """

    registries: list[dict[str, Any]] = []  # noqa: RUF012  (never changed)
    names: list[str] = []  # noqa: RUF012
    registered: list[nn.Parameter] = []  # noqa: RUF012
    sharded: list[nn.Parameter] = []  # noqa: RUF012
    local: list[torch.Tensor] = []  # noqa: RUF012
    shapes: list[torch.Size] = []  # noqa: RUF012
    pieces: list[nn.Parameter] = []  # noqa: RUF012
    held: list[torch.Tensor] = []  # noqa: RUF012
    addresses: list[int] = []  # noqa: RUF012
    looks: list[tuple[Any, ...]] = []  # noqa: RUF012

    @property
    def are_as_they_were(self) -> bool:
        """True if it is still so. False without places: nothing is known then.

        By maps, which ask all at once: nearly always it is, in every pass.
        """
        is_same = operator.is_
        return (
            bool(self.names)
            and all(map(is_same, map(dict.get, self.registries, self.names), self.registered))
            and all(map(is_same, map(_local, self.sharded), self.local))
            and list(map(_shape, self.local)) == self.shapes
            and self.are_home
            and list(map(_look, self.pieces)) == self.looks
        )

    @property
    def are_home(self) -> bool:
        """True if all parameters begin where the unit's memory for them does."""
        with WithoutFunctions():
            return list(map(_address, self.held)) == self.addresses


class ModelWatch:
    """Asks for all units of a model at once whether something has moved."""

    def __init__(self, watches: Sequence["ParamWatch"]) -> None:
        self._watches = watches
        self._places: Places | None = None
        _models.add(self)

    def forget(self) -> None:
        """Forget where parameters were, and their memory: some unit's have become others."""
        self._places = None

    @property
    def may_have_moved(self) -> bool:
        """True if some parameter has moved, or must be asked itself: see `ParamWatch.have_moved`."""
        places = self._places  # read once: ranks may be threads, of which another forgets
        if places is None:
            places = Places()
            known = [watch.places for watch in self._watches]
            if all(each.names for each in known):
                columns = zip(*known, strict=True)
                places = Places(*(list(itertools.chain(*each)) for each in columns))
            self._places = places
        return not places.are_as_they_were


_models: "weakref.WeakSet[ModelWatch]" = weakref.WeakSet()


class ParamWatch:
    """Watches one unit's parameters.

    Its moments are the unit's last gather (`note_gather`), and the begin of a pass in which peers read in
    place (`begin`).
    """

    def __init__(self, params: Watched) -> None:
        # Weak: the parameters own this. Memory has to be freed at once when they go.
        self._reference: Callable[[], Watched | None] = weakref.ref(params)
        self.forget()
        # Sums of version counters at the gather: of shards (None if nobody will ask), and of
        # unsharded parameters, if they may stay unsharded.
        self._at_gather: int | None = None
        self._unsharded_at_gather = 0
        self._steps_at_gather = 0
        # The unsharded parameters, one per plain parameter, and their version counters up to which
        # writes were warned of or meant to be lost; unless `_is_known`, the next gather reads them.
        self._whole: list[torch.Tensor] = []
        self._known: list[int] = []
        self._num_known = 0
        self._is_known = False
        self._lost: set[str] = set()  # names of parameters that were warned of
        self._at_begin = (0, 0)  # sums at the begin of a pass: shards, unsharded parameters

    def forget(self) -> None:
        """Forget which tensors there are: some become others, and those of before are freed."""
        for model in list(_models):
            model.forget()
        self._has_collected = False
        # Every tensor by which users write to shards, once each.
        self._shards: list[torch.Tensor] = []
        self._places = Places()

    @property
    def _params(self) -> Watched:
        params = self._reference()
        assert params is not None
        return params

    def _collect(self) -> None:
        """Read which tensors and places to watch."""
        params = self._params
        self._has_collected = True
        # A DTensor and its local tensor have a version counter each. In flat units both are the
        # same tensor, which must not count twice.
        tensors = [tensor for own in params.holders for tensor in (own.sharded, own.local)]
        self._shards = list({id(tensor): tensor for tensor in tensors}.values())
        if (homes := params.homes) is None:
            return  # every parameter is asked itself
        slots = [(slot, sharded) for its, sharded, _ in homes for slot in its]
        sharded, memory = [each for _, each, _ in homes], [each for _, _, each in homes]
        readable, addresses = params.buffers.readable, params.buffers.addresses
        places = Places(
            [slot.registry for slot, _ in slots],
            [slot.name for slot, _ in slots],
            [sharded for _, sharded in slots],
            addresses=[addresses[each] for each in (*memory, *readable)],
        )
        if params.flat_layout is None:
            self._places = places._replace(
                sharded=sharded,
                local=memory,
                held=[*memory, *readable],
                shapes=list(map(_shape, memory)),
            )
        else:
            self._places = places._replace(
                pieces=sharded,
                held=[*sharded, *readable],
                looks=list(map(_look, memory)),
            )

    # Moved or replaced

    @property
    def have_moved(self) -> bool:
        """True if some shard is not over the unit's memory, or not the registered parameter.

        Raises StateError for a local tensor whose shape was changed in place.
        """
        return not self.places.are_as_they_were and self._params.find_moved()

    @property
    def places(self) -> "Places":
        """Where the parameters were registered, and in which memory, when they were last collected."""
        if not self._has_collected:
            self._collect()
        return self._places

    @property
    def has_new_pieces(self) -> bool:
        """True if somebody gave a flat unit's shard other memory (``p.data = ...``).

        A part of `have_moved` that is cheap enough to ask before each module's forward.
        """
        return not self.places.are_home

    # Written, by version counters

    def num_writes(self) -> int:
        """Return the sum of the version counters of shards, to be compared with an earlier one.

        Counts writes through a DTensor and through its local tensor.
        """
        if not self._has_collected:
            self._collect()
        with WithoutSubclasses():  # by which torch reads a DTensor's in half of the time
            return sum(map(_version, self._shards))

    def num_unsharded_writes(self) -> int:
        """Return the sum of the version counters of unsharded parameters."""
        return sum(map(_version, self._whole))

    def take_whole(self, whole: list[torch.Tensor]) -> None:
        """Watch these unsharded parameters, which are new or have other memory."""
        self._whole, self._is_known = whole, False

    def whole_contents(self) -> tuple[list[torch.Tensor], list[int]]:
        """Return fingerprints and version counters of the unsharded parameters, which are in memory."""
        return fingerprints(self._whole), list(map(_version, self._whole))

    def note_gather(self, early: bool, may_stay: bool) -> None:
        """Take note of a gather that was started.

        early: it was started before the module is called.
        may_stay: what is gathered may stay unsharded after this iteration.
        """
        # Counting costs some time per parameter, so only where `changed_since_gather` is asked.
        self._at_gather = self.num_writes() if early or may_stay else None
        if may_stay:
            self._unsharded_at_gather = self.num_unsharded_writes()
            self._steps_at_gather = _num_steps
        if not self._is_known:
            self._learn()

    def note_stay(self) -> None:
        """Take note that what was gathered stays unsharded, which the gather did not know."""
        if self._at_gather is None:
            self._at_gather = self.num_writes()
        self._unsharded_at_gather = self.num_unsharded_writes()
        self._steps_at_gather = _num_steps

    @property
    def changed_since_gather(self) -> bool:
        """True if version counters show a write to shards since they were gathered."""
        return self._at_gather is not None and self.num_writes() != self._at_gather

    def is_gathered_outdated(self, *, keeps_written: bool = False) -> bool:
        """Return whether parameters that stayed unsharded have other values than this rank's shards.

        Compares contents, unless the user has written to the unsharded parameters: those values
        stay in use, as in PyTorch, until version counters show a write to shards. With
        ``keeps_written`` they stay in use even then.
        """
        is_untouched = self.num_unsharded_writes() == self._unsharded_at_gather
        if self.changed_since_gather and (is_untouched or not keeps_written):
            return True
        buffers: Memory | None = self._params.buffers
        if not is_untouched or buffers is None:
            return False
        if buffers.stalls and self._steps_at_gather == _num_steps:
            return False  # between micro-batches nothing is asked of the device
        return not buffers.holds_shards()

    def begin(self) -> None:
        """Take note that a pass begins, in which nobody may write to what peers read in place."""
        self._at_begin = self.num_writes(), self.num_unsharded_writes()

    @property
    def changed_since_begin(self) -> bool:
        """True if version counters show a write, since `begin`, to what peers read in place."""
        return self._at_begin != (self.num_writes(), self.num_unsharded_writes())

    @property
    def shards_changed_since_begin(self) -> bool:
        """True if version counters show a write to this rank's shards since `begin`."""
        return self._at_begin[0] != self.num_writes()

    @property
    def reached_peers(self) -> bool:
        """True if unsharded parameters that are all ranks' shards were written to since `begin`.

        A part of `changed_since_begin`. Every rank that runs the write notices it here, while only
        the ranks whose shards have changed notice it by contents.
        """
        return self.num_unsharded_writes() != self._at_begin[1]

    # Written to whole parameters, which is lost

    @property
    def will_lose(self) -> bool:
        """True if unsharded parameters that are about to be freed were written to.

        Not asked where they are the shards' memory: such writes are errors, see `changed_since_begin`.
        The engine itself advances none of these counters, so a difference is always a user's write,
        however long ago the last look was.
        """
        return sum(map(_version, self._whole)) != self._num_known

    def warn_of_writes(self, label: str) -> None:
        """Warn of the writes that `will_lose` has found, with the names of the parameters."""
        if not self._is_known:  # the counters are of tensors that exist no more, or say nothing
            return
        before = self._known
        self._learn()
        changed = zip(self._params.plain, before, self._known, strict=True)
        self.warn_of_lost(label, [param.name for param, old, new in changed if old != new])

    def warn_of_lost(self, label: str, names: Sequence[str]) -> None:
        """Warn that writes to these unsharded parameters will be lost, once for each parameter."""
        names = [name for name in names if name not in self._lost]
        if not names:
            return
        self._lost.update(names)
        warnings.warn(
            f"{', '.join(names)} ({label}): written to while the module ran or was unsharded. The new "
            "values are used until the parameters are resharded, and are lost then, as in PyTorch's "
            "FSDP; in one process they would stay. Write to model.parameters() between steps, or leave "
            "the parameter out of sharding (ignored_params).",
            UserWarning,
            stacklevel=2,
        )

    def excuse(self) -> None:
        """Never warn of writes until now: users of ``unshard()`` know that they are lost."""
        self._is_known = False

    def _learn(self) -> None:
        """Take all writes to unsharded parameters until now for known."""
        self._known = [tensor._version for tensor in self._whole]
        self._num_known = sum(self._known)
        self._is_known = True


# Contents

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return, for each contiguous tensor, the sums of its blocks of words: 1-D, int64.

    A copy would take as much memory as the unit. A write that keeps all sums of blocks is missed.
    """
    found = []
    for words in map(words_of, tensors):
        num_blocks, rest = divmod(words.numel(), SUMMED_WORDS)
        blocks, tail = words.split([words.numel() - rest, rest])
        sums = blocks.view(num_blocks, SUMMED_WORDS).sum(1, dtype=torch.int64)
        found.append(torch.cat([sums, tail.sum(dtype=torch.int64).view(1)]))
    return found


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor's bytes as integers, 1-D. Unlike NaN, integers equal themselves."""
    flat = tensor.detach().view(-1)
    # 64-bit ones where size and offset allow: there are fewer to compare, and sums of them need no
    # cast, which would take twice the memory.
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(_INTEGERS.get(flat.itemsize, torch.int64))
