"""The `fullshard` command: its commands. Of the tools, what can be typed alone reads the environment.

What a command needs is imported when it runs: torch takes seconds, and `--help` has no use for it.
"""

import contextlib
import errno
import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from fullshard.errors import CheckpointError
from fullshard.json_files import json_text
from fullshard.tools import checking_cli
from fullshard.tools.checkpoint_cli import app as checkpoint_app
from fullshard.tools.cli_options import App, argument, flag, option, refuse
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.launch_cli import LAUNCH_EXAMPLES, launch
from fullshard.tools.plan_cli import PLAN_EXAMPLES, plan
from fullshard.tools.train_cli import TRAIN_EXAMPLES, TrainCommand, train
from fullshard.versions import installed

_MIGRATE_EXAMPLES = """
Examples, with a function that returns the wrapped model in my_package/train.py:

    fullshard migrate-report my_package.train:build_model
    torchrun --nproc-per-node 2 -m fullshard migrate-report my_package.train:build_model --json

One rank alone makes every sharding strategy NO_SHARD; under torchrun the report knows which it is.

Exit codes: 0 reported, 1 the function failed or wraps nothing, 2 no such function.
"""

_REPORT_EXAMPLES = """
Examples:

    fullshard report runs/books                 # writes a page and trace.json
    fullshard report runs/books --follow        # a page that follows the run
    fullshard report runs/books --md            # for an issue or pull request
    fullshard report runs/books --json          # for programs
    fullshard report runs/books runs/again      # compares runs with the first
    fullshard report my_traces --out page.html  # traces of fullshard.trace

The page needs no network. Where a run was not traced, it says how to record a trace.

Exit codes: 0 written, 2 nothing to report on, or a file that cannot be read.
"""

_EXPORT_EXAMPLES = """
Examples:

    fullshard export runs/books --hf exports/books  # the newest checkpoint
    fullshard export runs/books/checkpoints/step-00000200 --hf exports/early --dtype bf16
    fullshard train --finetune exports/books --data letters/  # train on from it

In Python: `AutoModelForCausalLM.from_pretrained("exports/books")` of Transformers, and AutoTokenizer likewise. Of a run without --tokenizer tokens are bytes: `list(text.encode())`.

Exit codes: 0 written, 1 it cannot be written, or the checkpoint is damaged, 2 unusable options, or no run.
"""

_DOCTOR_EXAMPLES = """
Examples:

    fullshard doctor                     # this machine, with ranks of its own
    fullshard doctor --ranks 4 --json    # one JSON object: verdict, findings, facts
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m fullshard doctor

Under torchrun (or whatever else sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) it examines the ranks that were started, and rank 0 reports. torchrun itself waits for all hosts first; `--rdzv-conf join_timeout=60` bounds that.

Exit codes: 0 nothing worse than a warning, 1 a problem was found, 2 unusable options or missing packages, 3 a rank died.
"""

