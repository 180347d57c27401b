"""Refuse what does not fit: files into a model (`check_fits`), and a load into the memory of its hosts (`check_room`).

A problem of files is a line whose first word is its kind: "missing 0.weight". Each rank finds its own, and all of
them are refused on all ranks alike, before a value is changed.
"""

import difflib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fullshard.checkpoint.peers import Peers
from fullshard.errors import CheckpointError
from fullshard.host import Pool, memory_pools, resident_nbytes

_MOST_LISTED = 10

# {} is what the tensors come from.
_TITLES = {
    "missing": 'The model has, and the {} lacks (allow=["missing"] leaves them as they are)',
    "unexpected": 'The {} has, and nothing takes (allow=["unexpected"] leaves them out)',
    "mismatched": "Of another shape",
    "shard": "As one rank's shard, it seems, in place of the whole tensor (it was saved from "
    "named_parameters() or to_local(); save state_dict() of the outermost module, or by "
    "save_checkpoint)",
    "dtype": 'Of another dtype (allow=["dtype"] converts)',
    "kind": "Of another kind of dtype, which is not converted",
    "untied": "One tensor in the model, and several in the {}",
    "groups": "Parameter groups that are divided in another way than in the {}",
    "flat": "Without the state that others of the same flat parameter have (wrap with "
    "use_orig_params=True, which keeps them apart)",
    "class": "State of another optimizer",
}


# Returns more lines for an error, from what is missing and what is unexpected.
Hints = Callable[[Sequence[str], Sequence[str]], list[str]]


def check_fits(
    path: Path | str,
    kind: str,
    everyones: Sequence[Sequence[str]],
    allow: Collection[str],
    *,
    advice: str,
    hints: Hints = lambda *_: [],
) -> dict[str, list[str]]:
    """Refuse what does not fit and is not allowed.

    path, kind: of what tensors come from ("checkpoint"). everyones: the problems that each rank has found.
    advice: what to do. Returns the problems by kind, allowed ones then. Raises CheckpointError.
    """
    groups: dict[str, list[str]] = {}
    for problem in dict.fromkeys(p for own in everyones for p in own):
        word, _, text = problem.partition(" ")
        groups.setdefault(word, []).append(text)
    # What one rank does not take, another may: pipeline stages.
    by_none = set.intersection(*(set(own) for own in everyones))
    if "unexpected" in groups:
        groups["unexpected"] = [
            text for text in groups["unexpected"] if f"unexpected {text}" in by_none
        ]
    refused = {k: v for k, v in groups.items() if v and k not in allow}
    if refused:
        lines = [f"{path}: does not fit.", *_described(refused, kind, hints), advice]
        raise CheckpointError("\n".join(lines))
    return groups


def other_shape(name: str, saved: Sequence[int], own: Sequence[int], kind: str) -> str:
    """Return the problem of a tensor that has another shape in the files than here.

    kind: what the tensors come from, for messages.
    """
    problem = "shard" if _is_like_shard(saved, own) else "mismatched"
    return f"{problem} {name}: {tuple(saved)} in the {kind}, {tuple(own)} here"


def _is_like_shard(saved: Sequence[int], own: Sequence[int]) -> bool:
    """Whether a tensor may be what one of several ranks has of another: a flat piece, or rows."""
    if len(saved) == 1:
        return saved[0] < own[0] if len(own) == 1 else saved[0] <= math.prod(own) and len(own) > 1
    has_rows_of_it = len(saved) == len(own) > 1 and tuple(saved[1:]) == tuple(own[1:])
    return has_rows_of_it and 2 * saved[0] <= own[0] + 1


def listed(allow: Collection[str] | str | None) -> list[str]:
    """Return what may differ, however users have said it, as all ranks have it that said the same."""
    if allow is None:
        return []
    if isinstance(allow, str) or not isinstance(allow, Iterable):
        return [str(allow)]
    return sorted(map(str, allow))


def check_allowed(allow: Collection[str] | str | None, known: Collection[str]) -> frozenset[str]:
    """Return what may differ. Raises CheckpointError for what is not known."""
    unknown = [each for each in listed(allow) if each not in known]
    if unknown:
        raise CheckpointError(f"allow: {unknown} is not known. Use {', '.join(known)}.")
    return frozenset(listed(allow))


def _described(groups: dict[str, list[str]], kind: str, hints: Hints) -> Iterator[str]:
    if "mismatched" in groups:  # another model, whose shapes may look like shards as well
        groups["mismatched"] += groups.pop("shard", [])
    for word, texts in groups.items():
        yield f"  {_TITLES[word].format(kind)}: {len(texts)}"
        yield from (f"    {text}" for text in texts[:_MOST_LISTED])
        if len(texts) > _MOST_LISTED:
            yield f"    ... and {len(texts) - _MOST_LISTED} more"
    missing, unexpected = groups.get("missing", ()), groups.get("unexpected", ())
    hinted = hints(missing, unexpected)
    renamed = [] if hinted else _renames(missing, unexpected)
    if renamed:
        yield "  Perhaps renamed:"
        yield from (f"    {old} -> {new}" for old, new in renamed[:_MOST_LISTED])
    yield from hinted


