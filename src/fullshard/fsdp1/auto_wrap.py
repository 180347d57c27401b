"""Wrap the modules that a policy chooses: children before their parents, and never the root.

Names and signatures are those of ``torch.distributed.fsdp.wrap``, and of the functions that
PyTorch's tests and activation checkpointing take from ``_wrap_utils``.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from fullshard.engine.precision import map_tensors
from fullshard.errors import MisuseError, ShardingError, UnsupportedError
from fullshard.fsdp1.options import MixedPrecision
from fullshard.fsdp1.setup import Ignored
from fullshard.fsdp1.wrap_policies import (
    KwargsByModule,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    check_classes,
    classes_of,
)


def auto_wrap(
    root: nn.Module,
    policy: _Policy | Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    *,
    root_kwargs: dict[str, Any],
    ignored: Ignored,
) -> None:
    """Replace the modules below ``root`` that the policy chooses by wrapped ones, children first.

    root_kwargs: the arguments of the wrapper except module and policy. Not changed. Modules of the
        classes that ``mixed_precision`` ignores are wrapped whatever the policy says, with
        ``mixed_precision=None``. They compute in float32; inputs are cast, and outputs cast back. A
        warning names those classes.

    Raises ShardingError, before anything is changed, if something is wrapped already, if the policy
    names classes that are none, or if a `_Policy` puts frozen and trainable parameters into one unit
    without ``use_orig_params``, or the uses of one parameter into several. Warns of a policy that
    names classes of which there is no module.
    """
    for path, module in root.named_modules():
        if _is_wrapped_by(module, wrapper_cls):
            raise ShardingError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{path or 'the root'} in\n{root}\nWrap either by hand or by a policy, not both."
            )
    if (classes := classes_of(policy)) is not None:
        check_classes(root, classes)
    precision: MixedPrecision | None = root_kwargs["mixed_precision"]
    in_float32 = () if precision is None else tuple(set(precision._module_classes_to_ignore))
    wrap_chosen: Callable[[], object]
    # By method, not by class: PyTorch's own policies serve as well.
    if hasattr(policy, "_run_policy"):
        chosen = _run_mixed_precision_override_policy(
            root,
            in_float32,
            ignored.modules,
            root_kwargs,
            policy._run_policy(root, ignored.modules, root_kwargs),
        )
        uses_originals: bool = root_kwargs["use_orig_params"]
        _validate_frozen_params(root, set(chosen), ignored.params, uses_originals)
        _refuse_split_ties(root, set(chosen), ignored.params)
        wrap_target = _construct_wrap_fn(root, chosen, wrapper_cls)
        wrap_chosen = functools.partial(_post_order_apply, root, wrap_target)
    else:
        wrap_chosen = functools.partial(
            _recursive_wrap,
            root,
            _callable_policy(policy, None if precision is None else in_float32),
            wrapper_cls,
            ignored.modules,
            ignored.params,
            only_wrap_children=True,
            **root_kwargs,
        )
    _compute_in_float32(root, in_float32)  # the first change
    wrap_chosen()


def _callable_policy(
    policy: object, also: tuple[type[nn.Module], ...] | None
) -> Callable[..., bool]:
    """Return a callable policy that chooses modules of some classes as well, unless that is None.

    Raises TypeError for what cannot be called.
    """
    if not callable(policy):
        raise TypeError(
            f"auto_wrap_policy={policy!r}: expected ModuleWrapPolicy, CustomPolicy, or a callable "
            "such as functools.partial(size_based_auto_wrap_policy, min_num_params=10_000)."
        )
    if also is None:
        return policy
    by_class = functools.partial(_wrap_module_cls_individually, module_classes=also)
    return functools.partial(_or_policy, policies=[policy, by_class])


def _is_wrapped_by(module: nn.Module, wrapper_cls: Callable[..., nn.Module]) -> bool:
    # False if the wrapper is a function, and no class.
    return isinstance(wrapper_cls, type) and isinstance(module, wrapper_cls)


def _run_mixed_precision_override_policy(
    root_module: nn.Module,
    module_classes: Iterable[type[nn.Module]],
    ignored_modules: set[nn.Module],
    root_kwargs: dict[str, Any],
    target_module_to_kwargs: KwargsByModule,
) -> KwargsByModule:
    """Add the modules of some classes to the targets, without mixed precision; return the targets.

    Changes ``target_module_to_kwargs`` in place. PyTorch's name and signature.
    """
    classes = tuple(module_classes)
    for module in root_module.modules():
        if module not in ignored_modules and isinstance(module, classes):
            kwargs = target_module_to_kwargs.get(module, root_kwargs)
            target_module_to_kwargs[module] = {**kwargs, "mixed_precision": None}
    return target_module_to_kwargs


def _compute_in_float32(root: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Make modules of some classes compute in float32, and warn of them if there are any.

    Sets ``_wrap_overrides``, by which `_wrap` wraps them without mixed precision.
    """
    found = [module for module in root.modules() if isinstance(module, classes)]
    for module in found:
        module._wrap_overrides = {"mixed_precision": None}  # type: ignore[assignment]
        around = _Float32Forward()
        module.register_forward_pre_hook(around.cast_inputs)
        module.register_forward_hook(around.cast_outputs)
    if found:
        names = sorted({type(module).__qualname__ for module in found})
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, and the module "
            f"contains {', '.join(names)}. These modules will be wrapped as separate FSDP units "
            "without mixed precision. Set MixedPrecision(_module_classes_to_ignore=[]) to treat "
            "them as all others.",
            stacklevel=5,
        )


