"""`python -m fullshard.run` says what a script has sharded, or why nothing was, and shards on CPUs if asked."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fullshard
from fullshard import local_ranks
from fullshard.drop_in.account import summary
from fullshard.drop_in.on_cpu import is_sharding_on_cpus, shard_on_cpus
from fullshard.errors import StateError
from fullshard.plan.trace import Kind, read_traces
from fullshard.policies import CommChoice
from fullshard.tools import run_cli
from fullshard.tools.run_cli import _LAUNCHER_PID, _WAYS, _WITH_VALUE
from fullshard.tools.typed_program import split_program
from tests.fresh import (
    FORKED_RANKS,
    Ended,
    fullshard_in_fork,
    in_fresh_ranks,
    in_warm_forks,
    on_forked_ranks,
)
from tests.harness import on_ranks
from tests.tools.processes import environment

FEW_LINES = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
"""
END = "dist.barrier(); dist.destroy_process_group()"  # else one may leave while another still connects


def _run(
    folder: Path,
    script: str,
    *options: str,
    ranks: int = 2,
) -> list[Ended]:
    """Run a script as torchrun's ranks run `-m fullshard.run`."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    program = f"""
import runpy, sys
sys.argv = ["run", *{options!r}, "script.py"]
sys.path.insert(0, {str(folder)!r})
runpy.run_module("fullshard.run", run_name="__main__")
"""
    return on_forked_ranks(ranks, program, folder=folder)


def _said(ended: list[Ended], code: int = 0) -> list[str]:
    """Return what the first rank said; the others say nothing."""
    assert [each.code for each in ended] == [code] * len(ended), ended
    lines = [
        [line for line in each.err.splitlines() if line.startswith("[fullshard]")] for each in ended
    ]
    assert not any(lines[1:])
    return lines[0]


def test_each_model_is_told_of_once(tmp_path: Path) -> None:
    script = f"""
    {FEW_LINES}
    fully_shard(model[0])
    fully_shard(model)
    wrapped = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        wrapped(torch.ones(2, 8)).sum().backward()
    {END}
    """
    first, second = _said(_run(tmp_path, script))
    for fact in ("Sequential: 2 units", "2 ranks (peer memory (one host))", "16.2 KiB"):
        assert fact in first
    assert "Linear: 1 unit, sharded" in second


@on_ranks(4)
def test_a_line_says_over_what() -> None:
    mesh = torch.distributed.init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    hybrid, copied = nn.Linear(8, 8), nn.Linear(8, 8)
    fullshard.fully_shard(hybrid, mesh=mesh)
    fullshard.replicate(copied)
    assert summary("A", fullshard.describe(hybrid)) == (
        "A: 1 unit, sharded over 2 ranks (peer memory (one host)), 2 times; this rank holds 0.1 KiB of parameters"
    )
    assert "replicated on 4 ranks" in summary("A", fullshard.describe(copied))


TRACED = f"""
    {FEW_LINES}
    fully_shard(model[0])
    fully_shard(model)
    wrapped = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    adam, sgd = torch.optim.AdamW(model.parameters()), torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            model(torch.ones(2, 64)).sum().backward()
        adam.step()
        (wrapped(torch.ones(2, 8)) + wrapped(torch.ones(2, 8))).sum().backward()
        sgd.step()
    {END}
