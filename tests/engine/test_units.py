"""Which parameters form a unit, and when they are whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank
from tests.models import Transformer, mlp
from tests.releases import unless_newest
from tests.selection import one_way
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    assert_parameters_are_parts_of,
    full_parameters,
    gradients_alone,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")


def _is_whole(module: nn.Module) -> bool:
    return not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _sharded_mlp(api: Api, **options: object) -> nn.Sequential:
    model = mlp()
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


@on_ranks(2, 3)
def test_nested_units_give_the_gradients_of_the_unwrapped_model(api: Api) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((16,), 0.5))
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.scale)

    model, batch = nn.Sequential(Outer(), nn.Linear(16, 4)), make_batch(16)
    expected = gradients_alone(model, batch)
    api.fully_shard(model[0].inner[1])
    api.fully_shard(model[0].inner)
    api.fully_shard(model[0])
    api.fully_shard(model)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_several_modules_form_one_unit(api: Api) -> None:
    model, batch = mlp(4), make_batch(16)
    expected = gradients_alone(model, batch)
    pair = [model[1], model[2]]
    assert api.fully_shard(pair) is pair
    api.fully_shard(model)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)
    model[1].unshard()
    assert _is_whole(model[1])
    assert _is_whole(model[2])
    assert not _is_whole(model[3])


@on_ranks(2)
def test_unit_keeps_its_class_and_becomes_an_fsdp_module(api: Api) -> None:
    layer = nn.Linear(4, 4)
    assert api.fully_shard(layer) is layer
    assert isinstance(layer, nn.Linear)
    assert isinstance(layer, api.FSDPModule)
    assert type(layer).__name__ == "FSDPLinear"


@on_ranks(2)
def test_slice_of_a_sharded_container_is_a_plain_container(api: Api) -> None:
    model = api.fully_shard(mlp())
    assert type(model[:2]) is nn.Sequential


@on_ranks(2, 3, 4)
def test_parameters_are_cut_as_torch_chunk_cuts(api: Api) -> None:
    model = nn.Linear(3, 5)
    whole = full_parameters(model)
    api.fully_shard(model)
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Shard(0),)
    assert_parameters_are_parts_of(model, whole)
    assert_equal(full_parameters(model), whole)


@on_ranks(4)
def test_two_axes_replicate_then_shard(api: Api) -> None:
    model = nn.Linear(3, 5)
    whole = full_parameters(model)
    api.fully_shard(model, mesh=mesh_of(2, 2))
    assert model.weight.placements == (Replicate(), Shard(0))
    assert model.weight.to_local().shape == ((3, 3) if rank() % 2 == 0 else (2, 3))
    assert_parameters_are_parts_of(model, whole)


@on_ranks(4)
def test_groups_of_ranks_shard_apart(api: Api) -> None:
    model = mlp()
    pair, place = divmod(rank(), 2)
    batch = make_batch(16, seed=pair)
    expected = gradients_alone(model, batch)
    for layer in model:
        api.fully_shard(layer, mesh=mesh_of(2, 2)["shard"])
    api.fully_shard(model, mesh=mesh_of(2, 2)["shard"])
    for _ in range(2):
        mean_square(model(batch.chunk(2)[place])).backward()
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_placement_function_chooses_the_dim(api: Api) -> None:
    model, batch = nn.Linear(16, 6), make_batch(16)
    whole, expected = full_parameters(model), gradients_alone(model, batch)
    api.fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None)
    assert model.weight.placements == (Shard(1),)
    assert model.bias.placements == (Shard(0),)
    assert_parameters_are_parts_of(model, whole)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)
    assert_equal(full_parameters(model), whole)


@on_ranks(2)
def test_negative_dim_of_a_placement_counts_from_the_end(api: Api) -> None:
    model = nn.Linear(16, 6, bias=False)
    whole = model.weight.detach().clone()
    api.fully_shard(model, shard_placement_fn=lambda _: Shard(-1))
    assert model.weight.placements == (Shard(1),)
    torch.testing.assert_close(model.weight.to_local(), whole.chunk(2, 1)[rank()])


@on_ranks(2)
def test_ignored_parameters_stay_whole_and_keep_their_own_gradient(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    ignored = model[1][0].weight
    api.fully_shard(model, ignored_params={ignored})
    assert model[1][0].weight is ignored
    assert type(ignored) is nn.Parameter
    mean_square(model(my_part(batch))).backward()
    torch.distributed.all_reduce(ignored.grad)
    ignored.grad /= 2
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_buffers_are_left_alone(api: Api) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = dict(model.named_buffers())
    api.fully_shard(model)
    model(make_batch(4)).sum().backward()
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {
        name: id(buffer) for name, buffer in before.items()
    }
    assert before["1.num_batches_tracked"].item() == 1


@on_ranks(2)
def test_children_reshard_after_forward_and_the_root_does_not(api: Api) -> None:
    model = Transformer()
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model)
    assert not any(_is_whole(child) for child in model.children())
    logits = model(torch.zeros(2, 8, dtype=torch.long))
    assert _is_whole(model.head)
    assert not any(_is_whole(block) for block in model.blocks)
    logits.sum().backward()
    assert not _is_whole(model.head)


@on_ranks(2)
def test_unit_alone_is_a_root_and_stays_whole_after_forward(api: Api) -> None:
    model = api.fully_shard(mlp())
    out = model(make_batch(16))
    assert _is_whole(model)
    out.sum().backward()
    assert not _is_whole(model)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_reshard_after_forward_holds_for_root_and_children_alike(api: Api, reshard: bool) -> None:
    model = _sharded_mlp(api, reshard_after_forward=reshard)
    out = model(make_batch(16))
    assert [_is_whole(layer) for layer in model] == 3 * [not reshard]
    out.sum().backward()
    assert not any(_is_whole(layer) for layer in model)


@pytest.mark.apis("torch", "process_group")  # peers' memory is as near as a smaller group's
@on_ranks(4)
def test_reshard_to_a_smaller_world_keeps_that_fraction(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=2)
    api.fully_shard(model, reshard_after_forward=2)
    out = model(my_part(batch))
    weight = model[0][0].weight
    assert isinstance(weight, DTensor)
    assert weight.to_local().numel() == 16 * 16 // 2
    mean_square(out).backward()
    assert model[0][0].weight.to_local().numel() == 16 * 16 // 4
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_reshard_to_the_whole_world_is_true_and_to_one_rank_is_false(api: Api) -> None:
    model = mlp(2)
    api.fully_shard(model[0], reshard_after_forward=2)
    api.fully_shard(model[1], reshard_after_forward=1)
    api.fully_shard(model)
    model(make_batch(16))
    assert not _is_whole(model[0])
    assert _is_whole(model[1])


@on_ranks(2)
def test_set_reshard_after_forward_takes_effect_at_the_next_forward(api: Api) -> None:
    model = _sharded_mlp(api)
    model(make_batch(16)).sum().backward()
    model.set_reshard_after_forward(reshard_after_forward=False)
    out = model(make_batch(16))
    assert all(_is_whole(layer) for layer in model)
    out.sum().backward()
    model.set_reshard_after_forward(reshard_after_forward=True, recurse=False)
    out = model(make_batch(16))
    assert all(_is_whole(layer) for layer in model)
    out.sum().backward()


@on_ranks(2)
def test_set_reshard_after_backward_false_keeps_parameters_whole(api: Api) -> None:
    model, batch = _sharded_mlp(api), make_batch(16)
    model.set_reshard_after_backward(reshard_after_backward=False)
    mean_square(model(my_part(batch))).backward()
    assert all(_is_whole(layer) for layer in model)
    model.set_reshard_after_backward(reshard_after_backward=True)
    mean_square(model(my_part(batch))).backward()
    assert not any(_is_whole(layer) for layer in model)


@on_ranks(2)
def test_unshard_makes_this_unit_whole_and_no_other(api: Api) -> None:
    model = mlp()
    whole = full_parameters(model)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    model[1].unshard()
    assert [_is_whole(layer) for layer in model] == [False, True, False]
    torch.testing.assert_close(model[1][0].weight.detach(), whole["1.0.weight"])
    model[1].reshard()
    assert not _is_whole(model[1])
    assert_parameters_are_parts_of(model, whole)


@on_ranks(2)
def test_unshard_before_the_first_forward_makes_no_root(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    model[1].unshard()
    model[1].reshard()
    model[2].unshard()
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_asynchronous_unshard_is_complete_after_wait(api: Api) -> None:
    model = mlp()
    whole = full_parameters(model)
    api.fully_shard(model)
    handle = model.unshard(async_op=True)
    assert isinstance(handle, api.UnshardHandle)
    handle.wait()
    assert_equal({n: p.detach() for n, p in model.named_parameters()}, whole)
    model.reshard()


@on_ranks(2)
def test_forward_uses_an_unshard_that_was_never_waited_for(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    api.fully_shard(model)
    model.unshard(async_op=True)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_explicit_prefetch_does_not_change_the_result(api: Api) -> None:
    model, batch = mlp(4), make_batch(16)
    expected = gradients_alone(model, batch)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    for index in range(4):
        model[index].set_modules_to_forward_prefetch(list(model[index + 1 : index + 3]))
        model[index].set_modules_to_backward_prefetch(list(reversed(model[:index]))[:2])
    for _ in range(3):
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_prefetch_of_a_module_that_is_no_unit_is_an_error(api: Api) -> None:
    model = api.fully_shard(mlp())
    with pytest.raises(ValueError, match="FSDPModule"):
        model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])


@on_ranks(2)
def test_registered_method_counts_as_forward(api: Api) -> None:
    class Head(nn.Linear):
        def score(self, x: Tensor) -> Tensor:
            return self(x).tanh()

        def project(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, batch = Head(16, 16), make_batch(16)
    expected = (batch @ model.weight).detach()
    api.fully_shard(model)
    api.register_fsdp_forward_method(model, "project")
    torch.testing.assert_close(model.project(batch), expected)


@on_ranks(2)
def test_units_take_turns_in_another_order_each_step(api: Api) -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
            for index in order:
                x = self.layers[index](x).tanh()
            return x

    model, batch = Shuffled(), make_batch(16)
    alone = copy.deepcopy(model)
    for layer in model.layers:
        api.fully_shard(layer)
    api.fully_shard(model)
    for order in [(0, 1, 2), (2, 0, 1), (1, 1, 0, 2), (0, 2, 1)]:
        mean_square(alone(batch, order)).backward()
        mean_square(model(my_part(batch), order)).backward()
        assert_gradients_are_parts_of(model, {n: p.grad for n, p in alone.named_parameters()})
        alone.zero_grad()
        model.zero_grad()


@unless_newest(pytest.mark.ours("it has that from 2.15 on"))
@pytest.mark.parametrize("reshard", [True, 2])
@on_ranks(4)
def test_memory_of_unsharded_parameters_stays_if_the_user_keeps_it(
    api: Api, reshard: bool | int
) -> None:
    """Addresses are those of the first forward, while parameters are shown sharded in between."""

    class Watched(nn.Linear):
        def __init__(self) -> None:
            super().__init__(640, 640, bias=False)  # too large to be kept anyway
            self.addresses: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.addresses.append(self.weight.data_ptr())
            return super().forward(x)

    layers = [Watched(), Watched()]
    model = nn.Sequential(*layers)
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=reshard)
    api.fully_shard(model)
    model.set_keep_unsharded_storage(True)
    model[1].set_keep_unsharded_storage(False, recurse=False)
    storages = []
    for _ in range(3):
        out = model(make_batch(640, size=2))
        assert isinstance(model[0].weight, DTensor)
        mean_square(out).backward()
        with torch.no_grad():
            model(make_batch(640, size=2))
        spare = [torch.empty(640, 640) for _ in range(4)]  # whatever was freed has another owner
        storages.append(spare)
    assert len(set(layers[0].addresses)) == 1
