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

from fullshard.errors import UnsupportedError
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
_MOST_OPERATORS = (
    20_000  # of a stretch's forward, which has some hundreds unless it loops over tokens
)


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
    backward_peak_nbytes: int = 0  # above what was before the recomputation as well
    gradient_nbytes: int = 0
    model_flops: float = 0.0

    def stretch(self) -> Stretch | None:
        """Return it as a stretch; None if nothing happened."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(Stretch)}
        for name in ("forward", "backward", "recomputed"):
            fields[name] = tuple(w._replace(count=n) for w, n in fields[name].items())
        peak_nbytes = self.backward_peak_nbytes - self.recomputed_nbytes
        fields["backward_peak_nbytes"] = max(0, peak_nbytes)
        return Stretch(**fields) if any(fields.values()) else None


@dataclasses.dataclass
class _Again:
    """What is recomputed, while it is not known yet for which span. number: of the node that asked for it."""

    number: int
    span: int  # that of the node
    works: Works = dataclasses.field(default_factory=collections.Counter)
    peak_nbytes: int = 0
    num_entered: int = 0  # stretches that it has come to since it began


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
        self.is_backward = False
        self.num_recorded = 0  # operators that computed something, or made memory
        # Numbers of nodes, in ascending order, and the spans that begin there.
        self._starts = [(0, 0)]
        self._current = 0
        self._first = 0  # how many were recorded before the current stretch of the forward
        self._last = self.spans[0]  # of the forward, in which something was recorded
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._in_use = 0
        self._base = 0  # what was in use when the current span began
        self.with_gradient: set[Tensor] = set()
        # Of a node, when the last operator ran that belonged to the backward itself.
        self._next_number = 0
        self._again: _Again | None = None

    # What is in use

    def leave_out(self, tensor: Tensor) -> None:
        """Let the memory of a tensor count nothing."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = weakref.ref(storage), 0

    def watch(self, parameter: Tensor) -> None:
        """Let a parameter's gradient count as that of the stretch that leaves it."""
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(self._take_gradient)

    def _take_gradient(self, parameter: Any) -> None:
        if parameter not in self.with_gradient:
            self.with_gradient.add(parameter)
            self._span.gradient_nbytes += tensor_nbytes(parameter.grad)
        parameter.grad = None

    def _follow(self, tensors: Iterable[Tensor]) -> bool:
        """Count the memory of tensors, and tell whether any of it is new."""
        is_new = False
        for tensor in tensors:
            if tensor.layout not in (torch.strided, torch.jagged):
                raise UnsupportedError(
                    f"A tensor of shape {tuple(tensor.shape)} has the layout {tensor.layout}, such as a gradient of "
                    "nn.Embedding(sparse=True). Only dense ones are reduced and planned: use sparse=False."
                )
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
            span = min(again.span + again.num_entered, len(self.spans) - 1)
        else:
            self.spans.append(Span())
            span = self._current = len(self.spans) - 1
            self._first = self.num_recorded
        self._starts.append((next_sequence_number(), span))

    def _span_of(self, node: Any) -> int:
        place = bisect.bisect(self._starts, sequence_number(node), key=lambda start: start[0])
        return self._starts[place - 1][1]

    def begin_backward(self) -> None:
        """End the forward: what follows is the backward, of the last stretch first."""
        self._last.saved_nbytes += self._in_use - self._base
        self._base = self._in_use
        self.is_backward = True
        self._next_number = next_sequence_number()

    def end_backward(self) -> None:
        """End the backward."""
        self._go_to(self._current)

    def _go_to(self, span: int) -> None:
        """Leave the current span for another one's backward."""
        self._span.freed_nbytes += self._base - self._in_use
        self._base = self._in_use
        self._current = span

    def _locate(self) -> None:
        """Find out to which span an operator of the backward belongs, before it runs."""
        node = current_autograd_node()
        if torch.is_grad_enabled():
            if node is not None:
                self._begin_recomputing()
            return
        # Nodes that accumulate the gradients of leaves have a number above all others.
        if node is None or sequence_number(node) >= next_sequence_number():
            return
        span = self._span_of(node)
        if self._again is not None:
            is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
            is_same = self._again.number == sequence_number(node)
            if is_function and is_same and self._again.num_entered:
                return  # a reentrant checkpoint, before its own backward
            self._end_recomputing(self._again, span)
        elif span != self._current:
            self._go_to(span)

    def _begin_recomputing(self) -> _Again:
        if self._again is None:
            node = current_autograd_node()
            self._again = _Again(sequence_number(node), self._span_of(node))
            self._go_to(self._again.span)
            self._starts.append((self._next_number, self._again.span))
        return self._again

    def _end_recomputing(self, again: _Again, span: int) -> None:
        self._again, self._current = None, span
        self._next_number = next_sequence_number()
        recorded = self._span
        before = self._base + recorded.freed_nbytes
        recorded.recomputed.update(again.works)
        recorded.recomputed_peak_nbytes = max(
            recorded.recomputed_peak_nbytes, again.peak_nbytes - before
        )
        recorded.recomputed_nbytes = max(recorded.recomputed_nbytes, self._in_use - before)

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
        if again := self._again:
            works, peak_nbytes = again.works, self._in_use + span.gradient_nbytes
            again.peak_nbytes = max(again.peak_nbytes, peak_nbytes)
        elif self.is_backward:
            works, above = span.backward, self._in_use + span.gradient_nbytes - self._base
            span.backward_peak_nbytes = max(span.backward_peak_nbytes, above - span.freed_nbytes)
        else:
            if self.num_recorded - self._first > _MOST_OPERATORS:
                raise OverflowError(
                    f"more than {_MOST_OPERATORS:,} operators, as of a loop over tokens, which takes minutes to run. Give "
                    "shorter sequences and more of them (--seq, --batch), or a module that has a kernel for the loop"
                )
            works, above = span.forward, self._in_use - self._base
            span.forward_peak_nbytes = max(span.forward_peak_nbytes, above)
        works.update(kernel.work for kernel in kernels)
        if not again:
            span.model_flops += sum(kernel.model_flops for kernel in kernels)
