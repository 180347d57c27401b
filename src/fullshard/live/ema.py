"""`EMA`: the exponential moving average of a sharded model, shard by shard.

Every rank averages what it holds (`state.holdings`), so nothing is communicated and nothing is whole.
Replicas compute the same averages. In a state dict each average is a `HeldTensor`, which a checkpoint
writes and reads as it does the model's own tensors, on any number of ranks and sharded in any way.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.checks.model import registrations
from fullshard.engine.module_state import state_of
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, ShardingError, StateError
from fullshard.plan.boxes import Box, whole_box
from fullshard.plan.units import first_names, without_compile
from fullshard.process_hooks import BEFORE_STEP
from fullshard.state.holdings import (
    HeldTensor,
    Holding,
    holdings_in,
    lent,
    plain_memory,
    without_ddp,
)
from fullshard.state.structure import structure_of
from fullshard.state.unit_parts import HeldBox, memory_of, parts_of
from fullshard.torch_private import local_part

_APPLIED = "EMA.applied"

# Elements that are cast at once where averages have another dtype than parameters.
_CAST_NUMEL = 1 << 24


@dataclasses.dataclass(frozen=True, slots=True)
class _ModelTensor:
    """A tensor of the model: its holding without memory, and how to find that.

    memory: this rank's part, found anew each time: a view that is kept looks like a user's, which the engine
        forbids to use after a reshard. The boxes lie in it one after the other.
    """

    holding: Holding
    boxes: tuple[Box, ...]
    memory: Callable[[], torch.Tensor]

    def views(self) -> list[torch.Tensor]:
        """Return the memory of each box."""
        memory = self.memory()
        if [box.shape for box in self.boxes] == [memory.shape]:
            return [memory]  # of whatever strides
        parts = memory.reshape(-1).split([box.numel for box in self.boxes])
        return [part.view(box.shape) for part, box in zip(parts, self.boxes, strict=True)]

    @property
    def is_averaged(self) -> bool:
        return self.holding.dtype.is_floating_point and not self.holding.is_buffer


class _ModelTensors:
    """What this rank holds of a model, looked up again when its units or modules have changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = without_ddp(model)
        self.all: Sequence[_ModelTensor] = ()
        self._num_registrations = -1
        self._memory: list[tuple[Unit, object]] = []
        self._plain: list[Callable[[], Any]] = []
        self._num_buffers = 0

    def refresh(self, *, writes: str) -> None:
        """Look them up, as `holdings_of` does."""
        structure = structure_of(self.model)
        holdings = holdings_in(structure, writes=writes)
        sharded = {
            own[0]: functools.partial(parts.local, index)
            for unit, names in structure.units
            for parts in [parts_of(unit)]
            for index, own in enumerate(names)
            if own
        }
        plain: dict[str, Callable[[], Any]] = {
            prefix + name: functools.partial(registry.get, name)
            for prefix, module in structure.modules
            for registry in (module._parameters, module._buffers)
            for name in registry
        }
        self.all = [_model_tensor(h, sharded.get(h.name) or plain[h.name]) for h in holdings]
        self._plain = [plain[h.name] for h in holdings if h.name not in sharded]
        self._num_registrations, self._num_buffers = registrations.value, self._count()
        self._memory = [(unit, memory_of(unit)) for unit, _ in structure.units]

    @property
    def are_current(self) -> bool:
        """Whether the model has the same tensors, divided as they were."""
        if any(source.holding.after_loading is not None for source in self.all):
            return False  # a copy of a buffer in another dtype
        if (self._num_registrations, self._num_buffers) != (registrations.value, self._count()):
            return False  # something was added, or a buffer or module taken away
        return all(shown() is not None for shown in self._plain) and all(
            memory_of(unit) is memory for unit, memory in self._memory
        )

    def _count(self) -> int:
        """Count modules, buffers and shardings: no hook tells when one is added or taken away."""
        return sum(
            1 + len(module._buffers) + (state_of(module) is not None)
            for module in self.model.modules()
        )


def _model_tensor(holding: Holding, shown: Callable[[], torch.Tensor]) -> _ModelTensor:
    """Return where a tensor of the model is. shown: returns it, or this rank's local if it is sharded."""
    own_name = holding.name
    # Of a buffer in another dtype, its copy, which `after_loading` writes back.
    copies = [held.view for held in holding.boxes if holding.after_loading is not None]

    def memory() -> torch.Tensor:
        return copies[0] if copies else local_part(plain_memory(shown().detach(), own_name))

    names = tuple(dict.fromkeys(map(without_compile, holding.names)))
    boxes = tuple(held.box for held in holding.boxes)
    return _ModelTensor(holding._replace(names=names, boxes=()), boxes, memory)


