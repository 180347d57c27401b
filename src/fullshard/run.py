"""``python -m fullshard.run script.py``: run an unmodified script on fullshard."""

import argparse
import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from fullshard import install, set_default_comm
from fullshard.drop_in.account import Account
from fullshard.drop_in.on_cpu import shard_on_cpus
from fullshard.errors import StateError
from fullshard.policies import CommChoice
from fullshard.process_hooks import at_exit

_WITH_VALUE = ("--comm", "--engine")

_EXAMPLES = """examples:
  python -m fullshard.run train.py --lr 1e-3
  torchrun --nproc-per-node 2 -m fullshard.run train.py
  torchrun --nproc-per-node 2 -m fullshard.run -m my_package.train
  torchrun --nproc-per-node 2 -m fullshard.run --cpu trainer.py   (Transformers, Accelerate, TRL, Lightning)

On stderr, rank 0 says what each model is sharded over at its first forward, and at the end if nothing was.
"""


def main() -> None:
    """Call `install`, then run the script or module as ``python`` would, and say what was sharded.

    If the script ends without an error and leaves a default process group, that group is destroyed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fullshard.run",
        description="Run a script with the names of torch.distributed.fsdp provided by fullshard.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python -m fullshard.run [-h] [--comm {auto,...}] [--engine {...}] [--cpu] (SCRIPT | -m MODULE) ...",
    )
    parser.add_argument(
        "--comm",
        choices=[choice.value for choice in CommChoice],
        default=CommChoice.AUTO.value,
        help="how ranks exchange bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        choices=["fullshard", "torch"],
        default="fullshard",
        help="torch: leave PyTorch's names alone, to compare with the same command",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="have Accelerate and Lightning, which shard on accelerators alone, do so on CPUs",
    )
    parser.add_argument(
        "-m", dest="module", help="a module, in place of a script", metavar="MODULE"
    )
    parser.add_argument(
        "script", nargs="?", help="path of a script; what follows are its arguments"
    )
    words, arguments = _split(sys.argv[1:])
    options = parser.parse_args(words)
    if options.module is None and options.script is None:
        parser.error("name a script, or a module with -m.")
    script = options.module or options.script
    if options.module is not None and not _has_module(script):
        parser.error(f"-m {script}: there is no such module here.")
    if options.module is None and not Path(script).is_file():
        parser.error(f"{script}: there is no such file. For a module, write -m {script}.")
    account = None
    try:
        if options.engine == "fullshard":
            set_default_comm(options.comm)
            install(cpu=options.cpu)
            rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
            account = Account(rank, size)
        elif options.cpu:
            shard_on_cpus()
    except StateError as error:
        parser.error(str(error))
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
            # After an error, destroying the group could wait for ranks that will not come.
            leave_group()
        if account is not None:
            account.end(has_failed=has_failed)
        raise
    if account is not None:
        account.end()


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


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line after the script, or after -m and its module, as Python does.

    All that follows is the program's, even what looks like an option of this one.
    """
    number = 0
    while number < len(words) and words[number].startswith("-"):
        if words[number].startswith("-m"):
            number += 1 if words[number] == "-m" else 0
            break
        number += 2 if words[number] in _WITH_VALUE else 1
    return list(words[: number + 1]), list(words[number + 1 :])


def _has_module(name: str) -> bool:
    sys.path.insert(0, "")
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a package above it, or of a name like .a
        return False
    finally:
        del sys.path[0]


def _end_group(owner: int) -> None:
    """Destroy the default process group if the script left one, in the process that ran it."""
    if os.getpid() == owner and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
