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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import FSDPModule
from fullshard.compare.surroundings import random_states, set_random_states
from fullshard.compare.values import path_of
from fullshard.errors import StateError
from fullshard.tools.verify import record
from fullshard.tools.verify.averaging import Averaging
from fullshard.tools.verify.casting import Casting
from fullshard.tools.verify.models import Models, Root, replaced
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.values import fingerprint, fingerprints, seed_all
from fullshard.tools.verify.whole import standing_in

Tensors = dict[str, torch.Tensor]


class Side:
    """A whole model, and what all sides do alike.

    rank: whose part is computed. parts: the ranks whose parts this process computes in each step.
    folder: of the records of all ranks on both sides. own_folder: of this process's.
    """

    label = ""
    gradient_kinds: Sequence[str] = ("gradient", "final-gradient")
    # Recording breaks graphs apart, which takes minutes and shows nothing of sharding.
    is_compiled = False

    def __init__(self, options: VerifyOptions, rank: int, folder: Path, own_folder: Path) -> None:
        self.options, self.rank, self._folder = options, rank, folder
        self.diary = record.Diary(own_folder)
        self.models = Models()
        self.optimizers: set[torch.optim.Optimizer] = set()  # that have taken a step
        self._first_state = 0  # what torch's generator was seeded with before the script
        self._before: Mapping[str, str] = {}  # of parameters, before a forward

    @property
    def parts(self) -> Sequence[int]:
        return (self.rank,)

    def install(self) -> None:
        """Have what is imported from torch.distributed.fsdp be fullshard's."""
        fullshard.set_default_comm(self.options.comm)
        fullshard.install()

    def names(self) -> contextlib.AbstractContextManager[None]:
        """Let the script find what this side has in the place of sharding, inside a block."""
        return contextlib.nullcontext()

    def sharded(self, model: nn.Module, shard: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return a model that is no script's as this side computes with it. Collective."""
        return model

    def start(self, root: Root) -> None:
        """See a model for the first time, before its first forward. Collective."""
        self._note_start(root, root.parameters())

    def before_forward(self) -> None:
        """See that a forward begins which a backward may follow."""
        if not self._before:
            self._before = self._values()

    def before_backward(self) -> tuple[str, ...]:
        """Return the parameters that forwards have written to, as far as this side can know."""
        before, self._before = self._before, {}
        now = self._values() if before else {}
        return tuple(name for name, value in now.items() if before.get(name, value) != value)

    def after_backward(self) -> None:
        """See that gradients are there. Collective."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """See that an optimizer is about to step."""
        self.optimizers.add(optimizer)

    def gradients(self, root: Root) -> Tensors:
        """Return whole gradients by name; on rank 0 alone. Collective."""
        if 0 not in self.parts:
            return {}
        named = root.parameters().items()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}

    def parameters(self, root: Root) -> Tensors:
        """Return whole parameters by name; on rank 0 alone. Collective."""
        return dict(root.parameters()) if 0 in self.parts else {}

    def buffers(self, root: Root) -> Tensors:
        """Return buffers by key, as they are before the optimizer's step."""
        return record.keyed(f"buffer/{self.rank}", root.buffers())

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

    def _values(self) -> dict[str, str]:
        named = (each for root in self.models.roots for each in root.parameters().items())
        return fingerprints(named)

    def _note_start(self, root: Root, parameters: Mapping[str, torch.Tensor]) -> None:
        """Note what a model begins with. parameters: whole, by all of their names; none but on rank 0."""
        run = self.diary.run
        run.initial |= fingerprints(parameters.items())
        run.buffers |= fingerprints(root.buffers().items())
        run.ties += ties_of(parameters)
        if self.options.script:
            is_seeded = torch.initial_seed() != self._first_state
            run.seeds |= is_seeded
            # What ranks of a script draw from now on, data say, is their own.
            if not is_seeded and not root.prefix:
                seed_all(self.options.seed, self.rank)


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
                    self.models.noted.append(each)
                return function(module, *args, **kwargs)

            return shard

        functions = (fullshard.fully_shard, fullshard.replicate)
        wrapper: Any = fullshard.FullyShardedDataParallel
        make = wrapper.__init__

        def note_and_make(instance: Any, *args: Any, **kwargs: Any) -> None:
            make(instance, *args, **kwargs)
            self.models.noted.append(instance)

        with (
            replaced({function: noting(function) for function in functions}),
            mock.patch.object(wrapper, "__init__", functools.wraps(make)(note_and_make)),
        ):
            yield

    def sharded(self, model: nn.Module, shard: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return shard(model)

    def start(self, root: Root) -> None:
        """Gather the values that the model begins with, and leave them with the random states."""
        whole = whole_parameters(root)
        self._note_start(root, whole)
        self.diary.run.units += units_of(root)
        if self.options.script:
            states = random_states()
            # A file without objects has no arrays.
            kind, keys, *rest = states["numpy"]
            states["numpy"] = (kind, torch.from_numpy(keys), *rest)
            start = {"parameters": whole, "random": states}
            self.diary.write_tensors(f"{root.prefix}start", start)

    def gradients(self, root: Root) -> Tensors:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        others = [parameter for group in groups for parameter in group["params"]]
        return whole_gradients(root, others=others)

    def parameters(self, root: Root) -> Tensors:
        return whole_parameters(root)

    def _values(self) -> dict[str, str]:
        return {}  # a forward has gathered copies


class OneProcess(Side):
    """The whole model on the whole batch, as the sum of what data-parallel ranks would do.

    Gradients of all ranks' parts add up. Buffers are each rank's own in data-parallel training, so each part has its
    own here.
    """

    label = "one process"

    @property
    def parts(self) -> Sequence[int]:
        return range(self.options.ranks)

    def start(self, root: Root) -> None:
        """Note first values, which every part begins with."""
        super().start(root)
        self._buffers = dict.fromkeys(self.parts, _copied(root))

    @torch.no_grad()
    def begin_part(self, rank: int) -> None:
        """Set buffers to the rank's own. One that the forward has made or replaced has to be of that shape."""
        self.rank = rank
        for name, buffer in self.models.roots[0].buffers().items():
            value = self._buffers[rank].get(name)
            if value is not None and value.shape == buffer.shape:
                buffer.copy_(value)

    def after_backward(self) -> None:
        self._buffers[self.rank] = _copied(self.models.roots[0])

    def buffers(self, root: Root) -> Tensors:
        return {
            f"buffer/{rank}/{name}": buffer
            for rank, named in self._buffers.items()
            for name, buffer in named.items()
        }

    def wait(self) -> None:
        """Wait for nobody."""


class Whole(Side):
    """Shards nothing: ranks have whole models, whose gradients are averaged after each backward."""

    label = "whole"

    def __init__(self, options: VerifyOptions, rank: int, folder: Path, own_folder: Path) -> None:
        super().__init__(options, rank, folder, own_folder)
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
        self.models.noted.append(module)
        for parameter in module.parameters():
            if id(parameter) not in self._given:
                value = "" if parameter.is_meta else fingerprint(parameter)
                self._given[id(parameter)] = (parameter, value)

    def start(self, root: Root) -> None:
        """Note the model's own values, and go on with those that it has when it is sharded.

        Of what was given to be sharded and not changed since, ranks should all have the same values.
        """
        with self._casting.aside():
            parameters = root.parameters()
            self._note_start(root, parameters)
            run = self.diary.run
            for name, parameter in parameters.items():
                value = run.initial[name]
                if self._given.get(id(parameter), (parameter, ""))[1] == value:
                    run.own[name] = value
            start = f"{root.prefix}start"
            whole = record.read_tensors(record.rank_folder(self._folder, 0), start)
            self._take_over(root, whole.get("parameters", {}))
            own = record.read_tensors(record.rank_folder(self._folder, self.rank), start)
            if own and not root.prefix:
                set_random_states(own["random"])
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
        tensors = record.read_tensors(record.rank_folder(self._folder, 0), f"step-{step}")
        whole = {key.removeprefix("parameter/"): each for key, each in tensors.items()}
        for root in self.models.roots:
            self._take_over(root, whole)

    def _take_over(self, root: Root, whole: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in root.parameters().items():
            value = whole.get(name)
            if value is not None and value.shape == parameter.shape:
                # `data`, since a graph that another loss is still to go back through may have the parameter.
                parameter.data.copy_(value)

    def _values(self) -> dict[str, str]:
        with self._casting.aside():
            return super()._values()


def side_of(options: VerifyOptions, folder: Path, rank: int, *, is_whole: bool) -> Side:
    """Return a rank's side, or the one that it is compared with, and make its folder."""
    if not is_whole:
        return Sharded(options, rank, folder, record.rank_folder(folder, rank))
    if options.script:
        return Whole(options, rank, folder, record.whole_folder(folder, rank))
    return OneProcess(options, rank, folder, record.alone_folder(folder))


def whole_parameters(root: Root) -> Tensors:
    """Return whole parameters by name; on rank 0 alone. Collective."""
    buffers = {path_of(name) for name, _ in root.module.named_buffers()}
    state = fullshard.iter_full_state(root.module, to_rank=0, offload=True)
    return {root.name(name): tensor for name, tensor in state if name not in buffers}


@torch.no_grad()
def whole_gradients(
    root: Root,
    others: Iterable[nn.Parameter] = (),
    gather: Callable[[Root], Tensors] = whole_parameters,
) -> Tensors:
    """Return whole gradients by name; on rank 0 alone. Collective.

    others: sharded parameters that an optimizer has, while the model shows their unsharded forms.

    Parameters take the values of their gradients, are gathered, and get their own back, bit by bit. So
    gradients of every API and layout are gathered in one way, which does not depend on what is verified.
    Rejected: what the optimizer's step has changed, over its learning rate: most of its digits are lost.
    """
    for module in root.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # one of several models may wait, whole, for its backward
    parameters = list(dict.fromkeys((*root.module.parameters(), *others)))
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        grad = parameter.grad  # in `no_sync` whole, and not reduced yet
        if grad is None or grad.shape != parameter.shape:
            parameter.zero_()
        else:
            parameter.copy_(grad)
    gradients = gather(root)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    return gradients


def ties_of(tensors: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Return which names share a value."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [tuple(tied) for tied in names.values() if len(tied) > 1]


def units_of(root: Root) -> list[record.Unit]:
    """Return the units of a model; none if nothing is sharded."""
    try:
        units = fullshard.describe(root.module).units
    except StateError:
        return []
    return [
        record.Unit(
            root.name(unit.name),
            tuple(map(root.name, (*unit.direct, *unit.packed, *unit.flat, *unit.extended))),
            unit.divide_factor,
        )
        for unit in units
    ]


def _copied(root: Root) -> Tensors:
    return {name: buffer.detach().clone() for name, buffer in root.buffers().items()}
