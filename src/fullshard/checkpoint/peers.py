"""What the ranks of a save or a load tell each other: small objects, over a Gloo group of their own.

Of their own, since a save in the background goes on while the program's groups are in use.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fullshard.errors import CheckpointError

T = TypeVar("T")


class Peers:
    """The ranks of the job. One rank alone needs no process group.

    use: those with different uses may be called at once from different threads, as each has its group.
    """

    def __init__(self, use: str = "saves") -> None:
        is_many = dist.is_initialized() and dist.get_world_size() > 1
        self.group = _group(use) if is_many else None
        self.rank = dist.get_rank() if is_many else 0
        self.size = dist.get_world_size() if is_many else 1

    def gathered(self, value: T) -> list[T]:
        """Return every rank's value, on every rank. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def check_alike(self, **arguments: object) -> None:
        """Raise CheckpointError, on all ranks, if they gave different arguments. Collective."""
        everyones = self.gathered({name: repr(value) for name, value in arguments.items()})
        for name in arguments:
            values = [own.get(name) for own in everyones]
            if len(set(values)) > 1:
                other = next(rank for rank, value in enumerate(values) if value != values[0])
                raise CheckpointError(
                    f"{name} is {values[0]} on rank 0 and {values[other]} on rank {other}. Call this on "
                    "all ranks with the same arguments."
                )

    def at_first(self, value: T) -> list[T] | None:
        """Return every rank's value on rank 0, and None on the others. Collective."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def of_first(self, function: Callable[[], T]) -> T:
        """Return what rank 0's function returns, on every rank. Collective.

        Raises CheckpointError on every rank if it raises.
        """
        result: list[Any] = [None, None]
        if self.rank == 0:
            try:
                result[0] = function()
            except Exception as error:
                result[1] = error
        if self.group is not None:
            told = [result[0], None if result[1] is None else said(result[1])]
            dist.broadcast_object_list(told, 0, group=self.group)
            if self.rank != 0:
                result = [told[0], told[1] and CheckpointError(f"rank 0: {told[1]}")]
        self._raise(result[1])
        value: T = result[0]
        return value

    def together(self, function: Callable[[], T]) -> T:
        """Return what this rank's function returns, once those of all ranks have. Collective.

        Raises on every rank if one raises: its own error there, a CheckpointError with the ranks and
        what each says on the others.
        """
        error: Exception | None = None
        value: Any = None
        try:
            value = function()
        except Exception as caught:
            error = caught
        texts = self.gathered(None if error is None else said(error))
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if problems and (error is None or len(set(texts)) > 1):
            problem = CheckpointError("\n".join(dict.fromkeys(problems)))
            problem.__cause__ = error
            raise problem
        self._raise(error)
        result: T = value
        return result

    @staticmethod
    def _raise(error: Exception | None) -> None:
        if error is None:
            return
        if isinstance(error, OSError):
            raise CheckpointError(said(error)) from error
        raise error


def said(error: BaseException) -> str:
    """Return what an error says, with its kind where that is not a checkpoint's."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}. Check space and permissions of the checkpoint's folder."
    return f"{type(error).__name__}: {error}"


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()


def _group(use: str) -> dist.ProcessGroup:
    """Return the group for a use, made once for each default group. Collective the first time."""
    world = dist.group.WORLD
    assert world is not None
    groups = _groups.setdefault(world, {})
    if use not in groups:
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        groups[use] = group
    return groups[use]
