"""Plain parameters that `spmd_types` annotates: how they are sharded, trained and type-checked.

The package is optional. Without it these tests are skipped, but for those of its absence.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from tests.api import Api
from tests.harness import on_ranks
from tests.releases import RELEASE, beside_pytorch
from tests.selection import one_way, repeats
from tests.test_architecture import MODULES
from tests.training import (
    assert_equal,
    full_gradients,
    full_parameters,
    local_gradients,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("tests/parity/test_matrix.py: annotations say what is exchanged, not how")

HAS_PACKAGE = importlib.util.find_spec("spmd_types") is not None
needs_package = pytest.mark.skipif(not HAS_PACKAGE, reason="needs the package spmd_types")

if HAS_PACKAGE:
    import spmd_types as spmd
    from spmd_types.checker import typecheck

DIM, HIDDEN = 8, 12
Axes = tuple[tuple[str, int], ...]
PLAIN: Axes = (("dp", 2), ("tp", 2))


@functools.cache
def _mesh(axes: Axes) -> DeviceMesh:
    return init_device_mesh(
        "cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes)
    )


class _Layer(nn.Module):
    """Two linear layers behind a scale, with a way past them. x: (..., dim) -> same.

    tp: the axis over which the hidden dim is divided; None for all of it.
    terms: the type of what is summed over it. On request the checker tells V from P itself.
    """

    terms: Any = None

    def __init__(self, tp: Any = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(DIM) + 0.5)
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM) / 3)
        self.up_bias = nn.Parameter(torch.randn(HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN) / 3)
        self.down_bias = nn.Parameter(torch.randn(DIM) / 3)
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer. Over ``tp``, x and the result are I, and the sum over it is made here."""
        whole = x
        if self.tp is not None:
            options = {"op_dtype": torch.float32}  # of the sum in backward; has to be said for bf16
            whole = spmd.invariant_to_replicate(x, self.tp, backward_options=options)
        y = F.linear(F.linear(whole * self.scale, self.up, self.up_bias).tanh(), self.down)
        if self.tp is not None:
            y = spmd.all_reduce(y, self.tp, src=self.terms or spmd.V, dst=spmd.I)
        return x + y + self.down_bias


def _kinds() -> dict[str, Any]:
    """The type on the tensor-parallel axis, by the name of a parameter in a layer."""
    return {
        "scale": spmd.R,  # each rank sees a part of what it does: its gradient is a partial sum
        "up": spmd.S(0),
        "up_bias": spmd.S(0),
        "down": spmd.S(1),
        "down_bias": spmd.I,
    }


def _group(mesh: DeviceMesh, name: str) -> Any:
    return mesh.get_group(name)


def _annotate(parameter: nn.Parameter, mesh: DeviceMesh, kinds: dict[str, Any]) -> None:
    spmd.assert_type(parameter, {_group(mesh, name): kind for name, kind in kinds.items()})


def _make_model() -> nn.Sequential:
    return nn.Sequential(_Layer(), nn.Tanh(), _Layer())


