"""Exports are folders that others load: whole tensors under clean names, complete or not there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fullshard
from fullshard.checkpoint.local import NewLocalFile
from fullshard.convert import hf_export, opening
from fullshard.errors import CheckpointError
from tests.api import Api
from tests.checkpoint.test_any_to_any import ANY, HYBRID, _sharded, _tensor_parallel
from tests.fsdp1.models import net, quiet
from tests.harness import Fate, Pools, Task, mesh_of, on_ranks, rank, run_fresh
from tests.models import mlp
from tests.resident import peak_mib
from tests.selection import repeats
from tests.training import assert_equal

pytestmark = pytest.mark.apis("peer_memory")


def _by_name(tensors: Any) -> dict[str, Tensor]:
    return {name: tensors[name] for name in sorted(tensors)}


def _all_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder, as the safetensors library reads them."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return _by_name(load_file(folder / "model.safetensors"))
    names = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(names.values())}
    assert sum(map(len, files.values())) == len(names)
    return _by_name({name: files[file][name] for name, file in names.items()})


def _listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# From any model


def _export(api: Api, way: str, folder: Path) -> Any:
    model, _ = _sharded(api, way, seed=1, optimizer="adamw")
    with quiet():
        return fullshard.export_hf(model, folder)


@repeats(lambda s: s["way"] not in ("orig", "flat", "fully_shard", "replicate", "hybrid_flat"))
@pytest.mark.parametrize(
    ("way", "ranks"), [*((way, 3) for way in ANY), *((way, 4) for way in HYBRID)]
)
def test_any_model_is_exported_under_the_names_of_before(
    api: str, way: str, ranks: int, pools: Pools, tmp_path: Path
) -> None:
    expected = net(1).state_dict()
    del expected["tied.weight"]
    task = Task(__name__, "_export", {"api": api, "way": way, "folder": tmp_path / "a"})
    exported = pools.run(ranks, task)
    assert len(set(exported)) == 1
    assert exported[0].num_tensors == len(expected)
    assert exported[0].files == ("model.safetensors",)
    assert_equal(_all_of(tmp_path / "a"), _by_name(expected))
    assert _listed(tmp_path) == ["a", "a/model.safetensors"]
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def _export_parallel(api: Api, way: str, folder: Path) -> None:
    model, _ = _tensor_parallel(api, way, seed=1)
    fullshard.export_hf(model, folder, max_shard_size="1KB")


@pytest.mark.parametrize("way", ["rows", "flat"])
def test_tensor_parallel_models_are_exported(
    api: str, way: str, pools: Pools, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    expected = mlp(num_layers=2, dim=12).state_dict()
    pools.run(4, Task(__name__, "_export_parallel", {"api": api, "way": way, "folder": tmp_path}))
    assert_equal(_all_of(tmp_path), _by_name(expected))


@on_ranks(2)
def test_wrappers_leave_nothing_in_names(api: Api, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0] = checkpoint_wrapper(model[0])
    model[1] = torch.compile(model[1], backend="eager")
    for part in (model[0], model[1], model):
        api.fully_shard(part, mesh=mesh_of(2))
    fullshard.export_hf(model, tmp_path / "a")
    fullshard.export_hf(torch.compile(model, backend="eager"), tmp_path / "b")
    names = [f"{n}.{kind}" for n in range(3) for kind in ("bias", "weight")]
    assert list(_all_of(tmp_path / "a")) == list(_all_of(tmp_path / "b")) == names


@on_ranks(2)
def test_what_is_exported_loads_again(api: Api, tmp_path: Path) -> None:
    first, second = (api.fully_shard(net(seed), mesh=mesh_of(2)) for seed in (1, 2))
    fullshard.export_hf(first, tmp_path / "a", max_shard_size=200, rename={"blocks.": "h."})
    loaded = fullshard.load_hf(second, tmp_path / "a", rename={"h.": "blocks."})
    assert loaded.missing == loaded.unexpected == ()
    for name, value in first.state_dict().items():
        other = second.state_dict()[name]
        assert torch.equal(
            getattr(other, "_local_tensor", other), getattr(value, "_local_tensor", value)
        )


@pytest.mark.long
@on_ranks(2, limit_s=120)
def test_no_rank_has_much_more_than_its_shards(api: Api, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(32)))  # 512 MiB
    for layer in model:
        api.fully_shard(layer, mesh=mesh_of(2))
    api.fully_shard(model, mesh=mesh_of(2))
    with peak_mib() as peak:
        fullshard.export_hf(model, tmp_path / "a", max_shard_size="200MB")
    assert peak[0] < 192
    with peak_mib() as peak:
        fullshard.load_hf(model, tmp_path / "a")
    assert peak[0] < 64


class _Config:
    def to_json_string(self) -> str:
        return '{"tie_word_embeddings": true}'


class _Images(nn.Module):
    """As models of Transformers that have no table of embeddings, or several."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.config = _Config()

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError("not auto-handled")

    def get_output_embeddings(self) -> None:
        return None


