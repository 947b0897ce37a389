"""Inputs whose samples do not stand along dim 0: they cannot be cut into micro-batches and shares of the batch."""

from __future__ import annotations

from torch import fx

from autoparallel.planner.capture.errors import ModelError
from autoparallel.planner.capture.nodes import Role, calls, tensor

_BAGS = ("aten._embedding_bag.", "aten._embedding_bag_forward_only.")
_OFFSETS = 2  # which of its tensors says where each bag begins


def check_bags(graph: fx.Graph) -> None:
    """Raises ModelError where offsets into one flat list of indices are inputs: a micro-batch would get its own samples' offsets,
    which count from the first index of all samples."""
    given = {
        tensor(node).storage: node.meta["name"] for node in graph.nodes if node.meta.get("role") is Role.INPUT
    }
    for call in calls(graph):
        for launch in call.meta["kernels"]:
            if not launch.target.startswith(_BAGS) or len(launch.inputs) <= _OFFSETS:
                continue
            if (name := given.get(launch.inputs[_OFFSETS].storage)) is not None:
                frame = call.meta["frame"]
                raise ModelError(
                    f"{frame.path or 'the model'}: an EmbeddingBag is given one flat list of indices with offsets (the input {name}), "
                    "whose samples do not stand along dim 0, so that a batch cannot be cut into micro-batches and shares: give it indices "
                    "of the shape (samples, indices of a sample), padded and with padding_idx where samples have unlike numbers"
                )
