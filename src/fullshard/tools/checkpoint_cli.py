"""The `fullshard ckpt` commands. Results go to standard output, the rest to standard error."""

import contextlib
import dataclasses
import enum
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

import fullshard
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.json_files import json_text
from fullshard.tools.cli_options import App, argument, flag, option, refuse
from fullshard.tools.config import OptionError
from fullshard.tools.doctor.findings import counted
from fullshard.tools.exits import Exit
from fullshard.tools.progress import as_it_is, counting, printable

_SECTIONS = ("model", "optimizer", "extra")
_RUN_CHECKPOINTS = "checkpoints"
_MOST_SHOWN = 40

app = App(
    name="ckpt",
    help="Look into checkpoints, check, compare and convert them. No ranks, model or GPU are needed.",
)

_PATHS = """
A PATH is a checkpoint, or a folder of checkpoints or of a run, of which the newest is taken; a directory of torch.distributed.checkpoint; a file of torch.save; safetensors. URLs (s3://...) work where fsspec has the plugin.

Exit codes: 0 done, 1 failed, 2 unusable options
"""


def _examples(*lines: str, more: str = "") -> str:
    return (
        "\nExamples:\n\n"
        + "\n".join(f"    {line}" for line in lines)
        + "\n"
        + _PATHS.rstrip()
        + more
        + ".\n"
    )


class Form(str, enum.Enum):
    """What `export` writes."""

    HF = "hf"
    DCP = "dcp"


