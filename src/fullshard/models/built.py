"""Language models that are built from blueprints: ours, and those of Transformers, as one interface.

    model = build(ConfiguredBlueprint(fields), shard, device=device, seed=0, recompute=False)
    logits = model.logits(tokens, positions)

`shard` is called with the layers and the model, on the meta device; memory is that of the shards.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fullshard.deferred.building import materialize
from fullshard.models.blueprints import Blueprint
from fullshard.models.configured import (
    ConfiguredModel,
    build_from_config,
    recompute_layers,
    sharding_units,
)
from fullshard.models.generation import Step
from fullshard.models.llama import Llama, continuation, init_weights
from fullshard.models.sizes import LlamaConfig

Shard = Callable[[Sequence[nn.Module], nn.Module], None]


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """A model of ours, with the methods of `ConfiguredModel`."""

    module: Llama

    def logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        logits: Tensor = self.module(tokens, positions=positions)
        return logits

    def continuation(self) -> Step:
        return continuation(self.module)

    def flops_per_token(self, *, seq: int) -> int | None:
        return self.module.config.flops_per_token(seq=seq)

    def check_causal(self, *, vocab_size: int, device: torch.device) -> None:
        """Find nothing: what this model lets tokens see is the same for all sizes (tests/test_llama.py)."""

    check_documents_apart = check_causal


LanguageModel = OwnModel | ConfiguredModel


_MOST_NAMED = 3  # of one kind of misfit


def misfits(blueprint: Blueprint, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Say in what tensors of files are not those of a model, of which no memory is made.

    shapes: by name. Of tied parameters the files need one name, and buffers that the model computes none.
    Raises as `build` does.
    """
    if isinstance(blueprint, LlamaConfig):
        with torch.device("meta"):
            model: nn.Module = Llama(blueprint)
    else:
        model = build_from_config(blueprint.fields, seed=0)
    names: dict[int, list[str]] = {}
    own = model.state_dict(keep_vars=True)
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    missing = [tied[0] for tied in names.values() if not shapes.keys() & set(tied)]
    computed = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    others = [name for name in shapes if name not in own and name not in computed]
    differing = [
        f"{name} is {tuple(shape)} there, and {tuple(own[name].shape)} in the model"
        for name, shape in shapes.items()
        if name in own and tuple(shape) != tuple(own[name].shape)
    ]
    return [
        *_counted("they lack {} of its tensors", missing),
        *_counted("they have {} that it has not", others),
        *_counted("{} have other sizes", differing),
    ]


def _counted(said: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = ", ..." if len(names) > _MOST_NAMED else ""
        yield f"{said.format(len(names))} ({', '.join(names[:_MOST_NAMED])}{more})"


def build(
    blueprint: Blueprint, shard: Shard, *, device: torch.device, seed: int, recompute: bool
) -> LanguageModel:
    """Build a model, sharded, with values that depend on the seed alone. Collective.

    recompute: whether layers keep their inputs only, and are computed again in the backward. Raises
    ModelConfigError for a configuration that Transformers cannot build.
    """
    if isinstance(blueprint, LlamaConfig):
        with torch.device("meta"):
            own = Llama(blueprint)
        own.recompute_layers(recompute)
        shard(list(own.model.layers), own)
        own.to_empty(device=device)
        own.tie_weights()
        init_weights(own, seed=seed)
        return OwnModel(own)
    model = build_from_config(blueprint.fields, seed=seed)
    if recompute:
        recompute_layers(model)
    shard(sharding_units(model), model)
    return ConfiguredModel(materialize(model, device=device))
