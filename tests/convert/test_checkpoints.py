"""Checkpoints without ranks: what is in them, whether they are whole, what they differ in, other forms."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from typer.testing import CliRunner

import fullshard
from fullshard.errors import CheckpointError
from fullshard.tools.cli import app
from fullshard.tools.exits import Exit
from tests.api import Api
from tests.checkpoint.test_any_to_any import _sharded, _state, _train
from tests.harness import Pools, Task
from tests.training import assert_equal

alone = pytest.mark.apis("peer_memory")


class _Net(nn.Module):
    """Two tied layers, a buffer, a scalar, an empty tensor, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(300, 300)
        self.second = nn.Linear(300, 300, dtype=torch.float32)
        self.second.weight = self.first.weight
        self.narrow = nn.Parameter(torch.randn(7, 3).bfloat16())
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("empty", torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum() + self.narrow.float().sum()


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(2, 300)).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path, trained: Any) -> Path:
    scheduler = torch.optim.lr_scheduler.StepLR(trained[1], 1)
    extra = {"scheduler": scheduler, "table": {"a": torch.arange(5), "b": (1, 2.5)}}
    metadata = {"note": "mine"}
    path = tmp_path / "saved"
    fullshard.save_checkpoint(path, *trained, step=7, extra=extra, metadata=metadata)
    return path


def _assert_loads(path: Path, trained: Any) -> fullshard.LoadedCheckpoint:
    torch.manual_seed(1)
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loaded = fullshard.load_checkpoint(path, model, optimizer)
    wanted, made = trained
    assert_equal(model.state_dict(), wanted.state_dict())
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        assert_equal(optimizer.state[p], made.state[q])
    assert optimizer.param_groups[0]["lr"] == 0.01
    return loaded


# Into other forms and back


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_is_divided_anew(
    saved: Path, trained: Any, tmp_path: Path, ranks: int
) -> None:
    fullshard.convert_checkpoint(saved, tmp_path / "new", ranks=ranks)
    assert fullshard.diff_checkpoints(saved, tmp_path / "new") == []
    assert not fullshard.verify_checkpoint(tmp_path / "new").faults
    loaded = _assert_loads(tmp_path / "new", trained)
    assert (loaded.step, loaded.metadata) == (7, {"note": "mine"})
    assert loaded.extra["table"]["b"] == (1, 2.5)
    names = [path.name[:11] for path in (tmp_path / "new").glob("*.safetensors")]
    assert sorted(set(names)) == [f"shard-{rank:05d}" for rank in range(ranks)]


def _save(api: Api, folder: Path) -> dict[str, Tensor]:
    model, optimizer = _sharded(api, "hybrid_flat", seed=1, optimizer="adamw")
    _train(model, optimizer, steps=2)
    fullshard.save_checkpoint(folder, model, optimizer, step=2)
    return _state(api, model, optimizer)


def _load(api: Api, folder: Path) -> dict[str, Tensor]:
    model, optimizer = _sharded(api, "fully_shard", seed=5, optimizer="adamw")
    fullshard.load_checkpoint(folder, model, optimizer)
    return _state(api, model, optimizer)


@alone
def test_what_ranks_saved_is_divided_anew_and_exported(
    api: str, pools: Pools, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / name for name in "abc")
    written = pools.run(4, Task(__name__, "_save", {"api": api, "folder": first}))
    fullshard.convert_checkpoint(first, second, ranks=3)
    fullshard.export_dcp(second, third)
    assert fullshard.diff_checkpoints(first, third, sections=["model", "optimizer"]) == []
    for folder in (second, third):
        for state in pools.run(2, Task(__name__, "_load", {"api": api, "folder": folder})):
            assert_equal(state, written[0])


