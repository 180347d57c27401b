"""A warning for models whose root unit owns most parameters.

A unit is gathered as a whole, and the root's stays whole from the first layer's forward to the last
layer's backward. So a model of which only the root is sharded saves no memory while it computes.
That is seldom intended, and nothing else shows it.
"""

import logging
from collections.abc import Sequence

import torch.distributed as dist
from torch import nn

from fullshard.engine.unit import Unit
from fullshard.policies import ParamStyle

logger = logging.getLogger("fullshard")

_SMALL_NBYTES = 1 << 20  # below, nobody shards to save memory


def warn_of_large_root(root: nn.Module, units: Sequence[Unit], own: Sequence[Unit]) -> None:
    """Warn on rank 0 if the root's ``own`` units have more than half of the bytes of all ``units``.

    Does not warn of a small model, or where the root is not sharded anyway.
    """
    total = sum(_nbytes(unit) for unit in units)
    of_root = sum(_nbytes(unit) for unit in own)
    if of_root < _SMALL_NBYTES or 2 * of_root <= total or own[0].mesh.plan.shard_size == 1:
        return
    if dist.get_rank() != 0:
        return
    remedy = "Apply fully_shard to its blocks and to a large embedding first, to the model last."
    if own[0].config.style is not ParamStyle.DTENSOR:
        remedy = "Pass auto_wrap_policy=ModuleWrapPolicy({Block}), with the class of its blocks."
    logger.warning(
        "%s: the root unit owns %.0f %% of all parameters (%.0f of %.0f MiB), which are gathered "
        "together and stay whole from the first layer's forward to the last layer's backward, with "
        "all their gradients. %s",
        type(root).__name__,
        100 * of_root / total,
        of_root / 2**20,
        total / 2**20,
        remedy,
    )


def _nbytes(unit: Unit) -> int:
    """Return the bytes of a unit's unsharded parameters, in the compute dtype."""
    return unit.plan_layout().unsharded_nbytes
