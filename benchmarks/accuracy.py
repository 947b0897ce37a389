"""Predictions against published measurements: `python benchmarks/accuracy.py ROWS.csv … [--json OUT.json]`.

Scores every row through `planner.score`, prints predicted, measured and error per source (per row with
--rows), lists what cannot be scored with the reason, and writes JSON and a scatter plot.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autoparallel.costmodel.calibrate import calibrate
from autoparallel.costmodel.graph import ModelGraph
from autoparallel.costmodel.graph_json import graph_from_json, graph_to_json
from autoparallel.costmodel.prediction import Prediction
from autoparallel.errors import UserError
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.score import score
from autoparallel.planner.strategy.types import Strategy
from autoparallel.profiles.hardware import Cluster, Device
from benchmarks.beside import held_bytes, shown_bytes
from benchmarks.losses import with_fused_loss
from benchmarks.models import Shape, build
from benchmarks.rows import Row, Run, Unscorable, parse, read_rows
from benchmarks.summary import Scored, summarise

GIB = 2**30
CAPTURED_LAYERS = 2
DEVICES = Path(__file__).parent / "published" / "devices"  # of published runs, beside those that ship


@dataclass(slots=True)
class Graphs:
    """Captured graphs by shape: captured once at two layers, grown to any depth, kept on disk if asked."""

    cache: Path | None
    known: dict[Shape, ModelGraph] = field(default_factory=dict)

    def of(self, shape: Shape, layers: int) -> ModelGraph:
        if shape not in self.known:
            graph = self._load(shape)
            self.known[shape] = with_fused_loss(graph) if shape.loss == "half" else graph
        return grown(self.known[shape], layers)

    def _load(self, shape: Shape) -> ModelGraph:
        import hashlib

        path = None
        if self.cache is not None:
            key = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
            path = self.cache / f"{key}.json"
            if path.exists():
                return graph_from_json(path.read_text())
        from autoparallel.planner.capture import capture

        module, inputs = build(shape, CAPTURED_LAYERS)
        graph = capture(module, inputs, name=shape.family)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(graph_to_json(graph))
        return graph


def grown(graph: ModelGraph, layers: int) -> ModelGraph:
    """The same model with `layers` repeated blocks: the captured ones are all alike."""
    first, *_, last = graph.repeated_positions
    link = graph.chain[first]
    middle = tuple(replace(link, path=f"layers.{i}") for i in range(layers))
    return replace(graph, chain=(*graph.chain[:first], *middle, *graph.chain[last + 1 :]))


@dataclass(slots=True)
class Scorer:
    """Scores runs; one expander per graph and cluster, so that a sweep prices each block once."""

    graphs: Graphs
    expanders: dict[tuple[Shape, int, str], Expander] = field(default_factory=dict)

    def predict(self, run: Run, cluster: Cluster | None = None) -> Prediction:
        """What the first of the run's strategies that fits needs; the last if none does."""
        return self.chosen(run, cluster)[1]

    def chosen(self, run: Run, cluster: Cluster | None = None) -> tuple[Strategy, Prediction]:
        """The first of the run's strategies that fits, or the last if none does, and its prediction."""
        cluster = cluster or run.cluster
        graph = self.graphs.of(run.shape, run.layers)
        key = (run.shape, run.layers, repr((cluster.name, cluster.levels)))
        expander = self.expanders.get(key)
        if expander is None or (expander.cluster is not cluster and expander.cluster != cluster):
            self.expanders.clear()  # rows come sorted by source and model: keep one
            expander = self.expanders[key] = Expander(graph, cluster)
        for strategy in run.strategies:
            prediction = score(graph, cluster, strategy, expander=expander)
            if prediction.feasible:
                break
        return strategy, prediction

    def scored(self, run: Run) -> Scored:
        strategy, prediction = self.chosen(run)
        held = held_bytes(prediction, strategy, run.beside(strategy), run.shape)
        return Scored(
            id=run.id,
            source=run.source,
            group=run.group,
            outcome=run.outcome,
            predicted_s=prediction.step_time_s,
            measured_s=run.step_time_s,
            feasible=prediction.feasible,
            predicted_gib=shown_bytes(held, run.memory_kind, run.cluster.device) / GIB,
            measured_gib=run.peak_memory_gib,
            memory_kind=run.memory_kind,
            fits_judged=run.fits_judged,
            mfu=prediction.mfu,
        )


def spread(count: int, wanted: int) -> list[int]:
    """`wanted` positions of `count`, evenly spread, the first and the last among them."""
    if wanted >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)})


