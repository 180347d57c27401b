"""Every class of `fullshard.errors` is provoked, by what a user may do, and says where, what, what to do.

docs/errors.md shows one message of each class. It is compared with the message that is raised here.
"""

from __future__ import annotations

import inspect
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fullshard
from fullshard import errors
from tests.api import Api
from tests.errors.models import LATE, Net, as_one, endings_of, shard, step
from tests.faults.job import Plan
from tests.harness import on_ranks, rank

PAGE = Path(__file__).parents[2] / "docs/errors.md"
CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.FullshardError)
}


def sharding_error(api: Api, _: Path) -> None:
    """A scalar parameter."""
    model = Net()
    model.scale = nn.Parameter(torch.tensor(1.0))
    api.fully_shard(model)


def unsupported_error(api: Api, _: Path) -> None:
    """Rows that cannot be divided evenly along another dim than 0."""
    api.fully_shard(Net(dim=7), shard_placement_fn=lambda _: Shard(1))


def misuse_error(api: Api, _: Path) -> None:
    """A second call for one module."""
    api.fully_shard(api.fully_shard(Net()))


def mesh_error(api: Api, _: Path) -> None:
    """A mesh of three axes."""
    mesh = DeviceMesh("cpu", torch.arange(2).view(1, 1, 2))
    api.fully_shard(Net(), mesh=mesh)


def layout_error(api: Api, _: Path) -> None:
    """One of several parameters in a flat buffer in another dtype."""
    model = shard(api, "orig", Net())
    layer = model.module.blocks[0].module.layer
    layer.weight.data = layer.weight.data.bfloat16()
    step(model)


def state_error(api: Api, _: Path) -> None:
    """An optimizer from before sharding."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(shard(api, "fully_shard", model))
    optimizer.step()


def checkpoint_error(api: Api, folder: Path) -> None:
    """A checkpoint of a model that has no head of that name."""
    other = Net()
    other.lm_head = other.head
    del other.head
    api.save_checkpoint(folder / "saved", shard(api, "fully_shard", other))
    api.load_checkpoint(folder / "saved", shard(api, "fully_shard", Net()))


def damaged_checkpoint_error(api: Api, folder: Path) -> None:
    """A byte that changed on the disk."""
    api.save_checkpoint(folder / "saved", shard(api, "fully_shard", Net()))
    if rank() == 0:
        (file,) = (folder / "saved").glob("shard-00000-*.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    api.load_checkpoint(folder / "saved", shard(api, "fully_shard", Net()))


def allocation_error(api: Api, _: Path) -> None:
    """A layer of one petabyte."""
    layer = nn.Linear(1 << 24, 1 << 24, device="meta")
    api.FullyShardedDataParallel(layer, use_orig_params=True)


def launch_error(api: Api, _: Path) -> None:
    """A rank that launches ranks."""
    fullshard.launch(api.fully_shard, Net())


def comm_error(api: Api, _: Path) -> None:
    """Peer memory in a process that may not make files of any size."""
    mesh = DeviceMesh("cpu", torch.arange(2))  # nothing is connected over its group yet
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        api.fully_shard(Net(), mesh=mesh)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# For each class: who provokes it, and what its message has to say: where, and what to do.
PROVOKED: dict[str, tuple[Callable[[Api, Path], None], str, str]] = {
    "ShardingError": (sharding_error, "Net: scale", "Change scale to a 1D tensor"),
    "UnsupportedError": (unsupported_error, "Net: embed.weight", "Shard dim 0"),
    "MisuseError": (misuse_error, "FSDPNet", "apply fully_shard once to each module"),
    "MeshError": (mesh_error, "mesh", "Pass"),
    "LayoutError": (
        layout_error,
        "blocks.0.layer.weight (torch.bfloat16)",
        "Change the dtype of all of them",
    ),
    "StateError": (state_error, "blocks.0.layer.weight", "Build the optimizer from model.param"),
    "CheckpointError": (checkpoint_error, "model/head.weight", "Load the checkpoint of this model"),
    "DamagedCheckpointError": (damaged_checkpoint_error, "shard-00000-", "load another checkpoint"),
    "AllocationError": (allocation_error, "FullyShardedDataParallel of Linear", "Free memory"),
    "LaunchError": (launch_error, "rank", "Call it outside of ranks"),
    "CommError": (comm_error, "rank", "Use set_default_comm('auto')"),
}
# Those of ranks that part, stall or die: the fault of rank 1, what is said elsewhere.
OF_RANKS: dict[str, tuple[Plan, str, str]] = {
    "DivergenceError": (
        Plan("other_branch", "process_group"),
        "rank 0 ran blocks.0 (forward); rank 1 ran blocks.2 (forward)",
        "Let every rank make the same calls",
    ),
    "PeerLostError": (Plan("kill", "auto"), "rank 1 ", "restart from the last checkpoint"),
    "PeerTimeoutError": (
        LATE,
        "rank 1: running (step 2",
        "allow more: init_process_group(timeout=",
    ),
}


def documented(name: str) -> str:
    """Return the example of a message of this class in the page, in one line."""
    found = re.search(rf"^### `{name}`$.*?^```\n{name}: (.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found, f"{PAGE.name}: no example of {name}"
    return " ".join(found[1].split())


def assert_documented(name: str, message: str) -> None:
    """Assert that the page's example is this message. `...` stands for anything in it."""
    parts = re.sub(r"\(rank \d\)", "(rank 0)", documented(name)).split("...")
    pattern = ".*".join(map(re.escape, parts))
    said = re.sub(r"\(rank \d\)", "(rank 0)", message)
    assert re.fullmatch(pattern, said), f"{PAGE.name} says\n{documented(name)}\nnot\n{said}"


