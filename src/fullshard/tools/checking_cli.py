"""The commands that run a user's model or script again: what can be typed."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.tools.cli_options import flag, takes
from fullshard.tools.config import OptionError
from fullshard.tools.verify.options import VerifyOptions

VERIFY_EXAMPLES = """
Examples, with a training script, and with functions in my_package/train.py:

    fullshard verify train.py -- --lr 1e-3 --out runs/{side}

    fullshard verify my_package.train:build                   build() returns (model, batch)

    fullshard verify my_package.train:build_model --batch my_package.train:batch --loss my_package.train:loss

    fullshard verify my_package.train:build --shard my_package.train:shard --ranks 4

    fullshard verify my_package.train:build --api fsdp1 --dtype fp64 --json

A script is run as it is, twice: sharded, and with every call that shards leaving the model whole and gradients averaged plainly. Each run ends after --steps steps of an optimizer. {side} in its arguments becomes "sharded", then "whole".

Of a model, the one process computes the loss of each rank's part in turn and divides it by the number of ranks; both sides begin with the same values and seeds, and train with SGD. Without --shard, the children of every ModuleList (and of a Sequential with several of one class) become units, and the rest one more.

Exit codes: 0 equal within the tolerance, 1 differs or failed, 2 unusable options or missing packages, 3 a rank died.
"""

REPLAY_EXAMPLES = """
Examples, with a function that returns the sharded model in my_package/train.py, after a step was recorded by fullshard.debug(replay="replays/a"):

    fullshard replay replays/a my_package.train:build                  all ranks' parts, in one process

    fullshard replay replays/a my_package.train:build --rank 3         that of one rank, say under a debugger

    torchrun --nproc-per-node 8 -m fullshard replay replays/a my_package.train:build      by the same ranks

Exit codes: 0 equal in every bit, 1 differs or failed, 2 unusable options or missing packages.
"""


def run(_words: Annotated[list[str] | None, typer.Argument(metavar="...")] = None) -> None:
    """Run an unmodified script on fullshard, with local ranks if asked; --trace DIR records some steps.

    `python -m fullshard` starts it before it comes here, so that a script's traceback has none of this.
    """
    from fullshard.tools.run_cli import main

    main("fullshard run", sys.argv[2:])


@takes(VerifyOptions)
def verify(
    model: Annotated[
        str,
        typer.Argument(
            help="Your training script; or a function without arguments that returns a plain model, or (model, "
            "batch).",
            metavar="SCRIPT|MODULE:FUNCTION",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="What the script is given.", metavar="[-- ARGUMENTS]"),
    ] = None,
    *,
    keep: Annotated[
        Path | None,
        typer.Option(help="Folder for the records.", rich_help_panel="Results", metavar="DIR"),
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.", panel="Results")] = False,
    is_whole: Annotated[bool, typer.Option("--whole", hidden=True)] = False,
    **options: Any,
) -> None:
    """Train for some steps sharded and not sharded, and say where they differ.

    Losses, outputs of every module, gradients, parameters, buffers, memory and time; the first module
    that differs; causes that it knows, with what to do.
    """
    from fullshard.tools import commands

    given = {"model": model, "arguments": tuple(arguments or ()), **options}
    code = commands.verify(
        given, os.environ, sys.argv[2:], keep=keep, is_whole=is_whole, as_json=as_json
    )
    raise typer.Exit(code)


def replay(
    folder: Annotated[Path, typer.Argument(help="What debug(replay=) has written.", metavar="DIR")],
    target: Annotated[
        str,
        typer.Argument(
            help="A function without arguments that builds and shards the model as the recorded run did.",
            metavar="MODULE:FUNCTION",
        ),
    ],
    rank: Annotated[
        int | None, typer.Option(help="The rank whose part is replayed. Default: all.")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Run a recorded step again, and name the first module whose output differs.

    Inputs of the step are unpickled: replay only what you have recorded, or trust.
    """
    import fullshard
    from fullshard.errors import MisuseError
    from fullshard.tools.user_model import look_at_model

    code = look_at_model(
        "replay",
        target,
        os.environ,
        lambda model: fullshard.replay(folder, model, rank=rank),
        unusable=(OptionError, MisuseError),  # a rank that was not recorded
        as_json=as_json,
    )
    raise typer.Exit(code)
