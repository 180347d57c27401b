"""What a checkpoint is made of: models, optimizers and extra state, as one list of tensors and values.

    model/<name>                   or model.<key>/<name> of several models
    optimizer/<name>/<state>       or optimizer.<key>/... of several optimizers
    extra/<key>/<path>             tensors inside the extra state; @<rank> after the key where ranks differ

`content_of` looks at what this rank alone has, and communicates with nobody. That refers to memory of the
program; `LocalContent.staged` refers to copies, which training does not change. `agreed_content` puts it together
with what the other ranks tell.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.manifest import SavedTensor
from fullshard.checkpoint.optimizer import (
    AgreedState,
    LocalState,
    agreed_state,
    differing_scalars,
    local_state,
    manifest_values,
    merged_values,
    trained_by,
)
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.values import (
    MODULE_STATES,
    RNG,
    decoded,
    encoded,
    module_states,
    random_states,
)
from fullshard.checkpoint.write import ToWrite
from fullshard.errors import CheckpointError, FullshardError
from fullshard.plan.units import without_compile
from fullshard.state.agreement import Digests
from fullshard.state.copies import (
    differing_tensors,
    digest_of_unnumbered,
    digest_of_values,
    numbered,
    own_share,
    said_of_differing,
)
from fullshard.state.holdings import (
    HeldTensor,
    Holding,
    holdings_in,
    plain_memory,
    tensor_holding,
    without_ddp,
)
from fullshard.state.host_memory import checksum, host_bytes
from fullshard.state.structure import Structure

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None

# Returns copies of tensors, in the same order.
Stage = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

# What a rank copies before it is known who writes it, at most.
_MOST_COPIED_NBYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Extra:
    """An entry of the extra state: its encoded value, and the tensors inside it by name.

    A DTensor is a `HeldTensor` here.
    """

    tree: Any
    tensors: Mapping[str, torch.Tensor | HeldTensor]

    def digest(self) -> str:
        """Return what is alike on ranks that have the same value, but for parts of sharded tensors."""
        parts = [repr(self.tree)]
        for name, tensor in self.tensors.items():
            if isinstance(tensor, torch.Tensor):
                data = checksum(host_bytes(tensor))
                parts += [name, str(tensor.dtype), str(tuple(tensor.shape)), data]
        return checksum("\n".join(parts).encode())

    def views(self) -> Iterator[torch.Tensor]:
        """Yield the memory of its tensors."""
        for tensor in self.tensors.values():
            if isinstance(tensor, torch.Tensor):
                yield tensor
            else:
                yield from (held.view for held in tensor.holding.boxes)

    def over(self, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> "Extra":
        """Return the same over copies of its memory."""
        return Extra(
            self.tree,
            {
                name: copy_of(tensor)
                if isinstance(tensor, torch.Tensor)
                else HeldTensor(tensor.holding.over(copy_of))
                for name, tensor in self.tensors.items()
            },
        )


class Told(NamedTuple):
    """What is equal on ranks that have the same. extras: digests by key. states: by section."""

    extras: dict[str, str]
    states: dict[str, Digests]


@dataclasses.dataclass(frozen=True, slots=True)
class LocalContent:
    """What this rank alone knows of a checkpoint's content.

    models: their sections. holdings: of the models, without what others are known to write.
    states: of optimizers, by section. extras: by key.
    compares: whether ranks may differ in values that nothing keeps equal, so that they are compared.
    given: values of the manifest that all ranks are given alike, encoded.
    """

    models: Sequence[str]
    holdings: Sequence[Holding]
    states: Mapping[str, LocalState]
    extras: Mapping[str, Extra]
    compares: bool = True
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def told(self) -> Told:
        """Return what other ranks are told of it at first."""
        return Told(
            {key: each.digest() for key, each in self.extras.items()},
            {section: each.digest() for section, each in self.states.items()},
        )

    @property
    def is_mostly_numbered(self) -> bool:
        """Whether this rank knows who writes what, but for a little, without hearing of others."""
        unknown = [held.view for each in self._holdings() if not each.copies for held in each.boxes]
        unknown += [view for extra in self.extras.values() for view in extra.views()]
        return sum(view.numel() * view.itemsize for view in unknown) <= _MOST_COPIED_NBYTES

    def staged(self, stage: Stage) -> "LocalContent":
        """Return the same over copies of its memory, which training does not change."""
        views = [held.view for holding in self._holdings() for held in holding.boxes]
        views += [view for extra in self.extras.values() for view in extra.views()]
        copy_of = _copier(views, stage)
        return dataclasses.replace(
            self,
            holdings=[holding.over(copy_of) for holding in self.holdings],
            states={key: each.over(copy_of) for key, each in self.states.items()},
            extras={key: each.over(copy_of) for key, each in self.extras.items()},
        )

    def _holdings(self) -> Iterator[Holding]:
        yield from self.holdings
        for state in self.states.values():
            yield from state.holdings()


def _copier(views: Sequence[torch.Tensor], stage: Stage) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copy tensors, all at once; return what finds the copy of one of them."""
    copies = dict(zip(map(id, views), stage(views), strict=True))
    return lambda view: copies[id(view)]


