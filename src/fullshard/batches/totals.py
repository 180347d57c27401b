"""The total of all weights that are in a model's gradients, and what a loss is scaled by.

[Note: When a step begins] A total counts what gradients contain. It begins anew once they were dropped or
zeroed, which `GradientMarks` notices: no call says where a step begins or ends. Ranks agree on it, since a
rank may have nothing of a parameter but zeros.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.batches.agreeing import HostCopy, refuse_differing, refuse_mixed
from fullshard.comm.outside_steps import run_collective
from fullshard.engine.gradients.marks import GradientMarks
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import state_of_unit
from fullshard.engine.params.managed import manager_of
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.engine.watchers import PassWatcher, watchers
from fullshard.errors import MisuseError, StateError
from fullshard.plan.mesh import MeshPlan
from fullshard.process_hooks import BEFORE_STEP
from fullshard.state.structure import units_of
from fullshard.torch_private import queue_callback

_LABEL = "weights of losses"


@dataclasses.dataclass(slots=True)
class _Step:
    """What the weighted losses of one model have left so far.

    total: of all weights that are in the gradients; 0-dim, float64. marks: of the gradients after the last
    weighted backward, or, before the first one, of none.
    """

    total: torch.Tensor
    marks: GradientMarks


class _Pass(NamedTuple):
    """A backward pass with a weighted loss.

    models: that it was told of. trained, units: of these, by reference. end: the function that autograd calls
    at the end of the pass and that nobody else keeps. It takes the pass off the list; so if it is gone, and
    the pass is there, an exception has ended the pass.
    """

    models: "set[weakref.ref[Iteration | nn.Module]]"
    trained: "list[weakref.ref[torch.Tensor]]"
    units: "list[weakref.ref[Unit]]"
    end: "weakref.ref[Callable[[], None]]"


# By the model's iteration; of one that is not sharded, by itself.
_steps: "weakref.WeakKeyDictionary[Iteration | nn.Module, _Step]" = weakref.WeakKeyDictionary()
_passes: list[_Pass] = []  # the last one


def widest(units: Sequence[Unit]) -> MeshPlan:
    """Return the place in the mesh that has all ranks which see different data."""
    return max((unit.mesh.plan for unit in units), key=lambda plan: plan.data_parallel_size)


@eager
@torch.no_grad()
def add_weight(
    weight: float | torch.Tensor, model: nn.Module, device: torch.device
) -> torch.Tensor:
    """Count a loss's weight, scale what earlier backwards have left, return what the loss is scaled by.

    Call it in a backward, before any gradient is reduced. Collective. device: for a model that is not
    sharded. Returns a 0-dim float64 tensor. For errors see `weighted_loss`.
    """
    roots = _roots(model)
    keys: list[Iteration | nn.Module] = [*roots] or [model]
    modules = [*roots.values()] or [model]
    units = list(dict.fromkeys(unit for module in modules for unit in units_of(module)))
    device = units[0].device if units else device
    trained = _trained([*modules, model], units)
    _begin_pass(keys)
    step = _step_of(keys, trained, device)
    seen = step.marks.compare([*trained.values()], device)
    own = torch.as_tensor(weight, dtype=torch.float64, device=device)
    waits = torch.tensor(
        [any(unit.gradients.has_hidden for unit in units)], dtype=torch.float64, device=device
    )
    dropped = seen.gone * (1 - seen.kept)
    facts = torch.cat([own.reshape(1), waits, seen.kept, seen.gone, dropped, seen.untouched])
    for group in _groups(units):
        run_collective(dist.all_reduce, facts, group=group, label=_LABEL)
    kept, gone, dropped, untouched = facts[2:].chunk(4)
    names = [name for _, name in trained]
    if seen.may_be_mixed:
        refuse_mixed(names, kept.tolist(), gone.tolist())
    differing = HostCopy((dropped > 0) & (untouched > 0))
    if device.type == "cpu":  # elsewhere at the end of the pass, when nobody has to wait for it
        refuse_differing(names, differing)
    goes_on = facts[1] + kept.sum() > 0
    before = torch.where(goes_on, step.total, 0.0)
    total = before + facts[0]
    _rescale(units, trained, torch.where(goes_on & (total > 0), before / total, 1.0))

    def end() -> None:
        step.total, step.marks = total, GradientMarks([*trained.values()])
        _passes.clear()
        refuse_differing(names, differing)

    _passes.append(
        _Pass(
            {weakref.ref(key) for key in keys},
            [weakref.ref(tensor) for tensor in trained.values()],
            [weakref.ref(unit) for unit in units],
            weakref.ref(end),
        )
    )
    # Once this pass is over, and the engine is done with it: its callback is queued between these two.
    queue_callback(functools.partial(queue_callback, end))
    num_ranks = widest(units).data_parallel_size if units else 1
    return torch.where(total > 0, own * num_ranks / total, 0.0)


def _begin_pass(keys: Sequence[Iteration | nn.Module]) -> None:
    """Note that a weighted pass begins. Raises MisuseError in another one, or in one that has begun."""
    if _current() is not None:
        raise MisuseError(
            "weighted_loss: two weighted losses are in one backward, and each would scale what the other "
            "has left. Add them first, and weigh the sum; of several models, pass a module that contains them."
        )
    _settle_failure()
    if any(isinstance(key, Iteration) and key.is_in_backward for key in keys):
        raise MisuseError(
            "weighted_loss: this backward has begun with another loss that was not weighted. Add all losses "
            "first, and weigh the sum."
        )
    if _watcher not in watchers:
        watchers.append(_watcher)
        BEFORE_STEP.add(_before_step, "a weighted backward that failed may have left gradients")


def _current() -> _Pass | None:
    """Return the weighted pass that runs; None if there is none, or an exception has ended it."""
    return next((each for each in _passes if each.end() is not None), None)


def _settle_failure() -> None:
    """Forget a weighted pass that an exception has ended. Raises StateError while it has left gradients."""
    failed = next((each for each in _passes if each.end() is None), None)
    if failed is None:
        return
    grads = (tensor.grad for each in failed.trained if (tensor := each()) is not None)
    units = (unit for each in failed.units if (unit := each()) is not None)
    if any(g is not None and g.count_nonzero() > 0 for g in grads) or any(
        unit.gradients.has_hidden for unit in units
    ):
        raise StateError(
            "weighted_loss: an exception has ended the last weighted backward, and gradients of that step are "
            "there: incomplete, and scaled for the loss that failed. Drop them (model.zero_grad()) before the "
            "next backward or step."
        )
    for reference in failed.models:
        if (key := reference()) is not None:
            _steps.pop(key, None)
    _passes.clear()


def _before_step(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    """Refuse a step with what a failed pass has left."""
    if _passes and _current() is None:
        left = {id(each()) for each in _passes[0].trained}
        if any(id(p) in left for group in optimizer.param_groups for p in group["params"]):
            _settle_failure()


class _Watcher(PassWatcher):
    """Keeps gradients with and without weight apart."""

    @torch.no_grad()
    def backward_begins(self, iteration: Iteration) -> None:
        """Raise MisuseError for a backward that would mix them."""
        current = _current()
        if current is not None:
            if weakref.ref(iteration) not in current.models:
                raise MisuseError(
                    f"weighted_loss: the loss reaches a model that it was not told of, with "
                    f"{iteration.units[0].label}. Pass a module that contains all models of the loss."
                )
            return
        _settle_failure()
        step = _steps.get(iteration)
        if step is None or not len(step.marks):
            return
        units = iteration.units
        trained = [param.holder.sharded for unit in units for param in unit.params]
        trained = list(dict.fromkeys(trained))
        seen = step.marks.compare(trained, units[0].device)
        if bool(seen.kept.any()):
            raise MisuseError(
                "weighted_loss: this backward has no weight, but gradients of weighted losses are there, which it "
                "would be added to. Weigh its loss too, add it to the weighted one before, or drop gradients."
            )


_watcher = _Watcher()


def _roots(model: nn.Module) -> dict[Iteration, nn.Module]:
    """Return the iterations that a model's units are of, each with its root module."""
    found: dict[Iteration, nn.Module] = {}
    for unit in units_of(model):
        state = state_of_unit(unit)
        if state is not None and (iteration := state.known_iteration) is not None:
            root = state.root_module
            assert root is not None
            found[iteration] = root
    return found


