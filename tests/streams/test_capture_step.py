"""`fullshard.capture_step` on a virtual device: every call trains as the step does, or is refused before it does anything."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW
from torch.utils import _pytree as pytree

import fullshard
from fullshard import MisuseError, StateError, UnsupportedError
from fullshard.engine.checks.writes import WriteWatch
from fullshard.engine.iteration import Iteration
from fullshard.live.captured import CapturedStep
from fullshard.torch_private import local_part
from tests.streams.lab import Lab, fake_world
from tests.streams.programs.common import mesh_of
from tests.streams.recording import DEVICE

WIDTH = 16
NUM_CALLS = 9


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Yield a virtual device, as one rank of four, on which optimizers may be told that they are captured."""
    with fake_world(), Lab() as lab, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable=True")  # torch's, of steps by hand
        yield lab
        assert lab.problems == []


class Mean(nn.Module):
    """An identity that averages what it has seen in a buffer."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        if self.training:
            self.running.lerp_(x.detach().mean(0), 0.1)
        return x


class Training:
    """A model, its optimizer and its batches: the same in every bit at each making."""

    def __init__(
        self,
        *,
        make: Callable[..., torch.optim.Optimizer] = AdamW,
        lr: Any = 1e-2,
        dropout: float = 0.0,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.model: Any = nn.Sequential(*layers, nn.Dropout(dropout), Mean())
        self.layers: list[Any] = layers
        self.model.to(DEVICE)
        for each in (*layers, self.model):
            fullshard.fully_shard(each, mesh=mesh_of(4))
        self.params: list[Any] = list(self.model.parameters())
        options = {"capturable": True, **options} if make is AdamW else options
        self.optimizer = make(self.params, lr=lr, **options)

    def step(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        """Do one step."""
        loss = (self.model(x) * scale).square().mean()
        loss.backward()
        norm = fullshard.clip_grad_norm_(self.params, 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    def captured(self, **options: Any) -> CapturedStep[..., dict[str, Tensor]]:
        """Return the step, captured; after so many calls it is."""
        return fullshard.capture_step(self.step, optimizer=self.optimizer, **options)

    def warm(self, **options: Any) -> CapturedStep[..., dict[str, Tensor]]:
        """Return the step once it is captured and replayed."""
        captured = self.captured(**options)
        for number in range(5):
            captured(batch(number))
        assert captured.is_captured
        return captured

    def contents(self) -> list[Tensor]:
        """Return copies of what is trained."""
        state = (
            v for each in self.optimizer.state.values() for v in each.values() if v is not None
        )
        found = [local_part(each).clone() for each in (*self.params, *state)]
        return [*found, *(buffer.clone() for buffer in self.model.buffers())]


def batch(number: int, rows: int = 6) -> Tensor:
    """Return the inputs of a step."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, WIDTH, generator=generator).to(DEVICE)


def assert_equal(one: Any, other: Any) -> None:
    """Compare in every bit."""
    one, other = (list(each.values()) if isinstance(each, dict) else each for each in (one, other))
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"make": SGD, "momentum": 0.9},
        {"fused": False, "foreach": False},
        {"dropout": 0.5},
    ],
    ids=["AdamW", "SGD", "one-by-one", "dropout"],
)
def test_every_call_trains_as_the_step_does(lab: Lab, how: dict[str, Any]) -> None:
    plain, training = Training(**how), Training(**how)
    captured = training.captured(check_every=6)
    torch.manual_seed(1)
    expected = [plain.step(batch(number)) for number in range(NUM_CALLS)]
    torch.manual_seed(1)
    results = [captured(batch(number)) for number in range(NUM_CALLS)]
    for one, other in zip(results, expected, strict=True):
        assert_equal(one, other)
        assert not one["loss"].requires_grad
    assert_equal(training.contents(), plain.contents())
    assert captured.num_calls == NUM_CALLS


def test_calls_run_the_step_at_first_and_at_a_stated_interval(lab: Lab) -> None:
    training = Training()
    runs: list[int] = []
    watched: list[bool] = []
    agreed: list[str] = []
    begin = WriteWatch.begin_pass

    def step(x: Tensor) -> Tensor:
        runs.append(captured.num_calls + 1)
        return training.step(x)["loss"]

    def beginning(self: WriteWatch, *, is_training: bool) -> None:
        begin(self, is_training=is_training)
        watched.append(self.is_watching)

    captured = fullshard.capture_step(step, optimizer=[training.optimizer], check_every=8)
    with (
        mock.patch.object(WriteWatch, "begin_pass", beginning),
        mock.patch.object(Iteration, "agree_on", lambda _, what: agreed.append(what)),
    ):
        for number in range(17):
            captured(batch(number))
    assert runs == [1, 2, 3, 4, 8, 16]
    assert watched == [True, False, False, True, True]  # captured passes are not
    assert [what.partition(" of")[0] for what in agreed] == ["call 4", "call 8", "call 16"]
    (state,) = captured._roots.states
    assert not state.known_iteration._watch.has_unread  # what checks have found was read at once


