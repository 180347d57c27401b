"""Which modules become units: against PyTorch's policies, and what they promise beyond the names."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import _wrap_utils as torch_wrap_utils
from torch.distributed.fsdp import wrap as torch_wrap

from fullshard import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap
from fullshard.errors import MisuseError, ShardingError, UnsupportedError
from fullshard.fsdp1 import auto_wrap, wrap_policies
from fullshard.fsdp1.options import MixedPrecision
from fullshard.fsdp1.setup import Ignored

SHARED = [
    *torch_wrap.__all__,
    "_ConfigAutoWrap",
    "_Policy",
    "_construct_wrap_fn",
    "_module_wrap_policy",
    "_or_policy",
    "_post_order_apply",
    "_recursive_wrap",
    "_run_mixed_precision_override_policy",
    "_wrap",
    "_wrap_module_cls_individually",
]

# Both files as the one that PyTorch has.
ours = SimpleNamespace(**{**vars(wrap_policies), **vars(auto_wrap)})


class Unit(nn.Module):
    """Stands in for the real wrapper: shows in a repr, and keeps its arguments."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


class Block(nn.Module):
    """Norm, a batch norm and two linear layers, of which a child of a child."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
        self.batch_norm = nn.BatchNorm1d(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(self.mlp(self.norm(x)))


class Model(nn.Module):
    """Blocks in a list, attention, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, 10, bias=False)


def _auto_wrap(root: nn.Module, policy: Any, **options: Any) -> None:
    kwargs = {
        "root": True,
        "mixed_precision": options.get("mixed_precision"),
        "use_orig_params": options.get("use_orig_params", True),
    }
    before = dict(kwargs)
    ignored = Ignored(options.get("ignored_modules", set()), options.get("ignored_params", set()))
    ours.auto_wrap(root, policy, Unit, root_kwargs=kwargs, ignored=ignored)
    assert kwargs == before


def _torch_auto_wrap(root: nn.Module, policy: Any, **options: Any) -> None:
    torch_wrap_utils._auto_wrap(
        root,
        policy,
        options.get("ignored_modules", set()),
        options.get("ignored_params", set()),
        {
            "root": True,
            "mixed_precision": options.get("mixed_precision"),
        },
        Unit,
    )


