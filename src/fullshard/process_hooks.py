"""Every change that fullshard makes to its process: made here, when it is first needed, and listed by `installed`.

    from fullshard import process_hooks
    print(*process_hooks.installed(), sep="\\n")

Four kinds: functions that Python or torch calls at some moment (`Hook`), names of other packages that have
values of ours (`Replacements`), threads, and what is done once and for good. docs/design.md has a table of all.
No other file of the library makes one by itself, which tests/test_process_hooks.py sees to. Commands such as
`fullshard train` run in processes of their own, which they arrange themselves.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import mmap
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from multiprocessing import util
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fullshard.torch_private import (
    SKIP_FRAME,
    attach_out_of_memory_observer,
    dtensor_handlers,
    process_group_name,
    set_frame_strategy,
)

_NEVER = "never"


class Change(NamedTuple):
    """A change of this process: what is other than before, why, and when it is undone."""

    what: str
    why: str
    undone: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; undone: {self.undone}"


# By what makes it: a hook with a function of it, a thread, an object that a name was given to.
_made: dict[object, Change] = {}


def installed() -> list[Change]:
    """Return the changes that are in effect now, in the order in which they were made."""
    _forget_ended_threads()
    return list(dict.fromkeys([*_made.values(), *_signals()]))


# The compiler


def skip_frames(function: Callable[..., Any]) -> None:
    """Let the compiler begin no graph with a function of ours. What it calls may be compiled."""
    # What torch._dynamo.eval_frame.skip_code does, without its import.
    set_frame_strategy(function.__code__, SKIP_FRAME)
    _made[set_frame_strategy] = Change(
        "torch.compile, of functions of fullshard",
        "they stand between modules and their forward",
        _NEVER,
    )


# First use

_waiting: list[Callable[[], None]] = []


def at_first_use(install: Callable[[], None]) -> Callable[[], None]:
    """Call a function when this process first shards a module; a decorator."""
    _waiting.append(install)
    return install


def first_use() -> None:
    """Install what waits for a first sharded module. Does nothing after the first call."""
    while _waiting:
        _waiting.pop(0)()


# Functions that are called at some moment


class _Handle(Protocol):
    def remove(self) -> None: ...


class Hook:
    """A moment at which Python or torch calls functions. It has one of ours, which calls those that were added.

    where: for `installed`. install: gives the moment a function; returns what takes it off, or None for one
    that stays. Our function is there as long as one is added that is called.
    """

    def __init__(
        self, where: str, install: Callable[[Callable[..., None]], _Handle | None]
    ) -> None:
        self._where = where
        self._install = install
        self._functions: list[Callable[..., object]] = []
        self._is_installed = False
        self._installation: _Handle | None = None

    @property
    def is_installed(self) -> bool:
        return self._is_installed

    def add(self, function: Callable[..., object], why: str) -> None:
        """Have a function called from now on, after those that were added before. Not twice."""
        if function in self._functions:
            return
        if not self._is_installed:
            self._installation = self._install(self._call)
            self._is_installed = True
        self._functions.append(function)
        undone = (
            _NEVER if self._installation is None else "with the last function that is called there"
        )
        _made[self, function] = Change(self._where, why, undone)

    def remove(self, function: Callable[..., object]) -> None:
        """Call a function no more."""
        self._functions.remove(function)
        del _made[self, function]
        if not self._functions and self._installation is not None:
            self._installation.remove()
            self._installation, self._is_installed = None, False

    @contextlib.contextmanager
    def calling(self, function: Callable[..., object], why: str) -> Iterator[None]:
        """Have a function called within the body."""
        self.add(function, why)
        try:
            yield
        finally:
            self.remove(function)

    def _call(self, *arguments: Any) -> None:
        for function in tuple(self._functions):
            function(*arguments)


class _GcCallback(NamedTuple):
    call: Callable[..., None]

    def remove(self) -> None:
        gc.callbacks.remove(self.call)


def _call_at_collections(call: Callable[..., None]) -> _Handle:
    gc.callbacks.append(call)
    return _GcCallback(call)


def _call_at_uncaught(call: Callable[[BaseException], None]) -> None:
    before = sys.excepthook

    def end(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        call(error)
        before(kind, error, trace)

    sys.excepthook = end


skip_frames(Hook._call)

# Functions are called with what torch's or Python's own hooks of these names are.
BEFORE_STEP = Hook("each step of any optimizer, before", register_optimizer_step_pre_hook)
AFTER_STEP = Hook("each step of any optimizer, after", register_optimizer_step_post_hook)
PARAMETERS = Hook(
    "each registration of a parameter in any module", register_module_parameter_registration_hook
)
MODULES = Hook(
    "each registration of a module in any module", register_module_module_registration_hook
)
BEFORE_FORWARD = Hook("each forward of any module, before", register_module_forward_pre_hook)
AFTER_FORWARD = Hook(
    "each forward of any module, after",
    functools.partial(register_module_forward_hook, with_kwargs=True),
)
COLLECTIONS = Hook("each run of the garbage collector", _call_at_collections)
# With the exception alone.
UNCAUGHT = Hook("sys.excepthook", _call_at_uncaught)
# With (device, bytes asked for, total, free). Installing raises RuntimeError for an allocator without observers.
OUT_OF_MEMORY = Hook("CUDA's allocator, before it raises", attach_out_of_memory_observer)
AFTER_FORK = Hook("each fork, in the child", lambda call: os.register_at_fork(after_in_child=call))
HAS_FORKED = Hook(
    "each fork, in the parent", lambda call: os.register_at_fork(after_in_parent=call)
)


def at_exit(function: Callable[..., object], *arguments: Any, why: str) -> Callable[[], None]:
    """Call a function when the interpreter ends, before those that came earlier. Returns what prevents that."""
    key = (atexit, function)
    _made[key] = Change("the end of the interpreter", why, "by whoever asked for it, or never")
    atexit.register(function, *arguments)

    def undo() -> None:
        atexit.unregister(function)
        _made.pop(key, None)

    return undo


def before_exit(function: Callable[[], object], *, why: str) -> None:
    """Call a function before those of `at_exit`, and at the end of children of `multiprocessing`, which have none."""
    _made[util, function] = Change(
        "the end of a process of multiprocessing's, or of this one", why, _NEVER
    )
    util.Finalize(None, function, exitpriority=0)


_heard: dict[int, str] = {}  # signals that ever had a handler of ours, and why


def set_signal(number: int, handler: Any, *, why: str = "") -> None:
    """Have a signal handled in another way. why: "" to give it back. In the main thread."""
    signal.signal(number, handler)
    if why:
        _heard[number] = why


def _signals() -> Iterator[Change]:
    for number, why in _heard.items():
        module = getattr(signal.getsignal(number), "__module__", None)
        if str(module).partition(".")[0] == "fullshard":
            what = f"the handler of {signal.Signals(number).name}"
            yield Change(what, why, "by whoever asked for it")


# Names of other packages


class Replacements:
    """Names of other packages, in modules and classes, that have values of ours until `undo`."""

    def __init__(self, why: str) -> None:
        self._why = why
        self._before: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._before)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Give a name a value of ours, if it has one; ``owner.__dict__`` has it."""
        self._before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)
        shown = [f"{owner.__name__}.{name}" for owner, name, _ in self._before[:3]]
        more = f" and {len(self._before) - 3} more" if len(self._before) > 3 else ""
        _made[self] = Change(
            f"{', '.join(shown)}{more}", self._why, "by whoever asked for it, or never"
        )

    def undo(self) -> None:
        """Give all names the values that they had, the last one first."""
        while self._before:
            setattr(*self._before.pop())
        _made.pop(self, None)


