"""`gathered`: a sharded parameter whole, as a differentiable value.

The gradient that comes back is left where autograd leaves the unit's own: on the unsharded parameter. So
the engine reduces both together, or this one at the end of backward if the unit has had its turn, and
divisors, dtypes, replicas, accumulation and hooks are the same for both.

Rejected: an autograd function of the sharded parameter, whose gradient autograd adds to ``.grad`` itself.
It would need a reduction of its own, and its addition would race with the reduction on a device.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.access import is_running
from fullshard.engine.guard.forbidden import manager_of_placeholder
from fullshard.engine.module_state import ModuleState
from fullshard.engine.params.flat import FlatParameter
from fullshard.engine.params.managed import ManagedParameter, manager_of
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.engine.whole import gather_one
from fullshard.errors import StateError, UnsupportedError


@eager
def gathered(param: torch.Tensor) -> torch.Tensor:
    """Return a sharded parameter as a whole tensor, through which gradients flow. Collective.

        loss = criterion(model(x), y) + 0.01 * gathered(model.head.weight).abs().sum()

    param: a parameter of a sharded model: as ``model.parameters()`` yields it (a DTensor; the original
        parameter of the wrapper) or as ``module.weight``, also with ``use_orig_params=False``. Any other
        parameter is returned as it is.

    Returns new memory, in the dtype of the shards (under mixed precision: ``gathered(w).to(x.dtype)``). Inside the forward of the parameter's own unit, the
    unsharded parameter itself, which is whole and in the compute dtype. Tensor-parallel parameters stay
    DTensors over the tensor-parallel mesh.

    Its gradient is cast to the compute dtype and reduced with the unit's own: averaged over the
    data-parallel ranks, or however the unit is set up; kept where gradients are not synchronised; added to
    the sharded parameter's ``.grad``. So a term of every rank's loss counts once, as in one process whose
    loss is the mean over the ranks. Frozen parameters and ``torch.no_grad()`` give no gradient.

    All ranks of the mesh have to call it in the same order as the model's modules; one that is missing
    makes the others wait until the process group's timeout, which names the gather. Memory: this parameter
    whole, and once more while it is gathered.

    Raises UnsupportedError for a `FlatParameter`, parameters that define their own all-gather, and
    DTensors that no unit owns; StateError inside `full_parameters`, and in a backward before the model's
    first forward.
    """
    if not isinstance(param, torch.Tensor):
        raise UnsupportedError(
            f"gathered: got a {type(param).__name__}. Pass a parameter, such as module.weight."
        )
    if isinstance(param, FlatParameter):
        raise UnsupportedError(
            "gathered: a FlatParameter holds all parameters of its unit. Pass one of them, such as "
            "module.weight."
        )
    manager = _manager(param)
    if manager is None:
        if isinstance(param, DTensor):
            raise UnsupportedError(
                f"gathered: a DTensor of shape {tuple(param.shape)} belongs to no unit, so nobody says "
                "how its gradient is reduced. Use its full_tensor()."
            )
        return param
    unit = manager.unit()
    if not isinstance(unit, Unit):
        raise StateError(f"gathered: the sharded module that {manager.name} belonged to is gone.")
    return _gathered(param, manager, unit)


def manager_of_shown(value: torch.Tensor) -> ManagedParameter | None:
    """Return the manager of what a module shows: of a parameter, or of what stands for one inside a flat one."""
    placeholder = manager_of_placeholder(value)
    if isinstance(placeholder, ManagedParameter):
        return placeholder
    return manager_of(value) if isinstance(value, nn.Parameter) else None


def _manager(param: torch.Tensor) -> ManagedParameter | None:
    """Return the manager of a parameter; None for a plain one, or a copy of a managed one."""
    manager = manager_of_shown(param)
    if manager is None or not isinstance(param, nn.Parameter):
        return manager
    if any(param is form for form in manager.forms):
        return manager
    if manager.replaces(param):
        raise StateError(
            f"gathered: this is {manager.name} from before sharding, whose values are outdated. Take it "
            "from the model again."
        )
    return None


def _gathered(param: torch.Tensor, manager: ManagedParameter, unit: Unit) -> torch.Tensor:
    if unit.is_whole:
        raise StateError(
            f"gathered: {manager.name} is shown whole now ({unit.label}). Use it as it is, or leave "
            "full_parameters first."
        )
    if manager.is_extended:
        raise UnsupportedError(
            f"gathered: {manager.name} defines its own all-gather. Use it inside its module's forward."
        )
    state: ModuleState | None = unit.owner()
    assert state is not None
    if param is manager.unsharded and unit.is_unsharded and is_running(state, if_unknown=True):
        return param
    index = unit.managed.index(manager)
    if not (torch.is_grad_enabled() and manager.requires_grad):
        return gather_one(unit, index)
    # Autograd has to see an input that requires a gradient, and this one has no hooks of anybody.
    start = torch.empty(0, requires_grad=True, device="cpu")
    whole: torch.Tensor = _Gathered.apply(start, state, unit, index)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    """A whole parameter, whose gradient goes to the unit that owns it."""

    @staticmethod
    def forward(
        ctx: Any,
        _: torch.Tensor,
        state: ModuleState,
        unit: Unit,
        index: int,
    ) -> torch.Tensor:
        ctx.state, ctx.unit, ctx.index = state, unit, index
        return gather_one(unit, index)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.state.hooks().accept_gradient(ctx.unit, ctx.index, grad)
        return None, None, None, None
