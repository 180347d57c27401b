"""Run a program in a Python that has imported nothing yet, or a test in ranks of its own."""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import Fate, run_fresh

_LIMIT_S = 250


class Ended(NamedTuple):
    """A program's exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def in_fresh_python(code: str, *arguments: str) -> str:
    """Return what a program writes, in a Python that is started for it; it must end well."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={k: v for k, v in os.environ.items() if k != "FORCE_COLOR"} | {"COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def in_fresh_forks(*programs: str, imported: str = "torch") -> list[Ended]:
    """Run programs, each in a Python that has imported one module alone and raises warnings, and see how each ends."""
    return [ended for program in programs for ended in _fresh(imported).run([program])]


def in_warm_forks(
    *programs: str, folder: Path | None = None, variables: Sequence[Mapping[str, str]] = ()
) -> list[Ended]:
    """Run programs at the same time, in Pythons that have imported fullshard, and see how each ends.

    They end as scripts do, and cost no import: starting Python for each takes seconds, most of them
    for torch. folder: where they run. variables: of each one's environment, or none.
    """
    return _warm().run(programs, folder, variables)


def fullshard_in_fork(
    *words: object,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    before: str = "",
) -> Ended:
    """Run the command `fullshard` as `in_warm_forks` does; before: Python that comes first."""
    program = f"{before}\n{command(*words)}"
    return in_warm_forks(program, folder=folder, variables=[variables or {}])[0]


def fullshard_on_ranks(
    world_size: int,
    *words: object,
    folder: Path | None = None,
    before: str = "",
    imported: Sequence[str] = (),
) -> list[Ended]:
    """Run the command `fullshard` as the ranks that torchrun starts, in forks as above; before: Python that comes first.

    imported: modules that the Pythons they are forked from have imported as well.
    """
    return on_forked_ranks(world_size, f"{before}\n{command(*words)}", folder, imported)


def on_forked_ranks(
    world_size: int, code: str, folder: Path | None = None, imported: Sequence[str] = ()
) -> list[Ended]:
    """Run a program as the ranks that torchrun starts, in forks as above."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [common | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(world_size)]
    return _warm(*imported).run([code] * world_size, folder, ranks)


def command(*words: object) -> str:
    """Return a program that runs the command `fullshard`."""
    return f"""
import sys
from fullshard.__main__ import main
sys.argv = ["fullshard", *{list(map(str, words))}]
main()
"""


FORKED_RANKS = """
import os, signal, sys
from fullshard.launching import processes

class Forked:
    returncode = None

    def __init__(self, command, env, start_new_session):
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):  # a command of its own would know no handlers
            signal.signal(signal.Signals[name], signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = command[command.index("fullshard"):]
        code = 1
        try:
            from fullshard.__main__ import main
            main()
            code = 0
        except SystemExit as error:
            code = error.code
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stdout.flush()
            os._exit(code)

    def wait(self, timeout):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

processes.subprocess.Popen = Forked
"""
"""What may come before a command that starts ranks: they are forks of it, then, which have imported torch already."""


# Ranks sleep while they wait, as in tests/harness.py.
_ASLEEP = """
from fullshard.comm import shared_memory
shared_memory._SPIN_S = shared_memory._YIELD_S = 0.0
"""

# triton, which torch's compiler imports where it is installed, reports at the end of a process what was not freed.
# A torch with CUDA warns that it counts no FLOPs of it.
_WITHOUT_TRITON = """
import logging, sys
sys.modules["triton"] = None
logging.getLogger("torch.utils.flop_counter").setLevel("ERROR")
"""

# What is imported is frozen: a fork that ends would look through all of it for garbage, for some 3 s.
_SERVER = """
import gc, json, os, sys
gc.collect()
gc.freeze()

def start(program, variables, out, err, folder):
    if child := os.fork():
        return child
    for number, path, mode in ((0, os.devnull, "r"), (1, out, "w"), (2, err, "w")):
        with open(path, mode) as file:
            os.dup2(file.fileno(), number)
    os.environ.update(variables)
    os.chdir(folder)

for line in sys.stdin:
    children = []
    for request in json.loads(line):
        children.append(start(*request))
        if not children[-1]:
            break
    else:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
        continue
    break
else:
    sys.exit()
exec(request[0], {"__name__": "__main__"})
"""


class _Forks:
    """A Python that has imported modules, and forks for each program that it is given.

    A fork leaves the loop of requests before it runs its program, so that it ends as Python does.
    """

    def __init__(self, imported: Sequence[str], *options: str, before: str = "") -> None:
        code = "\n".join((_WITHOUT_TRITON, f"import {', '.join(imported)}", before, _SERVER))
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", code],
            env={k: v for k, v in os.environ.items() if k != "FORCE_COLOR"} | {"COLUMNS": "100"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._end)

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def run(
        self,
        programs: Sequence[str],
        folder: Path | None = None,
        variables: Sequence[Mapping[str, str]] = (),
    ) -> list[Ended]:
        """Run programs at the same time and return how each has ended."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryDirectory() as place:
            written = [(f"{place}/{n}.out", f"{place}/{n}.err") for n in range(len(programs))]
            requests = [
                (program, given, *paths, str(folder or Path.cwd()))
                for program, given, paths in zip(
                    programs, variables or ({},) * len(programs), written, strict=True
                )
            ]
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], _LIMIT_S)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)
                pytest.fail(
                    f"not within {_LIMIT_S} s: {[Path(err).read_text() for _, err in written]}"
                )
            codes = json.loads(self._process.stdout.readline())
            return [
                Ended(code, Path(out).read_text(), Path(err).read_text())
                for code, (out, err) in zip(codes, written, strict=True)
            ]


# What serves all tests of this process; it ends with it, when nothing more can come.


@functools.cache
def _warm(*imported: str) -> _Forks:
    return _Forks(
        ("torch._dynamo", "torch.distributed.fsdp", "fullshard.public", *imported), before=_ASLEEP
    )


@functools.cache
def _fresh(imported: str) -> _Forks:
    return _Forks((imported,), "-W", "error")


def in_fresh_ranks(world_size: int) -> Callable[[Any], Any]:
    """Make a function a test whose body runs in processes of its own, which it may leave changed."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            for outcome in run_fresh(world_size, body, limit_s=60, **kwargs):
                assert outcome.fate is Fate.RETURNED, outcome.text

        test.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
        return test

    return decorate
