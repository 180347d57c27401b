"""From what was typed to a job that can run: defaults filled in, everything checked.

The launcher and every rank prepare the job in the same way, so a rank under `torchrun` refuses
what the launcher would have refused, and before it joins the others.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

import fullshard
from fullshard.local_ranks import num_cores, num_gpus
from fullshard.models import blueprints
from fullshard.models.sizes import SIZES
from fullshard.tools import weights
from fullshard.tools.config import (
    DEFAULT_CACHE,
    FINETUNE_EPOCHS,
    OptionError,
    TrainConfig,
    as_size_or_path,
    how_to_get,
    lower_lr,
    with_defaults,
)
from fullshard.tools.loggers import check_loggers
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.run_record import not_finite
from fullshard.tools.text.corpus import NUM_BYTES
from fullshard.tools.text.opening import Text, open_text
from fullshard.tools.text.tokenizer import FILE as TOKENIZER
from fullshard.tools.text.tokenizer import Tokenizer, open_tokenizer

_DEFAULT_CPU_RANKS = 2


def choose_model(
    config: TrainConfig, tokenizer: Tokenizer | None, *, vocab_size: int | None
) -> tuple[TrainConfig, blueprints.Blueprint]:
    """Return the model of a run that is to begin, and its options with the size of its vocabulary.

    vocab_size: what was typed. Raises OptionError for a model that cannot be trained, does not fit the text's
    tokens and sequences, or is not that of --init-from.
    """
    model: blueprints.Blueprint
    try:
        if config.model in SIZES:
            size = _vocab_size(vocab_size, tokenizer)
            config = dataclasses.replace(config, vocab_size=size)
            model = weights.model_config(config)
        else:
            model = blueprints.ConfiguredBlueprint(blueprints.read_model_config(Path(config.model)))
            size = _vocab_size_of(model, config, vocab_size, tokenizer)
            config = dataclasses.replace(config, vocab_size=size)
        if config.init_from:
            weights.check_initial_weights(config, model)
    except blueprints.ModelConfigError as error:
        name = config.model_name
        raise OptionError(f"--model {name}: {error}{how_to_get(name)}") from error
    return config, model


def _vocab_size(wanted: int | None, tokenizer: Tokenizer | None) -> int:
    """Return how many kinds of tokens a model of ours is to tell apart."""
    needed = tokenizer.vocab_size if tokenizer else NUM_BYTES
    if wanted is not None and wanted < needed:
        what = "the tokenizer has" if tokenizer else "bytes have"
        raise OptionError(
            f"--vocab-size {wanted}: {what} {needed} kinds. Leave it out, or give more."
        )
    return wanted or needed


def _vocab_size_of(
    blueprint: blueprints.ConfiguredBlueprint,
    config: TrainConfig,
    wanted: int | None,
    tokenizer: Tokenizer | None,
) -> int:
    """Return how many kinds of tokens a configuration has, after a look at whether text fits it."""
    blueprints.check_trainable(blueprint.fields)
    has, where = blueprint.vocab_size, f"--model {config.model_name}"
    if wanted not in (None, has):
        raise OptionError(
            f"--vocab-size {wanted}: {where} has {has} kinds. Leave --vocab-size out."
        )
    if tokenizer is None and has != NUM_BYTES:
        raise OptionError(
            f"{where}: has {has} kinds of tokens, and without --tokenizer there are {NUM_BYTES}, of bytes. "
            f"{_how_to_give_its_tokenizer(config)}"
        )
    if tokenizer is not None and has < tokenizer.vocab_size:
        raise OptionError(
            f"{where}: has {has} kinds of tokens, and the tokenizer {tokenizer.vocab_size}. Give the model's "
            "tokenizer, or a configuration with a larger vocab_size."
        )
    longest = blueprint.num_positions
    if longest is not None and config.seq > longest:
        raise OptionError(
            f"--seq {config.seq}: {where} is for {longest} tokens (max_position_embeddings). Give no more."
        )
    return has


def _how_to_give_its_tokenizer(config: TrainConfig) -> str:
    """Say which option gives a model of Transformers the tokenizer that lies in its folder, if one does."""
    folder, name = Path(config.model), config.model_name
    if not (folder / TOKENIZER).is_file():
        return "Give its --tokenizer."
    begins = f", or, to begin with its weights, --finetune {name}"
    return f"Give its own: --tokenizer {name}{begins if weights.has_weights(folder) else ''}."


class NothingLeftError(OptionError):
    """A run that is to go on has all its steps behind it."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked run: what to compute, where to put it, on which text, and from which step.

    epochs: how often to go through the text, where the steps were given by that.
    """

    config: TrainConfig
    folder: RunFolder
    text: Text
    model: blueprints.Blueprint
    tokenizer: Tokenizer | None = None
    checkpoint: "fullshard.Checkpoint | None" = None
    epochs: float | None = None

    @property
    def done(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


def new_job(
    options: dict[str, Any],
    out: Path,
    *,
    may_have_begun: bool = False,
    cache: Path = DEFAULT_CACHE,
) -> Job:
    """Prepare a fresh run from options that were given; `auto`, None and none become what this machine has.

    may_have_begun: `out` may hold what an attempt without a checkpoint has left, which is written over.
    cache: the folder where tokens are kept. Raises OptionError for options that cannot work and for a folder
    that is taken.
    """
    typed = weights.fine_tuning(options)
    epochs = _epochs_of(typed)
    if epochs is None and "finetune" in options and typed.get("tokenizer") and typed.get("data"):
        epochs = FINETUNE_EPOCHS if typed.get("steps") is None else None
    options = with_defaults(typed)
    gpus = num_gpus()
    device = options.get("device", "auto")
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    dtype = options.get("dtype", "auto")
    if dtype == "auto":
        dtype = "fp32" if device == "cpu" else "bf16"
    ranks = options.get("ranks")
    if ranks is None:
        # Without a GPU, one: `check_local_ranks` then says what is wrong, and not of `--ranks`.
        ranks = max(1, gpus) if device != "cpu" else _DEFAULT_CPU_RANKS
    vocab_size = options.pop("vocab_size", None)
    config = TrainConfig(**{**options, "device": device, "dtype": dtype, "ranks": ranks})
    folder = RunFolder(out)
    folder.check_new(may_have_begun=may_have_begun)
    tokenizer = None
    if config.tokenizer:
        tokenizer = open_tokenizer(Path(config.tokenizer), config.end_token)
    config, model = choose_model(config, tokenizer, vocab_size=vocab_size)
    check_loggers(config.log)
    text = open_text(config, tokenizer, cache=cache.expanduser())
    if epochs is not None:
        steps = text.num_steps(epochs)
        warmup = with_defaults({**typed, "steps": steps})["warmup"]
        config = dataclasses.replace(config, steps=steps, warmup=warmup)
        text = dataclasses.replace(text, config=config)
    return Job(config, folder, text, model, tokenizer, epochs=epochs)


def _epochs_of(options: dict[str, Any]) -> float | None:
    """Take --epochs out of options; raises OptionError for a number that cannot be, or beside --steps."""
    epochs: float | None = options.pop("epochs", None)
    if epochs is not None and options.get("steps") is not None:
        raise OptionError(
            f"--epochs {epochs:g} and --steps {options['steps']}: both say how long; leave one away."
        )
    if epochs is not None and not 0 < epochs < math.inf:
        raise OptionError(f"--epochs {epochs:g}: must be more than 0.")
    return epochs


def resumed_job(path: Path, changes: dict[str, Any], *, cache: Path = DEFAULT_CACHE) -> Job:
    """Prepare to continue the run in `path`, with the options that were typed as changes.

    Raises OptionError for a folder without a complete checkpoint, for changes that make it
    another run, for other text and for a run that has nothing left to do.
    """
    folder = RunFolder(path)
    folder.check_there("--resume ")
    if not weights.is_run(path):
        if folder.config_file.is_file() and folder.checkpoints.is_dir():
            folder.read_config()  # says what is wrong with it
        if folder.is_before_first_step:
            raise OptionError(
                f"--resume {path}: holds nothing yet; a run that was to be here ended before its first step. Type the "
                f"command that began it again, with --out {path}."
            )
        raise OptionError(
            f"--resume {path}: holds no run of `fullshard train`. Name the folder that it printed as its output."
            f"{weights.what_it_is(path)}"
        )
    checkpoint = fullshard.latest_checkpoint(folder.checkpoints)
    if checkpoint is None:
        marks = not_finite(folder.metrics())
        why = f", as step {marks[0][0]} was not finite ({marks[0][1]})" if marks else ""
        lower = f" --lr {lower_lr(folder.read_config()):.1g}" if marks else ""
        raise OptionError(
            f"--resume {path}: holds no complete checkpoint; the run ended before its first one{why}. "
            f"Begin it again with: {folder.to_begin_again}{lower}"
        )
    changes = {key: value for key, value in changes.items() if value not in ("auto", None)}
    if "finetune" in changes:  # of which the run has its own copies
        changes["init_from"] = changes["model"] = changes.pop("finetune")
    config, epochs = folder.read_config(), _epochs_of(changes)
    if "model" in changes:
        is_named = changes["model"] == config.model_name  # of a folder that may be gone by now
        changes["model"] = config.model if is_named else as_size_or_path(changes["model"])
    if epochs is not None:
        changes["steps"] = _opened(config, folder, cache)[1].num_steps(epochs)
    config = config.resumed_with(changes)
    check_loggers(config.log)
    if config.steps <= checkpoint.step:
        raise NothingLeftError(
            f"--resume {path}: has {checkpoint.step} steps behind it, and was asked for {config.steps}, so nothing is left to do. "
            f"Ask for more than {checkpoint.step}, for example --steps {2 * checkpoint.step}."
        )
    tokenizer, text = _opened(config, folder, cache)
    if text.survey.fingerprint != folder.read_fingerprint():
        raise OptionError(
            f"--resume {path}: the text has changed since the run was started "
            f"(now {text.size} in {len(text.paths)} files). Restore it; without "
            "--data, resume with the Python that started the run."
        )
    try:
        model = weights.blueprint_of(config, folder)
    except blueprints.ModelConfigError as error:
        raise OptionError(f"--resume {path}: {error}") from error
    return Job(config, folder, text, model, tokenizer, checkpoint, epochs)


def _opened(config: TrainConfig, folder: RunFolder, cache: Path) -> tuple[Tokenizer | None, Text]:
    """Return a run's own copy of its tokenizer, and its text."""
    tokenizer = None
    if config.tokenizer:
        tokenizer = open_tokenizer(folder.tokenizer_folder, config.end_token)
    return tokenizer, open_text(config, tokenizer, cache=cache.expanduser())


