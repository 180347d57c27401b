"""Install fullshard in place of PyTorch's FSDP2 for the length of a test, or in ranks of its own."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.fsdp._fully_shard import _fully_shard

import fullshard
from tests.api import Api
from tests.harness import Fate, run_fresh

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


def in_fresh_ranks(world_size: int) -> Callable[[Any], Any]:
    """Make a function a test whose body runs in processes of its own, which it may leave changed."""

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            for outcome in run_fresh(world_size, body, limit_s=60, **kwargs):
                assert outcome.fate is Fate.RETURNED, outcome.text

        test.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
        return test

    return decorate
