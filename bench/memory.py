"""Peak bytes of tensors per rank, over the bytes that must be there.

    python -m bench.memory --layers 4 40

The floor of a rank is the sum of

    shards       its part of the parameters (float32)
    gradients    its part of the gradients, as many bytes
    optimizer    its part of AdamW's two moments, twice as many
    two units    the two largest unsharded units: one computes while the next is gathered
    activations  what forward and backward hold beside parameters and gradients, measured on the
                 unwrapped model: its highest sum of live tensor bytes, less parameters and finished
                 gradients

The last gradient exists when most activations are gone, so a good run stays below that sum. The
tight floor therefore takes gradients and activations together, at the worst moment of the same run
of the unwrapped model: the highest sum of activations and 1/shards of the finished gradients.

The measured value of a rank is

    private      its highest sum of live tensor bytes during a step, after steps to warm up
    shared       memory that ranks of one host map together, once per host, divided by the ranks
    peak         private + shared

Two columns look at the same run from elsewhere: the part of a step in which the peak occurred, and
the PSS of all ranks together, which also sees what C++ code and the allocator hold.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from .implementations import Training, Work
from .model import BatchSize, Shape, build_model
from .ranks import Rank, RankGroup
from .resident import PeakPss, pss_nbytes
from .tables import Progress, Table, add_output_options, emit, positive
from .tensor_bytes import LiveTensors, shared_mappings

SHARDED = (
    "fsdp1",
    "fsdp2",
    "fullshard",
    "fullshard-fsdp1",
    "fullshard-pg",
    "fullshard-fsdp1-pg",
)
_NUM_WARM_UP_STEPS = 2
_NUM_STEPS = 2


class RankPeak(NamedTuple):
    """What one rank held at its peak; `shared` maps each shared mapping to its bytes."""

    private_nbytes: int
    phase: str
    shared: dict[str, int]


@dataclass(frozen=True)
class Floor:
    """What a rank cannot do without, in bytes; see the module's docstring."""

    shards: int
    gradients: int
    optimizer: int
    two_units: int
    activations: int
    activations_and_gradients: int

    @property
    def total(self) -> int:
        return self._always + self.gradients + self.activations

    @property
    def tight(self) -> int:
        return self._always + self.activations_and_gradients

    @property
    def _always(self) -> int:
        return self.shards + self.optimizer + self.two_units


@dataclass(frozen=True)
class Peak:
    """The largest rank's peak of one implementation, in bytes, and the PSS of all ranks."""

    private: int
    shared: int
    phase: str
    pss: int

    @property
    def total(self) -> int:
        return self.private + self.shared


class MeasuredTraining:
    """One rank of a sharded implementation, with its tensors counted from the first one on."""

    def __init__(self, rank: Rank, implementation: str, work: Work) -> None:
        self._foreign = {mapping.identity for mapping in shared_mappings()}
        self._tensors = LiveTensors()
        with self._tensors:
            self._training = Training(rank, implementation, work)

    def warm_up(self, num_steps: int) -> None:
        with self._tensors:
            self._training.run(num_steps)

    def run_uncounted(self, num_steps: int) -> None:
        self._training.run(num_steps)

    def run_measured(self, num_steps: int) -> RankPeak:
        """Train with the peak taken from here on, noting in which part of a step it occurs."""
        self._tensors.reset_peak()
        with self._tensors:
            for _ in range(num_steps):
                self._tensors.phase = "forward and backward"
                self._training.optimizer.zero_grad()
                for _loss in self._training.backward_microbatches():
                    pass
                self._tensors.phase = "optimizer"
                self._training.optimizer.step()
        shared: dict[str, int] = {}
        for mapping in shared_mappings():
            if mapping.identity not in self._foreign:
                shared[mapping.identity] = shared.get(mapping.identity, 0) + mapping.nbytes
        return RankPeak(self._tensors.peak_nbytes, self._tensors.peak_phase, shared)


class MeasuredLocal:
    """The unwrapped model, whose tensors beside parameters and gradients are the activations."""

    def __init__(self, rank: Rank, work: Work) -> None:
        self._training = Training(rank, "local", work)
        self._parameters = list(self._training.model.parameters())

    def peak_nbytes(self, num_shards: int | None) -> int:
        """Return the peak of activations, and of 1/num_shards of finished gradients if given."""

        def less_nbytes() -> int:
            gradients = sum(p.grad.nbytes for p in self._parameters if p.grad is not None)
            kept = 0 if num_shards is None else gradients // num_shards
            return parameters_nbytes + gradients - kept

        parameters_nbytes = sum(p.nbytes for p in self._parameters)

        # Parameters are seen at their first use. Until all of them were, the difference would be
        # too small, so the first step only makes them known. No optimizer step: no moments.
        tensors = LiveTensors(less_nbytes=less_nbytes)
        with tensors:
            for _ in range(2):
                tensors.reset_peak()
                self._training.optimizer.zero_grad()
                for _loss in self._training.backward_microbatches():
                    pass
        return tensors.peak_nbytes


