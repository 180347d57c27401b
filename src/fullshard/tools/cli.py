"""The `fullshard` command: its commands. Of the tools, what can be typed alone reads the environment.

What a command does is in `tools/commands.py`, which is imported when it runs: torch takes seconds,
and `--help` has no use for it.

fullshard train                     start this machine's ranks and train
torchrun ... -m fullshard train     be one of the ranks that torchrun started
srun ... fullshard train            be one of the ranks that Slurm started
fullshard launch --print slurm ...  print what starts a run under Slurm, Kubernetes, Ray or SkyPilot
fullshard doctor                    examine this machine, and what ranks can do together
fullshard verify train.py           compare a script's steps, sharded and not sharded
fullshard verify M:F                compare a sharded model with one process
fullshard replay DIR M:F             run a recorded step again, and compare every bit
fullshard migrate-report M:F        say what an FSDP1 model would be with fully_shard
fullshard report RUN                write a page on where the time and memory of a run went
fullshard ckpt ...                  look into checkpoints, check, compare and convert them
fullshard export RUN --hf DIR       write a run's weights as a folder that Transformers loads
"""

import errno
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from fullshard.tools.checking_cli import REPLAY_EXAMPLES, VERIFY_EXAMPLES, replay, verify
from fullshard.tools.checkpoint_cli import app as checkpoint_app
from fullshard.tools.cli_options import flag
from fullshard.tools.exits import Exit
from fullshard.tools.launch_cli import LAUNCH_EXAMPLES, launch
from fullshard.tools.train_cli import TRAIN_EXAMPLES, TrainCommand, train
from fullshard.versions import installed

_MIGRATE_EXAMPLES = """
Example, with a function that returns the wrapped model in my_package/train.py:

    fullshard migrate-report my_package.train:build_model

    torchrun --nproc-per-node 2 -m fullshard migrate-report my_package.train:build_model --json

One rank alone makes every sharding strategy NO_SHARD; under torchrun the report knows which it is.

Exit codes: 0 reported, 1 the function failed or wraps nothing, 2 no such function.
"""

_REPORT_EXAMPLES = """
Examples:

    fullshard report runs/books                 writes a page and trace.json

    fullshard report runs/books --json          print the numbers instead

    fullshard report runs/books runs/again      compare runs, the first with the others

    fullshard report my_traces --out page.html  traces of fullshard.trace

The page needs no network. Where a run was not traced, it says how to record a trace.

Exit codes: 0 written, 2 nothing to report on, or a file that cannot be read.
"""

_EXPORT_EXAMPLES = """
Examples:

    fullshard export runs/books --hf exports/books            the newest checkpoint

    fullshard export runs/books/checkpoints/step-00000200 --hf exports/early --dtype bf16

    fullshard train --init-from exports/books --data letters/  train on from it

In Python: transformers.AutoModelForCausalLM.from_pretrained("exports/books"), and AutoTokenizer likewise. Of a run without --tokenizer tokens are bytes: list(text.encode()).

Exit codes: 0 written, 1 it cannot be written, or the checkpoint is damaged, 2 unusable options, or no run.
"""

_DOCTOR_EXAMPLES = """
Examples:

    fullshard doctor                     this machine, with ranks of its own

    fullshard doctor --ranks 4 --json    one JSON object: verdict, findings, facts

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m fullshard doctor

Under torchrun (or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) it examines the ranks that were started, and rank 0 reports. torchrun itself waits for all hosts first, which its --rdzv-conf join_timeout=60 bounds.

Exit codes: 0 nothing worse than a warning, 1 a problem was found, 2 unusable options or missing packages, 3 a rank died.
"""

app = typer.Typer(
    name="fullshard",
    help="Train models larger than one device by sharding them over ranks.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},  # of every command
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint_app, name="ckpt")


def _show_version(asked: bool) -> None:
    if asked:
        print(installed())
        raise typer.Exit(Exit.OK)


@app.callback()
def _commands(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            metavar="",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Train models larger than one device by sharding them over ranks."""


app.command(epilog=TRAIN_EXAMPLES, cls=TrainCommand)(train)


@app.command(epilog=_DOCTOR_EXAMPLES)
def doctor(
    ranks: Annotated[
        int | None, typer.Option(help="Local ranks. Default: one per GPU, else 2.", min=1)
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds to wait for other ranks, and for each thing tried.", min=1),
    ] = 60.0,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Examine machines and ranks, and say what to do about what is found.

    Versions, packages, devices, limits, environment; whether ranks reach each other over Gloo, NCCL
    and shared memory, and how fast; clocks of hosts. It starts ranks and ends them; it changes nothing.
    """
    from fullshard.tools import commands

    code = commands.doctor(ranks, os.environ, sys.argv[2:], timeout_s=timeout, as_json=as_json)
    raise typer.Exit(code)


app.command(epilog=VERIFY_EXAMPLES)(verify)
app.command(epilog=REPLAY_EXAMPLES)(replay)
app.command(epilog=LAUNCH_EXAMPLES)(launch)


@app.command(epilog=_MIGRATE_EXAMPLES)
def migrate_report(
    target: Annotated[
        str,
        typer.Argument(
            help="A function without arguments that returns a model wrapped with "
            "FullyShardedDataParallel, PyTorch's or fullshard's.",
            metavar="MODULE:FUNCTION",
        ),
    ],
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Say what a model wrapped with FullyShardedDataParallel would be with fully_shard.

    Runs FUNCTION in this process, on a Gloo group of one rank unless importing MODULE or torchrun
    makes another; FUNCTION must not make one. Prints every instance, every argument and the code.
    """
    # The report says it itself, once.
    warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
    from fullshard.tools import commands

    raise typer.Exit(commands.migrate_report(target, os.environ, as_json=as_json))


@app.command(epilog=_REPORT_EXAMPLES)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A run folder, or a folder of traces; several are compared.", metavar="RUN..."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page. Default: report.html in RUN; of several, comparison.html here.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print the numbers as one JSON object, write nothing.")
    ] = False,
) -> None:
    """Write one HTML page on a run: timelines, exposed communication, memory, loss, tokens/s.

    trace.json beside it holds the same timelines for chrome://tracing and Perfetto. Of several runs it
    compares figures, losses and options.
    """
    from fullshard.tools import commands

    raise typer.Exit(commands.report(runs, out, as_json=as_json))


@app.command(epilog=_EXPORT_EXAMPLES)
def export(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a checkpoint in one.", metavar="RUN")
    ],
    hf: Annotated[
        Path, typer.Option("--hf", help="The folder to write, for Transformers.", metavar="DIR")
    ],
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16. Default: as saved, fp32.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file.", metavar="SIZE")] = "5GB",
    overwrite: Annotated[bool, flag("--overwrite", "Replace an export that is there.")] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Write the weights of a run as a folder that Transformers loads, with its tokenizer if it has one.

    Reads the checkpoint's files, piece by piece: no ranks are started, and no model is built.
    """
    from fullshard.tools import commands

    code = commands.export(
        run, hf, dtype=dtype, max_shard_size=max_shard_size, overwrite=overwrite, as_json=as_json
    )
    raise typer.Exit(code)


def main() -> None:
    try:
        app()
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        print(f"fullshard: {str(error.filename)[:80]!r}: {error.strerror}.", file=sys.stderr)
        sys.exit(Exit.USAGE)
