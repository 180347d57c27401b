"""What the installed torch has, for tests of what it does not always have."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp

from fullshard.fsdp2 import module
from tests.api import TORCH, Api

RELEASE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
NEWEST = (2, 15)  # whose engine is the reference for what is new

needs_newest = pytest.mark.skipif(RELEASE < NEWEST, reason="PyTorch's engine has it from 2.15 on")


@contextmanager
def as_of(release: tuple[int, int]) -> Iterator[None]:
    """Let fullshard follow another release of torch in what calls mean."""
    with mock.patch.object(module, "RELEASE", release):
        yield


def beside_pytorch(api: Api, program: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Run a program on an implementation, and on PyTorch's engine if that is the reference.

    Returns both results; the second is None on an older torch, or where the first is PyTorch's.
    """
    result = program(api)
    if RELEASE < NEWEST or api.is_torch:
        return result, None
    return result, program(Api(TORCH))


def unless_newest(mark: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Return a mark that counts on torches before the newest alone."""
    return pytest.mark.filterwarnings("default") if RELEASE >= NEWEST else mark
