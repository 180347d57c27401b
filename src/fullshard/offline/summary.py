"""What is in a checkpoint: `inspect_checkpoint`."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.checkpoint.opening import Location
from fullshard.checkpoint.read import Reader
from fullshard.offline.opening import form_of, open_state


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSummary:
    """A tensor. nbytes: of all of it. placement: how the ranks that saved it had divided it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    placement: str
    aliases: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What is in a checkpoint, as its files say; tensors are not read.

    path: of the checkpoint itself, where a folder of several was asked for. form: of the files.
    tensors: by name with its section. facts: step, metadata, created, ranks, versions.
    optimizers: by section, the class and the options of each group. extra: keys.
    file_nbytes: of each file, where the form says it.
    """

    path: Path | str
    form: str
    tensors: Mapping[str, TensorSummary]
    facts: Mapping[str, Any]
    optimizers: Mapping[str, Any]
    extra: tuple[str, ...]
    file_nbytes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def sections(self) -> dict[str, list[TensorSummary]]:
        """Return the tensors of each section: "model", "optimizer", "extra"."""
        found: dict[str, list[TensorSummary]] = {}
        for name, tensor in self.tensors.items():
            found.setdefault(name.partition("/")[0], []).append(tensor)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        return {
            **dataclasses.asdict(self),
            "path": str(self.path),
            "nbytes": self.nbytes,
        }


def inspect_checkpoint(path: Location) -> CheckpointSummary:
    """Say what is in a checkpoint, a directory of DCP, a file of torch.save, or safetensors.

    Tensors are not read. Raises CheckpointError if there is nothing of the kind, or it is damaged.
    """
    with open_state(path) as state:
        tensors = {
            name: TensorSummary(
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                math.prod(tensor.shape) * tensor.dtype.itemsize,
                tensor.placement,
                tensor.aliases,
            )
            for name, tensor in state.tensors.items()
        }
        values = state.values
        files = state.manifest.files if isinstance(state, Reader) else ()
        facts = ("step", "metadata", "created", "ranks", "versions", "converted_from")
        optimizers = {
            section: {
                "class": own.get("class"),
                "groups": [
                    {"num_params": len(group["params"]), "options": group["options"]}
                    for group in own.get("groups", ())
                ],
            }
            for section, own in values.get("optimizers", {}).items()
        }
        extra = {*values.get("extra", {}), *values.get("extra_by_rank", {})}
        return CheckpointSummary(
            state.location,
            form_of(state),
            tensors,
            {key: values[key] for key in facts if values.get(key) is not None},
            optimizers,
            tuple(sorted(extra)),
            {file.name: file.nbytes for file in files},
        )
