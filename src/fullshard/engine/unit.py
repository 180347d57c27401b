"""A unit: parameters that are gathered and freed together.

A unit moves between its phases and hands on its gradients; `hooks` and `iteration` decide when.
"""

import dataclasses
import enum
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.interface import Comm, Work
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.comm.select import select_comm
from fullshard.engine.gradients.unit_gradients import UnitGradients
from fullshard.engine.observer import Observer
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.form import UnitMesh
from fullshard.engine.params.managed import Backward, ManagedParameter, ShardHolder
from fullshard.engine.params.unit_params import UnitParams
from fullshard.engine.runtime import Lane, Runtime, outside_transforms
from fullshard.errors import StateError
from fullshard.plan.layout import UnitLayout
from fullshard.plan.trace import Kind
from fullshard.plan.ways import PEER_MEMORY, gather_memory
from fullshard.policies import UnitConfig
from fullshard.torch_private import are_transforms_active, set_grad_enabled


class UnitPhase(enum.IntEnum):  # the hash of a plain Enum is a Python call, ten times per step
    """The place of a unit's parameters in memory, and the form that modules show.

    In order of what is in memory: up to POST_FORWARD shards alone, from UNSHARDED on whole parameters.
    """

    SHARDED = enum.auto()
    POST_FORWARD = enum.auto()  # resharded over a smaller group until backward
    GATHERING = enum.auto()  # the all-gather is under way; modules still show sharded parameters
    UNSHARDED = enum.auto()  # whole parameters are in memory and registered, to compute with
    HIDDEN = enum.auto()  # whole parameters are in memory, modules show others: `params.shown`


_LAST_SHARDED = UnitPhase.POST_FORWARD
_AT_REST = frozenset({UnitPhase.SHARDED})
_phase = operator.attrgetter("phase")
_is_holding = operator.attrgetter("gradients.unreduced.is_holding")
_owed = operator.attrgetter("gradients.buckets.owed")
_waiting = operator.attrgetter("gradients.buckets.waiting")
# From each phase, those that may follow. `Unit._to` is the one place where the phase changes.
TRANSITIONS = {
    UnitPhase.SHARDED: {UnitPhase.GATHERING},
    UnitPhase.GATHERING: {UnitPhase.UNSHARDED},
    UnitPhase.UNSHARDED: {UnitPhase.HIDDEN, UnitPhase.POST_FORWARD, UnitPhase.SHARDED},
    UnitPhase.HIDDEN: {
        UnitPhase.HIDDEN,
        UnitPhase.UNSHARDED,
        UnitPhase.POST_FORWARD,
        UnitPhase.SHARDED,
    },
    UnitPhase.POST_FORWARD: {UnitPhase.GATHERING, UnitPhase.SHARDED},
}


class UnitComms(NamedTuple):
    """The communication of a unit over its shard axis and over its replicate axis."""

    shard: Comm
    replicate: Comm


