"""In which dtypes gradients are left, added up, reduced and given to optimizers.

Expectations are written out for every torch; from 2.15 on, PyTorch's own engine has all of this, and
gradients are compared with its in every bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fullshard
from tests.api import OURS, Api, use_api
from tests.harness import Fate, mesh_of, on_ranks, rank, run_fresh
from tests.models import Scale
from tests.releases import NEWEST, RELEASE, as_of, beside_pytorch, needs_newest
from tests.training import full, local

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
Gradients = dict[str, Tensor]


class Wide(torch.autograd.Function):
    """A matrix product whose weight's gradient is float32, whatever the weight is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].float().t() @ x.float()


class WideLinear(nn.Module):
    """A linear layer by `Wide`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return Wide.apply(x, self.weight)  # type: ignore[no-any-return]


def _narrow(module: WideLinear, x: Tensor) -> Tensor:
    return x @ module.weight.t()


def three_layers() -> nn.Module:
    """Parameters of one and of two dims; the rows of some divide among ranks unevenly."""
    return nn.Sequential(nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 8, bias=False))


def two_wide() -> nn.Module:
    """Layers whose gradients are float32."""
    return nn.Sequential(WideLinear(), WideLinear())


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to ask for dtypes.

    own: the `grad_dtype` that is set on parameters; "unset" sets nothing.
    weights_only: whether it is set on the weights alone.
    stored: the parameters' dtype.
    micro: backwards without synchronisation before the one with it; then another with it.
    """

    own: Any = "unset"
    weights_only: bool = False
    stored: torch.dtype = FP32
    param_dtype: torch.dtype | None = BF16
    reduce_dtype: torch.dtype | None = None
    micro: int = 0
    make: Callable[[], nn.Module] = three_layers

    def __str__(self) -> str:
        names = {BF16: "bf16", FP32: "fp32", FP64: "fp64", None: "none"}
        own = names.get(self.own, self.own)
        words = [self.make.__name__, f"own_{own}{'_of_weights' if self.weights_only else ''}"]
        words += [f"stored_{names[self.stored]}", f"param_{names[self.param_dtype]}"]
        return "-".join([*words, f"reduce_{names[self.reduce_dtype]}", f"micro_{self.micro}"])

    def train(self, api: Any) -> nn.Module:
        """Run the backwards; return the model with its gradients."""
        torch.manual_seed(3)
        model = self.make().to(self.stored)
        for name, parameter in model.named_parameters():
            if self.own != "unset" and (name.endswith("weight") or not self.weights_only):
                parameter.grad_dtype = self.own
        policy = api.MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype)
        api.fully_shard(model, mp_policy=policy)
        for number in range(self.micro + 1):
            model.set_requires_gradient_sync(number == self.micro)
            generator = torch.Generator().manual_seed(10 * number + rank())
            batch = torch.randn(4, 8, generator=generator, dtype=self.stored)
            model(batch).float().square().sum().backward()
        return model


