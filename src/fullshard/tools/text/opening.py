"""From a run's options to its text: bytes, or packed documents in the tokens of a tokenizer."""

from collections.abc import Sequence
from pathlib import Path

from fullshard.tools.config import TrainConfig
from fullshard.tools.progress import counting
from fullshard.tools.text import finding, packed
from fullshard.tools.text.cache import CorpusError
from fullshard.tools.text.corpus import ByteText
from fullshard.tools.text.documents import DEFAULT_FIELD, TABLES, Source, Table, TextFile
from fullshard.tools.text.finding import python_library
from fullshard.tools.text.tokenizer import Tokenizer
from fullshard.tools.text.tokens import Tokens, tokenized

Text = ByteText | packed.PackedText
"""Text to train on and text held out, for one run. Steps and sequences count from zero."""


def open_text(config: TrainConfig, tokenizer: Tokenizer | None, *, cache: Path) -> Text:
    """Open what --data and --val-data name, by default Python's own library, and tokenize it unless that was done before.

    cache: the folder where tokens, and bytes of tables, are kept. Raises CorpusError for text that is not
    there, cannot be read, or is too short.
    """
    skipped, field = finding.Skipped(), config.text_field
    if config.data:
        sources = finding.find_sources(
            config.data, finding.TRAINING, text_field=field, cache=cache, skipped=skipped
        )
    else:
        sources = python_library()
    others = finding.find_sources(
        config.val_data, finding.HELD_OUT, text_field=field, cache=cache, skipped=finding.Skipped()
    )
    finding.check_apart(sources, others)
    skipped = skipped.without(others)
    if tokenizer is not None:
        return _packed(sources, others, config, tokenizer, skipped, cache)
    return _bytes(sources, others, config, skipped)


def _bytes(
    sources: list[Source], others: list[Source], config: TrainConfig, skipped: finding.Skipped
) -> ByteText:
    """Put text one behind the other: what is trained on, and behind it what is held out, or else its own end."""
    seq, fraction = config.seq, config.val_fraction
    if config.data:
        skipped.empty += [str(source.path) for source in sources if not source.nbytes]
    files = [source for source in (*sources, *others) if source.nbytes]
    total, num_held = (sum(each.nbytes for each in part) for part in (files, others))
    if total - num_held < seq + 1:
        what = ", ".join(config.data)
        what = what or "Python's standard library (its .py files may not be installed)"
        num_files = sum(1 for source in sources if source.nbytes)
        raise CorpusError(
            f"--data: {what} holds {total - num_held} bytes of text in {num_files} files, but one sequence "
            f"needs {seq + 1}. {f'Skipped: {skipped}. ' if skipped else ''}Give more text with "
            "--data, or a smaller --seq."
        )
    if config.val_data and num_held < seq + 1:
        raise CorpusError(
            f"--val-data: {', '.join(config.val_data)} holds {num_held} bytes of text, but one sequence needs "
            f"{seq + 1}. Give more text, or a smaller --seq."
        )
    val_nbytes = num_held or int(total * fraction)
    if fraction and min(val_nbytes, total - val_nbytes) < seq + 1:
        raise CorpusError(
            f"--val-fraction {fraction}: of {total} bytes of text it holds {val_nbytes} out and leaves "
            f"{total - val_nbytes}, but one sequence needs {seq + 1}. Give more text, or another fraction."
        )
    return ByteText(tuple(files), val_nbytes, config, _remarks(files, skipped, config))


def _packed(
    sources: list[Source],
    others: list[Source],
    config: TrainConfig,
    tokenizer: Tokenizer,
    skipped: finding.Skipped,
    cache: Path,
) -> packed.PackedText:
    def tokens_of(sources: list[Source]) -> Tokens:
        with counting("tokenizing") as update:
            return tokenized(
                sources, tokenizer, text_field=config.text_field, cache=cache, progress=update
            )

    def sequences(tokens: Tokens, first: int, last: int, *, what: str) -> packed.Sequences:
        found = packed.Sequences(tokens, first, last, config.seq)
        packed.check_length(found, what=what)
        return found

    fraction, tokens, held = config.val_fraction, tokens_of(sources), None
    num_tokens = len(tokens)
    what = ", ".join(config.data) or "Python's standard library"
    if fraction:
        num_tokens, total = packed.where_held_out(tokens, fraction), num_tokens
        option = f"--val-fraction {fraction}"
        what += f", less {option},"
        held = sequences(tokens, num_tokens, total, what=f"{option}: what is held out")
    elif others:
        other = tokens_of(others)
        held = sequences(other, 0, len(other), what=f"--val-data: {', '.join(config.val_data)}")
    left_out = f" (left out: {skipped})" if skipped else ""
    training = sequences(tokens, 0, num_tokens, what=f"--data: {what}{left_out}")
    paths = [source.path for source in sources]
    remarks = _remarks([*sources, *others], skipped, config)
    return packed.PackedText(tokenizer, paths, training, held, config, remarks)


def _remarks(sources: Sequence[Source], skipped: finding.Skipped, config: TrainConfig) -> list[str]:
    """Say which tables might be taken for plain text, which plain text for tables, and what is left out."""
    column = f"{config.text_field or DEFAULT_FIELD!r} (--text-field)"
    tables, plain = [], []
    for source in sources:
        kind = source.path.suffix.lower()
        if isinstance(source, Table) and kind not in TABLES and not source.path.is_dir():
            tables.append(source)
        elif isinstance(source, TextFile) and kind in (".json", ".csv", ".tsv"):
            plain.append(source)
    said = []
    if tables:
        said.append(f"tables: {_first(tables)}: column {column}")
    if plain:
        said.append(f"as plain text: {_first(plain)}: no rows with a column {column}")
    if skipped:
        said.append(f"of --data, not trained on: {skipped}")
    return said


def _first(sources: Sequence[Source]) -> str:
    return ", ".join(str(each.path) for each in sources[:3]) + (", ..." if len(sources) > 3 else "")
