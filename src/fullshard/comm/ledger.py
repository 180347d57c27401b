"""What the ranks of a group do together, written down where each can read the others' entries.

A collective pairs with the others' by its place in the sequence, not by what it is for: where ranks
take different paths, gradients of one unit are added to those of another. So each rank enters what
it is about to do, then compares. Of two ranks that differ, the one that enters last sees it before
it has moved any data, and the other one while it waits.

    place        41                          42
    rank 0       experts.0: reduce-scatter   after backward
    rank 1       experts.0: reduce-scatter   experts.1: reduce-scatter   <- named on both ranks

[Note: Entries] An entry is its text, then one word: place and checksum. A rank writes its own word
before it reads the others', with a full fence between (see `shared_memory`, Note: Ordering), so of
two ranks at one place at least one sees the other's. Entries are overwritten in turns: one of
another place says nothing.
"""

import zlib
from collections.abc import Callable, Sequence

from fullshard.errors import DivergenceError

_KEPT = 64  # entries of each rank; whoever is further ahead can no longer be compared with
_WORD_NBYTES = 8
_TEXT_NBYTES = 120
_ENTRY_NBYTES = _WORD_NBYTES + _TEXT_NBYTES
_PLACES = (1 << 31) - 1

NBYTES = _KEPT * _ENTRY_NBYTES  # of one rank's part


class Ledger:
    """The entries of one group's ranks.

    ranks: global rank of each.
    memory: shared by all, zeroed, `NBYTES` for each rank, one rank's part after the other's.
    fence: orders what this rank wrote before what it reads after.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], memory: memoryview, fence: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._ranks = list(ranks)
        self._fence = fence
        self._text = memory.cast("B")
        self._words = self._text.cast("q")
        self._place = 0
        self._known: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._stride = NBYTES // _WORD_NBYTES
        self._own = rank * self._stride
        self._others = [other * self._stride for other in range(len(ranks)) if other != rank]

    def enter(self, what: str, nbytes: int = 0) -> None:
        """Say what this rank does next, which all ranks have to do at the same place.

        nbytes: how much it moves; ranks have to agree on it as well. Raises DivergenceError if a
        rank has entered something else at this place.
        """
        known = self._known.get((what, nbytes))
        if known is None:
            known = self._known[what, nbytes] = _encoded(what, nbytes)
        checksum, text = known
        self._place = place = self._place + 1
        slot = place % _KEPT
        word = (place & _PLACES) << 32 | checksum
        start = (self._own + slot * (_ENTRY_NBYTES // _WORD_NBYTES)) * _WORD_NBYTES
        self._text[start + _WORD_NBYTES : start + _ENTRY_NBYTES] = text
        words, offset = self._words, slot * (_ENTRY_NBYTES // _WORD_NBYTES)
        words[self._own + offset] = word
        self._fence()
        for other in self._others:
            seen = words[other + offset]
            if seen != word and seen >> 32 == place & _PLACES:
                self._refuse(place)

    def compare(self) -> None:
        """Compare what is still kept, for a rank that waits. Raises DivergenceError."""
        for place in range(max(1, self._place - _KEPT + 1), self._place + 1):
            if len(set(self._at(place).values())) > 1:
                self._refuse(place)

    def _at(self, place: int) -> dict[int, int]:
        """Return the word of each rank that has entered something at a place."""
        offset = place % _KEPT * (_ENTRY_NBYTES // _WORD_NBYTES)
        words = (self._words[rank * self._stride + offset] for rank in range(len(self._ranks)))
        return {rank: word for rank, word in enumerate(words) if word >> 32 == place & _PLACES}

    def _refuse(self, place: int) -> None:
        offset = place % _KEPT * _ENTRY_NBYTES + _WORD_NBYTES
        ranks_of: dict[str, list[int]] = {}
        for rank in self._at(place):
            start = rank * NBYTES + offset
            text = (
                bytes(self._text[start : start + _TEXT_NBYTES])
                .rstrip(b"\0")
                .decode(errors="replace")
            )
            ranks_of.setdefault(text, []).append(self._ranks[rank])
        seen = "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
            for text, ranks in ranks_of.items()
        )
        raise DivergenceError(
            f"Ranks took different paths through the model (seen by rank {self._ranks[self._rank]}"
            f", at step {place} of their group): {seen}. They would have exchanged what belongs to "
            "different units. Let every rank run the same units in the same order. A unit whose "
            "parameters only some ranks use may be called with set_reduce_scatter_unused_params("
            "True): all ranks then take part in its reduction, at the end of backward."
        )


def _encoded(what: str, nbytes: int) -> tuple[int, bytes]:
    """Return the checksum and the text of an entry."""
    text = (f"{what} ({nbytes} bytes)" if nbytes else what).encode()
    return zlib.crc32(text), text[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
