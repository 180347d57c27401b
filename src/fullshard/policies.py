"""Options as frozen values, checked where they are made.

The public policies have the names, fields and defaults of PyTorch's. Both APIs translate their
arguments into a ``UnitConfig``. The engine reads no other options, and every ``set_*`` method of
`FSDPModule` replaces fields of it.
"""

import dataclasses
import enum
import os
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from fullshard.errors import ShardingError


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of one unit; ``None`` leaves a dtype as it is.

    param_dtype: of unsharded parameters, hence of compute and all-gather. The optimizer keeps
        working on the sharded parameters in their own dtype.
    reduce_dtype: of gradient reduction, and of gradients that accumulate unreduced. ``None`` takes
        the parameter's ``grad_dtype`` if that was set, else follows the installed torch: the
        parameter's dtype from 2.15 on, ``param_dtype`` before. Sums are formed in float32 or wider,
        whatever dtype is sent.
    output_dtype: of floating-point outputs of the module's forward.
    cast_forward_inputs: whether floating-point inputs are cast to ``param_dtype``.
    param_dtype_override_fn: called once for each parameter when it is sharded. Returning the
        parameter's own dtype exempts it from ``param_dtype``; returning None or ``param_dtype`` does
        not. It has to return the same on every rank. Inputs are cast to ``param_dtype`` all the same.

    Raises ShardingError for a dtype that is not floating point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = (
        dataclasses.field(default=None, kw_only=True)
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "cast_forward_inputs", bool(self.cast_forward_inputs))
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if not dtype:  # which PyTorch asks for as well
                object.__setattr__(self, name, None)
                continue
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ShardingError(
                    f"MixedPrecisionPolicy({name}={dtype!r}): expected a floating-point "
                    "torch.dtype such as torch.bfloat16, or None to keep the dtype as it is."
                )
        function = self.param_dtype_override_fn
        if function is not None and not callable(function):
            raise ShardingError(
                f"MixedPrecisionPolicy(param_dtype_override_fn={function!r}): expected a function "
                "from a parameter to a torch.dtype or None."
            )

    def resolved(self, chosen: torch.dtype | None) -> "MixedPrecisionPolicy":
        """Return the policy for one parameter: with the dtype chosen for it, without the function."""
        if self.param_dtype_override_fn is None:
            return self
        return dataclasses.replace(
            self, param_dtype=chosen or self.param_dtype, param_dtype_override_fn=None
        )


@dataclasses.dataclass(frozen=True)
class OffloadPolicy:
    """Keep shards on the compute device (the default)."""


@dataclasses.dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep sharded parameters, gradients and hence optimizer state in host memory.

    pin_memory: page-lock that memory, so that copies overlap with compute. Without effect when
        the compute device is the CPU.
    """

    pin_memory: bool = True


@dataclasses.dataclass(frozen=True)
class PlacementPolicy(OffloadPolicy):
    """Say where what a unit trains is kept between its uses: on the device, on the host, on disk.

    parameters: "device" or "host": of sharded parameters, and with them of gradients, since torch keeps a
        ``.grad`` where its parameter is. "host" is what `CPUOffloadPolicy` does.
    optimizer: "device", "host" or "disk": of the optimizer's state, see `stream_state`. It is updated where
        the parameters are, unit by unit.
    device_nbytes: how many bytes of optimizer state may be on the device, on each rank, those on their way
        included. As many units' as fit stay there. None lets all leave, and takes twice the largest unit's.
    folder: of "disk": where each rank makes its files, on a disk of its host.
    pin_memory: page-lock host memory, so that copies overlap with compute.

    Raises ShardingError for other values.
    """

    parameters: Literal["device", "host"] = "device"
    optimizer: Literal["device", "host", "disk"] = "device"
    device_nbytes: int | None = None
    # Not in what ranks compare: each may have a disk of its own.
    folder: str | os.PathLike[str] | None = dataclasses.field(default=None, repr=False)
    pin_memory: bool = True

    def __post_init__(self) -> None:
        for name, places in (
            ("parameters", ("device", "host")),
            ("optimizer", ("device", "host", "disk")),
        ):
            if getattr(self, name) not in places:
                raise ShardingError(
                    f"PlacementPolicy({name}={getattr(self, name)!r}): expected one of "
                    f"{', '.join(map(repr, places))}."
                )
        if self.device_nbytes is not None:
            if type(self.device_nbytes) is not int or self.device_nbytes < 0:
                raise ShardingError(
                    f"PlacementPolicy(device_nbytes={self.device_nbytes!r}): expected a number of bytes, 0 or more."
                )
            if self.optimizer == "device":
                raise ShardingError(
                    "PlacementPolicy(device_nbytes=...) says how much optimizer state stays on the device. Say with "
                    'optimizer="host" or "disk" where the rest goes.'
                )
        folder: object = self.folder
        if folder is not None and not (
            isinstance(folder, (str, os.PathLike)) and os.fspath(folder)
        ):
            raise ShardingError(
                f"PlacementPolicy(folder={self.folder!r}): expected the path of a folder."
            )
        if type(self.pin_memory) is not bool:
            raise ShardingError(
                f"PlacementPolicy(pin_memory={self.pin_memory!r}): expected True or False."
            )
        if (self.optimizer == "disk") != (self.folder is not None):
            raise ShardingError(
                f"PlacementPolicy(optimizer={self.optimizer!r}, folder={self.folder!r}): "
                'optimizer="disk" and a folder for its files go together.'
            )


class CommChoice(enum.Enum):
    """Ways in which the ranks of a shard axis exchange bytes."""

    AUTO = "auto"  # peer memory where it is available, else the process group
    PEER_MEMORY = "peer_memory"  # ranks of one host read each other's memory; an error elsewhere
    PROCESS_GROUP = "process_group"  # the fastest collectives of torch.distributed for the backend
    COLLECTIVES = (
        "collectives"  # one all-gather and reduce-scatter per unit and dtype: PyTorch's way
    )


class TrainingState(enum.Enum):
    """Phases of a unit's modules in a training step."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()  # between the pre-backward hook and the end of its backward
    POST_BACKWARD = enum.auto()


