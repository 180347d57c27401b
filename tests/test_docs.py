"""The site has every page and every public name, and what its pages show as code runs."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import typer
import yaml
from torch import Tensor, nn

import fullshard
from fullshard import run
from fullshard.tools.cli import app
from fullshard.tools.config import read_options
from tests.harness import run_fresh
from tests.test_readme import SEEN, text_of

ROOT = Path(__file__).parents[1]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))
REFERENCE = sorted(ROOT.glob("docs/reference/*.md"))
MAKING = runpy.run_path(str(ROOT / "scripts" / "docs_pages.py"), run_name="docs_pages")
BUILDER = ROOT / ".venv-docs" / "bin" / "zensical"

# Pages or sections whose blocks of code other tests run or compare; each names its page.
ELSEWHERE = {
    "docs/launch.md": "tests/tools/test_launch.py",
    "docs/training.md#where-the-numbers-of-a-run-go": "tests/tools/test_loggers.py",
}
# Pages or sections whose blocks are parts of programs: run below, with what they name.
PARTS = ["docs/planning.md", "docs/errors.md#when-ranks-diverge-stall-or-die", "docs/report.md#memory", "docs/migrating.md", "docs/loop.md#optimizers", "docs/report.md#the-trace-report"]  # fmt: skip


def _code(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of code, also of those in lists."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1``` *$", text_of(page), re.M | re.S)
    return [(kind, textwrap.dedent(text)) for _, kind, text in found]


def _blocks(page: str, language: str) -> list[str]:
    return [text for kind, text in _code(page) if kind == language]


# The site's pages


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which has tags of its own."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def _leaves(nav: Any) -> Iterator[str]:
    for entry in nav:
        target = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [target] if isinstance(target, str) else _leaves(target)


def test_every_page_is_in_the_site_s_navigation_once() -> None:
    pages = [target for target in _leaves(SITE["nav"]) if "://" not in target]
    assert sorted(pages) == sorted(MAKING["pages"]())
    assert len(pages) > len(DOCS) > 20


def test_the_site_s_addresses_are_the_repository_s() -> None:
    found = re.findall(r"https?://[^\s\"]+", (ROOT / "mkdocs.yml").read_text())
    assert {*found} == {MAKING["home"]()}


@pytest.mark.parametrize(
    ("page", "source", "link", "expected"),
    [
        ("using.md", "docs/using.md", "migrating.md#what-was-tried", "migrating.md#what-was-tried"),
        ("using.md", "docs/using.md", "#a-faster-optimizer-step", "#a-faster-optimizer-step"),
        ("using.md", "docs/using.md", "../README.md#install", "index.md#install"),
        ("index.md", "README.md", "docs/reference/index.md", "reference/index.md"),
        ("index.md", "README.md", "docs/images/report.png", "images/report.png"),
        ("reference/errors.md", "docs/reference/errors.md", "../errors.md", "../errors.md"),
        ("reference/errors.md", "docs/reference/errors.md", "../../CHANGELOG.md", "../changelog.md"),
        ("using.md", "docs/using.md", "../tests/test_readme.py", "HOME/blob/main/tests/test_readme.py"),
        ("index.md", "README.md", "tests/differential", "HOME/tree/main/tests/differential"),
        ("index.md", "README.md", "https://pytorch.org", "https://pytorch.org"),
    ],
)  # fmt: skip
def test_links_of_the_repository_become_the_site_s(
    page: str, source: str, link: str, expected: str
) -> None:
    expected = expected.replace("HOME", "https://github.com/fullshard/fullshard")
    assert MAKING["on_site"](f"See [it]({link}).", page, source) == f"See [it]({expected})."


def test_a_picture_for_light_and_dark_becomes_two_of_which_the_theme_shows_one() -> None:
    made = MAKING["on_site"]((ROOT / "README.md").read_text(), "index.md", "README.md")
    assert "<picture>" not in made
    for name, shown in ("timeline", "#only-light"), ("timeline-dark", "#only-dark"):
        assert f"](images/{name}.png{shown})" in made


def test_links_in_code_stay() -> None:
    code = "```text\n[it](../README.md)\n```\n"
    changed = MAKING["on_site"](
        f"[a](../README.md)\n\n{code}\n[b](../README.md)", "a.md", "docs/a.md"
    )
    assert changed == f"[a](index.md)\n\n{code}\n[b](index.md)"


@pytest.mark.parametrize("link", ["nowhere.md", "../../outside.md", "../src/nothing"])
def test_links_to_what_is_not_there_are_errors(link: str) -> None:
    with pytest.raises(MAKING["PagesError"], match=f"using.md links to {re.escape(link)}"):
        MAKING["on_site"](f"[it]({link})", "using.md", "docs/using.md")


def test_pages_are_made_without_an_error(tmp_path: Path) -> None:
    assert MAKING["main"](tmp_path / "docs") == 0
    assert "](using.md)" in (tmp_path / "docs" / "index.md").read_text()
    assert (tmp_path / "docs" / "images" / "step.svg").is_file()


# The reference


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "".join(path.read_text() for path in REFERENCE)
    assert sorted(re.findall(r"^::: (.*)", text, re.M)) == [f"fullshard.{n}" for n in fullshard.__all__]  # fmt: skip


def _documented(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield a public name, and the methods and properties that we give it, each with its docstring."""
    value = getattr(fullshard, name)
    doc = value.__doc__
    is_made = doc and doc.startswith(f"{name}(")  # what dataclasses and tuples write themselves
    yield name, None if is_made else doc
    for each in dir(value) if inspect.isclass(value) else ():
        owner = next((kind for kind in value.__mro__ if each in vars(kind)), type)
        if each.startswith("_") or not owner.__module__.startswith("fullshard"):
            continue
        member = inspect.getattr_static(value, each)
        if isinstance(member, (property, classmethod, staticmethod, types.FunctionType)):
            found = member if isinstance(member, property) else getattr(value, each)
            yield f"{name}.{each}", inspect.getdoc(found)


