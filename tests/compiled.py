"""Programs that compile what is inside of units: by any backend, on any device, sharded by either face.

Needs nothing but torch, so that `tests.gpu` runs the same programs. `train` returns a `Run`; how two of
them have to agree say `assert_same` and `assert_as_theirs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

CPU = torch.device("cpu")


class Block(nn.Module):
    """Two layers around a residual connection. (n, 16) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Add the layers' output."""
        return x + self.down(self.up(self.norm(x)).relu())


class Regional(Block):
    """A block with a region that is compiled once for all of them."""

    @torch.compiler.nested_compile_region  # type: ignore[untyped-decorator]
    def inner(self, x: Tensor) -> Tensor:
        """Apply the layers."""
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        """Add the region's output."""
        return x + self.inner(self.norm(x))


class Branching(Block):
    """A block of which the batch says what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        """Add what one of two functions returns."""
        rectified, smooth = self._with(torch.relu), self._with(torch.tanh)
        return x + torch.cond(x.sum() > 0, rectified, smooth, (self.norm(x),))

    def _with(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: self.down(function(self.up(x)))


class Stack(nn.Sequential):
    """A sequence whose forward is not the library's, so that the compiler looks at it. (n, 16) -> (n, 4)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply one layer after the other."""
        for layer in self:
            x = layer(x)
        return x


def make_model(block: Callable[[], Block] = Block) -> Stack:
    """Build the same two blocks and a layer on every rank."""
    torch.manual_seed(0)
    return Stack(block(), block(), nn.Linear(16, 4, bias=False))


Shard = Callable[[nn.Sequential], nn.Module]
Compiler = Mapping[str, Any]  # arguments of `torch.compile`