class EMA:
    """The exponential moving average of a model's parameters, over shards.

        ema = EMA(model, decay=0.999)
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.applied():
            evaluate(model)
        save_checkpoint(path, model, optimizer, extra={"ema": ema})

    Works on models of ``fully_shard``, the wrapper in both forms, ``replicate``, tensor parallel, and plain
    ones. It begins with the values that the model has now, so create it after sharding and initialising.
    Parameters that are added later join with their value at the next update; frozen ones are averaged too.
    Persistent buffers are copied, not averaged.

    num_updates: how often `update` was called.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        warmup: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Begin with the model's values. Every rank has to call it.

        decay: how much of the average stays in an update, or a function from the number of updates before
            to that.
        warmup: use at most ``(1 + n) / (10 + n)`` in update ``n``, so that first values fade fast.
        dtype: of averages of floating-point parameters; by default theirs, but at least float32.
            Memory: this rank's shards in this dtype.

        Raises ShardingError for a decay outside of 0 to 1 and for averages that are no floating-point numbers, StateError
        on the meta device.
        """
        is_number = isinstance(decay, int | float) and 0.0 <= decay <= 1.0
        if not callable(decay) and not is_number:
            raise ShardingError(
                f"EMA: decay is {decay!r}. Give a number from 0 to 1, or a function."
            )
        if dtype is not None and not dtype.is_floating_point:
            raise ShardingError(f"EMA: dtype is {dtype}. Give a floating-point one, or none.")
        self.decay, self.warmup = decay, warmup
        self.num_updates = 0
        self._dtype = dtype
        self._is_applied = False
        self._averages: dict[str, tuple[torch.Tensor, ...]] = {}
        self._sources = _ModelTensors(model)
        self._follow_model()

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's values of now into the averages. Without communication.

        Call it after the optimizer's step. Raises StateError inside `applied` and `full_parameters`.
        """
        self._refuse_while_applied("update()")
        if not self._sources.are_current:
            self._follow_model()
        decay = self.decay(self.num_updates) if callable(self.decay) else self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        averaged: dict[tuple[torch.dtype, torch.device], tuple[list[Any], list[Any]]] = {}
        for average, view, is_averaged in self._pairs():
            if not is_averaged:
                average.copy_(view)
                continue
            averages, values = averaged.setdefault((view.dtype, view.device), ([], []))
            averages.append(average)
            values.append(view)
        for averages, values in averaged.values():
            for some, of_model in _in_chunks(averages, values):
                torch._foreach_lerp_(some, of_model, 1.0 - decay)
        self.num_updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averages in the body, and its own values after it. Collective.

        Whatever reads the model sees them: forwards, state dicts, `save_checkpoint`, `stream_weights`. Memory: a
        copy of this rank's shards.

        Loading inside, and a step of the model's optimizer, is a MisuseError: it would be lost.
        """
        self._refuse_while_applied("applied()")
        self._follow_model(writes=_APPLIED)
        with torch.no_grad():
            kept = [view.clone() for _, view, _ in self._pairs()]
            self._write(average for average, _, _ in self._pairs())
        self._is_applied = True
        shows = [m for m in self._sources.model.modules() if m not in lent]
        lent.update(dict.fromkeys(shows, _APPLIED))
        try:
            with self._refusing_writes():
                yield
        finally:
            self._is_applied = False
            for module in shows:
                lent.pop(module, None)
            with torch.no_grad():
                self._sources.refresh(writes=_APPLIED)  # forwards may have left units unsharded
                self._write(iter(kept))

    @contextlib.contextmanager
    def _refusing_writes(self) -> Iterator[None]:
        """Refuse `load_state_dict` of the model or a part of it, and steps of its optimizers."""
        model = self._sources.model
        trained = set(map(id, model.parameters()))

        def refuse_load(*_: Any) -> None:
            raise _lost("load_state_dict")

        def refuse_step(optimizer: Optimizer, *_: Any) -> None:
            if any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
                raise _lost(f"a step of {type(optimizer).__name__}")

        handles = [m.register_load_state_dict_pre_hook(refuse_load) for m in model.modules()]
        try:
            with BEFORE_STEP.calling(refuse_step, "refuses steps while EMA.applied shows averages"):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return averages by name, and what else `load_state_dict` needs, for a checkpoint's ``extra``.

        An average is a `HeldTensor` over this object's own memory: copy it to keep it.
        """
        averages = {}
        for source in self._sources.all:
            own = self._averages[source.holding.name]
            averages[source.holding.name] = HeldTensor(
                source.holding._replace(
                    names=(source.holding.name,),
                    dtype=self._dtype_of(source),
                    boxes=tuple(map(HeldBox, source.boxes, own)),
                    after_loading=None,
                )
            )
        return {"num_updates": self.num_updates, "averages": averages}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take averages from `state_dict`, of whatever ranks if it comes from a checkpoint.

        Values may also be whole tensors. Raises StateError, before anything is changed, if names or shapes
        differ from the model's.
        """
        self._refuse_while_applied("load_state_dict()")
        self._follow_model()
        own_names = {n: each.holding.name for each in self._sources.all for n in each.holding.names}
        averages = {own_names.get(n, n): value for n, value in state["averages"].items()}
        if others := sorted(self._averages.keys() ^ averages.keys()):
            raise StateError(
                f"EMA: the averages and the model differ in {first_names(others)}. "
                "Load the averages of this model."
            )
        parts = {
            source.holding.name: _parts_of(averages[source.holding.name], source)
            for source in self._sources.all
        }
        for name, own in self._averages.items():
            for average, part in zip(own, parts[name], strict=True):
                if part.data_ptr() != average.data_ptr():  # else a checkpoint was read into it
                    average.copy_(part)
        self.num_updates = int(state["num_updates"])

    def _dtype_of(self, source: _ModelTensor) -> torch.dtype:
        dtype = source.holding.dtype
        if not source.is_averaged:
            return dtype
        return self._dtype or torch.promote_types(dtype, torch.float32)

    def _follow_model(self, *, writes: str = "") -> None:
        """Look where the model's values are now, and make averages of what is new."""
        self._sources.refresh(writes=writes)
        old, self._averages = self._averages, {}
        moved = []
        with torch.inference_mode(False), torch.no_grad():
            for source in self._sources.all:
                name = source.holding.name
                known, dtype = old.get(name, ()), self._dtype_of(source)
                if [tuple(each.shape) for each in known] == [box.shape for box in source.boxes]:
                    self._averages[name] = tuple(each.to(dtype) for each in known)
                    continue
                if known:
                    moved.append(name)
                self._averages[name] = tuple(
                    torch.empty(view.shape, dtype=dtype, device=view.device).copy_(view)
                    for view in source.views()
                )
        if moved:
            warnings.warn(
                f"EMA: this rank holds other parts than before of {len(moved)} tensors, such as {moved[0]}. "
                "Their averages begin again: create it after sharding.",
                UserWarning,
                stacklevel=3,
            )

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Yield every average, the model's memory of the same box, and whether it is averaged."""
        for source in self._sources.all:
            averages = self._averages[source.holding.name]
            for average, view in zip(averages, source.views(), strict=True):
                yield average, view, source.is_averaged

    def _write(self, values: Iterator[torch.Tensor]) -> None:
        """Write values to the model, in the order of `_pairs`."""
        for (_, view, _), value in zip(self._pairs(), values, strict=True):
            view.copy_(value)
        for source in self._sources.all:
            if source.holding.after_loading is not None:
                source.holding.after_loading()

    def _refuse_while_applied(self, call: str) -> None:
        if self._is_applied:
            raise StateError(
                f"EMA: {call} inside applied(), where the model has the averages. Call it outside."
            )


