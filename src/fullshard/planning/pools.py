"""What an allocator holds of a device for the tensors of a step: a pool for each stream.

What one stream has freed, another cannot use. So the peaks of pools add up, though they are not at the same time: most
activations are there before backward, and all gradients after it.
"""

from collections.abc import Collection

from fullshard.plan.actions import Holding
from fullshard.plan.simulator import StepMemory

_ORDER = {holding: place for place, holding in enumerate(Holding)}


def pooled_nbytes(memory: StepMemory, aside: Collection[Holding]) -> int:
    """Return the peaks of all pools together. aside: what is allocated on streams of their own, each on another."""
    places = [_ORDER[holding] for holding in aside]
    peaks = [max((level[place] for level in memory.levels), default=0) for place in places]
    of_compute = (
        highest - sum(level[place] for place in places)
        for highest, level in zip(memory.highest, memory.levels, strict=True)
    )
    return max(of_compute, default=0) + sum(peaks)


def sharing_nbytes(memory: StepMemory, holding: Holding, kept: float) -> int:
    """Return the peak of a step that keeps a share of one use, and frees the rest at once."""
    place = _ORDER[holding]
    levels = zip(memory.highest, memory.levels, strict=True)
    return max(round(highest - level[place] * (1 - kept)) for highest, level in levels)
