"""The `fullshard ckpt` commands: what can be typed. What they do is in `tools/checkpoint_commands.py`.

fullshard ckpt inspect PATH         what is in a checkpoint
fullshard ckpt verify PATH          read every byte, compare it with its checksum
fullshard ckpt diff A B             what two checkpoints differ in
fullshard ckpt reshard SRC DST      divide anew, as so many ranks would have written it
fullshard ckpt export SRC DST       as safetensors of Hugging Face, or for torch.distributed.checkpoint
fullshard ckpt import SRC DST       from these, or a file of torch.save, into our form
fullshard ckpt prune FOLDER         remove all but the newest checkpoints
"""

import enum
from typing import Annotated, NamedTuple

import typer

from fullshard.tools.cli_options import flag

app = typer.Typer(
    name="ckpt",
    help="Look into checkpoints, check, compare and convert them. No ranks, model or GPU are needed.",
    no_args_is_help=True,
)

_PATHS = """
A PATH is a checkpoint, or a folder of checkpoints or of a run, of which the newest is taken; a directory of torch.distributed.checkpoint; a file of torch.save; safetensors. URLs (s3://...) work where fsspec has the plugin.

Exit codes: 0 done, 1 failed, 2 unusable options
"""


def _examples(*lines: str, more: str = "") -> str:
    return (
        "\nExamples:\n\n"
        + "\n\n".join(f"    {line}" for line in lines)
        + "\n"
        + _PATHS.rstrip()
        + more
        + ".\n"
    )


class Form(str, enum.Enum):
    """What `export` writes."""

    HF = "hf"
    DCP = "dcp"


class Ways(NamedTuple):
    """The options that the commands that write have in common."""

    weights_only: bool
    overwrite: bool
    as_json: bool


_Path = Annotated[str, typer.Argument(help="What to read.", metavar="PATH")]
_Target = Annotated[str, typer.Argument(help="The folder to write.", metavar="TARGET")]
_Json = Annotated[bool, flag("--json", "Print one JSON object.")]
_Weights = Annotated[bool, flag("--weights-only", "Leave out optimizers and extra state.")]
_Overwrite = Annotated[
    bool, flag("--overwrite", "Replace what is there, once the new one is complete.")
]
_Ranks = Annotated[
    int, typer.Option(help="Divide files as this many ranks would have written them.", min=1)
]


@app.command(
    epilog=_examples(
        "fullshard ckpt inspect runs/books",
        "fullshard ckpt inspect runs/books/checkpoints/step-00000200 --tensors",
        "fullshard ckpt inspect s3://bucket/run --json",
    )
)
def inspect(
    path: _Path,
    tensors: Annotated[bool, flag("--tensors", "List every tensor.")] = False,
    as_json: _Json = False,
) -> None:
    """Say what is in a checkpoint: step, tensors, optimizers, files. Reads no tensor."""
    from fullshard.tools import checkpoint_commands as commands

    raise typer.Exit(commands.inspect(path, tensors=tensors, as_json=as_json))


@app.command(
    epilog=_examples(
        "fullshard ckpt verify runs/books", more=", 4 something is damaged (all of it is listed)"
    )
)
def verify(path: _Path, as_json: _Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its checksum."""
    from fullshard.tools import checkpoint_commands as commands

    raise typer.Exit(commands.verify(path, as_json=as_json))


@app.command(
    epilog=_examples(
        "fullshard ckpt diff runs/a runs/b",
        "fullshard ckpt diff dcp/step-100 runs/a --only model --tolerance 1e-6",
        more=", 5 they differ",
    )
)
def diff(
    first: _Path,
    second: Annotated[str, typer.Argument(help="What to compare it with.", metavar="OTHER")],
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="model, optimizer or extra; may repeat. Default: all.", metavar="SECTION"
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference of two elements that counts as none.", min=0)
    ] = 0.0,
    as_json: _Json = False,
) -> None:
    """List what two checkpoints differ in, however they are divided: tensors bit for bit, and values."""
    from fullshard.tools import checkpoint_commands as commands

    code = commands.diff(first, second, only or [], tolerance, as_json=as_json)
    raise typer.Exit(code)


@app.command(epilog=_examples("fullshard ckpt reshard runs/books /shared/books-64 --ranks 64"))
def reshard(
    path: _Path,
    target: _Target,
    ranks: _Ranks,
    weights_only: _Weights = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint as so many ranks would have. Any number of ranks loads any checkpoint: this is
    for one file instead of many, or for reads that do not meet."""
    from fullshard.tools import checkpoint_commands as commands

    ways = Ways(weights_only, overwrite, as_json)
    raise typer.Exit(commands.convert(path, target, ranks, ways, command="reshard"))


@app.command(
    epilog=_examples(
        "fullshard ckpt export runs/mine exports/mine --to hf --config downloads/llama",
        "fullshard ckpt export runs/mine dcp/mine --to dcp",
    )
)
def export(
    path: _Path,
    target: _Target,
    to: Annotated[
        Form, typer.Option(help="Hugging Face safetensors, or torch.distributed.checkpoint.")
    ],
    config: Annotated[
        str | None,
        typer.Option(
            help="hf: config.json, or a folder with it and with tokenizer files.", metavar="PATH"
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="hf: dtype of the weights: fp32, bf16 or fp16.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="hf: which of several models.", metavar="KEY")
    ] = None,
    weights_only: _Weights = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint in a form of others. For a run of fullshard train, see also: fullshard export."""
    from fullshard.tools import checkpoint_commands as commands

    ways = Ways(weights_only, overwrite, as_json)
    if to is Form.HF:
        code = commands.export_hf(path, target, commands.HfOptions(config, dtype, key), ways)
    elif config or dtype or key:
        code = commands.refuse("export", "--config, --dtype and --key are for --to hf.")
    else:
        code = commands.export_dcp(path, target, ways)
    raise typer.Exit(code)


@app.command(
    name="import",
    epilog=_examples(
        "fullshard ckpt import dcp/step-100 checkpoints/step-100 --ranks 8",
        "fullshard ckpt import model.pt checkpoints/start",
        "fullshard ckpt import downloads/llama checkpoints/llama",
    ),
)
def import_(
    path: _Path,
    target: _Target,
    ranks: _Ranks = 1,
    weights_only: _Weights = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Write what others have saved as a checkpoint with checksums. load_checkpoint takes them as they are,
    too."""
    from fullshard.tools import checkpoint_commands as commands

    ways = Ways(weights_only, overwrite, as_json)
    raise typer.Exit(commands.convert(path, target, ranks, ways, command="import"))


@app.command(
    epilog=_examples(
        "fullshard ckpt prune runs/books --keep-last 2 --dry-run",
        "fullshard ckpt prune checkpoints --keep-last 1 --keep-every 1000",
    )
)
def prune(
    folder: Annotated[
        str, typer.Argument(help="A folder of checkpoints, or a run.", metavar="FOLDER")
    ],
    keep_last: Annotated[int, typer.Option(help="How many of the newest stay.", min=1)],
    keep_every: Annotated[
        int | None, typer.Option(help="Those of steps that this divides stay as well.", min=1)
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Say what would be removed.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove complete checkpoints but the newest. Not while a job writes to the folder."""
    from fullshard.tools import checkpoint_commands as commands

    code = commands.prune(folder, keep_last, keep_every, dry_run=dry_run, as_json=as_json)
    raise typer.Exit(code)
