"""What a checkpoint is made of: models, optimizers, and extra state, as one list of tensors and values.

model/<name>                       or model.<key>/<name> of several models
optimizer/<name>/<state>           or optimizer.<key>/... of several optimizers
extra/<key>/<path>                 tensors inside the extra state; @<rank> after the key where
                                   ranks differ
"""

import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.checksums import checksum
from fullshard.checkpoint.optimizer_state import (
    LocalState,
    OptimizerState,
    agreed_state,
    local_state,
    trained_by,
    without_compile,
)
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.values import decoded, encoded
from fullshard.checkpoint.writing import ToWrite, host_bytes
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import share
from fullshard.state.holdings import (
    BUFFER,
    REPLICATED,
    Holding,
    holdings_of,
    numbered,
    tensor_holding,
)

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None

# Boxes smaller than this are not divided among the ranks that all hold them.
_WORTH_SHARING_NBYTES = 1 << 20
RNG = "rng"  # the key of the random generators among the extra state


@dataclasses.dataclass(slots=True)
class Content:
    """What one rank brings to a checkpoint.

    holdings: tensors. values: of the manifest, by key; of this rank alone in ``own_values``, which
    differ between ranks.
    """

    holdings: list[Holding]
    values: dict[str, Any]
    own_values: dict[str, Any]


def named(objects: Any, section: str) -> dict[str, Any]:
    """Return objects by the section that their tensors' names begin with.

    A model alone is in "model", {"actor": model} in "model.actor". Raises CheckpointError for a key with
    a slash.
    """
    if objects is None:
        return {}
    if not isinstance(objects, Mapping):
        return {section: objects}
    for key in objects:
        if not isinstance(key, str) or not key or "/" in key:
            raise CheckpointError(f"{section}: {key!r} is no key. Use strings without slashes.")
    return {f"{section}.{key}": each for key, each in objects.items()}


@dataclasses.dataclass(slots=True)
class _Extra:
    """An entry of the extra state: its encoded value, and the tensors inside it by name."""

    tree: Any
    tensors: dict[str, torch.Tensor]


def content_of(
    models: Models, optimizers: Optimizers, extra: Mapping[str, Any], *, rng: bool, peers: Peers
) -> Content:
    """Return what this rank has of models, optimizers and extra state. Collective.

    What can fail on one rank alone is done by all, and its errors exchanged, before each collective.
    """
    by_section = named(models, "model")

    def local_part() -> tuple[list[Holding], dict[str, LocalState], dict[str, _Extra]]:
        trained = trained_by([*by_section.values()])
        states = {
            section: local_state(optimizer, trained, [*by_section.values()], f"{section}/")
            for section, optimizer in named(optimizers, "optimizer").items()
        }
        extras = {}
        for key, state in extra_states(extra, rng=rng).items():
            extras[key] = _Extra(None, {})
            extras[key].tree = encoded(state, f"extra/{key}", extras[key].tensors.__setitem__)
        return held_by(by_section), states, extras

    holdings, local_states, extras = peers.together(local_part)
    agreed = {
        section: agreed_state(local, f"{section}/", peers.group)
        for section, local in local_states.items()
    }
    values: dict[str, Any] = {
        "models": sorted(by_section),
        "optimizers": peers.together(lambda: {s: _values(s, each) for s, each in agreed.items()}),
        "extra": {},
    }
    for state in agreed.values():
        holdings += state.tensors.values()
    own_values: dict[str, Any] = {}
    differing = _differing(extras, peers)
    for key, each in extras.items():
        if key not in differing:
            values["extra"][key] = each.tree
            holdings += [tensor_holding(name, tensor) for name, tensor in each.tensors.items()]
            continue
        if any(isinstance(tensor, DTensor) for tensor in each.tensors.values()):
            raise CheckpointError(
                f"extra {key!r} holds DTensors, and other values beside them that differ between ranks. "
                "Give them as two entries."
            )
        own: dict[str, torch.Tensor] = {}
        state = decoded(each.tree, each.tensors.__getitem__)
        own_values[key] = encoded(state, f"extra/{key}@{peers.rank}", own.__setitem__)
        holdings += [
            dataclasses.replace(tensor_holding(name, t), copies=1) for name, t in own.items()
        ]
    return Content(numbered(holdings, peers.group), values, own_values)


