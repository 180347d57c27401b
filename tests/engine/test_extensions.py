"""Parameters that say themselves what travels: `fsdp_pre_all_gather`, `fsdp_post_all_gather`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import SGD
from torch.utils._pytree import tree_map_only

from tests.api import Api
from tests.collectives import record_traffic
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.releases import unless_newest
from tests.selection import one_way
from tests.training import (
    full,
    full_gradients,
    local,
    make_batch,
    mean_square,
    my_part,
    part_of,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

needs_newest_in_pytorch = unless_newest(pytest.mark.ours("it has that from 2.15 on"))

DIM = 8


class Wrapped(torch.Tensor):
    """A tensor around another, `held`, which every operation is done on."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.held})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, function(*args, **kwargs))


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Write values, less their padding, where autograd may have saved the parameter."""
    target = local(parameter)
    with _unsafe_preserve_version_counter(target):
        target.copy_(values[: target.size(0)])


def encode(values: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return int8 codes, padded to this many rows, and their scale."""
    largest = values.abs().amax() if values.numel() else values.new_zeros(())
    scale = largest.clamp(min=1e-6) / 127
    codes = values.new_zeros(num_rows, *values.shape[1:], dtype=torch.int8)
    codes[: values.size(0)] = (values / scale).round()
    return codes, scale.reshape(1)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of codes that several ranks encoded, rank by rank."""
    by_rank = codes.float().view(scales.numel(), -1, *codes.shape[1:])
    return (by_rank * scales.view(-1, *(codes.dim() * [1]))).flatten(0, 1)


class Int8(Wrapped):
    """Travels as int8 with a scale from each rank."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        """Return what travels."""
        return encode(self.held, self.held.size(0)), ("of", type(self).__name__)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Decode what was gathered."""
        assert metadata == ("of", type(self).__name__)
        codes, scales = outputs
        assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
        whole = decode(codes, scales).to(param_dtype)
        if out is None:
            return whole, (whole,)
        return fill(out, whole)


