"""The 25 messages and symptoms that users of FSDP meet most: what fullshard does or says instead.

In the order of the table in docs/errors.md, which has what PyTorch's FSDP says. Rows that need no
error are here too: that nothing is raised is then what is tested.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import CheckpointError as RecomputationError
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.errors import (
    CheckpointError,
    ShardingError,
    StateError,
    UnsupportedError,
)
from fullshard.tools.report import metrics_of
from fullshard.watch.recomputation import explain_recomputation
from fullshard.watch.uncaught import explain_sharded_use
from tests.api import Api
from tests.errors.models import (
    LATE,
    TOKENS,
    Block,
    Net,
    as_one,
    endings_of,
    faces,
    inside,
    shard,
    step,
)
from tests.faults.job import Plan
from tests.fresh import in_warm_forks
from tests.harness import on_ranks, rank
from tests.releases import RELEASE

pytestmark = pytest.mark.apis("peer_memory")
paths = pytest.mark.parametrize("path", ["auto", "process_group"])


# 1  NCCL watchdog timeout ran for 600000 ms


def test_a_rank_that_is_late_is_named_with_its_last_operation_and_its_line() -> None:
    waiting, _ = endings_of(LATE)
    assert "PeerTimeoutError" in waiting.kinds, waiting.words
    assert "rank 1, alive" in waiting.text
    assert "step 2, backward" in waiting.text
    assert "time.sleep(1000)" in waiting.text  # where it is now, from its stack
    assert "init_process_group(timeout=" in waiting.text


# 2  Detected mismatch between collectives


@paths
def test_ranks_that_run_different_modules_are_named_with_them(path: str) -> None:
    face = "fully_shard" if path == "auto" else "wrapper"
    for ending in endings_of(Plan("other_branch", path, face)):
        assert "DivergenceError" in ending.kinds, ending.words
        assert "rank 0 ran blocks.0 (forward); rank 1 ran blocks.2 (forward)" in ending.text
        assert "parted in step 3" in ending.text
        remedy = "set_unused(module" if path == "auto" else "the same calls"
        assert remedy in ending.text


@paths
@pytest.mark.parametrize("block", [0, 1])
def test_parameters_without_a_gradient_are_named_with_their_rank(path: str, block: int) -> None:
    for ending in endings_of(Plan("no_gradient", path, block=block)):
        assert "DivergenceError" in ending.kinds, ending.words
        names = ", ".join(
            f"blocks.{block}.{layer}.{kind}"
            for layer in ("up", "down")
            for kind in ("weight", "bias")
        )
        assert f"rank 1, in backward so far: {names}." in ending.text
        assert "set_unused(module, 'zero'" in ending.text


# 3  Must flatten tensors with uniform dtype


class Mixed(Net):
    """A model with a float64 block, which cannot be flattened together with others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].layer.bias = nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.blocks[0].forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        layer = self.blocks[0].layer
        return (x @ layer.weight.T + layer.bias.to(x.dtype)).tanh()


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@on_ranks(2)
def test_parameters_of_several_dtypes_share_a_unit(api: Api, face: str) -> None:
    model = shard(api, face, Mixed())
    step(model)
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None and p.numel()}
    assert torch.float32 in dtypes


@on_ranks(2)
def test_a_flat_parameter_of_several_dtypes_is_refused_with_both_names(api: Api) -> None:
    with pytest.raises(ShardingError, match="uniform dtype") as caught:
        shard(api, "flat", Mixed())
    assert "layer.weight and Block: layer.bias" in as_one(caught)
    assert "Pass use_orig_params=True" in as_one(caught)


# 4  FlatParameter requires uniform requires_grad


def _partly_frozen() -> Net:
    model = Net()
    model.blocks[0].layer.weight.requires_grad_(requires_grad=False)
    return model


