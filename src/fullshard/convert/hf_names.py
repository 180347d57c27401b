"""Names and dtypes of tensors: in files, in models, and from one to the other.

model = LlamaForCausalLM(...)        its file has "model.layers.0..." and "lm_head.weight"
model = LlamaModel(...)              the same file, rename={"model.": "", "lm_head.weight": None}
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from fullshard.errors import CheckpointError
from fullshard.plan.units import Rename, clean_name, renamer, without_compile


def plain_name(name: str) -> str:
    """Return a name without what wrappers and ``torch.compile`` put into it."""
    return without_compile(clean_name(name))


def by_new_name(names: Iterable[str], rename: Rename) -> dict[str, str]:
    """Return names by their new names. Raises CheckpointError for two that get one name, and for what renames none."""
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        raise CheckpointError(
            f"rename is {rename!r:.80}: give a dict from names to names, or a function."
        )
    new_name = renamer(rename)
    found: dict[str, str] = {}
    for name in names:
        new = new_name(name)
        if new is None:
            continue
        if new in found:
            raise CheckpointError(f"rename: {found[new]} and {name} both become {new}.")
        found[new] = name
    return found


def computed_names(model: nn.Module) -> set[str]:
    """Return the names of buffers that a model computes by itself, and that no file has to have.

    Files of older versions have them all the same: position_ids, inv_freq.
    """
    return {
        plain_name(f"{path}.{name}" if path else name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def is_wide_float(dtype: object) -> bool:
    """Whether values may be converted. Those of one byte mean nothing without their scales."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


_OF_EXPERT = re.compile(r"\.experts\.\d+\.")


def prefix_hint(missing: Sequence[str], unexpected: Collection[str]) -> list[str]:
    """Say which beginning of names would make the most of them fit; nothing if few would.

    A model may be the inner one of that in the file, or have it inside.
    """
    if any(_OF_EXPERT.search(name) for name in unexpected) and missing:
        return [
            "  The files have a tensor for each expert, and the model has them joined: load them with "
            "from_pretrained before sharding."
        ]
    inner = Counter(prefix for name in unexpected for prefix in _prefixes(name, set(missing)))
    outer = Counter(prefix for name in missing for prefix in _prefixes(name, set(unexpected)))
    for found, is_inner in ((inner, True), (outer, False)):
        if not found:
            continue
        prefix, count = found.most_common(1)[0]
        if 2 * count >= len(missing):
            rename = {prefix: ""} if is_inner else {"": prefix}
            return [f"  With rename={rename!r}, {count} of {len(missing)} would be there."]
    return []


def _prefixes(name: str, others: Collection[str]) -> list[str]:
    """Return the beginnings of a name without which it is one of others."""
    dots = [position + 1 for position, character in enumerate(name) if character == "."]
    return [name[:dot] for dot in dots if name[dot:] in others]
