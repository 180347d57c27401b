"""Saving through crashes, full disks and other jobs; in the background; and from a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import gc
import os
import random
import resource
import signal
import socket
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fullshard
from fullshard.checkpoint import content as content_module
from fullshard.checkpoint import drafts, manifest
from fullshard.checkpoint import save as save_module
from fullshard.checkpoint.folder import folder_at
from fullshard.checkpoint.local import LocalDraft, LocalFolder
from fullshard.checkpoint.manager import prune_checkpoints
from fullshard.checkpoint.manifest import Manifest
from fullshard.checkpoint.read import Reader
from fullshard.errors import CheckpointError, DamagedCheckpointError, StateError
from tests.api import Api
from tests.checkpoint import checkpoints_in
from tests.fresh import in_warm_forks
from tests.harness import Fate, mesh_of, on_ranks, rank, run_fresh, world_size
from tests.models import mlp
from tests.resident import peak_mib
from tests.training import assert_equal

alone = pytest.mark.apis("peer_memory")


def _sharded(api: Api) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    api.fully_shard(model, mesh=mesh_of(world_size()))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + rank())
    loss = model(torch.randn(4, 16, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# In the background


@alone
@on_ranks(2)
def test_background_saves_what_was_there_at_the_call(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    _step(model, optimizer, 0)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    pending = fullshard.async_save_checkpoint(tmp_path / "a", model, optimizer, step=1)
    for step in range(1, 5):
        _step(model, optimizer, step)
    saved = pending.wait()
    assert saved.step == 1
    assert saved.stall_seconds <= saved.seconds
    assert fullshard.load_checkpoint(saved.path, model, optimizer).step == 1
    assert all(p.full_tensor().equal(before[n]) for n, p in model.named_parameters())


@alone
@pytest.mark.parametrize("most_nbytes", [64 << 20, 0])
@on_ranks(2)
def test_background_saves_nothing_that_changes_after_the_call(
    api: Api, most_nbytes: int, tmp_path: Path
) -> None:
    """Whether a rank copies what it may have to write, or the ranks agree first who writes what."""
    torch.manual_seed(0)
    model = mlp()
    api.fully_shard(model, mesh=mesh_of(2), ignored_params={model[0][0].weight})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.register_buffer("seen", torch.zeros(3))
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    same, mine = torch.ones(4), torch.full((2, 2), float(rank()))
    extra = {"same": [same, {"a": 1}], "mine": mine, "sharded": model[1][0].weight.detach().clone()}
    now = {"same": [torch.ones(4), {"a": 1}], "mine": mine.clone()}
    generator = torch.get_rng_state()
    fullshard.save_checkpoint(tmp_path / "now", model, optimizer, extra=extra)
    changed = tmp_path / "rank 0 has changed everything"
    while most_nbytes and rank() == 1 and not changed.exists():
        time.sleep(0.01)  # so that nothing is agreed before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content_module, "_MOST_COPIED_NBYTES", most_nbytes)
        pending = fullshard.async_save_checkpoint(tmp_path / "later", model, optimizer, extra=extra)
    with torch.no_grad():
        for parameter in model.parameters():
            for value in (parameter, *optimizer.state[parameter].values()):
                (value._local_tensor if isinstance(value, DTensor) else value).fill_(7)
        for tensor in (model.seen, same, mine, extra["sharded"]._local_tensor):
            tensor.fill_(7)
    extra["same"][1]["a"] = 7
    optimizer.param_groups[0]["lr"].fill_(7)
    optimizer.param_groups[0]["betas"] = (0.7, 0.7)
    torch.rand(7)
    changed.touch()
    pending.wait()
    if rank() == 0:
        assert fullshard.diff_checkpoints(tmp_path / "now", tmp_path / "later") == []
    loaded = fullshard.load_checkpoint(tmp_path / "later", model, optimizer)
    assert loaded.extra["same"][0].equal(now["same"][0])
    assert loaded.extra["same"][1] == {"a": 1}
    assert loaded.extra["mine"].equal(now["mine"])
    assert torch.get_rng_state().equal(generator)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@alone
@on_ranks(2)
def test_background_keeps_memory_for_models_of_all_kinds(api: Api, tmp_path: Path) -> None:
    """Copies of one save are the next one's memory: of other tensors, and in other modes of autograd."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "staging", save_module.Staging())
        model, optimizer = _sharded(api)
        _step(model, optimizer, 0)
        other = nn.Linear(5, 3, dtype=torch.bfloat16)
        for number, (modes, saved) in enumerate(
            [
                (torch.inference_mode(), (model, optimizer)),
                (contextlib.nullcontext(), (model, optimizer)),
                (torch.inference_mode(), (other, None)),
                (contextlib.nullcontext(), (other, None)),
                (torch.inference_mode(), (model, optimizer)),
            ]
        ):
            _step(model, optimizer, number)
            fullshard.save_checkpoint(tmp_path / f"{number} now", *saved, rng=False)
            with modes:
                pending = fullshard.async_save_checkpoint(
                    tmp_path / f"{number} later", *saved, rng=False
                )
            pending.wait()
            if rank() == 0:
                now, later = tmp_path / f"{number} now", tmp_path / f"{number} later"
                assert fullshard.diff_checkpoints(now, later) == []


@alone
@pytest.mark.parametrize("where", ["option", "state"])
@on_ranks(2)
def test_values_that_cannot_be_copied_are_refused_by_name(
    api: Api, where: str, tmp_path: Path
) -> None:
    model, optimizer = _sharded(api)
    _step(model, optimizer, 0)
    first = optimizer.param_groups[0]["params"][0]
    place = optimizer.param_groups[0] if where == "option" else optimizer.state[first]
    place["odd"] = threading.Lock()
    named = "odd" if where == "option" else "0.0.weight/odd"
    with pytest.raises(CheckpointError, match=f"optimizer/.*{named}.*lock"):
        fullshard.save_checkpoint(tmp_path / "now", model, optimizer)
    pending = fullshard.async_save_checkpoint(tmp_path / "later", model, optimizer)
    with pytest.raises(CheckpointError, match=f"optimizer/.*{named}.*lock"):
        pending.wait()


