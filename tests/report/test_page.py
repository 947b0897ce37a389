from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autoparallel.costmodel.prediction import BREAKDOWN_KEYS
from autoparallel.errors import UserError
from autoparallel.labels import strategy_label
from autoparallel.planner.explain.reasons import WORDS
from autoparallel.planner.strategy.file import read_strategy_file
from autoparallel.planner.strategy.types import Mesh, Offload, Recompute
from autoparallel.profiles import load_cluster
from autoparallel.report.page import render_report
from autoparallel.report.words import choices
from tests.report.sample import strategy, write_sample

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Collects every attribute that could load something, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action", "srcset"):
                self.loads.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 8), (4, 16), (8, 256)])
def test_the_page_is_whole_and_loads_nothing(tmp_path: Path, pp: int, micro_batches: int) -> None:
    path = write_sample(tmp_path / "s.toml", pp=pp, micro_batches=micro_batches)
    html = render_report(read_strategy_file(path))
    page = Page(html)
    assert page.open == []
    assert [url for url in page.loads if not url.startswith(("data:", "#"))] == []
    assert not re.search(r"url\(|@import|<script|http[s]?://", html)
    assert len(html) < 1_000_000
    for part in ("strategy", "time", "memory", "timeline", "candidates", "alternatives", "sources"):
        assert part in page.ids, part


def test_the_page_says_what_the_file_says(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "s.toml")
    text = Page(render_report(read_strategy_file(path))).text
    for words in (
        "llama-3.1-8b on 16 h100-sxm (2 nodes of 8)",
        "The 32 blocks are cut into 4 stages (each 8)",
        "over infiniband (50.0 GB/s per device and direction; 4 devices apart)",
        "over nvlink (450 GB/s per device and direction; side by side)",
        "48,211 strategies were considered",
        "the search ended with a proof",
        "dp_shard 16, zero 0, micro 1",
        "NVIDIA H100 Tensor Core GPU datasheet",
        "Gradients are rounded to 16 bits",
    ):
        assert words in re.sub(r"\s+", " ", text), words


def test_every_part_of_a_step_has_its_colour_and_its_words(tmp_path: Path) -> None:
    html = render_report(read_strategy_file(write_sample(tmp_path / "s.toml")))
    assert [key for key in BREAKDOWN_KEYS if f".{key} {{ fill" not in html] == []
    assert [key for key in BREAKDOWN_KEYS if key not in WORDS] == []


def test_what_is_on_the_host_and_what_is_recomputed_are_told_without_contradiction() -> None:
    cluster = load_cluster("h100-sxm:2x8")
    given = replace(
        strategy(pp=1, micro_batches=8),
        mesh=Mesh(dp_shard=4, cp=2, tp=2, ep=4),
        offload=Offload(optimizer=1.0, activations=0.5),
        recompute=Recompute(mode="none", per_stage=(16,)),
    )
    told = {choice.name: choice for choice in choices(given, cluster, {})}
    assert "optimizer state, 50 % of the activations" in told["Offload"].text
    assert told["Recomputation"].setting == "none, 16 blocks in full"
    assert told["Recomputation"].text.startswith("16 blocks recomputed in full")
    assert "Every activation" not in told["Recomputation"].text
    assert "divided among their 8 ranks" in told["Sharded data parallelism"].text
    assert told["Expert parallelism"].setting == "ep = 4"
    assert "on the host: optimizer state" in strategy_label(given)


def test_text_from_the_file_is_escaped(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "s.toml")
    path.write_text(path.read_text().replace("llama-3.1-8b", "<script>alert(1)</script>"))
    html = render_report(read_strategy_file(path))
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_a_hand_written_file_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text("[mesh]\ntp = 2\n")
    with pytest.raises(UserError, match=r"no \[predicted\].*plan"):
        render_report(read_strategy_file(path))


def test_a_damaged_prediction_is_refused_with_a_remedy(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "s.toml")
    damaged = [line for line in path.read_text().splitlines() if not line.startswith("step_time_s")]
    path.write_text("\n".join(damaged))
    tomllib.loads(path.read_text())
    with pytest.raises(UserError, match="plan again"):
        render_report(read_strategy_file(path))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_renders_it_without_errors_or_requests(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "s.toml")
    page = tmp_path / "report.html"
    page.write_text(render_report(read_strategy_file(path)), encoding="utf-8")
    net_log = tmp_path / "net.json"
    done = subprocess.run(
        [
            str(CHROMIUM), *CHROMIUM_FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--log-net-log={net_log}",
            "--enable-logging=stderr", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert done.stdout.count("<rect") > 100
    assert 'id="sources"' in done.stdout
    requests = set(re.findall(r'"url":"((?:https?|ftp|wss?):[^"]*)"', net_log.read_text()))
    own = {url for url in requests if not re.match(r"https?://[^/]*(google|gstatic|googleapis)\.com", url)}
    assert own == set(), "the page asked for something"


def test_the_price_of_constraints_and_of_less_memory_stand_on_the_page(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "s.toml")
    text = path.read_text()
    extra = (
        "[[search.constraints]]\nkey = 'mesh.tp'\nvalue = 4\ninstead = 1\ncost = 0.273\nat_most = 0.3\n"
        "proved = false\nstep_time_s = 1.0\nlabel = 'dp_shard 16'\n"
        "[[search.tradeoffs]]\nstep_time_s = 1.0\npeak_memory_gib = 60.0\ndevices = 16\ndevice_cost = 16.0\nlabel = 'a'\n"
        "[[search.tradeoffs]]\nstep_time_s = 2.0\npeak_memory_gib = 30.0\ndevices = 8\ndevice_cost = 16.0\nlabel = 'b'\n"
    )
    path.write_text(text + "\n" + extra)
    page = Page(render_report(read_strategy_file(path)))
    assert "mesh.tp = 4 costs you 27.3 % against 1 (dp_shard 16), and no more than 30.0 %" in page.text
    assert "With less memory, or fewer devices" in page.text


def test_every_label_says_something(tmp_path: Path) -> None:
    html = render_report(read_strategy_file(write_sample(tmp_path / "s.toml")))
    assert "chosen: :" not in html
    assert f"chosen: {strategy_label(strategy(pp=4, micro_batches=16))}: " in html
