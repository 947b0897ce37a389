"""Names that `auto_parallelize` adds to a module. (A file of its own, as planning asks without loading what runs.)"""

from __future__ import annotations

from autoparallel.errors import UserError

_MEMBERS = (
    "step", "optimizer", "synchronise_by", "data_parallel_rank", "data_parallel_size", "clip_grad_norm_", "full_state_dict",
    "full_gradients", "strategy", "program",
)  # fmt: skip
OF_TIERS = "tables"  # a model's own `tables` stays its own where none of them stand elsewhere


def check_members(module: object, *, in_tiers: bool = False) -> None:
    """Refuse a module that has members of its own under the names that a ParallelModule gives meaning to; `in_tiers`: also
    that which it has for embedding tables that stand elsewhere."""
    taken = [name for name in (*_MEMBERS, *((OF_TIERS,) if in_tiers else ())) if hasattr(module, name)]
    if taken:
        raise UserError(
            f"{type(module).__name__} already has {', '.join(taken)}, which auto_parallelize adds: rename "
            f"{'them' if len(taken) > 1 else 'it'}, or put the model into a module of its own that calls it"
        )
