"""One rank as a process: joins the others, trains, and leaves in an orderly way.

    join -> signal handlers -> train -> barrier -> goodbye

A signal before the handlers are there ends the process at once, which is what a launcher wants
whose other ranks failed to start.
"""

import dataclasses
import errno
import math
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO, cast

import torch
import torch.distributed as dist
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

import fullshard
from fullshard.errors import CheckpointError, FullshardError, PeerLostError
from fullshard.json_files import json_text
from fullshard.local_ranks import die_with_launcher
from fullshard.models.blueprints import ConfiguredBlueprint
from fullshard.peers.diagnosis import RESTART
from fullshard.peers.stacks import folded_traceback
from fullshard.peers.store import store_in_time
from fullshard.peers.waits import announce, lost_ranks, naming_lost_ranks
from fullshard.peers.watchdog import watchdog
from fullshard.tools import progress
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.job import Job
from fullshard.tools.launch import Place, StopRequest, is_first_to_say, join_ranks, leave
from fullshard.tools.loggers import RunInfo
from fullshard.tools.report import write_report
from fullshard.tools.run_facts import gather_facts
from fullshard.tools.run_folder import RunFolder, program
from fullshard.tools.train import Trainer, TrainingError, peak_memory_nbytes
from fullshard.tools.weights import load_initial_weights

_SAMPLE_LINES = 3
_LOSS_STEPS = 20
_REQUEST_S = 0.5  # that a request to stop may take longer to one rank than the news that another one has ended by it


def import_all() -> None:
    """Import what ranks need, once for those that are forked. torch imports its compiler with the first optimizer."""
    torch.optim.SGD([torch.zeros(1, device="cpu")])


