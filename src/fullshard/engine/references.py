"""Counts of references to a tensor or to its memory, which tell whether memory may be reused.

A count is compared with the one taken when the engine alone had the tensor; see
`params.buffers.UnitBuffers.is_in_use` and `gradients.shards.GradientShards.is_unused`.
"""

import sys
from typing import Any

import torch

# Return the number of references from Python to an object: variables, containers, attributes, and
# (up to Python 3.13) the call itself.
python_uses = sys.getrefcount
# Return the number of references to a storage, from C++ and Python: tensors and
# graphs. Takes its address, `UntypedStorage._cdata`. Private; there in torch 2.13 and 2.15.
storage_uses = torch._C._storage_Use_Count
# Return the number of references from C++ to a tensor: the ``.grad`` of another one, autograd's
# graph. None where torch does not have it.
tensor_uses: Any = getattr(torch.Tensor, "_use_count", None)
