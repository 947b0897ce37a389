from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoparallel.errors import UserError
from autoparallel.planner.strategy.file import (
    apply_settings,
    missing_keys,
    parse_strategy,
    read_strategy_file,
    strategy_from_constraints,
    strategy_to_constraints,
    write_strategy,
)
from autoparallel.planner.strategy.types import (
    AXES,
    SCHEDULES,
    Batch,
    Execution,
    GradSync,
    Mesh,
    Offload,
    Pipeline,
    Recompute,
    Shard,
    Strategy,
    TensorRule,
)
from autoparallel.planner.strategy.write import check_writable, literal, strategy_text, write_text

STRATEGY = Strategy(
    batch=Batch(global_=512, micro=1),
    mesh=Mesh(pp=8, dp_shard=8, tp=8),
    shard=Shard(zero=1, sequence_parallel=True),
    pipeline=Pipeline(schedule="1f1b", virtual_stages=1, stage_blocks=(12,) * 8),
    recompute=Recompute(mode="selective"),
    grad_sync=GradSync(compression=("none", "bf16")),
    tensor=(
        TensorRule(
            module="model.layers.*.mlp.down_proj",
            params=(("weight", "shard(1)"), ("bias", "replicate")),
            inputs=(("input", "shard(-1)"),),
            outputs=("shard(1)",),
        ),
    ),
)
PROBLEM = {
    "model": "hf:config.json",
    "graph_hash": "abc",
    "seq_len": 8192,
    "objective": "time",
    "cluster": {
        "schema": 1,
        "name": "two racks",
        "group": [{"device": {"name": "x", "bytes": {"value": 8.5e10, "kind": "datasheet"}}, "nodes": 16}],
    },
}

_degrees = st.integers(1, 64)
_texts = st.text(max_size=12)
_layouts = st.one_of(
    st.sampled_from(["replicate", "partial"]), st.integers(-3, 3).map(lambda dim: f"shard({dim})")
)
_pairs = st.dictionaries(_texts, _layouts, max_size=3).map(lambda d: tuple(d.items()))
_rules = st.builds(
    TensorRule, module=_texts, params=_pairs, inputs=_pairs, outputs=st.lists(_layouts, max_size=2).map(tuple)
)
_strategies = st.builds(
    Strategy,
    batch=st.builds(Batch, global_=_degrees, micro=_degrees),
    mesh=st.builds(
        Mesh,
        pp=_degrees,
        dp_replicate=_degrees,
        dp_shard=_degrees,
        tp=_degrees,
        order=st.permutations(AXES).map(tuple),
        groups=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    shard=st.builds(Shard, zero=st.integers(0, 3), sequence_parallel=st.booleans()),
    pipeline=st.builds(
        Pipeline,
        schedule=st.sampled_from(SCHEDULES),
        virtual_stages=_degrees,
        stage_blocks=st.lists(st.integers(0, 200), max_size=40).map(tuple),
    ),
    recompute=st.builds(
        Recompute,
        mode=st.sampled_from(["none", "selective", "full"]),
        per_stage=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    ),
    offload=st.builds(Offload, optimizer=st.floats(0, 1), activations=st.floats(0, 1)),
    execution=st.builds(Execution, dropout=st.floats(0, 0.9), master_weights=st.booleans()),
    grad_sync=st.builds(
        GradSync,
        bucket_mib=st.floats(0.1, 1e4),
        overlap=st.booleans(),
        weights=st.sampled_from(["none", "int8", "bf16"]),
        compression=st.lists(st.sampled_from(["none", "bf16", "topk:0.01", "powersgd:4"]), max_size=3).map(
            tuple
        ),
    ),
    tensor=st.lists(_rules, max_size=3).map(tuple),
)


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@given(_strategies)
def test_what_is_written_reads_back_as_the_same_strategy(strategy: Strategy) -> None:
    text = strategy_text(strategy, PROBLEM, {"step_time_s": 1.5}, {"status": "optimal"})
    parsed = parse_strategy(tomllib.loads(text), name="strategy.toml")
    assert missing_keys(parsed.constraints) == (), text
    assert strategy_from_constraints(parsed.constraints) == strategy, text


@given(
    st.recursive(
        st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False), st.text()),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    )
)
def test_every_literal_is_toml_for_the_same_value(value: object) -> None:
    assert tomllib.loads(f"x = {literal(value)}")["x"] == value