"""


def test_steps_of_every_model_are_traced(tmp_path: Path) -> None:
    script = TRACED.replace("STEPS", "7")
    lines = _said(_run(tmp_path, script, "--trace", "a trace", "--trace-steps", "2-4"))[2:]
    assert [line.rpartition("fullshard ")[2] for line in lines] == [
        "report 'a trace'",
        "report 'a trace/model1'",
    ]
    first, second = (read_traces(tmp_path / "a trace" / name)[0] for name in ("", "model1"))
    assert [step.number for step in first.steps] == [2, 3, 4]
    assert [step.number for step in second.steps] == [5, 6, 7]  # of the other optimizer, afterwards
    assert {unit.name for unit in first.units} == {"", "0"}
    gathered = [each for each in first.transfers if each.kind is Kind.ALL_GATHER]
    assert len(gathered) >= 3 * 2 * 2  # steps, micro-batches, units
    assert any(segment.kind is Kind.OPTIMIZER for segment in second.timeline)


def test_what_is_not_traced_is_said(tmp_path: Path) -> None:
    (line,) = _said(_run(tmp_path, TRACED.replace("STEPS", "2"), "--trace", "traced"))[2:]
    assert "steps 3 to 5" in line
    assert "stepped 2 times" in line
    script = f"{FEW_LINES}\n    fully_shard(model)(torch.ones(2, 64)).sum().backward()"
    (line,) = _said(_run(tmp_path, script, "--trace", "traced"))[1:]
    assert "no torch.optim.Optimizer" in line
    (_, line) = _said(_run(tmp_path, f"{FEW_LINES}\n    {END}", "--trace", "traced"))
    assert "no sharded model" in line
    assert not list(tmp_path.rglob("rank*.json"))


def test_a_launcher_that_was_forgotten_is_told_of_below_the_error(tmp_path: Path) -> None:
    for first in (FEW_LINES, "import os\nos.environ['LOCAL_RANK']"):
        program = textwrap.dedent("""
            import os, runpy, sys
            [os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK")]
            sys.argv = ["run", "script.py"]
            runpy.run_module("fullshard.run", run_name="__main__")
        """)
        (tmp_path / "script.py").write_text(textwrap.dedent(first))
        (ended,) = in_warm_forks(program, folder=tmp_path)
        assert ended.code == 1
        traceback, _, hint = ended.err.partition("[fullshard]")
        assert "LOCAL_RANK" in traceback or "RANK expected" in traceback
        assert "fullshard run --ranks 2 script.py" in hint


def test_the_command_starts_ranks_itself(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"
        "from fullshard.local_ranks import says_ends\nassert says_ends(), 'of other ranks, as under torchrun'\n"
        "assert 'FULLSHARD_LAUNCHER_PID' not in os.environ\nsys.exit('--fail' in sys.argv)"
    )
    words = ("run", "--ranks", "2", "script.py", "--ranks", "3", "-x")
    ended = fullshard_in_fork(*words, folder=tmp_path, before=FORKED_RANKS)
    assert ended.code == 0, ended.err
    said = ["0 2 ['--ranks', '3', '-x']", "1 2 ['--ranks', '3', '-x']"]
    assert sorted(ended.out.splitlines()) == said
    assert "nothing was sharded" in ended.err
    ended = fullshard_in_fork(*words, "--fail", folder=tmp_path, before=FORKED_RANKS)
    assert ended.code == 1
    assert "failed" in ended.err.splitlines()[-1]
    ended = fullshard_in_fork(*words, folder=tmp_path, variables={"RANK": "0"})
    assert ended.code == 2
    assert "Leave --ranks out" in ended.err


@pytest.mark.parametrize(
    ("ways", "code", "said"),
    [
        ("7 stays", 7, "rank 0 failed with exit code 7; the other rank was ended."),
        ("0 1", 1, "rank 1 failed; rank 0 had ended before."),
        ("0 3 stays", 3, "rank 1 failed with exit code 3; rank 0 had ended before; rank 2 was ended."),
        ("75 75", 75, " failed with exit code 75"),
        ("5 saves", 5, "rank 0 failed with exit code 5; rank 1 ended later."),
        ("-9 stays", 3, "was killed by SIGKILL; the other rank was ended."),
        ("-15 raises", 3, "was killed by SIGTERM; rank 1 ended later."),
        ("raises raises follows", 1, "fullshard run: ranks 0-1 failed; rank 2 ended later."),
    ],
)  # fmt: skip
def test_the_script_s_exit_code_is_passed_on_and_the_last_line_says_what_became_of_ranks(
    tmp_path: Path, ways: str, code: int, said: str
) -> None:
    (tmp_path / "script.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "rank, ways = int(os.environ['RANK']), sys.argv[1:]\n"
        "pathlib.Path(f'here-{rank}').touch()\n"
        "if ways[rank] == 'saves': signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))\n"
        "while len([*pathlib.Path().glob('here-*')]) < len(ways): time.sleep(0.01)\n"
        "if '0' in ways[:rank]: time.sleep(1)\n"
        "if ways[rank][0] == '-': os.kill(os.getpid(), -int(ways[rank]))\n"
        "if ways[rank] == 'follows': from fullshard.errors import PeerLostError; raise PeerLostError('rank 0')\n"
        "if ways[rank] == 'raises':\n"
        "    import atexit\n"
        "    atexit.register(time.sleep, rank)\n"
        "    raise ValueError('alike')\n"
        "time.sleep(60) if ways[rank].isalpha() else os._exit(int(ways[rank]))\n"
    )
    words = ("run", "--ranks", str(len(ways.split())), "script.py", *ways.split())
    ended = fullshard_in_fork(*words, folder=tmp_path, before=FORKED_RANKS)
    assert ended.code == code, ended.err
    assert said in ended.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("script", "names", "times"),
    [
        ("import no_such_module", "ModuleNotFoundError", 1),
        ("def broken(:", "SyntaxError", 1),
        ("raise ValueError(os.environ['RANK'])", "ValueError", 2),
    ],
)
def test_what_ends_all_ranks_alike_before_they_meet_is_said_once_with_the_rank(
    tmp_path: Path, script: str, names: str, times: int
) -> None:
    (tmp_path / "script.py").write_text(
        "import pathlib, os, signal, time\npathlib.Path(f\"here-{os.environ['RANK']}\").touch()\n"
        "while len([*pathlib.Path().glob('here-*')]) < 2: time.sleep(0.01)\n"
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nexec({script!r})\n"
    )
    ended = fullshard_in_fork(
        "run", "--ranks", "2", "script.py", folder=tmp_path, before=FORKED_RANKS
    )
    assert ended.code == 1, ended.err
    assert len(re.findall(rf"(?m)^\[rank[01]\]: {names}: ", ended.err)) == times, ended.err


def test_a_stop_while_the_command_imports_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_cli, "_start", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "script.py").touch()
    with pytest.raises(SystemExit) as ended:
        run_cli.main("fullshard run", ["--ranks", "2", str(tmp_path / "script.py")])
    assert ended.value.code == 130
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_rank_of_the_command_that_is_killed_or_exits_is_named_with_its_layer(
    tmp_path: Path,
) -> None:
    die = """
    fully_shard(model[0])
    fully_shard(model)
    import os, signal
    if dist.get_rank() == 1:
        model[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    model(torch.ones(2, 64)).sum().backward()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(FEW_LINES + die))
    words = ("run", "--ranks", "2", "script.py")
    ended = fullshard_in_fork(*words, folder=tmp_path, before=FORKED_RANKS)
    assert ended.code == 3
    named = next((x for x in ended.err.splitlines() if x.startswith("rank 1 (pid ")), ended.err)
    assert "SIGKILL" in named
    assert "step 1, forward" in named
    leave = die.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)")
    waiting, left = _run(tmp_path, f"{FEW_LINES}\n    import sys{leave}")
    assert (waiting.code, left.code) == (1, 3)
    assert re.search(
        r"PeerLostError: rank 1 .*forward.* SystemExit: 3 .*script\.py:\d+", waiting.err
    )


