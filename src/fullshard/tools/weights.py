"""Weights that leave a run, and those that one begins with: which folder, and whether it fits."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fullshard
from fullshard.errors import CheckpointError, FullshardError
from fullshard.json_files import read_json
from fullshard.models import blueprints
from fullshard.models.sizes import SIZES, LlamaConfig
from fullshard.tools.config import OptionError, TrainConfig, as_size_or_path, how_to_get
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text.corpus import NUM_BYTES
from fullshard.tools.text.tokenizer import FILE as TOKENIZER
from fullshard.tools.text.tokenizer import Tokenizer, files_for_export, open_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_config(config: TrainConfig) -> LlamaConfig:
    """Return the sizes of a run's model, which is one of ours."""
    return dataclasses.replace(
        SIZES[config.model],
        vocab_size=config.vocab_size,
        tie_embeddings=config.tie_embeddings,
    )


def blueprint_of(config: TrainConfig, folder: RunFolder) -> blueprints.Blueprint:
    """Return what a run's model is built from; raises ModelConfigError if what it has kept cannot be read."""
    if folder.model_file.is_file():  # one of Transformers
        return blueprints.ConfiguredBlueprint(blueprints.read_model_config(folder.model_file))
    return model_config(config)


# Out


def export_run(
    run: Path,
    out: Path,
    *,
    dtype: str | None,
    max_shard_size: str = "5GB",
    overwrite: bool,
    progress: Callable[[int, int], object],
) -> "tuple[Path, fullshard.ExportedWeights]":
    """Write the newest checkpoint of a run, or the one that is named, as a folder for Transformers.

    Returns the checkpoint as well. Raises OptionError if there is none, or it belongs to no run.
    """
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"--dtype {dtype}: choose from {', '.join(DTYPES)}.")
    if not overwrite and out.is_dir() and any(out.iterdir()):
        raise OptionError(f"--hf {out}: is there already. Name another folder, or add --overwrite.")
    found = run_of(run)
    if found is None:
        RunFolder(run).check_there()
        raise OptionError(
            f"{run}: is no run of `fullshard train`, nor a checkpoint in one. For another model's "
            "checkpoint, call fullshard.export_hf(checkpoint, folder, config=...): "
            f"only you know its configuration.{what_it_is(run)}"
        )
    folder = RunFolder(found)
    checkpoint = _newest(folder.checkpoints) if found == run else run
    if checkpoint is None:
        raise OptionError(f"{run}: holds no complete checkpoint; its run ended before the first.")
    with tempfile.TemporaryDirectory() as beside:
        _write_beside(folder, Path(beside))
        exported = fullshard.export_hf(
            checkpoint,
            out,
            config=beside,
            dtype=DTYPES[dtype] if dtype else None,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
    return checkpoint, exported


def _write_beside(folder: RunFolder, target: Path) -> None:
    """Write what belongs beside the weights of a run: the model's configuration, and the tokenizer."""
    config = folder.read_config()
    files: dict[str, bytes] = {}
    marks: dict[str, int] = {}
    if config.tokenizer:
        tokenizer = open_tokenizer(folder.tokenizer_folder, config.end_token)
        files = files_for_export(tokenizer)
        marks = {"eos_token_id": tokenizer.end_token}
        if tokenizer.before:
            marks["bos_token_id"] = tokenizer.before[0]
    blueprint = blueprint_of(config, folder)
    if folder.generation_file.is_file():
        where = folder.generation_file
        generation = read_json(where, dict[str, Any], lambda why: OptionError(f"{where}: {why}."))
        ends = generation.get("eos_token_id")
        if marks.get("eos_token_id") not in (ends if isinstance(ends, list) else [ends]):
            generation |= marks  # of another tokenizer, which the run has been given
        files[folder.generation_file.name] = json.dumps(generation, indent=2).encode() + b"\n"
    fields = blueprint.config_fields(seq=config.seq, marks=marks)
    files["config.json"] = json.dumps(fields, indent=2).encode() + b"\n"
    for name, content in files.items():
        (target / name).write_bytes(content)


# In


def fine_tuning(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with what --finetune stands for: --model, --init-from and --tokenizer of its folder.

    Raises OptionError for a folder that is not one of Hugging Face with weights and a tokenizer, and for options
    that contradict it.
    """
    given = dict(options)
    folder = given.pop("finetune", None)
    if folder is None:
        return given
    path, where = Path(folder), f"--finetune {folder}"
    _check_folder(path, folder, "--finetune")
    if is_run(path):
        raise OptionError(
            f"{where}: is a run of fullshard train. To begin with its weights, with its options: --config {folder} "
            f"--init-from {folder}"
        )
    has_tokenizer = (path / TOKENIZER).is_file()
    for name in ("model", "init_from", *(["tokenizer"] if has_tokenizer else [])):
        if Path(given.get(name) or path) != path:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{where} and {option} {given[name]}: --finetune takes configuration, weights and tokenizer from its "
                f"folder. Leave out {option}, or name all three: --model, --init-from, --tokenizer."
            )
    try:
        vocab_size = blueprints.read_model_config(path).get("vocab_size")
    except blueprints.ModelConfigError as error:
        raise OptionError(f"{where}: {error}") from error
    if has_tokenizer:
        given["tokenizer"] = folder
    elif not given.get("tokenizer") and vocab_size != NUM_BYTES:  # some exports are of bytes
        raise OptionError(
            f"{where}: holds no {TOKENIZER}. Give one with --tokenizer; or write the one that Transformers makes of "
            f"the folder's other files: AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r})"
        )
    _check_safetensors(path, where)
    return given | {"model": as_size_or_path(folder), "init_from": folder}


def _check_folder(path: Path, given: str, option: str) -> None:
    """Raise OptionError for what is no folder. given: the path, as it was typed."""
    if path.is_file():
        raise OptionError(f"{option} {given}: is a file. Name its folder: {option} {path.parent}")
    if not path.is_dir():
        raise OptionError(f"{option} {given}: is no folder.{how_to_get(given)}")


def _check_safetensors(path: Path, where: str) -> None:
    """Raise OptionError for a folder of Hugging Face without weights that are read here."""
    if [*path.glob("*.safetensors")]:
        return
    if not has_weights(path):
        raise OptionError(
            f"{where}: holds no weights, neither *.safetensors nor pytorch_model.bin. Was its download cut short?"
        )
    raise OptionError(
        f"{where}: holds no weights in safetensors. To write them: "
        f"AutoModelForCausalLM.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
    )


def what_it_begins_with(config: TrainConfig, tokenizer: Tokenizer | None = None) -> str:
    """Say what a model begins with where that may surprise, in a line or two; else ""."""
    path, source = Path(config.model), config.init_from
    if source:
        said = f"fine-tuning {source}: the highest learning rate is {config.lr:g} (--lr)"
        lines = ["" if config.model in SIZES else said, _other_tokenizer(config, tokenizer)]
        return "\n".join(filter(None, lines))
    if config.model not in SIZES and has_weights(path):
        name = config.model_name
        return (
            f"{name} has weights; they are not used: training begins with random values. To fine-tune them: "
            f"--finetune {name}"
        )
    return ""


def _other_tokenizer(config: TrainConfig, tokenizer: Tokenizer | None) -> str:
    """Warn of a tokenizer that is not the one which the weights of --init-from were trained with; else ""."""
    source = Path(config.init_from)
    run = run_of(source)
    own = (RunFolder(run).tokenizer_folder if run else source) / TOKENIZER
    if tokenizer is None:
        return ""
    if own.is_file():
        why = "" if tokenizer.has_vocab_of(own) else f"{own} has other tokens"
    else:
        sizes = (tokenizer.vocab_size, config.vocab_size)
        why = f"it has {sizes[0]} kinds of tokens, the model {sizes[1]}"
        why = why if sizes[0] != sizes[1] else ""
    if not why:
        return ""
    return f"warning: --tokenizer {config.tokenizer} may not be that of {source}, whose weights then mean other tokens: {why}"


def check_initial_weights(config: TrainConfig, blueprint: blueprints.Blueprint) -> None:
    """Raise OptionError if there is nothing in the folder of --init-from, or it is another model."""
    path = Path(config.init_from)
    where = f"--init-from {path}"
    _check_folder(path, config.init_from, "--init-from")
    if is_run(path):
        other = RunFolder(path).read_config()
        if not blueprint.is_same(blueprint_of(other, RunFolder(path))):
            tied = " --tie-embeddings" if other.tie_embeddings else ""
            words = f" --vocab-size {other.vocab_size}" if other.tokenizer else ""
            raise OptionError(
                f"{where}: is a run of --model {other.model}{tied}{words}. Give the same."
            )
        if _newest(RunFolder(path).checkpoints) is None:
            raise OptionError(f"{where}: holds no complete checkpoint.")
    elif (path / "config.json").is_file():
        fields = read_json(
            path / "config.json",
            dict[str, Any],
            lambda why: OptionError(f"{where}: config.json {why}."),
        )
        found = blueprint.differences(fields)
        if found:
            raise OptionError(
                f"{where}: is another model than --model {config.model_name}: {'; '.join(found)}. "
                f"For the model of that folder, with its tokenizer: --model {path} --tokenizer {path}"
            )
        _check_safetensors(path, where)
        _check_tensors(config, blueprint, path)


def _check_tensors(config: TrainConfig, blueprint: blueprints.Blueprint, path: Path) -> None:
    """Raise OptionError if headers of safetensors are damaged, or say that their tensors are not the model's."""
    # The engine, which only this needs before ranks start.
    from fullshard.models.built import misfits

    is_own = Path(config.model) == path
    where = f"{'--finetune' if is_own else '--init-from'} {path}"
    try:
        saved = fullshard.inspect_checkpoint(path).tensors
        shapes = {name.partition("/")[2]: tensor.shape for name, tensor in saved.items()}
        found = misfits(blueprint, shapes)
    except FullshardError as error:
        raise OptionError(f"{where}: {error}") from error
    if found:
        model = "its config.json" if is_own else f"--model {config.model_name}"
        raise OptionError(
            f"{where}: its weights are not of the model that {model} describes: {'; '.join(found)}. Download the folder "
            "again, or put the config.json there that was saved with these weights. Families whose weights Transformers "
            "renames or joins while it loads them, such as mixtures of experts, are not read here."
        )


def load_initial_weights(model: nn.Module, path: Path) -> None:
    """Load the weights of a run, a checkpoint or a Hugging Face folder into a sharded model. Collective.

    Raises CheckpointError, on all ranks, for what does not fit.
    """
    if is_run(path):
        newest = _newest(RunFolder(path).checkpoints)
        if newest is None:
            raise CheckpointError(f"{path}: holds no complete checkpoint.")
        fullshard.load_checkpoint(newest, model, rng=False)
    elif any((path / name).is_file() for name in ("config.json", "model.safetensors")):
        fullshard.load_hf(model, path)
    else:
        fullshard.load_checkpoint(_newest(path) or path, model, rng=False)


def what_it_is(path: Path) -> str:
    """Say what a folder is that is no run; "" if it is no folder. Begins with a space."""
    if not path.is_dir():
        return ""
    try:
        form = fullshard.inspect_checkpoint(path).form
    except CheckpointError as error:
        return f" {error}"
    return f" It holds weights ({form}), which --init-from takes."


def has_weights(path: Path) -> bool:
    """Whether a folder of Hugging Face holds weights, also those in a form that is not read here."""
    return any((*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")))


def is_run(path: Path) -> bool:
    """Whether a folder is of `fullshard train`; those of Transformers have a config.json as well."""
    try:
        fields = read_json(path / "config.json", dict[str, Any], OptionError)
    except OptionError:
        return False
    return {"options", "corpus"} <= fields.keys()


def run_of(path: Path) -> Path | None:
    """Return the run that a path is, or that it is a checkpoint of: RUN/checkpoints/step-00000350."""
    return next((each for each in (path, path.parent.parent) if is_run(each)), None)


def _newest(folder: Path) -> Path | None:
    found = fullshard.latest_checkpoint(folder) if folder.is_dir() else None
    return Path(found.path) if found else None