def _units(root: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the units by path, with their arguments."""
    return {
        path: {k: v for k, v in module.kwargs.items() if k in ("root", "extra", "mixed_precision")}
        for path, module in root.named_modules()
        if isinstance(module, Unit)
    }


@pytest.mark.parametrize("name", SHARED)
def test_signatures_are_pytorchs(name: str) -> None:
    def parameters(of: Any) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(of).parameters.values()]

    assert parameters(getattr(ours, name)) == parameters(getattr(torch_wrap, name))


def test_signature_of_the_check_of_frozen_parameters_is_pytorchs() -> None:
    assert list(inspect.signature(ours._validate_frozen_params).parameters) == list(
        inspect.signature(torch_wrap_utils._validate_frozen_params).parameters
    )


# Given the module of either implementation, the policy.
POLICIES: dict[str, Callable[[Any], Any]] = {
    "always": lambda api: api.always_wrap_policy,
    "lambda": lambda api: partial(
        api.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)
    ),
    "transformer": lambda api: partial(
        api.transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    "size_0": lambda api: partial(api.size_based_auto_wrap_policy, min_num_params=0),
    "size_30": lambda api: partial(api.size_based_auto_wrap_policy, min_num_params=30),
    "size_90": lambda api: partial(api.size_based_auto_wrap_policy, min_num_params=90),
    "size_default": lambda api: api.size_based_auto_wrap_policy,
    "size_leaf": lambda api: partial(
        api.size_based_auto_wrap_policy, min_num_params=1, force_leaf_modules={Block}
    ),
    "size_exclude": lambda api: partial(
        api.size_based_auto_wrap_policy, min_num_params=1, exclude_wrap_modules={nn.Linear}
    ),
    "classes": lambda api: api.ModuleWrapPolicy({Block, nn.Linear}),
    "classes_as_callable": lambda api: partial(
        api._or_policy, policies=[api.ModuleWrapPolicy([Block])]
    ),
    "either": lambda api: partial(
        api._or_policy,
        policies=[
            lambda **_: False,
            partial(api._wrap_module_cls_individually, module_classes=[nn.LayerNorm]),
        ],
    ),
    "custom": lambda api: api.CustomPolicy(
        lambda m: {"root": False, "extra": 1} if isinstance(m, Block) else isinstance(m, Model)
    ),
}


@pytest.mark.filterwarnings("ignore:Both mixed precision")
@pytest.mark.parametrize("mixed_precision", [None, MixedPrecision()], ids=["full", "mixed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_choose_what_pytorchs_choose(
    policy: str, mixed_precision: MixedPrecision | None
) -> None:
    models = Model(), Model()
    for model, wrap_all, api in zip(
        models, (_auto_wrap, _torch_auto_wrap), (ours, torch_wrap), strict=True
    ):
        ignored = {model.blocks[1].mlp[0], model.attention}
        wrap_all(
            model,
            POLICIES[policy](api),
            ignored_modules=ignored,
            ignored_params={p for m in ignored for p in m.parameters()},
            mixed_precision=mixed_precision,
        )
    assert repr(models[0]) == repr(models[1])
    assert _units(models[0]) == _units(models[1])


def test_children_are_wrapped_before_their_parents_and_the_root_is_not() -> None:
    model = Model()
    _auto_wrap(model, ModuleWrapPolicy({Model, Block, nn.Linear}))
    assert list(_units(model)) == [
        "blocks.0",
        "blocks.0.module.mlp.0",
        "blocks.0.module.mlp.2",
        "blocks.1",
        "blocks.1.module.mlp.0",
        "blocks.1.module.mlp.2",
        "attention.out_proj",
        "head",
    ]


def test_units_do_not_share_their_arguments() -> None:
    model = Model()
    _auto_wrap(model, ModuleWrapPolicy({Block}))
    first, second = model.blocks
    assert first.kwargs == second.kwargs
    assert first.kwargs is not second.kwargs


@pytest.mark.parametrize("policy", [CustomPolicy, torch_wrap.CustomPolicy])
def test_policies_of_pytorch_serve_as_well(policy: Any) -> None:
    model = Model()
    _auto_wrap(model, policy(lambda module: isinstance(module, Block)))
    assert list(_units(model)) == ["blocks.0", "blocks.1"]


def test_custom_policy_refuses_other_answers() -> None:
    with pytest.raises(ShardingError, match=r"blocks.0 \(Block\) .*'yes'"):
        _auto_wrap(Model(), CustomPolicy(lambda m: "yes" if isinstance(m, Block) else False))


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(TypeError, match="auto_wrap_policy=3: expected ModuleWrapPolicy"):
        _auto_wrap(Model(), 3)


def test_policy_names_its_classes() -> None:
    assert repr(ModuleWrapPolicy([nn.Linear, Block])) == "ModuleWrapPolicy({Block, Linear})"


@pytest.mark.parametrize("policy", [ours.always_wrap_policy, ModuleWrapPolicy({Block})])
def test_wrapped_module_inside_is_refused_before_anything_changes(policy: Any) -> None:
    model = Model()
    model.blocks[1] = Unit(model.blocks[1])
    before = repr(model)
    with pytest.raises(ValueError, match=r"FSDP applied but found blocks\.1"):
        _auto_wrap(model, policy)
    assert repr(model) == before


def test_recursive_wrap_refuses_what_is_wrapped_unless_ignored() -> None:
    model = nn.Sequential(Unit(nn.Linear(2, 2)), nn.Linear(2, 2))
    run = partial(ours._recursive_wrap, model, ours.always_wrap_policy, Unit)
    with pytest.raises(AssertionError, match="0 of Sequential is already wrapped"):
        run(set(), set())
    assert run({model[0]}, set(), only_wrap_children=True) == (model, 6)
    assert isinstance(model[1], Unit)


def test_recursive_wrap_takes_a_function_as_wrapper() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped, numel = ours._recursive_wrap(
        model, ours.always_wrap_policy, partial(Unit, size=1), set(), set()
    )
    assert isinstance(wrapped, Unit)
    assert isinstance(model[0], Unit)
    assert numel == 6


@pytest.mark.parametrize("missing", ["auto_wrap_policy", "wrapper_cls"])
def test_recursive_wrap_needs_policy_and_wrapper(missing: str) -> None:
    kwargs = {"auto_wrap_policy": ours.always_wrap_policy, "wrapper_cls": Unit, missing: None}
    with pytest.raises(MisuseError, match=f"Must specify {missing}"):
        ours._recursive_wrap(nn.Linear(1, 1), ignored_modules=set(), ignored_params=set(), **kwargs)


def test_post_order_apply_checks_what_it_is_given() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(AssertionError, match=r"nn\.Module but got 5"):
        ours._post_order_apply(model, lambda _: 5)  # type: ignore[arg-type,return-value]
    with pytest.raises(AssertionError, match="Non-root modules"):
        ours._post_order_apply(model, lambda m: m if m is model else None)


def test_activation_checkpointing_of_pytorch_takes_these_functions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoint

    for module in (torch_wrap, torch_wrap_utils):
        for name in ("_Policy", "_recursive_wrap", "_construct_wrap_fn", "_post_order_apply"):
            monkeypatch.setattr(module, name, getattr(ours, name), raising=False)
    monkeypatch.setattr(torch_wrap, "lambda_auto_wrap_policy", ours.lambda_auto_wrap_policy)
    by_function, by_policy, by_callable = Model(), Model(), Model()
    checkpoint.apply_activation_checkpointing(
        by_function, check_fn=lambda module: isinstance(module, Block)
    )
    checkpoint.apply_activation_checkpointing(
        by_policy, auto_wrap_policy=CustomPolicy(lambda module: isinstance(module, Block))
    )
    checkpoint.apply_activation_checkpointing(
        by_callable, auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    for model in (by_function, by_policy, by_callable):
        assert all(isinstance(b, checkpoint.CheckpointWrapper) for b in model.blocks)
        assert not isinstance(model.head, checkpoint.CheckpointWrapper)


# Mixed precision.


@pytest.mark.parametrize(
    "policy",
    [ModuleWrapPolicy({Block}), partial(ours._module_wrap_policy, module_classes={Block})],
)
def test_classes_without_mixed_precision_become_units_of_their_own(policy: Any) -> None:
    model = Model()
    precision = MixedPrecision(
        torch.bfloat16, _module_classes_to_ignore=[nn.BatchNorm1d, nn.LayerNorm]
    )
    with pytest.warns(UserWarning, match="mixed .* BatchNorm1d, LayerNorm"):
        _auto_wrap(model, policy, mixed_precision=precision)
    dtypes = {path: kwargs["mixed_precision"] for path, kwargs in _units(model).items()}
    assert dtypes == {
        f"blocks.{i}{inner}": value
        for i in range(2)
        for inner, value in [("", precision), (".module.norm", None), (".module.batch_norm", None)]
    }


@pytest.fixture
def low_precision_block() -> Block:
    block = Block()
    precision = MixedPrecision(torch.bfloat16, _module_classes_to_ignore=[nn.LayerNorm])
    with pytest.warns(UserWarning, match="Both mixed precision"):
        _auto_wrap(block, ours.always_wrap_policy, mixed_precision=precision)
    return block


def test_classes_without_mixed_precision_compute_in_float32(low_precision_block: Block) -> None:
    norm = low_precision_block.norm.module
    inputs = []
    norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
    x = torch.randn(3, 4)
    reference = nn.LayerNorm(4)
    assert torch.equal(norm(x.bfloat16()), reference(x.bfloat16().float()).bfloat16())
    assert torch.equal(norm(x), reference(x))  # the dtype of the last call is forgotten
    assert inputs == [torch.float32, torch.float32]


def test_copies_cast_for_themselves(low_precision_block: Block) -> None:
    norm = low_precision_block.norm.module
    copied = copy.deepcopy(norm)

    def call_copy(*_: object) -> None:  # between the hooks of the original
        copied(torch.ones(1, 4))

    norm.register_forward_pre_hook(call_copy)
    assert norm(torch.ones(1, 4, dtype=torch.float16)).dtype == torch.float16
    assert copied(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("policy", [ours.always_wrap_policy, ModuleWrapPolicy({Block})])
def test_no_class_to_leave_out_means_no_warning(policy: Any) -> None:
    model = Model()
    precision = MixedPrecision(torch.bfloat16, _module_classes_to_ignore=[])
    _auto_wrap(model, policy, mixed_precision=precision)
    assert all(kwargs["mixed_precision"] is precision for kwargs in _units(model).values())


# Frozen parameters.


def _partly_frozen() -> Model:
    model = Model()
    for block in model.blocks:
        block.mlp[0].requires_grad_(False)
    return model


def test_frozen_parameters_among_others_are_an_error_without_use_orig_params() -> None:
    model = _partly_frozen()
    before = repr(model)
    policy = ModuleWrapPolicy({Block})
    with pytest.raises(ShardingError, match=r"^blocks.0 has both parameters") as caught:
        _auto_wrap(model, policy, use_orig_params=False)
    with pytest.raises(ValueError, match="has both") as torchs:
        torch_wrap_utils._validate_frozen_params(model, set(model.blocks), set(), False)
    messages = [sorted(re.split(r"[\s\[\],]+", str(error.value))) for error in (caught, torchs)]
    assert messages[0] == messages[1]  # but for the order of the names
    assert repr(model) == before


def test_frozen_parameters_among_others_warn_with_use_orig_params() -> None:
    model = _partly_frozen()
    with pytest.warns(UserWarning, match="has both") as caught:
        _auto_wrap(model, ModuleWrapPolicy({Block}))
    heads = [str(warning.message).partition(". ")[0] for warning in caught]
    assert heads == [
        f"blocks.{i} has both parameters with requires_grad=True and False" for i in range(2)
    ]
    assert "(92 numel instead of 52 numel" in str(caught[0].message)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_frozen_parameters_in_units_of_their_own_or_ignored_are_fine(use_orig_params: bool) -> None:
    _auto_wrap(
        _partly_frozen(), ModuleWrapPolicy({Block, nn.Linear}), use_orig_params=use_orig_params
    )
    model = _partly_frozen()
    _auto_wrap(
        model,
        ModuleWrapPolicy({Block}),
        ignored_params={p for p in model.parameters() if not p.requires_grad},
        use_orig_params=use_orig_params,
    )


# wrap and enable_wrap.


def test_wrap_wraps_inside_enable_wrap_alone() -> None:
    linear = nn.Linear(1, 1)
    assert wrap(linear, size=1) is linear
    with enable_wrap(wrapper_cls=Unit, size=2, name="a"):
        wrapped, other = wrap(linear), wrap(linear, size=3)
    assert wrapped.kwargs == {"size": 2, "name": "a"}
    assert other.kwargs == {"size": 3, "name": "a"}
    assert wrap(linear) is linear


def test_enable_wrap_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=Unit):
        raise KeyError
    assert not ours._ConfigAutoWrap.in_autowrap_context
    assert ours._ConfigAutoWrap.wrapper_cls is None


def test_enable_wrap_does_not_nest() -> None:
    with enable_wrap(wrapper_cls=Unit):
        with pytest.raises(UnsupportedError, match="already within"), enable_wrap(wrapper_cls=Unit):
            pass
        assert isinstance(wrap(nn.Linear(1, 1)), Unit)


def test_enable_wrap_needs_a_wrapper() -> None:
    with pytest.raises(AssertionError, match="Expected to pass in wrapper_cls"):
        ours._ConfigAutoWrap().__enter__()
    with enable_wrap(wrapper_cls=None), pytest.raises(MisuseError, match="wrapper_cls to be set"):
        wrap(nn.Linear(1, 1))


def test_a_modules_own_overrides_win() -> None:
    linear: Any = nn.Linear(1, 1)
    linear._wrap_overrides = {"size": 5}
    assert ours._wrap(linear, Unit, size=1, name="a").kwargs == {"size": 5, "name": "a"}


def test_size_policy_keeps_attention_whole_and_does_not_wrap_lists() -> None:
    policy = partial(ours.size_based_auto_wrap_policy, min_num_params=10)
    block = Block()
    assert not policy(block, recurse=True, nonwrapped_numel=9)
    assert policy(block, recurse=False, nonwrapped_numel=10)
    leaf = nn.MultiheadAttention(2, 1)
    assert not policy(leaf, recurse=True, nonwrapped_numel=10)
    assert not policy(nn.ModuleList(), recurse=False, nonwrapped_numel=10)
