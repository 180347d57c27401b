"""One parameter in its two forms.

[Note: Two forms] A managed parameter is two ``nn.Parameter`` objects. The *sharded* one is what
users, optimizers and state dicts see: a DTensor whose local tensor is this rank's shard, or a piece
of a flat buffer (see `flat`). The *unsharded* one has the original shape and the compute dtype and
takes its place on the modules (see `Slot`) from unshard to reshard; autograd accumulates into its
``.grad``. It is a plain tensor, or, if the parameter was a DTensor before it was sharded (tensor
parallel), a DTensor over the memory of this rank's part. Both live as long as the unit: optimizers
refer to the sharded one, autograd's graph and the user's hooks to the unsharded one. What changes
is the memory under them (see `buffers`).
"""

import abc
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.params.form import ParamForm, UnitMesh, redistributed, with_dtype
from fullshard.engine.runtime import out_of_context, passing_through
from fullshard.errors import StateError
from fullshard.plan.gradient_dtypes import GradDtype, GradientDtypes
from fullshard.plan.layout import ParamSpec
from fullshard.plan.units import clean_name
from fullshard.policies import MixedPrecisionPolicy, UnitConfig
from fullshard.torch_private import AsyncCollectiveTensor, are_transforms_active

# Attributes of parameters. `copy.deepcopy` and `torch.utils.swap_tensors` carry them to others, so
# the second says by `id` whose the first is.
_OWNER = "_fullshard_owner"  # on original and sharded parameters: a reference to their manager
_MARKED = "_fullshard_marked"  # on the same: `id` of the parameter that was marked
STANDS_FOR = "_fullshard_stands_for"  # on unsharded parameters: a reference to their manager


@dataclasses.dataclass(slots=True)
class Count:
    """A counter of events in this process, which importers share."""

    value: int = 0


# Calls of `mark_owner`. As long as it stays, no parameter has become a sharded form, and what was
# found out about optimizers' parameters still holds (`checks.advice`).
marks = Count()


class Slot:
    """A place where a parameter is registered: ``module.name``. A tied parameter has several.

    registry: the module's ``_parameters``. The module itself is referred to weakly: a strong
        reference would close a cycle, and ``del model`` would free memory only at the next garbage
        collection.
    by_setattr: registering has to go through the module's own ``__setattr__``.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self.registry = module._parameters
        # nn.LSTM and its like do: they keep `_flat_weights`, a list of the registered weights.
        self.by_setattr = type(module).__setattr__ is not nn.Module.__setattr__

    @property
    def current(self) -> nn.Parameter | None:
        return self.registry.get(self.name)

    def register(self, parameter: nn.Parameter) -> None:
        """Register a parameter in place of the one that is there."""
        # Nearly always an entry of a dictionary is all: `nn.Module.__setattr__` costs several times
        # as much, and this happens to every parameter four times a step.
        module = self.module() if self.by_setattr else None
        if module is None:
            self.registry[self.name] = parameter
        else:
            setattr(module, self.name, parameter)

    def remove(self) -> None:
        """Register nothing under this name."""
        self.registry.pop(self.name, None)

    def put_aside(self, tensor: torch.Tensor) -> None:
        """Make a tensor the module's attribute without registering it as a parameter."""
        self.remove()
        if self.by_setattr and (module := self.module()) is not None:
            # For the module's own bookkeeping. It may register the tensor, if that is a parameter.
            setattr(module, self.name, tensor)
            self.remove()
        self.shadow(tensor)

    def shadow(self, tensor: torch.Tensor) -> None:
        """Let ``module.name`` return a tensor, without changing what is registered."""
        module = self.module()
        if module is not None:
            # Python looks here first; parameters are found by `nn.Module.__getattr__`, after it.
            module.__dict__[self.name] = tensor

    def take_back(self, parameter: nn.Parameter) -> None:
        """Register a parameter again where `put_aside` had put a tensor."""
        self.drop_shadow()
        self.register(parameter)

    def drop_shadow(self) -> None:
        """Let ``module.name`` return the registered parameter again."""
        module = self.module()
        if module is not None:
            module.__dict__.pop(self.name, None)


class Watch(functools.partial[None]):
    """A `register_hook` hook on a sharded parameter that is ours: only autograd calls it."""

    __torch_unserializable__ = True  # saving the parameter need not warn


