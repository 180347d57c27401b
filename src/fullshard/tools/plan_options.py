"""What `fullshard plan` plans: its options as one checked value, and as what the planner takes.

Quantities have units: 80GiB, 3.35TB/s, 400Gb/s, 989TFLOP/s. A number alone is refused, since nobody can tell
80 GB from 80 GiB, or bytes from bits.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.host import read_memory
from fullshard.tools.cli_options import option_field
from fullshard.tools.config import OptionError
from fullshard.tools.import_path import check_import_path, function_at

if TYPE_CHECKING:
    from fullshard.planning.machines import Machine
    from fullshard.planning.setup import TrainingSetup
    from fullshard.planning.subject import Subject

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names that torch has for what can be typed."""
_COMMS = ("auto", "process_group")  # of `fullshard.set_default_comm`
_MODEL, _MACHINE, _TRAINING = "Model", "Machine", "Training"
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIXES |= {f"{letter}i": 1024.0**n for n, letter in enumerate("KMGT", 1)}
_UNITS = {"B": 1.0, "b": 1 / 8, "FLOP": 1.0, "FLOPS": 1.0, "": 1.0}
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][0-9]+)?) ?((?:[kKMGTP]i?)?)(B|b|FLOPS|FLOP|)((?:/s)?)")
# What may be typed for each kind of number, and an example.
_KINDS = {
    "bytes": (("B",), ("",), "80GiB"),
    "bytes a second": (("B", "b"), ("/s",), "400GB/s"),
    "operations a second": (("FLOP", "FLOPS", ""), ("/s", ""), "989TFLOP/s"),
}


