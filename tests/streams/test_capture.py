"""Steps of the engine in a CUDA graph, on a virtual device: what is captured, what is refused, in which bits it trains.

Each program is run twice: step by step, and captured after its first steps. Twenty replays give the losses,
parameters and optimizer state of twenty steps, and nothing in the capture waits, or reaches out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import fullshard
from fullshard import StateError, UnsupportedError
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.checks import writes
from fullshard.engine.checks.writes import WriteWatch
from fullshard.torch_private import local_part
from tests.models import Problem
from tests.selection import repeats
from tests.streams.lab import Lab, fake_world
from tests.streams.programs import run_program
from tests.streams.programs.common import OFFLOAD, data_of, problem_of, shard, wrap
from tests.streams.recording import DEVICE

NUM_REPLAYS = 20
# Programs of which a step is one call of `train`'s: others go through steps of their own.
CAPTURED = [
    *("plain", "keep-after-forward", "one-rank", "hsdp", "explicit-prefetch", "clip"),
    *("accumulate-clip", "kept-between-micro-batches", "flat", "pieces", "bf16", "reshard-over-two"),
    *("accumulate", "replicas", "hsdp-bf16", "bf16-all", "reshard-over-two-bf16", "one-rank-bf16"),
    *("accumulate-each", "accumulate-bf16", "accumulate-hsdp", "several-inputs-held"),
    *("unused-parameters-reduced", "unshard-early", "unshard-and-read", "evaluation-between"),
    *("recomputation", "all-reduce-hook", "all-reduce-hook-on-a-stream", "hooks-on-gradients"),
    *("frozen-by-turns", "custom-collectives", "custom-collectives-without-work"),
    *("registered-memory", "separate-reduce-group", "whole-after-a-step", "finalized"),
    *("flat-clip", "flat-bf16", "flat-prefetch", "flat-prefetch-post", "flat-grad-op", "flat-no-shard"),
    *("flat-hook", "flat-low-precision-gradients", "pieces-clip", "pieces-bf16", "pieces-grad-op"),
    *("pieces-prefetch", "pieces-no-shard", "pieces-hook"),
]  # fmt: skip
FIRST = 10  # of them in every run of the tests


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Be one rank of four; the others answer at once."""
    with fake_world():
        yield


def _contents(lab: Lab) -> list[Tensor]:
    """Return what was trained: losses, parameters and optimizer state."""
    found = list(lab.losses)
    for _, optimizer in lab.trained:
        for group in optimizer.param_groups:
            found += map(local_part, group["params"])
        states = (value for state in optimizer.state.values() for value in state.values())
        found += [local_part(value) for value in states if value is not None]
    return found


def _assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert [
        number for number, pair in enumerate(zip(one, other, strict=True)) if not torch.equal(*pair)
    ] == []


@repeats(lambda settings: settings["name"] not in CAPTURED[:FIRST])
@pytest.mark.parametrize("name", CAPTURED)
def test_replays_train_in_the_bits_of_steps(name: str) -> None:
    eager = run_program(name, "deep", num_more=NUM_REPLAYS)
    captured = run_program(name, "deep", num_more=NUM_REPLAYS, captures=True)
    assert captured.problems == []
    assert len(set(map(float, eager.losses))) > NUM_REPLAYS  # each step counts
    _assert_equal(_contents(captured), _contents(eager))


@pytest.mark.long
@pytest.mark.parametrize("model", ["wide", "tied_transformer", "two_dtypes"])
@pytest.mark.parametrize("name", ["plain", "hsdp", "accumulate-clip", "pieces"])
def test_replays_train_in_the_bits_of_steps_with_every_model(name: str, model: str) -> None:
    eager = run_program(name, model, num_more=NUM_REPLAYS)
    captured = run_program(name, model, num_more=NUM_REPLAYS, captures=True)
    assert captured.problems == []
    _assert_equal(_contents(captured), _contents(eager))


# What comes before, between and after


class _Run:
    """A model that is trained step by step, and captured. It is made anew, in the same bits, by each call."""

    def __init__(self, lab: Lab, make: Callable[[Problem], Any] = shard, **options: Any) -> None:
        torch.manual_seed(0)
        self.lab = lab
        self.problem = problem_of("deep")
        self.model: Any = make(self.problem, **options)
        self.params = list(self.model.parameters())
        self.optimizer = SGD(self.params, lr=1e-2, momentum=0.9)
        self.inputs, self.targets = data_of(self.problem, lab)

    def backward(self) -> Tensor:
        loss = self.problem.loss(self.model(self.inputs), self.targets)
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def steps(self, count: int) -> list[Tensor]:
        return [self.step() for _ in range(count)]

    def evaluate(self) -> Tensor:
        with torch.no_grad():
            return self.problem.loss(self.model(self.inputs), self.targets)

    def contents(self) -> list[Tensor]:
        state = [each["momentum_buffer"] for each in self.optimizer.state.values()]
        return [local_part(each).clone() for each in (*self.params, *state)]


