"""Which tensors of foreign files are a model's and an optimizer's, told by the files alone.

Where there are ``param_groups``, there is an optimizer, and its state beside them. Of the other dicts of
tensors the one under a usual key (model, state_dict) is the model, else the largest. Those with the same names are
models as well if none of them is under a usual key, or all are in a dict "model"; else they are extra state, as
averages are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from fullshard.checkpoint.foreign import GROUPS, USUAL, ForeignFiles, clean_key, endings
from fullshard.checkpoint.read import Names

_Path = tuple[str | int, ...]


def guessed_names(files: ForeignFiles) -> Names:
    """Return the names to look for in files of others, for want of a model."""
    keys = {clean_key(key): key for key in files.paths}
    beginnings = {
        key.removesuffix(rest) for key in keys for rest in endings(key) if rest.startswith(GROUPS)
    }
    optimizers = {
        beginning: sorted(
            {
                *_with_state(keys, f"{beginning}state."),
                *_in_groups(files, keys, f"{beginning}{GROUPS}"),
            }
        )
        for beginning in beginnings
    }
    labels = _labels([tuple(b.rstrip(".").split(".")) for b in sorted(beginnings)])
    sections = {
        ("optimizer" if len(beginnings) == 1 else f"optimizer.{label}"): optimizers[beginning]
        for beginning, label in zip(sorted(beginnings), labels, strict=True)
    }
    of_optimizers = tuple(f"{b}{part}" for b in beginnings for part in ("state.", GROUPS))
    dicts = _dicts(files, {k: raw for k, raw in keys.items() if not k.startswith(of_optimizers)})
    return Names(
        _models(dicts),
        {section: [(name,) for name in names] for section, names in sections.items()},
        {str(path[0]) for path in files.paths.values()},
    )


def _with_state(keys: Iterable[str], beginning: str) -> set[str]:
    """Return the names that have state under keys with a beginning: of beginning + name + "." + state."""
    own = (key.removeprefix(beginning) for key in keys if key.startswith(beginning))
    return {key.rpartition(".")[0] for key in own}


def _in_groups(files: ForeignFiles, keys: Mapping[str, str], beginning: str) -> set[str]:
    """Return the names or numbers of the parameters that groups list, in one list or one by one."""
    found: set[str] = set()
    for key, raw in keys.items():
        if key == beginning:
            listed = [group.get("params") for group in files.value_of(raw)]
        elif key.startswith(f"{beginning}.") and key.endswith(".params"):
            listed = [files.value_of(raw)]
        else:
            continue
        found |= {clean_key(str(each)) for own in listed if isinstance(own, list) for each in own}
    return found


def _dicts(files: ForeignFiles, keys: Mapping[str, str]) -> dict[_Path, dict[str, int]]:
    """Return the sizes of tensors in bytes, by the path of the dict that holds them and their names."""
    found: dict[_Path, dict[str, int]] = {}
    for key, raw in keys.items():
        if raw in files.tensors:
            tensor, path = files.tensors[raw], files.paths[raw][:-1]
            name = key.removeprefix("".join(f"{part}." for part in path))
            found.setdefault(path, {})[name] = math.prod(tensor.shape) * tensor.dtype.itemsize
    return found


def _models(dicts: Mapping[_Path, Mapping[str, int]]) -> dict[str, list[str]]:
    if not dicts:
        return {}
    usual = [path for path in dicts if "".join(f"{part}." for part in path) in USUAL]
    first = max(usual or dicts, key=lambda path: sum(dicts[path].values()))
    alike = [
        path
        for path, own in dicts.items()
        if path and (own.keys() == dicts[first].keys() or path[:-1] == first[:-1] == ("model",))
    ]
    if len(alike) < 2 or (usual and not all(path[:-1] == ("model",) for path in alike)):
        return {"model": [*dicts[first]]}
    labels = _labels([tuple(map(str, path)) for path in alike])
    return {f"model.{label}": [*dicts[path]] for path, label in zip(alike, labels, strict=True)}


def _labels(paths: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a key for each path: its last part, or one before it, that differs in all of them."""
    for depth in range(1, min(map(len, paths), default=0) + 1):
        labels = [path[-depth] for path in paths]
        if len(set(labels)) == len(paths):
            return labels
    return [".".join(path) for path in paths]
