"""What is to be started, and on how much, as one checked `Request`; and the text that starts it, by a template.

In a template `@name` is a value, and `@@` one @. A line that names a value which is None is left out, together with the
lines below it that are indented deeper.

Kubeflow's runtime torch-distributed (Trainer v1alpha1, as of its release 2.3) gives every pod torchrun's options as
variables, so that the command is torchrun alone. SkyPilot's variables name the hosts and this host's place among them.
A worker of Ray Train starts its rank in a process of its own, since Ray calls functions in a thread, where Python takes
no signals, and has a process group in the worker already; that one only tells the ranks at which port to meet. A task of
Slurm's is all of a host's ranks here, and must not be bound to a single processor.
"""

import dataclasses
import json
import re
import shlex
import string
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

_RAY_RESTARTS = 3
_NO_SETUP = (
    "# Here goes what installs torch, fullshard and your program, unless the image has them."
)

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


class _Template(string.Template):
    """A template in which $ is what it is in a shell."""

    delimiter = "@"


def text_for(request: Request) -> str:
    """Return the script, manifest or program that starts a run."""
    values = _values(request)
    lines: list[str] = []
    left_out: int | None = None  # the indentation of a line that is left out
    for line in (_FOLDER / TEMPLATES[request.kind]).read_text().splitlines():
        indent = len(line) - len(line.lstrip())
        if left_out is not None and indent > left_out:
            continue
        template = _Template(line)
        is_left_out = any(values[name] is None for name in _names(template))
        left_out = indent if is_left_out else None
        if not is_left_out:
            lines.append(template.substitute(values))
    return "".join(f"{line}\n" for line in lines)


def _names(template: string.Template) -> list[str]:
    found = template.pattern.finditer(template.template)
    names = [match["named"] or match["braced"] for match in found]
    return [name for name in names if name]


def _values(request: Request) -> dict[str, Any]:
    program, ranks = shlex.join(request.program), request.ranks_per_node
    cpus = request.cpus_per_rank or (1 if request.on_cpu else None)
    one_host = "Run it."
    hosts = (
        f"On each of {request.nodes} hosts, of which the first is called HOST: HEAD=HOST bash FILE"
    )
    claim, _, path = request.volume.partition(":")
    # Kubernetes puts values for $(NAME) in a command, and one $ for two.
    command = ["torchrun", *(word.replace("$", "$$") for word in request.program)]
    return {
        "origin": request.origin,
        "name": request.name,
        "nodes": request.nodes,
        "ranks": ranks,
        "gpus": None if request.on_cpu else ranks,
        "program": program,
        "setup": request.setup or None,
        "restarts": request.restarts or None,
        "port": _PORT,
        "to_save": _TO_SAVE_S,
        "torchrun_waits": _TO_SAVE_S - 10,
        "usage": one_host if request.nodes == 1 else hosts,
        "cpus": cpus * ranks if cpus else None,
        "partition": request.partition or None,
        "time_limit": request.time_limit or None,
        "image": _quoted(request.image),
        "command": _quoted(command),
        "claim": _quoted(claim),
        "path": _quoted(path),
        "accelerators": _quoted(f"{request.gpu}:{ranks}"),
        "sky_ranks": ranks if request.on_cpu else '"$SKYPILOT_NUM_GPUS_PER_NODE"',
        "setup_or_hint": _in_block(request.setup or _NO_SETUP),
        "program_in_block": _in_block(program),
        "words": "\n".join(f"    {_python_text(word)}," for word in request.program),
        "num_workers": request.nodes * ranks,
        "use_gpu": "" if request.on_cpu else ", use_gpu=True",
        "max_failures": _RAY_RESTARTS if request.restarts is None else request.restarts,
        "if_gpus": None if request.on_cpu else "",
        "if_hosts": None if request.nodes == 1 else "",
        "if_one_host": "" if request.nodes == 1 else None,
        # Else ranks that are started again may read the addresses of those before them, and fail:
        # https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.13 and Gloo.
        "if_restarts": "" if request.restarts else None,
        "if_volume": "" if request.volume else None,
    }


def _quoted(value: str | list[str]) -> str:
    """Return a value as JSON, which is YAML."""
    return json.dumps(value, ensure_ascii=False)


def _in_block(text: str) -> str:
    """Return a text as it stands in a block of YAML whose first line is begun."""
    return textwrap.indent(text, "  ").removeprefix("  ")


def _python_text(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
