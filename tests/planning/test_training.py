"""Plans of training: their parts add up, their numbers are those computed by hand, and nonsense is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import TrainingPlan, TrainingSetup, TransformerShape, machine_named, plan_training
from fullshard.errors import FullshardError
from fullshard.models.llama import Llama
from fullshard.models.sizes import LlamaConfig
from fullshard.planning.alternatives import alternatives
from fullshard.planning.machines import Machine, MachineError, custom_gpu
from fullshard.planning.setup import OPTIMIZERS, SetupError
from fullshard.planning.subject import Subject, checkpointed
from fullshard.planning.traced import NeedsValuesError, TraceError, token_example, trace_workload
from fullshard.planning.training import PaddingPlan, planned
from fullshard.policies import MixedPrecisionPolicy

H100 = machine_named("H100-80GB-SXM")
BASE = TrainingSetup(H100, ranks=16, batch=1, seq=512)
CONFIG = LlamaConfig(32_000, 1024, 2816, 6, 16, 8, 10_000.0)
SHAPE = TransformerShape(6, 1024, 16, 8, 2816, 32_000, 64)
FLOAT = MixedPrecisionPolicy()


@pytest.fixture(scope="module")
def llama() -> Subject:
    with torch.device("meta"):
        return Subject(Llama(CONFIG))


SETUPS: dict[str, TrainingSetup] = {
    "plain": BASE,
    "HSDP, accumulating": replace(BASE, shard_size=8, accumulation=3),
    "reduced once": replace(BASE, accumulation=2, reduces_each=False),
    "full": replace(BASE, checkpointing="full"),
    "selective": replace(BASE, checkpointing="selective"),
    "kept": replace(BASE, reshard_after_forward=False),
    "in smaller groups": replace(BASE, ranks=64, shard_size=32, reshard_after_forward=16),
    "one rank": replace(BASE, ranks=1),
    "params on the host": replace(BASE, offload="params"),
    "states on the host": replace(BASE, offload="optimizer"),
    "compiled": replace(BASE, is_compiled=True, is_fused=True),
}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("of", ["module", "shape"])
def test_parts_add_up(llama: Subject, name: str, of: str) -> None:
    plan = planned(llama if of == "module" else Subject(SHAPE), SETUPS[name])
    memory, time = plan.memory, plan.time
    assert sum(n for _, n in memory.parts) == memory.total_nbytes
    assert sum(s for _, s in time.parts) == pytest.approx(time.step_s)
    assert all(n > 0 for _, n in memory.parts)
    assert all(s >= 0 for _, s in time.parts)
    beside = dict(memory.parts)["allocator slack"] + dict(memory.parts)["context"]
    assert memory.tensors_nbytes + beside == memory.total_nbytes
    assert time.low_s < time.step_s < time.high_s
    tokens = 512 * SETUPS[name].accumulation * SETUPS[name].ranks
    assert plan.tokens_per_s == pytest.approx(tokens / time.step_s)


@pytest.mark.parametrize("reduces_each", [True, False])
def test_many_micro_batches_are_like_some(llama: Subject, reduces_each: bool) -> None:
    setup = replace(BASE, reduces_each=reduces_each)
    steps = [planned(llama, replace(setup, accumulation=n)).time.step_s for n in (3, 4, 5, 40)]
    more = steps[1] - steps[0]
    assert steps[2:] == pytest.approx([steps[1] + more, steps[1] + 36 * more])


class Square(nn.Module):
    """A layer of one matrix of 256 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Square() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rows(batch: int) -> Tensor:
    return torch.empty(batch, 256, device="meta")


def parts(plan: TrainingPlan) -> dict[str, int]:
    return dict(plan.memory.parts)


