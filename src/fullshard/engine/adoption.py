"""A unit's parameters brought into its memory, wherever programs have left them.

Programs replace, move and cast parameters between steps: ``to_empty()``, ``load_state_dict(assign=True)``,
``model.half()``. Another communication or another dtype asks for other memory. All that follows changes a
unit that is at rest, or brings it there.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from fullshard.comm.interface import Comm
from fullshard.comm.select import leave_peer_memory
from fullshard.comm.shared_memory import UnavailableError
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.params.unit_params import UnitParams
from fullshard.engine.runtime import outside_transforms
from fullshard.engine.unit import Unit, UnitComms, UnitPhase
from fullshard.errors import CommError, StateError
from fullshard.plan.layout import UnitLayout
from fullshard.policies import UnitConfig

logger = logging.getLogger("fullshard")


def make_unit(params: UnitParams, config: UnitConfig, comms: UnitComms) -> Unit:
    """Return a unit of these parts (see `Unit`), with memory unless parameters are on the meta device."""
    unit = Unit(params, config, comms)
    if not unit.params.on_meta:
        adopt(unit)
    return unit


def set_params(unit: Unit, params: Sequence[ManagedParameter]) -> None:
    """Replace the parameters, and allocate their memory unless some are on the meta device."""
    unit.params.take(params)
    unit.claim()
    if not unit.params.on_meta:
        adopt(unit)


@outside_transforms
def adopt(unit: Unit) -> None:
    """Bring the shards into the unit's memory, wherever they are now.

    A change of dtype makes a new layout, for which every rank has to call it.

    Raises StateError for parameters on the meta device, for shards on another device than the
    unit's, and for a new layout while gradients wait for an all-reduce.
    """
    params = unit.params
    # First, since all that follows asks the parameters for devices, dtypes and addresses.
    params.follow_replacements()
    if on_meta := params.on_meta:
        raise StateError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {on_meta} in {unit.label}. Call "
            f"model.to_empty(device={str(unit.device)!r}), then initialise every value."
        )
    if not params.is_split:
        unit.settle()  # before `split` drops the buffers that a reshard would free
        params.split()
    layout = unit.plan_layout()
    if params.buffers is None or params.buffers.layout != layout:
        unit.settle()
        _refuse_to_change(unit, "parameters")  # before the old buffers are gone
        unit.gradients.unreduced.replace()
        try:
            params.allocate(layout, unit.comm, unit.runtime, unit.config)
        except UnavailableError as reason:
            fall_back(unit, unit.comm, reason)  # calls `adopt` again, for another communication
            return
        _bind_gradients(unit, layout)
    elif unit.gradients.buckets.are_outdated(unit.config):
        _refuse_to_change(unit, "the dtypes of gradients")
        unit.gradients.unreduced.replace()
        _bind_gradients(unit, layout)
    _check_device(unit)
    params.move_shards()


def _bind_gradients(unit: Unit, layout: UnitLayout) -> None:
    specs = unit.params.specs(unit.config.mp_policy)
    flat_layout = layout if unit.is_flat else None
    unit.gradients.buckets.bind(unit.params.all, specs, unit.config, flat_layout)


def _check_device(unit: Unit) -> None:
    expected = torch.device("cpu") if unit.config.offload_to_cpu else unit.device
    if (misplaced := unit.params.find_misplaced(expected)) is None:
        return
    names, found = misplaced
    offloaded = ""
    if unit.config.offload_to_cpu:
        offloaded = "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
    raise StateError(
        f"{offloaded}{', '.join(names)} ({unit.label}): the shard is on {found}, "
        f"but the unit keeps its shards on {expected}. Load a state dict of that device, "
        f"or call model.to_empty(device={expected.type!r}) and initialise."
    )


def _refuse_to_change(unit: Unit, what: str) -> None:
    """Raise StateError if sums wait for their all-reduce: changing ``what`` would lose them."""
    if unit.gradients.has_partial:
        raise StateError(
            f"{unit.label}: sums of earlier backwards still wait for their all-reduce. Change "
            f"{what} between iterations."
        )


def use_comm(unit: Unit, comm: Comm) -> None:
    """Use another communication over the shard axis, and allocate memory for it.

    Every rank has to call it. Raises StateError while gradients wait for an all-reduce.
    """
    unit.settle()
    _refuse_to_change(unit, "the communication")
    unit.comm = comm
    unit.gradients.buckets.use_comms(shard=unit.reduce_comm)
    # The same parameters once more: the communication decides where shards lie.
    set_params(unit, unit.params.all)


def fall_back(unit: Unit, comm: Comm, reason: UnavailableError) -> None:
    """Use process groups in place of ``comm``, whose ranks can share no more memory.

    Every rank has to call it. reason: the limit that was met, for messages. Raises CommError if
    the user asked for peer memory, and if the shards have replicas: all replicas lay shards out
    in one way, and those in other groups keep theirs.
    """
    choice, device = unit.config.comm, unit.device
    if comm is unit.replicate_comm:
        assert unit.mesh.replicate_group is not None
        unit.replicate_comm = leave_peer_memory(unit.mesh.replicate_group, device, choice, reason)
        unit.gradients.buckets.use_comms(replicate=unit.replicate_comm)
    if comm is unit.comm:
        assert unit.mesh.shard_group is not None
        if unit.mesh.plan.replicate_size > 1:
            raise CommError(
                f"{unit.label} (rank {dist.get_rank()}): {reason}. Raise the limit, or use "
                "set_default_comm('process_group')."
            ) from reason
        use_comm(unit, leave_peer_memory(unit.mesh.shard_group, device, choice, reason))


def follow_changes(unit: Unit) -> None:
    """Adopt shards that others moved or replaced. Peers must not read before this is done.

    Parameters that stayed unsharded are freed if the shards were written to since.
    """
    # In this order: contents are compared with the adopted shards, and adopting copies values
    # into the unit's memory, which is no write that the pass has to answer for.
    follow_moves(unit)
    if unit.is_outdated:
        unit.reshard()
    if unit.params.is_in_place:
        unit.watch.begin()


def keep_strays(units: Iterable[Unit]) -> None:
    """Keep the values of pieces that lie where others belong, also other units', before one is moved home."""
    moved = [unit.params for unit in units if unit.is_flat and unit.watch.has_new_pieces]
    homes = {storage for params in moved for storage in params.shard_storages}
    for params in moved:
        params.keep_strays(homes)


