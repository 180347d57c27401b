"""Writes to one unit's parameters, as version counters and contents show them.

Version counters miss writes through ``p.data`` and ``torch._foreach_*`` on DTensors. `checks.writes`
therefore compares contents in some passes.
"""

import warnings
from collections.abc import Sequence

from fullshard.engine.params.of_unit import UnitParams


class WriteCounts:
    """Counts writes to a unit's shards and unsharded parameters since two moments.

    The moments are the unit's last gather (`gathered`), and the begin of a pass in which peers read
    in place (`begin`).
    """

    def __init__(self, params: UnitParams) -> None:
        self._params = params
        # Sums of version counters at the gather: of shards (None if nobody will ask), and of
        # unsharded parameters, if they may stay unsharded.
        self._at_gather: int | None = None
        self._unsharded_at_gather = 0
        # Version counters of unsharded parameters, one per plain parameter, up to which writes were
        # warned of or meant to be lost. They are those of the tensors of `params.num_created ==
        # _created`; -1 makes the next gather read them again.
        self._known: list[int] = []
        self._num_known = 0
        self._created = -1
        self._lost: set[str] = set()  # names of parameters that were warned of
        self._at_begin = (0, 0)  # sums at the begin of a pass: shards, unsharded parameters

    def note_gather(self, *, early: bool, may_stay: bool) -> None:
        """Take note of a gather that was started.

        early: it was started before the module is called.
        may_stay: what is gathered may stay unsharded after this iteration.
        """
        params = self._params
        # Counting costs some time per parameter, so only where `changed_since_gather` is asked.
        self._at_gather = params.num_writes() if early or may_stay else None
        if may_stay:
            self._unsharded_at_gather = params.num_unsharded_writes()
        if self._created != params.num_created:
            self._learn()

    def note_stay(self) -> None:
        """Take note that what was gathered stays unsharded, which the gather did not know."""
        params = self._params
        if self._at_gather is None:
            self._at_gather = params.num_writes()
        self._unsharded_at_gather = params.num_unsharded_writes()

    @property
    def will_lose(self) -> bool:
        """Whether unsharded parameters that are about to be freed were written to.

        False where they are the shards' memory: such writes are errors, see `changed_since_begin`.
        The engine itself advances none of these counters, so a difference is always a user's write,
        however long ago the last look was.
        """
        params = self._params
        return not params.is_in_place and params.num_unsharded_writes() != self._num_known

    def warn_of_written(self, label: str) -> None:
        """Warn of the writes that `will_lose` has found, with the names of the parameters."""
        # The counters that are known belong to tensors that exist no more, or say nothing.
        if self._created != self._params.num_created:
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
        self._created = -1

    def _learn(self) -> None:
        """Take all writes to unsharded parameters until now for known."""
        self._known = [tensor._version for tensor in self._params.unsharded_locals]
        self._num_known = sum(self._known)
        self._created = self._params.num_created

    @property
    def changed_since_gather(self) -> bool:
        """Whether version counters show a write to shards since they were gathered."""
        return self._at_gather is not None and self._params.num_writes() != self._at_gather

    def is_gathered_outdated(self, *, keeps_written: bool = False) -> bool:
        """Whether parameters that stayed unsharded have other values than this rank's shards.

        Compares contents, unless the user has written to the unsharded parameters: those values
        stay in use, as in PyTorch, until version counters show a write to shards. With
        ``keeps_written`` they stay in use even then.
        """
        params, buffers = self._params, self._params.buffers
        is_untouched = params.num_unsharded_writes() == self._unsharded_at_gather
        if self.changed_since_gather and (is_untouched or not keeps_written):
            return True
        return is_untouched and buffers is not None and not buffers.holds_shards()

    def begin(self) -> None:
        """Take note that a pass begins in which nobody may write to what peers read in place."""
        if self._params.is_in_place:
            self._at_begin = self._params.num_writes(), self._params.num_unsharded_writes()

    @property
    def changed_since_begin(self) -> bool:
        """Whether version counters show a write, since `begin`, to what peers read in place."""
        params = self._params
        if not params.is_in_place:
            return False
        return self._at_begin != (params.num_writes(), params.num_unsharded_writes())

    @property
    def reached_peers(self) -> bool:
        """Whether unsharded parameters that are all ranks' shards were written to since `begin`.

        A part of `changed_since_begin`. Every rank that runs the write notices it here, while only
        the ranks whose shards have changed notice it by contents.
        """
        params = self._params
        return params.is_in_place and params.num_unsharded_writes() != self._at_begin[1]