class ShardHolder:
    """The owner of one parameter that an optimizer updates: it is given the reduced gradient.

    Each managed parameter is its own, except for those inside a flat parameter, which share one
    (`flat.FlatHolder`).

    sharded: what the optimizer updates. Its ``grad`` is the reduced gradient.
    steps: counts those of each optimizer that has had it, also of one that is gone (`checks.optimizers`).
    """

    sharded: nn.Parameter
    steps: list[Count]

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, as a plain tensor."""
        return self.sharded

    @property
    def local_grad(self) -> torch.Tensor | None:
        """This rank's part of the reduced gradient, as a plain tensor; None if there is none."""
        return self.sharded.grad

    @property
    def reduced_hooks(self) -> list[Callable[[torch.Tensor], Any]]:
        """Users' `register_hook` hooks, to call with the reduced gradient: autograd never sees it."""
        hooks = self.sharded._backward_hooks or {}
        return [hook for hook in hooks.values() if type(hook) is not Watch]

    @property
    def post_accumulate_hooks(self) -> list[Callable[[torch.Tensor], None]]:
        """Hooks to call once the reduced gradient is there (optimizers in backward, say)."""
        hooks = self.sharded._post_accumulate_grad_hooks
        return [*hooks.values()] if hooks else []

    def wrap_shard(self, local: torch.Tensor) -> torch.Tensor:
        """Return a local tensor in the type that users see shards and gradients in.

        A DTensor, or the tensor itself in flat units. No copy: the result uses its memory.
        """
        return local


