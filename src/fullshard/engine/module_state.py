"""The state of a sharded module: its units, its place in the model, and its training state.

The module that runs forward first becomes the root. Names, ties and memory are settled then, and
one `Iteration` serves the whole model.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine.adoption import adopt, follow_changes, move_parameters
from fullshard.engine.checks.advice import When, advise
from fullshard.engine.checks.gradients import watch_direct_gradients
from fullshard.engine.checks.model import Model, is_stray, registrations
from fullshard.engine.iteration import NOT_WARM, Iteration, Stage
from fullshard.engine.nodes import Mark
from fullshard.engine.observer import on_root
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.restoring import naming_lack
from fullshard.engine.runtime import passing_through
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, StateError
from fullshard.plan.units import clean_name, lowest_common_unit
from fullshard.policies import MixedPrecisionPolicy, TrainingState, UnitConfig
from fullshard.process_hooks import first_use

HOOKS = "_fullshard_hooks"  # an attribute of sharded modules: their `Hooks`, which have the state
_ROOT_FINALIZES = "set_manual_backward_finalization must be called on the root FSDP module."

# The units of all states in this process, in their order.
_units: "weakref.WeakKeyDictionary[Unit, None]" = weakref.WeakKeyDictionary()


class ModuleState:
    """The state of a sharded module, or of several that were sharded together.

    all_units: one unit per mesh that the module's parameters are sharded over, at least one. A unit
        may own no parameters, if nested modules have taken them all.
    units: those that own parameters; ties may move some when the root is initialised.
    training_state: whether the module is in forward, in backward, or idle.
    to_run: ids of the modules that have yet to run this forward, if several share the state.
    iteration: a function that returns the model's `Iteration`; None before the model's first use.
    mark: the mark on the only input of a forward under way.
    outer: the state of the innermost sharded module around it; None for a root.
    borrowed: parameters of these modules that units of other states own. gathered: those of the model's that other roots
        own and a forward of these modules has gathered, see `hooks`.
    joined: units inside that this module gathers and frees with its own (see `hooks`, Note: Joined units).
    said: what the program has said of the whole model: ``is_last_backward`` and ``post_optim_event``, and until
        it has a root, ``manual_finalization``. All states of a model have one, once that is known.
    is_wrapper: whether the module is a wrapper, which may be wrapped again together with its model.
    """

    def __init__(
        self, modules: Sequence[nn.Module], units: Sequence[Unit], *, is_wrapper: bool = False
    ) -> None:
        self.all_units = list(units)
        self.units = [unit for unit in self.all_units if unit.params]
        self.training_state = TrainingState.IDLE
        self.to_run: set[int] = set()
        self.mark: Mark | None = None
        self.iteration: Callable[[], Iteration | None] = _no_iteration
        self.hooks: Callable[[], Any] = _no_iteration  # a weak reference: they own this
        self.is_wrapper = is_wrapper
        # All that refers to a module is weak: modules own their state, and `del model` has to free
        # memory at once, without the garbage collector.
        self.ignored: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules inside, not sharded
        # Names of parameters that are not sharded, of modules that are.
        self.ignored_names: weakref.WeakKeyDictionary[nn.Module, set[str]]
        self.ignored_names = weakref.WeakKeyDictionary()
        # The dtypes that buffers had before they were cast, by name.
        self.buffer_dtypes: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]]
        self.buffer_dtypes = weakref.WeakKeyDictionary()
        for unit in units:
            unit.owner = weakref.ref(self)
            _units[unit] = None
        self._modules = [weakref.ref(module) for module in modules]
        self.borrowed: list[ManagedParameter] = []
        self.gathered: list[ManagedParameter] = []
        # But these: whose units own what is borrowed. It is a cycle where both own some.
        self._owners: list[nn.Module] = []
        self._own_iteration: Iteration | None = None  # of a root, which owns it
        self.is_root = False
        self._root: weakref.ref[ModuleState] | None = None
        # Of a root: the others of the model. Itself among them would be a cycle.
        self._inner: list[ModuleState] = []
        self.joined: list[Unit] = []
        self._outer: weakref.ref[ModuleState] | None = None
        self.said: dict[str, Any] = {}
        self._config_before: UnitConfig | None = None  # while in full precision
        self._num_registrations = (
            registrations.value
        )  # in the process, when strays were last looked for
        self._programs_modules: tuple[int, list[weakref.ref[nn.Module]]] = -1, []
        self._strays: set[str] = set()  # names of those found then
        first_use()

    def check_idle(self, call: str) -> None:
        """Raise MisuseError during forward or backward; forget one that an exception has ended.

        call: what may not be called then.
        """
        iteration = self.known_iteration
        if iteration is not None:
            if iteration.has_raised_in_forward(is_root=False):
                self.forget(keeps_gradients=True)
            self.forget_stale_backward(iteration)
        if self.training_state is not TrainingState.IDLE:
            raise MisuseError(
                f"{self.all_units[0].label}: {call} is called during its forward or backward. Call it "
                "outside; inside, the module's own parameters are whole."
            )

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return self.all_units[0].config.mp_policy

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that share this state, as far as they are alive."""
        return [module for reference in self._modules if (module := reference()) is not None]

    @property
    def outer(self) -> "ModuleState | None":
        return self._outer() if self._outer is not None else None

    @property
    def root_module(self) -> nn.Module | None:
        """The model's root module, once its first use has decided it."""
        root = self._root() if self._root is not None else None
        return None if root is None else root.modules[0]

    @property
    @passing_through
    def known_iteration(self) -> Iteration | None:
        """The iteration of the model this belongs to; None before the model's first use."""
        return self.iteration()

    def iteration_or_initialise(self) -> Iteration:
        """Return the model's iteration; before the model's first use, make this module its root.

        For what runs the model. To read or change a setting, use `known_iteration`: a module that
        became a root because of a question would make the real root's forward raise.
        """
        return self.iteration() or self.initialise()

    def set_manual_finalization(self, *, enabled: bool) -> None:
        """Let the program end the model's backwards, or let them end by themselves.

        Raises StateError on a module that is not the root, and once a backward has begun.
        """
        iteration = self.iteration()
        if iteration is None:
            self.said["manual_finalization"] = enabled
            return
        if not self.is_root:
            raise StateError(_ROOT_FINALIZES)
        iteration.finalization.set_manual(enabled=enabled, in_backward=iteration.is_in_backward)

    @property
    def has_manual_finalization(self) -> bool:
        iteration = self.iteration()
        if iteration is None:
            return bool(self.said.get("manual_finalization"))
        return iteration.finalization.is_manual

    def initialise(self) -> Iteration:
        """Make this the root: settle names, ties and memory, and return the model's iteration.

        Every rank has to call it. Raises StateError for several modules at once, below a root that
        has run, for buffers on the meta device, and as `Unit.adopt` does; AllocationError where memory
        is lacking. Either way the module is no root yet, so the next forward begins here again.
        """
        if len(self._modules) > 1:
            names = ", ".join(type(module).__name__ for module in self.modules)
            raise StateError(
                f"FSDP requires a single root module but got {names}, which were sharded together "
                "and run first. Apply fully_shard to the module that contains them."
            )
        (root,) = self.modules
        if self.all_units[0].runtime.look():
            raise StateError(f"{type(root).__name__}: {NOT_WARM}")
        named = named_states(root)
        for name, state in named.items():
            # A wrapper that was below another one may be wrapped again elsewhere. A module that
            # fully_shard was applied to keeps its place in a model that has run.
            is_taken = state.is_root or (not state.is_wrapper and state.known_iteration is not None)
            if state is not self and is_taken:
                why = (
                    "it ran before the module that contains it, and so became a root of its own."
                    if state.is_root
                    else "it ran as a part of another root, and cannot belong to two."
                )
                raise StateError(
                    f"FSDP state has already been lazily initialized for {name}\nFSDP requires "
                    f"running forward through the root module first: {why}"
                )
            if state is not self and state.said.get("manual_finalization"):
                raise StateError(_ROOT_FINALIZES)
        self._inner = [state for state in dict.fromkeys(named.values()) if state is not self]
        self._num_registrations = min(state._num_registrations for state in self._states)
        # Names first: messages of all that follows have them, and the flight record compares them.
        for unit, name in names_of_units(named).items():
            unit.set_name(name)
        paths = paths_of(root)
        for unit in [unit for state in self._states for unit in state.all_units]:
            unit.params.rename(paths)
        # Before `adopt`, since a unit's layout changes with its parameters.
        move_parameters(moves_of_ties(root, named))
        gathered = parameters_of_others(root, named)
        for state in self._states:
            state.units = [unit for unit in state.all_units if unit.params]
        units = [unit for state in self._states for unit in state.units]
        for unit in units:
            with naming_lack(f"{unit.path}: first use", "Values are as they were."):
                adopt(unit)
        modules = [module for state in self._states for module in state.own_modules()]
        model = Model(root, modules, units, self.units, self.all_units[0].device)
        advise(When.HAS_MEMORY, model)
        # Only now, when all have memory: what raised until here may be done again from the start.
        for unit in self.all_units:
            unit.become_root()
        for state in self._states:
            state._cast_buffers()
        advise(When.IS_ROOT, model)
        watch_direct_gradients(units)
        kinds = list({type(module) for module in root.modules()})
        inner: Any = root.module if self.is_wrapper else root
        self._own_iteration = Iteration(units, kinds, type(inner).__name__)
        self.is_root = True
        for state in self._states:
            state.iteration = weakref.ref(self._own_iteration)
            state._root = weakref.ref(self)
            state._outer = None
        for name, state in named.items():
            # The innermost one that contains the module and is not its own.
            around = lowest_common_unit([name.rpartition(".")[0]], named) if name else None
            if around is not None and state._outer is None:
                state._outer = weakref.ref(named[around])
        said = self._own_iteration.said
        for state in reversed(self._states):  # the root's last: what it was told wins
            said.update(state.said)
            state.said = said
        is_manual = said.pop("manual_finalization", False)
        self._own_iteration.finalization.set_manual(enabled=is_manual, in_backward=False)
        for state in self._states:
            state.gathered = gathered.get(state, [])
            state.hooks().attach_lenders()
        for tell in on_root:
            tell(self)
        return self._own_iteration

    def lenders(self) -> list["ModuleState"]:
        """Return the states of other roots whose units own what is borrowed or gathered; keep their modules alive.

        Before the first use, which decides on roots and owners: all others whose units do.
        """
        own = self.known_iteration
        found = [
            each
            for each in owners_of([*self.borrowed, *self.gathered])
            if each is not self and (own is None or each.known_iteration is not own)
        ]
        self._owners = [module for each in found for module in each.modules]
        return found

    def _cast_buffers(self) -> None:
        """Cast the modules' floating-point buffers, if the policy asks for it."""
        dtype = self.all_units[0].config.buffer_dtype
        if dtype is None:
            return
        for module in self.own_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    self.buffer_dtypes.setdefault(module, {})[name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)

    def use_precision(self, *, full: bool) -> None:
        """Compute in the dtypes of the shards (full), or as the mixed-precision policy says.

        Call it between iterations. Buffers are cast back as well.
        """
        (unit,) = self.all_units
        if full == (self._config_before is not None):
            return
        self.iteration_or_initialise()
        if self._config_before is not None:
            config, self._config_before = self._config_before, None
            unit.configure(mp_policy=config.mp_policy, buffer_dtype=config.buffer_dtype)
        else:
            self._config_before = unit.config
            unit.configure(mp_policy=MixedPrecisionPolicy(), buffer_dtype=None)
            for module, dtypes in self.buffer_dtypes.items():
                for name, dtype in dtypes.items():
                    module._buffers[name] = module._buffers[name].to(dtype)  # type: ignore[union-attr]
        self._cast_buffers()
        if unit.params:
            adopt(unit)  # another compute dtype is another layout

    def own_modules(self) -> list[nn.Module]:
        """Return the modules, and those below them that have no state of their own."""
        return covered_modules(self.modules, lambda each: each not in self.ignored)

    def attributes(self) -> list[dict[str, Any]]:
        """Return the attributes of its own modules, in which a forward may leave what it computes: not torch's."""
        seen, own = self._programs_modules
        if seen != registrations.value:
            modules = self.own_modules()
            own = [
                weakref.ref(m) for m in modules if not type(m).__module__.startswith("torch.nn.")
            ]
            self._programs_modules = registrations.value, own
        return [vars(each) for reference in own if (each := reference()) is not None]

    def look_for_strays(self) -> None:
        """Warn of parameters that were added since the modules were sharded."""
        if self._num_registrations == registrations.value:
            return  # nothing was registered anywhere since
        self._num_registrations = registrations.value
        paths = {module: path for path, module in self.modules[0].named_modules()}
        strays = {
            f"{clean_name(paths[module])}.{name}".lstrip(".")
            for state in self._states
            for module in state.own_modules()
            for name, parameter in module._parameters.items()
            if is_stray(parameter) and name not in state.ignored_names.get(module, ())
        }
        advise(When.HAS_GROWN, sorted(strays - self._strays))
        self._strays = strays

    def forget_stale_backward(self, iteration: Iteration) -> None:
        """Reset the whole model if its last backward raised."""
        if iteration.stage >= Stage.BACKWARD and iteration.backward.end() is None:
            self.forget(keeps_gradients=False)

    def forget(self, *, keeps_gradients: bool) -> None:
        """Reset the whole model after an exception; see `reset`."""
        root = self._root() if self._root is not None else None
        assert root is not None
        root.reset(keeps_gradients=keeps_gradients)

    def reset(self, *, keeps_gradients: bool = False) -> None:
        """Forget an iteration that did not end; does nothing unless this is a root.

        keeps_gradients: whether gradients that earlier backwards accumulated are kept.
        """
        if self._own_iteration is None:
            return
        self._own_iteration.reset(keeps_gradients=keeps_gradients)
        for state in self._states:
            state.training_state = TrainingState.IDLE
            state.to_run.clear()
            state.mark = None

    @property
    def _states(self) -> list["ModuleState"]:
        """Of a root: the states of the whole model, its own first."""
        return [self, *self._inner]

    @property
    def everyone(self) -> list["ModuleState"]:
        """The states of the whole model; before its first use, this one alone."""
        root = self._root() if self._root is not None else None
        return root._states if root is not None else [self]

    def follow_changes(self) -> None:
        """Adopt at once what replaced shards, so that optimizers may rely on their addresses."""
        for unit in self.units:
            if any(param.local.is_meta for param in unit.params):
                unit.params.follow_replacements()  # the first forward gives them the unit's memory
            else:
                follow_changes(unit)


