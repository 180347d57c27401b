"""`full_parameters`: whole parameters on every module, however it was sharded."""

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import nn

from fullshard.engine.module_state import states_in
from fullshard.engine.params.flat import FlatParameter
from fullshard.engine.unit import Unit
from fullshard.engine.whole import WholeOptions, whole_parameters, write_changed
from fullshard.errors import MisuseError, UnsupportedError
from fullshard.live.gathered import manager_of_shown
from fullshard.process_hooks import BEFORE_STEP
from fullshard.state.holdings import refuse_others
from fullshard.state.structure import whole_of
from fullshard.torch_private import local_part

_TORCH_FSDP = "torch.distributed.fsdp."


@contextlib.contextmanager
def full_parameters(
    module: nn.Module,
    *,
    writeback: bool = True,
    rank0_only: bool = False,
    offload: bool = False,
) -> Iterator[None]:
    """Show whole parameters on all modules inside ``module``, in the dtype of the shards. Collective.

        with full_parameters(model):
            model.head.weight.normal_(std=0.02)   # under torch.no_grad(), the same on all ranks

    Whatever sharded them: ``fully_shard``, the wrapper, ``replicate``, or any mix; plain parameters
    stay as they are, and so a model that is not sharded does. Tensor-parallel parameters stay DTensors
    over the tensor-parallel mesh. Memory: all of these parameters whole, on every rank that shows them.

    writeback: what the block has changed is written to the shards when it ends, also by an exception:
        of each rank's whole parameters its own part, so all ranks have to make the same changes. Without
        it changes are dropped, those of parameters that are not sharded too: copies of these are kept.
    rank0_only: only the first rank of each mesh (rank 0) shows whole parameters; the others show their
        shards. With ``writeback`` the first rank's values are sent to all when the block ends.
    offload: show them in host memory.

    A forward inside computes with what is shown, without mixed precision, and cannot be differentiated;
    for losses of weights there is `gathered`.

    Raises MisuseError for a step inside of an optimizer that has the shards; during forward or backward;
    inside another such block; and, when the block ends, if the shape of a parameter was changed. Raises
    UnsupportedError if ``module`` has parameters that a unit outside it owns, or that define their own
    all-gather.
    """
    options = WholeOptions(
        writeback=writeback, rank0_only=rank0_only, offload_to_cpu=offload, copies=True
    )
    units = _units(module)
    sharded = {id(form) for unit in units for form in unit.forms}
    with contextlib.ExitStack() as stack:
        if not writeback:
            stack.enter_context(_dropping_changes(module, sharded))
        stack.enter_context(_refusing_steps(sharded))
        stack.enter_context(whole_parameters(units, options))
        yield


@contextlib.contextmanager
def _refusing_steps(sharded: Collection[int]) -> Iterator[None]:
    """Raise MisuseError at a step of an optimizer that has sharded parameters (by id)."""

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if any(id(p) in sharded for group in optimizer.param_groups for p in group["params"]):
            raise MisuseError(
                "optimizer.step() is called inside full_parameters, where the model shows other tensors than "
                "those that the optimizer has. Step after the block."
            )

    with BEFORE_STEP.calling(refuse, "inside full_parameters a step would change other tensors"):
        yield


@contextlib.contextmanager
def _dropping_changes(module: nn.Module, sharded: Collection[int]) -> Iterator[None]:
    """Give parameters that are not sharded their values of before when the body ends."""
    plain = [p for p in module.parameters() if id(p) not in sharded and not p.is_meta]
    kept = [local_part(parameter.detach()).clone() for parameter in plain]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(plain, kept, strict=True):
                own = local_part(parameter.detach())
                if own.shape != values.shape:
                    parameter.data = values
                else:
                    write_changed(own, values)


def _units(module: nn.Module) -> list[Unit]:
    module = whole_of(module)
    refuse_others([*module.named_modules()])
    for path, each in module.named_modules():
        if any(c.__module__.startswith(_TORCH_FSDP) for c in type(each).__mro__):
            raise UnsupportedError(
                f"{path or 'The model'} is sharded by PyTorch's fully_shard. Call its unshard(), or shard it "
                "with fullshard's."
            )
    states = states_in(module.modules())
    for state in states:
        state.check_idle("full_parameters")
    units = [unit for state in states for unit in state.units]
    own = {id(unit) for unit in units}
    for path, each in module.named_modules():
        # Those too that a flat parameter holds: a module has something in their place.
        for name, value in (*each._parameters.items(), *vars(each).items()):
            if not isinstance(value, torch.Tensor) or isinstance(value, FlatParameter):
                continue
            manager = manager_of_shown(value)
            if manager is not None and id(manager.unit()) not in own:
                raise UnsupportedError(
                    f"full_parameters: {path + '.' if path else ''}{name} of {type(module).__name__} is "
                    f"{manager.name} of a unit that contains more than this module. Call it with a module "
                    "that contains all of these, such as the whole model."
                )
    return units
