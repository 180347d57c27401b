"""What is to be started, and on how much, as one checked value."""

import dataclasses
import re
import shlex
from collections.abc import Sequence

from fullshard.tools.cli_options import option_field
from fullshard.tools.config import OptionError

COMMANDS = ("train", "doctor", "replay")
"""Commands of `fullshard` that run as ranks which others start."""

_USED_BY = {
    "gpu": ("sky",),
    "image": ("k8s",),
    "volume": ("k8s",),
    "time_limit": ("slurm",),
    "partition": ("slurm",),
    "cpus_per_rank": ("slurm",),
    "setup": ("slurm", "sky", "torchrun"),
    "restarts": ("ray", "slurm", "torchrun"),
}
_FLAGS = {"time_limit": "--time", "cpus_per_rank": "--cpus-per-rank"}


@dataclasses.dataclass(frozen=True)
class Request:
    """A run to be started, as it was typed.

    program: what torchrun is given, such as ("train.py", "--lr", "1e-3") or ("-m", "fullshard", "train").
    typed: the whole command line, which the text says it comes from.
    """

    kind: str
    program: tuple[str, ...]
    typed: tuple[str, ...] = ()
    nodes: int = option_field(1, "Hosts.", panel="Ranks")
    ranks_per_node: int = option_field(8, "Ranks of a host: one per GPU.", panel="Ranks")
    on_cpu: bool = option_field(False, "Ask for no GPUs.", "--cpu", panel="Ranks")
    name: str = option_field("fullshard", "The job's name.", panel="Job")
    setup: str = option_field("", "Shell that comes first (slurm, sky, torchrun).", panel="Job")
    gpu: str = option_field("", "Kind of GPU, such as H100 (sky).", panel="Job")
    image: str = option_field("", "Container image (k8s).", panel="Job")
    volume: str = option_field(
        "",
        "Persistent volume claim that all pods mount, and where (k8s).",
        panel="Job",
        metavar="CLAIM:/PATH",
    )
    time_limit: str = option_field("", "Time limit (slurm).", "--time", panel="Job")
    partition: str = option_field("", "Partition (slurm).", panel="Job")
    cpus_per_rank: int | None = option_field(
        None, "Processors (slurm). Default: the site's, with --cpu 1.", panel="Job"
    )
    restarts: int | None = option_field(
        None,
        "How often all ranks start again after a failure (ray: 3; slurm, torchrun: 0).",
        panel="Job",
    )

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise OptionError("\n".join(problems))

    def _problems(self) -> list[str]:
        found = []
        for name in ("nodes", "ranks_per_node", "cpus_per_rank"):
            number = getattr(self, name)
            if number is not None and number < 1:
                found.append(f"--{name.replace('_', '-')} {number}: must be at least 1.")
        if self.restarts is not None and self.restarts < 0:
            found.append(f"--restarts {self.restarts}: must not be negative.")
        # What Kubernetes takes as a name; the others take more.
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", self.name):
            found.append(
                f"--name {self.name}: give small letters, digits and hyphens, a letter first and no hyphen last."
            )
        for name, kinds in _USED_BY.items():
            value = getattr(self, name)
            if value not in ("", None) and self.kind not in kinds:
                flag = _FLAGS.get(name, f"--{name}")
                found.append(
                    f"{flag} {value}: says nothing to {self.kind}, only to {' and '.join(kinds)}."
                )
        if self.kind == "k8s" and not self.image:
            found.append(
                "--image: name the container image, which has torch, fullshard and your program."
            )
        if self.volume and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?:/.+", self.volume):
            found.append(f"--volume {self.volume}: give CLAIM:/PATH, such as data:/data.")
        if self.kind == "sky" and not (self.gpu or self.on_cpu):
            found.append(
                "--gpu: name the kind of GPU, such as H100 (`sky gpus list` shows them), or give --cpu."
            )
        if self.gpu and self.on_cpu:
            found.append(f"--gpu {self.gpu} and --cpu: leave one of them out.")
        for flag, text in (("--time", self.time_limit), ("--partition", self.partition)):
            if re.search(r"\s", text):
                found.append(f"{flag} {text!r}: must not hold spaces.")
        return found

    @property
    def origin(self) -> str:
        """The command that has this text printed."""
        return shlex.join(("fullshard", "launch", *self.typed)).replace("\n", " ")


def plain(words: Sequence[str]) -> list[str]:
    """Return a command without what may stand before it: "python -m fullshard train" is "train"."""
    words = list(words)
    for spelling in (["python"], ["-m", "fullshard"], ["fullshard"]):
        if words[: len(spelling)] == spelling:
            words = words[len(spelling) :]
    return words


def program_of(words: Sequence[str], *, goes_on: bool) -> tuple[str, ...]:
    """Return what torchrun is given for a command of `fullshard`, a script or a module, all of them `plain`.

    ["train", "--model", "1b"] is ("-m", "fullshard", "train", "--model", "1b", "--auto-resume").

    goes_on: whether --auto-resume is to be added. Raises OptionError for anything else.
    """
    if not words:
        raise OptionError(
            "say what to run, after `--`: -- train --model 1b --out runs/a, or -- train.py --lr 1e-3."
        )
    first, *rest = words
    if first in COMMANDS:
        # torchrun takes --log for an abbreviation of its own options, even behind its program.
        rest = [re.sub("^--log(?==|$)", "--logger", word) for word in rest]
        return ("-m", "fullshard", first, *rest, *(("--auto-resume",) if goes_on else ()))
    if first.endswith(".py") or (first == "-m" and rest):
        return tuple(words)
    raise OptionError(
        f"{first}: is none of fullshard's {', '.join(COMMANDS)}, no Python script, and not -m MODULE. Give "
        "what torchrun is given, without torchrun."
    )
