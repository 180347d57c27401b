"""How long kernels and collectives take on GPUs that somebody has measured.

The package aiconfigurator-core has times of tens of thousands of matmuls, attentions and collectives for each
GPU, measured by inference engines. Here are formulas for them; `figures.json` has the constants, which
`bench/plan_tables.py` fits, and how far off each is: 4 to 8 % in the median for matmuls, 2 to 5 % for
collectives. The tables themselves are not read. They are 113 MB, and little better: for one matmul of bfloat16,
engines that call the same library differ from their median by 2 to 6 %, and by 8 to 21 % for one in ten.

Not in the tables, so not here: backward of attention, matmuls of float32, traffic between hosts.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.errors import StateError
from fullshard.json_files import read_json
from fullshard.plan.actions import ActionKind

_FILE = Path(__file__).with_name("figures.json")


class KernelFigures(NamedTuple):
    """Constants of a kind of kernel on a GPU.

    efficiency, memory_share: the most that it reaches of the nominal peak FLOP/s and memory bandwidth; of the
        latter more than 1 where a large cache helps (L40S).
    launch_s: what it takes besides. error, error_p90: of predicted times, relative: median and nine in ten.
    """

    efficiency: float
    memory_share: float
    launch_s: float
    error: float = 0.0
    error_p90: float = 0.0

    def overlapped_s(self, ideal_s: float, memory_s: float) -> float:
        """Return seconds of a matmul: computing hides moving, less so where both take as long.

        ideal_s, memory_s: at the nominal peak, of computing and of moving bytes.
        """
        square: float = (ideal_s / self.efficiency) ** 2 + (memory_s / self.memory_share) ** 2
        return square**0.5 + self.launch_s

    def summed_s(self, ideal_s: float, memory_s: float) -> float:
        """Return seconds of an attention, whose first and last tiles have nothing to hide behind."""
        return ideal_s / self.efficiency + memory_s / self.memory_share + self.launch_s


class CollectiveFigures(NamedTuple):
    """Constants of a collective among some GPUs of one host.

    latency_s: of the smallest. bytes_per_s: of the largest, into or out of one GPU. fill_s: until the first
    chunk has gone round; the best chunks are so large that filling costs as much as starting them does, which
    makes the root in `seconds`. error, error_p90: as of `KernelFigures`.
    """

    latency_s: float
    bytes_per_s: float
    fill_s: float
    error: float = 0.0
    error_p90: float = 0.0

    def seconds(self, moved_nbytes: float) -> float:
        """Return seconds to move bytes into or out of each GPU."""
        transfer_s = moved_nbytes / self.bytes_per_s
        fill_s: float = 2 * (self.fill_s * transfer_s) ** 0.5
        return self.latency_s + transfer_s + fill_s


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What is known of a GPU. `dataclasses.replace` its nominal figures for a variant, as A100 with 40 GB.

    peak_flops: nominal and dense, a second, by dtype. memory_bytes_per_s: nominal.
    matmul: by dtype. sustained_efficiency: of matmuls longer than 2 ms, during which the power limit has
        lowered the clock. attention: by head size, forward, bfloat16, by the fastest kernel.
    collectives: by the value of an `ActionKind` and the number of GPUs.
    """

    peak_flops: Mapping[str, float]
    memory_bytes_per_s: float
    matmul: Mapping[str, KernelFigures]
    sustained_efficiency: Mapping[str, float]
    attention: Mapping[str, KernelFigures]
    collectives: Mapping[str, Mapping[str, CollectiveFigures]]

    def matmul_seconds(self, m: int, n: int, k: int, dtype: str, times: float = 1.0) -> float:
        """Return seconds of (m, k) times (k, n), and so many of them at once.

        dtype: of the inputs, one of `matmul`. In float8 this includes rounding the first input from bfloat16.
        """
        return self.matmul[dtype].overlapped_s(
            times * 2.0 * m * n * k / self.peak_flops[dtype],
            times * matmul_nbytes(m, n, k, dtype) / self.memory_bytes_per_s,
        )

    def attention_seconds(self, flops: float, nbytes: float, head_dim: int) -> float:
        """Return seconds of a forward of fused attention in bfloat16, or float16.

        flops: that are done, so half of all for causal attention. nbytes: of queries, keys, values and output.
        Head sizes between measured ones are interpolated; beyond them, the nearest counts. Constants are of
        causal attention. Of the other kind, measured for head sizes of 64 to 80, they are off by 4 to 12 % in
        the median, and too slow by 22 to 31 % for a head size of 64 on Blackwell and L40S.
        """
        figures = _between({int(size): each for size, each in self.attention.items()}, head_dim)
        return figures.summed_s(
            flops / self.peak_flops["bfloat16"], nbytes / self.memory_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class _File:
    """`figures.json`. source: the package and its version."""

    source: str
    gpus: Mapping[str, GpuFigures]


def figures_of(gpu: str) -> GpuFigures | None:
    """Return what was measured on a GPU, such as "H100"; None if nobody did."""
    return _figures().get(gpu)


def matmul_nbytes(m: int, n: int, k: int, dtype: str) -> int:
    """Return bytes that a matmul reads and writes, its output in bfloat16, or in float32 as its inputs.

    In float8 its first input is there in bfloat16, and is rounded: 2 bytes read and 1 written for each element.
    """
    if not dtype.startswith("float8"):
        return (4 if dtype == "float32" else 2) * (m * k + k * n + m * n)
    return m * k + k * n + 2 * m * n + 3 * m * k


def moved_share(kind: str, num_gpus: int) -> float:
    """Return bytes into or out of each GPU, per byte of the message, by the best that a ring can do."""
    return (num_gpus - 1) / num_gpus * (2 if kind == ActionKind.ALL_REDUCE.value else 1)


@functools.cache
def _figures() -> Mapping[str, GpuFigures]:
    return read_json(_FILE, _File, _refuse).gpus


def _refuse(why: str) -> Exception:
    return StateError(f"{_FILE} {why}. It is part of fullshard: install it again.")


def _between(known: Mapping[int, KernelFigures], size: int) -> KernelFigures:
    """Interpolate figures of sizes linearly."""
    size = min(max(size, min(known)), max(known))
    below = max(each for each in known if each <= size)
    above = min(each for each in known if each >= size)
    share = (size - below) / (above - below) if above > below else 0.0
    pairs: Any = zip(known[below], known[above], strict=True)
    return KernelFigures(*(low + (high - low) * share for low, high in pairs))
