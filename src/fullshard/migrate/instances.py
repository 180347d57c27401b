"""Find the wrapped modules of a model, with their paths in the model before it was wrapped."""

import dataclasses
import enum

import torch.distributed as dist
from torch import nn

from fullshard.errors import StateError
from fullshard.fsdp1.module import FullyShardedDataParallel
from fullshard.fsdp1.options import HYBRID_SHARDING_STRATEGIES, ShardingStrategy
from fullshard.plan.units import clean_name
from fullshard.torch_private import COMPILED_MODULE


class Skipped(enum.Enum):
    """Reasons why an instance needs no call of its own."""

    WRAPPED_AGAIN = "an instance inside wraps the same module and makes the call"
    CONTAINER = "a container without forward, which fully_shard refuses: what is inside is enough"


@dataclasses.dataclass(frozen=True, slots=True)
class Instance:
    """One wrapper, as the migration report sees it.

    path: of the wrapped module, in the model before it was wrapped.
    parent: the instance around this one, None for an outermost one.
    height: 0 if no other instance is inside, else one more than the largest height inside.
    """

    path: str
    wrapper: FullyShardedDataParallel
    parent: "Instance | None"
    height: int
    is_root: bool
    skipped: Skipped | None

    @property
    def kind(self) -> type[nn.Module]:
        return type(self.wrapper.module)

    @property
    def strategy(self) -> ShardingStrategy:
        """The strategy in effect; the one asked for is not kept: see `is_alone`."""
        return self.wrapper.sharding_strategy

    @property
    def is_alone(self) -> bool:
        # A group of one rank turns strategies, except hybrid ones, into NO_SHARD.
        return self.wrapper.world_size == 1 and self.strategy is ShardingStrategy.NO_SHARD

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in HYBRID_SHARDING_STRATEGIES

    @property
    def computes_in_float32(self) -> bool:
        # Mixed precision leaves such modules in float32, by default batch norms.
        overrides: object = getattr(self.wrapper.module, "_wrap_overrides", None)
        return overrides == {"mixed_precision": None}

    def ranks(self, group: dist.ProcessGroup | None) -> list[int]:
        return dist.get_process_group_ranks(group) if group is not None else []


def find_instances(model: nn.Module) -> list[Instance]:
    """Return the instances in a model, outermost first. Raises StateError if there is none."""
    wrappers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }
    if not wrappers:
        raise StateError(_nothing_wrapped(model))
    parents = {name: owner_among(wrappers, name.rpartition(".")[0]) for name in wrappers}
    parents[""] = None
    heights = dict.fromkeys(wrappers, 0)
    for name in reversed(wrappers):  # those inside first
        if (above := parents[name]) is not None:
            heights[above] = max(heights[above], heights[name] + 1)
    innermost = {original_path(name): name for name in wrappers}
    found: dict[str, Instance] = {}
    for name, wrapper in wrappers.items():
        path, above = original_path(name), parents[name]
        parent = None if above is None else found[above]
        is_root = parent is None and wrapper._is_root is not False
        if parent is not None and parent.path == path:
            is_root = parent.is_root
        is_list = isinstance(wrapper.module, (nn.ModuleList, nn.ModuleDict))
        has_forward = type(wrapper.module).forward is not nn.Module.forward
        skipped = Skipped.CONTAINER if is_list and not has_forward else None
        if innermost[path] != name:
            skipped = Skipped.WRAPPED_AGAIN
        found[name] = Instance(path, wrapper, parent, heights[name], is_root, skipped)
    return list(found.values())


def owner_among(wrappers: dict[str, FullyShardedDataParallel], name: str) -> str | None:
    """Return the name of the innermost wrapper that is, or contains, the module ``name``."""
    while name and name not in wrappers:
        name = name.rpartition(".")[0]
    return name if name in wrappers else None


def original_path(name: str) -> str:
    """Return a module's path without prefixes of FSDP, activation checkpointing and compilation."""
    return ".".join(part for part in clean_name(name).split(".") if part != COMPILED_MODULE)


def _nothing_wrapped(model: nn.Module) -> str:
    name = type(model).__name__
    if any(type(m).__name__ == FullyShardedDataParallel.__name__ for m in model.modules()):
        return (
            f"{name} is wrapped with PyTorch's FullyShardedDataParallel. Call fullshard.install() "
            "before it is wrapped."
        )
    return (
        f"Nothing in {name} is wrapped with FullyShardedDataParallel. Pass the wrapped model, not "
        "the one inside."
    )