class ManagedParameter(ShardHolder, abc.ABC):
    """A parameter that a unit shards. See [Note: Two forms].

    shape: of the tensor that is cut over the shard axis: the parameter, or this rank's local tensor
        if it was a DTensor before.
    sharded: the sharded form. Its ``grad`` is the reduced gradient, unless ``holder`` is another.
    unsharded: the unsharded form; None until `create_unsharded`.
    accumulated_grad: sum of full gradients of backwards that did not reduce (`gradients.accumulation`).
    unit: returns the `Unit` that it belongs to, or None if that is gone.
    backward: of its unit's model.
    original: returns the parameter that it was made of, or None if nobody refers to that any more.
    is_hidden: another parameter, ``holder.sharded``, says whether it is trained.
    gradient_hooks: the dictionary of `register_hook` hooks from before sharding. They are meant for
        whole gradients, so the unsharded form calls them.
    """

    is_hidden = False

    def __init__(self, original: nn.Parameter, slots: list[Slot], form: ParamForm) -> None:
        self.slots = slots
        self.form = form
        self.names = [slot.name for slot in slots]  # fully qualified once the root is known
        self.unsharded: nn.Parameter | None = None
        self.accumulated_grad: torch.Tensor | None = None
        self.unit: Callable[[], GradientTaker | None] = _nobody  # a weak reference
        self.backward = Backward()
        self._whole: nn.Parameter | None = None  # what `show_whole` has registered
        # `requires_grad` of both forms when they last agreed: the form that differs from it now is
        # the one that the user has changed since.
        self._required_grad = original.requires_grad
        # The node that accumulates gradients on the unsharded form, kept for its hook; None if it can
        # have no gradient.
        self._accumulator: Any = None
        self.gradient_hooks: Any = original._backward_hooks
        self._unsharded_grad_dtype = GradDtype()
        self.original: Callable[[], nn.Parameter | None] = weakref.ref(original)
        self.steps = []
        self.shape = tuple(local_of(original).shape)

    def copy(self, sharded: nn.Parameter, slots: list[Slot]) -> "ManagedParameter":
        """Return a manager for a copy of the sharded parameter that is registered in ``slots``.

        For ``copy.deepcopy`` of a model: the copy has no memory, gradients or hooks yet.
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.slots, other.names, other.sharded = slots, list(self.names), sharded
        other.unsharded = other.accumulated_grad = other.gradient_hooks = other._whole = None
        other._accumulator = None
        other.original = _nobody
        other.steps = []
        mark_owner(sharded, other)
        return other

    def add_slot(self, slot: Slot) -> None:
        """Register it in another place, too, from the next time on that a form is shown."""
        self.slots.append(slot)
        if (unit := self.unit()) is not None:
            unit.slots_change()

    # What it is

    @property
    def name(self) -> str:
        """Its first name, for messages."""
        return self.names[0] if self.names else self.slots[0].name

    def _places(self) -> list[str]:
        """Return its places, for messages: by its names, or by the modules' classes if some are of another root."""
        if len(self.names) == len(self.slots):
            return self.names
        return [f"{slot.name} of {type(slot.module()).__name__}" for slot in self.slots]

    def names_among(self, paths: Mapping[int, Sequence[str]]) -> list[str]:
        """Return its names, one per use, by the paths of modules below the root, by `id`."""
        uses = [(slot, paths.get(id(slot.module()), ())) for slot in self.slots]
        return [
            f"{path}.{slot.name}" if path else slot.name
            for slot, its in uses
            for path in map(clean_name, its)
        ]

    @property
    @abc.abstractmethod
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""

    @property
    def is_only_registered(self) -> bool:
        """True if a form is shown by setting one dictionary entry per slot, and by nothing else."""
        return not any(slot.by_setattr for slot in self.slots)

    @property
    def requires_grad(self) -> bool:
        return self.sharded.requires_grad

    @property
    def holder(self) -> ShardHolder:
        """The object whose ``sharded`` the optimizer updates and gets ``.grad``: itself by default."""
        return self

    @property
    def is_extended(self) -> bool:
        """True if it is gathered by its own method (``fsdp_pre_all_gather``), or has to be."""
        return False

    def spec(self, policy: MixedPrecisionPolicy) -> ParamSpec:
        """Return its shape and dtypes for planning, as they are now: ``model.half()`` changes them.

        Only floating-point parameters are cast to the policy's ``param_dtype``.
        """
        dtype = self.holder.sharded.dtype
        chosen = self.form.compute_dtype or policy.param_dtype
        compute_dtype = chosen if dtype.is_floating_point else None
        return ParamSpec(self.name, self.shape, dtype, compute_dtype or dtype, self.form.shard_dim)

    # Its gradient

    def take_gradient(self) -> torch.Tensor | None:
        """Return this rank's full gradient as a plain tensor, and clear it; None if there is none.

        Its shape is ``shape``. A DTensor's gradient, or one that is `Unfinished`, is first
        redistributed to the placements of the parameter (collective over its mesh), except for
        partial sums over data-parallel axes, which the reduction completes. Raises StateError for sparse
        gradients, and if the parameter is a DTensor but its gradient is not.
        """
        if self.unsharded is None or self.unsharded.grad is None:
            return None
        grad: torch.Tensor = self.unsharded.grad
        # Cleared at once: a unit that runs twice in one backward is taken from twice, and what has
        # been reduced must not be reduced again.
        self.unsharded.grad = None
        if self.form.unsharded is not None:
            if isinstance(grad, AsyncCollectiveTensor):
                grad = grad.wait()
            if not isinstance(grad, DTensor):
                raise StateError(
                    f"{self.name} is a DTensor, but its gradient is a {type(grad).__name__}. "
                    "Convert the module's inputs with DTensor.from_local (parallelize_module does)."
                )
            grad = redistributed(grad, self.form.finished(grad.placements))
        if grad.layout is not torch.strided:
            raise StateError(
                f"{self.name}: its gradient is sparse, which cannot be reduced. Build the "
                "embedding with sparse=False."
            )
        if self.form.unfinished is not None:
            grad = self.form.unfinished.finish(grad)
        return grad

    @abc.abstractmethod
    def gradient_dtypes(
        self, config: UnitConfig, seen: torch.dtype | None = None
    ) -> GradientDtypes:
        """Return the dtypes of its gradients, by what users say of it now.

        seen: the dtype in which the last one came, if they may come in any.
        """

    def add_gradient(self, grad: torch.Tensor) -> None:
        """Add a full gradient to what autograd leaves, as if autograd had computed it.

        Hooks from before sharding see it by itself.
        """
        for hook in list((self.gradient_hooks or {}).values()):
            result = hook(grad)
            grad = grad if result is None else result
        self.accumulate(grad)

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add a full gradient of any dtype to what autograd leaves, past all hooks."""
        unsharded = self.unsharded
        assert unsharded is not None
        grad = grad.to(unsharded.grad_dtype or grad.dtype)  # None takes any
        if unsharded.grad is not None:
            unsharded.grad.add_(grad)
        else:
            # A copy: the gradient may be another tensor's as well, or be expanded.
            unsharded.grad = grad.clone(memory_format=torch.contiguous_format)

    def set_accumulation_dtype(self, said: GradDtype) -> None:
        """Set the dtype in which autograd accumulates full gradients, in place of the compute dtype."""
        self._unsharded_grad_dtype = said
        if self.unsharded is not None:
            self._say_grad_dtype(self.unsharded)

    def _say_grad_dtype(self, unsharded: nn.Parameter) -> None:
        said = self._unsharded_grad_dtype
        dtype = said.dtype if said.is_set else unsharded.dtype
        if unsharded.grad_dtype != dtype:
            unsharded.grad = None  # of a pass that ended; torch refuses one of another dtype
            unsharded.grad_dtype = dtype

    @abc.abstractmethod
    def follow_grad_dtype(self) -> None:
        """Take over a ``grad_dtype`` that users have set on the sharded form, or set it there.

        Conversions and loading make new parameters, which say nothing; then the old word holds.
        """

    # Its forms

    def create_unsharded(self, tensor: torch.Tensor) -> None:
        """Create the unsharded form over this memory, or move the existing one there.

        tensor: in the compute dtype, of shape ``shape``. It has to have memory under it for now;
        that may be freed afterwards.
        """
        with torch.inference_mode(False), torch.no_grad():
            # A parameter cannot change its dtype under the references that autograd and users have,
            # so another dtype makes another one. Else the object stays: see [Note: Two forms].
            if self.unsharded is None or self.unsharded.dtype != tensor.dtype:
                if self.unsharded is not None and self._accumulator is not None:
                    # A graph may be older than this: what it brings later goes to the new form.
                    self.unsharded.requires_grad_().register_post_accumulate_grad_hook(_hand_over)
                whole = tensor
                if self.form.unsharded is not None:
                    spec = with_dtype(self.form.unsharded, tensor.dtype)
                    whole = DTensor(tensor, spec, requires_grad=False)
                can_be_trained = whole.is_floating_point() or whole.is_complex()
                self.unsharded = nn.Parameter(whole, requires_grad=can_be_trained)
                setattr(self.unsharded, STANDS_FOR, Reference(self))
                self._say_grad_dtype(self.unsharded)
                if can_be_trained:
                    self._watch_gradients(self.unsharded)
                    self.unsharded.requires_grad_(self.requires_grad)
                    self._required_grad = self.requires_grad
                if self.form.annotate is not None:
                    self.form.annotate(self.unsharded)
                if self.gradient_hooks is not None:
                    # The same dictionary, so that removing a hook there removes it here.
                    self.unsharded._backward_hooks = self.gradient_hooks
            elif self.form.unsharded is not None:
                self.unsharded._local_tensor = tensor  # type: ignore[attr-defined]
            else:
                is_elsewhere = self.unsharded.device != tensor.device
                self.unsharded.data = tensor
                if is_elsewhere and self._accumulator is not None:
                    self._watch_gradients(self.unsharded)

    def _watch_gradients(self, unsharded: nn.Parameter) -> None:
        """Have the unit told of every gradient of the unsharded form, just before it is accumulated.

        Whatever led there: outputs may have shown nothing. Autograd drops a gradient if the leaf is
        frozen by then; what users have frozen or unfrozen since may be the sharded form alone.
        """
        required_grad = unsharded.requires_grad
        self._accumulator = accumulator_of(unsharded.requires_grad_())
        unsharded.requires_grad_(required_grad)
        self._accumulator.register_prehook(functools.partial(_gradient_arrives, Reference(self)))

    def show_sharded(self) -> None:
        """Register the sharded form in all slots."""
        for slot in self.slots:
            slot.register(self.sharded)

    def show_unsharded(self) -> None:
        """Register the unsharded form in all slots."""
        unsharded = self.current_unsharded()
        for slot in self.slots:
            slot.register(unsharded)

    def current_unsharded(self) -> nn.Parameter:
        """Return the unsharded form, with ``requires_grad`` brought in line with the sharded one.

        If the user changed it on the unsharded form, while that was in sight, the sharded one
        follows instead.
        """
        unsharded = self.unsharded
        assert unsharded is not None
        if unsharded.requires_grad != self.requires_grad:
            # Parameters inside a flat one are all trained or all frozen: the flat one decides.
            if self.requires_grad is self._required_grad and self.holder is self:
                self.sharded.requires_grad_(unsharded.requires_grad)
            else:
                unsharded.requires_grad_(self.requires_grad)
        self._required_grad = self.requires_grad
        return unsharded

    @property
    def is_trained_too_late(self) -> bool:
        """True if the sharded form was unfrozen since the whole one was shown, which is frozen."""
        unsharded = self.unsharded
        return (
            not self._required_grad
            and self.requires_grad
            and unsharded is not None
            and not unsharded.requires_grad
        )

    # The whole parameter, shown for a while outside of forward and backward: see `engine.whole`

    def show_whole(self, full: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Show a whole tensor, and a whole gradient, in place of the shard.

        full, grad: of shape ``shape``, in the dtype of the shards; used without a copy.
        """
        self._whole = nn.Parameter(self.as_unsharded(full), requires_grad=self.requires_grad)
        self._whole.grad = None if grad is None else self.as_unsharded(grad)
        setattr(self._whole, STANDS_FOR, Reference(self))
        for slot in self.slots:
            slot.take_back(self._whole)

    def hide_whole(self, shard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Show the shard again. Return the whole tensor and gradient as users have left them.

        shard: its memory.
        """
        whole, self._whole = self._whole, None
        assert whole is not None
        current = next((s.current for s in self.slots if s.current is not whole), whole)
        whole = whole if current is None else current  # one that somebody has put in its place
        self.show_sharded()
        grad = whole.grad
        return local_of(whole.detach()), None if grad is None else local_of(grad)

    @abc.abstractmethod
    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's part of a whole tensor, in ``shard_shape``."""

    def as_unsharded(self, full: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor in the type of the unsharded form: a DTensor if it was one before."""
        spec = self.form.unsharded
        if spec is None:
            return full
        return DTensor(full, with_dtype(spec, full.dtype), requires_grad=False)

    @property
    def forms(self) -> tuple[nn.Parameter | None, ...]:
        """Every parameter that this manager registers at some moment."""
        return (self.sharded, self.unsharded, self._whole)

    def replaces(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is an object that the sharded form has taken the place of.

        That is an original or an unsharded form: an optimizer that updates it trains nothing. A copy
        has the attributes of what it was copied from, but another ``id``, so it does not count.
        """
        if parameter is self.sharded or parameter is self.holder.sharded:
            return False
        is_former = getattr(parameter, _MARKED, None) == id(parameter)
        return is_former or any(parameter is form for form in self.forms)

    @property
    def is_replaced(self) -> bool:
        """True if somebody has registered another parameter in place of its forms, in any slot."""
        return any(map(self._is_other, (slot.current for slot in self.slots)))

    def _is_other(self, current: nn.Parameter | None) -> bool:
        return current is not None and all(current is not form for form in self.forms)

    def replacement(self) -> nn.Parameter | None:
        """Return the first parameter that somebody has registered in place of its forms.

        It is taken for all slots, as a tied parameter is one. Warns if other slots were left as they were.
        Raises StateError for one whose own place has another one now: its memory would get that one's
        values before its own are read.
        """
        currents = [slot.current for slot in self.slots]
        others = [
            current for current in currents if current is not None and self._is_other(current)
        ]
        if not others:
            return None
        refuse_temporary(others[0], self.name)
        owner = manager_of(others[0])
        if owner is not None and owner is not self and owner.is_replaced:
            raise StateError(
                f"{self.name} was replaced by {owner.name}, which was replaced as well. Parameters of sharded "
                "modules cannot change places: exchange the modules, or copy the values of one to the other "
                "(under torch.no_grad(), a.copy_(b))."
            )
        if len(others) < len(currents):
            places = self._places()
            replaced, left = (
                [
                    place
                    for place, each in zip(places, currents, strict=True)
                    if self._is_other(each) is other
                ]
                for other in (True, False)
            )
            warnings.warn(
                f"{', '.join(replaced)} was replaced, and {', '.join(left)}, which shares its weight, was "
                "not. One parameter was sharded for both, so both have the new one now. To have two, "
                "untie them before sharding.",
                UserWarning,
                stacklevel=2,
            )
        return others[0]

    def has_moved(self, memory: torch.Tensor) -> bool:
        """Return whether another parameter is registered, or the shard is not over ``memory`` any more."""
        return self.is_replaced or not self.is_at(memory)

    @abc.abstractmethod
    def follow_replacement(self) -> None:
        """Take a parameter that somebody registered as the sharded form, if there is one.

        Raises StateError if it does not fit. `move_shard` brings it into the unit's memory.
        """

    @abc.abstractmethod
    def is_at(self, memory: torch.Tensor) -> bool:
        """Return whether this rank's shard is over ``memory``, the unit's, and looks like it."""

    @abc.abstractmethod
    def move_shard(self, target: torch.Tensor) -> None:
        """Make ``target`` the memory of this rank's shard, with its values unless it is on meta."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def refuse_temporary(registered: torch.Tensor, name: str) -> None:
    """Raise StateError if what is registered as a parameter is none: it stands there for one call alone.

    Taken for a replacement, its values would stay in the model when the call has ended.
    """
    if not isinstance(registered, nn.Parameter):
        raise StateError(
            f"{name}: a tensor that is no nn.Parameter is registered in its place, as "
            "torch.func.functional_call does for one call. A sharded module computes with its own "
            "parameters only: write the values into them and write the old ones back afterwards "
            "(under torch.no_grad(), p.copy_(value)), or call a copy that is not sharded."
        )


class Backward:
    """The backward of a model that is under way, which its units share with the `Iteration`.

    end: a weak reference to the callback at its end. Autograd alone refers to that, until the backward has
        ended or raised; so ``end()`` is None unless one runs.
    """

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Refer to nothing: no backward of the model runs."""
        self.end: weakref.ref[Any] = weakref.ref(set())  # of an object that is gone at once


class GradientTaker(Protocol):
    """The unit of a parameter, as autograd's hooks call it."""

    mesh: UnitMesh

    def gradient_arrives(self, param: ManagedParameter) -> None: ...

    def slots_change(self) -> None: ...


class Reference(weakref.ref["ManagedParameter"]):
    """A weak reference from a parameter to its manager.

    Weak, since the manager refers to the parameter. A parameter with one can be pickled and copied:
    what is unpickled has no manager, a copy refers to the original's.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _nobody, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Reference":
        return self


# What a `Reference` is unpickled by. Pickles contain its name and module, so it may not move.
def _nobody() -> None:
    return None


def mark_owner(parameter: nn.Parameter, manager: ManagedParameter) -> None:
    """Make ``manager`` the one that `owner_of` returns for a parameter."""
    marks.value += 1
    setattr(parameter, _OWNER, Reference(manager))
    setattr(parameter, _MARKED, id(parameter))


def manager_of(parameter: nn.Parameter) -> ManagedParameter | None:
    """Return the manager of a parameter, given any of its forms; None if it has none."""
    reference = getattr(parameter, STANDS_FOR, None)
    return owner_of(parameter) or (None if reference is None else reference())


def owner_of(parameter: nn.Parameter) -> ManagedParameter | None:
    """Return the manager of a parameter, given the original or the sharded form; None if none."""
    reference = getattr(parameter, _OWNER, None)
    return None if reference is None else reference()


class _Edge(torch.autograd.Function):
    """Leads to a leaf, of whatever class, without an operation on it."""

    @staticmethod
    def forward(_: torch.Tensor) -> torch.Tensor:
        return torch.empty((), device="cpu")

    @staticmethod
    def setup_context(*_: Any) -> None:
        pass


def accumulator_of(leaf: torch.Tensor) -> Any:
    """Return the node that accumulates a leaf's gradient: the same as long as somebody refers to it."""
    if are_transforms_active():  # inside of which a function's node would be another level's
        return out_of_context(functools.partial(accumulator_of, leaf))
    with torch.inference_mode(False), torch.enable_grad():
        edge: Any = _Edge.apply(leaf)  # type: ignore[no-untyped-call]
    return edge.grad_fn.next_functions[0][0]


@passing_through
def _gradient_arrives(reference: Reference, _: Any) -> None:
    """Tell the unit that autograd is about to accumulate a gradient on the unsharded form.

    Called for each parameter in each backward, so what nearly always holds is looked at here: the
    model's backward has begun, and both forms agree on being trained.
    """
    manager = reference()
    if manager is None:
        return
    if manager.backward.end() is None:
        if (unit := manager.unit()) is None:
            return
        unit.gradient_arrives(manager)
    # Frozen now, in the sharded form alone: its reduction leaves out what arrives.
    unsharded = manager.unsharded
    if manager.is_hidden or not (manager._required_grad and unsharded.requires_grad):  # type: ignore[union-attr]
        manager.current_unsharded()


def _hand_over(replaced: torch.Tensor) -> None:
    """Give a gradient of an unsharded form that another has replaced to that one."""
    manager = getattr(replaced, STANDS_FOR)()
    if manager is not None and replaced.grad is not None:
        grad, replaced.grad = replaced.grad, None
        with torch.no_grad():
            manager.accumulate(grad)


def said_grad_dtype(parameter: torch.Tensor) -> GradDtype:
    """Return what was set as a parameter's ``grad_dtype``.

    Before torch 2.15 nobody knows whether it was set to the parameter's own dtype, which means the
    same as leaving it, until the parameter is converted.
    """
    is_set = getattr(parameter, "_has_grad_dtype_override", None)
    dtype = parameter.grad_dtype
    if is_set is None:
        is_set = dtype != parameter.dtype
    return GradDtype(True, dtype) if is_set else GradDtype()
