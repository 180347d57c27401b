"""torchao's float8 training on `fully_shard`: PyTorch's losses, gradients and bytes, with matmuls emulated.

What it does with its weights is torchao's: they define their own all-gather, which `engine/params/extended.py`
carries out, and `precompute_float8_dynamic_scale_for_fsdp` finds and scales them as they lie in the modules.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import AdamW

import fullshard
from fullshard.plan.trace import Kind, read_traces
from tests.api import Api, use_api
from tests.collectives import record_traffic
from tests.harness import mesh_of, on_ranks, rank
from tests.models import FeedForward
from tests.training import assert_equal, full_parameters, mean_square

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="needs the package torchao"
    ),
    pytest.mark.ours("is what the others are compared with"),
]

# Divides by 2, 3 and 4 ranks, and by the 16 that float8 matmuls need.
DIM, NUM_BLOCKS, STEPS = 48, 3, 3
WEIGHT = 4 * DIM * DIM  # elements of each of a block's two


@dataclasses.dataclass(frozen=True)
class Way:
    """How to train.

    recipe: torchao's. gathers_float8: whether weights travel so, which torchao offers for tensorwise scales.
    precomputes: the scales of all weights after each optimizer step, and not each before its gather.
    reshard, mesh, shard_dim: of `fully_shard`; shard_dim: along which weights are cut.
    """

    recipe: str = "tensorwise"
    gathers_float8: bool = True
    precomputes: bool = True
    is_mixed: bool = True
    dtype: torch.dtype = torch.float32
    reshard: bool | int | None = None
    mesh: tuple[int, ...] = ()
    shard_dim: int = 0
    num_microbatches: int = 1
    recomputes: bool = False
    clips: bool = False
    evaluates: bool = False
    freezes: bool = False
    offloads: bool = False
    is_fused: bool = False
    prefetches: bool = False


WAYS = {
    "tensorwise": Way(),
    "rowwise": Way("rowwise", gathers_float8=False),
    "gw_hp": Way("rowwise_with_gw_hp", gathers_float8=False),
    "gathered_in_bf16": Way(gathers_float8=False),
    "scaled_by_unit": Way(precomputes=False),
    "fp32": Way(is_mixed=False),
    "bf16": Way(is_mixed=False, dtype=torch.bfloat16),
    "kept_whole": Way(reshard=False, evaluates=True),
    "resharded": Way(reshard=True, evaluates=True),
    "cut_along_dim_1": Way(shard_dim=1),
    "accumulated": Way(num_microbatches=2, clips=True),
    "recomputed": Way(recomputes=True, prefetches=True),
    "frozen": Way(freezes=True),
    "offloaded": Way(offloads=True, is_fused=True),
    "replicas": Way(mesh=(2, 1), precomputes=False),
}
# The others differ from one of these in what `engine/test_extensions.py` tests as well.
FEW = ("tensorwise", "rowwise", "scaled_by_unit")


def _build(way: Way, *, num_blocks: int = NUM_BLOCKS) -> nn.Sequential:
    """Make blocks of two float8 layers each, and a last layer that is none."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(1)
    model = nn.Sequential(*(FeedForward(DIM, 4 * DIM) for _ in range(num_blocks)))
    model.append(nn.Linear(DIM, DIM, bias=False)).to(way.dtype)
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(way.recipe),
        enable_fsdp_float8_all_gather=way.gathers_float8,
        emulate=True,
    )
    last = str(num_blocks)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _module, path: path != last
    )
    if way.freezes:
        for block in model[:-1]:
            block[0].weight.requires_grad_(requires_grad=False)
    return model