app = App(
    name="fullshard",
    help="Train models larger than one device by sharding them over ranks.",
    context_settings={"help_option_names": ["--help", "-h"]},  # of every command
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
        option(
            "Print the version and exit.", None, "--version", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train models larger than one device by sharding them over ranks."""


app.command(epilog=TRAIN_EXAMPLES, cls=TrainCommand)(train)


@app.command(epilog=_DOCTOR_EXAMPLES)
def doctor(
    ranks: Annotated[
        int | None, option("Local ranks. Default: one per GPU, else 2.", "N", least=1)
    ] = None,
    timeout: Annotated[
        float,
        option("Seconds to wait for other ranks, and for each thing tried.", "SECONDS", least=1),
    ] = 60.0,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Examine machines and ranks, and say what to do about what is found.

    Versions, packages, devices, limits, environment; whether ranks reach each other over Gloo, NCCL
    and shared memory, and how fast; clocks of hosts. It starts ranks and ends them; it changes nothing.
    """
    from fullshard.local_ranks import threads_for
    from fullshard.tools.doctor.rank import report_without_ranks, run_rank
    from fullshard.tools.job import default_local_ranks
    from fullshard.tools.launch import Place, launch, place_in

    place = None
    try:
        place = place_in(os.environ)
        if place is not None and ranks not in (None, place.num_ranks):
            raise OptionError(
                f"--ranks {ranks}: {place.started_by} has started {place.num_ranks} ranks. Leave --ranks out."
            )
    except OptionError as error:
        if place is None or place.local_rank == 0:
            refuse("doctor", error)
        raise typer.Exit(Exit.USAGE) from None
    if place is not None:
        raise typer.Exit(run_rank(place, os.environ, timeout_s=timeout, as_json=as_json))
    ranks = ranks or default_local_ranks()
    print(f"starting {ranks} rank{'s' if ranks > 1 else ''} ...", file=sys.stderr)
    threads = threads_for(ranks, os.environ)
    try:
        ending = launch(["doctor", *sys.argv[2:]], ranks=ranks, threads=threads)
    except (OSError, RuntimeError) as error:  # too few files or processes, or too little memory
        reason = str(error)
    else:
        if ending.message:
            print(f"fullshard doctor: {ending.message}", file=sys.stderr)
        raise typer.Exit(ending.code)
    gc.collect()  # closes what the launcher had open when it failed
    place = Place(0, ranks, 0, ranks, "127.0.0.1", 0, None)
    raise typer.Exit(report_without_ranks(reason, place, os.environ, as_json=as_json))


_AS_TYPED = {"ignore_unknown_options": True}
app.command(add_help_option=False, context_settings=_AS_TYPED, cls=checking_cli.RunCommand)(
    checking_cli.run
)
app.command(epilog=checking_cli.COMPARE_EXAMPLES, cls=checking_cli.ProgramCommand)(
    checking_cli.compare
)
app.command(epilog=checking_cli.VERIFY_EXAMPLES)(checking_cli.verify)
app.command(epilog=checking_cli.REPLAY_EXAMPLES)(checking_cli.replay)
app.command(epilog=LAUNCH_EXAMPLES)(launch)
app.command(epilog=PLAN_EXAMPLES)(plan)


@app.command(epilog=_MIGRATE_EXAMPLES)
def migrate_report(
    target: Annotated[
        str,
        argument(
            "A function without arguments that returns a model wrapped with "
            "FullyShardedDataParallel, PyTorch's or fullshard's.",
            "MODULE:FUNCTION",
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
    import fullshard
    from fullshard.tools.user_model import look_at_model

    look = fullshard.migrate_report
    code = look_at_model("migrate-report", target, os.environ, look, as_json=as_json)
    raise typer.Exit(code)


@app.command(epilog=_REPORT_EXAMPLES)
def report(
    runs: Annotated[
        list[Path], argument("A run folder, or a folder of traces; several are compared.", "RUN...")
    ],
    out: Annotated[
        Path | None,
        option("The page. Default: report.html in RUN; of several, comparison.html here.", "FILE"),
    ] = None,
    as_json: Annotated[
        bool, flag("--json", "Print the numbers as one JSON object, write nothing.")
    ] = False,
    as_markdown: Annotated[
        bool, flag("--md", "Print Markdown for an issue, write nothing.")
    ] = False,
    follow: Annotated[
        bool, flag("--follow", "Write the page every few seconds until the run has ended.")
    ] = False,
) -> None:
    """Write one HTML page on a run: what to do about it, where time and memory go, loss, speed.

    trace.json beside it holds the same timelines for chrome://tracing and Perfetto. Of several runs
    the page compares figures, curves and options.
    """
    from fullshard.plan.trace import TraceError
    from fullshard.tools import report as tool

    several = len(runs) > 1
    try:
        if follow and (several or as_json or as_markdown):
            raise OptionError("--follow: writes the page of one run; leave out the others.")
        if as_json and as_markdown:
            raise OptionError("--json and --md: leave one of them out.")
        if as_json:
            print(json_text(tool.compare(runs) if several else tool.metrics_of(runs[0]), indent=2))
        elif as_markdown:
            print(tool.markdown(runs))
        elif several:
            page = tool.write_comparison(runs, out or Path("comparison.html"))
            print(*tool.comparison_lines(runs), page.resolve().as_uri(), sep="\n")
        else:
            with contextlib.suppress(KeyboardInterrupt):
                written = tool.follow(runs[0], out) if follow else tool.write_report(runs[0], out)
                print(*tool.result_lines(runs[0]), written.page.resolve().as_uri(), sep="\n")
    except (OptionError, TraceError) as error:
        raise refuse("report", error) from None


@app.command(epilog=_EXPORT_EXAMPLES)
def export(
    run: Annotated[Path, argument("A run folder, or a checkpoint in one.", "RUN")],
    hf: Annotated[Path, option("The folder to write, for Transformers.", "DIR", "--hf")],
    dtype: Annotated[
        str | None, option("Of the weights. Default: as saved, fp32.", "fp32|bf16|fp16")
    ] = None,
    max_shard_size: Annotated[str, option("Largest size of a file.", "SIZE")] = "5GB",
    overwrite: Annotated[bool, flag("--overwrite", "Replace an export that is there.")] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> None:
    """Write the weights of a run as a folder that Transformers loads, with its tokenizer if it has one.

    Reads the checkpoint's files, piece by piece: no ranks are started, and no model is built.
    """
    from fullshard.tools.progress import counting
    from fullshard.tools.text.tokenizer import FILE as TOKENIZER
    from fullshard.tools.text.tokenizer import how_transformers_differs
    from fullshard.tools.weights import export_run

    try:
        with counting("exporting") as update:
            checkpoint, exported = export_run(
                run,
                hf,
                dtype=dtype,
                max_shard_size=max_shard_size,
                overwrite=overwrite,
                progress=update,
            )
    except OptionError as error:
        raise refuse("export", error) from None
    except CheckpointError as error:
        print(f"fullshard export: {error}", file=sys.stderr)
        raise typer.Exit(Exit.FAILED) from None
    has_tokenizer = (hf / TOKENIZER).is_file()
    if has_tokenizer and (warning := how_transformers_differs(hf)):
        print(warning, file=sys.stderr)
    if as_json:
        fields = {"checkpoint": str(checkpoint), "out": str(exported.path)}
        numbers = {"nbytes": exported.nbytes, "num_tensors": exported.num_tensors}
        print(json_text({**fields, "files": exported.files, **numbers}))
    else:
        beside = "with its tokenizer" if has_tokenizer else "no tokenizer, as tokens are bytes"
        print(f"{exported.path}: {exported.num_tensors} tensors of {checkpoint}; {beside}")


# Errors of writing, which no command lets through of a file that it was given.
_UNWRITABLE = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)


def main() -> None:
    try:
        if sys.stdout is None:  # closed, so that what is opened next would be in its place
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        try:
            app(prog_name="fullshard")
        finally:
            sys.stdout.flush()  # at Python's end nobody could catch what it raises
    except BrokenPipeError:
        # Nobody reads on, as in `fullshard ... | head`; rich and typer end so as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.FAILED)
    except OSError as error:
        if error.errno in _UNWRITABLE and error.filename is None:
            with contextlib.suppress(OSError):
                print(
                    f"fullshard: standard output cannot be written: {error.strerror}.",
                    file=sys.stderr,
                )
            sys.stdout = None  # at its end Python would try again
            sys.exit(Exit.UNWRITABLE)
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        print(f"fullshard: {str(error.filename)[:80]!r}: {error.strerror}.", file=sys.stderr)
        sys.exit(Exit.USAGE)
