"""A unit: parameters that are gathered and freed together.

A unit moves between its phases and hands on its gradients; `hooks` and `iteration` decide when.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from fullshard.comm.interface import Work
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.gradients.in_flight import InFlight
from fullshard.engine.observer import Observer
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.managed import ManagedParameter, ShardHolder
from fullshard.engine.params.write_counts import WriteCounts
from fullshard.engine.runtime import Lane, no_grad, outside_transforms
from fullshard.engine.unit_mesh import UnitMesh
from fullshard.engine.unit_setup import UnitComms, UnitSetup
from fullshard.errors import StateError
from fullshard.plan.layout import UnitLayout
from fullshard.plan.trace import Kind
from fullshard.policies import UnitConfig


class Phase(enum.IntEnum):  # the hash of a plain Enum is a Python call, ten times per step
    """The place of a unit's parameters in memory, and the form that modules show."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()  # the all-gather is under way; modules still show sharded parameters
    UNSHARDED = enum.auto()  # whole parameters are in memory and registered, to compute with
    HIDDEN = enum.auto()  # whole parameters are in memory, modules show others: `params.shown`
    POST_FORWARD = enum.auto()  # resharded over a smaller group until backward


# From each phase, those that may follow. `Unit._to` is the one place where the phase changes.
TRANSITIONS = {
    Phase.SHARDED: {Phase.GATHERING},
    Phase.GATHERING: {Phase.UNSHARDED},
    Phase.UNSHARDED: {Phase.HIDDEN, Phase.POST_FORWARD, Phase.SHARDED},
    Phase.HIDDEN: {Phase.HIDDEN, Phase.UNSHARDED, Phase.POST_FORWARD, Phase.SHARDED},
    Phase.POST_FORWARD: {Phase.GATHERING, Phase.SHARDED},
}


class Model(Protocol):
    """The state of the root module, as its units call it: `hooks.Hooks`."""

    def gradient_arrives(self) -> None: ...


