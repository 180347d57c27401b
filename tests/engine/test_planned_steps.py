"""A planned step and the one that the engine executes: the same collectives, in the same order, and the same memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import checkpoint

import fullshard
from bench.tensor_bytes import LiveTensors
from fullshard.plan.actions import ActionKind, Holding
from fullshard.plan.simulator import follow_memory
from fullshard.plan.step import OptimizerPlan, StepSettings, plan_step
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import PEER_MEMORY
from fullshard.plan.workload import Workload
from fullshard.planning.keeping import keeping, kept_units
from fullshard.planning.traced import Example, TraceOptions, trace_workload
from tests import planned
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.models import (
    BATCH,
    PROBLEMS,
    MixedDtypes,
    PartlyFrozen,
    Problem,
    Transformer,
    make_problem,
)
from tests.selection import repeats

pytestmark = pytest.mark.ours("not part of the API")

WATCHED = 2  # passes that the engine watches, in which it gathers nothing early


@dataclass(frozen=True)
class Case:
    """Settings of a run. mesh: (replicate, shard) or (shard,). num_microbatches and what follows: of `StepSettings`.

    kept: bytes for `keep_unsharded`.
    """

    problem: str = "transformer"
    mesh: tuple[int, ...] = (2,)
    reshard: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    num_microbatches: int = 1
    reduces_each: bool = False
    sums_replicas_last: bool = False
    keeps_between: bool = False
    kept: int = 0
    is_flat: bool = False
    backward_prefetch: Literal["pre", "post"] | None = "pre"

    def __str__(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "default"


class Twice(nn.Module):
    """Runs one layer twice. (n, 8) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers in turn."""
        return self.last(self.shared(self.shared(self.first(x)).tanh()))


class Parted(nn.Module):
    """Layers that are units: ``ends`` is one, with another and the root's between its modules; ``unused`` never runs, nor is ``spare`` used. (n, 8) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.middle, self.last, self.unused = (nn.Linear(8, 8) for _ in range(3))
        self.scale, self.spare = (nn.Parameter(torch.ones(8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers in turn."""
        x = self.middle(self.ends[0](x).tanh())
        return self.last(self.ends[1](x * self.scale).tanh())


class Checkpointed(nn.Module):
    """Blocks of layers, each of which is computed again in backward. (n, 8) -> same."""

    def __init__(self) -> None:
        super().__init__()
        layers = lambda: (nn.LayerNorm(8), nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))  # noqa: E731
        self.blocks = nn.ModuleList(nn.Sequential(*layers()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the blocks in turn."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _problem(name: str) -> Problem:
    """Build a problem: one of the parity models, or one for a case that they do not have."""
    torch.manual_seed(1)
    x, y = torch.randn(BATCH, 8), torch.randn(BATCH, 8)
    match name:
        case "nested":
            problem = make_problem("moe")
            blocks = problem.units
            inner = [block.feed_forward for block in blocks]
            experts = [each for block in blocks for each in block.feed_forward.experts]
            return problem._replace(units=[*experts, *inner, *blocks])
        case "partly_frozen":
            frozen = PartlyFrozen()
            return Problem(frozen, x, y, [frozen.frozen, frozen.mixed])
        case "mixed_dtypes":
            return Problem(MixedDtypes(), x, y, [])
        case "twice":
            twice = Twice()
            return Problem(twice, x, y, [twice.first, twice.shared])
        case "parted":
            parted = Parted()
            return Problem(
                parted, x, y, [[*parted.ends], parted.middle, parted.last, parted.unused]
            )
        case "checkpointed":  # the units are within what is computed again
            model = Checkpointed()
            return Problem(model, x, y, [*model.blocks])
        case "checkpointed_parts":
            model = Checkpointed()
            return Problem(
                model,
                x,
                y,
                [part for block in model.blocks for part in (block[1], block[3], block)],
            )
    return make_problem(name)


def _shard(api: Api, case: Case, problem: Problem) -> Any:
    if case.is_flat:
        strategy = api.ShardingStrategy
        prefetch = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}.get(
            case.backward_prefetch or ""
        )
        return api.FullyShardedDataParallel(
            problem.model,
            auto_wrap_policy=CustomPolicy(lambda module: module in problem.units),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            sharding_strategy=strategy.SHARD_GRAD_OP
            if case.reshard is False
            else strategy.FULL_SHARD,
            backward_prefetch=prefetch and api.BackwardPrefetch[prefetch],
            mixed_precision=api.MixedPrecision(case.param_dtype, case.reduce_dtype),
        )
    options: dict[str, Any] = {
        "mesh": mesh_of(*case.mesh),
        "reshard_after_forward": case.reshard,
        "mp_policy": api.MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype),
    }
    for unit in problem.units:
        api.fully_shard(unit, **options)
    return api.fully_shard(problem.model, **options)


def _settings(api: Api, case: Case) -> StepSettings:
    reshard, keeps_between = case.reshard, case.keeps_between
    if case.is_flat and case.mesh == (1,):  # that is NO_SHARD
        reshard = False if case.param_dtype is None else None
    elif case.is_flat:
        keeps_between = reshard is False
    replicate_size, shard_size = (1, *case.mesh)[-2:]
    way = PEER_MEMORY if api.name == "peer_memory" else planned.process_group.GLOO
    sharding = Sharding(
        shard_size,
        way,
        shard_rank=rank() % shard_size,
        replicate_size=replicate_size,
        is_flat=case.is_flat,
        reduce_dtype=case.reduce_dtype,
    )
    return StepSettings(
        sharding,
        reshard_after_forward=reshard,
        forward_prefetch=not case.is_flat,
        backward_prefetch=case.backward_prefetch,
        num_microbatches=case.num_microbatches,
        reduces_each=case.reduces_each,
        sums_replicas_last=case.sums_replicas_last,
        keeps_between=keeps_between,
        optimizer=OptimizerPlan(),
    )


def _train(
    case: Case,
    model: Any,
    optimizer: Any,
    problem: Problem,
    first: Callable[[Callable[[], None]], None] = lambda run: run(),
) -> None:
    """Run one step. first: is called with the first micro-batch, which it has to run."""

    def run() -> None:
        problem.loss(model(problem.inputs), problem.targets).backward()

    for number in range(case.num_microbatches):
        is_last = number == case.num_microbatches - 1
        reduces = case.reduces_each or is_last
        if not case.is_flat:
            model.set_requires_gradient_sync(reduces)
            model.set_requires_all_reduce(is_last or not case.sums_replicas_last)
            model.set_reshard_after_backward(reduces or not case.keeps_between)
        with model.no_sync() if case.is_flat and not reduces else contextlib.nullcontext():
            first(run) if number == 0 else run()
    optimizer.step()
    optimizer.zero_grad()


def _compare(api: Api, case: Case) -> None:
    with planned.fresh_pools(), planned.small_limits():
        problem = _problem(case.problem)
        model = _shard(api, case, problem)
        optimizer = torch.optim.AdamW(model.parameters())
        kept = fullshard.keep_unsharded(model, case.kept) if case.kept else None
        for _ in range(WATCHED + 1):
            _train(case, model, optimizer, problem)
        found: list[Workload] = []
        checkpointed = [f"blocks.{n}" for n in range(3) if "checkpointed" in case.problem]

        # Within a step like the others, which leaves the memory that they do.
        def observe(run: Callable[[], None]) -> None:
            facts = {"checkpointed": checkpointed, "stepped": optimizer.state}
            found.append(planned.observe(model, run, **facts))

        for each in (observe, lambda run: run()):
            _train(case, model, optimizer, problem, each)
        workload = found[0]
        executed = planned.Executed(model, optimizer)
        with executed.watching():
            _train(case, model, optimizer, problem)
        settings = _settings(api, case)
        if kept is not None:
            units = kept_units(workload, settings, case.kept)
            assert [(u.name, u.nbytes) for u in units] == [(u.name, u.nbytes) for u in kept.units]
            settings = keeping(workload, settings, case.kept)
        step = plan_step(workload, settings)
        expected = planned.told(step)
        lines = itertools.zip_longest(map(str, executed.moments), map(str, expected))
        differences = [f"{a}\n   {b}" for a, b in lines if a != b]
        assert not differences, f"{len(differences)} of {len(expected)}:\n" + "\n".join(
            differences[:4]
        )
        # Others do not say what they copy.
        if api.name == "process_group" and case.mesh[-1] > 1:
            moved = planned.joined(planned.collectives(step, workload))
            entered = planned.joined(executed.collectives)
            assert entered == moved, f"{entered}\n{moved}"


BF16 = torch.bfloat16
DTYPES: list[dict[str, Any]] = [
    {},
    {"param_dtype": BF16},
    {"param_dtype": BF16, "reduce_dtype": torch.float32},
    {"reduce_dtype": BF16},
]
OTHERS = (
    "nested",
    "partly_frozen",
    "mixed_dtypes",
    "twice",
    "checkpointed",
    "checkpointed_parts",
    "parted",  # the last: units of several modules, which flat ones do not have
)
CASES = [
    *(Case(problem) for problem in (*PROBLEMS, *OTHERS)),
    Case(reshard=False),
    Case(reshard=True),
    *(Case(**dtypes) for dtypes in DTYPES[1:]),
    Case(num_microbatches=2),
    Case(num_microbatches=3, **DTYPES[2]),
    Case(num_microbatches=2, reduces_each=True),
    Case(num_microbatches=2, keeps_between=True),
    Case("conv", num_microbatches=2, reduces_each=True, param_dtype=BF16),
    Case("tied_transformer", reshard=False, num_microbatches=2),
    Case("nested", kept=20_000),
    Case("twice", kept=300),
]
CASES += [
    Case("twice", num_microbatches=2),  # gradients come of one unit twice in a backward
    Case("partly_frozen", num_microbatches=2, **DTYPES[2]),
    Case("mixed_dtypes", num_microbatches=2, reduce_dtype=torch.float32),  # some add up in place
    Case("conv", num_microbatches=2, param_dtype=BF16, reduce_dtype=torch.float16),
    Case("checkpointed_parts", num_microbatches=2, keeps_between=True, **DTYPES[2]),
]
PUT_OFF = Case(mesh=(2, 1), num_microbatches=3, reduces_each=True, sums_replicas_last=True)
CASES.append(PUT_OFF)
FLAT = [
    *(Case(problem, is_flat=True) for problem in PROBLEMS),
    Case(is_flat=True, reshard=False),
    *(Case(is_flat=True, **dtypes) for dtypes in DTYPES[1:3]),
    Case(is_flat=True, num_microbatches=2),
    Case(is_flat=True, backward_prefetch="post"),
    Case("conv", is_flat=True, num_microbatches=2, backward_prefetch="post"),
    Case("twice", is_flat=True, reshard=False, num_microbatches=3, **DTYPES[1]),
    Case(is_flat=True, backward_prefetch=None),
]


QUICK = [
    Case(),
    Case("nested", kept=20_000),
    Case("checkpointed_parts"),
    Case(num_microbatches=3, **DTYPES[2]),
]
quickly = repeats(lambda s: s["case"] not in QUICK)


@quickly
@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(2)
def test_two_ranks_execute_what_was_planned(api: Api, case: Case) -> None:
    _compare(api, case)


@repeats(lambda s: s["case"] != FLAT[0])
@pytest.mark.parametrize("case", FLAT, ids=str)
@on_ranks(2)
def test_flat_units_execute_what_was_planned(api: Api, case: Case) -> None:
    _compare(api, case)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(1)
def test_one_rank_executes_what_was_planned(api: Api, case: Case) -> None:
    _compare(api, dataclasses.replace(case, mesh=(1,)))


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(4,), (2, 2)], ids=["sharded", "replicated"])
@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(4)
def test_four_ranks_execute_what_was_planned(api: Api, case: Case, mesh: tuple[int, ...]) -> None:
    _compare(api, dataclasses.replace(case, mesh=mesh))


def _drawn(draw: random.Random) -> Case:
    is_flat, num = draw.random() < 0.25, draw.choice([1, 2, 2, 3])
    size = world_size()
    meshes = [(size,)] if is_flat else [(size,), (size, 1), *([(2, 2)] if size == 4 else [])]
    mesh = draw.choice(meshes)
    problem = draw.choice([*PROBLEMS, *OTHERS][: -1 if is_flat else None])
    dtypes = draw.choice([*DTYPES, {"param_dtype": BF16, "reduce_dtype": torch.float16}])
    return Case(
        problem,
        mesh,
        draw.choice(
            [None, False] if is_flat else [None, False, True, *([2] if mesh == (4,) else [])]
        ),
        None if problem == "mixed_dtypes" else dtypes.get("param_dtype"),
        dtypes.get("reduce_dtype"),
        num_microbatches=num,
        reduces_each=num > 1 and draw.random() < 0.5,
        sums_replicas_last=num > 1 and len(mesh) == 2 and draw.random() < 0.5,
        keeps_between=num > 1 and not is_flat and draw.random() < 0.3,
        is_flat=is_flat,
        backward_prefetch=draw.choice(["pre", "post", None]) if is_flat else "pre",
    )


@pytest.mark.long
@on_ranks(1, 2, 4, limit_s=300)
def test_drawn_settings_execute_what_was_planned(api: Api) -> None:
    warnings.simplefilter("ignore")  # FSDP1 has some for what is drawn, such as one rank
    draw = random.Random(1)
    for case in [_drawn(draw) for _ in range(30)]:
        try:
            _compare(api, case)
        except Exception as error:
            raise AssertionError(f"{case}") from error


@pytest.mark.long
@pytest.mark.parametrize("problem", ["transformer", "uneven"])
@on_ranks(4)
def test_shards_over_a_smaller_group_are_planned(api: Api, problem: str) -> None:
    _compare(api, Case(problem, mesh=(4,), reshard=2))


PEAKS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard": False},
    "mixed": {"param_dtype": BF16, "reduce_dtype": torch.float32},
    "micro-batches": {"num_microbatches": 2},
    "replicas": {"mesh": (2, 2)},
}


@repeats(lambda s: s["world_size"] == 4 or s["name"] != "mixed")
@pytest.mark.parametrize("name", PEAKS)
@on_ranks(2, 4)
def test_the_peak_is_that_of_live_tensors(api: Api, name: str) -> None:
    case = Case("transformer", **PEAKS[name])
    if world_size() == 2:
        case = dataclasses.replace(case, mesh=case.mesh[-1:])
    elif len(case.mesh) == 1:
        case = dataclasses.replace(case, mesh=(4,))
    torch.manual_seed(1)
    model = Transformer(dim=192, num_blocks=3, max_seq=48)
    tokens = torch.randint(Transformer.vocab, (4, 49))
    problem = Problem(model, tokens[:, :-1], tokens[:, 1:], [*model.blocks])
    precision = fullshard.MixedPrecisionPolicy(case.param_dtype, case.reduce_dtype)

    def loss(logits: Tensor) -> Tensor:
        return problem.loss(logits, problem.targets.to(logits.device))

    workload = trace_workload(
        model,
        Example((problem.inputs,)),
        units=[f"blocks.{number}" for number in range(3)],
        options=TraceOptions(precision=precision, loss=loss),
    )
    memory = follow_memory(plan_step(workload, _settings(api, case)))
    with planned.fresh_pools(), LiveTensors() as live:
        sharded = _shard(api, case, problem)
        optimizer = torch.optim.AdamW(sharded.parameters(), foreach=False)
        for _ in range(WATCHED + 2):
            live.reset_peak()
            _train(case, sharded, optimizer, problem)
        measured = live.peak_nbytes + fullshard.memory_report(sharded).shared_nbytes
    held = {h.value: memory.at_peak_of(h) for h in Holding}
    assert memory.peak_nbytes == pytest.approx(measured, rel=1e-2), f"{measured}: {held}"


@pytest.mark.parametrize("reshard", [None, False])
@on_ranks(2)
def test_the_peak_is_what_a_report_says_in_backward(api: Api, reshard: bool | None) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(5)))
    x, y = torch.randn(16, 256), torch.randn(16, 256)
    problem = Problem(model, x, y, [*model])
    workload = trace_workload(
        model,
        Example((x,)),
        units=[str(number) for number in range(5)],
        options=TraceOptions(loss=lambda out: problem.loss(out, y.to(out.device))),
    )
    case = Case(reshard=reshard)
    memory = follow_memory(plan_step(workload, _settings(api, case)))
    reported: list[dict[Holding, int]] = []
    with planned.fresh_pools():
        sharded = _shard(api, case, problem)
        optimizer = torch.optim.AdamW(sharded.parameters())
        problem = problem._replace(inputs=x.requires_grad_())  # for the hooks
        for layer in model:
            layer.register_full_backward_hook(
                lambda *_: reported.append(planned.reported(sharded, optimizer))
            )
        for _ in range(WATCHED + 2):
            reported.clear()
            _train(case, sharded, optimizer, problem)
    # Full gradients that are on their way count as communication in a report.
    not_reported = (Holding.ACTIVATIONS, Holding.UNMANAGED)
    expected = memory.peak_nbytes - sum(map(memory.at_peak_of, not_reported))
    assert max(sum(each.values()) for each in reported) == expected


@on_ranks(1, 2)
def test_an_optimizer_step_holds_what_was_planned(api: Api) -> None:
    case = Case(param_dtype=BF16, reduce_dtype=torch.float32, mesh=(world_size(),))
    problem = make_problem("transformer")
    found: dict[Holding, int] = {}
    with planned.fresh_pools():
        model = _shard(api, case, problem)
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.register_step_pre_hook(
            lambda *_: found.update(planned.reported(model, optimizer))
        )
        for _ in range(WATCHED + 2):
            _train(case, model, optimizer, problem)
        workload = planned.observe(
            model, lambda: problem.loss(model(problem.inputs), problem.targets).backward()
        )
    takes_most = OptimizerPlan(peak_of_largest=1 << 20)  # so that memory is highest there
    settings = dataclasses.replace(_settings(api, case), optimizer=takes_most)
    step = plan_step(workload, settings)
    memory = follow_memory(step)
    assert step.actions[memory.peak_action].kind is ActionKind.OPTIMIZER
    assert {holding: memory.at_peak_of(holding) for holding in found} == found
    assert memory.at_peak_of(Holding.OPTIMIZER_TEMPORARIES) >= 1 << 20
