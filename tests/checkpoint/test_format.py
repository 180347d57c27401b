"""The files: others can read them, and whatever is changed in them is found and named."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import operator
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from torch import nn

import fullshard
from fullshard.checkpoint.folder import folder_at
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.checkpoint.read import Reader
from fullshard.errors import CheckpointError, FullshardError
from fullshard.state.host_memory import checksum
from fullshard.tools.checkpoint_cli import inspect


def _trained(seed: int = 0, width: int = 40) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of one process."""
    model, optimizer = _trained()
    return fullshard.save_checkpoint(tmp_path / "saved", model, optimizer, step=7).path


def test_files_are_safetensors_and_json(saved: Path) -> None:
    model, optimizer = _trained()
    manifest = json.loads((saved / MANIFEST).read_bytes())
    tensors = {k: v for f in manifest["files"] for k, v in load_file(saved / f["name"]).items()}
    assert manifest["tensors"].keys() == tensors.keys()
    for name, value in model.state_dict().items():
        assert tensors[f"model/{name}"].equal(value) or value.dim() == 0
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert tensors[f"optimizer/{name}/exp_avg_sq"].equal(state["exp_avg_sq"])
    assert manifest["step"] == 7
    assert manifest["versions"]["fullshard"] == fullshard.__version__
    assert sorted(p.name for p in saved.iterdir()) == [
        MANIFEST,
        *(f["name"] for f in manifest["files"]),
    ]


def _load(folder: Path) -> None:
    fullshard.load_checkpoint(folder, *_trained(seed=1))


def _faults(folder: Path) -> list[str]:
    try:
        with Reader(folder_at(folder)) as reader:
            return [str(fault) for _, _, fault in reader.verify() if fault is not None]
    except CheckpointError as error:
        return [str(error)]


def _damage(folder: Path, rng: random.Random) -> Path:
    """Flip a bit of a file, or cut it short; return the file."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    if rng.random() < 0.2:
        path.write_bytes(data[: rng.randrange(len(data))])
        return path
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_damage_is_found_and_named(saved: Path, number: int) -> None:
    assert _faults(saved) == []
    for seed in range(number):
        rng = random.Random(seed)
        copy = saved.with_name(f"copy{seed}")
        shutil.copytree(saved, copy)
        damaged = _damage(copy, rng)
        assert any(damaged.name in fault for fault in _faults(copy)), seed
        with pytest.raises(CheckpointError, match=re.escape(damaged.name)):
            _load(copy)
        shutil.rmtree(copy)


def _with_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, with a checksum that is right."""
    content = json.loads((folder / MANIFEST).read_bytes())
    change(content)
    _seal(folder / MANIFEST, json.dumps(content, separators=(",", ":")).encode())


def _seal(manifest: Path, text: bytes) -> None:
    """Write a manifest with a checksum that is right. text: with any checksum."""
    text = re.sub(rb"xxh3-64:[0-9a-f]{16}", b"xxh3-64:" + b"0" * 16, text, count=1)
    manifest.write_bytes(text.replace(b"0" * 16, checksum(text).encode(), 1))


def _weight(content: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = content["tensors"]["model/0.weight"]
    return fields


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "outside": (lambda c: c["files"][0].update(name="../../etc/passwd"), "names the file"),
    "absolute": (lambda c: c["files"][0].update(name="/etc/passwd"), "names the file"),
    "huge": (lambda c: _weight(c).update(shape=[2**40, 2**40]), "too large"),
    "larger": (lambda c: _weight(c).update(shape=[4000, 8]), "not as many elements"),
    "negative": (lambda c: _weight(c).update(shape=[-40, -8]), "is no size"),
    "float": (lambda c: _weight(c)["pieces"][0].update(start=1e3), "is no size"),
    "overlap": (lambda c: _weight(c)["pieces"].append(_weight(c)["pieces"][0]), "elements"),
    "shared": (
        lambda c: _weight(c)["pieces"][0].update(
            start=c["tensors"]["model/2.weight"]["pieces"][0]["start"]
        ),
        "share bytes",
    ),
    "beyond": (lambda c: _weight(c)["pieces"][0].update(start=2**50), "outside of its file"),
    "in_header": (lambda c: _weight(c)["pieces"][0].update(start=0), "outside of its file"),
    "other_file": (lambda c: _weight(c)["pieces"][0].update(file=99), "outside of its file"),
    "moved": (lambda c: _weight(c)["pieces"][0].update(offset=[1, 0]), "not inside"),
    "dims": (lambda c: _weight(c)["pieces"][0].update(offset=[0]), "not inside"),
    "dtype": (lambda c: _weight(c).update(dtype="PICKLE"), "unknown dtype"),
    "checksums": (lambda c: _weight(c)["pieces"][0].update(checksums=[]), "one checksum a block"),
    "no_blocks": (lambda c: c.update(block_nbytes=0), "blocks of 0 bytes"),
    "huge_blocks": (lambda c: c.update(block_nbytes=2**61), "blocks of"),
    "huge_header": (
        lambda c: c["files"][0].update(nbytes=2**50, header_nbytes=2**40),
        "its header has",
    ),
    "version": (lambda c: c.update(version=99), "version 99"),
    "format": (lambda c: c.update(format="zip"), "of the format"),
    "lacking": (lambda c: c.pop("files"), r"manifest\.json: lacks"),
    "kinds": (lambda c: c.update(tensors=[1, 2]), r"manifest\.json: lacks"),
    "nested": (lambda c: c["files"].append(c["files"][0]), "twice"),
    "value": (lambda c: c.update(metadata={"$tensor": "model/nothing"}), "no tensor"),
    "code": (lambda c: c.update(metadata={"$pickle": "x"}), "unknown kind"),
    "no_groups": (lambda c: c.update(optimizers={}), "and not its groups"),
    "random": (lambda c: c["extra"].update(rng=5), "random generators are of no known form"),
    "no names": (
        lambda c: c["optimizers"]["optimizer"]["groups"][0].update(params=[{}]),
        "groups or scalars are of no known form",
    ),
    "no scalars": (
        lambda c: c["optimizers"]["optimizer"]["scalars"].update({"0.weight": {"$tuple": []}}),
        "groups or scalars are of no known form",
    ),
    "no ranks": (lambda c: c.update(extra_by_rank={"$bytes": 3}), "not by ranks"),
    "not a number": (lambda c: c.update(step=float("nan")), "NaN is no number of JSON"),
    "malformed": (lambda c: c.update(metadata={"$bytes": 3}), "no known form"),
    "malformed extra": (lambda c: c["extra"].update(mine={"$bytes": 3}), "no known form"),
    "too large": (
        lambda c: c["extra"].update(mine={"$scalar": 1e300, "dtype": "I32"}),
        "no known form",
    ),
    "extra of nothing": (lambda c: c["extra"].update(mine={"$array": "nothing"}), "no tensor"),
    "module states": (lambda c: c["extra"].update(module_states=[1]), "no known form"),
    "deep": (lambda c: c["extra"].update(mine=_nested(400)), "levels"),
}