@passing_through
def _no_iteration() -> None:
    return None


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of a sharded module; None for any other."""
    hooks = module.__dict__.get(HOOKS)
    return None if hooks is None else hooks.state


def covered_modules(
    roots: Iterable[nn.Module], is_covered: Callable[[nn.Module], bool] = lambda _: True
) -> list[nn.Module]:
    """Return the roots and the modules below them, except those that an earlier call sharded.

    is_covered: a module for which it returns False is left out with everything below.
    """
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module in found or not is_covered(module):
            return
        found[module] = None
        for child in module.children():
            if state_of(child) is None:
                visit(child)

    for root in roots:
        visit(root)
    return list(found)


def is_anything_sharded() -> bool:
    return len(_units) > 0


def states_in(modules: Iterable[nn.Module]) -> list[ModuleState]:
    """Return the states of modules, once each, in their order."""
    return [*dict.fromkeys(state for each in modules if (state := state_of(each)) is not None)]


def owners_of(params: Iterable[ManagedParameter]) -> list[ModuleState]:
    """Return the states whose units own parameters now, once each."""
    units: Iterable[Any] = (unit for param in params if (unit := param.unit()) is not None)
    return [*dict.fromkeys(owner for unit in units if (owner := unit.owner()) is not None)]


def outermost(state: ModuleState) -> ModuleState:
    """Return the state of the largest sharded module in this process that contains one of a state."""
    inner = state.modules[0]
    states = [*dict.fromkeys(owner for unit in _units if (owner := unit.owner()) is not None)]
    around = [(each, m) for each in states for m in each.modules if inner in m.modules()]
    return max(around, key=lambda found: len(list(found[1].modules())))[0]


def flat_states() -> list[ModuleState]:
    """Return all states in this process whose units have their parameters in flat ones."""
    found = (unit.owner() for unit in _units if unit.params.is_flat)
    return [*dict.fromkeys(state for state in found if state is not None)]


def named_states(root: nn.Module) -> dict[str, ModuleState]:
    """Return the states in a model by the paths of their modules."""
    return {
        name: state
        for name, module in root.named_modules()
        if (state := state_of(module)) is not None
    }


def names_of_units(named: Mapping[str, ModuleState]) -> dict[Unit, str]:
    """Return the names of the states' units: the path of their module, or several, joined."""
    paths: dict[ModuleState, list[str]] = {}
    for path, state in named.items():
        paths.setdefault(state, []).append(clean_name(path))
    return {unit: ", ".join(names) for state, names in paths.items() for unit in state.all_units}


