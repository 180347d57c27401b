"""What has to hold on a GPU. A check raises AssertionError, or returns what it saw."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import fsdp

import fullshard
from bench.overlap import overlap_of
from fullshard.engine.runtime import Lane, Runtime
from fullshard.models.llama import Llama
from fullshard.models.sizes import SIZES, LlamaConfig
from tests.compiled import PROGRAMS, compare
from tests.gpu.place import (
    Place,
    clip,
    exact,
    largest_difference,
    loss_of,
    make_optimizer,
    mean_over_ranks,
    shard,
    train,
    values,
    wrap,
)

BF16, FP32 = torch.bfloat16, torch.float32
MIXED = fullshard.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
OFFLOAD = fullshard.CPUOffloadPolicy()
STATE_ON_HOST = fullshard.PlacementPolicy(optimizer="host")

Face = Callable[[Llama], nn.Module]
FACES: dict[str, Face] = {
    "fully_shard": shard,
    "wrapper-orig": lambda model: wrap(model, use_orig_params=True),
    "wrapper-flat": lambda model: wrap(model, use_orig_params=False),
}


@dataclass(frozen=True)
class Check:
    """A check, and the ranks it takes. needs_cuda: it has no meaning on the CPU.

    package: what it cannot do without.
    is_apart: NCCL takes each rank for one on a host of its own. Only so it lets two of them use one GPU.
    is_timed: others beside it on the GPU would change what it measures.
    """

    run: Callable[[Place], str]
    ranks: int
    backend: str
    needs_cuda: bool
    is_apart: bool = False
    is_timed: bool = False
    package: str = "torch"


CHECKS: dict[str, Check] = {}


def check(
    name: str,
    *,
    ranks: int = 1,
    backend: str = "nccl",
    needs_cuda: bool = False,
    is_apart: bool = False,
    is_timed: bool = False,
    package: str = "torch",
) -> Callable[[Callable[[Place], str]], Callable[[Place], str]]:
    """Add a check under a name."""

    def add(run: Callable[[Place], str]) -> Callable[[Place], str]:
        CHECKS[name] = Check(run, ranks, backend, needs_cuda, is_apart, is_timed, package)
        return run

    return add


# One rank: nothing is sharded, and everything has to be as in the unwrapped model.


def _assert_same(place: Place, face: Face, tolerance: float = 0.0, **how: Any) -> str:
    with exact(place):
        alone = place.model()
        model = face(copy.deepcopy(alone))
        expected, losses = train(place, alone, **how), train(place, model, **how)
        difference = largest_difference(values(alone), values(model))
    loss_difference = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
    text = f"losses differ by {loss_difference:.1e}, parameters by {difference:.1e}"
    assert max(loss_difference, difference) <= tolerance, text
    return text


for _name, _face in FACES.items():

    def _bitwise(place: Place, face: Face = _face) -> str:
        return _assert_same(place, face)

    def _clipped(place: Place, face: Face = _face) -> str:
        return _assert_same(place, face, tolerance=1e-4, max_norm=0.1)

    check(f"one-rank-fp32-{_name}")(_bitwise)
    check(f"one-rank-clip-{_name}")(_clipped)


@check("one-rank-accumulate")
def _accumulate(place: Place) -> str:
    return _assert_same(place, shard, tolerance=1e-6, num_microbatches=2)


@check("one-rank-accumulate-reduced")
def _accumulate_reduced(place: Place) -> str:
    return _assert_same(place, shard, tolerance=1e-6, num_microbatches=2, syncs_every_time=True)


@check("one-rank-checkpointing")
def _checkpointing(place: Place) -> str:
    def face(model: Llama) -> nn.Module:
        model.recompute_layers(True)
        return shard(model)

    return _assert_same(place, face)


@check("one-rank-bf16")
def _bf16(place: Place) -> str:
    with exact(place):
        alone = place.model(dtype=BF16)
        model = shard(copy.deepcopy(alone))
        expected, losses = train(place, alone), train(place, model)
        difference = largest_difference(values(alone), values(model))
    assert losses == expected, f"{losses} is not {expected}"
    assert difference == 0.0, f"parameters differ by {difference:.1e}"
    return "losses and parameters are equal in every bit"


@check("one-rank-mixed-precision")
def _mixed(place: Place) -> str:
    return _assert_same(place, lambda model: shard(model, mp_policy=MIXED), tolerance=3e-2)


@check("one-rank-offload")
def _offload(place: Place) -> str:
    return _assert_same(place, lambda model: shard(model, offload_policy=OFFLOAD), tolerance=1e-5)


@check("one-rank-offload-accumulate")
def _offload_accumulate(place: Place) -> str:
    return _assert_same(
        place,
        lambda model: shard(model, offload_policy=OFFLOAD),
        tolerance=1e-5,
        num_microbatches=2,
        syncs_every_time=True,
    )


@check("one-rank-offload-clip")
def _offload_clip(place: Place) -> str:
    return _assert_same(
        place, lambda model: shard(model, offload_policy=OFFLOAD), tolerance=1e-5, max_norm=0.1
    )


@check("one-rank-offload-wrapper")
def _offload_wrapper(place: Place) -> str:
    offload = fullshard.CPUOffload(offload_params=True)
    return _assert_same(
        place,
        lambda model: wrap(model, use_orig_params=True, cpu_offload=offload),
        tolerance=1e-5,
        max_norm=0.1,
    )


def _stream(place: Place, face: Face, policy: fullshard.PlacementPolicy, **how: Any) -> str:
    with exact(place):
        alone = place.model()
        model = face(copy.deepcopy(alone))
        expected, losses = train(place, alone, **how), train(place, model, policy=policy, **how)
        difference = largest_difference(values(alone), values(model))
    assert (losses, difference) == (expected, 0.0), f"{losses} is not {expected}, or {difference}"
    return "losses and parameters are equal in every bit"


for _name, _face in FACES.items():

    @check(f"one-rank-state-on-host-{_name}")
    def _state_on_host(place: Place, face: Face = _face) -> str:
        return _stream(place, face, STATE_ON_HOST)


@check("one-rank-state-on-host-accumulate")
def _state_on_host_accumulate(place: Place) -> str:
    return _stream(place, shard, STATE_ON_HOST, num_microbatches=2, syncs_every_time=True)


@check("one-rank-state-on-disk")
def _state_on_disk(place: Place) -> str:
    with tempfile.TemporaryDirectory() as folder:
        policy = fullshard.PlacementPolicy(optimizer="disk", folder=folder)
        said = _stream(place, shard, policy)
        model = shard(place.model())
        fullshard.stream_state(make_optimizer(model), policy)
        return f"{said}; {fullshard.describe(model).units[0].state_place}"


@check("one-rank-state-dict")
def _state_dict(place: Place) -> str:
    model = shard(place.model(), mp_policy=MIXED)
    train(place, model, num_steps=2)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = shard(place.model(), mp_policy=MIXED)
    assert largest_difference(values(model), values(other)) > 0.0
    other.load_state_dict(torch.load(buffer, weights_only=False))
    assert largest_difference(values(model), values(other)) == 0.0
    expected = float(loss_of(model, place.tokens(9)))
    assert float(loss_of(other, place.tokens(9))) == expected
    return f"{len(buffer.getvalue()) / 1e6:.1f} MB"


# Compiled by Inductor


for _name in PROGRAMS:

    @check(f"compile-{_name}")
    def _compiled(place: Place, name: str = _name) -> str:
        with exact(place):
            return compare(fullshard, fsdp, name, backend="inductor", device=place.device)


# Memory


@check("one-rank-memory-comes-back", needs_cuda=True)
def _memory(place: Place) -> str:
    # cuBLAS keeps 32 MB for each thread that calls it, also the one of the backward.
    unit = torch.ones(8, 8, device=place.device, requires_grad=True)
    (unit @ unit).sum().backward()
    unit.grad = None
    torch.cuda.synchronize()
    floor = torch.cuda.memory_allocated()
    model = shard(place.model(), mp_policy=MIXED, reshard_after_forward=True)
    optimizer = make_optimizer(model)
    allocated, peaks = [], []
    for step in range(6):
        torch.cuda.reset_peak_memory_stats()
        loss = loss_of(model, place.tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(allocated[2:])) == 1, f"after each step: {allocated}"
    assert len(set(peaks[2:])) == 1, f"peak of each step: {peaks}"
    shards = sum(p.numel() * p.element_size() for p in model.parameters())
    # Parameters, two moments, gradients that are kept for reuse, and little else.
    assert allocated[-1] - floor <= 4.2 * shards, f"{allocated[-1] - floor} for {shards} of shards"
    del model, optimizer
    gc.collect()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - floor
    assert left <= 1 << 20, f"{left} bytes are left once the model is gone"
    return f"{(allocated[-1] - floor) / 1e6:.1f} MB after a step, {left} bytes after the model"


# Streams


@contextlib.contextmanager
def _counted_waits() -> Iterator[list[str]]:
    """Count the events that the host waits for."""
    waits: list[str] = []
    finish = Runtime.finish

    def counted(self: Runtime, event: torch.Event | None) -> None:
        if event is not None:
            waits.append("event")
        finish(self, event)

    with mock.patch.object(Runtime, "finish", counted):
        yield waits


@contextlib.contextmanager
def _syncs_forbidden(place: Place) -> Iterator[None]:
    """Let torch raise where the host would wait for the device; on the CPU nothing does."""
    if not place.is_cuda:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_no_sync(
    place: Place,
    model: nn.Module,
    waits_a_step: int,
    policy: fullshard.PlacementPolicy | None = None,
) -> str:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if policy is not None:
        optimizer = fullshard.stream_state(optimizer, policy)
    batches = [place.tokens(step) for step in range(6)]

    def step(number: int) -> None:
        loss_of(model, batches[number]).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(3):
        step(number)
    with _counted_waits() as waits, _syncs_forbidden(place):
        for number in range(3, 6):
            step(number)
    assert len(waits) == 3 * waits_a_step, f"the host waited for {len(waits)} events in 3 steps"
    return f"{waits_a_step} events waited for a step"


for _name, _face in FACES.items():

    @check(f"one-rank-no-host-sync-{_name}", needs_cuda=True)
    def _no_sync(place: Place, face: Face = _face) -> str:
        return assert_no_sync(place, face(place.model()), 0)


@check("one-rank-no-host-sync-mixed", needs_cuda=True)
def _no_sync_mixed(place: Place) -> str:
    return assert_no_sync(place, shard(place.model(), mp_policy=MIXED), 0)


@check("one-rank-no-host-sync-offload", needs_cuda=True)
def _no_sync_offload(place: Place) -> str:
    model = shard(place.model(), mp_policy=MIXED, offload_policy=OFFLOAD)
    return assert_no_sync(place, model, 1)  # before the optimizer reads gradients


@check("one-rank-no-host-sync-state-on-host", needs_cuda=True)
def _no_sync_state(place: Place) -> str:
    return assert_no_sync(place, shard(place.model(), mp_policy=MIXED), 0, STATE_ON_HOST)


@contextlib.contextmanager
def _slow_lanes() -> Iterator[None]:
    """Let side lanes be late, so that whoever does not wait for them reads what is not there yet."""
    on = Runtime.on

    @contextlib.contextmanager
    def late(self: Runtime, lane: Lane) -> Iterator[None]:
        with on(self, lane):
            if lane is not Lane.COMPUTE:
                torch.cuda._sleep(1_000_000)
            yield

    with mock.patch.object(Runtime, "on", late):
        yield


def _slow_compute(model: Llama) -> None:
    """Let compute be late, so that whoever does not wait for it overwrites what it reads."""
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: torch.cuda._sleep(1_000_000))
        layer.register_full_backward_hook(lambda *_: torch.cuda._sleep(1_000_000))


def assert_order(place: Place, face: Face, policy: fullshard.PlacementPolicy | None = None) -> str:
    with exact(place):
        expected = train(place, face(place.model()))
        with _slow_lanes():
            late = train(place, face(place.model()), policy=policy)
            assert late == expected, "with late side lanes"
        slow = place.model()
        _slow_compute(slow)
        assert train(place, face(slow), policy=policy) == expected, "with late compute"
    return "losses are equal in every bit"


for _name, _options in {
    "plain": {},
    "mixed": {"mp_policy": MIXED},
    "offload": {"mp_policy": MIXED, "offload_policy": OFFLOAD},
}.items():

    @check(f"one-rank-late-lanes-{_name}", needs_cuda=True)
    def _late(place: Place, options: dict[str, Any] = _options) -> str:
        return assert_order(place, lambda model: shard(model, **options))


@check("one-rank-late-lanes-state-on-host", needs_cuda=True)
def _late_state(place: Place) -> str:
    return assert_order(place, lambda model: shard(model, mp_policy=MIXED), STATE_ON_HOST)


def traced(place: Place, step: Callable[[], object]) -> dict[str, Any]:
    """Return the chrome trace of a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.is_cuda:
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if place.is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


