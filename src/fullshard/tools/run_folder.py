"""The folder of one run, and what is in it.

    config.json      the options (tools/config.py), the fingerprint of the text, and what the numbers
                     depend on beside them (tools/run_facts.py)
    tokenizer/       a copy of the tokenizer, if there is one
    model.json       a copy of the configuration that --model names, if it does
    metrics.jsonl    one line a step
    checkpoints/     step-00000350/ and the like, the newest ones (docs/checkpoints.md)
    loss.png         the loss curve
    trace/           what each rank recorded of a few steps (fullshard.trace)
    report.html      the trace report (tools/report.py), and trace.json for trace viewers
    summary.json     how the run ended; absent while it runs

Only rank 0 writes, except that every rank writes its part of a checkpoint.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.models.model_config import read_model_config
from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.json_text import json_text


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths and files of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def tokenizer_folder(self) -> Path:
        return self.path / "tokenizer"

    @property
    def model_file(self) -> Path:
        return self.path / "model.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def plot_file(self) -> Path:
        return self.path / "loss.png"

    @property
    def trace_folder(self) -> Path:
        return self.path / "trace"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check_new(self, *, may_have_begun: bool = False) -> None:
        """Raise OptionError if a run is already here (unless it may) or the folder cannot be."""
        if not may_have_begun and (self.config_file.exists() or self.checkpoints.exists()):
            raise OptionError(
                f"--out {self.path}: already holds a run. Continue it with --resume {self.path} "
                "(or --auto-resume, which begins it where there is none), or name another folder."
            )
        if self.path.exists() and not self.path.is_dir():
            raise OptionError(f"--out {self.path}: is a file; name a folder.")

    def read_config(self) -> TrainConfig:
        """Return the options of the run; raises OptionError for a file that does not hold them."""
        return TrainConfig.from_fields(self._config_fields()["options"], source=self.config_file)

    def read_model_fields(self) -> dict[str, Any] | None:
        """Return the model's configuration, if it is one of Transformers."""
        return read_model_config(self.model_file) if self.model_file.is_file() else None

    def read_fingerprint(self) -> str:
        return str(self._config_fields()["corpus"])

    def read_facts(self) -> dict[str, Any]:
        """Return what `run_facts.gather_facts` found; empty for runs of before it did."""
        return dict(self._config_fields()["facts"])

    def _config_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.config_file.read_text(encoding="utf-8"))
            kept = {"options": dict(fields["options"]), "corpus": fields["corpus"]}
            return kept | {"facts": dict(fields.get("facts", {}))}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise OptionError(
                f"{self.config_file}: cannot be read ({error!r}). Name a folder that "
                "`fullshard train` wrote."
            ) from error

    def start(
        self,
        config: TrainConfig,
        *,
        fingerprint: str,
        done: int,
        facts: Mapping[str, Any] | None = None,
        tokenizer: Mapping[str, bytes] | None = None,
        model: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the configuration and drop what lies beyond step `done` of an earlier attempt.

        tokenizer: the content of its files, by name. model: the fields of its configuration.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for name, content in (tokenizer or {}).items():
            self.tokenizer_folder.mkdir(exist_ok=True)
            (self.tokenizer_folder / name).write_bytes(content)
        if model is not None:
            self.model_file.write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
        fields = {
            "options": dataclasses.asdict(config),
            "corpus": fingerprint,
            "facts": dict(facts or {}),
        }
        self.config_file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        self.summary_file.unlink(missing_ok=True)
        lines = [json.dumps(entry) + "\n" for entry in self.metrics() if entry["step"] <= done]
        self.metrics_file.write_text("".join(lines), encoding="utf-8")

    def add_metrics(self, entry: dict[str, Any]) -> None:
        # Opened for each line, so that the line is on its way to the disk when the step is over.
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return every complete line; a line cut short by a crash is left out."""
        if not self.metrics_file.exists():
            return []
        entries = []
        for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return entries

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.summary_file.write_text(json_text(summary, indent=2) + "\n", encoding="utf-8")

    def read_summary(self) -> dict[str, Any] | None:
        """Return how the run ended, or None for one that did not end by itself."""
        try:
            summary: dict[str, Any] = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return summary
