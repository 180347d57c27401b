"""What other code reads from a sharded module under PyTorch's private names."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info
from torch.distributed.tensor import DTensor

import fullshard
from tests.api import Api
from tests.harness import on_ranks, world_size
from tests.installing import installed
from tests.models import mlp
from tests.training import make_batch, mean_square


def _sharded(api: Api, **options: Any) -> nn.Sequential:
    model = mlp()
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


@on_ranks(2)
def test_state_is_none_for_a_module_that_is_not_sharded(api: Api) -> None:
    model = _sharded(api)
    assert api.fully_shard.state(model) is not None
    assert api.fully_shard.state(model[0][0]) is None
    assert api.fully_shard.state(nn.Linear(2, 2)) is None


@on_ranks(2)
def test_states_of_one_module_are_equal_and_of_two_are_not(api: Api) -> None:
    model = _sharded(api)
    state = api.fully_shard.state
    assert state(model[0]) == state(model[0])
    assert state(model[0]) != state(model[1])
    assert len({state(layer) for layer in (*model, *model)}) == 3
    assert state(model[0]) != "state"
    assert state(model[0])._fsdp_param_group == state(model[0])._fsdp_param_group
    assert state(model[0])._fsdp_param_group != state(model[1])._fsdp_param_group


@on_ranks(2)
def test_modules_sharded_together_have_one_state(api: Api) -> None:
    model = mlp()
    api.fully_shard([model[0], model[1]])
    api.fully_shard(model)
    state = api.fully_shard.state
    assert state(model[0]) == state(model[1])
    assert state(model[0])._fsdp_param_group.modules == (model[0], model[1])


@on_ranks(2)
def test_root_is_known_from_the_first_forward_on(api: Api) -> None:
    model = _sharded(api)
    states = [api.fully_shard.state(module) for module in (model, *model)]
    assert [state._is_root for state in states] == [None] * 4
    model(make_batch(16))
    assert [state._is_root for state in states] == [True, False, False, False]
    for state in states:
        assert state._state_ctx.all_states == states


def _ask_everything(module: Any) -> None:
    """Ask a module whatever can be asked, and set what can be set, before its model runs."""
    context = fullshard.fully_shard.state(module)._state_ctx
    assert context.is_last_backward
    assert context.post_optim_event is None
    assert len(context.all_states) == 1
    context.is_last_backward = True
    module.set_is_last_backward(True)
    module.set_post_optim_event(torch.Event("cpu"))
    fullshard.describe(module)
    fullshard.memory_report(module)


@pytest.mark.ours("asks what is not part of the API")
@on_ranks(2)
def test_questions_and_settings_make_nothing_the_root(api: Api) -> None:
    model = _sharded(api)
    for module in (*model, model):
        _ask_everything(module)
    states = [api.fully_shard.state(module) for module in (model, *model)]
    assert [state._is_root for state in states] == [None] * 4
    mean_square(model(make_batch(16))).backward()
    assert [state._is_root for state in states] == [True, False, False, False]


@pytest.mark.parametrize("who", ["root", "first unit"])
@on_ranks(2)
def test_what_is_said_before_the_first_forward_holds_from_then_on(api: Api, who: str) -> None:
    model = _sharded(api)
    (model if who == "root" else model[0]).set_is_last_backward(False)
    model(make_batch(16))
    state = api.fully_shard.state(model)
    forgets = api.is_torch and who != "root"  # PyTorch heeds the root alone
    assert state._state_ctx.is_last_backward is forgets
    assert api.fully_shard.state(model[1])._state_ctx.is_last_backward is forgets
    model[1].set_is_last_backward(False)
    assert state._state_ctx.is_last_backward is False
    model[1].set_is_last_backward(True)
    assert state._state_ctx.is_last_backward is True


@on_ranks(2)
def test_what_the_root_is_told_before_the_first_forward_counts(api: Api) -> None:
    model = _sharded(api)
    model.set_is_last_backward(False)
    model[0].set_is_last_backward(True)
    model(make_batch(16))
    assert api.fully_shard.state(model)._state_ctx.is_last_backward is False


@on_ranks(2)
def test_lazy_init_makes_a_module_the_root(api: Api) -> None:
    model = _sharded(api)
    api.fully_shard.state(model)._lazy_init()
    assert api.fully_shard.state(model)._is_root
    assert api.fully_shard.state(model[0])._is_root is False


class Watch(nn.Linear):
    """Notes a state's phase when its forward runs and when its gradient comes."""

    seen: list[str]
    state: Any

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.state._training_state.name)
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.seen.append(self.state._training_state.name))
        return out


@on_ranks(2)
def test_training_state_follows_the_step(api: Api) -> None:
    model = nn.Sequential(Watch(16, 16), nn.Tanh())
    watch = model[0]
    api.fully_shard(model)
    watch.seen, watch.state = [], api.fully_shard.state(model)
    assert watch.state._training_state.name == "IDLE"
    out = model(make_batch(16))
    assert watch.state._training_state.name == "IDLE"
    mean_square(out).backward()
    assert watch.seen == ["FORWARD", "PRE_BACKWARD"]
    assert watch.state._training_state.name == "IDLE"


@on_ranks(2)
def test_group_shows_its_parameters_and_whether_they_are_whole(api: Api) -> None:
    model = _sharded(api)
    model(make_batch(16)).sum().backward()
    group = api.fully_shard.state(model[1])._fsdp_param_group
    assert [param._param_fqn for param in group.fsdp_params] == ["1.0.weight", "1.0.bias"]
    for param, parameter in zip(group.fsdp_params, model[1].parameters(), strict=True):
        assert isinstance(parameter, DTensor)
        assert param.sharded_param is parameter
    assert not group.is_unsharded
    model[1].unshard()
    assert group.is_unsharded
    for param, parameter in zip(group.fsdp_params, model[1].parameters(), strict=True):
        assert param._unsharded_param is parameter
    model[1].reshard()
    assert group.is_sharded


