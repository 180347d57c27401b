"""Data parallelism without an engine: every rank's part of a program, in one process, in turn.

The parts are threads of which one runs at a time. Each has its own copy of everything that it
makes, as ranks have; where ranks would communicate, a part gives up its turn until all have come
there. So the parts always run in the same order, and what they compute is what a single process
would that knew all ranks' data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Parts:
    """Runs a function once per part and lets the parts exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._turn = 0
        self._alive = list(range(size))
        self._changed = threading.Condition()
        self._rounds: list[list[Any]] = []
        self._position = [0] * size  # the next round of each part

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Return what each part returned. Raises the first exception that ended one."""
        values: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(part: int) -> None:
            self._await_turn(part)
            try:
                values[part] = body(part)
            except BaseException as error:
                errors.append(error)
            finally:
                self._pass_on(part, ends=True)

        threads = [threading.Thread(target=work, args=(part,)) for part in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return values

    def exchange(self, part: int, value: Any) -> list[Any]:
        """Return the values of all parts, in order. Every part has to call it equally often."""
        number = self._position[part]
        self._position[part] += 1
        if number == len(self._rounds):
            self._rounds.append([])
        self._rounds[number].append(value)
        # The generator is the process's, but each rank has its own.
        generator = torch.get_rng_state()
        self._pass_on(part)
        self._await_turn(part)
        torch.set_rng_state(generator)
        if len(self._rounds[number]) != self.size:
            raise RuntimeError(f"part {part}: other parts ended before they exchanged values")
        return self._rounds[number]

    def _await_turn(self, part: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == part)

    def _pass_on(self, part: int, *, ends: bool = False) -> None:
        with self._changed:
            later = [other for other in self._alive if other > part]
            if ends:
                self._alive.remove(part)
            self._turn = (later or self._alive or [self.size])[0]
            self._changed.notify_all()
