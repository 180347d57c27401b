"""Packed documents as the text of a run: batches, held-out text, and what cannot be packed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.text import opening
from fullshard.tools.text.cache import CorpusError
from fullshard.tools.text.corpus import IGNORED
from fullshard.tools.text.finding import python_library
from fullshard.tools.text.opening import open_text
from fullshard.tools.text.packed import PackedText
from tests.tools.text.conftest import Words, all_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CONFIG = TrainConfig(model="tiny", seq=5, batch=2, ranks=2, tokenizer="words", vocab_size=29)


def _open(words: Words, documents: list[str], **options: object) -> PackedText:
    path = words.folder / "text.jsonl"
    path.write_text("".join(f'{{"text": "{" ".join(text)}"}}\n' for text in documents))
    config = dataclasses.replace(CONFIG, data=(str(path),), **options)
    made = open_text(config, words.tokenizer, cache=words.folder / "cache")
    assert isinstance(made, PackedText)
    return made


@settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40
)
@given(documents=st.lists(st.text(LETTERS, min_size=1, max_size=9), min_size=4, max_size=9))
def test_an_epoch_predicts_each_token_once_from_its_own_document(
    words: Words, documents: list[str]
) -> None:
    """Of one sequence a step: every target is the token behind its input, in the same document, or is left out."""
    text = _open(words, [*documents, LETTERS], batch=1, ranks=1)
    whole = all_of(text.training.tokens)
    firsts = {0, *text.training.tokens.ends.tolist()}
    seen: list[int] = []
    for step in range(text.training.num):
        batch = text.batch(step, range(1))
        start = text.start(step, 0)
        assert batch.inputs[0].tolist() == whole[start : start + 5]
        for offset, target in enumerate(batch.targets[0].tolist()):
            place = start + offset + 1
            assert target == (IGNORED if place in firsts else whole[place])
            seen += [place] if target != IGNORED else []
        assert text.num_targets(step) == (batch.targets != IGNORED).sum()
        positions = batch.positions
        begins = [n for n in range(1, 5) if start + n in firsts]
        assert (positions is None) == (not begins)
        if positions is not None:
            assert [n for n in range(1, 5) if positions[0, n] == 0] == begins
    last = 5 * text.training.num
    assert sorted(seen) == [place for place in range(1, last + 1) if place not in firsts]


def test_ranks_share_the_sequences_of_a_step(words: Words) -> None:
    text = _open(words, [LETTERS, LETTERS[:7], LETTERS])
    whole = text.batch(3, range(4))
    parts = [text.batch(3, range(n, n + 1)) for n in range(4)]
    assert whole.inputs.equal(torch.cat([part.inputs for part in parts]))
    assert whole.targets.equal(torch.cat([part.targets for part in parts]))
    assert whole.inputs.dtype == whole.targets.dtype == torch.int64


@pytest.mark.parametrize(("fraction", "held"), [(0.3, 12), (0.2, 12), (0.15, 6), (0.05, 3)])
def test_a_fraction_holds_out_whole_documents_where_it_can(
    words: Words, fraction: float, held: int
) -> None:
    """Documents of 27, 27, 6 and 6 tokens, 66 in all; 0.05 of them lies within the last, and is cut there."""
    documents = [LETTERS, LETTERS, LETTERS[:5], LETTERS[5:10]]
    text = _open(words, documents, val_fraction=fraction, seq=2)
    assert text.held is not None
    assert text.training.num_tokens == text.held.first == 66 - held


def test_a_fraction_that_leaves_too_little_is_refused(words: Words) -> None:
    with pytest.raises(CorpusError, match=r"less --val-fraction 0\.95, has 2 tokens, but one"):
        _open(words, [LETTERS], val_fraction=0.95)
    with pytest.raises(
        CorpusError, match=r"--val-fraction 0\.1: what is held out has 2 tokens, but one"
    ):
        _open(words, [LETTERS], val_fraction=0.1)


def test_held_out_text_is_the_same_every_time_and_never_trained_on(words: Words) -> None:
    text = _open(words, [LETTERS, "ab" * 9], val_fraction=0.5, val_sequences=2)
    held = text.held_out(range(4))  # 19 tokens are 3 sequences
    assert text.num_held_out == 2
    assert held.inputs.tolist()[0] == text.encode("a b a b a")
    assert held.inputs.tolist()[1] == text.encode("b a b a b")
    assert held.inputs[1:].unique(dim=0).shape[0] == 1  # beyond the last it is the last
    for step in range(20):
        assert (text.batch(step, range(4)).inputs != 2).all(), "the end of the first is not reached"


def test_all_of_a_short_text_is_measured_once(words: Words) -> None:
    documents = [LETTERS, "abcdefg", "hij", "klmnop"]
    text = _open(words, documents, val_fraction=0.5, val_sequences=64)
    assert text.held is not None
    whole = all_of(text.training.tokens)[text.held.first :]
    assert len(whole) == 19
    held = text.held_out(range(text.num_held_out))
    assert held.inputs.flatten().tolist() == whole[:15]
    assert (held.targets != IGNORED).sum() == 13


def test_other_text_can_be_held_out(words: Words) -> None:
    other = words.folder / "other.txt"
    other.write_text("z z z z z z z z")
    text = _open(words, [LETTERS], val_data=(str(other),), val_sequences=2)
    assert text.training.num_tokens == 27
    assert text.held_out(range(1)).inputs.tolist() == [[28] * 5]
    other.write_text("z z")
    with pytest.raises(
        CorpusError, match=r"--val-data: .*other\.txt has 3 tokens, but one sequence"
    ):
        _open(words, [LETTERS], val_data=(str(other),))
    path = words.folder / "text.jsonl"
    with pytest.raises(CorpusError, match="is text of --data as well"):
        _open(words, [LETTERS], val_data=(str(path),))


def test_text_that_is_too_short_is_refused(words: Words) -> None:
    with pytest.raises(CorpusError, match=r"--data: .*has 4 tokens, but one sequence needs 6"):
        _open(words, ["abc"])
    with pytest.raises(OptionError, match="--seq 1: a sequence may then have nothing to predict"):
        _open(words, ["abc"], seq=1)
    assert _open(words, ["abc"], seq=1, across_documents=True).num_targets(0) == 4


def test_a_prompt_begins_as_a_document_does(words: Words) -> None:
    text = _open(words, [LETTERS])
    assert text.encode("a b") == [3, 4]
    assert text.decode([3, 4, 2]) == "a b"
    assert text.end_token == 2


def test_other_text_has_another_fingerprint_and_the_entropy_is_that_of_tokens(words: Words) -> None:
    import math

    first = _open(words, ["ab" * 20] * 2)
    assert first.survey == _open(words, ["ab" * 20] * 2).survey
    assert first.survey.fingerprint != _open(words, ["ba" * 20] * 2).survey.fingerprint
    assert first.survey.fingerprint != _open(words, ["ab" * 10, "ab" * 30]).survey.fingerprint
    odds = [40 / 82, 40 / 82, 2 / 82]
    expected = -sum(odd * math.log(odd) for odd in odds)
    assert first.survey.unigram_entropy == pytest.approx(expected)


def test_the_library_is_the_default_here_as_well(
    words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("argparse.py", "ast.py")  # to tokenize all of it takes long
    some = [source for source in python_library() if source.path.name in names]
    monkeypatch.setattr(opening, "python_library", lambda: some)
    text = open_text(CONFIG, words.tokenizer, cache=tmp_path)
    assert {*names} == {path.name for path in text.paths}
    assert "tokens of 29 kinds in" in text.notes()[0]