def quantity(option: str, text: str, kind: str) -> float:
    """Return what was typed with its unit, in the plain one. kind: one of `_KINDS`.

    "80GiB" is 85899345920.0 bytes, "400Gb/s" is 5e10 bytes a second, "989T" is 9.89e14 operations a second.
    """
    units, ends, example = _KINDS[kind]
    found = _QUANTITY.fullmatch(text.strip())
    number = math.nan
    if found is not None and found[3] in units and found[4] in ends and (found[2] or found[3]):
        try:
            number = float(found[1]) * _PREFIXES[found[2]] * _UNITS[found[3]]
        except (ValueError, KeyError):
            number = math.nan
    if not 0 < number < math.inf:
        raise OptionError(f"{option} {text}: give {kind} with their unit, such as {example}.")
    return number


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What to plan; empty and None mean what the command's help says. Raises OptionError for what cannot be."""

    model: str = ""
    shape: str = option_field(
        "",
        "Sizes in place of a model: layers, hidden, heads, kv-heads, ffn, vocab; and head-dim, tied=yes, gated=no.",
        panel=_MODEL,
        metavar="NAME=N,...",
    )
    example_input: str = option_field(
        "",
        "A function that returns what the model is called with: a tensor, a tuple of arguments, or a dict of "
        "keywords. It is called with batch and seq, by these names, if it has them. With values, a model may choose its "
        "way by them. Default: numbers of tokens.",
        panel=_MODEL,
        metavar="MODULE:FUNCTION",
    )
    loss: str = option_field(
        "",
        "loss(output): a scalar. Default: its .loss, cross entropy of its logits, or its mean.",
        panel=_MODEL,
        metavar="MODULE:FUNCTION",
    )
    units: str | None = option_field(
        None,
        "Paths of the modules that fully_shard is called with, besides the root. Default: repeated layers.",
        panel=_MODEL,
        metavar="PATH,...",
    )
    gpu: str = option_field(
        "",
        "A GPU by its name; a wrong one lists them all. this, or a file: what --calibrate has measured.",
        panel=_MACHINE,
        metavar="NAME|this|FILE",
    )
    ranks: int | None = option_field(None, "Ranks in all, one a GPU.", panel=_MACHINE)
    hosts: int | None = option_field(None, "Hosts.", panel=_MACHINE)
    per_host: int | None = option_field(
        None, "GPUs of a host, or of a link domain. Default: as sold, 8 for most.", panel=_MACHINE
    )
    flops: str = option_field(
        "", "Dense bfloat16, nominal, such as 989TFLOP/s.", panel=_MACHINE, metavar="RATE"
    )
    memory: str = option_field(
        "", "Memory that a program can use, such as 79GiB.", panel=_MACHINE, metavar="SIZE"
    )
    memory_bandwidth: str = option_field(
        "", "Of that memory, such as 3.35TB/s.", panel=_MACHINE, metavar="RATE"
    )
    link: str = option_field(
        "",
        "Between GPUs of a host, one direction, such as 450GB/s.",
        panel=_MACHINE,
        metavar="RATE",
    )
    network: str = option_field(
        "",
        "Between hosts, for each GPU, one direction, such as 400Gb/s. Default: as the GPU is usually hosted.",
        panel=_MACHINE,
        metavar="RATE",
    )
    comm: str = option_field(
        "auto",
        "Between CPU ranks, measured and planned: as the engine chooses by itself, or Gloo.",
        panel=_MACHINE,
        metavar="|".join(_COMMS),
        values=_COMMS,
    )
    batch: int = option_field(1, "Sequences in a rank's micro-batch.", panel=_TRAINING)
    seq: int = option_field(4096, "Tokens of a sequence.", panel=_TRAINING)
    grad_accum: int = option_field(1, "Micro-batches a step.", panel=_TRAINING)
    reduce_last: bool = option_field(
        False, "Reduce gradients in the last micro-batch of a step alone.", panel=_TRAINING
    )
    shard_size: int | None = option_field(
        None,
        "Ranks over which parameters are sharded; others hold replicas (HSDP). Default: all.",
        panel=_TRAINING,
    )
    reshard: str = option_field(
        "",
        "After forward: no, yes, or the size of a smaller group, but for the root, which stays. Default: yes.",
        panel=_TRAINING,
        metavar="no|yes|N",
    )
    unsharded: str | None = option_field(
        None, "Units that stay unsharded after forward.", panel=_TRAINING, metavar="PATH,..."
    )
    keep_unsharded: str = option_field(
        "",
        "Others that stay, as many as so many bytes hold, such as 4GiB: those that keep_unsharded chooses.",
        panel=_TRAINING,
        metavar="SIZE",
    )
    dtype: str = option_field(
        "bf16", "Of computing.", panel=_TRAINING, metavar="|".join(DTYPES), values=tuple(DTYPES)
    )
    param_dtype: str = option_field(
        "",
        "Of the sharded parameters. Default: as the model has them; of a shape fp32.",
        panel=_TRAINING,
        metavar="|".join(DTYPES),
        values=tuple(DTYPES),
    )
    reduce_dtype: str = option_field(
        "fp32",
        "In which gradients are reduced.",
        panel=_TRAINING,
        metavar="|".join(DTYPES),
        values=tuple(DTYPES),
    )
    checkpointing: str = option_field(
        "none",
        "Of activations, in each unit but the root.",
        panel=_TRAINING,
        metavar="none|selective|full",
    )
    optimizer: str = option_field(
        "adamw",
        "adamw, adam, sgd, sgd-momentum or adafactor, which fully_shard refuses (DTensors).",
        panel=_TRAINING,
        metavar="NAME",
    )
    fused: bool = option_field(False, "One kernel steps the optimizer.", panel=_TRAINING)
    offload: str = option_field(
        "none",
        "What is kept in host memory: params (and all with them), or the optimizer's state.",
        panel=_TRAINING,
        metavar="none|params|optimizer",
    )
    compiled: bool = option_field(
        False, "Units run under torch.compile.", "--compile", panel=_TRAINING
    )
    attention: str = option_field(
        "sdpa", "Whose kernel.", panel=_TRAINING, metavar="sdpa|flash|cudnn|triton"
    )

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.shape):
            raise OptionError(
                "give a MODEL or --shape, and not both: a size (8b), MODULE:FUNCTION, a config.json or its folder, or "
                "--shape layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256."
            )
        for name in ("example_input", "loss"):
            if getattr(self, name):
                check_import_path(getattr(self, name))
        for name in ("units", "unsharded"):
            typed = getattr(self, name)
            if typed is not None and not all(typed.split(",")):
                raise OptionError(
                    f"--{name} {typed!r}: a name is empty. Give paths of units but the root, such as layers.0,layers.1."
                )
        for name in ("dtype", "param_dtype", "reduce_dtype"):
            typed = getattr(self, name)
            if typed and typed not in DTYPES:
                raise OptionError(
                    f"--{name.replace('_', '-')} {typed}: choose from {', '.join(DTYPES)}."
                )
        if self.comm not in _COMMS:
            raise OptionError(f"--comm {self.comm}: choose from {', '.join(_COMMS)}.")
        for name in ("ranks", "hosts", "per_host", "shard_size", "batch", "seq", "grad_accum"):
            typed = getattr(self, name)
            if typed is not None and typed < 1:
                raise OptionError(f"--{name.replace('_', '-')} {typed}: must be at least 1.")

    # As what the planner takes

    def machine(self) -> "Machine":
        """Return the machine. Raises OptionError, and MachineError for a name that is not known."""
        from fullshard.planning.machines import GPUS, Machine, custom_gpu, machine_named

        if self.gpu == "this" or self.gpu.endswith(".json"):
            return self._measured()
        if self.comm != "auto":
            raise OptionError(
                f"--comm {self.comm}: is of ranks on CPUs. Give --gpu this, a file that --calibrate has written, or "
                "--calibrate; ranks on GPUs have NCCL."
            )
        given = {name: self._rate(name) for name in ("link", "network")}
        own = {
            "flops": self._number("flops", "operations a second"),
            "memory_nbytes": self._number("memory", "bytes"),
            "memory_rate": self._rate("memory_bandwidth"),
        }
        if not self.gpu:
            needed = ("flops", "memory", "memory_bandwidth", "link")
            if missing := [name for name in needed if not getattr(self, name)]:
                options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
                raise OptionError(
                    f"name a machine by --gpu ({', '.join(GPUS)}), or give its numbers: {options} missing."
                )
            gpu = custom_gpu(**own, link_rate=given["link"])
        else:
            numbers: Any = {name: value for name, value in own.items() if value}
            gpu = dataclasses.replace(machine_named(self.gpu).gpu, **numbers)
        per_host = self.per_host
        if per_host is None and self.hosts and self.ranks:
            if self.ranks % self.hosts:
                raise OptionError(
                    f"--ranks {self.ranks} --hosts {self.hosts}: {self.hosts} does not divide {self.ranks}."
                )
            per_host = self.ranks // self.hosts
        per_host = per_host or gpu.per_host
        has_several = (self.hosts or 1) > 1 or (self.ranks or 1) > per_host
        if not self.gpu and has_several and not given["network"]:
            raise OptionError(
                f"nobody knows the network between hosts of {per_host} GPUs: give --network, for each GPU, such as "
                "400Gb/s. If all are in one host, give --per-host."
            )
        return Machine(
            gpu, per_host, given["link"] or gpu.link_rate, given["network"] or gpu.network_rate
        )

    def _measured(self) -> "Machine":
        """Return the machine that somebody has measured."""
        from fullshard.plan.ways import GLOO
        from fullshard.planning.calibration import machine_file, machine_of, read_machine

        path = machine_file(self.ranks or 2) if self.gpu == "this" else Path(self.gpu)
        figures = read_machine(path, self.ranks or 2)
        if self.comm != "auto":
            figures = figures.with_way(GLOO.name)
        memory = self._number("memory", "bytes") or read_memory()["MemTotal"] / figures.ranks
        return machine_of(figures, memory)

    def _number(self, name: str, kind: str) -> float:
        text = getattr(self, name)
        return quantity(f"--{name.replace('_', '-')}", text, kind) if text else 0.0

    def _rate(self, name: str) -> float:
        return self._number(name, "bytes a second")

    def _ranks_of(self, machine: "Machine") -> int:
        if self.ranks is None:
            if machine.figures is not None:
                return machine.per_host
            if self.hosts is None:
                raise OptionError("say on how many GPUs: --ranks N, or --hosts N.")
            return self.hosts * machine.per_host
        if self.hosts is not None and self.ranks != self.hosts * machine.per_host:
            raise OptionError(
                f"--ranks {self.ranks} --hosts {self.hosts}: {self.hosts} hosts of {machine.per_host} GPUs have "
                f"{self.hosts * machine.per_host}."
            )
        return self.ranks

    def setup(self, machine: "Machine | None" = None) -> "TrainingSetup":
        """Return the run, on the machine that options name or another. Raises OptionError, MachineError, SetupError and ShardingError for what cannot be."""
        import torch

        from fullshard.planning.setup import TrainingSetup
        from fullshard.policies import MixedPrecisionPolicy

        machine, reshard = machine or self.machine(), self._reshard()
        dtypes = {
            name: getattr(torch, DTYPES[typed]) if (typed := getattr(self, name)) else None
            for name in ("dtype", "param_dtype", "reduce_dtype")
        }
        return TrainingSetup(
            machine=machine,
            ranks=self._ranks_of(machine),
            shard_size=self.shard_size,
            batch=self.batch,
            seq=self.seq,
            accumulation=self.grad_accum,
            reduces_each=not self.reduce_last,
            precision=MixedPrecisionPolicy(dtypes["dtype"], dtypes["reduce_dtype"]),
            stored=dtypes["param_dtype"],
            reshard_after_forward=reshard,
            unsharded=(
                *([""] if type(reshard) is int else []),
                *(self.unsharded.split(",") if self.unsharded else []),
            ),
            keep_unsharded_nbytes=round(self._number("keep_unsharded", "bytes")),
            checkpointing=self.checkpointing,
            optimizer=self.optimizer,
            is_fused=self.fused,
            offload=self.offload,
            is_compiled=self.compiled,
            attention=self.attention,
        )

    def _reshard(self) -> bool | int | None:
        """Return what is said of units but the root, whose backward comes first: it stays, as in a search."""
        typed = self.reshard
        known: dict[str, bool | None] = {"": None, "yes": None, "no": False}
        if typed in known:
            return known[typed]
        if not typed.isdecimal():
            raise OptionError(
                f"--reshard {typed}: expected no, yes, or the size of a smaller group."
            )
        return int(typed)

    def subject(self) -> "Subject":
        """Return the model. Imports the user's functions; what they raise while imported passes."""
        from fullshard.planning.shapes import TransformerShape
        from fullshard.planning.subject import Subject

        units = None if self.units is None else self.units.split(",")
        inputs, loss = (
            function_at(each) if each else None for each in (self.example_input, self.loss)
        )
        model: Any = self.model
        if self.shape:
            model = TransformerShape(**shape_sizes(self.shape))
        elif ":" in self.model and not Path(self.model).exists():
            model = function_at(self.model)
        return Subject(model, inputs=inputs, units=units, loss=loss)


