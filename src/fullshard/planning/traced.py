"""Make a workload of a model: one forward and one backward of its own code, without memory.

    with torch.device("meta"):
        model = Llama(SIZES["8b"])
    workload = trace_workload(model, token_example(model, batch=1, seq=4096))

Tensors are fake ones: they have shapes and dtypes, and no values. `planning.recorder` sees the operators that run on
them. Units compute in the dtypes of mixed precision, as in a step of the engine. Of a row of equal units, each of which
is given what the one before returned, two are traced, and the others are like the second.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard.errors import FullshardError
from fullshard.models.configured import sharding_units
from fullshard.plan.layout import ParamSpec
from fullshard.plan.units import clean_name, contains, first_names, lowest_common_unit
from fullshard.plan.workload import Enter, Event, Leave, Run, Workload, WorkloadUnit
from fullshard.planning.attention import AttentionOfGpu
from fullshard.planning.kernels import tensors_of
from fullshard.planning.recorder import Recorder, Span
from fullshard.planning.repeats import Repeated, Repeats
from fullshard.policies import MixedPrecisionPolicy
from fullshard.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    forward_unimplemented,
    pytree,
    run_backward,
)

ModelT = TypeVar("ModelT", bound=nn.Module)
# Paths of modules; several of one unit, as ``fully_shard([a, b])`` makes it.
Units = Sequence[str | Sequence[str]]


class TraceError(FullshardError, ValueError):
    """A model of which no workload can be made: built, run on this input, or run without values."""


class NeedsValuesError(TraceError):
    """A model that reads values of its tensors, of which a trace has none."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A micro-batch: what the model is called with. Of tensors only shapes and dtypes matter."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_of((self.args, dict(self.kwargs)))

    @property
    def num_tokens(self) -> int:
        """Elements of the first tensor if these are numbers of tokens, else its samples."""
        first = self.tensors[0]
        return first.numel() if not first.is_floating_point() else len(first)


