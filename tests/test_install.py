"""`install()` and `python -m fullshard.run`: programs written for PyTorch's FSDP2 run on ours."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
)

import fullshard
from fullshard.run import main
from tests.fresh import Ended, in_fresh_ranks, in_warm_forks
from tests.training import assert_equal, full_parameters, local_gradients, make_batch, mean_square

ENGINE = "torch.distributed.fsdp._fully_shard"
PUBLIC = torch.distributed.fsdp._fully_shard.__all__

# A library that knows nothing of fullshard.
LIBRARY = """
from torch.distributed.fsdp import fully_shard as fs, FSDPModule, MixedPrecisionPolicy
from torch.distributed._composable.fsdp import fully_shard
import torch.distributed.fsdp as fsdp

def shard(model, **options):
    for layer in model:
        fs(layer, **options)
    return fsdp.fully_shard(model, **options)

def is_sharded(model):
    return isinstance(model, FSDPModule) and isinstance(model, fsdp.FSDPModule)
"""


def _library() -> Any:
    module = types.ModuleType("library")
    sys.modules["library"] = module
    exec(LIBRARY, module.__dict__)
    return module


def _torch_names() -> dict[tuple[str, str], int]:
    """Return the identity of everything that torch's and this folder's modules name."""
    for package in ("torch.distributed.fsdp", "torch.distributed._composable"):
        for info in pkgutil.walk_packages(sys.modules[package].__path__, f"{package}."):
            importlib.import_module(info.name)
    return {
        (module_name, name): id(value)
        for module_name, module in sys.modules.items()
        if module_name.startswith(("torch", "tests", "library"))
        for name, value in list(vars(module).items())
    }


# Names


@in_fresh_ranks(1)
def test_every_public_name_becomes_ours() -> None:
    theirs = {name: getattr(torch.distributed.fsdp, name) for name in PUBLIC}
    fullshard.install()
    for name in PUBLIC:
        ours = getattr(fullshard, name)
        assert ours is not theirs[name]
        for path in ("torch.distributed.fsdp", ENGINE):
            assert getattr(importlib.import_module(path), name) is ours


@in_fresh_ranks(1)
def test_names_that_this_torch_lacks_are_skipped() -> None:
    api = importlib.import_module(f"{ENGINE}._fsdp_api")
    collectives = importlib.import_module(f"{ENGINE}._fsdp_collectives")
    for module, name in ((api, "DataParallelMeshDims"), (collectives, "SymmMemAllGather")):
        if hasattr(module, name):  # as in torch 2.11
            delattr(module, name)
    fullshard.install()
    assert torch.distributed.fsdp.fully_shard is fullshard.fully_shard
    assert not hasattr(api, "DataParallelMeshDims")
    assert not hasattr(collectives, "SymmMemAllGather")
    fullshard.uninstall()
    assert torch.distributed.fsdp.fully_shard is not fullshard.fully_shard


@in_fresh_ranks(1)
def test_composable_package_is_ours_too() -> None:
    from torch.distributed._composable import fsdp
    from torch.distributed._composable.fsdp import fully_shard as imported_before

    assert imported_before is not fullshard.fully_shard
    fullshard.install()
    assert fsdp.fully_shard is fullshard.fully_shard
    assert fsdp.FSDPModule is fullshard.FSDPModule
    assert fsdp.MixedPrecisionPolicy is fullshard.MixedPrecisionPolicy
    assert importlib.import_module(f"{fsdp.__name__}.fully_shard").fully_shard is fsdp.fully_shard


@pytest.mark.parametrize("first", ["library", "install"])
@in_fresh_ranks(1)
def test_library_imported_before_or_after_gets_our_names(first: str) -> None:
    if first == "install":
        fullshard.install()
    library = _library()
    fullshard.install()
    assert library.fs is fullshard.fully_shard
    assert library.fully_shard is fullshard.fully_shard
    assert library.FSDPModule is fullshard.FSDPModule
    assert library.MixedPrecisionPolicy is fullshard.MixedPrecisionPolicy
    assert library.fsdp is torch.distributed.fsdp


@in_fresh_ranks(1)
def test_same_names_for_other_things_are_left_alone() -> None:
    library = _library()
    other = object()
    library.fully_shard = other
    fullshard.install()
    assert library.fully_shard is other
    fullshard.uninstall()
    assert library.fully_shard is other


@in_fresh_ranks(1)
def test_torch_s_own_modules_see_our_classes() -> None:
    from torch.distributed._tools import fsdp2_mem_tracker
    from torch.distributed.pipelining import schedules, stage

    modules = (stage, schedules, fsdp2_mem_tracker)
    # Which names each of them has depends on the version.
    theirs = {
        (module, name)
        for module in modules
        for name in PUBLIC
        if getattr(module, name, None) is getattr(torch.distributed.fsdp, name)
    }
    assert {(module, "FSDPModule") for module in modules} < theirs
    assert (schedules, "UnshardHandle") in theirs
    fullshard.install()
    for module, name in theirs:
        assert getattr(module, name) is getattr(fullshard, name), name


@in_fresh_ranks(1)
def test_compile_finds_our_sharded_classes() -> None:
    fullshard.install()
    layer = fullshard.fully_shard(nn.Linear(4, 4))
    lookups = importlib.import_module(f"{ENGINE}._fully_shard")  # as torch._dynamo.guards does
    assert lookups.get_cls_to_fsdp_cls()[nn.Linear] is type(layer)
    assert type(layer)(4, 4).__class__ is nn.Linear
    with lookups.disable_fsdp_module_new_init():
        assert isinstance(type(layer).__new__(type(layer)), fullshard.FSDPModule)


# Undoing


@in_fresh_ranks(1)
def test_uninstall_restores_every_name() -> None:
    _library()
    before = _torch_names()
    fullshard.install()
    during = _torch_names()
    assert sum(during[name] != value for name, value in before.items()) > 2 * len(PUBLIC)
    fullshard.uninstall()
    assert _torch_names() == before


@in_fresh_ranks(1)
def test_installing_twice_is_undone_by_one_uninstall() -> None:
    before = _torch_names()
    fullshard.install()
    fullshard.install()
    fullshard.uninstall()
    assert _torch_names() == before
    fullshard.uninstall()
    assert _torch_names() == before
    fullshard.install()
    assert torch.distributed.fsdp.fully_shard is fullshard.fully_shard


@in_fresh_ranks(1)
def test_torch_s_engine_works_after_uninstall() -> None:
    fullshard.install()
    ours = torch.distributed.fsdp.fully_shard(nn.Linear(4, 4))
    fullshard.uninstall()
    theirs = torch.distributed.fsdp.fully_shard(nn.Linear(4, 4))
    assert not isinstance(theirs, fullshard.FSDPModule)
    for layer in (ours, theirs):
        layer(torch.ones(2, 4)).sum().backward()
        torch.testing.assert_close(layer.bias.grad.full_tensor(), torch.full((4,), 2.0))


@in_fresh_ranks(1)
def test_install_refuses_while_torch_s_wrapper_is_in_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank shards nothing
        model = torch.distributed.fsdp.FullyShardedDataParallel(
            nn.Linear(2, 2), device_id=torch.device("cpu")
        )
    with pytest.raises(fullshard.StateError, match=r"already.*Linear.*install\(\) before"):
        fullshard.install()
    del model
    fullshard.install()
    ours = fullshard.FullyShardedDataParallel
    assert torch.distributed.fsdp.FullyShardedDataParallel is ours
    assert torch.distributed.checkpoint.state_dict.FSDP is ours


@in_fresh_ranks(1)
def test_install_refuses_once_torch_s_engine_is_in_use() -> None:
    torch.distributed.fsdp.fully_shard(nn.Linear(4, 4))
    before = _torch_names()
    with pytest.raises(fullshard.StateError, match=r"already.*Linear.*install\(\) before"):
        fullshard.install()
    assert _torch_names() == before
    assert torch.distributed.fsdp.fully_shard is not fullshard.fully_shard


# What programs do with it


def _gradients(shard: Any, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 3))
    shard(model, **options)
    mean_square(model(make_batch(16, seed=torch.distributed.get_rank()))).backward()
    return local_gradients(model)


@in_fresh_ranks(2)
def test_library_that_shards_runs_on_our_engine() -> None:
    library = _library()
    fullshard.install()
    policy = library.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = library.shard(nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 3)), mp_policy=policy)
    assert library.is_sharded(model)
    assert model(make_batch(16)).dtype == torch.bfloat16
    assert len(fullshard.describe(model).units) == 2
    handle = model[0].unshard(async_op=True)
    assert isinstance(handle, torch.distributed.fsdp.UnshardHandle)
    handle.wait()


@in_fresh_ranks(2)
def test_gradients_are_those_of_torch_s_engine() -> None:
    library = _library()
    fullshard.install()
    ours = _gradients(library.shard)
    fullshard.uninstall()
    assert_equal(ours, _gradients(library.shard), rtol=1e-5, atol=1e-6)


@in_fresh_ranks(2)
def test_checkpoint_functions_read_and_write_the_model() -> None:
    fullshard.install()
    model = _library().shard(nn.Sequential(nn.Linear(16, 7), nn.Linear(7, 3)))
    whole = full_parameters(model)
    options = StateDictOptions(full_state_dict=True)
    state, _ = get_state_dict(model, torch.optim.AdamW(model.parameters()), options=options)
    assert_equal(state, whole)
    twice = {name: 2 * value for name, value in whole.items()}
    set_model_state_dict(model, dict(twice), options=options)
    assert_equal(full_parameters(model), twice)


# python -m fullshard.run


def _run_in_fork(folder: Path, *arguments: str) -> Ended:
    """Run what `python -m fullshard.run` runs."""
    (done,) = in_warm_forks(
        f"""
