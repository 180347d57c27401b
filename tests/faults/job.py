"""A small training job in which one thing goes wrong at one place: what each of its ranks runs.

`Plan` says everything about a job, so that a rank and the test that reads its output agree. A plan whose
fault changes only which blocks a rank runs can be computed in one process as well (`alone`), which proves
a job right that ends without an error.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard import host
from fullshard.engine.gradients.queue import ReductionQueue
from fullshard.peers.watchdog import watchdog
from tests.api import Api, use_api
from tests.autograd_thread import backward_in_a_thread
from tests.gpu.place import nccl_host

NUM_STEPS = 6
WIDTH = 16
NUM_BLOCKS = 3
LEARNING_RATE = 0.05


class PlantedError(ValueError):
    """The error of faults that raise. Without arguments, its message cannot be made."""

    def __str__(self) -> str:
        (text,) = self.args
        return str(text)


@dataclass(frozen=True)
class Plan:
    """One job. fault: a name in `FAULTS`. rank, step, block: where it is planted; steps count from 1.

    path: how ranks communicate; "hosts" takes each rank for one on a host of its own. "nccl" and "nccl_hosts" are
    the same on one GPU, and on "cuda" ranks share its memory. "like_cuda" has on the CPU what stands out there: a
    process group for each unit, a backward that a thread of autograd's runs, no reduction that is waited for late. face: "fully_shard" or "wrapper". after: what the rank does next that has run out of data:
    see `_leave`. timeout_s: of the process group. port: of a store in rank 0's process; 0 for one in a file, which
    outlives all ranks. address: of rank 0's host.
    """

    fault: str
    path: str = "auto"
    face: str = "fully_shard"
    size: int = 2
    rank: int = 1
    step: int = 3
    block: int = 1
    after: str = "exit"
    timeout_s: float = 60.0
    port: int = 0
    address: str = "127.0.0.1"

    @property
    def device(self) -> torch.device:
        """Where the ranks compute."""
        is_cuda = self.path in ("cuda", "nccl", "nccl_hosts")
        return torch.device("cuda", 0) if is_cuda else torch.device("cpu")

    @property
    def has_hosts(self) -> bool:
        """Whether each rank counts for one on a host of its own."""
        return self.path in ("hosts", "nccl_hosts")

    @property
    def name(self) -> str:
        """A short name, for tests' ids."""
        after = f"-{self.after}" if self.fault == "out_of_data" else ""
        return f"{self.fault}{after}-{self.path}-{self.face}-{self.size}ranks-step{self.step}"

    def is_at(self, step: int, rank: int) -> bool:
        """Whether the fault is planted here."""
        return step == self.step and rank == self.rank


