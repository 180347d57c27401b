"""Every wait, record and keep-alive of the engine, found in its source, and taken out one by one.

A site is one of

    wait        ``runtime.wait(...)``, ``work.wait()``, ``comm.wait_all(...)`` as statements of their
                own: taken out. (Where a wait's result is used, what it waits with is a site below.)
    finish      ``runtime.finish(...)``: taken out
    record      ``runtime.record()``: None in its place, which nobody waits for
    following   ``runtime.following(lane)``: ``runtime.on(lane)``, which waits for nothing
    on          ``runtime.on(lane)``: the current lane
    keep-alive  a field of work in flight that is read for reports alone, and so is there to keep
                memory: empty from the start

Whole modules are left out that run where there are no lanes, and say so below.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fullshard

SOURCE = Path(fullshard.__file__).parent

# Where sites are looked for, and what of it is left out, with the reason.
ROOMS = ("engine", "comm", "fsdp1", "fsdp2", "optim")
LEFT_OUT = {
    "comm/cuda_ipc.py": "reaches other processes: tests/engine/test_device_memory.py",
    "comm/device_memory.py": "orders processes, not lanes: tests/engine/test_device_memory.py",
    "comm/peer_memory.py": "host memory: tests/comm, tests/engine",
    "comm/ring.py": "host memory: tests/comm, tests/engine",
    "comm/shared_memory.py": "host memory: tests/comm, tests/engine",
    "comm/outside_steps.py": "between passes, and Gloo's alone where it waits: tests/state",
}
FUNCTIONS_LEFT_OUT = {
    "compare_paths": "waits for Gloo on the host: tests/faults",
    "_reduce_scatter_by_exchange": "Gloo's: tests/parity runs it on real ranks",
    "agree": "the host waits for the answer: tests/engine/test_writes.py, test_leftovers.py",
    "Runtime": "what virtual lanes stand in for",
}


@dataclasses.dataclass(frozen=True)
class Site:
    """One place in the source.

    function: the module's function or method that holds it, by its path in the module.
    number: its place among the nodes of the syntax tree of the module.
    """

    module: str
    function: str
    line: int
    number: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.module}-{self.function}-{self.text}".replace(" ", "")


@functools.cache
def sites() -> list[Site]:
    """Return every site of the source, in the order of the files."""
    files = sorted(path for room in ROOMS for path in (SOURCE / room).rglob("*.py"))
    names = [str(path.relative_to(SOURCE)) for path in files]
    return [site for name in names if name not in LEFT_OUT for site in _sites_of(name)]


def _sites_of(module: str) -> Iterator[Site]:
    tree = _tree(module)
    kept = _keep_alives(tree)
    owner: dict[int, str] = {}
    for function, name in _functions(tree):
        for node in ast.walk(function):
            owner[id(node)] = name
    for number, node in enumerate(ast.walk(tree)):
        name = owner.get(id(node), "")
        parts = set(name.split("."))
        if not name or parts & FUNCTIONS_LEFT_OUT.keys():
            continue
        kind = _kind(node, in_runtime=module == "engine/runtime.py")
        text = ast.unparse(node).partition("\n")[0] if kind else ""
        if not kind and isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            keeper = kept.get(node.func.id)
            position = None if keeper is None else _kept_argument(node, keeper)
            if keeper is not None and position is not None:
                kind, text = "keep-alive", f"{node.func.id}.{keeper.fields[position]}"
        if kind:
            yield Site(module, name, getattr(node, "lineno", 0), number, kind, text)


def _kind(node: ast.AST, *, in_runtime: bool) -> str:
    """Return what kind of wait a node is; empty if it is none."""
    if isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
        name, owner = _called(call)
        if name == "finish" and _is_runtime(owner, in_runtime):
            return "finish"
        return "wait" if name in ("wait", "wait_all") else ""
    if isinstance(node, ast.Call):
        name, owner = _called(node)
        if name in ("record", "following", "on") and _is_runtime(owner, in_runtime):
            return name
    return ""


def _called(call: ast.Call) -> tuple[str, str]:
    """Return the name of the method that is called, and what it is called on."""
    if not isinstance(call.func, ast.Attribute):
        return "", ""
    return call.func.attr, ast.unparse(call.func.value)


def _is_runtime(owner: str, in_runtime: bool) -> bool:
    return (in_runtime and owner == "self") or owner.rpartition(".")[2].strip("_") == "runtime"


# Keep-alives


@dataclasses.dataclass(frozen=True)
class _Keeper:
    """A class of work in flight: the order of its fields, and those that only keep memory."""

    fields: tuple[str, ...]
    kept: frozenset[str]


def _keep_alives(tree: ast.Module) -> dict[str, _Keeper]:
    """Find the classes of work in flight: those that report what they hold as ``tensors``.

    (`UnitReduction` calls it ``temporaries``.) A field is there to keep memory if nothing but such a
    report reads it; what it is set to or cleared by does not count.
    """
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        reports = {"tensors", "temporaries"}
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        reported = set(fields) & reports
        for method in methods:
            if method.name in reports:
                reported |= _read(method)
        used = set().union(*(_read(m) for m in methods if m.name not in reports), set())
        kept = frozenset((reported & set(fields)) - used)
        if kept:
            found[node.name] = _Keeper(tuple(fields), kept)
    return found


def _read(function: ast.FunctionDef) -> set[str]:
    """Return the attributes of ``self`` that a method reads, but for clearing them."""
    cleared = {
        id(node.func.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "clear"
    }
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and id(node) not in cleared
    }


def _kept_argument(call: ast.Call, keeper: _Keeper) -> int | None:
    """Return the position of the argument that is kept alive; None where it is empty."""
    for position, argument in enumerate(call.args):
        is_empty = isinstance(argument, (ast.List, ast.Tuple)) and not argument.elts
        if keeper.fields[position] in keeper.kept and not is_empty:
            return position
    return None


# Taking a site out


@contextlib.contextmanager
def taken_out(site: Site) -> Iterator[None]:
    """Run the engine without a site: its function gets other code for as long as this lasts."""
    tree = _tree(site.module)
    node = next(each for number, each in enumerate(ast.walk(tree)) if number == site.number)
    changed = ast.fix_missing_locations(_Without(node, _keep_alives(tree)).visit(tree))
    code = compile(changed, str(SOURCE / site.module), "exec", dont_inherit=True)
    function = _live(site)
    before = function.__code__
    function.__code__ = _code_of(code, site.function.split("."))
    try:
        yield
    finally:
        function.__code__ = before


class _Without(ast.NodeTransformer):
    """Replaces one node by what it is without its wait."""

    def __init__(self, target: ast.AST, kept: dict[str, _Keeper]) -> None:
        self._target = target
        self._kept = kept

    def visit(self, node: ast.AST) -> Any:
        """Replace the node if it is the one; else look inside."""
        if node is not self._target:
            return self.generic_visit(node)
        if isinstance(node, ast.Expr):
            # What it is called on may be a call that does something else.
            assert isinstance(node.value, ast.Call)
            assert isinstance(node.value.func, ast.Attribute)
            return ast.copy_location(ast.Expr(node.value.func.value), node)
        assert isinstance(node, ast.Call)
        name, _ = _called(node)
        if name == "record":
            return ast.copy_location(ast.Constant(None), node)
        if name == "following":
            assert isinstance(node.func, ast.Attribute)
            node.func.attr = "on"
        elif name == "on":
            node.args = [ast.parse("Lane.COMPUTE", mode="eval").body]
        else:
            assert isinstance(node.func, ast.Name)
            position = _kept_argument(node, self._kept[node.func.id])
            assert position is not None
            node.args[position] = ast.List([], ast.Load())
        return node


def _tree(module: str) -> ast.Module:
    return ast.parse((SOURCE / module).read_text())


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield a module's functions and its classes' methods, by their paths."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node, node.name
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield each, f"{node.name}.{each.name}"


def _live(site: Site) -> types.FunctionType:
    """Return the function that the engine runs, without its decorators."""
    name = ".".join(("fullshard", *Path(site.module).with_suffix("").parts))
    found: Any = importlib.import_module(name)
    for part in site.function.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    function = inspect.unwrap(found)
    assert isinstance(function, types.FunctionType)
    return function


def _code_of(code: types.CodeType, path: list[str]) -> types.CodeType:
    for part in path:
        code = next(
            each
            for each in code.co_consts
            if isinstance(each, types.CodeType) and each.co_name == part
        )
    return code
