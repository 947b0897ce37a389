"""Sharding rules of operators that join many tensors are those of all combinations of their layouts."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_flatten

from autoparallel.planner.capture import rules


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shapes", [((2, 6, 4), (2, 3, 4)), ((1, 8), (1, 8)), ((4,), (4,), (4,))])
@pytest.mark.parametrize("join", [torch.ops.aten.cat.default, torch.ops.aten.stack.default])
def test_what_joins_has_its_tensors_alike(
    join: torch._ops.OpOverload,
    shapes: tuple[tuple[int, ...], ...],
    parts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [torch.empty(shape, device="meta") for shape in shapes]
    dim = min(1, given[0].dim() - 1)
    if join is torch.ops.aten.stack.default and len({*shapes}) > 1:
        given = given[:1] * 2
    leaves, spec = tree_flatten(((given, dim), {}))
    made = rules._tensor_meta(join(given, dim))
    alike = rules.Rules()._make(join, leaves, spec, made, parts)
    monkeypatch.setattr(rules, "_JOINS", frozenset())
    assert alike == rules.Rules()._make(join, leaves, spec, made, parts)
    assert len(alike) > 1
    assert all(len({*row}) == 1 for row in alike)
