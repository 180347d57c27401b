"""`fullshard run` and `python -m fullshard.run`: run an unmodified script on fullshard.

Its options are declared here alone, by argparse, as the library itself has to run scripts without `fullshard[train]`.
"""

import argparse
import builtins
import contextlib
import datetime
import importlib.machinery
import os
import runpy
import signal
import sys
import textwrap
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fullshard.tools.typed_program import has_module, split_program, why_no_script

_TRACED = (3, 5)
# Of modules that import torch, for which a shell that completes options has no time.
_LAUNCHER_PID = "FULLSHARD_LAUNCHER_PID"
_WAYS = ("auto", "peer_memory", "process_group", "collectives")
_ANSWER_S = 5.0  # of the store, for what only serves messages
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_WITH_VALUE = ("--comm", "--engine", "--ranks", "--trace", "--trace-steps")
_EXAMPLES = """examples:
  fullshard run --ranks 2 train.py --lr 1e-3
  fullshard run --ranks 2 --trace runs/traced train.py
  torchrun --nproc-per-node 2 -m fullshard.run train.py
  torchrun --nproc-per-node 2 -m fullshard.run -m pkg.train
  torchrun --nproc-per-node 2 -m fullshard.run --cpu a.py

On stderr, rank 0 says what each model is sharded over, at
its first forward; and at the end, if nothing was.

Exit codes: with --ranks, that of the first rank that failed
by itself (1 after an exception); 2 unusable options, 3 a
rank was killed by a signal, 130 Ctrl-C, 143 SIGTERM.
"""
_HINT = """[fullshard] This is one process, and no launcher has said which of the ranks it is. Start ranks:
    fullshard run --ranks 2 {program}
    torchrun --nproc-per-node 2 -m fullshard.run {program}"""


def main(prog: str = "python -m fullshard.run", typed: Sequence[str] | None = None) -> None:
    """Call `install`, then run the script or module as ``python`` would, and say what was sharded.

    With --ranks, start this machine's ranks, which do so. If the script ends without an error and leaves a
    default process group, that group is destroyed.
    """
    parser = _parser(prog)
    typed = sys.argv[1:] if typed is None else typed
    words, arguments = split_program(typed, _WITH_VALUE)
    options = parser.parse_args(words)
    if options.module is None and options.script is None:
        parser.error("name a script, or a module with -m.")
    script = options.module or options.script
    if options.module is not None and not has_module(script):
        parser.error(f"-m {script}: there is no such module here.")
    if options.module is None and (why := why_no_script(script, arguments)):
        parser.error(f"{why} For a module, write -m {script}." if why.endswith("file.") else why)
    if options.trace is not None and options.engine == "torch":
        parser.error("--trace: fullshard's engine alone is traced; leave out --engine torch.")
    launcher = os.environ.get(_LAUNCHER_PID)
    if options.ranks is not None and launcher is None:
        if "RANK" in os.environ:
            parser.error(
                f"--ranks {options.ranks}: a launcher has started ranks already. Leave --ranks out."
            )
        try:
            sys.exit(_start(parser, typed, options.ranks))
        except KeyboardInterrupt:  # while it imports what starts ranks
            parser.exit(130, "fullshard run: stopped before anything had begun.\n")
    if launcher is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of what is imported
        from fullshard.local_ranks import die_with_launcher

        die_with_launcher(int(os.environ.pop(_LAUNCHER_PID)), says_ends=True)
    _be_a_rank(parser, options, script, arguments, is_of_ours=launcher is not None)


def offered(typed: Sequence[str], begun: str) -> list[tuple[str, str]]:
    """Return what a shell offers to complete a word with, and help on each; nothing where files are meant.

    typed: the words before it. Options and their values come before the script; what follows is its own.
    """
    _, arguments = split_program([*typed, begun], _WITH_VALUE)
    found: list[tuple[str, str]] = []
    actions: list[argparse.Action] = []
    _parser("", actions)
    for action in () if arguments else actions:
        if typed and typed[-1] in _WITH_VALUE:
            values = action.choices or () if typed[-1] in action.option_strings else ()
        else:
            values = action.option_strings if begun.startswith("-") else ()
        explained = (action.help or "") % vars(action)
        found += [(value, explained) for value in values if value.startswith(begun)]
    return found


