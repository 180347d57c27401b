"""Methods of `FullyShardedDataParallel` for gradients: zeroing, accumulating, clipping."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import torch

from fullshard.errors import MisuseError, ShardingError, StateError
from fullshard.fsdp1.options import (
    HYBRID_SHARDING_STRATEGIES,
    NO_RESHARD_AFTER_FORWARD_STRATEGIES,
)
from fullshard.fsdp1.wrapper import Wrapper, wrappers_in
from fullshard.optim.grad_norm import clip_grad_norm_
from fullshard.policies import CommHook


class WithGradients(Wrapper):
    """A wrapper with methods for the gradients of all instances in it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients, of parameters that an exception left unsharded as well."""
        super().zero_grad(set_to_none)
        for instance in wrappers_in(self):
            if not instance._unit.is_sharded:
                instance._unit.zero_gradients(set_to_none=set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients unreduced inside the block; the next backward outside of it reduces all.

        Costs the memory of whole gradients. Raises RuntimeError on an instance that is not the
        root.
        """
        if not self.check_is_root():
            raise StateError(
                "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on "
                "root FSDP module."
            )
        instances = wrappers_in(self)
        if not all(instance._unit.config.reduce_grads for instance in instances):
            raise MisuseError("Already in no_sync(): one context is enough.")
        before = []
        for instance in instances:
            reshards = instance.sharding_strategy not in NO_RESHARD_AFTER_FORWARD_STRATEGIES
            unsynced = {
                "reduce_grads": False,
                "all_reduce_grads": False,
                "reshard_after_backward": reshards,
            }
            before.append({name: getattr(instance._unit.config, name) for name in unsynced})
            instance._unit.configure(**unsynced)
        try:
            yield
        finally:
            # These options alone: the first forward inside of this decides on others.
            for instance, options in zip(instances, before, strict=True):
                instance._unit.configure(**options)

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most ``max_norm``.

        norm_type: 1, 2, any p, or infinity. Returns the norm before scaling as a 0-dim tensor, the
        same on every rank, in the widest dtype of the gradients. Every rank has to call it. Raises
        RuntimeError on an instance that is not the root.
        """
        if not self.check_is_root():
            raise StateError("`clip_grad_norm_()` should only be called on the root FSDP instance")
        parameters = list(self.parameters())
        dtypes = [p.grad.dtype for p in parameters if p.grad is not None]
        trained = [p for p in parameters if p.requires_grad] or parameters
        if not dtypes and any(p.numel() for p in trained):
            warnings.warn(
                f"called FSDP.clip_grad_norm_() on rank {self.rank} with no gradients -- returning "
                "the total norm in the default dtype torch.float32",
                stacklevel=2,
            )
        norm = clip_grad_norm_(parameters, float(max_norm), float(norm_type))
        return norm.to(
            functools.reduce(torch.promote_types, dtypes, dtypes[0] if dtypes else torch.float32)
        )

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Reduce gradients by ``hook(state, grads, shard)`` from now on.

        grads: this rank's flat gradients, undivided; shard: to be filled with this rank's part of
        the result. Where nothing is sharded, ``hook(state, grads)`` reduces them in place. Hooks
        are those of ``torch.distributed.algorithms._comm_hooks``. Raises AssertionError on an
        instance that is not the root, and for hybrid strategies.
        """
        if not self.check_is_root():
            raise MisuseError("register_comm_hook can only be called on a root instance.")
        if not callable(hook):
            raise ShardingError(f"The communication hook must be callable but got {hook}")
        for instance in wrappers_in(self):
            if instance.sharding_strategy in HYBRID_SHARDING_STRATEGIES:
                raise MisuseError(
                    "Communication hook is currently not supported for hybrid strategies, of which "
                    f"{instance.sharding_strategy} is one."
                )
            if instance._unit.config.comm_hook is not None:
                raise MisuseError("A communication hook is already registered")
            instance._unit.configure(comm_hook=CommHook(state, hook))