def test_dcp_loads_what_is_exported_and_back(saved: Path, trained: Any, tmp_path: Path) -> None:
    fullshard.export_dcp(saved, tmp_path / "dcp")
    torch.manual_seed(1)
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(2, 300)).backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optim": of_optimizer, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )
    assert state["step"] == 7
    wanted, made = trained
    assert_equal(model.state_dict(), wanted.state_dict())
    for p, q in zip(model.parameters(), wanted.parameters(), strict=True):
        assert_equal(optimizer.state[p], made.state[q])
    fullshard.convert_checkpoint(tmp_path / "dcp", tmp_path / "back", ranks=2)
    assert _assert_loads(tmp_path / "back", trained).step == 7


def test_safetensors_and_files_of_torch_save_are_imported(
    saved: Path, trained: Any, tmp_path: Path
) -> None:
    model = trained[0]
    fullshard.export_hf(saved, tmp_path / "hf")
    torch.save({"state_dict": model.state_dict(), "epoch": 3}, tmp_path / "model.pt")
    for source in ("hf", "model.pt"):
        target = tmp_path / f"from {source}"
        fullshard.convert_checkpoint(tmp_path / source, target)
        fresh = _Net()
        fullshard.load_checkpoint(target, fresh)
        assert_equal(fresh.state_dict(), model.state_dict())
    assert fullshard.inspect_checkpoint(target).extra == ("epoch",)


