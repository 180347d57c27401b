"""What Slurm tells the tasks that srun starts, in the words that torchrun tells its ranks.

    SLURM_PROCID=3  SLURM_STEP_NUM_TASKS=4      ->  RANK=3        WORLD_SIZE=4
    SLURM_LOCALID=1 SLURM_STEP_TASKS_PER_NODE=2(x2), SLURM_NODEID=1
                                                ->  LOCAL_RANK=1  LOCAL_WORLD_SIZE=2
    SLURM_STEP_NODELIST=node[01-02]             ->  MASTER_ADDR=node01
    SLURM_JOB_ID=4711 SLURM_STEP_ID=0           ->  MASTER_PORT=19977

Only srun sets the variables with STEP in their name. A batch script has a SLURM_PROCID too, and the
SLURM_NTASKS of its job, but is no task among others: it starts ranks of its own, or srun.
"""

import re
from collections.abc import Mapping

from fullshard.tools.config import OptionError

# Below the ports that Linux gives to connections (32768 and up), and torchrun's 29500.
_FIRST_PORT = 15000
_NUM_PORTS = 14000


def variables_of_rank(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return torchrun's variables for one of several tasks of a step, or None in any other process.

    MASTER_ADDR and MASTER_PORT stay as they are where they are set. Raises OptionError for variables
    that are missing, are not what Slurm writes, or contradict each other.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None  # alone in its step, it may start as many ranks as there are devices
    num_ranks = _count(environment, "SLURM_STEP_NUM_TASKS")
    rank = _count(environment, "SLURM_PROCID")
    local_rank = _count(environment, "SLURM_LOCALID")
    tasks = _tasks_per_node(_text(environment, "SLURM_STEP_TASKS_PER_NODE"))
    node = _count(environment, "SLURM_NODEID")
    if node >= len(tasks) or sum(tasks) != num_ranks:
        raise _contradiction(
            environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID"
        )
    if rank >= num_ranks:
        raise _contradiction(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    if local_rank >= tasks[node]:
        raise _contradiction(
            environment, "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
        )
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": environment.get("MASTER_ADDR")
        or first_host(_text(environment, "SLURM_STEP_NODELIST")),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
    }
    if "OMP_NUM_THREADS" not in environment and environment.get("SLURM_CPUS_PER_TASK"):
        variables["OMP_NUM_THREADS"] = str(_count(environment, "SLURM_CPUS_PER_TASK"))
    return variables


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it: "gpu-[03-05,9],login" begins with gpu-03."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""
    if not re.fullmatch(r"[\w.:-]+", host):
        raise OptionError(f"SLURM_STEP_NODELIST={nodes}: is no list of hosts, such as node[01-04].")
    return host


def _port(environment: Mapping[str, str]) -> int:
    """Choose a port that all tasks of a step know, and that jobs and steps beside it do not have."""
    job, step = _count(environment, "SLURM_JOB_ID"), _count(environment, "SLURM_STEP_ID")
    return _FIRST_PORT + (7 * job + step) % _NUM_PORTS


def _tasks_per_node(text: str) -> list[int]:
    """Return each node's number of tasks: "4(x2),1" is 4, 4, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not found:
            raise OptionError(
                f"SLURM_STEP_TASKS_PER_NODE={text}: is not what Slurm writes, such as 8(x2)."
            )
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise OptionError(
            f"{name} is not set, but SLURM_STEP_NUM_TASKS={environment['SLURM_STEP_NUM_TASKS']}: this is "
            "one of several tasks that srun has started. Let all of Slurm's variables through "
            "(containers, sudo and `srun --export` drop some), or start ranks with torchrun."
        )
    return environment[name]


def _count(environment: Mapping[str, str], name: str) -> int:
    text = _text(environment, name)
    if not (text.isascii() and text.isdigit()):
        raise OptionError(f"{name}={text}: is not what Slurm writes, a number.")
    return int(text)


def _contradiction(environment: Mapping[str, str], *names: str) -> OptionError:
    said = ", ".join(f"{name}={environment[name]}" for name in names)
    return OptionError(
        f"{said}: contradict each other. Are some of them from another job or step? Start from a shell "
        "outside of it, or unset what SLURM_* that shell has set."
    )
