"""Changes of the process: made in one file, when they are needed, listed, and undone."""

from __future__ import annotations

import ast
import gc
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard import process_hooks
from fullshard.process_hooks import (
    BEFORE_STEP,
    COLLECTIONS,
    Hook,
    Replacements,
    installed,
    naming_groups,
    set_signal,
    start_thread,
)
from tests.api import Api
from tests.fresh import in_warm_forks
from tests.harness import on_ranks
from tests.test_architecture import MODULES, ROOT, _name, _nodes, _room, every_module

# Calls that change the process, and names that are changed by an assignment or by calling their methods.
CALLS = {
    "register_optimizer_step_pre_hook",
    "register_optimizer_step_post_hook",
    "register_module_parameter_registration_hook",
    "register_module_module_registration_hook",
    "register_module_buffer_registration_hook",
    "register_module_forward_pre_hook",
    "register_module_forward_hook",
    "register_module_full_backward_pre_hook",
    "register_module_full_backward_hook",
    "atexit.register",
    "os.register_at_fork",
    "Finalize",
    "Thread",
    "signal.signal",
    "gc.disable",
    "gc.enable",
    "gc.freeze",
    "gc.set_threshold",
    "warnings.filterwarnings",
    "warnings.simplefilter",
    "faulthandler.enable",
    "set_frame_strategy",
    "attach_out_of_memory_observer",
    "dtensor_handlers.setdefault",
    "register_no_typecheck",
    "register_local_autograd_function",
}
OBJECTS = ("sys.excepthook", "sys.meta_path", "sys.path_hooks", "gc.callbacks")
# Commands are processes of their own; `fullshard.run` is one in which a script runs as the main program.
ELSEWHERE = tuple(_name(m) for m in MODULES if _room(m) in ("tools", "process_hooks"))


@every_module(but=(*ELSEWHERE, "tools/run_cli.py"))
def test_no_other_file_changes_the_process(module: Path) -> None:
    nodes = _nodes(module)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found = []
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            changes = name in CALLS or name.rpartition(".")[2] in CALLS
            changes |= any(name.startswith(f"{each}.") for each in OBJECTS)
            found += [name] if changes else []
        for target in _assigned(node):
            name = ast.unparse(target)
            owner = target
            while isinstance(owner, (ast.Attribute, ast.Subscript)):
                owner = owner.value
            of_another = owner is not target and ast.unparse(owner) in imported
            # `os.environ[name] = value` hands something to child processes.
            if (of_another and not name.startswith("os.environ")) or name.startswith(OBJECTS):
                found.append(name)
    assert not found


def _assigned(node: ast.AST) -> list[Any]:
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return targets
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return [target]
    return []


def test_every_hook_is_in_the_table_of_the_docs() -> None:
    table = (ROOT / "docs/design.md").read_text().split("## What changes in the process")[1]
    table = table.split("\n## ")[0]
    hooks = [each for each in vars(process_hooks).values() if isinstance(each, Hook)]
    assert len(hooks) > 8
    assert not [each._where for each in hooks if f"| {each._where} " not in table]


def test_what_is_installed_is_listed_when_it_is_and_not_before() -> None:
    (done,) = in_warm_forks(
        """
import sys, torch, torch.distributed as dist
from torch import nn
hook = sys.__excepthook__
import fullshard
from fullshard.process_hooks import installed
fullshard.fully_shard
print(*{each.what for each in installed()}, sys.excepthook is hook)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(2, 2)
fullshard.fully_shard(model)
print(*sorted({each.what for each in installed()}), sep="\\n")
print(str(installed()[-1]).count(":") >= 2, sys.excepthook is hook)
"""
    )
    assert done.code == 0, done.err
    before, *during, last = done.out.splitlines()
    assert before.split() == ["torch.compile,", "of", "functions", "of", "fullshard", "True"]
    assert {
        "each step of any optimizer, before",
        "each step of any optimizer, after",
        "each registration of a parameter in any module",
        "sys.excepthook",
        "malloc's threshold, 32 MiB",
    } <= set(during)
    assert last == "True False"


def test_one_hook_calls_all_in_order_and_goes_with_the_last() -> None:
    calls: list[str] = []

    def first(*_: Any) -> None:
        calls.append("first")

    def second(*_: Any) -> None:
        calls.append("second")

    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    num_before = len(hooks)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    is_there = BEFORE_STEP.is_installed
    with BEFORE_STEP.calling(first, "a test"):
        BEFORE_STEP.add(first, "a test")  # has no effect
        with BEFORE_STEP.calling(second, "another"):
            optimizer.step()
            assert len(hooks) == num_before + (not is_there)
            assert {"a test", "another"} <= {each.why for each in installed()}
        optimizer.step()
    optimizer.step()
    assert calls == ["first", "second", "first"]
    assert len(hooks) == num_before
    assert "a test" not in {each.why for each in installed()}


def test_collections_are_heard_of_as_long_as_somebody_wants_to() -> None:
    before = [*gc.callbacks]
    phases: list[str] = []

    def hear(phase: str, _: Any) -> None:
        phases.append(phase)

    with COLLECTIONS.calling(hear, "a test"):
        gc.collect()
    assert {*phases} == {"start", "stop"}
    assert gc.callbacks == before


def test_names_have_their_values_again() -> None:
    names = Replacements("a test")
    original = gc.collect
    names.set(gc, "collect", None)
    names.set(sys, "byteorder", "none")
    assert [each.what for each in installed() if each.why == "a test"] == [
        "gc.collect, sys.byteorder"
    ]
    assert names
    names.undo()
    assert gc.collect is original
    assert sys.byteorder != "none"
    assert not names
    assert not [each for each in installed() if each.why == "a test"]


def test_signals_and_threads_are_listed_while_they_are_ours() -> None:
    def handler(*_: Any) -> None: ...

    def whys() -> set[str]:
        return {each.why for each in installed()}

    handler.__module__ = "fullshard.a_test"
    before = signal.getsignal(signal.SIGUSR2)
    set_signal(signal.SIGUSR2, handler, why="a test of signals")
    assert "a test of signals" in whys()
    set_signal(signal.SIGUSR2, before)
    assert "a test of signals" not in whys()
    ends = threading.Event()
    thread = start_thread(ends.wait, name="fullshard-test", why="a test of threads")
    assert "a test of threads" in whys()
    ends.set()
    thread.join()
    assert "a test of threads" not in whys()


@pytest.mark.skipif(process_hooks.process_group_name is None, reason="torch names no groups")
def test_only_the_thread_that_names_a_group_gives_it_the_name() -> None:
    name_group: Any = torch.distributed.distributed_c10d._process_group_name
    with naming_groups("mine") as can_name:
        assert can_name
        c10d: Any = torch.distributed.distributed_c10d
        name_group = c10d._process_group_name
        others: list[str] = []
        thread = threading.Thread(
            target=lambda: others.append(name_group([0], use_hashed_name=True))
        )
        thread.start()
        thread.join()
        assert name_group([0], use_hashed_name=True) == "mine"
    assert "mine" not in (others[0], name_group([0], use_hashed_name=True))


@on_ranks(1)
@pytest.mark.ours("process hooks")
def test_a_model_that_trains_adds_nothing_per_model(api: Api) -> None:
    def train() -> list[Any]:
        model = nn.Linear(2, 2)
        api.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return installed()

    assert train() == train()


def test_it_is_reached_from_the_package() -> None:
    assert fullshard.process_hooks.installed is installed
