"""Host memory of processes as the operating system counts it.

PSS ("proportional set size") divides every page among the processes that map it, so memory shared
by two ranks counts once. We sum the anonymous and the shared-memory part and leave out pages of
files: libraries are there whatever is trained, and their share depends on who else runs.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_PARTS = ("Pss_Anon:", "Pss_Shmem:")
_SECONDS_BETWEEN_SAMPLES = 0.002


def pss_nbytes(process_ids: Sequence[int]) -> int:
    """Sum the PSS of processes, without file pages, in bytes (Linux 5.4 or newer)."""
    return sum(_pss_nbytes(process_id) for process_id in process_ids)


def _pss_nbytes(process_id: int) -> int:
    text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    rows = [line.split() for line in text.splitlines()[1:]]
    return 1024 * sum(int(row[1]) for row in rows if row[0] in _PARTS)


class PeakPss:
    """Sample the summed PSS of processes from this process while the block runs.

    The highest sum of samples taken together is a peak that existed, which the sum of each
    process's own peak need not be. A spike shorter than the interval can be missed.
    """

    def __init__(self, process_ids: Sequence[int]) -> None:
        self.peak_nbytes = 0
        self._process_ids = process_ids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakPss":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak_nbytes = max(self.peak_nbytes, pss_nbytes(self._process_ids))
            time.sleep(_SECONDS_BETWEEN_SAMPLES)
