"""The shape of the source tree, by reading it: who imports whom, and what is used where."""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "fullshard"
MODULES = sorted(SOURCE.rglob("*.py"))
PACKAGES = [module for module in MODULES if module.name == "__init__.py"]

# Every room and top-level file, and what it may import from the package (its own room always).
# `__init__` is the package itself, which shows the names of `public`.
BASE = {"errors", "json_files", "policies", "process_hooks"}
NEAR_TORCH = BASE | {"torch_private"}
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": {"public", "versions"},
    "__main__": {"tools", "versions"},
    "public": BASE
    | {"faces", "comm", "drop_in", "engine", "fsdp1", "fsdp2", "migrate", "optim", "state"}
    | {"batches", "checkpoint", "compare", "convert", "deferred", "launching"}
    | {"live", "planning", "watch"},
    "errors": set(),
    "host": set(),
    "json_files": set(),
    "local_ranks": set(),
    "policies": {"errors"},
    "versions": set(),
    "torch_private": {"versions"},
    "process_hooks": {"torch_private"},
    "plan": {"errors", "json_files"},
    "planning": NEAR_TORCH | {"models", "plan", "versions"},
    "peers": {"errors", "host", "local_ranks", "process_hooks", "torch_private"},
    "comm": NEAR_TORCH | {"host", "peers", "plan"},
    "engine": NEAR_TORCH | {"comm", "host", "peers", "plan", "versions"},
    "faces": NEAR_TORCH | {"engine", "plan"},
    "checkpoint": BASE | {"host", "comm", "engine", "peers", "plan", "state", "versions"},
    "convert": BASE | {"checkpoint", "plan", "state"},
    "deferred": NEAR_TORCH | {"engine", "plan", "state"},
    "compare": BASE | {"checkpoint", "engine", "peers", "plan", "state", "versions"},
    "batches": NEAR_TORCH | {"comm", "engine", "peers", "plan", "state"},
    "launching": BASE | {"engine", "local_ranks"},
    "live": NEAR_TORCH | {"comm", "engine", "peers", "plan", "state", "watch"},
    "state": NEAR_TORCH | {"faces", "comm", "engine", "peers", "plan", "versions"},
    "optim": NEAR_TORCH | {"comm", "engine", "host", "plan"},
    "watch": NEAR_TORCH | {"host", "comm", "engine", "optim", "peers", "plan"},
    "fsdp2": BASE | {"faces", "comm", "engine", "peers", "plan", "watch"},
    "fsdp1": NEAR_TORCH | {"faces", "comm", "engine", "host", "fsdp2", "optim", "plan", "state"},
    "migrate": NEAR_TORCH | {"comm", "engine", "fsdp1", "plan", "state"},
    "drop_in": BASE | {"faces", "comm", "engine", "fsdp1", "fsdp2", "optim", "state", "watch"},
    "run": {"tools"},
    "models": {"deferred", "errors", "json_files", "versions"},
    "tools": BASE
    | {
        "__init__",
        "compare",
        "drop_in",
        "host",
        "launching",
        "local_ranks",
        "models",
        "peers",
        "plan",
        "planning",
        "versions",
    },
}

# The same among the rooms inside the engine; its own files tell a step's story and use them all.
IN_ENGINE = {
    "guard": {"runtime"},
    "params": {"guard", "nodes", "runtime"},
    "gradients": {"guard", "observer", "params", "runtime"},
    "checks": {"guard", "params", "restoring", "runtime", "unit", "observer"},
}


def _name(module: Path) -> str:
    return str(module.relative_to(SOURCE))


def _room(module: Path) -> str:
    return module.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache  # several tests look at each module
def _nodes(module: Path) -> list[ast.AST]:
    """Return everything in a module's syntax tree."""
    return list(ast.walk(ast.parse(module.read_text(), filename=str(module))))


@functools.cache
def _imports(module: Path) -> frozenset[str]:
    """Return the full name of everything a module imports, wherever in it."""
    package = ("fullshard", *module.relative_to(SOURCE).parent.parts)
    names: set[str] = set()
    for node in _nodes(module):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, node.module) if node.module else base)
            names.update(f"{prefix}.{alias.name}" for alias in node.names)
    return frozenset(names)


