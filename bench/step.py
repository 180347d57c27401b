"""Step time, losses and host memory of training, for all implementations in one run.

    python -m bench.step --ranks 2 --batch 2 --seq 128

The ranks of all implementations stay alive. In each round every implementation in turn trains a
few steps while the others wait, and the order rotates from round to round. One step is zero_grad,
forward, loss, backward and the optimizer. Exits with 1 if the losses of the data-parallel
implementations differ.

Where that would be more ranks than a machine of 24 GB holds, implementations are measured in
batches, each with local compute and FSDP2 in it, so that ratios to these are still taken within a
round; a ratio between two batches is the quotient of the ratios to FSDP2.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import mean
from typing import Any

from .goals import PEERS
from .implementations import IMPLEMENTATIONS, Work, build_training, why_not
from .model import BatchSize
from .ranks import RankGroup
from .resident import PeakPss, pss_nbytes
from .tables import (
    Progress,
    Spread,
    Table,
    add_output_options,
    emit,
    positive,
    ratio_across,
    spread,
)

# "agree to 5 decimals", without the cliff of rounding: 1.000005 and 1.0000049 agree.
_LOSS_TOLERANCE = 0.5e-5

_BASES = ("local", "fsdp2")
_MAX_RANKS_ALIVE = 20


@dataclass(frozen=True)
class Plan:
    """How long to measure whom; who cannot do the work is left out (`blanks` says why)."""

    work: Work
    implementations: Sequence[str]
    num_rounds: int = 7
    num_steps: int = 3
    num_warm_up_steps: int = 4
    num_memory_steps: int = 4

    @property
    def able(self) -> list[str]:
        return [name for name in self.implementations if why_not(name, self.work) is None]

    @property
    def blanks(self) -> dict[str, str]:
        reasons = {name: why_not(name, self.work) for name in self.implementations}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @property
    def batches(self) -> list[list[str]]:
        """Who is alive at the same time."""
        limit = _MAX_RANKS_ALIVE // math.prod(self.work.mesh_shape)
        bases = [name for name in self.able if name in _BASES]
        others = [name for name in self.able if name not in _BASES]
        if len(self.able) <= limit or not others:
            return [self.able]
        num_batches = math.ceil(len(others) / max(1, limit - len(bases)))
        return [[*bases, *others[i::num_batches]] for i in range(num_batches)]


@dataclass
class Measured:
    """What one implementation did.

    step_seconds   wall time per step of each round, until the slowest rank has answered
    losses         mean loss over ranks of every step since the start
    pss_nbytes     peak over a few steps of the summed PSS of all ranks, less the sum after
                   import, before the model and the process group exist
    """

    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    pss_nbytes: int = 0


Batch = dict[str, Measured]


def measure(plan: Plan, *, title: str) -> list[Batch]:
    """Run the plan and return what each implementation did, batch by batch."""
    num_stages = sum(len(names) for names in plan.batches) * (plan.num_rounds + 2)
    with Progress(title, num_stages=num_stages) as progress:
        return [_measure_batch(plan, names, progress) for names in plan.batches]


def _measure_batch(plan: Plan, names: Sequence[str], progress: Progress) -> Batch:
    with ExitStack() as stack:
        groups = _start_groups(plan, names, stack)
        imported = {name: pss_nbytes(group.process_ids) for name, group in groups.items()}
        results = {name: Measured() for name in groups}
        for name, group in groups.items():
            progress.advance(f"{name} warms up")
            group.call("build")
            _train(group, results[name], plan.num_warm_up_steps)
        for index in range(plan.num_rounds):
            for name in rotated(names, index):
                progress.advance(f"{name} round {index + 1} of {plan.num_rounds}")
                seconds = _train(groups[name], results[name], plan.num_steps)
                results[name].step_seconds.append(seconds / plan.num_steps)
        for name, group in groups.items():
            progress.advance(f"{name} memory")
            with PeakPss(group.process_ids) as peak:
                _train(group, results[name], plan.num_memory_steps)
            results[name].pss_nbytes = peak.peak_nbytes - imported[name]
    return results


def _start_groups(plan: Plan, names: Sequence[str], stack: ExitStack) -> dict[str, RankGroup]:
    num_ranks = math.prod(plan.work.mesh_shape)
    groups = {}
    for name in names:
        build = partial(build_training, implementation=name, work=plan.work)
        groups[name] = stack.enter_context(RankGroup(name, build, num_ranks=num_ranks))
    for group in groups.values():
        group.wait_imported()
    return groups


def _train(group: RankGroup, result: Measured, num_steps: int) -> float:
    """Train a few steps, record their losses and return the wall time of all of them."""
    answer = group.call("run", num_steps)
    result.losses += [mean(losses) for losses in zip(*answer.values, strict=True)]
    return answer.seconds


def rotated(names: Sequence[str], index: int) -> list[str]:
    start = index % len(names)
    return [*names[start:], *names[:start]]


@dataclass(frozen=True)
class Comparison:
    """One implementation beside the others of the run; see `time_ratio`.

    `over_fastest` is the ratio to the peer that is fastest against FSDP2.
    """

    step_ms: Spread
    over_local: Spread | None
    over_fsdp2: Spread | None
    over_fastest: Spread | None
    pss_mb: float


def compare(batches: Sequence[Batch]) -> dict[str, Comparison]:
    fastest = fastest_peer(batches)
    return {
        name: Comparison(
            step_ms=spread([1e3 * seconds for seconds in result.step_seconds]),
            over_local=time_ratio(batches, name, "local"),
            over_fsdp2=time_ratio(batches, name, "fsdp2"),
            over_fastest=None if fastest is None else time_ratio(batches, name, fastest),
            pss_mb=result.pss_nbytes / 1e6,
        )
        for name, result in merged(batches).items()
    }


def merged(batches: Sequence[Batch]) -> Batch:
    """Return every implementation once, as it was first measured."""
    return {name: result for batch in reversed(batches) for name, result in batch.items()}


def time_ratio(batches: Sequence[Batch], name: str, base: str) -> Spread | None:
    """Take the ratio round by round where both were in one batch, else by way of FSDP2."""
    seconds = [{each: found.step_seconds for each, found in batch.items()} for batch in batches]
    return ratio_across(seconds, name, base, by_way_of="fsdp2")


def fastest_peer(batches: Sequence[Batch]) -> str | None:
    """Return the name of the fastest of the other libraries, None if none was measured."""
    ratios = {name: time_ratio(batches, name, "fsdp2") for name in PEERS}
    medians = {name: ratio.median for name, ratio in ratios.items() if ratio is not None}
    return min(medians, key=lambda name: medians[name], default=None)


def largest_loss_difference(batches: Sequence[Batch], *, precision: str) -> float:
    """Return the largest difference of mean losses at one step among comparable implementations.

    Local compute trains each rank on its own data. In bf16 DDP computes through autocast, which
    keeps norms and residuals in float32, and DeepSpeed converts the model itself: other arithmetics
    than the other sharded implementations', from the first loss on.
    """
    excluded = {"local", "ddp", "deepspeed"} if precision == "bf16" else {"local"}
    results = [item for batch in batches for item in batch.items()]
    curves = [result.losses for name, result in results if name not in excluded]
    return max((max(losses) - min(losses) for losses in zip(*curves, strict=True)), default=0.0)


def losses_agree(batches: Sequence[Batch], *, precision: str) -> bool:
    return largest_loss_difference(batches, precision=precision) <= _LOSS_TOLERANCE


def build_table(plan: Plan, batches: Sequence[Batch], *, title: str) -> Table:
    results = merged(batches)
    headings = ["", "step ms", "over local", "over FSDP2", "PSS MB", "last loss"]
    table = Table(title, headings)
    for name, comparison in compare(batches).items():
        ratios = [comparison.over_local, comparison.over_fsdp2]
        table.rows.append(
            [
                name,
                f"{comparison.step_ms.median:.0f}",
                *("" if ratio is None else str(ratio) for ratio in ratios),
                f"{comparison.pss_mb:.0f}",
                f"{results[name].losses[-1]:.5f}",
            ]
        )
    difference = largest_loss_difference(batches, precision=plan.work.precision)
    num_losses = len(next(iter(results.values())).losses)
    table.notes = [
        f"median (lowest-highest) of {plan.num_rounds} rounds of {plan.num_steps} steps; "
        "ratios are taken within a round",
        "PSS: peak over all ranks together, above what they held after import",
        f"losses of {num_losses} steps differ by at most {difference:.1e} "
        f"(allowed {_LOSS_TOLERANCE:.1e})",
        *(f"{name}: {reason}" for name, reason in plan.blanks.items()),
    ]
    return table


def results_json(plan: Plan, batches: Sequence[Batch]) -> dict[str, Any]:
    """Return everything measured; a spread becomes [median, lowest, highest]."""
    return {
        "work": asdict(plan.work),
        "comparison": {name: asdict(value) for name, value in compare(batches).items()},
        "measured": [{name: asdict(result) for name, result in batch.items()} for batch in batches],
    }


def title_of(work: Work) -> str:
    mesh = "x".join(map(str, work.mesh_shape))
    accumulation = ""
    if work.num_microbatches > 1:
        accumulation = f", {work.num_microbatches} micro-batches, reduced in {work.sync}"
    return f"step: ranks {mesh}, batch {work.batch}, {work.precision}{accumulation}"


def mesh_shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"{text} has more than two axes")
    return tuple(positive(size) for size in sizes)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.step", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument(
        "--mesh", type=mesh_shape, metavar="RxS", help="e.g. 2x2: replicate over 2, shard over 2"
    )
    parser.add_argument(
        "--batch", type=positive, default=2, help="sequences per rank and micro-batch"
    )
    parser.add_argument("--seq", type=positive, default=128, help="tokens per sequence")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--accum", type=positive, default=1, help="micro-batches per step")
    parser.add_argument(
        "--sync",
        choices=["last", "each"],
        default="last",
        help="the micro-batches in which gradients travel (no_sync in the others)",
    )
    parser.add_argument("--optimizer", choices=["adamw", "foreach", "fused"], default="adamw")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--steps", type=positive, default=3, help="steps per round")
    parser.add_argument(
        "--impl", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS)
    )
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    work = Work(
        batch=BatchSize(options.batch, options.seq),
        precision=options.dtype,
        optimizer=options.optimizer,
        num_microbatches=options.accum,
        sync=options.sync,
        mesh_shape=options.mesh or (options.ranks,),
    )
    plan = Plan(work, options.impl, num_rounds=options.rounds, num_steps=options.steps)
    title = title_of(work)
    batches = measure(plan, title=title)
    emit(options, [build_table(plan, batches, title=title)], results_json(plan, batches))
    if not losses_agree(batches, precision=work.precision):
        print("bench.step: the implementations' losses differ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
