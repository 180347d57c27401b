"""What the wrapper accepts, refuses and shows: everything around training itself.

Errors are compared with PyTorch's in the same ranks: ours must be of its type and begin alike.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import _runtime_utils
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import _apply_optimizer_in_backward

import fullshard
from tests.api import Api
from tests.fsdp1.models import (
    CPU,
    Block,
    Net,
    averaged_gradients,
    batch,
    buffers,
    net,
    orig_params,
    parameters,
    quiet,
    run_step,
    summon,
    train,
    whole,
    whole_gradients,
    wrap,
)
from tests.harness import mesh_of, on_ranks, rank
from tests.installing import installed
from tests.models import Scale
from tests.training import assert_equal, make_batch, my_part

strategies = pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
# What does not depend on how bytes travel.
on_default_comm = pytest.mark.apis("peer_memory", "torch")


# Errors


class Scalar(nn.Linear):
    """A layer with a parameter of no dimension."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def _two_dtypes() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))


def _partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(requires_grad=False)
    return model


def _integers() -> nn.Module:
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(4), requires_grad=False)
    return model


def _wrap_inside(api: Api) -> nn.Sequential:
    return nn.Sequential(wrap(api, nn.Linear(4, 4)), nn.Linear(4, 4))


def _ignore_wrapped(api: Api) -> Any:
    model = _wrap_inside(api)
    return wrap(api, model, nested=False, ignored_modules=[model[0]])


def _ignore_both(api: Api, first: str, second: str) -> Any:
    model = nn.Linear(4, 4)
    return wrap(api, model, **{first: [model], second: [model.weight]})


def _default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


REFUSED: dict[str, Callable[[Api], Any]] = {
    "group_and_mesh": lambda api: wrap(
        api, net(), process_group=_default_group(), device_mesh=mesh_of(2)
    ),
    "two_ways_to_ignore": lambda api: _ignore_both(api, "ignored_modules", "ignored_states"),
    "ignored_states_of_both_kinds": lambda api: wrap(
        api, nn.Linear(4, 4), ignored_states=[nn.Linear(4, 4), nn.Parameter(torch.ones(2))]
    ),
    "ignored_module_is_a_tensor": lambda api: wrap(
        api, nn.Linear(4, 4), ignored_modules=[torch.ones(2)]
    ),
    "ignored_modules_not_iterable": lambda api: wrap(api, nn.Linear(4, 4), ignored_modules=3),
    "ignored_module_is_wrapped": _ignore_wrapped,
    "hybrid_without_groups": lambda api: wrap(api, net(), "HYBRID_SHARD", nested=False),
    "hybrid_over_one_axis": lambda api: wrap(api, net(), "HYBRID_SHARD", device_mesh=mesh_of(2)),
    "hybrid_over_one_group": lambda api: wrap(
        api, net(), "HYBRID_SHARD", process_group=_default_group()
    ),
    "scalar_parameter": lambda api: wrap(api, Scalar()),
    "scalar_parameter_as_itself": lambda api: wrap(api, Scalar(), use_orig_params=True),
    "two_dtypes": lambda api: wrap(api, _two_dtypes()),
    "integers": lambda api: wrap(api, _integers()),
    "partly_frozen": lambda api: wrap(api, _partly_frozen(), nested=False),
    "partly_frozen_by_policy": lambda api: wrap(
        api, _partly_frozen(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})
    ),
    "wrapped_already": lambda api: wrap(
        api, _wrap_inside(api), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    ),
    "init_fn_is_a_number": lambda api: wrap(
        api, nn.Linear(4, 4, device="meta"), param_init_fn=3
    ),
}  # fmt: skip
# PyTorch names neither the argument nor what it expects, or writes down its own state.
OWN_WORDS = ("ignored_modules_not_iterable", "gradients_of_flat_parameters", "gradients_offloaded")


def _error(attempt: Callable[[Api], Any], api: Api) -> Exception:
    """Return what an attempt raises: PyTorch asserts by a bare AssertionError."""
    try:
        attempt(api)
    except Exception as error:
        return error
    raise AssertionError(f"{api} raised nothing")


def _assert_refused_alike(cases: dict[str, Callable[[Api], Any]], case: str, api: Api) -> None:
    ours, theirs = _error(cases[case], api), _error(cases[case], Api("torch"))
    assert isinstance(ours, type(theirs)), f"{ours!r} is no {theirs!r}"
    if case in OWN_WORDS:
        return
    assert _opening(theirs) == _opening(ours)[: len(_opening(theirs))], f"{ours}\n{theirs}"


def _opening(error: Exception) -> list[str]:
    """Return the first words of a message, without signs and what differs between classes."""
    return re.findall(r"\w+", str(error).replace("ShardingStrategy.", ""))[:4]


@on_default_comm
@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2)
def test_constructor_refuses_what_torch_refuses(api: Api, case: str) -> None:
    _assert_refused_alike(REFUSED, case, api)


@on_default_comm
@pytest.mark.ours("does not look at what is outside the blocks")
@orig_params
@on_ranks(2)
def test_parameter_tied_across_instances_is_refused(api: Api, use_orig_params: bool) -> None:
    model = nn.Sequential(Block(), nn.Linear(5, 6, bias=False))
    model[1].weight = model[0].narrow.weight
    with pytest.raises(ValueError, match=r"nested FSDP instance.*together"):
        wrap(api, model, use_orig_params=use_orig_params)


