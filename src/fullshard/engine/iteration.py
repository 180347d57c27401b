"""What the units of one model share during an iteration: order, prefetch, work in flight, fences.

Every model that runs forward as a whole has one `Iteration`, owned by its root module. Its verbs
are called by `hooks`, in this order for a step of training:

    begin_forward   fence; the root's forward starts
    begin_units     a module's parameters become usable; the next unit's gather may start
    end_units       they are freed, if the unit reshards after forward
    end_forward     fence
    begin_backward  once a backward pass: arrange for end_backward
    prefetch_backward
    after_backward  a unit's gradients are complete: reshard, start reducing, finish older ones
    end_backward    units without a backward of their own; finish everything; fence

[Note: Fences] Ranks of one host may read each other's shards in place. All writes happen between a
fence after the last use and a fence before the first: optimizer steps, loading, anything a user
does to sharded parameters between iterations. Between forward and backward of one iteration nobody
may write, as ever with autograd.
"""

import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from fullshard.comm.interface import Comm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.engine.checks.order import ForwardOrder
from fullshard.engine.checks.stayed import StayedUnits, is_whole
from fullshard.engine.checks.writes import WriteWatch, refuse_write
from fullshard.engine.gradients.queue import ReductionQueue
from fullshard.engine.observer import Observer, follow_profiler
from fullshard.engine.runtime import outside_transforms
from fullshard.engine.unit import Phase, Unit
from fullshard.engine.unit_setup import comms_of
from fullshard.plan.schedule import Recorder
from fullshard.plan.trace import Kind
from fullshard.policies import BackwardPrefetch


