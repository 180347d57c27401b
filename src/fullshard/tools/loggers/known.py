"""Loggers for what people use. Each package is imported when its logger is made.

All go on with the same run of theirs when a run is resumed: what they need for it is in the run's folder.
Where they send things, and as whom, is their own environment's matter (WANDB_MODE, MLFLOW_TRACKING_URI, ...).
"""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.tools.loggers.interface import RunInfo, RunLogger

_PROJECT = "fullshard"  # unless their own environment names another


class TensorBoard(RunLogger):
    """Event files in the run's folder: ``tensorboard --logdir runs``."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        """Write to ``tensorboard/``; events after ``done`` are hidden by those that follow."""
        self._writer = self._make(str(run.folder / "tensorboard"), purge_step=run.done + 1)
        self._writer.add_text("config", _as_table(run.config), run.done)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write each number as a scalar."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        if summary.get("sample"):
            self._writer.add_text("sample", f"```\n{summary['sample']}\n```", summary["step"])
        self._writer.close()


class WeightsAndBiases(RunLogger):
    """A run of wandb's, in the project ``fullshard`` unless WANDB_PROJECT says otherwise."""

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Begin a run, or go on with it."""
        settings = self._wandb.setup().settings
        known = _Kept(run.folder / "wandb_run_id")
        identity = known.read() or secrets.token_hex(4)
        self._run = self._wandb.init(
            project=settings.project or _PROJECT,
            name=run.name,
            id=identity,
            resume="allow",
            config=dict(run.config),
            dir=str(run.folder),
        )
        known.write(identity)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all numbers of a step."""
        self._run.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the run; one that failed is marked so."""
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, str | float)})
        self._run.finish(exit_code=summary["status"] == "failed")


class MLflow(RunLogger):
    """A run of MLflow's, in the experiment ``fullshard`` unless MLFLOW_EXPERIMENT_NAME says otherwise."""

    def __init__(self) -> None:
        import mlflow

        self._mlflow = mlflow

    def start(self, run: RunInfo) -> None:
        """Begin a run, or go on with it."""
        known = _Kept(run.folder / "mlflow_run_id")
        if not self._mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get():
            self._mlflow.set_experiment(_PROJECT)
        identity = known.read() or None
        begun = self._mlflow.start_run(run_id=identity, run_name=run.name)
        known.write(begun.info.run_id)
        if identity is None:  # parameters may be set once
            self._mlflow.log_params(dict(run.config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all numbers of a step."""
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """End the run with the status that MLflow has for it."""
        ends = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._mlflow.end_run(ends[summary["status"]])


class Trackio(RunLogger):
    """A run of Trackio's, in the project ``fullshard``: ``trackio show``."""

    def __init__(self) -> None:
        import trackio

        self._trackio = trackio

    def start(self, run: RunInfo) -> None:
        """Begin a run, or go on with the one of this name."""
        self._trackio.init(project=_PROJECT, name=run.name, config=dict(run.config), resume="allow")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log all numbers of a step."""
        self._trackio.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Send what is left."""
        self._trackio.finish()


KNOWN: dict[str, type[RunLogger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


class _Kept:
    """A line of text in the run's folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str:
        return self._path.read_text(encoding="utf-8").strip() if self._path.is_file() else ""

    def write(self, text: str) -> None:
        self._path.write_text(text + "\n", encoding="utf-8")


def _as_table(config: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {value} |" for name, value in config.items()]
    return "\n".join(["| option | value |", "| --- | --- |", *rows])
