"""Which modules and parameters a call to shard covers."""

from collections.abc import Iterable, Sequence, Set

import torch
from torch import nn

from fullshard.engine.hooks import state_of
from fullshard.engine.params import ManagedParameter, Slot, owner_of
from fullshard.errors import ShardingError


def root_modules(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that are not inside another of them, in order, once each."""
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return [m for m in dict.fromkeys(modules) if id(m) not in inside]


def covered_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the roots and what is below them, without what is sharded already."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found:
            return
        found[module] = None
        for child in module.children():
            if state_of(child) is None:
                visit(child)

    for root in roots:
        visit(root)
    return list(found)


class CoveredParameters:
    """The parameters of covered modules: new ones, and ties to ones sharded before."""

    def __init__(self, modules: Iterable[nn.Module], ignored: Set[nn.Parameter]) -> None:
        self.slots: dict[nn.Parameter, list[Slot]] = {}
        self.ties: list[tuple[ManagedParameter, Slot]] = []
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None or parameter in ignored:
                    continue
                slot = Slot(module, name)
                owner = owner_of(parameter)
                if owner is not None:
                    self.ties.append((owner, slot))
                else:
                    self.slots.setdefault(parameter, []).append(slot)

    def connect_ties(self) -> None:
        """Register the sharded form of parameters that another unit manages."""
        for owner, slot in self.ties:
            owner.slots.append(slot)
            slot.register(owner.sharded)


def check_modules(modules: Sequence[nn.Module]) -> None:
    """Refuse what cannot be sharded, before anything is changed."""
    if not modules:
        raise ShardingError("fully_shard got an empty list: pass at least one module.")
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ShardingError(f"fully_shard takes modules, not {name}: {module!r}.")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not _has_forward(module):
            raise ShardingError(
                f"fully_shard cannot hook {name}: it has no forward of its own. Apply it to each "
                "module inside, or to the module that calls them."
            )
        if state_of(module) is not None:
            raise ShardingError(
                f"{name} is sharded already. Apply fully_shard once to each module, bottom-up."
            )
        if next(module.parameters(), None) is None:
            raise ShardingError(
                f"{name} has no parameters, so there is nothing to shard. Apply fully_shard to a "
                "module that has some."
            )


def qualified_names(roots: Iterable[nn.Module], slots: Iterable[list[Slot]]) -> list[str]:
    """Name parameters by the module given and the path below it: "Decoder: layers.0.weight"."""
    path_of = {
        id(module): f"{type(root).__name__}: {path + '.' if path else ''}"
        for root in roots
        for path, module in root.named_modules()
    }
    return [path_of[id(places[0].module())] + places[0].name for places in slots]


def check_parameters(names: dict[nn.Parameter, str], device: torch.device) -> None:
    """Refuse parameters that cannot be sharded onto ``device``."""
    for parameter, name in names.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ShardingError(
                f"{name} is not initialised yet (lazy module). Run the module once, then shard it."
            )
        if type(parameter.data) is not torch.Tensor:
            raise ShardingError(
                f"{name} is a {type(parameter.data).__name__}, but only plain tensors can be "
                "sharded. Pass it in ignored_params to leave it as it is."
            )
        if not parameter.is_contiguous():
            raise ShardingError(
                f"{name} is not contiguous (strides {parameter.stride()}). Replace it by "
                "nn.Parameter(p.detach().contiguous()) before sharding."
            )
        if parameter.device.type not in (device.type, "cpu", "meta"):
            raise ShardingError(
                f"{name} is on {parameter.device}, but the mesh is of type {device.type!r}. Move "
                f"the module with .to({device.type!r}), or pass a mesh of its device type."
            )


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward not in (
        nn.Module.forward,
        getattr(nn.modules.module, "_forward_unimplemented", None),
    )
