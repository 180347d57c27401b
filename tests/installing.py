"""Install fullshard in place of PyTorch's FSDP2 for the length of a test."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.fsdp._fully_shard import _fully_shard

import fullshard
from tests.api import Api

# What tells `install` that PyTorch's engine is in use.
_IN_USE = (
    _fully_shard.get_cls_to_fsdp_cls(),
    getattr(replicate_with_fsdp, "cls_to_replicate_cls", {}),
)


@contextlib.contextmanager
def installed(api: Api) -> Iterator[None]:
    """Let PyTorch's names mean the implementation under test."""
    if api.is_torch:
        yield
        return
    with contextlib.ExitStack() as stack:
        for classes in _IN_USE:  # by earlier tests in these ranks, with `--impl all`
            stack.enter_context(mock.patch.dict(classes, clear=True))
        module = sys.modules["fullshard.drop_in.install"]  # the package's attribute is the function
        stack.enter_context(mock.patch.object(module, "_wrappers", list))
        fullshard.install()
        stack.callback(fullshard.uninstall)
        yield
