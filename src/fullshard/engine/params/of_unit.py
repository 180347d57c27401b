"""A unit's parameters and the memory of both their forms.

Parameters may be replaced, moved or cast by others between steps: ``to_empty``,
``load_state_dict(assign=True)``, ``model.half()``. This knows how to notice that and how to bring
them home; when it does is up to `unit`.
"""

import operator
from collections.abc import Iterator, Sequence
from typing import overload

import torch

from fullshard.comm.interface import Comm
from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.extended import ExtendedParameters
from fullshard.engine.params.flat import FlatHolder
from fullshard.engine.params.managed import ManagedParameter, ShardHolder, mark_owner, owner_of
from fullshard.engine.params.shown import ShownForm
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit_mesh import UnitMesh
from fullshard.errors import MisuseError
from fullshard.plan.builders import retype, rows_layout
from fullshard.plan.layout import UnitLayout
from fullshard.policies import MixedPrecisionPolicy, UnitConfig

_version = operator.attrgetter("_version")


class UnitParams(Sequence[ManagedParameter]):
    """The parameters of one unit, in the order of their indices.

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
        self.shown = ShownForm()
        self._counted: list[torch.Tensor] | None = None  # whose versions tell of writes
        self._addresses: int | None = None  # of the pieces of a flat buffer, summed
        # The unsharded plain parameters, this rank's part of those that are DTensors.
        self.unsharded_locals: list[torch.Tensor] = []
        self.num_created = 0  # how often they were made, or given other memory
        self.take(params)

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[ManagedParameter]:
        return iter(self.all)

    @overload
    def __getitem__(self, index: int) -> ManagedParameter: ...

    @overload
    def __getitem__(self, index: slice) -> list[ManagedParameter]: ...

    def __getitem__(self, index: int | slice) -> ManagedParameter | list[ManagedParameter]:
        return self.all[index]

    def take(self, params: Sequence[ManagedParameter]) -> None:
        """Replace the parameters. The caller has to call `allocate` next."""
        self.all = list(params)
        self._counted = None
        for param in self.all:
            param.shard_group = self._mesh.shard_group
        self.shown.take(self.all)
        self.buffers = None

    @property
    def is_flat(self) -> bool:
        """Whether shards are pieces of a flat buffer."""
        return self.flat_layout is not None

    @property
    def on_meta(self) -> list[str]:
        """The names of those that have no memory yet."""
        return [param.name for param in self.all if param.local.is_meta]

    @property
    def holders(self) -> list[ShardHolder]:
        """What an optimizer updates: each parameter, or one for all of them."""
        return list(dict.fromkeys(param.holder for param in self.all))

    @property
    def has_post_hooks(self) -> bool:
        """Whether something follows a parameter's reduction: an optimizer in backward, say."""
        return any(holder.post_accumulate_hooks for holder in self.holders)

    @property
    def has_sharded_gradients(self) -> bool:
        """Whether anything that an optimizer updates has a gradient."""
        return any(holder.sharded.grad is not None for holder in self.holders)

    @property
    def shard_memory(self) -> list[torch.Tensor]:
        """The memory of this rank's plain shards."""
        return [] if self.buffers is None else self.buffers.shard_memory

    @property
    def extended_memory(self) -> list[torch.Tensor]:
        """What extended parameters are made of while they are unsharded."""
        return [] if self.extended is None else self.extended.memory

    def layout(
        self,
        comm: Comm,
        policy: MixedPrecisionPolicy,
        plain: Sequence[ManagedParameter] | None = None,
    ) -> UnitLayout:
        """Plan where the plain parameters lie, as they are now, or where these would."""
        specs = [param.spec(policy) for param in (self.plain if plain is None else plain)]
        if self.flat_layout is not None:
            return retype(self.flat_layout, specs)
        return rows_layout(specs, shard_size=self._mesh.plan.shard_size, rule=comm.rule)

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Forget the gradients of what is trained, whether or not it is registered now."""
        for holder in self.holders:
            parameter = holder.sharded
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # Following what others do

    def follow_trained(self) -> None:
        """Let unsharded parameters that stayed be trainable as the sharded ones are now."""
        for param in self.all:
            param.current_unsharded()

    def follow_replacements(self) -> None:
        """Take over what somebody registered in place of sharded parameters."""
        self.shown.drop_switch()
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
        self.shown.forget_views()
        self.extended = None
        extended = [p for p in self.all if p.is_extended and isinstance(p, DTensorParameter)]
        if extended:
            mesh = self._mesh
            self.extended = ExtendedParameters(
                extended, mesh.shard_mesh, mesh.shard_group, self._device
            )
        self.shown.may_switch = self.extended is None and self._mesh.post_forward is None

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
        self._counted = None
        self.shown.release()
        for index, param in enumerate(self.plain):
            param.create_unsharded(buffers.unsharded(index))
        # One reference more to each, whenever `kept` counts them.
        self.unsharded_locals = [*map(_local_of, self.plain)]
        self.num_created += 1
        self.shown.look_after(self.plain, buffers)
        buffers.note_uses()

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


def _local_of(param: ManagedParameter) -> torch.Tensor:
    """Return an unsharded parameter, this rank's part of one that is a DTensor."""
    unsharded = param.unsharded
    assert unsharded is not None
    return unsharded if param.form.unsharded is None else unsharded._local_tensor  # type: ignore[attr-defined]
