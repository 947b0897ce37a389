"""Plans against measured steps on shaped links: `python -m benchmarks.shaped_cluster` (root; iproute2).

Nodes are network namespaces of this machine, each joined to a switch (a bridge in a namespace of its own) by a pair of virtual
interfaces whose two ends pass so many bits a second (`tc tbf`); with --spine half of the nodes hang on a second
switch, behind one link of that rate; --rates may differ from node to node. On each such cluster the benchmark

- runs `autoparallel profile`, and plans with what that wrote: with compression, and without;
- runs the plans and their rivals (plain data parallelism, FSDP2, a flat ring, hierarchical, every method of compression) on
  Gloo, one process of one thread per rank, and prints seconds per step, predicted and measured, the rank correlation, and how far
  the plan is behind the best measured;
- counts the bytes that leave the first node's interface in a step, beside those that are priced.

`python -m benchmarks.break_even` asks on such links at which rate each method stops to pay.

Namespaces and processes go with the benchmark, also when it is killed: a shell waits for its end, and then removes them. What an
interface counts includes the headers of TCP and IP.

Where other work shares the cores, a step also waits for them: the quickest step counts, and how long its slowest rank's main
thread could have run and had no core (schedstat) is shown beside it ("waited"). Predictions know nothing of that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autoparallel import auto_parallelize
from autoparallel.errors import UserError
from autoparallel.planner.capture import capture
from autoparallel.planner.expand.expander import Expander
from autoparallel.planner.outcome import InfeasiblePlan
from autoparallel.planner.plan import plan
from autoparallel.planner.problem import Problem
from autoparallel.planner.score import completed, program_of, score
from autoparallel.planner.strategy.types import Batch, GradSync, Mesh, Shard, Strategy
from autoparallel.profiles import Cluster, load_cluster
from autoparallel.runtime.capabilities.table import limits
from autoparallel.runtime.check.messages import program_messages, sent_bytes
from autoparallel.runtime.limits import refuser
from benchmarks.measured_plans import EXECUTION, LEARNING_RATE
from benchmarks.small_models import MODELS, make

LOSSY = ("bf16", "int8", "int4", "topk:0.01")  # that plans may choose
METHODS = ("bf16", "fp16", "fp8", "int8", "int4", "int2", "sign", "topk:0.01", "powersgd:4")
ROUNDS, WARM_UP, STEPS = 3, 1, 4
INTERFACE = "eth0"
COUNTED = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
SUBNET = "10.91.7"
PORT = 29431
LAUNCH_S = 900.0  # that one launch may take
ROOT = Path(__file__).resolve().parents[1]


Step = tuple[float, float, float]  # seconds, bytes sent, seconds of it waited for a core


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A cluster: rates in Mbit/s, of each node's link, and between the two halves (0: one switch)."""

    nodes: int
    per_node: int
    rates: tuple[float, ...]
    spine: float = 0.0

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def label(self) -> str:
        rates = "/".join(f"{rate:g}" for rate in dict.fromkeys(self.rates))
        behind = f", spine {self.spine:g}" if self.spine else ""
        return f"{self.nodes} nodes x {self.per_node}, {rates} Mbit/s{behind}"


