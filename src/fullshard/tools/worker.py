"""One rank as a process: joins the others, trains, and leaves in an orderly way.

    join -> signal handlers -> train -> barrier -> goodbye

A signal before the handlers are there ends the process at once, which is what a launcher wants
whose other ranks failed to start.
"""

import dataclasses
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from fullshard.errors import CheckpointError, FullshardError, PeerLostError
from fullshard.local_ranks import die_with_launcher
from fullshard.peers.waits import announce, lost_ranks, naming_lost_ranks
from fullshard.peers.watchdog import watchdog
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.job import Job
from fullshard.tools.json_text import json_text
from fullshard.tools.launch import Place
from fullshard.tools.progress import Reporter, Reporting, printable
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.running import run_rank
from fullshard.tools.train import StopRequest


def run_worker(job: Job, place: Place, *, threads: int, as_json: bool) -> Exit:
    """Run one rank from start to end and return its exit code."""
    die_with_launcher(place.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while starting
    torch.set_num_threads(threads)
    with Reporting(rank=place.rank) as report:
        report.note(f"joining {place.num_ranks} rank{'s' if place.num_ranks > 1 else ''} ...")
        _join(job, place)
        world = dist.group.WORLD
        assert isinstance(world, dist.ProcessGroup)
        announce()
        try:
            with naming_lost_ranks(world, "fullshard train"):
                summary = _train(job, report, as_json=as_json)
        except Exception as error:
            report.end()
            code = _complain(place, job.folder, error)
            watchdog().end()  # tells the others why
            # Not by way of destroy_process_group, which may wait for ranks that will not come.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
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


def _what_is_saved(folder: RunFolder) -> str:
    checkpoint = fullshard.latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        return "There was no complete checkpoint yet; start the run again with another --out."
    return (
        f"The last complete checkpoint is of step {checkpoint.step} ({checkpoint.path}); continue "
        f"with: {folder.to_resume}"
    )


def _complain(place: Place, folder: RunFolder, error: Exception) -> Exit:
    """Say why this rank ends, and return its exit code. Of another's death, one or two ranks of a host tell."""
    if _is_loss(error):
        # The first rank of a host speaks, or the second where the first is the one that is gone.
        follows = place.local_rank == 1 and f"rank {place.rank - 1} " in str(error)
        if place.local_rank == 0 or follows:
            said = f"{error} {_what_is_saved(folder)}"
            print(f"fullshard: rank {place.rank}: {said}", file=sys.stderr)
        return Exit.RANK_LOST
    if isinstance(error, FullshardError):
        print(f"fullshard: rank {place.rank}: {error}", file=sys.stderr)
    else:
        print(f"fullshard: rank {place.rank} failed:", file=sys.stderr)
        traceback.print_exception(error)
    return Exit.USAGE if isinstance(error, OptionError) else Exit.FAILED


def _is_loss(error: Exception) -> bool:
    """Whether an error follows from the end of another rank: a save or a load that failed may."""
    if isinstance(error, CheckpointError):
        return bool(lost_ranks({*range(dist.get_world_size())} - {dist.get_rank()}))
    return isinstance(error, PeerLostError)


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