def paths_of(root: nn.Module) -> dict[int, list[str]]:
    """Return the paths of all modules in a model by `id`: several for one that stands in several places."""
    paths: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
    return paths


def moves_of_ties(
    root: nn.Module, named: Mapping[str, ModuleState]
) -> list[tuple[ManagedParameter, Unit, Unit]]:
    """Find tied parameters that have to move: (parameter, its unit, the unit it moves to).

    The latter is the unit of the innermost module that contains all modules using the parameter. A
    module that stands in several places uses it in each. Raises StateError if that module is sharded over other meshes.
    """
    paths = paths_of(root)
    around = {
        path: state
        for path, module in root.named_modules(remove_duplicate=False)
        if (state := state_of(module)) is not None
    }
    single = {name: state for name, state in named.items() if len(state._modules) == 1}
    moves: list[tuple[ManagedParameter, Unit, Unit]] = []
    for state in dict.fromkeys(named.values()):
        for unit, param, users in [
            (u, *tied) for u in state.units for tied in u.params.tied(paths)
        ]:
            nearest = [lowest_common_unit([user], around) for user in users]
            if all(name is not None and around[name] is state for name in nearest):
                continue  # all uses are in this state's modules
            common = lowest_common_unit(users, single)
            if common is not None and unit.params.is_flat and single[common] is not state:
                raise StateError(
                    f"{' and '.join(param.names)}: a module in several places, of which not all are below "
                    f"{unit.path!r}, whose flat parameter has its weights. Wrap the modules that share it together."
                )
            if common is not None:  # else they are below several roots, none of them this model
                moves.append((param, unit, _on_mesh_of(unit, single[common], param)))
    return moves