_Path = Annotated[str, argument("What to read.", "PATH")]
_Target = Annotated[str, argument("The folder to write.", "TARGET")]
_Json = Annotated[bool, flag("--json", "Print one JSON object.")]
_Weights = Annotated[bool, flag("--weights-only", "Leave out optimizers and extra state.")]
_Overwrite = Annotated[
    bool, flag("--overwrite", "Replace what is there, once the new one is complete.")
]
_Ranks = Annotated[
    int,
    option("Divide files as this many ranks would have written them.", "N", least=1),
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
    with _failures("inspect", as_json=as_json):
        summary = fullshard.inspect_checkpoint(path)
        if as_json:
            print(json_text(summary.as_dict(), default=str))
        else:
            _show_summary(summary, tensors=tensors)


@app.command(
    epilog=_examples(
        "fullshard ckpt verify runs/books", more=", 4 something is damaged (all of it is listed)"
    )
)
def verify(path: _Path, as_json: _Json = False) -> None:
    """Read every byte of a checkpoint and compare it with its checksum."""
    with _failures("verify", as_json=as_json):
        with counting("reading") as update:
            found = fullshard.verify_checkpoint(path, progress=update)
        if as_json:
            print(json_text({**dataclasses.asdict(found), "path": str(found.path)}))
        else:
            for name, fault in found.faults.items():
                print(f"{printable(name)}: {printable(fault)}")
            verdict = "all as it was written"
            if not found.has_checksums:
                verdict = "all can be read; this form has no checksums to compare it with"
            if found.faults:
                verdict = f"{len(found.faults)} damaged"
            print(f"{found.path}: {decimal(found.nbytes)} read, {verdict}")
        if found.faults:
            raise typer.Exit(Exit.DAMAGED)


@app.command(
    epilog=_examples(
        "fullshard ckpt diff runs/a runs/b",
        "fullshard ckpt diff dcp/step-100 runs/a --only model --tolerance 1e-6",
        more=", 5 they differ",
    )
)
def diff(
    first: _Path,
    second: Annotated[str, argument("What to compare it with.", "OTHER")],
    only: Annotated[
        list[str] | None, option("model, optimizer or extra; may repeat. Default: all.", "SECTION")
    ] = None,
    tolerance: Annotated[
        float, option("Largest difference of two elements that counts as none.", "X", least=0)
    ] = 0.0,
    as_json: _Json = False,
) -> None:
    """List what two checkpoints differ in, however they are divided: tensors bit for bit, and values."""
    unknown = [section for section in only or () if section not in _SECTIONS]
    if unknown:
        raise refuse("ckpt diff", f"--only {unknown[0]}: is none of {', '.join(_SECTIONS)}.")
    with _failures("diff", as_json=as_json):
        with counting("comparing") as update:
            found = fullshard.diff_checkpoints(
                first, second, sections=only or (), tolerance=tolerance, progress=update
            )
        if as_json:
            print(json_text({"differences": [dataclasses.asdict(each) for each in found]}))
        else:
            for each in found:
                print(printable(_shown(each)))
            print(f"{len(found)} differences" if found else "no differences")
        if found:
            raise typer.Exit(Exit.DIFFERENT)


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
    how = {"ranks": ranks, "weights_only": weights_only, "overwrite": overwrite}
    _convert("reshard", path, target, how, as_json=as_json)


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
        Form, option("Hugging Face safetensors, or torch.distributed.checkpoint.", "hf|dcp")
    ],
    config: Annotated[
        str | None,
        option(
            "hf: config.json, or a folder with it and with tokenizer files. Default: of a run its own.",
            "PATH",
        ),
    ] = None,
    dtype: Annotated[str | None, option("hf: dtype of the weights.", "fp32|bf16|fp16")] = None,
    key: Annotated[str | None, option("hf: which of several models.", "KEY")] = None,
    weights_only: _Weights = False,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Write a checkpoint in a form of others; of a run of `fullshard train`, as `fullshard export` does."""
    # torch, as the work itself
    from fullshard.tools.weights import DTYPES, export_run, is_run, run_of

    if to is Form.DCP and (config or dtype or key):
        raise refuse("ckpt export", "--config, --dtype and --key are for --to hf.")
    if dtype is not None and dtype not in DTYPES:
        raise refuse("ckpt export", f"--dtype {dtype}: is none of {', '.join(DTYPES)}.")
    if config is not None and is_run(Path(config)):
        raise refuse("ckpt export", f"--config {config}: is a run, and no model's. Leave it out.")
    with _failures("export", as_json=as_json), counting("writing") as update:
        how: dict[str, Any] = {"overwrite": overwrite, "progress": update}
        if to is Form.DCP:
            state = fullshard.export_dcp(path, target, weights_only=weights_only, **how)
            written = {"path": str(state.path), "nbytes": state.nbytes}
        else:
            if config is None and key is None and run_of(Path(path)):
                weights = export_run(Path(path), Path(target), dtype=dtype, **how)[1]
            else:
                how |= {"config": config, "key": key, "dtype": DTYPES[dtype] if dtype else None}
                source = fullshard.inspect_checkpoint(path).path
                weights = fullshard.export_hf(source, target, **how)
            written = {"path": str(weights.path), "nbytes": weights.nbytes, "files": weights.files}
    _print_written(written, as_json=as_json)


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
    """Write what others have saved as a checkpoint with checksums.

    `load_checkpoint` takes it as it is, too.
    """
    how = {"ranks": ranks, "weights_only": weights_only, "overwrite": overwrite}
    _convert("import", path, target, how, as_json=as_json)


@app.command(
    epilog=_examples(
        "fullshard ckpt prune runs/books --keep-last 2 --dry-run",
        "fullshard ckpt prune checkpoints --keep-last 1 --keep-every 1000",
    )
)
def prune(
    folder: Annotated[str, argument("A folder of checkpoints, or a run.", "FOLDER")],
    keep_last: Annotated[int, option("How many of the newest stay.", "N", least=1)],
    keep_every: Annotated[
        int | None, option("Those of steps that this divides stay as well.", "N", least=1)
    ] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Say what would be removed.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove complete checkpoints but the newest. Not while a job writes to the folder."""
    with _failures("prune", as_json=as_json):
        if "://" not in folder and not Path(folder).is_dir():
            raise CheckpointError(f"{folder}: is no folder.")
        removed: list[str] = []
        for parent in (folder, f"{folder.rstrip('/')}/{_RUN_CHECKPOINTS}"):
            found = fullshard.prune_checkpoints(
                parent, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run
            )
            removed += [str(each.path) for each in found]
        if as_json:
            print(json_text({"removed": removed, "dry_run": dry_run}))
            return
        for path in removed:
            print(f"{'would remove' if dry_run else 'removed'} {path}")
        if not removed:
            print("nothing to remove")


