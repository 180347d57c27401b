"""`capture_step`: a whole step of training as one CUDA graph, with around it what a graph cannot check itself.

    call                    what runs
    1 to 3                  the step itself, on the graph's stream: memory and optimizer state come to be
    4                       the step once more, captured: nothing is computed. Then the first replay
    later                   what the graph has taken for granted is compared; inputs are copied; a replay
    each ``check_every``-th  the step itself, as a watched pass: with all checks of the engine

Every call is one step of training, in the same bits as the step itself.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.engine.checks.optimizers import known
from fullshard.engine.iteration import Iteration
from fullshard.engine.observer import PassWatcher, watchers
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit import Unit, are_sharded, have_unreduced
from fullshard.errors import FullshardError, MisuseError, StateError, UnsupportedError
from fullshard.torch_private import WithoutSubclasses, local_part, pytree

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NUM_WARM = 3  # as many as there are passes that differ from all later ones: two are watched, one reads the answer
_AGAIN = "Or call recapture() on the captured step: the next calls run the step itself, then capture it anew."
_training, _config, _buffers, _state_of = (
    operator.attrgetter("training"),
    operator.attrgetter("config"),
    operator.attrgetter("_buffers"),
    operator.methodcaller("values"),
)
_is_trained = operator.attrgetter("requires_grad")


def capture_step(
    step: Callable[_P, _R],
    *,
    optimizer: Optimizer | Sequence[Optimizer],
    check_every: int = 1000,
) -> "CapturedStep[_P, _R]":
    """Return a function that trains like ``step``, by replays of a CUDA graph after its first calls.

        def step(tokens):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            fullshard.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        captured = fullshard.capture_step(step, optimizer=optimizer)
        for tokens in batches:
            loss = captured(tokens)

    Every call is one step, in the bits of ``step``: the first three run it, the fourth captures it, and later ones
    replay what was captured. Python code in ``step`` does not run in replays. On several ranks all call it equally
    often.

    step: a whole step of training: forward, loss, backward, clipping, optimizer; of one or several sharded models.
        Its arguments: tensors on the GPU, which are copied at each call, and what stays equal. It returns tensors,
        also in tuples, lists or dicts, or None. A call returns copies of them, detached.
    optimizer: the optimizer that it steps, or all of them: built with ``capturable=True`` if they take that. What
        is to change is a tensor: ``lr=torch.tensor(1e-3, device="cuda")``, which schedulers of torch write to.
    check_every: each so many-th call runs ``step`` itself, with all checks of the engine, beside the memory of the
        graph. 0 for none.

    Before each replay it compares what the graph has taken for granted. StateError, and nothing is done, if a
    hyperparameter, ``requires_grad``, ``train()`` or ``eval()``, an option of a unit, autocast, an argument or its
    shape, or the memory of a parameter or of optimizer state is another one. UnsupportedError for what no graph
    can hold: parameters elsewhere than on a CUDA device, CPU offload, communication of the host's, waits of the
    host in ``step``, state on the host. MisuseError for wrong arguments.
    """
    if not callable(step):
        raise MisuseError(f"capture_step: step is {step!r}. Pass a function that does one step.")
    one = isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable)
    optimizers: list[Any] = [optimizer] if one else list(cast(Iterable[Any], optimizer))
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise MisuseError(
            f"capture_step: optimizer is {optimizer!r}. Pass a torch.optim.Optimizer, or several."
        )
    if type(check_every) is not int or check_every < 0:
        raise MisuseError(
            f"capture_step: check_every is {check_every!r}. Pass a number of calls, or 0 for no checks."
        )
    captured = CapturedStep(step, optimizers, check_every)
    _refuse_optimizers(optimizers)
    return captured


class CapturedStep(Generic[_P, _R]):
    """A step of training to be called like the function that it was made of: see `capture_step`.

    num_calls: how often it was called. is_captured: whether it was captured, so that calls replay it.
    """

    def __init__(
        self, step: Callable[_P, _R], optimizers: Sequence[Optimizer], check_every: int
    ) -> None:
        self.num_calls = 0
        self._step = step
        self._optimizers = optimizers
        self._check_every = check_every
        first = optimizers[0].param_groups[0]["params"][0]
        self._runtime = Runtime.of(local_part(first).device)
        self._roots = _Roots()
        self.recapture()

    def recapture(self) -> None:
        """Forget what was captured, and its memory: the next calls run the step itself, then capture it anew."""
        self._graph = self._runtime.make_graph()
        self._captured: _Captured | None = None
        self._num_warm = 0
        self._roots.states.clear()

    @property
    def is_captured(self) -> bool:
        """True if the next call replays it, or checks it."""
        return self._captured is not None

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Do one step. Raises as `capture_step` says."""
        if self._captured is not None:
            self._captured.compare(args, kwargs)
        if self._num_warm < _NUM_WARM:
            result = self._run(args, kwargs)
            self._num_warm += 1
        elif (
            self._captured is not None
            and self._check_every
            and not (self.num_calls + 1) % self._check_every
        ):
            result = self._run_checked(args, kwargs)
        else:
            if self._captured is None:
                self._captured = self._capture(args, kwargs)
            result = self._captured.replay(args, kwargs)
            for optimizer in self._optimizers:
                known(optimizer).steps.value += 1
        self.num_calls += 1
        return result

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Run the step itself, where it will be captured."""
        watchers.append(self._roots)
        try:
            with self._graph.beside():
                returned = self._step(*args, **kwargs)
        finally:
            watchers.remove(self._roots)
        return pytree.tree_map_only(torch.Tensor, torch.clone, self._result(returned))

    def _run_checked(self, args: Any, kwargs: Any) -> Any:
        self._agree("the step itself, with all checks")
        for iteration in self._roots.iterations:
            iteration.watch_next_pass()
        result = self._run(args, kwargs)
        for iteration in self._roots.iterations:
            iteration.conclude_checks()
        return result

    def _capture(self, args: Any, kwargs: Any) -> "_Captured":
        """Capture the step. Nothing is computed."""
        self._agree("capturing the step")
        for iteration in self._roots.iterations:
            iteration.conclude_checks()
        _refuse_optimizers(self._optimizers)
        _refuse_state(self._optimizers)
        taken = _Taken(self._optimizers, self._roots)
        inputs = _Inputs(args, kwargs, self._runtime.device)
        grads = [parameter.grad for parameter in taken.parameters]
        try:
            with self._graph.capturing():
                static_args, static_kwargs = inputs.static()
                outputs = self._result(self._step(*static_args, **static_kwargs))
        except BaseException as error:
            for parameter, grad in zip(taken.parameters, grads, strict=True):
                parameter.grad = grad  # in place of what nothing has computed
            if isinstance(error, FullshardError) or not isinstance(error, RuntimeError):
                raise
            raise UnsupportedError(
                f"capture_step: the step cannot be captured by a CUDA graph: {str(error).splitlines()[0]} Most often "
                "something in it lets the host wait for the GPU: .item(), float(loss), print(loss), .cpu(), "
                "torch.nonzero, a comparison of values in an if. Move that behind the call, or run the step without a graph."
            ) from error
        if have_unreduced(taken.units):
            raise UnsupportedError(
                "capture_step: the step leaves gradients that were not reduced, which its replays would add again. "
                "Let its last micro-batch reduce them: set_requires_gradient_sync(True)."
            )
        taken.refuse_changes(
            "the step itself has changed this while it was captured, which replays would not do: do it outside"
        )
        return _Captured(self._graph, taken, inputs, outputs, grads)

    def _result(self, returned: Any) -> Any:
        """Return what a step has returned, detached. Raises UnsupportedError for what replays cannot make anew."""
        for leaf in pytree.tree_leaves(returned):
            if leaf is not None and not (
                isinstance(leaf, torch.Tensor) and leaf.device == self._runtime.device
            ):
                what = (
                    f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
                )
                raise UnsupportedError(
                    f"capture_step: the step returns {what}, which would stay the same in all replays. Return tensors "
                    f"on {self._runtime.device}, and read them after the call."
                )
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, returned)

    def _agree(self, what: str) -> None:
        """Let ranks that do something else at this call meet a DivergenceError."""
        for iteration in self._roots.iterations:
            iteration.agree_on(f"call {self.num_calls + 1} of a captured step: {what}")


class _Roots(PassWatcher):
    """The models that run in a step. states: of their roots."""

    def __init__(self) -> None:
        self.states: dict[Any, None] = {}

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.states[state] = None

    @property
    def iterations(self) -> list[Iteration]:
        known = (state.known_iteration for state in self.states)
        return [iteration for iteration in known if iteration is not None]

    @property
    def modules(self) -> list[nn.Module]:
        roots = (state.root_module for state in self.states)
        return [module for root in roots if root is not None for module in root.modules()]


class _Facts(NamedTuple):
    """What a graph takes for granted, each in one order.

    groups: hyperparameters of the optimizers' groups, but tensors. tensors: those, parameters, state and
    buffers, by identity. addresses: of their memory, and of shards.
    """

    context: tuple[Any, ...]
    modes: list[bool]
    options: list[Any]
    are_trained: list[bool]
    groups: list[dict[str, Any]]
    tensors: list[Any]
    addresses: list[int]


class _Taken:
    """What a graph has taken for granted of optimizers, models and settings."""

    def __init__(self, optimizers: Sequence[Optimizer], roots: _Roots) -> None:
        self._optimizers = optimizers
        self._modules = roots.modules
        self.units: list[Unit] = [unit for each in roots.iterations for unit in each.units]
        self._shards = [shard for unit in self.units for shard in unit.shard_memory]
        self._holders = [holder.sharded for unit in self.units for holder in unit.holders]
        self.parameters = list(self._listed())
        self._locals: list[torch.Tensor] = []
        self._facts = self._take()
        self._locals = [local_part(each) for each in self._facts.tensors if each is not None]
        self._facts = self._take()

    def _listed(self) -> Iterable[torch.Tensor]:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return itertools.chain.from_iterable(group["params"] for group in groups)

    def _take(self) -> _Facts:
        parameters = list(self._listed())
        tensors: list[Any] = list(parameters)
        groups = []
        for optimizer in self._optimizers:
            state = map(optimizer.state.get, parameters)
            tensors += itertools.chain.from_iterable(map(_state_of, filter(None, state)))
            for group in optimizer.param_groups:
                own = {key: value for key, value in group.items() if key != "params"}
                tensors += [each for each in own.values() if isinstance(each, torch.Tensor)]
                groups.append({k: v for k, v in own.items() if not isinstance(v, torch.Tensor)})
        tensors += itertools.chain.from_iterable(map(_state_of, map(_buffers, self._modules)))
        with WithoutSubclasses():
            are_trained = list(map(_is_trained, (*parameters, *self._holders)))
        return _Facts(
            context=(torch.is_grad_enabled(), torch.is_autocast_enabled(self._device_type)),
            modes=list(map(_training, self._modules)),
            options=list(map(_config, self.units)),
            are_trained=are_trained,
            groups=groups,
            tensors=tensors,
            addresses=list(map(torch.Tensor.data_ptr, (*self._shards, *self._locals))),
        )

    @property
    def _device_type(self) -> str:
        return self.units[0].device.type if self.units else "cuda"

    def refuse_changes(self, remedy: str) -> None:
        """Raise StateError if anything is not as it was taken. remedy: what to do."""
        before, now = self._facts, self._take()
        if are_alike(before.tensors, now.tensors) and before[:5] == now[:5] and before[6] == now[6]:
            return
        raise StateError(
            f"capture_step: {self._say(before, now)}, and the graph has it as it was: {remedy}."
        )

    def _say(self, before: _Facts, now: _Facts) -> str:
        if before.context != now.context:
            return "grad mode or autocast is another one now"
        for module, was, is_training in zip(self._modules, before.modes, now.modes, strict=True):
            if was != is_training:
                return (
                    f"{type(module).__name__} is in {'train' if is_training else 'eval'}() mode now"
                )
        for unit, old, new in zip(self.units, before.options, now.options, strict=True):
            if old != new:
                fields = map(operator.attrgetter("name"), dataclasses.fields(new))
                names = [n for n in fields if getattr(old, n) != getattr(new, n)]
                return f"{unit.label}: {', '.join(names)} of its options was changed"
        num_params = len(before.are_trained)
        if num_params == len(now.are_trained) and before.are_trained != now.are_trained:
            return "parameters were frozen, or are trained again (requires_grad)"
        for old_group, new_group in zip(before.groups, now.groups, strict=False):
            for key in old_group.keys() | new_group.keys():
                if old_group.get(key) != new_group.get(key):
                    return (
                        f"{key!r} of the optimizer was {old_group.get(key)!r} and is {new_group.get(key)!r}, a number, "
                        f'which a graph holds. If it is to change, build the optimizer with {key}=torch.tensor(..., device="cuda") '
                        "and capturable=True, and write to that tensor (fill_, or a scheduler of torch)"
                    )
        if not are_alike(before.tensors, now.tensors):
            return (
                "a parameter, optimizer state or a buffer was replaced by another tensor, as optimizer.load_state_dict "
                "and add_param_group do"
            )
        return "the memory of a parameter, of optimizer state or of a buffer has moved"


def are_alike(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two sequences are of the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


class _Inputs:
    """The arguments of a step, in memory that a graph reads."""

    def __init__(self, args: Any, kwargs: Any, device: torch.device) -> None:
        leaves, self._spec = pytree.tree_flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and (leaf.device != device or leaf.requires_grad):
                what = "requires a gradient" if leaf.requires_grad else f"is on {leaf.device}"
                raise UnsupportedError(
                    f"capture_step: an argument of the step {what}, which a graph cannot take anew. Pass tensors on "
                    f"{device} that require none."
                )
        self._leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def static(self) -> Any:
        """Return the arguments for the step that is captured."""
        return pytree.tree_unflatten(self._leaves, self._spec)

    def compare(self, args: Any, kwargs: Any) -> None:
        """Raise StateError unless arguments are like those of the capture."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._spec:
            raise StateError(
                f"capture_step: the step was captured with other arguments: {self._spec}. Pass the same ones. {_AGAIN}"
            )
        for own, given in zip(self._leaves, leaves, strict=True):
            if not isinstance(own, torch.Tensor):
                if type(own) is not type(given) or (own is not given and own != given):
                    raise StateError(
                        f"capture_step: an argument is {given!r} and was {own!r} when the step was captured, which replays "
                        f"repeat. Pass a tensor if it is to change. {_AGAIN}"
                    )
            elif _kind(own) != _kind(given):
                raise StateError(
                    f"capture_step: a tensor is of {_said(given)}, and was of {_said(own)} when the step was captured. "
                    f"Pad or cut batches to one shape, or call the step itself for the odd one. {_AGAIN}"
                )

    def fill(self, args: Any, kwargs: Any) -> None:
        """Copy tensors to where the graph reads them."""
        for own, given in zip(self._leaves, pytree.tree_leaves((args, kwargs)), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given, non_blocking=True)


