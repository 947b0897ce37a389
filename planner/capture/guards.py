"""What code asks of numbers that nobody knows and that decides nothing: checks of data, which hold in training, and numbers that
are written down (a loss in a log)."""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import Any

from autoparallel.planner.capture.errors import UntraceableError

VALUES = "its control flow depends on the values of a tensor"
_BETWEEN = frozenset(
    {"CACHE", "PRECALL", "TO_BOOL", "NOP"}
)  # an instruction that asks and the jump by its answer
_ENDS = frozenset({"RAISE_VARARGS", "RERAISE"})
_OURS = ("autoparallel.", "torch.")


def that_holds() -> bool | None:
    """The answer with which the model's code goes on where it asks for one and raises an error by the other: `assert x.max() < 10`,
    `if loss.isnan(): raise ...`. None: both go on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_OURS):
        frame = frame.f_back
    return None if frame is None else _going_on(frame.f_code, frame.f_lasti)


def _going_on(code: CodeType, at: int) -> bool | None:
    steps = [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN or step.offset == at]
    place = next((n for n, step in enumerate(steps) if step.offset == at), len(steps))
    inverted = False
    if place < len(steps) and "JUMP" not in steps[place].opname:
        place += 1
    while place < len(steps) and steps[place].opname == "UNARY_NOT":
        place, inverted = place + 1, not inverted
    if place >= len(steps) or "_IF_" not in steps[place].opname or "NONE" in steps[place].opname:
        return None
    jump = steps[place]
    jumps_if = jump.opname.endswith("TRUE")
    target = next((n for n, step in enumerate(steps) if step.offset == jump.argval), len(steps))
    on, off = _all_raises(steps[place + 1 : target]), _raises(steps[target:])
    if on == off:
        return None
    return (jumps_if if on else not jumps_if) != inverted


def _all_raises(steps: list[dis.Instruction]) -> bool:
    """Whether what stands before a jump's target never gets there: it ends in an error, and no jump leaves it."""
    places = {step.offset for step in steps}
    jumps = (step for step in steps if "JUMP" in step.opname)
    return bool(steps) and steps[-1].opname in _ENDS and all(step.argval in places for step in jumps)


def _raises(steps: list[dis.Instruction]) -> bool:
    """Whether what follows ends in an error before it branches."""
    for step in steps:
        if step.opname in _ENDS:
            return True
        if "JUMP" in step.opname or step.opname.startswith(("RETURN", "FOR_ITER", "YIELD")):
            return False
    return False


class Unknown(float):
    """A number that nobody knows. It may be shown, kept, computed with and multiplied with tensors; what asks how large it is gets
    an error."""

    def __new__(cls) -> Unknown:
        return super().__new__(cls, "nan")

    def _more(self, *_: Any) -> Unknown:
        return Unknown()

    def _asked(self, *_: Any) -> Any:
        if (answer := that_holds()) is not None:
            return answer
        raise UntraceableError(VALUES)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _more
    __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = __round__ = __mod__ = __floordiv__ = _more  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _asked
    __int__ = __trunc__ = __floor__ = __ceil__ = _asked
    __hash__ = float.__hash__
