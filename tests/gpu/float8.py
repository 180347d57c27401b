"""What has to hold of torchao's float8 training: on a GPU by its own matmuls, elsewhere emulated.

    python -m tests.gpu --only fp8

Needs torchao. A GPU before compute capability 9.0 emulates as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fullshard
from fullshard.models.llama import Llama
from tests.collectives import record_traffic
from tests.gpu.checks import BF16, MIXED, assert_no_sync, assert_order
from tests.gpu.checks import check as any_check
from tests.gpu.over_nccl import Training
from tests.gpu.place import Place, loss_of, shard

Converts = Callable[[Llama], None]


def check(name: str, **how: Any) -> Callable[[Callable[[Place], str]], Callable[[Place], str]]:
    """Add a check that needs torchao."""
    return any_check(f"fp8-{name}", package="torchao", **how)


def _converts(
    place: Place,
    recipe: str = "tensorwise",
    *,
    gathers_float8: bool = True,
    is_compiled: bool = False,
) -> Converts:
    """Return what makes the linear layers of a model's blocks float8 ones."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    has_kernels = place.is_cuda and torch.cuda.get_device_capability() >= (9, 0)
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        enable_fsdp_float8_all_gather=gathers_float8 and recipe == "tensorwise",
        emulate=not has_kernels,
    )

    def convert(model: Llama) -> None:
        for layer in model.model.layers:
            convert_to_float8_training(layer, config=config)
            if is_compiled:
                layer.compile()

    return convert


def _scale_all(model: nn.Module) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


_WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "tensorwise": ({}, True),
    "scaled-by-unit": ({}, False),
    "rowwise": ({"recipe": "rowwise"}, False),
    "rowwise-gw-hp": ({"recipe": "rowwise_with_gw_hp"}, False),
    "compiled": ({"is_compiled": True}, True),
}

for _ranks, _words in {1: "one-rank", 2: "two-ranks"}.items():
    for _name, (_how, _precomputes) in _WAYS.items():
        if _name == "compiled" and _ranks > 1:
            continue

        @check(f"{_words}-as-fsdp2-{_name}", ranks=_ranks, is_apart=_ranks > 1)
        def _as_fsdp2(
            place: Place, how: dict[str, Any] = _how, precomputes: bool = _precomputes
        ) -> str:
            training = Training(BF16, _converts(place, **how))
            if precomputes:
                training = dataclasses.replace(training, after_step=_scale_all)
            return training.assert_as_fsdp2(place)


@check("two-ranks-bytes", ranks=2, is_apart=True)
def _bytes(place: Place) -> str:
    """Blocks' weights travel in half the bytes of bfloat16."""
    fullshard.set_default_comm("process_group")
    sent = []
    for gathers_float8 in (True, False):
        model = place.model()
        _converts(place, gathers_float8=gathers_float8)(model)
        weights = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
        sharded = shard(model, mp_policy=MIXED)
        loss_of(sharded, place.own(place.tokens(0))).backward()
        _scale_all(sharded)
        with record_traffic() as traffic:
            loss_of(sharded, place.own(place.tokens(1))).backward()
        sent.append(traffic.nbytes["all_gather"])
    # Once in forward and once in backward; a rank sends its half.
    assert sent[1] - sent[0] == weights, f"{sent} bytes with {weights} elements of weights"
    return f"{sent[0] / 1e6:.2f} MB sent a step, {sent[1] / 1e6:.2f} MB in bfloat16"


def _sharded(place: Place) -> Callable[[Llama], nn.Module]:
    def face(model: Llama) -> nn.Module:
        _converts(place)(model)
        return shard(model, mp_policy=MIXED)

    return face


@check("one-rank-no-host-sync", needs_cuda=True)
def _no_sync(place: Place) -> str:
    return assert_no_sync(place, _sharded(place)(place.model()), 0)


@check("two-ranks-late-lanes", ranks=2, needs_cuda=True, is_apart=True)
def _late(place: Place) -> str:
    fullshard.set_default_comm("process_group")
    return assert_order(place, _sharded(place))