def token_example(model: nn.Module, *, batch: int, seq: int) -> Example:
    """Return a micro-batch of a language model: numbers of tokens (batch, seq).

    Models that keep keys and values for generation, as those of Transformers do, are told not to.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value < 1:
            raise TraceError(f"{name}={value}: expected 1 or more.")
    keeps = "use_cache" in inspect.signature(model.forward).parameters
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    return Example((tokens,), {"use_cache": False} if keeps else {})


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """How a model is run for its workload.

    precision: of all units, as `fully_shard` takes it.
    loss: makes a scalar of what the model returns. None takes its ``.loss``, else the cross entropy of its logits
        if it was given tokens, else the mean of all that is floating point.
    has_values: run on the values that model and example have, on the CPU. For models whose way depends on values.
    attends_as_gpu: without values, let scaled_dot_product_attention choose among the kernels of a GPU, which take
        dropout and heads of other sizes, where the CPU's write all scores.
    reuses_equal: trace two of a row of equal units. False traces all.
    """

    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    loss: Callable[[Any], Tensor] | None = None
    has_values: bool = False
    attends_as_gpu: bool = False
    reuses_equal: bool = True


def trace_workload(
    model: nn.Module,
    example: Example,
    *,
    units: Units | None = None,
    options: TraceOptions = TraceOptions(),
) -> Workload:
    """Run a forward and a backward on fake tensors, and return what they compute and keep.

    model: on any device, meta included, not sharded yet. It is left as it was. Nothing of its size is allocated,
        and a model of 80 layers takes a second or two.
    units: paths of the modules that `fully_shard` is called with: of one, or of several together; the root is always
        one. None takes the repeated layers.

    Peaks are of tensors: memory that an operator takes for itself is not seen. Raises TraceError, with the path of
    the module, for a model that cannot be run like this.
    """
    run = record_pass(Recorder(), model, example, units=units, options=options)
    if run.repeats.num_skipped and (run.repeats.calls_again or not run.is_balanced):
        # If not balanced, something outside keeps what units return, which those that are left out have not made.
        options = dataclasses.replace(options, reuses_equal=False)
        run = record_pass(Recorder(), model, example, units=units, options=options)
    return run.workload(example)


def record_pass(
    recorder: Recorder,
    model: nn.Module,
    example: Example,
    *,
    units: Units | None,
    options: TraceOptions,
) -> "_Run":
    """Run a forward and a backward, as `trace_workload` does, that a recorder sees."""
    if not example.tensors:
        raise TraceError(
            "The model's inputs have no tensors. Let them have some (inputs=; --example-input MODULE:FUNCTION), such as "
            "torch.zeros(batch, seq, dtype=torch.int64)."
        )
    run = _Run(model, _units_of(model, units), options, recorder)
    with restored(model), contextlib.ExitStack() as stack:
        if not options.has_values:
            stack.enter_context(_without_values(example))
            if options.attends_as_gpu:
                stack.enter_context(AttentionOfGpu())
        run.replace_tensors()
        run.wrap_units()
        args, kwargs = run.take(example)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        helps = "Give inputs as the model takes them (inputs=; --example-input MODULE:FUNCTION)."
        failed = " cannot be run on this example:"
        with recorder, explaining(type(model).__name__, failed, helps, model=model):
            run.forward_and_backward(args, kwargs, example)
    return run


def build_without_memory(build: Callable[[], ModelT]) -> ModelT:
    """Return the model that a function builds, on the meta device.

    Raises NeedsValuesError for a model that reads values, and TraceError for one that cannot be built; both with the
    classes of the modules that were being built.
    """
    helps = "It is built on the meta device, so it may neither read its tensors nor load weights; or give a built model."
    with explaining(name_of(build), BUILDING, helps), torch.device("meta"):
        return build()


BUILDING = ", which builds the model, raised"


def default_units(model: nn.Module) -> list[str]:
    """Return the paths of the modules that make good units: the repeated layers.

    Those of all lists, as `fullshard train` shards them. If these have less than half of what is repeated, the
    outermost modules of one kind that hold as much. A kind is a class of the program's own; or one of torch's in
    an `nn.Sequential` or a list, with the classes inside it.
    """
    listed = {id(module) for module in sharding_units(model) if _has_forward(module)}
    layers = [path for path, module in model.named_modules() if id(module) in listed]
    groups = _repeated(model)
    half = max((_numel(model, paths) for paths in groups), default=0) / 2
    if layers and _numel(model, layers) >= half:
        return layers
    large = [paths for paths in groups if _numel(model, paths) >= half > 0]
    if not large:
        return layers
    # The outermost first. By the deepest of each: the first layers of a net may be of a kind that is in its blocks.
    large.sort(key=lambda paths: (max(path.count(".") for path in paths), -_numel(model, paths)))
    outer, *inner = large
    if len(outer) >= _FEW:
        return outer
    # Two towers or stages are too few units, if they have many layers.
    return next((paths for paths in inner if len(paths) >= _FEW * len(outer)), outer)


_FEW = 4


def _repeated(model: nn.Module) -> list[list[str]]:
    """Return the paths of modules of the same kind, none inside another, where there is more than one."""
    in_row = {
        id(child)
        for module in model.modules()
        if isinstance(module, nn.Sequential | nn.ModuleList)
        for child in module
    }
    by_kind: dict[Any, list[str]] = {}
    for path, module in model.named_modules():
        if path and _has_forward(module) and (_is_own(module) or id(module) in in_row):
            paths = by_kind.setdefault(_kind(module), [])
            # What is inside one comes right after it.
            if not (paths and path.startswith(f"{paths[-1]}.")):
                paths.append(path)
    return [paths for paths in by_kind.values() if len(paths) > 1]


def _is_own(module: nn.Module) -> bool:
    return not type(module).__module__.startswith("torch.nn")


def _kind(module: nn.Module) -> Any:
    """Return the class of a module, with those inside it if it is torch's: two `nn.Sequential` may have nothing in common."""
    inside = () if _is_own(module) else tuple(_kind(child) for child in module.children())
    return type(module), inside


