"""`weighted_loss`: gradients of the mean over all tokens, however they are divided over ranks and backwards.

The mean over ranks of each rank's mean is another number as soon as ranks have different numbers of tokens.
With weights w of all losses of a step, one per rank and backward, the gradient that is wanted is

    sum(w * grad(loss)) / sum(w)

The engine adds up grad(loss) over ranks and backwards, and divides by the number of ranks. So a loss is
scaled by ``w * ranks / total``, where the total contains what came before; and what earlier backwards have
left is scaled by ``total before / total``. Gradients are right after each backward, not only after the last.

[Note: When a step begins] A total counts what gradients contain. It begins anew once they were dropped or
zeroed. Programs do that in many ways: through an optimizer, a module, or the parameter; by None or by zeros.
None of them tells the engine, so each gradient is remembered after a backward, and looked at before the next
one (`_Marks`). Object and version counters say at once that nobody touched it. Of one that was touched
(zeroed, but perhaps clipped), the values tell. Ranks agree on it, since a rank may have nothing of a
parameter but zeros.
"""

import dataclasses
import functools
import itertools
import math
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.outside_steps import run_collective
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import ModuleState
from fullshard.engine.observer import PassWatcher, watchers
from fullshard.engine.params.form import UnitMesh
from fullshard.engine.params.managed import manager_of
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, ShardingError, StateError
from fullshard.peers.groups import place_in_job
from fullshard.process_hooks import BEFORE_STEP
from fullshard.state.structure import units_of
from fullshard.torch_private import local_part, queue_callback


@eager
def weighted_loss(
    loss: torch.Tensor, weight: float | torch.Tensor, model: nn.Module
) -> torch.Tensor:
    """Return a loss that counts in proportion to its weight among all ranks and backwards of a step.

        loss = cross_entropy(model(inputs), labels)      # the mean over this rank's tokens
        weighted_loss(loss, num_tokens, model).backward()

    loss: of one element, the mean over what ``weight`` counts on this rank. weight: how much it counts, such as
        a number of tokens: 0 or more, a number or a tensor of one element. A rank with weight 0 adds nothing.
    model: the root of a model that is sharded with either API, or any model where there is one process.

    The value of the loss stays. Its gradients become those of the weighted mean over all data-parallel ranks,
    and over all backwards since gradients were dropped or zeroed: after each backward, ``.grad`` is right. So
    do not divide the loss by the number of micro-batches, and let every backward of a step go through this.

    All ranks call it, and run the backward, in which they exchange weights: one all-reduce of a few bytes per
    parameter over each axis of the mesh. From the second backward of a step on, gradients are scaled as well.

    Raises ShardingError for a loss of several elements, a weight that is negative or not finite, and a model
    that is not sharded; StateError for units that divide gradients by another number than that of the ranks
    which see different data. In backward, StateError where gradients of some parameters, or on some ranks, were
    dropped since the last weighted loss and others were not, where a backward without weight has left some, or
    one that has failed; MisuseError for two weighted losses in one backward, for another loss beside it, and for
    a loss that reaches other models. After a backward that has failed, a step of an optimizer is a StateError
    until gradients are dropped: they are incomplete.
    """
    if loss.numel() != 1:
        raise ShardingError(
            f"weighted_loss: the loss has shape {tuple(loss.shape)}. Pass the mean over what weight counts."
        )
    units = units_of(model)
    if not units and place_in_job().size > 1:
        raise ShardingError(
            f"weighted_loss: {type(model).__name__} is not sharded, so nothing averages its gradients over "
            "ranks. Pass the model that fully_shard, replicate or FullyShardedDataParallel was applied to."
        )
    num_ranks = _widest(units).plan.data_parallel_size if units else 1
    for unit in units:
        divisor = unit.config.gradient_divide_factor or unit.mesh.plan.data_parallel_size
        if unit.config.comm_hook is None and divisor != num_ranks:
            raise StateError(
                f"weighted_loss: {unit.label} divides its gradients by {divisor:g}, but {num_ranks} ranks see "
                f"different data. Call set_gradient_divide_factor({num_ranks}) on its module."
            )
    own = _checked(weight)
    weighted: torch.Tensor = _Weighted.apply(loss, own, model)  # type: ignore[no-untyped-call]
    return weighted


def _checked(weight: object) -> float | torch.Tensor:
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ShardingError(
                f"weighted_loss: weight has shape {tuple(weight.shape)}. Pass this rank's total."
            )
        if not weight.is_cpu:  # reading it would stall the host
            return weight.detach().reshape(())
        weight = weight.item()
    value = float(weight) if isinstance(weight, numbers.Real) else -1.0
    if not 0 <= value < math.inf:
        raise ShardingError(f"weighted_loss: weight is {weight!r}. Pass 0 or a positive number.")
    return value


