"""The command `fullshard plan`: what training will need and take, before there is a machine."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from fullshard.errors import FullshardError
from fullshard.json_files import json_text
from fullshard.tools.cli_options import flag, refuse, takes
from fullshard.tools.config import OptionError, check_file
from fullshard.tools.exits import Exit
from fullshard.tools.plan_options import PlanOptions
from fullshard.tools.progress import counting, say_starting

if TYPE_CHECKING:
    from fullshard.planning.search import SearchResult
    from fullshard.planning.training import TrainingPlan

PLAN_EXAMPLES = """
Examples; MODEL is a size of fullshard train, a function that returns a model (built without memory), the config.json of a model of Transformers, or a run of fullshard train with its options:

    fullshard plan 8b --gpu H100-80GB-SXM --ranks 64 --batch 2 --seq 4096
    fullshard plan my_package.train:build --gpu A100-80GB-SXM --hosts 2 --checkpointing full
    fullshard plan downloads/llama --gpu H200-141GB-SXM --ranks 256 --shard-size 8 --json
    fullshard plan --shape layers=80,hidden=8192,heads=64,vocab=256 --gpu B200 --ranks 1024
    fullshard plan 1b --ranks 8 --flops 400TFLOP/s --memory 62GiB --memory-bandwidth 2TB/s --link 300GB/s
    fullshard plan 8b --gpu H100-80GB-SXM --ranks 64 --page plan.html  # a page that needs no network
    fullshard plan runs/books --gpu H100-80GB-SXM --out runs/books/plan.json  # of a run; then: fullshard report runs/books
    fullshard plan 8b --gpu H100-80GB-SXM --ranks 64 --batch 8 --search --page plan.html
    fullshard plan --runs runs.csv --out predictions.csv  # every row of a table of runs

Sizes are of one rank. No GPU and no ranks are needed, and nothing of the model's size is allocated, unless its way depends on values: then give them, by --example-input.

Exit codes: 0 it fits, 1 it does not fit into memory, 2 unusable options, or a model that cannot be planned.
"""


@takes(PlanOptions)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A size, MODULE:FUNCTION, a config.json or its folder, or a run of fullshard train.",
            metavar="MODEL",
        ),
    ] = "",
    *,
    runs: Annotated[
        Path | None,
        typer.Option(
            help="A table of runs in place of a model: predict each row. Needs --out.",
            rich_help_panel="Results",
            metavar="CSV",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The plan with its step as JSON: as plan.json in a run's folder it is in fullshard report. With --runs: "
            "the table. With --calibrate: the file of the machine.",
            rich_help_panel="Results",
            metavar="FILE",
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            help="A page to write, and trace.json beside it: the simulated timeline, memory, and what they go to.",
            rich_help_panel="Results",
            metavar="FILE",
        ),
    ] = None,
    search: Annotated[
        bool,
        flag(
            "--search",
            "Find the fastest ways to train that fit, with as many sequences a step, and print a program.",
            panel="Results",
        ),
    ] = False,
    calibrate: Annotated[
        bool,
        flag(
            "--calibrate",
            "Measure this machine with the model on CPU ranks (--ranks, else 2), in some 20 s, and plan for it. "
            "--out: a file for the figures. Later plans use them: --gpu this, or --gpu FILE.",
            panel="Machine",
        ),
    ] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.", panel="Results")] = False,
    **options: Any,
) -> None:
    """Say what training a model will need and take: memory of a rank, time of a step, and what to change first.

    From the engine's own layouts and schedule, run on the clocks of a machine that nobody has to have.
    """
    try:
        for path, option in ((out, "--out"), (page, "--page")):
            if path is not None:
                check_file(path, option)
        if runs is not None:
            unset = {field.name: field.default for field in dataclasses.fields(PlanOptions)}
            others = any(value != unset[name] for name, value in options.items())
            _predict(
                runs, out, is_alone=not (model or page or calibrate or search or as_json or others)
            )
            return
        chosen = PlanOptions(model=model, **options)
        if search:
            _check_searched(chosen)
        if calibrate:
            from fullshard.tools.calibrate import calibrate as measured  # torch

            say_starting()
            chosen = dataclasses.replace(chosen, gpu=str(measured(chosen, out)))
            out = None
        with Console(stderr=True).status("starting ...") as status:  # on a terminal
            made = (_searched if search else _planned)(chosen, status.update)
        _write(made, out, page)
    except FullshardError as error:
        raise refuse("plan", error) from None
    if made.printed is not None:
        print(json_text(made.printed.as_dict(), indent=2) if as_json else made.printed)
    if page is not None and made.plan is not None and not as_json:
        print(page.resolve().as_uri())
    if not made.fits:
        raise typer.Exit(Exit.FAILED)


class _Made(NamedTuple):
    """What is printed, whether it fits, and what a page shows: the plan of the options as typed, and what else was found."""

    printed: "TrainingPlan | SearchResult | None"
    fits: bool
    plan: "TrainingPlan | None" = None
    found: "SearchResult | None" = None


def _planned(options: PlanOptions, progress: Callable[[str], None]) -> _Made:
    """Plan what the options say. What the user's modules print goes to standard error."""
    from fullshard.planning.training import plan_training  # torch
    from fullshard.tools.plan_run import is_run, run_to_plan

    subject = None
    if is_run(options.model):
        subject, options = run_to_plan(options)
    setup = options.setup()
    progress("building the model ...")
    with contextlib.redirect_stdout(sys.stderr):
        made = plan_training(
            subject or options.subject(),
            setup,
            progress=lambda what: progress(f"planning: {what} ..."),
        )
    return _Made(made, made.memory.fits, made)


# What a search chooses.
_SEARCHED = (
    "reduce_last",
    "shard_size",
    "reshard",
    "unsharded",
    "keep_unsharded",
    "checkpointing",
    "offload",
)


def _check_searched(options: PlanOptions) -> None:
    """Raise OptionError for what a search chooses."""
    for field in dataclasses.fields(options):
        if field.name in _SEARCHED and getattr(options, field.name) != field.default:
            name = field.name.replace("_", "-")
            raise OptionError(f"--{name} with --search, which chooses it: leave one of them out.")


def _searched(options: PlanOptions, progress: Callable[[str], None]) -> _Made:
    """Search as the options say; say why if nothing fits."""
    setup = options.setup()
    from fullshard.planning.choices import NothingFitsError  # torch
    from fullshard.planning.search import search_training
    from fullshard.planning.training import planned

    progress("building the model ...")
    with contextlib.redirect_stdout(sys.stderr):
        subject = options.subject()
        try:
            found = search_training(subject, setup, progress=progress)
            return _Made(found, True, planned(subject, setup), found)
        except NothingFitsError as error:
            print(f"fullshard plan: {error}", file=sys.stderr)
            return _Made(None, False)


def _write(made: _Made, out: Path | None, page: Path | None) -> None:
    from fullshard.tools.plan_page import alternatives_of, write_plan, write_plan_page

    if made.plan is None:
        return
    if out is not None:
        write_plan(made.plan, out)
    if page is not None:
        write_plan_page(made.plan, page, alternatives_of(made.found) if made.found else ())


def _predict(runs: Path, out: Path | None, *, is_alone: bool) -> None:
    """Predict the rows of a table."""
    from fullshard.planning import published

    if out is None or not is_alone:
        raise OptionError(
            "--runs and --out belong together, and go with nothing else: what runs on what is said by the table."
        )
    with counting("predicting", "rows") as progress:
        found = published.predict_runs(runs, out, progress)
    print(found)
