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
from fullshard.plan.workload import Enter, Event, Leave, Run, Stretch, Workload, WorkloadUnit
from fullshard.planning.attention import AttentionOfGpu
from fullshard.planning.kernels import tensors_of
from fullshard.planning.recorder import Recorder, Span
from fullshard.planning.repeats import Caller, Repeats
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

    precision: of all units, as `fully_shard` takes it. autocast: the dtype of ``torch.autocast`` around forward
        and loss; None for none.
    loss: makes a scalar of what the model returns. None takes its ``.loss``, else the cross entropy of its logits
        if it was given tokens, else the mean of all that is floating point.
    has_values: run on the values that model and example have, on the CPU. For models whose way depends on values.
    attends_as_gpu: let scaled_dot_product_attention choose among the kernels of a GPU, which take dropout and heads
        of other sizes, where the CPU's write all scores. Not with values.
    reuses_equal: trace two of a row of equal units. False traces all.

    Raises TraceError for options that exclude each other.
    """

    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    autocast: torch.dtype | None = None
    loss: Callable[[Any], Tensor] | None = None
    has_values: bool = False
    attends_as_gpu: bool = False
    reuses_equal: bool = True

    def __post_init__(self) -> None:
        if self.has_values and self.attends_as_gpu:
            raise TraceError(
                "has_values=True runs the CPU's kernels on values, so attention cannot be a GPU's: leave out "
                "attends_as_gpu=True, or trace without values."
            )


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
    paths = _unit_paths(model, units)
    if not example.tensors:
        raise TraceError(
            "The model's inputs have no tensors. Let them have some (inputs=; --example-input MODULE:FUNCTION), such as "
            "torch.zeros(batch, seq, dtype=torch.int64)."
        )
    owned = _unit_params(model, paths, options.precision)
    run = _traced(model, paths, example, owned, options)
    if run.repeats.num_skipped and not run.is_balanced:
        # Something outside keeps what units return: which then was not made by those that are left out.
        run = _traced(
            model, paths, example, owned, dataclasses.replace(options, reuses_equal=False)
        )
    return run.workload(owned, example)


def record_pass(
    recorder: Recorder,
    model: nn.Module,
    example: Example,
    *,
    units: Units | None,
    options: TraceOptions,
) -> None:
    """Run a forward and a backward, as `trace_workload` does, that a recorder of the caller's sees."""
    paths = _unit_paths(model, units)
    _traced(model, paths, example, _unit_params(model, paths, options.precision), options, recorder)


def _traced(
    model: nn.Module,
    units: "_Paths",
    example: Example,
    owned: "Sequence[_Owned]",
    options: TraceOptions,
    recorder: Recorder | None = None,
) -> "_Run":
    with _restored(model), contextlib.ExitStack() as stack:
        if not options.has_values:
            stack.enter_context(_without_values(example))
        if options.attends_as_gpu:
            stack.enter_context(AttentionOfGpu())
        run = _Run(model, units, options, recorder or Recorder())
        run.replace_tensors(owned)
        run.wrap_units()
        args, kwargs = run.take(example)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        with run.recorder, explaining(model, type(model).__name__):
            run.forward_and_backward(args, kwargs, example)
    return run


def build_without_memory(build: Callable[[], ModelT], name: str = "") -> ModelT:
    """Return the model that a function builds, on the meta device.

    name: of the function, for messages. Raises NeedsValuesError for a model that reads values, and TraceError for one
    that cannot be built; both with the classes of the modules that were being built.
    """
    with explaining(None, name or getattr(build, "__name__", "The model")), torch.device("meta"):
        return build()


def default_units(model: nn.Module) -> list[str]:
    """Return the paths of the modules that make good units: the repeated layers.

    Those of the largest list, as `fullshard train` shards them. Without a list of at least half of what is repeated,
    the outermost modules of one kind that hold as much. A kind is a class of the program's own; or one of torch's in
    an `nn.Sequential` or a list, with the classes inside it.
    """
    groups = _repeated(model)
    listed = {id(module) for module in sharding_units(model) if _has_forward(module)}
    layers = [path for path, module in model.named_modules() if id(module) in listed]
    numel = [_numel(model, paths) for paths in groups]
    half = max(numel, default=0) / 2
    if layers and _numel(model, layers) >= half:
        return layers
    # The outermost first. By the deepest of each: the first layers of a net may be of a kind that is in its blocks.
    order = sorted(
        (max(path.count(".") for path in paths), -count, number)
        for number, (paths, count) in enumerate(zip(groups, numel, strict=True))
        if count >= half > 0
    )
    if not order:
        return layers
    outer, *inner = (groups[number] for *_, number in order)
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


