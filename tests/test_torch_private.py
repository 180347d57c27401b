"""Private names of torch: each is there, its absence is explained, and none is used that is not listed."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.optim import _apply_optimizer_in_backward

from fullshard import torch_private
from fullshard.plan.boxes import chunks
from fullshard.state.sharded_tensors import sharded_tensor
from fullshard.torch_private import ATTRIBUTES, Attribute, check_attributes
from tests.harness import on_ranks
from tests.test_architecture import MODULES, SOURCE, _nodes, every_module
from tests.test_architecture import _attributes as _dotted

OWN = SOURCE / "torch_private.py"
TREE = ast.parse(OWN.read_text())
LISTED = {each.name for each in ATTRIBUTES}
OWNERS = [each.owner for each in ATTRIBUTES if each.owner is not torch]
OURS_TOO = {"_to"}  # `engine.unit` changes its phase by it; storages' own is not used
OF_PYTHON = {
    "_asdict",
    "_field_defaults",
    "_replace",
    "_exit",
    "_getframe",
    "_current_frames",
}  # named tuples, os and sys


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


# The names that are looked up


class Needed(NamedTuple):
    """A name that a block of the module looks up: where it stands, and what for."""

    owner: str
    name: str
    purpose: str


def _needed() -> Iterator[Needed]:
    for block in TREE.body:
        if not isinstance(block, ast.With):
            continue
        (call,) = [item.context_expr for item in block.items]
        assert isinstance(call, ast.Call)
        purpose = ast.literal_eval(call.args[0])
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                yield from (Needed(node.module, alias.name, purpose) for alias in node.names)
            elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr != "_C":
                yield Needed(ast.unparse(node.value), node.attr, purpose)


# By path, for the first purpose that it is looked up for.
NEEDED = list({(each.owner, each.name): each for each in reversed([*_needed()])}.values())


def _object(path: str) -> Any:
    """Return what stands at a dotted path: a module, or what is in one."""
    try:
        return importlib.import_module(path)  # first: a function may have its module's name
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        return getattr(_object(owner), name)


def _missing(needed: Needed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch lack a name."""
    monkeypatch.delattr(_object(needed.owner), needed.name)
    if f"{needed.owner}.{needed.name}" in sys.modules:  # which an import would take then
        monkeypatch.setitem(sys.modules, f"{needed.owner}.{needed.name}", None)


def test_every_lookup_is_known() -> None:
    # Should the blocks be written in another way, the tests on each of them would find none.
    assert len(NEEDED) > 30
    assert {"_storage_Use_Count", "_StridedShard", "_execution_engine"} <= {n.name for n in NEEDED}


@pytest.mark.parametrize("needed", NEEDED, ids=lambda needed: needed.name)
def test_a_torch_that_lacks_a_name_is_refused_with_its_purpose(
    needed: Needed, monkeypatch: pytest.MonkeyPatch
) -> None:
    _missing(needed, monkeypatch)
    program = compile(OWN.read_text(), str(OWN), "exec")
    with pytest.raises(ImportError) as refused:
        exec(program, {"__name__": "fullshard.torch_private_again"})
    said = str(refused.value)
    assert f"cannot run with torch {torch.__version__}: " in said
    assert re.search(rf"\b{needed.name}\b", said)
    assert f"It needs that to {needed.purpose}. " in said
    assert "pip install 'torch>=" in said


