"""Translate device meshes into the numbers and process groups that a unit needs.

Three kinds of mesh reach `fully_shard`:

- a data-parallel mesh: 1-D (shard) or 2-D (replicate, shard);
- such a mesh, for parameters that are DTensors on another mesh (tensor or expert parallel): the
  sharded parameter then is a DTensor on both, with the data-parallel dims in front;
- with ``dp_mesh_dims``, one mesh for everything (SPMD), on which parameters are DTensors already
  and whose named dims are data parallel.

`ShardPlacementResult` gives single parameters a mesh of their own, such as a mixture of experts'.
Names are PyTorch's (``torch.distributed.fsdp._fully_shard``), because libraries build these values.
"""

import dataclasses
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fullshard.engine.params.form import UnitMesh
from fullshard.errors import MeshError, MisuseError
from fullshard.plan.mesh import MeshPlan
from fullshard.torch_private import default_group


@dataclasses.dataclass
class DataParallelMeshDims:
    """The names of an SPMD mesh's data-parallel dims; several names are flattened into one dim.

    shard: dims over which parameters are sharded. replicate: dims over which shards are replicated
    (HSDP), or, without ``shard``, whole parameters (DDP). Raises ValueError if both are missing.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise MeshError(
                "At least one of shard and replicate must be set in DataParallelMeshDims."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """List the dims that parameters are sharded over; one name may be given as such."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """List the dims that parameters are replicated over; one name may be given as such."""
        return _as_names(self.replicate)


@dataclasses.dataclass
class DataParallelMeshInfo:
    """A data-parallel mesh with the meaning of its dims. Use one of the subclasses.

    spmd_mesh: the whole mesh that ``mesh`` is a part of, if ``dp_mesh_dims`` named its dims.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise MisuseError("A mesh needs a dim to shard over or a dim to replicate over.")

    @property
    def is_spmd_mesh(self) -> bool:
        """True if parameters are DTensors on a mesh of more than the data-parallel dims."""
        return self.dp_mesh_dims is not None

    def _axis(self, dim: int | None) -> tuple[int, int, dist.ProcessGroup | None]:
        """Return (size, rank, group) of a dim; (1, 0, None) if there is none."""
        if dim is None:
            return 1, 0, None
        return self.mesh.size(dim), self.mesh.get_local_rank(dim), self.mesh.get_group(dim)


@dataclasses.dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh over whose ``shard_mesh_dim`` parameters are sharded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard_mesh_dim is None:
            raise MisuseError(f"{type(self).__name__} needs shard_mesh_dim.")
        size, rank, group = self._axis(self.shard_mesh_dim)
        self.shard_mesh_size, self.shard_mesh_rank, self.shard_process_group = size, rank, group


@dataclasses.dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh over whose ``replicate_mesh_dim`` parameters are replicated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replicate_mesh_dim is None:
            raise MisuseError(f"{type(self).__name__} needs replicate_mesh_dim.")
        size, rank, group = self._axis(self.replicate_mesh_dim)
        self.replicate_mesh_size, self.replicate_mesh_rank = size, rank
        self.replicate_process_group = group


@dataclasses.dataclass
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh with one dim to shard over and one to replicate over."""


@dataclasses.dataclass
class ShardPlacementResult:
    """A result of ``shard_placement_fn``: the dim to shard, and a mesh other than the default."""

    placement: Shard | None
    mesh_info: FSDPMeshInfo


def default_mesh(dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return a 1-D mesh of all ranks, and initialise the process group if nobody has.

    The same one as long as somebody has it. Where there is a GPU and the default group is Gloo's, each new mesh
    has a process group of its own, and each group its own memory, connections and flight record.
    """
    if not dist.is_initialized():
        _init_process_group()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator is not None else "cpu"
    world = default_group()
    for_group, known = _default_meshes.get((device_type, dim_names), (None, None))
    mesh = known() if known is not None and for_group is not None and for_group() is world else None
    if mesh is None:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=dim_names)
        _default_meshes[device_type, dim_names] = weakref.ref(world), weakref.ref(mesh)
    return mesh