def test_what_trained_without_sharding_is_told_with_the_reason(tmp_path: Path) -> None:
    ddp = f"""
    {FEW_LINES}
    nn.parallel.DistributedDataParallel(model)(torch.ones(2, 64)).sum().backward()
    {END}
    """
    (line,) = _said(_run(tmp_path, ddp))
    assert "nothing was sharded" in line
    assert "with Distributed" in line
    (line,) = _said(_run(tmp_path, f"{FEW_LINES}\n    fully_shard(model)", ranks=1))
    assert "none of them ran a forward" in line
    (line,) = _said(
        _run(tmp_path, f"{FEW_LINES}\n    {END}")
    )  # which leaves no group, but two ranks
    assert "neither fully_shard nor FullyShardedDataParallel" in line
    (line,) = _said(_run(tmp_path, "import sys\nsys.exit()", ranks=1))
    assert "start ranks: fullshard run --ranks 2" in line
    script = f"import fullshard\nfullshard.uninstall()\n{textwrap.dedent(FEW_LINES)}"
    (line,) = _said(_run(tmp_path, script, ranks=1))
    assert "called fullshard.uninstall()" in line


def test_a_script_that_fails_before_it_shards_says_nothing_more(tmp_path: Path) -> None:
    assert _said(_run(tmp_path, "raise ValueError('early')", ranks=1), code=1) == []
    assert _said(_run(tmp_path, "import sys\nsys.exit(3)", ranks=1), code=3) == []