def _renames(missing: Sequence[str], unexpected: Sequence[str]) -> list[tuple[str, str]]:
    """Guess which unexpected name is which missing one, each once, the most alike first."""
    close = [
        (difflib.SequenceMatcher(None, old, name).ratio(), old, name)
        for name in missing[: 5 * _MOST_LISTED]
        for old in difflib.get_close_matches(name, unexpected, n=3, cutoff=0.7)
    ]
    found: dict[str, str] = {}
    for _, old, name in sorted(close, key=lambda each: -each[0]):
        if old not in found and name not in found.values():
            found[old] = name
    return sorted(found.items(), key=lambda pair: missing.index(pair[1]))


# Memory of hosts
#
# Linux gives out memory that it does not have, and kills a process when it is written to. What a load writes
# to is known before: if it cannot fit, all ranks get an error in place of a signal.
#
# [Note: A lower bound] Only what is certain counts. When a rank has loaded, its tensors in host memory are
# resident; so it needs at least their size beyond all that it occupies now, whatever that is. Optimizer
# state counts as large as in the files, divided among ranks as what they train is: replicas need more.
# Memory counts as free with caches of files and swap.

logger = logging.getLogger("fullshard")

_CLOSE = 0.9  # of what is free without swap


# What is loaded: models, optimizers, and the bytes of all optimizer state in the files.
Load = tuple[Iterable[nn.Module], Iterable[torch.optim.Optimizer], int]


class _Rank(NamedTuple):
    """What a rank tells the others. held: bytes of the tensors that are loaded, in host memory."""

    held: int
    trained_numel: int
    resident: int
    pools: dict[str, Pool]


def check_room(peers: Peers, path: Path | str, load: Callable[[], Load]) -> None:
    """Raise CheckpointError, on all ranks, if some host lacks memory for a load. Collective.

    load: returns what is loaded; its error is raised on all ranks. Logs a warning where it is close. See
    [Note: A lower bound].
    """

    def own() -> tuple[int, _Rank]:
        models, optimizers, state_nbytes = load()
        held = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
        in_groups = (p for o in optimizers for group in o.param_groups for p in group["params"])
        trained = (parameter for parameter in in_groups if parameter.requires_grad)
        return state_nbytes, _Rank(
            sum(tensor.nbytes for tensor in _in_host_memory(held.values())),
            sum(tensor.numel() for tensor in _in_host_memory(trained)),
            resident_nbytes() or 0,
            memory_pools(),
        )

    state_nbytes, ranks = peers.together_telling(own)
    num_trained = sum(each.trained_numel for each in ranks)
    loaded = [
        each.held + (state_nbytes * each.trained_numel // num_trained if num_trained else 0)
        for each in ranks
    ]
    for key in dict.fromkeys(key for each in ranks for key in each.pools):
        members = [number for number, each in enumerate(ranks) if key in each.pools]
        needed = sum(max(loaded[n] - ranks[n].resident, 0) for n in members)
        pool = max((ranks[n].pools[key] for n in members), key=lambda one: one.free_nbytes)
        what = (
            f"{path}: on {pool.name} (ranks {', '.join(map(str, members))}), tensors of "
            f"{_size(sum(loaded[n] for n in members))} are to be loaded into host memory. At least {_size(needed)} "
            f"of that is not there yet, and {_size(pool.free_nbytes + pool.swap_nbytes)} can be had, caches and "
            "swap included."
        )
        if needed > pool.free_nbytes + pool.swap_nbytes:
            raise CheckpointError(
                f"{what} Use more hosts, let devices hold the model, or free memory. "
                'If this is wrong, allow=["memory"] tries it.'
            )
        if needed > _CLOSE * pool.free_nbytes and peers.rank == members[0]:
            logger.warning("%s That is close: the system may end a process.", what)


def check_copies(nbytes: int) -> None:
    """Raise CheckpointError if this rank alone lacks the memory for new copies of so many bytes."""
    for pool in memory_pools().values():
        if nbytes > pool.free_nbytes + pool.swap_nbytes:
            raise CheckpointError(
                f"A save in the background needs copies of {_size(nbytes)}, and on {pool.name} "
                f"{_size(pool.free_nbytes + pool.swap_nbytes)} can be had. Use save_checkpoint, which copies nothing."
            )


def _in_host_memory(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what of tensors this rank has, if that is on the CPU."""
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type == "cpu":
            yield local


def _size(nbytes: int) -> str:
    return f"{math.ceil(nbytes / 2**20):,} MiB"