class _Weighted(torch.autograd.Function):
    """The identity, whose backward scales the gradient."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, weight: float | torch.Tensor, model: nn.Module
    ) -> torch.Tensor:
        ctx.weight, ctx.model = weight, weakref.ref(model)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        model = ctx.model()
        if model is None:
            return None, None, None  # nobody is left to have gradients
        share = _add_weight(ctx.weight, model, grad.device)
        return grad * share.to(grad.device, grad.dtype), None, None


# What gradients contain, and backwards under way


class _Marks:
    """The gradients of some parameters, as they were when this was made."""

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self.trained = list(trained)  # kept, so that no other gets the id of one
        self._seen = {
            id(tensor): (weakref.ref(tensor.grad), _version(tensor.grad))
            for tensor in trained
            if tensor.grad is not None
        }

    def compare(
        self, trained: Sequence[torch.Tensor], device: torch.device
    ) -> tuple[torch.Tensor, bool]:
        """Say what became of the gradients of some parameters since.

        Returns rows of 1.0 or 0.0 by parameter, float64 on ``device``, each if it was there, and now

            kept        it is there and not zero
            gone        it was dropped or written to
            untouched   nobody has written to it; of those with elements

        and whether some may be kept while others are not.
        """
        kept, gone, untouched = ([0.0] * len(trained) for _ in range(3))
        touched: list[tuple[int, torch.Tensor]] = []
        for index, tensor in enumerate(trained):
            if id(tensor) not in self._seen:
                continue
            grad, (known, version) = tensor.grad, self._seen[id(tensor)]
            if grad is not None and grad is known() and _version(grad) == version:
                kept[index] = 1.0
                untouched[index] = float(local_part(grad).numel() > 0)
                continue
            gone[index] = 1.0
            if grad is not None:
                touched.append((index, local_part(grad)))
        flags = torch.tensor([kept, gone, untouched], dtype=torch.float64, device=device)
        for index, local in touched:
            flags[0, index] = local.count_nonzero().to(device) > 0
        return flags, any(gone) and (any(kept) or bool(touched))


def _version(grad: torch.Tensor) -> tuple[int, int]:
    """Return how often a gradient was written to, as a whole and through this rank's part."""
    return grad._version, local_part(grad)._version


@dataclasses.dataclass(slots=True)
class _Step:
    """What the weighted losses of one model have left so far.

    total: of all weights that are in the gradients; 0-dim, float64. marks: of the gradients after the last
    weighted backward, or, before the first one, of none.
    """

    total: torch.Tensor
    marks: _Marks


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


@eager
@torch.no_grad()
def _add_weight(
    weight: float | torch.Tensor, model: nn.Module, device: torch.device
) -> torch.Tensor:
    """Count a loss's weight, scale what earlier backwards have left, return what the loss is scaled by.

    Comes in a backward, before any gradient is reduced. Collective. device: for a model that is not
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
    flags, may_be_mixed = step.marks.compare([*trained], device)
    own = torch.as_tensor(weight, dtype=torch.float64, device=device)
    has_hidden = any(unit.gradients.has_hidden for unit in units)
    waits = torch.tensor(float(has_hidden), dtype=torch.float64, device=device)
    dropped = flags[1] * (1 - flags[0])
    facts = torch.cat([torch.stack([own.reshape(()), waits]), flags.flatten(), dropped])
    mesh = _widest(units) if units else None
    for group in () if mesh is None else mesh.groups:
        run_collective(dist.all_reduce, facts, group=group, label="weights of losses")
    kept, gone, untouched, dropped = facts[2:].chunk(4)
    names = [*trained.values()]
    if may_be_mixed:
        _refuse_mixed(names, kept.tolist(), gone.tolist())
    differing = _on_host((dropped > 0) & (untouched > 0))
    if device.type == "cpu":  # elsewhere at the end of the pass, when nobody has to wait for it
        _refuse_differing(names, differing())
    goes_on = facts[1] + kept.sum() > 0
    before = torch.where(goes_on, step.total, 0.0)
    total = before + facts[0]
    _rescale(units, [*trained], torch.where(goes_on & (total > 0), before / total, 1.0))

    def end() -> None:
        step.total, step.marks = total, _Marks([*trained])
        _passes.clear()
        _refuse_differing(names, differing())

    _passes.append(
        _Pass(
            {weakref.ref(key) for key in keys},
            [weakref.ref(tensor) for tensor in trained],
            [weakref.ref(unit) for unit in units],
            weakref.ref(end),
        )
    )
    # Once this pass is over, and the engine is done with it: its callback is queued between these two.
    queue_callback(functools.partial(queue_callback, end))
    num_ranks = 1 if mesh is None else mesh.plan.data_parallel_size
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
    return _passes[0] if _passes and _passes[0].end() is not None else None


def _settle_failure() -> None:
    """Forget a weighted pass that an exception has ended. Raises StateError while it has left gradients."""
    if not _passes or _current() is not None:
        return
    (failed,) = _passes
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


@eager
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
        if step is None or not step.marks.trained:
            return
        units = iteration.units
        trained = [holder.sharded for unit in units for holder in unit.holders]
        flags, _ = step.marks.compare(trained, units[0].device)
        if bool(flags[0].any()):
            raise MisuseError(
                "weighted_loss: this backward has no weight, but gradients of weighted losses are there, which it "
                "would be added to. Weigh its loss too, add it to the weighted one before, or drop gradients."
            )


_watcher = _Watcher()


def _roots(model: nn.Module) -> dict[Iteration, nn.Module]:
    """Return the iterations that a model's units are of, each with its root module."""
    found: dict[Iteration, nn.Module] = {}
    for unit in units_of(model):
        state: ModuleState | None = unit.owner()
        if state is not None and (iteration := state.known_iteration) is not None:
            root = state.root_module
            assert root is not None
            found[iteration] = root
    return found


