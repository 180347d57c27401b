"""What is to be started, and on how much, as one checked `Request`; and the text that starts it, by a template.

Kubeflow's runtime torch-distributed (Trainer v1alpha1, as of its release 2.3) gives every pod torchrun's options as
variables, so that the command is torchrun alone. SkyPilot's variables name the hosts and this host's place among them.
A worker of Ray Train starts its rank in a process of its own, since Ray calls functions in a thread, where Python takes
no signals, and has a process group in the worker already; that one only tells the ranks at which port to meet. A task of
Slurm's is all of a host's ranks here, and must not be bound to a single processor. Ranks that are started again have a
store of their own: they may read the addresses of those before them otherwise, and fail
(https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.13 and Gloo).
"""

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from fullshard.tools.cli_options import panel
from fullshard.tools.config import OptionError

TEMPLATES = {
    "torchrun": "torchrun.sh.tmpl",
    "slurm": "slurm.sbatch.tmpl",
    "k8s": "k8s.yaml.tmpl",
    "ray": "ray.py.tmpl",
    "sky": "sky.yaml.tmpl",
}
"""Template by kind of launcher."""

_FOLDER = Path(__file__).parent / "templates"

_PORT = 29500
"""Where ranks meet on the first host, on hosts that one job has to itself; torchrun's own default."""

_TO_SAVE_S = 120
"""How long ranks have to save, from the signal to the end. torchrun waits a little less, from torch 2.13 on; an older one
kills ranks 30 s after the signal."""

COMMANDS = ("train", "doctor", "replay")
"""Commands of `fullshard` that run as ranks which others start."""

_ranks, _job = panel("Ranks"), panel("Job")
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
    nodes: int = _ranks(1, "Hosts.")
    ranks_per_node: int = _ranks(8, "Ranks of a host: one per GPU.")
    on_cpu: bool = _ranks(False, "Ask for no GPUs.", "--cpu")
    name: str = _job("fullshard", "The job's name.")
    setup: str = _job("", "Shell that comes first (slurm, sky, torchrun).")
    gpu: str = _job("", "Kind of GPU, such as H100 (sky).")
    image: str = _job("", "Container image (k8s).")
    volume: str = _job(
        "", "Persistent volume claim that all pods mount, and where (k8s).", metavar="CLAIM:/PATH"
    )
    time_limit: str = _job("", "Time limit (slurm).", "--time")
    partition: str = _job("", "Partition (slurm).")
    cpus_per_rank: int | None = _job(None, "Processors (slurm). Default: the site's, with --cpu 1.")
    restarts: int | None = _job(
        None, "How often all ranks start again after a failure (ray: 3; slurm, torchrun: 0)."
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


def text_for(request: Request) -> str:
    """Return the script, manifest or program that starts a run."""
    import jinja2  # of which `--help` has no use

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # JSON is YAML, and of words Python as well.
    environment.filters["json"] = functools.partial(json.dumps, ensure_ascii=False)
    ranks, (claim, _, path) = request.ranks_per_node, request.volume.partition(":")
    return environment.get_template(TEMPLATES[request.kind]).render(
        **{**vars(request), "program": shlex.join(request.program)},
        origin=request.origin,
        ranks=ranks,
        words=request.program,
        # Kubernetes puts values for $(NAME) in a command, and one $ for two.
        command=["torchrun", *(word.replace("$", "$$") for word in request.program)],
        cpus=ranks * (request.cpus_per_rank or (1 if request.on_cpu else 0)),
        claim=claim,
        path=path,
        port=_PORT,
        to_save=_TO_SAVE_S,
        torchrun_waits=_TO_SAVE_S - 10,
    )
