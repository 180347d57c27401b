"""Fit the few constants of `planning/figures.json` to measured tables, and say how well they fit.

    pip install aiconfigurator-core==0.12.0     # Python 3.11 to 3.13; with pandas and scipy
    python -m bench.plan_tables --write

The package (PyPI, Apache-2.0, NVIDIA) has times of single kernels and collectives that three inference engines
measured on each GPU. `fullshard.planning.measured` has the formulas; this script finds their constants, by least
squares of the logarithm of predicted over measured time. "spread" is how far the engines' times of the same
matmul are from each other: no formula can be nearer to a GPU that was not measured.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from scipy.optimize import least_squares

from bench.tables import Table
from fullshard.planning.measured import CollectiveFigures, KernelFigures, matmul_nbytes, moved_share

PACKAGE = "aiconfigurator-core"
ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "src/fullshard/planning/figures.json"
SAMPLE = ROOT / "tests/planning/measured_rows.json"
GPUS = {
    "A100": "a100_sxm",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "L40S": "l40s",
}
DTYPES = {"bfloat16": "bfloat16", "float8_e4m3fn": "fp8"}  # torch's name, and the tables'
HEAD_DIMS = (64, 128, 192, 256)
COLLECTIVES = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
}
_SUSTAINED_S = 2e-3
_NUM_SAMPLED = 4
# Measured in a host whose GPUs cannot reach each other's memory: 1.2 GB/s among 8.
_ODD_HOSTS = ("L40S",)

Predict = Callable[[np.ndarray], np.ndarray]


class Fit(NamedTuple):
    """Constants, and how far times by them are from measured ones: the median and nine in ten of relative errors."""

    constants: np.ndarray
    error: float
    error_p90: float


def fit(predict: Predict, start: list[float], seconds: np.ndarray) -> Fit:
    """Return the positive constants by which a formula is nearest to measured times, outliers weighing less."""

    def log_errors(logs: np.ndarray) -> np.ndarray:
        return np.log(predict(np.exp(logs)) / seconds)

    found = least_squares(log_errors, np.log(start), loss="soft_l1", f_scale=0.05)
    errors = np.abs(predict(np.exp(found.x)) / seconds - 1)
    return Fit(np.exp(found.x), *map(float, np.quantile(errors, [0.5, 0.9])))


def _read(folder: Path, what: str) -> pd.DataFrame:
    """Return all of a GPU's tables of one name. table: which engine, and which version of it."""
    paths = enumerate(sorted(folder.glob(f"{what}.parquet")))
    tables = [pd.read_parquet(path).assign(table=number) for number, path in paths]
    rows = pd.concat(tables, ignore_index=True)
    return rows[rows.latency > 0].assign(seconds=rows.latency * 1e-3)


def matmuls(folder: Path, dtype: str) -> pd.DataFrame:
    """Return seconds of matmuls as training has them: a column for each engine. Index: m, n, k."""
    rows = _read(folder, "gemm/*/*/gemm_perf")
    rows = rows[(rows.gemm_dtype == dtype) & (rows.n >= 256) & (rows.k >= 256)]
    # Odd numbers of rows come from requests of an inference engine; training pads.
    rows = rows[(rows.m >= 2048) & (rows.m % 2 == 0)]
    return rows.groupby(["m", "n", "k", "table"]).seconds.median().unstack()


def attentions(folder: Path, head_dim: int) -> pd.Series:
    """Return seconds of causal attention, forward, by its fastest kernel. Index: batch, sequence, heads, KV heads."""
    rows = _read(folder, "attention/*/*/context_attention_perf")
    rows = rows[(rows.head_dim == head_dim) & (rows.attn_dtype == "bfloat16")]
    rows = rows[(rows.kv_cache_dtype == "bfloat16") & (rows.step == 0)]
    rows = rows[(rows.window_size.fillna(0) == 0) & (rows.isl >= 512)]
    # Triton stands in where an engine has no kernel of its own.
    rows = rows[~rows.kernel_source.str.contains("triton")]
    rows = rows[rows.batch_size * rows.num_heads * rows.isl >= 65536]
    index = ["batch_size", "isl", "num_heads", "num_key_value_heads"]
    return rows.groupby(index).seconds.min()


def collectives(folder: Path, name: str, num_gpus: int) -> pd.Series:
    """Return seconds of an NCCL collective, the median of NCCL's versions. Index: bytes of the whole."""
    rows = _read(folder, "comm/nccl/*/nccl_perf")
    rows = rows[(rows.op_name == name) & (rows.num_gpus == num_gpus) & (rows.nccl_dtype == "half")]
    return rows.assign(nbytes=2 * rows.message_size).groupby("nbytes").seconds.median()


def fit_matmuls(gpu: dict[str, Any], times: pd.DataFrame, dtype: str) -> tuple[Fit, float]:
    """Return constants of `KernelFigures`, and the efficiency of what takes longer than 2 ms."""
    m, n, k = (times.index.get_level_values(i).to_numpy(float) for i in range(3))
    seconds = times.median(axis=1).to_numpy()
    ideal_s = 2 * m * n * k / gpu["peak_flops"][dtype]
    memory_s = matmul_nbytes(m, n, k, dtype) / gpu["memory_bytes_per_s"]
    found = fit(
        lambda c: KernelFigures(*c).overlapped_s(ideal_s, memory_s), [0.7, 0.7, 5e-6], seconds
    )
    is_long = seconds > _SUSTAINED_S
    return found, float(np.median((ideal_s / seconds)[is_long]))