def add_finder(finder: MetaPathFinder, *, why: str) -> None:
    """Ask a finder for each module that is imported from now on, before any other."""
    sys.meta_path.insert(0, finder)
    _made[finder] = Change("sys.meta_path", why, "by whoever asked for it")


def remove_finder(finder: MetaPathFinder) -> None:
    """Ask a finder no more; does nothing if it was not asked."""
    if _made.pop(finder, None) is not None:
        sys.meta_path.remove(finder)


_group_names = Replacements("names of its own for process groups that fullshard makes")
_naming = threading.local()  # the name that this thread gives to the next group


@contextlib.contextmanager
def naming_groups(name: str) -> Iterator[bool]:
    """Give the process group that this thread makes within the body a name. Yields whether that is possible.

    With ``use_local_synchronization`` torch names a group by how many groups the rank is in, so that
    ranks which are in different numbers of them would wait for groups of different names (2.13).
    """
    if process_group_name is None:
        yield False
        return
    if not _group_names:  # once and for good: other threads may make groups meanwhile
        _group_names.set(dist.distributed_c10d, "_process_group_name", _name_group)
    _naming.name = name
    try:
        yield True
    finally:
        _naming.name = None


def _name_group(*arguments: Any, **options: Any) -> Any:
    name = getattr(_naming, "name", None)
    return process_group_name(*arguments, **options) if name is None else name


