"""`step_on_shards` lets an optimizer over DTensors step on their local tensors.

Every operation on a DTensor passes through its dispatcher, which costs tens of microseconds of host
time. An elementwise update does not need that: this rank's part of the new parameter depends only
on its parts of the old parameter, of the gradient and of the state. So the optimizer gets a class
of its own (as `fully_shard` gives one to modules), whose ``step`` runs on those parts.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from fullshard.engine.checks.optimizers import why_not_elementwise
from fullshard.engine.runtime import passing_through
from fullshard.errors import ShardingError, StateError
from fullshard.optim.local_step import LocalStep, own_step
from fullshard.optim.streamed_step import StreamedStep
from fullshard.policies import PlacementPolicy
from fullshard.torch_private import local_part, pytree

OptimizerT = TypeVar("OptimizerT", bound=optim.Optimizer)

_ELEMENTWISE = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}


def step_on_shards(optimizer: OptimizerT, *, elementwise: bool = False) -> OptimizerT:
    """Make an optimizer step on this rank's shards as plain tensors; return the same optimizer.

        optimizer = fullshard.step_on_shards(torch.optim.AdamW(model.parameters()))

    Between steps parameters, gradients and state are DTensors as before, also in ``state_dict()``,
    in hooks and in closures, so checkpoints do not change. Results are bitwise equal. Call it
    before anything replaces the optimizer's ``step``, as learning rate schedulers do.

    elementwise: states that no element of an update depends on other elements of the parameter.
        This is known of most of ``torch.optim``; pass True for other optimizers of which it holds.
        An update by a norm or a matrix product would silently use this rank's shard alone.

    Raises ShardingError for an optimizer that is known not to be elementwise, or not known to be
    without ``elementwise=True``, and for ``differentiable=True``; StateError if ``step`` was
    replaced.
    """
    if not isinstance(optimizer, _OnShards):
        _refuse_unfit(optimizer, elementwise=elementwise)
        _put_on_shards(optimizer, type(optimizer), LocalStep(optimizer))
    return optimizer


def stream_state(
    optimizer: OptimizerT, policy: PlacementPolicy | None = None, *, elementwise: bool = False
) -> OptimizerT:
    """Keep an optimizer's state on the host or on disk, and step on it on the device; return the optimizer.

        policy = fullshard.PlacementPolicy(optimizer="host")
        optimizer = fullshard.stream_state(torch.optim.AdamW(model.parameters(), fused=True), policy)

    The state of each unit arrives beside backward, is stepped on, and leaves beside the next forward, so the
    device holds that of two units at a time, or ``policy.device_nbytes``. Results are equal in every bit.
    Between steps ``optimizer.state`` and ``state_dict()`` have the memory at home; whoever reads them waits for
    what is on its way. It steps on shards as `step_on_shards` does, and asks for the same of an optimizer.

    policy: None takes what `fully_shard` was given for each unit, as its ``offload_policy``.

    What an optimizer counts on itself or in its groups, each unit's step finds as it was before the first one's, if
    it is a number or a tensor of one element; in lists and dicts of its own it counts units.

    Raises as `step_on_shards` does, and ShardingError for a budget that is too small, a folder that cannot be
    written to, state that is neither scalars nor tensors of the parameter's shape, and where no policy says
    anything of it; AllocationError for a disk with too little space. Nothing is moved then.
    """
    if policy is not None and not isinstance(policy, PlacementPolicy):
        raise ShardingError(
            f"stream_state(policy={policy!r}): expected a PlacementPolicy, which says where state is kept, or None "
            "for what fully_shard was given as offload_policy."
        )
    original: Any = type(optimizer)
    before = vars(optimizer).get("_local_step")
    if before is None:
        _refuse_unfit(optimizer, elementwise=elementwise)
    else:
        before.shown_state()  # what it has goes on to be the state
        original = original._original_class
    step = StreamedStep(optimizer, policy)
    step.plan()
    _refuse_ignored(step)
    _put_on_shards(optimizer, original, step)
    return optimizer


def _refuse_ignored(step: StreamedStep) -> None:
    """Raise ShardingError for policies that would have no effect."""
    if step.policy is None:
        if all(piece.policy.optimizer == "device" for piece in step.pieces):
            raise ShardingError(
                "stream_state has no policy: none was passed, and no unit of these parameters has a PlacementPolicy with "
                'optimizer="host" or "disk". Pass one here, or to fully_shard as offload_policy.'
            )
    elif step.policy.parameters == "host":
        for piece in step.pieces:
            if any(shard.device.type != "cpu" for shard in piece.shards):
                raise ShardingError(
                    f'PlacementPolicy(parameters="host"): {piece.path} is on a device. Where parameters are, fully_shard '
                    "is told, by its offload_policy; stream_state moves the state of optimizers alone."
                )


def num_dtensors_of(optimizer: optim.Optimizer) -> int:
    """Return how many parameters an optimizer steps on as DTensors; none after `step_on_shards`."""
    if isinstance(optimizer, _OnShards):
        return 0
    groups = optimizer.param_groups
    return sum(isinstance(param, DTensor) for group in groups for param in group["params"])


def state_memory(optimizer: optim.Optimizer) -> Iterator[tuple[Any, Tensor]]:
    """Yield each piece of memory of an optimizer's state, with its parameter. Waits for nothing.

    What is on disk is none. Memory that serves all parameters is yielded with None.
    """
    step: LocalStep | None = vars(optimizer).get("_local_step")
    if step is not None:
        yield from step.memory()
        return
    for parameter, own in optimizer.state.items():
        for value in pytree.tree_leaves(own):
            if isinstance(value, Tensor):
                yield parameter, local_part(value)


class _StateOnDemand:
    """The attribute ``state``: found here while the optimizer's ``__dict__`` has none."""

    def __get__(self, optimizer: Any, _: type) -> Any:
        return self if optimizer is None else optimizer._local_step.shown_state()


