"""A tokenizer of Hugging Face, and how documents are marked: where one begins and where it ends.

Files that a run, and what is exported from it, take along are those that Transformers looks for:

    tokenizer.json            the tokenizer itself
    tokenizer_config.json     among others, which token ends a document (eos_token)
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from fullshard.json_files import parse_json
from fullshard.tools.config import OptionError, how_to_get
from fullshard.versions import install_hint

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
_BESIDE = (CONFIG, "special_tokens_map.json", "chat_template.jinja")
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")
_PROBE = "a"
_UNUSUAL = (
    "It's 12345 words,  isn't IT?\n\n\tdef x_1(a=0.5): # Größe\r\n    10:30  日本 e\u0301 end "
)
"""What pre-tokenizers and normalizers take apart in different ways."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to numbers and back. Made by `open_tokenizer`.

    files: content of each, by name. end_token: the number of the token behind each document.
    """

    inner: Any
    files: dict[str, bytes]
    end: str
    end_token: int

    @property
    def version(self) -> str:
        """Of the library, which may tokenize otherwise in another one."""
        return metadata.version("tokenizers")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest number of a token."""
        return 1 + max(self.inner.get_vocab(with_added_tokens=True).values())

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer itself puts before and behind a text: a token for its beginning, for instance."""
        bare = self.inner.encode(_PROBE, add_special_tokens=False).ids
        whole = self.inner.encode(_PROBE, add_special_tokens=True).ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        return [], []

    @property
    def before(self) -> list[int]:
        """Tokens at the beginning of a document."""
        return self.around[0]

    @property
    def behind(self) -> list[int]:
        """Tokens at the end of a document, the last of which is the end token."""
        found = self.around[1]
        return found if found[-1:] == [self.end_token] else [*found, self.end_token]

    def has_vocab_of(self, file: Path) -> bool:
        """Whether another tokenizer.json has the same tokens, apart from added ones."""
        contents = (self.files[FILE], file.read_bytes())
        if contents[0] == contents[1]:
            return True
        own, other = (
            parse_json(content, dict[str, Any], lambda why: OptionError(f"{file}: {why}."))
            for content in contents
        )
        return bool(own.get("model", {}).get("vocab") == other.get("model", {}).get("vocab"))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, with nothing around them."""
        found = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without those that mark something."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))


def open_tokenizer(path: Path, end: str = "") -> Tokenizer:
    """Read a tokenizer.json, or a folder that holds one.

    end: the token behind each document; by default what the tokenizer's configuration beside it says, else one
    of the usual names. Raises OptionError for a file that is not there or is none, and where no token is known
    to end a document.
    """
    file = path / FILE if path.is_dir() else path
    where = f"--tokenizer {path}"
    if not file.is_file():
        raise OptionError(
            f"{where}: {'holds no ' + FILE if path.is_dir() else 'no such file'}. Give a file that "
            "`tokenizers` has saved, or a folder with one, such as that of a model of Hugging Face."
            f"{how_to_get(str(path))}"
        )
    inner = _parsed(file, where)
    # Both are kept in the file, where others left them on, and would cut or fill what is trained on.
    inner.no_truncation()
    inner.no_padding()
    files = {FILE: file.read_bytes()}
    files |= {
        name: (file.parent / name).read_bytes()
        for name in _BESIDE
        if (file.parent / name).is_file()
    }
    end = end or _configured_end(files, where) or _usual_end(inner, where)
    number = inner.token_to_id(end)
    if number is None:
        raise OptionError(f"--end-token {end}: is no token of {file}. {_special(inner)}")
    return Tokenizer(inner, files, end, int(number))


def files_for_export(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files with which Transformers finds the tokenizer and the token that ends a document."""
    fields = _fields(tokenizer.files, "")
    fields.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    if not fields.get("eos_token"):
        fields["eos_token"] = tokenizer.end
    config = json.dumps(fields, indent=2, ensure_ascii=False).encode()
    return {**tokenizer.files, CONFIG: config + b"\n"}


def how_transformers_differs(folder: Path) -> str:
    """Say whether AutoTokenizer makes other tokens than the tokenizer.json of an exported folder; else "".

    It has pre-tokenizers of its own for some families, such as qwen2, whatever the folder says. Without
    Transformers nothing is known.
    """
    try:
        import transformers
    except ImportError:
        return ""
    inner = _parsed(folder / FILE, f"{folder}")
    inner.no_truncation()
    inner.no_padding()
    expected = inner.encode(_UNUSUAL, add_special_tokens=False).ids
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    try:
        auto = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if auto.encode(_UNUSUAL, add_special_tokens=False) == expected:
            return ""
        why = f"makes a {type(auto).__name__} of the tokenizer, which gives other tokens than the run was trained on"
    except Exception as error:  # of each class its own
        why = f"cannot load the tokenizer ({' '.join(str(error).split())[:200]})"
    finally:
        transformers.logging.set_verbosity(verbosity)
    return (
        f"warning: AutoTokenizer of Transformers {transformers.__version__} {why}. Load it with "
        f"PreTrainedTokenizerFast.from_pretrained({str(folder)!r})"
    )


def _parsed(file: Path, where: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise OptionError(
            f"{where}: needs tokenizers, which is not installed ({error}). Install it with: "
            f"{install_hint('huggingface')}"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # of this very class, whatever is wrong with the file
        raise OptionError(
            f"{where}: {file.name} is no tokenizer of `tokenizers` ({error})."
        ) from error


def _configured_end(files: dict[str, bytes], where: str) -> str:
    found = _fields(files, where).get("eos_token")
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else ""


def _usual_end(inner: Any, where: str) -> str:
    for name in _ENDS:
        if inner.token_to_id(name) is not None:
            return name
    raise OptionError(
        f"{where}: it is not known which token ends a document. Name it with --end-token. {_special(inner)}"
    )


def _special(inner: Any) -> str:
    names = [token.content for token in inner.get_added_tokens_decoder().values()]
    return f"Its special tokens are: {', '.join(names) or 'none'}."


def _fields(files: dict[str, bytes], where: str) -> dict[str, Any]:
    found: dict[str, Any] = parse_json(
        files.get(CONFIG, b"{}"),
        dict[str, Any],
        lambda why: OptionError(f"{where}: {CONFIG} beside it: {why}."),
    )
    return found
