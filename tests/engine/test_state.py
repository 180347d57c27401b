"""What reads and writes sharded parameters: users, optimizers, state dicts, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import mmap
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.api import Api
from tests.harness import on_ranks, rank
from tests.models import UnevenMLP, mlp
from tests.selection import one_way
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    assert_parameters_are_parts_of,
    full,
    full_parameters,
    gradients_alone,
    local,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("tests/engine/test_passes.py: what is saved comes from the same tensors")


def _shard(api: Api, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if next(layer.parameters(), None) is not None:
            api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def _step(model: nn.Module, batch: Tensor) -> None:
    mean_square(model(my_part(batch))).backward()


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """Yield one temporary folder to all ranks."""
    name = [tempfile.mkdtemp(prefix="fullshard-tests-") if rank() == 0 else None]
    dist.broadcast_object_list(name)
    yield Path(str(name[0]))
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(str(name[0]))


# Writes by the user


def _fill(parameter: nn.Parameter, value: float) -> None:
    parameter.fill_(value)


def _copy(parameter: nn.Parameter, value: float) -> None:
    parameter.copy_(torch.full_like(parameter, value))


def _write_local(parameter: nn.Parameter, value: float) -> None:
    parameter.to_local().fill_(value)


def _write_data(parameter: nn.Parameter, value: float) -> None:
    parameter.data.fill_(value)


WRITES = {"fill_": _fill, "copy_": _copy, "to_local": _write_local, "data": _write_data}


@pytest.mark.parametrize("write", WRITES)
@on_ranks(2, 3)
def test_write_to_a_sharded_parameter_is_seen_by_all_ranks(api: Api, write: str) -> None:
    model, batch = UnevenMLP(), make_batch(7)
    alone = copy.deepcopy(model)
    _shard(api, model)
    for value in (0.1, 0.2, 0.3):
        with torch.no_grad():
            for parameter in model.parameters():
                WRITES[write](parameter, value)
            for parameter in alone.parameters():
                parameter.fill_(value)
        torch.testing.assert_close(model(batch), alone(batch))
        _step(model, batch)
        assert_gradients_are_parts_of(model, gradients_alone(alone, batch))
        model.zero_grad()


@on_ranks(2)
def test_write_by_one_rank_changes_that_rank_s_rows_everywhere(api: Api) -> None:
    model = nn.Linear(4, 4, bias=False)
    api.fully_shard(model)
    with torch.no_grad():
        model.weight.to_local().fill_(float(rank() + 1))
        if rank() == 1:
            model.weight.to_local().add_(10)
    out = model(torch.ones(1, 4))
    torch.testing.assert_close(out.detach(), torch.tensor([[4.0, 4.0, 48.0, 48.0]]))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [True, False])
@on_ranks(2)
def test_optimizer_step_is_seen_by_all_ranks(
    api: Api, make: Callable[..., Any], foreach: bool
) -> None:
    model, batch = UnevenMLP(), make_batch(7)
    alone = copy.deepcopy(model)
    _shard(api, model)
    optimizers = [make(m.parameters(), lr=0.1, foreach=foreach) for m in (model, alone)]
    for _ in range(3):
        _step(model, batch)
        mean_square(alone(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Adaptive steps magnify the rounding of small gradients.
    assert_equal(full_parameters(model), full_parameters(alone), rtol=1e-3, atol=1e-4)


@on_ranks(2)
def test_change_of_a_whole_parameter_is_dropped_by_reshard(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    whole, expected = full_parameters(model), gradients_alone(model, batch)
    _shard(api, model)
    _step(model, batch)
    model.zero_grad()
    for _ in range(2):
        for layer in model:
            layer.unshard()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.add_(rank() + 1)
            layer.reshard()
        assert_parameters_are_parts_of(model, whole)
        _step(model, batch)
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_change_of_a_whole_large_parameter_is_dropped_by_reshard(api: Api) -> None:
    model, batch = nn.Linear(512, 512), make_batch(512, size=2)
    whole, answers = full_parameters(model), model(batch).detach()
    api.fully_shard(model)
    model.unshard()
    with torch.no_grad():
        model.weight.add_(rank() + 1)
    dist.barrier()
    model.reshard()
    assert_parameters_are_parts_of(model, whole)
    torch.testing.assert_close(model(batch).detach(), answers)


@on_ranks(2)
def test_change_of_a_whole_parameter_is_seen_by_no_other_rank(api: Api) -> None:
    model, batch = nn.Linear(512, 512, bias=False), make_batch(512, size=2)
    answers = model(batch).detach()
    api.fully_shard(model)
    model.unshard()
    if rank() == 0:
        with torch.no_grad():
            model.weight.zero_()
    dist.barrier()
    out = model(batch).detach()
    if rank() == 1:
        torch.testing.assert_close(out, answers)


# State dicts


@on_ranks(2)
def test_state_dict_has_the_unwrapped_names_and_sharded_values(api: Api) -> None:
    model = UnevenMLP()
    names, whole = list(model.state_dict()), full_parameters(model)
    _shard(api, model)
    state = model.state_dict()
    assert list(state) == names
    assert all(type(value) is DTensor for value in state.values())
    assert not any(value.requires_grad for value in state.values())
    assert_equal({name: full(value) for name, value in state.items()}, whole)


@on_ranks(2)
def test_state_dict_between_forward_and_backward_is_sharded(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model, reshard_after_forward=False)
    model(my_part(batch))
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


@on_ranks(2)
def test_state_dict_shows_later_steps(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model)
    state = model.state_dict()
    _step(model, batch)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_equal({n: full(v) for n, v in state.items()}, full_parameters(model))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["fresh", "after a step", "after a forward"])
@on_ranks(2, 3)
def test_loaded_state_dict_is_used_by_all_ranks(api: Api, when: str, assign: bool) -> None:
    batch = make_batch(7)
    torch.manual_seed(1)
    source, model, alone = UnevenMLP(), UnevenMLP(), UnevenMLP()
    alone.load_state_dict(source.state_dict())
    _shard(api, source)
    _shard(api, model, reshard_after_forward=False if when == "after a forward" else None)
    if when == "after a step":
        _step(model, batch)
        model.zero_grad()
    if when == "after a forward":
        model(batch)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    result = model.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_equal(full_parameters(model), full_parameters(alone))
    for _ in range(2):
        torch.testing.assert_close(model(batch), alone(batch))
        _step(model, batch)
        assert_gradients_are_parts_of(model, gradients_alone(alone, batch))
        with torch.no_grad():
            for parameter in [*model.parameters(), *alone.parameters()]:
                parameter.mul_(0.5)
        model.zero_grad()


@on_ranks(2)
def test_meta_model_loads_a_state_dict_by_assignment(api: Api) -> None:
    batch, alone = make_batch(7), UnevenMLP()
    with torch.device("meta"):
        model = UnevenMLP()
    _shard(api, model)
    state = {
        name: distribute_tensor(alone.state_dict()[name], p.device_mesh, p.placements)
        for name, p in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    assert_equal(full_parameters(model), full_parameters(alone))
    _step(model, batch)
    assert_gradients_are_parts_of(model, gradients_alone(alone, batch))


@on_ranks(2)
def test_copied_state_dict_is_independent(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model)
    before = full_parameters(model)
    kept = copy.deepcopy(model.state_dict())
    _step(model, batch)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_equal({n: full(v) for n, v in kept.items()}, before)
    model.load_state_dict(kept)
    assert_equal(full_parameters(model), before)


@on_ranks(2, 4)
def test_saved_state_dict_holds_the_local_bytes_only(api: Api) -> None:
    model = mlp(4, 128)
    nbytes = sum(p.numel() for p in model.parameters()) * 4
    _shard(api, model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < nbytes / dist.get_world_size() + 20_000


@on_ranks(2)
def test_saved_parameter_holds_its_own_bytes_only(api: Api) -> None:
    model = mlp(4, 128)
    api.fully_shard(model)
    file = io.BytesIO()
    torch.save(model.state_dict()["0.0.weight"], file)
    assert file.tell() < 128 * 128 * 4 / 2 + 20_000


@on_ranks(2, 3)
def test_distributed_checkpoint_restores_model_and_optimizer(api: Api) -> None:
    batch = make_batch(7)

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = _shard(api, UnevenMLP())
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            _step(model, batch)
            optimizer.step()
            optimizer.zero_grad()

    first, first_optimizer = make(1)
    train(first, first_optimizer)
    with _shared_folder() as folder:
        state, optim_state = get_state_dict(first, first_optimizer)
        dcp.save({"model": state, "optimizer": optim_state}, checkpoint_id=folder)
        train(first, first_optimizer)
        second, second_optimizer = make(2)
        state, optim_state = get_state_dict(second, second_optimizer)
        dcp.load({"model": state, "optimizer": optim_state}, checkpoint_id=folder)
        set_state_dict(
            second, second_optimizer, model_state_dict=state, optim_state_dict=optim_state
        )
    train(second, second_optimizer)
    assert_equal(full_parameters(second), full_parameters(first))


@on_ranks(2)
def test_full_state_dict_goes_out_and_comes_in(api: Api) -> None:
    options = StateDictOptions(full_state_dict=True)
    model = UnevenMLP()
    whole = full_parameters(model)
    _shard(api, model)
    state = get_model_state_dict(model, options=options)
    assert_equal(state, whole)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, {n: v.clone() for n, v in whole.items()}, options=options)
    assert_equal(full_parameters(model), whole)


# Memory


@on_ranks(2)
def test_deleted_model_leaves_nothing_behind(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    _shard(api, model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        _step(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(batch)
    watched = [model, *model.modules(), *model.parameters()]
    references = [weakref.ref(thing) for thing in watched]
    del model, optimizer, watched
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@on_ranks(2)
def test_models_made_and_deleted_in_turn_do_not_add_up(api: Api) -> None:
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc to read the resident memory")
    libc = ctypes.CDLL(None)

    def use() -> None:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))  # 4 MiB a rank
        _shard(api, model)
        _step(model, make_batch(1024, size=2))

    def resident_nbytes() -> int:
        gc.collect()
        dist.barrier()
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)  # what the allocator keeps is not ours
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    for _ in range(3):
        use()
    before = resident_nbytes()
    for _ in range(15):
        use()
    assert resident_nbytes() - before < 5 * (4 << 20)


@on_ranks(2)
def test_whole_parameters_are_freed_by_reshard(api: Api) -> None:
    # Large, since small buffers may be kept; cast, since shards of the same dtype may be read in
    # place, where there is nothing to free.
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    _shard(api, model, mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    _step(model, make_batch(1024, size=2))
    for layer in model:
        layer.unshard()
    whole = list(model.parameters())
    for layer in model:
        layer.reshard()
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in whole)
    _step(model, make_batch(1024, size=2))
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in whole)


@on_ranks(2)
def test_local_shard_is_a_plain_tensor_of_its_own_size(api: Api) -> None:
    model = api.fully_shard(mlp())
    for parameter in model.parameters():
        shard = local(parameter)
        assert type(shard.data) is Tensor
        assert shard.is_contiguous()
        assert shard.device.type == "cpu"


@pytest.mark.parametrize("change", ["to_empty", "assign", "double"])
@on_ranks(2)
def test_shards_stay_where_they_are_once_they_are_replaced(api: Api, change: str) -> None:
    if change == "to_empty":
        with torch.device("meta"):
            model = mlp()
        _shard_all(api, model)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    else:
        model = mlp()
        _shard_all(api, model)
        if change == "assign":
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        else:
            model.double()
    before = [parameter.to_local().data_ptr() for parameter in model.parameters()]
    inputs = make_batch(16).to(next(model.parameters()).dtype)
    mean_square(model(inputs)).backward()
    assert [parameter.to_local().data_ptr() for parameter in model.parameters()] == before


def _shard_all(api: Api, model: nn.Sequential) -> None:
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
