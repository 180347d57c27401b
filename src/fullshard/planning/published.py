"""Predict the rows of a table of published runs: `fullshard plan --runs CSV`.

Reads physical columns alone: shapes, counts, hardware, precision, what is divided how. Never who published a row, its
name, or what was measured. Where a column is empty, the usual value is taken; where too much is missing, the
row says so and is not predicted.
"""

import csv
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fullshard.errors import FullshardError
from fullshard.plan.actions import Holding
from fullshard.plan.simulator import StepMemory, follow_memory
from fullshard.plan.step import OptimizerPlan, StepSettings, plan_step
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import NCCL
from fullshard.plan.workload import Run, Workload
from fullshard.planning.costs import CONTEXT_NBYTES, FITTED, SPREAD, Constants, Costs, Manner
from fullshard.planning.estimate import Estimate, estimate_step
from fullshard.planning.machines import GPUS, Machine, MachineError, custom_gpu, machine_named
from fullshard.planning.offloading import offloaded
from fullshard.planning.pools import pooled_nbytes, sharing_nbytes
from fullshard.planning.setup import OPTIMIZERS, Optimizer
from fullshard.planning.shapes import (
    CHUNKED_LOSS,
    COMPILED_LOSS,
    FLASH_GPT_LOSS,
    FLASH_LOSS,
    PARALLEL_LOSS,
    RETURNED_LOSS,
    TRITON_LOSS,
    WHOLE_LOSS,
    Experts,
    Kernels,
    MicroBatch,
    Parts,
    ShapeError,
    TransformerShape,
    kernels_of,
    shape_workload,
)

# What a row's notes say of the run, and how words begin that are known, the usual one first.
_NOTES = {
    "master": ("fp32", "bf16", "fp16"),
    "opt": tuple(OPTIMIZERS),
    "precision": ("bf16", "amp_bf16", "amp_fp8"),  # columns say how it is computed
    "train": ("full", "lora"),
    "mlp": ("gated", "swiglu", "gelu2"),
}
_KEYS = "|".join((*_NOTES, "moe", "head_dim"))
# A token lasts until `;`, or until another begins.
_NOTE = re.compile(
    rf"(?<![\w=])({_KEYS})\s*=\s*([^;]*?)\s*(?=;|$|[\s,]+(?:{_KEYS})\s*=)", re.IGNORECASE
)
_EXPERTS = ("experts", "top_k", "moe_ffn", "shared", "dense_layers")
_OF_MOE = (*_EXPERTS, "mla", "active_params", "active_params_b")
_NO_EXPERTS = (("shared", "0"), ("dense_layers", "0"))  # as where they are not given
_SYSTEMS = (
    *("fsdp1", "fsdp2", "simplefsdp", "yafsdp", "megatron_fsdp", "jax_fsdp", "thunder_fsdp"),
    *("gemini", "zero1", "zero2", "zero3", "ddp", "single"),
)
_ZERO2 = "grad_op_replicated_params"
_REPLICATED = ("optim", "optim_hybrid", _ZERO2, "none")
_SHARDING_OF = {"zero1": "optim", "zero2": _ZERO2, "ddp": "none", "single": "none"}
_COMPILED = ("simplefsdp", "jax_fsdp", "megatron_fsdp", "thunder_fsdp", "yafsdp")
_SHARDED = ("full", "hybrid", "grad_op")
_DTYPES, _YES_NO = ("bf16", "fp16", "fp32"), ("yes", "no")
# Columns of words, and those that are known.
WORDS = {
    "system": _SYSTEMS,
    "sharding": (*_SHARDED, *_REPLICATED),
    "param_dtype": _DTYPES,
    "reduce_dtype": _DTYPES,
    "act_ckpt": ("none", "selective", "full"),
    "attention": ("flash", "sdpa", "triton", "flex", "eager"),
    "offload": ("none", "params", "params+grads+optim"),
    "mem_kind": ("allocated", "reserved", "unknown"),
    **dict.fromkeys(("fp8", "compile", "tied_embeddings"), _YES_NO),
}
# Programs of their time step with one kernel, and print what their allocator has.
_NEWER = ("fsdp2", "simplefsdp")
# PyTorch's own engines, whose tensors come and go in the order of the host.
_EAGER_FSDP = ("fsdp1", "fsdp2")
# No row says when a program ran, but a GPU says a time before which it did not. Programs for these compile the loss
# where they compile the model, as torchtitan does since January 2025, and let their allocator's segments grow.
_LATER = frozenset(
    ("H100-96GB", "H200-141GB-SXM", "B200", "B200-power-limited", "GB200", "GB300", "MI300X")
)


class RunsError(FullshardError, ValueError):
    """A file that is not a table of runs."""


class UnsupportedRowError(FullshardError, ValueError):
    """A row that cannot be predicted, and why."""


