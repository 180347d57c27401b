"""The folder of one run, and what is in it.

    config.json      the options (tools/config.py), those of steps before a resume, the fingerprint of the
                     text, and what the numbers depend on beside them (tools/run_facts.py)
    tokenizer/       a copy of the tokenizer, if there is one
    model.json       a copy of the configuration that --model names, if it does
    generation_config.json    a copy of how text is generated from the model of --finetune, for its export
    metrics.jsonl    one line a step; a number that is not finite is text, "nan"
    checkpoints/     step-00000350/ and the like, the newest ones (docs/checkpoints.md)
    trace/           what each rank recorded of a few steps (fullshard.trace)
    report.html      the trace report (tools/report.py), and trace.json for trace viewers
    summary.json     how the run ended; absent while it runs

Only rank 0 writes, except that every rank writes its part of a checkpoint.
"""

import dataclasses
import errno
import functools
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import fullshard
from fullshard.json_files import Refuse, as_typed, json_text, parse_json, read_json, read_text
from fullshard.tools.config import OptionError, TrainConfig


class _Hardware(TypedDict):
    device: str
    processor: str
    processors: int | None
    memory_nbytes: int
    system: str


class _Facts(TypedDict):
    hardware: _Hardware
    versions: dict[str, str]
    num_parameters: int
    flops_per_token: int | None


class Earlier(TypedDict):
    """Options of the steps up to one, after which the run was resumed, perhaps with others."""

    until: int
    options: TrainConfig


class _MaybeKept(TypedDict, total=False):
    earlier: list[Earlier]


class _Kept(_MaybeKept):
    options: TrainConfig
    corpus: str


class _MaybeMetrics(TypedDict, total=False):
    lr: float
    grad_norm: float
    val_loss: float


class _Metrics(_MaybeMetrics):
    step: int
    loss: float
    seconds: float
    tokens_per_second: float
    peak_memory: int


class _MaybeSummary(TypedDict, total=False):
    unigram_entropy: float | None
    peak_memory_per_rank: int | None


class _Summary(_MaybeSummary):
    status: str


_NOT_FINITE = ("nan", "inf", "-inf")  # as `json_text` writes such numbers


def _below(name: str) -> "functools.cached_property[Path]":
    return functools.cached_property(lambda run: run.path / name)


