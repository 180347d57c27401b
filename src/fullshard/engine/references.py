"""Counts of references to a tensor or to its memory, which tell whether memory may be reused.

A count is compared with the one taken when the engine alone had the tensor; see
`params.buffers.UnitBuffers.is_in_use` and `gradients.deposits.GradientShards.is_unused`.
"""

import sys

from fullshard.torch_private import storage_uses, tensor_uses

# Return the number of references from Python to an object: variables, containers, attributes, and
# (up to Python 3.13) the call itself.
python_uses = sys.getrefcount

__all__ = ["python_uses", "storage_uses", "tensor_uses"]
