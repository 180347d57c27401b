"""What has to hold over NCCL: ranks on one GPU that it takes for ranks of several hosts.

    python -m tests.gpu --only nccl

Checks named "hosts" also take away what ranks of one host share, so that they agree on their order in the store.
"""

from __future__ import annotations

import copy
import gc
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from bench.overlap import collectives_issued, lane_of
from fullshard import host
from fullshard.models.llama import Llama
from fullshard.models.sizes import LlamaConfig
from tests.gpu.checks import (
    BF16,
    FACES,
    FP32,
    MIXED,
    OFFLOAD,
    Face,
    assert_as_one_process,
    assert_no_sync,
    assert_order,
    check,
    traced,
)
from tests.gpu.place import (
    SMALL,
    Place,
    exact,
    largest_difference,
    loss_of,
    make_optimizer,
    shard,
    values,
    wrap,
)


def _assert_parity(place: Place, face: Face, tolerance: float = 1e-5, **how: Any) -> str:
    named = f"process group ({'nccl' if place.is_cuda else 'gloo'})"
    return assert_as_one_process(place, face, "process_group", named, tolerance, **how)


def _part_hosts(place: Place) -> None:
    """Let this rank share no memory with others."""
    host.identity = lambda: f"host {place.rank}"


def _recomputing(model: Llama) -> nn.Module:
    model.recompute_layers(True)
    return shard(model)


def _over_replicas(model: Llama) -> nn.Module:
    device_type = next(model.parameters()).device.type
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(model, mesh=mesh)


_Options = dict[str, Any]
_PARITY: dict[str, tuple[Face, _Options]] = {
    **{name: (face, {}) for name, face in FACES.items()},
    "mixed": (lambda model: shard(model, mp_policy=MIXED), {"tolerance": 3e-2}),
    "accumulate": (shard, {"num_microbatches": 2}),
    "accumulate-reduced": (shard, {"num_microbatches": 2, "syncs_every_time": True}),
    "clip": (shard, {"max_norm": 0.1}),
    "clip-wrapper": (lambda model: wrap(model, use_orig_params=True), {"max_norm": 0.1}),
    "checkpointing": (_recomputing, {}),
    "kept-whole": (lambda model: shard(model, reshard_after_forward=False), {}),
    "offload": (lambda model: shard(model, offload_policy=OFFLOAD), {}),
}

for _name, (_face, _how) in _PARITY.items():

    @check(f"two-ranks-nccl-{_name}", ranks=2, is_apart=True)
    def _parity(place: Place, face: Face = _face, how: _Options = _how) -> str:
        return _assert_parity(place, face, **how)


for _name in ("fully_shard", "wrapper-flat", "clip", "mixed"):
    _face, _how = _PARITY[_name]

    @check(f"two-ranks-nccl-hosts-{_name}", ranks=2, is_apart=True)
    def _hosts(place: Place, face: Face = _face, how: _Options = _how) -> str:
        _part_hosts(place)
        return _assert_parity(place, face, **how)


@check("four-ranks-nccl-replicas", ranks=4, is_apart=True)
def _replicas(place: Place) -> str:
    return _assert_parity(place, _over_replicas)


for _name, _steps in {"nccl": (), "nccl-hosts": (_part_hosts,)}.items():

    @check(f"two-ranks-{_name}-no-host-sync", ranks=2, needs_cuda=True, is_apart=True)
    def _no_sync(place: Place, steps: tuple[Callable[[Place], None], ...] = _steps) -> str:
        for step in steps:
            step(place)
        fullshard.set_default_comm("process_group")
        return assert_no_sync(place, shard(place.model(), mp_policy=MIXED), 0)


@check("two-ranks-nccl-late-lanes", ranks=2, needs_cuda=True, is_apart=True)
def _late(place: Place) -> str:
    fullshard.set_default_comm("process_group")
    return assert_order(place, lambda model: shard(model, mp_policy=MIXED))


@check("four-ranks-nccl-replicas-late-lanes", ranks=4, needs_cuda=True, is_apart=True)
def _late_replicas(place: Place) -> str:
    fullshard.set_default_comm("process_group")
    return assert_order(place, _over_replicas)


