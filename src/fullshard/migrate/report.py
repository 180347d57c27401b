"""`migrate_report` says how to shard a `FullyShardedDataParallel` model with `fully_shard`, and writes the program."""

import dataclasses
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.migrate.translation import (
    PROGRAM,
    Translation,
    call_for,
    policy_expression,
)
from fullshard.migrate.wrappers import (
    Instance,
    find_instances,
    mesh_expression,
    original_path,
    owner_among,
    wrappers_in,
)

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
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return found

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
    mesh_of, meshes = _variables("mesh", instances, mesh_expression)
    policy_of, policies = _variables("mp_policy", instances, policy_expression)
    ignored = _ignored_names(model, instances)
    calls: list[tuple[Instance, str]] = []
    reports: list[InstanceReport] = []
    for instance, mesh, policy in zip(instances, mesh_of, policy_of, strict=True):
        names = _below(instance, ignored)
        call, arguments = call_for(instance, mesh=mesh, policy=policy, ignored=names)
        kind, shown = instance.kind, call.format(_module_at(instance.path))
        if instance.note:
            shown = ""
        else:
            calls.append((instance, call))
        module_class = f"{kind.__module__}.{kind.__qualname__}"
        reports.append(InstanceReport(instance.path, module_class, shown, instance.note, arguments))
    variables = {**meshes, **policies}
    if ignored:
        variables["ignored"] = f"{{model.get_parameter(name) for name in {_tuple(ignored)}}}"
    is_alone = any(instance.is_alone for instance in instances)
    code = _program(model, calls, variables, is_alone=is_alone)
    return MigrationReport(tuple(reports), PROGRAM, code)


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


# What the options of calls name


def _variables(
    name: str, instances: Sequence[Instance], expression_of: Callable[[Instance], str | None]
) -> tuple[list[str | None], dict[str, str]]:
    """Return the variable of each instance for an expression, if it has one, and the expressions by variables.

    The variables are `name`, or name_1 and name_2 if there are several expressions.
    """
    expressions = [None if each.note else expression_of(each) for each in instances]
    distinct = [each for each in dict.fromkeys(expressions) if each]
    several = [f"{name}_{n}" for n in range(1, len(distinct) + 1)]
    names = dict(zip(distinct, several if len(distinct) > 1 else [name], strict=False))
    assigned = {name: expression for expression, name in names.items()}
    return [names.get(each) if each else None for each in expressions], assigned


def _ignored_names(model: nn.Module, instances: Iterable[Instance]) -> dict[str, nn.Parameter]:
    """Return the parameters that any instance ignores, by name before wrapping, each once."""
    ignored = {p for instance in instances for p in instance.wrapper._ignored.params}
    names: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in ignored:
                names.setdefault(parameter, _joined(original_path(path), name))
    return {name: parameter for parameter, name in names.items()}


def _below(instance: Instance, ignored: Mapping[str, nn.Parameter]) -> list[str]:
    inside = {p for m in instance.wrapper.modules() for p in m._parameters.values()}
    return [name for name, parameter in ignored.items() if parameter in inside]


# The program


def _program(
    model: nn.Module,
    calls: Sequence[tuple[Instance, str]],
    variables: Mapping[str, str],
    *,
    is_alone: bool,
) -> str:
    """Return the program: imports, variables, then the calls bottom-up, in loops if equal."""
    body = [_assignment(name, expression) for name, expression in variables.items()]
    body += [""] if body else []
    for _, group in itertools.groupby(sorted(calls, key=_loop_key), key=_loop_key):
        body += _loop(list(group))
    body += _buffer_casts(model)
    remarks = ["# `model` is as it was before it was wrapped."]
    if is_alone:
        remarks.append("# As for FULL_SHARD: on one rank, what was asked for is not known.")
    return "\n".join([*_imports("\n".join(body)), "", *remarks, *body, ""])


def _module_at(path: str) -> str:
    return f'model.get_submodule("{path}")' if path else "model"


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _assignment(name: str, expression: str) -> str:
    line = f"{name} = {expression}"
    if len(line) <= _WIDTH or not expression.startswith("MixedPrecisionPolicy("):
        return line
    function, fields = line.removesuffix(")").split("(", 1)
    return "\n".join([f"{function}(", *(f"    {field}," for field in fields.split(", ")), ")"])