def test_what_cannot_be_converted_leaves_nothing(saved: Path, trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        dcp.save(content, checkpoint_id=tmp_path / "numbers", no_dist=True)
    with pytest.raises(CheckpointError, match="by numbers of parameters"):
        fullshard.convert_checkpoint(tmp_path / "numbers", tmp_path / "new")
    fullshard.convert_checkpoint(tmp_path / "numbers", tmp_path / "new", weights_only=True)
    with pytest.raises(CheckpointError, match="already holds"):
        fullshard.convert_checkpoint(saved, tmp_path / "new")
    fullshard.convert_checkpoint(saved, tmp_path / "new", overwrite=True)
    assert fullshard.diff_checkpoints(saved, tmp_path / "new") == []
    _flip(saved)
    for write in (fullshard.convert_checkpoint, fullshard.export_dcp):
        with pytest.raises(CheckpointError, match=r"is damaged.*has changed"):
            write(saved, tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "numbers", "saved"]
    with pytest.raises(CheckpointError, match=r"holds (manifest|shard)"):
        fullshard.export_dcp(tmp_path / "numbers", tmp_path / "new", overwrite=True)


def _flip(folder: Path) -> None:
    """Change a bit in the middle of a checkpoint's first file."""
    path = min(folder.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


# What is in them


def test_what_is_in_a_checkpoint_is_said(saved: Path) -> None:
    found = fullshard.inspect_checkpoint(saved)
    assert found.form == "fullshard checkpoint"
    assert found.facts["step"] == 7
    assert found.tensors["model/first.weight"].aliases == ("model/second.weight",)
    assert found.tensors["model/narrow"].dtype == "bfloat16"
    assert {name: len(own) for name, own in found.sections().items()} == {
        "model": 6,
        "optimizer": 8,
        "extra": 4,
    }
    assert found.optimizers["optimizer"]["class"] == "AdamW"
    assert json.loads(json.dumps(found.as_dict(), default=str))["nbytes"] == found.nbytes


def test_differences_are_named_and_measured(saved: Path, trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained
    with torch.no_grad():
        model.first.weight[3, 4] += 0.5
        model.first.weight[0, 0] = float("nan")
    optimizer.param_groups[0]["lr"] = 0.02
    fullshard.save_checkpoint(tmp_path / "b", model, optimizer, step=8, rng=False)
    found = {
        (each.kind, each.name): each for each in fullshard.diff_checkpoints(saved, tmp_path / "b")
    }
    weight = found["values", "model/first.weight"]
    assert weight.num_elements == 2
    assert weight.largest == float("inf")
    assert found["values", "model/second.weight"].num_elements == 2
    assert found["value", "step"].second == "8"
    assert found["value", "optimizers/optimizer/groups/0/options/lr"].first == "0.01"
    assert ("only in the first", "extra/table/a") in found
    assert fullshard.diff_checkpoints(saved, tmp_path / "b", sections=["buffer"]) == []
    with torch.no_grad():
        model.first.weight[0, 0] = 0
    fullshard.save_checkpoint(tmp_path / "c", model)
    assert (
        fullshard.diff_checkpoints(saved, tmp_path / "c", sections=["model"], tolerance=2.0) == []
    )


# The command line


def _run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["ckpt", *map(str, arguments)])


def test_commands_say_by_their_exit_codes_what_they_found(saved: Path, tmp_path: Path) -> None:
    shown = _run("inspect", saved, "--tensors")
    assert shown.exit_code == Exit.OK
    assert "step: 7" in shown.stdout
    assert "model/narrow  [7, 3]  bfloat16" in shown.stdout
    assert json.loads(_run("inspect", saved, "--json").stdout)["facts"]["step"] == 7
    assert _run("verify", saved).exit_code == Exit.OK
    assert _run("reshard", saved, tmp_path / "new", "--ranks", 2).exit_code == Exit.OK
    same = _run("diff", saved, tmp_path / "new")
    assert (same.exit_code, same.stdout) == (Exit.OK, "no differences\n")
    _flip(tmp_path / "new")
    damaged = _run("verify", tmp_path / "new", "--json")
    assert damaged.exit_code == Exit.DAMAGED
    assert "has changed" in str(json.loads(damaged.stdout)["faults"])
    failed = _run("diff", saved, tmp_path / "new")
    assert failed.exit_code == Exit.FAILED
    assert "is damaged" in failed.stderr
    fullshard.save_checkpoint(tmp_path / "other", nn.Linear(2, 2))
    assert _run("diff", saved, tmp_path / "other", "--only", "model").exit_code == Exit.DIFFERENT
    assert _run("diff", saved, saved, "--only", "weights").exit_code == Exit.USAGE
    assert _run("reshard", saved, tmp_path / "x").exit_code == Exit.USAGE
    missing = _run("inspect", tmp_path / "missing")
    assert (missing.exit_code, missing.stdout) == (Exit.FAILED, "")
    assert "no folder" in missing.stderr


ODD = "[bold] :smile: 'a' \"b\" $c {d} %s \\\\ é\n漢*?"


def test_names_may_be_any_text(tmp_path: Path) -> None:
    names = [ODD, "[red]", "[/x]", "$tuple", " ", "~", "a/b", "..", "#", "\u202e", "x" * 300]
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names if "." not in name})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(layer(torch.ones(2)).sum() for layer in model.values()).backward()
    optimizer.step()
    folder = tmp_path / ODD
    values = {ODD: {name: {name: (torch.ones(3), name)} for name in names}}
    saved = fullshard.save_checkpoint(
        folder / "[0-9] a",
        {ODD: model},
        {ODD: optimizer},
        extra=values,
        metadata={ODD: ODD, "$a": 1},
    ).path
    shown = _run("inspect", saved, "--tensors")
    assert shown.exit_code == Exit.OK
    assert f"model.{ODD}/{ODD}.weight" in shown.stdout
    for name in ("[red]", "[/x]", "[bold] :smile:"):
        assert name in shown.stdout
    for form, command in {
        "new": ("reshard", "--ranks", 2),
        "dcp": ("export", "--to", "dcp"),
    }.items():
        target = folder / f"{form} {ODD}"
        done = _run(command[0], saved, target, *command[1:])
        assert done.exit_code == Exit.OK, done.output
    same = _run("diff", saved, folder / f"new {ODD}")
    assert (same.exit_code, same.stdout) == (Exit.OK, "no differences\n")
    fullshard.export_hf(model, folder / "hf", config={"model_type": "odd"})
    with torch.no_grad():
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        for source in (saved, folder / f"new {ODD}", folder / f"dcp {ODD}", folder / "hf"):
            for parameter in model.parameters():
                parameter.zero_()
            if source.name == "hf":
                fullshard.load_hf(model, source)
            else:
                loaded = fullshard.load_checkpoint(source, {ODD: model}, {ODD: optimizer})
                assert loaded.extra[ODD][ODD][ODD][1] == ODD
            assert_equal(model.state_dict(), wanted)
    missing = _run("inspect", folder / "[red]missing")
    assert "[red]missing" in missing.stderr


