"""One process: the whole model on the whole batch, as the sum of what data-parallel ranks would do.

The loss of each rank's part is computed in turn and divided by the number of ranks, and gradients add
up. That is what data-parallel training has to give, whatever the loss is: the mean over ranks of each
rank's mean. Buffers are each rank's own there, so each part has its own here.
"""

import dataclasses

import torch
from torch import nn

from fullshard.tools.progress import Reporter
from fullshard.tools.verify.gathering import ties_of
from fullshard.tools.verify.measures import fingerprint, fingerprints
from fullshard.tools.verify.program import Program
from fullshard.tools.verify.record import Diary
from fullshard.tools.verify.training import Trainee, keyed, make_optimizer


def run_alone(program: Program, diary: Diary, report: Reporter) -> None:
    """Train in this process, and record it. Exceptions of the user's functions pass."""
    options = program.options
    trainee = Trainee(program, diary, torch.device(options.device))
    model = trainee.subject.model
    own = diary.run.own
    diary.note(
        initial=own, buffers=fingerprints(model.named_buffers()), ties=ties_of(_parameters(model))
    )
    optimizer = make_optimizer(model, options.lr)
    buffers = [_copied(model)] * options.ranks
    for step in range(options.steps):
        tensors: dict[str, torch.Tensor] = {}
        for rank in range(options.ranks):
            _restore(model, buffers[rank])
            tensors |= _run_part(trainee, step, rank)
            buffers[rank] = _copied(model)
            tensors |= keyed(f"buffer/{rank}", buffers[rank])
        gradients = {name: _gradient(each) for name, each in _parameters(model).items()}
        tensors |= {key: each.clone() for key, each in keyed("gradient", gradients).items()}
        trainee.update(optimizer)
        tensors |= keyed("parameter", _parameters(model))
        trainee.end_step(step, tensors)
        losses = [part.loss for part in diary.run.parts[-options.ranks :]]
        report.step(step + 1, {"loss": f"{sum(losses) / len(losses):.4f}"})


def _run_part(trainee: Trainee, step: int, rank: int) -> dict[str, torch.Tensor]:
    """Run one rank's part, and note which parameters its forward has written to."""
    parameters = _parameters(trainee.subject.model)
    before = fingerprints(parameters.items())
    loss, part, samples = trainee.forward(trainee.subject.model, step, rank)
    written = tuple(name for name, p in parameters.items() if fingerprint(p) != before[name])
    trainee.diary.note_part(dataclasses.replace(part, written=written))
    trainee.backward(loss / trainee.program.options.ranks)
    return samples


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@torch.no_grad()
def _restore(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Set buffers to a rank's own. One that the forward has made or replaced has to be of that shape."""
    for name, buffer in model.named_buffers():
        if name in values and values[name].shape == buffer.shape:
            buffer.copy_(values[name])