def _shard(api: Any, way: Way, model: nn.Sequential) -> Any:
    options: dict[str, Any] = {"reshard_after_forward": way.reshard}
    if way.is_mixed:
        options["mp_policy"] = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if way.mesh:
        options["mesh"] = mesh_of(*way.mesh)
    if way.offloads:
        options["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    if way.shard_dim:
        options["shard_placement_fn"] = lambda p: Shard(way.shard_dim) if p.ndim > 1 else None
    for index, block in enumerate(model):
        if way.recomputes:
            model[index] = checkpoint_wrapper(block)
    for block in model[:-1]:
        api.fully_shard(block, **options)
    api.fully_shard(model, **options)
    if way.prefetches:
        for block, following in itertools.pairwise(model[:-1]):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    return model


def _batch(step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(16, DIM, generator=generator)


def _after_step(way: Way, model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    if way.precomputes:
        precompute_float8_dynamic_scale_for_fsdp(model)


def _train(
    way: Way, model: Any, *, first_step: int = 0, part: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Train, and yield by name the losses and, before each optimizer step, this rank's part of each gradient.

    part: whose data this is, if not the rank's.
    """
    part = rank() if part is None else part
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(trained, lr=1e-2, eps=1e-5, fused=way.is_fused or None)
    for step in range(first_step, first_step + STEPS):
        for index in range(way.num_microbatches):
            if way.num_microbatches > 1:
                model.set_requires_gradient_sync(index == way.num_microbatches - 1)
            loss = mean_square(model(_batch(step, part + 5 * index).to(way.dtype)))
            loss.backward()
            yield f"{step}: loss", loss.detach()
        if way.clips:
            norm = nn.utils.clip_grad_norm_(trained, 0.01)
            yield f"{step}: norm", norm.full_tensor()  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                yield f"{step}: {name}", _plain(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        _after_step(way, model)
        if way.evaluates:
            with torch.no_grad():
                yield f"{step}: evaluation", model(_batch(step, part).to(way.dtype))


def _plain(tensor: Any) -> Tensor:
    """Return this rank's part, without what torchao puts around it."""
    part = tensor.detach()._local_tensor
    return getattr(part, "_tensor", part).clone()


def _trained(api: Any, way: Way) -> dict[str, Tensor]:
    model = _shard(api, way, _build(way))
    seen = dict(_train(way, model))
    for module in model.modules():
        if isinstance(module, api.FSDPModule):
            module.reshard()  # evaluated last, the root may be whole
    seen.update((name, _plain(parameter)) for name, parameter in model.named_parameters())
    return seen


@functools.cache  # each of our ways to communicate is compared with it
def _trained_by_torch(way: Way) -> dict[str, Tensor]:
    return _trained(Api("torch"), way)


@pytest.mark.parametrize(
    "way", [pytest.param(WAYS[n], id=n, marks=[] if n in FEW else pytest.mark.long) for n in WAYS]
)
@on_ranks(2)
def test_every_bit_is_that_of_torch(api: Api, way: Way) -> None:
    assert_equal(_trained(api, way), _trained_by_torch(way))


# Sums of more than two terms depend on their order, which is the backend's own here, as PyTorch's.
@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize("name", ["tensorwise", "scaled_by_unit", "rowwise", "cut_along_dim_1"])
@pytest.mark.long
@on_ranks(3, 4)
def test_every_bit_is_that_of_torch_on_more_ranks(api: Api, name: str) -> None:
    with use_api("collectives") as collectives:
        assert_equal(_trained(collectives, WAYS[name]), _trained_by_torch(WAYS[name]))


@pytest.mark.parametrize("precomputes", [True, False], ids=["precomputed", "by_unit"])
@pytest.mark.long
@on_ranks(4)
def test_every_bit_is_that_of_torch_with_replicas(api: Api, precomputes: bool) -> None:
    way = Way(mesh=(2, 2), precomputes=precomputes)
    assert_equal(_trained(api, way), _trained_by_torch(way))


# PyTorch raises NotImplementedError in the forward.
@pytest.mark.long
@on_ranks(4)
def test_resharding_to_a_smaller_group_reshards_float8_weights_to_all(api: Api) -> None:
    assert_equal(_trained(api, Way(reshard=2)), _trained(api, Way(reshard=True)))


# Bytes


@pytest.mark.apis("process_group")
@on_ranks(2)
def test_float8_weights_take_half_the_bytes_of_bfloat16(api: Api, tmp_path: Path) -> None:
    sent, traced = [], []
    for gathers_float8 in (True, False):
        way = Way(gathers_float8=gathers_float8)
        model = _shard(api, way, _build(way))
        list(_train(way, model))
        folder = tmp_path / str(gathers_float8)
        with record_traffic() as traffic, api.trace(model, folder):
            mean_square(model(_batch(0, rank()))).backward()
        sent.append(traffic.nbytes["all_gather"])
        dist.barrier()
        trace = read_traces(folder)[rank()]
        blocks = [number for number, unit in enumerate(trace.units) if unit.name]
        gathers = [t for t in trace.transfers if t.kind is Kind.ALL_GATHER and t.unit in blocks]
        assert len(gathers) == 2 * NUM_BLOCKS  # in forward and in backward
        traced.append(sum(each.nbytes for each in gathers))
    weights = 2 * NUM_BLOCKS * 2 * WEIGHT  # elements that are whole on each rank twice a step
    assert traced[1] - traced[0] == weights
    assert sent[1] - sent[0] == weights // 2  # of two ranks
    biases = 2 * NUM_BLOCKS * 5 * DIM * 2
    assert traced[0] == weights + biases


@on_ranks(2)
def test_one_reduction_finds_the_scales_of_all_weights(api: Api) -> None:
    way = Way()
    model = _shard(api, way, _build(way))
    mean_square(model(_batch(0, rank()))).backward()
    with CommDebugMode() as counted:
        _after_step(way, model)
    assert counted.get_total_counts() == 1
    with CommDebugMode() as counted:
        mean_square(model(_batch(1, rank()).requires_grad_())).backward()
    assert _num_reductions_of_scales(counted) == 0
    for block in model[:-1]:
        block[0].weight._local_tensor._precomputed_scale = None
    with CommDebugMode() as counted:
        mean_square(model(_batch(1, rank()).requires_grad_())).backward()
    assert _num_reductions_of_scales(counted) == 2 * NUM_BLOCKS  # at each gather


def _num_reductions_of_scales(counted: CommDebugMode) -> int:
    return counted.get_comm_counts()[torch.ops.c10d_functional.all_reduce]


# What programs do besides


@pytest.mark.long
@on_ranks(2)
def test_state_is_that_of_ordinary_weights(api: Api, tmp_path: Path) -> None:
    way = Way()
    model = _shard(api, way, _build(way))
    list(_train(way, model))
    states = {name: _plain(value) for name, value in model.state_dict().items()}
    fullshard.save_checkpoint(tmp_path / "saved", model)
    wholes = get_model_state_dict(model)

    again = _shard(api, way, _build(way))
    again.load_state_dict(wholes)
    ordinary = Way(recipe="rowwise", gathers_float8=False)
    plain = _shard(api, ordinary, _build(ordinary))
    fullshard.load_checkpoint(tmp_path / "saved", plain)
    fullshard.save_checkpoint(tmp_path / "again", plain)
    loaded = _shard(api, way, _build(way))
    fullshard.load_checkpoint(tmp_path / "again", loaded)
    for each in (again, plain, loaded):
        assert_equal({n: _plain(p) for n, p in each.state_dict().items()}, states)
    streamed = dict(fullshard.iter_full_state(model))
    assert_equal(streamed, full_parameters(plain))
    assert {type(value) for value in streamed.values()} == {Tensor}
    for each in (again, loaded):
        _after_step(way, each)
    first, *others = [dict(_train(way, each, first_step=STEPS)) for each in (model, again, loaded)]
    assert_equal(others[0], first)
    assert_equal(others[1], first)


@pytest.mark.long
@on_ranks(2)
def test_weights_may_be_made_on_meta_and_models_copied(api: Api) -> None:
    way = Way()
    expected = _trained(api, way)
    model = _shard(api, way, _build(way))
    with torch.device("meta"):
        late = _shard(api, way, _build(way))
    late.to_empty(device="cpu")
    late.load_state_dict(model.state_dict())
    for each in (late, copy.deepcopy(model), model):
        seen = dict(_train(way, each))
        assert_equal(seen, {name: expected[name] for name in seen})


@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "blocks"])
@pytest.mark.long
@on_ranks(2, limit_s=300)
def test_every_bit_is_that_of_torch_when_compiled(api: Api, backend: str, is_whole: bool) -> None:
    runs = []
    for each in (api, Api("torch")):
        torch._dynamo.reset()
        model = _shard(each, Way(), _build(Way()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's own
            for module in [model] if is_whole else model[:-1]:
                module.compile(backend=backend)
            runs.append(dict(_train(Way(), model)))
    assert_equal(*runs)


@pytest.mark.long
@on_ranks(4)
def test_every_bit_is_that_of_torch_with_tensor_parallel(api: Api) -> None:
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    mesh, runs = mesh_of(2, 2), []
    data, tensor = mesh["replicate"], mesh["shard"]
    plan = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
    for each in (api, Api("torch")):
        model = _build(Way())
        for block in model[:-1]:
            each.fully_shard(parallelize_module(block, tensor, plan), mesh=data)
        each.fully_shard(model, mesh=data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's, of outputs that are views
            runs.append(dict(_train(Way(), model, part=data.get_local_rank())))
    assert_equal(*runs)


# The wrapper, and refusals


@on_ranks(2)
def test_wrapper_computes_in_float8_and_gathers_ordinary_weights(api: Api) -> None:
    runs = []
    for gathers_float8, keeps in ((False, False), (False, True), (True, False)):
        way = Way(gathers_float8=gathers_float8)
        model = api.FullyShardedDataParallel(_build(way), use_orig_params=keeps)
        optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        losses = []
        for step in range(STEPS):
            loss = mean_square(model(_batch(step, rank())))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _after_step(way, model)
            losses.append(loss.item())
        runs.append(losses)
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0] != runs[0][-1]
    model = _build(Way())
    before = dict(model.named_parameters())
    with pytest.raises(NotImplementedError, match=r"0\.0\.weight.*fully_shard"):
        api.FullyShardedDataParallel(model, use_orig_params=True)
    assert dict(model.named_parameters()) == before
