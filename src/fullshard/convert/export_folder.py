"""The folder that an export writes to, until it gets its name; and what lies beside weights in it.

Beside weights are the configuration, which has to say what the files hold, and tokenizers.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.local import (
    LocalDraft,
    discard,
    others_in,
    removed_folders,
    set_aside,
    sync_folder,
    write_durably,
)
from fullshard.convert.hf_files import INDEX
from fullshard.convert.hf_names import plain_name
from fullshard.errors import CheckpointError
from fullshard.json_files import parse_json
from fullshard.state.holdings import without_ddp

# A folder or a file to copy from, fields, or an object that knows its JSON.
Config = str | Path | Mapping[str, Any] | Any

_CONFIG = "config.json"
# Of files beside weights: configurations, tokenizers, chat templates, code of models.
_SIDE_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})
_OF_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin.index.json")
# What may be replaced with an export: names that models and tokenizers of Transformers are saved under.
_USUAL = frozenset(
    {
        INDEX,
        _CONFIG,
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "processor_config.json",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
_WEIGHTS_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class ExportFolder(LocalDraft):
    """A folder that is being written. It has its name only once all of it is on the disk.

    names: of files that it is to have beside weights. What else is in a folder that it replaces has to be
    of names that exports have.
    """

    def __init__(
        self, target: Path, tag: str, *, overwrite: bool, names: Collection[str] = ()
    ) -> None:
        self._names = frozenset(names)
        super().__init__(target, tag, overwrite=overwrite)

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write small files, by names that may have a folder in them."""
        for name, content in files.items():
            path = self.path / name
            if path.parent != self.path:
                path.parent.mkdir(exist_ok=True)
            write_durably(path, content)
            sync_folder(path.parent)

    def finish(self) -> None:
        """Give the folder its name.

        A folder that it replaces loses its name just before: a crash between leaves both, neither under
        the name.
        """
        self.check_target()
        sync_folder(self.path)
        self._remove_old()  # what a crash has left
        old = set_aside(self.target) if self.target.is_dir() else None
        try:
            self.path.rename(self.target)
        except OSError:
            if old is not None:
                old.rename(self.target)
            raise
        self.settle(self.target.parent, self.target)
        self._remove_old()

    def _remove_old(self) -> None:
        for old in removed_folders(self.target.parent, self.target.name):
            discard(old, self.is_ours)

    def is_known(self, name: str) -> bool:
        """Whether an export may have written a file of this name, which may be replaced then."""
        return name in self._names or name in _USUAL or bool(_WEIGHTS_NAME.fullmatch(name))

    def check_target(self) -> bool:
        """Return whether something is to be replaced.

        Raises CheckpointError if it is something that an export would not have written.
        """
        target = self.target
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise CheckpointError(f"{target}: is a file or a link. Name another path.")
        if not target.is_dir() or not any(target.iterdir()):
            return False
        if not self.overwrite:
            raise CheckpointError(
                f"{target}: is there already. Name another path, or pass overwrite=True to replace it."
            )
        if others := others_in(target, self.is_ours):
            raise CheckpointError(
                f"{target}: holds {others[0]}, which no export has written, and would be removed with the "
                "folder. Name another path, or move that file."
            )
        return True


# Beside the weights


