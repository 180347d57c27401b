"""One rank as a process: joins the others, trains, and leaves in an orderly way.

    join -> lifeline -> signal handlers -> train -> barrier -> goodbye

A signal before the handlers are there ends the process at once, which is what a launcher wants
whose other ranks failed to start.
"""

import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from fullshard.errors import FullshardError
from fullshard.local_ranks import die_with_launcher
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.job import Job
from fullshard.tools.json_text import json_text
from fullshard.tools.launch import Place
from fullshard.tools.lifeline import Fate, Lifeline
from fullshard.tools.progress import Reporter, Reporting, printable
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.running import run_rank
from fullshard.tools.train import StopRequest

_VERDICT_WAIT_S = 1.0


def run_worker(job: Job, place: Place, *, threads: int, as_json: bool) -> Exit:
    """Run one rank from start to end and return its exit code."""
    die_with_launcher(place.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while starting
    torch.set_num_threads(threads)
    with Reporting(rank=place.rank) as report:
        report.note(f"joining {place.num_ranks} rank{'s' if place.num_ranks > 1 else ''} ...")
        _join(job, place)
        lifeline = Lifeline(place.master_host, _Mourner(place, job.folder))
        try:
            summary = _train(job, report, as_json=as_json)
        except Exception as error:
            report.end()
            # The error may come from another rank's death; then the lifeline thread, which knows
            # more, ends this process while we wait.
            time.sleep(_VERDICT_WAIT_S)
            lifeline.leave(Fate.FAILED)
            _complain(place, error)
            # Not by way of destroy_process_group, which may wait for ranks that will not come.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(Exit.USAGE if isinstance(error, OptionError) else Exit.FAILED)
    lifeline.leave(Fate.GOODBYE)
    dist.destroy_process_group()
    return Exit.OK if summary["status"] == "finished" else Exit.STOPPED


def _train(job: Job, report: Reporter, *, as_json: bool) -> dict[str, Any]:
    stop = StopRequest()
    job = dataclasses.replace(job, folder=_shared_folder(job.folder))
    summary = run_rank(job, stop, report)
    if dist.get_rank() == 0:
        _show(summary, report, as_json=as_json)
    dist.barrier()  # nobody leaves while another still needs it
    return summary


def _join(job: Job, place: Place) -> None:
    if job.config.device == "cpu":
        dist.init_process_group("gloo")
    else:
        torch.accelerator.set_device_index(place.local_rank)
        device = torch.device(job.config.device, place.local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)


def _shared_folder(folder: RunFolder) -> RunFolder:
    """Take rank 0's folder: its default name holds the time, which differs between ranks."""
    paths = [str(folder.path)]
    dist.broadcast_object_list(paths, src=0)
    return RunFolder(Path(paths[0]))


class _Mourner:
    """Ends this process when another rank is gone, after saying which on each host once."""

    def __init__(self, place: Place, folder: RunFolder) -> None:
        self._place = place
        self._folder = folder

    def __call__(self, rank: int, fate: Fate) -> None:
        place = self._place
        # The first rank of a host speaks, or the second where the first is the one that is gone.
        speaks = place.local_rank == 0 or (place.local_rank == 1 and rank == place.rank - 1)
        if speaks and fate is Fate.DIED:
            print(
                f"fullshard: rank {rank} died (killed, or out of memory); rank {place.rank} and "
                f"the others end now. {_what_is_saved(self._folder)}",
                file=sys.stderr,
                flush=True,
            )
        os._exit(Exit.RANK_LOST)


def _what_is_saved(folder: RunFolder) -> str:
    checkpoint = fullshard.latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        return "There was no complete checkpoint yet; start the run again with another --out."
    return (
        f"The last complete checkpoint is of step {checkpoint.step} ({checkpoint.path}); continue "
        f"with: {folder.to_resume}"
    )


def _complain(place: Place, error: Exception) -> None:
    if isinstance(error, FullshardError):
        print(f"fullshard: rank {place.rank}: {error}", file=sys.stderr)
    else:
        print(f"fullshard: rank {place.rank} failed:", file=sys.stderr)
        traceback.print_exc()


def _show(summary: dict[str, Any], report: Reporter, *, as_json: bool) -> None:
    """Print the results: prose for people, or one JSON object."""
    if as_json:
        print(json_text(summary), flush=True)
        return
    out = summary["out"]
    report_at = f"; trace report: {summary['report']}" if summary["report"] else ""
    if summary["status"] == "stopped":
        report.note(
            f"stopped after step {summary['step']} of {summary['steps']}, checkpoint saved. "
            f"Continue with: {RunFolder(Path(out)).to_resume}{report_at}"
        )
        return
    if summary["sample"]:
        print(f"\n--- sample ---\n{printable(summary['sample'])}\n--------------\n", flush=True)
    print(
        f"loss {summary['loss']:.3f} nats per {summary['unit']}, unigram entropy "
        f"{summary['unigram_entropy']:.3f}; {summary['tokens_per_second']:,.0f} tokens/s, "
        f"{summary['seconds']:.0f} s; everything is in {out}{report_at}",
        flush=True,
    )
