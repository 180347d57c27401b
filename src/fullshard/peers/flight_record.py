"""A flight record of what the ranks of a group do together, where all of them can read it. One a group.

Collectives of different ranks are paired by their place in the sequence, not by their purpose. So
where ranks take different paths, gradients of one unit would be added to those of another. To find
that out, each rank enters in the flight record what it is about to do, and compares it with what others
have entered at the same place. Of two ranks that differ, the one that enters last sees it before
it has moved any data, and the other one while it waits.

    place        41                          42
    rank 0       experts.0: reduce-scatter   after backward
    rank 1       experts.0: reduce-scatter   experts.1: reduce-scatter   <- named on both ranks

Beside its entries, a rank keeps a **trail** there: which units it ran, which need not be the same.
Where entries differ, the trails tell at which unit the paths parted, often earlier.

Ranks of one host keep all that in memory that they share. Where they share none, and over NCCL, each has its own. They
agree on what comes next before they do it (see `agreed_order`), and where they do not, each shows
others the last that it entered (`tail`): see `divergence`.

[Note: Entries] An entry is a word (the place in its upper half, a checksum of the text in its lower
half), the moment (step and phase), and the text. A rank writes its own word before it reads the
others', with a full memory fence in between (see `shared_memory`, Note: Ordering). So of two ranks
at one place, at least one sees the other's word. A slot is used again after so many places as are kept; a word with
another place is no evidence of anything.
"""

import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from fullshard.errors import DivergenceError, FullshardError
from fullshard.peers.diagnosis import Names, describe_difference
from fullshard.peers.paths import Event, Moment, StepPhase

# Entries kept per rank. A rank that is further ahead has overwritten what it would be compared by.
_KEPT = 64
_KEPT_ALONE = 4096  # of a rank that shares no memory: over NCCL it may be steps ahead of what runs
_WORD_NBYTES = 8
_TEXT_NBYTES = 112
_ENTRY_WORDS = 2  # before the text: place and checksum, moment
_ENTRY_NBYTES = _ENTRY_WORDS * _WORD_NBYTES + _TEXT_NBYTES
_STRIDE = _ENTRY_NBYTES // _WORD_NBYTES  # from one entry to the next, in words
_PLACES = (1 << 31) - 1  # places are counted modulo 2**31, so that a signed word has room for them
# Of a trail, the words after its first, which counts them.
_TRAIL_KEPT = 511
_STEPS, _MODELS, _UNITS = (1 << 23) - 1, (1 << 12) - 1, (1 << 22) - 1
_CALL = 1 << 22  # the program has called the unit's module
_EMPTY = 1 << 23  # a unit whose backward has left no gradient
_SHOWN = 16  # entries in a tail


def _part_nbytes(kept: int) -> int:
    return kept * _ENTRY_NBYTES + (1 + _TRAIL_KEPT) * _WORD_NBYTES


NBYTES = _part_nbytes(_KEPT)  # size of one rank's part of shared memory


class Fence:
    """Orders what a thread wrote and read before with what it writes and reads after, if called.

    Releasing and taking a lock are a release and an acquire operation, and neither moves past the other. On x86 taking
    a lock is an atomic instruction, which also keeps a later read from moving before an earlier write, as entries need.
    release, acquire: called one after the other they are the fence, without a function of Python's around them.
    """

    __slots__ = ("acquire", "release")

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()  # held from now on, except within a fence
        self.release, self.acquire = lock.release, lock.acquire

    def __call__(self) -> None:
        self.release()
        self.acquire()


class Entry(NamedTuple):
    """What a rank entered at a place, for messages and for other hosts."""

    place: int
    checksum: int
    moment: Moment
    text: str

    def __str__(self) -> str:
        return f"{self.moment}: {self.text}"


