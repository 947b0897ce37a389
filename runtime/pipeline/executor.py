"""Executes the actions of a `Program` on one pipeline rank.

The rows that are executed are the rows that are priced: nothing is reordered, inserted or left out. This is
why there is an executor here and not torch's `PipelineStage`: that one wants one tensor with a gradient per
edge and positional inputs on the first stage only, and builds its own actions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.errors import UserError
from autoparallel.runtime.gradients.put_off import PutOff, backward_putting_off
from autoparallel.runtime.gradients.split_backward import (
    WeightHalf,
    backward_input,
    backward_input_recomputed,
)
from autoparallel.runtime.pipeline.channels import (
    Channels,
    Described,
    describe,
    gradient_part,
    rebuild,
)
from autoparallel.runtime.stages.cut import StageModule

Loss = Callable[[Any, Any], Tensor]  # (the model's output, target) -> scalar
_LAST_OF_BACKWARD = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What surrounds the passes: called by the runner, on this rank's stages only."""

    run_stage: Callable[[StageModule, Sequence[Tensor], Any], Any] = lambda stage, received, inputs: stage(
        received, inputs
    )
    before_forward: Callable[[int], None] = lambda stage: None  # noqa: ARG005
    before_backward: Callable[[int, bool, bool], None] = lambda stage, last, whole: None  # noqa: ARG005
    run_weights: Callable[[int, WeightHalf | PutOff], None] = lambda stage, half: half.run()  # noqa: ARG005
    reduce_gradients: Callable[[int], None] = lambda stage: None  # noqa: ARG005
    weights: Callable[[int], Sequence[Tensor]] | None = (
        None  # that passes compute with; None: the stage's own
    )
    before_action: Callable[[Action], None] = lambda action: None  # noqa: ARG005


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A micro-batch between its forward and its backward on one stage.

    Of what was handed on only the way back is kept: the numbers are gone once they have been sent.
    """

    received: list[Tensor]
    outputs: list[
        tuple[GradientEdge, Described]
    ]  # of what was handed on, or of the loss, where it wants a gradient
    rest: WeightHalf | PutOff | None = None  # of a backward pass whose first half has run


class PipelineRunner:
    """Runs this rank's row, step by step.

    `stages` are the stages of this rank by index, `rows` the actions of every rank of the pipeline, `groups`
    two process groups of these ranks (messages up, messages down), `mesh` the mesh that activations
    are laid out on, if any, `recomputed` the stages with blocks that are recomputed whole, `puts_off` those whose products
    put off the gradients of their weights, `loss_dtype` that of the
    mean loss, which ranks that see no loss must know without asking.
    """

    def __init__(
        self,
        stages: Mapping[int, StageModule],
        rows: Sequence[Sequence[Action]],
        *,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        mesh: DeviceMesh | None = None,
        hooks: Hooks | None = None,
        recomputed: Collection[int] = (),
        puts_off: Collection[int] = (),
        loss_dtype: torch.dtype = torch.float32,
    ) -> None:
        group = groups[0]
        self.stages, self.row = stages, rows[dist.get_rank(group)]
        self.micro_batches = 1 + max(a.micro for row in rows for a in row if a.micro is not None)
        self._home = {a.stage: rank for rank, row in enumerate(rows) for a in row}
        self._last_stage = max(self._home)
        assert set(stages) == {a.stage for a in self.row}, "the program runs other stages than were cut"
        self._final = {a.stage: a for a in self.row if a.kind in _LAST_OF_BACKWARD}
        self._group, self._device, self._mesh, self._loss_dtype = group, device, mesh, loss_dtype
        self._hooks, self._recomputed, self._puts_off = hooks or Hooks(), recomputed, puts_off
        self._channels = Channels(rows, self._home, groups, device)
        self._do: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.BACKWARD_INPUT: self._backward_input,
            ActionKind.BACKWARD_WEIGHT: self._backward_weight,
            ActionKind.SEND_F: self._send,
            ActionKind.SEND_B: self._send,
            ActionKind.RECV_F: self._channels.post,
            ActionKind.RECV_B: self._channels.post,
            ActionKind.REDUCE_GRAD: lambda action: self._hooks.reduce_gradients(action.stage),
            ActionKind.STEP: lambda action: None,  # noqa: ARG005  the optimizer is the user's
        }

    def step(self, inputs: Sequence[Any], targets: Sequence[Any], loss: Loss) -> Tensor:
        """Forward and backward of all micro-batches; adds to `.grad` the gradient of their mean loss.

        `inputs` and `targets` have one entry per micro-batch, the same on every rank of the pipeline. Returns
        the mean loss, on every rank.
        """
        if len(inputs) != self.micro_batches or len(targets) != self.micro_batches:
            raise UserError(f"the program runs {self.micro_batches} micro-batches, not {len(inputs)}")
        self._inputs, self._targets, self._loss = inputs, targets, loss
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._ready: dict[tuple[bool, int, int], list[Tensor]] = {}  # handed over, or to be sent
        self._losses: list[Tensor] = []
        leaves = pytree.tree_leaves(inputs[0])
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))
        self._channels.begin((shapes, *(stage.training for stage in self.stages.values())))
        for action in self.row:
            self._hooks.before_action(action)
            self._do[action.kind](action)
        self._channels.finish()
        assert not self._flights, "the program left a backward out"
        self._inputs, self._targets = (), ()
        return self._mean_loss()

    def _forward(self, action: Action) -> None:
        stage, micro = action.stage, _micro(action)
        received = [] if stage == 0 else self._take_activations(action)
        self._hooks.before_forward(stage)
        output = self._hooks.run_stage(self.stages[stage], received, self._inputs[micro])
        if stage == self._last_stage:
            value = self._loss(output, self._targets[micro])
            self._losses.append(value.detach())
            outputs = [value / self.micro_batches]
        else:
            outputs = list(output)
            self._ready[True, stage + 1, micro] = [
                t.detach().requires_grad_(t.requires_grad) for t in outputs
            ]
        ways = [(get_gradient_edge(t), describe(t)) for t in outputs if t.requires_grad]
        self._flights[stage, micro] = _Flight(received=received, outputs=ways)

    def _take_activations(self, action: Action) -> list[Tensor]:
        """The activations handed to a stage, as leaves that collect gradients."""
        stage, micro = action.stage, _micro(action)
        if self._home[stage - 1] == self._home[stage]:
            values = self._ready.pop((True, stage, micro))
            return [value.detach().requires_grad_(value.requires_grad) for value in values]
        parts, described = self._channels.take(Action(stage, ActionKind.RECV_F, micro))
        return [
            rebuild(part, d, self._mesh).requires_grad_(d.wants_gradient)
            for part, d in zip(parts, described, strict=True)
        ]

    def _take_gradients(self, action: Action) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """Where the backward pass begins, and the gradients there."""
        stage, micro = action.stage, _micro(action)
        outputs = [edge for edge, _ in self._flights[stage, micro].outputs]
        layouts = [described for _, described in self._flights[stage, micro].outputs]
        if stage == self._last_stage:
            return outputs, [None]
        if self._home[stage + 1] == self._home[stage]:
            parts = self._ready.pop((False, stage, micro))
        else:
            parts, _ = self._channels.take(Action(stage, ActionKind.RECV_B, micro))
        return outputs, [rebuild(part, d, self._mesh) for part, d in zip(parts, layouts, strict=True)]

    def _backward(self, action: Action) -> None:
        stage, micro = action.stage, _micro(action)
        outputs, gradients = self._take_gradients(action)
        self._hooks.before_backward(stage, action == self._final[stage], True)
        if outputs:
            torch.autograd.backward(outputs, gradients)
        flight = self._flights.pop((stage, micro))
        self._hand_back(action, flight.received, [t.grad for t in flight.received])

    def _backward_input(self, action: Action) -> None:
        """Gradients of what the stage received; those of its weights follow with `W`."""
        flight = self._flights[action.stage, _micro(action)]
        outputs, gradients = self._take_gradients(action)
        self._hooks.before_backward(action.stage, False, False)
        wanted = [t for t in flight.received if t.requires_grad]
        if action.stage in self._puts_off:
            grads, flight.rest = backward_putting_off(outputs, gradients, wanted, self._weights(action.stage))
        elif action.stage in self._recomputed:
            weights = self._weights(action.stage)
            grads, flight.rest = backward_input_recomputed(outputs, gradients, wanted, weights)
        else:
            grads, flight.rest = backward_input(outputs, gradients, wanted)
        found = iter(grads)
        self._hand_back(
            action, flight.received, [next(found) if t.requires_grad else None for t in flight.received]
        )

    def _weights(self, stage: int) -> Sequence[Tensor]:
        if self._hooks.weights is not None:
            return self._hooks.weights(stage)
        return [p for p in self.stages[stage].parameters() if p.requires_grad]

    def _backward_weight(self, action: Action) -> None:
        flight = self._flights.pop((action.stage, _micro(action)))
        self._hooks.before_backward(action.stage, action == self._final[action.stage], False)
        assert flight.rest is not None, "W without I"
        self._hooks.run_weights(action.stage, flight.rest)

    def _hand_back(self, action: Action, received: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        if action.stage > 0:
            self._ready[False, action.stage - 1, _micro(action)] = [
                gradient_part(g, t) for t, g in zip(received, gradients, strict=True) if t.requires_grad
            ]

    def _send(self, action: Action) -> None:
        forward = action.kind is ActionKind.SEND_F
        stage = action.stage + (1 if forward else -1)
        self._channels.send(action, self._ready.pop((forward, stage, _micro(action))))

    def _mean_loss(self) -> Tensor:
        """The mean of the micro-batches' losses, from the last stage to every rank of the pipeline."""
        last = self._home[self._last_stage]
        mean = torch.zeros((), dtype=self._loss_dtype, device=self._device)
        if self._losses:
            mean = torch.stack(self._losses).to(self._loss_dtype).mean()
        dist.broadcast(mean, dist.get_global_rank(self._group, last), group=self._group)
        return mean


def _micro(action: Action) -> int:
    assert action.micro is not None
    return action.micro
