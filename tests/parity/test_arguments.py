"""Every argument of both APIs takes what PyTorch's takes: generated values, by its signatures, on both.

A value that PyTorch takes, and trains with, is taken by ours, and trains the same. What both refuse, or ours takes alone,
is fine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing import assert_close

from fullshard.errors import FullshardError
from tests.api import TORCH, Api, use_api
from tests.harness import mesh_of, on_ranks, rank, world_size

OURS = "process_group"


class Scaled(nn.Module):
    """A layer with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.scale

    def other(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 2))


Maker = Callable[[Api, nn.Module], Any]


def _values(api: Api, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Give values of every kind that Python and the API have, by what they print as."""
    plain: list[Any] = [
        None,
        True,
        False,
        0,
        1,
        2,
        -1,
        0.0,
        1.5,
        math.inf,
        "",
        "cpu",
        "inf",
        "forward",
        "linear",
    ]
    plain += [
        np.int64(1),
        np.float32(1.5),
        np.bool_(1),
        np.bool_(0),
        (),
        [],
        {},
        set(),
        frozenset(),
    ]
    plain += [
        torch.float32,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.device("cpu"),
        nn.Linear,
    ]
    plain += [torch.tensor(1.5), (nn.Linear,), {nn.Linear}, [nn.Linear]]
    yield from ((repr(value), value) for value in plain)
    yield "iter(())", iter(())
    parameters = list(model[1].parameters())
    for kind in (list, tuple, set, frozenset, iter, dict.fromkeys):
        yield f"{kind.__name__} of parameters", kind(parameters)
        yield f"{kind.__name__} of modules", kind([model[1]])
    yield "a module", model[1]
    yield "a function to None", lambda *_, **__: None
    yield "a function to True", lambda *_, **__: True
    yield "a function to Shard", lambda *_: Shard(0)
    yield "a mesh", mesh_of(world_size())
    yield "a mesh of two dims", mesh_of(1, world_size())
    yield "a group", dist.group.WORLD
    yield (
        "a pair of groups",
        (mesh_of(1, world_size()).get_group(1), mesh_of(1, world_size()).get_group(0)),
    )
    for name in _public(Api(TORCH)):
        thing = getattr(api, name)
        if isinstance(thing, type) and issubclass(thing, enum.Enum):
            yield from ((str(member), member) for member in thing)
        elif dataclasses.is_dataclass(thing):
            with contextlib.suppress(TypeError, ValueError):
                yield f"{name}()", thing()


def _public(api: Api) -> list[str]:
    return [n for n in dir(api._names) if not n.startswith("_") and callable(getattr(api, n))]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """Take two steps, and return losses and whole parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(2):
        inputs = torch.arange(8.0).view(2, 4) / 8 + rank() + step
        loss = model(inputs).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + _whole(model)


def _whole(model: nn.Module) -> list[torch.Tensor]:
    if isinstance(model, tuple(Api(name).FullyShardedDataParallel for name in (TORCH, OURS))):
        with type(model).summon_full_params(model):
            return [parameter.detach().clone() for parameter in model.parameters()]
    return [
        p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for p in model.parameters()
    ]


# What is called: each returns what it shows, for an argument's value.

Call = Callable[[Api, nn.Module, dict[str, Any]], list[torch.Tensor]]


def _fully_shard(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    module = given.pop("module", model)
    given.setdefault("mesh", mesh_of(world_size()))
    api.fully_shard(module, **given)
    return _train(model)


def _policy(name: str, argument: str) -> Call:
    def call(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
        return _fully_shard(api, model, {argument: getattr(api, name)(**given)})

    return call


def _method(name: str) -> Call:
    def call(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
        for child in (model[0], model[1], model):
            api.fully_shard(child, mesh=mesh_of(world_size()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        getattr(model, name)(**given)
        return _train(model, optimizer)

    return call


def _register(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    for child in (model[0], model[1], model):
        api.fully_shard(child, mesh=mesh_of(world_size()))
    api.register_fsdp_forward_method(**{"module": model[1], "method_name": "other", **given})
    return _train(model)


def _share(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    for child in (model[0], model[1], model):
        api.fully_shard(child, mesh=mesh_of(world_size()))
    api.share_comm_ctx(**given)
    return _train(model)


def _wrap(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
    module = given.pop("module", model)
    given = {"device_id": torch.device("cpu"), **given}
    return _train(api.FullyShardedDataParallel(module, **given))


def _option(name: str, argument: str, **more: Any) -> Call:
    def call(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
        return _wrap(api, model, {argument: getattr(api, name)(**given), **more})

    return call


def _wrapped(api: Api, model: nn.Module) -> Any:
    """Wrap a model that is sharded as one of flat parameters.

    Which pieces of the others a rank shows is a matter of layout, and PyTorch neither has local state
    dicts of them nor survives `offload_to_cpu` with them on the CPU.
    """
    policy = _wrapping(api).ModuleWrapPolicy({Scaled})
    return api.FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        auto_wrap_policy=policy,
        use_orig_params=world_size() == 1,
    )


def _wrapping(api: Api) -> Any:
    return api.wrap if api.is_torch else api


def _state_dict(name: str) -> Call:
    def call(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
        wrapped = _wrapped(api, model)
        kinds = api.StateDictType
        base = {"state_dict_type": kinds.FULL_STATE_DICT}
        made = getattr(api.FullyShardedDataParallel, name)(
            wrapped, **{**base, **{k: v for k, v in given.items() if k != "module"}}
        )
        with made if name == "state_dict_type" else contextlib.nullcontext():
            state = wrapped.state_dict()
        whole = [
            value for value in state.values() if type(value) is torch.Tensor and value.numel() == 16
        ]
        return [torch.tensor(len(state)), *whole]

    return call


def _config(name: str) -> Call:
    def call(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
        wrapped = _wrapped(api, model)
        kind = name.replace("Optim", "").replace("StateDictConfig", "").upper()
        if kind == "":
            return [torch.tensor(bool(getattr(api, name)(**given)))]
        argument = "optim_state_dict_config" if "Optim" in name else "state_dict_config"
        config = {argument: getattr(api, name)(**given)}
        kind_of = getattr(api.StateDictType, f"{kind}_STATE_DICT")
        if "Optim" in name:
            inner = getattr(api, name.replace("Optim", ""))
            config["state_dict_config"] = inner()
        optimizer = torch.optim.Adam(wrapped.parameters())
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with api.FullyShardedDataParallel.state_dict_type(wrapped, kind_of, **config):
            if "Optim" in name:
                state = api.FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)
                return [torch.tensor(len(state.get("state", ())))]  # of rank 0 alone, if asked for
            state = wrapped.state_dict()
        return [torch.tensor(len(state))]

    return call


def _wrapper_method(name: str) -> Call:
    def call(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
        wrapped = _wrapped(api, model)
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
        if name == "clip_grad_norm_":
            wrapped(torch.ones(2, 4)).square().sum().backward()
            return [
                wrapped.clip_grad_norm_(**{"max_norm": 1.0, **given}).detach().float(),
                *_train(wrapped),
            ]
        if name == "summon_full_params":
            module = given.pop("module", wrapped)
            with api.FullyShardedDataParallel.summon_full_params(module, **given):
                found = [p.detach().clone() for p in wrapped.parameters()]
            return found + _train(wrapped)
        if name == "fsdp_modules":
            module = given.pop("module", wrapped)
            return [torch.tensor(len(api.FullyShardedDataParallel.fsdp_modules(module, **given)))]
        if name == "apply":
            wrapped.apply(**given)
            return _train(wrapped)
        if name in ("named_parameters", "named_buffers"):
            wrapped.train()
            return [torch.tensor(len(list(getattr(wrapped, name)(**given))))]
        if name in ("full_optim_state_dict", "sharded_optim_state_dict", "optim_state_dict"):
            _train(wrapped)
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer = torch.optim.Adam(wrapped.parameters())
            optimizer.step()
            base = {"model": wrapped, "optim": optimizer}
            state = getattr(api.FullyShardedDataParallel, name)(**{**base, **given})
            return [torch.tensor(len(state.get("state", ())))]
        if name == "optim_state_dict_to_load":
            wrapped(torch.ones(2, 4)).sum().backward()
            optimizer = torch.optim.Adam(wrapped.parameters())
            optimizer.step()
            state = api.FullyShardedDataParallel.optim_state_dict(wrapped, optimizer)
            base = {"model": wrapped, "optim": optimizer, "optim_state_dict": state}
            found = api.FullyShardedDataParallel.optim_state_dict_to_load(**{**base, **given})
            return [torch.tensor(len((found or {}).get("state", ())))]
        raise NotImplementedError(name)

    return call


def _policy_of_wrapping(name: str, **base: Any) -> Call:
    def call(api: Api, model: nn.Module, given: dict[str, Any]) -> list[torch.Tensor]:
        policy = getattr(_wrapping(api), name)
        if isinstance(policy, type):
            made: Any = policy(**{**base, **given})
        else:
            made = functools.partial(policy, **{**base, **given})
        wrapped = api.FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=made
        )
        return [
            torch.tensor(len(api.FullyShardedDataParallel.fsdp_modules(wrapped))),
            *_train(wrapped),
        ]

    return call


def _targets() -> dict[str, tuple[Any, Call]]:
    """Return what PyTorch's namespace has, with its signature, and how it is called here."""
    api = Api(TORCH)
    found: dict[str, tuple[Any, Call]] = {
        "fully_shard": (inspect.unwrap(api.fully_shard), _fully_shard),
        "MixedPrecisionPolicy": (
            api.MixedPrecisionPolicy,
            _policy("MixedPrecisionPolicy", "mp_policy"),
        ),
        "CPUOffloadPolicy": (api.CPUOffloadPolicy, _policy("CPUOffloadPolicy", "offload_policy")),
        "register_fsdp_forward_method": (api.register_fsdp_forward_method, _register),
        "share_comm_ctx": (api.share_comm_ctx, _share),
        "FullyShardedDataParallel": (api.FullyShardedDataParallel, _wrap),
        "MixedPrecision": (api.MixedPrecision, _option("MixedPrecision", "mixed_precision")),
        "CPUOffload": (api.CPUOffload, _option("CPUOffload", "cpu_offload")),
        "ModuleWrapPolicy": (api.wrap.ModuleWrapPolicy, _policy_of_wrapping("ModuleWrapPolicy")),
        "CustomPolicy": (api.wrap.CustomPolicy, _policy_of_wrapping("CustomPolicy")),
        "size_based_auto_wrap_policy": (
            api.wrap.size_based_auto_wrap_policy,
            _policy_of_wrapping("size_based_auto_wrap_policy"),
        ),
        "transformer_auto_wrap_policy": (
            api.wrap.transformer_auto_wrap_policy,
            _policy_of_wrapping("transformer_auto_wrap_policy", transformer_layer_cls={Scaled}),
        ),
        "lambda_auto_wrap_policy": (
            api.wrap.lambda_auto_wrap_policy,
            _policy_of_wrapping(
                "lambda_auto_wrap_policy", lambda_fn=lambda m: isinstance(m, Scaled)
            ),
        ),
    }
    for name, method in vars(api.FSDPModule).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            found[f"FSDPModule.{name}"] = (method, _method(name))
    for name in ("set_state_dict_type", "state_dict_type"):
        found[name] = (getattr(api.FullyShardedDataParallel, name), _state_dict(name))
    for name in (
        "clip_grad_norm_",
        "summon_full_params",
        "fsdp_modules",
        "apply",
        "named_parameters",
        "named_buffers",
        "full_optim_state_dict",
        "sharded_optim_state_dict",
        "optim_state_dict",
        "optim_state_dict_to_load",
    ):
        found[name] = (getattr(api.FullyShardedDataParallel, name), _wrapper_method(name))
    for name in _public(api):
        if name.endswith("StateDictConfig"):
            found[name] = (getattr(api, name), _config(name))
    return found


def _outcome(name: str, call: Call, argument: str, value: str) -> Any:
    with use_api(name) as api, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = _model()
        given = dict(_values(api, model))[value]
        try:
            return call(api, model, {argument: given})
        except Exception as error:
            return error


def _any_rank(is_so: bool) -> bool:
    """Tell whether it is so on any rank: what one rank is refused, the others do not go on with alone."""
    found = torch.tensor(is_so)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def _labels() -> list[str]:
    return [label for label, _ in _values(Api(TORCH), _model())]


_OTHER_KIND = "a value of another kind, which PyTorch ignores or misreads"
_REFUSED = {  # docs/limits.md has them
    ("fully_shard", "offload_policy"): _OTHER_KIND,
    ("fully_shard", "shard_placement_fn"): _OTHER_KIND,
    ("MixedPrecisionPolicy", "param_dtype"): _OTHER_KIND,
    ("MixedPrecisionPolicy", "output_dtype"): _OTHER_KIND,
    ("MixedPrecision", "reduce_dtype"): _OTHER_KIND,
    ("FSDPModule.set_gradient_divide_factor", "factor"): "not positive",
    ("FSDPModule.set_reduce_scatter_divide_factor", "factor"): "not positive",
    (
        "FSDPModule.set_allocate_memory_from_process_group_for_comm",
        "enable",
    ): "Gloo has no allocator",
    ("clip_grad_norm_", "norm_type"): "of order 0, which PyTorch takes where nothing is sharded",
}
_DIFFERS = {  # how cases begin; docs/migrating.md has them
    "FSDPModule.set_reshard_after_backward(reshard": "what stays unsharded follows the optimizer",
    "FullyShardedDataParallel(ignored_modules=iter of modules": "PyTorch's checks use the iterator up",
}
_SOME = ("None", "()")


def _compare(target: str, values: Container[str] | None = None) -> None:
    """Compare what a target does with each value of each argument (of a module's own: with a module, too)."""
    signature_of, call = _targets()[target]
    for argument, parameter in inspect.signature(signature_of).parameters.items():
        if (
            parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            or argument == "self"
        ):
            continue
        for value in _labels():
            is_skipped = values is not None and value not in values
            # PyTorch's wrapper registers a module that is given for a bool as a part of itself, and never ends.
            if is_skipped or (parameter.annotation is bool and value == "a module"):
                continue
            theirs = _outcome(TORCH, call, argument, value)
            if _any_rank(isinstance(theirs, Exception)):
                continue
            ours = _outcome(OURS, call, argument, value)
            case = f"{target}({argument}={value})"
            if isinstance(ours, Exception):
                is_known = (target, argument) in _REFUSED and isinstance(
                    ours, (FullshardError, ZeroDivisionError)
                )
                if value == "None" or not is_known:
                    raise AssertionError(f"{case}: {ours!r}")
            elif not case.startswith(tuple(_DIFFERS)):
                assert_close(
                    ours,
                    theirs,
                    msg=lambda said, case=case: f"{case}: {said}",
                    rtol=1e-3,
                    atol=1e-4,
                    equal_nan=True,
                )


@on_ranks(1)
@pytest.mark.parametrize("target", sorted(_targets()))
def test_what_pytorch_takes_is_taken(target: str) -> None:
    _compare(target, _SOME)


@pytest.mark.long  # the same with every value
@on_ranks(1, 2, limit_s=300)
@pytest.mark.parametrize("target", sorted(_targets()))
def test_whatever_pytorch_takes_is_taken(target: str) -> None:
    _compare(target)