class PublishedRun(NamedTuple):
    """A row, translated: what runs on what, how.

    micro_batches: forwards and backwards a step. held_as: what its memory counts: "allocated" tensors, or a constant's
    name, by which an allocator's pools are multiplied. gradient_owners: ranks over which gradients are divided, and
    parameters are not.
    """

    shape: TransformerShape
    batch: MicroBatch
    settings: StepSettings
    machine: Machine
    micro_batches: int
    manner: Manner
    held_as: str
    system: str
    offload: str = "none"
    gradient_owners: int = 1
    assumed: tuple[str, ...] = ()

    def step_seconds(self, estimate: Estimate) -> float:
        """Return the seconds of a step with all its micro-batches, of an estimate with two of them at most.

        Where layers are divided, the last part waits for the first to compute a sequence, and so on, once a step.
        """
        planned = self.settings.num_microbatches
        one = (estimate.step_s - estimate.optimizer_s) / planned
        if planned > 1 and not self.settings.reduces_each:
            one = estimate.first_pass_s  # the last one alone reduces
        idle = (
            (self.batch.parts.pipeline - 1) / self.batch.sequences * estimate.computing_s / planned
        )
        return estimate.step_s + one * (self.micro_batches - planned) + idle

    def one_by_one(self) -> "PublishedRun":
        """Return a pipeline that is given one sequence at a time.

        What is sharded stays gathered, and is reduced once, since each would else be moved for each sequence.
        """
        micro_batches = self.micro_batches * self.batch.sequences
        settings = dataclasses.replace(
            self.settings,
            num_microbatches=min(micro_batches, 2),
            reshard_after_forward=False,
            reduces_each=False,
        )
        batch = dataclasses.replace(self.batch, sequences=1)
        return self._replace(batch=batch, settings=settings, micro_batches=micro_batches)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file. Raises RunsError for a file without the columns of such a table."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a mark
            reader = csv.DictReader(file)
            columns, rows = reader.fieldnames or (), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunsError(f"{path}: cannot be read as a table of runs: {error}.") from error
    missing = sorted({"gpu", "hidden", "num_layers"} - set(columns))
    if missing:
        hint = " Its columns have to be separated by commas." if len(columns) == 1 else ""
        raise RunsError(
            f"{path}: is no table of runs: it has no column {', '.join(missing)}.{hint}"
        )
    if not rows:
        raise RunsError(f"{path}: has columns and no rows.")
    twice = sorted({name for name in columns if columns.count(name) > 1})
    said = [f"there are several columns {name}: took the last" for name in twice]

    def read(row: dict[Any, Any]) -> dict[str, str]:
        # A short line has None for what it lacks, and a long one a list of what it has more.
        more = [each for each in row.get(None, ()) if each]
        left = [f"there are cells beyond the columns: left out {', '.join(more)}"] if more else []
        return {name: row[name] or "" for name in columns} | {_SAID: "; ".join(said + left)}

    return [read(row) for row in rows]


_SAID = "what was said of a row while it was read"  # a column that no table has