def _numel(model: nn.Module, paths: Iterable[str]) -> int:
    return sum(param.numel() for path in paths for param in model.get_submodule(path).parameters())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward not in (nn.Module.forward, forward_unimplemented)


def modules_of(units: Units) -> list[str]:
    """Return the paths of all modules of units."""
    return [path for each in units for path in ([each] if isinstance(each, str) else each)]


def _units_of(model: nn.Module, units: Units | None) -> dict[str, int]:
    """Return the number of the unit of each module that is one, or one of several, by path.

    All in the order of ``named_modules``, the root first. A module inside another one of its unit counts nothing.
    """
    given = default_units(model) if units is None else units
    named = dict(model.named_modules())
    known = {clean_name(path): path for path in named} | {path: path for path in named}
    if unknown := sorted({*modules_of(given)} - known.keys()):
        repeated = default_units(model) or [path for path in named if path]
        raise TraceError(
            f"{type(model).__name__} has no module {first_names(unknown)}. Units are paths of its "
            f"named_modules(), such as {first_names(repeated, 4)}."
        )
    groups: dict[str, frozenset[str]] = {}
    for each in ("", *given):
        paths = {known[path] for path in modules_of([each])}
        inner = {path for path in paths for other in paths - {path} if contains(other, path)}
        group = frozenset(paths - inner)
        if not group:
            raise TraceError("A unit has no modules: leave it out.")
        for path in sorted(group):
            if path in groups and (path or groups[path] != group):  # the root is one, named or not
                raise TraceError(f"{path or 'the root'} is in two units: name it once.")
            groups[path] = group
            if not _has_forward(named[path]):
                raise TraceError(
                    f"{path or 'the root'} ({type(named[path]).__name__}) has no forward of its own, so it cannot be a "
                    "unit. Name the modules inside it."
                )
    chosen = {path: groups[path] for path in named if path in groups}
    order = [*dict.fromkeys(chosen.values())]
    return {path: order.index(group) for path, group in chosen.items()}


class _Owned(NamedTuple):
    """A parameter, its first name in the model, and its unit, by number."""

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    unit: int


def _unit_params(
    model: nn.Module, units: Mapping[str, int], policy: MixedPrecisionPolicy
) -> list[_Owned]:
    """Return all parameters, once each, in the order of their first names."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(path, recurse=False):
            if isinstance(parameter, DTensor | nn.parameter.UninitializedParameter):
                raise TraceError(
                    f"{name} is a {type(parameter).__name__}. Trace the model before it is sharded, and after lazy "
                    "modules have run once."
                )
            if any(
                hasattr(parameter, each) for each in ("__tensor_flatten__", "fsdp_pre_all_gather")
            ):
                raise TraceError(
                    f"{name} is a {type(parameter).__name__}, which is made of other tensors or says itself what is "
                    "gathered of it. Such parameters are not planned. Plan the model as it is before they are converted."
                )
            if parameter.dim() == 0:
                raise TraceError(
                    f"{name} has no dimensions, and fully_shard takes no such parameters. Give it the shape (1,)."
                )
            names.setdefault(parameter, []).append(name)
    return [
        _Owned(
            known_as[0],
            parameter,
            ParamSpec(
                clean_name(known_as[0]),
                tuple(parameter.shape),
                parameter.dtype,
                _compute_dtype(parameter, policy),
                trainable=parameter.requires_grad,
            ),
            _owner([name.rpartition(".")[0] for name in known_as], units),
        )
        for parameter, known_as in names.items()
    ]


def _owner(users: Sequence[str], units: Mapping[str, int]) -> int:
    """Return the unit of a parameter: that of all modules which have it, or of what contains them."""
    inner = {units[lowest_common_unit([user], units) or ""] for user in users}
    return inner.pop() if len(inner) == 1 else units[lowest_common_unit(users, units) or ""]


def _compute_dtype(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
    override = policy.param_dtype_override_fn
    chosen = (override and override(parameter)) or policy.param_dtype
    return chosen if chosen is not None and parameter.is_floating_point() else parameter.dtype


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return vars(module), module._parameters, module._buffers, cast(Any, module._modules)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Leave all attributes of all modules as they are now, whatever a run assigns to them."""
    saved = [(each, dict(each)) for module in model.modules() for each in _registries(module)]
    try:
        yield
    finally:
        for registry, entries in saved:
            registry.clear()
            registry.update(entries)