@on_ranks(2)
def test_module_without_parameters_of_its_own_has_no_group(api: Api) -> None:
    model = _sharded(api)
    state = api.fully_shard.state(model)
    assert state._fsdp_param_group is None
    assert state._fsdp_param_groups == []
    assert len(api.fully_shard.state(model[0])._fsdp_param_groups) == 1


@on_ranks(2)
def test_gradients_kept_back_are_reduced_through_the_state(api: Api) -> None:
    """As a pipeline schedule does it after the last backward of a step."""
    model = mlp()
    batch = make_batch(16)
    mean_square(model(batch)).backward()
    expected = {name: 2 * parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=False)
    api.fully_shard(model, reshard_after_forward=False)
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        mean_square(model(batch)).backward()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = api.fully_shard.state(model)
    for each in state._state_ctx.all_states:
        for group in each._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


def _set_reshard_after_forward(module: Any, option: bool | int) -> Any:
    """As verl does it on any torch; return the group."""
    state = module._get_fsdp_state()
    state._auto_reshard_after_forward = False
    group = state._fsdp_param_group
    group.post_forward_mesh_info = _get_post_forward_mesh_info(option, group.mesh_info)
    return group


@on_ranks(2)
def test_libraries_set_through_meshes_whether_parameters_are_freed_after_forward(api: Api) -> None:
    with installed(api):
        model = mlp()
        api.fully_shard(model[0])
        api.fully_shard(model)
        for module in (model, model[0]):
            group = module._get_fsdp_state()._fsdp_param_group
            assert module._get_fsdp_state()._auto_reshard_after_forward
            assert group.mesh_info.shard_mesh_size == world_size()
            assert group.reshard_after_backward
        for option in (True, False, True):
            groups = [_set_reshard_after_forward(module, option) for module in (model, model[0])]
            assert not model._get_fsdp_state()._auto_reshard_after_forward
            out = model(make_batch(16))
            for group in groups:
                assert group._reshard_after_forward is option
                assert group.is_sharded is option
            mean_square(out).backward()


@on_ranks(4)
def test_libraries_restore_the_smaller_mesh_of_reshard_after_forward(api: Api) -> None:
    model = api.fully_shard(mlp(), reshard_after_forward=2)
    group = model._get_fsdp_state()._fsdp_param_group
    info = group.post_forward_mesh_info
    assert info.shard_mesh_size == 2
    _set_reshard_after_forward(model, option=True)
    out = model(make_batch(16))
    assert all(parameter.device_mesh.shape == (4,) for parameter in model.parameters())
    mean_square(out).backward()
    assert group.post_forward_mesh_info == group.mesh_info
    group.post_forward_mesh_info = info
    mean_square(model(make_batch(16))).backward()
    assert group.post_forward_mesh_info.mesh == info.mesh


@pytest.mark.ours("uses a mesh that its parameters were not prepared for")
@on_ranks(4)
def test_another_smaller_mesh_than_fully_shard_got_is_refused(api: Api) -> None:
    model = api.fully_shard(mlp())
    with pytest.raises(AssertionError, match="Pass reshard_after_forward=2 to fully_shard"):
        _set_reshard_after_forward(model, 2)


# Composable APIs


@on_ranks(2)
def test_libraries_find_the_sharded_module_around_a_module(api: Api) -> None:
    model = _sharded(api)
    around = [each for each in _module_state_mapping if model[1][0] in each.modules()]
    assert set(around) == {model, model[1]}
    for module in (model, *model):
        assert _get_module_state(module) == api.fully_shard.state(module)
    assert _get_module_state(model[0][0]) is None
    alone = api.fully_shard(nn.Linear(2, 2))
    num_sharded = len(_module_state_mapping)
    del alone
    gc.collect()
    assert len(_module_state_mapping) == num_sharded - 1


@pytest.mark.ours("no deepcopy")
@on_ranks(2)
def test_libraries_find_copies_of_sharded_modules(api: Api) -> None:
    model = mlp()
    api.fully_shard([model[0], model[1]])
    both = copy.deepcopy(nn.ModuleList([model[0], model[1]]))
    for module in both:
        assert _get_module_state(module) == api.fully_shard.state(module)


@on_ranks(2)
def test_registry_names_what_was_applied(api: Api) -> None:
    model = _sharded(api)
    for module in (model, *model):
        assert list(_get_registry(module)) == ["fully_shard"]
    assert not _get_registry(model[0][0])


@on_ranks(2)
def test_replicate_refuses_a_sharded_module(api: Api) -> None:
    model = _sharded(api)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(model)


@on_ranks(2)
def test_replicated_module_keeps_its_parameters(api: Api) -> None:
    model = mlp()
    replicate(model[1])
    kept = list(model[1].parameters())
    api.fully_shard(model)
    assert all(p is own for p, own in zip(model[1].parameters(), kept, strict=True))
    sharded = {n for n, p in model.named_parameters() if isinstance(p, DTensor)}
    assert sharded == {"0.0.weight", "0.0.bias", "2.0.weight", "2.0.bias"}


@on_ranks(2)
def test_covered_modules_are_marked_for_compile(api: Api) -> None:
    model = _sharded(api)
    for module in model.modules():
        assert module._is_fsdp_managed_module is True
        assert module._fsdp_use_orig_params is True
    assert not hasattr(nn.Linear(2, 2), "_is_fsdp_managed_module")