def content_of(
    structures: Mapping[str, Structure],
    optimizers: Mapping[str, torch.optim.Optimizer],
    extra: Mapping[str, Any],
    *,
    rng: bool,
) -> LocalContent:
    """Return what this rank has of models and optimizers, by section, and of extra state.

    Raises FullshardError for what cannot be saved.
    """
    holdings = [*map(own_share, held_by(structures))]  # first: what users have moved is adopted
    trained = trained_by(structures, optimizers)
    states = {
        section: local_state(optimizer, trained[section], [*structures.values()], f"{section}/")
        for section, optimizer in optimizers.items()
    }
    objects = _states_of(extra)
    if rng:
        objects[RNG] = random_states()
    if of_modules := module_states(structures):
        objects[MODULE_STATES] = of_modules
    extras = {key: _extra_of(key, state) for key, state in objects.items()}
    return LocalContent(sorted(structures), holdings, states, extras)


def _extra_of(key: str, state: Any) -> Extra:
    """Return an entry of the extra state. Raises CheckpointError, with the key, if it cannot be saved."""
    tensors: dict[str, torch.Tensor | HeldTensor] = {}
    try:
        tree = encoded(state, f"extra/{key}", tensors.__setitem__)
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                tensors[name] = HeldTensor(tensor_holding(name, tensor))
            elif isinstance(tensor, torch.Tensor):
                tensors[name] = plain_memory(tensor.detach(), name)
    except FullshardError:
        raise
    except Exception as error:  # whatever arrays and tensors without plain memory raise
        raise CheckpointError(
            f"extra {key!r}: cannot be saved: {type(error).__name__}: {error}. Convert it to plain tensors, "
            "numbers, strings, or lists and dicts of them."
        ) from error
    return Extra(tree, tensors)


