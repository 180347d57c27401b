"""`fullshard train`: what can be typed."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fullshard.tools.cli_options import Command, argument, flag, option, takes
from fullshard.tools.config import DEFAULT_CACHE, MOST_USED, OptionError, TrainConfig, read_options
from fullshard.tools.exits import Exit
from fullshard.tools.progress import before_first_step, say, say_starting

TRAIN_EXAMPLES = """
Examples:

    fullshard train                      # 10M parameters, Python's own source
    fullshard train --model tiny         # in a minute, to look around
    fullshard train --data books/ notes.txt --steps 2000 --out runs/books
    fullshard train --resume runs/books  # go on, bit for bit
    fullshard train --finetune llama/ --data books.jsonl --epochs 3
    fullshard train --data books.jsonl --tokenizer llama/ --model llama/config.json --seq 1024
    fullshard train --init-from runs/books --data letters/  # begin with the weights of a run
    fullshard train --model 125m --dtype bf16 --activation-checkpointing
    fullshard train --config run.toml --lr 1e-3  # options from a file, and one typed
    fullshard train --config runs/books --out runs/again  # the options of another run

Several hosts:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m fullshard train --model 1b --out /shared/run
    srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 fullshard train --model 1b --out /shared/run
    fullshard launch --help  # a script for Slurm, Kubernetes, Ray or SkyPilot

Text is trained on byte by byte, or in the tokens of --tokenizer. It is plain, JSON lines (.jsonl, .ndjson), Parquet, or a folder that `datasets` has saved. A folder's hidden, binary and empty files are skipped, and named.

Exit codes: 0 finished, 1 failed, 2 unusable options or missing packages, 3 a rank died, 75 stopped by Ctrl-C or SIGTERM with everything saved, 130 stopped before the first step.
"""

_LAUNCHER_PID = "FULLSHARD_LAUNCHER_PID"  # that of local_ranks, which imports torch

_REPLACES = {
    "finetune": ("model", "init_from", "tokenizer", "end_token", "vocab_size", "tie_embeddings"),
    "epochs": ("steps",),
    "steps": ("epochs",),
}
"""What a file says that is not meant any more where another option is typed."""


class TrainCommand(Command):
    """Takes several words after --val-data, as after --data, where TEXT would take all but the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeated: list[str] = []
        is_held_out = False
        for index, word in enumerate(args):
            if word.startswith("-"):
                is_held_out = word == "--val-data" or word.startswith("--val-data=")
            elif is_held_out and args[index - 1] != "--val-data":
                repeated.append("--val-data")
            repeated.append(word)
        return super().parse_args(ctx, repeated)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make what the file says the defaults of the options. Called before others are looked at."""
    if path is None:
        return None
    options: dict[str, Any] = {
        option.removeprefix("--").replace("-", "_"): parameter
        for parameter in context.command.params
        for option in parameter.opts
        if option.startswith("--") and parameter.name not in ("config", "help")
    }
    flags = {name for name, parameter in options.items() if parameter.is_flag}
    lists = {name for name, parameter in options.items() if parameter.multiple}
    try:
        found = read_options(path, known=options, flags=flags, lists=lists)
    except OptionError as error:
        raise typer.BadParameter(str(error).removeprefix("--config ")) from None
    # Of no value at all, such as [], typer makes None.
    context.default_map = {options[key].name: value for key, value in found.items() if value != []}
    return path


@takes(
    TrainConfig,
    vocab_size=("finetune",),
    batch=("epochs",),
    save_every=("out", "resume", "config", "auto_resume"),
)
def train(
    context: typer.Context,
    more_data: Annotated[list[str] | None, argument("More text, as after --data.", "TEXT")] = None,
    *,
    config: Annotated[
        Path | None,
        option(
            "TOML file with options, by their names; or a run's folder. What is typed comes first.",
            "FILE",
            panel="Results",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    finetune: Annotated[
        str | None,
        option(
            "Fine-tune the model in this folder, of Hugging Face or of `fullshard export`: --model, --init-from "
            "and --tokenizer in one.",
            "DIR",
            panel=MOST_USED,
        ),
    ] = None,
    epochs: Annotated[
        float | None,
        option("Instead of --steps: how often to go through the text.", "X", panel=MOST_USED),
    ] = None,
    cache: Annotated[
        Path, option("Where tokenized text is kept for runs to come.", "DIR", panel="Text")
    ] = DEFAULT_CACHE,
    out: Annotated[
        Path | None, option("Run folder. Default: runs/ and the time.", "DIR", panel=MOST_USED)
    ] = None,
    resume: Annotated[
        Path | None,
        option("Continue the run in this folder, with its options.", "DIR", panel=MOST_USED),
    ] = None,
    auto_resume: Annotated[
        bool,
        flag(
            "--auto-resume",
            "Continue the run in --out if it has a checkpoint, and else begin it: for launchers that "
            "start a run again.",
            panel="Results",
        ),
    ] = False,
    as_json: Annotated[
        bool, flag("--json", "Print the summary as one JSON object.", panel="Results")
    ] = False,
    **options: Any,
) -> None:
    """Train a language model whose parameters are sharded over all ranks.

    Starts one rank per GPU, or two on the CPU; under torchrun, or as one of srun's tasks, it is one rank.
    Ctrl-C or SIGTERM saves and stops; --resume continues exactly there.
    """
    try:
        if _is_heard():
            say_starting()
        from fullshard.tools import commands

        options |= {"finetune": finetune, "epochs": epochs}
        found = {name: context.get_parameter_source(name) for name in options}
        # By name: typer carries click inside from 0.25 on, so its enum has two homes.
        sources = {name: source.name if source else "" for name, source in found.items()}
        replaced = {
            other
            for name, others in _REPLACES.items()
            for other in others
            if sources[name] == "COMMANDLINE" and sources[other] == "DEFAULT_MAP"
        }
        given = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
            if value is not None
            and sources[name] in ("COMMANDLINE", "DEFAULT_MAP")
            and name not in replaced
        }
        if more_data:
            given["data"] = (*given.get("data", ()), *more_data)
        typed = commands.Typed(given, sys.argv[2:], out, resume, auto_resume, cache)
        raise typer.Exit(commands.train(typed, os.environ, as_json=as_json))
    except KeyboardInterrupt:  # where ranks run, StopRequest has it
        if _is_heard():
            say(before_first_step(resume or (out if auto_resume else None)))
        raise typer.Exit(Exit.INTERRUPTED) from None


def _is_heard() -> bool:
    """Whether this process speaks for the job: the launcher, or rank 0 of those that another one has started."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return rank == "0" and _LAUNCHER_PID not in os.environ