class _Row:
    """A row's physical values by column, with what its notes say of the run."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        # What was not given, or does not go together, with what was taken.
        self.assumed: list[str] = [said] if (said := values.get(_SAID)) else []
        notes = _NOTE.findall(self.text("notes").lower())
        self.notes: dict[str, str] = dict(notes)
        twice = sorted(key for key in self.notes if [each for each, _ in notes].count(key) > 1)
        self.assumed += [f"{key}= is given twice: took the last" for key in twice]

    def text(self, column: str, default: str = "") -> str:
        text = (self._values.get(column) or "").strip()
        known = GPUS if column == "gpu" else WORDS.get(column, ())
        return next((word for word in known if word.lower() == text.lower()), text) or default

    def number(self, column: str, default: float | None = None) -> float:
        """Return a number. Raises UnsupportedRowError for text, and for nothing where there is no default."""
        text = self.text(column)
        if not text:
            if default is None:
                raise UnsupportedRowError(f"{column} is not given")
            return default
        return _positive(column, text)

    def integer(self, column: str, default: int | None = None, *, tells: bool = False) -> int:
        """Return a whole number, as `number` does. tells: note where the default was taken."""
        value = self.number(column, default)
        if tells and not self.text(column):
            self.assumed.append(f"{column} is not given: took {value:g}")
        return _whole(column, value)


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise UnsupportedRowError(f"{name} is {text!r}, which is no number") from error
    if not 0 < value < math.inf:
        raise UnsupportedRowError(f"{name} is {text}, and has to be above 0")
    return value


def _whole(name: str, value: float) -> int:
    if value != round(value):
        raise UnsupportedRowError(f"{name} is {value:g}, and has to be a whole number")
    return round(value)


def _count(name: str, text: str) -> int:
    return _whole(name, _positive(name, text))


def published_run(values: Mapping[str, str]) -> PublishedRun:
    """Translate a row. Raises UnsupportedRowError, which says what is missing, unknown or impossible."""
    row = _Row(values)
    _check_words(row)
    num_gpus = row.integer("num_gpus", 128, tells=True)
    parts = Parts(*(row.integer(name, 1) for name in ("tp", "cp", "pp", "ep")))
    divided = parts.tensor * parts.pipeline
    if num_gpus % divided:
        raise UnsupportedRowError(
            f"{num_gpus} GPUs are not divided by {divided} ways of parallelism"
        )
    shape = _shape(row)
    _check_parts(row, shape, parts, num_gpus)
    is_flat = row.text("system") == "fsdp1"
    is_lora = row.notes.get("train", "").startswith("lora")
    is_fused = row.text("compile") == "yes" or (
        not row.text("compile") and row.text("system") in _COMPILED
    )
    master = _master(row)
    ranks = num_gpus // divided
    compute_dtype, autocasts = _computed_in(row)
    settings = dataclasses.replace(
        _settings(row, ranks, master, is_flat=is_flat),
        num_microbatches=min(row.integer("grad_accum", 1, tells=True), 2),
    )
    owners = max(parts.expert, settings.sharding.shard_size)
    parts = dataclasses.replace(parts, expert_owners=owners)
    batch = MicroBatch(
        sequences=row.integer("micro_batch_per_gpu", 1, tells=True),
        seq=row.integer("seq_len", 4096, tells=True),
        checkpointing=row.text("act_ckpt", "unknown"),
        kernels=_kernels(row, shape, compute_dtype, is_fused=is_fused, autocasts=autocasts),
        is_fp8=row.text("fp8") == "yes",
        compute_dtype=compute_dtype,
        param_dtype=master,
        lora_rank=8 if is_lora else 0,
        has_outer_units=row.text("system") in ("fsdp2", "simplefsdp"),
        # FSDP1 with frozen weights: seen in every run of it.
        has_two_recomputed=is_lora and is_flat and settings.sharding.shard_size > 1,
        writes_scores=row.text("attention") == "eager",
        autocasts=autocasts,
        # A model of Transformers returns it unless it is the one that recomputes; its programs do not name a dtype.
        keeps_cache=autocasts and not row.text("param_dtype"),
        parts=parts,
    )
    return PublishedRun(
        shape=shape,
        batch=batch,
        settings=settings,
        machine=_machine(row),
        micro_batches=row.integer("grad_accum", 1),
        manner=_manner(row, parts, settings.sharding.shard_size, is_flat=is_flat),
        held_as=_held_as(row),
        system=row.text("system"),
        offload="none" if row.text("offload", "none") == "none" else "params",
        gradient_owners=row.integer("shard_size", ranks) if _sharding(row) == _ZERO2 else 1,
        assumed=tuple(row.assumed),
    )


def _sharding(row: _Row) -> str:
    """Return what is divided: as the row says, or as its system does."""
    return row.text("sharding") or _SHARDING_OF.get(row.text("system"), "full")


def _optimizer(row: _Row) -> Optimizer:
    word = row.notes.get("opt", "adamw")
    return OPTIMIZERS[max((name for name in OPTIMIZERS if word.startswith(name)), key=len)]


def _check_words(row: _Row) -> None:
    """Raise UnsupportedRowError for words that no run has."""
    for column, known in WORDS.items():
        if (word := row.text(column)) and word not in known:
            raise UnsupportedRowError(
                f"{column} is {word!r}: expected {', '.join(known)}{_meant(word, known)}"
            )
    system, sharding = row.text("system"), _sharding(row)
    if not system:
        row.assumed.append(
            f"system is not given: took sharding {sharding}, by no engine in particular"
        )
    if not row.text("compile"):
        took = "yes" if system in _COMPILED else "no"
        row.assumed.append(f"compile is not given: took {took}")
    if system == "single" and row.integer("num_gpus", 1) > 1:
        row.assumed.append("system is single, and num_gpus is above 1: took replicas")
    if sharding == "none" and row.integer("shard_size", 1) > 1:
        row.assumed.append("nothing is sharded, and shard_size is above 1: took 1")
    if system in _SHARDING_OF and sharding in _SHARDED:
        row.assumed.append(
            f"{system} does not shard parameters, and sharding is {sharding}: took {sharding}"
        )
    for note, known in _NOTES.items():  # not a closed list
        word = row.notes.get(note, known[0])
        if not re.match(f"({'|'.join(known)})(?![a-z])", word):
            row.assumed.append(f"{note}={word} is not known: took {known[0]} of {', '.join(known)}")
            del row.notes[note]


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.4)
    return f". Did you mean {near[0]}?" if near else ""


def _check_parts(row: _Row, shape: TransformerShape, parts: Parts, num_gpus: int) -> None:
    """Raise UnsupportedRowError for experts and parts of a model that cannot be; note those that are uneven."""
    if shape.experts is None and parts.expert > 1:
        row.assumed.append(f"ep is {parts.expert}, and there is no moe=: took no experts")
    experts, layers = shape.experts or Experts(parts.expert, 1, 1), shape.num_layers
    heads = shape.num_heads if row.text("hidden") else 0  # else nobody said how many
    in_stage = num_gpus // parts.pipeline
    for name, value, most, what in (
        ("pp", parts.pipeline, layers, "layers"),
        ("moe=top_k", experts.top_k, experts.num, "experts"),
        ("moe=dense_layers", experts.num_dense_layers, layers, "layers"),
    ):
        if value > most:
            raise UnsupportedRowError(f"{name} is {value}, and there are {most} {what}")
    for name, value, whole, what in (
        ("tp", parts.tensor, heads, "heads"),
        ("ep", parts.expert, experts.num, "experts"),
        ("ep", parts.expert, in_stage, "GPUs of a pipeline's part"),
        ("cp", parts.context, in_stage // parts.tensor, "GPUs that pp and tp leave"),
    ):
        if value > whole > 0:
            raise UnsupportedRowError(f"{name} is {value}, and there are {whole} {what}")
        if whole % value:  # programs pad, or divide unevenly
            row.assumed.append(f"{name} is {value}, which does not divide {whole} {what}")


def _master(row: _Row) -> torch.dtype:
    """Return the dtype of the stored parameters."""
    stored = row.notes.get("master", "fp32")[:4]
    # Without a shard of the parameters, their copy in float32 is a part of the optimizer's state.
    owns_copy = _sharding(row) in _REPLICATED and _sharding(row) != "none"
    owns_copy = owns_copy and row.text("param_dtype") != "fp32"
    return torch.float32 if stored == "fp32" and not owns_copy else torch.bfloat16


def _manner(row: _Row, parts: Parts, shard_size: int, *, is_flat: bool) -> Manner:
    attention, kind = row.text("attention", "sdpa"), _optimizer(row)
    if row.text("system") in ("megatron_fsdp", "jax_fsdp"):
        attention = "cudnn"
    return Manner(
        attention=attention,
        copied=0.0 if is_flat else 4.0,
        # Of PyTorch's engine, measured by `bench/host.py`; DeepSpeed's hooks are Python of every module.
        unit_s=8e-3 if row.text("system") == "zero3" else 1.3e-3,
        optimizer_nbytes=kind.num_passed
        * 4
        * (1 if row.text("system") in _NEWER else kind.foreach_share),
        stride=parts.tensor,
        replica_stride=parts.tensor * shard_size,
    )


def _held_as(row: _Row) -> str:
    usual = "reserved" if row.text("system") in _NEWER else "allocated"
    kind, gpu = row.text("mem_kind", usual), row.text("gpu")
    if kind == "reserved" and gpu in _LATER and gpu != "MI300X":  # ROCm's cannot grow
        return "reserved_growing"
    return "device" if kind == "unknown" else kind


def _computed_in(row: _Row) -> tuple[torch.dtype, bool]:
    """Return the dtype that a row computes in, and whether autocast makes it of parameters in float32.

    FlashAttention and kernels in Triton take 16 bits alone: with parameters in float32 something casts around them, and
    so it does where nobody says what FSDP1's are.
    """
    given, attention = row.text("param_dtype"), row.text("attention")
    autocasts = row.text("system") == "fsdp1" and attention == "flash" and not given
    if autocasts:
        row.assumed.append("param_dtype is not given: took fp32, cast around flash attention")
    if given == "fp32":
        casts = row.notes.get("precision", "").startswith("amp")
        autocasts = casts or attention in ("flash", "triton")
    return torch.float32 if given == "fp32" and not autocasts else torch.bfloat16, autocasts


def _kernels(
    row: _Row, shape: TransformerShape, dtype: torch.dtype, *, is_fused: bool, autocasts: bool
) -> Kernels:
    system, attention = row.text("system"), row.text("attention")
    loss = WHOLE_LOSS
    if system == "fsdp2" and "train" in row.notes:
        loss = CHUNKED_LOSS  # as programs for fine-tuning do, whose vocabulary is large for their batches
    elif system == "fsdp2" and is_fused and row.text("gpu") in _LATER:
        loss = COMPILED_LOSS
    elif row.integer("tp", 1) > 1:
        loss = PARALLEL_LOSS
    elif autocasts:
        loss = RETURNED_LOSS
    elif not is_fused:
        # Models of the time of FSDP1 return logits. Whoever installs a package for attention takes its loss as well.
        usual = RETURNED_LOSS if system == "fsdp1" else WHOLE_LOSS
        flash = FLASH_LOSS if shape.gated_mlp else FLASH_GPT_LOSS
        loss = {"flash": flash, "triton": TRITON_LOSS}.get(attention, usual)
    kernels = kernels_of(shape, is_compiled=is_fused, dtype=dtype)
    if system == "thunder_fsdp":  # fuses what runs, and keeps what single operators keep
        single = kernels_of(shape, is_compiled=False, dtype=dtype)
        kernels = dataclasses.replace(
            kernels, norm_kept=single.norm_kept, gate_kept=single.gate_kept
        )
    return dataclasses.replace(kernels, loss=loss.of(dtype))


def _shape(row: _Row) -> TransformerShape:
    experts = None
    of_moe = (part.split("=", 1) for part in row.notes.get("moe", "").split(",") if "=" in part)
    moe = {key.strip(): value.strip() for key, value in of_moe}
    moe = {key: value for key, value in moe.items() if (key, value) not in _NO_EXPERTS}
    if "moe" in row.notes and "experts" not in moe:
        raise UnsupportedRowError(
            "the shape of its layers is not given: moe= needs experts=NUMBER, and takes top_k=, moe_ffn=, shared=, "
            "dense_layers="
        )
    if not row.text("hidden"):
        usual = _usual_shape(row.number("params_b") * 1e9)
        row.assumed.append(
            f"hidden is not given: took {usual.num_layers} layers of {usual.hidden}, as usual for params_b"
        )
        return usual
    hidden, heads = row.integer("hidden"), row.integer("num_heads")
    if hidden % heads and "head_dim" not in row.notes:
        raise UnsupportedRowError(
            f"hidden {hidden} is no multiple of num_heads {heads}, and there is no head_dim="
        )
    if heads % row.integer("num_kv_heads", heads):
        raise UnsupportedRowError(f"num_heads {heads} is no multiple of num_kv_heads")
    if moe:
        row.assumed += [f"moe={key}= is not known: left out" for key in moe if key not in _OF_MOE]
        counts = {key: _count(f"moe={key}", moe[key]) for key in _EXPERTS if key in moe}
        experts = Experts(
            num=counts["experts"],
            top_k=counts.get("top_k", 1),
            ffn_hidden=counts.get("moe_ffn") or row.integer("ffn_hidden"),
            num_shared=counts.get("shared", 0),
            num_dense_layers=counts.get("dense_layers", 0),
        )
    latent = moe.get("mla", "").removeprefix("kv_lora_rank ")
    given = "128" if latent else row.notes.get("head_dim") or str(hidden // heads)
    shape = TransformerShape(
        num_layers=row.integer("num_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=row.integer("num_kv_heads", heads),
        ffn_hidden=row.integer("ffn_hidden", 4 * hidden, tells=True),
        vocab=row.integer("vocab", 50_257, tells=True),
        head_dim=_count("head_dim=", given),
        tied_embeddings=row.text("tied_embeddings") == "yes",
        gated_mlp=not row.notes.get("mlp", "").startswith("gelu2"),
        kv_lora_rank=_count("kv_lora_rank", latent) if latent else 0,
        experts=experts,
    )
    gated = dataclasses.replace(shape, gated_mlp=True)
    params = row.number("params_b", shape.num_params / 1e9) * 1e9
    # Where three matrices make the number of parameters that is given, and two do not, there are three.
    is_gated = abs(gated.num_params / params - 1) < 0.02 < abs(shape.num_params / params - 1)
    shape = gated if is_gated else shape
    if abs(shape.num_params / params - 1) > 0.1:
        row.assumed.append(
            f"params_b is {params / 1e9:g}, and the shape has {shape.num_params / 1e9:.3g}: took the shape"
        )
    return shape


def _usual_shape(params: float) -> TransformerShape:
    """Return the usual decoder of so many parameters: 128 times as wide as it is deep, and heads of 128.

    175e9 gives 96 layers of 12288, as GPT-3 has.
    """
    layers = max(1, round((params / (12 * 128**2)) ** (1 / 3)))
    hidden = 128 * layers
    return TransformerShape(layers, hidden, layers, layers, 4 * hidden, 50_257, 128, True, False)


def _machine(row: _Row) -> Machine:
    if not row.text("gpu") and all(row.text(column) for column in _OF_MACHINE):
        flops, *rates = (row.number(column) for column in _OF_MACHINE)
        row.assumed.append("gpu is not given: took its numbers, and as much memory as is needed")
        memory, link, network = (rate * 1e9 for rate in rates)
        gpu = custom_gpu(
            flops=flops * 1e12, memory_nbytes=math.inf, memory_rate=memory, link_rate=link
        )
        return Machine(gpu, row.integer("gpus_per_node", gpu.per_host), link, network)
    try:
        machine = machine_named(
            row.text("gpu"),
            link_rate=row.number("intra_node_gbps", 0) * 1e9 or None,
            network_rate=row.number("inter_node_gbps", 0) * 1e9 or None,
        )
    except MachineError as error:
        raise UnsupportedRowError(
            f"gpu is {row.text('gpu')!r}: expected {', '.join(GPUS)}, or none, and all of "
            f"{', '.join(_OF_MACHINE)}{_meant(row.text('gpu').upper(), GPUS)}"
        ) from error
    if machine.gpu.fp8 == 1 and row.text("fp8") == "yes":
        row.assumed.append(f"{machine.gpu.name} has no products of 8 bits: took bf16")
    gpu = dataclasses.replace(
        machine.gpu,
        flops=row.number("peak_bf16_tflops", machine.gpu.flops / 1e12) * 1e12,
        memory_rate=row.number("hbm_gbps", machine.gpu.memory_rate / 1e9) * 1e9,
    )
    per_host = row.integer("gpus_per_node", machine.gpu.per_host)
    if gpu.per_host > _LARGEST_HOST:  # one link domain, whose GPUs sit in many hosts
        per_host = max(per_host, gpu.per_host)
    return dataclasses.replace(machine, gpu=gpu, per_host=per_host)


def _settings(row: _Row, ranks: int, master: torch.dtype, *, is_flat: bool) -> StepSettings:
    sharding, usual = _sharding(row), ranks
    if "hybrid" in sharding:  # inside of a host
        usual = math.gcd(ranks, max(1, row.integer("gpus_per_node", 8) // row.integer("tp", 1)))
    shard_size = 1 if sharding == "none" else row.integer("shard_size", usual)
    if shard_size > ranks or ranks % shard_size:
        raise UnsupportedRowError(
            f"shard_size is {shard_size}, and there are {ranks} ranks to shard over"
        )
    owners = 1
    if sharding not in _SHARDED:
        shard_size, owners = 1, shard_size
    is_wide = row.text("reduce_dtype", row.text("param_dtype")) == "fp32"
    reduce_dtype = torch.float32 if is_wide else torch.bfloat16
    num_states = _optimizer(row).num_states
    state_nbytes = 1 if "8bit" in row.notes.get("opt", "") else master.itemsize
    state, temporary = num_states * state_nbytes, master.itemsize
    if sharding not in (*_SHARDED, "none"):  # float32, as the gradient of what a rank steps
        state, temporary = 4 * num_states + (4 if master.itemsize == 2 else 0), 4
    return StepSettings(
        sharding=Sharding(
            shard_size=shard_size,
            way=NCCL,
            replicate_size=max(1, ranks // shard_size),
            is_flat=is_flat,
            reduce_dtype=reduce_dtype,
        ),
        has_streams=True,
        reshard_after_forward=False if sharding == "grad_op" else None,
        reduces_each=sharding in (*_SHARDED, _ZERO2),
        optimizer=OptimizerPlan(
            nbytes_per_element=state / owners,
            peak_per_element=0 if row.text("system") in (*_NEWER, "zero3") else temporary / owners,
        ),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What was predicted of a row. reason: why nothing was, and what was assumed.

    peak_nbytes: as the row counts it, of tensors or of the allocator. needed_nbytes: of the device.
    """

    peak_nbytes: float
    needed_nbytes: float
    step_s: float
    tokens_per_s: float
    fits: bool
    reason: str = ""


