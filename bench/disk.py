"""How fast state on a disk is read and written, of what the disk does by itself.

    python -m bench.disk --folder /scratch --rounds 20

`UnitFiles` keep a few units in flight, as a step does. Beside it, on the same blocks and from the same memory,
one thread asks for 8 MiB after the other, as `dd bs=8M iflag=direct` (or oflag) does; for both at once, one
such thread reads and another one writes. All of it is direct I/O, past the page cache. In turn in each round,
in an order that is reversed in every second one; the ratio is taken within the round.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from fullshard.optim.unit_files import Ticket, UnitFile, UnitFiles

from .tables import Progress, Table, add_output_options, emit, median_interval, positive

_REQUEST = 8 << 20
_NUM_BUFFERS = 3

Rates = dict[str, list[float]]  # GB/s of each round


class Disk:
    """Units on a disk, and both ways to move all of them; each returns when all is done."""

    def __init__(self, files: UnitFiles, *, num_units: int, nbytes: int) -> None:
        self.files = files
        self.units = [files.create(f"unit {n}", nbytes) for n in range(num_units)]
        # Filled, so that no page is a new one when it is timed.
        buffers = [files.new_buffer(nbytes, pin_memory=False) for _ in range(_NUM_BUFFERS)]
        self.buffers = [buffer.random_() for buffer in buffers]

    def write(self) -> None:
        self._stream(self.files.write)

    def read(self) -> None:
        self._stream(self.files.read)

    def _stream(self, begin: Callable[[UnitFile, torch.Tensor], Ticket]) -> None:
        begun: deque[Ticket] = deque()
        for n, unit in enumerate(self.units):
            if len(begun) == _NUM_BUFFERS:
                begun.popleft().wait()
            begun.append(begin(unit, self.buffers[n % _NUM_BUFFERS]))
        for ticket in begun:
            ticket.wait()

    def both(self) -> None:
        """Read each unit, and write it back while the next one is read."""
        written: deque[Ticket] = deque()
        coming = self.files.read(self.units[0], self.buffers[0])
        for n, unit in enumerate(self.units):
            arrived = coming
            if n + 1 < len(self.units):
                if len(written) == _NUM_BUFFERS - 1:
                    written.popleft().wait()
                coming = self.files.read(self.units[n + 1], self.buffers[(n + 1) % _NUM_BUFFERS])
            arrived.wait()
            written.append(self.files.write(unit, self.buffers[n % _NUM_BUFFERS]))
        for ticket in written:
            ticket.wait()

    def raw_write(self) -> None:
        self._ask(os.pwritev, self.units, self.buffers[0])

    def raw_read(self) -> None:
        self._ask(os.preadv, self.units, self.buffers[0])

    def raw_both(self) -> None:
        with ThreadPoolExecutor(1) as other:
            later = [*self.units[1:], self.units[0]]  # so that they are not at one unit
            reading = other.submit(self._ask, os.preadv, later, self.buffers[1])
            self._ask(os.pwritev, self.units, self.buffers[0])
            reading.result()

    @staticmethod
    def _ask(
        call: Callable[[int, Sequence[memoryview], int], int],
        units: Sequence[UnitFile],
        buffer: torch.Tensor,
    ) -> None:
        memory = buffer.numpy().data
        for unit in units:
            for begin in range(0, unit.nbytes, _REQUEST):
                part = memory[begin : begin + _REQUEST]
                if call(unit._descriptor, [part], begin) != len(part):
                    sys.exit(f"{unit}: was not moved as a whole at {begin:,}")


def measure(disk: Disk, *, num_rounds: int) -> Rates:
    """Return the rates of each round, by what was done."""
    bodies = {
        "raw write": disk.raw_write,
        "write": disk.write,
        "raw read": disk.raw_read,
        "read": disk.read,
        "raw both": disk.raw_both,
        "both": disk.both,
    }
    nbytes = sum(unit.nbytes for unit in disk.units)
    rates: Rates = {name: [] for name in bodies}
    with Progress("disk", num_stages=num_rounds + 1) as progress:
        progress.advance("writes what was only reserved")
        disk.write()
        for index in range(num_rounds):
            progress.advance(f"round {index + 1} of {num_rounds}")
            for name in reversed(bodies) if index % 2 else bodies:
                begun = time.perf_counter()
                bodies[name]()
                seconds = time.perf_counter() - begun
                rates[name].append(nbytes * (2 if "both" in name else 1) / 1e9 / seconds)
    return rates


def build_table(rates: Rates, title: str) -> Table:
    """Return a row for reading, for writing and for both."""
    table = Table(title, ["", "disk GB/s", "UnitFiles GB/s", "of the disk's"])
    for name in ("write", "read", "both"):
        raw, ours = rates[f"raw {name}"], rates[name]
        ratio = median_interval([a / b for a, b in zip(ours, raw, strict=True)])
        cells = [f"{median_interval(values).median:.2f}" for values in (raw, ours)]
        table.rows.append([name, *cells, str(ratio)])
    table.notes = [
        f"median of {len(rates['read'])} rounds; of the ratio, where the true median lies with 95 %",
    ]
    return table


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.disk", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--folder", type=Path, help="on the disk (default: the temporary folder)")
    parser.add_argument("--megabytes", type=positive, default=64, help="MiB of a unit")
    parser.add_argument("--units", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=20)
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    with closing(UnitFiles(options.folder or Path(tempfile.gettempdir()), rank=0)) as files:
        if files.how != "direct":
            sys.exit(
                f"{files.folder}: the page cache would be measured; {files.filesystem} has no direct I/O"
            )
        disk = Disk(files, num_units=options.units, nbytes=options.megabytes << 20)
        rates = measure(disk, num_rounds=options.rounds)
        title = f"{options.units} units of {options.megabytes} MiB on {files.filesystem}"
    results: dict[str, Any] = {"disk": {"filesystem": files.filesystem, "rates": rates}}
    emit(options, [build_table(rates, title)], results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