@alone
@on_ranks(2)
def test_what_could_not_be_loaded_is_not_saved(api: Api, tmp_path: Path) -> None:
    model, _ = _sharded(api)
    fullshard.save_checkpoint(tmp_path / "a", model, step=1)
    together = save_module.manifest_of

    def with_a_fault(*given: Any) -> Manifest:
        manifest = together(*given)
        first, second = list(manifest.tensors)[:2]
        entry = dataclasses.replace(manifest.tensors[first], aliases=(second,))
        return dataclasses.replace(manifest, tensors={**manifest.tensors, first: entry})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "manifest_of", with_a_fault)
        for name in ("a", "b"):
            with pytest.raises(
                CheckpointError, match=r"not saved.*gives two tensors the same name"
            ):
                fullshard.save_checkpoint(tmp_path / name, model, step=2, overwrite=True)
    if rank() == 0:
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert fullshard.load_checkpoint(tmp_path / "a", model).step == 1


def test_a_manifest_that_would_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    saved = fullshard.save_checkpoint(tmp_path / "a", model, rng=False)
    nbytes = (tmp_path / "a" / "manifest.json").stat().st_size
    for most, fits in ((nbytes, True), (nbytes - 1, False)):
        monkeypatch.setattr(manifest, "_MOST_SMALL_NBYTES", most)
        given = (
            contextlib.nullcontext() if fits else pytest.raises(CheckpointError, match="not saved")
        )
        with given:
            fullshard.save_checkpoint(tmp_path / "a", model, rng=False, overwrite=True)
        monkeypatch.undo()
        fullshard.load_checkpoint(saved.path, model)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@alone
