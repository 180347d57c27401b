"""Meshes beyond plain data parallel: under tensor parallel, of a whole job, of one parameter."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import SGD

from tests.api import Api
from tests.collectives import record_traffic
from tests.harness import mesh_of, on_ranks, rank
from tests.selection import one_way, repeats
from tests.training import (
    assert_equal,
    full_gradients,
    full_parameters,
    gradients_alone,
    local,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("tests/parity/test_matrix.py: meshes say who exchanges, not how")

DIM, HIDDEN = 8, 12


@functools.cache
def _named_mesh(*dims: tuple[str, int]) -> DeviceMesh:
    return init_device_mesh(
        "cpu", tuple(size for _, size in dims), mesh_dim_names=tuple(name for name, _ in dims)
    )


def _kinds(api: Api) -> Any:
    """The module in which an implementation defines its kinds of mesh."""
    return importlib.import_module(
        "torch.distributed.fsdp._fully_shard._fsdp_common"
        if api.is_torch
        else "fullshard.faces.meshes"
    )


class _Layer(nn.Module):
    """Two linear layers around a tanh, with a way past them. x: (..., dim) -> same."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return x + self.down(self.up(x).tanh())


def _make_model() -> nn.Sequential:
    return nn.Sequential(_Layer(), nn.Tanh(), _Layer())


def _place(mesh: DeviceMesh, *names: str) -> int:
    """This rank's number among the ranks that differ in these dims of the mesh, row by row."""
    place = 0
    for name in names:
        place = place * mesh[name].size() + mesh[name].get_local_rank()
    return place


