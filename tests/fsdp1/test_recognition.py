"""Torch's distributed state dicts and models of both wrapper classes in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import fullshard
from tests.api import Api
from tests.fresh import in_fresh_ranks
from tests.fsdp1.models import full_value, net, orig_params, quiet, train, wrap
from tests.harness import on_ranks, rank
from tests.training import assert_equal

kinds = pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])


def _trained(api: Api, seed: int, *, use_orig_params: bool, steps: int = 2) -> Any:
    model = wrap(api, net(seed), use_orig_params=use_orig_params)
    model.batch_norm.momentum = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, steps)
    return model, optimizer


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    with quiet():
        state, own = get_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
    named = {**state, **{f"{n}/{k}": v for n, e in own["state"].items() for k, v in e.items()}}
    return {name: full_value(named[name]).clone() for name in sorted(named)}


@kinds
@orig_params
@on_ranks(2)
def test_state_dicts_of_torch_need_no_install(api: Api, full: bool, use_orig_params: bool) -> None:
    model = _trained(api, 1, use_orig_params=use_orig_params)
    other = _trained(api, 5, use_orig_params=use_orig_params, steps=0)
    options = StateDictOptions(full_state_dict=full)
    with quiet():
        state, own = get_state_dict(*model, options=options)
        assert list(state) == list(net().state_dict())
        assert set(own["state"]) == {name for name, _ in net().named_parameters()}
        set_state_dict(*other, model_state_dict=state, optim_state_dict=own, options=options)
    assert_equal(_whole(*other), _whole(*model))


@orig_params
@on_ranks(2)
def test_part_of_a_state_dict_that_the_first_rank_has_is_loaded(
    api: Api, use_orig_params: bool
) -> None:
    other, _ = _trained(api, 1, use_orig_params=use_orig_params, steps=1)
    model, _ = _trained(api, 5, use_orig_params=use_orig_params, steps=1)
    whole = StateDictOptions(full_state_dict=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    with quiet():
        expected, given = (get_model_state_dict(each, options=whole) for each in (model, other))
        part = {name: value for name, value in given.items() if name.startswith("blocks.0")}
        set_model_state_dict(model, dict(part) if rank() == 0 else {}, options=options)
        assert_equal(get_model_state_dict(model, options=whole), expected | part)


@pytest.mark.ours("aborts")
@pytest.mark.parametrize("installs", [False, True])
@in_fresh_ranks(2)
def test_flattened_state_goes_back_to_an_optimizer_that_has_stepped(installs: bool) -> None:
    """Of some parameters a rank has nothing, so that its optimizer does not know the names of their state."""
    if installs:
        fullshard.install()
    model, optimizer = _trained(Api("process_group"), 1, use_orig_params=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    expected = _whole(model, optimizer)
    with quiet():
        state = get_optimizer_state_dict(model, optimizer, options=options)
    train(model, optimizer, 1)
    with quiet():
        set_optimizer_state_dict(model, optimizer, state, options=options)
    own = {name: value for name, value in _whole(model, optimizer).items() if "/" in name}
    assert_equal(own, {name: expected[name] for name in own})


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_wrapper_of_torch_stays_its_own_beside_ours(api: Api) -> None:
    ours = _trained(api, 1, use_orig_params=True)
    theirs = _trained(Api("torch"), 1, use_orig_params=True)
    assert_equal(_whole(*theirs), _whole(*ours), rtol=1e-5, atol=1e-6)
    both = nn.Sequential(ours[0], theirs[0])
    with quiet(), pytest.raises(RuntimeError, match=r"fullshard and of torch\.distributed\.fsdp"):
        get_state_dict(both, [])


@in_fresh_ranks(1)
def test_wrapper_is_recognised_after_uninstall() -> None:
    api = Api("peer_memory")
    fullshard.install()
    model = _trained(api, 1, use_orig_params=True, steps=1)
    expected = _whole(*model)
    fullshard.uninstall()
    assert_equal(_whole(*model), expected)
