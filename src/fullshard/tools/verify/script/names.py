"""Puts other functions and classes where programs find those that shard."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# Imported inside the block, it would have the others' names, and take modules for sharded ones.
import torch.distributed.checkpoint.state_dict  # noqa: F401

_OF_TORCH = ("torch.distributed.fsdp", "torch.distributed._composable")
_OF_FULLSHARD = ("fullshard", "fullshard.public")


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
            if not _is_face(module_name):
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


def _is_face(module_name: str) -> bool:
    package = module_name.partition(".")[0]
    if package == "fullshard":
        return module_name in _OF_FULLSHARD
    return package != "torch" or module_name.startswith(_OF_TORCH)
