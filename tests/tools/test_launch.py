"""`fullshard launch`: what is printed is what each system takes, and runs as it stands."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fullshard.tools import cli
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.launchers.texts import Request, plain, program_of, text_for
from tests.tools.processes import PAGES, TINY, Run, environment, kill, losses

ROOT = Path(__file__).parents[2]
SHORT = (*TINY, *PAGES, "--steps", "3", "--trace-steps", "0")
PROGRAM = ("train.py", "--text", "it's $HOME")


def _as_kubernetes_does(words: list[str]) -> list[str]:
    """Put values for $(NAME), of which there are none, and one $ for two."""
    found = [re.sub(r"\$\$|\$\(\w+\)", lambda m: "$" if m[0] == "$$" else "", w) for w in words]
    assert not any(re.search(r"(?<!\$)\$\(", word.replace("$$", "")) for word in words)
    return found


K8S: dict[str, Any] = {"kind": "k8s", "program": PROGRAM, "nodes": 2, "image": "me/train:1"}


def test_a_command_of_fullshard_becomes_a_module() -> None:
    ready = ("-m", "fullshard", "train", "--out", "a", "--auto-resume")
    for before in ([], ["fullshard"], ["-m", "fullshard"], ["python", "-m", "fullshard"]):
        words = plain([*before, "train", "--out", "a"])
        assert program_of(words, goes_on=True) == ready
    assert program_of(["doctor"], goes_on=False) == ("-m", "fullshard", "doctor")
    assert program_of(plain(["python", "a.py", "x"]), goes_on=False) == ("a.py", "x")
    logged = ["train", "--log", "wandb", "--log=mlflow", "--logger", "a:B"]
    assert program_of(logged, goes_on=False)[3:] == (
        *("--logger", "wandb", "--logger=mlflow", "--logger", "a:B"),
    )
    assert program_of(["-m", "a.b", "x"], goes_on=False) == ("-m", "a.b", "x")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["pbs", "--", "train.py"], "--print pbs: choose from torchrun, slurm, k8s, ray, sky"),
        (["slurm"], "say what to run, after `--`"),
        (["slurm", "--", "torchrun", "a.py"], "torchrun: is none of fullshard's train, doctor"),
        (["slurm", "--", "-m"], "-m: is none of"),
        (["slurm", "--nodes", "0", "--", "a.py"], "--nodes 0: must be at least 1"),
        (["slurm", "--ranks-per-node", "0", "--", "a.py"], "--ranks-per-node 0: must be at least"),
        (["slurm", "--name", "My_Run", "--", "a.py"], "--name My_Run: give small letters"),
        (["slurm", "--image", "x", "--", "a.py"], "--image x: says nothing to slurm, only to k8s"),
        (["slurm", "--time", "1 h", "--", "a.py"], "--time '1 h': must not hold spaces"),
        (["k8s", "--time", "1", "--", "a.py"], "--time 1: says nothing to k8s, only to slurm"),
        (["k8s", "--", "a.py"], "--image: name the container image"),
        (["k8s", "--image", "x", "--volume", "/d", "--", "a.py"], "--volume /d: give CLAIM:/PATH"),
        (["sky", "--", "a.py"], "--gpu: name the kind of GPU"),
        (["sky", "--gpu", "L4", "--cpu", "--", "a.py"], "--gpu L4 and --cpu: leave one of them"),
        (["ray", "--restarts", "-1", "--", "a.py"], "--restarts -1: must not be negative"),
        (["slurm", "--", "train"], "train: name a folder that all hosts share, with --out"),
        (["slurm", "--", "train", "--ranks", "2", "--out", "a"], "train --ranks 2: leave it out"),
        (["slurm", "--", "python", "-m", "fullshard", "train"], "train: name a folder that all"),
        (["slurm", "--", "train", "--no-such"], "No such option: --no-such"),
        (["slurm", "--", "train", "--steps", "many"], "Invalid value for '--steps': many"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_printed_is_refused(options: list[str], said: str) -> None:
    result = CliRunner().invoke(cli.app, ["launch", "--print", *options])
    assert result.exit_code == Exit.USAGE
    assert said in result.output
    assert result.stdout == ""


@pytest.mark.parametrize("words", [[], ["slurm", "train.py"], ["--print"]])
def test_who_does_not_say_what_to_print_hears_what_there_is(words: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["launch", *words], env={"COLUMNS": "200"})
    assert result.exit_code == Exit.USAGE
    assert "torchrun, slurm, k8s, ray, sky" in result.output


def test_every_problem_is_said_at_once() -> None:
    with pytest.raises(OptionError) as caught:
        Request("slurm", PROGRAM, nodes=0, image="x", name="A")
    assert len(str(caught.value).splitlines()) == 3


def test_help_shows_how_to_use_what_is_printed() -> None:
    said = CliRunner().invoke(cli.app, ["launch", "--help"]).output
    assert "fullshard launch --print slurm --nodes 2 -- train" in said
    assert "Nothing is started" in said


def _printed(monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """Return what the command prints, which says how it was typed."""
    monkeypatch.setattr(sys, "argv", ["fullshard", "launch", *options])
    result = CliRunner().invoke(cli.app, sys.argv[1:])
    assert result.exit_code == Exit.OK, result.output
    return result.stdout


def test_the_text_says_which_command_printed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ("train", "--prompt", "a\nrm b", "--text-field", "fullshard", "--out", "a")
    said = _printed(monkeypatch, "--print", "slurm", "--", *program)
    assert "# Printed by: fullshard launch --print slurm -- train --prompt 'a rm b'" in said
    assert said.endswith("train --prompt 'a\nrm b' --text-field fullshard --out a --auto-resume\n")


# What each system takes


def test_slurm_is_told_what_a_host_has() -> None:
    def options(**more: Any) -> list[str]:
        text = text_for(Request("slurm", PROGRAM, nodes=2, ranks_per_node=4, **more))
        header = text.partition("\nset -euo")[0].splitlines()
        assert header[0] == "#!/bin/bash"
        return [line.removeprefix("#SBATCH ") for line in header if line.startswith("#SBATCH ")]

    gpus = options(time_limit="04:00:00", partition="gpu")
    assert {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--requeue"} <= {*gpus}
    assert {"--time=04:00:00", "--partition=gpu", "--signal=TERM@120"} <= {*gpus}
    assert not [each for each in gpus if each.startswith("--cpus-per-task")]
    cpus = options(on_cpu=True, cpus_per_rank=3)
    assert "--cpus-per-task=12" in cpus
    assert not [each for each in cpus if each.startswith("--gpus")]


def test_ranks_that_start_again_do_not_meet_the_ones_before() -> None:
    for kind in ("torchrun", "slurm"):
        again = text_for(Request(kind, PROGRAM, restarts=2, setup="module load x\nmodule load y"))
        assert (
            "\nmodule load x\nmodule load y\nexport TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 " in again
        )
        assert " --max-restarts 2 \\\n" in again
        assert "RDZV" not in text_for(Request(kind, PROGRAM))


@pytest.mark.parametrize("more", [{}, {"volume": "data:/data"}, {"on_cpu": True}], ids=str)
def test_kubeflow_takes_the_train_job(more: dict[str, Any]) -> None:
    reason = "kubeflow-trainer-api, Kubeflow's models of its manifests, is not installed"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    job = yaml.safe_load(text_for(Request(**K8S, **more)))
    # Fields that its schema does not have are dropped on the way, so the two would differ.
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert ("resourcesPerNode" in trainer) is not more.get("on_cpu", False)
    assert ("runtimePatches" in job["spec"]) is ("volume" in more)
    assert _as_kubernetes_does(trainer["command"]) == ["torchrun", *PROGRAM]


@pytest.mark.parametrize("on_cpu", [False, True], ids=["gpu", "cpu"])
def test_the_task_for_skypilot_has_documented_fields(on_cpu: bool, tmp_path: Path) -> None:
    request = Request("sky", PROGRAM, nodes=2, gpu="" if on_cpu else "H100", on_cpu=on_cpu)
    (tmp_path / "task.yaml").write_text(text_for(request))
    task = yaml.safe_load(text_for(request))
    resources = set() if on_cpu else {"resources"}
    assert task.keys() == {"name", "num_nodes", "workdir", "setup", "run"} | resources
    assert task["num_nodes"] == 2
    if not on_cpu:
        assert task["resources"] == {"accelerators": "H100:8"}


def test_skypilot_takes_the_task(tmp_path: Path) -> None:
    package = pytest.importorskip(
        "sky", reason="skypilot, with some 100 packages, is not installed"
    )
    for number, more in enumerate(({"gpu": "H100"}, {"on_cpu": True, "setup": "pip install x"})):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text_for(Request("sky", PROGRAM, nodes=2, **more)))
        assert package.Task.from_yaml(str(file)).num_nodes == 2


def test_ray_is_given_every_word() -> None:
    words = ("train.py", "--text", 'a "b" \\ {c}\nd')
    text = text_for(Request("ray", words, nodes=2, ranks_per_node=3, restarts=5))
    (listed,) = re.findall(r"(?s)^PROGRAM = (\[.*?^\])$", text, re.MULTILINE)
    assert ast.literal_eval(listed) == list(words)
    assert "ScalingConfig(num_workers=6, use_gpu=True)" in text
    assert "FailureConfig(max_failures=5)" in text
    compile(text, "run.py", "exec")


def test_yaml_is_read_back_as_it_was() -> None:
    words = ("train.py", "yes: 'no' # \"\\ \u00e9", "a\n\n  b", "$HOME")
    job = yaml.safe_load(text_for(Request(**{**K8S, "program": words})))
    assert _as_kubernetes_does(job["spec"]["trainer"]["command"])[1:] == list(words)
    setup = "module load 'x: #'\n\n  y"
    task = yaml.safe_load(text_for(Request("sky", words, gpu="L4", setup=setup)))
    assert shlex.split(task["run"])[-len(words) :] == list(words)
    assert task["setup"] == f"{setup}\npython -c 'import fullshard'\n"


# It runs as it stands: two "hosts" of one rank each, both of them this one


WHO = """
import os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
pathlib.Path(f"rank{os.environ['RANK']}").write_text(
    " ".join([*(os.environ[name] for name in names), *sys.argv[1:]])
)
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
for _ in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
[ "$*" == "show hostnames node[01-02]" ] && printf 'localhost\\nnode02\\n'
"""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(stat.S_IRWXU)


def _run(folder: Path, *lines: list[str], variables: list[Mapping[str, str]]) -> None:
    """Run command lines at the same time, with torchrun and stand-ins of Slurm's commands on the path."""
    _put(folder, "srun", SRUN)
    _put(folder, "scontrol", SCONTROL)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    common = environment() | {"PATH": path, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            line, cwd=folder, env=common | dict(more), stderr=subprocess.PIPE, text=True
        )
        for line, more in zip(lines, variables, strict=True)
    ]
    said = [process.communicate(timeout=200)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(lines), said


def _run_slurm(folder: Path, program: tuple[str, ...]) -> None:
    job = _free_job()
    request = Request("slurm", program, nodes=2, ranks_per_node=1, on_cpu=True, setup="set -x")
    (folder / "run.sbatch").write_text(text_for(request))
    given = {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[01-02]"}
    _run(folder, ["bash", "run.sbatch"], variables=[given])


def _free_job() -> str:
    """Return the id of a job whose port nobody has."""
    for job in range(14000):
        try:
            with socket.create_server(("", 15000 + job)):
                return str(job + 14000)
        except OSError:
            continue
    pytest.fail("no port is free")


def _run_torchrun(folder: Path, program: tuple[str, ...]) -> None:
    request = Request("torchrun", program, nodes=2, ranks_per_node=1)
    (folder / "run.sh").write_text(text_for(request))
    given = {"HEAD": "localhost", "PORT": str(_free_port())}
    _run(folder, ["bash", "run.sh"], ["bash", "run.sh"], variables=[given, given])


def _run_k8s(folder: Path, program: tuple[str, ...]) -> None:
    """Give each "pod" what the plugin of Kubeflow's runtime torch-distributed gives it."""
    job = yaml.safe_load(text_for(Request(**{**K8S, "program": program}, ranks_per_node=1)))
    line = _as_kubernetes_does(job["spec"]["trainer"]["command"])
    common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    common["PET_MASTER_PORT"] = str(_free_port())
    pods = [common | {"PET_NODE_RANK": str(n)} for n in range(2)]
    _run(folder, line, line, variables=pods)


def _run_sky(folder: Path, program: tuple[str, ...]) -> None:
    task = yaml.safe_load(text_for(Request("sky", program, nodes=2, ranks_per_node=1, gpu="L4")))
    line = ["bash", "-euc", task["run"].replace("29500", str(_free_port()))]
    common = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    common["SKYPILOT_NUM_GPUS_PER_NODE"] = "1"
    hosts = [common | {"SKYPILOT_NODE_RANK": str(n)} for n in range(2)]
    _run(folder, line, line, variables=hosts)


@pytest.mark.long  # two attempts of two ranks
def test_torchrun_starts_again_and_the_run_goes_on(tmp_path: Path) -> None:
    program = program_of(["train", *TINY, *PAGES, "--steps", "40", "--out", "run"], goes_on=True)
    program = (*program, "--save-every", "5", "--trace-steps", "0")
    text = text_for(Request("torchrun", program, ranks_per_node=2, restarts=1))
    (tmp_path / "run.sh").write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "run.sh"],
        cwd=tmp_path,
        env=environment() | {"PATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    run = Run(process, tmp_path / "run", 0)
    run.wait_for_checkpoint(5, limit_s=120)
    kill(run.ranks()[1])
    ended = run.finish(limit_s=120)
    assert ended.code == 0, ended.err
    assert "resuming after step" in ended.err
    assert len(run.losses()) == 40


RUNS = {"slurm": _run_slurm, "torchrun": _run_torchrun, "k8s": _run_k8s, "sky": _run_sky}


TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > said.$$
"""


@pytest.mark.parametrize("kind", RUNS)
def test_torchrun_is_given_every_word_on_two_hosts(kind: str, tmp_path: Path) -> None:
    _put(tmp_path, "torchrun", TORCHRUN)
    RUNS[kind](tmp_path, PROGRAM)
    first, second = (file.read_text().splitlines() for file in tmp_path.glob("said.*"))
    assert tuple(first[-len(PROGRAM) :]) == tuple(second[-len(PROGRAM) :]) == PROGRAM
    options = shlex.join(first[: -len(PROGRAM)])
    assert re.search(EXPECTED[kind], options), options


EXPECTED = {
    "slurm": r"^--nnodes 2 --nproc-per-node 1 --rdzv-id (\d+) .* --rdzv-endpoint localhost:\d+$",
    "torchrun": r"^--nnodes 2 --nproc-per-node 1 .* --rdzv-endpoint localhost:\d+$",
    "k8s": r"^$",
    "sky": r"^--nnodes 2 --node-rank [01] --nproc-per-node 1 --master-addr 127.0.0.1 --master-port \d+$",
}


@pytest.mark.long  # each starts torchrun twice, which takes seconds
@pytest.mark.parametrize("kind", RUNS)
def test_a_script_runs_on_two_hosts(kind: str, tmp_path: Path) -> None:
    (tmp_path / "who.py").write_text(WHO)
    RUNS[kind](tmp_path, ("who.py", "it's $HOME"))
    found = {(tmp_path / f"rank{rank}").read_text() for rank in range(2)}
    assert found == {"0 2 0 1 it's $HOME", "1 2 0 1 it's $HOME"}


@pytest.mark.long  # a training run for each of them
@pytest.mark.parametrize("kind", RUNS)
def test_fullshard_trains_on_two_hosts(kind: str, tmp_path: Path) -> None:
    program = program_of(["train", *SHORT, "--out", "run"], goes_on=True)
    RUNS[kind](tmp_path, program)
    assert len(losses(tmp_path / "run")) == 3
    RUNS[kind](tmp_path, program)  # started again, it finds that all is done
    assert len(losses(tmp_path / "run")) == 3


_NO_RAY = "Ray is not installed: pip install 'ray[train]'"


@pytest.mark.long  # Ray takes half a minute to start a cluster
def test_ray_runs_what_is_printed_for_it(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason=_NO_RAY)
    program = program_of(["train", *SHORT, "--out", "run"], goes_on=True)
    text = text_for(Request("ray", program, ranks_per_node=2, on_cpu=True))
    (tmp_path / "run.py").write_text(text)
    _run(tmp_path, [sys.executable, "run.py"], variables=[{}])
    assert len(losses(tmp_path / "run")) == 3


@pytest.mark.long  # Ray takes half a minute to start a cluster
@pytest.mark.parametrize("what", ["function", "train"])
def test_ray_goes_on_after_a_worker_is_killed(what: str, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason=_NO_RAY)
    example = str(ROOT / "examples" / "ray_train.py")
    line = [sys.executable, example, what, "--kill-once", "--steps", "40", "--out", "runs"]
    done = subprocess.run(
        line,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoints/step-00000040" in done.stdout
    said = done.stdout + done.stderr
    assert re.search(
        r"begins after step (5|10)\b" if what == "function" else "resuming after", said
    )


# The page


def test_the_page_shows_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "launch.md").read_text()
    shown = re.findall(r"```sh\n(fullshard launch .*)\n```\n+```\w+\n((?:.*\n)*?)```\n", text)
    assert {shlex.split(line)[3] for line, _ in shown} == {"slurm", "k8s", "ray", "sky", "torchrun"}
    for line, block in shown:
        words, _, _ = line.partition(" > ")
        assert block == _printed(monkeypatch, *shlex.split(words)[2:]), words


def test_what_a_pod_would_lose_is_told() -> None:
    said = []
    for more in ([], ["--volume", "data:/data"]):
        for out in ("runs/x", "/data/x", "/database/x"):
            line = ["launch", "--print", "k8s", "--image", "x", *more, "--", "train", "--out", out]
            done = CliRunner().invoke(cli.app, line)
            assert done.exit_code == 0
            said.append("is lost with it" in done.stderr)
    assert said == [True, True, True, True, False, True]


def test_a_resumed_run_stays_in_its_folder() -> None:
    line = ["launch", "--print", "slurm", "--", "train", "--out", "a", "--resume", "b"]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 2
    assert "leave out --out" in done.output
