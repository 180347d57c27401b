"""Collectives that users may replace: one all-gather and one reduce-scatter per unit and dtype.

``AllGather`` and ``ReduceScatter`` are PyTorch's interfaces: objects that allocate the memory that
a collective works on, and call the collective. `CollectivesComm` moves each bucket of a unit as a
whole through such objects. They are called as PyTorch's FSDP would call them, with two 1-D buffers
and a group. Sums are plain sums in the dtype that travels; dividing is done outside of them.
"""

import abc
import math
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist

from fullshard.comm.calls import all_gather, reduce_scatter
from fullshard.comm.interface import Comm, Done, ShardBuffer, Sum, Work
from fullshard.comm.packing import Region, copy_in_gradients
from fullshard.comm.process_group import Pending, ProcessGroupComm
from fullshard.peers.groups import backend_of
from fullshard.peers.waits import naming_lost_ranks
from fullshard.plan.layout import BucketLayout, DirectRule
from fullshard.policies import CommHook
from fullshard.torch_private import symmetric_memory

_ReduceOp = dist.ReduceOp | dist.ReduceOp.RedOpType


class CommBuffer(abc.ABC):
    """An allocator of the memory that a collective works on."""

    @abc.abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return uninitialised memory of this shape for one collective."""

    def _map(self, *tensors: torch.Tensor) -> None:  # noqa: B027
        """Make tensors reachable on all ranks, before a collective that needs that. Every rank must call it."""


class AllGather(CommBuffer):
    """An all-gather. ``input_tensor`` is a view of this rank's part of ``output_tensor``."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather. Return the work to wait for, or None if the current stream may use the result."""


class ReduceScatter(CommBuffer):
    """A reduce-scatter of sums. Both tensors come from ``allocate``."""

    @abc.abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce. Return the work to wait for, or None if the current stream may use the result."""


class _DefaultMemory(CommBuffer):
    """Memory from PyTorch's default allocator of the device."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _ProcessGroupMemory(_DefaultMemory):
    """Memory from the process group's own allocator, such as NCCL's for registered buffers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend = backend_of(self._group, device)
        if not backend.supports_tensor_alloc(device):
            return super().allocate(size, dtype=dtype, device=device)
        allocated: torch.Tensor = backend.allocate_tensor(
            math.prod(size), dtype=dtype, device=device
        )
        return allocated


class _SymmetricMemory(_DefaultMemory):
    """Symmetric memory, which NCCL maps on all ranks of the group."""

    def __init__(self, group: dist.ProcessGroup, backend: Literal["NCCL"] = "NCCL") -> None:
        self._group = group
        symmetric_memory.set_backend(backend)
        # NCCL makes its communicator at the first collective, and mapping memory needs one.
        dist.barrier(group=group)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # From a pool, so that memory is mapped once and used again.
        with torch.cuda.use_mem_pool(symmetric_memory.get_mem_pool(device)):
            return super().allocate(size, dtype=dtype, device=device)

    def _map(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            symmetric_memory.rendezvous(tensor, group=self._group.group_name)


class _GatherCall(AllGather):
    """The call of ``torch.distributed``'s all-gather; subclasses add the memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._map(output_tensor)
        return all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceCall(ReduceScatter):
    """The call of ``torch.distributed``'s reduce-scatter; subclasses add the memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: _ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._map(input_tensor, output_tensor)
        return reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class DefaultAllGather(_DefaultMemory, _GatherCall):
    """``torch.distributed``'s all-gather on memory of the default allocator."""


class ProcessGroupAllocAllGather(_ProcessGroupMemory, _GatherCall):
    """``torch.distributed``'s all-gather on memory of the group's own allocator, if it has one."""


class SymmMemAllGather(_SymmetricMemory, _GatherCall):
    """All-gather on symmetric memory, for which NCCL has copy-engine and symmetric kernels."""


class DefaultReduceScatter(_DefaultMemory, _ReduceCall):
    """``torch.distributed``'s reduce-scatter on memory of the default allocator."""


class ProcessGroupAllocReduceScatter(_ProcessGroupMemory, _ReduceCall):
    """``torch.distributed``'s reduce-scatter on memory of the group's allocator, if it has one."""


class SymmMemReduceScatter(_SymmetricMemory, _ReduceCall):
    """Reduce-scatter on symmetric memory."""


