"""State of a model and its optimizer that either API can load.

A model trained as `FullyShardedDataParallel` goes on under `fully_shard`, and the reverse, on any
number of ranks: what moves is exchanged piece by piece, and no rank ever holds a whole copy.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.fsdp1.module import FullyShardedDataParallel
from fullshard.state import optim as optim_state
from fullshard.state.optim_keys import all_names
from fullshard.state.options import ShardedStateDictConfig, StateDictType, default_settings
from fullshard.state.parts import locals_of


def sharded_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Return ``{"model": ..., "optimizer": ...}``, by the names parameters had before sharding.

    Values are DTensors, but for what is not sharded, and share memory with the model's where they
    can. ``torch.distributed.checkpoint`` writes and reads them. Every rank has to call it.
    """
    with _sharded_values(model):
        state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optim_state.save(
            model,
            optimizer,
            optimizer.state_dict(),
            shards=True,
            rank0_only=False,
            offload_to_cpu=False,
            group=None,
            dtensors=True,
        )
    return state


@torch.no_grad()
def load_sharded_state(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Load what `sharded_state` returned, of this model sharded in any way. Every rank has to call it.

    Raises RuntimeError for missing, unexpected or misshapen parameters, as ``load_state_dict``.
    """
    values = dict(state["model"])
    for unit, names in all_names(model):
        if unit.is_flat:
            continue  # takes values of any kind
        given = {i: n[0] for i, n in enumerate(names) if n[0] in values}
        _check_shapes(unit, {name: values[name] for name in given.values()}, given)
        shards = locals_of(unit, list(given), [values[name] for name in given.values()])
        for index, shard in zip(given, shards, strict=True):
            wrapped = unit.params[index].wrap_shard(shard)
            values.update({name: wrapped for name in names[index] if name in values})
    model.load_state_dict(values)
    if optimizer is not None:
        optimizer.load_state_dict(
            optim_state.load(
                model, optimizer, state["optimizer"], rank0_only=False, is_named=False, group=None
            )
        )


def _check_shapes(unit: Unit, values: dict[str, Any], names: dict[int, str]) -> None:
    wrong = [
        f"{name}: {tuple(values[name].size())}, expected {tuple(expected)}"
        for index, name in names.items()
        if tuple(values[name].size()) != tuple(expected := unit.params[index].sharded.shape)
    ]
    if wrong:
        raise StateError(f"size mismatch for {'; '.join(wrong)}. Load the state of this model.")


@contextlib.contextmanager
def _sharded_values(model: nn.Module) -> Iterator[None]:
    """Let wrappers save sharded values, or whole ones where nothing is sharded."""
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    before = [wrapper._state_dict_settings for wrapper in wrappers]
    for wrapper in wrappers:
        is_sharded = wrapper._placement.mesh.shard_group is not None
        kind = StateDictType.SHARDED_STATE_DICT if is_sharded else StateDictType.FULL_STATE_DICT
        wrapper._state_dict_settings = default_settings(kind)
        if is_sharded:
            config = ShardedStateDictConfig(_use_dtensor=True)
            wrapper._state_dict_settings = default_settings(kind, config)
    try:
        yield
    finally:
        for wrapper, settings in zip(wrappers, before, strict=True):
            wrapper._state_dict_settings = settings
