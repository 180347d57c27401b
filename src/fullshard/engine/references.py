"""How many refer to a tensor or to its memory: what tells whether memory may be written again.

A count is compared with the one taken when the engine alone had the tensor; see
`params.buffers.UnitBuffers.is_in_use` and `gradients.shards.GradientShards.is_unused`.
"""

import sys
from typing import Any

import torch

# From Python: variables, containers and attributes, and the call itself.
python_uses = sys.getrefcount
# From C++ and Python, of a storage by its address (`UntypedStorage._cdata`): tensors, graphs.
storage_uses = torch._C._storage_Use_Count
# From C++, of a tensor: `.grad` of another and autograd's graph. None where torch does not tell.
tensor_uses: Any = getattr(torch.Tensor, "_use_count", None)
