"""What each command of `fullshard` does, once it is known what was typed.

Each returns its exit code, after it has said on standard error what went wrong. The environment is
given, not read.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import fullshard
from fullshard.errors import CheckpointError, FullshardError, MisuseError, StateError
from fullshard.local_ranks import LAUNCHER_PID, threads_for
from fullshard.plan.trace import TraceError
from fullshard.tools.config import DEFAULT_CACHE, OptionError, TrainConfig
from fullshard.tools.exits import Exit
from fullshard.tools.job import (
    Job,
    NothingLeftError,
    check_local_ranks,
    default_local_ranks,
    new_job,
    restarted_job,
    resumed_job,
)
from fullshard.tools.json_text import json_text
from fullshard.tools.launch import Ending, Place, launch
from fullshard.tools.report import compare, metrics_of, write_comparison, write_report
from fullshard.tools.slurm import variables_of_rank

if TYPE_CHECKING:
    from torch import nn


class Typed(NamedTuple):
    """A command line of `fullshard train`: options that were given, typed or in a file, and its words."""

    given: dict[str, Any]
    words: Sequence[str]
    out: Path | None
    resume: Path | None
    auto_resume: bool = False
    cache: Path = DEFAULT_CACHE


def train(typed: Typed, environment: Mapping[str, str], *, as_json: bool) -> Exit:
    """Start this machine's ranks, or be one of those that torchrun or srun has started."""
    place = None
    try:
        place = _place(environment)
        job = _job(typed, place)
        if place is None:
            check_local_ranks(job.config.device, job.config.ranks)
            return _finish(_launch(job, typed, environment), job)
        _check_place(job.config, place)
    except NothingLeftError as error:
        if not typed.auto_resume:
            return _refuse(error, quiet=place is not None and place.local_rank != 0)
        if place is None or place.rank == 0:
            print(f"{typed.out}: the run has finished; nothing is left to do.", file=sys.stderr)
        return Exit.OK
    except OptionError as error:
        return _refuse(error, quiet=place is not None and place.local_rank != 0)
    from fullshard.tools.worker import run_worker  # the engine, which a launcher does not need

    threads = threads_for(place.num_local_ranks, environment)
    return run_worker(job, place, threads=threads, as_json=as_json)


def migrate_report(target: str, environment: Mapping[str, str], *, as_json: bool) -> Exit:
    """Print what the model that MODULE:FUNCTION returns would be with `fully_shard`."""
    look = fullshard.migrate_report
    return _look_at_model("migrate-report", target, environment, look, as_json=as_json)


def replay(
    folder: Path, target: str, environment: Mapping[str, str], *, rank: int | None, as_json: bool
) -> Exit:
    """Replay a recorded step with the model that MODULE:FUNCTION returns, and print what differs first."""

    def look(model: "nn.Module") -> fullshard.Replay:
        return fullshard.replay(folder, model, rank=rank)

    unusable = (OptionError, MisuseError)  # a rank that was not recorded
    return _look_at_model("replay", target, environment, look, unusable=unusable, as_json=as_json)


def _look_at_model(
    command: str,
    target: str,
    environment: Mapping[str, str],
    look: Callable[["nn.Module"], "fullshard.MigrationReport | fullshard.Replay"],
    *,
    unusable: tuple[type[FullshardError], ...] = (OptionError,),
    as_json: bool,
) -> Exit:
    """Build the model that MODULE:FUNCTION returns, and print what is found in it.

    unusable: what is raised for options that cannot work.
    """
    from fullshard.tools.user_model import built_model  # the engine, as above

    is_first = True
    try:
        place = _place(environment)
        is_first = place is None or place.rank == 0
        with built_model(target, place, on_cpu=command == "migrate-report") as model:
            found = look(model)
    except unusable as error:
        return _refuse(error, quiet=not is_first, command=command)
    except StateError as error:
        if is_first:
            print(f"fullshard {command}: {target}: {error}", file=sys.stderr)
        return Exit.FAILED
    if is_first:
        print(json_text(found.as_dict(), indent=2) if as_json else found)
    return Exit.FAILED if isinstance(found, fullshard.Replay) and not found.is_equal else Exit.OK


def report(runs: Sequence[Path], out: Path | None, *, as_json: bool) -> Exit:
    """Write the page on a run, or on several beside each other, and say where; or print the numbers."""
    try:
        if as_json:
            found = compare(runs) if len(runs) > 1 else metrics_of(runs[0])
            print(json_text(found, indent=2))
            return Exit.OK
        if len(runs) > 1:
            print(write_comparison(runs, out or Path("comparison.html")))
            return Exit.OK
        written = write_report(runs[0], out)
    except (OptionError, TraceError) as error:
        return _refuse(error, quiet=False, command="report")
    print(written.page)
    if written.trace is not None:
        print(written.trace)
    return Exit.OK


