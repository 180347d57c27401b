"""A script that starts torchrun on a host, or on each of several."""

from fullshard.tools.launchers.request import (
    PORT,
    Request,
    comment,
    preparation,
    restarting,
    torchrun,
)


def script(request: Request) -> str:
    """Return a script to run once, or on each host with HEAD set to one of them."""
    ranks = f"--nproc-per-node {request.ranks_per_node}"
    if request.nodes == 1:
        usage = "Run it."
        options = ["--standalone", ranks]
    else:
        usage = f"On each of {request.nodes} hosts, of which the first is called HOST: HEAD=HOST bash FILE"
        options = [
            f"--nnodes {request.nodes} {ranks}",
            f"--rdzv-id {request.name} --rdzv-backend c10d",
            f'--rdzv-endpoint "${{HEAD:?is not set: the host where all meet}}:${{PORT:-{PORT}}}"',
        ]
    options += restarting(request)
    return f"""#!/bin/bash
{comment(request, usage)}
set -euo pipefail
{preparation(request)}{torchrun(options, request.program, before="exec ")}
"""
