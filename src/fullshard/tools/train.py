"""The training loop: what one rank does from start to end.

Every decision that all ranks must share comes from something they all have: the configuration,
the step number, or the one all-reduce at the end of each step that carries the loss and whether
anybody was asked to stop.
"""

import contextlib
import math
import random
import resource
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.errors import AllocationError, CheckpointError, FullshardError
from fullshard.models.blueprints import Blueprint, ModelConfigError
from fullshard.models.built import LanguageModel, build
from fullshard.models.generation import NO_TOKEN, evaluating, generate
from fullshard.tools.config import OptionError, TrainConfig, lower_lr
from fullshard.tools.job import Job
from fullshard.tools.launch import StopRequest
from fullshard.tools.loggers import make_loggers
from fullshard.tools.progress import Reporter, Speed
from fullshard.tools.run_folder import program
from fullshard.tools.text.corpus import IGNORED, Batch

_BETAS = (0.9, 0.95)


class TrainingError(FullshardError, RuntimeError):
    """Training cannot go on; the message says why and what to change."""


class StepReport(NamedTuple):
    """What a step tells every rank: mean loss over all of them, gradient norm, stop or not.

    save_ended: whether the save that was under way has ended on all ranks, well or not.
    """

    loss: float
    grad_norm: float
    stop: bool
    save_ended: bool


