"""Show a comparison: for people a report side by side, or one JSON object."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from fullshard.json_files import json_text
from fullshard.tools.doctor.checks import verdict_of
from fullshard.tools.doctor.findings import Finding, Severity, counted, numbered, sized, timed
from fullshard.tools.doctor.printing import findings_table, report_console
from fullshard.tools.exits import Exit
from fullshard.tools.progress import as_it_is
from fullshard.tools.verify.comparing import RANK_DIED, Comparison, Difference
from fullshard.tools.verify.judging import judge


def show(comparison: Comparison, *, as_json: bool) -> Exit:
    """Print the report on standard output, and return the exit code that it stands for."""
    findings = judge(comparison)
    if as_json:
        print(json_text(as_dict(comparison, findings)), flush=True)
    else:
        _show_report(comparison, findings)
    failure = comparison.alone.failure
    if comparison.died or (failure is not None and failure.kind == RANK_DIED):
        return Exit.RANK_LOST
    return Exit.FAILED if verdict_of(findings) is Severity.PROBLEM else Exit.OK


def _show_report(comparison: Comparison, findings: list[Finding]) -> None:
    console = report_console()
    for table in (_losses(comparison), _values(comparison), _costs(comparison)):
        if table.row_count:
            console.print(table)
            console.print()
    console.print(findings_table(findings, heading="found, and what to do"))
    console.print()
    for trace in _traces(comparison):
        console.print(as_it_is(trace), style="dim")
    if said := _first_module(comparison):
        console.print(said)
    console.print(_verdict(comparison, findings))


def _traces(comparison: Comparison) -> Iterator[str]:
    """Yield where the one process failed, or the ranks: once what several say alike."""
    runs = {comparison.reference: comparison.alone}
    runs |= {f"rank {rank}": run for rank, run in comparison.ranks.items()}
    seen = set()
    for name, run in runs.items():
        if run.failure is None or run.failure.is_nothing:
            continue  # the finding says all
        if run.failure.text not in seen:
            seen.add(run.failure.text)
            yield f"{name}:\n{run.failure.trace}"


def _losses(comparison: Comparison) -> Table:
    table = _table("loss of a part", comparison.reference, "sharded", "")
    has_several = any(loss.backward for loss in comparison.losses)
    for loss in comparison.losses:
        mark = "[red]differs[/red]" if loss.differs else ""
        where = f"step {loss.step}, rank {loss.rank}"
        if has_several:
            where += f", backward {loss.backward}"
        table.add_row(where, f"{loss.alone:.8g}", f"{loss.sharded:.8g}", mark)
    return table


def _values(comparison: Comparison) -> Table:
    """One line for each kind: the worst difference of the first and the last step, and of all."""
    steps = list(dict.fromkeys(each.step for each in comparison.worst))
    ends = tuple(dict.fromkeys((*steps[:1], *steps[-1:])))
    table = _table("worst difference", *(f"step {step}" for step in ends))
    table.add_column("where it is worst", overflow="fold")
    for kind in dict.fromkeys(each.kind for each in comparison.worst):
        by_step = {each.step: each for each in comparison.worst if each.kind == kind}
        worst = max(by_step.values(), key=lambda each: (each.exceeds, each.relative))
        rank = "" if worst.rank is None else f", rank {worst.rank}"
        where = f"{_difference(worst)} {as_it_is(worst.label)} (step {worst.step}{rank})"
        shown = (_difference(by_step[step]) if step in by_step else "" for step in ends)
        table.add_row(f"{kind}s", *shown, where if worst.worst else "")
    return table


def _difference(difference: Difference) -> str:
    relative = difference.relative
    said = f"{relative:.1e}" if math.isfinite(relative) else "not comparable"
    return f"[red]{said}[/red]" if difference.exceeds else said if relative else "0"


def _costs(comparison: Comparison) -> Table:
    table = _table("with recording on", "peak memory", "time of a step")
    of_all = "rank 0, whole model" if comparison.options.script else "one process (all parts)"
    processes = {of_all: comparison.alone}
    processes |= {f"rank {rank}": run for rank, run in comparison.ranks.items()}
    for name, run in processes.items():
        peak = "unknown" if run.peak_nbytes is None else sized(run.peak_nbytes)
        if run.seconds:
            # Without the first step, which sets things up.
            table.add_row(name, peak, timed(statistics.median(run.seconds[1:] or run.seconds)))
    return table


def _first_module(comparison: Comparison) -> str:
    first = comparison.first
    if first is None or first.missing:
        return ""
    name = f"{first.output.path or '(the model)'} ({first.output.kind})"
    where = f"in step {first.step} on rank {first.rank}, call {first.output.call}"
    how = f"its output differs by {first.relative:.1e} of its largest value"
    return f"first module that differs: [bold]{as_it_is(name)}[/bold] {where}; {how}"


def _verdict(comparison: Comparison, findings: list[Finding]) -> str:
    options, (rtol, atol) = comparison.options, comparison.tolerance
    of_what, num_steps = f"SGD (lr {options.lr:g})", options.steps
    if options.script:  # which may end before
        of_what = options.script
        num_steps = len({each.step for each in comparison.worst if each.kind == "parameter"})
    ran = f"{counted(options.ranks, 'rank')}, {counted(num_steps, 'step')} of {of_what}"
    ran += f", {comparison.seconds:.0f} s"
    part = f"{rtol:.2g}" if rtol < 1e-5 else f"{100 * rtol:.2g} %"
    allowed = f"{part} of its largest value (rtol {rtol:g}, atol {atol:g})"
    if comparison.died:
        return f"[red]failed[/red]: {numbered(comparison.died)} died. {ran}"
    problems = [each for each in findings if each.severity is Severity.PROBLEM]
    if not problems:
        return f"[green]equal[/green]: nothing differs by more than {allowed}. {ran}"
    runs = (comparison.alone, *comparison.ranks.values())
    first = problems[0]
    what = f"{first.id} ({as_it_is(first.where)})"
    if any(run.failure is not None for run in runs):
        said = as_it_is(first.where) if first.id == "failed" else what
        return f"[red]failed[/red]: {said}. {ran}"
    return f"[red]differs[/red]: {what}. Allowed is {allowed}. {ran}"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def as_dict(comparison: Comparison, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return comparison, findings and verdict as what JSON can hold.

    Outputs of modules and fingerprints are left out.
    """
    listed = [{**dataclasses.asdict(each), "severity": each.severity.value} for each in findings]
    facts = dataclasses.asdict(comparison)
    facts["options"]["script"] = comparison.options.script
    for run in (facts["alone"], *facts["ranks"].values()):
        for left_out in ("own", "initial", "buffers"):
            del run[left_out]
        for part in run["parts"]:
            del part["outputs"], part["batch"]
    return {"verdict": verdict_of(findings).value, "findings": listed, **facts}
