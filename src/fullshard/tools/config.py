"""What a training run is: its options as one frozen value, checked before any rank starts; and from a file."""

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError
from fullshard.json_files import LARGEST, Refuse, as_typed, parse_json, read_text
from fullshard.models.sizes import SIZES
from fullshard.tools.cli_options import panel

DTYPES = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")

MOST_USED = "Most used"  # of the options: the first panel of the help
TINY_DEFAULTS: dict[str, Any] = {"steps": 400, "batch": 8, "lr": 1e-2, "warmup": 20}
"""What `--model tiny` learns most from in a minute on two CPU ranks; a matter of its size."""
FINETUNE_LR = 2e-5
"""Highest learning rate where a model of Hugging Face goes on from its weights, which 100 times as much would ruin."""

FINETUNE_EPOCHS = 3.0
"""How often a model of Hugging Face goes through --data, of which more would teach it little but to repeat it."""


DEFAULT_CACHE = Path("~/.cache/fullshard")
"""Where tokens of texts are kept, for runs to come."""


_MOST_RANKS = 4096  # that are proposed

# Of a TOML file.
_MOST_NBYTES = 16 << 20
_MOST_DOTS = 1000
_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'')  # between quotes, where dots are no keys


class OptionError(FullshardError, ValueError):
    """An option that cannot work; raised before anything is written or started."""


def check_file(path: Path, option: str = "--out") -> None:
    """Raise OptionError for what no file can be written to: its folder has to be there. option: that named it."""
    if str(path) == "-":
        raise OptionError(f"{option} -: give the name of a file.")
    if not path.parent.is_dir():
        raise OptionError(
            f"{option} {path}: there is no folder {path.parent}. Make it, or name another file."
        )


_most_used, _text, _model = panel(MOST_USED), panel("Text"), panel("Model")
_devices, _training, _results = panel("Devices"), panel("Training"), panel("Results")


