"""Record a forward and a backward while they run: kernels, and bytes that are in use, stretch by stretch.

The recorder sees every operator, on fake tensors or on real ones. Memory is that of storages: it comes when an
operator returns one that nobody had, and goes when the last tensor over it does.

In backward an operator belongs to the stretch whose forward has recorded the node of the graph that runs it:
nodes are numbered in the order in which they are recorded, and autograd runs them from the last to the first. What runs
with gradients switched on, which they are not in a backward, is computed again by activation checkpointing. It counts
for the stretch whose backward goes on after it: with checkpoints that keep the graph of the forward that is the one
which needs its values, with reentrant ones the last of those that are computed again.
"""

import bisect
import collections
import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fullshard.plan.workload import Stretch, Work
from fullshard.planning.kernels import Kernel, kernels_of, tensor_nbytes, tensors_of
from fullshard.torch_private import (
    TorchDispatchMode,
    current_autograd_node,
    grouped_mm,
    is_fake,
    next_sequence_number,
    sequence_number,
)

Works = collections.Counter[Work]


@dataclasses.dataclass
class Span:
    """What is recorded of a stretch; fields of `Stretch` mean the same. model_flops: of forward and backward."""

    forward: Works = dataclasses.field(default_factory=collections.Counter)
    backward: Works = dataclasses.field(default_factory=collections.Counter)
    recomputed: Works = dataclasses.field(default_factory=collections.Counter)
    saved_nbytes: int = 0
    freed_nbytes: int = 0
    forward_peak_nbytes: int = 0
    recomputed_nbytes: int = 0
    recomputed_peak_nbytes: int = 0
    backward_peak_nbytes: int = (
        0  # while it is recorded, above what was before the recomputation as well
    )
    gradient_nbytes: int = 0
    model_flops: float = 0.0

    def stretch(self) -> Stretch | None:
        """Return it as a stretch; None if nothing happened."""
        made = Stretch(
            forward=_merged(self.forward),
            backward=_merged(self.backward),
            recomputed=_merged(self.recomputed),
            saved_nbytes=self.saved_nbytes,
            freed_nbytes=self.freed_nbytes,
            forward_peak_nbytes=self.forward_peak_nbytes,
            recomputed_nbytes=self.recomputed_nbytes,
            recomputed_peak_nbytes=self.recomputed_peak_nbytes,
            backward_peak_nbytes=max(0, self.backward_peak_nbytes - self.recomputed_nbytes),
            gradient_nbytes=self.gradient_nbytes,
        )
        return None if made == Stretch((), ()) else made


@dataclasses.dataclass
class _Again:
    """What is recomputed, while it is not known yet for which span. number: of the node that asked for it."""

    number: int
    span: int  # that of the node
    works: Works = dataclasses.field(default_factory=collections.Counter)
    peak_nbytes: int = 0
    num_entered: int = 0  # stretches that it has come to since it began


