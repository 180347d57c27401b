"""A unit: parameters that are gathered and freed together.

It knows how to move between its phases and to hand its gradients on; when it does is decided by
`hooks` and `iteration`.
"""

import enum
from collections.abc import Sequence

import torch

from fullshard.comm.interface import Work
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.gradients.in_flight import InFlight
from fullshard.engine.observer import Observer
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.params.write_counts import WriteCounts
from fullshard.engine.runtime import Lane, no_grad, outside_transforms
from fullshard.engine.unit_mesh import UnitMesh
from fullshard.engine.unit_setup import UnitComms, UnitSetup
from fullshard.plan.layout import UnitLayout
from fullshard.plan.trace import Kind
from fullshard.policies import UnitConfig


class Phase(enum.IntEnum):  # the hash of a plain Enum is a Python call, ten times per step
    """Where a unit's parameters are, and what modules see of them."""

    SHARDED = enum.auto()
    GATHERING = enum.auto()  # the all-gather is under way
    UNSHARDED = enum.auto()  # and registered, to compute with
    HIDDEN = enum.auto()  # unsharded, but modules show something else (see `params.shown`)
    POST_FORWARD = enum.auto()  # resharded over a smaller group until backward


# What may follow what. `Unit._to` is the one place where the phase changes.
TRANSITIONS = {
    Phase.SHARDED: {Phase.GATHERING},
    Phase.GATHERING: {Phase.UNSHARDED},
    Phase.UNSHARDED: {Phase.HIDDEN, Phase.POST_FORWARD, Phase.SHARDED},
    Phase.HIDDEN: {Phase.HIDDEN, Phase.UNSHARDED, Phase.POST_FORWARD, Phase.SHARDED},
    Phase.POST_FORWARD: {Phase.GATHERING, Phase.SHARDED},
}


