"""What every export starts from."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from autoparallel.errors import UserError
from autoparallel.labels import whole_matrices
from autoparallel.planner.expand.state import MIB, dtype_bytes
from autoparallel.planner.strategy.file import StrategyFile, missing_keys, strategy_from_constraints
from autoparallel.planner.strategy.machines import nodes_in_use
from autoparallel.planner.strategy.runs import runs
from autoparallel.planner.strategy.stacks import OWN_STACK
from autoparallel.planner.strategy.types import Execution, GradSync, Outer, RecoveryRule, Servers, Strategy
from autoparallel.profiles import Cluster
from autoparallel.profiles.parts import devices_of_nodes, group_of_nodes
from autoparallel.profiles.record import recorded_cluster
from autoparallel.profiles.stacks import PLAIN
from autoparallel.runtime.capabilities.rows import Case
from autoparallel.runtime.capabilities.table import refusals
from autoparallel.runtime.limits import backend_of

# A label's name, after a prefix that is a domain (Kubernetes, "Labels and Selectors").
LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """What Kubernetes is told besides a plan."""

    min_nodes: int | None = None  # with so few the run goes on; None: with all alone
    near: tuple[str, ...] = (
        "topology.kubernetes.io/zone",
    )  # labels that pods' nodes better share, nearest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete strategy, the machines it is for, and the file it stands in."""

    path: str
    strategy: Strategy
    cluster: Cluster
    seq_len: int
    pods: Pods = Pods()

    @property
    def devices_per_node(self) -> int:
        """Processes on each node: fewer than the node's devices only where the plan needs fewer in all."""
        mesh = self.strategy.mesh
        return min(mesh.per_node or self.cluster.groups[0].devices_per_node, mesh.devices)

    @property
    def nodes(self) -> int:
        return math.ceil(self.strategy.mesh.devices / self.devices_per_node)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The cluster's nodes in the order of the ranks, where the plan names them or groups of them; else empty."""
        mesh = self.strategy.mesh
        if mesh.placement:
            return nodes_in_use(mesh)
        if not mesh.groups or len(self.cluster.groups) == 1:
            return ()
        left = {g: iter(_places(self.cluster, g)) for g in sorted(set(mesh.groups))}
        each = mesh.devices // mesh.pp
        return tuple(dict.fromkeys(next(left[g]) for g in mesh.groups for _ in range(each)))

    @property
    def on_cpu(self) -> bool:
        """The devices are processes of a CPU: launch files then ask for no GPU."""
        return self.cluster.groups[0].device.name.startswith("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export: its text, and what of the plan the target cannot say (which stands in the text, too)."""

    text: str
    unsaid: tuple[str, ...] = ()


def check_pods(plan: Plan) -> None:
    """Raises UserError for what Kubernetes or the plan cannot have."""
    pods = plan.pods
    if pods.min_nodes is not None and not 1 <= pods.min_nodes <= plan.nodes:
        raise UserError(
            f"--min-nodes {pods.min_nodes}: the plan is for {plan.nodes}; write 1 to {plan.nodes}"
        )
    for label in pods.near:
        if not LABEL.fullmatch(label):
            raise UserError(
                f"--near {label}: not the name of a label; `kubectl get nodes --show-labels` lists yours, such as "
                "topology.kubernetes.io/zone"
            )


def plan_of(file: StrategyFile, pods: Pods = Pods()) -> Plan:
    """The plan in a strategy file. Raises UserError where the file is not complete."""
    missing = missing_keys(file.constraints)
    if missing or file.problem is None or file.problem.cluster is None:
        what = ", ".join([*missing, *([] if file.problem and file.problem.cluster else ["problem.cluster"])])
        raise UserError(
            f"{file.path}: {what} missing; run plan with it as --strategy, and export what that writes"
        )
    # Shapes and names are all that exports read: other figures than the plan was made for do no harm.
    cluster = recorded_cluster(file.problem.cluster, f"{file.path}: [problem] cluster", checked=False)
    per_node = {group.devices_per_node for group in cluster.groups}
    if len(per_node) > 1:
        raise UserError(
            f"{file.path}: nodes with {sorted(per_node)} devices cannot be launched alike; no export can"
        )
    strategy = strategy_from_constraints(file.constraints, name=file.path)
    return Plan(
        path=file.path,
        strategy=strategy,
        cluster=cluster,
        seq_len=strategy.batch.seq_len or file.problem.seq_len or 1,
        pods=pods,
    )


def header(plan: Plan, framework: str, unsaid: list[str], mark: str = "#") -> str:
    """Comment lines: where the text comes from, and what of the plan the framework cannot say."""
    lines = [f"{mark} {framework}, from {plan.path} by `autoparallel export`."]
    if unsaid:
        lines.append(f"{mark} Not said here, because {framework} has no setting for it:")
        lines += [f"{mark}   - {item}" for item in unsaid]
    return "\n".join(lines) + "\n"


def unsaid_everywhere(plan: Plan) -> list[str]:
    """Decisions that no other framework has a switch for."""
    strategy = plan.strategy
    found = unsaid_hosts(plan)
    if any(c != "none" for c in strategy.grad_sync.compression):
        found.append(f"grad_sync.compression = {list(strategy.grad_sync.compression)}")
    if strategy.grad_sync.weights != "none" and strategy.shard.zero == 3:
        found.append(f'grad_sync.weights = "{strategy.grad_sync.weights}"')
    if strategy.grad_sync.algorithm != "auto":
        found.append(f'grad_sync.algorithm = "{strategy.grad_sync.algorithm}" (NCCL chooses)')
    if strategy.embedding:
        tables = "; ".join(f"{r.module}: {r.tier}, {r.hot_rows or 0} hot rows" for r in strategy.embedding)
        found.append(f"[[embedding]] ({tables}): TorchRec shards tables over ranks; none of these does")
    found += _unsaid_sections(strategy)
    if strategy.mesh.per_node:
        found.append(f"mesh.per_node = {strategy.mesh.per_node}: start so many processes on each node")
    if strategy.mesh.tp > 1 and (whole := whole_matrices(strategy)):
        found.append(f"[[tensor]]: matrices of {', '.join(whole)} are whole here, and sharded there")
    return found


def _unsaid_sections(strategy: Strategy) -> list[str]:
    """What is stated of local updates, of recovery, of servers and of later phases: no framework's file has these."""
    found = []
    for name, usual in (("outer", Outer()), ("recovery", RecoveryRule()), ("servers", Servers())):
        section = getattr(strategy, name)
        stated = [f.name for f in fields(usual) if getattr(section, f.name) != getattr(usual, f.name)]
        found += [f"{name}.{key} = {_toml(getattr(section, key))}" for key in stated]
    for phase in strategy.phases:
        keys = ", ".join(f"{key} = {_toml(value)}" for key, value in phase.keys)
        found.append(f"[[phase]] from step {phase.from_step}: {keys}")
    return found


def unsaid_script(strategy: Strategy, *keys: str) -> list[str]:
    """Those of `keys` that are not at their defaults, for a framework whose script or model decides them."""
    found = []
    for key in keys:
        usual = getattr(
            {"execution": Execution(), "grad_sync": GradSync()}[key.split(".")[0]], key.split(".")[1]
        )
        value = getattr(getattr(strategy, key.split(".")[0]), key.split(".")[1])
        if value != usual:
            found.append(f"{key} = {_toml(value)}: see to it in the script or the model")
    return found


def unsaid_kernels(strategy: Strategy, *, compiles: bool = False, fused: bool = False) -> list[str]:
    """Kernels that were priced and are not what the framework's file asks for: eager ones, unless it has a switch."""
    kernels = strategy.execution.kernels
    if kernels == ("fused" if fused else "eager") or (kernels == "compiled" and compiles):
        return []
    return [f'execution.kernels = "{kernels}": the framework runs with the kernels that it has']


def unsaid_held(strategy: Strategy, held: str, *, master: bool) -> list[str]:
    """Parameters held in another dtype than planned (`held`), or with a float32 copy where none was planned, or without."""
    execution = strategy.execution
    found = []
    if execution.param_dtype != held:
        found.append(
            f'execution.param_dtype = "{execution.param_dtype}": {held} is what parameters are held in'
        )
    if execution.param_dtype != "fp32" and execution.master_weights != master:
        there = "a float32 copy is kept there" if master else "no float32 copy is kept there"
        found.append(f"execution.master_weights = {_toml(execution.master_weights)}: {there}")
    return found


def unsaid_single(strategy: Strategy) -> list[str]:
    """float64 and TF32 products, for a framework that is told of 16 bits or none."""
    dtype = strategy.execution.dtype
    return [f'execution.dtype = "{dtype}": set it in the script'] if dtype in ("fp64", "tf32") else []


def unsaid_samples(strategy: Strategy) -> list[str]:
    """The length of sequences, for a framework that takes them as they come."""
    length = strategy.batch.seq_len
    return [f"batch.seq_len = {length}: your data decides it"] if length else []


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def unsaid_secondary(strategy: Strategy) -> list[str]:
    """FSDP2 takes a number of ranks to reshard to after forward; a framework that passes on yes or no alone does not say it."""
    ranks = strategy.shard.secondary
    return [f"shard.secondary = {ranks}: backward passes gather from all ranks there"] if ranks else []


def bucket_elements(strategy: Strategy) -> int:
    """Gradients in a bucket: frameworks count elements."""
    return round(strategy.grad_sync.bucket_mib * MIB / dtype_bytes(strategy.execution.grad_dtype))


def base_dtype(strategy: Strategy) -> str:
    """What a framework computes in where it has no eight- or four-bit products: those are made from bf16."""
    dtype = strategy.execution.dtype
    return "bf16" if dtype in ("fp8", "mxfp8", "nvfp4") else dtype


def unsaid_dtype(strategy: Strategy) -> list[str]:
    """Eight- and four-bit products, for a framework that has none."""
    dtype, base = strategy.execution.dtype, base_dtype(strategy)
    return [] if dtype == base else [f'execution.dtype = "{dtype}": {base} is what runs']


def unsaid_experts(strategy: Strategy) -> list[str]:
    """Experts on ranks of their own, for a framework whose configuration has no size for them."""
    return [f"mesh.ep = {strategy.mesh.ep}: set it in the model"] if strategy.mesh.ep > 1 else []


def unsaid_offload(strategy: Strategy, *, optimizer: bool) -> list[str]:
    """What is kept on the host; `optimizer` where the framework was told to do so with the optimizer state."""
    shares = {"activations": strategy.offload.activations}
    if not optimizer:
        shares = {"optimizer": strategy.offload.optimizer, **shares}
    return [f"offload.{name} = {share:g}" for name, share in shares.items() if share]


def unsaid_hosts(plan: Plan) -> list[str]:
    """Which hosts to start, and in which order, where the plan names nodes or groups of them: ranks follow the hosts."""
    if not (hosts := plan.hosts):
        return []
    key = "placement" if plan.strategy.mesh.placement else "groups"
    named = runs(getattr(plan.strategy.mesh, key))
    return [
        f"mesh.{key} = {named}: --node-rank is 0 to {len(hosts) - 1} on nodes {runs(hosts)[1:-1]} of the cluster's file, "
        f"in this order ({_nodes_of_groups(plan.cluster)})"
    ]


def unsaid_to_launch(plan: Plan, to_do: str = "") -> list[str]:
    """What a launch file cannot say: hosts, and what of the plan is not run by the `auto_parallelize` that it starts.
    `to_do` about hosts follows."""
    found = [f"{item}{to_do}" for item in unsaid_hosts(plan)]
    if plan.strategy.execution.stack in (PLAIN, OWN_STACK):  # others are started by their own script
        case = Case(
            strategy=plan.strategy,
            level_sizes=tuple(level.size for level in plan.cluster.levels),
            backend=backend_of(plan.cluster),
        )
        found += [f"auto_parallelize refuses {problem}" for problem in refusals(case)]
    return found


def _places(cluster: Cluster, group: int) -> list[int]:
    """The node of each device of a group, in order."""
    return [
        node
        for node, (home, devices) in enumerate(
            zip(group_of_nodes(cluster), devices_of_nodes(cluster), strict=True)
        )
        if home == group
        for _ in range(devices)
    ]


def _nodes_of_groups(cluster: Cluster) -> str:
    """`nodes 0 to 1 of a100-sxm-40gb, nodes 2 to 3 of v100-sxm2-32gb`."""
    found, first = [], 0
    for group in cluster.groups:
        last = first + group.nodes - 1
        found.append(f"{'node' if last == first else f'nodes {first} to'} {last} of {group.device.name}")
        first = last + 1
    return ", ".join(found)


def refuse_samples(plan: Plan, framework: str) -> None:
    """Raise UserError where the model reads no sequences, for a framework that is told their length."""
    if plan.seq_len == 1:
        raise UserError(
            f"{plan.path}: {framework} trains models of sequences, and a sample of this one is no sequence (seq_len = 1: "
            "images, or rows of features); export to accelerate or deepspeed, or launch your own script with torchrun"
        )


def refuse_length(plan: Plan, framework: str) -> None:
    """Raise UserError for sequences that a framework of DTensor's or Megatron's kind does not divide over ranks: it takes
    two pieces for each rank of cp (which balances causal attention), and one for each of tp under sequence parallelism."""
    mesh = plan.strategy.mesh
    pieces = (2 * mesh.cp if mesh.cp > 1 else 1) * (mesh.tp if plan.strategy.shard.sequence_parallel else 1)
    if plan.seq_len % pieces:
        raise UserError(
            f"{plan.path}: {framework} cuts sequences into {pieces} equal pieces under mesh.cp = {mesh.cp}, mesh.tp = "
            f"{mesh.tp}, and seq_len = {plan.seq_len} has none; plan again with a multiple of {pieces} as --seq-len"
        )


def recomputed_layers(strategy: Strategy) -> tuple[int, ...]:
    """Repeated blocks that are recomputed in full, by their number in the model: the first ones of each chunk."""
    blocks = strategy.pipeline.stage_blocks
    if strategy.recompute.mode == "full":
        return tuple(range(sum(blocks)))
    found: list[int] = []
    first = 0
    for here, full in zip(blocks, strategy.recompute.per_stage or (0,) * len(blocks), strict=True):
        found += range(first, first + min(full, here))
        first += here
    return tuple(found)


def recomputes_all(strategy: Strategy) -> bool:
    """Whether every repeated block is recomputed in full, however the file says it."""
    layers, blocks = recomputed_layers(strategy), sum(strategy.pipeline.stage_blocks)
    return strategy.recompute.mode == "full" or 0 < len(layers) == blocks


def unsaid_order(strategy: Strategy, order: tuple[str, ...], remedy: str = "") -> list[str]:
    """A placement of the axes that a framework which places them in `order` (outermost first) cannot have."""
    mesh = strategy.mesh
    ours = [axis for axis in mesh.order if getattr(mesh, axis) > 1]
    theirs = [axis for axis in order if getattr(mesh, axis) > 1]
    if ours == theirs:
        return []
    return [
        f"mesh.order: {' > '.join(ours)} (outermost first) was planned, {' > '.join(theirs)} is what runs{remedy}; "
        f'score it with --set "mesh.order={list(order)}" for what that costs'
    ]
