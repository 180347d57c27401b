"""`bench.gpu` in its form for the CPU: the same code, a tiny model; and what it plans and writes, without any."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu
from bench.goals import GPU_TARGETS
from bench.gpu_page import Measured, Outcome, as_markdown, goals_table, ratio, table_of
from bench.gpu_settings import (
    PARTS,
    SETTINGS,
    Entry,
    Setting,
    estimate_seconds,
    footprint,
    take_turns,
)
from bench.gpu_training import Turn
from bench.ranks import RankError
from tests.fresh import in_warm_forks

BY_NAME = {setting.name: setting for setting in SETTINGS}
_H100 = 85.5e9


def _run(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    assert gpu.main(["--device", "cpu", "--tiny", "--out", str(folder), *options]) == 0
    (results,), (page,) = folder.glob("gpu-*.json"), folder.glob("gpu-*.md")
    return json.loads(results.read_text()), page.read_text()


# With processes that train


def test_it_measures_writes_traces_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--implementations", "fullshard", "--settings", "small-captured")
    results, page = _run(tmp_path, *options)
    measured = results["settings"]["small-captured"]["batches"][0]["fullshard"]
    assert len(measured["step_ms"]) == 2
    assert min(measured["step_ms"]) > 0.0
    assert measured["counts"] == {"kernels": 0, "copies": 0, "launches": 0, "waits": 0}
    assert "| fullshard |" in page
    assert f"torch {torch.__version__}" in page
    trace = tmp_path / "trace-small-captured-fullshard.json.gz"
    assert "traceEvents" in json.loads(gzip.decompress(trace.read_bytes()))
    (written,) = tmp_path.glob("gpu-*.json")
    # No second is left for another setting, and what is complete is not measured again.
    capsys.readouterr()
    again, _ = _run(tmp_path, *options, "1b", "--budget-s", "1", "--resume", str(written))
    assert again == results
    assert "not started: 1b" in capsys.readouterr().out


_EVERY_WAY = """
import dataclasses, torch, torch.distributed as dist
import fullshard
from bench.gpu_settings import SETTINGS, Entry, tiny
from bench.gpu_training import GpuTraining
from bench.ranks import Rank

by_name = {setting.name: tiny(setting) for setting in SETTINGS}
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def losses(name, entry, **changes):
    setting = dataclasses.replace(by_name[name], **changes)
    training = GpuTraining(Rank(0, 1, store.port), entry, setting, "cpu")
    found = training.capture(2) if setting.captured else training.run(2).losses
    found += training.run(2).losses
    if dist.is_initialized():
        dist.destroy_process_group()
    return found

ours, alone = Entry("fullshard"), Entry("unwrapped")
for name in ("small-captured", "3b"):
    assert losses(name, ours) == losses(name, alone) == losses(name, Entry("fsdp2")), name