@check("one-rank-offload-overlaps", needs_cuda=True, is_timed=True)
def _overlaps(place: Place) -> str:
    """Copies to and from the host run beside kernels, which keep the device busy, so that hosts run ahead."""
    config = LlamaConfig(**{**vars(SIZES["125m"]), "vocab_size": 4096})
    model = shard(place.model(config), mp_policy=MIXED, offload_policy=OFFLOAD)
    tokens = torch.randint(4096, (48, 1025), device=place.device)
    for _ in range(2):
        loss_of(model, tokens).backward()
        model.zero_grad()
    found = overlap_of(traced(place, lambda: loss_of(model, tokens).backward()))
    assert found.streams >= 3, f"only {found.streams} streams: {found}"
    assert found.to_device >= 0.3, f"copies to the device do not overlap: {found}"
    assert found.to_host >= 0.3, f"copies to the host do not overlap: {found}"
    return str(found)


# Two ranks on one GPU


def assert_as_one_process(
    place: Place, face: Face, choice: str, named: str, tolerance: float = 1e-5, **how: Any
) -> str:
    before = fullshard.set_default_comm(choice)
    with exact(place):
        alone = place.model()
        model = face(copy.deepcopy(alone))
        fullshard.set_default_comm(before)
        if isinstance(model, fullshard.FSDPModule):
            description = str(fullshard.describe(model))
            assert named in description, description
        expected = train(place, alone, whole_batch=True, **how)
        losses = mean_over_ranks(place, train(place, model, **how))
        difference = largest_difference(values(alone), values(model))
    loss_difference = max(abs(a - b) for a, b in zip(expected, losses, strict=True))
    text = f"losses differ by {loss_difference:.1e}, parameters by {difference:.1e}"
    assert max(loss_difference, difference) <= tolerance, text
    return text


