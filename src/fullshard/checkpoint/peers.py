"""What the ranks of a save or a load tell each other: small objects, over a Gloo group of their own.

Of their own, since a save in the background goes on while the program's groups are in use.
"""

import contextlib
import datetime
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from fullshard.errors import (
    CheckpointError,
    DamagedCheckpointError,
    FullshardError,
    PeerLostError,
)
from fullshard.peers.groups import mark_own, place_in_job, timeout_s
from fullshard.peers.paths import by_text, name_ranks
from fullshard.peers.store import store_in_time
from fullshard.peers.waits import announce, name_lost_ranks

T = TypeVar("T")
U = TypeVar("U")

_CAME = "fullshard/came/{}/{}"  # by the group and the rank: to how many calls
_NAMES_RANK = re.compile(r"rank \d+: ")


class Peers:
    """The ranks of the job. One rank alone needs no process group.

    use: those with different uses may be called at once from different threads, as each has its group.
    call: what the program has called, which has to be the same on all ranks.
    """

    def __init__(self, use: str = "saves", call: str = "another function") -> None:
        self._call = call
        self._number = 0
        self.rank, self.size = place_in_job()
        self.group = _group(use) if self.size > 1 else None

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, on every rank. Collective."""
        if self.group is None:
            return [value]
        told: list[Any] = [None] * self.size
        with _naming_loss(self.group):
            dist.all_gather_object(told, (self._call, value), group=self.group)
        if len({call for call, _ in told}) > 1:
            calls = by_text({rank: call for rank, (call, _) in enumerate(told)})
            raise CheckpointError(
                f"Ranks wait in different calls: {'; '.join(f'{who} in {what}' for who, what in calls)}. Make "
                "the same calls on all ranks, in the same order."
            )
        return [value for _, value in told]

    def come(self) -> None:
        """Leave word that this rank has come to a call, for the error where another one never does."""
        if self.group is not None:
            self._number = _numbers[self.group] = _numbers.get(self.group, 0) + 1
            with contextlib.suppress(Exception):
                # It only serves the message, and a store may be unusual.
                store_in_time().set(
                    _CAME.format(self.group.group_name, self.rank), str(self._number)
                )

    @contextlib.contextmanager
    def naming_absent(self, what: object) -> Iterator[None]:
        """Name in the error of a lost rank those that have not come to this call. what: was to be saved."""
        try:
            yield
        except CheckpointError as error:
            absent: list[int] = []
            if self.group is not None and isinstance(error.__cause__, RuntimeError):
                absent = _absent_ranks(self.group, self._number)
            if not absent:
                raise
            raise CheckpointError(
                f"{what}: {name_ranks(absent)} did not call {self._call} here, and rank {self.rank} did. "
                f"Call it on all ranks, after the same step. {error}"
            ) from error

    def check_alike(self, **arguments: object) -> None:
        """Raise CheckpointError, on all ranks, if they gave different arguments. Collective."""
        self.together(lambda: None, alike=arguments)

    def at_first(self, function: Callable[[], T]) -> Callable[[], list[T]]:
        """Run a function on every rank, and bring what it returns to rank 0. Collective.

        Returns a function that returns all results on rank 0. It raises CheckpointError if a rank's has
        raised: call it in `of_first`, so that all ranks hear of that.
        """
        value, error = _tried(function)
        own = value, _Fault.of(error)
        everyones: list[Any] | None = [own]
        if self.group is not None:
            everyones = [None] * self.size if self.rank == 0 else None
            with _naming_loss(self.group):
                dist.gather_object(own, everyones, dst=0, group=self.group)

        def results() -> list[T]:
            assert everyones is not None
            faults = {n: fault for n, (_, fault) in enumerate(everyones) if fault is not None}
            if faults:
                raise _joined(faults, are_ranks_named=self.size > 1)
            return [result for result, _ in everyones]

        return results

    def of_first(self, function: Callable[[], T]) -> T:
        """Return what rank 0's function returns, on every rank. Collective.

        Raises CheckpointError on every rank if it raises.
        """
        value: Any = None
        error: Exception | None = None
        if self.rank == 0:
            value, error = _tried(function)
        if self.group is not None:
            told = [(value, _Fault.of(error))]
            with _naming_loss(self.group):
                dist.broadcast_object_list(told, 0, group=self.group)
            value, fault = told[0]
            if self.rank != 0 and fault is not None:
                error = _joined({0: fault})
        _raise(error)
        result: T = value
        return result

    def together(
        self, function: Callable[[], T], *, alike: Mapping[str, object] | None = None
    ) -> T:
        """Return what this rank's function returns, once those of all ranks have. Collective.

        Raises on every rank if one raises: its own error there, a CheckpointError with the ranks and
        what each says on the others. alike: arguments by name; if ranks differ in one, that is the error.
        """
        return self.together_telling(lambda: (function(), None), alike=alike)[0]

    def together_telling(
        self, function: Callable[[], tuple[T, U]], *, alike: Mapping[str, object] | None = None
    ) -> tuple[T, list[U]]:
        """Return what this rank's function returns, and what those of all ranks tell of theirs.

        function: returns its value, and what all ranks are to know. Raises as `together` does. Collective.
        """
        found, error = _tried(function)
        told: Any = found[1] if error is None else None
        own = {name: repr(argument) for name, argument in (alike or {}).items()}
        everyones = self.gathered((own, _Fault.of(error), told))
        faults = {n: fault for n, (_, fault, _) in enumerate(everyones) if fault is not None}
        if faults and (error is None or len(faults) < self.size or len({*faults.values()}) > 1):
            problem = _joined(faults)
            problem.__cause__ = error
            raise problem
        _raise(error)
        _check_alike([arguments for arguments, _, _ in everyones])
        return found[0], [each for _, _, each in everyones]


def _tried(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what a function returns, or what it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _raise(error: Exception | None) -> None:
    if isinstance(error, OSError):
        raise CheckpointError(said(error)) from error
    if error is not None:
        raise error


class _Fault(NamedTuple):
    """An error as other ranks hear of it."""

    text: str
    is_damage: bool

    @staticmethod
    def of(error: Exception | None) -> "_Fault | None":
        if error is None:
            return None
        return _Fault(said(error), isinstance(error, DamagedCheckpointError))


def _joined(faults: Mapping[int, _Fault], *, are_ranks_named: bool = True) -> CheckpointError:
    """Return one error for those of some ranks. It is of damage if one of theirs is."""
    lines = [
        f"rank {rank}: {fault.text}"
        if are_ranks_named and not _NAMES_RANK.match(fault.text)
        else fault.text
        for rank, fault in faults.items()
    ]
    is_damage = any(fault.is_damage for fault in faults.values())
    kind = DamagedCheckpointError if is_damage else CheckpointError
    return kind("\n".join(dict.fromkeys(lines)))


def _check_alike(everyones: Sequence[Mapping[str, str]]) -> None:
    for name in everyones[0]:
        values = [own.get(name) for own in everyones]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise CheckpointError(
                f"{name} is {values[0]:.200} on rank 0 and {values[other]:.200} on rank {other}. Call this "
                "on all ranks with the same arguments."
            )


@contextlib.contextmanager
def _naming_loss(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Say of an error of the transport what it means: which rank does not answer any more."""
    try:
        yield
    except RuntimeError as error:
        assert group is not None
        said = str(error).partition("\n")[0][:200]
        what = f"A rank has died, or has left its process group, while the ranks saved or loaded together ({said})."
        if "imed out" in str(error):
            what = f"A rank has not come to save or to load for as long as the process group's timeout says ({said})."
        cause: RuntimeError | None = error
        try:
            name_lost_ranks(error, group, "a save or a load")
        except PeerLostError as lost:
            what, cause = str(lost), None  # what the transport says of it adds nothing
        except FullshardError:
            pass  # nobody is known to be gone
        raise CheckpointError(
            f"{what} Checkpoints that were complete before are as they were: start again from the newest."
        ) from cause


def said(error: BaseException) -> str:
    """Return what an error says, with its kind where that is not a checkpoint's."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.filename}: {error.strerror}. Check space and permissions there."
        return f"{error.strerror}. Check space and permissions of the folder that is written."
    return f"{type(error).__name__}: {error}"


def _absent_ranks(group: dist.ProcessGroup, number: int) -> list[int]:
    """Return the ranks of a group that have not come to a call; none if the store does not tell."""
    with contextlib.suppress(Exception):
        store = store_in_time()
        keys = {rank: _CAME.format(group.group_name, rank) for rank in range(group.size())}
        came = {rank: int(store.get(key)) for rank, key in keys.items() if key in store}
        return [rank for rank in keys if came.get(rank, -1) < number]
    return []


_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


def _group(use: str) -> dist.ProcessGroup:
    """Return the group for a use, made once for each default group. Collective the first time."""
    world = dist.group.WORLD
    assert world is not None
    groups = _groups.setdefault(world, {})
    if use not in groups:
        # As long as the program's: torch's default of half an hour else.
        timeout = datetime.timedelta(seconds=timeout_s(world))
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        mark_own(group)
        announce()
        groups[use] = group
    return groups[use]