whole = losses("offload", ours)
assert max(abs(a - b) for a, b in zip(whole, losses("offload", Entry("fullshard", "all")))) < 1e-3
assert max(abs(a - b) for a, b in zip(whole, losses("350m-mixed", alone))) < 1e-2
assert losses("offload", Entry("fullshard", "optimizer")) == whole
print("alike")
"""


def test_every_way_to_train_has_the_same_losses() -> None:
    (done,) = in_warm_forks(_EVERY_WAY)
    assert done.code == 0, done.err
    assert done.out.endswith("alike\n")


@pytest.mark.long
@pytest.mark.parametrize("name", ["1b", "3b-compiled", "1b-fp8"])
def test_all_implementations_train_alike(tmp_path: Path, name: str) -> None:
    if name == "1b-fp8" and importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    results, _ = _run(tmp_path, "--settings", name, "--compiler", "aot_eager")
    (measured,) = results["settings"][name]["batches"]
    assert list(measured) == [entry.name for entry in BY_NAME[name].entries]
    first, *others = [found["losses"] for found in measured.values()]
    for losses in others:
        assert losses == pytest.approx(first, abs=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == gpu.NO_GPU
    assert "no GPU" in capsys.readouterr().err


# Without


class _Group:
    """In the place of a process: FSDP2 cannot be built, the unwrapped model takes 10 ms, others 11."""

    def __init__(self, name: str, build: object, *, num_ranks: int) -> None:
        self.name = name

    def __enter__(self) -> _Group:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def wait_imported(self) -> None:
        pass

    def call(self, method: str, *arguments: Any, timeout_seconds: float) -> Any:
        assert 0.0 < timeout_seconds <= 240.0
        if self.name == "fsdp2":
            raise RankError("fsdp2: rank 0 raised\nRuntimeError: no")
        if method == "trace":
            raise RankError("no profiler")
        turn = Turn(10.0 if self.name == "unwrapped" else 11.0, 1.0, 100.0, [1.0])
        return type("Answer", (), {"values": [turn]})


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Outcome, int]]:
    monkeypatch.setattr(gpu, "RankGroup", _Group)

    def run(setting: Setting, nbytes: int | None, budget_s: float) -> tuple[Outcome, int]:
        outcome, saved = Outcome(), []
        gpu.measure(
            setting,
            outcome,
            take_turns(setting, nbytes).batches,
            device_type="cpu",
            clock=gpu.Clock(gpu.time.perf_counter(), budget_s),
            folder=tmp_path,
            save=lambda: saved.append(len(outcome.batches)),
        )
        return outcome, len(saved)

    return run


def test_what_fails_has_a_row_and_the_others_go_on(
    measure: Callable[..., tuple[Outcome, int]],
) -> None:
    setting = BY_NAME["1b"]
    outcome, num_saved = measure(setting, None, 1e6)
    assert outcome.is_complete
    assert num_saved == setting.num_rounds + 1, "after each round"
    assert list(outcome.merged) == ["unwrapped", "fullshard", "fullshard-fsdp1"]
    table = table_of(setting, outcome, 989.4e12)
    assert [row[:2] for row in table.rows[:2]] == [["unwrapped", "10.0"], ["fsdp2", "failed"]]
    assert "fsdp2 failed: RuntimeError: no" in table.notes
    assert {len(row) for row in table.rows} == {len(table.columns)}
    found = ratio(setting, outcome, "fullshard", "unwrapped")
    assert found is not None
    assert found.value.median == pytest.approx(1.1)


def test_a_budget_that_is_over_ends_after_a_round(
    measure: Callable[..., tuple[Outcome, int]],
) -> None:
    outcome, _ = measure(BY_NAME["3b"], None, 0.0)
    assert not outcome.is_complete
    assert [len(each.step_ms) for each in outcome.merged.values()] == [1, 1]


def test_on_a_small_card_fewer_are_alive_at_a_time() -> None:
    setting = BY_NAME["3b"]
    sizes = [footprint(setting, entry) for entry in setting.entries]
    assert 18e9 < sizes[0].resting < 20e9, "parameters and moments of 3B in bfloat16"
    together = [
        [entry.name for entry in batch] for batch in take_turns(setting, round(_H100)).batches
    ]
    assert together == [["unwrapped", "fsdp2", "fullshard"]]
    pairs = take_turns(setting, round(70e9)).batches
    assert [[e.name for e in batch] for batch in pairs] == [
        ["unwrapped", "fsdp2"],
        ["fsdp2", "fullshard"],
    ]
    alone = take_turns(setting, round(45e9)).batches
    assert [[e.name for e in batch] for batch in alone] == [["unwrapped"], ["fsdp2"], ["fullshard"]]
    none = take_turns(setting, round(20e9))
    assert none.batches == []
    assert set(none.left_out) == {"unwrapped", "fsdp2", "fullshard"}
    for each in SETTINGS:
        assert not take_turns(each, round(0.92 * _H100)).left_out, each.name


def test_entries_that_were_not_alive_together_are_compared_by_way_of_another() -> None:
    setting = BY_NAME["3b"]
    batches = [
        {"unwrapped": Measured([1.0], [1.0], [1.0]), "fsdp2": Measured([2.0], [1.0], [1.0])},
        {"fsdp2": Measured([4.0], [1.0], [1.0]), "fullshard": Measured([3.0], [1.0], [1.0])},
    ]
    found = ratio(setting, Outcome(batches), "fullshard", "unwrapped")
    assert found is not None
    assert (found.value.median, found.is_in_turn) == (1.5, True)
    apart = [{name: each} for batch in batches for name, each in batch.items()]
    found = ratio(setting, Outcome(apart), "fullshard", "unwrapped")
    assert found is not None
    assert (found.value.median, found.is_in_turn) == (3.0, False)
    (note,) = [note for note in table_of(setting, Outcome(apart), None).notes if "~" in note]
    assert "unwrapped; fsdp2" in note


def test_every_setting_is_in_a_part_that_scripts_of_six_minutes_can_divide() -> None:
    assert sorted(name for part in PARTS.values() for name in part) == sorted(BY_NAME)
    for setting in SETTINGS:
        assert estimate_seconds(setting, [setting.entries]) < 330.0, setting.name


def test_goals_are_of_entries_that_there_are() -> None:
    for target in GPU_TARGETS:
        names = {entry.name for entry in BY_NAME[target.setting].entries}
        assert {*target.goal.faces, *filter(None, [target.base])} <= names, target


def test_a_page_says_what_was_met() -> None:
    times = {"unwrapped": 10.0, "fullshard": 10.0 + 48 * 0.4}
    mixed = BY_NAME["3b-compiled"]
    # 50 % of the peak, as it takes so long for so many operations.
    half = 1e3 * mixed.flops_per_step / 989.4e12 / 0.5
    outcomes = {
        "small": Outcome([{name: Measured([ms], [ms], [1.0]) for name, ms in times.items()}]),
        "3b-compiled": Outcome([{"fullshard": Measured([1.001 * half], [1.0], [1.0])}]),
    }
    rows = {row[0]: row for row in goals_table(SETTINGS, outcomes, 989.4e12).rows}
    assert rows["small: ms a layer beyond unwrapped"][2:] == ["0.40 (0.40-0.40)", "<= 0.50", "met"]
    assert rows["3b-compiled: MFU"][4] == "not met"
    assert rows["1b: step over fsdp2"][4] == "not measured"
    page = as_markdown({"device": "x"}, SETTINGS, outcomes, 989.4e12)
    assert f"{mixed.flops_per_step:.3e} FLOP a step" in page
    weights = 6 * (mixed.num_parameters - mixed.config.vocab_size * mixed.config.hidden_size)
    attention = 12 * 28 * 3072 * 4096
    assert mixed.flops_per_step == 16384 * (weights + attention)


def test_rows_of_another_device_are_not_put_on_one_page(tmp_path: Path) -> None:
    facts = {"device": "one", "torch": "2"}
    path = tmp_path / "found.json"
    outcome = dataclasses.asdict(Outcome([{"fsdp2": Measured([1.0])}], is_complete=True))
    path.write_text(json.dumps({"machine": facts, "settings": {"1b": outcome}}))
    assert gpu.resumed([path], facts)["1b"].merged == {"fsdp2": Measured([1.0])}
    with pytest.raises(ValueError, match="device one"):
        gpu.resumed([path], {**facts, "device": "another"})
    path.write_text(json.dumps({"machine": facts, "settings": {"1b": {"measured": {}}}}))
    with pytest.raises(ValueError, match="not what this version"):
        gpu.resumed([path], facts)


def test_what_is_not_installed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    reason = gpu.why_not(BY_NAME["1b-fp8"])
    assert reason is not None
    setting = BY_NAME["1b-fp8"]
    outcome = Outcome(left_out={Entry("fullshard").name: reason})
    assert ["fullshard", "not measured"] in [
        row[:2] for row in table_of(setting, outcome, None).rows
    ]
    assert gpu.why_not(BY_NAME["1b"]) is None
