"""`deferred_init` builds a model without memory, and `materialize` gives it its values once it is sharded.

A model that is larger than one device or host cannot be built as usual and then sharded. Built on the meta
device it has no values, and initialisers that are run later draw other random numbers in another order. Here
the construction is recorded, and every rank computes it again, operator by operator, once the model is
sharded: each tensor whole, one after the other, of which it keeps its own part. So values are those of the ordinary
construction in every bit, with any number of ranks, in the memory of a few tensors.
"""

import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from fullshard.deferred.record import ConstructionRecord, MemoryView, replay, tensor_of
from fullshard.deferred.recording import AsIfWithMemory, Recorder
from fullshard.engine.checks.meta import (
    giving_memory,
    places_on_meta,
    refuse_lack_of_memory,
)
from fullshard.errors import StateError
from fullshard.plan.boxes import whole_box
from fullshard.state.holdings import Holding, holdings_of, tell_loaded
from fullshard.state.structure import structure_of, units_of

P = ParamSpec("P")
ModelT = TypeVar("ModelT", bound=nn.Module)


# By module: its construction, and its tensors by name.
_built: "weakref.WeakKeyDictionary[nn.Module, tuple[ConstructionRecord, dict[str, MemoryView]]]"
_built = weakref.WeakKeyDictionary()


def deferred_init(build: Callable[P, ModelT], *args: P.args, **kwargs: P.kwargs) -> ModelT:
    """Return the model that a function builds, on the meta device, with its construction recorded.

        torch.manual_seed(0)
        model = fullshard.deferred_init(Transformer, config)
        for block in model.blocks:
            fullshard.fully_shard(block)
        fullshard.fully_shard(model)
        fullshard.materialize(model)      # the values of Transformer(config) under this seed, in every bit

    Nothing is allocated or drawn. The function may do what constructions do: initialise several times, copy
    modules, compute buffers, tie weights, read numbers that follow from no random ones (``.item()``).

    Raises UnsupportedError for a construction that reads a random number.
    """
    recorder = Recorder()
    with AsIfWithMemory(recorder), recorder:
        model = build(*args, **kwargs)
    record = recorder.record
    record.random_state_after = torch.get_rng_state()
    for module in model.modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        known = {n: v for n, t in tensors if t is not None and (v := recorder.known_view(t))}
        if known:
            _built[module] = record, known
    return model


@torch.no_grad()
def materialize(model: ModelT, *, device: torch.device | str | None = None) -> ModelT:
    """Give a model of `deferred_init` memory and the values of its construction. Returns the model.

    model: sharded in any way, or not at all. device: of the memory; by default where its units are, or the CPU.
    Every rank calls it, and computes all values by itself, so nothing is sent. Memory beyond the model's: the
    largest tensors that the construction has at a time; for initialisers that fill tensors in place, one.

    The CPU's random generator is left as an ordinary construction would leave it, if it was not used since.
    Raises StateError for a model that was not built by `deferred_init`, or was materialized, and AllocationError,
    before anything is changed, if the host has too little memory.
    """
    known = [_built[module][0] for module in model.modules() if module in _built]
    if not known:
        raise StateError(
            f"materialize: {type(model).__name__} was not built by deferred_init, or has its values already."
        )
    _allocate(model, device)
    holdings = holdings_of(model, writes="materialize")
    targets = _targets(model, holdings)
    for record in {id(each): each for each in known}.values():
        _fill(record, targets)
    tell_loaded(holdings)
    for module in model.modules():
        _built.pop(module, None)
    return model


def _allocate(model: nn.Module, device: torch.device | str | None) -> None:
    units = units_of(model)
    target = torch.device(device) if device is not None else None
    if target is None:
        offloaded = bool(units) and units[0].config.offload_to_cpu
        target = units[0].device if units and not offloaded else torch.device("cpu")
    if not places_on_meta(model, recurse=True):
        return
    if target.type == "cpu":
        others = model.buffers() if units else (*model.parameters(), *model.buffers())
        refuse_lack_of_memory("materialize", units, others)
    with giving_memory(model, recurse=True):
        # Not `to_empty`, which takes the values of all others.
        model._apply(lambda t: torch.empty_like(t, device=target) if t.is_meta else t)


# By memory of a construction, what its values are copied to: a view, and a function of the whole tensor.
_CopyTargets = dict[int, list[tuple[MemoryView, Callable[[torch.Tensor], object]]]]


def _targets(model: nn.Module, holdings: list[Holding]) -> _CopyTargets:
    held = {name: holding for holding in holdings for name in holding.names}
    targets: _CopyTargets = {}
    for prefix, module in structure_of(model).modules:
        _, tensors = _built.get(module, (None, {}))
        for name, view in tensors.items():
            holding, buffer = held.get(f"{prefix}{name}"), module._buffers.get(name)
            if holding is not None:
                targets.setdefault(view.memory, []).append((view, _copy_into(holding)))
            elif buffer is not None:  # not persistent
                targets.setdefault(view.memory, []).append((view, buffer.copy_))
    return targets


def _copy_into(holding: Holding) -> Callable[[torch.Tensor], object]:
    def copy(whole: torch.Tensor) -> None:
        for held in holding.boxes:
            held.view.copy_(whole[held.box.within(whole_box(holding.shape))])

    return copy


def _fill(record: ConstructionRecord, targets: _CopyTargets) -> None:
    written = record.written()

    def done_with(memory: int, storage: torch.UntypedStorage) -> None:
        if memory not in written:
            return  # it keeps the mark of memory that nobody has written to
        for view, copy in targets.get(memory, ()):
            copy(tensor_of(view, {memory: storage}))

    for memory, constant in record.constants.items():
        done_with(memory, constant)
    before = torch.get_rng_state()
    torch.set_rng_state(record.random_state)
    replay(record, record.operations, done_with)
    assert record.random_state_after is not None
    if not torch.equal(before, record.random_state_after):
        torch.set_rng_state(before)
