"""A script for sbatch: one torchrun per host, which meet at the first one.

`srun fullshard train`, with a task for each rank, is understood as well (tools/slurm.py); torchrun
does the same for any script.
"""

from fullshard.tools.launchers.request import (
    TO_SAVE_S,
    TORCHRUN_WAITS,
    Request,
    comment,
    preparation,
    restarting,
    torchrun,
)


def script(request: Request) -> str:
    """Return the script; what has to differ from site to site is for the user to add."""
    cpus = request.cpus_per_rank or (1 if request.on_cpu else None)
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        *([] if request.on_cpu else [f"--gpus-per-node={request.ranks_per_node}"]),
        *([f"--cpus-per-task={cpus * request.ranks_per_node}"] if cpus else []),
        *([f"--partition={request.partition}"] if request.partition else []),
        *([f"--time={request.time_limit}"] if request.time_limit else []),
        f"--signal=TERM@{TO_SAVE_S}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    header = "\n".join(f"#SBATCH {option}" for option in options)
    command = torchrun(
        [
            f'--nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {request.ranks_per_node}',
            '--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:$port"',
            *restarting(request),
        ],
        request.program,
        # Else the task, which is to be all of a host's ranks, may be bound to a single processor.
        before="srun --kill-on-bad-exit=1 --cpu-bind=none ",
    )
    waits = (
        f"export {'='.join(TORCHRUN_WAITS)} # seconds for ranks to save, once they are told to stop"
    )
    note = comment(
        request,
        "Submit it with: sbatch FILE. Before the time limit, ranks are told to save and stop (SIGTERM).",
        "For longer than a limit, submit it several times with --dependency=singleton.",
    )
    return f"""#!/bin/bash
{header}
{note}
set -euo pipefail
{preparation(request, waits)}hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{hosts%%$'\\n'*}}
port=$((15000 + SLURM_JOB_ID % 14000)) # jobs on one host have ports of their own
{command}
"""
