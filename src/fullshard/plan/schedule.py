"""Record the order in which a model's units run, and predict from it what to prefetch.

Nobody knows the order beforehand: it follows from what the program calls. So `Recorder` notes it,
predicts from the last pass what comes next, and stops predicting where this pass differs.
"""

import collections

# Runs kept per unit (see `Recorder`); older ones are forgotten.
_MOST_CHANGES = 256


class Recorder:
    """The order in which units ran, and predictions of the next unit, for prefetching.

    For backward it keeps, per unit, which unit ran forward before it. Forwards may never get a
    backward (an evaluation with gradients), and nothing announces that. So that memory does not
    grow with their number, equal neighbours are counted: per unit, a list of runs (unit that ran
    before it, number of times in a row). After two passes over units 0, 1, 2, unit 1 has one run,
    (0, 2).
    """

    def __init__(self) -> None:
        self._before: dict[int, collections.deque[tuple[int | None, int]]] = {}
        # The last unit that ran a forward with gradients and has had no backward since.
        self._latest: int | None = None
        self._pass: list[int] = []
        self._last_pass: list[int] = []
        self._agrees = True  # whether this pass has been like the last one so far

    def start_pass(self) -> None:
        """Note that a forward of the whole model begins."""
        self._last_pass, self._pass = self._pass, []
        self._agrees = True

    def next_unit(self, unit: int) -> int | None:
        """Record that ``unit`` runs forward now; return the unit that followed it in the last pass.

        None once this pass differs from the last one: a guess might then gather parameters that
        nobody uses.
        """
        self._pass.append(unit)
        count = len(self._pass)
        if not self._agrees or len(self._last_pass) <= count:
            return None
        self._agrees = self._last_pass[count - 1] == unit
        return self._last_pass[count] if self._agrees else None

    def expect_backward(self, unit: int) -> None:
        """Record a forward of ``unit`` that may have a backward."""
        runs = self._before.get(unit)
        if runs is None:
            runs = self._before[unit] = collections.deque(maxlen=_MOST_CHANGES)
        if runs and runs[-1][0] == self._latest:
            runs[-1] = self._latest, runs[-1][1] + 1
        else:
            runs.append((self._latest, 1))
        self._latest = unit

    def start_backward(self, unit: int) -> int | None:
        """Record that a backward of ``unit`` begins; return the unit whose backward should follow.

        That is the unit that ran forward just before it. If ``unit`` ran several times, its last
        forward is taken to have its backward first. None if nothing ran before it, or if it has
        more backwards than forwards.
        """
        runs = self._before.get(unit)
        if not runs:
            return None
        before, count = runs.pop()
        if count > 1:
            runs.append((before, count - 1))
        if unit == self._latest:
            self._latest = before  # of the forwards whose backward is still to come
        return before

    def expects_backward(self, unit: int) -> bool:
        """Return whether a forward of ``unit`` has yet to get its backward.

        It has not once the backward of a unit around it is over.
        """
        return bool(self._before.get(unit))

    def end_iteration(self) -> None:
        """Forget forwards that got no backward."""
        self._before.clear()
        self._latest = None

    def forget(self) -> None:
        """Forget everything, after an exception: the interrupted pass predicts nothing."""
        self.end_iteration()
        self._pass.clear()
        self._last_pass.clear()
