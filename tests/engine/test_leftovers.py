"""What one pass leaves behind, and the next one must not take for true."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.api import Api
from tests.harness import on_ranks, rank
from tests.training import full_gradients, make_batch, mean_square, my_part


class Stack(nn.Module):
    """An embedding, of which each batch uses the first rows, layers, and one number.

    Of that, one rank has nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


def _units(stack: Stack) -> Iterator[nn.Module]:
    yield from (stack.embed, *stack.layers)


def _both(api: Api, face: str, *, stays: bool = False) -> dict[nn.Module, nn.Module]:
    """Build a stack for one process and a sharded copy. Returns the stack that each contains.

    stays: whether parameters stay whole after forward.
    """
    alone = Stack()
    stack = copy.deepcopy(alone)
    if face == "fully_shard":
        model = _sharded(api, stack, reshard_after_forward=False if stays else None)
        return {alone: alone, model: stack}
    strategy = api.ShardingStrategy["SHARD_GRAD_OP" if stays else "FULL_SHARD"]
    options = {
        "sharding_strategy": strategy,
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
    }
    for number, layer in enumerate(stack.layers):
        stack.layers[number] = api.FullyShardedDataParallel(layer, **options)
    return {alone: alone, api.FullyShardedDataParallel(stack, **options): stack}


def _sharded(api: Api, stack: Stack, **options: object) -> nn.Module:
    for unit in _units(stack):
        api.fully_shard(unit, **options)
    return api.fully_shard(stack, **options)


def _raise_error(*_: object) -> None:
    raise ValueError("on purpose")


def _fail(model: nn.Module, stack: Stack, where: str) -> None:
    """Run a forward or backward that raises in the last layer, and catch that."""
    last = stack.layers[2]
    hook = (
        last.register_forward_pre_hook(_raise_error)
        if where == "forward"
        else last.register_forward_hook(_fail_in_backward)
    )
    with pytest.raises(ValueError, match="on purpose"):
        mean_square(model(_tokens(8))).backward()
    hook.remove()


def _fail_in_backward(_: nn.Module, __: object, output: Tensor) -> None:
    output.register_hook(_raise_error)


def _fail_in_first_backward(_: nn.Module, __: object, output: Tensor) -> None:
    def fail(_: Tensor) -> None:
        hook.remove()
        _raise_error()

    hook = output.register_hook(fail)


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, 8, (12, 4), generator=torch.Generator().manual_seed(seed))


def _train_both(
    api: Api,
    between: Callable[[nn.Module], None],
    prepare: Callable[[nn.Module], None] = lambda _: None,
    *,
    late: float = 0.0,
    foreach: bool = True,
    **options: object,
) -> None:
    """Compare outputs and gradients with one process; ``between`` runs before each step.

    late: seconds by which the last rank's steps come after the others'.
    """
    alone = Stack()
    model = _sharded(api, copy.deepcopy(alone), **options)
    prepare(model)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.5, foreach=foreach) for each in (alone, model)
    ]
    for number in range(7):
        tokens = _tokens(number)
        whole, part = alone(tokens), model(my_part(tokens))
        torch.testing.assert_close(part, my_part(whole))
        for output in (whole, part):
            mean_square(output).backward()
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, alone.get_parameter(name).grad)
        for each in (alone, model):
            between(each)
        time.sleep(late * rank())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(_tokens(99))


def _nothing(_: nn.Module) -> None:
    return


@on_ranks(2)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("late", [0.0, 0.1])
@pytest.mark.ours("uses what it gathered before the step")
def test_step_reaches_what_stays_whole_after_backward(api: Api, late: float, foreach: bool) -> None:
    def keep(model: nn.Module) -> None:
        model.set_reshard_after_backward(False)

    _train_both(api, _nothing, keep, late=late, foreach=foreach)


@on_ranks(2)
@pytest.mark.parametrize("late", [0.0, 0.1])
@pytest.mark.ours("uses what it gathered before the step")
def test_step_on_one_rank_reaches_what_an_evaluation_kept(api: Api, late: float) -> None:
    _train_both(api, _evaluate, late=late, reshard_after_forward=False)