class Iteration:
    """The shared side of a model's units. ``units`` are in the order of ``named_modules``."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        self.is_last_backward = True
        self.has_run = False
        self._number = {id(unit): number for number, unit in enumerate(self.units)}
        self._order = ForwardOrder(self.units)
        self._checks_order = False
        self._recorder = Recorder()
        self.reductions = ReductionQueue()
        self._forward_root: weakref.ref[Any] | None = None
        self._caller: types.FrameType | None = None  # runs as long as the forward
        self._after: dict[int, Unit] = {}  # what to gather once a unit's backward is over
        # What the backward pass under way calls at its end, and holds until it ended or raised.
        self._backward_end: weakref.ref[Any] | None = None
        self._expects_backward = False
        self._fenced_since_backward = True
        self._stayed = StayedUnits(self.units)
        self.post_optim_event: torch.Event | None = None
        self.observer: Observer | None = None
        self._watch = WriteWatch(self.units)
        self._gathers = True  # whether this pass uses anything that is sharded
        self.connect()

    def connect(self) -> None:
        """Take note of how the units communicate and how many reductions may be under way."""
        comms = comms_of(self.units)
        self._original = [unit for unit in self.units if unit.keeps_originals]
        # Only over the shard axis does anybody read what a peer may write. Ranks that hold whole
        # parameters, such as replicas, may run forward alone.
        sharing = dict.fromkeys(unit.comm for unit in self.units)
        self._fenced = [comm for comm in sharing if type(comm).fence is not Comm.fence]
        self._comms = comms
        buffers = (unit.config.reduce_scatter_max_input_buffers for unit in self.units)
        self.reductions.max_held = max(buffers, default=1)
        needs: dict[Any, list[int]] = {}
        for unit in self.units:
            for comm, nbytes in unit.gradients.buckets.needs(unit.config).items():
                needs.setdefault(comm, []).extend(nbytes)
        for comm in comms:
            try:
                comm.prepare(needs.get(comm, []))
            except UnavailableError as reason:
                for unit in self.units:
                    unit.leave(comm, reason)
                self.connect()
                return

    def observe(self, observer: Observer | None) -> None:
        """Tell this observer what happens from now on, or nobody."""
        self.observer = self.reductions.observer = observer
        for unit in self.units:
            unit.observer = observer

    # Forward

    @property
    def is_in_forward(self) -> bool:
        return self._forward_root is not None

    @property
    def has_stale_backward(self) -> bool:
        """Whether a backward began and neither ended nor is running: it raised."""
        return self._backward_end is not None and self._backward_end() is None

    def is_left_over(self, *, is_root: bool) -> bool:
        """Whether an exception ended the last forward: a module starts again before it was over.

        is_root: whether it is the model itself, which no forward of it calls.
        """
        if not self.is_in_forward or is_in_backward():
            return False
        return is_root or not (self._caller is None or _is_running(self._caller))

    def begin_forward(
        self, root: Any, *, is_training: bool, caller: types.FrameType | None = None
    ) -> None:
        """``caller`` runs as long as this forward."""
        self.has_run = True
        self._caller = caller
        if self.observer is not None or profiler._is_profiler_enabled:
            self.observe(follow_profiler(self.observer))
        self._forward_root = weakref.ref(root)
        self._expects_backward = torch.is_grad_enabled()
        self._recorder.start_pass()
        self._checks_order = self._order.is_checked
        for unit in self.units:
            if unit.phase is Phase.POST_FORWARD:
                unit.reshard()  # kept for a backward that did not come, or comes with new weights
            unit.follow_moves()
        self._stayed.drop_outdated(is_for_all=self._expects_backward)
        for unit in self.units:
            unit.writes.begin()
            if unit.is_unsharded:
                unit.params.follow_trained()
        # An evaluation may be one rank's alone where all stayed whole.
        self._gathers = not all(is_whole(unit) for unit in self.units)
        if self._gathers:
            self._watch.begin_pass(is_training=is_training)
        if self.units and self.units[0].runtime.has_streams:
            # Compute as well: it reads shards in place, or tells peers that they may.
            self.units[0].runtime.wait(self.post_optim_event)
        self.post_optim_event = None
        if self._gathers:
            self.fence("before forward")
            self._fenced_since_backward = True

    def is_forward_root(self, state: Any) -> bool:
        return self._forward_root is not None and self._forward_root() is state

    def begin_units(
        self, units: Sequence[Unit], *, prefetches: bool, is_training: bool = True
    ) -> None:
        """A module's forward starts: its units become usable."""
        is_recomputation = is_in_backward()  # backward has its own order
        if self._checks_order and is_training and not is_recomputation:
            for unit in units:
                self._order.check(self._number[id(unit)])
        for unit in units:
            if not is_recomputation:
                self._follow_writes(unit)
            unit.unshard()
        for unit in units:
            unit.wait_unshard()
            if is_recomputation:
                continue
            following = self._recorder.next_unit(self._number[id(unit)])
            prefetches &= unit.config.forward_prefetch
            if prefetches and following is not None:
                self._prefetch_forward(self.units[following])
        if self._watch.is_watching:
            self._watch.open(units)
        if self.observer is not None and not is_recomputation:
            self.observer.enter(Kind.FORWARD, units)

    def _follow_writes(self, unit: Unit) -> None:
        """Take over what somebody wrote to a unit before its forward, gathered early or not."""
        has_changed = not unit.is_unsharded and unit.params.has_new_pieces
        if has_changed:
            unit.adopt()
        if (
            unit.phase is Phase.GATHERING  # early
            and not unit.is_held
            and (has_changed or unit.writes.changed_since_gather or self._watch.has_changed(unit))
        ):
            unit.refetch()

    def _prefetch_forward(self, unit: Unit) -> None:
        """Start gathering a unit before its forward, unless somebody may write to it until then.

        Flat units ask for it, so theirs is early in watched passes as well, and checked.
        """
        if unit.gains_from_prefetch and (not unit.is_ordered or unit.params.is_flat):
            self.start_forward_unshard(unit)

    def start_forward_unshard(self, unit: Unit) -> None:
        """Start gathering a unit before its module is called, and see what is written until then."""
        if unit.unshard(early=True):
            self._watch.note_gathered(unit)

    def _check_unwritten(self, unit: Unit) -> None:
        """Raise StateError if somebody wrote to a unit that peers read in place."""
        if unit.writes.changed_since_begin:
            self._watch.start_again()
            refuse_write(unit)

    def _refuse_writes(self, units: Iterable[Unit]) -> None:
        """Raise StateError if shards that peers read in place were written to since forward began."""
        for unit in units:
            if unit.is_in_place and (unit.writes.reached_peers or self._watch.has_changed(unit)):
                self._watch.start_again()
                refuse_write(unit)

    def end_units(self, units: Sequence[Unit], *, is_differentiable: bool) -> None:
        """A module's forward is over."""
        if is_in_backward():
            return  # its backward comes next
        if self.observer is not None:
            self.observer.leave(Kind.FORWARD, units)
        if self._watch.is_watching:
            self._watch.close(units)
        for unit in units:
            if not self._expects_backward:
                self._check_unwritten(unit)
            if self._expects_backward and is_differentiable:
                self._recorder.expect_backward(self._number[id(unit)])
            unit.reshard(after_forward=True)

    def end_forward(self) -> None:
        self._forward_root = self._caller = None
        if not self._expects_backward:
            # Whoever looks at parameters after evaluation must find them sharded, the root's too.
            for unit in self.units:
                kept = unit.is_held or unit.config.reshard_after_forward is False
                if not kept and unit.phase is not Phase.GATHERING:
                    unit.reshard()
                unit.note_kept()
            if self._watch.is_watching:
                self._watch.end_pass()
        if self._gathers:
            self._refuse_writes(self.units)
        if not self._expects_backward:
            for unit in self.units:
                unit.keep_privately()
            self._stayed.note()
        for unit in self._original:  # optimizers and `zero_grad` must find what is trained
            if self._expects_backward:
                unit.hide_between()
            elif not unit.is_held:
                unit.hide_unsharded()
        if self._gathers:
            self.fence("after forward")

    # Backward

    def begin_backward(self, end: Any) -> None:
        """Arrange that ``end``, which nobody else refers to, is called when this pass is over.

        In a backward within a backward (reentrant recomputation), that is the first to come here.
        """
        if self._backward_end is not None:
            return
        self._backward_end = weakref.ref(end)
        if not self._fenced_since_backward:
            self.fence("before another backward")  # somebody may have written since the last one
            for unit in self.units:
                unit.writes.begin()
            self._watch.take_samples()
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def begin_backward_units(self, units: Sequence[Unit]) -> None:
        """A module's backward starts, and its units are usable."""
        if self._watch.is_watching:
            self._watch.open(units)
        if self.observer is not None:
            self.observer.enter(Kind.BACKWARD, units)

    def prefetch_backward(self, unit: Unit) -> None:
        """Start gathering the unit whose backward comes next, by the order of this forward."""
        previous = self._recorder.start_backward(self._number[id(unit)])
        if previous is None or not self.units[previous].gains_from_prefetch:
            return
        when = unit.config.backward_prefetch
        if when is BackwardPrefetch.BACKWARD_PRE:
            self.start_backward_unshard(self.units[previous])
        elif when is BackwardPrefetch.BACKWARD_POST:
            self._after[id(unit)] = self.units[previous]

    def start_backward_unshard(self, unit: Unit) -> None:
        if unit.config.unshard_in_backward:
            unit.unshard()

    @outside_transforms
    def after_backward(self, unit: Unit) -> None:
        if self.observer is not None:
            self.observer.leave(Kind.BACKWARD, (unit,))
        if self._watch.is_watching:
            self._watch.close((unit,))
        self._check_unwritten(unit)
        if unit.is_in_place and unit.params.has_post_hooks:  # which write once it is reduced
            self._refuse_writes((unit,))
        # What only some ranks may have used is reduced at the end of backward, in one order on all
        # ranks. Until then autograd's sum stays where it is.
        is_put_off = unit.config.reduce_scatter_unused_params
        grads = [] if is_put_off else unit.take_gradients()
        if unit.config.reshard_after_backward:
            unit.reshard()
        else:
            unit.hide_unsharded()
        if not is_put_off:
            self._reduce(unit, grads)
        if (following := self._after.pop(id(unit), None)) is not None:
            self.start_backward_unshard(following)

    def _reduce(self, unit: Unit, grads: list[torch.Tensor | None]) -> None:
        """Reduce a unit's full gradients, or keep them for a later backward."""
        if not unit.config.reduce_grads:
            unit.accumulate(grads)
            return
        if unit.comm.overlaps:
            self.reductions.finish()  # over by now: this one takes their memory
        if (in_flight := unit.reduce(grads)) is not None:
            # Without streams the last one goes on beside the next unit's backward.
            self.reductions.add(in_flight, keep=0 if unit.runtime.has_streams else 1)

    @outside_transforms
    def end_backward(self, finished: Sequence[Unit]) -> None:
        """``finished`` had an `after_backward` in this pass; the others get theirs now."""
        done = {id(unit) for unit in finished}
        for unit in reversed(self.units):
            if id(unit) not in done:
                self.after_backward(unit)
        for unit in reversed(self.units):
            if unit.config.reduce_scatter_unused_params:
                self._reduce(unit, unit.take_gradients())
                unit.hide_unsharded()
        self._reduce_late_gradients()
        in_place = (unit for unit in self.units if unit.is_in_place)
        self._refuse_writes(unit for unit in in_place if not unit.params.has_post_hooks)
        self._backward_end = None
        self._fenced_since_backward = False
        self.reductions.finish()
        self.reductions.release()
        for unit in self.units:
            unit.note_kept()
        self._stayed.note()
        if self.is_last_backward:
            self._recorder.end_iteration()
            self._order.end_iteration()
            for unit in self.units:
                if unit.phase is Phase.GATHERING:  # prefetched, but never used
                    unit.settle()
                    unit.finish_reading()
        self.fence("after backward")

    def _reduce_late_gradients(self) -> None:
        """Reduce what autograd has accumulated after a unit's backward.

        The gradient of a view that is older than the forward (``self.kept = self.weight.t()``, once
        for all steps) comes after all that the forward recorded.
        """
        late = [unit for unit in reversed(self.units) if unit.params.shown.has_gradients]
        if late:
            self.reductions.finish()
        for unit in late:
            self._reduce(unit, unit.take_gradients())
            unit.hide_unsharded()

    # Any time

    def fence(self, label: str) -> None:
        """See [Note: Fences]."""
        if self.observer is not None:
            self.observer.begin(Kind.FENCE)
        for comm in self._fenced:
            comm.fence(label)
        if self.observer is not None:
            self.observer.end()

    def reset(self, *, keeps_gradients: bool) -> None:
        """Forget an iteration that an exception ended, and what backwards before it accumulated."""
        if self.observer is not None:
            self.observer.forget()
        self.reductions.discard()
        for comm in self._comms:
            comm.abandon()
        self._recorder.forget()
        self._order.forget()
        self._after.clear()
        self._forward_root = self._caller = None
        if self._backward_end is not None:
            self._backward_end = None
            self._fenced_since_backward = False
        for unit in self.units:
            unit.reset(keeps_gradients=keeps_gradients)


def _is_running(frame: types.FrameType) -> bool:
    """Whether a function has yet to return or raise. Forgets the variables of one that has."""
    try:
        frame.clear()
    except RuntimeError:  # which is how it says so
        return True
    return False


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1