def _divide(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Return the part of a whole model that this rank has over "tp", annotated on all axes."""
    model = copy.deepcopy(model)
    place, size = mesh.get_local_rank("tp"), mesh["tp"].size()
    for layer in model:
        for name, kind in _kinds().items() if isinstance(layer, _Layer) else ():
            layer.tp = _group(mesh, "tp")
            whole = getattr(layer, name).detach()
            part = whole.chunk(size, kind.dim)[place] if isinstance(kind, spmd.S) else whole
            parameter = nn.Parameter(part.contiguous())
            other = {each: spmd.R for each in mesh.mesh_dim_names or () if each != "tp"}
            _annotate(parameter, mesh, {**other, "tp": kind})
            setattr(layer, name, parameter)
    return model


def _dims(api: Api, mesh: DeviceMesh) -> Any:
    """Name the data-parallel dims of a mesh: all but "tp", those that begin with "r" replicate."""
    names = [name for name in mesh.mesh_dim_names or () if name != "tp"]
    shard = tuple(name for name in names if not name.startswith("r"))
    replicate = tuple(name for name in names if name.startswith("r"))
    return api.DataParallelMeshDims(shard=shard or None, replicate=replicate or None)


def _shard(api: Api, model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    options = {"mesh": mesh, "dp_mesh_dims": _dims(api, mesh), **options}
    for layer in model:
        if isinstance(layer, _Layer):
            api.fully_shard(layer, **options)
    api.fully_shard(model, **options)
    return model


def _part(batch: Tensor, mesh: DeviceMesh) -> Tensor:
    """Cut the part of a batch that the ranks of this data-parallel place have."""
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name != "tp":
            batch = batch.chunk(mesh.size(axis))[mesh.get_local_rank(axis)]
    return batch


@contextlib.contextmanager
def _checking(mesh: DeviceMesh, *, is_local: bool = True) -> Iterator[None]:
    with spmd.set_current_mesh(mesh), typecheck(local=is_local):
        yield


def _typed_loss(model: nn.Module, part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Compute a loss of what this data-parallel rank has, in terms that the checker knows."""
    loss = mean_square(model(_input(mesh, part)))
    return spmd.reinterpret(loss, _group(mesh, "dp"), src=spmd.V, dst=spmd.P)


# Training


@needs_package
@pytest.mark.parametrize(
    "axes",
    [
        PLAIN,
        (("replicate", 2), ("dp", 1), ("tp", 2)),
        (("dp", 2), ("cp", 1), ("tp", 2)),
        (("dp", 1), ("tp", 4)),
    ],
    ids=str,
)
@on_ranks(4)
def test_annotated_parameters_train_like_one_process(api: Api, axes: Axes) -> None:
    _assert_trains_like_one_process(api, _mesh(axes))


@needs_package
@pytest.mark.ours("describes them in another order of the axes than the mesh's")
@pytest.mark.parametrize(
    "axes", [(("tp", 2), ("dp", 2)), (("dp", 1), ("tp", 2), ("replicate", 2))], ids=str
)
@on_ranks(4)
def test_data_parallel_axes_may_come_after_others(api: Api, axes: Axes) -> None:
    _assert_trains_like_one_process(api, _mesh(axes))


@needs_package
@pytest.mark.ours("takes axes of one rank for missing ones")
@pytest.mark.parametrize("axes", [(("dp", 2), ("tp", 1)), (("dp", 1), ("tp", 2))], ids=str)
@on_ranks(2)
def test_axes_of_one_rank_need_no_annotation(api: Api, axes: Axes) -> None:
    _assert_trains_like_one_process(api, _mesh(axes))


@needs_package
@pytest.mark.ours("takes them for plain tensors without an annotation")
@on_ranks(1)
def test_program_for_many_ranks_runs_on_one(api: Api) -> None:
    _assert_trains_like_one_process(api, _mesh((("dp", 1), ("tp", 1))))


@pytest.mark.long  # eight ranks; each two of these axes meet above
@needs_package
@repeats(lambda s: s["api"] == "process_group")
@on_ranks(8)
def test_hybrid_mesh_with_every_axis_trains_like_one_process(api: Api) -> None:
    _assert_trains_like_one_process(api, _mesh((("replicate", 2), ("dp", 2), ("tp", 2))))


def _assert_trains_like_one_process(api: Api, mesh: DeviceMesh) -> None:
    alone, batch = _make_model(), make_batch(DIM, size=16)
    model = _shard(api, _divide(alone, mesh), mesh)
    assert_equal(full_parameters(model), full_parameters(alone))
    optimizers = [SGD(each.parameters(), lr=0.5) for each in (model, alone)]
    for step in range(2):
        rolled = batch.roll(step, 0)
        mean_square(model(_part(rolled, mesh))).backward()
        mean_square(alone(rolled)).backward()
        expected = full_gradients(alone)
        assert all(gradient.abs().max() > 1e-3 for gradient in expected.values())
        assert_equal(full_gradients(model), expected, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(full_parameters(model), full_parameters(alone), rtol=1e-4, atol=1e-6)


@needs_package
@on_ranks(4)
def test_parameter_is_stored_as_its_annotation_says(api: Api) -> None:
    mesh = _mesh(PLAIN)
    model = _shard(api, _divide(_make_model(), mesh), mesh)
    placements = {name: p.placements for name, p in model[0].named_parameters()}
    assert placements["scale"] == (Shard(0), Replicate())
    assert placements["down"] == (Shard(0), Shard(1))
    assert placements["down_bias"] == (Shard(0), Replicate())
    assert all(p.device_mesh == mesh for p in model.parameters())
    assert tuple(model[0].up.shape) == (HIDDEN, DIM)
    assert tuple(model[0].up.to_local().shape) == (HIDDEN // 4, DIM)
    model[0].unshard()
    assert not any(isinstance(p, DTensor) for p in model[0].parameters())
    assert tuple(model[0].up.shape) == (HIDDEN // 2, DIM)
    model[0].reshard()
    assert all(isinstance(p, DTensor) for p in model[0].parameters())


@needs_package
@on_ranks(4)
def test_other_axes_are_summed_once_for_each_partial_gradient(api: Api) -> None:
    mesh = _mesh(PLAIN)
    layer = _divide(_make_model(), mesh)[0]
    api.fully_shard(layer, mesh=mesh, dp_mesh_dims=_dims(api, mesh))
    loss = mean_square(layer(_part(make_batch(DIM, size=16), mesh)))
    with CommDebugMode() as traffic:
        loss.backward()
    # Of the five, one is R over "tp". `x` needs no gradient, so nothing else is summed there.
    assert traffic.get_comm_counts()[torch.ops.c10d_functional.all_reduce] == 1


@needs_package
@on_ranks(4)
def test_gradients_that_wait_for_a_reduction_are_completed_once(api: Api) -> None:
    mesh = _mesh(PLAIN)
    alone, batch = _make_model(), make_batch(DIM, size=24)
    model = _shard(api, _divide(alone, mesh), mesh)
    parts = _part(batch, mesh).chunk(3)
    for index, part in enumerate(parts):
        model.set_requires_gradient_sync(index == 2)
        (mean_square(model(part)) / 3).backward()
    mean_square(alone(batch)).backward()
    assert_equal(full_gradients(model), full_gradients(alone), rtol=1e-4, atol=1e-6)


@needs_package
@on_ranks(2)
def test_replicas_are_stored_and_reduced_as_well(api: Api) -> None:
    mesh = _mesh((("dp", 1), ("tp", 2)))
    alone, batch = _make_model(), make_batch(DIM)
    model = _divide(alone, mesh)
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=api.DataParallelMeshDims(replicate="dp"))
    assert model[0].up.placements == (Replicate(), Shard(0))
    mean_square(model(batch)).backward()
    mean_square(alone(batch)).backward()
    assert_equal(full_gradients(model), full_gradients(alone), rtol=1e-4, atol=1e-6)


# Beside PyTorch's engine


Steps = list[tuple[float, dict[str, Tensor], dict[str, Tensor]]]


def _train(api: Api, mesh: DeviceMesh, dtypes: Any, *, checks: bool, num_micro: int = 1) -> Steps:
    torch.manual_seed(1)
    policy = api.MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    model = _shard(api, _divide(_make_model(), mesh), mesh, mp_policy=policy)
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    steps: Steps = []
    for step in range(3):
        losses = []
        for index, batch in enumerate(make_batch(DIM, size=24).roll(step, 0).chunk(num_micro)):
            model.set_requires_gradient_sync(index == num_micro - 1)
            part = _part(batch, mesh)
            with _checking(mesh) if checks else contextlib.nullcontext():
                loss = _typed_loss(model, part, mesh) if checks else mean_square(model(part))
                loss.backward()
            losses.append(loss.item())
        gradients = local_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((sum(losses), gradients, full_parameters(model)))
    return steps


@needs_package
@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize(
    "dtypes",
    [(None, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)],
    ids=["fp32", "bf16_reduce_fp32", "bf16"],
)
@on_ranks(4)
def test_steps_are_those_of_pytorch(api: Api, dtypes: Any, num_micro: int, checks: bool) -> None:
    mesh = _mesh(PLAIN)
    train = functools.partial(_train, mesh=mesh, dtypes=dtypes, checks=checks, num_micro=num_micro)
    found, expected = beside_pytorch(api, train)
    assert all(torch.isfinite(torch.tensor(loss)) for loss, _, _ in found)
    assert found[0][0] > found[-1][0]
    for ours, theirs in zip(found, expected or (), strict=False):
        # Ours sums each micro-batch's gradient over "tp", PyTorch's engine what they add up to.
        rtol, atol = (0.0, 0.0) if num_micro == 1 else (1e-5, 1e-7)
        assert ours[0] == pytest.approx(theirs[0], rel=rtol, abs=0.0)
        assert_equal(ours[1], theirs[1], rtol=rtol, atol=atol)
        assert_equal(ours[2], theirs[2], rtol=rtol, atol=atol)


class _Term(nn.Module):
    """Multiplies by a weight of which each rank of ``tp`` has a term; without it, by all of it."""

    def __init__(self, tp: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, DIM + 1))
        self.tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the sum over ``tp``."""
        weight = self.weight
        if self.tp is not None:
            weight = spmd.all_reduce(weight, self.tp, src=spmd.P, dst=spmd.I)
        return x * weight


def _make_term(mesh: DeviceMesh) -> _Term:
    model = _Term(_group(mesh, "tp"))
    model.weight.data *= 0.25 if mesh.get_local_rank("tp") == 0 else 0.75
    _annotate(model.weight, mesh, {"dp": spmd.R, "tp": spmd.P})
    return model


@needs_package
@on_ranks(4)
def test_frozen_parameter_may_be_a_sum_over_other_axes(api: Api) -> None:
    mesh, batch = _mesh(PLAIN), make_batch(DIM)
    model = _make_term(mesh).requires_grad_(False)
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=_dims(api, mesh))
    assert model.weight.placements == (Shard(0), Partial())
    assert_equal(full_parameters(model), full_parameters(_Term()))
    torch.testing.assert_close(model(batch), _Term()(batch))


@needs_package
@pytest.mark.ours("raises in backward")
@on_ranks(4)
def test_trained_parameter_may_not_be_a_sum_over_other_axes(api: Api) -> None:
    mesh = _mesh(PLAIN)
    model = _make_term(mesh)
    with pytest.raises(api.errors.ShardingError, match=r"_Term: weight .*P on tp"):
        api.fully_shard(model, mesh=mesh, dp_mesh_dims=_dims(api, mesh))
    assert type(model) is _Term
    assert not isinstance(model.weight, DTensor)


# Types are checked


@needs_package
@pytest.mark.parametrize("is_local", [True, False], ids=["local", "global"])
@on_ranks(4)
def test_annotation_is_seen_inside_forward(api: Api, is_local: bool) -> None:
    mesh = _mesh(PLAIN)
    model = _shard(api, _divide(_make_model(), mesh), mesh)
    dp, tp = (spmd.MeshAxis.of(_group(mesh, name)) for name in ("dp", "tp"))
    seen: dict[str, Any] = {}

    def look(layer: nn.Module, _: Any) -> None:
        for name, parameter in layer.named_parameters():
            seen[name] = spmd.get_local_type(parameter)
            assert type(parameter) is nn.Parameter
            spec = spmd.get_partition_spec(parameter)
            seen[f"{name} spec"] = None if spec is None else tuple(spec)

    model[0].terms = model[2].terms = spmd.V if is_local else spmd.P
    model[0].register_forward_pre_hook(look)
    part = _part(make_batch(DIM, size=16), mesh)
    for _ in range(2):
        seen.clear()
        with _checking(mesh, is_local=is_local):
            loss = model(_input(mesh, part, dp=spmd.S(0))).square().sum()
            if is_local:  # otherwise the checker finds that itself
                loss = spmd.reinterpret(loss, _group(mesh, "dp"), src=spmd.V, dst=spmd.P)
            loss.backward()
        assert seen["scale"] == {dp: spmd.R, tp: spmd.R}
        assert seen["up"] == {dp: spmd.R, tp: spmd.V}
        assert seen["up spec"] == (tp, None)
        assert seen["down spec"] == (None, tp)
        assert seen["down_bias"] == {dp: spmd.R, tp: spmd.I}
        assert seen["down_bias spec"] is None
    assert not any(spmd.has_local_type(parameter) for parameter in model.parameters())


@needs_package
@on_ranks(4)
def test_annotation_may_leave_data_parallel_axes_out(api: Api) -> None:
    mesh = _mesh(PLAIN)
    layer = _Layer(_group(mesh, "tp"))
    for name, kind in _kinds().items():
        _annotate(getattr(layer, name), mesh, {"tp": kind})
    with spmd.set_current_mesh(mesh):
        api.fully_shard(layer, mesh=mesh, dp_mesh_dims=_dims(api, mesh))
    dp, tp = (spmd.MeshAxis.of(_group(mesh, name)) for name in ("dp", "tp"))
    with _checking(mesh):
        layer(_input(mesh))
    layer.unshard()
    assert spmd.get_local_type(layer.scale) == {dp: spmd.R, tp: spmd.R}
    assert spmd.get_local_type(layer.up) == {dp: spmd.R, tp: spmd.V}


@needs_package
@on_ranks(4)
def test_types_may_be_checked_on_axes_that_divide_the_data_parallel_ones(api: Api) -> None:
    stored, checked = _mesh((("dp", 4),)), _mesh((("outer", 2), ("inner", 2)))
    outer, inner = (spmd.MeshAxis.of(_group(checked, name)) for name in ("outer", "inner"))
    linear = nn.Linear(DIM, DIM)
    for parameter in linear.parameters():
        spmd.assert_type(parameter, {inner: spmd.R})
    with spmd.set_current_mesh(checked):
        api.fully_shard(linear, mesh=stored, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))
    with _checking(checked):
        with spmd.no_typecheck():
            x = torch.ones(2, DIM)
        spmd.assert_type(x, {outer: spmd.V, inner: spmd.V})
        types = spmd.get_local_type(linear(x))
    linear.unshard()
    assert types == {outer: spmd.V, inner: spmd.V}
    assert spmd.get_local_type(linear.weight) == {outer: spmd.R, inner: spmd.R}


def _input(mesh: DeviceMesh, values: Tensor | None = None, **kinds: Any) -> Tensor:
    """Return an input of a model, such as comes from outside: V over "dp", I over "tp", or as said."""
    with spmd.no_typecheck():
        x = (torch.ones(2, DIM) if values is None else values.clone()).requires_grad_()
    _annotate(x, mesh, {"dp": spmd.V, "tp": spmd.I, **kinds})
    return x


@needs_package
@pytest.mark.ours("checks what it does itself")
@on_ranks(4)
def test_modules_may_be_sharded_and_gathered_while_types_are_checked(api: Api) -> None:
    mesh = _mesh(PLAIN)
    model = _divide(_make_model(), mesh)
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    with _checking(mesh):
        _shard(api, model, mesh)
        for module in (model[0], model[2]):
            module.unshard()
    assert_equal({name: p.detach() for name, p in model.named_parameters()}, whole)
    with _checking(mesh):
        model[0].reshard()
    assert isinstance(model[0].up, DTensor)


class _Join(nn.Module):
    """Multiplies, with types of its own for each input."""

    def __init__(self, tp: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.tp = tp
        self.seen: list[Any] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Add what is summed over ``tp`` to x."""
        self.seen = [spmd.get_local_type(x), spmd.get_local_type(y)]
        return x + spmd.all_reduce(y * self.weight, self.tp, src=spmd.V, dst=spmd.I)


@needs_package
@pytest.mark.ours("gives all inputs of a module one type")
@on_ranks(4)
def test_each_input_keeps_its_own_type(api: Api) -> None:
    mesh = _mesh(PLAIN)
    dp, tp = (spmd.MeshAxis.of(_group(mesh, name)) for name in ("dp", "tp"))
    join = _Join(_group(mesh, "tp"))
    _annotate(join.weight, mesh, {"dp": spmd.R, "tp": spmd.R})
    api.fully_shard(join, mesh=mesh, dp_mesh_dims=_dims(api, mesh))
    with _checking(mesh):
        out = join(_input(mesh), _input(mesh, tp=spmd.V))
        loss = spmd.reinterpret(out.sum(), _group(mesh, "dp"), src=spmd.V, dst=spmd.P)
        loss.backward()
    assert join.seen == [{dp: spmd.V, tp: spmd.I}, {dp: spmd.V, tp: spmd.V}]
    assert join.weight.grad.full_tensor().tolist() == DIM * [4.0]


@needs_package
@pytest.mark.parametrize(
    "recomputes",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                RELEASE < (2, 12), reason="spmd_types does not know the checkpoints of torch 2.11"
            ),
        ),
    ],
)
@on_ranks(4)
def test_types_pass_casts_of_inputs_and_recomputation(api: Api, recomputes: bool) -> None:
    mesh = _mesh(PLAIN)
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = _divide(_make_model(), mesh)
    options = {"mesh": mesh, "dp_mesh_dims": _dims(api, mesh), "mp_policy": policy}
    for layer in (model[0], model[2]):
        api.fully_shard(layer, **options)
        if recomputes:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    api.fully_shard(model, **options)
    dp, tp = (spmd.MeshAxis.of(_group(mesh, name)) for name in ("dp", "tp"))
    with _checking(mesh):
        out = model(_input(mesh))
        assert out.dtype == torch.bfloat16
        assert spmd.get_local_type(out) == {dp: spmd.V, tp: spmd.I}
        mean = mean_square(out)
        spmd.reinterpret(mean, _group(mesh, "dp"), src=spmd.V, dst=spmd.P).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@needs_package
