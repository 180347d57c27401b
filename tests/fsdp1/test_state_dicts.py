"""State dicts of wrapped models: what they hold, and that any can be loaded anywhere.

Kinds: FULL holds whole tensors; SHARDED rows of them, as ShardedTensors, or as DTensors of a model
that was wrapped over a device mesh; LOCAL this rank's shard of the flat buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fullshard
from tests.api import Api, use_api
from tests.engine.test_meshes import descending_group
from tests.fresh import in_fresh_ranks
from tests.fsdp1.models import (
    CPU,
    buffers,
    full_value,
    load,
    net,
    orig_params,
    quiet,
    run_step,
    save,
    saving,
    summon,
    train,
    whole,
    wrap,
)
from tests.harness import Pools, Task, mesh_of, on_ranks, rank, world_size
from tests.training import assert_equal

# What does not depend on how bytes travel.
on_default_comm = pytest.mark.apis("peer_memory", "torch")

# Name -> kind, strategy, and the shape of the device mesh; None is a process group.
SAVED: dict[str, tuple[str, str, tuple[int, ...] | None]] = {
    "full": ("FULL", "FULL_SHARD", None),
    "full-replicated": ("FULL", "NO_SHARD", None),
    "full-hybrid": ("FULL", "HYBRID_SHARD", (2, 2)),
    "full-mesh": ("FULL", "SHARD_GRAD_OP", (-1,)),
    "sharded": ("SHARDED", "FULL_SHARD", None),
    "dtensor": ("SHARDED", "FULL_SHARD", (-1,)),
    "dtensor-hybrid": ("SHARDED", "HYBRID_SHARD", (2, 2)),
    "dtensor-beside": (
        "SHARDED",
        "FULL_SHARD",
        (2, 2),
    ),  # over the first axis: the others train apart
    "local": ("LOCAL", "FULL_SHARD", None),
}
ON_2_RANKS = [name for name, (*_, shape) in SAVED.items() if shape != (2, 2)]
_NOT_ON_4_RANKS = ("full-replicated", "full-mesh", "dtensor-beside")
ON_4_RANKS = [name for name in SAVED if name not in _NOT_ON_4_RANKS]


def _make(api: Api, saved: str, *, seed: int = 1, use_orig_params: bool = False) -> Any:
    """Wrap a model as one that is saved in a way, after a step of training."""
    _, strategy, shape = SAVED[saved]
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    if shape is not None:
        options["device_mesh"] = mesh_of(*(world_size() if n == -1 else n for n in shape))
    model = wrap(api, net(seed), strategy, **options)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    return model


def _save(api: Api, model: nn.Module, saved: str, **options: Any) -> dict[str, Any]:
    return save(api, model, SAVED[saved][0], **options)


def _assert_same_model(api: Api, first: nn.Module, second: nn.Module) -> None:
    """Compare whole parameters and persistent buffers, bit by bit."""
    assert_equal(whole(api, first), whole(api, second))
    assert_equal(buffers(first), buffers(second))


# What they hold


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@orig_params
@on_ranks(1, 2)
def test_full_state_dict_is_that_of_the_module(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    for _ in range(2):
        expected = {**whole(api, model), **buffers(model)}
        state = save(api, model)
        assert list(state) == list(net().state_dict())
        assert {type(value) for value in state.values()} == {Tensor}
        assert torch.equal(state["tied.weight"], expected["head.weight"])
        assert_equal(state, {name: expected.get(name, state[name]) for name in state})
        before = {name: value.clone() for name, value in state.items()}
        run_step(model)
        with summon(api, model), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        parameters = [name for name in before if name not in dict(net().named_buffers())]
        assert_equal({n: state[n] for n in parameters}, {n: before[n] for n in parameters})


@on_default_comm
@pytest.mark.ours("cannot offload on a CPU")
@pytest.mark.parametrize("offload", [False, True])
@orig_params
@on_ranks(2, 4)
def test_first_rank_alone_may_have_the_full_state_dict(
    api: Api, offload: bool, use_orig_params: bool
) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    state = save(api, model, rank0_only=True, offload_to_cpu=offload)
    if rank() == 0:
        assert list(state) == list(net().state_dict())
        assert_equal(state, save(api, model, offload_to_cpu=offload))
    else:
        assert state == {}
        save(api, model, offload_to_cpu=offload)


@on_default_comm
@pytest.mark.parametrize("saved", ["sharded", "dtensor", "dtensor-hybrid", "dtensor-beside"])
@orig_params
@on_ranks(4)
def test_sharded_values_are_torch_s(api: Api, saved: str, use_orig_params: bool) -> None:
    ours, theirs = (
        _save(each, _make(each, saved, use_orig_params=use_orig_params), saved)
        for each in (api, Api("torch"))
    )
    assert list(ours) == list(theirs) == list(net().state_dict())
    for name, value in ours.items():
        other = theirs[name]
        assert type(value) is type(other), name
        if isinstance(value, DTensor):
            assert value._spec == other._spec, name
        elif isinstance(value, ShardedTensor):
            assert value.metadata() == other.metadata(), name
        # Sums over 4 ranks are not formed in the same order.
        values = [{name: full_value(each)} for each in (value, other)]
        assert_equal(*values, rtol=1e-6, atol=1e-7)


@on_default_comm
@on_ranks(2)
def test_local_values_are_torch_s(api: Api) -> None:
    ours, theirs = (_save(each, _make(each, "local"), "local") for each in (api, Api("torch")))
    assert sorted(ours) == sorted(theirs)
    for name, value in ours.items():
        if isinstance(value, ShardedTensor):
            shards = [each[name].metadata().shards_metadata for each in (ours, theirs)]
            assert shards[0] == shards[1]
            assert_equal({name: full_value(value)}, {name: full_value(theirs[name])})


@on_default_comm
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@on_ranks(2)
def test_values_may_be_offloaded(api: Api, kind: str) -> None:
    if api.is_torch:
        pytest.skip("PyTorch: cannot offload on a CPU")
    model = wrap(api, net())
    with quiet():  # ShardedTensors are deprecated
        values = save(api, model, kind, offload_to_cpu=True).values()
        assert {value.device for value in values} == {CPU}


@on_default_comm
@pytest.mark.parametrize("saved", ON_2_RANKS)
@orig_params
@on_ranks(2)
def test_module_that_is_not_wrapped_has_prefixed_keys(
    api: Api, saved: str, use_orig_params: bool
) -> None:
    if api.is_torch and saved == "local":
        pytest.skip("PyTorch: has other keys")
    model = nn.ModuleDict({
        "first": _make(api, saved, use_orig_params=use_orig_params),
        "second": nn.Linear(6, 2),
    })  # fmt: skip
    state = _save(api, model, saved)
    inside = _save(api, model["first"], saved)
    assert list(state) == [*(f"first.{name}" for name in inside), "second.weight", "second.bias"]
    other = nn.ModuleDict({
        "first": _make(api, saved, seed=5, use_orig_params=use_orig_params),
        "second": nn.Linear(6, 2),
    })  # fmt: skip
    load(api, other, state, SAVED[saved][0])
    _assert_same_model(api, other["first"], model["first"])
    assert torch.equal(other["second"].weight, model["second"].weight)


@on_default_comm
@pytest.mark.parametrize("outside", [False, True])
@orig_params
@on_ranks(2)
def test_activation_checkpointing_leaves_no_trace_in_keys(
    api: Api, outside: bool, use_orig_params: bool
) -> None:
    model = net()
    for number in range(2):
        block = model.blocks[number]
        inner = block if outside else checkpoint_wrapper(block)
        wrapped = wrap(api, inner, nested=False, use_orig_params=use_orig_params)
        model.blocks[number] = checkpoint_wrapper(wrapped) if outside else wrapped
    model = wrap(api, model, nested=False, use_orig_params=use_orig_params)
    run_step(model)
    state = save(api, model)
    assert list(state) == list(net().state_dict())
    other = wrap(api, net(seed=5))
    load(api, other, state)
    _assert_same_model(api, other, model)
    load(api, model, save(api, wrap(api, net(seed=6))))
    _assert_same_model(api, model, wrap(api, net(seed=6)))


@on_default_comm
@orig_params
@on_ranks(2)
def test_frozen_parameters_are_saved_too(api: Api, use_orig_params: bool) -> None:
    model, other = net(), net(seed=5)
    for each in (model, other):
        each.blocks.requires_grad_(requires_grad=False)
    model, other = (wrap(api, m, use_orig_params=use_orig_params) for m in (model, other))
    run_step(model)
    for kind in ("FULL", "SHARDED"):
        state = save(api, model, kind)
        assert list(state) == list(net().state_dict())
        load(api, other, state, kind)
        _assert_same_model(api, other, model)


@on_default_comm
@pytest.mark.parametrize("kind", ["FULL", "SHARDED", "LOCAL"])
@on_ranks(2)
def test_mixed_precision_does_not_show(api: Api, kind: str) -> None:
    policy = api.MixedPrecision(
        param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, _module_classes_to_ignore=()
    )
    model = wrap(api, net(), mixed_precision=policy)
    run_step(model)
    state = save(api, model, kind)
    with quiet():  # ShardedTensors are deprecated
        kept = {v.dtype for n, v in state.items() if kind != "LOCAL" or n.endswith("_flat_param")}
    assert kept - {torch.int64} == {torch.float32}
    other = wrap(api, net(seed=5), mixed_precision=policy)
    run_step(other)
    load(api, other, state, kind)
    assert_equal(whole(api, other), whole(api, model))
    with torch.no_grad():
        x = torch.randn(4, 7)
        assert torch.equal(other.eval()(x), model.eval()(x))


# There and back


@pytest.mark.parametrize("saved", ON_2_RANKS)
@orig_params
@on_ranks(2)
def test_another_instance_loads_what_was_saved(api: Api, saved: str, use_orig_params: bool) -> None:
    if api.is_torch and saved == "local" and use_orig_params:
        pytest.skip("PyTorch: has LOCAL_STATE_DICT for flat parameters alone")
    model = _make(api, saved, use_orig_params=use_orig_params)
    other = _make(api, saved, seed=5, use_orig_params=use_orig_params)
    addresses = [(id(p), p.data_ptr()) for p in other.parameters()]
    result = load(api, other, _save(api, model, saved), SAVED[saved][0])
    assert not result.missing_keys
    assert not result.unexpected_keys
    _assert_same_model(api, other, model)
    assert [(id(p), p.data_ptr()) for p in other.parameters()] == addresses
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other)]
    losses = [train(m, o) for m, o in zip((model, other), optimizers, strict=True)]
    assert losses[0] == losses[1]
    _assert_same_model(api, other, model)


@on_default_comm
@pytest.mark.ours("loads what its settings say, and LOCAL by position")
@pytest.mark.parametrize("settings", ["FULL", "SHARDED", "LOCAL"])
@pytest.mark.parametrize("saved", ON_2_RANKS)
@orig_params
@on_ranks(2)
def test_any_kind_loads_whatever_the_settings(
    api: Api, settings: str, saved: str, use_orig_params: bool
) -> None:
    model = _make(api, saved, use_orig_params=use_orig_params)
    other = wrap(api, net(seed=5), use_orig_params=use_orig_params)
    load(api, other, _save(api, model, saved), settings)
    _assert_same_model(api, other, model)


@on_default_comm
@pytest.mark.ours("has other sizes for other settings")
@pytest.mark.parametrize("saved", [name for name in ON_4_RANKS if name != "local"])
@pytest.mark.parametrize("into", ["full", "full-hybrid"])
@on_ranks(4)
def test_any_wrapping_loads_what_any_other_saved(api: Api, saved: str, into: str) -> None:
    model = _make(api, saved, use_orig_params=True)
    other = _make(api, into, seed=5)
    load(api, other, _save(api, model, saved), SAVED[into][0])
    _assert_same_model(api, other, model)


def _between(function: Any) -> Any:
    """Run a test with each kind of parameters on either side, in both directions."""
    for names, values, ids in (
        ("use_orig_params", [False, True], ["flat", "orig"]),
        ("into_orig_params", [False, True], ["into_flat", "into_orig"]),
        ("direction", ["to_torch", "from_torch"], None),
    ):
        function = pytest.mark.parametrize(names, values, ids=ids)(function)
    return on_default_comm(function)


def _assert_torch_s_are_ours(
    api: Api, saved: str, use_orig_params: bool, into_orig_params: bool, direction: str
) -> None:
    first, second = (api, Api("torch")) if direction == "to_torch" else (Api("torch"), api)
    model = _make(first, saved, use_orig_params=use_orig_params)
    other = _make(second, saved, seed=5, use_orig_params=into_orig_params)
    result = load(second, other, _save(first, model, saved), SAVED[saved][0])
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_equal(whole(second, other), whole(first, model))
    assert_equal(buffers(other), buffers(model))


@_between
@pytest.mark.parametrize("saved", ["full", "sharded", "dtensor"])
@on_ranks(2)
def test_torch_s_state_dicts_are_ours(
    api: Api, saved: str, use_orig_params: bool, into_orig_params: bool, direction: str
) -> None:
    _assert_torch_s_are_ours(api, saved, use_orig_params, into_orig_params, direction)


@pytest.mark.long
@_between
@pytest.mark.parametrize("saved", ["full", "full-hybrid", "sharded", "dtensor", "dtensor-hybrid"])
@on_ranks(4)
def test_torch_s_state_dicts_are_ours_on_four_ranks(
    api: Api, saved: str, use_orig_params: bool, into_orig_params: bool, direction: str
) -> None:
    _assert_torch_s_are_ours(api, saved, use_orig_params, into_orig_params, direction)


@on_default_comm
@pytest.mark.parametrize("direction", ["to_torch", "from_torch"])
@on_ranks(2)
def test_torch_s_local_state_dicts_are_ours(api: Api, direction: str) -> None:
    first, second = (api, Api("torch")) if direction == "to_torch" else (Api("torch"), api)
    model, other = _make(first, "local"), _make(second, "local", seed=5)
    load(second, other, _save(first, model, "local"), "LOCAL")
    assert_equal(whole(second, other), whole(first, model))


@on_default_comm
@orig_params
@on_ranks(2)
def test_module_that_was_never_wrapped_loads_full_ones(api: Api, use_orig_params: bool) -> None:
    model = _make(api, "full", use_orig_params=use_orig_params)
    alone = net(seed=5)
    alone.load_state_dict(save(api, model))
    assert_equal(dict(alone.named_parameters()), whole(api, model))
    other = wrap(api, net(seed=6), use_orig_params=use_orig_params)
    load(api, other, alone.state_dict())
    assert_equal(whole(api, other), whole(api, model))


@orig_params
@on_ranks(2)
def test_state_dict_inside_summon_is_full(api: Api, use_orig_params: bool) -> None:
    model = _make(api, "full", use_orig_params=use_orig_params)
    expected = save(api, model)
    with summon(api, model):
        state = save(api, model)
        assert list(state) == list(net().state_dict())
        assert_equal(state, expected)


@on_default_comm
@pytest.mark.ours("gathers what is whole already")
@orig_params
@on_ranks(2)
def test_loading_inside_summon_is_written_back(api: Api, use_orig_params: bool) -> None:
    model, other = (
        _make(api, "full", seed=seed, use_orig_params=use_orig_params) for seed in (1, 5)
    )
    state = save(api, model)
    with summon(api, other):
        load(api, other, state)
    _assert_same_model(api, other, model)


@pytest.mark.parametrize("saved", ["sharded", "dtensor"])
@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (2, 1)], ids=str)
@on_default_comm
def test_checkpoints_load_on_other_numbers_of_ranks(
    api: str, saved: str, ranks: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    if api == "torch":
        pytest.skip("PyTorch: has no SHARDED_STATE_DICT on one rank")
    kwargs = {"api": api, "saved": saved, "folder": tmp_path}
    before = pools.run(ranks[0], Task(__name__, "_write_checkpoint", kwargs))
    after = pools.run(ranks[1], Task(__name__, "_read_checkpoint", kwargs))
    for state in after:
        assert_equal(state, before[0])


def _write_checkpoint(api: Api, saved: str, folder: Path) -> dict[str, Tensor]:
    model = _make(api, saved, use_orig_params=True)
    with quiet():
        dcp.save(_save(api, model, saved), checkpoint_id=folder)
    return whole(api, model)


def _read_checkpoint(api: Api, saved: str, folder: Path) -> dict[str, Tensor]:
    model = _make(api, saved, seed=5)
    state = _save(api, model, saved)
    with quiet():
        dcp.load(state, checkpoint_id=folder)
    load(api, model, state, "SHARDED")
    return whole(api, model)


# Errors


@on_default_comm
@orig_params
@pytest.mark.parametrize("change", ["missing", "unexpected", "both", "shape"])
@pytest.mark.parametrize("where", ["stem.weight", "blocks.1.narrow.weight", "shift"])
@on_ranks(2)
def test_errors_name_keys_as_the_module_does(
    api: Api, use_orig_params: bool, change: str, where: str
) -> None:
    if api.is_torch and (change == "shape" or (change != "unexpected" and where != "shift")):
        pytest.skip("PyTorch: asserts, or names what wrapping adds")

    def attempt(model: nn.Module) -> str:
        state = net(seed=5).state_dict()
        if change in ("missing", "both"):
            del state[where]
        if change in ("unexpected", "both"):
            state["blocks.7.extra"] = torch.ones(2)
        if change == "shape":
            state[where] = torch.ones(3, 11)
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict") as raised:
            model.load_state_dict(state)
        return str(raised.value).partition(":")[2]

    model = wrap(api, net(), use_orig_params=use_orig_params)
    with quiet():
        ours = attempt(model)
    if change == "shape":
        assert f"size mismatch for {where}:" in ours
    else:
        assert ours == attempt(net())
    run_step(model)


@on_default_comm
@orig_params
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@on_ranks(2)
def test_loose_loading_says_what_did_not_fit(api: Api, use_orig_params: bool, kind: str) -> None:
    if api.is_torch:
        pytest.skip("PyTorch: asserts, or names every parameter")
    model, other = (
        _make(api, "sharded", seed=seed, use_orig_params=use_orig_params) for seed in (1, 5)
    )
    state = save(api, other, kind)
    for name in ("stem.bias", "blocks.0.norm.weight", "shift"):
        del state[name]
    state["blocks.0.new"] = torch.ones(1)
    before = whole(api, model)
    result = load(api, model, state, kind, strict=False)
    assert sorted(result.missing_keys) == ["blocks.0.norm.weight", "shift", "stem.bias"]
    assert result.unexpected_keys == ["blocks.0.new"]
    expected = whole(api, other)
    expected.update({n: before[n] for n in ("stem.bias", "blocks.0.norm.weight")})
    assert_equal(whole(api, model), expected)


@on_default_comm
@pytest.mark.parametrize("kind", ["SHARDED", "LOCAL"])
@on_ranks(2)
def test_a_replicated_model_has_whole_values_whatever_is_asked_for(api: Api, kind: str) -> None:
    model = wrap(api, net(), "NO_SHARD")
    state = save(api, model, kind)
    assert_equal(state, save(api, model))
    assert list(state) == list(net().state_dict())


@on_default_comm
@on_ranks(2)
def test_local_state_dict_of_another_layout_is_refused(api: Api) -> None:
    if api.is_torch:
        pytest.skip("PyTorch: asserts in the middle")
    model = wrap(api, net())
    state = save(api, wrap(api, net().stem), "LOCAL")
    with pytest.raises(ValueError, match="elements for this rank"):
        load(api, model, state, "LOCAL", strict=False)


# Settings


@on_default_comm
@on_ranks(2)
def test_settings_hold_for_all_instances_and_end_with_the_context(api: Api) -> None:
    model = wrap(api, net())
    FSDP = api.FullyShardedDataParallel
    with quiet():
        before = FSDP.set_state_dict_type(model, api.StateDictType.SHARDED_STATE_DICT)
        assert before.state_dict_type is api.StateDictType.FULL_STATE_DICT
        assert before.state_dict_config == api.FullStateDictConfig()
        assert before.optim_state_dict_config == api.FullOptimStateDictConfig()
    now = FSDP.get_state_dict_type(model.blocks[1])
    assert now.state_dict_type is api.StateDictType.SHARDED_STATE_DICT
    with saving(api, model, "FULL", rank0_only=True):
        config = FSDP.get_state_dict_type(model.blocks[0]).state_dict_config
        assert config == api.FullStateDictConfig(rank0_only=True)
    assert FSDP.get_state_dict_type(model) == now
    with saving(api, model.blocks[0], "LOCAL"), pytest.raises(AssertionError, match="All FSDP"):
        FSDP.get_state_dict_type(model)
    assert FSDP.get_state_dict_type(model) == now


@on_default_comm
@pytest.mark.ours("keeps the settings of a context that raised")
@on_ranks(2)
def test_exception_ends_the_settings_of_a_context(api: Api) -> None:
    model = wrap(api, net())
    with pytest.raises(KeyError), saving(api, model, "SHARDED"):
        raise KeyError
    now = api.FullyShardedDataParallel.get_state_dict_type(model)
    assert now.state_dict_type is api.StateDictType.FULL_STATE_DICT


@on_default_comm
@on_ranks(2)
def test_settings_are_deprecated(api: Api) -> None:
    model = wrap(api, net())
    with pytest.warns(FutureWarning, match="are being deprecated"):
        api.FullyShardedDataParallel.set_state_dict_type(model, api.StateDictType.FULL_STATE_DICT)


# torch.distributed.checkpoint.state_dict


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@orig_params
@in_fresh_ranks(2)
def test_checkpoint_functions_know_installed_wrappers(full: bool, use_orig_params: bool) -> None:
    fullshard.install()
    with use_api("peer_memory") as api, quiet():
        models = [_make(api, "dtensor", seed=s, use_orig_params=use_orig_params) for s in (1, 5)]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
        train(models[0], optimizers[0])
        options = StateDictOptions(full_state_dict=full)
        state, optim_state = get_state_dict(models[0], optimizers[0], options=options)
        assert list(state) == list(net().state_dict())
        assert {isinstance(state[name], DTensor) for name in ("stem.bias", "scale")} == {not full}
        set_state_dict(
            models[1],
            optimizers[1],
            model_state_dict=state,
            optim_state_dict=optim_state,
            options=options,
        )
        _assert_same_model(api, models[1], models[0])
        losses = [train(m, o) for m, o in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1]
        _assert_same_model(api, models[1], models[0])


# Places in the mesh and in process groups


@on_default_comm
@pytest.mark.ours("sharded values gather in another order")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@orig_params
@on_ranks(4)
def test_mesh_in_another_order_than_its_groups_is_refused(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    rows: Any = [[3, 1], [2, 0]] if strategy == "HYBRID_SHARD" else [3, 1, 2, 0]
    mesh = DeviceMesh(
        "cpu", rows, mesh_dim_names=("replicate", "shard")[-torch.tensor(rows).dim() :]
    )
    with pytest.raises(api.errors.MeshError, match=r"'shard'.* order") as refused:
        wrap(api, net(), strategy, device_mesh=mesh, use_orig_params=use_orig_params)
    wrong = rows[0] if strategy == "HYBRID_SHARD" else rows
    assert str(wrong) in str(refused.value)
    assert str(sorted(wrong)) in str(refused.value)


@on_default_comm
@pytest.mark.ours("sharded values gather in another order")
@on_ranks(4)
def test_other_axis_over_which_values_are_divided_has_its_order_too(api: Api) -> None:
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(api.errors.MeshError, match=r"Values.*'tp'.* order"):
        wrap(api, net(), device_mesh=mesh)


@on_default_comm
@orig_params
@pytest.mark.parametrize("given", ["process_group", "device_mesh"])
@on_ranks(2)
def test_values_of_a_group_in_another_order_than_its_ranks_are_whole(
    api: Api, given: str, use_orig_params: bool
) -> None:
    group = descending_group()
    where: dict[str, Any] = {
        given: group if given == "process_group" else DeviceMesh.from_group(group, "cpu")
    }
    model = wrap(api, net(), use_orig_params=use_orig_params, **where)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, steps=2)
    expected = whole(api, model)
    sharded = save(api, model, "SHARDED")
    assert_equal({key: full_value(sharded[key]) for key in expected}, expected)
    if api.is_torch and not use_orig_params:
        return  # PyTorch: AssertionError in the optimizer's
    ordered = wrap(api, net(), use_orig_params=use_orig_params)
    other = torch.optim.Adam(ordered.parameters(), lr=0.1)
    train(ordered, other, steps=2)
    options = StateDictOptions(full_state_dict=True)
    states, expected_states = (
        get_state_dict(*each, options=options)[1]["state"]
        for each in ((model, optimizer), (ordered, other))
    )
    assert states.keys() == expected_states.keys()
    for key, state in expected_states.items():
        assert_equal(states[key], state, rtol=1e-5, atol=1e-7)


@on_default_comm
@pytest.mark.ours("adds up parts of different ranks")
@orig_params
@on_ranks(4)
def test_ranks_of_tensor_parallel_are_not_sharded_over(api: Api, use_orig_params: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = [0, 1] if rank() < 2 else [2, 3]
    for where in ({"device_mesh": mesh["tp"]}, {"process_group": mesh.get_group("tp")}, {}):
        model = nn.Sequential(nn.Linear(4, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        with pytest.raises(api.errors.MeshError, match=r"0\.weight") as refused:
            wrap(api, model, use_orig_params=use_orig_params, **where)
        assert str(own) in str(refused.value)


@on_default_comm
@pytest.mark.ours("ranks 2 and 3 keep rank 2's values")
@on_ranks(4)
def test_first_rank_of_the_mesh_gives_all_their_values_whatever_order_replicas_have(
    api: Api,
) -> None:
    mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("replicate", "shard"))
    model = wrap(api, net(rank()), "HYBRID_SHARD", device_mesh=mesh, sync_module_states=True)
    assert_equal(whole(api, model), dict(net(0).named_parameters()))