def test_pytorch_s_engine_runs_the_same_command_in_silence(tmp_path: Path) -> None:
    script = f"""
    {FEW_LINES}
    fully_shard(model)(torch.ones(2, 64)).sum().backward()
    print(fully_shard.__module__)
    {END}
    """
    ended = _run(tmp_path, script, "--engine", "torch", ranks=1)
    assert _said(ended) == []
    assert ended[0].out.startswith("torch.distributed.fsdp")


STARTING = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard

def train(rank):
    os.environ["RANK"] = str(rank)
    dist.init_process_group("gloo")
    fully_shard(nn.Linear(8, 8))(torch.ones(2, 8)).sum().backward()
    dist.destroy_process_group()

if __name__ == "__main__":
    os.environ["WORLD_SIZE"] = "2"
    torch.multiprocessing.start_processes(train, nprocs=2, start_method="{method}")
"""


def test_processes_that_a_script_forks_tell_of_theirs(tmp_path: Path) -> None:
    (line,) = _said(_run(tmp_path, STARTING.format(method="fork"), ranks=1))
    assert "Linear: 1 unit, sharded over 2 ranks" in line


@pytest.mark.long  # Python starts three times
def test_processes_that_a_script_spawns_tell_of_theirs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STARTING.format(method="spawn"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    done = subprocess.run(
        [sys.executable, "-m", "fullshard.run", "script.py"],
        env=environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("[fullshard]")]
    assert "Linear: 1 unit, sharded over 2 ranks" in line


# Accelerate decides so: what it would be on CPUs, and where it goes on from there.
ACCELERATE = """
import enum, os, torch, torch.distributed as dist

class DistributedType(enum.Enum):
    NO, MULTI_CPU, MULTI_GPU, FSDP = range(4)

class PartialState:
    _shared_state = {}
    def __init__(self, cpu=False, **kwargs):
        self.__dict__ = self._shared_state
        if not self._shared_state:
            several = cpu and int(os.environ["WORLD_SIZE"]) > 1
            self.distributed_type = DistributedType.MULTI_CPU if several else DistributedType.NO
            if several:
                dist.init_process_group("gloo")

class AcceleratorState:
    def __init__(self, cpu=False, fsdp_plugin=None):
        if not PartialState._shared_state:
            PartialState(cpu)
        self.distributed_type = PartialState().distributed_type
        if self.distributed_type is DistributedType.MULTI_GPU and fsdp_plugin:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
"""
LIKE_TRAINER = """
import os, torch, torch.distributed as dist
from torch import nn
from accelerate.state import AcceleratorState, DistributedType, PartialState
{first}
os.environ["ACCELERATE_USE_FSDP"] = "true"  # as its Accelerator does for a plugin
state = AcceleratorState(fsdp_plugin=True)
model = nn.Linear(8, 8)
if state.distributed_type is DistributedType.FSDP:
    from torch.distributed.fsdp import fully_shard
    fully_shard(model)
