"""Find and check the modules and parameters that one call to shard covers."""

from collections.abc import Iterable, Sequence, Set

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.module_state import state_of
from fullshard.engine.params.dtensor import has_extension
from fullshard.engine.params.managed import ManagedParameter, Slot, owner_of
from fullshard.errors import MisuseError, ShardingError, StateError, UnsupportedError
from fullshard.plan.units import clean_name
from fullshard.torch_private import forward_unimplemented, local_part


class Covered:
    """What one call to shard covers.

    modules: those whose parameters become units.
    slots: by parameter that is not sharded yet, where it is registered: several if it is tied.
    names: of the same ones, for messages, with the root's class: "Decoder: layers.0.weight".
    ties: registrations of parameters that an earlier call has sharded, each with its owner.
    ignored: by module, the names of parameters to leave as they are. By name, since another parameter may
        be registered in the place of one later.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        modules: Sequence[nn.Module],
        ignored: Set[nn.Parameter],
    ) -> None:
        """List parameters. roots: the modules of a call, below which they are named."""
        self.modules = modules
        self.ignored: dict[nn.Module, set[str]] = {}
        self.slots: dict[nn.Parameter, list[Slot]] = {}
        self.ties: list[tuple[ManagedParameter, Slot]] = []
        # By module, the root and the path below it.
        self._paths = {
            module: (type(root).__name__, path)
            for root in roots
            for path, module in root.named_modules()
        }
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if parameter in ignored:
                    self.ignored.setdefault(module, set()).add(name)
                    continue
                if isinstance(module, torch.jit.ScriptModule):
                    raise UnsupportedError(
                        f"{module.original_name}.{name} is a parameter of a {type(module).__name__}: compiled code "
                        "holds it, and no other can take its place. Shard the module before it is scripted or "
                        "traced, use torch.compile, or leave the parameter out (ignored_params, ignored_modules)."
                    )
                slot = Slot(module, name)
                owner = owner_of(parameter)
                if owner is not None:
                    self.ties.append((owner, slot))
                else:
                    self.slots.setdefault(parameter, []).append(slot)
        self.names = {parameter: self.where(places[0]) for parameter, places in self.slots.items()}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of the modules, once each."""
        own = (buffer for module in self.modules for buffer in module.buffers(recurse=False))
        return [*dict.fromkeys(own)]

    def where(self, slot: Slot) -> str:
        """Return where a parameter is registered, for messages: its path if that is below a root."""
        module = slot.module()
        if module not in self._paths:
            return f"{slot.name} of {type(module).__name__}"
        root, path = self._paths[module]
        return f"{root}: {clean_name(f'{path}.{slot.name}')}"

    def name_below(self, params: Iterable[ManagedParameter]) -> None:
        """Name parameters by their paths below the roots, until the model's own root is known."""
        for param in params:
            places = ((self._paths[slot.module()][1], slot.name) for slot in param.slots)
            param.names = [clean_name(f"{path}.{name}") for path, name in places]

    def connect_ties(self) -> None:
        """Register the sharded form of parameters that a unit of an earlier call manages."""
        for owner, slot in self.ties:
            # Not again the places of a module that stands in several.
            if all(
                slot.registry is not own.registry or slot.name != own.name for own in owner.slots
            ):
                owner.add_slot(slot)
                slot.register(owner.sharded)


def check_modules(modules: Sequence[nn.Module], api: str) -> None:
    """Raise for modules that ``api`` cannot be applied to: before anything is changed.

    ShardingError for what is no module or has no forward to hook, StateError and MisuseError for
    modules that are sharded already.
    """
    if not modules:
        raise ShardingError(f"{api} got an empty list: pass at least one module.")
    for module in modules:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ShardingError(f"{api} takes modules, not {name}: {module!r}.")
        has_forward = type(module).forward not in (nn.Module.forward, forward_unimplemented)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward:
            raise ShardingError(
                f"{api} does not support containers that do not implement forward: {name} "
                "could not be hooked. Apply it to each module inside, or to the one that calls them."
            )
        if state_of(module) is None:
            continue
        earlier = getattr(module, "applied_by", api)
        if earlier != api:
            raise StateError(
                f"Cannot apply `{api}()` on a Module already managed by `{earlier}`: {name}."
            )
        raise MisuseError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"{name} is managed already: apply {api} once to each module, bottom-up."
        )


@torch.no_grad()
def move_tensors(tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Move parameters or buffers to a device, with their gradients.

    They stay the same objects, since users and optimizers may hold them. What is on the meta device stays
    there, and so do DTensors, which are where their mesh is.
    """
    for tensor in tensors:
        if tensor.is_meta or tensor.device == device or isinstance(tensor, DTensor):
            continue
        if type(tensor.data) is torch.Tensor:
            tensor.data = tensor.to(device)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.to(device)
        else:
            # A subclass (float8, int8) is swapped as a whole: setting `.data` would not move its inner
            # tensors.
            moved = tensor.to(device)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)


def check_shapes(names: dict[nn.Parameter, str], api: str) -> None:
    """Raise ShardingError for parameters that have no shape yet, and for those of no dims."""
    for parameter, name in names.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ShardingError(
                f"{name} is not initialised yet (lazy module). Run the module once, then shard it."
            )
        if parameter.dim() == 0:
            raise ShardingError(
                f"{api} doesn't support scalar parameters. Change {name.rsplit(': ')[-1]} to a 1D "
                f"tensor with numel equal to 1. It is {name}."
            )


def check_parameters(names: dict[nn.Parameter, str], device: torch.device) -> None:
    """Raise ShardingError or UnsupportedError for what cannot be sharded by rows on ``device``."""
    for parameter, name in names.items():
        local = local_part(parameter.data)
        has_extension(local, name)
        if local.layout is not torch.strided:
            raise UnsupportedError(
                f"{name} has the layout {local.layout}, and only dense parameters are sharded. Make "
                "it dense (to_dense()), or leave it out (ignored_params)."
            )
        if not local.is_contiguous():
            raise UnsupportedError(
                f"FSDP does not support non-contiguous parameters yet: {name}, shape "
                f"{tuple(local.shape)}, strides {local.stride()}. Replace it by "
                "nn.Parameter(p.detach().contiguous()) before sharding."
            )
        if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != device.type:
            raise ShardingError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{parameter.device_mesh.device_type} for DTensor and {device.type} for FSDP: "
                f"{name}. Build both meshes for {device.type!r}."
            )
        if parameter.device.type not in (device.type, "cpu", "meta"):
            raise ShardingError(
                f"{name} is on {parameter.device}, but the mesh is of type {device.type!r}. Move "
                f"the module with .to({device.type!r}), or pass a mesh of its device type."
            )
