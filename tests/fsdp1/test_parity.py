"""Training against PyTorch's wrapper in the same ranks, and against one process on the whole batch.

On two ranks, and on a 2 x 2 mesh, every sum has two terms, which have one sum in any order: there
everything equals PyTorch's bit by bit, and after gradients were scaled by a norm too, where ranks
have the same parts of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.api import Api
from tests.fsdp1.models import STRATEGIES, batch, buffers, net, run_step, whole, wrap
from tests.harness import mesh_of, on_ranks, world_size
from tests.training import assert_equal, make_batch, mean_over_ranks, mean_square, my_part

# param_dtype, reduce_dtype
DTYPES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, None),
    "bf16_reduce": (None, torch.bfloat16),
}
# Rounding to 24, 8 and 11 bits, carried on over the steps.
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3, "bf16_reduce": 1e-2}
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
# What a model is like, apart from plain: where activations are checkpointed, what is an instance.
KINDS = ("nested", "one_instance", "frozen", "checkpoint_inside", "checkpoint_outside")
MAX_NORM = 0.05  # below any norm here


@dataclass(frozen=True)
class Cell:
    """One combination of options."""

    strategy: str = "FULL_SHARD"
    use_orig_params: bool = False
    dtype: str = "fp32"
    kind: str = "nested"

    @property
    def accumulates(self) -> bool:
        """Whether PyTorch can: it sets gradients of one dtype on parameters of another."""
        is_low = DTYPES[self.dtype][0] is not None
        return not (self.strategy == "NO_SHARD" and self.use_orig_params and is_low)

    def __str__(self) -> str:
        params = "orig" if self.use_orig_params else "flat"
        return "-".join((self.strategy, params, self.dtype, self.kind))


@dataclass
class Trace:
    """What a rank saw. exact: while sums were all there was; then the losses and norms of the rest."""

    exact_losses: list[float] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    exact_parameters: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def _all_cells(num_ranks: int) -> list[Cell]:
    strategies = [s for s in STRATEGIES if num_ranks == 4 or s not in HYBRID]
    cells = itertools.starmap(Cell, itertools.product(strategies, (False, True), DTYPES, KINDS))
    return [c for c in cells if c.use_orig_params or c.kind != "frozen"]


def _diagonal(num_ranks: int) -> list[Cell]:
    """Pick cells so that every two values of different options meet somewhere."""
    cells = []
    for row, strategy in enumerate(STRATEGIES):
        for column, dtype in enumerate(DTYPES):
            is_odd = (row + column) % 2 == 1
            if strategy in HYBRID or (num_ranks == 4) == is_odd:
                kind = KINDS[(row + 2 * column) % len(KINDS)]
                orig = kind == "frozen" or (row // 2 + column // 2) % 2 == 1
                cells.append(Cell(strategy, orig, dtype, kind))
    return [c for c in cells if num_ranks == 4 or c.strategy not in HYBRID]


def _cells(num_ranks: int, *, others: bool = False) -> Any:
    """Parametrise a test with the diagonal, or with all other cells."""
    chosen = _diagonal(num_ranks)
    if others:
        chosen = [cell for cell in _all_cells(num_ranks) if cell not in chosen]
    return pytest.mark.parametrize("cell", chosen, ids=str)


on_default_comm = pytest.mark.apis("peer_memory")


@on_default_comm
@_cells(2)
@on_ranks(2)
def test_two_ranks_train_as_with_torch(api: Api, cell: Cell) -> None:
    _assert_trains_as_torch(api, cell)


@on_default_comm
@_cells(4)
@on_ranks(4)
def test_four_ranks_train_as_with_torch(api: Api, cell: Cell) -> None:
    _assert_trains_as_torch(api, cell)


@pytest.mark.long
@on_default_comm
@_cells(2, others=True)
@on_ranks(2)
def test_two_ranks_train_as_with_torch_in_every_cell(api: Api, cell: Cell) -> None:
    _assert_trains_as_torch(api, cell)


@pytest.mark.long
@on_default_comm
@_cells(4, others=True)
@on_ranks(4)
def test_four_ranks_train_as_with_torch_in_every_cell(api: Api, cell: Cell) -> None:
    _assert_trains_as_torch(api, cell)


@on_default_comm
@pytest.mark.parametrize("comm", ["auto", "process_group", "collectives"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@on_ranks(2, 4)
def test_ranks_train_as_with_torch_however_bytes_travel(
    api: Api, comm: str, use_orig_params: bool
) -> None:
    with _default_comm(api, comm):
        _assert_trains_as_torch(api, Cell("FULL_SHARD", use_orig_params, "bf16"))


@contextlib.contextmanager
def _default_comm(api: Api, choice: str) -> Iterator[None]:
    before = api.set_default_comm(choice)
    try:
        yield
    finally:
        api.set_default_comm(before)


def _assert_trains_as_torch(api: Api, cell: Cell) -> None:
    theirs, ours = (_train(each, cell) for each in (Api("torch"), api))
    # Sums of four terms depend on the order; PyTorch halves float16 first, which may underflow.
    is_exact = (world_size() == 2 or cell.strategy in HYBRID) and cell.dtype != "fp16"
    tolerance = TOLERANCES[cell.dtype]
    early = 0.0 if is_exact else tolerance
    assert ours.exact_losses == pytest.approx(theirs.exact_losses, rel=early, abs=0.0)
    for output, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert output.dtype == other.dtype
        torch.testing.assert_close(output, other, rtol=early, atol=early)
    assert_equal(ours.exact_parameters, theirs.exact_parameters, rtol=early, atol=early)
    # Where originals are shown, PyTorch begins each at a multiple of 16 bytes: of odd ones, ranks then have other parts,
    # whose norms add up in another order.
    has_same_parts = cell.strategy == "NO_SHARD" or not cell.use_orig_params
    late = 0.0 if is_exact and has_same_parts else tolerance
    assert ours.norms == pytest.approx(theirs.norms, rel=late, abs=0.0)
    assert ours.losses == pytest.approx(theirs.losses, rel=late, abs=0.0)
    assert_equal(ours.parameters, theirs.parameters, rtol=late, atol=late)
    assert {n: b.dtype for n, b in ours.buffers.items()} == {
        n: b.dtype for n, b in theirs.buffers.items()
    }
    assert_equal(ours.buffers, theirs.buffers, rtol=tolerance, atol=tolerance)


def _train(api: Api, cell: Cell) -> Trace:
    """Take two steps with an evaluation between; accumulate and clip; and clip once more."""
    model = _wrap(api, cell)
    # A constant factor in the gradients does not escape it.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trace = Trace()
    for step in range(2):
        trace.exact_losses.append(run_step(model, seed=step).item())
        optimizer.step()
        optimizer.zero_grad()
        trace.outputs.append(_evaluate(model))
    trace.exact_parameters = whole(api, model)
    for num_unreduced in (1, 0) if cell.accumulates else (0,):
        with model.no_sync() if num_unreduced else contextlib.nullcontext():
            for number in range(num_unreduced):
                trace.losses.append(run_step(model, seed=10 + number).item())
        trace.losses.append(run_step(model, seed=20).item())
        trace.norms.append(model.clip_grad_norm_(MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.losses.append(run_step(model, seed=30).item())
    trace.parameters = whole(api, model)
    trace.buffers = buffers(model)
    return trace


def _evaluate(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        outputs = model(my_part(batch(seed=40)))
    model.train()
    return outputs


def _wrap(api: Api, cell: Cell) -> Any:
    options: dict[str, Any] = {"use_orig_params": cell.use_orig_params}
    if cell.strategy in HYBRID:
        options["device_mesh"] = mesh_of(2, 2)
    param_dtype, reduce_dtype = DTYPES[cell.dtype]
    options["mixed_precision"] = api.MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        buffer_dtype=param_dtype,
        _module_classes_to_ignore=(),
    )
    model = net()  # two weights of its root are one
    if cell.kind == "frozen":
        model.blocks[0].wide.weight.requires_grad_(requires_grad=False)
        model.blocks[1].requires_grad_(requires_grad=False)
        model.stem.bias.requires_grad_(requires_grad=False)
    if not cell.kind.startswith("checkpoint"):
        nested = cell.kind != "one_instance"
        # PyTorch has hybrid strategies without a policy as well, where all instances share a mesh.
        return wrap(api, model, cell.strategy, nested=nested, **options)
    for number, block in enumerate(model.blocks):
        inner = checkpoint_wrapper(block) if cell.kind == "checkpoint_inside" else block
        wrapped = wrap(api, inner, cell.strategy, nested=False, **options)
        is_outside = cell.kind == "checkpoint_outside"
        model.blocks[number] = checkpoint_wrapper(wrapped) if is_outside else wrapped
    return wrap(api, model, cell.strategy, nested=False, **options)


# One process


ALONE = [
    Cell("FULL_SHARD", False),
    Cell("FULL_SHARD", True, kind="frozen"),
    Cell("SHARD_GRAD_OP", True, kind="checkpoint_inside"),
    Cell("NO_SHARD", False, kind="one_instance"),
]
ALONE_ON_4 = [*ALONE, Cell("HYBRID_SHARD", True), Cell("_HYBRID_SHARD_ZERO2", False)]


@pytest.mark.parametrize("cell", ALONE, ids=str)
@on_ranks(2)
def test_two_ranks_train_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@pytest.mark.parametrize("cell", ALONE_ON_4, ids=str)
@on_ranks(4)
def test_four_ranks_train_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


def _assert_trains_as_one_process(api: Api, cell: Cell) -> None:
    model, alone = _wrap(api, cell), net()
    for name, parameter in alone.named_parameters():
        is_frozen = name in ("stem.bias", "blocks.0.wide.weight") or name.startswith("blocks.1.")
        parameter.requires_grad_(not (cell.kind == "frozen" and is_frozen))
    for each in (model, alone):
        each.batch_norm.eval()  # else its statistics are those of a rank's part
    trained = [p for p in alone.parameters() if p.requires_grad]
    optimizers = [
        torch.optim.SGD(params, lr=0.1, momentum=0.9) for params in (model.parameters(), trained)
    ]
    for step in range(4):
        inputs = make_batch(7, seed=step)
        with model.no_sync() if step == 2 else contextlib.nullcontext():
            losses = mean_over_ranks([run_step(model, seed=step).item()])
        expected = mean_square(alone(inputs))
        expected.backward()
        assert losses == pytest.approx([expected.item()], rel=1e-5)
        if step == 2:
            continue  # and add to its gradients
        norms = [
            model.clip_grad_norm_(MAX_NORM).item(),
            torch.nn.utils.clip_grad_norm_(trained, MAX_NORM).item(),
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected_parameters = {n: p.detach() for n, p in alone.named_parameters()}
    assert_equal(whole(api, model), expected_parameters, rtol=1e-5, atol=1e-6)
