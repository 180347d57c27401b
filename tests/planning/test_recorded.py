"""A planned step beside one that ranks of this machine took, and recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.models.llama import Llama
from fullshard.models.sizes import LlamaConfig
from fullshard.plan.step import StepSettings
from fullshard.plan.trace import read_traces
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import PEER_MEMORY
from fullshard.planning.costs import Costs, Manner
from fullshard.planning.estimate import estimate_step
from fullshard.planning.machines import machine_named
from fullshard.planning.traced import token_example, trace_workload
from fullshard.planning.traces import planned_traces
from fullshard.tools.beside import beside
from tests.api import Api
from tests.harness import on_ranks, rank

CONFIG = LlamaConfig(num_layers=3, hidden_size=256, intermediate_size=640, num_heads=4)


def _model(*, recomputes: bool) -> Llama:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    model.recompute_layers(recomputes)
    return model


@pytest.mark.long
@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize(("num", "recomputes"), [(1, True), (2, False)])
@on_ranks(2)
def test_a_planned_rank_holds_what_a_recording_counts(
    api: Api, tmp_path: Path, num: int, recomputes: bool
) -> None:
    model = _model(recomputes=recomputes)
    example = token_example(model, batch=2, seq=64)
    for layer in model.model.layers:
        api.fully_shard(layer)
    api.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.zeros(2, 64, dtype=torch.long)
    for traced in (False, True):
        with api.trace(model, tmp_path / str(traced), optimizer=optimizer):
            for _ in range(2):
                for _ in range(num):
                    logits = model(tokens)
                    torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), tokens.flatten()
                    ).backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    if rank():
        return
    units = [f"model.layers.{number}" for number in range(CONFIG.num_layers)]
    workload = trace_workload(_model(recomputes=recomputes), example, units=units)
    settings = StepSettings(Sharding(2, PEER_MEMORY), num_microbatches=num, reduces_each=True)
    costs = Costs(machine_named("H100-80GB-SXM"), Manner())  # of no matter for memory
    found = beside(
        planned_traces(estimate_step(workload, settings, costs)),
        read_traces(tmp_path / "True"),
    )
    assert found["notes"] == []
    *parts, total = found["memory"]
    planned, measured = total["values"]
    assert measured == pytest.approx(planned, rel=0.01)
    values = {row["name"]: row["values"] for row in parts}
    for name in ("sharded parameters", "optimizer state", "communication"):
        assert values[name][0] == values[name][1]
