"""`memory_report` counts this rank's memory byte for byte, and a large root is warned of."""

from __future__ import annotations

import json
import logging
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fullshard.comm.packing import Scratch
from fullshard.engine.module_state import state_of
from fullshard.engine.whole import gather_whole
from tests.api import Api
from tests.engine.test_extensions import AsIs
from tests.harness import mesh_of, on_ranks, rank
from tests.models import mlp
from tests.training import make_batch

pytestmark = pytest.mark.ours("not part of the API")

WIDTH = 768
LAYER = WIDTH * WIDTH * 4  # 2.25 MiB: too much to be kept for what it costs to free
SHARD = LAYER // 2

faces = pytest.mark.parametrize("face", ["rows", "pieces", "flat"])


class Block(nn.Sequential):
    """What becomes a unit: one layer without a bias."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(nn.Linear(width, width, bias=False))


def layers(width: int = WIDTH) -> nn.Sequential:
    """Stack two blocks and a layer of the root's."""
    torch.manual_seed(1)
    return nn.Sequential(Block(width), Block(width), nn.Linear(width, width, bias=False))


def wrap(api: Api, model: nn.Module, face: str = "rows", **options: Any) -> nn.Module:
    """Make each block and the rest a unit, with either API."""
    if face == "rows":
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            api.fully_shard(block, **options)
        return api.fully_shard(model, **options)
    return api.FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=face == "pieces",
        **options,
    )


def totals(api: Api, model: nn.Module, *optimizers: Any) -> dict[str, int]:
    """Return what categories have, by name. Communication is shared with other tests' models."""
    report = api.memory_report(model, optimizers)
    found = {each.name: report.total(each) for each in api.MemoryCategory}
    return {k: nbytes for k, nbytes in found.items() if nbytes and k != "COMMUNICATION"}


def staged(api: Api, model: nn.Module, unit: str) -> int:
    return api.memory_report(model).total(api.MemoryCategory.COMMUNICATION, unit=unit)


def is_in_place(api: Api) -> bool:
    return api.name == "peer_memory"


def run_step(model: nn.Module) -> None:
    model(make_batch(WIDTH)).sum().backward()


@on_ranks(2)
@faces
def test_before_the_first_forward_there_are_shards_alone(api: Api, face: str) -> None:
    model = wrap(api, layers(), face)
    report = api.memory_report(model)
    assert totals(api, model) == {"SHARDS": 3 * SHARD}
    assert report.units == ("", "0", "1")
    assert [report.total(unit=name) for name in report.units] == 3 * [SHARD]
    # The ring for gradients is shared memory as well, as large as any model of this process asked.
    ring = report.shared_nbytes - 3 * SHARD if is_in_place(api) else 0
    shares = (3 * SHARD + ring, 3 * LAYER + 2 * ring) if is_in_place(api) else (0, 0)
    assert (report.shared_nbytes, report.mapped_nbytes) == shares