def _merged(works: Works) -> tuple[Work, ...]:
    return tuple(work._replace(count=count) for work, count in works.items())


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator. Of grouped matmuls in other dtypes torch knows the shape for bfloat16 only (2.13)."""
    if func.overloadpacket is not grouped_mm or not is_fake(args[0]):
        return func(*args, **kwargs)
    wide = args[0].dtype
    narrow = [each.bfloat16() if each.dtype == wide else each for each in args[:2]]
    like = func(*narrow, *args[2:], **kwargs)
    return torch.empty_strided(like.shape, like.stride(), dtype=wide, device=like.device)


class Recorder(TorchDispatchMode):
    """See operators of a forward, whose parts `next_stretch` separates, and then of its backward.

    spans: in the order of the forward. with_gradient: watched parameters that have got one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans = [Span()]
        self.num_recorded = 0  # operators that computed something, or made memory
        self._starts = [0]  # numbers of nodes, in ascending order, and the spans that begin there
        self._starting = [0]
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._in_use = 0
        self._base = 0  # what was in use when the current span began
        self._last = self.spans[0]  # of the forward, in which something was recorded
        self._current = 0
        self.is_backward = False
        self._next_number = (
            0  # of a node, when the last operator ran that belonged to the backward itself
        )
        self._again: _Again | None = None
        self._grads: list[Tensor] = []  # gradients that the current span has left
        self.with_gradient: set[Tensor] = set()

    # What is in use

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Let the memory of tensors count nothing."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage), 0

    def watch(self, parameter: Tensor) -> None:
        """Let a parameter's memory count nothing, and its gradient as that of the stretch that leaves it."""
        self.leave_out([parameter])
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)

    def _take_gradient(self, parameter: Any) -> None:
        if parameter not in self.with_gradient:
            self.with_gradient.add(parameter)
            self._span.gradient_nbytes += tensor_nbytes(parameter.grad)
        self._grads.append(parameter)

    def _follow(self, tensors: Iterable[Tensor]) -> bool:
        """Count the memory of tensors, and tell whether any of it is new."""
        is_new = False
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._storages or not (nbytes := storage.nbytes()):
                continue
            is_new = True

            def forget(_reference: object, key: int = key) -> None:
                _, nbytes = self._storages.pop(key)
                self._in_use -= nbytes

            self._storages[key] = weakref.ref(storage, forget), nbytes
            self._in_use += nbytes
        return is_new

    def _activations(self) -> int:
        """What is in use beside gradients of parameters."""
        return self._in_use - sum(
            tensor_nbytes(each.grad) for each in self._grads if each.grad is not None
        )

    # Which stretch it is

    @property
    def _span(self) -> Span:
        return self.spans[self._current]

    def next_stretch(self) -> None:
        """Begin another stretch of the forward; in backward, come to it again in a recomputation."""
        if self.is_backward:
            again = self._begin_recomputing()
            again.num_entered += 1
            # For reentrant checkpoints, which run backwards through what they have recomputed.
            self._begin_nodes(next_sequence_number(), again.span + again.num_entered)
            return
        self._end_forward()
        self.spans.append(Span())
        self._current = len(self.spans) - 1
        self._begin_nodes(next_sequence_number(), self._current)

    def _begin_nodes(self, number: int, span: int) -> None:
        self._starts.append(number)
        self._starting.append(min(span, len(self.spans) - 1))

    def _span_of(self, number: int) -> int:
        return self._starting[bisect.bisect(self._starts, number) - 1]

    def _end_forward(self) -> None:
        self._last.saved_nbytes += self._in_use - self._base
        self._base = self._in_use

    def begin_backward(self) -> None:
        """End the forward: what follows is the backward, of the last stretch first."""
        self._end_forward()
        self.is_backward = True
        self._next_number = next_sequence_number()

    def end_backward(self) -> None:
        """End the backward."""
        self._leave_span()
        self._drop_gradients()

    def _leave_span(self) -> None:
        in_use = self._activations()
        self._span.freed_nbytes += self._base - in_use
        self._base = in_use

    def _drop_gradients(self) -> None:
        for parameter in self._grads:
            parameter.grad = None
        self._grads.clear()

    def _locate(self) -> None:
        """Find out to which span an operator of the backward belongs, before it runs."""
        if torch.is_grad_enabled():
            if current_autograd_node() is not None:
                self._begin_recomputing()
            return
        node = current_autograd_node()
        # Nodes that accumulate the gradients of leaves have a number above all others.
        if node is None or (number := sequence_number(node)) >= next_sequence_number():
            return
        span = self._span_of(number)
        if self._again is not None:
            is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
            if self._again.num_entered and number == self._again.number and is_function:
                return  # a reentrant checkpoint, before its own backward
            self._end_recomputing(span)
        elif span != self._current:
            self._leave_span()
            self._drop_gradients()
            self._current = span

    def _begin_recomputing(self) -> _Again:
        if self._again is None:
            number = sequence_number(current_autograd_node())
            span = self._span_of(number)
            self._leave_span()
            if span != self._current:
                self._drop_gradients()
            self._again = _Again(number, span)
            self._begin_nodes(self._next_number, span)
        return self._again

    def _end_recomputing(self, span: int) -> None:
        again, self._again = self._again, None
        assert again is not None
        self._next_number = next_sequence_number()
        self._current = span
        recorded = self._span
        before = self._base + recorded.freed_nbytes
        recorded.recomputed.update(again.works)
        recorded.recomputed_peak_nbytes = max(
            recorded.recomputed_peak_nbytes, again.peak_nbytes - before
        )
        recorded.recomputed_nbytes = max(recorded.recomputed_nbytes, self._activations() - before)

    # What runs

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _called(func, args, kwargs)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a tensor's device, and the like
            return func(*args, **kwargs)
        if self.is_backward:
            self._locate()
        in_use = self._in_use
        result = self._run(func, args, kwargs)
        is_new = self._follow(tensors_of(result))
        kernels = kernels_of(func, args, kwargs, result, makes_memory=is_new)
        if is_new or kernels:
            self._record(kernels, in_use)
        return result

    def _record(self, kernels: Iterable[Kernel], in_use: int) -> None:
        """Count what an operator did. in_use: before it."""
        self.num_recorded += 1
        span = self._span
        if not self.is_backward and span is not self._last:
            # What has gone since the stretch before was over, that one has left to whoever called it.
            self._last.saved_nbytes += in_use - self._base
            self._last, self._base = span, in_use
        self._note_peak()
        for kernel in kernels:
            if self._again is not None:
                self._again.works[kernel.work] += 1
                continue
            span.model_flops += kernel.model_flops
            works = span.backward if self.is_backward else span.forward
            works[kernel.work] += 1

    def _note_peak(self) -> None:
        span = self._span
        if self._again is not None:
            self._again.peak_nbytes = max(self._again.peak_nbytes, self._in_use)
        elif self.is_backward:
            peak = self._in_use - self._base - span.freed_nbytes
            span.backward_peak_nbytes = max(span.backward_peak_nbytes, peak)
        else:
            peak = self._in_use - self._base
            span.forward_peak_nbytes = max(span.forward_peak_nbytes, peak)