@pytest.mark.ours("drops it")
@on_ranks(4)
def test_type_of_an_output_passes_its_cast(api: Api) -> None:
    mesh = _mesh(PLAIN)
    model = _divide(_make_model(), mesh)
    policy = api.MixedPrecisionPolicy(output_dtype=torch.float64)
    api.fully_shard(model, mesh=mesh, dp_mesh_dims=_dims(api, mesh), mp_policy=policy)
    dp, tp = (spmd.MeshAxis.of(_group(mesh, name)) for name in ("dp", "tp"))
    with _checking(mesh):
        out = model(_input(mesh))
    assert out.dtype == torch.float64
    assert spmd.get_local_type(out) == {dp: spmd.V, tp: spmd.I}


@needs_package
@on_ranks(4)
def test_wrong_types_of_the_program_are_still_found(api: Api) -> None:
    mesh = _mesh(PLAIN)
    model = _shard(api, _divide(_make_model(), mesh), mesh)
    with _checking(mesh), pytest.raises(spmd.SpmdTypeError):
        model(_input(mesh, tp=spmd.P))


# Refusals


_REFUSED = {
    # What is annotated by name of the axis, the error, and what is passed besides the mesh.
    "sharded_over_data": ({"dp": "S0", "tp": "R"}, "spmd.R|expected R", {}),
    "invariant_over_data": ({"dp": "I", "tp": "R"}, "spmd.R|expected R", {}),
    "varying": ({"dp": "R", "tp": "V"}, "Varying", {}),
    "no_names": ({"dp": "R", "tp": "R"}, "dp_mesh_dims", {"mesh": "dp", "dims": None}),
    "partial": ({"dp": "R"}, "storage mesh|does not say", {}),
    "current_mesh_lacks_axis": ({"dp": "R"}, "not in that mesh|does not have", {"current": "tp"}),
    "current_mesh_is_smaller": ({"tp": "R"}, "same ranks", {"current": "tp"}),
    "incomplete": ({"dp": "R"}, "incomplete", {"current": "both"}),
    "other_axes": ({"all": "R"}, "neither", {}),
    "on_a_smaller_mesh": (
        {"dp": "R", "tp": "R"},
        "cannot be restored|does not say",
        {"mesh": "dp"},
    ),
}