@on_ranks(2)
@faces
def test_every_phase_of_a_step_is_counted(api: Api, face: str) -> None:
    inner = layers()
    first, second = inner[0][0], inner[1][0]
    model = wrap(api, inner, face)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    seen: dict[str, dict[str, int]] = {}
    in_flight: list[int] = []

    def see(name: str) -> None:
        seen[name] = totals(api, model)
        in_flight.append(staged(api, model, "1"))

    def watch_gradient(tensor: torch.Tensor, name: str) -> None:
        tensor.register_hook(lambda _: see(name))

    hooks = [
        second.register_forward_hook(lambda *_: see("forward")),
        # A gradient for its input: the second layer's backward is over, its block's is not.
        second.register_forward_pre_hook(lambda _, args: watch_gradient(args[0], "second")),
        # A gradient for its output: the reduction of the second block is under way.
        first.register_forward_hook(lambda _, __, output: watch_gradient(output, "first")),
    ]
    run_step(model)
    for hook in hooks:
        hook.remove()
    shards = {"SHARDS": 3 * SHARD}
    assert seen["forward"] == {**shards, "UNSHARDED": 2 * LAYER}  # the root's and its own
    # Also the block gathered next; the root's gradient is whole until backward is over.
    num_early = 0 if is_in_place(api) else 1
    assert seen["second"] == {
        **shards,
        "UNSHARDED": (2 + num_early) * LAYER,
        "FULL_GRADIENTS": 2 * LAYER,
    }
    # What is received over process groups has its place already; what is in the ring gets one later.
    received = {} if is_in_place(api) else {"GRADIENT_SHARDS": SHARD}
    assert seen["first"] == {
        **shards,
        "UNSHARDED": (1 + num_early) * LAYER,
        "FULL_GRADIENTS": LAYER,
        **received,
    }
    # What is sent and what is received; or both are in the ring. Other tests may have left larger
    # scratch memory, which is lent as it is.
    assert in_flight[-1] == 0 if is_in_place(api) else in_flight[-1] >= 2 * LAYER

    assert totals(api, model, optimizer) == {**shards, "GRADIENT_SHARDS": 3 * SHARD}
    optimizer.step()
    assert totals(api, model, optimizer) == {
        **shards,
        "GRADIENT_SHARDS": 3 * SHARD,
        "OPTIMIZER": 2 * 3 * SHARD + 3 * 4,  # two moments, and each parameter's count of steps
    }
    optimizer.zero_grad()
    assert totals(api, model) == {**shards, "KEPT": 3 * SHARD}
    model(make_batch(WIDTH))
    assert totals(api, model) == {**shards, "UNSHARDED": LAYER}  # forward has a use for that memory


@on_ranks(2)
@pytest.mark.apis("peer_memory")
@faces
def test_shards_that_nobody_writes_to_while_the_model_runs_are_read_in_place(
    api: Api, face: str
) -> None:
    model = wrap(api, layers(), face)
    in_place = []
    for _ in range(3):
        run_step(model)
        model(make_batch(WIDTH))
        in_place.append("UNSHARDED" not in totals(api, model))
    assert in_place == [False, True, True]  # two passes are watched


@on_ranks(2)
@faces
def test_nothing_more_is_held_after_six_steps_than_after_three(api: Api, face: str) -> None:
    model = wrap(api, layers(), face)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reports = []
    for _ in range(2):
        for _ in range(3):
            run_step(model)
            optimizer.step()
            optimizer.zero_grad()
        reports.append(api.memory_report(model, optimizer))
    assert reports[0] == reports[1]


def test_scratch_memory_does_not_grow_with_the_sizes_it_is_asked_for() -> None:
    scratch = Scratch(torch.device("cpu"))
    for numel in (1000, 3000, 2000, 4000, 1000):
        pair = [scratch.take(numel, torch.float32) for _ in range(2)]
        for tensor in pair:
            scratch.give(tensor)
    assert [memory.nbytes for memory in scratch.free] == 2 * [4000 * 4]


@on_ranks(2)
def test_gradients_that_are_not_reduced_are_whole(api: Api) -> None:
    model = wrap(api, layers())
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        run_step(model)
    found = totals(api, model)
    assert found["FULL_GRADIENTS"] == 3 * LAYER
    assert "GRADIENT_SHARDS" not in found
    model.set_requires_gradient_sync(True)
    run_step(model)
    reduced = {"SHARDS": 3 * SHARD, "GRADIENT_SHARDS": 3 * SHARD}
    # The next step may accumulate; but over process groups forward has a use for that memory.
    kept = {"KEPT": 3 * LAYER} if is_in_place(api) else {}
    assert totals(api, model) == {**reduced, **kept}
    run_step(model)
    assert totals(api, model) == reduced


@on_ranks(4)
def test_sums_that_wait_for_their_all_reduce_are_counted(api: Api) -> None:
    model = wrap(api, layers(), mesh=mesh_of(2, 2))
    model.set_requires_all_reduce(False)
    # A sum may lie in memory that was lent for more: for a whole layer over process groups, and to an earlier test.
    free = (memory.nbytes for memory in Scratch.of(torch.device("cpu")).free)
    most = max(SHARD if is_in_place(api) else LAYER, *free, 0)
    run_step(model)
    found = totals(api, model)
    sums = found.pop("FULL_GRADIENTS")
    assert found == {"SHARDS": 3 * SHARD}
    assert 3 * SHARD <= sums <= 3 * most


