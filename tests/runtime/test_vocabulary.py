"""What one rank of tp looks up in its share of a vocabulary, and what gradient its share gets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor

from autoparallel.planner.strategy.types import Batch, Execution, Mesh, Pipeline, Strategy, TensorRule
from autoparallel.planner.strategy.types import Shard as Zero
from autoparallel.runtime.check.dryrun import dry_run
from autoparallel.runtime.tensor.vocabulary import rows_of_shares
from autoparallel.runtime.torch_private import as_one_of

ROWS, NUMBERS = 12, 3


@pytest.mark.parametrize("padding", [None, 1, 8, -1, -ROWS])
def test_a_share_has_its_own_rows_and_its_part_of_the_gradient(padding: int | None) -> None:
    torch.manual_seed(0)
    whole = torch.randn(ROWS, NUMBERS, requires_grad=True)
    indices = torch.tensor([[0, 1, 5, 6, 11, 8, 1, 0]])
    upstream = torch.randn(*indices.shape, NUMBERS)
    expected = F.embedding(indices, whole, padding)
    expected.backward(upstream)
    with as_one_of(2):
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Shard(0)], src_data_rank=None))
        rows = rows_of_shares((indices, weight), {"padding_idx": padding})
        assert rows is not None
        assert rows.placements == (Partial(),)  # type: ignore[attr-defined]
        part = rows.to_local()  # type: ignore[attr-defined]
        part.backward(upstream)
        assert weight.grad is not None
        gradient = weight.grad.to_local()  # type: ignore[attr-defined]
    mine = (indices < ROWS // 2).unsqueeze(-1)
    assert torch.equal(part, torch.where(mine, expected, 0.0))
    assert whole.grad is not None
    assert torch.equal(gradient, whole.grad[: ROWS // 2])


@pytest.mark.parametrize("cp", [1, 2])
def test_no_rank_makes_the_gradient_of_the_whole_vocabulary(cp: int) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(4096, 512))
    rule = TensorRule(module="0", params=(("weight", "shard(0)"),), outputs=("replicate",))
    strategy = Strategy(
        batch=Batch(global_=1, micro=1), mesh=Mesh(cp=cp, tp=2), shard=Zero(zero=0), tensor=(rule,), pipeline=Pipeline(stage_blocks=()),
        execution=Execution(dtype="fp32", param_dtype="fp32", grad_dtype="fp32", master_weights=False),
    )  # fmt: skip
    (stage,) = dry_run(module, torch.zeros(1, 4, dtype=torch.int64), strategy, blocks=())
    half = 4 * 4096 * 512 // 2
    copies = cp  # beside shares of the sequence one more, of which the mean is taken
    assert 0.99 * copies * half <= stage.live["B"].peak < 1.05 * copies * half
