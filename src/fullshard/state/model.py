"""State dicts of modules whose parameters are pieces of a flat buffer.

Keys are those of the module before it was wrapped: the prefixes that wrappers add are removed after
saving and put back before loading. A value is

    FULL      the whole tensor, gathered one unit at a time
    SHARDED   this rank's rows (see `sharded_tensors`), exchanged for its pieces without a whole copy
    LOCAL     this rank's shard of the flat buffer, under ``_flat_param``

A state dict of any of these kinds can be loaded, whatever the settings say. LOCAL takes the number
of ranks and the wrapping that it was saved with; the others take any.
"""

import itertools
import warnings
from typing import Any

import torch
from torch import nn

from fullshard.engine.access import settle_to_read, settle_to_write
from fullshard.engine.adoption import follow_changes
from fullshard.engine.hooks import Hooks, hooks_of
from fullshard.engine.module_state import ModuleState
from fullshard.engine.params.flat import FLAT_PARAM
from fullshard.engine.unit import Unit
from fullshard.engine.whole import gather_whole, is_first
from fullshard.errors import MisuseError
from fullshard.plan.boxes import Box
from fullshard.plan.units import WRAPPED_MODULE, clean_name
from fullshard.state.options import (
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    default_settings,
)
from fullshard.state.sharded_tensors import sharded_tensor
from fullshard.state.structure import modules_in, prefixes_of
from fullshard.state.unit_parts import (
    division_group,
    flat_shards,
    hide_pieces,
    parts_of,
    show_pieces,
    slots_of,
    trained_of,
)
from fullshard.state.unit_values import locals_of, sharded_values
from fullshard.torch_private import ShardedTensor

_PREFIX = f"{WRAPPED_MODULE}."


# Saving


def before_saving(module: nn.Module, *_: Any) -> None:
    """Register every parameter under its own name, so that keys come in the usual order."""
    hooks, unit = _hooks_and_unit(module)
    if not unit.is_whole:
        settle_to_read(unit)
        hooks.begin_saving()