@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize("name", PROVOKED)
@on_ranks(2)
def test_a_call_that_fails_says_where_and_what_to_do(api: Api, name: str, tmp_path: Path) -> None:
    provoke, where, remedy = PROVOKED[name]
    with pytest.raises(CLASSES[name]) as caught:
        provoke(api, tmp_path)
    said = as_one(caught)
    assert type(caught.value) is CLASSES[name]
    assert where in said
    assert remedy in said
    assert_documented(name, said)


@pytest.mark.parametrize("name", OF_RANKS)
def test_what_one_rank_does_is_said_on_the_other(name: str) -> None:
    plan, where, remedy = OF_RANKS[name]
    ending = endings_of(plan)[0]
    said = " ".join(ending.text.split())
    # As the system told it, where nobody had waited for the process yet.
    said = re.sub(r"died, killed by SIGKILL \(.*?\)", "died or left without a word", said)
    assert ending.kinds[0] == name, ending.words
    assert where in said
    assert remedy in said
    assert_documented(name, said.replace(f"{Path.cwd()}/", ""))


def test_every_class_is_provoked_and_public() -> None:
    assert PROVOKED.keys() | OF_RANKS.keys() == CLASSES.keys() - {"FullshardError"}
    for name, kind in CLASSES.items():
        assert getattr(fullshard, name) is kind


def test_the_page_lists_every_class_with_cause_and_remedy() -> None:
    page = PAGE.read_text()
    described = dict(re.findall(r"^### `(\w+)`$\n(.*?)(?=^##)", page, re.M | re.S))
    assert described.keys() == CLASSES.keys() - {"FullshardError"}
    for name, text in described.items():
        assert "**When:**" in text, name
        assert "**Remedy:**" in text, name
        base = CLASSES[name].__bases__[0].__name__
        assert f"It is a `{base}`" in " ".join(text.split()), name


def test_the_page_lists_25_symptoms() -> None:
    numbers = re.findall(r"^\| (\d+) \| ", PAGE.read_text(), re.M)
    assert numbers == [str(number) for number in range(1, 26)]
