"""The first pages are true: their code runs as it stands, links lead somewhere, numbers were measured."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
import typer
from packaging.requirements import Requirement
from PIL import Image

import fullshard
from fullshard.tools.cli import app
from tests.fresh import on_forked_ranks
from tests.tools.processes import environment

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = (ROOT / "pyproject.toml").read_text()
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/**/*.md")]
)
MAKING = runpy.run_path(str(ROOT / "scripts" / "docs_pages.py"), run_name="docs_pages")
DRAWN = runpy.run_path(str(ROOT / "scripts" / "draw_step_times.py"), run_name="drawing")
SHOWN = DRAWN["measured"](json.loads(DRAWN["newest"]().read_text()))
RECORDED = json.loads((ROOT / "bench" / "results" / "2026-11-22-amd-epyc.json").read_text())

# Pages, or sections, of which every block is run, or checked if it installs something: what each has to print.
SEEN = {
    "README.md": {
        "example.py": [r"^rank 0: loss 0\.[2-8]\d\d$", r"^rank 1: loss 0\.[2-8]\d\d$"],
        "fullshard compare train.py": [r"same in every bit"],
        "fullshard run --ranks 2 --trace runs/first train.py": [r"rank 1: loss 0\.[2-8]\d\d"],
        "fullshard report runs/first": [r"runs/first/report\.html"],
    },
    "docs/using.md": {
        "example.py": [
            r"^rank 1: loss [12]\.\d{3}$",
            r"\b5 units",
            r"(?s)(shard 2; peer memory \(one host\).*){10}",  # 5 units on each rank
        ],
        "wrapper.py": [r"^rank 0: loss \d\.\d{3}$", r"^rank 1: loss \d\.\d{3}$"],
        "fullshard run --ranks 2 train.py --lr 1e-3": [r"rank 1: loss 0\.[2-8]\d\d"],
        "torchrun --nproc-per-node 2 -m fullshard.run train.py --lr 1e-3": [
            r"^rank 1: loss 0\.[2-8]\d\d$"
        ],
        "fullshard run --ranks 2 --trace runs/traced train.py": [r"rank 1: loss 0\.[2-8]\d\d"],
        "fullshard compare train.py": [r"same in every bit"],
        "carry_over.py": [r"^rank 0: same output: True$", r"^rank 1: same output: True$"],
        "captured.py": [r"^rank 0: loss \d\.\d{3}$", r"^rank 1: loss \d\.\d{3}$"],
        "traced.py": [r"^rank 0 holds ", r"^sharded parameters ", r"^optimizer state "],
        "fullshard report runs/traced": [r"runs/traced/report\.html"],
    },
    "docs/concepts.md": {
        "hybrid.py": [
            r"^rank 0: holds \(4, 8\) of \(8, 8\)$",
            r"^rank 1: holds \(4, 8\) of \(8, 8\)$",
        ],
    },
    "docs/models.md#torchcompile": {
        "compiled.py": [r"^rank 0: loss 0\.\d{3}$", r"^rank 1: loss 0\.\d{3}$"],
    },
    "docs/models.md#float8": {
        "float8.py": [r"^rank 0: loss \d\.\d{3}$", r"^rank 1: loss \d\.\d{3}$"],
    },
    "docs/launch.md#in-notebooks": {
        "cell.py": [r"^loss 0\.\d{3}$", r"^\[rank 1\] loss 0\.\d{3}$", r"^0\.\d{3} and 0\.\d{3}$"],
    },
    "docs/loop.md#ranks-with-different-batches": {
        "uneven.py": [
            r"^rank 0: 5 batches, the last one counts 0$",
            r"^rank 1: 5 batches, the last one counts 1$",
        ],
        "experts.py": [r"^rank 0: used by any \[True, False, True, False\]$"],
    },
    "docs/loop.md#units-that-stay-unsharded": {
        "kept.py": [
            r"^rank 0: 2 units, 2101248 bytes$",
            r"^rank 1: 2 units, 2101248 bytes$",
            r"stays unsharded within a budget$",
        ],
    },
    "docs/models.md#building-a-model-that-is-larger-than-a-host": {
        "deferred.py": [r"^rank 1: equal in every bit: True$"]
    },
    "docs/checkpoints.md": {
        "resume.py": [r"^rank 0: steps 0 to 10$", r"^rank 1: steps 0 to 10$"],
    },
    "docs/huggingface.md": {
        "llama.py": [
            r"^rank 0: 21 tensors, 276096 bytes read$",
            r"^rank 1: 21 tensors, 276096 bytes read$",
            r"^same logits: True$",
        ],
        "fullshard train --model tiny --out runs/books": [r"runs/books/report\.html"],
        "fullshard export runs/books --hf exports/books": [r"exports/books: 21 tensors"],
        "fullshard train --model tiny --init-from exports/books --out runs/letters": [
            r"beginning with the weights of exports/books"
        ],
        "fullshard train --model downloads/llama --tokenizer tokenizer.json --data my_texts/ --seq 128 "
        "--out runs/llama": [r"tokens of 257 kinds", r"runs/llama/report\.html"],
        "fullshard train --finetune downloads/llama --tokenizer tokenizer.json "
        "--data my_texts/ --seq 128 --out runs/tuned": [
            r"beginning with the weights of downloads/llama"
        ],
        "fullshard export runs/tuned --hf exports/tuned": [
            r"exports/tuned: 21 .*with its tokenizer"
        ],
    },
    "docs/models.md#whole-parameters-while-a-model-trains": {
        "live.py": [
            r"^rank 0: 161 values, 4 streamed, first policy\.0\.weight$",
            r"^rank 1: 161 values, 4 streamed, first policy\.0\.weight$",
        ],
    },
    "docs/training.md#fullshard-train": {
        "fullshard train --model tiny": [r"\breport\.html"],
        "fullshard train --data my_texts/ --steps 2000 --out runs/mine --save-every 200": [
            r"\bruns/mine/report\.html"
        ],
        "fullshard train --resume runs/mine": [r"\bstep 8/8 "],
        "fullshard report runs/mine": [r"runs/mine/report\.html"],
        "fullshard export runs/mine --hf exports/mine": [r"exports/mine: 21 tensors"],
    },
    "docs/training.md#text-to-train-on": {
        "prepare.py": [],
        "fullshard train --tokenizer tokenizer.json --data code/ --val-data code/ --out runs/code": [
            r"tokens of 2,000 kinds in 90 documents, 1 file",
            r"documents end with <\|endoftext\|>",
            r"\bval \d\.\d{3}",
        ],
        "fullshard train --resume runs/code --steps 400": [r"\bstep 8/8 "],
        "fullshard export runs/code --hf exports/code": [
            r"exports/code: 21 tensors.*with its tokenizer"
        ],
        "ordered.py": [
            r"^rank 0: 1\.0 epochs, 10 different samples$",
            r"^rank 1: 1\.0 epochs, 10 different samples$",
        ],
    },
    "docs/checking.md#fullshard-doctor": {
        "fullshard doctor": [r"^ok +communication .*peer memory \(one host\)", r"^2 ranks, "],
        "fullshard doctor --json": [r'^{"verdict": "'],
    },
    "docs/checking.md#fullshard-verify": {
        "fullshard verify train.py -- --lr 1e-3": [
            r"^note +seeds +all ranks",
            r"^ok +gradients +all ranks +equal",
        ],
        "net.py": [r"TransformerEncoderLayer"],
        "fullshard verify net:build --batch net:batch": [
            r"^ok +gradients +all ranks +equal",
            r"^equal: nothing differs by more than 0\.01 %",
        ],
        "fullshard verify net:build --batch net:batch --api fsdp1 --json": [r'^{"verdict": "ok"'],
    },
    "docs/checking.md#fullshardreplay": {
        "record.py": [],
        "fullshard replay replays/a record:build": [
            r"^Replayed the step of all 2 ranks in replays/a: 18 inputs, 20 outputs, 12 gradients\.$",
            r"^Equal in every bit\.$",
        ],
        "fullshard replay replays/a record:build --rank 1 --json": [r'"is_equal": true'],
        "torchrun --nproc-per-node 2 -m fullshard replay replays/a record:build": [
            r"12 gradients, 12 reduced gradients\.$"
        ],
    },
    "docs/limits.md#known-limits": {},
    "docs/results.md": {},
}


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    text: str


def text_of(page: str) -> str:
    """Return the text of a page, or of one section: "docs/checking.md#a-model", with the sections inside it."""
    path, _, anchor = page.partition("#")
    lines = (ROOT / path).read_text().splitlines(keepends=True)
    if not anchor:
        return "".join(lines)
    start, depth, is_code = None, 0, False
    for number, line in enumerate(lines):
        is_code ^= line.lstrip().startswith("```")
        heading = None if is_code else re.match(r"(#+) (.*)", line)
        if heading and start is not None and len(heading[1]) <= depth:
            return "".join(lines[start:number])
        if heading and start is None and _anchor(heading[2]) == anchor:
            start, depth = number, len(heading[1])
    assert start is not None, f"{path} has no section {anchor}"
    return "".join(lines[start:])


def _blocks(page: str) -> list[Block]:
    return [
        Block(*found)
        for found in re.findall(r"^```(.*)\n((?:.*\n)*?)^```$", text_of(page), re.MULTILINE)
    ]


def _commands(page: str) -> list[list[str]]:
    blocks = [block.text for block in _blocks(page) if block.language == "sh"]
    return [words for text in blocks for words in _words(text)]


def _words(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block, of which a line may have several."""
    for line in text.splitlines():
        for command in line.split(" && "):
            if words := shlex.split(command, comments=True):
                yield words


