"""Parameters whose shards are pieces of a flat buffer.

A flat unit's parameters lie end to end in one buffer, which is cut into equal shards without regard
to where parameters begin: a rank may own all elements of a parameter, some, or none. Users see this
in one of two forms:

    pieces   every parameter stays the ``nn.Parameter`` it was; while sharded, its ``data`` is this
             rank's piece, 1-D (or of its own shape, if one rank has all of it)
    hidden   modules have no parameters, only tensors; one 1-D ``nn.Parameter`` for the whole buffer,
             the `FlatParameter`, is registered on the unit's module and trained

Optimizers see plain tensors, not DTensors, in both forms.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.guard.forbidden import forbid_use
from fullshard.engine.params.form import ParamForm
from fullshard.engine.params.managed import (
    ManagedParameter,
    Reference,
    ShardHolder,
    Slot,
    local_of,
    mark_owner,
    refuse_temporary,
)
from fullshard.errors import StateError
from fullshard.plan.gradient_dtypes import GradientDtypes, flat_gradient_dtypes
from fullshard.plan.layout import ParamSpec, Piece, Shape
from fullshard.policies import MixedPrecisionPolicy, UnitConfig
from fullshard.torch_private import DTensorSpec

FLAT_PARAM = "_flat_param"  # the name on the unit's module; it is part of state dicts' keys


class FlatParameter(nn.Parameter):
    """This rank's shard of all parameters of a unit, 1-D, including padding.

    is_part: other ranks have other shards.
    """

    is_part = False
    _local_shard: torch.Tensor  # the unit's own tensor over the same memory: PyTorch's name
    _fsdp_flattened = True  # PyTorch's mark, by which optimizers know to add up over ranks


@dataclasses.dataclass(frozen=True, slots=True)
class OwnedPiece:
    """The part of a parameter that one rank owns.

    piece: its range in the row-major parameter and in the shard buffer; None for no elements.
    shape: the shape in which users see it: 1-D, or the parameter's if one rank has all of it.
    """

    piece: Piece | None
    shape: Shape

    def of(self, full: torch.Tensor) -> torch.Tensor:
        """Return a view of this part of a whole tensor, in ``shape``."""
        start, numel = (self.piece.param_start, self.piece.numel) if self.piece else (0, 0)
        return full.reshape(-1)[start : start + numel].view(self.shape)


class PieceParameter(ManagedParameter):
    """A parameter that shows this rank's piece of it as its ``data`` while it is sharded."""

    def __init__(
        self, original: nn.Parameter, slots: list[Slot], form: ParamForm, owned: OwnedPiece
    ) -> None:
        super().__init__(original, slots, form)
        self.owned = owned
        self._trainable = original.requires_grad
        # The piece's gradient, while the whole parameter is shown outside of forward and backward.
        self._hidden_grad: torch.Tensor | None = None
        self.sharded = self._keep(original, owned.of(local_of(original.detach())).clone())
        mark_owner(original, self)
        mark_owner(self.sharded, self)

    def _keep(self, original: nn.Parameter, piece: torch.Tensor) -> nn.Parameter:
        """Return the sharded form: the original itself, so that optimizers of it stay valid.

        Except for a DTensor, whose ``data`` cannot become a plain piece, and for one inside a flat
        parameter, which is in no module from now on.
        """
        if isinstance(original, DTensor) or self.is_hidden:
            return nn.Parameter(piece, requires_grad=original.requires_grad)
        # The unsharded form calls these hooks, with whole gradients. If they stayed here as well,
        # they would be called a second time, with the reduced piece.
        original._backward_hooks = None
        original.data = piece
        return original

    @property
    def shard_shape(self) -> tuple[int, ...]:
        return self.owned.shape

    @property
    def post_accumulate_hooks(self) -> list[Callable[[torch.Tensor], None]]:
        # `torch.distributed.optim._apply_optimizer_in_backward` steps in a hook on the node that
        # accumulates this parameter's gradient. That node never runs: the unsharded form's does.
        optimizers = getattr(self.sharded, "_in_backward_optimizers", None)
        if not optimizers:
            return super().post_accumulate_hooks
        return [*super().post_accumulate_hooks, lambda _: _step(optimizers)]

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        return dataclasses.replace(super().spec(policy), trainable=self._trainable)

    def gradient_dtypes(
        self, config: UnitConfig, seen: torch.dtype | None = None
    ) -> GradientDtypes:
        return flat_gradient_dtypes(
            self.spec(config.mp_policy), reduce_dtype=config.mp_policy.reduce_dtype
        )

    def follow_grad_dtype(self) -> None:
        pass  # gradients of a flat buffer have one dtype

    def follow_replacement(self) -> None:
        current = self.replacement()
        if current is None:
            return
        given = current.data
        own = self._own_values(given)
        if own is not given:
            current.data = own.clone()
        self.sharded = current
        mark_owner(current, self)
        self.show_sharded()

    def _own_values(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of values that a program has given, whole or the piece alone.

        Raises StateError for any other shape.
        """
        if values.shape == self.owned.shape:
            return values
        if values.shape != self.shape:
            raise StateError(
                f"Cannot writeback when the parameter shape changes: {self.name} was given values "
                f"of shape {tuple(values.shape)}. Give it the whole shape, {self.shape}, "
                f"or that of this rank's piece, {self.owned.shape}."
            )
        return self.owned.of(values)

    def is_at(self, memory: torch.Tensor) -> bool:
        # By address: after `data = memory` the parameter is another tensor over the same memory.
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
                target.copy_(self._own_values(self.sharded.detach()))
            self.sharded.data = target

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        return self.owned.of(full)

    # The piece may hold the whole parameter for a while, outside of forward and backward

    def show_whole(self, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        # `sharded` cannot hold a DTensor, and one inside a flat parameter is not what modules show.
        if self.form.unsharded is not None or self.is_hidden:
            super().show_whole(full, grad)
            return
        # A gradient may be set only while `data` has its shape: first the piece's goes, then `data`
        # changes, then the whole one comes. `hide_whole` goes back in the same order. The piece's may
        # have any shape: one that waits for its reduction is whole.
        self._hidden_grad, self.sharded.grad = self.sharded.grad, None
        self.sharded.data = full
        self.sharded.grad = grad

    def hide_whole(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._whole is not None:
            return super().hide_whole(shard)
        full, grad = self.sharded.data, self.sharded.grad
        self.sharded.grad = None
        self.sharded.data = shard
        show_gradient(self.sharded, self._hidden_grad)
        self._hidden_grad = None
        return full, grad


def show_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set a parameter's ``.grad`` to a tensor of any shape and dtype, or to None."""
    parameter.grad = None
    if grad is None:
        return
    # torch compares a gradient with `data` (shape, dtype, device) when it is set, and not again.
    data = parameter.data
    parameter.data = grad
    parameter.grad = grad
    parameter.data = data


def _step(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Step optimizers that run in backward, and drop the gradient that they have used."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class HiddenParameter(PieceParameter):
    """A parameter inside a flat one: not registered itself, and trained through ``holder``."""

    is_hidden = True

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
        self._has_values = True  # that the flat parameter does not have yet
        holder.contents.append((owned.piece, form.unsharded))
        mark_owner(holder.sharded, self)
        # Modules show it while the unit is sharded, for code that asks for shape or dtype. Computing
        # with it is made an error: torch 2.13 takes a CPU tensor times one on meta, and returns
        # uninitialised memory.
        self._placeholder = torch.empty(self.shape, dtype=original.dtype, device="meta")
        forbid_use(self._placeholder, Reference(self))

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
        self._holder.slot.register(self._holder.current)

    def show_unsharded(self) -> None:
        # In place of the flat one, so that a forward that goes through `parameters()` finds all.
        self._holder.slot.remove()
        unsharded = self.current_unsharded()
        for slot in self.slots:
            slot.take_back(unsharded)

    def show_piece(self) -> None:
        """Register this rank's piece, for the time of a state dict."""
        for slot in self.slots:
            slot.take_back(self.sharded)

    def move_shard(self, target: torch.Tensor) -> None:
        # Once only: from then on `FlatHolder.move` brings all values, also those that users have
        # written to a flat parameter that `model.half()` has given other memory. Those here are older.
        if self._has_values:
            super().move_shard(target)
            self._has_values = False
        else:
            self.sharded.data = target

    def take_assigned(self) -> None:
        """Copy the values of parameters that were registered in place of the piece meanwhile.

        ``load_state_dict(assign=True)`` does that.
        """
        for slot in self.slots:
            current = slot.current
            if current is not None and current is not self.sharded:
                self.sharded.data.copy_(current.detach())

    @property
    def is_replaced(self) -> bool:
        return False

    def follow_replacement(self) -> None:
        pass  # `FlatHolder.move` does


class FlatHolder(ShardHolder):
    """The flat parameter that hidden ones are trained through, and where it is registered.

    contents: for each parameter inside, the piece that this rank owns (None: no elements), and the
        spec of the DTensor that it was before (None: it was a plain tensor).
    """

    def __init__(
        self, module: nn.Module, like: torch.Tensor, *, requires_grad: bool, is_part: bool
    ) -> None:
        self.contents: list[tuple[Piece | None, DTensorSpec | None]] = []
        self.steps = []
        self.slot = Slot(module, FLAT_PARAM)
        # Without memory until the unit has some: see `move`.
        self.sharded = FlatParameter(like.new_empty(0), requires_grad=requires_grad)
        self.sharded.is_part = is_part
        self.slot.register(self.sharded)

    @property
    def current(self) -> nn.Parameter:
        """The parameter that is registered, which somebody may have put in place of ours."""
        current = self.slot.current
        return self.sharded if current is None else current

    def is_at(self, flat: torch.Tensor) -> bool:
        """Return True if the flat parameter is registered, or nothing is, and it lies over ``flat``."""
        current = self.slot.current
        shard = self.sharded
        return (
            (current is None or current is shard)
            and shard.dtype == flat.dtype
            and shard.device == flat.device
            and shard.data_ptr() == flat.data_ptr()
        )

    def move(self, flat: torch.Tensor) -> None:
        """Make ``flat`` the parameter's memory, with the values that the parameter has.

        If somebody has registered another one (``load_state_dict(assign=True)``), with the values
        of that. Raises StateError if it has not as many elements as this rank owns.
        """
        current = self.current
        if current is not self.sharded:
            refuse_temporary(current, FLAT_PARAM)
            # Its values go to our parameter, to which optimizers refer.
            self.sharded.data = current.data
            self.slot.register(self.sharded)
        self.sharded._local_shard = flat  # type: ignore[attr-defined]
        if self.is_at(flat):
            return
        # The first time it is empty, and `flat` has no values yet: the pieces bring theirs.
        if self.sharded.numel():
            if self.sharded.numel() != flat.numel():
                raise StateError(
                    f"The flat parameter was given {self.sharded.numel()} elements, but this rank "
                    f"owns {flat.numel()}. Load a state dict made for this many ranks."
                )
            flat.copy_(self.sharded.detach())
        self.sharded.data = flat
