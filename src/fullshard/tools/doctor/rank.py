"""One rank of an examination: looks at itself, meets the others, tries things, and reports or leaves.

    facts -> meeting -> hosts -> Gloo -> NCCL -> fullshard -> report

What fails is a result, and ends the examination of what depends on it. Rank 0 reports, or the
first of those that came. A step that hangs is ended by a timer, with a report of what is known.
"""

import contextlib
import dataclasses
import datetime
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.local_ranks import die_with_launcher
from fullshard.tools.doctor.facts import Arrival, Examination, RankFacts, Results
from fullshard.tools.doctor.findings import counted, numbered
from fullshard.tools.doctor.machine import count_open_files, look_at_rank
from fullshard.tools.doctor.printing import show
from fullshard.tools.doctor.together import (
    Meeting,
    MeetingError,
    join,
    knock_at_hosts,
    measure_links,
    plan_pairs,
    reduce_over_nccl,
    try_fullshard,
)
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Place, leave
from fullshard.tools.progress import Reporter, reporting
from fullshard.versions import VERSION

_SLACK_S = 30.0  # beyond the timeout, before a step counts as stuck
_LATER_S = 15.0  # by which other ranks wait longer, so that the one that reports ends first
_ARRIVAL, _FACTS, _RESULTS = "arrival", "facts", "results"