import runpy, sys
sys.argv = ["run", *{arguments!r}]
sys.path[0] = {str(folder)!r}
runpy.run_module("fullshard.run", run_name="__main__")
""",
        folder=folder,
    )
    return done


SCRIPT = """
import sys
from torch.distributed.fsdp import fully_shard
import neighbour

if __name__ == "__main__":
    print(fully_shard.__module__.split(".")[0], neighbour.__name__, *sys.argv)
    sys.exit(7)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Write a folder with a package of two modules."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "neighbour.py").touch()
    (tmp_path / "package" / "script.py").write_text(SCRIPT)
    relative = SCRIPT.replace("import neighbour", "from package import neighbour")
    (tmp_path / "package" / "module.py").write_text(relative)
    return tmp_path


def test_script_runs_as_python_would_run_it(package: Path) -> None:
    path = str(Path("package") / "script.py")
    done = _run_in_fork(package, path, "--comm", "none", "-m", "x", "--help")
    assert done.out.split() == [
        "fullshard", "neighbour", path, "--comm", "none", "-m", "x", "--help",
    ]  # fmt: skip
    assert done.code == 7
    assert "Traceback" not in done.err


def test_module_runs_as_python_would_run_it(package: Path) -> None:
    done = _run_in_fork(package, "-m", "package.module", "--lr", "1e-3")
    path = str(package / "package" / "module.py")
    assert done.out.split() == ["fullshard", "package.neighbour", path, "--lr", "1e-3"], done.err
    assert done.code == 7


