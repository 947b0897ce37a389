"""Process groups among the ranks of a pipeline; every rank of the run makes all of them, in the same order.

(`new_group` with local synchronisation names a group after how many its process has made, which differs from
rank to rank here.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from autoparallel.planner.strategy.types import AXES
from autoparallel.runtime.ranks.mesh import RankMesh


def pipeline_group(mesh: RankMesh, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A new group of the given ranks along pp, one in each pipeline; None where this rank is in none of them.

    Collective over all ranks of the run, whether they are members or not.
    """
    assert mesh.device_mesh is not None, "a pipeline needs a process group"
    assert AXES[0] == "pp"
    columns = mesh.device_mesh.mesh.reshape(mesh.sizes.pp, -1).T.tolist()
    own, _ = dist.new_subgroups_by_enumeration([[column[rank] for rank in ranks] for column in columns])
    return own if isinstance(own, dist.ProcessGroup) else None
