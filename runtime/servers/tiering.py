"""A module's embedding tables put into the tiers that a strategy says, before the module is lowered."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoparallel.costmodel.access import distinct_rows
from autoparallel.errors import UserError
from autoparallel.planner.expand.cold import touched_only
from autoparallel.planner.expand.tables import law_of, rule_of
from autoparallel.planner.strategy.types import EmbeddingRule, Strategy
from autoparallel.runtime.loading.materialise import materialise
from autoparallel.runtime.loading.weights import Weights, load_rows
from autoparallel.runtime.ranks.mesh import RankMesh, subgroup
from autoparallel.runtime.ranks.places import groups_along
from autoparallel.runtime.servers.across import AcrossRanks
from autoparallel.runtime.servers.client import Servers
from autoparallel.runtime.servers.embedding import check_embedding, make_tiered
from autoparallel.runtime.servers.held import VALUES
from autoparallel.runtime.servers.launch import Started, ranks_by_node, start_servers
from autoparallel.runtime.servers.server import SYNCHRONOUS, Terms
from autoparallel.runtime.servers.store import Store, TableShape
from autoparallel.runtime.servers.tables import Table, TieredTables
from autoparallel.runtime.servers.whole import WholeTables, hot_parameter

SHARDED, SERVED = "sharded", "parameter-server"
_AXES = ("dp_replicate", "dp_shard")  # along which ranks read different samples


def tiered_modules(module: nn.Module, rules: Sequence[EmbeddingRule]) -> dict[str, EmbeddingRule]:
    """The embedding tables that are not wholly on every device, by path, with their rules: those of which nothing else uses the
    weights, and that are trained, as `planner.expand.tables` finds them. Raises UserError for one that cannot be in tiers."""
    if not any(rule.tier in (SHARDED, SERVED) for rule in rules):
        return {}
    owners: dict[nn.Parameter, int] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                owners[parameter] = owners.get(parameter, 0) + 1
    found = {}
    for path, own in module.named_modules():
        rule = rule_of(rules, path) if isinstance(own, nn.Embedding | nn.EmbeddingBag) else None
        if (
            rule is None
            or rule.tier not in (SHARDED, SERVED)
            or owners[own.weight] > 1
            or not own.weight.requires_grad
        ):
            continue
        if (rule.hot_rows or 0) < own.num_embeddings:
            check_embedding(own, path)
            found[path] = rule
    return found


def tier_tables(
    module: nn.Module, strategy: Strategy, mesh: RankMesh, *, param_dtype: torch.dtype, grad_dtype: torch.dtype,
    seed: int, weights: Weights | None,
) -> tuple[WholeTables | None, Weights | None]:  # fmt: skip
    """Put the tables where the strategy has them, in place (none where all are on the devices); and the weights that are still to
    be loaded. Collective. Every rank holds the same values before, or meta tensors."""
    chosen = tiered_modules(module, strategy.embedding)
    if not chosen:
        return None, weights
    axes = [axis for axis in _AXES if getattr(mesh.sizes, axis) > 1]
    along = mesh.axis(*axes) if axes else None
    group = subgroup(groups_along(mesh.sizes, *axes), "embedding_rows") if axes else None
    shapes = {
        path: TableShape(name=f"{path}.weight", rows=own.num_embeddings, dim=own.embedding_dim)
        for path, own in ((path, module.get_submodule(path)) for path in chosen) if isinstance(own, nn.Embedding)
    }  # fmt: skip
    dtypes: dict[str, Any] = {"device": mesh.device, "param_dtype": param_dtype, "grad_dtype": grad_dtype}
    stores: dict[str, Store] = {}
    started = None
    if own := [path for path in chosen if chosen[path].tier == SHARDED]:
        stores[SHARDED] = AcrossRanks([shapes[path] for path in own], group, **dtypes)
    if own := [path for path in chosen if chosen[path].tier == SERVED]:
        started = _started(strategy, mesh)
        stores[SERVED] = _servers(started, [shapes[path] for path in own], strategy, mesh, group, dtypes)
    tables, numbers = [], dict.fromkeys(stores, 0)
    for path, rule in chosen.items():
        tier, owner = str(rule.tier), module.get_submodule(path)
        hot = torch.arange(min(rule.hot_rows or 0, shapes[path].rows), device=mesh.device)
        tables.append(
            Table(
                shape=shapes[path], module=owner, hot=hot, store=stores[tier], number=numbers[tier],
                padding=owner.padding_idx, hot_counts=torch.zeros(len(hot), device=mesh.device),  # type: ignore[arg-type]
                synchronous=tier == SHARDED or strategy.servers.mode == SYNCHRONOUS,
            )
        )  # fmt: skip
        numbers[tier] += 1
    all_rows = not touched_only(strategy)
    found = TieredTables(
        module,
        tables,
        workers=mesh.data_parallel_size,
        update_all=all_rows,
        closing=started.stop if started else None,
    )
    if started is not None:
        weakref.finalize(found, started.stop)
    whole = WholeTables(found, along, lambda: _gathered(None, group))
    for number, (path, table) in enumerate(zip(chosen, tables, strict=True)):
        _fill_table(module, path, table, whole, seed, weights)
        make_tiered(table.module, table.module.weight, found.look_up_of(number))  # type: ignore[arg-type]
    return whole, None if weights is None else weights.without(found.names)


def _fill_table(
    module: nn.Module, path: str, table: Table, whole: WholeTables, seed: int, weights: Weights | None
) -> None:
    """The table's first values, to where its rows stand; the module keeps the hot ones."""
    owner: Any = table.module
    first, stop = whole.range_of(table)
    name, trained = table.shape.name, owner.weight.requires_grad
    if owner.weight.is_meta and weights is not None and name in weights:
        rows, hot = load_rows(weights, name, first, stop), load_rows(weights, name, 0, len(table.hot))
    else:
        if owner.weight.is_meta:
            materialise(module, table.hot.device, seed=seed, origin=module, only=(path,))
        rows, hot = owner.weight.detach()[first:stop], owner.weight.detach()[: len(table.hot)]
    device = table.hot.device
    table.store.write(table.number, VALUES, torch.arange(first, stop, device=device), rows.to(device))
    owner.weight = hot_parameter(hot.to(device), requires_grad=trained)
    whole.meet()


