"""`replicate`: whole parameters on every rank, gradients averaged (DDP), on the sharding engine.

Names, signatures and errors are those of ``torch.distributed._composable.replicate_with_fsdp``,
through which pipeline stages and libraries ask for data parallelism without sharding.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.faces.annotated import leave_unchecked
from fullshard.faces.interop import state_view
from fullshard.faces.meshes import DataParallelMeshDims, default_mesh, replicate_mesh_info
from fullshard.fsdp2.module import ReplicateModule
from fullshard.fsdp2.units import make_units, unit_config
from fullshard.policies import MixedPrecisionPolicy, OffloadPolicy


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Average a module's gradients over all ranks of a mesh, without sharding anything.

    The arguments mean what they mean for `fully_shard`. mesh: 1-D; default: all ranks. Parameters
    become DTensors that are replicated over it, so state dicts and optimizers work as for a sharded
    model.

    Raises MeshError for a mesh with another number of dims, or if ``dp_mesh_dims`` names dims to
    shard over.
    """
    leave_unchecked(replicate)
    mesh = mesh or default_mesh(("replicate",))
    return make_units(
        module,
        ReplicateModule,
        replicate_mesh_info(mesh, dp_mesh_dims),
        unit_config(mp_policy, offload_policy),
        ignored_params=ignored_params,
    )


replicate.state = state_view  # type: ignore[attr-defined]
