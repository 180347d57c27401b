"""A task for SkyPilot, whose variables name the hosts and this host's place among them."""

from typing import Any

from fullshard.tools.launchers.request import PORT, Request, comment, torchrun
from fullshard.tools.launchers.yaml_text import to_yaml

_NO_SETUP = (
    "# Here goes what installs torch, fullshard and your program, unless the image has them."
)


def task(request: Request) -> str:
    """Return the task, which takes the current folder along."""
    ranks = str(request.ranks_per_node) if request.on_cpu else '"$SKYPILOT_NUM_GPUS_PER_NODE"'
    command = torchrun(
        [
            f'--nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --nproc-per-node {ranks}',
            f'--master-addr "$head" --master-port {PORT}',
        ],
        request.program,
    )
    content: dict[str, Any] = {"name": request.name, "num_nodes": request.nodes}
    if not request.on_cpu:
        content["resources"] = {"accelerators": f"{request.gpu}:{request.ranks_per_node}"}
    content["workdir"] = "."
    content["setup"] = f"{request.setup or _NO_SETUP}\npython -c 'import fullshard'\n"
    content["run"] = f"head=${{SKYPILOT_NODE_IPS%%$'\\n'*}}\n{command}\n"
    note = comment(
        request,
        "Start it with: sky launch FILE, or sky jobs launch FILE, which starts it again on other machines.",
    )
    return f"{note}\n{to_yaml(content)}"
