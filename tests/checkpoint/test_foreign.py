"""State that others have saved: torch.distributed.checkpoint and torch.save, PyTorch's FSDP and ours."""

from __future__ import annotations

import collections
import functools
import importlib
import os
import pickle
import resource
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import fullshard
from fullshard.checkpoint.dcp import DcpFiles
from fullshard.checkpoint.folder import folder_at
from fullshard.errors import CheckpointError
from tests.api import TORCH, Api, use_api
from tests.checkpoint.test_any_to_any import _sharded, _state, _tensor_parallel, _train
from tests.fsdp1.models import quiet
from tests.harness import Pools, Task
from tests.models import mlp
from tests.test_transfer import _whole
from tests.training import assert_equal

pytestmark = pytest.mark.apis("peer_memory")


def _as_saved(api: Api, form: str, model: Any, optimizer: Any) -> dict[str, Any]:
    """Return what a program would give to ``dcp.save``, in one of the forms that programs use."""
    if form == "ours":
        return fullshard.sharded_state(model, optimizer)
    if form == "numbers":
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}
    if form == "weights":
        return dict(model.state_dict())
    if form == "fsdp1":
        wrapper = api.FullyShardedDataParallel
        wrapper.set_state_dict_type(model, api.StateDictType.SHARDED_STATE_DICT)
        return {
            "model": model.state_dict(),
            "optimizer": wrapper.optim_state_dict(model, optimizer),
            "scheduler": {"last_epoch": 3},
            "step": 2,
        }
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"app": {"model": of_model, "optim": of_optimizer}, "step": 2}


def _write_dcp(way: str, form: str, folder: Path) -> dict[str, Tensor]:
    with use_api("peer_memory" if form == "ours" else TORCH) as api, quiet():
        model, optimizer = _sharded(api, way, seed=1, optimizer="adamw")
        _train(model, optimizer, steps=2)
        dcp.save(_as_saved(api, form, model, optimizer), checkpoint_id=folder)
        if form == "ours":
            return _state(api, model, optimizer)
        whole = StateDictOptions(full_state_dict=True)
        of_model, of_optimizer = get_state_dict(model, optimizer, options=whole)
        return _whole({"model": of_model, "optimizer": of_optimizer})


def _read(api: Api, way: str, path: Path, *, weights: bool) -> dict[str, Tensor]:
    model, optimizer = _sharded(api, way, seed=5, optimizer="adamw")
    optimizer.param_groups[0]["lr"] = 9.0
    fullshard.load_checkpoint(path, model, None if weights else optimizer)
    if weights:
        with quiet():
            return _whole(fullshard.sharded_state(model))
    assert optimizer.param_groups[0]["lr"] == 0.01
    state = _state(api, model, optimizer)
    _train(model, optimizer, steps=1)
    return state


@pytest.mark.parametrize(
    ("way", "form", "ours", "ranks"),
    [
        ("fully_shard", "state_dict", "flat", (2, 3)),
        ("fully_shard", "flattened", "fully_shard", (3, 2)),
        ("fully_shard", "numbers", "orig", (2, 3)),
        ("fully_shard", "weights", "flat", (3, 2)),
        ("hybrid_fully_shard", "state_dict", "fully_shard", (4, 2)),
        ("orig", "fsdp1", "fully_shard", (2, 3)),
        ("flat", "fsdp1", "orig", (3, 1)),
        ("orig", "state_dict", "plain", (2, 2)),
        ("hybrid_orig", "fsdp1", "flat", (4, 2)),
        ("flat", "ours", "fully_shard", (2, 3)),
        # DTensors, as "state_dict" has them.
        pytest.param("fully_shard", "ours", "flat", (3, 2), marks=pytest.mark.long),
    ],
)
def test_directories_of_dcp_load_whoever_wrote_them(
    api: str, way: str, form: str, ours: str, ranks: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    folder = tmp_path / "dcp"
    written = pools.run(
        ranks[0], Task(__name__, "_write_dcp", {"way": way, "form": form, "folder": folder})
    )
    weights = form == "weights"
    arguments = {"api": api, "way": ours, "path": folder, "weights": weights}
    for state in pools.run(ranks[1], Task(__name__, "_read", arguments)):
        assert_equal(state, {name: written[0][name] for name in state})
        assert weights or set(state) == set(written[0])


# PyTorch's FSDP1 above tensor parallel


def _write_parallel(folder: Path) -> dict[str, Tensor]:
    with use_api(TORCH) as api, quiet():
        model, optimizer = _tensor_parallel(api, "flat", seed=1)
        model(torch.ones(4, 12)).square().mean().backward()
        optimizer.step()
        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)
        return _whole({"model": of_model, "optimizer": of_optimizer})