@torch.no_grad()
def after_saving(module: Any, state_dict: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Remove prefixes, and replace pieces by values of the kind that the wrapper's settings ask for.

    Collective, except for LOCAL. Changes ``state_dict`` in place.
    """
    hooks, unit = _hooks_and_unit(module)
    settings: StateDictSettings = module._state_dict_settings
    if not unit.is_whole:
        hooks.end_saving()
    _rename(state_dict, f"{prefix}{_PREFIX}", prefix)
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT and not unit.mesh.shard_group:
        warnings.warn(
            "When using ``NO_SHARD`` for ``ShardingStrategy``, full_state_dict will be returned.",
            stacklevel=2,
        )
        settings = default_settings(StateDictType.FULL_STATE_DICT)
    config, kind = settings.state_dict_config, settings.state_dict_type
    drops = isinstance(config, FullStateDictConfig) and config.rank0_only and not is_first(unit)
    buffers = _buffers(
        module, hooks.state, prefix, casts=kind is not StateDictType.LOCAL_STATE_DICT
    )
    saved: dict[str, Any] = {
        key: b for key, b in buffers.items() if key in state_dict
    }  # persistent
    if kind is StateDictType.LOCAL_STATE_DICT:
        for _, key in _keys(module, unit, prefix):
            del state_dict[key]
        for position, (sizes, local) in enumerate(flat_shards(unit)):
            starts = itertools.accumulate(sizes, initial=0)
            boxes = [Box((start,), (size,)) for start, size in zip(starts, sizes, strict=False)]
            key = f"{prefix}{_flat_key(position)}"
            saved[key] = sharded_tensor(local, (sum(sizes),), boxes, division_group(unit))
    elif unit.is_whole and drops:  # this rank may show its flat parameter
        for key in (f"{prefix}{FLAT_PARAM}", *(key for _, key in _keys(module, unit, prefix))):
            state_dict.pop(key, None)
    else:
        is_full = isinstance(config, FullStateDictConfig)
        values = _whole_values(unit) if is_full else _row_values(unit, config)
        saved |= {key: values[index] for index, key in _keys(module, unit, prefix)}
    for key, value in saved.items():
        state_dict[key] = value.cpu() if config.offload_to_cpu else value
        if drops:
            del state_dict[key]


def _whole_values(unit: Unit) -> list[torch.Tensor]:
    if unit.is_whole:
        current = [param.slots[0].current for param in unit.managed]  # None inside a flat one
        shown = [p.detach().clone() for p in current if p is not None]
        if len(shown) < len(current):
            raise MisuseError(
                f"{unit.label}: a full state dict is asked for inside rank0_only=True, on a rank that shows its "
                "flat parameter. Ask on rank 0 alone, or with FullStateDictConfig(rank0_only=True)."
            )
        return shown
    whole = zip(unit.managed, gather_whole(unit), strict=True)
    return [param.as_unsharded(tensor.clone()) for param, tensor in whole]


def _row_values(unit: Unit, config: StateDictConfig) -> list[torch.Tensor | ShardedTensor]:
    parts = parts_of(unit)
    indices = range(len(parts.forms))
    dtensors = isinstance(config, ShardedStateDictConfig) and config._use_dtensor
    return sharded_values(unit, indices, [*map(parts.local, indices)], dtensors=dtensors)


# Loading


@torch.no_grad()
def before_loading(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put prefixes back, and replace values of any kind by this rank's pieces. Collective.

    Changes ``state_dict`` in place. Values of another shape are described in the last of ``rest``, for
    which ``load_state_dict`` then raises RuntimeError on all ranks.
    """
    (hooks, unit), errors = _hooks_and_unit(module), rest[-1]
    if not unit.is_whole:
        settle_to_write(unit, "load_state_dict")
        show_pieces(unit)
    parts = parts_of(unit)
    num_buffers = len(unit.flat_shards)
    names = [f"{prefix}{_flat_key(position)}" for position in range(num_buffers)]
    flat = {name: state_dict.pop(name) for name in names if name in state_dict}
    _rename(state_dict, prefix, f"{prefix}{_PREFIX}")
    keys = _keys(module, unit, f"{prefix}{_PREFIX}")
    if flat:
        _load_flat(unit, [flat.get(name) for name in names])
        state_dict.update({key: parts.local(index) for index, key in keys})
        return
    if unit.is_whole:
        return
    given = {index: state_dict[key] for index, key in keys if key in state_dict}
    named = {index: clean_name(key) for index, key in keys}
    pieces = {index: parts.local(index) for index in given}  # what is there already
    # Torch fills up what a dict lacks with the model's own parameters (`broadcast_from_rank0`).
    own = {id(parameter) for parameter, _ in trained_of(unit)}
    given = {index: value for index, value in given.items() if id(value) not in own}
    for index, value in list(given.items()):
        if not _fits(value, parts.placed(index).shape, named[index], errors):
            del given[index]
    pieces.update(zip(given, locals_of(unit, list(given), list(given.values())), strict=True))
    for index, key in keys:
        if index in pieces:
            state_dict[key] = pieces[index]
    buffers = _buffers(module, hooks.state, f"{prefix}{_PREFIX}", casts=False)
    for key, buffer in buffers.items():
        if key in state_dict and not _fits(
            state_dict[key], tuple(buffer.shape), clean_name(key), errors
        ):
            state_dict[key] = buffer


def _fits(value: Any, expected: tuple[int, ...], name: str, errors: list[str]) -> bool:
    shape = tuple(value.size())
    if shape != expected:
        errors.append(
            f"size mismatch for {name}: copying a param with shape {shape} from checkpoint, the "
            f"shape in current model is {expected}."
        )
    return shape == expected


def after_loading(module: nn.Module, incompatible: Any) -> None:
    """Hide pieces again, and rename missing and unexpected keys to the names before wrapping."""
    _, unit = _hooks_and_unit(module)
    if not unit.is_whole:
        hide_pieces(unit)
        follow_changes(unit)
    for names in incompatible:
        names[:] = [clean_name(name) for name in names]


def _load_flat(unit: Unit, values: list[Any]) -> None:
    for (_, flat), value in zip(flat_shards(unit), values, strict=True):
        expected = flat.numel()
        if not isinstance(value, ShardedTensor):
            raise MisuseError(
                f"{unit.label}: Tensors in local_state_dict should be ShardedTensor, not "
                f"{type(value).__name__}. Load a dict that was saved as LOCAL_STATE_DICT."
            )
        local = [shard.tensor.reshape(-1) for shard in value.local_shards()]
        numel = sum(tensor.numel() for tensor in local)
        if numel != expected:
            raise MisuseError(
                f"{unit.label}: the local state dict has {numel} elements for this rank, which "
                f"owns {expected}. Load it on as many ranks as saved it, wrapped in the same way."
            )
        if local:
            flat.copy_(torch.cat(local))


# Names


def _keys(module: nn.Module, unit: Unit, prefix: str) -> list[tuple[int, str]]:
    """Return (index, key) of each parameter below a prefix; a shared parameter has several keys."""
    prefixes = prefixes_of(modules_in(module))
    return [
        (index, f"{prefix}{inner}{name}")
        for index, places in enumerate(slots_of(unit))
        for own, name in places
        for inner in prefixes.get(id(own), ())
    ]


def _buffers(
    module: nn.Module, state: ModuleState, prefix: str, *, casts: bool
) -> dict[str, torch.Tensor]:
    """Return buffers of the modules that are in no nested instance, by key.

    casts: return copies in the dtypes they had before mixed precision cast them.
    """
    prefixes = prefixes_of(modules_in(module))
    found = {}
    for own in state.own_modules():
        for name, buffer in own._buffers.items():
            dtype = state.buffer_dtypes.get(own, {}).get(name) if casts else None
            if buffer is None:
                continue
            kept = buffer.detach() if dtype is None else buffer.detach().to(dtype, copy=True)
            found.update({f"{prefix}{inner}{name}": kept for inner in prefixes[id(own)]})
    return found


def _rename(state_dict: dict[str, Any], old: str, new: str) -> None:
    for key in [key for key in state_dict if key.startswith(old)]:
        state_dict[f"{new}{key[len(old) :]}"] = state_dict.pop(key)


def _flat_key(position: int) -> str:
    return f"{FLAT_PARAM}_{position}" if position else FLAT_PARAM


def _hooks_and_unit(module: nn.Module) -> tuple[Hooks, Unit]:
    hooks = hooks_of(module)
    assert hooks is not None
    (unit,) = hooks.state.all_units
    return hooks, unit