def with_device(cluster: Cluster, device: Device) -> Cluster:
    """The same cluster of another device."""
    return replace(cluster, groups=tuple(replace(group, device=device) for group in cluster.groups))


def calibrated(runs: Sequence[Run], scorer: Scorer, rows: int) -> list[Run]:
    """All runs but an even spread of `rows` of each source and device, on which that device was corrected."""
    kept: list[Run] = []
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.source, run.cluster.device.name), []).append(run)
    for (source, _), group in groups.items():
        timed = [run for run in group if run.outcome == "ok" and run.step_time_s]
        chosen = [timed[i] for i in spread(len(timed), rows)]
        ids = {run.id for run in chosen}
        rest = [run for run in group if run.id not in ids]
        if chosen and rest:

            def predict(device: Device, chosen: list[Run] = chosen) -> list[float]:
                return [scorer.predict(run, with_device(run.cluster, device)).step_time_s for run in chosen]

            result = calibrate(
                chosen[0].cluster.device,
                predict,
                [run.step_time_s or 0.0 for run in chosen],
                source=f"{len(chosen)} rows of {source}",
            )
            print(f"calibrated {source[:40]}: " + ", ".join(f"{k} x {v:.3f}" for k, v in result.factors))
            rest = [replace(run, cluster=with_device(run.cluster, result.device)) for run in rest]
        kept += rest
    return kept


def score_rows(
    rows: Sequence[Row], scorer: Scorer, dirs: Sequence[Path], calibrate_rows: int = 0, leave_out: str = ""
) -> tuple[list[Scored], list[dict[str, str]]]:
    """Every row scored, or skipped with the reason."""
    scored: list[Scored] = []
    skipped: list[dict[str, str]] = []
    runs: list[Run] = []

    def skip(row_id: str, group: str, error: Exception) -> None:
        skipped.append({"id": row_id, "group": group, "skipped": str(error)})

    for row in rows:
        try:
            runs.append(parse(row, dirs))
        except (Unscorable, UserError) as error:
            skip(row.get("id") or "", row.get("group") or "", error)
    if leave_out:
        from benchmarks.leave_out import left_out

        runs = left_out(rows, runs, leave_out, dirs, scorer.graphs.cache)
    if calibrate_rows:
        runs = calibrated(runs, scorer, calibrate_rows)
    for run in runs:
        try:
            scored.append(scorer.scored(run))
        except UserError as error:
            skip(run.id, run.group, error)
    return scored, skipped


def as_json(scored: Sequence[Scored], skipped: Sequence[dict[str, str]]) -> dict[str, object]:
    """The object that --json writes."""
    rows: list[dict[str, object]] = [
        {
            "id": r.id,
            "group": r.group,
            "predicted_step_time_s": r.predicted_s,
            "measured_step_time_s": r.measured_s,
            "feasible": r.feasible,
            "predicted_peak_memory_gib": r.predicted_gib,
            "measured_peak_memory_gib": r.measured_gib,
        }
        for r in scored
    ]
    return {"rows": [*rows, *skipped], "summary": summarise(scored)}


def print_table(scored: Sequence[Scored], skipped: Sequence[dict[str, str]], *, each_row: bool) -> None:
    """The summary per source as a table on standard output."""
    if each_row:
        for r in scored:
            error = "" if r.error is None else f"{100 * r.error:+7.1f} %"
            measured = "" if r.measured_s is None else f"{r.measured_s:10.4f}"
            print(
                f"{r.id:40} {r.predicted_s:10.4f} {measured:>10} {error:>9} {r.outcome} {r.predicted_gib:6.1f} GiB fits={r.feasible}"
            )
    summary = summarise(scored)
    print(f"{'source':62} rows   mae   p95  bias   tau  near  fit ok")
    sources = summary["sources"]
    assert isinstance(sources, dict)
    for name, s in sources.items():
        if not s["rows"]:
            continue
        order = s["order"]
        tau = (
            f"{order['kendall_tau']:5.2f} {order['fastest_within_3_percent']:5.2f}"
            if order["groups"]
            else " " * 11
        )
        print(
            f"{name[:62]:62} {s['rows']:4} {100 * s['mean_absolute_error']:5.1f} {100 * s['p95_absolute_error']:5.1f}"
            f" {100 * s['bias']:+5.1f} {tau} {s['fit']['accuracy']:6.3f}"
        )
    print(json.dumps(summary["overall"], indent=1))
    reasons: dict[str, list[str]] = {}
    for entry in skipped:
        reasons.setdefault(entry["skipped"], []).append(entry["id"])
    for reason, ids in reasons.items():
        print(f"skipped {len(ids)} rows ({', '.join(ids[:3])}{', …' if len(ids) > 3 else ''}): {reason}")


