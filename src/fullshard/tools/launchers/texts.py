"""From a `Request` to the text that starts it, by the template of its kind (templates/).

In a template `@name` is a value, and `@@` one @. A line that names a value which is None is left out, together with the
lines below it that are indented deeper.

Kubeflow's runtime torch-distributed (Trainer v1alpha1, as of its release 2.3) gives every pod torchrun's options as
variables, so that the command is torchrun alone. SkyPilot's variables name the hosts and this host's place among them.
A worker of Ray Train starts its rank in a process of its own, since Ray calls functions in a thread, where Python takes
no signals, and has a process group in the worker already; that one only tells the ranks at which port to meet. A task of
Slurm's is all of a host's ranks here, and must not be bound to a single processor.
"""

import json
import shlex
import string
import textwrap
from pathlib import Path
from typing import Any

from fullshard.tools.launchers.request import Request

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