def _trained(modules: Sequence[nn.Module], units: Sequence[Unit]) -> dict[torch.Tensor, str]:
    """Return what an optimizer updates, with its name: the same on all ranks, in the same order, units first."""
    names: dict[torch.Tensor, str]
    names = {param.holder.sharded: param.name for unit in units for param in unit.managed}
    for module in modules:
        for name, parameter in module.named_parameters():
            if manager_of(parameter) is None:
                names.setdefault(parameter, name)
    return names


def _step_of(
    keys: Sequence[Iteration | nn.Module], trained: Mapping[torch.Tensor, str], device: torch.device
) -> _Step:
    """Return what is known of a step of some models. Raises StateError for gradients that nobody weighed."""
    first, *others = (_steps.get(key) for key in keys)
    are_one = all(each is first for each in others)
    if first is not None and are_one and len(first.marks.trained) in (0, len(trained)):
        return first
    for tensor, name in trained.items():
        if tensor.grad is not None and tensor.grad.count_nonzero() > 0:
            raise StateError(
                f"weighted_loss: {name} has a gradient of a backward without weight, or of a weighted loss of "
                "other models. Drop gradients first, and weigh the losses of all backwards of a step, with the "
                "same model."
            )
    step = _Step(torch.zeros((), dtype=torch.float64, device=device), _Marks([]))
    for key in keys:
        _steps[key] = step
    return step


def _widest(units: Sequence[Unit]) -> UnitMesh:
    """Return the place in the mesh that has all ranks which see different data."""
    return max((unit.mesh for unit in units), key=lambda mesh: mesh.plan.data_parallel_size)


def _rescale(units: Sequence[Unit], trained: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all that earlier backwards have left."""
    own = {id(holder.sharded) for unit in units for holder in unit.holders}
    left = [tensor for unit in units for tensor in unit.gradients.accumulated]
    left += [p.grad for p in trained if id(p) not in own and p.grad is not None]
    for device, tensors in itertools.groupby(left, key=lambda tensor: tensor.device):
        torch._foreach_mul_([*tensors], factor.to(device))


# Whether gradients were dropped together: on all ranks, and of all parameters


def _on_host(tensor: torch.Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor to the host; return what waits for its values."""
    if tensor.device.type == "cpu":
        return tensor.tolist
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()

    def values() -> list[Any]:
        event.synchronize()
        return copy.tolist()

    return values


def _refuse_differing(names: Sequence[str], differing: Sequence[bool]) -> None:
    """Raise StateError, on all ranks, if some have dropped gradients that others have kept."""
    found = [name for name, is_found in zip(names, differing, strict=True) if is_found]
    if found:
        raise StateError(
            f"weighted_loss: since the last weighted loss some ranks have dropped the gradient of {found[0]} "
            f"({len(found)} parameters), and others have not. Drop gradients on all ranks, or on none."
        )


def _refuse_mixed(names: Sequence[str], kept: Sequence[float], gone: Sequence[float]) -> None:
    """Raise StateError if the gradients of some parameters were dropped and those of others were not."""
    dropped = [n for n, k, g in zip(names, kept, gone, strict=True) if g and not k]
    stayed = [n for n, k in zip(names, kept, strict=True) if k]
    if dropped and stayed:
        raise StateError(
            f"weighted_loss: since the last weighted loss the gradient of {dropped[0]} was dropped, and that of "
            f"{stayed[0]} was not ({len(dropped)} and {len(stayed)} parameters). Weights are counted for the whole "
            "model, so drop all gradients together, or shard the parts as models of their own."
        )
