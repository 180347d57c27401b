"""`fullshard train`: what can be typed."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from fullshard.tools.cli_options import flag, option
from fullshard.tools.config import DEFAULT_CACHE, TINY_DEFAULTS, OptionError, TrainConfig
from fullshard.tools.config_file import read_options

TRAIN_EXAMPLES = """
Examples:

    fullshard train                      10M parameters on Python's own source

    fullshard train --model tiny         the same in a minute, to look around

    fullshard train --data books/ notes.txt --steps 2000 --out runs/books

    fullshard train --model 125m --dtype bf16 --activation-checkpointing

    fullshard train --config run.toml --lr 1e-3   options from a file, and one typed

    fullshard train --config runs/books --out runs/again   the options of another run

    fullshard train --data books.jsonl --tokenizer llama/ --model llama/config.json --seq 1024

    fullshard train --data books.jsonl --tokenizer llama/ --model llama/ --init-from llama/ --lr 1e-5

    fullshard train --resume runs/books  continue, bit for bit

    fullshard train --init-from runs/books --data letters/  begin with its weights

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m fullshard train --model 1b --out /shared/run

    srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 fullshard train --model 1b --out /shared/run

    fullshard launch --help              a script for Slurm, Kubernetes, Ray or SkyPilot

Text is trained on byte by byte, or in the tokens of --tokenizer. It is plain, JSON lines (.jsonl, .ndjson), Parquet, or a folder that `datasets` has saved. A folder's hidden, binary and empty files are skipped, and named.

While it runs, tokens/s is the mean of the last 20 steps; metrics.jsonl has that of each.

