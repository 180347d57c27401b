"""From recorded facts to findings, with facts made up: each cause is named, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from fullshard.json_files import json_text, parse_json
from fullshard.tools.doctor.checks import verdict_of
from fullshard.tools.doctor.findings import Severity
from fullshard.tools.exits import Exit
from fullshard.tools.launch import Ending
from fullshard.tools.verify.comparing import (
    Comparison,
    Difference,
    FirstModule,
    Loss,
    differences_of,
    first_module,
    note_unsteady,
)
from fullshard.tools.verify.judging import judge
from fullshard.tools.verify.options import Tolerance, VerifyOptions
from fullshard.tools.verify.printing import as_dict, show
from fullshard.tools.verify.rank import failure_of
from fullshard.tools.verify.record import Failure, Output, Part, Run, Unit, merged

OPTIONS = VerifyOptions("train:build")
SCRIPT = VerifyOptions(__file__)
FIRST = {"a.weight": "1", "a.bias": "2", "b.weight": "3"}
UNITS = [Unit("a", ("a.weight", "a.bias"), 2.0), Unit("", ("b.weight",), 2.0)]
OUTPUTS = tuple(
    Output(path, call, "Linear", "torch.float32", (2, 4))
    for path, call in (("a", 0), ("b", 0), ("b", 1), ("", 0))
)
TOLERANCE = Tolerance(1e-4, 1e-5)


def _run(*ranks: int, **changes: Any) -> Run:
    parts = [Part(0, rank, 1.0, f"batch {rank}", OUTPUTS) for rank in ranks]
    run = Run(own=FIRST, initial=FIRST, buffers={"mean": "4"}, parts=parts, units=UNITS)
    return dataclasses.replace(run, **changes)


def _comparison(**changes: Any) -> Comparison:
    ranks = {0: _run(0), 1: _run(1, initial={})}
    whole = Comparison(OPTIONS, TOLERANCE, _run(0, 1, units=[]), ranks)
    return dataclasses.replace(whole, **changes)


def _with(rank: int, **changes: Any) -> Comparison:
    """Return what would be equal, but for what one rank has recorded."""
    ranks = dict(_comparison().ranks)
    return _comparison(ranks={**ranks, rank: dataclasses.replace(ranks[rank], **changes)})


def _alone(**changes: Any) -> Comparison:
    return _comparison(alone=dataclasses.replace(_comparison().alone, **changes))


def _gradient(name: str, ratio: float, residual: float = 0.0, step: int = 0) -> Difference:
    return Difference("gradient", step, None, name, 1.0, 1.0, 1e-4, ratio, residual)


def _scaled(**ratios: float) -> Comparison:
    names = {"aw": "a.weight", "ab": "a.bias", "bw": "b.weight"}
    return _comparison(differing=[_gradient(names[key], ratio) for key, ratio in ratios.items()])


def _failure(kind: str = "RuntimeError", text: str = "went wrong", *calls: str) -> Failure:
    return Failure("forward", 1, kind, text, calls)


def _first(**changes: Any) -> FirstModule:
    return FirstModule(0, 1, dataclasses.replace(OUTPUTS[0], kind="Dropout", **changes), 0.5)


_NOTHING = _failure("NothingToCompareError", "the script has sharded nothing")
_PART = Part(0, 1, 1.0, "another", OUTPUTS)
_WRITING = Part(0, 0, 1.0, "batch 0", OUTPUTS, ("a.weight",))

# What was recorded; the one finding that it has to give besides those that are ok; and what that says.
CASES: dict[str, tuple[Comparison, str, str, tuple[str, ...]]] = {
    "a rank is missing": (
        _comparison(ranks={0: _run(0)}, ending=Ending(Exit.RANK_LOST, "rank 1 was killed", 1)),
        "rank-died",
        "rank 1",
        ("rank 1 was killed",),
    ),
    "another was ended with it": (
        _comparison(ranks={}, ending=Ending(Exit.FAILED, rank=1)),
        "rank-died",
        "rank 1",
        ("without an exception",),
    ),
    "the one process fails": (
        _comparison(ranks={}, alone=Run(failure=_failure("ValueError", "no such dataset"))),
        "failed-alone",
        "one process",
        ("forward of step 1: ValueError: no such dataset",),
    ),
    "a rank fails": (_with(1, failure=_failure()), "failed", "rank 1", ("went wrong",)),
    "it is late": (_with(1, failure=_failure("TimeoutError")), "timeout", "rank 1", ()),
    "a method is not registered": (
        _with(0, failure=_failure("RuntimeError", "1-D", "encoder.encode", "encoder.up.forward")),
        "forward-method",
        "rank 0",
        ("in encoder.encode", 'register_fsdp_forward_method(model.encoder, "encode")'),
    ),
    "a weight is used from outside": (
        _with(0, failure=_failure("RuntimeError", "torch.Tensor and DTensor", "forward")),
        "failed",
        "rank 0",
        ("fullshard.gathered(weight)",),
    ),
    "a batch differs": (_with(1, parts=[_PART]), "batches", "rank 1", ("first in step 0",)),
    "first values differ": (
        _with(0, initial={**FIRST, "a.bias": "9"}, own={**FIRST, "a.bias": "9"}),
        "initial-parameters",
        "rank 0",
        ("a.bias: other values", "seeded"),
    ),
    "sharding changes first values": (
        _with(0, initial={**FIRST, "a.bias": "9"}),
        "initial-parameters",
        "sharding",
        ("a.bias: other values", "while the model was sharded"),
    ),
    "a parameter is gone": (
        _with(0, initial={"a.weight": "1", "a.bias": "2"}),
        "lacking",
        "all ranks",
        ("b.weight",),
    ),
    "a buffer differs": (_with(1, buffers={"mean": "9"}), "initial-buffers", "rank 1", ("mean",)),
    "a tie is lost": (
        _alone(ties=[("a.weight", "b.weight")]),
        "untied",
        "all ranks",
        ("a.weight and b.weight are one parameter",),
    ),
    "a forward writes": (
        _alone(parts=[_WRITING, _comparison().alone.parts[1]]),
        "forward-writes",
        "a",
        ("writes to a.weight", "after optimizer.step()"),
    ),
    "a module is random": (
        _comparison(first=_first(is_random=True)),
        "random",
        "a",
        ("Dropout, which draws random numbers", "--eval"),
    ),
    "a loss is not finite": (
        _comparison(losses=[Loss(0, 0, math.nan, math.nan, differs=False)]),
        "not-finite",
        "one process",
        ("step 0 is nan",),
    ),
    "ranks are warned": (
        _comparison(ranks={r: _run(r, warnings=[f"rank {r}: lost"]) for r in (0, 1)}),
        "warned",
        "ranks 0-1",
        ("rank 0: lost",),
    ),
    "a module is not seen": (
        _comparison(first=FirstModule(0, 1, OUTPUTS[0], missing="sharded")),
        "modules",
        "a",
        ("in the one process alone, in step 0", "replaces or compiles"),
    ),
    "all ranks have one batch": (
        _comparison(options=SCRIPT, ranks={r: _run(0, seeds=True) for r in (0, 1)}),
        "same-batches",
        "ranks 0-1",
        ("the same batches, in 1 step", "DistributedSampler"),
    ),
    "a script seeds nothing": (_comparison(options=SCRIPT), "seeds", "all ranks", ("one seed",)),
    "it has nothing to compare": (
        _comparison(
            options=SCRIPT,
            ranks={r: _run(r, seeds=True, failure=_NOTHING) for r in (0, 1)},
            alone=Run(),
        ),
        "failed",
        "ranks 0-1",
        ("sharded nothing", "fullshard verify SCRIPT -- ARGUMENTS"),
    ),
    "nothing is sharded": (_with(0, units=[]), "not-sharded", "all ranks", ()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_named(case: str) -> None:
    comparison, name, where, said = CASES[case]
    (finding,) = [each for each in judge(comparison) if each.severity is not Severity.OK]
    assert (finding.id, finding.where) == (name, where)
    for words in said:
        assert words in f"{finding.measured} {finding.advice}"


def test_what_is_equal_has_no_cause() -> None:
    losses = [Loss(0, 0, 1.0, 1.0, differs=False)]
    worst = [Difference("gradient", 0, None, "a.weight", 1e-6, 1.0, 1e-4)]
    findings = judge(_comparison(losses=losses, worst=worst))
    assert [(each.id, each.severity, each.measured) for each in findings] == [
        ("losses", Severity.OK, "equal"),
        ("gradients", Severity.OK, "equal within 1e-06"),
    ]
    assert verdict_of(findings) is Severity.OK


@pytest.mark.parametrize(
    ("ratios", "where", "said"),
    [
        ({"aw": 2.0, "ab": 2.0}, "unit a", "gradients of 2 parameters are 2 times"),
        ({"aw": 0.5, "ab": 0.5, "bw": 0.5}, "unit a, (root)", "divided by the number of ranks twi"),
        ({"aw": 3.0}, "a.weight", "gradients of 1 parameter are 3 times"),
    ],
)
def test_a_wrong_divide_factor_is_named(ratios: dict[str, float], where: str, said: str) -> None:
    found = {each.id: each for each in judge(_scaled(**ratios))}
    assert found.keys() == {"divide-factor", "gradients"}
    assert found["divide-factor"].where == where
    assert said in f"{found['divide-factor'].measured} {found['divide-factor'].advice}"


def test_units_with_other_factors_are_told_apart() -> None:
    found = [each for each in judge(_scaled(aw=2.0, ab=2.0, bw=4.0)) if each.id == "divide-factor"]
    assert [each.where for each in found] == ["unit a", "unit (root)"]


def test_gradients_that_are_merely_other_ones_have_no_factor() -> None:
    other = [_gradient("a.weight", 2.0, residual=0.5), _gradient("a.bias", -1.0)]
    assert [each.id for each in judge(_comparison(differing=other))] == ["gradients"]


def test_only_the_first_step_says_what_the_factor_is() -> None:
    later = [_gradient("a.weight", 1.001, residual=0.3), _gradient("a.weight", 2.0, step=1)]
    assert [each.id for each in judge(_comparison(differing=later))] == ["gradients"]


def test_a_factor_is_no_cause_where_the_forward_differs() -> None:
    output = Difference("output", 0, 1, "a#0", 0.5, 2.0, 1e-4)
    found = judge(_comparison(differing=[output, _gradient("a.weight", 2.0)]))
    assert [each.id for each in found if each.severity is Severity.PROBLEM] == [
        "outputs",
        "gradients",
    ]


def test_final_gradients_that_alone_differ_are_of_clipping() -> None:
    clipped = Difference("final-gradient", 0, None, "a.weight", 0.5, 2.0, 1e-4)
    (finding,) = judge(_comparison(differing=[clipped]))
    assert "each rank's own" in finding.advice
    _, finding = judge(_comparison(differing=[_gradient("a.weight", 1.5, 0.9), clipped]))
    assert not finding.advice


def test_a_forward_that_writes_without_effect_is_a_warning() -> None:
    comparison = CASES["a forward writes"][0]
    (finding,) = judge(comparison)
    assert finding.severity is Severity.WARNING
    worse = dataclasses.replace(comparison, differing=[_gradient("a.weight", 1.5, 0.9)])
    assert judge(worse)[0].severity is Severity.PROBLEM


def test_a_method_that_its_own_forward_calls_is_not_to_be_registered() -> None:
    inside = _failure("RuntimeError", "went wrong", "forward", "blocks.0.forward", "blocks.0.mix")
    assert [each.id for each in judge(_with(0, failure=inside))] == ["failed"]


@pytest.mark.parametrize(
    "follower",
    [
        _failure("PeerLostError", "rank 1 is gone"),
        _failure("RuntimeError", "[gloo/transport/tcp/pair.cc] Connection reset by peer"),
    ],
)
def test_ranks_that_only_follow_are_told_from_the_cause(follower: Failure) -> None:
    ranks = {0: _run(0, failure=follower), 1: _run(1, failure=_failure("ValueError", "no layer"))}
    found = judge(_comparison(ranks=ranks))
    assert [(each.id, each.where) for each in found] == [
        ("failed", "rank 1"),
        ("followed", "rank 0"),
    ]
    died = judge(_comparison(ranks={0: ranks[0]}))
    assert [each.id for each in died] == ["rank-died", "followed"]
    ended = judge(_comparison(ranks={**ranks, 1: _run(1)}))
    assert [(each.id, each.where) for each in ended] == [
        ("failed", "rank 1"),
        ("followed", "rank 0"),
    ]


def test_what_fails_in_both_runs_is_not_of_sharding() -> None:
    lost = _failure("PeerLostError", "rank 1 is gone", "inner")
    own = dataclasses.replace(_failure("ValueError", "bad sample"), line="train.py:40")
    ranks = {0: _run(0, failure=lost), 1: _run(1, failure=own)}
    found = judge(_comparison(ranks=ranks, alone=_run(failure=own)))
    assert [(each.id, each.where) for each in found] == [
        ("failed", "rank 1"),
        ("followed", "rank 0"),
    ]
    assert found[0].measured.startswith("in both runs")
    assert found[0].measured.endswith("ValueError: bad sample (train.py:40)")


@pytest.mark.parametrize(("ended", "reached"), [(None, False), (1, False), (2, True)])
def test_a_step_that_the_whole_model_never_reached_is_not_said_to_have_run(
    ended: int | None, *, reached: bool
) -> None:
    other = dataclasses.replace(_failure("AttributeError", "no placements"), step=ended)
    ranks = {rank: _run(rank, failure=_failure()) for rank in (0, 1)}
    found = judge(_comparison(ranks=ranks, alone=_run(failure=other)))
    (advice,) = (each.advice for each in found if each.id == "failed")
    assert ("ran the same step without an error" in advice) is reached


def test_ranks_that_fail_alike_are_one_finding() -> None:
    ranks = {rank: _run(rank, failure=_failure()) for rank in (0, 1)}
    (finding,) = judge(_comparison(ranks=ranks))
    assert finding.where == "ranks 0-1"


def test_a_random_module_is_no_cause_where_something_before_it_differs() -> None:
    first = FirstModule(1, 1, _first(is_random=True).output, 0.5)
    earlier = _comparison(first=first, differing=[_gradient("a.weight", 2.0, residual=0.5)])
    assert [each.id for each in judge(earlier)] == ["gradients"]
    other_buffers = dataclasses.replace(CASES["a buffer differs"][0], first=first)
    assert [each.id for each in judge(other_buffers)] == ["initial-buffers"]


def test_what_differs_and_by_how_much_is_said() -> None:
    outputs = [Difference("output", 2, 1, name, 0.5, 2.0, 1e-4) for name in ("a#0", "b#1", "#0")]
    (finding,) = judge(_comparison(differing=outputs))
    assert finding.id == "outputs"
    assert finding.where == "rank 1"
    assert finding.measured == (
        "a, b (call 1), (the model): first in step 2, by up to 2.5e-01 of the largest value"
    )


def test_what_has_no_like_is_said_in_words() -> None:
    (finding,) = judge(_comparison(differing=[Difference("buffer", 0, 1, "mean", 1.0, 0.0, 0.0)]))
    assert "where the one process has zeros" in finding.measured


def test_everything_goes_into_json() -> None:
    comparison = _comparison(losses=[Loss(0, 0, math.nan, math.inf, differs=True)])
    text = json_text(as_dict(comparison, judge(comparison)))
    assert json.loads(text)["losses"][0]["alone"] == "nan"
    assert json.loads(text)["verdict"] == "problem"


# Comparing


def _compared(expected: list[float], given: list[float], key: str = "gradient/a") -> Difference:
    """Compare one tensor, beside one of its kind whose largest value is 1."""
    one = {key: torch.tensor(expected), f"{key}b": torch.ones(1)}
    other = {key: torch.tensor(given), f"{key}b": torch.ones(1)}
    return next(d for d in differences_of(0, one, other, TOLERANCE) if d.name == key[9:])


def test_a_difference_is_allowed_by_the_tensor_s_own_size_and_by_its_kind_s() -> None:
    assert not _compared([10.0, 0.0], [10.0009, 0.0]).exceeds
    assert _compared([10.0, 0.0], [10.002, 0.0]).exceeds
    assert not _compared([1e-9, 0.0], [0.0, 5e-6]).exceeds, "zero but for rounding"
    assert _compared([1e-3, 0.0], [2e-3, 0.0]).exceeds


def test_what_is_not_a_number_on_one_side_alone_differs() -> None:
    assert _compared([1.0, 2.0], [math.nan, 2.0]).exceeds
    assert not _compared([math.nan, 2.0], [math.nan, 2.0]).exceeds
    assert not _compared([math.inf, 2.0], [math.inf, 2.0]).exceeds


def test_a_tensor_of_another_shape_differs() -> None:
    assert _compared([1.0, 2.0], [1.0]).exceeds


def test_a_gradient_s_factor_is_measured() -> None:
    found = _compared([1.0, -2.0], [2.0, -4.0])
    assert (found.ratio, found.residual) == (pytest.approx(2.0), pytest.approx(0.0))
    assert _compared([1.0, 0.0], [0.0, 1.0]).residual == pytest.approx(1.0)
    assert _compared([0.0, 0.0], [0.0, 1.0]).ratio is None


def test_ranks_are_read_from_keys() -> None:
    one = {"buffer/1/a/b": torch.ones(2), "output/0/a.b#1": torch.ones(2)}
    found = list(differences_of(3, one, one, TOLERANCE))
    assert [(d.kind, d.rank, d.name) for d in found] == [
        ("buffer", 1, "a/b"),
        ("output", 0, "a.b#1"),
    ]


def _output(step: int, rank: int, name: str) -> Difference:
    return Difference("output", step, rank, name, 1.0, 1.0, 1e-4)


def test_the_first_module_is_the_first_to_end() -> None:
    whole = _comparison()
    found = first_module(whole.alone, whole.ranks, [_output(0, 1, "b#1"), _output(0, 1, "b#0")])
    assert found is not None
    assert (found.rank, found.output.path, found.output.call) == (1, "b", 0)
    assert first_module(whole.alone, whole.ranks, []) is None


def test_a_module_that_one_side_leaves_out_is_the_first() -> None:
    whole = _comparison()
    fewer = dict(whole.ranks) | {0: _run(0, parts=[Part(0, 0, 1.0, "batch 0", OUTPUTS[1:])])}
    found = first_module(whole.alone, fewer, [])
    assert found is not None
    assert (found.output.path, found.missing) == ("a", "sharded")
    alone = dataclasses.replace(whole.alone, parts=fewer[0].parts)
    found = first_module(alone, whole.ranks, [])
    assert found is not None
    assert (found.output.path, found.missing) == ("a", "alone")


# Facts and options


def test_a_run_goes_through_json() -> None:
    run = _run(0, failure=_failure("ValueError", "x", "a.forward"), ties=[("a", "b")])
    for each in (run, Run()):
        assert parse_json(json.dumps(dataclasses.asdict(each)), Run, OSError) == each


def test_the_least_precise_dtype_decides_the_tolerance() -> None:
    assert OPTIONS.tolerance({"torch.float64"}).rtol < 1e-8
    assert OPTIONS.tolerance({"torch.float32", "torch.float64"}) == TOLERANCE
    assert OPTIONS.tolerance({"torch.float32", "torch.bfloat16"}).rtol > 1e-2
    asked = dataclasses.replace(OPTIONS, rtol=0.0, atol=0.5)
    assert asked.tolerance({"torch.float32"}) == (0.0, 0.5)


def test_elements_whose_gradient_is_rounding_may_be_moved_anywhere() -> None:
    gradient = torch.tensor([1.0, 1e-9])
    expected = {"gradient/a": gradient, "parameter/a": torch.tensor([1.0, 2.0])}
    given = {"gradient/a": torch.tensor([1.0, -1e-9]), "parameter/a": torch.tensor([1.0, 2.5])}
    unsteady: dict[str, torch.Tensor] = {}
    note_unsteady(unsteady, expected, given)
    assert unsteady["a"].tolist() == [False, True]
    assert not [d for d in differences_of(0, expected, given, TOLERANCE, unsteady) if d.exceeds]
    given["parameter/a"][0] = 1.5
    assert [
        d.kind for d in differences_of(0, expected, given, TOLERANCE, unsteady) if d.exceeds
    ] == ["parameter"]
    given = {
        **expected,
        "parameter/a": torch.tensor([1.0, 2.5]),
    }  # gradients are equal in every bit
    unsteady = {}
    note_unsteady(unsteady, expected, given)
    assert [
        d.kind for d in differences_of(1, expected, given, TOLERANCE, unsteady) if d.exceeds
    ] == ["parameter"]


def test_ranks_of_one_side_are_one_run() -> None:
    follows = Failure("forward", 0, "PeerLostError", "rank 1 is gone")
    runs = [_run(0, failure=follows, warnings=["a"]), _run(1, failure=_failure(), warnings=["a"])]
    both = merged(runs)
    assert [part.rank for part in both.parts] == [0, 1]
    assert (both.failure, both.warnings) == (_failure(), ["a"])


@pytest.mark.parametrize(
    ("failure", "has_trace"), [(_NOTHING, False), (_failure(text="went wrong"), True)]
)
def test_the_report_of_a_failure_ends_with_where_it_was(
    failure: Failure, has_trace: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = dataclasses.replace(failure, trace="the trace")
    assert show(_with(1, failure=failure), as_json=False) == Exit.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("failed: rank 1. 2 ranks")
    assert ("the trace" in lines) == has_trace
    assert not any("Allowed" in line for line in lines)


def test_a_trace_folds_frames_of_libraries() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("")
    trace = failure_of(caught.value, "the script", None, {}).trace
    assert 'json.loads("")' in trace
    assert "frames of Python" in trace
