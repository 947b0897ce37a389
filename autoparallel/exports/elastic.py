"""Files that start a run which survives (`autoparallel run`, docs/elastic.md): Slurm, JobSet, Kubeflow's TrainJob."""

from __future__ import annotations

from string import Template

from autoparallel.exports.launch import slurm_head
from autoparallel.exports.plan import Exported, Plan, header, unsaid_to_launch

PORT = 29500  # torchrun's own default
# Before the time limit Slurm tells the script so many seconds: a step, and a checkpoint, fit. Kind: chosen.
WARNING_S = 120
GRACE_S = 90  # to save in, once told to end. Kind: chosen; less than WARNING_S, and than what pods get


_JOBSET = """# Set image, args, and the class of the volume, which all nodes must be able to write to.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: autoparallel-run
spec:
  accessModes: [ReadWriteMany]
  resources:
    requests:
      storage: 1Ti
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: autoparallel
spec:
  podSelector:
    matchLabels:
      jobset.sigs.k8s.io/jobset-name: autoparallel
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              jobset.sigs.k8s.io/jobset-name: autoparallel
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: autoparallel
spec:
  failurePolicy:
    maxRestarts: 100
  network:
    enableDNSHostnames: true
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: $nodes
          parallelism: $nodes
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: $end_s
              affinity:
                podAffinity:
                  preferredDuringSchedulingIgnoredDuringExecution:
                    - weight: 100
                      podAffinityTerm:
                        topologyKey: topology.kubernetes.io/zone
                        labelSelector:
                          matchLabels:
                            jobset.sigs.k8s.io/jobset-name: autoparallel
              containers:
                - name: train
                  image: REPLACE-WITH-YOUR-IMAGE
                  command:
                    - autoparallel
                    - run
                    - --nnodes=$nodes
                    - --nproc-per-node=$per_node
                    - --rdzv-endpoint=autoparallel-node-0-0.autoparallel:$port
                    - --rdzv-id=autoparallel
                    - --grace=$grace_s
                  args: [train.py]
                  ports:
                    - containerPort: $port
                      protocol: TCP
                  resources:
                    limits:
$resources                  volumeMounts:
                    - name: shared-memory
                      mountPath: /dev/shm
                    - name: run
                      mountPath: /run/autoparallel
              volumes:
                - name: shared-memory
                  emptyDir:
                    medium: Memory
                - name: run
                  persistentVolumeClaim:
                    claimName: autoparallel-run
"""


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


def jobset(plan: Plan) -> Exported:
    """A JobSet (jobset.x-k8s.io/v1alpha2): one pod per node near each other, restarted as a whole when one fails, with a
    checkpoint volume, and a network policy that lets these pods alone talk to each other."""
    unsaid = unsaid_to_launch(plan, "; pods start on any node: pin them")
    text = (
        header(plan, "JobSet", unsaid)
        + Template(_JOBSET).substitute(
            nodes=plan.nodes, per_node=plan.devices_per_node, port=PORT, grace_s=GRACE_S, end_s=GRACE_S + 30,
            resources=_resources(plan, 22),
        )
    )  # fmt: skip
    return Exported(text=text, unsaid=tuple(unsaid))


def trainjob(plan: Plan) -> Exported:
    """A Kubeflow TrainJob (trainer.kubeflow.org/v1alpha1) on the torch-distributed runtime."""
    unsaid = unsaid_to_launch(plan, "; pods start on any node: pin them")
    text = (
        header(plan, "TrainJob", unsaid)
        + f"""# Set image and args. The runtime's own volumes hold the run: give train.py a folder there.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: autoparallel
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: REPLACE-WITH-YOUR-IMAGE
    command: [torchrun, train.py]
    numNodes: {plan.nodes}
    numProcPerNode: {plan.devices_per_node}
    resourcesPerNode:
      limits:
{_resources(plan, 8)}"""
    )
    return Exported(text=text, unsaid=tuple(unsaid))


def _resources(plan: Plan, indent: int) -> str:
    """CPUs, or GPUs and the network cards that reach the others directly, where there are others."""
    lines = [f"cpu: {plan.devices_per_node}"] if plan.on_cpu else [f"nvidia.com/gpu: {plan.devices_per_node}"]
    if not plan.on_cpu and plan.nodes > 1:
        lines.append("rdma/hca: 1")
    return "".join(f"{' ' * indent}{line}\n" for line in lines)
