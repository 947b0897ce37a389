"""What a chunk needs, by number: the quantities of a stage problem."""

from __future__ import annotations

from enum import IntEnum


class Q(IntEnum):
    """The quantities of a chunk: seconds of its actions, then bytes."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    LAST_BACKWARD = 4
    LAST_BACKWARD_WEIGHT = 5
    END = 6  # the last backward and what is then left of the reduction
    END_WEIGHT = 7  # likewise the last weight gradients
    STEP = 8
    SEND = 9
    TIED = 10  # the exchange of gradients of tied tensors
    REDUCE = 11  # what is left of the reduction after the last backward, alone
    REDUCE_AFTER_WEIGHT = 12  # likewise after the last weight gradients
    STATE = 13
    SAVED = 14
    WEIGHT_SAVED = 15
    FORWARD_PEAK = 16
    BACKWARD_PEAK = 17
    WEIGHT_PEAK = 18
    HOST_STATE = 19  # in the memory of the host: of the optimizer, and of one micro-batch
    HOST_SAVED = 20
