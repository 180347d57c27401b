"""Policies that choose which modules become units of their own.

There are two kinds. A `_Policy` looks at the whole tree at once and returns the modules to wrap,
with the arguments of each. A callable, the older kind, is called twice for each module:

    policy(module=m, recurse=True, nonwrapped_numel=n)   on the way down: consider m's children?
    policy(module=m, recurse=False, nonwrapped_numel=n)  on the way up: wrap m?

n is the number of elements of m's parameters; on the way up, without those in wrapped children.
Names and signatures are those of ``torch.distributed.fsdp.wrap``.
"""

# ruff: noqa: ARG001 -- every policy is called with the same arguments

import abc
import collections
import difflib
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from fullshard.errors import ShardingError
from fullshard.plan.units import first_names

KwargsByModule = dict[nn.Module, dict[str, Any]]

# How callable policies, which come as functools.partial, name the argument with the classes.
_ARGUMENTS = ("transformer_layer_cls", "module_classes")


class _Policy(abc.ABC):
    """A policy that chooses modules by looking at the whole tree."""

    @abc.abstractmethod
    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> KwargsByModule:
        """Return the modules to wrap, each with its arguments for the wrapper."""


class CustomPolicy(_Policy):
    """Wrap the modules for which a function returns True, or a dict of arguments for the wrapper.

    True means the root's arguments, a dict replaces some of them; False and {} leave the module.

        CustomPolicy(lambda m: {"sharding_strategy": NO_SHARD} if m is model.head else False)

    Raises ShardingError, when the policy is run, for any other result.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> KwargsByModule:
        chosen = {}
        for path, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ShardingError(
                    "The lambda_fn passed to CustomPolicy should return False, True or a dict of "
                    f"arguments, but for {path or 'the root'} ({type(module).__name__}) it "
                    f"returned {answer!r}."
                )
            if answer:
                chosen[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return chosen


class ModuleWrapPolicy(_Policy):
    """Wrap every module of some classes, with the root's arguments. It is a callable policy too."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> KwargsByModule:
        classes = tuple(self._module_classes)
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        return _wrap_module_cls_individually(module, tuple(self._module_classes), recurse)

    def __repr__(self) -> str:
        names = sorted(cls.__qualname__ for cls in self._module_classes)
        return f"ModuleWrapPolicy({{{', '.join(names)}}})"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules for which ``lambda_fn`` is true. Use it through functools.partial."""
    return True if recurse else lambda_fn(module)


def _wrap_module_cls_individually(
    module: nn.Module,
    module_classes: Sequence[type[nn.Module]],
    recurse: bool,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """Wrap every module of some classes."""
    return recurse or isinstance(module, tuple(module_classes))


def _module_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    module_classes: set[type[nn.Module]],
) -> bool:
    """Wrap every module of some classes. Use it through functools.partial."""
    return _wrap_module_cls_individually(module, tuple(module_classes), recurse)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Wrap every transformer layer, so that tied embeddings stay together in the root's unit."""
    return _module_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module that has at least ``min_num_params`` elements outside of wrapped children.

    force_leaf_modules: classes whose children are left as they are. Default: FORCE_LEAF_MODULES.
    exclude_wrap_modules: classes that are never wrapped themselves. Default: EXCLUDE_WRAP_MODULES.
    """
    if nonwrapped_numel < min_num_params:
        return False
    policy: Any = size_based_auto_wrap_policy
    if recurse:
        refused = policy.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        refused = (
            policy.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
        )
    return not isinstance(module, tuple(refused))


# Attributes of the function, for users to extend: {*policy.FORCE_LEAF_MODULES, Attention}.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[Callable[..., bool]],
) -> bool:
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


# Policies that choose modules by class. Training scripts name the class of a model's blocks. A wrong name, or a
# class of another model, would leave the whole model in one instance, which saves no memory while it computes.


def classes_of(policy: object) -> list[object] | None:
    """Return what a policy chooses modules by, if that is their class; None for any other policy."""
    if isinstance(policy, functools.partial):
        given = next((policy.keywords[n] for n in _ARGUMENTS if n in policy.keywords), None)
    else:
        given = getattr(policy, "_module_classes", None)
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else None


def check_classes(root: nn.Module, classes: Iterable[object]) -> None:
    """Refuse what is no class, and warn if no module is of any of the classes.

    The warning is for a whole model of which nothing would be wrapped: that some of several classes
    are not there is usual. Raises ShardingError.
    """
    given = list(classes)
    for each in given:
        if not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise ShardingError(
                f"auto_wrap_policy: {each!r} is no class of modules. Pass the class itself, such as "
                f"type(model.layers[0]). {_listed(_candidates(root), [str(each)])}"
            )
    chosen = tuple(each for each in given if isinstance(each, type))
    if not chosen or any(isinstance(module, chosen) for module in root.modules()):
        return
    if candidates := _candidates(root):
        names = sorted(each.__name__ for each in chosen)
        warnings.warn(
            f"auto_wrap_policy: {type(root).__name__} has no module of class {', '.join(names)}, so "
            f"all of it is one instance, gathered as a whole. {_listed(candidates, names)}",
            UserWarning,
            stacklevel=5,
        )


def _candidates(root: nn.Module) -> dict[str, int]:
    """Return the classes of the modules below the root and their numbers, the best ones first.

    Those that have parameters; blocks, which contain others, before layers, which do not.
    """
    counts: collections.Counter[str] = collections.Counter()
    is_block: dict[str, bool] = {}
    for module in root.modules():
        if module is root or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            continue
        if next(module.parameters(), None) is None:
            continue
        name = type(module).__name__
        counts[name] += 1
        is_block[name] = is_block.get(name, False) or next(module.children(), None) is not None
    order = sorted(counts, key=lambda name: (not is_block[name], -counts[name], name))
    return {name: counts[name] for name in order}


def _listed(candidates: dict[str, int], wanted: Iterable[str]) -> str:
    """Say which candidates there are, and which one may be meant."""
    shown = first_names([f"{name} ({number})" for name, number in candidates.items()])
    close = [name for each in wanted for name in difflib.get_close_matches(each, candidates, n=1)]
    guess = f" The closest is {close[0]}." if close else ""
    return f"It has: {shown or 'no modules with parameters'}.{guess}"
