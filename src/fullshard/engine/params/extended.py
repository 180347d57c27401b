"""Gathering parameters that say themselves what travels.

A shard that is a tensor subclass (float8, int8 and the like), or a tensor with two methods patched
onto it, takes part in the all-gather through the protocol that PyTorch's FSDP defines:

    inputs, metadata = shard.fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, policy])
    tensor, inner = shard.fsdp_post_all_gather(outputs, metadata, param_dtype)       the first time
    shard.fsdp_post_all_gather(outputs, metadata, param_dtype, out=unsharded)        after that

``inputs`` are plain tensors of any dtypes; ``outputs`` are the same gathered along their first dim,
and the same tensors every time. ``inner`` are those that the result is made of: their memory is
freed with the outputs' while the parameter is sharded. Such shards stay where they are; the unit's
buffers know nothing of them. Everything travels as bytes in one all-gather: Gloo refuses float8.
"""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm.interface import Done, Work
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.errors import MisuseError
from fullshard.plan.layout import ALIGNMENT_NBYTES
from fullshard.policies import MixedPrecisionPolicy


@dataclasses.dataclass(slots=True)
class _Extended:
    """One such parameter: what it sends, and the memory of what it is made of."""

    param: DTensorParameter
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    metadata: Any = None
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    inner: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def ask(
        self,
        mesh: DeviceMesh | None,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        size: int,
    ) -> None:
        """Let the shard say what it sends."""
        param = self.param
        local: Any = param.local
        if local.device != device:
            local = local.to(device, non_blocking=True)  # offloaded
        num_arguments = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if num_arguments not in (1, 5):
            raise MisuseError(
                f"{param.name}: fsdp_pre_all_gather takes (mesh) or (mesh, outer_size, "
                f"outer_stride, module, mp_policy), not {num_arguments} arguments."
            )
        outer = torch.Size(param.shape)
        arguments = (mesh, outer, _contiguous_strides(outer), param.slots[0].module(), policy)
        inputs, self.metadata = local.fsdp_pre_all_gather(*arguments[:num_arguments])
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        self._check_padding(inputs, size)
        self.inputs = [tensor.detach().contiguous() for tensor in inputs]

    def _check_padding(self, inputs: Sequence[torch.Tensor], size: int) -> None:
        """Every rank has to send equally much, also of a parameter that divides unevenly."""
        dim, local = self.param.form.shard_dim, self.param.local
        rows = -(-self.param.shape[dim] // size)
        if local.dim() and local.size(dim) != rows:
            short = [tuple(t.shape) for t in inputs if t.shape == local.shape]
            if short:
                raise MisuseError(
                    f"{self.param.name} is divided unevenly: fsdp_pre_all_gather has to pad dim "
                    f"{dim} of what it returns to {rows}, but returned {short}."
                )

    def receive(self, pieces: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        """Take what was gathered (bytes, a row from each rank) and make the unsharded parameter."""
        size = pieces[0].size(0)
        if not self.outputs:
            self.outputs = [
                torch.empty(size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                for tensor in self.inputs
            ]
        # What autograd has saved views this memory, and must not see it written to.
        with torch.autograd._unsafe_preserve_version_counter(tuple(self.outputs)):
            for output, piece in zip(self.outputs, pieces, strict=True):
                _allocate(output)
                rows = output.view(torch.uint8).view(size, -1)
                rows.copy_(piece[:, : rows.size(1)])
        outputs = tuple(
            output.view(-1, *tensor.shape[1:])
            for output, tensor in zip(self.outputs, self.inputs, strict=True)
        )
        self.inputs = []
        param, metadata, self.metadata = self.param, self.metadata, None
        local: Any = param.local
        dtype = dtype if dtype is not None and param.sharded.is_floating_point() else None
        arguments = (outputs, metadata, dtype or param.sharded.dtype)
        if param.unsharded is not None:
            for tensor in self.inner:
                _allocate(tensor)
            local.fsdp_post_all_gather(*arguments, out=param.unsharded)
            return
        tensor, inner = local.fsdp_post_all_gather(*arguments)
        self.inner = list(inner)
        if tuple(tensor.shape) != param.shape:  # padded
            tensor = tensor.as_strided(param.shape, _contiguous_strides(param.shape), 0)
        param.create_unsharded(tensor)

    def free(self) -> None:
        for tensor in (*self.outputs, *self.inner):
            storage = tensor.untyped_storage()
            if storage.size() != 0:
                storage.resize_(0)


class ExtendedParameters:
    """The parameters of a unit that say themselves what travels."""

    def __init__(
        self,
        params: Sequence[DTensorParameter],
        mesh: DeviceMesh | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """mesh, group: over which they are sharded; None if that is no group or no mesh."""
        self._items = [_Extended(param) for param in params]
        self._mesh, self._device = mesh, device
        self._size = 1 if group is None else group.size()
        self._comm = None
        if group is not None and self._size > 1:
            self._comm = ProcessGroupComm(group, device)
        self._region: torch.Tensor | None = None  # bytes of all ranks, rank by rank

    def __len__(self) -> int:
        return len(self._items)

    @torch.no_grad()
    def start(self, policy: MixedPrecisionPolicy, label: str) -> Work:
        """Start gathering what they send."""
        source = self._inputs(policy)
        if self._comm is None:
            self._region = source
            return Done()
        self._region, work = self._comm.gather_bytes(source, label)
        return work

    def finish(self, policy: MixedPrecisionPolicy) -> None:
        """Make the unsharded parameters of what was gathered."""
        assert self._region is not None
        widths = [_width(tensor) for item in self._items for tensor in item.inputs]
        columns = iter(self._region.view(self._size, -1).split_with_sizes(widths, 1))
        with torch.inference_mode(False), torch.no_grad():
            for item in self._items:
                item.receive([next(columns) for _ in item.inputs], policy.param_dtype)
        self._region = None

    def _inputs(self, policy: MixedPrecisionPolicy) -> torch.Tensor:
        """Return the bytes that this rank sends: every input of every parameter, one by one."""
        for item in self._items:
            item.param.check_extension()
            item.ask(self._mesh, self._device, policy, self._size)
        tensors = [tensor for item in self._items for tensor in item.inputs]
        widths = [_width(tensor) for tensor in tensors]
        flat = torch.empty(sum(widths), dtype=torch.uint8, device=self._device)
        for tensor, piece in zip(tensors, flat.split_with_sizes(widths), strict=True):
            # Copied to a plain tensor, which works for subclasses as well.
            nbytes = tensor.numel() * tensor.itemsize
            piece[:nbytes].view(tensor.dtype).copy_(tensor.view(-1))
        return flat

    @property
    def gathering(self) -> list[torch.Tensor]:
        """What a gather under way fills."""
        return [] if self._region is None else [self._region]

    @property
    def memory(self) -> list[torch.Tensor]:
        """What unsharded parameters are made of."""
        return [tensor for item in self._items for tensor in (*item.outputs, *item.inner)]

    def free(self) -> None:
        self._region = None
        for item in self._items:
            item.free()


def _width(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor takes in what is sent, each beginning at its alignment."""
    return -(-tensor.numel() * tensor.itemsize // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def _allocate(tensor: torch.Tensor) -> None:
    storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
