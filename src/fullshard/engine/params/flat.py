"""Parameters whose shards are pieces of a flat buffer.

A flat unit's parameters lie end to end in one buffer, which is cut into equal shards wherever that
falls: a rank may own some elements of a parameter, all or none. Two forms show that to the user:

    pieces   every parameter stays the ``nn.Parameter`` it was; while sharded, its ``data`` is this
             rank's piece, 1-D (or of its own shape, if one rank has all of it)
    hidden   modules have no parameters, only tensors; one 1-D ``nn.Parameter`` for the whole buffer,
             the `FlatParameter`, is registered on the unit's module and trained

Optimizers see plain tensors either way.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fullshard.engine.params.form import ParamForm, Slot
from fullshard.engine.params.managed import ManagedParameter, Reference, ShardHolder, mark_owner
from fullshard.engine.params.resharded import forbid_use
from fullshard.errors import StateError
from fullshard.plan.layout import ParamSpec, Piece, Shape
from fullshard.policies import MixedPrecisionPolicy

FLAT_PARAM = "_flat_param"  # under which a flat parameter is registered


class FlatParameter(nn.Parameter):
    """This rank's shard of all parameters of a unit, 1-D, padding included."""


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedPiece:
    """What a rank owns of a parameter: a piece, or nothing, and the shape it is shown in."""

    piece: Piece | None
    shape: Shape

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """View the piece of a whole tensor."""
        start, numel = (self.piece.param_start, self.piece.numel) if self.piece else (0, 0)
        return full.reshape(-1)[start : start + numel].view(self.shape)


