"""The two walks of docs/code.md: a parameter's and a gradient's way through the files, by watching."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.engine.params.managed import ManagedParameter, owner_of
from tests.api import Api
from tests.harness import on_ranks

ROOT = Path(__file__).parent.parent
SOURCE = str(Path(fullshard.__file__).parent) + "/"


def _listed(walk: str) -> tuple[list[str], set[str]]:
    """Return the files of a walk in docs/code.md, and those said to take note only."""
    text = (ROOT / "docs/code.md").read_text()
    section = text.split(f"### {walk}\n")[1].split("\n#")[0]
    road, _, notes = section.partition("Also involved")
    return re.findall(r"^\d+\. `([\w/]+\.py)`", road, flags=re.MULTILINE), set(
        re.findall(r"`([\w/]+\.py)`", notes)
    )


def _files_with(holds: Callable[[Any], bool], run: Callable[[], Any]) -> set[str]:
    """Return our files in which, while something runs, a function had in hand what is asked for."""
    found: set[str] = set()

    def has(value: Any) -> bool:
        if isinstance(value, (list, tuple, set)):
            return any(holds(each) for each in value)
        if isinstance(value, dict):
            return any(holds(each) for each in (*value, *value.values()))
        return holds(value)

    def trace(frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(SOURCE) or file.endswith(
            "/torch_private.py"
        ):  # which stands for torch
            return None
        if event in ("call", "return") and any(map(has, [*frame.f_locals.values(), argument])):
            found.add(file.removeprefix(SOURCE))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return found


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@on_ranks(2)
@pytest.mark.ours("files")
def test_parameter_passes_the_files_that_are_listed(api: Api) -> None:
    model = _model()
    original = model[0].weight
    local = None

    def holds(value: Any) -> bool:
        nonlocal local
        if not isinstance(value, (torch.Tensor, ManagedParameter)):
            return False
        manager = owner_of(original)
        if manager is None:
            return value is original
        local = manager.local if getattr(manager, "sharded", None) is not None else local
        forms = (original, manager, getattr(manager, "sharded", None), manager.unsharded, local)
        return any(value is form for form in forms)

    def run() -> None:
        for layer in model:
            api.fully_shard(layer)
        api.fully_shard(model)
        model(torch.randn(4, 64))

    road, notes = _listed("A parameter, from `fully_shard` to its first use")
    found = _files_with(holds, run)
    unlisted = sorted(found - {*road, *notes})
    assert not unlisted
    assert {"fsdp2/units.py", "engine/params/shown.py"} <= found  # it was watched
    assert len(road) <= 8
    # Where peers read shards in place, the memory itself is a form of the parameter, and is sampled.
    assert len(found) <= (14 if api.name == "peer_memory" else 12)


@on_ranks(2)
@pytest.mark.ours("files")
def test_gradient_passes_the_files_that_are_listed(api: Api) -> None:
    model = _model()
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    manager = owner_of(model[0].weight)
    assert manager is not None
    loss = model(torch.randn(4, 64)).sum()
    grads: list[torch.Tensor] = []

    def holds(value: Any) -> bool:
        full = None if manager.unsharded is None else manager.unsharded.grad
        for grad in (full, manager.sharded.grad):
            if grad is not None and all(grad is not known for known in grads):
                grads.append(grad)
        return isinstance(value, torch.Tensor) and any(value is grad for grad in grads)

    found = _files_with(holds, loss.backward)
    road, notes = _listed("A gradient, from autograd to `.grad`")
    unlisted = sorted(found - {*road, *notes})
    assert not unlisted
    assert {"engine/iteration.py", "engine/gradients/unit_gradients.py"} <= found  # it was watched
    assert len(road) <= 8
    assert len(found) <= 10
