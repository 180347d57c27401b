"""`full_parameters`: whole parameters for a while, and training as if nothing had happened."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.errors import MisuseError, StateError, UnsupportedError
from tests.api import TORCH, Api
from tests.fsdp1.models import Block, batch, clean, net, quiet
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.live.ways import TRAINING, sharded, without_sync
from tests.selection import repeats
from tests.test_transfer import HYBRID
from tests.training import assert_equal, mean_square, my_part

ours = pytest.mark.apis("peer_memory")


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    found = {clean(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    return {name: found[name].detach().clone() for name in sorted(found)}


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in fullshard.iter_full_state(model)}


def _expected(seed: int = 1) -> dict[str, Tensor]:
    return _parameters(net(seed))


def _train(model: Any, optimizer: Any, steps: int = 2) -> list[float]:
    losses = []
    for step in range(steps):
        loss = mean_square(model(my_part(batch(seed=step))))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ours
@pytest.mark.parametrize("way", TRAINING)
@on_ranks(2)
def test_every_parameter_is_whole_and_training_goes_on_bit_for_bit(api: Api, way: str) -> None:
    results = []
    for looks in (False, True):
        model = sharded(api, way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = _train(model, optimizer)
        before = {id(p) for p in model.parameters()}
        if looks:
            with fullshard.full_parameters(model):
                shown = _parameters(model)
            assert {id(p) for p in model.parameters()} == before
            state = _state(model)
            assert_equal({name: state[name] for name in shown}, shown)
        results.append((losses + _train(model, optimizer), _state(model)))
    assert results[0][0] == results[1][0]
    assert_equal(results[1][1], results[0][1])


@ours
@pytest.mark.parametrize("way", TRAINING)
@on_ranks(2)
def test_what_is_written_is_there_in_forward_and_state(api: Api, way: str) -> None:
    model = sharded(api, way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, optimizer)
    alone, other = net(), net(5)
    with fullshard.full_parameters(model), torch.no_grad():
        assert type(next(model.parameters())) is nn.Parameter
        for name, parameter in model.named_parameters():
            parameter.copy_(dict(other.named_parameters())[clean(name)])
    state = _state(model)
    assert_equal({n: state[n] for n in _expected(5)}, _expected(5))
    alone.load_state_dict(state)
    model.eval(), alone.eval()
    torch.testing.assert_close(model(batch()), alone(batch()), rtol=1e-6, atol=1e-6)
    model.train()
    _train(model, optimizer)  # the optimizer trains the same parameters
    assert not _state(model)["stem.weight"].equal(state["stem.weight"])


@ours
@pytest.mark.parametrize("way", TRAINING)
@on_ranks(2)
def test_without_writeback_changes_are_dropped(api: Api, way: str) -> None:
    model = sharded(api, way)
    with fullshard.full_parameters(model, writeback=False), torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = _state(model)
    assert_equal({n: state[n] for n in _expected()}, _expected())


@ours
@pytest.mark.parametrize("way", [*HYBRID, "fully_shard", "flat"])
@on_ranks(4)
def test_changes_of_the_first_rank_reach_all(api: Api, way: str) -> None:
    model = sharded(api, way)
    with fullshard.full_parameters(model, rank0_only=True, offload=True), torch.no_grad():
        if rank() == 0:
            assert_equal(_parameters(model), _expected())
            for parameter in model.parameters():
                parameter.mul_(2)
    expected = {name: 2 * value for name, value in _expected().items()}
    state = _state(model)
    assert_equal({n: state[n] for n in expected}, expected)
    # On every rank, replicas too: each has written its own rows.
    with fullshard.full_parameters(model):
        assert_equal(_parameters(model), expected)


@ours
@pytest.mark.parametrize("way", HYBRID)
@on_ranks(4)
def test_replicas_write_the_same(api: Api, way: str) -> None:
    model = sharded(api, way)
    with fullshard.full_parameters(model), torch.no_grad():
        assert_equal(_parameters(model), _expected())
        model.get_parameter("stem.weight" if way == "hybrid_fully_shard" else _name(model)).add_(1)
    with fullshard.full_parameters(model):
        expected = _expected()
        expected["stem.weight"] += 1
        assert_equal(_parameters(model), expected)


def _name(model: nn.Module) -> str:
    return next(n for n, _ in model.named_parameters() if clean(n) == "stem.weight")


@ours
@on_ranks(2)
def test_low_precision_and_offloaded_units_show_what_they_store(api: Api) -> None:
    for options in (
        {"mp_policy": api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
    ):
        model = _layers()
        for module in (*model, model):
            api.fully_shard(module, mesh=mesh_of(2), **options)
        mean_square(model(my_part(batch())).float()).backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        expected = {name: value.detach().clone() for name, value in _layers().named_parameters()}
        with fullshard.full_parameters(model), torch.no_grad():
            assert_equal(dict(model.named_parameters()), expected)
            model[0].bias.add_(1)
        expected["0.bias"] += 1
        assert_equal(_state(model), expected)
        model.reshard()
        for name, parameter in model.named_parameters():
            if "reshard_after_forward" not in options:
                assert parameter.grad is grads[name]


def _layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 6), Block(), nn.Linear(6, 5))


@ours
@pytest.mark.parametrize("way", ["fully_shard", "orig"])
@on_ranks(2)
def test_inside_a_forward_computes_with_what_is_shown(api: Api, way: str) -> None:
    model, alone = sharded(api, way), net()
    model.eval(), alone.eval()
    with fullshard.full_parameters(model):
        with torch.no_grad():
            torch.testing.assert_close(model(batch()), alone(batch()), rtol=0, atol=0)
        loss = mean_square(model(batch()))
        with pytest.raises(StateError, match="inside summon_full_params"):
            loss.backward()
        with pytest.raises(MisuseError, match="Leave the inner"), fullshard.full_parameters(model):
            pass
    torch.testing.assert_close(model(batch()), alone(batch()), rtol=1e-6, atol=1e-6)


@ours
@on_ranks(2)
def test_part_of_a_model_can_be_whole_while_the_rest_runs(api: Api) -> None:
    model, alone = sharded(api, "fully_shard"), net()
    mean_square(model(batch())).backward()  # so that the order of units is known, and prefetched
    mean_square(alone(batch())).backward()
    for _ in range(2):
        with fullshard.full_parameters(model.blocks[1]), torch.no_grad():
            assert type(model.blocks[1].wide.weight) is nn.Parameter
            torch.testing.assert_close(model(batch()), alone(batch()), rtol=1e-6, atol=1e-6)
            assert type(model.blocks[1].wide.weight) is nn.Parameter
    with pytest.raises(UnsupportedError, match="more than this module"):
        fullshard.full_parameters(model.head).__enter__()


@ours
@pytest.mark.parametrize("way", ["orig", "flat"])
@on_ranks(2)
def test_part_of_a_flat_unit_is_refused(api: Api, way: str) -> None:
    model = sharded(api, way)
    blocks = [m for m in model.modules() if type(m) is Block]
    with pytest.raises(UnsupportedError, match=r"Linear is a part of .*Pass that wrapper"):
        fullshard.full_parameters(blocks[0].wide).__enter__()
    for whole in (model, model.module):  # what was wrapped is the wrapper's
        with fullshard.full_parameters(whole):
            assert blocks[0].wide.weight.shape == Block().wide.weight.shape


@ours
@pytest.mark.parametrize("way", ["fully_shard", "orig", "flat"])
@on_ranks(2)
def test_an_exception_leaves_the_model_usable(api: Api, way: str) -> None:
    model = sharded(api, way)
    with pytest.raises(ZeroDivisionError), fullshard.full_parameters(model):
        raise ZeroDivisionError
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer)
    with pytest.raises(MisuseError, match=r"shape was changed"):
        _cut(model)
    _train(model, optimizer)


def _cut(model: nn.Module) -> None:
    """Change the shape of a parameter, on the rank that shows whole ones."""
    with fullshard.full_parameters(model, rank0_only=True):
        if rank() == 0:
            parameter = next(p for p in model.parameters() if p.numel() > 1)
            parameter.data = parameter.data[:1]


@ours
@on_ranks(2)
def test_replaced_parameters_and_load_state_dict_inside_are_written_back(api: Api) -> None:
    model = sharded(api, "fully_shard")
    with fullshard.full_parameters(model):
        model.load_state_dict(net(5).state_dict(), assign=True)
    state = _state(model)
    assert_equal({n: state[n] for n in _expected(5)}, _expected(5))
    assert type(model.stem.weight) is not nn.Parameter  # sharded again


@ours
@on_ranks(2)
def test_gradients_of_shown_parameters_are_not_lost_silently(api: Api) -> None:
    model = sharded(api, "fully_shard")
    with pytest.warns(UserWarning, match="use gathered"), fullshard.full_parameters(model):
        model.stem.weight.square().sum().backward()
    assert model.stem.weight.grad is None


class _Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.opens: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.opens is not None:
            with self.opens():
                pass
        return self.inner(x)


@ours
@on_ranks(2)
def test_during_forward_it_is_refused_and_after_the_error_it_works(api: Api) -> None:
    model = _Calls()
    api.fully_shard(model, mesh=mesh_of(world_size()))
    model.opens = lambda: fullshard.full_parameters(model)
    with pytest.raises(MisuseError, match="during its forward or backward"):
        model(torch.ones(2, 3))
    with fullshard.full_parameters(model):
        assert model.inner.weight.shape == (3, 3)


def test_a_model_that_is_not_sharded_stays_as_it_is() -> None:
    model = net()
    parameters = dict(model.named_parameters())
    with fullshard.full_parameters(model):
        assert dict(model.named_parameters()) == parameters


@ours
@pytest.mark.parametrize("way", ["fully_shard", "orig", "flat"])
@on_ranks(2)
def test_reading_between_forward_and_backward_changes_nothing(api: Api, way: str) -> None:
    losses = []
    for reads in (False, True):
        model = sharded(api, way, net(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(5):
            loss = mean_square(model(my_part(batch(seed=step))))
            if reads:
                with fullshard.full_parameters(model):
                    pass
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:5] == losses[5:]


@ours
@repeats(lambda s: s["way"] in ("orig", "replicate"))
@pytest.mark.parametrize("way", TRAINING)
@on_ranks(2)
def test_reading_while_gradients_accumulate_changes_nothing(api: Api, way: str) -> None:
    results = []
    for writeback in (None, True, False):
        model = sharded(api, way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses, gradients = [], []
        for seed in range(6):
            is_last = seed % 3 == 2
            with contextlib.nullcontext() if is_last else without_sync(model):
                loss = mean_square(model(my_part(batch(seed=seed))))
                loss.backward()
            losses.append(loss.item())
            if writeback is not None:
                with fullshard.full_parameters(model, writeback=writeback):
                    shown = _parameters(model)
                state = _state(model)
                assert_equal(shown, {name: state[name] for name in shown})
            gradients.append(
                [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            )
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        results.append((losses, gradients))
    for losses, gradients in results[1:]:
        assert losses == results[0][0]
        for ours_, expected in zip(gradients, results[0][1], strict=True):
            for one, other in zip(ours_, expected, strict=True):
                assert (one is None) == (other is None)
                assert one is None or one.equal(other)


@ours
@on_ranks(2)
def test_models_that_pytorch_has_sharded_are_refused(api: Api) -> None:
    torch_api = Api(TORCH)
    mesh = mesh_of(2)
    wrapped = torch_api.FullyShardedDataParallel(
        nn.Linear(4, 4), device_mesh=mesh, device_id=torch.device("cpu")
    )
    with pytest.raises(UnsupportedError, match="wrapped by PyTorch's FullyShardedDataParallel"):
        next(iter(fullshard.iter_full_state(wrapped)), None)
    for model in (wrapped, torch_api.fully_shard(nn.Linear(4, 4), mesh=mesh)):
        with pytest.raises(UnsupportedError, match="PyTorch's"), fullshard.full_parameters(model):
            pass


@ours
@on_ranks(2)
def test_names_are_those_inside_distributed_data_parallel(api: Api, tmp_path: Path) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    assert [name for name, _ in fullshard.iter_full_state(model)] == ["weight", "bias"]
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    fresh = nn.Linear(4, 4)
    made = torch.optim.SGD(fresh.parameters(), momentum=0.9)
    fullshard.load_checkpoint(tmp_path / "a", fresh, made)
    assert fresh.weight.equal(model.module.weight)
    wanted = optimizer.state[model.module.weight]["momentum_buffer"]
    assert made.state[fresh.weight]["momentum_buffer"].equal(wanted)


@ours
@pytest.mark.parametrize("writeback", [False, True])
@pytest.mark.parametrize("way", ["fully_shard", "replicate", "orig", "flat"])
@on_ranks(2)
def test_optimizers_do_not_step_inside(api: Api, way: str, writeback: bool) -> None:
    model = sharded(api, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    _train(model, optimizer)
    before = _state(model)
    with fullshard.full_parameters(model, writeback=writeback):
        other.step()
        with pytest.raises(MisuseError, match=r"step\(\) is called inside full_parameters"):
            optimizer.step()
    assert_equal(_state(model), before)
    _train(model, optimizer)
    with pytest.raises(ZeroDivisionError), fullshard.full_parameters(model):
        raise ZeroDivisionError
    _train(model, optimizer)


@ours
@pytest.mark.parametrize("way", ["plain", "ignored", "rest", "fully_shard", "orig"])
@on_ranks(2)
def test_changes_that_are_dropped_are_those_of_all_parameters(api: Api, way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if way == "ignored":
        api.fully_shard(model, mesh=mesh_of(2), ignored_params={model[0].weight})
    elif way == "rest":
        api.fully_shard(model[0], mesh=mesh_of(2))
    else:
        model = sharded(api, way, model)
    before = _state(model)
    with fullshard.full_parameters(model, writeback=False), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert_equal(_state(model), before)
    with fullshard.full_parameters(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert_equal(_state(model), {name: value + 1 for name, value in before.items()})


@ours
@pytest.mark.parametrize("way", ["fully_shard", "orig", "flat"])
@on_ranks(2)
def test_state_dicts_where_one_rank_shows_whole_parameters(api: Api, way: str) -> None:
    model = sharded(api, way)
    whole = _state(model)
    with fullshard.full_parameters(model, rank0_only=True, writeback=False):
        if rank() == 0:
            found = {clean(name): value for name, value in model.state_dict().items()}
            assert_equal({name: found[name] for name in whole}, whole)
        elif way == "flat":
            with pytest.raises(MisuseError, match="shows its flat parameter"):
                model.state_dict()
        else:
            assert model.state_dict()
    assert_equal(_state(model), whole)
    if way == "fully_shard":
        return
    only = fullshard.FullStateDictConfig(rank0_only=True)
    with (
        quiet(),
        model.state_dict_type(model, fullshard.StateDictType.FULL_STATE_DICT, only),
        fullshard.full_parameters(model, rank0_only=True, writeback=False),
    ):
        found = model.state_dict()
    assert (not found) == (rank() != 0)
    assert_equal({name: found[name] for name in whole if name in found}, whole if found else {})