def _drop_gradient(tensor: Tensor) -> None:
    tensor.grad = None


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def _loss(outputs: Any, loss: Callable[[Any], Tensor] | None, example: Example) -> Tensor | int:
    """Return the scalar that the backward begins with; 0 if nothing that the model returns needs a gradient."""
    if loss is not None:
        with explaining(name_of(loss), ", given as the loss, raised"):
            made: Any = loss(outputs)
        if not isinstance(made, Tensor):
            found = type(made).__name__
        elif made.numel() != 1:
            found = f"a tensor of shape {tuple(made.shape)}"
        else:
            return made
        raise TraceError(
            f"{name_of(loss)}, given as the loss, returned {found}: expected a scalar tensor, made of what the model "
            "returns."
        )
    if isinstance(own := getattr(outputs, "loss", None), Tensor):
        return own
    logits = getattr(outputs, "logits", outputs)
    has_tokens = not example.tensors[0].is_floating_point()
    if has_tokens and isinstance(logits, Tensor) and logits.ndim == 3:
        del outputs
        logits = logits.float().flatten(0, 1)
        targets = torch.empty(len(logits), dtype=torch.int64, device=logits.device).zero_()
        return F.cross_entropy(logits, targets)
    return sum(each.float().mean() for each in tensors_of(outputs) if each.requires_grad)


@contextlib.contextmanager
def _without_values(example: Example) -> Iterator[None]:
    """Run operators on shapes alone, and let nothing be said of those that cannot: `TraceError` says it.

    Models of Transformers look for documents that share a row, in the values of positions. They are told that there
    are none, unless the example has positions: with a mask for what is not there they would attend in another way.
    """
    log = logging.getLogger(FakeTensorMode.__module__)
    masks = sys.modules.get("transformers.masking_utils")
    finder = "find_packed_sequence_indices"
    with contextlib.ExitStack() as stack:
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.CRITICAL)
        if masks is not None and hasattr(masks, finder) and "position_ids" not in example.kwargs:
            stack.callback(setattr, masks, finder, getattr(masks, finder))
            setattr(masks, finder, lambda _positions: None)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextlib.contextmanager
