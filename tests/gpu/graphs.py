"""What has to hold of steps in CUDA graphs: by plain `torch.cuda.graph`, and by `fullshard.capture_step`.

    python -m tests.gpu --only graph

On the CPU nothing is captured: the same steps are run, and `capture_step` has to say that it takes CUDA.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard.models.llama import Llama
from fullshard.torch_private import local_part
from tests.gpu.checks import FACES, MIXED, OFFLOAD, Face, check
from tests.gpu.place import Place, clip, exact, loss_of, shard, values

NUM_WARM = 3
NUM_STEPS = 20


class Training:
    """A model with its optimizer, and a step of it: the same in every bit at each making.

    num_microbatches: into how many parts a step cuts its batch; the last one reduces. max_norm: to clip to.
    rate: the learning rate.
    """

    def __init__(
        self,
        place: Place,
        face: Face,
        *,
        num_microbatches: int = 1,
        max_norm: float | None = None,
        rate: Any = 1e-3,
    ) -> None:
        self.place = place
        self.model = face(place.model())
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.params, lr=rate, eps=1e-5, foreach=False, capturable=place.is_cuda
        )
        # torch's, once an optimizer: it is stepped outside of captures, too.
        self.optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]
        self._num_microbatches, self._max_norm = num_microbatches, max_norm

    def step(self, tokens: Tensor) -> Tensor:
        """Train on (batch, length + 1) token ids. Returns the losses of micro-batches, and the norm, if any."""
        results = []
        parts = tokens.chunk(self._num_microbatches)
        for number, part in enumerate(parts):
            if isinstance(self.model, fullshard.FSDPModule):
                self.model.set_requires_gradient_sync(number == len(parts) - 1)
            loss = loss_of(self.model, part) / len(parts)
            loss.backward()
            results.append(loss.detach())
        if self._max_norm is not None:
            results.append(clip(self.model, self._max_norm).detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(results)

    def contents(self) -> dict[str, Tensor]:
        """Return whole parameters, and this rank's parts of them and of optimizer state, on the CPU."""
        found = dict(values(self.model))
        for number, param in enumerate(self.params):
            found[f"part {number}"] = local_part(param).detach().cpu().clone()
            for key, value in self.optimizer.state[param].items():
                found[f"{key} {number}"] = local_part(value).detach().cpu().clone()
        return found


def batches_of(place: Place, first: int, count: int) -> list[Tensor]:
    """Return this rank's part of the batches of steps."""
    return [place.own(place.tokens(number)).clone() for number in range(first, first + count)]


def run_eagerly(training: Training, batches: Sequence[Tensor]) -> list[Tensor]:
    """Run every step."""
    return [training.step(tokens).clone() for tokens in batches]


def run_by_torch(training: Training, batches: Sequence[Tensor]) -> list[Tensor]:
    """Warm up on a side stream, capture by `torch.cuda.graph`, and replay for the rest."""
    if not training.place.is_cuda:
        return run_eagerly(training, batches)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = run_eagerly(training, batches[:NUM_WARM])
    torch.cuda.current_stream().wait_stream(side)
    static, graph = batches[NUM_WARM].clone(), torch.cuda.CUDAGraph()
    # Newer releases notice memory from before the capture that is freed before a replay.
    is_there = "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters
    with torch.cuda.graph(graph, **({"check_input_liveness": True} if is_there else {})):
        result = training.step(static)
    for tokens in batches[NUM_WARM:]:
        static.copy_(tokens)
        graph.replay()
        results.append(result.clone())
    return results


def captured_of(training: Training, **options: Any) -> Callable[[Tensor], Tensor]:
    """Return the step as `capture_step` makes it; on the CPU the step itself, once it was refused."""
    if training.place.is_cuda:
        return fullshard.capture_step(training.step, optimizer=training.optimizer, **options)
    _refusal(
        fullshard.UnsupportedError,
        lambda: fullshard.capture_step(training.step, optimizer=training.optimizer, **options),
        "CUDA",
    )
    return training.step


