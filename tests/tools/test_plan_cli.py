"""`fullshard plan`: what it prints is the plan, and what cannot be planned is refused with what would work."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fullshard import TrainingSetup, TransformerShape, machine_named, plan_training
from fullshard.tools import cli
from fullshard.tools.config import OptionError
from fullshard.tools.exits import Exit
from fullshard.tools.plan_options import PlanOptions, quantity, shape_sizes
from fullshard.tools.report import write_file

GPU = ("--gpu", "H100-80GB-SXM")
ON_8 = (*GPU, "--ranks", "8")
SHAPE = "layers=4,hidden=512,heads=8,kv-heads=2,ffn=1408,vocab=1000"
NUMBERS = ("--flops", "400T", "--memory", "60GiB", "--memory-bandwidth", "2TB/s")
NUMBERS += ("--link", "300GB/s")
PROGRAM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        print("a program may print")
        return self.linear(x)

class ByValue(Block):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

def net():
    return nn.Sequential(*(Block() for _ in range(3)))

def by_value():
    return nn.Sequential(*(ByValue() for _ in range(3)))

def reads():
    return nn.Linear(int(torch.ones(8).sum()), 3)

def samples(batch):
    return torch.empty(batch, 8, device="meta")

def values():
    return torch.ones(4, 8)

def loss(output):
    return output.float().sum()
"""


def called(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *words])