@on_default_comm
@on_ranks(2)
def test_lazy_module_is_refused(api: Api) -> None:
    if api.is_torch:
        pytest.skip("PyTorch: fails on some attribute")
    with pytest.raises(ValueError, match="not initialised yet"):
        wrap(api, nn.LazyLinear(4), use_orig_params=True)


@on_default_comm
@on_ranks(2)
def test_refused_module_is_left_as_it_was(api: Api) -> None:
    if api.is_torch:
        pytest.skip("PyTorch: flattens before it checks")
    model = _two_dtypes()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="uniform dtype"):
        wrap(api, model)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(p is before[name] for name, p in model.named_parameters())
    wrap(api, model, use_orig_params=True)


def _enter(manager: Any) -> None:
    with manager:
        pass


def _summon_twice(api: Api) -> None:
    model = wrap(api, net())
    with summon(api, model):
        _enter(summon(api, model))


class Summoner(nn.Linear):
    """Summons the parameters of a model in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        _enter(self.summon())
        return super().forward(x)


def _summon_in_forward(api: Api) -> None:
    layer = Summoner(4, 4)
    model = wrap(api, layer)
    object.__setattr__(layer, "summon", lambda: summon(api, model))
    model(torch.ones(2, 4))


def _hook_twice(api: Api) -> None:
    model = wrap(api, net())
    for _ in range(2):
        _use_hook(model, default_hooks.reduce_scatter_hook)


def _use_hook(model: Any, hook: Any) -> None:
    model.register_comm_hook(_hook_state(), hook)


def _hook_state(**options: Any) -> default_hooks.DefaultState:
    if options:
        return default_hooks.LowPrecisionState(process_group=_default_group(), **options)
    return default_hooks.DefaultState(process_group=_default_group())


def _inner(api: Api) -> Any:
    model = wrap(api, net())
    model(my_part(batch()))
    return model.blocks[0]


MISUSED: dict[str, Callable[[Api], Any]] = {
    "writeback_of_one_rank": lambda api: _enter(
        summon(api, wrap(api, net()), rank0_only=True, writeback=True)
    ),
    "gradients_of_flat_parameters": lambda api: _enter(
        summon(api, wrap(api, net()), with_grads=True)
    ),
    "gradients_offloaded": lambda api: _enter(
        summon(
            api,
            wrap(api, net(), use_orig_params=True),
            with_grads=True,
            offload_to_cpu=True,
            rank0_only=True,
            writeback=False,
        )
    ),
    "summon_in_forward": _summon_in_forward,
    "no_sync_of_inner_instance": lambda api: _enter(_inner(api).no_sync()),
    "clip_of_inner_instance": lambda api: _inner(api).clip_grad_norm_(1.0),
    "hook_of_inner_instance": lambda api: _use_hook(_inner(api), default_hooks.allreduce_hook),
    "hook_twice": _hook_twice,
    "hook_is_a_number": lambda api: _use_hook(wrap(api, net()), 3),
    "options_of_another_kind": lambda api: api.FullyShardedDataParallel.set_state_dict_type(
        wrap(api, net()), api.StateDictType.FULL_STATE_DICT, api.LocalStateDictConfig()
    ),
    "optimizer_options_of_another_kind": lambda api: (
        api.FullyShardedDataParallel.set_state_dict_type(
            wrap(api, net()),
            api.StateDictType.FULL_STATE_DICT,
            None,
            api.LocalOptimStateDictConfig(),
        )
    ),
}  # fmt: skip


@on_default_comm
@pytest.mark.parametrize("case", MISUSED)
@on_ranks(2)
def test_misuse_raises_as_in_torch(api: Api, case: str) -> None:
    with quiet():
        _assert_refused_alike(MISUSED, case, api)


@on_default_comm
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@on_ranks(4)
def test_hybrid_strategies_take_no_hook(api: Api, strategy: str) -> None:
    model = wrap(api, net(), strategy, device_mesh=mesh_of(2, 2))
    with pytest.raises(AssertionError, match="not supported for hybrid"):
        _use_hook(model, default_hooks.reduce_scatter_hook)


@on_default_comm
@pytest.mark.ours("its nested instances do not notice")
@on_ranks(2)
def test_summon_inside_summon_is_refused(api: Api) -> None:
    with pytest.raises(AssertionError, match="Cannot manually unshard"):
        _summon_twice(api)


# Warnings


@on_default_comm
@on_ranks(1)
def test_single_rank_shards_nothing_and_says_so(api: Api) -> None:
    with pytest.warns(UserWarning, match="to use `NO_SHARD`"):
        model = api.FullyShardedDataParallel(net(), device_id=CPU)
    assert model.sharding_strategy is api.ShardingStrategy.NO_SHARD
    alone = net()
    run_step(alone)
    run_step(model)
    grads = [p.grad.reshape(-1) for p in alone.parameters()]
    assert torch.equal(torch.cat([p.grad for p in model.parameters()]), torch.cat(grads))


class Hooked(nn.Linear):
    """A layer whose weight has a hook after accumulation."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class OnMeta(nn.Module):
    """A module with a parameter on the meta device, and no way to give it values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4, device="meta"))


def _with_frozen_weights() -> Net:
    model = net()
    for block in model.blocks:
        block.wide.weight.requires_grad_(False)
    return model


WARNED_OF: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "containers that do not implement": lambda: (nn.ModuleList([nn.Linear(4, 4)]), {}),
    "switching to use `NO_SHARD`": lambda: (net(), {}),
    "Trying to ignore the top-level": lambda: ((model := net()), {"ignored_modules": [model]}),
    "Unable to call `reset_parameters": lambda: (OnMeta(), {}),
    "hooks after accumulation": lambda: (Hooked(), {}),
    "Both mixed precision and an auto_wrap_policy": lambda: (
        net(),
        {
            "auto_wrap_policy": ModuleWrapPolicy({Block}),
            "mixed_precision": fullshard.MixedPrecision(torch.bfloat16),
        },
    ),
    "has both parameters with requires_grad": lambda: (
        _with_frozen_weights(),
        {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True},
    ),
}


@on_default_comm
@pytest.mark.ours("PyTorch's warnings name lines of its own")
@pytest.mark.parametrize("message", WARNED_OF)
@on_ranks(1)
def test_constructor_s_warnings_name_the_user_s_line(api: Api, message: str) -> None:
    model, options = WARNED_OF[message]()
    raises = pytest.raises(RuntimeError) if isinstance(model, OnMeta) else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as caught, raises:
        warnings.simplefilter("always")
        api.FullyShardedDataParallel(model, device_id=CPU, **options)
    (first, *_) = [each for each in caught if message in str(each.message)]
    assert first.filename == __file__


@on_default_comm
@on_ranks(2)
def test_no_shard_is_deprecated(api: Api) -> None:
    with pytest.warns(FutureWarning, match="`NO_SHARD` .*deprecated"):
        api.FullyShardedDataParallel(
            net(), device_id=CPU, sharding_strategy=api.ShardingStrategy.NO_SHARD
        )


@on_default_comm
@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
@on_ranks(2)
def test_container_without_forward_is_warned_of(api: Api, container: type[nn.Module]) -> None:
    layers = {"a": nn.Linear(4, 4)} if container is nn.ModuleDict else [nn.Linear(4, 4)]
    with pytest.warns(UserWarning, match="do not implement forward"):
        api.FullyShardedDataParallel(container(layers), device_id=CPU)


@on_default_comm
@on_ranks(2)
def test_ignoring_all_is_warned_of(api: Api) -> None:
    model = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="ignore the top-level module"):
        wrapped = api.FullyShardedDataParallel(model, device_id=CPU, ignored_modules=[model])
    assert list(wrapped.parameters()) == [model.weight, model.bias]
    run = wrapped(torch.ones(2, 4)).sum()
    run.backward()
    assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0))


@on_default_comm
@on_ranks(2)
def test_units_with_frozen_parameters_are_warned_of(api: Api) -> None:
    with pytest.warns(UserWarning, match="requires_grad=True and False"):
        api.FullyShardedDataParallel(
            nn.Sequential(_partly_frozen()),
            device_id=CPU,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        )


@on_default_comm
@on_ranks(2)
def test_clip_without_gradients_is_warned_of(api: Api) -> None:
    model = wrap(api, net())
    with pytest.warns(UserWarning, match="no gradients -- returning"):
        norm = model.clip_grad_norm_(1.0)
    assert norm == 0
    assert norm.dtype == torch.float32


@pytest.mark.ours("PyTorch warns where a rank has nothing to train")
@on_default_comm
@on_ranks(2)
def test_clip_does_not_warn_where_a_rank_has_nothing_but_frozen_parameters(api: Api) -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1, bias=False))
    nn.init.ones_(model[1].weight)
    policy = ModuleWrapPolicy({nn.Linear})
    wrapped = wrap(api, model, use_orig_params=True, auto_wrap_policy=policy)
    wrapped(torch.ones(2, 4)).sum().backward()
    trained = [p.numel() for p in wrapped.parameters() if p.requires_grad]
    assert (trained == [0]) == (rank() == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wrapped.clip_grad_norm_(1.0) > 0


# Devices, values and what is left alone


@pytest.mark.ours("needs a device to be named")
@orig_params
@on_ranks(1, 2)
def test_cpu_needs_no_device_id(api: Api, use_orig_params: bool) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params, device_id=None)
    assert model.compute_device == CPU
    run_step(model)


@on_default_comm
@pytest.mark.ours("knows no index without an accelerator")
@on_ranks(2)
def test_index_without_accelerator_is_refused(api: Api) -> None:
    with pytest.raises(ValueError, match="this process has no accelerator"):
        wrap(api, net(), device_id=0)


@on_default_comm
@orig_params
@on_ranks(2)
def test_ignored_module_is_not_sharded(api: Api, use_orig_params: bool) -> None:
    model = net()
    ignored = model.blocks[1]
    parameters = dict(ignored.named_parameters())
    model = wrap(api, model, ignored_modules=[ignored], use_orig_params=use_orig_params)
    assert model.blocks[1] is ignored
    assert all(p is parameters[name] for name, p in ignored.named_parameters())
    run_step(model)
    alone = net()
    run_step(alone)
    # Not reduced either: each rank has the gradients of its own samples.
    expected = {name: p.grad for name, p in alone.blocks[1].named_parameters()}
    assert_equal({n: p.grad for n, p in ignored.named_parameters()}, expected, rtol=1e-5, atol=1e-6)


@on_default_comm
@orig_params
@on_ranks(2)
def test_ignored_parameters_are_not_sharded(api: Api, use_orig_params: bool) -> None:
    model = net()
    ignored = [model.scale, model.blocks[0].wide.weight]
    model = wrap(api, model, ignored_states=ignored, use_orig_params=use_orig_params)
    run_step(model)
    assert parameters(model)["scale"] is ignored[0]
    assert parameters(model)["blocks.0.wide.weight"] is ignored[1]
    assert all(p.grad.shape == p.shape for p in ignored)
    expected = dict(net().named_parameters())
    assert_equal(whole(api, model), expected)


@on_default_comm
@orig_params
@on_ranks(2)
def test_modules_on_meta_are_reset(api: Api, use_orig_params: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    torch.manual_seed(3)
    model = wrap(
        api,
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    assert_equal(whole(api, model), dict(expected.named_parameters()))
    assert_equal(dict(model[1].named_buffers()), dict(expected[1].named_buffers()))


@on_default_comm
@orig_params
@on_ranks(2)
def test_param_init_fn_fills_modules_on_meta(api: Api, use_orig_params: bool) -> None:
    with torch.device("meta"):
        model = Net()
    seen: list[nn.Module] = []

    def fill(module: nn.Module) -> None:
        seen.append(module)
        module.to_empty(device="cpu", recurse=False)
        for number, tensor in enumerate([*module._parameters.values(), *module._buffers.values()]):
            if tensor is not None:
                nn.init.constant_(tensor.data, number)

    model = wrap(api, model, param_init_fn=fill, use_orig_params=use_orig_params)
    assert len(seen) == len(set(seen))
    values = whole(api, model)
    for name, value in values.items():
        assert torch.equal(value, torch.full_like(value, float(name.endswith("bias")))), name


@on_default_comm
@on_ranks(2)
def test_module_that_cannot_be_reset_is_refused(api: Api) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, device="meta"))

    with (
        pytest.warns(UserWarning, match="Unable to call `reset_parameters"),
        pytest.raises(AttributeError if api.is_torch else RuntimeError, match="reset_parameters"),
    ):
        api.FullyShardedDataParallel(Table(), device_id=CPU)


@on_default_comm
@pytest.mark.ours("broadcasts from accelerators alone")
@orig_params
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@on_ranks(4)
def test_first_rank_s_states_are_everyone_s(api: Api, strategy: str, use_orig_params: bool) -> None:
    model = net(seed=rank())
    with torch.no_grad():
        model.shift.add_(rank())
        model.batch_norm.running_mean.add_(rank())
    options = {"device_mesh": mesh_of(2, 2)} if strategy == "HYBRID_SHARD" else {}
    model = wrap(
        api,
        model,
        strategy,
        sync_module_states=True,
        use_orig_params=use_orig_params,
        **options,
    )
    expected = net(seed=0)
    assert_equal(whole(api, model), dict(expected.named_parameters()))
    assert_equal(buffers(model), dict(expected.named_buffers()))


@on_default_comm
@on_ranks(2)
def test_several_dtypes_in_one_instance_stay_what_they_are(api: Api) -> None:
    if api.is_torch:
        pytest.skip("PyTorch: flattens one dtype")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, 5)
            self.second = nn.Linear(5, 3, dtype=torch.float64)
            self.table = nn.Parameter(torch.arange(3), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).double()) * self.table

    torch.manual_seed(1)
    model = Two()
    alone = copy.deepcopy(model)
    model = wrap(api, model, use_orig_params=True)
    run_step(model)
    run_step(alone)
    assert_equal(whole(api, model), dict(alone.named_parameters()))
    assert_equal(whole_gradients(api, model), averaged_gradients(alone), rtol=1e-6, atol=1e-7)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.float64, torch.int64}


# Whole parameters


@strategies
@orig_params
@on_ranks(2)
def test_whole_parameters_are_those_of_the_module(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    expected = dict(net().named_parameters())
    for _ in range(2):
        with summon(api, model):
            assert_equal(parameters(model), expected)
            assert model.head.weight is model.tied.weight
        run_step(model)


@strategies
@orig_params
@pytest.mark.parametrize("writeback", [False, True])
@on_ranks(2)
def test_what_is_written_stays_if_asked_for(
    api: Api, strategy: str, use_orig_params: bool, writeback: bool
) -> None:
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    before = whole(api, model)
    with summon(api, model, writeback=writeback), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    factor = 2 if writeback or strategy == "NO_SHARD" else 1
    if strategy == "NO_SHARD" and not writeback:
        return  # PyTorch shows the parameters themselves, we a copy
    assert_equal(whole(api, model), {name: factor * p for name, p in before.items()})


@on_default_comm
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@orig_params
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_one_rank_may_have_whole_parameters(
    api: Api, strategy: str, use_orig_params: bool, offload: bool
) -> None:
    if api.is_torch and offload:
        pytest.skip("PyTorch: cannot offload on a CPU")
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    expected = dict(net().named_parameters())
    own = [p.shape for p in model.parameters()]
    with summon(api, model, writeback=False, rank0_only=True, offload_to_cpu=offload):
        if rank() == 0:
            assert_equal(parameters(model), expected)
        elif not (api.is_torch and use_orig_params):
            assert [p.shape for p in model.parameters()] == own
    assert [p.shape for p in model.parameters()] == own
    run_step(model)


@on_default_comm
@on_ranks(2)
def test_offloading_on_every_rank_is_warned_of(api: Api) -> None:
    if api.is_torch:
        pytest.skip("PyTorch: cannot offload on a CPU")
    model = wrap(api, net())
    with pytest.warns(UserWarning, match="offload_to_cpu=True"):
        _enter(summon(api, model, offload_to_cpu=True))


@strategies
@pytest.mark.parametrize("writeback", [False, True])
@on_ranks(2)
def test_whole_gradients_come_with_parameters(api: Api, strategy: str, writeback: bool) -> None:
    model, alone = wrap(api, net(), strategy, use_orig_params=True), net()
    run_step(model)
    run_step(alone)
    expected = averaged_gradients(alone)
    assert_equal(whole_gradients(api, model), expected, rtol=1e-6, atol=1e-7)
    before = whole_gradients(api, model)
    with summon(api, model, writeback=writeback, with_grads=True):
        for parameter in model.parameters():
            parameter.grad.mul_(3)
    if strategy == "NO_SHARD" and not writeback:
        return
    factor = 3 if writeback else 1
    assert_equal(whole_gradients(api, model), {n: factor * g for n, g in before.items()})


@on_default_comm
@on_ranks(2)
def test_whole_gradients_that_are_not_reduced_are_refused(api: Api) -> None:
    model, alone = wrap(api, net(), use_orig_params=True), net()
    with model.no_sync():
        run_step(model, seed=1)
    # Both refuse; PyTorch by an assertion about sizes.
    with pytest.raises(Exception, match=r"not reduced yet|tensor to be sharded"):
        whole_gradients(api, model)
    if api.is_torch:
        return
    assert model.stem.weight.shape != (6, 7)
    run_step(model, seed=2)
    for seed in (1, 2):
        run_step(alone, seed=seed)
    expected = averaged_gradients(alone)
    assert_equal(whole_gradients(api, model), expected, rtol=1e-6, atol=1e-7)


@on_default_comm
@orig_params
@on_ranks(2)
def test_summon_of_one_instance_leaves_the_others(api: Api, use_orig_params: bool) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    run_step(model)  # makes the model, not the block, the root
    inner = [p.shape for p in model.blocks[0].parameters()]
    with summon(api, model, recurse=False):
        assert model.stem.weight.shape == (6, 7)
        assert [p.shape for p in model.blocks[0].parameters()] == inner
    with summon(api, model.blocks[0], recurse=False):
        assert model.blocks[0].wide.weight.shape == (5, 6)


@on_default_comm
@orig_params
@on_ranks(2)
def test_summon_looks_below_a_module_that_is_not_wrapped(api: Api, use_orig_params: bool) -> None:
    model = nn.Sequential(
        wrap(api, net(), use_orig_params=use_orig_params),
        wrap(api, nn.Linear(6, 3), use_orig_params=use_orig_params),
    )
    with summon(api, model):
        assert model[0].stem.weight.shape == (6, 7)
        assert model[1].weight.shape == (3, 6)


@pytest.mark.ours("frees parameters after a forward inside")
@orig_params
@on_ranks(2)
def test_model_runs_inside_summon_but_not_backward(api: Api, use_orig_params: bool) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params).eval()
    alone = net().eval()
    with summon(api, model):
        with torch.no_grad():
            inside = model(batch())
        torch.testing.assert_close(inside, alone(batch()))
        with pytest.raises(RuntimeError, match="ran inside summon_full_params"):
            model(batch()).sum().backward()
    with torch.no_grad():
        assert torch.equal(model(batch()), inside)
    model.train()
    run_step(model)


@pytest.mark.ours("raises AssertionError, or computes with what it has freed")
@strategies
@orig_params
@on_ranks(2)
def test_no_backward_inside_summon_of_a_forward_before_it(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    """Its gradients would be those of copies."""
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    loss = model(batch()).sum()
    with pytest.raises(api.errors.StateError), summon(api, model, writeback=False):
        loss.backward()
    run_step(model)


@on_default_comm
@orig_params
@on_ranks(2)
def test_exception_inside_summon_ends_it(api: Api, use_orig_params: bool) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    with pytest.raises(KeyError), summon(api, model):
        raise KeyError
    assert_equal(whole(api, model), dict(net().named_parameters()))
    run_step(model)


@strategies
@orig_params
@on_ranks(2)
def test_apply_sees_whole_parameters(api: Api, strategy: str, use_orig_params: bool) -> None:
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    shapes: list[tuple[int, ...]] = []

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            shapes.append(tuple(module.weight.shape))
            module.weight.fill_(0.5)

    assert model.apply(fill) is model
    in_model, expected = shapes.copy(), net()
    shapes.clear()
    expected.apply(fill)
    assert in_model == shapes
    assert_equal(whole(api, model), dict(expected.named_parameters()))


# Names


@on_default_comm
@strategies
@orig_params
@on_ranks(2)
def test_names_are_those_before_wrapping_inside_summon(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    models = [
        wrap(each, net(), strategy, use_orig_params=use_orig_params) for each in (api, Api("torch"))
    ]
    expected = net()
    for _ in range(2):
        ours, theirs = (
            [[n for n, _ in m.named_parameters("x")], [n for n, _ in m.named_buffers()]]
            for m in models
        )
        assert ours == theirs
        with summon(api, models[0]):
            assert [n for n, _ in models[0].named_parameters()] == [
                n for n, _ in expected.named_parameters()
            ]
            assert [n for n, _ in models[0].named_buffers("x")] == [
                n for n, _ in expected.named_buffers("x")
            ]
        for model in models:
            run_step(model)


@on_default_comm
@strategies
@on_ranks(2, 4)
def test_flat_parameters_have_torch_s_names_and_sizes(api: Api, strategy: str) -> None:
    model, theirs = wrap(api, net(), strategy), wrap(Api("torch"), net(), strategy)
    assert list(parameters(model)) == [
        "_flat_param",
        "blocks.0._flat_param",
        "blocks.1._flat_param",
    ]
    assert [p.shape for p in model.parameters()] == [p.shape for p in theirs.parameters()]
    assert all(isinstance(p, api.FlatParameter) for p in model.parameters())
    # Prodigy adds up over ranks for parameters that have this.
    assert all(p._fsdp_flattened for p in model.parameters())


@on_default_comm
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_libraries_move_shards_and_free_parameters_through_handles(
    api: Api, use_orig_params: bool
) -> None:
    with installed(api):  # as verl does it
        model = wrap(api, net(), use_orig_params=use_orig_params)
        for _ in range(2):
            _runtime_utils._lazy_init(model, model)
            assert len(model._all_handles) == 3
            for handle in model._all_handles:
                assert not handle._offload_params
                flat, here = handle.flat_param, handle.flat_param.device
                assert flat.data.data_ptr() == flat._local_shard.data_ptr()
                assert id(flat.data) != id(flat._local_shard)
                assert flat.data.size() == flat._local_shard.size()
                handle.flat_param_to(here, non_blocking=True)
                flat._local_shard = flat.data
                assert id(flat.data) != id(flat._local_shard)
            with torch.no_grad():
                model(batch())
            model._handle.reshard(True)
            run_step(model)
        _runtime_utils._post_backward_final_callback(model, model)
        run_step(model)


@on_default_comm
@on_ranks(2, 4)
def test_every_element_is_on_one_rank(api: Api) -> None:
    model = wrap(api, net(), use_orig_params=True)
    total = torch.tensor(sum(p.numel() for p in model.parameters()))
    dist.all_reduce(total)
    assert total == sum(p.numel() for p in net().parameters())


@on_default_comm
@on_ranks(2)
def test_wrapped_module_s_attributes_and_items_are_reachable(api: Api) -> None:
    model = net()
    model.note = "kept"
    wrapped = wrap(api, model)
    assert wrapped.note == "kept"
    assert wrapped.module is model
    assert wrapped._fsdp_wrapped_module is model
    assert wrapped.stem is model.stem
    with pytest.raises(AttributeError, match="nothing"):
        wrapped.nothing  # noqa: B018
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert wrap(api, layers)[1] is layers[1]


@on_default_comm
@on_ranks(2)
def test_outermost_instance_is_the_root(api: Api) -> None:
    model = wrap(api, net())
    FSDP = api.FullyShardedDataParallel
    assert FSDP.fsdp_modules(model) == [model, *model.blocks]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert model.check_is_root()
    assert not model.blocks[0].check_is_root()
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []


@pytest.mark.ours("the first one that is asked becomes the root")
@on_default_comm
@on_ranks(2)
def test_asking_who_is_the_root_makes_nobody_the_root(api: Api) -> None:
    model = wrap(api, net())
    FSDP = api.FullyShardedDataParallel
    inner = model.blocks[0]
    assert not inner.check_is_root()
    assert FSDP.fsdp_modules(inner, root_only=True) == []
    assert FSDP.fsdp_modules(model.module, root_only=True) == []
    with pytest.raises(RuntimeError, match="inner FSDP instances"), inner.no_sync():
        pass
    other = wrap(api, Block())
    assert other.check_is_root()
    outer = wrap(api, nn.Sequential(other), nested=False)
    assert not other.check_is_root()
    assert FSDP.fsdp_modules(nn.ModuleList([model, outer]), root_only=True) == [model, outer]
    for each in (model, outer, inner, other):
        assert each._is_root is None
    run_step(model)
    assert model.check_is_root()
    assert not inner.check_is_root()


@on_default_comm
@on_ranks(2)
def test_inner_instance_that_ran_first_is_refused(api: Api) -> None:
    inner = wrap(api, Block())
    inner(make_batch(6))
    model = wrap(api, nn.Sequential(inner, nn.Linear(6, 6)), nested=False)
    with pytest.raises(
        AssertionError if api.is_torch else RuntimeError,
        match=r"Non-root FSDP|lazily initialized",
    ):
        model(make_batch(6))


# Hooks in place of the reduction


@strategies
@orig_params
@pytest.mark.parametrize("hook", ["plain", "fp16", "bf16"])
@on_ranks(2)
def test_default_hooks_reduce_as_the_engine_does(
    api: Api, strategy: str, use_orig_params: bool, hook: str
) -> None:
    is_sharded = strategy != "NO_SHARD"
    low = {"plain": None, "fp16": torch.float16, "bf16": torch.bfloat16}[hook]
    stem = "reduce_scatter" if is_sharded else "allreduce"
    name = f"{stem}_hook" if low is None else f"{hook}_compress_hook"
    options = {} if low is None else {"parameter_type": torch.float32}
    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    model.register_comm_hook(_hook_state(**options), getattr(default_hooks, name))
    theirs = wrap(Api("torch"), net(), strategy, use_orig_params=use_orig_params)
    theirs.register_comm_hook(_hook_state(**options), getattr(default_hooks, name))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs)]
    # The hooks tell the allocator of a stream, which tensors on CPUs have not.
    with mock.patch.object(Tensor, "record_stream"):
        for each, optimizer in zip((model, theirs), optimizers, strict=True):
            train(each, optimizer, steps=3)
    # Two terms have one sum, whatever the order.
    assert_equal(whole(api, model), whole(Api("torch"), theirs))


@strategies
@orig_params
@on_ranks(2)
def test_own_hook_takes_the_place_of_the_reduction(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    calls: list[int] = []

    def ones(state: list[int], grad: Tensor, shard: Tensor | None = None) -> None:
        state.append(grad.numel())
        (grad if shard is None else shard).fill_(1.0)

    model = wrap(api, net(), strategy, use_orig_params=use_orig_params)
    model.register_comm_hook(calls, ones)
    run_step(model)
    assert len(calls) == 3
    sizes = [sum(p.numel() for p in m.parameters()) for m in (net().blocks[0], net())]
    assert min(calls) >= sizes[0]
    for parameter in model.parameters():
        if parameter.numel():
            assert torch.equal(parameter.grad, torch.ones_like(parameter))
    run_step(model)
    assert len(calls) == 6


@on_default_comm
@on_ranks(2)
def test_hook_is_not_called_in_no_sync(api: Api) -> None:
    calls: list[int] = []

    def count(state: Any, grad: Tensor, shard: Tensor) -> None:
        calls.append(1)
        default_hooks.reduce_scatter_hook(state, grad, shard)

    model, plain = (wrap(api, net(), use_orig_params=True) for _ in range(2))
    model.register_comm_hook(_hook_state(), count)
    for each in (model, plain):
        with each.no_sync():
            run_step(each, seed=1)
        assert not calls
        run_step(each, seed=2)
        if each is model:
            assert len(calls) == 3
            calls.clear()
    assert_equal(whole_gradients(api, model), whole_gradients(api, plain), rtol=1e-6, atol=1e-7)


# Precision


@strategies
@orig_params
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_gradients_may_stay_low(
    api: Api, strategy: str, use_orig_params: bool, param_dtype: torch.dtype | None
) -> None:
    if api.is_torch and (use_orig_params or param_dtype is None):
        pytest.skip("PyTorch: leaves them in the dtype of parameters in forward, but in pieces")
    precision = api.MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=torch.bfloat16,
        buffer_dtype=param_dtype,
        keep_low_precision_grads=True,
        _module_classes_to_ignore=(),
    )
    model = wrap(api, net(), strategy, mixed_precision=precision, use_orig_params=use_orig_params)
    run_step(model)
    grads = [p.grad for p in model.parameters() if p.numel()]
    assert {g.dtype for g in grads} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    run_step(model)
    assert {p.grad.dtype for p in model.parameters() if p.numel()} == {torch.bfloat16}


class Spy(Block):
    """Notes the dtypes that its forward sees."""

    def forward(self, x: Tensor) -> Tensor:
        """Note, and run."""
        self.seen = (x.dtype, self.wide.weight.dtype)
        return super().forward(x.to(self.wide.weight.dtype))


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("root", [False, True])
@on_ranks(2)
def test_inputs_are_cast_where_asked_for(api: Api, inner: bool, root: bool) -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Spy()
            self.second = Spy()

        def forward(self, x: Tensor) -> Tensor:
            self.saw = x.dtype
            return self.second(self.first(x).float())

    precision = api.MixedPrecision(
        param_dtype=torch.bfloat16, cast_forward_inputs=inner, cast_root_forward_inputs=root
    )
    model = wrap(
        api,
        Root(),
        mixed_precision=precision,
        auto_wrap_policy=ModuleWrapPolicy({Spy}),
        use_orig_params=True,
    )
    model(make_batch(6)).sum().backward()
    low = {False: torch.float32, True: torch.bfloat16}
    assert model.saw == low[root]
    assert model.first.seen == (low[root or inner], torch.bfloat16)
    assert model.second.seen == (low[inner], torch.bfloat16)


@strategies
@on_ranks(2)
def test_buffers_are_cast_but_saved_as_they_were(api: Api, strategy: str) -> None:
    precision = api.MixedPrecision(
        param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16, _module_classes_to_ignore=[]
    )
    model = wrap(api, net(), strategy, mixed_precision=precision)
    run_step(model)
    kinds = {b.dtype for b in model.buffers() if b.is_floating_point()}
    assert kinds == {torch.bfloat16}
    with quiet():
        state = model.state_dict()
    assert state["shift"].dtype == torch.float32
    assert state["batch_norm.num_batches_tracked"].dtype == torch.int64


@on_default_comm
@on_ranks(2)
def test_batch_norm_computes_in_float32_of_its_own(api: Api) -> None:
    precision = api.MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = api.FullyShardedDataParallel(
            net(),
            device_id=CPU,
            mixed_precision=precision,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
        )
    assert isinstance(model.batch_norm, api.FullyShardedDataParallel)
    seen: list[torch.dtype] = []
    model.batch_norm.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    run_step(model)
    assert seen == [torch.float32]


@orig_params
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.float16])
@on_ranks(2)
def test_evaluation_in_full_precision_computes_and_reduces_in_it(
    api: Api, param_dtype: torch.dtype, use_orig_params: bool
) -> None:
    precision = api.MixedPrecision(param_dtype=param_dtype, reduce_dtype=torch.float16)
    with mock.patch.dict("os.environ", FSDP_USE_FULL_PREC_IN_EVAL="1"):
        model = wrap(api, Scale(), mixed_precision=precision, use_orig_params=use_orig_params)
        for is_training in (True, False, True):
            model.train(is_training)
            model.zero_grad()
            model(torch.full((1, 8), 2049.0)).float().sum().backward()
            for grad in (p.grad for p in model.parameters() if p.numel()):
                # float16 has eleven bits.
                assert set(grad.flatten().tolist()) == {2048.0 if is_training else 2049.0}


# Order of construction


@on_default_comm
@strategies
@on_ranks(2)
def test_optimizer_may_be_built_before_wrapping(api: Api, strategy: str) -> None:
    model, alone = net(), net()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-4) for m in (model, alone)]
    wrapped = wrap(api, model, strategy, use_orig_params=True)
    assert {id(p) for p in wrapped.parameters()} == {
        id(p) for p in optimizers[0].param_groups[0]["params"]
    }
    train(wrapped, optimizers[0], steps=3)
    for step in range(3):
        run_step(alone, seed=step)
        for name, gradient in averaged_gradients(alone).items():
            alone.get_parameter(name).grad = gradient
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert_equal(whole(api, wrapped), dict(alone.named_parameters()), rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def _fails(layer: nn.Module, when: str) -> Iterator[None]:
    """Let a layer's next forward or backward raise."""

    def fail(*_: Any) -> None:
        raise KeyError(when)

    register = {
        "forward": lambda: layer.register_forward_pre_hook(fail),
        "backward": lambda: layer.register_full_backward_hook(fail),
    }[when]
    handle = register()
    yield
    handle.remove()