for _name, _face in FACES.items():

    @check(f"two-ranks-peer-memory-{_name}", ranks=2, backend="gloo")
    def _peers(place: Place, face: Face = _face) -> str:
        return assert_as_one_process(place, face, "peer_memory", "peer memory")

    @check(f"two-ranks-gloo-{_name}", ranks=2, backend="gloo")
    def _gloo(place: Place, face: Face = _face) -> str:
        return assert_as_one_process(place, face, "process_group", "process group (gloo)")


@check("two-ranks-auto-is-peer-memory", ranks=2, backend="gloo")
def _auto(place: Place) -> str:
    return assert_as_one_process(place, shard, "auto", "peer memory")


@check("two-ranks-auto-under-nccl", ranks=2, backend="nccl", needs_cuda=True)
def _auto_under_nccl(place: Place) -> str:
    """NCCL refuses two ranks of a host on one GPU: nothing in a step may call it."""
    model = shard(place.model())
    description = str(fullshard.describe(model))
    assert "peer memory" in description, description
    losses = train(place, model)
    return f"losses {losses}"


@check("two-ranks-peer-memory-mixed", ranks=2, backend="gloo")
def _peers_mixed(place: Place) -> str:
    return assert_as_one_process(
        place, lambda m: shard(m, mp_policy=MIXED), "peer_memory", "peer memory", tolerance=3e-2
    )