def choose_comms(mesh: UnitMesh, device: torch.device, config: UnitConfig) -> UnitComms:
    """Choose how a unit communicates. Every rank has to call it.

    Raises CommError if the communication that was asked for cannot be had. Call it before anything
    is changed, so that the error leaves the module as it was.
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
    """Parameters sharded over one mesh, and the phase they are in.

    keeps_after_forward: parameters stay unsharded from forward to backward.
    reduces_unused: as in ``config``.
    is_held: True from a user's ``unshard()`` to the next reshard; the user may have written to the
        unsharded parameters.
    is_whole: True while copies of the whole parameters are shown, in any phase (see `whole`).
    is_ordered: gathers are in order with writes (see `checks.writes`, Note: Ordered gathers).
    is_joined: a module around it gathers and frees it (see `hooks`, Note: Joined units).
    owner: a weak reference to the `ModuleState` that it was made for; returns None if that is gone.
    comm, replicate_comm: the communication over the shard axis and over the replicate axis.
    reduce_group: another process group of the same ranks, for reduce-scatters; None for the same.
    awaits_backward: it stays unsharded for a backward that outputs did not announce.
    is_written: gathers stay ordered, since the program writes to the parameters during a pass.
    is_unwritten: a watched pass has shown that it does not.
    is_left_alone: nobody writes to the shards in this pass: see `begin_pass`.
    state_place: the bytes of its optimizer state, and where they are kept; None if nobody has said it.
    in_capture: the last gather was captured. was_captured: some pass was. See `runtime`, Note: Captures.
    """

    def __init__(self, params: UnitParams, config: UnitConfig, comms: UnitComms) -> None:
        """Make a unit without memory: see `adoption.make_unit`.

        comms: the result of `choose_comms` for this unit.
        """
        self.params = params
        self.mesh, self.device = mesh, device = params.mesh, params.device
        self.name = ""
        self.entered_as = "root"  # in the flight record, the same on every rank
        self.gather_label = "root: all-gather"
        self.is_root = False
        self.set_config(config)
        self.runtime = Runtime.of(device)
        self._scratch = self.runtime.scratch  # held, so that it is freed with the last unit
        self.comm, self.replicate_comm = comms.shard, comms.replicate
        self.reduce_group: dist.ProcessGroup | None = None
        self.gradients = UnitGradients(mesh.plan, self.comm, self.replicate_comm, self.runtime)
        self.phase = UnitPhase.SHARDED
        self.is_held = False
        self.is_whole = False
        self.is_joined = False
        self.awaits_backward = False
        self.state_place: tuple[int, str] | None = None
        self.is_ordered = False
        self.is_written = self.is_unwritten = self.is_left_alone = False
        self.in_capture = self.was_captured = False
        self.observer: Observer | None = None
        self.watch = self.params.watch
        self._awaits_step = False  # unsharded while gradients wait for an optimizer
        self.owner: Callable[[], Any] = _nobody
        self.number, self.backward = 0, Backward()  # in its model, and of it, once that is known
        self._is_exposed = False  # users may write to unsharded parameters: never read in place
        self._works: list[Work] = []  # parts of the gather under way that are to be waited for
        self._gathered: torch.Event | None = None  # with streams: the gather under way is over
        self._post_forward: ProcessGroupComm | None = None  # of reshard_after_forward=N, made once
        self.claim()

    def claim(self) -> None:
        """Let the parameters know whose they are."""
        self.params.belong_to(self, self.backward)

    def slots_change(self) -> None:
        """Take note that a parameter is registered in another place, too."""
        self.params.shown.drop_switch()
        self.watch.forget()

    def _to(self, phase: UnitPhase) -> None:
        """Change the phase; nothing else assigns it. Asserts that `TRANSITIONS` allows it."""
        assert phase in TRANSITIONS[self.phase], f"{self.label}: {self.phase} to {phase}"
        self.phase = phase
        if phase <= _LAST_SHARDED:
            self.is_held = self.awaits_backward = False

    # Options and names

    def configure(self, **changes: object) -> None:
        """Replace options of the unit's configuration, by field name of `UnitConfig`."""
        self.set_config(dataclasses.replace(self.config, **changes))  # type: ignore[arg-type]
        if "mp_policy" in changes:
            self.gradients.unreduced.replace()  # the dtype of sums may be another now

    def set_config(self, config: UnitConfig) -> None:
        """Set all options at once."""
        self.config = config
        self.reduces_unused = config.reduces_unused
        option = config.reshard_after_forward
        stays = self.is_root if option is None else option is False
        self.keeps_after_forward = stays or config.is_kept

    def become_root(self) -> None:
        """Make this a unit of the root module, with the options that are the root's alone."""
        self.is_root = True
        self.set_config(self.config)
        if self.config.cast_root_inputs is not None:
            policy = dataclasses.replace(
                self.config.mp_policy, cast_forward_inputs=self.config.cast_root_inputs
            )
            self.configure(mp_policy=policy)

    def set_name(self, name: str, *, model: int = 0) -> None:
        """Set the name: the path of the unit's module in the model, empty for the root.

        model: which of the models of its group of ranks that is, from 0: units of others may have its name.
        """
        self.name = name
        self.entered_as = f"{self.path} of model {model + 1}" if model else self.path
        self.gather_label = f"{self.entered_as}: all-gather"
        self.gradients.buckets.forget_recipes()  # they contain it

    @property
    def path(self) -> str:
        """The unit's name in messages, the same on every rank."""
        return self.name or "root"

    @property
    def label(self) -> str:
        """The unit's path and this rank, for messages."""
        return f"{self.path} (rank {dist.get_rank()})"

    # Parts

    def plan_layout(self, params: Sequence[ManagedParameter] | None = None) -> UnitLayout:
        """Plan the memory of the unit's plain parameters, or of those among ``params`` instead."""
        return self.params.layout(self.comm, self.config.mp_policy, params)

    @property
    def shard_nbytes(self) -> int:
        """The bytes of this rank's shards."""
        own = sum(param.local.nbytes for param in self.params if param.is_extended)
        return self.plan_layout().shard_nbytes + own

    @property
    def gathered_nbytes(self) -> int:
        """The bytes that a gather brings together; of extended parameters, those of the last one."""
        extended = self.params.extended
        own = 0 if extended is None else extended.gathered_nbytes
        return self.plan_layout().unsharded_nbytes + own

    def private_nbytes(self, params: Sequence[ManagedParameter] | None = None) -> int:
        """Return the bytes of memory that whole parameters take on this rank, beside what is read in place.

        params: the unit's, or those that it will have. Of extended parameters, the bytes of the last gather.
        """
        is_in_place = self.may_be_in_place and not self.is_written
        extended = self.params.extended
        own = 0 if extended is None else extended.gathered_nbytes
        return own + sum(
            gather_memory(bucket, PEER_MEMORY, is_offloaded=False).buffer_nbytes
            if is_in_place
            else bucket.unsharded_nbytes
            for bucket in self.plan_layout(params).buckets
        )

    def reduce_over(self, group: dist.ProcessGroup | None) -> None:
        """Reduce-scatter over another group of the same ranks; None for the shard group."""
        self.reduce_group = group
        self.gradients.buckets.use_comms(shard=self.reduce_comm)

    @property
    def reduce_comm(self) -> Comm:
        if self.reduce_group is None or not isinstance(self.comm, ProcessGroupComm):
            return self.comm
        return self.comm.over(self.reduce_group)

    # Phases

    @property
    def is_sharded(self) -> bool:
        return self.phase is UnitPhase.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """True if whole parameters are in memory, shown or not."""
        return self.phase >= UnitPhase.UNSHARDED

    # Gathering

    def unshard(self, *, early: bool = False, after: torch.Event | None = None) -> bool:
        """Start gathering the parameters unless they are there or on their way.

        Returns whether a gather was started. Every rank has to start it in the same order.
        early: it starts before the forward of their module, so a program may write to the shards
        in between.
        after: with streams, what compute had been given when the pass began; None outside of passes.
        """
        # Whole parameters that are shown take the place of unsharded ones; see `whole`.
        if self.phase > _LAST_SHARDED or self.is_whole or not self.params.all:
            return False
        if are_transforms_active():
            outside_transforms(self._start_gather)(self.gather_label, early, after)
        else:  # nearly always: without a function in between
            self._start_gather(self.gather_label, early, after)
        return True

    def _start_gather(self, label: str, early: bool, after: torch.Event | None) -> None:
        observer, buffers, extended = self.observer, self.params.buffers, self.params.extended
        assert buffers is not None
        if observer is not None:
            observer.begin(Kind.ALL_GATHER, self)
        if after is not None and not self._may_be_behind:
            after = None
        self.in_capture = self.runtime.is_capturing
        works = buffers.start_unshard(label, self.is_ordered, after)
        if extended is not None:
            # The lane first waits for compute: the optimizer has written the shards there, and it
            # may still copy from the region of the last gather, whose memory the lane uses again.
            with self.runtime.following(Lane.ALL_GATHER):
                works.append(extended.start(self.config.mp_policy, label))
        if works and self.runtime.has_streams:
            # The lane waits here; compute waits for the event, and only when it needs the result.
            with self.runtime.on(Lane.ALL_GATHER):
                for work in works:
                    work.wait()
                self._gathered = self.runtime.record()
            works = []
        self._works = works
        self._awaits_step = False
        # `is_held` is set before `unshard` where a user asks for the gather.
        keeps = self.keeps_after_forward or not self.config.reshard_after_backward
        self.watch.note_gather(early, keeps or self.is_held)
        self._to(UnitPhase.GATHERING)
        if observer is not None:
            observer.end()

    def begin_pass(self) -> None:
        """Take note that a forward of the model begins, after which nobody may write to the shards.

        That holds until the end of backward, for units that a watched pass has shown to be left alone.
        """
        self.watch.begin()
        self.is_left_alone = (
            self.is_unwritten
            # What stays would keep others from using its memory.
            and not self.keeps_after_forward
            and self.config.reshard_after_backward
            and not self.params.has_post_hooks  # which write when a gradient is there
        )

    @property
    def _may_be_behind(self) -> bool:
        """True if a gather may read shards before compute has done all that it was given in this pass."""
        return (
            self.is_left_alone
            and not self.is_ordered
            and not self.is_held
            and not self.watch.shards_changed_since_begin
        )

    @property
    def waits_for_compute(self) -> bool:
        """True if gathers of this pass wait, with streams, for all that compute was given, whoever writes to shards."""
        buffers = self.params.buffers
        return not self.is_left_alone or buffers is None or not buffers.may_rotate

    def wait_unshard(self) -> None:
        """Make the unsharded parameters usable and register them; no effect while sharded."""
        if self.phase is UnitPhase.GATHERING:
            if are_transforms_active():
                outside_transforms(self._use_gathered)()
            else:
                self._use_gathered()
        elif self.phase is UnitPhase.HIDDEN:
            self.params.shown.show_unsharded()
            self._to(UnitPhase.UNSHARDED)

    def _use_gathered(self) -> None:
        observer, params = self.observer, self.params
        if observer is not None:
            observer.begin(Kind.WAIT_ALL_GATHER, self)
        self._finish_gather()
        if params.extended is not None:
            # Makes unsharded parameters of what was gathered, so before they are registered.
            params.extended.finish(self.config.mp_policy)
            if self.runtime.rotation is not None:
                self.runtime.rotation.note_reading()  # what arrived there, and is freed
        params.shown.show_unsharded()
        self._to(UnitPhase.UNSHARDED)
        if observer is not None:
            observer.end()

    def _finish_gather(self) -> None:
        # Taken out first: if a wait raises, `reset` does not wait for the same work again.
        works, self._works = self._works, []
        if works:
            # The waits may copy into the unsharded buffer. They write through other tensors than
            # the parameters, so the version counters of what autograd saved stay as they are.
            was_enabled = torch.is_grad_enabled()
            set_grad_enabled(False)
            try:
                for work in works:
                    work.wait()
            finally:
                set_grad_enabled(was_enabled)
        if self._gathered is not None:
            self.runtime.wait(self._gathered)
            self._gathered = None

    def refetch(self) -> None:
        """Gather again, since the shards have changed after the gather. Every rank has to do it."""
        self.settle()  # ends the first gather: it may still be writing to the same buffer
        self.is_unwritten = False  # from now on gathers wait for who writes
        label = f"{self.gather_label} again, as it was written to"
        self._start_gather(label, early=False, after=None)

    @property
    def gathering(self) -> list[torch.Tensor]:
        """The tensors that a gather under way holds, for memory reports; some may be the shards."""
        extended = self.params.extended
        region = [] if extended is None else extended.gathering
        return [*region, *(tensor for work in self._works for tensor in work.tensors)]

    @property
    def gains_from_prefetch(self) -> bool:
        """True if unsharding early helps: bytes move, and they do so without the host."""
        if self.comm.overlaps:
            return True
        buffers = self.params.buffers
        return self.runtime.has_streams and buffers is not None and buffers.moves

    # Hiding unsharded parameters

    def hide_unsharded(self) -> None:
        """Let users find parameters with gradients, while the unsharded ones stay in memory.

        A flat unit registers its sharded parameters again. Any other leaves the whole ones
        registered, as PyTorch does, and shows the gradients on them: see `params.shown`.
        """
        if not self.is_unsharded:
            return
        if self.params.is_flat:
            self.params.shown.show_sharded()
            self._to(UnitPhase.HIDDEN)
        elif self.config.reduce_grads:
            self.params.shown.show_gradients()
            self._to(UnitPhase.HIDDEN)

    def hide_between(self) -> None:
        """Register the sharded parameters until backward; ``module.weight`` stays the whole one."""
        if self.phase is UnitPhase.UNSHARDED and not self.is_held:
            self.params.shown.show_between()
            self._to(UnitPhase.HIDDEN)

    def show_earlier_gradients(self) -> None:
        """Let whole parameters that stay registered show the sharded gradients, if there are any.

        Has no effect where gradients are not reduced: a pipeline schedule adds there to the
        gradients that autograd accumulates on the whole parameters.
        """
        if self.params.is_flat or not self.is_unsharded or not self.config.reduce_grads:
            return
        for param in self.params.all:
            if param.sharded.grad is not None:
                self.params.shown.show_gradients()
                self._to(UnitPhase.HIDDEN)
                return

    # Freeing

    def reshard(self, *, after_forward: bool = False) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Has no effect while sharded or gathering. after_forward: a backward may follow, for which
        ``reshard_after_forward`` may keep the parameters, whole or over a smaller group.
        """
        if after_forward and (self.keeps_after_forward or self.awaits_backward):
            self.show_earlier_gradients()
        elif self.phase >= UnitPhase.UNSHARDED:
            if are_transforms_active():
                outside_transforms(self._free)(after_forward)
            else:
                self._free(after_forward)
        elif self.phase is UnitPhase.POST_FORWARD and not after_forward:
            self._drop_kept()

    def keep_for_backward(self) -> None:
        """Stay unsharded after a forward whose outputs do not tell whether a backward follows.

        A loss may be an attribute, or in an object that nobody knows how to look into. Then no hook
        comes before the backward that could gather the parameters again.
        """
        if self.is_unsharded and not self.awaits_backward:
            self.awaits_backward = any(param.requires_grad for param in self.params.all)
            if self.awaits_backward:
                self.watch.note_stay()

    def _free(self, after_forward: bool) -> None:
        params, buffers = self.params, self.params.buffers
        assert buffers is not None
        # Before `_to`, which clears `is_held`, and so says no more who has unsharded them.
        if self.is_held:
            self.watch.excuse()  # `unshard` documents that writes are lost
        elif after_forward and torch.is_grad_enabled():
            pass  # counters stay until backward, and one look per step is enough
        elif not params.is_in_place and self.watch.will_lose:
            self.watch.warn_of_writes(self.label)
        keeps = buffers.keeps_storage = self.config.keep_unsharded_storage
        if (
            after_forward
            and self.mesh.post_forward is not None
            and (comm := self._post_forward_comm()) is not None
        ):
            kept = buffers.keep_post_forward(comm)  # copies, then frees
            for index, param in enumerate(params.all):
                assert isinstance(param, DTensorParameter)
                param.show_post_forward(kept[index], self.mesh.post_forward)
            self._to(UnitPhase.POST_FORWARD)
            if params.shown.uses is not None:
                params.shown.uses.retire(params.shown.num_switched, True)
            if self.observer is not None:
                self.observer.changed(self)
            return
        # Nobody waits for the device, which may still read it: [Note: Lanes] in `runtime`, rule 1.
        buffers.free_unsharded()
        if params.extended is not None and not keeps:
            params.extended.free()
        shown = params.shown
        shown.show_sharded()
        self._to(UnitPhase.SHARDED)
        # After `show_sharded`: it counts references to unsharded parameters, and those of the
        # modules would look as if somebody kept them.
        if shown.uses is not None:
            shown.uses.retire(shown.num_switched, after_forward)
        if self.observer is not None:
            self.observer.changed(self)

    @outside_transforms
    def _drop_kept(self) -> None:
        """Free the shards kept over the smaller group, for which no backward came."""
        assert self.params.buffers is not None
        self.params.buffers.drop_kept()
        self.params.shown.show_sharded()
        shown = self.params.shown
        if shown.uses is not None:
            shown.uses.retire(shown.num_switched)
        self._to(UnitPhase.SHARDED)
        if self.observer is not None:
            self.observer.changed(self)

    def _post_forward_comm(self) -> ProcessGroupComm | None:
        """Return the group of ``reshard_after_forward=N``; None if unset, useless or impossible."""
        mesh = self.mesh.post_forward
        # Useless where ranks read each other's memory. Impossible for a parameter that is a DTensor
        # over other axes too, as what is kept is shown as a DTensor of the smaller group alone, and
        # for an extended one, which says itself what is gathered of it.
        if mesh is None or not isinstance(self.comm, ProcessGroupComm):
            return None
        if self.config.reshard_after_forward is True:  # said later
            return None
        if any(param.form.unsharded is not None for param in self.params):
            return None
        if self.params.extended is not None:
            return None
        if self._post_forward is None:
            self._post_forward = ProcessGroupComm(
                mesh.get_group(1), self.device, in_own_group=self.comm.in_own_group
            )
        return self._post_forward

    def settle(self) -> None:
        """Wait for a gather under way, and reshard."""
        # A gather under way is awaited, not dropped: it is a collective that peers take part in,
        # and it still writes to the memory that `reshard` frees.
        self.wait_unshard()
        self.reshard()

    def reset(self, *, keeps_gradients: bool) -> None:
        """Return to SHARDED from any phase, after an exception.

        keeps_gradients: whether sums of earlier backwards that wait for a reduction are kept.
        """
        if self.phase is UnitPhase.GATHERING:
            if self.in_capture and not self.runtime.is_capturing:
                self._gathered = None  # of a capture that failed: nothing was gathered
            self._finish_gather()
            self._to(UnitPhase.UNSHARDED)
        self.reshard()
        # Of the pass that raised: the next backward would add to what autograd left there.
        self.params.shown.drop_gradients()
        if not keeps_gradients:
            self.gradients.drop_unreduced()
            self.gradients.unreduced.replace()

    def finish_reading(self) -> None:
        """Return once no copy reads shards in host memory, so that the host may write to them.

        Call it after `settle`, which lets compute wait for the gather: the event then covers both.
        """
        if self.config.offload_to_cpu:
            self.runtime.finish(self.runtime.record())

    # What others did to the parameters since

    @property
    def is_outdated(self) -> bool:
        """True if what stayed unsharded differs from the shards, as far as this rank sees.

        Other ranks may see something else; `checks.writes` lets them agree.
        """
        if not self.is_unsharded:
            return False
        if self.is_held:
            return self.watch.is_gathered_outdated(keeps_written=True)
        # A step may change the shards of one rank alone, so contents tell the others nothing. But
        # every rank sees that gradients were there and were cleared, as programs do after a step.
        has_stepped = self._awaits_step and not self.params.has_sharded_gradients
        return has_stepped or self.watch.is_gathered_outdated()

    def note_kept(self) -> None:
        """Note at the end of a pass whether the unit stays unsharded until an optimizer's step."""
        is_unsharded = self.phase >= UnitPhase.UNSHARDED
        stays = is_unsharded and not self.params.is_in_place
        self._awaits_step = stays and self.params.has_sharded_gradients

    # Where unsharded parameters are read: in the shards' memory, or in private memory

    @property
    def is_in_place(self) -> bool:
        return self.params.is_in_place

    @property
    def may_be_in_place(self) -> bool:
        """True if they are read there, or will be if nobody writes to them while the model runs."""
        buffers = self.params.buffers
        return buffers is not None and buffers.may_be_in_place and not self._is_exposed

    def read_privately(self) -> None:
        """Gather into private memory from now on, so that no user's write reaches the shards."""
        self._is_exposed = True
        if self.is_in_place:
            self.settle()  # the unsharded parameters are about to get other memory
            self.params.bind(in_place=False)

    def keep_privately(self) -> None:
        """Copy what stays unsharded after an evaluation out of the memory that peers write to.

        This rank may go on to evaluate alone, without a fence, while peers' optimizers step. Call
        it before the fence that ends the evaluation: the copy reads the shards of all ranks.
        """
        if self.is_unsharded and self.is_in_place and self.comm.reads_in_place:
            why = self.is_held, self.awaits_backward  # cleared by the reshard in `read_privately`
            self.read_privately()
            self.unshard()
            self.wait_unshard()
            self.show_earlier_gradients()
            self.is_held, self.awaits_backward = why

    # Gradients

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take what autograd has accumulated: one full gradient per parameter, or None.

        Warns if `torch.autograd.grad` takes gradients of parameters that stay unsharded.
        """
        grads = self.params.shown.take_gradients()
        if self.keeps_after_forward and self.is_unsharded and all(grad is None for grad in grads):
            self.params.shown.warn_of_captured(self.label)
        return grads

    def gradient_arrives(self, param: ManagedParameter) -> None:
        """Begin the model's backward, unless it has begun: autograd has accumulated a gradient.

        Raises StateError before the model's first use, which settles what belongs to it.
        """
        owner = self.owner()
        if owner is None or owner.known_iteration is None:
            raise StateError(
                f"{param.name} ({self.label}): a gradient came before the model's first forward, which "
                "settles what belongs to the model. Run a forward of the whole model first."
            )
        owner.hooks().begin_backward()

    def add_gradient(self, index: int, grad: torch.Tensor) -> None:
        """Add a parameter's full gradient to what autograd has left for the next reduction."""
        self.params.shown.hide_gradients()  # else `.grad` would be that of the sharded parameter
        self.params[index].add_gradient(grad)

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Drop or zero the gradients of the sharded parameters, which modules may not show now."""
        self.params.zero_gradients(set_to_none=set_to_none)

    # What rooms above the engine read of parameters; `params` is the engine's alone

    @property
    def managed(self) -> Sequence[ManagedParameter]:
        """The parameters, in the order of their indices."""
        return self.params.all

    @property
    def forms(self) -> list[nn.Parameter]:
        """Every form in which the parameters may be registered."""
        own = [form for param in self.params for form in param.forms if form is not None]
        return own if self.flat_parameter is None else [self.flat_parameter, *own]

    @property
    def holders(self) -> list[ShardHolder]:
        """The owners of what an optimizer updates: each parameter, or one flat one for all."""
        return self.params.holders

    @property
    def is_flat(self) -> bool:
        """True if shards are pieces of flat buffers, and not rows of parameters."""
        return self.params.is_flat

    @property
    def flat_parameter(self) -> nn.Parameter | None:
        """The one parameter that all others are trained through; None if each is trained itself."""
        return None if self.params.flat is None else self.params.flat.sharded

    @property
    def flat_shards(self) -> list[torch.Tensor]:
        """This rank's part of each flat buffer, 1-D."""
        return [] if self.params.buffers is None else self.params.buffers.flat_shards

    @property
    def shard_memory(self) -> list[torch.Tensor]:
        """The memory in which this rank's shards lie, but those of extended parameters."""
        return self.params.shard_memory

    @property
    def unsharded_memory(self) -> list[torch.Tensor]:
        """The private memory of whole parameters, and of shards kept over a smaller group."""
        buffers, extended = self.params.buffers, self.params.extended
        own = [] if buffers is None else buffers.unsharded_memory
        return own if extended is None else [*own, *extended.memory]

    @property
    def mapped_nbytes(self) -> int:
        """The bytes that all ranks of this host share for the unit; 0 if nothing is shared."""
        return 0 if self.params.buffers is None else self.params.buffers.mapped_nbytes


def are_sharded(units: Sequence[Unit]) -> bool:
    """Return whether all units are at rest."""
    return set(map(_phase, units)) <= _AT_REST


def have_unreduced(units: Sequence[Unit]) -> bool:
    """Return whether `UnitGradients.drop_unreduced` may have something to drop in one of the units."""
    return any(map(_is_holding, units)) or any(map(_owed, units)) or any(map(_waiting, units))


def comms_of(units: Sequence[Unit]) -> list[Comm]:
    """Return every communication that the units use, once each, in the order of the units."""
    return list(dict.fromkeys(comm for u in units for comm in (u.comm, u.replicate_comm)))


def _nobody() -> None:
    return None