_GIB, _LARGEST_HOST = 1 << 30, 8
_OF_MACHINE = ("peak_bf16_tflops", "hbm_gbps", "intra_node_gbps", "inter_node_gbps")


def predict_row(values: Mapping[str, str], constants: Constants = FITTED) -> Prediction:
    """Predict a row. Raises UnsupportedRowError.

    Where nobody says what is recomputed, memory is that of the least with which the step fits. Its time then is at
    most that of selective recomputation: who publishes a speed and trains larger models than fit has other means.
    Where it fits without its logits alone, the peak is without them, since so it was if it ran.
    """
    run = published_run(values)
    if run.batch.checkpointing != "unknown":
        return _without_logits(run, _predict(run, constants), run.assumed, constants)
    tried = {}
    for checkpointing in ("none", "selective", "full"):
        batch = dataclasses.replace(run.batch, checkpointing=checkpointing)
        tried[checkpointing] = _predict(run._replace(batch=batch), constants)
        if tried[checkpointing].fits:
            break
    timed = min(tried.values(), key=lambda each: (each is not tried.get("selective"), each.step_s))
    found = dataclasses.replace(
        tried[checkpointing], step_s=timed.step_s, tokens_per_s=timed.tokens_per_s
    )
    reason = (*run.assumed, f"act_ckpt is not given: took {checkpointing}")
    return _without_logits(run._replace(batch=batch), found, reason, constants)