@strategies
@orig_params
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("where", ["root", "block"])
@pytest.mark.ours("is left in the middle of the iteration")
@on_ranks(2)
def test_training_goes_on_after_an_exception(
    api: Api, strategy: str, use_orig_params: bool, when: str, where: str
) -> None:
    models = [wrap(api, net(), strategy, use_orig_params=use_orig_params) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model.batch_norm.momentum = 0.0  # so that a forward too many leaves no trace
        train(model, optimizer, steps=1)
    broken = models[0].head if where == "root" else models[0].blocks[0].wide
    with _fails(broken, when), pytest.raises(KeyError):
        run_step(models[0], seed=5)
    models[0].zero_grad()
    if when == "forward":  # what is trained is in sight again
        optimizers[0] = torch.optim.SGD(models[0].parameters(), lr=0.1)
    losses = [
        train(model, optimizer, steps=2)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    assert losses[0] == losses[1]
    assert_equal(whole(api, models[0]), whole(api, models[1]))


@pytest.mark.ours("has no such check")
@on_ranks(2)
def test_ranks_may_ignore_different_numbers_of_modules(api: Api) -> None:
    class Ignored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    ignored = [Ignored() for _ in range(1 + rank())]
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.Linear(16, 16), *ignored, nn.Linear(16, 16)])}
    )
    layers = [model["layers"][0], model["layers"][-1]]

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model["layers"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layers[1](layers[0](x))

    wrapped = api.FullyShardedDataParallel(Runs(), ignored_modules=ignored, use_orig_params=True)
    wrapped(make_batch(16)).sum().backward()  # the second layer has another number on each rank


@strategies
@pytest.mark.parametrize("is_low", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
@on_ranks(2)
def test_optimizers_of_parameters_step_in_backward(
    api: Api, strategy: str, is_first: bool, is_low: bool
) -> None:
    if api.is_torch and is_low and strategy == "NO_SHARD":
        pytest.skip("PyTorch: sets low gradients on parameters that take none")
    low = api.MixedPrecision(reduce_dtype=torch.bfloat16, keep_low_precision_grads=True)
    module = net()
    if is_first:
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = wrap(
        api, module, strategy, use_orig_params=True, mixed_precision=low if is_low else None
    )
    if not is_first:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    plain = wrap(
        api, net(), strategy, use_orig_params=True, mixed_precision=low if is_low else None
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        run_step(model)
        run_step(plain)
        for parameter in plain.parameters():  # as the other does, in the dtype that it has
            if parameter.grad is not None and parameter.numel():
                parameter.data.add_(parameter.grad, alpha=-0.1)
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach())