def test_numbers_of_a_small_model_are_those_computed_by_hand() -> None:
    setup = TrainingSetup(H100, ranks=4, batch=8, precision=FLOAT)
    plan = plan_training(Squares, setup, inputs=rows)
    matrix = 256 * 256 * 4
    found = parts(plan)
    assert found["parameters"] == 4 * matrix // 4
    # Two moments, and a count of steps for each of four parameters.
    assert found["optimizer state"] == 2 * 4 * matrix // 4 + 4 * 4
    # Six operations a weight and sample in each matrix, but the first makes no gradient of its input.
    flops = 8 * (3 * 6 + 4) * 256 * 256
    assert plan.mfu == pytest.approx(flops / plan.time.step_s / H100.gpu.flops)
    assert plan.settings["num_params"] == 4 * 256 * 256
    assert plan.settings["counts"] == "samples"

    whole = parts(plan_training(Squares, replace(setup, ranks=1), inputs=rows))
    assert whole["parameters"] == 4 * matrix
    half = parts(plan_training(Squares, replace(setup, shard_size=2), inputs=rows))
    assert half["parameters"] == 2 * matrix
    short = parts(plan_training(Squares, replace(setup, stored=torch.bfloat16), inputs=rows))
    assert short["parameters"] == 2 * matrix // 4


