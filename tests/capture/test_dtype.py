"""A model is captured in the dtype that it will be computed in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autoparallel.costmodel.graph import ModelGraph
from autoparallel.planner.capture import capture


class _Norm(nn.Module):
    """Computes in float32 whatever it gets, as the norms of most language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _kept(graph: ModelGraph) -> set[str]:
    return {s.spec.dtype for block in graph.blocks for op in block.operators for s in op.saved}


def test_what_code_casts_up_is_seen_in_the_dtype_of_the_run() -> None:
    module = nn.Sequential(nn.Linear(64, 64), _Norm())
    x = torch.randn(4, 64)
    own = capture(module, x, name="own")
    half = capture(module, x, name="half", dtype="bfloat16")
    assert (own.dtype, half.dtype) == ("float32", "bfloat16")
    assert _kept(own) == {"float32"}
    assert _kept(half) == {"float32", "bfloat16"}
    assert all(p.dtype == torch.float32 and not p.is_meta for p in module.parameters())


class _Fixed(nn.Module):
    """Runs in one dtype alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 alone")
        out: Tensor = self.layer(x)
        return out


def test_a_module_that_runs_in_one_dtype_alone_is_captured_in_that() -> None:
    graph = capture(_Fixed(), torch.randn(4, 64), name="fixed", dtype="bfloat16")
    assert graph.dtype == "float32"
    assert any("does not run in bfloat16" in warning for warning in graph.warnings)
    assert not any(str(op.kind) == "leaf" for block in graph.blocks for op in block.operators)
