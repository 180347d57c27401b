"""Train PyTorch models larger than one device: fully sharded data parallel.

The public names are those of `fullshard.public`, which is imported when one of them is first used,
and torch with it: a command that only prints its help does not wait for torch. What is written before
the first call, `fully_shard` and its policies, comes alone: the engine is imported by that call.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fullshard.versions import VERSION, check_torch_version

if TYPE_CHECKING:  # type checkers and editors see every name at once
    from fullshard.public import *  # noqa: F403
    from fullshard.public import __all__ as __all__

__version__ = VERSION

_WITHOUT_ENGINE = {
    "fully_shard": "fullshard.fsdp2.fully_shard",
    "BackwardPrefetch": "fullshard.policies",
    "CPUOffloadPolicy": "fullshard.policies",
    "MixedPrecisionPolicy": "fullshard.policies",
    "OffloadPolicy": "fullshard.policies",
}

if not TYPE_CHECKING:  # which would take any name for one that is here

    def __getattr__(name: str) -> Any:
        """Look up a name that is not here yet (PEP 562): a public name, `__all__`, or a room."""
        # What inspect, copy and the like ask every module for is no use of the library.
        is_wanted = name == "__all__" or not name.startswith("__")
        if is_wanted and "__all__" not in globals():
            if not globals().keys() & _WITHOUT_ENGINE.keys():  # the first use: it may warn, once
                check_torch_version(importlib.import_module("torch").__version__)
            module = importlib.import_module(_WITHOUT_ENGINE.get(name, "fullshard.public"))
            names = (name,) if name in _WITHOUT_ENGINE else ("__all__", *module.__all__)
            globals().update({each: getattr(module, each) for each in names})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        """List the public names, and those that every module has; not what this file needs itself."""
        return sorted(
            {*__getattr__("__all__"), *(name for name in globals() if name.startswith("__"))}
        )