# The shape of the first page


def test_the_first_page_is_short_and_in_order() -> None:
    assert len(README.splitlines()) <= 135
    assert re.findall(r"^#+ .*", re.sub(r"(?s)```.*?```", "", README), re.MULTILINE) == [
        "# fullshard",
        "## How much it gains",
        "## What is not known yet",
        "## Install",
        "## Two commands",
        "## Use it",
        "## Links",
    ]


def test_the_first_screen_has_commands_a_picture_a_message_and_what_gpus_have_run_it() -> None:
    first = README.partition("\n## ")[0]
    assert [block.language for block in _blocks("README.md")][:2] == ["sh", ""]
    assert len(first.partition("```sh\n")[2].partition("```")[0].splitlines()) <= 5
    assert first.count("<picture>") == 1
    assert "GPUs: it has run on **one** at a time" in " ".join(first.split())


def test_its_program_is_about_ten_lines() -> None:
    (program,) = [block.text for block in _blocks("README.md") if block.language == "python"]
    lines = [line for line in program.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 13


# Code


def test_every_block_is_a_program_or_commands() -> None:
    """So none is passed over because it says something else than "python" or "sh"; "text" and "" are no code."""
    for page in SEEN:
        assert {block.language for block in _blocks(page)} <= {"python", "sh", "text", ""}, page


@pytest.mark.parametrize("page", [page for page, seen in SEEN.items() if seen])
def test_every_name_that_a_program_uses_is_there(page: str) -> None:
    programs = [block.text for block in _blocks(page) if block.language == "python"]
    for node in (node for program in programs for node in ast.walk(ast.parse(program))):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if _is_ours_or_torch_s(module):
                for each in names:
                    assert hasattr(importlib.import_module(module), each.name), each.name
            case ast.Attribute(value=ast.Name("fullshard"), attr=name):
                assert hasattr(fullshard, name), name
            case ast.Call(
                func=ast.Name(name) | ast.Attribute(value=ast.Name("fullshard"), attr=name),
                keywords=keywords,
            ) if hasattr(fullshard, name):
                accepted = inspect.signature(getattr(fullshard, name)).parameters
                assert {each.arg for each in keywords} <= {*accepted, None}, name


def _is_ours_or_torch_s(module: str) -> bool:
    return module.partition(".")[0] in ("fullshard", "torch")


@pytest.mark.parametrize("page", [page for page, seen in SEEN.items() if seen])
def test_every_command_is_understood(page: str) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for program, *words in _commands(page):
        if program == "fullshard":
            assert commands[words[0]].make_context(words[0], words[1:])


def _pages_with_programs() -> Iterator[object]:
    for page, seen in SEEN.items():
        # Other tests run the same features with other numbers; each page takes a minute.
        marks = [pytest.mark.long] if page != "README.md" else []
        if seen:
            yield pytest.param(page, marks=marks)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [*_pages_with_programs()])
