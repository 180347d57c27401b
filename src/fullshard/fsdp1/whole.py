"""`FullyShardedDataParallel` while it shows whole parameters: `summon_full_params` and `apply`."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fullshard.engine.whole import WholeOptions, whole_parameters
from fullshard.errors import MisuseError, UnsupportedError
from fullshard.fsdp1.wrapper import Wrapper, wrappers_in
from fullshard.plan.units import clean_name
from fullshard.policies import TrainingState

_Self = TypeVar("_Self", bound="WithWholeParameters")


class WithWholeParameters(Wrapper):
    """A wrapper that can show whole parameters, by the names they had before wrapping."""

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters, in the dtype of the shards, inside the block. Collective.

        recurse: of all instances in ``module``; else of the outermost ones alone.
        writeback: what the block changes is written to the shards when it ends.
        rank0_only: other ranks keep their pieces. offload_to_cpu: in host memory.
        with_grads: gradients as well, which takes ``use_orig_params=True``.

        Raises UnsupportedError for options that exclude each other, and MisuseError during forward
        or backward and inside another such block.
        """
        if writeback and rank0_only:
            raise UnsupportedError(
                "writeback=True and rank0_only=True is not supported: ranks would differ. Pass "
                "writeback=False."
            )
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "offload_to_cpu=True with rank0_only=False keeps one copy of the parameters for "
                "every rank of a host in its memory. Pass rank0_only=True to keep one.",
                stacklevel=3,
            )
        instances: list[Wrapper] = wrappers_in(module)
        if with_grads and (offload_to_cpu or not all(i._use_orig_params for i in instances)):
            raise UnsupportedError(
                "with_grads=True takes use_orig_params=True and offload_to_cpu=False."
            )
        if not recurse and isinstance(module, Wrapper):
            instances = [module]
        elif not recurse:
            instances = wrappers_in(module, outermost=True)
        with _shown_whole(
            instances,
            WholeOptions(
                writeback=writeback,
                rank0_only=rank0_only,
                offload_to_cpu=offload_to_cpu,
                with_grads=with_grads,
            ),
        ):
            yield

    def apply(self: _Self, fn: Callable[[nn.Module], None]) -> _Self:
        """Apply a function to every module inside, with whole parameters. Collective."""
        if self._unit.is_whole:
            raise MisuseError(
                "apply() expects to be in the state IDLE, not SUMMON_FULL_PARAMS: it gathers whole "
                "parameters itself. Call it outside."
            )
        # This instance's alone: nested ones gather theirs when `nn.Module.apply` calls their apply.
        with _shown_whole([self], WholeOptions()):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters; inside `summon_full_params` by the names they had before wrapping."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (clean_name(name) if self._unit.is_whole else name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield buffers; inside `summon_full_params` by the names they had before wrapping."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (clean_name(name) if self._unit.is_whole else name), buffer


@contextlib.contextmanager
def _shown_whole(instances: Sequence[Wrapper], options: WholeOptions) -> Iterator[None]:
    for instance in instances:
        if instance.training_state is not TrainingState.IDLE:
            raise MisuseError("Cannot manually unshard parameters during forward/backward.")
    with whole_parameters([instance._unit for instance in instances], options):
        yield
