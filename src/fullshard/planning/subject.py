"""The model that is planned, in any of its forms, and its workloads: what a micro-batch of it computes and keeps.

    module              an `nn.Module`, with memory or on the meta device; a function that returns one
    a name              of `models.sizes.SIZES`: our own decoder
    a configuration     a `config.json` of Transformers, or its folder
    sizes               a `TransformerShape`, of which there is no module

A module is traced (`planning.traced`), sizes are counted (`planning.shapes`).
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.models.blueprints import read_model_config
from fullshard.models.configured import build_from_config
from fullshard.models.llama import Llama
from fullshard.models.sizes import SIZES
from fullshard.plan.amounts import nbytes
from fullshard.plan.layout import ParamSpec
from fullshard.plan.workload import Run, Stretch, Work, WorkKind, Workload
from fullshard.planning.recomputing import recompute
from fullshard.planning.setup import SetupError, TrainingSetup
from fullshard.planning.shapes import (
    EAGER,
    FUSED,
    MicroBatch,
    TransformerShape,
    kernels_of,
    shape_workload,
)
from fullshard.planning.traced import (
    BUILDING,
    Example,
    NeedsValuesError,
    TraceError,
    TraceOptions,
    Units,
    build_without_memory,
    default_units,
    explaining,
    modules_of,
    name_of,
    restored,
    token_example,
    trace_workload,
)
from fullshard.torch_private import pytree

Model = nn.Module | Callable[[], nn.Module] | str | Path | TransformerShape
Inputs = Callable[..., Any]


class Subject:
    """A model and its workloads, each of which is made once.

    model: see above. inputs: a function that returns what the model is called with: a tensor, a tuple of arguments,
        or a mapping of keywords. If it takes ``batch`` and ``seq``, it is given those. None gives numbers of tokens.
    units: see `trace_workload`; None takes the repeated layers. loss: of what the model returns; see `TraceOptions`.

    Raises SetupError for what is no model, and TraceError for a function that cannot make one.
    """

    def __init__(
        self,
        model: Model,
        *,
        inputs: Inputs | None = None,
        units: Units | None = None,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self._inputs, self._loss = inputs, loss
        self.units: Units | None = None
        if units is not None:
            self.units = [
                each if isinstance(each, str) or len(each) > 1 else each[0] for each in units
            ]
        self._workloads: dict[Any, Workload] = {}
        self.counts = "tokens"  # or samples
        self._build: Callable[[], nn.Module] | None = None
        self.shape = model if isinstance(model, TransformerShape) else None
        self._own_dtype: torch.dtype | None = None  # of a configuration that names one
        if inputs is not None:
            _check_call(inputs, _INPUTS_TAKE, **_taken(inputs, {"batch": 1, "seq": 1}))
        self.name, self._module = self._opened(model)

    def _opened(self, model: Model) -> tuple[str, nn.Module | None]:
        if isinstance(model, TransformerShape):
            if any(each is not None for each in (self._inputs, self.units, self._loss)):
                raise SetupError(
                    "a shape has no module: inputs, units and loss are of a model that is built."
                )
            return f"{model.num_layers} layers of {model.hidden}", None
        if isinstance(model, nn.Module):
            return type(model).__name__, model
        if isinstance(model, str) and model in SIZES:
            with torch.device("meta"):
                return model, Llama(SIZES[model])
        if isinstance(model, str | Path):
            if not Path(model).exists():
                raise SetupError(
                    f"{model}: is no size ({', '.join(SIZES)}), and there is no such file. Give a config.json or its "
                    "folder, a model, or a function that returns one."
                )
            fields = read_model_config(Path(model))
            dtype = getattr(torch, str(fields.get("dtype") or fields.get("torch_dtype")), None)
            self._own_dtype = dtype if isinstance(dtype, torch.dtype) else None
            return str(model), build_from_config(fields, seed=0)
        self._build, name = model, name_of(model)
        _check_call(model, "a function that returns a model is called without arguments")
        try:
            made = build_without_memory(model)
        except NeedsValuesError:
            if self._inputs is None:
                raise
            made = self._in_memory(model)  # as whoever gives inputs asks for
        if not isinstance(made, nn.Module):
            raise SetupError(f"{name} returned {type(made).__name__}, not a model (nn.Module).")
        return name, made

    def _in_memory(self, build: Callable[[], nn.Module]) -> nn.Module:
        with explaining(name_of(build), BUILDING):
            return build()

    @property
    def num_params(self) -> int:
        if self.shape is not None:
            return self.shape.num_params
        assert self._module is not None
        return sum(param.numel() for param in self._module.parameters())

    @property
    def takes_batch(self) -> bool:
        """Whether the micro-batch can be chosen, and is not that of the inputs."""
        return self._inputs is None or "batch" in _taken(self._inputs, {"batch": 1})

    # Workloads

    def workload(self, setup: TrainingSetup) -> Workload:
        """Return what a micro-batch computes and keeps. Raises as `trace_workload` does."""
        sizes = (setup.batch, setup.seq, setup.checkpointing, setup.precision)
        key = (*sizes, setup.stored, setup.is_compiled)
        found = self._workloads.get(key)
        if found is None:
            if self.shape is not None:
                found = self._counted(self.shape, setup)
            elif setup.is_compiled:
                found = _fused(self.workload(replace(setup, is_compiled=False)))
            else:
                found = self._traced(setup)
            found = self._workloads[key] = _stored(found, setup.stored or self._own_dtype)
        return found

    def with_memory(
        self, setup: TrainingSetup, most_nbytes: float = math.inf
    ) -> tuple[nn.Module, Example, TraceOptions]:
        """Return the model with parameters of any values, and what it is called with, to run passes of it.

        Raises SetupError for sizes alone, of which there is no module, and for a model that takes more than so many
        bytes; nothing is allocated then.
        """
        if self._module is None:
            raise SetupError("sizes have no kernels that could run: give the model itself.")
        generator = torch.Generator().manual_seed(0)

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_meta:
                return leaf
            made = torch.empty_like(leaf, device="cpu")
            return made.normal_(generator=generator) if leaf.is_floating_point() else made.zero_()

        model, workload = self._module, self.workload(setup)
        runs = [workload.stretches[e.stretch] for e in workload.events if isinstance(e, Run)]
        params = [spec for unit in workload.units for spec in unit.params]
        needed = sum(each.nbytes for each in model.parameters())
        needed += sum(
            p.numel * p.compute_dtype.itemsize for p in params if p.compute_dtype != p.dtype
        )
        needed += workload.held_nbytes + workload.input_nbytes + sum(s.saved_nbytes for s in runs)
        if needed > most_nbytes:
            raise SetupError(
                f"{self.name} runs whole here, and takes {nbytes(needed)} or more on each rank, of which {nbytes(most_nbytes)} "
                "are left. Take smaller --batch and --seq, fewer ranks, or a smaller model of the same layers."
            )
        if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
            model.to_empty(device="cpu")
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.detach().copy_(filled(tensor.detach().to("meta")) * 0.02)
        example = self._example(setup)
        args, kwargs = pytree.tree_map(filled, (example.args, dict(example.kwargs)))
        return model, Example(args, kwargs), TraceOptions(setup.precision, loss=self._loss)

    def _counted(self, shape: TransformerShape, setup: TrainingSetup) -> Workload:
        dtype = setup.precision.param_dtype or setup.stored or torch.float32
        if dtype.itemsize not in (2, 4):
            raise SetupError("a shape is planned as computed in 16 bits or in float32.")
        dtype = torch.bfloat16 if dtype.itemsize == 2 else torch.float32
        kernels = kernels_of(shape, is_compiled=setup.is_compiled, dtype=dtype)
        batch = MicroBatch(
            setup.batch, setup.seq, setup.checkpointing, kernels, compute_dtype=dtype
        )
        return shape_workload(shape, batch)

    def _traced(self, setup: TrainingSetup) -> Workload:
        example = self._example(setup)
        options = TraceOptions(setup.precision, loss=self._loss, attends_as_gpu=not setup.is_home)

        def traced(model: nn.Module, options: TraceOptions) -> Workload:
            with checkpointed(model, self.units, setup.checkpointing):
                return trace_workload(model, example, units=self.units, options=options)

        assert self._module is not None
        try:
            return traced(self._module, options)
        except NeedsValuesError:
            if self._inputs is None or any(each.is_meta for each in example.tensors):
                raise
        # With values: those of the inputs, and what the function gives the parameters.
        model = self._in_memory(self._build) if self._build is not None else self._module
        return traced(model, replace(options, has_values=True))

    def _example(self, setup: TrainingSetup) -> Example:
        if self._inputs is None:
            assert self._module is not None
            _check_positions(self._module, setup.seq)
            return token_example(self._module, batch=setup.batch, seq=setup.seq)
        known = {"batch": setup.batch, "seq": setup.seq}
        with explaining(name_of(self._inputs), ", given as the inputs, raised"):
            given = self._inputs(**_taken(self._inputs, known))
        if not self.takes_batch and setup.batch > 1:
            raise SetupError(
                f"batch is {setup.batch}, and the inputs have a size of their own. Let their function take batch."
            )
        if isinstance(given, Mapping):
            example = Example((), given)
        else:
            example = Example(given if isinstance(given, tuple) else (given,))
        if example.tensors and example.tensors[0].is_floating_point():
            self.counts = "samples"
        return example


def _check_positions(model: nn.Module, seq: int) -> None:
    """Raise SetupError for more tokens than a model of Transformers has learned positions, which shapes do not show."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int) or seq <= most:
        return
    find: Any = getattr(model, "get_input_embeddings", lambda: None)
    tokens = find()
    for path, module in model.named_modules():
        # Some have two more, for what is padded.
        is_table = isinstance(module, nn.Embedding) and module is not tokens
        if is_table and most <= module.num_embeddings <= most + 2:
            raise SetupError(
                f"seq is {seq}, and {path} has {most} positions: give {most} or less (--seq), or a configuration with more."
            )