@on_ranks(2)
@pytest.mark.ours("uses what it gathered before the write")
def test_write_after_an_evaluation_reaches_what_it_kept(api: Api) -> None:
    def evaluate_and_write(model: nn.Module) -> None:
        _evaluate(model)
        parameters = list(model.parameters())
        for parameter in parameters:
            stands_for = getattr(parameter, "data", parameter)
            stands_for.mul_(1.0)

    _train_both(api, evaluate_and_write, reshard_after_forward=False)


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("way", ["mul", "data", "load"])
@pytest.mark.ours("uses what it gathered before the write")
def test_peers_may_write_while_a_slow_rank_evaluates(api: Api, way: str, face: str) -> None:
    stacks = _both(api, face, stays=True)
    alone, model = stacks
    for layer in stacks[model].layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(0.02 * (rank() == 0)))
    trained = {each: list(each.parameters()) for each in stacks}
    for number in range(6):
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(_tokens(number)), alone(_tokens(number)))
        for each, parameters in trained.items():
            if way == "load":
                state = {name: 0.9 * value for name, value in each.state_dict().items()}
                each.load_state_dict(state)
                continue
            for parameter in parameters:
                with torch.no_grad():
                    (parameter.data if way == "data" else parameter).mul_(0.9)


@on_ranks(2)
@pytest.mark.parametrize("comm", ["auto", "collectives"])
@pytest.mark.parametrize("way", ["mul", "data"])
@pytest.mark.ours("uses what it gathered before the write")
def test_one_rank_may_write_to_its_rows_of_what_stayed_whole(api: Api, way: str, comm: str) -> None:
    if comm == "collectives":  # asks the other ranks by another way
        api.set_default_comm(comm)
    alone, model = _both(api, "fully_shard", stays=True)
    trained = list(model.parameters())
    for number in range(5):
        _evaluate(model)
        for whole, parameter in zip(alone.parameters(), trained, strict=True):
            mine = parameter.to_local()
            with torch.no_grad():
                whole[:1].mul_(0.5)  # which is on the first rank
                if rank() == 0:
                    (mine.data if way == "data" else mine)[:1].mul_(0.5)
        for each, tokens in ((alone, _tokens(number)), (model, my_part(_tokens(number)))):
            mean_square(each(tokens)).backward()
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, alone.get_parameter(name).grad)
        for each in (alone, model):
            each.zero_grad()


@on_ranks(2)
@pytest.mark.ours("uses what it gathered before the step")
def test_step_reaches_what_a_user_has_unsharded(api: Api) -> None:
    _train_both(api, lambda model: model.layers[1].unshard() if hasattr(model, "unshard") else None)


@on_ranks(2)
@pytest.mark.ours("keeps what was not reduced yet")
def test_zero_grad_of_the_model_forgets_what_is_not_reduced_yet(api: Api) -> None:
    alone, model = _both(api, "fully_shard")
    for is_last in (False, True):
        for each in (alone, model):
            each.zero_grad()
        model.set_requires_gradient_sync(is_last)
        for each, tokens in (
            (alone, _tokens(int(is_last))),
            (model, my_part(_tokens(int(is_last)))),
        ):
            mean_square(each(tokens)).backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, alone.get_parameter(name).grad)


@on_ranks(4)
@pytest.mark.ours("uses what it kept before the step")
def test_shards_kept_for_a_backward_that_never_comes_are_not_used_later(api: Api) -> None:
    _train_both(api, lambda model: model(_tokens(99)), reshard_after_forward=2)


