"""Parameters that are sharded one by one: the sharded form is a DTensor."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fullshard.engine.params.form import ParamForm, with_dtype
from fullshard.engine.params.managed import (
    STANDS_FOR,
    ManagedParameter,
    Reference,
    Slot,
    local_of,
    mark_owner,
    said_grad_dtype,
)
from fullshard.errors import MisuseError, ShardingError, StateError
from fullshard.plan.gradient_dtypes import GradientDtypes, gradient_dtypes
from fullshard.plan.layout import rows_per_rank
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig
from fullshard.process_hooks import at_first_use, handle_operator
from fullshard.torch_private import DTensorSpec, TensorMeta

_PRE_ALL_GATHER, _POST_ALL_GATHER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
RELEASES_OUTPUTS = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class DTensorParameter(ManagedParameter):
    """A parameter whose sharded form is a DTensor over the data-parallel mesh, or a larger one.

    The DTensor's local tensor is this rank's rows of ``shape`` along ``form.shard_dim``, as
    ``torch.chunk`` cuts them.

    is_offloaded: the shard is on the host, wherever the parameter is that it is cut from.
    own_grad_dtype: what users said of the dtype of its gradients.
    """

    def __init__(
        self,
        original: nn.Parameter,
        slots: list[Slot],
        form: ParamForm,
        mesh: MeshPlan,
        *,
        is_offloaded: bool = False,
    ) -> None:
        super().__init__(original, slots, form)
        self._is_offloaded = is_offloaded
        self._post_forward: nn.Parameter | None = None
        self._mesh = mesh
        assert form.spec is not None
        self._spec = form.spec
        self._specs: dict[torch.dtype, DTensorSpec] = {}  # the same, by dtype of the local tensor
        self.sharded = self._as_parameter(local_of(original.detach()), original.requires_grad)
        if original._post_accumulate_grad_hooks:
            # The same dictionary, so that removing a hook there removes it here.
            self.sharded._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
        self.own_grad_dtype = said_grad_dtype(original)
        self.follow_grad_dtype()
        mark_owner(original, self)
        self._shard_shape = self.local.shape

    def copy(self, sharded: nn.Parameter, slots: list[Slot]) -> ManagedParameter:
        other = super().copy(sharded, slots)
        other.follow_grad_dtype()  # ``deepcopy`` does not copy it
        return other

    @property
    def local(self) -> torch.Tensor:
        return self.sharded._local_tensor  # type: ignore[attr-defined]

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return tuple(self.local.shape)

    @property
    def local_grad(self) -> torch.Tensor | None:
        grad: Any = self.sharded.grad
        return None if grad is None else grad._local_tensor

    @property
    def is_extended(self) -> bool:
        return has_extension(self.local, self.name) or type(self.local) is not torch.Tensor

    def wrap_shard(self, local: torch.Tensor) -> DTensor:
        # Gradients may have another dtype than shards, and `model.half()` changes that of shards.
        spec = self._specs.get(local.dtype)
        if spec is None:
            spec = self._specs[local.dtype] = with_dtype(self._spec, local.dtype)
        return DTensor(local, spec, requires_grad=False)

    def show_sharded(self) -> None:
        self._post_forward = None
        super().show_sharded()

    def show_unsharded(self) -> None:
        self._post_forward = None
        super().show_unsharded()

    @property
    def forms(self) -> tuple[nn.Parameter | None, ...]:
        return (*super().forms, self._post_forward)

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        dim, rank = self.form.shard_dim, self._mesh.shard_rank
        # As `torch.chunk` cuts them, with an empty one beyond the last.
        rows = rows_per_rank(full.size(dim), self._mesh.shard_size)
        start = min(rank * rows, full.size(dim))
        if type(full) not in (torch.Tensor, nn.Parameter) and full.size(dim):
            # What PyTorch's FSDP asks of subclasses: NF4 tensors cannot be sliced.
            parts = full.split(rows, dim)
            if len(parts) != -(-full.size(dim) // rows):
                raise ShardingError(
                    f"{self.name}: {type(full).__name__}.split({rows}, {dim}) gave {len(parts)} parts of shape "
                    f"{tuple(parts[0].shape)}, for {self._mesh.shard_size} ranks. It needs a size that they divide."
                )
            if rank < len(parts):
                return parts[rank]
        return full.narrow(dim, start, min(rows, full.size(dim) - start))

    def show_post_forward(self, local: torch.Tensor, mesh: DeviceMesh) -> None:
        """Register a shard over a smaller group, which is kept from forward to backward.

        local: this rank's shard over the group, in the compute dtype.
        mesh: 2-D, of all data-parallel ranks; the last axis is the group.
        """
        meta = TensorMeta(self._spec.shape, self._spec.stride, local.dtype)
        spec = DTensorSpec(mesh, (Replicate(), self._spec.placements[-1]), tensor_meta=meta)
        self._post_forward = nn.Parameter(
            DTensor(local, spec, requires_grad=False), requires_grad=self.requires_grad
        )
        setattr(self._post_forward, STANDS_FOR, Reference(self))
        for slot in self.slots:
            slot.register(self._post_forward)

    def follow_replacement(self) -> None:
        current = self.replacement()
        if current is None:
            return
        if not isinstance(current, DTensor):
            if self.form.unsharded is not None:
                raise StateError(
                    f"{self.name} was replaced by a plain tensor, but it is a DTensor over "
                    f"{self._spec.mesh}. Distribute the new one over that mesh."
                )
            with torch.no_grad():
                current = self._as_parameter(current.detach(), current.requires_grad)
        self.sharded = current
        mark_owner(self.sharded, self)
        self.show_sharded()

    def gradient_dtypes(
        self, config: UnitConfig, seen: torch.dtype | None = None
    ) -> GradientDtypes:
        self.follow_grad_dtype()
        return gradient_dtypes(
            self.spec(config.mp_policy),
            self.own_grad_dtype,
            reduce_dtype=config.mp_policy.reduce_dtype,
            follows_param=config.gradients_follow_parameter,
            # `take_gradient` completes partial sums where the parameter is whole.
            reduces_elsewhere=self.form.reduces_elsewhere,
            seen=seen,
        )

    def follow_grad_dtype(self) -> None:
        said = said_grad_dtype(self.sharded)
        if said.is_set:
            self.own_grad_dtype = said
        elif self.own_grad_dtype.is_set:
            self.sharded.grad_dtype = self.own_grad_dtype.dtype

    def is_at(self, memory: torch.Tensor) -> bool:
        return self.local is memory

    def has_moved(self, memory: torch.Tensor) -> bool:
        sharded = self.sharded
        if memory.shape != self._shard_shape:
            raise StateError(
                f"{self.name}: the local tensor of its shard was changed in place to shape {tuple(memory.shape)}, "
                f"but this rank owns {tuple(self._shard_shape)} of it, and the rest is other parameters' memory. "
                "Write values into it (copy_), and leave its shape as it is."
            )
        # Asked of every parameter in every forward, and this is nearly always the answer. So it goes
        # without the properties that the general case reads.
        if sharded._local_tensor is memory:  # type: ignore[attr-defined]
            for slot in self.slots:
                if slot.registry.get(slot.name) is not sharded:
                    break
            else:
                return False
        return super().has_moved(memory)

    def move_shard(self, target: torch.Tensor) -> None:
        local = self.local
        if local is target:
            return
        with torch.no_grad():
            if not local.is_meta:
                target.copy_(local)
            self._shard_shape = target.shape
            # Set, not copied: `is_at` looks for this very tensor. The DTensor around it stays the
            # object that optimizers refer to.
            self.sharded._local_tensor = target  # type: ignore[attr-defined]

    def _as_parameter(self, full: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        """Return a DTensor parameter with this rank's shard of a whole tensor, in new memory."""
        part = self.own_part(full)
        # A view would keep the whole tensor alive. This copy lives until `move_shard` has copied it
        # to the unit's memory, which does not exist yet.
        local = part.new_zeros(part.shape).copy_(part)
        if self._is_offloaded and not local.is_meta:
            local = local.cpu()  # before the DTensor is made, which notes where it is
        parameter = nn.Parameter(self.wrap_shard(local), requires_grad=requires_grad)
        mark_owner(parameter, self)
        return parameter