def run_by_us(training: Training, batches: Sequence[Tensor]) -> list[Tensor]:
    """Call the captured step; every 7th call runs the step itself."""
    step = captured_of(training, check_every=7)
    return [step(tokens) for tokens in batches]


def assert_equal(one: Training, other: Training, results: Any, others: Any) -> None:
    """Compare results, parameters and state in every bit."""
    for number, (ours, theirs) in enumerate(zip(results, others, strict=True)):
        assert torch.equal(ours, theirs), f"step {number}: {ours.tolist()} is not {theirs.tolist()}"
    found, expected = one.contents(), other.contents()
    assert found.keys() == expected.keys()
    unlike = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert not unlike, f"{len(unlike)} of {len(found)} tensors differ: {unlike[:5]}"


def _recomputing(model: Llama) -> nn.Module:
    model.recompute_layers(True)
    return shard(model)


def _prefetching(model: Llama) -> nn.Module:
    sharded: Any = shard(model)
    layers: list[Any] = list(model.model.layers)
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    sharded.set_modules_to_forward_prefetch(layers[:1])
    return sharded  # type: ignore[no-any-return]


_SETTINGS: dict[str, tuple[Face, dict[str, Any]]] = {
    **{name: (face, {}) for name, face in FACES.items()},
    "resharding": (lambda model: shard(model, reshard_after_forward=True), {}),
    "kept-whole": (lambda model: shard(model, reshard_after_forward=False), {}),
    "prefetch": (_prefetching, {}),
    "mixed": (lambda model: shard(model, mp_policy=MIXED), {}),
    "accumulate-clip": (shard, {"num_microbatches": 2, "max_norm": 0.1}),
    "accumulate-clip-mixed": (
        lambda model: shard(model, mp_policy=MIXED),
        {"num_microbatches": 2, "max_norm": 0.1},
    ),
    "clip-wrapper": (FACES["wrapper-orig"], {"max_norm": 0.1}),
    "checkpointing": (_recomputing, {}),
}
_WAYS = {"torch": run_by_torch, "step": run_by_us}


def assert_as_steps(
    place: Place, way: str, face: Face, num_steps: int = NUM_STEPS, **how: Any
) -> str:
    """Train by one of `_WAYS` and step by step, on the same batches."""
    if place.size > 1:
        fullshard.set_default_comm("process_group")
    with exact(place):
        batches = batches_of(place, 0, NUM_WARM + num_steps)
        eager, training = Training(place, face, **how), Training(place, face, **how)
        expected = run_eagerly(eager, batches)
        results = _WAYS[way](training, batches)
        assert_equal(training, eager, results, expected)
    return f"{num_steps} steps are equal in every bit, the last loss is {float(results[-1][0]):.6f}"


for _way in _WAYS:
    for _name, (_face, _how) in _SETTINGS.items():

        @check(f"graph-{_way}-{_name}")
        def _alone(
            place: Place, way: str = _way, face: Face = _face, how: dict[str, Any] = _how
        ) -> str:
            return assert_as_steps(place, way, face, **how)

    for _name in ("fully_shard", "wrapper-orig", "accumulate-clip-mixed", "kept-whole"):
        _face, _how = _SETTINGS[_name]

        @check(f"graph-nccl-{_way}-{_name}", ranks=2, is_apart=True)
        def _together(
            place: Place, way: str = _way, face: Face = _face, how: dict[str, Any] = _how
        ) -> str:
            return assert_as_steps(place, way, face, **how)