def _stays_whole(problem: Problem, **options: Any) -> Any:
    model = shard(problem, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    return model


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (shard, {"reshard_after_forward": False}),
        (_stays_whole, {}),
        (wrap, {"use_orig_params": True}),
    ],
    ids=["kept-after-forward", "kept-after-backward", "wrapper"],
)
def test_evaluation_between_replays_sees_what_they_have_written(
    make: Any, options: dict[str, Any]
) -> None:
    with Lab() as lab:
        eager = _Run(lab, make, **options)
        eager.steps(3)
        expected = []
        for _ in range(3):
            expected += [
                eager.step(),
                eager.evaluate(),
                eager.step(),
                eager.step(),
                eager.evaluate(),
            ]
        run = _Run(lab, make, **options)
        run.evaluate()
        run.steps(3)
        run.evaluate()  # what stays unsharded is in memory that is not the graph's
        asked = mock.patch.object(ProcessGroupComm, "agree", side_effect=AssertionError)
        with asked, lab.capturing() as graph:  # for which the host would wait
            loss = run.step()

        def replayed() -> Tensor:
            graph.replay()
            return loss.clone()

        found = []
        for _ in range(3):
            found += [replayed(), run.evaluate(), run.step(), replayed(), run.evaluate()]
        _assert_equal(found, expected)
        _assert_equal(run.contents(), eager.contents())
    assert lab.problems == []


def test_nothing_that_was_gathered_in_a_capture_is_used_outside() -> None:
    with Lab() as lab:
        run = _Run(lab, _stays_whole)
        run.evaluate()
        run.steps(3)
        expected = run.evaluate()
        with lab.capturing():
            run.backward()
        assert torch.equal(run.evaluate(), expected)  # no replay has gathered anything
    assert lab.problems == []


