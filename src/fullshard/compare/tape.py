"""A `Tape` takes down what one model computes in its forwards and backwards, as it happens.

A forward or a backward is an `Event`. It has what every module returned, in the order in which modules end, so
innermost first; and in backward the full gradients, before and after they are reduced. Of each value a
digest of all its bits is kept, and a sample that tells how far two of them are apart.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fullshard.compare.values import digest_of, local_of, path_of, sample_of
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import named_states, names_of_units
from fullshard.engine.observer import PassWatcher, watchers
from fullshard.engine.precision import differentiable_tensors, map_tensors
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.plan.units import lowest_common_unit

INPUT, OUTPUT, GRADIENT, REDUCED = "input", "output", "gradient", "reduced gradient"
FORWARD, BACKWARD = "forward", "backward"

_SAMPLE_NUMEL = 512


class Seen(NamedTuple):
    """A value that was computed.

    what: INPUT or OUTPUT of a module; GRADIENT of a parameter on this rank, whole; or the part that this rank has of
        the REDUCED one. path: of the module or parameter, as before sharding. call: its number among those of
        this path in the event. kind: the module's class, "" for gradients. unit: the path of the unit that it is in.
    digest: of all bits. sample: 1-D, float64, at most 512 evenly spread elements of each tensor.
    """

    what: str
    path: str
    call: int
    kind: str
    unit: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    sample: torch.Tensor

    @property
    def key(self) -> tuple[str, str, int]:
        return self.what, self.path, self.call


@dataclasses.dataclass
class Event:
    """A forward or a backward.

    path: of the module that ran, for a forward: "" is the root, another one was called by itself.
    sync: per unit, whether gradients were reduced over its axes. grads: the gradients of outputs, by number of
        the forward and place among its differentiable outputs. error: the exception that ended it, or "".

    Of a backward, beside: begins_anew: gradients of the backwards before were dropped or zeroed. has_others: they
    were changed otherwise since then. has_sums: sums of backwards before the first event wait to be reduced.
    is_differentiated: autograd records it (``create_graph=True``).
    """

    kind: str
    path: str = ""
    sync: dict[str, tuple[bool, bool]] = dataclasses.field(default_factory=dict)
    seen: list[Seen] = dataclasses.field(default_factory=list)
    grads: dict[tuple[int, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    begins_anew: bool = False
    has_others: bool = False
    has_sums: bool = False
    is_differentiated: bool = False
    error: str = ""


class Tape(PassWatcher):
    """Takes down the passes of one model, from `begin` to `end`.

    model: the root of a sharded model, or one that is not sharded: then nobody tells when passes begin and
        end, and whoever runs them calls `open_event`, `end_forward` and `close_event`.
    event_ended: called with each event that is over. units: its units, with their paths as before sharding.
        paths: of modules, by their ids. outputs: of each forward, the tensors that require a gradient.
    """

    def __init__(
        self, model: nn.Module, event_ended: Callable[[Event], object] = lambda _: None
    ) -> None:
        self.model = model
        self._event_ended = event_ended
        self.events: list[Event] = []
        self.outputs: list[list[torch.Tensor]] = []
        named = named_states(model)
        self.units = {unit: path_of(name) for unit, name in names_of_units(named).items()}
        self._places = {name for names in self.units.values() for name in names.split(", ")}
        self._modules = modules_by_path(model)
        self.paths = {id(module): path_of(name) for name, module in model.named_modules()}
        self._open: Event | None = None
        self._calls: dict[tuple[str, str], int] = {}
        self._grads: dict[tuple[int, int], torch.Tensor] = {}  # of outputs, since the last backward
        self._is_differentiated = False  # that backward
        self._left: dict[str, str] = {}  # digests of the gradients that the last backward has left
        self._handles: list[RemovableHandle] = []

    def begin(self) -> None:
        # Behind the hooks of others, which may change inputs and outputs.
        for module in self._modules.values():
            self._handles += [
                module.register_forward_pre_hook(self._module_begins, with_kwargs=True),
                module.register_forward_hook(self._module_ended),
            ]
        watchers.append(self)

    def end(self) -> None:
        """Stop listening, and let go of the graphs of outputs."""
        for handle in self._handles:
            handle.remove()
        # Hooks of tensors keep this object, in a way that the garbage collector does not see.
        self.outputs.clear()
        self._grads.clear()
        watchers.remove(self)

    # What the engine tells

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and (path := self.paths.get(id(module))) is not None:
            self.open_event(FORWARD, path)

    def forward_ends(self, iteration: Iteration, output: Any) -> None:
        if self._is_own(iteration) and self.is_in(FORWARD):
            for place, tensor in enumerate(self.end_forward(output)):
                key = (len(self.outputs) - 1, place)
                self._handles.append(tensor.register_hook(self._keeper(key)))

    def backward_begins(self, iteration: Iteration) -> None:
        if not self._is_own(iteration):
            return
        event, now = self.open_event(BACKWARD), self._reduced_digests()
        event.begins_anew = bool(self._left) and not now
        event.has_others = self._left != now and not event.begins_anew
        is_first = all(each.kind == FORWARD for each in self.events)
        event.has_sums = is_first and any(unit.gradients.has_hidden for unit in self.units)

    def gradients_complete(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        if unit in self.units and self.is_in(BACKWARD):
            for param, grad in zip(unit.managed, grads, strict=True):
                if grad is not None:
                    self.see(GRADIENT, path_of(param.name), [grad], unit=self.units[unit])

    def backward_ends(self, iteration: Iteration) -> None:
        if self._is_own(iteration) and self.is_in(BACKWARD):
            for unit, name, grad in self._reduced():
                self.see(REDUCED, name, [grad], unit=self.units[unit])
            self._left = self._reduced_digests()
            self.close_event()

    def _reduced(self) -> Iterator[tuple[Unit, str, torch.Tensor]]:
        """Yield this rank's parts of reduced gradients, one per parameter or flat parameter."""
        for unit in self.units:
            by_holder = {param.holder: param for param in reversed(unit.managed)}
            for holder, param in by_holder.items():
                if unit.gradients.unreduced.sums.shows(holder):
                    continue  # a sum of this rank's own, which waits
                if (grad := holder.local_grad) is not None:
                    # Plus 0, as gradients may have been zeros that these were added to: -0 is then 0.
                    yield unit, path_of(param.name), grad + 0

    def _reduced_digests(self) -> dict[str, str]:
        """Return digests of reduced gradients, but those that are zero."""
        reduced = self._reduced()
        return {name: digest_of([grad]) for _, name, grad in reduced if grad.count_nonzero()}

    def _is_own(self, iteration: Iteration) -> bool:
        return any(unit in self.units for unit in iteration.units)

    def is_in(self, kind: str) -> bool:
        return self._open is not None and self._open.kind == kind

    def _keeper(self, key: tuple[int, int]) -> Callable[[torch.Tensor], None]:
        def keep(grad: torch.Tensor) -> None:
            self._grads[key] = grad.detach()
            if torch.is_grad_enabled():  # with ``create_graph=True`` alone
                self._is_differentiated = True

        return keep

    # Events

    def open_event(self, kind: str, path: str = "") -> Event:
        """Begin an event. One that is open was ended by an exception, and counts only if it is the last."""
        sync = {
            path: (unit.config.reduce_grads, unit.config.all_reduce_grads)
            for unit, path in self.units.items()
        }
        self._open = Event(kind, path, sync)
        self._calls.clear()
        return self._open

    def end_forward(self, output: Any) -> list[torch.Tensor]:
        """End a forward with what it has returned; return what of that requires a gradient."""
        assert self._open is not None
        self._see_tensors(OUTPUT, self._open.path, output)
        tensors = differentiable_tensors(output)
        self.outputs.append(tensors)
        self.close_event()
        return tensors

    def close_event(self, error: str = "") -> None:
        """End the event that is open, if one is. error: the exception that has ended it."""
        if (event := self._open) is None:
            return
        event.error = error
        if event.kind == BACKWARD:
            event.grads, self._grads = self._grads, {}
            event.is_differentiated, self._is_differentiated = self._is_differentiated, False
        self._open = None
        self.events.append(event)
        self._event_ended(event)

    # Values

    @eager
    def _module_begins(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        # Without kwargs if another hook of this call has ended the tape: torch looks that up anew.
        self._see_inside(INPUT, module, (args, kwargs))

    @eager
    def _module_ended(self, module: nn.Module, _: Any, output: Any) -> None:
        self._see_inside(OUTPUT, module, output)

    def _see_inside(self, what: str, module: nn.Module, tree: Any) -> None:
        """Take down what a module gets or returns, unless the forward is of this module.

        Its inputs are recorded as such, and its output comes with the end, as the engine returns it.
        """
        path = self.paths[id(module)]
        if self._open is not None and (self._open.kind == BACKWARD or path != self._open.path):
            self._see_tensors(what, path, tree)

    @torch.no_grad()
    def _see_tensors(self, what: str, path: str, tree: Any) -> None:
        tensors: list[torch.Tensor] = []

        def take(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        map_tensors(take, tree)
        unit = lowest_common_unit([path], self._places) or ""
        self.see(what, path, tensors, unit=unit, kind=type(self._modules[path]).__name__)

    def see(
        self, what: str, path: str, tensors: Iterable[torch.Tensor], *, unit: str, kind: str = ""
    ) -> None:
        """Take down a value: one or several tensors, of which those without memory are left out."""
        assert self._open is not None
        parts = [part for each in tensors if (part := _with_memory(each)) is not None]
        if not parts:
            return
        call = self._calls.get((what, path), 0)
        self._calls[what, path] = call + 1
        self._open.seen.append(
            Seen(
                what=what,
                path=path,
                call=call,
                kind=kind,
                unit=unit,
                shape=tuple(parts[0].shape),
                dtype=str(parts[0].dtype),
                digest=digest_of(parts),
                sample=torch.cat([sample_of(part, _SAMPLE_NUMEL) for part in parts]),
            )
        )


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's modules by their paths as before sharding. Of a wrapper, it is what it wraps."""
    return {path_of(name): module for name, module in model.named_modules()}


def _with_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a tensor; None if it has no memory that can be read in order."""
    local = local_of(tensor)
    is_plain = type(local) in (torch.Tensor, nn.Parameter)
    return local if is_plain and local.layout is torch.strided and not local.is_meta else None
