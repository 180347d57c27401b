"""`fullshard launch`: what can be typed. It prints; it starts nothing."""

import itertools
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from fullshard.tools.cli_options import argument, option, refuse, takes
from fullshard.tools.config import OptionError
from fullshard.tools.launchers.texts import TEMPLATES, Request, plain, program_of, text_for

LAUNCH_EXAMPLES = """
Examples, each for a file that is then submitted:

    fullshard launch --print slurm --nodes 2 -- train --model 1b --out /shared/run > run.sbatch
    fullshard launch --print k8s --nodes 2 --image registry/me/train -- train.py --lr 1e-3 > run.yaml
    fullshard launch --print ray --ranks-per-node 2 --cpu -- train --model tiny --out runs/ray > run.py
    fullshard launch --print sky --nodes 2 --gpu H100 -- -m my_package.train > run.yaml
    fullshard launch --print torchrun --nodes 2 -- doctor > run.sh

After `--` stands what torchrun is given: a script or `-m MODULE`, with its arguments, or a command of fullshard (train, doctor, replay). Of train, options are checked, and --out names a folder that all hosts share; --auto-resume is added, so that what is started again goes on from its newest checkpoint.

Exit codes: 0 printed, 2 unusable options.
"""


@takes(Request)
def launch(
    context: typer.Context,
    kind: Annotated[str, option(f"What to print: {', '.join(TEMPLATES)}.", "KIND", "--print")],
    program: Annotated[list[str] | None, argument("What each rank runs.", "-- PROGRAM")] = None,
    **options: Any,
) -> None:
    """Print what starts a run on Slurm, Kubernetes, Ray or SkyPilot, or with torchrun on several hosts.

    Nothing is started, and nobody is asked: read it, add what your site needs, and submit it.
    """
    words = plain(program or [])
    try:
        if kind not in TEMPLATES:
            raise OptionError(f"--print {kind}: choose from {', '.join(TEMPLATES)}.")
        ready = program_of(words, goes_on=_check_train(context, words))
        text = text_for(Request(kind, ready, tuple(sys.argv[2:]), **options))
    except OptionError as error:
        raise refuse("launch", error) from None
    print(text, end="")
    if kind == "k8s" and (where := _lost_with_its_pod(ready, options["volume"])):
        print(f"fullshard launch: {where}", file=sys.stderr)


def _lost_with_its_pod(program: Sequence[str], volume: str) -> str:
    """Say so if what `fullshard train` saves is in no volume; empty for any other program."""
    words = list(program)
    out = next((b for a, b in itertools.pairwise(words) if a == "--out"), "")
    mounted = volume.partition(":")[2].rstrip("/")
    if "--out" not in words or (mounted and f"{out}/".startswith(f"{mounted}/")):
        return ""
    return (
        f"note: --out {out} is on a pod's own disk, and is lost with it; give --volume CLAIM:/PATH, and an --out "
        "below that path, for the run to go on after a failure."
    )


def _check_train(context: typer.Context, words: Sequence[str]) -> bool:
    """Check the options if it is `fullshard train`, and return whether --auto-resume is to be added.

    Raises OptionError, or what typer raises for options that there are not.
    """
    if words[:1] != ["train"] or context.parent is None:
        return False
    command: Any = context.parent.command
    given = command.commands["train"].make_context("train", list(words[1:])).params
    if given["ranks"] is not None:
        raise OptionError(
            f"train --ranks {given['ranks']}: leave it out; the ranks are --nodes times --ranks-per-node."
        )
    if given["resume"] is not None and given["out"] not in (None, given["resume"]):
        raise OptionError(
            f"train --resume {given['resume']} and --out {given['out']}: a resumed run stays in its folder; leave "
            "out --out."
        )
    if given["out"] is None and given["resume"] is None:
        raise OptionError(
            "train: name a folder that all hosts share, with --out; a run that is started again goes on there."
        )
    return given["resume"] is None and not given["auto_resume"]