class Unit(UnitSetup):
    """Parameters sharded over one mesh, and the phase they are in.

    is_held: unsharded by the user, who may have written to them; until they are resharded.
    is_whole: copies of the whole parameters are shown, in any phase (see `whole`).
    is_ordered: gathers are in order with writes (see `checks.writes`, Note: Ordered gathers).
    is_written: they are so for good, since somebody writes to the parameters while they are used.
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
        self.is_ordered = False
        self.is_written = False
        self.observer: Observer | None = None
        self.writes = WriteCounts(self.params)
        self._awaits_step = False  # unsharded while gradients wait for an optimizer
        self._is_exposed = False  # users hold unsharded parameters, so nothing is read in place
        self._works: list[Work] = []
        self._gathered: torch.Event | None = None
        self._post_forward: ProcessGroupComm | None = None
        self._adopt_unless_on_meta()

    def _to(self, phase: Phase) -> None:
        """Move to another phase. Nothing else assigns it."""
        assert phase in TRANSITIONS[self.phase], f"{self.label}: {self.phase} to {phase}"
        self.phase = phase
        if phase is Phase.SHARDED or phase is Phase.POST_FORWARD:
            self.is_held = False

    @property
    def is_sharded(self) -> bool:
        """Whether nothing is unsharded or on its way, not even over a smaller group."""
        return self.phase is Phase.SHARDED

    @property
    def is_unsharded(self) -> bool:
        """Whether whole parameters are in memory, shown or not."""
        return self.phase is Phase.UNSHARDED or self.phase is Phase.HIDDEN

    # Gathering

    def unshard(self, *, early: bool = False) -> bool:
        """Start gathering the parameters, if they are not gathered or being gathered; say if so.

        early: before their module is called, so somebody may write to them until then.
        """
        phase = self.phase
        is_resharded = phase is Phase.SHARDED or phase is Phase.POST_FORWARD
        starts = is_resharded and bool(self.params.all)
        if starts:
            self._start_gather(f"{self.path}: all-gather", early=early)
        return starts

    @outside_transforms
    def _start_gather(self, label: str, *, early: bool) -> None:
        buffers, extended = self.params.buffers, self.params.extended
        assert buffers is not None
        if self.observer is not None:
            self.observer.begin(Kind.ALL_GATHER, self.gradients)
        works = buffers.start_unshard(label, ordered=self.is_ordered)
        if extended is not None:
            # After the optimizer, which wrote the shards, and after compute has copied from the
            # region of the last gather, whose memory the lane may use again.
            with self.runtime.following(Lane.ALL_GATHER):
                works.append(extended.start(self.config.mp_policy, label))
        if self.runtime.has_streams and works:
            # The lane waits here, not compute: that waits for the event once it needs the result.
            with self.runtime.on(Lane.ALL_GATHER):
                for work in works:
                    work.wait()
                self._gathered = self.runtime.record()
            works = []
        self._works = works
        self._awaits_step = False
        may_stay = self.keeps_after_forward or not self.config.reshard_after_backward
        self.writes.gathered(early=early, may_stay=may_stay or self.is_held)
        self._to(Phase.GATHERING)
        if self.observer is not None:
            self.observer.end()

    def wait_unshard(self) -> None:
        """Make the unsharded parameters usable and put them on the modules."""
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
            self.params.extended.finish(self.config.mp_policy)
        self.params.shown.show_unsharded()
        self._to(Phase.UNSHARDED)
        if self.observer is not None:
            self.observer.end()

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

    def refetch(self) -> None:
        """Gather again, since what was gathered is outdated."""
        self.settle()
        self._start_gather(f"{self.path}: all-gather again, as it was written to", early=False)

    @property
    def gathering(self) -> list[torch.Tensor]:
        """What a gather under way holds; it may read the shards themselves."""
        extended = self.params.extended
        region = [] if extended is None else extended.gathering
        return [*region, *(tensor for work in self._works for tensor in work.tensors)]

    @property
    def gains_from_prefetch(self) -> bool:
        """Whether it helps to unshard early: that something moves, and by itself."""
        if self.comm.overlaps:
            return True
        buffers = self.params.buffers
        return self.runtime.has_streams and buffers is not None and buffers.moves

    # Hiding unsharded parameters

    def hide_unsharded(self) -> None:
        """Show gradients after a backward, and keep the unsharded parameters for the next forward.

        Users of a flat unit find what they train registered again; others expect whole parameters,
        as PyTorch keeps them, and find the gradients on those. See `params.stand_ins`.
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
        """Register the sharded parameters from forward to backward; attributes stay unsharded."""
        if self.phase is Phase.UNSHARDED and not self.is_held:
            self.params.shown.show_between()
            self._to(Phase.HIDDEN)

    def show_earlier_gradients(self) -> None:
        """Let whole parameters that stay in sight show gradients, if there are any.

        Not where nothing is reduced: a pipeline schedule adds there to what autograd accumulates.
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
        """Free the unsharded parameters and put the sharded ones on the modules."""
        if after_forward and self.keeps_after_forward:
            self.show_earlier_gradients()
        elif self.is_unsharded:
            self._free(after_forward=after_forward)
        elif self.phase is Phase.POST_FORWARD and not after_forward:
            self._drop_kept()

    @outside_transforms
    def _free(self, *, after_forward: bool) -> None:
        params = self.params
        assert params.buffers is not None
        # Before anything is freed: it reads what is about to go.
        self._check_written(after_forward=after_forward)
        if after_forward and (comm := self._post_forward_comm()) is not None:
            kept = params.buffers.keep_post_forward(comm)
            assert self.mesh.post_forward is not None
            for index, param in enumerate(params.all):
                assert isinstance(param, DTensorParameter)
                param.show_post_forward(kept[index], self.mesh.post_forward)
            self._to(Phase.POST_FORWARD)
            params.shown.retire(after_forward=True)
            return
        params.buffers.free_unsharded()
        if params.extended is not None:
            params.extended.free()
        params.shown.show_sharded()
        self._to(Phase.SHARDED)
        # After the switch to the sharded form, whose references to the unsharded one are counted.
        params.shown.retire(after_forward=after_forward)
        if self.observer is not None:
            self.observer.changed(self)

    @outside_transforms
    def _drop_kept(self) -> None:
        """Free what was kept over the smaller group: no backward came."""
        assert self.params.buffers is not None
        self.params.buffers.drop_kept()
        self.params.shown.show_sharded()
        self.params.shown.retire()
        self._to(Phase.SHARDED)
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

    def _post_forward_comm(self) -> ProcessGroupComm | None:
        """Return what ``reshard_after_forward=N`` gathers over; None where it would gain nothing."""
        mesh = self.mesh.post_forward
        # Ranks that read each other's memory gain nothing from a smaller group. What is kept could
        # not be shown as a DTensor of the smaller group if it is one over other axes as well.
        if mesh is None or not isinstance(self.comm, ProcessGroupComm):
            return None
        if any(param.form.unsharded is not None for param in self.params):
            return None
        if self.params.extended is not None:
            return None
        if self._post_forward is None:
            self._post_forward = ProcessGroupComm(mesh.get_group(1), self.device)
        return self._post_forward

    def settle(self) -> None:
        self.wait_unshard()
        self.reshard()

    def reset(self, *, keeps_gradients: bool) -> None:
        """Return to SHARDED from anywhere (after an exception)."""
        if self.phase is Phase.GATHERING:
            self._finish_gather()
            self._to(Phase.UNSHARDED)
        self.reshard()
        self.params.shown.drop_gradients()
        if not keeps_gradients:
            self.gradients.drop_unreduced()
            self.gradients.unreduced.replace()

    def finish_reading(self) -> None:
        """Return once nothing reads shards in host memory any more, so that the host may write."""
        if self.config.offload_to_cpu:
            self.runtime.finish(self.runtime.record())

    # What others did to the parameters since

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
        params, gradients = self.params, self.gradients
        gradients.unreduced.begin()
        if self.phase is Phase.GATHERING and not self.is_held:
            self.settle()  # for a pass that ended without it: outdated by now, perhaps
        params.shown.follow_switch()
        if gradients.frees_unused:
            gradients.free_unused()
        if params.all and params.have_moved:
            self.adopt()

    @property
    def is_outdated(self) -> bool:
        """Whether parameters that stayed unsharded are not what the shards say, as this rank sees."""
        if not self.is_unsharded:
            return False
        if self.is_held:
            return self.writes.is_gathered_outdated(keeps_written=True)
        # A step may change the shards of one rank alone, so contents do not tell the others. That
        # gradients waited for an optimizer and were cleared, which is after its step, all ranks see.
        has_stepped = self._awaits_step and not self.params.has_sharded_gradients
        return has_stepped or self.writes.is_gathered_outdated()

    def note_kept(self) -> None:
        """A pass is over, after which the unit may stay unsharded."""
        stays = self.is_unsharded and not self.is_in_place
        self._awaits_step = stays and self.params.has_sharded_gradients

    # Where unsharded parameters are read: in the shards' memory, or in private memory

    @property
    def is_in_place(self) -> bool:
        """Whether parameters are read where all ranks' shards are."""
        return self.params.is_in_place

    @property
    def may_be_in_place(self) -> bool:
        """Whether they are, or will be if nobody writes to them while the model runs."""
        buffers = self.params.buffers
        return buffers is not None and buffers.may_be_in_place and not self._is_exposed

    def read_privately(self) -> None:
        """From now on, keep what users may write to apart from the shards."""
        self._is_exposed = True
        if self.is_in_place:
            self.settle()
            self.params.read_privately()

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

    # Gradients

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take what autograd has accumulated: one full gradient per parameter, or None."""
        grads = self.params.shown.take_gradients()
        if self.keeps_after_forward and self.is_unsharded and all(grad is None for grad in grads):
            self.params.shown.warn_of_captured(self.label)
        return grads

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Keep full gradients for a later reduction."""
        self.gradients.accumulate(grads, self.config)

    def reduce(self, grads: list[torch.Tensor | None]) -> InFlight | None:
        """Start reducing gradients and what was accumulated before; None if there is nothing."""
        complete = self.gradients.complete(grads, self.config)
        if complete is None:
            return None
        if self.observer is not None:
            self.observer.begin(Kind.REDUCE_SCATTER, self.gradients)
        in_flight = self.gradients.start(complete, self.config)
        if self.observer is not None:
            self.observer.end()
        return in_flight
