"""What a checkpoint is made of: models, optimizers, and extra state, as one list of tensors and values.

model/<name>                       or model.<key>/<name> of several models
optimizer/<name>/<state>           or optimizer.<key>/... of several optimizers
extra/<key>/<path>                 tensors inside the extra state; @<rank> after the key where
                                   ranks differ
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from fullshard.checkpoint.everyones_groups import differing_scalars, merged_values
from fullshard.checkpoint.local_content import LocalContent, Told
from fullshard.checkpoint.optimizer_state import OptimizerState, agreed_state
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.values import decoded, encoded
from fullshard.checkpoint.writing import ToWrite
from fullshard.errors import CheckpointError
from fullshard.state.copies import (
    differing_tensors,
    digest_of_unnumbered,
    digest_of_values,
    numbered,
    own_share,
    said_of_differing,
)
from fullshard.state.holdings import HeldTensor, Holding, tensor_holding
from fullshard.state.host_memory import checksum


@dataclasses.dataclass(slots=True)
class Content:
    """What one rank brings to a checkpoint.

    holdings: tensors. values: of the manifest, by key; of this rank alone in ``own_values``, which
    differ between ranks. warning: what to tell the user once ranks do not wait for each other any more.
    """

    holdings: list[Holding]
    values: dict[str, Any]
    own_values: dict[str, Any]
    warning: str = ""


def agreed_content(own: LocalContent, told: Sequence[Told], peers: Peers) -> Content:
    """Put together what this rank knows and what all ranks have told. Collective.

    There is one round of small messages where ranks have states of the same kinds.
    """
    agreed: dict[str, OptimizerState] = {}
    fault: Exception | None = None
    try:
        for section, state in own.states.items():
            digests = [each.states[section] for each in told]
            agreed[section] = agreed_state(state, f"{section}/", peers.group, digests)
    except Exception as error:
        fault = error  # of stages of a pipeline perhaps not on all ranks: raised below, on all
    differing = _differing([each.extras for each in told])
    compares = own.compares and peers.size > 1

    def joined() -> tuple[Content, tuple[bytes, str, str]]:
        if fault is not None:
            raise fault
        content = _joined(own, agreed, differing, peers.rank)
        of_optimizers = repr(content.values["optimizers"]).encode()
        of_values = digest_of_values(content.holdings, checksum) if compares else ""
        held = digest_of_unnumbered(content.holdings)
        return content, (held, checksum(of_optimizers), of_values)

    content, told_now = peers.together_telling(joined)
    differing_values = {
        name: ranks for state in agreed.values() for name, ranks in state.differing.items()
    }
    if len({(held, of_values) for held, _, of_values in told_now}) > 1:
        differing_values.update(differing_tensors(content.holdings, peers.gathered, checksum))
    content.holdings = numbered(content.holdings, peers.group, [held for held, *_ in told_now])
    if len({of_optimizers for _, of_optimizers, _ in told_now}) > 1:
        everyones = peers.gathered(content.values["optimizers"])
        content.values["optimizers"] = merged_values(everyones)
        differing_values.update(differing_scalars(everyones))
    content.warning = said_of_differing(differing_values, taken="saved")
    return content


def _joined(
    local: LocalContent, agreed: Mapping[str, OptimizerState], differing: Collection[str], rank: int
) -> Content:
    """Put models, optimizers and extra state together, once it is known where ranks differ."""
    holdings = list(local.holdings)
    values: dict[str, Any] = {
        "optimizers": {section: _values(section, state) for section, state in agreed.items()},
        "extra": {},
        "models": local.models,
    }
    for state in agreed.values():
        holdings += state.tensors.values()
    own_values: dict[str, Any] = {}
    for key, each in local.extras.items():
        if key not in differing:
            values["extra"][key] = each.tree
            holdings += [tensor_holding(name, tensor) for name, tensor in each.tensors.items()]
            continue
        if any(isinstance(tensor, HeldTensor) for tensor in each.tensors.values()):
            raise CheckpointError(
                f"extra {key!r} holds sharded tensors, and other values beside them that differ between "
                "ranks. Give them as two entries."
            )
        own: dict[str, torch.Tensor] = {}
        decoded_state = decoded(each.tree, each.tensors.__getitem__)
        own_values[key] = encoded(decoded_state, f"extra/{key}@{rank}", own.__setitem__)
        holdings += [tensor_holding(name, t)._replace(copies=1) for name, t in own.items()]
    return Content(holdings, values, own_values)


def to_write(holdings: Sequence[Holding]) -> list[ToWrite]:
    """Return this rank's share of the boxes that it holds: every element is one rank's to write."""
    return [
        ToWrite(holding.name, holding.shape, held.box, held.view)
        for holding in map(own_share, holdings)
        for held in holding.boxes
    ]


def _values(section: str, state: OptimizerState) -> dict[str, Any]:
    return {
        "class": state.kind,
        "groups": encoded(state.groups, f"{section}/groups", _no_tensor),
        # Name by name: a parameter's may begin with "$".
        "scalars": {
            name: encoded(own, f"{section}/{name}", _no_tensor)
            for name, own in state.scalars.items()
        },
    }


def _differing(everyones: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the keys of extra state of which not all ranks have the same digest."""
    keys = {key for own in everyones for key in own}
    return {key for key in keys if len({own.get(key) for own in everyones}) > 1}


def _no_tensor(name: str, tensor: torch.Tensor) -> None:
    raise CheckpointError(
        f"{name} is a tensor of shape {tuple(tensor.shape)} inside a value. An optimizer's state may hold "
        "tensors, its options and lists may not."
    )