def test_every_program_and_command_runs(page: str, tmp_path: Path) -> None:
    _write_what_they_name(tmp_path)
    if (
        page == "README.md"
    ):  # nothing more than `pip install "./fullshard[train]"` is asked for there
        _hide_what_pip_does_not_bring(tmp_path)
    printed: dict[str, str] = {}
    for block in _blocks(page):
        if block.language == "python":
            name = _named(block.text)
            (tmp_path / name).write_text(block.text)
            if page == "README.md":  # the next block runs the like under torchrun
                program = f"import runpy; runpy.run_path({name!r}, run_name='__main__')"
                ranks = on_forked_ranks(2, program, folder=tmp_path)
                printed[name] = "".join(each.out for each in ranks)
            elif block.text.startswith("# torchrun"):
                printed[name] = _torchrun(["--nproc-per-node", "2", name], tmp_path)
            else:
                printed[name] = _call([sys.executable, name], tmp_path)
        elif block.language == "sh":
            for words in _words(block.text):
                if not _installs(words):
                    printed[shlex.join(words)] = _run(words, tmp_path)
    assert printed.keys() == SEEN[page].keys()
    for what, patterns in SEEN[page].items():
        for pattern in patterns:
            assert re.search(pattern, printed[what], re.MULTILINE), (what, pattern, printed[what])


