"""Memory that lacks in the middle of sharding: the module is as it was, and may be sharded again."""

from __future__ import annotations

import contextlib
import copy
import errno
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard.comm.local import LocalComm
from fullshard.comm.peer_memory import PeerMemoryComm
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.params.buffers import UnitBuffers
from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import on_ranks
from tests.training import full_gradients, gradients_alone, make_batch, mean_square, my_part

ERRORS: dict[str, Callable[[], BaseException]] = {
    "memory": MemoryError,
    "torch": lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
    "files": lambda: OSError(errno.EMFILE, "Too many open files"),
}


class LackError(Exception):
    """Something else that goes wrong."""


@contextlib.contextmanager
def failing(number: int, error: Callable[[], BaseException]) -> Iterator[list[int]]:
    """Let the allocation of this number raise, of shards and of unsharded buffers. Yields a count."""
    count = [0]
    patch = pytest.MonkeyPatch()

    def wrap(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                raise error()
            return original(*args, **kwargs)

        patch.setattr(owner, name, run)

    for comm in (PeerMemoryComm, ProcessGroupComm, LocalComm):
        wrap(comm, "allocate_shards")
    wrap(UnitBuffers, "_bind_bucket")
    try:
        yield count
    finally:
        patch.undo()


class Net(nn.Module):
    """Layers of several dtypes, a tie, a frozen parameter, a list of weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(16), requires_grad=False)
        self.rnn = nn.LSTM(16, 16)
        self.register_buffer("scale", torch.full((16,), 0.5))
        self.first.weight.register_hook(lambda grad: grad)
        self.first.bias.note = "mine"
        self.first.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.rnn(self.first(x).tanh()[None])[0][0]
        return self.last((hidden * self.frozen * self.scale).to(hidden.dtype))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net() for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _contents(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: id(each) for key, each in value.items()}
    return [*map(id, value)] if isinstance(value, list) else id(value)


def _state(model: nn.Module) -> list[Any]:
    """Say what a module is, by identity; values of tensors as copies."""
    found: list[Any] = []
    for path, module in model.named_modules():
        attributes = {name: _contents(value) for name, value in module.__dict__.items()}
        found.append((path, id(module), type(module), attributes))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        hooks = tensor._backward_hooks
        found.append((name, id(tensor), tensor.requires_grad, tuple(tensor.shape), tensor.device))
        found.append((dict(tensor.__dict__), None if hooks is None else [*hooks]))
        found.append(None if tensor.is_meta else getattr(tensor, "_local_tensor", tensor).tolist())
    return found


def _shard(api: Api, model: nn.Module, face: str) -> nn.Module:
    if face in ("fully_shard", "outer"):
        return api.fully_shard(model)
    if face == "mixed":
        return api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(torch.bfloat16))
    if face == "replicate":
        return api.replicate(model)
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": face != "flat"}
    if face != "one":
        options["auto_wrap_policy"] = api.ModuleWrapPolicy({Net, nn.LSTM})
    return api.FullyShardedDataParallel(model, **options)


faces = pytest.mark.parametrize(
    "face", ["fully_shard", "outer", "mixed", "replicate", "one", "orig", "flat"]
)


@faces
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.ours("leaves the module half changed")
@on_ranks(1, 2)
def test_module_is_as_it_was_wherever_memory_lacks_and_is_sharded_by_the_same_call(
    api: Api, face: str, error: str
) -> None:
    model = Model()
    if face == "flat":
        model.requires_grad_(True)
    if face == "outer":
        api.fully_shard(model.blocks[1].rnn)  # taken before, and left alone but for a tie
        model.tied = nn.Module()
        model.tied.weight = model.blocks[1].rnn.weight_ih_l0
    if face == "mixed":  # more than one buffer a unit
        model.blocks[0].frozen.data = model.blocks[0].frozen.data.double()
    before = _state(model)
    number, failed = 0, True
    caught: list[BaseException] = []  # whose frames keep what the calls had made
    while failed:
        number += 1
        with failing(number, ERRORS[error]) as count, quiet():
            try:
                sharded = _shard(api, model, face)
                failed = False
            except api.AllocationError as lack:
                caught.append(lack)
        assert failed == (count[0] >= number)
        if failed:
            assert _state(model) == before
    assert number > 2
    for each in caught:
        assert ("may open no more files" if error == "files" else "ran out of memory") in str(each)
        assert "as it was before" in str(each)
        assert isinstance(each, MemoryError)
    mean_square(sharded(my_part(make_batch(16)))).backward()


@pytest.mark.ours("leaves the module half changed")
@on_ranks(2)
def test_any_other_error_leaves_the_module_as_it_was_too(api: Api) -> None:
    model = Model()
    before = _state(model)
    for face in ("fully_shard", "orig"):
        number = 3 if face == "orig" else 2
        with failing(number, LackError), quiet(), pytest.raises(LackError):
            _shard(api, model, face)
        assert _state(model) == before
    expected = gradients_alone(model, make_batch(16))
    api.fully_shard(model)
    mean_square(model(my_part(make_batch(16)))).backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.ours("leaves the module half changed")
@on_ranks(2)
def test_parameters_on_meta_are_on_meta_again(api: Api) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    before = _state(model)
    policy = api.ModuleWrapPolicy({nn.Linear})
    for number in range(1, 5):
        with failing(number, MemoryError), pytest.raises(api.AllocationError):
            api.FullyShardedDataParallel(
                model, auto_wrap_policy=policy, device_id=torch.device("cpu")
            )
        assert _state(model) == before


@pytest.mark.ours("fails in the next forward as well")
@on_ranks(1, 2)
def test_first_forward_without_memory_may_be_done_again(api: Api) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model = copy.deepcopy(alone).to("meta")
    for layer in model[:2]:
        api.fully_shard(layer)
    api.fully_shard(model)
    for layer, other in zip(model, alone, strict=True):
        for name, whole in other.named_parameters():
            mesh = getattr(layer, name).device_mesh
            value = distribute_tensor(whole.detach(), mesh, [Shard(0)])
            layer.register_parameter(name, nn.Parameter(value))
    batch, number = make_batch(16), 0
    said: list[str] = []
    while True:
        number += 1
        with failing(number, MemoryError) as count:
            try:
                out = model(my_part(batch))
                break
            except api.AllocationError as error:
                said.append(str(error))
        assert count[0] == number
    assert number >= 5
    assert all(re.search(r"(first use|private memory) \(rank", text) for text in said)
    torch.testing.assert_close(out, my_part(alone(batch)))
    mean_square(out).backward()
    mean_square(alone(batch)).backward()
    expected = full_gradients(alone)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@pytest.mark.ours("names no parameter")
@on_ranks(2)
def test_sparse_parameters_are_refused_by_name_and_nothing_is_changed(api: Api, face: str) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].bad = nn.Parameter(torch.eye(8).to_sparse())
    before = [(type(m), dict(m.__dict__)) for m in model.modules()]

    def shard() -> Any:
        if face == "fully_shard":
            return api.fully_shard(model)
        policy = ModuleWrapPolicy({nn.Linear})
        return api.FullyShardedDataParallel(
            model,
            auto_wrap_policy=policy,
            use_orig_params=face == "orig",
            device_id=torch.device("cpu"),
        )

    with pytest.raises(NotImplementedError, match=r"Linear: bad has|1.bad has"):
        shard()
    assert [(type(m), dict(m.__dict__)) for m in model.modules()] == before
    del model[1].bad
    mean_square(shard()(make_batch(8))).backward()