HOW_TO_START = "Ranks are started by torchrun --nproc-per-node 2 train.py, or by fullshard.launch(train, ranks=2) in a notebook."


def _init_process_group() -> None:
    """Do what torch's FSDP does without a group, and say in its error how ranks are started if this is none."""
    try:
        dist.init_process_group()
    except ValueError as error:
        if "RANK expected" in str(error):
            error.args = (f"{error}. {HOW_TO_START}",)
        raise


# The default group that each was made for, and the mesh. Neither is kept alive.
_default_meshes: dict[
    tuple[str, tuple[str, ...] | None],
    tuple["weakref.ref[dist.ProcessGroup]", "weakref.ref[DeviceMesh]"],
] = {}


def mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims | None = None) -> DataParallelMeshInfo:
    """Return a mesh with its dims' meaning: (shard,), (replicate, shard), or as ``dims`` says.

    Raises MeshError for any other mesh, and on ranks that are not part of it.
    """
    _check_mesh(mesh)
    if dims is not None:
        return _named_mesh_info(mesh, dims)
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    if mesh.ndim != 2:
        raise MeshError(
            f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: (shard) or (replicate, "
            "shard). Pass a slice of it, such as mesh['dp_replicate', 'dp_shard'], or name its "
            "data-parallel dims with dp_mesh_dims=."
        )
    if mesh.mesh_dim_names is None:
        raise MisuseError(
            "Please init the 2D mesh for HSDP with mesh_dim_names specified: "
            "init_device_mesh(..., mesh_dim_names=('dp_replicate', 'dp_shard'))."
        )
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def replicate_mesh_info(
    mesh: DeviceMesh, dims: DataParallelMeshDims | None
) -> DataParallelMeshInfo:
    """Return a mesh on which nothing is sharded: 1-D, or as ``dims`` says.

    Raises MeshError as `mesh_info` does, and if ``dims`` names dims to shard over.
    """
    _check_mesh(mesh)
    if dims is not None:
        info = _named_mesh_info(mesh, dims)
        if info.shard_mesh_dim is not None:
            raise MeshError(
                "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). Use "
                "fully_shard() for sharding."
            )
        return info
    if mesh.ndim != 1:
        raise MeshError(f"replicate expects a 1D DeviceMesh but got {mesh}. Pass a slice of it.")
    return DDPMeshInfo(mesh, replicate_mesh_dim=0)


def unit_mesh(info: DataParallelMeshInfo) -> UnitMesh:
    """Return the mesh in the engine's form: sizes, this rank's places, and process groups.

    Raises MeshError as `check_groups`.
    """
    check_groups(info.mesh, sharded=info.shard_mesh_dim, replicated=info.replicate_mesh_dim)
    shard_size, shard_rank, shard_group = info._axis(info.shard_mesh_dim)
    replicate_size, replicate_rank, replicate_group = info._axis(info.replicate_mesh_dim)
    plan = MeshPlan(shard_size, shard_rank, replicate_size, replicate_rank)
    return UnitMesh(info.mesh, plan, shard_group, replicate_group, info=info)


def check_groups(
    mesh: DeviceMesh, *, sharded: int | None, replicated: int | None, what: str = "Parameters"
) -> None:
    """Raise MeshError if ranks have other places in the groups of a mesh's axes than in the mesh.

    sharded: an axis along which places say who has which part: a DTensor looks them up in the mesh, and
    what collectives gather is in the group's order. replicated: an axis whose ranks have the same, in
    whatever order. what: is divided over the mesh, for messages.

    ``DeviceMesh`` makes groups of sorted ranks: over "shard" of [[3, 1], [2, 0]] rank 3 is the first
    in the mesh, and the second in the group (1, 3).
    """
    for axis, order in ((sharded, list), (replicated, sorted)):
        if axis is None:
            continue
        group: list[int] = dist.get_process_group_ranks(mesh.get_group(axis))
        for row in mesh.mesh.movedim(axis, -1).reshape(-1, mesh.size(axis)).tolist():
            # All rows, so that all ranks refuse: what another row's group is, its ranks alone know.
            own = dist.get_rank() in row
            theirs = group if own else sorted(row) if group == sorted(group) else row
            if order(row) != order(theirs):
                name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
                raise MeshError(
                    f"{what} are to be divided over axis {name!r} of {mesh}, where ranks {row} are in this "
                    f"order, but in their process group {theirs}: parts would be gathered or saved in "
                    "another's place. Build the mesh of ranks that ascend along this axis, or of such groups "
                    "with DeviceMesh.from_group (new_group sorts ranks, unless it gets sort_ranks=False)."
                )


def smaller_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Return the (replicate, shard) mesh whose shard groups have ``size`` ranks.

    mesh: 1-D or (replicate, shard). Collective, since it makes groups: once per mesh and size. Raises
    MeshError as `check_groups`.
    """
    # By identity: a mesh equals another one of the same ranks, whose groups may have been
    # destroyed.
    reference, known = _smaller.get(id(mesh), (None, {}))
    if reference is None or reference() is not mesh:
        known, key = {}, id(mesh)
        _smaller[key] = (weakref.ref(mesh, lambda _: _smaller.pop(key, None)), known)
    if size not in known:
        known[size] = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size))
    check_groups(known[size], sharded=1, replicated=0)
    return known[size]


_smaller: dict[int, tuple[weakref.ref[DeviceMesh], dict[int, DeviceMesh]]] = {}


def unit_device(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device of the mesh's type. Raises MeshError if it has none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != mesh.device_type:
        here = accelerator.type if accelerator else "cpu"
        raise MeshError(
            f"{mesh} is a mesh of type {mesh.device_type!r}, but this process has "
            f"{accelerator.type if accelerator else 'no accelerator'}. Build the mesh with "
            f"init_device_mesh({here!r}, ...)."
        )
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"mesh has to be a DeviceMesh, not {type(mesh).__name__}.")
    unit_device(mesh)
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"This rank is not part of the mesh of shape {tuple(mesh.shape)}. Call this only on "
            "the mesh's ranks, or build the mesh over all of them."
        )


def _as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def _named_mesh_info(mesh: DeviceMesh, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    known = mesh.mesh_dim_names
    if known is None:
        raise MeshError("mesh must have mesh_dim_names when dp_mesh_dims is provided.")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in known:
            raise MeshError(f"Mesh dim name {name!r} not found in mesh.mesh_dim_names {known}.")

    def part(names: tuple[str, ...]) -> DeviceMesh:
        return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))

    if not dims.replicate_names:
        return FSDPMeshInfo(part(dims.shard_names), 0, dp_mesh_dims=dims, spmd_mesh=mesh)
    replicate = part(dims.replicate_names)
    if not dims.shard_names:
        return DDPMeshInfo(replicate, None, 0, dp_mesh_dims=dims, spmd_mesh=mesh)
    both = DeviceMesh._concatenate([replicate, part(dims.shard_names)])
    return HSDPMeshInfo(both, 1, 0, dp_mesh_dims=dims, spmd_mesh=mesh)


def joined_mesh(place: UnitMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """Return the dims of a unit's mesh and of the mesh of a DTensor that it shards, as one mesh.

    In the order in which the mesh has them that both are sliced from; without one, the unit's come first.
    None if they are not dims of one mesh with names.
    """
    outer = place.mesh
    if outer is None or not (outer.mesh_dim_names and inner.mesh_dim_names):
        return None
    root = outer._get_root_mesh()
    if root != inner._get_root_mesh():
        return None
    dims = {
        name: mesh if mesh.ndim == 1 else mesh[name]
        for mesh in (outer, inner)
        for name in mesh.mesh_dim_names or ()
    }
    order = root.mesh_dim_names or ()
    if all(name in order for name in dims):
        dims = {name: dims[name] for name in order if name in dims}
    return root if tuple(dims) == order else DeviceMesh._concatenate(list(dims.values()))