@on_ranks(2)
@pytest.mark.parametrize("way", ["to_local", "_local_tensor", "grad"])
def test_gradient_that_somebody_keeps_is_not_written_to(api: Api, way: str) -> None:
    model = api.fully_shard(nn.Linear(16, 16))
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        mean_square(model(make_batch(16, seed=step))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                grad = parameter.grad
                assert isinstance(grad, DTensor)
                mine = {"to_local": grad.to_local, "grad": lambda grad=grad: grad}.get(
                    way, lambda grad=grad: grad._local_tensor
                )()
                kept.append((mine, mine.clone()))
                del grad, mine
        model.zero_grad()
    for now, then in kept:
        assert torch.equal(getattr(now, "_local_tensor", now), getattr(then, "_local_tensor", then))


@on_ranks(2)
@pytest.mark.parametrize("way", ["unshard", "reshard", "load"])
@pytest.mark.ours("uses what it gathered before the write")
def test_what_was_gathered_early_is_not_what_a_user_gathers_later(api: Api, way: str) -> None:
    alone = Stack()
    model = _sharded(api, copy.deepcopy(alone))
    for number in range(5):
        for each, part in ((alone, _tokens(number)), (model, my_part(_tokens(number)))):
            mean_square(each(part)).backward()
            each.zero_grad()
        _evaluate(model)  # often enough to be fast
    last = model.layers[2]
    if way == "unshard":  # leave it out, so that it stays gathered
        skipped = model.layers
        model.layers = nn.ModuleList(skipped[:2])
        _evaluate(model)
        model.layers = skipped
    else:
        last.unshard(async_op=True)
    for parameter in (*alone.layers[2].parameters(), *last.parameters()):
        parameter.data.mul_(0.5)
    if way == "unshard":
        last.unshard()
    elif way == "reshard":
        last.reshard()
    else:
        model.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(_tokens(7)), alone(_tokens(7)))


@on_ranks(2)
def test_freezing_keeps_what_was_accumulated_before(api: Api) -> None:
    alone = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model = copy.deepcopy(alone)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    for step in range(3):
        for each, batches in (
            (alone, [make_batch(16, seed=step + n) for n in range(2)]),
            (model, [my_part(make_batch(16, seed=step + n)) for n in range(2)]),
        ):
            if each is model:
                model.set_requires_gradient_sync(False)
            mean_square(each(batches[0])).backward()
            each[1].requires_grad_(False)
            if each is model:
                model.set_requires_gradient_sync(True)
            mean_square(each(batches[1])).backward()
            each[1].requires_grad_(True)
        for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)
        alone.zero_grad()
        model.zero_grad()


