"""`describe` prints what is in effect."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.api import Api
from tests.harness import mesh_of, on_ranks
from tests.models import Transformer, mlp
from tests.training import make_batch

pytestmark = pytest.mark.ours("not part of the API")


@on_ranks(2)
def test_description_names_every_unit_and_the_comm_path(api: Api) -> None:
    model = mlp()
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        api.fully_shard(layer, mp_policy=policy)
    api.fully_shard(model, mp_policy=policy)
    head, *lines = str(api.describe(model)).splitlines()
    assert head.startswith("3 units, ")  # the root has nothing of its own
    units = [lines[index : index + 4] for index in range(0, len(lines), 4)]
    assert [name for name, *_ in units] == ["0", "1", "2"]
    for _, place, dtypes, _ in units:
        assert place.startswith(f"    mesh shard 2; {api.name.replace('_', ' ')}")
        for fact in ("float32 -> bfloat16", "reduced in float32", "summed in float32"):
            assert fact in dtypes


@on_ranks(1)
def test_one_unit_is_called_one(api: Api) -> None:
    model = mlp()
    api.fully_shard(model)
    assert str(api.describe(model)).startswith("1 unit, ")


@on_ranks(2)
def test_description_is_the_same_before_and_after_a_step(api: Api) -> None:
    model = mlp()
    api.fully_shard(model[0])
    api.fully_shard(model)
    before = str(api.describe(model))
    model(make_batch(16)).sum().backward()
    assert str(api.describe(model)) == before


@on_ranks(2)
def test_description_says_what_is_direct_and_what_is_packed(api: Api) -> None:
    description = api.describe(api.fully_shard(nn.Linear(1024, 512)))
    (unit,) = description.units
    *_, line = str(description).splitlines()
    if api.name == "peer_memory":
        assert (unit.direct, unit.packed) == (("weight", "bias"), ())
        assert "direct 2 (read in place), packed 0" in line
    else:  # one call for many small parameters beats many calls
        assert (unit.direct, unit.packed) == (("weight",), ("bias",))
        assert "direct 1, packed 1" in line


@on_ranks(4)
def test_description_shows_both_axes(api: Api) -> None:
    model = api.fully_shard(mlp(), mesh=mesh_of(2, 2))
    assert "replicate 2 x shard 2" in str(api.describe(model))


@on_ranks(2)
def test_description_reports_a_moved_tie(api: Api) -> None:
    model = Transformer(tied=True)
    for unit in (model.embed, model.head, model):
        api.fully_shard(unit)
    text = str(api.describe(model))
    assert "embed.weight" in text
    assert "head.weight" in text


@on_ranks(2)
def test_description_before_the_first_forward_changes_nothing(api: Api) -> None:
    model = Transformer(tied=True)
    for unit in (model.embed, *model.blocks, model.head, model):
        api.fully_shard(unit)
    for unit in (*model.blocks, model):
        before = str(api.describe(unit))
        assert before == str(api.describe(unit))
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    assert str(api.describe(model)) == before
    assert str(api.describe(model.blocks[0])) == before  # of the whole model, once it is known


@on_ranks(2)
def test_description_of_a_plain_module_is_refused(api: Api) -> None:
    with pytest.raises(api.errors.FullshardError, match="fully_shard"):
        api.describe(mlp())


@on_ranks(2)
def test_description_says_what_was_set_on_a_module(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(
        torch.bfloat16, param_dtype_override_fn=lambda p: p.dtype if p.dim() == 1 else None
    )
    model = mlp(2)
    for layer in model:
        api.fully_shard(layer, mp_policy=policy)
    api.fully_shard(model)
    model[1].set_keep_unsharded_storage(True)
    model[1].set_requires_gradient_sync(False)
    first, second = api.describe(model).units
    assert first.exempt == ("0.0.bias",)
    assert first.reduces
    assert not first.keeps_storage
    assert "exempt from param_dtype: 0.0.bias" in str(first)
    for said in ("gradients kept for a later backward", "memory kept while sharded"):
        assert said in str(second)
        assert said not in str(first)


@on_ranks(2)
def test_description_says_that_the_program_ends_backward(api: Api) -> None:
    model = api.fully_shard(mlp())
    assert not api.describe(model).manual_finalization
    for _ in range(2):  # before the first forward, and after it
        model.set_manual_backward_finalization(True)
        description = api.describe(model)
        assert description.manual_finalization
        assert "finalize_backward()" in str(description).splitlines()[0]
        model.set_manual_backward_finalization(False)
        assert "finalize_backward" not in str(api.describe(model))
        model(make_batch(16)).sum().backward()
