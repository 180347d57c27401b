"""Where releases of torch differ in what a call means. We follow the one that is installed.

`describe` prints what is in effect, and docs/migrating.md has the table.
"""

import re

import torch

# Of the torch that runs: (2, 15).
RELEASE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def gradients_follow_parameter() -> bool:
    """Whether ``MixedPrecisionPolicy(reduce_dtype=None)`` means the parameter's own dtype.

    It does from torch 2.15 on, in `fully_shard` and `replicate`: float32 for float32 parameters with
    ``param_dtype=torch.bfloat16``. Before, and in `FullyShardedDataParallel`, it means the dtype that
    is computed in. A parameter's own ``grad_dtype`` comes before either.
    """
    return RELEASE >= (2, 15)


def reset_drops_gradients() -> bool:
    """Whether ``reset_iter_state()`` drops gradients that are there: it does from torch 2.15 on."""
    return RELEASE >= (2, 15)