def _trained(
    modules: Sequence[nn.Module], units: Sequence[Unit]
) -> dict[tuple[int, str], torch.Tensor]:
    """Return what an optimizer updates: the same on all ranks, in the same order, units first.

    By a number, and the name.
    """
    managed = (param for unit in units for param in unit.params)
    names = {param.holder.sharded: param.name for param in managed}
    for module in modules:
        for name, parameter in module.named_parameters():
            if manager_of(parameter) is None:
                names.setdefault(parameter, name)
    return {(number, name): tensor for number, (tensor, name) in enumerate(names.items())}


def _step_of(
    keys: Sequence[Iteration | nn.Module],
    trained: Mapping[tuple[int, str], torch.Tensor],
    device: torch.device,
) -> _Step:
    """Return what is known of a step of some models. Raises StateError for gradients that nobody weighed."""
    steps = [_steps.get(key) for key in keys]
    step = steps[0]
    is_one = step is not None and all(each is step for each in steps)
    if is_one and step is not None and len(step.marks) in (0, len(trained)):
        return step
    for (_, name), tensor in trained.items():
        if tensor.grad is not None and tensor.grad.count_nonzero() > 0:
            raise StateError(
                f"weighted_loss: {name} has a gradient of a backward without weight, or of a weighted loss of "
                "other models. Drop gradients first, and weigh the losses of all backwards of a step, with the "
                "same model."
            )
    step = _Step(torch.zeros((), dtype=torch.float64, device=device), GradientMarks([]))
    for key in keys:
        _steps[key] = step
    return step


def _groups(units: Sequence[Unit]) -> list[dist.ProcessGroup]:
    """Return the process groups of the axes over which ranks see different data."""
    if not units:
        return []
    plan = widest(units)
    mesh = next(unit.mesh for unit in units if unit.mesh.plan is plan)
    return [group for group in (mesh.shard_group, mesh.replicate_group) if group is not None]


def _rescale(
    units: Sequence[Unit], trained: Mapping[tuple[int, str], torch.Tensor], factor: torch.Tensor
) -> None:
    """Multiply all that earlier backwards have left."""
    own = {id(param.holder.sharded) for unit in units for param in unit.params}
    left = [tensor for unit in units for tensor in unit.gradients.accumulated]
    left += [p.grad for p in trained.values() if id(p) not in own and p.grad is not None]
    for device, tensors in itertools.groupby(left, key=lambda tensor: tensor.device):
        torch._foreach_mul_([*tensors], factor.to(device))
