"""`fullshard train`, once it is known what was typed. The environment is given, not read."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.local_ranks import threads_for
from fullshard.tools.cli_options import refuse
from fullshard.tools.config import DEFAULT_CACHE, OptionError, TrainConfig
from fullshard.tools.exits import Exit
from fullshard.tools.job import (
    Job,
    NothingLeftError,
    check_local_ranks,
    crowding,
    new_job,
    restarted_job,
    resumed_job,
    what_begins,
)
from fullshard.tools.launch import Ending, Place, launch, launch_forks, may_fork, place_in
from fullshard.tools.progress import before_first_step, say


class Typed(NamedTuple):
    """A command line of `fullshard train`: options that were given, typed or in a file, and its words."""

    given: dict[str, Any]
    words: Sequence[str]
    out: Path | None
    resume: Path | None
    auto_resume: bool = False
    cache: Path = DEFAULT_CACHE


def train(typed: Typed, environment: Mapping[str, str], *, as_json: bool) -> Exit:
    """Start this machine's ranks, or be one of those that torchrun or srun has started; say on standard error what went wrong."""
    place = None
    try:
        place = place_in(environment)
        job = _job(typed, place)
        notes = (what_begins(job), crowding(job.config, place.num_local_ranks if place else None))
        if place is None or (place.rank == 0 and place.launcher_pid is None):
            for note in filter(None, notes):
                say(note)
        if place is None:
            check_local_ranks(job.config.device, job.config.ranks)
            if (ending := _launch(job, typed, environment)) is not None:
                return _finish(ending, job)
            place = place_in(environment)  # of a fork
            assert place is not None
        _check_place(job.config, place)
    except NothingLeftError as error:
        if not typed.auto_resume:
            return _refuse(error, quiet=place is not None and place.local_rank != 0)
        if place is None or place.rank == 0:
            say(f"{typed.out}: the run has finished; nothing is left to do.")
        return Exit.OK
    except OptionError as error:
        return _refuse(error, quiet=place is not None and place.local_rank != 0)
    from fullshard.tools.worker import run_worker  # the engine, which a launcher does not need

    threads = threads_for(place.num_local_ranks, environment)
    return run_worker(job, place, threads=threads, as_json=as_json)


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
        begun = Path("runs", time.strftime("%Y%m%d-%H%M%S"))  # runs/20250131-174502
        return new_job(options, out or begun, cache=typed.cache)
    return resumed_job(resume, changes, cache=typed.cache)


def _launch(job: Job, typed: Typed, environment: Mapping[str, str]) -> Ending | None:
    """Run the ranks, as forks if that can be, and say how they ended; None in a fork, which is one of them."""
    ranks = job.config.ranks
    threads = threads_for(ranks, environment)
    job.folder.make()
    job.folder.summary_file.unlink(missing_ok=True)
    # The ranks parse the same line, and would take another time for the default of --out.
    out = () if typed.out or typed.resume else ("--out", str(job.folder.path))
    arguments = ["train", *typed.words, *out]
    say(
        f"starting {ranks} {job.config.device} rank{'s' if ranks > 1 else ''}; results go to "
        f"{job.folder.path}"
    )
    if not may_fork():
        return launch(arguments, ranks=ranks, threads=threads)
    from fullshard.tools.worker import import_all

    import_all()
    return launch_forks(ranks=ranks, threads=threads)


def _finish(ending: Ending, job: Job) -> Exit:
    """Add the launcher's own sentence to what the ranks said, and return the exit code."""
    summary = job.folder.read_summary()
    code = ending.code
    if code in (Exit.OK, Exit.STOPPED):
        # What the folder says counts: a signal may come when the last step is already done, or
        # before the first.
        statuses = {"finished": Exit.OK, "stopped": Exit.STOPPED}
        code = statuses.get(summary["status"], Exit.FAILED) if summary else Exit.FAILED
        if summary is None:  # they have left without an end of their own
            metrics = job.folder.metrics()
            if not metrics or metrics[-1]["step"] <= job.done:
                say(before_first_step(job.folder.path if job.done else None))
                code = Exit.INTERRUPTED
            else:
                say(
                    f"fullshard: the ranks were ended after step {metrics[-1]['step']}, before they had saved it. "
                    f"{job.folder.what_is_saved()}"
                )
    if ending.message:
        # The ranks that are left say what is saved, once they have joined and written the options.
        hint = "" if job.folder.config_file.exists() else f" {job.folder.what_is_saved()}"
        say(f"fullshard: {ending.message}{hint}")
    return code


def _refuse(error: OptionError, *, quiet: bool) -> Exit:
    if not quiet:
        refuse("train", error)
    return Exit.USAGE


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