@pytest.mark.parametrize(
    ("owner", "name", "ours"),
    [
        (torch.Tensor, "_use_count", "tensor_uses"),
        (nn.modules.module, "_forward_unimplemented", "forward_unimplemented"),
    ],
)
def test_a_name_with_a_fallback_may_be_missing(
    owner: Any, name: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(torch_private, ours) is not None
    if owner is torch.Tensor:  # of a base class in C++, which cannot be changed
        monkeypatch.setattr(torch, "Tensor", type("Tensor", (), _without(torch.Tensor, name)))
    else:
        monkeypatch.delattr(owner, name)
    again: dict[str, Any] = {"__name__": "fullshard.torch_private_again"}
    exec(compile(OWN.read_text(), str(OWN), "exec"), again)
    assert again[ours] is None


def _without(cls: type, name: str) -> dict[str, Any]:
    return {each: getattr(cls, each) for each in LISTED if hasattr(cls, each) and each != name}


def test_every_name_that_is_looked_up_is_used() -> None:
    imported = {
        alias.name
        for module in MODULES
        for node in _nodes(module)
        if isinstance(node, ast.ImportFrom) and node.module == "fullshard.torch_private"
        for alias in node.names
    }
    looked_up = {
        name
        for block in TREE.body
        if not isinstance(block, ast.Import | ast.ImportFrom)  # what its own code needs
        for name in _bound(block)
        if not name.startswith("_")
    }
    of_the_list = {"ATTRIBUTES", "Attribute", "check_attributes"}
    assert imported == looked_up - of_the_list


def _bound(block: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of the module binds there."""
    if isinstance(block, ast.FunctionDef | ast.ClassDef):
        yield block.name
        return
    for node in ast.walk(block):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_the_name_of_a_compiled_module_is_torch_s() -> None:
    names = dict(torch.compile(nn.Linear(1, 1)).named_parameters())
    assert set(names) == {f"{torch_private.COMPILED_MODULE}.{name}" for name in ("weight", "bias")}


# Attributes


@pytest.mark.parametrize("attribute", ATTRIBUTES, ids=lambda attribute: attribute.name)
def test_a_torch_that_lacks_an_attribute_is_refused_unless_there_is_another_way(
    attribute: Attribute, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_attributes()
    monkeypatch.setattr(torch_private, "ATTRIBUTES", (attribute._replace(owner=object()),))
    if attribute.otherwise:
        check_attributes()
        return
    reason = re.escape(f"there is no object.{attribute.name}. It needs that to {attribute.purpose}")
    with pytest.raises(ImportError, match=reason):
        check_attributes()


@on_ranks(1)
def test_what_instances_alone_have_is_there() -> None:
    parameter = nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    assert hasattr(parameter, "_in_backward_optimizers")
    assert isinstance(checkpoint_wrapper(layer := nn.Linear(1, 1)), torch_private.ActivationWrapper)
    assert checkpoint_wrapper(layer)._checkpoint_wrapped_module is layer
    boxes = chunks((2, 2), 0, 1)
    value = sharded_tensor(torch.ones(2, 2), (2, 2), boxes, torch.distributed.group.WORLD)
    assert value._process_group is torch.distributed.group.WORLD
    assert hasattr(torch.optim.AdamW, "_init_group")


# Nothing else is used


@functools.cache
def _ours() -> frozenset[str]:
    """Return every private name that the source defines, other than by listing it."""
    names: set[str] = set()
    for module in MODULES:
        for node in _nodes(module):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Dict):  # the namespace of a class that is made
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return frozenset(names)


def _imported(module: Path) -> Iterator[str]:
    for node in _nodes(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _attributes(module: Path) -> Iterator[str]:
    """Yield every private attribute that a module uses, by dot or by `getattr` and the like."""
    for node in _nodes(module):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("getattr", "hasattr", "setattr", "delattr"),
            "operator.attrgetter",
        ):
            strings = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from (each for each in strings if isinstance(each, str))


@every_module(but=(str(OWN.relative_to(SOURCE)),))
def test_private_names_of_torch_come_from_one_module(module: Path) -> None:
    imported = {name for name in _imported(module) if name.split(".")[0] == "torch"}
    assert not {name for name in imported if any(map(_is_private, name.split(".")))}
    for dotted in _dotted(module):
        root, *parts = dotted.split(".")
        if root in ("torch", "dist", "nn", "profiler"):
            assert set(filter(_is_private, parts)) <= LISTED, f"{dotted}: list it in {OWN.name}"
    for name in set(filter(_is_private, _attributes(module))) - LISTED - OF_PYTHON - OURS_TOO:
        assert name in _ours(), f"{name}: list it in {OWN.name}"
        # A name that both have: torch's, as far as a reader can tell.
        taken = [each for each in OWNERS if hasattr(each, name)]
        assert not taken, f"{name} is of {taken}: list it in {OWN.name}"


def test_every_attribute_that_is_listed_is_used() -> None:
    used = {name for m in MODULES if m != OWN for name in _attributes(m)}
    indirect = {"_allgather_base", "_reduce_scatter_base"}  # by version, in comm/calls.py
    assert LISTED - used == indirect
