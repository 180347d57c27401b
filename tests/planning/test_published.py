"""Predictions of published runs: what is read of a row, what is written, and what is refused."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from fullshard.planning.costs import SPREAD
from fullshard.planning.published import (
    COLUMNS,
    WORDS,
    RunsError,
    UnsupportedRowError,
    predict_row,
    predict_runs,
    published_run,
)

GIB = 1 << 30
# Llama 3 8B as torchtitan trains it; empty columns are left out.
ROW = {
    "id": "xx-001",
    "source": "somebody",
    "model": "llama3-8b",
    "params_b": "8.03",
    "num_layers": "32",
    "hidden": "4096",
    "num_heads": "32",
    "num_kv_heads": "8",
    "ffn_hidden": "14336",
    "vocab": "128256",
    "tied_embeddings": "no",
    "seq_len": "8192",
    "micro_batch_per_gpu": "1",
    "grad_accum": "1",
    "num_gpus": "8",
    "gpus_per_node": "8",
    "gpu": "H100-80GB-SXM",
    "intra_node_gbps": "450",
    "system": "fsdp2",
    "sharding": "full",
    "shard_size": "8",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "ep": "1",
    "param_dtype": "bf16",
    "reduce_dtype": "fp32",
    "fp8": "no",
    "compile": "no",
    "act_ckpt": "selective",
    "attention": "sdpa",
    "mem_kind": "reserved",
    "notes": "master=fp32; opt=adamw",
}


def changed(**values: str) -> dict[str, str]:
    return ROW | values


def test_a_prediction_depends_on_nothing_but_the_run() -> None:
    measured = {
        "iter_time_s": "1.4",
        "peak_mem_gib": "50",
        "mfu_pct": "33",
        "tokens_per_s_per_gpu": "9",
    }
    told = predict_row(ROW | measured | {"notes": ROW["notes"] + "; peak_active_gib=40; 100 steps"})
    blank = predict_row(changed(id="", source="", model="", params_b=""))
    assert told == blank


def test_a_known_run_is_predicted_as_it_was_measured() -> None:
    found = predict_row(changed(gpu="H100-96GB-HBM2e-500W"))
    # Measured four times: 1.375 to 1.463 s, and 49.4 to 49.7 GiB.
    assert found.step_s == pytest.approx(1.42, rel=0.15)
    assert found.peak_nbytes / GIB == pytest.approx(49.6, rel=0.05)
    assert found.fits
    assert found.tokens_per_s == pytest.approx(8192 / found.step_s)


@pytest.mark.parametrize(
    ("values", "is_longer", "is_larger"),
    [
        ({"micro_batch_per_gpu": "2"}, True, True),
        ({"act_ckpt": "none"}, False, True),
        ({"act_ckpt": "full"}, True, False),
        ({"num_gpus": "64", "shard_size": "64"}, None, False),
        ({"fp8": "yes"}, False, None),
        ({"param_dtype": "fp32"}, True, True),
        ({"param_dtype": "fp32", "compile": "yes"}, True, True),
        ({"compile": "yes"}, False, False),
        ({"grad_accum": "4"}, True, None),
        ({"gpu": "A100-80GB-SXM"}, True, None),
        ({"gpu": "H200-141GB-SXM"}, False, None),
        ({"notes": "master=fp32; train=lora"}, False, False),
        ({"notes": "master=bf16"}, False, False),
        ({"mem_kind": "allocated"}, None, False),
        ({"mem_kind": "unknown"}, None, True),
        ({"gpu": "H100-96GB", "compile": "yes"}, None, False),
        ({"system": "fsdp1"}, None, True),
        ({"offload": "params+grads+optim"}, True, False),
        ({"notes": "master=fp32; opt=sgd"}, False, False),
        ({"notes": "master=fp32; opt=adamw8bit"}, None, False),
        ({"peak_bf16_tflops": "100"}, True, None),
        ({"hbm_gbps": "500"}, True, None),
        ({"tp": "2", "shard_size": "4"}, None, False),
        ({"sharding": "hybrid", "num_gpus": "64"}, True, None),
    ],
)
def test_a_change_has_its_effect(
    values: Mapping[str, str], is_longer: bool | None, is_larger: bool | None
) -> None:
    plain, gelu = ROW["notes"], "master=fp32; mlp=gelu2"
    for notes in (plain, gelu, "master=fp32; moe=experts=8,top_k=8,moe_ffn=512"):
        row = changed(notes=notes) | ({"params_b": ""} if notes == gelu else {})
        before = predict_row(row)
        after = predict_row(row | values | {"notes": f"{notes}; {values.get('notes', '')}"})
        if is_longer is not None:
            assert (after.step_s > before.step_s) is is_longer, notes
        if is_larger is not None:
            assert (after.peak_nbytes > before.peak_nbytes) is is_larger, notes


MOE = "master=fp32; moe=experts=64,shared=2,top_k=6,moe_ffn=1408"
DIVIDED = "grad_op_replicated_params"


@pytest.mark.parametrize(
    ("blank", "told"),
    [
        ({"ep": "4", "notes": MOE, "shard_size": ""}, {"shard_size": "8"}),
        ({"sharding": "hybrid", "num_gpus": "64", "shard_size": ""}, {"shard_size": "8"}),
        ({"system": "zero2", "sharding": "", "shard_size": ""}, {"sharding": DIVIDED}),
        ({"system": "ddp", "sharding": "", "shard_size": ""}, {"shard_size": "1"}),
    ],
)
def test_what_is_divided_is_usual_where_nobody_says(
    blank: dict[str, str], told: dict[str, str]
) -> None:
    assert predict_row(ROW | blank) == predict_row(ROW | blank | told)


def test_units_are_held_as_each_engine_holds_them() -> None:
    # Llama 3 70B, frozen, few tokens: shards, units, and a layer's activations.
    wide = {"num_layers": "80", "hidden": "8192", "num_heads": "64", "ffn_hidden": "28672"}
    row = changed(**wide, seq_len="128", mem_kind="allocated", notes="train=lora", act_ckpt="full")
    shards, layer, head = 2 * 70.55e9 / 8, 2 * 0.8557e9, 2 * 128256 * 8192
    # FSDP2: the head, and the buffers from which a layer's and the head's parameters are copied.
    fsdp2 = predict_row(row).peak_nbytes
    assert fsdp2 == pytest.approx(shards + head + layer + head, rel=0.02)
    # FSDP1: embedding, head, a layer, and the one before.
    fsdp1 = predict_row(row | {"system": "fsdp1"}).peak_nbytes
    assert fsdp1 == pytest.approx(shards + 2 * head + 2 * layer, rel=0.02)


def test_zero2_divides_gradients() -> None:
    row = changed(seq_len="128", mem_kind="allocated", sharding="", grad_accum="2")
    whole, divided = (
        predict_row(row | {"system": system}).peak_nbytes for system in ("zero1", "zero2")
    )
    assert whole - divided > 0.8 * 2 * 8.03e9


def test_an_allocator_has_no_more_than_the_gpu() -> None:
    found = predict_row(changed(micro_batch_per_gpu="2", gpu="A100-80GB-SXM"))
    assert found.fits
    assert found.peak_nbytes / GIB == pytest.approx(79.2 - 0.56, abs=0.01)


def test_programs_of_a_later_time_hold_less() -> None:
    compiled = [
        predict_row(changed(compile="yes", gpu=gpu)).peak_nbytes
        for gpu in ("H100-96GB-HBM2e-500W", "H100-96GB")
    ]
    single = [
        predict_row(changed(gpu=gpu)).peak_nbytes for gpu in ("H100-96GB-HBM2e-500W", "H100-96GB")
    ]
    assert compiled[1] / compiled[0] < single[1] / single[0] < 1


@pytest.mark.parametrize("hidden", ["4096", "8192"])
def test_a_newer_gpu_with_less_power_is_not_slower(hidden: str) -> None:
    row = changed(params_b="", hidden=hidden, num_layers="8", act_ckpt="full", compile="yes")
    for more in ({}, {"micro_batch_per_gpu": "8", "seq_len": "2048"}):
        gpus = ("H100-80GB-SXM", "B200-power-limited", "B200")
        steps = [predict_row(row | more | {"gpu": gpu}).step_s for gpu in gpus]
        assert steps == sorted(steps, reverse=True)


def test_who_casts_around_flash_attention_holds_more() -> None:
    row = changed(system="fsdp1", attention="flash", mem_kind="allocated")
    told, casts = predict_row(row), predict_row(row | {"param_dtype": ""})
    # What layers pass on is twice as large, and keys and values are returned.
    assert casts.peak_nbytes > 1.2 * told.peak_nbytes


@pytest.mark.parametrize(
    "kernels", ["attention=flash", "attention=triton", "notes=precision=amp_bf16"]
)
def test_parameters_in_float32_are_cast_around_kernels_of_16_bits(kernels: str) -> None:
    column, _, value = kernels.partition("=")
    row = changed(act_ckpt="full") | {column: value}
    told, casts = predict_row(row), predict_row(row | {"param_dtype": "fp32"})
    floats = predict_row(changed(act_ckpt="full", param_dtype="fp32"))
    assert told.step_s < casts.step_s < 1.2 * told.step_s < floats.step_s
    assert told.peak_nbytes < casts.peak_nbytes


def test_parameters_that_are_computed_with_in_float32_have_no_copy() -> None:
    row = changed(system="zero1", sharding="", seq_len="128", mem_kind="allocated")
    low, wide = (predict_row(row | {"param_dtype": each}).peak_nbytes for each in ("bf16", "fp32"))
    # Parameters and gradients of 4 bytes in place of 2, and a copy of 4 on 8 ranks.
    assert wide - low == pytest.approx((4 - 4 / 8) * 8.03e9, rel=0.15)


def test_a_run_that_fits_without_its_logits_peaks_without_them() -> None:
    found = predict_row(changed(micro_batch_per_gpu="5", act_ckpt="full"))
    assert not found.fits
    assert found.peak_nbytes < 50 * GIB < 80 * GIB < found.needed_nbytes
    assert "logits" in found.reason


@pytest.mark.parametrize(("params_b", "is_gated"), [("8.03", True), ("6.15", False), ("", False)])
def test_the_number_of_parameters_says_how_many_matrices_an_mlp_has(
    params_b: str, is_gated: bool
) -> None:
    run = published_run(changed(notes="master=fp32; mlp=gelu2", params_b=params_b))
    assert run.shape.gated_mlp is is_gated


def test_passes_beyond_two_are_like_the_second() -> None:
    steps = [predict_row(changed(grad_accum=str(n))).step_s for n in (2, 3, 4)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], rel=1e-3)


@pytest.mark.parametrize("system", ["ddp", "zero1"])
def test_gradients_that_are_reduced_once_are_so_with_any_number_of_passes(system: str) -> None:
    kind = {"system": system, "sharding": "", "shard_size": "", "act_ckpt": "full"}
    row = changed(**kind, num_gpus="64", inter_node_gbps="5")
    steps = {n: predict_row(row | {"grad_accum": str(n)}).step_s for n in (1, 2, 8)}
    assert steps[8] - steps[2] == pytest.approx(6 * (steps[2] - steps[1]), rel=0.1)
    # The parts of a pipeline are idle once a step, whatever is exchanged.
    in_parts = row | {"num_gpus": "256", "pp": "4"}
    steps = {n: predict_row(in_parts | {"grad_accum": str(n)}).step_s for n in (1, 2, 64)}
    assert steps[1] < steps[2] < steps[64] < 32 * steps[2]


def test_a_pipeline_holds_as_many_sequences_as_it_has_parts() -> None:
    row = changed(system="ddp", sharding="", shard_size="", num_gpus="32", pp="4", tp="8")
    row |= {"act_ckpt": "none", "mem_kind": "allocated", "seq_len": "2048", "attention": "eager"}
    found = {n: predict_row(row | {"micro_batch_per_gpu": str(n)}) for n in (1, 2, 3, 4, 64)}
    assert "one sequence in each" in found[64].reason
    assert found[64].fits
    # However they are counted.
    in_passes = predict_row(row | {"grad_accum": "64"})
    assert in_passes.peak_nbytes == found[64].peak_nbytes == found[4].peak_nbytes
    kept = [found[n].peak_nbytes - found[2].peak_nbytes for n in (3, 4)]
    assert kept[1] == pytest.approx(2 * kept[0])
    assert not found[1].reason
    # Of parameters that are sharded, all at once, unless that does not fit.
    sharded = row | {"system": "fsdp2", "num_gpus": "256"}
    at_once, large = (predict_row(sharded | {"micro_batch_per_gpu": n}) for n in ("4", "512"))
    assert not at_once.reason
    assert large.fits
    assert "one sequence in each" in large.reason


def test_attention_by_single_operators_keeps_its_scores() -> None:
    row = changed(act_ckpt="none", gpu="H200-141GB-SXM")
    fused, eager = predict_row(row), predict_row(row | {"attention": "eager"})
    scores = 2 * 8192 * 8192 * 32 * 32  # bytes a score, of each layer and head
    assert eager.needed_nbytes - fused.needed_nbytes == pytest.approx(scores, rel=0.05)
    assert eager.step_s > 1.2 * fused.step_s


def test_what_is_not_given_is_the_least_that_fits() -> None:
    assert "took none" in predict_row(changed(act_ckpt="", seq_len="2048")).reason
    found = predict_row(changed(act_ckpt="", micro_batch_per_gpu="4", attention="triton"))
    assert "took full" in found.reason


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"seq_len": ""}, "seq_len is not given: took 4096"),
        ({"micro_batch_per_gpu": ""}, "micro_batch_per_gpu is not given: took 1"),
        ({"vocab": ""}, "vocab is not given"),
        ({"param_dtype": "", "system": "fsdp1", "attention": "flash"}, "param_dtype is not given"),
        ({"notes": "opt=banana"}, "opt=banana is not known: took adamw"),
        ({"notes": "master=banana"}, "master=banana is not known: took fp32"),
        ({"notes": "master=bf16banana"}, "master=bf16banana is not known: took fp32"),
        ({"notes": "mlp=7"}, "mlp=7 is not known: took gated of gated, swiglu, gelu2"),
        ({"notes": "precision=int3"}, "precision=int3 is not known: took bf16"),
        ({"notes": "train=banana"}, "train=banana is not known: took full"),
        ({"notes": "moe=experts=8,topk=2"}, "topk= is not known"),
        ({"ep": "2"}, "took no experts"),
        ({"notes": "moe=experts=6", "ep": "4"}, "does not divide 6 experts"),
        ({"cp": "3"}, "does not divide 8 GPUs"),
        ({"notes": "opt=sgd; opt=adamw"}, "opt= is given twice"),
        ({"system": "ddp"}, "ddp does not shard"),
        ({"system": "ddp", "sharding": ""}, "shard_size is above 1: took 1"),
        ({"system": "single", "sharding": ""}, "num_gpus is above 1: took replicas"),
        ({"system": ""}, "system is not given"),
        ({"compile": ""}, "compile is not given: took no"),
        ({"grad_accum": ""}, "grad_accum is not given: took 1"),
        ({"hidden": ""}, "hidden is not given: took 34 layers of 4352"),
        ({"params_b": "70"}, "params_b is 70, and the shape has 8.03: took the shape"),
        ({"gpu": "A100-80GB-SXM", "fp8": "yes"}, "has no products of 8 bits: took bf16"),
    ],
)
def test_what_is_assumed_is_said(values: Mapping[str, str], said: str) -> None:
    assert said in predict_row(ROW | values).reason
    known = (
        "mlp=swiglu; precision=amp_bf16; opt=adamw8bit; moe=experts=8,shared=0,active_params_b=2"
    )
    assert not predict_row(changed(notes=known, params_b="")).reason


def test_a_gpu_may_be_given_by_its_numbers() -> None:
    numbers = {"peak_bf16_tflops": "989", "hbm_gbps": "3350", "inter_node_gbps": "50", "fp8": ""}
    named = predict_row(changed(mem_kind="allocated") | numbers)
    blank = predict_row(changed(mem_kind="allocated", gpu="") | numbers)
    assert blank.step_s == pytest.approx(named.step_s, rel=0.01)
    assert blank.peak_nbytes == named.peak_nbytes
    assert "gpu is not given" in blank.reason
    with pytest.raises(UnsupportedRowError, match="and all of peak_bf16_tflops"):
        predict_row(changed(gpu=""))


def test_notes_are_read_however_they_are_written() -> None:
    told = predict_row(changed(notes="master=bf16; opt=sgd; moe=experts=8,top_k=2; train=lora"))
    for notes in (
        "master=bf16;opt=sgd;moe=experts=8,top_k=2;train=lora",
        "ran twice, Master=BF16, OPT = SGD train=lora moe=experts=8,top_k=2, head_dim=128",
    ):
        words = {"system": " FSDP2 ", "gpu": "h100-80gb-sxm", "act_ckpt": "Selective"}
        assert predict_row(changed(notes=notes, **words)) == told


def test_known_words_are_documented() -> None:
    page = Path(__file__).parents[2] / "docs" / "planning.md"
    text = " ".join(page.read_text().split())
    for column, words in WORDS.items():
        listed = rf"`{column}`(, `\w+`)* \({re.escape(', '.join(words))}\)"
        assert re.search(listed, text), column


def test_experts_and_latent_attention_are_read() -> None:
    run = published_run(
        changed(
            ep="4",
            notes="moe=experts=64,shared=2,top_k=6,moe_ffn=1408,dense_layers=1,mla=kv_lora_rank 512",
        )
    )
    assert run.shape.experts is not None
    assert (run.shape.experts.num, run.shape.experts.top_k, run.shape.experts.num_shared) == (
        64,
        6,
        2,
    )
    assert run.shape.kv_lora_rank == 512
    assert run.batch.parts.expert == 4


def test_a_shape_that_is_not_given_is_the_usual_one() -> None:
    run = published_run(changed(hidden="", num_layers="", num_heads="", params_b="175"))
    assert (run.shape.num_layers, run.shape.hidden) == (96, 12288)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpu": "H300"}, "H100-80GB-SXM"),
        ({"gpu": "b20"}, "Did you mean B200"),
        ({"system": "fsdp"}, "Did you mean fsdp"),
        ({"notes": "moe=8 experts"}, "moe= needs experts=NUMBER"),
        ({"num_layers": ""}, "num_layers"),
        ({"hidden": "wide"}, "hidden"),
        ({"hidden": "", "params_b": ""}, "params_b"),
        ({"notes": "moe=hybrid mamba/attention MoE, shape not recorded"}, "shape"),
        ({"tp": "3"}, "3 ways"),
        ({"seq_len": "0"}, "seq_len"),
        ({"micro_batch_per_gpu": "-1"}, "micro_batch_per_gpu"),
        ({"num_heads": "0"}, "num_heads"),
        ({"num_heads": "30"}, "no multiple of num_heads"),
        ({"num_kv_heads": "5"}, "num_kv_heads"),
        ({"micro_batch_per_gpu": "1.5"}, "whole number"),
        ({"shard_size": "3"}, "8 ranks"),
        ({"shard_size": "16"}, "8 ranks"),
        ({"offload": "banana"}, "params"),
        ({"system": "foo"}, "fsdp2"),
        ({"sharding": "foo"}, "hybrid"),
        ({"act_ckpt": "maybe"}, "selective"),
        ({"attention": "foo"}, "flash"),
        ({"compile": "banana"}, "yes, no"),
        ({"param_dtype": "int8"}, "bf16"),
        ({"notes": "moe=experts=8,top_k=9"}, "8 experts"),
        ({"notes": "moe=experts=8,top_k=1.5"}, "whole number"),
        ({"notes": "moe=experts=8,dense_layers=33"}, "32 layers"),
        ({"notes": "moe=experts=8,mla=banana"}, "kv_lora_rank"),
        ({"notes": "moe=experts=16", "ep": "16"}, "8 GPUs"),
        ({"notes": "head_dim=64.5"}, "whole number"),
        ({"pp": "8", "num_layers": "4"}, "4 layers"),
        ({"tp": "4", "num_heads": "2", "num_kv_heads": "2"}, "2 heads"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why(values: Mapping[str, str], said: str) -> None:
    with pytest.raises(UnsupportedRowError, match=said):
        predict_row(ROW | values)


def test_every_row_is_in_the_table_that_is_written(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    rows = [ROW, changed(id="xx-002", gpu="H300"), changed(id="xx-003", micro_batch_per_gpu="64")]
    with source.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*ROW], lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)
    summary = predict_runs(source, out)
    with out.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        written = list(reader)
    assert tuple(reader.fieldnames or ()) == COLUMNS
    assert [row["id"] for row in written] == ["xx-001", "xx-002", "xx-003"]
    assert [row["fits"] for row in written] == ["yes", "", "no"]
    step_s, low_s, high_s = (float(written[0][key]) for key in ("iter_time_s", "low_s", "high_s"))
    assert (low_s / step_s, high_s / step_s) == pytest.approx(SPREAD, rel=1e-3)
    assert "H300" in written[1]["reason"]
    assert (summary.num_rows, summary.num_predicted, summary.num_fitting) == (3, 2, 1)


def test_rows_without_names_are_numbered(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    for columns in ([*ROW], [key for key in ROW if key not in ("id", "source", "model")]):
        with source.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows([changed(id=""), changed(id="")])
        predict_runs(source, out)
        with out.open(newline="", encoding="utf-8") as file:
            assert [row["id"] for row in csv.DictReader(file)] == ["1", "2"]


def test_lines_of_another_length_are_read(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.csv", tmp_path / "predictions.csv"
    values = ",".join(f'"{value}"' for value in ROW.values())
    # As a spreadsheet writes it: with a mark at the beginning.
    source.write_text("\ufeff" + ",".join(ROW) + f"\nx1,foo\n{values},more,and more\n")
    summary = predict_runs(source, out)
    assert summary.num_predicted == 1
    assert set(summary.unsupported) == {"x1"}
    assert "beyond the columns: left out more, and more" in out.read_text()
    source.write_text(",".join([*ROW, "gpu"]) + f"\n{values},B200\n")
    predict_runs(source, out)
    assert "several columns gpu: took the last" in out.read_text()


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    for source in (other, tmp_path / "missing.csv", tmp_path):
        with pytest.raises(RunsError, match=source.name):
            predict_runs(source, tmp_path / "out.csv")
    other.write_text(",".join(ROW) + "\n")
    with pytest.raises(RunsError, match="no rows"):
        predict_runs(other, tmp_path / "out.csv")
    other.write_text(";".join(ROW) + "\n1;2\n")
    with pytest.raises(RunsError, match="commas"):
        predict_runs(other, tmp_path / "out.csv")
    good = tmp_path / "good.csv"
    good.write_text(",".join(ROW) + "\n" + ",".join(f'"{v}"' for v in ROW.values()) + "\n")
    with pytest.raises(RunsError, match="is the table that is read"):
        predict_runs(good, good)
    assert good.read_text().startswith("id,")
    with pytest.raises(RunsError, match="nowhere"):
        predict_runs(good, tmp_path / "nowhere" / "out.csv")
