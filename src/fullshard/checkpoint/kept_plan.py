"""What the last save in the background looked up, for the next one: `KeptPlan`.

Until its copy begins, a save looks up names and boxes. These follow from modules, units and optimizers, and
not from values, so from one save to the next they are mostly the same. A save lists what they follow from
(`facts_of`). If that is equal to the last save's list, only values are new:

    modules     which there are, under which names; what is registered in them under which names
    units       which there are; their parts, and their parameters and names
    optimizers  which they are; the parameters of each group; the names of the states of each parameter
    tensors     type, shape and dtype of each; of a DTensor its mesh and placements too

All that `content_of` reads is either among these or read at every save. Modules, units, optimizers and what
else is no tensor are compared by identity, which is an object's own while it lives: weak references say whether
it does. Of parameters and buffers it only matters which are the same, so they are numbered anew each time. A
weak reference to one would not do: ``model.to(dtype)`` refuses to swap it.

A plan is kept where every box is the memory of one tensor: not of flat units, whose pieces are planned anew
each time, nor of replicas, which write a share each.
"""

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.local_content import LocalContent, content_of
from fullshard.checkpoint.optimizer_state import (
    ParameterState,
    options_of,
    parameters_of,
    states_of,
)
from fullshard.engine.access import settle_to_read
from fullshard.engine.module_state import state_of
from fullshard.engine.unit import Unit
from fullshard.state.structure import Structure
from fullshard.state.unit_parts import parts_of, trained_of


class Facts:
    """What names and boxes follow from, and what is read at every save.

    compared: facts, identities of objects, numbers of parameters and buffers. objects: those with identities.
    units: in order. tensors: their memory, and that of all others. states: of each optimizer's parameters.
    has_casts: whether buffers were cast.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self.compared: list[Any] = []
        self.objects: list[Any] = []
        self.units: list[Unit] = []
        self.tensors: list[torch.Tensor] = []
        self.states: dict[str, list[ParameterState | None]] = {}
        self.has_casts = False

    def add(self, each: Any) -> None:
        """Add an object, or None, to be compared by its identity."""
        self.compared.append(id(each))
        self.objects.append(each)

    def add_number(self, tensor: torch.Tensor | None) -> bool:
        """Add the number of a parameter or buffer, to be compared. Return whether it is new."""
        num_known = len(self._numbers)
        self.compared.append(self._numbers.setdefault(id(tensor), num_known))
        return len(self._numbers) > num_known

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Add a tensor, whose memory is read at every save."""
        if isinstance(tensor, DTensor):
            spec = tensor._spec
            self.add(spec.mesh)
            self.compared += (spec.placements, spec.shape)
            tensor = tensor._local_tensor
        self.compared += (type(tensor), tensor.shape, tensor.dtype, tensor.is_meta)
        self.tensors.append(tensor)


def facts_of(
    structures: Mapping[str, Structure], optimizers: Mapping[str, torch.optim.Optimizer]
) -> Facts:
    """Return what names and boxes of models and optimizers follow from, with their memory as it is now.

    Ends gathers under way, as `holdings_of` does. Raises StateError where whole parameters are shown.
    """
    facts = Facts()
    for section, structure in structures.items():
        facts.compared.append(section)
        _add_model(facts, structure)
    for section, optimizer in optimizers.items():
        facts.compared.append(section)
        _add_optimizer(facts, section, optimizer)
    return facts


def _add_model(facts: Facts, structure: Structure) -> None:
    for unit, names in structure.units:
        settle_to_read(unit)
        facts.units.append(unit)
        facts.add(unit)
        parts = parts_of(unit)
        facts.add(parts)
        facts.compared.append(names)
        for sharded, indices in trained_of(unit):
            facts.add_number(sharded)
            for index in indices:
                facts.add_tensor(parts.local(index))
    for prefix, module in structure.modules:
        facts.compared += (prefix, type(module))
        facts.add(module)
        facts.add(state := state_of(module))
        if state is not None and state.buffer_dtypes:
            facts.has_casts = True
        for name, parameter in module._parameters.items():
            facts.compared.append(name)
            if facts.add_number(parameter) and parameter is not None:
                facts.add_tensor(parameter)
        for name, buffer in module._buffers.items():
            facts.compared += (name, name in module._non_persistent_buffers_set)
            if facts.add_number(buffer) and buffer is not None:
                facts.add_tensor(buffer)


def _add_optimizer(facts: Facts, section: str, optimizer: torch.optim.Optimizer) -> None:
    facts.compared += (type(optimizer), [len(group["params"]) for group in optimizer.param_groups])
    facts.add(optimizer)
    for parameter in parameters_of(optimizer):
        facts.add_number(parameter)
    facts.states[section] = states_of(optimizer)
    for own in facts.states[section]:
        facts.compared.append(own and [*own.values, None, *own.tensors])
        for tensor in own.tensors.values() if own else ():
            facts.add_tensor(tensor)


class KeptPlan:
    """The content of the last save, over no memory, and what it follows from.

    One that was wrong for the next save is not made again until two in a row are the same.
    """

    def __init__(self) -> None:
        self._compared: list[Any] | None = None
        self._objects: list[weakref.ref[Any]] = []
        self._content: LocalContent | None = None
        self._names: dict[str, list[Mapping[int, str]]] = {}  # of units' parameters, by section
        self._places: list[int] = []  # of each of the content's views, the number of its tensor

    def content(
        self, structures: Mapping[str, Structure], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> tuple[LocalContent, Sequence[torch.Tensor]]:
        """Return what `content_of` returns, and the memory of its views, which may be others."""
        facts = facts_of(structures, optimizers)
        are_same = self._are_same(facts)
        if are_same and self._content is not None:
            states = {
                section: dataclasses.replace(
                    state, units=[*zip(facts.units, self._names[section], strict=True)]
                ).with_values(options_of(optimizers[section]), facts.states[section])
                for section, state in self._content.states.items()
            }
            memory = [facts.tensors[place] for place in self._places]
            return dataclasses.replace(self._content, states=states), memory
        content = content_of(structures, optimizers)
        if are_same or self._compared is None:
            self._keep(content, facts)
        else:
            self._content = None
        self._compared = facts.compared
        self._objects = [weakref.ref(each) for each in facts.objects if each is not None]
        return content, content.views()

    def _are_same(self, facts: Facts) -> bool:
        return (
            not facts.has_casts
            and facts.compared == self._compared
            and all(reference() is not None for reference in self._objects)
        )

    def _keep(self, content: LocalContent, facts: Facts) -> None:
        """Keep a content, if every box is the memory of one tensor, and of no other one."""
        self._content = None
        if facts.has_casts or any(unit.is_flat for unit in facts.units):
            return
        numbers: dict[Any, list[int]] = {}
        for number, tensor in enumerate(facts.tensors):
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                return
            numbers.setdefault(_memory(tensor), []).append(number)
        found = [numbers.get(_memory(view), []) for view in content.views()]
        if any(len(each) != 1 for each in found):
            return
        self._places = [number for (number,) in found]
        self._names = {
            section: [names for _, names in state.units]
            for section, state in content.states.items()
        }
        self._content = _over_nothing(content)


def _memory(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _over_nothing(content: LocalContent) -> LocalContent:
    """Return the same without memory, values and units, which may go while it is kept."""
    content = content.over(lambda view: torch.empty_like(view, device="meta"))
    states = {
        section: dataclasses.replace(
            state.with_values([{} for _ in state.groups], [None for _ in state.places]), units=[]
        )
        for section, state in content.states.items()
    }
    return dataclasses.replace(content, states=states)


kept_plan = KeptPlan()
