"""A unit at rest: its parameters, mesh, communication and options, and changes to these.

Gathering and freeing parameters is in `unit`.
"""

import abc
import dataclasses
import logging
import weakref
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
    """The communication of a unit over its shard axis and over its replicate axis."""

    shard: Comm
    replicate: Comm


def choose_comms(mesh: UnitMesh, device: torch.device, config: UnitConfig) -> UnitComms:
    """Choose how a unit communicates. Every rank has to call it.

    Raises CommError if the communication that was asked for cannot be had. Call it before anything
    is changed, so that the error leaves the module as it was.
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
    """The parts of a unit, and the methods that change them while it is at rest.

    comm, replicate_comm: the communication over the shard axis and over the replicate axis.
    reduce_group: another process group of the same ranks, for reduce-scatters; None for the same.
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
        """Make a unit; subclasses allocate its memory, unless parameters are on the meta device.

        layout: a flat layout, which never changes; None plans one by rows.
        comms: the result of `choose_comms` for this unit; None chooses now.
        """
        self.mesh = mesh
        self.device = device
        self.config = config
        self.name = ""
        self.entered_as = "root"  # in the flight record, the same on every rank
        self.is_root = False
        self.runtime = Runtime.of(device)
        self._scratch = self.runtime.scratch  # held, so that it is freed with the last unit
        comms = comms or choose_comms(mesh, device, config)
        self.comm, self.replicate_comm = comms.shard, comms.replicate
        self.reduce_group: dist.ProcessGroup | None = None
        self.gradients = UnitGradients(mesh.plan, self.comm, self.replicate_comm, self.runtime)
        self.params = UnitParams(params, mesh, device, layout)
        self._claim()

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait for a gather under way, and reshard."""

    @abc.abstractmethod
    def gradient_arrives(self, param: ManagedParameter) -> None:
        """Take note that autograd has accumulated a gradient on a parameter."""

    # Parameters and their memory

    def plan_layout(self, params: Sequence[ManagedParameter] | None = None) -> UnitLayout:
        """Plan the memory of the unit's plain parameters, or of those among ``params`` instead."""
        if params is None:
            plain = self.params.plain
        else:
            plain = [param for param in params if not param.is_extended]
        return self.params.layout(self.comm, self.config.mp_policy, plain)

    def set_params(self, params: Sequence[ManagedParameter]) -> None:
        """Replace the parameters, and allocate their memory unless some are on the meta device."""
        self.params.take(params)
        self._claim()
        self._adopt_unless_on_meta()

    def _claim(self) -> None:
        """Let the parameters know whose they are."""
        for param in self.params:
            param.unit = weakref.ref(self)

    def _adopt_unless_on_meta(self) -> None:
        if not self.params.on_meta:
            self.adopt()

    @outside_transforms
    def adopt(self) -> None:
        """Bring the shards into the unit's memory, wherever they are now.

        A change of dtype makes a new layout, for which every rank has to call it.

        Raises StateError for parameters on the meta device, for shards on another device than the
        unit's, and for a new layout while gradients wait for an all-reduce.
        """
        params = self.params
        # First, since all that follows asks the parameters for devices, dtypes and addresses.
        params.follow_replacements()
        if on_meta := params.on_meta:
            raise StateError(
                "FSDP parameters should be materialized from meta device before training, but the "
                f"following were still on meta device: {on_meta} in {self.label}. Call "
                f"model.to_empty(device={str(self.device)!r}), then initialise every value."
            )
        if not params.is_split:
            self.settle()  # before `split` drops the buffers that a reshard would free
            params.split()
        layout = self.plan_layout()
        if params.buffers is None or params.buffers.layout != layout:
            self.settle()
            self._refuse_to_change("parameters")  # before the old buffers are gone
            self.gradients.unreduced.replace()
            try:
                params.allocate(layout, self.comm, self.runtime, self.config)
            except UnavailableError as reason:
                self.leave(self.comm, reason)  # calls `adopt` again, for another communication
                return
            self._bind_gradients(layout)
        elif self.gradients.buckets.are_outdated(self.config):
            self._refuse_to_change("the dtypes of gradients")
            self.gradients.unreduced.replace()
            self._bind_gradients(layout)
        for holder in params.holders:
            self._check_device(holder)
        params.move_shards()

    def _bind_gradients(self, layout: UnitLayout) -> None:
        specs = [param.spec(self.config.mp_policy) for param in self.params]
        flat = layout if self.params.is_flat else None
        self.gradients.buckets.bind(list(self.params), specs, self.config, flat)

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
        """Raise StateError if sums wait for their all-reduce: changing ``what`` would lose them."""
        if self.gradients.has_partial:
            raise StateError(
                f"{self.label}: sums of earlier backwards still wait for their all-reduce. Change "
                f"{what} between iterations."
            )

    # Communication

    def use_comm(self, comm: Comm) -> None:
        """Use another communication over the shard axis, and allocate memory for it.

        Every rank has to call it. Raises StateError while gradients wait for an all-reduce.
        """
        self.settle()
        self._refuse_to_change("the communication")
        self.comm = comm
        self.gradients.buckets.use_comms(shard=self._reduce_comm)
        # The same parameters once more: the communication decides where shards lie.
        self.set_params(self.params.all)

    def reduce_over(self, group: dist.ProcessGroup | None) -> None:
        """Reduce-scatter over another group of the same ranks; None for the shard group."""
        self.reduce_group = group
        self.gradients.buckets.use_comms(shard=self._reduce_comm)

    @property
    def _reduce_comm(self) -> Comm:
        if self.reduce_group is None or not isinstance(self.comm, ProcessGroupComm):
            return self.comm
        return self.comm.over(self.reduce_group)

    def leave(self, comm: Comm, reason: UnavailableError) -> None:
        """Use process groups in place of ``comm``, whose ranks can share no more memory.

        Every rank has to call it. reason: the limit that was met, for messages. Raises CommError if
        the user asked for peer memory, and if the shards have replicas: all replicas lay shards out
        in one way, and those in other groups keep theirs.
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
        """Replace options of the unit's configuration, by field name of `UnitConfig`."""
        self.config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]
        if "mp_policy" in changes:
            self.gradients.unreduced.replace()  # the dtype of sums may be another now

    def become_root(self) -> None:
        """Make this a unit of the root module, with the options that are the root's alone."""
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

    def set_name(self, name: str) -> None:
        """Set the name: the path of the unit's module in the model, empty for the root."""
        self.name = name
        self._enter_as(self.path)

    def set_model(self, number: int) -> None:
        """Set which of the models of its group of ranks this is, from 0: units of others may have its name."""
        if number:
            self._enter_as(f"{self.path} of model {number + 1}")

    def _enter_as(self, text: str) -> None:
        self.entered_as = text
        self.gradients.set_label(self.path, text)

    @property
    def path(self) -> str:
        """The unit's name in messages, the same on every rank."""
        return self.name or "root"

    @property
    def label(self) -> str:
        """The unit's path and this rank, for messages."""
        return f"{self.path} (rank {dist.get_rank()})"


def comms_of(units: Sequence[UnitSetup]) -> list[Comm]:
    """Return every communication that the units use, once each, in the order of the units."""
    return list(dict.fromkeys(comm for u in units for comm in (u.comm, u.replicate_comm)))


def move_parameters(moves: Sequence[tuple[ManagedParameter, UnitSetup, UnitSetup]]) -> None:
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
        unit.set_params(list(params))