def restarted_job(
    options: dict[str, Any], out: Path, changes: dict[str, Any], *, cache: Path = DEFAULT_CACHE
) -> Job:
    """Prepare to continue the run in `out` if it has a complete checkpoint, and else to begin it.

    Raises OptionError as `new_job` and `resumed_job` do.
    """
    folder = RunFolder(out)
    if folder.config_file.is_file() and fullshard.latest_checkpoint(folder.checkpoints):
        return resumed_job(out, changes, cache=cache)
    return new_job(options, out, may_have_begun=True, cache=cache)


def what_begins(job: Job) -> str:
    """Say what may surprise of how a run begins or goes on, in a line or two; else ""."""
    if job.checkpoint is None:
        return weights.what_it_begins_with(job.config, job.tokenizer)
    new, old = job.config, job.folder.read_config()
    if (new.ranks, new.batch, new.grad_accum) == (old.ranks, old.batch, old.grad_accum):
        return ""
    return (
        f"a step takes {new.global_batch} sequences as before: {new.ranks} rank{'s' if new.ranks > 1 else ''} x --batch "
        f"{new.batch} x --grad-accum {new.grad_accum} (was {old.ranks} x {old.batch} x {old.grad_accum})"
    )


def default_local_ranks() -> int:
    """Return how many ranks this machine is given by itself: one per GPU, or two on the CPU."""
    return num_gpus() or _DEFAULT_CPU_RANKS


