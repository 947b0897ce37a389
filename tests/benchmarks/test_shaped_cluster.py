"""Clusters of network namespaces: shaped as asked, and gone afterwards, also when their process is killed; what a run over them
says of links that are slow, and down."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from autoparallel.runtime.monitor.record import read_record
from benchmarks.shaped_cluster import SUBNET, Links, Shape, missing_means, spearman

WHY = missing_means()
needs_root = pytest.mark.skipif(WHY is not None, reason=str(WHY))
SHAPE = Shape(nodes=3, per_node=1, rates=(80.0,), spine=8.0)
MESSAGE = 400_000  # bytes, more than the buckets let pass at once


def _there() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def _seconds(links: Links, source: int, target: int) -> float:
    """Of a message from one node to another, by TCP."""
    code = "import socket,sys;s=socket.create_server(('',4711));c=s.accept()[0];n=0\nwhile n<{n}: n+=len(c.recv(65536))\nc.send(b'x')"
    receiver = subprocess.Popen(
        ["ip", "netns", "exec", links.node(target), sys.executable, "-c", code.replace("{n}", str(MESSAGE))]
    )
    sender = (
        f"import socket,time\nfor _ in range(100):\n try: c=socket.create_connection(('{SUBNET}.{target + 1}',4711)); break\n"
        f" except OSError: time.sleep(0.05)\nt=time.perf_counter();c.sendall(bytes({MESSAGE}));c.recv(1);print(time.perf_counter()-t)"
    )
    done = subprocess.run(
        ["ip", "netns", "exec", links.node(source), sys.executable, "-c", sender],
        capture_output=True,
        text=True,
        check=True,
    )
    receiver.wait(timeout=120)
    return float(done.stdout)


@needs_root
def test_links_carry_what_they_are_shaped_to() -> None:
    with Links(SHAPE) as links:
        inside, through = _seconds(links, 0, 1), _seconds(links, 0, 2)
    for seconds, rate in ((inside, 80e6), (through, 8e6)):
        assert 0.6 * MESSAGE * 8 / rate < seconds
    assert through > 4 * inside
    assert not any(name in _there() for name in links.namespaces)


@needs_root
def test_nothing_is_left_of_a_cluster_whose_process_is_killed() -> None:
    code = (
        "import time\nfrom benchmarks.shaped_cluster import Links, Shape\n"
        "with Links(Shape(nodes=2, per_node=1, rates=(100.0,))) as links:\n"
        " print(*links.namespaces, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    names = process.stdout.readline().split()
    assert len(names) == 3
    assert all(name in _there() for name in names)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 120
    while any(name in _there() for name in names):
        assert time.monotonic() < deadline, "namespaces outlive their process"
        time.sleep(0.1)


def _until(file: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not file.exists() or int(file.read_text() or "0") < step:
        assert time.monotonic() < deadline, f"step {step} was not done"
        time.sleep(0.05)


@needs_root
@pytest.mark.distributed
def test_a_slow_link_is_named_with_what_it_costs_and_a_parted_network_on_every_rank(tmp_path: Path) -> None:
    step, timeout_s = tmp_path / "step", 4
    with Links(Shape(nodes=3, per_node=1, rates=(200.0,))) as links:
        ended = links.start("-m", "tests.runtime.train_links", str(tmp_path), "100000", str(timeout_s))
        _until(step, 45)
        links.reshape(20.0, [2])
        slowed = int(step.read_text())
        _until(step, slowed + 40)
        links.part(1)
        outputs = ended()
    (record,) = read_record(tmp_path / "run")
    (told,) = [entry for entry in record.said if ", at rank 2 (node 2), " in entry["text"]]
    assert slowed < told["step"] <= slowed + 40
    costs_s = float(told["text"].split("costs up to ")[1].split(" s")[0])
    before, after = (
        median(s["seconds"] for s in steps)
        for steps in (record.steps[5:slowed], record.steps[told["step"] :])
    )
    assert 0.4 < costs_s / (after - before) < 1.6
    reached = [("0", "rank 1"), ("1", "ranks 0, 2"), ("2", "rank 1")]
    for (code, output), (rank, lost) in zip(outputs, reached, strict=True):
        assert code == 1
        # whoever is first closes its connections: to the others the step has failed before its time is over
        assert re.search(
            rf"error: (no step in {timeout_s} s: )?rank {rank} in step [^;]* cannot reach {lost} \(", output
        )


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