def build_measured(rank: Rank, *, implementation: str, work: Work) -> MeasuredTraining:
    return MeasuredTraining(rank, implementation, work)


def build_local(rank: Rank, *, work: Work) -> MeasuredLocal:
    return MeasuredLocal(rank, work)


def measure_floor(work: Work) -> Floor:
    """Compute the floor of one rank; only the activations need a run."""
    num_shards = work.mesh_shape[-1]
    model = build_model(work.shape)
    units = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    total = sum(p.nbytes for p in model.parameters())
    units.append(total - sum(units))
    with RankGroup("local", partial(build_local, work=work), num_ranks=1) as group:
        group.wait_imported()
        group.call("build")
        (activations,) = group.call("peak_nbytes", None).values
        (with_gradients,) = group.call("peak_nbytes", num_shards).values
    return Floor(
        shards=total // num_shards,
        gradients=total // num_shards,
        optimizer=2 * total // num_shards,
        two_units=sum(sorted(units)[-2:]),
        activations=activations,
        activations_and_gradients=with_gradients,
    )


def measure_peak(implementation: str, work: Work) -> Peak:
    """Train with counted tensors, then once more without counting, for the PSS."""
    num_ranks = math.prod(work.mesh_shape)
    with ExitStack() as stack:
        build = partial(build_measured, implementation=implementation, work=work)
        group = stack.enter_context(RankGroup(implementation, build, num_ranks=num_ranks))
        group.wait_imported()
        imported = pss_nbytes(group.process_ids)
        group.call("build")
        group.call("warm_up", _NUM_WARM_UP_STEPS)
        ranks: list[RankPeak] = group.call("run_measured", _NUM_STEPS).values
        with PeakPss(group.process_ids) as pss:
            group.call("run_uncounted", _NUM_STEPS)
    shared: dict[str, int] = {}
    for rank in ranks:
        shared |= rank.shared
    largest = max(ranks, key=lambda rank: rank.private_nbytes)
    return Peak(
        private=largest.private_nbytes,
        shared=sum(shared.values()) // num_ranks,
        phase=largest.phase,
        pss=pss.peak_nbytes - imported,
    )


@dataclass(frozen=True)
class Result:
    """One model size: what must be there, and what each implementation held."""

    num_layers: int
    floor: Floor
    peaks: dict[str, Peak]

    def over_floor(self, implementation: str) -> float:
        return self.peaks[implementation].total / self.floor.total

    def over_tight_floor(self, implementation: str) -> float:
        return self.peaks[implementation].total / self.floor.tight


def measure(
    layers: Sequence[int], *, implementations: Sequence[str] = SHARDED, num_ranks: int = 2
) -> list[Result]:
    """Measure models of several depths and the width of a small one."""
    progress = Progress("memory", num_stages=len(layers) * (len(implementations) + 1))
    results = []
    for num_layers in layers:
        shape = Shape(num_layers, width=256, num_heads=4, hidden=1024, vocab=2048)
        work = Work(shape=shape, batch=BatchSize(2, 128), mesh_shape=(num_ranks,))
        progress.advance(f"{num_layers} layers: floor")
        floor = measure_floor(work)
        peaks = {}
        for name in implementations:
            progress.advance(f"{num_layers} layers: {name}")
            peaks[name] = measure_peak(name, work)
        results.append(Result(num_layers, floor, peaks))
    progress.finish()
    return results


def build_table(result: Result) -> Table:
    headings = [
        "MB per rank",
        "private",
        "shared",
        "peak",
        "over floor",
        "over tight floor",
        "peak in",
        "PSS, all ranks",
    ]
    table = Table(f"memory: {result.num_layers} layers", headings)
    for name, peak in result.peaks.items():
        sizes = [f"{nbytes / 1e6:.1f}" for nbytes in (peak.private, peak.shared, peak.total)]
        ratios = [f"{result.over_floor(name):.2f}", f"{result.over_tight_floor(name):.2f}"]
        table.rows.append([name, *sizes, *ratios, peak.phase, f"{peak.pss / 1e6:.0f}"])
    floor = result.floor
    table.notes = [
        f"floor {floor.total / 1e6:.1f} MB = {_terms(floor, 'gradients', 'activations')}",
        f"tight floor {floor.tight / 1e6:.1f} MB = {_terms(floor, 'activations_and_gradients')}",
    ]
    return table


def _terms(floor: Floor, *changing: str) -> str:
    sizes = asdict(floor)
    return " + ".join(
        f"{name.replace('_', ' ')} {sizes[name] / 1e6:.1f}"
        for name in ("shards", "optimizer", "two_units", *changing)
    )


def results_json(results: Sequence[Result]) -> dict[str, Any]:
    return {"memory": [asdict(result) for result in results]}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.memory", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--layers", type=positive, nargs="+", default=[4, 40])
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--impl", nargs="+", choices=SHARDED, default=SHARDED)
    add_output_options(parser)
    return parser.parse_args()


def main() -> int:
    options = _parse_options()
    results = measure(options.layers, implementations=options.impl, num_ranks=options.ranks)
    emit(options, [build_table(result) for result in results], results_json(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
