"""What a checkpoint is made of: models, optimizers, and extra state, as one list of tensors and values.

model/<name>                       or model.<key>/<name> of several models
optimizer/<name>/<state>           or optimizer.<key>/... of several optimizers
extra/<key>/<path>                 tensors inside the extra state; @<rank> after the key where
                                   ranks differ
"""

import dataclasses
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.checksums import checksum
from fullshard.checkpoint.differing import digest_of_values, said_of_differing
from fullshard.checkpoint.everyones_groups import merged_values
from fullshard.checkpoint.optimizer_state import (
    LocalState,
    OptimizerState,
    TrainedBy,
    agreed_state,
    local_state,
)
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.values import decoded, encoded
from fullshard.checkpoint.writing import ToWrite, host_bytes
from fullshard.errors import CheckpointError, FullshardError
from fullshard.plan.units import without_compile
from fullshard.state.copies import digest_of_unnumbered, numbered, own_shares
from fullshard.state.holdings import (
    HeldTensor,
    Holding,
    holdings_of,
    is_ddp,
    tensor_holding,
    without_ddp,
)

T = TypeVar("T")

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None

RNG = "rng"  # the key of the random generators among the extra state


@dataclasses.dataclass(slots=True)
class Content:
    """What one rank brings to a checkpoint.

    holdings: tensors. values: of the manifest, by key; of this rank alone in ``own_values``, which
    differ between ranks. warning: what to tell the user once ranks do not wait for each other any more.
    """

    holdings: list[Holding]
    values: dict[str, Any]
    own_values: dict[str, Any]
    warning: str = ""


def named(objects: Any, section: str) -> dict[str, Any]:
    """Return objects by the section that their tensors' names begin with.

    A model alone is in "model", {"actor": model} in "model.actor". Raises CheckpointError for a key with
    a slash.
    """
    if objects is None:
        return {}
    if not isinstance(objects, Mapping):
        return {section: without_ddp(objects)}
    for key in objects:
        if not isinstance(key, str) or not key or "/" in key:
            raise CheckpointError(f"{section}: {key!r} is no key. Use strings without slashes.")
    return {f"{section}.{key}": without_ddp(each) for key, each in objects.items()}


@dataclasses.dataclass(slots=True)
class _Extra:
    """An entry of the extra state: its encoded value, and the tensors inside it by name."""

    tree: Any
    tensors: dict[str, torch.Tensor | HeldTensor]


def content_of(
    models: Models,
    optimizers: Optimizers,
    extra: Mapping[str, Any],
    beside: Callable[[], T],
    *,
    rng: bool,
    peers: Peers,
    alike: Mapping[str, object],
) -> tuple[Content, T]:
    """Return what this rank has of models, optimizers and extra state. Collective.

    beside: what else this rank alone has to do first; its result is returned too. alike: arguments that
    all ranks have to give alike. What can fail on one rank is done by all before errors are exchanged.
    There are two rounds of small messages where ranks have states of the same kinds.
    """
    by_section = named(models, "model")
    # Reading all values takes as long as copying them. DistributedDataParallel keeps them equal.
    compares = peers.size > 1 and not all(map(is_ddp, _each(models)))

    def local_part() -> tuple[_Local[T], tuple[dict[str, str], dict[str, Any]]]:
        done = beside()
        trained = TrainedBy(by_section)
        every_model = [*by_section.values()]
        states = {
            section: local_state(optimizer, trained.of(optimizer), every_model, f"{section}/")
            for section, optimizer in named(optimizers, "optimizer").items()
        }
        extras = {}
        for key, state in extra_states(extra, rng=rng).items():
            extras[key] = _extra_of(key, state)
        told = (
            {} if peers.size == 1 else {key: _digest(each) for key, each in extras.items()},
            {section: local.digest() for section, local in states.items()},
        )
        return _Local(held_by(by_section), states, extras, done), told

    local, told = peers.together_telling(local_part, alike=alike)
    agreed: dict[str, OptimizerState] = {}
    fault: Exception | None = None
    try:
        for section, state in local.states.items():
            digests = [each[1][section] for each in told]
            agreed[section] = agreed_state(state, f"{section}/", peers.group, digests)
    except (
        Exception
    ) as error:  # of stages of a pipeline perhaps not on all ranks: raised below, on all
        fault = error
    differing = _differing([digests for digests, _ in told])

    def joined() -> tuple[Content, tuple[bytes, str, str]]:
        if fault is not None:
            raise fault
        content = _joined(local, agreed, differing, peers.rank)
        content.values["models"] = sorted(by_section)
        of_optimizers = repr(content.values["optimizers"]).encode()
        of_values = digest_of_values(content.holdings) if compares else ""
        held = digest_of_unnumbered(content.holdings)
        return content, (held, checksum(of_optimizers), of_values)

    content, told_now = peers.together_telling(joined)
    if len({(held, of_values) for held, _, of_values in told_now}) > 1:
        content.warning = said_of_differing(content.holdings, peers)
    content.holdings = numbered(content.holdings, peers.group, [held for held, *_ in told_now])
    if len({of_optimizers for _, of_optimizers, _ in told_now}) > 1:
        everyones = peers.gathered(content.values["optimizers"])
        content.values["optimizers"] = merged_values(everyones)
    return content, local.beside