_SIZES = {
    "layers": "num_layers",
    "hidden": "hidden",
    "heads": "num_heads",
    "kv-heads": "num_kv_heads",
    "ffn": "ffn_hidden",
    "vocab": "vocab",
    "head-dim": "head_dim",
    "tied": "tied_embeddings",
    "gated": "gated_mlp",
}
_BOOLEANS = {"yes": True, "no": False}


def shape_sizes(text: str) -> dict[str, Any]:
    """Return the fields of a `TransformerShape` from ``layers=32,hidden=4096,...``. Raises OptionError."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (each.strip() for each in part.partition("="))
        if name not in _SIZES:
            raise OptionError(f"--shape {part}: sizes are {', '.join(_SIZES)}.")
        if name in found:
            raise OptionError(f"--shape {part}: {name} is given twice. Leave one of them out.")
        if name in ("tied", "gated"):
            if value not in _BOOLEANS:
                raise OptionError(f"--shape {part}: expected yes or no.")
            found[name] = _BOOLEANS[value]
        elif not value.isdecimal() or int(value) < 1:
            raise OptionError(f"--shape {part}: expected a whole number, 1 or more.")
        else:
            found[name] = int(value)
    if missing := [each for each in ("layers", "hidden", "heads", "vocab") if each not in found]:
        raise OptionError(f"--shape {text}: {', '.join(missing)} missing.")
    hidden, heads = found["hidden"], found["heads"]
    found.setdefault("kv-heads", heads)
    found.setdefault("ffn", 4 * hidden)
    if "head-dim" not in found:
        if hidden % heads:
            raise OptionError(
                f"--shape: {heads} heads do not divide {hidden}. Give head-dim, or sizes that fit."
            )
        found["head-dim"] = hidden // heads
    if heads % found["kv-heads"]:
        raise OptionError(
            f"--shape: kv-heads {found['kv-heads']} do not divide {heads} heads, which share them."
        )
    return {_SIZES[name]: value for name, value in found.items()}
