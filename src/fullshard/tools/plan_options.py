"""What `fullshard plan` plans: its options as one checked value, and as what the planner takes.

Quantities have units: 80GiB, 3.35TB/s, 400Gb/s, 989TFLOP/s. A number alone is refused, since nobody can tell
80 GB from 80 GiB, or bytes from bits.
"""

import dataclasses
import functools
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
_model, _machine, _training = (
    functools.partial(option_field, panel=panel) for panel in ("Model", "Machine", "Training")
)
_dtype = functools.partial(_training, values=tuple(DTYPES))
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
_QUANTITIES = {"flops": "operations a second", "memory": "bytes", "keep_unsharded": "bytes"}


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
    shape: str = _model(
        "",
        "Sizes in place of a model: layers, hidden, heads, kv-heads, ffn, vocab; and head-dim, tied=yes, gated=no.",
        metavar="NAME=N,...",
    )
    example_input: str = _model(
        "",
        "A function that returns what the model is called with: a tensor, a tuple of arguments, or a dict of "
        "keywords. It is called with batch and seq, by these names, if it has them. With values, a model may choose its "
        "way by them. Default: numbers of tokens.",
        metavar="MODULE:FUNCTION",
    )
    loss: str = _model(
        "",
        "loss(output): a scalar. Default: its .loss, cross entropy of its logits, or its mean.",
        metavar="MODULE:FUNCTION",
    )
    units: str | None = _model(
        None,
        "Paths of the modules that fully_shard is called with, besides the root; of one unit with + between them: "
        "layers.0+layers.1,layers.2. Default: repeated layers.",
        metavar="PATH[+PATH],...",
    )
    gpu: str = _machine(
        "",
        "A GPU by its name; a wrong one lists them all. this, or a file: what --calibrate has measured.",
        metavar="NAME|this|FILE",
    )
    ranks: int | None = _machine(None, "Ranks in all, one a GPU.")
    hosts: int | None = _machine(None, "Hosts.")
    per_host: int | None = _machine(
        None, "GPUs of a host, or of a link domain. Default: as sold, 8 for most."
    )
    flops: str = _machine("", "Dense bfloat16, nominal, such as 989TFLOP/s.", metavar="RATE")
    memory: str = _machine("", "Memory that a program can use, such as 79GiB.", metavar="SIZE")
    memory_bandwidth: str = _machine("", "Of that memory, such as 3.35TB/s.", metavar="RATE")
    link: str = _machine(
        "", "Between GPUs of a host, one direction, such as 450GB/s.", metavar="RATE"
    )
    network: str = _machine(
        "",
        "Between hosts, for each GPU, one direction, such as 400Gb/s. Default: as the GPU is usually hosted.",
        metavar="RATE",
    )
    comm: str = _machine(
        "auto",
        "Between CPU ranks, measured and planned: as the engine chooses by itself, or Gloo.",
        values=_COMMS,
    )
    batch: int = _training(1, "Sequences in a rank's micro-batch.")
    seq: int = _training(4096, "Tokens of a sequence.")
    grad_accum: int = _training(1, "Micro-batches a step.")
    reduce_last: bool = _training(
        False, "Reduce gradients in the last micro-batch of a step alone."
    )
    sum_replicas_last: bool = _training(
        False, "Sum them over replicas in the last one alone (set_requires_all_reduce)."
    )
    shard_size: int | None = _training(
        None, "Ranks over which parameters are sharded; others hold replicas (HSDP). Default: all."
    )
    reshard: str = _training(
        "",
        "After forward: no, yes, or the size of a smaller group, but for the root, which stays. Default: yes.",
        metavar="no|yes|N",
    )
    unsharded: str | None = _training(
        None, "Units that stay unsharded after forward.", metavar="PATH,..."
    )
    keep_unsharded: str = _training(
        "",
        "Others that stay, as many as so many bytes hold, such as 4GiB: those that keep_unsharded chooses.",
        metavar="SIZE",
    )
    dtype: str = _dtype("bf16", "Of computing.")
    param_dtype: str = _dtype(
        "", "Of the sharded parameters. Default: as the model has them; of a shape fp32."
    )
    reduce_dtype: str = _dtype("fp32", "In which gradients are reduced.")
    checkpointing: str = _training(
        "none",
        "Of activations, in each unit but the root.",
        values=("none", "selective", "full"),
    )
    optimizer: str = _training(
        "adamw",
        "adamw, adam, sgd, sgd-momentum or adafactor, which fully_shard refuses (DTensors).",
        metavar="NAME",
    )
    fused: bool = _training(False, "One kernel steps the optimizer.")
    offload: str = _training(
        "none",
        "What is kept in host memory: params (and all with them), or the optimizer's state.",
        values=("none", "params", "optimizer"),
    )
    compiled: bool = _training(False, "Units run under torch.compile.", "--compile")
    attention: str = _training("sdpa", "Whose kernel.", values=("sdpa", "flash", "cudnn", "triton"))

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.shape):
            raise OptionError(
                "give a MODEL or --shape, and not both: a size (8b), MODULE:FUNCTION, a config.json or its folder, or "
                "--shape layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256."
            )
        for path in filter(None, (self.example_input, self.loss)):
            check_import_path(path)
        for name, typed in vars(self).items():
            option = f"--{name.replace('_', '-')}"
            is_list = name in ("units", "unsharded") and typed is not None
            if is_list and not all(re.split("[,+]", typed)):
                raise OptionError(
                    f"{option} {typed!r}: a name is empty. Give paths of units but the root, such as layers.0,layers.1."
                )
            if name.endswith("dtype") and typed and typed not in DTYPES:
                raise OptionError(f"{option} {typed}: choose from {', '.join(DTYPES)}.")
            if type(typed) is int and typed < 1:
                raise OptionError(f"{option} {typed}: must be at least 1.")
        if self.comm not in _COMMS:
            raise OptionError(f"--comm {self.comm}: choose from {', '.join(_COMMS)}.")

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
        link, network = self._number("link"), self._number("network")
        own = {
            "flops": self._number("flops"),
            "memory_nbytes": self._number("memory"),
            "memory_rate": self._number("memory_bandwidth"),
        }
        if not self.gpu:
            if (self.ranks or (self.hosts or 0) * (self.per_host or 0)) == 1:  # and nothing to link
                link = link or own["memory_rate"]
            needed = ("flops", "memory", "memory_bandwidth", *([] if link else ["link"]))
            if missing := [name for name in needed if not getattr(self, name)]:
                options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
                raise OptionError(
                    f"name a machine by --gpu ({', '.join(GPUS)}), or give its numbers: {options} missing."
                )
            gpu = custom_gpu(**own, link_rate=link)
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
        if not self.gpu and has_several and not network:
            raise OptionError(
                f"nobody knows the network between hosts of {per_host} GPUs: give --network, for each GPU, such as "
                "400Gb/s. If all are in one host, give --per-host."
            )
        return Machine(gpu, per_host, link or gpu.link_rate, network or gpu.network_rate)

    def _measured(self) -> "Machine":
        """Return the machine that somebody has measured."""
        from fullshard.plan.ways import GLOO
        from fullshard.planning.calibration import machine_file, machine_of, read_machine

        path = machine_file(self.ranks or 2) if self.gpu == "this" else Path(self.gpu)
        figures = read_machine(path, self.ranks or 2)
        if self.comm != "auto":
            figures = figures.with_way(GLOO.name)
        memory = self._number("memory") or read_memory()["MemTotal"] / figures.ranks
        return machine_of(figures, memory)

    def _number(self, name: str) -> float:
        """Return what an option says in plain units, 0 if it says nothing."""
        text, kind = getattr(self, name), _QUANTITIES.get(name, "bytes a second")
        return quantity(f"--{name.replace('_', '-')}", text, kind) if text else 0.0

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
        computed, stored, reduced = (
            getattr(torch, DTYPES[typed]) if typed else None
            for typed in (self.dtype, self.param_dtype, self.reduce_dtype)
        )
        fields = {field.name for field in dataclasses.fields(TrainingSetup)}
        own = {name: value for name, value in vars(self).items() if name in fields}
        return TrainingSetup(
            **own
            | {
                "machine": machine,
                "ranks": self._ranks_of(machine),
                "accumulation": self.grad_accum,
                "reduces_each": not self.reduce_last,
                "sums_replicas_last": self.sum_replicas_last,
                "precision": MixedPrecisionPolicy(computed, reduced),
                "stored": stored,
                "reshard_after_forward": reshard,
                "unsharded": (
                    *([""] if type(reshard) is int else []),
                    *(
                        each.replace("+", ", ")
                        for each in (self.unsharded or "").split(",")
                        if each
                    ),
                ),
                "keep_unsharded_nbytes": round(self._number("keep_unsharded")),
                "is_fused": self.fused,
                "is_compiled": self.compiled,
            }
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

        units = self.units and [each.split("+") for each in self.units.split(",")]
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