def _by_model(
    name: str,
    default: float,
    help_text: str,
    declare: Any = _most_used,
    also: str = "",
    **facts: Any,
) -> Any:
    """Declare an option whose default is another one for the tiny model (`with_defaults`)."""
    shown = f"{default}, for tiny {TINY_DEFAULTS[name]}"
    if name == "warmup":
        shown = f"a tenth of the steps, at most {shown}"
    help_text = f"{help_text} Default: {shown}{also}."
    return declare(default, help_text, untyped=None, **facts)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a run computes: options of `fullshard train`, and fields of `config.json`.

    One step trains on `ranks * batch * grad_accum` sequences of `seq` bytes, or of as many tokens of the
    tokenizer. vocab_size: of the model.

    Of a field, least: the smallest value. may_change: whether a resumed run may have another value without
    becoming another run; ranks, batch and accumulation may change together as long as their product, the
    sequences of a step, stays, and the latter two follow from another number of ranks.
    """

    data: tuple[str, ...] = _most_used(
        (),
        "File or folder of text, JSON lines (.jsonl) or Parquet, or a saved data set; may repeat. "
        "Default: Python's own library.",
        metavar="PATH",
    )
    text_field: str = _text(
        "",
        "Where a line of JSON, or a row of a table, holds its text. Default: text.",
        metavar="NAME",
    )
    tokenizer: str = _most_used(
        "",
        "File or folder with a tokenizer.json of Hugging Face. Default: none, a token is a byte.",
        metavar="PATH",
    )
    end_token: str = _text(
        "",
        "The token behind each document. Default: what the tokenizer's configuration says.",
        metavar="TOKEN",
    )
    across_documents: bool = _text(False, "Let documents in a sequence see those before them.")
    val_data: tuple[str, ...] = _text(
        (),
        "Text to measure the loss on, instead of --val-fraction: one or several.",
        metavar="PATH",
    )
    val_fraction: float = _text(
        0.0, "Of the text, at its end, that is held out to measure the loss on."
    )
    val_every: int = _text(
        50, "Steps between measurements; 0: only at the end.", least=0, may_change=True
    )
    val_sequences: int = _text(
        64, "Sequences of it that are measured at most, over all ranks.", least=1, may_change=True
    )
    seq: int = _text(256, "Tokens in a sequence.", least=1)
    model: str = _most_used(
        "10m",
        f"Size: {', '.join(SIZES)}. Or the config.json, or the folder, of a model of Transformers.",
        metavar="SIZE|PATH",
        values=tuple(SIZES),
    )
    vocab_size: int = _model(
        256,
        "Kinds of tokens that the model tells apart. Default: as many as there are.",
        untyped=None,
        least=1,
    )
    tie_embeddings: bool = _model(False, "Embedding and head share a weight.")
    init_from: str = _model(
        "",
        "Begin with the weights of this folder: a run, one of its checkpoints, or a model's of "
        "Hugging Face (safetensors).",
        metavar="DIR",
    )
    activation_checkpointing: bool = _model(False, "Recompute layers in the backward.")
    ranks: int = _devices(
        2, "Local ranks. Default: one per GPU, else 2.", untyped=None, least=1, may_change=True
    )
    device: str = _devices(
        "cpu",
        "auto: the GPUs that are there, or else the CPU.",
        metavar="|".join(DEVICES),
        values=DEVICES,
        untyped="auto",
        may_change=True,
    )
    dtype: str = _devices(
        "fp32",
        "Of the computations; bf16 is reduced in fp32. auto: bf16 on GPU, fp32 on CPU.",
        metavar="|".join(DTYPES),
        values=DTYPES,
        untyped="auto",
    )
    steps: int = _by_model(
        "steps",
        350,
        "Optimizer steps in all.",
        also=f", with --finetune {FINETUNE_EPOCHS:g} epochs of --data",
        least=1,
        may_change=True,
    )
    batch: int = _by_model("batch", 2, "Sequences per rank and forward.", least=1, may_change=True)
    grad_accum: int = _training(
        1,
        "Micro-batches per step. Gradients are reduced after each one, which saves memory and costs "
        "up to a quarter of the time.",
        least=1,
        may_change=True,
    )
    lr: float = _by_model(
        "lr", 2e-3, "Highest learning rate.", also=f", with --finetune {FINETUNE_LR:g}"
    )
    min_lr: float = _training(
        1e-4,
        "Learning rate at the last step. Default: a tenth of --lr, at most 0.0001.",
        untyped=None,
    )
    warmup: int = _by_model(
        "warmup", 30, "Steps of linear rise before the cosine.", _training, least=0
    )
    weight_decay: float = _training(0.1, "AdamW weight decay of matrices.", least=0)
    clip: float = _training(1.0, "Largest global gradient norm; 0 for no limit.", least=0)
    seed: int = _training(0, "Decides weights, text and sample.")
    save_every: int = _results(
        100, "Steps between checkpoints; 0: only at the end.", least=0, may_change=True
    )
    keep_checkpoints: int = _results(
        2, "How many of the newest checkpoints stay.", least=1, may_change=True
    )
    prompt: str = _results(
        "",
        "Beginning of the text sample. Default: def main(, or some words of --data.",
        may_change=True,
    )
    sample_length: int = _results(
        300, "Tokens to generate at the end; 0 for none.", least=0, may_change=True
    )
    temperature: float = _results(
        0.9, "Of the sample; 0 takes the likeliest token.", least=0, may_change=True
    )
    trace_steps: int = _results(
        3, "Steps to record for the report; 0 for none.", least=0, may_change=True
    )
    log: tuple[str, ...] = _results(
        (),
        "Send each step's numbers there as well: tensorboard, wandb, mlflow, trackio, or a class of "
        "yours; may repeat.",
        "--log",
        "--logger",
        metavar="NAME|MODULE:CLASS",
        may_change=True,
    )

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise OptionError("\n".join(problems))

    def _problems(self) -> list[str]:
        """Say every problem at once, each with the option's name and what would work."""
        found = [
            f"{_flag(name)}: is a number that is far too large."
            for name, value in vars(self).items()
            if isinstance(value, int) and not -LARGEST <= value < LARGEST
        ]
        if found:  # of which nothing else can be said
            return found
        if self.model not in SIZES and not is_path(self.model):
            found.append(
                f"--model {self.model}: no such size; choose from {', '.join(SIZES)}, or name the config.json "
                "or the folder of a model of Transformers, which is not downloaded here."
            )
        if self.tie_embeddings and self.model not in SIZES:
            found.append(f"--tie-embeddings: what {self.model} says counts (tie_word_embeddings).")
        if self.across_documents and not self.tokenizer:
            found.append("--across-documents: is for a --tokenizer; bytes are not told apart.")
        for name, choices in (("device", DEVICES), ("dtype", DTYPES)):
            # `auto` can be typed, and has become another by now (job.new_job).
            if getattr(self, name) not in choices[1:]:
                found.append(f"--{name} {getattr(self, name)}: choose from {', '.join(choices)}.")
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), field.metadata.get("least")
            if least is not None and not value >= least:  # which also refuses nan
                limit = "must not be negative" if least == 0 else f"must be at least {least}"
                found.append(f"{_flag(field.name)} {value}: {limit}.")
        if not 0 <= self.val_fraction < 1:
            found.append(f"--val-fraction {self.val_fraction}: must be from 0 to below 1.")
        if self.val_fraction and self.val_data:
            found.append("--val-fraction and --val-data: both hold text out; leave one away.")
        if self.end_token and not self.tokenizer:
            found.append(f"--end-token {self.end_token}: is of a --tokenizer, and there is none.")
        if not 0 <= self.seed < 2**31:
            found.append(f"--seed {self.seed}: must be from 0 to {2**31 - 1}.")
        if self.tokenizer and self.seq == 1 and not self.across_documents:
            found.append(
                "--seq 1: a sequence may then have nothing to predict; give more, with --tokenizer."
            )
        if not 0 <= self.lr < math.inf:
            found.append(f"--lr {self.lr}: must be a number from 0 on.")
        elif not 0 <= self.min_lr <= self.lr:
            found.append(f"--min-lr {self.min_lr}: must be from 0 to --lr {self.lr}.")
        return found

    @property
    def model_name(self) -> str:
        """What the model is called, as it was typed."""
        return self.model.removeprefix("./")

    @property
    def global_batch(self) -> int:
        """Sequences in one step, over all ranks."""
        return self.ranks * self.batch * self.grad_accum

    @property
    def unit(self) -> str:
        """What a loss is for, and a sequence counted in."""
        return "token" if self.tokenizer else "byte"

    @property
    def holds_out(self) -> bool:
        """Whether there is text that is not trained on, but measured."""
        return bool(self.val_fraction or self.val_data)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq

    def resumed_with(self, changes: dict[str, Any]) -> "TrainConfig":
        """Return this configuration with what the command line asks to change.

        Raises OptionError for a change that would make it another run, naming every option with
        both values.
        """
        fields = dataclasses.fields(self)
        differing = {k: v for k, v in changes.items() if getattr(self, k) != v}
        may_change = {field.name for field in fields if field.metadata.get("may_change")}
        fixed = ", ".join(
            f"{_flag(name)} {differing[name]} (the run has {getattr(self, name)})"
            for name in sorted(differing.keys() - may_change)
        )
        if fixed:
            raise OptionError(
                f"--resume: this run was started with other options: {fixed}. Leave them out to "
                "continue it, or start a new run with another --out (and --init-from, for its weights)."
            )
        if "ranks" in differing and not {"batch", "grad_accum"} & changes.keys():
            differing |= self._shared_by(differing["ranks"])
        merged = dataclasses.replace(self, **differing)
        if merged.global_batch != self.global_batch:
            raise OptionError(
                f"--resume: ranks x batch x grad-accum is {merged.ranks} x {merged.batch} x "
                f"{merged.grad_accum} = {merged.global_batch} sequences a step, but the run was "
                f"started with {self.ranks} x {self.batch} x {self.grad_accum} = "
                f"{self.global_batch}. {self._what_fits(merged)}"
            )
        return merged

    def _shared_by(self, ranks: int) -> dict[str, int]:
        """Return how another number of ranks shares a step: no rank computes more at once than it does now."""
        own, rest = divmod(self.global_batch, max(1, ranks))
        if rest or not own:
            return {}
        batch = max(n for n in range(1, min(self.batch, own) + 1) if own % n == 0)
        return {"batch": batch, "grad_accum": own // batch}

    def _what_fits(self, merged: "TrainConfig") -> str:
        """Say which of the options that share a step would keep its sequences."""
        total = self.global_batch
        if total % merged.ranks:
            ranks = range(1, min(total, _MOST_RANKS) + 1)
            numbers = ", ".join(str(n) for n in ranks if total % n == 0)
            return f"{merged.ranks} ranks cannot share {total} evenly. --ranks that can: {numbers}."
        fitting = [
            f"{_flag(name)} {total // others}"
            for name, others in (
                ("batch", merged.ranks * merged.grad_accum),
                ("grad_accum", merged.ranks * merged.batch),
            )
            if total % others == 0
        ]
        both = "leave out --batch and --grad-accum, which then follow from --ranks"
        return f"Give {' or '.join(fitting)}, or {both}." if fitting else f"Rather {both}."


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in what was not typed and depends on the model or on the number of steps.

    {"model": "tiny", "steps": 50, "lr": None} becomes, among others, lr 0.01 and warmup 5: a run of
    few steps is not to spend them on warming up.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    filled = dict(options)
    if "model" in filled:
        filled["model"] = as_size_or_path(filled["model"])
        if filled["model"] == "tiny":
            defaults |= TINY_DEFAULTS
        elif filled["model"] not in SIZES and filled.get("init_from"):
            defaults["lr"] = FINETUNE_LR
    for name in ("steps", "batch", "lr"):
        if filled.get(name) is None:
            filled[name] = defaults[name]
    if filled.get("warmup") is None:
        filled["warmup"] = min(defaults["warmup"], max(0, filled["steps"]) // 10)
    if filled.get("min_lr") is None:
        filled["min_lr"] = min(defaults["min_lr"], filled["lr"] / 10)
    return filled


def lower_lr(config: TrainConfig) -> float:
    """Return a learning rate to try where that of a run was too high: a third, and no more than its default."""
    default = with_defaults({"model": config.model, "init_from": config.init_from})["lr"]
    return float(min(config.lr / 3, default))


def as_size_or_path(model: str) -> str:
    """Return a name of a size (10M is 10m), or a path that is seen to be one even where it is not there any more."""
    if model.lower() in SIZES and not is_path(model):
        return model.lower()
    return f"./{model}" if model not in SIZES and "/" not in model and is_path(model) else model


def is_path(model: str) -> bool:
    """Whether --model is meant as a file or folder: one with a slash, a name in .json, or one that is there."""
    if "/" in model or model.endswith(".json"):
        return True
    try:
        return Path(model).is_dir()
    except (OSError, ValueError):  # no name that a file can have
        return False


def how_to_get(name: str, kind: str = "model") -> str:
    """Say how to get what looks like a name on Hugging Face's hub and is not here; else "". Begins with a space."""
    owner, _, last = name.rpartition("/")
    pattern = r"(\w[\w.-]*/)?[\w.-]+" if kind == "model" else r"\w[\w.-]*/[\w.-]+"
    is_file = Path(name).suffix in (".json", ".safetensors", ".bin", ".toml")
    if not re.fullmatch(pattern, name) or is_file or Path(owner or name).exists():
        return ""
    if kind == "model":
        command, then = f"hf download {name} --local-dir {last}", f"--finetune {last}"
    else:
        command = f"hf download {name} --repo-type {kind} --local-dir {last}"
        then = f"--data {last}"
    return f" Nothing is downloaded here. Is it a {kind} of Hugging Face? `{command}` gets it, for {then}."


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_options(
    path: Path,
    *,
    known: Collection[str],
    flags: Collection[str] = (),
    lists: Collection[str] = (),
) -> dict[str, Any]:
    """Return what the file of `--config` says, by names with underscores.

        model = "35m"
        data = ["books/", "notes.txt"]
        grad-accum = 4

    A run's folder, or its config.json, is such a file too: it has every option that the run was started with.

    known: names of options. flags, lists: those that are true or false, and those that may repeat. Raises
    OptionError for a file that cannot be read, a name that is not known or comes twice, and a value of a kind
    that its option does not take.
    """
    if path.is_dir():
        path = path / "config.json"
    found: dict[str, Any] = {}
    for name, value in _read(path).items():
        key = name.replace("-", "_")
        if key in found:
            raise OptionError(f"--config {path}: {key} comes twice, with - and with _. Keep one.")
        found[key] = value
    for key, value in found.items():
        if key not in known:
            close = get_close_matches(key, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" Known: {', '.join(sorted(known))}."
            raise OptionError(f"--config {path}: there is no option {key}.{hint}")
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, int) and not -LARGEST <= part < LARGEST for part in parts):
            raise OptionError(f"--config {path}: {key} is a number that is far too large.")
        kinds = {bool} if key in flags else {str, int, float}
        wanted = "true or false" if key in flags else "text or a number"
        if key in lists:
            found[key], wanted = parts, f"{wanted}, or a list"
        elif isinstance(value, list):
            wanted, parts = "one value, not a list", [None]
        if not {type(part) for part in parts} <= kinds:
            raise OptionError(f"--config {path}: {key} is {_shown(value)}; give {wanted}.")
    if path.name == "config.json":  # the originals may be gone, or others by now
        copies = {"tokenizer": path.with_name("tokenizer"), "model": path.with_name("model.json")}
        found |= {n: str(copy) for n, copy in copies.items() if found.get(n) and copy.exists()}
    return found


def _shown(value: Any) -> str:
    """Write a value for a message, cut; Python does not write out numbers of many thousand digits."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return "a number that is far too large"


def _read(path: Path) -> Mapping[str, Any]:
    def refuse(why: str) -> OptionError:
        return OptionError(f"--config {path}: {why}. Name a TOML file, or a run's folder.")

    text = read_text(path, refuse, most_nbytes=_MOST_NBYTES)
    if path.suffix != ".json":
        return _toml(text, refuse)
    fields: dict[str, Any] = parse_json(text, dict[str, Any], refuse)
    if "options" in fields:
        return _without_derived(as_typed(fields["options"], dict[str, Any], refuse))
    return fields


def _without_derived(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's options without what follows from others of them, and is to follow from what is typed instead."""
    kept = dict(options)
    for name in ("steps", "batch", "lr", "warmup", "min_lr"):
        if all(type(options.get(each)) in (int, float) for each in ("steps", "lr", name)):
            derived = with_defaults({**options, name: None})[name]
            kept = {key: value for key, value in kept.items() if (key, value) != (name, derived)}
    is_of_bytes = not options.get("tokenizer") and options.get("vocab_size") == 256
    if is_of_bytes or options.get("model") not in SIZES:  # else somebody may have asked for more
        kept.pop("vocab_size", None)
    return kept


def _toml(text: str, refuse: Refuse) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    # The parser's time grows with the square of the dots of one key.
    if any(line.count(".") > _MOST_DOTS for line in _TEXT.sub("", text).splitlines()):
        raise refuse(f"has a key of more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise refuse(f"is no TOML: {error}") from error
    except RecursionError:
        raise refuse("is nested too deep") from None