@on_ranks(2)
def test_parameters_of_modules_that_are_gone_are_not_saved(api: Api, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    api.fully_shard(model, mesh=mesh_of(2))
    names = set(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    del model[1]
    fullshard.save_checkpoint(tmp_path / "a", model, rng=False)
    saved = fullshard.inspect_checkpoint(tmp_path / "a")
    left = set(model.state_dict())
    assert set(saved.tensors) == {f"model/{name}" for name in left}
    assert left < names
    with pytest.raises(StateError, match="trains 2 parameters that the model does not have"):
        fullshard.save_checkpoint(tmp_path / "b", model, optimizer)


@alone
@on_ranks(2)
def test_background_does_not_wait_for_the_other_ranks(api: Api, tmp_path: Path) -> None:
    """Rank 1 begins its save once rank 0 has come out of its own, and trained on."""
    model, optimizer = _sharded(api)
    _step(model, optimizer, 0)
    fullshard.save_checkpoint(tmp_path / "now", model, optimizer)
    seen = tmp_path / "rank 0 is out"
    if rank() == 1:
        while not seen.exists():
            time.sleep(0.01)
    pending = fullshard.async_save_checkpoint(tmp_path / "later", model, optimizer)
    if rank() == 0:
        assert not pending.done()
        seen.touch()
    _step(model, optimizer, 1)
    pending.wait()
    if rank() == 0:
        assert fullshard.diff_checkpoints(tmp_path / "now", tmp_path / "later") == []


@alone
@on_ranks(2)
def test_background_begins_once_all_ranks_have_copied(api: Api, tmp_path: Path) -> None:
    # Ranks that share cores would hold up each other's copies.
    model, optimizer = _sharded(api)
    fullshard.async_save_checkpoint(tmp_path / "first", model, optimizer).wait()
    decide, has_copied = save_module.decide, tmp_path / "rank 1 has copied"
    seen: list[bool] = []

    def watched(*arguments: Any) -> Any:
        seen.append(has_copied.exists())
        return decide(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(save_module, "decide", watched)
        if rank() == 1:
            time.sleep(0.5)
            copies = save_module.staging.copies

            def last(views: Any) -> Any:
                copied = copies(views)
                has_copied.touch()
                return copied

            patched.setattr(save_module.staging, "copies", last)
        fullshard.async_save_checkpoint(tmp_path / "later", model, optimizer).wait()
    assert seen == [True]


@alone
@on_ranks(2)
def test_what_keeps_one_rank_from_saving_in_the_background_is_named_on_all(
    api: Api, tmp_path: Path
) -> None:
    model, _ = _sharded(api)
    metadata = {"a": object() if rank() == 1 else 1}
    pending = fullshard.async_save_checkpoint(tmp_path / "a", model, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"rank 1: metadata/a is a builtins\.object"):
        pending.wait()

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state")

    extra = {"mine": Broken() if rank() == 1 else 1}
    fullshard.async_save_checkpoint(tmp_path / "a", model, extra=extra)
    with pytest.raises(
        CheckpointError, match=r"rank 1: .*a: cannot be saved: ValueError: no state"
    ):
        fullshard.async_save_checkpoint(tmp_path / "a", model)
    fullshard.async_save_checkpoint(tmp_path / str(rank()), model)
    with pytest.raises(CheckpointError, match=r"path is .*0' on rank 0 and .*1' on rank 1"):
        fullshard.async_save_checkpoint(tmp_path / "a", model)
    assert not list(tmp_path.iterdir())


@alone
@on_ranks(2)
def test_one_save_at_a_time_and_errors_come_at_the_next_call(api: Api, tmp_path: Path) -> None:
    model, _ = _sharded(api)
    fullshard.save_checkpoint(tmp_path / "a", model)
    fullshard.async_save_checkpoint(tmp_path / "a", model)
    with pytest.raises(CheckpointError, match="already holds"):
        fullshard.async_save_checkpoint(tmp_path / "b", model)
    first = fullshard.async_save_checkpoint(tmp_path / "c", model)
    fullshard.async_save_checkpoint(tmp_path / "d", model)
    assert first.done()
    assert fullshard.load_checkpoint(tmp_path / "d", model).step is None
    assert not (tmp_path / "b").exists()


def test_a_save_that_has_ended_keeps_no_model(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = fullshard.async_save_checkpoint(tmp_path / "a", model, optimizer)
    done.wait()
    failed = fullshard.async_save_checkpoint(tmp_path / "a", model, optimizer)
    with pytest.raises(CheckpointError, match="already holds"):
        failed.wait()
    left = [weakref.ref(each) for each in (model, optimizer, model.weight)]
    del model, optimizer
    gc.collect()
    assert [each() for each in left] == [None, None, None]
    assert done.path == failed.path


def _save_later(*arguments: Any) -> None:
    fullshard.async_save_checkpoint(*arguments).wait()


# From a loop


@alone
@on_ranks(2)
def test_manager_saves_when_due_and_keeps_what_was_asked(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    manager = fullshard.CheckpointManager(
        tmp_path, model, optimizer, every_steps=2, keep_last=2, keep_every=6
    )
    assert manager.resume() == 0
    losses = []
    for step in range(14):
        losses.append(_step(model, optimizer, step))
        assert manager.step(step + 1) == (step % 2 == 1)
    manager.close()
    assert [each.step for each in checkpoints_in(tmp_path)] == [6, 12, 14]
    assert (tmp_path / "latest").read_text() == "step-00000014\n"
    # From an older one, as if it had not stopped.
    other, other_optimizer = _sharded(api)
    loaded = fullshard.load_checkpoint(tmp_path / "step-00000006", other, other_optimizer)
    assert loaded.step == 6
    assert [_step(other, other_optimizer, step) for step in range(6, 14)] == losses[6:]


@alone
@pytest.mark.parametrize("in_background", [True, False])
@on_ranks(2)
def test_going_back_loses_neither_course(api: Api, tmp_path: Path, in_background: bool) -> None:
    model, optimizer = _sharded(api)
    with _manager(tmp_path, model, optimizer, in_background) as manager:
        for step in range(5):
            _step(model, optimizer, step)
            manager.save(step + 1)
    other, other_optimizer = _sharded(api)
    fullshard.load_checkpoint(tmp_path / "step-00000004", other, other_optimizer)
    with _manager(tmp_path, other, other_optimizer, in_background) as manager:
        for step in (2, 1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                manager.save(step)
            said = [str(each.message) for each in caught if "went back" in str(each.message)]
            assert len(said) == (1 if rank() == 0 else 0)
            manager.wait()
            if rank() == 0:  # which renames
                newest = fullshard.latest_checkpoint(tmp_path)
                assert newest is not None
                assert newest.step == step
                assert (tmp_path / "latest").read_text() == f"step-{step:08d}\n"
    if rank() == 0:
        names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        assert names == [
            "step-00000001",
            "step-00000002.abandoned",
            "step-00000004.abandoned",
            "step-00000005.abandoned",
        ]
    fullshard.load_checkpoint(tmp_path / "step-00000005.abandoned", other, other_optimizer)
    assert_equal(_whole(other), _whole(model))


def test_a_step_of_another_course_is_not_replaced(tmp_path: Path) -> None:
    def manager(model: nn.Module) -> fullshard.CheckpointManager:
        return fullshard.CheckpointManager(tmp_path, model, every_steps=1)

    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with manager(first) as own:
        own.step(1)
        own.step(2)
    with manager(second) as own:
        with pytest.warns(UserWarning, match="00001, .*00002 are of step 1 or later"):
            own.step(1)  # without having loaded it
        own.save(1)
    with manager(second) as own:
        assert own.resume() == 1
        own.save(1)
    assert len(checkpoints_in(tmp_path)) == 1
    found = nn.Linear(2, 2)
    fullshard.load_checkpoint(tmp_path / "step-00000001.abandoned", found)
    assert found.weight.equal(first.weight)
    before = signal.getsignal(signal.SIGTERM)
    failing = manager(second)
    assert signal.getsignal(signal.SIGTERM) != before
    with pytest.raises(ZeroDivisionError), failing:
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before


@alone
@on_ranks(2)
def test_each_save_takes_what_extra_has_then(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    extra: dict[str, Any] = {"tokens": 0, "seen": [0]}
    with fullshard.CheckpointManager(
        tmp_path, model, optimizer, extra=extra, every_steps=1, signals=(), keep_last=None
    ) as manager:
        for step in (1, 2, 3):
            extra["tokens"] += 100
            extra["seen"].append(step)
            extra[f"new{step}"] = step
            manager.step(step)
        loaded = manager.load_latest()
    assert loaded is not None
    assert loaded.extra == extra
    second = fullshard.load_checkpoint(tmp_path / "step-00000002", model, optimizer)
    assert second.extra == {"tokens": 200, "seen": [0, 1, 2], "new1": 1, "new2": 2}


@alone
@on_ranks(2)
def test_what_is_asked_for_is_that_of_the_call(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    extra: dict[str, Any] = {"a": 1}
    metadata: dict[str, Any] = {"list": [1]}
    models = {"net": model}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "_HEAD_START_SECONDS", 0.3)
        pending = fullshard.async_save_checkpoint(
            tmp_path / "a", models, {"net": optimizer}, extra=extra, metadata=metadata
        )
        if rank() == 1:  # and not on the other
            extra["b"] = models["other"] = nn.Linear(2, 2)
            metadata["list"].append(2)
        pending.wait()
    loaded = fullshard.load_checkpoint(tmp_path / "a", {"net": model}, {"net": optimizer})
    assert loaded.extra == {"a": 1}
    assert loaded.metadata == {"list": [1]}


@alone
@pytest.mark.parametrize("saved_in", ["close", "step"])
@on_ranks(2)
def test_a_signal_to_one_rank_stops_all_also_in_the_last_step(
    api: Api, tmp_path: Path, saved_in: str
) -> None:
    model, optimizer = _sharded(api)
    before = signal.getsignal(signal.SIGTERM)
    manager = fullshard.CheckpointManager(tmp_path, model, optimizer)
    manager.step(1)
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    assert not manager.step(2)
    if saved_in == "step":
        assert manager.step(3)
    manager.close()
    assert manager.stopping
    assert signal.getsignal(signal.SIGTERM) == before
    if rank() == 0:  # which has heard that the others are done
        wanted = [2 if saved_in == "close" else 3]
        assert [each.step for each in checkpoints_in(tmp_path)] == wanted
    manager.close()
    with pytest.raises(CheckpointError, match="is closed"):
        manager.save(4)


@pytest.mark.parametrize("step", ["2", None, 1.5, True, -1])
def test_steps_are_numbers(tmp_path: Path, step: Any) -> None:
    with fullshard.CheckpointManager(tmp_path, nn.Linear(2, 2)) as manager:
        for call in (manager.step, manager.save):
            with pytest.raises(CheckpointError, match="give the number of steps"):
                call(step)
    for name in ("every_steps", "every_minutes", "keep_last", "keep_every"):
        if not (name == "every_minutes" and step == 1.5) and step is not None:
            options: Any = {name: step}
            with pytest.raises(CheckpointError, match=f"{name} is .*must be at least"):
                fullshard.CheckpointManager(tmp_path, nn.Linear(2, 2), **options)
    with pytest.raises(CheckpointError, match="extra is 5: give a dict"):
        fullshard.CheckpointManager(tmp_path, nn.Linear(2, 2), extra=5)  # type: ignore[arg-type]


def test_arguments_of_another_kind_are_named(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    wrong: Any = "adam"
    fullshard.save_checkpoint(tmp_path / "a", model)
    fullshard.export_hf(model, tmp_path / "hf", config={})
    for call, said in (
        (
            lambda: fullshard.save_checkpoint(tmp_path / "b", model, wrong),
            "optimizer is a str: give",
        ),
        (
            lambda: fullshard.load_checkpoint(tmp_path / "a", model, wrong),
            "optimizer is a str: give",
        ),
        (
            lambda: fullshard.CheckpointManager(tmp_path, model, {"x": wrong}),
            r"optimizer\.x is a str",
        ),
        (
            lambda: fullshard.save_checkpoint(tmp_path / "b", {"x": wrong}),
            r"model\.x is a str: give",
        ),
        (lambda: fullshard.load_checkpoint(tmp_path / "a", model, extra=wrong), "extra is 'adam'"),
        (lambda: fullshard.load_hf(model, tmp_path / "hf", rename=wrong), "rename is 'adam': give"),
        (
            lambda: fullshard.prune_checkpoints(tmp_path, keep_last=wrong),
            "keep_last is 'adam': must",
        ),
        (
            lambda: fullshard.convert_checkpoint(tmp_path / "a", tmp_path / "c", ranks=wrong),
            "ranks is 'adam': must",
        ),
    ):
        with pytest.raises(CheckpointError, match=said):
            call()


def test_a_checkpoint_that_has_lost_its_manifest_is_named_and_set_aside(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with fullshard.CheckpointManager(tmp_path, model, every_steps=1) as manager:
        for step in (1, 2):
            manager.step(step)
    others = tmp_path / "step-00000009"  # no checkpoint of ours
    others.mkdir()
    (others / "notes.txt").touch()
    lost = tmp_path / "step-00000002"
    (lost / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match="has lost its manifest"):
        fullshard.load_checkpoint(lost, model)
    with pytest.warns(UserWarning, match="00002 is damaged.*has lost its manifest|is missing"):
        latest = fullshard.latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.step == 1
    with fullshard.CheckpointManager(tmp_path, model, every_steps=1) as manager:
        with pytest.warns(UserWarning, match="00002 is damaged.*has lost its manifest"):
            assert manager.resume() == 1
        with pytest.warns(UserWarning, match="00002 are of step 2 or later"):
            manager.step(2)
    assert [each.step for each in checkpoints_in(tmp_path)] == [1, 2]
    assert (tmp_path / "step-00000002.abandoned").is_dir()
    assert (others / "notes.txt").is_file()


@contextlib.contextmanager
def _manager(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, in_background: bool
) -> Iterator[fullshard.CheckpointManager]:
    manager = fullshard.CheckpointManager(
        path, model, optimizer, keep_last=2, in_background=in_background, signals=()
    )
    yield manager
    manager.close()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(fullshard.iter_full_state(model))


@alone
@on_ranks(2)
def test_a_damaged_newest_checkpoint_does_not_stop_a_job(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    manager = fullshard.CheckpointManager(tmp_path, model, optimizer, every_steps=1, signals=())
    for step in range(3):
        _step(model, optimizer, step)
        manager.step(step + 1)
    manager.wait()
    wanted = [_step(model, optimizer, step) for step in range(3, 5)]
    if rank() == 0:
        (path,) = (tmp_path / "step-00000003").glob("shard-00001-0*")
        content = bytearray(path.read_bytes())
        content[-5] ^= 8
        path.write_bytes(content)
        next((tmp_path / "step-00000002").glob("shard-00000-0*")).unlink()
    torch.distributed.barrier()
    with pytest.raises(fullshard.DamagedCheckpointError, match=r"rank 1: .* has changed"):
        fullshard.load_checkpoint(tmp_path / "step-00000003", model, optimizer)
    with pytest.warns(UserWarning, match=r"step-0000000\d is damaged.*(changed|missing)"):
        assert manager.resume() == 1
    for step in range(1, 3):
        _step(model, optimizer, step)
    assert [_step(model, optimizer, step) for step in range(3, 5)] == wanted
    with pytest.raises(CheckpointError, match="does not fit"):
        fullshard.CheckpointManager(tmp_path, nn.Linear(2, 2), signals=()).resume()
    manager.close()


@alone
@on_ranks(2)
def test_a_time_that_has_come_is_one_save(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    manager = fullshard.CheckpointManager(
        tmp_path, model, optimizer, every_minutes=1, signals=(), keep_last=None
    )
    saved = []
    for step in range(1, 9):
        if step in (2, 5) and rank() == 0:
            manager._last_saved_at -= 61  # a minute passes, of the first rank, whose clock counts
        if step == 5:
            manager.save(4)  # by the program itself: the minute begins anew
        saved.append(manager.step(step))
    manager.close()
    assert saved == [False, False, True, False, False, False, False, False]
    assert [each.step for each in checkpoints_in(tmp_path)] == [3, 4]


@alone
@pytest.mark.parametrize("is_first", [True, False])
@on_ranks(2)
def test_going_back_waits_for_the_save_that_is_under_way(
    api: Api, tmp_path: Path, is_first: bool
) -> None:
    model, optimizer = _sharded(api)
    manager = fullshard.CheckpointManager(tmp_path, model, optimizer, every_steps=1, signals=())
    if not is_first:
        _step(model, optimizer, 1)
        manager.step(1)
    _step(model, optimizer, 2)
    before = _whole(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "_HEAD_START_SECONDS", 0.3)
        manager.step(2)
        _step(model, optimizer, 3)
        assert manager.resume() == 2
    assert_equal(_whole(model), before)
    manager.close()


@pytest.mark.parametrize("damage", ["missing", "short", "manifest"])
def test_what_cannot_be_loaded_is_not_what_stays(tmp_path: Path, damage: str) -> None:
    for step in (1, 2, 3):
        fullshard.save_checkpoint(tmp_path / f"step-{step:08d}", nn.Linear(2, 2), step=step)
    newest = tmp_path / "step-00000003"
    (shard,) = newest.glob("*.safetensors")
    if damage == "missing":
        shard.unlink()
    else:
        file = newest / "manifest.json" if damage == "manifest" else shard
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="00003 is damaged, so it is not taken for the newest"):
        latest = fullshard.latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.step == 2
    manager = fullshard.CheckpointManager(tmp_path, nn.Linear(2, 2), signals=())
    with pytest.warns(UserWarning, match="00003 is damaged, so the checkpoint before it"):
        assert manager.resume() == 2
    for dry_run in (True, False):
        with pytest.warns(UserWarning, match="step-00000003 is damaged.*does not count"):
            removed = prune_checkpoints(tmp_path, keep_last=1, dry_run=dry_run)
        assert [each.step for each in removed] == [1]
        assert (tmp_path / "step-00000001").is_dir() == dry_run
    assert newest.is_dir()
    with pytest.raises(CheckpointError, match="keep_last is 0"):
        prune_checkpoints(tmp_path, keep_last=0)
    with pytest.raises(CheckpointError, match="is a checkpoint"):
        prune_checkpoints(tmp_path / "step-00000002", keep_last=1)


def test_managers_give_signals_back_in_any_order(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch, fullshard\n"
        f"make = lambda n: fullshard.CheckpointManager({str(tmp_path)!r} + n, torch.nn.Linear(1, 1))\n"
        "a, b = make('a'), make('b')\na.close(); b.close()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint('alive')"
    )
    (done,) = in_warm_forks(code)
    assert done.code == -signal.SIGTERM, done.err
    assert "alive" not in done.out


def test_forks_of_a_program_with_managers_end_on_sigterm(tmp_path: Path) -> None:
    code = (
        "import os, signal, time, torch, fullshard\n"
        f"make = lambda n: fullshard.CheckpointManager({str(tmp_path)!r} + n, torch.nn.Linear(1, 1))\n"
        "a, b = make('a'), make('b')\n"
        "read, write = os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "    os.write(write, b'x')\n    time.sleep(100)\n    os._exit(0)\n"
        "os.read(read, 1)\nos.kill(child, signal.SIGTERM)\n"
        "print(os.WTERMSIG(os.waitpid(child, 0)[1]), signal.getsignal(signal.SIGTERM) == b._ask)\n"
        "b.close(); a.close()\nprint(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    )
    (done,) = in_warm_forks(code)
    assert done.out.split() == ["15", "True", "True"], done.err


def test_a_manager_outside_of_the_main_thread_works_without_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    model, caught = nn.Linear(2, 2), []

    def train(manager: fullshard.CheckpointManager | None) -> None:
        if manager is None:
            with pytest.warns(UserWarning, match=r"does not hear SIGTERM.*signals=\(\)"):
                manager = fullshard.CheckpointManager(tmp_path / "a", model, every_steps=1)
        manager.step(1)
        manager.close()
        caught.append(manager.stopping)

    for own in (None, fullshard.CheckpointManager(tmp_path / "b", model, every_steps=1)):
        thread = threading.Thread(target=train, args=(own,))
        thread.start()
        thread.join()
    assert caught == [False, False]
    assert [len(checkpoints_in(tmp_path / name)) for name in "ab"] == [1, 1]
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    "signals", [signal.SIGTERM, (signal.SIGKILL,), ("SIGTERM",), (1000,), None]
)
def test_signals_that_no_program_hears_are_refused(tmp_path: Path, signals: Any) -> None:
    with pytest.raises(CheckpointError, match="signals is"):
        fullshard.CheckpointManager(tmp_path, nn.Linear(2, 2), signals=signals)


def test_a_program_that_ends_waits_for_its_save_or_says_what_is_lost(tmp_path: Path) -> None:
    code = (
        "import sys, torch, fullshard\n"
        "model = torch.nn.Linear(500, 500)\n"
        f"fullshard.async_save_checkpoint({str(tmp_path / 'a')!r}, model)"
    )
    for lost in (False, True):  # the second time it is there already
        (done,) = in_warm_forks(code)
        assert ("already holds a checkpoint" in done.err) == lost
        assert fullshard.latest_checkpoint(tmp_path) is None
        fullshard.load_checkpoint(tmp_path / "a", nn.Linear(500, 500))


# What goes wrong


@alone
@on_ranks(2)
def test_a_full_disk_leaves_the_old_checkpoint(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        for overwrite, name in ((True, "a"), (False, "b")):
            with pytest.raises(CheckpointError, match=r"^rank 1: .*shard-00001-0.*File too large"):
                fullshard.save_checkpoint(tmp_path / name, model, optimizer, overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    torch.distributed.barrier()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    fullshard.load_checkpoint(tmp_path / "a", model, optimizer)


@alone
@on_ranks(2)
def test_a_path_that_cannot_be_written_is_named_on_all_ranks(api: Api, tmp_path: Path) -> None:
    model, _ = _sharded(api)
    (tmp_path / "file").touch()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"file.*(Not a directory|File exists)"):
        fullshard.save_checkpoint(tmp_path / "file" / "a", model)
    with pytest.raises(CheckpointError, match="is a file or a link"):
        fullshard.save_checkpoint(tmp_path / "file", model)
    with pytest.raises(CheckpointError, match="/proc"):
        fullshard.save_checkpoint("/proc/nothing/a", model)


@alone
@on_ranks(2)
def test_a_folder_that_another_rank_does_not_see_is_named_on_all(api: Api, tmp_path: Path) -> None:
    model, optimizer = _sharded(api)
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:  # as hosts have disks of their own under one name
            patch.setattr(LocalFolder, "sees_draft", lambda *_: False)
        for save in (fullshard.save_checkpoint, _save_later):
            with pytest.raises(CheckpointError, match=r"rank 1: .*rank 0 has made this folder"):
                save(tmp_path / "a", model, optimizer)
    torch.distributed.barrier()
    assert not list(tmp_path.iterdir())


def test_a_program_may_change_its_directory_during_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(512, 512)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    pending = fullshard.async_save_checkpoint("a", model)
    manager = fullshard.CheckpointManager("runs", model, every_steps=1, signals=())
    manager.step(1)
    monkeypatch.chdir(tmp_path / "two")
    manager.step(2)
    manager.close()
    assert pending.wait().path == Path("a")
    assert not list((tmp_path / "two").iterdir())
    assert (tmp_path / "one" / "runs" / "latest").read_text() == "step-00000002\n"


def test_saving_and_loading_leave_memory_as_it_was(tmp_path: Path) -> None:
    """A program may resize it afterwards."""
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    fullshard.async_save_checkpoint(tmp_path / "b", model, optimizer).wait()
    fullshard.load_checkpoint(tmp_path / "a", model, optimizer)
    fullshard.export_hf(model, tmp_path / "hf")
    fullshard.load_hf(model, tmp_path / "hf")
    moments = [state["momentum_buffer"] for state in optimizer.state.values()]
    for tensor in (*model.parameters(), *model.buffers(), *moments):
        tensor.detach().untyped_storage().resize_(4096)


def test_a_draft_that_a_full_disk_keeps_from_beginning_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "pwrite", mock.Mock(side_effect=full))
    with pytest.raises(OSError, match=r"a\.partial-89ababcd") as raised:
        LocalDraft(tmp_path / "a", "89ababcd", overwrite=False)
    assert raised.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_writer_on_another_host_is_known_by_its_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    monkeypatch.setattr(drafts, "BEAT_S", 0.1)
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    draft = LocalDraft(tmp_path / "a", "89ababcd", overwrite=False)
    if not is_alive:
        draft._heart.stop()
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    if is_alive:
        with pytest.raises(CheckpointError, match=r"another job is writing it .*on other"):
            fullshard.save_checkpoint(tmp_path / "a", nn.Linear(2, 2))
        draft.give_up()
    fullshard.save_checkpoint(tmp_path / "a", nn.Linear(2, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.long
@alone
@on_ranks(2, limit_s=120)
def test_a_load_needs_no_memory_beyond_the_shards(api: Api, tmp_path: Path) -> None:
    """Nor a save, and one in the background that of its copy, once."""
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    for layer in model:
        api.fully_shard(layer, mesh=mesh_of(2))
    api.fully_shard(model, mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    saved = tmp_path / "a"
    with peak_mib() as peak:
        fullshard.save_checkpoint(saved, model, optimizer)
    assert peak[0] < 32
    with peak_mib() as peak:
        fullshard.load_checkpoint(saved, model, optimizer)
    assert peak[0] < 32
    with peak_mib() as peak:
        for number in range(3):
            fullshard.async_save_checkpoint(tmp_path / f"{number}", model, optimizer)
        fullshard.load_checkpoint(tmp_path / "2", model, optimizer)
    assert 250 < peak[0] < 300
    # Columns, of which no row lies in the files in one piece.
    fresh = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
    for layer in fresh:
        api.fully_shard(layer, mesh=mesh_of(2), shard_placement_fn=_by_columns)
    momentum = torch.optim.SGD(fresh.parameters(), momentum=0.9)
    with peak_mib() as peak:
        fullshard.load_checkpoint(saved, fresh)
    assert peak[0] < 64
    with peak_mib() as peak:  # the state that the optimizer has not made yet
        fullshard.load_checkpoint(saved, fresh, momentum)
    assert peak[0] < 128 + 64


def _by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.dim() - 1)


# Killed at any moment


def _train_and_save(folder: Path, seed: int, *, kill: bool) -> list[float]:
    """Go on from the newest checkpoint to step 12, and save after every step; or die on the way."""
    model, optimizer = _sharded(fullshard)
    manager = fullshard.CheckpointManager(
        folder,
        model,
        optimizer,
        every_steps=1,
        keep_last=2,
        in_background=seed % 2 == 0,
        signals=(),
    )
    first = manager.resume()
    if kill:
        rng = random.Random(seed)
        victim, delay = rng.randrange(world_size()), rng.uniform(0.0, 0.12)
        if victim == rank():
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.001 + delay)
    losses = []
    for step in range(first, 12):
        losses.append(_step(model, optimizer, step))
        manager.step(step + 1)
    manager.close()
    return [first, *losses]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [2, pytest.param(100, marks=pytest.mark.long)])
def test_the_newest_checkpoint_survives_kills(tmp_path: Path, number: int) -> None:
    """In the background, and not."""
    (straight, _) = run_fresh(2, _train_and_save, folder=tmp_path / "whole", seed=1, kill=False)
    whole = tuple(straight.value)
    for seed in range(number):
        killed = tmp_path / f"killed{seed}"
        outcomes = run_fresh(2, _train_and_save, folder=killed, seed=seed, kill=True)
        if all(o.fate is Fate.RETURNED for o in outcomes):
            continue  # it was done sooner
        newest = fullshard.latest_checkpoint(killed)
        for each in checkpoints_in(killed):
            with Reader(folder_at(each.path)) as reader:
                assert not [fault for _, _, fault in reader.verify() if fault], (seed, each)
        (again, *_) = run_fresh(2, _train_and_save, folder=killed, seed=seed, kill=False)
        assert again.fate is Fate.RETURNED, again.text
        first = 0 if newest is None else newest.step
        assert again.value[0] >= first
        assert tuple(again.value[1:]) == whole[1 + int(again.value[0]) :], seed


def test_no_moment_is_without_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop a save that replaces a checkpoint at each call to the system that changes names."""
    calls: list[str] = []
    limit = 0

    def stopping(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > limit:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        return call

    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    for name in ("rename", "unlink", "rmdir"):
        monkeypatch.setattr(Path, name, stopping(name, getattr(Path, name)))
    done = False
    while not done:
        limit = 10**9
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}" / "a"
        fullshard.save_checkpoint(folder, first)
        calls.clear()
        limit = done_at = stopping.__dict__.setdefault("next", 0)
        stopping.__dict__["next"] = done_at + 1
        try:
            fullshard.save_checkpoint(folder, second, overwrite=True)
            done = True
        except KeyboardInterrupt:
            pass
        limit = 10**9
        found = nn.Linear(2, 2)
        fullshard.load_checkpoint(folder, found)
        assert found.weight.equal(first.weight) or found.weight.equal(second.weight)
    assert done_at >= 4


# Ranks that do not come, or come from elsewhere


@alone
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("apart", ["steps", "half a step"])
@on_ranks(2)
def test_no_checkpoint_is_of_two_moments(api: Api, tmp_path: Path, kind: Any, apart: str) -> None:
    """Each rank looks at its own clock, and the other one trains on meanwhile."""
    model, _ = _sharded(api)
    optimizer = kind(model.parameters(), lr=0.1)
    fullshard.save_checkpoint(tmp_path / "first", model)  # which waits for all
    for _ in range(2):
        pending: Any = None
        for step in range(1, 4):
            model(torch.ones(4, 16)).square().mean().backward()
            if apart == "half a step" and step == 2 and rank() == 0:
                pending = fullshard.async_save_checkpoint(tmp_path / "a", model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if step == (2 if apart == "half a step" or rank() == 1 else 1) and pending is None:
                pending = fullshard.async_save_checkpoint(tmp_path / "a", model, optimizer)
        said = r"step \d+" if apart == "steps" else r"\d+ steps"
        with pytest.raises(
            CheckpointError, match=rf"different moments.*rank 0: {said}.*rank 1: {said}"
        ):
            pending.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)


def _save_now(*arguments: Any) -> None:
    fullshard.save_checkpoint(*arguments)


def _manage(folder: Path, model: nn.Module) -> None:
    with fullshard.CheckpointManager(folder, model) as manager:
        manager.save(1)


_WAYS_TO_SHARD: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fully_shard": fullshard.fully_shard,
    "flat": fullshard.FullyShardedDataParallel,
    "pieces": lambda model: fullshard.FullyShardedDataParallel(model, use_orig_params=True),
    "replicas": fullshard.replicate,
}


@alone
@pytest.mark.parametrize("save", [_save_now, _save_later, _manage])
@pytest.mark.parametrize("way", _WAYS_TO_SHARD)
@pytest.mark.parametrize("num_before", [0, 1])
@on_ranks(2)
def test_no_checkpoint_of_a_model_alone_is_of_two_moments(
    api: Api, tmp_path: Path, save: Callable[..., None], way: str, num_before: int
) -> None:
    """One rank saves before the optimizer's step, the other one after it; nothing else differs."""
    torch.manual_seed(0)
    model = _WAYS_TO_SHARD[way](mlp())

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(num_before):  # by an optimizer that is gone by then
        model(torch.ones(4, 16)).square().mean().backward()
        step(torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank() == 1:
        step(optimizer)
    with pytest.raises(CheckpointError, match=r"different moments.*rank 0: \d+ .*rank 1: \d+ "):
        save(tmp_path / "a", model)
    if rank() == 0:
        step(optimizer)
    assert not list(tmp_path.rglob("*.safetensors"))
    save(tmp_path / "b", model)


@alone
@pytest.mark.parametrize("case", ["empty", "by hand", "in backward", "another", "load"])
@on_ranks(2)
def test_ranks_that_differ_for_a_reason_save_together(api: Api, tmp_path: Path, case: str) -> None:
    """Rows may be one rank's alone, and so may optimizers of what only it has, and writes to its own rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))  # of the last one, rank 1 has nothing
    fullshard.fully_shard(model)
    own = [p for p in model.parameters() if p.to_local().numel() or case != "empty"]
    optimizers = [torch.optim.SGD(own, lr=0.1)]
    if case == "another":
        optimizers += [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)] * (rank() + 1)
    if case == "in backward":
        optimizers = []
        for each in model.parameters():
            single = torch.optim.SGD([each], lr=0.1)
            each.register_post_accumulate_grad_hook(lambda _, single=single: single.step())
    if case == "empty" and rank() == 0:  # of what rank 1 has no row of, more often
        optimizers.append(torch.optim.SGD(model[1].parameters(), lr=0.1))
    for number in range(2):
        model(torch.ones(4, 4)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        if case == "by hand" and rank() == 0:
            with torch.no_grad():
                model[0].weight.to_local().mul_(0.5)
        for save in (_save_now, _save_later):
            save(tmp_path / f"{number}{save.__name__}", model)
        if case == "load":
            fullshard.load_checkpoint(tmp_path / f"{number}_save_now", model)


@alone
@on_ranks(4)
def test_stages_that_step_more_or_less_often_save_together(api: Api, tmp_path: Path) -> None:
    """Two stages of a pipeline, each over two ranks; within one, ranks that differ are found."""
    stage = rank() // 2
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    model = nn.Sequential(OrderedDict({f"stage{stage}": nn.Linear(4, 4)}))
    fullshard.fully_shard(model, mesh=meshes[stage])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(1 + stage):
        optimizer.step()
    for save in (_save_now, _save_later):
        save(tmp_path / save.__name__, model)
    if rank() == 3:
        optimizer.step()
    with pytest.raises(CheckpointError, match=r"different moments.*rank 2: 2 .*rank 3: 3 "):
        _save_later(tmp_path / "apart", model)


@alone
@pytest.mark.parametrize("call", ["save_checkpoint", "load_checkpoint"])
@on_ranks(2)
def test_ranks_in_different_calls_are_named(api: Api, tmp_path: Path, call: str) -> None:
    model, _ = _sharded(api)
    fullshard.save_checkpoint(tmp_path / "a", model)
    other = _save_later if rank() == 0 else getattr(fullshard, call)
    with pytest.raises(CheckpointError, match=f"rank 0 in async_save_checkpoint; rank 1 in {call}"):
        other(tmp_path / "a", model)
    fullshard.load_checkpoint(tmp_path / "a", model)


def _restart(folder: Path, timeout_s: int) -> None:
    number, count = rank(), world_size()
    dist.destroy_process_group()
    limit = datetime.timedelta(seconds=timeout_s)
    store = dist.FileStore(str(folder / f"store{timeout_s}"), count)
    dist.init_process_group("gloo", store=store, rank=number, world_size=count, timeout=limit)


def _save_without_one(folder: Path, save: Callable[..., object]) -> float:
    _restart(folder, 2)
    model = nn.Linear(2, 2)
    save(folder / "a", model)
    began = time.monotonic()
    if rank() == 0:
        with pytest.raises(
            CheckpointError,
            match=r"b: rank 1 did not call (async_)?save_checkpoint here.*has not come",
        ):
            save(folder / "b", model)
    else:
        while not (folder / "raised").exists():
            time.sleep(0.05)
    waited = time.monotonic() - began
    (folder / "raised").touch()
    _restart(folder, 60)
    return waited


@pytest.mark.parametrize(
    "save", [fullshard.save_checkpoint, pytest.param(_save_later, marks=pytest.mark.long)]
)
def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_program_says(
    tmp_path: Path, save: Callable[..., object]
) -> None:
    outcomes = run_fresh(2, _save_without_one, folder=tmp_path, save=save)
    assert [each.fate for each in outcomes] == [Fate.RETURNED] * 2, outcomes
    assert outcomes[0].value < 5


# A path that one rank cannot use


@alone
@pytest.mark.parametrize("path", [None, "unknown-kind://a"])
@on_ranks(2)
def test_ranks_stay_in_step_where_one_has_no_usable_path(
    api: Api, tmp_path: Path, path: Any
) -> None:
    model, optimizer = _sharded(api)
    own = path if rank() == 1 else tmp_path / "a"
    pending = fullshard.async_save_checkpoint(own, model, optimizer)
    with pytest.raises(CheckpointError, match=r"is no path|not known"):
        pending.wait()
    with pytest.raises(CheckpointError, match=r"is no path|not known"):
        fullshard.save_checkpoint(own, model, optimizer)
    with pytest.raises(CheckpointError, match=r"is no path|not known"):
        fullshard.CheckpointManager(own, model, optimizer, signals=())
    with pytest.raises(CheckpointError, match="keep_last is 0"):
        fullshard.CheckpointManager(tmp_path / "m", model, optimizer, keep_last=rank(), signals=())
    fullshard.save_checkpoint(tmp_path / "b", model, optimizer)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b"]
