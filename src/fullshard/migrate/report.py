"""`migrate_report` says how to shard a `FullyShardedDataParallel` model with `fully_shard`."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from torch import nn

from fullshard.migrate.arguments import PROGRAM, Translation, translate
from fullshard.migrate.code import plan_calls, source_code
from fullshard.migrate.instances import find_instances

_WIDTH = 100


@dataclasses.dataclass(frozen=True, slots=True)
class InstanceReport:
    """The report on one instance.

    path: of the wrapped module, in the model before it was wrapped; "" for the model itself.
    call: as source text, using variables of the report's code; "" if none is needed, and ``note``
        then says why.
    """

    path: str
    module_class: str
    call: str
    note: str
    arguments: tuple[Translation, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MigrationReport:
    """A wrapped model in terms of `fully_shard`; ``str()`` gives a text that ends with the code.

    program: changes elsewhere in the program: arguments that instances do not keep, and methods.
    code: a program that shards ``model``, the model before it was wrapped, as the instances do.
    """

    instances: tuple[InstanceReport, ...]
    program: tuple[Translation, ...]
    code: str

    def as_dict(self) -> dict[str, Any]:
        """Return the report as lists, dicts, strings and booleans."""
        return {
            "instances": [
                {**dataclasses.asdict(each), "arguments": _dicts(each.arguments)}
                for each in self.instances
            ],
            "program": _dicts(self.program),
            "code": self.code,
        }

    def __str__(self) -> str:
        common = [
            each
            for each in self.instances[0].arguments
            if all(each in instance.arguments for instance in self.instances)
        ]
        calls = sum(bool(instance.call) for instance in self.instances)
        lines = [f"instances of FullyShardedDataParallel: {len(self.instances)}; calls: {calls}"]
        for group in _alike(self.instances):
            lines += ["", *_describe(group, common)]
        if common:
            lines += ["", "In every instance", *_bullets(common)]
        lines += ["", "In the program", *_bullets(self.program)]
        return "\n".join([*lines, "", "```python", self.code.rstrip(), "```"])


def migrate_report(model: nn.Module) -> MigrationReport:
    """Return the `fully_shard` calls that replace a model's `FullyShardedDataParallel` instances.

        print(migrate_report(model))
        exec(migrate_report(model).code, {"model": unwrapped_copy})

    Changes nothing and communicates nothing. Raises StateError if nothing in the model is wrapped.
    """
    instances = find_instances(model)
    planned = plan_calls(model, instances)
    reports = []
    for instance, call in zip(instances, planned.calls, strict=True):
        target = f'model.get_submodule("{call.path}")' if call.path else "model"
        reports.append(
            InstanceReport(
                path=instance.path,
                module_class=f"{instance.kind.__module__}.{instance.kind.__qualname__}",
                call="" if instance.skipped else call.on(target),
                note=instance.skipped.value if instance.skipped else "",
                arguments=translate(instance, call),
            )
        )
    return MigrationReport(tuple(reports), PROGRAM, source_code(planned, instances))


def _dicts(translations: Sequence[Translation]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) for each in translations]


def _alike(instances: Sequence[InstanceReport]) -> list[list[InstanceReport]]:
    """Return groups of instances that differ in their path alone."""
    groups: dict[object, list[InstanceReport]] = {}
    for each in instances:
        shape = each.call.replace(f'"{each.path}"', "")
        groups.setdefault((each.module_class, shape, each.note, each.arguments), []).append(each)
    return list(groups.values())


def _describe(group: Sequence[InstanceReport], common: Sequence[Translation]) -> list[str]:
    first = group[0]
    paths = [each.path or "(root)" for each in group]
    if len(paths) > 4:
        paths = [*paths[:2], "...", paths[-1]]
    name = first.module_class.rpartition(".")[2]
    count = f", {len(group)} instances" if len(group) > 1 else ""
    call = first.call
    if len(group) > 1:
        call = call.replace(f'"{first.path}"', "path")
    own = [each for each in first.arguments if each not in common]
    return [
        f"{', '.join(paths)} ({name}{count})",
        f"    {call or first.note}",
        *_bullets(own),
    ]


def _bullets(translations: Sequence[Translation]) -> list[str]:
    return [
        textwrap.fill(
            str(each),
            _WIDTH,
            initial_indent="    ",
            subsequent_indent="        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for each in translations
    ]
