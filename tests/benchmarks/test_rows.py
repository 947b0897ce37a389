"""From a row of published measurements to a strategy: what frameworks do is read once, the same for every source."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import rows
from benchmarks.accuracy import DEVICES
from benchmarks.frameworks import FRAMEWORKS

PUBLISHED = Path(rows.__file__).parent / "published"


def published(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


FURTHER = published("further_rows")
RELEASED = published("released_rows")


@pytest.mark.parametrize("of", [FURTHER, RELEASED], ids=["further", "released"])
def test_every_row_is_scorable_and_says_where_it_was_read(of: list[dict[str, str]]) -> None:
    assert len({row["id"] for row in of}) == len(of)
    assert all(row["origin"] for row in of)
    kept = [row for row in of if row["id"] not in rows.SET_ASIDE]
    assert len([rows.parse(row, [DEVICES]) for row in kept]) == len(kept) >= len(of) - 19


def test_one_device_a_node_has_no_link_of_its_box() -> None:
    lone = next(row for row in RELEASED if row["devices_per_node"] == "1" and row["devices"] == "48")
    inner, outer = rows.cluster_of(lone).levels
    assert (inner.size, outer.size, outer.bytes_per_s) == (1, 48, 1.25e9)


def test_rows_that_are_set_aside_exist_and_say_why() -> None:
    assert set(rows.SET_ASIDE) <= {row["id"] for row in RELEASED}
    with pytest.raises(rows.Unscorable, match="set aside: a power-limited B200"):
        rows.parse(next(row for row in RELEASED if row["id"] == "new:torchao:7"))


def test_a_job_smaller_than_its_rack_has_all_of_it() -> None:
    row = next(row for row in RELEASED if row["device"] == "gb300" and row["devices"] == "64")
    assert [level.size for level in rows.cluster_of(row).levels] == [64]


def test_no_framework_is_listed_that_no_row_has_run() -> None:
    run = {
        row["framework"]
        for name in ("training_rows", "further_rows", "released_rows")
        for row in published(name)
    }
    assert set(FRAMEWORKS) <= run


def test_half_recomputation_is_every_second_block_of_each_chunk() -> None:
    row = next(row for row in FURTHER if row["recompute"] == "half")
    (strategy,) = rows.strategies_of(row)
    (blocks,) = strategy.pipeline.stage_blocks
    assert strategy.recompute.per_stage == (blocks // 2,)


def test_an_eighth_of_a_rank_is_recomputed_where_its_chunks_hold_one_block_each() -> None:
    row = next(row for row in FURTHER if (row["layers"], row["pp"], row["vpp"]) == ("64", "8", "8"))
    none, eighth, *_, every = (strategy.recompute.per_stage for strategy in rows.strategies_of(row))
    assert (sum(none), sum(every)) == (0, 64)
    assert [sum(eighth[rank::8]) for rank in range(8)] == [1] * 8


def test_a_code_base_of_torch_s_own_operators_fuses_at_most_its_normalisation() -> None:
    ran = [r for r in published("training_rows") if r["framework"] == "aleph-alpha-scaling"]
    for said in ("True", "False"):
        row = next(r for r in ran if r["fused_norm"] == said)
        assert rows.strategies_of(row)[0].execution.kernels == "eager"
        assert rows.shape_of(row).fused_norm == (said == "True")


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({"framework": "nemo"}, "flash"),
        ({"framework": "nemo", "attention_kernel": "flash_attention2"}, "flash-v2"),
        ({"framework": "torchtitan"}, "flash-v2"),
        ({"framework": "torchtitan", "attention_kernel": "flash_attentionv1.0.8"}, "flash-v1"),
        ({"framework": "torchtitan", "attention": "unfused"}, "unfused"),
    ],
)
def test_attention_is_the_kernel_that_the_row_names_or_else_its_framework_s(
    changes: dict[str, str], attention: str
) -> None:
    row = {**FURTHER[0], "attention_kernel": "", **changes}
    assert rows.strategies_of(row)[0].execution.attention == attention


def test_what_a_row_s_reader_assumed_gives_way_to_what_its_launcher_runs() -> None:
    row = next(row for row in published("training_rows") if row["framework"] == "megatron-zb")
    said = {**row, "note": ""}
    assert rows.strategies_of(row)[0].execution.attention == "unfused"
    assert rows.strategies_of(said)[0].execution.attention == "flash"
    assert (rows.shape_of(row).vocab, rows.shape_of(said).vocab) == (32000, int(row["vocab"]))


def test_an_uncertain_gb_is_what_its_authors_count_in() -> None:
    row = next(row for row in published("training_rows") if row["framework"] == "megatron-zb")
    printed = float(row["peak_memory_gib"])
    assert rows.parse(row).peak_memory_gib == pytest.approx(printed * 1e9 / 2**30)
    assert rows.parse({**row, "memory_kind": "torch-allocated"}).peak_memory_gib == printed


def test_runs_whose_project_kept_megatron_s_dropout_have_it() -> None:
    for row in published("training_rows"):
        kept = row["origin"].startswith("bigscience-workshop") or row["framework"] in (
            "megatron-zb",
            "aleph-alpha-scaling",
        )
        assert (rows.shape_of(row).dropout > 0) == kept, row["id"]


def test_only_runs_that_said_so_waited_for_each_kernel() -> None:
    waiting = {row["source"] for row in published("training_rows") if row["origin"].find("tr11-176B-ml") >= 0}
    for row in published("training_rows")[::50]:
        if not row["note"].startswith("LoRA"):
            (strategy, *_) = rows.strategies_of(row)
            assert strategy.execution.blocking_launches == (row["source"] in waiting)


def test_full_precision_fsdp_holds_and_reduces_in_fp32_and_pure_fsdp_in_half_precision() -> None:
    def dtypes(framework: str) -> tuple[str, str, bool]:
        row = next(row for row in FURTHER if row["zero"] == "3")
        execution = rows.strategies_of({**row, "framework": framework})[0].execution
        return execution.param_dtype, execution.grad_dtype, execution.master_weights

    assert dtypes("torchtitan") == ("fp32", "fp32", False)
    assert dtypes("kempnerforge") == ("bf16", "fp32", False)
    assert dtypes("composer-fsdp") == ("bf16", "bf16", False)


def test_tensor_parallelism_of_block_scaled_products_stands_in_line() -> None:
    row = {
        **next(r for r in FURTHER if r["framework"] == "nemo" and int(r["tp"]) > 1),
        "sequence_parallel": "True",
    }
    asynchronous = {
        dtype: rows.strategies_of({**row, "dtype": dtype})[0].execution.async_tp
        for dtype in ("bf16", "fp8", "fp8-mx", "nvfp4")
    }
    assert asynchronous == {"bf16": True, "fp8": True, "fp8-mx": False, "nvfp4": False}


def test_dropout_of_a_code_base_is_in_the_model_and_in_what_attention_keeps() -> None:
    row = {**FURTHER[0], "framework": "aleph-alpha-scaling"}
    assert rows.shape_of(row).dropout == rows.strategies_of(row)[0].execution.dropout == 0.1
    assert rows.shape_of({**row, "framework": "nemo"}).dropout == 0.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"family": "qwen"}, "family is qwen: the benchmark knows gpt"),
        ({"mlp": ""}, "mlp is not stated"),
        ({"layers": "many"}, "layers is many: a number is needed"),
        ({"devices_per_node": "0"}, "devices_per_node is 0: a whole number of at least 1"),
        ({"micro_batch": "1.5"}, "micro_batch is 1.5: a whole number"),
        ({"dtype": "int8"}, "dtype is int8: the benchmark knows fp32"),
        ({"attention": "sdpa"}, "attention is sdpa"),
        ({"kernels": "slow"}, "kernels is slow"),
        ({"recompute": "block"}, "recompute is block"),
        ({"outcome": "lost"}, "outcome is lost"),
        ({"peak_memory_gib": "much"}, "peak_memory_gib is much"),
        ({"dp_shard": "7"}, "the mesh has"),
    ],
)
def test_a_row_that_says_what_is_not_known_is_refused_by_name(changes: dict[str, str], says: str) -> None:
    with pytest.raises(rows.Unscorable, match=says):
        rows.parse({**FURTHER[0], **changes}, [DEVICES])


def test_ranks_that_a_row_does_not_speak_of_are_replicas() -> None:
    row = published("training_rows")[0]
    silent = {key: text for key, text in row.items() if key not in ("dp_replicate", "dp_shard")}
    mesh = rows.parse({**silent, "zero": "0"}).strategies[0].mesh
    assert mesh.devices == int(row["devices"])
    assert (mesh.tp, mesh.pp, mesh.dp_shard) == (int(row["tp"]), int(row["pp"]), 1)


def test_what_a_note_says_of_experts_tokens_is_done() -> None:
    by_id = {row["id"]: rows.strategies_of(row)[0] for row in RELEASED if "modelzoo" in row["id"]}
    merged = {name: strategy.execution.merged_dispatch for name, strategy in by_id.items()}
    assert merged == {f"new:modelzoo:{i}": i != 3 for i in range(7)}
    assert [name for name, s in by_id.items() if s.execution.hidden_dispatch] == [
        "new:modelzoo:1",
        "new:modelzoo:6",
    ]


def test_runs_that_held_less_than_a_strategy_can_say_do_not_judge_what_fits() -> None:
    parsed = [rows.parse(row, [DEVICES]) for row in RELEASED if row["id"] not in rows.SET_ASIDE]
    assert {run.source for run in parsed if not run.fits_judged} == {
        "LLMQ benchmarks (4090, L40S, H100)", "Megatron-MoE-ModelZoo, Qwen3-235B",
    }  # fmt: skip


def test_a_launcher_says_what_rows_took_for_likely() -> None:
    rows_of = {
        row["id"]: rows.parse(row) for row in published("training_rows") if row["framework"] == "megatron-vp"
    }
    paper, artifact = rows_of["vocab_parallel_pp_a100:3"], rows_of["vocab_parallel_pp_a100:183"]
    assert paper.shape == artifact.shape
    assert paper.shape.vocab == 256_000
    assert {run.strategies[0].execution.grad_dtype for run in rows_of.values()} == {"fp16"}
    assert (paper.memory_kind, artifact.memory_kind) == ("torch-allocated-gb", "torch-reserved-gb")
