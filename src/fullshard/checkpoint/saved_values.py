"""What a load hands on that is no tensor of a model or optimizer: options, extra state, random generators."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.module_states import MODULE_STATES, States
from fullshard.checkpoint.random_states import RNG, set_random_states
from fullshard.checkpoint.saved_state import SavedState, naming_malformed
from fullshard.checkpoint.spans import Wanted
from fullshard.checkpoint.values import decoded, encoded, tensor_names
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import whole_box
from fullshard.state.holdings import HeldTensor, tensor_holding

OptimizerValues = tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]


class SavedValues:
    """The values of a checkpoint, as one of ``num_ranks`` ranks gets them.

    Raises CheckpointError for values of no known form.
    """

    def __init__(self, state: SavedState, rank: int, num_ranks: int) -> None:
        self._state, self._rank, self._num_ranks = state, rank, num_ranks
        # What is equal on all ranks, and what is not: each key is in one of them.
        self._shared: Mapping[str, Any] = state.values.get("extra", {})
        self._by_rank: Mapping[str, Mapping[str, Any]] = state.values.get("extra_by_rank", {})

    def decoded(self, tree: Any, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
        """Return a value of the manifest. tensor: returns a tensor that it names; a whole one if None."""
        with naming_malformed(f"{self._state.location}: a value is"):
            return decoded(tree, tensor or self._tensor)

    def of_optimizer(self, section: str) -> OptimizerValues | None:
        """Return an optimizer's scalars, by parameter, and its groups; None if it was not saved."""
        own = self._state.values.get("optimizers", {}).get(section)
        if own is None:
            return None
        scalars = {name: self.decoded(each) for name, each in own["scalars"].items()}
        return scalars, self.decoded(own["groups"])

    def check(self, extra: Mapping[str, Any]) -> None:
        """Refuse what `hand_on` could not hand on: to be called before anything is changed."""
        for key in self._extra_keys():
            self._tree_of(key, _target_of(key, extra))

    def hand_on(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Load extra state into what has ``load_state_dict()`` under its key; return all other values."""
        others: dict[str, Any] = {}
        for key in self._extra_keys():
            target = _target_of(key, extra)
            value = self._value_of(self._tree_of(key, target), key, target)
            if target is None:
                others[key] = value
            else:
                target.load_state_dict(value)
        return others

    def _extra_keys(self) -> list[str]:
        """Return the keys of the extra state that is the user's own."""
        return [k for k in (*self._shared, *self._by_rank) if k not in (RNG, MODULE_STATES)]

    def module_states(self) -> States:
        """Return what modules have saved of their own.

        Where ranks differed, this rank's, and another rank's of modules that this one did not have.
        """
        if MODULE_STATES in self._shared:
            found: States = self.decoded(self._shared[MODULE_STATES])
            return found
        by_rank = self._by_rank.get(MODULE_STATES, {})
        joined: States = {}
        for rank in sorted(by_rank, key=lambda each: each != str(self._rank)):
            for section, states in self.decoded(by_rank[rank]).items():
                joined[section] = {**states, **joined.get(section, {})}
        return joined

    def restore_random_states(self) -> list[str]:
        """Set this rank's random generators; return notes for its log."""
        with naming_malformed(
            f"{self._state.location}: the states of random generators are",
            " Load with rng=False to leave them.",
        ):
            return self._restore_random_states()

    def _restore_random_states(self) -> list[str]:
        if RNG in self._shared:
            set_random_states(self.decoded(self._shared[RNG]))
            return []
        states = self._by_rank.get(RNG)
        if states is None:
            return ["the checkpoint has no states of random generators"]
        own = states.get(str(self._rank))
        if own is not None:
            set_random_states(self.decoded(own))
            return []
        # A rank more than saved: it begins a sequence of its own, the same in every such load.
        set_random_states(self.decoded(states["0"]))
        seeds = torch.randint(2**31, (self._rank + 1,), device="cpu")
        torch.manual_seed(int(seeds[self._rank]))
        return [f"rank {self._rank} has new random generators: fewer ranks saved"]

    def _tree_of(self, key: str, target: Any) -> Any:
        """Return what this rank gets of a key, as in the manifest. target: what loads it, or None."""
        if key in self._shared:
            return self._shared[key]
        own = self._by_rank[key]
        if str(self._rank) in own and len(own) == self._num_ranks:
            return own[str(self._rank)]
        if target is None:
            return [*own.values()]
        raise CheckpointError(
            f"extra {key!r} was saved separately by {len(own)} ranks, and these are "
            f"{self._num_ranks}. Leave it out of extra=: it is returned as a list then, one "
            "state a rank, for you to divide."
        )

    def _value_of(self, tree: Any, key: str, target: Any) -> Any:
        templates: dict[str, Any] = {}
        names = tensor_names(tree)
        if target is not None and any(_is_sharded(self._state.tensors.get(name)) for name in names):
            encoded(target.state_dict(), f"extra/{key}", templates.__setitem__)

        def tensor(name: str) -> Any:
            template = templates.get(name)
            if not isinstance(template, DTensor | HeldTensor):
                return self._tensor(name)
            holding = tensor_holding(name, template)
            self._state.read([Wanted(name, box, view) for box, view in holding.boxes])
            return template

        return self.decoded(tree, tensor)

    def _tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor of the checkpoint, in host memory."""
        saved = self._state.tensors[name]
        result = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        if result.numel():
            self._state.read([Wanted(name, whole_box(saved.shape), result)])
        return result


def _target_of(key: str, extra: Mapping[str, Any]) -> Any:
    """Return what loads the state under a key by itself, or None."""
    given = extra.get(key)
    return given if hasattr(given, "load_state_dict") else None


def _is_sharded(tensor: Any) -> bool:
    return tensor is not None and tensor.placement not in ("", "replicated", "buffer")
