"""What an export takes tensors from: a model on all ranks, or a checkpoint's files on one.

Either lists its tensors and gives those that are asked for, in host memory and in pieces that follow one
another, so that a writer needs a bucket of memory however large the model is.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.read import Reader, Wanted
from fullshard.errors import CheckpointError
from fullshard.huggingface.names import plain_name
from fullshard.plan.boxes import in_rows, whole_box
from fullshard.plan.layout import Shape
from fullshard.state.copies import numbered_and_compared
from fullshard.state.gathering import gathered_wholes
from fullshard.state.holdings import Holding, holdings_of

_BUCKET_NBYTES = 64 << 20


class Available(NamedTuple):
    """A tensor that a source has. name: the first of a tied one's."""

    name: str
    dtype: torch.dtype
    shape: Shape


class ModelSource:
    """A model, sharded in any way; rank 0 writes. Made and used by all ranks."""

    def __init__(self, model: nn.Module, peers: Peers) -> None:
        held = peers.together(lambda: holdings_of(model))
        self._by_name: dict[str, Holding] = {}
        for holding in numbered_and_compared(held, peers.group, taken="exported"):
            self._by_name.setdefault(plain_name(holding.name), holding)

    def available(self) -> list[Available]:
        """List the tensors, in the order of modules."""
        return [Available(name, h.dtype, h.shape) for name, h in self._by_name.items()]

    def tied(self) -> list[set[str]]:
        """Return the names of each tensor that has several."""
        names = ({plain_name(name) for name in h.names} for h in self._by_name.values())
        return [own for own in names if len(own) > 1]

    def pieces(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors on rank 0, and nothing on the others. Collective at every step."""
        held = [self._by_name[name] for name in names]
        wholes = gathered_wholes(
            held, None, to_rank=0, bucket_nbytes=_BUCKET_NBYTES, device=torch.device("cpu")
        )
        for name, (holding, whole) in zip(names, wholes, strict=True):
            assert holding is self._by_name[name]
            if whole is not None:
                yield name, whole


class CheckpointSource:
    """One model of a checkpoint. reads: whether this rank is to read from it.

    Raises CheckpointError if the checkpoint has no model of this key.
    """

    def __init__(self, reader: Reader, key: str | None, *, reads: bool) -> None:
        self._reader, self._reads = reader, reads
        self._section = "model/" if key is None else f"model.{key}/"
        if not any(name.startswith(self._section) for name in reader.manifest.tensors):
            there = reader.manifest.values.get("models", [])
            keys = [str(name).partition(".")[2] for name in there if "." in str(name)]
            raise CheckpointError(
                f"{reader.folder}: has no {self._section[:-1]}. "
                + (f"Give key=, one of {', '.join(keys)}." if keys else "It has no model of a key.")
            )

    def available(self) -> list[Available]:
        """List the tensors, in the order in which they were saved."""
        return [
            Available(name.removeprefix(self._section), tensor.dtype, tensor.shape)
            for name, tensor in self._reader.manifest.tensors.items()
            if name.startswith(self._section)
        ]

    def pieces(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield rows of each tensor in turn, as many as a bucket takes; nothing if it does not read."""
        for name in names if self._reads else ():
            full_name = self._section + name
            tensor = self._reader.manifest.tensors[full_name]
            whole = whole_box(tensor.shape)
            for box in in_rows(whole, tensor.dtype.itemsize, _BUCKET_NBYTES):
                piece = torch.empty(box.shape, dtype=tensor.dtype, device="cpu")
                if piece.numel():
                    self._reader.read([Wanted(full_name, box, piece)])
                yield name, piece