def _without_logits(
    run: PublishedRun, found: Prediction, reason: tuple[str, ...], constants: Constants
) -> Prediction:
    """Return a prediction with its reason, and the peak of a loss in parts if it fits with that alone."""
    if not found.fits:
        kernels = dataclasses.replace(run.batch.kernels, loss=CHUNKED_LOSS)
        batch = dataclasses.replace(run.batch, kernels=kernels)
        tried = _predict(run._replace(batch=batch), constants)
        if tried.fits:
            found = dataclasses.replace(found, peak_nbytes=tried.peak_nbytes)
            reason = (*reason, "does not fit with all logits at once: the peak is that without")
    reason = (*reason, found.reason) if found.reason else reason
    return dataclasses.replace(found, reason="; ".join(reason))


def estimate_run(run: PublishedRun, constants: Constants = FITTED) -> tuple[Workload, Estimate]:
    """Return what a run computes, and its step: of at most two micro-batches, since more are like them."""
    workload = shape_workload(run.shape, run.batch)
    settings = _resharding(run.settings, workload)
    costs = Costs(run.machine, run.manner, constants)
    return workload, estimate_step(workload, settings, costs, offload=run.offload)


def _predict(run: PublishedRun, constants: Constants) -> Prediction:
    """Predict a run, as far as memory goes with the micro-batches of its pipeline, which no row tells.

    Those that shard parameters make as few as the pipeline has parts, so all of the batch is there at once, unless it
    does not fit. Else, and where others have whole parameters, each is a sequence.
    """
    found = _predict_whole(run, constants)
    if run.batch.parts.pipeline == 1 or (found.fits and run.settings.sharding.shard_size > 1):
        return found
    tried = _predict_whole(run.one_by_one(), constants)
    return dataclasses.replace(
        tried,
        step_s=found.step_s,
        tokens_per_s=found.tokens_per_s,
        reason=_ONE_BY_ONE if run.batch.sequences > 1 else "",
    )


