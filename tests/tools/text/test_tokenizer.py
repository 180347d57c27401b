"""Tokenizers of Hugging Face: found, marked, taken along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fullshard.tools.config import OptionError
from fullshard.tools.text.tokenizer import (
    files_for_export,
    how_transformers_differs,
    open_tokenizer,
)
from tests.tools.text.conftest import Words, word_tokenizer


def test_a_folder_and_its_file_are_the_same_tokenizer(words: Words) -> None:
    by_file = open_tokenizer(words.folder / "tokenizer.json")
    for made in (words.tokenizer, by_file):
        assert (made.vocab_size, made.end, made.end_token) == (29, "</s>", 2)
        assert made.encode(["a b", "", "z"]) == [[3, 4], [], [28]]
        assert made.decode([1, 3, 4, 2]) == "a b"
        assert made.files.keys() == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("template", "before", "behind"),
    [("", [], [2]), ("<s> $A", [1], [2]), ("<s> $A </s>", [1], [2]), ("$A <s>", [], [1, 2])],
)
def test_what_the_tokenizer_puts_around_a_text_is_kept_and_the_end_comes_once(
    tmp_path: Path, template: str, before: list[int], behind: list[int]
) -> None:
    word_tokenizer(template=template).save(str(tmp_path / "tokenizer.json"))
    made = open_tokenizer(tmp_path)
    assert (made.before, made.behind) == (before, behind)
    assert made.encode(["a"]) == [[3]]


def test_cutting_and_filling_that_a_file_has_left_on_is_off(tmp_path: Path) -> None:
    made = word_tokenizer()
    made.enable_truncation(2)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).encode(["a b c d", "e"]) == [[3, 4, 5, 6], [7]]


def test_the_end_is_what_is_typed_else_what_the_configuration_says_else_a_usual_one(
    words: Words,
) -> None:
    config = words.folder / "tokenizer_config.json"
    assert open_tokenizer(words.folder, "<s>").end == "<s>"
    config.write_text(json.dumps({"eos_token": {"content": "<s>", "lstrip": False}}))
    assert open_tokenizer(words.folder).end == "<s>"
    config.write_text(json.dumps({"eos_token": None}))
    assert open_tokenizer(words.folder).end == "</s>"
    config.unlink()
    assert open_tokenizer(words.folder).end == "</s>"


@pytest.mark.parametrize(
    ("content", "end", "said"),
    [
        (None, "", r"--tokenizer .*words: holds no tokenizer\.json\. Give a file that"),
        ("{}", "", r"--tokenizer .*words: tokenizer\.json is no tokenizer of `tokenizers` \("),
        ("", "<end>", r"--end-token <end>: is no token of .*\. Its special tokens are: <unk>, <s>"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    words: Words, content: str | None, end: str, said: str
) -> None:
    file = words.folder / "tokenizer.json"
    if content is None:
        file.unlink()
    elif content:
        file.write_text(content)
    with pytest.raises(OptionError, match=said):
        open_tokenizer(words.folder, end)
    with pytest.raises(OptionError, match="no such file"):
        open_tokenizer(words.folder / "nowhere.json")


def test_a_tokenizer_without_a_known_end_asks_for_one(tmp_path: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        OptionError, match=r"which token ends a document\. Name it with --end-token"
    ):
        open_tokenizer(tmp_path)
    assert open_tokenizer(tmp_path, "b").end_token == 1


def test_transformers_loads_what_is_exported(words: Words, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (words.folder / "tokenizer_config.json").unlink()  # a file alone says nothing of its end
    out = tmp_path / "out"
    out.mkdir()
    for name, content in files_for_export(open_tokenizer(words.folder)).items():
        (out / name).write_bytes(content)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded("a b z")["input_ids"] == [3, 4, 28]
    assert (loaded.eos_token, loaded.eos_token_id) == ("</s>", 2)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("llama", ""), ("qwen2", "makes a Qwen2Tokenizer"), ("", "cannot load the tokenizer")],
)
def test_a_family_of_which_transformers_makes_other_tokens_is_said(
    tmp_path: Path, kind: str, said: str
) -> None:
    import tokenizers
    import transformers

    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["isn't it 12345"] * 9, special_tokens=["</s>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind or "llama"}))
    for name, content in files_for_export(open_tokenizer(tmp_path)).items():
        (tmp_path / name).write_bytes(content)
    if not kind:
        (tmp_path / "tokenizer_config.json").write_text("{")
    warning = how_transformers_differs(tmp_path)
    assert said in warning
    assert bool(warning) == bool(said)
    if kind:  # what is advised
        loaded = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert loaded.encode("isn't it 12345") == made.encode("isn't it 12345").ids