def export(
    run: Path, out: Path, *, dtype: str | None, max_shard_size: str, overwrite: bool, as_json: bool
) -> Exit:
    """Write a run's weights for Transformers, and say where."""
    from fullshard.tools.progress import Copying
    from fullshard.tools.text.tokenizer import FILE as TOKENIZER
    from fullshard.tools.weights import export_run

    try:
        with Copying("exporting") as bar:
            checkpoint, exported = export_run(
                run,
                out,
                dtype=dtype,
                max_shard_size=max_shard_size,
                overwrite=overwrite,
                progress=bar.update,
            )
    except OptionError as error:
        return _refuse(error, quiet=False, command="export")
    except CheckpointError as error:
        print(f"fullshard export: {error}", file=sys.stderr)
        return Exit.FAILED
    has_tokenizer = (out / TOKENIZER).is_file()
    if as_json:
        fields: dict[str, Any] = {"checkpoint": str(checkpoint), "out": str(exported.path)}
        fields |= {"files": list(exported.files), "nbytes": exported.nbytes}
        print(json.dumps(fields | {"num_tensors": exported.num_tensors}))
    else:
        beside = "with its tokenizer" if has_tokenizer else "no tokenizer, as tokens are bytes"
        print(f"{exported.path}: {exported.num_tensors} tensors of {checkpoint}; {beside}")
    return Exit.OK


def doctor(
    ranks: int | None,
    environment: Mapping[str, str],
    words: Sequence[str],
    *,
    timeout_s: float,
    as_json: bool,
) -> Exit:
    """Examine this machine and what ranks do on it, or be one of the ranks that torchrun started."""
    place = None
    try:
        place = _place(environment)
        if place is not None and ranks not in (None, place.num_ranks):
            raise OptionError(
                f"--ranks {ranks}: {place.started_by} has started {place.num_ranks} ranks. Leave --ranks out."
            )
    except OptionError as error:
        return _refuse(error, quiet=place is not None and place.local_rank != 0, command="doctor")
    from fullshard.tools.doctor.rank import report_without_ranks, run_rank  # imports the engine

    if place is not None:
        return run_rank(place, environment, timeout_s=timeout_s, as_json=as_json)
    ranks = ranks or default_local_ranks()
    print(f"starting {ranks} rank{'s' if ranks > 1 else ''} ...", file=sys.stderr)
    threads = threads_for(ranks, environment)
    try:
        ending = launch(["doctor", *words], ranks=ranks, threads=threads)
    except (OSError, RuntimeError) as error:  # too few files or processes, or too little memory
        reason = str(error)
    else:
        if ending.message:
            print(f"fullshard doctor: {ending.message}", file=sys.stderr)
        return ending.code
    gc.collect()  # closes what the launcher had open when it failed
    place = Place(0, ranks, 0, ranks, "127.0.0.1", 0, None)
    return report_without_ranks(reason, place, environment, as_json=as_json)


def verify(
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    words: Sequence[str],
    *,
    keep: Path | None,
    is_whole: bool,
    as_json: bool,
) -> Exit:
    """Compare a sharded model or script with a whole one, or be one of the ranks that this has started.

    given: fields of `VerifyOptions`. keep: a folder for the records; the ranks are always given one.
    is_whole: of a rank that runs a script, whether nothing is to be sharded.
    """
    from fullshard.tools.verify.options import VerifyOptions

    place = None
    try:
        place = _place(environment)
        options = VerifyOptions(**given)
        if place is not None and (place.launcher_pid is None or keep is None):
            raise OptionError(f"verify starts its ranks itself. Run it without {place.started_by}.")
        check_local_ranks(options.device, options.ranks)
        threads = threads_for(options.ranks, environment)
        if place is not None and keep is not None:
            from fullshard.tools.verify.rank import run_rank  # the engine, as above

            return run_rank(options, place, keep, is_whole=is_whole, threads=threads)
        from fullshard.tools.verify.running import verify as verify_all

        return verify_all(options, words, keep, threads=threads, as_json=as_json)
    except OptionError as error:
        return _refuse(error, quiet=place is not None and place.rank != 0, command="verify")


