"""The sides of a verification: what each does at the moments that are recorded.

sharded        shards as the script or the user's function says
one process    computes each rank's part in turn with the whole model, in no rank at all
whole          the ranks of a script again, with whole models whose gradients are averaged after each backward

Of a script, sharded runs first, and leaves for the other what every model began with: whole values, random states.
Whole begins with these, so that values which are drawn after sharding, or differ from rank to rank, make no
difference; that they do is a fact of its own. After each step it takes over the sharded side's parameters as well, once
its own are recorded. So each step is compared by itself: rounding that an adaptive optimizer makes large does not add up.
"""

import contextlib
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FSDPModule
from fullshard.compare.values import path_of
from fullshard.errors import StateError
from fullshard.tools.verify.averaging import Averaging
from fullshard.tools.verify.casting import Casting
from fullshard.tools.verify.models import Models, Root, replaced
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.record import (
    Diary,
    Unit,
    alone_folder,
    keyed,
    keyless,
    rank_folder,
    read_start,
    read_step,
    whole_folder,
)
from fullshard.tools.verify.values import fingerprint, fingerprints, seed_all
from fullshard.tools.verify.whole import standing_in

Tensors = dict[str, torch.Tensor]


class Side:
    """What all do alike; by itself, it records nothing of values.

    rank: whose part is computed. parts: the ranks whose parts this process computes in each step.
    """

    label = ""
    folder_of = staticmethod(rank_folder)

    def __init__(self, options: VerifyOptions, folder: Path, rank: int) -> None:
        self.options, self.rank = options, rank
        self.diary = Diary(self.folder_of(folder, rank))
        self.models = Models()
        self.optimizers: set[torch.optim.Optimizer] = set()  # that have taken a step
        self._first_state = 0  # what torch's generator was seeded with before the script
        self._folder = folder  # of the records of all ranks on both sides

    @property
    def parts(self) -> Sequence[int]:
        return (self.rank,)

    def names(self) -> contextlib.AbstractContextManager[None]:
        """Let the script find what this side has in the place of sharding, inside a block."""
        raise NotImplementedError

    def sharded(self, model: nn.Module, shard: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return a model that is no script's as this side computes with it. Collective."""
        return model

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

    def buffers(self, root: Root) -> Tensors:
        """Return buffers by key, as they are before the optimizer's step."""
        return keyed(f"buffer/{self.rank}", _named_buffers(root))

    def begin_part(self, rank: int) -> None:
        """See that the part of a rank begins, of `parts`."""

    def after_step(self, step: int) -> None:
        """See that a step is recorded."""

    def wait(self) -> None:
        """Wait until all ranks of this side are here."""
        dist.barrier()

    def seed(self) -> None:
        """Seed all ranks alike: so they build the same model, unless the script sees to it that they do not."""
        seed_all(self.options.seed)
        self._first_state = torch.initial_seed()

    def _note_start(
        self,
        root: Root,
        initial: dict[str, str],
        ties: Sequence[tuple[str, ...]],
        units: Sequence[Unit] = (),
        own: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        run = self.diary.run
        is_seeded = torch.initial_seed() != self._first_state
        # What ranks of a script draw from now on, data say, is their own.
        if self.options.script and not is_seeded and not root.prefix:
            seed_all(self.options.seed, self.rank)
        self.diary.note(
            own={**run.own, **own},
            initial={**run.initial, **initial},
            buffers={**run.buffers, **fingerprints(_named_buffers(root).items())},
            ties=(*run.ties, *ties),
            units=(*run.units, *units),
            seeds=run.seeds or (bool(self.options.script) and is_seeded),
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

    def sharded(self, model: nn.Module, shard: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return shard(model)

    def start(self, root: Root) -> None:
        """Gather the values that the model begins with, and leave them with the random states."""
        whole = _named(root, whole_parameters(root.module))
        self._note_start(root, fingerprints(whole.items()), ties_of(whole), units_of(root))
        if self.options.script:
            states = _random_states()
            self.diary.write_start(root.prefix, {"parameters": whole, "random": states})

    def gradients(self, root: Root) -> Tensors:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        others = [parameter for group in groups for parameter in group["params"]]
        return _named(root, whole_gradients(root.module, others=others))

    def parameters(self, root: Root) -> Tensors:
        return _named(root, whole_parameters(root.module))


class Unsharded(Side):
    """Has whole models, and sees which parameters a forward writes to."""

    _before: Mapping[str, str] = types.MappingProxyType({})

    def before_forward(self) -> None:
        """Note parameters, to see which the forward writes to."""
        if not self._before:
            self._before = self._values()

    def before_backward(self) -> tuple[str, ...]:
        before, self._before = self._before, {}
        now = self._values() if before else {}
        return tuple(name for name, value in now.items() if before.get(name, value) != value)

    def gradients(self, root: Root) -> Tensors:
        if 0 not in self.parts:
            return {}
        named = parameters_of(root).items()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}

    def parameters(self, root: Root) -> Tensors:
        return dict(parameters_of(root)) if 0 in self.parts else {}

    def _values(self) -> dict[str, str]:
        return {
            name: fingerprint(parameter)
            for root in self.models.roots
            for name, parameter in parameters_of(root).items()
        }


class OneProcess(Unsharded):
    """The whole model on the whole batch, as the sum of what data-parallel ranks would do.

    Gradients of all ranks' parts add up. Buffers are each rank's own in data-parallel training, so each part has its
    own here.
    """

    label = "one process"

    @staticmethod
    def folder_of(folder: Path, rank: int) -> Path:  # noqa: ARG004
        return alone_folder(folder)

    @property
    def parts(self) -> Sequence[int]:
        return range(self.options.ranks)

    def start(self, root: Root) -> None:
        """Note first values, which every part begins with."""
        parameters = parameters_of(root)
        self._note_start(root, fingerprints(parameters.items()), ties_of(parameters))
        self._buffers = dict.fromkeys(self.parts, _copied(root))

    @torch.no_grad()
    def begin_part(self, rank: int) -> None:
        """Set buffers to the rank's own. One that the forward has made or replaced has to be of that shape."""
        self.rank = rank
        for name, buffer in _named_buffers(self.models.roots[0]).items():
            value = self._buffers[rank].get(name)
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value)

    def after_backward(self) -> None:
        self._buffers[self.rank] = _copied(self.models.roots[0])

    def buffers(self, root: Root) -> Tensors:
        return {
            key: buffer
            for rank, named in self._buffers.items()
            for key, buffer in keyed(f"buffer/{rank}", named).items()
        }

    def wait(self) -> None:
        """Wait for nobody."""


class Whole(Unsharded):
    """Shards nothing: ranks have whole models, whose gradients are averaged after each backward."""

    label = "whole"

    folder_of = staticmethod(whole_folder)

    def __init__(self, options: VerifyOptions, folder: Path, rank: int) -> None:
        super().__init__(options, folder, rank)
        self._averaging = Averaging(options.divide_factor)
        self._casting = Casting()
        self._given: dict[int, tuple[nn.Parameter, str]] = {}

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
        parameters = parameters_of(root)
        initial = fingerprints(parameters.items())
        given = {name: self._given.get(id(p), (p, ""))[1] for name, p in parameters.items()}
        own = {name: value for name, value in initial.items() if value == given[name]}
        self._note_start(root, initial, ties_of(parameters), own=own)
        whole = read_start(rank_folder(self._folder, 0), root.prefix).get("parameters", {})
        self._take_over(root, whole)
        own_start = read_start(rank_folder(self._folder, self.rank), root.prefix)
        if own_start and not root.prefix:
            _set_random_states(own_start["random"])
        world = dist.group.WORLD
        assert world is not None
        self._averaging.add(root.module, [world], ())  # what is in no call that shards

    def before_backward(self) -> tuple[str, ...]:
        """Return what was written to, and make room for the backward's own gradients."""
        written = super().before_backward()
        self._averaging.before_backward()
        self._casting.before_backward()
        return written

    def after_backward(self) -> None:
        self._casting.after_backward()
        self._averaging.after_backward()

    def after_step(self, step: int) -> None:
        """Go on with the sharded model's values."""
        whole = keyless("parameter", read_step(rank_folder(self._folder, 0), step))
        for root in self.models.roots:
            self._take_over(root, whole)

    def _take_over(self, root: Root, whole: Tensors) -> None:
        for name, parameter in parameters_of(root).items():
            value = whole.get(name)
            if value is not None and value.shape == parameter.shape:
                # `data`, since a graph that another loss is still to go back through may have the parameter.
                parameter.data.copy_(value)

    def _values(self) -> dict[str, str]:
        with self._casting.aside():
            return super()._values()


def side_of(options: VerifyOptions, folder: Path, rank: int, *, is_whole: bool) -> Side:
    """Return a rank's side, or the one that it is compared with, and make its folder."""
    kind = Sharded if not is_whole else Whole if options.script else OneProcess
    return kind(options, folder, rank)


def parameters_of(root: Root) -> dict[str, nn.Parameter]:
    """Return a model's parameters by every name that they have."""
    named = root.module.named_parameters(remove_duplicate=False)
    return {root.name(name): parameter for name, parameter in named}


def whole_parameters(model: nn.Module) -> Tensors:
    """Return whole parameters by name; on rank 0 alone. Collective."""
    buffers = {path_of(name) for name, _ in model.named_buffers()}
    state = fullshard.iter_full_state(model, to_rank=0, offload=True)
    return {name: tensor for name, tensor in state if name not in buffers}


@torch.no_grad()
def whole_gradients(model: nn.Module, others: Iterable[nn.Parameter] = ()) -> Tensors:
    """Return whole gradients by name; on rank 0 alone. Collective.

    others: sharded parameters that an optimizer has, while the model shows their unsharded forms.

    Parameters take the values of their gradients, are gathered, and get their own back, bit by bit. So
    gradients of every API and layout are gathered in one way, which does not depend on what is verified.
    Rejected: what the optimizer's step has changed, over its learning rate: most of its digits are lost.
    """
    for module in model.modules():
        if isinstance(
            module, FSDPModule
        ):  # one of several models may wait, whole, for its backward
            module.reshard()
    parameters = list(dict.fromkeys((*model.parameters(), *others)))
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        grad = parameter.grad
        if (
            grad is None or grad.shape != parameter.shape
        ):  # in `no_sync`: whole, and not reduced yet
            parameter.zero_()
        else:
            parameter.copy_(grad)
    gradients = whole_parameters(model)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    return gradients


def ties_of(tensors: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Return which names share a value."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(tied) for tied in names.values() if len(tied) > 1)


def units_of(root: Root) -> list[Unit]:
    """Return the units of a model; none if nothing is sharded."""
    try:
        units = fullshard.describe(root.module).units
    except StateError:
        return []
    return [
        Unit(
            root.name(unit.name),
            tuple(map(root.name, (*unit.direct, *unit.packed, *unit.flat, *unit.extended))),
            unit.divide_factor,
        )
        for unit in units
    ]


def _named_buffers(root: Root) -> Tensors:
    return {root.name(name): buffer for name, buffer in root.module.named_buffers()}


def _copied(root: Root) -> Tensors:
    return {name: buffer.detach().clone() for name, buffer in _named_buffers(root).items()}


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