def test_exception_of_the_script_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('of the script')\n")
    done = _run_in_fork(tmp_path, "script.py")
    assert done.code == 1
    assert done.err.rstrip().endswith("ValueError: of the script")
    assert "script.py" in done.err
    assert "run_cli.py" not in done.err, "frames that are not the script's are folded"


def _end(*arguments: str) -> Any:
    """Return how `main` leaves before it has changed anything."""
    with mock.patch.object(sys, "argv", ["run", *arguments]), pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py"], "write -m absent.py"),
        (["--comm", "pigeon", "script.py"], "--comm: invalid choice: 'pigeon'"),
        (["-m", "nosuch.train"], "-m nosuch.train: "),
        ([], "name a script, or a module with -m"),
    ],
    ids=["path", "comm", "module", "nothing"],
)
def test_wrong_arguments_end_with_code_2_and_a_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _end(*arguments) == 2
    assert message in capsys.readouterr().err
    assert torch.distributed.fsdp.fully_shard is not fullshard.fully_shard


def test_help_shows_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert _end("--help") == 0
    text = capsys.readouterr().out
    assert "fullshard run --ranks 2 --trace" in text
    assert "-m fullshard.run -m pkg.train" in text
    assert "--comm" in text


SPAWNING = """
import sys
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

def work(rank, method):
    import fullshard
    comm = fullshard.set_default_comm(None).value
    sys.stdout.write(f"{method}: {fully_shard.__module__} {comm}\\n")

if __name__ == "__main__":
    method = sys.argv[1]
    mp.start_processes(work, args=(method,), nprocs=1, start_method=method)
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_processes_that_a_script_starts_are_installed_too(tmp_path: Path, method: str) -> None:
    (tmp_path / "start.py").write_text(SPAWNING)
    done = _run_in_fork(tmp_path, "--comm", "process_group", "start.py", method)
    assert done.code == 0, done.err
    assert done.out == f"{method}: fullshard.fsdp2.fully_shard process_group\n"


LEAVING = """
import atexit, sys
import torch.distributed as dist

destroy = dist.destroy_process_group
dist.destroy_process_group = lambda: (sys.stdout.write("destroyed\\n"), destroy())
atexit.register(lambda: sys.stdout.write(f"still there: {dist.is_initialized()}\\n"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
end = sys.argv[1]
if end == "destroyed":
    dist.destroy_process_group()
elif end == "failed":
    raise ValueError
elif end != "left":
    sys.exit(int(end))
"""


def test_a_group_that_a_script_leaves_is_destroyed_if_it_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "leave.py"
    script.write_text(LEAVING)
    is_left, is_destroyed = "still there: True", "destroyed"
    expected = {
        "left": (0, [is_left, is_destroyed]),
        "0": (0, [is_left, is_destroyed]),
        "destroyed": (0, [is_destroyed, "still there: False"]),
        "failed": (1, [is_left]),
        "3": (3, [is_left]),
    }
    for end, result in expected.items():
        run = _run_in_fork(tmp_path, str(script), end)
        assert (run.code, run.out.splitlines()) == result, end
