"""A unit's parameters, the memory of their shards, and which form of them the modules see.

Parameters may be replaced, moved or cast by others between steps: ``to_empty``,
``load_state_dict(assign=True)``, ``model.half()``. This knows how to notice that and how to bring
them home; when it does is up to `unit`.
"""

import operator
import warnings
from collections.abc import Sequence

import torch

from fullshard.comm.interface import Comm
from fullshard.engine.nodes import is_captured
from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.params.extended import ExtendedParameters
from fullshard.engine.params.flat import FlatHolder
from fullshard.engine.params.kept import KeptParameters
from fullshard.engine.params.kept_views import KeptViews
from fullshard.engine.params.managed import (
    DTensorParameter,
    ManagedParameter,
    ShardHolder,
    mark_owner,
    owner_of,
)
from fullshard.engine.params.stand_ins import StandIns, own_gradient
from fullshard.engine.params.switch import Switch
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit_mesh import UnitMesh
from fullshard.errors import MisuseError
from fullshard.plan.layout import UnitLayout, retype, rows_layout
from fullshard.policies import MixedPrecisionPolicy, UnitConfig

_version = operator.attrgetter("_version")


class UnitParams:
    """The parameters of one unit.

    plain: those whose shards lie in ``buffers``. The others, ``extended``, say themselves what is
        gathered of them, and their shards stay where they are.
    flat: what holds them, if they are pieces of one buffer; ``flat_layout`` stays for good then.
    """

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        mesh: UnitMesh,
        device: torch.device,
        flat_layout: UnitLayout | None,
    ) -> None:
        self.all: list[ManagedParameter] = []
        self.plain: list[ManagedParameter] = []
        self.extended: ExtendedParameters | None = None
        self.buffers: UnitBuffers | None = None
        self.flat_layout = flat_layout
        holders = (param.holder for param in params)
        self.flat = next((each for each in holders if isinstance(each, FlatHolder)), None)
        self._mesh = mesh
        self._device = device
        self._switch: Switch | None = None
        self._counted: list[torch.Tensor] | None = None  # whose versions tell of writes
        self._addresses: int | None = None  # of the pieces of a flat buffer, summed
        self._has_shadows = False
        self._stand_ins: StandIns | None = None  # while whole parameters show gradients
        # The unsharded plain parameters, this rank's part of those that are DTensors.
        self.unsharded_locals: list[torch.Tensor] = []
        self.num_created = 0  # how often they were made, or given other memory
        self._kept: KeptParameters | None = None
        self._kept_views: KeptViews | None = None
        self._num_switched = 0  # references of the switch to what `_kept` looks after
        self.take(params)

    def take(self, params: Sequence[ManagedParameter]) -> None:
        """Be these parameters from now on. Their memory is to be allocated."""
        self.all = list(params)
        self._drop_switch()
        self._counted = None
        for param in self.all:
            param.shard_group = self._mesh.shard_group
            param.show_sharded()
        self.buffers = None

    @property
    def on_meta(self) -> list[str]:
        """The names of those that have no memory yet."""
        return [param.name for param in self.all if param.local.is_meta]

    @property
    def holders(self) -> list[ShardHolder]:
        """What an optimizer updates: each parameter, or one for all of them."""
        return list(dict.fromkeys(param.holder for param in self.all))

    def layout(
        self,
        comm: Comm,
        policy: MixedPrecisionPolicy,
        plain: Sequence[ManagedParameter] | None = None,
    ) -> UnitLayout:
        """Return where the plain parameters lie, as they are now, or where these would."""
        specs = [param.spec(policy) for param in (self.plain if plain is None else plain)]
        if self.flat_layout is not None:
            return retype(self.flat_layout, specs)
        return rows_layout(specs, shard_size=self._mesh.plan.shard_size, rule=comm.rule)

    # Following what others do

    def follow_replacements(self) -> None:
        """Take over what somebody registered in place of sharded parameters."""
        self._drop_switch()
        self._counted = None
        for param in self.all:
            param.follow_replacement()
            sharded = param.holder.sharded
            if owner_of(sharded) is None:  # `torch.utils.swap_tensors` swaps attributes as well
                mark_owner(sharded, param)

    @property
    def is_split(self) -> bool:
        """Whether plain and extended ones are told apart. Users make extended ones until first use."""
        plain = [param for param in self.all if not param.is_extended]
        num_extended = 0 if self.extended is None else len(self.extended)
        return plain == self.plain and len(self.all) == len(plain) + num_extended

    def split(self) -> None:
        """Tell plain parameters from extended ones; their memory is to be allocated."""
        plain = [param for param in self.all if not param.is_extended]
        self.buffers = None
        changed = {id(param) for param in plain} ^ {id(param) for param in self.plain}
        for param in self.all:
            if id(param) in changed:
                param.unsharded = None  # made of other memory, and in another way
        self.plain = plain
        self._kept_views = None
        self.extended = None
        extended = [p for p in self.all if p.is_extended and isinstance(p, DTensorParameter)]
        if extended:
            mesh = self._mesh
            self.extended = ExtendedParameters(
                extended, mesh.shard_mesh, mesh.shard_group, self._device
            )

    def allocate(
        self, layout: UnitLayout, comm: Comm, runtime: Runtime, config: UnitConfig
    ) -> None:
        """Make memory for the plain parameters; the shards are to be moved there."""
        self.buffers = None
        with torch.inference_mode(False):
            buffers = UnitBuffers(
                layout,
                comm,
                runtime,
                shard_device=torch.device("cpu") if config.offload_to_cpu else self._device,
                pin_memory=config.pin_memory,
            )
        self._create_unsharded(buffers)
        self.buffers = buffers  # all of it is there: else the next use begins again

    def move_shards(self) -> None:
        """Bring the shards into the unit's memory, wherever they are now."""
        assert self.buffers is not None
        with torch.no_grad():
            if self.flat is not None:
                (flat,) = self.buffers.flat_shards
                self.flat.move(flat)
            for index, param in enumerate(self.plain):
                param.move_shard(self.buffers.shards[index])
        self._counted = None
        if self.flat_layout is not None:
            self._addresses = sum(map(torch.Tensor.data_ptr, self._sharded_tensors()))

    def read_privately(self) -> None:
        """From now on, keep what is written to unsharded parameters apart from the shards."""
        assert self.buffers is not None
        self.buffers.read_privately()
        self._create_unsharded(self.buffers)

    def read_in_place(self) -> None:
        """Read the shards themselves again, of all ranks."""
        assert self.buffers is not None
        self.buffers.read_in_place()
        self._create_unsharded(self.buffers)

    def _create_unsharded(self, buffers: UnitBuffers) -> None:
        self._drop_switch()
        self._counted = None
        self.hide_gradients()
        if self._kept is not None:
            self._kept.restore()
        if self._kept_views is not None:
            self._kept_views.release()
        for index, param in enumerate(self.plain):
            param.create_unsharded(buffers.unsharded(index))
        # One reference more to each, whenever `kept` counts them.
        self.unsharded_locals = [*map(_local_of, self.plain)]
        self.num_created += 1
        # Parameters that only moved may be kept by somebody now: their references were counted.
        if self._kept is None or not self._kept.looks_after(self.plain):
            self._kept = KeptParameters(self.plain)
        self._kept_views = KeptViews(self.plain, buffers, self._kept_views)
        self.retire()
        buffers.note_uses()

    def retire(self, *, after_forward: bool = False) -> None:
        """After a reshard: make the use of unsharded parameters that somebody keeps an error."""
        if self._kept is not None and self._kept_views is not None:
            self._kept.retire(self._num_switched)
            self._kept_views.retire(after_forward=after_forward)

    def _drop_switch(self) -> None:
        self._switch, self._num_switched = None, 0

    @property
    def have_moved(self) -> bool:
        """Whether a shard is no longer the registered parameter over the unit's memory."""
        buffers = self.buffers
        if buffers is None:
            return True
        if self.flat is not None:
            return not self.flat.is_at(buffers.flat_shards[0])
        if self.extended is not None and any(param.is_replaced for param in self.all):
            return True
        for param, shard in zip(self.plain, buffers.shards, strict=True):
            if param.has_moved(shard):
                return True
        return False

    @property
    def is_in_place(self) -> bool:
        """Whether parameters are read where all ranks' shards are."""
        return self.buffers is not None and self.buffers.in_place

    def num_writes(self) -> int:
        """Count writes to shards, through a DTensor or its local tensor, as far as versions tell."""
        return sum(map(_version, self._sharded_tensors()))

    @property
    def has_new_pieces(self) -> bool:
        """Whether somebody gave a piece of a flat buffer other memory (``p.data = ...``).

        A part of `have_moved` that costs little enough for each module's forward.
        """
        if self._addresses is None:
            return False
        return sum(map(torch.Tensor.data_ptr, self._sharded_tensors())) != self._addresses

    def _sharded_tensors(self) -> list[torch.Tensor]:
        if self._counted is None:
            tensors = [tensor for own in self.holders for tensor in (own.sharded, own.local)]
            self._counted = list({id(tensor): tensor for tensor in tensors}.values())
        return self._counted

    def num_unsharded_writes(self) -> int:
        """The same of the unsharded parameters."""
        return sum(map(_version, self.unsharded_locals))

    def check_unchanged(self) -> None:
        """Refuse parameters that were replaced while they are unsharded, for backward."""
        for index, param in enumerate(self.plain):
            assert self.buffers is not None
            unsharded = param.unsharded
            if param.is_replaced or (
                unsharded is not None
                and param.form.unsharded is None
                and unsharded.data_ptr() != self.buffers.unsharded(index).data_ptr()
            ):
                raise MisuseError(
                    f"{param.name}: FSDP does not support changing the parameters between forward "
                    "and backward. Change them after backward."
                )

    # What the modules see

    def follow_switch(self) -> None:
        """Notice parameters that were frozen, made trainable or registered in one more place."""
        if self._switch is not None and not self._switch.is_current:
            self._drop_switch()

    def show_between(self) -> None:
        """Register the sharded parameters, and let attributes be the unsharded ones.

        Between forward and backward: who asks for parameters gets those that are trained, and who
        computes with ``module.weight`` gets the whole one.
        """
        self.show_sharded()
        self._has_shadows = True
        for param in self.all:
            unsharded = param.current_unsharded()
            for slot in param.slots:
                slot.shadow(unsharded)

    def show_gradients(self) -> None:
        """Let whole parameters that stay in sight show the gradients of the sharded ones."""
        if self._stand_ins is None:
            self._stand_ins = StandIns()
            self._stand_ins.show(self.all)

    def hide_gradients(self) -> None:
        """Let whole parameters have gradients of their own again."""
        if self._stand_ins is not None:
            self._stand_ins.hide()
            self._stand_ins = None

    def _drop_shadows(self) -> None:
        self._has_shadows = False
        for param in self.all:
            for slot in param.slots:
                slot.drop_shadow()

    def show_sharded(self) -> None:
        self.hide_gradients()
        if self._has_shadows:
            self._drop_shadows()
        for each in (self._switch,) if self._switch is not None else self._shown():
            each.show_sharded()

    def show_unsharded(self) -> None:
        if self._kept is not None and self._kept_views is not None:
            self._kept.restore()
            self._kept_views.restore()
        self.hide_gradients()
        if self._has_shadows:
            self._drop_shadows()
            self.follow_switch()  # what is trained was in sight, and may have been frozen
        for each in (self._switch,) if self._switch is not None else self._shown():
            each.show_unsharded()

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take what autograd has accumulated, one full gradient a parameter."""
        self.hide_gradients()
        if self._switch is not None and self._switch.is_plain:
            return self._switch.take_gradients()
        return [param.take_gradient() for param in self.all]

    @property
    def has_gradients(self) -> bool:
        """Whether autograd has accumulated something that nobody took."""
        if self._switch is not None:
            return self._switch.has_gradients
        tensors = [param.unsharded for param in self.all if param.unsharded is not None]
        return any(own_gradient(tensor) is not None for tensor in tensors)

    def warn_of_captured(self, label: str) -> None:
        """Warn of parameters whose gradient `torch.autograd.grad` returns."""
        names = [
            param.name
            for param in self.all
            if param.unsharded is not None and param.requires_grad and is_captured(param.unsharded)
        ]
        if names:
            warnings.warn(
                f"torch.autograd.grad returns the gradient of {', '.join(names)} in {label} as "
                "this rank has it: nothing reduces it. Average it over the data-parallel ranks, or "
                "call backward() and read the parameter's .grad.",
                UserWarning,
                stacklevel=2,
            )

    def drop_gradients(self) -> None:
        """Forget what autograd has accumulated."""
        self.hide_gradients()
        for param in self.all:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def _shown(self) -> Sequence[Switch | ManagedParameter]:
        """Return what shows the parameters in one form or the other; make a switch if it may."""
        is_simple = self.extended is None and self._mesh.post_forward is None
        if not is_simple or not all(param.is_only_registered for param in self.all):
            return self.all
        self._switch = Switch(self.all)
        if self._kept is not None:
            self._num_switched = sum(len(param.slots) for param in self._kept.params)
        return (self._switch,)


def _local_of(param: ManagedParameter) -> torch.Tensor:
    """Return an unsharded parameter, this rank's part of one that is a DTensor."""
    unsharded = param.unsharded
    assert unsharded is not None
    return unsharded if param.form.unsharded is None else unsharded._local_tensor  # type: ignore[attr-defined]
