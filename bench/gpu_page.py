"""What `bench.gpu` has measured, as JSON that a later run goes on from, and as a page.

Pure: numbers in, text out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from .goals import GPU_TARGETS, GpuTarget
from .gpu_settings import Setting
from .tables import Spread, Table, ratio_across, spread

NUM_LOSSES_COMPARED = 8


@dataclass
class Measured:
    """What one entry did: a value a round, losses of every step, and what a trace of one step showed."""

    step_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    overlap: str = ""

    @property
    def waits_for_host(self) -> bool:
        """Whether the device had little left to do once the host was free again."""
        return median(self.host_ms) > 0.9 * median(self.step_ms)


Batch = dict[str, Measured]


@dataclass
class Outcome:
    """A setting's measurements, batch by batch, and which entries failed or were left out.

    is_complete: all rounds of all batches are over. seconds: what it took, imports included.
    """

    batches: list[Batch] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_complete: bool = False
    seconds: float = 0.0
    date: str = ""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Outcome:
        """Read what `dataclasses.asdict` wrote. Raises TypeError for the fields of another version."""
        outcome = cls(**values)
        outcome.batches = [
            {name: Measured(**each) for name, each in batch.items()} for batch in values["batches"]
        ]
        return outcome

    @property
    def merged(self) -> Batch:
        """Return every entry once, as it was first measured."""
        return {name: each for batch in reversed(self.batches) for name, each in batch.items()}


class Ratio(NamedTuple):
    """A ratio of step times; is_in_turn: taken round by round, and not of medians one after the other."""

    value: Spread
    is_in_turn: bool

    def __str__(self) -> str:
        return str(self.value) if self.is_in_turn else f"~{self.value.median:.2f}"


def ratio(setting: Setting, outcome: Outcome, name: str, base: str) -> Ratio | None:
    """Compare two entries' steps; None if one of them was not measured."""
    times = [{each: found.step_ms for each, found in batch.items()} for batch in outcome.batches]
    found = ratio_across(times, name, base, by_way_of=setting.bases[-1])
    if found is not None:
        return Ratio(found, is_in_turn=True)
    merged = outcome.merged
    if name not in merged or base not in merged:
        return None
    quotient = median(merged[name].step_ms) / median(merged[base].step_ms)
    return Ratio(Spread(quotient, quotient, quotient), is_in_turn=False)


def table_of(setting: Setting, outcome: Outcome, peak_flops: float | None) -> Table:
    """Write a setting as a table: a row for each entry, also for one that failed."""
    columns = ["", "step ms", "host ms", "MFU", *(f"over {base}" for base in setting.bases)]
    columns += ["peak MB", "peak over fsdp2", "kernels", "launches", "host waits"]
    table = Table(setting.title, columns)
    merged = outcome.merged
    base = merged.get("fsdp2")
    for entry in setting.entries:
        found = merged.get(entry.name)
        if found is None:
            why = "failed" if entry.name in outcome.failed else "not measured"
            table.rows.append([entry.name, why, *["-"] * (len(columns) - 2)])
            continue
        peak, counts = median(found.peak_mb), found.counts
        table.rows.append(
            [
                entry.name,
                f"{median(found.step_ms):.1f}",
                f"{median(found.host_ms):.1f}",
                "-" if peak_flops is None else f"{mfu(setting, found, peak_flops):.1%}",
                *(str(ratio(setting, outcome, entry.name, each) or "-") for each in setting.bases),
                f"{peak:,.0f}",
                f"{peak / median(base.peak_mb):.2f}" if base and median(base.peak_mb) else "-",
                *(str(counts.get(each) or "-") for each in ("kernels", "launches")),
                str(counts.get("waits", "-")),
            ]
        )
    table.notes += _notes(setting, outcome, peak_flops)
    return table


def mfu(setting: Setting, found: Measured, peak_flops: float) -> float:
    """Return the share of the peak that the model's own operations take; recomputed ones do not count."""
    return setting.flops_per_step / (1e-3 * median(found.step_ms)) / peak_flops


def largest_loss_difference(found: Batch) -> float:
    """Return by how much the first losses of the entries differ."""
    columns = zip(*(each.losses[:NUM_LOSSES_COMPARED] for each in found.values()), strict=False)
    return max((max(column) - min(column) for column in columns), default=0.0)


