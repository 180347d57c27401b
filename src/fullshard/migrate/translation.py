"""What each argument and method of `FullyShardedDataParallel` becomes: options of `fully_shard`, and words."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from fullshard.fsdp1.options import NO_RESHARD_AFTER_FORWARD_STRATEGIES
from fullshard.migrate.wrappers import Instance
from fullshard.policies import BackwardPrefetch

_Options = Mapping[str, str | None]  # source text by keyword; None if it is left out


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """One argument or method, its value if it has one, and its replacement.

    has_equivalent: False if there is no replacement; ``becomes`` then says what to do instead.
    """

    name: str
    value: str
    becomes: str
    has_equivalent: bool = True

    def __str__(self) -> str:
        was = f"{self.name}={self.value}" if self.value else self.name
        return f"{was} -> {'' if self.has_equivalent else 'no equivalent: '}{self.becomes}"


_OTHERS = "get_optimizer_state_dict or set_optimizer_state_dict, as above"

# Arguments that an instance does not keep, then its methods, then functions that belong to it.
# get_*_state_dict and set_*_state_dict are those of torch.distributed.checkpoint.state_dict.
PROGRAM = tuple(
    Translation(name, "", becomes)
    for name, becomes in {
        "auto_wrap_policy": "one call for each module it chose, as in the code below",
        "ignored_modules": "ignored_params={*module.parameters()}",
        "param_init_fn": "build the model under torch.device('meta'), shard it, then "
        "model.to_empty(device=...) and initialise or load",
        "sync_module_states": "the same seed on every rank, or set_model_state_dict(model, state, "
        "options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))",
        "forward": "the module's own; register_fsdp_forward_method(module, name) for other methods",
        "module": "the module itself: its class changes, nothing is wrapped",
        "named_parameters, named_buffers": "the module's own, by the same names",
        "params": "[p.to_local() for p in module.parameters()]",
        "process_group, rank, world_size": "those of the mesh: parameter.device_mesh",
        "sharding_strategy, training_state": "describe(model) for what is in effect",
        "check_is_root": "nothing: the outermost sharded module is the root",
        "fsdp_modules": "[m for m in model.modules() if isinstance(m, FSDPModule)]",
        "apply": "model.apply(fn), where fn sees DTensors: torch.nn.init works on them",
        "zero_grad": "model.zero_grad(), which forgets gradients that are not reduced yet as well",
        "no_sync": "model.set_requires_gradient_sync(False), and True for the last micro-batch",
        "summon_full_params": "parameter.full_tensor() to read one; module.unshard() and "
        "module.reshard() for all; set_model_state_dict(...) to write",
        "clip_grad_norm_": "fullshard.clip_grad_norm_(model.parameters(), max_norm, norm_type)",
        "register_comm_hook": "module.set_custom_reduce_scatter(...), or "
        "module.set_all_reduce_hook(...) after the reduce-scatter; one call per module",
        "state_dict_type, set_state_dict_type, get_state_dict_type": "model.state_dict() holds "
        "DTensors; for whole tensors get_model_state_dict(model, "
        "options=StateDictOptions(full_state_dict=True, cpu_offload=True))",
        "optim_state_dict": "get_optimizer_state_dict(model, optimizer, options=...)",
        "optim_state_dict_to_load": "set_optimizer_state_dict(model, optimizer, state, "
        "options=...), which loads it too",
        "full_optim_state_dict, sharded_optim_state_dict": _OTHERS,
        "shard_full_optim_state_dict, scatter_full_optim_state_dict": _OTHERS,
        "flatten_sharded_optim_state_dict": _OTHERS,
        "rekey_optim_state_dict": "get_optimizer_state_dict(...) is by name, optimizer.state_dict() "
        "by position",
        "wrap, enable_wrap": "one call for each module",
        "ShardedGradScaler": "torch.amp.GradScaler; fullshard.ShardedGradScaler works as well",
    }.items()
)


def call_for(
    instance: Instance, *, mesh: str | None, policy: str | None, ignored: Sequence[str]
) -> tuple[str, tuple[Translation, ...]]:
    """Return the call that replaces an instance, and what becomes of each argument that the instance keeps.

    The call is source text with {} for the module: "fully_shard({}, mesh=mesh)".

    mesh, policy: variables of the program that have them; None if there is no need. ignored: the names of
    ignored parameters below the module.
    """
    keeps = instance.strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES
    offload = instance.wrapper.cpu_offload.offload_params
    options: _Options = {
        "mesh": mesh,
        "reshard_after_forward": "False" if keeps else None,
        "mp_policy": policy,
        "offload_policy": "CPUOffloadPolicy()" if offload else None,
        "ignored_params": "ignored" if ignored else None,
    }
    function = "replicate" if instance.is_replicated else "fully_shard"
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    return f"{function}({', '.join(['{}', *given])})", (
        _strategy(instance, options),
        _ranks(instance, options),
        *_precision(instance, options),
        Translation("cpu_offload", str(offload), _said(options, "offload_policy")),
        Translation(
            "ignored_states", ", ".join(ignored) or "None", _said(options, "ignored_params")
        ),
        *_without_options(instance),
    )


def policy_expression(instance: Instance) -> str | None:
    """Return the mixed precision of an instance as source text; None if there is none."""
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


def _said(options: _Options, keyword: str, if_left_out: str = "") -> str:
    value = options[keyword]
    return f"{keyword} left out{if_left_out}" if value is None else f"{keyword}={value}"


def _strategy(instance: Instance, options: _Options) -> Translation:
    if instance.is_alone:
        becomes = (
            "what resulted: a group of one rank makes every strategy NO_SHARD, and which one was "
            "asked for is not kept. The code is for FULL_SHARD, the default; SHARD_GRAD_OP takes "
            "reshard_after_forward=False, NO_SHARD replicate(). On two ranks the report knows"
        )
    elif instance.is_replicated:
        becomes = "replicate() instead of fully_shard()"
    else:
        becomes = _said(
            options, "reshard_after_forward", ": True, but the root keeps its parameters"
        )
        if instance.is_hybrid:
            becomes += f"; mesh={options['mesh']}, (replicate, shard)"
    return Translation("sharding_strategy", instance.strategy.name, becomes)


def _ranks(instance: Instance, options: _Options) -> Translation:
    def ranks(group: dist.ProcessGroup | None) -> str:
        known = dist.get_process_group_ranks(group) if group is not None else []
        return ", ".join(map(str, known))

    value = f"ranks {ranks(instance.wrapper.process_group)}"
    if instance.is_hybrid:
        replicas = ranks(instance.wrapper._unit.mesh.replicate_group)
        value = f"sharded over {value}, replicated over {replicas}"
    return Translation("process_group, device_mesh", value, _said(options, "mesh", ": all ranks"))


def _precision(instance: Instance, options: _Options) -> Iterator[Translation]:
    given, policy = instance.wrapper.mixed_precision, options["mp_policy"]
    if instance.computes_in_float32:
        yield Translation(
            "mixed_precision._module_classes_to_ignore",
            instance.kind.__name__,
            f"mp_policy={policy}: computes in float32, outputs in the dtype around it",
        )
        return
    if policy is None:
        yield Translation("mixed_precision", "None", "mp_policy left out")
    for name in ("param_dtype", "reduce_dtype"):
        if (dtype := getattr(given, name)) is not None:
            yield Translation(f"mixed_precision.{name}", _named(dtype), f"{name}, the same")
    if given.param_dtype is not None:
        if given.reduce_dtype is None:
            becomes = f"reduce_dtype={_named(given.param_dtype)}: param_dtype"
            yield Translation("mixed_precision.reduce_dtype", "None", becomes)
        name = "cast_root_forward_inputs" if instance.is_root else "cast_forward_inputs"
        value = getattr(given, name)
        where = "this is the root" if instance.is_root else "not the root, which casts by another"
        becomes = f"cast_forward_inputs={value} ({where})"
        yield Translation(f"mixed_precision.{name}", str(value), becomes)
    if given.buffer_dtype is not None:
        yield _no_equivalent("mixed_precision.buffer_dtype", _named(given.buffer_dtype))
    if given.keep_low_precision_grads:
        yield _no_equivalent("mixed_precision.keep_low_precision_grads", "True")
    if instance.wrapper._computes_fully_in_eval:
        yield _no_equivalent("FSDP_USE_FULL_PREC_IN_EVAL", "1")


def _without_options(instance: Instance) -> Iterator[Translation]:
    """Yield the arguments that need no option, or for which there is none."""
    wrapper, name = instance.wrapper, "backward_prefetch"
    if wrapper.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        when = wrapper.backward_prefetch
        yield _no_equivalent(name, "None" if when is None else when.name)
    else:
        yield Translation(name, wrapper.backward_prefetch.name, f"nothing: {_NOTHING[name]}")
    values = {
        "forward_prefetch": wrapper.forward_prefetch,
        "limit_all_gathers": wrapper.limit_all_gathers,
        "use_orig_params": wrapper._use_orig_params,
        "device_id": wrapper.compute_device,
    }
    for name, value in values.items():
        yield Translation(name, str(value), f"nothing: {_NOTHING[name]}")
    if wrapper._unit.config.comm_hook is not None:
        yield _no_equivalent("register_comm_hook", "registered")


# Arguments that need no option, with the reason; and what to do instead of those that have no equivalent.
_NOTHING = {
    "backward_prefetch": "the next unit is gathered before the current one's backward; "
    "set_modules_to_backward_prefetch([...]) chooses others",
    "forward_prefetch": "the next unit is gathered during the current one's forward; "
    "set_modules_to_forward_prefetch([...]) chooses others",
    "limit_all_gathers": "memory is always bounded",
    "use_orig_params": "parameters are always themselves, as DTensors. Build the optimizer afterwards",
    "device_id": "modules move to the mesh's device",
}
_INSTEAD = {
    "mixed_precision.buffer_dtype": "cast buffers once, as the code does",
    "mixed_precision.keep_low_precision_grads": "gradients have the dtype of the shards. To save their memory, "
    "shard the model in that dtype and let the optimizer keep a float32 copy",
    "FSDP_USE_FULL_PREC_IN_EVAL": "a policy holds in evaluation too. Evaluate a copy that is sharded without one",
    "backward_prefetch": "the next unit is always gathered before the current one's backward, which costs the "
    "memory of one unit",
    "register_comm_hook": "its arguments are other ones: set_custom_reduce_scatter or set_all_reduce_hook",
}


def _no_equivalent(name: str, value: str) -> Translation:
    return Translation(name, value, _INSTEAD[name], has_equivalent=False)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