# Threads


def start_thread(
    run: Callable[..., object],
    *arguments: Any,
    name: str,
    why: str,
    is_daemon: bool = True,
) -> threading.Thread:
    """Start a thread. is_daemon: the interpreter does not wait for it when it ends."""
    _forget_ended_threads()
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=is_daemon)
    thread.start()
    _made[thread] = Change(f"a thread, {name}", why, "when it has ended")
    return thread


def _forget_ended_threads() -> None:
    for key in [*_made]:
        if isinstance(key, threading.Thread) and not key.is_alive():
            _made.pop(key, None)


# Memory


@contextlib.contextmanager
def collector_waits() -> Iterator[None]:
    """Keep Python's garbage collector from beginning by itself, within the body.

    What nothing refers to any more is freed as ever. Planning a checkpoint makes many small objects, which
    set off a collection of everything: 0.2 s in a program with two models, and then all ranks wait for the
    one that collects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    _made[gc] = Change("gc.disable()", "planning a checkpoint makes many objects", "with the plan")
    try:
        yield
    finally:
        _made.pop(gc, None)
        if was_enabled:
            gc.enable()


_LARGEST_THRESHOLD = 32 << 20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX


@functools.cache
def raise_heap_threshold() -> None:
    """Let the C library take large blocks from its heap, and keep more of what is freed there.

    Blocks above a threshold come from the system, with a page fault for every page, and go back to
    it. In glibc the threshold is the size of the largest such block that was freed, up to 32 MiB,
    and twice as much may stay on top of the heap (mallopt(3), M_MMAP_THRESHOLD). Freeing one block
    here brings that about before the first step. Nothing touches its pages, so it costs nothing.
    Settings by the user (MALLOC_MMAP_THRESHOLD_) stay in force, which ``mallopt`` would override.
    """
    # Freed at once. Smaller by what the allocator adds: a block above the maximum changes nothing.
    torch.empty(_LARGEST_THRESHOLD - 2 * mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    _made[raise_heap_threshold] = Change(
        "malloc's threshold, 32 MiB",
        "no page faults for buffers that come and go in each step",
        _NEVER,
    )


def return_free_heap() -> None:
    """Give what is free on the C library's heap back to the system, where the library can: malloc_trim(3)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Tables of torch's and of other packages


def handle_operator(operator: Any, function: Callable[..., Any], *, why: str) -> None:
    """Have an operator on DTensors computed by a function, unless torch has one for it."""
    if dtensor_handlers is not None and operator not in dtensor_handlers:
        dtensor_handlers[operator] = function
        _made[operator] = Change(f"DTensor's {operator}", why, _NEVER)


def register(table: Callable[..., object], *arguments: Any, why: str) -> None:
    """Call a function of another package that takes note of something for good."""
    table(*arguments)
    _made[table] = Change(f"{table.__module__}.{table.__name__}", why, _NEVER)
