"""The order in which a model's units run, recorded as they run, and used to prefetch.

Nobody knows the order beforehand: it follows from what the program calls. So `Recorder` notes it,
predicts from the last pass what comes next, and stops predicting where this pass differs.
"""

import collections

# How often a unit may come after another one than before, until the oldest is forgotten.
_MOST_CHANGES = 256


class Recorder:
    """The order in which units really ran, and what the last pass says comes next.

    Many forwards may have no backward (an evaluation with gradients), and nobody says so. What is
    kept of them does not grow with their number: of each unit, runs of (the unit that ran before
    it, how many times in a row). Two passes over units 0, 1, 2 are, for unit 1, one run (0, 2).
    """

    def __init__(self) -> None:
        self._before: dict[int, collections.deque[tuple[int | None, int]]] = {}
        self._latest: int | None = None  # whose backward is to come
        self._pass: list[int] = []
        self._last_pass: list[int] = []
        self._agrees = True  # this pass with the last, so far

    def start_pass(self) -> None:
        """A forward of the whole model begins."""
        self._last_pass, self._pass = self._pass, []
        self._agrees = True

    def next_unit(self, unit: int) -> int | None:
        """Record that ``unit`` runs forward now; return the unit that followed in the last pass.

        Only while this pass agrees with the last one so far: after a divergence a guess would
        gather parameters nobody asked for.
        """
        self._pass.append(unit)
        count = len(self._pass)
        if not self._agrees or len(self._last_pass) <= count:
            return None
        self._agrees = self._last_pass[count - 1] == unit
        return self._last_pass[count] if self._agrees else None

    def expect_backward(self, unit: int) -> None:
        """Record a forward that may be differentiated."""
        runs = self._before.get(unit)
        if runs is None:
            runs = self._before[unit] = collections.deque(maxlen=_MOST_CHANGES)
        if runs and runs[-1][0] == self._latest:
            runs[-1] = self._latest, runs[-1][1] + 1
        else:
            runs.append((self._latest, 1))
        self._latest = unit

    def start_backward(self, unit: int) -> int | None:
        """Return the unit whose forward came just before that of ``unit`` which is differentiated.

        The last forward is taken to be differentiated first. None if nothing came before, or if it
        is differentiated more often than it ran.
        """
        runs = self._before.get(unit)
        if not runs:
            return None
        before, count = runs.pop()
        if count > 1:
            runs.append((before, count - 1))
        return before

    def end_iteration(self) -> None:
        self._before.clear()
        self._latest = None

    def forget(self) -> None:
        """After an exception: what was recorded says nothing about the next pass."""
        self.end_iteration()
        self._pass.clear()
        self._last_pass.clear()
