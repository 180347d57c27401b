"""A small tokenizer, as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers

from fullshard.tools.config import TrainConfig
from fullshard.tools.text.corpus import ByteText
from fullshard.tools.text.opening import open_text
from fullshard.tools.text.tokenizer import Tokenizer, open_tokenizer
from fullshard.tools.text.tokens import Tokens


class Words(NamedTuple):
    """A folder with a tokenizer that knows the words a to z, and its tokenizer."""

    folder: Path
    tokenizer: Tokenizer


def word_tokenizer(*, template: str = "") -> tokenizers.Tokenizer:
    """Return a tokenizer of the words a to z (numbers 3 to 28), <unk>, <s> and </s> (0 to 2)."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    marks = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary = marks | {letter: 3 + n for n, letter in enumerate(letters)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([*marks])
    if template:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return made


def all_of(tokens: Tokens) -> list[int]:
    return tokens.read([0], len(tokens))[0].tolist()


def byte_text(data: Sequence[str], *, cache: Path = Path(), **options: object) -> ByteText:
    """Return text as a run with such options reads it, byte by byte."""
    config = TrainConfig(**{"data": tuple(data), "val_data": (), **options})
    text = open_text(config, None, cache=cache)
    assert isinstance(text, ByteText)
    return text


@pytest.fixture(autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is read from tables in a folder of the test's: by default it is the current one."""
    monkeypatch.chdir(tmp_path_factory.mktemp("current"))


@pytest.fixture
def words(tmp_path: Path) -> Words:
    folder = tmp_path / "words"
    folder.mkdir()
    word_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return Words(folder, open_tokenizer(folder))