_INPUTS_TAKE = "it is called with the keywords batch and seq, if it has parameters of these names"


def _taken(function: Callable[..., Any], known: Mapping[str, int]) -> dict[str, int]:
    """Return those of the keywords that a function has parameters for; none of one that does not tell."""
    try:
        takes = inspect.signature(function).parameters
    except (TypeError, ValueError):  # no function, or written in C
        return {}
    return {name: value for name, value in known.items() if name in takes}


def _check_call(function: Callable[..., Any], how: str, **given: int) -> None:
    """Raise SetupError for a function that cannot be called with these keywords alone. how: it is called, in words."""
    name = name_of(function)
    if not callable(function):
        raise SetupError(f"{name} is no function: {how}.")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(**given)
    except TypeError as error:
        raise SetupError(f"{name}{signature}: {error}; {how}.") from error


def _stored(workload: Workload, dtype: torch.dtype | None) -> Workload:
    """Return a workload with floating point parameters stored in a dtype; None changes nothing."""
    if dtype is None:
        return workload

    def one(spec: ParamSpec) -> ParamSpec:
        return replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec

    units = (unit._replace(params=tuple(map(one, unit.params))) for unit in workload.units)
    return replace(workload, units=tuple(units))


# What compiled layers move of what their operators move one by one: of the sizes that `planning.shapes` has of a
# usual layer, whose MLP is 3.5 times as wide and whose queries, keys and values are 1.5 times as wide.
_FUSED_SHARE = (
    2 * (FUSED.norm_moved + FUSED.residual_moved)
    + 1.5 * FUSED.rotary_moved
    + 3.5 * FUSED.gate_moved
) / (
    2 * (EAGER.norm_moved + EAGER.residual_moved)
    + 1.5 * EAGER.rotary_moved
    + 3.5 * EAGER.gate_moved
)


