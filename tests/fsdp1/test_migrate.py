"""`migrate_report`: the program it writes trains as the wrapped model does."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from typer.testing import CliRunner

import fullshard
from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    CustomPolicy,
    FSDPModule,
    MigrationReport,
    MixedPrecision,
    ModuleWrapPolicy,
    ReplicateModule,
    ShardingStrategy,
    StateError,
    migrate_report,
)
from fullshard import FullyShardedDataParallel as FSDP  # noqa: N817 -- as everybody does
from fullshard.migrate.translation import PROGRAM
from fullshard.tools import cli
from fullshard.tools.exits import Exit
from tests.harness import mesh_of, on_ranks
from tests.models import Attention, Block, FeedForward, Transformer, make_problem
from tests.tools.processes import environment
from tests.training import OPTIMIZERS, my_part

ROOT = Path(__file__).parents[2]
BLOCKS = ModuleWrapPolicy({Block})
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Normalised(nn.Module):
    """Batch statistics and buffers beside linear layers. (n, 8) -> (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = FeedForward(8, 16)
        self.norm = nn.BatchNorm1d(8)
        self.down = FeedForward(8, 16)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))) * self.scale


def _wrap(module: nn.Module, **options: Any) -> FSDP:
    """Wrap without the warnings of strategies and classes that PyTorch warns about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(module, **options)


def _blocks_alone(model: Transformer) -> nn.Module:
    """Wrap inside of a root that is not wrapped."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = _wrap(block)
    model.head = _wrap(model.head, sharding_strategy=ShardingStrategy.NO_SHARD)
    return model


def _by_hand(model: Transformer) -> nn.Module:
    """Wrap with options that differ, an instance in an instance, and one around a container."""
    for block in model.blocks:
        block.attention = _wrap(block.attention, use_orig_params=True)
        block.feed_forward[2] = _wrap(block.feed_forward[2])
    strategy = ShardingStrategy.SHARD_GRAD_OP
    for number, block in enumerate(model.blocks):
        model.blocks[number] = _wrap(checkpoint_wrapper(_wrap(block, sharding_strategy=strategy)))
    model.blocks = _wrap(model.blocks)
    # The wrapper does not iterate: forward takes the list inside.
    model.blocks.__class__ = type("Iterable", (FSDP,), {"__iter__": lambda s: iter(s.module)})
    return _wrap(model, ignored_modules=[model.head], forward_prefetch=True)


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "blocks": lambda model: _wrap(model, auto_wrap_policy=BLOCKS),
    "bf16": lambda model: _wrap(model, auto_wrap_policy=BLOCKS, mixed_precision=BF16),
    "casting": lambda model: _wrap(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Attention, FeedForward}),
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, cast_forward_inputs=True, cast_root_forward_inputs=False
        ),
    ),
    "offload": lambda model: _wrap(
        model,
        auto_wrap_policy=BLOCKS,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=True),
        ignored_states=[model.position, model.blocks[1].norm1.weight],
        use_orig_params=True,
    ),
    "replicated": lambda model: _wrap(
        model, auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.NO_SHARD
    ),
    "hybrid": lambda model: _wrap(
        model, auto_wrap_policy=BLOCKS, sharding_strategy=ShardingStrategy.HYBRID_SHARD
    ),
    "hybrid_mesh": lambda model: _wrap(
        model,
        auto_wrap_policy=BLOCKS,
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        device_mesh=mesh_of(2, 1),
    ),
    "strategies": lambda model: _wrap(
        model,
        auto_wrap_policy=CustomPolicy(
            lambda m: (
                {"sharding_strategy": ShardingStrategy.NO_SHARD}
                if m is model.blocks[0]
                else isinstance(m, Block)
            )
        ),
    ),
    "blocks_alone": _blocks_alone,
    "by_hand": _by_hand,
}


def _train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[float]:
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for _ in range(4):
        outputs = model(my_part(inputs)).float()
        targets_here = my_part(targets)
        if targets.is_floating_point():
            loss = nn.functional.mse_loss(outputs, targets_here)
        else:
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), targets_here.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _follow(report: MigrationReport, model: nn.Module) -> nn.Module:
    """Run the program of a report on a model."""
    exec(compile(report.code, "report", "exec"), {"model": model})
    return model


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_the_program_trains_to_the_same_losses(name: str) -> None:
    problem, fresh = make_problem("transformer"), make_problem("transformer")
    wrapped = MODELS[name](problem.model)
    sharded = _follow(migrate_report(wrapped), fresh.model)
    expected = _train(wrapped, problem.inputs, problem.targets)
    assert _train(sharded, problem.inputs, problem.targets) == expected
    assert expected[-1] < expected[0]


