"""A batch script for Slurm of a run which survives (`autoparallel run`, docs/elastic.md)."""

from __future__ import annotations

from autoparallel.exports.launch import slurm_head
from autoparallel.exports.plan import Exported, Plan, header, unsaid_to_launch

PORT = 29500  # torchrun's own default
# Before the time limit Slurm tells the script so many seconds: a step, and a checkpoint, fit. Kind: chosen.
WARNING_S = 120
GRACE_S = 90  # to save in, once told to end. Kind: chosen; less than WARNING_S, and than what pods get


def slurm_elastic(plan: Plan) -> Exported:
    """A batch script that is put back into the queue before its time is over, and when a node fails."""
    unsaid = unsaid_to_launch(plan)
    near = (f"--switches=1@{WARNING_S * 5}",) if plan.nodes > 1 else ()
    text = (
        slurm_head(plan, "--requeue", "--open-mode=append", f"--signal=B:USR1@{WARNING_S}", *near)
        + header(plan, "Slurm", unsaid)
        + f"""# sbatch job.sh train.py ARGUMENTS     (train.py uses Trainer, or the loop in docs/elastic.md; folder= on shared storage)
# To end it early: scancel --signal=TERM --batch JOB. scancel alone kills after the cluster's KillWait, often 30 s.
set -uo pipefail
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
srun --kill-on-bad-exit=0 autoparallel run --nnodes {plan.nodes} --nproc-per-node {plan.devices_per_node} \\
  --rdzv-endpoint "$head_node:{PORT}" --rdzv-id "$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" --grace {GRACE_S} "$@" &
step=$!
told=""
# shellcheck disable=SC2329  # the traps call it
tell() {{
  trap '' USR1 TERM  # the first counts: the step is told once, and is then waited for without a break
  told=$1
  # SIGTERM to every task: all ranks save at the end of the same step and end.
  kill -TERM "$step" 2>/dev/null || true
}}
trap 'tell requeue' USR1
trap 'tell end' TERM
status=0
wait "$step" || status=$?
# A signal ends wait, not the step. Slurm kills the step when this script ends, so it stays until the step has saved.
if [ -n "$told" ]; then
  status=0
  wait "$step" || status=$?
fi
if [ "$told" = requeue ]; then
  scontrol requeue "$SLURM_JOB_ID" && exit 0
  echo "job $SLURM_JOB_ID was not requeued: submit it again, and it goes on from its last checkpoint" >&2
fi
exit "$status"
"""
    )
    return Exported(text=text, unsaid=tuple(unsaid))