def _eye_into_shards(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Write this rank's part of an identity matrix, as ``torch.eye(n, m, out=parameter)`` asks.

    torch 2.13 resizes the local tensor to the whole shape, so that it claims memory of others.
    """
    out: DTensor = kwargs["out"]
    if tuple(args) != tuple(out.shape):
        raise MisuseError(
            f"torch.eye{args} does not fit into a sharded tensor of shape {tuple(out.shape)}."
        )
    whole = torch.eye(*args, dtype=out.dtype, device=out.device)
    part = distribute_tensor(whole, out.device_mesh, out.placements, src_data_rank=None)
    out._local_tensor.copy_(part._local_tensor)
    return out


@at_first_use
def _handle_eye() -> None:
    handle_operator(
        torch.ops.aten.eye.m_out, _eye_into_shards, why="torch's own gives a shard the whole shape"
    )


def has_extension(local: torch.Tensor, name: str) -> bool:
    """Return whether a shard defines its own all-gather, by two methods.

    Raises MisuseError if it has only one of them, or a third one without both.
    """
    has = [hasattr(local, method) for method in (_PRE_ALL_GATHER, _POST_ALL_GATHER)]
    if any(has) and not all(has):
        raise MisuseError(
            f"{name}: Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions, but {type(local).__name__} has only one."
        )
    if not has[0] and hasattr(local, RELEASES_OUTPUTS):
        raise MisuseError(
            f"{name}: {RELEASES_OUTPUTS} requires fsdp_pre_all_gather and fsdp_post_all_gather to be "
            f"defined, but {type(local).__name__} has neither."
        )
    return has[0]
