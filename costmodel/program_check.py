"""Is a grid of actions a legal program? Each micro-batch once through every stage, in order, without deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autoparallel.costmodel.program import Action, ActionKind
from autoparallel.costmodel.program_text import grid, show_action
from autoparallel.errors import UserError

K = ActionKind
_SENDS = {K.SEND_F: K.RECV_F, K.SEND_B: K.RECV_B}
_RECEIVES = {K.RECV_F: K.SEND_F, K.RECV_B: K.SEND_B}


class ProgramError(UserError):
    """The actions of a program cannot be executed; the message shows the grid with the bad step marked."""


def check(ranks: Sequence[Sequence[Action]]) -> None:
    """Raise `ProgramError` unless the program can run.

    Per stage, on one rank: F of every micro-batch once, then B, or I and later W, once; REDUCE_GRAD and then
    STEP after the last of them, STEPs at the end of the rank. Between stages of different ranks every value is
    sent after it is computed and received before it is used, and sends and receives meet even when each blocks
    until its partner is there (which is what pairs of ranks over NCCL may do).
    """
    homes = _homes(ranks)
    micros = _micro_batches(ranks)
    for rank, actions in enumerate(ranks):
        _check_rank(ranks, rank, actions, homes)
    _check_complete(ranks, homes, micros)
    _check_meetings(ranks, homes)


def _fail(ranks: Sequence[Sequence[Action]], rank: int, step: int, reason: str) -> ProgramError:
    what = show_action(ranks[rank][step]) if step < len(ranks[rank]) else "the end"
    table = grid(ranks, bad=(rank, min(step, len(ranks[rank]) - 1)), reason=reason)
    return ProgramError(f"rank {rank}, step {step} ({what}): {reason}\n\n{table}")


def _homes(ranks: Sequence[Sequence[Action]]) -> dict[int, int]:
    """Rank of every stage."""
    homes: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for step, action in enumerate(actions):
            home = homes.setdefault(action.stage, rank)
            if home != rank:
                raise _fail(ranks, rank, step, f"stage {action.stage} already stands on rank {home}")
    missing = sorted(set(range(max(homes, default=0) + 1)) - set(homes))
    if missing:
        raise ProgramError(f"stages {missing} stand on no rank: give each stage to one rank")
    return homes


def _micro_batches(ranks: Sequence[Sequence[Action]]) -> int:
    return 1 + max((a.micro for actions in ranks for a in actions if a.micro is not None), default=-1)


def _check_rank(
    ranks: Sequence[Sequence[Action]], rank: int, actions: Sequence[Action], homes: dict[int, int]
) -> None:
    """Order on one rank: every action after what it needs, and at most once."""
    done: set[Action] = set()
    stepped = False
    for step, action in enumerate(actions):
        if action in done:
            raise _fail(ranks, rank, step, "done twice")
        if stepped and action.kind is not K.STEP:
            raise _fail(ranks, rank, step, "only STEPs may stand after the first STEP of a rank")
        stepped = stepped or action.kind is K.STEP
        reason = _missing(action, done, homes)
        if reason:
            raise _fail(ranks, rank, step, reason)
        done.add(action)


def _missing(action: Action, done: set[Action], homes: dict[int, int]) -> str:
    """Why `action` may not stand after `done`, or nothing."""
    stage, micro, kind = action.stage, action.micro, action.kind
    last = max(homes)
    full, split = Action(stage, K.BACKWARD, micro), Action(stage, K.BACKWARD_INPUT, micro)
    reduced = Action(stage, K.REDUCE_GRAD)
    if kind is K.FORWARD:
        return _missing_input(action, stage - 1, K.RECV_F, (K.FORWARD,), done, homes) if stage else ""
    if kind in (K.BACKWARD, K.BACKWARD_INPUT, K.BACKWARD_WEIGHT) and reduced in done:
        return "backward after the gradients of the stage were reduced"
    if kind in (K.BACKWARD, K.BACKWARD_INPUT):
        if Action(stage, K.FORWARD, micro) not in done:
            return "backward before forward"
        if (split if kind is K.BACKWARD else full) in done:
            return "both B and I of one micro-batch"
        kinds = (K.BACKWARD, K.BACKWARD_INPUT)
        return _missing_input(action, stage + 1, K.RECV_B, kinds, done, homes) if stage < last else ""
    if kind is K.BACKWARD_WEIGHT and split not in done:
        return "W before I"
    if kind is K.SEND_F:
        if stage == last or homes[stage + 1] == homes[stage]:
            return "there is no next stage on another rank to send to"
        return "" if Action(stage, K.FORWARD, micro) in done else "sent before it is computed"
    if kind is K.SEND_B:
        if stage == 0 or homes[stage - 1] == homes[stage]:
            return "there is no previous stage on another rank to send to"
        return "" if full in done or split in done else "sent before it is computed"
    if kind is K.STEP and reduced not in done:
        return "STEP before REDUCE_GRAD"
    return ""


def _missing_input(
    action: Action,
    neighbour: int,
    receive: ActionKind,
    made_by: tuple[ActionKind, ...],
    done: set[Action],
    homes: dict[int, int],
) -> str:
    """What a stage reads comes from its neighbour on the same rank, or has been received."""
    if homes[neighbour] == homes[action.stage]:
        local = any(Action(neighbour, kind, action.micro) in done for kind in made_by)
        return "" if local else f"before stage {neighbour}, on the same rank, has made its input"
    received = Action(action.stage, receive, action.micro) in done
    return "" if received else f"before its input was received ({action.stage}{receive.value}{action.micro})"


def _check_complete(ranks: Sequence[Sequence[Action]], homes: dict[int, int], micros: int) -> None:
    """Nothing is left out: F and B (or I and W) of every micro-batch, REDUCE_GRAD and STEP of every stage."""
    done = [set(actions) for actions in ranks]
    for stage, rank in sorted(homes.items()):
        missing = [Action(stage, kind) for kind in (K.REDUCE_GRAD, K.STEP)]
        for micro in range(micros):
            missing.append(Action(stage, K.FORWARD, micro))
            if Action(stage, K.BACKWARD_INPUT, micro) in done[rank]:
                missing.append(Action(stage, K.BACKWARD_WEIGHT, micro))
            else:
                missing.append(Action(stage, K.BACKWARD, micro))
        for action in missing:
            if action not in done[rank]:
                reason = f"{show_action(action)} is missing"
                raise _fail(ranks, rank, len(ranks[rank]), reason)


def _partner(action: Action, homes: dict[int, int]) -> tuple[int, Action] | None:
    """Rank and action that a send or a receive meets; None for the others."""
    if action.kind in _SENDS:
        stage = action.stage + (1 if action.kind is K.SEND_F else -1)
        return homes[stage], Action(stage, _SENDS[action.kind], action.micro)
    if action.kind in _RECEIVES:
        stage = action.stage + (-1 if action.kind is K.RECV_F else 1)
        if stage not in homes:
            return -1, action
        return homes[stage], Action(stage, _RECEIVES[action.kind], action.micro)
    return None


def _check_meetings(ranks: Sequence[Sequence[Action]], homes: dict[int, int]) -> None:
    """Run all ranks side by side with blocking sends and receives; whoever never meets its partner is shown."""
    at = [0] * len(ranks)
    todo = deque(range(len(ranks)))
    while todo:
        rank = todo.popleft()
        while at[rank] < len(ranks[rank]):
            meeting = _partner(ranks[rank][at[rank]], homes)
            if meeting is not None:
                peer, partner = meeting
                if peer < 0 or at[peer] >= len(ranks[peer]) or ranks[peer][at[peer]] != partner:
                    break
                at[peer] += 1
                todo.append(peer)
            at[rank] += 1
    _check_all_met(ranks, homes, at)


def _check_all_met(ranks: Sequence[Sequence[Action]], homes: dict[int, int], at: Sequence[int]) -> None:
    """Show who waits for ever: first a rank whose partner does not exist at all, else one of a circle."""
    stuck: list[tuple[bool, int, int, str]] = []
    for rank, step in enumerate(at):
        if step == len(ranks[rank]):
            continue
        meeting = _partner(ranks[rank][step], homes)
        assert meeting is not None
        peer, partner = meeting
        waits = (
            f"waits for {show_action(partner)} on rank {peer}" if peer >= 0 else "has no stage to come from"
        )
        exists = peer >= 0 and partner in ranks[peer][at[peer] :]
        stuck.append((exists, rank, step, f"{waits}, which never comes: deadlock"))
    if stuck:
        _, rank, step, reason = min(stuck)
        raise _fail(ranks, rank, step, reason)