@on_ranks(2)
def test_compute_dtype_and_what_is_not_sharded_are_counted(api: Api) -> None:
    inner = layers()
    inner.register_buffer("table", torch.zeros(100))
    ignored = inner[2].weight
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in (inner[0], inner[1]):
        api.fully_shard(block, mp_policy=policy, reshard_after_forward=False)
    model = api.fully_shard(inner, mp_policy=policy, ignored_params={ignored})
    inner[2].to(torch.bfloat16)
    model(make_batch(WIDTH))
    assert totals(api, model) == {
        "SHARDS": 2 * SHARD,
        "UNSHARDED": 2 * LAYER // 2,
        "UNMANAGED": LAYER // 2 + 400,
    }


@on_ranks(2)
def test_a_gradient_that_the_user_keeps_is_in_use(api: Api) -> None:
    model = wrap(api, layers())
    run_step(model)
    mine = model[0][0].weight.grad
    model.zero_grad()
    assert totals(api, model) == {
        "SHARDS": 3 * SHARD,
        "GRADIENT_SHARDS": SHARD,
        "KEPT": 2 * SHARD,
    }
    del mine


@on_ranks(2)
def test_memory_of_whole_parameters_goes_with_them(api: Api) -> None:
    model = wrap(api, layers(), "pieces")
    run_step(model)
    model.zero_grad()
    for unit in model._state.iteration_or_initialise().units:
        whole = [tensor._base for tensor in gather_whole(unit)]
        held = [weakref.ref(tensor) for tensor in whole]
        assert all(tensor is not None for tensor in whole)
        del whole
        deadline = time.monotonic() + 5
        while any(reference() is not None for reference in held):
            # Gloo's own thread lets go of a finished call a moment after it was waited for.
            assert time.monotonic() < deadline
            time.sleep(0.001)


@on_ranks(2)
def test_report_is_text_and_plain_values(api: Api) -> None:
    model = nn.ModuleDict({"net": wrap(api, layers())})  # sharded modules in a plain one
    report = api.memory_report(model)
    text = str(report)
    for words in (f"rank {rank()}", "sharded parameters", "net.0", "3.4 MiB"):
        assert words in text, text
    values = json.loads(json.dumps(report.to_dict()))
    assert values["categories"]["sharded parameters"] == 3 * SHARD
    assert sum(holding["nbytes"] for holding in values["holdings"]) == report.total()


@on_ranks(2)
def test_a_model_without_sharded_modules_is_refused(api: Api) -> None:
    with pytest.raises(api.StateError, match="not sharded"):
        api.memory_report(mlp())


def warnings_of(model: nn.Module) -> list[str]:
    """Return what is logged while the root is found out, and again."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("fullshard")
    logger.addHandler(handler)
    try:
        for _ in range(2):
            state = state_of(model)
            assert state is not None
            state.iteration_or_initialise()
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in records]


@on_ranks(2)
@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize("face", ["rows", "flat"])
def test_a_root_with_most_parameters_is_warned_of_once(api: Api, face: str) -> None:
    model = nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(3)), Block())
    found = warnings_of(wrap(api, model, face))
    if rank() != 0:
        assert found == []
        return
    (text,) = found
    remedy = "Apply fully_shard to its blocks" if face == "rows" else "auto_wrap_policy"
    for words in ("92 %", "27 of 29 MiB", remedy):
        assert words in text, text


@on_ranks(2)
@pytest.mark.apis("peer_memory")
def test_no_root_is_warned_of_without_need(api: Api) -> None:
    def wide(width: int) -> nn.Linear:
        return nn.Linear(width, width, bias=False)

    small = nn.Sequential(wide(64), wide(64), wide(64))
    in_blocks = nn.Sequential(Block(1536), Block(1536), Block(1536))
    own_gather = nn.Sequential(Block(1536), Block(1536), wide(1536))
    for block in own_gather[:2]:
        block[0].weight = nn.Parameter(AsIs(block[0].weight.detach()))
    for model in (small, in_blocks, own_gather):
        assert warnings_of(wrap(api, model)) == []
