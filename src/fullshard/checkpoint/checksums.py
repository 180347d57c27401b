"""The checksum of manifests and blocks, where programs that look into checkpoints find it."""

from fullshard.state.host_memory import checksum

__all__ = ["checksum"]