class Stacked(nn.Module):
    """Four matrices of 256 KiB in one parameter, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sum(0)


def test_padding_is_told_where_it_is_a_part_of_parameters_to_speak_of() -> None:
    setup, matrix = TrainingSetup(H100, ranks=64, batch=8, precision=FLOAT), 256 * 256 * 4
    plan = planned(Subject(Stacked, inputs=rows), setup)
    assert plan.padding == PaddingPlan(matrix - 4 * matrix // 64, matrix, "weight", 4, 64)
    assert "--shard-size 4 " in str(plan)
    assert planned(Subject(Squares, inputs=rows), setup).padding is None
    assert planned(Subject(Stacked, inputs=rows), replace(setup, shard_size=4)).padding is None


@pytest.mark.parametrize(
    "setup", [replace(BASE, ranks=1), replace(BASE, shard_size=1)], ids=["one rank", "replicas"]
)
def test_parts_in_the_optimizer_step_are_what_is_there_then(
    llama: Subject, setup: TrainingSetup
) -> None:
    plan = planned(llama, replace(setup, seq=64))
    assert plan.memory.when == "optimizer"
    found = parts(plan)
    nbytes = 4 * llama.num_params
    num_tensors = sum(len(unit.params) for unit in llama.workload(BASE).units)
    assert found["parameters"] == found["gradient shards"] == nbytes
    assert found["optimizer state"] == 2 * nbytes + 4 * num_tensors
    assert found["optimizer's temporaries"] == nbytes  # of `foreach`
    assert not {"unsharded units", "full gradients"} & found.keys()


def test_what_is_on_the_host_is_not_on_the_device(llama: Subject) -> None:
    here, there = planned(llama, BASE), planned(llama, replace(BASE, offload="params"))
    assert {"parameters", "optimizer state", "gradient shards"} <= parts(here).keys()
    assert not {"parameters", "optimizer state", "gradient shards"} & parts(there).keys()
    assert dict(there.time.parts)["optimizer"] > dict(here.time.parts)["optimizer"]

    streamed = planned(llama, replace(BASE, offload="optimizer"))
    largest = max(sum(p.numel for p in u.params) for u in llama.workload(BASE).units)
    # Two units' states pass through the device; shards are rounded up.
    assert parts(streamed)["optimizer state"] == pytest.approx(2 * 8 * largest / 16, rel=0.01)


def test_host_memory_is_that_computed_by_hand() -> None:
    machine = replace(H100, per_host=4)
    setup = TrainingSetup(machine, ranks=12, shard_size=3, batch=8, precision=FLOAT)
    shard = 86 * 256 * 4  # the largest of three, of 88,064 bytes, for which 131,072 are locked
    locked = 131_072
    found = {}
    for offload in ("none", "params", "optimizer"):
        plan = plan_training(Squares, replace(setup, offload=offload), inputs=rows)
        found[offload] = plan.memory.host_nbytes
        memory = plan.as_dict()["memory"]
        assert memory["in_host_memory_nbytes"] == found[offload]
        assert memory["in_host_memory_per_host_nbytes"] == 4 * found[offload]
        assert ("host memory of a rank" in str(plan)) is (offload != "none")
    assert found == {
        "none": 0,
        # The parameters and gradients of four layers are locked; two moments and a count of steps are not.
        "params": 4 * (2 * locked + 2 * shard + 4),
        "optimizer": 4 * 262_144,
    }


def test_a_plan_says_what_joins_its_ranks() -> None:
    def third_line(**changes: Any) -> str:
        return str(planned(Subject(SHAPE), replace(BASE, **changes))).splitlines()[2]

    card = machine_named("L40S")
    assert re.findall(r"[\d.]+", third_line(machine=card, ranks=16)) == ["8", "25", "3"]
    assert re.findall(r"[\d.]+", third_line(machine=card, ranks=8)) == ["8", "25"]
    alone = replace(card, per_host=1, network_rate=12.5e9)
    assert re.findall(r"[\d.]+", third_line(machine=alone, ranks=2)) == ["1", "12.5"]
    assert not third_line(ranks=1).startswith("hosts")


@pytest.mark.parametrize(
    "wrong",
    [
        {"per_host": 0},
        {"per_host": -1},
        {"per_host": 2.0},
        {"per_host": True},
        {"link_rate": 0},
        {"link_rate": float("nan")},
        {"network_rate": -5},
        {"network_rate": "400Gb/s"},
    ],
    ids=str,
)
def test_a_machine_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MachineError, match=f"^{next(iter(wrong))} is "):
        machine_named("H100-80GB-SXM", **wrong)


@pytest.mark.parametrize(
    ("typed", "meant"), [("h100", "H100-80GB-SXM"), ("b200", "B200"), ("RTX4080", "RTX4090")]
)
def test_a_gpu_with_a_wrong_name_is_one_that_is_like_it(typed: str, meant: str) -> None:
    with pytest.raises(MachineError, match=f"Did you mean {meant}"):
        machine_named(typed)


def test_a_faster_gpu_is_not_slower() -> None:
    """Whatever it is given by its numbers: its rate, its memory's, or its link's."""
    base = {"flops": 3e14, "memory_nbytes": 8e10, "memory_rate": 2e12, "link_rate": 3e11}
    for name in ("flops", "memory_rate", "link_rate"):
        steps = []
        for times in (0.2, 0.7, 1, 1.1, 1.3, 3.3, 5, 7.5):
            gpu = custom_gpu(**base | {name: base[name] * times})
            machine = Machine(gpu, 8, gpu.link_rate, 5e10)
            setup = replace(BASE, machine=machine, ranks=8, batch=4, seq=2048)
            steps.append(planned(Subject(SHAPE), setup).time.step_s)
        assert steps == sorted({*steps}, reverse=True)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_traced_model_is_planned_as_its_sizes_are(llama: Subject, checkpointing: str) -> None:
    """Sizes say nothing of how a layer is written, so they may differ by 15 %."""
    setup = replace(BASE, batch=4, seq=2048, checkpointing=checkpointing)
    traced, counted = planned(llama, setup), planned(Subject(SHAPE), setup)
    assert counted.time.step_s == pytest.approx(traced.time.step_s, rel=0.15)
    assert counted.memory.total_nbytes == pytest.approx(traced.memory.total_nbytes, rel=0.15)
    assert counted.mfu * counted.time.step_s == pytest.approx(traced.mfu * traced.time.step_s)
    same = ("parameters", "optimizer state", "context")
    for name in same:
        assert parts(counted)[name] == pytest.approx(parts(traced)[name], rel=0.001)


def test_checkpointing_is_that_of_the_model_itself() -> None:
    with torch.device("meta"):
        model = Llama(CONFIG)
    example = token_example(model, batch=1, seq=64)
    before = trace_workload(model, example)
    with checkpointed(model, None, "full"):
        wrapped = trace_workload(model, example)
    assert trace_workload(model, example) == before
    assert "forward" not in vars(model.model.layers[0])
    model.recompute_layers(True)
    assert wrapped == trace_workload(model, example)


@pytest.mark.parametrize(
    ("name", "how"), [("Qwen2ForCausalLM", "selective"), ("T5ForConditionalGeneration", "full")]
)
def test_models_that_keep_a_cache_are_checkpointed_without_one(name: str, how: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "d_model": 32,
        "intermediate_size": 64,
        "d_ff": 64,
    }
    sizes |= {"num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 2, "num_heads": 2}
    sizes |= {"num_key_value_heads": 2, "d_kv": 16, "decoder_start_token_id": 0, "use_cache": True}
    config = getattr(transformers, f"{name.partition('For')[0]}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)

    def given(batch: int, seq: int, **more: Any) -> dict[str, Any]:
        tokens = torch.zeros(batch, seq, dtype=torch.int64)
        return {"input_ids": tokens, "labels": tokens, **more}

    setup = replace(BASE, batch=2, seq=16, checkpointing=how)
    told = Subject(model, inputs=partial(given, use_cache=False)).workload(setup)
    assert Subject(model, inputs=given).workload(setup) == told
    assert model.config.use_cache is True


def test_each_kind_of_checkpointing_keeps_less_and_takes_longer(llama: Subject) -> None:
    setup = replace(BASE, batch=4, seq=2048)
    kinds = ("none", "selective", "full")
    plans = [planned(llama, replace(setup, checkpointing=kind)) for kind in kinds]
    kept = [parts(plan)["activations"] for plan in plans]
    assert kept == sorted(kept, reverse=True)
    times = [plan.time.step_s for plan in plans]
    assert times == sorted(times)
    assert len({*kept}) == len({*times}) == 3


@pytest.mark.parametrize("name", SETUPS)
def test_alternatives_are_others_that_can_be(name: str) -> None:
    others = list(alternatives(SETUPS[name], takes_batch=True))
    assert len({each.text for each in others}) == len(others) > 5
    assert all(each.setup != SETUPS[name] for each in others)


def test_suggestions_are_what_their_plans_say(llama: Subject) -> None:
    plan = plan_training(llama, BASE)
    others = {each.text: each.setup for each in alternatives(BASE, takes_batch=True)}
    assert plan.suggestions
    assert [each.saved_s for each in plan.suggestions] == sorted(
        (each.saved_s for each in plan.suggestions), reverse=True
    )
    for suggestion in plan.suggestions:
        other = others[suggestion.text]
        made = planned(llama, other)
        times = other.batch * other.accumulation / (BASE.batch * BASE.accumulation)
        assert suggestion.saved_s == pytest.approx(plan.time.step_s - made.time.step_s / times)
        assert suggestion.saved_s > 0
        assert suggestion.saved_nbytes == plan.memory.total_nbytes - made.memory.total_nbytes
        assert made.memory.fits


def test_of_what_does_not_fit_is_said_what_does() -> None:
    small = machine_named("RTX3090")
    large = TransformerShape(24, 2048, 16, 16, 8192, 50_257, 128)
    setup = TrainingSetup(small, ranks=2, batch=8, seq=2048, shard_size=2)
    plan = plan_training(large, setup)
    assert not plan.memory.fits
    assert plan.suggestions
    assert all(each.saved_nbytes > 0 for each in plan.suggestions)
    assert "DOES NOT FIT" in str(plan)


def test_a_unit_that_is_kept_is_gathered_once(llama: Subject) -> None:
    def gathers(setup: TrainingSetup) -> int:
        actions = planned(llama, setup).estimate.step.actions
        return sum(action.kind.value == "all-gather" for action in actions)

    kept = ("model.layers.1", "model.layers.2")
    assert gathers(replace(BASE, unsharded=kept)) == gathers(BASE) - len(kept)
    with pytest.raises(SetupError, match=r"layers\.9.*model\.layers\.0"):
        planned(llama, replace(BASE, unsharded=("layers.9",)))


SECTIONS = {"settings", "machine", "memory", "time"}
NUMBERS = {"tokens_per_s", "mfu", "bound_by", "kept_unsharded", "padding", "suggestions"}


def test_a_plan_as_a_dict_is_plain(llama: Subject) -> None:
    plan = plan_training(llama, replace(BASE, stored=torch.bfloat16))
    found = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert found == plan.as_dict()
    assert found.keys() == SECTIONS | NUMBERS
    assert found["settings"]["stored_dtype"] == "bfloat16"
    assert sum(found["memory"]["parts_nbytes"].values()) == found["memory"]["total_nbytes"]
    units = ("_s", "_nbytes", "_per_s", "mfu", "bound_by", "when", "fits", "suggestions", "gpu")
    for section in ("machine", "memory", "time"):
        assert all(name.endswith((*units, "per_host")) for name in found[section])


def test_a_plan_as_a_text_is_narrow(llama: Subject) -> None:
    lines = str(plan_training(llama, replace(BASE, ranks=1024, accumulation=2))).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("  in all") and line.endswith("fits") for line in lines)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"seq": -1}, "seq is -1"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"ranks": 12}, "12 ranks do not fill hosts of 8"),
        ({"shard_size": 32}, "shard_size is 32, and there are 16 ranks"),
        ({"shard_size": 3}, "Choose one of 1, 2, 4, 8, 16"),
        ({"reshard_after_forward": 3}, "must be a factor of 16"),
        ({"checkpointing": "some"}, "expected none, selective, full"),
        ({"optimizer": "lion"}, "expected adamw"),
        ({"offload": "disk"}, "expected none, params, optimizer"),
        ({"attention": "eager"}, "expected sdpa"),
        ({"batch": "2"}, "batch is '2': expected a whole number"),
        ({"batch": 2.5}, "batch is 2.5"),
        ({"ranks": None}, "ranks is None"),
        ({"ranks": 8.0}, "ranks is 8.0"),
        ({"shard_size": True}, "shard_size is True"),
        ({"shard_size": 0}, "shard_size is 0"),
        ({"machine": "H100-80GB-SXM"}, r"machine_named\("),
        ({"precision": None}, "precision is None: expected a MixedPrecisionPolicy"),
        ({"stored": "bf16"}, "stored is 'bf16'"),
        ({"stored": torch.int8}, "stored is torch.int8"),
        ({"unsharded": "model.layers.0"}, "expected a tuple"),
        ({"optimizer": "adafactor", "is_fused": True}, "no fused adafactor"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_when_it_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(FullshardError, match=said):
        replace(BASE, **changes)


class ByValue(nn.Module):
    """Runs one of two layers, as its input says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers[int(x.sum() > 0)](x)
        return out


