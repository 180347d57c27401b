"""From a run's options to its text: bytes, or packed documents in the tokens of a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from fullshard.tools.config import TrainConfig
from fullshard.tools.progress import Copying
from fullshard.tools.text.corpus import ByteText, open_corpus
from fullshard.tools.text.files import DEFAULT_FIELD, ByteSource, JsonLines, TextFile, is_json_lines
from fullshard.tools.text.finding import (
    HELD_OUT,
    TRAINING,
    Skipped,
    Use,
    check_apart,
    find_sources,
    python_library,
)
from fullshard.tools.text.interface import Text
from fullshard.tools.text.packed import HeldOut, PackedText, check_length, where_held_out
from fullshard.tools.text.packing import Packing
from fullshard.tools.text.rows import CsvFile, JsonTable
from fullshard.tools.text.tokenizer import Tokenizer
from fullshard.tools.text.tokens import Tokens, tokenized


def open_text(config: TrainConfig, tokenizer: Tokenizer | None, *, cache: Path) -> Text:
    """Open what --data and --val-data name, and tokenize it unless that was done before.

    cache: the folder where tokens, and bytes of tables, are kept. Raises CorpusError for text that is not
    there, cannot be read, or is too short.
    """
    if tokenizer is not None:
        return _packed(config, tokenizer, cache)
    corpus = open_corpus(
        config.data,
        seq=config.seq,
        text_field=config.text_field,
        val_fraction=config.val_fraction,
        val_data=config.val_data,
        cache=cache,
    )
    return ByteText(
        corpus,
        config.seq,
        config.global_batch,
        config.seed,
        config.val_sequences,
        read_as=_read_as(corpus.files, config),
    )


def _packed(config: TrainConfig, tokenizer: Tokenizer, cache: Path) -> PackedText:
    skipped, sources = Skipped(), python_library()
    if config.data:
        sources = _sources(config.data, TRAINING, config, cache, skipped)
    tokens = _tokens(sources, tokenizer, config, cache)
    num_tokens, held = len(tokens), None
    others: list[ByteSource] = []
    what = ", ".join(config.data) or "Python's standard library"
    if config.val_fraction:
        num_tokens = where_held_out(tokens, config.val_fraction)
        held = HeldOut(tokens, num_tokens, config.seq, config.val_sequences)
        what += f", less --val-fraction {config.val_fraction},"
        check_length(
            held.num_tokens,
            config.seq,
            what=f"--val-fraction {config.val_fraction}: what is held out",
        )
    elif config.val_data:
        others = _sources(config.val_data, HELD_OUT, config, cache, Skipped())
        skipped = skipped.without(others)
        check_apart(sources, others)
        other_tokens = _tokens(others, tokenizer, config, cache)
        held = HeldOut(other_tokens, 0, config.seq, config.val_sequences)
        named = ", ".join(config.val_data)
        check_length(held.num_tokens, config.seq, what=f"--val-data: {named}")
    left_out = f" (left out: {skipped})" if skipped else ""
    check_length(num_tokens, config.seq, what=f"--data: {what}{left_out}")
    return PackedText(
        tokenizer,
        tokens,
        [source.path for source in sources],
        Packing(num_tokens, tokens.ends, config.seq, config.global_batch, config.seed),
        held,
        config.across_documents,
        str(skipped),
        _read_as([*sources, *others], config),
    )


def _read_as(sources: Sequence[ByteSource], config: TrainConfig) -> tuple[str, ...]:
    """Say which tables might be taken for plain text, and which plain text for tables."""
    column = f"{config.text_field or DEFAULT_FIELD!r} (--text-field)"
    tables = [
        each
        for each in sources
        if isinstance(each, CsvFile | JsonTable)
        or (isinstance(each, JsonLines) and not is_json_lines(each.path))
    ]
    plain = [
        each
        for each in sources
        if isinstance(each, TextFile) and each.path.suffix.lower() in (".json", ".csv", ".tsv")
    ]
    said = []
    if tables:
        said.append(f"tables: {_first(tables)}: column {column}")
    if plain:
        said.append(f"as plain text: {_first(plain)}: no rows with a column {column}")
    return tuple(said)


def _first(sources: Sequence[ByteSource]) -> str:
    return ", ".join(str(each.path) for each in sources[:3]) + (", ..." if len(sources) > 3 else "")


def _sources(
    data: Sequence[str], use: Use, config: TrainConfig, cache: Path, skipped: Skipped
) -> list[ByteSource]:
    return find_sources(data, use, text_field=config.text_field, cache=cache, skipped=skipped)


def _tokens(
    sources: list[ByteSource], tokenizer: Tokenizer, config: TrainConfig, cache: Path
) -> Tokens:
    with Copying("tokenizing") as bar:
        return tokenized(
            sources, tokenizer, text_field=config.text_field, cache=cache, progress=bar.update
        )