class FlightRecord:
    """The entries of one group's ranks, and their trails.

    rank: this rank's number in the group.
    ranks: global rank of each rank of the group, for messages.
    memory: shared by all ranks and zeroed: `NBYTES` per rank, one rank's part after the other.
        None if ranks share no memory: then only this rank's part exists.
    name: of the process group, the same on all its ranks.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], memory: memoryview | None = None, name: str = ""
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.key = group_key(name, self.ranks)
        self._kept = _KEPT_ALONE if memory is None else _KEPT
        size = _part_nbytes(self._kept)
        # By rank, the words at which the parts begin that are there.
        parts = [rank] if memory is None else range(len(ranks))
        self._base = {part: number * size // _WORD_NBYTES for number, part in enumerate(parts)}
        self._own = self._base[rank]
        self._others = [base for part, base in self._base.items() if part != rank]
        self.is_shared = bool(self._others) or len(ranks) == 1
        self._text = (memoryview(bytearray(size)) if memory is None else memory).cast("B")
        self._words = self._text.cast("q")
        self._fence = Fence()
        self.place = 0
        # Encoded entries: the same ones come in every step, and encoding costs more than entering.
        self._known: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.slots: Any = None  # the group's `StatusSlots`, which live as long
        self._lines: tuple[int, Callable[[], Sequence[str]]] = (0, list)  # of a place, the last
        self._moment = 0
        self.order: Any = None  # an `AgreedOrder`, for ranks that share no memory
        self.is_on_device = False  # whether what is entered runs there, behind the host
        # The last place at which ranks differed and have been told. What they do after an error that the
        # program catches is compared from there.
        self.settled_at = 0
        self.thread = threading.main_thread().ident  # that runs the model
        self._trail = self._kept * _STRIDE  # in words, from the beginning of a part
        self._num_noted = 0
        self._first_noted = self._own + self._trail + 1
        self._units: dict[tuple[int, int], str] = {}  # names, by model and unit
        self._models: list[str] = []
        self._parameters: dict[str, list[str]] = {}
        self.names = Names(self._models, self._parameters)
        _records.add(self)

    # What all ranks have to do alike

    def enter(self, what: str, nbytes: int = 0) -> None:
        """Enter what this rank does next; all ranks must do the same at the same place.

        nbytes: bytes that it moves, on which ranks have to agree as well. Raises DivergenceError if
        another rank has entered something else at this place; where ranks share no memory, returns
        once all ranks enter this at this place, or are known to.
        """
        known = self._known.get((what, nbytes))
        if known is None:
            text = (f"{what} ({nbytes} bytes)" if nbytes else what).encode()
            # The checksum is of the whole text, so entries that differ only beyond the cut still differ.
            known = zlib.crc32(text), text[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
            self._known[what, nbytes] = known
        checksum, text = known
        self.place = place = self.place + 1
        offset = place % self._kept * _STRIDE
        word = (place & _PLACES) << 32 | checksum
        words, first = self._words, self._own + offset
        start = (first + _ENTRY_WORDS) * _WORD_NBYTES
        # Text first: a rank that sees the word may print the text at once.
        self._text[start : start + _TEXT_NBYTES] = text
        words[first + 1] = self._moment
        words[first] = word
        if self.order is not None:
            self.order.follow(self, place, checksum, what)
            return
        if not self._others:
            return
        # Without it this rank could read the others' words before its own is visible. If two ranks
        # did so, neither would see the other's: see [Note: Entries].
        self._fence.release()
        self._fence.acquire()
        for other in self._others:
            # A word of another place is of a rank that has yet to come here, or is long past it.
            seen = words[other + offset]
            if seen != word and seen >> 32 == place & _PLACES:
                raise refusal[-1](self, place)

    def enter_compared(self, what: str, digest: int, lines: Callable[[], Sequence[str]]) -> None:
        """Enter something by its digest. lines: what the digest is of, for the error if ranks differ."""
        self._lines = (self.place + 1, lines)
        self.enter(f"{what} (digest {digest:08x})")

    def compare(self) -> None:
        """Compare all entries that are still there. Raises DivergenceError if two ranks differ.

        A rank calls it while it waits: others may have entered something since it did.
        """
        if self._others:
            for place in range(max(self.settled_at, self.place - self._kept) + 1, self.place + 1):
                if len(set(self._at(place).values())) > 1:
                    raise refusal[-1](self, place)

    def tail(self, most: int = _SHOWN) -> list[tuple[int, int, str]]:
        """Return this rank's last entries, oldest first: place, checksum, moment and text."""
        first = max(self.settled_at, self.place - min(most, self._kept)) + 1
        entries = (self._entry(self.rank, place) for place in range(first, self.place + 1))
        return [(each.place, each.checksum, str(each)) for each in entries]

    def last_of(self, part: int) -> Entry | None:
        """Return the last entry of a rank of the group; None if it has none, or its part is not in reach."""
        if part not in self._base:
            return None
        words = (self._words[self._base[part] + slot * _STRIDE] for slot in range(self._kept))
        place = max(word >> 32 for word in words)
        return self._entry(part, place) if place > 0 else None

    # What ranks may do differently

    def add_model(self, kind: str, units: Sequence[tuple[str, Sequence[str]]]) -> int:
        """Return the number of a model, for `begin` and `note`. Ranks must add theirs in the same order.

        kind: its class, for messages. units: their names, and their parameters'.
        """
        number = len(self._models) & _MODELS
        self._models.append(kind)
        for unit, (name, parameters) in enumerate(units):
            self._units[number, unit] = name
            self._parameters.setdefault(name, []).extend(parameters)
        return number

    def begin(self, model: int, step: int, phase: StepPhase) -> None:
        """Set the moment of what is entered and noted from now on."""
        # Backward may run in a thread of autograd's, to its end.
        if phase in (StepPhase.FORWARD, StepPhase.EVALUATION):
            self.thread = threading.get_ident()
        self._moment = ((step & _STEPS) << 4 | phase) << 36 | model << 24

    def note(self, unit: int, *, is_empty: bool = False, is_call: bool = False) -> None:
        """Note that this rank runs a unit, by its number in the model of the moment.

        is_empty: its backward, noted before, has left no gradient. is_call: the program calls its module.
        """
        count, words = self._num_noted, self._words
        # The word before the count: whoever sees the count reads a whole word.
        words[self._first_noted + count % _TRAIL_KEPT] = (
            self._moment | unit | is_empty * _EMPTY | is_call * _CALL
        )
        words[self._first_noted - 1] = self._num_noted = count + 1

    @property
    def progress(self) -> int:
        """A number that grows with all that this rank enters and notes."""
        return self.place + self._num_noted

    @property
    def moment(self) -> Moment:
        """The moment that was begun last."""
        return _moment_of(self._moment)

    def trail_of(self, part: int) -> list[Event]:
        """Return the units that a rank of the group has run, as far as they are kept."""
        trail = self._base[part] + self._trail
        count = self._words[trail]
        # One fewer than is kept: the rank may be writing over the oldest.
        numbers = range(max(0, count - _TRAIL_KEPT + 1), count)
        events = []
        for word in [self._words[trail + 1 + number % _TRAIL_KEPT] for number in numbers]:
            model, unit = word >> 24 & _MODELS, word & _UNITS
            name = self._units.get((model, unit), f"unit {unit}")
            events.append(
                Event(_moment_of(word), model, name, not word & _EMPTY, bool(word & _CALL))
            )
        return events

    # Messages

    def _at(self, place: int) -> dict[int, int]:
        """Return, by rank, the words of the ranks whose slot holds an entry of this place."""
        offset = place % self._kept * _STRIDE
        words = ((part, self._words[base + offset]) for part, base in self._base.items())
        return {part: word for part, word in words if word >> 32 == place & _PLACES}

    def _entry(self, part: int, place: int) -> Entry:
        first = self._base[part] + place % self._kept * _STRIDE
        start = (first + _ENTRY_WORDS) * _WORD_NBYTES
        text = bytes(self._text[start : start + _TEXT_NBYTES]).rstrip(b"\0")
        checksum = self._words[first] & ((1 << 32) - 1)
        moment = _moment_of(self._words[first + 1])
        return Entry(place, checksum, moment, text.decode(errors="replace"))

    def lines_at(self, place: int) -> Sequence[str] | None:
        """Return what this rank has entered by its digest at a place; None if it was nothing such."""
        at, lines = self._lines
        return lines() if at == place else None

    def entries_at(self, place: int) -> dict[int, str]:
        """Return what ranks, by their global numbers, are known to have entered at a place: moments and texts."""
        return {self.ranks[part]: str(self._entry(part, place)) for part in self._at(place)}

    def trails(self) -> dict[int, list[Event]]:
        """Return by global rank the units that ranks in reach have run."""
        return {self.ranks[part]: self.trail_of(part) for part in self._base}