class _Float32Forward:
    """Hooks that cast a module's positional inputs to float32 and its outputs back.

    An object with methods, so that a copied or unpickled module has hooks of its own.
    """

    def __init__(self) -> None:
        self._dtype: torch.dtype | None = None  # during forward, of the last input that was cast

    def cast_inputs(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._dtype = None

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point() or tensor.dtype == torch.float32:
                return tensor
            self._dtype = tensor.dtype
            return tensor.float()

        return map_tensors(cast, args)

    def cast_outputs(self, module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        dtype, self._dtype = self._dtype, None
        if dtype is None:
            return outputs
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, outputs)


def _validate_frozen_params(
    root_module: nn.Module,
    modules_to_wrap: set[nn.Module],
    ignored_params: set[nn.Parameter],
    use_orig_params: bool,
) -> None:
    """Warn of units with both frozen and trainable parameters; refuse them in flat parameters.

    With ``use_orig_params`` each such unit is warned of. Without, both kinds would be views of one
    parameter, so the first such unit in post-order raises ShardingError. PyTorch's tests compare
    the whole message.
    """
    visited: set[nn.Module] = set()
    for path, _, module in _post_order(root_module):
        if module not in modules_to_wrap:
            continue
        names: dict[bool, list[str]] = {True: [], False: []}
        numel = {True: 0, False: 0}
        for parameter, name in _own_parameters(module, path, visited).items():
            if parameter not in ignored_params:
                names[parameter.requires_grad].append(name)
                numel[parameter.requires_grad] += parameter.numel()
        if not (names[True] and names[False]):
            continue
        if use_orig_params:
            reason = (
                "We do not recommend wrapping such modules since the gradient memory usage will be "
                f"higher than expected ({numel[True] + numel[False]} numel instead of "
                f"{numel[True]} numel before sharding via reduce-scatter). "
            )
        else:
            reason = "FSDP does not support wrapping such modules when use_orig_params=False. "
        message = (
            f"{path} has both parameters with requires_grad=True and False. {reason}"
            "If possible, wrap the frozen parameters with FSDP separately.\n"
            f"The following parameters have requires_grad=True:\n{names[True]}\n"
            f"The following parameters have requires_grad=False:\n{names[False]}"
        )
        if not use_orig_params:
            raise ShardingError(message)
        warnings.warn(message, stacklevel=5)


def _refuse_split_ties(
    root: nn.Module, chosen: set[nn.Module], ignored_params: set[nn.Parameter]
) -> None:
    """Refuse a parameter whose uses the policy puts into several instances, with all its names.

    Without this the second instance would refuse it, which knows no other names. Raises
    ShardingError.
    """
    instances = {"": ""}  # by path of a module: that of the instance it will be in
    uses: dict[nn.Parameter, dict[str, str]] = {}  # by parameter: by name, its instance's path
    for path, module in root.named_modules(remove_duplicate=False):
        instances[path] = path if module in chosen else instances[path.rpartition(".")[0]]
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter not in ignored_params:
                uses.setdefault(parameter, {})[name] = instances[path]
    for names in uses.values():
        within = sorted(set(names.values()) - {""})
        if len(set(names.values())) > 1:
            raise ShardingError(
                f"{' and '.join(names)} are one parameter, of a nested FSDP instance, which would be "
                "gathered for that instance alone. Wrap the modules that share it together, in one "
                f"instance: let the policy leave out {', '.join(within)}."
            )


def _own_parameters(
    module: nn.Module, path: str, visited: set[nn.Module]
) -> dict[nn.Parameter, str]:
    """Return names of parameters in modules not visited yet; add those modules to ``visited``."""
    return {
        parameter: f"{prefix}.{name}" if prefix else name
        for prefix, inner in module.named_modules(visited, path)
        for name, parameter in inner.named_parameters(recurse=False)
    }


def _post_order(root: nn.Module) -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
    """Yield (path, parent, module), children before parents, in order, each module once."""
    visited = {root}

    def visit(
        path: str, parent: nn.Module | None, module: nn.Module
    ) -> Iterator[tuple[str, nn.Module | None, nn.Module]]:
        for name, child in module.named_children():
            if child not in visited:
                visited.add(child)
                yield from visit(f"{path}.{name}" if path else name, module, child)
        yield path, parent, module

    return visit("", None, root)


def _post_order_apply(root_module: nn.Module, fn: Callable[[nn.Module], nn.Module | None]) -> None:
    """Call ``fn`` on each module, children first; a result other than None replaces the module.

    Raises MisuseError for a result that is no module, or for the root.
    """
    for path, parent, module in _post_order(root_module):
        new = fn(module)
        if new is None:
            continue
        if parent is None:
            raise MisuseError(
                "Non-root modules should have their parent module set, but fn replaced the root, "
                f"{type(module).__name__}, which has no parent: return None for it."
            )
        if not isinstance(new, nn.Module):
            raise MisuseError(
                f"fn should return None or an nn.Module but got {new!r} for {path} "
                f"({type(module).__name__})."
            )
        setattr(parent, path.rpartition(".")[2], new)


def _construct_wrap_fn(
    root_module: nn.Module,
    target_module_to_kwargs: KwargsByModule,
    fsdp_fn: Callable[..., nn.Module],
) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function for `_post_order_apply` that wraps the targets, except the root."""

    def wrap_target(module: nn.Module) -> nn.Module | None:
        if module is root_module or module not in target_module_to_kwargs:
            return None
        return fsdp_fn(module, **target_module_to_kwargs[module])

    return wrap_target


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap the modules below one that a callable policy chooses; then perhaps the module itself.

    Returns (the module, wrapped or not; the number of parameter elements in wrapped modules).
    only_wrap_children: leave the module itself. Raises MisuseError if a module inside is wrapped
    already, or if policy or wrapper is None.
    """
    if auto_wrap_policy is None:
        raise MisuseError("Must specify auto_wrap_policy: a callable that chooses modules.")
    if wrapper_cls is None:
        raise MisuseError("Must specify wrapper_cls: what is called on each module chosen.")
    for path, inner in module.named_modules():
        if inner not in ignored_modules and _is_wrapped_by(inner, wrapper_cls):
            raise MisuseError(
                f"Child module {path} of {type(module).__name__} is already wrapped by "
                f"{wrapper_cls}: wrap either by hand or by a policy, not both."
            )
    numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
    if not auto_wrap_policy(module=module, recurse=True, nonwrapped_numel=numel):
        return module, 0
    wrapped_numel = 0
    for name, child in module.named_children():
        if child in ignored_modules:
            continue
        new, new_numel = _recursive_wrap(
            child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
        )
        setattr(module, name, new)
        wrapped_numel += new_numel
    if only_wrap_children or not auto_wrap_policy(
        module=module, recurse=False, nonwrapped_numel=numel - wrapped_numel
    ):
        return module, wrapped_numel
    return _wrap(module, wrapper_cls, **kwargs), numel


def _wrap(module: nn.Module, wrapper_cls: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """Wrap a module. Arguments in its ``_wrap_overrides`` (a dict) replace those in ``kwargs``."""
    overrides: Any = getattr(module, "_wrap_overrides", {})
    return wrapper_cls(module, **{**kwargs, **overrides})


class _ConfigAutoWrap:
    """The wrapper and its arguments inside an `enable_wrap` block. PyTorch's name."""

    in_autowrap_context: ClassVar[bool] = False
    wrapper_cls: ClassVar[Callable[..., nn.Module] | None] = None
    kwargs: ClassVar[dict[str, Any]] = {}

    def __init__(self, **kwargs: Any) -> None:
        self._given = kwargs

    @staticmethod
    def enable_autowrap_context(kwargs: dict[str, Any]) -> None:
        if _ConfigAutoWrap.in_autowrap_context:
            raise UnsupportedError(
                "You are already within an autowrap context: leave one enable_wrap before entering "
                "another, or give wrap() the arguments that differ."
            )
        if "wrapper_cls" not in kwargs:
            raise MisuseError("Expected to pass in wrapper_cls: what wrap() calls on a module.")
        _ConfigAutoWrap.in_autowrap_context = True
        _ConfigAutoWrap.wrapper_cls = kwargs["wrapper_cls"]
        _ConfigAutoWrap.kwargs = {k: v for k, v in kwargs.items() if k != "wrapper_cls"}

    @staticmethod
    def disable_autowrap_context() -> None:
        _ConfigAutoWrap.in_autowrap_context = False
        _ConfigAutoWrap.wrapper_cls = None
        _ConfigAutoWrap.kwargs = {}

    def __enter__(self) -> None:
        self.enable_autowrap_context(self._given)

    def __exit__(self, *_: object) -> None:
        self.disable_autowrap_context()


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Let `wrap` wrap inside the block, with this wrapper and these arguments.

        with enable_wrap(wrapper_cls=FSDP, mixed_precision=MixedPrecision(torch.bfloat16)):
            model = Model()  # whose __init__ says self.up = wrap(nn.Linear(1024, 4096))

    Raises UnsupportedError inside another such block.
    """
    with _ConfigAutoWrap(wrapper_cls=wrapper_cls, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module as the surrounding `enable_wrap` says; outside of one, return it as it is.

    wrap_overrides: arguments for the wrapper that replace those of `enable_wrap`.
    """
    if not _ConfigAutoWrap.in_autowrap_context:
        return module
    if _ConfigAutoWrap.wrapper_cls is None:
        raise MisuseError("Expected wrapper_cls to be set: pass it to enable_wrap.")
    kwargs = {**_ConfigAutoWrap.kwargs, **wrap_overrides}
    return _wrap(module, _ConfigAutoWrap.wrapper_cls, **kwargs)
