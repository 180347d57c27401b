"""Show an examination: for people a report, worst first, or one JSON object."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fullshard.tools.doctor.checks import judge, verdict_of
from fullshard.tools.doctor.facts import Examination, RankFacts
from fullshard.tools.doctor.findings import Finding, Severity, by_host, counted, numbered, sized
from fullshard.tools.exits import Exit
from fullshard.tools.progress import as_it_is

_COLORS = {
    Severity.PROBLEM: "red",
    Severity.WARNING: "yellow",
    Severity.NOTE: "cyan",
    Severity.OK: "green",
}
_PLAIN_WIDTH = 120  # of a pipe or a file


def findings_table(findings: Sequence[Finding], *, heading: str) -> Table:
    """Return findings with what to do, one a row. heading: of what was found."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "finding", "where"):
        table.add_column(column, no_wrap=column != "where", max_width=32)
    table.add_column(heading, ratio=1)
    for each in findings:
        color = _COLORS[each.severity]
        said = as_it_is(each.measured)
        if each.advice:
            said += f"\n[bold]->[/bold] {as_it_is(each.advice)}"
        severity = f"[{color}]{each.severity.value}[/{color}]"
        table.add_row(severity, each.id, as_it_is(each.where), said)
    return table


def as_dict(exam: Examination, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return verdict, findings and facts as what JSON can hold."""
    listed = [{**dataclasses.asdict(each), "severity": each.severity.value} for each in findings]
    facts = dataclasses.asdict(exam)
    return {"verdict": verdict_of(findings).value, "findings": listed, "facts": facts}


def show(exam: Examination, *, as_json: bool) -> Exit:
    """Print the report on standard output, and return the exit code that it stands for."""
    findings = judge(exam)
    if as_json:
        print(json.dumps(as_dict(exam, findings)), flush=True)
    else:
        _show_report(exam, findings)
    return Exit.FAILED if verdict_of(findings) is Severity.PROBLEM else Exit.OK


def report_console() -> Console:
    """Return a console for a report on standard output: as wide as a terminal, or 120 columns."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(highlight=False, emoji=False, width=width)


def _show_report(exam: Examination, findings: list[Finding]) -> None:
    console = report_console()
    for host, ranks in by_host(exam).items():
        names = numbered(each.rank for each in ranks)
        console.print(f"[bold]{as_it_is(host)}[/bold]: {names}; {as_it_is(_summary(ranks[0]))}")
    console.print()
    console.print(findings_table(findings, heading="measured, and what to do"))
    console.print()
    console.print(_verdict(exam, findings))


def _summary(rank: RankFacts) -> str:
    machine = rank.machine
    said = [machine.system, *(f"{name} {version}" for name, version in rank.versions.items())]
    said.append(f"{machine.cores} cores")
    if machine.memory_nbytes is not None:
        said.append(f"{sized(machine.memory_nbytes)} of memory")
    said += dict.fromkeys(device.name for device in rank.devices.found)
    return ", ".join(said)


def _verdict(exam: Examination, findings: list[Finding]) -> str:
    counts = {kind: sum(each.severity is kind for each in findings) for kind in Severity}
    said = [
        f"[{_COLORS[kind]}]{counted(counts[kind], kind.value)}[/]"
        for kind in (Severity.PROBLEM, Severity.WARNING, Severity.NOTE)
        if counts[kind]
    ]
    outcome = ", ".join(said) or "[green]nothing to mend[/]"
    return (
        f"{counted(exam.num_ranks, 'rank')}, {len(findings)} findings in {exam.seconds:.0f} s: {outcome}"
        f"{'' if counts[Severity.PROBLEM] else '; ready to train'}"
    )