def test_a_model_that_chooses_by_values_needs_some() -> None:
    with pytest.raises(NeedsValuesError, match=r"ByValue, test_training\.py.*--example-input"):
        plan_training(ByValue, BASE, inputs=lambda: torch.empty(2, 8, device="meta"))
    setup = replace(BASE, precision=FLOAT)
    plan = plan_training(ByValue, setup, inputs=lambda: torch.ones(2, 8))
    assert plan.settings["tokens_per_microbatch"] == 2


class ReadsItsWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.size = int(torch.ones(3).sum())


def test_models_that_cannot_be_built_or_run_are_named() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ReadsItsWeights()

    def lacks() -> nn.Module:
        raise KeyError("vocab")

    with pytest.raises(TraceError, match=r"ReadsItsWeights \(test_training\.py"):
        Subject(Outer)
    with pytest.raises(TraceError, match=r"^lacks \(test_training\.py.* raised KeyError: 'vocab'"):
        Subject(lacks)
    with pytest.raises(SetupError, match=r"^dumps\(obj.*without arguments"):
        Subject(json.dumps)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"^int is no function"):
        Subject(3)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="returned int"):
        Subject(lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(SetupError, match="no size"):
        Subject("9b")
    with pytest.raises(TraceError, match=r"layers\.0.*cannot be run.*--example-input"):
        plan_training(Squares, BASE)
    with pytest.raises(TraceError, match="has no module"):
        plan_training(Squares, BASE, inputs=rows, units=["block"])
    with pytest.raises(SetupError, match="take batch"):
        plan_training(Squares, replace(BASE, batch=2), inputs=lambda: rows(4))
    with pytest.raises(SetupError, match="16 bits"):
        plan_training(SHAPE, replace(BASE, precision=MixedPrecisionPolicy(torch.float64)))


def _of_other_names(b: int, s: int) -> Tensor:
    return rows(b)


def _boom(batch: int) -> Tensor:
    raise RuntimeError("no file")


def _reads(batch: int) -> Tensor:
    return rows(int(rows(batch).sum()))


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (_of_other_names, r"^_of_other_names\(b.*missing.*keywords batch and seq"),
        (_boom, r"^_boom \(test_training\.py.*given as the inputs, raised RuntimeError: no file"),
        (_reads, "^_reads .*reads values"),
        (torch.ones(2), "^Tensor is no function: it is called with"),
        (lambda: 3, "have no tensors"),
    ],
)
def test_inputs_that_cannot_be_made_are_named(inputs: Any, said: str) -> None:
    with pytest.raises(FullshardError, match=said):
        plan_training(Squares, BASE, inputs=inputs)