def _job(typed: Typed, place: Place | None) -> Job:
    out, resume = typed.out, typed.resume
    if resume is not None and out is not None and resume != out:
        raise OptionError(
            f"--resume {resume} and --out {out}: a resumed run stays in its folder; leave out --out."
        )
    options = changes = typed.given
    if place is not None:
        options = {"ranks": place.num_ranks, **options}
        changes = {**changes, "ranks": place.num_ranks}
    if typed.auto_resume:
        if resume is not None or out is None:
            raise OptionError(
                "--auto-resume: continues the run in --out, or begins it there. Name the folder with --out, "
                "and leave out --resume."
            )
        return restarted_job(options, out, changes, cache=typed.cache)
    if resume is None:
        return new_job(options, out or _default_out(), cache=typed.cache)
    return resumed_job(resume, changes, cache=typed.cache)


def _launch(job: Job, typed: Typed, environment: Mapping[str, str]) -> Ending:
    ranks = job.config.ranks
    job.folder.summary_file.unlink(missing_ok=True)
    # The ranks parse the same line, and would take another time for the default of --out.
    out = () if typed.out or typed.resume else ("--out", str(job.folder.path))
    arguments = ["train", *typed.words, *out]
    print(
        f"starting {ranks} {job.config.device} rank{'s' if ranks > 1 else ''}; results go to "
        f"{job.folder.path}",
        file=sys.stderr,
    )
    return launch(arguments, ranks=ranks, threads=threads_for(ranks, environment))


def _finish(ending: Ending, job: Job) -> Exit:
    """Add the launcher's own sentence to what the ranks said, and return the exit code."""
    summary = job.folder.read_summary()
    code = ending.code
    if code in (Exit.OK, Exit.STOPPED):
        # What the folder says counts: a signal may come when the last step is already done, or
        # before the first.
        statuses = {"finished": Exit.OK, "stopped": Exit.STOPPED}
        code = statuses.get(summary["status"], Exit.FAILED) if summary else Exit.FAILED
        if summary is None:
            print(f"fullshard: {_what_is_lost(job)}", file=sys.stderr)
    if ending.message:
        print(f"fullshard: {ending.message}", file=sys.stderr)
    return code


def _what_is_lost(job: Job) -> str:
    """Say what ranks that were asked to stop have left without an end of their own."""
    metrics = job.folder.metrics()
    if not metrics or metrics[-1]["step"] <= job.done:
        return "stopped before the first step; nothing to save."
    return (
        f"the ranks were ended after step {metrics[-1]['step']}, before they had saved it. If there is a "
        f"checkpoint, the run goes on from it with: {job.folder.to_resume}"
    )


def _refuse(error: FullshardError, *, quiet: bool, command: str = "train") -> Exit:
    if not quiet:
        for line in str(error).splitlines():
            print(f"fullshard {command}: {line}", file=sys.stderr)
        print(f"Options: fullshard {command} --help", file=sys.stderr)
    return Exit.USAGE


def _place(environment: Mapping[str, str]) -> Place | None:
    """Read what torchrun or srun tells ranks, or None in a process that is to start its own.

    Raises OptionError for Slurm's variables in disorder.
    """
    started_by = "torchrun"
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        variables = variables_of_rank(environment)
        if variables is None:
            return None
        for name, value in variables.items():  # torch reads them too, to join the other ranks
            os.environ[name] = value
        environment = {**environment, **variables}
        started_by = "srun"
    num_ranks = int(environment["WORLD_SIZE"])
    launcher = environment.get(LAUNCHER_PID)
    return Place(
        rank=int(environment["RANK"]),
        num_ranks=num_ranks,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        num_local_ranks=int(environment.get("LOCAL_WORLD_SIZE", num_ranks)),
        master_host=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        launcher_pid=int(launcher) if launcher else None,
        started_by=started_by,
    )


def _check_place(config: TrainConfig, place: Place) -> None:
    if config.ranks != place.num_ranks:
        raise OptionError(
            f"--ranks {config.ranks}: {place.started_by} has started {place.num_ranks} ranks. Leave "
            f"--ranks out under {place.started_by}."
        )
    try:
        check_local_ranks(config.device, place.num_local_ranks)
    except OptionError as error:
        if place.started_by != "srun":
            raise
        raise OptionError(
            f"{error} Each of srun's tasks has to see the GPUs of all tasks on its host: ask for them with "
            "--gpus-per-node, without --gpus-per-task and --gpu-bind."
        ) from error


def _default_out() -> Path:
    """Name a new run's folder by its start: runs/20250131-174502."""
    return Path("runs") / time.strftime("%Y%m%d-%H%M%S")