_ONE_BY_ONE = "the pipeline's micro-batches are not given: took one sequence in each"


def _predict_whole(run: PublishedRun, constants: Constants) -> Prediction:
    workload, estimate = estimate_run(run, constants)
    step_s = run.step_seconds(estimate)
    more = _of_other_engines(run, estimate.memory) + _gathered_nbytes(run, workload)
    more += _waiting_nbytes(run, workload)
    memory = _allocated(run, workload, estimate)
    peak = tensors = memory.peak_nbytes + more
    if run.held_as != "allocated":
        pooled = _pooled_nbytes(run, memory if run.system == "fsdp2" else estimate.memory)
        peak = (pooled + more) * getattr(constants, run.held_as)
        peak += CONTEXT_NBYTES if run.held_as == "device" else 0
        # Before it fails, an allocator gives back what it only keeps.
        peak = max(tensors, min(peak, run.machine.gpu.memory_nbytes - CONTEXT_NBYTES))
    tokens = run.batch.sequences * run.batch.seq * run.micro_batches
    sharing = run.batch.parts.tensor * run.batch.parts.pipeline * run.batch.parts.context
    needed = tensors + CONTEXT_NBYTES
    fits = needed <= run.machine.gpu.memory_nbytes
    return Prediction(peak, needed, step_s, tokens / step_s / sharing, fits)