def print_publishers(scored: Sequence[Scored]) -> None:
    """The summary per publisher on standard output."""
    from benchmarks.leave_out import publisher_summary

    summary = publisher_summary(scored)
    table = {**summary["publishers"], "mean over publishers": {"rows": len(scored), **summary["mean"]}}
    for name, s in table.items():
        figures = "".join(
            f" {100 * s[key]:+6.1f}" for key in ("mean_absolute_error", "p95_absolute_error", "bias")
        )
        print(f"{name:24} {s['rows']:5}{figures}")


def order_cells(order: Mapping[str, float]) -> str:
    """Two table cells: Kendall's tau, and how often the strategy predicted fastest is nearly the fastest."""
    if not order["groups"]:
        return "|"
    return f"{order['kendall_tau']:.2f} | {order['fastest_within_3_percent']:.0%}"


def markdown(scored: Sequence[Scored], skipped: Sequence[dict[str, str]]) -> str:
    """The summary as a Markdown table: what docs/accuracy.md holds."""
    summary = summarise(scored)
    sources, overall = summary["sources"], summary["overall"]
    assert isinstance(sources, dict)
    assert isinstance(overall, dict)
    lines = [
        "| source | rows | mean abs. error | 95th percentile | bias | order (Kendall's tau) | fastest found |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, s in sources.items():
        if s["rows"]:
            lines.append(
                f"| {name} | {s['rows']} | {s['mean_absolute_error']:.1%} | {s['p95_absolute_error']:.1%} "
                f"| {s['bias']:+.1%} | {order_cells(s['order'])} |"
            )
    means, fit, interval = overall["mean_over_sources"], overall["fit"], overall["interval"]
    lines.append(
        f"| **mean over sources** | {len(scored)} | {means['mean_absolute_error']:.1%} "
        f"| {means['p95_absolute_error']:.1%} | {means['bias']:+.1%} "
        f"| {order_cells(overall['order'])} |"
    )
    lines += [
        "",
        f"What fits: {fit['accuracy']:.1%} of {fit['oom_rows'] + fit['ok_rows']} runs told right; "
        f"{fit['oom_called_feasible']:.1%} of the runs that died were called feasible, "
        f"{fit['ok_called_infeasible']:.1%} of those that ran infeasible.",
        "",
        f"Predictions state an interval of {interval['stated']:.0%} either way: {interval['covered']:.0%} of the steps lie within it, "
        f"nine of ten within {interval['nine_of_ten']:.0%} (each source counting alike).",
        "",
        f"{len(skipped)} rows are not scored; the benchmark lists each with its reason.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="write rows and summary here")
    parser.add_argument("--markdown", type=Path, help="write the summary as a Markdown table here")
    parser.add_argument("--plot", type=Path, help="write a scatter plot (HTML) here")
    parser.add_argument("--cluster-dir", type=Path, action="append", default=[], help="more device files")
    parser.add_argument("--rows", dest="each_row", action="store_true", help="print every row")
    parser.add_argument("--cache", type=Path, help="keep captured graphs in this folder")
    parser.add_argument("--only", help="only sources that contain this text")
    parser.add_argument(
        "--calibrate-rows",
        type=int,
        default=0,
        metavar="N",
        help="first correct each source's device on N of its rows; score the rest",
    )
    parser.add_argument(
        "--leave-out",
        choices=("publisher", "generation"),
        default="",
        help="predict each publisher's rows, or each generation's, with constants fitted to all the others",
    )
    options = parser.parse_args()
    start = time.perf_counter()
    rows = [r for r in read_rows(options.rows) if not options.only or options.only in (r.get("source") or "")]
    scorer = Scorer(Graphs(options.cache))
    scored, skipped = score_rows(
        rows, scorer, (*options.cluster_dir, DEVICES), options.calibrate_rows, options.leave_out
    )
    print_table(scored, skipped, each_row=options.each_row)
    print_publishers(scored)
    print(f"{len(scored)} rows in {time.perf_counter() - start:.1f} s")
    if options.json:
        partial = options.json.with_suffix(".partial")
        partial.write_text(json.dumps(as_json(scored, skipped), indent=1))
        partial.replace(options.json)
    if options.markdown:
        options.markdown.write_text(markdown(scored, skipped))
    if options.plot:
        from benchmarks.plot import write_scatter

        write_scatter(options.plot, [asdict(r) for r in scored])


if __name__ == "__main__":
    main()
