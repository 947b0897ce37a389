"""Manifests for Kubernetes of a run which survives (`autoparallel run`, docs/elastic.md): JobSet, and Kubeflow's TrainJob."""

from __future__ import annotations

from textwrap import indent

from autoparallel.exports.elastic import GRACE_S, PORT
from autoparallel.exports.plan import Exported, Plan, header, unsaid_to_launch

# How often pods are replaced, or all started again. Kind: chosen.
RESTARTS = 100
# After the processes' time to save in: until the agent has ended, too. Kind: chosen.
END_S = GRACE_S + 30
# Names the pods of a JobSet; those of a TrainJob are of a JobSet with its name.
PODS = "jobset.sigs.k8s.io/jobset-name: autoparallel"

# What both need: where checkpoints are kept, and that other tenants' pods do not reach these.
_AROUND = f"""apiVersion: v1
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
      {PODS}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              {PODS}
---
"""

_MOUNTS = """volumeMounts:
  - name: shared-memory
    mountPath: /dev/shm
  - name: run
    mountPath: /run/autoparallel
"""

_VOLUMES = """volumes:
  - name: shared-memory
    emptyDir:
      medium: Memory
  - name: run
    persistentVolumeClaim:
      claimName: autoparallel-run
"""


def jobset(plan: Plan) -> Exported:
    """A JobSet (jobset.x-k8s.io/v1alpha2): one pod per node near each other, with a checkpoint volume, and a network policy
    that lets these pods alone talk to each other. All start again when one fails; with fewest nodes, that one alone."""
    nodes, fewest = plan.nodes, plan.pods.min_nodes
    container = f"""- name: train
  image: REPLACE-WITH-YOUR-IMAGE
  command:
    - autoparallel
    - run
    - --nnodes={_bounds(plan, str(nodes))}
    - --nproc-per-node={plan.devices_per_node}
    - --rdzv-endpoint=autoparallel-node-0-0.autoparallel:{PORT}
    - --rdzv-id=autoparallel
    - --grace={GRACE_S}
  args: [train.py]
  ports:
    - containerPort: {PORT}
      protocol: TCP
  resources:
    limits:
{_resources(plan, 6)}{indent(_MOUNTS, "  ")}"""
    failures = (
        "backoffLimit: 0  # one pod that fails starts all again; the others go on with export's --min-nodes\n"
        if fewest is None
        else f"backoffLimit: {RESTARTS}  # a pod that fails is replaced, while the others go on\n"
        'successPolicy:\n  rules:\n    - succeededIndexes: "0"  # where the others meet: once it is done, all are\n'
    )
    text = f"""apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: autoparallel
spec:
  failurePolicy:
    maxRestarts: {RESTARTS}
  network:
    enableDNSHostnames: true
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {nodes}
          parallelism: {nodes}
{indent(failures, " " * 10)}          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {END_S}
{indent(_affinity(plan), " " * 14)}              containers:
{indent(container, " " * 16)}{indent(_VOLUMES, " " * 14)}"""
    return _manifest(plan, "JobSet", text, where="metadata.annotations")


def trainjob(plan: Plan) -> Exported:
    """A Kubeflow TrainJob (trainer.kubeflow.org/v1alpha1) on the torch-distributed runtime that Trainer installs, which it
    patches: the volume, the policy and the places of pods that the JobSet has. Users may rarely install runtimes themselves."""
    text = f"""apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: autoparallel
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: REPLACE-WITH-YOUR-IMAGE
    # Neither TrainJob nor its runtime has bounds MIN:MAX (since Trainer 2.2): numNodes pods start. Export with --min-nodes MIN
    # has --nnodes=MIN:$(PET_NNODES), and the run goes on while others are away. Trainer sets what begins with PET_.
    command:
      - autoparallel
      - run
      - --nnodes={_bounds(plan, "$(PET_NNODES)")}
      - --nproc-per-node=$(PET_NPROC_PER_NODE)
      - --rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)
      - --rdzv-id=autoparallel
      - --grace={GRACE_S}
    args: [train.py]
    numNodes: {plan.nodes}
    numProcPerNode: {plan.devices_per_node}
    resourcesPerNode:
      limits:
{_resources(plan, 8)}  # Trainer 2.3 or later. How often pods that fail are started again is the runtime's to say, not a patch's: torch-distributed
  # leaves Kubernetes' own, which ends the job after six; a runtime with backoffLimit and failurePolicy.maxRestarts has more.
  runtimePatches:
    - manager: autoparallel/export
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: {END_S}
{indent(_affinity(plan), " " * 24)}                        containers:
                          - name: node
{indent(_MOUNTS, " " * 28)}{indent(_VOLUMES, " " * 24)}"""
    return _manifest(plan, "TrainJob", text, where="trainingRuntimeSpec.template's metadata.annotations")


def _manifest(plan: Plan, kind: str, text: str, *, where: str) -> Exported:
    unsaid = unsaid_to_launch(plan, "; pods start on any node: pin them")
    told = f"""# Set image, args, and the class of the volume, which all nodes must be able to write to. It is mounted at
# /run/autoparallel: give Trainer a folder there.
# Nodes with the same {", ".join(plan.pods.near)} are preferred.
# Labels of racks and blocks differ by cluster (kubectl get nodes --show-labels): export with --near LABEL, nearest first.
# To have a rack or block for this job alone (all pods must fit in it), add to {where}:
#   alpha.jobset.sigs.k8s.io/exclusive-topology: LABEL
"""
    return Exported(text=header(plan, kind, unsaid) + told + _AROUND + text, unsaid=tuple(unsaid))


def _bounds(plan: Plan, most: str) -> str:
    return most if plan.pods.min_nodes is None else f"{plan.pods.min_nodes}:{most}"


def _affinity(plan: Plan) -> str:
    """Pods prefer nodes with the same labels as those of the others: the first label weighs most."""
    terms = "".join(
        f"""      - weight: {max(100 >> place, 1)}
        podAffinityTerm:
          topologyKey: {label}
          labelSelector:
            matchLabels:
              {PODS}
"""
        for place, label in enumerate(plan.pods.near)
    )
    return f"affinity:\n  podAffinity:\n    preferredDuringSchedulingIgnoredDuringExecution:\n{terms}"


def _resources(plan: Plan, spaces: int) -> str:
    """CPUs, or GPUs and the network cards that reach the others directly, where there are others."""
    lines = [f"cpu: {plan.devices_per_node}"] if plan.on_cpu else [f"nvidia.com/gpu: {plan.devices_per_node}"]
    if not plan.on_cpu and plan.nodes > 1:
        lines.append("rdma/hca: 1")
    return "".join(f"{' ' * spaces}{line}\n" for line in lines)
