"""Plan the `fully_shard` calls that replace a model's wrappers, and write the program that makes them."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fullshard.fsdp1.module import FullyShardedDataParallel
from fullshard.fsdp1.options import NO_RESHARD_AFTER_FORWARD_STRATEGIES, ShardingStrategy
from fullshard.migrate.instances import Instance, original_path, owner_among
from fullshard.migrate.meshes import mesh_expression

_WIDTH = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """The call that replaces one instance.

    path, kind, height: of the wrapped module, as for `Instance`; kind is the name of its class.
    function: "fully_shard" or "replicate". options: (keyword, source text of the value).
    ignored: the names of ignored parameters below the module.
    """

    path: str
    kind: str
    height: int
    function: str
    options: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    def option(self, name: str) -> str | None:
        return dict(self.options).get(name)

    def on(self, module: str) -> str:
        """Return the call as source text, such as ``fully_shard(model, mesh=mesh)``.

        module: the first argument, as source text.
        """
        options = (f"{name}={value}" for name, value in self.options)
        return f"{self.function}({', '.join([module, *options])})"


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """The calls for a model, one per instance, and the variables that their options name.

    variables: (name, source text), to be assigned first.
    """

    variables: tuple[tuple[str, str], ...]
    calls: tuple[Call, ...]
    buffers: tuple[tuple[str, torch.dtype], ...]  # to be cast, by name
    casts_all_buffers: bool


def plan_calls(model: nn.Module, instances: Sequence[Instance]) -> Calls:
    """Return one call per instance, in the same order, also for those that need none."""
    meshes = [None if i.skipped else mesh_expression(i) for i in instances]
    policies = [None if i.skipped else _policy_expression(i) for i in instances]
    mesh_names, policy_names = _named("mesh", meshes), _named("mp_policy", policies)
    ignored = _ignored_names(model, instances)
    calls = [
        _call(
            instance,
            mesh_names.get(mesh) if mesh else None,
            policy_names.get(policy) if policy else None,
            _below(instance, ignored),
        )
        for instance, mesh, policy in zip(instances, meshes, policies, strict=True)
    ]
    variables = [
        (name, expression) for expression, name in (*mesh_names.items(), *policy_names.items())
    ]
    if ignored:
        names = _tuple(ignored)
        variables.append(("ignored", f"{{model.get_parameter(name) for name in {names}}}"))
    buffers, casts_all = _buffers(model)
    return Calls(tuple(variables), tuple(calls), buffers, casts_all)


def source_code(planned: Calls, instances: Sequence[Instance]) -> str:
    """Return the program: imports, variables, then the calls bottom-up, in loops if equal."""
    made = [c for c, i in zip(planned.calls, instances, strict=True) if i.skipped is None]
    body = [_assignment(name, expression) for name, expression in planned.variables]
    body += [""] if body else []
    for _, group in itertools.groupby(sorted(made, key=_loop_key), key=_loop_key):
        body += _loop(list(group))
    body += _cast_buffers(planned)
    remarks = ["# `model` is as it was before it was wrapped."]
    if any(instance.is_alone for instance in instances):
        remarks.append("# As for FULL_SHARD: on one rank, what was asked for is not known.")
    return "\n".join([*_imports("\n".join(body)), "", *remarks, *body, ""])


# Options


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _call(
    instance: Instance, mesh: str | None, policy: str | None, ignored: tuple[str, ...]
) -> Call:
    is_whole = instance.strategy is ShardingStrategy.NO_SHARD and not instance.is_alone
    keeps = instance.strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
    offload = instance.wrapper.cpu_offload.offload_params
    options = {
        "mesh": mesh,
        "reshard_after_forward": "False" if keeps else None,
        "mp_policy": policy,
        "offload_policy": "CPUOffloadPolicy()" if offload else None,
        "ignored_params": "ignored" if ignored else None,
    }
    return Call(
        instance.path,
        instance.kind.__name__,
        instance.height,
        "replicate" if is_whole else "fully_shard",
        tuple((name, value) for name, value in options.items() if value is not None),
        ignored,
    )


def _policy_expression(instance: Instance) -> str | None:
    given = instance.wrapper.mixed_precision
    fields: dict[str, object] = {
        "param_dtype": given.param_dtype,
        # Said in any case: None means another dtype to `fully_shard` with some releases of torch.
        "reduce_dtype": given.reduce_dtype or given.param_dtype,
    }
    if instance.computes_in_float32:
        around = instance.parent.wrapper.mixed_precision.param_dtype if instance.parent else None
        fields = {"param_dtype": torch.float32, "output_dtype": around}
    elif given.param_dtype is not None:
        casts = given.cast_root_forward_inputs if instance.is_root else given.cast_forward_inputs
        fields["cast_forward_inputs"] = None if casts else False
    set_ones = [f"{name}={value}" for name, value in fields.items() if value is not None]
    return f"MixedPrecisionPolicy({', '.join(set_ones)})" if set_ones else None


def _named(name: str, expressions: Iterable[str | None]) -> dict[str, str]:
    """Return a variable for each distinct expression: name, or name_1, name_2 if several."""
    distinct = [e for e in dict.fromkeys(expressions) if e is not None]
    if len(distinct) == 1:
        return {distinct[0]: name}
    return {expression: f"{name}_{i}" for i, expression in enumerate(distinct, start=1)}


def _ignored_names(model: nn.Module, instances: Iterable[Instance]) -> dict[str, nn.Parameter]:
    """Return the parameters that any instance ignores, by name before wrapping, each once."""
    ignored = {p for instance in instances for p in instance.wrapper._ignored.params}
    names: dict[nn.Parameter, str] = {}
    for name, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and parameter in ignored:
                path = original_path(name)
                names.setdefault(parameter, f"{path}.{attribute}" if path else attribute)
    return {name: parameter for parameter, name in names.items()}


def _below(instance: Instance, ignored: dict[str, nn.Parameter]) -> tuple[str, ...]:
    inside = {p for m in instance.wrapper.modules() for p in m._parameters.values()}
    return tuple(name for name, parameter in ignored.items() if parameter in inside)


def _buffers(model: nn.Module) -> tuple[tuple[tuple[str, torch.dtype], ...], bool]:
    """Return (name, dtype) of buffers that instances cast, and whether one cast of all does it."""
    wrappers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }
    casts, num_buffers = {}, 0
    for name, module in model.named_modules():
        owner = owner_among(wrappers, name)
        for attribute, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            num_buffers += 1
            wrapper = wrappers.get(owner) if owner is not None else None
            if wrapper is None or module in wrapper._ignored.modules:
                continue
            if (dtype := wrapper.mixed_precision.buffer_dtype) is not None:
                path = original_path(name)
                casts[f"{path}.{attribute}" if path else attribute] = dtype
    is_all = len(casts) == num_buffers and len(set(casts.values())) == 1
    return tuple(casts.items()), is_all


# Source text


def _assignment(name: str, expression: str) -> str:
    line = f"{name} = {expression}"
    if len(line) <= _WIDTH or not expression.startswith("MixedPrecisionPolicy("):
        return line
    function, fields = line.removesuffix(")").split("(", 1)
    return "\n".join([f"{function}(", *(f"    {field}," for field in fields.split(", ")), ")"])


def _loop_key(call: Call) -> tuple[int, str, str, tuple[tuple[str, str], ...], str]:
    """Return a sort key: bottom-up, and calls that can be one loop next to each other.

    Those of blocks.0 and blocks.1 can, that of blocks.0.norm cannot.
    """
    return call.height, call.kind, call.function, call.options, re.sub(r"\d+", "#", call.path)


def _loop(calls: Sequence[Call]) -> list[str]:
    """Return the lines of one call, or of a loop over the paths of several equal ones."""
    first = calls[0]
    if len(calls) == 1:
        target = f'model.get_submodule("{first.path}")' if first.path else "model"
        return [f"{first.on(target)}  # {first.kind}"]
    ranges = _ranges([call.path for call in calls])
    if ranges is None:
        loop = [f"for path in {_tuple([call.path for call in calls])}:  # {first.kind}"]
        return [*loop, f"    {first.on('model.get_submodule(path)')}"]
    lines, path, indent = [], first.path.split("."), ""
    for (position, numbers), name in zip(ranges.items(), "ijklmn", strict=False):
        span = f"{numbers[-1] + 1}" if numbers[0] == 0 else f"{numbers[0]}, {numbers[-1] + 1}"
        lines.append(f"{indent}for {name} in range({span}):")
        path[position] = f"{{{name}}}"
        indent += "    "
    lines[-1] += f"  # {first.kind}"
    target = f'model.get_submodule(f"{".".join(path)}")'
    return [*lines, f"{indent}{first.on(target)}"]


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


def _cast_buffers(planned: Calls) -> list[str]:
    if not planned.buffers:
        return []
    if planned.casts_all_buffers:
        return [
            "for buffer in model.buffers():",
            "    if buffer.is_floating_point():",
            f"        buffer.data = buffer.to({planned.buffers[0][1]})",
        ]
    lines = []
    for dtype in dict.fromkeys(dtype for _, dtype in planned.buffers):
        names = _tuple([name for name, to in planned.buffers if to is dtype])
        lines += [
            f"for name in {names}:",
            f"    model.get_buffer(name).data = model.get_buffer(name).to({dtype})",
        ]
    return lines


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
