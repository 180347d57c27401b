"""The two sides of a script: what each does at the moments that are recorded.

sharded    runs first, and leaves for the other what every model began with: whole values, random states
whole      begins with these, so that values which are drawn after sharding, or differ from rank to rank,
           make no difference; that they do is a fact of its own

After each step the whole side takes over the sharded side's parameters as well, once its own are recorded. So each
step is compared by itself: rounding that an adaptive optimizer makes large does not add up.
"""

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.tools.verify.facts import Unit
from fullshard.tools.verify.gathering import (
    buffers_of,
    ties_of,
    units_of,
    whole_gradients,
    whole_parameters,
)
from fullshard.tools.verify.measures import fingerprint, fingerprints
from fullshard.tools.verify.program import seed_all
from fullshard.tools.verify.record import Diary, rank_folder, read_start, read_step
from fullshard.tools.verify.script.averaging import Averaging
from fullshard.tools.verify.script.casting import Casting
from fullshard.tools.verify.script.models import Models, Root
from fullshard.tools.verify.script.names import replaced
from fullshard.tools.verify.script.whole import standing_in
from fullshard.tools.verify.training import keyless

Tensors = dict[str, torch.Tensor]


class Side:
    """What both do alike; by itself, it records nothing of values."""

    label = ""

    def __init__(self, diary: Diary, folder: Path, *, rank: int, seed: int) -> None:
        self.diary = diary
        self.rank = rank
        self.models = Models()
        self.optimizers: set[torch.optim.Optimizer] = set()  # that have taken a step
        self._seed = seed
        self._first_state = 0  # what torch's generator was seeded with before the script
        self._folder = folder  # of the records of all ranks on both sides

    def names(self) -> contextlib.AbstractContextManager[None]:
        """Let the script find what this side has in the place of sharding, inside a block."""
        raise NotImplementedError

    def start(self, root: Root) -> None:
        """See a model for the first time, before its first forward. Collective."""
        raise NotImplementedError

    def before_forward(self) -> None:
        """See that a forward begins which a backward may follow."""

    def before_backward(self) -> tuple[str, ...]:
        """Return the parameters that forwards have written to, as far as this side can know."""
        return ()

    def after_backward(self) -> None:
        """See that gradients are there. Collective."""

    def gradients(self, root: Root) -> Tensors:
        """Return whole gradients by name; on rank 0 alone. Collective."""
        raise NotImplementedError

    def parameters(self, root: Root) -> Tensors:
        """Return whole parameters by name; on rank 0 alone. Collective."""
        raise NotImplementedError

    def after_step(self, step: int) -> None:
        """See that a step is recorded."""

    def seed(self) -> None:
        """Seed all ranks alike: so they build the same model, unless the script sees to it that they do not."""
        seed_all(self._seed)
        self._first_state = torch.initial_seed()

    def _note_start(
        self,
        root: Root,
        own: dict[str, str],
        initial: dict[str, str],
        ties: Sequence[tuple[str, ...]],
        units: Sequence[Unit] = (),
    ) -> None:
        run = self.diary.run
        is_seeded = torch.initial_seed() != self._first_state
        if not is_seeded and not root.prefix:  # what ranks draw from now on, data say, is their own
            seed_all(self._seed, dist.get_rank())
        buffers = fingerprints((root.name(n), b) for n, b in buffers_of(root.module).items())
        self.diary.note(
            own={**run.own, **own},
            initial={**run.initial, **initial},
            buffers={**run.buffers, **buffers},
            ties=(*run.ties, *ties),
            units=(*run.units, *units),
            seeds=run.seeds or is_seeded,
        )


