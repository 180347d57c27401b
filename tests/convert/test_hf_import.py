"""Weights of Hugging Face folders get into any model, and each rank reads its own parts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fullshard
from fullshard.errors import CheckpointError
from tests.api import Api
from tests.checkpoint.test_any_to_any import ANY, HYBRID, _sharded, _tensor_parallel, _values
from tests.fsdp1.models import net
from tests.harness import Pools, Task, mesh_of, on_ranks, rank, world_size
from tests.models import mlp
from tests.selection import repeats
from tests.training import assert_equal

pytestmark = pytest.mark.apis("peer_memory")


def _weights(model: nn.Module, *, without: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Return a model's values as a file can have them: no two names with one memory."""
    state = model.state_dict()
    return {name: value.clone() for name, value in state.items() if name not in without}


def _sharded_by_index(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write every second tensor to another file, with an index."""
    folder.mkdir()
    parts: list[dict[str, Tensor]] = [{}, {}]
    for number, (name, value) in enumerate(tensors.items()):
        parts[number % 2][name] = value
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, part in zip(files, parts, strict=True):
        save_file(part, folder / name)
    names = {name: file for file, part in zip(files, parts, strict=True) for name in part}
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# Into any model


def _load(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    model, _ = _sharded(api, way, seed=5, optimizer="adamw")
    loaded = fullshard.load_hf(model, folder)
    assert loaded.missing == loaded.unexpected == ()
    return _values(model)


@repeats(lambda s: s["way"] not in ("orig", "flat", "fully_shard", "replicate", "hybrid_flat"))
@pytest.mark.parametrize(
    ("way", "ranks"), [*((way, 3) for way in ANY), *((way, 4) for way in HYBRID)]
)
def test_any_model_takes_weights(
    api: str, way: str, ranks: int, pools: Pools, tmp_path: Path
) -> None:
    whole = net(1)
    _sharded_by_index(_weights(whole, without=("tied.weight",)), tmp_path / "a")
    task = Task(__name__, "_load", {"api": api, "way": way, "folder": tmp_path / "a"})
    for values in pools.run(ranks, task):
        assert_equal(values, dict(whole.state_dict()))


def _load_parallel(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    model, _ = _tensor_parallel(api, way, seed=5)
    fullshard.load_hf(model, folder)
    return _values(model)


@pytest.mark.parametrize("way", ["rows", "flat"])
def test_tensor_parallel_models_take_weights(
    api: str, way: str, pools: Pools, tmp_path: Path
) -> None:
    whole = mlp(num_layers=2, dim=12)
    save_file(_weights(whole), tmp_path / "model.safetensors")
    task = Task(__name__, "_load_parallel", {"api": api, "way": way, "folder": tmp_path})
    for values in pools.run(4, task):
        assert_equal(values, dict(whole.state_dict()))


@on_ranks(4)
def test_a_rank_reads_its_parts_and_nothing_else(api: Api, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    by_rows = {name: value.numel() // 4 for name, value in model.named_parameters()}
    folder = _written_once(model, tmp_path)
    with _bytes_read() as count:
        loaded = fullshard.load_hf(api.fully_shard(model, mesh=mesh_of(4)), folder)
    assert loaded.nbytes == sum(by_rows.values()) * 4 == count[0]


@on_ranks(4)
def test_a_rank_reads_its_columns_where_rows_are_long(api: Api, tmp_path: Path) -> None:
    model = nn.Linear(1 << 17, 3, bias=False)
    folder = _written_once(model, tmp_path)
    before = model.weight.detach().clone()
    api.fully_shard(model, mesh=mesh_of(4), shard_placement_fn=lambda _: Shard(1))
    with torch.no_grad():
        model.weight.to_local().zero_()
    loaded = fullshard.load_hf(model, folder)
    assert loaded.nbytes == 3 * (1 << 17)
    assert model.weight.full_tensor().equal(before)


@contextlib.contextmanager
def _bytes_read() -> Iterator[list[int]]:
    """Count the bytes of data that this process reads, by the calls it makes."""
    preadv, count = os.preadv, [0]

    def counted(*arguments: Any) -> int:
        nbytes = preadv(*arguments)
        count[0] += nbytes
        return nbytes

    os.preadv = counted
    try:
        yield count
    finally:
        os.preadv = preadv


def _written_once(model: nn.Module, folder: Path) -> Path:
    """Write rank 0's weights, and give all ranks the same."""
    for value in model.state_dict().values():
        torch.distributed.broadcast(value, 0)
    if rank() == 0:
        save_file(_weights(model), folder / "model.safetensors")
    torch.distributed.barrier()
    return folder


# What fits


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_values_are_converted_to_the_dtypes_of_the_model(
    saved: torch.dtype, wanted: torch.dtype, tmp_path: Path
) -> None:
    model, file = nn.Linear(5, 3).to(wanted), tmp_path / "a.safetensors"
    save_file(_weights(nn.Linear(5, 3).to(saved)), file)
    fullshard.load_hf(model, file)
    expected = {name: value.to(wanted) for name, value in load_file(file).items()}
    assert_equal(dict(sorted(model.state_dict().items())), dict(sorted(expected.items())))


def test_other_kinds_of_dtypes_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(5, 3)
    for dtype in (torch.int32, torch.float8_e4m3fn):
        values = {name: value.to(dtype) for name, value in _weights(model).items()}
        save_file(values, tmp_path / "a.safetensors")
        with pytest.raises(CheckpointError, match=r"another kind.*: 2\n    weight: .* in the file"):
            fullshard.load_hf(model, tmp_path)


@on_ranks(2)
def test_what_does_not_fit_is_listed_and_nothing_changes(api: Api, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    folder = _written_once(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(2, 2)), tmp_path
    )
    api.fully_shard(model, mesh=mesh_of(2))
    before = _values(model)
    with pytest.raises(CheckpointError) as caught:
        fullshard.load_hf(model, folder, allow="missing")
    assert "the folder has, and nothing takes" in str(caught.value).lower()
    assert "1.weight: (6, 4) in the file, (5, 4) here" in str(caught.value)
    assert_equal(_values(model), before)


def test_what_is_allowed_is_reported(tmp_path: Path) -> None:
    save_file(_weights(nn.Sequential(nn.Linear(3, 4))), tmp_path / "model.safetensors")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    loaded = fullshard.load_hf(model, tmp_path, allow="missing")
    assert loaded.missing == ("1.weight", "1.bias")
    assert loaded.num_tensors == 2
    loaded = fullshard.load_hf(
        nn.Sequential(nn.Linear(3, 4, bias=False)), tmp_path, allow=["unexpected"]
    )
    assert loaded.unexpected == ("0.bias",)
    with pytest.raises(CheckpointError, match="is not known"):
        fullshard.load_hf(model, tmp_path, allow="everything")


def test_another_beginning_of_names_is_found_and_taken(tmp_path: Path) -> None:
    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    outer = nn.ModuleDict({"model": inner, "lm_head": nn.Linear(2, 2)})
    save_file(_weights(inner), tmp_path / "inner.safetensors")
    save_file(_weights(outer), tmp_path / "outer.safetensors")
    with pytest.raises(CheckpointError, match=r"rename=\{'model\.': ''\}, 4 of 4"):
        fullshard.load_hf(inner, tmp_path / "outer.safetensors")
    rename: dict[str, str | None] = {"model.": "", "lm_head.": None}
    assert not fullshard.load_hf(inner, tmp_path / "outer.safetensors", rename=rename).unexpected
    with pytest.raises(CheckpointError, match=r"rename=\{'': 'model\.'\}, 4 of 6"):
        fullshard.load_hf(outer, tmp_path / "inner.safetensors")
    by_function = lambda name: f"model.{name}"  # noqa: E731
    for given in ({"": "model."}, by_function):
        loaded = fullshard.load_hf(
            outer, tmp_path / "inner.safetensors", rename=given, allow="missing"
        )
        assert loaded.missing == ("lm_head.weight", "lm_head.bias")
    with pytest.raises(CheckpointError, match=r"both become x"):
        fullshard.load_hf(outer, tmp_path / "inner.safetensors", rename=lambda _: "x")


def test_files_with_a_tensor_for_each_expert_are_told(tmp_path: Path) -> None:
    tensors = {f"experts.{n}.w": torch.ones(2) for n in range(3)}
    save_file({f"mlp.{name}": value for name, value in tensors.items()}, tmp_path / "a.safetensors")
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": nn.Linear(2, 3)})})
    with pytest.raises(CheckpointError, match=r"for each expert.*from_pretrained before sharding"):
        fullshard.load_hf(model, tmp_path)


def test_a_tied_parameter_needs_one_of_its_names(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    values = torch.randn(3, 3)
    for names in (["0.weight"], ["1.weight"], ["0.weight", "1.weight"]):
        save_file({name: values.clone() for name in names}, tmp_path / "a.safetensors")
        assert fullshard.load_hf(tied, tmp_path).num_tensors == 1
        assert tied[0].weight.equal(values)
    save_file({"0.weight": values, "1.weight": values + 1}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="One tensor in the model, and several in the folder"):
        fullshard.load_hf(tied, tmp_path)


def test_buffers_that_models_compute_are_let_be(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("position_ids", torch.arange(4), persistent=False)
    save_file({**_weights(model), "position_ids": torch.zeros(4)}, tmp_path / "a.safetensors")
    assert fullshard.load_hf(model, tmp_path).unexpected == ()
    assert model.position_ids.tolist() == [0, 1, 2, 3]


def test_compiled_models_have_clean_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    save_file(_weights(model), tmp_path / "a.safetensors")
    model[0] = torch.compile(model[0], backend="eager")
    assert fullshard.load_hf(model, tmp_path).num_tensors == 2


# Files


def _file(path: Path, header: Any, data: bytes = b"\0" * 16) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _entry(begin: int, end: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"no json", "is no JSON"),
        (b"[" * 100_000, "nested too deep"),
        ([], "not an object"),
        (b'{"a": 1, "a": 2}', "a name twice"),
        ({"weight": 3}, "weight lacks its dtype"),
        ({"weight": _entry(0, 8, dtype="F4")}, "dtype 'F4', which is not known"),
        ({"weight": _entry(0, 8, dtype=[])}, "which is not known"),
        ({"weight": _entry(0, 8, shape=3)}, "has the shape 3"),
        ({"weight": _entry(0, 8, shape=[-2])}, "has the shape"),
        ({"weight": _entry(0, 8, shape=[True, 2])}, "has the shape"),
        ({"weight": _entry(0, 8, shape=[3])}, "would have 8 bytes"),
        ({"weight": _entry(8, 0, shape=[0])}, "would have -8 bytes"),
        ({"weight": _entry(16, 24)}, "ends before weight does"),
        ({"weight": _entry(0, 8), "bias": _entry(4, 12)}, "weight and bias share bytes"),
        ({"weight": _entry(0, 8)}, "has 8 bytes behind its last tensor"),
    ],
)
def test_damaged_headers_are_refused_by_name(header: Any, said: str, tmp_path: Path) -> None:
    _file(tmp_path / "bad.safetensors", header)
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors: .*{said}"):
        fullshard.load_hf(nn.Linear(2, 1), tmp_path)


def test_a_damaged_header_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file(_weights(nn.Linear(2, 3)), whole)
    data = whole.read_bytes()
    header_nbytes = 8 + int.from_bytes(data[:8], "little")
    random.seed(1)
    refusals: list[str] = []
    for _ in range(1000):
        damaged = bytearray(data)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(header_nbytes)] = random.randrange(256)
        if random.random() < 0.2:
            del damaged[random.randrange(len(damaged)) :]
        (tmp_path / "a.safetensors").write_bytes(damaged)
        try:
            fullshard.load_hf(nn.Linear(2, 3), tmp_path / "a.safetensors")
        except CheckpointError as error:  # and nothing else
            refusals.append(str(error))
    assert len(refusals) > 800
    assert all("a.safetensors: " in said for said in refusals)