@on_ranks(2)
@pytest.mark.ours("has no gradient for it")
def test_what_stays_whole_may_be_unfrozen(api: Api) -> None:
    alone = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model = copy.deepcopy(alone)
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=False)
    api.fully_shard(model)
    trained = {each: list(each[1].parameters()) for each in (alone, model)}
    for step in range(6):
        for each, batch in (
            (alone, make_batch(16, seed=step)),
            (model, my_part(make_batch(16, seed=step))),
        ):
            for parameter in trained[each]:
                parameter.requires_grad_(step % 2 == 1)
            mean_square(each(batch)).backward()
            with torch.no_grad():
                each(batch)
        for parameter, other in zip(trained[model], trained[alone], strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            if other.grad is not None:
                torch.testing.assert_close(parameter.grad.full_tensor(), other.grad)
        alone.zero_grad()
        model.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.ours("keeps what the pass that failed left behind")
def test_exception_that_a_program_catches_leaves_submodules_usable_alone(
    api: Api, where: str, face: str
) -> None:
    stacks = _both(api, face)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in stacks]
    for number in range(4):
        for each in stacks:
            mean_square(each(_tokens(number))).backward()
            each.zero_grad()
    for each, stack in stacks.items():
        _fail(each, stack, where)
        each.zero_grad()
    for number in range(4):
        batch = make_batch(16, seed=number)
        outputs = [stack.layers[1](batch) for stack in stacks.values()]
        torch.testing.assert_close(outputs[1], outputs[0])
        for output in outputs:
            mean_square(output).backward()
        time.sleep(0.02 * rank())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    alone, model = stacks
    torch.testing.assert_close(model(_tokens(9)), alone(_tokens(9)))


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("again", ["same graph", "older graph"])
@pytest.mark.ours("takes the next backward for part of the one that raised")
def test_backward_may_follow_one_that_raised(api: Api, again: str, face: str) -> None:
    stacks = _both(api, face)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in stacks]
    for number in range(4):
        for each, stack in stacks.items():
            older = mean_square(each(_tokens(number)))
            hook = stack.layers[1].register_forward_hook(_fail_in_first_backward)
            failing = mean_square(each(_tokens(number + 10)))
            hook.remove()
            with pytest.raises(ValueError, match="on purpose"):
                failing.backward(retain_graph=True)
            each.zero_grad()
            (failing if again == "same graph" else older).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        alone, model = stacks
        torch.testing.assert_close(model(_tokens(9)), alone(_tokens(9)))


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.ours("keeps gradients of what the pass that failed left unsharded")
def test_zero_grad_after_an_exception_reaches_what_is_trained(
    api: Api, where: str, face: str
) -> None:
    stacks = _both(api, face)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in stacks]
    for each, stack in stacks.items():
        mean_square(each(_tokens(0))).backward()
        _fail(each, stack, where)
        each.zero_grad()
        mean_square(each(_tokens(1))).backward()
    for optimizer in optimizers:
        optimizer.step()
    alone, model = stacks
    torch.testing.assert_close(model(_tokens(9)), alone(_tokens(9)))


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.ours("gathers alone")
def test_exception_in_an_evaluation_on_one_rank_is_over_for_all(api: Api, face: str) -> None:
    stacks = _both(api, face, stays=True)
    alone, model = stacks
    for number in range(4):
        _evaluate(model)
        if rank() == 0:
            with torch.no_grad():
                _fail(model, stacks[model], "forward")
        for each in stacks:
            mean_square(each(_tokens(number))).backward()
        for each in stacks:
            each.zero_grad()
        torch.testing.assert_close(model(_tokens(9)), alone(_tokens(9)))


@on_ranks(2)
@pytest.mark.parametrize("face", ["fully_shard", "wrapper"])
@pytest.mark.parametrize("hooked", ["embed", "layer"], ids=["reduced last", "reduced first"])
@pytest.mark.ours("adds to the gradients of the backward that raised")
def test_exception_in_a_hook_after_reduction_leaves_nothing(
    api: Api, face: str, hooked: str
) -> None:
    stacks = _both(api, face)
    for model, stack in stacks.items():
        module = stack.embed if hooked == "embed" else stack.layers[2]
        handle = module.weight.register_post_accumulate_grad_hook(_raise_error)
        with pytest.raises(ValueError, match="on purpose"):
            mean_square(model(_tokens(0))).backward()
        handle.remove()
        for each in (model, stack):
            each.zero_grad()
        mean_square(model(_tokens(1))).backward()
    ((alone, _), (model, stack)) = stacks.items()
    expected, actual = ([p.grad for p in each.parameters()] for each in (alone, stack))
    for whole, part in zip(expected, actual, strict=True):
        assert whole is not None
        total = torch.zeros(())
        if part is not None:
            local = part.to_local() if hasattr(part, "to_local") else part
            total = local.double().pow(2).sum().float()
        torch.distributed.all_reduce(total)
        torch.testing.assert_close(total, whole.double().pow(2).sum().float())


@on_ranks(2)
def test_exception_that_a_forward_catches_is_part_of_it(api: Api) -> None:
    class Retrying(Stack):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                with pytest.raises(TypeError):
                    layer(x, x)
                x = layer(x).tanh()
            return x * self.scale

    alone = Retrying()
    model = _sharded(api, copy.deepcopy(alone))
    for number in range(5):
        tokens = _tokens(number)
        outputs = [alone(tokens), model(my_part(tokens))]
        torch.testing.assert_close(outputs[1], my_part(outputs[0]))
        for output in outputs:
            mean_square(output).backward()
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, alone.get_parameter(name).grad)
        alone.zero_grad()
        model.zero_grad()