@check("two-ranks-peer-memory-accumulate", ranks=2, backend="gloo")
def _peers_accumulate(place: Place) -> str:
    return assert_as_one_process(place, shard, "peer_memory", "peer memory", num_microbatches=2)


@check("two-ranks-peer-memory-clip", ranks=2, backend="gloo")
def _peers_clip(place: Place) -> str:
    return assert_as_one_process(place, shard, "peer_memory", "peer memory", max_norm=0.1)


@check("two-ranks-peer-memory-uneven", ranks=2, backend="gloo")
def _peers_uneven(place: Place) -> str:
    with exact(place):
        torch.manual_seed(0)
        alone = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5)).to(place.device)
        model: Any = copy.deepcopy(alone)
        fullshard.set_default_comm("peer_memory")
        for layer in model:
            if isinstance(layer, nn.Linear):
                fullshard.fully_shard(layer)
        fullshard.fully_shard(model)
        generator = torch.Generator().manual_seed(3)
        batch = torch.randn(8, 7, generator=generator).to(place.device)
        alone(batch).square().mean().backward()
        model(batch.chunk(2)[place.rank]).square().mean().backward()
        norms = clip(alone, 1.0), clip(model, 1.0)
    assert abs(float(norms[0]) - float(norms[1])) < 1e-5, norms
    return f"gradient norm {float(norms[0]):.6f}"


@check("two-ranks-peer-memory-no-device-wait", ranks=2, backend="gloo", needs_cuda=True)
def _peers_no_sync(place: Place) -> str:
    fullshard.set_default_comm("peer_memory")
    return assert_no_sync(place, shard(place.model(), mp_policy=MIXED), 0)


@check("two-ranks-peer-memory-late-lanes", ranks=2, backend="gloo", needs_cuda=True)
def _peers_late(place: Place) -> str:
    fullshard.set_default_comm("peer_memory")
    return assert_order(place, lambda model: shard(model, mp_policy=MIXED))
