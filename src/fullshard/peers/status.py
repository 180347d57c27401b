"""What a rank that stands still says of itself, as a value and as text."""

import dataclasses
import enum
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fullshard.errors import DivergenceError, FullshardError, PeerLostError

# Statuses that a rank has to post unchanged before it counts as blocked; two a second.
STEADY_BEATS = 3


class State(str, enum.Enum):
    """What a rank does that stands still."""

    WAITS = "waits"  # blocked in a collective of fullshard's
    CALLS = "calls"  # blocked in a function of torch.distributed
    RUNS = "runs"  # anything else: computing, loading data, waiting for a device
    LEFT = "left"  # its process groups are destroyed
    ENDED = "ended"  # its program has ended


# A key of `RankStatus.groups`, for all ranks of the job: of the groups that they have begun to make together. Their names are
# counted, and they meet in the store, which counts nothing.
NEW_GROUPS = "new groups"

# The last entries of flight records, by group: place, checksum, moment and text.
Tails = Mapping[str, Sequence[tuple[int, int, str]]]


@dataclasses.dataclass(frozen=True)
class GroupCounts:
    """How far a rank is in what a group does together.

    size: number of the group's ranks.
    issued: collectives that the process group counts. place: of the group's flight record.
    """

    size: int
    issued: int
    place: int


class Verdict(NamedTuple):
    """What a rank has to raise, and every rank that waits for it.

    is_loss: whether that is about a rank that is lost, not about paths that differ.
    about: the flight record and place at which ranks differ; empty if that is not what it says.
    ranks: that will find a verdict too.
    """

    text: str
    is_loss: bool = False
    about: str = ""
    ranks: Collection[int] = ()

    @property
    def error(self) -> FullshardError:
        """A new error that says so: PeerLostError for a loss, else DivergenceError."""
        return PeerLostError(self.text) if self.is_loss else DivergenceError(self.text)


@dataclasses.dataclass(frozen=True)
class RankStatus:
    """What a rank that stands still says of itself.

    beat: how often it has said so without having moved since.
    where: the operation or function. op: the collective in which torch.distributed blocks; empty if
        it is in none. at: the line of the program. moment: step and phase.
    groups: by a key that is the same on all ranks of the group.
    late: ranks that it waits for, where it sees them; empty where counters of groups alone tell.
    waited: keys of the groups that it may be waiting for; empty if nobody knows, which means any.
    in_group: key of the process group that it waits for in fullshard's code; empty for shared memory
        and for groups of fullshard's own.
    tails: of each group whose flight record is not in shared memory.
    has_threads: whether other threads of its process run code of the program.
    on_device: keys of the groups whose collectives run on a device, for which it may wait while it runs.
    has_left: whether it destroyed its process groups before it ended, so that ``groups`` are of before.
    error: the exception that ended it; empty if there is none.
    verdict: what it is about to raise, or has raised; None if that is nothing that others have to raise.
    unreached: ranks of other hosts that do not answer this one, though they may live.
    stack: of the thread that stands still, innermost call last.
    """

    rank: int
    state: State
    beat: int = 0
    where: str = ""
    op: str = ""
    at: str = ""
    moment: str = ""
    groups: Mapping[str, GroupCounts] = dataclasses.field(default_factory=dict)
    late: tuple[int, ...] = ()
    waited: tuple[str, ...] = ()
    in_group: str = ""
    tails: Tails = dataclasses.field(default_factory=dict)
    has_threads: bool = False
    on_device: tuple[str, ...] = ()
    has_left: bool = False
    error: str = ""
    verdict: Verdict | None = None
    unreached: tuple[int, ...] = ()
    stack: tuple[str, ...] = ()

    @property
    def is_blocked(self) -> bool:
        """Whether it has been in one collective for a while, and nothing else of it may come.

        What one thread waits for, another thread of the program may still be about to call.
        """
        is_in_collective = self.state in (State.WAITS, State.CALLS)
        return is_in_collective and self.beat >= STEADY_BEATS and not self.has_threads

    @property
    def has_ended(self) -> bool:
        return self.state in (State.LEFT, State.ENDED)

    @property
    def has_gone(self) -> bool:
        return self.has_ended or self.verdict is not None  # it will take part in nothing any more

    def __str__(self) -> str:
        moment = f" ({self.moment})" if self.moment else ""
        at = f" at {self.at}" if self.at else ""
        if self.state is State.LEFT:
            return f"has destroyed its process groups{moment}"
        if self.state is State.ENDED:
            return f"ended{moment}" + (f" with {self.error}" if self.error else "")
        if self.state is State.RUNS:
            return f"running{moment}" + (f",{at}" if at else "")
        where = f"waiting at {self.where}" if self.state is State.WAITS else f"in {self.where}"
        return f"{where}{moment}" + (f", called{at}" if at else "")

    def to_bytes(self, most_nbytes: int) -> bytes:
        """Pickle it into at most so many bytes: with less of the stack, then with less of the rest."""
        status = self
        while len(data := pickle.dumps(status)) > most_nbytes:
            if stack := status.stack:
                status = dataclasses.replace(status, stack=stack[len(stack) // 2 + 1 :])
            else:
                error, verdict = status.error, status.verdict
                if verdict is not None:
                    verdict = verdict._replace(text=verdict.text[: len(verdict.text) // 2])
                status = dataclasses.replace(
                    status, error=error[: len(error) // 2], verdict=verdict, groups={}, tails={}
                )
        return data