def run_rank(
    place: Place, environment: Mapping[str, str], *, timeout_s: float, as_json: bool
) -> Exit:
    """Run one rank of an examination from start to end, and return its exit code."""
    die_with_launcher(place.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    has_agent_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with reporting(rank=place.rank) as report:
        facts = look_at_rank(place, environment)
        rank = _Rank(place, facts, report, timeout_s=timeout_s, as_json=as_json)
        try:
            return rank.run(has_agent_store=has_agent_store)
        except dist.DistError as error:
            report.end()
            _say(f"rank {place.rank} lost the ranks' meeting place: {error}. See rank 0's report.")
            leave(Exit.FAILED)


def report_without_ranks(
    reason: str, place: Place, environment: Mapping[str, str], *, as_json: bool
) -> Exit:
    """Report on this machine alone, because ranks cannot be started.

    place: that rank 0 would have had.
    """
    exam = _begin(place, look_at_rank(place, environment), timeout_s=0.0)
    exam.start_error = reason
    return show(exam, as_json=as_json)


def _begin(place: Place, facts: RankFacts, *, timeout_s: float) -> Examination:
    """Return what one rank knows before it meets others."""
    machine, devices = facts.machine, facts.devices
    gpu = "" if devices.current is None else devices.found[devices.current].uuid
    arrival = Arrival(facts.rank, machine.name, machine.boot_id, facts.pid, VERSION, gpu)
    return Examination(
        num_ranks=place.num_ranks,
        timeout_s=timeout_s,
        reporter=0,
        arrivals=(arrival,),
        ranks=(facts,),
        num_local_ranks=place.num_local_ranks,
    )


class _Rank:
    """What one rank knows so far, so that it can report at any moment."""

    def __init__(
        self, place: Place, facts: RankFacts, report: Reporter, *, timeout_s: float, as_json: bool
    ) -> None:
        self._began = time.monotonic()
        self._place = place
        self._facts = facts
        self._report = report
        self._timeout_s = timeout_s
        self._as_json = as_json
        self._results = Results(place.rank)
        self._exam = _begin(place, facts, timeout_s=timeout_s)
        self._exam.meeting_place = f"{place.master_host}:{place.master_port}"
        self._timer = threading.Timer(0, self._end_stuck)

    def run(self, *, has_agent_store: bool) -> Exit:
        place, timeout_s = self._place, self._timeout_s
        self._step(f"waiting for {counted(place.num_ranks, 'rank')}", 2 * timeout_s)
        try:
            meeting = join(place, has_agent_store=has_agent_store, timeout_s=timeout_s)
        except MeetingError as error:
            return self._alone(str(error))
        meeting.post(_FACTS, self._facts)
        meeting.post(_ARRIVAL, dataclasses.asdict(self._exam.arrivals[0]))
        if not meeting.arrive("start"):
            return self._incomplete(meeting)
        self._know(meeting, range(place.num_ranks))
        is_well = self._examine(meeting)
        self._results.open_files = count_open_files()
        meeting.post(_RESULTS, self._results)
        is_well &= self._arrive(meeting, "end")
        return self._end(meeting, is_well=is_well)

    # Ways to end

    def _alone(self, reason: str) -> Exit:
        """End without others; one rank of each host says what its host has."""
        self._exam.reporter = self._place.rank
        self._exam.meeting_error = reason
        if self._place.local_rank == 0:
            return self._show()
        self._timer.cancel()
        _say(f"rank {self._place.rank} cannot reach {self._exam.meeting_place}: {reason}")
        return Exit.FAILED

    def _incomplete(self, meeting: Meeting) -> Exit:
        """End with those that came; the first of them reports."""
        meeting.give_up("start")
        came = meeting.came("start")
        if self._place.rank != came[0]:
            self._timer.cancel()
            return Exit.OK
        self._know(meeting, came)
        return self._show()

    def _end(self, meeting: Meeting, *, is_well: bool) -> Exit:
        """Report, or wait until rank 0 has: it may hold the store that others still use."""
        code = Exit.OK
        self._timer.cancel()
        if self._place.rank == 0:
            self._exam.results = [self._results]
            with contextlib.suppress(dist.DistError):
                known = [each.rank for each in self._exam.ranks]
                came = [rank for rank in meeting.came("end") if rank in known]
                self._exam.results = [meeting.posted(_RESULTS, rank) for rank in came]
            code = self._show()
        with contextlib.suppress(dist.DistError):  # the store may have ended with rank 0
            if self._place.rank == 0:
                meeting.store.set("over", "")
            else:
                limit = datetime.timedelta(seconds=self._timeout_s + _SLACK_S)
                meeting.store.wait(["over"], limit)
        if not is_well:
            self._report.end()
            leave(code)
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _end_stuck(self, what: str) -> None:
        """Report what is known, without the store: the thread that hangs may be inside it."""
        self._exam.stuck = what
        self._exam.results = (self._results,)
        _say(f"rank {self._place.rank} hangs: {what}")
        leave(self._show() if self._place.rank == 0 else Exit.FAILED)

    def _show(self) -> Exit:
        self._timer.cancel()
        self._report.end()
        self._exam.seconds = time.monotonic() - self._began
        return show(self._exam, as_json=self._as_json)

    # What ranks try together, each only if the one before went well

    def _examine(self, meeting: Meeting) -> bool:
        """Return whether everything went well, on all ranks."""
        by_host: dict[tuple[str, str], list[int]] = {}
        for each in self._exam.arrivals:
            by_host.setdefault((each.host, each.boot_id), []).append(each.rank)
        hosts = list(by_host.values())
        scopes = hosts if len(hosts) == 1 else [*hosts, list(range(self._place.num_ranks))]
        leaders = [ranks[0] for ranks in hosts]
        devices = dict.fromkeys([torch.device("cpu"), self._device])
        tried, limit = functools.partial(self._tried, meeting), self._timeout_s
        knock = functools.partial(knock_at_hosts, meeting, self._facts, leaders)

        def shard() -> Sequence[Any]:
            return tuple(one for device in devices for one in try_fullshard(scopes, device))

        what = f"connecting {counted(len(hosts), 'host')}"
        if len(hosts) > 1 and not tried("knocks", what, limit, knock):
            return False
        if not self._connect(meeting):
            return False
        exchange = functools.partial(measure_links, self._place.rank, plan_pairs(hosts))
        seconds = limit + 2 * self._place.num_ranks
        if not tried("links", "exchanging messages between ranks", seconds, exchange):
            return False
        reduce = functools.partial(reduce_over_nccl, scopes, self._device, limit)
        if self._may_try_nccl() and not tried(
            "collectives", "summing over NCCL", limit * len(scopes), reduce
        ):
            return False
        what = "training a small sharded model for a step"
        return tried("communications", what, 2 * limit, shard)

    def _tried(
        self, meeting: Meeting, name: str, what: str, seconds: float, look: Callable[[], Any]
    ) -> bool:
        """Keep what is found, as the results of that name; return whether it is free of errors on all ranks."""
        self._step(what, seconds)
        found = look()
        setattr(self._results, name, found)
        return self._arrive(meeting, name, is_well=not any(each.error for each in found))

    def _connect(self, meeting: Meeting) -> bool:
        """Make the process group of all ranks."""
        self._step("connecting ranks over Gloo", self._timeout_s)
        uses_nccl = self._device.type == "cuda" and "nccl" in self._facts.backends
        try:
            if self._device.type == "cuda":
                torch.accelerator.set_device_index(self._device.index)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if uses_nccl else "gloo",
                store=dist.PrefixStore("group", meeting.store),
                rank=self._place.rank,
                world_size=self._place.num_ranks,
                timeout=datetime.timedelta(seconds=self._timeout_s),
            )
        except (dist.DistError, RuntimeError) as error:
            self._results.errors = {"gloo": str(error).splitlines()[0]}
        return self._arrive(meeting, "gloo", is_well=not self._results.errors)

    def _may_try_nccl(self) -> bool:
        """Say whether each rank has a GPU of its own, and note if that alone is what lacks."""
        gpus = [(each.boot_id, each.gpu) for each in self._exam.arrivals]
        if not all(gpu for _, gpu in gpus) or self._place.num_ranks == 1:
            return False
        is_built, is_shared = "nccl" in self._facts.backends, len(set(gpus)) < len(gpus)
        if (is_shared or not is_built) and self._place.rank == 0:
            why = "ranks share a GPU" if is_built else "this torch is built without it"
            self._results.errors = {"nccl": why}
        return is_built and not is_shared

    # Small things

    @property
    def _device(self) -> torch.device:
        current = self._facts.devices.current
        return torch.device("cpu") if current is None else torch.device("cuda", current)

    def _step(self, what: str, seconds: float) -> None:
        """Begin a step, which takes the one before as ended and has so many seconds."""
        self._report.note(f"{what} ...")
        self._timer.cancel()
        later = 0.0 if self._place.rank == 0 else _LATER_S
        self._timer = threading.Timer(seconds + _SLACK_S + later, self._end_stuck, [what])
        self._timer.daemon = True
        self._timer.start()

    def _arrive(self, meeting: Meeting, name: str, *, is_well: bool = True) -> bool:
        """Wait for all at the end of a step; note who does not come."""
        all_well = meeting.arrive(name, is_well=is_well)
        late = sorted({*range(self._place.num_ranks)} - {*meeting.came(name)})
        if late and not self._exam.stuck:
            self._exam.stuck = f"{numbered(late)} did not get to the end of step '{name}'"
        return all_well

    def _know(self, meeting: Meeting, ranks: Sequence[int]) -> None:
        """Read who came, and on the rank that reports their facts, if they are of this version."""
        exam = self._exam
        exam.reporter = ranks[0]
        exam.arrivals = tuple(Arrival(**meeting.posted(_ARRIVAL, rank)) for rank in ranks)
        if self._place.rank == ranks[0]:
            same = [each.rank for each in exam.arrivals if each.fullshard == VERSION]
            exam.ranks = tuple(meeting.posted(_FACTS, rank) for rank in same)


def _say(text: str) -> None:
    print(f"fullshard doctor: {text}", file=sys.stderr, flush=True)