# The paths of each unit's modules, the root first.
_Paths = Sequence[tuple[str, ...]]


def modules_of(units: Units) -> list[str]:
    """Return the paths of all modules of units."""
    return [path for each in units for path in ([each] if isinstance(each, str) else each)]


def _unit_paths(model: nn.Module, units: Units | None) -> _Paths:
    """Return the paths of units, in the order of ``named_modules``. A module inside another one of its unit counts nothing."""
    given = default_units(model) if units is None else units
    groups = [(each,) if isinstance(each, str) else tuple(each) for each in given]
    if () in groups:
        raise TraceError("A unit has no modules: leave it out.")
    named = dict(model.named_modules())
    known = {clean_name(path): path for path in named} | {path: path for path in named}
    if unknown := sorted({*modules_of(groups)} - known.keys()):
        repeated = default_units(model) or [path for path in named if path]
        raise TraceError(
            f"{type(model).__name__} has no module {first_names(unknown)}. Units are paths of its "
            f"named_modules(), such as {first_names(repeated, 4)}."
        )
    place = {path: number for number, path in enumerate(named)}
    found: set[tuple[str, ...]] = {("",)}
    for group in groups:
        paths = {known[path] for path in group}
        inner = {each for each in paths for other in paths - {each} if contains(other, each)}
        found.add(tuple(sorted(paths - inner, key=place.__getitem__)))
    modules = modules_of([*found])
    for path in sorted({*modules}):
        if modules.count(path) > 1:
            raise TraceError(f"{path or 'the root'} is in two units: name it once.")
        if not _has_forward(named[path]):
            raise TraceError(
                f"{path or 'the root'} ({type(named[path]).__name__}) has no forward of its own, so it cannot be a "
                "unit. Name the modules inside it."
            )
    return sorted(found, key=lambda group: place[group[0]])


class _Owned(NamedTuple):
    """A parameter and its unit, by number."""

    parameter: nn.Parameter
    spec: ParamSpec
    unit: int


def _unit_params(model: nn.Module, units: _Paths, policy: MixedPrecisionPolicy) -> list[_Owned]:
    """Return all parameters, once each, in the order of their first names."""
    users: dict[nn.Parameter, list[str]] = {}
    names: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(path, recurse=False):
            if isinstance(parameter, DTensor | nn.parameter.UninitializedParameter):
                raise TraceError(
                    f"{name} is a {type(parameter).__name__}. Trace the model before it is sharded, and after lazy "
                    "modules have run once."
                )
            if hasattr(parameter, "__tensor_flatten__") or hasattr(
                parameter, "fsdp_pre_all_gather"
            ):
                raise TraceError(
                    f"{name} is a {type(parameter).__name__}, which is made of other tensors or says itself what is "
                    "gathered of it. Such parameters are not planned. Plan the model as it is before they are converted."
                )
            users.setdefault(parameter, []).append(path)
            names.setdefault(parameter, clean_name(name))
    numbers = {path: number for number, paths in enumerate(units) for path in paths}

    def unit_of(using: Sequence[str]) -> int:
        inner = {numbers[cast(str, lowest_common_unit([path], numbers))] for path in using}
        return (
            inner.pop()
            if len(inner) == 1
            else numbers[cast(str, lowest_common_unit(using, numbers))]
        )

    return [
        _Owned(
            parameter,
            ParamSpec(
                names[parameter],
                tuple(parameter.shape),
                parameter.dtype,
                _compute_dtype(parameter, policy),
                trainable=parameter.requires_grad,
            ),
            unit_of(using),
        )
        for parameter, using in users.items()
    ]


