"""What each `fullshard ckpt` command does. Results go to standard output, the rest to standard error."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

import fullshard
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.tools.checkpoint_cli import Ways
from fullshard.tools.exits import Exit
from fullshard.tools.json_text import json_text
from fullshard.tools.progress import Copying, as_it_is, printable

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SECTIONS = ("model", "optimizer", "extra")
_RUN_CHECKPOINTS = "checkpoints"
_MOST_SHOWN = 40


class HfOptions(NamedTuple):
    """Options of exports for Hugging Face, as typed."""

    config: str | None
    dtype: str | None
    key: str | None


def inspect(path: str, *, tensors: bool, as_json: bool) -> Exit:
    """Print what is in a checkpoint."""

    def run() -> Exit:
        summary = fullshard.inspect_checkpoint(path)
        if as_json:
            print(json_text(summary.as_dict(), default=str))
        else:
            _show_summary(summary, tensors=tensors)
        return Exit.OK

    return _guarded("inspect", run, as_json=as_json)


def verify(path: str, *, as_json: bool) -> Exit:
    """Read every byte, and print what is damaged."""

    def run() -> Exit:
        with Copying("reading") as bar:
            found = fullshard.verify_checkpoint(path, progress=bar.update)
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
            print(f"{found.path}: {_size(found.nbytes)} read, {verdict}")
        return Exit.DAMAGED if found.faults else Exit.OK

    return _guarded("verify", run, as_json=as_json)


def diff(first: str, second: str, only: Sequence[str], tolerance: float, *, as_json: bool) -> Exit:
    """Print what two checkpoints differ in."""
    unknown = [section for section in only if section not in _SECTIONS]
    if unknown:
        return refuse("diff", f"--only {unknown[0]}: is none of {', '.join(_SECTIONS)}.")

    def run() -> Exit:
        with Copying("comparing") as bar:
            found = fullshard.diff_checkpoints(
                first, second, sections=only, tolerance=tolerance, progress=bar.update
            )
        if as_json:
            print(json_text({"differences": [dataclasses.asdict(each) for each in found]}))
        else:
            for each in found:
                print(printable(_shown(each)))
            print(f"{len(found)} differences" if found else "no differences")
        return Exit.DIFFERENT if found else Exit.OK

    return _guarded("diff", run, as_json=as_json)


def convert(path: str, target: str, ranks: int, ways: Ways, *, command: str) -> Exit:
    """Write a checkpoint of our form from any."""

    def run() -> Exit:
        with Copying("writing") as bar:
            saved = fullshard.convert_checkpoint(
                path,
                target,
                ranks=ranks,
                weights_only=ways.weights_only,
                overwrite=ways.overwrite,
                progress=bar.update,
            )
        _written({"path": str(saved.path), "nbytes": saved.nbytes, "step": saved.step}, ways)
        return Exit.OK

    return _guarded(command, run, as_json=ways.as_json)


def export_hf(path: str, target: str, options: HfOptions, ways: Ways) -> Exit:
    """Write a folder for Transformers from a checkpoint."""
    if options.dtype is not None and options.dtype not in _DTYPES:
        return refuse("export", f"--dtype {options.dtype}: is none of {', '.join(_DTYPES)}.")

    def run() -> Exit:
        with Copying("writing") as bar:
            written = fullshard.export_hf(
                fullshard.inspect_checkpoint(path).path,
                target,
                config=options.config,
                dtype=_DTYPES[options.dtype] if options.dtype else None,
                key=options.key,
                overwrite=ways.overwrite,
                progress=bar.update,
            )
        fields = {"path": str(written.path), "nbytes": written.nbytes, "files": written.files}
        _written(fields, ways)
        return Exit.OK

    return _guarded("export", run, as_json=ways.as_json)


def export_dcp(path: str, target: str, ways: Ways) -> Exit:
    """Write a directory of torch.distributed.checkpoint from a checkpoint."""

    def run() -> Exit:
        with Copying("writing") as bar:
            written = fullshard.export_dcp(
                path,
                target,
                weights_only=ways.weights_only,
                overwrite=ways.overwrite,
                progress=bar.update,
            )
        _written({"path": str(written.path), "nbytes": written.nbytes}, ways)
        return Exit.OK

    return _guarded("export", run, as_json=ways.as_json)


def prune(
    folder: str, keep_last: int, keep_every: int | None, *, dry_run: bool, as_json: bool
) -> Exit:
    """Remove all but the newest checkpoints of a folder, and print which."""

    def run() -> Exit:
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
        else:
            for path in removed:
                print(f"{'would remove' if dry_run else 'removed'} {path}")
            if not removed:
                print("nothing to remove")
        return Exit.OK

    return _guarded("prune", run, as_json=as_json)


def refuse(command: str, text: str) -> Exit:
    """Say what is wrong with the options."""
    print(f"fullshard ckpt {command}: {text}", file=sys.stderr)
    print(f"Options: fullshard ckpt {command} --help", file=sys.stderr)
    return Exit.USAGE


def _guarded(command: str, run: Callable[[], Exit], *, as_json: bool) -> Exit:
    try:
        return run()
    except (CheckpointError, OSError) as error:
        if as_json:
            print(json_text({"error": str(error)}))
        for line in str(error).replace("pass overwrite=True", "add --overwrite").splitlines():
            print(f"fullshard ckpt {command}: {printable(line)}", file=sys.stderr)
        is_damaged = command == "verify" and isinstance(error, DamagedCheckpointError)
        return Exit.DAMAGED if is_damaged else Exit.FAILED


def _written(fields: dict[str, Any], ways: Ways) -> None:
    if ways.as_json:
        print(json_text(fields))
    else:
        print(f"{fields['path']}: {_size(fields['nbytes'])} written")


def _show_summary(summary: fullshard.CheckpointSummary, *, tensors: bool) -> None:
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
        size = _size(sum(each.nbytes for each in found))
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
        total = _size(sum(summary.file_nbytes.values()))
        console.print(f"{len(summary.file_nbytes)} files, {total}")
    for name, each in summary.tensors.items() if tensors else ():
        line = f"{name}  {list(each.shape)}  {each.dtype}  {each.placement}"
        console.print(as_it_is(line), soft_wrap=True)


def _shown(each: fullshard.CheckpointDifference) -> str:
    if each.kind == "values":
        return f"{each.name}: {each.num_elements:,} elements differ, by at most {each.largest:.3g}"
    if each.first or each.second:
        first, second = (text[:_MOST_SHOWN] for text in (each.first, each.second))
        return f"{each.name}: {each.kind}: {first} and {second}"
    return f"{each.name}: {each.kind}"


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
