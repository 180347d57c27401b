"""The `fullshard` command. Of the tools, the one place that reads environment variables.

fullshard train                     start this machine's ranks and train
torchrun ... -m fullshard train     be one of the ranks that torchrun started
fullshard migrate-report M:F        say what an FSDP1 model would be with fully_shard
fullshard report RUN                write a page on where the time and memory of a run went
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fullshard.errors import StateError
from fullshard.plan.trace import TraceError
from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.job import Job, check_local_ranks, new_job, resumed_job
from fullshard.tools.launch import LAUNCHER_PID, Ending, Exit, launch
from fullshard.tools.migration import report_on
from fullshard.tools.report import metrics_of, write_report
from fullshard.tools.worker import Place, run_worker

_EXAMPLES = """
Examples:

    fullshard train                                    10M parameters on Python's own source

    fullshard train --data books/ notes.txt --steps 2000 --out runs/books

    fullshard train --model 125m --dtype bf16 --activation-checkpointing

    fullshard train --resume runs/books                continue, bit for bit

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m fullshard train --model 1b --out /shared/run

Exit codes: 0 finished, 1 failed, 2 unusable options, 3 a rank died, 75 stopped by Ctrl-C or SIGTERM with everything saved.
"""

_MIGRATE_EXAMPLES = """
Example, with a function that returns the wrapped model in my_package/train.py:

    fullshard migrate-report my_package.train:build_model

    torchrun --nproc-per-node 2 -m fullshard migrate-report my_package.train:build_model --json

One rank alone makes every sharding strategy NO_SHARD; under torchrun the report knows which it is.

Exit codes: 0 reported, 1 the function failed or wraps nothing, 2 no such function.
"""

_REPORT_EXAMPLES = """
Examples:

    fullshard report runs/books                        writes runs/books/report.html and trace.json

    fullshard report runs/books --json                 print the numbers instead

    fullshard report my_traces --out page.html         traces that `fullshard.trace` wrote

The page needs no network. Where a run was not traced, it says how to record a trace.