elif dist.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
model(torch.ones(2, 8)).sum().backward()
"""


@pytest.mark.parametrize(
    "first", [pytest.param("", marks=pytest.mark.long), "PartialState(cpu=True)"]
)
def test_accelerate_shards_on_cpus_if_asked_and_is_told_of_otherwise(
    tmp_path: Path, first: str
) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "__init__.py").touch()
    (tmp_path / "accelerate" / "state.py").write_text(ACCELERATE)
    script = LIKE_TRAINER.format(first=first)
    (line,) = _said(_run(tmp_path, script, "--cpu"))
    assert "Linear: 1 unit, sharded over 2 ranks" in line
    (line,) = _said(_run(tmp_path, script))
    how = "with DistributedDataParallel" if first else "on each rank by itself"
    assert f"was trained {how}" in line
    assert "python -m fullshard.run --cpu SCRIPT" in line
    (line,) = _said(_run(tmp_path, script, "--cpu", ranks=1))
    assert "one process" in line
    assert "Start ranks: fullshard run --ranks 2" in line


def test_lightning_s_fsdp_strategy_passes_on_cpus_if_asked(tmp_path: Path) -> None:
    (tmp_path / "lightning" / "fabric").mkdir(parents=True)
    for folder in ("lightning", "lightning/fabric"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "lightning" / "fabric" / "connector.py").write_text(
        textwrap.dedent(
            """
            class FSDPStrategy: ...
            class _Connector:
                def __init__(self, strategy):
                    self._strategy_flag = strategy
                    self._check_strategy_and_fallback()
                def _check_strategy_and_fallback(self):
                    raise ValueError(f"checked {type(self._strategy_flag).__name__}")
            """
        )
    )
    script = """
    from lightning.fabric.connector import FSDPStrategy, _Connector
    _Connector(FSDPStrategy())
    _Connector("fsdp")
    _Connector("fsdp_cpu_offload")
    try:
        _Connector(1)
    except ValueError as error:
        print(error)
    """
    (ended,) = _run(tmp_path, script, "--cpu", ranks=1)
    assert ended.out == "checked int\n", ended.err
    (ended,) = _run(tmp_path, script, ranks=1)
    assert "ValueError: checked FSDPStrategy" in ended.err


@in_fresh_ranks(1)
def test_uninstall_has_libraries_decide_themselves_again() -> None:
    from types import ModuleType

    state: Any = ModuleType("accelerate.state")
    exec(ACCELERATE, state.__dict__)
    sys.modules["accelerate.state"] = state
    begins = [state.PartialState.__init__, state.AcceleratorState.__init__]
    fullshard.install(cpu=True)
    fullshard.install(cpu=True)
    assert begins[0] is not state.PartialState.__init__
    fullshard.uninstall()
    assert begins == [state.PartialState.__init__, state.AcceleratorState.__init__]
    assert not is_sharding_on_cpus()


PLUGIN = """
class FullyShardedDataParallelPlugin:
    def __init__(self, sync):
        self.sync_module_states = sync
        self.__post_init__()
    def __post_init__(self):
        raise RuntimeError("There are currently no available devices found")
"""


@in_fresh_ranks(1)
def test_accelerate_s_plugin_builds_on_cpus_what_one_rank_sends() -> None:
    from types import ModuleType

    module: Any = ModuleType("accelerate.utils.dataclasses")
    exec(PLUGIN, module.__dict__)
    sys.modules["accelerate.utils.dataclasses"] = module
    fullshard.install(cpu=True)
    plugin = module.FullyShardedDataParallelPlugin(sync=True)
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    plugin.param_init_fn(layer)
    assert layer.weight.device.type == "cpu"
    with pytest.raises(RuntimeError, match="no available devices"):
        module.FullyShardedDataParallelPlugin(sync=False)
    fullshard.uninstall()


@pytest.mark.parametrize(
    ("line", "words", "arguments"),
    [
        ("--cpu a.py --cpu -m x", "--cpu a.py", "--cpu -m x"),
        (
            "--ranks 2 --trace d --trace-steps 2-3 a.py",
            "--ranks 2 --trace d --trace-steps 2-3 a.py",
            "",
        ),
        ("a.py -- --cpu", "a.py", "-- --cpu"),
        ("--comm auto --engine torch a.py -h", "--comm auto --engine torch a.py", "-h"),
        ("--comm=auto a.py", "--comm=auto a.py", ""),
        ("--cpu -m pkg.train -m other", "--cpu -m pkg.train", "-m other"),
        ("-mpkg.train --engine x", "-mpkg.train", "--engine x"),
        ("-h", "-h", ""),
        ("", "", ""),
    ],
)
def test_what_follows_the_program_is_the_program_s(line: str, words: str, arguments: str) -> None:
    assert split_program(line.split(), _WITH_VALUE) == (words.split(), arguments.split())


def test_what_modules_that_import_torch_say_is_said_alike_without_it() -> None:
    assert [*_WAYS] == [choice.value for choice in CommChoice]
    assert _LAUNCHER_PID == local_ranks.LAUNCHER_PID


def test_a_script_has_its_own_path_and_arguments(tmp_path: Path) -> None:
    script = "import sys\nprint(__file__, *sys.argv)"
    (tmp_path / "script.py").write_text(script)
    program = """
import runpy, sys
sys.argv = ["run", "script.py", "--", "--cpu"]
runpy.run_module("fullshard.run", run_name="__main__")
"""
    (ended,) = in_warm_forks(program, folder=tmp_path)
    assert ended.out == f"{tmp_path}/script.py script.py -- --cpu\n", ended.err


def test_an_accelerator_is_not_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(StateError, match=r"leave out cpu=True, or --cpu"):
        shard_on_cpus()