def _parts_of(value: Any, source: _ModelTensor) -> list[torch.Tensor]:
    """Return this rank's boxes of a loaded average."""
    holding = source.holding
    if isinstance(value, HeldTensor):
        held = value.holding.boxes
        if tuple(each.box for each in held) == source.boxes:
            return [each.view for each in held]
        raise StateError(
            f"EMA: this rank holds another part of {holding.name} than the state dict has. Save it with "
            "save_checkpoint, which loads on any number of ranks."
        )
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if tuple(whole.shape) != tuple(holding.shape):
        raise StateError(
            f"EMA: {holding.name} has shape {tuple(whole.shape)} in the state dict, but "
            f"{tuple(holding.shape)} in the model. Load the averages of this model."
        )
    return [whole[box.within(whole_box(holding.shape))] for box in source.boxes]


def _lost(call: str) -> MisuseError:
    return MisuseError(
        f"EMA: {call} inside applied(), where the model has the averages: it would be lost at the end of "
        "the block. Call it outside."
    )


def _in_chunks(
    averages: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield averages with values in their dtype, a bounded number of elements at once if cast."""
    if averages[0].dtype == values[0].dtype:
        yield list(averages), list(values)
        return
    some: list[torch.Tensor] = []
    cast: list[torch.Tensor] = []
    numel = 0
    for average, value in zip(averages, values, strict=True):
        if some and numel + value.numel() > _CAST_NUMEL:
            yield some, cast
            some, cast, numel = [], [], 0
        some.append(average)
        cast.append(value.to(average.dtype))
        numel += value.numel()
    yield some, cast
