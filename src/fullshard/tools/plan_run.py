"""A run of `fullshard train` as what `fullshard plan` plans: its model and options, to lay the plan beside it."""

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from fullshard.models.blueprints import ConfiguredBlueprint
from fullshard.models.llama import Llama
from fullshard.planning.subject import Subject
from fullshard.tools.plan_options import PlanOptions
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.weights import blueprint_of


def is_run(model: str) -> bool:
    """Whether what was typed for a model is the folder of a run."""
    return RunFolder(Path(model)).metrics_file.is_file()


def run_to_plan(options: PlanOptions) -> tuple[Subject, PlanOptions]:
    """Return the model of a run, and its options; those that were typed besides change them.

    Raises OptionError for a folder whose options cannot be read.
    """
    folder = RunFolder(Path(options.model))
    config = folder.read_config()
    own: dict[str, Any] = {
        "ranks": config.ranks,
        "batch": config.batch,
        "seq": config.seq,
        "grad_accum": config.grad_accum,
        "dtype": config.dtype,
        "param_dtype": "fp32",
        "checkpointing": "full" if config.activation_checkpointing else "none",
        "fused": True,  # as `train.build_optimizer` makes it
    }
    default = {field.name: field.default for field in dataclasses.fields(options)}
    kept = {n: value for n, value in own.items() if getattr(options, n) == default[n]}
    if options.hosts is not None:
        kept.pop("ranks", None)
    blueprint = blueprint_of(config, folder)

    def model() -> nn.Module:
        assert not isinstance(blueprint, ConfiguredBlueprint)
        return Llama(blueprint)

    model.__name__ = folder.path.name
    subject = Subject(folder.model_file if isinstance(blueprint, ConfiguredBlueprint) else model)
    return subject, dataclasses.replace(options, **kept)
