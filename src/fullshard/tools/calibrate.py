"""Measure a machine for plans: `fullshard plan --calibrate`.

Ranks of this machine run what a step is made of, all of them at the same time, since they share caches, memory and
processors: passes of the model, whose kernels are timed; models of one kind of unit, which compute next to nothing,
so that what the engine does is all they take; and steps of optimizers.
"""

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import math
import platform
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.errors import FullshardError, LaunchError
from fullshard.host import memory_pools
from fullshard.local_ranks import num_cores
from fullshard.plan.amounts import seconds as seconds_text
from fullshard.plan.ways import GLOO, PEER_MEMORY
from fullshard.plan.workload import Work, Workload
from fullshard.planning.calibration import (
    SCHEMA,
    EngineFigures,
    KernelTime,
    MachineFigures,
    Point,
    engine_key,
    machine_file,
    machine_of,
    optimizer_key,
    read_machine,
)
from fullshard.planning.setup import OPTIMIZERS, trained_dtype
from fullshard.planning.stopwatch import LEAST_PASSES, time_passes, typical
from fullshard.planning.traced import Example, TraceOptions, Units
from fullshard.tools.config import OptionError
from fullshard.tools.plan_options import PlanOptions
from fullshard.tools.plan_run import is_run, run_to_plan
from fullshard.tools.progress import Reporter, reporting

_WIDTH = 256  # columns of parameters that are made up
_UNIT_NUMELS = (1 << 10, 1 << 16, 1 << 19, 3 << 20, 1 << 23)
_NUM_PARAMS = 16  # of a unit that shows what a parameter takes
_OPTIMIZER_NUMELS = (1 << 10, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_OPTIMIZER_TOTAL = 6 << 20  # elements that one step goes over, so that no cache holds them
_LONG_S = 60
_PRODUCT = 512  # the size of one that shows a rate
_NUM_STEPS, _NUM_WARM_UP = 8, 3
_NUM_UNITS = 6
_NUM_TRIALS = 4 + 2 * len(_UNIT_NUMELS)  # that `_engine` makes
_LOOK_S = 0.2  # between two looks whether ranks have ended
Tell = Callable[[int, int, str], None]  # how many parts of how many are done, and which one begins


@dataclasses.dataclass(frozen=True)
class Model:
    """A model whose kernels are measured: see `planning.stopwatch.time_passes`. workload: of the same model."""

    build: Callable[[], nn.Module]
    example: Example
    units: Units | None
    options: TraceOptions
    workload: Workload


def calibrate(options: PlanOptions, out: Path | None) -> Path:
    """Measure ranks of this machine, with the model and the settings that options name; return the file of figures.

    out: the file; None for that of this machine. What it has of other models stays. Raises OptionError for options
    of another machine and a file that cannot be, and what planning raises.
    """
    for name in ("gpu", "hosts", "per_host", "flops", "memory_bandwidth", "link", "network"):
        if typed := getattr(options, name):
            raise OptionError(
                f"--{name.replace('_', '-')} {typed} with --calibrate, which measures this machine: leave one of them out."
            )
    if is_run(options.model):
        _, options = run_to_plan(options)
    ranks = options.ranks or 2
    path = out or machine_file(ranks)
    if path.suffix != ".json":
        raise OptionError(f"--out {path}: give a name that ends in .json, by which --gpu knows it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"--out {path}: its folder cannot be made ({error.strerror}). Name another."
        ) from error
    known = read_machine(path, ranks) if path.exists() else None
    free = min((pool.free_nbytes for pool in memory_pools().values()), default=math.inf)
    with reporting(rank=0) as report, _hearing(report) as told:
        report.note("starting ranks ...")
        try:
            with contextlib.redirect_stdout(sys.stderr):  # what the user's modules print
                (figures, *_) = fullshard.launch(
                    *(_measure_options, options, told, free / ranks), ranks=ranks, backend="gloo"
                )
        except LaunchError as error:
            if isinstance(error.__cause__, FullshardError):  # of these options
                raise error.__cause__ from None
            raise
    way = PEER_MEMORY if figures.has_way(PEER_MEMORY.name) else GLOO
    (figures if known is None else figures.merged(known)).write(path)
    print(f"measured, over {way.name}: {path}", file=sys.stderr)
    return path


@contextlib.contextmanager
def _hearing(report: Reporter) -> Iterator[str]:
    """Show how far a rank is, that tells it to a socket; give the socket's path."""
    ended = threading.Event()

    def hear() -> None:
        while True:
            try:
                done, total, what = json.loads(heard.recv(4096))
            except TimeoutError:
                if ended.is_set():
                    return
                continue
            if done == 0:
                report.begin(total=total, done=0)
            report.step(done, {"measuring": what})

    thread = threading.Thread(target=hear)
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard,
    ):
        heard.bind(f"{folder}/told")
        heard.settimeout(_LOOK_S)
        thread.start()
        try:
            yield f"{folder}/told"
        finally:
            ended.set()
            thread.join()