def test_every_public_name_says_what_it_is() -> None:
    found = [each for name in fullshard.__all__ for each in _documented(name)]
    assert [name for name, doc in found if not doc] == []
    assert len(found) > 2 * len(fullshard.__all__)


# Code on the pages


@pytest.mark.parametrize("page", DOCS)
def test_every_block_of_code_is_run_by_a_test(page: str) -> None:
    looked_at = [*ELSEWHERE, *PARTS, *(each for each, seen in SEEN.items() if seen)]
    run = [block for each in looked_at if each.partition("#")[0] == page for block in _code(each)]
    no_code = ("", "text", "sh", "toml")  # every line, and every option, is looked at below
    for block in _code(page):
        assert block[0] in no_code or block in run


@pytest.mark.parametrize("page", ELSEWHERE)
def test_those_who_run_what_a_page_shows_name_it(page: str) -> None:
    assert Path(page.partition("#")[0]).name in (ROOT / ELSEWHERE[page]).read_text()


@pytest.mark.parametrize("page", [page for page in DOCS if _blocks(page, "sh")])
def test_every_command_is_one(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those for several hosts, or other libraries, are not run; ours are understood in all of them."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for line in "\n".join(_blocks(page, "sh")).splitlines():
        for command in re.split(r" && ", line.partition("  #")[0].partition(" > ")[0]):
            words = shlex.split(command, comments=True)
            if "fullshard.run" in words:
                assert _is_understood_by_run(words[words.index("fullshard.run") + 1 :], monkeypatch)
            elif words[:2] == ["fullshard", "run"]:
                assert _is_understood_by_run(words[2:], monkeypatch)
            elif "fullshard" in words:
                name, *rest = words[words.index("fullshard") + 1 :]
                assert commands[name].make_context(name, rest), command
            elif words[:1] == ["make"]:
                assert words[1] in targets
            else:
                assert not words or words[0] in ("pip", "tensorboard", "torchrun"), command


def _is_understood_by_run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    class UnderstoodError(Exception):
        pass

    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, given: list[str]) -> None:
        options: Any = parse(parser, given)
        assert (options.script or options.module) in ("train.py", "my_package.train")
        raise UnderstoodError

    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["run", *words])
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        with pytest.raises(UnderstoodError):
            run.main()
    return True


def test_options_in_files_are_the_command_s(tmp_path: Path) -> None:
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    known = {each.name for each in train.params}
    for text in (text for page in DOCS for text in _blocks(page, "toml")):
        (tmp_path / "run.toml").write_text(text)
        assert len(read_options(tmp_path / "run.toml", known=known, lists={"data", "log"})) == 5


class Lion(torch.optim.Optimizer):
    """An optimizer that is not torch's, as a page names one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        """Follow the signs of gradients."""
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=self.param_groups[0]["lr"])


class Block(nn.Linear):
    """A block of a model. (n, 8) -> same."""

    def __init__(self) -> None:
        super().__init__(8, 8)


class Net(nn.Sequential):
    """A model with blocks. (n, 8) -> same."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4)), nn.Linear(8, 8))

    @property
    def blocks(self) -> list[nn.Module]:
        """All but the last."""
        return [*self][:4]


