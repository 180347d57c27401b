"""Parameters that define their own all-gather.

A shard that is a tensor subclass (float8, int8 and the like), or a tensor with two methods patched
onto it, takes part in the all-gather through the protocol that PyTorch's FSDP defines:

    inputs, metadata = shard.fsdp_pre_all_gather(mesh[, outer_size, outer_stride, module, policy])
    tensor, inner = shard.fsdp_post_all_gather(outputs, metadata, param_dtype)       the first time
    shard.fsdp_post_all_gather(outputs, metadata, param_dtype, out=unsharded)        after that

``inputs`` are plain tensors of any dtypes. ``outputs`` are the inputs of all ranks: those that have the
shard's shape are joined along the dim that the shard was cut along, others, such as scales, along their
first. They are the same tensors in every gather. ``inner`` are the tensors that the result
is made of: their memory is freed while the parameter is sharded, as that of the outputs is. A third
method, ``fsdp_should_release_all_gather_outputs_after_post_all_gather()``, may say that the result
needs the outputs no more; their memory is then freed at once. It is asked once.

Such shards stay where they are; the unit's `buffers` have no part of them. All inputs of all these
parameters travel as bytes in one all-gather: that is one call, and Gloo refuses float8.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fullshard.comm.interface import Done, Work
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.params.dtensor import RELEASES_OUTPUTS
from fullshard.engine.params.form import UnitMesh
from fullshard.engine.params.managed import ManagedParameter
from fullshard.errors import MisuseError, StateError
from fullshard.peers.groups import place_in
from fullshard.plan.layout import ALIGNMENT_NBYTES, round_up, rows_per_rank
from fullshard.policies import MixedPrecisionPolicy
from fullshard.torch_private import preserve_version_counters


@dataclasses.dataclass(slots=True)
class _Extended:
    """One such parameter.

    inputs, metadata: what its shard wants to send; from `ask` to `receive`.
    outputs, inner: the memory of the unsharded form, made in the first `receive`.
    releases: the outputs are freed as soon as the unsharded form was made of them.
    """

    param: ManagedParameter
    inputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    metadata: Any = None
    outputs: list[torch.Tensor] = dataclasses.field(default_factory=list)
    inner: list[torch.Tensor] = dataclasses.field(default_factory=list)
    releases: bool = False

    def __post_init__(self) -> None:
        """Ask whether the outputs may be freed. Raises MisuseError for another answer than a bool."""
        ask: Any = getattr(self.param.local, RELEASES_OUTPUTS, None)
        self.releases = False if ask is None else ask()
        if not isinstance(self.releases, bool):
            raise MisuseError(
                f"{self.param.name}: {RELEASES_OUTPUTS} must return a bool, got {type(self.releases)}."
            )

    def ask(
        self,
        mesh: DeviceMesh | None,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        size: int,
    ) -> None:
        """Let the shard say what it sends.

        size: ranks of the group. Raises StateError for a tensor subclass that does not define how it is
        gathered, MisuseError if its method takes other arguments than PyTorch's protocol, or does not
        pad a shorter shard.
        """
        param = self.param
        local: Any = param.local
        if not hasattr(local, "fsdp_pre_all_gather"):
            raise StateError(
                f"{param.name} is a {type(local).__name__}, which cannot be gathered as it is. "
                "Define fsdp_pre_all_gather and fsdp_post_all_gather on it, or pass the parameter "
                "in ignored_params."
            )
        if local.device != device:
            local = local.to(device, non_blocking=True)  # offloaded
        method = local.fsdp_pre_all_gather
        function = getattr(method, "__func__", method)
        num_arguments = _num_parameters(function) - (function is not method)
        if num_arguments not in (1, 5):
            raise MisuseError(
                f"{param.name}: fsdp_pre_all_gather takes (mesh) or (mesh, outer_size, "
                f"outer_stride, module, mp_policy), not {num_arguments} arguments."
            )
        outer = torch.Size(param.shape)
        policy = policy.resolved(param.form.compute_dtype)
        arguments = (mesh, outer, _contiguous_strides(outer), param.slots[0].module(), policy)
        inputs, self.metadata = method(*arguments[:num_arguments])
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        # All ranks have to send as much.
        dim = param.form.shard_dim
        rows = rows_per_rank(param.shape[dim], size)
        short = [tuple(each.shape) for each in inputs if each.shape == local.shape]
        if short and local.dim() and local.size(dim) != rows:
            raise MisuseError(
                f"{param.name} is divided unevenly: fsdp_pre_all_gather has to pad dim {dim} of what it "
                f"returns to {rows}, but returned {short}. If it cannot, cut a dim that {size} divides "
                "(shard_placement_fn), or leave the parameter an ordinary one."
            )
        # Held until `receive`, which reads their shapes; their bytes are copied before that.
        self.inputs = [tensor.detach().contiguous() for tensor in inputs]

    def receive(self, pieces: Sequence[torch.Tensor], dtype: torch.dtype | None) -> None:
        """Copy the gathered bytes to the outputs and make the unsharded parameter of them.

        pieces: for each input, a uint8 matrix with one row per rank; rows may be padded.
        dtype: the ``param_dtype`` of the policy.
        """
        size = pieces[0].size(0)
        if not self.outputs:
            self.outputs = [
                torch.empty(size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
                for tensor in self.inputs
            ]
        outputs = []
        # Tensors that autograd has saved may be views of the outputs, whatever the shard's method
        # has made of them. Without this, backward would raise "modified by an inplace operation".
        with preserve_version_counters(tuple(self.outputs)):
            for output, tensor, piece in zip(self.outputs, self.inputs, pieces, strict=True):
                _allocate(output)
                dim = self._joined_dim(tensor)
                nbytes, outer = tensor.numel() * tensor.itemsize, math.prod(tensor.shape[:dim])
                parts = piece[:, :nbytes].unflatten(1, (outer, nbytes // max(outer, 1)))
                whole = output.view(torch.uint8).view(outer, size, parts.size(2))
                whole.transpose(0, 1).copy_(parts)
                shape = [*tensor.shape] or [1]
                shape[dim] *= size
                outputs.append(output.view(shape))
        self.inputs = []  # they may be as large as the shard
        param, metadata, self.metadata = self.param, self.metadata, None
        local: Any = param.local
        dtype = dtype if dtype is not None and param.sharded.is_floating_point() else None
        arguments = (tuple(outputs), metadata, dtype or param.sharded.dtype)
        if param.unsharded is not None:
            # By the protocol, the result is written to the memory that the last one had; the
            # parameter and autograd's graph go on to refer to it.
            for tensor in self.inner:
                _allocate(tensor)
            local.fsdp_post_all_gather(*arguments, out=param.unsharded)
        else:
            tensor, inner = local.fsdp_post_all_gather(*arguments)
            self.inner = list(inner)
            # A parameter that divides unevenly was gathered with padding, which is cut off at the end.
            if tuple(tensor.shape) != param.shape:
                tensor = tensor.as_strided(param.shape, _contiguous_strides(param.shape), 0)
            param.create_unsharded(tensor)
        if self.releases:
            _free(self.outputs)

    def _joined_dim(self, tensor: torch.Tensor) -> int:
        """Return the dim along which an input of all ranks is joined."""
        # Only dim 0 may be divided unevenly, and be padded to another shape than the shard's.
        return self.param.form.shard_dim if tensor.shape == self.param.local.shape else 0


class ExtendedParameters:
    """The parameters of a unit that define their own all-gather."""

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        mesh: UnitMesh,
        device: torch.device,
    ) -> None:
        """Prepare gathers over the shard axis."""
        self._items = [_Extended(param) for param in params]
        self._mesh, self._device = mesh.shard_mesh, device
        group = mesh.shard_group
        self._size = place_in(group).size
        self._comm = None
        if group is not None and self._size > 1:
            self._comm = ProcessGroupComm(group, device)
        # From `start` to `finish`: the bytes of all ranks, one rank's after the other's.
        self._region: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._items)

    @torch.no_grad()
    def start(self, policy: MixedPrecisionPolicy, label: str) -> Work:
        """Start the all-gather of everything they send. Collective, with more than one rank."""
        source = self._inputs(policy)
        if self._comm is None:
            self._region = source
            return Done()
        self._region, work = self._comm.gather_bytes(source, label)
        return work

    def finish(self, policy: MixedPrecisionPolicy) -> None:
        """Make the unsharded parameters of what was gathered, once the work of `start` is done."""
        assert self._region is not None
        widths = [_width(tensor) for item in self._items for tensor in item.inputs]
        columns = iter(self._region.view(self._size, -1).split_with_sizes(widths, 1))
        with torch.inference_mode(False), torch.no_grad():
            for item in self._items:
                dtype = item.param.form.compute_dtype or policy.param_dtype
                item.receive([next(columns) for _ in item.inputs], dtype)
        self._region = None

    def _inputs(self, policy: MixedPrecisionPolicy) -> torch.Tensor:
        """Return the bytes that this rank sends: every input of every parameter, aligned and joined."""
        for item in self._items:
            item.ask(self._mesh, self._device, policy, self._size)
        tensors = [tensor for item in self._items for tensor in item.inputs]
        widths = [_width(tensor) for tensor in tensors]
        flat = torch.empty(sum(widths), dtype=torch.uint8, device=self._device)
        for tensor, piece in zip(tensors, flat.split_with_sizes(widths), strict=True):
            # The target is a plain tensor, viewed in the input's dtype: copying to one works for
            # subclasses as well, viewing a subclass as bytes need not.
            nbytes = tensor.numel() * tensor.itemsize
            piece[:nbytes].view(tensor.dtype).copy_(tensor.view(-1))
        return flat

    @property
    def gathering(self) -> list[torch.Tensor]:
        """The memory that a gather under way fills."""
        return [] if self._region is None else [self._region]

    @property
    def gathered_nbytes(self) -> int:
        """The bytes of all ranks' inputs; 0 before the first gather."""
        return sum(output.nbytes for item in self._items for output in item.outputs)

    @property
    def memory(self) -> list[torch.Tensor]:
        """The memory of unsharded parameters, whether it is allocated now or not."""
        return [tensor for item in self._items for tensor in (*item.outputs, *item.inner)]

    def free(self) -> None:
        """Free the memory of the unsharded parameters. See `buffers`, [Note: Freed under its tensors]."""
        self._region = None
        _free(self.memory)


@functools.lru_cache(maxsize=64)  # a third of the host's time for a gather, if looked up each time
def _num_parameters(function: Callable[..., Any]) -> int:
    return len(inspect.signature(function).parameters)


def _width(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a rank's part, rounded up to the alignment."""
    return round_up(tensor.numel() * tensor.itemsize, ALIGNMENT_NBYTES)


def _allocate(tensor: torch.Tensor) -> None:
    """Allocate the storage under a tensor again, if it was freed."""
    storage, nbytes = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    if storage.size() != nbytes:
        storage.resize_(nbytes)


def _free(tensors: Sequence[torch.Tensor]) -> None:
    """Free the storages under tensors."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size() != 0:
            storage.resize_(0)


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