@pytest.fixture(autouse=True, scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("program")
    (folder / "planned_program.py").write_text(PROGRAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield


def test_what_is_printed_is_the_plan() -> None:
    setup = TrainingSetup(machine_named("H100-80GB-SXM"), ranks=8, batch=2, seq=256)
    shape = TransformerShape(4, 512, 8, 2, 1408, 1000, 64)
    words = ("--shape", SHAPE, *ON_8, "--batch", "2", "--seq", "256")
    text = called(*words)
    assert text.exit_code == Exit.OK, text.output
    plan = plan_training(shape, setup)
    assert text.stdout == f"{plan}\n"
    assert json.loads(called(*words, "--json").stdout) == plan.as_dict()


def test_what_does_not_fit_has_a_code_of_its_own() -> None:
    words = ("--shape", "layers=48,hidden=8192,heads=64,vocab=32000", *ON_8, "--json")
    result = called(*words)
    assert result.exit_code == Exit.FAILED
    assert json.loads(result.stdout)["memory"]["fits"] is False


def test_a_users_model_is_planned_with_inputs_of_its_own() -> None:
    words = ("--dtype", "fp32", "--example-input", "planned_program:samples", *ON_8, "--json")
    result = called("planned_program:net", "--batch", "3", *words)
    assert result.exit_code == Exit.OK, result.output
    found = json.loads(result.stdout)
    assert found["settings"]["tokens_per_microbatch"] == 3
    assert found["settings"]["counts"] == "samples"
    assert found["settings"]["num_params"] == 3 * 72
    by_loss = called("planned_program:net", *words, "--loss", "planned_program:loss")
    assert by_loss.exit_code == Exit.OK, by_loss.output
    given = ("--example-input", "planned_program:values")
    by_value = called("planned_program:by_value", "--dtype", "fp32", *given, *ON_8)
    assert by_value.exit_code == Exit.OK, by_value.output
    reads = called("planned_program:reads", *given, *ON_8)
    assert reads.exit_code == Exit.OK, reads.output


def test_options_change_what_they_name() -> None:
    words = ("tiny", *GPU, "--hosts", "2", "--json")
    more = ("--shard-size", "4", "--grad-accum", "2", "--reduce-last", "--checkpointing", "full")
    more += ("--param-dtype", "bf16", "--reduce-dtype", "bf16", "--optimizer", "sgd", "--fused")
    more += ("--offload", "optimizer", "--compile", "--attention", "flash", "--reshard", "no")
    more += ("--keep-unsharded", "1MiB")
    more += ("--sum-replicas-last", "--unsharded", "model.layers.0+model.layers.1")
    more += ("--units", "model.layers.0+model.layers.1,model.norm")
    settings = json.loads(called(*words, *more).stdout)["settings"]
    wanted = {"ranks": 16, "hosts": 2, "shard_size": 4, "accumulation": 2, "reduces_each": False}
    wanted |= {"checkpointing": "full", "stored_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    wanted |= {"optimizer": "sgd", "is_fused": True, "offload": "optimizer", "is_compiled": True}
    wanted |= {"attention": "flash", "reshard_after_forward": False}
    wanted |= {"keep_unsharded_nbytes": 1 << 20, "sums_replicas_last": True}
    joined = "model.layers.0, model.layers.1"
    wanted |= {"units": [joined, "model.norm"], "unsharded": [joined]}
    assert {name: settings[name] for name in wanted} == wanted


def test_a_table_of_runs_is_predicted(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    columns = (
        "id,gpu,num_layers,hidden,num_heads,vocab,num_gpus,seq_len,micro_batch_per_gpu,act_ckpt"
    )
    source.write_text(
        f"{columns}\nx,H100-80GB-SXM,4,512,8,1000,8,256,2,none\ny,Abacus,4,512,8,1000,8,256,2,none\n"
    )
    result = called("--runs", str(source), "--out", str(out))
    assert result.exit_code == Exit.OK, result.output
    first, second = csv.DictReader(out.read_text().splitlines())
    assert float(first["iter_time_s"]) > 0
    assert first["fits"] == "yes"
    assert "Abacus" in second["reason"]
    assert not second["iter_time_s"]
    missing = called("--runs", str(tmp_path / "none.csv"), "--out", str(out))
    assert missing.exit_code == Exit.USAGE
    assert "none.csv" in missing.output


def test_what_is_no_file_is_written_into_and_stays(tmp_path: Path) -> None:
    words = ("--shape", SHAPE, *ON_8, "--seq", "64")
    for option in ("--out", "--page"):
        folder = tmp_path / option
        folder.mkdir()
        pipe, heard, target = folder / "pipe", folder / "heard", folder / "target"
        os.mkfifo(pipe)
        with heard.open("wb") as file, subprocess.Popen(["cat", pipe], stdout=file) as reader:
            try:
                assert called(*words, option, str(pipe)).exit_code == Exit.OK
                reader.wait(10)
            finally:
                reader.kill()
        assert pipe.is_fifo()
        (folder / "link").symlink_to(target)
        assert called(*words, option, str(folder / "link")).exit_code == Exit.OK
        assert target.read_text() == heard.read_text()
        beside = ["trace.json"] if option == "--page" else []  # of the file, none of the pipe
        names = ["heard", "link", "pipe", "target", *beside]
        assert sorted(path.name for path in folder.iterdir()) == names


def test_standard_output_may_be_the_file_to_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "stdout"
    link.symlink_to("/proc/self/fd/1")  # as /dev/stdout is; here a file
    print("before")
    write_file(link, "plan")
    print("after")
    assert capfd.readouterr().out == "before\nplan\nafter\n"
    assert link.is_symlink()


def test_a_machine_may_be_given_by_its_numbers() -> None:
    words = (*NUMBERS, "--network", "200Gb/s", "--per-host", "4", "--ranks", "8")
    machine = json.loads(called("--shape", SHAPE, *words, "--json").stdout)["machine"]
    assert machine == {
        "gpu": "custom GPU",
        "flops_per_s": 4e14,
        "memory_nbytes": 60 * 2**30,
        "memory_nbytes_per_s": 2e12,
        "link_nbytes_per_s": 3e11,
        "network_nbytes_per_s": 2.5e10,
        "per_host": 4,
    }
    other = json.loads(called("--shape", SHAPE, *ON_8, "--memory", "1GiB", "--json").stdout)[
        "machine"
    ]
    assert other["memory_nbytes"] == 2**30
    assert other["flops_per_s"] == machine_named("H100-80GB-SXM").gpu.flops
    alone = called("--shape", SHAPE, *NUMBERS[:-2], "--ranks", "1")  # linked to nothing
    assert alone.exit_code == Exit.OK, alone.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("8b", "--gpu", "H100", "--ranks", "8"), "Known: A100-40GB-SXM, "),
        (("8b", "--gpu", "H100", "--ranks", "8"), "--memory-bandwidth"),
        (("8b", "--ranks", "8"), "or give its numbers: --flops, --memory"),
        (("8b", "--ranks", "8", "--flops", "9T", "--memory", "8GB"), "--memory-bandwidth, --link"),
        (("8b", "--ranks", "16", *NUMBERS), "give --network"),
        (("8b", "--hosts", "2", *NUMBERS), "give --network"),
        (("8b", "--ranks", "8", "--per-host", "4", *NUMBERS), "hosts of 4 GPUs: give --network"),
        (("8b", *GPU), "--ranks N, or --hosts N"),
        (("8b", *ON_8, "--memory", "80"), "--memory 80: give bytes with their unit, such as 80GiB"),
        (("8b", *ON_8, "--memory", "80GB/s"), "--memory 80GB/s: give bytes"),
        (("8b", *ON_8, "--link", "400GB"), "--link 400GB: give bytes a second"),
        (("8b", *ON_8, "--network", "400"), "--network 400: give bytes a second"),
        (("8b", *ON_8, "--flops", "989"), "--flops 989: give operations a second"),
        (("8b", *ON_8, "--memory", "0GiB"), "--memory 0GiB"),
        (("8b", *ON_8, "--shard-size", "3"), "does not divide 8 ranks"),
        (("8b", *GPU, "--ranks", "12"), "12 ranks do not fill hosts of 8 GPUs"),
        (("8b", *ON_8, "--hosts", "3"), "3 does not divide 8"),
        (("8b", *ON_8, "--hosts", "2", "--per-host", "2"), "2 hosts of 2 GPUs have 4"),
        (("8b", *ON_8, "--batch", "0"), "--batch 0: must be at least 1"),
        (("8b", *ON_8, "--seq", "0"), "--seq 0: must be at least 1"),
        (("8b", *ON_8, "--per-host", "0"), "--per-host 0: must be at least 1"),
        (("8b", *ON_8, "--dtype", "fp8"), "--dtype fp8: choose from fp32, bf16, fp16"),
        (("8b", *ON_8, "--param-dtype", "int8"), "--param-dtype int8"),
        (("8b", *ON_8, "--reshard", "3"), "must be a factor of 8"),
        (("8b", *ON_8, "--reshard", "maybe"), "expected no, yes, or the size"),
        (("tiny", *ON_8, "--unsharded", "layers.7"), "Units are model.layers.0"),
        (("tiny", *ON_8, "--units", "blocks"), "has no module blocks"),
        (("9b", *ON_8), "9b: is no size (tiny, 10m"),
        (ON_8, "give a MODEL or --shape"),
        (("8b", "--shape", SHAPE, *ON_8), "and not both"),
        (("--shape", "layers=2,hidden=8", *ON_8), "heads, vocab missing"),
        (("--shape", f"{SHAPE},depth=3", *ON_8), "--shape depth=3: sizes are layers"),
        (("--shape", f"{SHAPE},layers=5", *ON_8), "--shape layers=5: layers is given twice"),
        (("--shape", f"{SHAPE},tied=1", *ON_8), "expected yes or no"),
        (("--shape", "layers=1000000000,hidden=64,heads=4,vocab=9", *ON_8), "at most 10,000"),
        (("8b", *GPU, "--ranks", "8000000000"), "at most 1,000,000"),
        (("--shape", "layers=x", *ON_8), "--shape layers=x: expected a whole number"),
        (("--shape", "layers=1,hidden=10,heads=3,vocab=9", *ON_8), "Give head-dim"),
        (
            ("--shape", SHAPE.replace("heads=2", "heads=3"), *ON_8),
            "kv-heads 3 do not divide 8 heads",
        ),
        (("--shape", SHAPE, "--units", "a", *ON_8), "a shape has no module"),
        (("planned_program:nothing", *ON_8), "has no function 'nothing'; it has "),
        (("torch:compil", *ON_8), "has no function 'compil'; it has compile, "),
        (("no_such_program:net", *ON_8), "no module 'no_such_program'"),
        (("planned_program:reads", *ON_8), "--example-input MODULE:FUNCTION"),
        (("planned_program:net", *ON_8), "0.linear (Linear, planned_program.py:11)"),
        (("planned_program:net", *ON_8, "--example-input", "samples"), "expected MODULE:FUNCTION"),
        (
            ("planned_program:by_value", *ON_8, "--example-input", "planned_program:samples"),
            "0 (ByValue, planned_program.py:15) reads values",
        ),
        (("tiny", *ON_8, "--keep-unsharded", "4"), "--keep-unsharded 4: give bytes"),
        (
            ("8b", *ON_8, "--keep-unsharded", "4MiB"),
            "4194304 bytes to keep units unsharded hold none",
        ),
        (("8b", *ON_8, "--keep-unsharded", "4GiB", "--search"), "--keep-unsharded with --search"),
        (("tiny", *ON_8, "--unsharded", ""), "--unsharded '': a name is empty"),
        (("tiny", *ON_8, "--units", "a,"), "--units 'a,': a name is empty"),
        (("tiny", *ON_8, "--units", "a+,b"), "--units 'a+,b': a name is empty"),
        (("--shape", SHAPE, *ON_8, "--page", "no/page.html"), "--page no/page.html: there is no"),
        (("--shape", SHAPE, *ON_8, "--page", "/proc/page.html"), "with --page"),
        (("--shape", SHAPE, *ON_8, "--out", "no/plan.json"), "no folder no"),
        (("--shape", SHAPE, *ON_8, "--out", "-"), "--out -: give the name"),
        (("--runs", "runs.csv"), "--runs and --out belong together"),
        (("--runs", "runs.csv", "--page", "page.html"), "--runs and --out belong together"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_planned_is_refused(words: tuple[str, ...], said: str) -> None:
    result = called(*words)
    assert result.exit_code == Exit.USAGE, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert len(result.output) < 1500


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("80GiB", "bytes", 80 * 2**30),
        ("80 GB", "bytes", 80e9),
        ("1.5TB", "bytes", 1.5e12),
        ("3.35TB/s", "bytes a second", 3.35e12),
        ("400Gb/s", "bytes a second", 5e10),
        ("989T", "operations a second", 9.89e14),
        ("2.25PFLOP/s", "operations a second", 2.25e15),
        ("312TFLOPS", "operations a second", 3.12e14),
    ],
)
def test_quantities_have_units(text: str, kind: str, number: float) -> None:
    assert quantity("--x", text, kind) == pytest.approx(number)


@pytest.mark.parametrize(
    ("text", "kind"),
    [(text, "bytes") for text in ("80", "80Gi", "1.2.3GB", "-1GB", "GB", "80Gb", "infGB", "1eGB")],
)
def test_quantities_without_units_are_refused(text: str, kind: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"--x {text}")):
        quantity("--x", text, kind)


def test_sizes_that_are_left_out_are_the_usual_ones() -> None:
    sizes = shape_sizes("layers=2,hidden=64,heads=4,vocab=100")
    assert TransformerShape(**sizes) == TransformerShape(2, 64, 4, 4, 256, 100, 16)
    assert shape_sizes("layers=2,hidden=64,heads=4,vocab=9,tied=yes,gated=no,head-dim=32") == {
        **sizes,
        "vocab": 9,
        "head_dim": 32,
        "tied_embeddings": True,
        "gated_mlp": False,
    }


def test_the_command_of_the_readme_works() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (line,) = re.findall(r"`fullshard plan (.*?)`", readme)
    result = called(*line.split())
    assert result.exit_code == Exit.OK, result.output
    assert "GiB of 79.1: fits" in result.output


def test_options_are_checked_without_torch() -> None:
    with pytest.raises(OptionError, match="--shard-size 0"):
        PlanOptions("8b", shard_size=0)


TYPED = ("--shape", SHAPE, *ON_8, "--per-host", "4", "--batch", "2", "--seq", "512")
SEARCHED = (*TYPED, "--search")


def test_a_search_prints_a_program_and_ways_that_can_be_typed() -> None:
    done = called(*SEARCHED, "--json")
    assert done.exit_code == Exit.OK
    found = json.loads(done.stdout)
    assert found["launch"].startswith("torchrun --nnodes 2 --nproc-per-node 4 ")
    compile(found["program"], "printed", "exec")
    best = found["best"]
    assert [each["step_s"] for each in best] == sorted(each["step_s"] for each in best)
    # The batch of a step stays what it was.
    assert {each["sequences"] * each["num_microbatches"] for each in best} == {2}
    assert found["program"] in called(*SEARCHED).stdout
    of_one = [each for each in found["front"] if each["layers_per_unit"] == 1]
    ways = {str(each["reshard_after_forward"]): each for each in of_one if not each["fills"]}
    assert {*ways} == {"False", "4"}
    for reshard, way in ways.items():
        words = {"--reshard": {"False": "no"}.get(reshard, reshard), "--batch": way["sequences"]}
        words |= {"--grad-accum": way["num_microbatches"], "--offload": way["offload"]}
        words |= {"--checkpointing": way["checkpointing"]}
        typed = [str(word) for pair in words.items() for word in pair]
        plan = json.loads(called(*TYPED, *typed, "--json").stdout)
        assert plan["time"]["step_s"] == pytest.approx(way["step_s"])


def test_a_search_chooses_what_is_not_given() -> None:
    done = called(*SEARCHED, "--shard-size", "4")
    assert done.exit_code == Exit.USAGE
    assert "--shard-size" in done.stderr


def test_a_search_in_which_nothing_fits_fails() -> None:
    done = called(*SEARCHED, "--memory", "500MiB")
    assert done.exit_code == Exit.FAILED
    assert not done.stdout
    assert "The smallest needs" in done.stderr


# This machine


@pytest.mark.long
def test_what_was_measured_here_is_planned_with(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    run = ("planned_program:net", "--example-input", "planned_program:samples", "--dtype", "fp32")
    result = called(*run, "--calibrate", "--out", str(path), "--json")
    assert result.exit_code == 0, result.output
    planned = json.loads(result.stdout)
    assert planned["settings"]["ranks"] == 2
    again = called(*run, "--gpu", str(path), "--json")
    assert json.loads(again.stdout) == planned
    # It was measured for these dtypes, so many ranks, and as the engine communicates by itself.
    for words, what in (
        (("--dtype", "bf16"), "bfloat16 of float32"),
        (("--param-dtype", "bf16"), "float32 of bfloat16"),
        (("--ranks", "4"), "2"),
        (("--comm", "process_group"), "gloo"),
    ):
        refused = called(*run, "--gpu", str(path), *words)
        assert refused.exit_code == Exit.USAGE
        assert what in refused.output
    low = (*run, "--dtype", "bf16", "--param-dtype", "bf16", "--comm", "process_group")
    assert called(*low, "--calibrate", "--out", str(path)).exit_code == 0
    # What the file had stays.
    for words in ((*low, "--gpu"), (*run, "--gpu")):
        assert called(*words, str(path)).exit_code == 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--calibrate", *ON_8), "--calibrate"),
        (("--calibrate", "--search", "--reshard", "2"), "--reshard"),
        (("--calibrate", "--out", "figures"), ".json"),
        (("--calibrate", "--out", "/proc/no/figures.json"), "folder"),
        (("--gpu", "this", "--ranks", "977"), "--ranks 977"),
        ((*ON_8, "--comm", "process_group"), "NCCL"),
        (("--gpu", "this", "--comm", "shouting"), "process_group"),
    ],
)
def test_what_is_not_of_this_machine_is_refused(words: tuple[str, ...], what: str) -> None:
    refused = called("planned_program:net", *words)
    assert refused.exit_code == Exit.USAGE
    assert what in refused.output
