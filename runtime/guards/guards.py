"""`Guards`: everything in this room around the steps of one run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from autoparallel.planner.strategy.islands import is_local
from autoparallel.runtime.guards.checksums import Checksums
from autoparallel.runtime.guards.deadline import Deadline, Until, check_alike, from_peers
from autoparallel.runtime.guards.numbers import NotANumber, all_numbers, check_policy, culprits
from autoparallel.runtime.guards.status import StatusFile
from autoparallel.runtime.ranks.agreement import Agreement

# Until the first steps are done a step may take this long: kernels are compiled, connections made. Kind: choice.
FIRST_S = 1800.0
# Then so many times the median step, and no less than this. Kind: choice; a step that saves or evaluates takes several.
TIMES, LEAST_S = 20.0, 60.0
_STEPS_SEEN = 3


class Verdict(Enum):
    """What becomes of a step."""

    TAKE = "take"
    SKIP = "skip"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardOptions:
    """What is guarded. `not_a_number`: what becomes of a step whose loss or gradient is NaN or infinite: "stop" (an error
    that names the rank and its samples), "skip" (the batch is left out), "roll-back" (to the last checkpoint, and the
    batch is left out). Replicas (but those that train by themselves, `[outer]`) are compared bit by bit every `checksums_every` steps (0: never) and before a checkpoint is
    saved; `exact=False`: by their norms. A step may take `timeout_s` (None: as long as some rank begins an action within the
    strategy's `recovery.timeout_s`; where it has none, twenty times the median step, at least a minute). `ragged`: ranks may be fed other shapes than each other."""

    not_a_number: str = "stop"
    checksums_every: int = 100
    exact: bool = True
    timeout_s: float | None = None
    ragged: bool = False

    def __post_init__(self) -> None:
        check_policy(self.not_a_number)

    @property
    def lost_after_s(self) -> float:
        """Seconds without a sign of life after which a rank is lost that the others wait for, however long they do."""
        return self.timeout_s or LEAST_S


class Guards:
    """Around the steps of `model`: see the room's first page. `say` gets what a person should read, on rank 0."""

    def __init__(
        self, model: Any, everyone: Agreement, status: StatusFile, deadline: Deadline, options: GuardOptions,
        say: Callable[[str], None], action_timeout_s: float = 0.0,
    ) -> None:  # fmt: skip
        self._all, self._status, self._options, self._say = everyone, status, options, say
        self._deadline = deadline
        self._action_timeout_s = action_timeout_s
        self.follow(model)

    def follow(self, model: Any) -> None:
        """From now on this is the model whose steps are guarded. Collective."""
        self._model = model
        self._seconds: list[float] = []
        replica = model.data_parallel_rank // model.strategy.mesh.dp_shard
        self._checksums = Checksums(
            model.named_parameters(), self._all, exact=self._options.exact,
            island=replica if is_local(model.strategy) else None,
        )  # fmt: skip

    @contextmanager
    def around(self) -> Iterator[None]:
        """What is raised inside because of another rank says which; what is this rank's own is told to the others."""
        try:
            yield
        except Exception as error:
            self._deadline.over()
            if from_peers(error):
                raise self._deadline.broken(error) from error
            said = str(error).splitlines()[0] if str(error) else ""
            self._status.failed(f"{type(error).__name__}: {said}")
            raise

    def begin(self, step: int, batch: Any) -> None:
        """A step begins; raises on every rank where ranks are fed different shapes."""
        self._deadline.begin(self.timeout_s, Until.NO_ACTION if self._by_action else Until.OVER)
        if self._options.ragged:
            return
        leaves = tree_flatten_with_path(batch)[0]
        shapes = [(tuple(leaf.shape), str(leaf.dtype)) for _, leaf in leaves if isinstance(leaf, Tensor)]
        if self._all.ranks > 1:
            code = float(int.from_bytes(hashlib.sha256(repr(shapes).encode()).digest()[:6], "little"))
            most, least = self._all.most(code, -code)
            if most != -least:
                hint = "feed every rank alike, or GuardOptions(ragged=True)"
                check_alike(self._all, {f"the shapes of the samples in step {step}": shapes}, hint=hint)

    @property
    def _by_action(self) -> bool:
        """Whether a step may take as long as it likes while actions begin."""
        known = self._action_timeout_s > 0 and len(self._seconds) >= _STEPS_SEEN
        return known and self._options.timeout_s is None

    @property
    def timeout_s(self) -> float:
        """Seconds that a step may take."""
        if self._options.timeout_s is not None:
            return self._options.timeout_s
        if len(self._seconds) < _STEPS_SEEN:
            return FIRST_S
        if self._by_action:
            return self._action_timeout_s
        return max(TIMES * median(self._seconds[-100:]), LEAST_S)

    def judge(self, step: int, loss: float, own_losses: list[Tensor], ids: list[int]) -> Verdict:
        """After the backward pass: whether the optimizer may use it. Raises NotANumber where the policy is to stop."""
        fine = all_numbers(loss, self._model.parameters())
        if not self._all.most(float(not fine))[0]:
            due = self._options.checksums_every and step % self._options.checksums_every == 0
            return Verdict.ROLL_BACK if due and not self.equal(step) else Verdict.TAKE
        odd = not all(math.isfinite(float(value)) for value in own_losses)
        found = self._all.gathered((odd, ids if odd else [], culprits(self._model.named_parameters())[:1]))
        text = f"step {step}: {_in_words(found)}"
        if self._options.not_a_number == "stop":
            raise NotANumber(
                f'{text}; look at these samples, lower the learning rate, or let GuardOptions(not_a_number="skip" or '
                '"roll-back") leave the batch out'
            )
        self._say(
            f"{text}; {'the batch is left out' if self._options.not_a_number == 'skip' else 'going back to the last checkpoint'}"
        )
        return Verdict.SKIP if self._options.not_a_number == "skip" else Verdict.ROLL_BACK

    def equal(self, step: int) -> bool:
        """Whether all replicas are equal; those that are not are told."""
        differences = self._checksums.find() if self._checksums.useful else []
        for difference in differences[:3]:
            self._say(
                f"step {step}: {difference}; going back to the last checkpoint. Have that device checked"
            )
        return not differences

    def end(self, seconds: float) -> None:
        """The step is over."""
        self._deadline.over()
        self._seconds.append(seconds)

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """What is inside waits for other ranks, and may take as long as a step."""
        self._deadline.begin(self.timeout_s)
        try:
            yield
        finally:
            self._deadline.over()

    def while_all_live(self) -> AbstractContextManager[None]:
        """What is inside waits for other ranks, and may take as long as it takes: until a rank is lost."""
        return self._deadline.while_all_live(self._options.lost_after_s)

    def close(self) -> None:
        """Stop watching."""
        self._deadline.close()
        self._status.close()


def _in_words(found: list[tuple[bool, list[int], list[str]]]) -> str:
    losses = [
        f"the loss of rank {rank} (samples {', '.join(map(str, ids))})"
        for rank, (odd, ids, _) in enumerate(found)
        if odd
    ]
    if losses:
        return f"{' and '.join(losses[:3])} is not a number"
    gradients = [f"{names[0]} on rank {rank}" for rank, (_, _, names) in enumerate(found) if names]
    return f"the gradient of {', '.join(gradients[:3]) or 'some parameter'} is not a number"
