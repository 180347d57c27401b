"""`python -m tests.gpu`: see the package."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu import float8, graphs, over_nccl  # noqa: F401  (they add their checks)
from tests.gpu.checks import CHECKS
from tests.gpu.place import Place, nccl_host

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 150.0
NO_GPU = 2


@dataclass(frozen=True)
class Result:
    """How a check ended: passed, failed or skipped, and what it said."""

    name: str
    outcome: str
    seconds: float
    text: str


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="PART", help="checks whose name contains one"
    )
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    parser.add_argument("--jobs", type=int, default=jobs, help=f"checks at a time (here {jobs})")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), metavar="S", help="start no check later"
    )
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    for name in ("run", "rank", "size", "store"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(CHECKS))
        return 0
    if options.run:
        return run_rank(options)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False, so no check was run", file=sys.stderr)
        return NO_GPU
    names = [name for name in CHECKS if any(part in name for part in options.only)]
    timed = [name for name in names if CHECKS[name].is_timed]
    deadline = time.monotonic() + options.budget_s
    results: list[Result] = []
    for together, jobs in (([n for n in names if n not in timed], options.jobs), (timed, 1)):
        with ThreadPoolExecutor(jobs) as pool:
            for result in pool.map(
                lambda name: run_check(name, options.device, deadline), together
            ):
                results.append(result)
                print(
                    f"{result.outcome:7} {result.seconds:6.1f} s  {result.name}: {_first(result)}",
                    flush=True,
                )
                if options.out is not None:
                    _write(options.out, results, _device(options))
    failed = [result for result in results if result.outcome == "failed"]
    for result in failed:
        print(f"\n--- {result.name}\n{result.text}")
    print(
        f"{len(results) - len(failed)} of {len(results)} checks did not fail on {_device(options)}"
    )
    return 1 if failed else 0


def _write(path: Path, results: list[Result], device: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
        "checks": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(found, indent=2) + "\n")


def run_check(name: str, device: str, deadline: float = float("inf")) -> Result:
    """Run a check's ranks as processes, and say how it ended. deadline: of ``time.monotonic``, to begin by."""
    check = CHECKS[name]
    if check.needs_cuda and device != "cuda":
        return Result(name, "skipped", 0.0, "needs CUDA")
    if importlib.util.find_spec(check.package) is None:
        return Result(name, "skipped", 0.0, f"needs the package {check.package}")
    start = time.monotonic()
    if start > deadline:
        return Result(name, "skipped", 0.0, "not started, as the budget was over")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        command = [sys.executable, "-m", "tests.gpu", "--device", device, "--run", name]
        command += ["--size", str(check.ranks), "--store", store, "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                cwd=ROOT,
                env=_environment(rank if check.is_apart else None),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(check.ranks)
        ]
        texts = [_collect(rank, start + LIMIT_S) for rank in ranks]
    seconds = time.monotonic() - start
    bad = [i for i, rank in enumerate(ranks) if rank.returncode != 0]
    if bad:
        said = [f"rank {i} (exit code {ranks[i].returncode}):\n{texts[i][-4000:]}" for i in bad]
        return Result(name, "failed", seconds, "\n".join(said))
    return Result(name, "passed", seconds, texts[0].strip().rpartition("\n")[2])


def run_rank(options: argparse.Namespace) -> int:
    """Be one rank of a check."""
    faulthandler.enable()
    check = CHECKS[options.run]
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    rank, size = int(options.rank), int(options.size)
    dist.init_process_group(
        check.backend if options.device == "cuda" else "gloo",
        store=dist.FileStore(options.store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    try:
        print(check.run(Place(device, rank, size)), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # peers may be waiting, and so would destroying the group
    sys.stdout.flush()
    os._exit(0)


def _collect(rank: subprocess.Popen[str], deadline: float) -> str:
    try:
        text, _ = rank.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        rank.kill()
        text, _ = rank.communicate()
        text += f"\nnot over after {LIMIT_S:.0f} s"
    return text


def _environment(host: int | None) -> dict[str, str]:
    """Return the environment of a rank. host: the number of its host, where it has one of its own."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for equal bits
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **({} if host is None else nccl_host(host)),
    }


def _device(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name(0) if options.device == "cuda" else "the CPU"


def _first(result: Result) -> str:
    if result.outcome != "failed":
        return result.text
    return next((line for line in reversed(result.text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    sys.exit(main())
