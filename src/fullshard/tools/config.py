"""What a training run is: its options as one frozen value, checked before any rank starts."""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError
from fullshard.json_files import LARGEST
from fullshard.models.sizes import SIZES

DTYPES = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")

# What a resumed run may change without becoming another run. Ranks, batch and accumulation may
# change together as long as their product, the sequences of a step, stays.
_FREE_ON_RESUME = frozenset(
    (
        *(
            "steps",
            "save_every",
            "keep_checkpoints",
            "prompt",
            "sample_length",
            "temperature",
            "device",
        ),
        "trace_steps",
        *("val_every", "val_sequences", "log"),
        *("ranks", "batch", "grad_accum"),
    )
)


_NOT_NEGATIVE = (
    *("warmup", "weight_decay", "clip", "save_every", "sample_length", "temperature"),
    "trace_steps",
    "val_every",
)


TINY_DEFAULTS: dict[str, Any] = {"steps": 400, "batch": 8, "lr": 1e-2, "warmup": 20}
"""What `--model tiny` learns most from in a minute on two CPU ranks; a matter of its size."""


DEFAULT_CACHE = Path("~/.cache/fullshard")
"""Where tokens of texts are kept, for runs to come."""


class OptionError(FullshardError, ValueError):
    """An option that cannot work; raised before anything is written or started."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a run computes. `config.json` holds these fields.

    One step trains on `ranks * batch * grad_accum` sequences of `seq` bytes, or of as many tokens of the
    tokenizer. vocab_size: of the model.
    """

    model: str = "10m"
    tie_embeddings: bool = False
    init_from: str = ""
    data: tuple[str, ...] = ()
    text_field: str = ""
    tokenizer: str = ""
    end_token: str = ""
    vocab_size: int = 256
    val_data: tuple[str, ...] = ()
    across_documents: bool = False
    steps: int = 350
    batch: int = 2
    seq: int = 256
    ranks: int = 2
    device: str = "cpu"
    dtype: str = "fp32"
    lr: float = 2e-3
    min_lr: float = 1e-4
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    grad_accum: int = 1
    activation_checkpointing: bool = False
    seed: int = 0
    save_every: int = 100
    keep_checkpoints: int = 2
    prompt: str = "def main("
    sample_length: int = 300
    temperature: float = 0.9
    trace_steps: int = 3
    val_fraction: float = 0.0
    val_every: int = 50
    val_sequences: int = 64
    log: tuple[str, ...] = ()

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
                "of a model of Transformers."
            )
        if self.tie_embeddings and self.model not in SIZES:
            found.append(f"--tie-embeddings: what {self.model} says counts (tie_word_embeddings).")
        if self.across_documents and not self.tokenizer:
            found.append("--across-documents: is for a --tokenizer; bytes are not told apart.")
        for name, choices in (("device", DEVICES), ("dtype", DTYPES)):
            # `auto` can be typed, and has become another by now (job.new_job).
            if getattr(self, name) not in choices[1:]:
                found.append(f"--{name} {getattr(self, name)}: choose from {', '.join(choices)}.")
        found += [
            f"{_flag(name)} {getattr(self, name)}: must be at least 1."
            for name in (
                "steps",
                "batch",
                "seq",
                "ranks",
                "grad_accum",
                "keep_checkpoints",
                "val_sequences",
                "vocab_size",
            )
            if getattr(self, name) < 1
        ]
        found += [
            f"{_flag(name)} {getattr(self, name)}: must not be negative."
            for name in _NOT_NEGATIVE
            if not getattr(self, name) >= 0  # which also refuses nan
        ]
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
        if not self.prompt:
            found.append("--prompt: is empty; give at least one character to continue.")
        return found

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
        differing = {k: v for k, v in changes.items() if getattr(self, k) != v}
        fixed = _describe_changes(self, differing, differing.keys() - _FREE_ON_RESUME)
        if fixed:
            raise OptionError(
                f"--resume: this run was started with other options: {fixed}. Leave them out to "
                "continue it, or start a new run with another --out."
            )
        merged = dataclasses.replace(self, **differing)
        if merged.global_batch != self.global_batch:
            raise OptionError(
                f"--resume: ranks x batch x grad-accum is {merged.ranks} x {merged.batch} x "
                f"{merged.grad_accum} = {merged.global_batch} sequences a step, but the run was "
                f"started with {self.ranks} x {self.batch} x {self.grad_accum} = "
                f"{self.global_batch}. Keep the product, for example with another --batch."
            )
        return merged


def with_defaults(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in what was not typed and depends on the model or on the number of steps.

    {"model": "tiny", "steps": 50, "lr": None} becomes, among others, lr 0.01 and warmup 5: a run of
    few steps is not to spend them on warming up.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    if options.get("model") == "tiny":
        defaults |= TINY_DEFAULTS
    filled = dict(options)
    if "model" in filled:
        filled["model"] = as_size_or_path(filled["model"])
    for name in ("steps", "batch", "lr"):
        if filled.get(name) is None:
            filled[name] = defaults[name]
    if filled.get("warmup") is None:
        filled["warmup"] = min(defaults["warmup"], max(0, filled["steps"]) // 10)
    if filled.get("min_lr") is None:
        filled["min_lr"] = min(defaults["min_lr"], filled["lr"] / 10)
    return filled


def as_size_or_path(model: str) -> str:
    """Return a name of a size, or a path that is seen to be one even where it is not there any more."""
    return f"./{model}" if model not in SIZES and "/" not in model and is_path(model) else model


def is_path(model: str) -> bool:
    """Whether --model is meant as a file or folder: one with a slash, a name in .json, or one that is there."""
    if "/" in model or model.endswith(".json"):
        return True
    try:
        return Path(model).is_dir()
    except (OSError, ValueError):  # no name that a file can have
        return False


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe_changes(config: TrainConfig, changes: dict[str, Any], names: Collection[str]) -> str:
    return ", ".join(
        f"{_flag(name)} {changes[name]} (the run has {getattr(config, name)})"
        for name in sorted(names)
    )