def _started(strategy: Strategy, mesh: RankMesh) -> Started:
    servers, world = strategy.servers, mesh.sizes.devices
    nodes = ranks_by_node(world, mesh.level_sizes[0] if mesh.level_sizes else None)
    absent = [node for node in servers.nodes if node >= len(nodes)]
    if absent:
        raise UserError(
            f"servers.nodes = {list(servers.nodes)}: node {absent[0]} is not there; this run has {len(nodes)}"
        )
    serving = servers.nodes or tuple(range(len(nodes)))
    if servers.copies > len(serving) * servers.per_node:
        raise UserError(
            f"servers.copies = {servers.copies}: there are {len(serving) * servers.per_node} servers (servers.nodes, "
            "servers.per_node); copies stand on different ones"
        )
    return start_servers(nodes, serving, servers.per_node)


def _servers(
    started: Started, shapes: Sequence[TableShape], strategy: Strategy, mesh: RankMesh,
    group: dist.ProcessGroup | None, dtypes: dict[str, Any],
) -> Servers:  # fmt: skip
    given = strategy.servers
    terms = Terms(
        mode=given.mode, staleness=given.staleness, workers=mesh.data_parallel_size, timeout_s=given.timeout_s
    )  # fmt: skip
    traffic = [
        t.dim
        * distinct_rows(
            law_of(strategy.embedding_access, t.name.rpartition(".")[0]), t.rows, 0, strategy.batch.global_
        )
        for t in shapes
    ]
    return Servers(
        shapes, started.addresses, started.key, worker=mesh.data_parallel_rank, terms=terms, copies=given.copies,
        warm=given.memory, gather=lambda value: _gathered(value, group), traffic=traffic, **dtypes,
    )  # fmt: skip


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def whole_norm_squared(dense: Tensor, whole: WholeTables | None) -> Tensor:
    """With the gradients of cold rows, where there are any."""
    return dense if whole is None else dense + whole.tables.norm_squared().to(dense)