def fit_attentions(gpu: dict[str, Any], times: pd.Series, head_dim: int) -> Fit:
    batch, sequence, heads, kv_heads = (
        times.index.get_level_values(i).to_numpy(float) for i in range(4)
    )
    flops = 2 * batch * heads * sequence**2 * head_dim
    nbytes = 4 * batch * sequence * (heads + kv_heads) * head_dim
    ideal_s, memory_s = flops / gpu["peak_flops"]["bfloat16"], nbytes / gpu["memory_bytes_per_s"]
    return fit(
        lambda c: KernelFigures(*c).summed_s(ideal_s, memory_s), [0.6, 0.6, 1e-5], times.to_numpy()
    )


def fit_collective(times: pd.Series, kind: str, num_gpus: int) -> Fit:
    moved = times.index.to_numpy(float) * moved_share(kind, num_gpus)
    return fit(lambda c: CollectiveFigures(*c).seconds(moved), [1e-5, 3e11, 1e-6], times.to_numpy())


def spread(times: pd.DataFrame) -> tuple[float, float]:
    """Return how far engines' times of one matmul are from their median: the median and nine in ten."""
    both = times.dropna()
    shares = (both.div(both.median(axis=1), axis=0) - 1).abs().to_numpy().ravel()
    return tuple(np.quantile(shares[shares > 0], [0.5, 0.9]))


class Report:
    """What was found: a printed line for each fit, and a few measured rows of each for a test.

    rows: by kind: the GPU, which fit, what was measured, and the seconds.
    """

    def __init__(self) -> None:
        columns = ["what", "constants", "error", "of nine in ten", "spread", "sustained"]
        self.table = Table("Constants, and how far off times by them are", columns)
        self.rows: dict[str, list[list[Any]]] = {}

    def add(self, gpu: str, kind: str, which: Any, found: Fit, times: pd.Series, *more: str) -> Any:
        """Note a fit, and return its entry in `figures.json`."""
        entry = [_short(value) for value in (*found.constants, found.error, found.error_p90)]
        constants = " ".join(f"{value:g}" for value in entry[:-2])
        errors = [f"{found.error:.1%}", f"{found.error_p90:.1%}"]
        self.table.rows.append([f"{gpu} {kind} {which}", constants, *errors, *more])
        step = max(1, len(times) // _NUM_SAMPLED)
        for key, seconds in list(times.items())[step // 2 :: step]:
            measured = map(int, np.atleast_1d(key))
            self.rows.setdefault(kind, []).append([gpu, which, *measured, _short(seconds)])
        return entry


def _short(value: float) -> float:
    return float(f"{value:.3g}") if value > 1e-9 else 0.0


def fit_gpu(systems: Path, gpu: str, report: Report) -> dict[str, Any]:
    """Return a GPU's entry of `figures.json`."""
    nominal = yaml.safe_load((systems / f"{GPUS[gpu]}.yaml").read_text())["gpu"]
    folder = systems / "data" / GPUS[gpu]
    peak_flops = {
        dtype: float(nominal[f"{width}_tc_flops"])
        for dtype, width in DTYPES.items()
        if f"{width}_tc_flops" in nominal
    }
    entry: dict[str, Any] = {
        "peak_flops": peak_flops,
        "memory_bytes_per_s": float(nominal["mem_bw"]),
    }
    entry |= {"matmul": {}, "sustained_efficiency": {}, "attention": {}, "collectives": {}}
    for dtype in peak_flops:
        times = matmuls(folder, DTYPES[dtype])
        found, sustained = fit_matmuls(entry, times, dtype)
        more = ["{:.1%} {:.1%}".format(*spread(times)), f"{sustained:.3f}"]
        entry["sustained_efficiency"][dtype] = _short(sustained)
        entry["matmul"][dtype] = report.add(
            gpu, "matmul", dtype, found, times.median(axis=1), *more
        )
    for head_dim in HEAD_DIMS:
        times = attentions(folder, head_dim)
        if len(times):
            found = fit_attentions(entry, times, head_dim)
            entry["attention"][str(head_dim)] = report.add(gpu, "attention", head_dim, found, times)
    for kind in COLLECTIVES if gpu not in _ODD_HOSTS else ():
        entry["collectives"][kind] = {}
        for num_gpus in (2, 4, 8):
            times = collectives(folder, COLLECTIVES[kind], num_gpus)
            if len(times):
                found = fit_collective(times, kind, num_gpus)
                added = report.add(gpu, kind, num_gpus, found, times)
                entry["collectives"][kind][str(num_gpus)] = added
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {FIGURES.relative_to(ROOT)}")
    options = parser.parse_args()
    package = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install {PACKAGE}==0.12.0")
    report = Report()
    systems = Path(package.origin).parent / "systems"
    figures = {gpu: fit_gpu(systems, gpu, report) for gpu in GPUS}
    report.table.print()
    if options.write:
        source = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
        _write(FIGURES, {"source": source, "gpus": figures})
        _write(SAMPLE, {"source": source, "rows": report.rows})


def _write(path: Path, value: Any) -> None:
    """Write JSON with a list of numbers on one line."""
    text = json.dumps(value, indent=1)
    path.write_text(re.sub(r"\[[^][]+\]", lambda found: " ".join(found[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
