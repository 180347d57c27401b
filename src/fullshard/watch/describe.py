"""`describe(model)` returns the configuration in effect, as values and as text."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fullshard.engine.module_state import (
    ModuleState,
    moves_of_ties,
    named_states,
    names_of_units,
    paths_of,
    state_of,
)
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.plan.gradient_dtypes import reduce_dtypes
from fullshard.plan.layout import Route
from fullshard.policies import UnitConfig, Unused


@dataclasses.dataclass(frozen=True, slots=True)
class UnitDescription:
    """One unit's configuration in effect. Sizes are in bytes and of this rank.

    direct, packed, flat: names of parameters, by how they are communicated (see `plan.layout`).
    extended: names of parameters that define their own all-gather. Their shards are counted, their unsharded
        forms are not: they say themselves what those are.
    in_place: whether peers' shards are read where they are, instead of being copied.
    is_written: whether somebody was seen to write to parameters while the model ran.
    exempt: names of parameters that are computed in a dtype of their own (`param_dtype_override_fn`).
    reduces: whether backward reduces gradients, and does not keep them for a later one.
    is_kept: whether `keep_unsharded` has chosen it to stay unsharded from forward to backward.
    keeps_storage: whether the memory of unsharded parameters is kept while they are sharded.
    unused: what follows for parameters without a gradient; "" if nothing was said.
    divide_factor: what summed gradients are divided by.
    shard_size, replicate_size: ranks on each axis of the mesh.
    state_nbytes, state_place: of the optimizer's state where `stream_state` keeps it: "device", "host" or
        "disk (/scratch, direct)", with the way it is read; "" if nobody has called it.
    state_asked: "host" or "disk" where a policy asks for it and nobody has called `stream_state`; else "".
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
    exempt: tuple[str, ...]
    reduces: bool
    keeps_storage: bool
    offload: bool
    shard_nbytes: int
    unsharded_nbytes: int
    divide_factor: float
    unused: str = ""
    shard_size: int = 1
    replicate_size: int = 1
    state_nbytes: int = 0
    state_place: str = ""
    state_asked: str = ""
    is_kept: bool = False

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
            f"exempt from param_dtype: {', '.join(self.exempt)}" if self.exempt else "",
            self.unused,
            "" if self.reduces else "gradients kept for a later backward",
            "stays unsharded within a budget" if self.is_kept else "",
            "memory kept while sharded" if self.keeps_storage else "",
            "offloaded to CPU" if self.offload else "",
            f"{format_nbytes(self.state_nbytes)} of optimizer state on {self.state_place}"
            if self.state_place
            else "",
            f"optimizer state on {self.state_asked} once stream_state(optimizer) is called, not before"
            if self.state_asked
            else "",
        ]
        lines = [
            f"{self.name or '(root)'}",
            f"    mesh {self.mesh}; {self.communication}",
            f"    {self.dtypes}; reshard after forward: {self.reshard_after_forward}; "
            f"gradients divided by {self.divide_factor:g}",
            f"    {moved}; this rank holds {format_nbytes(self.shard_nbytes)}"
            f"{'; without those below,' if self.extended else ' of'} "
            f"{format_nbytes(self.unsharded_nbytes)} unsharded",
        ]
        if any(extras):
            lines.append("    " + "; ".join(extra for extra in extras if extra))
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """A sharded model's effective configuration; ``str()`` prints it.

    manual_finalization: whether the program ends backwards, by `finalize_backward`.
    """

    units: tuple[UnitDescription, ...]
    manual_finalization: bool = False

    def __str__(self) -> str:
        total = sum(unit.shard_nbytes for unit in self.units)
        many = "" if len(self.units) == 1 else "s"
        head = f"{len(self.units)} unit{many}, {format_nbytes(total)} of parameters on this rank"
        if self.manual_finalization:
            head += "; backward is ended by finalize_backward()"
        return "\n".join([head, *(str(unit) for unit in self.units)])


@dataclasses.dataclass(frozen=True, slots=True)
class DescribedUnit:
    """A unit with the names and parameters to describe it by.

    They are the unit's own once the model has run. Before, they are those that the first forward
    will give it: paths below the root, and tied parameters moved to the unit that will own them.
    """

    unit: Unit
    name: str
    params: Sequence[ManagedParameter]
    names: Mapping[ManagedParameter, Sequence[str]]
    is_root: bool


def describe(model: nn.Module) -> Description:
    """Return the configuration in effect for a sharded model, which may differ from what was asked.

    Before the first forward, it is described as if ``model`` were the root, without making it one.
    Communicates nothing. Raises StateError if the model is not sharded.
    """
    state = state_of(model)
    if state is None:
        raise StateError(
            f"{type(model).__name__} is not sharded. Pass the module given to fully_shard last, or the "
            "outermost wrapper."
        )
    return Description(tuple(map(_describe, units_of(model, state))), state.has_manual_finalization)


