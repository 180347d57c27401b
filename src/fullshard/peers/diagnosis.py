"""What is wrong, in words: judged by what ranks have entered in their flight records, and what they say of themselves.

Nothing here asks, waits or reads a clock. The same facts give the same words on every rank.

**Ranks that differ.** At one place of a group's flight record all ranks must have entered the same. Where they have not, their
trails (`paths`) tell where they parted.

**Ranks that stand still.** A rank that has done nothing for a second posts a `RankStatus`. Who waits for whom follows from
counters: a rank that is blocked in a collective waits for every member of its group that has issued fewer.

    rank 0   blocked in ours       group "0": 17 issued, at place 42 of the flight record
    rank 1   blocked in a barrier  group "0": 18 issued, at place 41
    -> 0 waits for 1 (place 41 < 42), 1 waits for 0 (17 < 18): neither will ever go on

[Note: Certainty] An error here ends a run, so a rank counts as blocked only if it has said the same
several times and runs no other threads of the program's, and ranks count as stuck only if all that they wait for, and all that those wait for,
are blocked and known. A rank that computes, loads data, or is silent may still come; a collective that
all its ranks have issued may still be moving bytes. Neither is ever called stuck.

**Ranks that are lost.** Their processes have ended, or do not answer, while others wait for them.
"""

import dataclasses
import itertools
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fullshard.errors import CommError, PeerLostError, PeerTimeoutError
from fullshard.peers.paths import (
    Event,
    by_text,
    counting,
    first_difference,
    name_ranks,
    said,
    without_gradients,
)
from fullshard.peers.status import NEW_GROUPS, STEADY_BEATS, RankStatus, State, Tails, Verdict

_ASKED_TO_END = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
_NAMES_SHOWN = 6  # parameters in a message
RESTART = "; restart from the last checkpoint"  # `fullshard train` says instead what to type
_CAUSE = f"The cause is in that rank's own output{RESTART}."
_LEAVE_TOGETHER = (
    "Run the same number of steps on every rank: one that runs out of data has to tell the others."
)


# Ranks that differ


class Names(NamedTuple):
    """What a group's units are called. models: their classes, by number. parameters: by the unit."""

    models: Sequence[str]
    parameters: Mapping[str, Sequence[str]]


def describe_difference(
    place: int,
    entries: Mapping[int, str],
    trails: Mapping[int, Sequence[Event]],
    names: Names,
) -> str:
    """Say which ranks entered what at a place where they differ, and where their paths parted, as far as that is known.

    entries: moments and texts by global rank. trails: of some ranks.
    """
    lacking = [_lacking(names, *found) for found in without_gradients(trails).items()]
    sentences = [
        f"Ranks took different paths. At place {place} of what their group does together: {said(entries)}.",
        first_difference(trails),
        *lacking,
        _in_models(names, trails),
        _remedy({text.partition(": ")[2] for text in entries.values()}),
    ]
    return counting(" ".join(filter(None, sentences)))


def describe_lines(lines_of: dict[int, Sequence[str]]) -> str:
    """Return the first lines in which ranks differ, as a message; empty if none do."""
    for lines in itertools.zip_longest(*lines_of.values(), fillvalue="nothing more"):
        if len(set(lines)) > 1:
            seen = said(dict(zip(lines_of, lines, strict=True)))
            return (
                f"Ranks have built different models, or run different code. {seen}. Build the model "
                "from the same code and settings on every rank, and freeze the same parameters."
            )
    return ""


def _lacking(names: Names, unit: str, ranks: Sequence[int]) -> str:
    """Say on which ranks a unit's parameters have no gradient."""
    params = names.parameters.get(unit, ())
    more = f" and {len(params) - _NAMES_SHOWN} more" if len(params) > _NAMES_SHOWN else ""
    shown = f"{', '.join(params[:_NAMES_SHOWN])}{more}" if params else unit
    return f"No gradient on {name_ranks(ranks)}, in backward so far: {shown}."