def test_results_of_a_call_are_not_those_of_the_next(lab: Lab) -> None:
    captured = Training().warm()
    first = captured(batch(1))
    value = first["loss"].clone()
    assert captured(batch(2))["loss"] != value
    assert first["loss"] == value


def test_tensor_of_the_learning_rate_may_change(lab: Lab) -> None:
    plain, training = (
        Training(lr=torch.full((), 1e-2, device=DEVICE), foreach=False) for _ in range(2)
    )
    captured = training.captured()
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda number: 0.5**number)
        for each in (plain, training)
    ]
    for number in range(NUM_CALLS):
        assert_equal(captured(batch(number)), plain.step(batch(number)))
        for schedule in schedules:
            schedule.step()
    assert_equal(training.contents(), plain.contents())


def test_loading_in_place_evaluation_and_averages_between_replays_are_right(lab: Lab) -> None:
    plain, training = Training(), Training()
    captured = training.warm()
    averages = []
    for number in range(5):
        plain.step(batch(number))
    for each in (plain, training):
        average = fullshard.EMA(each.model, 0.5)
        averages.append(average)
    for number in range(5, 8):
        assert_equal(captured(batch(number)), plain.step(batch(number)))
        outputs = []
        for each, average in zip((plain, training), averages, strict=True):
            average.update()
            each.model.eval()
            with torch.no_grad():
                outputs.append(each.model(batch(9)))
            each.model.train()
            each.model.load_state_dict(
                {key: value * 0.5 for key, value in each.model.state_dict().items()}
            )
        assert_equal(*[[each] for each in outputs])
    assert_equal(training.contents(), plain.contents())
    with averages[0].applied(), averages[1].applied():
        assert_equal(training.contents(), plain.contents())


def _change_lr(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 1e-3


def _change_betas(training: Training) -> None:
    training.optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def _freeze(training: Training) -> None:
    training.layers[0].weight.requires_grad_(requires_grad=False)


def _evaluate(training: Training) -> None:
    training.model.eval()


def _set_option(training: Training) -> None:
    training.layers[0].set_gradient_divide_factor(2.0)


def _load_optimizer(training: Training) -> None:
    training.optimizer.load_state_dict(
        pytree.tree_map_only(Tensor, torch.clone, training.optimizer.state_dict())
    )


def _add_group(training: Training) -> None:
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=DEVICE))]})


def _replace_buffer(training: Training) -> None:
    training.model[-1].running = training.model[-1].running.clone()


def _move_memory(training: Training) -> None:
    state = next(iter(training.optimizer.state.values()))
    local = local_part(state["exp_avg"])
    local.set_(local.clone())  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_change_lr, "'lr'.*torch.tensor"),
        (_change_betas, "'betas'"),
        (_freeze, "frozen"),
        (_evaluate, r"eval\(\) mode"),
        (_set_option, "gradient_divide_factor"),
        (_load_optimizer, "load_state_dict"),
        (_add_group, "add_param_group"),
        (_replace_buffer, "replaced"),
        (_move_memory, "moved"),
    ],
)
def test_what_the_graph_has_taken_for_granted_may_not_change(
    lab: Lab, change: Callable[[Training], object], word: str
) -> None:
    plain, training = Training(), Training()
    captured = training.warm()
    for number in range(5):
        plain.step(batch(number))
    change(training)
    before = training.contents()
    with pytest.raises(StateError, match=word) as caught:
        captured(batch(5))
    assert "recapture()" in str(caught.value)
    assert_equal(training.contents(), before)
    captured.recapture()
    change(plain)
    for number in range(5, 11):
        assert_equal(captured(batch(number)), plain.step(batch(number)))
    assert captured.is_captured
    assert_equal(training.contents(), plain.contents())


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: (batch(0, rows=4),),
        lambda: (batch(0).double(),),
        lambda: (batch(0).cpu(),),
        lambda: (batch(0).requires_grad_(),),
        lambda: (batch(0), 2.0),
        lambda: (1.0,),
    ],
    ids=["shape", "dtype", "device", "requires-grad", "number", "type"],
)
def test_arguments_have_to_be_like_those_of_the_capture(
    lab: Lab, arguments: Callable[[], tuple[Any, ...]]
) -> None:
    training = Training()
    captured = training.warm()
    before = training.contents()
    with pytest.raises(StateError):
        captured(*arguments())
    assert_equal(training.contents(), before)
    captured(batch(6))


