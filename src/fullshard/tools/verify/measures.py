"""Fingerprints of tensors, peak memory, and what an exception says about where it was raised."""

import contextlib
import hashlib
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.tools.verify.facts import Failure

_PACKAGE = Path(fullshard.__file__).parent
_OF_TORCH = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__")


def fingerprint(*tensors: torch.Tensor) -> str:
    """Return a digest of dtypes, shapes and every bit of tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        own = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(own.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def fingerprints(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return a digest of each tensor by its name."""
    return {name: fingerprint(tensor) for name, tensor in named}


class Meter:
    """Time and memory of what runs inside `running`: the computing, and not the recording around it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = _held(device)
        self._began = 0.0
        self.seconds = 0.0
        self.peak_nbytes: int | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add the block's time to `seconds`, and raise `peak_nbytes` if it held more."""
        _reset_peak(self._device)
        began = time.perf_counter()
        yield
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - began
        if (peak := _peak(self._device)) is not None and self._base is not None:
            self.peak_nbytes = max(peak - self._base, self.peak_nbytes or 0)

    def take_seconds(self) -> float:
        """Return the time since the last call, and begin at 0."""
        taken, self.seconds = self.seconds, 0.0
        return taken


def _held(device: torch.device) -> int | None:
    if device.type != "cpu":
        return int(torch.accelerator.memory_allocated(device))
    return _status("VmRSS")


def _peak(device: torch.device) -> int | None:
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    return _status("VmHWM")


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # where it is refused, the peak since the start counts
        Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int | None:
    """Return a size from Linux's status of this process; None elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def failure_of(
    error: BaseException, phase: str, step: int | None, paths: Mapping[int, str]
) -> Failure:
    """Say where an exception came from. paths: of the model's modules by their ids."""
    calls: list[str] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path, method = paths.get(id(frame.f_locals.get("self"))), frame.f_code.co_name
        is_torch = frame.f_code.co_filename == nn.modules.module.__file__ or method in _OF_TORCH
        if path is not None and not is_torch:
            calls.append(f"{path}.{method}".removeprefix("."))
    text = str(error) or type(error).__name__
    trace = "".join(traceback.format_exception(error))
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    kind = type(error).__name__
    return Failure(phase, step, kind, text, tuple(calls), trace, line_of_user(places))


def line_of_user(places: Sequence[tuple[str, int]]) -> str:
    """Return the innermost of files and lines, which begin with the outermost, that is of no library."""
    libraries = (
        str(_PACKAGE),
        *(sysconfig.get_path(n) for n in ("stdlib", "purelib", "platlib")),
        "<",
    )
    own = [f"{file}:{line}" for file, line in places if not file.startswith(libraries)]
    return own[-1] if own else ""


def stuck_at(thread: int) -> tuple[str, bool]:
    """Return a thread's line as `line_of_user`, and whether it waits in a collective for other ranks."""
    frames = list(traceback.walk_stack(sys._current_frames()[thread]))
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    waits = places[0][0].startswith((str(_PACKAGE), str(Path(dist.__file__).parent)))
    return line_of_user(places[::-1]), waits