def _loop_key(each: tuple[Instance, str]) -> tuple[int, str, str, str]:
    """Return a sort key: bottom-up, and calls that can be one loop next to each other.

    Those of blocks.0 and blocks.1 can, that of blocks.0.norm cannot.
    """
    instance, call = each
    path = re.sub(r"\d+", "#", instance.path)
    return instance.height, instance.kind.__name__, call, path


def _loop(calls: Sequence[tuple[Instance, str]]) -> list[str]:
    """Return the lines of one call, or of a loop over the paths of several equal ones."""
    paths = [instance.path for instance, _ in calls]
    instance, call = calls[0]
    remark = f"  # {instance.kind.__name__}"
    if len(calls) == 1:
        return [f"{call.format(_module_at(instance.path))}{remark}"]
    ranges = _ranges(paths)
    if ranges is None:
        loop = f"for path in {_tuple(paths)}:{remark}"
        return [loop, f"    {call.format('model.get_submodule(path)')}"]
    lines, path, indent = [], instance.path.split("."), ""
    for (position, numbers), name in zip(ranges.items(), "ijklmn", strict=False):
        span = f"{numbers[-1] + 1}" if numbers[0] == 0 else f"{numbers[0]}, {numbers[-1] + 1}"
        lines.append(f"{indent}for {name} in range({span}):")
        path[position] = f"{{{name}}}"
        indent += "    "
    lines[-1] += remark
    target = f'model.get_submodule(f"{".".join(path)}")'
    return [*lines, f"{indent}{call.format(target)}"]


def _ranges(paths: Sequence[str]) -> dict[int, list[int]] | None:
    """Return the numbers at each place of the paths, if the paths are all combinations of them.

    For blocks.0 and blocks.1: {1: [0, 1]}. The paths may differ in numbers alone. None if numbers
    are missing in between, or at more than three places.
    """
    columns = list(zip(*(path.split(".") for path in paths), strict=True))
    differing = {at: set(column) for at, column in enumerate(columns) if len(set(column)) > 1}
    if not all(part.isdecimal() for parts in differing.values() for part in parts):
        return None
    ranges = {at: sorted(map(int, parts)) for at, parts in differing.items()}
    is_dense = all(r == list(range(r[0], r[-1] + 1)) for r in ranges.values())
    is_product = math.prod(map(len, ranges.values())) == len(paths)
    return ranges if is_dense and is_product and len(ranges) <= 3 else None


def _buffer_casts(model: nn.Module) -> Iterator[str]:
    """Yield the lines that cast the buffers that instances cast: all of them, or some by name."""
    wrappers = wrappers_in(model)
    casts: dict[torch.dtype, list[str]] = {}
    num_others = 0
    for path, module in model.named_modules():
        owner = owner_among(wrappers, path)
        wrapper = None if owner is None else wrappers[owner]
        dtype = None
        if wrapper is not None and module not in wrapper._ignored.modules:
            dtype = wrapper.mixed_precision.buffer_dtype
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            if dtype is None:
                num_others += 1
            else:
                casts.setdefault(dtype, []).append(_joined(original_path(path), name))
    if len(casts) == 1 and not num_others:
        yield "for buffer in model.buffers():"
        yield "    if buffer.is_floating_point():"
        yield f"        buffer.data = buffer.to({next(iter(casts))})"
        return
    for dtype, names in casts.items():
        yield f"for name in {_tuple(names)}:"
        yield f"    model.get_buffer(name).data = model.get_buffer(name).to({dtype})"


def _tuple(names: Iterable[str]) -> str:
    quoted = [f'"{name}"' for name in names]
    line = f"({', '.join(quoted)}{',' if len(quoted) == 1 else ''})"
    if len(line) < _WIDTH - 30:
        return line
    return "\n".join(["(", *(f"    {name}," for name in quoted), ")"])


def _imports(body: str) -> list[str]:
    """Return the imports of the names that the body uses."""
    used = set(re.findall(r"\w+", body))
    ours = ("CPUOffloadPolicy", "MixedPrecisionPolicy", "fully_shard", "replicate")
    meshes = [name for name in ("DeviceMesh", "init_device_mesh") if name in used]
    lines = ["import torch"] if "torch" in used else []
    if meshes:
        lines.append(f"from torch.distributed.device_mesh import {', '.join(meshes)}")
    lines.append(f"from fullshard import {', '.join(name for name in ours if name in used)}")
    return lines
