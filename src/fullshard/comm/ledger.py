"""A ledger of what the ranks of a group do together, in memory that all of them can read.

Collectives of different ranks are paired by their place in the sequence, not by their purpose. So
where ranks take different paths, gradients of one unit would be added to those of another. To find
that out, each rank enters in the ledger what it is about to do, and compares it with what others
have entered at the same place. Of two ranks that differ, the one that enters last sees it before
it has moved any data, and the other one while it waits.

    place        41                          42
    rank 0       experts.0: reduce-scatter   after backward
    rank 1       experts.0: reduce-scatter   experts.1: reduce-scatter   <- named on both ranks

[Note: Entries] An entry is a word (the place in its upper half, a checksum of the text in its lower
half) and the text. A rank writes its own word before it reads the others', with a full memory fence
in between (see `shared_memory`, Note: Ordering). So of two ranks at one place, at least one sees
the other's word. A slot is used again every 64 places; a word with another place is no evidence of
anything.
"""

import zlib
from collections.abc import Callable, Sequence

from fullshard.errors import DivergenceError

# Entries kept per rank. A rank that is further ahead has overwritten what it would be compared by.
_KEPT = 64
_WORD_NBYTES = 8
_TEXT_NBYTES = 120
_ENTRY_NBYTES = _WORD_NBYTES + _TEXT_NBYTES
_PLACES = (1 << 31) - 1  # places are counted modulo 2**31, so that a signed word has room for them

_OTHER_SIZES = (
    "It is one operation of one unit, with other sizes. Give its parameters the same shapes and "
    "dtypes on every rank, and its gradients too: on some ranks they may be wider than the "
    "parameters, from an autograd.Function that returns float32 for bfloat16."
)
_OTHER_UNITS = (
    "Going on would mix up the data of different units. Let every rank run the same units in the "
    "same order. Or, where ranks read each other's memory (describe(model) says so), call "
    "set_reduce_scatter_unused_params(True) on units that only some ranks run: all ranks then take "
    "part in their reduction, at the end of backward."
)

NBYTES = _KEPT * _ENTRY_NBYTES  # size of one rank's part


class Ledger:
    """The entries of one group's ranks.

    rank: this rank's number in the group.
    ranks: global rank of each rank of the group, for messages.
    memory: shared by all ranks and zeroed: `NBYTES` per rank, one rank's part after the other.
    fence: keeps later reads of this thread from moving before its earlier writes.
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
        # Encoded entries: the same ones come in every step, and encoding costs more than entering.
        self._known: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._stride = NBYTES // _WORD_NBYTES
        self._own = rank * self._stride
        self._others = [other * self._stride for other in range(len(ranks)) if other != rank]

    def enter(self, what: str, nbytes: int = 0) -> None:
        """Enter what this rank does next; all ranks must do the same at the same place.

        nbytes: bytes that it moves, on which ranks have to agree as well. Raises DivergenceError if
        another rank has entered something else at this place.
        """
        known = self._known.get((what, nbytes))
        if known is None:
            known = self._known[what, nbytes] = _encoded(what, nbytes)
        checksum, text = known
        self._place = place = self._place + 1
        slot = place % _KEPT
        word = (place & _PLACES) << 32 | checksum
        start = (self._own + slot * (_ENTRY_NBYTES // _WORD_NBYTES)) * _WORD_NBYTES
        # Text first: a rank that sees the word may print the text at once.
        self._text[start + _WORD_NBYTES : start + _ENTRY_NBYTES] = text
        words, offset = self._words, slot * (_ENTRY_NBYTES // _WORD_NBYTES)
        words[self._own + offset] = word
        # Without it this rank could read the others' words before its own is visible. If two ranks
        # did so, neither would see the other's: see [Note: Entries].
        self._fence()
        for other in self._others:
            # A word of another place is of a rank that has yet to come here, or is long past it.
            seen = words[other + offset]
            if seen != word and seen >> 32 == place & _PLACES:
                self._refuse(place)

    def compare(self) -> None:
        """Compare all entries that are still there. Raises DivergenceError if two ranks differ.

        A rank calls it while it waits: others may have entered something since it did.
        """
        for place in range(max(1, self._place - _KEPT + 1), self._place + 1):
            if len(set(self._at(place).values())) > 1:
                self._refuse(place)

    def _at(self, place: int) -> dict[int, int]:
        """Return, by rank, the words of the ranks whose slot holds an entry of this place."""
        offset = place % _KEPT * (_ENTRY_NBYTES // _WORD_NBYTES)
        words = (self._words[rank * self._stride + offset] for rank in range(len(self._ranks)))
        return {rank: word for rank, word in enumerate(words) if word >> 32 == place & _PLACES}

    def _refuse(self, place: int) -> None:
        """Raise DivergenceError with what each rank has entered at a place."""
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
        is_same = len({text.rpartition(" (")[0] for text in ranks_of}) == 1
        has_sizes = all(text.endswith(" bytes)") for text in ranks_of)  # they are not cut off
        raise DivergenceError(
            f"Ranks took different paths through the model (seen by rank {self._ranks[self._rank]}"
            f", at step {place} of their group): {seen}. "
            + (_OTHER_SIZES if is_same and has_sizes else _OTHER_UNITS)
        )


def _encoded(what: str, nbytes: int) -> tuple[int, bytes]:
    """Return the checksum and the text of an entry, cut or padded to its size."""
    text = (f"{what} ({nbytes} bytes)" if nbytes else what).encode()
    # The checksum is of the whole text, so entries that differ only beyond the cut still differ.
    return zlib.crc32(text), text[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
