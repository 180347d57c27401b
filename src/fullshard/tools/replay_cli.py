"""The `fullshard replay` command: what can be typed."""

import os
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples, with a function that returns the sharded model in my_package/train.py, after a step was recorded by fullshard.debug(replay="replays/a"):

    fullshard replay replays/a my_package.train:build                  all ranks' parts, in one process

    fullshard replay replays/a my_package.train:build --rank 3         that of one rank, say under a debugger

    torchrun --nproc-per-node 8 -m fullshard replay replays/a my_package.train:build      by the same ranks

Exit codes: 0 equal in every bit, 1 differs or failed, 2 unusable options or missing packages.
"""


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a recorded step again, and name the first module whose output differs.

    Inputs of the step are unpickled: replay only what you have recorded, or trust.
    """
    from fullshard.tools import commands

    raise typer.Exit(commands.replay(folder, target, os.environ, rank=rank, as_json=as_json))
