"""Whole tensors of a sharded model, a few at a time: `iter_full_state` and `stream_weights`.

Both gather from the model's own memory, whatever sharded it, and hold a bucket and one whole tensor at
their peak. The model has to stay as it is until they end: a step in between would mix its values.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import ShardingError
from fullshard.plan.units import Rename, renamer, without_compile
from fullshard.state.copies import numbered_and_compared
from fullshard.state.gathering import gathered_wholes
from fullshard.state.holdings import Holding, holdings_of
from fullshard.state.owners import owners_of, together
from fullshard.state.structure import units_of


def iter_full_state(
    model: nn.Module, *, bucket_mb: float = 64, to_rank: int | None = None, offload: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and persistent buffer whole, by its name before sharding. Collective.

        for name, tensor in iter_full_state(model, to_rank=0, offload=True):
            ...

    In the order of modules, in the dtypes of the shards; names of tied parameters follow one another with
    the same tensor. Each tensor is new memory, detached, and the caller's to keep.

    bucket_mb: megabytes (2^20 bytes) gathered at once; a larger tensor comes in several parts.
    to_rank: the only rank of the job that gets tensors. On the others the iterator yields nothing, but
        it has to be run to its end there too: ``for _ in iter_full_state(model, to_rank=0): pass``.
    offload: put whole tensors in host memory; then the device holds no more than a bucket.

    Memory at its peak, beyond what the caller keeps: one whole tensor and about three buckets.

    All ranks that have the model have to call it, and to take as many items: those that it is sharded
    over, or all of the job where it is not sharded. One that stops early makes the others wait at their
    next bucket, until the process group's timeout. Of what nothing keeps equal, as parameters that are not
    sharded, all get the first rank's values, with a warning if others have other values.

    Raises StateError, on all ranks, if parameters are on the meta device or ranks hold different models.
    """
    device = torch.device("cpu") if offload else None
    group = owners_of(model)
    held = _held(model, group, bucket_mb)
    wholes = gathered_wholes(
        held, group, to_rank=to_rank, bucket_nbytes=_nbytes(bucket_mb), device=device
    )
    return (
        (name, whole) for holding, whole in wholes if whole is not None for name in holding.names
    )


def stream_weights(
    model: nn.Module,
    *,
    bucket_mb: float = 256,
    rename: Rename = None,
    to_rank: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield lists of whole weights by name, as rollout engines load them. Collective.

        for weights in stream_weights(model, rename=to_engine_name):
            engine.load_weights(weights)

    What `iter_full_state` yields, in lists of about ``bucket_mb`` megabytes (2^20 bytes): at least one
    tensor each, of its own memory, which nothing overwrites later. So a list lives as long as the caller
    refers to it. Memory at the peak, if each list is dropped before the next: the list, one tensor, and
    about three times 32 megabytes of messages.

    rename: from our names to the engine's: a function, or a mapping of names, and of beginnings of names
        that end with a dot; None leaves a tensor out, and names that a mapping lacks stay.
    dtype: of floating-point tensors; others keep theirs. device: by default where the shards are.
    to_rank: the only rank that gets lists; others have to iterate too, and get none.

    Raises ShardingError if two names become the same.
    """
    group = owners_of(model)
    held = _held(model, group, bucket_mb)
    new_names = together(lambda: _new_names(held, rename), group)
    held = [h for h in held if any(name in new_names for name in h.names)]
    limit = _nbytes(bucket_mb)
    target = None if device is None else torch.device(device)
    wholes = gathered_wholes(
        held, group, to_rank=to_rank, bucket_nbytes=min(limit, _MESSAGE_NBYTES), device=target
    )
    return _lists(wholes, new_names, limit, dtype)


_MESSAGE_NBYTES = 32 << 20


def _lists(
    wholes: Iterator[tuple[Holding, torch.Tensor | None]],
    new_names: Mapping[str, str],
    limit: int,
    dtype: torch.dtype | None,
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for holding, whole in wholes:
        if whole is None:
            continue
        is_cast = dtype is not None and whole.is_floating_point()
        weight = whole.to(dtype) if is_cast else whole
        del whole
        if bucket and nbytes + weight.nbytes > limit:
            yield bucket
            bucket, nbytes = [], 0
        nbytes += weight.nbytes
        bucket += [(new_names[name], weight) for name in holding.names if name in new_names]
        del weight  # belongs to whoever takes the list
    if bucket:
        yield bucket


@torch.no_grad()
def _held(model: nn.Module, group: dist.ProcessGroup | None, bucket_mb: float) -> list[Holding]:
    def local() -> list[Holding]:
        _nbytes(bucket_mb)
        return [
            holding._replace(names=tuple(dict.fromkeys(map(without_compile, holding.names))))
            for holding in holdings_of(model)
        ]

    for unit in units_of(model)[:1]:
        # Where ranks share memory, one that does something else is named at once.
        unit.comm.fence("gathering whole tensors")
    return numbered_and_compared(together(local, group), group, taken="given to all")


def _nbytes(bucket_mb: float) -> int:
    if not 0 < bucket_mb < float("inf"):
        raise ShardingError(f"bucket_mb is {bucket_mb!r}. Give a positive number of megabytes.")
    return max(1, int(bucket_mb * (1 << 20)))


def _new_names(held: list[Holding], rename: Rename) -> dict[str, str]:
    """Return the new name of each name that is not left out."""

    new_name = renamer(rename)
    names: dict[str, str] = {}
    for name in (name for holding in held for name in holding.names):
        new = new_name(name)
        if new is None:
            continue
        if new in names.values():
            other = next(old for old, each in names.items() if each == new)
            raise ShardingError(
                f"rename: {other} and {name} both become {new}. Give each its own name, or None to leave "
                "one out."
            )
        names[name] = new
    return names