def _allocated(run: PublishedRun, workload: Workload, estimate: Estimate) -> StepMemory:
    """Return what tensors take where PyTorch's FSDP allocates and frees them, in the order of the host.

    FSDP2 has one unit unsharded: another arrives in a buffer (`_gathered_nbytes`), and is copied when it is waited for.
    FSDP1 has the one before as well in backward. What it frees the allocator counts as free, though the device may
    still read it. Nothing of a reduction stays between steps. Source: torch.distributed.fsdp, CUDACachingAllocator.cpp.
    """
    if run.system not in _EAGER_FSDP:
        return estimate.memory
    settings = dataclasses.replace(
        estimate.settings,
        has_streams=False,
        forward_prefetch=False,
        backward_prefetch="pre" if run.system == "fsdp1" else None,
    )
    step = plan_step(workload, settings)
    if run.offload != "none":
        step, _ = offloaded(step, [0.0] * len(step.actions), run.offload, run.machine.gpu)
    resident = tuple(each for each in step.resident if each.holding is not Holding.COMMUNICATION)
    return follow_memory(step._replace(resident=resident))


def _resharding(settings: StepSettings, workload: Workload) -> StepSettings:
    """Keep the head, of which nothing else runs between forward and backward, as its users do."""
    if settings.reshard_after_forward is not None or workload.units[-1].name != "head":
        return settings
    kept = {"": False, "head": False}
    options = tuple(kept.get(unit.name, True) for unit in workload.units)
    return dataclasses.replace(settings, reshard_after_forward=options)


