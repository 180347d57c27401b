"""What both sides do alike: make a model, run parts of batches, and write down what came of it."""

from collections.abc import Mapping

import torch
from torch import nn

from fullshard.tools.verify.facts import Part
from fullshard.tools.verify.measures import Meter, fingerprint, fingerprints
from fullshard.tools.verify.outputs import OutputRecorder
from fullshard.tools.verify.program import Program, seed_all, tensors_in
from fullshard.tools.verify.record import Diary


class Trainee:
    """A model before it is sharded, with hooks that record, and the diary that it is written into."""

    def __init__(self, program: Program, diary: Diary, device: torch.device) -> None:
        diary.phase = "building the model"
        self.program, self.diary, self.device = program, diary, device
        self.meter = Meter(device)
        self.subject = program.make(device)
        self.recorder = OutputRecorder(device)
        self.recorder.hook(self.subject.model)  # before it is sharded: paths are of the plain model
        diary.paths = self.recorder.paths
        diary.note(own=fingerprints(self.subject.model.named_parameters(remove_duplicate=False)))

    def forward(
        self, model: nn.Module, step: int, rank: int
    ) -> tuple[torch.Tensor, Part, dict[str, torch.Tensor]]:
        """Compute a part's loss; return it with what is to be written, as facts and as tensors by key.

        Generators are seeded by step and rank: so masks of dropout are the same on both sides.
        """
        self.diary.step = step
        self.diary.phase = "making a batch"
        batch = self.program.part(self.subject, step, rank, self.device)
        self.diary.phase = "forward"
        seed_all(self.program.options.seed, step, rank)
        with self.recorder.recording() as seen, self.meter.running():
            loss = self.program.loss_of(model, batch)
        part = Part(
            step,
            rank,
            loss.detach().double().item(),
            fingerprint(*tensors_in(batch)),
            tuple(output for output, _ in seen),
        )
        return loss, part, {output_key(rank, o.path, o.call): sample for o, sample in seen}

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients."""
        self.diary.phase = "backward"
        with self.meter.running():
            loss.backward()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step, and drop gradients."""
        self.diary.phase = "optimizer step"
        with self.meter.running():
            optimizer.step()
        optimizer.zero_grad()

    def end_step(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write down a step."""
        self.diary.write_step(step, tensors)
        seconds = (*self.diary.run.seconds, self.meter.take_seconds())
        self.diary.note(seconds=seconds, peak_nbytes=self.meter.peak_nbytes)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return plain SGD: a difference of parameters is then one of gradients, times the learning rate."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def output_key(rank: int, path: str, call: int) -> str:
    """Return the key of an output's sample."""
    return f"output/{rank}/{path}#{call}"


def keyed(kind: str, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by key: kind "buffer/1" and name "norm.mean" give "buffer/1/norm.mean"."""
    return {f"{kind}/{name}": tensor for name, tensor in named.items()}


def keyless(kind: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a kind by name: the way back from `keyed`."""
    own = f"{kind}/"
    return {key.removeprefix(own): each for key, each in tensors.items() if key.startswith(own)}
