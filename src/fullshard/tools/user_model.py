"""A user's model, built by MODULE:FUNCTION in a process group, and what is found in it."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.errors import FullshardError, StateError
from fullshard.json_files import json_text
from fullshard.tools.cli_options import refuse
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.import_path import check_import_path, function_at
from fullshard.tools.launch import Place, place_in


def look_at_model(
    command: str,
    target: str,
    environment: Mapping[str, str],
    look: "Callable[[nn.Module], fullshard.MigrationReport | fullshard.Replay]",
    *,
    unusable: tuple[type[FullshardError], ...] = (OptionError,),
    as_json: bool,
) -> Exit:
    """Build the model that MODULE:FUNCTION returns, and print what is found in it.

    unusable: what is raised for options that cannot work.
    """
    is_first = True
    try:
        place = place_in(environment)
        is_first = place is None or place.rank == 0
        with _built(target, place, on_cpu=command == "migrate-report") as model:
            found = look(model)
    except unusable as error:
        if is_first:
            refuse(command, error)
        return Exit.USAGE
    except StateError as error:
        if is_first:
            print(f"fullshard {command}: {target}: {error}", file=sys.stderr)
        return Exit.FAILED
    if is_first:
        print(json_text(found.as_dict(), indent=2) if as_json else found)
    return Exit.FAILED if isinstance(found, fullshard.Replay) and not found.is_equal else Exit.OK


@contextlib.contextmanager
def _built(target: str, place: Place | None, *, on_cpu: bool) -> Iterator[nn.Module]:
    """Build the model that MODULE:FUNCTION returns, for as long as its process group lives.

    PyTorch's names are fullshard's meanwhile. Without torchrun (no place) this is the only rank. What is
    printed meanwhile goes to stderr. Raises OptionError for a target that returns no model; what the model
    raises passes.
    """
    check_import_path(target)
    fullshard.install()
    on_cpu = on_cpu or torch.accelerator.current_accelerator(check_available=True) is None
    if not on_cpu and place is not None:
        torch.accelerator.set_device_index(place.local_rank)
    with contextlib.redirect_stdout(sys.stderr):
        build = function_at(target)
        with _default_group("gloo" if on_cpu else None, place):
            model = build()
            if not isinstance(model, nn.Module):
                kind = type(model).__name__
                raise OptionError(f"{target} returned {kind}, not a model (nn.Module).")
            yield model


@contextlib.contextmanager
def _default_group(backend: str | None, place: Place | None) -> Iterator[None]:
    """Set up the default group, if importing the module did not: of torchrun's ranks, or of this process alone.

    backend: None for torch's choice, which is one for each kind of device.
    """
    if dist.is_initialized():
        yield
        return
    if place is not None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