def _measure_options(options: PlanOptions, told: str, most_nbytes: float) -> MachineFigures:
    """Measure what options name, on this rank. told: see `_hearing`. most_nbytes: that it may take."""
    subject = run_to_plan(options)[0] if is_run(options.model) else options.subject()
    # Recomputing runs the same kernels again; what a compiler saves is estimated from them.
    plain = dataclasses.replace(options, ranks=None, checkpointing="none", compiled=False)
    setup = plain.setup(machine_of(_figures(), 1.0))
    workload = subject.workload(setup)
    model, example, trace_options = subject.with_memory(setup, most_nbytes)
    manners = ("", " fused") if OPTIMIZERS[setup.optimizer].has_fused else ("",)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as telling:

        def tell(*news: object) -> None:
            if dist.get_rank() == 0:
                telling.sendto(json.dumps(news).encode(), told)

        return measure(
            Model(lambda: model, example, subject.units, trace_options, workload),
            comm=options.comm,
            optimizers=[setup.optimizer + manner for manner in manners],
            tell=tell,
        )


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer of `planning.setup.OPTIMIZERS`, such as "adamw" by torch's default or "adamw fused"."""
    kind, _, manner = name.partition(" ")
    classes: Mapping[str, Any] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "sgd-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
        "adafactor": torch.optim.Adafactor,
    }
    chosen = {manner: True} if manner else {}
    made: torch.optim.Optimizer = classes[kind](parameters, lr=1e-6, **chosen)
    return made


def measure(
    model: Model,
    *,
    comm: str = "auto",
    optimizers: Sequence[str] = ("adamw",),
    seconds: float = 5.0,
    tell: Tell = lambda *_: None,
) -> MachineFigures:
    """Measure on this rank, of several that all call it; the same comes out on all.

    comm: as of `fullshard.set_default_comm`. optimizers: see `make_optimizer`. seconds: that passes of the model may
    take.
    """
    stored = trained_dtype(model.workload)
    computes = model.options.precision.param_dtype or stored
    total, done = 1 + _NUM_TRIALS + len(optimizers) * len(_OPTIMIZER_NUMELS), itertools.count()

    def say(what: str) -> None:
        tell(next(done), total, what)

    kernels_s = max(seconds, _least_s(model.workload, computes))
    less = "; smaller --batch and --seq take less" if kernels_s > _LONG_S else ""
    say(f"kernels, for at least {seconds_text(kernels_s)}{less}")
    kernels, kernel_s = measure_kernels(model, seconds)
    before = fullshard.set_default_comm(comm)
    try:
        trial = _Trial(computes, stored, say)
        engine = _engine(trial)
    finally:
        fullshard.set_default_comm(before)
    steps = {optimizer_key(name, stored): _optimizer(name, stored, say) for name in optimizers}
    say("all")
    return _figures(
        kernel_s=kernel_s,
        kernels=tuple(kernels),
        engine={engine_key(trial.way.name, computes, stored): engine},
        optimizers=steps,
    )


def _least_s(workload: Workload, dtype: torch.dtype) -> float:
    """Return about how long the fewest passes of a model take, by its FLOPs and the rate of a product here."""
    x, times = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype, device="cpu"), []
    for _ in range(3):
        start = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - start)
    return LEAST_PASSES * min(times) * workload.model_flops / (2 * _PRODUCT**3)


