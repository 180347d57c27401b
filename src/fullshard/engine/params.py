"""One parameter in its two forms, and where it is registered.

[Note: Two forms] A managed parameter is two ``nn.Parameter`` objects. The *sharded* one is a
DTensor whose local tensor is this rank's shard; it is what users, optimizers and state dicts see.
The *unsharded* one has the original shape and the compute dtype and takes its place on the modules
from unshard to reshard; autograd accumulates into its ``.grad``. Both live as long as the unit, so
hooks and optimizer references stay valid.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fullshard.plan.layout import ParamSpec
from fullshard.policies import MixedPrecisionPolicy

if TYPE_CHECKING:
    from fullshard.engine.unit import Unit

_OWNER = "_fullshard_owner"  # on original and sharded parameters: who manages them


class Slot:
    """A place where a parameter is registered: ``module.name``.

    Keeps the module's dictionary of parameters, not the module, so that there is no cycle and
    deleting a model frees its memory at once.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self._parameters = module._parameters
        # Such as nn.LSTM, which keeps lists of its weights up to date.
        self._by_setattr = type(module).__setattr__ is not nn.Module.__setattr__

    @property
    def current(self) -> nn.Parameter | None:
        return self._parameters.get(self.name)

    def register(self, parameter: nn.Parameter) -> None:
        module = self.module() if self._by_setattr else None
        if module is None:
            self._parameters[self.name] = parameter
        else:
            setattr(module, self.name, parameter)


class ManagedParameter:
    """A parameter that a unit shards. See [Note: Two forms]."""

    def __init__(
        self,
        original: nn.Parameter,
        slots: list[Slot],
        mesh: DeviceMesh,
        shard_dim: int,
    ) -> None:
        self.slots = slots
        self.names = [slot.name for slot in slots]  # fully qualified once the root is known
        self.shard_dim = shard_dim
        self.unit: weakref.ref[Unit] | None = None
        self.unsharded: nn.Parameter | None = None
        self._post_forward: nn.Parameter | None = None
        self.accumulated_grad: torch.Tensor | None = None  # of backwards that did not reduce
        self._spec = DTensorSpec(
            mesh,
            _placements(mesh, original, shard_dim),
            tensor_meta=TensorMeta(original.size(), original.stride(), original.dtype),
        )
        self.sharded = self._as_parameter(original.detach(), original.requires_grad)
        setattr(original, _OWNER, weakref.ref(self))

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.slots[0].name

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        return self.sharded._local_tensor  # type: ignore[attr-defined]

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad

    @property
    def is_replicated(self) -> bool:
        return not self._spec.shape

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        """Describe the parameter as it is now (its dtype may be changed until the first use)."""
        dtype = self.sharded.dtype
        compute_dtype = policy.param_dtype if dtype.is_floating_point else None
        shape = tuple(self.sharded.shape)
        return ParamSpec(self.name, shape, dtype, compute_dtype or dtype, self.shard_dim)

    def wrap_shard(self, local: torch.Tensor) -> DTensor:
        """Make a local tensor a DTensor that is sharded as this parameter is."""
        spec = self._spec
        if spec.tensor_meta is not None and spec.tensor_meta.dtype != local.dtype:
            meta = TensorMeta(spec.shape, spec.stride, local.dtype)
            spec = self._spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return DTensor(local, spec, requires_grad=False)

    def create_unsharded(self, view: torch.Tensor) -> None:
        """Make the unsharded form over this memory, or move it there."""
        with torch.inference_mode(False), torch.no_grad():
            if self.unsharded is None or self.unsharded.dtype != view.dtype:
                self.unsharded = nn.Parameter(view, requires_grad=self.requires_grad)
            else:
                self.unsharded.data = view

    def show_sharded(self) -> None:
        self._post_forward = None
        for slot in self.slots:
            slot.register(self.sharded)

    def show_unsharded(self) -> None:
        self._post_forward = None
        unsharded = self.unsharded
        assert unsharded is not None
        if unsharded.requires_grad != self.sharded.requires_grad:
            unsharded.requires_grad_(self.sharded.requires_grad)
        for slot in self.slots:
            slot.register(unsharded)

    @property
    def _forms(self) -> tuple[nn.Parameter | None, ...]:
        return (self.sharded, self.unsharded, self._post_forward)

    @property
    def is_replaced(self) -> bool:
        """Whether something else than its own forms is registered."""
        current = self.slots[0].current
        return all(current is not form for form in self._forms)

    def show_post_forward(self, local: torch.Tensor, mesh: DeviceMesh) -> None:
        """Register what is kept between forward and backward: a shard over a smaller group."""
        meta = TensorMeta(self._spec.shape, self._spec.stride, local.dtype)
        spec = DTensorSpec(mesh, (Replicate(), self._spec.placements[-1]), tensor_meta=meta)
        self._post_forward = nn.Parameter(
            DTensor(local, spec, requires_grad=False), requires_grad=self.requires_grad
        )
        for slot in self.slots:
            slot.register(self._post_forward)

    def follow_replacement(self) -> None:
        """Take over a parameter that somebody registered in place of the sharded one."""
        for slot in self.slots:
            current = slot.current
            if current is None or any(current is form for form in self._forms):
                continue
            if not isinstance(current, DTensor):
                with torch.no_grad():
                    current = self._as_parameter(current.detach(), current.requires_grad)
            self.sharded = current
            setattr(self.sharded, _OWNER, weakref.ref(self))
            break
        else:
            return
        self.show_sharded()

    def move_shard(self, target: torch.Tensor) -> None:
        """Make ``target`` the memory of this rank's shard, with the shard's value."""
        local = self.local
        if local is target:
            return
        with torch.no_grad():
            if not local.is_meta:
                target.copy_(local)
            self.sharded._local_tensor = target  # type: ignore[attr-defined]

    def _as_parameter(self, full: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        """Shard a whole tensor: a DTensor parameter with this rank's part of it."""
        mesh, placements = self._spec.mesh, self._spec.placements
        local = full
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                local = _chunk(full, placement.dim, mesh.size(axis), mesh.get_local_rank(axis))
        # A copy, so that the whole tensor can be freed; the unit's buffer takes it over.
        local = local.clone(memory_format=torch.contiguous_format)
        parameter = nn.Parameter(self.wrap_shard(local), requires_grad=requires_grad)
        setattr(parameter, _OWNER, weakref.ref(self))
        return parameter


def owner_of(parameter: nn.Parameter) -> ManagedParameter | None:
    """Return who manages a parameter, given its original or its sharded form."""
    reference: Any = getattr(parameter, _OWNER, None)
    return reference() if reference is not None else None


def _placements(mesh: DeviceMesh, original: nn.Parameter, shard_dim: int) -> tuple[Placement, ...]:
    innermost: Placement = Replicate() if original.dim() == 0 else Shard(shard_dim)
    return (*(Replicate() for _ in range(mesh.ndim - 1)), innermost)


def _chunk(full: torch.Tensor, dim: int, parts: int, part: int) -> torch.Tensor:
    """Return one part as ``torch.chunk`` cuts them, an empty one beyond the last."""
    rows = -(-full.size(dim) // parts)
    start = min(part * rows, full.size(dim))
    return full.narrow(dim, start, min(rows, full.size(dim) - start))