class Block(nn.Module):
    """Two layers and a residual."""

    def __init__(self, hidden: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute (n, WIDTH) from (n, WIDTH)."""
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, run in the order of a route, and a head."""

    def __init__(self, hidden: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(each) for each in hidden)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        """Compute (n, 4) from (n, WIDTH)."""
        for number in route:
            x = self.blocks[number](x)
        return self.head(x)


def route_of(plan: Plan, step: int, rank: int) -> list[int]:
    """Return the blocks that a rank runs in a step."""
    route = list(range(NUM_BLOCKS))
    if not plan.is_at(step, rank):
        return route
    other = (plan.block + 1) % NUM_BLOCKS
    if plan.fault == "swap":
        route[plan.block], route[other] = route[other], route[plan.block]
    elif plan.fault == "skip":
        route.remove(plan.block)
    elif plan.fault == "twice":
        route.insert(plan.block, plan.block)
    elif plan.fault == "other_branch":
        route = [other]
    return route


def batch_of(step: int, rank: int) -> Tensor:
    """Return a rank's inputs in a step, (4, WIDTH)."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def _from_a_file(plan: Plan, rank: int, folder: Path) -> type[Block]:
    """Return a class of blocks from a file that each rank has a copy of, in another version."""
    path = folder / f"host-{rank}" / "planted_blocks.py"
    path.parent.mkdir()
    version = 2 if rank == plan.rank else 1
    path.write_text(
        f"from tests.faults.job import Block\n\n\nclass Own(Block):\n    version = {version}\n"
    )
    sys.path.insert(0, str(path.parent))
    return importlib.import_module("planted_blocks").Own


def build(plan: Plan, rank: int, folder: Path) -> Net:
    """Return the unsharded model, with faults of how it is built."""
    torch.manual_seed(0)
    is_here = rank == plan.rank
    hidden = [WIDTH] * NUM_BLOCKS
    if is_here and plan.fault == "shape":
        hidden[plan.block] = 2 * WIDTH
    if is_here and plan.fault == "layers":
        hidden.append(WIDTH)
    model = Net(hidden)
    model.to(plan.device)
    if is_here and plan.fault == "dtype":
        model.blocks[plan.block].to(torch.bfloat16)
    if is_here and plan.fault == "frozen":
        model.blocks[plan.block].up.weight.requires_grad_(False)
    if plan.fault == "code":
        model.blocks[plan.block] = _from_a_file(plan, rank, folder)().to(plan.device)
    return model


def alone(plan: Plan) -> dict[str, Tensor]:
    """Train as the job does, in one process; return the parameters."""
    torch.manual_seed(0)
    model = Net([WIDTH] * NUM_BLOCKS)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for step in range(1, NUM_STEPS + 1):
        for rank in range(plan.size):
            output = model(batch_of(step, rank), route_of(plan, step, rank))
            (output.square().mean() / plan.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def _shard(api: Api, plan: Plan, rank: int, folder: Path) -> tuple[nn.Module, Net]:
    """Return the sharded model, and the module inside that has the blocks."""
    model = build(plan, rank, folder)
    is_here = rank == plan.rank
    options: dict[str, Any] = {}
    of_units: list[dict[str, Any]] = [{} for _ in model.blocks]
    if plan.path == "like_cuda":
        of_units = [{"mesh": DeviceMesh.from_group(dist.new_group(), "cpu")} for _ in model.blocks]
    if is_here and plan.fault == "precision":
        options["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if is_here and plan.fault == "reshard":
        options["reshard_after_forward"] = False
    if plan.face == "fully_shard":
        for number, block in enumerate(model.blocks):
            if not (is_here and plan.fault == "units" and number == plan.block):
                api.fully_shard(block, **options, **of_units[number])
        return api.fully_shard(model, **options), model
    wrap = {"use_orig_params": True, "device_id": plan.device}
    for number, block in enumerate(model.blocks):
        if not (is_here and plan.fault == "units" and number == plan.block):
            model.blocks[number] = api.FullyShardedDataParallel(block, **wrap)
    sharded = api.FullyShardedDataParallel(model, **wrap)
    return sharded, sharded.module


class Job:
    """One rank's run of a plan. The fault's moment is noted in `planted_at`."""

    def __init__(self, api: Api, plan: Plan, rank: int, folder: Path) -> None:
        self.api, self.plan, self.rank, self.folder = api, plan, rank, folder
        self.began = self.planted_at = time.monotonic()
        if plan.fault == "version" and rank == plan.rank:
            torch.__version__ = "2.99.0"
        self.model, self.inner = _shard(api, plan, rank, folder)
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATE)

    def run(self) -> None:
        """Train."""
        plan = self.plan
        for step in range(1, NUM_STEPS + 1):
            is_here = plan.is_at(step, self.rank)
            if step == plan.step and not is_here and plan.fault == "other_call":
                dist.barrier()
            if step == plan.step:
                self.planted_at = time.monotonic()
            if is_here and plan.fault == "out_of_data":
                self._leave()
                return
            if is_here and (fault := BETWEEN_STEPS.get(plan.fault)) is not None:
                fault(self)
            if is_here and plan.fault == "skip_step":
                continue
            try:
                self._step(step, is_here=is_here)
            except PlantedError:
                if plan.fault != "raise_and_go_on":
                    raise

    def _step(self, step: int, *, is_here: bool) -> None:
        plan, fault = self.plan, self.plan.fault if is_here else ""
        if fault == "raise_in_forward":
            self._block().register_forward_pre_hook(_raise)
        if fault in ("raise_in_hook", "raise_and_go_on"):
            handle = self._block().register_forward_hook(_raise)
        try:
            output = self.model(self.batch(step), route_of(plan, step, self.rank))
        finally:
            if fault == "raise_and_go_on":
                handle.remove()
        if fault == "raise_in_backward":
            output.register_hook(_raise)
        loss = output.square().mean()
        if fault == "raise_in_loss":
            raise PlantedError("planted\x1b[31m")
        if fault == "no_backward":
            return
        if fault == "no_sync":
            with self._without_sync():
                loss.backward()
        elif plan.path == "like_cuda":
            with mock.patch.object(ReductionQueue, "add", _add_and_finish):
                backward_in_a_thread(loss)
        else:
            loss.backward()
        if fault == "clip":
            if self.plan.face == "wrapper":
                self.model.clip_grad_norm_(1.0)
            else:
                norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                norm.full_tensor()
        self.optimizer.step()
        self.optimizer.zero_grad()
        float(loss.detach())  # as a log would, so that the host never runs far ahead of a device

    def batch(self, step: int) -> Tensor:
        """Return this rank's inputs of a step, on its device."""
        return batch_of(step, self.rank).to(self.plan.device)

    def _block(self) -> nn.Module:
        return self.inner.blocks[self.plan.block]

    def _without_sync(self) -> Any:
        if self.plan.face == "wrapper":
            return self.model.no_sync()
        return _NoSync(self.model)

    def _leave(self) -> None:
        """Do what a program does whose data have ended."""
        after = self.plan.after
        if after == "barrier":
            dist.barrier()
        elif after == "metric":
            _count(self)
        elif after == "evaluate":
            _evaluate(self)
        elif after == "save":
            fullshard.save_checkpoint(self.folder / "checkpoint", self.model, self.optimizer)
        elif after == "destroy":
            dist.destroy_process_group()

    def parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters. Collective."""
        return {name: value.cpu() for name, value in fullshard.iter_full_state(self.model)}


_add = ReductionQueue.add


def _add_and_finish(queue: ReductionQueue, in_flight: Any, **_: object) -> None:
    _add(queue, in_flight, keep=0)


class _NoSync:
    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.model.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        self.model.set_requires_gradient_sync(True)


def _raise(*_: Any) -> None:
    raise PlantedError


def _unshard(job: Job) -> None:
    if job.plan.face == "fully_shard":
        job._block().unshard()
    else:
        with job.api.FullyShardedDataParallel.summon_full_params(job.model):
            pass


def _evaluate(job: Job) -> None:
    with torch.no_grad():
        job.model(job.batch(0), [0, 1, 2])


def _count(job: Job) -> None:
    dist.all_reduce(torch.ones(1, device=job.plan.device))


def _generate(job: Job) -> None:
    x = job.batch(0)
    with torch.no_grad():
        for _ in range(3):
            x = x + job.model(x, [0, 1, 2]).repeat(1, WIDTH // 4)


def _state_dict(job: Job) -> None:
    if job.plan.face == "fully_shard":
        get_model_state_dict(job.model, options=StateDictOptions(full_state_dict=True))
        return
    fsdp = job.api.FullyShardedDataParallel
    with fsdp.state_dict_type(job.model, job.api.StateDictType.FULL_STATE_DICT):
        job.model.state_dict()


def _freeze(job: Job) -> None:
    next(job._block().parameters()).requires_grad_(False)


def _nan(job: Job) -> None:
    fullshard.debug(nan=True)
    job._block().up.forward = lambda x: (x - 100).log()


def _no_gradient(job: Job) -> None:
    job._block().register_forward_hook(lambda _, args, out: args[0] + (out - args[0]).detach())


def _kill(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(job: Job) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _terminate(_: Job) -> None:
    """End all ranks, this one at last."""
    pids = watchdog().board.processes(range(dist.get_world_size()))
    for pid in sorted(pids.values(), key=lambda pid: pid == os.getpid()):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)


def _barrier_unjudged(_: Job) -> None:
    watchdog()._judge = lambda *_: None  # type: ignore[method-assign]
    dist.barrier()


# What the rank does before its step.
BETWEEN_STEPS: dict[str, Callable[[Job], Any]] = {
    "unshard": _unshard,
    "evaluate": _evaluate,
    "generate": _generate,
    "state_dict": _state_dict,
    "full_state": lambda job: list(fullshard.iter_full_state(job.model)),
    "save": lambda job: fullshard.save_checkpoint(
        job.folder / "checkpoint", job.model, job.optimizer
    ),
    "barrier": lambda _: dist.barrier(),
    "barrier_unjudged": _barrier_unjudged,
    "metric": _count,
    "objects": lambda job: dist.all_gather_object([None] * job.plan.size, "metric"),
    "freeze": _freeze,
    "nan": _nan,
    "no_gradient": _no_gradient,
    "other_call": _count,
    "kill": _kill,
    "stop": _stop,
    "terminate": _terminate,
    "exit": lambda _: sys.exit(3),
    "exit_at_once": lambda _: os._exit(5),
    "sleep": lambda _: time.sleep(1000),
}

OF_FULLY_SHARD = ("precision", "reshard")
ROUTES = ("swap", "skip", "twice", "other_branch")
BUILDS = ("shape", "layers", "dtype", "frozen", "precision", "reshard", "units")
BUILDS += ("version", "code")
IN_STEPS = ("no_backward", "no_sync", "skip_step", "clip")
RAISES = (
    "raise_in_forward",
    "raise_in_hook",
    "raise_in_loss",
    "raise_in_backward",
    "raise_and_go_on",
)
LEAVES = ("exit", "barrier", "metric", "evaluate", "save", "destroy")
ENDS = ("kill", "exit", "exit_at_once")
STALLS = ("sleep", "stop")
ALONE = ("unshard", "evaluate", "generate", "state_dict", "full_state", "save")
ALONE += ("barrier", "metric", "objects", "freeze", "other_call")
FAULTS = (*ROUTES, *BUILDS, *IN_STEPS, *RAISES, *ALONE, *ENDS, *STALLS, "out_of_data")


def random_plan(seed: int) -> Plan:
    """Return the plan of a seed: any fault, on any path and face, at any place."""
    choose = random.Random(seed)
    fault = choose.choice([each for each in FAULTS if each not in STALLS])
    face = choose.choice(["fully_shard", "wrapper"])
    if fault in OF_FULLY_SHARD:
        face = "fully_shard"
    size = choose.choice([2, 2, 3, 4])
    return Plan(
        fault,
        # With "collectives" ranks share a group with the program, whose calls Gloo may pair with ours.
        path=choose.choice(
            ["auto", "process_group", "hosts"] + ["collectives"] * (fault not in ALONE)
        ),
        face=face,
        size=size,
        rank=choose.randrange(size),
        step=choose.randint(1, NUM_STEPS - 1),
        block=choose.randrange(NUM_BLOCKS),
        after=choose.choice(LEAVES),
    )


def main(plan: Plan, rank: int, folder: Path, note: Callable[..., None]) -> None:
    """Run a plan's job on one rank. note: is told how it ended."""
    torch.set_num_threads(1)
    if plan.device.type == "cuda":
        os.environ.update(nccl_host(rank))
        torch.cuda.set_device(plan.device)
    dist.init_process_group(
        "nccl" if plan.path.startswith("nccl") else "gloo",
        init_method=f"tcp://{plan.address}:{plan.port}" if plan.port else f"file://{folder}/store",
        rank=rank,
        world_size=plan.size,
        timeout=timedelta(seconds=plan.timeout_s),
    )
    began = time.monotonic()
    job: Job | None = None
    if plan.has_hosts:
        host.identity = lambda: f"host {rank}"
    path = {
        "hosts": "auto",
        "cuda": "auto",
        "like_cuda": "auto",
        "nccl": "process_group",
        "nccl_hosts": "process_group",
    }
    with use_api(path.get(plan.path, plan.path)) as api:
        try:
            job = Job(api, plan, rank, folder)
            job.run()
            if plan.fault in ROUTES:
                note(parameters=job.parameters())
        except BaseException as error:
            planted_at = began if job is None or plan.fault in BUILDS else job.planted_at
            kinds = [kind.__name__ for kind in type(error).__mro__]
            text = "" if isinstance(error, PlantedError) else str(error)
            note(kinds=kinds, text=text, seconds=time.monotonic() - planted_at)
            raise
        planted_at = began if plan.fault in BUILDS else job.planted_at
        note(kinds=[], text="", seconds=time.monotonic() - planted_at)
