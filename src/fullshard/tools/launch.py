"""Start the ranks of this machine as commands of `fullshard`, and say how they ended."""

import contextlib
import dataclasses
import gc
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fullshard.launching.processes import END_S, GRACE_S, Meeting, Process, kill_all, wait_for_end
from fullshard.local_ranks import LAUNCHER_PID, num_gpus
from fullshard.tools.doctor.findings import numbered
from fullshard.tools.exits import Exit
from fullshard.tools.slurm import variables_of_rank

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""What is passed on to ranks, which save then and end."""

# What torchrun tells its ranks. They meet in a store of the launcher's, which torch has to know.
_AS_TORCHRUN = {
    "GROUP_RANK": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "fullshard",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

FOLLOWED = "fullshard/followed/{}"  # in the launcher's store: this rank failed as another had
_LOOK_S = 0.1  # how long an end can go unseen
_SAVE_TIMEOUT_S = 300
_SILENT_S = 10.0  # before it is said which ranks are waited for
_AGAIN_S = 1.0  # between two Ctrl-C, for the second to count: time to read what the first one does


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, as its launcher said in the environment."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    master_host: str
    master_port: int
    launcher_pid: int | None
    started_by: str = "torchrun"


def place_in(environment: Mapping[str, str]) -> Place | None:
    """Read what torchrun or srun tells ranks, or None in a process that is to start its own.

    Raises OptionError for Slurm's variables in disorder.
    """
    started_by = "torchrun"
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        variables = variables_of_rank(environment)
        if variables is None:
            return None
        for name, value in variables.items():  # torch reads them too, to join the other ranks
            os.environ[name] = value
        environment = {**environment, **variables}
        started_by = "srun"
    num_ranks = int(environment["WORLD_SIZE"])
    launcher = environment.get(LAUNCHER_PID)
    return Place(
        rank=int(environment["RANK"]),
        num_ranks=num_ranks,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        num_local_ranks=int(environment.get("LOCAL_WORLD_SIZE", num_ranks)),
        master_host=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        launcher_pid=int(launcher) if launcher else None,
        started_by=started_by,
    )


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the ranks ended; `message` is empty when they have said everything themselves.

    rank: the one that failed first; None if none did. signal: what the launcher was stopped by, or 0.
    failed: exit codes of the ranks that failed by themselves, no later than any other. others: what became of the
    other ranks, as the rest of a sentence.
    """

    code: Exit
    message: str = ""
    rank: int | None = None
    signal: int = 0
    failed: Mapping[int, int] = dataclasses.field(default_factory=dict)
    others: str = ""


def may_fork() -> bool:
    """Whether ranks may be forks of this process, which have imported already what it has: that takes seconds.

    Forks do without the threads that numpy starts when it is imported, as DataLoader's workers do; other threads may
    hold locks. Nor does CUDA work in forks of a process that has asked for it.
    """
    return sys.platform == "linux" and not num_gpus() and _num_threads() == _THREADS_OF_IMPORTS


def _num_threads() -> int:
    return len([*Path("/proc/self/task").iterdir()]) if sys.platform == "linux" else 0


_THREADS_OF_IMPORTS = _num_threads()


