"""What version counters and contents say of writes to one unit's parameters.

Version counters miss what is written through ``p.data`` or ``torch._foreach_*`` on DTensors: see
`writes`, which looks at contents as well.
"""

from fullshard.engine.unit_params import UnitParams


class WriteCounts:
    """Writes to a unit's shards and unsharded parameters, since two moments."""

    def __init__(self, params: UnitParams) -> None:
        self._params = params
        self._at_gather: int | None = None  # writes to shards, None where nobody will ask
        self._unsharded_at_gather = 0  # to unsharded parameters, if they may stay
        self._at_begin = (0, 0)  # to both, where they are one memory

    def gathered(self, *, early: bool, may_stay: bool) -> None:
        """Shards are being gathered.

        early: before their module is called. may_stay: what is gathered may outlast the iteration.
        """
        self._at_gather = self._params.num_writes() if early or may_stay else None
        if may_stay:
            self._unsharded_at_gather = self._params.num_unsharded_writes()

    @property
    def changed_since_gather(self) -> bool:
        """Whether shards were written to since they were gathered, as far as versions tell."""
        return self._at_gather is not None and self._params.num_writes() != self._at_gather

    @property
    def is_gathered_outdated(self) -> bool:
        """Whether what stayed unsharded is no longer what the shards say. Compares contents.

        What a user has written to the unsharded parameters stays in use, as in PyTorch.
        """
        params, buffers = self._params, self._params.buffers
        if self.changed_since_gather or buffers is None:
            return self.changed_since_gather
        is_untouched = params.num_unsharded_writes() == self._unsharded_at_gather
        return is_untouched and not buffers.holds_shards()

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