class Trainer:
    """Model, optimizer and text of one rank. Construction is collective."""

    def __init__(self, job: Job, stop: StopRequest, report: Reporter) -> None:
        self.config = config = job.config
        self.folder = job.folder
        self.text = job.text
        self.stop = stop
        self.report = report
        self.rank = dist.get_rank()
        self.device = torch.device(config.device)
        if config.device != "cpu":
            self.device = torch.device(config.device, torch.accelerator.current_device_index())
        for note in self.text.notes():
            report.note(note)
        self._check_alike(job)
        stop.lead_to("stopping after the first step and saving")  # none is still without `stop`
        self._speed = Speed()
        self.val_loss: float | None = None  # the last one, on rank 0
        self.loggers = make_loggers(config.log if self.rank == 0 else (), report.note)
        try:
            self.language_model = build_model(job.model, config, self.device)
        except (AllocationError, ModelConfigError) as error:
            raise OptionError(f"--model {config.model_name}: {error}") from error
        self.model = self.language_model.module
        self._num_positions = job.model.num_positions
        self.num_params = num_params = sum(param.numel() for param in self.model.parameters())
        report.note(
            f"model: {num_params / 1e6:.1f}M parameters, sharded over {config.ranks} "
            f"{config.device} rank{'s' if config.ranks > 1 else ''}, {config.dtype}; "
            f"{config.tokens_per_step} {config.unit}s a step"
        )
        self._check_model()
        seed = config.seed + self.rank  # of dropout, which is another one on each rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.optimizer = build_optimizer(self.model, config)
        self.checkpoints = fullshard.CheckpointManager(
            self.folder.checkpoints,
            self.model,
            self.optimizer,
            keep_last=config.keep_checkpoints,
            signals=(),  # `StopRequest` has them
        )
        self._pending: fullshard.PendingSave | None = None

    def train(self, *, done: int) -> int:
        """Take steps until all are done or somebody asks to stop; return how many are done.

        The state is saved every `save_every` steps, in the background, and at the end, whichever way
        it comes. A save that fails ends training at the next step, with a CheckpointError on every rank.
        """
        try:
            return self._train(done)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nTraining has ended, as later saves would fail too. {self.folder.what_is_saved()}"
            ) from error

    def _train(self, done: int) -> int:
        config = self.config
        self.report.begin(total=config.steps, done=done)
        self.stop.leads_to = "stopping after this step and saving"
        traced = steps_to_trace(config, done=done)
        with StepRecorder(self.model, self.optimizer, self.folder.trace_folder, traced) as recorder:
            while done < config.steps:
                recorder.begin_step(done)
                started = time.perf_counter()
                result = self._step(done)
                seconds = time.perf_counter() - started
                recorder.end_step(done)
                done += 1
                is_last = result.stop or done == config.steps
                saves = is_last or (config.save_every > 0 and done % config.save_every == 0)
                numbers = {"loss": result.loss, "gradients' norm": result.grad_norm}
                val_loss = None
                if all(map(math.isfinite, numbers.values())):
                    val_loss = self._validate(done, is_last=is_last)
                    numbers["loss of held-out text"] = val_loss or 0.0
                self._record(done, result, seconds, val_loss)
                wrong = [
                    f"the {n} is {value}"
                    for n, value in numbers.items()
                    if not math.isfinite(value)
                ]
                if not wrong and saves and not self._has_finite_weights():
                    wrong.append("its weights are not finite")
                if wrong:
                    self.checkpoints.wait()
                    raise TrainingError(self._not_finite(done, wrong[0]))
                if result.save_ended:  # a disk that was full is known now, not at the next save
                    self._pending = None
                    self.checkpoints.wait()
                if saves:
                    saving = self.checkpoints.save(done)
                    self._pending = saving if isinstance(saving, fullshard.PendingSave) else None
                if result.stop:
                    break
        self.report.end()
        self.report.note(f"saving step {done} ...")
        self.checkpoints.close()  # waits for the last one
        return done

    @torch.no_grad()
    def _has_finite_weights(self) -> bool:
        """Return whether all weights of all ranks are finite; collective. A step may be too large for their dtype."""
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]
        own = [part for part in parts if part.numel()]
        largest = [norm.float() for norm in torch._foreach_norm(own, math.inf)] if own else []
        sound = torch.stack([*largest, torch.zeros((), device=self.device)]).isfinite().all()
        num_sound = sound.long()
        dist.all_reduce(num_sound)
        return num_sound.item() == self.config.ranks

    def _not_finite(self, step: int, wrong: str) -> str:
        """Say what to do after a step that left something that is not finite. Such a state is never saved."""
        config, run = self.config, shlex.quote(str(self.folder.path))
        changed = f"{program()} train --config {run} --out {run}-again --lr {lower_lr(config):.1g}"
        checkpoint = fullshard.latest_checkpoint(self.folder.checkpoints)
        if checkpoint is None:
            kept = "No checkpoint had been saved."
        else:
            changed += f" --init-from {shlex.quote(str(checkpoint.path))}"
            kept = (
                f"That begins with the last checkpoint, of step {checkpoint.step}; if its loss is not finite either, "
                "leave --init-from out."
            )
        return (
            f"step {step}: {wrong}. Lower --lr (now {config.lr:g}), or raise --warmup (now "
            f"{config.warmup}), for example: {changed}\n{kept}"
        )

    def _step(self, step: int) -> StepReport:
        """Train on the step's sequences; `step` counts from zero."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        total = torch.zeros((), device=self.device)
        # Of all tokens that the ranks predict together, whose gradients are averaged over the ranks.
        share = config.ranks / max(1, self.text.num_targets(step))
        # Each micro-batch is reduced: gradients then take a shard's memory per rank. Without
        # (`set_requires_gradient_sync`) a rank would hold whole float32 gradients, `ranks` times as
        # much, and `--grad-accum` is there to save memory. Two CPU ranks, four micro-batches: a GPT
        # of 34M parameters takes 3.15 s a step instead of 4.13, and 123 MB more a rank (bench/results,
        # "reduced in last" and "in each"); `--model 10m` 0.96 of the time, which is noise, and 47 MB.
        for micro in range(config.grad_accum):
            first = (micro * config.ranks + self.rank) * config.batch
            losses = self._losses(self.text.batch(step, range(first, first + config.batch)))
            loss = losses.sum() * share
            loss.backward()
            total += loss.detach()
        max_norm = config.clip or math.inf
        norm = fullshard.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        has_saved = self._pending is not None and self._pending.done()
        votes = torch.tensor([bool(self.stop.asked), has_saved], device=self.device)
        shared = torch.cat((total.double().view(1), votes))
        dist.all_reduce(shared)
        loss_sum, stops, saved = shared.tolist()
        if stops and not self.stop.asked:
            self.report.note("another rank was asked to stop: saving")
        return StepReport(loss_sum / config.ranks, float(norm), stops > 0, saved == config.ranks)

    @torch.no_grad()
    def _validate(self, done: int, *, is_last: bool) -> float | None:
        """Return the mean loss of the text that is held out, if it is due; collective."""
        config = self.config
        is_due = is_last or (config.val_every and done % config.val_every == 0)
        if not config.holds_out or not is_due:
            return None
        total, num_targets = torch.zeros((), device=self.device), 0
        num_sequences = self.text.num_held_out
        # All ranks run as many forwards: where sequences do not suffice, the last ones count nothing.
        for first in range(0, num_sequences, config.ranks * config.batch):
            own = first + self.rank * config.batch
            batch = self.text.held_out(range(own, own + config.batch))
            with evaluating(self.model):
                losses = self._losses(batch)
            count = min(config.batch, max(0, num_sequences - own))
            total += losses[:count].sum()
            num_targets += int((batch.targets[:count] != IGNORED).sum())
        sums = torch.tensor([total.item(), num_targets], dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        loss_sum, num_targets = sums.tolist()
        return loss_sum / max(1.0, num_targets)

    def _losses(self, batch: Batch) -> Tensor:
        """Return each token's loss, (sequences, tokens); 0 where none is predicted."""
        inputs, targets = batch.inputs.to(self.device), batch.targets.to(self.device)
        positions = None if batch.positions is None else batch.positions.to(self.device)
        logits = self.language_model.logits(inputs, positions).float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORED)
        return losses.view(targets.shape)

    def _record(
        self, done: int, result: StepReport, seconds: float, val_loss: float | None
    ) -> None:
        if self.rank != 0:
            return
        num_tokens = self.config.tokens_per_step
        memory = peak_memory_nbytes(self.device)
        values = {
            "loss": result.loss,
            "lr": learning_rate(self.config, done - 1),
            "grad_norm": result.grad_norm,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(num_tokens / seconds, 1),
            "peak_memory": memory,
        }
        if (epoch := self.text.epochs(done)) is not None:
            values["epoch"] = round(epoch, 6)
        if val_loss is not None:
            values["val_loss"] = self.val_loss = val_loss
        self.folder.add_metrics({"step": done, **values})
        self.loggers.log(done, values)
        figures = {
            "loss": f"{result.loss:.3f}",
            f"{self.config.unit}s/s": f"{self._speed.after(num_tokens, seconds):,.0f}",
            "val": f"{self.val_loss:.3f}" if self.val_loss is not None else "",
            "epoch": f"{epoch:.2f}" if epoch is not None else "",
            "peak": f"{memory / 2**30:.2f} GiB",
        }
        shown = {name: value for name, value in figures.items() if value}
        self.report.step(done, shown, measured=val_loss is not None)

    def sample(self) -> str:
        """Generate from the sharded model, all ranks together, and return prompt and sample.

        Ends early with a token that ends a document, and when asked to stop.
        """
        self.stop.leads_to = "leaving the rest of the sample out; the last step is saved"
        begin = self.text.encode(self.config.prompt or self._words())
        length = self.config.sample_length
        if self._num_positions is not None:  # which some models have no more of
            begin = begin[: self._num_positions - 1]
            length = min(length, self._num_positions - len(begin))
        self.report.note(f"sampling {length} {self.config.unit}s from the sharded model ...")
        return self.text.decode([*begin, *self._sampled(begin, length)])

    def _words(self) -> str:
        """Return what a sample begins with: of the user's own text, some words that the first step was given."""
        if not self.config.data:
            return "def main("
        words = self.text.decode(self.text.batch(0, range(1)).inputs[0].tolist()).split()
        return " ".join(words[1:4]) or "".join(words)[1:20] or "\n"

    def _sampled(self, begin: list[int], length: int) -> Iterator[int]:
        prompt = torch.tensor([begin], device=self.device)
        for token in generate(
            self.language_model.continuation(),
            prompt,
            length=length,
            temperature=self.config.temperature,
            seed=self.config.seed,
            agree=self._agree,
        ):
            if token.item() == NO_TOKEN and not self.stop.asked:
                self.report.note(
                    "the sample ends where what the model computes is not finite: lower --lr"
                )
            if token.item() in (NO_TOKEN, self.text.end_token):
                return
            yield int(token.item())

    def _agree(self, choice: Tensor) -> Tensor:
        """Take rank 0's token, which is none if it was asked to stop."""
        if self.stop.asked:
            choice = torch.full_like(choice, NO_TOKEN)
        dist.broadcast(choice, src=0)
        return choice

    def _check_alike(self, job: Job) -> None:
        """Compare what ranks read from their hosts' disks: the text, and where the run goes on."""
        own = (self.text.survey.fingerprint, job.done)
        of_ranks: list[Any] = [own] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        first, first_done = of_ranks[0]
        for rank, (fingerprint, done) in enumerate(of_ranks):
            if fingerprint != first:
                raise TrainingError(
                    f"--data: rank {rank} reads other text than rank 0. Give every host the same "
                    "files; without --data, the same Python version."
                )
            if done != first_done:
                raise TrainingError(
                    f"rank {rank} would begin after step {done}, rank 0 after step {first_done}: their hosts "
                    f"see different checkpoints in {self.folder.checkpoints}. Use a folder that all hosts "
                    "share, and start again."
                )

    def _check_model(self) -> None:
        """Run the model for a moment, to see that no token sees what it must not."""
        config, hint = self.config, ""
        given: dict[str, Any] = {"vocab_size": config.vocab_size, "device": self.device}
        try:
            self.language_model.check_causal(**given)
            if config.tokenizer and not config.across_documents:
                hint = (
                    " Take another model, or let documents see each other with --across-documents."
                )
                self.language_model.check_documents_apart(**given)
        except ModelConfigError as error:
            raise OptionError(f"--model {config.model_name}: {error}{hint}") from error