def follow_moves(unit: Unit) -> None:
    """Adopt shards that others moved or replaced, and end a gather that no pass used."""
    if unit.is_whole:
        return  # the whole parameters are registered, which are no replacements
    params = unit.params
    if unit.phase is UnitPhase.GATHERING and not unit.is_held:
        unit.settle()  # gathered early for a pass that left the unit out; a step may have come
    if params.all and unit.watch.have_moved:
        adopt(unit)


def move_parameters(moves: Sequence[tuple[ManagedParameter, Unit, Unit]]) -> None:
    """Move tied parameters between units; each entry is (parameter, from, to).

    Each unit is laid out and allocated once, however many parameters it gives or gets. Every rank
    has to call it. Warns of each move in the log.
    """
    new = {unit: dict.fromkeys(unit.params) for _, *both in moves for unit in both}
    for param, unit, other in moves:
        logger.warning(
            "%s are one tied parameter: it moves from unit %r to %r, their lowest common unit.",
            " and ".join(param.names),
            unit.name,
            other.name or "root",
        )
        del new[unit][param]
        new[other][param] = None
    # All come to rest before the first takes over parameters: a reshard registers and frees by the
    # parameters that the unit has.
    for unit in new:
        unit.settle()
    for unit, params in new.items():
        set_params(unit, list(params))
