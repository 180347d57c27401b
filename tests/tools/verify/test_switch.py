"""`fullshard compare`: both engines in turn on real ranks, and what is said of what they recorded."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fullshard.tools.cli import app
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.report import markdown, write_report
from fullshard.tools.verify import switch
from fullshard.tools.verify.comparing import Comparison, Difference, Loss
from fullshard.tools.verify.engines import CompareOptions
from fullshard.tools.verify.options import Tolerance
from fullshard.tools.verify.record import Failure, Output, Part, Run
from fullshard.tools.verify.switch import Costs, Switch, Values
from tests.fresh import FORKED_RANKS, Ended, fullshard_in_fork
from tests.tools.test_report import make_traced_run

HERE = Path(__file__).parent
SCRIPT = "scripts/by_torch_names.py"
FSDP1 = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
def wrapped():
    layers = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 7))
    return FullyShardedDataParallel(layers, use_orig_params={orig}, device_id=torch.device("cpu"))
generator, model = wrapped(), wrapped()
optimizer, of_generator = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, generator))
around = nn.Sequential(model)  # as torch.compile puts a module around it
torch.manual_seed(dist.get_rank())
for _ in range(6):
    made = generator(torch.randn(4, 7))  # its backward comes after the other's step
    with model.no_sync():
        around(torch.randn(4, 7)).square().mean().backward()
    around(torch.randn(4, 7)).square().mean().backward()
    model.clip_grad_norm_(0.5)
    optimizer.step()
    around(made).square().mean().backward()
    of_generator.step()
    optimizer.zero_grad()
    of_generator.zero_grad()
"""


def _compare(*words: object, folder: Path = HERE) -> Ended:
    """Run the command on ranks that are forks."""
    return fullshard_in_fork("compare", *words, folder=folder, before=FORKED_RANKS)


def test_a_script_with_arguments_is_the_same_on_both_engines(tmp_path: Path) -> None:
    out = tmp_path / "compare.json"
    words = ("--steps", 2, "--rounds", 1, "--out", out)
    ended = _compare(*words, SCRIPT, "--width", 16, "--out", "runs/{side}")
    assert ended.code == Exit.OK, ended.err
    said = " ".join(ended.out.split())
    assert "same losses and gradients in every bit over 2 steps; " in said
    assert re.search(r"\d\.\d\d of the step time, \d\.\d\d of the memory", said)
    found = json.loads(out.read_text())
    assert found["values"]["steps"] == 2
    assert found["values"]["num_gradients"] == 4
    assert len(set(map(tuple, found["values"]["losses"].values()))) == 1
    assert found["program"] == f"{SCRIPT} --width 16 --out runs/{{side}}"
    costs = found["costs"]
    assert len(costs["ratios"]) == 1
    assert {engine: len(each) for engine, each in costs["nbytes"].items()} == {
        "torch": 2,
        "fullshard": 2,
    }
    for side in ("torch", "fullshard"):
        assert f"a step, for runs/{side} by {SCRIPT}" in ended.err
        assert f"runs/{side}-1" not in ended.err, "what a timed run prints would hide the result"