@needs_package
@pytest.mark.parametrize("case", _REFUSED)
@on_ranks(4)
def test_annotation_that_does_not_fit_is_refused(api: Api, case: str) -> None:
    kinds, message, options = _REFUSED[case]
    mesh = _mesh(PLAIN)
    kind_of = {"R": spmd.R, "I": spmd.I, "V": spmd.V, "S0": spmd.S(0)}
    whole = {"all": spmd.MeshAxis.of(4, 1)}
    linear = nn.Linear(DIM, DIM)
    for parameter in linear.parameters():
        axes = {whole.get(n) or _group(mesh, n): kind_of[kind] for n, kind in kinds.items()}
        spmd.assert_type(parameter, axes)
    before = dict(linear.named_parameters())
    passed = {"mesh": mesh[options["mesh"]] if "mesh" in options else mesh}
    if options.get("dims", "dp") is not None:
        passed["dp_mesh_dims"] = api.DataParallelMeshDims(shard="dp")
    current = {"tp": mesh["tp"], "both": mesh}.get(options.get("current"))
    with (
        spmd.set_current_mesh(current) if current is not None else contextlib.nullcontext(),
        pytest.raises(ValueError, match=message),
    ):
        api.fully_shard(linear, **passed)
    after = dict(linear.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(spmd.get_local_type(parameter) for parameter in after.values())
    if not api.is_torch:  # which leaves a trace of the failed call
        assert type(linear) is nn.Linear


@needs_package
@pytest.mark.ours("names the attribute alone")
@on_ranks(2)
def test_refusal_names_the_module_and_what_to_do(api: Api) -> None:
    mesh = _mesh((("dp", 1), ("tp", 2)))
    model = nn.Sequential(nn.Linear(DIM, DIM))
    _annotate(model[0].weight, mesh, {"dp": spmd.R, "tp": spmd.R})
    with pytest.raises(api.errors.ShardingError, match=r"Sequential: 0.weight.*Pass that mesh"):
        api.fully_shard(model)


@needs_package
@on_ranks(2)
def test_wrapper_takes_annotated_parameters_as_plain_ones(api: Api) -> None:
    mesh, model = _mesh((("dp", 2),)), nn.Linear(DIM, DIM)
    alone, batch = copy.deepcopy(model), make_batch(DIM)
    for parameter in model.parameters():
        _annotate(parameter, mesh, {"dp": spmd.R})
    wrapped = api.FullyShardedDataParallel(
        model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
    )
    mean_square(wrapped(my_part(batch))).backward()
    mean_square(alone(batch)).backward()
    with api.FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        assert_equal(
            {name: p.grad for name, p in wrapped.module.named_parameters()},
            {name: p.grad for name, p in alone.named_parameters()},
            rtol=1e-5,
            atol=1e-6,
        )


# Where the package is not used


def test_nothing_of_ours_imports_the_package() -> None:
    # Read, not tried: torch 2.15 imports it where it is installed.
    for module in MODULES:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "spmd_types"], module


def test_nothing_is_registered_before_the_package_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fullshard.faces import forms, interop

    monkeypatch.delitem(sys.modules, "spmd_types", raising=False)
    monkeypatch.setattr(interop, "_register_engine", pytest.fail)
    interop.leave_unchecked()
    info: Any = None  # not looked at
    assert forms._annotated_form(nn.Parameter(torch.ones(2)), 0, info, "weight") is None


def test_versions_that_cannot_leave_functions_unchecked_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fullshard.faces import interop

    monkeypatch.setitem(sys.modules, "spmd_types", ModuleType("spmd_types"))  # as before 0.3
    interop.leave_unchecked(print)