@functools.cache
def program() -> str:
    """What to type for `fullshard` where this runs: in an environment that is not active, where its file is."""
    there = Path(sys.executable).with_name("fullshard")
    if shutil.which("fullshard") or not there.is_file():
        return "fullshard"
    return shlex.quote(
        str(there.relative_to(Path.cwd()) if there.is_relative_to(Path.cwd()) else there)
    )


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths and files of one run."""

    path: Path

    config_file = _below("config.json")
    tokenizer_folder = _below("tokenizer")
    model_file = _below("model.json")
    generation_file = _below("generation_config.json")  # as Transformers calls it
    metrics_file = _below("metrics.jsonl")
    summary_file = _below("summary.json")
    trace_folder = _below("trace")
    report_file = _below("report.html")
    checkpoints = _below("checkpoints")

    @property
    def to_resume(self) -> str:
        """What to type to continue the run."""
        return f"{program()} train --resume {shlex.quote(str(self.path))}"

    @property
    def to_begin_again(self) -> str:
        """What to type to begin the run again in this folder, where it has no checkpoint; it continues one that it has."""
        folder = shlex.quote(str(self.path))
        return f"{program()} train --config {folder} --out {folder} --auto-resume"

    def what_is_saved(self) -> str:
        """Say which checkpoint there is, and what to type to go on from it, or to begin again."""
        if not self.config_file.exists():
            return "The run ended before its first step: type the same command again."
        checkpoint = fullshard.latest_checkpoint(self.checkpoints)
        if checkpoint is None:
            return f"There was no complete checkpoint yet; begin again with: {self.to_begin_again}"
        return (
            f"The last complete checkpoint is of step {checkpoint.step} ({checkpoint.path}); continue "
            f"with: {self.to_resume}"
        )

    @property
    def is_before_first_step(self) -> bool:
        """Whether a run may have ended here before it wrote its options: there is nothing, or there are copies alone."""
        copies = {self.tokenizer_folder, self.model_file, self.generation_file}
        return self.path.is_dir() and {*self.path.iterdir()} <= copies

    def make(self) -> None:
        """Make the folder if it is not there; raises OptionError where nothing can be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise OptionError(
                f"--out {self.path}: cannot be written: {error.strerror}. Name another folder."
            ) from error

    def check_there(self, option: str = "") -> None:
        """Raise OptionError if there is no such folder. option: what names it, such as "--resume "."""
        if not self.path.is_dir():
            why = "is a file; name a folder" if self.path.exists() else "there is no such folder"
            raise OptionError(f"{option}{self.path}: {why}.")

    def check_new(self, *, may_have_begun: bool = False) -> None:
        """Raise OptionError if a run is already here (unless it may) or the folder cannot be."""
        if not may_have_begun and (self.config_file.exists() or self.checkpoints.exists()):
            raise OptionError(
                f"--out {self.path}: already holds a run. Continue it with {self.to_resume} "
                "(or --auto-resume, which begins it where there is none), or name another folder."
            )
        if self.path.exists() and not self.path.is_dir():
            raise OptionError(f"--out {self.path}: is a file; name a folder.")

    def read_config(self) -> TrainConfig:
        """Return the options of the run; raises OptionError for a file that does not hold them."""
        config: TrainConfig = self._config_fields()["options"]
        return config

    def read_fingerprint(self) -> str:
        return str(self._config_fields()["corpus"])

    def read_facts(self) -> dict[str, Any]:
        """Return what `run_facts.gather_facts` found; empty for runs of before it did."""
        facts = self._config_fields().get("facts")
        return dict(facts) if facts else {}

    def read_earlier(self) -> list[Earlier]:
        """Return the options of before each resume, in the order of steps."""
        return list(self._config_fields().get("earlier", ()))

    def _earlier_than(self, done: int) -> list[dict[str, Any]]:
        """Return what `read_earlier` is to give once the run goes on after step `done`."""
        if not (done and self.config_file.exists()):
            return []
        parts = [*self.read_earlier(), Earlier(until=done, options=self.read_config())]
        # An attempt may have gone back to before another one began, whose options then count no longer.
        last = next(part for part in parts if part["until"] >= done)
        kept = [part for part in parts if part["until"] < done] + [{**last, "until": done}]
        return [{**part, "options": dataclasses.asdict(part["options"])} for part in kept]

    def _config_fields(self) -> dict[str, Any]:
        refuse = self._refused(self.config_file)
        fields: dict[str, Any] = read_json(self.config_file, _Kept, refuse)
        if fields.get("facts"):
            as_typed(fields["facts"], _Facts, refuse)
        return fields

    def _refused(self, file: Path) -> Refuse:
        def refuse(why: str) -> OptionError:
            return OptionError(f"{file}: {why}. Name a folder that `fullshard train` wrote.")

        return refuse

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
        self.make()
        for name, content in (tokenizer or {}).items():
            self.tokenizer_folder.mkdir(exist_ok=True)
            (self.tokenizer_folder / name).write_bytes(content)
        if model is not None:
            self.model_file.write_text(json.dumps(model, indent=2) + "\n", encoding="utf-8")
        generation = Path(config.init_from, self.generation_file.name)
        if config.init_from and not done and generation.is_file():
            shutil.copyfile(generation, self.generation_file)
        fields = {
            "options": dataclasses.asdict(config),
            "earlier": self._earlier_than(done),
            "corpus": fingerprint,
            "facts": dict(facts or {}),
        }
        self.config_file.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        self.summary_file.unlink(missing_ok=True)
        lines = [json_text(entry) + "\n" for entry in self.metrics() if entry["step"] <= done]
        self.metrics_file.write_text("".join(lines), encoding="utf-8")

    def add_metrics(self, entry: dict[str, Any]) -> None:
        # Opened for each line, so that the line is on its way to the disk when the step is over.
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json_text(entry) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Return every complete line; a line cut short by a crash is left out."""
        if not self.metrics_file.exists():
            return []
        lines = read_text(self.metrics_file, self._refused(self.metrics_file)).splitlines()
        entries: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            refuse = self._refused(Path(f"{self.metrics_file}, line {number}"))
            try:
                json.loads(line)
            except ValueError:
                break
            except RecursionError:
                pass
            fields = parse_json(line, dict[str, Any], refuse)
            numbers = {
                name: float(value) if value in _NOT_FINITE else value
                for name, value in fields.items()
            }
            entries.append(entry := as_typed(numbers, _Metrics, refuse))
            if not entry["seconds"] > 0:
                raise refuse(f"a step took {entry['seconds']} seconds")
        return entries

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.summary_file.write_text(json_text(summary, indent=2) + "\n", encoding="utf-8")

    def read_summary(self) -> dict[str, Any] | None:
        """Return how the run ended, or None for one that did not end by itself."""
        if not self.summary_file.exists():
            return None
        summary: dict[str, Any] = read_json(
            self.summary_file, _Summary, self._refused(self.summary_file)
        )
        return summary