class CollectivesComm(ProcessGroupComm):
    """Communication that moves each bucket as a whole, by objects that users may replace.

    gather, reduce: the objects; by default, those that call ``torch.distributed``.
    """

    joins_dtypes = True
    wants_means = True  # users' objects may rely on ``op``, or not look at it

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        gather: AllGather | None = None,
        reduce: ReduceScatter | None = None,
    ) -> None:
        super().__init__(group, device, in_own_group=False)
        self.name = f"collectives ({self.backend})"
        self.tells_presence = False  # no collectives besides those that PyTorch's engine makes
        self.rule = DirectRule(min_nbytes=sys.maxsize)  # everything is packed
        self.gather = gather or DefaultAllGather()
        self.reduce = reduce or DefaultReduceScatter()

    @property
    def is_stock(self) -> bool:
        """Whether both objects are of classes of this module, not a user's."""
        return {type(self.gather).__module__, type(self.reduce).__module__} == {__name__}

    def over(self, group: dist.ProcessGroup) -> "CollectivesComm":
        return CollectivesComm(group, self.device, self.gather, self.reduce)

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, label: str, offset: int = 0
    ) -> Work:
        bucket, flat = shards.bucket, shards.flat
        assert flat is not None
        assert offset == 0
        if bucket.unsharded_numel == 0:
            return Done()
        self.enter(label, bucket.unsharded_numel * unsharded.itemsize)
        # A flat bucket goes straight into its unsharded buffer. Of others everything is packed, so the packed
        # region is all of the bucket. The input lies inside the output, as PyTorch's interface wants it.
        region, numel = unsharded, flat.numel()
        if not bucket.is_flat:
            size = (self.size * numel,)
            region = self.gather.allocate(size, dtype=unsharded.dtype, device=unsharded.device)
        part = region.narrow(0, self.rank * numel, numel)
        part.copy_(flat, non_blocking=True)
        with naming_lost_ranks(self.group, label):
            work = self.gather(
                output_tensor=region, input_tensor=part, group=self.group, async_op=True
            )

        def finish() -> tuple[bool, ...]:
            if region is not unsharded:
                shards.landing(unsharded).copy_out(Region(region))
            return ()

        held = () if region is unsharded else (region,)
        return Pending([work], finish, held, self, label)

    # Each bucket by itself, through the user's object.
    gather_unit = Comm.gather_unit

    def accumulate_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        return reduce_dtype  # summed as it travels

    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: Callable[[], torch.Tensor],
        how: Sum,
    ) -> Work:
        numel, result = bucket.shard_numel, out()
        self.enter(how.label, self.size * numel * result.itemsize)
        dtype, device = result.dtype, result.device
        region = self.reduce.allocate((self.size * numel,), dtype=dtype, device=device)
        region.zero_()  # users' memory is uninitialised, and padding is summed too
        copy_in_gradients(bucket, grads, region, divisor=how.scaling.before)
        total = self.reduce.allocate((numel,), dtype=dtype, device=device)
        averages = how.may_average and how.scaling.after == self.size
        with naming_lost_ranks(self.group, how.label):
            work = self.reduce(
                output_tensor=total,
                input_tensor=region,
                group=self.group,
                op=dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM,
                async_op=True,
            )

        present = tuple(grad is not None for grad in grads)

        # Always a copy: `total` is the user's memory, `result` the unit's.
        def finish() -> tuple[bool, ...]:
            torch.div(total, 1.0 if averages else how.scaling.after, out=result)
            return present

        return Pending([work], finish, (region, total), self, how.label)


def reduce_by_hook(
    hook: CommHook, bucket: BucketLayout, grads: Sequence[torch.Tensor | None], out: torch.Tensor
) -> Work:
    """Let a user's function (a communication hook) reduce a flat bucket's gradients; ``out`` gets this rank's shard.

    The hook gets undivided gradients in ``out``'s dtype and has to divide them itself. With one
    rank it is called with one tensor, which it reduces in place; otherwise with the full gradients
    and the tensor for the result, both 1-D.
    """
    # A tensor of its own over the same memory: a hook may set `result.data` to other memory, as
    # PyTorch's compressing hooks do, and `out` is the caller's.
    result = out.detach()
    if bucket.shard_size == 1:
        copy_in_gradients(bucket, grads, out)
        hook.function(hook.state, result)
    else:
        region = torch.empty(bucket.unsharded_numel, dtype=out.dtype, device=out.device)
        copy_in_gradients(bucket, grads, region)
        hook.function(hook.state, region, result)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)
    return Done(tuple(grad is not None for grad in grads))