def _parser(prog: str, added: list[argparse.Action] | None = None) -> argparse.ArgumentParser:
    """Return what reads the words before the script. added: gets its options and arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Run an unmodified script on fullshard: what it imports\nfrom torch.distributed.fsdp is then fullshard's.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=f"{prog} [OPTIONS] (SCRIPT | -m MODULE) [ARGS]",
    )

    def add(*names: str, **how: Any) -> None:
        action = parser.add_argument(*names, **how)
        if added is not None:
            added.append(action)

    add("script", nargs="?", help="a path; what follows is the script's own", metavar="SCRIPT")
    add("-m", dest="module", help="a module, in place of a script", metavar="MODULE")
    add(
        "--ranks",
        type=_count,
        metavar="N",
        help="start N ranks on this machine; without it, be a rank that torchrun has started",
    )
    add(
        "--comm",
        choices=_WAYS,
        default=_WAYS[0],
        metavar="WAY",
        help=f"how ranks exchange bytes: {', '.join(_WAYS)} (default: %(default)s)",
    )
    add(
        "--engine",
        choices=["fullshard", "torch"],
        default="fullshard",
        metavar="ENGINE",
        help="torch: leave PyTorch's names alone, to compare with the same command",
    )
    add(
        "--cpu",
        action="store_true",
        help="have Accelerate and Lightning, which shard on accelerators alone, do so on CPUs",
    )
    add(
        "--trace",
        type=Path,
        metavar="DIR",
        help="record where time and memory of some steps go, for: fullshard report DIR",
    )
    add(
        "--trace-steps",
        type=_steps,
        default=_TRACED,
        metavar="A-B",
        help="the optimizer's steps to record, from 1 (default: {}-{})".format(*_TRACED),
    )
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number of ranks")
    return int(text)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(
            f"{text}: give two numbers of steps, such as 3-5, from 2 on"
        )
    return int(first), int(last)


def _start(parser: argparse.ArgumentParser, typed: Sequence[str], ranks: int) -> int:
    """Start ranks, and return what their launcher ends with."""
    from fullshard.local_ranks import threads_for

    try:
        from fullshard.tools.doctor.findings import numbered
        from fullshard.tools.launch import launch
    except ModuleNotFoundError as error:
        parser.error(
            f"--ranks: needs {error.name}, of fullshard[train]. Or start it with torchrun."
        )
    ending = launch(["run", *typed], ranks=ranks, threads=threads_for(ranks, os.environ))
    code, said = int(ending.code), ending.message
    if ending.signal:
        code = 128 + ending.signal  # as a shell says it
        name = signal.Signals(ending.signal).name
        how = "interrupted" if ending.signal == signal.SIGINT else f"stopped by {name}"
        said = f"{how}; the ranks were ended."
    elif ending.failed:
        # One that fails by an exception may only have followed one that ended the script.
        code = next((each for each in ending.failed.values() if each != 1), 1)
        with_code = f" with exit code {code}" if {*ending.failed.values()} == {code} != {1} else ""
        said = f"{numbered(ending.failed)} failed{with_code}{ending.others}." * (ranks > 1)
    if said:
        print(f"{parser.prog}: {said}", file=sys.stderr)
    return code


def _be_a_rank(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    script: str,
    arguments: Sequence[str],
    *,
    is_of_ours: bool,
) -> None:
    """Run the script. is_of_ours: whether the launcher is this command."""
    from fullshard import install, set_default_comm
    from fullshard.drop_in.account import Account
    from fullshard.drop_in.on_cpu import shard_on_cpus
    from fullshard.drop_in.traces import Traces, Wanted
    from fullshard.errors import StateError
    from fullshard.process_hooks import at_exit

    account = None
    try:
        if options.engine == "fullshard":
            set_default_comm(options.comm)
            install(cpu=options.cpu)
            rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
            wanted = options.trace and Wanted(options.trace, *options.trace_steps)
            account = Account(rank, size, wanted and Traces(wanted))
        elif options.cpu:
            shard_on_cpus()
    except StateError as error:
        parser.error(str(error))
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_once if is_of_ours else _show
    if is_of_ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [script, *arguments]
    sys.path.insert(0, "" if options.module else str(Path(script).resolve().parent))
    # Exit functions run in reverse order: registered first, this runs after the script's own.
    leave_group = at_exit(_end_group, os.getpid(), why="the script may leave a process group")
    try:
        if options.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            _run_script(script)
    except BaseException as error:
        has_failed = not isinstance(error, SystemExit) or bool(error.code)
        if has_failed:
            # Which Python keeps for other exceptions alone: this rank's last words have it.
            sys.last_value = error
            # After an error, destroying the group could wait for ranks that will not come.
            leave_group()
        if "RANK" not in os.environ and _lacks_launcher(error):
            # At the exit, so that it stands below the traceback.
            hint = _HINT.format(program=f"-m {script}" if options.module else script)
            at_exit(_say, hint, why="a launcher was forgotten")
        if account is not None:
            account.end(has_failed=has_failed)
        raise
    if account is not None:
        account.end()


def _show(_: type[BaseException], error: BaseException, __: types.TracebackType | None) -> None:
    """Print an exception that ends the script: its own frames, and those of libraries in a line each time."""
    print(_text_of(error), end="", file=sys.stderr, flush=True)


def _show_once(
    _: type[BaseException], error: BaseException, __: types.TracebackType | None
) -> None:
    """Print an exception as `_show` does; before ranks meet, with the rank, and once what several say alike."""
    import torch.distributed as dist

    from fullshard.errors import PeerLostError
    from fullshard.tools.launch import FOLLOWED, is_first_to_say

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by this, not by what the launcher does
    text = _text_of(error)
    if not dist.is_initialized():  # from then on, torch names the rank
        if not is_first_to_say(text, _launcher_s_store, unless_asked=True):
            return
        text = textwrap.indent(text, f"[rank{os.environ['RANK']}]: ")
    print(text, end="", file=sys.stderr, flush=True)
    if isinstance(error, PeerLostError):
        with contextlib.suppress(RuntimeError):  # of a launcher that has gone
            _launcher_s_store().set(FOLLOWED.format(os.environ["RANK"]), "")


def _text_of(error: BaseException) -> str:
    from fullshard.peers.stacks import folded_traceback, line_of_error

    if isinstance(error, KeyboardInterrupt) and (line := line_of_error(error)):
        return f"interrupted at {line}\n"
    return folded_traceback(error)


def _launcher_s_store() -> Any:
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = datetime.timedelta(seconds=_ANSWER_S)
    return dist.TCPStore(host, port, is_master=False, timeout=limit)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _lacks_launcher(error: BaseException) -> bool:
    """Return whether an error is of what a launcher tells ranks: of torch's, or of a script that looks itself."""
    asked = isinstance(error, KeyError) and error.args[:1] in [(name,) for name in _OF_LAUNCHERS]
    return asked or (isinstance(error, ValueError) and "variable RANK expected" in str(error))


def _run_script(script: str) -> None:
    """Run a file as Python would: `__file__` is absolute, ``sys.argv[0]`` as it was typed."""
    path = str(Path(script).absolute())
    if path.endswith(".pyc") or zipfile.is_zipfile(path):
        runpy.run_path(script, run_name="__main__")
        return
    main_module = types.ModuleType("__main__")
    main_module.__file__ = path
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main_module)["__builtins__"] = builtins
    sys.modules["__main__"] = main_module  # where pickle and multiprocessing look
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, vars(main_module))


def _end_group(owner: int) -> None:
    """Destroy the default process group if the script left one, in the process that ran it."""
    import torch.distributed as dist

    if os.getpid() == owner and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