def _index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _twice(folder: Path) -> None:
    for name in "ab":
        save_file({"w": torch.zeros(2)}, folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda folder: None, "holds no"),
        (lambda folder: (folder / "pytorch_model.bin").touch(), "pytorch_model.bin is pickled"),
        (lambda folder: (folder / "a.safetensors").write_bytes(b"123"), "has 3 bytes"),
        (lambda folder: (folder / "a.safetensors").write_bytes(b"\xff" * 99), "its header would"),
        (lambda folder: (folder / "a.safetensors").mkdir(), "is no regular file"),
        (lambda folder: os.mkfifo(folder / "a.safetensors"), "is no regular file"),
        (lambda folder: _index(folder, {"w": "../x.safetensors"}), "none beside it"),
        (lambda folder: _index(folder, {"w": 3}), "none beside it"),
        (lambda folder: _index(folder, {"w": "x.safetensors"}), "x.safetensors: is not there"),
        (lambda folder: _index(folder, []), "has no weight_map"),
        (_twice, "has w, which a.safetensors has as well"),
    ],
)
def test_folders_that_cannot_be_are_refused_by_name(
    write: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match=said):
        fullshard.load_hf(nn.Linear(2, 1), tmp_path)
    with pytest.raises(CheckpointError, match="is not there"):
        fullshard.load_hf(nn.Linear(2, 1), tmp_path / "elsewhere")


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    _sharded_by_index(_weights(nn.Linear(2, 1)), tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    names = index["weight_map"]
    names["weight"], names["bias"] = names["bias"], names["weight"]
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"says that weight is in .* and it is not"):
        fullshard.load_hf(nn.Linear(2, 1), tmp_path / "a")


