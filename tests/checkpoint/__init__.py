"""What the tests of checkpoints share."""

from fullshard.checkpoint.folder import Location, folder_at
from fullshard.checkpoint.manager import Checkpoint, _complete_in


def checkpoints_in(folder: Location) -> list[Checkpoint]:
    """Return the complete checkpoints of a folder, by their steps; others' folders are left out."""
    return [Checkpoint(step, found.location) for step, found in _complete_in(folder_at(folder))]
