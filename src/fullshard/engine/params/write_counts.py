"""What version counters and contents say of writes to one unit's parameters.

Version counters miss what is written through ``p.data`` or ``torch._foreach_*`` on DTensors: see
`writes`, which looks at contents as well.
"""

import warnings
from collections.abc import Sequence

from fullshard.engine.params.of_unit import UnitParams


class WriteCounts:
    """Writes to a unit's shards and unsharded parameters, since two moments."""

    def __init__(self, params: UnitParams) -> None:
        self._params = params
        self._at_gather: int | None = None  # writes to shards, None where nobody will ask
        self._unsharded_at_gather = 0  # to unsharded parameters, if they may stay
        # To unsharded parameters as `_created` made them: all of it known and said, or meant.
        self._known: list[int] = []
        self._num_known = 0
        self._created = -1
        self._lost: set[str] = set()  # parameters of which writes were lost, and it was said
        self._at_begin = (0, 0)  # to both, where they are one memory

    def gathered(self, *, early: bool, may_stay: bool) -> None:
        """Shards are being gathered.

        early: before their module is called. may_stay: what is gathered may outlast the iteration.
        """
        params = self._params
        self._at_gather = params.num_writes() if early or may_stay else None
        if may_stay:
            self._unsharded_at_gather = params.num_unsharded_writes()
        if self._created != params.num_created:
            self._learn()

    @property
    def will_lose(self) -> bool:
        """Whether unsharded parameters that are about to be freed were written to.

        Not where they are the shards' memory: that is refused, see `changed_since_begin`. Nobody
        else writes to them in a way that counts, so what was known at any time holds.
        """
        params = self._params
        return not params.is_in_place and params.num_unsharded_writes() != self._num_known

    def warn_of_written(self, label: str) -> None:
        """Warn of those writes."""
        if self._created != self._params.num_created:
            return  # counted on other tensors
        before = self._known
        self._learn()
        changed = zip(self._params.plain, before, self._known, strict=True)
        self.warn_of_lost(label, [param.name for param, old, new in changed if old != new])

    def warn_of_lost(self, label: str, names: Sequence[str]) -> None:
        """Warn that what was written to these unsharded parameters will be lost, once of each."""
        names = [name for name in names if name not in self._lost]
        if not names:
            return
        self._lost.update(names)
        warnings.warn(
            f"{', '.join(names)} ({label}): written to while the module ran, or was unsharded. What "
            "was written is used until the parameters are resharded and lost then, as in PyTorch's "
            "FSDP; one process would keep it. Write to model.parameters() between steps, or leave the "
            "parameter out of sharding (ignored_params).",
            UserWarning,
            stacklevel=2,
        )

    def excuse(self) -> None:
        """What was written to unsharded parameters until now was meant to be lost."""
        self._created = -1

    def _learn(self) -> None:
        self._known = [tensor._version for tensor in self._params.unsharded_locals]
        self._num_known = sum(self._known)
        self._created = self._params.num_created

    @property
    def changed_since_gather(self) -> bool:
        """Whether shards were written to since they were gathered, as far as versions tell."""
        return self._at_gather is not None and self._params.num_writes() != self._at_gather

    def is_gathered_outdated(self, *, keeps_written: bool = False) -> bool:
        """Whether what stayed unsharded is no longer what the shards say. Compares contents.

        What a user has written to the unsharded parameters stays in use, as in PyTorch; if
        ``keeps_written``, whatever version counters tell of the shards.
        """
        params, buffers = self._params, self._params.buffers
        is_untouched = params.num_unsharded_writes() == self._unsharded_at_gather
        if self.changed_since_gather and (is_untouched or not keeps_written):
            return True
        return is_untouched and buffers is not None and not buffers.holds_shards()

    def begin(self) -> None:
        """A pass begins in which nobody is to write to what peers read in place."""
        if self._params.is_in_place:
            self._at_begin = self._params.num_writes(), self._params.num_unsharded_writes()

    @property
    def changed_since_begin(self) -> bool:
        """Whether parameters that are read in place were written to since, as far as versions tell."""
        params = self._params
        if not params.is_in_place:
            return False
        return self._at_begin != (params.num_writes(), params.num_unsharded_writes())

    @property
    def reached_peers(self) -> bool:
        """Whether unsharded parameters that are all ranks' shards were written to since then.

        A part of it: every rank that writes notices, whoever's shards have changed.
        """
        params = self._params
        return params.is_in_place and params.num_unsharded_writes() != self._at_begin[1]
