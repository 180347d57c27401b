"""Bad input: a clear error before anything is changed, the same on every rank."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.api import Api
from tests.harness import mesh_of, on_ranks
from tests.models import mlp
from tests.selection import one_way
from tests.training import assert_gradients_are_parts_of, gradients_alone, make_batch, my_part
from tests.training import mean_square as loss_of

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")


def _fingerprint(model: nn.Module) -> Any:
    """Everything that a call could have changed."""
    return [
        (
            name,
            type(module),
            sorted(vars(module)),
            [(n, id(p), p.requires_grad) for n, p in module.named_parameters(recurse=False)],
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._state_dict_pre_hooks),
        )
        for name, module in model.named_modules()
    ]


def _assert_refused(
    api: Api, model: nn.Module, message: str, target: Any = None, **options: Any
) -> None:
    """Assert that the call raises a ValueError, changes nothing and can be repeated rightly."""
    expected = gradients_alone(model, make_batch(16))
    before = _fingerprint(model)
    with pytest.raises(ValueError, match=message) as caught:
        api.fully_shard(model if target is None else target, **options)
    if api.is_torch:
        return  # it leaves a trace of the failed call on the module
    assert isinstance(caught.value, api.errors.FullshardError)
    assert _fingerprint(model) == before
    api.fully_shard(model)
    loss_of(model(my_part(make_batch(16)))).backward()
    assert_gradients_are_parts_of(model, expected)


@pytest.mark.parametrize("reshard", [3, 0, -1, 8])
@on_ranks(4)
def test_reshard_size_must_divide_the_shard_axis(api: Api, reshard: int) -> None:
    _assert_refused(api, mlp(), str(reshard), reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard", ["yes", 2.0])
@on_ranks(2)
def test_reshard_must_be_a_bool_an_int_or_none(api: Api, reshard: object) -> None:
    _assert_refused(api, mlp(), "reshard_after_forward", reshard_after_forward=reshard)


@on_ranks(2)
def test_mesh_must_have_one_or_two_axes(api: Api) -> None:
    _assert_refused(api, mlp(), "1D or 2D|one or two|1-D|1 or 2", mesh=mesh_of(1, 1, 2))


@pytest.mark.ours("any object with an ndim is taken for a mesh")
@on_ranks(2)
def test_mesh_must_be_a_mesh(api: Api) -> None:
    _assert_refused(api, mlp(), "DeviceMesh", mesh="cpu")


@pytest.mark.ours("asks the missing device for its number")
@on_ranks(2)
def test_mesh_must_be_of_a_device_that_is_there(api: Api) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device that the test expects to be missing")
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=torch.distributed.get_rank())
    _assert_refused(api, mlp(), "cuda", mesh=mesh)


@on_ranks(2)
def test_container_without_forward_is_refused(api: Api) -> None:
    model = mlp()
    layers = nn.ModuleList(model)
    _assert_refused(api, model, "forward", layers)


@on_ranks(2)
def test_module_without_parameters_may_be_a_unit(api: Api) -> None:
    model = mlp()
    expected = gradients_alone(model, make_batch(16))
    assert isinstance(api.fully_shard(model[0][1]), api.FSDPModule)
    api.fully_shard(model)
    loss_of(model(my_part(make_batch(16)))).backward()
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_scalar_parameter_is_refused(api: Api) -> None:
    model = mlp()
    model[1].register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    with pytest.raises(ValueError, match=r"scalar parameters.*scale") as caught:
        api.fully_shard(model)
    assert "1D tensor" in str(caught.value)
    assert type(model) is nn.Sequential


@on_ranks(2, 3)
def test_uneven_size_on_another_dim_is_refused(api: Api) -> None:
    model = nn.Linear(7, 12)
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        api.fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert type(model) is nn.Linear


@on_ranks(2)
def test_root_whose_parameters_all_belong_to_children_is_allowed(api: Api) -> None:
    model = mlp()
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    loss_of(model(make_batch(16))).backward()


@on_ranks(2)
def test_module_is_sharded_only_once(api: Api) -> None:
    model = mlp()
    expected = gradients_alone(model, make_batch(16))
    api.fully_shard(model[1])
    api.fully_shard(model)
    before = _fingerprint(model)
    for target in (model[1], model):
        with pytest.raises((ValueError, RuntimeError, AssertionError)) as caught:
            api.fully_shard(target)
        if not api.is_torch:
            assert isinstance(caught.value, api.errors.FullshardError)
            assert "FSDPSequential is managed already" in str(caught.value)
    assert _fingerprint(model) == before
    loss_of(model(my_part(make_batch(16)))).backward()
    assert_gradients_are_parts_of(model, expected)


@pytest.mark.parametrize("first", ["alone", "in another root"])
@on_ranks(2)
def test_module_that_has_run_cannot_go_below_another_root(api: Api, first: str) -> None:
    shared = api.fully_shard(nn.Linear(16, 16))
    other = shared if first == "alone" else api.fully_shard(nn.Sequential(shared))
    other(make_batch(16))
    root = api.fully_shard(nn.Sequential(nn.Linear(16, 16), shared))
    with pytest.raises(RuntimeError, match=r"initialized for 1\n") as caught:
        root(make_batch(16))
    if not api.is_torch:
        why = "a root of its own" if first == "alone" else "as a part of another root"
        assert why in str(caught.value)


@on_ranks(2)
def test_parameters_on_meta_at_the_first_forward_are_named(api: Api) -> None:
    with torch.device("meta"):
        model = mlp()
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    for layer in (model[0], model[2]):
        layer.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"1\.0\.weight") as caught:
        model(make_batch(16))
    assert "to_empty" in str(caught.value)
    assert "0.0.weight" not in str(caught.value)
    if api.is_torch:
        return  # it remembers the failed attempt
    model[1].to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    loss_of(model(make_batch(16))).backward()


@pytest.mark.ours("an AssertionError at a later place")
@pytest.mark.parametrize("placement", [Shard(2), Shard(-3), Replicate(), "rows"])
@on_ranks(2)
def test_placement_must_be_a_dim_of_the_parameter(api: Api, placement: Any) -> None:
    _assert_refused(api, mlp(), r"weight|bias", shard_placement_fn=lambda _: placement)


@pytest.mark.ours("fails at the first forward")
@on_ranks(2)
def test_policy_must_name_floating_dtypes(api: Api) -> None:
    with pytest.raises(api.errors.ShardingError, match="param_dtype"):
        api.MixedPrecisionPolicy(param_dtype=torch.int32)
    with pytest.raises(api.errors.ShardingError, match="reduce_dtype"):
        api.MixedPrecisionPolicy(reduce_dtype="bf16")


@pytest.mark.ours("taken as they are")
@pytest.mark.parametrize("option", ["mp_policy", "offload_policy"])
@on_ranks(2)
def test_policies_must_be_policies(api: Api, option: str) -> None:
    _assert_refused(api, mlp(), option, **{option: "bf16"})


@pytest.mark.ours("an IndexError")
@on_ranks(2)
def test_list_of_modules_must_not_be_empty(api: Api) -> None:
    _assert_refused(api, mlp(), "empty", [])


@pytest.mark.ours("an AttributeError")
@on_ranks(2)
def test_only_modules_can_be_sharded(api: Api) -> None:
    _assert_refused(api, mlp(), "not Tensor", torch.ones(3))


@on_ranks(2)
def test_setter_refuses_what_the_constructor_refuses(api: Api) -> None:
    model = api.fully_shard(mlp())
    with pytest.raises(ValueError, match="reshard_after_forward"):
        model.set_reshard_after_forward("no")


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_unknown_comm_path_is_refused(api: Api) -> None:
    with pytest.raises(ValueError, match="peer_memory"):
        api.set_default_comm("carrier_pigeon")


@pytest.mark.ours("no error class of its own")
@on_ranks(2)
def test_error_tree_fits_pythons(api: Api) -> None:
    errors = api.errors
    assert issubclass(errors.ShardingError, errors.FullshardError)
    assert issubclass(errors.ShardingError, ValueError)
    assert issubclass(errors.MeshError, ValueError)
    assert issubclass(errors.StateError, RuntimeError)
    assert issubclass(errors.PeerLostError, errors.CommError)
    assert issubclass(errors.CommError, RuntimeError)


@pytest.mark.ours("its message has no path")
@on_ranks(2)
def test_a_parameter_that_cannot_be_sharded_is_named_by_its_path(api: Api) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    model[1][0].weight = nn.Parameter(torch.randn(4, 4).t())
    with pytest.raises(NotImplementedError, match=r"non-contiguous .*Sequential: 1\.0\.weight"):
        api.fully_shard(model)
    with pytest.raises(AssertionError, match=r"dim 1 .*Linear: bias.*dim from 0"):
        api.fully_shard(model[0], shard_placement_fn=lambda _: Shard(1))
    assert type(model) is nn.Sequential
    assert not isinstance(model[0].weight, DTensor)


@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@pytest.mark.ours("no peer memory")
@on_ranks(2)
def test_nothing_is_changed_where_peer_memory_cannot_be_had(api: Api, face: str) -> None:
    model = nn.Sequential(mlp(1), mlp(1))
    before, shapes = _fingerprint(model), [p.shape for p in model.parameters()]

    def shard() -> None:
        if face == "fully_shard":
            api.fully_shard(model)
            return
        policy = api.ModuleWrapPolicy({nn.Linear})
        api.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=face == "orig")

    api.set_default_comm("peer_memory")  # the fixture restores it
    with (
        mock.patch("fullshard.comm.select._peer_memory", return_value="none here"),
        pytest.raises(api.CommError, match="cannot use it: none here"),
    ):
        shard()
    assert _fingerprint(model) == before
    assert [p.shape for p in model.parameters()] == shapes


def _wrap_and_run(api: Api, model: nn.Module, units: list[str]) -> None:
    for name in units:
        setattr(model, name, api.FullyShardedDataParallel(getattr(model, name)))
    api.FullyShardedDataParallel(model)(torch.ones(2, 4))


@on_ranks(2)
def test_module_in_several_places_is_refused_where_it_cannot_be_moved(api: Api) -> None:
    """By the wrapper when it is made or first used: a flat parameter keeps what it was made of."""
    if api.is_torch:
        return
    for units in (["0", "1"], ["0"]):
        shared = nn.Linear(4, 4)
        model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.ReLU()))
        with pytest.raises(api.errors.FullshardError, match="weight"):
            _wrap_and_run(api, model, units)


@on_ranks(2)
def test_compiled_module_inside_is_refused_by_name(api: Api) -> None:
    """Unless its parameters are left out."""
    if api.is_torch:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and still used
        model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(api.errors.UnsupportedError, match=r"Linear\.weight"):
        api.fully_shard(model)
    api.fully_shard(model, ignored_params=set(model[1].parameters()))
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_shard_whose_shape_was_changed_in_place_is_an_error(api: Api) -> None:
    """Its rows would be other parameters' memory."""
    if api.is_torch:
        return
    model = api.fully_shard(nn.Linear(4, 4))
    model(torch.ones(2, 4))
    model.reshard()
    model.weight._local_tensor.t_()
    with pytest.raises(api.errors.StateError, match="weight"):
        model(torch.ones(2, 4))


