"""Count memory by category while steps are traced.

`memory_report` counts everything at one moment, which is too slow to do hundreds of times in a
step. Here totals are kept up to date instead: a unit is counted again whenever it changes, the
optimizer after each of its steps, and tensors that autograd saves when they are saved and dropped.
Reading the totals then costs next to nothing.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine.unit import Unit, comms_of
from fullshard.optim.shard_step import state_memory
from fullshard.plan.trace import CATEGORIES
from fullshard.torch_private import local_part

(_SHARDS, _OPTIMIZER, _GRADIENT_SHARDS, _COMMUNICATION, _UNSHARDED, _FULL_GRADIENTS, _SAVED, _) = (
    range(len(CATEGORIES))
)


class SavedTensors:
    """Counts what autograd saves for backward, as a pair of saved-tensor hooks.

    nbytes: of the distinct storages that are saved at the moment; highest: since it was last set. ignored: tensors that are counted
    elsewhere, such as parameters, whose storages count for their unit.
    """

    def __init__(self, ignored: Sequence[torch.Tensor]) -> None:
        self.nbytes = self.highest = 0
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        self._uses: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        local = local_part(tensor)
        storage = local.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return tensor
        uses = self._uses.get(key, 0)
        self._uses[key] = uses + 1
        if not uses:
            self.nbytes += storage.nbytes()
            self.highest = max(self.highest, self.nbytes)
        return _Saved(self, tensor, key, storage.nbytes())

    @staticmethod
    def unpack(saved: Any) -> torch.Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    def drop(self, key: int, nbytes: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self.nbytes -= nbytes


class _Saved:
    """A saved tensor. Autograd drops it with the graph, and ``__del__`` then counts it off."""

    __slots__ = ("_key", "_nbytes", "_owner", "tensor")

    def __init__(self, owner: SavedTensors, tensor: torch.Tensor, key: int, nbytes: int) -> None:
        self.tensor = tensor
        self._owner, self._key, self._nbytes = owner, key, nbytes

    def __del__(self) -> None:
        self._owner.drop(self._key, self._nbytes)


class MemoryMeter:
    """Bytes by category on one rank, kept up to date from change to change."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], optimizer: torch.optim.Optimizer | None
    ) -> None:
        self._units = list(units)
        self._optimizer = optimizer
        forms = [form for unit in units for form in unit.forms]
        self.saved = SavedTensors([local_part(each) for each in (*model.parameters(), *forms)])
        self._known: dict[tuple[int, Unit], int] = {}  # by category and unit
        self._totals = [0] * (len(CATEGORIES) - 1)
        self._totals[_SHARDS] = sum(unit.shard_nbytes for unit in units)
        self.count_all()
        self.count_optimizer()

    def count_unsharded(self, unit: Unit) -> None:
        """Count a unit's unsharded parameters again."""
        nbytes = sum(local_part(t).untyped_storage().nbytes() for t in unit.unsharded_memory)
        self._put(_UNSHARDED, unit, nbytes)

    def count_full_gradients(self, unit: Unit) -> None:
        """Count a unit's full gradients again, with those that wait for a reduction."""
        forms = [param.unsharded for param in unit.managed]
        grads = [form.grad for form in forms if form is not None and form.grad is not None]
        kept = (*unit.gradients.unreduced.sums.spare.tensors, *unit.gradients.partial_sums)
        tensors = (*grads, *unit.gradients.unreduced.sums.memory, *kept)
        sizes: dict[int, int] = {}
        for tensor in map(local_part, tensors):  # one may be a view of another
            address = tensor.untyped_storage().data_ptr()
            sizes[address] = max(sizes.get(address, 0), tensor.nbytes)
        self._put(_FULL_GRADIENTS, unit, sum(sizes.values()))

    def count_gradient_shards(self, unit: Unit) -> None:
        """Count a unit's reduced gradients again."""
        self._put(_GRADIENT_SHARDS, unit, unit.gradients.shard_nbytes)

    def count_all(self) -> None:
        """Count everything except the optimizer again.

        For the time between steps only: what is under way in a step is not looked at.
        """
        for unit in self._units:
            self.count_unsharded(unit)
            self.count_full_gradients(unit)
            self.count_gradient_shards(unit)
        comms = comms_of(self._units)
        kept = itertools.chain(
            self._units[0].runtime.scratch.free, *(comm.staging for comm in comms)
        )
        storages = [tensor.untyped_storage() for tensor in kept]  # groups may share what they keep
        distinct = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self._totals[_COMMUNICATION] = sum(distinct.values())

    def count_optimizer(self) -> None:
        if self._optimizer is None:
            return
        device = self._units[0].runtime.device
        self._totals[_OPTIMIZER] = sum(
            memory.nbytes
            for _, memory in state_memory(self._optimizer)
            if memory.device.type == device.type
        )

    def highest_since(self, last: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the bytes of each category when most was saved since the last reading; None if that is one of its ends.

        The loss saves what its own backward has dropped before a unit's begins.
        """
        highest, self.saved.highest = self.saved.highest, self.saved.nbytes
        if highest <= max(last[_SAVED], self.saved.nbytes):
            return None
        return (*last[:_SAVED], highest, *last[_SAVED + 1 :])

    def read(self) -> tuple[int, ...]:
        """Return the bytes of each category, in the order of CATEGORIES."""
        self._totals[_SAVED] = self.saved.nbytes
        allocated = self._units[0].runtime.allocated_nbytes
        rest = 0 if allocated is None else max(0, allocated - sum(self._totals))
        return (*self._totals, rest)

    def _put(self, category: int, unit: Unit, nbytes: int) -> None:
        self._totals[category] += nbytes - self._known.get((category, unit), 0)
        self._known[category, unit] = nbytes