def _notes(setting: Setting, outcome: Outcome, peak_flops: float | None) -> list[str]:
    merged, size = outcome.merged, setting.config
    attention = 12 * size.num_layers * size.hidden_size * setting.tokens
    weights = (setting.flops_per_step // setting.num_tokens - attention) // 6
    of = "an unknown peak" if peak_flops is None else f"{peak_flops / 1e12:,.1f} TFLOP/s"
    notes = [
        f"MFU: (6 x {weights:,} weights of matrices + 12 x {size.num_layers} layers x {size.hidden_size} x "
        f"{setting.tokens} positions of attention) x {setting.num_tokens:,} tokens = "
        f"{setting.flops_per_step:.3e} FLOP a step, of {of}.",
        f"Losses of the first {NUM_LOSSES_COMPARED} steps differ by {largest_loss_difference(merged):.1e}.",
    ]
    waiting = [name for name, each in merged.items() if each.waits_for_host]
    if waiting:
        notes.append(f"The device waits for the host (host-bound): {', '.join(waiting)}.")
    if len(outcome.batches) > 1:
        together = "; ".join(", ".join(batch) for batch in outcome.batches)
        notes.append(
            f"Alive at the same time, as not all fit on the device: {together}. Other ratios go by way of "
            f"{setting.bases[-1]}; ~ is a quotient of medians, of entries that took no turns."
        )
    notes += [f"{name}: {each.overlap}." for name, each in merged.items() if each.overlap]
    notes += [f"{name} failed: {_last_line(text)}" for name, text in outcome.failed.items()]
    notes += [f"{name} not measured: {why}." for name, why in outcome.left_out.items()]
    if outcome.seconds:
        notes.append(f"Measured on {outcome.date}, in {outcome.seconds:.0f} s.")
    return [*notes, *outcome.notes]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["?"])[-1]


def goals_table(
    settings: Sequence[Setting], outcomes: Mapping[str, Outcome], peak_flops: float | None
) -> Table:
    """Say of every goal whether it was met."""
    table = Table("Goals", ["", "entry", "measured", "goal", ""])
    by_name = {setting.name: setting for setting in settings}
    for target in GPU_TARGETS:
        for name in target.goal.faces:
            value, text = None, "-"
            if target.setting in outcomes and target.setting in by_name:
                setting, outcome = by_name[target.setting], outcomes[target.setting]
                value, text = _value(target, name, setting, outcome, peak_flops)
            verdict = "not measured"
            if value is not None:
                verdict = "met" if target.goal.is_reached_by(value) else "not met"
            table.rows.append([str(target), name, text, str(target.goal), verdict])
    return table


def _value(
    target: GpuTarget, name: str, setting: Setting, outcome: Outcome, peak_flops: float | None
) -> tuple[float | None, str]:
    merged = outcome.merged
    if name not in merged:
        return None, "-"
    match target.quantity:
        case "MFU":
            value = None if peak_flops is None else mfu(setting, merged[name], peak_flops)
            return value, "-" if value is None else f"{value:.3f}"
        case "ratio":
            found = ratio(setting, outcome, name, target.base)
            return (None, "-") if found is None else (found.value.median, str(found))
        case "added ms":
            for batch in outcome.batches:
                if name in batch and target.base in batch:
                    pairs = zip(batch[name].step_ms, batch[target.base].step_ms, strict=True)
                    added = spread([(x - y) / setting.config.num_layers for x, y in pairs])
                    return added.median, str(added)
    return None, "-"


_HOW = (
    "Medians over rounds in which the entries took turns; ratios are medians of the ratios within a round "
    "(lowest to highest). Host ms is when the host was free again. Kernels run on the device in a step; launches "
    "are what the host gives it (kernels, graphs, copies); host waits are calls in which the host waits for it. "
    "`python -m bench.gpu` repeats it."
)


def as_markdown(
    facts: Mapping[str, Any],
    settings: Sequence[Setting],
    outcomes: Mapping[str, Outcome],
    peak_flops: float | None,
) -> str:
    """Write everything as a page, goals first."""
    about = ", ".join(f"{name} {value}" for name, value in facts.items())
    tables = [goals_table(settings, outcomes, peak_flops)]
    measured = [setting for setting in settings if setting.name in outcomes]
    tables += [table_of(each, outcomes[each.name], peak_flops) for each in measured]
    lines = ["# Training on one GPU", "", f"Measured on: {about}.", "", _HOW, ""]
    return "\n".join(lines) + "\n".join(["", *(table.markdown() for table in tables)])


def as_values(facts: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return what goes into the JSON."""
    found = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
    return {"machine": dict(facts), "settings": found}
