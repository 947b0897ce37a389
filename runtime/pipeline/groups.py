"""Process groups among the ranks of a pipeline; every rank of the run makes all of them, in the same order.

(`new_group` with local synchronisation names a group after how many its process has made, which differs from
rank to rank here.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from autoparallel.runtime.ranks.mesh import RankMesh, subgroup
from autoparallel.runtime.ranks.places import groups_along


def pipeline_group(mesh: RankMesh, ranks: Sequence[int], name: str) -> dist.ProcessGroup | None:
    """A group, beside the mesh's own, of the given ranks along pp, one in each pipeline; None where this rank is in none
    of them. Collective over all ranks of the run, whether they are members or not."""
    return subgroup([[column[rank] for rank in ranks] for column in groups_along(mesh.sizes, "pp")], name)