@pytest.mark.parametrize("page", SEEN)
def test_commands_that_install_name_what_is_there(page: str) -> None:
    """They download, so they are not run here; what they are given has to exist."""
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = re.findall(r"^\S+==[^;\s]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    extras = re.findall(
        r"^(\w+) = \[", PROJECT.partition("[project.optional-dependencies]")[2], re.MULTILINE
    )
    for words in filter(_installs, _commands(page)):
        if words[0] == "git":
            assert words[1:] == ["clone", MAKING["home"]()]
        elif words[0] == "make":
            assert words[1] in targets
            assert all(option.startswith("ARGS=") for option in words[2:])
        else:
            assert words[1] == "install"
            clone, _, extra = words[2].rstrip("]").partition("[")
            assert words[2] in pinned or (clone in (".", "./fullshard") and extra in ["", *extras])
            assert words[3:] in ([], ["--index-url", "https://download.pytorch.org/whl/cpu"])


def _named(program: str) -> str:
    found = re.match(r"# (?:torchrun --nproc-per-node 2|python) (\w+\.py)\n", program)
    assert found, "a program's first line says how it is started"
    return found[1]


def _installs(words: list[str]) -> bool:
    return words[0] in ("git", "make", "pip")


def _write_what_they_name(folder: Path) -> None:
    """Write `train.py`, the first page's program for PyTorch's FSDP, `my_texts/` and a tokenizer."""
    (program,) = [block.text for block in _blocks("README.md") if block.language == "python"]
    assert program.count("from fullshard import") == 1
    theirs = program.replace("from fullshard import", "from torch.distributed.fsdp import")
    (folder / "train.py").write_text(theirs)
    texts = folder / "my_texts"
    texts.mkdir()
    for i, page in enumerate(PAGES):
        (texts / f"{i}.txt").write_text((ROOT / page).read_text())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def _run(words: list[str], folder: Path) -> str:
    match words:
        case ["torchrun", *rest]:
            return _torchrun(rest, folder)
        case ["fullshard", "train", *rest]:
            # The last of an option counts.
            shorter = ["--steps", "8" if "--resume" in rest else "4", "--cache", "cache"]
            if not {"--resume", "--model", "--finetune"} & {*rest}:
                shorter += ["--model", "tiny"]
            return _call([sys.executable, "-m", "fullshard", "train", *rest, *shorter], folder)
        case ["fullshard", "compare", *rest]:
            once = ["--rounds", "1"]
            return _call([sys.executable, "-m", "fullshard", "compare", *once, *rest], folder)
        case ["fullshard", *rest]:
            return _call([sys.executable, "-m", "fullshard", *rest], folder)
    pytest.fail(f"not known how to run {words}")


def _torchrun(words: list[str], folder: Path) -> str:
    logs = folder / "logs" / str(len(list(folder.glob("logs/*"))))  # in one pipe ranks' lines mix
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--redirects", "1", "--log-dir", str(logs)]
    _call([*launcher, *words], folder)
    return "".join(path.read_text() for path in sorted(logs.rglob("stdout.log")))


