"""A program for Ray Train: each worker starts one rank, in a process of its own.

Within Ray's worker it could not be: Ray calls functions in a thread, where Python takes no signals, and
has a process group in the worker already. That one only tells the ranks at which port to meet.
"""

from fullshard.tools.launchers.request import Request, comment

_DEFAULT_RESTARTS = 3


def program(request: Request) -> str:
    """Return the program."""
    restarts = _DEFAULT_RESTARTS if request.restarts is None else request.restarts
    words = "".join(f'    "{_escaped(word)}",\n' for word in request.program)
    note = comment(
        request,
        "Run it with: python FILE, on the cluster's head, or submit it with `ray job submit`.",
    )
    use_gpu = "" if request.on_cpu else ", use_gpu=True"
    return f'''{note}
import os
import signal
import socket
import subprocess
import sys

import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

PROGRAM = [
{words}]
FOLDER = os.getcwd()  # where paths are relative to; Ray's workers are elsewhere


def be_a_rank() -> None:
    """Run the program as one rank; the worker fails with it, and then Ray starts all of them again."""
    with socket.create_server(("", 0)) as server:
        port = [server.getsockname()[1]]
    dist.broadcast_object_list(port)  # that of the first rank; Ray's own group has MASTER_PORT
    variables = {{**os.environ, "MASTER_PORT": str(port[0])}}
    rank = subprocess.Popen([sys.executable, *PROGRAM], cwd=FOLDER, env=variables)
    try:
        code = rank.wait()
    finally:
        rank.send_signal(signal.SIGKILL)
    if code:
        raise RuntimeError(f"the rank ended with exit code {{code}}")


TorchTrainer(
    be_a_rank,
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers={request.nodes * request.ranks_per_node}{use_gpu}),
    run_config=RunConfig(name="{request.name}", failure_config=FailureConfig(max_failures={restarts})),
).fit()
'''


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
