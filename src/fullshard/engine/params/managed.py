"""One parameter in its two forms, and where it is registered.

[Note: Two forms] A managed parameter is two ``nn.Parameter`` objects. The *sharded* one is what
users, optimizers and state dicts see: a DTensor whose local tensor is this rank's shard, or a piece
of a flat buffer (see `flat_params`). The *unsharded* one has the original shape and the compute
dtype and takes its place on the modules from unshard to reshard; autograd accumulates into its
``.grad``. It is a plain tensor, or, if the parameter was a DTensor before it was sharded (tensor
parallel), a DTensor over the memory of this rank's part. Both live as long as the unit, so hooks
and optimizer references stay valid.
"""

import abc
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from fullshard.engine.params.form import ParamForm, Slot, with_dtype
from fullshard.errors import StateError
from fullshard.plan.layout import ParamSpec
from fullshard.policies import MixedPrecisionPolicy

_OWNER = "_fullshard_owner"  # on original and sharded parameters: who manages them
_MARKED = "_fullshard_marked"  # on the same: which object it is, for a copy has its attributes
STANDS_FOR = "_fullshard_stands_for"  # on unsharded parameters: who shows them


@dataclasses.dataclass(slots=True)
class Count:
    """How often something happened in this process."""

    value: int = 0


marks = Count()  # calls of `mark_owner`: until one more, sharded forms are what they were


class ManagedParameter(abc.ABC):
    """A parameter that a unit shards. See [Note: Two forms].

    shape: what is sharded over the shard axis: the parameter, or this rank's part of a DTensor.
    sharded: the sharded form. Its ``grad`` is the reduced gradient, unless ``holder`` has it.
    """

    sharded: nn.Parameter

    def __init__(self, original: nn.Parameter, slots: list[Slot], form: ParamForm) -> None:
        self.slots = slots
        self.form = form
        self.names = [slot.name for slot in slots]  # fully qualified once the root is known
        self.unsharded: nn.Parameter | None = None
        self.accumulated_grad: torch.Tensor | None = None  # of backwards that did not reduce
        self.shard_group: dist.ProcessGroup | None = None  # over which it is sharded
        self._required_grad = original.requires_grad  # when its forms agreed
        # What users want done to whole gradients: `register_hook` before sharding.
        self.gradient_hooks: Any = original._backward_hooks
        local = original._local_tensor if isinstance(original, DTensor) else original
        self.shape = tuple(local.shape)

    def copy(self, sharded: nn.Parameter, slots: list[Slot]) -> "ManagedParameter":
        """Return the same for a copy of the sharded parameter, registered elsewhere."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.slots, other.names, other.sharded = slots, list(self.names), sharded
        other.unsharded = other.accumulated_grad = other.gradient_hooks = None
        mark_owner(sharded, other)
        return other

    # What it is

    @property
    def name(self) -> str:
        return self.names[0] if self.names else self.slots[0].name

    @property
    @abc.abstractmethod
    def local(self) -> torch.Tensor:
        """This rank's shard."""

    @property
    @abc.abstractmethod
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""

    @property
    def is_only_registered(self) -> bool:
        """Whether showing one of its two forms is setting an entry of each module's dictionary."""
        return not any(slot.by_setattr for slot in self.slots)

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad

    @property
    def holder(self) -> "ShardHolder":
        """What the optimizer sees of it, and what its gradient is given to."""
        return self

    @property
    def is_extended(self) -> bool:
        """Whether the shard says itself what travels (``fsdp_pre_all_gather``), or has to."""
        return False

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        """Describe the parameter as it is now (its dtype may be changed until the first use)."""
        dtype = self.holder.sharded.dtype
        compute_dtype = policy.param_dtype if dtype.is_floating_point else None
        return ParamSpec(self.name, self.shape, dtype, compute_dtype or dtype, self.form.shard_dim)

    # Its gradient

    @abc.abstractmethod
    def wrap_shard(self, local: torch.Tensor) -> torch.Tensor:
        """Make a local tensor what the sharded form and its gradient are."""

    @property
    def local_grad(self) -> torch.Tensor | None:
        """This rank's part of the reduced gradient."""
        grad: Any = self.sharded.grad
        return grad

    @property
    def post_accumulate_hooks(self) -> list[Callable[[torch.Tensor], None]]:
        hooks = self.sharded._post_accumulate_grad_hooks
        return [*hooks.values()] if hooks else []

    def take_gradient(self) -> torch.Tensor | None:
        """Take what autograd accumulated: this rank's whole tensor, to be reduced.

        A DTensor's gradient is first brought to the placements of the parameter, but for partial
        sums over data-parallel axes, which the reduction completes.
        """
        if self.unsharded is None or self.unsharded.grad is None:
            return None
        grad: torch.Tensor = self.unsharded.grad
        self.unsharded.grad = None
        if self.form.unsharded is not None:
            if isinstance(grad, AsyncCollectiveTensor):
                grad = grad.wait()
            if not isinstance(grad, DTensor):
                raise StateError(
                    f"{self.name} is a DTensor, but its gradient is a {type(grad).__name__}. "
                    "Convert the module's inputs with DTensor.from_local (parallelize_module does)."
                )
            placements = tuple(
                has if axis in self.form.reduced_axes else wanted
                for axis, (has, wanted) in enumerate(
                    zip(grad.placements, self.form.unsharded.placements, strict=True)
                )
            )
            if placements != grad.placements:
                grad = grad.redistribute(placements=placements)
            grad = grad._local_tensor
            if isinstance(grad, AsyncCollectiveTensor):
                grad = grad.wait()
        if grad.layout is not torch.strided:
            raise StateError(
                f"{self.name}: its gradient is sparse, which cannot be reduced. Build the "
                "embedding with sparse=False."
            )
        return grad

    # Its forms

    def create_unsharded(self, tensor: torch.Tensor) -> None:
        """Make the unsharded form over this memory, or move it there."""
        with torch.inference_mode(False), torch.no_grad():
            if self.unsharded is None or self.unsharded.dtype != tensor.dtype:
                whole = tensor
                if self.form.unsharded is not None:
                    spec = with_dtype(self.form.unsharded, tensor.dtype)
                    whole = DTensor(tensor, spec, requires_grad=False)
                self.unsharded = nn.Parameter(whole, requires_grad=self.requires_grad)
                setattr(self.unsharded, STANDS_FOR, Reference(self))
                if self.gradient_hooks is not None:
                    # The same dictionary, so that removing a hook there removes it here.
                    self.unsharded._backward_hooks = self.gradient_hooks
            elif self.form.unsharded is not None:
                self.unsharded._local_tensor = tensor  # type: ignore[attr-defined]
            else:
                self.unsharded.data = tensor

    def show_sharded(self) -> None:
        for slot in self.slots:
            slot.register(self.sharded)

    def show_unsharded(self) -> None:
        unsharded = self.current_unsharded()
        for slot in self.slots:
            slot.register(unsharded)

    def current_unsharded(self) -> nn.Parameter:
        """Return the unsharded form, trainable if the sharded one is."""
        unsharded = self.unsharded
        assert unsharded is not None
        if unsharded.requires_grad != self.requires_grad:
            if self.requires_grad is self._required_grad and self.holder is self:
                self.sharded.requires_grad_(unsharded.requires_grad)  # what was in sight is frozen
            else:
                unsharded.requires_grad_(self.requires_grad)
        self._required_grad = self.requires_grad
        return unsharded

    @property
    def forms(self) -> tuple[nn.Parameter | None, ...]:
        return (self.sharded, self.unsharded)

    def replaces(self, parameter: nn.Parameter) -> bool:
        """Whether this manages what the parameter once was; copies have its marks, but are not it."""
        if parameter is self.sharded or parameter is self.holder.sharded:
            return False
        is_former = getattr(parameter, _MARKED, None) == id(parameter)
        return is_former or any(parameter is form for form in self.forms)

    @property
    def is_replaced(self) -> bool:
        """Whether something else than its own forms is registered."""
        current = self.slots[0].current
        return all(current is not form for form in self.forms)

    def has_moved(self, memory: torch.Tensor) -> bool:
        """Whether the registered parameter is another, or its shard lies elsewhere than there."""
        return self.is_replaced or not self.is_at(memory)

    @abc.abstractmethod
    def follow_replacement(self) -> None:
        """Take over a parameter that somebody registered in place of the sharded one."""

    @abc.abstractmethod
    def is_at(self, memory: torch.Tensor) -> bool:
        """Whether this rank's shard lies there."""

    @abc.abstractmethod
    def move_shard(self, target: torch.Tensor) -> None:
        """Make ``target`` the memory of this rank's shard, with the shard's value."""


