"""State that hooks read in the middle of a forward or backward, and what must not be loaded there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.errors import FullshardError
from tests.api import Api
from tests.fsdp1.models import Block, batch, full_value, net, quiet, run_step, wrap
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.live.ways import ALL
from tests.selection import repeats
from tests.test_transfer import HYBRID
from tests.training import assert_equal, mean_square, my_part

Whole = dict[str, Tensor]
Reader = Callable[[Api, Any, torch.optim.Optimizer, Path], Whole]


def _state_dict(_: Api, model: Any, __: torch.optim.Optimizer, ___: Path) -> Whole:
    return {name: full_value(value).clone() for name, value in model.state_dict().items()}


def _iterated(_: Api, model: Any, __: torch.optim.Optimizer, ___: Path) -> Whole:
    return dict(fullshard.iter_full_state(model))


def _streamed(_: Api, model: Any, __: torch.optim.Optimizer, ___: Path) -> Whole:
    return dict(pair for bucket in fullshard.stream_weights(model) for pair in bucket)


def _transferred(api: Api, model: Any, optimizer: torch.optim.Optimizer, _: Path) -> Whole:
    state = api.sharded_state(model, optimizer)["model"]
    return {name: full_value(value).clone() for name, value in state.items()}


def _averaged(_: Api, model: Any, __: torch.optim.Optimizer, ___: Path) -> Whole:
    fullshard.EMA(model, 0.5).update()
    return {}


def _saved(_: Api, model: Any, optimizer: torch.optim.Optimizer, path: Path) -> Whole:
    fullshard.save_checkpoint(path / "a", model, optimizer)
    return _loaded(path / "a")


def _saved_later(_: Api, model: Any, optimizer: torch.optim.Optimizer, path: Path) -> Whole:
    pending = fullshard.async_save_checkpoint(path / "b", model, optimizer)
    return _loaded(pending.wait().path)


def _exported(_: Api, model: Any, __: torch.optim.Optimizer, path: Path) -> Whole:
    fullshard.export_hf(model, path / "c")
    other = _alone()
    fullshard.load_hf(other, path / "c")
    return dict(other.state_dict())


READERS: dict[str, Reader] = {
    "state_dict": _state_dict,
    "iter_full_state": _iterated,
    "stream_weights": _streamed,
    "sharded_state": _transferred,
    "ema": _averaged,
    "save": _saved,
    "async_save": _saved_later,
    "export_hf": _exported,
}


def _alone() -> nn.Module:
    return net(9)


def _loaded(path: Path) -> Whole:
    other = _alone()
    fullshard.load_checkpoint(path, other, allow=["dtype"])  # of buffers
    return dict(other.state_dict())


# Where hooks are

Place = Callable[[Any, Callable[..., None]], Any]


def _inner(model: Any) -> Any:
    return getattr(model, "module", model)


def _block(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, Block))


PLACES: dict[str, Place] = {
    "root's forward": lambda m, do: _inner(m).stem.register_forward_hook(lambda *_: do()),
    "before block": lambda m, do: _inner(m).blocks[0].register_forward_pre_hook(lambda *_: do()),
    "in block": lambda m, do: _block(m).wide.register_forward_hook(lambda *_: do()),
    "in second block": lambda m, do: _inner(m).blocks[1].register_forward_hook(lambda *_: do()),
    "root's backward": lambda m, do: _inner(m).batch_norm.register_full_backward_hook(
        lambda *_: do()
    ),
    "block's backward": lambda m, do: _block(m).norm.register_full_backward_hook(lambda *_: do()),
}


def _fully_sharded(api: Api, model: nn.Module, **options: Any) -> nn.Module:
    mesh = mesh_of(world_size())
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        api.fully_shard(module, mesh=mesh, **options)
    return model


def _low(api: Api, model: Any) -> nn.Module:
    for name, buffer in model.batch_norm.named_buffers():
        setattr(model.batch_norm, name, buffer.bfloat16() if buffer.is_floating_point() else buffer)
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _fully_sharded(api, model, mp_policy=policy)


def _low_wrapped(api: Api, model: nn.Module, *, use_orig_params: bool) -> nn.Module:
    precision = api.MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    wrapped: nn.Module = wrap(
        api, model, "FULL_SHARD", use_orig_params=use_orig_params, mixed_precision=precision
    )
    return wrapped


def _frozen(model: Any) -> Any:
    """Freeze a block, and one parameter of the root's unit."""
    model.blocks[0].requires_grad_(False)
    model.stem.bias.requires_grad_(False)
    return model


def _frozen_flat(api: Api, model: Any) -> nn.Module:
    """Freeze a whole flat parameter: PyTorch refuses one that is frozen in part."""
    model.blocks[0].requires_grad_(False)
    wrapped: nn.Module = wrap(api, model, "FULL_SHARD", use_orig_params=False)
    return wrapped


