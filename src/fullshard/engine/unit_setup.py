"""A unit at rest: its parameters, mesh, communication and options, and how these change.

How it gathers and frees parameters is in `unit`.
"""

import abc
import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.interface import Comm
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.comm.select import leave_peer_memory, select_comm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.engine.gradients.reduction import UnitGradients
from fullshard.engine.params.managed import ManagedParameter, ShardHolder
from fullshard.engine.params.of_unit import UnitParams
from fullshard.engine.runtime import Runtime, outside_transforms
from fullshard.engine.unit_mesh import UnitMesh
from fullshard.errors import CommError, StateError
from fullshard.plan.layout import UnitLayout
from fullshard.policies import UnitConfig

logger = logging.getLogger("fullshard")


class UnitComms(NamedTuple):
    """How a unit communicates over its shard axis and over its replicate axis."""

    shard: Comm
    replicate: Comm


def choose_comms(mesh: UnitMesh, device: torch.device, config: UnitConfig) -> UnitComms:
    """Choose how a unit communicates, before anything is changed: raises CommError.

    Every rank has to call it.
    """
    shards_on = torch.device("cpu") if config.offload_to_cpu else device
    return UnitComms(
        select_comm(
            mesh.shard_group,
            device,
            config.comm,
            shards_on=shards_on,
            replicas=mesh.replicate_group,
        ),
        select_comm(mesh.replicate_group, device, config.comm),
    )