def test_commands_convert_both_ways(saved: Path, trained: Any, tmp_path: Path) -> None:
    assert _run("export", saved, tmp_path / "dcp", "--to", "dcp").exit_code == Exit.OK
    written = _run("import", tmp_path / "dcp", tmp_path / "back", "--json")
    assert json.loads(written.stdout)["step"] == 7
    _assert_loads(tmp_path / "back", trained)
    hf = _run("export", saved, tmp_path / "hf", "--to", "hf", "--dtype", "bf16", "--json")
    assert json.loads(hf.stdout)["files"] == ["model.safetensors"]
    refused = _run("export", saved, tmp_path / "x", "--to", "dcp", "--dtype", "bf16")
    assert refused.exit_code == Exit.USAGE
    assert _run("export", saved, tmp_path / "x", "--to", "hf", "--dtype", "fp4").exit_code == 2
    again = _run("import", tmp_path / "dcp", tmp_path / "back")
    assert again.exit_code == Exit.FAILED
    assert "already holds" in again.stderr


def test_parts_of_a_checkpoint_are_none(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "step-1.partial-abc")
    (saved / "manifest.json").unlink()
    (tmp_path / "step-1.partial-abc" / "manifest.json").unlink()
    for command in ("verify", "inspect", "reshard", "import"):
        for folder in (saved, tmp_path / "step-1.partial-abc"):
            more = () if command in ("verify", "inspect") else (tmp_path / "new", "--ranks", 1)
            refused = _run(command, folder, *more)
            assert refused.exit_code == Exit.FAILED
            assert "is a part of a fullshard checkpoint" in refused.stderr
    with pytest.raises(CheckpointError, match="is a part of a fullshard checkpoint"):
        fullshard.load_hf(_Net(), saved)
    assert not (tmp_path / "new").exists()


def test_verify_says_where_there_are_no_checksums(saved: Path, tmp_path: Path) -> None:
    fullshard.export_dcp(saved, tmp_path / "dcp")
    assert "no checksums" in _run("verify", tmp_path / "dcp").stdout
    manifest = saved / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"AdamW", b"AdamX"))
    assert _run("verify", saved).exit_code == Exit.DAMAGED
    assert _run("reshard", tmp_path / "dcp", saved / "inner", "--ranks", 1).exit_code == Exit.FAILED


def test_prune_keeps_what_was_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3, 4):
        fullshard.save_checkpoint(folder / f"step-{step:08d}", nn.Linear(2, 2), step=step)
    options = ("--keep-last", 1, "--keep-every", 2)
    would = _run("prune", tmp_path / "run", *options, "--dry-run")
    assert would.stdout.count("would remove") == 2
    assert len([*folder.iterdir()]) == 4
    done = _run("prune", tmp_path / "run", *options, "--json")
    assert [path[-1] for path in json.loads(done.stdout)["removed"]] == ["1", "3"]
    assert sorted(path.name[-1] for path in folder.iterdir()) == ["2", "4"]
    assert _run("inspect", tmp_path / "run").stdout.startswith(str(folder / "step-00000004"))


