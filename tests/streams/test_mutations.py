"""The proof of the proof: without any one of the engine's waits, a program finds something wrong.

The sites are found in the source (`mutations`), so a new wait is among them by itself. One that no
program misses is not needed, and goes, or is here with the reason why none can miss it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.streams import mutations
from tests.streams.lab import fake_world
from tests.streams.mutations import Site
from tests.streams.programs import PROGRAMS, SMALL, run_program

# By module, function and text.
NOT_MISSED = {
    (
        "engine/unit.py",
        "Unit._finish_gather",
        "work.wait()",
    ): "runs without lanes alone, where results show it: tests/engine, tests/parity",
    **dict.fromkeys(
        [
            ("engine/gradients/queue.py", "ReductionQueue.discard", text)
            for text in ("reduction.wait()", "in_flight.unit.runtime.on(Lane.REDUCE)")
        ],
        "with lanes, what was started is finished at once: tests/engine",
    ),
    **dict.fromkeys(
        [
            (
                "engine/gradients/queue.py",
                "ReductionQueue.finish",
                "oldest.unit.runtime.on(Lane.REDUCE)",
            ),
            (
                "engine/gradients/queue.py",
                "ReductionQueue.make_way",
                "unit.runtime.on(Lane.REDUCE)",
            ),
        ],
        "compute, which the lane follows, would wait: slower, not wrong (test_order.py)",
    ),
    **dict.fromkeys(
        [
            ("optim/state_memory.py", f"Slot.{name}", f"{ticket}.wait()")
            for name, ticket in (
                ("arrive", "self._read"),
                ("finish_arrival", "self._read"),
                ("finish_writing", "self._written"),
            )
        ],
        "waits for threads that read and write files: tests/optim",
    ),
    (
        "optim/state_memory.py",
        "Slot._copy_in",
        "runtime.on(Lane.STATE_IN)",
    ): "compute would copy it: slower, not wrong (test_state.py)",
    **dict.fromkeys(
        [
            ("engine/iteration.py", f"Iteration.begin_{name}", "self.units[0].runtime.record()")
            for name in ("forward", "backward")
        ],
        "gathers would wait for all of compute: slower, not wrong (test_rotation.py)",
    ),
}

# What misses most of them, so it is tried first; the rest follows.
_FIRST = (
    "optimizer-on-its-own-stream",
    "custom-collectives",
    "bf16-async",
    "all-reduce-hook-on-a-stream",
    "offload-hooks-before",
    "offload-hooks-after",
    "offload-accumulate-each",
    "offload-extensions",
    "offload-load",
    "exception-in-backward",
    "unshard-and-read",
    "pieces-unsharded-first",
    "pieces-whole-between-async",
    "reduced-twice-hsdp",
)
_TRIED = [*((n, SMALL) for n in _FIRST), ("exception-in-a-hook-async", "two_dtypes")]
_TRIED += [("hsdp-bf16-all", "deep"), ("exception-in-a-hook-hsdp", "two_dtypes")]
_TRIED += [(n, SMALL) for n in PROGRAMS if n not in _FIRST]


def _key(site: Site) -> tuple[str, str, str]:
    return site.module, site.function, site.text


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Be one rank of four; the others answer at once."""
    with fake_world():
        yield


def _what_is_missed(site: Site) -> str:
    """Return the first thing that goes wrong without a site; empty if nothing does."""
    with mutations.taken_out(site):
        for name, problem in _TRIED:
            try:
                problems = run_program(name, problem).problems
            except Exception as error:  # also something that goes wrong
                problems = [repr(error)]
            if problems:
                return f"{name}: {problems[0]}"
    return ""


def test_sites_are_those_of_the_engine() -> None:
    found = mutations.sites()
    assert {site.kind for site in found} == {
        *("wait", "finish", "record", "following", "on", "keep-alive")
    }
    assert NOT_MISSED.keys() <= set(map(_key, found))
    for module in mutations.LEFT_OUT:
        assert (mutations.SOURCE / module).exists()
    # Some that have to be among them, by what they are.
    of_units = {site.text for site in found if site.function == "Unit._start_gather"}
    assert of_units == {
        "self.runtime.following(Lane.ALL_GATHER)",
        "self.runtime.on(Lane.ALL_GATHER)",
        "self.runtime.record()",
        "work.wait()",
    }


def test_a_site_that_was_taken_out_comes_back() -> None:
    site = next(site for site in mutations.sites() if site.function == "ReductionQueue._release")
    assert run_program("plain", SMALL).problems == []
    with mutations.taken_out(site):
        assert run_program("plain", SMALL).problems != []
    assert run_program("plain", SMALL).problems == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("site", mutations.sites(), ids=str)
def test_every_wait_is_missed(site: Site) -> None:
    missed = _what_is_missed(site)
    if reason := NOT_MISSED.get(_key(site)):
        assert missed == "", f"is missed after all, so it need not be excused: {reason}"
    else:
        assert missed, f"no program misses line {site.line} of {site.module}: {site.text}"
