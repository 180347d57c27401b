"""Scripts that start their ranks themselves, by ``torch.multiprocessing.spawn``.

`fullshard verify` has started the ranks already, so each of them runs the script's function as its own rank.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.multiprocessing


class OtherRanksError(Exception):
    """A script that spawns another number of processes than there are ranks."""


class _Joined:
    """What a script that does not wait for its ranks gets: they have ended."""

    def join(self, *_: Any, **__: Any) -> bool:
        """Return that all have ended."""
        return True


@contextlib.contextmanager
def running_as_spawned(rank: int, num_ranks: int) -> Iterator[None]:
    """Let what would start processes run its function here, as this rank, inside the block.

    Raises OtherRanksError from it if it would start another number of them.
    """

    def run(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        *_: Any,
        **__: Any,
    ) -> _Joined | None:
        if nprocs != num_ranks:
            raise OtherRanksError(
                f"the script spawns {nprocs} processes, and is verified on {num_ranks} ranks: let it spawn as many, "
                f"or run fullshard verify --ranks {nprocs}, of 2 to 4"
            )
        # With it, a script's init_process_group would look for the launcher's store at its own address.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        fn(rank, *args)
        return None if join else _Joined()

    # The function hides the module of its name.
    module = importlib.import_module("torch.multiprocessing.spawn")
    with contextlib.ExitStack() as stack:
        for where in (torch.multiprocessing, module):
            for name in ("spawn", "start_processes"):
                stack.enter_context(mock.patch.object(where, name, run))
        yield