def _assert_trains_like(
    model: nn.Module,
    alone: nn.Module,
    batch: Tensor,
    part_of: Callable[[Tensor], Tensor],
    *,
    prepare: Callable[[Tensor], Tensor] = lambda part: part,
) -> None:
    """Train both; after each backward and step, gradients and parameters agree."""
    optimizers = [SGD(each.parameters(), lr=0.5) for each in (model, alone)]
    for step in range(2):
        rolled = batch.roll(step, 0)
        mean_square(model(prepare(part_of(rolled)))).backward()
        mean_square(alone(rolled)).backward()
        expected = full_gradients(alone)
        assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-3
        assert_equal(full_gradients(model), expected, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(full_parameters(model), full_parameters(alone), rtol=1e-4, atol=1e-6)


# Tensor parallel below, data parallel on top

TENSOR_PARALLEL = (("dp", 2), ("tp", 2))
COLUMNS_THEN_ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _parallelize(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, _Layer):
            parallelize_module(layer, mesh, COLUMNS_THEN_ROWS)
    return model


def _shard(api: Api, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, _Layer):
            api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


@on_ranks(4)
def test_tensor_parallel_parameter_lives_on_both_meshes(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    whole = full_parameters(model)
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"])
    expected: dict[str, tuple[Placement, ...]] = {
        "up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
        "up.bias": (_StridedShard(0, split_factor=2), Shard(0)),
        "down.weight": (Shard(0), Shard(1)),
        "down.bias": (Shard(0), Replicate()),
    }
    for name, placements in expected.items():
        parameter = model[0].get_parameter(name)
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == placements
        assert parameter.device_mesh.mesh_dim_names == ("dp", "tp")
    assert_equal(full_parameters(model), whole)


@on_ranks(4)
def test_tensor_parallel_part_is_cut_again_over_data_parallel_ranks(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    whole = full_parameters(model)
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"])
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    columns, rows = model[0].up.weight, model[0].down.weight
    assert torch.equal(columns.to_local(), whole["0.up.weight"].chunk(2)[tp].chunk(2)[dp])
    assert torch.equal(rows.to_local(), whole["0.down.weight"].chunk(2, 1)[tp].chunk(2)[dp])


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(4)
def test_tensor_parallel_trains_like_one_process(api: Api, reshard: bool) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    alone, dp = copy.deepcopy(model), mesh["dp"].get_local_rank()
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=reshard)
    _assert_trains_like(model, alone, make_batch(DIM), lambda batch: batch.chunk(2)[dp])


@on_ranks(4)
def test_gradient_is_placed_as_its_tensor_parallel_parameter(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"])
    mean_square(model(make_batch(DIM))).backward()
    for parameter in model.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.device_mesh == parameter.device_mesh


@on_ranks(4)
def test_tensor_parallel_over_another_dim_of_the_shard(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    alone, whole = copy.deepcopy(model), full_parameters(model)
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()

    def second_dim(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    parallel = _parallelize(model, mesh["tp"])
    _shard(api, parallel, mesh=mesh["dp"], shard_placement_fn=second_dim)
    columns, rows = model[0].up.weight, model[0].down.weight
    assert columns.placements == (Shard(1), Shard(0))
    assert rows.placements == (_StridedShard(1, split_factor=2), Shard(1))
    assert torch.equal(columns.to_local(), whole["0.up.weight"].chunk(2)[tp].chunk(2, 1)[dp])
    assert torch.equal(rows.to_local(), whole["0.down.weight"].chunk(2, 1)[tp].chunk(2, 1)[dp])
    assert_equal(full_parameters(model), whole)
    _assert_trains_like(model, alone, make_batch(DIM), lambda batch: batch.chunk(2)[dp])


@on_ranks(4)
def test_tensor_parallel_part_has_to_divide_evenly_along_another_dim(api: Api) -> None:
    mesh = _named_mesh(*TENSOR_PARALLEL)
    model = _Layer(hidden=6)  # three columns of the second weight on each rank
    parallelize_module(model, mesh["tp"], COLUMNS_THEN_ROWS)
    with pytest.raises(NotImplementedError, match="uneven sharding on dim 1"):
        api.fully_shard(model, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(p.ndim - 1))


@pytest.mark.parametrize("hidden", [6, 2])
@on_ranks(4)
def test_tensor_parallel_part_may_divide_unevenly_along_its_first_dim(
    api: Api, hidden: int
) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _Layer(hidden=hidden)
    alone, dp = copy.deepcopy(model), mesh["dp"].get_local_rank()
    parallelize_module(model, mesh["tp"], COLUMNS_THEN_ROWS)
    api.fully_shard(model, mesh=mesh["dp"])
    optimizers = [SGD(each.parameters(), lr=0.5) for each in (model, alone)]
    for _ in range(2):
        mean_square(model(make_batch(DIM).chunk(2)[dp])).backward()
        mean_square(alone(make_batch(DIM))).backward()
        for name, gradient in full_gradients(alone).items():
            parameter = model.get_parameter(name)
            part = _part_of_part(gradient, parameter, mesh)
            torch.testing.assert_close(local(parameter.grad), part, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _part_of_part(whole: Tensor, like: DTensor, mesh: DeviceMesh) -> Tensor:
    """Cut over the tensor-parallel ranks, then rows over the data-parallel ones."""
    inner = like.placements[-1]
    if isinstance(inner, Shard):
        whole = whole.chunk(2, inner.dim)[mesh["tp"].get_local_rank()]
    rows, place = whole.chunk(2), mesh["dp"].get_local_rank()
    return rows[place] if place < len(rows) else whole[:0]


@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
@on_ranks(4)
def test_hybrid_sharding_over_tensor_parallel(api: Api, shape: tuple[int, int, int]) -> None:
    names = ("replicate", "shard", "tp")
    mesh, model = _named_mesh(*zip(names, shape, strict=True)), _make_model()
    alone, place = copy.deepcopy(model), _place(mesh, "replicate", "shard")
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["replicate", "shard"])
    columns = model[0].up.weight
    assert columns.placements == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    assert columns.device_mesh.mesh_dim_names == names
    _assert_trains_like(model, alone, make_batch(DIM), lambda batch: batch.chunk(2)[place])


@on_ranks(4)
def test_partial_gradients_of_sequence_parallel_are_summed(api: Api) -> None:
    mesh = _named_mesh(*TENSOR_PARALLEL)
    model = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM))
    model.append(nn.Tanh())
    alone = copy.deepcopy(model)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "2": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    api.fully_shard(model[0], mesh=mesh["dp"])
    api.fully_shard(model, mesh=mesh["dp"])
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    _assert_trains_like(
        model,
        alone,
        make_batch(6, DIM),
        lambda batch: batch.chunk(2)[dp],
        prepare=lambda part: part.chunk(2, 1)[tp],
    )


@on_ranks(4)
def test_tensor_parallel_gradients_accumulate_unreduced(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    batch, dp = make_batch(DIM), mesh["dp"].get_local_rank()
    expected = gradients_alone(model, batch)
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"])
    for index, part in enumerate(batch.chunk(2)[dp].chunk(2)):
        model.set_requires_gradient_sync(index == 1)
        (mean_square(model(part)) / 2).backward()
        assert all((parameter.grad is None) == (index == 0) for parameter in model.parameters())
    assert_equal(full_gradients(model), expected, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_tensor_parallel_computes_in_the_policy_s_dtype(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    batch, dp = make_batch(DIM), mesh["dp"].get_local_rank()
    expected = gradients_alone(model, batch)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"], mp_policy=policy)
    seen: list[tuple[type, torch.dtype, torch.dtype]] = []
    up = model[0].up

    def look(module: nn.Module, args: Any) -> None:
        value = up.weight
        seen.append((type(value), value.dtype, value.to_local().dtype))

    up.register_forward_pre_hook(look)
    for _ in range(2):
        mean_square(model(batch.chunk(2)[dp])).backward()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        assert_equal(full_gradients(model), expected, rtol=0.1, atol=0.01)
        model.zero_grad()
    assert seen == 2 * [(DTensor, torch.bfloat16, torch.bfloat16)]


@pytest.mark.ours("NotImplementedError in the first forward")
@on_ranks(4)
def test_tensor_parallel_reshards_wholly_where_a_smaller_group_was_asked_for(api: Api) -> None:
    mesh, model = _named_mesh(("dp", 4), ("tp", 1)), _make_model()
    alone = copy.deepcopy(model)
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"], reshard_after_forward=2)
    _assert_trains_like(model, alone, make_batch(DIM), my_part)


@on_ranks(4)
def test_tensor_parallel_state_dict_goes_into_a_model_built_on_meta(api: Api) -> None:
    mesh, source = _named_mesh(*TENSOR_PARALLEL), _make_model()
    alone, dp = copy.deepcopy(source), mesh["dp"].get_local_rank()
    _shard(api, _parallelize(source, mesh["tp"]), mesh=mesh["dp"])
    with torch.device("meta"):
        model = _make_model()
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"])
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    assert_equal(full_parameters(model), full_parameters(alone))
    _assert_trains_like(model, alone, make_batch(DIM), lambda batch: batch.chunk(2)[dp])


@pytest.mark.ours("an AttributeError")
@on_ranks(4)
def test_plain_tensor_in_place_of_a_tensor_parallel_parameter_is_refused(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    plain = full_parameters(model)
    _shard(api, _parallelize(model, mesh["tp"]), mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"weight.* plain tensor.*DTensor") as caught:
        model.load_state_dict(plain, assign=True)
    assert isinstance(caught.value, api.errors.StateError)


@on_ranks(4)
def test_parameter_over_three_meshes_of_its_own_is_refused(api: Api) -> None:
    mesh = _named_mesh(("dp", 2), ("a", 1), ("b", 1), ("c", 2))
    model = nn.Linear(DIM, DIM, bias=False)
    inner = mesh["a", "b", "c"]
    model.weight = nn.Parameter(
        distribute_tensor(model.weight.detach(), inner, [Replicate(), Replicate(), Shard(0)])
    )
    with pytest.raises(NotImplementedError):
        api.fully_shard(model, mesh=mesh["dp"])
    if not api.is_torch:
        assert type(model) is nn.Linear


# One mesh for everything


class _OnMesh(nn.Module):
    """A model whose parameters are all DTensors on one mesh; plain tensors in and out."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, batch: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        names = mesh.mesh_dim_names or ()
        self._mesh = mesh
        self._placements = [Shard(0) if name in batch else Replicate() for name in names]

    def forward(self, x: Tensor) -> Tensor:
        """Distribute the batch over the dims that are data parallel."""
        out = self.model(DTensor.from_local(x, self._mesh, self._placements, run_check=False))
        return out.redistribute(placements=self._placements).to_local()


def _distribute(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Distribute as `COLUMNS_THEN_ROWS` over the dim "tp", and replicate over the others."""
    over_tp: dict[str, Placement] = {
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
        "down.bias": Replicate(),
    }
    for layer in model:
        for name, parameter in list(layer.named_parameters()):
            names = mesh.mesh_dim_names or ()
            placements = [over_tp[name] if dim == "tp" else Replicate() for dim in names]
            path, _, last = name.rpartition(".")
            whole = distribute_tensor(parameter.detach(), mesh, placements)
            layer.get_submodule(path).register_parameter(last, nn.Parameter(whole))


R, S0, S1, CUT = Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)

# Mesh, dims, then placements and names of the mesh of the weight that "tp" cuts by columns.
WHOLE_MESHES: dict[str, tuple[Any, ...]] = {
    "shard": ((("dp", 2), ("tp", 2)), {"shard": "dp"}, (CUT, S0), ("dp", "tp")),
    "replicate": ((("dp", 2), ("tp", 2)), {"replicate": "dp"}, (R, S0), ("dp", "tp")),
    "both": ((("out", 2), ("in", 2)), {"shard": "in", "replicate": "out"}, (R, S0), ("out", "in")),
    "both, shard first": (
        (("in", 2), ("out", 2)),
        {"shard": "in", "replicate": "out"},
        (S0, R),
        ("in", "out"),
    ),
    "both and tp": (
        (("out", 1), ("in", 2), ("tp", 2)),
        {"shard": "in", "replicate": "out"},
        (R, CUT, S0),
        ("out", "in", "tp"),
    ),
    "shard over two": ((("a", 2), ("b", 2)), {"shard": ("a", "b")}, (S0,), ("a_b",)),
    "shard over two and tp": (
        (("a", 1), ("b", 2), ("tp", 2)),
        {"shard": ("a", "b")},
        (CUT, S0),
        ("a_b", "tp"),
    ),
    "replicate over two": ((("a", 2), ("b", 2)), {"replicate": ("a", "b")}, (R, R), ("a", "b")),
    "both, shard over two": (
        (("out", 2), ("a", 2), ("b", 1)),
        {"shard": ("a", "b"), "replicate": "out"},
        (R, S0),
        ("out", "a_b"),
    ),
}


# Each kind of placement; the others name the same ones by other dims.
FEW_WHOLE_MESHES = ("replicate", "both, shard first", "shard over two and tp")


@repeats(lambda s: s["case"] not in FEW_WHOLE_MESHES)
@pytest.mark.parametrize("case", WHOLE_MESHES)
@on_ranks(4)
def test_named_dims_of_one_mesh_train_like_one_process(api: Api, case: str) -> None:
    sizes, named, placements, names = WHOLE_MESHES[case]
    mesh, dims = _named_mesh(*sizes), api.DataParallelMeshDims(**named)
    data_parallel = tuple(
        name for name, _ in sizes if name in (*dims.shard_names, *dims.replicate_names)
    )
    alone = _make_model()
    inner = copy.deepcopy(alone)
    _distribute(inner, mesh)
    _shard(api, inner, mesh=mesh, dp_mesh_dims=dims)
    model = _OnMesh(inner, mesh, data_parallel)
    weight = inner[0].up.weight
    assert weight.placements == placements
    assert weight.device_mesh.mesh_dim_names == names
    assert_equal(full_parameters(inner), full_parameters(alone))
    parts, place = mesh[data_parallel].size(), _place(mesh, *data_parallel)
    _assert_trains_like(
        model,
        nn.Sequential(OrderedDict(model=alone)),
        make_batch(DIM),
        lambda batch: batch.chunk(parts)[place],
    )


@on_ranks(2)
def test_named_dims_compute_in_the_policy_s_dtype(api: Api) -> None:
    mesh, inner = _named_mesh(("dp", 2)), _make_model()
    expected = gradients_alone(inner, make_batch(DIM))
    _distribute(inner, mesh)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dims = api.DataParallelMeshDims(shard="dp")
    _shard(api, inner, mesh=mesh, dp_mesh_dims=dims, mp_policy=policy)
    out = _OnMesh(inner, mesh, ("dp",))(my_part(make_batch(DIM)))
    assert out.dtype == torch.bfloat16
    mean_square(out).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in inner.parameters())
    assert_equal(full_gradients(inner), expected, rtol=0.1, atol=0.01)


@on_ranks(4)
def test_whole_parameters_of_replicas_are_never_gathered(api: Api) -> None:
    mesh, inner = _named_mesh(("a", 2), ("b", 2)), _make_model()
    whole = full_parameters(inner)
    _distribute(inner, mesh)
    dims = api.DataParallelMeshDims(replicate=("a", "b"))
    _shard(api, inner, mesh=mesh, dp_mesh_dims=dims)
    assert_equal({name: local(p).detach() for name, p in inner.named_parameters()}, whole)
    model = _OnMesh(inner, mesh, ("a", "b"))
    with record_traffic() as traffic:
        mean_square(model(my_part(make_batch(DIM)))).backward()
    assert traffic.calls["all_gather"] == 0
    assert traffic.calls["reduce_scatter"] == 0


def test_names_of_dims_may_be_one_or_several(api: str) -> None:
    dims = Api(api).DataParallelMeshDims
    assert dims(shard="a").shard_names == ("a",)
    assert dims(shard="a").replicate_names == ()
    assert dims(replicate=("a", "b")).replicate_names == ("a", "b")
    assert dims(shard="a", replicate="b") == dims("a", "b")
    with pytest.raises(ValueError, match="shard"):
        dims()


def _assert_refuses_dims(
    api: Api, model: nn.Module, message: str, error: type[Exception] = ValueError, **options: Any
) -> None:
    before = dict(model.named_parameters())
    with pytest.raises(error, match=message):
        api.fully_shard(model, **options)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    if not api.is_torch:  # which leaves a trace of the failed call
        assert not isinstance(model, api.FSDPModule)


@on_ranks(2)
def test_plain_parameter_does_not_fit_named_dims(api: Api) -> None:
    mesh, dims = _named_mesh(("dp", 2)), api.DataParallelMeshDims(shard="dp")
    _assert_refuses_dims(
        api, _Layer(), "DTensors on the full SPMD mesh", mesh=mesh, dp_mesh_dims=dims
    )


@pytest.mark.parametrize(
    "named", [{"shard": "tp"}, {"shard": "dp", "replicate": "tp"}, {"shard": ("dp", "tp")}], ids=str
)
@on_ranks(2)
def test_named_dims_must_be_dims_of_the_mesh(api: Api, named: dict[str, Any]) -> None:
    mesh, model = _named_mesh(("dp", 2)), _make_model()
    _distribute(model, mesh)
    dims = api.DataParallelMeshDims(**named)
    _assert_refuses_dims(api, model, "tp.*not found in", mesh=mesh, dp_mesh_dims=dims)


@on_ranks(2)
def test_named_dims_need_a_mesh_with_names(api: Api) -> None:
    mesh, dims = init_device_mesh("cpu", (2,)), api.DataParallelMeshDims(shard="dp")
    _assert_refuses_dims(api, _Layer(), "mesh_dim_names", mesh=mesh, dp_mesh_dims=dims)


@pytest.mark.parametrize("role", ["shard", "replicate"])
@on_ranks(4)
def test_parameters_must_be_replicated_over_named_dims(api: Api, role: str) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    _distribute(model, mesh)
    dims = api.DataParallelMeshDims(**{role: "tp"})
    message = r"Expected Replicate\(\).*tp|expected Replicate\(\).*tp"
    _assert_refuses_dims(api, model, message, mesh=mesh, dp_mesh_dims=dims)


@on_ranks(4)
def test_parameters_must_be_on_the_mesh_whose_dims_are_named(api: Api) -> None:
    mesh, model = _named_mesh(*TENSOR_PARALLEL), _make_model()
    _distribute(model, _named_mesh(("dp", 4), ("tp", 1)))
    dims = api.DataParallelMeshDims(shard="dp")
    _assert_refuses_dims(api, model, "mesh passed to fully_shard", mesh=mesh, dp_mesh_dims=dims)


@on_ranks(4)
def test_named_dims_do_not_go_with_a_smaller_group_after_forward(api: Api) -> None:
    mesh, model = _named_mesh(("dp", 4)), _make_model()
    _distribute(model, mesh)
    _assert_refuses_dims(
        api,
        model,
        "int is not yet supported",
        NotImplementedError,
        mesh=mesh,
        dp_mesh_dims=api.DataParallelMeshDims(shard="dp"),
        reshard_after_forward=2,
    )


# Single parameters on a mesh of their own


class _Mixture(nn.Module):
    """A dense layer and an expert side by side. x: (..., dim) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = _Layer()
        self.expert = _Layer(hidden=8)

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        return self.dense(x) + self.expert(x)


def _make_mixtures() -> nn.Sequential:
    return nn.Sequential(_Mixture(), nn.Tanh(), _Mixture())


def _expert_placements(
    api: Api, model: nn.Module, info: Any, placement: Shard | None = None
) -> Callable[[nn.Parameter], Any]:
    """Place the experts' parameters by this mesh, the others by default."""
    experts = {p for name, p in model.named_parameters() if "expert" in name}
    result = _kinds(api).ShardPlacementResult(placement, info)
    return lambda parameter: result if parameter in experts else None


def _shard_mixtures(api: Api, model: nn.Sequential, mesh: DeviceMesh, info: Any, **kw: Any) -> None:
    place = _expert_placements(api, model, info)
    for layer in (model[0], model[2]):
        api.fully_shard(layer, mesh=mesh, shard_placement_fn=place, **kw)
    api.fully_shard(model, mesh=mesh, **kw)


@pytest.mark.parametrize("reshard", [True, False, 2])
@on_ranks(4)
def test_parameters_with_a_mesh_of_their_own_train_like_one_process(
    api: Api, reshard: bool | int
) -> None:
    model = _make_mixtures()
    alone, whole = copy.deepcopy(model), full_parameters(model)
    info = _kinds(api).HSDPMeshInfo(mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    _shard_mixtures(api, model, mesh_of(4), info, reshard_after_forward=reshard)
    assert model[0].dense.up.weight.placements == (Shard(0),)
    assert model[0].dense.up.weight.device_mesh == mesh_of(4)
    assert model[0].expert.up.weight.placements == (Replicate(), Shard(0))
    assert model[0].expert.up.weight.device_mesh == mesh_of(2, 2)
    assert_equal(full_parameters(model), whole)
    _assert_trains_like(model, alone, make_batch(DIM), my_part)


@on_ranks(4)
def test_placement_with_a_mesh_may_name_another_dim(api: Api) -> None:
    model, batch = _Mixture(), make_batch(DIM)
    expected, whole = gradients_alone(model, batch), full_parameters(model)
    info = _kinds(api).HSDPMeshInfo(mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    second, first = (_expert_placements(api, model, info, dim) for dim in (Shard(1), None))

    def place(parameter: nn.Parameter) -> Any:
        return second(parameter) if parameter.ndim == 2 else first(parameter)

    api.fully_shard(model, mesh=mesh_of(4), shard_placement_fn=place)
    assert model.expert.up.weight.placements == (Replicate(), Shard(1))
    assert model.expert.up.bias.placements == (Replicate(), Shard(0))
    assert model.dense.up.weight.placements == (Shard(0),)
    assert_equal(full_parameters(model), whole)
    mean_square(model(my_part(batch))).backward()
    assert_equal(full_gradients(model), expected, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_experts_on_a_smaller_mesh_are_different_in_each_group(api: Api) -> None:
    # Each pair of ranks has experts of its own, trained on the pair's samples alone.
    mesh = mesh_of(2, 2)["shard"]
    model, batch = _make_mixtures(), make_batch(DIM)
    pairs = [copy.deepcopy(model) for _ in range(2)]
    info = _kinds(api).FSDPMeshInfo(mesh, shard_mesh_dim=0)
    _shard_mixtures(api, model, mesh_of(4), info)
    mine = pairs[rank() // 2]
    optimizers = [SGD(each.parameters(), lr=0.5) for each in (model, *pairs)]
    for step in range(3):
        # Tokens of all four ranks would need another divisor, and nothing tells which of it is.
        unsaid = pytest.warns(UserWarning, match=r"divided by 2, .*divide by 4")
        with unsaid if step == 0 and not api.is_torch else contextlib.nullcontext():
            out = model(my_part(batch))
        mean_square(out).backward()
        for pair, samples in zip(pairs, batch.chunk(2), strict=True):
            mean_square(pair(samples)).backward()
        for name, parameter in pairs[0].named_parameters():
            if "expert" not in name:
                other = pairs[1].get_parameter(name)
                assert parameter.grad is not None
                assert other.grad is not None
                parameter.grad = other.grad = (parameter.grad + other.grad) / 2
        assert_equal(full_gradients(model), full_gradients(mine), rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_equal(full_parameters(model), full_parameters(mine), rtol=1e-4, atol=1e-6)
    assert not torch.equal(pairs[0][0].expert.up.weight, pairs[1][0].expert.up.weight)
    assert torch.equal(pairs[0][0].dense.up.weight, pairs[1][0].dense.up.weight)


@on_ranks(4)
def test_parameters_of_all_meshes_come_and_go_with_their_module(api: Api) -> None:
    model = _make_mixtures()
    whole = full_parameters(model[0])
    info = _kinds(api).HSDPMeshInfo(mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    _shard_mixtures(api, model, mesh_of(4), info)
    model[0].unshard()
    assert_equal({n: p.detach() for n, p in model[0].named_parameters()}, whole)
    assert all(isinstance(parameter, DTensor) for parameter in model[2].parameters())
    model[0].reshard()
    assert all(isinstance(parameter, DTensor) for parameter in model[0].parameters())
    seen = []
    model[0].register_forward_pre_hook(
        lambda module, _: seen.extend(isinstance(p, DTensor) for p in module.parameters())
    )
    model(make_batch(DIM))
    assert seen == 8 * [False]
    assert all(isinstance(parameter, DTensor) for parameter in model[0].parameters())


@on_ranks(4)
def test_gradients_over_all_meshes_accumulate_unreduced(api: Api) -> None:
    model, batch = _make_mixtures(), make_batch(DIM)
    expected = gradients_alone(model, batch)
    info = _kinds(api).HSDPMeshInfo(mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    _shard_mixtures(api, model, mesh_of(4), info)
    parts = my_part(batch).chunk(3)
    for index, part in enumerate(parts):
        model.set_requires_gradient_sync(index == 2)
        (mean_square(model(part)) / 3).backward()
        assert all((parameter.grad is None) == (index < 2) for parameter in model.parameters())
    assert_equal(full_gradients(model), expected, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_parameters_of_one_group_of_ranks_share_one_mesh_info(api: Api) -> None:
    model, kind = _Mixture(), _kinds(api).FSDPMeshInfo
    mesh = mesh_of(2)

    def place(parameter: nn.Parameter) -> Any:
        return _kinds(api).ShardPlacementResult(None, kind(mesh, shard_mesh_dim=0))

    with pytest.raises(ValueError, match="same FSDPMeshInfo"):
        api.fully_shard(model, mesh=mesh, shard_placement_fn=place)
    if not api.is_torch:
        assert type(model) is _Mixture
        assert not isinstance(model.dense.up.weight, DTensor)


@on_ranks(4)
def test_smaller_group_after_forward_must_divide_every_mesh(api: Api) -> None:
    model = _Mixture()
    info = _kinds(api).HSDPMeshInfo(mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    place = _expert_placements(api, model, info)
    with pytest.raises(ValueError, match=r"factor of 2, not 4|4"):
        api.fully_shard(model, mesh=mesh_of(4), shard_placement_fn=place, reshard_after_forward=4)


@pytest.mark.parametrize(
    "setter", ["set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"]
)
@on_ranks(2)
def test_setter_for_one_mesh_is_refused_where_there_are_several(api: Api, setter: str) -> None:
    model = _Mixture()
    info = _kinds(api).HSDPMeshInfo(mesh_of(2, 1), shard_mesh_dim=1, replicate_mesh_dim=0)
    place = _expert_placements(api, model, info)
    api.fully_shard(model, mesh=mesh_of(2), shard_placement_fn=place)
    with pytest.raises(ValueError, match="multiple param groups"):
        getattr(model, setter)(lambda *args: None)


@pytest.mark.ours("shows no such thing")
@on_ranks(4)
def test_description_has_a_unit_for_each_mesh_of_a_module(api: Api) -> None:
    model = _Mixture()
    info = _kinds(api).HSDPMeshInfo(mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
    api.fully_shard(model, mesh=mesh_of(4), shard_placement_fn=_expert_placements(api, model, info))
    units = api.describe(model).units
    assert [unit.mesh for unit in units] == ["shard 4", "replicate 2 x shard 2"]
    assert all("dense" in name for name in (*units[0].direct, *units[0].packed))
    assert all("expert" in name for name in (*units[1].direct, *units[1].packed))


# Kinds of mesh


@on_ranks(4)
def test_mesh_info_tells_sizes_ranks_and_groups(api: Api) -> None:
    mesh, kinds = mesh_of(2, 2), _kinds(api)
    shard = kinds.FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0)
    assert (shard.shard_mesh_size, shard.shard_mesh_rank) == (2, rank() % 2)
    assert shard.shard_process_group == mesh.get_group("shard")
    assert (shard.replicate_mesh_dim, shard.dp_mesh_dims, shard.spmd_mesh) == (None, None, None)
    assert not shard.is_spmd_mesh
    replicate = kinds.DDPMeshInfo(mesh["replicate"], replicate_mesh_dim=0)
    assert (replicate.replicate_mesh_size, replicate.replicate_mesh_rank) == (2, rank() // 2)
    assert replicate.replicate_process_group == mesh.get_group("replicate")
    assert replicate.shard_mesh_dim is None
    both = kinds.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    assert isinstance(both, (kinds.FSDPMeshInfo, kinds.DDPMeshInfo))
    assert (both.shard_mesh_rank, both.replicate_mesh_rank) == (rank() % 2, rank() // 2)
    assert both.shard_process_group == mesh.get_group("shard")
    assert both.replicate_process_group == mesh.get_group("replicate")


@on_ranks(2)
def test_mesh_info_needs_the_dims_of_its_kind(api: Api) -> None:
    mesh, kinds = mesh_of(1, 2), _kinds(api)
    for kind, dims in (
        (kinds.FSDPMeshInfo, {}),
        (kinds.FSDPMeshInfo, {"replicate_mesh_dim": 0}),
        (kinds.DDPMeshInfo, {}),
        (kinds.DDPMeshInfo, {"shard_mesh_dim": 1}),
        (kinds.HSDPMeshInfo, {"shard_mesh_dim": 1}),
        (kinds.HSDPMeshInfo, {"replicate_mesh_dim": 0}),
    ):
        with pytest.raises(AssertionError) as caught:
            kind(mesh, **dims)
        if not api.is_torch:
            assert isinstance(caught.value, api.errors.MisuseError)


@on_ranks(2)
def test_mesh_of_two_axes_needs_their_names(api: Api) -> None:
    model, mesh = nn.Linear(4, 4), init_device_mesh("cpu", (1, 2))
    with pytest.raises(AssertionError, match="mesh_dim_names"):
        api.fully_shard(model, mesh=mesh)
    assert type(model) is nn.Linear


@pytest.mark.ours("an obscure error later")
@on_ranks(3)
def test_rank_outside_the_mesh_is_told_so(api: Api) -> None:
    model = nn.Linear(4, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    if rank() < 2:
        api.fully_shard(model, mesh=mesh)
        model(torch.ones(2, 4)).sum().backward()
    else:
        with pytest.raises(api.errors.MeshError, match="not part of the mesh"):
            api.fully_shard(model, mesh=mesh)
        assert type(model) is nn.Linear
    dist.barrier()


# Places in the mesh and in process groups


def _permuted(rows: list[Any], *, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
    return DeviceMesh("cpu", rows, mesh_dim_names=names[-torch.tensor(rows).dim() :])


@functools.cache
def descending_group() -> dist.ProcessGroup:
    """All ranks, the last one first. One for all tests: a mesh of it equals any other one of these ranks."""
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        pytest.skip("torch has groups of sorted ranks alone before 2.13")
    ranks = list(reversed(range(dist.get_world_size())))
    group: dist.ProcessGroup = dist.new_group(ranks, sort_ranks=False)
    return group


# The last: rank 0's row is in order, so that it has to look at the others' to refuse with them.
@pytest.mark.ours("full_tensor() is right, but a checkpoint has the rows in other places")
@pytest.mark.parametrize("rows", [[3, 1, 2, 0], [[3, 1], [2, 0]], [[0, 1], [3, 2]]])
@on_ranks(4)
def test_mesh_in_another_order_than_its_groups_is_refused_on_every_rank(
    api: Api, rows: list[Any]
) -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(api.errors.MeshError, match=r"'shard'.* order") as refused:
        api.fully_shard(model, mesh=_permuted(rows))
    wrong = next(
        row for row in (rows if isinstance(rows[0], list) else [rows]) if row != sorted(row)
    )
    assert str(wrong) in str(refused.value)
    assert str(sorted(wrong)) in str(refused.value)
    assert type(model) is nn.Linear


@on_ranks(4)
def test_replicas_may_be_in_another_order_than_their_group(api: Api) -> None:
    model, alone = _make_model(), _make_model()
    alone.load_state_dict(model.state_dict())
    _shard(api, model, mesh=_permuted([[2, 3], [0, 1]]))
    _assert_trains_like(model, alone, make_batch(8, DIM), my_part)


@on_ranks(2)
def test_group_in_another_order_than_its_ranks_trains_like_one_process(api: Api) -> None:
    mesh = DeviceMesh.from_group(descending_group(), "cpu")
    assert mesh.get_coordinate() == (1 - rank(),)
    model, alone = _make_model(), _make_model()
    alone.load_state_dict(model.state_dict())
    _shard(api, model, mesh=mesh)
    _assert_trains_like(model, alone, make_batch(8, DIM), my_part)


@pytest.mark.ours("rows of another order in the smaller group")
@on_ranks(4)
def test_smaller_group_after_forward_in_another_order_is_refused(api: Api) -> None:
    """``DeviceMesh`` makes the smaller groups, of sorted ranks."""
    model = nn.Linear(4, 4)
    mesh = DeviceMesh.from_group(descending_group(), "cpu")
    for _ in range(2):  # what is known of a mesh does not pass either
        with pytest.raises(api.errors.MeshError, match="order"):
            api.fully_shard(model, mesh=mesh, reshard_after_forward=2)
    assert type(model) is nn.Linear


@pytest.mark.ours("full_tensor() is right, but a checkpoint has the rows in other places")
@on_ranks(4)
def test_tensor_parallel_in_another_order_than_its_groups_is_refused(api: Api) -> None:
    mesh = _permuted([[1, 0], [3, 2]], names=("dp", "tp"))
    model = _parallelize(_make_model(), mesh["tp"])
    with pytest.raises(api.errors.MeshError, match=r"weight.*'tp'.* order"):
        _shard(api, model, mesh=mesh["dp"])


@pytest.mark.ours("adds up parts of different ranks")
@on_ranks(4)
def test_mesh_that_shares_ranks_with_a_tensor_parallel_one_is_refused(api: Api) -> None:
    mesh = _named_mesh(*TENSOR_PARALLEL)
    own = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}[rank()]
    for over in (mesh["tp"], init_device_mesh("cpu", (4,))):
        layer = _Layer()
        parallelize_module(layer, mesh["tp"], COLUMNS_THEN_ROWS)
        with pytest.raises(api.errors.MeshError, match=r"up\.weight") as refused:
            api.fully_shard(layer, mesh=over)
        assert str(own) in str(refused.value)
        assert type(layer) is _Layer
