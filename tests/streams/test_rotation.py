"""Memory of gathers in rotation: what a gather waits for, where it lands, how much there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import fullshard
from fullshard.engine.hooks import hooks_of
from fullshard.engine.runtime import Lane, Runtime
from fullshard.torch_private import swap_memory
from tests.streams.lab import Lab, fake_world
from tests.streams.programs.common import mesh_of
from tests.streams.recording import DEVICE

pytestmark = pytest.mark.skipif(swap_memory is None, reason="this torch cannot swap memory")
NUM_BLOCKS = 7


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Yield a virtual device, as one rank of four."""
    with fake_world(), Lab() as lab:
        yield lab


class Seen:
    """Where gathers of blocks landed, and what compute had done that they waited for, in order."""

    def __init__(self, lab: Lab, blocks: list[Any]) -> None:
        self.lab = lab
        self.units = [hooks_of(block).state.units[0] for block in blocks]
        self.reshards: list[int] = []  # compute's position
        self.gathers: list[tuple[int, int, int]] = []  # address, waited for, reshards so far
        self.most_nbytes = 0
        self.nbytes_at_end: list[int] = []
        for unit in self.units:
            self._watch(unit.params.buffers)

    def _watch(self, buffers: Any) -> None:
        start, free = buffers._start_gathers, buffers.free_unsharded

        def starting(*args: Any, **options: Any) -> Any:
            waited = self.lab.lanes.clock(Lane.ALL_GATHER).get(Lane.COMPUTE, 0)
            (flat,) = buffers.unsharded_memory
            self.gathers.append((flat.data_ptr(), waited, len(self.reshards)))
            self.most_nbytes = max(self.most_nbytes, self.nbytes)
            return start(*args, **options)

        def freeing() -> None:
            self.reshards.append(self.lab.lanes.clock(Lane.COMPUTE).get(Lane.COMPUTE, 0))
            free()

        buffers._start_gathers, buffers.free_unsharded = starting, freeing

    @property
    def nbytes(self) -> int:
        """Bytes of unsharded blocks, whole, arriving or resting."""
        rotation = Runtime.of(DEVICE).rotation
        assert rotation is not None
        lent = (t.untyped_storage().nbytes() for u in self.units for t in u.unsharded_memory)
        return sum(lent) + sum(memory.nbytes for memory in rotation.resting)

    def forget(self) -> None:
        self.reshards.clear()
        self.gathers.clear()
        self.most_nbytes = 0


def _trained(
    lab: Lab, width_of: Any = lambda number: 16, **options: Any
) -> tuple[nn.Module, Seen, Any]:
    """Train blocks of Linear layers for two steps, the first of which is watched; return what a third does."""
    widths = [(16, width_of(number)) for number in range(NUM_BLOCKS)]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Linear(b, a)) for a, b in widths]
    model = nn.Sequential(*blocks)
    for each in (*blocks, model):
        fullshard.fully_shard(each, mesh=mesh_of(4), **options)
    optimizer = SGD(model.parameters(), lr=1e-3)
    x = torch.ones(2, 16, device=DEVICE)

    def step() -> None:
        with lab.step():
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    step()
    seen = Seen(lab, blocks)
    step()
    return model, seen, step


def test_a_gather_waits_for_the_last_reader_of_its_memory_alone(lab: Lab) -> None:
    _, seen, step = _trained(lab)
    seen.forget()
    step()
    # In forward a gather starts when its module is called. By then the host has resharded all before
    # it; the lane has waited for the reshard of three units before alone.
    forward = seen.gathers[:NUM_BLOCKS]
    for number, (_, waited, num_resharded) in enumerate(forward):
        assert num_resharded == number
        if number >= 3:
            assert seen.reshards[number - 3] <= waited < seen.reshards[number - 2]
    # In backward it starts one unit early.
    backward = seen.gathers[NUM_BLOCKS:]
    for _, waited, num_resharded in backward[3:]:
        assert seen.reshards[num_resharded - 2] <= waited < seen.reshards[num_resharded - 1]
    assert lab.problems == []


def test_what_stays_is_gathered_beside_the_unit_before_it(lab: Lab) -> None:
    model, seen, step = _trained(lab, reshard_after_forward=False)
    seen.forget()
    begun: list[int] = []  # compute's position when a block begins, after its hooks
    for block in model:
        block.register_forward_pre_hook(
            lambda *_: begun.append(lab.lanes.clock(Lane.COMPUTE).get(Lane.COMPUTE, 0))
        )
    step()
    assert len(seen.gathers) == NUM_BLOCKS
    for (_, waited, _), begin in zip(seen.gathers[1:], begun, strict=False):
        assert waited <= begin
    assert lab.problems == []


def test_equal_units_share_three_addresses_and_their_memory(lab: Lab) -> None:
    _, seen, step = _trained(lab)
    seen.forget()
    step()
    (nbytes,) = {unit.params.buffers._freed[0].nbytes for unit in seen.units}
    assert len(seen.gathers) == 2 * NUM_BLOCKS
    for a_pass in (seen.gathers[:NUM_BLOCKS], seen.gathers[NUM_BLOCKS:]):
        assert len({address for address, _, _ in a_pass}) == 3
    assert seen.most_nbytes == 3 * nbytes
    assert seen.nbytes == 0  # between passes activations need the room
    assert lab.problems == []


def test_unequal_units_are_at_most_three_at_a_time(lab: Lab) -> None:
    _, seen, step = _trained(lab, width_of=lambda number: 16 + 8 * (number % 3))
    seen.forget()
    step()
    sizes = [unit.params.buffers._freed[0].nbytes for unit in seen.units]
    assert len(set(sizes)) == 3
    assert seen.most_nbytes <= max(sum(sizes[i : i + 3]) for i in range(NUM_BLOCKS))
    assert lab.problems == []


def test_a_model_that_goes_while_it_is_whole_takes_its_memory_along(lab: Lab) -> None:
    model, seen, step = _trained(lab)
    other, _, other_step = _trained(lab)
    x = torch.ones(2, 16, device=DEVICE)
    output = model(x).sum()
    held = model[0]
    held.unshard()
    del output, held, model, seen, step
    other_step()
    other_step()
    assert lab.problems == []
    assert other is not None