def files_beside(
    config: Config, model: nn.Module | None, dtype: torch.dtype | None
) -> dict[str, bytes]:
    """Return the content of files beside the weights, by name.

    config: where they come from; None takes what the model carries, if it is one of Transformers.
    dtype: that of the weights, which the configuration says: else another would be loaded.
    """
    found: dict[str, bytes]
    if isinstance(config, Mapping):
        found = {_CONFIG: as_json(dict(config))}
    elif isinstance(config, str | Path):
        found = _copied(Path(config))
    elif config is not None:
        found = {_CONFIG: as_json(_fields(config))}
    else:
        found = {} if model is None else _of_model(model)
    if dtype is not None and _CONFIG in found:
        fields = _parsed(found[_CONFIG])
        for key in {"dtype", "torch_dtype"} & fields.keys():
            fields[key] = str(dtype).removeprefix("torch.")
        found[_CONFIG] = as_json(fields)
    return found


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _copied(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        found = {str(file.relative_to(path)): file.read_bytes() for file in _side_files(path)}
        if _CONFIG not in found:
            raise CheckpointError(f"config: {path} holds no {_CONFIG}.")
        return found
    if not path.is_file():
        raise CheckpointError(f"config: {path} is not there.")
    return {_CONFIG: path.read_bytes()}


def _side_files(folder: Path) -> Iterator[Path]:
    """Yield what lies beside the weights in a folder, and in folders in it."""
    for path in (*sorted(folder.glob("*")), *sorted(folder.glob("*/*"))):
        is_hidden = path.relative_to(folder).parts[0].startswith(".")
        is_of_weights = path.name.endswith(_OF_WEIGHTS)
        if path.is_file() and path.suffix in _SIDE_SUFFIXES and not (is_hidden or is_of_weights):
            yield path


def _of_model(model: nn.Module) -> dict[str, bytes]:
    inner = [
        module
        for path, module in without_ddp(model).named_modules()
        if not plain_name(f"{path}.").strip(".") and _knows_json(getattr(module, "config", None))
    ]
    if not inner:
        return {}
    source: Any = inner[-1]
    fields = _fields(source.config)
    # Sharding gives a module a class of another name.
    prefix = getattr(source, "_prefix", "")
    name = type(source).__name__
    fields["architectures"] = [name.removeprefix(prefix if isinstance(prefix, str) else "")]
    found = {_CONFIG: as_json(fields)}
    generation = getattr(source, "generation_config", None)
    if _knows_json(generation):
        found["generation_config.json"] = as_json(_fields(generation))
    return found


def check_ties(
    files: Mapping[str, bytes], model: nn.Module, tied: Collection[Collection[str]]
) -> None:
    """Raise CheckpointError if the configuration ties embeddings that the model does not, or the reverse.

    Transformers ties by the configuration, so it would load another model. tied: the names of each tensor
    that has several.
    """
    says = _parsed(files[_CONFIG]).get("tie_word_embeddings") if _CONFIG in files else None
    if says is None:
        return
    paths = {id(module): plain_name(path) for path, module in model.named_modules()}
    for module in model.modules():
        first, last = (_embeddings(module, end) for end in ("input", "output"))
        if first is None or last is None:
            continue
        names = {f"{paths.get(id(each))}.weight" for each in (first, last)}
        if any(names <= set(own) for own in tied) is not bool(says):
            raise CheckpointError(
                f"{' and '.join(sorted(names))} are {'two tensors' if says else 'one tensor'}, and the "
                f"configuration says tie_word_embeddings={says}: Transformers would load another model. "
                f"Set tie_word_embeddings={not says} in it, or {'tie' if says else 'separate'} them."
            )
        return


def _embeddings(module: nn.Module, end: str) -> Any:
    """Return the embeddings at an end of a model of Transformers; None where there are none to tell."""
    find = getattr(module, f"get_{end}_embeddings", None)
    try:
        return find() if callable(find) else None
    except (NotImplementedError, AttributeError):  # images, speech, several towers
        return None


def _knows_json(config: Any) -> bool:
    return callable(getattr(config, "to_json_string", None))


def _fields(config: Any) -> dict[str, Any]:
    if not _knows_json(config):
        raise CheckpointError(
            f"config is a {type(config).__name__}: give a folder, a file, a dict, or a configuration of "
            "Transformers."
        )
    fields = _parsed(config.to_json_string().encode())
    fields.setdefault("dtype", None)  # to be said, if the weights have one
    return fields


def _parsed(content: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = parse_json(
        content, dict[str, Any], lambda why: CheckpointError(f"config: {why}.")
    )
    return fields
