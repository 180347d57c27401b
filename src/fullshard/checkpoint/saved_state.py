"""What a load sees of files, whatever their form: tensors by name, and values.

Reader (reading.py)             a checkpoint of our own format
ForeignState (foreign.py)       directories of torch.distributed.checkpoint, files of torch.save
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from fullshard.checkpoint.spans import Wanted
from fullshard.errors import CheckpointError, FullshardError
from fullshard.plan.layout import Shape

_Self = TypeVar("_Self", bound="SavedState")

# What Python raises where a value is of another form than the one that reads it takes for granted.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


@contextlib.contextmanager
def naming_malformed(what: str, advice: str = "") -> Iterator[None]:
    """Refuse with CheckpointError what is of another form than is known. what: where it was read, and what it is."""
    try:
        yield
    except _MALFORMED as error:
        if isinstance(error, FullshardError):
            raise
        raise CheckpointError(f"{what} of no known form ({error!r:.200}).{advice}") from error


class SavedTensor(Protocol):
    """A tensor of the files: its whole shape, its dtype, its other names, and how it was divided."""

    @property
    def shape(self) -> Shape: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def placement(self) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The names that a load looks for.

    models: by section, the names of its tensors. optimizers: by section, the names that each of its
    parameters stands for, in their order. extra: keys.
    """

    models: Mapping[str, Collection[str]]
    optimizers: Mapping[str, Sequence[tuple[str, ...]]]
    extra: Collection[str]


class SavedState(abc.ABC):
    """Tensors and values that were saved. Use it in a `with` statement.

    location: of the files. digest: ranks that see the same files have the same.
    tensors: by name with its section: "model/0.weight". values: as a manifest has them.
    """

    location: Path | str
    digest: str
    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Any]

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None = None
    ) -> None:
        """Read boxes into their memory. progress: is called with numbers of bytes that were read.

        Raises CheckpointError for a file that is missing, cut short or changed, by name.
        """

    def find(self, names: Names) -> None:
        """Bring tensors and values under the names that are looked for, if they have others."""
        return
