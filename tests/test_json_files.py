"""JSON that is damaged, of another form or made to do harm: whatever reads it refuses it, and names the file."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import operator
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.compare.record import ReplayRecord
from fullshard.convert.hf_files import weights_of
from fullshard.errors import FullshardError
from fullshard.json_files import parse_json, read_json
from fullshard.models.blueprints import read_model_config
from fullshard.plan.trace import read_trace
from fullshard.tools.config import TrainConfig, read_options
from fullshard.tools.report import compare, write_report
from fullshard.tools.run_facts import gather_facts
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text.documents import json_lines
from fullshard.tools.verify.record import read_run
from tests.tools.test_trace_metrics import hand_made


def _nested(levels: int, begin: str = "[", end: str = "]") -> bytes:
    return (begin * levels + "1" + end * levels).encode()


JUNK = {
    "empty": b"",
    "cut short": b'{"schema": "fullshard-tr',
    "not UTF-8": b'{"x": "\xff\xfe"}',
    "zeros": b"\0" * 100,
    "no object": b"[1, 2]",
    "null": b"null",
    "number": b"1" * 10_000,
    "a name twice": b'{"x": 1, "x": 2}',
    "nested lists": _nested(100_000),
    "nested objects": _nested(100_000, '{"x":', "}"),
    "nested a little": b'{"x":' + _nested(400) + b"}",
}


def _index(path: Path) -> None:
    weights_of(path)


def _options(path: Path) -> None:
    read_options(path, known=["x", "model", "data"], lists=["data"])


# Of each reader, the name of its file. `weights_of` finds the form by it, `read_options` too.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "trace": ("rank00000.json", read_trace),
    "model": ("model.json", read_model_config),
    "run": ("config.json", lambda path: RunFolder(path.parent).read_config()),
    "facts": ("config.json", lambda path: RunFolder(path.parent).read_facts()),
    "summary": ("summary.json", lambda path: RunFolder(path.parent).read_summary()),
    "options": ("options.json", _options),
    "index": ("model.safetensors.index.json", _index),
    "record": ("replay.json", lambda path: ReplayRecord(path.parent).facts()),
    "verify": ("run.json", lambda path: read_run(path.parent)),
}


@pytest.mark.parametrize("reader", READERS)
def test_junk_is_refused_by_name(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    path = tmp_path / "a [bold]b" / name
    path.parent.mkdir()
    for said, data in JUNK.items():
        path.write_bytes(data)
        with pytest.raises(FullshardError) as refused:
            read(path)
        assert str(path.parent) in str(refused.value), said
    path.unlink()
    path.mkdir()
    with pytest.raises(FullshardError):
        read(path)


def test_lines_of_text_may_be_nested_at_will(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_nested(100_000))
    with pytest.raises(FullshardError, match=r"a\.jsonl, line 1"):
        list(json_lines(path, "text"))


SLOW_OPTIONS = (
    "a." * 50_000 + "a = 1",
    "x = {" + "a." * 50_000 + "a = 1}",
    "[" + "a." * 50_000 + "a]",
    'x = {"' + "a'." * 30_000 + 'a" = 1',
    "x = " + "[" * 50_000,
    "x = " + '{a="b",c=' * 9000,
)


@pytest.mark.parametrize("text", SLOW_OPTIONS)
def test_options_take_no_time_out_of_proportion(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    begun = time.thread_time()
    with pytest.raises(FullshardError, match=r"a\.toml"):
        _options(path)
    assert time.thread_time() - begun < 10  # it was minutes


def test_dots_between_quotes_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f'model = "{"." * 5000}"\ndata = [\'{"." * 5000}\', "\\"{"." * 5000}"]\n')
    _options(path)


# Values of another form, at each place


OTHER_FORMS: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 5000),
    *([], [None], {}, {"x": 1}, [[[[]]]], {"": {"": []}}, "[bold]</script>\n\"'", [1] * 1000),
)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(min(len(tree), 2)):
            yield (*path, key)
            yield from _places(tree[key], (*path, key))


def _write_run(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@pytest.mark.parametrize("number", [300, pytest.param(5000, marks=pytest.mark.long)])
def test_a_run_of_any_form_is_reported_or_refused(tmp_path: Path, number: int) -> None:
    facts = gather_facts(num_parameters=5, flops_per_token=30, device=torch.device("cpu"))
    steps = {"loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "seconds": 0.5, "tokens_per_second": 9.0}
    hand_made().write(tmp_path)
    good = {
        "config.json": {
            "options": dataclasses.asdict(TrainConfig()),
            "corpus": "c",
            "facts": facts,
        },
        "metrics.jsonl": {"step": 1, **steps, "peak_memory": 100, "val_loss": 2.0},
        "summary.json": {"status": "finished", "unigram_entropy": 3.0, "peak_memory_per_rank": 9},
        "rank00000.json": json.loads((tmp_path / "rank00000.json").read_text()),
    }
    _write_run(tmp_path, good)
    write_report(tmp_path)
    places = [*_places(good)]
    rng = random.Random(number)
    for _ in range(number):
        files = copy.deepcopy(good)
        *around, last = rng.choice(places)
        value = rng.choice(OTHER_FORMS)
        functools.reduce(operator.getitem, around, files)[last] = value
        _write_run(tmp_path, files)
        for use in (write_report, lambda path: compare([path, path])):
            said = str(tmp_path)
            try:
                use(tmp_path)
            except FullshardError as error:
                said = str(error)
            assert str(tmp_path) in said, (around, last, value)


# Types


class _Row(NamedTuple):
    x: int
    y: float = 0.5


@dataclasses.dataclass(frozen=True)
class _Whole:
    name: str
    rows: tuple[_Row, ...] = ()
    more: dict[str, list[int] | None] = dataclasses.field(default_factory=dict)
    flag: bool = False


@given(
    st.builds(
        _Whole,
        st.text(),
        st.lists(st.builds(_Row, st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))).map(
            tuple
        ),
        st.dictionaries(st.text(), st.none() | st.lists(st.integers(0, 9))),
        st.booleans(),
    )
)
def test_what_was_written_is_read(value: _Whole) -> None:
    fields = {**dataclasses.asdict(value), "rows": value.rows}
    assert parse_json(json.dumps(fields), _Whole, OSError) == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "it lacks name"),
        ('{"name": 1}', "name is 1, "),
        ('{"name": "", "rows": [[1], [2, "x"]]}', r"rows\[1\] is 'x', "),
        ('{"name": "", "rows": [[true]]}', r"rows\[0\] is True, "),
        ('{"name": "", "more": {"a": [1, null]}}', r"more\.a\[1\] is None"),
        ('{"name": "", "other": 1}', "other, which is not known"),
        ('{"name": "", "flag": 1}', "flag is 1, "),
    ],
)
def test_what_is_of_another_form_is_named(text: str, said: str) -> None:
    with pytest.raises(OSError, match=said):
        parse_json(text, _Whole, OSError)


def test_pipes_and_large_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_json(tmp_path / "pipe", _Whole, OSError)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(50 << 30)  # sparse
    with pytest.raises(OSError, match="53687091200 bytes"):
        read_json(tmp_path / "large", _Whole, OSError)
