"""`--config`: options from a TOML file, or from another run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.tools import cli, commands
from fullshard.tools.config import OptionError, TrainConfig, read_options, with_defaults
from fullshard.tools.exits import Exit
from fullshard.tools.run_folder import RunFolder

KNOWN = ("grad_accum", "data", "lr", "model", "steps", "tie_embeddings")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[commands.Typed]:
    """Keep what a command line comes to, in place of training."""
    kept: list[commands.Typed] = []

    def train(typed: commands.Typed, *_: object, **__: object) -> Exit:
        kept.append(typed)
        return Exit.OK

    monkeypatch.setattr(commands, "train", train)
    return kept


def _written(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_gives_every_kind_of_option(tmp_path: Path, typed: list[commands.Typed]) -> None:
    path = _written(
        tmp_path,
        'model = "tiny"\ngrad-accum = 3\nlr = 1e-3\ndata = ["a", "b"]\ntie_embeddings = true\n'
        'out = "runs/x"\nlog = ["wandb"]\nval-fraction = 0.1\n',
    )
    result = CliRunner().invoke(cli.app, ["train", "--config", str(path)])
    assert result.exit_code == 0, result.output
    (found,) = typed
    wanted = {"model": "tiny", "grad_accum": 3, "lr": 1e-3, "data": ("a", "b"), "log": ("wandb",)}
    # As if they had been typed, and no others: a resumed run compares them with its own.
    assert found.given == wanted | {"tie_embeddings": True, "val_fraction": 0.1}
    assert found.out == Path("runs/x")


def test_what_is_typed_comes_first(tmp_path: Path, typed: list[commands.Typed]) -> None:
    path = _written(tmp_path, 'lr = 1.0\nsteps = 5\ndata = ["a"]\n')
    line = ["train", "--lr", "2", "--config", str(path), "--data", "c", "d"]
    assert CliRunner().invoke(cli.app, line).exit_code == 0
    assert [typed[0].given[name] for name in ("lr", "steps", "data")] == [2.0, 5, ("c", "d")]


def test_a_run_s_folder_is_a_file_too(tmp_path: Path, typed: list[commands.Typed]) -> None:
    fields = {"options": {"model": "35m", "steps": 7, "data": ["x"], "log": []}, "corpus": "..."}
    _written(tmp_path, json.dumps(fields), "config.json")
    for path in (tmp_path, tmp_path / "config.json"):
        result = CliRunner().invoke(cli.app, ["train", "--config", str(path), "--seed", "4"])
        assert result.exit_code == 0, result.output
        found = typed.pop().given
        assert [found[n] for n in ("model", "steps", "data", "seed")] == ["35m", 7, ("x",), 4]
        assert "log" not in found


@pytest.mark.parametrize(
    ("had", "words", "expected"),
    [
        ({}, ["--lr", "1e-9"], {"lr": 1e-9, "min_lr": 1e-10}),
        ({"min_lr": 1e-5}, ["--lr", "1e-3"], {"min_lr": 1e-5}),
        ({}, ["--steps", "50"], {"warmup": 5}),
        ({"warmup": 40}, ["--steps", "50"], {"warmup": 40}),
        ({}, ["--model", "tiny"], {"lr": 1e-2, "batch": 8, "steps": 400}),
        ({"batch": 3}, ["--model", "tiny"], {"batch": 3}),
        ({}, ["--seed", "1"], {"lr": 2e-3, "min_lr": 1e-4, "batch": 2, "steps": 350}),
        ({"vocab_size": 300}, [], {"vocab_size": 300}),
        ({"vocab_size": 600, "model": "./llama"}, [], {"vocab_size": None}),
        ({}, ["--tokenizer", "t"], {"vocab_size": None}),
    ],
)
def test_what_followed_from_options_of_a_run_follows_from_those_typed(
    tmp_path: Path,
    typed: list[commands.Typed],
    had: dict[str, Any],
    words: list[str],
    expected: dict[str, Any],
) -> None:
    RunFolder(tmp_path).start(TrainConfig(**had), fingerprint="", done=0)
    result = CliRunner().invoke(cli.app, ["train", "--config", str(tmp_path), *words])
    assert result.exit_code == 0, result.output
    found = with_defaults(typed[0].given)
    assert {name: found.get(name) for name in expected} == pytest.approx(expected)


def test_what_is_typed_replaces_all_that_says_otherwise(
    tmp_path: Path, typed: list[commands.Typed]
) -> None:
    fields = {"model": "x/y", "tokenizer": "x", "init_from": "x", "steps": 7, "seed": 1}
    _written(tmp_path, json.dumps({"options": fields, "corpus": ""}), "config.json")
    for words, left in (
        (["--finetune", "a"], {"finetune": "a", "steps": 7, "seed": 1}),
        (["--epochs", "2"], {**fields, "epochs": 2.0} | {"steps": None}),
    ):
        assert (
            CliRunner().invoke(cli.app, ["train", "--config", str(tmp_path), *words]).exit_code == 0
        )
        assert typed.pop().given == {k: v for k, v in left.items() if v is not None}
    path = str(_written(tmp_path, 'finetune = "a"\nepochs = 3\n'))
    assert CliRunner().invoke(cli.app, ["train", "--config", path, "--steps", "5"]).exit_code == 0
    assert typed.pop().given == {"finetune": "a", "steps": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz = 3", r"no option stepz\. Did you mean steps\?"),
        ("[table]\na = 1", r"no option table\. Known: data, grad_accum"),
        ("config = 'other.toml'", "no option config"),
        ("steps = {a = 1}", r"steps is \{'a': 1\}; give text or a number"),
        ("data = [[1]]", r"data is \[\[1\]\]; give text or a number, or a list"),
        ("steps = [", "is no TOML"),
        ("steps = true", "steps is True; give text or a number"),
        ("steps = [3]", r"steps is \[3\]; give one value, not a list"),
        (f"steps = 0x{'f' * 5000}", "steps is a number that is far too large"),
        (f"steps = {10**19}", "steps is a number that is far too large"),
        (f"data = ['a', 0o{'7' * 9000}]", "data is a number that is far too large"),
        (f"steps = {{a = 0b{'1' * 20000}}}", "steps is a number that is far too large"),
        (f"steps = {'9' * 5000}", "is no TOML"),
        ("tie_embeddings = 1", "tie_embeddings is 1; give true or false"),
        ("grad-accum = 1\ngrad_accum = 2", "grad_accum comes twice, with - and with _"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OptionError, match=rf"--config .*run\.toml: .*{message}"):
        read_options(
            _written(tmp_path, text), known=KNOWN, flags={"tie_embeddings"}, lists={"data"}
        )


def test_what_follows_val_data_is_held_out_and_never_trained_on(
    typed: list[commands.Typed],
) -> None:
    for line in (
        ["a", "--data", "b", "c", "--val-data", "d", "e", "--seed", "1"],
        ["a", "--val-data=d", "e", "--data", "b", "c"],
        ["a", "--val-data", "d", "--val-data", "e", "--data=b", "c"],
    ):
        result = CliRunner().invoke(cli.app, ["train", *line])
        assert result.exit_code == 0, result.output
        found = typed.pop().given
        assert set(found["data"]) == {"a", "b", "c"}
        assert found["val_data"] == ("d", "e")


def test_one_of_what_may_repeat_needs_no_list(tmp_path: Path, typed: list[commands.Typed]) -> None:
    path = _written(tmp_path, 'data = "a b"\nlog = "wandb"\n')
    assert CliRunner().invoke(cli.app, ["train", "--config", str(path)]).exit_code == 0
    assert (typed[0].given["data"], typed[0].given["log"]) == (("a b",), ("wandb",))


def test_a_run_s_own_copies_stand_for_what_they_were_made_of(
    tmp_path: Path, typed: list[commands.Typed]
) -> None:
    fields = {"options": {"model": "./gone", "tokenizer": "gone.json"}, "corpus": "..."}
    _written(tmp_path, json.dumps(fields), "config.json")
    _written(tmp_path, "{}", "model.json")
    (tmp_path / "tokenizer").mkdir()
    for path in (tmp_path, tmp_path / "config.json"):
        assert CliRunner().invoke(cli.app, ["train", "--config", str(path)]).exit_code == 0
        found = typed.pop().given
        assert found["model"] == str(tmp_path / "model.json")
        assert found["tokenizer"] == str(tmp_path / "tokenizer")


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere\.toml: is not there"):
        read_options(tmp_path / "nowhere.toml", known=KNOWN)
    with pytest.raises(OptionError, match=r"config\.json: is not there"):
        read_options(tmp_path, known=KNOWN)
    for text in ("[1]", "null", "{"):
        with pytest.raises(OptionError, match=r"not an object|is no JSON"):
            read_options(_written(tmp_path, text, "config.json"), known=KNOWN)
    (tmp_path / "latin.toml").write_bytes(b"prompt = '\xe9'")
    with pytest.raises(OptionError, match="is not text in UTF-8"):
        read_options(tmp_path / "latin.toml", known=KNOWN)


@pytest.mark.parametrize("text", ['steps = "many"', "stepz = 3", "tie_embeddings = 'perhaps'"])
def test_the_command_line_refuses_it_with_its_usage(
    tmp_path: Path, typed: list[commands.Typed], text: str
) -> None:
    result = CliRunner().invoke(cli.app, ["train", "--config", str(_written(tmp_path, text))])
    assert result.exit_code == Exit.USAGE
    assert not typed
    assert "--config" in result.output or "--steps" in result.output or "--tie" in result.output
