"""Whether a strategy's placement of embedding tables can run at all: messages that name key and what to try."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.expand.tables import Table, find_tables, rule_of
from autoparallel.planner.strategy.errors import nearest
from autoparallel.planner.strategy.types import TIERS, EmbeddingRule, Strategy
from autoparallel.profiles.hardware import Cluster

NAMES_SHOWN = 4


def embedding_problems(graph: ModelGraph, cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """Every reason why `[[embedding]]` and `[embedding_access]` cannot be what the file says."""
    access = strategy.embedding_access
    if not strategy.embedding and not access.tables:
        return
    tables = find_tables(graph)
    names = [table.module for table in tables]
    yield from unknown_tables(graph, strategy.embedding, names)
    yield from _unknown("embedding_access.tables", [module for module, _ in access.tables], names, graph)
    for rule in strategy.embedding:
        if rule.tier not in TIERS or (rule.tier != "device" and rule.hot_rows is None):
            yield (
                f'[[embedding]] module = "{rule.module}": tier and hot_rows are not both given; have `autoparallel '
                "plan --strategy` choose them"
            )
    yield from _mesh(cluster, strategy, tables)


def unknown_tables(
    graph: ModelGraph, rules: Iterable[EmbeddingRule], names: list[str] | None = None
) -> Iterator[str]:
    """Rules for tables that the model does not have; `names` are those that it has, where they are known."""
    known = names if names is not None else [table.module for table in find_tables(graph)]
    return _unknown("[[embedding]] module", [rule.module for rule in rules], known, graph)


def _unknown(key: str, patterns: list[str], names: list[str], graph: ModelGraph) -> Iterator[str]:
    for pattern in patterns:
        if pattern == "*" or any(fnmatchcase(name, pattern) for name in names):
            continue
        if not names:
            yield f'{key} = "{pattern}": {graph.name} has no embedding table; leave it out'
        else:
            shown = nearest(pattern, names[:NAMES_SHOWN]) + (" …" if len(names) > NAMES_SHOWN else "")
            yield f'{key} = "{pattern}": {graph.name} has no such embedding table; {shown}'


def _servers(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """`[servers]` on nodes that are there, as many as there are copies."""
    servers = strategy.servers
    group = cluster.groups[0]
    there = -(-strategy.mesh.devices // group.devices_per_node)
    absent = [node for node in servers.nodes if node >= there]
    if absent:
        yield (
            f"servers.nodes = {list(servers.nodes)}: node {absent[0]} is not there, the strategy computes on {there} "
            f"node{'s' * (there > 1)} (0 to {there - 1}); leave it out"
        )
    if len(set(servers.nodes)) < len(servers.nodes):
        yield f"servers.nodes = {list(servers.nodes)} names a node twice; servers.per_node puts several servers on one"
    count = (len(servers.nodes) or there) * servers.per_node
    if servers.copies > count:
        yield (
            f"servers.copies = {servers.copies}: there are {count} servers (servers.nodes, servers.per_node); copies stand on "
            f"different ones: write at most {count}, or have more servers"
        )
    if servers.memory < 1.0 and not cluster.device.constants["host.disk_bytes_per_s"]:
        yield (
            f"servers.memory = {servers.memory}: the profile of {cluster.device.name} does not say how fast its host's disk "
            "is; set constants.host.disk_bytes_per_s, or keep all rows in memory (1.0)"
        )


def _mesh(cluster: Cluster, strategy: Strategy, tables: tuple[Table, ...]) -> Iterator[str]:
    """Rows elsewhere are asked for by data-parallel ranks, each with whole samples, on devices that are alike."""
    rules = [rule_of(strategy.embedding, table.module) for table in tables]
    tiers = {str(rule.tier) for rule in rules if rule is not None} - {"device", "None"}
    if not tiers:
        return
    told = " and ".join(sorted(tiers))
    for axis in ("tp", "cp"):
        if getattr(strategy.mesh, axis) > 1:
            yield (
                f"[[embedding]] tier = {told} needs mesh.{axis} = 1, not {getattr(strategy.mesh, axis)}: every rank "
                'asks for the rows of its own samples; set it to 1, or tier = "device"'
            )
    if len(cluster.groups) > 1:
        yield f'[[embedding]] tier = {told} needs devices of one kind; set tier = "device"'
    if "parameter-server" not in tiers:
        return
    yield from _servers(cluster, strategy)
    if len(cluster.groups) == 1 and not cluster.device.constants["host.memory_bytes"]:
        yield (
            f'[[embedding]] tier = "parameter-server": the profile of {cluster.device.name} does not say how much '
            "memory its host has; set constants.host.memory_bytes and constants.host.memory_bytes_per_s"
        )