def held_by(models: Mapping[str, nn.Module]) -> list[Holding]:
    """Return what this rank holds of models, by names with their sections."""
    return [
        prefixed(holding, f"{section}/")
        for section, model in models.items()
        for holding in holdings_of(model)
    ]


def section_names(objects: Any, section: str) -> list[str]:
    """Return the sections of objects as far as they are known; see `named`."""
    return sorted(objects) if isinstance(objects, Mapping) else [section][: objects is not None]


def prefixed(holding: Holding, prefix: str) -> Holding:
    """Return a holding with a prefix before its names."""
    names = tuple(dict.fromkeys(prefix + without_compile(name) for name in holding.names))
    return dataclasses.replace(holding, names=names)


def to_write(holdings: list[Holding]) -> Iterator[ToWrite]:
    """Yield this rank's share of the boxes that it holds: every element is one rank's to write."""
    for number, holding in enumerate(holdings):
        for box, view in holding.boxes:
            if view.numel() * view.itemsize < _WORTH_SHARING_NBYTES or _is_whole_copy(holding):
                # What the engine keeps equal is dealt out. What it does not know of is the first
                # holder's: were ranks to differ, a mixture would be a model that no rank had.
                if holding.copy == (0 if _is_whole_copy(holding) else number % holding.copies):
                    yield ToWrite(holding.name, holding.shape, box, view)
                continue
            part = share(box, holding.copy, holding.copies)
            if part is not None:
                yield ToWrite(holding.name, holding.shape, part, view[part.within(box)])


def _is_whole_copy(holding: Holding) -> bool:
    return holding.placement in (REPLICATED, BUFFER)


def extra_states(extra: Mapping[str, Any], *, rng: bool) -> dict[str, Any]:
    """Return the state of each extra object: what its ``state_dict()`` returns, or the value itself."""
    found = {}
    for key, value in extra.items():
        if not key or key == RNG or {"/", "@"} & set(key):
            raise CheckpointError(
                f"extra: {key!r} is no key. Use strings without / and @, other than {RNG!r}."
            )
        found[key] = value.state_dict() if hasattr(value, "state_dict") else value
    if rng:
        found[RNG] = random_states()
    return found


def random_states() -> dict[str, Any]:
    """Return the states of the random generators of this process: Python's, NumPy's and torch's."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = tuple(numpy.random.get_state())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator.type)
        states["device"] = module.get_rng_state()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Continue random generators from states; those of generators that are not here are left out."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and "device" in states:
        torch.get_device_module(accelerator.type).set_rng_state(states["device"])


def _values(section: str, state: OptimizerState) -> dict[str, Any]:
    return {
        "class": state.kind,
        "groups": encoded(state.groups, f"{section}/groups", _no_tensor),
        "scalars": encoded(state.scalars, section, _no_tensor),
    }


def _differing(extras: Mapping[str, _Extra], peers: Peers) -> set[str]:
    """Return the keys whose values differ between ranks, but for local parts of DTensors. Collective."""

    def digest(extra: _Extra) -> str:
        parts = [repr(extra.tree)]
        for name, tensor in extra.tensors.items():
            if not isinstance(tensor, DTensor):
                data = checksum(host_bytes(tensor))
                parts += [name, str(tensor.dtype), str(tuple(tensor.shape)), data]
        return checksum("\n".join(parts).encode())

    if peers.size == 1:
        return set()
    everyones = peers.gathered({key: digest(each) for key, each in extras.items()})
    keys = {key for own in everyones for key in own}
    return {key for key in keys if len({own.get(key) for own in everyones}) > 1}


def _no_tensor(name: str, tensor: torch.Tensor) -> None:
    raise CheckpointError(
        f"{name} is a tensor of shape {tuple(tensor.shape)} inside a value. An optimizer's state may hold "
        "tensors, its options and lists may not."
    )