def test_what_builds_a_model_in_memory_is_named_too() -> None:
    def model() -> nn.Module:
        if int(torch.ones(3).sum()):
            raise KeyError("weights")
        return Squares()

    with pytest.raises(TraceError, match=r"^model .* raised KeyError: 'weights'") as caught:
        Subject(model, inputs=lambda: torch.ones(2, 256))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(SetupError, match="and loss are of a model"):
        Subject(SHAPE, loss=torch.sum)


def test_more_tokens_than_learned_positions_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "n_positions": 128}))
    subject = Subject(tmp_path)
    planned(subject, replace(BASE, seq=128))
    with pytest.raises(SetupError, match=r"seq is 129, and transformer\.wpe has 128 positions"):
        planned(subject, replace(BASE, seq=129))


def test_units_are_in_the_text(llama: Subject) -> None:
    plan = planned(llama, BASE)
    assert plan.settings["units"] == [f"model.layers.{n}" for n in range(6)]
    assert "7 units: the root, model.layers.0 ... model.layers.5" in str(plan).splitlines()
    with torch.device("meta"):
        single = planned(Subject(nn.Linear(256, 256), inputs=rows), BASE)
    assert "1 unit, the root" in str(single)
    assert max(map(len, str(single).splitlines())) <= 100


def test_the_first_plan_of_the_page_is_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    setup = TrainingSetup(H100, ranks=64, batch=2, seq=4096, checkpointing="full")
    printed, _, _ = str(planned(Subject("8b"), setup)).partition("\nWhat to change first")
    assert f"```text\n{printed.rstrip()}\n\nWhat to change first\n" in page


def test_of_adafactor_is_said_that_it_is_refused(llama: Subject) -> None:
    said = ["Adafactor" in str(planned(llama, replace(BASE, optimizer=o))) for o in OPTIMIZERS]
    assert said == [o == "adafactor" for o in OPTIMIZERS]


def test_samples_are_not_called_tokens() -> None:
    texts = [each.text for each in alternatives(BASE, takes_batch=True)]
    assert any("micro-batches of 2" in text for text in texts)
    assert not any("token" in text for text in texts)


def test_a_configuration_says_how_its_model_is_stored(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 64}
    nbytes = []
    for given in ({}, {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}):
        (tmp_path / "config.json").write_text(json.dumps({**sizes, **given}))
        subject = Subject(tmp_path)
        nbytes.append(parts(planned(subject, replace(BASE, ranks=1)))["parameters"])
    assert nbytes == [nbytes[0], nbytes[0] / 2, nbytes[0] / 2]
    stored = planned(subject, replace(BASE, ranks=1, stored=torch.float32))
    assert parts(stored)["parameters"] == nbytes[0]