class _Keeps(nn.Module):
    """Computes with a parameter that it has put into a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.kept[0], self.layer.bias)


@pytest.mark.parametrize("face", ["fully_shard", "flat"])
@on_ranks(2)
def test_gradient_of_a_parameter_kept_since_before_sharding_is_refused(api: Api, face: str) -> None:
    """Nothing would train it."""
    if api.is_torch:
        return
    if face == "flat":
        model: Any = api.FullyShardedDataParallel(_Keeps(), use_orig_params=False)
    else:
        model = api.fully_shard(_Keeps())
    loss = loss_of(model(torch.ones(2, 4)))
    with pytest.raises(api.errors.MisuseError, match=r"layer\.weight"):
        loss.backward()


@on_ranks(2)
def test_what_is_unfrozen_too_late_for_a_forward_is_named(api: Api) -> None:
    """Through sharded parameters, after the unit was gathered."""
    if api.is_torch:
        return
    model = api.fully_shard(mlp())
    bias, *_ = [*model.parameters()][::-1]
    bias.requires_grad_(False)
    model.register_forward_pre_hook(lambda module, args: setattr(bias, "requires_grad", True))
    with pytest.warns(UserWarning, match=r"bias: unfrozen"):
        loss_of(model(my_part(make_batch(16)))).backward()
    assert bias.grad is None
    loss_of(model(my_part(make_batch(16)))).backward()
    assert bias.grad is not None
