"""Where the numbers of `fullshard train` go while it runs: `--log tensorboard`, or a class of one's own.

Subclass `RunLogger`, and name it: `--log my_package.logs:MyLogger`. The packages of those that are here are imported
when a run starts. All go on with the same run of theirs when a run is resumed: what they need for it is in the run's
folder. Where they send things, and as whom, is their own environment's matter (WANDB_MODE, MLFLOW_TRACKING_URI, ...).
"""

import dataclasses
import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.tools.config import OptionError
from fullshard.tools.import_path import check_import_path, function_at

__all__ = ["RunInfo", "RunLogger"]

_PROJECT = "fullshard"  # unless their own environment names another


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """A run that begins or goes on.

    folder: where everything of it is; a logger may keep files there. config: every option, by name, as in
    config.json. done: steps that are behind it: what was logged of later ones is of an attempt that was
    given up.
    """

    folder: Path
    config: Mapping[str, Any]
    done: int

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class RunLogger:
    """Is told of a run, on rank 0; a subclass overrides what it wants to know.

    What a method raises is reported once, and the logger is left out from then on: training goes on.
    """

    def start(self, run: RunInfo) -> None:
        """Begin, before the first step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take a step's numbers; steps count from 1.

        loss, lr, grad_norm, seconds, tokens_per_second, peak_memory (bytes), and where it was measured
        val_loss. Losses are in nats per token.
        """

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End. summary: what summary.json holds; its ``status`` is "finished", "stopped" or "failed"."""


class TensorBoard(RunLogger):
    """Event files in the run's folder: ``tensorboard --logdir runs``."""

    def start(self, run: RunInfo) -> None:
        """Write to ``tensorboard/``; events after ``done`` are hidden by those that follow."""
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter
        self._writer = make(str(run.folder / "tensorboard"), purge_step=run.done + 1)
        rows = [("option", "value"), ("---", "---"), *run.config.items()]
        table = "\n".join(f"| {name} | {value} |" for name, value in rows)
        self._writer.add_text("config", table, run.done)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        if summary.get("sample"):
            self._writer.add_text("sample", f"```\n{summary['sample']}\n```", summary["step"])
        self._writer.close()


class WeightsAndBiases(RunLogger):
    """A run of wandb's, in the project ``fullshard`` unless WANDB_PROJECT says otherwise."""

    def start(self, run: RunInfo) -> None:
        import wandb

        settings = wandb.setup().settings
        file = run.folder / "wandb_run_id"
        identity = _text_of(file) or secrets.token_hex(4)
        self._run = wandb.init(
            project=settings.project or _PROJECT,
            name=run.name,
            id=identity,
            resume="allow",
            config=dict(run.config),
            dir=str(run.folder),
        )
        file.write_text(f"{identity}\n", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, str | float)})
        self._run.finish(exit_code=summary["status"] == "failed")


class MLflow(RunLogger):
    """A run of MLflow's, in the experiment ``fullshard`` unless MLFLOW_EXPERIMENT_NAME says otherwise."""

    def start(self, run: RunInfo) -> None:
        import mlflow

        self._mlflow = mlflow
        file = run.folder / "mlflow_run_id"
        if not mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get():
            mlflow.set_experiment(_PROJECT)
        identity = _text_of(file) or None
        begun = mlflow.start_run(run_id=identity, run_name=run.name)
        file.write_text(f"{begun.info.run_id}\n", encoding="utf-8")
        if identity is None:  # parameters may be set once
            mlflow.log_params(dict(run.config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        ends = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._mlflow.end_run(ends[summary["status"]])


class Trackio(RunLogger):
    """A run of Trackio's, in the project ``fullshard``: ``trackio show``."""

    def start(self, run: RunInfo) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=_PROJECT, name=run.name, config=dict(run.config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._trackio.finish()


KNOWN: dict[str, type[RunLogger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def check_loggers(names: Sequence[str]) -> None:
    """Raise OptionError for a name that means nothing, or whose package is not installed."""
    for name in names:
        if name in KNOWN:
            if importlib.util.find_spec(name) is None:
                raise OptionError(f"--log {name}: is not installed: pip install {name}.")
            continue
        if ":" not in name:
            raise OptionError(
                f"--log {name}: choose from {', '.join(KNOWN)}, or name a class as MODULE:CLASS."
            )
        check_import_path(name)


def make_loggers(names: Sequence[str], note: Callable[[str], None]) -> "Loggers":
    """Make the loggers of these names. note: takes a line for the user.

    Raises OptionError for a class that is not there or is no RunLogger; what its module raises passes.
    """
    return Loggers([(name, _make(name)) for name in names], note)


def _make(name: str) -> RunLogger:
    if name in KNOWN:
        return KNOWN[name]()
    made = function_at(name)()
    if not isinstance(made, RunLogger):
        raise OptionError(
            f"--log {name}: made a {type(made).__name__}, which is no fullshard.tools.loggers.RunLogger."
        )
    return made


class Loggers:
    """Several loggers as one. One that raises is reported and left out."""

    def __init__(
        self, loggers: Sequence[tuple[str, RunLogger]], note: Callable[[str], None]
    ) -> None:
        self._loggers = list(loggers)
        self._note = note

    def start(self, run: RunInfo) -> None:
        self._each(lambda logger: logger.start(run))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda logger: logger.log(step, values))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda logger: logger.finish(summary))
        self._loggers = []

    def _each(self, call: Callable[[RunLogger], None]) -> None:
        for name, logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:  # of a network, a disk, a program: training goes on
                self._loggers.remove((name, logger))
                self._note(
                    f"--log {name}: failed, and is left out from here: {type(error).__name__}: {error}"
                )