def _rooms_imported(module: Path) -> set[str]:
    rooms = set()
    for name in _imports(module):
        first, *rest = name.split(".")
        if first == "fullshard":
            known = rest and (rest[0] in MAY_IMPORT or (SOURCE / rest[0]).exists())
            rooms.add(rest[0] if known else "__init__")
    return rooms


@functools.cache
def _attributes(module: Path) -> frozenset[str]:
    """Return every dotted name that a module uses, such as `torch.cuda.Stream`."""
    return frozenset(
        ast.unparse(node) for node in _nodes(module) if isinstance(node, ast.Attribute)
    )


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def every_module(
    *, room: str = "", but: tuple[str, ...] = ()
) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Run a test on each module, or those of a room, but for these, and name all on which it fails.

    One test for all: a few thousand items take longer to collect and to report than to run.
    """
    modules = [m for m in MODULES if room in ("", _room(m)) and _name(m) not in but]
    assert modules

    def decorate(test: Callable[[Path], None]) -> Callable[[], None]:
        def test_of_all() -> None:
            failed = []
            for module in modules:
                try:
                    test(module)
                except AssertionError as error:
                    failed.append(f"{_name(module)}: {error}")
            assert not failed, "\n".join(failed)

        return test_of_all

    return decorate


@every_module()
def test_imports_run_one_way(module: Path) -> None:
    room = _room(module)
    assert room in MAY_IMPORT, f"{room}: say in MAY_IMPORT what this new room may import"
    assert _rooms_imported(module) - {room} <= MAY_IMPORT[room]


@pytest.mark.parametrize("room", IN_ENGINE)
def test_rooms_of_the_engine_are_in_one_order(room: str) -> None:
    imported = {
        name.split(".")[2]
        for module in (SOURCE / "engine" / room).glob("*.py")
        for name in _imports(module)
        if name.startswith("fullshard.engine.")
    }
    assert imported - {room} <= IN_ENGINE[room]


@every_module(room="plan")
def test_planning_knows_no_group(module: Path) -> None:
    names = {*_imports(module), *_attributes(module)}
    assert not {name for name in names if _is_within(name, "torch.distributed")}


def test_judging_asks_nobody_and_reads_no_clock() -> None:
    for name in ("diagnosis", "paths", "status"):
        names = _imports(SOURCE / "peers" / f"{name}.py")
        assert not {each for each in names if each.split(".")[0] in ("torch", "time", "socket")}
        assert {each.split(".")[1] for each in names if _is_within(each, "fullshard")} <= {
            "errors",
            "peers",
        }


@every_module(but=("drop_in/install.py",))
def test_pytorchs_fsdp_is_imported_by_install_alone(module: Path) -> None:
    names = {*_imports(module), *_attributes(module)}
    assert not {name for name in names if _is_within(name, "torch.distributed.fsdp")}


# Symmetric memory is CUDA's, and its pool has no interface that is not; so is CUDA IPC. The doctor
# asks for what only CUDA's devices have: names, memory, access to each other.
_OF_CUDA = ("engine/runtime.py", "comm/collectives.py", "comm/cuda_ipc.py")


@every_module(but=(*_OF_CUDA, "tools/doctor/machine.py"))
def test_cuda_is_used_in_the_runtime_alone(module: Path) -> None:
    names = {*_imports(module), *_attributes(module)}
    assert not {name for name in names if _is_within(name, "torch.cuda")}


# PyTorch's FSDP1 is told by the environment to evaluate in full precision. Checks are switched on for
# programs that nobody wants to change, and so is Accelerate. Ranks inherit what their launcher has.
_OF_ENVIRONMENT = ("fsdp1/module.py", "compare/switches.py", "drop_in/on_cpu.py")
# Gloo is told by it which interface to take, and ports of ours listen there.
_OF_ENVIRONMENT += ("launching/processes.py", "launching/rank.py", "peers/connections.py")


_OF_COMMANDS = ("cli", "train_cli", "checking_cli", "run_cli")


@every_module(but=(*(f"tools/{name}.py" for name in _OF_COMMANDS), *_OF_ENVIRONMENT))
def test_environment_is_read_by_the_command_line_alone(module: Path) -> None:
    nodes = _nodes(module)
    # `os.environ[name] = value` hands something to child processes and reads nothing.
    written = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    read = {
        ast.unparse(node)
        for node in nodes
        if isinstance(node, ast.Attribute) and id(node) not in written
    }
    assert not {*read, *_imports(module)} & {"os.environ", "os.getenv", "os.environb"}


# What a unit has to say of its parameters to rooms above is on `Unit` itself (`managed` and what follows);
# what keeps state reads its parts through one file.
@every_module(but=("state/unit_parts.py",))
def test_parameters_of_units_are_the_engines_alone(module: Path) -> None:
    if _room(module) not in ("batches", "engine", "plan", "planning"):
        read = {name for name in _attributes(module) if re.search(r"(unit|_shown)\.params$", name)}
        assert not read


@every_module(but=("state/unit_parts.py",))
def test_what_keeps_state_asks_no_unit_for_its_layout(module: Path) -> None:
    if _room(module) in (
        "checkpoint",
        "convert",
        "deferred",
        "live",
        "migrate",
        "state",
    ):
        assert "unit.plan_layout" not in _attributes(module)


@every_module()
def test_accelerators_are_those_that_are_there(module: Path) -> None:
    # Without `check_available` torch says what it was built for.
    for node in _nodes(module):
        if isinstance(node, ast.Call) and "current_accelerator" in ast.unparse(node.func):
            assert [keyword.arg for keyword in node.keywords] == ["check_available"]


# A program may say where new tensors go (`torch.set_default_device`). The model of `fullshard train` is
# meant to follow it.
@every_module(but=("models/llama.py",))
def test_new_tensors_say_where_they_are(module: Path) -> None:
    makers = {f"torch.{name}" for name in _MAKERS}
    calls = [node for node in _nodes(module) if isinstance(node, ast.Call)]
    unsaid = [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call in calls
        if ast.unparse(call.func) in makers
        if not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert not unsaid


_MAKERS = ("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace")
_MAKERS += ("ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros")


def test_public_names_are_sorted_and_there() -> None:
    import fullshard

    assert list(fullshard.__all__) == sorted(fullshard.__all__)
    assert not [name for name in fullshard.__all__ if not hasattr(fullshard, name)]


def test_public_holds_public_names_and_nothing_else() -> None:
    docstring, *imports, names = ast.parse((SOURCE / "public.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    imported = {
        alias.asname or alias.name
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert isinstance(names, ast.Assign)
    assert ast.unparse(names.targets[0]) == "__all__"
    assert set(ast.literal_eval(names.value)) == imported


@pytest.mark.parametrize("package", PACKAGES, ids=_name)
def test_no_package_binds_a_name_of_its_submodules(package: Path) -> None:
    # `import fullshard.trace` and `fullshard.trace` would be two things, by the order of imports.
    submodules = {path.stem for path in package.parent.glob("*.py")}
    submodules |= {path.parent.name for path in package.parent.glob("*/__init__.py")}
    bound = set()
    for node in ast.parse(package.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Assign):
            bound |= {ast.unparse(target) for target in node.targets}
    assert not bound & submodules


# The most lines of source that each room may have; "top" are the files beside them. To raise one is no fault,
# and asks for a sentence in the commit that says what users get for it. Lower it when a room has shrunk.
_MOST_LINES = {
    "batches": 743,
    "checkpoint": 6801,
    "comm": 3155,
    "compare": 1311,
    "convert": 2099,
    "deferred": 559,
    "drop_in": 702,
    "engine": 12531,
    "faces": 1448,
    "fsdp1": 2406,
    "fsdp2": 1013,
    "launching": 671,
    "live": 1633,
    "migrate": 919,
    "models": 1185,
    "optim": 2246,
    "peers": 3379,
    "plan": 4139,
    "planning": 7089,
    "state": 3277,
    "tools": 17644,
    "top": 2246,
    "watch": 1550,
}


def test_no_room_grows_unnoticed() -> None:
    lines = collections.Counter[str]()
    for module in MODULES:
        parts = module.relative_to(SOURCE).parts
        lines[parts[0] if len(parts) > 1 else "top"] += len(module.read_text().splitlines())
    assert {room: n for room, n in lines.items() if n > _MOST_LINES[room]} == {}