Exit codes: 0 finished, 1 failed, 2 unusable options or missing packages, 3 a rank died, 75 stopped by Ctrl-C or SIGTERM with everything saved.
"""

_DEFAULT = TrainConfig()


class TrainCommand(TyperCommand):
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


def _by_model(help_text: str, name: str, *, panel: str) -> Any:
    """Declare an option whose default is another one for the tiny model (config.with_defaults)."""
    default = f"{getattr(_DEFAULT, name)}, for tiny {TINY_DEFAULTS[name]}"
    if name == "warmup":
        default = f"a tenth of the steps, at most {default}"
    return option(f"{help_text} Default: {default}.", panel=panel)


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
    context.default_map = {options[key].name: value for key, value in found.items()}
    return path


def train(
    context: typer.Context,
    more_data: Annotated[
        list[str] | None, typer.Argument(help="More text, as after --data.", metavar="TEXT")
    ] = None,
    data: Annotated[
        list[str] | None,
        option(
            "File or folder of text, JSON lines (.jsonl) or Parquet, or a saved data set; may repeat. "
            "Default: Python's own library.",
            panel="Text",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with options, by their names; or a run's folder. What is typed comes first.",
            metavar="FILE",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    text_field: Annotated[
        str,
        option(
            "Where a line of JSON, or a row of a table, holds its text. Default: text.",
            panel="Text",
        ),
    ] = _DEFAULT.text_field,
    tokenizer: Annotated[
        str,
        typer.Option(
            help="File or folder with a tokenizer.json of Hugging Face. Default: none, a token is a byte.",
            rich_help_panel="Text",
            metavar="PATH",
        ),
    ] = _DEFAULT.tokenizer,
    end_token: Annotated[
        str,
        option(
            "The token behind each document. Default: what the tokenizer's configuration says.",
            panel="Text",
        ),
    ] = _DEFAULT.end_token,
    across_documents: Annotated[
        bool,
        flag(
            "--across-documents",
            "Let documents in a sequence see those before them.",
            panel="Text",
        ),
    ] = _DEFAULT.across_documents,
    val_data: Annotated[
        list[str] | None,
        option(
            "Text to measure the loss on, instead of --val-fraction: one or several.", panel="Text"
        ),
    ] = None,
    val_fraction: Annotated[
        float,
        option("Of the text, at its end, that is held out to measure the loss on.", panel="Text"),
    ] = _DEFAULT.val_fraction,
    val_every: Annotated[
        int,
        option("Steps between measurements; 0: only at the end.", panel="Text"),
    ] = _DEFAULT.val_every,
    val_sequences: Annotated[
        int, option("Sequences of it that are measured at most, over all ranks.", panel="Text")
    ] = _DEFAULT.val_sequences,
    seq: Annotated[int, option("Tokens in a sequence.", panel="Text")] = _DEFAULT.seq,
    model: Annotated[
        str,
        typer.Option(
            help="Size: tiny, 10m, 35m, 125m, 350m, 1b, 8b. Or the config.json, or the folder, of a model of "
            "Transformers.",
            rich_help_panel="Model",
            metavar="SIZE|PATH",
        ),
    ] = _DEFAULT.model,
    vocab_size: Annotated[
        int | None,
        option(
            "Kinds of tokens that the model tells apart. Default: as many as there are.",
            panel="Model",
        ),
    ] = None,
    tie_embeddings: Annotated[
        bool, flag("--tie-embeddings", "Embedding and head share a weight.", panel="Model")
    ] = _DEFAULT.tie_embeddings,
    init_from: Annotated[
        str,
        typer.Option(
            help="Begin with the weights of this folder: a run, one of its checkpoints, or a model's of "
            "Hugging Face (safetensors).",
            rich_help_panel="Model",
            metavar="DIR",
        ),
    ] = _DEFAULT.init_from,
    activation_checkpointing: Annotated[
        bool,
        flag("--activation-checkpointing", "Recompute layers in the backward.", panel="Model"),
    ] = _DEFAULT.activation_checkpointing,
    ranks: Annotated[
        int | None, option("Local ranks. Default: one per GPU, else 2.", panel="Devices")
    ] = None,
    device: Annotated[str, option("auto, cpu or cuda.", panel="Devices")] = "auto",
    dtype: Annotated[
        str,
        option(
            "auto, fp32, or bf16 (reduced in fp32). auto: bf16 on GPU, fp32 on CPU.",
            panel="Devices",
        ),
    ] = "auto",
    steps: Annotated[
        int | None, _by_model("Optimizer steps in all.", "steps", panel="Training")
    ] = None,
    batch: Annotated[
        int | None, _by_model("Sequences per rank and forward.", "batch", panel="Training")
    ] = None,
    grad_accum: Annotated[
        int,
        option(
            "Forwards and backwards per step, each reduced, so that gradients stay sharded. "
            "Reducing once would be faster, by up to a quarter, but each rank would hold a whole "
            "model's gradients.",
            panel="Training",
        ),
    ] = _DEFAULT.grad_accum,
    lr: Annotated[float | None, _by_model("Highest learning rate.", "lr", panel="Training")] = None,
    min_lr: Annotated[
        float | None,
        option(
            f"Learning rate at the last step. Default: a tenth of --lr, at most {_DEFAULT.min_lr}.",
            panel="Training",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        _by_model("Steps of linear rise before the cosine.", "warmup", panel="Training"),
    ] = None,
    weight_decay: Annotated[
        float, option("AdamW weight decay of matrices.", panel="Training")
    ] = _DEFAULT.weight_decay,
    clip: Annotated[
        float, option("Largest global gradient norm; 0 for no limit.", panel="Training")
    ] = _DEFAULT.clip,
    seed: Annotated[
        int, option("Decides weights, text and sample.", panel="Training")
    ] = _DEFAULT.seed,
    out: Annotated[
        Path | None, option("Run folder. Default: runs/ and the time.", panel="Results")
    ] = None,
    resume: Annotated[
        Path | None,
        option("Continue the run in this folder, with its options.", panel="Results"),
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
    save_every: Annotated[
        int, option("Steps between checkpoints; 0: only at the end.", panel="Results")
    ] = _DEFAULT.save_every,
    keep_checkpoints: Annotated[
        int, option("How many of the newest checkpoints stay.", panel="Results")
    ] = _DEFAULT.keep_checkpoints,
    prompt: Annotated[
        str, option("Beginning of the text sample.", panel="Results")
    ] = _DEFAULT.prompt,
    sample_length: Annotated[
        int, option("Tokens to generate at the end; 0 for none.", panel="Results")
    ] = _DEFAULT.sample_length,
    temperature: Annotated[
        float, option("Of the sample; 0 takes the likeliest token.", panel="Results")
    ] = _DEFAULT.temperature,
    trace_steps: Annotated[
        int, option("Steps to record for the report; 0 for none.", panel="Results")
    ] = _DEFAULT.trace_steps,
    log: Annotated[
        list[str] | None,
        typer.Option(
            "--log",
            "--logger",  # torchrun takes --log for an abbreviation of its own, even behind its program
            help="Send each step's numbers there as well: tensorboard, wandb, mlflow, trackio, or a class of "
            "yours; may repeat.",
            metavar="NAME|MODULE:CLASS",
            rich_help_panel="Results",
        ),
    ] = None,
    cache: Annotated[
        Path, option("Where tokenized text is kept for runs to come.", panel="Text")
    ] = DEFAULT_CACHE,
    as_json: Annotated[
        bool, flag("--json", "Print the summary as one JSON object.", panel="Results")
    ] = False,
) -> None:
    """Train a language model whose parameters are sharded over all ranks.

    Starts one rank per GPU, or two on the CPU; under torchrun, or as one of srun's tasks, it is one rank.
    Ctrl-C or SIGTERM saves and stops; --resume continues exactly there.
    """
    from fullshard.tools import commands

    typed = {name for name in context.params if _was_typed(context, name)}
    options = {k: v for k, v in context.params.items() if k in TrainConfig.__dataclass_fields__}
    options |= {"data": (*(data or ()), *(more_data or ())), "log": tuple(log or ())}
    options["val_data"] = tuple(val_data or ())
    if more_data:
        typed.add("data")
    typing = commands.Typed(options, typed, sys.argv[2:], out, resume, auto_resume, cache)
    raise typer.Exit(commands.train(typing, os.environ, as_json=as_json))


def _was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given, typed or by --config, even with its default value."""
    source = context.get_parameter_source(name)
    # By name: typer carries click inside from 0.25 on, so its enum has two homes.
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