def _fused(workload: Workload) -> Workload:
    """Return a workload as a compiler runs it, as far as moving bytes goes. What is kept is not less."""

    def share(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(
            each._replace(nbytes=each.nbytes * _FUSED_SHARE)
            if each.kind is WorkKind.MEMORY
            else each
            for each in works
        )

    def one(stretch: Stretch) -> Stretch:
        kinds = ("forward", "backward", "recomputed")
        works: dict[str, Any] = {name: share(getattr(stretch, name)) for name in kinds}
        return replace(stretch, **works)

    return replace(workload, stretches=tuple(map(one, workload.stretches)))


@contextlib.contextmanager
def checkpointed(model: nn.Module, units: Units | None, how: str) -> Iterator[None]:
    """Let units but the root recompute their forward in backward, as a wrapper for activation checkpointing does.

    Models of Transformers make no cache of keys and values meanwhile, as their own checkpointing sees to: a layer that
    ran twice would add its own twice.
    """
    named = dict(model.named_modules())
    chosen = default_units(model) if units is None else modules_of(units)
    modules = [named[path] for path in chosen if path in named and path] if how != "none" else []
    if how != "none" and not modules:
        raise TraceError(
            f"checkpointing {how}: {type(model).__name__} has no units but the root, and recomputing all of it "
            "saves nothing. Name units."
        )
    configs = {id(each): each for m in model.modules() if (each := getattr(m, "config", None))}
    with restored(model), contextlib.ExitStack() as stack:
        for config in configs.values() if modules else ():
            if getattr(config, "use_cache", None) is True:
                stack.callback(setattr, config, "use_cache", True)
                config.use_cache = False
        recompute(modules, how)
        yield