def _gradients(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _assert_same(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert found[name].dtype == grad.dtype, name
        torch.testing.assert_close(full(found[name]), full(grad), rtol=0, atol=0)


CASES = [
    *(Case(own, reduce_dtype=r, micro=m) for own in (BF16, FP32, None) for r in (None, FP32, BF16)
      for m in (0, 2)),
    *(Case(own, make=two_wide, reduce_dtype=r) for own in ("unset", None, FP32) for r in (None, FP32)),
    *(Case(own, weights_only=True, micro=m) for own in (BF16, None) for m in (0, 2)),
    Case(),
    Case(micro=2),
    Case(reduce_dtype=BF16, micro=2),
    Case(FP64, micro=2),
    Case(BF16, param_dtype=None, weights_only=True, micro=2),
    Case(FP32, stored=BF16, param_dtype=None, micro=2),
    Case(None, stored=BF16, param_dtype=None, make=two_wide),
]  # fmt: skip


@needs_newest
@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(2)
def test_gradients_are_those_of_pytorch_in_every_bit(api: Api, case: Case) -> None:
    found, expected = beside_pytorch(api, lambda which: _gradients(case.train(which)))
    _assert_same(found, expected)


@pytest.mark.apis("process_group")
@needs_newest
@on_ranks(4)
def test_gradients_of_replicas_are_those_of_pytorch(api: Api) -> None:
    def train(which: Any) -> Gradients:
        torch.manual_seed(3)
        model = three_layers()
        model[0].weight.grad_dtype = BF16  # type: ignore[union-attr]
        mesh = mesh_of(2, 2)
        which.fully_shard(model, mesh=mesh, mp_policy=which.MixedPrecisionPolicy(BF16))
        for number in range(3):
            model.set_requires_all_reduce(number == 2)
            generator = torch.Generator().manual_seed(10 * number + rank())
            model(torch.randn(4, 8, generator=generator)).float().sum().backward()
        return _gradients(model)

    found, expected = beside_pytorch(api, train)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert found[name].dtype == grad.dtype
        # Four ranks are added in another order.
        torch.testing.assert_close(
            full(found[name]).float(), full(grad).float(), rtol=1e-2, atol=1e-2
        )


class Normed(nn.Module):
    """A norm whose weight's gradient is a partial sum over tensor-parallel ranks, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        # Times one: PyTorch's engine warns of outputs that are views.
        return self.down(self.up(self.norm(x)).relu()) * 1  # type: ignore[no-any-return]


@needs_newest
@pytest.mark.parametrize("reduce_dtype", [None, FP32], ids=str)
@pytest.mark.parametrize("own", ["unset", FP32], ids=str)
@on_ranks(4, limit_s=60)
def test_partial_sums_of_tensor_parallel_are_completed_as_in_pytorch(
    api: Api, own: Any, reduce_dtype: torch.dtype | None
) -> None:
    mesh = mesh_of(2, 2)
    data, model_parallel = (mesh[name] for name in mesh.mesh_dim_names or ())

    def train(which: Any) -> Gradients:
        torch.manual_seed(3)
        model = Normed()
        plan = {
            "norm": SequenceParallel(sequence_dim=1),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, model_parallel, plan)
        for parameter in model.parameters() if own != "unset" else ():
            parameter.grad_dtype = own
        policy = which.MixedPrecisionPolicy(BF16, reduce_dtype)
        which.fully_shard(model, mesh=data, mp_policy=policy)
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            generator = torch.Generator().manual_seed(10 * number + data.get_local_rank())
            batch = torch.randn(2, 8, 16, generator=generator)
            model(
                batch.chunk(2, 1)[model_parallel.get_local_rank()]
            ).float().square().sum().backward()
        return _gradients(model)

    found, expected = beside_pytorch(api, train)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert found[name].dtype == grad.dtype
        assert found[name].placements == grad.placements  # type: ignore[attr-defined]
        torch.testing.assert_close(local(found[name]), local(grad), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("own", "reduce_dtype", "expected"),
    [(BF16, None, BF16), (BF16, FP32, BF16), (FP64, None, FP64), (None, None, BF16), (None, FP32, FP32)],
)  # fmt: skip
@on_ranks(2)
def test_gradients_have_the_dtype_that_parameters_ask_for(
    api: Api, own: Any, reduce_dtype: Any, expected: torch.dtype
) -> None:
    grads = _gradients(Case(own, reduce_dtype=reduce_dtype, micro=1).train(api))
    assert {grad.dtype for grad in grads.values()} == {expected}
    assert all(local(grad).dtype == expected for grad in grads.values())


def _sum_of(values: list[float], model: nn.Module, *, sync_all: bool) -> Tensor:
    """Return the gradient of a weight of ones after backwards whose gradients are these values."""
    for number, value in enumerate(values):
        model.set_requires_gradient_sync(sync_all or number == len(values) - 1)
        model(torch.full((1, 8), value)).float().sum().backward()
    (weight,) = model.parameters()
    assert weight.grad is not None
    return full(weight.grad)


@on_ranks(2)
def test_gradients_add_up_in_the_dtype_that_a_parameter_asks_for(api: Api) -> None:
    # 256 + 1 needs nine bits: bfloat16 has eight.
    for sync_all in (False, True):
        model = Scale().bfloat16()
        model.weight.grad_dtype = FP32
        api.fully_shard(model)
        total = _sum_of([256.0, 1.0, 1.0], model, sync_all=sync_all)
        torch.testing.assert_close(total, torch.full((8,), 258.0))


@on_ranks(2)
def test_meaning_of_reduce_dtype_none_follows_the_installed_torch(api: Api) -> None:
    values = [256.0, 1.0, 1.0]
    policy = fullshard.MixedPrecisionPolicy(param_dtype=BF16)
    with as_of((2, 13)):
        model = fullshard.fully_shard(Scale(), mp_policy=policy)
    total = _sum_of(values, model, sync_all=False)
    torch.testing.assert_close(total, torch.full((8,), 256.0))
    assert "gradients reduced in bfloat16" in str(fullshard.describe(model))
    with as_of((2, 15)):
        model = fullshard.fully_shard(Scale(), mp_policy=policy)
    total = _sum_of(values, model, sync_all=False)
    torch.testing.assert_close(total, torch.full((8,), 258.0))
    assert "gradients reduced in float32" in str(fullshard.describe(model))
    model = fullshard.fully_shard(Scale(), mp_policy=policy)
    installed = "float32" if RELEASE >= NEWEST else "bfloat16"
    assert f"gradients reduced in {installed}" in str(fullshard.describe(model))


@on_ranks(2)
def test_wrapper_reduces_in_param_dtype_on_every_torch(api: Api) -> None:
    with as_of((2, 15)):
        model = fullshard.FullyShardedDataParallel(
            Scale(), mixed_precision=fullshard.MixedPrecision(param_dtype=BF16)
        )
    assert "gradients reduced in bfloat16" in str(fullshard.describe(model))


@pytest.mark.parametrize("originals", [False, True])
@on_ranks(2)
def test_wrapper_refuses_a_grad_dtype_that_it_cannot_follow(api: Api, originals: bool) -> None:
    model = Scale()
    model.weight.grad_dtype = BF16
    with pytest.raises(ValueError, match="weight asks for gradients in"):
        fullshard.FullyShardedDataParallel(model, use_orig_params=originals)
    assert model.weight.shape == (8,)


@on_ranks(2)
def test_gradients_that_come_wider_than_parameters_are_not_rounded(api: Api) -> None:
    model = fullshard.fully_shard(
        WideLinear(), mp_policy=fullshard.MixedPrecisionPolicy(BF16, FP32)
    )
    value = 1 + 2**-7  # exact in bfloat16; its square is not
    model(torch.full((1, 8), value)).float().backward(torch.full((1, 8), value))
    expected = torch.full((8, 8), value**2)
    torch.testing.assert_close(full(model.weight.grad), expected, rtol=0, atol=0)


@pytest.mark.apis("process_group")
@on_ranks(2)
def test_ranks_may_differ_in_the_width_of_gradients_where_a_backend_sums(api: Api) -> None:
    fullshard.set_default_comm("collectives")
    model = fullshard.fully_shard(
        WideLinear(), mp_policy=fullshard.MixedPrecisionPolicy(BF16, FP32)
    )
    value = 1 + 2**-7
    for wide_on in (0, 1):
        x = torch.full((1, 8), value, dtype=BF16)
        whole = model.weight
        forward = WideLinear.forward if rank() == wide_on else _narrow
        model.forward = functools.partial(forward, model)
        model(x).float().backward(torch.full((1, 8), value))
        assert whole.grad is not None
    rounded = torch.tensor(value**2).bfloat16().float()
    expected = (rounded + value**2) / 2 * 2
    torch.testing.assert_close(full(model.weight.grad), expected.expand(8, 8))


def _differ_in_width(path: str) -> None:
    with use_api(path):
        model = fullshard.fully_shard(
            WideLinear(), mp_policy=fullshard.MixedPrecisionPolicy(BF16, FP32)
        )
        model.forward = functools.partial(  # type: ignore[method-assign]
            _narrow if rank() else WideLinear.forward, model
        )
        model(torch.ones(1, 8, dtype=BF16)).float().sum().backward()


@pytest.mark.parametrize("path", [path for path in OURS if path != "collectives"])
def test_ranks_that_differ_in_the_width_of_gradients_are_told_so(path: str) -> None:
    for outcome in run_fresh(2, _differ_in_width, path=path):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "DivergenceError" in outcome.error
        assert "float32 for bfloat16" in outcome.text


@on_ranks(2)
def test_grad_dtype_survives_conversion_and_keeps_the_gradient(api: Api) -> None:
    model = Scale()
    model.weight.grad_dtype = FP64
    api.fully_shard(model)
    _sum_of([3.0], model, sync_all=True)
    model.to(BF16)
    assert model.weight.dtype == BF16
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == FP64
    assert model.weight.grad_dtype == FP64
    total = _sum_of([1.0], model.to(FP32), sync_all=True)
    torch.testing.assert_close(total, torch.full((8,), 4.0, dtype=FP64))


@on_ranks(2)
def test_grad_dtype_survives_loading_by_assignment(api: Api) -> None:
    model = Scale()
    model.weight.grad_dtype = BF16
    api.fully_shard(model)
    state = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    model.load_state_dict(state, assign=True)
    _sum_of([3.0], model, sync_all=True)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == BF16


@on_ranks(2)
def test_grad_dtype_is_read_back_after_loading_onto_the_meta_device(api: Api) -> None:
    with torch.device("meta"):
        model = Scale()
    model.weight.grad_dtype = BF16
    api.fully_shard(model)
    loaded = api.fully_shard(Scale())
    model.load_state_dict(loaded.state_dict(), assign=True)
    assert model.weight.grad_dtype == BF16
    _sum_of([3.0], model, sync_all=True)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == BF16


@on_ranks(2)
def test_grad_dtype_may_be_set_after_sharding_until_the_first_forward(api: Api) -> None:
    model = nn.Sequential(Scale())
    api.fully_shard(model[0])
    api.fully_shard(model)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        parameter.grad_dtype = BF16
    _sum_of([3.0], model, sync_all=True)
    (weight,) = model.parameters()
    assert weight.grad is not None
    assert weight.grad.dtype == BF16


@on_ranks(2)
def test_grad_dtype_may_be_set_while_somebody_keeps_a_weight(api: Api) -> None:
    class Keeping(Scale):
        def forward(self, x: Tensor) -> Tensor:
            self.__dict__["kept"] = self.weight
            return super().forward(x)

    model = Keeping()
    api.fully_shard(model)
    _sum_of([3.0], model, sync_all=True)
    model.weight.grad = None
    model.weight.grad_dtype = BF16
    model.to("cpu")
    total = _sum_of([3.0], model.half(), sync_all=True)
    assert total.dtype == BF16


@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(2)
def test_sgd_and_clipping_work_on_such_gradients(api: Api, foreach: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(5)
        model = three_layers().bfloat16()
        for parameter in model.parameters():
            parameter.grad_dtype = FP32
        return model

    def step(model: nn.Module, steps: Any, x: Tensor) -> None:
        model(x).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        steps.step()
        steps.zero_grad()

    alone, model = build(), api.fully_shard(build())
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=foreach)
        for m in (alone, model)
    ]
    for number in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
        for each, steps in zip((alone, model), optimizers, strict=True):
            step(each, steps, x)
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full(other), one.detach(), rtol=2e-2, atol=2e-2)


# One parameter's compute dtype


def _norms_in_float32(parameter: nn.Parameter) -> torch.dtype | None:
    return parameter.dtype if parameter.dim() == 1 else None


class Mixed(nn.Module):
    """Notes in which dtypes it sees its parameters and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"weight": self.weight.dtype, "scale": self.scale.dtype, "x": x.dtype}
        return (x @ self.weight.t()).float() * self.scale


@on_ranks(2)
def test_parameters_may_be_exempt_from_param_dtype(api: Api) -> None:
    asked: list[torch.Size] = []

    def override(parameter: nn.Parameter) -> torch.dtype | None:
        asked.append(parameter.shape)
        return _norms_in_float32(parameter)

    def train(which: Any) -> Gradients:
        torch.manual_seed(3)
        policy = which.MixedPrecisionPolicy(BF16, param_dtype_override_fn=override)
        model = which.fully_shard(Mixed(), mp_policy=policy)
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank()))
            model(x).sum().backward()
        assert model.seen == {"weight": BF16, "scale": FP32, "x": BF16}
        return _gradients(model)

    found, expected = beside_pytorch(api, train)
    assert asked[:2] == [(8, 8), (8,)]
    assert {grad.dtype for grad in found.values()} == {FP32}
    if expected is not None:
        assert len(asked) == 4
        _assert_same(found, expected)