@on_ranks(2)
def test_frozen_and_trained_parameters_share_a_unit(api: Api) -> None:
    model = shard(api, "fully_shard", _partly_frozen())
    step(model)
    layer = model.blocks[0].layer
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    with pytest.warns(UserWarning, match=r"blocks\.0 has both"):  # as PyTorch's does
        wrapped = shard(api, "orig", _partly_frozen())
    step(wrapped)
    with pytest.raises(ShardingError, match=r"requires_grad=False:\n\['blocks\.0\.layer\.weight"):
        shard(api, "flat", _partly_frozen())
    with pytest.raises(ShardingError, match=r"uniform `requires_grad`.*Block: layer\.weight and"):
        api.FullyShardedDataParallel(_partly_frozen().blocks[0])


# 5  'weight' must be 2-D


@on_ranks(2)
def test_a_weight_used_outside_its_forward_is_named_with_the_remedy(api: Api) -> None:
    model = shard(api, "flat", Net())
    step(model)
    for use in (
        lambda: inside(model).embed(TOKENS),
        lambda: nn.functional.embedding(TOKENS, inside(model).embed.weight),
    ):
        with pytest.raises(
            StateError, match=r"embed\.weight is used \(embedding\) while"
        ) as caught:
            use()
        assert "fullshard.gathered(weight)" in as_one(caught)
    assert api.gathered(inside(model).embed.weight).shape == (12, 8)


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@on_ranks(2)
def test_a_module_of_a_sharded_weight_is_named_below_pytorchs_error(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    step(model)
    with pytest.raises(RuntimeError) as caught:
        inside(model).embed(TOKENS)
    said = explain_sharded_use(caught.value)
    assert said is not None
    assert said.startswith("fullshard: embed.weight: ")
    assert "Embedding.forward ran" in said
    assert "fullshard.gathered(weight)" in said


@faces
@on_ranks(2)
def test_gathered_gives_the_weight_outside_its_forward(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    step(model)
    weight = api.gathered(inside(model).embed.weight)
    assert nn.functional.embedding(TOKENS, weight).shape == (2, 3, 8)


# 6  got mixed torch.Tensor and DTensor


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@on_ranks(2)
def test_a_module_run_without_its_unit_is_named_below_pytorchs_error(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    step(model)
    with pytest.raises(RuntimeError) as caught:
        inside(inside(model).blocks[0]).layer(torch.ones(2, 8))
    said = explain_sharded_use(caught.value)
    assert said is not None
    assert said.startswith("fullshard: blocks.0.layer.weight, blocks.0.layer.bias: sharded at")
    assert "Linear.forward ran" in said
    assert "register_fsdp_forward_method" in said
    # Other errors are no matter of sharding: of a whole module, and of a backward.
    with pytest.raises(RuntimeError) as caught:
        model(torch.full((2, 3), 99.0))
    assert explain_sharded_use(caught.value) is None
    with pytest.raises(RuntimeError) as caught:
        torch.ones(1).backward()
    assert explain_sharded_use(caught.value) is None


@on_ranks(2)
def test_a_module_of_a_flat_unit_run_without_it_is_named(api: Api) -> None:
    model = shard(api, "flat", Net())
    step(model)
    with pytest.raises(StateError, match=r"blocks\.0\.layer\.weight is used \(linear\) while"):
        inside(inside(model).blocks[0]).layer(torch.ones(2, 8))


@on_ranks(2)
def test_what_is_set_on_a_part_of_a_flat_unit_is_refused_by_its_name(api: Api) -> None:
    model = shard(api, "flat", Net())
    step(model)
    weight = inside(inside(model).blocks[0]).layer.weight
    zeros = torch.zeros(8, 8)
    sets: list[Callable[[], object]] = [
        lambda: weight.requires_grad_(False),
        lambda: setattr(weight, "requires_grad", False),
        lambda: setattr(weight, "grad", zeros),
        lambda: weight.data.copy_(zeros),
        lambda: nn.init.kaiming_uniform_(weight),
    ]
    for each in sets:
        with pytest.raises(StateError, match=r"blocks\.0\.layer\.weight"):
            each()
    assert weight.requires_grad
    assert weight.data.shape == (8, 8)


# 7  tensor has non-zero elements but data not allocated


@faces
@on_ranks(2)
def test_a_freed_weight_that_was_kept_is_named(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    kept: list[Tensor] = []
    layer = inside(inside(model).blocks[0]).layer
    layer.register_forward_hook(lambda module, *_: kept.extend((module.weight, module.weight.t())))
    step(model)
    for tensor, subject in ((kept[0], "blocks.0"), (kept[1], "A view of blocks.0")):
        with pytest.raises(StateError) as caught:
            tensor.sum()
        said = as_one(caught)
        assert said.startswith(f"{subject}.layer.weight was kept")
        assert "or keep weight.detach().clone()" in said


# 8  shared with a parameter already managed by another group


@on_ranks(2)
def test_a_weight_tied_across_units_moves_to_their_common_unit(api: Api) -> None:
    model = Net(tied=True)
    api.fully_shard(model.embed)
    api.fully_shard(model.head)
    api.fully_shard(model)
    assert "embed.weight = head.weight" in str(api.describe(model))
    step(model)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.grad is not None


@pytest.mark.parametrize("face", ["orig", "flat"])
@on_ranks(2)
def test_a_weight_tied_across_wrappers_is_refused_with_all_its_names(api: Api, face: str) -> None:
    model, policy = Net(tied=True), api.ModuleWrapPolicy({nn.Embedding, nn.Linear})
    with pytest.raises(ShardingError) as caught:
        shard(api, face, model, auto_wrap_policy=policy)
    said = as_one(caught)
    assert said.startswith("embed.weight and head.weight ")
    assert "in one instance" in said
    assert "leave out embed, head" in said
    assert type(model.embed) is nn.Embedding
    # By hand, one wrapper after the other: the second one does not see where the first one is.
    wrap = functools.partial(api.FullyShardedDataParallel, use_orig_params=face == "orig")
    model.embed = wrap(model.embed)
    with pytest.raises(ShardingError, match="Linear: weight is weight of Embedding"):
        wrap(model.head)
    twice = Net()
    twice.blocks[1] = twice.blocks[0]
    with pytest.raises(
        ShardingError, match=r"blocks\.0\.layer\.weight and blocks\.1\.layer\.weight"
    ):
        shard(api, face, twice)
    # A tie inside one wrapper is nothing special.
    step(shard(api, face, Net(tied=True)))


# 9  Could not find the transformer layer class


def _policies(api: Api, classes: set[Any]) -> list[Any]:
    by_partial = functools.partial(api.transformer_auto_wrap_policy, transformer_layer_cls=classes)
    return [api.ModuleWrapPolicy(classes), by_partial]


@on_ranks(2)
def test_a_class_that_the_model_lacks_is_answered_with_those_it_has(api: Api) -> None:
    for policy in _policies(api, {nn.TransformerEncoderLayer}):
        said = (
            r"class TransformerEncoderLayer, .* It has: Block \(2\), Linear \(3\), Embedding \(1\)"
        )
        with pytest.warns(UserWarning, match=said):
            shard(api, "orig", Net(), auto_wrap_policy=policy)
    for policy in _policies(api, {"Blok"}):
        model = Net()
        with pytest.raises(ShardingError, match="'Blok' is no class") as caught:
            shard(api, "orig", model, auto_wrap_policy=policy)
        assert "Block (2)" in as_one(caught)
        assert "The closest is Block." in as_one(caught)
        assert type(model.blocks[0]) is Block
    # A layer has nothing inside that could be wrapped.
    shard(api, "orig", nn.Linear(8, 8), auto_wrap_policy=api.ModuleWrapPolicy({Block}))
    # Some of several classes may be missing, and the model itself may be of the class.
    shard(api, "orig", Net(), auto_wrap_policy=api.ModuleWrapPolicy({Block, nn.TransformerDecoder}))
    shard(api, "orig", Net(), auto_wrap_policy=api.ModuleWrapPolicy({Net}))


# 10  fully_shard doesn't support scalar parameters


@faces
@on_ranks(2)
def test_a_scalar_parameter_is_refused_by_its_path(api: Api, face: str) -> None:
    model = Net()
    model.blocks[1].scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ShardingError, match="doesn't support scalar parameters") as caught:
        shard(api, face, model)
    assert "Block: scale" in as_one(caught)
    assert "Change scale to a 1D tensor" in as_one(caught)


# 11  Shard(1) not divisible


@on_ranks(2)
def test_a_size_that_cannot_be_divided_is_named_with_its_parameter(api: Api) -> None:
    model = Net(dim=7)
    with pytest.raises(UnsupportedError) as caught:
        shard(api, "fully_shard", model, shard_placement_fn=lambda _: Shard(1))
    said = as_one(caught)
    assert "Net: embed.weight, (12, 7) over 2 ranks" in said
    assert "Shard dim 0" in said
    shard(api, "fully_shard", model)
    step(model)


# 12  Recomputed values have different metadata


class Recomputed(nn.Module):
    """Runs a module again in backward, perhaps by way of a function."""

    def __init__(self, module: nn.Module, *, by_function: bool = False) -> None:
        super().__init__()
        self.module = module
        self.by_function = by_function

    def forward(self, x: Tensor) -> Any:
        """Run the module under activation checkpointing."""
        module: Any = self.module
        if self.by_function:
            return checkpoint(lambda y: module(y) * 1.0, x, use_reentrant=False)
        return checkpoint(module, x, use_reentrant=False)


@faces
@pytest.mark.parametrize("outside", [False, True])
@on_ranks(2)
def test_recomputation_inside_or_outside_a_unit_sees_the_same_parameters(
    api: Api, face: str, outside: bool
) -> None:
    model = Net()
    for number, block in enumerate(model.blocks):
        unit: Any = block if outside else Recomputed(block)
        if face == "fully_shard":
            api.fully_shard(unit)
        else:
            unit = api.FullyShardedDataParallel(unit, use_orig_params=face == "orig")
        model.blocks[number] = Recomputed(unit) if outside else unit
    if face == "fully_shard":
        api.fully_shard(model)
    else:
        model = api.FullyShardedDataParallel(model, use_orig_params=face == "orig")
    for _ in range(2):
        step(model)


class Counting(Block):
    """Computes something else in its second run."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply both, to a part only the second time."""
        self.runs += 1
        return super().forward(x if self.runs == 1 else x[:1])


@faces
@pytest.mark.parametrize("by_function", [False, True])
@on_ranks(2)
def test_a_module_that_recomputes_something_else_is_named_below_pytorchs_error(
    api: Api, face: str, by_function: bool
) -> None:
    model = Net()
    model.blocks[1] = Recomputed(Counting(), by_function=by_function)
    model = shard(api, face, model)
    with pytest.raises(RecomputationError, match="different metadata") as caught:
        step(model)
    said = explain_recomputation(caught.value)
    assert said is not None
    assert said.startswith("fullshard: recomputed was blocks.1.module (F")  # a class of ours
    assert "whole then, as in forward" in said
    # Where torch records what forward has saved.
    assert RELEASE < (2, 12) or "layer (Linear): 3x8 of float32; in forward 6x8" in said
    assert "set_checkpoint_debug_enabled(True)" in said


# 13  reduce-scatter expects uniform gradient dtype


class Late(nn.Module):
    """Uses its second layer only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        """Run one or both layers."""
        y = self.first(x)
        return y + self.second(x) if both else y


@faces
@on_ranks(2)
def test_a_parameter_first_used_while_gradients_accumulate_is_reduced(api: Api, face: str) -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    later: Any = contextlib.nullcontext()
    if face == "fully_shard":
        model = api.fully_shard(Late(), mp_policy=api.MixedPrecisionPolicy(**dtypes))
        model.set_requires_gradient_sync(False)
    else:
        precision = api.MixedPrecision(**dtypes)
        model = api.FullyShardedDataParallel(
            Late(), mixed_precision=precision, use_orig_params=face == "orig"
        )
        later = model.no_sync()
    x = torch.ones(2, 8)
    with later:
        model(x, both=False).sum().backward()
    if face == "fully_shard":
        model.set_requires_gradient_sync(True)
    model(x, both=True).sum().backward()
    grads = [p.grad for p in model.parameters() if p.numel()]
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)


# 14  Missing key in checkpoint state_dict


class Renamed(Net):
    """`Net` with another name for its head, and one layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = self.head
        del self.head
        self.extra = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        """Run everything in turn."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.extra(x))


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@on_ranks(2)
def test_what_does_not_fit_a_checkpoint_is_listed_by_kind(
    api: Api, face: str, tmp_path: Path
) -> None:
    saved = shard(api, face, Net())
    api.save_checkpoint(tmp_path / "saved", saved)
    with pytest.raises(CheckpointError, match="does not fit") as caught:
        api.load_checkpoint(tmp_path / "saved", shard(api, face, Renamed()))
    said = as_one(caught)
    for fact in (
        'lacks (allow=["missing"]',
        ": 3 model/lm_head",
        'nothing takes (allow=["unexpected"]',
        ": 1 model/head.weight",
        "renamed: model/head.weight -> model/lm_head.weight",
    ):
        assert fact in said
    with pytest.raises(CheckpointError) as caught:
        api.load_checkpoint(tmp_path / "saved", shard(api, face, Net(tied=True)))
    assert ": 1 model/embed.weight and model/head.weight" in as_one(caught)


# 15  optimizer couldn't be switched / references no FSDP params


@pytest.mark.parametrize("face", ["fully_shard", "flat"])
@on_ranks(2)
def test_an_optimizer_from_before_sharding_is_refused_with_its_parameters(
    api: Api, face: str, tmp_path: Path
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model = shard(api, face, model)
    calls = (
        lambda: api.sharded_state(model, optimizer),
        lambda: api.save_checkpoint(tmp_path / "saved", model, optimizer),
        lambda: get_optimizer_state_dict(model, optimizer),
    )
    for call in calls:  # before the first forward, paths are those below each sharded module
        with pytest.raises(StateError, match=r"embed\.weight.*layer\.weight.*after sharding"):
            call()
    step(model)
    with pytest.raises(StateError, match=r"blocks\.0\.layer\.weight") as caught:
        optimizer.step()
    assert "from model.parameters() after sharding" in as_one(caught)


@on_ranks(2)
def test_an_optimizer_from_before_wrapping_goes_on_with_original_parameters(api: Api) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = shard(api, "orig", model)
    before = [p.detach().clone() for p in model.parameters()]
    step(model)
    optimizer.step()
    changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert any(changed)


# 16  size mismatch, torch.Size([0])


@faces
@on_ranks(2)
def test_one_ranks_shards_are_told_from_whole_tensors(api: Api, face: str, tmp_path: Path) -> None:
    model = shard(api, face, Net())
    if face != "flat":  # these have no names of the model's
        shards = {
            name.replace("_fsdp_wrapped_module.", ""): p.to_local() if isinstance(p, DTensor) else p
            for name, p in model.named_parameters()
        }
        if rank() == 0:
            torch.save({n: t.detach() for n, t in shards.items()}, tmp_path / "shards.pt")
        dist.barrier()
        with pytest.raises(CheckpointError, match="one rank's shard") as caught:
            api.load_checkpoint(tmp_path / "shards.pt", shard(api, face, Net()))
        assert "model/head.weight: (" in as_one(caught)
        assert "state_dict() of the outermost module" in as_one(caught)
    if face != "fully_shard":  # pieces of one flat buffer
        with pytest.warns(UserWarning, match="the pieces of Linear's parameters"):
            inside(model).head.state_dict()
        with warnings.catch_warnings(), api.FullyShardedDataParallel.summon_full_params(model):
            warnings.simplefilter("error")
            inside(model).head.state_dict()
        for save in (
            lambda: api.save_checkpoint(tmp_path / "part", inside(model).head),
            lambda: api.export_hf(inside(model).head, tmp_path / "hf"),
        ):
            with pytest.raises(CheckpointError, match="arbitrary pieces"):
                save()
        assert [*tmp_path.glob("part*"), *tmp_path.glob("hf*")] == []
    state = model.state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        name: tuple(t.shape) for name, t in Net().state_dict().items()
    }


# 17  CUDA out of memory: tests/engine/test_out_of_memory.py, without a device.
# 18  Killed at load: tests/checkpoint/test_room.py.
# 19  FSDP parameters/modules on cpu/meta


@faces
@on_ranks(2)
def test_what_is_on_meta_is_named_with_the_step_that_was_missed(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    step(model)
    model.to("meta")
    with pytest.raises(StateError, match="materialized from meta device") as caught:
        step(model)
    said = as_one(caught)
    assert f"['embed.weight', 'head.weight'] in root (rank {rank()})" in said
    assert "to_empty(device='cpu'), then initialise" in said
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    step(model)


@faces
@on_ranks(2)
def test_buffers_on_meta_are_named(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    inside(inside(model).blocks[1]).register_buffer("scale", torch.ones(8, device="meta"))
    with pytest.raises(StateError, match=r"on meta device: blocks\.1\.scale \(rank") as caught:
        step(model)
    assert "to_empty(device='cpu') and compute" in as_one(caught)
    inside(inside(model).blocks[1]).scale = torch.ones(8)
    step(model)


@on_ranks(2)
def test_what_an_init_function_leaves_on_meta_is_named(api: Api) -> None:
    model = Net()
    model.blocks[0].to("meta")
    with pytest.raises(StateError, match=r"param_init_fn .*meta device") as caught:
        shard(api, "orig", model, param_init_fn=lambda _: None)
    assert "layer.weight, layer.bias" in as_one(caught)


@faces
@on_ranks(2)
def test_a_parameter_added_after_sharding_is_named(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    inside(model).extra = nn.Linear(8, 8)
    with pytest.warns(UserWarning, match=r"extra\.bias, extra\.weight .*Add parameters before"):
        step(model)


# 20  generate or eval hangs on rank 0 only


@paths
def test_generation_on_one_rank_is_named_on_both(path: str) -> None:
    for ending in endings_of(Plan("generate", path)):
        assert "DivergenceError" in ending.kinds, ending.words
        assert "rank 0 ran nothing more; rank 1 called root (evaluation)" in ending.text


def test_a_collective_on_one_rank_is_named_on_both_with_its_line() -> None:
    for ending in endings_of(Plan("barrier", "auto")):
        assert "DivergenceError" in ending.words
        assert re.search(r"rank 1: in torch\.distributed's barrier .*job\.py:\d+", ending.words)
        assert "the same calls in the same order" in ending.words


# 21  only floating tensors can require grad (4-bit)


class Quantised(Net):
    """A model with a frozen integer weight, as quantised layers have."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.arange(64, dtype=torch.uint8).view(8, 8)
        self.blocks[0].codes = nn.Parameter(codes, requires_grad=False)
        self.blocks[0].forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        return block.layer(x) + x @ (block.codes.to(x.dtype) / 64)


@on_ranks(2)
def test_frozen_integer_weights_are_sharded(api: Api) -> None:
    model = shard(api, "fully_shard", Quantised())
    step(model)
    whole = dict(api.iter_full_state(model))["blocks.0.codes"]
    assert torch.equal(whole, torch.arange(64, dtype=torch.uint8).view(8, 8))
    block = Quantised().blocks[0]
    block.layer.requires_grad_(requires_grad=False)
    with pytest.raises(ShardingError, match="Cannot flatten integer dtype tensors") as caught:
        api.FullyShardedDataParallel(block)
    assert "codes is torch.uint8. Pass use_orig_params=True" in as_one(caught)


# 22  'Tensor' object has no attribute 'full_tensor'


@faces
@on_ranks(2)
def test_one_call_takes_sharded_ignored_and_plain_parameters(api: Api, face: str) -> None:
    model = Net()
    ignored = [model.head.weight]
    options: dict[str, Any] = {"ignored_states": ignored}
    if face == "fully_shard":
        options = {"ignored_params": set(ignored)}
    model = shard(api, face, model, **options)
    step(model)
    own = inside(model)
    for weight, shape in ((own.embed.weight, (12, 8)), (own.head.weight, (12, 8))):
        assert api.gathered(weight).shape == shape
    assert api.gathered(nn.Parameter(torch.ones(3))).shape == (3,)
    shapes = {name: tuple(t.shape) for name, t in api.iter_full_state(model)}
    assert shapes == {name: tuple(t.shape) for name, t in Net().state_dict().items()}


# 23  loss is NaN from one rank only


@faces
@on_ranks(2)
def test_clipping_stops_every_rank_where_one_has_a_nan(api: Api, face: str) -> None:
    model = shard(api, face, Net())
    scale = torch.tensor(float("nan") if rank() == 1 else 1.0)
    (model(TOKENS).mean() * scale).backward()
    with pytest.raises(StateError, match=r"norm of order 2\.0 is nan"):
        api.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@paths
def test_the_module_and_rank_that_made_a_nan_are_named_on_every_rank(path: str) -> None:
    other, maker = endings_of(Plan("nan", path))
    assert "StateError" in maker.kinds, maker.words
    made = "in forward, rank 1, the output of blocks.1.up (Linear) has"
    assert made in maker.text
    assert "parameters and buffers are finite" in maker.text
    assert made in other.words


# 24  loss jumps after resume


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@on_ranks(2)
def test_a_load_says_what_it_restored_and_refuses_what_it_lacks(
    api: Api, face: str, tmp_path: Path
) -> None:
    model = shard(api, face, Net())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    api.save_checkpoint(tmp_path / "all", model, optimizer)
    api.save_checkpoint(tmp_path / "model", model)
    fresh = shard(api, face, Net())
    moments = torch.optim.AdamW(fresh.parameters())
    loaded = api.load_checkpoint(tmp_path / "all", fresh, moments)
    assert loaded.num_tensors == 3 * len(Net().state_dict())  # values and two moments of each
    assert loaded.left_out == ()
    with pytest.raises(CheckpointError, match=r"lacks .*: 1\n    optimizer"):
        api.load_checkpoint(tmp_path / "model", fresh, moments)
    loaded = api.load_checkpoint(tmp_path / "model", fresh, moments, allow=["missing"])
    assert loaded.left_out == ("optimizer",)


# 25  throughput decays, low MFU


@on_ranks(2)
def test_a_trace_says_where_the_time_of_each_unit_goes(api: Api, tmp_path: Path) -> None:
    model = shard(api, "fully_shard", Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fullshard.trace(model, tmp_path / "trace", optimizer=optimizer):
        for _ in range(3):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    metrics = metrics_of(tmp_path / "trace")
    units = {unit["name"]: unit for unit in metrics["units"]["units"]}
    assert units.keys() == {"blocks.0", "blocks.1", "(root)"}
    assert units["blocks.1"]["gather_ns"] > 0  # for which compute stands still
    shares = {each["kind"]: each["share"] for each in metrics["time"]["kinds"]}
    assert {"wait for all-gather", "barrier", "optimizer", "other"} <= shares.keys()
    assert sum(shares.values()) == pytest.approx(1)
    assert [each["rank"] for each in metrics["stalls"]["ranks"]] == [0, 1]


# Beside the table  environment variable RANK expected, but not set


def test_a_script_without_ranks_is_told_how_to_start_them() -> None:
    program = """
import os, torch
from torch import nn
for name in ("RANK", "WORLD_SIZE"):
    os.environ.pop(name, None)
from fullshard import FullyShardedDataParallel, fully_shard
for shard in (fully_shard, FullyShardedDataParallel):
    try:
        shard(nn.Linear(2, 2))
    except ValueError as error:
        print(error)
"""
    (done,) = in_warm_forks(program)
    by_call, by_wrapper = done.out.splitlines()
    assert "environment variable RANK expected, but not set" in by_call  # as PyTorch says it
    assert "Default process group has not been initialized" in by_wrapper
    assert all("torchrun --nproc-per-node 2" in each for each in (by_call, by_wrapper))