def run_worker(job: Job, place: Place, *, threads: int, as_json: bool) -> Exit:
    """Run one rank from start to end and return its exit code."""
    die_with_launcher(place.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while starting
    torch.set_num_threads(threads)
    sys.stdout = cast(TextIO, progress.Lasting(sys.stdout))
    sys.stderr = cast(TextIO, progress.Lasting(sys.stderr))
    with progress.reporting(rank=place.rank) as report:
        report.note(f"joining {place.num_ranks} rank{'s' if place.num_ranks > 1 else ''} ...")
        join_ranks(job.config.device, place.local_rank)
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        announce()
        stop = StopRequest(lambda request: _acknowledge(request, report))
        try:
            with naming_lost_ranks(world, "fullshard train"):
                summary = _train(job, stop, report)
                if place.rank == 0:
                    _show(summary, report, as_json=as_json)
                dist.barrier()  # nobody leaves while another still needs it
        except Exception as error:
            report.end()
            code = Exit.INTERRUPTED if _is_stopped(stop) else _complain(place, job.folder, error)
            watchdog().end()  # tells the others why
            leave(code)
    dist.destroy_process_group()
    return Exit.OK if summary["status"] == "finished" else Exit.STOPPED


def _acknowledge(request: StopRequest, report: progress.Reporter) -> None:
    """Say at once what comes of a request to stop; leave without saving if it is asked for by another Ctrl-C.

    Before all ranks are ready to save, nothing is certain: those that are not end by the request, and the others with
    them.
    """
    if request.again:
        if request.leads_to:
            report.note("stopping without saving")
        report.end()
        leave(Exit.FAILED)
    if not request.leads_to:
        return
    if request.asked == signal.SIGINT:
        report.note(f"{request.leads_to}; press Ctrl-C again to quit without saving")
    else:
        report.note(f"{signal.Signals(request.asked).name}: {request.leads_to}")


def _is_stopped(stop: StopRequest) -> bool:
    """Whether a rank fails because the job was asked to stop before all ranks were ready to save."""
    deadline = time.monotonic() + _REQUEST_S
    while not (stop.leads_to or stop.asked) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(stop.asked and not stop.leads_to)


def _complain(place: Place, folder: RunFolder, error: Exception) -> Exit:
    """Say why this rank ends, and return its exit code. Of another's death, one or two ranks of a host tell.

    What several ranks would say in the same words, as they do of what they have in common, one of them says.
    """
    if _is_loss(error):
        others = {*range(dist.get_world_size())} - {place.rank}
        if any(each.error for each in watchdog().board.last_words(others).values()):
            return Exit.RANK_LOST  # by an error that the rank itself has printed, with what to do
        # The first rank of a host speaks, or the second where the first is the one that is gone.
        follows = place.local_rank == 1 and f"rank {place.rank - 1} " in str(error)
        if place.local_rank == 0 or follows:
            said, saved = str(error).replace(RESTART, ""), folder.what_is_saved()
            said = said if saved in said else f"{said} {saved}"
            progress.say(f"fullshard: rank {place.rank}: {said}")
        return Exit.RANK_LOST
    said = str(error)
    if isinstance(error, OSError):
        if error.errno == errno.ENOSPC:
            said = f"{error.filename or folder.path}: no space is left. Free some first (or see --cache)."
        said += f"\n{folder.what_is_saved()}"
    elif not isinstance(error, FullshardError):
        said = f"failed:\n{folded_traceback(error).rstrip()}"
    is_common = isinstance(error, OptionError | CheckpointError | TrainingError)
    unless_asked = place.rank == 0 or not is_common
    if is_first_to_say(said, store_in_time, unless_asked=unless_asked):
        where = "" if is_common else f"rank {place.rank}: "
        progress.say(f"fullshard: {where}{said}")
    return Exit.USAGE if isinstance(error, OptionError) else Exit.FAILED


def _is_loss(error: Exception) -> bool:
    """Whether an error follows from the end of another rank: a save or a load that failed may, unless all were told."""
    if isinstance(error, CheckpointError):
        lost = lost_ranks({*range(dist.get_world_size())} - {dist.get_rank()})
        words = watchdog().board.last_words(lost).values()
        return len(lost) > sum(CheckpointError.__name__ in each.error for each in words)
    return isinstance(error, PeerLostError)


def _show(summary: dict[str, Any], report: progress.Reporter, *, as_json: bool) -> None:
    """Print the results: prose for people, or one JSON object."""
    report.end()
    if as_json:
        print(json_text(summary), flush=True)
        return
    if summary["status"] == "finished":
        if summary["sample"]:
            print(f"\n{_shortened(summary['sample'])}", flush=True)
        _show_end(summary, Console(emoji=False, highlight=False))
        return
    done, steps = summary["step"], summary["steps"]
    report.note(f"stopped after step {done} of {steps}, checkpoint saved")
    report.end()
    _show_end(summary, Console(file=sys.stderr, emoji=False, highlight=False))


def _shortened(sample: str) -> str:
    """Return a few lines of a sample, as they may be printed, under a line that says what they are."""
    lines = [line.rstrip() for line in progress.printable(sample).splitlines() if line.strip()]
    shown = [line if len(line) <= 100 else f"{line[:100]}..." for line in lines[:_SAMPLE_LINES]]
    return "\n".join(["--- sample ---", *shown, "--------------"])


def _show_end(summary: dict[str, Any], console: Console) -> None:
    """Print what came out, in a few aligned lines; paths are links where the terminal knows such.

    A command that is longer than the rest of its line begins in the first column, and is never broken here.
    """
    folder, unit = RunFolder(Path(summary["out"])), summary["unit"]
    perplexity, averaged = math.exp(min(summary["loss"], 99.0)), min(_LOSS_STEPS, summary["step"])
    mean = f" (mean of the last {averaged} steps)" if averaged > 1 else ""
    rows: dict[str, str | Text] = {
        "loss": f"{summary['loss']:.3f} nats per {unit}{mean}, perplexity {perplexity:,.1f}; "
        f"unigram entropy {summary['unigram_entropy']:.3f}"
    }
    if summary["val_loss"] is not None:
        rows["validation"] = f"{summary['val_loss']:.3f} on text held out, after the last step"
    rows["speed"] = (
        f"{summary['tokens_per_second']:,.0f} {unit}s/s for {progress.clock(summary['seconds'])}, "
        f"{summary['peak_memory_per_rank'] / 2**30:.2f} GiB a rank"
    )
    rows["results"] = results = _link(folder.path)
    if summary["report"]:
        results.append(", report: ").append(_link(folder.report_file))
    commands = {"go on": folder.to_resume}
    if summary["status"] == "finished":
        exported = shlex.quote(str(Path("exports", folder.path.name)))
        given = "epochs" if summary["epochs"] else "steps"
        commands["go on"] += f" --{given} {2 * summary[given]:.15g}"
        commands["export"] = f"{program()} export {shlex.quote(str(folder.path))} --hf {exported}"
    width = max(map(len, (*rows, *commands))) + 2
    for name, value in rows.items():
        for line in progress.wrapped(Text(f"{name:<{width}}").append(value), console, indent=width):
            console.print(line, soft_wrap=True)
    for name, command in commands.items():
        fits = not console.is_terminal or width + cell_len(command) <= console.width
        row = f"{name:<{width}}{command}" if fits else f"{name}\n{command}"
        console.print(row, markup=False, soft_wrap=True)


def _link(path: Path) -> Text:
    return Text(progress.printable(str(path)), style=f"link {path.absolute().as_uri()}")


def _train(job: Job, stop: StopRequest, report: progress.Reporter) -> dict[str, Any]:
    """Train, sample and summarise as one rank of the default process group.

    Returns the summary, whose `status` is `finished` or `stopped`.
    """
    # Rank 0's folder: its default name holds the time, which differs between ranks.
    paths = [str(job.folder.path)]
    dist.broadcast_object_list(paths, src=0)
    job = dataclasses.replace(job, folder=RunFolder(Path(paths[0])))
    config, folder = job.config, job.folder
    trainer = Trainer(job, stop, report)
    if job.checkpoint is not None:
        report.note(f"resuming after step {job.done} from {job.checkpoint.path}")
        fullshard.load_checkpoint(job.checkpoint.path, trainer.model, trainer.optimizer)
    elif config.init_from:
        report.note(f"beginning with the weights of {config.init_from}")
        load_initial_weights(trainer.model, Path(config.init_from))
    dist.barrier()  # nobody may still be checking the folder when rank 0 starts to write
    if trainer.rank == 0:
        facts = gather_facts(
            num_parameters=trainer.num_params,
            flops_per_token=trainer.language_model.flops_per_token(seq=config.seq),
            device=trainer.device,
        )
        folder.start(
            config,
            fingerprint=job.text.survey.fingerprint,
            done=job.done,
            facts=facts,
            tokenizer=job.tokenizer.files if job.tokenizer else None,
            model=job.model.fields if isinstance(job.model, ConfiguredBlueprint) else None,
        )
        trainer.loggers.start(RunInfo(folder.path, dataclasses.asdict(config), job.done))
    try:
        summary = _run(job, trainer, report)
    except BaseException:
        trainer.loggers.finish({"status": "failed"})
        raise
    trainer.loggers.finish(summary)
    return summary


def _run(job: Job, trainer: Trainer, report: progress.Reporter) -> dict[str, Any]:
    config, folder = job.config, job.folder
    started = time.perf_counter()
    done = trainer.train(done=job.done)
    seconds = time.perf_counter() - started
    text = ""
    if done == config.steps and config.sample_length:
        text = trainer.sample()
    own_peak = float(peak_memory_nbytes(trainer.device))
    peak = torch.tensor(own_peak, dtype=torch.float64, device=trainer.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    loss = None
    if trainer.rank == 0:  # of the last steps: one step's depends too much on its text
        losses = [entry["loss"] for entry in folder.metrics()[-_LOSS_STEPS:]]
        loss = sum(losses) / len(losses)
    summary = {
        "status": "finished" if done == config.steps else "stopped",
        "step": done,
        "steps": config.steps,
        "epochs": job.epochs,
        "loss": loss,
        "val_loss": trainer.val_loss,
        "unigram_entropy": job.text.survey.unigram_entropy,
        "unit": config.unit,
        "tokens_per_second": (done - job.done) * config.tokens_per_step / seconds,
        "seconds": seconds,
        "peak_memory_per_rank": int(peak.item()),
        "out": str(folder.path),
        "report": str(folder.report_file),
        "sample": text,
    }
    if trainer.rank == 0:
        report.note("writing the report ...")
        folder.write_summary(summary)
        try:
            write_report(folder.path)
        except (FullshardError, OSError) as error:  # the run itself is complete
            summary["report"] = None
            report.note(f"no trace report: {error}")
    return summary