@pytest.mark.parametrize("wrong", [torch.float64, "float32"])
@on_ranks(2)
def test_wrong_override_is_refused_before_anything_is_changed(api: Api, wrong: Any) -> None:
    model = Mixed()
    policy = fullshard.MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda p: wrong)
    with pytest.raises(ValueError, match="param_dtype_override_fn must return"):
        fullshard.fully_shard(model, mp_policy=policy)
    assert type(model) is Mixed
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_override_has_to_be_a_function() -> None:
    with pytest.raises(fullshard.ShardingError, match="expected a function"):
        fullshard.MixedPrecisionPolicy(param_dtype_override_fn=torch.float32)  # type: ignore[arg-type]


@on_ranks(2)
def test_gradients_of_several_dtypes_travel_at_once_as_in_pytorch(api: Api) -> None:
    fullshard.set_default_comm("collectives")
    policy = fullshard.MixedPrecisionPolicy(BF16, param_dtype_override_fn=_norms_in_float32)
    with as_of((2, 15)):
        model = fullshard.fully_shard(Mixed(), mp_policy=policy)
    calls = []

    class Counting(fullshard.DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs["input_tensor"].dtype)
            return super().__call__(*args, **kwargs)

    model.set_custom_reduce_scatter(Counting())
    model(torch.randn(4, 8)).sum().backward()
    assert calls == [FP32]