def _in_models(names: Names, trails: Mapping[int, Sequence[Event]]) -> str:
    """Say in which models ranks are, if there are several, whose units may have the same names."""
    if len(names.models) < 2:
        return ""
    texts = {
        rank: f"{trail[-1].model + 1} ({names.models[trail[-1].model]})"
        for rank, trail in trails.items()
        if trail and trail[-1].model < len(names.models)
    }
    seen = [f"{ranks} in {text}" for ranks, text in by_text(texts)]
    return f"Of {len(names.models)} models: {', '.join(seen)}." if seen else ""


def _remedy(texts: Collection[str]) -> str:
    """Say what to do about entries that differ."""
    if any(text.partition(" (digest ")[0].endswith((" now", " more")) for text in texts):
        return "Freeze the same parameters on every rank, before the same step."
    if any(text.startswith("allocating shards") for text in texts):
        return "Build and shard the same model on every rank, in the same order."
    has_sizes = all(text.endswith(" bytes)") for text in texts)  # they are not cut off
    if has_sizes and len({text.rpartition(" (")[0] for text in texts}) == 1:
        return (
            "It is one operation of one unit, with other sizes. Give its parameters the same shapes and "
            "dtypes on every rank, and its gradients too: on some ranks they may be wider than the "
            "parameters, from an autograd.Function that returns float32 for bfloat16."
        )
    # Of units that only some ranks run, reductions meet other reductions, or the end of the pass.
    if any(": reduce-scatter" in text for text in texts):
        return (
            "Let every rank run the same units in the same order, and make the same calls. For modules "
            "that only some ranks run: set_unused(module, 'zero', may_be_skipped=True)."
        )
    return "Let every rank make the same calls, in the same order."


def first_mismatch(tails: Mapping[int, Tails]) -> tuple[str, int, Mapping[int, str]] | None:
    """Return a group's key, the first place at which its flight records differ, and moments and texts there by rank.

    tails: by rank. None if none differ as far as they are known.
    """
    for key in dict.fromkeys(key for each in tails.values() for key in each):
        at: dict[int, dict[int, tuple[int, str]]] = {}
        for rank, each in tails.items():
            for place, checksum, text in each.get(key, ()):
                at.setdefault(place, {})[rank] = checksum, text
        for place, entries in sorted(at.items()):
            if len({checksum for checksum, _ in entries.values()}) > 1:
                return key, place, {rank: text for rank, (_, text) in entries.items()}
    return None


# Ranks that stand still


def judge(own: RankStatus, statuses: Mapping[int, RankStatus]) -> Verdict | None:
    """Return the verdict for this rank if it can never go on. statuses: of all ranks that have posted one, and ``own``."""
    # The collectives on its device will never end, though it may not wait for them yet.
    ended = ended_without(own, statuses)
    stuck = {own.rank} if ended else find_stuck(statuses)
    if own.rank not in stuck:
        return None
    others = [each for rank, each in sorted(statuses.items()) if rank != own.rank]
    for each in others:
        if each.verdict is not None:
            return Verdict(each.verdict.text, each.verdict.is_loss, ranks=stuck)
    text = describe_stuck(statuses, stuck, ended)
    has_failed = any(each.state is State.ENDED and each.error for each in others)
    return Verdict(text, is_loss=has_failed, ranks=stuck)


def waits_for(status: RankStatus, statuses: Mapping[int, RankStatus]) -> set[int] | None:
    """Return the ranks that a blocked rank waits for; None if one of them may be unknown."""
    found: set[int] = set()
    if status.late:
        return {*status.late} if statuses.keys() >= {*status.late} else None
    for key, counts in status.groups.items():
        if key not in (status.waited or status.groups.keys() - {NEW_GROUPS}):
            continue
        members = {rank: each for rank, each in statuses.items() if key in each.groups}
        found |= {rank for rank, each in members.items() if _waits(status, each, key)}
        if len(members) < counts.size:
            return None  # who is not known may be the one that it waits for
    return found