class PieceParameter(ManagedParameter):
    """A parameter that shows this rank's piece of it."""

    def __init__(
        self, original: nn.Parameter, slots: list[Slot], form: ParamForm, owned: OwnedPiece
    ) -> None:
        super().__init__(original, slots, form)
        self.owned = owned
        self._trainable = original.requires_grad
        self._hidden_grad: torch.Tensor | None = None  # while the whole parameter is shown
        self._whole: nn.Parameter | None = None
        full = original.detach()
        local = full._local_tensor if isinstance(full, DTensor) else full
        self.sharded = self._keep(original, owned.of(local).clone())
        mark_owner(original, self)
        mark_owner(self.sharded, self)

    def _keep(self, original: nn.Parameter, piece: torch.Tensor) -> nn.Parameter:
        """Return the sharded form: the parameter itself, for optimizers that refer to it."""
        if isinstance(original, DTensor):
            return nn.Parameter(piece, requires_grad=original.requires_grad)
        original._backward_hooks = None  # the unsharded form has them: they are of whole gradients
        original.data = piece
        return original

    @property
    def local(self) -> torch.Tensor:
        return self.sharded

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.owned.shape

    @property
    def post_accumulate_hooks(self) -> list[Callable[[torch.Tensor], None]]:
        optimizers = getattr(self.sharded, "_in_backward_optimizers", None)
        if not optimizers:
            return super().post_accumulate_hooks
        return [*super().post_accumulate_hooks, lambda _: _step(optimizers)]

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        return dataclasses.replace(super().spec(policy), trainable=self._trainable)

    def wrap_shard(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def follow_replacement(self) -> None:
        for slot in self.slots:
            current = slot.current
            if current is None or any(current is form for form in self.forms):
                continue
            if current.shape == self.shape:
                current.data = self.owned.of(current.data).clone()
            elif current.shape != self.owned.shape:
                raise StateError(
                    f"Cannot writeback when the parameter shape changes: {self.name} was replaced "
                    f"by one of shape {tuple(current.shape)}. Give it {self.shape}, or "
                    f"{self.owned.shape}, which this rank has of it."
                )
            self.sharded = current
            mark_owner(current, self)
            break
        else:
            return
        self.show_sharded()

    def is_at(self, memory: torch.Tensor) -> bool:
        shard = self.sharded
        return (
            shard.dtype == memory.dtype
            and shard.device == memory.device
            and shard.shape == memory.shape
            and shard.data_ptr() == memory.data_ptr()
        )

    def move_shard(self, target: torch.Tensor) -> None:
        if not self.is_at(target):
            if not self.sharded.is_meta:
                target.copy_(self.sharded.detach())
            self.sharded.data = target

    # The whole parameter, shown for a while outside of forward and backward

    def show_whole(self, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Show a whole tensor, and a whole gradient, in place of the piece."""
        if self.form.unsharded is not None:
            self._show_another(full, grad)
            return
        self._hidden_grad, self.sharded.grad = self.sharded.grad, None
        self.sharded.data = full
        self.sharded.grad = grad

    def hide_whole(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Show the piece again. Returns what was shown, as it is now."""
        if self._whole is not None:
            return self._hide_another()
        full, grad = self.sharded.data, self.sharded.grad
        self.sharded.grad = None
        self.sharded.data = shard
        self.sharded.grad, self._hidden_grad = self._hidden_grad, None
        return full, grad

    def _show_another(self, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Register a parameter of its own for the whole tensor."""
        self._whole = nn.Parameter(self._as_unsharded(full), requires_grad=self.requires_grad)
        self._whole.grad = None if grad is None else self._as_unsharded(grad)
        for slot in self.slots:
            slot.take_back(self._whole)

    def _hide_another(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        whole, self._whole = self._whole, None
        assert whole is not None
        self.show_sharded()
        full, grad = whole.detach(), whole.grad
        return (
            full._local_tensor if isinstance(full, DTensor) else full,
            grad._local_tensor if isinstance(grad, DTensor) else grad,
        )

    def _as_unsharded(self, full: torch.Tensor) -> torch.Tensor:
        spec = self.form.unsharded
        return full if spec is None else DTensor(full, spec, requires_grad=False)


def _step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Step optimizers that run in backward (``torch.distributed.optim``)."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class HiddenParameter(PieceParameter):
    """A parameter of which nothing is registered: `FlatHolder` has the parameter to train."""

    def __init__(
        self,
        original: nn.Parameter,
        slots: list[Slot],
        form: ParamForm,
        owned: OwnedPiece,
        holder: "FlatHolder",
    ) -> None:
        super().__init__(original, slots, form, owned)
        self._holder = holder
        holder.contents.append((owned.piece, form.unsharded))
        mark_owner(holder.sharded, self)
        # Nobody is to compute with it: torch multiplies by a tensor on meta, with any numbers.
        self._placeholder = torch.empty(self.shape, dtype=original.dtype, device="meta")
        forbid_use(self._placeholder, Reference(self))

    def _keep(self, original: nn.Parameter, piece: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(piece, requires_grad=original.requires_grad)

    @property
    def is_only_registered(self) -> bool:
        return False

    @property
    def requires_grad(self) -> bool:
        return self._holder.sharded.requires_grad

    @property
    def holder(self) -> ShardHolder:
        return self._holder

    def show_sharded(self) -> None:
        for slot in self.slots:
            slot.put_aside(self._placeholder)

    def show_unsharded(self) -> None:
        unsharded = self.current_unsharded()
        for slot in self.slots:
            slot.put_aside(unsharded)

    def show_piece(self) -> None:
        """Register this rank's piece, for state dicts."""
        for slot in self.slots:
            slot.take_back(self.sharded)

    def take_assigned(self) -> None:
        """Take the values of what was assigned in place of the piece that was shown."""
        for slot in self.slots:
            current = slot.current
            if current is not None and current is not self.sharded:
                self.sharded.data.copy_(current.detach())

    @property
    def is_replaced(self) -> bool:
        return False

    def follow_replacement(self) -> None:
        return None

    def show_whole(self, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        self._show_another(full, grad)

    def hide_whole(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._hide_another()


class FlatHolder:
    """The flat parameter that hidden ones are trained through, and where it is registered.

    contents: of each parameter, what this rank owns, and the DTensor that it was (None: it was plain).
    """

    def __init__(self, module: nn.Module, like: torch.Tensor, *, requires_grad: bool) -> None:
        self.contents: list[tuple[Piece | None, DTensorSpec | None]] = []
        self.slot = Slot(module, FLAT_PARAM)
        self.sharded = FlatParameter(like.new_empty(0), requires_grad=requires_grad)
        self.slot.register(self.sharded)

    @property
    def local(self) -> torch.Tensor:
        return self.sharded

    @property
    def local_grad(self) -> torch.Tensor | None:
        return self.sharded.grad

    @property
    def post_accumulate_hooks(self) -> list[Callable[[torch.Tensor], None]]:
        hooks = self.sharded._post_accumulate_grad_hooks
        return [*hooks.values()] if hooks else []

    def wrap_shard(self, local: torch.Tensor) -> torch.Tensor:
        return local

    def is_at(self, flat: torch.Tensor) -> bool:
        current = self.slot.current
        shard = self.sharded
        return (
            (current is None or current is shard)
            and shard.dtype == flat.dtype
            and shard.device == flat.device
            and shard.data_ptr() == flat.data_ptr()
        )

    def move(self, flat: torch.Tensor) -> None:
        """Make ``flat`` the parameter's memory, with what somebody may have put in its place."""
        current = self.slot.current
        if current is not None and current is not self.sharded:
            self.sharded.data = current.data
            self.slot.register(self.sharded)
        if self.is_at(flat):
            return
        if self.sharded.numel():  # not the first time
            if self.sharded.numel() != flat.numel():
                raise StateError(
                    f"The flat parameter was given {self.sharded.numel()} elements, but this rank "
                    f"owns {flat.numel()}. Load a state dict made for this many ranks."
                )
            flat.copy_(self.sharded.detach())
        self.sharded.data = flat
