"""One rank: the sharded model on its part of each batch, recorded as the one process is."""

import contextlib
import datetime
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.local_ranks import die_with_launcher
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Place
from fullshard.tools.progress import Reporter, Reporting
from fullshard.tools.verify.gathering import (
    buffers_of,
    ties_of,
    units_of,
    whole_gradients,
    whole_parameters,
)
from fullshard.tools.verify.measures import fingerprints
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.program import Program, load_program
from fullshard.tools.verify.record import Diary, rank_folder
from fullshard.tools.verify.supervision import Supervised
from fullshard.tools.verify.training import Trainee, keyed, make_optimizer


def run_rank(options: VerifyOptions, place: Place, folder: Path, *, threads: int) -> Exit:
    """Run one rank from start to end; what went wrong is in its record, not in its exit code."""
    die_with_launcher(place.launcher_pid)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(threads)
    diary = Diary(rank_folder(folder, place.rank))
    with (
        Reporting(rank=place.rank) as report,
        Supervised(diary, options.timeout_s, on_stuck=lambda: leave(Exit.OK)),
    ):
        device = _join(options, place)
        fullshard.set_default_comm(options.comm)
        fullshard.install()  # what --shard imports from torch.distributed.fsdp is fullshard's then
        report.note(f"{options.ranks} ranks: {options.steps} steps, sharded")
        diary.phase = "importing"
        train_sharded(load_program(options), diary, device, report)
    if diary.run.failure is None:
        with contextlib.suppress(RuntimeError):  # another rank has failed and left
            dist.barrier()
            dist.destroy_process_group()
            return Exit.OK
    # Not by way of destroy_process_group, which may wait for ranks that will not come.
    return leave(Exit.OK)


def train_sharded(program: Program, diary: Diary, device: torch.device, report: Reporter) -> None:
    """Shard and train on this rank of the default process group, and record it. Collective."""
    options, rank = program.options, dist.get_rank()
    trainee = Trainee(program, diary, device)
    names = list(diary.run.own)
    diary.phase = "sharding"
    model = program.sharded(trainee.subject.model)
    _note_start(model, diary, names)
    optimizer = make_optimizer(model, options.lr)
    report.begin(total=options.steps, done=0)
    for step in range(options.steps):
        loss, part, tensors = trainee.forward(model, step, rank)
        diary.note_part(part)
        trainee.backward(loss)
        tensors |= keyed(f"buffer/{rank}", buffers_of(model))
        diary.phase = "gathering gradients"
        tensors |= keyed("gradient", whole_gradients(model, names))
        trainee.update(optimizer)
        diary.phase = "gathering parameters"
        tensors |= keyed("parameter", whole_parameters(model, names))
        trainee.end_step(step, tensors)
        report.step(step + 1, {"loss": f"{part.loss:.4f}"})


def _note_start(model: nn.Module, diary: Diary, names: Sequence[str]) -> None:
    """Write down what there is before the first step."""
    diary.phase = "gathering parameters"
    whole = whole_parameters(model, names)
    diary.note(
        initial=fingerprints(whole.items()),
        buffers=fingerprints(buffers_of(model).items()),
        ties=ties_of(whole),
        units=units_of(model),
    )


def _join(options: VerifyOptions, place: Place) -> torch.device:
    limit = datetime.timedelta(seconds=options.timeout_s)
    if options.device == "cpu":
        dist.init_process_group("gloo", timeout=limit)
        return torch.device("cpu")
    torch.accelerator.set_device_index(place.local_rank)
    device = torch.device(options.device, place.local_rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=limit)
    return device


def leave(code: Exit) -> Exit:
    """End this process at once, without what is registered to run at its exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