def test_links_as_in_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file(_weights(nn.Linear(2, 1)), tmp_path / "blobs" / "0a1b")
    (tmp_path / "model.safetensors").symlink_to("blobs/0a1b")
    assert fullshard.load_hf(nn.Linear(2, 1), tmp_path).num_tensors == 2


@on_ranks(2)
def test_other_files_on_another_rank_are_noticed_on_all(api: Api, tmp_path: Path) -> None:
    # Each rank in a folder of its own, under one relative name.
    own = tmp_path / str(rank())
    own.mkdir(exist_ok=True)
    torch.manual_seed(0)
    shape = (3, 4) if rank() == 0 else (4, 3)
    save_file({"weight": torch.randn(*shape), "bias": torch.randn(4)}, own / "a.safetensors")
    model = nn.Linear(3, 4)
    before = Path.cwd()
    os.chdir(own)
    try:
        with pytest.raises(CheckpointError, match=r"path is 'a.safetensors' on rank 0 and 'b"):
            fullshard.load_hf(nn.Linear(3, 4), f"{'ab'[rank()]}.safetensors")
        with pytest.raises(CheckpointError):
            fullshard.load_hf(api.fully_shard(model, mesh=mesh_of(world_size())), "a.safetensors")
    finally:
        os.chdir(before)
