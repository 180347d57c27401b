"""Operators as kernels: FLOPs, bytes and shape of what PyTorch's operators compute."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fullshard.plan.workload import Work, WorkKind
from fullshard.torch_private import pytree


class Kernel(NamedTuple):
    """A kernel, and what it counts for model FLOPs utilization.

    That differs for attention: causal kernels compute half of the scores, and those of the backward compute
    the scores again; utilization counts neither.
    """

    work: Work
    model_flops: float = 0.0


class Call(NamedTuple):
    """A call of an operator. given: its arguments, by the names of its schema. dtype: of the first that is floating."""

    name: str
    given: Mapping[str, Any]
    result: Any
    dtype: str
    read_nbytes: int
    written_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.read_nbytes + self.written_nbytes


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in what an operator takes or returns."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def tensor_nbytes(tensor: Tensor) -> int:
    """Return the bytes that reading a tensor once takes: an expanded one is as large as its memory."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())


def kernels_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, makes_memory: bool
) -> list[Kernel]:
    """Return what an operator computes; nothing for views, and for what only makes or describes tensors.

    makes_memory: whether the result has memory that no argument has.
    """
    mutates = func._schema.is_mutable
    name = func.overloadpacket.__name__
    if not (makes_memory or mutates) or name.startswith(_MAKERS):
        return []
    tensors = tensors_of((args, kwargs))
    call = Call(
        name,
        dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs,
        result,
        next((dtype_name(each.dtype) for each in tensors if each.is_floating_point()), ""),
        sum(map(tensor_nbytes, tensors)),
        sum(map(tensor_nbytes, tensors_of(result))),
    )
    if name in _FACTORS:
        return [_product(call, *(call.given[each] for each in _FACTORS[name]))]
    if name.startswith("convolution"):
        return _convolution(call)
    if name.startswith("_scaled_dot_product") and "attention" in name:
        return [_attention(call)]
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        flops = float(formula(*args, **kwargs, out_val=result))
        kind = WorkKind.ATTENTION if "attention" in name else WorkKind.MATMUL
        return [Kernel(Work(kind, flops, call.nbytes, dtype=call.dtype, name=name), flops)]
    return [Kernel(Work(WorkKind.MEMORY, 0.0, _moved(call), dtype=call.dtype, name=name))]


_MAKERS = (
    "empty",
    "new_empty",
    "lift_fresh",
    "_unsafe_view",
    "_local_scalar_dense",
    "_resize_output",
)
# These read no more of their first argument than they return, and change no more of it than they are given.
_LOOK_UPS = frozenset(("embedding", "index", "index_select", "gather", "take"))
_PUTS = frozenset(
    ("index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_")
)
FILLS = frozenset(("copy_", "zero_", "fill_"))


# The matrices that an operator multiplies.
_FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "_scaled_mm": ("self", "mat2"),
    "_grouped_mm": ("self", "mat2"),
    "_scaled_grouped_mm": ("self", "mat2"),
}


def _moved(call: Call) -> int:
    """Return the bytes that a kernel reads and writes which is neither a matmul nor attention."""
    others_nbytes = sum(map(tensor_nbytes, tensors_of(list(call.given.values()))[1:]))
    if call.name in _LOOK_UPS:
        return others_nbytes + 2 * call.written_nbytes
    if call.name in _PUTS:
        return 3 * others_nbytes
    return call.read_nbytes if call.name in FILLS else call.nbytes


def _matmul(call: Call, sizes: tuple[int, int, int], nbytes: int) -> Kernel:
    """Multiply (m, k) by (k, n). sizes: (m, n, k)."""
    flops = 2.0 * math.prod(sizes)
    return Kernel(Work(WorkKind.MATMUL, flops, nbytes, sizes, call.dtype, name=call.name), flops)


def _product(call: Call, left: Tensor, right: Tensor) -> Kernel:
    """Multiply matrices, or a batch of them, whose rows are then those of one matmul.

    So are rows that are sorted into groups, each with a matrix of its own; sums over such rows have groups on the right.
    """
    *batch, m, k = left.shape
    rows = m * math.prod(batch) if left.ndim <= right.ndim else m
    return _matmul(call, (rows, right.shape[-1], k), call.nbytes)


def _convolution(call: Call) -> list[Kernel]:
    """A matmul, groups included; in backward one for the gradient of inputs and one for that of weights, if asked for."""
    given, weight, outputs = call.given, call.given["weight"], call.result
    if is_backward := "output_mask" in given:
        outputs = given["grad_output"]
    pixels = given["input"] if given["transposed"] else outputs
    m = pixels.shape[0] * math.prod(pixels.shape[2:])
    n, k = weight.shape[0], weight.shape[1] * math.prod(weight.shape[2:])
    if given["transposed"]:
        n, k = k, n
    if not is_backward:
        return [_matmul(call, (m, n, k), call.nbytes)]
    sizes = ((m, k, n), (n, k, m))
    nbytes = sum(map(tensor_nbytes, (outputs, given["input"], weight)))
    asked = zip(sizes, given["output_mask"], strict=False)  # and the bias
    return [_matmul(call, each, nbytes) for each, is_asked in asked if is_asked]


def _attention(call: Call) -> Kernel:
    """Attention over q (batch, heads, queries, size), k and v (batch, heads, keys, size).

    In forward scores and outputs; in backward scores again, which does not count for utilization, and the gradients of
    scores, values, queries and keys.
    """
    query, key, value = (call.given[each] for each in ("query", "key", "value"))
    batch, heads, queries, size = query.shape
    scores = 2.0 * batch * heads * queries * key.shape[-2] * size
    outputs = scores / size * value.shape[-1]
    is_backward = "backward" in call.name
    counted = (scores + outputs) * (2 if is_backward else 1)
    computed = counted + (scores if is_backward else 0)
    work = Work(
        WorkKind.ATTENTION,
        computed / 2 if call.given.get("is_causal") else computed,
        call.nbytes,
        (batch * heads, queries, size),
        call.dtype,
        name=call.name,
    )
    return Kernel(work, counted)
