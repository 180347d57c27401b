"""What the wrapper sends, and when: counted and put in order with "collectives".

PyTorch's wrapper makes exactly the same calls, which `--impl torch` shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.api import Api
from tests.collectives import Traffic, record_traffic
from tests.fsdp1.models import (
    Block,
    batch,
    net,
    orig_params,
    parameters,
    quiet,
    run_step,
    whole_gradients,
    wrap,
)
from tests.harness import mesh_of, on_ranks, rank
from tests.training import assert_equal, make_batch, mean_square, my_part

# The one communication that is tested here takes the place of the default.
on_collectives = pytest.mark.apis("peer_memory", "torch")


@contextlib.contextmanager
def _collectives(api: Api) -> Iterator[None]:
    """Let what is wrapped inside make the calls that PyTorch's makes."""
    if api.is_torch:
        yield
        return
    before = api.set_default_comm("collectives")
    try:
        yield
    finally:
        api.set_default_comm(before)


def _wrap(api: Api, strategy: str, use_orig_params: bool, **options: Any) -> Any:
    if "HYBRID" in strategy:
        options["device_mesh"] = mesh_of(2, 2)
    with _collectives(api):
        return wrap(api, net(), strategy, use_orig_params=use_orig_params, **options)


# How many


# Strategy -> all-gathers in a forward, in the backward that follows, reduce-scatters, all-reduces.
# The model has three instances, of which the root keeps its parameters after forward.
COUNTS = {
    "FULL_SHARD": (3, 2, 3, 0),
    "SHARD_GRAD_OP": (3, 0, 3, 0),
    "NO_SHARD": (0, 0, 0, 3),
    "HYBRID_SHARD": (3, 2, 3, 3),
    "_HYBRID_SHARD_ZERO2": (3, 0, 3, 3),
}


def _counts(traffic: Traffic) -> tuple[int, int, int]:
    calls = dict(traffic.calls)
    counts = tuple(calls.pop(name, 0) for name in ("all_gather", "reduce_scatter", "all_reduce"))
    assert not calls
    return counts  # type: ignore[return-value]


