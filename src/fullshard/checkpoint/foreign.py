"""State that others have saved, under names of their own: which of it is a model's and an optimizer's.

    {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 5}     becomes the keys
    model.0.weight   optim.state.0.weight.exp_avg   optim.param_groups.0.lr   step

The beginnings ("model.", "optim.") are not known, nor is there always one. They are found by the names
that the model has.
"""

import abc
import io
import itertools
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fullshard.checkpoint.manifest import DTYPE_NAMES, SavedTensor
from fullshard.checkpoint.read import Names, SavedState, Wanted, naming_malformed
from fullshard.checkpoint.values import MODULE_STATES, MOST_LEVELS, STATE_NAME, encoded
from fullshard.errors import CheckpointError, FullshardError
from fullshard.plan.boxes import whole_box
from fullshard.plan.units import clean_name, without_compile
from fullshard.state.host_memory import checksum

# If several beginnings fit equally well, these come first.
USUAL = ("model.", "", "state_dict.", "module.", "optim.", "optimizer.")
_LONGEST_KEY = 2000
_SMALL_NBYTES = 1 << 20  # tensors of extra state that are read though nobody asks for them
GROUPS = "param_groups"
VALUES = "values/"  # the section of tensors that are values: step counters


def loaded_without_trust(source: Path | io.BytesIO, nbytes: int, where: str) -> Any:
    """Return what `torch.save` has written, tensors of files mapped. nbytes: of the source.

    Raises CheckpointError for what would run code, is damaged, or would take more memory than so many bytes
    need: packed parts, values or tensors that are in it many times, or in themselves.
    """
    try:
        if zipfile.is_zipfile(source):
            parts = zipfile.ZipFile(source).infolist()
            if sum(part.file_size for part in parts) > nbytes:
                raise CheckpointError(f"{where}: its parts have more bytes than the file.")
        if isinstance(source, io.BytesIO):
            source.seek(0)
        value = _loaded(source)
    except (FullshardError, OSError):
        raise
    except Exception as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it is damaged, or was not written by torch.save ({type(error).__name__})"
        if found:
            why = f"it would use {found[1]}"
        raise CheckpointError(f"{where}: cannot be read without trust: {why}") from error
    _check_proportion(value, nbytes, where)
    return value


def _loaded(source: Path | io.BytesIO) -> Any:
    try:
        return torch.load(
            source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path)
        )
    except Exception as error:
        if "mmap" not in str(error):
            raise
        # a file of the old format, which cannot be mapped
        return torch.load(source, map_location="cpu", weights_only=True)