@check("two-ranks-nccl-no-host-sync-20-times", ranks=2, is_apart=True)
def _no_sync_again(place: Place) -> str:
    """The coalesced reduce-scatter in which a rank died once, 20 models in one process group."""
    fullshard.set_default_comm("process_group")
    for _ in range(20):
        said = assert_no_sync(place, shard(place.model(), mp_policy=MIXED), 0)
    return f"20 times {said}"


def _sharded(library: Any, model: Llama, compute_dtype: torch.dtype | None) -> nn.Module:
    options: _Options = {}
    if compute_dtype is not None:
        options["mp_policy"] = library.MixedPrecisionPolicy(compute_dtype, FP32)
    for layer in model.model.layers:
        library.fully_shard(layer, **options)
    sharded: nn.Module = library.fully_shard(model, **options)
    return sharded


class _Trained(NamedTuple):
    """Losses of some steps; on a GPU the peak of memory in the last three, in MB above what was there."""

    losses: list[float]
    peak_mb: float


def _untouched(_: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Training:
    """How both engines train. prepare: the model, before it is sharded. after_step: of the optimizer."""

    compute_dtype: torch.dtype | None = None
    prepare: Callable[[Llama], None] = _untouched
    after_step: Callable[[nn.Module], None] = _untouched
    config: LlamaConfig = SMALL

    def run(self, place: Place, library: Any) -> _Trained:
        gc.collect()
        floor = torch.cuda.memory_allocated() if place.is_cuda else 0
        model = place.model(self.config)
        self.prepare(model)
        sharded = _sharded(library, model, self.compute_dtype)
        optimizer = make_optimizer(sharded)
        losses = []
        for step in range(6):
            if place.is_cuda and step == 3:
                torch.cuda.reset_peak_memory_stats()
            loss = loss_of(sharded, place.own(place.tokens(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.after_step(sharded)
            losses.append(float(loss.detach()))
        peak = torch.cuda.max_memory_allocated() if place.is_cuda else 0
        return _Trained(losses, (peak - floor) / 1e6)

    def assert_as_fsdp2(self, place: Place) -> str:
        """Losses are those of PyTorch's FSDP2, and memory is not more."""
        fullshard.set_default_comm("process_group")
        with exact(place):
            self.run(place, fsdp)  # so that cuBLAS has its memory
            theirs, ours = self.run(place, fsdp), self.run(place, fullshard)
        assert ours.losses == theirs.losses, f"{ours} is not {theirs}"
        text = f"peak {ours.peak_mb:.1f} MB, of FSDP2 {theirs.peak_mb:.1f} MB"
        assert ours.peak_mb <= 1.05 * theirs.peak_mb + 1.0, text
        return f"losses are equal in every bit; {text}"


for _name, _dtype in {"fp32": None, "mixed": BF16}.items():
    check(f"two-ranks-nccl-as-fsdp2-{_name}", ranks=2, is_apart=True)(
        Training(_dtype).assert_as_fsdp2
    )


# A rank's shards of a layer are 8 MB, so that what is of a fixed size counts little.
_WIDE = LlamaConfig(512, 512, 2048, 8, 8, 4)


@check("two-ranks-nccl-peak-memory", ranks=2, needs_cuda=True, is_apart=True)
def _peak_memory(place: Place) -> str:
    """Memory is not above FSDP2's; both train in turn. On the CPU buffers are kept, by choice: `bench.memory`."""
    fullshard.set_default_comm("process_group")
    training = Training(BF16, config=_WIDE)
    training.run(place, fsdp)  # so that cuBLAS has its memory
    theirs, ours = training.run(place, fsdp).peak_mb, training.run(place, fullshard).peak_mb
    text = f"peak {ours:.1f} MB, of FSDP2 {theirs:.1f} MB: {ours / theirs:.3f} of it"
    # The allocator's blocks are a little larger than what is asked for.
    assert ours <= 1.005 * theirs, text
    return text


@check("two-ranks-nccl-order-of-lanes", ranks=2, is_apart=True, is_timed=True)
def _order_of_lanes(place: Place) -> str:
    """A unit is gathered beside the compute of the one before, and reduced beside that of the next, both ways.

    The host's order is seen on every device; streams, and what ran beside what, on a GPU.
    """
    fullshard.set_default_comm("process_group")
    config = LlamaConfig(4096, 768, 2560, 8, 12, 4) if place.is_cuda else SMALL
    length = 1025 if place.is_cuda else 65
    tokens = torch.randint(config.vocab_size, (8, length), device=place.device)
    traces = {}
    for name, library in {"FSDP2": fsdp, "fullshard": fullshard}.items():
        model: Any = _sharded(library, place.model(config), BF16)
        layers: list[Any] = list(model.model.layers)
        for one, other in itertools.pairwise(layers):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        for _ in range(3):
            loss_of(model, tokens).backward()
            model.zero_grad()
        traces[name] = traced(place, lambda model=model: loss_of(model, tokens).backward())
    _assert_issued_early(traces["fullshard"], len(layers))
    if not place.is_cuda:
        return "the host issues collectives before the products that they run beside"
    found = {
        name: (lane_of(trace, "AllGather"), lane_of(trace, "ReduceScatter"))
        for name, trace in traces.items()
    }
    gathers, reductions = found["fullshard"]
    text = str(found)
    assert len(gathers.streams) == len(reductions.streams) == 1, text
    assert gathers.streams.isdisjoint(reductions.streams), text
    # Two gathers a layer; the first has nothing to run beside, nor has the last reduction.
    assert gathers.num_beside >= len(layers), text
    assert reductions.num_beside >= len(layers) - 1, text
    return text


def _assert_issued_early(trace: dict[str, Any], num_layers: int) -> None:
    gathers = [each for each in collectives_issued(trace, "all_gather") if "layers." in each.label]
    reductions = [
        each for each in collectives_issued(trace, "reduce_scatter") if "layers." in each.label
    ]
    forward, backward = gathers[:num_layers], gathers[num_layers:]
    for each in (forward, reversed(backward), reversed(reductions)):
        labels = [one.label.rpartition(" ")[2] for one in each]
        assert labels == [f"(model.layers.{i})" for i in range(num_layers)], labels
    # The first of a direction has no unit before it; the last reduction is waited for at once.
    early = [*forward[1:], *backward[1:], *reductions[:-1]]
    assert all(one.num_products for one in early), early


@check("two-ranks-nccl-checkpoint", ranks=2, is_apart=True)
def _checkpoint(place: Place) -> str:
    fullshard.set_default_comm("process_group")
    model = shard(place.model(), mp_policy=MIXED)
    optimizer = make_optimizer(model)
    loss_of(model, place.own(place.tokens(0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    folders: list[Any] = [tempfile.mkdtemp() if place.rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    path = Path(folders[0]) / "step-1"
    fullshard.save_checkpoint(path, model, optimizer)
    other = shard(place.model(), mp_policy=MIXED)
    other_optimizer = make_optimizer(other)
    assert largest_difference(values(model), values(other)) > 0.0
    fullshard.load_checkpoint(path, other, other_optimizer)
    assert largest_difference(values(model), values(other)) == 0.0
    streamed = {name: p.full_tensor().cpu() for name, p in other.named_parameters()}  # type: ignore[attr-defined]
    assert largest_difference(values(model), streamed) == 0.0
    losses = []
    for each, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        losses.append(float(loss_of(each, place.own(place.tokens(1))).detach()))
        loss_of(each, place.own(place.tokens(1))).backward()
        its_optimizer.step()
        losses.append(float(loss_of(each, place.own(place.tokens(2))).detach()))
    assert losses[:2] == losses[2:], losses
    return f"losses {losses[:2]}, the same after loading"


@check("two-ranks-nccl-wrapper-state", ranks=2, is_apart=True)
def _wrapper_state(place: Place) -> str:
    fullshard.set_default_comm("process_group")
    alone = place.model()
    model = wrap(copy.deepcopy(alone), use_orig_params=True)
    kind = fullshard.StateDictType.FULL_STATE_DICT
    with fullshard.FullyShardedDataParallel.state_dict_type(model, kind):
        state = model.state_dict()
    assert largest_difference({n: v.cpu() for n, v in state.items()}, values(alone)) == 0.0
    return f"{len(state)} tensors"


@check("two-ranks-nccl-uneven-batches", ranks=2, is_apart=True)
def _uneven_batches(place: Place) -> str:
    """A vote in the step ends an epoch together."""
    fullshard.set_default_comm("process_group")
    model = shard(place.model())
    count = 0
    for tokens in fullshard.join([place.own(place.tokens(step)) for step in range(2 + place.rank)]):
        loss_of(model, tokens).backward()
        count += 1
    assert count == 2, f"{count} steps"
    return f"{count} steps on ranks of 2 and 3 batches"
