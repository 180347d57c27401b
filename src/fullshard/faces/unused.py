"""`set_unused` says what follows if a rank leaves parameters, or whole modules, without a gradient."""

from typing import Literal

from torch import nn

from fullshard.engine.module_state import states_in
from fullshard.errors import ShardingError
from fullshard.policies import Unused


def set_unused(
    module: nn.Module,
    unused: Literal["leave", "error", "zero"],
    *,
    may_be_skipped: bool = False,
    recurse: bool = True,
) -> None:
    """Say what follows if parameters that are trained get no gradient. Call it alike on all ranks.

        set_unused(model, "error")                                # find them
        for expert in model.experts:
            set_unused(expert, "zero", may_be_skipped=True)       # ranks run those that they have tokens for

    module: sharded with either API; with recurse, also the sharded modules inside it. unused:

    - "leave", the default: a parameter that no rank used keeps the ``.grad`` that it had, such as None. If some
      ranks used it, it counts as zeros on the others (but see docs/limits.md on NCCL).
    - "error": StateError on every rank, at the end of each backward that reduces, with names and ranks.
    - "zero": all ranks reduce the unit at the end of each backward. Every parameter that is trained gets a
      gradient: zeros, if no rank had one.

    may_be_skipped: ranks may leave out the module altogether. Needs "zero". Where gathers need all ranks, they
    are made together with those of the sharded module around it, which takes the memory of all such units in
    that module at once. The root is never skipped.

    Frozen parameters are neither asked nor filled. Raises ShardingError for another value, or a module in which
    nothing is sharded.
    """
    values = [each.value for each in Unused]
    if unused not in values:
        raise ShardingError(f"set_unused: got {unused!r}. Pass one of {', '.join(values)}.")
    if may_be_skipped and unused != "zero":
        raise ShardingError(
            f"set_unused: a module that ranks may skip has gradients on some ranks only, so {unused!r} cannot "
            "be kept. Pass 'zero'."
        )
    states = states_in(module.modules() if recurse else [module])
    if not states:
        raise ShardingError(
            f"set_unused: {type(module).__name__} is not sharded. Call fully_shard or "
            "FullyShardedDataParallel on it first, or pass the module that was sharded."
        )
    for unit in (unit for state in states for unit in state.all_units):
        unit.configure(unused=Unused(unused), may_be_skipped=may_be_skipped)