def _figures(**measured: Any) -> MachineFigures:
    """Return what was measured, or nothing yet, on these ranks."""
    nothing: dict[str, Any] = {"kernel_s": 0.0, "kernels": (), "engine": {}, "optimizers": {}}
    return MachineFigures(
        SCHEMA,
        host=platform.node(),
        device="cpu",
        torch=torch.__version__,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        ranks=dist.get_world_size(),
        threads=torch.get_num_threads(),
        **(nothing | measured),
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


def _mean(value: float) -> float:
    return float(_gathered([value]).mean())


def _step_times(step: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    """Return what steps take on this rank, each of which all ranks begin together."""
    times = []
    for _ in range(_NUM_WARM_UP + _NUM_STEPS):
        _most(0)
        start = clock()
        step()
        times.append(clock() - start)
    return times[_NUM_WARM_UP:]


# The model's kernels


def measure_kernels(model: Model, seconds: float) -> tuple[list[KernelTime], float]:
    """Return the kernels of a model, and what the host takes for each. All ranks call it."""
    times = time_passes(
        model.build(),
        model.example,
        units=model.units,
        options=dataclasses.replace(model.options, has_values=True, reuses_equal=False),
        seconds=seconds,
        meet=_most,
    )
    everyones: list[dict[Work, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, times.kernels)
    # What all ranks have run: autograd copies a gradient that anything else refers to at that moment, and a thread that
    # looks at this one's frames does.
    means = {
        work: statistics.fmean(own[work] for own in everyones)
        for work in everyones[0]
        if all(work in own for own in everyones)
    }
    computing, num = 0.0, 0
    for event in model.workload.events:
        if (number := getattr(event, "stretch", None)) is not None:
            stretch = model.workload.stretches[number]
            for work in (*stretch.forward, *stretch.recomputed, *stretch.backward):
                computing += work.count * means.get(work._replace(count=1), 0.0)
                num += work.count
    pass_s = _mean(times.pass_s)
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

    def __init__(self, sizes: "_Sizes", dtype: torch.dtype) -> None:
        super().__init__()
        rows = max(2 * dist.get_world_size(), sizes.numel // sizes.num_params // _WIDTH)
        self.weights = nn.ParameterList(
            torch.zeros(rows, _WIDTH, dtype=dtype, device="cpu") for _ in range(sizes.num_params)
        )
        self._num_products = sizes.num_products

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self._num_products):
            x = x @ x
        y: Tensor = _Given.apply(x, *self.weights)  # type: ignore[no-untyped-call]
        return y


def _engine(trial: "_Trial") -> EngineFigures:
    """Compare steps of sharded models with those of plain ones, and with those that stay unsharded after forward."""
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
        gather.append(Point(numel * trial.computes.itemsize, gather_s))
        reduce.append(Point(numel * trial.computes.itemsize, max(0.0, reduce_s)))
    return EngineFigures(
        tuple(gather),
        tuple(reduce),
        fence_s=fixed_s / 3,  # before and after forward, and after backward
        unit_s=max(0.0, one_s - param_s) / 2,
        param_s=param_s / 2,
        contention=trial.contention(),
    )


class _Sizes(NamedTuple):
    """Of a model of equal units. numel: of a unit. num_products: that keep the processor busy, for each unit."""

    numel: int
    num_params: int
    num_units: int
    num_products: int = 0


class _Trial:
    """Steps of models of equal units. Where ranks copy bytes themselves, in seconds of their processor.

    computes, stored: dtypes of a unit's whole parameters, and of their shards.
    """

    def __init__(
        self, computes: torch.dtype, stored: torch.dtype, say: Callable[[str], None]
    ) -> None:
        self.computes, self._stored, self._say = computes, stored, say
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        chosen = fullshard.describe(self._sharded(_Sizes(1, 1, 1))).units[0].communication
        self.way = GLOO if chosen.startswith("process group") else PEER_MEMORY
        self._clock = time.perf_counter if self.way.overlaps else time.thread_time

    def added_s(self, sizes: _Sizes, *, reshards: bool = True) -> float:
        """Return what a step takes more because the model is sharded."""
        self._say(self.way.name)
        sharded = self._sharded(sizes, reshards=reshards)
        return self._step_s(sharded) - self._step_s(self._plain(sizes))

    def contention(self) -> float:
        """Return how much of the time of collectives is lost by computing beside them: 1 where nothing is hidden."""
        self._say(self.way.name)
        if not self.way.overlaps:
            return 0.0
        idle, busy = _Sizes(1 << 20, 2, _NUM_UNITS), _Sizes(1 << 20, 2, _NUM_UNITS, 8)
        plain_s = self._step_s(self._plain(idle))
        moving_s = self._step_s(self._sharded(idle)) - plain_s
        computing_s = self._step_s(self._plain(busy)) - plain_s
        both_s = self._step_s(self._sharded(busy)) - plain_s
        hidden_s = min(moving_s, computing_s)
        lost_s = max(0.0, both_s - max(moving_s, computing_s))
        return min(1.5, lost_s / hidden_s) if hidden_s > 0 else 0.0

    def _plain(self, sizes: _Sizes, dtype: torch.dtype | None = None) -> nn.Module:
        dtype = dtype or self.computes
        return nn.Sequential(*(_Unit(sizes, dtype) for _ in range(sizes.num_units)))

    def _sharded(self, sizes: _Sizes, *, reshards: bool = True) -> nn.Module:
        model = self._plain(sizes, self._stored)
        policy = fullshard.MixedPrecisionPolicy()
        if {self.computes, self._stored} != {torch.float32}:
            policy = fullshard.MixedPrecisionPolicy(self.computes, torch.float32)
        for module in (*model.children(), model):
            fullshard.fully_shard(
                module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshards
            )
        return model

    def _step_s(self, model: nn.Module) -> float:
        # Whatever disturbs makes a step longer.
        times = _step_times(lambda: _run(model), self._clock)
        quickest = sorted(_gathered(times).mean(0).tolist())
        return statistics.fmean(quickest[: max(1, len(quickest) // 4)])


def _run(model: nn.Module) -> None:
    model(torch.zeros(_WIDTH, _WIDTH, device="cpu", requires_grad=True)).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None


# Optimizers


def _optimizer(name: str, dtype: torch.dtype, say: Callable[[str], None]) -> tuple[Point, ...]:
    """Return what parameters of some sizes take, among so many that no cache holds them."""
    points = []
    for numel in _OPTIMIZER_NUMELS:
        say(name)
        num = min(200, max(2, _OPTIMIZER_TOTAL // numel))
        parameters = [
            nn.Parameter(torch.zeros(numel, dtype=dtype, device="cpu")) for _ in range(num)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = make_optimizer(name, parameters)
        times = _step_times(optimizer.step, time.thread_time)
        step_s = _mean(statistics.fmean(typical(times, float)))
        points.append(Point(numel, step_s * _turns() / num))
    return tuple(points)