def _what_pages_name(page: str, text: str) -> dict[str, Any]:
    """Return what a part of a program takes for granted."""
    names = {name: getattr(fullshard, name) for name in fullshard.__all__}
    model = Net()
    if "fully_shard(" not in text and "FullyShardedDataParallel(" not in text:
        for block in model.blocks:
            fullshard.fully_shard(block)
        fullshard.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_one_step(batch: Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    wrapped = fullshard.FullyShardedDataParallel(Net(), use_orig_params=True)
    its_optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped(torch.ones(2, 8)).sum().backward()
    its_optimizer.step()
    return names | {
        "fullshard": fullshard, "torch": torch, "dist": dist, "dcp": dcp,
        "model": model, "optimizer": optimizer, "batch": torch.ones(2, 8),
        "three_batches": torch.ones(3, 2, 8), "train_one_step": train_one_step,
        "Block": Block, "Lion": Lion, "folder": "saved",
        "wrapped_model": wrapped, "its_optimizer": its_optimizer,
        "sharded_model": model, "new_optimizer": optimizer,
    }  # fmt: skip


def _parts_run(page: str, folder: Path) -> None:
    os.chdir(folder)
    for text in _blocks(page, "python"):
        if not text.startswith("# torchrun"):
            names = _what_pages_name(page, text)
            with contextlib.redirect_stdout(None):
                exec(compile(text, page, "exec"), names)
            train = names.get("optimizer")
            if page == "docs/loop.md#optimizers":  # what was made there also trains
                names["model"](torch.ones(2, 8)).sum().backward()
                train.step()
            if "install()" in text:
                assert torch.distributed.fsdp.fully_shard is fullshard.fully_shard
                fullshard.uninstall()


def _all_parts_run(folder: Path) -> None:
    for number, page in enumerate(PARTS):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        _parts_run(page, own)


def test_parts_of_programs_run(tmp_path: Path) -> None:
    """An error's traceback has the name of its page."""
    outcomes = run_fresh(2, _all_parts_run, folder=tmp_path, limit_s=60.0)
    assert [outcome.text for outcome in outcomes] == ["", ""]


# The site itself


class _Fetched(HTMLParser):
    """Collects what a browser fetches for a page, and whether its pictures have descriptions."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.undescribed = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Look at scripts, styles and pictures."""
        found = dict(attrs)
        if tag in ("script", "img", "iframe") and found.get("src"):
            self.addresses.append(str(found["src"]))
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(str(found["href"]))
        self.undescribed += tag == "img" and not found.get("alt")


@pytest.mark.long  # half a minute
@pytest.mark.timeout(600)
def test_the_site_is_built_strictly_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    if not BUILDER.exists():
        pytest.skip("no .venv-docs, which `make docs` makes with Python 3.11 or newer")
    for path in ROOT.iterdir():  # a folder `build` of its own, beside all that is there
        if path.name != "build" and not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "mkdocs.yml").unlink()  # whose folder is where things are built
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    made = [sys.executable, "scripts/docs_pages.py", "build/docs"]
    subprocess.run(made, cwd=tmp_path, check=True)
    page = tmp_path / "build" / "docs" / "reference" / "errors.md"
    text = page.read_text()
    page.write_text(text + "\n::: fullshard.nothing\n")
    command = [str(BUILDER), "build", "--clean", "--strict"]
    env = {**os.environ, "PATH": os.pathsep.join([str(BUILDER.parent), os.environ["PATH"]])}
    broken = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert broken.returncode != 0
    assert "fullshard.nothing could not be found" in broken.stdout + broken.stderr
    page.write_text(text)
    shutil.rmtree(tmp_path / "build" / "site", ignore_errors=True)
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "build" / "site"
    for source in MAKING["pages"]():
        parser = _Fetched()
        parser.feed((site / source).with_suffix(".html").read_text())
        assert [each for each in parser.addresses if "//" in each] == [], source
        assert parser.undescribed == 0, source
    shown = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    for name in fullshard.__all__:
        assert f'id="fullshard.{name}"' in shown
    # Arguments are a list (scripts/docs_docstrings.py).
    assert "<li><strong>reshard_after_forward</strong>: True frees" in re.sub(r"\s*<p>", "", shown)