def _explained(record: FlightRecord, place: int) -> DivergenceError:
    """Return the error for ranks that differ at a place, in the words of this rank alone."""
    entries = record.entries_at(place)
    return DivergenceError(describe_difference(place, entries, record.trails(), record.names))


# What makes the error for ranks that differ, of which the last is asked: the watchdog's has all ranks raise the same.
refusal: list[Callable[[FlightRecord, int], FullshardError]] = [_explained]


def key_of(group: dist.ProcessGroup) -> str:
    """Return the key of a process group: see `group_key`."""
    return group_key(group.group_name, dist.get_process_group_ranks(group))


def group_key(name: str, ranks: Sequence[int]) -> str:
    """Return a key for a process group that is the same on all its ranks, and no other group's."""
    return f"{name} of {len(ranks)}, {zlib.crc32(str(list(ranks)).encode()):08x}"


def flight_records() -> list[FlightRecord]:
    """Return every flight record of this process that is in use."""
    return list(_records)


def last_entry_of(rank: int) -> str:
    """Return what a rank, by its global number, entered last in a record that this one can read; empty if in none."""
    found = (
        each.last_of(each.ranks.index(rank)) for each in flight_records() if rank in each.ranks
    )
    return next((str(entry) for entry in found if entry is not None), "")


def latest_moment() -> str:
    """Return the step and phase that this rank is in, of the model that is furthest; empty if it has none."""
    moments = [record.moment for record in flight_records()]
    return str(max(moments)) if moments else ""


def known_record(group: dist.ProcessGroup) -> FlightRecord | None:
    """Return the flight record of a group if it has one already. Does not communicate."""
    return _of_groups.get(group)


def keep_record(group: dist.ProcessGroup, record: FlightRecord) -> FlightRecord:
    """Return the flight record of a group: this one, if it has none yet.

    So everything that a group does is entered in one, whichever way it communicates. Every rank of the
    group must call it at the same place of their sequence.
    """
    return _of_groups.setdefault(group, record)


_records: "weakref.WeakSet[FlightRecord]" = weakref.WeakSet()
_of_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, FlightRecord]"
_of_groups = weakref.WeakKeyDictionary()


def _moment_of(word: int) -> Moment:
    return Moment(word >> 40 & _STEPS, StepPhase(word >> 36 & 15))