def _check_proportion(value: Any, nbytes: int, where: str) -> None:
    """Refuse what is far larger than its file: a pickle may name a part any number of times."""
    values_left, tensors_left = characters_of(nbytes), 16 * nbytes + (64 << 20)
    unseen = [(value, 0)]
    while unseen:
        each, level = unseen.pop()
        values_left -= 1
        if isinstance(each, torch.Tensor):
            tensors_left -= each.numel() * each.itemsize
        inner: Iterable[Any] = ()
        if isinstance(each, Mapping):
            inner = itertools.chain(each.keys(), each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            inner = each
        if level > MOST_LEVELS:
            raise CheckpointError(
                f"{where}: holds a value that contains itself, or more than {MOST_LEVELS} levels."
            )
        if values_left < 0 or tensors_left < 0:
            raise CheckpointError(
                f"{where}: holds the same values or memory so often that they would take far more than "
                f"its {nbytes} bytes."
            )
        unseen.extend((part, level + 1) for part in inner)


def characters_of(nbytes: int) -> int:
    """Return how many characters of keys, or values, a file may have: more than any that was written has."""
    return 16 * nbytes + 100_000


def is_plain_tensor(value: Any) -> bool:
    """Whether a value is a tensor with an element at each place of its memory: none that is sparse or meta."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return not value.is_meta and value.dtype in DTYPE_NAMES


def check_path(where: str, path: Sequence[Any]) -> None:
    """Refuse keys that nobody would give. Looking for names costs the square of their length."""
    if not all(isinstance(part, str | int) for part in path):
        raise CheckpointError(f"{where:.200}: has a key that is neither text nor a number")
    key = ".".join(map(str, path))
    if len(key) > _LONGEST_KEY or key.count(".") > MOST_LEVELS:
        raise CheckpointError(
            f"{where:.200}: has a key of {len(key)} characters and {key.count('.')} dots; {_LONGEST_KEY} and "
            f"{MOST_LEVELS} are the most."
        )


class ForeignFiles(abc.ABC):
    """Files as they are: tensors and other values by key, with the path of each in nested dicts."""

    location: Path | str
    digest: str
    tensors: dict[str, SavedTensor]
    paths: dict[str, tuple[str | int, ...]]

    @abc.abstractmethod
    def value_of(self, key: str) -> Any:
        """Return a value that is no tensor."""

    @abc.abstractmethod
    def read(self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None) -> None:
        """Read boxes into their memory, as `SavedState.read` does, by their keys."""

    def close(self) -> None:  # noqa: B027 - DCP's files are opened for each chunk
        """Let go of what is open."""


class ForeignState(SavedState):
    """The state in files of others. Empty until `find` has found what belongs where."""

    def __init__(self, files: ForeignFiles) -> None:
        self.files = files
        self.location, self.digest = files.location, files.digest
        self.tensors: dict[str, SavedTensor] = {}
        self.values: dict[str, Any] = {}
        self._keys: dict[str, str] = {}  # of the files, by our names
        self._inside: dict[str, torch.Tensor] = {}  # tensors inside other values

    def close(self) -> None:
        self.files.close()

    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None = None
    ) -> None:
        keyed = [each for each in wanted if each.name in self._keys]
        self.files.read([e._replace(name=self._keys[e.name]) for e in keyed], progress)
        for each in wanted:
            inside = self._inside.get(each.name)
            if inside is not None:
                each.view.copy_(inside[each.box.within(whole_box(tuple(inside.shape)))])

    def find(self, names: Names) -> None:
        with naming_malformed(f"{self.location}: a value is"):
            self._find(names)

    def _find(self, names: Names) -> None:
        self.tensors, self._keys, self._inside = {}, {}, {}
        keys: dict[str, str] = {}
        for key in self.files.paths:
            other = keys.setdefault(clean_key(key), key)
            if other != key:
                raise CheckpointError(
                    f"{self.location}: has both {other!r} and {key!r}, which are one name without wrappers. "
                    "Save it again without one of them."
                )
        self.values = {"models": sorted(names.models), "optimizers": {}, "extra": {}}
        self._taken: set[str] = set()
        self._module_states: list[tuple[str, tuple[str | int, ...], str]] = []
        left = dict(keys)
        known = {name for own in names.models.values() for name in own}
        known |= {name for own in names.optimizers.values() for each in own for name in each}
        for section, parameters in names.optimizers.items():
            self._find_optimizer(section, parameters, known, keys, left)
        for section, own in names.models.items():
            self._find_model(section, set(own), keys, left)
        self._keep_extra(names.extra, left)
        self._keep_module_states()

    def _find_model(
        self, section: str, names: set[str], keys: Mapping[str, str], left: dict[str, str]
    ) -> None:
        fits = Counter(key[: -len(name)] for key in keys for name in endings(key) if name in names)
        beginning = self._best(fits, section)
        if beginning is None:
            return
        # Where a model's tensors lie beside dicts, those in the dicts are not its own.
        own = {key: left[key] for key in left if key.startswith(beginning)}
        ways = Counter(self._way(raw) for k, raw in own.items() if k[len(beginning) :] in names)
        way = ways.most_common(1)[0][0]
        for key, raw in own.items():
            is_beside = self._way(raw) == way
            if self._is_module_state(raw, way):
                path = self.files.paths[left.pop(key)]
                name = clean_key(".".join(map(str, path[: len(way) + 1])))[len(beginning) :]
                self._module_states.append((section, (name, *path[len(way) + 1 :]), raw))
            elif raw in self.files.tensors and is_beside and not _is_state(key, names):
                self._add(f"{section}/{key[len(beginning) :]}", left.pop(key))

    def _is_module_state(self, raw: str, way: tuple[str | int, ...]) -> bool:
        """Whether a key is a module's own state, or in one that is a dict. way: to the model's tensors."""
        path = self.files.paths[raw]
        name = path[len(way)] if len(path) > len(way) and path[: len(way)] == way else None
        return isinstance(name, str) and name.rpartition(".")[2] == STATE_NAME

    def _way(self, raw: str) -> tuple[str | int, ...]:
        """Return the dicts in which a key lies."""
        return self.files.paths[raw][:-1]

    def _find_optimizer(
        self,
        section: str,
        parameters: Sequence[tuple[str, ...]],
        known: Collection[str],
        keys: Mapping[str, str],
        left: dict[str, str],
    ) -> None:
        found: dict[str, dict[str, tuple[str, str]]] = {}
        for key in keys:
            for before, name, state in _state_keys(key, known):
                found.setdefault(before, {})[key] = name, state
            for rest in endings(key):
                if rest.startswith(f"{GROUPS}."):  # where no parameter has state, as with plain SGD
                    found.setdefault(key.removesuffix(rest), {})
        beginning = self._best(Counter({b: len(own) for b, own in found.items()}), section)
        if beginning is None:
            return

        def name_of(key: str) -> str:
            """Return a parameter's name, which may have been saved as its number in the optimizer."""
            key = clean_key(key)
            return (
                key if key in known or not key.isdigit() else self._numbered(int(key), parameters)
            )

        scalars: dict[str, dict[str, Any]] = {}
        for key, (numbered, state) in found[beginning].items():
            raw = left.pop(key)
            name = name_of(numbered)
            tensor = self.files.tensors.get(raw)
            full = f"{section}/{name}/{state}"
            if tensor is None:
                scalars.setdefault(name, {})[state] = encoded(self.files.value_of(raw), full)
            elif not tensor.shape:
                self._add(f"{VALUES}{full}", raw)
                scalars.setdefault(name, {})[state] = {"$tensor": f"{VALUES}{full}"}
            else:
                self._add(full, raw)
        groups = self._groups(f"{beginning}{GROUPS}", known, name_of, left)
        self.values["optimizers"][section] = {
            "class": None,  # which others do not save
            "groups": encoded(groups, f"{section}/groups"),
            "scalars": scalars,
        }

    def _numbered(self, number: int, parameters: Sequence[tuple[str, ...]]) -> str:
        """Return the name of a parameter that was saved by its number among an optimizer's parameters."""
        if number >= len(parameters):
            raise CheckpointError(
                f"{self.location}: has optimizer state of parameter number {number}, and this optimizer "
                f"has {len(parameters)}. Give it the same parameters in the same order."
            )
        if len(parameters[number]) != 1:
            raise CheckpointError(
                f"{self.location}: has optimizer state by numbers of parameters, and number {number} is a "
                f"flat parameter here. Wrap with use_orig_params=True, or save by names "
                "(torch.distributed.checkpoint.state_dict.get_state_dict)."
            )
        return parameters[number][0]

    def _groups(
        self,
        beginning: str,
        known: Collection[str],
        name_of: Callable[[str], str],
        left: dict[str, str],
    ) -> list[dict[str, Any]]:
        """Return the options of groups: from one list, from its items, or from those of each parameter."""
        by_group: dict[str, dict[str, Any]] = {}
        if beginning in left:  # the whole list as one value
            for index, group in enumerate(self.files.value_of(left.pop(beginning))):
                by_group[str(index)] = dict(group)
        for key in [key for key in left if key.startswith(f"{beginning}.")]:
            name, _, option = key[len(beginning) + 1 :].rpartition(".")
            by_group.setdefault(name, {})[option] = self._value(left.pop(key))
        groups = []
        for name, options in by_group.items():
            own = options.pop("params", [name] if name in known else [])
            own = [name_of(str(each)) for each in own]
            groups.append({"params": own, "options": options})
        return groups

    def _keep_extra(self, wanted: Collection[str], left: Mapping[str, str]) -> None:
        """Keep what is left as extra state; large tensors and unsafe values only if asked for."""
        tree: dict[str | int, Any] = {}
        left_out = []
        for key, raw in left.items():
            path = self.files.paths[raw]
            tensor = self.files.tensors.get(raw)
            if tensor is not None and path[0] not in wanted and tensor.nbytes > _SMALL_NBYTES:
                left_out.append(key)
                continue
            try:
                value = self._extra_value(key, raw)
            except CheckpointError:
                if path[0] in wanted:
                    raise
                left_out.append(key)
                continue
            _put(tree, path, value)
        self.values["extra"] = {str(key): _as_saved(value) for key, value in tree.items()}
        self.values["left_out"] = left_out
        step = self.values["extra"].get("step")
        self.values["step"] = step if type(step) is int else None

    def _keep_module_states(self) -> None:
        tree: dict[str | int, Any] = {}
        for section, path, raw in self._module_states:
            key = "/".join(map(str, (MODULE_STATES, section, *path)))
            _put(tree, (section, *path), self._extra_value(key, raw))
        if tree:
            self.values["extra"][MODULE_STATES] = _as_saved(tree)

    def _extra_value(self, key: str, raw: str) -> Any:
        if raw not in self.files.tensors:
            return encoded(self.files.value_of(raw), f"extra/{key}", self._keep)
        self._add(f"extra/{key}", raw)
        return {"$tensor": f"extra/{key}"}

    def _value(self, raw: str) -> Any:
        tensor = self.files.tensors.get(raw)
        if tensor is None:
            return self.files.value_of(raw)
        if tensor.shape:
            raise CheckpointError(
                f"{self.location}: {raw} is a tensor of shape {tensor.shape}, but an option of a group."
            )
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self.files.read([_whole(raw, value)], None)
        return value

    def _keep(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name] = SavedTensor(tuple(value.shape), value.dtype)
        self._inside[name] = value.detach()

    def _add(self, name: str, key: str) -> None:
        self.tensors[name] = self.files.tensors[key]
        self._keys[name] = key

    def _best(self, fits: Counter[str], section: str) -> str | None:
        """Return the beginning under which most names are there; None if there is none.

        Of several models or optimizers each has its own, that with its key if there is one.
        """
        own = section.partition(".")[2]
        free = {b: count for b, count in fits.items() if b not in self._taken}
        if own:
            keyed = {b: c for b, c in free.items() if own in (*b.split("."), b.rstrip("."))}
            free = keyed or free
        if not free:
            return None
        most = max(free.values())
        best = [beginning for beginning, count in free.items() if count == most]
        usual = [beginning for beginning in USUAL if beginning in best]
        if usual or len(best) == 1:
            self._taken.add((usual or best)[0])
            return (usual or best)[0]
        raise CheckpointError(
            f"{self.location}: has the names of {section} under each of {', '.join(sorted(best))}. Load a "
            "file that has them once, or give several models by these keys."
        )


def _put(tree: dict[str | int, Any], path: Sequence[str | int], value: Any) -> None:
    place: Any = tree
    for part in path[:-1]:
        place = place.setdefault(part, {})
    place[path[-1]] = value


def _as_saved(tree: Any) -> Any:
    """Return nested dicts by parts of paths as what they were: lists where parts are 0, 1, 2 and so on."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _as_saved(each) for key, each in tree.items()}
    if values and list(values) == list(range(len(values))):
        return list(values.values())
    return {str(key): each for key, each in values.items()}


def _whole(name: str, view: torch.Tensor) -> Wanted:
    return Wanted(name, whole_box(tuple(view.shape)), view)


def clean_key(key: str) -> str:
    """Return a key without what wrappers and ``torch.compile`` put into names."""
    return without_compile(clean_name(key))


def endings(key: str) -> Iterable[str]:
    """Yield a key, and what is left of it after each of its dots."""
    yield key
    for position, character in enumerate(key):
        if character == ".":
            yield key[position + 1 :]


def _state_keys(key: str, known: Collection[str]) -> Iterable[tuple[str, str, str]]:
    """Yield (beginning, parameter, state) of a key as optimizer state: P + "state." + name + "." + state."""
    for rest in endings(key):
        if rest.startswith("state."):
            name, _, state = rest.removeprefix("state.").rpartition(".")
            if name in known or name.isdigit():
                yield key[: -len(rest)], name, state


def _is_state(key: str, known: Collection[str]) -> bool:
    return any(True for _ in _state_keys(key, known))


# Files of ``torch.save`` that hold whole state dicts

_ENDS_NBYTES = 1 << 20


class TorchFile(ForeignFiles):
    """One file. Tensors are mapped, so only what is used is read."""

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
                self.tensors[key] = SavedTensor(tuple(value.shape), value.dtype)

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