def _waits(one: RankStatus, other: RankStatus, key: str) -> bool:
    """Whether one rank has issued or entered something in a group that another has not."""
    mine, its = one.groups[key], other.groups[key]
    if its.issued < mine.issued or its.place < mine.place:
        return True
    if mine.issued != its.issued:
        return False
    # Both have issued equally many, so this one's last is paired with the other's last. They are no pair
    # if the program calls different functions, in this group as far as is known,
    has_ops = one.op != "" and other.op not in ("", one.op)
    if has_ops and other.is_blocked and all(key in (e.waited or (key,)) for e in (one, other)):
        return bool(one.waited or other.waited)
    # or if the other one's is fullshard's, which has entered more than this one.
    return one.state is State.CALLS and other.in_group == key and its.place > mine.place


def find_stuck(statuses: Mapping[int, RankStatus]) -> set[int]:
    """Return the ranks that can never go on, as all that they wait for are blocked or gone."""
    waits: dict[int, set[int]] = {}
    for rank, status in statuses.items():
        if status.is_blocked:
            found = waits_for(status, statuses)
            if found:  # a rank that waits for nobody we know of may yet go on
                waits[rank] = found
    # Ranks that wait for one that may go on may go on themselves, and so forth.
    while free := [
        rank
        for rank, others in waits.items()
        if any(other not in waits and not statuses[other].has_gone for other in others)
    ]:
        for rank in free:
            del waits[rank]
    return set(waits)


def ended_without(status: RankStatus, statuses: Mapping[int, RankStatus]) -> set[int]:
    """Return ranks that ended before a collective that this rank has started on a device.

    It will never be complete, and the host that waits for the device cannot be told otherwise.
    """
    if status.state is not State.RUNS or status.beat < STEADY_BEATS:
        return set()
    return {
        rank
        for rank, each in statuses.items()
        if each.state is State.ENDED and not each.has_left
        for key in status.on_device
        if key in each.groups and _waits(status, each, key)
    }


def describe_still(statuses: Mapping[int, RankStatus], world_size: int, seconds: float) -> str:
    """Say what ranks do of which none has moved for so long, one of them in a collective; empty if one moves.

    For ranks whose collectives run on a device: one that waits there looks like one that computes.
    """
    are_all_still = len(statuses) == world_size and all(
        each.beat >= STEADY_BEATS and not each.has_gone for each in statuses.values()
    )
    if not are_all_still or not any(each.is_blocked for each in statuses.values()):
        return ""
    seen = said({rank: str(each) for rank, each in statuses.items()})
    return counting(
        f"No rank has moved for {seconds:.0f} s: {seen}. A rank that is running may be waiting for its device, and the "
        "device for another rank. If no rank is computing, let every rank make the same calls in the same order. If they "
        "do not continue, the process group's timeout ends the job."
    )


def describe_stuck(
    statuses: Mapping[int, RankStatus],
    stuck: set[int],
    ended: Collection[int] = (),
) -> str:
    """Say what each stuck rank does and who is missing. The same words on every rank.

    ended: ranks that they wait for on a device.
    """
    involved = {*stuck, *ended}
    for rank in stuck:
        involved |= waits_for(statuses[rank], statuses) or set()
    gone = {rank for rank in involved if statuses[rank].has_gone}
    seen = said({rank: str(statuses[rank]) for rank in involved})
    if any(statuses[rank].error or statuses[rank].verdict for rank in gone):
        text = f"Ranks wait for {name_ranks(gone)}, which will not arrive: {seen}. {_CAUSE}"
    elif gone:
        text = f"Ranks do not end together: {seen}. {_LEAVE_TOGETHER}"
    else:
        text = (
            f"Ranks wait for each other, and none can continue: {seen}. Let every rank make the same calls "
            "in the same order. What one rank does alone must not need the others. After a DivergenceError that the program "
            "caught, destroy the process groups and make new ones."
        )
    return counting(text)


# Ranks that are lost


