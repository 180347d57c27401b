"""The iteration that one model's units share: order, prefetch, work in flight, fences.

Every model that runs forward as a whole has one `Iteration`, owned by its root module. In a step of
training, `hooks` calls its methods in this order:

    begin_forward   the root's forward starts: fence
    begin_units     a module's parameters become usable; the next unit's gather may start
    end_units       they are freed, if the unit reshards after forward
    end_forward     the root's forward is over: fence
    begin_backward  once per backward pass: arrange for end_backward
    prefetch_backward   once per unit: the gather of the next one in backward may start
    after_backward  a unit's gradients are complete: reshard, start reducing, finish older ones
    end_backward    once per pass: units that had no after_backward; finish everything; fence
    finalize        does the latter in place of end_backward, if the program asked for that

[Note: Fences] Ranks of one host may read each other's shards in place. All writes happen between a
fence after the last use and a fence before the first: optimizer steps, loading, anything a user
does to sharded parameters between iterations. Between forward and backward of one iteration nobody
may write, as ever with autograd.
"""

import enum
import itertools
import operator
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd import profiler

from fullshard.comm.interface import Comm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.engine.adoption import adopt, fall_back, follow_moves, keep_strays
from fullshard.engine.checks.gradients import UnusedWatch
from fullshard.engine.checks.path import Path, StepChecks
from fullshard.engine.checks.writes import StayedUnits, WriteWatch, is_whole
from fullshard.engine.compiling import note_computing
from fullshard.engine.finalization import Finalization
from fullshard.engine.gradients.queue import ReductionQueue
from fullshard.engine.guard.param_watch import ModelWatch
from fullshard.engine.observer import Observer, ProfilerLabels, watchers
from fullshard.engine.params.managed import Backward
from fullshard.engine.params.shown import own_gradient
from fullshard.engine.runtime import eager, outside_transforms
from fullshard.engine.unit import Unit, UnitPhase, are_sharded, comms_of, have_unreduced
from fullshard.errors import StateError, UnsupportedError
from fullshard.peers.paths import StepPhase
from fullshard.plan.schedule import Recorder
from fullshard.plan.trace import Kind
from fullshard.policies import BackwardPrefetch
from fullshard.torch_private import queue_callback

_number = operator.attrgetter("number")
_is_in_place = operator.attrgetter("params.is_in_place")
_are_plain, _whole = (
    operator.attrgetter("params.are_plain"),
    operator.attrgetter("params.unsharded_locals"),
)
_has_large = operator.attrgetter("gradients.buckets.large")
_has_no_sums = operator.attrgetter("gradients.unreduced.is_empty")
_is_joined, _reduces_unused = (
    operator.attrgetter("is_joined"),
    operator.attrgetter("reduces_unused"),
)
_may_be_skipped = operator.attrgetter("config.may_be_skipped")


NOT_WARM = (
    "it has not run yet. Its first steps make memory and compare ranks, which no CUDA graph can hold: run three "
    "steps on a side stream before the capture, or let fullshard.capture_step do it."
)


class Stage(enum.IntEnum):
    """What a model does. From BACKWARD on, a backward is under way, or has raised.

    stage       entered by        a module's forward    its payload (attributes of `Iteration`)
    IDLE        the ends          begins a forward      is_fenced: no optimizer may have written since
                                                        the last fence
    FORWARD     begin_forward     belongs to it         root, caller, gathers, expects_backward
    BACKWARD    begin_backward    recomputes            the end that autograd will call
    NESTED      begin_backward    recomputes            both: a forward has called this backward

    No hook tells of an exception. One that ends a forward leaves FORWARD, whose caller does not run any
    more; one that ends a backward leaves BACKWARD or NESTED, whose end nobody refers to any more.
    `Iteration.reset` follows, from the next forward or backward.
    """

    IDLE = enum.auto()
    FORWARD = enum.auto()
    BACKWARD = enum.auto()
    NESTED = enum.auto()


# From each stage, those that may follow. `Iteration._to` is the one place where the stage changes.
TRANSITIONS = {
    Stage.IDLE: {Stage.FORWARD, Stage.BACKWARD},
    Stage.FORWARD: {Stage.IDLE, Stage.NESTED},
    Stage.BACKWARD: {Stage.IDLE},
    Stage.NESTED: {Stage.FORWARD, Stage.BACKWARD, Stage.IDLE},
}


