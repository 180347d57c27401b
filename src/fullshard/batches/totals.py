"""The total of all weights that are in a model's gradients, and what a loss is scaled by.

[Note: When a step begins] A total counts what gradients contain. It begins anew once they were dropped or
zeroed, which `GradientMarks` notices: no call says where a step begins or ends. Ranks agree on it, since a
rank may have nothing of a parameter but zeros.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.outside_steps import run_collective
from fullshard.engine.gradients.marks import GradientMarks
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import state_of_unit
from fullshard.engine.params.managed import manager_of
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, StateError
from fullshard.plan.mesh import MeshPlan
from fullshard.state.structure import units_of
from fullshard.torch_private import current_graph_task_id, queue_callback

_LABEL = "weights of losses"


@dataclasses.dataclass(slots=True)
class _Step:
    """What the weighted losses of one model have left so far.

    total: of all weights that are in the gradients; 0-dim, float64. marks: of the gradients after the last
    weighted backward. pass_id: of the backward pass that came last.
    """

    total: torch.Tensor
    marks: GradientMarks
    pass_id: int


# By the model's iteration; of one that is not sharded, by itself.
_steps: "weakref.WeakKeyDictionary[Iteration | nn.Module, _Step]" = weakref.WeakKeyDictionary()


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
    units = units_of(model)
    device = units[0].device if units else device
    trained = _trained(model, units)
    step, pass_id = _step_of(model, units, trained, device), current_graph_task_id()
    if step.pass_id == pass_id:
        raise MisuseError(
            "weighted_loss: two weighted losses are in one backward, and each would scale what the other "
            "has left. Add them first, and weigh the sum."
        )
    step.pass_id = pass_id
    seen = step.marks.compare([*trained.values()], device)
    own = torch.as_tensor(weight, dtype=torch.float64, device=device)
    waits = torch.tensor(
        [any(unit.gradients.has_hidden for unit in units)], dtype=torch.float64, device=device
    )
    facts = torch.cat([own.reshape(1), waits, seen.kept, seen.gone])
    for group in _groups(units):
        run_collective(dist.all_reduce, facts, group=group, label=_LABEL)
    kept, gone = facts[2:].chunk(2)
    if seen.may_be_mixed:
        _refuse_mixed([*trained], kept.tolist(), gone.tolist())
    goes_on = facts[1] + kept.sum() > 0
    before = torch.where(goes_on, step.total, 0.0)
    total = before + facts[0]
    _rescale(units, trained, torch.where(goes_on & (total > 0), before / total, 1.0))

    def note() -> None:
        step.total, step.marks = total, GradientMarks([*trained.values()])

    # Once this pass is over, and the engine is done with it: its callback is queued between these two.
    queue_callback(lambda: queue_callback(note))
    num_ranks = widest(units).data_parallel_size if units else 1
    return torch.where(total > 0, own * num_ranks / total, 0.0)


def _trained(model: nn.Module, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
    """Return by name what an optimizer updates: the same on all ranks, in the same order."""
    managed = (param for unit in units for param in unit.params)
    names = {param.holder.sharded: param.name for param in managed}
    for name, parameter in model.named_parameters():
        if manager_of(parameter) is None:
            names.setdefault(parameter, name)
    return {name: tensor for tensor, name in names.items()}


def _step_of(
    model: nn.Module, units: Sequence[Unit], trained: dict[str, torch.Tensor], device: torch.device
) -> _Step:
    """Return what is known of a model's step. Raises StateError for gradients that nobody weighed."""
    iterations = {state.known_iteration for u in units if (state := state_of_unit(u)) is not None}
    key = next((each for each in iterations if each is not None), model)
    step = _steps.get(key)
    if step is not None and len(step.marks) in (0, len(trained)):
        return step
    for name, tensor in trained.items():
        if tensor.grad is not None and tensor.grad.count_nonzero() > 0:
            raise StateError(
                f"weighted_loss: {name} has a gradient of a backward without weight. Drop gradients first, "
                "and weigh the losses of all backwards of a step, with the same model."
            )
    step = _steps[key] = _Step(
        torch.zeros((), dtype=torch.float64, device=device), GradientMarks([]), -1
    )
    return step


def _groups(units: Sequence[Unit]) -> list[dist.ProcessGroup]:
    """Return the process groups of the axes over which ranks see different data."""
    if not units:
        return []
    plan = widest(units)
    mesh = next(unit.mesh for unit in units if unit.mesh.plan is plan)
    return [group for group in (mesh.shard_group, mesh.replicate_group) if group is not None]


def _refuse_mixed(names: Sequence[str], kept: Sequence[float], gone: Sequence[float]) -> None:
    """Raise StateError if some gradients were dropped and others were not."""
    dropped = [n for n, k, g in zip(names, kept, gone, strict=True) if g and not k]
    stayed = [n for n, k in zip(names, kept, strict=True) if k]
    if dropped and stayed:
        raise StateError(
            f"weighted_loss: since the last weighted loss the gradient of {dropped[0]} was dropped, and that of "
            f"{stayed[0]} was not ({len(dropped)} and {len(stayed)} parameters). Weights are counted for the whole "
            "model, so drop all gradients together, or shard the parts as models of their own."
        )


def _rescale(units: Sequence[Unit], trained: dict[str, torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all that earlier backwards have left."""
    own = {id(param.holder.sharded) for unit in units for param in unit.params}
    left = [tensor for unit in units for tensor in unit.gradients.accumulated]
    left += [p.grad for p in trained.values() if id(p) not in own and p.grad is not None]
    for device, tensors in itertools.groupby(left, key=lambda tensor: tensor.device):
        torch._foreach_mul_([*tensors], factor.to(device))