def peak_memory_nbytes(device: torch.device) -> int:
    """Most memory this rank has held: allocated device memory, or resident host memory on CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def build_model(blueprint: Blueprint, config: TrainConfig, device: torch.device) -> LanguageModel:
    """Build the model on `meta`, shard each layer and the rest, then allocate and fill only the shards."""
    mesh = init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("shard",))
    policy = fullshard.MixedPrecisionPolicy()
    if config.dtype == "bf16":
        policy = fullshard.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )

    def shard(layers: Sequence[nn.Module], model: nn.Module) -> None:
        for layer in (*layers, model):
            fullshard.fully_shard(layer, mesh=mesh, mp_policy=policy)

    recompute = config.activation_checkpointing
    return build(blueprint, shard, device=device, seed=config.seed, recompute=recompute)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=_BETAS, fused=True)
    return fullshard.step_on_shards(adamw)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rise linearly for `warmup` steps, then fall as a cosine to `min_lr` at the last step.

    With lr 1, min_lr 0, warmup 2 and 6 steps: 0.5, 1, 0.85, 0.5, 0.15, 0.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    span = max(1, config.steps - config.warmup)
    progress = min(1.0, (step - config.warmup + 1) / span)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2


class StepRecorder(contextlib.ExitStack):
    """Traces a few steps in the middle of a run, which then changes nothing but their time.

    Every rank goes through the same calls: `begin_step` and `end_step` around each step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, steps: range
    ) -> None:
        super().__init__()
        self._model, self._optimizer = model, optimizer
        self._folder, self._steps = folder, steps
        self._tracing: fullshard.Tracing | None = None

    def begin_step(self, step: int) -> None:
        if step in self._steps and self._tracing is None:
            tracing = fullshard.trace(
                self._model, self._folder, optimizer=self._optimizer, first_step=step + 1
            )
            self._tracing = self.enter_context(tracing)
        if self._tracing is not None:
            self._tracing.skip()  # checkpoints and progress between steps

    def end_step(self, step: int) -> None:
        if self._tracing is None:
            return
        self._tracing.step()
        if step + 1 not in self._steps:
            self._tracing = None
            self.close()


def steps_to_trace(config: TrainConfig, *, done: int) -> range:
    """Choose steps in the middle of what is left, but the first two only if there are no others.

    The first steps allocate and are not typical. Of 30 steps, three: the 15th, 16th and 17th.
    """
    left = config.steps - done
    count = min(config.trace_steps, max(1, left - 2))
    first = done + (left - count + 1) // 2
    return range(first, first + count)
