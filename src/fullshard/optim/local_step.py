"""Switch an optimizer to local tensors while it steps, and back.

Between steps an optimizer is an ordinary one over DTensors. Its shown state (see `local_form`) is
made only when somebody reads ``optimizer.state``, and is kept as long as somebody may write to it:

    nobody reads it    the local state stays; a step switches parameters and gradients alone
    somebody reads it  the shown state is made, and is the optimizer's state until the next step
    the next step      takes over what was written to the shown state. Then it is dropped, or, if
                       somebody still refers to it, updated after the step
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.runtime import eager, passing_through
from fullshard.optim.local_form import State, local_gradient, localize, show
from fullshard.torch_private import DTensorSpec, local_part, pytree

_spec = attrgetter("_spec")

Inner = Callable[..., Any]  # the step of an optimizer's class, without the hooks around it


def own_step(kind: type[torch.optim.Optimizer]) -> Inner:
    """Return the step that a class of optimizers defines, without PyTorch's wrapper that runs step hooks."""
    step: Any = kind.step
    inner: Inner = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner


class LocalStep:
    """Switches one optimizer between the shown and the local form."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._is_entered = False
        self._state: State = {}  # the local state; empty while a shown one is the optimizer's
        self._still_shown: State | None = None  # during a step, a shown state to update after it
        # Caches from the last step, checked at the next one. Per parameter group, in both forms:
        self._shown_lists: list[list[torch.Tensor]] = []
        self._local_lists: list[list[torch.Tensor]] = []
        # The DTensors of all groups, their local tensors, and the specs of gradients that fitted.
        self._parameters: list[DTensor] = []
        self._shards: list[torch.Tensor] = []
        self._grad_specs: list[DTensorSpec | None] = []
        # The local tensors of the last step's gradients if all fitted. See [Note: Lasting gradients]. Not the
        # DTensors, which torch swaps in ``model.double()``, but not while there are weak references to them.
        self._grads: list[weakref.ref[torch.Tensor]] = []
        self._gradients_last = False  # whether the shards' ``grad`` stay set between steps
        # During a step, the groups' lists of parameters, to put back after it.
        self._put_aside: list[list[torch.Tensor]] = []

    def shown_state(self) -> State:
        """Return the optimizer's shown state. The next step takes over what is written to it."""
        attributes = self._attributes()
        if "state" not in attributes:
            attributes["state"] = show(self._state, self._parameters, self._shards)
            self._state = {}
        state: State = attributes["state"]
        return state

    def memory(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield the tensors of the state with their parameters, as `state_memory` does."""
        parameter_of = dict(zip(map(id, self._shards), self._parameters, strict=True))
        for key, own in self._attributes().get("state", self._state).items():
            for value in pytree.tree_leaves(own):
                if isinstance(value, torch.Tensor):
                    yield parameter_of.get(id(key), key), local_part(value)

    def device_of_state(self, parameter: torch.Tensor) -> torch.device:
        """Return where the state of a parameter is between steps."""
        return local_part(parameter).device

    def for_copy(self, optimizer: torch.optim.Optimizer) -> "LocalStep":
        """Return a step for a copy of the optimizer that has no state yet."""
        return LocalStep(optimizer)

    @passing_through
    def step(self, inner: Inner, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Step on local tensors. options: of the call. Returns what the step returns."""
        if closure is not None:
            options["closure"] = self._left_for(closure)
        self.enter()
        try:
            return inner(self._optimizer(), **options)
        finally:
            self.leave()

    @eager
    def enter(self) -> None:
        """Switch the optimizer to local tensors. If this raises, it is as it was before.

        Raises StateError for gradients or state that are not divided as their parameter.
        """
        # These two may raise, and switch nothing; from `_is_entered` on, `leave` undoes everything.
        self._find_parameters()
        attributes = self._attributes()
        if "state" in attributes:
            self._state = localize(attributes["state"], self._parameters)
            if _is_kept(attributes):
                self._still_shown = attributes["state"]
        self._is_entered = True
        attributes["state"] = self._state
        groups = self._groups()
        self._put_aside = [group["params"] for group in groups]
        for group, params in zip(groups, self._local_lists, strict=True):
            group["params"] = params
        try:
            self._give_gradients()
        except BaseException:
            self.leave()
            raise

    @eager
    def leave(self) -> None:
        """Switch the optimizer back to DTensors. No effect if it was not switched."""
        if not self._is_entered:
            return
        self._is_entered = False
        if not self._gradients_last:
            for shard in self._shards:
                shard.grad = None
        for group, params in zip(self._groups(), self._put_aside, strict=True):
            group["params"] = params
        self._put_aside = []
        attributes = self._attributes()
        self._state = attributes.pop("state")
        shown, self._still_shown = self._still_shown, None
        if shown is not None:
            attributes["state"] = show(self._state, self._parameters, self._shards, shown)
            self._state = {}

    def _left_for(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the closure of a step, so that it runs on the shown form, as between steps."""

        def call() -> Any:
            self.leave()
            loss = closure()
            self.enter()
            return loss

        return call

    def _find_parameters(self) -> None:
        """Find the DTensors in the parameter groups and their local tensors, unless known."""
        lists = [group["params"] for group in self._groups()]
        shards = [parameter._local_tensor for parameter in self._parameters]
        if (
            len(lists) == len(self._shown_lists)
            and all(map(_are_same, lists, self._shown_lists))
            and _are_same(shards, self._shards)
        ):
            return
        # Parameters were added or replaced, or shards moved. The local state is by shard, so it is
        # shown first, while the old shards are known.
        self.shown_state()
        self._shown_lists = [list(params) for params in lists]
        self._local_lists = [
            [p._local_tensor if isinstance(p, DTensor) else p for p in params] for params in lists
        ]
        self._parameters = [p for p in chain.from_iterable(lists) if isinstance(p, DTensor)]
        self._shards = [parameter._local_tensor for parameter in self._parameters]
        self._grad_specs = [None] * len(self._shards)
        self._grads = []
        self._gradients_last = False

    def _give_gradients(self) -> None:
        """Set the shards' ``grad`` to their parts of the parameters' gradients.

        [Note: Lasting gradients] The engine reuses the memory of gradients from step to step, and
        the tensors over it. If a step finds the same ones as the step before, it leaves the
        shards' ``grad`` set, so that the next step has nothing to do. Keeping these references is
        safe: gradient memory that the engine frees never comes back as the same tensor.
        """
        grads = [parameter.grad for parameter in self._parameters]
        parts = [getattr(grad, "_local_tensor", None) for grad in grads]
        if (
            self._grads
            and all(map(is_not, parts, repeat(None)))
            and all(map(is_, parts, [known() for known in self._grads]))
            and all(map(is_, map(_spec, grads), self._grad_specs))
        ):
            if not self._gradients_last:
                self._set_gradients(grads)
                self._gradients_last = True
            return
        self._gradients_last = False
        all_fit = self._set_gradients(grads)
        self._grads = [weakref.ref(part) for part in parts if part is not None] if all_fit else []

    def _set_gradients(self, grads: list[Any]) -> bool:
        """Give each shard its part of a gradient; return whether all have one that fits as it is."""
        specs = self._grad_specs
        all_fit = True
        for index, (grad, shard, spec) in enumerate(zip(grads, self._shards, specs, strict=True)):
            if grad is None:
                shard.grad = None
                all_fit = False
            elif getattr(grad, "_spec", grad) is spec:  # the spec that fitted last time
                shard.grad = grad._local_tensor
            else:
                parameter = self._parameters[index]
                shard.grad = local_gradient(grad, parameter)
                fits = grad.placements == parameter.placements
                specs[index] = grad._spec if fits else None
                all_fit &= fits
        return all_fit

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer.param_groups

    def _attributes(self) -> dict[str, Any]:
        optimizer = self._optimizer()
        assert optimizer is not None
        return vars(optimizer)


def _are_same(these: list[torch.Tensor], those: list[torch.Tensor]) -> bool:
    return len(these) == len(those) and all(map(is_, these, those))


def _is_kept(attributes: dict[str, Any]) -> bool:
    """Look whether anybody but the optimizer refers to the shown state or a parameter's part."""
    state = attributes["state"]
    nobody = references([[]])
    return references([state]) > nobody + 2 or references(state.values()) > nobody


def references(objects: Iterable[object]) -> int:
    """Return the largest reference count among objects, their container included."""
    return max(map(sys.getrefcount, objects), default=0)
