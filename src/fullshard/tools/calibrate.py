"""Measure a machine for plans: `fullshard plan --calibrate`.

Ranks of this machine run what a step is made of, all of them at the same time, since they share caches, memory and
processors: passes of the model, whose kernels are timed; models of one kind of unit, which compute next to nothing,
so that what the engine does is all they take; and steps of optimizers.
"""

import contextlib
import dataclasses
import datetime
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.local_ranks import num_cores
from fullshard.plan.workload import Workload
from fullshard.planning.calibration import (
    SCHEMA,
    EngineFigures,
    KernelTime,
    MachineFigures,
    Point,
)
from fullshard.planning.stopwatch import kernel_seconds, time_passes, typical
from fullshard.planning.traced import Example, TraceOptions, Units, trace_workload

if TYPE_CHECKING:
    from fullshard.tools.plan_options import PlanOptions

WAYS = {"peer memory": "peer_memory", "gloo": "process_group"}  # and what the engine calls them
_WIDTH = 256  # columns of parameters that are made up
_UNIT_NUMELS = (1 << 10, 1 << 16, 1 << 19, 3 << 20, 1 << 23)
_NUM_PARAMS = 16  # of a unit that shows what a parameter takes
_OPTIMIZER_NUMELS = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_OPTIMIZER_TOTAL = 6 << 20  # elements that one step goes over, so that no cache holds them
_NUM_STEPS, _NUM_WARM_UP = 8, 3
_NUM_UNITS = 6
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Model:
    """A model whose kernels are measured: see `planning.stopwatch.time_passes`. workload: of the same model."""

    build: Callable[[], nn.Module]
    example: Example
    units: Units | None
    options: TraceOptions
    workload: Workload


@dataclasses.dataclass(frozen=True)
class Questions:
    """What to measure. ways: of `WAYS`. dtypes: that units compute in. optimizers: see `make_optimizer`.

    seconds: that passes of the model may take.
    """

    ways: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    optimizers: tuple[str, ...] = ("adamw", "adamw foreach", "adamw fused")
    model: Model | None = None
    seconds: float = 5.0


def calibrate(options: "PlanOptions", *, ranks: int) -> MachineFigures:
    """Measure ranks of this machine, with the model and the settings that options name."""
    return fullshard.launch(_measure_options, options, ranks=ranks, backend="gloo")[0]


def _measure_options(options: "PlanOptions") -> MachineFigures:
    """Measure what options name, on this rank."""
    from fullshard.planning.machines import Gpu, Machine

    ranks = dist.get_world_size()
    nothing = Gpu("to be measured", 1.0, 1.0, 1.0, 1.0, figures="", per_host=ranks)
    # Recomputing runs the same kernels again.
    plain = dataclasses.replace(options, ranks=ranks, checkpointing="none")
    setup = plain.setup(Machine(nothing, ranks, 1.0, 1.0))
    subject = options.subject()
    model, example, trace_options = subject.with_memory(setup)
    workload = trace_workload(model, example, units=subject.units, options=trace_options)
    dtype = setup.precision.param_dtype or torch.float32
    began = time.monotonic()

    def say(what: str) -> None:
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - began:5.1f} s  {what} ...", file=sys.stderr, flush=True)

    questions = Questions(
        ("peer memory",),
        (dtype,),
        (setup.optimizer, f"{setup.optimizer} fused"),
        Model(lambda: model, example, subject.units, trace_options, workload),
    )
    return measure(questions, say)


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW or SGD: "adamw", "adamw foreach", "adamw fused", "sgd", ...; without a word, torch's default."""
    kind, _, manner = name.partition(" ")
    classes: Mapping[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    chosen = {manner: True} if manner else {}
    made: torch.optim.Optimizer = classes[kind](parameters, lr=1e-6, **chosen)
    return made


def measure(questions: Questions, say: Callable[[str], None] = lambda _: None) -> MachineFigures:
    """Measure on this rank, of several that all call it; the same comes out on all. say: is told what comes next."""
    kernels: list[KernelTime] = []
    kernel_s = 0.0
    if questions.model is not None:
        say("kernels of the model")
        kernels, kernel_s = _kernels(questions.model, questions.seconds)
    engine = {}
    for way in questions.ways:
        for dtype in questions.dtypes:
            name = f"{way} {str(dtype).removeprefix('torch.')}"
            say(f"the engine over {name}")
            engine[name] = _engine(way, dtype)
    optimizers = {}
    for name in questions.optimizers:
        say(f"steps of {name}")
        optimizers[name] = _optimizer(name)
    return MachineFigures(
        SCHEMA,
        host=platform.node(),
        device="cpu",
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        ranks=dist.get_world_size(),
        threads=torch.get_num_threads(),
        kernel_s=kernel_s,
        kernels=tuple(kernels),
        engine=engine,
        optimizers=optimizers,
    )


# Numbers of all ranks


def _gathered(values: Sequence[float]) -> Tensor:
    """Return the numbers of all ranks (ranks, numbers)."""
    own = torch.tensor(values, dtype=torch.float64, device="cpu")
    all_values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_values, own)
    return torch.stack(all_values)


