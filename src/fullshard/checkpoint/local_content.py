"""What one rank brings to a checkpoint, before it has heard of the others.

`content_of` looks at models and optimizers, `LocalContent.with_extras` at extra state, and they communicate
with nobody. What they return refers to memory of the program; `LocalContent.staged` refers to copies of it,
which training does not change.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.module_states import MODULE_STATES, States
from fullshard.checkpoint.optimizer_state import LocalState, TrainedBy, local_state
from fullshard.checkpoint.random_states import RNG, random_states
from fullshard.checkpoint.values import encoded
from fullshard.errors import CheckpointError, FullshardError
from fullshard.plan.units import without_compile
from fullshard.state.agreement import Digests
from fullshard.state.copies import own_share
from fullshard.state.holdings import (
    HeldTensor,
    Holding,
    holdings_in,
    is_ddp,
    plain_memory,
    tensor_holding,
    without_ddp,
)
from fullshard.state.host_memory import checksum, host_bytes
from fullshard.state.structure import Structure, structure_of

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
    """

    models: Sequence[str]
    holdings: Sequence[Holding]
    states: Mapping[str, LocalState]
    extras: Mapping[str, Extra]
    compares: bool

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

    def staged(self, stage: Stage) -> Callable[[], "LocalContent"]:
        """Copy its memory; return what puts the same together over the copies.

        Training does not change those, so that can be done later.
        """
        views = [held.view for holding in self._holdings() for held in holding.boxes]
        views += [view for extra in self.extras.values() for view in extra.views()]
        copied = stage(views)

        def over_copies() -> LocalContent:
            copies = dict(zip(map(id, views), copied, strict=True))

            def copy_of(view: torch.Tensor) -> torch.Tensor:
                return copies[id(view)]

            return dataclasses.replace(
                self,
                holdings=[holding.over(copy_of) for holding in self.holdings],
                states={key: each.over(copy_of) for key, each in self.states.items()},
                extras={key: each.over(copy_of) for key, each in self.extras.items()},
            )

        return over_copies

    def with_extras(
        self, extra: Mapping[str, Any], of_modules: States, *, rng: bool, compares: bool
    ) -> "LocalContent":
        """Return the same with extra state, and what modules keep of their own.

        Raises CheckpointError for what cannot be saved.
        """
        states = extra_states(extra, rng=rng)
        if of_modules:
            states[MODULE_STATES] = of_modules
        extras = {key: _extra_of(key, state) for key, state in states.items()}
        return dataclasses.replace(self, extras=extras, compares=compares)

    def _holdings(self) -> Iterator[Holding]:
        yield from self.holdings
        for state in self.states.values():
            yield from state.holdings()


def compares(models: Models) -> bool:
    """Return whether ranks may differ in values that nothing keeps equal, so that they are compared."""
    # Reading all values takes as long as copying them. DistributedDataParallel keeps them equal.
    return not all(map(is_ddp, _each(models)))


def structures_of(models: Models) -> dict[str, Structure]:
    """Return what each model is made of, by section."""
    return {section: structure_of(each) for section, each in named(models, "model").items()}


def content_of(
    structures: Mapping[str, Structure], optimizers: Mapping[str, torch.optim.Optimizer]
) -> LocalContent:
    """Return what this rank has of models and optimizers, by section.

    Raises FullshardError for what cannot be saved.
    """
    holdings = [*map(own_share, held_by(structures))]  # first: what users have moved is adopted
    trained = TrainedBy(structures)
    every_one = [*structures.values()]
    states = {
        section: local_state(optimizer, trained.of(optimizer), every_one, f"{section}/")
        for section, optimizer in optimizers.items()
    }
    return LocalContent(sorted(structures), holdings, states, {}, compares=False)


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


def extra_states(extra: Mapping[str, Any], *, rng: bool) -> dict[str, Any]:
    """Return the state of each extra object: what its ``state_dict()`` returns, or the value itself."""
    found = {}
    for key, value in extra.items():
        if not key or key in (RNG, MODULE_STATES) or {"/", "@"} & set(key):
            raise CheckpointError(
                f"extra: {key!r} is no key. Use strings without / and @, other than {RNG!r} and "
                f"{MODULE_STATES!r}."
            )
        found[key] = value.state_dict() if hasattr(value, "state_dict") else value
    if rng:
        found[RNG] = random_states()
    return found


def named(objects: Any, section: str) -> dict[str, Any]:
    """Return objects by the section that their tensors' names begin with.

    A model alone is in "model", {"actor": model} in "model.actor". Raises CheckpointError for a key with
    a slash, and for what is no model.
    """
    if section == "model" and not isinstance(objects, nn.Module | Mapping):
        raise CheckpointError(
            f"model is a {type(objects).__name__}: give a module, or a dict of modules by keys."
        )
    if objects is None:
        return {}
    if not isinstance(objects, Mapping):
        return {section: without_ddp(objects)}
    for key in objects:
        if not isinstance(key, str) or not key or "/" in key:
            raise CheckpointError(f"{section}: {key!r} is no key. Use strings without slashes.")
    return {f"{section}.{key}": without_ddp(each) for key, each in objects.items()}


def held_by(structures: Mapping[str, Structure], *, writes: str = "") -> list[Holding]:
    """Return what this rank holds of models, by names with their sections. writes: as `holdings_of` says."""
    return [
        prefixed(holding, f"{section}/")
        for section, structure in structures.items()
        for holding in holdings_in(structure, writes=writes)
    ]


def _each(objects: Any) -> list[Any]:
    return [*objects.values()] if isinstance(objects, Mapping) else [objects]


def section_names(objects: Any, section: str) -> list[str]:
    """Return the sections of objects as far as they are known; see `named`."""
    return (
        sorted(objects, key=str)
        if isinstance(objects, Mapping)
        else [section][: objects is not None]
    )


def prefixed(holding: Holding, prefix: str) -> Holding:
    """Return a holding with a prefix before its names."""
    names = tuple(dict.fromkeys([prefix + without_compile(name) for name in holding.names]))
    return holding._replace(names=names)
