"""Seconds that a collective takes: latency and bytes over bandwidth, per algorithm, protocol and level.

The model is NCCL's own (src/graph/tuning.cc): every algorithm under every protocol (LL, LL128, Simple) has a
latency (a start, and hops on each level that it crosses) and a bandwidth (the narrowest level's), and the
cheapest pair runs. A large message also pays for filling the pipeline of its chunks, which with chunks of the
best size grows with the root of the message. Constants: profiles/constants.py; forms: docs/cost-model.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import ceil, log2, sqrt

from autoparallel.costmodel.compression import coding_s, gathering_s, method_at, parse_method, wire_bytes
from autoparallel.costmodel.links import ALL, RING, pattern_of
from autoparallel.costmodel.program import Axis, Collective, CollectiveOp
from autoparallel.costmodel.topology import Crossing, crossings, message_bytes_per_s
from autoparallel.errors import UserError
from autoparallel.profiles.hardware import Cluster, Device

ALGORITHMS = ("auto", "ring", "tree", "hierarchical", "nvls", "parameter-server")
_PROTOCOL_KEYS = tuple(
    (f"collective.start_s.{p}", f"collective.latency.{p}", f"collective.bandwidth.{p}")
    for p in ("simple", "ll128", "ll")
)
_REDUCING = (CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER)
_FACTORS = {
    op: f"collective.factor.{op.value}" for op in CollectiveOp
}  # what a library's own way of doing it costs, relative to the forms below


def collective_s(collective: Collective, axes: Sequence[Axis], cluster: Cluster) -> float:
    """Seconds of one collective in a training step: longer than alone where its group leaves the innermost level, for
    nodes do not arrive together, and share the network."""
    path = _path(collective, axes, cluster)
    if not path:
        return 0.0
    constants = cluster.device.constants
    factor = constants["collective.in_step_outside"] if path[-1].index else 1.0
    return factor * _alone_s(collective, axes, path, cluster)


def alone_collective_s(collective: Collective, axes: Sequence[Axis], cluster: Cluster) -> float:
    """Seconds of one collective, as nccl-tests measure it, when every device takes part in one like it.

    `axes` are all mesh axes of the program: the group's place on the topology follows from the size and
    stride of the axes that it spans. One rank, or no bytes, costs nothing. `auto` takes the cheapest
    algorithm that a library has: `hierarchical` runs only where it is asked for. Raises UserError for an unknown algorithm or compression, and where the group does not fit.
    """
    path = _path(collective, axes, cluster)
    return _alone_s(collective, axes, path, cluster) if path else 0.0


def group_of(axis: Axis, cluster: Cluster) -> Hashable:
    """What tells the prices of collectives along one axis apart, but for the devices' constants: where it is equal, on one cluster
    or on two, every collective takes as long. Raises UserError where the axis does not fit."""
    paths = tuple(crossings((axis.name,), (axis,), cluster, pattern) for pattern in (RING, ALL))
    return axis.size, paths, *(_share_of_usual(path, cluster) for path in paths if path)


def _path(collective: Collective, axes: Sequence[Axis], cluster: Cluster) -> tuple[Crossing, ...]:
    """The levels that the group crosses; none where it has one rank or nothing to send."""
    if collective.algorithm not in ALGORITHMS:
        raise UserError(
            f"unknown algorithm `{collective.algorithm}` of {collective.op}; one of {', '.join(ALGORITHMS)}"
        )
    found = crossings(collective.axes, axes, cluster, pattern_of(collective))
    return found if collective.size_bytes else ()


def _alone_s(
    collective: Collective, axes: Sequence[Axis], path: tuple[Crossing, ...], cluster: Cluster
) -> float:
    if collective.op == CollectiveOp.SEND:
        rate = message_bytes_per_s(path[-1], collective.axes, axes, cluster)
        path = (*path[:-1], replace(path[-1], device_bytes_per_s=rate))
    constants = _of_network(path, cluster)
    factor = constants[_FACTORS[collective.op]]
    methods = tuple(method_at(collective.compression, crossing.index) for crossing in path)
    if all(method == "none" for method in methods):
        return factor * _plain_s(
            collective.op,
            float(collective.size_bytes),
            path,
            collective.algorithm,
            constants,
            collective.copies,
        )
    return factor * _compressed_s(collective, path, methods, cluster.device, constants)


def _share_of_usual(path: Sequence[Crossing], cluster: Cluster) -> float:
    """What a node's ports to the outermost level that a group crosses carry, relative to its usual box's; at most 1."""
    device, far = cluster.device, path[-1].level
    usual, per_node = device.levels[-1], max(group.devices_per_node for group in cluster.groups)
    return min(1.0, far.bytes_per_s * per_node / (usual.bytes_per_s * device.devices_per_node))


def _of_network(path: Sequence[Crossing], cluster: Cluster) -> Mapping[str, float]:
    """The device's constants; where a node has less network than its usual box, with a ramp as much shorter.

    Filling a pipeline of chunks takes 2 sqrt(l S / B) for hops of latency l, a ramp of 4 l B bytes: through a tenth of the
    port a tenth of the bytes are on their way.
    """
    constants, share = cluster.device.constants, _share_of_usual(path, cluster)
    if not path[-1].index or share == 1.0:
        return constants
    return {**constants, "collective.ramp_bytes": constants["collective.ramp_bytes"] * share}


def _plain_s(
    op: CollectiveOp,
    size_bytes: float,
    path: Sequence[Crossing],
    algorithm: str,
    constants: Mapping[str, float],
    copies: int = 1,
) -> float:
    if op == CollectiveOp.SEND:
        return _send_s(size_bytes, path, constants)
    if op == CollectiveOp.ALL_TO_ALL:
        return _all_to_all_s(size_bytes, path, constants, copies)
    if algorithm == "parameter-server":
        return (
            _parameter_server_s(size_bytes, path, constants)
            if op == CollectiveOp.ALL_REDUCE
            else _ring_s(op, size_bytes, path, constants)
        )
    times = []
    if algorithm in ("auto", "ring"):
        times.append(_ring_s(op, size_bytes, path, constants))
    if algorithm == "hierarchical" and len(path) > 1:
        times.append(_hierarchical_s(op, [size_bytes] * len(path), path, constants))
    if op == CollectiveOp.ALL_REDUCE:
        if algorithm in ("auto", "tree"):
            times.append(_tree_s(size_bytes, path, constants))
        if algorithm in ("auto", "nvls") and path[0].level.in_network_reduction:
            times.append(_nvls_s(size_bytes, path, constants))
    return min(times) if times else _ring_s(op, size_bytes, path, constants)


def _ring_s(
    op: CollectiveOp, size_bytes: float, path: Sequence[Crossing], constants: Mapping[str, float]
) -> float:
    """Rounds of n - 1 hops: one to gather, scatter or broadcast, two to reduce everywhere.

        start + rounds * (sum over levels of hops * latency + (n-1)/n * bytes / narrowest * fill)

    A ring crosses a level n/inside - n/(inside * fan) times a round. A broadcast sends all bytes on.
    """
    ranks = path[-1].inside * path[-1].fan
    rounds = 2 if op == CollectiveOp.ALL_REDUCE else 1
    wire = size_bytes if op == CollectiveOp.BROADCAST else size_bytes * (ranks - 1) / ranks
    narrowest = min(c.port_bytes_per_s for c in path)
    hop_s = sum((ranks // c.inside - ranks // (c.inside * c.fan)) * c.level.latency_s for c in path)
    return _best_protocol_s(rounds * hop_s, rounds * wire, narrowest, size_bytes, constants)


def _tree_s(size_bytes: float, path: Sequence[Crossing], constants: Mapping[str, float]) -> float:
    """Two double binary trees, up and down: a chain inside the innermost level, log2 hops on the others.

    Each port sends 2 (f-1)/f of the bytes among its f peers, pipelined, so that the slowest level counts.
    """
    hop_s, slowest = 0.0, 0.0
    for crossing in path:
        hops = crossing.fan - 1 if crossing.index == 0 else ceil(log2(crossing.fan))
        hop_s += 2 * hops * crossing.level.latency_s
        volume = 2.0 if crossing.index == 0 else 2 * (crossing.fan - 1) / crossing.fan
        slowest = max(slowest, volume / crossing.port_bytes_per_s)
    rate = constants["collective.tree_efficiency"] / slowest
    return _best_protocol_s(hop_s, size_bytes, rate, size_bytes, constants)


def _nvls_s(size_bytes: float, path: Sequence[Crossing], constants: Mapping[str, float]) -> float:
    """The switch of the innermost level adds and multicasts; trees join the switches.

    A device sends its n-th of what the switch asks for and multicasts: bytes * (1 + 1/n) each way. The start
    grows with the devices that the switch joins.
    """
    first = path[0]
    rate = first.level.bytes_per_s / first.level.oversubscription * constants["collective.nvls_efficiency"]
    slowest = (1 + 1 / first.fan) / (rate * first.inside)
    hop_s = constants["collective.start_s.simple"] + constants["collective.nvls_rank_s"] * first.fan
    for crossing in path[1:]:
        hop_s += 2 * ceil(log2(crossing.fan)) * crossing.level.latency_s
        slowest = max(slowest, 2 * (crossing.fan - 1) / crossing.fan / crossing.port_bytes_per_s)
    if len(path) > 1:
        slowest /= constants["collective.tree_efficiency"]
    return hop_s + _filled_s(size_bytes, 1 / slowest, size_bytes, constants)


def _hierarchical_s(
    op: CollectiveOp,
    wire_bytes_by_level: Sequence[float],
    path: Sequence[Crossing],
    constants: Mapping[str, float],
) -> float:
    """One phase a level: reduce-scatter going out, all-reduce at the outermost, all-gather coming back.

    `wire_bytes_by_level` is the whole tensor as each level sends it; a level sends the 1/inside of it that
    the levels inside have left to each device.
    """
    total = 0.0
    reducing = op == CollectiveOp.ALL_REDUCE
    for crossing, size_bytes in zip(path, wire_bytes_by_level, strict=True):
        if op == CollectiveOp.BROADCAST:
            share = wire = size_bytes
        else:
            share = size_bytes / crossing.inside
            wire = share * (crossing.fan - 1) / crossing.fan
        hop_s = (crossing.fan - 1) * crossing.level.latency_s
        rate = crossing.device_bytes_per_s
        if reducing and crossing is path[-1]:
            total += _best_protocol_s(2 * hop_s, 2 * wire, rate, share, constants)
        else:
            phases = 2 if reducing else 1
            total += phases * _best_protocol_s(hop_s, wire, rate, share, constants)
    return total


def _all_to_all_s(
    size_bytes: float, path: Sequence[Crossing], constants: Mapping[str, float], copies: int = 1
) -> float:
    """Every pair at once: each level carries what leaves the unit inside it, and the slowest level counts.

    One peer's connection is narrower than a ring (`send_efficiency`), so that few peers do not fill a link.
    """
    ranks = path[-1].inside * path[-1].fan
    slowest_s = 0.0
    for crossing in path:
        inside = crossing.inside
        leaving = (inside * (crossing.fan - 1) if crossing.index == 0 else ranks - inside) / ranks
        peers = max(1, round(leaving * ranks))
        share = min(
            constants["collective.all_to_all_efficiency"], peers * constants["collective.send_efficiency"]
        )
        rate = crossing.device_bytes_per_s * share
        if copies > 1:
            leaving = _merged_share(crossing, ranks, copies)
        slowest_s = max(slowest_s, _filled_s(size_bytes * leaving, rate, size_bytes, constants))
    latency_s = max(c.level.latency_s for c in path) + (ranks - 1) * constants["collective.peer_s"]
    return constants["collective.start_s.simple"] + latency_s + slowest_s


def _merged_share(crossing: Crossing, ranks: int, copies: int) -> float:
    """Share of the rows that cross a level where a unit gets one copy of a row, and hands it on inside.

        u (1 - (1 - 1/u)^copies) / copies * (fan - 1) / fan        u = ranks / inside: the units inside the level

    the units that a row with `copies` random receivers goes to, less those that sit in its own. Kind: formula.
    Source: DeepEP (deepseek-ai/DeepEP), whose dispatch sends a token once to a node and forwards it over NVLink.
    """
    units = ranks // crossing.inside
    return units * (1 - (1 - 1 / units) ** copies) / copies * (crossing.fan - 1) / crossing.fan


def _parameter_server_s(size_bytes: float, path: Sequence[Crossing], constants: Mapping[str, float]) -> float:
    """Sums inside each unit, then at servers: a device pushes what it holds and pulls the sum, one after the other.

    The servers of every number stand in another unit (the share that stays at home gains little: its unit serves
    the others meanwhile). Inside, a reduce-scatter going out and an all-gather coming back.
    """
    total = 0.0
    for crossing in path[:-1]:
        share = size_bytes / crossing.inside
        wire = share * (crossing.fan - 1) / crossing.fan
        hop_s = (crossing.fan - 1) * crossing.level.latency_s
        total += 2 * _best_protocol_s(hop_s, wire, crossing.device_bytes_per_s, share, constants)
    far = path[-1]
    share = size_bytes / far.inside
    if far.index == 0:  # one box: the devices serve each other
        share *= (far.fan - 1) / far.fan
    once_s = constants["collective.start_s.simple"] + far.level.latency_s
    return total + 2 * (once_s + _filled_s(share, far.device_bytes_per_s, share, constants))


def _send_s(size_bytes: float, path: Sequence[Crossing], constants: Mapping[str, float]) -> float:
    """One message to the next rank, across the outermost level that lies between any two neighbours."""
    far = path[-1]
    rate = far.device_bytes_per_s * constants["collective.send_efficiency"]
    latency_s = far.level.latency_s
    return (
        constants["collective.start_s.simple"]
        + latency_s
        + _filled_s(size_bytes, rate, size_bytes, constants)
    )


def _best_protocol_s(
    hop_s: float, wire: float, bytes_per_s: float, message: float, constants: Mapping[str, float]
) -> float:
    """The cheapest protocol: start, hops at its latency, bytes at its bandwidth, and the fill of its chunks."""
    best = float("inf")
    for start, latency, bandwidth in _PROTOCOL_KEYS:
        hop_ratio = constants[latency]
        wire_s = _filled_s(wire, bytes_per_s * constants[bandwidth], message, constants, hop_ratio)
        best = min(best, constants[start] + hop_s * hop_ratio + wire_s)
    return best


def _filled_s(
    wire: float, bytes_per_s: float, message: float, constants: Mapping[str, float], hop_ratio: float = 1.0
) -> float:
    """wire / rate * (1 + sqrt(ramp / message)): a pipeline of chunks of the best size, by its hop latency.

    n chunks over a hop of latency l take (n + 1) (l + bytes / (n rate)), least at bytes / rate + l +
    2 sqrt(l bytes / rate).
    """
    ramp = constants["collective.ramp_bytes"] * hop_ratio
    return wire / bytes_per_s * (1.0 + sqrt(ramp / message))


def _compressed_s(
    collective: Collective,
    path: Sequence[Crossing],
    methods: Sequence[str],
    device: Device,
    constants: Mapping[str, float],
) -> float:
    """Fewer bytes on the wire, and encoding and decoding around it.

    One method on every level that the group crosses runs any algorithm; different methods need the
    hierarchical one. What cannot be added encoded is decoded and encoded once more where a reduction adds.
    """
    item = collective.item_bytes
    size = float(collective.size_bytes)
    wires = [wire_bytes(method, size, item) for method in methods]
    coding = 0.0
    if collective.op is CollectiveOp.ALL_GATHER and len(set(methods)) == 1:
        ranks = path[-1].inside * path[-1].fan
        coding = gathering_s(methods[0], size, item, ranks, device)
        return coding + _plain_s(collective.op, wires[0], path, collective.algorithm, constants)
    for crossing, method in zip(path, methods, strict=True):
        again = 1 if parse_method(method).summable or collective.op not in _REDUCING else 2
        coding += again * coding_s(method, size / crossing.inside, item, device)
        if len(set(methods)) == 1:
            break
    if len(set(methods)) == 1:
        # Every rank needs both of PowerSGD's factors whole, also for a share of their product.
        factors = parse_method(methods[0]).name == "powersgd" and collective.op == CollectiveOp.REDUCE_SCATTER
        op = CollectiveOp.ALL_REDUCE if factors else collective.op
        return coding + _plain_s(op, wires[0], path, collective.algorithm, constants)
    if collective.op in (CollectiveOp.SEND, CollectiveOp.ALL_TO_ALL):
        return coding + _plain_s(collective.op, max(wires), path, "auto", constants)
    return coding + _hierarchical_s(collective.op, wires, path, constants)
