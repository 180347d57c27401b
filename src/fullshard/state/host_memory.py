"""The elements of tensors as bytes in host memory, without a copy where they lie there already."""

import ctypes

import torch


def host_bytes(view: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes in host memory; a view where they lie there in order."""
    return bytes_of(view.detach().cpu().resolve_conj().resolve_neg().contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as bytes.

    Not through NumPy: after that, torch never resizes the tensor's memory again.
    """
    nbytes = tensor.numel() * tensor.itemsize
    if not nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    memory.of = tensor  # type: ignore[attr-defined]  # which lives as long as the bytes are in use
    return memoryview(memory).cast("B")
