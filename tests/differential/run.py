"""What a program works with: one API, whatever shards the model, if anything does.

`Run` translates into `fully_shard`, `FullyShardedDataParallel` or nothing at all, hands out data
that differs by rank, and notes what the program shows.
"""

from __future__ import annotations

import contextlib
import fnmatch
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from tests.api import Api
from tests.differential.alone import Parts
from tests.differential.compare import Record
from tests.differential.program import FLAT, FSDP2, NONE, Program
from tests.harness import mesh_of

CPU = torch.device("cpu")


class Run:
    """One run of a program on one rank, or of one part of it in a single process.

    face, path: which API, and which implementation of it.
    part, num_parts: whose data this is. api: the names of the implementation.
    """

    def __init__(self, program: Program, face: str, path: str, part: int, parts: Parts | None):
        self.program = program
        self.face = face
        self.path = path
        self.part = part
        self.num_parts = program.parts
        self.record = Record()
        self.models: list[Any] = []
        self._parts = parts
        self._num_draws = 0
        # One process shards nothing, but may make the options that it does not use.
        self.api = Api("torch" if path == NONE else path)

    # What it runs on

    @property
    def is_alone(self) -> bool:
        """Whether nothing is sharded."""
        return self.path == NONE

    @property
    def is_ours(self) -> bool:
        return not self.is_alone and not self.api.is_torch

    @property
    def is_wrapped(self) -> bool:
        """Whether the model is a `FullyShardedDataParallel`."""
        return self.face != FSDP2 and not self.is_alone

    @property
    def is_fsdp2(self) -> bool:
        """Whether the model has the methods of `fully_shard`."""
        return self.face == FSDP2 and not self.is_alone

    def mesh(self, *shape: int) -> DeviceMesh | None:
        """Return the mesh of this shape, if there are ranks."""
        return None if self.is_alone else mesh_of(*shape)

    def lag(self, part: int, seconds: float = 0.05) -> None:
        """Let one rank come later to where this is called, to show what depends on when it comes."""
        if not self.is_alone and self.part == part:
            time.sleep(seconds)

    # Data

    def batch(self, *shape: int, same: bool = False) -> Tensor:
        """Draw normally distributed numbers: other ones each time, and on each rank."""
        return torch.randn(*shape, generator=self._generator(same))

    def ints(self, high: int, *shape: int, same: bool = False) -> Tensor:
        """Draw integers below a number: other ones each time, and on each rank."""
        return torch.randint(high, shape, generator=self._generator(same))

    def _generator(self, same: bool) -> torch.Generator:
        self._num_draws += 1
        return torch.Generator().manual_seed(1000 * self._num_draws + (999 if same else self.part))

    # Sharding

    def shard(
        self,
        model: nn.Module,
        *units: str,
        reshard: bool | int | None = None,
        mp: tuple[torch.dtype | None, torch.dtype | None] | None = None,
        mesh: tuple[int, ...] | None = None,
        root: bool = True,
        fsdp2: Mapping[str, Any] | None = None,
        fsdp1: Mapping[str, Any] | None = None,
    ) -> Any:
        """Shard a model, and before it the modules with these names (with wildcards).

        reshard: after forward. mp: parameters' and reductions' dtypes. mesh: its shape; two axes
        are (replicate, shard). root: whether the model is a unit as well. fsdp2, fsdp1: options of
        one face.
        """
        if not self.is_alone:
            make = self._fully_shard if self.face == FSDP2 else self._wrap
            options = fsdp2 if self.face == FSDP2 else fsdp1
            kwargs = self._options(reshard, mp, mesh) | dict(options or {})
            for name in _matching(model, units):
                module = model.get_submodule(name)
                sharded = make(module, **kwargs)
                _replace(model, module, sharded)
            if root:
                model = make(model, **kwargs)
        self.models.append(model)
        return model

    def _options(
        self,
        reshard: bool | int | None,
        mp: tuple[torch.dtype | None, torch.dtype | None] | None,
        mesh: tuple[int, ...] | None,
    ) -> dict[str, Any]:
        if self.face == FSDP2:
            options: dict[str, Any] = {}
            if reshard is not None:
                options["reshard_after_forward"] = reshard
            if mp is not None:
                options["mp_policy"] = self.api.MixedPrecisionPolicy(
                    param_dtype=mp[0], reduce_dtype=mp[1]
                )
        else:
            hybrid = mesh is not None and len(mesh) == 2
            name = {(True, False): "_HYBRID_SHARD_ZERO2", (False, False): "SHARD_GRAD_OP"}.get(
                (hybrid, reshard is not False), "HYBRID_SHARD" if hybrid else "FULL_SHARD"
            )
            if reshard is False:
                name = "_HYBRID_SHARD_ZERO2" if hybrid else "SHARD_GRAD_OP"
            options = {"sharding_strategy": self.api.ShardingStrategy[name]}
            if mp is not None:
                options["mixed_precision"] = self.api.MixedPrecision(
                    param_dtype=mp[0], reduce_dtype=mp[1]
                )
        if mesh is not None:
            options["mesh" if self.face == FSDP2 else "device_mesh"] = mesh_of(*mesh)
        return options

    def _fully_shard(self, module: nn.Module, **options: Any) -> nn.Module:
        return self.api.fully_shard(module, **options)

    def _wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's class is deprecated, and says so each time
            return self.api.FullyShardedDataParallel(
                module,
                **{"device_id": CPU, "use_orig_params": self.face != FLAT, **options},
            )

    def tell(self, module: Any, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of `FSDPModule`, where there is one."""
        if self.is_fsdp2:
            getattr(module, method)(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Keep gradients unreduced meanwhile."""
        if self.is_wrapped:
            with model.no_sync():
                yield
            return
        self.tell(model, "set_requires_gradient_sync", False)
        try:
            yield
        finally:
            self.tell(model, "set_requires_gradient_sync", True)

    @contextlib.contextmanager
    def whole(self, model: Any, **options: Any) -> Iterator[None]:
        """Show the wrapper's parameters whole meanwhile."""
        if not self.is_wrapped:
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with self.api.FullyShardedDataParallel.summon_full_params(model, **options):
                yield

    # Training

    def train(
        self,
        model: Any,
        compute_loss: Callable[[Any], Tensor],
        *,
        steps: int = 2,
        optimizer: Optimizer | None = None,
        clip: float | None = None,
    ) -> None:
        """Take steps of SGD; show losses and gradients."""
        optimizer = optimizer or SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            loss = compute_loss(model)
            self.see("loss", loss)
            loss.backward()
            self.step(optimizer, clip=clip)

    def step(
        self, *optimizers: Optimizer, clip: float | None = None, set_to_none: bool = True
    ) -> None:
        """Show the gradients of all models (and their norm if they are clipped), then step."""
        self.see_gradients()
        if clip is not None:
            for model in self.models:
                self.see("norm", self.clip(model, clip))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def clip(self, model: Any, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as the face's users do, and return the norm before."""
        self.reduce()
        if self.is_wrapped:
            return model.clip_grad_norm_(max_norm, norm_type)
        clip = nn.utils.clip_grad_norm_
        if self.is_ours:
            clip = self.api.clip_grad_norm_
        norm = clip(model.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def reduce(self) -> None:
        """Average gradients over the parts in a single process; elsewhere backward has done so."""
        if self._parts is not None:
            for model in self.models:
                for parameter in model.parameters():
                    self.average(parameter)

    def average(self, parameter: nn.Parameter) -> None:
        """Average one gradient over the parts in a single process. No part has one: none stays."""
        if self._parts is None:
            return
        terms = self._parts.exchange(
            self.part, None if parameter.grad is None else parameter.grad.clone()
        )
        known = [term for term in terms if term is not None]
        if known:
            parameter.grad = sum(known[1:], known[0]) / len(terms)

    def all_reduce(self, value: Tensor) -> Tensor:
        """Add up a value over the ranks, as programs do with counts of tokens."""
        if self._parts is not None:
            return sum(self._parts.exchange(self.part, value.detach().clone()))  # type: ignore[return-value]
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / (dist.get_world_size() // self.num_parts)

    # What is shown

    def see(self, name: str, value: Any) -> None:
        """Show a value: a tensor, named tensors, a number or text."""
        if isinstance(value, Tensor):
            value = _plain(value)
        elif isinstance(value, Mapping):
            value = {key: v if v is None else _plain(v) for key, v in value.items()}
        self.record.seen.append((name, value))

    def see_gradients(self, model: Any = None) -> None:
        """Show every whole gradient there is. Flat parameters do not say whose their parts are."""
        self.reduce()
        for each in self.models if model is None else [model]:
            if self.face == FLAT:
                continue
            with self.whole(each, with_grads=True, writeback=False):
                self.see(
                    "gradients",
                    dict(
                        sorted(
                            (clean(name), p.grad)
                            for name, p in each.named_parameters()
                            if p.requires_grad
                        )
                    ),
                )

    def see_state(self, model: Any) -> None:
        """Show a full state dict."""
        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("ignore")
            if self.is_wrapped:
                kind = self.api.StateDictType.FULL_STATE_DICT
                wrapper = self.api.FullyShardedDataParallel
                stack.enter_context(wrapper.state_dict_type(model, kind))
            self.see("state", dict(model.state_dict()))

    def attempt(self, action: Callable[[], Any]) -> Exception | None:
        """Do what may fail; show which exceptions of Python's it was, and return it.

        It agrees with another error that is caught by all that catches the other one.
        """
        try:
            action()
        except Exception as error:
            kinds = {k.__name__ for k in type(error).__mro__ if k.__module__ == "builtins"}
            self.see("error", frozenset(kinds - {"object"}))
            return error
        self.see("error", "none")
        return None


def _plain(tensor: Tensor) -> Tensor:
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone()


def clean(name: str) -> str:
    """Take off what wrapping adds to a name."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def _matching(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """List the names of modules that match a pattern, inner ones first."""
    names = [name for name, _ in model.named_modules() if name]
    found = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    # "*" does not cross a dot.
    found = [n for n in found if any(n.count(".") == p.count(".") for p in patterns)]
    missing = [p for p in patterns if not fnmatch.filter(names, p)]
    assert not missing, f"no module is called {missing}"
    return sorted(found, key=lambda name: -name.count("."))


def _replace(model: nn.Module, module: nn.Module, by: nn.Module) -> None:
    """Put one module in the place of another, everywhere in the model."""
    if module is by:
        return
    for parent in list(model.modules()):
        if parent is by:
            continue
        for name, child in list(parent._modules.items()):
            if child is module:
                parent._modules[name] = by


def perform(program: Program, face: str, path: str, rank: int) -> list[Record]:
    """Run a program on this rank; in a single process all its parts. Return their records."""
    if path == NONE:
        parts = Parts(program.parts)
        return parts.run(lambda part: _perform(Run(program, face, path, part, parts)))
    part = rank // (program.ranks // program.parts)
    return [_perform(Run(program, face, path, part, None))]


def _perform(run: Run) -> Record:
    torch.manual_seed(0)
    run.program.body(run)
    for model in run.models:
        run.see_state(model)
    return run.record
