"""Files of ``torch.save`` that hold whole state dicts, read without running what they contain."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.checkpoint.foreign import (
    ForeignFiles,
    ForeignTensor,
    characters_of,
    check_path,
    is_plain_tensor,
    loaded_without_trust,
)
from fullshard.checkpoint.spans import Wanted
from fullshard.errors import CheckpointError
from fullshard.state.host_memory import checksum

_ENDS_NBYTES = 1 << 20


class TorchFile(ForeignFiles):
    """One file. Tensors are mapped, so only what is used is read."""

    tensors: dict[str, ForeignTensor]
    paths: dict[str, tuple[str | int, ...]]

    def __init__(self, path: Path) -> None:
        self.location = path
        try:
            nbytes = path.stat().st_size
            content = loaded_without_trust(path, nbytes, str(path))
            self.digest = _digest(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{path}: holds a {type(content).__name__}, not a state dict. Save a dict of tensors, such "
                "as model.state_dict()."
            )
        self.tensors, self.paths = {}, {}
        self._values: dict[str, Any] = {}
        left = characters_of(nbytes)
        for way, value in _leaves(content, ()):
            key = ".".join(map(str, way))
            check_path(f"{path}: {key}", way)
            left -= len(key)
            if left < 0:
                raise CheckpointError(
                    f"{path}: the keys of its values are longer than a file of its size holds."
                )
            if key in self.paths:
                raise CheckpointError(
                    f"{path}: has two values under keys that read {key!r}. Save it again with other keys."
                )
            self.paths[key] = way
            self._values[key] = value
            if is_plain_tensor(value):
                self.tensors[key] = ForeignTensor(tuple(value.shape), value.dtype)

    def close(self) -> None:
        self._values.clear()

    def value_of(self, key: str) -> Any:
        return self._values[key]

    def read(self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None) -> None:
        for each in wanted:
            whole = self._values[each.name].detach()
            index = tuple(slice(start, start + size) for start, size in zip(*each.box, strict=True))
            each.view.copy_(whole[index])
            if progress is not None:
                progress(each.view.numel() * each.view.itemsize)


def _leaves(value: Any, way: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield what is in nested dicts, and in lists of dicts, with its path."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, (*way, key if isinstance(key, int) else str(key)))
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from _leaves(each, (*way, number))
    else:
        yield way, value


def _digest(path: Path) -> str:
    """Return what tells two files apart, without reading all: their size, first and last bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_ENDS_NBYTES)
        file.seek(max(0, size - _ENDS_NBYTES))
        return checksum(first + file.read() + str(size).encode())
