"""In what the ledgers of ranks differ that cannot see each other's: ranks of several hosts."""

import sys

import torch.distributed as dist

from fullshard.comm.ledger import Ledger, describe_difference, describe_lines
from fullshard.comm.outside_steps import gather_objects
from fullshard.errors import DivergenceError
from fullshard.plan.standstill import first_mismatch


def compare_tails(ledger: Ledger, group: dist.ProcessGroup) -> DivergenceError:
    """Return the error for ranks whose hashes of all entries differ. Every rank must call it."""
    own = ledger.tail(sys.maxsize), ledger.last_lines()
    everyones = dict(zip(ledger.ranks, gather_objects(own, group, "telling in what"), strict=True))
    mismatch = first_mismatch([{ledger.key: tail} for tail, _ in everyones.values()])
    if mismatch is None:
        return DivergenceError(
            "Ranks took different paths, longer ago than the ledger keeps. Use fullshard.debug(), which "
            "compares ranks at every unit."
        )
    place, entries = mismatch
    lines = {rank: lines for rank, (_, (at, lines)) in everyones.items() if at == place}
    if len(lines) == len(everyones) and (text := describe_lines(lines)):
        return DivergenceError(text)
    ranks = list(everyones)
    return DivergenceError(
        describe_difference(place, {ranks[number]: text for number, text in entries.items()})
    )
