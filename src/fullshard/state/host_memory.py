"""Elements of tensors as bytes in host memory, without a copy where they lie there already; checksums of bytes.

Those of files are 64 bits of XXH3, as 16 hexadecimal digits: computed at 9 GB/s a core, without the GIL.
"""

import ctypes
import zlib
from typing import Any

import torch

from fullshard.errors import CheckpointError
from fullshard.versions import install_hint

CHECKSUM = "xxh3-64"  # what files say of their checksums


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


def checksum(data: Any) -> str:
    """Return the checksum of bytes, or of anything with the buffer interface.

    Raises CheckpointError if the package ``xxhash`` is not installed.
    """
    try:
        from xxhash import xxh3_64_hexdigest  # an extra: importing fullshard needs only torch
    except ImportError as error:
        raise CheckpointError(
            f"Checkpoints need the package xxhash. Install it with: {install_hint('checkpoint')}"
        ) from error
    digest: str = xxh3_64_hexdigest(data)
    return digest


def crc(data: Any) -> str:
    """Return a checksum of bytes that needs no package: enough to notice values that differ."""
    return f"{zlib.crc32(data):08x}"
