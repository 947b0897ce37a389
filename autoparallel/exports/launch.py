"""Files that start a training script on the machines of a plan: torchrun, Slurm, Kubernetes."""

from __future__ import annotations

from autoparallel.exports.plan import Plan, header, unsaid_hosts

PORT = 29500  # torchrun's own default


def torchrun(plan: Plan) -> str:
    """A shell script to be run on every node. Where the plan names nodes, each is told its number."""
    meet = (
        f'--node-rank "$NODE_RANK" \\\n  --master-addr "${{HEAD_NODE:-localhost}}" --master-port {PORT} "$@"\n'
        if plan.strategy.mesh.placement
        else f"--rdzv-backend c10d \\\n"
        f'  --rdzv-endpoint "${{HEAD_NODE:-localhost}}:{PORT}" --rdzv-id autoparallel "$@"\n'
    )
    return (
        "#!/usr/bin/env bash\n"
        + header(plan, "torchrun", unsaid_hosts(plan.strategy))
        + "# On every node: HEAD_NODE=host-of-the-first ./launch.sh train.py ARGUMENTS\n"
        "set -euo pipefail\n"
        f"exec torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices_per_node} " + meet
    )


def slurm(plan: Plan) -> str:
    """A batch script: one torchrun per node."""
    gpus = "" if plan.on_cpu else f"#SBATCH --gpus-per-node={plan.devices_per_node}\n"
    return (
        "#!/usr/bin/env bash\n"
        "#SBATCH --job-name=autoparallel\n"
        f"#SBATCH --nodes={plan.nodes}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"{gpus}"
        "#SBATCH --exclusive\n"
        + header(plan, "Slurm", unsaid_hosts(plan.strategy))
        + "# sbatch job.sh train.py ARGUMENTS\n"
        "set -euo pipefail\n"
        'head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}\n"
        f"srun torchrun --nnodes {plan.nodes} --nproc-per-node {plan.devices_per_node} --rdzv-backend c10d \\\n"
        f'  --rdzv-endpoint "$head_node:{PORT}" --rdzv-id "$SLURM_JOB_ID" "$@"\n'
    )


def kubernetes(plan: Plan) -> str:
    """A headless Service and an indexed Job, one pod per node; no operator has to be installed."""
    per_node, nodes = plan.devices_per_node, plan.nodes
    resources = (
        f"              cpu: {per_node}\n" if plan.on_cpu else f"              nvidia.com/gpu: {per_node}\n"
    )
    return (
        header(plan, "Kubernetes", unsaid_hosts(plan.strategy))
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
