"""In which order one pipeline rank computes: GPipe, 1F1B and its interleaved and zero-bubble forms, ZB-V, DualPipe-V.

Sources: GPipe (arXiv:1811.06965), 1F1B and interleaved 1F1B (arXiv:2104.04473), zero bubble ZB-1P and ZB-V
(arXiv:2401.10241), DualPipe-V (github.com/deepseek-ai/DualPipe). Each gives the order that
`torch.distributed.pipelining` (2.11 to 2.13) gives.
"""

from __future__ import annotations

from collections import Counter, deque

from autoparallel.costmodel.program import Action, ActionKind

K = ActionKind


def gpipe_order(rank: int, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [Action(rank, kind, micro) for kind in (K.FORWARD, K.BACKWARD) for micro in range(micro_batches)]


def one_forward_one_backward_order(
    rank: int, *, ranks: int, virtual_stages: int, micro_batches: int, warmup_per_hop: int, split: bool
) -> list[Action]:
    """Warm up with forwards, alternate forward and backward, drain; chunks take turns in rounds of micro-batches.

    Warm-up: (virtual_stages - 1) rounds and `warmup_per_hop` forwards per rank behind this one. With `split`
    the backward is I, and W follows `rank` operations later, where it fills the bubble of the drain.
    """
    per_round = micro_batches // max(1, micro_batches // ranks) if virtual_stages > 1 else micro_batches
    total = virtual_stages * micro_batches
    warmup = min((virtual_stages - 1) * per_round + warmup_per_hop * (ranks - 1 - rank), total)
    visits = _visits(total, per_round, virtual_stages)
    backward_visits = [(virtual_stages - 1 - chunk, micro) for chunk, micro in visits]

    def action(kind: ActionKind, visit: tuple[int, int]) -> Action:
        return Action(visit[0] * ranks + rank, kind, visit[1])

    order = [action(K.FORWARD, visit) for visit in visits[:warmup]]
    backward = K.BACKWARD_INPUT if split else K.BACKWARD
    weights = 0
    for turn in range(total):
        if turn + warmup < total:
            order.append(action(K.FORWARD, visits[turn + warmup]))
        order.append(action(backward, backward_visits[turn]))
        if split and turn >= rank:
            order.append(action(K.BACKWARD_WEIGHT, backward_visits[weights]))
            weights += 1
    if split:
        order.extend(action(K.BACKWARD_WEIGHT, visit) for visit in backward_visits[weights:])
    return order


def _visits(total: int, per_round: int, chunks: int) -> list[tuple[int, int]]:
    """(chunk, micro-batch) of each operation: a round of micro-batches through one chunk, then the next chunk."""
    seen: Counter[int] = Counter()
    visits = []
    for turn in range(total):
        chunk = (turn // per_round) % chunks
        visits.append((chunk, seen[chunk]))
        seen[chunk] += 1
    return visits


class _Counting:
    """Actions with the micro-batches counted per stage and kind, W in the order in which I went before."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: Counter[tuple[int, ActionKind]] = Counter()
        self.pending: deque[tuple[int, int]] = deque()

    def add(self, stage: int, *kinds: ActionKind) -> None:
        """The next micro-batch of each kind; B and I count together."""
        for kind in kinds:
            key = (stage, K.BACKWARD_INPUT if kind is K.BACKWARD else kind)
            micro = self.counts[key]
            self.counts[key] += 1
            self.actions.append(Action(stage, kind, micro))
            if kind is K.BACKWARD_INPUT:
                self.pending.append((stage, micro))

    def add_weight(self) -> None:
        """The oldest W that waits, if one does."""
        if self.pending:
            stage, micro = self.pending.popleft()
            self.actions.append(Action(stage, K.BACKWARD_WEIGHT, micro))


def zbv_order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """ZB-V: two chunks a rank, V-shaped; laid out for at least 2 * ranks - 1 micro-batches, surplus ones left out."""
    planned = max(2 * ranks - 1, micro_batches)
    down, up = rank, 2 * ranks - 1 - rank
    order = _Counting()
    both = (K.BACKWARD_INPUT, K.BACKWARD_WEIGHT)
    for _ in range(2 * (ranks - rank) - 1):
        order.add(down, K.FORWARD)
    for _ in range(rank):
        order.add(up, K.FORWARD)
        order.add(down, K.FORWARD)
    for _ in range(ranks - rank):
        order.add(up, K.FORWARD, *both)
    while (
        order.counts[up, K.FORWARD] < order.counts[down, K.FORWARD] or order.counts[down, K.FORWARD] < planned
    ):
        if order.counts[down, K.FORWARD] < planned:
            order.add(down, K.FORWARD)
        order.add(down, *both)
        order.add(up, K.FORWARD, *both)
    for _ in range(rank):
        order.add(down, K.BACKWARD_INPUT)
        order.add(up, K.BACKWARD_INPUT)
    for _ in range(ranks - rank):
        order.add(down, *both)
    for stage in (up, down):
        while order.counts[stage, K.BACKWARD_WEIGHT] < order.counts[stage, K.BACKWARD_INPUT]:
            order.add(stage, K.BACKWARD_WEIGHT)
    return [action for action in order.actions if action.micro is not None and action.micro < micro_batches]


def dualpipev_order(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """DualPipe-V: two chunks a rank, V-shaped; F of one chunk beside B of the other in the steady state."""
    down, up = rank, 2 * ranks - 1 - rank
    behind = ranks - rank - 1
    order = _Counting()
    for _ in range(2 * behind):
        order.add(down, K.FORWARD)
    for _ in range(rank + 1):
        order.add(down, K.FORWARD)
        order.add(up, K.FORWARD)
    for _ in range(behind):
        order.add(up, K.BACKWARD_INPUT)
        order.add_weight()
        order.add(up, K.FORWARD)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        order.add(down, K.FORWARD)
        order.add(up, K.BACKWARD)
        order.add(up, K.FORWARD)
        order.add(down, K.BACKWARD)
    for _ in range(behind):
        order.add(up, K.BACKWARD)
        order.add(up, K.FORWARD)
        order.add(down, K.BACKWARD)
    # The second half of the drain splits the backward; which of the two goes first depends on the rank's parity.
    split_from = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    for turn in range(2 * (rank + 1)):
        order.add(down if turn % 2 else up, K.BACKWARD_INPUT if turn >= split_from else K.BACKWARD)
    for _ in range(behind):
        order.add_weight()
        order.add(down, K.BACKWARD_INPUT)
    for _ in range(rank + 1):
        order.add_weight()
    return order.actions
