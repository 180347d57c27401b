"""Collectives of a fake process group: what they read and write, on which lane, and when it is over.

Every rank is taken to have what this one has: an all-gather repeats this rank's shard, a sum is this
rank's own part. As with NCCL, a collective that was asked for with ``async_op=False`` runs on the
current lane. Any other runs on a lane of its group, which follows the current lane at the call;
``wait`` lets the lane that is current by then follow the group's.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from fullshard.engine.runtime import Lane
from tests.streams.lanes import HOST, GroupLane, Lanes
from tests.streams.memory import Place
from tests.streams.recording import Recorder, engine_site


class Work:
    """A collective under way. ``lane``: where it runs."""

    def __init__(self, lanes: Lanes, lane: Hashable) -> None:
        self._lanes = lanes
        self._event = None
        with lanes.on(lane):
            self._event = lanes.record()

    def wait(self, timeout: object = None) -> bool:
        """Let the current lane wait for the collective."""
        self._lanes.wait(self._event)
        return True

    def is_completed(self) -> bool:
        return True


class Collectives:
    """Stands in for the methods of process groups in which all collectives end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lanes: dict[str, GroupLane] = {}
        self.num_calls: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace the methods of all process groups."""
        methods = {
            "all_gather_single": self._one(self.all_gather),
            "_allgather_base": self._one(self.all_gather),
            "all_gather_single_coalesced": self._many(self.all_gather),
            "allgather_into_tensor_coalesced": self._many(self.all_gather),
            "reduce_scatter_single": self._one(self.reduce_scatter),
            "_reduce_scatter_base": self._one(self.reduce_scatter),
            "reduce_scatter_single_coalesced": self._many(self.reduce_scatter),
            "reduce_scatter_tensor_coalesced": self._many(self.reduce_scatter),
            "allreduce": self._in_place,
            "allreduce_coalesced": self._in_place,
            "broadcast": self._in_place,
        }
        with contextlib.ExitStack() as stack:
            for name, method in methods.items():
                if hasattr(dist.ProcessGroup, name):
                    stack.enter_context(
                        mock.patch.object(dist.ProcessGroup, name, _as_method(method))
                    )
            yield

    def all_gather(self, target: Tensor, source: Tensor, size: int) -> None:
        """Fill every rank's part with this one's."""
        target.view(size, -1).copy_(source.reshape(1, -1).clone())

    def reduce_scatter(self, target: Tensor, source: Tensor, size: int) -> None:
        """Take the first part for the sum."""
        target.view(-1).copy_(source.view(size, -1)[0].clone())

    def _one(self, move: Callable[[Tensor, Tensor, int], None]) -> Callable[..., Any]:
        return lambda group, target, source, options=None, *_: self._run(
            move, group, [target], [source], options
        )

    def _many(self, move: Callable[[Tensor, Tensor, int], None]) -> Callable[..., Any]:
        return lambda group, targets, sources, options=None, *_: self._run(
            move, group, targets, sources, options
        )

    def _in_place(self, group: Any, tensors: Sequence[Tensor], options: Any = None, *_: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._run(None, group, tensors, tensors, options)

    def _run(
        self,
        move: Callable[[Tensor, Tensor, int], None] | None,
        group: dist.ProcessGroup,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        options: Any,
    ) -> Work | None:
        """Run one collective and record it; return what is to be waited for, if anything is."""
        recorder, lanes = self._recorder, self._recorder.lanes
        is_on_device = recorder.place_of(targets[0]) is Place.DEVICE
        pairs = [*zip(targets, sources, strict=True)] if move else []
        capture = lanes.capture if is_on_device else None
        if capture is not None:
            capture.note_use(sources, targets)
        with recorder.paused():
            for target, source in pairs:
                move(target, source, group.size())
                if capture is not None:
                    capture.add(move, (target, source, group.size()), {})
        kind = "sum in place" if move is None else move.__name__
        self.num_calls[kind] += 1
        # Those between passes, such as the norm of all gradients, are of the lane that asks for them, and
        # the program's are its own matter.
        is_ours = bool(site := engine_site()) and not site.startswith("comm/outside_steps.py")
        if is_ours and recorder.is_in_step and is_on_device and lanes.current is Lane.COMPUTE:
            recorder.report(f"lane: {kind} runs on COMPUTE")
        if not getattr(options, "asyncOp", True):
            recorder.note(sources, targets, kind)
            return None
        lane: Hashable = HOST
        if is_on_device:
            lane = self._lanes.setdefault(group.group_name, GroupLane(group.group_name))
            lanes.follow(lane, lanes.current)
        with lanes.on(lane):
            recorder.note(sources, targets, kind)
        return Work(lanes, lane)


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return method