def _call(words: list[str], folder: Path) -> str:
    env = environment() | {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    done = subprocess.run(
        words, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def _hide_what_pip_does_not_bring(folder: Path) -> None:
    """Let Python find only what `pip install "./fullshard[train]"` installs; `folder` is first on its path."""
    brought = {"fullshard", *_closure(_dependencies())}
    hidden = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {_normal(owner) for owner in owners} & brought
    }
    assert {"pytest", "matplotlib", "safetensors"} <= hidden
    (folder / "sitecustomize.py").write_text(f"""
from importlib.machinery import PathFinder

HIDDEN = {sorted(hidden)}
find_spec = PathFinder.find_spec


def find_others(name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, path, target)


PathFinder.find_spec = find_others
""")


def _dependencies() -> list[str]:
    """Return the names of what fullshard[train] needs."""
    lists = re.findall(r"(?s)^(?:dependencies|checkpoint|train) = \[\n?(.*?)\]\n", PROJECT, re.M)
    assert len(lists) == 3
    named = [Requirement(text) for each in lists for text in re.findall(r'"(.*?)"', each)]
    return [each.name for each in named if not each.marker or each.marker.evaluate()]


def _closure(waiting: list[str]) -> set[str]:
    """Return packages and all that they bring along without extras."""
    found: set[str] = set()
    while waiting:
        name = _normal(waiting.pop())
        if name not in found:
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or [])
            waiting += [r.name for r in needed if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# Links


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"(?s)```.*?```", "", (ROOT / page).read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" not in path:
            there = (ROOT / page).parent / path if path else ROOT / page
            assert there.exists(), target
            assert not anchor or anchor in _anchors(there.read_text()), target


def test_every_page_and_picture_is_linked() -> None:
    for page in ROOT.glob("docs/*.md"):
        assert f"](docs/{page.name})" in README, page
    pages = "".join((ROOT / page).read_text() for page in PAGES)
    for picture in ROOT.glob("docs/images/*"):
        assert re.search(rf"images/{picture.name}[)\"]", pages), picture


def _anchors(text: str) -> set[str]:
    """Return the names under which headings can be linked: letters, digits and dashes."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"(?s)```.*?```", "", text), re.MULTILINE)
    found = [*map(_anchor, headings)]
    assert len(found) == len({*found}), "two headings have one anchor"
    return {*found}


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


# Numbers

COLUMNS = ("fullshard", "fullshard-fsdp1", "fullshard-pg", "fsdp1", "ddp", "deepspeed")
QUANTITIES = {
    "step time over FSDP2": "time over FSDP2",
    "host memory of all ranks over FSDP2": "host memory (PSS) over FSDP2",
    "step time over local compute without communication": "time over local compute",
}


def test_the_table_of_results_is_that_of_the_recorded_run() -> None:
    first_table = (
        (ROOT / "docs" / "results.md").read_text().partition("\n\n| ")[2].partition("\n\n")[0]
    )
    quantity, compared = "", set()
    for line in first_table.splitlines()[2:]:
        setting, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        if setting in QUANTITIES:
            quantity = setting
            continue
        values = _recorded(QUANTITIES[quantity], setting)
        assert cells == [f"{values[c]:.2f}" if c in values else "-" for c in COLUMNS], setting
        compared.add((quantity, setting))
    settings = [s for s in RECORDED["sections"] if s["title"].startswith("step: ")]
    for quantity in [*QUANTITIES][:2]:
        assert sum(q == quantity for q, _ in compared) == len(settings), "no setting is left out"


def test_numbers_of_the_first_page_are_those_that_the_picture_shows() -> None:
    quantities = [("time of a step", "time"), ("memory", "memory")]
    for size, bars in zip(("small", "large"), SHOWN.values(), strict=True):
        for what, field in quantities:
            numbers = [
                f"{getattr(bars[name], field):.2f}"
                for name in ("fullshard-unmodified", "fullshard")
            ]
            assert f"| {size} batch: {what} | {' | '.join(numbers)} |" in README


def test_the_picture_shows_the_recorded_run(tmp_path: Path) -> None:
    with Image.open(DRAWN["PICTURE"]) as picture:
        assert json.loads(picture.text["Description"]) == json.loads(json.dumps(SHOWN))
    DRAWN["draw"](SHOWN, tmp_path / "again.png")
    with Image.open(tmp_path / "again.png") as again:
        assert again.size == picture.size


def _recorded(quantity: str, setting: str) -> dict[str, float]:
    """Return what the recorded run has of "2 ranks, batch 2x128, fp32", by implementation."""
    ranks, _, rest = setting.partition(" ranks, ")
    (section,) = [s for s in RECORDED["sections"] if s["title"] == f"step: ranks {ranks}, {rest}"]
    (row,) = [row for row in section["rows"] if row["what"] == quantity]
    return row["values"]