class Unit(UnitSetup):
    """Parameters sharded over one mesh, and the phase they are in.

    is_held: True from a user's ``unshard()`` to the next reshard; the user may have written to the
        unsharded parameters.
    is_whole: True while copies of the whole parameters are shown, in any phase (see `whole`).
    is_ordered: gathers are in order with writes (see `checks.writes`, Note: Ordered gathers).
    is_joined: a module around it gathers and frees it (see `joined`).
    model: a weak reference to the root's state; returns None before the model's first use.
    awaits_backward: it stays unsharded for a backward that outputs did not announce.
    is_written: gathers stay ordered, since the program writes to the parameters during a pass.
    """

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        mesh: UnitMesh,
        device: torch.device,
        config: UnitConfig,
        layout: UnitLayout | None = None,
        comms: UnitComms | None = None,
    ) -> None:
        super().__init__(params, mesh, device, config, layout, comms)
        self.phase = Phase.SHARDED
        self.is_held = False
        self.is_whole = False
        self.is_joined = False
        self.awaits_backward = False
        self.is_ordered = False
        self.is_written = False
        self.observer: Observer | None = None
        self.writes = WriteCounts(self.params)
        self._awaits_step = False  # unsharded while gradients wait for an optimizer
        self.model: Callable[[], Model | None] = _unknown
        self._is_exposed = False  # users may write to unsharded parameters: never read in place
        self._works: list[Work] = []  # parts of the gather under way that are to be waited for
        self._gathered: torch.Event | None = None  # with streams: the gather under way is over
        self._post_forward: ProcessGroupComm | None = None  # of reshard_after_forward=N, made once
        self._adopt_unless_on_meta()

    def _to(self, phase: Phase) -> None:
        """Change the phase; nothing else assigns it. Asserts that `TRANSITIONS` allows it."""
        assert phase in TRANSITIONS[self.phase], f"{self.label}: {self.phase} to {phase}"
        self.phase = phase
        if phase is Phase.SHARDED or phase is Phase.POST_FORWARD:
            self.is_held = self.awaits_backward = False

    @property
    def is_sharded(self) -> bool:
        """Whether the phase is SHARDED: no gather is under way, nothing is kept for backward."""
        return self.phase is Phase.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """Whether whole parameters are in memory, shown or not."""
        return self.phase is Phase.UNSHARDED or self.phase is Phase.HIDDEN

    # Gathering

    def unshard(self, *, early: bool = False) -> bool:
        """Start gathering the parameters unless they are there or on their way.

        Returns whether a gather was started. Every rank has to start it in the same order.
        early: it starts before the forward of their module, so a program may write to the shards
        in between.
        """
        phase = self.phase
        is_resharded = phase is Phase.SHARDED or phase is Phase.POST_FORWARD
        # Whole parameters that are shown take the place of unsharded ones; see `whole`.
        starts = is_resharded and bool(self.params.all) and not self.is_whole
        if starts:
            self._start_gather(f"{self.entered_as}: all-gather", early=early)
        return starts

    @outside_transforms
    def _start_gather(self, label: str, *, early: bool) -> None:
        buffers, extended = self.params.buffers, self.params.extended
        assert buffers is not None
        if self.observer is not None:
            self.observer.begin(Kind.ALL_GATHER, self.gradients)
        works = buffers.start_unshard(label, ordered=self.is_ordered)
        if extended is not None:
            # The lane first waits for compute: the optimizer has written the shards there, and it
            # may still copy from the region of the last gather, whose memory the lane uses again.
            with self.runtime.following(Lane.ALL_GATHER):
                works.append(extended.start(self.config.mp_policy, label))
        if self.runtime.has_streams and works:
            # The lane waits here; compute waits for the event, and only when it needs the result.
            with self.runtime.on(Lane.ALL_GATHER):
                for work in works:
                    work.wait()
                self._gathered = self.runtime.record()
            works = []
        self._works = works
        self._awaits_step = False
        may_stay = self.keeps_after_forward or not self.config.reshard_after_backward
        # `is_held` is set before `unshard` where a user asks for the gather.
        self.writes.note_gather(early=early, may_stay=may_stay or self.is_held)
        self._to(Phase.GATHERING)
        if self.observer is not None:
            self.observer.end()

    def wait_unshard(self) -> None:
        """Make the unsharded parameters usable and register them; no effect while sharded."""
        if self.phase is Phase.GATHERING:
            self._use_gathered()
        elif self.phase is Phase.HIDDEN:
            self.params.shown.show_unsharded()
            self._to(Phase.UNSHARDED)

    @outside_transforms
    def _use_gathered(self) -> None:
        if self.observer is not None:
            self.observer.begin(Kind.WAIT_ALL_GATHER, self.gradients)
        self._finish_gather()
        if self.params.extended is not None:
            # Makes unsharded parameters of what was gathered, so before they are registered.
            self.params.extended.finish(self.config.mp_policy)
        self.params.shown.show_unsharded()
        self._to(Phase.UNSHARDED)
        if self.observer is not None:
            self.observer.end()

    def _finish_gather(self) -> None:
        # Taken out first: if a wait raises, `reset` does not wait for the same work again.
        works, self._works = self._works, []
        if works:
            # The waits may copy into the unsharded buffer. They write through other tensors than
            # the parameters, so the version counters of what autograd saved stay as they are.
            with no_grad():
                for work in works:
                    work.wait()
        if self._gathered is not None:
            self.runtime.wait(self._gathered)
            self._gathered = None

    def refetch(self) -> None:
        """Gather again, since the shards have changed after the gather. Every rank has to do it."""
        self.settle()  # ends the first gather: it may still be writing to the same buffer
        self._start_gather(
            f"{self.entered_as}: all-gather again, as it was written to", early=False
        )

    @property
    def gathering(self) -> list[torch.Tensor]:
        """The tensors that a gather under way holds, for memory reports; some may be the shards."""
        extended = self.params.extended
        region = [] if extended is None else extended.gathering
        return [*region, *(tensor for work in self._works for tensor in work.tensors)]

    @property
    def gains_from_prefetch(self) -> bool:
        """Whether unsharding early helps: bytes move, and they do so without the host."""
        if self.comm.overlaps:
            return True
        buffers = self.params.buffers
        return self.runtime.has_streams and buffers is not None and buffers.moves

    # Hiding unsharded parameters

    def hide_unsharded(self) -> None:
        """Let users find parameters with gradients, while the unsharded ones stay in memory.

        A flat unit registers its sharded parameters again. Any other leaves the whole ones
        registered, as PyTorch does, and shows the gradients on them: see `params.stand_ins`.
        """
        if not self.is_unsharded:
            return
        if self.params.is_flat:
            self.params.shown.show_sharded()
            self._to(Phase.HIDDEN)
        elif self.config.reduce_grads:
            self.params.shown.show_gradients()
            self._to(Phase.HIDDEN)

    def hide_between(self) -> None:
        """Register the sharded parameters until backward; ``module.weight`` stays the whole one."""
        if self.phase is Phase.UNSHARDED and not self.is_held:
            self.params.shown.show_between()
            self._to(Phase.HIDDEN)

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
                self._to(Phase.HIDDEN)
                return

    # Freeing

    def reshard(self, *, after_forward: bool = False) -> None:
        """Free the unsharded parameters and register the sharded ones.

        Has no effect while sharded or gathering. after_forward: a backward may follow, for which
        ``reshard_after_forward`` may keep the parameters, whole or over a smaller group.
        """
        if after_forward and (self.keeps_after_forward or self.awaits_backward):
            self.show_earlier_gradients()
        elif self.is_unsharded:
            self._free(after_forward=after_forward)
        elif self.phase is Phase.POST_FORWARD and not after_forward:
            self._drop_kept()

    def keep_for_backward(self) -> None:
        """Stay unsharded after a forward whose outputs do not tell whether a backward follows.

        A loss may be an attribute, or in an object that nobody knows how to look into. Then no hook
        comes before the backward that could gather the parameters again.
        """
        if self.is_unsharded and not self.awaits_backward and self.params.are_trained:
            self.awaits_backward = True
            self.writes.note_stay()

    @outside_transforms
    def _free(self, *, after_forward: bool) -> None:
        params = self.params
        assert params.buffers is not None
        # Before `_to`, which clears `is_held`, and so says no more who has unsharded them.
        self._check_written(after_forward=after_forward)
        keeps = params.buffers.keeps_storage = self.config.keep_unsharded_storage
        if after_forward and (comm := self._post_forward_comm()) is not None:
            kept = params.buffers.keep_post_forward(comm)  # copies, then frees
            assert self.mesh.post_forward is not None
            for index, param in enumerate(params.all):
                assert isinstance(param, DTensorParameter)
                param.show_post_forward(kept[index], self.mesh.post_forward)
            self._to(Phase.POST_FORWARD)
            params.shown.retire(after_forward=True)
            return
        # Nobody waits for the device, which may still read it: [Note: Lanes] in `runtime`, rule 1.
        params.buffers.free_unsharded()
        if params.extended is not None and not keeps:
            params.extended.free()
        params.shown.show_sharded()
        self._to(Phase.SHARDED)
        # After `show_sharded`: it counts references to unsharded parameters, and those of the
        # modules would look as if somebody kept them.
        params.shown.retire(after_forward=after_forward)
        if self.observer is not None:
            self.observer.changed(self)

    @outside_transforms
    def _drop_kept(self) -> None:
        """Free the shards kept over the smaller group, for which no backward came."""
        assert self.params.buffers is not None
        self.params.buffers.drop_kept()
        self.params.shown.show_sharded()
        self.params.shown.retire()
        self._to(Phase.SHARDED)
        if self.observer is not None:
            self.observer.changed(self)

    def _check_written(self, *, after_forward: bool) -> None:
        """Warn of writes to unsharded parameters, which are lost when those are freed."""
        if self.is_held:
            self.writes.excuse()  # `unshard` documents that they are lost
        elif after_forward and torch.is_grad_enabled():
            return  # counters stay until backward, and one look per step is enough
        elif self.writes.will_lose:
            self.writes.warn_of_written(self.label)

    def _post_forward_comm(self) -> ProcessGroupComm | None:
        """Return the group of ``reshard_after_forward=N``; None if unset, useless or impossible."""
        mesh = self.mesh.post_forward
        # Useless where ranks read each other's memory. Impossible for a parameter that is a DTensor
        # over other axes too, as what is kept is shown as a DTensor of the smaller group alone, and
        # for an extended one, which says itself what is gathered of it.
        if mesh is None or not isinstance(self.comm, ProcessGroupComm):
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
        if self.phase is Phase.GATHERING:
            self._finish_gather()
            self._to(Phase.UNSHARDED)
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

    def follow_changes(self) -> None:
        """Adopt shards that others moved or replaced. Peers must not read before this is done.

        Parameters that stayed unsharded are freed if the shards were written to since.
        """
        # In this order: contents are compared with the adopted shards, and adopting copies values
        # into the unit's memory, which is no write that the pass has to answer for.
        self.follow_moves()
        if self.is_outdated:
            self.reshard()
        self.writes.begin()

    def follow_moves(self) -> None:
        """Adopt shards that others moved or replaced, and end a gather that no pass used."""
        if self.is_whole:
            return  # the whole parameters are registered, which are no replacements
        params, gradients = self.params, self.gradients
        gradients.unreduced.begin()
        if self.phase is Phase.GATHERING and not self.is_held:
            self.settle()  # gathered early for a pass that left the unit out; a step may have come
        params.shown.follow_switch()
        if gradients.frees_unused:
            gradients.free_unused()
        if params.all and params.have_moved:
            self.adopt()

    @property
    def is_outdated(self) -> bool:
        """Whether what stayed unsharded differs from the shards, as far as this rank sees.

        Other ranks may see something else; `checks.stayed` lets them agree.
        """
        if not self.is_unsharded:
            return False
        if self.is_held:
            return self.writes.is_gathered_outdated(keeps_written=True)
        # A step may change the shards of one rank alone, so contents tell the others nothing. But
        # every rank sees that gradients were there and were cleared, as programs do after a step.
        has_stepped = self._awaits_step and not self.params.has_sharded_gradients
        return has_stepped or self.writes.is_gathered_outdated()

    def note_kept(self) -> None:
        """Note at the end of a pass whether the unit stays unsharded until an optimizer's step."""
        stays = self.is_unsharded and not self.is_in_place
        self._awaits_step = stays and self.params.has_sharded_gradients

    # Where unsharded parameters are read: in the shards' memory, or in private memory

    @property
    def is_in_place(self) -> bool:
        """Whether unsharded parameters are the shared memory that holds all ranks' shards."""
        return self.params.is_in_place

    @property
    def may_be_in_place(self) -> bool:
        """Whether they are read there, or will be if nobody writes to them while the model runs."""
        buffers = self.params.buffers
        return buffers is not None and buffers.may_be_in_place and not self._is_exposed

    def read_privately(self) -> None:
        """Gather into private memory from now on, so that no user's write reaches the shards."""
        self._is_exposed = True
        if self.is_in_place:
            self.settle()  # the unsharded parameters are about to get other memory
            self.params.read_privately()

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
        model = self.model()
        if model is None:
            raise StateError(
                f"{param.name} ({self.label}): a gradient came before the model's first forward, which "
                "settles what belongs to the model. Run a forward of the whole model first."
            )
        model.gradient_arrives()

    def add_gradient(self, index: int, grad: torch.Tensor) -> None:
        """Add a parameter's full gradient to what autograd has left for the next reduction."""
        self.params.shown.hide_gradients()  # else `.grad` would be that of the sharded parameter
        self.params[index].add_gradient(grad)

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep full gradients, one per parameter, for a later reduction."""
        self.gradients.accumulate(grads)

    def reduce(self, grads: list[torch.Tensor | None]) -> InFlight | None:
        """Start reducing these gradients and what was accumulated; None if there is nothing."""
        complete = self.gradients.complete(grads, self.config)
        if complete is None:
            return None
        if self.observer is not None:
            self.observer.begin(Kind.REDUCE_SCATTER, self.gradients)
        in_flight = self.gradients.start(complete, self.config)
        if self.observer is not None:
            self.observer.end()
        return in_flight

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Drop or zero the gradients of the sharded parameters, which modules may not show now."""
        self.params.zero_gradients(set_to_none=set_to_none)

    # What rooms above the engine read of parameters; `params` is the engine's alone

    @property
    def managed(self) -> Sequence[ManagedParameter]:
        """The parameters, in the order of their indices."""
        return self.params.all

    @property
    def holders(self) -> list[ShardHolder]:
        """The owners of what an optimizer updates: each parameter, or one flat one for all."""
        return self.params.holders

    @property
    def is_flat(self) -> bool:
        """Whether shards are pieces of flat buffers, and not rows of parameters."""
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


def _unknown() -> None:
    return None
