"""Exchanges what an optimizer works on, for the time of a step.

Between steps an optimizer is an ordinary one over DTensors. Its shown state (see `local_form`) is
made only when somebody asks for it, and lives as long as somebody may write to it:

    nobody asks      the local state stays, and a step exchanges parameters and gradients alone
    somebody asks    the state is shown, and is the state until the next step
    next step        takes what was written there; lets go of it, or, if somebody still refers to
                     it, brings it up to date afterwards
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import is_, is_not
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fullshard.optim.local_form import State, local_gradient, localize, show


class LocalStep:
    """What one optimizer works on, in both forms."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._is_entered = False
        self._state: State = {}  # local; what counts unless a state is shown
        self._still_shown: State | None = None  # while a step runs
        # Of the last step, and used again while they are right. By parameter group, as shown:
        self._shown_lists: list[list[torch.Tensor]] = []
        self._local_lists: list[list[torch.Tensor]] = []
        # The DTensors among them:
        self._parameters: list[DTensor] = []
        self._shards: list[torch.Tensor] = []
        self._grad_specs: list[DTensorSpec | None] = []
        # The gradients, if all fitted as they are. See [Note: Lasting gradients].
        self._grads: list[weakref.ref[torch.Tensor]] = []
        self._gradients_last = False
        # What to put back after a step.
        self._put_aside: list[list[torch.Tensor]] = []

    def shown_state(self) -> State:
        """Return the optimizer's state as users see it. What they write there counts."""
        attributes = self._attributes()
        if "state" not in attributes:
            attributes["state"] = show(self._state, self._parameters, self._shards)
            self._state = {}
        state: State = attributes["state"]
        return state

    def enter(self) -> None:
        """Let the optimizer see local tensors. On an exception nothing has changed."""
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

    def leave(self) -> None:
        """Let the optimizer be seen as before. No effect if it is."""
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

    def left_for(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure, which computes gradients, to find everything as it is between steps."""

        def call() -> Any:
            self.leave()
            loss = closure()
            self.enter()
            return loss

        return call

    def _find_parameters(self) -> None:
        """Look up the DTensors in the parameter groups, and their shards."""
        lists = [group["params"] for group in self._groups()]
        shards = [parameter._local_tensor for parameter in self._parameters]
        if (
            len(lists) == len(self._shown_lists)
            and all(map(_are_same, lists, self._shown_lists))
            and _are_same(shards, self._shards)
        ):
            return
        # Others have added or replaced parameters, or moved shards: state is by shard.
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
        """Set the shards' gradients.

        [Note: Lasting gradients] The engine uses the memory of gradients again, and the DTensors
        over it. If a step finds those of the step before, it leaves the shards' gradients set, so
        that the next one has nothing to do. They hold no memory that the engine would free: what it
        frees does not come again.
        """
        grads = [parameter.grad for parameter in self._parameters]
        is_known = self._grads and all(map(is_, grads, [known() for known in self._grads]))
        if is_known and all(map(is_not, grads, repeat(None))):
            if not self._gradients_last:
                self._set_gradients(grads)
                self._gradients_last = True
            return
        self._gradients_last = False
        all_fit = self._set_gradients(grads)
        self._grads = [weakref.ref(grad) for grad in grads if grad is not None] if all_fit else []

    def _set_gradients(self, grads: list[Any]) -> bool:
        """Give each shard its part of a gradient; return whether all have one that fits as it is."""
        specs = self._grad_specs
        all_fit = True
        for index, (grad, shard, spec) in enumerate(zip(grads, self._shards, specs, strict=True)):
            if grad is None:
                shard.grad = None
                all_fit = False
            elif getattr(grad, "_spec", grad) is spec:  # which fitted last time
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
    """Whether anybody else refers to the shown state or to that of a parameter."""
    state = attributes["state"]
    return _references([state]) > _references([[]]) + 2 or _references(
        state.values()
    ) > _references([[]])


def _references(objects: Iterable[object]) -> int:
    """Count who refers to an object, the container included: the most of several."""
    return max(map(sys.getrefcount, objects), default=0)