class _OnShards:
    """Base of the classes that optimizers get here, in front of the original class."""

    state = _StateOnDemand()
    _local_step: LocalStep
    _original_class: type[optim.Optimizer]

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy steps on shards as well, and streams its state if this one does.
        make = type(self._local_step), getattr(self._local_step, "policy", None)
        return _create_empty, (self._original_class, *make), self.__getstate__()


def _create_empty(
    original: type[optim.Optimizer],
    kind: type[LocalStep] = LocalStep,
    policy: PlacementPolicy | None = None,
) -> optim.Optimizer:
    """Return an optimizer of the right class, whose attributes ``__setstate__`` is to set."""
    optimizer = original.__new__(original)
    step = StreamedStep(optimizer, policy) if kind is StreamedStep else LocalStep(optimizer)
    _put_on_shards(optimizer, original, step)
    return optimizer


def _put_on_shards(optimizer: Any, original: Any, step: LocalStep) -> None:
    optimizer.__class__ = _class_on_shards(original)
    optimizer._local_step = step


@functools.cache
def _class_on_shards(original: type[Any]) -> type[Any]:
    # PyTorch runs step hooks around `step`, by a wrapper that it marks `hooked`. Here they go
    # around our step instead of the inner one, so that they see DTensors.
    hooked = optim.Optimizer.profile_hook_step(_on_shards(own_step(original)))
    hooked.hooked = True  # type: ignore[attr-defined]
    members = {
        "step": hooked,
        "_original_class": original,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (_OnShards, original), members)


def _on_shards(inner: Callable[..., Any]) -> Callable[..., Any]:
    @passing_through
    @functools.wraps(inner)
    def step(self: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        return self._local_step.step(inner, closure, options)

    return step


def _refuse_unfit(optimizer: optim.Optimizer, *, elementwise: bool) -> None:
    name = type(optimizer).__name__
    if not isinstance(optimizer, optim.Optimizer):
        raise ShardingError(
            f"{name} is no torch.optim.Optimizer. Pass the optimizer, not the model."
        )
    if (why := why_not_elementwise(type(optimizer))) is not None:
        raise ShardingError(f"{name} cannot step on shards alone: it {why}. Use it as it is.")
    if not elementwise and type(optimizer) not in _ELEMENTWISE:
        known = ", ".join(sorted(each.__name__ for each in _ELEMENTWISE))
        raise ShardingError(
            f"{name} is not known to be elementwise, as {known} are. If no element of its update "
            "depends on other elements of the parameter, pass elementwise=True; if it wraps another "
            "optimizer, pass that one."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ShardingError(
            f"{name} has differentiable=True, but steps on shards are not recorded by autograd. Use "
            "it as it is."
        )
    if "step" in vars(optimizer):
        raise StateError(
            f"The step of this {name} was replaced, as learning rate schedulers and libraries do. "
            "Call step_on_shards or stream_state right after the optimizer is made."
        )