def _nested(levels: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(levels):
        tree = [tree]
    return tree


OTHER_FORMS: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**64, 1e308, "", "x", [], [None], {}, {"x": 1}, _nested(150)),
    *({"$tuple": 5}, {"$dict": [[[1], 2]]}, {"$float": "zz"}, {"$bytes": "!!"}, {"$dtype": "ZZ"}),
    *({"$scalar": 5}, {"$scalar": 10**100, "dtype": "I8"}, {"$tensor": "no"}, {"$array": None}),
    *({"$counter": 3}, {"$tensor": []}, {"$tuple": [], "x": 1}, {"$dict": []}, {"$tuple": []}),
)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything inside: of lists, of the first two items."""
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(min(len(tree), 2)):
            yield (*path, key)
            yield from _places(tree[key], (*path, key))


@pytest.mark.parametrize("number", [30, pytest.param(2000, marks=pytest.mark.long)])
def test_values_of_another_form_are_refused_by_whatever_reads_them(
    saved: Path, number: int
) -> None:
    good = json.loads((saved / MANIFEST).read_bytes())
    places = [path for path in _places(good) if path[0] != "checksum"]
    rng = random.Random(number)
    for _ in range(number):
        content = copy.deepcopy(good)
        *around, last = rng.choice(places)
        functools.reduce(operator.getitem, around, content)[last] = rng.choice(OTHER_FORMS)
        _seal(saved / MANIFEST, json.dumps(content, separators=(",", ":")).encode())
        for call in (
            lambda: fullshard.load_checkpoint(saved, *_trained(seed=1)),
            lambda: inspect(str(saved), tensors=True, as_json=False),
            lambda: fullshard.diff_checkpoints(saved, saved),
            lambda: fullshard.export_dcp(saved, saved.with_name("dcp"), overwrite=True),
            lambda: fullshard.convert_checkpoint(saved, saved.with_name("new"), overwrite=True),
        ):
            with contextlib.suppress(FullshardError, typer.Exit):
                call()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_refused_before_anything_changes(saved: Path, name: str) -> None:
    change, said = HOSTILE[name]
    _with_manifest(saved, change)
    model, optimizer = _trained(seed=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=said):
        fullshard.load_checkpoint(saved, model, optimizer)
    if name != "random":  # whose states are tried last
        assert all(value.equal(before[key]) for key, value in model.state_dict().items())


def test_a_manifest_that_is_none_by_its_size_is_not_read(saved: Path) -> None:
    with (saved / MANIFEST).open("r+b") as file:
        file.truncate(50 << 30)  # sparse
    for call in (_load, fullshard.verify_checkpoint):
        with pytest.raises(CheckpointError, match="53687091200 bytes, so it is not what its name"):
            call(saved)


def test_names_that_come_twice_are_refused(saved: Path) -> None:
    _seal(
        (saved / MANIFEST),
        (saved / MANIFEST).read_bytes().replace(b'"step":7', b'"step":7,"step":8'),
    )
    with pytest.raises(CheckpointError, match="a name twice"):
        _load(saved)


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda file, elsewhere: file.symlink_to(elsewhere), "cannot be opened"),
        (lambda file, _: os.mkfifo(file), "is no regular file"),
        (lambda *_: None, "is missing"),
    ],
    ids=["link", "pipe", "nothing"],
)
def test_what_is_in_the_place_of_a_file_is_named(
    saved: Path, put: Callable[[Path, Path], None], said: str
) -> None:
    (file,) = saved.glob("*.safetensors")
    put(file, file.rename(saved.parent / "elsewhere"))
    with pytest.raises(CheckpointError, match=f"{file.name}: {said}"):
        _load(saved)
