"""The process group of a command that is run by itself, or by torchrun."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def default_group(backend: str | None, *, under_torchrun: bool) -> Iterator[None]:
    """Set up the default group, if there is none, for a while: of torchrun's ranks, or of this process alone.

    backend: None for torch's choice, which is one for each kind of device.
    """
    if dist.is_initialized():
        yield
        return
    if under_torchrun:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