def _most(value: float) -> float:
    return float(_gathered([value]).max())


def _mean(values: Sequence[float]) -> list[float]:
    means: list[float] = _gathered(values).mean(0).tolist()
    return means


# The model's kernels


def _kernels(model: Model, seconds: float) -> tuple[list[KernelTime], float]:
    """Return the kernels of a model, and what the host takes for each."""
    times = time_passes(
        model.build(),
        model.example,
        units=model.units,
        options=dataclasses.replace(model.options, has_values=True, reuses_equal=False),
        seconds=seconds,
        meet=_most,
    )
    found = kernel_seconds(times)
    works = sorted(found, key=repr)  # in the same order on all ranks
    means = dict(zip(works, _mean([found[work] for work in works]), strict=True))
    computing, num = 0.0, 0
    for event in model.workload.events:
        if (number := getattr(event, "stretch", None)) is not None:
            stretch = model.workload.stretches[number]
            for work in (*stretch.forward, *stretch.recomputed, *stretch.backward):
                computing += work.count * means.get(work._replace(count=1), 0.0)
                num += work.count
    (pass_s,) = _mean([statistics.fmean(typical(times.passes, times.passes))])
    # A stopwatch takes time as well. Where that is more than what the host takes, kernels share it.
    share = min(1.0, pass_s / computing)
    turns = _turns()
    kernels = [
        KernelTime(w.kind.value, w.name, w.dtype, w.shape, w.flops, w.nbytes, s * share * turns)
        for w, s in means.items()
    ]
    return kernels, max(0.0, pass_s - computing) / max(1, num) * turns


def _turns() -> float:
    """Return how many times as long all ranks take as their processor time, where processors are fewer."""
    return max(1.0, dist.get_world_size() * torch.get_num_threads() / num_cores())


# The engine


