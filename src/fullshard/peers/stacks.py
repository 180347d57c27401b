"""Where a rank is blocked: in which call of torch.distributed, at which line of the program.

Of this process, that is read from a thread's frames, by another thread; of others, the system and py-spy tell a little.
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.errors import FullshardError
from fullshard.host import process_state
from fullshard.peers.flight_record import flight_records, key_of
from fullshard.peers.status import NEW_GROUPS, GroupCounts, State
from fullshard.torch_private import distributed_world

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent.parent) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_DISTRIBUTED = _TORCH + "distributed" + os.sep
# Modules whose functions block in collectives; the rest of torch.distributed computes or waits for
# messages between two ranks, of which nobody counts how many there will be.
_BLOCKING = tuple(
    _DISTRIBUTED + name for name in ("distributed_c10d.py", "_functional_collectives.py")
)
# Of decorators, where Python does not tell that a function is one within another (before 3.11).
_WRAPPERS = {"wrapper", "inner", "inner_func", "decorate_context", "fn"}
_BETWEEN_TWO = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list"}
_BETWEEN_TWO |= {"recv_object_list", "_coalescing_manager"}
# They meet all ranks of the job, or with ``use_local_synchronization`` those of the new group.
_MEETING_ALL = {"new_group", "_new_group_with_tag", "_store_based_barrier", "init_process_group"}
# The innermost Python function of a thread that waits for a backward.
_BACKWARD, _AUTOGRAD = "_engine_run_backward", _TORCH + "autograd" + os.sep
_PY_SPY_S = 5.0
shows_all_frames = False  # in stacks of ranks that stand still; set by `fullshard.debug`
_STATES = {"T": "is stopped by a signal (kill -CONT continues it)", "t": "is stopped by a debugger"}
_STATES |= {"D": "waits for a disk or a file system", "Z": "has ended"}


def call_of(frame: types.FrameType | None) -> dict[str, Any] | None:
    """Return what a `RankStatus` says of the function of torch.distributed in which a thread is blocked; None if it is in none."""
    while frame is not None and _is_in(frame, _TORCH) and not _is_in(frame, _DISTRIBUTED):
        frame = frame.f_back  # operators, which have frames of their own
    if frame is None or not _is_in(frame, *_BLOCKING):
        return None
    names, public, is_local = [], "", False
    # A coalesced or functional one names its group in another way.
    group = frame.f_locals.get("group", ()) if "work" in frame.f_locals else ()
    group = dist.group.WORLD if group is None else group
    waited = (key_of(group),) if isinstance(group, dist.ProcessGroup) else ()
    while frame is not None and _is_in(frame, _TORCH):
        name = frame.f_code.co_name
        if _is_wrapper(frame.f_code):
            frame = frame.f_back
            continue
        names.append(name)
        is_local |= bool(frame.f_locals.get("use_local_synchronization"))
        # The outermost function with a name for users, which the program or fullshard called.
        if name.isidentifier() and not name.startswith("_"):
            public = (
                f"torch.distributed's {name}" if _is_in(frame, _DISTRIBUTED) else f"torch's {name}"
            )
        frame = frame.f_back
    if _BETWEEN_TWO & set(names):
        return None
    name = public or "a collective of torch.distributed"
    makes_group = bool(_MEETING_ALL & set(names))
    if makes_group and not is_local:
        waited = (NEW_GROUPS,)
    # The outermost one is what the program called.
    ours = ""
    while frame is not None and not _is_program(frame):
        if _is_in(frame, _OURS):
            ours = frame.f_code.co_name
        frame = frame.f_back
    return {
        "state": State.CALLS,
        "where": f"{name}, for fullshard's {ours}" if ours else name,
        "op": "" if makes_group else next(iter(names), ""),
        "waited": waited,
    }


def _is_wrapper(code: types.CodeType) -> bool:
    """Whether a function is a decorator's, which has no name of interest."""
    return code.co_name in _WRAPPERS or "<locals>" in getattr(code, "co_qualname", "")


def _is_in(frame: types.FrameType, *prefixes: str) -> bool:
    return frame.f_code.co_filename.startswith(prefixes)


def _is_program(frame: types.FrameType) -> bool:
    """Whether a frame is of the user's program, as far as its file tells."""
    return not _library_of(frame.f_code.co_filename, is_strict=False)


def _library_of(file: str, *, is_strict: bool = True) -> str:
    """Return the library that a file is of, "" if it is the user's program. is_strict: also of any installed package."""
    if file.startswith((_TORCH, _OURS)):
        return "torch" if file.startswith(_TORCH) else "fullshard"
    _, is_installed, inside = file.partition(f"site-packages{os.sep}")
    if is_installed:
        return inside.partition(os.sep)[0].removesuffix(".py") * is_strict
    return "Python" * file.startswith((_STANDARD, "<"))


class Line(NamedTuple):
    """A line that a thread is in."""

    file: str
    number: int | None
    function: str


def lines_of(frame: types.FrameType | None) -> list[Line]:
    """Return the lines that a thread is in, innermost first.

    Whoever keeps a frame keeps its tensors: autograd then copies a gradient that it would have taken over. So frames
    are read at once, and what takes longer is done with their lines.
    """
    walked = () if frame is None else traceback.walk_stack(frame)
    return [Line(each.f_code.co_filename, at, each.f_code.co_name) for each, at in walked]


