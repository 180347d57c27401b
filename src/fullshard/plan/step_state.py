"""What a planned step has come to: the actions so far, the memory after them, and where each unit is."""

import collections
from collections.abc import Iterable, Sequence

from fullshard.plan.actions import Action, Change, Holding, Lane
from fullshard.plan.unit_plan import UnitPlan
from fullshard.plan.ways import KEPT_NBYTES, Region


class ActionLog:
    """The actions of a step in the order of the host.

    has_streams: a device works behind the host's back; without, the host does all that is on COMPUTE.
    level: bytes by use and unit, after the last action.
    last: the last action on COMPUTE; -1 before the first.
    """

    def __init__(self, *, has_streams: bool) -> None:
        self.has_streams = has_streams
        self.level: collections.Counter[tuple[Holding, int]] = collections.Counter()
        self._carried: list[Change] = []
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.actions: list[Action] = []
        self.last = -1

    def carry(self, changes: Iterable[Change]) -> None:
        """Take note of what changes before the next action."""
        self._carried += changes

    def issue(self, action: Action, changes: Sequence[Change] = ()) -> int:
        """Add an action; return its index. changes: in the order in which they happen."""
        carried = [each for each in self._carried if each.nbytes]
        before, running, peak = sum(each.nbytes for each in carried), 0, 0
        kept = []
        for change in (*carried, *changes):
            if change.nbytes:
                kept.append(change)
                running += change.nbytes
                peak = max(peak, running)
                self.level[change.holding, change.unit] += change.nbytes
        self._carried = []
        is_host = not self.has_streams and action.lane is Lane.COMPUTE
        self.actions.append(
            action._replace(
                after=tuple(index for index in action.after if index >= 0),
                host_waits=action.host_waits or is_host,
                changes=tuple(kept),
                num_before=len(carried),
                peak_nbytes=max(peak, before + action.peak_nbytes),
            )
        )
        index = len(self.actions) - 1
        if action.lane is Lane.COMPUTE:
            self.last = index
        return index


class UnitState:
    """A unit during a step: what it is planned to take, and where it is.

    number: among the units. reshards: what becomes of it after its forward: True, False or a group size.
    freed: sizes of the unsharded buffers that are freed at a reshard; others are there all the time.
    gather: the action of its last gather. sent_nbytes, regions: what that has sent, and where it packs parameters.
    kept_nbytes: of its shards over a smaller group, from forward to backward.
    full_nbytes: of full gradients that autograd has left. sums_nbytes: of sums that wait for a reduction, or of spare
        memory for the next ones. is_holding: sums wait.
    handed_nbytes: of full gradients that became those of the shards, beside sums; None if none did.
    waiting: scratch blocks of sums that replicas have yet to sum, by bucket.
    with_gradient, pooled: its buckets of gradients that have some, and whose memory is there and unused.
    """

    def __init__(
        self, number: int, plan: UnitPlan, reshards: bool | int, *, keeps_small: bool
    ) -> None:
        """keeps_small: small buffers in host memory stay."""
        self.number = number
        self.plan = plan
        self.reshards = reshards
        sizes = [each.buffer_nbytes for each in plan.gathers if each.buffer_nbytes]
        self.freed = [size for size in sizes if not (keeps_small and size <= KEPT_NBYTES)]
        self.stays_nbytes = sum(sizes) - sum(self.freed)
        self.is_unsharded = self.is_gathering = self.is_lent = False
        self.gather = -1
        self.sent_nbytes = 0
        self.regions: list[Region] = []
        self.kept_nbytes = 0
        self.is_in_backward = self.has_ended_backward = False
        self.full_nbytes = self.sums_nbytes = 0
        self.handed_nbytes: int | None = None
        self.is_holding = False
        self.waiting: dict[int, int] = {}
        self.with_gradient: set[int] = set()
        self.pooled: set[int] = set()

    @property
    def group_size(self) -> int:
        """The ranks over which shards are kept between forward and backward; 0 for all of them, or none."""
        return 0 if isinstance(self.reshards, bool) else self.reshards

    def change(self, holding: Holding, nbytes: int) -> Change:
        """Return a change of the memory that belongs to the unit."""
        return Change(holding, nbytes, self.number)