def _read_parallel(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    with quiet():
        model, optimizer = _tensor_parallel(api, way, seed=5)
        optimizer.param_groups[0]["lr"] = 9.0
        fullshard.load_checkpoint(folder, model, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.01
        return _whole(fullshard.sharded_state(model, optimizer))


@pytest.mark.parametrize(("way", "ranks"), [("flat", 4), ("rows", 3)])
def test_fsdp1_above_tensor_parallel_loads(
    api: str, way: str, ranks: int, pools: Pools, tmp_path: Path
) -> None:
    written = pools.run(4, Task(__name__, "_write_parallel", {"folder": tmp_path}))
    arguments = {"api": api, "way": way, "folder": tmp_path}
    for values in pools.run(ranks, Task(__name__, "_read_parallel", arguments)):
        assert_equal(values, written[0])


# Files of torch.save


def _write_file(form: str, path: Path) -> dict[str, Tensor]:
    with use_api(TORCH) as api, quiet():
        model, optimizer = _sharded(api, "orig", seed=1, optimizer="adamw")
        _train(model, optimizer, steps=2)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=False)
        of_model, of_optimizer = get_state_dict(model, optimizer, options=whole)
        if torch.distributed.get_rank() == 0:
            content: Any = {"model": of_model, "optimizer": of_optimizer, "epoch": 3}
            content = {"all": content, "ddp": {f"module.{k}": v for k, v in of_model.items()}}[form]
            torch.save(content, path)
        torch.distributed.barrier()
        return _whole({"model": of_model, "optimizer": of_optimizer})


@pytest.mark.parametrize(
    ("form", "way", "ranks"), [("all", "fully_shard", 3), ("all", "flat", 2), ("ddp", "orig", 2)]
)
def test_whole_state_dicts_load(
    api: str, form: str, way: str, ranks: int, pools: Pools, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    written = pools.run(2, Task(__name__, "_write_file", {"form": form, "path": path}))
    arguments = {"api": api, "way": way, "path": path, "weights": form == "ddp"}
    for state in pools.run(ranks, Task(__name__, "_read", arguments)):
        assert_equal(state, {name: written[0][name] for name in state})


# What does not fit, is ambiguous, damaged or hostile


def _saved(folder: Path, content: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(content, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def test_what_does_not_fit_is_listed(model: nn.Module, tmp_path: Path) -> None:
    state = {**model.state_dict(), "1.more": torch.ones(2)}
    del state["0.bias"]
    folder = _saved(tmp_path / "a", {"model": state, "step": 3})
    with pytest.raises(CheckpointError, match=r"(?s)lacks.*model/0.bias.*nothing takes.*1.more"):
        fullshard.load_checkpoint(folder, model)
    loaded = fullshard.load_checkpoint(folder, model, allow=["missing", "unexpected"])
    assert loaded.step == 3
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=r"(?s)lacks.*: 2\n.*    optimizer\n"):
        fullshard.load_checkpoint(folder, model, optimizer, allow="unexpected")


def test_state_of_another_optimizer_is_refused(model: nn.Module, tmp_path: Path) -> None:
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    of_model, of_optimizer = get_state_dict(model, adam)
    folder = _saved(tmp_path / "a", {"model": of_model, "optim": of_optimizer})
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(CheckpointError, match=r"(?s)another optimizer.*exp_avg.*momentum_buffer"):
        fullshard.load_checkpoint(folder, model, sgd)
    path = _saved(tmp_path / "b", {"model": of_model, "optim": adam.state_dict()})
    short = torch.optim.Adam([*model.parameters()][:2])
    with pytest.raises(CheckpointError, match="the same parameters in the same order"):
        fullshard.load_checkpoint(path, model, short)


@pytest.mark.parametrize("shape", [(12,), (1,), (4, 3)])
def test_state_of_another_shape_is_refused(
    model: nn.Module, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    adam.step()
    state = adam.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(shape)
    torch.save({"model": model.state_dict(), "optim": state}, tmp_path / "a.pt")
    fresh = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match=r"(?s)Of another shape.*optimizer/0.weight/exp_avg"):
        fullshard.load_checkpoint(tmp_path / "a.pt", model, fresh)
    assert not fresh.state


def test_two_models_with_the_same_names_are_told_apart(model: nn.Module, tmp_path: Path) -> None:
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    folder = _saved(
        tmp_path / "a", {"nets": {"actor": model.state_dict(), "critic": other.state_dict()}}
    )
    fresh = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match=r"under each of nets.actor., nets.critic."):
        fullshard.load_checkpoint(folder, fresh)
    fullshard.load_checkpoint(folder, {"critic": fresh})
    assert all(p.equal(q) for p, q in zip(fresh.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_each_of_two_optimizers_finds_its_own_state(tmp_path: Path, momentum: float) -> None:
    models = {key: nn.Linear(4, 3) for key in ("actor", "critic")}
    optimizers: dict[str, Any] = {
        "actor": torch.optim.AdamW(models["actor"].parameters(), lr=0.25),
        "critic": torch.optim.SGD(models["critic"].parameters(), lr=0.5, momentum=momentum),
    }
    for key, model in models.items():
        model(torch.ones(1, 4)).sum().backward()
        optimizers[key].step()
    both = {key: get_state_dict(models[key], optimizers[key]) for key in models}
    forms: dict[str, Any] = {
        "by kind": {
            "model": {key: own[0] for key, own in both.items()},
            "optim": {key: own[1] for key, own in both.items()},
        },
        "by key": {key: {"model": own[0], "optim": own[1]} for key, own in both.items()},
    }
    fullshard.save_checkpoint(tmp_path / "own", models, optimizers)
    fullshard.export_dcp(tmp_path / "own", tmp_path / "exported")
    for form, content in forms.items():
        _saved(tmp_path / form, content)
    for path in map(tmp_path.joinpath, (*forms, "own", "exported")):
        fresh = {key: nn.Linear(4, 3) for key in models}
        made: dict[str, Any] = {
            "actor": torch.optim.AdamW(fresh["actor"].parameters()),
            "critic": torch.optim.SGD(fresh["critic"].parameters(), momentum=momentum),
        }
        fullshard.load_checkpoint(path, fresh, made)
        for key, model in fresh.items():
            assert_equal(model.state_dict(), models[key].state_dict())
            assert made[key].param_groups[0]["lr"] == optimizers[key].param_groups[0]["lr"]
            wanted = optimizers[key].state.get(models[key].weight, {})
            assert_equal(made[key].state.get(model.weight, {}), wanted)
        sections = ["model", "optimizer"]
        assert fullshard.diff_checkpoints(tmp_path / "own", path, sections=sections) == []


def test_extra_state_of_others_is_handed_on(model: nn.Module, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    beside = {
        "sched": {**scheduler.state_dict(), "last_epoch": 7},
        "train_state": {"step": torch.tensor(7), "seen": [1, torch.ones(2), {"a": 2.5}]},
        "ema": {"mean": torch.zeros(300_000)},
    }
    for name, content in (("a", {"model": model.state_dict()}), ("b", model.state_dict())):
        folder = _saved(tmp_path / name, {**content, **beside})
        loaded = fullshard.load_checkpoint(folder, model, extra={"sched": scheduler})
        assert scheduler.last_epoch == 7
        state = loaded.extra["train_state"]
        assert state["step"] == 7
        assert (state["seen"][0], state["seen"][2]) == (1, {"a": 2.5})
        assert state["seen"][1].equal(torch.ones(2))
        assert "ema" not in loaded.extra  # large
        assert any("ema.mean is in the files and was left out" in note for note in loaded.notes)
        loaded = fullshard.load_checkpoint(folder, model, extra={"ema": None})
        assert loaded.extra["ema"]["mean"].numel() == 300_000


class _Harm:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_that_is_loaded_can_run(model: nn.Module, tmp_path: Path) -> None:
    harm = _Harm(tmp_path / "harmed")
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(harm))
    with pytest.raises(CheckpointError, match=r"\.metadata would use posix.mkdir"):
        fullshard.load_checkpoint(folder, model)
    torch.save({"model": model.state_dict(), "harm": harm}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="without trust"):
        fullshard.load_checkpoint(tmp_path / "model.pt", model)
    _saved(tmp_path / "b", {"model": model.state_dict(), "sched": harm})
    with pytest.raises(CheckpointError, match=r"sched: cannot be read.*without trust"):
        fullshard.load_checkpoint(tmp_path / "b", model, extra={"sched": None})
    assert not harm.path.exists()


@pytest.mark.parametrize("fault", ["outside", "gap", "cut", "swapped", "link", "junk"])
def test_directories_that_cannot_be_are_refused(
    model: nn.Module, tmp_path: Path, fault: str
) -> None:
    folder = _saved(tmp_path / "a", {"model": model.state_dict()})
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = MetadataIndex("model.0.weight", torch.Size([0, 0]))
    place = metadata.storage_data[index]
    (data,) = folder.glob("*.distcp")
    match fault:
        case "outside":
            place.relative_path = "../../etc/passwd"
        case "gap":
            metadata.state_dict_metadata["model.0.weight"].size = torch.Size([5, 4])
        case "cut":
            data.write_bytes(data.read_bytes()[:-100])
        case "swapped":
            metadata.storage_data[index] = metadata.storage_data[
                MetadataIndex("model.0.bias", torch.Size([0]))
            ]
        case "link":
            data.rename(tmp_path / "data")
            data.symlink_to(tmp_path / "data")
    path.write_bytes(b"\x80junk" if fault == "junk" else pickle.dumps(metadata))
    texts = {
        "outside": "names the file",
        "gap": "says of model.0.weight",
        "cut": "ends before it|cannot be read",
        "swapped": "holds something else",
        "link": "cannot be opened",
        "junk": "is damaged",
    }
    with pytest.raises(CheckpointError, match=texts[fault]):
        fullshard.load_checkpoint(folder, model)


_PUTS = {
    "index of the memo": b"\x80\x04Nr\x00\x00\x00\x04.",
    "index in text": b"\x80\x02Np1000000000\n.",
    "bytearray": b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00.",
    "bytes": b"\x80\x03B\xff\xff\xff\x7f.",
    "long bytes": b"\x80\x04\x8e\x00\x00\x00\x00\x01\x00\x00\x00.",
    "number": b"\x80\x02\x8b\xff\xff\xff\x7f.",
}


@pytest.mark.parametrize("pickled", _PUTS.values(), ids=_PUTS)
def test_pickles_do_not_say_how_much_memory_they_take(tmp_path: Path, pickled: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(pickled)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        fullshard.load_checkpoint(tmp_path, nn.Linear(2, 2))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_reading_without_trust_is_not_out_of_proportion(tmp_path: Path) -> None:
    """A large model on many ranks has 100,000 chunks and more."""
    state, places = {}, {}
    for number in range(40):
        name = f"model.layers.{number}.weight"
        offsets = [torch.Size([4 * chunk, 0]) for chunk in range(100)]
        chunks = [ChunkStorageMetadata(offset, torch.Size([4, 8])) for offset in offsets]
        size, properties = torch.Size([400, 8]), TensorProperties(torch.float32)
        state[name] = TensorStorageMetadata(properties, size, chunks)
        for chunk, offset in enumerate(offsets):
            places[MetadataIndex(name, offset, chunk)] = _StorageInfo(f"__{chunk}_0.distcp", 0, 200)
    content = pickle.dumps(Metadata(state, storage_data=places))
    (tmp_path / ".metadata").write_bytes(content)

    calls = collections.Counter[str]()
    before = sys.getprofile()
    sys.setprofile(lambda _, event, __: calls.update((event,)))
    try:
        DcpFiles(folder_at(tmp_path))
    finally:
        sys.setprofile(before)
    # Of Python functions for each chunk, with the look at each that follows. Not by a clock: what else
    # the machine does would count.
    assert calls["call"] < 40 * 4_000


def test_pickles_change_no_class(tmp_path: Path) -> None:
    build = b"\x80\x02c%s\n%s\nN}X\x04\x00\x00\x00evilK\x05s\x86b."
    for module, name in (
        (b"pathlib", b"PosixPath"),
        (b"torch.distributed.checkpoint.metadata", b"Metadata"),
        (b"torch.serialization", b"_get_layout"),
    ):
        (tmp_path / ".metadata").write_bytes(build % (module, name))
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            fullshard.load_checkpoint(tmp_path, nn.Linear(2, 2))
        target = getattr(importlib.import_module(module.decode()), name.decode())
        assert not hasattr(target, "evil")


def _in_itself() -> dict[str, Any]:
    values: dict[str, Any] = {}
    values["me"] = values
    return values


def _doubled(times: int) -> Any:
    value: Any = [1]
    for _ in range(times):
        value = [value, value]
    return value


def _packed(path: Path) -> None:
    """Write a file of torch.save anew, with parts that are packed."""
    with zipfile.ZipFile(path) as plain:
        parts = {name: plain.read(name) for name in plain.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in parts.items():
            packed.writestr(name, data)


OUT_OF_PROPORTION: dict[str, Any] = {
    "itself": _in_itself,
    "doubled list": lambda: {"x": _doubled(40)},
    "doubled dict": lambda: functools.reduce(lambda d, _: {"a": d, "b": d}, range(40), {"x": 1}),
    "stride 0": lambda: {"x": torch.ones(1).expand(2**40)},
    "dots": lambda: {"." * 50_000: torch.ones(1)},
    "long key": lambda: {"x" * 50_000: torch.ones(1)},
    "many long keys": lambda: {"a" * 900: {key: {"b" * 900: 1} for key in range(900)}},
    "levels": lambda: functools.reduce(lambda d, _: {"a": d}, range(300), {"x": 1}),
}


@pytest.mark.parametrize("name", OUT_OF_PROPORTION)
def test_files_take_what_their_size_lets_expect(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 2)
    content = {"model": model.state_dict(), "more": OUT_OF_PROPORTION[name]()}
    torch.save(content, path := tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        fullshard.load_checkpoint(path, model)
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        fullshard.inspect_checkpoint(path)


def test_packed_files_are_not_unpacked(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(1 << 20)}}, path := tmp_path / "a.pt")
    _packed(path)
    assert path.stat().st_size < 10_000
    with pytest.raises(CheckpointError, match="more bytes than the file"):
        fullshard.inspect_checkpoint(path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"k": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}, "keys that read 'k.a.b'"),
        ({"k": {1: 1, "1": 2}}, "keys that read 'k.1'"),
        ({"k": {"_orig_mod.w": 1, "w": 2}}, "has both 'k._orig_mod.w' and 'k.w'"),
    ],
)
def test_values_of_one_name_are_refused(tmp_path: Path, more: Any, said: str) -> None:
    model = nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), **more}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=said):
        fullshard.load_checkpoint(tmp_path / "a.pt", model)