class _Opaque:
    """What nobody can look into, so that a backward may come that no output announces."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _Last(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return _Opaque(super().forward(x))


def test_memory_that_waits_for_a_backward_goes_when_a_capture_begins() -> None:
    with Lab() as lab:
        torch.manual_seed(0)
        layers: list[Any] = [*(nn.Linear(16, 16) for _ in range(3)), _Last(16, 16)]
        data = torch.randn(12, 16), torch.randn(12, 16)
        model = shard(Problem(nn.Sequential(*layers), *data, layers))
        optimizer = SGD(model.parameters(), lr=1e-2)
        x = data[0].to(DEVICE)

        def step() -> Tensor:
            loss = model(x).value.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(3):
            step()
        model(x)  # without a backward
        with lab.capturing() as graph:
            step()
        for _ in range(2):
            graph.replay()
    assert lab.problems == []


def test_steps_between_replays_go_on_from_them_and_leave_their_memory_alone() -> None:
    with Lab() as lab:
        eager, run = _Run(lab), _Run(lab)
        run.steps(3), eager.steps(3)
        with lab.capturing() as graph:
            loss = run.step()
        kept: list[Any] = []
        for _ in range(4):
            graph.replay()
            assert torch.equal(loss, eager.step())
            run.backward(), eager.backward()
            for each in (run, eager):
                kept.append([p.grad for p in each.params])
                each.optimizer.step()
                each.optimizer.zero_grad()
        _assert_equal(run.contents(), eager.contents())
        for ours, theirs in zip(kept[::2], kept[1::2], strict=True):
            _assert_equal([*map(local_part, ours)], [*map(local_part, theirs)])
    assert lab.problems == []


def test_gradients_that_a_replay_leaves_are_those_of_the_step() -> None:
    with Lab() as lab:
        eager, run = _Run(lab), _Run(lab)

        def step(of: _Run) -> None:
            of.optimizer.zero_grad()
            of.backward()
            of.optimizer.step()

        for _ in range(3):
            step(eager)
            step(run)
        with lab.capturing() as graph:
            step(run)
        for _ in range(2):
            graph.replay()
            step(eager)
            grads = ([local_part(p.grad) for p in each.params] for each in (run, eager))
            _assert_equal(*grads)
    assert lab.problems == []


def test_checks_are_left_to_passes_that_are_not_captured() -> None:
    began: list[bool] = []
    begin = WriteWatch.begin_pass

    def beginning(self: WriteWatch, *, is_training: bool) -> None:
        begin(self, is_training=is_training)
        began.append(self.is_watching)

    with Lab() as lab, mock.patch.object(writes, "_WATCHED", frozenset({0, 1, 3})):
        run = _Run(lab)
        with mock.patch.object(WriteWatch, "begin_pass", beginning):
            run.steps(3)
            with lab.capturing():  # would be pass 3
                run.step()
            run.steps(2)
    assert began == [True, True, False, True, False]
    assert lab.problems == []


def test_memory_that_a_program_gathers_within_a_capture_is_used_there() -> None:
    with Lab() as lab:
        eager, run = _Run(lab), _Run(lab)

        def step(of: _Run) -> Tensor:
            of.problem.units[0].unshard(async_op=True)  # type: ignore[operator]
            return of.step()

        for _ in range(3):
            step(eager), step(run)
        before = lab.collectives.num_calls["all_gather"]
        with lab.capturing() as graph:
            loss = step(run)
        gathers = lab.collectives.num_calls["all_gather"] - before
        before = lab.collectives.num_calls["all_gather"]
        for _ in range(2):
            graph.replay()
            assert torch.equal(loss, step(eager))
        assert lab.collectives.num_calls["all_gather"] - before == 2 * gathers
    assert lab.problems == []


# What is refused


def _assert_refused(
    lab: Lab, run: _Run, kind: type[Exception], word: str, *, runs_again: bool = True
) -> None:
    """A step cannot be captured, is refused before anything is done, and can be run after it."""
    before = run.contents()
    with pytest.raises(kind, match=word), lab.capturing():
        run.step()
    assert lab.problems == []
    _assert_equal(run.contents(), before)
    if runs_again:
        run.step()
    assert lab.problems == []


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_model_that_is_not_warm_is_refused(num_steps: int) -> None:
    with Lab() as lab, mock.patch.object(writes, "_WATCHED", frozenset({0, 1})):
        run = _Run(lab)
        run.steps(num_steps)
        word = "side stream" if num_steps == 0 else "one more step"
        with pytest.raises(StateError, match=word), lab.capturing():
            run.step()
        run.steps(3 - num_steps)
        with lab.capturing() as graph:
            run.step()
        graph.replay()
    assert lab.problems == []


def test_offload_is_refused() -> None:
    with Lab(host_waits=None, may_stall="offload") as lab:
        run = _Run(lab, offload_policy=OFFLOAD)
        run.steps(3)
        _assert_refused(lab, run, UnsupportedError, "CPU offload")


def test_state_that_comes_and_goes_is_refused() -> None:
    with Lab() as lab:
        run = _Run(lab)
        fullshard.stream_state(run.optimizer, fullshard.PlacementPolicy(optimizer="host"))
        run.steps(3)
        _assert_refused(lab, run, UnsupportedError, "stream_state")


def test_communication_of_the_hosts_is_refused() -> None:
    with Lab(is_nccl=False) as lab:
        run = _Run(lab)
        run.steps(3)
        _assert_refused(lab, run, UnsupportedError, "NCCL")


@pytest.mark.parametrize("checks", [{"nan": True}, {"steps": True}])
def test_checks_for_which_the_host_waits_are_refused(checks: dict[str, Any]) -> None:
    with Lab() as lab:
        run = _Run(lab)
        run.steps(3)
        with fullshard.debug(**checks):
            _assert_refused(lab, run, UnsupportedError, "debug", runs_again=False)
        run.step()
    assert lab.problems == []


def test_gather_and_gradients_from_before_a_capture_are_refused() -> None:
    with Lab() as lab:
        run = _Run(lab)
        run.steps(3)
        run.problem.units[0].unshard(async_op=True)  # type: ignore[operator]
        with pytest.raises(StateError, match=r"reshard\(\)"), lab.capturing():
            run.step()
        run.model.set_requires_gradient_sync(False)
        run.backward()
        run.model.set_requires_gradient_sync(True)
        with pytest.raises(StateError, match="all micro-batches"), lab.capturing():
            run.step()
        run.step()
    assert lab.problems == []


def test_forward_and_backward_are_captured_together() -> None:
    with Lab() as lab:
        run = _Run(lab)
        run.steps(3)
        loss = run.problem.loss(run.model(run.inputs), run.targets)
        with pytest.raises(StateError, match="both together"), lab.capturing():
            loss.backward()
        run.step()
    assert lab.problems == []


def test_norm_that_the_host_reads_is_refused() -> None:
    with Lab() as lab:
        run = _Run(lab)
        run.steps(3)
        with lab.capturing():
            run.backward()
            with pytest.raises(UnsupportedError, match="error_if_nonfinite"):
                fullshard.clip_grad_norm_(run.params, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_step_that_raises_while_it_is_captured_can_be_run_again(where: str) -> None:
    class _Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError(where)

    def hook(*given: Any) -> Any:
        if where == "forward":
            raise KeyError(where)
        return _Raises.apply(given[-1])  # type: ignore[no-untyped-call]

    with Lab() as lab:
        eager, run = _Run(lab), _Run(lab)
        eager.steps(3), run.steps(3)
        handle = run.problem.units[2].register_forward_hook(hook)
        with pytest.raises(KeyError), lab.capturing():
            run.step()
        handle.remove()
        run.optimizer.zero_grad()  # what nothing has computed
        _assert_equal(run.steps(2), eager.steps(2))
        with lab.capturing() as graph:
            loss = run.step()
        graph.replay()
        assert torch.equal(loss, eager.step())
    assert lab.problems == []
