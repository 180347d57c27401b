"""Deep copies of sharded modules.

A model can be copied before its first forward only. After it, parameters, gradients and work in
flight belong to an iteration, which the copy would have to share.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import nn

from fullshard.engine.adoption import make_unit, use_comm
from fullshard.engine.hooks import Hooks, hooks_of
from fullshard.engine.params.managed import ManagedParameter, Slot, owner_of
from fullshard.engine.params.unit_params import UnitParams
from fullshard.engine.unit import Unit, choose_comms
from fullshard.errors import MisuseError


def copy_sharded(
    module: nn.Module, copy_plain: Callable[[nn.Module], nn.Module], memo: dict[int, Any]
) -> nn.Module:
    """Copy a module, the modules sharded together with it, and all below. Collective.

    copy_plain: deep-copies a module that carries no state of ours, filling ``memo``.
    memo: ``deepcopy``'s, from ids of originals to copies.

    Raises MisuseError once the model has run, and if the copy would share parameters or state with
    modules that are not copied.
    """
    modules = _sharded_together(module)
    if not memo and len(modules) > len(list(module.modules())):  # nothing around it is copied too
        raise MisuseError(
            f"{type(module).__name__} was sharded together with modules outside it, so it cannot "
            "be deep-copied alone. Copy a module that contains them all."
        )
    modules = {each: None for each in modules if id(each) not in memo}
    all_hooks = {hooks: None for each in modules if (hooks := hooks_of(each)) is not None}
    owners = dict.fromkeys(m for hooks in all_hooks for each in hooks.states for m in each.modules)
    for owner in owners if memo else ():  # so what is copied is around both, most likely
        if owner not in modules:
            deepcopy(owner, memo)
    _check(module, modules, all_hooks, memo)
    # State and classes are off while plain modules are copied: deepcopy would copy units and
    # process groups as well, and `__deepcopy__` of the classes leads back here.
    classes: dict[nn.Module, Any] = {
        each: type(each) for hooks in all_hooks for each in hooks.state.modules
    }
    for hooks in all_hooks:
        hooks.detach()
    for each, sharded in classes.items():
        each.__class__ = sharded.__mro__[sharded._orig_cls_mro_index]
    try:
        for each in dict.fromkeys([module, *classes]):  # those copied already are in the memo
            copy_plain(each)
    finally:
        for hooks in all_hooks:
            hooks.attach()
        for each, sharded in classes.items():
            each.__class__ = sharded
    # Units only now, when `memo` knows every module: a tied parameter is registered on several.
    new: dict[Hooks, Hooks] = {}
    own: set[ManagedParameter] = set()
    for hooks in all_hooks:
        copies = [memo[id(each)] for each in hooks.state.modules]
        new[hooks] = Hooks(copies, [_copy_unit(unit, memo) for unit in hooks.state.all_units])
        own.update(param for unit in new[hooks].state.all_units for param in unit.params)
        for original, copy in zip(hooks.state.modules, copies, strict=True):
            copy.__class__ = classes[original]
        for reference, name, method in hooks.methods:
            if (wrapped := reference()) is not None:
                new[hooks].wrap_method(memo[id(wrapped)], name, method)
        for ignored, names in hooks.state.ignored_names.items():
            new[hooks].state.ignored_names[memo[id(ignored)]] = set(names)
        new[hooks].state.ignored.update(
            memo[id(own)] for own in hooks.state.ignored if id(own) in memo
        )
    for slot in [Slot(memo[id(m)], name) for m in modules for name in memo[id(m)]._parameters]:
        copied_earlier = None if slot.current is None else owner_of(slot.current)
        if copied_earlier is not None and copied_earlier not in own:
            copied_earlier.add_slot(slot)
    for hooks, other in new.items():  # once all copies exist, since they refer to one another
        shared = (memo.get(id(param.sharded)) for param in hooks.state.borrowed)
        lent = (owner_of(parameter) for parameter in shared if parameter is not None)
        other.state.borrowed = [param for param in lent if param is not None]
        other.state.lenders()  # live as long as this
        other.forward_prefetch = [new.get(s, s) for s in hooks.forward_prefetch]
        other.backward_prefetch = [new.get(s, s) for s in hooks.backward_prefetch]
    copied: nn.Module = memo[id(module)]
    return copied


def _sharded_together(module: nn.Module) -> dict[nn.Module, None]:
    """Return the module and all below it, and so of each module that shares a hooks with these."""
    found: dict[nn.Module, None] = {}
    todo = [module]
    while todo:
        for each in todo.pop().modules():
            if each not in found:
                found[each] = None
                hooks = hooks_of(each)
                todo.extend(hooks.state.modules if hooks is not None else [])
    return found


def _check(
    module: nn.Module,
    modules: dict[nn.Module, None],
    all_hooks: dict[Hooks, None],
    memo: dict[int, Any],
) -> None:
    """Raise MisuseError unless the modules can be copied without others that are not; let their units come to rest."""
    name = type(module).__name__
    for hooks in all_hooks:
        iteration = hooks.state.known_iteration
        if iteration is not None and iteration.has_run:
            raise MisuseError(
                f"FSDP does not support deepcopy of {name} after its first forward. Copy the model "
                "before it runs, or load its state_dict into a second sharded model."
            )
    units = [unit for hooks in all_hooks for unit in hooks.state.units]
    managed = {param for unit in units for param in unit.params}
    for parameter in [own for each in modules for own in each.parameters(recurse=False)]:
        owner = owner_of(parameter)
        if owner is not None and owner not in managed and id(owner.sharded) not in memo:
            raise MisuseError(
                f"{name} uses the parameter {owner.name}, which a module outside it manages. Copy "
                "the module that contains both."
            )
    for unit in units:
        unit.settle()


def _copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    """Return a unit of the copied parameters, with memory of its own. Collective."""
    params = []
    for param in unit.params:
        places = [(memo.get(id(slot.module())), slot.name) for slot in param.slots]
        slots = [Slot(module, name) for module, name in places if module is not None]
        sharded = slots[0].current  # the copy that `copy_plain` has registered
        assert sharded is not None
        params.append(param.copy(sharded, slots))
    comms = choose_comms(unit.mesh, unit.device, unit.config)
    other = make_unit(UnitParams(params, unit.mesh, unit.device), unit.config, comms)
    if other.comm is not unit.comm:  # the user has set another than the config says
        use_comm(other, unit.comm)
    if unit.reduce_group is not None:
        other.reduce_over(unit.reduce_group)
    return other
