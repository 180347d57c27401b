"""Policies that choose modules by class: what is said of a class that the model does not have.

Training scripts name the class of a model's blocks. A wrong name, or a class of another model, would
leave the whole model in one instance, which saves no memory while it computes.
"""

import collections
import difflib
import functools
import warnings
from collections.abc import Iterable

from torch import nn

from fullshard.errors import ShardingError

_MOST_LISTED = 8
# How callable policies, which come as functools.partial, name the argument with the classes.
_ARGUMENTS = ("transformer_layer_cls", "module_classes")


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
    first = [f"{name} ({number})" for name, number in candidates.items()][:_MOST_LISTED]
    more = f" and {len(candidates) - len(first)} more" if len(candidates) > len(first) else ""
    close = [name for each in wanted for name in difflib.get_close_matches(each, candidates, n=1)]
    guess = f" The closest is {close[0]}." if close else ""
    return f"It has: {', '.join(first) or 'no modules with parameters'}{more}.{guess}"