@pytest.mark.parametrize("orig", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_script_for_fsdp1_is_compared_shard_by_shard(tmp_path: Path, orig: bool) -> None:
    (tmp_path / "mine.py").write_text(FSDP1.format(orig=orig))
    words = ("--steps", 2, "--rounds", 1, "--json")
    ended = _compare(*words, "-m", "mine", folder=tmp_path)
    assert ended.code == Exit.OK, ended.err
    found = json.loads(ended.out)
    assert found["values"]["uncompared"] == []
    assert found["values"]["steps"] == 2
    assert found["values"]["same_gradients"]
    assert found["values"]["num_gradients"] == 8, "of both models"
    assert len(found["values"]["losses"]["torch"]) == 3  # micro-batches, and the generator's


FAILING = """
import torch, torch.distributed as dist, sys
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = fully_shard(nn.Linear(8, 8))
model(torch.ones(2, 8)).sum().backward()
if "ours" not in sys.argv or "fullshard" in fully_shard.__module__:
    {failing}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.step()
"""


@pytest.mark.parametrize(
    ("failing", "argument", "said"),
    [
        ("raise ValueError('no data')", "", "the script itself fails, on both engines alike: ValueError: no data"),
        pytest.param("raise ValueError('no data')", "ours", "failed on fullshard, and ran on PyTorch's engine: ValueError", marks=pytest.mark.long),
        pytest.param("sys.exit()", "", "nothing to compare: the script has ended without a step", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_run_that_fails_is_told_of(
    tmp_path: Path, failing: str, argument: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(FAILING.format(failing=failing))
    ended = _compare("--steps", 1, "mine.py", argument, folder=tmp_path)
    assert ended.code == Exit.FAILED
    assert said in " ".join(ended.out.split())


SAME = Values(10, 4, losses={"torch": [1.0] * 10, "fullshard": [1.0] * 10})
COSTS = Costs(
    {"torch": [1.0, 1.0, 2.0], "fullshard": [0.5, 0.55, 0.98]},
    {"torch": [100, 90], "fullshard": [40, 58]},
)
OPTIONS = CompareOptions(__file__)


def _switch(*, costs: Costs | None = COSTS, **values: Any) -> Switch:
    return Switch(OPTIONS, dataclasses.replace(SAME, **values), costs)


def test_what_failed_on_one_engine_alone_is_said_to() -> None:
    died = Run(failure=Failure("forward", 2, "ValueError", "no data\nmore", line="train.py:4"))
    well = Comparison(OPTIONS, Tolerance(0, 0), Run(), {0: Run(), 1: Run()})
    assert switch._failed(well) == ""
    ours = dataclasses.replace(well, ranks={0: Run(), 1: died})
    assert switch._failed(ours) == (
        "failed on fullshard, and ran on PyTorch's engine: ValueError: no data (train.py:4)"
    )
    theirs = dataclasses.replace(well, alone=died)
    assert switch._failed(theirs).startswith("failed on PyTorch's engine, and ran on fullshard")
    assert "a rank died" in switch._failed(dataclasses.replace(well, ranks={0: Run()}))


def test_the_verdict_is_one_sentence() -> None:
    assert _switch().verdict == (
        "same losses and gradients in every bit over 10 steps; 0.50 of the step time (0.49 to 0.55), 0.58 of the memory"
    )
    noisy = dataclasses.replace(COSTS, seconds={"torch": [1.0, 1.0], "fullshard": [0.5, 1.1]})
    assert "(0.50 to 1.10): too noisy" in _switch(costs=noisy).verdict
    other = _switch(same_losses=False, loss=1e-7, gradient=1e-6)
    assert "losses differ by up to 1.0e-07 over 10 steps, as rounding does" in other.verdict
    assert other.code is Exit.OK
    other = _switch(same_losses=False, loss=0.1, is_rounding=False)
    assert "more than rounding" in other.verdict
    assert other.code is Exit.DIFFERENT
    assert "no gradients" in _switch(num_gradients=0).verdict
    assert Switch(OPTIONS, failed="failed on both").code is Exit.FAILED
    assert _switch(costs=None).code is Exit.OK, "too few steps to be timed"
    assert dataclasses.replace(_switch(costs=None), failed="ValueError").code is Exit.FAILED


def test_the_table_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    first = "gradient of layers.0.self_attn.in_proj_weight: step 4, rank 1"
    different = _switch(same_losses=False, first=first, loss=1e-7, gradient=1e-6)
    switch.show(different, layout="table")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(
        re.search(r"time of a step +1\.0 s +550\.0 ms +0\.50 \(0\.49 to 0\.55\)", x) for x in lines
    )
    switch.show(_switch(), layout="md")
    assert "| time of a step | 1.0 s | 550.0 ms | 0.50 (0.49 to 0.55) |" in capsys.readouterr().out


def test_the_report_of_a_run_shows_what_is_beside_it(tmp_path: Path) -> None:
    make_traced_run(tmp_path)
    file = tmp_path / "compare.json"
    file.write_text(json.dumps(switch.as_dict(_switch())))
    page = write_report(tmp_path).page.read_text()
    text = markdown([tmp_path])
    for said in (_switch().verdict, "0.50 (0.49 to 0.55)"):
        assert said in page
        assert said in text
    file.write_text(json.dumps({"verdict": "", "notes": [], "rows": [["one"]]}))
    with pytest.raises(OptionError, match=r"compare\.json.* another length"):
        write_report(tmp_path)


def _recorded(bits: list[dict[str, str]], *losses: float) -> Run:
    output = Output("", 0, "Linear", "torch.float32", (2,))
    parts = [Part(step, 0, loss, outputs=(output,)) for step, loss in enumerate(losses, start=1)]
    return Run(parts=parts, bits=bits, seconds=[1.0] * len(bits))


def test_values_differ_first_where_any_bit_does() -> None:
    torch_bits = [{"0/a": "1", "0/b": "2"}, {"0/a": "3", "0/b": "4"}, {"0/a": "5"}]
    ours = [{"0/a": "1", "0/b": "2"}, {"0/a": "3", "0/b": "0"}]
    comparison = Comparison(
        OPTIONS,
        Tolerance(0, 0),
        _recorded(torch_bits, 1.0, 2.0, 3.0),
        {0: _recorded(ours, 1.0, 2.0)},
        losses=[Loss(1, 0, 1.0, 1.0, False), Loss(2, 0, 2.0, 2.0, False)],
        differing=[Difference("final-gradient", 2, None, "0/b", 1e-6, 1.0, 0.0)],
    )
    values = switch._values(OPTIONS, comparison)
    assert values.steps == 2
    assert values.first == "gradient of b: step 2, rank 0, by up to 1.0e-06"
    assert values.gradient == 1e-6
    assert values.same_losses
    assert not values.same_gradients
    assert values.is_rounding
    (note,) = switch._notes(OPTIONS, values, COSTS, [0.0])
    assert "ended after 2 steps" in note
    ours[0]["0/c"] = "9"
    assert switch._values(OPTIONS, comparison).uncompared == ["0/c"]


def test_notes_say_what_weakens_a_result() -> None:
    silent = dataclasses.replace(SAME, losses={"torch": [], "fullshard": []})
    unknown = dataclasses.replace(COSTS, nbytes={"torch": [], "fullshard": []})
    said = list(switch._notes(OPTIONS, silent, unknown, [0.1, 0.9, 0.8]))
    for note, fact in zip(
        said, ("no loss was seen", "memory is not known", "took 80%"), strict=True
    ):
        assert fact in note


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "name a script"),
        ("-m no.such.module", "there is no such module"),
        ("absent.py --lr 1", "absent.py: there is no such file"),
        ("a b", "fullshard report a b"),
        ("--ranks 1 absent.py", "--ranks"),
        ("--out no/found.json -m json.tool", "no folder no"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", *words.split()])
    assert result.exit_code == Exit.USAGE
    assert said in result.stderr