def _compute_dtype(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
    chosen = policy.param_dtype
    if policy.param_dtype_override_fn is not None:
        chosen = policy.param_dtype_override_fn(parameter) or chosen
    return chosen if chosen is not None and parameter.is_floating_point() else parameter.dtype


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Leave all attributes of all modules as they are now, whatever a run assigns to them."""
    inner = ("_parameters", "_buffers", "_modules")
    saved = [
        (module, dict(vars(module)), [(each, dict(vars(module)[each])) for each in inner])
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, registries in saved:
            vars(module).clear()
            vars(module).update(attributes)
            for name, entries in registries:
                vars(module)[name].clear()
                vars(module)[name].update(entries)


def _modules_in(error: BaseException) -> list[nn.Module]:
    """Return the modules whose methods were running when an error was raised, the innermost last."""
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return [caller for caller in callers if isinstance(caller, nn.Module)]


def _drop_gradient(tensor: Tensor) -> None:
    tensor.grad = None


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast_one(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast_one, tree)


def _loss(outputs: Any, loss: Callable[[Any], Tensor] | None, example: Example) -> Tensor:
    """Return the scalar that the backward begins with."""
    if loss is not None:
        with calling(loss, "the loss"):
            made: Any = loss(outputs)
        _check_loss(made, name_of(loss))
        return cast(Tensor, made)
    if isinstance(own := getattr(outputs, "loss", None), Tensor):
        return own
    logits = getattr(outputs, "logits", outputs)
    has_tokens = not example.tensors[0].is_floating_point()
    if has_tokens and isinstance(logits, Tensor) and logits.ndim == 3:
        del outputs
        logits = logits.float().flatten(0, 1)
        targets = torch.empty(len(logits), dtype=torch.int64, device=logits.device).zero_()
        return F.cross_entropy(logits, targets)
    floats = [each for each in tensors_of(outputs) if each.requires_grad]
    if not floats:
        raise TraceError(
            f"What the model returns ({type(outputs).__name__}) depends on no parameter that is trained. Unfreeze "
            "some, or give a loss that takes what it returns (loss=; --loss MODULE:FUNCTION)."
        )
    return cast(Tensor, sum(each.float().mean() for each in floats))


def _check_loss(made: Any, name: str) -> None:
    """Raise TraceError for what no backward can begin with."""
    if not isinstance(made, Tensor) or made.numel() != 1:
        found = (
            f"a tensor of shape {tuple(made.shape)}"
            if isinstance(made, Tensor)
            else type(made).__name__
        )
        raise TraceError(f"{name}, given as the loss, returned {found}: expected a scalar tensor.")
    if not made.requires_grad:
        raise TraceError(
            f"{name}, given as the loss, returned a scalar that depends on no parameter that is trained."
        )


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
def explaining(model: nn.Module | None, name: str) -> Iterator[None]:
    """Say which module could not be run on an example, and what helps; without a model, which could not be built.

    name: of the model, or of what builds it.
    """
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        where = _place_of(error, model, name)
        if _lacks_values(error):
            raise NeedsValuesError(
                f"{where} reads values of tensors, by which it chooses what to compute, and a trace has none: "
                f"{_said(error)}. Give inputs with values (--example-input MODULE:FUNCTION; in Python inputs=), with "
                "which the model is built in memory and run; or another way through this module, such as experts that "
                "are run on a fixed number of tokens."
            ) from error
        if model is None and isinstance(error, NotImplementedError):
            raise TraceError(
                f"{where} cannot be built on the meta device: {_said(error)}. Let it make its tensors by torch's "
                "factories, and neither read them nor load weights; or give a model that is built."
            ) from error
        if model is None:
            raise TraceError(f"{where}, which builds the model, raised {_said(error)}.") from error
        raise TraceError(
            f"{where} cannot be run on this example: {_said(error)}. Give inputs as the model takes them "
            "(inputs=; --example-input MODULE:FUNCTION)."
        ) from error


@contextlib.contextmanager
def calling(function: Callable[..., Any], role: str) -> Iterator[None]:
    """Raise TraceError that names a function of the user's, if it raises something. role: what it is given as.

    For values of tensors without any it is a NeedsValuesError.
    """
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:
        line = _line(error)
        said = f"{name_of(function)}{f' ({line})' if line else ''}, given as {role}, raised {_said(error)}."
        if _lacks_values(error):
            raise NeedsValuesError(
                f"{said} It reads values of tensors, and a trace has none: give inputs with values "
                "(--example-input MODULE:FUNCTION; in Python inputs=)."
            ) from error
        raise TraceError(said) from error


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or the class of another object that can be called."""
    return str(getattr(function, "__name__", type(function).__name__))


def _place_of(error: Exception, model: nn.Module | None, name: str) -> str:
    """Return the path and class of the module that an error came from; of one being built, the classes around it."""
    around = _modules_in(error)
    if model is None:
        kinds = " > ".join(dict.fromkeys(type(module).__name__ for module in around))
        return f"{kinds or name} ({_line(error) or name})"
    paths = {id(module): path for path, module in model.named_modules()}
    module = next((each for each in reversed(around) if id(each) in paths), model)
    path = clean_name(paths.get(id(module), "")) or "the root"
    return f"{path} ({', '.join(filter(None, (type(module).__name__, _line(error))))})"


_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def _lacks_values(error: Exception) -> bool:
    """Whether somebody asked a tensor without values for one; of one on the meta device, only the text tells."""
    if isinstance(error, _NEEDS_VALUES):
        return True
    return isinstance(error, RuntimeError | NotImplementedError) and (
        "on meta tensors" in str(error)
        or "from meta to" in str(error)
        or "meta tensor" in str(error)
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}".rstrip(".")


def _line(error: Exception) -> str:
    """Return "file:line" of the last line of a program that an error came through; "" if there is none."""
    aside = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(aside)]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