def _convert(command: str, path: str, target: str, how: dict[str, Any], *, as_json: bool) -> None:
    """Write a checkpoint of our form from any."""
    with _failures(command, as_json=as_json), counting("writing") as update:
        saved = fullshard.convert_checkpoint(path, target, progress=update, **how)
    written = {"path": str(saved.path), "nbytes": saved.nbytes, "step": saved.step}
    _print_written(written, as_json=as_json)


@contextlib.contextmanager
def _failures(command: str, *, as_json: bool) -> Iterator[None]:
    """Say why the body failed, and end with its exit code."""
    try:
        yield
    except BrokenPipeError:  # of what reads the output
        raise
    except OptionError as error:
        raise refuse(f"ckpt {command}", error) from None
    except (CheckpointError, OSError) as error:
        if as_json:
            print(json_text({"error": str(error)}))
        for line in str(error).replace("pass overwrite=True", "add --overwrite").splitlines():
            print(f"fullshard ckpt {command}: {printable(line)}", file=sys.stderr)
        is_damaged = command == "verify" and isinstance(error, DamagedCheckpointError)
        raise typer.Exit(Exit.DAMAGED if is_damaged else Exit.FAILED) from None


def _print_written(fields: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json_text(fields))
    else:
        print(f"{fields['path']}: {decimal(fields['nbytes'])} written")


def _show_summary(summary: "fullshard.CheckpointSummary", *, tensors: bool) -> None:
    console = Console(highlight=False, emoji=False)
    facts = {"form": summary.form, **summary.facts}
    console.print(f"[bold]{as_it_is(str(summary.path))}[/bold]", soft_wrap=True)
    for name, value in facts.items():
        if value not in ({}, None, ""):
            shown = value if isinstance(value, str | int) else json.dumps(value)
            console.print(f"  {name}: {as_it_is(str(shown))}", soft_wrap=True)
    table = Table("section", "tensors", "elements", "size", "dtypes", box=None, pad_edge=False)
    for section, found in summary.sections().items():
        dtypes = sorted({each.dtype for each in found})
        numel = sum(math.prod(each.shape) for each in found)
        size = decimal(sum(each.nbytes for each in found))
        table.add_row(as_it_is(section), str(len(found)), f"{numel:,}", size, ", ".join(dtypes))
    console.print(table)
    for section, own in summary.optimizers.items():
        groups = ", ".join(
            f"{each['num_params']} parameters, lr {each['options'].get('lr')}"
            for each in own["groups"]
        )
        line = f"{section}: {own['class'] or 'class not saved'}; {groups}"
        console.print(as_it_is(line), soft_wrap=True)
    if summary.extra:
        console.print(f"extra: {', '.join(map(as_it_is, summary.extra))}", soft_wrap=True)
    if summary.file_nbytes:
        total = decimal(sum(summary.file_nbytes.values()))
        console.print(f"{counted(len(summary.file_nbytes), 'file')}, {total}")
    for name, each in summary.tensors.items() if tensors else ():
        line = f"{name}  {list(each.shape)}  {each.dtype}  {each.placement}"
        console.print(as_it_is(line), soft_wrap=True)


def _shown(each: "fullshard.CheckpointDifference") -> str:
    if each.kind == "values":
        return f"{each.name}: {each.num_elements:,} elements differ, by at most {each.largest:.3g}"
    if each.first or each.second:
        first, second = (text[:_MOST_SHOWN] for text in (each.first, each.second))
        return f"{each.name}: {each.kind}: {first} and {second}"
    return f"{each.name}: {each.kind}"
