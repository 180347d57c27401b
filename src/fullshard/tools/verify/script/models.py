"""Which models a script shards: found as it shards them and calls them."""

from typing import NamedTuple

from torch import nn

from fullshard import FullyShardedDataParallel
from fullshard.tools.verify.gathering import plain_name


class Root(NamedTuple):
    """A model, and what is put in front of its names: nothing for the first, "model1." for the next."""

    module: nn.Module
    prefix: str

    def name(self, name: str) -> str:
        """Return what a module, parameter or buffer of this model is called in the records."""
        return f"{self.prefix}{plain_name(name)}".removesuffix(".")


class Models:
    """The modules that the script gave to be sharded, and the outermost models that have them."""

    def __init__(self) -> None:
        self.noted: list[nn.Module] = []
        self.roots: list[Root] = []
        self._covered: set[nn.Module] = set()

    def note(self, module: nn.Module) -> None:
        """Note a module that the script shards."""
        self.noted.append(module)

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
        self.roots.append(Root(found, f"model{len(self.roots)}." if self.roots else ""))
        return self.roots[-1]

    def paths(self) -> dict[nn.Module, str]:
        """Return the path of every module; of what was never called, inside what the script shards."""
        found: dict[nn.Module, str] = {}
        for root in (*self.roots, *(Root(module, "") for module in reversed(self.noted))):
            for path, module in root.module.named_modules():
                if not isinstance(
                    module, FullyShardedDataParallel
                ):  # it has the path of its module
                    found.setdefault(module, root.name(path))
        return found