def parameters_of_others(
    root: nn.Module, named: Mapping[str, ModuleState]
) -> dict[ModuleState, list[ManagedParameter]]:
    """Find parameters of this model's modules that units of other roots own, by the state that gathers those.

    That is the one of the innermost module that contains all that use parameters of one owner. Raises StateError where one
    is computed with in another dtype than its owner's.
    """
    paths, states = paths_of(root), dict.fromkeys(named.values())
    found: dict[ModuleState, dict[ManagedParameter, list[str]]] = {}
    for user, param in [(each, param) for each in states for param in each.borrowed]:
        users = [path for slot in param.slots for path in paths.get(id(slot.module()), ())]
        owner = next(iter(owners_of([param])), None)
        if not users or owner is None or owner in states:
            continue
        own, its = (param.spec(each.policy).compute_dtype for each in (user, owner))
        if own != its:
            raise StateError(
                f"{param.names_among(paths)[0]} and {param.name} of {type(owner.modules[0]).__name__} are one tied "
                f"parameter, but their units compute in {own} and {its}. Give both one MixedPrecisionPolicy, or untie "
                "it before sharding."
            )
        found.setdefault(owner, {})[param] = users
    single = {name: state for name, state in named.items() if len(state._modules) == 1}
    gathered: dict[ModuleState, list[ManagedParameter]] = {}
    for uses in found.values():
        common = lowest_common_unit([*itertools.chain(*uses.values())], single)
        assert common is not None  # the root, at last
        gathered.setdefault(single[common], []).extend(uses)
    return gathered


def _on_mesh_of(unit: Unit, state: ModuleState, param: ManagedParameter) -> Unit:
    """Return the state's unit over the mesh of ``unit``. Raises StateError if there is none."""
    for other in state.all_units:
        if other.mesh.mesh == unit.mesh.mesh:
            return other
    raise StateError(
        f"{' and '.join(param.names)} are one tied parameter, but the modules that use it are "
        "sharded over different meshes. Untie it, or shard them over one mesh."
    )