@on_ranks(2)
def test_batch_norm_in_float32_and_buffers_are_the_same() -> None:
    options = {
        "auto_wrap_policy": ModuleWrapPolicy({FeedForward}),
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    }
    torch.manual_seed(1)
    wrapped = _wrap(Normalised(), **options)
    report = migrate_report(wrapped)
    torch.manual_seed(1)
    sharded = _follow(report, Normalised())
    assert "no equivalent: cast buffers once" in str(report)
    assert "output_dtype=torch.bfloat16" in report.code
    batch, targets = torch.randn(12, 8), torch.randn(12, 8)
    assert _train(sharded, batch, targets) == _train(wrapped, batch, targets)
    assert sharded.scale.dtype == torch.bfloat16
    assert sharded.norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(sharded.norm.running_mean, wrapped.norm.running_mean)


@on_ranks(2)
def test_calls_are_grouped_bottom_up() -> None:
    model = make_problem("transformer").model
    report = migrate_report(_by_hand(model))
    assert report.code.splitlines()[-7:] == [
        "for i in range(2):  # Attention",
        '    fully_shard(model.get_submodule(f"blocks.{i}.attention"))',
        "for i in range(2):  # Linear",
        '    fully_shard(model.get_submodule(f"blocks.{i}.feed_forward.2"))',
        "for i in range(2):  # Block",
        '    fully_shard(model.get_submodule(f"blocks.{i}"), reshard_after_forward=False)',
        "fully_shard(model, ignored_params=ignored)  # Transformer",
    ]
    notes = {each.path: each.note for each in report.instances if not each.call}
    assert notes.keys() == {"blocks", "blocks.0", "blocks.1"}


@on_ranks(2)
def test_what_the_calls_make_is_what_was_wrapped() -> None:
    fresh = make_problem("transformer").model
    report = migrate_report(MODELS["blocks_alone"](make_problem("transformer").model))
    _follow(report, fresh)
    assert isinstance(fresh.blocks[0], FSDPModule)
    assert isinstance(fresh.head, ReplicateModule)
    assert not isinstance(fresh, FSDPModule)
    assert [each.path for each in report.instances] == ["blocks.0", "blocks.1", "head"]


@on_ranks(4)
def test_meshes_follow_the_groups() -> None:
    def mesh_of_report(**options: Any) -> str:
        (line,) = [
            line
            for line in migrate_report(_wrap(nn.Linear(4, 4), **options)).code.splitlines()
            if line.startswith("mesh = ")
        ]
        return line.removeprefix("mesh = ")

    hybrid = ShardingStrategy.HYBRID_SHARD
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    others, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    assert mesh_of_report(process_group=pairs) == (
        'init_device_mesh("cpu", (2, 2), mesh_dim_names=("others", "shard"))["shard"]'
    )
    assert mesh_of_report(process_group=others) == (
        'init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "others"))["shard"]'
    )
    assert mesh_of_report(process_group=(pairs, others), sharding_strategy=hybrid) == (
        'init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))'
    )
    transposed = mesh_of_report(process_group=(others, pairs), sharding_strategy=hybrid)
    assert transposed == (
        'DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))'
    )
    assert "mesh=" not in migrate_report(_wrap(nn.Linear(4, 4))).code


@on_ranks(2)
def test_what_has_no_equivalent_is_said() -> None:
    model = _wrap(
        nn.Linear(4, 4),
        mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    )
    model.register_comm_hook(None, lambda *_: None)
    (instance,) = migrate_report(model).instances
    assert {each.name for each in instance.arguments if not each.has_equivalent} == {
        "mixed_precision.keep_low_precision_grads",
        "backward_prefetch",
        "register_comm_hook",
    }


@on_ranks(2)
def test_the_report_changes_nothing_and_is_json() -> None:
    model = MODELS["bf16"](make_problem("transformer").model)
    report = migrate_report(model)
    assert model._is_root is None
    assert json.loads(json.dumps(report.as_dict()))["code"] == report.code
    assert str(report).endswith(f"```python\n{report.code}```")
    assert "blocks.0, blocks.1 (Block, 2 instances)" in str(report)


