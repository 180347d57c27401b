"""From facts to findings and a verdict, without measuring anything."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from fullshard.tools.doctor import judge_machines as machines
from fullshard.tools.doctor import judge_together as together
from fullshard.tools.doctor.facts import Examination
from fullshard.tools.doctor.findings import Finding, Severity

JUDGES: tuple[Callable[[Examination], Iterable[Finding]], ...] = (
    together.judge_meeting,
    together.judge_knocks,
    together.judge_links,
    together.judge_nccl,
    together.judge_communication,
    together.judge_versions,
    together.judge_packages,
    together.judge_variables,
    together.judge_alike,
    together.judge_clocks,
    machines.judge_torch,
    machines.judge_backends,
    machines.judge_devices,
    machines.judge_cores,
    machines.judge_memory,
    machines.judge_shared_memory,
    machines.judge_open_files,
    machines.judge_locked_memory,
    machines.judge_tasks,
    machines.judge_host_names,
    machines.judge_environment,
    machines.judge_py_spy,
)


def judge(exam: Examination) -> list[Finding]:
    """Return every finding, worst first; among equals, what ranks do together comes first."""
    found = [finding for judge_one in JUDGES for finding in judge_one(exam)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def verdict_of(findings: Iterable[Finding]) -> Severity:
    """Return the worst severity."""
    order = list(Severity)
    worst = min((order.index(each.severity) for each in findings), default=len(order) - 1)
    return order[worst]


def as_dict(exam: Examination, findings: Iterable[Finding]) -> dict[str, Any]:
    """Return facts, findings and verdict as what JSON can hold."""
    listed = [{**dataclasses.asdict(each), "severity": each.severity.value} for each in findings]
    facts = dataclasses.asdict(exam)
    return {"verdict": verdict_of(findings).value, "findings": listed, "facts": facts}