def test_unit_that_is_unsharded_is_refused(lab: Lab) -> None:
    training = Training()
    captured = training.warm()
    training.layers[0].unshard()
    with pytest.raises(StateError, match="reshard"):
        captured(batch(5))
    training.layers[0].reshard()
    captured(batch(5))


def test_optimizers_that_count_on_the_host_are_refused_by_the_argument(lab: Lab) -> None:
    with pytest.raises(UnsupportedError, match="capturable=True"):
        Training(capturable=False).captured()
    with pytest.raises(UnsupportedError, match=r"'lr'.*device"):
        Training(lr=torch.tensor(1e-2)).captured()
    training = Training(make=Adagrad)
    captured = training.captured()
    for number in range(3):
        captured(batch(number))
    with pytest.raises(UnsupportedError, match="'step'"):
        captured(batch(3))


def test_step_that_cannot_be_captured_is_refused_and_can_be_run(lab: Lab) -> None:
    plain, training = Training(), Training()

    def step(x: Tensor) -> Tensor:
        loss = training.step(x)["loss"]
        seen.append(loss.item())
        return loss

    seen: list[float] = []
    captured = fullshard.capture_step(step, optimizer=training.optimizer)
    for number in range(3):
        captured(batch(number))
        plain.step(batch(number))
    with pytest.raises(UnsupportedError, match=r"\.item\(\)"):
        captured(batch(3))
    lab.recorder.problems.clear()  # that the host would wait
    assert_equal(training.contents(), plain.contents())
    assert_equal([step(batch(3))], [plain.step(batch(3))["loss"]])
    assert_equal(training.contents(), plain.contents())


@pytest.mark.parametrize("returned", [1.0, "loss", torch.zeros(())])
def test_results_that_replays_would_repeat_are_refused(lab: Lab, returned: Any) -> None:
    training = Training()

    def step(x: Tensor) -> Any:
        training.step(x)
        return returned

    with pytest.raises(UnsupportedError, match="returns"):
        fullshard.capture_step(step, optimizer=training.optimizer)(batch(0))


def test_step_has_to_be_a_whole_one(lab: Lab) -> None:
    training = Training()

    def without_reduction(x: Tensor) -> None:
        training.model.set_requires_gradient_sync(False)
        training.model(x).sum().backward()

    captured = fullshard.capture_step(without_reduction, optimizer=training.optimizer)
    for number in range(3):
        captured(batch(number))
    with pytest.raises(StateError, match="micro-batches"):
        captured(batch(3))


def test_gradients_are_those_of_the_last_step_of_whatever_kind(lab: Lab) -> None:
    plain, training = Training(), Training()

    def step(of: Training, x: Tensor) -> Tensor:
        of.optimizer.zero_grad()
        loss = of.model(x).square().mean()
        loss.backward()
        of.optimizer.step()
        return loss

    captured = fullshard.capture_step(
        lambda x: step(training, x), optimizer=training.optimizer, check_every=6
    )
    for number in range(8):
        assert_equal([captured(batch(number))], [step(plain, batch(number))])
        grads = [[p.grad._local_tensor for p in each.params] for each in (training, plain)]
        assert_equal(*grads)


def test_wrong_arguments_are_named() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for wrong in ([], None, nn.Linear(2, 2), [optimizer, None]):
        with pytest.raises(MisuseError, match="optimizer"):
            fullshard.capture_step(lambda: None, optimizer=wrong)  # type: ignore[arg-type]
    for often in (-1, 1.5, True, "1000", None):
        with pytest.raises(MisuseError, match="check_every"):
            fullshard.capture_step(lambda: None, optimizer=optimizer, check_every=often)  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="step"):
        fullshard.capture_step(None, optimizer=optimizer)  # type: ignore[arg-type]


def test_without_cuda_it_says_so() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UnsupportedError, match="CUDA"):
        fullshard.capture_step(lambda: None, optimizer=optimizer)