class PaddedInt8(Int8):
    """The same of any shape, by the longer signature."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> Any:
        """Return what travels, padded."""
        num_rows = -(-outer_size[0] // mesh.size())
        return encode(self.held, num_rows), ("of", type(self).__name__)


class AsIs(Wrapped):
    """Travels as it is; what was gathered is the parameter, without a copy."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
        """Return what travels."""
        return (self.held,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Take what was gathered."""
        (whole,) = outputs
        if out is None:
            return whole, (whole,)
        assert whole.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        return None


class BFloat16(Wrapped):
    """Travels as bfloat16, padded."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> Any:
        """Return what travels, padded."""
        num_rows = -(-outer_size[0] // mesh.size())
        sent = self.held.new_zeros(num_rows, *self.held.shape[1:], dtype=torch.bfloat16)
        sent[: self.held.size(0)] = self.held
        return (sent,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Widen what was gathered."""
        (whole,) = outputs
        if out is None:
            whole = whole.to(param_dtype)
            return whole, (whole,)
        return fill(out, whole)


def int8_on_ranks(whole: Tensor, num_ranks: int) -> Tensor:
    """Return what every rank sees of a tensor whose parts travel as int8."""
    num_rows = -(-whole.size(0) // num_ranks)
    coded = [encode(part, num_rows) for part in whole.split(num_rows)]
    return torch.cat([decode(*each) for each in coded])[: whole.size(0)]


def bfloat16_on_ranks(whole: Tensor, num_ranks: int) -> Tensor:
    """Return what every rank sees of a tensor that travels as bfloat16."""
    return whole.bfloat16().float()


def make_model(dim: int = DIM, hidden: int = 12) -> nn.Sequential:
    """Make two linear layers around a tanh."""
    return nn.Sequential(nn.Linear(dim, hidden), nn.Tanh(), nn.Linear(hidden, dim))


def shard(api: Api, model: nn.Sequential, kind: Callable[[Tensor], Tensor], **options: Any) -> Any:
    """Make the weights extended ones, leave the biases plain, and shard each layer."""
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def held_part(parameter: Any) -> Tensor:
    """This rank's shard, as the plain tensor that is wrapped."""
    shard = parameter._local_tensor
    return shard.held if isinstance(shard, Wrapped) else shard


def record_weight(layer: nn.Module) -> list[Tensor]:
    """Record the layer's weight as each of its forwards sees it."""
    seen: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    return seen


def assert_trains_on_rounded_weights(
    model: nn.Sequential,
    alone: nn.Sequential,
    rounded: Callable[[Tensor, int], Tensor],
    num_parts: int,
) -> None:
    """Train both, one process as if its weights had travelled, and compare all there is."""
    optimizers = [SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, alone)]
    for step in range(3):
        batch = make_batch(DIM).roll(step, 0)
        seen = {
            name: (rounded(p.detach(), num_parts) if p.ndim == 2 else p.detach()).requires_grad_()
            for name, p in alone.named_parameters()
        }
        expected = torch.func.functional_call(alone, seen, (batch,))
        mean_square(expected).backward()
        out = model(my_part(batch))
        torch.testing.assert_close(out.detach(), my_part(expected.detach()))
        mean_square(out).backward()
        for name, parameter in model.named_parameters():
            gradient = seen[name].grad
            assert gradient is not None
            assert gradient.abs().max() > 1e-3
            torch.testing.assert_close(full(parameter.grad), gradient, rtol=1e-4, atol=1e-6)
            alone.get_parameter(name).grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            part = part_of(alone.get_parameter(name).detach(), parameter)
            torch.testing.assert_close(held_part(parameter).detach(), part, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [Int8, PaddedInt8], ids=["mesh alone", "all arguments"])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_int8_parameters_train_like_one_process_with_their_rounding(
    api: Api, reshard: bool, kind: Any
) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    shard(api, model, kind, reshard_after_forward=reshard)
    assert_trains_on_rounded_weights(model, alone, int8_on_ranks, 2)


class Released(Int8):
    """Says that its unsharded form needs what was gathered no more."""

    answer: Any = True
    asked: int = 0

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        """Return whether the outputs may go."""
        type(self).asked += 1
        return self.answer


class Uncertain(Released):
    """Gives an answer that is none."""

    answer = "yes"


class OnlyReleases(Wrapped):
    """Defines when outputs go, and not what they are."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        """Return whether the outputs may go."""
        return True


@needs_newest_in_pytorch
@on_ranks(2)
def test_gathered_outputs_are_freed_as_soon_as_a_parameter_says_so(api: Api) -> None:
    received: list[Tensor] = []

    class Recorded(Released):
        """Records the outputs."""

        def fsdp_post_all_gather(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
            received[:] = outputs
            return super().fsdp_post_all_gather(outputs, *args, **kwargs)

    model = make_model()
    alone = copy.deepcopy(model)
    shard(api, model, Recorded)
    sizes: list[int] = []
    model[0].register_forward_pre_hook(
        lambda *_: sizes.extend(each.untyped_storage().size() for each in received)
    )
    assert_trains_on_rounded_weights(model, alone, int8_on_ranks, 2)
    assert sizes
    assert set(sizes) == {0}


@needs_newest_in_pytorch
@pytest.mark.parametrize(
    ("kind", "message"),
    [(Uncertain, "must return a bool"), (OnlyReleases, "requires fsdp_pre_all_gather")],
)
@on_ranks(2)
def test_wrong_release_of_outputs_is_refused(api: Api, kind: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        shard(api, make_model(), kind)


@on_ranks(2)
def test_shard_stays_a_tensor_of_its_class_and_precision(api: Api) -> None:
    model = make_model()
    whole = model[0].weight.detach().clone()
    shard(api, model, Int8)
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    for _ in range(2):
        assert type(weight._local_tensor) is Int8
        assert torch.equal(held_part(weight), whole.chunk(2)[rank()])
        mean_square(model(make_batch(DIM))).backward()
        assert model[0].weight is weight


@on_ranks(2)
def test_forward_sees_exactly_what_the_extension_made_of_the_shards(api: Api) -> None:
    model = make_model()
    whole = model[0].weight.detach().clone()
    shard(api, model, Int8)
    seen = record_weight(model[0])
    for factor in (1.0, -2.0, 0.5):
        with torch.no_grad():
            held_part(model[0].weight).copy_(factor * whole.chunk(2)[rank()])
            model(make_batch(DIM))
        assert type(seen[-1]) is Tensor
        assert torch.equal(seen[-1], int8_on_ranks(factor * whole, 2))
        assert not torch.equal(seen[-1], factor * whole)


@on_ranks(4)
def test_extension_gathers_over_the_shard_axis_of_a_hybrid_mesh(api: Api) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    shard(api, model, PaddedInt8, mesh=mesh_of(2, 2))
    assert model[0].weight.placements == (Replicate(), Shard(0))
    assert_trains_on_rounded_weights(model, alone, int8_on_ranks, 2)


@on_ranks(2, 4)
def test_extension_pads_what_is_divided_unevenly(api: Api) -> None:
    model = make_model(hidden=5)
    alone = copy.deepcopy(model)
    shard(api, model, BFloat16)
    assert_trains_on_rounded_weights(model, alone, bfloat16_on_ranks, world_size())


@on_ranks(2, 4)
def test_extension_may_be_cut_along_another_dim(api: Api) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    shard(api, model, AsIs, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    assert model[0].weight.placements == (Shard(1),)
    assert_trains_on_rounded_weights(model, alone, lambda whole, _: whole, world_size())


@pytest.mark.ours("refuses every input of another shape than the padded shard's")
@on_ranks(2, 4)
def test_uneven_extension_may_send_more_than_its_padded_shard(api: Api) -> None:
    model = make_model(hidden=5)
    alone = copy.deepcopy(model)
    shard(api, model, PaddedInt8)
    assert_trains_on_rounded_weights(model, alone, int8_on_ranks, world_size())


@on_ranks(2)
def test_extension_is_refused_if_it_does_not_pad(api: Api) -> None:
    class Unpadded(BFloat16):
        def fsdp_pre_all_gather(
            self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
        ) -> Any:
            if rank() == 0:
                raise RuntimeError("the rank whose shard is full would wait for the other")
            return (self.held.bfloat16(),), None

    model = shard(api, make_model(hidden=5), Unpadded)
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        model(make_batch(DIM))
    if rank() == 1:
        assert "pad" in str(caught.value)
        assert "3" in str(caught.value)


@on_ranks(4)
def test_extension_is_told_all_about_the_parameter(api: Api) -> None:
    told: list[Any] = []

    class Curious(BFloat16):
        def fsdp_pre_all_gather(
            self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
        ) -> Any:
            told.append((mesh, outer_size, outer_stride, module, mp_policy))
            return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(api, make_model(), Curious, mesh=mesh_of(2, 2), mp_policy=policy)
    model(make_batch(DIM))
    assert len(told) == 2
    mesh, outer_size, outer_stride, module, mp_policy = told[0]
    assert (mesh.ndim, mesh.size()) == (1, 2)
    assert mesh.get_group() == mesh_of(2, 2).get_group("shard")
    assert outer_size == torch.Size((12, DIM))
    assert isinstance(outer_size, torch.Size)
    assert tuple(outer_stride) == (DIM, 1)
    assert module is model[0]
    assert mp_policy == policy
    assert told[1][3] is model[2]


@on_ranks(2)
def test_extension_can_tell_what_it_is_gathered_for(api: Api) -> None:
    told: list[str] = []

    class Curious(BFloat16):
        def fsdp_pre_all_gather(
            self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
        ) -> Any:
            group = api.fully_shard.state(module)._fsdp_param_group
            told.append(group._training_state.name)
            return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)

    model = shard(api, make_model(), Curious, reshard_after_forward=True)
    model(make_batch(DIM)).sum().backward()
    assert told[:2] == 2 * ["FORWARD"]
    assert set(told[2:]) == {"PRE_BACKWARD"}


@on_ranks(2)
def test_second_gather_fills_the_parameter_that_the_first_one_made(api: Api) -> None:
    outs: list[Any] = []

    class Recorded(Int8):
        def fsdp_post_all_gather(self, outputs: Any, *args: Any, out: Any = None) -> Any:
            outs.append((out, [output.untyped_storage().data_ptr() for output in outputs]))
            return super().fsdp_post_all_gather(outputs, *args, out=out)

        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            inputs, (word, _) = super().fsdp_pre_all_gather(mesh)
            return inputs, (word, type(self).__name__)

    model = make_model()
    model[0].weight = nn.Parameter(Recorded(model[0].weight.detach()))
    api.fully_shard(model[0], reshard_after_forward=True)
    api.fully_shard(model)
    whole = []
    model[0].register_forward_pre_hook(lambda module, _: whole.append(module.weight))
    for _ in range(2):
        mean_square(model(make_batch(DIM))).backward()
    assert whole[0] is whole[1]
    assert [out for out, _ in outs] == [None, *(3 * [whole[0]])]
    assert all(out is whole[0] for out, _ in outs[1:])


@on_ranks(2)
def test_what_was_gathered_may_be_the_parameter_itself(api: Api) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    shard(api, model, AsIs, reshard_after_forward=True)
    assert_trains_on_rounded_weights(model, alone, lambda whole, _: whole, 2)


@pytest.mark.parametrize("kind", [Int8, AsIs])
@on_ranks(2)
def test_whole_extended_parameters_are_freed_by_reshard(api: Api, kind: Any) -> None:
    received: list[Tensor] = []

    def post(self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        received.extend(outputs)
        return kind.fsdp_post_all_gather(self, outputs, *args, **kwargs)

    model = make_model()
    recording = type(kind.__name__, (kind,), {"fsdp_post_all_gather": post})
    shard(api, model, recording)
    seen: list[Tensor] = []
    model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    for _ in range(2):
        mean_square(model(make_batch(DIM))).backward()
        assert len({id(weight) for weight in seen}) == 1
        assert seen[0].untyped_storage().size() == 0
        assert {each.untyped_storage().size() for each in received} == {0}


@on_ranks(2)
def test_extension_is_asked_for_the_policy_s_dtype(api: Api) -> None:
    dtypes: list[torch.dtype] = []

    class Recorded(PaddedInt8):
        def fsdp_post_all_gather(
            self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
        ) -> Any:
            dtypes.append(param_dtype)
            return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)

    model = make_model()
    alone = copy.deepcopy(model)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(api, model, Recorded, mp_policy=policy)
    seen = record_weight(model[0])
    mean_square(model(my_part(make_batch(DIM)))).backward()
    assert set(dtypes) == {torch.bfloat16}
    assert torch.equal(seen[0], int8_on_ranks(alone[0].weight.detach(), 2).bfloat16())
    mean_square(alone(make_batch(DIM))).backward()
    for name, gradient in full_gradients(model).items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad, rtol=0.1, atol=0.02)
    assert held_part(model[0].weight).dtype == torch.float32


@on_ranks(2)
def test_offloaded_shards_may_be_extended(api: Api) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    policy = api.CPUOffloadPolicy(pin_memory=False)
    shard(api, model, Int8, offload_policy=policy)
    assert_trains_on_rounded_weights(model, alone, int8_on_ranks, 2)


@pytest.mark.apis("torch", "process_group")
@on_ranks(2)
def test_only_what_the_extension_sends_travels(api: Api) -> None:
    weight = 64 * 64
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    shard(api, model, Int8, reshard_after_forward=True)
    with record_traffic() as traffic:
        mean_square(model(make_batch(64))).backward()
    gathers = traffic.calls["all_gather"]
    assert 3 <= gathers <= 4  # backward may find the last layer still whole
    codes = weight // 2
    assert gathers * codes <= traffic.nbytes["all_gather"] <= gathers * (codes + 64)


@on_ranks(2)
def test_extended_parameters_are_gathered_anew_after_each_step(api: Api) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    shard(api, model, AsIs, reshard_after_forward=False)
    optimizers = [SGD(each.parameters(), lr=0.5) for each in (model, alone)]
    for _ in range(3):
        mean_square(model(my_part(make_batch(DIM)))).backward()
        mean_square(alone(make_batch(DIM))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(make_batch(DIM)), alone(make_batch(DIM)))


@on_ranks(2)
def test_gradients_of_extended_parameters_accumulate_unreduced(api: Api) -> None:
    model, batch = make_model(), make_batch(DIM)
    alone = copy.deepcopy(model)
    shard(api, model, AsIs)
    mean_square(alone(batch)).backward()
    for index, part in enumerate(my_part(batch).chunk(2)):
        model.set_requires_gradient_sync(index == 1)
        (mean_square(model(part)) / 2).backward()
        assert all((parameter.grad is None) == (index == 0) for parameter in model.parameters())
    for name, gradient in full_gradients(model).items():
        expected = alone.get_parameter(name).grad
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_methods_may_be_put_on_a_plain_shard_before_the_first_use(api: Api) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    for layer in (model[0], model[2]):
        api.fully_shard(layer)
    api.fully_shard(model)

    outs: list[Any] = []

    def pre(self: Tensor, mesh: DeviceMesh) -> Any:
        return (self.bfloat16(),), None

    def post(self: Any, *args: Any, out: Any = None) -> Any:
        outs.append(out)
        return BFloat16.fsdp_post_all_gather(self, *args, out=out)

    for layer in (model[0], model[2]):
        shard: Any = layer.weight._local_tensor
        shard.fsdp_pre_all_gather = pre.__get__(shard)
        shard.fsdp_post_all_gather = post.__get__(shard)
    assert_trains_on_rounded_weights(model, alone, bfloat16_on_ranks, 2)
    assert outs[:2] == [None, None]  # one for each layer
    assert len(outs) > 4
    assert all(out is not None for out in outs[2:])


@on_ranks(2)
def test_extended_parameters_may_be_built_on_meta(api: Api) -> None:
    alone = make_model()
    with torch.device("meta"):
        model = make_model()
    shard(api, model, Int8)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            held_part(parameter).copy_(alone.get_parameter(name).chunk(2)[rank()])
    assert type(model[0].weight._local_tensor) is Int8
    assert_trains_on_rounded_weights(model, alone, int8_on_ranks, 2)


@on_ranks(4)
def test_part_of_a_tensor_parallel_parameter_may_be_extended(api: Api) -> None:
    mesh = mesh_of(2, 2)
    dp, tp = mesh["replicate"], mesh["shard"]
    model, batch = nn.Linear(DIM, 12, bias=False), make_batch(DIM)
    whole = model.weight.detach().clone()
    mine = whole.chunk(2)[tp.get_local_rank()]
    model.weight = nn.Parameter(
        DTensor.from_local(Int8(mine.clone()), tp, [Shard(0)], run_check=False)
    )
    api.fully_shard(model, mesh=dp)
    assert torch.equal(held_part(model.weight), mine.chunk(2)[dp.get_local_rank()])
    inputs = DTensor.from_local(batch, tp, [Replicate()], run_check=False)
    for _ in range(2):
        out = model(inputs)
        assert isinstance(out, DTensor)
        rounded = int8_on_ranks(mine, 2)
        torch.testing.assert_close(out.to_local().detach(), batch @ rounded.t())
        out.to_local().sum().backward()
        expected = batch.sum(0).expand(3, DIM)
        torch.testing.assert_close(local(model.weight.grad), expected)
        model.zero_grad()


# Errors


@pytest.mark.parametrize("method", ["fsdp_pre_all_gather", "fsdp_post_all_gather"])
@on_ranks(2)
def test_one_method_without_the_other_is_refused(api: Api, method: str) -> None:
    half = type("Half", (Wrapped,), {method: getattr(Int8, method)})
    model = make_model()
    with pytest.raises(AssertionError, match="fsdp_pre_all_gather and fsdp_post_all_gather"):
        shard(api, model, half)(make_batch(DIM))


@pytest.mark.ours("refuses it in the first forward")
@on_ranks(2)
def test_refusal_of_half_an_extension_leaves_the_module_as_it_was(api: Api) -> None:
    half = type("Half", (Wrapped,), {"fsdp_pre_all_gather": Int8.fsdp_pre_all_gather})
    layer = nn.Linear(DIM, DIM)
    layer.weight = nn.Parameter(half(layer.weight.detach()))
    before = dict(layer.named_parameters())
    with pytest.raises(ValueError, match="Both fsdp_pre_all_gather"):
        api.fully_shard(layer)
    assert type(layer) is nn.Linear
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())


@pytest.mark.parametrize("missing", ["alias", "slice"])
@on_ranks(2)
def test_operators_that_nobody_needs_may_be_missing(api: Api, missing: str) -> None:
    class Narrow(Int8):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), *rest: Any) -> Any:
            is_missing = func.overloadpacket is getattr(torch.ops.aten, missing)
            # torchao's NF4Tensor can be split, and sliced from its begin.
            if is_missing and not (missing == "slice" and args[2] == 0):
                raise NotImplementedError(func)
            return super().__torch_dispatch__(func, types, args, *rest)

    model = shard(api, make_model(), Narrow)
    model(make_batch(DIM)).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.ours("goes on with the wrong rows, until something else fails")
@on_ranks(2)
def test_split_into_other_parts_than_asked_for_is_refused(api: Api) -> None:
    class Whole(Int8):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), *rest: Any) -> Any:
            if func is torch.ops.aten.split.Tensor:
                return [Whole(args[0].held)]
            return super().__torch_dispatch__(func, types, args, *rest)

    with pytest.raises(ValueError, match=r"weight: Whole.split\(6, 0\) gave 1 parts.*2 ranks"):
        shard(api, make_model(), Whole)


@on_ranks(2)
def test_methods_with_other_arguments_are_refused(api: Api) -> None:
    class Strange(Int8):
        def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:
            raise NotImplementedError

    model = shard(api, make_model(), Strange)
    with pytest.raises(AssertionError, match=r"fsdp_pre_all_gather.*outer_size"):
        model(make_batch(DIM))


@pytest.mark.ours("gathers whatever the operations on it make")
@on_ranks(2)
def test_tensor_of_another_class_without_the_methods_is_refused(api: Api) -> None:
    model = shard(api, make_model(), Wrapped)
    with pytest.raises(RuntimeError, match=r"0\.weight is a Wrapped.*ignored_params"):
        model(make_batch(DIM))


# Copies


@pytest.mark.ours("no deepcopy")
@on_ranks(2)
def test_copy_of_extended_parameters_trains_apart_from_the_original(api: Api) -> None:
    model = make_model()
    alone = copy.deepcopy(model)
    shard(api, model, Int8)
    other = copy.deepcopy(model)
    assert type(other[0].weight._local_tensor) is Int8
    assert_trains_on_rounded_weights(other, copy.deepcopy(alone), int8_on_ranks, 2)
    assert_trains_on_rounded_weights(model, alone, int8_on_ranks, 2)
    dist.barrier()


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_description_names_what_is_gathered_by_its_own_methods(api: Api) -> None:
    model = shard(api, make_model(), Int8)
    plain = shard(api, make_model(), nn.Parameter)
    text = str(api.describe(model))
    assert "own methods: 0.weight" in text, text
    sizes = [[unit.shard_nbytes for unit in api.describe(each).units] for each in (model, plain)]
    assert sizes[0] == sizes[1]