class _Fork:
    """A fork of this process, with what `Process` asks of Popen. In it, pid is 0, and the program goes on."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # or each would look through what was imported for garbage, and copy it
        self.pid = os.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while starting
            os.setsid()
            for name, value in environment.items():
                os.environ[name] = value

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("fork", timeout)
            else:
                time.sleep(0.01)
        return self.returncode


class _ForkedProcess(Process):
    def _started(self, _: object, environment: Mapping[str, str], __: object) -> _Fork:
        return _Fork(environment)


def launch(arguments: Sequence[str], *, ranks: int, threads: int) -> Ending:
    """Run `python -m fullshard ARGUMENTS` on `ranks` local ranks until all have ended.

    Raises OSError or RuntimeError if they cannot be started.
    """
    command = [sys.executable, "-u", "-m", "fullshard", *arguments]
    ending = _launch(Process, command, ranks=ranks, threads=threads)
    assert ending is not None
    return ending


def launch_forks(*, ranks: int, threads: int) -> Ending | None:
    """Fork this process into `ranks` local ranks, until all have ended; return None in each of them.

    A rank finds its place in its environment. To be called where `may_fork` says so.
    """
    return _launch(_ForkedProcess, (), ranks=ranks, threads=threads)


def _launch(
    kind: type[Process], command: Sequence[str], *, ranks: int, threads: int
) -> Ending | None:
    meeting = Meeting(ranks, threads)
    processes: list[Process] = []
    with StopRequest() as stop:
        try:
            for rank in range(ranks):
                environment = _DEFAULTS | meeting.environment(rank) | _AS_TORCHRUN
                processes.append(kind(rank, command, environment))
                if not processes[-1].pid:
                    processes.clear()  # they are the launcher's
                    return None
            meeting.open()
            while not stop.asked:
                codes = {process.rank: process.exit_code for process in processes}
                if any(codes.values()):
                    wait_for_end(processes, GRACE_S, lambda: bool(stop.asked))
                    _end(processes, signal.SIGTERM, stop)
                    return _ending_of(codes, processes, meeting)
                if None not in codes.values():
                    return Ending(Exit.OK)
                time.sleep(_LOOK_S)
            _end(processes, stop.asked, stop)
            return Ending(Exit.STOPPED, signal=stop.asked)
        finally:
            kill_all(processes)
            # A live line hides the cursor, and stays there, where its rank was killed.
            if processes and sys.stderr.isatty():
                with contextlib.suppress(OSError):
                    print("\r\x1b[2K\x1b[?25h", end="", file=sys.stderr, flush=True)


def _end(processes: Collection[Process], number: int, stop: "StopRequest") -> None:
    """Ask ranks to end by a signal, and give them time to save; less if a Ctrl-C follows."""
    is_asked = bool(stop.asked)
    for process in processes:
        if process.exit_code is None:
            process.signal(number)

    def is_enough() -> bool:
        return stop.again or (stop.asked == signal.SIGINT and not is_asked)

    if not wait_for_end(processes, _SILENT_S, is_enough) and not is_enough():
        running = numbered(each.rank for each in processes if each.exit_code is None)
        press = "another Ctrl-C" if stop.asked == signal.SIGINT else "Ctrl-C"
        clear = "\r\x1b[2K" if sys.stderr.isatty() else ""
        with contextlib.suppress(OSError):
            print(
                f"{clear}fullshard: waiting for {running} to end, for {_SAVE_TIMEOUT_S} s at most; {press} ends what is left.",
                file=sys.stderr,
                flush=True,
            )
        wait_for_end(processes, _SAVE_TIMEOUT_S - _SILENT_S, is_enough)
    if is_enough():
        for process in processes:
            process.signal(signal.SIGINT)
        wait_for_end(processes, END_S)


class StopRequest:
    """Notes the first signal to stop that comes, instead of ending this process by it.

    asked: its number, or 0. again: whether a Ctrl-C followed, a second later or more; other signals change nothing
    then, as a supervisor and the launcher may both pass on one request. What the process was started to ignore
    (SIGHUP under `nohup`) stays ignored. Processes that this one forks, such as workers that load data, have back
    what was there before: a signal is to end them. So has this one at the end of a `with`.

    leads_to: what comes of a request now, in words; "" until `lead_to` is called. on_change: is called when `asked` or
    `again` has changed, on a thread of its own: Python calls handlers of signals between two instructions of the main
    thread, and one that computes a layer may take seconds.
    """

    def __init__(self, on_change: "Callable[[StopRequest], None] | None" = None) -> None:
        self.asked = 0
        self.again = False
        self.leads_to = ""
        self._asked_at = 0.0
        self._on_change = on_change
        self._changing = threading.Lock()
        self._before: dict[int, Any] = {}
        self._listens = on_change is not None
        if on_change is not None:
            reading, writing = os.pipe()
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(reading,), daemon=True).start()
        handler = (lambda *_: None) if self._listens else self._note  # the thread hears of it
        for name in STOP_SIGNALS:
            number = signal.Signals[name]
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before or signal.SIG_DFL
                signal.signal(number, handler)
        os.register_at_fork(after_in_child=self.__exit__)

    def _note(self, number: int, _: object) -> None:
        if not self.asked:
            self.asked, self._asked_at = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at >= _AGAIN_S:
            self.again = True

    def lead_to(self, what: str) -> None:
        """Say what comes of a request from now on: all ranks note it, and none ends by it. Of an earlier one, too."""
        with self._changing:
            self.leads_to = what
            if self.asked and self._on_change is not None:
                self._on_change(self)

    def _listen(self, pipe: int) -> None:
        while number := os.read(pipe, 1)[0]:
            with self._changing:
                before = self.asked, self.again
                if number in self._before:
                    self._note(number, None)
                if self._on_change is not None and before != (self.asked, self.again):
                    self._on_change(self)

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_: object) -> None:
        if self._listens:
            signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def join_ranks(device: str, local_rank: int, **options: Any) -> None:
    """Join the other ranks: over Gloo, and on GPUs over NCCL as well. options: of ``init_process_group``."""
    if device == "cpu":
        dist.init_process_group("gloo", **options)
        return
    torch.accelerator.set_device_index(local_rank)
    own = torch.device(device, local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=own, **options)


def leave(code: Exit) -> NoReturn:
    """End this rank, not by way of destroy_process_group, which may wait for ranks that will not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_first_to_say(text: str, store: Callable[[], Any], *, unless_asked: bool) -> bool:
    """Whether no other rank of the job has asked this about the same text.

    unless_asked: the answer where nobody can be asked: the store has gone with the rank that held it.
    """
    try:
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        number: int = store().add(f"fullshard/said/{digest}", 1)
    except Exception:
        return unless_asked
    return number == 1


