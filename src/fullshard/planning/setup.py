"""What a training run is planned for: machine, ranks, micro-batch, and how it is sharded and computed.

`TrainingSetup` refuses what cannot be, before anything is planned, and translates itself for the parts of the planner.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from fullshard.errors import FullshardError
from fullshard.plan.step import OptimizerPlan, Reshard, StepSettings
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.units import first_names
from fullshard.plan.ways import GLOO, NCCL, PEER_MEMORY, Way
from fullshard.plan.workload import Workload
from fullshard.planning.calibration import CalibratedCosts
from fullshard.planning.costs import CostError, Costs, Manner
from fullshard.planning.keeping import keeping
from fullshard.planning.machines import Machine
from fullshard.policies import MixedPrecisionPolicy

CHECKPOINTING = ("none", "selective", "full")
OFFLOADS = ("none", "params", "optimizer")
_MOST_RANKS = 1_000_000
ATTENTIONS = ("sdpa", "flash", "cudnn", "triton")


class SetupError(FullshardError, ValueError):
    """A run that cannot be, or of which too little is said."""


class Optimizer(NamedTuple):
    """num_states: tensors of state as large as the parameters. num_passed: how many such tensors one fused kernel
    reads or writes. foreach_share: how many times as many single kernels do, which keep one more for a while.
    has_fused: whether torch has one kernel for it."""

    num_states: int
    num_passed: int
    foreach_share: float = 1.6
    has_fused: bool = True


# Parameters and their gradients make 3: both are read, the first is written. A state is read and written.
OPTIMIZERS = {
    "adamw": Optimizer(2, 7),
    "adam": Optimizer(2, 7),
    "sgd": Optimizer(0, 3, 1.0),
    "sgd-momentum": Optimizer(1, 5, 1.0),
    # Its state is a row and a column of each matrix.
    "adafactor": Optimizer(0, 5, 2.0, has_fused=False),
}


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """A run to be planned. Raises SetupError for numbers that do not fit together.

    ranks: all of them, one a GPU. shard_size: over how many of them parameters are sharded; the others hold
        replicas (HSDP). None shards over all.
    batch: sequences in a rank's micro-batch. seq: tokens of each. accumulation: micro-batches before the optimizer
        steps; reduces_each: each of them reduces its gradients, not the last alone; sums_replicas_last: replicas are
        summed after the last alone (``set_requires_all_reduce``).
    precision: as `fully_shard` takes it. stored: dtype of the sharded parameters; None leaves it to the model.
    reshard_after_forward: as in `fully_shard`. unsharded: names of units that stay unsharded after forward.
    keep_unsharded_nbytes: a budget of bytes for others that do, those that `keep_unsharded` chooses; 0 for none.
    checkpointing: of each unit: "none"; "full", which keeps its inputs alone; "selective", which keeps the outputs
        of attention and of every second matrix product as well.
    optimizer: one of `OPTIMIZERS`. is_fused: one kernel steps; else ``foreach``, torch's default on GPUs.
    offload: "params" keeps parameters, gradients and optimizer state in host memory (`CPUOffloadPolicy`),
        "optimizer" the optimizer's state (`stream_state`).
    is_compiled: units run under ``torch.compile``. attention: whose kernel: one of `ATTENTIONS`.
    """

    machine: Machine
    ranks: int
    shard_size: int | None = None
    batch: int = 1
    seq: int = 4096
    accumulation: int = 1
    reduces_each: bool = True
    sums_replicas_last: bool = False
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    stored: torch.dtype | None = None
    reshard_after_forward: Reshard = None
    unsharded: tuple[str, ...] = ()
    keep_unsharded_nbytes: int = 0
    checkpointing: str = "none"
    optimizer: str = "adamw"
    is_fused: bool = False
    offload: str = "none"
    is_compiled: bool = False
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        self._check_kinds()
        for name, known in (
            ("checkpointing", CHECKPOINTING),
            ("optimizer", tuple(OPTIMIZERS)),
            ("offload", OFFLOADS),
            ("attention", ATTENTIONS),
        ):
            if getattr(self, name) not in known:
                raise SetupError(f"{name} is {getattr(self, name)!r}: expected {', '.join(known)}.")
        if self.is_fused and not OPTIMIZERS[self.optimizer].has_fused:
            fused = [name for name, kind in OPTIMIZERS.items() if kind.has_fused]
            raise SetupError(
                f"is_fused: torch has no fused {self.optimizer}. Leave it out, or take {', '.join(fused)}."
            )
        self._check_ranks()
        _ = self.sharding, self.step_settings(None)

    def _check_kinds(self) -> None:
        """Raise SetupError for values of another kind than the fields have."""
        numbers = {"ranks": 1, "batch": 1, "seq": 1, "accumulation": 1, "keep_unsharded_nbytes": 0}
        for name, least in (*numbers.items(), ("shard_size", None)):
            value = getattr(self, name)
            if value is None and name == "shard_size":
                continue
            if type(value) is not int:
                raise SetupError(f"{name} is {value!r}: expected a whole number.")
            if least is not None and value < least:
                raise SetupError(f"{name} is {value}: expected {least} or more.")
        for name, kind, hint in (
            ("machine", Machine, "a Machine, such as machine_named('H100-80GB-SXM')"),
            ("precision", MixedPrecisionPolicy, "a MixedPrecisionPolicy"),
            ("unsharded", tuple, "a tuple of names of units"),
        ):
            if not isinstance(getattr(self, name), kind):
                raise SetupError(f"{name} is {getattr(self, name)!r}: expected {hint}.")
        stored: Any = self.stored
        if stored is not None and not (
            isinstance(stored, torch.dtype) and stored.is_floating_point
        ):
            raise SetupError(
                f"stored is {stored!r}: expected None or a floating point dtype, such as torch.bfloat16."
            )

    def _check_ranks(self) -> None:
        per_host, shards = self.machine.per_host, self.shard_size
        if self.ranks > _MOST_RANKS:
            raise SetupError(f"{self.ranks} ranks: plans are of at most {_MOST_RANKS:,}.")
        if self.is_home and self.ranks != per_host:
            raise SetupError(
                f"{self.ranks} ranks, and the machine was measured with {per_host}. Measure again: fullshard plan "
                f"--calibrate --ranks {self.ranks}."
            )
        if self.ranks > per_host and self.ranks % per_host:
            raise SetupError(
                f"{self.ranks} ranks do not fill hosts of {per_host} GPUs. Use "
                f"{self.ranks // per_host * per_host} or {-(-self.ranks // per_host) * per_host} ranks, or say how "
                "many GPUs a host has."
            )
        if shards is None:
            return
        if not 1 <= shards <= self.ranks:
            raise SetupError(
                f"shard_size is {shards}, and there are {self.ranks} ranks: expected 1 to {self.ranks}."
            )
        if self.ranks % shards:
            fitting = [n for n in range(1, self.ranks + 1) if self.ranks % n == 0]
            raise SetupError(
                f"shard_size is {shards}, which does not divide {self.ranks} ranks. Choose one of "
                f"{first_names(list(map(str, fitting)), 12)}."
            )

    # What it means

    @property
    def is_home(self) -> bool:
        """Whether ranks compute on the CPU of a machine that was measured."""
        return self.machine.figures is not None

    @property
    def way(self) -> Way:
        """How ranks exchange bytes: as the engine chooses by itself, or what was measured alone."""
        figures = self.machine.figures
        if figures is None:
            return NCCL
        return PEER_MEMORY if figures.has_way(PEER_MEMORY.name) else GLOO

    @property
    def hosts(self) -> int:
        """How many hosts the ranks are on."""
        return -(-self.ranks // self.machine.per_host)

    @property
    def shards(self) -> int:
        """Ranks over which parameters are sharded."""
        return self.shard_size or self.ranks

    @property
    def sharding(self) -> Sharding:
        """How units are laid out and how their ranks exchange bytes."""
        return Sharding(
            shard_size=self.shards,
            way=self.way,
            replicate_size=self.ranks // self.shards,
            reduce_dtype=self.precision.reduce_dtype,
        )

    def step_settings(self, workload: Workload | None) -> StepSettings:
        """Return how the engine runs a step of a workload.

        Raises SetupError for units that it has not, and ShardingError for a budget that holds none of them.
        """
        reshard: Any = self.reshard_after_forward
        if self.unsharded and workload is not None:
            names = [unit.name for unit in workload.units]
            if unknown := sorted({*self.unsharded} - {*names}):
                raise SetupError(
                    f"unsharded names {first_names(unknown)}, which is no unit. Units are {first_names(names[1:], 4)}."
                )
            reshard = tuple(False if name in self.unsharded else reshard for name in names)
        settings = StepSettings(
            sharding=self.sharding,
            has_streams=not self.is_home,
            reshard_after_forward=reshard,
            num_microbatches=self.accumulation,
            reduces_each=self.reduces_each,
            sums_replicas_last=self.sums_replicas_last,
            optimizer=self._optimizer_plan(workload),
        )
        settings.reshards(0, len(workload.units) if workload else 1)
        if workload is None or not self.keep_unsharded_nbytes:
            return settings
        return keeping(workload, settings, self.keep_unsharded_nbytes)

    def _optimizer_plan(self, workload: Workload | None) -> OptimizerPlan:
        kind, size = OPTIMIZERS[self.optimizer], trained_dtype(workload).itemsize
        is_small = self.is_fused or kind.foreach_share == 1.0
        return OptimizerPlan(
            nbytes_per_element=kind.num_states * size,
            nbytes_per_param=4 if self.optimizer.startswith("adam") else 0,
            peak_per_element=0 if is_small or self.is_home else size,
            # The CPU steps on one parameter after the other: a root, and what it is divided by.
            peak_of_largest=2 * size if self.is_home and not is_small else 0,
        )

    def costs(self, workload: Workload) -> Costs | CalibratedCosts:
        """Return the seconds of actions. Raises CostError for what the machine was not measured for."""
        if self.machine.figures is None:
            return Costs(self.machine, self.manner(workload))
        self._check_measured()
        stored = trained_dtype(workload)
        costs = CalibratedCosts(
            self.machine,
            way=self.way.name,
            dtypes=(self.precision.param_dtype or stored, stored),
            optimizer=self.optimizer + (" fused" if self.is_fused else ""),
            shard_size=self.shards,
        )
        costs.check(w for s in workload.stretches for w in (*s.forward, *s.recomputed, *s.backward))
        return costs

    def _check_measured(self) -> None:
        """Raise CostError for what no calibration measures."""
        reshard, per_host = self.reshard_after_forward, self.machine.per_host
        if self.shards < per_host:
            what = f"Replicas: ranks that share parameters among all {per_host}"
        elif self.offload != "none":
            what = "Offloading: ranks on the CPU, which have all in the host's memory,"
        elif not isinstance(reshard, bool | None) and not self.way.reads_in_place:
            what = f"Gathers of smaller groups: those of all {per_host} ranks"
        else:
            return
        raise CostError(f"{what} were measured, nothing else. Leave it out, or name a GPU.")

    def manner(self, workload: Workload) -> Manner:
        """Return how kernels run."""
        kind, size = OPTIMIZERS[self.optimizer], trained_dtype(workload).itemsize
        return Manner(
            attention=self.attention,
            replica_stride=self.shards,
            optimizer_nbytes=kind.num_passed
            * size
            * (1.0 if self.is_fused else kind.foreach_share),
        )


def trained_dtype(workload: Workload | None) -> torch.dtype:
    """Return the most usual dtype of what is trained; float32 if nothing is."""
    numel: dict[torch.dtype, int] = {}
    for unit in workload.units if workload else ():
        for spec in unit.params:
            if spec.trainable:
                numel[spec.dtype] = numel.get(spec.dtype, 0) + spec.numel
    return max(numel, key=lambda dtype: numel[dtype], default=torch.float32)
