"""A unit: parameters that are gathered and freed together.

    SHARDED --unshard--> GATHERING --wait--> UNSHARDED --reshard--> SHARDED
                             ^                   |
                             |                   v  (reshard_after_forward=N)
                             +---------- SHARDED_POST_FORWARD

A unit knows how to move between these states and to hand its gradients on; when it does is decided
by `hooks` and `iteration`.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.interface import Comm, Work
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.comm.select import leave_peer_memory, select_comm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.engine.gradients.accumulation import Accumulation, FlatAccumulation, RowsAccumulation
from fullshard.engine.gradients.reduction import InFlight, UnitGradients
from fullshard.engine.observer import Observer
from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.params.flat import FlatHolder
from fullshard.engine.params.managed import DTensorParameter, ManagedParameter, ShardHolder
from fullshard.engine.params.of_unit import UnitParams
from fullshard.engine.params.write_counts import WriteCounts
from fullshard.engine.restoring import naming_lack
from fullshard.engine.runtime import Lane, Runtime, no_grad, outside_transforms
from fullshard.engine.unit_mesh import UnitMesh
from fullshard.errors import CommError, StateError
from fullshard.plan.layout import UnitLayout
from fullshard.plan.trace import Kind
from fullshard.policies import ShardedState, UnitConfig

logger = logging.getLogger("fullshard")


class UnitComms(NamedTuple):
    """How a unit communicates over its shard axis and over its replicate axis."""

    shard: Comm
    replicate: Comm


def choose_comms(mesh: UnitMesh, device: torch.device, config: UnitConfig) -> UnitComms:
    """Choose how a unit communicates, before anything is changed: raises CommError.

    Every rank has to call it.
    """
    shards_on = torch.device("cpu") if config.offload_to_cpu else device
    return UnitComms(
        select_comm(
            mesh.shard_group,
            device,
            config.comm,
            shards_on=shards_on,
            replicas=mesh.replicate_group,
        ),
        select_comm(mesh.replicate_group, device, config.comm),
    )


class Unit:
    """Parameters sharded over one mesh, with their memory and communication."""

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        mesh: UnitMesh,
        device: torch.device,
        config: UnitConfig,
        layout: UnitLayout | None = None,
        comms: UnitComms | None = None,
    ) -> None:
        """layout: a flat one, which stays for good; None makes one by rows.

        comms: what `choose_comms` returned for it; None chooses.
        """
        self.mesh = mesh
        self.device = device
        self.config = config
        self.name = ""
        self._gather_label = "root: all-gather"
        self.is_root = False
        self.runtime = Runtime.of(device)
        self._scratch = self.runtime.scratch  # held, so that it goes with the last unit
        comms = comms or choose_comms(mesh, device, config)
        self.comm, self.replicate_comm = comms.shard, comms.replicate
        self.gradients = UnitGradients(mesh.plan, self.comm, self.replicate_comm, self.runtime)
        self.reduce_group: dist.ProcessGroup | None = None  # set_separate_reduce_scatter_group
        self.state = ShardedState.SHARDED
        self.observer: Observer | None = None
        self.is_hidden = False  # unsharded, but not shown as for computing
        self._awaits_step = False  # unsharded while gradients wait for an optimizer
        self.is_held = False  # unsharded by the user, who may have written to it
        self.is_whole = False  # shows whole parameters, apart from any state (see `whole`)
        self.is_ordered = False  # see `writes`, Note: Ordered gathers
        self.is_written = False  # it is so for good, since somebody writes to it while it runs
        self._is_exposed = False  # users hold unsharded parameters, so nothing is read in place
        self._accumulation: Accumulation | None = None  # stays, with its memory, while it is used
        self._is_accumulating = False
        self._has_taken = False  # sums, since the last forward
        self._is_outdated = False  # what it accumulates in, and how
        self._works: list[Work] = []
        self._gathered: torch.Event | None = None
        self._post_forward: ProcessGroupComm | None = None
        self._own = UnitParams(params, mesh, device, layout)
        self.writes = WriteCounts(self._own)
        self._adopt_unless_on_meta()

    # Parameters and memory

    @property
    def params(self) -> list[ManagedParameter]:
        return self._own.all

    @property
    def holders(self) -> list[ShardHolder]:
        """What an optimizer updates: each parameter, or one for all of them."""
        return self._own.holders

    @property
    def flat(self) -> FlatHolder | None:
        """What holds the parameters, if they are pieces of one buffer and it is one parameter."""
        return self._own.flat

    @property
    def is_flat(self) -> bool:
        """Whether shards are pieces of a flat buffer."""
        return self._own.flat_layout is not None

    @property
    def plain(self) -> list[ManagedParameter]:
        """Those whose shards lie in ``buffers``."""
        return self._own.plain

    @property
    def shard_memory(self) -> list[torch.Tensor]:
        """The memory of this rank's shards of them."""
        return [] if self._own.buffers is None else self._own.buffers.shard_memory

    @property
    def unsharded_locals(self) -> list[torch.Tensor]:
        """The unsharded plain parameters, this rank's part of those that are DTensors."""
        return self._own.unsharded_locals

    @property
    def buffers(self) -> UnitBuffers | None:
        """Their memory; None until they are adopted."""
        return self._own.buffers

    @property
    def layout(self) -> UnitLayout:
        """Where the plain parameters lie."""
        return self._own.layout(self.comm, self.config.mp_policy)

    def layout_of(self, params: Sequence[ManagedParameter]) -> UnitLayout:
        """Return where the plain ones of these would lie, if they were the unit's."""
        plain = [param for param in params if not param.is_extended]
        return self._own.layout(self.comm, self.config.mp_policy, plain)

    def set_params(self, params: Sequence[ManagedParameter]) -> None:
        """Take these parameters, and allocate their memory unless some are still on meta."""
        self._own.take(params)
        self._adopt_unless_on_meta()

    def _adopt_unless_on_meta(self) -> None:
        if not self._own.on_meta:
            self.adopt()

    @outside_transforms
    def adopt(self) -> None:
        """Bring the shards into the unit's memory, wherever they are now.

        A change of dtype makes a new layout.
        """
        own = self._own
        own.follow_replacements()
        if on_meta := own.on_meta:
            raise StateError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta} in {self.label}. Call "
                f"model.to_empty(device={str(self.device)!r}), then initialise every value."
            )
        if not own.is_split:
            self.settle()
            own.split()
        layout = self.layout
        if own.buffers is None or own.buffers.layout != layout:
            self.settle()
            self._refuse_to_change("parameters")
            self._replace_accumulation()
            try:
                own.allocate(layout, self.comm, self.runtime, self.config)
            except UnavailableError as reason:
                self.leave(self.comm, reason)  # which adopts them with another layout
                return
            specs = [param.spec(self.config.mp_policy) for param in own.all]
            self.gradients.bind(own.all, specs, layout if self.is_flat else None)
        for holder in own.holders:
            self._check_device(holder)
        own.move_shards()

    def settle(self) -> None:
        """Come to rest, sharded."""
        self.wait_unshard()
        self.reshard()

    def use_comm(self, comm: Comm) -> None:
        """Communicate like this over the shard axis from now on."""
        self.settle()
        self._refuse_to_change("the communication")
        self.comm = comm
        self.gradients.use_comm(self._reduce_comm)
        self.set_params(self.params)

    def _refuse_to_change(self, what: str) -> None:
        """Raise StateError if sums wait for their all-reduce, which a change would lose."""
        if self.gradients.has_partial:
            raise StateError(
                f"{self.label}: sums of earlier backwards still wait for their all-reduce. Change "
                f"{what} between iterations."
            )

    def leave(self, comm: Comm, reason: UnavailableError) -> None:
        """Use process groups from now on where it was this, whose ranks can share no more memory.

        Every rank has to call it. Raises CommError if peer memory was asked for, and for shards that
        other groups have replicas of: those go on as they are, and do not fit what this one would do.
        """
        choice, device = self.config.comm, self.device
        if comm is self.replicate_comm:
            assert self.mesh.replicate_group is not None
            self.replicate_comm = leave_peer_memory(
                self.mesh.replicate_group, device, choice, reason
            )
            self.gradients.use_replicate_comm(self.replicate_comm)
        if comm is self.comm:
            assert self.mesh.shard_group is not None
            if self.mesh.plan.replicate_size > 1:
                raise CommError(
                    f"{self.label} (rank {dist.get_rank()}): {reason}. Raise the limit, or use "
                    "set_default_comm('process_group')."
                ) from reason
            self.use_comm(leave_peer_memory(self.mesh.shard_group, device, choice, reason))

    def reduce_over(self, group: dist.ProcessGroup | None) -> None:
        """Reduce-scatter over another process group of the same ranks, or over the same again."""
        self.reduce_group = group
        self.gradients.use_comm(self._reduce_comm)

    @property
    def _reduce_comm(self) -> Comm:
        if self.reduce_group is None or not isinstance(self.comm, ProcessGroupComm):
            return self.comm
        return self.comm.over(self.reduce_group)

    def check_unchanged(self) -> None:
        """Refuse parameters that were replaced while they are unsharded, for backward."""
        self._own.check_unchanged()

    def follow_changes(self) -> None:
        """Adopt shards that others moved or replaced. Peers must not read before this is done.

        Parameters that stayed unsharded are freed if the shards were written to since.
        """
        self.follow_moves()
        if self.is_outdated:
            self.reshard()
        self.writes.begin()

    def follow_moves(self) -> None:
        """Adopt shards that others moved or replaced, and come to rest."""
        own = self._own
        self._has_taken = False
        if self.state is ShardedState.GATHERING and not self.is_held:
            self.settle()  # for a pass that ended without it: outdated by now, perhaps
        own.follow_switch()
        if self.gradients.frees_unused:
            self.gradients.free_unused()
        if own.all and own.have_moved:
            self.adopt()

    @property
    def is_outdated(self) -> bool:
        """Whether parameters that stayed unsharded are not what the shards say, as this rank sees."""
        if not self.is_unsharded:
            return False
        if self.is_held:
            return self.writes.is_gathered_outdated(keeps_written=True)
        return self._has_stepped or self.writes.is_gathered_outdated()

    def follow_trained(self) -> None:
        """Let unsharded parameters that stayed be trainable as the sharded ones are now."""
        if self.is_unsharded:
            for param in self._own.all:
                param.current_unsharded()

    def note_kept(self) -> None:
        """A pass is over, after which the unit may stay unsharded."""
        self._awaits_step = self.is_unsharded and not self.is_in_place and self._has_gradients

    @property
    def _has_stepped(self) -> bool:
        """Whether gradients waited for an optimizer and were cleared, which is after its step.

        A step may change the shards of one rank alone, so contents do not tell the others; whether
        there are gradients is the same on all ranks.
        """
        return self._awaits_step and not self._has_gradients

    @property
    def _has_gradients(self) -> bool:
        return any(holder.sharded.grad is not None for holder in self.holders)

    def keep_privately(self) -> None:
        """Let what stays unsharded after an evaluation be no memory that other ranks write to.

        They may do so before this rank has used it again, alone and for as long as it likes.
        """
        if self.is_unsharded and self.is_in_place and self.comm.reads_in_place:
            is_held = self.is_held
            self.read_privately()
            self.unshard()
            self.wait_unshard()
            self.show_earlier_gradients()
            self.is_held = is_held

    def read_privately(self) -> None:
        """From now on, keep what users may write to apart from the shards."""
        self._is_exposed = True
        if self.buffers is None or not self.buffers.in_place:
            return
        self.settle()
        self._own.read_privately()

    # Writes while the model runs (see `writes`)

    @property
    def may_be_ordered(self) -> bool:
        """Whether all ranks gather it alike, and it is at rest."""
        runs_everywhere = not self.config.reduce_scatter_unused_params
        is_real = all(type(tensor) is torch.Tensor for tensor in self.shard_memory)  # has contents
        return runs_everywhere and is_real and self.is_sharded and bool(self._own.plain)

    def set_ordered(self, ordered: bool) -> None:
        """Order gathers with all ranks' writes, or read in place and gather early again."""
        shares = self.comm.reads_in_place and not self._is_exposed
        if self.buffers is not None and shares:
            if ordered and self.buffers.in_place:
                with naming_lack(f"{self.path}: private memory", "Values are as they were."):
                    self._own.read_privately()
            elif not ordered and self.is_sharded:
                self._own.read_in_place()
                self.writes.begin()
        self.is_ordered = ordered

    @property
    def is_in_use(self) -> bool:
        """Whether graphs, or somebody, refer to unsharded parameters in private memory."""
        if self.buffers is None or not self.comm.reads_in_place:
            return False
        return not self.is_sharded or self.buffers.is_in_use

    def refuse_write(self) -> None:
        """Raise StateError: somebody wrote to what ranks have been reading in place."""
        raise StateError(
            f"{self.label}: its parameters were written to while the model ran, between the begin "
            "of forward and the end of backward. The first passes did not do that, so the ranks of "
            "this host read each other's parameters in place, and some may have read what was half "
            "written. Write between steps, or from the first step on, or call "
            "set_default_comm('process_group') before sharding."
        )

    @property
    def is_in_place(self) -> bool:
        """Whether parameters are read where all ranks' shards are."""
        return self._own.is_in_place

    @property
    def may_be_in_place(self) -> bool:
        """Whether they are, or will be if nobody writes to them while the model runs."""
        buffers = self._own.buffers
        return buffers is not None and buffers.may_be_in_place and not self._is_exposed

    @property
    def may_be_looked_at(self) -> bool:
        """Whether contents may be compared without waiting for a device."""
        return not self.runtime.has_streams

    def take_new_pieces(self) -> bool:
        """Adopt pieces that somebody gave other memory since the pass began; say if there were."""
        if self.is_unsharded or not self._own.has_new_pieces:
            return False
        self.adopt()
        return True

    @property
    def has_post_hooks(self) -> bool:
        """Whether something follows a parameter's reduction: an optimizer in backward, say."""
        return any(holder.post_accumulate_hooks for holder in self.holders)

    @property
    def was_gathered_early(self) -> bool:
        return self.state is ShardedState.GATHERING

    def refetch(self) -> None:
        """Gather again, since what was gathered is outdated."""
        self.settle()
        self._start_gather(f"{self._gather_label} again, as it was written to", early=False)

    # Moving between states

    def unshard(self, *, early: bool = False) -> bool:
        """Start gathering the parameters, if they are not gathered or being gathered; say if so.

        early: before their module is called, so somebody may write to them until then.
        """
        state = self.state
        is_sharded = state is ShardedState.SHARDED or state is ShardedState.SHARDED_POST_FORWARD
        starts = is_sharded and bool(self._own.all)
        if starts:
            self._start_gather(self._gather_label, early=early)
        return starts

    @outside_transforms
    def _start_gather(self, label: str, *, early: bool) -> None:
        own = self._own
        assert own.buffers is not None
        if self.observer is not None:
            self.observer.begin(Kind.ALL_GATHER, self.gradients)
        works = own.buffers.start_unshard(label, ordered=self.is_ordered)
        if own.extended is not None:
            # After the optimizer, which wrote the shards, and after compute has copied from the
            # region of the last gather, whose memory the lane may use again.
            with self.runtime.following(Lane.ALL_GATHER):
                works.append(own.extended.start(self.config.mp_policy, label))
        if self.runtime.has_streams and works:
            with self.runtime.on(Lane.ALL_GATHER):
                for work in works:
                    work.wait()
                self._gathered = self.runtime.record()
            works = []
        self._works = works
        self._awaits_step = False
        may_stay = self.keeps_after_forward or not self.config.reshard_after_backward
        self.writes.gathered(early=early, may_stay=may_stay or self.is_held)
        self.state = ShardedState.GATHERING
        if self.observer is not None:
            self.observer.end()

    def wait_unshard(self) -> None:
        """Make the unsharded parameters usable and put them on the modules."""
        if self.state is ShardedState.GATHERING:
            self._use_gathered()
        elif self.is_hidden:
            self._show_unsharded()

    @outside_transforms
    def _use_gathered(self) -> None:
        if self.observer is not None:
            self.observer.begin(Kind.WAIT_ALL_GATHER, self.gradients)
        self._finish_gather()
        if self._own.extended is not None:
            self._own.extended.finish(self.config.mp_policy)
        self._show_unsharded()
        self.state = ShardedState.UNSHARDED
        if self.observer is not None:
            self.observer.end()

    def hide_unsharded(self) -> None:
        """Show gradients after a backward, and keep the unsharded parameters for the next forward.

        Users of a flat unit find what they train registered again; others expect whole parameters,
        as PyTorch keeps them, and find the gradients on those. See `stand_ins`.
        """
        if self.is_flat and self.is_unsharded:
            self.is_hidden = True
            self._own.show_sharded()
        elif self.is_unsharded and self.config.reduce_grads:
            self.is_hidden = True
            self._own.show_gradients()

    def show_earlier_gradients(self) -> None:
        """Let whole parameters that stay in sight show gradients, if there are any.

        Not where nothing is reduced: a pipeline schedule adds there to what autograd accumulates.
        """
        if self.is_flat or not self.is_unsharded or not self.config.reduce_grads:
            return
        for param in self._own.all:
            if param.sharded.grad is not None:
                self.is_hidden = True
                self._own.show_gradients()
                return

    def hide_between(self) -> None:
        """Register the sharded parameters from forward to backward; attributes stay unsharded."""
        if self.is_unsharded and not self.is_held and not self.is_hidden:
            self.is_hidden = True
            self._own.show_between()

    @property
    def keeps_originals(self) -> bool:
        """Whether users train the parameters that they built the modules with."""
        return self.is_flat and self.flat is None

    def _show_unsharded(self) -> None:
        self.is_hidden = False
        self._own.show_unsharded()

    def reshard(self, *, after_forward: bool = False) -> None:
        """Free the unsharded parameters and put the sharded ones on the modules."""
        if after_forward and self.keeps_after_forward:
            self.show_earlier_gradients()
            return
        if self.state is ShardedState.UNSHARDED or self.state is ShardedState.SHARDED_POST_FORWARD:
            self._free(after_forward=after_forward)

    @outside_transforms
    def _free(self, *, after_forward: bool) -> None:
        own = self._own
        assert own.buffers is not None
        is_unsharded = self.state is ShardedState.UNSHARDED
        if is_unsharded:
            self._check_written(after_forward=after_forward)
        if not is_unsharded:
            if after_forward:
                return
            own.buffers.drop_kept()
        elif after_forward and (comm := self._post_forward_comm()) is not None:
            kept = own.buffers.keep_post_forward(comm)
            assert self.mesh.post_forward is not None
            for index, param in enumerate(own.all):
                assert isinstance(param, DTensorParameter)
                param.show_post_forward(kept[index], self.mesh.post_forward)
            self.state = ShardedState.SHARDED_POST_FORWARD
            self.is_held = False
            own.retire(after_forward=after_forward)
            return
        else:
            own.buffers.free_unsharded()
            if own.extended is not None:
                own.extended.free()
        self.is_hidden = False
        own.show_sharded()
        own.retire(after_forward=after_forward)
        self.state = ShardedState.SHARDED
        self.is_held = False
        if self.observer is not None:
            self.observer.changed(self)

    def _check_written(self, *, after_forward: bool) -> None:
        """Warn of writes to what is about to be freed."""
        if self.is_held:
            self.writes.excuse()  # `unshard` says what happens to them
        elif after_forward and torch.is_grad_enabled():
            return  # counters stay until backward, and one look a step is enough
        elif self.writes.will_lose:
            self.writes.warn_of_written(self.label)

    def finish_reading(self) -> None:
        """Return once nothing reads shards in host memory any more, so that the host may write."""
        if self.config.offload_to_cpu:
            self.runtime.finish(self.runtime.record())

    def reset(self, *, keeps_gradients: bool) -> None:
        """Return to SHARDED from anywhere (after an exception)."""
        if self.state is ShardedState.GATHERING:
            self._finish_gather()
            self.state = ShardedState.UNSHARDED
        self.reshard()
        self._own.drop_gradients()
        if not keeps_gradients:
            self.drop_unreduced()
            self._replace_accumulation()

    @property
    def gains_from_prefetch(self) -> bool:
        """Whether it helps to unshard early: that something moves, and by itself."""
        if self.comm.overlaps:
            return True
        return self.runtime.has_streams and self.buffers is not None and self.buffers.moves

    @property
    def is_sharded(self) -> bool:
        return self.state is ShardedState.SHARDED

    @property
    def is_unsharded(self) -> bool:
        return self.state is ShardedState.UNSHARDED

    @property
    def keeps_after_forward(self) -> bool:
        """Whether parameters stay unsharded from forward to backward."""
        option = self.config.reshard_after_forward
        return self.is_root if option is None else option is False

    # Gradients

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take what autograd has accumulated, one full gradient a parameter."""
        grads = self._own.take_gradients()
        if self.keeps_after_forward and self.is_unsharded and not _has_any(grads):
            self._own.warn_of_captured(self.label)
        return grads

    @property
    def has_gradients(self) -> bool:
        """Whether autograd has accumulated something that nobody took."""
        return self._own.has_gradients

    @property
    def unreduced(self) -> list[torch.Tensor]:
        """What `accumulate` keeps."""
        return self._accumulation.memory if self._accumulation and self._is_accumulating else []

    @property
    def spare_memory(self) -> list[torch.Tensor]:
        """What is kept to accumulate in the next step."""
        return [] if self._accumulation is None else self._accumulation.spare.tensors

    def drop_unreduced(self) -> None:
        """Forget what earlier backwards left to be reduced later."""
        self.gradients.drop_partial()
        self._take_accumulated()

    def zero_hidden_gradients(self, *, set_to_none: bool) -> None:
        """Forget the gradients of what is trained if something else may be registered now."""
        for holder in () if self.is_sharded else self.holders:
            parameter = holder.sharded
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep full gradients for a later reduction: in the reduce dtype, or as autograd made them.

        Those of flat units are the latter, since users see them.
        """
        if self._accumulation is None:
            self._accumulation = (
                RowsAccumulation(self.params, self.config.mp_policy.reduce_dtype)
                if not self.is_flat
                else FlatAccumulation(self.layout, self.params, self.device)
            )
        self._is_accumulating = True
        self.gradients.note_accumulated()
        self._accumulation.add(grads)

    def lend_accumulated(self) -> None:
        """Before backward: let autograd add to what `accumulate` keeps, in place."""
        if self._is_accumulating:
            self._lend()

    @outside_transforms
    def _lend(self) -> None:
        assert self._accumulation is not None
        self._accumulation.lend()

    def reduce(self, grads: list[torch.Tensor | None]) -> InFlight | None:
        """Start reducing gradients and what was accumulated before; None if there is nothing."""
        accumulated = self._is_accumulating  # the same on every rank
        if accumulated:
            self.accumulate(grads)
            grads = self._take_accumulated()
        elif not self._has_taken:
            self._accumulation = None
        if not _has_any(grads) and not self._must_reduce:
            return None
        if self.mesh.plan.data_parallel_size == 1 and self.gradients.hand_over(grads, self.config):
            return None
        if self.observer is not None:
            self.observer.begin(Kind.REDUCE_SCATTER, self.gradients)
        is_wide = accumulated and not self.is_flat  # in the reduce dtype
        in_flight = self.gradients.start(grads, self.config, accumulated=is_wide)
        if self.observer is not None:
            self.observer.end()
        return in_flight

    @property
    def _must_reduce(self) -> bool:
        """Whether there is something to reduce without any gradients, on all ranks alike."""
        if self.config.reduce_scatter_unused_params:
            return True
        return self.config.all_reduce_grads and self.gradients.has_partial

    def _take_accumulated(self) -> list[torch.Tensor | None]:
        if not self._is_accumulating:
            return []
        accumulation = self._accumulation
        assert accumulation is not None
        self._is_accumulating, self._has_taken = False, True
        if self._is_outdated or self.gradients.frees_unused:
            self._accumulation, self._is_outdated = None, False
        return accumulation.take()

    def _replace_accumulation(self) -> None:
        """Accumulate in another way and memory: parameters, layout or dtype may have changed."""
        if self._is_accumulating:
            self._is_outdated = True  # once these sums are reduced
        else:
            self._accumulation = None

    # What it holds, beside its buffers and gradients

    @property
    def extended_memory(self) -> list[torch.Tensor]:
        """What extended parameters are made of while they are unsharded."""
        return [] if self._own.extended is None else self._own.extended.memory

    @property
    def gathering(self) -> list[torch.Tensor]:
        """What a gather under way holds; it may read the shards themselves."""
        extended = self._own.extended
        region = [] if extended is None else extended.gathering
        return [*region, *(tensor for work in self._works for tensor in work.tensors)]

    # Messages

    @property
    def path(self) -> str:
        """What it is called in messages and, the same on every rank, in the ledger."""
        return self.name or "root"

    @property
    def label(self) -> str:
        return f"{self.path} (rank {dist.get_rank()})"

    def set_name(self, name: str) -> None:
        self.name = name
        self._gather_label = f"{name or 'root'}: all-gather"
        self.gradients.label = name or "root"

    def become_root(self) -> None:
        """Be the unit that runs first and last."""
        self.is_root = True
        if self.config.cast_root_inputs is not None:
            policy = dataclasses.replace(
                self.config.mp_policy, cast_forward_inputs=self.config.cast_root_inputs
            )
            self.configure(mp_policy=policy)

    def configure(self, **changes: object) -> None:
        self.config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]
        if "mp_policy" in changes:
            self._replace_accumulation()

    # Inside

    def _finish_gather(self) -> None:
        # Written through tensors of their own, so autograd sees no change of what it saved.
        works, self._works = self._works, []
        if works:
            with no_grad():
                for work in works:
                    work.wait()
        if self._gathered is not None:
            self.runtime.wait(self._gathered)
            self._gathered = None

    def _post_forward_comm(self) -> ProcessGroupComm | None:
        mesh = self.mesh.post_forward
        # Ranks that read each other's memory gain nothing from a smaller group. What is kept could
        # not be shown as a DTensor of the smaller group if it is one over other axes as well.
        if mesh is None or not isinstance(self.comm, ProcessGroupComm):
            return None
        if any(param.form.unsharded is not None for param in self.params):
            return None
        if self._own.extended is not None:
            return None
        if self._post_forward is None:
            self._post_forward = ProcessGroupComm(mesh.get_group(1), self.device)
        return self._post_forward

    def _check_device(self, holder: ShardHolder) -> None:
        expected = torch.device("cpu") if self.config.offload_to_cpu else self.device
        if holder.local.device.type != expected.type:
            names = ", ".join(param.name for param in self.params if param.holder is holder)
            offloaded = (
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                if self.config.offload_to_cpu
                else ""
            )
            raise StateError(
                f"{offloaded}{names} ({self.label}): the shard is on {holder.local.device}, "
                f"but the unit keeps its shards on {expected}. Load a state dict of that device, "
                f"or call model.to_empty(device={expected.type!r}) and initialise."
            )


def _has_any(grads: Sequence[torch.Tensor | None]) -> bool:
    for grad in grads:  # noqa: SIM110  (a third of the cost of `any`)
        if grad is not None:
            return True
    return False


def comms_of(units: Sequence[Unit]) -> list[Comm]:
    """Return every communication the units use, once each."""
    return list(dict.fromkeys(comm for u in units for comm in (u.comm, u.replicate_comm)))


def move_parameters(moves: Sequence[tuple[ManagedParameter, Unit, Unit]]) -> None:
    """Hand over parameters that modules of several units share: each, from one unit to another.

    Each unit is laid out and allocated once, however many parameters it gives or gets.
    """
    new = {unit: dict.fromkeys(unit.params) for _, *both in moves for unit in both}
    for param, unit, other in moves:
        logger.warning(
            "%s are one tied parameter: it moves from unit %r to %r, their lowest common unit.",
            " and ".join(param.names),
            unit.name,
            other.name or "root",
        )
        del new[unit][param]
        new[other][param] = None
    for unit in new:
        unit.settle()
    for unit, params in new.items():
        unit.set_params(list(params))
