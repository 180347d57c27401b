"""A run on one rank: from a job to a folder with results, and a summary."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from fullshard.errors import FullshardError
from fullshard.tools.job import Job
from fullshard.tools.loggers.interface import RunInfo
from fullshard.tools.progress import Reporter
from fullshard.tools.report import write_report
from fullshard.tools.run_facts import gather_facts
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.train import StopRequest, Trainer, peak_memory_nbytes
from fullshard.tools.weights import load_initial_weights


def run_rank(job: Job, stop: StopRequest, report: Reporter) -> dict[str, Any]:
    """Train, sample and summarise as one rank of the default process group.

    Returns the summary, whose `status` is `finished` or `stopped`.
    """
    config, folder = job.config, job.folder
    trainer = Trainer(job, stop, report)
    if job.checkpoint is not None:
        report.note(f"resuming after step {job.done} from {job.checkpoint.path}")
        fullshard.load_checkpoint(job.checkpoint.path, trainer.model, trainer.optimizer)
    elif config.init_from:
        report.note(f"beginning with the weights of {config.init_from}")
        load_initial_weights(trainer.model, Path(config.init_from))
    dist.barrier()  # nobody may still be checking the folder when rank 0 starts to write
    if trainer.rank == 0:
        facts = gather_facts(
            num_parameters=trainer.num_params,
            flops_per_token=trainer.language_model.flops_per_token(seq=config.seq),
            device=trainer.device,
        )
        folder.start(
            config,
            fingerprint=job.text.survey.fingerprint,
            done=job.done,
            facts=facts,
            tokenizer=job.tokenizer.files if job.tokenizer else None,
            model=job.model.fields,
        )
        trainer.loggers.start(RunInfo(folder.path, dataclasses.asdict(config), job.done))
    try:
        summary = _run(job, trainer, report)
    except BaseException:
        trainer.loggers.finish({"status": "failed"})
        raise
    trainer.loggers.finish(summary)
    return summary


def _run(job: Job, trainer: Trainer, report: Reporter) -> dict[str, Any]:
    config, folder = job.config, job.folder
    started = time.perf_counter()
    done = trainer.train(done=job.done)
    seconds = time.perf_counter() - started
    text = ""
    if done == config.steps and config.sample_length:
        report.note(f"sampling {config.sample_length} {config.unit}s from the sharded model ...")
        text = trainer.sample()
    own_peak = float(peak_memory_nbytes(trainer.device))
    peak = torch.tensor(own_peak, dtype=torch.float64, device=trainer.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    summary = {
        "status": "finished" if done == config.steps else "stopped",
        "step": done,
        "steps": config.steps,
        "loss": _final_loss(folder) if trainer.rank == 0 else None,
        "val_loss": trainer.val_loss,
        "unigram_entropy": job.text.survey.unigram_entropy,
        "unit": config.unit,
        "tokens_per_second": (done - job.done) * config.tokens_per_step / seconds,
        "seconds": seconds,
        "peak_memory_per_rank": int(peak.item()),
        "out": str(folder.path),
        "report": str(folder.report_file),
        "sample": text,
    }
    if trainer.rank == 0:
        folder.write_summary(summary)
        try:
            write_report(folder.path)
        except (FullshardError, OSError) as error:  # the run itself is complete
            summary["report"] = None
            report.note(f"no trace report: {error}")
    return summary


def _final_loss(folder: RunFolder) -> float:
    """Average the last steps, up to 20: one step's loss depends too much on its text."""
    losses = [entry["loss"] for entry in folder.metrics()][-20:]
    return float(sum(losses) / len(losses))
