"""What is in effect, as values and as text."""

import dataclasses

import torch
from torch import nn

from fullshard.engine.hooks import state_of
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.plan.layout import Route


@dataclasses.dataclass(frozen=True, slots=True)
class UnitDescription:
    """One unit as it is: sizes in bytes, on this rank. Parameters are direct, packed or flat.

    extended: parameters that say themselves what is gathered of them; sizes do not count them.
    """

    name: str
    mesh: str
    communication: str
    dtypes: str
    reshard_after_forward: bool | int
    direct: tuple[str, ...]
    packed: tuple[str, ...]
    flat: tuple[str, ...]
    frozen: tuple[str, ...]
    tied: tuple[str, ...]
    extended: tuple[str, ...]
    in_place: bool
    is_written: bool
    offload: bool
    shard_nbytes: int
    unsharded_nbytes: int
    divide_factor: float

    def __str__(self) -> str:
        place = " (read in place)" if self.in_place else ""
        if self.is_written:
            place = " (gathered in order with writes, which were seen while the model ran)"
        moved = f"direct {len(self.direct)}{place}, packed {len(self.packed)}"
        if self.flat:
            moved = f"{len(self.flat)} in one flat buffer{place}"
        extras = [
            f"{len(self.frozen)} frozen" if self.frozen else "",
            f"tied: {', '.join(self.tied)}" if self.tied else "",
            f"gathered by their own methods: {', '.join(self.extended)}" if self.extended else "",
            "offloaded to CPU" if self.offload else "",
        ]
        lines = [
            f"{self.name or '(root)'}",
            f"    mesh {self.mesh}; {self.communication}",
            f"    {self.dtypes}; reshard after forward: {self.reshard_after_forward}; "
            f"gradients divided by {self.divide_factor:g}",
            f"    {moved}; this rank holds {format_nbytes(self.shard_nbytes)} of "
            f"{format_nbytes(self.unsharded_nbytes)} unsharded",
        ]
        if any(extras):
            lines.append("    " + "; ".join(extra for extra in extras if extra))
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """A sharded model's effective configuration; ``str()`` prints it."""

    units: tuple[UnitDescription, ...]

    def __str__(self) -> str:
        total = sum(unit.shard_nbytes for unit in self.units)
        head = f"{len(self.units)} units, {format_nbytes(total)} of parameters on this rank"
        return "\n".join([head, *(str(unit) for unit in self.units)])


def describe(model: nn.Module) -> Description:
    """Return what is in effect for a sharded model: not what was asked for, what it came to.

    Resolves the root as the first forward would. Raises StateError if nothing is sharded.
    """
    state = state_of(model)
    if state is None:
        raise StateError(
            f"{type(model).__name__} is not sharded. Pass the module given to fully_shard last, or the "
            "outermost wrapper."
        )
    states = dict.fromkeys(s for m in model.modules() if (s := state_of(m)) is not None)
    units = [unit for s in states for unit in s.units]
    if not any(param.local.is_meta for unit in units for param in unit.params):
        units = state.shared.units
    return Description(tuple(_describe(unit) for unit in units))


def _describe(unit: Unit) -> UnitDescription:
    layout, plan, policy = unit.layout, unit.mesh.plan, unit.config.mp_policy
    params = [param for bucket in layout.buckets for param in bucket.params]
    option = unit.config.reshard_after_forward
    mesh = f"shard {plan.shard_size}"
    if plan.replicate_size > 1:
        mesh = f"replicate {plan.replicate_size} x {mesh}"
    dtypes = sorted(
        f"{_dtype(b.dtype)} -> {_dtype(b.compute_dtype)}"
        if b.dtype != b.compute_dtype
        else _dtype(b.dtype)
        for b in layout.buckets
    )
    reduce_dtype = policy.reduce_dtype or (layout.buckets[0].compute_dtype if params else None)
    accumulate = unit.comm.accumulate_dtype(reduce_dtype) if reduce_dtype else None
    return UnitDescription(
        name=unit.name,
        mesh=mesh,
        communication=unit.comm.name,
        dtypes=f"parameters {', '.join(dtypes)}; gradients reduced in {_dtype(reduce_dtype)}, "
        f"summed in {_dtype(accumulate)}",
        reshard_after_forward=(not unit.is_root) if option is None else option,
        direct=tuple(p.spec.name for p in params if p.route is Route.DIRECT),
        packed=tuple(p.spec.name for p in params if p.route is Route.PACKED),
        flat=tuple(p.spec.name for p in params if p.route is Route.FLAT),
        frozen=tuple(p.name for p in unit.params if not p.requires_grad),
        tied=tuple(" = ".join(p.names) for p in unit.params if len(p.slots) > 1),
        extended=tuple(p.name for p in unit.params if p.is_extended),
        in_place=unit.may_be_in_place and not unit.is_written,
        is_written=unit.is_written,
        offload=unit.config.offload_to_cpu,
        shard_nbytes=layout.shard_nbytes,
        unsharded_nbytes=layout.unsharded_nbytes,
        divide_factor=unit.config.gradient_divide_factor or float(plan.data_parallel_size),
    )


def _dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def format_nbytes(nbytes: int) -> str:
    """Write a size as people read it."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:,.1f} KiB"