Exit codes: 0 written, 2 nothing to report on, or a file that cannot be read.
"""

app = typer.Typer(
    name="fullshard",
    help="Train models larger than one device by sharding them over ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEFAULT = TrainConfig()


@app.callback()
def _commands() -> None:
    """Train models larger than one device by sharding them over ranks."""


def _option(help_text: str, *, panel: str) -> Any:
    return typer.Option(help=help_text, rich_help_panel=panel)


def _flag(name: str, help_text: str, *, panel: str) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=panel)


@app.command(epilog=_EXAMPLES)
def train(
    context: typer.Context,
    more_data: Annotated[
        list[str] | None, typer.Argument(help="More text, as after --data.", metavar="[TEXT]...")
    ] = None,
    data: Annotated[
        list[str] | None,
        _option("File or folder of text; may repeat. Default: Python's own library.", panel="Text"),
    ] = None,
    seq: Annotated[int, _option("Bytes in a sequence.", panel="Text")] = _DEFAULT.seq,
    model: Annotated[
        str, _option("Size: tiny, 10m, 35m, 125m, 350m, 1b, 8b.", panel="Model")
    ] = _DEFAULT.model,
    tie_embeddings: Annotated[
        bool, _flag("--tie-embeddings", "Embedding and head share a weight.", panel="Model")
    ] = _DEFAULT.tie_embeddings,
    activation_checkpointing: Annotated[
        bool,
        _flag("--activation-checkpointing", "Recompute layers in the backward.", panel="Model"),
    ] = _DEFAULT.activation_checkpointing,
    ranks: Annotated[
        int | None, _option("Local ranks. Default: one per GPU, else 2.", panel="Devices")
    ] = None,
    device: Annotated[str, _option("auto, cpu or cuda.", panel="Devices")] = "auto",
    dtype: Annotated[
        str,
        _option(
            "auto, fp32, or bf16 (reduced in fp32). auto: bf16 on GPU, fp32 on CPU.",
            panel="Devices",
        ),
    ] = "auto",
    steps: Annotated[int, _option("Optimizer steps in all.", panel="Training")] = _DEFAULT.steps,
    batch: Annotated[
        int, _option("Sequences per rank and forward.", panel="Training")
    ] = _DEFAULT.batch,
    grad_accum: Annotated[
        int,
        _option(
            "Forwards and backwards per step, each reduced, so that gradients stay sharded.",
            panel="Training",
        ),
    ] = _DEFAULT.grad_accum,
    lr: Annotated[float, _option("Highest learning rate.", panel="Training")] = _DEFAULT.lr,
    min_lr: Annotated[
        float, _option("Learning rate at the last step.", panel="Training")
    ] = _DEFAULT.min_lr,
    warmup: Annotated[
        int, _option("Steps of linear rise before the cosine.", panel="Training")
    ] = _DEFAULT.warmup,
    weight_decay: Annotated[
        float, _option("AdamW weight decay of matrices.", panel="Training")
    ] = _DEFAULT.weight_decay,
    clip: Annotated[
        float, _option("Largest global gradient norm; 0 for no limit.", panel="Training")
    ] = _DEFAULT.clip,
    seed: Annotated[
        int, _option("Decides weights, text and sample.", panel="Training")
    ] = _DEFAULT.seed,
    out: Annotated[
        Path | None, _option("Run folder. Default: runs/ and the time.", panel="Results")
    ] = None,
    resume: Annotated[
        Path | None,
        _option("Continue the run in this folder, with its options.", panel="Results"),
    ] = None,
    save_every: Annotated[
        int, _option("Steps between checkpoints; 0: only at the end.", panel="Results")
    ] = _DEFAULT.save_every,
    prompt: Annotated[
        str, _option("Beginning of the text sample.", panel="Results")
    ] = _DEFAULT.prompt,
    sample_length: Annotated[
        int, _option("Bytes to generate at the end; 0 for none.", panel="Results")
    ] = _DEFAULT.sample_length,
    temperature: Annotated[
        float, _option("Of the sample; 0 takes the likeliest byte.", panel="Results")
    ] = _DEFAULT.temperature,
    trace_steps: Annotated[
        int, _option("Steps to record for the report; 0 for none.", panel="Results")
    ] = _DEFAULT.trace_steps,
    as_json: Annotated[
        bool, _flag("--json", "Print the summary as one JSON object.", panel="Results")
    ] = False,
) -> None:
    """Train a language model whose parameters are sharded over all ranks.

    Starts one rank per GPU, or two on the CPU; under torchrun it is one of torchrun's ranks.
    Ctrl-C or SIGTERM saves and stops; --resume continues exactly there.
    """
    typed = {name for name in context.params if _was_typed(context, name)}
    options = {k: v for k, v in context.params.items() if k in TrainConfig.__dataclass_fields__}
    options["data"] = (*(data or ()), *(more_data or ()))
    if more_data:
        typed.add("data")
    place = _place(os.environ)
    try:
        if resume is not None and out is not None and resume != out:
            raise OptionError(
                f"--resume {resume} and --out {out}: a resumed run stays in its folder; leave out "
                "--out."
            )
        if place is not None and options["ranks"] is None:
            options["ranks"] = place.num_ranks
        if resume is not None:
            changes = {k: options[k] for k in typed & options.keys()}
            if place is not None:
                changes["ranks"] = place.num_ranks
            job = resumed_job(resume, changes)
        else:
            job = new_job(options, out or _default_out())
        if place is None:
            _finish(_launch(job), job)
        _check_place(job.config, place)
    except OptionError as error:
        _refuse(error, quiet=place is not None and place.local_rank != 0)
    raise typer.Exit(run_worker(job, place, threads=_threads(place), as_json=as_json))


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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model wrapped with FullyShardedDataParallel would be with fully_shard.

    Runs FUNCTION in this process, on a Gloo group of one rank unless importing MODULE or torchrun
    makes another; FUNCTION must not make one. Prints every instance, every argument and the code.
    """
    # The report says it itself, once.
    warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`")
    place = _place(os.environ)
    is_first = place is None or place.rank == 0
    try:
        report = report_on(target, under_torchrun=place is not None)
    except OptionError as error:
        _refuse(error, quiet=not is_first, command="migrate-report")
    except StateError as error:
        if is_first:
            print(f"fullshard migrate-report: {target}: {error}", file=sys.stderr)
        raise typer.Exit(Exit.FAILED) from error
    if is_first:
        print(json.dumps(report.as_dict(), indent=2) if as_json else report)


@app.command(epilog=_REPORT_EXAMPLES)
def report(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or a folder of traces.", metavar="RUN")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page. Default: report.html in RUN.", metavar="FILE")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the numbers as one JSON object, write nothing.")
    ] = False,
) -> None:
    """Write one HTML page on a run: timelines, exposed communication, memory, loss, tokens/s.

    trace.json beside it holds the same timelines for chrome://tracing and Perfetto.
    """
    try:
        if as_json:
            print(json.dumps(metrics_of(run), indent=2))
            return
        written = write_report(run, out)
    except (OptionError, TraceError) as error:
        _refuse(error, quiet=False, command="report")
    for path in written:
        print(path)


def _was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given, even with its default value."""
    source = context.get_parameter_source(name)
    # By name: typer carries click inside from 0.25 on, so its enum has two homes.
    return source is not None and source.name == "COMMANDLINE"


def _launch(job: Job) -> Ending:
    ranks = job.config.ranks
    check_local_ranks(job.config, ranks)
    job.folder.summary_file.unlink(missing_ok=True)
    # The ranks parse the same line; --out comes first, because its default holds the time.
    arguments = ["train", "--out", str(job.folder.path), *sys.argv[2:]]
    print(
        f"starting {ranks} {job.config.device} rank{'s' if ranks > 1 else ''}; results go to "
        f"{job.folder.path}",
        file=sys.stderr,
    )
    return launch(arguments, ranks=ranks, threads=_threads_for(ranks, os.environ))


def _finish(ending: Ending, job: Job) -> NoReturn:
    """Add the launcher's own sentence to what the ranks said, and exit."""
    summary = job.folder.read_summary()
    code = ending.code
    if code in (Exit.OK, Exit.STOPPED):
        # What the folder says counts: a signal may come when the last step is already done, or
        # before the first.
        statuses = {"finished": Exit.OK, "stopped": Exit.STOPPED}
        code = statuses.get(summary["status"], Exit.FAILED) if summary else Exit.FAILED
        if summary is None:
            print("fullshard: stopped before the first step; nothing to save.", file=sys.stderr)
    if ending.message:
        print(f"fullshard: {ending.message}", file=sys.stderr)
    raise typer.Exit(code)


def _refuse(error: OptionError | TraceError, *, quiet: bool, command: str = "train") -> NoReturn:
    if not quiet:
        for line in str(error).splitlines():
            print(f"fullshard {command}: {line}", file=sys.stderr)
        print(f"Options: fullshard {command} --help", file=sys.stderr)
    raise typer.Exit(Exit.USAGE)


def _place(environment: Mapping[str, str]) -> Place | None:
    """Read what torchrun tells its ranks, or None in a process it did not start."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    num_ranks = int(environment["WORLD_SIZE"])
    launcher = environment.get(LAUNCHER_PID)
    return Place(
        rank=int(environment["RANK"]),
        num_ranks=num_ranks,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        num_local_ranks=int(environment.get("LOCAL_WORLD_SIZE", num_ranks)),
        master_host=environment["MASTER_ADDR"],
        launcher_pid=int(launcher) if launcher else None,
    )


def _check_place(config: TrainConfig, place: Place) -> None:
    if config.ranks != place.num_ranks:
        raise OptionError(
            f"--ranks {config.ranks}: torchrun has started {place.num_ranks} ranks. Leave --ranks "
            "out under torchrun."
        )
    check_local_ranks(config, place.num_local_ranks)


def _threads(place: Place) -> int:
    return _threads_for(place.num_local_ranks, os.environ)


def _threads_for(ranks: int, environment: Mapping[str, str]) -> int:
    """Share this machine's cores among its ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" in environment:
        return max(1, int(environment["OMP_NUM_THREADS"]))
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    return max(1, cores // ranks)


def _default_out() -> Path:
    """Name a new run's folder by its start: runs/20250131-174502."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S")


def main() -> None:
    app()