def _of_other_engines(run: PublishedRun, memory: StepMemory) -> float:
    """Return bytes of tensors that DeepSpeed has, and our engine not; negative for what it has not.

    ZeRO-2: a part of the gradients. ZeRO-3: shards and their gradients in bfloat16, always, in place of gradients in
    float32 that come and go; a bucket of gradients; and parameters that are used again soon, so stay gathered. By the
    defaults of `reduce_bucket_size` and `stage3_max_reuse_distance`. Source: deepspeed/runtime/zero/stage3.py.
    """
    if run.gradient_owners > 1:
        part = sharing_nbytes(memory, Holding.GRADIENT_SHARDS, 1 / run.gradient_owners)
        return part - memory.peak_nbytes
    if run.system != "zero3":
        return 0.0
    num_params = run.shape.num_params / (run.batch.parts.tensor * run.batch.parts.pipeline)
    size = run.batch.gathered_dtype.itemsize
    gathered = max(0.0, size * min(num_params, 1e9) - memory.at_peak_of(Holding.UNSHARDED))
    more = size * 5e8 + gathered
    if not run.batch.lora_rank and run.offload == "none":
        more += 4 * num_params / run.settings.sharding.shard_size - memory.peak_nbytes
        more += sharing_nbytes(memory, Holding.GRADIENT_SHARDS, 0.0)
    return more


def _pooled_nbytes(run: PublishedRun, memory: StepMemory) -> float:
    """Return the bytes of an allocator's pools, each at its peak, as PyTorch's engines fill them.

    Both reduce gradients on a stream, where the shards' stay. FSDP1 gathers into parameters on another, FSDP2 into
    buffers. Compiled ones have one stream.
    """
    if run.settings.sharding.shard_size == 1 or run.system not in _EAGER_FSDP:
        return memory.peak_nbytes
    aside = [Holding.GRADIENT_SHARDS]
    aside += [Holding.UNSHARDED] if run.settings.sharding.is_flat else []
    return pooled_nbytes(memory, aside)


def _gathered_nbytes(run: PublishedRun, workload: Workload) -> float:
    """Return the bytes of the two buffers from which FSDP2 copies parameters: a layer's, after the largest unit's."""
    stays = run.settings.reshard_after_forward is False  # so none is there at the peak
    if run.system != "fsdp2" or run.settings.sharding.shard_size == 1 or stays:
        return 0.0
    sizes = [sum(s.numel * s.compute_dtype.itemsize for s in u.params) for u in workload.units]
    return max(sizes) + sizes[1]


def _waiting_nbytes(run: PublishedRun, workload: Workload) -> float:
    """Return what layers of a pipeline's first part keep of the micro-batches that wait for their backward.

    It has begun as many as there are parts when the first comes back, by the usual schedule (1F1B, arXiv 2104.04473).
    """
    num_waiting = min(run.batch.parts.pipeline, run.micro_batches) - 1
    *runs, _head = (workload.stretches[e.stretch] for e in workload.events if isinstance(e, Run))
    return num_waiting * sum(each.saved_nbytes for each in runs)


COLUMNS = (
    *("id", "peak_mem_gib", "iter_time_s", "tokens_per_s_per_gpu", "low_s", "high_s", "fits"),
    "reason",
)


@dataclasses.dataclass(frozen=True, slots=True)
class RunsSummary:
    """What became of a table. unsupported: by id, why a row was not predicted."""

    num_rows: int
    num_predicted: int
    num_fitting: int
    unsupported: dict[str, str]
    out: Path

    def __str__(self) -> str:
        lines = [
            f"{self.num_predicted} of {self.num_rows} rows predicted, {self.num_fitting} of them fit; written to {self.out}"
        ]
        lines += [f"{name}: not predicted: {why}" for name, why in self.unsupported.items()]
        return "\n".join(lines)


def predict_runs(
    source: Path, out: Path, progress: Callable[[int, int], None] = lambda *_: None
) -> RunsSummary:
    """Predict every row of a table of runs, and write a table of `COLUMNS`.

    id: that of the row, or its number from 1. low_s, high_s: nine of ten steps are between them. fits: "yes" or "no".
    A row that cannot be predicted has its reason and nothing else. progress: told which row of how many is next.
    Raises RunsError for a file that is none or cannot be written.
    """
    written, unsupported, num_fitting = [], {}, 0
    rows = read_rows(source)
    if out.exists() and out.samefile(source):
        raise RunsError(f"{out}: is the table that is read. Give another file to write.")
    for number, row in enumerate(rows, 1):
        name = row.get("id") or str(number)
        progress(number, len(rows))
        try:
            found = predict_row(row)
        except (UnsupportedRowError, ShapeError) as error:
            unsupported[name] = str(error)
            written.append({"id": name, "reason": str(error)})
            continue
        num_fitting += found.fits
        low, high = (found.step_s * factor for factor in SPREAD)
        values = (
            *(name, f"{found.peak_nbytes / _GIB:.3f}", f"{found.step_s:.5g}"),
            *(f"{found.tokens_per_s:.5g}", f"{low:.5g}", f"{high:.5g}"),
            *("yes" if found.fits else "no", found.reason),
        )
        written.append(dict(zip(COLUMNS, values, strict=True)))
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows(written)
    except OSError as error:
        raise RunsError(f"{out}: cannot be written: {error.strerror}.") from error
    return RunsSummary(len(rows), len(rows) - len(unsupported), num_fitting, unsupported, out)