def _ending_of(
    seen: Mapping[int, int | None], processes: Sequence[Process], meeting: Meeting
) -> Ending:
    """Find what ended first, not what only followed it. seen: exit codes by rank, as they were before ranks were ended."""
    failed = {rank: code for rank, code in seen.items() if code and code > 0}
    killed = [rank for rank, code in seen.items() if code and code < 0]
    # SIGTERM may have come to all, of which some have saved.
    struck = [rank for rank in killed if seen[rank] != -signal.SIGTERM]
    if struck or (killed and {*failed.values()} <= {Exit.FAILED}):
        rank = (struck or killed)[0]
        name = signal.Signals(-(seen[rank] or 0)).name
        others = _others([rank], seen, processes)
        message = f"rank {rank} (pid {processes[rank].pid}) was killed by {name}{others}."
        return Ending(Exit.RANK_LOST, message, rank)
    # A rank that an exception ends takes a while: it had failed before SIGTERM came, which it ignored.
    failed |= dict.fromkeys((each.rank for each in processes if each.exit_code == Exit.FAILED), 1)
    own = {each: code for each, code in failed.items() if not meeting.knows(FOLLOWED.format(each))}
    failed = own or failed
    others = _others(failed, seen, processes)
    for meaning in (Exit.FAILED, Exit.USAGE, Exit.STOPPED):
        if ranks := [rank for rank, code in failed.items() if code == meaning]:
            return Ending(meaning, rank=ranks[0], failed=failed, others=others)
    rank, code = next(iter(failed.items()))
    message = f"rank {rank} ended with exit code {code}{others}."
    return Ending(Exit.RANK_LOST, message, rank, failed=failed, others=others)


def _others(
    first: Collection[int], seen: Mapping[int, int | None], processes: Sequence[Process]
) -> str:
    """Say what became of other ranks than the first to fail, as the rest of a sentence; "" if there are none."""
    rest = {each.rank: each.exit_code for each in processes if each.rank not in first}
    before = [rank for rank in rest if seen[rank] == 0]
    ended = [
        rank for rank, code in rest.items() if seen[rank] is None and (code is None or code < 0)
    ]
    after = [rank for rank in rest if rank not in (*before, *ended)]
    said = [f"{numbered(before)} had ended before"] if before else []
    said += [f"{numbered(after)} ended later"] if after else []
    if ended:
        is_one = len(ended) == 1
        who = numbered(ended)
        if len(ended) == len(rest):
            who = "the other rank" if is_one else "the other ranks"
        said.append(f"{who} {'was' if is_one else 'were'} ended")
    return "".join(f"; {each}" for each in said)
