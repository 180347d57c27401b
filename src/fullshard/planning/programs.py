"""Print what a search found as a program: `fully_shard` on a model, the backwards of a step, and how to start it."""

import inspect
import re
from collections.abc import Iterator, Sequence

from fullshard.plan.workload import Workload
from fullshard.planning.choices import WHOLE, Choice, layers_of
from fullshard.planning.recomputing import selective_contexts
from fullshard.planning.setup import TrainingSetup

_OFFLOADS = {
    "optimizer": 'PlacementPolicy(optimizer="host")',
    "params": 'PlacementPolicy(parameters="host", optimizer="host")',
}

_CHECKPOINT_IMPORTS = {
    "none": [],
    "full": ["from torch.utils.checkpoint import checkpoint"],
    "selective": [
        "from torch.utils.checkpoint import (",
        "    CheckpointPolicy,",
        "    checkpoint,",
        "    create_selective_checkpoint_contexts,",
        ")",
    ],
}


def program_of(
    choice: Choice, unsharded: Sequence[str], setup: TrainingSetup, workload: Workload
) -> str:
    """Return Python with `shard(model)` and `backward(model, micro_batches, loss_of)`.

    unsharded: units that stay whole after forward. workload: with units of one layer, whose paths the program names.
    """
    layers = [workload.units[unit].name for unit in layers_of(workload)]
    layers = layers or [unit.name for unit in workload.units[:0:-1]]  # those within others first
    streams = choice.offload == "optimizer"
    names = ["MixedPrecisionPolicy", "PlacementPolicy", "fully_shard", "stream_state"]
    used = [True, choice.offload != "none", True, streams]
    policy = setup.precision
    options = f"mp_policy=MixedPrecisionPolicy({policy.param_dtype}, {policy.reduce_dtype})"
    if choice.offload != "none":
        options += f", offload_policy={_OFFLOADS[choice.offload]}"
    num = len(unsharded)
    kept = f"; {num} unit{'s' if num > 1 else ''} whole after forward" if num else ""
    how = choice.checkpointing
    lines = [
        f"# {choice}{kept}",
        *(["import functools"] if how != "none" else []),
        *(["from typing import Any"] if how == "selective" else []),
        *([""] if how != "none" else []),
        "import torch",
        "from torch.distributed.device_mesh import init_device_mesh",
        *_CHECKPOINT_IMPORTS[how],
        "",
        f"from fullshard import {', '.join(n for n, is_used in zip(names, used, strict=True) if is_used)}",
    ]
    if how == "selective":
        lines += ["", "", *inspect.getsource(selective_contexts).splitlines()]
    lines += [
        *("", ""),
        f'def shard(model, device="{"cpu" if setup.is_home else "cuda"}"):',
        *([f"    model.to({setup.stored})"] if setup.stored is not None else []),
        f"    mesh = init_device_mesh(device, {_mesh(choice)})",
        f"    options = dict(mesh=mesh, {options})",
        *_sharded(choice, unsharded, setup, layers),
        "    return fully_shard(model, **options)",
        *("", ""),
        *_backward(choice, setup),
    ]
    if streams:
        lines += [
            "",
            "",
            "def with_state_on_host(optimizer):",
            "    return stream_state(optimizer)",
        ]
    return "\n".join(lines) + "\n"


def _mesh(choice: Choice) -> str:
    if choice.replicate_size > 1:
        shape = f"({choice.replicate_size}, {choice.shard_size})"
        return f'{shape}, mesh_dim_names=("replicate", "shard")'
    return f'({choice.shard_size},), mesh_dim_names=("shard",)'


def _sharded(
    choice: Choice, unsharded: Sequence[str], setup: TrainingSetup, layers: Sequence[str]
) -> Iterator[str]:
    """Yield what comes before the root."""
    is_whole, size = choice.layers_per_unit == WHOLE, choice.layers_per_unit
    changes = choice.checkpointing != "none" or setup.is_compiled
    if not layers or (is_whole and not changes):
        return
    yield f"    layers = {_listed(layers)}"
    if choice.checkpointing != "none":
        context = ", context_fn=selective_contexts" if choice.checkpointing == "selective" else ""
        yield "    for layer in layers:"
        yield f"        run = functools.partial(checkpoint, layer.forward, use_reentrant=False{context})"
        yield "        layer.forward = run"
    if setup.is_compiled:
        yield "    for layer in layers:"
        yield "        layer.compile()"
    if is_whole:
        return
    if size > 1:
        yield f"    units = [layers[n : n + {size}] for n in range(0, len(layers), {size})]"
    units, option = "layers" if size == 1 else "units", str(choice.reshard_after_forward)
    if unsharded:
        names = [", ".join(layers[n : n + size]) for n in range(0, len(layers), size)]
        where = _others(sorted(names.index(name) for name in unsharded), len(names))
        option = where if option == "True" else f"{option} if {where} else False"
        yield f"    for number, unit in enumerate({units}):"
    else:
        yield f"    for unit in {units}:"
    yield f"        fully_shard(unit, **options, reshard_after_forward={option})"


def _others(numbers: Sequence[int], num: int) -> str:
    """Return a condition that is true for all numbers but these."""
    if [*numbers] == [*range(numbers[0], num)]:
        return f"number < {numbers[0]}"
    return f"number not in {[*numbers]}"


def _listed(layers: Sequence[str]) -> str:
    """Return an expression for the modules with these paths."""
    matches = [re.fullmatch(r"(.*\.)?(\d+)", name) for name in layers]
    prefixes = {match[1] or "" if match else None for match in matches}
    numbers = [int(match[2]) for match in matches if match]
    if len(prefixes) == 1 and numbers == [*range(len(layers))]:
        (prefix,) = prefixes
        return f'[model.get_submodule(f"{prefix}{{n}}") for n in range({len(layers)})]'
    return f"[model.get_submodule(path) for path in {[*layers]}]"


def _backward(choice: Choice, setup: TrainingSetup) -> Iterator[str]:
    num = choice.num_microbatches
    puts_off = setup.sums_replicas_last and choice.replicate_size > 1
    option = "requires_all_reduce" if choice.reduces_each else "requires_gradient_sync"
    yield "def backward(model, micro_batches, loss_of):"
    yield f"    # each rank has {num} a step, of {choice.sequences} sequences each; the optimizer's step follows"
    if num > 1 and (puts_off or not choice.reduces_each):
        yield "    for number, batch in enumerate(micro_batches, 1):"
        yield f"        model.set_{option}(number == {num})"
    else:
        yield "    for batch in micro_batches:"
    loss = "loss_of(model, batch)"
    yield f"        {loss if num == 1 else f'({loss} / {num})'}.backward()"


def launch_line(setup: TrainingSetup, script: str = "train.py") -> str:
    """Return the shell line that starts a program on all ranks, to be run on each host."""
    per_host = min(setup.ranks, setup.machine.per_host)
    if setup.hosts == 1:
        return f"torchrun --nproc-per-node {per_host} {script}"
    return (
        f"torchrun --nnodes {setup.hosts} --nproc-per-node {per_host} --rdzv-backend c10d "
        f"--rdzv-endpoint host1:29500 {script}"
    )