def test_models_without_embeddings_are_exported(tmp_path: Path) -> None:
    written = fullshard.export_hf(_Images(), tmp_path / "a")
    assert written.files == ("model.safetensors", "config.json")


# Files


def test_files_are_as_large_as_asked_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 100), nn.Linear(100, 10))
    calls: list[tuple[int, int]] = []
    exported = fullshard.export_hf(
        model, tmp_path / "a", max_shard_size="2KB", progress=lambda *call: calls.append(call)
    )
    weights = [f"model-0000{n}-of-00005.safetensors" for n in range(1, 6)]
    assert exported.files == (*weights, "model.safetensors.index.json")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == exported.nbytes == 4 * (110 + 1100 + 1010)
    assert calls[-1] == (exported.nbytes, exported.nbytes)
    assert calls == sorted(calls)
    assert_equal(_all_of(tmp_path / "a"), _by_name(model.state_dict()))


@pytest.mark.parametrize(
    ("size", "nbytes"), [(10, 10), ("5GB", 5_000_000_000), ("1.5 KiB", 1536), ("7", 7)]
)
def test_sizes_are_numbers_with_units(size: int | str, nbytes: int) -> None:
    assert hf_export.size_of(size) == nbytes


@pytest.mark.parametrize("size", ["", "5XB", "many", 0, -3])
def test_what_is_no_size_is_refused(size: int | str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_shard_size"):
        fullshard.export_hf(nn.Linear(2, 1), tmp_path / "a", max_shard_size=size)
    assert _listed(tmp_path) == []


def test_every_tensor_is_aligned(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("flag", torch.ones((), dtype=torch.bool))
    model.bias.data = model.bias.data.bfloat16()
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("count", torch.arange(3))
    fullshard.export_hf(model, tmp_path / "a")
    assert_equal(_all_of(tmp_path / "a"), _by_name(model.state_dict()))
    data = (tmp_path / "a" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    sizes = {"I64": 8, "F32": 4, "BF16": 2, "BOOL": 1}
    for fields in header.values():
        assert (8 + length + fields["data_offsets"][0]) % sizes[fields["dtype"]] == 0


def test_floating_point_tensors_are_converted_if_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.register_buffer("count", torch.arange(3))
    config = {"model_type": "mine", "dtype": "float32", "torch_dtype": "float32"}
    fullshard.export_hf(model, tmp_path / "a", dtype=torch.bfloat16, config=config)
    expected = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    assert_equal(_all_of(tmp_path / "a"), _by_name(expected))
    written = json.loads((tmp_path / "a" / "config.json").read_text())
    assert written == {"model_type": "mine", "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    with pytest.raises(CheckpointError, match="give a floating-point one"):
        fullshard.export_hf(model, tmp_path / "b", dtype=torch.int8)


# Beside the weights


def test_configuration_and_tokenizer_files_are_passed_through(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in (
        *("config.json", "tokenizer.json", "merges.txt", "spiece.model", "chat_template.jinja"),
        *("1_Pooling/config.json", "README.md", "model.safetensors", "x.bin", ".git/a.json"),
        *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    ):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text('{"of": "é"}')
    exported = fullshard.export_hf(nn.Linear(2, 1), tmp_path / "a", config=source)
    passed = ["1_Pooling/config.json", "chat_template.jinja", "config.json", "merges.txt"]
    passed += ["spiece.model", "tokenizer.json"]
    assert sorted(exported.files) == sorted(["model.safetensors", *passed])
    assert sorted({*_listed(tmp_path / "a")} - {"1_Pooling"}) == sorted(exported.files)
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"of": "é"}
    fullshard.export_hf(nn.Linear(2, 1), tmp_path / "b", config=source / "config.json")
    assert _listed(tmp_path / "b") == ["config.json", "model.safetensors"]


def test_configurations_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("[]")
    for config, said in (
        (tmp_path / "empty", "holds no config.json"),
        (tmp_path / "nowhere", "is not there"),
        (tmp_path / "bad", "not an object"),
        (3, "config is a int"),
    ):
        with pytest.raises(CheckpointError, match=said):
            fullshard.export_hf(nn.Linear(2, 1), tmp_path / "a", config=config)
    assert not (tmp_path / "a").exists()


# Complete or not there


def test_an_export_is_replaced_as_a_whole_if_asked_for(tmp_path: Path) -> None:
    first, second = nn.Linear(30, 3), nn.Linear(3, 2)
    fullshard.export_hf(first, tmp_path / "a", max_shard_size=300, config={"model_type": "mine"})
    with pytest.raises(CheckpointError, match="is there already"):
        fullshard.export_hf(second, tmp_path / "a")
    (tmp_path / "a" / "README.md").touch()
    with pytest.raises(CheckpointError, match=r"holds README\.md"):
        fullshard.export_hf(second, tmp_path / "a", overwrite=True)
    (tmp_path / "a" / "README.md").unlink()
    (tmp_path / "a.removed-0123abcd" / "left").mkdir(parents=True)  # by a crash
    assert len(_all_of(tmp_path / "a")) == 2
    fullshard.export_hf(second, tmp_path / "a", overwrite=True)
    assert _listed(tmp_path) == ["a", "a/model.safetensors"]
    assert_equal(_all_of(tmp_path / "a"), _by_name(second.state_dict()))


@on_ranks(3)
def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_nothing(api: Api, tmp_path: Path) -> None:
    model = api.fully_shard(mlp(num_layers=2, dim=12), mesh=mesh_of(3))
    write = NewLocalFile.write
    num_calls = 0

    def full(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 4:
            raise OSError(28, "No space left on device")
        write(*arguments)

    NewLocalFile.write = full  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            fullshard.export_hf(model, tmp_path / "a", max_shard_size="1KB")
    finally:
        NewLocalFile.write = write  # type: ignore[method-assign]
    torch.distributed.barrier()
    assert _listed(tmp_path) == []
    fullshard.export_hf(model, tmp_path / "a")
    assert (num_calls > 0) == (rank() == 0)


@on_ranks(2)
def test_ranks_that_ask_for_different_exports_are_told(api: Api, tmp_path: Path) -> None:
    model = api.fully_shard(nn.Linear(4, 4), mesh=mesh_of(2))
    with pytest.raises(CheckpointError, match="dtype is None on rank 0 and"):
        fullshard.export_hf(model, tmp_path / "a", dtype=[None, torch.bfloat16][rank()])


# From a checkpoint


def test_a_checkpoint_is_exported_without_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(1)
    model.register_buffer("empty", torch.zeros(0, 3))
    fullshard.save_checkpoint(tmp_path / "all" / "step-1", net(2), step=1)
    fullshard.save_checkpoint(
        tmp_path / "all" / "step-2", model, torch.optim.SGD(model.parameters()), step=2
    )
    fullshard.export_hf(model, tmp_path / "a")
    monkeypatch.setattr(opening, "PART_NBYTES", 30)  # a row at a time
    for source in ("all", "all/step-2"):
        fullshard.export_hf(tmp_path / source, tmp_path / "b", overwrite=True)
        for name in ("a", "b"):
            assert _listed(tmp_path / name) == ["model.safetensors"]
        data = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
        assert data[0] == data[1]
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        fullshard.export_hf(tmp_path / "a", tmp_path / "c")


def test_tied_parameters_are_exported_once(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    fullshard.save_checkpoint(tmp_path / "saved", model)
    for source, name in ((model, "a"), (tmp_path / "saved", "b")):
        assert fullshard.export_hf(source, tmp_path / name).num_tensors == 1
        assert_equal(_all_of(tmp_path / name), {"0.weight": model[0].weight})
        fullshard.load_hf(other, tmp_path / name)
        assert other[1].weight.equal(model[0].weight)


def test_one_of_several_models_is_exported(tmp_path: Path) -> None:
    models = {"actor": nn.Linear(2, 1), "critic": nn.Linear(3, 1)}
    fullshard.save_checkpoint(tmp_path / "a", models)
    fullshard.export_hf(tmp_path / "a", tmp_path / "b", key="critic")
    assert_equal(_all_of(tmp_path / "b"), _by_name(models["critic"].state_dict()))
    with pytest.raises(CheckpointError, match="one of actor, critic"):
        fullshard.export_hf(tmp_path / "a", tmp_path / "c")
    with pytest.raises(CheckpointError, match="this is a model"):
        fullshard.export_hf(models["actor"], tmp_path / "c", key="actor")


@on_ranks(2)
def test_ranks_export_a_checkpoint_together(api: Api, tmp_path: Path) -> None:
    model = api.fully_shard(nn.Linear(4, 4), mesh=mesh_of(2))
    fullshard.save_checkpoint(tmp_path / "a", model)
    exported = fullshard.export_hf(tmp_path / "a", tmp_path / "b", dtype=torch.bfloat16)
    assert exported.nbytes == 2 * 20
    assert {each.dtype for each in _all_of(tmp_path / "b").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "name", ["train.py", "notes.txt", "lora.safetensors", "src/config.json", "manifest.json"]
)
def test_what_no_export_writes_is_never_replaced(tmp_path: Path, name: str) -> None:
    model = nn.Linear(2, 2)
    fullshard.export_hf(model, tmp_path / "a", config={})
    foreign = tmp_path / "a" / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    with pytest.raises(CheckpointError, match=f"holds {name}"):
        fullshard.export_hf(model, tmp_path / "a", config={}, overwrite=True)
    assert foreign.read_text() == "mine"
    fullshard.save_checkpoint(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match="which no export has written"):
        fullshard.export_hf(tmp_path / "b", tmp_path / "b", overwrite=True)
    fullshard.load_checkpoint(tmp_path / "b", model)


class _Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.config = _Config()


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def test_the_architecture_is_the_one_inside_of_compile(tmp_path: Path) -> None:
    fullshard.export_hf(_compiled(_Configured()), tmp_path / "a")
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    assert fields["architectures"] == ["_Configured"]


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_the_architecture_is_the_one_inside_of_ddp(api: Api, tmp_path: Path) -> None:
    model = nn.parallel.DistributedDataParallel(_compiled(_Configured()))
    fullshard.export_hf(model, tmp_path / "a")
    fields = json.loads((tmp_path / "a" / "config.json").read_text())
    assert fields["architectures"] == ["_Configured"]


def _export_and_die(folder: Path, victim: int, of: str) -> None:
    """Export a model, or a checkpoint, while a rank is killed in the middle of it."""
    model = mlp()
    fullshard.fully_shard(model, mesh=mesh_of(2))
    fullshard.save_checkpoint(folder / "checkpoint", model)
    source: Any = model if of == "model" else folder / "checkpoint"
    if rank() == victim:
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        # Rank 0 dies while it writes; another one while it sends, or waits for rank 0.
        setattr(hf_export, "_write_weights" if rank() == 0 else "_write", kill)
    fullshard.export_hf(source, folder / "out")


@pytest.mark.parametrize("of", ["model", "checkpoint"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_others_export_is_named(
    tmp_path: Path, victim: int, of: str
) -> None:
    outcomes = run_fresh(2, _export_and_die, limit_s=40, folder=tmp_path, victim=victim, of=of)
    assert outcomes[victim].fate is Fate.DIED
    (other,) = (each for number, each in enumerate(outcomes) if number != victim)
    assert other.fate is Fate.RAISED
    assert other.error is not None
    assert other.error[0] in ("PeerLostError", "CheckpointError"), other.text
    assert f"rank {victim}" in other.text
    assert other.seconds < 10
    assert not (tmp_path / "out").exists()
