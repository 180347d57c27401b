"""What `bench.gpu` trains, and what that takes: bytes, seconds, and who can be alive at the same time.

Pure: sizes in, numbers and names out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fullshard.models.sizes import SIZES, LlamaConfig

Offload = Literal["none", "optimizer", "all"]


@dataclass(frozen=True)
class Entry:
    """One line of a table. offload: what is in pinned host memory; "all" is ``CPUOffloadPolicy``."""

    implementation: str
    offload: Offload = "none"

    @property
    def name(self) -> str:
        if self.offload == "none":
            return self.implementation
        return f"{self.implementation} offload={self.offload}"

    @property
    def is_sharded(self) -> bool:
        return self.implementation != "unwrapped"


_FACES = (Entry("fullshard"), Entry("fullshard-fsdp1"))
_PAIR = (Entry("unwrapped"), Entry("fsdp2"))
_THREE = (*_PAIR, Entry("fullshard"))
_EVERYBODY = (*_PAIR, Entry("fsdp1"), *_FACES)


@dataclass(frozen=True)
class Setting:
    """What is trained and how; the same value goes to every implementation.

    entries: the bases come first. dtype: of the parameters. compute_dtype: of a mixed-precision policy with
    float32 reductions (autocast for the unwrapped model), or None. recompute: of each layer. compiler: a
    backend of ``torch.compile`` for each layer, or None. captured: the whole step as one CUDA graph. fp8:
    torchao's float8 with tensorwise scales. step_s: what a step of the slowest entry takes on an H100, to plan
    with. traced: the entry whose trace is kept.
    """

    name: str
    config: LlamaConfig
    sequences: int
    tokens: int
    entries: tuple[Entry, ...]
    step_s: float
    dtype: torch.dtype = torch.bfloat16
    compute_dtype: torch.dtype | None = None
    recompute: bool = False
    compiler: str | None = None
    captured: bool = False
    fp8: bool = False
    bases: tuple[str, ...] = ("unwrapped", "fsdp2")
    traced: str = ""
    num_rounds: int = 5
    num_steps: int = 5

    @property
    def num_tokens(self) -> int:
        return self.sequences * self.tokens

    @property
    def num_parameters(self) -> int:
        """Count what is trained, without the norms' weights."""
        size = self.config
        per_layer = 2 * size.hidden_size * size.head_dim * (size.num_heads + size.num_kv_heads)
        per_layer += 3 * size.hidden_size * size.intermediate_size
        return size.num_layers * per_layer + 2 * size.vocab_size * size.hidden_size

    @property
    def flops_per_step(self) -> int:
        return self.num_tokens * self.config.flops_per_token(seq=self.tokens)

    @property
    def title(self) -> str:
        size, millions = self.config, self.num_parameters / 1e6
        options = {
            f" computing in {self.compute_dtype}": self.compute_dtype is not None,
            ", each layer recomputed": self.recompute,
            f", each layer compiled ({self.compiler})": self.compiler is not None,
            ", the step captured": self.captured,
            ", linear layers in float8": self.fp8,
        }
        text = (
            f"{self.name}: {millions:,.0f}M in {size.num_layers} layers of width {size.hidden_size}, batch "
            f"{self.sequences}x{self.tokens}, {self.dtype}"
        )
        return (text + "".join(part for part, holds in options.items() if holds)).replace(
            "torch.", ""
        )


_1B = dataclasses.replace(SIZES["1b"], vocab_size=32768)
_3B = LlamaConfig(32768, 3072, 8192, 28, 24, 8, 500_000.0)
_350M = dataclasses.replace(SIZES["350m"], vocab_size=32768)
_SMALL = LlamaConfig(hidden_size=128, intermediate_size=256, num_layers=48, num_heads=4)
_FP32, _BF16 = torch.float32, torch.bfloat16

SETTINGS = (
    Setting("1b-compiled", _1B, 8, 2048, _THREE, 0.22, compiler="inductor"),
    Setting(
        "3b-compiled", _3B, 4, 4096, _THREE, 0.8,
        recompute=True, compiler="inductor", traced="fullshard", num_steps=3,
    ),
    Setting("1b", _1B, 8, 2048, (*_PAIR, *_FACES), 0.3),
    Setting("3b", _3B, 4, 4096, _THREE, 1.05, recompute=True, num_steps=3),
    Setting("small", _SMALL, 1, 64, _EVERYBODY, 0.2, num_steps=8),
    Setting("small-captured", _SMALL, 1, 64, (*_PAIR, *_FACES), 0.01, captured=True, num_steps=50, traced="fullshard"),
    Setting(
        "offload", _350M, 8, 2048,
        (
            Entry("fullshard"), Entry("fsdp2"), Entry("fullshard", "optimizer"),
            Entry("fsdp2", "all"), Entry("fullshard", "all"),
        ),
        0.6,
        dtype=_FP32, compute_dtype=_BF16, bases=("fullshard", "fsdp2"),
        traced="fullshard offload=optimizer", num_steps=3,
    ),
    Setting(
        "350m-mixed", _350M, 8, 2048, _EVERYBODY, 0.15,
        dtype=_FP32, compute_dtype=_BF16,
    ),
    Setting("1b-fp8", _1B, 8, 2048, _THREE, 0.2, compiler="inductor", fp8=True),
)  # fmt: skip

