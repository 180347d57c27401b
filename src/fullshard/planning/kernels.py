"""Operators as kernels: FLOPs, bytes and shape of what PyTorch's operators compute."""

import math
from collections.abc import Callable, Sequence
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
    """A call of an operator. args: with those by keyword, in the order of its schema, as far as given."""

    name: str
    func: Any
    args: tuple[Any, ...]
    result: Any
    read_nbytes: int
    written_nbytes: int

    @property
    def dtype(self) -> str:
        for leaf in pytree.tree_leaves(self.args):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                return dtype_name(leaf.dtype)
        return ""

    def argument(self, name: str) -> Any:
        """Return an argument by its name; None if it is not given."""
        names = [each.name for each in self.func._schema.arguments]
        index = names.index(name) if name in names else len(self.args)
        return self.args[index] if index < len(self.args) else None


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
    read = sum(map(tensor_nbytes, tensors_of((args, kwargs))))
    written = sum(map(tensor_nbytes, tensors_of(result)))
    ordered = args + tuple(kwargs.get(each.name) for each in func._schema.arguments[len(args) :])
    call = Call(name, func, ordered, result, read, written)
    if (shaped := _MATMULS.get(name) or _attention(name)) is not None:
        return shaped(call)
    if (formula := flop_registry.get(func.overloadpacket)) is not None:
        flops = float(formula(*args, **kwargs, out_val=result))
        kind = WorkKind.ATTENTION if "attention" in name else WorkKind.MATMUL
        work = Work(kind, flops, read + written, dtype=call.dtype, name=name)
        return [Kernel(work, flops)]
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
_FILLS = frozenset(("copy_", "zero_", "fill_"))


def _moved(call: Call) -> int:
    """Return the bytes that a kernel reads and writes which is neither a matmul nor attention."""
    first = call.args[0] if call.args and isinstance(call.args[0], Tensor) else None
    if first is not None and call.name in _LOOK_UPS:
        return call.read_nbytes - tensor_nbytes(first) + 2 * call.written_nbytes
    if first is not None and call.name in _PUTS:
        return 3 * (call.read_nbytes - tensor_nbytes(first))
    if first is not None and call.name in _FILLS:
        return call.read_nbytes
    return call.read_nbytes + call.written_nbytes


def _matmul(call: Call, m: int, n: int, k: int, nbytes: int | None = None) -> Kernel:
    flops = 2.0 * m * n * k
    moved = call.read_nbytes + call.written_nbytes if nbytes is None else nbytes
    return Kernel(Work(WorkKind.MATMUL, flops, moved, (m, n, k), call.dtype, name=call.name), flops)


def _product(call: Call, left: Tensor, right: Tensor) -> list[Kernel]:
    """Multiply matrices, or a batch of them, whose rows are then those of one matmul."""
    *batch, m, k = left.shape
    return [_matmul(call, math.prod(batch) * m, right.shape[-1], k)]


def _grouped(call: Call) -> list[Kernel]:
    """Multiply rows that are sorted into groups, each with a matrix of its own; or sum over such rows."""
    left, right = call.args[:2]
    if left.ndim == 3 and right.ndim == 2:
        return [_matmul(call, left.shape[1], right.shape[1], left.shape[2])]
    if left.ndim == 2:
        return [_matmul(call, left.shape[0], right.shape[-1], left.shape[1])]
    return _product(call, left, right)


def _convolution_sizes(
    tokens: Tensor, weight: Tensor, outputs: Tensor, *, transposed: bool
) -> tuple[int, int, int]:
    """Return the sizes of the matmul that a convolution is, (m, n, k), groups included."""
    window = math.prod(weight.shape[2:])
    pixels = tokens if transposed else outputs
    m = pixels.shape[0] * math.prod(pixels.shape[2:])
    if transposed:
        return m, weight.shape[1] * window, weight.shape[0]
    return m, weight.shape[0], weight.shape[1] * window


def _convolution(call: Call) -> list[Kernel]:
    inputs, weight = call.args[:2]
    transposed = bool(call.argument("transposed"))
    return [_matmul(call, *_convolution_sizes(inputs, weight, call.result, transposed=transposed))]


def _convolution_backward(call: Call) -> list[Kernel]:
    """The gradients of inputs and of weights, as far as they are asked for: a matmul each."""
    gradient, inputs, weight = call.args[:3]
    transposed = bool(call.argument("transposed"))
    m, n, k = _convolution_sizes(inputs, weight, gradient, transposed=transposed)
    of_inputs, of_weight, _of_bias = call.argument("output_mask")
    whole = sum(map(tensor_nbytes, (gradient, inputs, weight)))
    kernels = []
    if of_inputs:
        kernels.append(_matmul(call, m, k, n, whole))
    if of_weight:
        kernels.append(_matmul(call, n, k, m, whole))
    return kernels


def _attention(name: str) -> Callable[[Call], list[Kernel]] | None:
    if not (name.startswith("_scaled_dot_product") and "attention" in name):
        return None
    return _attention_backward if "backward" in name else _attention_forward


def _attention_kernel(
    call: Call, tensors: Sequence[Tensor], products: tuple[int, int], counted: tuple[int, int]
) -> list[Kernel]:
    """Attention over q (batch, heads, queries, size), k and v (batch, heads, keys, size).

    products: how many matmuls it computes in the size of k, and of v. counted: for utilization.
    """
    query, key, value = tensors
    batch, heads, queries, size = query.shape
    pairs = 2.0 * batch * heads * queries * key.shape[-2]
    sizes = (size, value.shape[-1])
    flops, model_flops = (
        pairs * sum(number * each for number, each in zip(numbers, sizes, strict=True))
        for numbers in (products, counted)
    )
    computed = flops / 2 if call.argument("is_causal") else flops
    work = Work(
        WorkKind.ATTENTION,
        computed,
        call.read_nbytes + call.written_nbytes,
        (batch * heads, queries, size),
        call.dtype,
        name=call.name,
    )
    return [Kernel(work, model_flops)]


def _attention_forward(call: Call) -> list[Kernel]:
    return _attention_kernel(call, call.args[:3], (1, 1), (1, 1))


def _attention_backward(call: Call) -> list[Kernel]:
    # Scores again, then the gradients of scores, values, queries and keys.
    return _attention_kernel(call, call.args[1:4], (3, 2), (2, 2))


_MATMULS: dict[str, Callable[[Call], list[Kernel]]] = {
    "mm": lambda call: _product(call, *call.args[:2]),
    "bmm": lambda call: _product(call, *call.args[:2]),
    "_scaled_mm": lambda call: _product(call, *call.args[:2]),
    "addmm": lambda call: _product(call, *call.args[1:3]),
    "baddbmm": lambda call: _product(call, *call.args[1:3]),
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "convolution": _convolution,
    "convolution_overrideable": _convolution,
    "convolution_backward": _convolution_backward,
}
