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
from fullshard.errors import StateError
from fullshard.plan.units import clean_name, without_compile
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Place, die_with_launcher
from fullshard.tools.progress import Reporter, Reporting
from fullshard.tools.verify.facts import Unit
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
        Supervised(diary, options.timeout_s, on_stuck=lambda: _leave(Exit.OK)),
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
    return _leave(Exit.OK)


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
        tensors |= keyed(f"buffer/{rank}", _buffers(model))
        diary.phase = "gathering gradients"
        tensors |= keyed("gradient", _whole_gradients(model, names))
        trainee.update(optimizer)
        diary.phase = "gathering parameters"
        tensors |= keyed("parameter", _whole(model, names))
        trainee.end_step(step, tensors)
        report.step(step + 1, {"loss": f"{part.loss:.4f}"})


def _note_start(model: nn.Module, diary: Diary, names: Sequence[str]) -> None:
    """Write down what there is before the first step."""
    diary.phase = "gathering parameters"
    whole = _whole(model, names)
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in whole.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    diary.note(
        initial=fingerprints(whole.items()),
        buffers=fingerprints(_buffers(model).items()),
        ties=tuple(tuple(tied) for tied in by_tensor.values() if len(tied) > 1),
        units=_units(model),
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


def _whole(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return whole parameters by name; on rank 0 alone. Collective."""
    state = fullshard.iter_full_state(model, to_rank=0, offload=True)
    return {name: tensor for name, tensor in state if name in names}


@torch.no_grad()
def _whole_gradients(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return whole gradients by name; on rank 0 alone. Collective.

    Parameters take the values of their gradients, are gathered, and get their own back, bit by bit. So
    gradients of every API and layout are gathered in one way, which does not depend on what is verified.
    Rejected: what the optimizer's step has changed, over its learning rate: most of its digits are lost.
    """
    parameters = list(model.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.zero_()
        else:
            parameter.copy_(parameter.grad)
    gradients = _whole(model, names)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    return gradients


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {without_compile(clean_name(name)): each for name, each in model.named_buffers()}


def _units(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model; none if nothing is sharded."""
    with contextlib.suppress(StateError):
        return tuple(
            Unit(u.name, (*u.direct, *u.packed, *u.flat, *u.extended), u.divide_factor)
            for u in fullshard.describe(model).units
        )
    return ()


def _leave(code: Exit) -> Exit:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
