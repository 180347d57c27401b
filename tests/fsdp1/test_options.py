"""The options of FullyShardedDataParallel, field by field as PyTorch has them."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import api as torch_api
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

import fullshard
from fullshard.errors import ShardingError
from tests.harness import on_ranks

NAMES = [*torch_api.__all__, "OptimStateKeyType"]
ENUMS = ["BackwardPrefetch", "OptimStateKeyType", "ShardingStrategy", "StateDictType"]
DATACLASSES = [name for name in NAMES if name not in ENUMS]


def _torchs(name: str) -> Any:
    return OptimStateKeyType if name == "OptimStateKeyType" else getattr(torch_api, name)


def _ours(name: str) -> Any:
    return getattr(fullshard, name)


def test_nothing_is_missing() -> None:
    assert set(NAMES) <= set(fullshard.__all__)


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_the_same_members_and_values(name: str) -> None:
    def members(of: type[enum.Enum]) -> list[tuple[str, Any]]:
        return [(member.name, member.value) for member in of]

    assert members(_ours(name)) == members(_torchs(name))


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_have_the_same_fields_and_defaults(name: str) -> None:
    def fields(of: Any) -> list[tuple[str, Any, Any, bool]]:
        return [(f.name, f.default, f.default_factory, f.kw_only) for f in dataclasses.fields(of)]

    assert fields(_ours(name)) == fields(_torchs(name))
    assert repr(_ours(name).__dataclass_params__) == repr(_torchs(name).__dataclass_params__)


@pytest.mark.parametrize("name", DATACLASSES)
def test_dataclasses_have_the_same_bases(name: str) -> None:
    def bases(of: type) -> list[str]:
        return [base.__name__ for base in of.__mro__]

    assert bases(_ours(name)) == bases(_torchs(name))


def test_fields_may_be_set_later() -> None:
    config = fullshard.FullStateDictConfig(rank0_only=True)
    config.offload_to_cpu = True
    assert config == fullshard.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


@on_ranks(2)
def test_an_offload_of_another_kind_is_refused() -> None:
    for wrong in (True, fullshard.PlacementPolicy(), fullshard.CPUOffloadPolicy()):
        with pytest.raises(ShardingError, match="cpu_offload"):
            fullshard.FullyShardedDataParallel(nn.Linear(2, 2), cpu_offload=wrong)  # type: ignore[arg-type]