def test_what_goes_wrong_is_json_too(saved: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for arguments in (
        ("inspect", missing),
        ("verify", missing),
        ("diff", saved, missing),
        ("reshard", saved, ".", "--ranks", 1),
        ("import", missing, tmp_path / "x"),
        ("export", missing, tmp_path / "x", "--to", "hf"),
        ("export", missing, tmp_path / "x", "--to", "dcp"),
        ("prune", missing, "--keep-last", 1),
    ):
        done = _run(*arguments, "--json")
        assert done.exit_code == Exit.FAILED, arguments
        assert json.loads(done.stdout)["error"], arguments
        assert done.stderr, arguments
    torch.save(_Net().state_dict(), tmp_path / "net.pt")
    refused = _run("export", tmp_path / "net.pt", tmp_path / "hf", "--to", "hf")
    assert refused.exit_code == Exit.FAILED
    assert "fullshard ckpt import" in refused.stderr


@pytest.mark.parametrize("form", ["dcp", "hf"])
def test_other_forms_that_are_damaged_are_found_damaged(
    saved: Path, tmp_path: Path, form: str
) -> None:
    assert _run("export", saved, tmp_path / "a", "--to", form).exit_code == Exit.OK
    name = ".metadata" if form == "dcp" else "model.safetensors"
    file = tmp_path / "a" / name
    file.write_bytes(file.read_bytes()[:40])
    found = _run("verify", tmp_path / "a")
    assert found.exit_code == Exit.DAMAGED
    assert name in found.stdout + found.stderr


def test_optimizers_without_state_are_found_in_files(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    for command in ("inspect", "verify"):
        assert _run(command, tmp_path / "a.pt").exit_code == Exit.OK
    refused = _run("import", tmp_path / "a.pt", tmp_path / "b")
    assert refused.exit_code == Exit.FAILED
    assert "by numbers of parameters, whose names only a model tells" in refused.stderr
    done = _run("import", tmp_path / "a.pt", tmp_path / "b", "--weights-only")
    assert done.exit_code == Exit.OK, done.stderr
    other = nn.Linear(3, 2)
    made = torch.optim.SGD(other.parameters(), lr=1.0)
    fullshard.load_checkpoint(tmp_path / "b", other)
    assert_equal(other.state_dict(), model.state_dict())
    fullshard.load_checkpoint(tmp_path / "a.pt", other, made)
    assert made.param_groups[0]["lr"] == 0.25


def test_names_that_are_numbers_are_names(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.ones(2), torch.ones(3)])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    sum(p.sum() for p in model).backward()
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    fullshard.convert_checkpoint(tmp_path / "a", tmp_path / "b", ranks=2)
    assert fullshard.diff_checkpoints(tmp_path / "a", tmp_path / "b") == []


@pytest.mark.parametrize("ema_first", [False, True])
def test_averages_beside_a_model_are_not_a_model(tmp_path: Path, ema_first: bool) -> None:
    model, averages = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {"model": model.state_dict(), "ema": averages.state_dict()}
    if ema_first:
        state = dict(reversed(state.items()))
    torch.save(state, tmp_path / "a.pt")
    assert _run("import", tmp_path / "a.pt", tmp_path / "b").exit_code == Exit.OK
    other = nn.Linear(3, 2)
    fullshard.load_checkpoint(tmp_path / "b", other)
    assert_equal(other.state_dict(), model.state_dict())


@pytest.mark.long
def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    with torch.device("cpu"):
        model = nn.ParameterDict({str(n): nn.Parameter(torch.ones(4096, 8192)) for n in range(8)})
    fullshard.save_checkpoint(tmp_path / "a", model)  # 1 GiB
    code = (
        "import resource, sys, fullshard, torch\n"
        "a, b, c, d = sys.argv[1:]\n"
        "fullshard.inspect_checkpoint(a)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "fullshard.convert_checkpoint(a, b, ranks=3)\n"
        "fullshard.export_dcp(b, c)\n"
        "fullshard.convert_checkpoint(c, d)\n"
        "assert not fullshard.diff_checkpoints(a, d, sections=['model'])\n"
        "assert not fullshard.verify_checkpoint(d).faults\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)"
    )
    paths = [str(tmp_path / name) for name in "abcd"]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 500, "MiB"