def _kind(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    return (value.shape, value.dtype, value.device, value.requires_grad) if is_tensor else None


def _said(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"type {type(value).__name__}"
    gradient = ", requires_grad=True" if value.requires_grad else ""
    return f"shape {tuple(value.shape)}, {value.dtype}, on {value.device}{gradient}"


class _Captured:
    """A captured step: the graph, its memory, and what it has taken for granted."""

    def __init__(
        self,
        graph: Any,
        taken: _Taken,
        inputs: _Inputs,
        outputs: Any,
        grads: Sequence[torch.Tensor | None],
    ) -> None:
        """grads: ``.grad`` of the optimizers' parameters before the capture."""
        self._graph = graph
        self._taken = taken
        self._inputs = inputs
        self._outputs = outputs
        # As after every replay. Those that were there before it as well are added to, or zeroed in place.
        self._grads = [parameter.grad for parameter in taken.parameters]
        triples = zip(taken.parameters, grads, self._grads, strict=True)
        self._kept = [(p, now) for p, old, now in triples if old is not None and old is now]

    def compare(self, args: Any, kwargs: Any) -> None:
        """Raise StateError if a replay would not be what the step is now."""
        self._inputs.compare(args, kwargs)
        self._taken.refuse_changes(f"undo that. {_AGAIN}".rstrip("."))
        if not are_sharded(self._taken.units):
            unit = next(unit for unit in self._taken.units if not unit.is_sharded)
            raise StateError(
                f"{unit.label}: it is unsharded, and would not show what a replay writes to its shards. Call reshard() first."
            )
        if any(parameter.grad is not grad for parameter, grad in self._kept):
            raise StateError(
                "capture_step: the step keeps gradients from one call to the next, and they were replaced meanwhile "
                f"(zero_grad()). Let the step itself zero gradients. {_AGAIN}"
            )

    def replay(self, args: Any, kwargs: Any) -> Any:
        """Do one step by a replay; return copies of its results."""
        self._inputs.fill(args, kwargs)
        self._graph.replay()
        for parameter, grad in zip(self._taken.parameters, self._grads, strict=True):
            if parameter.grad is not grad:
                parameter.grad = grad
        return pytree.tree_map_only(torch.Tensor, torch.clone, self._outputs)


def _refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise UnsupportedError for options of optimizers with which replays would repeat numbers of the host's."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            if group.get("capturable") is False:
                raise UnsupportedError(
                    f"capture_step: {name} was built without capturable=True, so it counts its steps on the host, where no "
                    f"replay counts. Build it as {name}(..., capturable=True)."
                )
            device = local_part(group["params"][0]).device
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.device != device:
                    raise UnsupportedError(
                        f"capture_step: {key!r} of {name} is a tensor on {value.device}, which is read when the step is "
                        f'captured, and never again. Build it with {key}=torch.tensor(..., device="{device.type}").'
                    )


def _refuse_state(optimizers: Sequence[Optimizer]) -> None:
    """Raise UnsupportedError for state of optimizers that replays would not advance."""
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            device = local_part(parameter).device
            for key, value in state.items():
                is_there = isinstance(value, torch.Tensor) and local_part(value).device == device
                if value is not None and not is_there:
                    raise UnsupportedError(
                        f"capture_step: {type(optimizer).__name__} keeps {key!r} of its state on the host, where no replay "
                        "advances it. Use an optimizer that takes capturable=True, such as AdamW, or one without such "
                        "state, such as SGD."
                    )