class Iteration:
    """The state that a model's units share. ``units`` are in the order of ``named_modules``.

    kind: the model's class, for messages. kinds: the classes of the model's modules, which all ranks should
    have from the same files.
    stage: what the model does, see `Stage`.
    said: what the program has said of the whole model, see `ModuleState.said`.
    """

    def __init__(self, units: Sequence[Unit], kinds: Sequence[type] = (), kind: str = "") -> None:
        self.units = list(units)
        self.has_run = False
        self.said: dict[str, Any] = {}
        self._recorder = Recorder()
        self.reductions = ReductionQueue()
        self.finalization = Finalization(self.units)
        self.stage = Stage.IDLE
        # The payload of stages.
        self.root: weakref.ref[Any] | None = None  # weak, as its state owns this object
        self._caller: types.FrameType | None = None  # the frame that runs the root's forward
        self._expects_backward = False  # the forward runs with gradients enabled
        self._gathers = True  # the forward uses something that is sharded
        self.backward = Backward()
        for number, unit in enumerate(self.units):
            unit.number, unit.backward = number, self.backward
            unit.claim()
        self._is_fenced = True
        # With streams: what compute had been given when the pass began.
        self._begun: torch.Event | None = None
        self._was_captured = False  # the last backward
        self._prefetch_after: dict[int, Unit] = {}  # gather it after backward of a unit, by id
        self._stayed = StayedUnits()
        self.observer: Observer | None = None
        self._watch = WriteWatch(self.units)
        self._places = ModelWatch([unit.watch for unit in self.units])
        self._has_streams = bool(self.units) and self.units[0].runtime.has_streams
        self._path = Path(kind, self.units, kinds)
        self._unused = UnusedWatch()
        self.connect()

    def connect(self) -> None:
        """Take note of the units' communication, and make room for their reductions. Collective."""
        comms = comms_of(self.units)
        self._flat = [unit for unit in self.units if unit.params.is_flat]
        # Peers' memory is read over the shard axis alone. Ranks that hold whole parameters, such as
        # replicas, do not meet in fences, so each may run a forward on its own.
        sharing = dict.fromkeys(unit.comm for unit in self.units)
        self._fenced = [comm for comm in sharing if type(comm).fence is not Comm.fence]
        self._comms = comms
        buffers = (unit.config.reduce_scatter_max_input_buffers for unit in self.units)
        self.reductions.max_under_way = max(buffers, default=1)
        needs: dict[Any, list[int]] = {}
        for unit in self.units:
            for comm, nbytes in unit.gradients.buckets.needs().items():
                needs.setdefault(comm, []).extend(nbytes)
        for comm in comms:
            try:  # collective, so also for those that need nothing
                comm.prepare(needs.get(comm, []))
            except UnavailableError as reason:  # on every rank
                for unit in self.units:
                    fall_back(unit, comm, reason)
                self.connect()  # again, for the process groups that took its place
                return

    def observe(self, observer: Observer | None) -> None:
        """Tell this observer what happens from now on; None tells nobody."""
        self.observer = self.reductions.observer = observer
        for unit in self.units:
            unit.observer = observer

    # Stages

    def _to(self, stage: Stage) -> None:
        """Change the stage; nothing else assigns it. Asserts that `TRANSITIONS` allows it."""
        assert stage in TRANSITIONS[self.stage], f"{self.stage} to {stage}"
        self.stage = stage

    @property
    def is_in_backward(self) -> bool:
        """True from the beginning of a backward of this model until it has ended or raised.

        A forward inside it recomputes. One inside another model's backward (of a teacher, say) is
        like any other forward.
        """
        return self.stage >= Stage.BACKWARD and self.backward.end() is not None

    @property
    def is_forward_running(self) -> bool:
        """True if the root's forward runs for sure: no exception has ended it."""
        is_begun = self.stage is Stage.FORWARD or self.stage is Stage.NESTED
        return is_begun and self._caller is not None and _is_running(self._caller)

    def is_running(self, *, if_unknown: bool) -> bool:
        """Return whether the root's forward or a backward is running, and no exception has ended it.

        if_unknown: the answer where only the next forward can tell.
        """
        if self.is_in_backward:
            return True
        if self.stage is Stage.IDLE or self.stage is Stage.BACKWARD:
            return False
        return if_unknown if self._caller is None else _is_running(self._caller)

    def has_raised_in_forward(self, *, is_root: bool) -> bool:
        """Return whether an exception ended the last forward, asked when a module's forward starts.

        is_root: the module is the root, which its own forward does not call.
        """
        if self.stage is not Stage.FORWARD:
            return False
        # No hook is called when a forward raises. But its frame can be cleared then.
        return is_root or not (self._caller is None or _is_running(self._caller))

    @property
    def awaits_backward(self) -> bool:
        """True if a backward may come that no output announces."""
        return not self.is_in_backward and any(unit.awaits_backward for unit in self.units)

    # All units at once, by maps: asked in every pass, where nearly always nothing is to be done for any

    @property
    def _are_sharded(self) -> bool:
        """True if every unit is at rest."""
        return are_sharded(self.units)

    @property
    def _unsharded(self) -> list[Unit]:
        if self._are_sharded:
            return []
        return [unit for unit in self.units if unit.phase >= UnitPhase.UNSHARDED]

    @property
    def _late(self) -> list[Unit]:
        """The units on whose whole parameters autograd has left gradients, last unit first."""
        if all(map(_are_plain, self.units)):
            whole = itertools.chain.from_iterable(map(_whole, self.units))
            if all(map(operator.is_, map(own_gradient, whole), itertools.repeat(None))):
                return []
        return [unit for unit in reversed(self.units) if unit.params.shown.has_gradients]

    # Forward

    @property
    def has_skipped(self) -> bool:
        """True if ranks may leave out units, or could before this forward."""
        return any(map(_may_be_skipped, self.units)) or any(map(_is_joined, self.units))

    def begin_forward(
        self, root: Any, *, is_training: bool, caller: types.FrameType | None = None
    ) -> None:
        """Begin the root's forward: settle which parameters it gathers, then meet in a fence.

        root: the state of the module that runs first. caller: the frame that runs its forward, None
        if unknown. Every rank has to call it, unless all parameters are whole on this rank.
        """
        self.has_run = True
        self._to(Stage.FORWARD)
        self.root, self._caller = weakref.ref(root), caller
        note_computing(self, self.units)
        self._path.begin_forward(root.state.all_units[0])
        is_labelling = type(self.observer) is ProfilerLabels  # what nobody traces, for a profiler
        if is_labelling != profiler._is_profiler_enabled and (
            is_labelling or self.observer is None
        ):
            self.observe(None if is_labelling else ProfilerLabels())
        self._expects_backward = torch.is_grad_enabled()
        self._recorder.start_pass()
        # Before anything reads shards: what compares contents does. Compute waits, not the all-gather
        # lane alone: it may read shards in place, and in the fence it tells peers that they may.
        written = self.said.pop("post_optim_event", None)
        if self.units and self.units[0].runtime.has_streams:
            self.units[0].runtime.wait(written)
        # Shards come home first: contents are compared with them, and peers read them in the pass.
        if not self._are_sharded or self._places.may_have_moved:
            keep_strays(self.units)
            for unit in self.units:
                if unit.phase is UnitPhase.POST_FORWARD:
                    unit.reshard()  # kept for a backward that did not come, or comes with new weights
                follow_moves(unit)
        if any(map(_has_large, self.units)) or not all(map(_has_no_sums, self.units)):
            for unit in self.units:
                unit.gradients.begin_forward()
        # Decides what is gathered. Where something is in any case, all ranks run this forward.
        is_for_all = self._expects_backward or not all(is_whole(unit) for unit in self.units)
        self._stayed.drop_outdated(self._unsharded, is_for_all=is_for_all)
        if self._has_streams or any(map(_is_in_place, self.units)):
            for unit in self.units:
                if unit.params.is_in_place or unit.runtime.has_streams:
                    unit.begin_pass()  # after `follow_moves`, which writes to shards itself
        for unit in self._unsharded:
            unit.params.follow_trained()
        # Where all stayed whole, this rank may be evaluating alone: nobody would come to a fence.
        self._gathers = not all(is_whole(unit) for unit in self.units)
        if self._gathers:
            if not self._is_captured:
                self._watch.begin_pass(is_training=is_training)
            self.fence(
                "barrier before forward"
            )  # until here peers may have written to their shards
            self._is_fenced = True
        self._begun = self.units[0].runtime.record() if self.units else None

    @property
    def _is_captured(self) -> bool:
        return self._has_streams and self.units[0].runtime.is_capturing

    def look_for_capture(self) -> None:
        """Look whether the forward that is about to begin is captured, and prepare for that: see `runtime`, Note: Captures.

        Raises StateError or UnsupportedError, before anything is changed, if it cannot be.
        """
        if not (self._has_streams and self.units[0].runtime.look()):
            return
        if not self.has_run:
            raise StateError(f"{self.units[0].label}: {NOT_WARM}")
        if self._watch.has_unread:
            raise StateError(
                f"{self.units[0].label}: the pass before this capture was one of those that the engine watches, "
                "and the host has yet to read what was found. Run one more step before the capture."
            )
        if why := next(filter(None, map(_why_not_captured, self.units)), ""):
            raise UnsupportedError(why)
        on_host = [each.reads_values for each in watchers]
        for check in (*on_host, "fullshard.debug(steps=True)" if StepChecks.are_on else ""):
            if check:
                raise UnsupportedError(
                    f"{check} lets the host wait, which no CUDA graph can hold. Switch it off while a step is captured."
                )
        if have_unreduced(self.units) and not self._was_captured:
            raise StateError(
                f"{self.units[0].label}: gradients of backwards before this capture wait for their reduction, and "
                "replays would add the same ones again. Capture all micro-batches of a step."
            )
        for unit in self.units:
            if unit.phase is UnitPhase.GATHERING and not unit.in_capture:
                raise StateError(
                    f"{unit.label}: it is being gathered by an unshard() from before this capture. Call reshard() "
                    "before the capture, or unshard() within."
                )
        for unit in self.units:
            unit.was_captured = True
            if not unit.in_capture:
                unit.reshard()
        self._stayed.forget()
        self.units[0].runtime.look()  # once more, for the memory that was given back just now

    def watch_next_pass(self) -> None:
        """Compare all that a watched pass compares in the next pass, which must not be captured."""
        self._watch.watch_next()

    def conclude_checks(self) -> None:
        """Let the host read what the last pass has compared, if it was watched. Collective."""
        self._watch.conclude()

    def agree_on(self, what: str) -> None:
        """Enter in the flight records what all ranks do now; ranks that differ get a DivergenceError."""
        self._path.agree_on(what)

    def begin_units(
        self,
        units: Sequence[Unit],
        *,
        joined: Sequence[Unit],
        prefetches: bool,
        is_first: bool = True,
        is_training: bool = True,
    ) -> None:
        """Make a module's units usable for its forward, and start gathering the next unit.

        joined: units inside it that are gathered with its own. prefetches: whether the order of the
        last pass decides what is gathered early. is_first: no other module of these units has begun.
        """
        # Backward has its own order, and its own checks.
        is_recomputation = self.backward.end() is not None
        if not is_recomputation:
            self._path.enter(units, is_training=is_training)
        for unit in units:  # all are started before the first is waited for
            if not is_recomputation:
                self._follow_writes(unit)
            if unit.phase < UnitPhase.GATHERING:
                unit.unshard(after=self._begun)
        for unit in joined:
            self.start_forward_unshard(unit)
        for unit in units:
            unit.wait_unshard()
            if is_recomputation or not is_first:
                continue
            # Also where nothing is prefetched: this is what records the order.
            following = self._recorder.next_unit(unit.number)
            is_asked = unit.config.forward_prefetch
            if prefetches and following is not None and (is_asked or self._has_streams):
                self._prefetch_forward(self.units[following], is_asked=is_asked)
        if self._watch.is_watching:
            self._watch.open(units)
        if is_recomputation:
            return
        if self.observer is not None:
            self.observer.enter(Kind.FORWARD, units)
        for watcher in tuple(watchers):
            watcher.units_begin(units)

    def _follow_writes(self, unit: Unit) -> None:
        """Take over what somebody wrote to a unit before its forward, gathered early or not.

        Gathering again is collective: all ranks have to see the write (see `checks.writes`).
        """
        if unit.phase >= UnitPhase.UNSHARDED:
            return
        has_changed = unit.params.is_flat and unit.watch.has_new_pieces
        if has_changed:
            adopt(unit)
            unit.is_left_alone = False  # compute has yet to write what came home
        if (
            unit.phase is UnitPhase.GATHERING  # early
            and not unit.is_held
            and (has_changed or unit.watch.changed_since_gather or self._watch.has_changed(unit))
        ):
            unit.refetch()

    def _prefetch_forward(self, unit: Unit, *, is_asked: bool) -> None:
        """Start gathering a unit before its forward, unless somebody may write to it until then.

        is_asked: by ``forward_prefetch``. With streams the host runs ahead, so most gathers start early enough by
        themselves; those that wait for compute start one unit early. Flat units are prefetched on request in
        watched passes as well.
        """
        may_be_early = is_asked and not unit.is_ordered
        if is_asked and unit.params.is_flat:
            may_be_early = True
        elif unit.runtime.has_streams:
            # Contents are not compared there: of others nobody knows that they are left alone.
            is_known = unit.is_unwritten and not unit.is_ordered and unit.params.extended is None
            may_be_early = is_known and unit.waits_for_compute and unit.runtime.rotation is not None
        if unit.is_joined or not may_be_early or unit.phase >= UnitPhase.GATHERING:
            return
        if unit.comm.overlaps or unit.gains_from_prefetch:
            self.start_forward_unshard(unit)

    def start_forward_unshard(self, unit: Unit) -> None:
        """Start gathering a unit before its module is called, and watch for writes until then."""
        if unit.unshard(early=True, after=self._begun):
            self._watch.note_shards(unit)

    def end_units(
        self, units: Sequence[Unit], *, joined: Sequence[Unit], is_differentiable: bool | None
    ) -> None:
        """End a module's forward: free its units, unless they stay unsharded until backward.

        joined: units inside it that were gathered with its own. is_differentiable: whether an output
        requires a gradient; None if gradients are enabled and none of them does. Raises StateError if somebody wrote to parameters that peers read in place.
        """
        if self.backward.end() is not None:
            return  # a recomputation, whose parameters are needed in the backward that follows
        if self.observer is not None:
            self.observer.leave(Kind.FORWARD, units)
        if self._watch.is_watching:
            self._watch.close(units)  # compares unsharded parameters, so before they are freed
        for unit in units:
            if not self._expects_backward and unit.params.is_in_place:
                self._watch.check_unwritten(unit)
            if self._expects_backward and is_differentiable:
                self._recorder.expect_backward(unit.number)
            if is_differentiable is None:
                unit.keep_for_backward()
            if not unit.is_joined:
                unit.reshard(after_forward=True)
        for unit in joined:
            unit.wait_unshard()  # of those that nobody has used
            unit.reshard(after_forward=True)

    def end_forward(self) -> None:
        """End the root's forward: check for writes, show what users expect, meet in a fence."""
        self.root = self._caller = None
        self._to(Stage.IDLE if self.stage is Stage.FORWARD else Stage.BACKWARD)
        self._end_rotation()
        if not self._expects_backward:
            # Whoever looks at parameters after evaluation must find them sharded, the root's too.
            for unit in self.units:
                # Where a rank may skip it, others would find it sharded in the next pass.
                stays = (
                    unit.config.reshard_after_forward is False
                    and not unit.config.may_be_skipped
                    and not unit.was_captured
                )
                stays |= unit.is_held or unit.awaits_backward
                if not stays and unit.phase is not UnitPhase.GATHERING:
                    unit.reshard()
                unit.note_kept()
        if self._gathers:
            self._watch.refuse_writes(self.units)
        if not self._expects_backward:
            for unit in self.units:
                unit.keep_privately()  # reads peers' shards, so before the fence
            self._stayed.note(self._unsharded)  # counts what is in private memory, so after that
        for unit in self._flat:  # optimizers and `zero_grad` must find what is trained
            if self._expects_backward:
                unit.hide_between()
            elif not unit.is_held:
                unit.hide_unsharded()
        if self._gathers:
            self.fence("after forward")  # from here on peers may write to their shards
        self._path.begin(StepPhase.LOSS if self._expects_backward else StepPhase.BETWEEN)

    @eager  # the compiler may look at what handles an exception of compiled code
    def hide_flat(self) -> None:
        """Let optimizers and `zero_grad` find what is trained of flat units, after an exception in forward."""
        for unit in self._flat:
            unit.hide_between()

    # Backward

    def begin_backward(self, end: Any) -> None:
        """Arrange that ``end`` is called when this backward pass is over, once per pass.

        end: must be an object that nobody else refers to; see `Backward`. Of a backward
        within a backward (reentrant recomputation), the first pass to come here calls it.
        """
        if self.stage >= Stage.BACKWARD:
            return
        for watcher in tuple(watchers):
            watcher.backward_begins(self)
        if self._has_streams:
            runtime = self.units[0].runtime
            if runtime.is_capturing != runtime.look():
                raise StateError(
                    f"{self.units[0].label}: of its forward and this backward, one is captured by a CUDA graph, and one "
                    "is not. Capture both together."
                )
            self._was_captured = runtime.is_capturing
        self.finalization.check_ended("backward")
        self.finalization.begin_backward()
        note_computing(self, self.units)  # autograd may run it in a thread of its own
        self.backward.end = weakref.ref(end)
        self._to(Stage.BACKWARD if self.stage is Stage.IDLE else Stage.NESTED)
        self._path.begin(StepPhase.BACKWARD)
        if not self._is_fenced:
            self.fence("before another backward")  # an optimizer may have written since the last
            for unit in self.units:
                if unit.params.is_in_place:
                    unit.watch.begin()
            self._watch.take_samples()
        self._begun = self.units[0].runtime.record() if self.units else None
        queue_callback(end)

    def note_backward_units(self, units: Sequence[Unit]) -> None:
        """Note that a module's backward starts. Its units are usable."""
        if self._watch.is_watching:
            self._watch.open(units)
        if self.observer is not None:
            self.observer.enter(Kind.BACKWARD, units)

    def prefetch_backward(self, unit: Unit) -> None:
        """Start gathering the unit whose forward came before that of ``unit``."""
        number = self._recorder.start_backward(unit.number)
        if number is None:
            return
        previous = self.units[number]
        if previous.is_joined or not (previous.comm.overlaps or previous.gains_from_prefetch):
            return
        when = unit.config.backward_prefetch
        if when is BackwardPrefetch.BACKWARD_PRE:
            self.start_backward_unshard(previous)
        elif when is BackwardPrefetch.BACKWARD_POST:
            self._prefetch_after[id(unit)] = previous

    def start_backward_unshard(self, unit: Unit) -> None:
        """Start gathering a unit for backward, unless the user said that it needs no parameters."""
        if unit.config.unshard_in_backward:
            unit.unshard(after=self._begun)

    @outside_transforms
    def after_backward(self, unit: Unit, *, keeps: bool = False, is_used: bool = False) -> None:
        """Take a unit's complete gradients, free its parameters, and start reducing.

        keeps: keep the gradients for `finalize` to reduce. is_used: a forward goes on to use the
        parameters, so they are not freed.
        """
        self._path.leave(unit)
        if self.observer is not None:
            self.observer.leave(Kind.BACKWARD, (unit,))
        if self._watch.is_watching:
            self._watch.close((unit,))  # compares unsharded parameters, so before they are freed
        if unit.params.is_in_place:
            self._watch.check_unwritten(unit)
        if unit.params.is_in_place and unit.params.has_post_hooks:  # which write once it is reduced
            self._watch.refuse_writes((unit,))
        # A unit that only some ranks may have used is reduced at the end of backward, in one order
        # on all ranks. Until then its gradients stay in ``.grad`` of the unsharded parameters.
        is_put_off = unit.reduces_unused
        grads = [] if is_put_off else unit.take_gradients()
        # After `take_gradients`, and before reducing, which takes memory of its own.
        if not (unit.is_joined or is_used):
            _free(unit)
        if not is_put_off:
            self._reduce(unit, grads, keeps=keeps)
        following = self._prefetch_after.pop(id(unit), None)  # BACKWARD_POST
        if following is not None and self._recorder.expects_backward(following.number):
            self.start_backward_unshard(following)

    def free_joined(self, units: Iterable[Unit]) -> None:
        """Free units that were gathered with those of a module around them, used or not."""
        for unit in units:
            unit.wait_unshard()
            _free(unit)

    def _reduce(self, unit: Unit, grads: list[torch.Tensor | None], *, keeps: bool = False) -> None:
        """Reduce a unit's full gradients, or keep them for a later backward or for `finalize`."""
        self._unused.note(unit, grads)
        for watcher in tuple(watchers):
            watcher.gradients_complete(unit, grads)
        if keeps or not unit.config.reduce_grads:
            unit.gradients.accumulate(grads)
            grads.clear()  # they are in the sums, and the next gather takes memory
            return
        self.reductions.make_way(unit)
        in_flight = unit.gradients.reduce(grads, unit)
        grads.clear()  # what still reads them holds them; the memory of the others serves the next sum
        if in_flight is not None:
            # Finishing is queued on a lane if there are streams. Else the host would wait, so the
            # last one is left to run beside the next unit's backward.
            self.reductions.add(in_flight, keep=0 if unit.runtime.has_streams else 1)
        else:
            self._path.lack_gradients(unit)

    @outside_transforms
    def end_backward(self, unfinished: Sequence[Unit], *, running: Sequence[Unit] = ()) -> None:
        """End a backward pass: complete the reductions, then meet in a fence.

        unfinished: the units that had no `after_backward` in this pass, and get theirs now.
        running: those whose forward has called this backward, and goes on to use them. Raises StateError if somebody wrote to parameters that peers read in place.
        """
        waits = self.finalization.waits
        # One order on all ranks: reductions are collective.
        for unit in sorted(unfinished, key=_number, reverse=True):
            self.after_backward(unit, keeps=waits, is_used=unit in running)
        if any(map(_is_joined, self.units)):
            self.free_joined(unit for unit in self.units if unit.is_joined)
        if any(map(_reduces_unused, self.units)):
            for unit in reversed(self.units):
                if unit.reduces_unused:
                    self._reduce(unit, unit.take_gradients(), keeps=waits)
                    unit.hide_unsharded()
        if waits:
            self.finalization.end_backward()
            self._leave_backward()
            return
        self._reduce_late_gradients()
        self._finish_backward(is_last=self.said.get("is_last_backward", True))

    def _leave_backward(self) -> None:
        """Return to what the program did when the backward began, if one did."""
        if self.stage >= Stage.BACKWARD:
            self._to(Stage.FORWARD if self.stage is Stage.NESTED else Stage.IDLE)
            self.backward.forget()
            self._is_fenced = False

    def _finish_backward(self, *, is_last: bool) -> None:
        """Complete the reductions that were started, then meet in a fence.

        is_last: whether the iteration ends as well.
        """
        # While in BACKWARD, so that the next pass resets what this leaves if it raises.
        # Hooks after reduction, which may step an optimizer, had their check in `after_backward`.
        checks_all = self._watch.is_watching
        if checks_all or any(map(_is_in_place, self.units)):
            compared = (u for u in self.units if checks_all or u.params.is_in_place)
            self._watch.refuse_writes(unit for unit in compared if not unit.params.has_post_hooks)
        self.reductions.finish()
        self.reductions.release()
        self._end_rotation()
        # Only now: if a user's hook raised in `finish`, the pass counts as stale and is forgotten.
        self._leave_backward()
        self._is_fenced = False  # also where the program ends a backward, after another forward
        unsharded = self._unsharded
        for unit in unsharded:
            unit.note_kept()  # looks for sharded gradients, so after `finish`
        self._stayed.note(unsharded)
        if is_last:
            self._recorder.end_iteration()
            self._path.end_iteration()
            for unit in () if self._are_sharded else self.units:
                if unit.phase is UnitPhase.GATHERING:  # prefetched, but never used
                    unit.settle()
                    unit.finish_reading()
        self.finalization.end()
        self.fence("barrier after backward")  # from here on the optimizers of all ranks may write
        self._path.begin(StepPhase.BETWEEN)
        self._unused.check(self.units)
        for watcher in tuple(watchers):
            watcher.backward_ends(self)

    def _end_rotation(self) -> None:
        """Give memory that gathers of the pass have used in turn back to the allocator."""
        if self.units and (rotation := self.units[0].runtime.rotation) is not None:
            rotation.clear()

    # Backward, if the program ends it

    def finalize(self) -> object:
        """Start what the backwards have left: reduce and free by the settings of now. Collective.

        Returns a token with which `finish_finalizing` waits. Raises StateError if the program does
        not end backwards, while one runs, and for sums that wait for an all-reduce.
        """
        self.finalization.begin(in_backward=self.stage >= Stage.BACKWARD)
        for unit in reversed(self.units):
            # Pipeline schedules add to gradients of unsharded parameters outside of any backward.
            if unit.gradients.unreduced.is_holding or unit.params.shown.has_gradients:
                self._reduce(unit, unit.take_gradients())
            _free(unit)
        return self.finalization.begin_wait()

    def finish_finalizing(self, token: object) -> None:
        """Wait for what `finalize` has started, and end the iteration. Collective.

        Raises StateError if it was forgotten in between.
        """
        self.finalization.end_wait(token)
        self._finish_backward(is_last=True)

    def _reduce_late_gradients(self) -> None:
        """Reduce gradients that autograd has accumulated after their unit's backward.

        The gradient of a view that is older than the forward (``self.kept = self.weight.t()``, once
        for all steps) comes after everything that the forward recorded.
        """
        late = self._late
        if late:
            self.reductions.finish()
        for unit in late:
            self._reduce(unit, unit.take_gradients())
            unit.hide_unsharded()

    # Any time

    def fence(self, label: str) -> None:
        """Meet all ranks that read each other's shards; see [Note: Fences]. label: for messages."""
        if self.observer is not None:
            self.observer.begin(Kind.FENCE)
        for comm in self._fenced:
            comm.fence(label)
        if self.observer is not None:
            self.observer.end()

    def reset(self, *, keeps_gradients: bool) -> None:
        """Forget an iteration that an exception ended, and all that it left on the units.

        keeps_gradients: whether gradients that earlier backwards accumulated are kept.
        """
        if self.observer is not None:
            self.observer.forget()
        if self._has_streams:
            self.units[0].runtime.look()
        # Before the units: collectives under way still read and write memory that they free.
        self.reductions.discard()
        for comm in self._comms:
            comm.abandon()
        self.finalization.end()
        self._recorder.forget()
        self._path.forget()
        self._unused.forget()
        self._prefetch_after.clear()
        self.root = self._caller = None
        self._leave_backward()  # which never came to its own fence
        if self.stage is Stage.FORWARD:
            self._to(Stage.IDLE)
        for unit in self.units:
            unit.reset(keeps_gradients=keeps_gradients)


def _free(unit: Unit) -> None:
    """Free a unit after its backward, or show its gradients on parameters that stay unsharded."""
    if unit.config.reshard_after_backward or unit.config.may_be_skipped or unit.was_captured:
        unit.reshard()
    else:
        unit.hide_unsharded()


def _why_not_captured(unit: Unit) -> str:
    """Say why no CUDA graph can hold a unit's work; "" if one can."""
    if unit.config.offload_to_cpu:
        return (
            f"{unit.label}: CPU offload cannot be captured by a CUDA graph: the host waits for gradients, and steps "
            "the optimizer. Leave offload_policy (cpu_offload) out, or run the step without a graph."
        )
    for comm in (unit.comm, unit.replicate_comm):
        if comm.needs_host:
            return (
                f"{unit.label}: it communicates by {comm.name}, in which the host takes part, so no CUDA graph can "
                "hold it. Use NCCL (set_default_comm('process_group') before sharding, and a group of backend "
                "'nccl'), or run the step without a graph."
            )
    return ""


def _is_running(frame: types.FrameType) -> bool:
    """Return whether a function has yet to return or raise. Drops the variables of one that has."""
    try:
        frame.clear()
    except RuntimeError:  # raised for a frame that is executing
        return True
    return False