PARTS = {
    "compute": ("1b-compiled", "3b-compiled", "1b", "3b"),
    "rest": ("small", "small-captured", "offload", "350m-mixed", "1b-fp8"),
}
"""Settings that a short script measures together, in the order of what matters more."""


def tiny(setting: Setting) -> Setting:
    """Shrink a setting so that it runs in a second."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
    )
    return dataclasses.replace(
        setting, config=config, sequences=1, tokens=16, num_rounds=2, num_steps=2, step_s=0.1
    )


class Footprint(NamedTuple):
    """Bytes of an entry on the device while others work, and while it works."""

    resting: int
    working: int


_CONTEXT_NBYTES = 800 << 20  # of a process: CUDA's context, NCCL, cuBLAS


def footprint(setting: Setting, entry: Entry) -> Footprint:
    """Estimate the bytes of an entry, as if nothing were fused: compiling needs less.

    1B, bf16, 8x2048: parameters 2.1 GB and AdamW's moments 4.3 GB rest; gradients (2.1 GB), 16 layers of 115 KB
    a token, and the logits with their loss, 16 B each, come while it works: 48 GB in all.
    """
    size = setting.config
    compute = (setting.compute_dtype or setting.dtype).itemsize
    numbers = setting.num_parameters * setting.dtype.itemsize
    unit = 2 * numbers // size.num_layers  # gathered, in each direction
    parameters = 0 if entry.offload == "all" else numbers
    moments = 0 if entry.offload != "none" else 2 * numbers
    gradients = unit if entry.offload == "all" else numbers
    shared = size.num_kv_heads * size.head_dim
    # Of a token in a layer: two norms in float32 and the compute dtype, queries, their rotation, attention,
    # its output, the residual; keys and values; four of the MLP's width.
    layer = size.hidden_size * (2 * (4 + compute) + 5 * compute)
    layer += 4 * compute * (shared + size.intermediate_size)
    if setting.recompute:
        layers = size.num_layers * size.hidden_size * compute + layer
    else:
        layers = size.num_layers * layer
    logits = size.vocab_size * (2 * compute + 12)
    activations = setting.num_tokens * (layers + logits)
    resting = parameters + moments + _CONTEXT_NBYTES
    return Footprint(resting, resting + gradients + unit + activations)


class Turns(NamedTuple):
    """Who is alive at the same time, batch by batch, and why others are left out."""

    batches: list[list[Entry]]
    left_out: dict[str, str]


def take_turns(setting: Setting, nbytes: int | None) -> Turns:
    """Divide the entries into batches that a device of so many bytes holds; None: holds everything.

    All together if they fit. Otherwise the bases are in every batch, or the last of them (FSDP2) where both
    and another one do not fit; what fits beside no base is alone.
    """
    left_out, able = {}, []
    for entry in setting.entries:
        needed = footprint(setting, entry).working
        if nbytes is not None and needed > nbytes:
            left_out[entry.name] = (
                f"needs about {needed / 1e9:.0f} GB, and {nbytes / 1e9:.0f} may be used"
            )
        else:
            able.append(entry)
    if not able or _fit(setting, able, nbytes):
        return Turns([able] if able else [], left_out)
    bases = [entry for entry in able if entry.name in setting.bases]
    batches: list[list[Entry]] = []
    waiting = [entry for entry in able if entry not in bases]
    if not _fit(setting, bases, nbytes):
        batches = [[base] for base in bases]
    elif not waiting or not _fit(setting, [*bases, waiting[0]], nbytes):
        batches = [bases]
    for entry in waiting:
        if (
            batches
            and len(batches[-1]) > len(bases)
            and _fit(setting, [*batches[-1], entry], nbytes)
        ):
            batches[-1].append(entry)
            continue
        choices = ([*bases, entry], [*bases[-1:], entry], [entry])
        batches.append(next(each for each in choices if _fit(setting, each, nbytes)))
    return Turns(batches, left_out)


def _fit(setting: Setting, entries: Sequence[Entry], nbytes: int | None) -> bool:
    if nbytes is None:
        return True
    sizes = [footprint(setting, entry) for entry in entries]
    return sum(s.resting for s in sizes) + max(s.working - s.resting for s in sizes) <= nbytes


_START_S, _BUILD_S, _COMPILE_S, _TURN_S, _TRACE_S = 20.0, 3.0, 40.0, 0.3, 4.0
NUM_WARM_UP_STEPS = 4  # the first passes are watched: `engine/checks/writes.py`


def estimate_seconds(setting: Setting, batches: Sequence[Sequence[Entry]]) -> float:
    """Estimate what a setting takes, processes that start and compile included."""
    seconds = 0.0
    for batch in batches:
        once = _BUILD_S + _TRACE_S + NUM_WARM_UP_STEPS * setting.step_s
        once += _COMPILE_S if setting.compiler == "inductor" else 0.0
        turn = setting.num_steps * setting.step_s + _TURN_S
        seconds += _START_S + len(batch) * (once + setting.num_rounds * turn)
    return seconds