def loss(
    words: Mapping[int, RankStatus | None],
    codes: Mapping[int, int | None],
    entered: Mapping[int, str],
    label: str,
) -> Verdict:
    """Return the verdict on ranks that are gone while this one waits for them.

    words: the last of each, None if it has said nothing. codes: as `how_ended` takes them. entered: the last that each
    entered; empty if that is unknown.
    label: what this rank waits in, and when. No loss if they ended in order, or because of something else than one.
    """
    for rank, code in codes.items():
        if (said := words[rank]) is not None and not said.error and (code or 0) > 0:  # sys.exit(3)
            words = {**words, rank: dataclasses.replace(said, error=f"exit code {code}")}
    for status in words.values():
        if status is not None and status.verdict is not None:
            return Verdict(status.verdict.text, status.verdict.is_loss)
    texts = []
    for rank, status in sorted(words.items()):
        ended = how_ended(codes.get(rank)) if status is None else str(status)
        last = f"; its last operation: {entered[rank]}" if entered[rank] else ""
        texts.append(f"rank {rank} {ended}{last}")
    what = f"{'. '.join(texts)}. Other ranks wait for {name_ranks(words)} at {label}"
    if all(status is not None and not status.error for status in words.values()):
        return Verdict(counting(f"Ranks do not end together: {what}. {_LEAVE_TOGETHER}"))
    return Verdict(counting(f"{what}. {_CAUSE}"), is_loss=True)


def describe_end(
    rank: int,
    pid: int,
    code: int | None,
    words: RankStatus | None,
    entered: str,
    own: tuple[int, str],
) -> str:
    """Say how a rank has ended, before its launcher ends the others; empty if it had finished, or was asked to end.

    code: negative for a signal, None if unknown. words: its last, None if it has said nothing. entered: the last that it
    entered, empty if unknown. own: the rank that says this, and the last that it entered.
    """
    if words is not None and words.verdict is not None:
        return ""  # it ended because of another rank's
    if words is not None and words.error:
        how = str(words)
    elif code == 0 or code in _ASKED_TO_END or (words is not None and code is None):
        return ""
    else:
        how = how_ended(code)
    last = f" Its last operation: {entered}." if entered else ""
    here = f" Rank {own[0]} is at: {own[1]}." if own[1] else ""
    return counting(f"rank {rank} (pid {pid}) {how}.{last}{here}")


def how_ended(code: int | None) -> str:
    """Say how a process ended that has said nothing. code: negative for a signal, None if unknown."""
    if code is None:
        return "died or left without a word"
    if code >= 0:
        return f"ended without a word, with exit code {code}"
    name = signal.Signals(-code).name
    why = " (often by the system, for lack of host memory: see dmesg)" if name == "SIGKILL" else ""
    return f"died, killed by {name}{why}"


def never_came(ranks: Collection[int], label: str, *, is_late: bool) -> CommError:
    """Return the error for a collective that failed, as these ranks have sharded nothing yet.

    is_late: whether its time was over; else a connection broke.
    """
    who = name_ranks(ranks)
    waits = f"Other ranks wait for {who} at {label}."
    if is_late:
        return PeerTimeoutError(
            f"{who} had not sharded a module yet when the process group's timeout was over. {waits} If that rank is "
            "only slow, allow more: init_process_group(timeout=...)."
        )
    which = "it" if len(ranks) == 1 else "at least one of them"
    return PeerLostError(
        f"{who} had not sharded a module yet when a connection broke: {which} has ended. {waits} {_CAUSE}"
    )


def out_of_reach(label: str, own_rank: int, words: str, *, has_store: bool) -> CommError:
    """Return the error for a connection that broke, though no rank is known to have ended.

    words: the backend's. has_store: whether the store that the ranks met in answers.
    """
    if not has_store:
        return PeerLostError(
            f"{label} (rank {own_rank}): a connection broke, and the store that the ranks met in does not "
            "answer either: its host is out of reach, or rank 0 is gone and had made it (torchrun makes its own). Look at the output of rank 0 first"
            f"{RESTART}. The backend says: {words}"
        )
    return CommError(
        f"{label} (rank {own_rank}): a rank could not be reached, though no process of the "
        "group has ended on this host. Look for the cause in the output of the other ranks. The "
        f"backend says: {words}"
    )
