"""What has to hold over NCCL: ranks on one GPU that it takes for ranks of several hosts.

    python -m tests.gpu --only nccl

Checks named "hosts" also take away what ranks of one host share, so that they agree on their order in the store.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import host
from fullshard.models.llama import Llama
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
)
from tests.gpu.place import (
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


def _untouched(_: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Training:
    """How both engines train. prepare: the model, before it is sharded. after_step: of the optimizer."""

    compute_dtype: torch.dtype | None = None
    prepare: Callable[[Llama], None] = _untouched
    after_step: Callable[[nn.Module], None] = _untouched

    def run(self, place: Place, library: Any) -> list[float]:
        """Return the losses of some steps, and on a GPU the peak of memory last, in MB above what was there."""
        gc.collect()
        floor = torch.cuda.memory_allocated() if place.is_cuda else 0
        options: _Options = {}
        if self.compute_dtype is not None:
            options["mp_policy"] = library.MixedPrecisionPolicy(self.compute_dtype, FP32)
        model = place.model()
        self.prepare(model)
        for layer in model.model.layers:
            library.fully_shard(layer, **options)
        library.fully_shard(model, **options)
        optimizer = make_optimizer(model)
        losses = []
        for step in range(6):
            if place.is_cuda and step == 3:
                torch.cuda.reset_peak_memory_stats()
            loss = loss_of(model, place.own(place.tokens(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.after_step(model)
            losses.append(float(loss.detach()))
        peak = torch.cuda.max_memory_allocated() if place.is_cuda else 0
        return [*losses, (peak - floor) / 1e6]

    def assert_as_fsdp2(self, place: Place) -> str:
        """Losses are those of PyTorch's FSDP2, and memory is not more."""
        fullshard.set_default_comm("process_group")
        with exact(place):
            self.run(place, fsdp)  # so that cuBLAS has its memory
            *theirs, their_peak = self.run(place, fsdp)
            *ours, peak = self.run(place, fullshard)
        assert ours == theirs, f"{ours} is not {theirs}"
        assert peak <= 1.05 * their_peak + 1.0, f"peak of {peak} MB, of FSDP2 {their_peak} MB"
        return f"losses are equal in every bit; peak {peak:.1f} MB, of FSDP2 {their_peak:.1f} MB"


for _name, _dtype in {"fp32": None, "mixed": BF16}.items():
    check(f"two-ranks-nccl-as-fsdp2-{_name}", ranks=2, is_apart=True)(
        Training(_dtype).assert_as_fsdp2
    )


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
