"""A rank's place in a data-parallel mesh, as integers."""

import dataclasses

from fullshard.errors import ShardingError


@dataclasses.dataclass(frozen=True, slots=True)
class MeshPlan:
    """One rank's place in a data-parallel mesh.

    On a 2 x 4 mesh, rank 6 has replicate_size=2, replicate_rank=1, shard_size=4, shard_rank=2.
    """

    shard_size: int
    shard_rank: int
    replicate_size: int = 1
    replicate_rank: int = 0

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different data; gradients are divided by it by default."""
        return self.shard_size * self.replicate_size


def check_reshard_after_forward(value: bool | int | None, shard_size: int) -> bool | int | None:
    """Check the option, and return it with trivial group sizes turned into booleans.

    On 8 ranks 8 becomes True, 1 becomes False, and 4 stays; 3 raises ShardingError, since it does
    not divide 8.
    """
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int):
        raise ShardingError(
            f"reshard_after_forward={value!r}: expected True, False, None or a group size (int)."
        )
    if value < 1 or shard_size % value != 0:
        sizes = ", ".join(str(n) for n in range(2, shard_size) if shard_size % n == 0)
        raise ShardingError(
            f"reshard_after_forward={value}: a group size must be a factor of {shard_size}, the "
            f"size of the shard axis. Choose one of: {sizes or 'True, False (no factor exists)'}."
        )
    if value == 1:
        return False
    return True if value == shard_size else value