def units_of(model: nn.Module, root: ModuleState) -> list[DescribedUnit]:
    """Return a model's units as they are, or as the first forward will make them: named by path, with ties moved."""
    iteration = root.known_iteration  # the whole model's, even if ``model`` is a part of it
    if iteration is not None:
        return [
            DescribedUnit(u, u.name, u.managed, {p: p.names for p in u.managed}, u.is_root)
            for u in iteration.units
        ]
    named = named_states(model)
    paths = paths_of(model)
    params = {unit: list(unit.managed) for state in named.values() for unit in state.all_units}
    names = {p: p.names_among(paths) for own in params.values() for p in own}
    for param, unit, other in moves_of_ties(model, named):
        params[unit].remove(param)
        params[other].append(param)
    return [
        DescribedUnit(unit, name, params[unit], names, unit in root.all_units)
        for unit, name in names_of_units(named).items()
        if params[unit]
    ]


def _describe(shown: DescribedUnit) -> UnitDescription:
    unit, names = shown.unit, shown.names
    plan = unit.mesh.plan
    layout = unit.plan_layout(shown.params)
    state_nbytes, state_place = unit.state_place or (0, "")
    plain = [param for param in shown.params if not param.is_extended]
    placed = [param for bucket in layout.buckets for param in bucket.params]
    routes = {
        route: tuple(_name(names, plain[p.index]) for p in placed if p.route is route)
        for route in Route
    }
    option = unit.config.reshard_after_forward
    option = (not shown.is_root) if option is None else option
    mesh = f"shard {plan.shard_size}"
    if plan.replicate_size > 1:
        mesh = f"replicate {plan.replicate_size} x {mesh}"
    dtypes = sorted(
        f"{_dtype(b.dtype)} -> {_dtype(b.compute_dtype)}"
        if b.dtype != b.compute_dtype
        else _dtype(b.dtype)
        for b in layout.buckets
    )
    return UnitDescription(
        name=shown.name,
        mesh=mesh,
        communication=unit.comm.name,
        dtypes=f"parameters {', '.join(dtypes)}; {_gradients(shown)}",
        reshard_after_forward=False if unit.config.is_kept else option,
        direct=routes[Route.DIRECT],
        packed=routes[Route.PACKED],
        flat=routes[Route.FLAT],
        frozen=tuple(_name(names, p) for p in shown.params if not p.requires_grad),
        tied=tuple(" = ".join(names[p]) for p in shown.params if len(p.slots) > 1),
        extended=tuple(_name(names, p) for p in shown.params if p.is_extended),
        in_place=unit.may_be_in_place and not unit.is_written,
        is_written=unit.is_written,
        exempt=tuple(
            _name(names, p)
            for p in shown.params
            if p.form.compute_dtype not in (None, unit.config.mp_policy.param_dtype)
        ),
        reduces=unit.config.reduce_grads,
        keeps_storage=unit.config.keep_unsharded_storage,
        offload=unit.config.offload_to_cpu,
        shard_nbytes=layout.shard_nbytes
        + sum(p.local.nbytes for p in shown.params if p.is_extended),
        unsharded_nbytes=layout.unsharded_nbytes,
        divide_factor=unit.config.gradient_divide_factor or float(plan.data_parallel_size),
        unused=_unused(unit.config),
        shard_size=plan.shard_size,
        replicate_size=plan.replicate_size,
        state_nbytes=state_nbytes,
        state_place=state_place,
        state_asked="" if unit.state_place is not None else unit.config.state_asked,
        is_kept=unit.config.is_kept,
    )


def _unused(config: UnitConfig) -> str:
    """Say what follows for parameters without a gradient."""
    said = {
        Unused.LEAVE: "",
        Unused.ERROR: "an error if trained parameters are unused",
        Unused.ZERO: "zeros as gradients of unused parameters",
    }[config.unused]
    return f"{said}, ranks may skip it" if config.may_be_skipped else said


def _gradients(shown: DescribedUnit) -> str:
    """Say in which dtypes gradients are reduced and summed, and kept if not in the parameters'."""
    unit = shown.unit
    trained = [param for param in shown.params if param.requires_grad]
    if not trained:
        return "no gradients"
    dtypes = [param.gradient_dtypes(unit.config) for param in trained]
    stored = [param.holder.sharded.dtype for param in trained]
    reduced = reduce_dtypes(stored, [each.reduced for each in dtypes])
    kept = [each.shard or dtype for each, dtype in zip(dtypes, reduced, strict=True)]
    text = f"gradients reduced in {_dtype_names(reduced)}, summed in "
    text += _dtype_names(map(unit.comm.accumulate_dtype, reduced))
    unlike = [own for own, dtype in zip(kept, stored, strict=True) if own != dtype]
    return f"{text}, {_dtype_names(unlike)} where grad_dtype says so" if unlike else text


def _dtype_names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted({_dtype(each) for each in dtypes}))


def _name(names: Mapping[ManagedParameter, Sequence[str]], param: ManagedParameter) -> str:
    return names[param][0] if names[param] else param.name


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def format_nbytes(nbytes: int) -> str:
    """Write a size in MiB, or in KiB below 1 MiB."""
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:,.1f} KiB"