@on_collectives
@pytest.mark.parametrize("strategy", [s for s in COUNTS if "HYBRID" not in s])
@orig_params
@on_ranks(2)
def test_each_instance_is_gathered_and_reduced_once(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    _assert_counts(api, strategy, use_orig_params)


@on_collectives
@pytest.mark.parametrize("strategy", COUNTS)
@orig_params
@on_ranks(4)
def test_each_instance_is_gathered_and_reduced_once_on_four_ranks(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    _assert_counts(api, strategy, use_orig_params)


def _assert_counts(api: Api, strategy: str, use_orig_params: bool) -> None:
    for prefetch in (*api.BackwardPrefetch, None):
        _assert_counts_with(api, strategy, use_orig_params, prefetch)


def _assert_counts_with(api: Api, strategy: str, use_orig_params: bool, prefetch: Any) -> None:
    forward, backward, *reductions = COUNTS[strategy]
    model = _wrap(api, strategy, use_orig_params, backward_prefetch=prefetch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with record_traffic() as traffic:
            loss = mean_square(model(my_part(batch())))
        assert _counts(traffic) == (forward, 0, 0)
        with record_traffic() as traffic:
            loss.backward()
        assert _counts(traffic) == (backward, *reductions)
        with record_traffic() as traffic:
            optimizer.step()
            optimizer.zero_grad()
        assert _counts(traffic) == (0, 0, 0)
    model.eval()
    with torch.no_grad(), record_traffic() as traffic:
        model(my_part(batch()))
    assert _counts(traffic) == (forward, 0, 0)


@on_collectives
@pytest.mark.parametrize("strategy", [s for s in COUNTS if "HYBRID" not in s])
@orig_params
@on_ranks(2)
def test_nothing_is_reduced_in_no_sync(api: Api, strategy: str, use_orig_params: bool) -> None:
    _assert_counts_in_no_sync(api, strategy, use_orig_params)


@on_collectives
@pytest.mark.parametrize("strategy", [s for s in COUNTS if "HYBRID" in s])
@orig_params
@on_ranks(4)
def test_nothing_is_reduced_in_no_sync_with_replicas(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    _assert_counts_in_no_sync(api, strategy, use_orig_params)


def _assert_counts_in_no_sync(api: Api, strategy: str, use_orig_params: bool) -> None:
    forward, backward, *reductions = COUNTS[strategy]
    model = _wrap(api, strategy, use_orig_params)
    # Without a reduction, what is kept after forward is kept after backward as well.
    again = forward if backward else 0
    for step in range(2):
        with model.no_sync():
            for expected in (forward + backward, again + backward):
                with record_traffic() as traffic:
                    run_step(model)
                assert _counts(traffic) == (expected, 0, 0), step
        with record_traffic() as traffic:
            run_step(model)
        assert _counts(traffic) == (again + backward, *reductions), step


@on_collectives
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@orig_params
@on_ranks(2)
def test_low_precision_halves_what_travels(api: Api, strategy: str, use_orig_params: bool) -> None:
    nbytes = []
    for dtype in (None, torch.bfloat16):
        precision = api.MixedPrecision(
            param_dtype=dtype, buffer_dtype=dtype, _module_classes_to_ignore=()
        )
        model = _wrap(api, strategy, use_orig_params, mixed_precision=precision)
        with record_traffic() as traffic:
            run_step(model)
        nbytes.append(dict(traffic.nbytes))
    # But for padding: parameters begin where 16 bytes do.
    assert nbytes[0] == pytest.approx({k: 2 * n for k, n in nbytes[1].items()}, rel=0.1)


# In which order


class _Note(torch.autograd.Function):
    """Notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], event: str) -> Tensor:
        ctx.events, ctx.event = events, event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.event)
        return grad, None, None


class Noting(nn.Module):
    """A layer, or none, that notes its forward as f0 and its backward as b0."""

    def __init__(self, events: list[str], name: str, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._note = (events, name)

    def forward(self, x: Tensor) -> Tensor:
        """Note, and run."""
        events, name = self._note
        events.append(f"f{name}")
        return _Note.apply(self.layer(x), events, f"b{name}")


class Wrapped(Noting):
    """One that is an instance of its own."""


def _noting_model(api: Api, events: list[str], **options: Any) -> Any:
    """Wrap three layers, of different sizes; what is between them is t1 and t2."""
    layers = [
        Wrapped(events, "0", nn.Linear(7, 5)),
        Noting(events, "t1", nn.Tanh()),
        Wrapped(events, "1", nn.Linear(5, 3)),
        Noting(events, "t2", nn.Tanh()),
        Wrapped(events, "2", nn.Linear(3, 2)),
    ]
    with _collectives(api):
        policy = ModuleWrapPolicy({Wrapped})
        return wrap(api, nn.Sequential(*layers), auto_wrap_policy=policy, **options)


@contextlib.contextmanager
def _noted(events: list[str]) -> Iterator[None]:
    """Note all-gathers of layers as g0 and reduce-scatters as r0, by the sizes of their shards."""

    def layer_of(tensors: list[Tensor]) -> int:
        shard_numel = min(tensor.numel() for tensor in tensors)  # 20, 9 and 4, and padding
        return 0 if shard_numel > 15 else 1 if shard_numel > 8 else 2

    def watch(original: Any, event: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            events.append(f"{event}{layer_of(tensors)}")
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for event, names in (
            ("g", ("all_gather", "all_gather_into_tensor", "all_gather_single")),
            ("r", ("reduce_scatter_tensor", "reduce_scatter_single")),
        ):
            for name in names:
                if hasattr(dist, name):
                    watched = watch(getattr(dist, name), event)
                    stack.enter_context(mock.patch.object(dist, name, watched))
        yield


FORWARD = {
    False: "g0 f0 ft1 g1 f1 ft2 g2 f2",
    True: "g0 g1 f0 ft1 g2 f1 ft2 f2",
}
# BACKWARD_POST gathers once a layer's backward is over: before what lies between, not after it.
BACKWARD = {
    "BACKWARD_PRE": "g2 g1 b2 r2 bt2 g0 b1 r1 bt1 b0 r0",
    "BACKWARD_POST": "g2 b2 r2 g1 bt2 b1 r1 g0 bt1 b0 r0",
    None: "g2 b2 r2 bt2 g1 b1 r1 bt1 g0 b0 r0",
}
# PyTorch gathers the next before it reduces.
TORCH_POST = "g2 b2 g1 r2 bt2 b1 g0 r1 bt1 b0 r0"


@on_collectives
@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize("backward_prefetch", BACKWARD)
@orig_params
@on_ranks(2)
def test_the_next_instance_is_gathered_early_if_asked_for(
    api: Api, forward_prefetch: bool, backward_prefetch: str | None, use_orig_params: bool
) -> None:
    events: list[str] = []
    model = _noting_model(
        api,
        events,
        use_orig_params=use_orig_params,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch and api.BackwardPrefetch[backward_prefetch],
    )
    backward = BACKWARD[backward_prefetch]
    if api.is_torch and backward_prefetch == "BACKWARD_POST":
        backward = TORCH_POST
    for step in range(3):
        with _noted(events):
            loss = mean_square(model(my_part(make_batch(7))))
            # What comes next is known from the first forward.
            assert " ".join(events) == FORWARD[forward_prefetch and step > 0]
            events.clear()
            loss.backward()
        if not (api.is_torch and forward_prefetch):  # whose reductions wait for another backward
            assert " ".join(events) == backward
        events.clear()


@on_collectives
@on_ranks(2)
def test_nothing_is_gathered_early_in_evaluation_for_backward(api: Api) -> None:
    events: list[str] = []
    model = _noting_model(api, events, use_orig_params=True).eval()
    with torch.no_grad(), _noted(events):
        for _ in range(2):
            model(my_part(make_batch(7)))
            assert " ".join(events) == FORWARD[False]
            events.clear()


# Gradients that wait


def _shape(parameter: nn.Parameter) -> torch.Size | None:
    return None if parameter.grad is None else parameter.grad.shape


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_gradients_that_no_sync_leaves_are_whole(api: Api, strategy: str) -> None:
    model, alone = wrap(api, net(), strategy, use_orig_params=True), net()
    with model.no_sync():
        for seed in (1, 2):
            run_step(model, seed=seed)
            run_step(alone, seed=seed)
            shown = {n: p.grad for n, p in parameters(model).items()}
            assert_equal(shown, {n: p.grad for n, p in alone.named_parameters()})
    own = [p.shape for p in model.parameters()]
    run_step(model, seed=3)
    assert [_shape(p) for p in model.parameters() if p.numel()] == [s for s in own if s.numel()]


class _Either(nn.Module):
    """Two layers, of which a batch may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.uses_both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.one(x)
        return self.other(y) if self.uses_both else y


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_collectives
@on_ranks(2)
def test_what_a_later_step_leaves_out_has_no_gradient_of_an_earlier_one(
    api: Api, use_orig_params: bool
) -> None:
    inner = _Either()
    model = wrap(api, inner, nested=False, use_orig_params=use_orig_params)
    for uses_both in (True, False):
        inner.uses_both = uses_both
        with model.no_sync():
            model(torch.ones(2, 8)).sum().backward()
        shown = [p.grad for p in model.parameters()]
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
    if use_orig_params:
        assert [grad is None for grad in shown] == [False, False, True, True]
    else:
        weight, bias = 8 * 8, 8
        assert shown[0][: weight + bias].any()
        assert not shown[0][weight + bias :].any()


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_a_dtype_that_changes_while_sums_wait_is_that_of_the_next_sums(api: Api) -> None:
    model = wrap(api, _Either(), nested=False, use_orig_params=True)
    for dtype in (torch.float32, torch.float64):
        with model.no_sync():
            model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
        model.double()
        model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
        model.zero_grad()


@on_collectives
@on_ranks(2)
def test_gradients_of_no_sync_that_a_user_keeps_are_not_overwritten(api: Api) -> None:
    model = wrap(api, net(), use_orig_params=True)
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for seed in range(3):
        with model.no_sync():
            run_step(model, seed=seed)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        run_step(model, seed=seed)
        kept += found
        copies += [grad.clone() for grad in found]
        model.zero_grad()
    assert_equal(dict(enumerate(kept)), dict(enumerate(copies)))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_gradients_of_flat_parameters_are_whole_in_no_sync(api: Api, strategy: str) -> None:
    model, alone = wrap(api, net(), strategy), net()
    with model.no_sync():
        run_step(model)
    run_step(alone)
    for path, (name, flat) in zip(
        ("", "blocks.0", "blocks.1"), parameters(model).items(), strict=True
    ):
        module = alone.get_submodule(path)
        names = [n for n, _ in module.named_parameters() if path or not n.startswith("blocks")]
        expected = torch.cat([module.get_parameter(n).grad.reshape(-1) for n in names])
        if not api.is_torch:  # whose gradients lack the padding at the end
            assert flat.grad.numel() == flat.numel() * (1 if strategy == "NO_SHARD" else 2), name
        # Padding is between parameters as well, to align them, or at the end.
        assert torch.equal(flat.grad[flat.grad != 0], expected[expected != 0]), name
    run_step(model)
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@orig_params
@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks(2)
def test_dropped_gradients_are_not_reduced(
    api: Api, strategy: str, use_orig_params: bool, set_to_none: bool
) -> None:
    if api.is_torch and not set_to_none and use_orig_params:
        pytest.skip("PyTorch: zeroes what it shows, and keeps what it has")
    model, plain = (wrap(api, net(), strategy, use_orig_params=use_orig_params) for _ in range(2))
    for each in (model, plain):
        each.batch_norm.momentum = 0.0
    with model.no_sync():
        run_step(model, seed=1)
        model.zero_grad(set_to_none=set_to_none)
    for each in (model, plain):
        run_step(each, seed=2)
    actual, expected = (
        {n: p.grad for n, p in parameters(each).items() if p.numel()} for each in (model, plain)
    )
    assert_equal(actual, expected)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_gradients_before_no_sync_are_added_to(api: Api, strategy: str) -> None:
    model = wrap(api, net(), strategy, use_orig_params=True)
    model.batch_norm.momentum = 0.0
    parts = []
    for seed in (1, 2, 3):
        run_step(model, seed=seed)
        parts.append(whole_gradients(api, model))
        model.zero_grad()
    run_step(model, seed=1)
    with model.no_sync():
        run_step(model, seed=2)
    run_step(model, seed=3)
    expected = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert_equal(whole_gradients(api, model), expected, rtol=1e-5, atol=1e-6)


# Order across ranks


class Branches(nn.Module):
    """Runs two blocks in an order of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.order = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        for number in self.order:
            x = self.blocks[number](x)
        return x


@contextlib.contextmanager
def _debugging_in_detail() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        yield
    finally:
        dist.set_debug_level(before)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@orig_params
@on_ranks(2, 4)
def test_ranks_that_run_in_another_order_are_told(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    if api.is_torch and (strategy == "NO_SHARD" or use_orig_params):
        pytest.skip("PyTorch: looks at all-gathers alone, and fails on the names of parameters")
    with _debugging_in_detail():
        torch.manual_seed(1)
        model = wrap(api, Branches(), strategy, use_orig_params=use_orig_params)
        if rank() == 1:
            model.module.order.reverse()
        with quiet(), pytest.raises(RuntimeError, match="order differs across ranks"):
            model(my_part(make_batch(6)))


@on_ranks(2)
def test_order_that_differs_from_the_first_iteration_is_warned_of(api: Api) -> None:
    with _debugging_in_detail():
        torch.manual_seed(1)
        model = wrap(api, Branches(), use_orig_params=True)
        run_branches = my_part(make_batch(6))
        mean_square(model(run_branches)).backward()
        model.module.order.reverse()
        with pytest.warns(UserWarning, match="order differs from that of the first"):
            mean_square(model(run_branches)).backward()


@on_ranks(2)
def test_order_is_checked_in_detail_alone(api: Api) -> None:
    torch.manual_seed(1)
    model = wrap(api, Branches(), "NO_SHARD", use_orig_params=True)
    for order in ([0, 1], [1, 0]):
        model.module.order = order
        with record_traffic() as traffic:
            mean_square(model(my_part(make_batch(6)))).backward()
        assert traffic.calls["object"] == 0