def _states_of(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each extra object: what its ``state_dict()`` returns, or the value itself."""
    found = {}
    for key, value in extra.items():
        if not key or key in (RNG, MODULE_STATES) or {"/", "@"} & set(key):
            raise CheckpointError(
                f"extra: {key!r} is no key. Use strings without / and @, other than {RNG!r} and "
                f"{MODULE_STATES!r}."
            )
        found[key] = value.state_dict() if hasattr(value, "state_dict") else value
    return found


def named(objects: Any, section: str) -> dict[str, Any]:
    """Return objects by the section that their tensors' names begin with.

    A model alone is in "model", {"actor": model} in "model.actor". Raises CheckpointError for a key with
    a slash, and for what is no model, or no optimizer.
    """
    if objects is None and section != "model":
        return {}
    by_section = {section: objects}
    if isinstance(objects, Mapping):
        for key in objects:
            if not isinstance(key, str) or not key or "/" in key:
                raise CheckpointError(f"{section}: {key!r} is no key. Use strings without slashes.")
        by_section = {f"{section}.{key}": each for key, each in objects.items()}
    for name, each in by_section.items():
        fits = isinstance(each, nn.Module) if section == "model" else hasattr(each, "param_groups")
        if not fits:
            kind = "a module" if section == "model" else "an optimizer"
            found = type(each).__name__
            raise CheckpointError(f"{name} is a {found}: give {kind}, or a dict of them by keys.")
    return {name: without_ddp(each) for name, each in by_section.items()}


def held_by(structures: Mapping[str, Structure], *, writes: str = "") -> list[Holding]:
    """Return what this rank holds of models, by names with their sections. writes: as `holdings_of` says."""
    found = []
    for section, structure in structures.items():
        for holding in holdings_in(structure, writes=writes):
            names = [f"{section}/{without_compile(name)}" for name in holding.names]
            found.append(holding._replace(names=tuple(dict.fromkeys(names))))
    return found


def section_names(objects: Any, section: str) -> list[str]:
    """Return the sections of objects as far as they are known; see `named`."""
    if isinstance(objects, Mapping):
        return sorted(objects, key=str)
    return [section] if objects is not None else []


# What ranks agree on


@dataclasses.dataclass(slots=True)
class Content:
    """What one rank brings to a checkpoint.

    holdings: tensors. values: of the manifest, by key; of this rank alone in ``own_values``, which
    differ between ranks. warning: what to tell the user, on rank 0, once ranks do not wait for each other any more.
    """

    holdings: list[Holding]
    values: dict[str, Any]
    own_values: dict[str, Any]
    warning: str = ""

    def staged(self, stage: Stage) -> "Content":
        """Return the same over copies of what this rank writes, which training does not change."""
        own = [own_share(holding) for holding in self.holdings]
        copy_of = _copier([held.view for holding in own for held in holding.boxes], stage)
        return dataclasses.replace(self, holdings=[holding.over(copy_of) for holding in own])

    def tensors(self) -> dict[str, SavedTensor]:
        """Return what a manifest says of each tensor."""
        return {
            h.name: SavedTensor(h.shape, h.dtype, h.names[1:], h.placement) for h in self.holdings
        }

    def to_write(self) -> list[ToWrite]:
        """Return this rank's share of the boxes that it holds: every element is one rank's to write."""
        return [
            ToWrite(holding.name, holding.shape, held.box, held.view)
            for holding in map(own_share, self.holdings)
            for held in holding.boxes
        ]


def agreed_content(own: LocalContent, told: Sequence[Told], peers: Peers) -> Content:
    """Put together what this rank knows and what all ranks have told. Collective.

    Where ranks have states of the same kinds, they send digests alone.
    """
    agreed: dict[str, AgreedState] = {}
    fault: Exception | None = None
    try:
        for section, state in own.states.items():
            of_states = [each.states[section] for each in told]
            agreed[section] = agreed_state(state, section, peers.group, of_states)
    except Exception as error:
        fault = error  # of stages of a pipeline perhaps not on all ranks: raised below, on all
    digests = [each.extras for each in told]
    keys = {key for own_digests in digests for key in own_digests}
    differing = {key for key in keys if len({each.get(key) for each in digests}) > 1}
    compares = own.compares and peers.size > 1

    def joined() -> tuple[Content, tuple[bytes, str, str]]:
        if fault is not None:
            raise fault
        content = _joined(own, agreed, differing, peers.rank)
        of_optimizers = repr(content.values["optimizers"]).encode()
        of_values = digest_of_values(content.holdings, checksum) if compares else ""
        held = digest_of_unnumbered(content.holdings)
        return content, (held, checksum(of_optimizers), of_values)

    content, told_now = peers.together_telling(joined)
    differing_values = {
        name: ranks for state in agreed.values() for name, ranks in state.differing.items()
    }
    if len({(held, of_values) for held, _, of_values in told_now}) > 1:
        differing_values.update(differing_tensors(content.holdings, peers.gathered, checksum))
    content.holdings = numbered(content.holdings, peers.group, [held for held, *_ in told_now])
    if len({of_optimizers for _, of_optimizers, _ in told_now}) > 1:
        everyones = peers.gathered(content.values["optimizers"])
        content.values["optimizers"] = merged_values(everyones)
        differing_values.update(differing_scalars(everyones))
    if peers.rank == 0:
        content.warning = said_of_differing(differing_values, taken="saved")
    return content


def _joined(
    local: LocalContent, agreed: Mapping[str, AgreedState], differing: Collection[str], rank: int
) -> Content:
    """Put models, optimizers and extra state together, once it is known where ranks differ."""
    holdings = list(local.holdings)
    values: dict[str, Any] = {
        **local.given,
        "optimizers": {
            section: manifest_values(local.states[section], state.scalars, section)
            for section, state in agreed.items()
        },
        "extra": {},
        "models": local.models,
    }
    for state in agreed.values():
        holdings += state.holdings
    own_values: dict[str, Any] = {}
    for key, each in local.extras.items():
        if key not in differing:
            values["extra"][key] = each.tree
            holdings += [tensor_holding(name, tensor) for name, tensor in each.tensors.items()]
            continue
        if any(isinstance(tensor, HeldTensor) for tensor in each.tensors.values()):
            raise CheckpointError(
                f"extra {key!r} holds sharded tensors, and other values beside them that differ between "
                "ranks. Give them as two entries."
            )
        own: dict[str, torch.Tensor] = {}
        decoded_state = decoded(each.tree, each.tensors.__getitem__)
        own_values[key] = encoded(decoded_state, f"extra/{key}@{rank}", own.__setitem__)
        holdings += [tensor_holding(name, t)._replace(copies=1) for name, t in own.items()]
    return Content(holdings, values, own_values)