_data = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
)


@given(st.dictionaries(st.text(max_size=5), _data, max_size=5))
def test_any_plain_data_in_search_reads_back(data: dict[str, object]) -> None:
    text = strategy_text(STRATEGY, {}, {}, data)
    assert tomllib.loads(text).get("search", {}) == data, text


def test_a_file_stands_alone_with_its_problem_and_cluster(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    write_strategy(path, STRATEGY, PROBLEM, {"step_time_s": 1.5}, {"status": "optimal"})
    parsed = read_strategy_file(path)
    assert parsed.problem is not None
    assert (parsed.problem.model, parsed.problem.seq_len) == ("hf:config.json", 8192)
    assert parsed.problem.cluster == PROBLEM["cluster"], path.read_text()
    assert parsed.predicted == {"step_time_s": 1.5}
    assert parsed.search == {"status": "optimal"}
    assert not any(key.startswith(("problem", "predicted", "search")) for key in parsed.constraints)


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_strategy(tmp_path / name, STRATEGY, PROBLEM, {"t": 0.1}, {"n": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_constraints_and_strategies_are_inverse() -> None:
    assert strategy_from_constraints(strategy_to_constraints(STRATEGY)) == STRATEGY


def test_an_empty_placement_says_no_more_than_none(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[mesh]\nplacement = []\ntp = 2\n", encoding="utf-8")
    assert read_strategy_file(path).constraints == {"mesh.tp": 2}


def test_a_partial_file_constrains_only_what_it_says(tmp_path: Path) -> None:
    path = _write(tmp_path / "p.toml", 'schema = 1\n[batch]\nglobal = 64\n[mesh]\ntp = 8\norder = ["tp", '
                  '"pp", "dp_replicate", "dp_shard", "cp"]\n')  # fmt: skip
    assert read_strategy_file(path).constraints == {
        "batch.global": 64,
        "mesh.tp": 8,
        "mesh.order": ("tp", "pp", "dp_replicate", "dp_shard", "cp"),
    }
    with pytest.raises(UserError, match=r"not a complete strategy.*batch\.micro"):
        strategy_from_constraints(read_strategy_file(path).constraints)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[mesh]\ntpp = 8\n", ["[mesh] tpp", 'did you mean "tp"']),
        ("[mash]\ntp = 8\n", ["mash", 'did you mean "mesh"']),
        ("[mesh]\nmicro = 8\n", ["[mesh] micro", "belongs under [batch]"]),
        ("tp = 8\n", ["tp", "belongs under [mesh]"]),
        ('[mesh]\ntp = "8"\n', ['[mesh] tp = "8"', "whole number"]),
        ("[mesh]\ntp = 0\n", ["[mesh] tp = 0", "at least 1"]),
        ("[mesh]\ntp = 100000000000000000000\n", ["[mesh] tp", "at most 2147483647"]),
        ("[grad_sync]\nbucket_mib = inf\n", ["[grad_sync] bucket_mib = inf", "a finite number"]),
        ('[grad_sync]\ncompression = ["topk:0.0"]\n', ["compression entry 1", "topk:RATIO"]),
        ("[mesh]\ntp = true\n", ["[mesh] tp = true", "whole number"]),
        ("[mesh]\ntp = 2.5\n", ["[mesh] tp = 2.5", "whole number"]),
        ('[mesh]\norder = ["tp", "pp"]\n', ["[mesh] order", "exactly once"]),
        ("mesh = 3\n", ["[mesh] = 3", "table"]),
        ("[shard]\nzero = 4\n", ["[shard] zero = 4", "at most 3"]),
        ('[shard]\nsequence_parallel = "yes"\n', ["sequence_parallel", "true or false"]),
        ('[pipeline]\nschedule = "1f1bb"\n', ["[pipeline] schedule", 'did you mean "1f1b"']),
        ("[pipeline]\nstage_blocks = 4\n", ["[pipeline] stage_blocks = 4", "a list"]),
        ('[grad_sync]\ncompression = ["int3"]\n', ["compression entry 1", "powersgd:RANK"]),
        ('[[tensor]]\nmodule = "m"\nparam = { }\n', ["[[tensor]] entry 1 param", 'did you mean "params"']),
        ('[[tensor]]\nmodule = "m"\nparams = { weight = "shard" }\n', ["shard(DIM)"]),
        ("[[tensor]]\nparams = { }\n", ["[[tensor]] entry 1 module", "is missing"]),
        ("schema = 2\n", ["schema = 2", "update autoparallel"]),
        ('schema = "1"\n', ["schema = '1'", "must be 1"]),
        ("[mesh\n", ["not valid TOML", "line 1"]),
    ],
)
def test_a_mistake_names_the_file_the_key_and_the_remedy(tmp_path: Path, text: str, words: list[str]) -> None:
    path = _write(tmp_path / "bad.toml", text)
    with pytest.raises(UserError) as error:
        read_strategy_file(path)
    for word in [str(path), *words]:
        assert word in str(error.value), str(error.value)


def test_missing_folders_and_binary_files_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such strategy file"):
        read_strategy_file(tmp_path / "none.toml")
    with pytest.raises(UserError, match="is a folder"):
        read_strategy_file(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="UTF-8"):
        read_strategy_file(tmp_path / "b.toml")


def test_settings_add_constraints_of_the_right_type() -> None:
    settings = [
        "mesh.tp=8",
        "pipeline.schedule=1f1b",
        "shard.sequence_parallel=true",
        "pipeline.stage_blocks=[2, 2]",
    ]
    assert apply_settings({"batch.global": 4}, settings) == {
        "batch.global": 4,
        "mesh.tp": 8,
        "pipeline.schedule": "1f1b",
        "shard.sequence_parallel": True,
        "pipeline.stage_blocks": (2, 2),
    }


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("mesh.tp=4", ["contradicts", "mesh.tp = 8"]),
        ("mesh.tpp=8", ["mesh.tpp", 'did you mean "mesh.tp"']),
        ("tp=8", ['did you mean "mesh.tp"']),
        ("mesh.pp=many", ['[mesh] pp = "many"', "whole number"]),
        ("mesh.tp", ["KEY=VALUE"]),
        ("problem.seq_len=1", ["[problem]", "cannot be set"]),
    ],
)
def test_a_wrong_setting_is_refused_with_a_remedy(setting: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        apply_settings({"mesh.tp": 8}, [setting])
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_setting_that_agrees_with_the_file_is_no_contradiction() -> None:
    assert apply_settings({"mesh.tp": 8}, ["mesh.tp=8"]) == {"mesh.tp": 8}


def test_unwritable_paths_are_found_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        check_writable(tmp_path / "no" / "s.toml")
    check_writable(tmp_path / "s.toml")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = _write(tmp_path / "s.toml", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")  # a lone surrogate cannot be encoded
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["s.toml"]


def test_the_file_reads_like_one_a_person_wrote() -> None:
    text = strategy_text(replace(STRATEGY, tensor=()), PROBLEM, {}, {})
    assert "stage_blocks = [12, 12, 12, 12, 12, 12, 12, 12]" in text, text
    assert "tp = 8                             # tensor parallelism" in text, text
    assert text.index("[batch]") < text.index("[mesh]") < text.index("[problem.cluster]"), text