class ShardHolder(Protocol):
    """What an optimizer updates, and what a reduced gradient is given to."""

    @property
    def sharded(self) -> nn.Parameter: ...

    @property
    def local(self) -> torch.Tensor: ...

    @property
    def local_grad(self) -> torch.Tensor | None: ...

    @property
    def post_accumulate_hooks(self) -> list[Callable[[torch.Tensor], None]]: ...

    def wrap_shard(self, local: torch.Tensor) -> torch.Tensor: ...


class Reference(weakref.ref["ManagedParameter"]):
    """A weak reference from a parameter, which may be pickled: what is read back has no manager."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _nobody, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Reference":
        return self


def _nobody() -> None:
    return None


def mark_owner(parameter: nn.Parameter, manager: ManagedParameter) -> None:
    """Note on a parameter who manages it."""
    marks.value += 1
    setattr(parameter, _OWNER, Reference(manager))
    setattr(parameter, _MARKED, id(parameter))


def manager_of(parameter: nn.Parameter) -> ManagedParameter | None:
    """Return who manages a parameter, given any of its forms."""
    return owner_of(parameter) or _deref(getattr(parameter, STANDS_FOR, None))


def owner_of(parameter: nn.Parameter) -> ManagedParameter | None:
    """Return who manages a parameter, given its original or its sharded form."""
    return _deref(getattr(parameter, _OWNER, None))


def _deref(reference: Any) -> ManagedParameter | None:
    return reference() if reference is not None else None