def missing_means() -> str | None:
    """Why no cluster can be shaped here; None where it can."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"ap{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None


class Links:
    """The namespaces of one cluster; they are there between `__enter__` and `__exit__`, or the end of this process."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._prefix = f"ap{os.getpid()}"
        self._watch: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def namespaces(self) -> list[str]:
        switches = [f"{self._prefix}s{n}" for n in range(2 if self.shape.spine else 1)]
        return [*(self.node(n) for n in range(self.shape.nodes)), *switches]

    def node(self, number: int) -> str:
        return f"{self._prefix}n{number}"

    def __enter__(self) -> Links:
        # Outlives this process, however it ends; `__exit__` ends it.
        names = " ".join(self.namespaces)
        script = (
            f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 0.3; done; for n in {names}; do "
            "ip netns pids $n 2>/dev/null | xargs -r kill -9; ip netns del $n 2>/dev/null; done"
        )
        self._watch = subprocess.Popen(
            ["sh", "-c", script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        if self._watch is not None:
            self._watch.kill()
            self._watch.wait()

    def _build(self) -> None:
        shape = self.shape
        switches = [name for name in self.namespaces if name.startswith(f"{self._prefix}s")]
        for name in self.namespaces:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for switch in switches:
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
        for number in range(shape.nodes):
            switch = switches[number * len(switches) // shape.nodes]
            self._join(
                (self.node(number), INTERFACE),
                (switch, f"port{number}"),
                shape.rates[number % len(shape.rates)],
            )
            _ip("-n", switch, "link", "set", f"port{number}", "master", "br0")
            _ip("-n", self.node(number), "addr", "add", f"{SUBNET}.{number + 1}/24", "dev", INTERFACE)
        if len(switches) == 2:
            self._join((switches[0], "spine0"), (switches[1], "spine1"), shape.spine)
            for number, switch in enumerate(switches):
                _ip("-n", switch, "link", "set", f"spine{number}", "master", "br0")

    def _join(self, one: tuple[str, str], other: tuple[str, str], rate: float) -> None:
        _ip(
            "link",
            "add",
            one[1],
            "netns",
            one[0],
            "type",
            "veth",
            "peer",
            "name",
            other[1],
            "netns",
            other[0],
        )
        for namespace, interface in (one, other):
            _ip("-n", namespace, "link", "set", interface, "up")
            self._shape(namespace, interface, rate, "add")

    def _shape(self, namespace: str, interface: str, rate: float, verb: str) -> None:
        burst = max(64_000, int(rate * 1e6 / 8 / 250))
        _run(
            "tc", "-n", namespace, "qdisc", verb, "dev", interface, "root", "tbf", "rate", f"{rate}mbit",
            "burst", str(burst), "latency", "400ms",
        )  # fmt: skip

    def reshape(self, rate: float, nodes: Sequence[int] | None = None) -> None:
        """The links of some nodes, or of all, at another rate."""
        for number in range(self.shape.nodes) if nodes is None else nodes:
            switch = f"{self._prefix}s{number * (2 if self.shape.spine else 1) // self.shape.nodes}"
            self._shape(self.node(number), INTERFACE, rate, "replace")
            self._shape(switch, f"port{number}", rate, "replace")

    def part(self, node: int) -> None:
        """A node's link goes down."""
        _ip("-n", self.node(node), "link", "set", INTERFACE, "down")

    def launch(self, *command: str) -> None:
        """Run `command` on every rank, with what torchrun would tell it; its output where it fails."""
        outputs = self.start(*command)()
        failed = [text for code, text in outputs if code]
        if failed:
            raise RuntimeError(f"{' '.join(command)} failed:\n{failed[0][-3000:]}")

    def start(self, *command: str) -> Callable[[], list[tuple[int, str]]]:
        """Start `command` on every rank; what waits for them, and gives the status and the output of each."""
        shape, threads = self.shape, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TERM": "dumb"}
        for rank in range(shape.ranks):
            node, local = divmod(rank, shape.per_node)
            told = {
                "RANK": rank, "WORLD_SIZE": shape.ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": shape.per_node,
                "MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACE,
            }  # fmt: skip
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", self.node(node), sys.executable, *command],
                    env={**os.environ, **threads, **{key: str(value) for key, value in told.items()}},
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                )
            )  # fmt: skip
        return self._ended

    def _ended(self) -> list[tuple[int, str]]:
        outputs = [process.communicate(timeout=LAUNCH_S)[0] for process in self._processes]
        codes = [process.returncode for process in self._processes]
        self._processes.clear()
        return list(zip(codes, outputs, strict=True))


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One strategy: seconds per step as predicted, and bytes that the first rank's node sends in one."""

    kind: str
    strategy: Strategy
    predicted_s: float
    priced_bytes: float


def cases(name: str, cluster: Cluster, shape: Shape, samples: int) -> list[Case]:
    """The plans, and their rivals; the plan with compression first."""
    model, inputs = make(name, 2)
    graph = capture(model, inputs, name=name)
    found: dict[str, Strategy] = {}
    for kind, lossy in (("plan, lossy", LOSSY), ("plan", ())):
        problem = Problem(
            graph=graph, cluster=cluster, global_batch=samples, constraints=limits({}), execution=EXECUTION,
            allow_lossy=bool(lossy), lossy=lossy, all_devices=True, refuses=refuser(graph, cluster),
        )  # fmt: skip
        with contextlib.suppress(UserError, InfeasiblePlan):
            found[kind] = plan(problem).strategy
    found |= rivals(shape, samples)
    expander = Expander(graph=graph, cluster=cluster)
    rows = []
    for kind, strategy in found.items():
        whole = completed(expander, strategy)
        sizes = {axis: getattr(whole.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        messages = program_messages(program_of(expander, whole))[0]
        priced = sum(count * sent_bytes(message, sizes) for message, count in messages.items())
        seconds = score(graph, cluster, whole, expander).step_time_s
        rows.append(Case(kind=kind, strategy=whole, predicted_s=seconds, priced_bytes=priced))
    return rows


def rivals(shape: Shape, samples: int) -> dict[str, Strategy]:
    """What a user would write without a plan, and every method over replicas."""
    ranks = shape.ranks

    def made(sync: GradSync, zero: int = 0) -> Strategy:
        mesh = Mesh(dp_shard=ranks) if zero else Mesh(dp_replicate=ranks)
        return Strategy(
            batch=Batch(global_=samples, micro=samples // ranks), mesh=mesh, shard=Shard(zero=zero), execution=EXECUTION,
            grad_sync=sync,
        )  # fmt: skip

    found = {
        "plain DDP": made(GradSync()),
        "plain FSDP2": made(GradSync(), zero=3),
        "flat ring": made(GradSync(algorithm="ring")),
    }
    if shape.per_node > 1:
        found["hierarchical"] = made(GradSync(algorithm="hierarchical"))
    levels = 2
    return found | {method: made(GradSync(compression=(method,) * levels)) for method in METHODS}


def serve(folder: Path) -> None:
    """On a rank: every strategy of the job in turns; rank 0 writes seconds and bytes of each one's steps."""
    torch.set_num_threads(1)
    name, strategies, cluster = pickle.loads((folder / "job.pickle").read_bytes())
    dist.init_process_group("gloo")
    found: list[list[Step]] = [[] for _ in strategies]
    for _ in range(ROUNDS):
        for number, strategy in enumerate(strategies):
            found[number] += steps(name, strategy, cluster)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def waited_s() -> float:
    """Seconds that this thread has waited for a core while it could have run; 0 where that is not known."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def steps(name: str, strategy: Strategy, cluster: Cluster) -> list[Step]:
    """Some training steps. Collective."""
    module, inputs = make(name, strategy.batch.global_)
    model: Any = auto_parallelize(module, inputs, strategy=strategy, cluster=cluster, cache=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    share = strategy.batch.global_ // model.data_parallel_size
    first = model.data_parallel_rank * share
    mine = {key: value[first : first + share] for key, value in inputs.items()}
    found = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        sent, waited, begin = int(COUNTED.read_text()), waited_s(), time.perf_counter()
        optimizer.zero_grad()
        model.step(mine)
        optimizer.step()
        dist.barrier()
        seconds, lost = time.perf_counter() - begin, torch.tensor([waited_s() - waited], dtype=torch.float64)
        sent = int(COUNTED.read_text()) - sent
        dist.all_reduce(lost, op=dist.ReduceOp.MAX)
        found.append((seconds, sent, float(lost)))
    return found[WARM_UP:]


def measured(links: Links, name: str, strategies: Sequence[Strategy], cluster: Cluster) -> list[Step]:
    """Of each strategy the quickest step, with the median of the bytes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "job.pickle").write_bytes(pickle.dumps((name, list(strategies), cluster)))
        links.launch("-m", "benchmarks.shaped_cluster", "--serve", str(folder))
        rows = json.loads((folder / "found.json").read_text())
    quickest = [min(row) for row in rows]
    sent = [median(step[1] for step in row) for row in rows]
    return [(step[0], count, step[2]) for step, count in zip(quickest, sent, strict=True)]


def profiled(links: Links, folder: Path) -> Cluster:
    """What `autoparallel profile` makes of the cluster."""
    path = folder / "shaped.toml"
    links.launch("-m", "autoparallel", "profile", "-o", str(path), "--quick")
    return load_cluster(f"{path}:{links.shape.nodes}x{links.shape.per_node}")


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values]

    a, b = torch.tensor(ranks(one)), torch.tensor(ranks(other))
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def compare(links: Links, name: str, cluster: Cluster) -> dict[str, Any]:
    """One table: a model's strategies on a cluster."""
    samples = MODELS[name][1] * links.shape.ranks
    rows = cases(name, cluster, links.shape, samples)
    found = measured(links, name, [row.strategy for row in rows], cluster)
    print(
        f"\n{name} on {links.shape.label}\n  {'':14}{'predicted':>12}{'measured':>12}{'error':>8}{'waited':>10}{'MB sent':>10}{'priced':>9}"
    )
    table = []
    for row, (seconds, sent, waited) in zip(rows, found, strict=True):
        error, priced = row.predicted_s / seconds - 1, row.priced_bytes * links.shape.per_node
        print(
            f"  {row.kind:14}{row.predicted_s * 1e3:9.0f} ms{seconds * 1e3:9.0f} ms{error:+8.0%}{waited * 1e3:7.0f} ms{sent / 1e6:10.2f}"
            f"{priced / 1e6:9.2f}"
        )
        table.append(
            {"kind": row.kind, "predicted_s": row.predicted_s, "measured_s": seconds, "waited_s": waited, "sent": sent, "priced": priced,
             "mesh": str(row.strategy.mesh), "compression": row.strategy.grad_sync.compression,
             "algorithm": row.strategy.grad_sync.algorithm}
        )  # fmt: skip
    times, guesses = [step[0] for step in found], [row.predicted_s for row in rows]
    exact = [step[0] for row, step in zip(rows, found, strict=True) if not _lossy(row.strategy)]
    allowed = [step[0] for row, step in zip(rows, found, strict=True) if {*_lossy(row.strategy)} <= {*LOSSY}]
    summary = {
        "rho": spearman(guesses, times),
        "error": sum(abs(g / t - 1) for g, t in zip(guesses, times, strict=True)) / len(times),
        "regret": times[0] / min(allowed) - 1,
        "regret_lossless": times[1] / min(exact) - 1,
    }
    print(
        f"  rank correlation {summary['rho']:.2f}, mean error {summary['error']:.0%}; the plan is {summary['regret']:.1%} "
        f"behind the best measured, without compression {summary['regret_lossless']:.1%}",
        flush=True,
    )
    return {"model": name, "cluster": links.shape.label, "rows": table, **summary}


def _lossy(strategy: Strategy) -> list[str]:
    return [method for method in strategy.grad_sync.compression if method != "none"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=1)
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[1000.0],
        metavar="MBIT",
        help="of the nodes' links, in turns",
    )
    parser.add_argument("--spine", type=float, default=0.0, metavar="MBIT")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write all that was found here")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    if why := missing_means():
        print(f"skipped: {why}")
        return
    shape = Shape(
        nodes=options.nodes, per_node=options.per_node, rates=tuple(options.rates), spine=options.spine
    )
    with tempfile.TemporaryDirectory() as folder, Links(shape) as links:
        begin = time.monotonic()
        cluster = profiled(links, Path(folder))
        level = cluster.levels[-1]
        print(
            f"{shape.label}: profiled in {time.monotonic() - begin:.0f} s as {level.name} of {level.bytes_per_s * 8e-6:.0f} Mbit/s",
            flush=True,
        )
        found = [compare(links, name, cluster) for name in options.models]
    if options.json:
        options.json.write_text(json.dumps({"tables": found}, indent=1))


if __name__ == "__main__":
    main()
