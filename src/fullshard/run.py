"""``python -m fullshard.run script.py``: run an unmodified script on fullshard."""

import argparse
import atexit
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from fullshard import install, set_default_comm
from fullshard.drop_in.account import Account
from fullshard.drop_in.on_cpu import shard_on_cpus
from fullshard.errors import StateError
from fullshard.policies import CommChoice

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
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", help="path of a script, or the name of a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args()
    script = options.script
    if not options.module and not Path(script).is_file():
        parser.error(f"{script}: there is no such file. For a module, write -m {script}.")
    account = None
    try:
        if options.engine == "fullshard":
            set_default_comm(options.comm)
            install(cpu=options.cpu)
            account = Account(rank=int(os.environ.get("RANK", "0")))
        elif options.cpu:
            shard_on_cpus()
    except StateError as error:
        parser.error(str(error))
    sys.argv = [script, *options.args]
    sys.path.insert(0, "" if options.module else str(Path(script).resolve().parent))
    # Exit functions run in reverse order: registered first, this runs after the script's own.
    atexit.register(_end_group, os.getpid())
    try:
        if options.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        has_failed = not isinstance(error, SystemExit) or bool(error.code)
        if has_failed:
            # After an error, destroying the group could wait for ranks that will not come.
            atexit.unregister(_end_group)
        if account is not None:
            account.end(has_failed=has_failed)
        raise
    if account is not None:
        account.end()


def _end_group(owner: int) -> None:
    """Destroy the default process group if the script left one, in the process that ran it."""
    if os.getpid() == owner and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
