"""``python -m fullshard.run script.py``: run an unmodified script on fullshard."""

import argparse
import atexit
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from fullshard import install, set_default_comm
from fullshard.policies import CommChoice

_EXAMPLES = """examples:
  python -m fullshard.run train.py --lr 1e-3
  torchrun --nproc-per-node 2 -m fullshard.run train.py
  torchrun --nproc-per-node 2 -m fullshard.run -m my_package.train
"""


def main() -> None:
    """Call `install`, then run the script or module as ``python`` would.

    If the script ends without an error and leaves a default process group, that group is destroyed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fullshard.run",
        description="Run a script with torch.distributed.fsdp's fully_shard provided by fullshard.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--comm",
        choices=[choice.value for choice in CommChoice],
        default=CommChoice.AUTO.value,
        help="how ranks exchange bytes (default: %(default)s)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", help="path of a script, or the name of a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args()
    script = options.script
    if not options.module and not Path(script).is_file():
        parser.error(f"{script}: there is no such file. For a module, write -m {script}.")
    set_default_comm(options.comm)
    install()
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
        if not isinstance(error, SystemExit) or error.code:
            # After an error, destroying the group could wait for ranks that will not come.
            atexit.unregister(_end_group)
        raise


def _end_group(owner: int) -> None:
    """Destroy the default process group if the script left one, in the process that ran it."""
    if os.getpid() == owner and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