@on_ranks(1)
def test_one_rank_says_that_the_strategy_is_not_known() -> None:
    report = migrate_report(
        _wrap(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    )
    strategy = report.instances[0].arguments[0]
    assert strategy.value == "NO_SHARD"
    assert strategy.becomes.startswith("what resulted")
    assert "asked for is not known" in report.code


def test_a_model_without_instances_is_refused() -> None:
    with pytest.raises(StateError, match="Nothing in Linear is wrapped"):
        migrate_report(nn.Linear(2, 2))


@on_ranks(1)
def test_pytorchs_wrapper_is_recognised() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(StateError, match=r"PyTorch's .* Call fullshard\.install\(\)"):
        migrate_report(model)


def _names() -> set[str]:
    """Return every argument and every public method and property."""
    arguments = set(inspect.signature(FSDP).parameters) - {"module"}
    return arguments | {name for name in vars(FSDP) if not name.startswith("_")}


@on_ranks(2)
def test_every_argument_and_method_is_in_the_report() -> None:
    said = {*PROGRAM, *migrate_report(_wrap(nn.Linear(4, 4))).instances[0].arguments}
    names = {name for each in said for name in each.name.split(", ")}
    assert _names() <= names


class TestDocumentation:
    text = (ROOT / "docs" / "migrating.md").read_text()

    def test_every_argument_and_method_is_there(self) -> None:
        prose = re.sub(r"```.*?```", "", self.text, flags=re.DOTALL)
        documented = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", prose))))
        assert _names() <= documented

    @pytest.mark.long  # the tests of this file do the like in ranks that are there already
    def test_the_example_runs_on_two_ranks(self, tmp_path: Path) -> None:
        blocks = re.findall(r"```python\n(.*?)```", self.text, re.DOTALL)
        (example,) = [block for block in blocks if "init_process_group" in block]
        script = tmp_path / "example.py"
        script.write_text(example)
        done = _torchrun(str(script))
        assert done.returncode == 0, done.stderr
        assert "fully_shard(model" in done.stdout


# The command

PROGRAM_FILE = """
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

def wrapped():
    print("building")
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 4))
    return FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

def plain():
    return nn.Linear(4, 4)

def number():
    return 1
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a user's module, in the current folder."""
    name = "users_program_of_" + re.sub(r"\W", "_", tmp_path.name)
    (tmp_path / f"{name}.py").write_text(PROGRAM_FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield name
    sys.modules.pop(name, None)
    fullshard.uninstall()


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2", *arguments),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["migrate-report", *arguments])


def test_the_command_prints_the_report(program: str) -> None:
    result = _command(f"{program}:wrapped")
    assert result.exit_code == Exit.OK, result.output
    assert result.stdout.startswith("instances of FullyShardedDataParallel: 2; calls: 2")
    assert result.stdout.endswith("fully_shard(model)  # Sequential\n```\n")


def test_the_command_prints_json_alone(program: str) -> None:
    result = _command(f"{program}:wrapped", "--json")
    assert result.exit_code == Exit.OK, result.output
    report = json.loads(result.stdout)
    assert [each["path"] for each in report["instances"]] == ["", "0"]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("{}", Exit.USAGE, "expected MODULE:FUNCTION"),
        (":wrapped", Exit.USAGE, "expected MODULE:FUNCTION"),
        ("{}:nothing", Exit.USAGE, "'nothing'; it has number, plain, wrapped"),
        ("missing_module.inside:f", Exit.USAGE, "no module 'missing_module'"),
        ("{}:number", Exit.USAGE, "returned int"),
        ("{}:plain", Exit.FAILED, "Nothing in Linear is wrapped"),
    ],
)
def test_what_cannot_be_reported_is_said(program: str, target: str, code: Exit, said: str) -> None:
    result = _command(target.format(program))
    assert result.exit_code == code, result.output
    assert said in result.output


@pytest.mark.long  # the documentation's example runs under torchrun as well
def test_under_torchrun_the_strategy_is_the_one_asked_for(program: str) -> None:
    done = _torchrun("-m", "fullshard", "migrate-report", f"{program}:wrapped", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["instances"][0]["call"] == "fully_shard(model, reshard_after_forward=False)"