WAYS = {
    **ALL,
    "kept": lambda api, model: _fully_sharded(api, model, reshard_after_forward=False),
    "resharded": lambda api, model: _fully_sharded(api, model, reshard_after_forward=True),
    "smaller": lambda api, model: _fully_sharded(api, model, reshard_after_forward=2),
    "frozen": lambda api, model: _fully_sharded(api, _frozen(model)),
    "frozen_orig": lambda api, model: wrap(api, _frozen(model), "FULL_SHARD", use_orig_params=True),
    "frozen_flat": _frozen_flat,
    "low": _low,
    "offloaded": lambda api, model: _fully_sharded(
        api, model, offload_policy=api.CPUOffloadPolicy(pin_memory=False)
    ),
    "low_orig": lambda api, model: _low_wrapped(api, model, use_orig_params=True),
    "low_flat": lambda api, model: _low_wrapped(api, model, use_orig_params=False),
    "prefetching_flat": lambda api, model: wrap(
        api, model, "SHARD_GRAD_OP", use_orig_params=False, forward_prefetch=True
    ),
}


class _Seen:
    """What a run saw: losses, gradients of each step, the parameters in the end, what was read."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor | None]] = []
        self.expected: Whole = {}  # the parameters in the step in which the hook reads
        self.read: list[Whole] = []
        self.after: Whole = {}


def _run(
    api: Api, way: str, place: str, *do: Callable[[Any, torch.optim.Optimizer], Whole]
) -> _Seen:
    """Train a model in steps of two backwards, and do things once, in a hook in the second one."""
    with quiet():
        model = WAYS[way](api, net())
    _inner(model).batch_norm.momentum = 0.0  # else ranks differ in buffers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = _Seen()
    for step in range(3):
        if step == 1:
            state = _state_dict(api, model, optimizer, Path())
            seen.expected = {name: state[name] for name, _ in net().named_parameters()}
        for part in range(2):
            todo = [*do] if (step, part) == (1, 1) else []

            def act(todo: list[Any] = todo) -> None:
                while todo:
                    seen.read.append(todo.pop(0)(model, optimizer))

            handle = PLACES[place](model, act)
            seen.losses.append(run_step(model, seed=2 * step + part).item())
            handle.remove()
            assert not todo
        seen.gradients.append(
            {n: None if p.grad is None else _local(p.grad) for n, p in model.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
    seen.after = _state_dict(api, model, optimizer, Path())
    return seen


def _local(grad: Tensor) -> Tensor:
    return getattr(grad, "_local_tensor", grad).clone()


def _assert_same(one: _Seen, other: _Seen) -> None:
    assert one.losses == other.losses
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        assert [name for name, grad in ours.items() if grad is None] == [
            name for name, grad in theirs.items() if grad is None
        ]
        assert_equal(*({n: g for n, g in each.items() if g is not None} for each in (ours, theirs)))
    assert_equal(one.after, other.after)


def _assert_reading_changes_nothing(
    api: Api, way: str, place: str, path: Path, alone: bool
) -> None:
    """alone: whether each reader has a pass of its own; else all read in one."""
    readers = [lambda *a, r=r, n=n: r(api, *a, path / n) for n, r in READERS.items()]
    with quiet():
        expected = _run(api, way, place)
        for group in [[reader] for reader in readers] if alone else [readers]:
            seen = _run(api, way, place, *group)
            _assert_same(seen, expected)
            assert len(seen.read) == len(group)
            for read in filter(None, seen.read):
                assert_equal({each: read[each] for each in seen.expected}, seen.expected)


over_peer_memory = repeats(lambda s: s["api"] == "process_group")
FEW_WAYS = ("orig", "flat", "replicated", "fully_shard", "kept")
# Each place and each way, not each with each.
IN_SHORT = {
    *(("fully_shard", "block's backward"), ("fully_shard", "in block"), ("replicated", "in block")),
    *(("orig", "in block"), ("flat", "block's backward"), ("kept", "root's forward")),
}
some = repeats(lambda s: s["api"] == "process_group" or (s["way"], s["place"]) not in IN_SHORT)
each_alone = pytest.mark.parametrize(
    "alone", [False, pytest.param(True, marks=pytest.mark.long)], ids=["together", "each alone"]
)
ON_TWO = [way for way in WAYS if way not in (*HYBRID, "plain", "smaller")]


@some
@each_alone
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ON_TWO)
@on_ranks(2)
def test_reading_in_a_pass_changes_nothing(
    api: Api, way: str, place: str, tmp_path: Path, alone: bool
) -> None:
    _assert_reading_changes_nothing(api, way, place, tmp_path, alone)


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", [*HYBRID, "smaller"])
@on_ranks(4)
def test_reading_in_a_pass_of_replicas_changes_nothing(
    api: Api, way: str, place: str, tmp_path: Path
) -> None:
    _assert_reading_changes_nothing(api, way, place, tmp_path, alone=True)


@repeats(lambda s: s["api"] == "process_group" or s["way"] in ("flat", "replicated", "kept"))
@pytest.mark.parametrize("way", [*FEW_WAYS, "smaller"])
@on_ranks(4)
def test_one_rank_alone_reads_in_a_pass(api: Api, way: str) -> None:
    expected = _run(api, way, "in second block")

    def read(model: Any, _: Any) -> Whole:
        if rank() == 1:
            fullshard.EMA(model).update()
            if way in ("fully_shard", "kept", "smaller"):  # whose values are this rank's shards
                model.state_dict()
        return {}

    _assert_same(_run(api, way, "in second block", read), expected)


@repeats(lambda s: s["api"] == "process_group" or s["way"] in ("replicated", "kept"))
@each_alone
@pytest.mark.parametrize("way", FEW_WAYS)
@on_ranks(2)
def test_reading_between_forward_and_backward_changes_nothing(
    api: Api, way: str, tmp_path: Path, alone: bool
) -> None:
    def gradients(readers: dict[str, Reader]) -> dict[str, Tensor]:
        model = WAYS[way](api, net())
        _inner(model).batch_norm.momentum = 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            loss = mean_square(model(my_part(batch(number))))
            for name, reader in readers.items():
                reader(api, model, optimizer, tmp_path / name / str(number))
            loss.backward()
        return {n: _local(p.grad) for n, p in model.named_parameters() if p.grad is not None}

    with quiet():
        expected = gradients({})
        for group in [{n: r} for n, r in READERS.items()] if alone else [READERS]:
            assert_equal(gradients(group), expected)


def _load_state(_: Api, model: Any, __: torch.optim.Optimizer, state: Whole, ___: Path) -> None:
    model.load_state_dict(state)


def _load_checkpoint(
    _: Api, model: Any, optimizer: torch.optim.Optimizer, __: Whole, path: Path
) -> None:
    fullshard.load_checkpoint(path / "a", model, optimizer)


def _load_hf(_: Api, model: Any, __: torch.optim.Optimizer, ___: Whole, path: Path) -> None:
    fullshard.load_hf(model, path / "b", allow=["missing", "unexpected"])


def _apply_averages(_: Api, model: Any, __: torch.optim.Optimizer, ___: Whole, ____: Path) -> None:
    with fullshard.EMA(model).applied():
        pass


WRITERS = {
    "load_state_dict": _load_state,
    "load_checkpoint": _load_checkpoint,
    "load_hf": _load_hf,
    "applied": _apply_averages,
}


@some
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", FEW_WAYS)
@on_ranks(2)
def test_loading_in_a_pass_is_refused(api: Api, way: str, place: str, tmp_path: Path) -> None:
    other = WAYS[way](api, net(5))
    state = {k: v.clone() for k, v in other.state_dict().items()}
    fullshard.save_checkpoint(tmp_path / "a", other, torch.optim.SGD(other.parameters(), lr=0.1))
    fullshard.export_hf(other, tmp_path / "b")
    with quiet():
        expected, writers = _run(api, way, place), []
        for name, writer in WRITERS.items():

            def write(model: Any, optimizer: Any, writer: Any = writer, name: str = name) -> Whole:
                with pytest.raises(FullshardError, match=f"{name} is called while"):
                    writer(api, model, optimizer, state, tmp_path)
                return {}

            writers.append(write)
        _assert_same(_run(api, way, place, *writers), expected)


@pytest.mark.parametrize("way", ["orig", "flat", "fully_shard"])
@on_ranks(2)
def test_loading_after_an_exception_in_a_pass_is_allowed(api: Api, way: str) -> None:
    model = WAYS[way](api, net())
    state = WAYS[way](api, net(5)).state_dict()
    for place in ("in block", "block's backward"):
        handle = PLACES[place](model, _fail)
        with pytest.raises(ZeroDivisionError):
            run_step(model)
        handle.remove()
        model.load_state_dict(state)
        run_step(model)
        read = model.state_dict()
        for name, value in net(5).named_parameters():
            assert full_value(read[name]).equal(value), name


@over_peer_memory
@pytest.mark.parametrize("way", ["orig", "flat", "fully_shard"])
@on_ranks(2)
def test_a_state_dict_that_raised_does_not_spoil_the_next(api: Api, way: str) -> None:
    model = WAYS[way](api, net())
    names = [name for name, _ in model.named_parameters()]
    handle = _inner(model).stem.register_state_dict_pre_hook(lambda *_: _fail())
    with pytest.raises(ZeroDivisionError):
        model.state_dict()
    handle.remove()
    state = model.state_dict()
    for name, value in net().named_parameters():
        assert full_value(state[name]).equal(value), name
    assert [name for name, _ in model.named_parameters()] == names


def _fail() -> None:
    raise ZeroDivisionError
