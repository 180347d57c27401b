"""The four fields of `MixedPrecisionPolicy`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.engine.precision import Swap, map_tensors, undo_swaps
from tests.api import Api
from tests.harness import on_ranks, rank
from tests.models import mlp
from tests.selection import one_way
from tests.training import local, make_batch, mean_square, my_part

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

BF16 = torch.bfloat16


class Probe(nn.Module):
    """Passes on what it gets; notes the dtypes of its parameter and of all it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("offset", torch.zeros(8))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, *, extra: dict[str, Any] | None = None) -> Tensor:
        self.seen = {"weight": self.weight.dtype, "offset": self.offset.dtype, "x": x.dtype}
        self.seen |= {name: value.dtype for name, value in (extra or {}).items()}
        return x * self.weight + self.offset.to(x.dtype)


@on_ranks(2)
def test_param_dtype_is_what_forward_sees_and_not_what_is_kept(api: Api) -> None:
    model = api.fully_shard(Probe(), mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
    out = model(make_batch(8))
    assert model.seen == {"weight": BF16, "offset": torch.float32, "x": BF16}
    assert out.dtype == BF16
    mean_square(out).backward()
    assert local(model.weight).dtype == torch.float32
    assert local(model.weight.grad).dtype == torch.float32


@on_ranks(2)
def test_floating_inputs_are_cast_wherever_they_are_and_integers_are_not(api: Api) -> None:
    model = api.fully_shard(Probe(), mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
    model(make_batch(8), extra={"float": torch.ones(1), "int": torch.ones(1, dtype=torch.long)})
    assert model.seen["float"] == BF16
    assert model.seen["int"] == torch.long


def test_what_is_written_in_place_of_an_input_is_not_taken_for_it() -> None:
    before, swaps = torch.ones(1), list[Swap]()
    container = [before]
    map_tensors(torch.clone, container, swaps)
    container.clear()  # frees the clone, whose `id` the next may take
    container += [torch.zeros(1), torch.zeros(1)]
    undo_swaps(swaps)
    assert not any(each is before for each in container)


@on_ranks(2)
def test_inputs_are_not_cast_when_told_so(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = api.fully_shard(Probe(), mp_policy=policy)
    model(make_batch(8))
    assert model.seen["x"] == torch.float32
    assert model.seen["weight"] == BF16


@on_ranks(2)
def test_output_dtype_casts_what_forward_returns(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)
    model = api.fully_shard(Probe(), mp_policy=policy)
    assert model(make_batch(8)).dtype == torch.float32
    policy = api.MixedPrecisionPolicy(output_dtype=BF16)
    model = api.fully_shard(Probe(), mp_policy=policy)
    assert model(make_batch(8)).dtype == BF16


@on_ranks(2)
def test_reduce_dtype_is_what_gradients_are_added_in(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model = api.fully_shard(Probe(), mp_policy=policy)
    # 256 + 1 needs nine bits: bfloat16 has eight and would give 256 or 258.
    x = torch.full((1, 8), 256.0 if rank() == 0 else 1.0)
    model(x).float().sum().backward()
    torch.testing.assert_close(local(model.weight.grad), torch.full((4,), 128.5))


@on_ranks(2)
def test_reduce_dtype_alone_changes_no_computation(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(reduce_dtype=BF16)
    model = api.fully_shard(Probe(), mp_policy=policy)
    out = model(make_batch(8))
    assert out.dtype == torch.float32
    mean_square(out).backward()
    gradient = local(model.weight.grad)
    assert gradient.dtype == torch.float32


@on_ranks(2)
def test_gradients_accumulate_in_reduce_dtype_without_synchronisation(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model = api.fully_shard(Probe(), mp_policy=policy)
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    for value in (256.0, 1.0, 1.0):
        model.set_requires_gradient_sync(requires_gradient_sync=False)
        model(torch.full((1, 8), value)).float().sum().backward()
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    model(torch.full((1, 8), 1.0)).float().sum().backward()
    torch.testing.assert_close(local(model.weight.grad), torch.full((4,), 259.0))


@on_ranks(2)
def test_units_of_one_model_may_have_different_policies(api: Api) -> None:
    model = nn.Sequential(Probe(), Probe())
    api.fully_shard(model[0], mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
    api.fully_shard(model[1], mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.float32))
    api.fully_shard(model)
    out = model(make_batch(8))
    assert model[0].seen["x"] == BF16
    assert model[1].seen == dict.fromkeys(("weight", "offset", "x"), torch.float32)
    mean_square(out).backward()
    assert all(local(p.grad).dtype == torch.float32 for p in model.parameters())


@on_ranks(2)
def test_bfloat16_model_without_policy_trains_in_bfloat16(api: Api) -> None:
    model = api.fully_shard(mlp().bfloat16())
    out = model(my_part(make_batch(16)).bfloat16())
    mean_square(out).backward()
    assert all(local(p).dtype == BF16 for p in model.parameters())
    assert all(local(p.grad).dtype == BF16 for p in model.parameters())


@on_ranks(2)
def test_float16_gradients_do_not_overflow_on_the_way(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.float16)
    model = api.fully_shard(Probe(), mp_policy=policy)
    # 40000 twice is above float16's largest number, 65504; their mean is not.
    model(torch.full((1, 8), 40000.0)).float().sum().backward()
    torch.testing.assert_close(local(model.weight.grad), torch.full((4,), 40000.0))


@on_ranks(2)
def test_policy_is_frozen(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=BF16)
    with pytest.raises(AttributeError):
        policy.param_dtype = torch.float32
    assert policy == api.MixedPrecisionPolicy(BF16, None, None, True)