def _plain(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    return shard(model)


def _wrapped_before(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    for index in range(2):
        model[index] = torch.compile(model[index], **compiler)
    return shard(model)


def _wrapped_after(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    sharded = shard(model)
    for index in range(2):
        model[index] = torch.compile(model[index], **compiler)
    return sharded


def _in_place_before(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    for block in _blocks(model):
        block.compile(**compiler)
    return shard(model)


def _in_place_after(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    sharded = shard(model)
    for block in _blocks(sharded):
        block.compile(**compiler)
    return sharded


def _forward_after(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    sharded = shard(model)
    for block in _blocks(sharded):
        block.forward = torch.compile(block.forward, **compiler)  # type: ignore[method-assign]
    return sharded


def _checkpointed(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    for index in range(2):
        model[index] = checkpoint_wrapper(model[index])
    sharded = shard(model)
    for block in model[:2]:
        block.compile(**compiler)
    return sharded


def _whole_before(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    model.compile(**compiler)
    return shard(model)


def _whole_after(model: nn.Sequential, shard: Shard, compiler: Compiler) -> nn.Module:
    sharded = shard(model)
    sharded.compile(**compiler)
    return sharded


def _blocks(model: nn.Module) -> Iterator[Block]:
    return (module for module in list(model.modules()) if isinstance(module, Block))


BLOCKS: dict[str, Callable[[nn.Sequential, Shard, Compiler], nn.Module]] = {
    "wrapped before": _wrapped_before,
    "wrapped after": _wrapped_after,
    "in place before": _in_place_before,
    "in place after": _in_place_after,
    "forward after": _forward_after,
    "checkpointed": _checkpointed,
}
WHOLE = {"whole before": _whole_before, "whole after": _whole_after}
EAGER = "eager"
WAYS = {EAGER: _plain, **BLOCKS, **WHOLE}


@dataclass(frozen=True)
class Program:
    """What a program compiles and how it trains.

    way: of `WAYS`. block: what a block is. face: ``fully_shard``, or the wrapper, which keeps the parameters or makes flat ones of them.
    compiler: arguments of `torch.compile`. options: of the face.
    sizes: a rank's batches, in turn. evaluates: without gradients, before each step. freezes: the blocks' last
        layers, or the second block where parameters are flat, in every second step.
    compiles_optimizer: its step too.
    """

    way: str = "in place before"
    block: Callable[[], Block] = Block
    face: str = "fully_shard"
    compiler: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_mixed: bool = False
    num_steps: int = 3
    num_microbatches: int = 1
    sizes: tuple[int, ...] = (6,)
    evaluates: bool = False
    freezes: bool = False
    compiles_optimizer: bool = False


_FULL = {"fullgraph": True}
PROGRAMS = {
    "full-graph": Program(compiler=_FULL),
    **{
        way.replace(" ", "-"): Program(way) for way in WAYS if way not in (EAGER, "in place before")
    },
    "sizes": Program(sizes=(6, 8, 10), num_steps=4),
    "sizes-static": Program(compiler={"dynamic": False}, sizes=(6, 8, 10), num_steps=4),
    "sizes-dynamic": Program(compiler={"dynamic": True}, sizes=(6, 8, 10), num_steps=4),
    "evaluation": Program(evaluates=True),
    "microbatches": Program(num_microbatches=2),
    "mixed-precision": Program(is_mixed=True),
    "stays-whole": Program(options={"reshard_after_forward": False}),
    "freezing": Program(freezes=True, num_steps=4),
    "optimizer": Program(compiles_optimizer=True),
    "regions": Program(block=Regional, compiler=_FULL),
    "branches": Program(block=Branching, compiler=_FULL),
    "wrapper": Program(face="wrapper", compiler=_FULL),
    "wrapper-whole": Program("whole after", face="wrapper"),
    "flat": Program(face="flat", compiler=_FULL),
    "flat-whole": Program("whole after", face="flat"),
    "flat-freezing": Program(face="flat", compiler=_FULL, freezes=True, num_steps=4),
}


def eagerly(program: Program) -> Program:
    """Return the program that compiles nothing."""
    return replace(program, way=EAGER, compiles_optimizer=False)


@dataclass
class Run:
    """Each step's losses, gradients and number of graphs until then; the graphs' numbers of layers.

    num_frames: how many Python functions the compiler had looked at by the end of each step.
    is_whole: whether nothing interrupted a graph.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    num_graphs: list[int] = field(default_factory=list)
    num_frames: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    is_whole: bool = False


def forget_compiled() -> None:
    """Let the compiler begin anew, and let it warn of nothing for the rest of the test."""
    dynamo.reset()
    counters.clear()
    warnings.simplefilter("ignore")  # Dynamo looks at what warns


def train(library: Any, program: Program, *, backend: str, device: torch.device = CPU) -> Run:
    """Train as a program says. library: has the names of `torch.distributed.fsdp`."""
    forget_compiled()
    counter, run = CompileCounterWithBackend(backend), Run()
    model = WAYS[program.way](
        make_model(program.block).to(device),
        lambda model: _shard(library, model, program, device),
        {"backend": counter, **program.compiler},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend=counter) if program.compiles_optimizer else None
    for index in range(program.num_steps):
        size = program.sizes[index % len(program.sizes)]
        if program.freezes:
            _freeze(model, program, is_frozen=index % 2 == 1)
        if program.evaluates:
            with torch.no_grad():
                run.losses.append(loss_of(model, batch_of(99, size, device)))
        for micro in range(program.num_microbatches):
            if program.num_microbatches > 1:
                model.set_requires_gradient_sync(micro == program.num_microbatches - 1)
            seed = index * program.num_microbatches + micro
            loss = loss_of(model, batch_of(seed, size, device))
            loss.backward()
            run.losses.append(loss.detach())
        run.gradients.append(gradients_of(model))
        (step or optimizer.step)()
        optimizer.zero_grad()
        run.num_graphs.append(counter.frame_count)
        run.num_frames.append(counters["frames"]["total"])
    run.layers = [_count_layers(graph) for graph in counter.graphs]
    run.is_whole = not counters["graph_break"]
    return run


def _shard(library: Any, model: nn.Sequential, program: Program, device: torch.device) -> nn.Module:
    options = dict(program.options)
    if program.face == "fully_shard":
        if program.is_mixed:
            options["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model[:2]:
            library.fully_shard(block, **options)
        library.fully_shard(model, **options)
        return model
    wrapped: nn.Module = library.FullyShardedDataParallel(
        model,
        auto_wrap_policy=_is_block,
        use_orig_params=program.face == "wrapper",
        device_id=device,
        **options,
    )
    return wrapped


def _is_block(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Say which modules become units, in the form of both libraries' wrap policies."""
    return recurse or isinstance(module, Block)


def _freeze(model: nn.Module, program: Program, *, is_frozen: bool) -> None:
    frozen = "1." if program.face == "flat" else "down"
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (is_frozen and frozen in clean(name)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean square of a model's outputs, in float32."""
    return model(batch).float().square().mean()


def batch_of(seed: int, size: int, device: torch.device = CPU) -> Tensor:
    """Make this rank's part (size, 16) of a batch."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(size * num_ranks, 16, generator=generator)
    return batch.chunk(num_ranks)[rank].to(device)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy this rank's part of every gradient there is, by the names of the model as it was built."""
    found = {}
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:
            own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            found[clean(name)] = own.clone()
    return found


def clean(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    for prefix in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(prefix, "")
    return name


def _count_layers(graph: torch.fx.GraphModule) -> int:
    nodes = (node for node in graph.graph.nodes if node.op == "call_function")
    return sum("linear" in str(node.target) for node in nodes)


def assert_same(run: Run, eager: Run, *, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Assert that something was compiled, and computed what eager execution does."""
    assert run.num_graphs[0] >= 1
    assert not any(eager.num_graphs)
    torch.testing.assert_close(run.losses, eager.losses, rtol=rtol, atol=atol)
    torch.testing.assert_close(run.gradients, eager.gradients, rtol=rtol, atol=atol)


def assert_as_theirs(run: Run, theirs: Run) -> None:
    """Assert the results of another engine that compiled the same, in every bit, from no more graphs than its."""
    torch.testing.assert_close(run.losses, theirs.losses, rtol=0.0, atol=0.0)
    torch.testing.assert_close(run.gradients, theirs.gradients, rtol=0.0, atol=0.0)
    for ours, others in ((run.num_graphs, theirs.num_graphs), (run.num_frames, theirs.num_frames)):
        assert all(map(int.__le__, ours, others)), (
            f"{ours} compiled or looked at, PyTorch's {others}"
        )


def compare(
    library: Any, theirs: Any, name: str, *, backend: str, device: torch.device = CPU
) -> str:
    """Train one of `PROGRAMS` by both libraries and uncompiled; assert that they agree, and say how often it compiled.

    Of flat parameters PyTorch's engine compiles no frame that reaches them, and with the rest uncompiled its bits
    are others.
    """
    program = PROGRAMS[name]
    run = train(library, program, backend=backend, device=device)
    eager = train(library, eagerly(program), backend=backend, device=device)
    rtol, atol = (5e-2, 5e-3) if program.is_mixed else (1e-5, 1e-6)
    assert_same(run, eager, rtol=rtol, atol=atol)
    if program.face == "flat":
        assert 2 in run.layers  # a whole block
        return f"{run.num_graphs} graphs"
    other = train(theirs, program, backend=backend, device=device)
    assert_as_theirs(run, other)
    return f"{run.num_graphs} graphs, PyTorch's {other.num_graphs}"
