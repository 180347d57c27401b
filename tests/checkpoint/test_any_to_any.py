"""A checkpoint loads into whatever model of the same parameters, on any number of ranks, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fullshard
from tests.api import Api
from tests.fsdp1.models import batch, net, quiet
from tests.harness import Pools, Task, mesh_of, on_ranks, rank, world_size
from tests.models import mlp
from tests.selection import Settings, repeats
from tests.test_transfer import HYBRID, MORE_OPTIMIZERS, WAYS, _whole
from tests.training import assert_equal, full, mean_square

pytestmark = pytest.mark.apis("peer_memory")

ANY = [*WAYS, "plain", "replicate"]
# Each number of ranks with others, each way of sharding with others.
SIZES = list(itertools.product(range(1, 6), repeat=2))
# One in two always; together with `test_all_pairs`, all.
PAIRS = [
    (ANY[number % len(ANY)], ANY[(number // 5 + 2 * number) % len(ANY)], sizes)
    for number, sizes in enumerate(SIZES)
    if number % 2 == 0
]
# From one alone to more, as many, and to fewer: other numbers divide the same rows in other places.
FEW_SIZES = [(1, 3), (3, 3), (4, 2)]
HYBRID_PAIRS = [
    ("hybrid_fully_shard", "flat", (4, 3)),
    ("orig", "hybrid_flat", (3, 4)),
    ("hybrid_orig", "hybrid_fully_shard", (4, 4)),
    ("fully_shard", "hybrid_orig", (5, 4)),
]


def _model(api: Api, way: str, *, seed: int, steps: int, optimizer: str = "adamw") -> Any:
    model, made = _sharded(api, way, seed=seed, optimizer=optimizer)
    _train(model, made, steps)
    return model, made


def _train(model: Any, optimizer: Any, steps: int) -> list[float]:
    """Take steps, each on a batch of its own that all ranks have: 5 ranks cannot share 12 rows."""
    losses = []
    for step in range(steps):
        loss = mean_square(model(batch(seed=step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sharded(api: Api, way: str, *, seed: int, optimizer: str) -> Any:
    shard: Any = {
        **WAYS,
        **HYBRID,
        "plain": lambda _, model: model,
        "replicate": lambda api, model: api.replicate(model, mesh=mesh_of(world_size())),
    }[way]
    with quiet():
        model = shard(api, net(seed))
    return model, MORE_OPTIMIZERS[optimizer](model.parameters())


def _state(api: Api, model: Any, optimizer: Any) -> dict[str, Tensor]:
    with quiet():
        return _whole(api.sharded_state(model, optimizer))


def _write(
    api: Api, way: str, folder: Path, optimizer: str = "adamw"
) -> tuple[dict[str, Tensor], list[float]]:
    model, made = _model(api, way, seed=1, steps=2, optimizer=optimizer)
    before = _state(api, model, made)
    fullshard.save_checkpoint(folder, model, made, step=2)
    later = folder.with_name("later")
    pending = fullshard.async_save_checkpoint(later, model, made, step=2)
    assert_equal(_state(api, model, made), before)  # saving changes nothing
    losses = _train(model, made, steps=3)
    pending.wait()
    if rank() == 0:
        assert fullshard.diff_checkpoints(folder, later) == []
    return before, losses


def _read(
    api: Api, way: str, folder: Path, steps: int = 0, optimizer: str = "adamw"
) -> tuple[dict[str, Tensor], list[float]]:
    model, made = _model(api, way, seed=5, steps=steps, optimizer=optimizer)
    made.param_groups[0]["lr"] = 9.0
    assert fullshard.load_checkpoint(folder, model, made).step == 2
    return _state(api, model, made), _train(model, made, steps=3)


def _check(
    pools: Pools,
    folder: Path,
    api: str,
    first: str,
    second: str,
    ranks: tuple[int, int],
    *,
    optimizer: str = "adamw",
    steps: int = 0,
) -> None:
    common: dict[str, Any] = {"api": api, "folder": folder / "a", "optimizer": optimizer}
    written = pools.run(ranks[0], Task(__name__, "_write", {"way": first, **common}))
    common["steps"] = steps
    read = pools.run(ranks[1], Task(__name__, "_read", {"way": second, **common}))
    for state, _ in read:
        assert_equal(state, written[0][0])
    if ranks[0] == ranks[1]:
        assert [losses[0] for _, losses in read] == [losses[0] for _, losses in written]
    if first == second and ranks[0] == ranks[1]:
        assert [losses for _, losses in read] == [losses for _, losses in written]


@repeats(lambda s: s["ranks"] not in FEW_SIZES)
@pytest.mark.parametrize(("first", "second", "ranks"), PAIRS)
def test_any_number_of_ranks_loads_what_any_number_saved(
    api: str, first: str, second: str, ranks: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    _check(pools, tmp_path, api, first, second, ranks)


@repeats(lambda s: s["ranks"] != (4, 3))  # replicas that load: "hybrid_flat" in the next test
@pytest.mark.parametrize(("first", "second", "ranks"), HYBRID_PAIRS)
def test_replicas_load_and_save(
    api: str, first: str, second: str, ranks: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    _check(pools, tmp_path, api, first, second, ranks)


@repeats(lambda s: s["way"] not in ("orig", "flat", "fully_shard", "replicate", "hybrid_flat"))
@pytest.mark.parametrize("way", [*ANY, "hybrid_flat", "hybrid_fully_shard"])
def test_training_goes_on_as_if_it_had_not_stopped(
    api: str, way: str, pools: Pools, tmp_path: Path
) -> None:
    num = 4 if way in HYBRID else 2
    _check(pools, tmp_path, api, way, way, (num, num))


@pytest.mark.long
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(("first", "second"), list(itertools.product(ANY, repeat=2)))
def test_all_pairs(
    api: str, first: str, second: str, ranks: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    _check(pools, tmp_path, api, first, second, ranks)


def _is_for_others(settings: Settings) -> bool:
    # AdamW is in a test above; the others keep tensors of the size of their parameters, as amsgrad does.
    if settings["optimizer"] in ("adamw", "adamax", "rmsprop"):
        return True
    number = list(MORE_OPTIMIZERS).index(settings["optimizer"])
    # Every other optimizer, with one way, into one that has stepped or one that has not.
    return (
        number % 2 != 0 or (number // 2 + settings["steps"] + (settings["way"] == "flat")) % 4 != 0
    )


@repeats(_is_for_others)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
@pytest.mark.parametrize("way", ["flat", "fully_shard"])
def test_no_state_of_any_optimizer_is_lost(
    api: str, way: str, optimizer: str, steps: int, pools: Pools, tmp_path: Path
) -> None:
    _check(pools, tmp_path, api, way, way, (2, 2), optimizer=optimizer, steps=steps)


# With tensor parallel


def _tensor_parallel(api: Api, way: str, *, seed: int) -> Any:
    torch.manual_seed(seed)
    model = mlp(num_layers=2, dim=12)
    if world_size() % 2 == 0 and way != "one":
        mesh = mesh_of(world_size() // 2, 2)
        linears = [n for n, m in model.named_children() if isinstance(m, nn.Linear)]
        plan = {n: (ColwiseParallel(), RowwiseParallel())[i % 2] for i, n in enumerate(linears)}
        parallelize_module(model, mesh["shard"], plan)
        data = mesh["replicate"]
    else:
        data = mesh_of(world_size())
    if way in ("flat", "beside"):  # beside: given all of the mesh, it shards over the first axis
        if way == "beside":
            data = mesh
        with quiet():
            model = api.FullyShardedDataParallel(
                model, device_mesh=data, device_id=torch.device("cpu"), use_orig_params=True
            )
    elif world_size() > 1:
        api.fully_shard(model, mesh=data)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _values(model: Any) -> dict[str, Tensor]:
    with quiet():
        if isinstance(model, fullshard.FullyShardedDataParallel):
            state = fullshard.sharded_state(model)["model"]
        else:
            state = model.state_dict()
        return {name: full(value).clone() for name, value in state.items()}


def _steps(model: Any, optimizer: Any) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _write_parallel(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    model, optimizer = _tensor_parallel(api, way, seed=1)
    _steps(model, optimizer)
    fullshard.save_checkpoint(folder, model, optimizer)
    return _values(model)


def _read_parallel(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    model, optimizer = _tensor_parallel(api, way, seed=5)
    fullshard.load_checkpoint(folder, model, optimizer)
    values = _values(model)
    fullshard.save_checkpoint(folder.with_name("again"), model, optimizer, overwrite=True)
    _steps(model, optimizer)
    return values


@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    [
        ("rows", "one", (4, 3)),
        ("one", "rows", (3, 4)),
        ("flat", "rows", (4, 4)),
        ("beside", "flat", (4, 4)),
        *(  # ways that each are above
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("rows", "rows", (4, 1)),
                ("rows", "flat", (4, 4)),
                ("flat", "one", (4, 2)),
                ("rows", "rows", (2, 4)),
            )
        ),
    ],
)
def test_tensor_parallel_parts_are_parts_like_others(
    api: str, first: str, second: str, ranks: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    common = {"api": api, "folder": tmp_path / "a"}
    written = pools.run(ranks[0], Task(__name__, "_write_parallel", {"way": first, **common}))
    for values in pools.run(ranks[1], Task(__name__, "_read_parallel", {"way": second, **common})):
        assert_equal(values, written[0])
    # The same tensors again from other ranks: optimizer state as well, by the files' own values.
    assert_equal(_contents(tmp_path / "again"), _contents(tmp_path / "a"))


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(4)
def test_flat_units_above_uneven_tensor_parallel_are_saved(
    api: Api, use_orig_params: bool, tmp_path: Path
) -> None:
    """Ranks of tensor parallel have flat buffers of different lengths, and cut what all have elsewhere."""

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 7), nn.LayerNorm(7))
        mesh = mesh_of(2, 2)
        columns = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["shard"], {"1": columns})
        distribute_module(model[2], mesh["shard"])  # DTensors that are the same on both
        with quiet():
            wrapped = api.FullyShardedDataParallel(
                model, device_mesh=mesh["replicate"], use_orig_params=use_orig_params
            )
        return wrapped, torch.optim.AdamW(wrapped.parameters())

    model, optimizer = build(1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    wholes = {name: value.clone() for name, value in fullshard.iter_full_state(model)}
    other, made = build(2)
    fullshard.load_checkpoint(tmp_path / "a", other, made)
    assert_equal(dict(fullshard.iter_full_state(other)), wholes)
    fullshard.save_checkpoint(tmp_path / "b", other, made)
    assert_equal(_contents(tmp_path / "b"), _contents(tmp_path / "a"))
    alone = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 7), nn.LayerNorm(7))
    fullshard.load_checkpoint(tmp_path / "a", alone)
    assert_equal(alone.state_dict(), wholes)


def _contents(folder: Path) -> dict[str, Tensor]:
    """Read a checkpoint as docs/checkpoints.md describes it, with safetensors and JSON alone."""
    import json

    from safetensors import safe_open

    manifest = json.loads((folder / "manifest.json").read_bytes())
    found = {}
    for name, fields in manifest["tensors"].items():
        whole = None
        for piece in fields["pieces"]:
            with safe_open(folder / manifest["files"][piece["file"]]["name"], "pt") as file:
                offset = ",".join(map(str, piece["offset"]))
                key = name if piece["shape"] == fields["shape"] else f"{name}@{offset}"
                part = file.get_tensor(key)
            whole = part.new_empty(fields["shape"]) if whole is None else whole
            index = tuple(
                slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"], strict=True)
            )
            whole[index] = part
        if whole is not None and not name.startswith("extra/"):
            found[name] = whole
    return found