class _Call(NamedTuple):
    """A unit's module is called, or returns. is_differentiable: something that it is given, or returns, needs a gradient."""

    path: str
    begins: bool
    is_differentiable: bool


class _Run:
    """One forward and backward of a model whose tensors are replaced, and what happens in it."""

    def __init__(
        self, model: nn.Module, units: _Paths, options: TraceOptions, recorder: Recorder
    ) -> None:
        self.model = model
        self.units = units
        self.options = options
        self.recorder = recorder
        self._log: list[_Call | int] = []  # what happens in the forward; numbers are of spans
        self._recomputed: set[str] = set()  # modules of units
        self._held_nbytes = 0
        self._params: list[Tensor] = []  # as they are during the step
        self._copies: list[tuple[str, str]] = []  # modules that were traced, and that repeat them
        self.repeats = Repeats(recorder)

    # Tensors

    def _replaced(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor of this shape: without values, or on the same memory if there are values."""
        dtype = dtype or tensor.dtype
        if self.options.has_values:
            if tensor.is_meta:
                raise TraceError(
                    f"A tensor of shape {tuple(tensor.shape)} is on the meta device: a run with values needs a model "
                    "and an example that have some."
                )
            return tensor.detach().to(dtype)
        if tensor.layout is not torch.strided:
            raise TraceError(
                f"A tensor of shape {tuple(tensor.shape)} has the layout {tensor.layout}: only dense ones can be traced."
            )
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")

    def replace_tensors(self, owned: Sequence[_Owned]) -> None:
        """Give all modules other parameters, buffers and tensors, as they are during a step."""
        known: dict[int, Tensor] = {}
        for parameter, spec, _ in owned:
            fake = self._replaced(parameter, spec.compute_dtype)
            known[id(parameter)] = nn.Parameter(fake, parameter.requires_grad)
            self.recorder.watch(known[id(parameter)])
            self._params.append(known[id(parameter)])
        for module in self.model.modules():
            registries: tuple[dict[str, Any], ...] = (
                module._parameters,
                module._buffers,
                vars(module),
            )
            for registry in registries:
                for name, tensor in registry.items():
                    if isinstance(tensor, Tensor):
                        if id(tensor) not in known:
                            known[id(tensor)] = self._hold(tensor)
                        registry[name] = known[id(tensor)]

    def _hold(self, tensor: Tensor) -> Tensor:
        fake = self._replaced(tensor)
        self.recorder.leave_out([fake])
        self._held_nbytes += fake.untyped_storage().nbytes()
        return fake

    def take(self, example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the model is called with. Its memory counts nothing."""

        def replace(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            fake = self._replaced(leaf).requires_grad_(leaf.requires_grad)
            self.recorder.leave_out([fake])
            if leaf.requires_grad:
                fake.register_post_accumulate_grad_hook(_drop_gradient)
            return fake

        return cast(Any, pytree.tree_map(replace, (example.args, dict(example.kwargs))))

    # Units

    def wrap_units(self) -> None:
        for path in (path for paths in self.units for path in paths):
            module = self.model.get_submodule(path)
            vars(module)["forward"] = self._around(path, module)

    def _around(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """Return a forward that says when it begins and ends, and casts as the engine's hooks do."""
        forward, policy, recorder = module.forward, self.options.precision, self.recorder
        caller = Caller(path, module)

        @functools.wraps(forward)
        def around(*args: Any, **kwargs: Any) -> Any:
            may_repeat = path and self.options.reuses_equal and not recorder.is_backward
            if may_repeat and (found := self.repeats.look_up(caller, args, kwargs)) is not None:
                self._log += [
                    each._replace(path=_moved(each.path, found.path, path))
                    if isinstance(each, _Call)
                    else each
                    for each in found.events
                ]
                self._copies.append((found.path, path))
                return found.outputs
            self._mark(_Call(path, True, _may_differentiate((args, kwargs))))
            start = len(self._log) - 1
            if policy.param_dtype is not None and policy.cast_forward_inputs:
                args, kwargs = _cast((args, kwargs), policy.param_dtype)
            outputs = forward(*args, **kwargs)
            if policy.output_dtype is not None:
                outputs = _cast(outputs, policy.output_dtype)
            self._mark(_Call(path, False, _may_differentiate(outputs)))
            if may_repeat:
                self.repeats.note(outputs, self._log[start:])
            return outputs

        return around

    def _mark(self, call: _Call) -> None:
        if self.recorder.is_backward:
            self._recomputed.add(call.path)
        else:
            self._log += [len(self.recorder.spans) - 1, call]
        self.recorder.next_stretch()

    # A step

    def forward_and_backward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], example: Example
    ) -> None:
        dtype = self.options.autocast
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = _loss(self.model(*args, **kwargs), self.options.loss, example)
        self._log.append(len(self.recorder.spans) - 1)
        self.recorder.begin_backward()
        # Not by the method, which is a function that modes see: they are off while it runs.
        run_backward(
            (loss,),
            (torch.ones_like(loss),),
            *(False, False, ()),
            allow_unreachable=True,
            accumulate_grad=True,
        )
        del loss
        self.recorder.end_backward()
        for path, new in self._copies:
            inside = [each for each in self._recomputed if contains(path, each)]
            self._recomputed |= {_moved(each, path, new) for each in inside}

    @property
    def _spans(self) -> list[Span]:
        """What is run in the forward, in order: as often as it is run."""
        return [self.recorder.spans[event] for event in self._log if isinstance(event, int)]

    @property
    def is_balanced(self) -> bool:
        """Whether the backward frees all that the forward has kept."""
        return sum(span.saved_nbytes - span.freed_nbytes for span in self._spans) == 0

    def workload(self, owned: Sequence[_Owned], example: Example) -> Workload:
        """Return what has happened. Raises TraceError for units that the engine would not gather when they are used."""
        stretches: list[Stretch] = []
        numbers: dict[int, int] = {}  # by span
        for number, span in enumerate(self.recorder.spans):
            if (stretch := span.stretch()) is not None:
                numbers[number] = len(stretches)
                stretches.append(stretch)
        workload = Workload(
            units=tuple(
                WorkloadUnit(
                    ", ".join(map(clean_name, paths)),
                    tuple(each.spec for each in owned if each.unit == number),
                    # Of several modules each is computed again by itself.
                    len(paths) == 1 and paths[0] in self._recomputed,
                )
                for number, paths in enumerate(self.units)
            ),
            events=tuple(self._events(numbers)),
            stretches=tuple(stretches),
            held_nbytes=self._held_nbytes,
            input_nbytes=sum(
                {t.untyped_storage()._cdata: t.nbytes for t in example.tensors}.values()
            ),
            model_flops=sum(span.model_flops for span in self._spans),
            tokens=example.num_tokens,
        )
        for each, param in zip(owned, self._params, strict=True):
            if each.unit not in workload.running and param in self.recorder.with_gradient:
                raise TraceError(
                    f"{each.spec.name} is used, and the forward of its unit ({workload.units[each.unit].name}) does not "
                    "run, which would gather it. Let units be modules that are called."
                )
        return workload

    def _events(self, spans: Mapping[int, int]) -> Iterator[Event]:
        numbers = {path: number for number, paths in enumerate(self.units) for path in paths}
        within = [""]  # modules that run
        to_run: dict[int, set[str]] = {}  # others of its unit, from the first to the last
        for call in self._log:
            if isinstance(call, int):
                if call in spans:
                    yield Run(spans[call], numbers[within[-1]])
                continue
            unit = numbers[call.path]
            if not call.begins:
                within.pop()
            is_inner = call.path in within[1:]  # called by itself
            if call.begins:
                within.append(call.path)
                if not (is_inner or to_run.get(unit)):
                    to_run[unit] = {*self.units[unit]}
                    yield Enter(unit, call.is_differentiable)
            elif not is_inner:
                to_run[unit].discard(call.path)
                if not to_run[unit]:
                    yield Leave(unit, call.is_differentiable)
        if left := next(filter(None, to_run.values()), None):
            raise TraceError(
                f"{first_names(sorted(left))} did not run, and others of its unit did, which would stay gathered until "
                "the model's forward ends. That is not planned: let units be of modules that run together."
            )


def _moved(path: str, old: str, new: str) -> str:
    """Return the path of what is at the same place inside another module."""
    return new + path.removeprefix(old)


def _may_differentiate(tree: Any) -> bool:
    """Whether something in it needs a gradient; without gradients, as in reentrant checkpoints, nobody can tell yet."""
    return not torch.is_grad_enabled() or any(each.requires_grad for each in tensors_of(tree))