def explaining(
    name: str, failed: str, helps: str = "", model: nn.Module | None = None
) -> Iterator[None]:
    """Raise TraceError that says where an error of the user's code comes from, and what helps.

    name: of the function that is called. failed: how the message goes on, up to what was raised. model: whose
        modules run, of which the innermost is named instead. For values of tensors without any it is a NeedsValuesError.
    """
    try:
        yield
    except Exception as error:
        where = _place_of(error, name, model)
        # A checkpoint that was left by an error ends with its frame. Until then its modes are those of what follows (2.11).
        traceback.clear_frames(error.__traceback__)
        if isinstance(error, FullshardError):
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split()):.300}".rstrip(".")
        if _lacks_values(error):
            raise NeedsValuesError(
                f"{where} reads values of tensors, by which it chooses what to compute, and a trace has none: {said}. "
                "Give inputs with values (--example-input MODULE:FUNCTION; in Python inputs=), with which the model is "
                "built in memory and run; or another way through this module, such as experts that are run on a fixed "
                "number of tokens."
            ) from error
        raise TraceError(f"{where}{failed} {said}. {helps}".rstrip()) from error


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or the class of another object that can be called."""
    return str(getattr(function, "__name__", type(function).__name__))


def _place_of(error: Exception, name: str, model: nn.Module | None) -> str:
    """Return what was running when an error was raised, and the last line of a program that it came through.

    That is a module's path and class in a model; else the classes of modules, the outermost first, or the name.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    # Of methods alone: `f_locals` is a copy, which outlives what `explaining` clears.
    methods = [frame for frame, _ in frames if frame.f_code.co_varnames[:1] == ("self",)]
    callers = [frame.f_locals.get("self") for frame in methods]
    modules = [caller for caller in callers if isinstance(caller, nn.Module)]
    aside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    files = [(frame.f_code.co_filename, line) for frame, line in frames]
    details = [f"{Path(file).name}:{line}" for file, line in files if not file.startswith(aside)]
    details = details[-1:]
    if model is None:
        where = " > ".join(dict.fromkeys(type(module).__name__ for module in modules)) or name
    else:
        paths = {id(module): path for path, module in model.named_modules()}
        module = next((each for each in reversed(modules) if id(each) in paths), model)
        where = clean_name(paths[id(module)]) or "the root"
        details.insert(0, type(module).__name__)
    return f"{where} ({', '.join(details)})" if details else where


