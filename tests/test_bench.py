"""The parts of the benchmarks that are arithmetic: goals, ratios, intervals, tables, options."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from bench import disk, gpu, gpu_planned, keeping, launches, run_all, step
from bench import planned as planned_bench
from bench.alone import Measured as AloneMeasured
from bench.alone import cpu_ratio, wall_ratio
from bench.collectives import MEMORY_COPY, Operation
from bench.collectives import Measured as CollectiveMeasured
from bench.collectives import Setting as CollectiveSetting
from bench.goals import AHEAD, HEADINGS, Row, Section, at_least, at_most, count_reached
from bench.implementations import IMPLEMENTATIONS, Work, why_not
from bench.tables import Table, median_interval
from fullshard import KeptUnit, KeptUnits
from fullshard.optim.unit_files import ALIGNMENT, UnitFiles
from tests.fresh import in_warm_forks

ROOT = Path(__file__).parent.parent
BOTH = {"fsdp2": 1.0, "fullshard": 0.5, "fullshard-fsdp1": 0.7}


def test_a_goal_is_reached_by_both_faces_or_names_the_one_that_misses() -> None:
    verdicts = [Row("", BOTH, goal).cells()[-1] for goal in (at_most(0.7), at_most(0.6), AHEAD)]
    assert verdicts == ["yes", "no: as FSDP1", "yes"]
    assert Row("", BOTH, at_most(0.4)).cells()[-1] == "no"
    assert Row("", {"fullshard": 1.0}, AHEAD).cells()[-1] == "no", "a tie is not ahead"


def test_what_was_not_measured_has_not_reached_its_goal() -> None:
    row = Row("", {"fullshard": 0.5}, at_most(0.6))
    assert row.missed_by == ["fullshard-fsdp1"]
    assert row.is_reached is False


def test_a_goal_may_ask_for_one_column_and_for_at_least() -> None:
    values = {"fullshard-pg": 2.0}
    assert Row("", values, at_least(1.8, "fullshard-pg")).is_reached is True
    assert Row("", values, at_least(2.1, "fullshard-pg")).is_reached is False


def test_rows_line_up_with_headings_and_blanks_are_explained() -> None:
    row = Row("time", BOTH, at_most(1.08), {"deepspeed": "not installed"})
    cells = dict(zip(HEADINGS, row.cells(), strict=True))
    assert cells["FSDP2"] == "1.000"
    assert cells["DeepSpeed"] == "-"
    assert cells["DDP"] == ""
    assert cells["goal"] == "<= 1.08"
    assert Section("hsdp", [row, row]).notes() == ["hsdp: no DeepSpeed, not installed"]


def test_goals_are_counted_over_sections() -> None:
    rows = [Row("", BOTH, at_most(0.7)), Row("", BOTH, at_most(0.6)), Row("", BOTH)]
    assert count_reached([Section("a", rows), Section("b", rows[:1])]) == (2, 3)


@pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(), reason="asks git what it ignores"
)
@pytest.mark.parametrize(
    "name", ["2026-11-22-some-cpu.json", "gpu-some-gpu.json", "gpu-checks.json", "trace-1b.json.gz"]
)
def test_results_are_written_where_git_ignores_them(name: str) -> None:
    assert run_all.RESULTS == gpu.RESULTS
    ask = ["git", "check-ignore", "--no-index", str(run_all.RESULTS / name)]
    assert subprocess.run(ask, cwd=ROOT, capture_output=True, check=False).returncode == 0


def measured(*seconds: float, losses: tuple[float, ...] = (3.0, 2.0)) -> step.Measured:
    return step.Measured(list(seconds), list(losses), pss_nbytes=1_000_000)


def test_ratios_are_taken_round_by_round() -> None:
    # The second round was slow for everybody: the ratio of medians would be 1.5, not 2.
    batch = {"fsdp2": measured(1.0, 10.0, 4.0), "fullshard": measured(2.0, 20.0, 6.0)}
    ratio = step.time_ratio([batch], "fullshard", "fsdp2")
    assert ratio == (2.0, 1.5, 2.0)
    assert step.time_ratio([batch], "fullshard", "local") is None


def test_ratios_between_batches_go_by_way_of_fsdp2() -> None:
    batches = [
        {"fsdp2": measured(1.0), "ddp": measured(0.5)},
        {"fsdp2": measured(2.0), "fullshard": measured(0.5)},
    ]
    ratio = step.time_ratio(batches, "fullshard", "ddp")
    assert ratio is not None
    assert ratio.median == pytest.approx(0.5), "not 1, as their seconds are"
    assert step.fastest_peer(batches) == "ddp"
    assert list(step.merged(batches)) == ["fsdp2", "fullshard", "ddp"]
    assert step.merged(batches)["fsdp2"].step_seconds == [1.0]


def test_losses_of_every_batch_are_compared() -> None:
    same = {"fsdp2": measured(1.0)}
    other = {"fsdp2": measured(1.0), "fullshard": measured(1.0, losses=(3.0, 2.1))}
    assert step.losses_agree([same, same], precision="fp32")
    assert not step.losses_agree([same, other], precision="fp32")


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)])
def test_batches_hold_everyone_once_beside_their_bases(mesh_shape: tuple[int, ...]) -> None:
    plan = step.Plan(Work(mesh_shape=mesh_shape), list(IMPLEMENTATIONS))
    others = [name for batch in plan.batches for name in batch if name not in ("local", "fsdp2")]
    assert sorted(others) == sorted(set(plan.able) - {"local", "fsdp2"})
    assert all({"local", "fsdp2"} <= set(batch) for batch in plan.batches)
    assert (len(plan.batches) > 1) == (mesh_shape != (2,))


def test_who_cannot_do_the_work_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.zero3.is_installed", lambda: False)
    plan = step.Plan(Work(), ["fsdp2", "deepspeed"])
    assert plan.able == ["fsdp2"]
    assert plan.blanks == {"deepspeed": "not installed"}
    monkeypatch.setattr("bench.zero3.is_installed", lambda: True)
    assert why_not("deepspeed", Work()) is None
    assert why_not("deepspeed", Work(mesh_shape=(2, 2))) == "shards over all ranks only"


def test_every_setting_of_the_steps_asks_us_to_be_ahead() -> None:
    names = ("fsdp2", "ddp", "fullshard", "fullshard-fsdp1")
    batch = {name: measured(1.0, 1.0) for name in names}
    for setting in run_all.STEP_SETTINGS.values():
        plan = setting.plan(run_all.Run())
        section = run_all.step_section(plan, setting, [batch])
        assert AHEAD in [row.goal for row in section.rows]
        assert plan.num_rounds >= 5


def test_the_interval_of_a_median_is_by_order_statistics() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    # The textbook's: the 14th and 27th of 40, the 2nd and 9th of 10.
    assert median_interval([float(i) for i in range(1, 41)]) == (20.5, 14.0, 27.0)
    assert median_interval([float(i) for i in range(1, 11)]) == (5.5, 2.0, 9.0)


def test_one_rank_is_compared_in_wall_and_in_cpu_time() -> None:
    results = {
        "local": AloneMeasured([1.0, 2.0, 4.0], [1.0, 1.0, 1.0]),
        "fullshard": AloneMeasured([1.5, 2.0, 8.0], [1.1, 1.1, 1.1]),
    }
    assert wall_ratio(results, "fullshard").median == 1.5
    assert cpu_ratio(results, "fullshard").median == 1.1


def test_only_bytes_beyond_the_cache_have_goals() -> None:
    forms = ("Gloo", "fullshard peer memory", "fullshard process group")
    results = {
        Operation(kind, form): CollectiveMeasured([2.0 if form == "Gloo" else 1.0])
        for kind in ("all-gather", "reduce-scatter")
        for form in forms
    }
    results[Operation(MEMORY_COPY, "")] = CollectiveMeasured([0.5])
    large = list(run_all.collective_rows(CollectiveSetting(2, 64 << 20), results))
    assert [row.is_reached for row in large] == [True, None, True, True]
    assert large[3].values == {"fullshard-pg": 2.0}
    small = run_all.collective_rows(CollectiveSetting(2, 1 << 20), results)
    assert {row.goal for row in small} == {None}


def test_a_table_is_aligned_on_paper_too() -> None:
    table = Table(
        "all", ["", "FSDP2", "goal"], [["a section"], ["time", "1.00", "<= 1"]], ["a | b"]
    )
    assert table.plain().splitlines() == ["      FSDP2  goal", "a section", "time   1.00  <= 1"]
    assert table.markdown().splitlines() == [
        "## all", "", "|  | FSDP2 | goal |", "| --- | ---: | ---: |",
        "| **a section** |  |  |", "| time | 1.00 | <= 1 |", "", "- a | b",
    ]  # fmt: skip


def test_results_are_written_as_markdown_and_json(tmp_path: Path) -> None:
    run = run_all.Run(results={"x": 1})
    table = run_all.build_table([Section("a", [Row("time", BOTH, AHEAD)])], seconds=60)
    path = run_all.write_files(tmp_path / "results", table, run)
    assert "| time |" in path.read_text()
    assert "1 of 1 goals reached" in path.read_text()
    written = json.loads(path.with_suffix(".json").read_text())
    assert written["x"] == 1
    assert written["machine"]["torch"] in path.read_text()


def test_a_device_is_given_no_more_operations_than_by_fsdp2() -> None:
    # In a process of its own: `install` refuses one that PyTorch's FSDP was used in.
    (done,) = in_warm_forks(
        "import json; from bench.launches import measure, results_json; print(json.dumps(results_json(measure())))"
    )
    assert done.code == 0, done.err
    results = [launches.Launches(**each) for each in json.loads(done.out)["launches"]]
    by_name = {(each.implementation, each.model): each for each in results}
    for model in dict.fromkeys(each.model for each in results):
        ours, theirs = by_name["fullshard", model], by_name["fsdp2", model]
        assert ours.collectives == theirs.collectives > 0
        assert 0 < ours.kernels < theirs.kernels
        assert launches.over_fsdp2(results, model) <= 1.0
        # None of it stands in the way of compute.
        assert ours.side_lanes == ours.total


def test_every_unit_is_moved_by_the_disk_and_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_REQUEST", 2 * ALIGNMENT)
    with closing(UnitFiles(tmp_path, rank=0)) as files:
        moved = disk.Disk(files, num_units=4, nbytes=5 * ALIGNMENT)
        # Ours takes three buffers in turn, the raw one the first.
        for write, filled in ((moved.write, [0, 1, 2, 0]), (moved.raw_write, [0, 0, 0, 0])):
            for n, buffer in enumerate(moved.buffers):
                buffer.fill_(n)
            write()
            assert [files.view(unit).unique().tolist() for unit in moved.units] == [
                [n] for n in filled
            ]
        for read in (moved.read, moved.raw_read):
            moved.buffers[0].fill_(99)
            read()
            assert moved.buffers[0].unique().tolist() == [0]
        rates = disk.measure(moved, num_rounds=2)
    assert {name: len(of_rounds) for name, of_rounds in rates.items()} == dict.fromkeys(rates, 2)
    assert [row[0] for row in disk.build_table(rates, "").rows] == ["write", "read", "both"]


def test_what_keeping_buys_is_a_ratio_within_each_round_beside_what_was_planned() -> None:
    none = keeping.Measured(KeptUnits((), 0, 0.0, 0.5), [2.0, 4.0], [1.0, 1.0])
    units = (KeptUnit("blocks.7", 1 << 20, 0.3),)
    half = keeping.Measured(KeptUnits(units, 2 << 20, 0.3, 0.5), [1.0, 3.0], [0.5, 0.9])
    table = keeping.table_of({"none": none, "1/2": half}, title="2 ranks")
    cells = dict(zip(table.columns, table.rows[1], strict=True))
    assert (cells["units"], cells["MiB"], cells["planned"]) == ("1", "1.0", "0.90")
    assert cells["over none"] == "0.62 (0.50-0.75)"
    assert cells["quickest"] == "0.50"
    assert cells["CPU over none"] == "0.70 (0.50-0.90)"


def test_settings_of_a_card_are_planned_before_there_is_one() -> None:
    assert len({setting.name for setting in gpu_planned.SETTINGS}) == 12
    whole, recomputed = (
        gpu_planned.plan_of(gpu.tiny(gpu_planned.SETTINGS[number]), "H200-141GB-SXM")
        for number in (0, 1)
    )
    assert 0 < recomputed.memory.tensors_nbytes < whole.memory.tensors_nbytes
    assert recomputed.time.step_s > whole.time.step_s


def test_steps_that_waited_least_for_a_processor_count() -> None:
    timed = planned_bench.Timed
    quiet = [timed(1.0, 0.0, 1.0)] * 6
    loud = [timed(3.0, 2.0, 1.0)] * 10
    assert planned_bench._typical([loud + quiet, loud + quiet]) == timed(1.0, 0.0, 1.0)
    assert planned_bench._typical([loud]).wall_s == 3.0
