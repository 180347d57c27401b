"""What lies beside weights: the configuration, which has to say what the files hold, and tokenizers."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.errors import CheckpointError
from fullshard.huggingface.export_folder import CONFIG, as_json, side_files
from fullshard.huggingface.names import plain_name
from fullshard.json_files import parse_json
from fullshard.state.holdings import without_ddp

# A folder or a file to copy from, fields, or an object that knows its JSON.
Config = str | Path | Mapping[str, Any] | Any


def files_beside(
    config: Config, model: nn.Module | None, dtype: torch.dtype | None
) -> dict[str, bytes]:
    """Return the content of files beside the weights, by name.

    config: where they come from; None takes what the model carries, if it is one of Transformers.
    dtype: that of the weights, which the configuration says: else another would be loaded.
    """
    found: dict[str, bytes]
    if isinstance(config, Mapping):
        found = {CONFIG: as_json(dict(config))}
    elif isinstance(config, str | Path):
        found = _copied(Path(config))
    elif config is not None:
        found = {CONFIG: as_json(_fields(config))}
    else:
        found = {} if model is None else _of_model(model)
    if dtype is not None and CONFIG in found:
        fields = _parsed(found[CONFIG])
        for key in ("dtype", "torch_dtype"):
            if key in fields:
                fields[key] = str(dtype).removeprefix("torch.")
        found[CONFIG] = as_json(fields)
    return found


def _copied(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        found = {name: (path / name).read_bytes() for name in side_files(path)}
        if CONFIG not in found:
            raise CheckpointError(f"config: {path} holds no {CONFIG}.")
        return found
    if not path.is_file():
        raise CheckpointError(f"config: {path} is not there.")
    return {CONFIG: path.read_bytes()}


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
    found = {CONFIG: as_json(fields)}
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
    paths = {id(module): plain_name(path) for path, module in model.named_modules()}
    for module in model.modules():
        if CONFIG not in files:
            return
        first, last = (_embeddings(module, end) for end in ("input", "output"))
        says = _parsed(files[CONFIG]).get("tie_word_embeddings")
        if first is None or last is None or says is None:
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
