from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from autoparallel.errors import UserError
from autoparallel.planner.strategy.types import Batch, Strategy
from autoparallel.planner.strategy.write import strategy_text
from autoparallel.profiles import Cluster, cluster_names, cluster_to_dict, load_cluster
from autoparallel.profiles.record import cluster_hash, cluster_record, recorded_cluster, recorded_hash

SPECS = (*cluster_names(), "h100-sxm:2x8", "cpu-gloo:1x4")


def own(cluster: Cluster, **changes: float) -> Cluster:
    """The cluster with a device of the user's own in its first group."""
    first, *rest = cluster.groups
    device = replace(first.device, name="mine", constants={**first.device.constants, **changes})
    return replace(cluster, name="my racks", groups=(replace(first, device=device), *rest))


def in_a_file(record: dict[str, object]) -> dict[str, object]:
    """The record as a strategy file gives it back."""
    text = strategy_text(Strategy(batch=Batch(global_=1, micro=1)), {"cluster": record}, {}, {})
    table: dict[str, object] = tomllib.loads(text)["problem"]["cluster"]
    return table


@pytest.mark.parametrize("spec", SPECS)
def test_what_ships_is_named_and_comes_back(spec: str) -> None:
    cluster = load_cluster(spec)
    record = cluster_record(cluster)
    assert record == {"name": cluster.name, "hash": cluster_hash(cluster)}
    assert recorded_cluster(in_a_file(record), "s.toml") == cluster


@pytest.mark.parametrize("spec", SPECS)
def test_an_embedded_cluster_comes_back_figure_by_figure(spec: str) -> None:
    cluster = load_cluster(spec)
    table = in_a_file(cluster_record(cluster, embed=True))
    assert cluster_hash(recorded_cluster(table, "s.toml")) == cluster_hash(cluster), table
    mine = own(cluster, **{"host.bytes_per_s": 1e9})
    table = in_a_file(cluster_record(mine))
    assert cluster_hash(recorded_cluster(table, "s.toml")) == cluster_hash(mine) != cluster_hash(cluster)


def test_an_own_cluster_of_shipped_devices_names_them() -> None:
    racks = replace(load_cluster("dgx-h100"), name="my racks")
    slower = replace(racks, levels=(*racks.levels[:-1], replace(racks.levels[-1], bytes_per_s=1e9)))
    table = in_a_file(cluster_record(slower))
    assert table["group"][0]["device"] == "h100-sxm"  # type: ignore[index]
    assert recorded_cluster(table, "s.toml").levels == slower.levels


def test_figures_that_changed_since_are_refused_with_a_remedy() -> None:
    record = cluster_record(load_cluster("h100-sxm:2x8"))
    with pytest.raises(
        UserError, match=r"s.toml: h100-sxm:2x8 has other figures.*plan again.*--embed-cluster"
    ):
        recorded_cluster({**record, "hash": "0123456789abcdef"}, "s.toml")
    table = cluster_record(own(load_cluster("h100-sxm:2x8")))
    table["level"][-1]["bytes_per_s"] = 1e9
    with pytest.raises(UserError, match=r"s.toml: was edited"):
        recorded_cluster(table, "s.toml")
    assert recorded_cluster(table, "s.toml", checked=False).levels[-1].bytes_per_s == 1e9
    with pytest.raises(UserError, match=r"s.toml: unknown cluster `elsewhere`.*--embed-cluster"):
        recorded_cluster({"name": "elsewhere", "hash": ""}, "s.toml")
    with pytest.raises(UserError, match="no shipped cluster"):
        recorded_cluster({"name": "./mine.toml", "hash": ""}, "s.toml")


def test_files_of_earlier_versions_are_read_as_they_stand() -> None:
    cluster = load_cluster("ring-of-four")
    table = cluster_to_dict(cluster)
    assert (
        cluster_hash(recorded_cluster(table, "s.toml"))
        == recorded_hash(table, "s.toml")
        == cluster_hash(cluster)
    )


def test_a_folder_given_as_a_cluster_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "clusters"
    folder.mkdir()
    with pytest.raises(UserError, match=r"clusters: is a folder; give the cluster file itself$"):
        load_cluster(str(folder))
    (folder / "mine.toml").write_text("schema = 1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"^clusters: is a folder; give the cluster file itself, such as clusters/mine.toml"
    ):
        load_cluster("clusters")
