"""Checkpoints in object stores: S3 by the protocol, others by fsspec's store in memory."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import http.server
import json
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import fullshard
from fullshard.checkpoint import drafts, objects
from fullshard.checkpoint.folder import folder_at
from fullshard.checkpoint.manager import prune_checkpoints
from fullshard.errors import CheckpointError
from tests.api import Api
from tests.checkpoint import checkpoints_in
from tests.harness import Fate, mesh_of, on_ranks, rank, run_fresh, world_size
from tests.models import mlp

alone = pytest.mark.apis("peer_memory")


@pytest.fixture
def prefix() -> Iterator[str]:
    """Return a URL in memory that no other test uses."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    store = fsspec.filesystem("memory")
    if store.exists(url):
        store.rm(url, recursive=True)


@pytest.fixture
def short_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "BEAT_S", 0.1)


def _names(url: str) -> list[str]:
    store = fsspec.filesystem("memory")
    return sorted(Path(name).name for name in store.find(url))


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    return model, optimizer


# S3


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """Serve S3 on this host; return the environment in which its clients find it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server.stop()


def _save_and_load_on_s3(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    if rank() == 0:
        fsspec.filesystem("s3").mkdir("bucket")
    torch.distributed.barrier()
    torch.manual_seed(0)
    model = mlp()
    fullshard.fully_shard(model, mesh=mesh_of(world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    folder = "s3://bucket/runs/a"
    manager = fullshard.CheckpointManager(
        folder, model, optimizer, every_steps=1, keep_last=2, signals=()
    )
    for step in range(4):
        model(torch.full((4, 16), 1.0 + step + rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step + 1)
    manager.close()
    wanted = {name: p.full_tensor() for name, p in model.named_parameters()}
    newest = fullshard.latest_checkpoint(folder)
    assert newest is not None
    assert newest == (4, f"{folder}/step-00000004")
    assert [step for step, _ in checkpoints_in(folder)] == [3, 4]
    # Over itself, sharded otherwise, and into one process's model.
    fullshard.save_checkpoint(newest.path, model, optimizer, step=4, overwrite=True)
    other = fullshard.FullyShardedDataParallel(mlp(), use_orig_params=True)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    assert fullshard.load_checkpoint(newest.path, other, other_optimizer).step == 4
    whole = mlp()
    fullshard.load_checkpoint(newest.path, whole)
    assert all(p.equal(wanted[name]) for name, p in whole.named_parameters())
    with fullshard.FullyShardedDataParallel.summon_full_params(other):
        assert all(p.equal(wanted[name]) for name, p in other.module.named_parameters())
    if rank() == 0:  # of two jobs, one is the first
        target = folder_at(folder)
        assert isinstance(target, objects.ObjectFolder)
        target.create_small("first", b"one")
        with pytest.raises(CheckpointError, match="FileExistsError"):
            target.create_small("first", b"two")
        assert target.read_small("first") == b"one"
    with pytest.raises(CheckpointError, match=r"s3://bucket/runs/b.*no folder"):
        fullshard.load_checkpoint("s3://bucket/runs/b", model)
    with pytest.raises(CheckpointError, match=r"(?s)s3://nobody/a.*Check the URL"):
        fullshard.save_checkpoint("s3://nobody/a", model)


def test_s3_saves_resumes_and_loads_on_other_shardings(s3: dict[str, str]) -> None:
    outcomes = run_fresh(2, _save_and_load_on_s3, limit_s=60, environment=s3)
    assert [outcome.fate for outcome in outcomes] == [Fate.RETURNED] * 2, outcomes


# Whole or not at all


def test_a_checkpoint_is_complete_with_its_manifest(prefix: str) -> None:
    model, optimizer = _trained()
    saved = fullshard.save_checkpoint(f"{prefix}/a", model, optimizer, step=7)
    assert saved.path == f"{prefix}/a"
    assert [name.rpartition(".")[2] for name in _names(prefix)] == ["json", "safetensors"]
    fresh, fresh_optimizer = mlp(), None
    loaded = fullshard.load_checkpoint(f"{prefix}/a", fresh, fresh_optimizer)
    assert loaded.step == 7
    assert all(p.equal(q) for p, q in zip(model.parameters(), fresh.parameters(), strict=True))
    fsspec.filesystem("memory").rm(f"{prefix}/a/manifest.json")
    with pytest.raises(CheckpointError, match="no manifest"):
        fullshard.load_checkpoint(f"{prefix}/a", fresh)


@pytest.mark.parametrize("fails_at", ["shard", "manifest"])
def test_an_older_checkpoint_survives_a_store_that_fails(
    prefix: str, short_beats: None, fails_at: str
) -> None:
    model, _ = _trained()
    fullshard.save_checkpoint(f"{prefix}/a", model)
    before = _names(prefix)

    def failing(function: Any) -> Any:
        def call(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            if fails_at in path and "rb" not in args:
                raise RuntimeError("the store is on fire")
            return function(self, path, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", failing(MemoryFileSystem._open))
        patch.setattr(MemoryFileSystem, "pipe_file", failing(MemoryFileSystem.pipe_file))
        with pytest.raises(CheckpointError, match=f"{fails_at}.*the store is on fire"):
            fullshard.save_checkpoint(f"{prefix}/a", nn.Linear(2, 2), overwrite=True)
    fullshard.load_checkpoint(f"{prefix}/a", model)
    if fails_at == "shard":
        assert _names(prefix) == before
    else:  # a store may say that it failed and write the manifest all the same, which needs the files
        assert {*before} < {*_names(prefix)}
        fullshard.save_checkpoint(f"{prefix}/a", model, overwrite=True)
        assert len(_names(prefix)) == len(before)
        fullshard.load_checkpoint(f"{prefix}/a", model)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_manifest_whose_answer_was_lost_keeps_its_files(
    prefix: str, short_beats: None, is_late: bool, replaces: bool
) -> None:
    old, model = nn.Linear(2, 2), nn.Linear(2, 2)
    if replaces:
        fullshard.save_checkpoint(f"{prefix}/a", old)
    arrives: list[Any] = []

    def pipe_file(self: Any, path: str, value: bytes, **kwargs: Any) -> None:
        write = functools.partial(real, self, path, value, **kwargs)
        if "manifest" not in path:
            return write()
        arrives.append(write) if is_late else write()
        raise TimeoutError("no answer")

    real = MemoryFileSystem.pipe_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
        if is_late:
            with pytest.raises(CheckpointError, match=r"no answer.*its files\s+stay there"):
                fullshard.save_checkpoint(f"{prefix}/a", model, overwrite=replaces)
        else:
            fullshard.save_checkpoint(f"{prefix}/a", model, overwrite=replaces)
    found = nn.Linear(2, 2)
    if replaces and is_late:
        fullshard.load_checkpoint(f"{prefix}/a", found)
        assert found.weight.equal(old.weight)
    for write in arrives:
        write()
    fullshard.load_checkpoint(f"{prefix}/a", found)
    assert found.weight.equal(model.weight)
    fullshard.save_checkpoint(f"{prefix}/a", old, overwrite=True)  # takes what is left along
    assert len(_names(prefix)) == 2
    fullshard.load_checkpoint(f"{prefix}/a", found)
    assert found.weight.equal(old.weight)


def test_a_writer_that_died_after_its_manifest_has_not_died_in_vain(
    prefix: str, short_beats: None
) -> None:
    model = nn.Linear(2, 2)
    with pytest.MonkeyPatch.context() as patch:

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(objects.ObjectFolder, "delete", die)
        with contextlib.suppress(KeyboardInterrupt):
            fullshard.save_checkpoint(f"{prefix}/a", model)
    assert any(name.startswith("writer-") for name in _names(prefix))

    def fail(*_: Any) -> None:
        raise OSError("full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects.ObjectFolder, "create", fail)
        with pytest.raises(CheckpointError, match="full"):
            fullshard.save_checkpoint(f"{prefix}/a", nn.Linear(2, 2), overwrite=True)
    found = nn.Linear(2, 2)
    fullshard.load_checkpoint(f"{prefix}/a", found)
    assert found.weight.equal(model.weight)


def test_changed_cut_and_missing_objects_are_named(prefix: str) -> None:
    model, _ = _trained()
    fullshard.save_checkpoint(f"{prefix}/a", model, rng=False)
    store = fsspec.filesystem("memory")
    (shard,) = (name for name in store.find(prefix) if "shard" in name)
    content = bytearray(store.cat(shard))
    content[-3] ^= 1
    store.pipe(shard, bytes(content))
    with pytest.raises(CheckpointError, match=r"shard-00000-0.*is damaged: model/.*has changed"):
        fullshard.load_checkpoint(f"{prefix}/a", model)
    store.pipe(shard, bytes(content[:-1]))
    with pytest.raises(CheckpointError, match=r"shard-00000-0.*bytes instead of"):
        fullshard.load_checkpoint(f"{prefix}/a", model)
    store.rm(shard)
    with pytest.raises(CheckpointError, match=r"shard-00000-0.*is missing"):
        fullshard.load_checkpoint(f"{prefix}/a", model)


# Others


def test_what_a_dead_save_left_is_removed(
    prefix: str, short_beats: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = _trained()
    store = fsspec.filesystem("memory")

    def leave(name: str) -> None:
        store.pipe(f"{prefix}/{name}/writer-deadbeef.json", json.dumps({"beat": 3}).encode())
        store.pipe(f"{prefix}/{name}/shard-00000-0.deadbeef.safetensors", b"half")

    leave("step-00000001")
    fullshard.save_checkpoint(f"{prefix}/step-00000001", model)
    assert len(_names(f"{prefix}/step-00000001")) == 2
    leave("step-00000002")
    manager = fullshard.CheckpointManager(prefix, model, signals=())
    manager.resume()
    assert len(_names(f"{prefix}/step-00000002")) == 2  # it may be being written
    now = datetime.datetime.now(tz=datetime.timezone.utc).timestamp()
    monkeypatch.setattr(objects.time, "time", lambda: now + 7200)
    manager.resume()
    manager.close()
    assert len(_names(f"{prefix}/step-00000002")) == 0
    assert len(_names(f"{prefix}/step-00000001")) == 2


def test_going_back_copies_nothing_and_loses_neither_course(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    manager = fullshard.CheckpointManager(prefix, model, keep_last=1, signals=())
    for step in (3, 4):
        manager.save(step)
    later = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    manager.wait()
    written: list[str] = []
    pipe_file = MemoryFileSystem.pipe_file
    for name in ("cp_file", "rm_file"):
        monkeypatch.setattr(
            MemoryFileSystem, name, lambda *_: pytest.fail("costs as much as it is large")
        )
    monkeypatch.setattr(
        MemoryFileSystem,
        "pipe_file",
        lambda self, path, *args, **kwargs: (
            written.append(path),
            pipe_file(self, path, *args, **kwargs),
        ),
    )
    with pytest.warns(UserWarning, match="step-00000004 are of step 2 or later.*abandoned.json"):
        manager._abandon_after(2)
    assert written == [f"/{prefix.removeprefix('memory://')}/abandoned.json"]
    monkeypatch.undo()
    for step in (2, 3, 4):  # to where the other course was
        manager.save(step)
    manager.save(4)
    manager.close()
    newest = fullshard.latest_checkpoint(prefix)
    assert newest == (4, f"{prefix}/step-00000004-2")
    assert [each.step for each in checkpoints_in(prefix)] == [4]
    found = nn.Linear(2, 2)
    fullshard.load_checkpoint(newest.path, found)
    assert found.weight.equal(model.weight)
    fullshard.load_checkpoint(f"{prefix}/step-00000004", found)
    assert found.weight.equal(later)


def test_removing_takes_the_manifest_first(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        fullshard.save_checkpoint(f"{prefix}/step-{step:08d}", nn.Linear(2, 2), step=step)
    removed: list[str] = []
    remove = MemoryFileSystem.rm_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "rm_file",
        lambda self, path: (removed.append(path), remove(self, path)),
    )
    assert prune_checkpoints(prefix, keep_last=1) == [(1, f"{prefix}/step-00000001")]
    assert [name.rpartition("/")[2].partition("-")[0] for name in removed] == [
        "manifest.json",
        "shard",
        "removed",
    ]


@alone
@on_ranks(2)
def test_a_store_that_other_ranks_do_not_see_is_named_on_all(api: Api) -> None:
    model = mlp()
    api.fully_shard(model, mesh=mesh_of(2))
    url = "memory://alone/a"
    with pytest.raises(CheckpointError, match="rank 0 has made this folder"):
        fullshard.save_checkpoint(url, model)
    assert not fsspec.filesystem("memory").exists(url)


def test_urls_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="nope://a: Protocol not known"):
        fullshard.save_checkpoint("nope://a", model)
    with pytest.raises(CheckpointError, match="Give it as a string"):
        fullshard.save_checkpoint(Path("s3://bucket/a"), model)
    saved = fullshard.save_checkpoint(f"file://{tmp_path}/a", model)
    assert saved.path == tmp_path / "a"
    fullshard.load_checkpoint(tmp_path / "a", model)


class _Whole(http.server.SimpleHTTPRequestHandler):
    """Sends whole files, whatever range is asked for."""

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_without_ranges_is_named(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    fullshard.save_checkpoint(tmp_path / "a", nn.Linear(2, 2))
    handler = functools.partial(_Whole, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a"
        with pytest.raises(CheckpointError, match=r"whole files alone|range"):
            fullshard.load_checkpoint(url, nn.Linear(2, 2))
        server.shutdown()


def test_exports_are_to_disks(prefix: str) -> None:
    model = nn.Linear(2, 2)
    fullshard.save_checkpoint(f"{prefix}/a", model)
    for call in (
        lambda: fullshard.export_hf(model, f"{prefix}/b"),
        lambda: fullshard.load_hf(copy.deepcopy(model), f"{prefix}/a"),
        lambda: fullshard.export_dcp(f"{prefix}/a", f"{prefix}/b"),
    ):
        with pytest.raises(CheckpointError, match="needs a path of a mounted filesystem"):
            call()
    assert len(_names(prefix)) == 2