def crowding(config: TrainConfig, local_ranks: int | None) -> str:
    """Say what more ranks on this host than cores cost, in a line; else "". local_ranks: None for all of them."""
    ranks, cores = local_ranks or config.ranks, num_cores()
    if config.device != "cpu" or ranks <= cores:
        return ""
    return (
        f"warning: {ranks} ranks share {cores} core{'s' if cores > 1 else ''}: they take turns, so a sequence takes longer than on "
        f"{cores}, and each rank has memory of its own"
    )


def check_local_ranks(device: str, ranks: int) -> None:
    """Raise OptionError if this machine cannot give each of its ranks a device of a kind."""
    if device == "cpu":
        return
    gpus = num_gpus()
    if not gpus:
        raise OptionError(f"--device {device}: {_why_no_gpu()} Or use --device cpu.")
    if ranks > gpus:
        raise OptionError(
            f"--ranks {ranks}: this machine has {gpus} GPU{'' if gpus == 1 else 's'}, and "
            f"each rank needs its own. Use --ranks {gpus} or --device cpu."
        )


def _why_no_gpu() -> str:
    if not (torch.version.cuda or torch.version.hip):
        return (
            f"there is no CUDA device, because this torch ({torch.__version__}) is built without "
            "CUDA. Install one that is built with it (https://pytorch.org/get-started)."
        )
    return (
        f"torch {torch.__version__} finds no CUDA device. See what `nvidia-smi` says, and whether "
        "CUDA_VISIBLE_DEVICES hides it."
    )