class ParamStyle(enum.Enum):
    """Forms in which users see a unit's parameters while they are sharded."""

    DTENSOR = enum.auto()  # each one as a DTensor, sharded along one of its dims
    PIECES = enum.auto()  # each one as a 1-D piece of a flat buffer
    FLAT = enum.auto()  # one flat parameter for all of them


class BackwardPrefetch(enum.Enum):
    """Moments at which the next unit's parameters are gathered during backward.

    BACKWARD_PRE: before the current unit's gradients are computed, for the most overlap.
    BACKWARD_POST: after that, which saves the memory of one unit.
    """

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


class Unused(enum.Enum):
    """What follows if parameters that are trained get no gradient in a backward that reduces."""

    LEAVE = "leave"  # where no rank has one, ``.grad`` stays as it was
    ERROR = "error"  # StateError on every rank, with their names
    ZERO = "zero"  # reduced all the same, with zeros


@dataclasses.dataclass(frozen=True, slots=True)
class CommHook:
    """A user's function that reduces a unit's gradients, and the state it is called with.

    ``function(state, grads, shard)`` reduces this rank's flat gradients into ``shard``. Where nothing
    is sharded, ``function(state, grads)`` reduces them in place.
    """

    state: object
    function: Callable[..., None]


@dataclasses.dataclass(frozen=True, slots=True)
class UnitConfig:
    """All options of one unit, as the engine reads them.

    reshard_after_forward: True reshards over the whole shard axis, False keeps the parameters
        unsharded until backward is over, an int reshards over groups of that many ranks, None
        means True except for the root.
    is_kept: parameters stay unsharded until backward whatever the former says: `keep_unsharded` has chosen it.
    style: how sharded parameters appear. It also decides the layout: flat, except for DTENSOR.
    all_reduce_hook: called with each sum (1-D, divided already) before gradients are set.
    comm_hook: reduces instead of the unit. Flat styles only.
    keep_low_precision_grads: leave gradients in the reduce dtype. Flat styles only.
    cast_root_inputs: replaces cast_forward_inputs if the unit is the root's; None leaves it.
    force_sum_reduction: let no backend average; divide its sums instead.
    gradients_follow_parameter: whether ``mp_policy.reduce_dtype=None`` means the parameters' dtype,
        and more that goes with it; see `plan.gradient_dtypes`. Flat styles follow the compute dtype.
    keep_unsharded_storage: keep the memory of unsharded parameters while they are sharded.
    unused: parameters without a gradient. may_be_skipped: some ranks may not run the unit's modules.
    buffer_dtype: of floating-point buffers of the unit's modules, which are cast at the first use.
    reduce_scatter_max_input_buffers: how many reductions may hold their input at once.
    """

    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload_policy: OffloadPolicy = OffloadPolicy()
    reshard_after_forward: bool | int | None = None
    is_kept: bool = False
    comm: CommChoice = CommChoice.AUTO
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    unused: Unused = Unused.LEAVE
    may_be_skipped: bool = False
    force_sum_reduction: bool = False
    gradient_divide_factor: float | None = None
    reduce_scatter_max_input_buffers: int = 1
    style: ParamStyle = ParamStyle.DTENSOR
    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    cast_root_inputs: bool | None = None
    gradients_follow_parameter: bool = False
    keep_unsharded_storage: bool = False
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    comm_hook: CommHook | None = None
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: torch.Stream | None = None

    @property
    def reduces_unused(self) -> bool:
        # All ranks reduce the unit in each backward, whatever they have used of it.
        return self.unused is Unused.ZERO

    @property
    def offload_to_cpu(self) -> bool:
        policy = self.offload_policy
        if isinstance(policy, PlacementPolicy):
            return policy.parameters == "host"
        return isinstance(policy, CPUOffloadPolicy)

    @property
    def state_asked(self) -> str:
        """Where a policy wants optimizer state that leaves the device; "" if it does not."""
        policy = self.offload_policy
        if isinstance(policy, PlacementPolicy) and policy.optimizer != "device":
            return policy.optimizer
        return ""

    @property
    def pin_memory(self) -> bool:
        policy = self.offload_policy
        return isinstance(policy, (CPUOffloadPolicy, PlacementPolicy)) and policy.pin_memory
