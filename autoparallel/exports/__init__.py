"""Exports: a plan as the configuration of a framework, or as a file that launches it.

An export is a function from a `Plan` to an `Exported`: text, and what of the plan the other framework cannot say.
That stands in the text as a comment and is told to whoever asked: nothing is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoparallel.errors import UserError
from autoparallel.exports.accelerate import accelerate
from autoparallel.exports.deepspeed import deepspeed
from autoparallel.exports.elastic import slurm_elastic
from autoparallel.exports.launch import kubernetes, slurm, torchrun
from autoparallel.exports.megatron import megatron
from autoparallel.exports.plan import Exported, Plan, Pods, check_pods, plan_of
from autoparallel.exports.pods import jobset, trainjob
from autoparallel.exports.torchtitan import torchtitan

EXPORTS: Mapping[str, Callable[[Plan], Exported]] = {
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "torchrun": torchrun,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "slurm-elastic": slurm_elastic,
    "jobset": jobset,
    "trainjob": trainjob,
}

# Those that are told about pods.
OF_PODS = ("jobset", "trainjob")

__all__ = ["EXPORTS", "Exported", "Plan", "Pods", "export", "plan_of"]


def export(plan: Plan, target: str) -> Exported:
    """The plan for `target`. Raises UserError for a target that is not known, or that cannot run it."""
    if target not in EXPORTS:
        raise UserError(f"--to {target}: not known; use one of {', '.join(EXPORTS)}")
    if plan.pods != Pods():
        if target not in OF_PODS:
            raise UserError(
                f"--to {target}: --min-nodes and --near are about pods, for --to {' and '.join(OF_PODS)}"
            )
        check_pods(plan)
    return EXPORTS[target](plan)
