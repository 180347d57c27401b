"""Times by formula against rows of the tables that their constants were fitted to, and against what has to hold.

`measured_rows.json` is written by `bench/plan_tables.py` with the constants: a few rows of each table.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest

from fullshard.plan.actions import ActionKind
from fullshard.planning.measured import GpuFigures, figures_of, measured_gpus

Row = tuple[
    float, float, float
]  # predicted and measured seconds, and the error that nine in ten keep


def known(gpu: str) -> GpuFigures:
    figures = figures_of(gpu)
    assert figures is not None
    return figures


def matmul(gpu: str, dtype: str, m: int, n: int, k: int, seconds: float) -> Row:
    predicted = known(gpu).matmul_seconds(m, n, k, dtype)
    assert predicted is not None
    return predicted, seconds, known(gpu).matmul[dtype].error_p90


def attention(
    gpu: str, head_dim: int, batch: int, sequence: int, heads: int, kv_heads: int, seconds: float
) -> Row:
    flops = 4 * batch * heads * sequence**2 * head_dim / 2  # causal
    nbytes = 2 * batch * sequence * (2 * heads + 2 * kv_heads) * head_dim
    predicted = known(gpu).attention_seconds(flops, nbytes, head_dim)
    return predicted, seconds, known(gpu).attention[str(head_dim)].error_p90


def copy(gpu: str, which: str, nbytes: int, seconds: float) -> Row:
    predicted = known(gpu).copy_seconds(nbytes)
    assert predicted is not None
    return predicted, seconds, 0.1


def collective(kind: str) -> Callable[..., Row]:
    def of_kind(gpu: str, num_gpus: int, nbytes: int, seconds: float) -> Row:
        predicted = known(gpu).collective_seconds(ActionKind(kind), num_gpus, nbytes)
        assert predicted is not None
        return predicted, seconds, known(gpu).collectives[kind][str(num_gpus)].error_p90

    return of_kind


# The median error may be this large; three in four keep within what `figures.json` says of nine in ten.
BOUNDS = {"matmul": 0.05, "attention": 0.065, "copy": 0.05}
BOUNDS |= dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0.04)


@pytest.mark.parametrize("kind", BOUNDS)
def test_formulas_agree_with_the_tables(kind: str) -> None:
    own = {"matmul": matmul, "attention": attention, "copy": copy}
    text = Path(__file__).with_name("measured_rows.json").read_text()
    rows = [own.get(kind, collective(kind))(*row) for row in json.loads(text)["rows"][kind]]
    assert len(rows) >= 20
    errors = [abs(predicted / seconds - 1) for predicted, seconds, _ in rows]
    assert median(errors) <= BOUNDS[kind]
    kept = [error <= most for error, (_, _, most) in zip(errors, rows, strict=True)]
    assert sum(kept) / len(kept) >= 0.75


def each_gpu() -> Iterator[GpuFigures]:
    return map(known, measured_gpus())


def test_more_work_takes_longer_and_nothing_beats_the_nominal_peak() -> None:
    for figures in each_gpu():
        for dtype, peak in figures.peak_flops.items():
            times = [figures.matmul_seconds(m, 4096, 4096, dtype) or 0 for m in (64, 2048, 65536)]
            assert times == sorted(times)
            assert all(
                seconds > 2 * m * 4096**2 / peak
                for m, seconds in zip((64, 2048, 65536), times, strict=True)
            )
        copied = figures.copy_seconds(1 << 30)
        assert copied is None or copied > (1 << 30) / figures.memory_bytes_per_s
        for kind in (ActionKind.ALL_GATHER, ActionKind.REDUCE_SCATTER, ActionKind.ALL_REDUCE):
            sent = [figures.collective_seconds(kind, 2, 1 << bits) for bits in range(10, 31)]
            if figures.collectives:
                assert sent == sorted(sent, key=float)


def test_matmuls_among_many_are_never_faster_than_one_alone() -> None:
    for figures in each_gpu():
        for dtype in figures.matmul:
            alone = figures.matmul_seconds(8192, 8192, 8192, dtype)
            among = figures.matmul_seconds(8192, 8192, 8192, dtype, is_sustained=True)
            assert alone is not None
            assert among is not None
            assert among >= alone


def test_what_nobody_measured_is_none() -> None:
    assert figures_of("Abacus") is None
    figures = known("A100")
    assert figures.matmul_seconds(4096, 4096, 4096, "float32") is None
    assert figures.matmul_seconds(4096, 4096, 4096, "float8_e4m3fn") is None
    assert figures.copy_seconds(1 << 30) is None
    assert figures.collective_seconds(ActionKind.ALL_GATHER, 16, 1 << 20) is None
    # Four GPUs to a host; L40S were in a host whose GPUs cannot reach each other.
    assert known("GB200").collective_seconds(ActionKind.ALL_GATHER, 8, 1 << 20) is None
    assert known("L40S").collective_seconds(ActionKind.ALL_GATHER, 2, 1 << 20) is None


def test_sizes_between_measured_ones() -> None:
    figures = known("H100")

    def attention_s(head_dim: int) -> float:
        return figures.attention_seconds(1e12, 1e8, head_dim)

    assert min(attention_s(64), attention_s(128)) < attention_s(96)
    assert attention_s(96) < max(attention_s(64), attention_s(128))
    assert attention_s(32) == attention_s(64)
    assert attention_s(512) == attention_s(256)
    both = [figures.collective_seconds(ActionKind.ALL_GATHER, n, 1 << 26) for n in (4, 6, 8)]
    assert both == sorted(both, key=float)
    assert figures.collective_seconds(ActionKind.ALL_GATHER, 1, 1 << 26) == 0


def test_dtypes_of_one_width_are_alike() -> None:
    figures = known("H100")
    for one, other in (("bfloat16", "float16"), ("float8_e4m3fn", "float8_e5m2")):
        assert figures.matmul_seconds(4096, 8192, 2048, one) == figures.matmul_seconds(
            4096, 8192, 2048, other
        )


def test_a_variant_has_other_nominal_figures() -> None:
    figures = known("A100")
    small = dataclasses.replace(figures, memory_bytes_per_s=1.555e12)
    assert small.attention_seconds(0, 1e9, 128) > figures.attention_seconds(0, 1e9, 128)
    assert small.attention_seconds(1e12, 0, 128) == figures.attention_seconds(1e12, 0, 128)
