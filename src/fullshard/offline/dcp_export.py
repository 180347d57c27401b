"""Into a directory of torch.distributed.checkpoint: `export_dcp`."""

import dataclasses
from pathlib import Path

import torch

from fullshard.checkpoint.dcp import METADATA
from fullshard.checkpoint.folder import new_tag
from fullshard.checkpoint.opening import Location, disk_path
from fullshard.huggingface.export_folder import ExportFolder
from fullshard.offline.opening import Progress, naming_disk_faults, open_state


@dataclasses.dataclass(frozen=True, slots=True)
class ExportedState:
    """What has been written. num_tensors, nbytes: of tensors; each name of a tied one has its own."""

    path: Path
    num_tensors: int
    nbytes: int


def export_dcp(
    source: Location,
    path: str | Path,
    *,
    weights_only: bool = False,
    overwrite: bool = False,
    progress: Progress = None,
) -> ExportedState:
    """Write a checkpoint as a directory that ``torch.distributed.checkpoint.load`` reads.

        export_dcp("runs/a/step-100", "dcp/step-100")

    No ranks and no model are needed. Memory: a part of a tensor. States of random generators stay out. weights_only: leave out optimizers and
    extra state. overwrite: replace a directory of DCP of this name, as a whole.

    Raises CheckpointError if the source cannot be read or the target cannot be written; what was written
    is removed then.
    """
    # Here: torch.distributed.checkpoint takes longer to import than all of fullshard.
    from fullshard.offline.dcp_planner import Planner, leaves_of, write

    target = disk_path(path, "an export")
    with open_state(source) as state:
        leaves = leaves_of(state, weights_only)
        folder = _DcpFolder(target, new_tag(), overwrite=overwrite)
        try:
            planner = Planner(state, leaves, progress)
            with torch.no_grad(), naming_disk_faults(target):
                write(folder.path, planner)
            folder.finish()
        except BaseException:
            folder.give_up()
            raise
        return ExportedState(target, planner.num_tensors, planner.total)


class _DcpFolder(ExportFolder):
    def is_known(self, name: str) -> bool:
        return name == METADATA or name.endswith(".distcp")
