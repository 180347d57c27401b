"""Times by formula against rows of the tables that their constants were fitted to, and against what has to hold.

`measured_rows.json` is written by `bench/plan_tables.py` with the constants: a few rows of each table.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from fullshard.plan.workload import Work, WorkKind
from fullshard.planning.costs import FITTED, Costs, Manner
from fullshard.planning.machines import GPUS, machine_named
from fullshard.planning.measured import GpuFigures, figures_of, moved_share

Row = tuple[
    float, float, float
]  # predicted and measured seconds, and the error that nine in ten keep


def known(gpu: str) -> GpuFigures:
    figures = figures_of(gpu)
    assert figures is not None
    return figures


def matmul(gpu: str, dtype: str, m: int, n: int, k: int, seconds: float) -> Row:
    predicted = known(gpu).matmul_seconds(m, n, k, dtype)
    return predicted, seconds, known(gpu).matmul[dtype].error_p90


def attention(
    gpu: str, head_dim: int, batch: int, sequence: int, heads: int, kv_heads: int, seconds: float
) -> Row:
    flops = 4 * batch * heads * sequence**2 * head_dim / 2  # causal
    nbytes = 2 * batch * sequence * (2 * heads + 2 * kv_heads) * head_dim
    predicted = known(gpu).attention_seconds(flops, nbytes, head_dim)
    return predicted, seconds, known(gpu).attention[str(head_dim)].error_p90


def collective(kind: str) -> Callable[..., Row]:
    def of_kind(gpu: str, num_gpus: int, nbytes: int, seconds: float) -> Row:
        figures = known(gpu).collectives[kind][str(num_gpus)]
        return figures.seconds(nbytes * moved_share(kind, num_gpus)), seconds, figures.error_p90

    return of_kind


ROWS = json.loads(Path(__file__).with_name("measured_rows.json").read_text())["rows"]
# The median error may be this large; three in four keep within what `figures.json` says of nine in ten.
BOUNDS = {"matmul": 0.05, "attention": 0.065}
BOUNDS |= dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0.04)


@pytest.mark.parametrize("kind", BOUNDS)
def test_formulas_agree_with_the_tables(kind: str) -> None:
    own = {"matmul": matmul, "attention": attention}
    rows = [own.get(kind, collective(kind))(*row) for row in ROWS[kind]]
    assert len(rows) >= 20
    errors = [abs(predicted / seconds - 1) for predicted, seconds, _ in rows]
    assert median(errors) <= BOUNDS[kind]
    kept = [error <= most for error, (_, _, most) in zip(errors, rows, strict=True)]
    assert sum(kept) / len(kept) >= 0.75


def test_more_work_takes_longer_and_nothing_beats_the_nominal_peak() -> None:
    for figures in map(known, sorted({gpu for rows in ROWS.values() for gpu, *_ in rows})):
        for dtype, peak in figures.peak_flops.items():
            if dtype not in figures.matmul:
                continue
            times = [figures.matmul_seconds(m, 4096, 4096, dtype) for m in (64, 2048, 65536)]
            assert times == sorted(times)
            assert all(
                seconds > 2 * m * 4096**2 / peak
                for m, seconds in zip((64, 2048, 65536), times, strict=True)
            )
        for by_size in figures.collectives.values():
            for each in by_size.values():
                sent = [each.seconds(1 << bits) for bits in range(10, 31)]
                assert sent == sorted(sent)


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if gpu.fp8 > 1])
def test_a_step_reaches_less_than_a_cool_gpu_and_twice_as_much_in_half_the_bits(name: str) -> None:
    gpu = GPUS[name]
    costs = Costs(machine_named(name), Manner(), replace(FITTED, matmul=1.0))
    flops = 2.0 * 8192**3
    seconds = {
        dtype: costs.work_seconds(Work(WorkKind.MATMUL, flops, 0, (8192,) * 3, dtype))
        for dtype in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
    }
    alone = replace(known(gpu.figures), memory_bytes_per_s=gpu.memory_rate)
    alone = replace(alone, peak_flops={"bfloat16": gpu.flops * gpu.matmul})
    assert seconds["bfloat16"] >= alone.matmul_seconds(8192, 8192, 8192, "bfloat16")
    assert seconds["float16"] == seconds["bfloat16"]  # of the same width
    assert seconds["float8_e5m2"] == seconds["float8_e4m3fn"] < seconds["bfloat16"]
    assert seconds["float32"] > 0.9 * gpu.float32 * gpu.matmul * seconds["bfloat16"]
    # Several at once are launched once.
    both = costs.work_seconds(Work(WorkKind.MATMUL, 2 * flops, 0, (8192,) * 3, "bfloat16"))
    assert seconds["bfloat16"] < both < 2 * seconds["bfloat16"]


def test_head_sizes_between_measured_ones() -> None:
    figures = known("H100")

    def attention_s(head_dim: int) -> float:
        return figures.attention_seconds(1e12, 1e8, head_dim)

    assert min(attention_s(64), attention_s(128)) < attention_s(96)
    assert attention_s(96) < max(attention_s(64), attention_s(128))
    assert attention_s(32) == attention_s(64)
    assert attention_s(512) == attention_s(256)
    assert figures_of("Abacus") is None


def test_a_variant_has_other_nominal_figures() -> None:
    figures = known("A100")
    small = replace(figures, memory_bytes_per_s=1.555e12)
    assert small.attention_seconds(0, 1e9, 128) > figures.attention_seconds(0, 1e9, 128)
    assert small.attention_seconds(1e12, 0, 128) == figures.attention_seconds(1e12, 0, 128)
