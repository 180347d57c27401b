"""`fully_shard` shards a module's parameters one by one, as DTensors on the module itself.


`replicate` leaves them whole on every rank and averages gradients (DDP), on the same engine. Names,
signatures, defaults and state-dict keys are those of ``torch.distributed.fsdp``, and of
``torch.distributed._composable.replicate_with_fsdp``, through which pipeline stages and libraries
ask for data parallelism without sharding.

The engine, and DTensor with it, is imported by the first call: DTensor alone takes most of a second,
which a program that prints its help does not wait for.
"""

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.policies import MixedPrecisionPolicy, OffloadPolicy

if TYPE_CHECKING:
    from fullshard.faces.interop import FSDPState
    from fullshard.faces.meshes import DataParallelMeshDims
    from fullshard.fsdp2.units import ShardPlacementFn

_ModuleOrList = TypeVar("_ModuleOrList", bound=nn.Module | list[Any])


def fully_shard(
    module: _ModuleOrList,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: "ShardPlacementFn | None" = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: "DataParallelMeshDims | None" = None,
) -> _ModuleOrList:
    """Shard a module's parameters, gradients and hence optimizer state over data-parallel ranks.

    All parameters in ``module`` that no earlier call took become one unit. They are gathered before
    its forward and backward, and freed afterwards. So call it bottom-up: on each block, then on the
    model. Build the optimizer afterwards.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)

    module: a module, or a list of modules that become one unit. Changed in place and returned.
    mesh: 1-D (shard), or 2-D (replicate, shard) for hybrid sharding. Default: all ranks. Parameters
        that are DTensors over other ranks (tensor, expert parallel) become DTensors over both.
    reshard_after_forward: True frees the parameters after forward and gathers them again for
        backward; False keeps them; an int reshards over groups of that many ranks; None means True,
        except for the root (False), whose backward comes first.
    shard_placement_fn: returns ``Shard(dim)`` for a parameter, or None for ``Shard(0)``. Dim 0 may
        have any size; other dims have to divide evenly. A ``ShardPlacementResult`` shards the
        parameter over a mesh of its own.
    mp_policy, offload_policy: dtypes, and whether shards live in host memory (None: no).
    ignored_params: left as they are, neither sharded nor reduced.
    dp_mesh_dims: names the data-parallel dims of ``mesh``. All parameters then have to be DTensors
        on ``mesh`` already, replicated over those dims, or annotated by `spmd_types` for ``mesh``.

    Raises ShardingError or MeshError before anything is changed. If memory is lacking, restores the
    module and raises AllocationError. Source: ZeRO-3, arXiv 1910.02054; PyTorch FSDP2.
    """
    import fullshard.watch  # noqa: F401  (hears of each model that runs)
    from fullshard.faces.interop import leave_unchecked
    from fullshard.faces.meshes import default_mesh, mesh_info
    from fullshard.fsdp2.module import FSDPModule
    from fullshard.fsdp2.units import make_units, unit_config

    leave_unchecked(fully_shard)
    return make_units(
        module,
        FSDPModule,
        mesh_info(mesh or default_mesh(), dp_mesh_dims),
        unit_config(mp_policy, offload_policy, reshard_after_forward),
        ignored_params=ignored_params,
        shard_placement_fn=shard_placement_fn,
    )


def replicate(
    module: _ModuleOrList,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: "DataParallelMeshDims | None" = None,
) -> _ModuleOrList:
    """Average a module's gradients over all ranks of a mesh, without sharding anything.

    The arguments mean what they mean for `fully_shard`. mesh: 1-D; default: all ranks. Parameters
    become DTensors that are replicated over it, so state dicts and optimizers work as for a sharded
    model.

    Raises MeshError for a mesh with another number of dims, or if ``dp_mesh_dims`` names dims to
    shard over.
    """
    import fullshard.watch  # noqa: F401
    from fullshard.faces.interop import leave_unchecked
    from fullshard.faces.meshes import default_mesh, replicate_mesh_info
    from fullshard.fsdp2.module import ReplicateModule
    from fullshard.fsdp2.units import make_units, unit_config

    leave_unchecked(replicate)
    mesh = mesh or default_mesh(("replicate",))
    return make_units(
        module,
        ReplicateModule,
        replicate_mesh_info(mesh, dp_mesh_dims),
        unit_config(mp_policy, offload_policy),
        ignored_params=ignored_params,
    )


def _state(module: nn.Module) -> "FSDPState | None":
    """Return the state of a sharded module, None for any other: ``fully_shard.state``."""
    from fullshard.faces.interop import state_view

    return state_view(module)


fully_shard.state = replicate.state = _state  # type: ignore[attr-defined]