class Sharded(Side):
    """Shards, as the script says; every name of PyTorch's FSDP is fullshard's."""

    label = "sharded"

    @contextlib.contextmanager
    def names(self) -> Iterator[None]:
        """Note what is given to the functions and to the class that shard."""

        def noting(function: Any) -> Any:
            @functools.wraps(function)
            def shard(module: Any, *args: Any, **kwargs: Any) -> Any:
                for each in module if isinstance(module, (list, tuple)) else [module]:
                    self.models.note(each)
                return function(module, *args, **kwargs)

            return shard

        functions = (fullshard.fully_shard, fullshard.replicate)
        wrapper: Any = fullshard.FullyShardedDataParallel
        make = wrapper.__init__

        def note_and_make(instance: Any, *args: Any, **kwargs: Any) -> None:
            make(instance, *args, **kwargs)
            self.models.note(instance)

        with replaced({function: noting(function) for function in functions}):
            wrapper.__init__ = functools.wraps(make)(note_and_make)
            try:
                yield
            finally:
                wrapper.__init__ = make

    def start(self, root: Root) -> None:
        """Gather the values that the model begins with, and leave them with the random states."""
        whole = _named(root, whole_parameters(root.module))
        units = [
            Unit(root.name(u.name), tuple(map(root.name, u.parameters)), u.divide_factor)
            for u in units_of(root.module)
        ]
        self._note_start(root, {}, fingerprints(whole.items()), ties_of(whole), units)
        self.diary.write_start(root.prefix, {"parameters": whole, "random": _random_states()})

    def gradients(self, root: Root) -> Tensors:
        """Gather gradients."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        others = [parameter for group in groups for parameter in group["params"]]
        return _named(root, whole_gradients(root.module, others=others))

    def parameters(self, root: Root) -> Tensors:
        """Gather parameters."""
        return _named(root, whole_parameters(root.module))


class Whole(Side):
    """Shards nothing: ranks have whole models, whose gradients are averaged after each backward."""

    label = "whole"

    def __init__(
        self, diary: Diary, folder: Path, *, rank: int, seed: int, divide_by: float | None = None
    ) -> None:
        super().__init__(diary, folder, rank=rank, seed=seed)
        self._averaging = Averaging(divide_by)
        self._casting = Casting()
        self._given: dict[int, tuple[nn.Parameter, str]] = {}
        self._before: dict[str, str] = {}

    @contextlib.contextmanager
    def names(self) -> Iterator[None]:
        """Put what leaves modules whole in the place of sharding.

        Scripts for `fully_shard` ask DTensors for ``full_tensor()`` and ``to_local()``: of a plain tensor here
        that is itself.
        """
        tensor: Any = torch.Tensor
        tensor.full_tensor = tensor.to_local = lambda self, **_: self
        try:
            with replaced(standing_in(self._averaging, self._casting, self._note)):
                yield
        finally:
            del tensor.full_tensor, tensor.to_local

    def _note(self, module: nn.Module) -> None:
        """Note a module with the values that this rank gives to be sharded."""
        self.models.note(module)
        for parameter in module.parameters():
            if id(parameter) not in self._given:
                value = "" if parameter.is_meta else fingerprint(parameter)
                self._given[id(parameter)] = (parameter, value)

    def start(self, root: Root) -> None:
        """Note the model's own values, and go on with those that it has when it is sharded.

        Of what was given to be sharded and not changed since, ranks should all have the same values.
        """
        with self._casting.aside():
            self._start(root)

    def _start(self, root: Root) -> None:
        parameters = self._parameters_of(root)
        initial = fingerprints(parameters.items())
        given = {name: self._given.get(id(p), (p, ""))[1] for name, p in parameters.items()}
        own = {name: value for name, value in initial.items() if value == given[name]}
        self._note_start(root, own, initial, ties_of(parameters))
        whole = read_start(rank_folder(self._folder, 0), root.prefix).get("parameters", {})
        self._take_over(root, whole)
        own_start = read_start(rank_folder(self._folder, dist.get_rank()), root.prefix)
        if own_start and not root.prefix:
            _set_random_states(own_start["random"])
        world = dist.group.WORLD
        assert world is not None
        self._averaging.add(root.module, [world], ())  # what is in no call that shards

    def before_forward(self) -> None:
        """Note parameters, to see which the forward writes to."""
        if not self._before:
            with self._casting.aside():
                self._before = self._values()

    def before_backward(self) -> tuple[str, ...]:
        """Return what was written to, and make room for the backward's own gradients."""
        now = self._values() if self._before else {}
        written = tuple(
            name for name, value in now.items() if self._before.get(name, value) != value
        )
        self._before = {}
        self._averaging.before_backward()
        self._casting.before_backward()
        return written

    def after_backward(self) -> None:
        """Average gradients."""
        self._casting.after_backward()
        self._averaging.after_backward()

    def gradients(self, root: Root) -> Tensors:
        """Return gradients, zeros where there are none."""
        named = self._parameters_of(root)
        if dist.get_rank():
            return {}
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}

    def parameters(self, root: Root) -> Tensors:
        """Return parameters."""
        return {} if dist.get_rank() else dict(self._parameters_of(root))

    def after_step(self, step: int) -> None:
        """Go on with the sharded model's values."""
        whole = keyless("parameter", read_step(rank_folder(self._folder, 0), step))
        for root in self.models.roots:
            self._take_over(root, whole)

    def _take_over(self, root: Root, whole: Tensors) -> None:
        for name, parameter in self._parameters_of(root).items():
            value = whole.get(name)
            if value is not None and value.shape == parameter.shape:
                # `data`, since a graph that another loss is still to go back through may have the parameter.
                parameter.data.copy_(value)

    def _parameters_of(self, root: Root) -> dict[str, nn.Parameter]:
        return {
            root.name(name): parameter
            for name, parameter in root.module.named_parameters(remove_duplicate=False)
        }

    def _values(self) -> dict[str, str]:
        return {
            name: fingerprint(p)
            for root in self.models.roots
            for name, p in self._parameters_of(root).items()
        }


def _named(root: Root, tensors: Tensors) -> Tensors:
    return {root.name(name): tensor for name, tensor in tensors.items()}


def _random_states() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, as what a file without objects holds."""
    numpy: Any = np.random.get_state()
    kind, keys, *rest = numpy
    states = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states["accelerator"] = torch.get_device_module(accelerator).get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    if "accelerator" in states:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        torch.get_device_module(accelerator).set_rng_state(states["accelerator"])