def _between(place: Place) -> str:
    """Evaluate, save, load in place and change the learning rate between replays."""
    if place.size > 1:
        fullshard.set_default_comm("process_group")
    folders: list[Any] = [tempfile.mkdtemp() if place.rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    with exact(place):
        kept_whole: Face = lambda model: shard(model, reshard_after_forward=False)  # noqa: E731
        eager, training = (
            Training(place, kept_whole, rate=torch.tensor(1e-3, device=place.device))
            for _ in range(2)
        )
        batches = batches_of(place, 0, NUM_STEPS)
        steps = (eager.step, captured_of(training, check_every=9))
        results: list[list[Tensor]] = [[], []]
        for number, tokens in enumerate(batches):
            for each, step, found in zip((eager, training), steps, results, strict=True):
                found.append(step(tokens).clone())
                if number % 4 == 3:
                    with torch.no_grad():
                        found.append(loss_of(each.model, batches[0]).reshape(1))
                if number == 10:
                    state = copy.deepcopy(each.model.state_dict())
                    for group in each.optimizer.param_groups:
                        group["lr"].mul_(0.5)
                if number == 14:
                    each.model.load_state_dict(state)
        for name, each in (("eager", eager), ("captured", training)):
            fullshard.save_checkpoint(Path(folders[0]) / name, each.model, each.optimizer)
        assert_equal(training, eager, results[1], results[0])
        other = Training(place, kept_whole)
        fullshard.load_checkpoint(Path(folders[0]) / "captured", other.model, other.optimizer)
        assert_equal(other, training, (), ())
    return f"{len(results[0])} results are equal in every bit, and so is what was saved"


check("graph-between-replays")(_between)
check("graph-nccl-between-replays", ranks=2, is_apart=True)(_between)


def _refusal(kind: type[Exception], run: Callable[[], object], word: str) -> None:
    said = "nothing was raised"
    try:
        run()
    except kind as error:
        said = str(error)
    assert word in said, f"{word!r} is not in: {said}"


@check("graph-refusals", needs_cuda=True)
def _refusals(place: Place) -> str:
    """What no graph can hold is refused by fullshard, and training goes on."""
    unsupported, state = fullshard.UnsupportedError, fullshard.StateError
    tokens = place.tokens(0)
    training = Training(place, shard)
    graphs = []

    def capture(step: Callable[[], object]) -> None:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            try:
                step()
            finally:  # an empty graph is a warning
                torch.zeros(1, device=place.device)

    _refusal(state, lambda: capture(lambda: training.step(tokens)), "has not run yet")
    training.step(tokens)
    _refusal(state, lambda: capture(lambda: training.step(tokens)), "one more step")
    training.step(tokens)
    training.step(tokens)
    capture(lambda: training.step(tokens))
    offloaded = shard(place.model(), offload_policy=OFFLOAD)
    for _ in range(3):
        loss_of(offloaded, tokens).backward()
    _refusal(unsupported, lambda: capture(lambda: loss_of(offloaded, tokens)), "CPU offload")

    def reads(given: Tensor) -> Tensor:
        result = training.step(given)
        seen.append(float(result[0]))
        return result

    seen: list[float] = []
    captured = fullshard.capture_step(reads, optimizer=training.optimizer)
    for _ in range(3):
        captured(tokens)
    _refusal(unsupported, lambda: captured(tokens), ".item()")
    training.step(tokens)  # goes on
    step = fullshard.capture_step(training.step, optimizer=training.optimizer)
    for _ in range(5):
        step(tokens)
    before = training.contents()
    _refusal(state, lambda: step(tokens[:2]), "shape")
    training.optimizer.param_groups[0]["lr"] = 1e-4
    _refusal(state, lambda: step(tokens), "'lr'")
    after = training.contents()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    step.recapture()
    for _ in range(5):
        step(tokens)
    assert step.is_captured
    return "named, and training goes on"


@check("graph-memory", needs_cuda=True)
def _memory(place: Place) -> str:
    """Replays allocate nothing that stays, and a graph that goes gives its memory back."""
    training = Training(place, lambda model: shard(model, mp_policy=MIXED))
    step = fullshard.capture_step(training.step, optimizer=training.optimizer, check_every=0)
    batches = batches_of(place, 0, 12)
    allocated, reserved = [], []
    for tokens in batches:
        step(tokens)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(allocated[5:])) == 1, f"after each call: {allocated}"
    assert len(set(reserved[5:])) == 1, f"reserved after each call: {reserved}"
    step.recapture()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_reserved()
    assert left < reserved[-1], (
        f"{left} bytes are reserved without the graph, {reserved[-1]} with it"
    )
    return f"{(reserved[-1] - left) / 1e6:.1f} MB of the graph"
