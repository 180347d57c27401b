"""Rows of the summary: one number per implementation, and what ours has to reach.

Pure: numbers in, cells out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

COLUMNS = {
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
    "fullshard": "fullshard",
    "fullshard-unmodified": "unmodified",
    "fullshard-fsdp1": "as FSDP1",
    "fullshard-pg": "over Gloo",
}
PEERS = ("ddp", "fsdp1", "fsdp2", "deepspeed")
FACES = ("fullshard", "fullshard-fsdp1")
HEADINGS = ["", *COLUMNS.values(), "goal", "reached"]


@dataclass(frozen=True)
class Goal:
    """A limit on our numbers; `faces` are the columns that must keep to it."""

    comparison: Literal["<=", "<", ">="]
    limit: float
    faces: tuple[str, ...] = FACES

    def is_reached_by(self, value: float) -> bool:
        match self.comparison:
            case "<=":
                return value <= self.limit
            case "<":
                return value < self.limit
            case ">=":
                return value >= self.limit

    def __str__(self) -> str:
        return f"{self.comparison} {self.limit:.2f}"


def at_most(limit: float, *faces: str) -> Goal:
    return Goal("<=", limit, faces or FACES)


def at_least(limit: float, *faces: str) -> Goal:
    return Goal(">=", limit, faces or FACES)


# Against the fastest of the others, whose column is 1.
AHEAD = Goal("<", 1.0)


@dataclass(frozen=True)
class Row:
    """One line: a number per implementation, the goal, and why a cell is blank."""

    what: str
    values: Mapping[str, float]
    goal: Goal | None = None
    blanks: Mapping[str, str] = field(default_factory=dict)
    digits: int = 3

    @property
    def missed_by(self) -> list[str]:
        """The columns that should reach the goal and do not, or were not measured."""
        if self.goal is None:
            return []
        return [face for face in self.goal.faces if not self._is_reached_by(face, self.goal)]

    def _is_reached_by(self, face: str, goal: Goal) -> bool:
        return face in self.values and goal.is_reached_by(self.values[face])

    @property
    def is_reached(self) -> bool | None:
        return None if self.goal is None else not self.missed_by

    def cells(self) -> list[str]:
        """Return the line under `HEADINGS`; of a goal that one face misses it names the face."""
        texts = [self._cell(name) for name in COLUMNS]
        return [self.what, *texts, str(self.goal or ""), self._verdict()]

    def _cell(self, name: str) -> str:
        if name in self.values:
            return f"{self.values[name]:,.{self.digits}f}"
        return "-" if name in self.blanks else ""

    def _verdict(self) -> str:
        if self.goal is None:
            return ""
        missed = self.missed_by
        if not missed:
            return "yes"
        if len(missed) == len(self.goal.faces):
            return "no"
        return f"no: {', '.join(COLUMNS[name] for name in missed)}"


@dataclass(frozen=True)
class Section:
    """The rows of one setting."""

    title: str
    rows: list[Row]

    def notes(self) -> list[str]:
        """Say once why an implementation has no numbers here."""
        reasons: dict[str, str] = {}
        for row in self.rows:
            reasons |= row.blanks
        return [f"{self.title}: no {COLUMNS[name]}, {why}" for name, why in reasons.items()]


def count_reached(sections: Sequence[Section]) -> tuple[int, int]:
    """Return how many goals are reached, and how many there are."""
    verdicts = [row.is_reached for section in sections for row in section.rows]
    judged = [verdict for verdict in verdicts if verdict is not None]
    return sum(judged), len(judged)


@dataclass(frozen=True)
class GpuTarget:
    """What an entry of a setting of `bench.gpu` should reach; entries are columns of the goal.

    quantity: "ratio" of its step to that of `base`, "added ms" to the step of `base` for each layer, or "MFU".
    """

    setting: str
    quantity: Literal["ratio", "added ms", "MFU"]
    goal: Goal
    base: str = ""

    def __str__(self) -> str:
        what = {
            "ratio": f"step over {self.base}",
            "added ms": f"ms a layer beyond {self.base}",
            "MFU": "MFU",
        }
        return f"{self.setting}: {what[self.quantity]}"


# On one H100 or H200. Compute-bound: never above FSDP2, and next to nothing above the model as it is.
GPU_TARGETS = (
    *(
        GpuTarget(setting, "ratio", at_most(limit, "fullshard"), base)
        for setting in ("1b", "1b-compiled", "3b", "3b-compiled")
        for base, limit in (("unwrapped", 1.02), ("fsdp2", 1.0))
    ),
    GpuTarget("3b-compiled", "MFU", at_least(0.5, "fullshard")),
    GpuTarget("small", "added ms", at_most(0.5, "fullshard"), "unwrapped"),
    GpuTarget("small-captured", "ratio", at_most(1.05, "fullshard"), "unwrapped"),
    GpuTarget("offload", "ratio", at_most(1.3, "fullshard offload=optimizer"), "fullshard"),
    GpuTarget("offload", "ratio", at_most(2.0, "fullshard offload=all"), "fullshard"),
)