def _left_by_trainer(folder: Path, step: int) -> Path:
    """Write what Transformers' Trainer leaves of a step with Accelerate's FSDP, and side files of theirs."""
    own = folder / f"checkpoint-{step}"
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(param.sum() for param in model.parameters()).backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    with quiet():
        dcp.save({"model": of_model}, checkpoint_id=own / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": of_optimizer}, checkpoint_id=own / "optimizer_0")
    for name in ("trainer_state.json", "scheduler.bin", "random_states_0.pkl", "training_args.bin"):
        (own / name).touch()
    return own


def test_a_folder_of_other_libraries_names_what_is_below_it(tmp_path: Path) -> None:
    for step in (500, 1000):
        own = _left_by_trainer(tmp_path / "run [a]", step)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for call in (
        lambda: fullshard.load_checkpoint(tmp_path / "run [a]", model),
        lambda: fullshard.inspect_checkpoint(tmp_path / "run [a]"),
        lambda: fullshard.export_hf(tmp_path / "run [a]", tmp_path / "out"),
        lambda: fullshard.load_hf(model, tmp_path / "run [a]"),
    ):
        with pytest.raises(CheckpointError) as caught:
            call()
        said = [line for line in str(caught.value).splitlines() if "checkpoint-" in line]
        # The newest first, each with the call that loads it; the side files with none.
        assert [line.split("'")[1] for line in said] == [
            f"checkpoint-{step}/{name}"
            for step in (1000, 500)
            for name in ("pytorch_model_fsdp_0", "optimizer_0")
        ]
        assert "load_checkpoint(PATH, model)" in said[0]
        assert "load_checkpoint(PATH, model, optimizer, allow='missing')" in said[1]
    # And so it is.
    fullshard.load_checkpoint(own / "pytorch_model_fsdp_0", model)
    fullshard.load_checkpoint(own / "optimizer_0", model, optimizer, allow="missing")
    assert len(optimizer.state) == len([*model.parameters()])


def test_what_lies_in_a_folder_itself_is_named(tmp_path: Path) -> None:
    torch.save(mlp().state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "random_states_0.pkl").touch()
    fullshard.save_checkpoint(tmp_path / "step-00000001", mlp())
    with pytest.raises(CheckpointError) as caught:
        fullshard.load_checkpoint(tmp_path, mlp())
    found = [line.split("'")[1] for line in str(caught.value).splitlines()[1:]]
    assert sorted(found) == ["pytorch_model.bin", "step-00000001"]
    fullshard.load_checkpoint(tmp_path / "pytorch_model.bin", mlp())