class UnitSetup(abc.ABC):
    """What a unit consists of.

    comm, replicate_comm: over the shard axis and over the replicate axis.
    reduce_group: another group of the same ranks, over which gradients are reduce-scattered.
    """

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        mesh: UnitMesh,
        device: torch.device,
        config: UnitConfig,
        layout: UnitLayout | None = None,
        comms: UnitComms | None = None,
    ) -> None:
        """Make a unit, and its memory unless parameters are on the meta device.

        layout: a flat one, which stays for good; None makes one by rows.
        comms: what `choose_comms` returned for it; None chooses.
        """
        self.mesh = mesh
        self.device = device
        self.config = config
        self.name = ""
        self.is_root = False
        self.runtime = Runtime.of(device)
        self._scratch = self.runtime.scratch  # held, so that it goes with the last unit
        comms = comms or choose_comms(mesh, device, config)
        self.comm, self.replicate_comm = comms.shard, comms.replicate
        self.reduce_group: dist.ProcessGroup | None = None
        self.gradients = UnitGradients(mesh.plan, self.comm, self.replicate_comm, self.runtime)
        self.params = UnitParams(params, mesh, device, layout)

    @abc.abstractmethod
    def settle(self) -> None:
        """Come to rest, sharded."""

    # Parameters and their memory

    def plan_layout(self, params: Sequence[ManagedParameter] | None = None) -> UnitLayout:
        """Plan where the plain parameters lie, or would if the unit had these."""
        if params is None:
            plain = self.params.plain
        else:
            plain = [param for param in params if not param.is_extended]
        return self.params.layout(self.comm, self.config.mp_policy, plain)

    def set_params(self, params: Sequence[ManagedParameter]) -> None:
        """Take these parameters, and allocate their memory unless some are still on meta."""
        self.params.take(params)
        self._adopt_unless_on_meta()

    def _adopt_unless_on_meta(self) -> None:
        if not self.params.on_meta:
            self.adopt()

    @outside_transforms
    def adopt(self) -> None:
        """Bring the shards into the unit's memory, wherever they are now.

        A change of dtype makes a new layout. Raises StateError for parameters on the meta device or
        another one than the unit keeps its shards on, and while gradients wait for an all-reduce.
        """
        params = self.params
        params.follow_replacements()
        if on_meta := params.on_meta:
            raise StateError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta} in {self.label}. Call "
                f"model.to_empty(device={str(self.device)!r}), then initialise every value."
            )
        if not params.is_split:
            self.settle()
            params.split()
        layout = self.plan_layout()
        if params.buffers is None or params.buffers.layout != layout:
            self.settle()
            self._refuse_to_change("parameters")
            self.gradients.unreduced.replace()
            try:
                params.allocate(layout, self.comm, self.runtime, self.config)
            except UnavailableError as reason:
                self.leave(self.comm, reason)  # which adopts them with another layout
                return
            specs = [param.spec(self.config.mp_policy) for param in params]
            self.gradients.buckets.bind(params, specs, layout if params.is_flat else None)
        for holder in params.holders:
            self._check_device(holder)
        params.move_shards()

    def _check_device(self, holder: ShardHolder) -> None:
        expected = torch.device("cpu") if self.config.offload_to_cpu else self.device
        if holder.local.device.type != expected.type:
            names = ", ".join(param.name for param in self.params if param.holder is holder)
            offloaded = (
                "FSDP parameters should be materialized on CPU when enabling CPU offloading. "
                if self.config.offload_to_cpu
                else ""
            )
            raise StateError(
                f"{offloaded}{names} ({self.label}): the shard is on {holder.local.device}, "
                f"but the unit keeps its shards on {expected}. Load a state dict of that device, "
                f"or call model.to_empty(device={expected.type!r}) and initialise."
            )

    def _refuse_to_change(self, what: str) -> None:
        """Raise StateError if sums wait for their all-reduce, which a change would lose."""
        if self.gradients.has_partial:
            raise StateError(
                f"{self.label}: sums of earlier backwards still wait for their all-reduce. Change "
                f"{what} between iterations."
            )

    # Communication

    def use_comm(self, comm: Comm) -> None:
        """Communicate like this over the shard axis from now on."""
        self.settle()
        self._refuse_to_change("the communication")
        self.comm = comm
        self.gradients.buckets.use_comms(shard=self._reduce_comm)
        self.set_params(self.params.all)

    def reduce_over(self, group: dist.ProcessGroup | None) -> None:
        """Reduce-scatter over another process group of the same ranks, or over the same again."""
        self.reduce_group = group
        self.gradients.buckets.use_comms(shard=self._reduce_comm)

    @property
    def _reduce_comm(self) -> Comm:
        if self.reduce_group is None or not isinstance(self.comm, ProcessGroupComm):
            return self.comm
        return self.comm.over(self.reduce_group)

    def leave(self, comm: Comm, reason: UnavailableError) -> None:
        """Use process groups from now on where it was this, whose ranks can share no more memory.

        Every rank has to call it. Raises CommError if peer memory was asked for, and for shards that
        other groups have replicas of: those go on as they are, and do not fit what this one would do.
        """
        choice, device = self.config.comm, self.device
        if comm is self.replicate_comm:
            assert self.mesh.replicate_group is not None
            self.replicate_comm = leave_peer_memory(
                self.mesh.replicate_group, device, choice, reason
            )
            self.gradients.buckets.use_comms(replicate=self.replicate_comm)
        if comm is self.comm:
            assert self.mesh.shard_group is not None
            if self.mesh.plan.replicate_size > 1:
                raise CommError(
                    f"{self.label} (rank {dist.get_rank()}): {reason}. Raise the limit, or use "
                    "set_default_comm('process_group')."
                ) from reason
            self.use_comm(leave_peer_memory(self.mesh.shard_group, device, choice, reason))

    # Options and names

    def configure(self, **changes: object) -> None:
        """Replace options of the unit's configuration."""
        self.config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]
        if "mp_policy" in changes:
            self.gradients.unreduced.replace()

    def become_root(self) -> None:
        """Be the unit that runs first and last."""
        self.is_root = True
        if self.config.cast_root_inputs is not None:
            policy = dataclasses.replace(
                self.config.mp_policy, cast_forward_inputs=self.config.cast_root_inputs
            )
            self.configure(mp_policy=policy)

    @property
    def keeps_after_forward(self) -> bool:
        """Whether parameters stay unsharded from forward to backward."""
        option = self.config.reshard_after_forward
        return self.is_root if option is None else option is False

    @property
    def keeps_originals(self) -> bool:
        """Whether users train the parameters that they built the modules with."""
        return self.params.is_flat and self.params.flat is None

    def set_name(self, name: str) -> None:
        """Be called this from now on: the path of the unit's module, empty for the root."""
        self.name = name
        self.gradients.set_label(self.path)

    @property
    def path(self) -> str:
        """What it is called in messages and, the same on every rank, in the ledger."""
        return self.name or "root"

    @property
    def label(self) -> str:
        """Its path and this rank, for messages."""
        return f"{self.path} (rank {dist.get_rank()})"


def comms_of(units: Sequence[UnitSetup]) -> list[Comm]:
    """Return every communication the units use, once each."""
    return list(dict.fromkeys(comm for u in units for comm in (u.comm, u.replicate_comm)))


def move_parameters(moves: Sequence[tuple[ManagedParameter, UnitSetup, UnitSetup]]) -> None:
    """Hand over parameters that modules of several units share: each, from one unit to another.

    Each unit is laid out and allocated once, however many parameters it gives or gets.
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
    for unit in new:
        unit.settle()
    for unit, params in new.items():
        unit.set_params(list(params))