def _extra_of(key: str, state: Any) -> _Extra:
    """Return an entry of the extra state. Raises CheckpointError, with the key, if it cannot be saved."""
    extra = _Extra(None, {})
    try:
        extra.tree = encoded(state, f"extra/{key}", extra.tensors.__setitem__)
        for name, tensor in extra.tensors.items():
            if isinstance(tensor, torch.Tensor):
                tensor_holding(name, tensor)
    except FullshardError:
        raise
    except Exception as error:  # whatever arrays and tensors without plain memory raise
        raise CheckpointError(
            f"extra {key!r}: cannot be saved: {type(error).__name__}: {error}. Convert it to plain tensors, "
            "numbers, strings, or lists and dicts of them."
        ) from error
    return extra


@dataclasses.dataclass(slots=True)
class _Local(Generic[T]):
    """What this rank knows before it has heard of others."""

    holdings: list[Holding]
    states: dict[str, LocalState]
    extras: dict[str, _Extra]
    beside: T


def _joined(
    local: _Local[Any], agreed: Mapping[str, OptimizerState], differing: Collection[str], rank: int
) -> Content:
    """Put models, optimizers and extra state together, once it is known where ranks differ."""
    holdings = list(local.holdings)
    values: dict[str, Any] = {
        "optimizers": {section: _values(section, state) for section, state in agreed.items()},
        "extra": {},
    }
    for state in agreed.values():
        holdings += state.tensors.values()
    own_values: dict[str, Any] = {}
    for key, each in local.extras.items():
        if key not in differing:
            values["extra"][key] = each.tree
            holdings += [tensor_holding(name, tensor) for name, tensor in each.tensors.items()]
            continue
        if any(isinstance(tensor, DTensor | HeldTensor) for tensor in each.tensors.values()):
            raise CheckpointError(
                f"extra {key!r} holds sharded tensors, and other values beside them that differ between "
                "ranks. Give them as two entries."
            )
        own: dict[str, torch.Tensor] = {}
        decoded_state = decoded(each.tree, each.tensors.__getitem__)
        own_values[key] = encoded(decoded_state, f"extra/{key}@{rank}", own.__setitem__)
        holdings += [tensor_holding(name, t)._replace(copies=1) for name, t in own.items()]
    return Content(holdings, values, own_values)


def held_by(models: Mapping[str, nn.Module]) -> list[Holding]:
    """Return what this rank holds of models, by names with their sections."""
    return [
        prefixed(holding, f"{section}/")
        for section, model in models.items()
        for holding in holdings_of(model)
    ]


def _each(objects: Any) -> list[Any]:
    return [*objects.values()] if isinstance(objects, Mapping) else [objects]


def section_names(objects: Any, section: str) -> list[str]:
    """Return the sections of objects as far as they are known; see `named`."""
    return sorted(objects) if isinstance(objects, Mapping) else [section][: objects is not None]


def prefixed(holding: Holding, prefix: str) -> Holding:
    """Return a holding with a prefix before its names."""
    names = tuple(dict.fromkeys(prefix + without_compile(name) for name in holding.names))
    return holding._replace(names=names)


def to_write(holdings: list[Holding]) -> Iterator[ToWrite]:
    """Yield this rank's share of the boxes that it holds: every element is one rank's to write."""
    for holding, held in own_shares(holdings):
        yield ToWrite(holding.name, holding.shape, held.box, held.view)


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


def _digest(extra: _Extra) -> str:
    """Return what is alike on ranks that have the same value, but for local parts of sharded tensors."""
    parts = [repr(extra.tree)]
    for name, tensor in extra.tensors.items():
        if not isinstance(tensor, DTensor | HeldTensor):
            data = checksum(host_bytes(tensor))
            parts += [name, str(tensor.dtype), str(tuple(tensor.shape)), data]
    return checksum("\n".join(parts).encode())


def _differing(everyones: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the keys of extra state of which not all ranks have the same digest."""
    keys = {key for own in everyones for key in own}
    return {key for key in keys if len({own.get(key) for own in everyones}) > 1}


def _no_tensor(name: str, tensor: torch.Tensor) -> None:
    raise CheckpointError(
        f"{name} is a tensor of shape {tuple(tensor.shape)} inside a value. An optimizer's state may hold "
        "tensors, its options and lists may not."
    )
