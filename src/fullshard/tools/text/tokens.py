"""Documents as tokens, in two files: all tokens one after the other, and where each document ends.

tokens    uint16 where that suffices, else uint32
ends      int64; documents of 3 and 4 tokens have ends 3 and 7
"""

import dataclasses
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fullshard.tools.text.cache import KeptFile, kept
from fullshard.tools.text.documents import Piece, Source, stamp
from fullshard.tools.text.tokenizer import FILE, Tokenizer

Progress = Callable[[int, int], object]
"""Told how many bytes of how many are done."""

_FORMAT = 3
_BATCH_SIZE = 2**22  # characters that are tokenized at once, on all cores


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokenized documents, read from the disk as they are needed. dtype: of the tokens."""

    folder: Path
    dtype: "np.dtype[Any]"

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Return where each document ends, which is where the next begins."""
        file = KeptFile(self.folder / "ends")
        file.check()  # once: a search reads from everywhere
        if not file.nbytes:  # which cannot be mapped
            return np.empty(0, np.int64)
        return np.memmap(file.path, np.int64, mode="r")

    @cached_property
    def _file(self) -> KeptFile:
        return KeptFile(self.folder / "tokens")

    def __len__(self) -> int:
        return self._file.nbytes // self.dtype.itemsize

    def read(self, starts: Sequence[int], count: int) -> list[npt.NDArray[Any]]:
        """Return so many tokens from each start on, or as many as there are."""
        size, total = self.dtype.itemsize, len(self)
        spans = [(start * size, max(0, min(count, total - start)) * size) for start in starts]
        return [np.frombuffer(part, self.dtype) for part in self._file.read(spans)]

    @property
    def nbytes(self) -> int:
        return self._file.nbytes + self.ends.nbytes

    @property
    def num_documents(self) -> int:
        return len(self.ends)


def tokenized(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    *,
    text_field: str,
    cache: Path,
    progress: Progress,
) -> Tokens:
    """Tokenize documents, or take what an earlier run has kept.

    Documents without a token are left out. Raises CorpusError for text that cannot be read, and where
    nothing can be written.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    stamps = [[source.kind, stamp(source.path)] for source in sources]
    key = ["tokens", _FORMAT, text_field, stamps, tokenizer.end, tokenizer.version]
    key.append(tokenizer.files[FILE].decode())

    def make(folder: Path) -> None:
        end, ends = 0, array("q")
        with (folder / "tokens").open("wb") as file:
            for tokens, ends_document in _parts(sources, tokenizer, progress):
                end += len(tokens)
                file.write(np.asarray(tokens, dtype).tobytes())
                if ends_document:
                    ends.append(end)
        (folder / "ends").write_bytes(ends.tobytes())

    return Tokens(kept(cache, key, make), dtype)


def _parts(
    sources: Sequence[Source], tokenizer: Tokenizer, progress: Progress
) -> Iterator[tuple[list[int], bool]]:
    """Give the tokens of each piece, with those around a document, and whether the document ends there.

    What a document has around it already, as one has that a chat template wrote, is not put there again.
    """
    before, behind = tokenizer.before, tokenizer.behind
    is_within = False
    for pieces in _batches(sources, progress):
        for piece, tokens in zip(
            pieces, tokenizer.encode([each.text for each in pieces]), strict=True
        ):
            found = tokens
            if tokens and not is_within:
                found = tokens if tokens[: len(before)] == before else [*before, *tokens]
                is_within = True
            if piece.ends_document and is_within:
                yield found if found[-len(behind) :] == behind else [*found, *behind], True
                is_within = False
            elif found:
                yield found, False


def _batches(sources: Sequence[Source], progress: Progress) -> Iterator[list[Piece]]:
    total, before = sum(source.size for source in sources), 0
    batch: list[Piece] = []
    size = 0
    for source in sources:
        for piece in source.pieces():
            batch.append(piece)
            size += len(piece.text)
            if size >= _BATCH_SIZE:
                yield batch
                progress(before + int(source.size * piece.done), total)
                batch, size = [], 0
        before += source.size
    yield batch
    progress(total, total)
