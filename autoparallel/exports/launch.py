"""Files that start a training script on the machines of a plan: torchrun, Slurm, Kubernetes."""

from __future__ import annotations

from autoparallel.exports.plan import Exported, Plan, header, unsaid_to_launch

PORT = 29500  # torchrun's own default


def torchrun(plan: Plan) -> Exported:
    """A shell script to be run on every node. Where the plan names nodes, each is told its number."""
    meet = (
        f'--node-rank "$NODE_RANK" \\\n  --master-addr "${{HEAD_NODE:-localhost}}" --master-port {PORT} "$@"\n'
        if plan.hosts
        else f"--rdzv-backend c10d \\\n"
        f'  --rdzv-endpoint "${{HEAD_NODE:-localhost}}:{PORT}" --rdzv-id autoparallel "$@"\n'
    )
    unsaid = unsaid_to_launch(plan)
    text = (
        "#!/usr/bin/env bash\n"
        + header(plan, "torchrun", unsaid)
        + "# On every node: HEAD_NODE=host-of-the-first ./launch.sh train.py ARGUMENTS\n"
        "set -euo pipefail\n"
        f"exec torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices_per_node} " + meet
    )
    return Exported(text=text, unsaid=tuple(unsaid))


def slurm_head(plan: Plan, *options: str) -> str:
    """The first lines of a batch script that starts one process a node, with these options of sbatch besides."""
    gpus = () if plan.on_cpu else (f"--gpus-per-node={plan.devices_per_node}",)
    every = (
        "--job-name=autoparallel",
        f"--nodes={plan.nodes}",
        "--ntasks-per-node=1",
        *gpus,
        "--exclusive",
        *options,
    )
    return "#!/usr/bin/env bash\n" + "".join(f"#SBATCH {option}\n" for option in every)


def slurm(plan: Plan) -> Exported:
    """A batch script: one torchrun per node. Where the plan names nodes, a file says which hosts they are, in order."""
    unsaid = unsaid_to_launch(plan)
    text = (
        slurm_head(plan)
        + header(plan, "Slurm", unsaid)
        + (_slurm_in_order(plan) if plan.hosts else _slurm_in_any_order(plan))
    )
    return Exported(text=text, unsaid=tuple(unsaid))


def _slurm_in_any_order(plan: Plan) -> str:
    return (
        "# sbatch job.sh train.py ARGUMENTS\n"
        "set -euo pipefail\n"
        'head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}\n"
        f"srun torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices_per_node} --rdzv-backend c10d \\\n"
        f'  --rdzv-endpoint "$head_node:{PORT}" --rdzv-id "$SLURM_JOB_ID" "$@"\n'
    )


def _slurm_in_order(plan: Plan) -> str:
    """Slurm sorts hosts by name unless a file of them stands for their order (`--distribution=arbitrary`)."""
    return (
        "# Write hosts.txt, one host a line: line K is --node-rank K above. Then:\n"
        '# sbatch --nodelist="$(paste -sd, hosts.txt)" job.sh train.py ARGUMENTS\n'
        "set -euo pipefail\n"
        "export SLURM_HOSTFILE=${HOSTS:-$SLURM_SUBMIT_DIR/hosts.txt}\n"
        'HEAD_NODE=$(head -n 1 "$SLURM_HOSTFILE")\n'
        "export HEAD_NODE\n"
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}\n"
        "# shellcheck disable=SC2016  # the shells of the tasks read the variables\n"
        f"srun --distribution=arbitrary bash -c 'exec torchrun --nnodes {plan.nodes} "
        f"--nproc-per-node {plan.devices_per_node} \\\n"
        f'  --node-rank "$SLURM_PROCID" --master-addr "$HEAD_NODE" --master-port {PORT} "$@"\' torchrun "$@"\n'
    )


def kubernetes(plan: Plan) -> Exported:
    """A headless Service and an indexed Job, one pod per node; no operator has to be installed."""
    per_node, nodes = plan.devices_per_node, plan.nodes
    resources = (
        f"              cpu: {per_node}\n" if plan.on_cpu else f"              nvidia.com/gpu: {per_node}\n"
    )
    unsaid = unsaid_to_launch(plan, "; pods start on any node: pin them")
    text = (
        header(plan, "Kubernetes", unsaid)
        + f"""# Set image and args; the strategy file must be in the image or on a volume.
apiVersion: v1
kind: Service
metadata:
  name: autoparallel
spec:
  clusterIP: None
  selector:
    job-name: autoparallel
---
apiVersion: batch/v1
kind: Job
metadata:
  name: autoparallel
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: autoparallel
      restartPolicy: Never
      containers:
        - name: train
          image: REPLACE-WITH-YOUR-IMAGE
          command:
            - torchrun
            - --nnodes={nodes}
            - --nproc-per-node={per_node}
            - --rdzv-backend=c10d
            - --rdzv-endpoint=autoparallel-0.autoparallel:{PORT}
            - --rdzv-id=autoparallel
          args: [train.py]
          ports:
            - containerPort: {PORT}
          resources:
            limits:
{resources}          volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
      volumes:
        - name: shared-memory
          emptyDir:
            medium: Memory
"""
    )
    return Exported(text=text, unsaid=tuple(unsaid))
