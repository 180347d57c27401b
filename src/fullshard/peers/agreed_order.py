"""The order of what ranks do that cannot see each other's flight record: ranks of several hosts, mostly.

Gloo and NCCL pair collectives by their order alone. If two ranks on different paths started different
ones, Gloo would abort a process, NCCL would hang, and of equal sizes the bytes of one unit would be
taken for another's. So a rank starts only what all ranks have agreed on. To ask them every time would
cost a trip to the store; but a step is like the last one. So each rank foresees what comes next from
what came last, by a rule that only knows what all ranks have agreed on. What a rank foresees, every
rank foresees, and nobody has to be asked. Anything else it asks for first:

    what came last      foreseen        rank 0          rank 1
    ... a: all-gather   b: all-gather   b: all-gather   c: all-gather   asks, and waits for rank 0

The rank that asks has started nothing. Others wait in what they have started, or are asking for
something else; neither of them goes on, and their watchdogs, which read each other's entries, name the
difference. In a program whose steps are alike, ranks ask in the first one only.
"""

import logging
import time
import weakref
from collections.abc import Sequence

import torch.distributed as dist

from fullshard.peers.divergence import show
from fullshard.peers.flight_record import FlightRecord
from fullshard.peers.groups import exchange, timeout_s
from fullshard.peers.store import connected_store
from fullshard.peers.waits import WaitReporter, lost_in, lost_ranks, naming_lost_ranks
from fullshard.peers.watchdog import watchdog

logger = logging.getLogger("fullshard")

_KEY = "fullshard/order/{}"
# What comes next is foreseen from the last eight entries: 16 bits of a checksum move out with each.
_SHIFT = 16
_RECENT = (1 << 8 * _SHIFT) - 1
_MOST_FORESEEN = 1 << 18  # contexts, after which all are forgotten, on all ranks alike
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 5e-3
_PAUSE_PER_RANK_S = 1e-4  # so that a store of many ranks answers 10,000 times a second, and no more
_LATE_S = 0.05  # of waiting, after which a rank looks at what others do
_LOOK_EVERY_S = 0.1
_STILL_S = 1.0  # of waiting, after which others may come to ask what this rank has done


class AgreedOrder:
    """Makes the ranks of a group agree on each entry of their flight records. Called by `FlightRecord.enter`.

    Raises an exception of any kind where the store that the ranks met in cannot serve this one.
    """

    def __init__(self, record: FlightRecord, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)  # its flight record has this, and goes with it
        self._timeout_s = timeout_s(group)
        # Others may be as late as in any collective of the group.
        self._store = connected_store(self._timeout_s)
        # A group of the same ranks and name may have been here before. Every rank counts for itself,
        # and all count alike.
        prefix = _KEY.format(record.key)
        number = self._store.add(f"{prefix}/of rank {record.rank}", 1)
        self._prefix = f"{prefix}/{number}"
        self._foreseen: dict[int, int] = {}  # a checksum, by what came last
        self._recent = 0
        self._last_keys: tuple[str, ...] = ()
        self.num_asked = 0

    @classmethod
    def of(cls, record: FlightRecord, group: dist.ProcessGroup) -> "AgreedOrder | None":
        """Return the order of a group; None if the store that its ranks met in cannot serve all of them.

        Every rank must call it.
        """
        order, problem = None, ""
        try:
            order = cls(record, group)
        except Exception as error:  # of any kind of store; or this rank may open no more files
            problem = f"rank {dist.get_rank()}: {error}"
        # Otherwise some would ask, and wait for others that do not.
        if problems := [each for each in exchange(problem, group) if each]:
            logger.warning("Ranks that share no memory are not compared: %s", problems[0])
            return None
        return order

    def follow(self, record: FlightRecord, place: int, checksum: int, what: str) -> None:
        """Return once all ranks of the group enter this at this place, or have agreed that they will.

        Raises DivergenceError if one enters something else or never comes, PeerLostError if one died,
        PeerTimeoutError if one does not come within the group's timeout.
        """
        if self._foreseen.get(self._recent) != checksum:
            group = self._group()
            assert group is not None  # the caller uses it
            with naming_lost_ranks(group, what):
                self._ask(record, place, checksum, what)
            if len(self._foreseen) >= _MOST_FORESEEN:
                self._foreseen.clear()
            self._foreseen[self._recent] = checksum
        self._recent = (self._recent << _SHIFT ^ checksum) & _RECENT

    def _ask(self, record: FlightRecord, place: int, checksum: int, what: str) -> None:
        """Return once all ranks have asked for the same at this place."""
        self.num_asked += 1
        answer = f"{self._prefix}/{place}"
        count = f"{answer}/{checksum:08x}"
        reporter = WaitReporter(what, self._timeout_s, record)
        others = [rank for rank in record.ranks if rank != dist.get_rank()]
        started = looked = time.monotonic()
        has_shown = False

        def look() -> None:
            nonlocal has_shown
            if not has_shown and time.monotonic() - started > _STILL_S:
                has_shown = True
                show(watchdog().board, record, place)
            reporter.check(others)

        store = self._store.during(look)  # it may be out of reach itself
        pause = _FIRST_PAUSE_S
        # Asked again and again: where the store's own wait is not over in time, it prints warnings.
        longest = max(_LONGEST_PAUSE_S, len(record.ranks) * _PAUSE_PER_RANK_S)
        with watchdog().waiting(what, (record.key,)):
            is_last = store.add(count, 1) == len(record.ranks)
            if is_last:
                store.set(answer, "")
                # All ranks are here, so none still waits for the answer before this one.
                for key in self._last_keys:
                    store.delete_key(key)
            while not is_last and answer not in store:
                time.sleep(pause)
                pause = min(2 * pause, longest)
                now = time.monotonic()
                if now - started < _LATE_S or now - looked < _LOOK_EVERY_S:
                    continue
                looked = now
                if lost := lost_ranks(others, within_s=0.0):
                    raise lost_in(lost, what)
                # Those that have ended will not come to ask, unless they have before.
                gone = _ended(others) if now - started > _STILL_S else ()
                if gone and answer not in store:
                    raise lost_in(gone, what)
                look()
        self._last_keys = (answer, count)


def _ended(others: Sequence[int]) -> set[int]:
    board = watchdog().board
    # Not one that is about to raise an error: this rank's watchdog will raise the same here, once all who
    # have to are ready to. A rank that ends breaks the calls of others.
    gone = {rank for rank, each in board.last_words(others).items() if each.has_ended}
    return gone | board.lost(others)