class _Given(torch.autograd.Function):
    """Returns its input, and in backward a gradient of a weight that is full of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.shapes = [(each.shape, each.dtype) for each in weights]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], *(
            torch.ones(shape, dtype=dtype, device="cpu") for shape, dtype in ctx.shapes
        )


class _Unit(nn.Module):
    """Parameters that nothing is computed with, and products that keep the processor busy."""

    def __init__(self, numel: int, num_params: int, num_products: int) -> None:
        super().__init__()
        rows = max(2 * dist.get_world_size(), numel // num_params // _WIDTH)
        self.weights = nn.ParameterList(
            torch.zeros(rows, _WIDTH, device="cpu") for _ in range(num_params)
        )
        self._num_products = num_products

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._num_products):
            x = x @ x
        y: Tensor = _Given.apply(x, *self.weights)  # type: ignore[no-untyped-call]
        return y


def _engine(way: str, dtype: torch.dtype) -> EngineFigures:
    """Compare steps of sharded models with those of plain ones, and with those that stay unsharded after forward."""
    trial = _Trial(way, dtype)
    with _communicating(WAYS[way]):
        few, many = (trial.added_s(_Sizes(1, 1, num)) for num in (2, _NUM_UNITS))
        one_s = max(0.0, many - few) / (_NUM_UNITS - 2)  # a unit of one small parameter
        fixed_s = max(0.0, many - _NUM_UNITS * one_s)
        wide_s = (trial.added_s(_Sizes(1, _NUM_PARAMS, _NUM_UNITS)) - fixed_s) / _NUM_UNITS
        param_s = max(0.0, wide_s - one_s) / (_NUM_PARAMS - 1)
        gather, reduce = [Point(0, 0)], [Point(0, 0)]
        for numel in _UNIT_NUMELS:
            sizes = _Sizes(numel, 1, _NUM_UNITS if numel < _UNIT_NUMELS[-1] else 3)
            freed_s, kept_s = trial.added_s(sizes), trial.added_s(sizes, reshards=False)
            gather_s = max(0.0, freed_s - kept_s) / sizes.num_units
            reduce_s = (kept_s - fixed_s) / sizes.num_units - gather_s - one_s
            gather.append(Point(numel * dtype.itemsize, gather_s))
            reduce.append(Point(numel * dtype.itemsize, max(0.0, reduce_s)))
        contention = trial.contention() if way == "gloo" else 0.0
    return EngineFigures(
        tuple(gather),
        tuple(reduce),
        fence_s=fixed_s / 3,  # before and after forward, and after backward
        unit_s=max(0.0, one_s - param_s) / 2,
        param_s=param_s / 2,
        contention=contention,
    )


@contextlib.contextmanager
def _communicating(choice: str) -> Iterator[None]:
    before = fullshard.set_default_comm(choice)
    try:
        yield
    finally:
        fullshard.set_default_comm(before)


class _Sizes(NamedTuple):
    """Of a model of equal units. numel: of a unit. num_products: that keep the processor busy, for each unit."""

    numel: int
    num_params: int
    num_units: int
    num_products: int = 0

    def build(self) -> nn.Module:
        units = (
            _Unit(self.numel, self.num_params, self.num_products) for _ in range(self.num_units)
        )
        return nn.Sequential(*units)


class _Trial:
    """Steps of models of equal units. Where ranks copy bytes themselves, in seconds of their processor."""

    def __init__(self, way: str, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._clock = time.perf_counter if way == "gloo" else time.thread_time
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def added_s(self, sizes: _Sizes, *, reshards: bool = True) -> float:
        """Return what a step takes more because the model is sharded."""
        sharded = self._sharded(sizes.build(), reshards=reshards)
        return self._step_s(sharded) - self._step_s(sizes.build().to(self._dtype))

    def contention(self) -> float:
        """Return how much of the time of collectives is lost by computing beside them: 1 where nothing is hidden."""
        idle, busy = _Sizes(1 << 20, 2, _NUM_UNITS), _Sizes(1 << 20, 2, _NUM_UNITS, 8)
        plain_s = self._step_s(idle.build())
        moving_s = self._step_s(self._sharded(idle.build())) - plain_s
        computing_s = self._step_s(busy.build()) - plain_s
        both_s = self._step_s(self._sharded(busy.build())) - plain_s
        hidden_s = min(moving_s, computing_s)
        lost_s = max(0.0, both_s - max(moving_s, computing_s))
        return min(1.5, lost_s / hidden_s) if hidden_s > 0 else 0.0

    def _sharded(self, model: nn.Module, *, reshards: bool = True) -> nn.Module:
        policy = fullshard.MixedPrecisionPolicy()
        if self._dtype is not torch.float32:
            policy = fullshard.MixedPrecisionPolicy(self._dtype, torch.float32)
        for module in (*model.children(), model):
            fullshard.fully_shard(
                module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshards
            )
        return model

    def _step_s(self, model: nn.Module) -> float:
        times = []
        for _ in range(_NUM_WARM_UP + _NUM_STEPS):
            _most(0)
            start = self._clock()
            _run(model)
            times.append(self._clock() - start)
        means = _gathered(times[_NUM_WARM_UP:]).mean(0).tolist()
        return statistics.fmean(_quickest(means, means))


def _run(model: nn.Module) -> None:
    model(torch.zeros(_WIDTH, _WIDTH, device="cpu", requires_grad=True)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


def _quickest(values: Sequence[_T], keys: Sequence[float]) -> list[_T]:
    """Return the quarter of some values with the smallest keys: whatever disturbs makes a step longer."""
    order = sorted(range(len(values)), key=keys.__getitem__)
    return [values[number] for number in order[: max(1, len(order) // 4)]]


# Optimizers


def _optimizer(name: str) -> tuple[Point, ...]:
    """Return what parameters of some sizes take, among so many that no cache holds them."""
    points = []
    for numel in _OPTIMIZER_NUMELS:
        num = min(200, max(2, _OPTIMIZER_TOTAL // numel))
        parameters = [nn.Parameter(torch.zeros(numel, device="cpu")) for _ in range(num)]
        for parameter in parameters:
            parameter.grad = torch.ones(numel, device="cpu")
        optimizer = make_optimizer(name, parameters)
        times = []
        for _ in range(_NUM_WARM_UP + _NUM_STEPS):
            _most(0)
            start = time.thread_time()
            optimizer.step()
            times.append(time.thread_time() - start)
        (step_s,) = _mean([statistics.fmean(typical(times[_NUM_WARM_UP:], times[_NUM_WARM_UP:]))])
        points.append(Point(numel, step_s * _turns() / num))
    return tuple(points)