def _lacks_values(error: Exception) -> bool:
    """Whether somebody asked a tensor without values for one; of one on the meta device, only the text tells."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return True
    texts = ("on meta tensors", "from meta to", "meta tensor")
    is_meta = any(text in str(error) for text in texts)
    return is_meta and isinstance(error, RuntimeError)  # NotImplementedError too


class _Run:
    """One forward and backward of a model whose tensors are replaced, and what happens in it."""

    def __init__(
        self, model: nn.Module, units: Mapping[str, int], options: TraceOptions, recorder: Recorder
    ) -> None:
        self._model, self._units, self._paths = model, units, [*units]
        self._place_of = {path: place for place, path in enumerate(units)}
        self._options, self._recorder = options, recorder
        self._owned = _unit_params(model, units, options.precision)
        self._places: list[list[int]] = [[] for _ in {*units.values()}]  # modules of each unit
        for place, unit in enumerate(units.values()):
            self._places[unit].append(place)
        self._replacing: dict[int, Tensor] = {}  # by the id of what the model has
        self._held_nbytes = 0
        # Of the forward: runs are of the recorder's spans, and what follows is of modules of units, by place.
        self._log: list[Event] = []
        self._recomputed: set[int] = set()
        self._like: dict[int, int] = {}  # those that were not traced, and those that were instead

    # Tensors

    def _replaced(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape whose memory counts nothing: without values, or on the same memory."""
        dtype = dtype or tensor.dtype
        if self._options.has_values:
            if tensor.is_meta:
                raise TraceError(
                    f"A tensor of shape {tuple(tensor.shape)} is on the meta device: a run with values needs a model "
                    "and an example that have some."
                )
            made = tensor.detach().to(dtype)
        elif tensor.layout is torch.strided:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
        else:
            raise TraceError(
                f"A tensor of shape {tuple(tensor.shape)} has the layout {tensor.layout}: only dense ones can be traced."
            )
        self._recorder.leave_out(made)
        return made

    def replace_tensors(self) -> None:
        """Give all modules other parameters, buffers and tensors, as they are during a step."""
        known = self._replacing
        for _, parameter, spec, _ in self._owned:
            made = self._replaced(parameter, spec.compute_dtype)
            known[id(parameter)] = nn.Parameter(made, parameter.requires_grad)
            self._recorder.watch(known[id(parameter)])
        for registry in itertools.chain(*map(_registries, self._model.modules())):
            for name, tensor in registry.items():
                if isinstance(tensor, Tensor):
                    if id(tensor) not in known:
                        known[id(tensor)] = self._replaced(tensor)
                        self._held_nbytes += known[id(tensor)].untyped_storage().nbytes()
                    registry[name] = known[id(tensor)]

    def take(self, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the model is called with."""

        def replace(tensor: Tensor) -> Tensor:
            made = self._replaced(tensor)
            if tensor.requires_grad:
                made.requires_grad_().register_post_accumulate_grad_hook(_drop_gradient)
            return made

        given = (example.args, dict(example.kwargs))
        return cast(Any, pytree.tree_map_only(Tensor, replace, given))

    # Units

    def wrap_units(self) -> None:
        """Let forwards of units say when they begin and end, and cast as the engine's hooks do."""
        modules = {path: self._model.get_submodule(path) for path in self._paths}
        self.repeats = Repeats(modules, self._recorder)
        for place, module in enumerate(modules.values()):
            vars(module)["forward"] = self._around(place, module.forward)

    def _around(self, place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        policy = self._options.precision

        @functools.wraps(forward)
        def around(*args: Any, **kwargs: Any) -> Any:
            may_repeat = place and self._options.reuses_equal and not self._recorder.is_backward
            if may_repeat and (found := self.repeats.look_up(place, args, kwargs)) is not None:
                self._repeat(place, found)
                return found.outputs
            self._mark(Enter(place, _may_differentiate((args, kwargs))))
            start = len(self._log) - 1
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                args, kwargs = _cast((args, kwargs), policy.param_dtype)
            outputs = forward(*args, **kwargs)
            if policy.output_dtype is not None:
                outputs = _cast(outputs, policy.output_dtype)
            self._mark(Leave(place, _may_differentiate(outputs)))
            if may_repeat:
                self.repeats.note(outputs, self._log[start:])
            return outputs

        return around

    def _mark(self, event: Enter | Leave) -> None:
        if self._recorder.is_backward:
            self._recomputed.add(event.unit)
        else:
            self._end_stretch()
            self._log.append(event)
        self._recorder.next_stretch()

    def _end_stretch(self) -> None:
        self._log.append(Run(len(self._recorder.spans) - 1, -1))

    def _repeat(self, place: int, found: Repeated) -> None:
        """Let happen in a module, and those inside, what has happened in another one."""
        for event in found.events:
            if isinstance(event, Run):
                self._log.append(event)
                continue
            path, same = self._paths[event.unit], event.unit
            if contains(self._paths[found.unit], path):  # else it is one that both call
                inside = path.removeprefix(self._paths[found.unit])
                same = self._place_of[self._paths[place] + inside]
            self._like[same] = self._like.get(event.unit, event.unit)
            self._log.append(event._replace(unit=same))

    # A step

    def forward_and_backward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], example: Example
    ) -> None:
        loss = _loss(self._model(*args, **kwargs), self._options.loss, example)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            helps = (
                "Activation checkpoints with use_reentrant=True cut off what they compute of inputs that need no gradient: "
                "give them use_reentrant=False. Else give a loss of what the model returns (loss=; --loss MODULE:FUNCTION)."
            )
            if not any(each.spec.trainable for each in self._owned):
                helps = "All are frozen: unfreeze some."
            raise TraceError(f"The loss depends on no parameter that is trained. {helps}")
        self._end_stretch()
        self._recorder.begin_backward()
        # Not by the method, which is a function that modes see: they are off while it runs.
        run_backward(
            (loss,),
            (torch.ones_like(loss),),
            *(False, False, ()),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        del loss
        self._recorder.end_backward()

    @property
    def _spans(self) -> list[Span]:
        """What is run in the forward, in order: as often as it is run."""
        return [self._recorder.spans[each.stretch] for each in self._log if isinstance(each, Run)]

    @property
    def is_balanced(self) -> bool:
        """Whether the backward frees all that the forward has kept."""
        return sum(span.saved_nbytes - span.freed_nbytes for span in self._spans) == 0

    def workload(self, example: Example) -> Workload:
        """Return what has happened. Raises TraceError for units that the engine would not gather when they are used."""
        stretches = [span.stretch() for span in self._recorder.spans]
        full = [number for number, stretch in enumerate(stretches) if stretch is not None]
        events = [
            each._replace(stretch=full.index(each.stretch)) if isinstance(each, Run) else each
            for each in self._events()
            if not isinstance(each, Run) or each.stretch in full
        ]
        params: list[list[ParamSpec]] = [[] for _ in self._places]
        for each in self._owned:
            params[each.unit].append(self._spec(each))
        units = [
            WorkloadUnit(
                ", ".join(clean_name(self._paths[place]) for place in places),
                tuple(specs),
                recomputes=self._recomputes(places),
            )
            for places, specs in zip(self._places, params, strict=True)
        ]
        storages = {t.untyped_storage()._cdata: t.nbytes for t in example.tensors}
        workload = Workload(
            units=tuple(units),
            events=tuple(events),
            stretches=tuple(filter(None, stretches)),
            held_nbytes=self._held_nbytes,
            input_nbytes=sum(storages.values()),
            model_flops=sum(span.model_flops for span in self._spans),
            tokens=example.num_tokens,
        )
        for each in self._owned:
            if each.unit not in workload.running and self._has_gradient(each.name):
                raise TraceError(
                    f"{each.spec.name} is used, and the forward of its unit ({units[each.unit].name}) does not run, "
                    "which would gather it. Let units be modules that are called."
                )
        return workload

    def _spec(self, owned: _Owned) -> ParamSpec:
        # Other values may use what these did not.
        is_used = self._options.has_values or self._has_gradient(owned.name)
        return dataclasses.replace(owned.spec, is_used=is_used)

    def _has_gradient(self, name: str) -> bool:
        """Whether a parameter has got a gradient, or that of the module that was traced instead."""
        path = lowest_common_unit([name.rpartition(".")[0]], self._units) or ""
        places = {place := self._place_of[path], self._like.get(place, place)}
        names = [self._paths[each] + name.removeprefix(path) for each in places]
        found = (self._replacing[id(self._model.get_parameter(each))] for each in names)
        return not self._recorder.with_gradient.isdisjoint(found)

    def _recomputes(self, places: Sequence[int]) -> bool:
        """Whether a unit is computed again as a whole: of several modules each is by itself."""
        place, *others = places
        return not others and not self._recomputed.isdisjoint((place, self._like.get(place, place)))

    def _events(self) -> Iterator[Event]:
        """Return what happened in units: the forward of one is from its first module's to its last one's."""
        units, inside = [*self._units.values(), -1], [-1]  # modules that run; none in the loss
        to_run: dict[int, set[int]] = {}  # modules of units whose forward has begun
        for event in self._log:
            if isinstance(event, Run):
                yield event._replace(unit=units[inside[-1]])
                continue
            unit = units[event.unit]
            if isinstance(event, Leave):
                inside.pop()
            is_inner = event.unit in inside  # called by itself
            if isinstance(event, Enter):
                inside.append(event.unit)
                if not (is_inner or to_run.get(unit)):
                    to_run[unit] = {*self._places[unit]}
                    yield event._replace(unit=unit)
            elif not is_inner:
                to_run[unit].discard(event.unit)
                if not to_run[unit]:
                    yield event._replace(unit=unit)
        if left := next(filter(None, to_run.values()), None):
            raise TraceError(
                f"{first_names([self._paths[place] for place in sorted(left)])} did not run, and others of its unit did, "
                "which would stay gathered until the model's forward ends. That is not planned: let units be of modules "
                "that run together."
            )


def _may_differentiate(tree: Any) -> bool:
    """Whether something in it needs a gradient; without gradients, as in reentrant checkpoints, nobody can tell yet."""
    return not torch.is_grad_enabled() or any(each.requires_grad for each in tensors_of(tree))
