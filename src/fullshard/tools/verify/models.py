"""Which models are trained: of a script, found as it shards them and calls them."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Imported inside `replaced`, it would have the others' names, and take modules for sharded ones.
import torch.distributed.checkpoint.state_dict
from torch import nn

from fullshard import FullyShardedDataParallel
from fullshard.compare.values import path_of

_OF_TORCH = ("torch.distributed.fsdp", "torch.distributed._composable")
_OF_FULLSHARD = ("fullshard", "fullshard.public")


class Root(NamedTuple):
    """A model, and what is put in front of its names: nothing for the first, "model1." for the next."""

    module: nn.Module
    prefix: str

    def name(self, name: str) -> str:
        """Return what a module, parameter or buffer of this model is called in the records."""
        return f"{self.prefix}{path_of(name)}".removesuffix(".")

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by every name that they have in the records."""
        named = self.module.named_parameters(remove_duplicate=False)
        return {self.name(name): parameter for name, parameter in named}

    def buffers(self) -> dict[str, torch.Tensor]:
        return {self.name(name): buffer for name, buffer in self.module.named_buffers()}


class Models:
    """The modules that the script gave to be sharded, and the outermost models that have them."""

    def __init__(self) -> None:
        self.noted: list[nn.Module] = []
        self.roots: list[Root] = []
        self._covered: set[nn.Module] = set()

    def add(self, model: nn.Module) -> Root:
        """Add a model that is known before it is called."""
        self.roots.append(Root(model, f"model{len(self.roots)}." if self.roots else ""))
        return self.roots[-1]

    def new_root(self, called: nn.Module) -> Root | None:
        """Return the model of a module that the script calls, if it is sharded and was not seen before.

        It is the outermost module that the script shards around the one it calls; or the one that it
        calls, if that has modules inside that are sharded.
        """
        noted = [module for module in self.noted if module not in self._covered]
        if not noted:
            return None
        inside = {each: set(each.modules()) for each in (called, *noted)}
        around = [module for module in noted if called in inside[module]]
        if not around and not inside[called] & set(noted):
            return None
        found = max(around, key=lambda module: len(inside[module]), default=called)
        if not around:  # compiled or in a wrapper: it may have nothing that what is sharded has not
            outermost = max(inside[called] & set(noted), key=lambda module: len(inside[module]))
            if set(outermost.parameters()) == set(called.parameters()):
                found = outermost
        self._covered |= inside[found]
        return self.add(found)

    def paths(self) -> dict[nn.Module, str]:
        """Return the path of every module; of what was never called, inside what the script shards."""
        found: dict[nn.Module, str] = {}
        for root in (*self.roots, *(Root(module, "") for module in reversed(self.noted))):
            for path, module in root.module.named_modules():
                if not isinstance(module, FullyShardedDataParallel):  # its module has the path
                    found.setdefault(module, root.name(path))
        return found


@contextlib.contextmanager
def replaced(by_original: Mapping[Any, Any]) -> Iterator[None]:
    """Let names that stand for something stand for something else inside the block.

    In the modules of torch and fullshard that programs import them from, and in every library that has
    imported them already. fullshard's own rooms and torch's checkpoints keep theirs.
    """
    others = {id(original): other for original, other in by_original.items()}
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module_name, module in list(sys.modules.items()):
            package = module_name.partition(".")[0]
            if package == "fullshard":
                is_face = module_name in _OF_FULLSHARD
            else:
                is_face = package != "torch" or module_name.startswith(_OF_TORCH)
            if not is_face:
                continue
            names = getattr(module, "__dict__", {})
            for name, value in list(names.items()):
                if id(value) in others:
                    undo.append((names, name, value))
                    names[name] = others[id(value)]
        yield
    finally:
        for names, name, value in reversed(undo):
            names[name] = value
