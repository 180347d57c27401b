"""`ResumableOrder`: which samples a rank takes in a step, computed from a seed alone."""

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from fullshard.errors import ShardingError, StateError
from fullshard.peers.groups import place_in_job

_ROUNDS = 4


class ResumableOrder:
    """Shuffles samples anew each epoch, and shares each step's among ranks. A batch sampler for a ``DataLoader``.

        order = ResumableOrder(len(dataset), batch_size=64, seed=0)
        order.load_state_dict(saved)  # where a run is resumed, on any number of ranks
        for batch in DataLoader(dataset, batch_sampler=order):
            ...  # train on it
            order.advance()
            ...  # and perhaps save_checkpoint(..., extra={"order": order})

    In each epoch every sample comes once. No state is drawn from, so ranks tell each other nothing, a step's samples
    are the same however many ranks share them, and a resumed run goes on as if it had not ended. Ten samples,
    four a step, on two ranks, where e0 and e1 are the orders of two epochs:

        step 0   rank 0: e0[0] e0[1]   rank 1: e0[2] e0[3]
        step 1   rank 0: e0[4] e0[5]   rank 1: e0[6] e0[7]
        step 2   rank 0: e0[8] e0[9]   rank 1: e1[0] e1[1]

    num_samples: in the data set. batch_size: samples of a step, over all ranks. Where it is no multiple of the
        ranks, some have one more: `weighted_loss` then counts every sample the same.
    rank, num_ranks: this process'; by default those of torch.distributed, or 0 of 1 before it is initialized.
    step: how many steps are done, which is the number of the next one.

    Raises ShardingError for numbers that leave a rank without a sample.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        place = place_in_job()
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank = place.rank if rank is None else rank
        self.num_ranks = place.size if num_ranks is None else num_ranks
        self.step, self._num_done = 0, 0
        if num_samples < 1:
            raise ShardingError(
                f"ResumableOrder: num_samples is {num_samples}. It takes one sample or more."
            )
        _check_ranks(batch_size, self.rank, self.num_ranks)

    def samples(
        self, step: int, *, rank: int | None = None, num_ranks: int | None = None
    ) -> list[int]:
        """Return the indices of the samples that a rank, by default this one, takes in a step.

        step: from 0, or, after `load_state_dict`, from `step` on. Raises ShardingError for one before.
        """
        rank = self.rank if rank is None else rank
        num_ranks = self.num_ranks if num_ranks is None else num_ranks
        _check_ranks(self.batch_size, rank, num_ranks)
        first, last = (self.batch_size * each // num_ranks for each in (rank, rank + 1))
        return [self.sample(step, index) for index in range(first, last)]

    def sample(self, step: int, index: int) -> int:
        """Return one of the `batch_size` samples of a step."""
        return self._at(self._before(step) + index)

    def advance(self) -> None:
        """Count a step as done. A loader asks for samples ahead of training, so it cannot tell."""
        self._num_done, self.step = self._before(self.step + 1), self.step + 1

    @property
    def epoch(self) -> float:
        """How often all samples were seen in the steps that are done."""
        return self._num_done / self.num_samples

    def __iter__(self) -> Iterator[list[int]]:
        """Give this rank's samples of the next step and of all that follow, without an end."""
        step = self.step
        while True:
            yield self.samples(step)
            step += 1

    def state_dict(self) -> dict[str, int]:
        """Return where the order is: the same on every rank."""
        return {
            "step": self.step,
            "num_done": self._num_done,
            "num_samples": self.num_samples,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, with as many ranks, and as large a batch, as there are now.

        Raises StateError for the state of other samples or another seed, whose order is another.
        """
        for name in ("num_samples", "seed"):
            if state[name] != (own := getattr(self, name)):
                raise StateError(
                    f"ResumableOrder: the state was saved with {name} {state[name]}, and this order has {own}. Its "
                    f"samples would come in another order. Pass {name}={state[name]}."
                )
        self.step, self._num_done = int(state["step"]), int(state["num_done"])

    def _before(self, step: int) -> int:
        """Return how many samples come before a step."""
        if step < self.step and self._num_done != self.step * self.batch_size:
            raise ShardingError(
                f"ResumableOrder: step {step} came with another batch_size, before step {self.step}."
            )
        return self._num_done + (step - self.step) * self.batch_size

    def _at(self, place: int) -> int:
        epoch, number = divmod(place, self.num_samples)
        return shuffled(number, self.num_samples, seed=self.seed, epoch=epoch)


def shuffled(number: int, count: int, *, seed: int, epoch: int) -> int:
    """Return where an order of `count` things, chosen by seed and epoch, has put one: a permutation.

    Halves of the number's bits are mixed with hashes of each other, which can be undone and so is one to one
    (a Feistel network, 1973); a result beyond `count` is mixed again. No memory, and the same in every version
    of every library.
    """
    half = max(1, math.ceil((count - 1).bit_length() / 2))
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for each in range(_ROUNDS):
            key = struct.pack("<qqqq", seed, epoch, each, right)
            mixed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
            left, right = right, left ^ (mixed & mask)
        number = (left << half) | right
        if number < count:
            return number


def _check_ranks(batch_size: int, rank: int, num_ranks: int) -> None:
    if not 0 <= rank < num_ranks:
        raise ShardingError(f"ResumableOrder: rank is {rank}, of {num_ranks} ranks.")
    if batch_size < num_ranks:
        raise ShardingError(
            f"ResumableOrder: batch_size is {batch_size}, for {num_ranks} ranks. It counts the samples of all ranks: "
            "give each rank one or more."
        )