def line_in_program(lines: Iterable[Line]) -> str:
    """Return the innermost line of the user's program that a thread is in."""
    own = (each for each in lines if not _library_of(each.file, is_strict=False))
    return next((f"{each.file}:{each.number}" for each in own), "")


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's program that an exception came through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{f.filename}:{f.lineno}" for f in frames if not _library_of(f.filename)]
    return lines[-1] if lines else ""


def shown_stack(lines: Sequence[Line]) -> tuple[str, ...]:
    """Return a thread's stack as text, innermost call last, as `FoldedStack` folds it."""
    stack = FoldedStack(traceback.FrameSummary(*each) for each in reversed(lines))
    return tuple(map(str.rstrip, stack.format()))


class FoldedStack(traceback.StackSummary):
    """A stack that prints frames of libraries as one line each time, but for the innermost.

    All frames while `shows_all_frames`; the innermost three where none is the program's.
    """

    def format(self, **options: Any) -> list[str]:
        if shows_all_frames:
            return super().format(**options)
        libraries = [_library_of(each.filename) for each in self]
        for number in range(len(self) - (3 if all(libraries) else 1), len(self)):
            libraries[max(number, 0)] = ""
        lines, shown = list[str](), iter(self)
        for is_library, of_what in itertools.groupby(libraries, bool):
            names = [*of_what]
            frames = [*itertools.islice(shown, len(names))]
            if is_library:
                lines.append(_folded(names) + "\n")
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def folded_traceback(error: BaseException) -> str:
    """Return what Python prints of an exception, with those that it came from, each with its stack folded."""
    told = traceback.TracebackException.from_exception(error)
    waiting: list[traceback.TracebackException | None] = [told]
    while waiting:
        if (each := waiting.pop()) is not None:
            frames = [*each.stack]
            if hasattr(each, "text"):  # a SyntaxError, whose line comes below the stack
                frames = [frame for frame in frames if not _library_of(frame.filename)]
            if each is told and isinstance(error, FullshardError) and not shows_all_frames:
                # Left by `raise_in`: the frames below the program's call are where torch happened to be.
                while len(frames) > 1 and _library_of(frames[-1].filename) in ("torch", "Python"):
                    frames.pop()
            each.stack = FoldedStack(frames)
            waiting += [
                each.__cause__,
                each.__context__,
                *(getattr(each, "exceptions", None) or ()),
            ]
    return "".join(told.format())


def _folded(libraries: list[str]) -> str:
    names = [*dict.fromkeys(libraries)]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"  ... {len(libraries)} frame{'s' * (len(libraries) > 1)} of {listed}"


def runs_program_beside(thread: int) -> bool:
    """Whether another thread than this one runs code of the program, libraries left out.

    One that called backward does not: on a device, threads of autograd's run it, and this is one of them.
    """
    return any(
        _is_program(frame) and "site-packages" not in frame.f_code.co_filename
        for ident, innermost in sys._current_frames().items()
        if ident not in (thread, threading.get_ident())
        if innermost.f_code.co_name != _BACKWARD or not _is_in(innermost, _AUTOGRAD)
        for frame, _ in traceback.walk_stack(innermost)
    )


def counts_of_groups() -> dict[str, GroupCounts]:
    """Return how far this rank is in each of its groups, by keys that its members share."""
    found = {
        record.key: GroupCounts(len(record.ranks), 0, record.place) for record in flight_records()
    }
    found[NEW_GROUPS] = GroupCounts(dist.get_world_size(), distributed_world.group_count, 0)
    group: Any
    for group in list(distributed_world.pg_map):
        with contextlib.suppress(RuntimeError, AttributeError):  # of backends that do not count
            issued = int(group._get_sequence_number_for_group())
            key = key_of(group)
            place = found[key].place if key in found else 0
            found[key] = GroupCounts(group.size(), issued, place)
    return found


def is_of_distributed(error: BaseException | None) -> bool:
    """Return whether an error comes from a call of torch.distributed, such as that of a broken connection."""
    if not isinstance(error, RuntimeError) or isinstance(error, FullshardError):
        return False
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if not _is_in(frame, _TORCH) or _is_in(frame, _DISTRIBUTED):
            return _is_in(frame, _DISTRIBUTED)
    return False


def raise_in(thread: int, error: FullshardError) -> None:
    """Have a thread raise an error as soon as it runs Python code again."""
    kind, text = type(error), str(error)

    def begin(made: FullshardError) -> None:
        kind.__init__(made, text)
        made.__suppress_context__ = True  # the call's own error, which says less

    # The interpreter takes a class and makes the instance.
    of_text = type(
        kind.__name__,
        (kind,),
        {
            "__init__": begin,
            "__reduce__": lambda _: (kind, (text,)),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        },
    )
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(of_text))


def look_at_process(pid: int) -> tuple[str, str]:
    """Return what a process of this host does, and its Python stack or how to get it."""
    state = _STATES.get(
        process_state(pid), "is alive and reports nothing: it is making progress, or holds the GIL"
    )
    if (command := shutil.which("py-spy")) is None:
        return state, f" For its stack, install py-spy and run: py-spy dump --pid {pid}"
    try:
        done = subprocess.run(
            [command, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return state, f" py-spy cannot tell its stack: {error}"
    return state, f" Its stack, by py-spy:\n{done.stdout or done.stderr}".rstrip()
