"""A unit's parameters and the memory of both their forms; `adoption` decides when values are brought there."""

import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from fullshard.comm.interface import Comm
from fullshard.engine.guard.param_watch import ParamWatch
from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.params.extended import ExtendedParameters
from fullshard.engine.params.flat import FlatHolder
from fullshard.engine.params.form import UnitMesh
from fullshard.engine.params.managed import (
    Backward,
    GradientTaker,
    ManagedParameter,
    ShardHolder,
    Slot,
    local_of,
    mark_owner,
    owner_of,
)
from fullshard.engine.params.shown import ShownForm
from fullshard.engine.runtime import Runtime
from fullshard.errors import MisuseError
from fullshard.plan.builders import retype, rows_layout
from fullshard.plan.layout import ParamSpec, UnitLayout
from fullshard.policies import MixedPrecisionPolicy, UnitConfig


class UnitParams:
    """The parameters of one unit, in the order of their indices.

    all: every parameter.
    holders: the owners of what an optimizer updates: each parameter, or one flat one for all.
    plain: the ones whose shards lie in ``buffers``.
    extended: the others, which define their own all-gather, and whose shards stay where users put
        them; None if there are none.
    buffers: the memory of the plain ones; None from `take` or `split` to `allocate`.
    is_flat: the layout is flat: shards are pieces of one buffer, not rows of parameters.
    flat: the flat parameter that they are trained through, if there is one.
    flat_layout: the layout of a flat unit, which never changes; None for a layout by rows.
    unsharded_locals: the unsharded plain parameters as plain tensors: this rank's local tensor where
        one is a DTensor.
    are_plain: these are all unsharded parameters, themselves.
    is_in_place: some unsharded parameters are the memory of all ranks' shards.
    watch: notices what a program does to them; forgets what it knows wherever a parameter becomes another
        object or gets another local tensor.
    """

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        mesh: UnitMesh,
        device: torch.device,
        flat_layout: UnitLayout | None = None,
    ) -> None:
        self.all: list[ManagedParameter] = []
        self.holders: list[ShardHolder] = []
        self.plain: list[ManagedParameter] = []
        self.extended: ExtendedParameters | None = None
        self.buffers: UnitBuffers | None = None
        self.flat_layout = flat_layout
        self.is_flat = flat_layout is not None
        self.mesh = mesh
        self.device = device
        self.shown = ShownForm()
        self.unsharded_locals: list[torch.Tensor] = []
        self.are_plain = False
        self.is_in_place = False
        self.watch = ParamWatch(self)
        self.take(params)
        self.flat = next((each for each in self.holders if isinstance(each, FlatHolder)), None)

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[ManagedParameter]:
        return iter(self.all)

    def __getitem__(self, index: int) -> ManagedParameter:
        return self.all[index]

    def take(self, params: Sequence[ManagedParameter]) -> None:
        """Replace the parameters. The caller has to call `allocate` next."""
        self.all = list(params)
        self.holders = list(dict.fromkeys(param.holder for param in self.all))
        self.watch.forget()
        self.shown.take(self.all)
        self._drop_buffers()

    @property
    def on_meta(self) -> list[str]:
        """The names of the parameters that are on the meta device."""
        is_flat_on_meta = self.flat is not None and self.flat.current.is_meta
        return [param.name for param in self.all if param.local.is_meta or is_flat_on_meta]

    @property
    def has_post_hooks(self) -> bool:
        """True if a hook follows a parameter's reduction, such as an optimizer in backward."""
        for holder in self.holders:  # noqa: SIM110  (asked of every unit, twice a step)
            if holder.post_accumulate_hooks:
                return True
        return False

    @property
    def has_sharded_gradients(self) -> bool:
        return any(holder.sharded.grad is not None for holder in self.holders)

    @property
    def shard_memory(self) -> list[torch.Tensor]:
        """The memory of this rank's plain shards."""
        return [] if self.buffers is None else self.buffers.shard_memory

    def specs(
        self, policy: MixedPrecisionPolicy, params: Sequence[ManagedParameter] | None = None
    ) -> list[ParamSpec]:
        """Return shapes and dtypes of all parameters, or of these, as they are now."""
        return [param.spec(policy) for param in (self.all if params is None else params)]

    def layout(
        self,
        comm: Comm,
        policy: MixedPrecisionPolicy,
        params: Sequence[ManagedParameter] | None = None,
    ) -> UnitLayout:
        """Plan a layout of the plain parameters, or of those among ``params``; nothing is done with them."""
        if params is None:
            specs = self.specs(policy, self.plain)
        else:
            specs = self.specs(policy, [param for param in params if not param.is_extended])
        if self.flat_layout is not None:
            return retype(self.flat_layout, specs)
        return rows_layout(specs, shard_size=self.mesh.plan.shard_size, rule=comm.rule)

    # Whose they are, and how they are called

    def belong_to(self, unit: GradientTaker, backward: Backward) -> None:
        """Let the parameters know their unit, and the backward of its model."""
        for param in self.all:
            param.unit, param.backward = weakref.ref(unit), backward

    def rename(self, paths: Mapping[int, Sequence[str]]) -> None:
        """Name the parameters by the paths of modules, by `id`: one for each use, if they are tied."""
        for param in self.all:
            param.names = param.names_among(paths)

    def tied(
        self, paths: Mapping[int, Sequence[str]]
    ) -> Iterator[tuple[ManagedParameter, list[str]]]:
        """Yield each parameter that is used in several places, with the paths of the modules that use it."""
        for param in self.all:
            users = [path for s in param.slots for path in paths.get(id(s.module()), [""])]
            if len(users) != 1:
                yield param, users

    def find_misplaced(self, device: torch.device) -> tuple[list[str], torch.device] | None:
        """Return the names of parameters whose shard is on another kind of device, and that; None if none is."""
        for holder in self.holders:
            if holder.local.device.type != device.type:
                names = [param.name for param in self.all if param.holder is holder]
                return names, holder.local.device
        return None

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Drop or zero the gradients of the sharded parameters.

        Reaches them while modules show unsharded parameters, too, where ``nn.Module.zero_grad``
        would not find them.
        """
        for holder in self.holders:
            parameter = holder.sharded
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # Following what users do

    def follow_trained(self) -> None:
        """Bring ``requires_grad`` of both forms in line, for units that stay unsharded."""
        for param in self.all:
            param.current_unsharded()

    def warn_of_late_training(self) -> None:
        """Warn of parameters that were unfrozen after they were gathered for a forward."""
        if late := [param.name for param in self.all if param.is_trained_too_late]:
            warnings.warn(
                f"{', '.join(late)}: unfrozen after they were gathered for this forward, which does not "
                "train them; forwards that begin from now on do. Unfreeze parameters before the forward, "
                "or those that the module has while it runs (module.requires_grad_()).",
                UserWarning,
                stacklevel=2,
            )

    def follow_replacements(self) -> None:
        """Take parameters that somebody registered in place of the sharded ones.

        Raises StateError for one that does not fit.
        """
        self.shown.drop_switch()
        self.watch.forget()
        for param in self.all:
            param.follow_replacement()
            sharded = param.holder.sharded
            # `torch.utils.swap_tensors` gives our object the attributes of the other one, and so
            # takes away the mark. The object is still ours. It has its hooks, which autograd does not know.
            if owner_of(sharded) is None:
                mark_owner(sharded, param)
                sharded._backward_hooks = sharded._backward_hooks
            param.follow_grad_dtype()  # taken away likewise

    @property
    def is_split(self) -> bool:
        """True if ``plain`` and ``extended`` still say which parameters define their all-gather.

        Users may turn shards into such tensors until the first use.
        """
        plain = [param for param in self.all if not param.is_extended]
        num_extended = 0 if self.extended is None else len(self.extended)
        return plain == self.plain and len(self.all) == len(plain) + num_extended

    def split(self) -> None:
        """Divide the parameters into plain and extended ones. The caller calls `allocate` next."""
        plain = [param for param in self.all if not param.is_extended]
        self._drop_buffers()
        changed = {id(param) for param in plain} ^ {id(param) for param in self.plain}
        for param in self.all:
            if id(param) in changed:
                # Dropped, not moved: an extended parameter's is made by its own method, the first
                # time without `out=`.
                param.unsharded = None
        self.plain = plain
        self.extended = None
        if extended := [param for param in self.all if param.is_extended]:
            self.extended = ExtendedParameters(extended, self.mesh, self.device)
        # Extended parameters may get a new unsharded form at any gather, and shards over a smaller
        # group are a third form: a `Switch` knows two, which stay.
        has_two_forms = self.extended is None and self.mesh.post_forward is None
        self.shown.begin_anew(may_switch=has_two_forms)

    def allocate(
        self, layout: UnitLayout, comm: Comm, runtime: Runtime, config: UnitConfig
    ) -> None:
        """Allocate memory for both forms of the plain parameters. Every rank has to call it.

        The caller calls `move_shards` next: the new memory has no values. Raises UnavailableError,
        on every rank, if ranks were to share the memory and cannot.
        """
        # The old shards live until `move_shards`, since parameters still refer to them. The old
        # unsharded memory goes first, so that both are never there at once.
        self._drop_buffers()
        with torch.inference_mode(False):
            buffers = UnitBuffers(
                layout,
                comm,
                runtime,
                shard_device=torch.device("cpu") if config.offload_to_cpu else self.device,
                pin_memory=config.pin_memory,
            )
        self._create_unsharded(buffers)
        # Last: if anything above raises, `buffers` is None and the next use allocates again.
        self.buffers = buffers

    def _drop_buffers(self) -> None:
        self.buffers, self.is_in_place = None, False

    def move_shards(self) -> None:
        """Copy shards that lie elsewhere into the unit's memory, and make that their memory."""
        assert self.buffers is not None
        with torch.no_grad():
            # The flat parameter first: if it was replaced, the pieces below are moved to the same
            # memory and find themselves there.
            if self.flat is not None:
                (flat,) = self.buffers.flat_shards
                self.flat.move(flat)
            pairs = list(zip(self.plain, self.buffers.shards, strict=True))
            self.keep_strays(self.shard_storages)
            for param, shard in pairs:
                param.move_shard(shard)
        self.watch.forget()

    @property
    def shard_storages(self) -> set[int]:
        """Which storages the unit's memory for shards has; none before there is any."""
        if self.buffers is None:
            return set()
        return {_storage(shard) for shard in [*self.buffers.shards, *self.buffers.flat_shards]}

    def keep_strays(self, homes: set[int]) -> None:
        """Give a piece memory of its own that lies where another belongs, which is perhaps moved first.

        homes: the storages of all memory for pieces. For ``a.data, b.data = b.data, a.data``.
        """
        if not self.is_flat or self.buffers is None:
            return
        addresses = self.buffers.addresses
        for _, sharded, memory in self.homes or ():
            if sharded.data_ptr() != addresses[memory] and _storage(sharded) in homes:
                sharded.data = sharded.data.clone()

    def bind(self, *, in_place: bool) -> None:
        """Let unsharded parameters be the memory of all ranks' shards, or give them private memory."""
        assert self.buffers is not None
        self.buffers.bind(in_place=in_place)
        self._create_unsharded(self.buffers)

    def _create_unsharded(self, buffers: UnitBuffers) -> None:
        """Make the unsharded parameters over new memory, or move them there."""
        self.watch.forget()
        # First: what users keep may be used again, and a `Switch` must not refer to old tensors.
        self.shown.release()
        for index, param in enumerate(self.plain):
            param.create_unsharded(buffers.unsharded(index))
        # This list has a reference to each of them from now on, so it is filled before `look_after`
        # counts references, and changed nowhere else.
        self.unsharded_locals = [
            local_of(param.unsharded) for param in self.plain if param.unsharded is not None
        ]
        self.are_plain = self.extended is None and all(
            param.form.unsharded is None for param in self.plain
        )
        self.watch.take_whole(self.unsharded_locals)
        # Both take what is referred to now for the unit's own: nobody else has seen the tensors.
        self.shown.look_after(self.plain, buffers)
        buffers.note_uses()
        self.is_in_place = buffers.in_place

    @property
    def homes(self) -> list[tuple[Sequence[Slot], nn.Parameter, torch.Tensor]] | None:
        """Where each parameter that an optimizer updates is registered, and the memory that it is over.

        As the unit left them. None if some bring memory of their own, and before there is any.
        """
        if self.buffers is None or self.extended is not None:
            return None
        if self.flat is not None:
            return [([self.flat.slot], self.flat.sharded, self.buffers.flat_shards[0])]
        memory = zip(self.plain, self.buffers.shards, strict=True)
        return [(param.slots, param.sharded, shard) for param, shard in memory]

    def find_moved(self) -> bool:
        """Return whether some shard is not over the unit's memory, or not the registered parameter.

        `follow_replacements` and `move_shards` mend that. `ParamWatch.have_moved` asks where it sees
        a difference.
        """
        buffers = self.buffers
        if buffers is None:
            return True
        # Optimizers write to a flat parameter, and to none of the pieces that lie in the same place.
        self.bring_home(buffers.shards if self.flat is None else buffers.flat_shards)
        if self.flat is not None:
            return not self.flat.is_at(buffers.flat_shards[0])
        if self.extended is not None and any(param.is_replaced for param in self.all):
            return True
        pairs = zip(self.plain, buffers.shards, strict=True)
        return any(param.has_moved(shard) for param, shard in pairs)

    def bring_home(self, valued: Collection[torch.Tensor]) -> None:
        """Undo what torch has done to the unit's memory: see `UnitBuffers.bring_home`."""
        if self.buffers is not None and self.buffers.bring_home(valued):
            self._create_unsharded(self.buffers)

    def check_unchanged(self) -> None:
        """Raise MisuseError if unsharded parameters were replaced since forward, before backward."""
        for index, param in enumerate(self.plain):
            assert self.buffers is not None
            is_moved = (
                param.unsharded is not None
                and param.form.unsharded is None
                and param.unsharded.data_ptr() != self.buffers.unsharded(index).data_ptr()
            )
            if is_moved or param.is_replaced:
                raise MisuseError(
                    f"{param.name}: FSDP does not support changing the parameters between forward "
                    "and backward. Change them after backward."
                )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
