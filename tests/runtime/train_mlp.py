"""A small MLP under torchrun: a strategy that is refused, then two steps of another; rank 0 prints what it saw as JSON."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autoparallel import UserError, auto_parallelize
from tests.runtime.models import Mlp


def main(refused: str, strategy: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch, targets = torch.randn(8, 16), torch.randint(0, 10, (8,))
    torch.manual_seed(
        17 * len(sys.argv) + id(sys.argv) % 1000
    )  # every rank draws other weights: rank 0's count
    module = Mlp()
    said = ""
    try:
        auto_parallelize(module, batch[:2], strategy=refused, cache=None)
    except UserError as error:
        said = str(error)
    model = auto_parallelize(module, batch[:2], strategy=strategy, cache=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    share = 8 // model.data_parallel_size
    mine = slice(model.data_parallel_rank * share, (model.data_parallel_rank + 1) * share)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(model.step(batch[mine], targets[mine], loss_fn=F.cross_entropy).item())
        optimizer.step()
    state = model.full_state_dict()
    if dist.get_rank() == 0:
        alone = Mlp()
        alone.load_state_dict(state)
        last = F.cross_entropy(alone(batch), targets).item()
        print(json.dumps({"refused": said, "losses": losses, "last": last}))
    dist.barrier()  # no rank tears its connections down while another still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
